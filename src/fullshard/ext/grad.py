"""`grad`: torch.autograd.grad for sharded parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fullshard import _torch
from fullshard.core import ShardedParameter, Unit, current_parameter, logical_parameters
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
    given = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    listed = list(map(current_parameter, given))  # names from before sharding
    names: dict[int, str] = {}
    leaves: list[Tensor] = []
    for tensor in listed:
        logical = next(iter(logical_parameters([tensor])), None)
        if not tensor.requires_grad:
            which = f"the input of shape {tuple(tensor.shape)}" if logical is None else f"parameter '{logical.name}'"
            raise ValueError(f"grad(): {which} does not require grad. Leave it out of the inputs.")
        if logical is None:
            leaves.append(tensor)
            continue
        names[id(tensor)] = logical.name
        if logical.unsharded is None:
            raise StateError(
                f"grad(): parameter '{logical.name}' was never unsharded, so it is in no graph. Run a forward first."
            )
        _check_no_other_gradients(logical)
        group = logical.group()  # with the leaves of the graphs that compute with copies of the group
        leaves += [logical.unsharded, *(() if group is None else (copy.handle for copy in group.copies))]
    _check_no_use_of_shards([outputs] if isinstance(outputs, Tensor) else outputs, logical_parameters(listed))
    # Backward of a unit reduces into `.grad` only: collect the gradients there, then restore the former ones.
    before = [tensor.grad for tensor in listed]
    unsharded = [one for parameter in logical_parameters(listed) if (one := parameter.unsharded) is not None]
    before_unsharded = [one.grad for one in unsharded]
    units = [unit for parameter in logical_parameters(listed) if (unit := parameter.unit()) is not None]
    runtimes = dict.fromkeys(unit.runtime for unit in units)
    others = [unit for runtime in runtimes for unit in runtime.all_units() if not _has_earlier_gradients(unit)]
    every = [parameter.sharded for unit in others for parameter in unit.parameters]
    without = [tensor for tensor in every if tensor.grad is None]
    for tensor in listed:
        tensor.grad = None
    for runtime in runtimes:
        runtime.backward.collects = True  # also on a rank whose graph has none of these parameters
    try:
        with _torch.without_post_grad_hooks(listed):  # as for torch.autograd.grad: nothing is accumulated
            torch.autograd.backward(outputs, grad_outputs, retain_graph=retain_graph, inputs=leaves)  # type: ignore[arg-type]
        found = [tensor.grad for tensor in listed]
        for parameter, had in zip(logical_parameters(listed), before_unsharded):
            if parameter.unsharded is not None and parameter.unsharded.grad is not had:
                raise StateError(
                    f"grad(): the outputs use parameter '{parameter.name}' outside of a forward, as it is while the unit is "
                    "unsharded by hand, and nothing reduces that gradient. Compute with the tensors of fullshard.gathered()."
                )
    finally:
        for runtime in runtimes:
            runtime.backward.collects = False
        for one, had in zip(unsharded, before_unsharded):
            one.grad = had
        for tensor in without:  # without a heartbeat, unused parameters of a unit have got zeros
            tensor.grad = None
        for tensor, had in zip(listed, before):
            tensor.grad = had
    for tensor, value in zip(listed, found):
        if value is None and not allow_unused:
            name = names.get(id(tensor))
            what = f"parameter '{name}'" if name else f"the input of shape {tuple(tensor.shape)}"
            raise StateError(f"grad(): {what} was not used by any rank. Pass allow_unused=True to get None for it.")
    return tuple(found)


def _has_earlier_gradients(unit: Unit) -> bool:
    """Return True if gradients of earlier backwards are not in `.grad` yet, which any later backward may set."""
    kept = any(group.grads.has_local or group.grads.deferred is not None for group in unit.groups)
    return kept or unit.runtime.reducer.is_undelivered(unit)


def _check_no_use_of_shards(outputs: Sequence[Tensor], parameters: Sequence[ShardedParameter]) -> None:
    """Raise StateError if the graphs of outputs lead to sharded parameters themselves, which this gradient would leave out."""
    found = _torch.leads_to(outputs, [parameter.sharded for parameter in parameters])
    if found:
        name = parameters[min(found)].name
        raise StateError(
            f"grad(): the outputs also depend on the sharded parameter '{name}' itself, as by a penalty on weights. Compute "
            "that part from the tensors of fullshard.gathered(), or call backward()."
        )


def _check_no_other_gradients(parameter: ShardedParameter) -> None:
    """Raise StateError unless a backward reduces exactly its own gradients of the parameter's unit, at once."""
    unit = parameter.unit()
    if unit is None:
        return
    for one in unit.parameters:
        if one.local_grad is not None:
            raise StateError(
                f"grad(): a gradient of parameter '{one.name}' is accumulated on each rank by accumulate() or "
                "set_requires_gradient_sync(False). Run the last backward of the step first."
            )
    if unit.runtime.reducer.is_undelivered(unit):
        raise StateError(
            f"grad(): gradients of unit '{unit.name}' are reduced, but not in .grad yet. Run the last backward of the step "
            "first."
        )
    options = unit.options
    if not options.reduces or options.defers or options.ended_by or not options.last_backward:
        raise StateError(
            f"grad(): unit '{unit.name}' does not set gradients in this backward. Call it outside of accumulate(), with "
            "set_is_last_backward(True), and without manual finalization."
        )
