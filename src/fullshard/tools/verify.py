"""Sharded against plain: the same model, batches and seed both ways, and the first thing that differs."""

from __future__ import annotations

import copy
import os
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard.frontend.any_failed import any_failed
from fullshard.params.shard_values import full_tensor
from fullshard.wrap.whole_model import shard_model


@dataclass(frozen=True)
class Difference:
    """The first difference: `what` of a parameter (its gradient, or its value after the optimizer's step), or the loss.

    Args:
        step: the step in which it differed, from 0.
        what: "loss", "gradient" or "value"; says so if one of both has no gradient.
        name: of the parameter; empty for the loss.
        worst: the largest absolute difference of two elements.
        scale: the largest absolute value of the plain one.
    """

    step: int
    what: str
    name: str
    worst: float
    scale: float

    def __str__(self) -> str:
        subject = f"{self.what} of '{self.name}'" if self.name else self.what
        return f"step {self.step}: the {subject} differs by {self.worst:.3g}, where the largest value is {self.scale:.3g}"


@dataclass(frozen=True)
class Verdict:
    """The result of `verify`. True if nothing differs; prints as one line.

    Args:
        steps: optimizer steps that were asked for.
        ranks: processes that took part.
        parameters: of the plain model, each compared at each step.
        first: the first difference of the first rank that found one, None if there is none.
    """

    steps: int
    ranks: int
    parameters: int
    first: Difference | None

    def __bool__(self) -> bool:
        return self.first is None

    def __str__(self) -> str:
        if self.first is not None:
            return f"DIFFERS on {self.ranks} ranks. {self.first}"
        return (
            f"same: losses, gradients and weights of {self.parameters} parameters over {self.steps} steps on {self.ranks} ranks"
        )


Build = Callable[[], nn.Module]
Loss = Callable[[Any], Tensor]


def mean_of_output(output: Any) -> Tensor:
    """A loss for any model: `.loss` of what it returns, or the mean square of its first floating-point tensor."""
    if isinstance(getattr(output, "loss", None), Tensor):
        return output.loss
    tensors: list[Tensor] = []

    def find(value: Any) -> None:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, dict):
            for item in value.values():
                find(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                find(item)

    find(output)
    for tensor in tensors:
        if tensor.is_floating_point():
            return tensor.square().mean()
    raise ValueError(
        f"verify() found no loss in a {type(output).__name__}: pass loss=, a function from output to a 0-dim tensor"
    )


def verify(
    build: Build,
    batch: Any,
    steps: int = 2,
    *,
    shard: Callable[[nn.Module], object] = shard_model,
    loss: Loss = mean_of_output,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    seed: int = 0,
    tolerance: float = 1e-4,
    ranks: int = 2,
) -> Verdict:
    """Train a model sharded and plain, from one seed on the same batch, and compare losses, gradients and weights.

    Every rank gets the same whole batch, so that the means over ranks are those of the plain model. Models that draw random
    numbers in forward (dropout) draw the same ones: the generators are seeded before each step.

    Args:
        build: makes the model; called twice with the same seed.
        batch: what the model is called with: a tensor, a tuple (positional) or a dict (keywords), the same at each step; or a
            function from the step to that.
        steps: how many optimizer steps.
        shard: shards a model in place, `shard_model` by default.
        loss: from the model's output to a 0-dim tensor.
        optimizer: called with (parameters, lr=1e-3).
        seed: of torch's generators before each `build()`; before the forward of step i, counted from 0, it is seed + 1 + i.
        tolerance: of differences relative to the largest value of the tensor in question.
        ranks: how many processes to start if torch.distributed is not initialised; then `build`, `batch` and the others must
            be importable or inherited (the processes are forked). Otherwise the ranks that there are take part.

    Returns:
        A `Verdict`, the same on all ranks: true if nothing differs, else with the first difference.

    Raises:
        ValueError: if no loss can be found in the output, where the ranks are there already.
        RuntimeError: where the ranks are started here, if the program raised on one of them, with its traceback.

    Example:
        >>> def build():
        ...     return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        >>> print(verify(build, torch.ones(3, 4)))                                            # doctest: +SKIP
        same: losses, gradients and weights of 4 parameters over 2 steps on 2 ranks
    """
    told = _Program(build, batch, steps, shard, loss, optimizer, seed, tolerance)
    if dist.is_initialized():
        return told.run()
    return _on_processes(told, ranks)


@dataclass(frozen=True)
class _Program:
    build: Build
    batch: Any
    steps: int
    shard: Callable[[nn.Module], object]
    loss: Loss
    optimizer: Callable[..., torch.optim.Optimizer]
    seed: int
    tolerance: float

    def run(self) -> Verdict:
        torch.manual_seed(self.seed)
        plain = self.build()
        torch.manual_seed(self.seed)
        sharded = self.build()
        self.shard(sharded)
        device = next((p.device for p in sharded.parameters()), torch.device("cpu"))
        plain.to(device)
        optimizers = [self.optimizer(m.parameters(), lr=1e-3) for m in (plain, sharded)]
        names = list(dict(plain.named_parameters()))
        first: Difference | None = None
        for step in range(self.steps):
            losses = []
            for model in (plain, sharded):
                torch.manual_seed(self.seed + 1 + step)
                losses.append(self.loss(_call(model, self._batch(step, device))))
                losses[-1].backward()
            found = [self._compare(step, "loss", "", losses[1], losses[0])]  # every rank compares everything: it is collective
            ours = dict(sharded.named_parameters())
            found += [self._compare(step, "gradient", n, ours[n].grad, p.grad) for n, p in plain.named_parameters()]
            for one in optimizers:
                one.step()
                one.zero_grad()
            found += [self._compare(step, "value", n, ours[n], p) for n, p in plain.named_parameters()]
            first = next((difference for difference in found if difference is not None), None)
            if any_failed(None, first is not None):
                break
        return Verdict(self.steps, dist.get_world_size(), len(names), _first_of_all(first))

    def _batch(self, step: int, device: torch.device) -> Any:
        given = self.batch(step) if callable(self.batch) and not isinstance(self.batch, Tensor) else self.batch
        return _moved(copy.copy(given), device)

    def _compare(self, step: int, what: str, name: str, ours: Tensor | None, theirs: Tensor | None) -> Difference | None:
        if ours is None or theirs is None:
            if (ours is None) != (theirs is None):
                missing = "is missing" if ours is None else "is there, the plain one's is None"
                return Difference(step, f"{what} ({missing})", name, float("inf"), 0.0)
            return None
        whole = full_tensor(ours) if hasattr(ours, "device_mesh") else ours.detach()  # type: ignore[arg-type]
        expected = theirs.detach().to(whole.device)
        if not expected.numel():
            return None
        worst = (whole.double() - expected.double()).abs().max().item()
        scale = expected.double().abs().max().item()
        if worst <= self.tolerance * max(scale, 1e-6) + 1e-12:  # NaN is not
            return None
        return Difference(step, what, name, worst, scale)


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _moved(item, device) for key, item in value.items()}
    return type(value)(_moved(item, device) for item in value) if isinstance(value, (tuple, list)) else value


