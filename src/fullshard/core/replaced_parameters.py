"""The parameters that fully_shard(), undo() and the like replaced, and the ones that took their places."""

from __future__ import annotations

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from fullshard.core.sharded_tensor import LOGICAL


class _Replacements:
    by_old = WeakTensorKeyDictionary()  # old tensor -> the parameter that replaced it
    generation = 0


def set_replacement(old: Tensor, by: nn.Parameter) -> None:
    """Record that `by` replaces `old`, so that optimizers and lists over `old` are understood as over `by`."""
    if _Replacements.by_old.get(old) is not by:
        _Replacements.generation += 1
        _Replacements.by_old[old] = by


def replacement_of(tensor: Tensor) -> nn.Parameter | None:
    """Return the parameter that replaces `tensor` now, or None if nothing replaced it."""
    if LOGICAL in tensor.__dict__:  # a sharded parameter: the lookup below costs a microsecond
        return None
    found: nn.Parameter | None = None
    now = _Replacements.by_old.get(tensor)
    while now is not None:  # more than one, if it was sharded, unsharded and sharded again
        found, now = now, _Replacements.by_old.get(now)
    return found


def current_parameter(tensor: Tensor) -> Tensor:
    """Return the parameter that took the place of `tensor`, or `tensor` itself."""
    now = replacement_of(tensor)
    return tensor if now is None else now


def replacement_generation() -> int:
    """Return a number that changes with every replacement: until then, results of `replacement_of` are current."""
    return _Replacements.generation
