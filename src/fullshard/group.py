"""Parameters that move together: flat shard, full storage, what gathers and reduces them, on whatever lane is current."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fullshard import _torch
from fullshard.comm import Collectives, Pending
from fullshard.layout import GroupLayout, plan_layout
from fullshard.parameter import ShardedParameter
from fullshard.policies import Dtypes
from fullshard.schedule import StateError

_FLAT = "_fullshard_flat"  # on a gradient: the flat tensor all gradients of its group are views of


class FullSide:
    """The gathered side of a group, planned once: storage, views, and the prepared collective.

        shard views --(cast into own slot, or nothing)--> region of a large parameter     no copy
        shard range --> slot in staging (ranks, packed) --all-gather--> split_copy --> regions of the small ones

    Memory exists between `grow` and `shrink`; the Parameters made over it keep their identity, and their version
    counters move only when the weights behind them did.
    """

    def __init__(self, group: Group, device: torch.device) -> None:
        layout, dtype = group.layout, group.dtypes.compute
        self._flat = torch.empty(layout.full_numel, dtype=dtype, device=device)
        self._storage = self._flat.untyped_storage()
        self._nbytes = self._storage.size()
        packed = layout.packed
        self._staging = torch.empty(layout.ranks * packed.size if packed else 0, dtype=dtype, device=device)
        self._staging_storage = self._staging.untyped_storage()
        self._staging_nbytes = self._staging_storage.size()
        outs = [
            self._flat[bucket.pieces[0].region :][: layout.ranks * bucket.size] if bucket.direct else self._staging
            for bucket in layout.buckets
        ]
        shards = [group.shard[bucket.offset : bucket.offset + bucket.size] for bucket in layout.buckets]
        self._casts: tuple[list[Tensor], list[Tensor]] | None = None
        if group.dtypes.storage != dtype:
            rank = group.collectives.rank
            slots = [out[rank * bucket.size :][: bucket.size] for out, bucket in zip(outs, layout.buckets)]
            self._casts, shards = (slots, shards), slots
        self._gather = group.collectives.gatherer(outs, shards) if layout.full_numel else Pending
        self._poison = group.poison
        self._sizes: list[int] = []
        self._regions: list[Tensor] = []
        for piece in packed.pieces if packed else ():
            if piece.size:
                self._sizes.append(piece.size)
                self._regions.append(self._apart(piece.region, (layout.ranks, piece.size)))
        self._packed_view = self._staging.view(layout.ranks, -1) if self._sizes else None
        for parameter, place in zip(group.parameters, layout.places):
            parameter.materialize(self._apart(place.region, place.shape))
        self.versions: list[int] = []  # of what was gathered last
        self.shrink()

    def _apart(self, offset: int, shape: Sequence[int]) -> Tensor:
        """A tensor over the full storage that is no view of another, so that its version counter is its own."""
        empty = torch.empty(0, dtype=self._flat.dtype, device=self._flat.device)
        return empty.set_(self._storage, offset, tuple(shape))  # type: ignore[call-overload]

    def gathered(self, versions: list[int]) -> None:
        """These are the versions of the shards that this storage shows."""
        self.versions = versions

    def holds(self, tensor: Tensor) -> bool:
        return self._nbytes > 0 and _torch.is_over(tensor, self._storage)

    def grow(self) -> None:
        self._storage.resize_(self._nbytes)
        if self._staging_nbytes:
            self._staging_storage.resize_(self._staging_nbytes)
        if self._poison:
            for tensor in (self._flat, self._staging):
                tensor.fill_(float("nan") if tensor.is_floating_point() else 1)

    def start(self) -> Pending:
        if self._casts is not None:
            torch._foreach_copy_(*self._casts)
        return self._gather()

    def finish(self) -> None:
        if self._packed_view is not None:
            _torch.split_copy(self._packed_view, self._sizes, self._regions)

    def drop_staging(self) -> None:
        if self._staging_nbytes:
            self._staging_storage.resize_(0)

    def shrink(self) -> None:
        self._storage.resize_(0)
        self.drop_staging()


class Group:
    """group 1 - n buckets, group 1 - n parameters. Owns the flat shard (shard_numel,) and the full side.

    All its parameters share shard axis, dtypes, and whether they were trainable when it was made.
    """

    def __init__(
        self,
        parameters: list[ShardedParameter],
        values: Sequence[Tensor],
        *,
        dtypes: Dtypes,
        collectives: Collectives,
        direct_min_bytes: float,
        poison: bool,
    ) -> None:
        self.parameters = parameters
        self.poison = poison
        self.dtypes = dtypes
        self.collectives = collectives
        itemsize = min(dtypes.storage.itemsize, dtypes.compute.itemsize)
        self.layout: GroupLayout = plan_layout(
            [tuple(p.shape) for p in parameters],
            ranks=collectives.ranks,
            itemsize=itemsize,
            direct_min_bytes=direct_min_bytes,
        )
        self.shard = torch.zeros(self.layout.shard_numel, dtype=dtypes.storage, device=values[0].device)
        for parameter, place, value in zip(parameters, self.layout.places, values):
            numel = value.numel()
            local = self.shard[place.offset : place.offset + numel].view(parameter.local_shape)
            local.copy_(value)
            parameter.settle(local)
        self._full: FullSide | None = None
        self._installed = False
        # Of each parameter's gradient in a flat one: local shape, its strides, offset.
        self._views = [(p.local_shape, p.local.stride(), place.offset) for p, place in zip(parameters, self.layout.places)]
        self._token = object()  # on a gradient it says that its flat tensor is laid out like this group
        self._gaps: dict[tuple[int, torch.dtype], Tensor] = {}

    # --- what the group is ---

    @property
    def trainable(self) -> bool:
        return any(parameter.requires_grad for parameter in self.parameters)

    @property
    def hooked(self) -> bool:
        """Whether callers put hooks on a parameter, which want its gradient as soon as it is there."""
        return any(_torch.has_reduction_hooks(parameter.sharded) for parameter in self.parameters)

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
                if value.data_ptr() != parameter.local.data_ptr():
                    parameter.local.copy_(value)
                parameter.settle(parameter.local)

    def is_current(self) -> bool:
        return all(parameter.is_current() for parameter in self.parameters)

    # --- gathering ---

    def grow(self, device: torch.device) -> FullSide:
        """Memory for the full parameters, on the compute lane. Raises StateError if the shards cannot be gathered."""
        full = self._full
        if full is None:
            self._check_device(device)
            with torch.inference_mode(False), torch.no_grad():
                full = self._full = FullSide(self, device)
        full.grow()
        versions = self._versions()
        if versions != full.versions:
            if full.versions:  # let autograd find graphs that saved the old values
                changed = [p.full for p, old, new in zip(self.parameters, full.versions, versions) if old != new]
                torch.autograd.graph.increment_version(changed)  # type: ignore[arg-type]
            full.gathered(versions)
        return full

    def _check_device(self, device: torch.device) -> None:
        if self.shard.device.type == "meta":
            names = ", ".join(f"'{p.name}'" for p in self.parameters[:3]) + (", ..." if len(self.parameters) > 3 else "")
            raise StateError(
                f"parameters {names} are still on the meta device: call model.to_empty(device='{device.type}') and then "
                "model.reset_parameters() of every module or model.load_state_dict(...) before the first forward"
            )
        if self.shard.device != device:
            raise StateError(
                f"parameter '{self.parameters[0].name}' is on {self.shard.device}, but its mesh computes on {device}: "
                f"move the model with .to('{device}')"
            )

    def lends(self, tensor: Tensor) -> bool:
        """Whether `tensor` lies in the full storage."""
        return self._full is not None and self._full.holds(tensor)

    def settle(self) -> None:
        """The compute lane is ordered behind the gather: what only the gather needed can go."""
        if self._full is not None:
            self._full.drop_staging()

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
            zeros = torch.zeros(self.layout.ranks, size, dtype=dtype, device=self.shard.device)
            self._gaps[size, dtype] = zeros
        return zeros

    def receive(self, flat: Tensor, used: Sequence[bool]) -> None:
        """Reduced gradients, (shard_numel,) in the storage dtype, go to the `.grad` of parameters that are `used`."""
        parameters = self.parameters
        plain = all(used) and not self.hooked
        if plain and self._accumulate_flat(flat):
            return
        mark = (self._token, flat)
        for parameter, view, is_used in zip(parameters, self._views, used):
            if is_used:
                local = flat.as_strided(*view)
                if plain and parameter.sharded.grad is None:
                    gradient = parameter.face(local)
                    gradient.__dict__[_FLAT] = mark
                    parameter.deliver(gradient)
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


class Reduction:
    """The gradients of one group on their way to the shards: packed and cast on the compute lane, reduced on another.

        gradients of large, even parameters ------------------------------------> message of its own   no copy
        the others --(chunk_cat: cut, pad, cast)--> one packed message (ranks, s) --reduce-scatter--> flat (shard_numel,)

    The message is fixed when the group is made: every parameter is in it, with zeros where this rank has no gradient.
    """

    def __init__(self, group: Group, grads: Sequence[Tensor | None]) -> None:
        layout, reduce = group.layout, group.dtypes.reduce
        device = group.shard.device
        dtype = group.dtypes.compute
        if any(grad is not None and grad.dtype != dtype for grad in grads):
            grads, dtype = [None if grad is None else grad.to(reduce) for grad in grads], reduce
        ranks = layout.ranks
        before = 1.0 / ranks if reduce is torch.float16 else 1.0  # a sum of halves overflows early
        self._scale = 1.0 / (ranks * before)
        self._group = group
        self._landed = False
        self.used = [grad is not None for grad in grads]
        bucket, alone = layout.reduction(direct=group.dtypes.compute == reduce)
        self._out = torch.empty(layout.shard_numel, dtype=reduce, device=device)
        self._fulls: list[Tensor] = []
        self._outs: list[Tensor] = []

        def gradient(index: int) -> Tensor:
            grad = grads[index]
            if grad is None:
                return torch.zeros(layout.places[index].shape, dtype=dtype, device=device)
            return grad.contiguous()

        if bucket is not None:
            message = torch.empty(ranks, bucket.size, dtype=reduce, device=device)
            pieces = [piece for piece in bucket.pieces if piece.size]
            _torch.chunk_cat([gradient(p.parameter) if p.parameter >= 0 else group.gap(p.size, dtype) for p in pieces], message)
            self._fulls.append(message.view(-1))
            self._outs.append(self._out[: bucket.size])
        for index in alone:
            place = layout.places[index]
            self._fulls.append(gradient(index).view(-1))
            self._outs.append(self._out[place.offset : place.offset + place.size])
        if before != 1.0 and self._fulls:
            torch._foreach_mul_(self._fulls, before)
        storage = group.dtypes.storage
        self._flat = self._out if storage == reduce else torch.empty(layout.shard_numel, dtype=storage, device=device)

    def start(self) -> Pending:
        if not self._fulls:
            return Pending()
        return self._group.collectives.reduce_scatter(self._outs, self._fulls, self._scale)

    def finish(self) -> None:
        if self._flat is not self._out:
            self._flat.copy_(self._out)

    def settle(self) -> None:
        """The compute lane is ordered behind the reduction: let the messages go."""
        self._fulls, self._outs, self._out = [], [], self._flat

    def land(self) -> None:
        """Give the parameters that this rank used their gradient, once. The runtime waits with it for the end of
        backward, so that of a step that raises either all gradients arrive or none; only hooks do not wait so long.
        """
        if not self._landed:
            self._landed = True
            self._group.receive(self._flat, self.used)

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

    def decide(self, used_somewhere: Sequence[bool]) -> None:
        """Give gradients also to parameters that only other ranks used."""
        late = [
            anywhere and not here and p.requires_grad
            for here, anywhere, p in zip(self.used, used_somewhere, self._group.parameters)
        ]
        if any(late):
            self._group.receive(self._flat, late)


def group_parameters(
    parameters: Sequence[ShardedParameter], values: Sequence[Tensor], dtypes_of: Sequence[Dtypes]
) -> list[tuple[Dtypes, list[int]]]:
    """Which parameters share a group: same dtypes, device and trainability, in order of first appearance."""
    groups: dict[tuple[Dtypes, torch.device, bool], list[int]] = {}
    for index, (parameter, value, dtypes) in enumerate(zip(parameters, values, dtypes_of)):
        groups.setdefault((dtypes, value.device, parameter.requires_grad), []).append(index)
    return [(dtypes, members) for (dtypes, _, _), members in groups.items()]


def is_plain(parameter: nn.Parameter) -> bool:
    """Whether a parameter is an ordinary strided tensor."""
    return type(parameter.data) is Tensor and parameter.layout == torch.strided
