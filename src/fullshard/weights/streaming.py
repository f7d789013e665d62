"""`iter_full()`: full tensors one after the other, a bucket of them per message, the next ones under way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard import _torch
from fullshard.collectives.base import StartedWork
from fullshard.errors import StateError
from fullshard.params.extension import travels_alone
from fullshard.params.group import ParamGroup
from fullshard.params.sharded_param import ShardedParameter
from fullshard.runtime.communicator import TrackedWork
from fullshard.runtime.runtime import runtime_of
from fullshard.runtime.unit import Unit
from fullshard.sharding.layout import Extent
from fullshard.sharding.param_sharding import ParamSharding
from fullshard.weights.allocating import check_values, has_marks
from fullshard.weights.ema import EMA
from fullshard.weights.holdings import ModelTensor
from fullshard.weights.key_map import Computed, KeyMap, Mapped, Source, map_keys
from fullshard.weights.meeting import Meeting
from fullshard.weights.targets import Held, ModelTensors, standing_for, tensors_of

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
    """Yield the full tensors of a model one after the other, as an inference engine takes them. Collective.

    Tensors are cast before they are sent, and gathered in buckets, one message each; while one bucket is used, the next is
    under way: no more memory is taken than 1 + `ahead` buckets and the largest tensor. Parameters that this rank has whole
    (ignored, replicated, of a resident unit in this dtype) are not sent.

    Args:
        model: sharded or not.
        bucket_bytes: of full tensors in one message; a tensor that is larger has one of its own. None takes 512 MiB on an
            accelerator, and 8 MiB on the CPU, which writes to memory that it had before faster than to new memory.
        dtype: of floating-point tensors; None takes that of the shards.
        key_map: as of `save_weights`, from names of the model to those of the engine; what rules join or compute is a copy.
        to: "all" ranks, the number of one, or a process group: the others take part, and get nothing.
        ahead: how many buckets are gathered beside the one that is used.
        copy: whether each tensor has memory of its own. Otherwise it may be a part of its bucket, is to be used before the next
            bucket begins, and keeps its memory as long as it lives.
        weights: averages that stand for the model's own.

    Returns:
        An iterator of (name, full tensor), on the device of the mesh. All ranks go through it to the end, or leave it at the
        same place.

    Raises:
        ValueError: for rules that do not fit.
        StateError: inside a forward or backward; or before a tensor that was written since the first one.

    Example:
        >>> for name, tensor in iter_full(model, dtype=torch.bfloat16):                       # doctest: +SKIP
        ...     engine.load_weights([(name, tensor)])
    """
    for name, value, least in (("bucket_bytes", 1 if bucket_bytes is None else bucket_bytes, 1), ("ahead", ahead, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name} must be an int of at least {least}, got {value!r}")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype must be a floating-point torch.dtype or None, got {dtype!r}")
    gets = _is_for(to)
    tensors = tensors_of(model)
    for unit in tensors.units:
        runtime_of(unit).requests.check_idle(unit, doing="iter_full()")
        runtime_of(unit).requests.refresh_for_read(unit)
    tensors = tensors_of(model)
    if has_marks(model, tensors.units):
        Meeting(tensors, "iter_full()").run(lambda: check_values(model, tensors.units, "iter_full()"))
    if weights is not None:
        tensors = standing_for(tensors_of(model), weights.values())
    held = {one.target.name: one for one in tensors.held}
    mapped = map_keys(key_map, {name: Mapped.of(one.target) for name, one in held.items()})
    if bucket_bytes is None:
        bucket_bytes = 512 << 20 if any(unit.axis.device.type != "cpu" for unit in tensors.units) else 8 << 20
    buckets = list(_buckets(mapped, bucket_bytes, dtype))
    homes = _homes(tensors)
    return _run([_Bucket(outputs, held, homes, dtype) for outputs in buckets], ahead=ahead, gets=gets, copy=copy)


def _is_for(to: To) -> bool:
    if to == "all":
        return True
    if isinstance(to, int) and not isinstance(to, bool):
        return to == _torch.global_rank()
    if isinstance(to, dist.ProcessGroup):
        return dist.get_rank(to) >= 0
    raise ValueError(f"to must be 'all', the number of a rank, or a process group, got {to!r}")


def _run(buckets: Sequence[_Bucket], *, ahead: int, gets: bool, copy: bool) -> Iterator[tuple[str, Tensor]]:
    for bucket in buckets:
        bucket.note_versions()
    waiting = deque(buckets)
    under_way: deque[_Bucket] = deque()
    try:
        while waiting or under_way:
            while waiting and len(under_way) <= ahead:
                waiting[0].start()
                under_way.append(waiting.popleft())
            bucket = under_way[0]
            bucket.finish()
            if gets:
                yield from bucket.tensors(copy)
            under_way.popleft().retire()
    finally:
        for bucket in under_way:
            bucket.finish()
            bucket.retire()


# --- what goes together ---


def _sources(mapped: Mapped) -> Iterator[ModelTensor]:
    for source in dict.fromkeys(piece.source for piece in mapped.pieces):
        yield from _below(source)


def _below(source: Source) -> Iterator[ModelTensor]:
    if isinstance(source, ModelTensor):
        yield source
    elif isinstance(source, Computed):
        for mapped in source.inputs:
            yield from _sources(mapped)


def _buckets(state: dict[str, Mapped], limit: int, dtype: torch.dtype | None) -> Iterator[list[tuple[str, Mapped]]]:
    """Outputs whose tensors of the model have about `limit` bytes; outputs that share a tensor are together."""
    last: dict[str, int] = {}  # of each tensor of the model, the last output that needs it
    outputs = list(state.items())
    for number, (_, mapped) in enumerate(outputs):
        last |= {source.name: number for source in _sources(mapped)}
    found: list[tuple[str, Mapped]] = []
    cluster: list[tuple[str, Mapped]] = []
    needs: dict[str, int] = {}
    own: dict[str, int] = {}  # of the cluster
    for number, output in enumerate(outputs):
        cluster.append(output)
        own |= {s.name: prod(s.shape) * _wanted(s.dtype, dtype).itemsize for s in _sources(output[1])}
        if any(last[name] > number for name in own):
            continue
        if found and sum(needs.values()) + sum(own.values()) > limit:
            yield found
            found, needs = [], {}
        found, needs = [*found, *cluster], {**needs, **own}
        cluster, own = [], {}
    if found:
        yield found


def _wanted(stored: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    return stored if dtype is None or not stored.is_floating_point else dtype


@dataclass(frozen=True, slots=True, eq=False)
class _Home:
    """Where a parameter is gathered."""

    unit: Unit
    group: ParamGroup


def _homes(tensors: ModelTensors) -> dict[int, _Home]:
    return {id(p): _Home(unit, group) for unit in tensors.units for group in unit.groups for p in group.parameters}


# --- gathering ---


class _Message:
    """Parameters of one shard axis and dtype, in one gather: large ones straight into their memory, the others packed.

    A packed one is put together when it is asked for, so that no two copies of a bucket are there at a time.
    """

    def __init__(self, members: Sequence[Held], home: _Home, dtype: torch.dtype) -> None:
        self._members, self._home, self._dtype = members, home, dtype
        self._straight: dict[str, Tensor] = {}
        self._packed: dict[str, tuple[ParamSharding, int]] = {}  # and where each begins in what one rank sent
        self._staging = torch.empty(0)  # (ranks, elements)
        self._made: list[Tensor] = []  # only with `poison`
        self._work: TrackedWork | None = None

    def start(self) -> None:
        """Copy and cast the shards, and begin."""
        group, communicator = self._home.group, self._home.unit.runtime.communicator
        least = group.storage.direct.min_chunk
        packed: list[Held] = []
        ways: list[tuple[Tensor, Tensor]] = []
        for held in self._members:
            sharding = _parameter(held).sharding
            if sharding.dim == 0 and _chunk_numel(sharding) * self._dtype.itemsize >= least:
                ways.append(self._gather_straight(held))
            else:
                packed.append(held)
        if packed:
            ways.append(self._pack(packed))
        outs, shards = [out for out, _ in ways if out.numel()], [shard for out, shard in ways if out.numel()]
        begin = group.collectives.gather.gatherer(outs, shards) if outs else StartedWork
        self._work = communicator.send(communicator.gather_lane, group.fingerprints, "iter_full()", begin)

    def _gather_straight(self, held: Held) -> tuple[Tensor, Tensor]:
        """(what one parameter is gathered into, this rank's chunk of it)."""
        gather = self._home.group.collectives.gather
        local, size = held.local, _chunk_numel(_parameter(held).sharding)
        out = torch.empty(gather.ranks * size, dtype=self._dtype, device=self._home.group.storage.device)
        self._straight[held.target.name] = out[: prod(held.target.shape)].view(held.target.shape)
        if local.dtype == self._dtype and local.device == out.device and local.numel() == size:
            return out, local.view(-1)
        own = out[gather.rank * size :][:size]
        own[: local.numel()].view(local.shape).copy_(local)
        return out, own

    def _pack(self, members: Sequence[Held]) -> tuple[Tensor, Tensor]:
        """The same of several, behind each other."""
        gather, at = self._home.group.collectives.gather, 0
        for held in members:
            sharding = _parameter(held).sharding
            self._packed[held.target.name] = sharding, at
            at += -(-_chunk_numel(sharding) // _ALIGNED) * _ALIGNED
        self._staging = torch.empty(gather.ranks, at, dtype=self._dtype, device=self._home.group.storage.device)
        own, shards = self._staging[gather.rank], [held.local for held in members]
        begins = [at for _, at in self._packed.values()]
        torch._foreach_copy_([own[at:][: shard.numel()].view(shard.shape) for at, shard in zip(begins, shards)], shards)
        return self._staging.view(-1), own

    def finish(self) -> None:
        """Wait for it."""
        assert self._work is not None
        self._work.wait()

    def names(self) -> Iterator[str]:
        """Of its parameters."""
        yield from (*self._straight, *self._packed)

    def value(self, name: str) -> Tensor:
        """A full tensor of it."""
        made = self._straight[name] if name in self._straight else self._unpacked(*self._packed[name])
        if self._home.group.storage.poison:
            self._made.append(made)
        return made

    def _unpacked(self, sharding: ParamSharding, begin: int) -> Tensor:
        shape, dim, chunk = sharding.local_shape, sharding.dim, sharding.extent.chunk
        ranks, found = len(self._staging), self._staging[:, begin : begin + _chunk_numel(sharding)]
        if dim == 0:
            return found.reshape(-1)[: prod(shape)].view(shape)  # what the last ranks pad is behind it
        if shape[dim] == ranks * chunk:
            return found.view(ranks, *shape[:dim], chunk, *shape[dim + 1 :]).movedim(0, dim).reshape(shape)
        rows = [Extent.cut(shape[dim], ranks=ranks, rank=rank).rows for rank in range(ranks)]
        parts = [(*shape[:dim], many, *shape[dim + 1 :]) for many in rows]
        return torch.cat([row[: prod(part)].view(part) for row, part in zip(found, parts)], dim)

    def retire(self) -> None:
        """Let its memory go; with `poison`, tensors that a caller kept become NaN."""
        for value in self._made:
            value.fill_(float("nan") if value.is_floating_point() else 1)
        self._made, self._straight, self._packed, self._staging = [], {}, {}, torch.empty(0)


_ALIGNED = 64  # elements between which packed parameters begin


def _chunk_numel(sharding: ParamSharding) -> int:
    """Elements that every rank sends of a parameter, padding included."""
    return sharding.extent.chunk * prod(sharding.local_shape) // max(1, sharding.local_shape[sharding.dim])


class _Bucket:
    """Some outputs, and the tensors of the model that they are made of."""

    def __init__(
        self,
        outputs: Sequence[tuple[str, Mapped]],
        held: dict[str, Held],
        homes: dict[int, _Home],
        dtype: torch.dtype | None,
    ) -> None:
        self._outputs, self._homes, self._dtype = outputs, homes, dtype
        names = dict.fromkeys(source.name for _, mapped in outputs for source in _sources(mapped))
        self._held = [held[name] for name in names]
        self._messages: list[_Message] = []
        self._values: dict[str, Callable[[], Tensor]] | None = None
        self._alone: list[Held] = []  # gathered by torch when they are needed
        self._versions: dict[str, int] = {}

    def note_versions(self) -> None:
        """Remember the versions of its tensors: all buckets are to have the weights of one moment."""
        self._versions = {held.target.name: _version(held) for held in self._held}

    def _check_versions(self, held: Iterable[Held]) -> None:
        for one in held:
            if _version(one) != self._versions[one.target.name]:
                raise StateError(
                    f"'{one.target.name}' was written while iter_full() was under way, as by optimizer.step(), so tensors of "
                    "two steps would be mixed: go through all of them before the next step"
                )

    @torch.no_grad()
    def start(self) -> None:
        """Begin what has to be sent."""
        self._check_versions(self._held)
        kinds: dict[tuple[int, torch.dtype], list[Held]] = {}
        for held in self._held:
            way = _way(held, self._wanted(held))
            if way == "message":
                home = self._homes[id(held.parameter)]
                kinds.setdefault((id(home.group.collectives.gather), self._wanted(held)), []).append(held)
            elif way == "alone":
                self._alone.append(held)
        for (_, dtype), members in kinds.items():
            message = _Message(members, self._homes[id(members[0].parameter)], dtype)
            message.start()
            self._messages.append(message)

    def _wanted(self, held: Held) -> torch.dtype:
        return _wanted(held.target.dtype, self._dtype)

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for it."""
        if self._values is not None:
            return
        self._values = {}
        for message in self._messages:
            message.finish()
            self._values |= {name: partial(message.value, name) for name in message.names()}
        for held in self._alone:
            parameter = _parameter(held)
            setup = self._homes[id(parameter)].unit.setup_collectives("iter_full()")
            sharded: Any = parameter.sharded if held.value is None else parameter.dtensor_like_shard(held.value)
            full = setup.full(parameter.sharding, sharded).to(self._wanted(held))
            self._values[held.target.name] = partial(_as_is, full)
        for held in self._held:
            if held.target.name not in self._values:
                self._values[held.target.name] = partial(_whole, held, self._wanted(held))

    def tensors(self, copy: bool) -> Iterator[tuple[str, Tensor]]:
        """The outputs; no variable here holds one of them while the next is made."""
        values = self._values
        assert values is not None
        held = {one.target.name: one for one in self._held}
        for name, mapped in self._outputs:
            self._check_versions(held[source.name] for source in _sources(mapped))
            yield name, _output(mapped, values, self._dtype, copy)

    def retire(self) -> None:
        """It was used."""
        self._values = None
        for message in self._messages:
            message.retire()


def _version(held: Held) -> int:
    """Return a number that grows when the tensor is written."""
    parameter, value = held.parameter, held.value
    if parameter is None or value is not None:
        return held.local._version
    written: int = parameter.write_count + parameter.sharded._version + parameter.local._version
    return written


def _as_is(tensor: Tensor) -> Tensor:
    return tensor


def _parameter(held: Held) -> ShardedParameter:
    assert held.parameter is not None
    return held.parameter


def _way(held: Held, dtype: torch.dtype) -> str:
    """How the full tensor comes: by a "message" with others, "alone", or not at all, as it is "here"."""
    parameter = held.parameter
    if parameter is None or _resident(held, dtype) is not None:
        return "here"
    if travels_alone(parameter.local) or parameter.sharding.dense is not None:
        return "alone"
    sharding = parameter.sharding
    return "here" if not sharding.shape or sharding.axis.group is None or sharding.axis.ranks == 1 else "message"


def _resident(held: Held, dtype: torch.dtype) -> Tensor | None:
    """The full parameter, if its module has it now, in this dtype."""
    parameter = held.parameter
    if parameter is None or held.value is not None or not parameter.sharding.is_plain:
        return None
    full = parameter.full
    shown = full is not None and parameter.current is full and full.dtype == dtype
    return full.detach() if full is not None and shown else None


def _whole(held: Held, dtype: torch.dtype) -> Tensor:
    """Copy a tensor that this rank has whole, so that writes to it do not reach the model."""
    found = _resident(held, dtype)
    return held.local.to(dtype, copy=True).view(held.target.shape) if found is None else found.clone()


@torch.no_grad()
def _output(mapped: Mapped, values: Mapping[str, Callable[[], Tensor]], dtype: torch.dtype | None, copy: bool) -> Tensor:
    made = _made(mapped, values, dtype)
    return made.clone() if copy else made


def _made(mapped: Mapped, values: Mapping[str, Callable[[], Tensor]], dtype: torch.dtype | None) -> Tensor:
    """A tensor of the pieces that it has: one as it is, or a copy of several."""
    if len(mapped.pieces) == 1:
        (piece,) = mapped.pieces
        source = _source(piece.source, values, dtype)
        return piece.arranged(source[piece.in_source(piece.at).slices()])
    found: Tensor | None = None
    for piece in mapped.pieces:
        part = piece.arranged(_source(piece.source, values, dtype)[piece.in_source(piece.at).slices()])
        if found is None:
            found = part.new_empty(mapped.shape)
        found[piece.at.slices()] = part
    assert found is not None
    return found


def _source(source: Source, values: Mapping[str, Callable[[], Tensor]], dtype: torch.dtype | None) -> Tensor:
    if isinstance(source, Computed):
        value = source.function(*(_made(one, values, dtype) for one in source.inputs))
        return value.to(_wanted(value.dtype, dtype))
    return values[source.name]()


__all__ = ["iter_full"]
