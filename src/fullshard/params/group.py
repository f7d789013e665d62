"""Parameters that move together: their flat shard, what is gathered of it, and where their gradients land."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fullshard import _torch
from fullshard.collectives.streams import LaneWork
from fullshard.consistency.collective_log import GroupFingerprints
from fullshard.errors import StateError
from fullshard.params.extension import ExtensionBuffer, own_shard, travels_alone
from fullshard.params.group_grads import GroupGradients, ReductionPlan
from fullshard.params.sharded_param import ShardedParameter
from fullshard.params.unsharded import FlatBuffer, Gather, GroupCollectives, Storage
from fullshard.policies import Dtypes
from fullshard.sharding.layout import GroupLayout, plan_layout


class ParamGroup:
    """group 1 - n buckets, group 1 - n parameters, group 1 - 1 unsharded buffer, from its first gather on.

    All its parameters share shard axis, dtypes, and whether they were trainable when it was made.

    layout, reduction: where each parameter lies, and how gradients travel; fixed.      shard: the flat shard, (shard_numel,).
    grads: gradients between backwards.     installed: whether the slots hold the full parameters.
    """

    extension = False

    def __init__(
        self,
        parameters: list[ShardedParameter],
        values: Sequence[Tensor],
        *,
        dtypes: Dtypes,
        collectives: GroupCollectives,
        storage: Storage,
        fingerprints: GroupFingerprints,
        unwritten: Container[int] = (),
    ) -> None:
        """`values`: of each parameter this rank's shard, which becomes part of the flat one.

        unwritten: ids of parameters whose values are fresh memory, which is not copied.
        """
        self.parameters, self.fingerprints = parameters, fingerprints
        self.dtypes, self.collectives, self.storage = dtypes, collectives, storage
        self.layout: GroupLayout = plan_layout(
            [tuple(p.sharding.local_shape) for p in parameters],
            [p.sharding.dim for p in parameters],
            ranks=collectives.gather.ranks,
            itemsize=min(dtypes.storage.itemsize, dtypes.compute.itemsize),
            direct=storage.direct,
        )
        self.shard = self._bind(values, unwritten)
        self.reduction = self._plan_reduction()
        self.grads = GroupGradients(parameters, dtypes.reduce, fingerprints.log)
        self.installed = False
        self._full: FlatBuffer | ExtensionBuffer | None = None
        self._keeps = False  # memory when full parameters are freed
        self._sums: list[Tensor] = []  # memory that reductions have again and again, if it is kept
        self._copying: LaneWork | None = None  # the last gather from the host's memory

    def _plan_reduction(self) -> ReductionPlan:
        return ReductionPlan.of(
            self.layout,
            [p.sharding.shard_shape for p in self.parameters],
            dtypes=self.dtypes,
            in_order=self.collectives.reduce.in_order,
            device=self.storage.device,
        )

    def follow_gradients(self, grads: Sequence[Tensor | None]) -> None:
        """Reduce in the dtype of these gradients from now on, where it is wider and the policy sets none (`grad_dtype=None`).

        A rank that has no gradient follows later than the others: the fingerprint of the reduction tells them apart.
        """
        widest = self.dtypes.reduce
        for grad in grads:
            widest = widest if grad is None else torch.promote_types(widest, grad.dtype)
        if widest != self.dtypes.reduce:
            self.dtypes = replace(self.dtypes, reduce=widest)
            self.reduction = self._plan_reduction()
            self.grads.widen(widest)

    def _bind(self, values: Sequence[Tensor], unwritten: Container[int]) -> Tensor:
        """Put the values in one flat shard, in which the sharded parameters live from now on; its gaps are zeros."""
        device = values[0].device
        fresh = any(id(parameter) in unwritten for parameter in self.parameters)
        allocate = torch.empty if fresh else torch.zeros  # pages that are not touched take no memory yet
        pinned = self.storage.pinned and device.type == "cpu"
        flat = allocate(self.layout.shard_numel, dtype=self.dtypes.storage, device=device, pin_memory=pinned)
        if fresh:
            _zero_gaps(flat, [(place.offset, value.numel()) for place, value in zip(self.layout.places, values)])
        for parameter, place, value in zip(self.parameters, self.layout.places, values):
            rows = flat[place.offset : place.offset + value.numel()].view(parameter.sharding.shard_shape)
            local = _torch.at_origin(rows)
            if id(parameter) not in unwritten:
                local.copy_(value)
            parameter.bind_to_flat_shard(local)
        return flat

    # --- what the group is ---

    @property
    def trainable(self) -> bool:
        """Whether any parameter requires grad."""
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
        """Bytes of the full parameters."""
        return self.layout.full_numel * self.dtypes.compute.itemsize

    @property
    def stale(self) -> bool:
        """Whether the shards were written since they were last gathered."""
        return self._full is not None and self._full.versions != self._versions()

    def _versions(self) -> list[int]:
        """One number per parameter that grows when its shard is written: directly, through its DTensor, or by an optimizer."""
        return [p.write_count + p.sharded._version + p.local._version for p in self.parameters]

    def owns_memory_of(self, tensor: Tensor) -> bool:
        """Whether `tensor` lies in the unsharded buffer."""
        return self._full is not None and self._full.owns(tensor)

    # --- slots: each forward and backward passes here, so these are loops without calls, which do what `ParamSlot` does ---

    def is_current(self, *, trainability: bool = True) -> bool:
        """Whether every slot holds the sharded parameter over our memory and, if asked, trainability has not changed since."""
        for parameter in self.parameters:
            sharded, full = parameter.sharded, parameter.full
            for slot in parameter.slots:
                if slot.parameters.get(slot.name) is not sharded:
                    return False
            if _torch.local_tensor(sharded) is not parameter.local:  # type: ignore[arg-type]
                return False
            if trainability and full is not None and full.requires_grad is not sharded.requires_grad:
                return False
        return True

    def install(self) -> None:
        """Have the slots hold the full parameters."""
        if self.installed:
            return
        self.installed = True
        for parameter in self.parameters:
            full = parameter.full
            assert full is not None
            if full.requires_grad is not parameter.sharded.requires_grad:
                full.requires_grad_(parameter.sharded.requires_grad)
            for slot in parameter.slots:
                if slot.uses_setattr:
                    slot.put(full)
                else:
                    slot.parameters[slot.name] = full

    def uninstall(self) -> None:
        """Have the slots hold the sharded parameters; a Parameter assigned meanwhile stays and is seen at the next gather."""
        if not self.installed:
            return
        if self.grads.shown:
            self.grads.hide()
        for parameter in self.parameters:
            full, sharded = parameter.full, parameter.sharded
            for slot in parameter.slots if full is not None else ():
                if slot.parameters.get(slot.name) is full:
                    if slot.uses_setattr:
                        slot.put(sharded)
                    else:
                        slot.parameters[slot.name] = sharded
                    if full.requires_grad is not sharded.requires_grad:  # type: ignore[union-attr]
                        sharded.requires_grad_(full.requires_grad)  # type: ignore[union-attr]
        self.installed = False

    def adopt_values(self, values: Sequence[Tensor]) -> None:
        """Take over `values` (one local shard per parameter) in place."""
        for parameter, value in zip(self.parameters, values):
            parameter.match_trainability()
            if value is not parameter.local:
                if self.extension or value.data_ptr() != parameter.local.data_ptr():
                    parameter.local.copy_(value)
                parameter.bind_to_flat_shard(parameter.local)

    # --- gathering ---

    def allocate_unsharded(self) -> Gather:
        """Memory for the full parameters, on the compute lane, and what gathers them.

        Raises StateError if the shards cannot be gathered.
        """
        full = self._full
        if full is None:
            self._check_device()
            with torch.inference_mode(False), torch.no_grad():
                full = self._full = self._make_unsharded()
            full.keep = self._keeps
        versions = self._versions()
        if full.versions and versions != full.versions:  # let autograd find graphs that saved the old values
            changed = [p.full for p, old, new in zip(self.parameters, full.versions, versions) if old != new]
            torch.autograd.graph.increment_version(changed)  # type: ignore[arg-type]
        return full.allocate(versions)

    def _make_unsharded(self) -> FlatBuffer | ExtensionBuffer:
        """The buffer, and the full parameters over it."""
        full = FlatBuffer(self.layout, self.dtypes, self.collectives, self.storage, self.shard)
        for parameter, view in zip(self.parameters, full.views):
            parameter.make_unsharded(view, any_grad_dtype=self.dtypes.casts_gradients)
        return full

    def gather_copy(self) -> tuple[FlatBuffer, Gather]:
        """A buffer in memory of its own, and what gathers into it; to be read by `values_in` then."""
        self._check_device()
        with torch.no_grad():
            copy = FlatBuffer(self.layout, self.dtypes, self.collectives, self.storage, self.shard)
            return copy, copy.allocate([])

    def values_in(self, buffer: FlatBuffer) -> list[Tensor]:
        """The tensors that modules compute with, of a buffer that was gathered into: one per parameter."""
        return [parameter.sharding.to_module(view) for parameter, view in zip(self.parameters, buffer.views)]

    def _check_device(self) -> None:
        device, home = self.parameters[0].local.device, self.storage.home
        if device.type == "meta":
            names = ", ".join(f"'{p.name}'" for p in self.parameters[:3]) + (", ..." if len(self.parameters) > 3 else "")
            raise StateError(
                f"parameters {names} are still on the meta device: call model.to_empty(device='{home.type}') and "
                "then model.reset_parameters() of every module or model.load_state_dict(...) before the first forward, or "
                "fullshard.materialize(model)"
            )
        if device != home:
            what = "its CPUOffloadPolicy keeps shards" if self.storage.host else "its mesh computes"
            raise StateError(
                f"parameter '{self.parameters[0].name}' is on {device}, but {what} on {home}: move the model with .to('{home}')"
            )

    def finish_gather(self, work: LaneWork) -> None:
        """The compute lane is ordered behind the gather: memory that only the gather needed can go."""
        if self._full is not None:
            self._full.release_staging()
        if self.storage.host:
            self._copying = work

    def note_copy_to_device(self, work: LaneWork) -> None:
        """Remember that shards in host memory are read until `work` ends: writes of the host wait for it."""
        if self.storage.host:
            self._copying = work  # lanes run in order: whoever waits for it has waited for those before

    def synchronize_host(self) -> None:
        """Have the host wait until shards in its memory are no longer read by a copy to the device, so that it may write."""
        copying, self._copying = self._copying, None
        if copying is not None:
            copying.block()

    def save_subgroup_shard(self) -> None:
        """Before the full parameters go: keep this rank's part of the smaller group's copy of them."""
        if isinstance(self._full, FlatBuffer):
            self._full.save_subgroup_shard()

    def drop_subgroup_shard(self) -> None:
        """Keep that part no longer."""
        if isinstance(self._full, FlatBuffer):
            self._full.drop_subgroup_shard()

    def invalidate_autograd(self) -> None:
        """Let a backward that reads the full parameters, which are about to go for good, raise instead."""
        if self._full is not None:
            torch.autograd.graph.increment_version([p.full for p in self.parameters if p.full is not None])

    def keep_memory(self, keep: bool) -> None:
        """Keep the memory of full parameters, and of what is gathered and reduced, from now on."""
        self._keeps = keep
        if self._full is not None:
            self._full.keep = keep
        if not keep:
            self._sums.clear()

    def sum_memory(self, dtype: torch.dtype, taken: Tensor | None) -> Tensor:
        """Return kept memory for the sum of this rank's gradients, (shard_numel,), other than that of the last sum."""
        for memory in self._sums:
            if memory is not taken and memory.dtype == dtype:
                return memory
        self._sums.append(torch.empty(self.layout.shard_numel, dtype=dtype, device=self.storage.device))
        return self._sums[-1]

    def free_unsharded(self) -> None:
        """Give the memory of the full parameters back, unless it is kept; they stay."""
        if self._full is not None:
            self._full.free()

    def drop_unsharded(self) -> None:
        """A gather failed half way: messages may still arrive in its memory, which goes when the last of them is forgotten."""
        self.uninstall()
        self._full = None

    def take_gradients(self) -> list[Tensor | None] | None:
        """The gradients that autograd left at the full parameters; None if it left none."""
        grads: list[Tensor | None] = []
        found = False
        if self.grads.shown:
            self.grads.hide()
        for parameter in self.parameters:
            full = parameter.full
            grad = None if full is None else full.grad
            if grad is not None:
                full.grad = None  # type: ignore[union-attr]
                found = True
                if not parameter.sharding.is_plain:
                    grad = parameter.sharding.grad_to_local(grad, name=parameter.name)
            grads.append(grad)
        return grads if found else None


