"""One logical parameter with two faces: the DTensor shard that callers hold, and the full tensor that modules compute with."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard import _torch
from fullshard.consistency.collective_log import UnitName
from fullshard.errors import StateError
from fullshard.params.sharded_tensor import LOGICAL, as_parameter
from fullshard.params.stale_params import redirect_to, replace
from fullshard.sharding.module_tree import ParamRef, Slot
from fullshard.sharding.param_sharding import ParamSharding


class WeakBackReference:
    """A weak way back, from the sharded face say. A copy or a pickle of what has it leads nowhere."""

    __slots__ = ("_ref",)

    def __init__(self, target: Any = None) -> None:
        self._ref = None if target is None else weakref.ref(target)

    def __call__(self) -> Any:
        return None if self._ref is None else self._ref()

    def __reduce__(self) -> Any:
        return WeakBackReference, ()

    def __deepcopy__(self, memo: Any) -> WeakBackReference:
        return WeakBackReference()


def is_ours(key: str) -> bool:
    """Whether an attribute of a parameter is fullshard's own."""
    return key.startswith("_fullshard")


def is_sharded(tensor: Tensor) -> bool:
    """Whether `tensor` is the sharded face of a parameter of a unit."""
    back = tensor.__dict__.get(LOGICAL)
    return back is not None and back() is not None


def logical_parameters(tensors: Iterable[Tensor]) -> list[ShardedParameter]:
    """The sharded parameters among `tensors`."""
    references = [tensor.__dict__.get(LOGICAL) for tensor in tensors]
    return [found for reference in references if reference is not None and (found := reference()) is not None]


def inside(tensor: Tensor) -> Tensor:
    """What this rank computes with: a DTensor's own part."""
    return _torch.local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def full_tensor(sharded: DTensor) -> Tensor:
    """The whole of a DTensor, where its own part is (collective). A part kept in the host's memory travels by the device of
    its mesh.
    """
    local = _torch.local_tensor(sharded).detach()
    kind = sharded.device_mesh.device_type
    if local.device.type in (kind, "meta"):
        return sharded.detach().full_tensor()  # type: ignore[attr-defined]
    moved = local.to(torch.device(kind, torch.get_device_module(kind).current_device()))
    return _torch.dtensor(moved, _torch.spec_of(sharded)).full_tensor().to(local.device)


def all_current(parameters: Iterable[ShardedParameter]) -> bool:
    """Whether every slot holds the sharded face over our memory and trainability has not changed since. Runs at each gather."""
    for parameter in parameters:
        sharded, full = parameter.sharded, parameter.full
        for installation in parameter.slots:
            if installation.parameters.get(installation.name) is not sharded:
                return False
        if _torch.local_tensor(sharded) is not parameter.local:
            return False
        if full is not None and full.requires_grad is not sharded.requires_grad:
            return False
    return True


def install_full(parameters: Iterable[ShardedParameter]) -> None:
    """Have every slot hold the full face. Runs at each forward and backward, so it is one loop, and does what `put` does."""
    for parameter in parameters:
        full = parameter.full
        assert full is not None
        if full.requires_grad is not parameter.sharded.requires_grad:
            full.requires_grad_(parameter.sharded.requires_grad)
        for installation in parameter.slots:
            if installation.uses_setattr:
                installation.put(full)
            else:
                installation.parameters[installation.name] = full


def install_sharded(parameters: Iterable[ShardedParameter]) -> None:
    """Give the slots back their sharded face; a Parameter assigned meanwhile stays and is seen at the next gather."""
    for parameter in parameters:
        full, sharded = parameter.full, parameter.sharded
        for installation in parameter.slots if full is not None else ():
            held, name = installation.parameters, installation.name
            if held.get(name) is full:
                if installation.uses_setattr:
                    installation.put(sharded)
                else:
                    held[name] = sharded
                if full.requires_grad is not sharded.requires_grad:  # type: ignore[union-attr]
                    sharded.requires_grad_(full.requires_grad)  # type: ignore[union-attr]


