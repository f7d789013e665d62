"""Train a model sharded and unsharded from the same seed and batches, and report the first difference."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from fullshard import _torch, ext
from fullshard.core import full_tensor
from fullshard.errors import check_int
from fullshard.wrap.whole_model import shard_model


@dataclass(frozen=True)
class Difference:
    """The first difference between the sharded and the unsharded model: in the loss, a gradient or a parameter.

    Args:
        step: index of the step, from 0.
        what: "loss", "gradient", or "value" (the parameter after the optimizer's step); with a remark if only one of the two
            models has a gradient.
        name: name of the parameter; empty for the loss.
        worst: the largest absolute difference of two elements.
        scale: the largest absolute value in the unsharded model's tensor.
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
        steps: the requested number of optimizer steps.
        ranks: number of ranks.
        parameters: number of parameters of the unsharded model; each is compared at each step.
        first: the first difference on the first rank that found one, None if nothing differs.
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
    """Return a loss for any model: `.loss` of its output, or the mean square of the first floating-point tensor in it."""
    if isinstance(getattr(output, "loss", None), Tensor):
        return output.loss
    for tensor in _torch.tree_leaves(output):
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            return tensor.square().mean()
    raise ValueError(
        f"verify() found no loss in a {type(output).__name__}. Pass loss=, a function from the output to a 0-dim tensor."
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
    """Train a model sharded and unsharded, from the same seed and batch, and compare losses, gradients and weights.

    Every rank gets the same whole batch, so that means over ranks equal the values of the unsharded model. Models that draw
    random numbers in forward (dropout) draw equal numbers, because the generators are seeded before each step.

    Args:
        build: builds the model; called twice with the same seed.
        batch: arguments of the model: a tensor, a tuple (positional) or a dict (keywords), equal at each step; or a function
            from the index of the step to such arguments.
        steps: number of optimizer steps.
        shard: shards a model in place, `shard_model` by default.
        loss: function from the model's output to a 0-dim tensor.
        optimizer: called with (parameters, lr=1e-3).
        seed: seed of torch's generators before each `build()`; before the forward of step i, from 0, it is seed + 1 + i.
        tolerance: maximum difference relative to the largest value of the compared tensor.
        ranks: number of processes to start if torch.distributed is not initialised. They are forked, so the arguments need not
            be picklable. Otherwise all existing ranks take part.

    Returns:
        A `Verdict`, equal on all ranks: true if nothing differs, else with the first difference.

    Raises:
        ValueError: if `steps` or `ranks` is not at least 1, or `tolerance` is negative; if the output contains no loss, and
            torch.distributed was initialised before.
        RuntimeError: if a process that was started here raised an exception; contains its traceback.

    Example:
        >>> def build():
        ...     return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        >>> print(verify(build, torch.ones(3, 4)))                                            # doctest: +SKIP
        same: losses, gradients and weights of 4 parameters over 2 steps on 2 ranks
    """
    check_int("steps", steps)
    check_int("ranks", ranks)
    if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or not tolerance >= 0:
        raise ValueError(f"tolerance must be a number of at least 0, got {tolerance!r}.")

    def program() -> Verdict:
        """Train and compare on this rank."""
        torch.manual_seed(seed)
        plain = build()
        torch.manual_seed(seed)
        sharded = build()
        shard(sharded)
        device = next((p.device for p in sharded.parameters()), torch.device("cpu"))
        plain.to(device)
        optimizers = [optimizer(m.parameters(), lr=1e-3) for m in (plain, sharded)]
        compared = partial(_difference, tolerance)
        first: Difference | None = None
        for step in range(steps):
            losses = []
            for model in (plain, sharded):
                torch.manual_seed(seed + 1 + step)
                losses.append(loss(_call(model, _batch(batch, step, device))))
                losses[-1].backward()
            ours, theirs = dict(sharded.named_parameters()), dict(plain.named_parameters())
            found = [compared(step, "loss", "", losses[1], losses[0])]  # on every rank: comparing is collective
            found += [compared(step, "gradient", name, ours[name].grad, p.grad) for name, p in theirs.items()]
            for one in optimizers:
                one.step()
                one.zero_grad()
            found += [compared(step, "value", name, ours[name], p) for name, p in theirs.items()]
            first = next((difference for difference in found if difference is not None), None)
            if ext.any_failed(None, first is not None):
                break
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, first)
        return Verdict(
            steps, len(of_ranks), len(list(plain.parameters())), next((one for one in of_ranks if one is not None), None)
        )

    return program() if dist.is_initialized() else _run_on_processes(program, ranks)


def _batch(batch: Any, step: int, device: torch.device) -> Any:
    """Return a copy of the arguments of the model in a step, since it may write to its inputs."""

    def copied(tensor: Tensor) -> Tensor:
        return tensor.detach().to(device, copy=True).requires_grad_(tensor.requires_grad)

    given = batch(step) if callable(batch) and not isinstance(batch, Tensor) else batch
    return _torch.tree_map_only(Tensor, copied, copy.copy(given))


def _difference(
    tolerance: float, step: int, what: str, name: str, ours: Tensor | None, theirs: Tensor | None
) -> Difference | None:
    if ours is None and theirs is None:
        return None
    if ours is None or theirs is None:
        missing = "is missing" if ours is None else "is there, the plain one's is None"
        return Difference(step, f"{what} ({missing})", name, float("inf"), 0.0)
    whole = full_tensor(ours) if hasattr(ours, "device_mesh") else ours.detach()  # type: ignore[arg-type]
    expected = theirs.detach().to(whole.device)
    if not expected.numel():
        return None
    worst = (whole.double() - expected.double()).abs().max().item()
    scale = expected.double().abs().max().item()
    if worst <= tolerance * max(scale, 1e-6) + 1e-12:  # False for NaN
        return None
    return Difference(step, what, name, worst, scale)


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def _run_rank(rank: int, ranks: int, program: Callable[[], Verdict], store: str, verdicts: Any) -> None:
    torch.set_num_threads(1)
    # CPU only: with an accelerator's backend the accelerator would be used, which is not possible in forked processes.
    dist.init_process_group("cpu:gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    verdict = program()
    if rank == 0:
        verdicts.put(verdict)
    dist.barrier()
    dist.destroy_process_group()


def _run_on_processes(program: Callable[[], Verdict], ranks: int) -> Verdict:
    """Run the program on gloo ranks on the CPU of this machine."""
    verdicts = torch.multiprocessing.get_context("fork").SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="fullshard-verify") as folder:
        arguments = ranks, program, os.path.join(folder, "store"), verdicts
        try:
            start_processes(_run_rank, arguments, ranks, start_method="fork")
        except (ProcessRaisedException, ProcessExitedException) as failed:
            raise RuntimeError(f"verify() raised on some ranks:\n{failed}") from None
    return verdicts.get()


def verify_arguments(factory: Callable[[], object]) -> dict[str, Any]:
    """Return the arguments of `verify()` from a factory of the command line.

    The factory returns (build, batch), or a dict of arguments that contains both. Raises ValueError for other results.
    """
    result = factory()
    if isinstance(result, dict) and "build" in result and "batch" in result:
        return dict(result)
    if isinstance(result, Sequence) and len(result) == 2 and callable(result[0]):
        return {"build": result[0], "batch": result[1]}
    raise ValueError(
        f"Expected the factory to return (build, batch), build being a function, or a dict of arguments with both, got "
        f"{_description_of(result)}."
    )


def _description_of(result: object) -> str:
    if isinstance(result, dict):
        return f"a dict of {', '.join(map(str, result)) or 'nothing'}"
    if isinstance(result, (tuple, list)):
        return f"{len(result)} values: {', '.join(type(one).__name__ for one in result)}"
    return f"a {type(result).__name__}"
