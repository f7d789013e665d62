"""Operators and their schemas, functional collectives, dispatch modes, dynamo, and pytrees."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # defines operators of `_SENDS_NOTHING`
from torch import Tensor, nn
from torch._C._dynamo import eval_frame
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import SUPPORTED_NODES
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only

Function = TypeVar("Function", bound=Callable[..., Any])

# --- schemas of operators --------------------------------------------------------------------------------------------
#
# Private: `_schema` of an operator, the only source of its argument names and of the arguments that it writes to.


def writes(operation: Any) -> bool:
    """Return True if an operator writes to any of its arguments."""
    return operation._schema.is_mutable


def written_to(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the argument tensors that an operator writes to, including tensors in lists."""
    given = [args[at] if at < len(args) else kwargs.get(name) for at, name in _arguments_written_to(operation)]
    return [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]


@cache
def _arguments_written_to(operation: Any) -> list[tuple[int, str]]:
    return [(at, known.name) for at, known in enumerate(operation._schema.arguments) if known.is_write]


def returns_tensors(operation: Any) -> bool:
    """Return True if an operator returns tensors rather than numbers."""
    return any("Tensor" in str(known.type) for known in operation._schema.returns)


def only_writes(operation: Any) -> bool:
    """Return True if an operator writes to its arguments and returns nothing, as `_foreach_add_` does."""
    return operation._schema.is_mutable and not operation._schema.returns


def argument(operation: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return an argument of an aten operator by name; None if the operator has no such argument or the call omits it."""
    names = [known.name for known in operation._schema.arguments]
    at = names.index(name) if name in names else len(args)
    return args[at] if at < len(args) else kwargs.get(name)


# --- functional collectives ------------------------------------------------------------------------------------------


# Private: the functional collectives of DTensor, and `_resolve_process_group`, since their arguments contain the name of a
# process group. A collective that is missing here is reported as not simulated.
_SENDS_NOTHING = {torch.ops._c10d_functional.wait_tensor, torch.ops._c10d_functional._wrap_tensor_autograd}
_FUNCTIONAL: dict[Any, tuple[str, int]] = {  # kind, and the index of the group's name in the arguments
    torch.ops._c10d_functional.all_reduce.default: ("all_reduce", 2),
    torch.ops._c10d_functional.all_gather_into_tensor.default: ("all_gather", 2),
    torch.ops._c10d_functional.reduce_scatter_tensor.default: ("reduce_scatter", 3),
    torch.ops._c10d_functional.all_to_all_single.default: ("all_to_all", 3),
}


def functional_collective(operation: Any, args: Sequence[Any]) -> tuple[Any, int] | None:
    """Return (kind, number of ranks) of a functional collective, as DTensor calls them; None for other operators."""
    found = _FUNCTIONAL.get(operation)
    return None if found is None else (found[0], dist.distributed_c10d._resolve_process_group(args[found[1]]).size())  # type: ignore[attr-defined]


def sends_messages(operation: Any) -> bool:
    """Return True if an operator is a collective of torch.distributed."""
    return operation.namespace in ("c10d", "_c10d_functional") and operation.overloadpacket not in _SENDS_NOTHING


# --- dynamo ----------------------------------------------------------------------------------------------------------


def not_traced(fn: Function) -> Function:
    """Mark a function as one that dynamo traces neither into nor below, like `torch.compiler.disable` without its frame.

    The frame of `disable` costs 4 us in each call, also where nothing is compiled.
    """
    # Private: `set_code_exec_strategy`, which dynamo itself marks code with, and the attribute that ends an inlined call. If
    # they move, importing fullshard fails, or test_compile does.
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(fn.__code__, eval_frame._FrameExecStrategy(skip, skip))  # type: ignore[attr-defined]
    fn.__dict__["_torchdynamo_disable"] = True
    return fn


def is_tracing() -> bool:
    """Return True in code that dynamo traces, or runs while it traces."""
    # Private: `TracingContext`. Before torch 2.13, `is_compiling()` is False in functions that dynamo runs instead of tracing
    # them, as `Optimizer._init_group`. If it moves, steps raise AttributeError.
    return torch.compiler.is_compiling() or torch._guards.TracingContext.try_get() is not None


def mark_managed(module: nn.Module) -> None:
    """Set the two attributes that make dynamo pass parameters as inputs of each call instead of baking them into the graph."""
    # Private: `_is_fsdp_managed_module` and `_fsdp_use_orig_params`, which FSDP2 sets as well. If dynamo stops reading them, it
    # may bake a parameter into the graph that fullshard replaces later.
    module._is_fsdp_managed_module = True  # type: ignore[assignment]
    module._fsdp_use_orig_params = True  # type: ignore[assignment]


# --- pytrees -----------------------------------------------------------------------------------------------------------------


def pytree_children(value: object) -> list[Any] | None:
    """Return the children of a container whose class is registered as a pytree (one level of it); None for other objects."""
    # Private: `SUPPORTED_NODES`, the registry. `tree_leaves` walks down to the leaves at once, and dataclasses that are no
    # pytrees are leaves for it.
    node = SUPPORTED_NODES.get(type(value))
    return None if node is None else node.flatten_fn(value)[0]
