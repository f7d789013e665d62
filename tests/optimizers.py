"""An optimizer of whole matrices, with a state of every kind."""

from __future__ import annotations

from typing import Any

import torch


class Shampoo(torch.optim.Optimizer):
    """Factors of both sides, a step count in the group, and Adam for what has fewer than two dims: a state of every kind."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "steps": 0})
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.count += 1
        for group in self.param_groups:
            group["steps"] += 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, grad = self.state[parameter], parameter.grad
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["factors"] = [
                        torch.eye(size, dtype=grad.dtype, device=grad.device) * 1e-3 for size in grad.shape if grad.ndim > 1
                    ]
                    state["mean"] = torch.zeros_like(grad)
                state["step"] += 1
                state["mean"].lerp_(grad, 0.1)
                update = state["mean"].clone()
                for dim, factor in enumerate(state["factors"]):
                    unfolded = grad.movedim(dim, 0).flatten(1)
                    factor += unfolded @ unfolded.t()
                    values, vectors = torch.linalg.eigh(factor)
                    root = vectors @ torch.diag(values.clamp(min=1e-6) ** -0.25) @ vectors.t()
                    update = torch.tensordot(root, update, ([1], [dim])).movedim(0, dim)
                parameter.add_(update, alpha=-group["lr"])
        return loss


class Normalized(torch.optim.Optimizer):
    """Steps by the momentum divided by its norm, which each element depends on."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if not state:
                        state["momentum"] = torch.zeros_like(parameter)
                    momentum = state["momentum"].mul_(0.9).add_(parameter.grad)
                    parameter.add_(momentum / (momentum.norm() + 1e-6), alpha=-group["lr"])