def _first_of_all(mine: Difference | None) -> Difference | None:
    """The difference of the first rank that found one."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return next((one for one in found if one is not None), None)


def _rank(rank: int, ranks: int, told: _Program, store: str, results: Any) -> None:
    try:
        torch.set_num_threads(1)
        # For the CPU alone: with a backend for an accelerator that would be chosen, which forked processes cannot use.
        dist.init_process_group("cpu:gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
        results.put((rank, told.run(), None))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, None, traceback.format_exc()))


def _on_processes(told: _Program, ranks: int) -> Verdict:
    """Run the program on gloo ranks of this machine's CPU."""
    context: Any = torch.multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="fullshard-verify") as folder:
        store = os.path.join(folder, "store")
        processes = [context.Process(target=_rank, args=(rank, ranks, told, store, results)) for rank in range(ranks)]
        for process in processes:
            process.start()
        answers = [results.get() for _ in processes]
        for process in processes:
            process.join()
    failed = [f"--- rank {rank} ---\n{text}" for rank, _, text in sorted(answers, key=lambda a: a[0]) if text is not None]
    if failed:
        raise RuntimeError("verify() raised on some rank\n" + "\n".join(failed))
    return next(verdict for _, verdict, _ in answers)


def parts_of(factory: Callable[[], object]) -> dict[str, Any]:
    """The arguments of `verify()` that a factory of the command line gives: (build, batch), or a dict of them with both.

    Raises ValueError for anything else.
    """
    made = factory()
    if isinstance(made, dict) and "build" in made and "batch" in made:
        return dict(made)
    if isinstance(made, Sequence) and len(made) == 2 and callable(made[0]):
        return {"build": made[0], "batch": made[1]}
    raise ValueError(
        f"the factory must return (build, batch), the first of them a function, or a dict of arguments that has both, got "
        f"{_shape_of(made)}"
    )


def _shape_of(made: object) -> str:
    if isinstance(made, dict):
        return f"a dict of {', '.join(map(str, made)) or 'nothing'}"
    if isinstance(made, (tuple, list)):
        return f"{len(made)} values: {', '.join(type(one).__name__ for one in made)}"
    return f"a {type(made).__name__}"


__all__ = ["Difference", "Verdict", "mean_of_output", "parts_of", "verify"]
