"""Gradients as values: torch.autograd.grad for sharded parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fullshard.errors import StateError
from fullshard.parameter import logical_parameters


def grad(
    outputs: Tensor | Sequence[Tensor],
    inputs: Tensor | Iterable[Tensor],
    grad_outputs: Tensor | Sequence[Tensor | None] | None = None,
    retain_graph: bool | None = None,
    allow_unused: bool = False,
) -> tuple[Tensor | None, ...]:
    """The gradients of `outputs` with respect to `inputs`, sharded parameters among them, without touching any `.grad`.

    torch.autograd.grad cannot give those: modules compute with the gathered parameters, so the sharded ones are in no graph.
    Collective; gradients are averaged over the ranks, as by backward.

    Args:
        outputs, grad_outputs, retain_graph, allow_unused: as of torch.autograd.grad. There is no `create_graph`: sharded
            gradients have no graph.
        inputs: sharded parameters, plain parameters or other tensors of the graph.

    Returns:
        One gradient per input: a DTensor sharded like its parameter, a plain tensor for a plain one; None where no rank used
        it, with `allow_unused=True`.

    Raises:
        StateError: naming the parameter, if it was never gathered, has gradients kept by accumulation, or (unless
            `allow_unused`) was not used.

    Example:
        >>> weight, bias = fullshard.grad(loss, [model.head.weight, model.head.bias])         # doctest: +SKIP
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
        if logical.kept is not None:
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


__all__ = ["grad"]
