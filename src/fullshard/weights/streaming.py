"""`iter_full()`: stream the full tensors of a model, one bucket per all-gather, with the next buckets in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard.core import (
    CollectiveCall,
    Extent,
    ParamGroup,
    ParamSharding,
    ShardedParameter,
    StartedWork,
    Unit,
    all_gather_full,
    group_class,
)
from fullshard.errors import StateError, check_bool, check_float_dtype, check_int
from fullshard.weights.allocating import check_values, has_marks
from fullshard.weights.boxes import ModelTensor
from fullshard.weights.ema import EMA
from fullshard.weights.key_map import ComputedTensor, KeyMap, MappedTensor, Source, cast_dtype, map_keys
from fullshard.weights.targets import ModelEntry, ModelTensors, tensors_of, with_values

To = str | int | dist.ProcessGroup


def iter_full(
    model: nn.Module,
    *,
    bucket_bytes: int | None = None,
    dtype: torch.dtype | None = None,
    key_map: KeyMap = None,
    to: To = "all",
    ahead: int = 1,
    copy: bool = False,
    weights: EMA | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the full tensors of a model one by one, for example to send them to an inference engine. Collective.

    Shards are cast, then all-gathered in buckets, one collective each. While the caller uses one bucket, the next ones are in
    flight. Peak memory is 1 + `ahead` buckets plus the largest tensor. Parameters that this rank holds in full (ignored,
    replicated, or unsharded at the moment in this dtype) are not all-gathered.

    Args:
        model: sharded or not.
        bucket_bytes: bytes of full tensors in one collective; a larger tensor has a collective of its own. None means 512 MiB
            on an accelerator and 8 MiB on the CPU, where writing to reused memory is faster than writing to new memory.
        dtype: dtype of floating-point tensors; None keeps the dtype of the shards.
        key_map: as in `save_weights`, from names of the model to names of the engine. Tensors that rules join or compute are
            copies.
        to: ranks that receive the tensors: "all", a global rank, or a process group. The others take part in the collectives
            and yield nothing.
        ahead: number of buckets in flight besides the bucket in use.
        copy: give each tensor its own memory. Otherwise a tensor may be a view of its bucket: use it before the next bucket
            begins. A view keeps the memory of its bucket alive.
        weights: averages to yield instead of the parameters of the model.

    Returns:
        An iterator of (name, full tensor), on the device of the mesh. All ranks must exhaust it, or leave it at the same
        tensor.

    Raises:
        ValueError: if an option is invalid or rules do not fit the model.
        StateError: inside a forward or backward; if a tensor was written after the iteration began; or if ranks gather
            different buckets, since their options or rules differ.

    Example:
        >>> for name, tensor in iter_full(model, dtype=torch.bfloat16):                       # doctest: +SKIP
        ...     engine.load_weights([(name, tensor)])
    """
    for name, value, least in (("bucket_bytes", 1 if bucket_bytes is None else bucket_bytes, 1), ("ahead", ahead, 0)):
        check_int(name, value, least=least)
    check_float_dtype("dtype", dtype, optional=True)
    if weights is not None and not isinstance(weights, EMA):
        raise ValueError(f"weights must be an EMA or None, got {type(weights).__name__}.")
    check_bool("copy", copy)
    receives = _receives(to)

    def prepare(unit: Unit) -> None:
        unit.check_idle(doing="iter_full()")
        unit.refresh()

    tensors = tensors_of(model, prepare=prepare)
    # Collective, so that all ranks raise if one of them has a tensor without values.
    if has_marks(model, tensors.units):
        tensors.agreement("iter_full()").run(lambda: check_values(model, tensors.units, "iter_full()"))
    if weights is not None:
        tensors = with_values(tensors, weights.values())
    entries = {one.target.name: one for one in tensors.entries}
    mapped = map_keys(key_map, {name: MappedTensor.of(one.target) for name, one in entries.items()})
    if bucket_bytes is None:
        bucket_bytes = 512 << 20 if any(unit.axis.device.type != "cpu" for unit in tensors.units) else 8 << 20
    buckets = list(_buckets(mapped, bucket_bytes, dtype))
    owners = _owners(tensors)
    return _stream([_Bucket(outputs, entries, owners, dtype) for outputs in buckets], ahead=ahead, receives=receives, copy=copy)


