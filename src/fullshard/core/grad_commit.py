"""Gradient commit: set `.grad` of all parameters or none."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fullshard import _torch
from fullshard.core.sharded_param import ShardedParameter

if TYPE_CHECKING:
    from fullshard.core.param_group import ParamGroup


class GradCommit:
    """Commit of one group: sets `.grad` of its parameters to parts of the flat gradient, or adds to existing gradients.

    Parts of the flat gradient get a mark, (layout, flat gradient), as an attribute. Gradients of a group that share one mark
    are parts of one flat gradient (`flat_gradient`). The name of the attribute differs from parameter to parameter: a gradient
    that the caller moved to another parameter has no mark there.

    Attributes:
        gradients: if a parameter has hooks or gets no gradient, the gradients as the hooks returned them, None for a parameter
            without one; they get no mark. None instead of a list otherwise: all parts of the flat gradient become gradients.
    """

    __slots__ = ("_flat", "_group", "gradients")

    def __init__(self, group: ParamGroup, flat: Tensor, used: Sequence[bool], *, has_hooks: bool) -> None:
        """Run the gradient hooks of the parameters (`register_hook`), before the first commit changes a `.grad`.

        Args:
            group: the parameter group.
            flat: the flat gradient, (shard_numel,) in the dtype of `.grad`.
            used: for each parameter, whether it gets a gradient.
            has_hooks: whether a parameter has hooks.
        """
        self._group, self._flat = group, flat
        plan = group.reduction
        self.gradients: list[Any] | None = None
        if has_hooks or not all(used):
            self.gradients = [
                _hooked(parameter, flat.as_strided(*view)) if is_used else None
                for parameter, view, is_used in zip(group.parameters, plan.views, used)
            ]

    def commit(self) -> None:
        """Set `.grad` of the parameters, or add to the existing gradients."""
        if self.gradients is not None:
            return self._commit_each(self.gradients)
        total = flat_gradient(self._group)
        if total is not None:  # all gradients are parts of it, so one addition is enough for the whole group
            total.add_(self._flat)
            return
        group, flat, plan = self._group, self._flat, self._group.reduction
        new: list[Any] = []  # arguments of set_gradients, for parameters without a gradient
        same_dtype = flat.dtype == group.dtypes.storage
        for parameter, key, view in zip(group.parameters, plan.keys, plan.views):
            sharded = parameter.sharded
            grad = sharded.grad
            if grad is None:
                local = flat.as_strided(*view)
                if same_dtype:
                    new.append((sharded, parameter.local, local, parameter.spec, key))
                else:
                    new.append((sharded, local, local, parameter.sharding.spec(flat.dtype), key))
            else:
                _add(grad, parameter.dtensor_like_shard(flat.as_strided(*view)))
        _torch.set_gradients(new, (plan.views, flat))

    def _commit_each(self, gradients: Sequence[Any]) -> None:
        for parameter, gradient in zip(self._group.parameters, gradients):
            if gradient is None:
                continue
            grad = parameter.sharded.grad
            if grad is None:
                parameter.sharded.grad = gradient
            else:
                _add(grad, gradient)

    def discard(self) -> str:
        """Set `.grad` of all parameters of the group to None, and return the name of their unit."""
        for parameter in self._group.parameters:
            parameter.sharded.grad = None
        return self._group.parameters[0].unit_name.name

    def run_post_grad_hooks(self) -> None:
        """Call the post-accumulate-grad hooks of the parameters."""
        for parameter, gradient in zip(self._group.parameters, self.gradients or ()):
            if gradient is not None:
                for hook in _torch.parameter_hooks(parameter.sharded)[1]:
                    hook(parameter.sharded)


def _add(total: Tensor, more: Tensor) -> None:
    """Add `more` to `total` in place."""
    total, more = _torch.local_pair(total, more)
    total.add_(more)


def flat_gradient(group: ParamGroup) -> Tensor | None:
    """Return the flat gradient, (shard_numel,), if `.grad` of every parameter is a part of it; else None.

    Padding between the parameters is zero.
    """
    common: Any = None
    for parameter, key in zip(group.parameters, group.reduction.keys):
        grad = parameter.sharded.grad
        mark = None if grad is None else grad.__dict__.get(key)
        if mark is None or (common is not None and mark is not common):
            return None
        common = mark
    return common[1] if common is not None and common[0] is group.reduction.views else None


def _hooked(parameter: ShardedParameter, local: Tensor) -> Any:
    """Return the reduced gradient `local`, (sharding.shard_shape), after the hooks on the sharded parameter."""
    gradient: Any = parameter.dtensor_like_shard(local)
    hook: Callable[..., Any]
    for hook in _torch.parameter_hooks(parameter.sharded)[0]:
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient


def commit_all(commits: Sequence[GradCommit]) -> None:
    """Commit all groups, then run the post-accumulate-grad hooks.

    If an exception or interrupt cuts a commit short, some gradients are set and some are not, and additions cannot be undone.
    Then all gradients of these groups are discarded, with a warning.
    """
    try:
        for one in commits:
            one.commit()
    except BaseException as failure:
        names = ", ".join(f"'{name}'" for name in dict.fromkeys([one.discard() for one in commits]))
        warnings.warn(
            f"{type(failure).__name__} came while .grad of {names} was being set. These gradients are discarded, together with "
            "what earlier backwards of the step added to them.",
            stacklevel=2,
        )
        raise
    for one in commits:
        if one.gradients is not None:
            one.run_post_grad_hooks()


__all__ = ["GradCommit", "commit_all", "flat_gradient"]
