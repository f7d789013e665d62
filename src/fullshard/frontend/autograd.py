"""Gradients as values: torch.autograd.grad for sharded parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fullshard import _torch
from fullshard.errors import StateError
from fullshard.params.sharded_param import logical_parameters


def grad(
    outputs: Tensor | Sequence[Tensor],
    inputs: Tensor | Iterable[Tensor],
    grad_outputs: Tensor | Sequence[Tensor | None] | None = None,
    retain_graph: bool | None = None,
    allow_unused: bool = False,
) -> tuple[Tensor | None, ...]:
    """The gradients of `outputs` with respect to `inputs`, sharded parameters among them, without touching any `.grad`.

    torch.autograd.grad cannot give those: modules compute with the gathered parameters, so the sharded ones are in no graph.
    Collective; gradients are averaged over the ranks, as by backward. There is no `create_graph`: sharded gradients have no
    graph.

    Args:
        outputs: a tensor to differentiate, or several.
        inputs: sharded parameters, plain parameters or other tensors of the graph.
        grad_outputs: gradients of the outputs, of their shapes; None for outputs of one element.
        retain_graph: whether the graph can be differentiated again.
        allow_unused: whether an input that no rank used gets None instead of an error.

    Returns:
        One gradient per input: a DTensor sharded like its parameter, a plain tensor for a plain one; None where no rank used
        it, with `allow_unused=True`.

    Raises:
        StateError: naming the parameter, if it was never gathered, has gradients kept by accumulation, or (unless
            `allow_unused`) was not used.

    Example:
        >>> weight, bias = fullshard.grad(loss, [model.head.weight, model.head.bias])         # doctest: +SKIP

    Source: the interface of `torch.autograd.grad`.
    """
    listed = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    names: dict[int, str] = {}
    leaves: list[Tensor] = []
    for tensor in listed:
        logical = next(iter(logical_parameters([tensor])), None)
        if logical is None:
            leaves.append(tensor)
            continue
        names[id(tensor)] = logical.name
        if logical.full is None:
            raise StateError(
                f"grad(): parameter '{logical.name}' was never gathered, so it is in no graph: run a forward first"
            )
        if logical.local_grad is not None:
            raise StateError(
                f"grad(): a gradient of parameter '{logical.name}' is kept on each rank by accumulate() or "
                "set_requires_gradient_sync(False): run the last backward of the step first"
            )
        leaves.append(logical.full)
    before = [tensor.grad for tensor in listed]
    for tensor in listed:
        tensor.grad = None
    try:
        torch.autograd.backward(outputs, grad_outputs, retain_graph=retain_graph, inputs=leaves)  # type: ignore[arg-type]
        found = [tensor.grad for tensor in listed]
    finally:
        for tensor, had in zip(listed, before):
            tensor.grad = had
    for tensor, value in zip(listed, found):
        if value is None and not allow_unused:
            name = names.get(id(tensor))
            what = f"parameter '{name}'" if name else f"the input of shape {tuple(tensor.shape)}"
            raise StateError(f"grad(): {what} was not used by any rank: pass allow_unused=True to get None for it")
    return tuple(found)


_SHOWN = 4  # names in an error
_INSTEAD = (
    "Take gradients as values with fullshard.grad(loss, parameters), or call backward() without inputs= (parameters that are "
    "to get none: requires_grad_(False))"
)


def _check(outputs: Sequence[Any], inputs: Sequence[Any], all_used: bool) -> None:
    """Raise StateError for what torch would take the gradient of, but cannot: modules compute with the full parameters.

    Of a loss that was computed from the sharded parameters themselves (a penalty on weights) torch's gradient is right.
    """
    sharded = logical_parameters(tensor for tensor in inputs if isinstance(tensor, Tensor))
    if not sharded:
        return
    gathered = [(parameter, full) for parameter in sharded if (full := parameter.full) is not None and full.requires_grad]
    found = _torch.leads_to(outputs, [full for _, full in gathered])
    missed = [parameter for number, (parameter, _) in enumerate(gathered) if number in found]
    how = "it cannot reach, since modules compute with the full ones"
    if not missed and all_used:
        found = _torch.leads_to(outputs, [parameter.sharded for parameter in sharded])
        missed = [parameter for number, parameter in enumerate(sharded) if number not in found]
        how = "no graph of the outputs leads to"
    if missed:
        names = [f"'{one.name}' of unit '{one.unit_name.name}'" for one in missed]
        shown = ", ".join(names[:_SHOWN] + ["..."] * (len(names) > _SHOWN))
        several = f"{len(names)} sharded parameters" if len(names) > 1 else "a sharded parameter"
        raise StateError(f"torch.autograd.grad or backward(inputs=) was given {several} that {how}: {shown}. {_INSTEAD}")


_torch.on_differentiation(_check)

__all__ = ["grad"]
