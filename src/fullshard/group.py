"""Parameters that move together: flat shard, full storage, what gathers and reduces them, on whatever lane is current."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, log2
from typing import Any, Protocol

import torch
from torch import Tensor

from fullshard import _torch
from fullshard.comm import Allocate, Collectives, Journal, Pending, Ticket
from fullshard.extension import ExtensionSide, extends, own_shard
from fullshard.layout import Extent, GroupLayout, Piece, Place, plan_layout
from fullshard.parameter import ShardedParameter
from fullshard.policies import Dtypes, MixedPrecisionPolicy
from fullshard.schedule import StateError

_FLAT = "_fullshard_flat"  # on a gradient: the flat tensor all gradients of its group are views of


@dataclass(frozen=True, eq=False)
class Carriers:
    """Who carries the messages of a group. group n - 1 carriers.

    replicate: over the ranks that hold the same shards, None if there are none.
    retain: over the smaller group that keeps the parameters between forward and backward, None if none does.
    """

    gather: Collectives
    reduce: Collectives
    replicate: Collectives | None
    retain: Collectives | None
    journal: Journal

    @property
    def gather_memory(self) -> Allocate | None:
        """The caller's memory for gathers, None for our own."""
        return getattr(self.gather, "gather_memory", None)

    @property
    def reduce_memory(self) -> Allocate | None:
        return getattr(self.reduce, "reduce_memory", None)


@dataclass(frozen=True, slots=True)
class Storage:
    """Where a group's shards are kept and computed with, and how its messages are cut."""

    device: torch.device  # where parameters are gathered
    host: bool  # shards are kept in the host's memory, and travel to `device` for each gather
    pinned: bool
    direct_min_bytes: float
    poison: bool
    mp: MixedPrecisionPolicy

    @property
    def home(self) -> torch.device:
        """Where the shards are."""
        return torch.device("cpu") if self.host else self.device


class GatheredSide(Protocol):
    """What a group gathers into."""

    versions: list[int]

    def gathered(self, versions: list[int]) -> None: ...
    def holds(self, tensor: Tensor) -> bool: ...
    def grow(self) -> None: ...
    def start(self) -> Pending: ...
    def finish(self) -> None: ...
    def settle(self) -> None: ...
    def retain(self) -> None: ...
    def forget(self) -> None: ...
    def shrink(self) -> None: ...


def folds(whole: Tensor, blocks: Tensor, place: Place) -> tuple[list[Tensor], list[Tensor]]:
    """(parts of `whole`, the same parts of `blocks` (ranks, size)) of a parameter that is cut along another dim than 0."""
    ranks, length = blocks.shape[0], place.shape[place.dim]
    wholes: list[Tensor] = []
    parts: list[Tensor] = []
    for rank in range(ranks):
        extent = Extent.cut(length, ranks=ranks, rank=rank)
        if extent.rows:
            part = whole.narrow(place.dim, extent.start, extent.rows)
            wholes.append(part)
            parts.append(blocks[rank, : part.numel()].view(part.shape))
    return wholes, parts


@dataclass(frozen=True, slots=True, eq=False)
class _Storage:
    """Memory that comes and goes behind tensors that stay."""

    tensor: Tensor
    storage: torch.UntypedStorage
    nbytes: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Storage:
        return cls(tensor, tensor.untyped_storage(), tensor.untyped_storage().size())

    def grow(self) -> None:
        self.storage.resize_(self.nbytes)

    def shrink(self) -> None:
        self.storage.resize_(0)

    def poison(self) -> None:
        if self.tensor.numel():
            self.tensor.fill_(float("nan") if self.tensor.is_floating_point() else 1)


