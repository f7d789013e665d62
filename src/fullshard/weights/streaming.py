"""`iter_full()`: stream the full tensors of a model, one bucket per all-gather, with the next buckets in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from math import prod
from operator import itemgetter
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
    kind_of,
)
from fullshard.errors import StateError, check_bool, check_float_dtype, check_int
from fullshard.weights.allocating import check_values
from fullshard.weights.boxes import ModelTensor
from fullshard.weights.exchange import batches
from fullshard.weights.key_map import ComputedTensor, KeyMap, MappedTensor, Named, Source, State, cast_dtype, map_keys
from fullshard.weights.receiver import Receiver
from fullshard.weights.targets import ModelEntry, ModelTensors, OtherValues, tensors_of

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
    weights: OtherValues | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the full tensors of a model one by one, for example to send them to an inference engine. Collective.

    Shards are cast, then all-gathered in buckets, one collective each. While the caller uses one bucket, the next ones are in
    flight. Peak memory is 1 + `ahead` buckets plus the largest tensor. Parameters that this rank holds in full (ignored,
    replicated, or unsharded at the moment in this dtype) are not all-gathered.

    Args:
        model: sharded or not.
        bucket_bytes: bytes of full tensors in one collective; a larger tensor has a collective of its own. None means 512 MiB
            on an accelerator, and 8 MiB on the CPU, where writing to reused memory is faster than to new memory; 64 MiB there
            if not all ranks receive.
        dtype: dtype of floating-point tensors; None keeps the dtype of the shards.
        key_map: as in `save_weights`, from names of the model to names of the engine. Tensors that rules join or compute are
            copies.
        to: ranks that receive the tensors: "all", a global rank, or a process group. The others take part in the collectives
            and yield nothing. To a single rank each shard is sent once, and nothing to the others.
        ahead: number of buckets in flight besides the bucket in use.
        copy: give each tensor its own memory. Otherwise a tensor may be a view of its bucket: use it before the next bucket
            begins. A view keeps the memory of its bucket alive.
        weights: an EMA, or a sealed Version, to yield instead of the parameters of the model.

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
    if weights is not None and not isinstance(weights, OtherValues):
        raise ValueError(f"weights must be an EMA, a Version or None, got {type(weights).__name__}.")
    check_bool("copy", copy)
    is_receiver(to)
    tensors = tensors_of(model, prepare=lambda unit: unit.check_idle(doing="iter_full()"))
    check_values(model, tensors, "iter_full()")
    if weights is not None:
        tensors = weights.over(tensors)
    mapped = map_keys(key_map, tensors.state)
    return stream(tensors, mapped, dtype, to=to, ahead=ahead, bucket_bytes=bucket_bytes, copy=copy)


def stream(
    tensors: ModelTensors,
    mapped: State,
    dtype: torch.dtype | None,
    *,
    to: To,
    ahead: int,
    bucket_bytes: int | None,
    copy: bool = False,
    doing: str = "iter_full()",
) -> Iterator[tuple[str, Tensor]]:
    """Yield the full tensors `mapped`, made of the tensors of a model. The arguments are those of `iter_full`. Collective."""
    receives = is_receiver(to)
    entries = {one.target.name: one for one in tensors.entries}
    if bucket_bytes is None:
        on_cpu = all(unit.axis.device.type == "cpu" for unit in tensors.units)
        bucket_bytes = (8 << 20 if to == "all" else 64 << 20) if on_cpu else 512 << 20
    batched = batches(_clusters(mapped, dtype), bucket_bytes, itemgetter(1))
    planned = [[output for cluster, _ in batch for output in cluster] for batch in batched]
    receiver = None
    if isinstance(to, int) and to is not dist.GroupMember.NON_GROUP_MEMBER and tensors.units:
        names = [[(name, one.shape) for name, one in outputs] for outputs in planned]
        digest = _digest(names, dtype, ahead, _has_values(tensors.entries))
        receiver = Receiver(tensors, to, ahead + 1, f"{doing} of {len(mapped)} tensors to rank {to} ({dtype}; {digest})")
    buckets = deque(_Bucket(outputs, entries, dtype, receiver, doing) for outputs in planned)
    return _stream(buckets, ahead=ahead, receives=receives, copy=copy)


def is_receiver(to: To) -> bool:
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


def _stream(buckets: deque[_Bucket], *, ahead: int, receives: bool, copy: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of all buckets, with up to `ahead` further buckets in flight."""
    # Versions of all buckets are recorded before the first collective, so that no bucket has the weights of a later step.
    for bucket in buckets:
        bucket.note_versions()
    in_flight: deque[_Bucket] = deque()
    try:
        while buckets or in_flight:
            while buckets and len(in_flight) <= ahead:
                buckets[0].start()  # if this raises, the bucket must not be in flight: `finally` would wait for it
                in_flight.append(buckets.popleft())
            bucket = in_flight[0]  # it stays in the deque while the caller uses it, so that `finally` waits for it as well
            bucket.finish()
            if receives:
                yield from bucket.tensors(copy)
            in_flight.popleft()
            del bucket  # frees its memory before the next bucket starts
    finally:
        # The caller may stop early. Collectives that were started must complete before their memory is freed.
        for bucket in in_flight:
            bucket.finish()


