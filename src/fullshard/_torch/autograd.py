"""Autograd: graphs, backwards, and hooks of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import Node

current_graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""Return a number that identifies the backward that runs on this thread; -1 outside a backward.

Private: torch has no public test for a running backward.
"""


def on_backward_end(callback: Callable[[], None]) -> None:
    """Run `callback` when the running backward ends without an error. After an error, the engine only drops the callback."""
    # Private: `queue_callback`, as FSDP2 uses it. The engine must hold the only reference, since the callback's deletion is the
    # sign of a failed backward.
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def accumulates_into(leaves: Sequence[Tensor]) -> bool:
    """Return False if the running backward reaches only inputs that it was given, and none of `leaves` is among them.

    So it is True in every backward without `inputs=`, also where no leaf is in its graph. Call this in a hook before a node.
    """
    if any(_will_run(torch.autograd.graph.get_gradient_edge(leaf).node) for leaf in leaves):
        return True
    # A backward without inputs runs every node that the current one leads to.
    return all(map(_will_run, _nodes_from([torch._C._current_autograd_node()])))


def _nodes_from(starts: Iterable[Any]) -> Iterator[Any]:
    """Yield these nodes and all nodes that they lead to."""
    seen = set(starts)
    pending = list(seen)
    while pending:
        node = pending.pop()
        yield node
        unseen = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= unseen
        pending += unseen


def _will_run(node: Any) -> bool:
    """Return True if the running backward runs the node."""
    # Private: torch has no public test. It refuses a leaf whose gradient `torch.autograd.grad` returns instead of accumulating.
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return False


def leads_to(outputs: Sequence[Any], leaves: Sequence[Tensor]) -> set[int]:
    """Return the indices of the `leaves` to which the graphs of `outputs` (tensors or edges) lead.

    Visits every node of the graphs, unless all leaves are found earlier.
    """
    edge = torch.autograd.graph.get_gradient_edge
    wanted = {edge(leaf).node: number for number, leaf in enumerate(leaves) if leaf.requires_grad}
    found: set[int] = set()
    for node in _nodes_from(edge(one).node if isinstance(one, Tensor) else one.node for one in outputs) if wanted else ():
        if node in wanted:
            found.add(wanted[node])
            if len(found) == len(wanted):
                break
    return found


def graph_nodes(tensor: Tensor) -> list[Node | None]:
    """Return the graph nodes at which a backward through `tensor` begins, None in the place of one that it does not have."""
    # Private: `_base` and `_is_view`, autograd's record of views; `_current_level`, that of the forward-mode levels.
    found = [tensor.grad_fn]
    if tensor.grad_fn is not None and tensor._is_view():  # an in-place write to a view replaces its node, but not its base's
        assert tensor._base is not None
        found.append(tensor._base.grad_fn)
    if forward_ad._current_level >= 0:  # a loss of the tangent has a graph of its own
        tangent = forward_ad.unpack_dual(tensor).tangent
        found.append(None if tangent is None else tangent.grad_fn)
    return found


def carry_hooks(source: Tensor, target: Tensor) -> None:
    """Share the hooks of `source` with `target`. The handles that `register_hook` returned still remove them."""
    # Private: `_backward_hooks` and `_post_accumulate_grad_hooks`, dicts by handle. The dict itself is shared, since handles
    # refer to it weakly. If torch renames the second one, its hooks are lost silently.
    if source._backward_hooks:
        target._backward_hooks = source._backward_hooks
    accumulated = getattr(source, "_post_accumulate_grad_hooks", None)
    if accumulated:
        target._post_accumulate_grad_hooks = accumulated  # type: ignore[attr-defined]


def have_reduction_hooks(parameters: Iterable[Tensor]) -> bool:
    """Return True if any parameter has hooks on its gradient or post-accumulate-grad hooks."""
    for parameter in parameters:
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            return True
    return False


def parameter_hooks(parameter: Tensor) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    """Return (hooks on the gradient, post-accumulate-grad hooks) of a sharded parameter.

    Autograd never runs them, since it sees unsharded parameters only.
    """
    before = list((parameter._backward_hooks or {}).values())
    after = list((getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values())
    return before, after


@contextmanager
def without_post_grad_hooks(tensors: Iterable[Tensor]) -> Iterator[None]:
    """A block in which the post-accumulate-grad hooks of these tensors do not run."""
    # Private: `_post_accumulate_grad_hooks`, where torch looks for them. There is no public way to suspend them.
    held = [(one, hooks) for one in tensors if (hooks := getattr(one, "_post_accumulate_grad_hooks", None))]
    for one, _ in held:
        one._post_accumulate_grad_hooks = None  # type: ignore[assignment]
    try:
        yield
    finally:
        for one, hooks in held:
            one._post_accumulate_grad_hooks = hooks


profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled
"""Return True if a profiler runs on this thread. `record_function` costs 8 us even if none runs.

Private: torch.autograd.profiler has no public test with this cost.
"""
