"""Parameters that move together: their flat shard, what is gathered of it, and where their gradients land."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fullshard import _torch
from fullshard.collectives.streams import LaneWork
from fullshard.consistency.collective_log import GroupFingerprints
from fullshard.errors import StateError
from fullshard.params.extension import ExtensionBuffer, own_shard, travels_alone
from fullshard.params.sharded_param import ShardedParameter, all_current, install_full, install_sharded
from fullshard.params.unsharded import FlatBuffer, GroupCollectives, Storage, UnshardedBuffer
from fullshard.policies import Dtypes
from fullshard.sharding.layout import GroupLayout, Segment, plan_layout


@dataclass(frozen=True, slots=True)
class PackedSegment:
    """One stretch of a packed message; `blank` is filled with zeros (a gap, or copied in by hand later)."""

    parameter: int
    size: int
    blank: bool


@dataclass(frozen=True, eq=False)
class ReductionPlan:
    """What a reduction sends: one message of `packed` pieces, and `alone` the parameters that go as they are."""

    numel: int  # of the packed message, per rank
    packed: tuple[PackedSegment, ...]
    folded: tuple[Segment, ...]  # of these, those that are copied in by hand
    alone: tuple[int, ...]

    @cached_property
    def sources(self) -> list[tuple[int, int]]:
        """(segment of the packed message, parameter) of all that are not blank."""
        return [(index, piece.parameter) for index, piece in enumerate(self.packed) if not piece.blank]

    @cached_property
    def gaps(self) -> set[int]:
        """The sizes of blank segments."""
        return {piece.size for piece in self.packed if piece.blank}

    @classmethod
    def plan(cls, layout: GroupLayout, *, direct: bool) -> ReductionPlan:
        bucket, alone = layout.reduction(direct=direct)
        pieces = tuple(piece for piece in bucket.pieces if piece.size) if bucket is not None else ()
        folded = tuple(p for p in pieces if p.parameter >= 0 and layout.places[p.parameter].folded)
        by_hand = {piece.parameter for piece in folded}
        packed = tuple(PackedSegment(p.parameter, p.size, p.parameter < 0 or p.parameter in by_hand) for p in pieces)
        return cls(0 if bucket is None else bucket.size, packed, folded, alone)


class ParamGroup:
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
        carriers: GroupCollectives,
        storage: Storage,
        line: GroupFingerprints,
    ) -> None:
        self.parameters = parameters
        self.fingerprints = line
        self.dtypes = dtypes
        self.collectives = carriers
        self.storage = storage
        itemsize = min(dtypes.storage.itemsize, dtypes.compute.itemsize)
        self.layout: GroupLayout = plan_layout(
            [tuple(p.sharding.local_shape) for p in parameters],
            [p.sharding.dim for p in parameters],
            ranks=carriers.gather.ranks,
            itemsize=itemsize,
            direct_min_bytes=storage.direct_min_bytes,
        )
        self.extension = travels_alone(values[0])
        shard_numel = 0 if self.extension else self.layout.shard_numel
        self.shard = torch.zeros(shard_numel, dtype=dtypes.storage, device=values[0].device)
        if storage.pinned and self.shard.device.type == "cpu":
            self.shard = self.shard.pin_memory()
        for parameter, place, value in zip(parameters, self.layout.places, values):
            numel = value.numel()
            if self.extension:
                parameter.bind_to_flat_shard(own_shard(value, parameter.sharding))
                continue
            local = _torch.at_origin(self.shard[place.offset : place.offset + numel].view(parameter.sharding.shard_shape))
            local.copy_(value)
            parameter.bind_to_flat_shard(local)
        self._full: UnshardedBuffer | None = None
        self.installed = False  # whether the slots hold the full parameters
        self._copying: LaneWork | None = None  # the last gather from the host's memory
        # Of each parameter's gradient in a flat one: local shape, its strides, offset.
        self.views = [
            (p.sharding.shard_shape, _torch.contiguous_strides(p.sharding.shard_shape), place.offset)
            for p, place in zip(parameters, self.layout.places)
        ]
        # Under its parameter's key a gradient bears the flat tensor that it is a view of.
        self.keys = [f"_fullshard_flat_{index}" for index in range(len(parameters))]
        self.token = object()  # on a gradient it says that its flat tensor is laid out like this group
        self._blanks: dict[torch.dtype, list[Tensor]] = {}
        self.plan = ReductionPlan.plan(self.layout, direct=dtypes.compute == dtypes.reduce)
        self.partial: tuple[Tensor, list[bool]] | None = None  # reduced over shards, not yet over replicas; who was used
        self.deferring = False  # whether there is such a gradient, or one on its way
        # Whether a backward without communication ended for the group since it was last reduced, whatever that left here.
        self.has_local_grads = any(parameter.local_grad is not None for parameter in parameters)
        self._epoch = -1  # of the ledger, when the first parameter was last given a gradient
        self._version = 0  # of that gradient, when the group was last reduced

    # --- what the group is ---

    @property
    def trainable(self) -> bool:
        for parameter in self.parameters:
            if parameter.sharded.requires_grad:
                return True
        return False

    @property
    def has_hooks(self) -> bool:
        """Whether callers put hooks on a parameter, which want its gradient as soon as it is there."""
        return _torch.have_reduction_hooks([parameter.sharded for parameter in self.parameters])

    @property
    def full_nbytes(self) -> int:
        return self.layout.full_numel * self.dtypes.compute.itemsize

    @property
    def stale(self) -> bool:
        """Whether the shards were written since they were last gathered."""
        return self._full is not None and self._full.versions != self._versions()

    def _versions(self) -> list[int]:
        """One number per parameter that grows when its shard is written: directly, through its DTensor, or by an optimizer."""
        return [p.write_count + p.sharded._version + p.local._version for p in self.parameters]

    def adopt_values(self, values: Sequence[Tensor]) -> None:
        """Take over `values` (one local shard per parameter) in place."""
        for parameter, value in zip(self.parameters, values):
            parameter.match_trainability()
            if value is not parameter.local:
                if self.extension or value.data_ptr() != parameter.local.data_ptr():
                    parameter.local.copy_(value)
                parameter.bind_to_flat_shard(parameter.local)

    def is_current(self) -> bool:
        return all_current(self.parameters)

    # --- gathering ---

    def allocate_unsharded(self) -> UnshardedBuffer:
        """Memory for the full parameters, on the compute lane. Raises StateError if the shards cannot be gathered."""
        full = self._full
        if full is None:
            self._check_device()
            with torch.inference_mode(False), torch.no_grad():
                if self.extension:
                    full = ExtensionBuffer(
                        self.parameters[0], self.collectives.gather, self.dtypes.compute, self.storage.device, self.storage.mp
                    )
                else:
                    full = self._full_side()
                    for parameter, view in zip(self.parameters, full.views):
                        parameter.make_unsharded(view)
                self._full = full
        versions = self._versions()
        if versions != full.versions:
            if full.versions:  # let autograd find graphs that saved the old values
                changed = [p.full for p, old, new in zip(self.parameters, full.versions, versions) if old != new]
                torch.autograd.graph.increment_version(changed)  # type: ignore[arg-type]
            full.gathered(versions)
        full.allocate()
        return full

    def _full_side(self) -> FlatBuffer:
        return FlatBuffer(self.layout, self.dtypes, self.collectives, self.storage, self.shard)

    def private_buffer(self) -> FlatBuffer:
        """A full side in memory of its own, to be gathered into and read (`lifted`)."""
        self._check_device()
        if self.extension:
            raise StateError(
                f"parameter '{self.parameters[0].name}' gathers itself (fsdp_pre_all_gather) in one memory only: read it in "
                "a forward, or between unshard() and reshard()"
            )
        with torch.no_grad():
            side = self._full_side()
            side.allocate()
        return side

    def lifted(self, side: FlatBuffer) -> list[Tensor]:
        """What modules compute with, of a side that was gathered: one tensor per parameter."""
        return [parameter.sharding.to_module(view) for parameter, view in zip(self.parameters, side.views)]

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

    def owns_memory_of(self, tensor: Tensor) -> bool:
        """Whether `tensor` lies in the full storage."""
        return self._full is not None and self._full.owns(tensor)

    def finish_gather(self, ticket: LaneWork) -> None:
        """The compute lane is ordered behind the gather: what only the gather needed can go."""
        if self._full is not None:
            self._full.release_staging()
        if self.storage.host:
            self._copying = ticket

    def synchronize_host(self) -> None:
        """Have the host wait until shards in its memory are no longer read by a copy to the device, so that it may write."""
        copying, self._copying = self._copying, None
        if copying is not None:
            copying.block()

    def install(self) -> None:
        """Have the slots hold the full parameters."""
        if not self.installed:
            self.installed = True
            install_full(self.parameters)

    def uninstall(self) -> None:
        """Have the slots hold the sharded parameters."""
        if self.installed:
            install_sharded(self.parameters)
            self.installed = False

    def save_subgroup_shard(self) -> None:
        """Before the full parameters go: keep this rank's part of the smaller group's copy of them."""
        if self._full is not None:
            self._full.save_subgroup_shard()

    def drop_subgroup_shard(self) -> None:
        """Drop what was retained."""
        if self._full is not None:
            self._full.drop_subgroup_shard()

    def invalidate_autograd(self) -> None:
        """Let a backward that reads the full parameters, which are about to go for good, raise instead."""
        if self._full is not None:
            torch.autograd.graph.increment_version([p.full for p in self.parameters if p.full is not None])

    def free_unsharded(self) -> None:
        if self._full is not None:
            self._full.free()

    def drop_unsharded(self) -> None:
        """A gather failed half way: messages may still arrive in its memory, which goes when the last of them is forgotten."""
        self.uninstall()
        self._full = None

    # --- gradients ---

    def take_gradients(self) -> list[Tensor | None] | None:
        """What autograd left at the full parameters; None if it left nothing."""
        grads: list[Tensor | None] = []
        found = False
        for parameter in self.parameters:
            full = parameter.full
            grad = None if full is None else full.grad
            if grad is not None:
                full.grad = None  # type: ignore[union-attr]
                found = True
                if not parameter.is_plain:
                    grad = parameter.sharding.grad_to_local(grad, name=parameter.name)
            grads.append(grad)
        return grads if found else None

    def accumulate(self, grads: Sequence[Tensor | None]) -> None:
        """Keep gradients of a backward that does not communicate, in the reduce dtype."""
        self.has_local_grads = True
        for parameter, grad in zip(self.parameters, grads):
            if grad is not None:
                parameter.add_local_grad(grad, self.dtypes.reduce)

    def with_accumulated(self, grads: list[Tensor | None]) -> list[Tensor | None]:
        """`grads` and what earlier backwards kept."""
        if not self.has_local_grads:
            return grads
        if any(parameter.local_grad is not None for parameter in self.parameters):
            self.accumulate(grads)
            grads = [parameter.take_local_grad() for parameter in self.parameters]
        self.has_local_grads = False
        return grads

    def discard_local_grads(self) -> None:
        """Forget what backwards without communication kept, and what is reduced over shards only."""
        self.has_local_grads = self.deferring = False
        self.partial = None
        for parameter in self.parameters:
            parameter.discard_local_grads()

    def blanks(self, dtype: torch.dtype) -> list[Tensor]:
        """Of each segment of the packed message: zeros, (ranks, size) where it is blank, else none yet, (0,)."""
        blanks = self._blanks.get(dtype)
        if blanks is None:
            zeros = {
                size: torch.zeros(self.layout.ranks, size, dtype=dtype, device=self.storage.device) for size in self.plan.gaps
            }
            empty = torch.empty(0, dtype=dtype, device=self.storage.device)
            blanks = [zeros[piece.size] if piece.blank else empty for piece in self.plan.packed]
            self._blanks[dtype] = blanks
        return blanks

    def accumulates(self) -> bool:
        """Whether gradients are added to those of before. Asked when they are reduced.

        Ranks that agreed on a failed step may hold different gradients, so that counts only once they were given others.
        """
        grad = self.parameters[0].sharded.grad
        if grad is None:
            self._version = 0
            return False
        self._version = grad._version
        return self._epoch == self.fingerprints.log.epoch

    def note_given(self) -> None:
        """The first parameter is given its gradient."""
        self._epoch = self.fingerprints.log.epoch

    @property
    def rewritten(self) -> bool:
        """Whether somebody wrote to the gradient of the first parameter since it was reduced, where ranks can compare."""
        grad = self.parameters[0].sharded.grad
        return grad is not None and grad._version != self._version and self._epoch == self.fingerprints.log.epoch

    def keep_partial(self, flat: Tensor, used: list[bool]) -> None:
        """Keep a gradient that is reduced over shards, but not yet over replicas."""
        self.partial = (flat, used)

    def set_deferring(self, deferring: bool) -> None:
        """Whether the reduction that was just started leaves its sum over replicas to a later one."""
        self.deferring = deferring

    def take_partial(self) -> tuple[Tensor, list[bool]] | None:
        partial, self.partial = self.partial, None
        return partial


def group_parameters(
    parameters: Sequence[ShardedParameter], values: Sequence[Tensor], dtypes_of: Sequence[Dtypes]
) -> list[tuple[Dtypes, list[int]]]:
    """Which parameters share a group: same axes, dtypes, device and trainability, in order of first appearance."""
    groups: dict[Any, list[int]] = {}
    for index, (parameter, value, dtypes) in enumerate(zip(parameters, values, dtypes_of)):
        alone = index if travels_alone(value) else -1
        key = (dtypes, value.device, parameter.requires_grad, parameter.sharding.axis.key, alone)
        groups.setdefault(key, []).append(index)
    return [(key[0], members) for key, members in groups.items()]