# --- buckets ---


def _model_tensors(mapped: MappedTensor) -> Iterator[ModelTensor]:
    for source in dict.fromkeys(piece.source for piece in mapped.pieces):
        if isinstance(source, ModelTensor):
            yield source
        elif isinstance(source, ComputedTensor):
            for one in source.inputs:
                yield from _model_tensors(one)


def _clusters(state: State, dtype: torch.dtype | None) -> Iterator[tuple[list[Named], int]]:
    """Yield outputs that must share a bucket, so that each model tensor is gathered once, and the bytes of these tensors."""
    last: dict[str, int] = {}  # by model tensor: the last output that needs it
    outputs = list(state.items())
    for number, (_, mapped) in enumerate(outputs):
        last |= {source.name: number for source in _model_tensors(mapped)}
    cluster: list[Named] = []
    cluster_bytes: dict[str, int] = {}  # of the model tensors that `cluster` needs
    for number, output in enumerate(outputs):
        cluster.append(output)
        for source in _model_tensors(output[1]):
            cluster_bytes[source.name] = source.numel * cast_dtype(source.dtype, dtype).itemsize
        if any(last[name] > number for name in cluster_bytes):
            continue  # a later output needs one of these tensors: the cluster is not complete
        yield cluster, sum(cluster_bytes.values())
        cluster, cluster_bytes = [], {}


# --- collectives ---


Values = dict[str, Callable[[], Tensor]]
"""By name of a model tensor, a function that returns the full tensor."""

_ALIGNED = 64  # packed chunks begin at multiples of this many elements


def _start_all_gather(members: Sequence[ModelEntry], dtype: torch.dtype, doing: str) -> tuple[CollectiveCall, Values]:
    """Copy and cast shards of parameters that share a shard axis, and start one all-gather. The values come with it.

    Large parameters are all-gathered directly into their own memory; the others are packed into one staging buffer. A packed
    parameter is copied out only when it is used, so that memory never holds two copies of a bucket.
    """
    unit, group = _owner(members[0])
    values: Values = {}
    packed: list[ModelEntry] = []
    transfers: list[tuple[Tensor, Tensor]] = []  # (output, input)
    for entry in members:
        sharding = _parameter(entry).sharding
        if sharding.dim == 0 and _chunk_numel(sharding) * dtype.itemsize >= group.storage.direct.min_chunk:
            out, own = _direct(entry, group, dtype)
            transfers.append((out, own))
            values[entry.target.name] = out[: entry.target.numel].view(entry.target.shape).detach
        else:
            packed.append(entry)
    if packed:
        staging, own_row = _packed(packed, group, dtype, values)
        transfers.append((staging.view(-1), own_row))
    # Without empty outputs. An output has the same size on all ranks, so all ranks leave out the same ones.
    outs, shards = [out for out, _ in transfers if out.numel()], [shard for out, shard in transfers if out.numel()]
    begin = group.collectives.whole.gatherer(outs, shards) if outs else StartedWork
    # With the names and the dtype, so that ranks whose options differ diverge here and do not mix tensors.
    names = [entry.target.name for entry in members]
    action = f"{doing} of {len(names)} tensors ('{names[0]}', ...; {dtype}; {_digest(names, dtype, _has_values(members))})"
    communicator = unit.runtime.communicator
    return communicator.send(communicator.all_gather_stream, group.fingerprints, action, begin), values


def _has_values(entries: Iterable[ModelEntry]) -> bool:
    """Return True if other values than those of the model are gathered."""
    return any(entry.value is not None for entry in entries)


def _digest(*content: object) -> str:
    return f"{crc32(repr(content).encode('utf-8', 'backslashreplace')):08x}"


