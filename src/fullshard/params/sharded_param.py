"""One logical parameter: the DTensor shard that callers hold, the full tensor that modules compute with, and their slots."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard import _torch
from fullshard.consistency.collective_log import UnitName
from fullshard.errors import StateError
from fullshard.params.sharded_tensor import LOGICAL, as_parameter
from fullshard.params.stale_params import redirect_to
from fullshard.policies import GradDtype
from fullshard.sharding.module_tree import ParamRef, Slot
from fullshard.sharding.param_sharding import ParamSharding


class WeakBackReference:
    """A weak way back, from the sharded parameter say. A copy or a pickle of its owner leads nowhere."""

    __slots__ = ("_ref",)

    def __init__(self, target: Any = None) -> None:
        self._ref = None if target is None else weakref.ref(target)

    def __call__(self) -> Any:
        """The target, None once it is deleted."""
        return None if self._ref is None else self._ref()

    def __reduce__(self) -> Any:
        return WeakBackReference, ()

    def __deepcopy__(self, memo: Any) -> WeakBackReference:
        return WeakBackReference()


def is_ours(key: str) -> bool:
    """Whether an attribute of a parameter is fullshard's own."""
    return key.startswith("_fullshard")


def logical_parameters(tensors: Iterable[Tensor]) -> list[ShardedParameter]:
    """The sharded parameters among `tensors`."""
    references = [tensor.__dict__.get(LOGICAL) for tensor in tensors]
    return [found for reference in references if reference is not None and (found := reference()) is not None]


def inside(tensor: Tensor) -> Tensor:
    """The tensor that this rank computes with: a DTensor's own part."""
    return _torch.local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


class ParamSlot:
    """One slot that a parameter is installed in. Holds the module's dict of parameters, not the module: no cycle."""

    __slots__ = ("_module", "name", "parameters", "uses_setattr")

    def __init__(self, slot: Slot) -> None:
        self.parameters = _torch.parameters_of(slot.module)
        self.name = slot.name
        # Modules that keep parameters elsewhere too (RNNs do) learn of a swap through their own __setattr__.
        self.uses_setattr = type(slot.module).__setattr__ is not nn.Module.__setattr__
        self._module = weakref.ref(slot.module)

    @property
    def module(self) -> nn.Module | None:
        """The module, None once it is deleted."""
        return self._module()

    @property
    def content(self) -> nn.Parameter | None:
        """The parameter that the slot holds now."""
        return self.parameters.get(self.name)

    def put(self, parameter: nn.Parameter) -> None:
        """Have the slot hold `parameter`."""
        module = self._module() if self.uses_setattr else None
        if module is None:
            self.parameters[self.name] = parameter
        else:
            setattr(module, self.name, parameter)


class WriteGuard(Protocol):
    """Stands before the shard of a parameter, for its unit."""

    def __call__(self) -> None:
        """Raises StateError if this is no moment for an optimizer to write the shard."""
        ...

    def wait_for_readers(self) -> None:
        """Have the host wait until nothing reads the shard that the host may write."""
        ...

    def note_write(self, parameter: ShardedParameter, action: str) -> None:
        """A caller wrote to the shard: all ranks must."""
        ...