def _receives(to: To) -> bool:
    """Return True if this rank receives the tensors."""
    if to == "all":
        return True
    if to is dist.GroupMember.NON_GROUP_MEMBER:  # what new_group() returns on ranks outside of the group
        return False
    if isinstance(to, int) and not isinstance(to, bool):
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if not 0 <= to < ranks:
            raise ValueError(f"to must be a global rank, 0 to {ranks - 1}, got {to}.")
        return to == rank
    if isinstance(to, dist.ProcessGroup):
        return dist.get_rank(to) >= 0
    raise ValueError(f"to must be 'all', a global rank as an int, or a process group, got {to!r}")


def _stream(buckets: Sequence[_Bucket], *, ahead: int, receives: bool, copy: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of all buckets, with up to `ahead` further buckets in flight."""
    # Versions of all buckets are recorded before the first collective, so that no bucket has the weights of a later step.
    for bucket in buckets:
        bucket.note_versions()
    waiting = deque(buckets)
    in_flight: deque[_Bucket] = deque()
    try:
        while waiting or in_flight:
            while waiting and len(in_flight) <= ahead:
                waiting[0].start()  # if this raises, the bucket must not be in flight: `finally` would wait for it
                in_flight.append(waiting.popleft())
            bucket = in_flight[0]  # it stays in the deque while the caller uses it, so that `finally` retires it as well
            bucket.finish()
            if receives:
                yield from bucket.tensors(copy)
            in_flight.popleft().retire()
    finally:
        # The caller may stop early. Collectives that were started must complete before their memory is freed.
        for bucket in in_flight:
            bucket.finish()
            bucket.retire()


# --- buckets ---


def _model_tensors(mapped: MappedTensor) -> Iterator[ModelTensor]:
    for source in dict.fromkeys(piece.source for piece in mapped.pieces):
        yield from _model_tensors_of(source)


def _model_tensors_of(source: Source) -> Iterator[ModelTensor]:
    if isinstance(source, ModelTensor):
        yield source
    elif isinstance(source, ComputedTensor):
        for mapped in source.inputs:
            yield from _model_tensors(mapped)


def _buckets(state: dict[str, MappedTensor], limit: int, dtype: torch.dtype | None) -> Iterator[list[tuple[str, MappedTensor]]]:
    """Group outputs into buckets that need about `limit` bytes of model tensors.

    Outputs that share a model tensor are in one bucket, so each model tensor is all-gathered once.
    """
    last: dict[str, int] = {}  # by model tensor: the last output that needs it
    outputs = list(state.items())
    for number, (_, mapped) in enumerate(outputs):
        last |= {source.name: number for source in _model_tensors(mapped)}
    bucket: list[tuple[str, MappedTensor]] = []
    cluster: list[tuple[str, MappedTensor]] = []  # outputs that must share a bucket
    bucket_bytes: dict[str, int] = {}  # bytes by model tensor, for `bucket`
    cluster_bytes: dict[str, int] = {}  # bytes by model tensor, for `cluster`
    for number, output in enumerate(outputs):
        cluster.append(output)
        for source in _model_tensors(output[1]):
            cluster_bytes[source.name] = prod(source.shape) * cast_dtype(source.dtype, dtype).itemsize
        if any(last[name] > number for name in cluster_bytes):
            continue  # a later output needs one of these tensors: the cluster is not complete
        if bucket and sum(bucket_bytes.values()) + sum(cluster_bytes.values()) > limit:
            yield bucket
            bucket, bucket_bytes = [], {}
        bucket, bucket_bytes = [*bucket, *cluster], {**bucket_bytes, **cluster_bytes}
        cluster, cluster_bytes = [], {}
    if bucket:
        yield bucket


Owner = tuple[Unit, ParamGroup]
"""The unit and the parameter group of a parameter."""


def _owners(tensors: ModelTensors) -> dict[int, Owner]:
    """Return the owner of each sharded parameter, by `id(parameter)`."""
    return {id(p): (unit, group) for unit in tensors.units for group in unit.groups for p in group.parameters}


# --- collectives ---


class _AllGather:
    """One all-gather of parameters that share a shard axis and a dtype.

    Large parameters are all-gathered directly into their own memory; the others are packed into one staging buffer. A packed
    parameter is copied out only when it is used, so that memory never holds two copies of a bucket.
    """

    def __init__(self, members: Sequence[ModelEntry], owner: Owner, dtype: torch.dtype) -> None:
        self.members, self._dtype = members, dtype
        self._unit, self._group = owner
        self._direct: dict[str, Tensor] = {}  # full tensors, by name
        self._packed: dict[str, tuple[ParamSharding, int]] = {}  # sharding and offset in a row of the staging buffer, by name
        self._staging = torch.empty(0)  # (ranks, elements): one row per rank
        self._work: CollectiveCall | None = None

    def start(self) -> None:
        """Copy and cast the shards, and start the all-gather."""
        group, communicator = self._group, self._unit.runtime.communicator
        least = group.storage.direct.min_chunk
        packed: list[ModelEntry] = []
        transfers: list[tuple[Tensor, Tensor]] = []
        for entry in self.members:
            sharding = _parameter(entry).sharding
            if sharding.dim == 0 and _chunk_numel(sharding) * self._dtype.itemsize >= least:
                transfers.append(self._prepare_direct(entry))
            else:
                packed.append(entry)
        if packed:
            transfers.append(self._pack(packed))
        # Without empty outputs. An output has the same size on all ranks, so all ranks leave out the same ones.
        outs, shards = [out for out, _ in transfers if out.numel()], [shard for out, shard in transfers if out.numel()]
        begin = group.collectives.whole.gatherer(outs, shards) if outs else StartedWork
        # With the names and the dtype, so that ranks whose options differ diverge here and do not mix tensors.
        names = [entry.target.name for entry in self.members]
        averages = any(entry.value is not None for entry in self.members)
        digest = crc32(repr((names, self._dtype, averages)).encode("utf-8", "backslashreplace"))
        action = f"iter_full() of {len(names)} tensors ('{names[0]}', ...; {self._dtype}; {digest:08x})"
        self._work = communicator.send(communicator.all_gather_stream, group.fingerprints, action, begin)

    def _prepare_direct(self, entry: ModelEntry) -> tuple[Tensor, Tensor]:
        """Return (all-gather output, all-gather input) of one parameter: the full tensor, padded, and this rank's chunk."""
        gather = self._group.collectives.whole
        local, size = entry.local, _chunk_numel(_parameter(entry).sharding)
        out = torch.empty(gather.ranks * size, dtype=self._dtype, device=self._group.storage.device)
        self._direct[entry.target.name] = out[: prod(entry.target.shape)].view(entry.target.shape)
        if local.dtype == self._dtype and local.device == out.device and local.numel() == size:
            return out, local.view(-1)  # no cast and no padding: send the shard itself, without a copy
        own = out[gather.rank * size :][:size]
        own[: local.numel()].view(local.shape).copy_(local)
        return out, own

    def _pack(self, members: Sequence[ModelEntry]) -> tuple[Tensor, Tensor]:
        """Return (all-gather output, all-gather input) of several parameters, packed one after another."""
        gather, row_numel = self._group.collectives.whole, 0
        for entry in members:
            sharding = _parameter(entry).sharding
            self._packed[entry.target.name] = sharding, row_numel
            row_numel += -(-_chunk_numel(sharding) // _ALIGNED) * _ALIGNED
        self._staging = torch.empty(gather.ranks, row_numel, dtype=self._dtype, device=self._group.storage.device)
        own_row, shards = self._staging[gather.rank], [entry.local for entry in members]
        begins = [begin for _, begin in self._packed.values()]
        into = [own_row[begin:][: shard.numel()].view(shard.shape) for begin, shard in zip(begins, shards)]
        torch._foreach_copy_(into, shards)
        return self._staging.view(-1), own_row

    def finish(self) -> None:
        """Wait for the all-gather."""
        assert self._work is not None
        self._work.wait()

    def value(self, name: str) -> Tensor:
        """Return the full tensor `name`."""
        return self._direct[name] if name in self._direct else self._unpacked(*self._packed[name])

    def _unpacked(self, sharding: ParamSharding, begin: int) -> Tensor:
        """Return the full tensor whose chunks begin at `begin` in each row of the staging buffer."""
        shape, dim, chunk = sharding.local_shape, sharding.dim, sharding.extent.chunk
        ranks, chunks = len(self._staging), self._staging[:, begin : begin + _chunk_numel(sharding)]
        if dim == 0:
            return chunks.reshape(-1)[: prod(shape)].view(shape)  # all padding is at the end, after the rows of the last rank
        if shape[dim] == ranks * chunk:
            return chunks.view(ranks, *shape[:dim], chunk, *shape[dim + 1 :]).movedim(0, dim).reshape(shape)
        rows = [Extent.of_rank(shape[dim], ranks=ranks, rank=rank).rows for rank in range(ranks)]
        part_shapes = [(*shape[:dim], count, *shape[dim + 1 :]) for count in rows]
        return torch.cat([part[: prod(part_shape)].view(part_shape) for part, part_shape in zip(chunks, part_shapes)], dim)

    def retire(self) -> None:
        """Free the memory."""
        self._direct, self._packed, self._staging = {}, {}, torch.empty(0)


_ALIGNED = 64  # packed chunks begin at multiples of this many elements


def _chunk_numel(sharding: ParamSharding) -> int:
    """Return the number of elements that every rank sends for a parameter, padding included."""
    return sharding.extent.chunk * prod(sharding.local_shape) // max(1, sharding.local_shape[sharding.dim])


class _Bucket:
    """Some outputs, and the model tensors that they need."""

    def __init__(
        self,
        outputs: Sequence[tuple[str, MappedTensor]],
        entries: dict[str, ModelEntry],
        owners: dict[int, Owner],
        dtype: torch.dtype | None,
    ) -> None:
        self._outputs, self._owners, self._dtype = outputs, owners, dtype
        names = dict.fromkeys(source.name for _, mapped in outputs for source in _model_tensors(mapped))
        self._entries = [entries[name] for name in names]
        self._all_gathers: list[_AllGather] = []
        self._values: dict[str, Callable[[], Tensor]] | None = None  # functions that return full tensors; None before finish()
        self._single: list[ModelEntry] = []  # all-gathered one by one, in finish()
        self._versions: dict[str, int] = {}

    def note_versions(self) -> None:
        """Record the versions of the model tensors, to detect writes during the iteration."""
        self._versions = {entry.target.name: _version(entry) for entry in self._entries}

    def _check_unwritten(self, entries: Iterable[ModelEntry]) -> None:
        for one in entries:
            if _version(one) != self._versions[one.target.name]:
                raise StateError(
                    f"'{one.target.name}' was written during iter_full(), for example by optimizer.step(), so tensors of two "
                    "steps would be mixed. Exhaust the iterator before the next step."
                )

    @torch.no_grad()
    def start(self) -> None:
        """Start the all-gathers."""
        self._check_unwritten(self._entries)
        kinds: dict[tuple[int, torch.dtype], list[ModelEntry]] = {}
        for entry in self._entries:
            transport = _transport(entry, self._output_dtype(entry))
            if transport == "bucket":
                _, group = self._owners[id(entry.parameter)]
                kinds.setdefault((id(group.collectives.whole.inner), self._output_dtype(entry)), []).append(entry)
            elif transport == "single":
                self._single.append(entry)
        for (_, dtype), members in kinds.items():
            all_gather = _AllGather(members, self._owners[id(members[0].parameter)], dtype)
            all_gather.start()
            self._all_gathers.append(all_gather)

    def _output_dtype(self, entry: ModelEntry) -> torch.dtype:
        return cast_dtype(entry.target.dtype, self._dtype)

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the all-gathers and prepare the full tensors. A second call does nothing."""
        if self._values is not None:
            return
        self._values = {}
        for all_gather in self._all_gathers:
            all_gather.finish()
            self._values |= {one.target.name: partial(all_gather.value, one.target.name) for one in all_gather.members}
        for entry in self._single:
            parameter = _parameter(entry)
            agreement = self._owners[id(parameter)][0].agreement("iter_full()")
            sharded: Any = parameter.sharded if entry.value is None else parameter.dtensor_like_shard(entry.value)
            full = all_gather_full(agreement, parameter.sharding, sharded).to(self._output_dtype(entry))
            self._values[entry.target.name] = partial(_identity, full)
        for entry in self._entries:
            if entry.target.name not in self._values:
                self._values[entry.target.name] = partial(_local_copy, entry, self._output_dtype(entry))

    def tensors(self, copy: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield the outputs."""
        values = self._values
        assert values is not None
        entries = {one.target.name: one for one in self._entries}
        for name, mapped in self._outputs:
            self._check_unwritten(entries[source.name] for source in _model_tensors(mapped))
            # No variable may refer to the output: it would stay alive while the next one is made.
            yield name, _output(mapped, values, self._dtype, copy)

    def retire(self) -> None:
        """Free the memory of the bucket."""
        self._values = None
        for all_gather in self._all_gathers:
            all_gather.retire()


def _version(entry: ModelEntry) -> int:
    """Return a number that grows when the tensor is written, or another one of its parameter group."""
    parameter, value = entry.parameter, entry.value
    if parameter is None or value is not None:
        return entry.local._version
    group = parameter.group()
    return 0 if group is None else group.version()


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def _parameter(entry: ModelEntry) -> ShardedParameter:
    """Return the sharded parameter of an entry that is known to have one."""
    assert entry.parameter is not None
    return entry.parameter


def _is_flat(parameter: ShardedParameter) -> bool:
    """Return True if the shard is part of a flat shard, without all-gather hooks of its own."""
    return group_class(parameter.local, parameter.sharding.axis).flat


def _transport(entry: ModelEntry, dtype: torch.dtype) -> str:
    """Return how the full tensor is obtained: in a "bucket" with others, "single", or "local", where this rank has it."""
    parameter = entry.parameter
    if parameter is None or _unsharded_now(entry, dtype) is not None:
        return "local"
    if not _is_flat(parameter) or parameter.sharding.tensor_parallel is not None:
        return "single"
    sharding = parameter.sharding
    return "local" if not sharding.shape or sharding.axis.group is None or sharding.axis.ranks == 1 else "bucket"


def _unsharded_now(entry: ModelEntry, dtype: torch.dtype) -> Tensor | None:
    """Return the unsharded parameter if the module has it at the moment, in this dtype; otherwise None."""
    parameter = entry.parameter
    if parameter is None or entry.value is not None or not parameter.sharding.is_plain or not _is_flat(parameter):
        return None  # all-gather hooks may return other values than those that are stored
    full = parameter.unsharded
    if full is None or parameter.current is not full or full.dtype != dtype:
        return None
    return full.detach()


def _local_copy(entry: ModelEntry, dtype: torch.dtype) -> Tensor:
    """Return a copy of a tensor that this rank holds in full, so that writes by the caller do not reach the model."""
    unsharded = _unsharded_now(entry, dtype)
    return entry.local.to(dtype, copy=True).view(entry.target.shape) if unsharded is None else unsharded.clone()


@torch.no_grad()
def _output(mapped: MappedTensor, values: Mapping[str, Callable[[], Tensor]], dtype: torch.dtype | None, copy: bool) -> Tensor:
    full = _assembled(mapped, values, dtype)
    return full.clone() if copy else full


def _assembled(mapped: MappedTensor, values: Mapping[str, Callable[[], Tensor]], dtype: torch.dtype | None) -> Tensor:
    """Assemble a tensor from its pieces: a view if there is one piece, else a copy."""
    if len(mapped.pieces) == 1:
        (piece,) = mapped.pieces
        source = _source(piece.source, values, dtype)
        return piece.view_as_mapped(source[piece.source_box(piece.at).slices()])
    if not mapped.pieces:  # no elements
        return torch.empty(mapped.shape, dtype=cast_dtype(mapped.dtype, dtype))
    full: Tensor | None = None
    for piece in mapped.pieces:
        part = piece.view_as_mapped(_source(piece.source, values, dtype)[piece.source_box(piece.at).slices()])
        if full is None:
            full = part.new_empty(mapped.shape)
        full[piece.at.slices()] = part
    assert full is not None
    return full


def _source(source: Source, values: Mapping[str, Callable[[], Tensor]], dtype: torch.dtype | None) -> Tensor:
    if isinstance(source, ComputedTensor):
        value = source.function(*(_assembled(one, values, dtype) for one in source.inputs))
        return value.to(cast_dtype(value.dtype, dtype))
    return values[source.name]()