class FullSide:
    """The gathered side of a group, planned once: storage, views, and the prepared collective.

        shard views --(cast into own slot, or nothing)--> region of a large parameter     no copy
        shard range --> slot in staging (ranks, packed) --all-gather--> split_copy --> regions of the small ones

    Memory exists between `grow` and `shrink`; the Parameters made over it keep their identity, and their version
    counters move only when the weights behind them did.
    """

    def __init__(self, group: Group) -> None:
        layout, dtype, device = group.layout, group.dtypes.compute, group.storage.device
        self._journal, self._retainer = group.carriers.journal, group.carriers.retain
        self._poison = group.storage.poison
        self._flat = torch.empty(layout.full_numel, dtype=dtype, device=device)
        temporary: list[Tensor] = []
        self._home = group.shard
        self._arrived = group.shard
        if group.storage.host:
            self._arrived = torch.empty_like(group.shard, device=device, pin_memory=False)
            temporary.append(self._arrived)

        self._memory = group.carriers.gather_memory if layout.packed else None
        self._packed = layout.packed
        self._staging_numel = layout.ranks * layout.packed.size if layout.packed else 0
        self._collectives = group.carriers.gather
        self._staging = torch.empty(0 if self._memory else self._staging_numel, dtype=dtype, device=device)
        if self._staging.numel():
            temporary.append(self._staging)
        outs = [
            self._flat[bucket.pieces[0].region :][: layout.ranks * bucket.size] if bucket.direct else self._staging
            for bucket in layout.buckets
        ]
        self._shards = [self._arrived[bucket.offset : bucket.offset + bucket.size] for bucket in layout.buckets]
        self._gather: Callable[[], Pending] = Pending
        self._casts: tuple[list[Tensor], list[Tensor]] | None = None
        if self._memory is None and layout.full_numel:
            shards = self._shards
            if group.dtypes.storage != dtype:
                rank = group.carriers.gather.rank
                slots = [out[rank * bucket.size :][: bucket.size] for out, bucket in zip(outs, layout.buckets)]
                self._casts, shards = (slots, shards), slots
            self._gather = self._collectives.gatherer(outs, shards)

        self._sizes: list[int] = []
        self._regions: list[Tensor] = []
        self._folded: list[tuple[Tensor, Place, int]] = []  # (region, place, first column in the message)
        column = 0
        for piece in layout.packed.pieces if layout.packed else ():
            place = layout.places[piece.parameter] if piece.parameter >= 0 else None
            if place is not None and place.folded:
                if piece.size:
                    self._folded.append((self._apart(piece.region, place.shape), place, column))
            elif piece.size and not self._folded:
                self._sizes.append(piece.size)
                self._regions.append(self._apart(piece.region, (layout.ranks, piece.size)))
            column += piece.size
        self._views(self._staging)
        self.views = [self._apart(place.region, place.shape) for place in layout.places]
        self._storage = _Storage.of(self._flat)  # between `grow` and `shrink`
        self._temporary = [_Storage.of(tensor) for tensor in temporary]  # between `grow` and `settle`
        self.versions: list[int] = []  # of what was gathered last
        self._retained: Tensor | None = None
        self._from_retained = False
        self.shrink()

    def _views(self, staging: Tensor) -> None:
        """What is copied out of `staging` (ranks * packed,), and to where."""
        self._columns: Tensor | None = None
        self._unfold: tuple[list[Tensor], list[Tensor]] | None = None
        if not staging.numel():
            return
        packed = staging.view(self._collectives.ranks, -1)
        if self._sizes:
            self._columns = packed[:, : sum(self._sizes)]
        if self._folded:
            self._unfold = ([], [])
            for region, place, column in self._folded:
                wholes, parts = folds(region, packed[:, column : column + place.size], place)
                self._unfold[0].extend(wholes)
                self._unfold[1].extend(parts)

    def _apart(self, offset: int, shape: Sequence[int]) -> Tensor:
        """A tensor over the full storage that is no view of another, so that its version counter is its own."""
        empty = torch.empty(0, dtype=self._flat.dtype, device=self._flat.device)
        return empty.set_(self._flat.untyped_storage(), offset, tuple(shape))  # type: ignore[call-overload]

    def gathered(self, versions: list[int]) -> None:
        """These are the versions of the shards that this storage shows."""
        self.versions = versions
        self._retained = None

    def holds(self, tensor: Tensor) -> bool:
        return self._flat.numel() > 0 and _torch.is_over(tensor, self._flat.untyped_storage())

    def grow(self) -> None:
        self._storage.grow()
        if self._retained is None:
            for storage in self._temporary:
                storage.grow()
        if self._poison:
            for storage in (self._storage, *(self._temporary if self._retained is None else ())):
                storage.poison()

    def start(self) -> Pending:
        self._from_retained = self._retained is not None
        if self._retained is not None and self._retainer is not None:
            return self._retainer.gatherer([self._flat], [self._retained])()
        if self._arrived is not self._home and self._home.numel():
            self._journal.note("to_device", [self._home])
            self._arrived.copy_(self._home, non_blocking=True)
        if self._memory is not None:
            return self._start_in_their_memory(self._memory)
        if self._casts is not None:
            torch._foreach_copy_(*self._casts)
        return self._gather()

    def _start_in_their_memory(self, allocate: Callable[..., Tensor]) -> Pending:
        """The caller's all-gather works on memory that it allocates, for each gather anew."""
        self._staging = allocate((self._staging_numel,), dtype=self._flat.dtype, device=self._flat.device)
        slot = self._staging.view(self._collectives.ranks, -1)[self._collectives.rank]
        slot.copy_(self._shards[0])
        self._views(self._staging)
        return self._collectives.gatherer([self._staging], [slot])()

    def finish(self) -> None:
        if self._from_retained:
            return
        if self._columns is not None:
            _torch.split_copy(self._columns, self._sizes, self._regions)
        if self._unfold is not None:
            torch._foreach_copy_(*self._unfold)

    def settle(self) -> None:
        """The compute lane is ordered behind the gather: what only the gather needed can go."""
        self._retained = None
        for storage in self._temporary:
            storage.shrink()
        if self._memory is not None:
            self._staging = self._staging[:0].clone()
            self._views(self._staging)

    def retain(self) -> None:
        """Keep this rank's part of a smaller group's copy: one stretch of the full storage, whatever is in it."""
        if self._retainer is not None and self._flat.untyped_storage().size():
            parts = self._flat.view(self._retainer.ranks, -1)
            self._retained = parts[self._retainer.rank].clone()

    def forget(self) -> None:
        """Drop what was retained."""
        self._retained = None

    def shrink(self) -> None:
        self._storage.shrink()
        for storage in self._temporary:
            storage.shrink()


