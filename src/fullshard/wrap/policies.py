"""FSDP1's policies: which modules become units, asked module by module."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import nn

from fullshard.sharding.module_tree import children_first

Classes = Iterable[type[nn.Module]]


class Policy(ABC):
    """Says which modules of a model become units. An alternative to a function (module, recurse, nonwrapped_numel) -> bool."""

    @abstractmethod
    def choose(self, model: nn.Module, ignored_modules: Collection[nn.Module]) -> dict[nn.Module, dict[str, Any]]:
        """The modules that become units, and options of `fully_shard` that only theirs have. The model itself always is one."""


class ModuleWrapPolicy(Policy):
    """Every module of these classes is a unit.

    >>> policy = ModuleWrapPolicy({nn.TransformerEncoderLayer})
    >>> policy(nn.TransformerEncoderLayer(8, 2), recurse=False)
    True

    Source: `torch.distributed.fsdp.wrap.ModuleWrapPolicy`.
    """

    def __init__(self, module_classes: Classes | type[nn.Module]) -> None:
        self._classes = _classes(module_classes, "ModuleWrapPolicy takes")

    def choose(self, model: nn.Module, ignored_modules: Collection[nn.Module]) -> dict[nn.Module, dict[str, Any]]:
        return {module: {} for module in _considered(model, ignored_modules) if isinstance(module, self._classes)}

    def __call__(self, module: nn.Module, recurse: bool, *args: Any, **kwargs: Any) -> bool:
        return recurse or isinstance(module, self._classes)

    def __repr__(self) -> str:
        return f"ModuleWrapPolicy({', '.join(cls.__name__ for cls in self._classes)})"


class CustomPolicy(Policy):
    """`lambda_fn(module)` says of each module: True, it is a unit; a dict, it is one with these options; else it is none.

    Source: `torch.distributed.fsdp.wrap.CustomPolicy`.
    """

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | dict[str, Any]]) -> None:
        self._fn = lambda_fn

    def choose(self, model: nn.Module, ignored_modules: Collection[nn.Module]) -> dict[nn.Module, dict[str, Any]]:
        chosen: dict[nn.Module, dict[str, Any]] = {}
        for name, module in children_first(model):
            if module in ignored_modules:
                continue
            answer = self._fn(module)
            if not isinstance(answer, (bool, dict)):
                raise ValueError(
                    f"the function of CustomPolicy must return True, False or a dict of options, got {answer!r} for '{name}'"
                )
            if answer:
                chosen[module] = dict(answer) if isinstance(answer, dict) else {}
        return chosen


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """Every module that holds parameters is a unit."""
    return True


def lambda_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, lambda_fn: Callable[[nn.Module], bool]
) -> bool:
    """Modules for which `lambda_fn(module)` holds; to be given as `functools.partial(..., lambda_fn=...)`."""
    return recurse or bool(lambda_fn(module))


def transformer_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, transformer_layer_cls: Collection[type[nn.Module]]
) -> bool:
    """Modules of `transformer_layer_cls`; to be given as `functools.partial(..., transformer_layer_cls={Block})`."""
    return recurse or isinstance(module, tuple(transformer_layer_cls))


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = 100_000_000,
    force_leaf_modules: Collection[type[nn.Module]] | None = None,
    exclude_wrap_modules: Collection[type[nn.Module]] | None = None,
) -> bool:
    """Modules with at least `min_num_params` elements that no unit below them holds.

    force_leaf_modules: classes that are not looked into; None is `size_based_auto_wrap_policy.FORCE_LEAF_MODULES`.
    exclude_wrap_modules: classes that are no units themselves; None is `size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES`.
    """
    leaves = size_based_auto_wrap_policy.FORCE_LEAF_MODULES if force_leaf_modules is None else force_leaf_modules  # type: ignore[attr-defined]
    never = size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES if exclude_wrap_modules is None else exclude_wrap_modules  # type: ignore[attr-defined]
    return nonwrapped_numel >= min_num_params and not isinstance(module, tuple(leaves if recurse else never))


size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES = {nn.ModuleList, nn.ModuleDict}  # type: ignore[attr-defined]
size_based_auto_wrap_policy.FORCE_LEAF_MODULES = {nn.MultiheadAttention}  # type: ignore[attr-defined]


def or_policy(module: nn.Module, recurse: bool, nonwrapped_numel: int, policies: Iterable[Callable[..., bool]]) -> bool:
    """Modules that any of `policies` chooses; to be given as `functools.partial(or_policy, policies=[...])`."""
    return any(policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel) for policy in policies)


_WRAPPING: ContextVar[tuple[Callable[..., Any], dict[str, Any]] | None] = ContextVar("fullshard wrapping", default=None)


@contextmanager
def enable_wrap(*, wrapper_cls: Callable[..., Any], **wrapper_kwargs: Any) -> Iterator[None]:
    """Inside the block `wrap(module)` is `wrapper_cls(module, **wrapper_kwargs)`; the innermost block counts.

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
    """`module`, wrapped as the `enable_wrap` block around says, with these arguments going first; outside of one, as it is."""
    around = _WRAPPING.get()
    if around is None:
        return module
    wrapper, arguments = around
    return wrapper(module, **{**arguments, **wrap_overrides})


def _considered(model: nn.Module, ignored: Collection[nn.Module]) -> list[nn.Module]:
    left_out = set(ignored)
    return [module for module in model.modules() if module not in left_out]


def _classes(classes: Any, what: str) -> tuple[type[nn.Module], ...]:
    """One class or several."""
    listed = [classes] if isinstance(classes, type) or not isinstance(classes, Iterable) else list(classes)
    for cls in listed:
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise ValueError(f"{what} classes of modules, got {cls!r}")
    return tuple(dict.fromkeys(listed))