class ShardedParameter:
    """sharded parameter 1 - n slots, each of which holds `sharded`, or `full` while the unit computes.

    name: qualified within its unit.        sharding: its shapes, and which rows are this rank's.
    sharded: the DTensor Parameter that callers see, over `local` (sharding.shard_shape), a view of the group's flat shard.
    full: the Parameter that modules compute with, over the group's unsharded buffer; None until first gathered.
    write_count: how often an optimizer wrote the shard.
    unit_name: of the unit that gathers it.
    local_grad: the full gradient of backwards that did not communicate, in the reduce dtype.
    shown_grad: the same, where the caller may see it, as `.grad` of the full parameter while that is installed by hand.
    grad_dtype: of its `.grad`, as the caller set it. keeps_dtype: whether it is gathered in its own dtype whatever the policy.
    before_step: asked before an optimizer writes the shard, and told of other writes.
    """

    __slots__ = (
        "__weakref__",
        "_exposed",
        "before_step",
        "full",
        "grad_dtype",
        "keeps_dtype",
        "local",
        "local_grad",
        "name",
        "sharded",
        "sharding",
        "shown_grad",
        "slots",
        "spec",
        "unit_name",
        "write_count",
    )

    def __init__(
        self,
        reference: ParamRef,
        sharding: ParamSharding,
        sharded: nn.Parameter | None = None,
        *,
        keeps_dtype: bool = False,
        grad_dtype: GradDtype | None = None,
    ) -> None:
        """`sharded`: the DTensor Parameter, where it exists already and the referenced one is not the full one."""
        original = reference.parameter
        self.keeps_dtype = keeps_dtype
        self.grad_dtype = GradDtype(*_torch.grad_dtype_of(original)) if grad_dtype is None else grad_dtype
        self.name, self.sharding = reference.name, sharding
        self.slots = [ParamSlot(slot) for slot in reference.slots]
        self.spec = sharding.spec(original.dtype)
        self.full: nn.Parameter | None = None
        self.local_grad: Tensor | None = None
        self.shown_grad: Tensor | None = None
        self.write_count = 0
        self.before_step: WriteGuard | None = None
        self.unit_name = UnitName("")
        self._exposed: tuple[int, int] | None = None  # version and address of the full parameter, when a caller got it
        if sharded is None:
            self.local: Tensor = sharding.slice(inside(original.detach()))
            sharded = as_parameter(_torch.dtensor(_torch.at_origin(self.local), self.spec), original.requires_grad)
        else:
            self.local = inside(sharded)
        self.sharded = sharded

    @property
    def module(self) -> nn.Module | None:
        """The first module that it is installed in."""
        return self.slots[0].module

    @property
    def current(self) -> nn.Parameter:
        """The parameter that its module has now: `full` or `sharded`."""
        full = self.full
        return full if full is not None and self.slots[0].content is full else self.sharded

    @property
    def shape(self) -> torch.Size:
        """Of the full tensor."""
        return self.sharding.shape

    @property
    def requires_grad(self) -> bool:
        """Whether the sharded parameter is trainable."""
        return self.sharded.requires_grad

    # --- the sharded parameter ---

    def bind_to_flat_shard(self, local: Tensor) -> None:
        """The shard lives in `local` from now on, a view of a group's flat shard that holds its values already."""
        if local.dtype != self.spec.tensor_meta.dtype:  # type: ignore[union-attr]
            self.spec = self.sharding.spec(local.dtype)
        self.local = local
        if self.sharded.dtype != local.dtype or self.sharded.device != local.device:
            # The wrapper's own dtype and device are fixed when it is made: give this object the inside of a fresh one.
            fresh = as_parameter(_torch.dtensor(local, self.spec), self.sharded.requires_grad)
            extras = {k: v for k, v in self.sharded.__dict__.items() if k not in fresh.__dict__}
            _torch.carry_hooks(self.sharded, fresh)
            torch.utils.swap_tensors(self.sharded, fresh)
            self.sharded.__dict__.update(extras)
        _torch.point_at(self.sharded, local)  # type: ignore[arg-type]
        if self.grad_dtype.explicit:  # a cast made another tensor of it, whose dtype is unset
            _torch.set_grad_dtype(self.sharded, self.grad_dtype.dtype)
        self.sharded.__dict__[LOGICAL] = WeakBackReference(self)

    def has_new_grad_dtype(self, source: Tensor) -> bool:
        """Return True if the caller set another `grad_dtype` on the sharded parameter, or on one that replaces it."""
        found = GradDtype(*_torch.grad_dtype_of(source))
        return found.explicit and found != self.grad_dtype

    def adopt_grad_dtype(self, source: Tensor) -> None:
        """Take over the `grad_dtype` that the caller set; the groups of the unit are to be made anew."""
        self.grad_dtype = GradDtype(*_torch.grad_dtype_of(source))

    def wait_for_readers(self) -> None:
        """Before the host writes the shard: have it wait until no copy to the device reads it."""
        if self.before_step is not None:
            self.before_step.wait_for_readers()

    def note_write(self, action: str = "") -> None:
        """The shard was written. DTensor's foreach and fused operations move no version counter.

        `action`: the words for a caller's write, which all ranks must have made.
        """
        self.write_count += 1
        if action and self.before_step is not None:
            self.before_step.note_write(self, action)

    def assign(self, value: Tensor) -> None:
        """As `.data = value`: take over these values. Raises StateError, naming the parameter, for another dtype or shape."""
        if value.dtype != self.local.dtype:
            raise StateError(
                f"parameter '{self.name}' of dtype {self.local.dtype} was assigned .data of {value.dtype}: cast the model "
                "with .to(dtype) first"
            )
        rows = self.sharding.rows_of(value.detach(), name=self.name, doing="was assigned .data")
        self.wait_for_readers()
        with torch.no_grad():
            self.local.copy_(rows)
        self.note_write("assignment to .data")

    def slice(self, full: Tensor) -> Tensor:
        """This rank's rows of a plain tensor of the full shape."""
        return self.sharding.slice(self.sharding.local_of(full))

    def dtensor_like_shard(self, local: Tensor) -> DTensor:
        """A DTensor like the sharded parameter over other local data, for gradients and optimizer states."""
        if local.dtype != self.local.dtype or local.device != self.local.device or not self.sharding.is_plain:
            return _torch.dtensor(local, self.sharding.spec(local.dtype))
        return _torch.dtensor_like(self.local, local, self.spec)

    # --- the full parameter ---

    def make_unsharded(self, view: Tensor, *, any_grad_dtype: bool) -> None:
        """Make the full parameter over `view` (sharding.local_shape), a part of the unsharded buffer.

        any_grad_dtype: whether autograd leaves gradients in the dtype in which they were computed. Reductions cast them.
        """
        self.full = nn.Parameter(self.sharding.to_module(view), requires_grad=self.sharded.requires_grad)
        if any_grad_dtype:
            _torch.set_grad_dtype(self.full, None)
        redirect_to(self.full, self.sharded)

    def match_trainability(self) -> None:
        """Let the full parameter require grad as the sharded one does."""
        if self.full is not None and self.full.requires_grad is not self.sharded.requires_grad:
            self.full.requires_grad_(self.sharded.requires_grad)

    def note_version(self) -> None:
        """The full parameter is handed to the caller: remember what is in it."""
        self._exposed = None if self.full is None else (self.full._version, self.full.data_ptr())

    def _is_written(self) -> bool:
        """Whether the caller wrote to the full parameter since it was handed out; asked once."""
        exposed, self._exposed = self._exposed, None
        full = self.full
        return exposed is not None and full is not None and exposed != (full._version, full.data_ptr())

    def adopt_writes(self) -> None:
        """As `check_unwritten`, but the written values become the shard's, if they can."""
        full = self.full
        if not self._is_written() or full is None:
            return
        if full.dtype != self.local.dtype:
            raise StateError(
                f"parameter '{self.name}' of unit '{self.unit_name.name}' was written in a registered method as {full.dtype}, "
                f"but is stored as {self.local.dtype}: write to it in `with fullshard.full_params(module):`"
            )
        with torch.no_grad():
            self.local.copy_(self.sharding.slice(inside(full.detach())))
        self.note_write()

    def check_unwritten(self) -> None:
        """Raises StateError if the caller wrote to the full parameter that was handed out, which is about to go."""
        if self._is_written():
            raise StateError(
                f"parameter '{self.name}' of unit '{self.unit_name.name}' was written while it was unsharded by hand, which "
                "reshard() loses: write to it in `with fullshard.full_params(module):`, or to its shard while it is sharded"
            )

    # --- slots ---

    def put(self, parameter: nn.Parameter) -> None:
        """Have all slots hold `parameter`."""
        for slot in self.slots:
            slot.put(parameter)

    def install_in(self, slots: Iterable[Slot]) -> None:
        """Also be installed in these slots, if it is not yet."""
        known = {(id(slot.parameters), slot.name) for slot in self.slots}
        for slot in slots:
            if (id(_torch.parameters_of(slot.module)), slot.name) not in known:
                self.slots.append(ParamSlot(slot))
                self.slots[-1].put(self.sharded)

    def install_plain(self, plain: nn.Parameter) -> None:
        """Have the slots hold `plain` for a while."""
        redirect_to(plain, self.sharded)
        self.put(plain)

    def restore(self, plain: nn.Parameter) -> bool:
        """The end of `install_plain`; False if another Parameter was assigned meanwhile, which the next gather honours."""
        self.sharded.requires_grad_(plain.requires_grad)
        found = True
        for slot in self.slots:
            if slot.content is plain:
                slot.put(self.sharded)
            else:
                found = False
        return found

    def restore_sharded(self, *, forget: bool = False) -> None:
        """Have the slots hold the sharded parameter, whatever they hold now.

        The trainability of a Parameter that was assigned there is taken over, unless with `forget`.
        """
        for slot in self.slots:
            current = slot.content
            if current is not self.sharded:
                if current is not None and current is not self.full and not forget:
                    self.sharded.requires_grad_(current.requires_grad)
                    redirect_to(current, self.sharded)
                slot.put(self.sharded)