def _direct(entry: ModelEntry, group: ParamGroup, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return (all-gather output, all-gather input) of one parameter: the full tensor, padded, and this rank's chunk."""
    gather = group.collectives.whole
    local, size = entry.local, _chunk_numel(_parameter(entry).sharding)
    out = torch.empty(gather.ranks * size, dtype=dtype, device=group.storage.device)
    if local.dtype == dtype and local.device == out.device and local.numel() == size:
        return out, local.view(-1)  # no cast and no padding: send the shard itself, without a copy
    own = out[gather.rank * size :][:size]
    own[: local.numel()].view(local.shape).copy_(local)
    return out, own


def _packed(members: Sequence[ModelEntry], group: ParamGroup, dtype: torch.dtype, values: Values) -> tuple[Tensor, Tensor]:
    """Return (all-gather output with a row per rank, this rank's row) of several parameters, and add their values."""
    gather, begins = group.collectives.whole, [0]
    for entry in members:
        begins.append(begins[-1] + -(-_chunk_numel(_parameter(entry).sharding) // _ALIGNED) * _ALIGNED)
    staging = torch.empty(gather.ranks, begins[-1], dtype=dtype, device=group.storage.device)
    own_row, shards = staging[gather.rank], [entry.local for entry in members]
    into = [own_row[begin:][: shard.numel()].view(shard.shape) for begin, shard in zip(begins, shards)]
    torch._foreach_copy_(into, shards)
    for entry, begin in zip(members, begins):
        values[entry.target.name] = partial(_unpacked, staging, _parameter(entry).sharding, begin)
    return staging, own_row


def _unpacked(staging: Tensor, sharding: ParamSharding, begin: int) -> Tensor:
    """Return the full tensor whose chunks begin at `begin` in each row of the staging buffer."""
    shape, dim, chunk = sharding.local_shape, sharding.dim, sharding.extent.chunk
    ranks, chunks = len(staging), staging[:, begin : begin + _chunk_numel(sharding)]
    if dim == 0:
        return chunks.reshape(-1)[: prod(shape)].view(shape)  # all padding is at the end, after the rows of the last rank
    if shape[dim] == ranks * chunk:
        return chunks.view(ranks, *shape[:dim], chunk, *shape[dim + 1 :]).movedim(0, dim).reshape(shape)
    rows = [Extent.of_rank(shape[dim], ranks=ranks, rank=rank).rows for rank in range(ranks)]
    part_shapes = [(*shape[:dim], count, *shape[dim + 1 :]) for count in rows]
    return torch.cat([part[: prod(part_shape)].view(part_shape) for part, part_shape in zip(chunks, part_shapes)], dim)


def _chunk_numel(sharding: ParamSharding) -> int:
    """Return the number of elements that every rank sends for a parameter, padding included."""
    return sharding.extent.chunk * prod(sharding.local_shape) // max(1, sharding.local_shape[sharding.dim])


class _Bucket:
    """Some outputs, and the model tensors that they need."""

    def __init__(
        self,
        outputs: Sequence[Named],
        entries: dict[str, ModelEntry],
        dtype: torch.dtype | None,
        receiver: Receiver | None,
        doing: str,
    ) -> None:
        self._outputs, self._dtype, self._receiver, self._doing = outputs, dtype, receiver, doing
        self._entries = {source.name: entries[source.name] for _, mapped in outputs for source in _model_tensors(mapped)}
        self._all_gathers: list[CollectiveCall] = []
        self._single: list[ModelEntry] = []  # all-gathered one by one, in finish()
        self._arrive: Callable[[], dict[str, Tensor]] | None = None  # waits for the tensors that only the receiver gets
        self._values: Values = {}
        self._is_finished = False
        self._versions: dict[str, int] = {}

    def note_versions(self) -> None:
        """Record the versions of the model tensors, to detect writes during the iteration."""
        self._versions = {name: written_count(entry) for name, entry in self._entries.items()}

    def _check_unwritten(self, names: Iterable[str]) -> None:
        for name in names:
            if written_count(self._entries[name]) != self._versions[name]:
                raise StateError(
                    f"'{name}' was written during {self._doing}, for example by optimizer.step(), so tensors of two "
                    "steps would be mixed. Exhaust the iterator before the next step."
                )

    @torch.no_grad()
    def start(self) -> None:
        """Start the all-gathers."""
        self._check_unwritten(self._entries)
        kinds: dict[tuple[int, torch.dtype], list[ModelEntry]] = {}
        gathered: list[ModelEntry] = []
        for name, entry in self._entries.items():
            dtype = cast_dtype(entry.target.dtype, self._dtype)
            local, parameter = partial(_local_copy, entry, dtype), entry.parameter
            if self._receiver is not None and (parameter is None or kind_of(parameter).flat):
                gathered.append(entry)
            elif parameter is None or _unsharded_now(entry, dtype) is not None:
                self._values[name] = local
            elif not kind_of(parameter).flat or parameter.sharding.tensor_parallel is not None:
                self._single.append(entry)
            elif not parameter.sharding.shape or parameter.sharding.axis.group is None or parameter.sharding.axis.ranks == 1:
                self._values[name] = local
            else:
                kinds.setdefault((id(_owner(entry)[1].collectives.whole.inner), dtype), []).append(entry)
        for (_, dtype), members in kinds.items():
            all_gather, values = _start_all_gather(members, dtype, self._doing)
            self._all_gathers.append(all_gather)
            self._values |= values
        if self._receiver is not None:
            self._arrive = self._receiver.start(gathered, self._dtype)

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the all-gathers and prepare the full tensors. A second call does nothing."""
        if self._is_finished:
            return
        self._is_finished = True
        for all_gather in self._all_gathers:
            all_gather.wait()
        if self._arrive is not None:
            self._values |= {name: full.detach for name, full in self._arrive().items()}
        for entry in self._single:
            parameter = _parameter(entry)
            sharded: Any = parameter.sharded if entry.value is None else parameter.dtensor_like_shard(entry.value)
            full = all_gather_full(_owner(entry)[0].agreement(self._doing), parameter.sharding, sharded)
            full = full.to(cast_dtype(entry.target.dtype, self._dtype))
            self._values[entry.target.name] = full.detach

    @torch.no_grad()
    def _output(self, mapped: MappedTensor) -> Tensor:
        """Assemble a tensor from its pieces: a view if there is one piece, else a copy."""
        parts = (
            (piece.at, piece.view_as_mapped(self._source(piece.source)[piece.source_box(piece.at).slices()]))
            for piece in mapped.pieces
        )
        if len(mapped.pieces) == 1:
            return next(parts)[1]
        full: Tensor | None = None
        for at, part in parts:
            full = part.new_empty(mapped.shape) if full is None else full
            full[at.slices()] = part
        return torch.empty(mapped.shape, dtype=cast_dtype(mapped.dtype, self._dtype)) if full is None else full

    def _source(self, source: Source) -> Tensor:
        if isinstance(source, ComputedTensor):
            value = source.function(*map(self._output, source.inputs))
            return value.to(cast_dtype(value.dtype, self._dtype))
        return self._values[source.name]()

    def tensors(self, copy: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield the outputs."""
        for name, mapped in self._outputs:
            self._check_unwritten(source.name for source in _model_tensors(mapped))
            # No variable may refer to the output: it would stay alive while the next one is made.
            yield name, self._output(mapped).clone() if copy else self._output(mapped)


def written_count(entry: ModelEntry) -> int:
    """Return a number that grows when the tensor is written, or another one of its parameter group."""
    parameter, value = entry.parameter, entry.value
    if parameter is None or value is not None:
        return entry.local._version
    group = parameter.group()
    return 0 if group is None else group.version()


def _owner(entry: ModelEntry) -> tuple[Unit, ParamGroup]:
    """Return the unit and the parameter group of a sharded parameter."""
    unit, group = _parameter(entry).unit(), _parameter(entry).group()
    assert unit is not None and group is not None
    return unit, group


def _parameter(entry: ModelEntry) -> ShardedParameter:
    """Return the sharded parameter of an entry that is known to have one."""
    assert entry.parameter is not None
    return entry.parameter


def _unsharded_now(entry: ModelEntry, dtype: torch.dtype) -> Tensor | None:
    """Return the unsharded parameter if the module has it at the moment, in this dtype; otherwise None."""
    parameter = entry.parameter
    if parameter is None or entry.value is not None or not parameter.sharding.is_plain or not kind_of(parameter).is_exact:
        return None
    full = parameter.unsharded
    if full is None or parameter.current is not full or full.dtype != dtype:
        return None
    return full.detach()


def _local_copy(entry: ModelEntry, dtype: torch.dtype) -> Tensor:
    """Return a copy of a tensor that this rank holds in full, so that writes by the caller do not reach the model."""
    unsharded = _unsharded_now(entry, dtype)
    return entry.local.to(dtype, copy=True).view(entry.target.shape) if unsharded is None else unsharded.clone()