def move_data(parameter: nn.Parameter, device: torch.device) -> None:
    """Move a parameter that is not sharded yet, and its gradient, in place; what is on meta stays there."""
    if parameter.device.type in ("meta", device.type):
        return
    if isinstance(parameter, DTensor):
        for tensor in (parameter, parameter.grad):
            if isinstance(tensor, DTensor):
                _torch.point_at(tensor, _torch.local_tensor(tensor).to(device))
    elif type(parameter.data) is Tensor:
        parameter.data = parameter.data.to(device)
        if parameter.grad is not None:
            parameter.grad = parameter.grad.to(device)
    else:  # `.data` of a wrapper subclass cannot go to another device
        torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach().to(device), parameter.requires_grad))


class ParamSlot:
    """One slot a parameter is installed in. Holds the module's dict of parameters, not the module: no cycle."""

    __slots__ = ("_module", "name", "parameters", "uses_setattr")

    def __init__(self, slot: Slot) -> None:
        self.parameters = _torch.parameters_of(slot.module)
        self.name = slot.name
        # Modules that keep parameters elsewhere too (RNNs do) learn of a swap through their own __setattr__.
        self.uses_setattr = type(slot.module).__setattr__ is not nn.Module.__setattr__
        self._module = weakref.ref(slot.module)

    @property
    def module(self) -> nn.Module | None:
        return self._module()

    def put(self, parameter: nn.Parameter) -> None:
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

    def note_write(self, parameter: ShardedParameter, action: str) -> None:
        """A caller wrote to the shard: all ranks must."""
        ...