class ExtensionGroup(ParamGroup):
    """A group of one parameter whose tensor subclass gathers itself: its shard is its own, and so is its unsharded buffer.

    It is gathered over the shard axis, whatever `reshard_after_forward` says of smaller groups.
    """

    extension = True

    def _bind(self, values: Sequence[Tensor], unwritten: Container[int]) -> Tensor:
        parameter = self.parameters[0]
        parameter.bind_to_flat_shard(own_shard(values[0], parameter.sharding))
        return torch.zeros(0, dtype=self.dtypes.storage, device=values[0].device)

    def _make_unsharded(self) -> ExtensionBuffer:
        return ExtensionBuffer(self.parameters[0], self.collectives.gather, self.dtypes, self.storage)

    def gather_copy(self) -> tuple[FlatBuffer, Gather]:
        """Raises StateError: it has one memory only."""
        self._check_device()
        raise StateError(
            f"parameter '{self.parameters[0].name}' gathers itself (fsdp_pre_all_gather) in one memory only: read it in "
            "a forward, or between unshard() and reshard()"
        )


def _zero_gaps(flat: Tensor, taken: Sequence[tuple[int, int]]) -> None:
    """Write zeros between these stretches of (first element, elements), and behind the last one."""
    end = 0
    for start, size in [*sorted(taken), (flat.numel(), 0)]:
        if end < start:
            flat[end:start].zero_()
        end = start + size


def group_class(value: Tensor) -> type[ParamGroup]:
    """The class of the group of a parameter whose shard is, or is to be, `value`."""
    return ExtensionGroup if travels_alone(value) else ParamGroup


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