class Group:
    """group 1 - n buckets, group 1 - n parameters. Owns the flat shard (shard_numel,) and the full side.

    All its parameters share shard axis, dtypes, and whether they were trainable when it was made. A parameter whose
    tensor subclass gathers itself (`extension`) is a group of its own, without a flat shard.
    """

    def __init__(
        self,
        parameters: list[ShardedParameter],
        values: Sequence[Tensor],
        *,
        dtypes: Dtypes,
        carriers: Carriers,
        storage: Storage,
    ) -> None:
        self.parameters = parameters
        self.dtypes = dtypes
        self.carriers = carriers
        self.storage = storage
        itemsize = min(dtypes.storage.itemsize, dtypes.compute.itemsize)
        self.layout: GroupLayout = plan_layout(
            [tuple(p.cut.whole) for p in parameters],
            [p.cut.dim for p in parameters],
            ranks=carriers.gather.ranks,
            itemsize=itemsize,
            direct_min_bytes=storage.direct_min_bytes,
        )
        self.extension = extends(values[0])
        shard_numel = 0 if self.extension else self.layout.shard_numel
        self.shard = torch.zeros(shard_numel, dtype=dtypes.storage, device=values[0].device)
        if storage.pinned and self.shard.device.type == "cpu":
            self.shard = self.shard.pin_memory()
        for parameter, place, value in zip(parameters, self.layout.places, values):
            numel = value.numel()
            if self.extension:
                parameter.settle(own_shard(value, parameter.cut))
                continue
            local = self.shard[place.offset : place.offset + numel].view(parameter.cut.shard_shape)
            local.copy_(value)
            parameter.settle(local)
        self._full: GatheredSide | None = None
        self._installed = False
        self._copying: Ticket | None = None  # the last gather from the host's memory
        # Of each parameter's gradient in a flat one: local shape, its strides, offset.
        self._views = [
            (p.cut.shard_shape, _torch.contiguous_strides(p.cut.shard_shape), place.offset)
            for p, place in zip(parameters, self.layout.places)
        ]
        self._token = object()  # on a gradient it says that its flat tensor is laid out like this group
        self._gaps: dict[tuple[int, torch.dtype], Tensor] = {}
        self.message = Message.plan(self.layout, direct=dtypes.compute == dtypes.reduce)
        self.partial: tuple[Tensor, list[bool]] | None = None  # reduced over shards, not yet over replicas; who was used

    # --- what the group is ---

    @property
    def trainable(self) -> bool:
        return any(parameter.requires_grad for parameter in self.parameters)

    @property
    def hooked(self) -> bool:
        """Whether callers put hooks on a parameter, which want its gradient as soon as it is there."""
        return any(_torch.has_reduction_hooks(parameter.sharded) for parameter in self.parameters)

    @property
    def full_nbytes(self) -> int:
        return self.layout.full_numel * self.dtypes.compute.itemsize

    @property
    def stale(self) -> bool:
        """Whether the shards were written since they were last gathered."""
        return self._full is not None and self._full.versions != self._versions()

    def _versions(self) -> list[int]:
        """One number per parameter that grows when its shard is written: directly, through its DTensor, or by an optimizer."""
        flat = self.shard._version
        return [flat + parameter.version for parameter in self.parameters]

    def absorb(self, values: Sequence[Tensor]) -> None:
        """Take over `values` (one local shard per parameter) in place."""
        for parameter, value in zip(self.parameters, values):
            parameter.match_trainability()
            if value is not parameter.local:
                if self.extension or value.data_ptr() != parameter.local.data_ptr():
                    parameter.local.copy_(value)
                parameter.settle(parameter.local)

    def is_current(self) -> bool:
        return all(parameter.is_current() for parameter in self.parameters)

    # --- gathering ---

    def grow(self) -> GatheredSide:
        """Memory for the full parameters, on the compute lane. Raises StateError if the shards cannot be gathered."""
        full = self._full
        if full is None:
            self._check_device()
            with torch.inference_mode(False), torch.no_grad():
                if self.extension:
                    full = ExtensionSide(self.parameters[0], self.carriers.gather, self.dtypes.compute, self.storage.mp)
                else:
                    full = FullSide(self)
                    for parameter, view in zip(self.parameters, full.views):
                        parameter.materialize(view)
                self._full = full
        versions = self._versions()
        if versions != full.versions:
            if full.versions:  # let autograd find graphs that saved the old values
                changed = [p.full for p, old, new in zip(self.parameters, full.versions, versions) if old != new]
                torch.autograd.graph.increment_version(changed)  # type: ignore[arg-type]
            full.gathered(versions)
        full.grow()
        return full

    def gather_copy(self) -> list[Tensor]:
        """What modules compute with, gathered into memory of its own: one tensor per parameter (collective)."""
        self._check_device()
        if self.extension:
            raise StateError(
                f"parameter '{self.parameters[0].name}' gathers itself (fsdp_pre_all_gather) in one memory only: read it in "
                "a forward, or between unshard() and reshard()"
            )
        with torch.no_grad():
            side = FullSide(self)
            side.grow()
            pending = side.start()
            for work in pending.works:
                work.wait()
            if pending.then is not None:
                pending.then()
            side.finish()
            side.settle()
        return [parameter.cut.lift(view) for parameter, view in zip(self.parameters, side.views)]

    def _check_device(self) -> None:
        shard = self.parameters[0].local if self.extension else self.shard
        if shard.device.type == "meta":
            names = ", ".join(f"'{p.name}'" for p in self.parameters[:3]) + (", ..." if len(self.parameters) > 3 else "")
            raise StateError(
                f"parameters {names} are still on the meta device: call model.to_empty(device='{self.storage.home.type}') and "
                "then model.reset_parameters() of every module or model.load_state_dict(...) before the first forward, or "
                "fullshard.materialize(model)"
            )
        if shard.device != self.storage.home:
            what = "its CPUOffloadPolicy keeps shards" if self.storage.host else "its mesh computes"
            raise StateError(
                f"parameter '{self.parameters[0].name}' is on {shard.device}, but {what} on {self.storage.home}: "
                f"move the model with .to('{self.storage.home}')"
            )

    def lends(self, tensor: Tensor) -> bool:
        """Whether `tensor` lies in the full storage."""
        return self._full is not None and self._full.holds(tensor)

    def settle(self, ticket: Ticket) -> None:
        """The compute lane is ordered behind the gather: what only the gather needed can go."""
        if self._full is not None:
            self._full.settle()
        if self.storage.host:
            self._copying = ticket

    def block(self) -> None:
        """Have the host wait until shards in its memory are no longer read by a copy to the device, so that it may write."""
        copying, self._copying = self._copying, None
        if copying is not None:
            copying.block()

    def install(self) -> None:
        """Have the slots hold the full parameters."""
        if not self._installed:
            self._installed = True
            for parameter in self.parameters:
                parameter.install_full()

    def uninstall(self) -> None:
        """Have the slots hold the sharded parameters."""
        if self._installed:
            self._installed = False
            for parameter in self.parameters:
                parameter.install_sharded()

    def retain(self) -> None:
        """Before the full parameters go: keep this rank's part of the smaller group's copy of them."""
        if self._full is not None:
            self._full.retain()

    def forget(self) -> None:
        """Drop what was retained."""
        if self._full is not None:
            self._full.forget()

    def guard(self) -> None:
        """Let a backward that reads the full parameters, which are about to go for good, raise instead."""
        if self._full is not None:
            torch.autograd.graph.increment_version([p.full for p in self.parameters if p.full is not None])

    def shrink(self) -> None:
        if self._full is not None:
            self._full.shrink()

    # --- gradients ---

    def take_gradients(self) -> list[Tensor | None] | None:
        """What autograd left at the full parameters; None if it left nothing."""
        grads = [parameter.take_gradient() for parameter in self.parameters]
        return None if all(grad is None for grad in grads) else grads

    def accumulate(self, grads: Sequence[Tensor | None]) -> None:
        """Keep gradients of a backward that does not communicate, in the reduce dtype."""
        for parameter, grad in zip(self.parameters, grads):
            if grad is not None:
                parameter.keep(grad, self.dtypes.reduce)

    def with_accumulated(self, grads: list[Tensor | None]) -> list[Tensor | None]:
        """`grads` and what earlier backwards kept."""
        if all(parameter.kept is None for parameter in self.parameters):
            return grads
        self.accumulate(grads)
        return [parameter.take_kept() for parameter in self.parameters]

    def gap(self, size: int, dtype: torch.dtype) -> Tensor:
        zeros = self._gaps.get((size, dtype))
        if zeros is None:
            zeros = torch.zeros(self.layout.ranks, size, dtype=dtype, device=self.storage.device)
            self._gaps[size, dtype] = zeros
        return zeros

    def defer(self, flat: Tensor, used: list[bool]) -> None:
        """Keep a gradient that is reduced over shards, but not yet over replicas."""
        self.partial = (flat, used)

    def take_partial(self) -> tuple[Tensor, list[bool]] | None:
        partial, self.partial = self.partial, None
        return partial

    def receive(self, flat: Tensor, used: Sequence[bool], *, hooked: bool) -> None:
        """Reduced gradients, (shard_numel,) in the storage dtype, go to the `.grad` of parameters that are `used`."""
        parameters = self.parameters
        plain = all(used) and not hooked
        if plain and self._accumulate_flat(flat):
            return
        mark = (self._token, flat)
        for parameter, view, is_used in zip(parameters, self._views, used):
            if is_used:
                local = flat.as_strided(*view)
                if plain and parameter.sharded.grad is None:
                    parameter.deliver(local, _FLAT, mark)
                else:
                    parameter.receive(local)

    def _accumulate_flat(self, flat: Tensor) -> bool:
        """Add to all gradients in one call, if they are still the views of one flat tensor that we gave."""
        grads = [parameter.sharded.grad for parameter in self.parameters]
        before: Any = None if grads[0] is None else grads[0].__dict__.get(_FLAT)
        if before is None or any(grad is None or grad.__dict__.get(_FLAT) is not before for grad in grads):
            return False
        token, total = before
        if token is not self._token:
            return False
        total.add_(flat)
        return True


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """What a reduction sends: one packed message of `pieces`, and `alone` the parameters that go as they are."""

    numel: int  # of the packed message, per rank
    pieces: tuple[Piece, ...]
    folded: tuple[Piece, ...]  # of these, those that are copied in by hand
    alone: tuple[int, ...]

    @classmethod
    def plan(cls, layout: GroupLayout, *, direct: bool) -> Message:
        bucket, alone = layout.reduction(direct=direct)
        pieces = tuple(piece for piece in bucket.pieces if piece.size) if bucket is not None else ()
        folded = tuple(p for p in pieces if p.parameter >= 0 and layout.places[p.parameter].folded)
        return cls(0 if bucket is None else bucket.size, pieces, folded, alone)