class ShardedParameter:
    """sharded parameter 1 - n slots; its two faces live as long as it does.

    name: qualified within its unit.        cut: its shapes, and which rows are this rank's.
    sharded: the DTensor Parameter callers see, over `local` (cut.shard_shape), a view of the group's flat shard.
    full: the Parameter modules compute with, over the group's full storage; None until first gathered.
    write_count: how often an optimizer wrote the shard.
    unit_name: of the unit that gathers it.
    local_grad: the full gradient of backwards that did not communicate, in the reduce dtype.
    before_step: asked before an optimizer writes the shard, and told of other writes.
    """

    __slots__ = (
        "__weakref__",
        "_lent",
        "before_step",
        "full",
        "is_plain",
        "local",
        "local_grad",
        "name",
        "sharded",
        "sharding",
        "slots",
        "spec",
        "unit_name",
        "write_count",
    )

    def __init__(self, claim: ParamRef, cut: ParamSharding, sharded: nn.Parameter | None = None) -> None:
        """`sharded`: the face, where it exists already and the claimed parameter is not the full one."""
        original = claim.parameter
        self.name, self.sharding = claim.name, cut
        self.slots = [ParamSlot(slot) for slot in claim.slots]
        self.spec = cut.spec(original.dtype)
        self.full: nn.Parameter | None = None
        self.local_grad: Tensor | None = None
        self.write_count = 0
        self.is_plain = cut.dense is None and len(cut.shape) > 0  # modules compute with `cut.local_shape` as it is
        self.before_step: WriteGuard | None = None
        self.unit_name = UnitName("")
        self._lent: tuple[int, int] | None = None
        self.local: Tensor = cut.slice(inside(original.detach())) if sharded is None else inside(sharded)
        if sharded is None:
            face = _torch.dtensor(_torch.at_origin(self.local), self.spec)
            sharded = as_parameter(face, original.requires_grad)
        self.sharded = sharded

    @property
    def module(self) -> nn.Module | None:
        """The first module it is installed in."""
        return self.slots[0].module

    @property
    def current(self) -> nn.Parameter:
        """The face that its module has now."""
        installation, full = self.slots[0], self.full
        return full if full is not None and installation.parameters.get(installation.name) is full else self.sharded

    @property
    def shape(self) -> torch.Size:
        """Of the full tensor."""
        return self.sharding.shape

    def replace_original(self, original: nn.Parameter) -> None:
        """Take the place of the caller's parameter: its slots, attributes, hooks, gradient and identity."""
        taken = self.sharded.__dict__
        for key, value in original.__dict__.items():
            if key not in taken:
                taken[key] = value
        _torch.carry_hooks(original, self.sharded)
        if original.grad is not None:
            self.sharded.grad = self.dtensor_like_shard(
                self.sharding.slice(self.sharding.grad_to_local(original.grad, name=self.name)).contiguous().clone()
            )
        replace(original, self.sharded)
        for installation in self.slots:
            installation.put(self.sharded)

    @property
    def requires_grad(self) -> bool:
        return self.sharded.requires_grad

    def note_write(self, action: str = "") -> None:
        """The shard was written. DTensor's foreach and fused operations move no version counter.

        `action`: by a caller, who must have done so on all ranks.
        """
        self.write_count += 1
        if action and self.before_step is not None:
            self.before_step.note_write(self, action)

    def add_local_grad(self, grad: Tensor, dtype: torch.dtype) -> None:
        """Add to what backwards without communication kept."""
        self.local_grad = grad.to(dtype) if self.local_grad is None else self.local_grad.add_(grad)

    def take_local_grad(self) -> Tensor | None:
        kept, self.local_grad = self.local_grad, None
        return kept

    def discard_local_grads(self) -> None:
        """Forget what only this rank holds: what backwards without communication kept, and what lies at the full face."""
        self.local_grad = None
        if self.full is not None:
            self.full.grad = None

    def discard_gradient(self, *, set_to_none: bool) -> None:
        """As `zero_grad`, including what was kept."""
        self.local_grad = None
        if self.sharded.grad is not None:
            if set_to_none:
                self.sharded.grad = None
            else:
                self.sharded.grad.detach_().zero_()

    def slice(self, full: Tensor) -> Tensor:
        """This rank's rows of a plain tensor of the full shape."""
        return self.sharding.slice(self.sharding.local_of(full))

    def dtensor_like_shard(self, local: Tensor) -> DTensor:
        """A DTensor like the sharded parameter over other local data, for gradients and optimizer states."""
        if local.dtype != self.local.dtype or local.device != self.local.device or not self.is_plain:
            return _torch.dtensor(local, self.sharding.spec(local.dtype))
        return _torch.dtensor_like(self.local, local, self.spec)

    def shard_of(self, full: Tensor, *, dtype: torch.dtype) -> DTensor:
        """A DTensor like the sharded parameter with this rank's rows of `full`, where the shard is (or will be, if on meta)."""
        device = full.device if self.local.device.type == "meta" else self.local.device
        local = self.slice(full).to(device=device, dtype=dtype, copy=True, memory_format=torch.contiguous_format)
        return _torch.dtensor(local, self.sharding.spec(dtype))

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
        self.sharded.__dict__[LOGICAL] = WeakBackReference(self)

    def make_unsharded(self, view: Tensor) -> None:
        """`view` (cut.local_shape, over the full storage) becomes the full face."""
        self.full = nn.Parameter(self.sharding.to_module(view), requires_grad=self.sharded.requires_grad)
        redirect_to(self.full, self.sharded)

    def read_slots(self) -> Tensor:
        """The values the slots say this rank's shard has now, (cut.shard_shape); the caller may have put others there.

        A Parameter that was assigned is honoured if it is a full tensor or a DTensor like ours: its values and (by
        `restore_sharded`) its trainability are taken over, the identity of the sharded parameter stays. Changes nothing
        itself. Raises StateError for what cannot be honoured.
        """
        found: list[nn.Parameter] = []
        kept = False
        for installation in self.slots:
            current = installation.parameters.get(installation.name)
            if current is None:
                raise StateError(
                    f"parameter '{self.name}' was removed from its module after fully_shard: "
                    "remove it before sharding, or set requires_grad_(False) on it"
                )
            if current is self.sharded or current is self.full:
                kept = True
                continue
            if not isinstance(current, nn.Parameter) or _torch.in_functional_call():
                raise StateError(
                    f"parameter '{self.name}' was replaced by a {type(current).__name__} for the length of a call, as "
                    "torch.func.functional_call does: a unit computes with its own shards only. Use undo() on a copy of the "
                    "model, or compute with the tensors of fullshard.gathered()"
                )
            if all(current is not other for other in found):
                found.append(current)
        ours = _torch.local_tensor(self.sharded)  # type: ignore[arg-type]
        if not found:
            return ours
        values = [self.local_rows_of(parameter.detach(), what="was assigned") for parameter in found]
        others = [*values[1:], ours] if kept else values[1:]
        if not all(value.device.type == "meta" or torch.equal(value, values[0]) for value in others):
            raise StateError(
                f"parameter '{self.name}' is installed in {len(self.slots)} slots (it is tied), which now hold "
                "different values: assign the same Parameter to all of them, or untie them before fully_shard"
            )
        return values[0]

    def local_rows_of(self, value: Tensor, *, what: str) -> Tensor:
        """This rank's rows of `value`: a full tensor, a DTensor sharded like this parameter, or one as modules compute with."""
        if value.shape != self.shape:
            raise StateError(
                f"parameter '{self.name}' of shape {tuple(self.shape)} {what} a tensor of shape {tuple(value.shape)}"
            )
        if not isinstance(value, DTensor):
            return self.slice(value)
        cut = self.sharding
        if value.device_mesh == cut.mesh and value.placements == cut.placements:
            return _torch.local_tensor(value)
        if cut.dense is not None and (value.device_mesh, value.placements) == (cut.dense.mesh, cut.dense.placements):
            return cut.slice(_torch.local_tensor(value))
        raise StateError(
            f"parameter '{self.name}' {what} a DTensor on {value.device_mesh} with {value.placements}; expected "
            f"{cut.mesh} with {cut.placements}: redistribute() it first, or give the full tensor"
        )

    def assign(self, value: Tensor) -> None:
        """As `.data = value`: take over these values."""
        if value.dtype != self.local.dtype:
            raise StateError(
                f"parameter '{self.name}' of dtype {self.local.dtype} was assigned .data of {value.dtype}: cast the model "
                "with .to(dtype) first"
            )
        rows = self.local_rows_of(value.detach(), what="was assigned .data")
        with torch.no_grad():
            self.local.copy_(rows)
        self.note_write("assignment to .data")

    def note_version(self) -> None:
        """The full face is handed to the caller."""
        self._lent = None if self.full is None else (self.full._version, self.full.data_ptr())

    def adopt_writes(self) -> None:
        """As `check_unwritten`, but what was written becomes the shard's, if it can be."""
        lent, self._lent = self._lent, None
        full = self.full
        if lent is None or full is None or lent == (full._version, full.data_ptr()):
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
        """Raises StateError if the caller wrote to the full face that was handed out, which is about to go."""
        lent, self._lent = self._lent, None
        if lent is not None and self.full is not None and lent != (self.full._version, self.full.data_ptr()):
            raise StateError(
                f"parameter '{self.name}' of unit '{self.unit_name.name}' was written while it was unsharded by hand, which "
                "reshard() loses: write to it in `with fullshard.full_params(module):`, or to its shard while it is sharded"
            )

    def match_trainability(self) -> None:
        """Let the full face require grad as the sharded one does."""
        if self.full is not None and self.full.requires_grad is not self.sharded.requires_grad:
            self.full.requires_grad_(self.sharded.requires_grad)

    def install_in(self, slots: Iterable[Slot]) -> None:
        """Also be installed in these slots, if it is not yet."""
        known = {(id(installation.parameters), installation.name) for installation in self.slots}
        for slot in slots:
            if (id(_torch.parameters_of(slot.module)), slot.name) not in known:
                self.slots.append(ParamSlot(slot))
                self.slots[-1].put(self.sharded)

    def install_plain(self, plain: nn.Parameter) -> None:
        """Have the slots hold `plain` for a while."""
        redirect_to(plain, self.sharded)
        for installation in self.slots:
            installation.put(plain)

    def restore(self, plain: nn.Parameter) -> bool:
        """The end of `install_plain`; False if another Parameter was assigned meanwhile, which the next gather honours."""
        self.sharded.requires_grad_(plain.requires_grad)
        found = True
        for installation in self.slots:
            if installation.parameters.get(installation.name) is plain:
                installation.put(self.sharded)
            else:
                found = False
        return found

    def write(self, full: Tensor, *, grad: bool) -> None:
        """Take this rank's rows of a full plain tensor, and with `grad` of its gradient."""
        self.replace(self.slice(full.detach()))
        if grad:
            rows = None if full.grad is None else self.slice(full.grad).to(self.local.device, self.local.dtype, copy=True)
            self.sharded.grad = None if rows is None else self.dtensor_like_shard(rows.contiguous())

    def replace(self, rows: Tensor) -> None:
        """Make `rows` the values of the shard; one that is on meta gets memory where they are."""
        if self.local.device.type == "meta":
            local = self.dtensor_like_shard(rows.to(self.local.dtype, copy=True).contiguous())
            fresh = nn.Parameter(local, requires_grad=self.sharded.requires_grad)
            for installation in self.slots:
                installation.put(fresh)
        else:
            self.local.copy_(rows)
            self.note_write()

    def copied(self) -> nn.Parameter:
        """A sharded face of its own memory, for a copy of the model."""
        face = _torch.dtensor(self.local.detach().clone(), self.spec)
        return as_parameter(face, self.sharded.requires_grad)

    def unshard_permanently(self, whole: Callable[[ParamSharding, Any], Tensor]) -> nn.Parameter:
        """Put one ordinary Parameter with the full value into every slot; gradients, attributes and hooks too.

        `whole`: what this rank computes with, of a DTensor that is cut so (collective).
        """
        plain = nn.Parameter(self.sharding.to_module(whole(self.sharding, self.sharded)), requires_grad=self.requires_grad)
        plain.__dict__.update({key: value for key, value in self.sharded.__dict__.items() if not is_ours(key)})
        _torch.carry_hooks(self.sharded, plain)
        if self.sharded.grad is not None:
            plain.grad = self.sharding.to_module(whole(self.sharding, self.sharded.grad))
        redirect_to(self.sharded, plain)
        self.sharded.__dict__.pop(LOGICAL, None)
        for installation in self.slots:
            installation.put(plain)
        return plain

    def restore_sharded(self, *, forget: bool = False) -> None:
        """As `install_sharded`, whatever the slots hold: the trainability of a Parameter assigned there is taken over, unless
        what they hold is to be forgotten.
        """
        for installation in self.slots:
            current = installation.parameters.get(installation.name)
            if current is not self.sharded:
                if current is not None and current is not self.full and not forget:
                    self.sharded.requires_grad_(current.requires_grad)
                    redirect_to(current, self.sharded)
                installation.put(self.sharded)

    def hooked_gradient(self, local: Tensor) -> Any:
        """A reduced gradient as the hooks make it that callers put on the sharded parameter."""
        gradient: Any = self.dtensor_like_shard(local)
        hook: Callable[..., Any]
        for hook in _torch.parameter_hooks(self.sharded)[0]:
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        return gradient

    def run_post_grad_hooks(self) -> None:
        """Its gradient is in `.grad`: call the hooks that callers put on the sharded parameter for that."""
        for hook in _torch.parameter_hooks(self.sharded)[1]:
            hook(self.sharded)
