"""FSDP1's wrapping policies, which decide module by module what becomes a unit; `enable_wrap` and `wrap`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch.distributed.fsdp.wrap as torch_wrap
from torch import nn

from fullshard.core import children_first

Classes = Iterable[type[nn.Module]]


class Policy(ABC):
    """Base class of policies that choose units; an alternative to a function (module, recurse, nonwrapped_numel) -> bool.

    Source: `_Policy` of torch.distributed.fsdp.wrap.
    """

    @abstractmethod
    def choose(self, model: nn.Module, ignored_modules: Collection[nn.Module]) -> dict[nn.Module, dict[str, Any]]:
        """Choose the modules that become units. The model itself is always a unit.

        Args:
            model: the model to be sharded.
            ignored_modules: modules that must not be chosen.

        Returns:
            The chosen modules, each with the options of `fully_shard` for this module only ({} for none).
        """


class ModuleWrapPolicy(torch_wrap.ModuleWrapPolicy):
    """Policy that makes every module of the given classes a unit. It is also a policy function, which `or_policy` accepts.

    Args:
        module_classes: a module class, or several; subclasses count.

    Raises:
        ValueError: for a value that is not a module class.

    Example:
        >>> policy = ModuleWrapPolicy({nn.TransformerEncoderLayer})
        >>> policy(nn.TransformerEncoderLayer(8, 2), recurse=False)
        True

    Source: `torch.distributed.fsdp.wrap.ModuleWrapPolicy`.
    """

    def __init__(self, module_classes: Classes | type[nn.Module]) -> None:
        classes = checked_classes(module_classes, "ModuleWrapPolicy")
        super().__init__(classes)
        self._text = f"ModuleWrapPolicy({', '.join(cls.__name__ for cls in classes)})"

    def __repr__(self) -> str:
        return self._text


class CustomPolicy(Policy):
    """Policy that calls `lambda_fn(module)` for each module, to decide whether it is a unit, and with which options.

    Args:
        lambda_fn: called with each module once, children first. Returns True for a unit, a non-empty dict of options of
            `fully_shard` for a unit with these options, or False.

    Example:
        >>> def chosen(module):
        ...     return {"reshard_after_forward": False} if isinstance(module, nn.Embedding) else isinstance(module, nn.GRU)
        >>> policy = CustomPolicy(chosen)

    Source: `torch.distributed.fsdp.wrap.CustomPolicy`.
    """

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | dict[str, Any]]) -> None:
        self._fn = lambda_fn

    def choose(self, model: nn.Module, ignored_modules: Collection[nn.Module]) -> dict[nn.Module, dict[str, Any]]:
        """Choose each module if the function returns True or a non-empty dict for it.

        Args:
            model: the model to be sharded.
            ignored_modules: modules that the function is not called with.

        Returns:
            The modules, each with its options.

        Raises:
            ValueError: if the function returns neither a bool nor a dict.
        """
        chosen: dict[nn.Module, dict[str, Any]] = {}
        for name, module in children_first(model):
            if module in ignored_modules:
                continue
            answer = self._fn(module)
            if not isinstance(answer, (bool, dict)):
                raise ValueError(
                    f"Expected True, False or a dict of options from the function of CustomPolicy, got {answer!r} for '{name}'."
                )
            if answer:
                chosen[module] = dict(answer) if isinstance(answer, dict) else {}
        return chosen


def or_policy(module: nn.Module, recurse: bool, nonwrapped_numel: int, policies: Iterable[Callable[..., bool]]) -> bool:
    """Choose each module that at least one of `policies` chooses.

    Args:
        module: the module in question.
        recurse: True to decide about entering the submodules, False to decide whether `module` is a unit.
        nonwrapped_numel: elements at or below `module` that are in no unit.
        policies: policy functions; set them by `functools.partial`.

    Returns:
        True if any of the policies returns True.

    Example:
        >>> from functools import partial
        >>> from fullshard.wrap import size_based_auto_wrap_policy
        >>> policy = partial(or_policy, policies=[ModuleWrapPolicy({nn.Embedding}), size_based_auto_wrap_policy])
    """
    return any(policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel) for policy in policies)


_WRAPPING: ContextVar[tuple[Callable[..., Any], dict[str, Any]] | None] = ContextVar("fullshard wrapping", default=None)


@contextmanager
def enable_wrap(*, wrapper_cls: Callable[..., Any], **wrapper_kwargs: Any) -> Iterator[None]:
    """Make `wrap(module)` return `wrapper_cls(module, **wrapper_kwargs)` inside the block; the innermost block counts.

    Args:
        wrapper_cls: called with the module, for example FSDP1's wrapper.
        wrapper_kwargs: its other arguments.

    Example:
        >>> with enable_wrap(wrapper_cls=nn.Sequential):
        ...     type(wrap(nn.Linear(2, 2))).__name__
        'Sequential'

    Source: `torch.distributed.fsdp.wrap.enable_wrap`.
    """
    token = _WRAPPING.set((wrapper_cls, wrapper_kwargs))
    try:
        yield
    finally:
        _WRAPPING.reset(token)


def wrap(module: nn.Module, **wrap_overrides: Any) -> Any:
    """Wrap `module` with the wrapper class of the enclosing `enable_wrap` block; outside of a block, return it unchanged.

    Args:
        module: the module to wrap.
        wrap_overrides: arguments that override the arguments of the block.

    Returns:
        The result of the wrapper class, or `module`.

    Source: `torch.distributed.fsdp.wrap.wrap`.
    """
    enclosing = _WRAPPING.get()
    if enclosing is None:
        return module
    wrapper, arguments = enclosing
    return wrapper(module, **{**arguments, **wrap_overrides})


def checked_classes(classes: Any, what: str) -> tuple[type[nn.Module], ...]:
    """Return one class or several as a tuple. Raises ValueError, which names `what`, for a value that is not a class."""
    listed = [classes] if isinstance(classes, type) or not isinstance(classes, Iterable) else list(classes)
    for cls in listed:
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise ValueError(f"{what} expected classes of modules, got {cls!r}.")
    return tuple(dict.fromkeys(listed))