ReduceHook = Callable[[Tensor], None]


@dataclass(frozen=True, slots=True)
class ReduceOptions:
    """How gradients become one: `divide` by a number (None: by the ranks they come from), over replicas or not yet, and
    the caller's own step behind that.
    """

    divide: float | None = None
    all_reduce: bool = True
    hook: ReduceHook | None = None
    hook_stream: Any = None


class Reduction:
    """The gradients of one group on their way to the shards: packed and cast on the compute lane, reduced on others.

        gradients of large, even parameters ------------------------------------> message of its own   no copy
        the others --(chunk_cat: cut, pad, cast)--> one packed message (ranks, s) --reduce-scatter--> flat (shard_numel,)
        flat --all-reduce over replicas--> the caller's hook --> storage dtype --> the host, if shards are there

    The message is fixed when the group is made: every parameter is in it, with zeros where this rank has no gradient.
    """

    def __init__(self, group: Group, grads: Sequence[Tensor | None], options: ReduceOptions) -> None:
        layout, reduce = group.layout, group.dtypes.reduce
        device = group.storage.device
        dtype = group.dtypes.compute
        if any(grad is not None and grad.dtype != dtype for grad in grads):
            grads, dtype = [None if grad is None else grad.to(reduce) for grad in grads], reduce
        self._group, self._options = group, options
        replicas = group.carriers.replicate
        self._replicas = replicas if options.all_reduce else None
        self._deferred = replicas is not None and not options.all_reduce
        divide = options.divide or float(layout.ranks * (replicas.ranks if replicas else 1))
        # A sum of halves overflows early, a quotient of halves underflows: divide in two steps, the first a power of two.
        before = 2.0 ** ceil(log2(divide) / 2) if reduce is torch.float16 and divide > 1 else 1.0
        self._scale = 1.0 if reduce is torch.float16 else 1.0 / divide
        self._last_scale = before / divide if reduce is torch.float16 else 1.0
        self._landed = False
        self._ticket: Ticket | None = None
        self.used = [grad is not None for grad in grads]
        self.hooked = group.hooked
        plan = group.message
        memory = group.carriers.reduce_memory or torch.empty
        self._out = memory((layout.shard_numel,), dtype=reduce, device=device)
        self._fulls: list[Tensor] = []
        self._outs: list[Tensor] = []

        def gradient(index: int) -> Tensor:
            grad = grads[index]
            if grad is None:
                return torch.zeros(layout.places[index].shape, dtype=dtype, device=device)
            return grad.contiguous()

        if plan.pieces:
            message = memory((layout.ranks * plan.numel,), dtype=reduce, device=device).view(layout.ranks, -1)
            blank = {piece.parameter for piece in plan.folded}
            parts = [
                gradient(p.parameter) if p.parameter >= 0 and p.parameter not in blank else group.gap(p.size, dtype)
                for p in plan.pieces
            ]
            _torch.chunk_cat(parts, message)
            for piece in plan.folded:
                grad, place = grads[piece.parameter], layout.places[piece.parameter]
                if grad is not None:
                    wholes, blocks = folds(grad, message[:, place.offset : place.offset + place.size], place)
                    torch._foreach_copy_(blocks, wholes)
            self._fulls.append(message.view(-1))
            self._outs.append(self._out[: plan.numel])
        for index in plan.alone:
            place = layout.places[index]
            self._fulls.append(gradient(index).view(-1))
            self._outs.append(self._out[place.offset : place.offset + place.size])
        if before != 1.0 and self._fulls:
            torch._foreach_mul_(self._fulls, 1.0 / before)
        storage = group.dtypes.storage
        self._flat = self._out if storage == reduce else torch.empty(layout.shard_numel, dtype=storage, device=device)
        self._host: Tensor | None = None
        if group.storage.host:
            self._host = torch.empty(layout.shard_numel, dtype=storage, pin_memory=group.storage.pinned)
        self._absorbed: Tensor | None = None

    @property
    def replicated(self) -> bool:
        """Whether a second step, over the replicas or the caller's, follows."""
        return not self._deferred and (self._replicas is not None or self._options.hook is not None)

    @property
    def polled(self) -> bool:
        """Whether it may end as soon as it is done, or calls something that may talk to other ranks."""
        return self._options.hook is None

    @property
    def deferred(self) -> bool:
        """Whether the sum over replicas is left to a later reduction."""
        return self._deferred

    def start(self) -> Pending:
        if not self._fulls:
            return Pending()
        return self._group.carriers.reduce.reduce_scatter(self._outs, self._fulls, self._scale)

    def finish(self) -> None:
        before = self._group.take_partial()
        if before is not None:
            self._absorbed, used = before
            self._out.add_(self._absorbed)
            self.used = [now or then for now, then in zip(self.used, used)]
        if self._deferred:
            self._group.defer(self._out, self.used)
            self._landed = True
        elif not self.replicated:
            self._complete()

    def replicate(self) -> Pending:
        if self._replicas is None or not self._out.numel():
            return Pending()
        return self._replicas.all_reduce(self._out)

    def finish_replicated(self) -> None:
        hook, stream = self._options.hook, self._options.hook_stream
        if hook is not None:
            if stream is None:
                hook(self._out)
            else:
                _torch.on_stream(stream, hook, self._out)
        self._complete()

    def _complete(self) -> None:
        if self._last_scale != 1.0:
            self._out.mul_(self._last_scale)
        if self._flat is not self._out:
            self._flat.copy_(self._out)
        if self._host is not None:
            if self._host.numel():
                self._group.carriers.journal.note("to_host", [self._flat])
            self._host.copy_(self._flat, non_blocking=True)

    def follow(self, ticket: Ticket) -> None:
        """`ticket` is the last of its work."""
        self._ticket = ticket

    def settle(self) -> None:
        """The compute lane is ordered behind the reduce-scatter: let the messages go."""
        self._fulls, self._outs, self._absorbed = [], [], None
        if not self.replicated:
            self._out = self._flat

    def end(self) -> None:
        """The compute lane is ordered behind all of it."""
        self._out = self._flat

    def land(self) -> None:
        """Give the parameters that this rank used their gradient, once. The runtime waits with it for the end of
        backward, so that of a step that raises either all gradients arrive or none; only hooks do not wait so long.
        """
        if not self._landed:
            self._landed = True
            if self._ticket is not None:
                self._ticket.wait()
            if self._host is not None:
                if self._ticket is not None:
                    self._ticket.block()
                self._flat = self._host
            self._group.receive(self._flat, self.used, hooked=self.hooked)

    @property
    def landed(self) -> bool:
        return self._landed

    @property
    def undecided(self) -> bool:
        """Whether this rank must learn which of the parameters it did not use others did."""
        return any(not used and p.requires_grad for used, p in zip(self.used, self._group.parameters))

    @property
    def parameters(self) -> Sequence[ShardedParameter]:
        return self._group.parameters

    @property
    def carriers(self) -> Carriers:
        return self._group.carriers

    def decide(self, used_somewhere: Sequence[bool]) -> None:
        """Give gradients also to parameters that only other ranks used."""
        late = [
            anywhere and not here and p.requires_grad
            for here, anywhere, p in zip(self.used, used_somewhere, self._group.parameters)
        ]
        if any(late):
            self._group.receive(self._flat, late, hooked=self.hooked)


def group_parameters(
    parameters: Sequence[ShardedParameter], values: Sequence[Tensor], dtypes_of: Sequence[Dtypes]
) -> list[tuple[Dtypes, list[int]]]:
    """Which parameters share a group: same axes, dtypes, device and trainability, in order of first appearance."""
    groups: dict[Any, list[int]] = {}
    for index, (parameter, value, dtypes) in enumerate(zip(parameters, values, dtypes_of)):
        alone = index if extends(value) else -1
        key = (dtypes, value.device, parameter.requires_grad, parameter.cut.axis.key, alone)
        groups.setdefault(key, []).append(index)
    return [(key[0], members) for key, members in groups.items()]


def is_plain(tensor: Tensor) -> bool:
    """Whether it is an ordinary strided tensor."""
    return type(tensor) is Tensor and tensor.layout == torch.strided
