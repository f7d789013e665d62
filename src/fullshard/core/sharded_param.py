"""One sharded parameter: its DTensor (sharded), the tensor that modules compute with (unsharded), and its module slots."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from fullshard import _torch
from fullshard.checks.collective_log import UnitName
from fullshard.core.module_tree import ParamRef, Slot
from fullshard.core.param_sharding import ParamSharding
from fullshard.core.sharded_tensor import LOGICAL, as_parameter
from fullshard.errors import StateError
from fullshard.policies import GradDtype


class BackReference(weakref.ref["ShardedParameter"]):
    """Weak reference from a DTensor to its ShardedParameter. A copied or unpickled one returns None, as a dead one does."""

    __slots__ = ()

    def __reduce__(self) -> Any:
        return type, (None,)  # the class of None, which returns None when it is called


def back_references(tensors: Iterable[Tensor]) -> list[BackReference | None]:
    """Return the back-reference of each tensor, or None. They are the same objects until a shard is bound to memory again."""
    return [tensor.__dict__.get(LOGICAL) for tensor in tensors]


def logical_parameters(tensors: Iterable[Tensor]) -> list[ShardedParameter]:
    """Return the ShardedParameter of each tensor in `tensors` that has one."""
    return [found for reference in back_references(tensors) if reference is not None and (found := reference()) is not None]


class _Replacements:
    by_old = WeakTensorKeyDictionary()  # old tensor -> the parameter that replaced it
    generation = 0


def set_replacement(old: Tensor, by: nn.Parameter) -> None:
    """Record that `by` replaces `old`: optimizers and lists of parameters that hold `old` are treated as if they held `by`."""
    if _Replacements.by_old.get(old) is not by:
        _Replacements.generation += 1
        _Replacements.by_old[old] = by


def replacement_of(tensor: Tensor) -> nn.Parameter | None:
    """Return the parameter that replaces `tensor` now, or None if nothing replaced it."""
    if LOGICAL in tensor.__dict__:  # a sharded parameter, which nothing replaced: spares a lookup of a microsecond
        return None
    found: nn.Parameter | None = None
    now = _Replacements.by_old.get(tensor)
    while now is not None:  # more than one, if it was sharded, undone by undo() and sharded again
        found, now = now, _Replacements.by_old.get(now)
    return found


def current_parameter(tensor: Tensor) -> Tensor:
    """Return the parameter that took the place of `tensor`, or `tensor` itself."""
    now = replacement_of(tensor)
    return tensor if now is None else now


def replacement_generation() -> int:
    """Return a number that changes with every replacement. While it is the same, results of `replacement_of` are current."""
    return _Replacements.generation


_COUNTER = "_fullshard_counter"  # attribute of a sharded parameter: a DTensor without memory, with the same version counter


def _counted(tensor: DTensor, counters: dict[torch.device, DTensor]) -> DTensor:
    """Return a DTensor like `tensor` that shares a version counter with all others of its device that got these `counters`.

    One read then shows whether an operator of DTensor wrote to one of them or, as in a state dict, to a `detach()` of one.
    """
    if tensor.is_inference():
        return tensor  # without a counter
    if tensor.device not in counters:
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)  # whatever class the local tensor has
        counters[tensor.device] = _torch.dtensor(empty, _torch.spec_of(tensor))
    made = _torch.counted_by(counters[tensor.device], tensor)
    made.__dict__[_COUNTER] = counters[tensor.device]
    return made


def version_counters(sharded: Iterable[Tensor]) -> tuple[list[Tensor], bool]:
    """Return one tensor for each version counter of these parameters, and whether all of them share counters (`_counted`)."""
    found = [(tensor, tensor.__dict__.get(_COUNTER, tensor)) for tensor in sharded]
    counters = {id(counter): counter for _, counter in found}
    return list(counters.values()), all(counter is not tensor for tensor, counter in found)


class ParamSlot:
    """A place where a parameter is registered: a module and a name."""

    __slots__ = ("_module", "name", "parameters", "uses_setattr")

    def __init__(self, slot: Slot) -> None:
        self.name = slot.name
        self.parameters = _torch.parameters_of(slot.module)  # a strong reference to the module would be a reference cycle
        self._module = weakref.ref(slot.module)
        # Some modules store parameters a second time and update that in __setattr__; torch's RNNs have `_flat_weights`.
        self.uses_setattr = type(slot.module).__setattr__ is not nn.Module.__setattr__

    @property
    def module(self) -> nn.Module | None:
        """The module; None if it was deleted."""
        return self._module()

    @property
    def content(self) -> nn.Parameter | None:
        """The parameter that is registered now; None if it was removed."""
        return self.parameters.get(self.name)

    def put(self, parameter: nn.Parameter) -> None:
        """Register `parameter` on the module."""
        module = self.module if self.uses_setattr else None
        if module is None:
            self.parameters[self.name] = parameter
        else:
            setattr(module, self.name, parameter)


def user_attributes(parameter: Tensor) -> dict[str, Any]:
    """Return the attributes that the user set on a parameter, without those of fullshard."""
    return {key: value for key, value in parameter.__dict__.items() if not key.startswith("_fullshard")}


class ShardedParameter:
    """One parameter of a unit: sharded parameter, unsharded parameter, and the slots where one of them is registered.

    A tied parameter has several slots. FSDP2 calls this class FSDPParam.
    """

    moves = 0  # how often shards of any parameter got other memory: as long as it is equal, so are all addresses

    def __init__(
        self,
        reference: ParamRef,
        sharding: ParamSharding,
        sharded: nn.Parameter | None = None,
        *,
        keeps_dtype: bool = False,
        grad_dtype: GradDtype | None = None,
        counters: dict[torch.device, DTensor] | None = None,
    ) -> None:
        """Shard the parameter of `reference`, or adopt `sharded`, which is given if the unit is a copy.

        `keeps_dtype`: the all-gather keeps the parameter's dtype, whatever the mixed precision policy is. `grad_dtype`: of
        `.grad`; None to take it from the original. `counters`: version counters that others share; None for one of its own.
        """
        original = reference.parameter
        self.name = reference.name  # qualified, within the unit
        self.sharding, self.keeps_dtype = sharding, keeps_dtype
        self.slots = [ParamSlot(slot) for slot in reference.slots]
        self.grad_dtype = GradDtype(*_torch.grad_dtype_of(original)) if grad_dtype is None else grad_dtype
        self.spec = sharding.spec(original.dtype)  # of the sharded parameter
        self._counters = {} if counters is None else counters
        # Set by the unit: weak references, since units and groups own parameters. Until then they return None.
        self.unit: Callable[[], Any] = NoneType
        self.group: Callable[[], Any] = NoneType  # the same object for all parameters of a group
        self.unit_name = UnitName("")
        # What modules compute with (`to_parameter`), over the group's unsharded buffer; None before the first all-gather.
        self.unsharded: nn.Parameter | None = None
        # Unsharded gradient of backwards that do not reduce, in the dtype `Dtypes.kept`, (sharding.local_shape).
        self.local_grad: Tensor | None = None
        # This rank's shard, (sharding.shard_shape), a part of the group's flat shard. `sharded` is a DTensor over it.
        self.local: Tensor
        if sharded is None:
            self.local = sharding.slice(_torch.local_part(original.detach()))
            sharded = self._as_sharded(_torch.as_own_storage(self.local), original.requires_grad)
        else:
            sharded.__dict__.pop(_COUNTER, None)
            sharded = as_parameter(sharded, sharded.requires_grad)  # type: ignore[arg-type]
            self.local = _torch.local_part(sharded)
        self.sharded = sharded

    def _as_sharded(self, local: Tensor, requires_grad: bool) -> nn.Parameter:
        return as_parameter(_counted(_torch.dtensor(local, self.spec), self._counters), requires_grad)

    @property
    def current(self) -> nn.Parameter:
        """The parameter that is registered now: unsharded or sharded."""
        unsharded = self.unsharded
        return unsharded if unsharded is not None and self.slots[0].content is unsharded else self.sharded

    @property
    def shape(self) -> torch.Size:
        """Shape of the parameter, not of a shard."""
        return self.sharding.shape

    @property
    def requires_grad(self) -> bool:
        """True if the sharded parameter is trainable."""
        return self.sharded.requires_grad

    # --- the sharded parameter ---

    def bind_to_flat_shard(self, local: Tensor) -> None:
        """Give the sharded parameter the local tensor `local`, a part of a flat shard that already has the values."""
        if local.dtype != self.spec.tensor_meta.dtype:  # type: ignore[union-attr]
            self.spec = self.sharding.spec(local.dtype)
        self.local = local
        ShardedParameter.moves += 1
        if self.sharded.dtype != local.dtype or self.sharded.device != local.device or self.sharded.is_inference():
            # Dtype and device of a DTensor are fixed. So swap contents: the object that optimizers reference stays the same.
            fresh = self._as_sharded(local, self.sharded.requires_grad)
            extras = {k: v for k, v in self.sharded.__dict__.items() if k not in fresh.__dict__}
            _torch.carry_hooks(self.sharded, fresh)
            torch.utils.swap_tensors(self.sharded, fresh)
            self.sharded.__dict__.update(extras)
        _torch.point_at(self.sharded, local)  # type: ignore[arg-type]
        if self.grad_dtype.explicit:  # a swap, if there was one, discarded the tensor's `grad_dtype`
            _torch.set_grad_dtype(self.sharded, self.grad_dtype.dtype)
        self.sharded.__dict__[LOGICAL] = BackReference(self)

    def adopt_grad_dtype(self) -> bool:
        """Take over the `grad_dtype` that the caller set on the sharded parameter. Return True if it is a new one."""
        found = GradDtype(*_torch.grad_dtype_of(self.sharded))
        is_new = found.explicit and found != self.grad_dtype
        if is_new:
            self.grad_dtype = found
        return is_new

    def wait_for_readers(self) -> None:
        """Block the host until no copy to the device reads the shard in host memory. Call this before a write."""
        if (group := self.group()) is not None:
            group.synchronize_host()

    def note_write(self) -> None:
        """Record a write to the shard, so that the next all-gather is not skipped."""
        # Fused operations, and DTensor's foreach operations, increase no version counter.
        if (group := self.group()) is not None:
            group.writes += 1

    def assign(self, value: Tensor) -> None:
        """Replace the shard's values, for `.data = value`. Raise StateError if its dtype, shape or placements do not fit."""
        if value.dtype != self.local.dtype:
            raise StateError(
                f"Expected .data of {self.local.dtype} for parameter '{self.name}', got {value.dtype}. Cast the model with "
                ".to(dtype) first."
            )
        rows = self.sharding.rows_of(value.detach(), name=self.name, what="the new .data")
        self.wait_for_readers()
        self.replace_values(rows)
        self.note_write()

    def replace_values(self, rows: Tensor) -> None:
        """Copy `rows` (sharding.shard_shape) into the shard, but not into other tensors that share its memory.

        So `old = p.data; p.data = new` and `old = state_dict(); load_state_dict(new, assign=True)` leave `old` unchanged, as
        with plain parameters.
        """
        # Nothing to copy if `rows` are the shard itself: same address and strides. Many tensor subclasses have the address 0.
        if not rows.numel() or (rows.data_ptr() == self.local.data_ptr() != 0 and rows.stride() == self.local.stride()):
            return
        group = self.group()
        if group is None:  # its unit was deleted: tensors that share the memory change, too
            self.local.copy_(rows)
        else:
            group.replace_values(self, rows)

    def slice(self, full: Tensor) -> Tensor:
        """Return this rank's rows of a plain tensor with the parameter's shape."""
        return self.sharding.slice(self.sharding.local_of(full))

    def dtensor_like_shard(self, local: Tensor) -> DTensor:
        """Return a DTensor with the placements of the sharded parameter and the local tensor `local`."""
        if local.dtype != self.local.dtype or local.device != self.local.device or not self.sharding.is_plain:
            # With a storage offset the wrapper's data_ptr() is not 0, and torch.save takes it for a tensor with memory.
            return _torch.dtensor(_torch.as_own_storage(local), self.sharding.spec(local.dtype))
        return _torch.dtensor_like(self.local, local, self.spec)

    # --- the unsharded parameter ---

    def make_unsharded(self, view: Tensor, *, any_grad_dtype: bool) -> None:
        """Create the unsharded parameter in `view` (sharding.local_shape), a part of the unsharded buffer.

        `any_grad_dtype`: autograd keeps gradients in the dtype in which they were computed. Reductions cast them.
        """
        self.unsharded = self.sharding.to_parameter(view, requires_grad=self.sharded.requires_grad)
        if any_grad_dtype:
            _torch.set_grad_dtype(self.unsharded, None)
        set_replacement(self.unsharded, self.sharded)

    # --- slots ---

    def put(self, parameter: nn.Parameter) -> None:
        """Register `parameter` in all slots."""
        for slot in self.slots:
            slot.put(parameter)

    def install_in(self, slots: Iterable[Slot]) -> None:
        """Register the sharded parameter in further slots, where it is not registered yet."""
        known = {(id(slot.parameters), slot.name) for slot in self.slots}
        for slot in slots:
            if (id(_torch.parameters_of(slot.module)), slot.name) not in known:
                self.slots.append(ParamSlot(slot))
                self.slots[-1].put(self.sharded)
                if (group := self.group()) is not None:
                    group.slots = None

    def read_slots(self, *, assigned: bool, dtensors: bool = False) -> Tensor:
        """Return this rank's shard, (sharding.shard_shape), as the modules have it: `local`, unless it was moved or replaced.

        assigned: accept any other Parameter in a slot, full or sharded like this one, as after load_state_dict(); the last
        slot counts. dtensors: accept DTensors that belong to no unit. All else, and an empty slot, raises StateError.
        """
        found = _torch.local_part(self.sharded)
        for slot in self.slots:
            current = slot.content
            if current is self.sharded or current is self.unsharded:
                continue
            fits = assigned or (dtensors and isinstance(current, DTensor) and LOGICAL not in current.__dict__)
            if current is None or not fits:
                raise self.foreign_error(slot)
            found = self.sharding.rows_of(current.detach(), name=self.name, what="the new value")
        return found

    def take_slots(self) -> None:
        """Put the sharded parameter back in slots that hold another one, clear its `.grad`, and take over `requires_grad`."""
        for slot in self.slots:
            current = slot.content
            if current is not None and current is not self.sharded:
                self.sharded.grad = None
                if current is not self.unsharded:
                    self.sharded.requires_grad_(current.requires_grad)
                    set_replacement(current, self.sharded)
                slot.put(self.sharded)

    def foreign_error(self, slot: ParamSlot) -> StateError:
        """Return the error for a slot with another parameter, or with the sharded one after a move out of the flat shard."""
        current = slot.content
        if current is self.sharded:
            return StateError(
                f"Parameter '{self.name}' of unit '{self.unit_name.name}' was moved or cast by a call on a module inside of "
                "its unit. Call to(), half() etc. on the module that was passed to fully_shard(), or on one around it, or cast "
                "before fully_shard()."
            )
        return StateError(
            f"Expected parameter '{self.name}' of unit '{self.unit_name.name}' as fully_shard() registered it, got "
            f"{'none' if current is None else f'another {type(current).__name__}'}: a unit computes with its own shards only. "
            "Write values in `with fullshard.full_params(module):` or by load_state_dict(), and assign, remove or parametrize "
            "parameters before fully_shard(). Instead of torch.func.functional_call, use undo() on a copy of the model, or "
            "compute with the tensors of fullshard.gathered()."
        )
