"""`grad`: torch.autograd.grad for sharded parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fullshard import _torch
from fullshard.core import Unit, back_references, current_parameter
from fullshard.errors import StateError


def grad(
    outputs: Tensor | Sequence[Tensor],
    inputs: Tensor | Iterable[Tensor],
    grad_outputs: Tensor | Sequence[Tensor | None] | None = None,
    retain_graph: bool | None = None,
    allow_unused: bool = False,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of `outputs` with respect to `inputs`, which may be sharded parameters. Collective.

    torch.autograd.grad cannot compute these gradients: modules compute with the unsharded parameters, so the sharded ones are
    in no graph. Gradients are averaged over the ranks, as in backward, and no `.grad` changes. There is no `create_graph`:
    sharded gradients have no graph.

    Args:
        outputs: one tensor to differentiate, or several.
        inputs: sharded parameters, plain parameters or other tensors of the graph.
        grad_outputs: gradients of the outputs, with their shapes; None for outputs of one element.
        retain_graph: True keeps the graph for another backward.
        allow_unused: True returns None for an input that no rank used; False raises an error.

    Returns:
        One gradient per input: a DTensor with the placements of its parameter, or a plain tensor for a plain input. With
        `allow_unused=True`, None for an input that no rank used.

    Raises:
        StateError: if a parameter was never unsharded or was not used (without `allow_unused`), if the outputs depend on the
            sharded parameter itself as well, or if gradients of its unit are accumulated or being reduced, or are not reduced
            by this backward. The error names the parameter or unit.
        ValueError: for an input that does not require grad.

    Example:
        >>> weight, bias = fullshard.grad(loss, [model.head.weight, model.head.bias])         # doctest: +SKIP

    Source: the interface of `torch.autograd.grad`.
    """
    listed = [current_parameter(one) for one in ([inputs] if isinstance(inputs, Tensor) else inputs)]
    logical = [None if reference is None else reference() for reference in back_references(listed)]
    names = [
        f"the input of shape {tuple(tensor.shape)}" if parameter is None else f"parameter '{parameter.name}'"
        for tensor, parameter in zip(listed, logical)
    ]
    for tensor, name in zip(listed, names):
        if not tensor.requires_grad:
            raise ValueError(f"grad(): {name} does not require grad. Leave it out of the inputs.")
    leaves = [tensor for tensor, parameter in zip(listed, logical) if parameter is None]
    sharded = [parameter for parameter in logical if parameter is not None]
    kept_unsharded: list[tuple[Tensor, Tensor | None]] = []
    for parameter in sharded:
        full = parameter.unsharded
        if full is None:
            raise StateError(
                f"grad(): parameter '{parameter.name}' was never unsharded, so it is in no graph. Run a forward first."
            )
        if unit := parameter.unit():
            _check_sets_gradients(unit)
        group = parameter.group()  # with the leaves of the graphs that compute with copies of the group
        kept_unsharded.append((full, full.grad))
        leaves += [full, *(() if group is None else (copy.handle for copy in group.copies))]
    by_shards = _torch.leads_to([outputs] if isinstance(outputs, Tensor) else outputs, [one.sharded for one in sharded])
    if by_shards:
        raise StateError(
            f"grad(): the outputs also depend on the sharded parameter '{sharded[min(by_shards)].name}' itself, as by a "
            "penalty on weights. Compute that part from the tensors of fullshard.gathered(), or call backward()."
        )
    # Backward of a unit reduces into `.grad` only: collect the gradients there, then restore the former ones.
    kept = [(tensor, tensor.grad) for tensor in listed]
    runtimes = dict.fromkeys(unit.runtime for parameter in sharded if (unit := parameter.unit()) is not None)
    # Without a heartbeat, unused parameters of a unit get zeros. Gradients of earlier backwards are set by any later backward.
    without = [
        parameter.sharded
        for runtime in runtimes
        for unit in runtime.all_units()
        if not runtime.reducer.is_undelivered(unit) and not any(group.grads.has_local for group in unit.groups)
        for parameter in unit.parameters
        if parameter.sharded.grad is None
    ]
    for tensor in listed:
        tensor.grad = None
    for runtime in runtimes:
        runtime.backward.collects = True  # also on a rank whose graph has none of these parameters
    try:
        with _torch.without_post_grad_hooks(listed):  # as for torch.autograd.grad: nothing is accumulated
            torch.autograd.backward(outputs, grad_outputs, retain_graph=retain_graph, inputs=leaves)  # type: ignore[arg-type]
        found = [tensor.grad for tensor in listed]
        for name, (unsharded, had) in zip((one.name for one in sharded), kept_unsharded):
            if unsharded.grad is not had:
                raise StateError(
                    f"grad(): the outputs use parameter '{name}' outside of a forward, as it is while the unit is unsharded by "
                    "hand, and nothing reduces that gradient. Compute with the tensors of fullshard.gathered()."
                )
    finally:
        for runtime in runtimes:
            runtime.backward.collects = False
        for one, had in (*kept_unsharded, *((tensor, None) for tensor in without), *kept):
            one.grad = had
    for name, value in zip(names, found):
        if value is None and not allow_unused:
            raise StateError(f"grad(): {name} was not used by any rank. Pass allow_unused=True to get None for it.")
    return tuple(found)


def _check_sets_gradients(unit: Unit) -> None:
    """Raise StateError unless a backward reduces exactly its own gradients of the unit, at once."""
    unit.check_step_over(doing="grad()")
    options = unit.options
    if not options.reduces or options.defers or options.ended_by or not options.last_backward:
        raise StateError(
            f"grad(): unit '{unit.name}' does not set gradients in this backward. Call it outside of accumulate(), with "
            "set_is_last_backward(True), and without manual finalization."
        )
