"""One logical parameter with two faces: the DTensor shard that callers hold, and the full tensor that modules compute with."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard import _torch
from fullshard.layout import Extent
from fullshard.mesh import ShardAxis
from fullshard.modules import Claim, Slot
from fullshard.schedule import StateError

_SUCCESSOR = "_fullshard_sharded"  # on a plain parameter: the sharded one that took its place


_LOGICAL = "_fullshard_parameter"  # on a sharded parameter: a weak reference to the ShardedParameter it is the face of


def successor(tensor: Tensor) -> nn.Parameter | None:
    """The sharded parameter that stands for `tensor` now, None if `tensor` never was a parameter of a unit."""
    return tensor.__dict__.get(_SUCCESSOR)


def is_sharded(tensor: Tensor) -> bool:
    """Whether `tensor` is the sharded face of a parameter of a unit."""
    return _LOGICAL in tensor.__dict__


def logical_parameters(tensors: Iterable[Tensor]) -> list[ShardedParameter]:
    """The sharded parameters among `tensors`."""
    references = [tensor.__dict__.get(_LOGICAL) for tensor in tensors]
    return [found for reference in references if reference is not None and (found := reference()) is not None]


class Installation:
    """One slot a parameter is installed in. Holds the module's dict of parameters, not the module: no cycle."""

    __slots__ = ("_module", "name", "parameters")

    def __init__(self, slot: Slot) -> None:
        self.parameters = _torch.parameters_of(slot.module)
        self.name = slot.name
        # Modules that keep parameters elsewhere too (RNNs do) learn of a swap through their own __setattr__.
        custom = type(slot.module).__setattr__ is not nn.Module.__setattr__
        self._module = weakref.ref(slot.module) if custom else None

    def put(self, parameter: nn.Parameter) -> None:
        module = self._module() if self._module is not None else None
        if module is None:
            self.parameters[self.name] = parameter
        else:
            setattr(module, self.name, parameter)


class ShardedParameter:
    """sharded parameter 1 - n slots; its two faces live as long as it does.

    name: qualified within its unit.        shape: of the full tensor.      extent: the rows of this rank.
    sharded: the DTensor Parameter callers see, over `local` (rows, *shape[1:]), a view of the group's flat shard.
    full: the Parameter modules compute with, over the group's full storage; None until first gathered.
    kept: the full gradient of backwards that did not communicate, in the reduce dtype.
    before_step: raises StateError if this is no moment for an optimizer to write the shard.
    """

    __slots__ = (
        "__weakref__",
        "_writes",
        "axis",
        "before_step",
        "extent",
        "full",
        "installations",
        "kept",
        "local",
        "name",
        "shape",
        "sharded",
        "spec",
    )

    def __init__(self, claim: Claim, axis: ShardAxis) -> None:
        original = claim.parameter
        self.name, self.shape, self.axis = claim.name, original.shape, axis
        self.extent = Extent.cut(self.shape[0], ranks=axis.ranks, rank=axis.rank)
        self.installations = [Installation(slot) for slot in claim.slots]
        self.spec = _torch.shard_spec(axis.mesh, self.shape, original.dtype)
        self.full: nn.Parameter | None = None
        self.kept: Tensor | None = None
        self._writes = 0
        self.before_step: Callable[[], None] | None = None
        self.local: Tensor = self.slice(original.detach())
        self.sharded = nn.Parameter(_torch.dtensor(self.local, self.spec), requires_grad=original.requires_grad)

    def succeed(self, original: nn.Parameter) -> None:
        """Take the place of the caller's parameter: its slots, attributes, hooks, gradient and identity."""
        taken = self.sharded.__dict__
        for key, value in original.__dict__.items():
            if key not in taken:
                taken[key] = value
        _torch.carry_hooks(original, self.sharded)
        if original.grad is not None:
            self.sharded.grad = self.face(self.slice(original.grad).clone())
        original.__dict__[_SUCCESSOR] = self.sharded
        for installation in self.installations:
            installation.put(self.sharded)

    @property
    def requires_grad(self) -> bool:
        return self.sharded.requires_grad

    @property
    def version(self) -> int:
        """Grows when the shard is written through its DTensor or by an optimizer."""
        return self._writes + self.sharded._version

    def wrote(self) -> None:
        """An optimizer wrote the shard. DTensor's foreach and fused operations move no version counter."""
        self._writes += 1

    def take_gradient(self) -> Tensor | None:
        """What autograd left at the full face."""
        full = self.full
        grad = None if full is None else full.grad
        if grad is not None:
            full.grad = None  # type: ignore[union-attr]
        return grad

    def keep(self, grad: Tensor, dtype: torch.dtype) -> None:
        """Add to what backwards without communication kept."""
        self.kept = grad.to(dtype) if self.kept is None else self.kept.add_(grad)

    def take_kept(self) -> Tensor | None:
        kept, self.kept = self.kept, None
        return kept

    def discard_gradient(self, *, set_to_none: bool) -> None:
        """As `zero_grad`, including what was kept."""
        self.kept = None
        if self.sharded.grad is not None:
            if set_to_none:
                self.sharded.grad = None
            else:
                self.sharded.grad.detach_().zero_()

    def deliver(self, gradient: DTensor) -> None:
        """Set the first gradient of a step."""
        self.sharded.grad = gradient

    @property
    def local_shape(self) -> tuple[int, ...]:
        return (self.extent.rows, *self.shape[1:])

    def slice(self, full: Tensor) -> Tensor:
        """This rank's rows of a tensor of the full shape."""
        return full[self.extent.start : self.extent.stop]

    def face(self, local: Tensor) -> DTensor:
        """A DTensor like the sharded parameter over other local data, for gradients and optimizer states."""
        return _torch.dtensor(local, self.spec)

    def shard_of(self, full: Tensor, *, dtype: torch.dtype) -> DTensor:
        """A DTensor like the sharded parameter with this rank's rows of `full`, where the shard is (or will be, if on meta)."""
        device = full.device if self.local.device.type == "meta" else self.local.device
        local = self.slice(full).to(device=device, dtype=dtype, copy=True)
        return _torch.dtensor(local, _torch.shard_spec(self.axis.mesh, self.shape, dtype))

    def settle(self, local: Tensor) -> None:
        """The shard lives in `local` from now on, a view of a group's flat shard that holds its values already."""
        if local.dtype != self.spec.tensor_meta.dtype:  # type: ignore[union-attr]
            self.spec = _torch.shard_spec(self.axis.mesh, self.shape, local.dtype)
        self.local = local
        if self.sharded.dtype != local.dtype or self.sharded.device != local.device:
            # The wrapper's own dtype and device are fixed when it is made: give this object the inside of a fresh one.
            fresh = nn.Parameter(_torch.dtensor(local, self.spec), requires_grad=self.sharded.requires_grad)
            extras = {k: v for k, v in self.sharded.__dict__.items() if k not in fresh.__dict__}
            _torch.carry_hooks(self.sharded, fresh)
            torch.utils.swap_tensors(self.sharded, fresh)
            self.sharded.__dict__.update(extras)
        _torch.point_at(self.sharded, local)  # type: ignore[arg-type]
        self.sharded.__dict__[_LOGICAL] = weakref.ref(self)

    def materialize(self, view: Tensor) -> None:
        """`view` (the full shape, over the full storage) becomes the full face."""
        self.full = nn.Parameter(view, requires_grad=self.sharded.requires_grad)
        self.full.__dict__[_SUCCESSOR] = self.sharded

    def is_current(self) -> bool:
        """Whether every slot holds the sharded face over our memory and trainability has not changed since."""
        sharded = self.sharded
        for installation in self.installations:
            if installation.parameters.get(installation.name) is not sharded:
                return False
        full = self.full
        return _torch.local_tensor(sharded) is self.local and (full is None or full.requires_grad is sharded.requires_grad)  # type: ignore[arg-type]

    def incoming(self) -> Tensor:
        """The values the slots say this rank's shard has now, (rows, *shape[1:]); the caller may have put others there.

        A Parameter that was assigned is honoured if it is a full tensor or a DTensor like ours: its values and (by
        `restore_sharded`) its trainability are taken over, the identity of the sharded parameter stays. Changes nothing
        itself. Raises StateError for what cannot be honoured.
        """
        found: list[nn.Parameter] = []
        kept = False
        for installation in self.installations:
            current = installation.parameters.get(installation.name)
            if current is None:
                raise StateError(
                    f"parameter '{self.name}' was removed from its module after fully_shard: "
                    "remove it before sharding, or set requires_grad_(False) on it"
                )
            if current is self.sharded or current is self.full:
                kept = True
            elif all(current is not other for other in found):
                found.append(current)
        ours = _torch.local_tensor(self.sharded)  # type: ignore[arg-type]
        if not found:
            return ours
        values = [self.take(parameter.detach(), what="was assigned") for parameter in found]
        others = [*values[1:], ours] if kept else values[1:]
        if not all(value.device.type == "meta" or torch.equal(value, values[0]) for value in others):
            raise StateError(
                f"parameter '{self.name}' is installed in {len(self.installations)} slots (it is tied), which now hold "
                "different values: assign the same Parameter to all of them, or untie them before fully_shard"
            )
        return values[0]

    def take(self, value: Tensor, *, what: str) -> Tensor:
        """This rank's rows of `value`, a full tensor or a DTensor sharded like this parameter."""
        if tuple(value.shape) != tuple(self.shape):
            raise StateError(
                f"parameter '{self.name}' of shape {tuple(self.shape)} {what} a tensor of shape {tuple(value.shape)}"
            )
        if not isinstance(value, DTensor):
            return self.slice(value)
        if value.device_mesh != self.axis.mesh or value.placements != self.spec.placements:
            raise StateError(
                f"parameter '{self.name}' {what} a DTensor on {value.device_mesh} with {value.placements}; expected "
                f"{self.axis.mesh} with {self.spec.placements}: redistribute() it first, or give the full tensor"
            )
        return _torch.local_tensor(value)

    def match_trainability(self) -> None:
        """Let the full face require grad as the sharded one does."""
        if self.full is not None and self.full.requires_grad is not self.sharded.requires_grad:
            self.full.requires_grad_(self.sharded.requires_grad)

    def install_full(self) -> None:
        full = self.full
        assert full is not None
        self.match_trainability()
        for installation in self.installations:
            installation.put(full)

    def install_sharded(self) -> None:
        """Give the slots back their sharded face; a Parameter assigned meanwhile stays and is seen at the next gather."""
        full, sharded = self.full, self.sharded
        if full is None:
            return
        for installation in self.installations:
            if installation.parameters.get(installation.name) is full:
                installation.put(sharded)
                if full.requires_grad is not sharded.requires_grad:
                    sharded.requires_grad_(full.requires_grad)

    def restore_sharded(self) -> None:
        """As `install_sharded`, whatever the slots hold: the trainability of a Parameter assigned there is taken over."""
        for installation in self.installations:
            current = installation.parameters.get(installation.name)
            if current is not self.sharded:
                if current is not None and current is not self.full:
                    self.sharded.requires_grad_(current.requires_grad)
                    current.__dict__[_SUCCESSOR] = self.sharded
                installation.put(self.sharded)

    def receive(self, local: Tensor) -> None:
        """Accumulate a reduced gradient into `.grad`, and fire the hooks callers put on the sharded parameter."""
        gradient: Any = self.face(local)
        before, after = _torch.parameter_hooks(self.sharded)
        hook: Callable[..., Any]
        for hook in before:
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        if self.sharded.grad is None:
            self.sharded.grad = gradient
        else:
            self.sharded.grad.add_(gradient)
        for hook in after:
            hook(self.sharded)
