"""`explain()`: will it fit, what will it cost, and where does it go; and `Explanation`, which has the answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

from fullshard.foresight.comparison import Comparison, compare
from fullshard.foresight.facts import Facts
from fullshard.foresight.hardware import Gpu, Network, network_of
from fullshard.foresight.optimizer import Factory, OptimizerStep, named
from fullshard.foresight.picture import chrome_trace, draw_png, page
from fullshard.foresight.question import Build, Loss, Parallelize, Question, Recompute
from fullshard.foresight.recorded import Recorded
from fullshard.foresight.report import figures, report
from fullshard.foresight.setup import Traced, check_machines, check_tensor_parallel, mesh_of, setting_of, trace_model
from fullshard.foresight.simulate import Engine, simulate
from fullshard.foresight.trace import Footprint
from fullshard.frontend.api import collector_paused
from fullshard.policies import CommPolicy, MixedPrecisionPolicy, OffloadPolicy
from fullshard.sharding.param_sharding import PlacementFn
from fullshard.wrap.tables import bytes_text


@dataclass(frozen=True, eq=False)
class Explanation(Facts):
    """What a step of a sharded model takes, found out without running it. Prints as a report.

    Args:
        traced: the model, its plan and its trace, and what was asked.
        setting: how the plan is carried out.
        gpu: on which it runs.
        network: between machines.
        simulation: every change of memory and every instruction, in order.

    Example:
        >>> r = explain(lambda: torch.nn.Linear(1024, 1024), torch.empty(8, 1024), world=8, loss=torch.sum)
        >>> r.verdict, r.at_peak["shards", "(model)"]
        ('fits', 524800)
    """

    # --- other ways ---

    def but(self, **changes: Any) -> Explanation:
        """The same with other arguments of `explain`; the model is traced again only if it does something else with them.

        Args:
            **changes: as of `explain`, as in `world=128` or `reshard_after_forward=False`.

        Returns:
            The other explanation.

        Raises:
            ValueError: for a name or a value that there is not.

        Example:
            >>> r = explain(lambda: torch.nn.Linear(1024, 1024), torch.empty(8, 1024), world=8, loss=torch.sum)
            >>> r.but(world=16).peak < r.peak
            True
        """
        known = Question.__dataclass_fields__
        unknown = set(changes) - set(known)
        if unknown:
            raise ValueError(f"but() takes the arguments of explain(), got {min(unknown)!r}: {', '.join(known)}")
        return answer(replace(self.traced.question, **changes), self.traced)

    def against(self, run: Recorded) -> Comparison:
        """Hold a recorded run against this prediction.

        Args:
            run: of `record`, after its block.

        Returns:
            What differs by 5 % or more, the largest first, with causes; prints as a report.

        Raises:
            StateError: if fewer than two optimizer steps were recorded.

        Example:
            >>> print(r.against(run))                                                         # doctest: +SKIP
        """
        return compare(self, run)

    # --- telling ---

    def __str__(self) -> str:
        return report(self)

    def json(self, path: str | Path) -> None:
        """Write the figures to a file of JSON.

        Args:
            path: of the file; bytes and seconds.

        Example:
            >>> r.json("explained.json")                                                      # doctest: +SKIP
        """
        Path(path).write_text(json.dumps(figures(self), indent=1) + "\n")

    def html(self, path: str | Path, *others: Explanation) -> None:
        """Write pictures to one HTML file, which needs no network: memory over the step, and what is on which lane.

        Args:
            path: of the file.
            *others: drawn below, at the same scale, to compare.

        Example:
            >>> r.html("explained.html", r.but(reshard_after_forward=False))                  # doctest: +SKIP
        """
        Path(path).write_text(page([self, *others]))

    def png(self, path: str | Path) -> None:
        """Write the same pictures to a PNG, by matplotlib (`pip install 'fullshard[plot]'`).

        Args:
            path: of the file.

        Raises:
            ImportError: if matplotlib is not installed.

        Example:
            >>> r.png("explained.png")                                                        # doctest: +SKIP
        """
        draw_png(self, Path(path))

    def perfetto(self, path: str | Path, run: Recorded | None = None) -> None:
        """Write the step as a trace for https://ui.perfetto.dev or chrome://tracing.

        Args:
            path: of the file.
            run: a recorded run, as a second process in it.

        Example:
            >>> r.perfetto("explained.json")                                                  # doctest: +SKIP
        """
        Path(path).write_text(json.dumps(chrome_trace(self, run)))

    def __repr__(self) -> str:
        return f"<Explanation: {self.verdict}, {bytes_text(self.needed)} of {bytes_text(self.gpu.memory)}, step {self.step}>"


def explain(
    build: Build,
    batch: Any,
    *,
    plan: Any = "auto",
    world: int,
    mesh: Sequence[int] | int | None = None,
    gpu: str | Path | Gpu = "h100-sxm",
    net: str | Path | Network | None = None,
    per_node: int | None = None,
    tensor_parallel: int = 1,
    parallelize: Parallelize | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy = OffloadPolicy(),
    comm_policy: CommPolicy = CommPolicy(),
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFn | None = None,
    optimizer: str | Factory | None = "adamw",
    loss: Loss | None = None,
    keep_output: bool = True,
    microbatches: int = 1,
    accumulate: bool = True,
    recompute: Recompute = "none",
    footprints: Mapping[str, Footprint] = MappingProxyType({}),
    engine: Engine = "fullshard",
    expandable_segments: bool = False,
    keep_unsharded_storage: bool = False,
    price: float | None = None,
) -> Explanation:
    """Say whether a model fits, what a step costs, and where memory and time go. No GPU and no process group is needed.

    One step is traced on meta, and run by the planner that runs the training, over a ledger of bytes. What the library
    allocates and sends is exact; the rest of memory is what torch's own operators allocate; time is an estimate with a band.

    Args:
        build: returns the model; called on the meta device.
        batch: of one rank and microbatch: a tensor, a tuple of the model's arguments or a dict of them, or a function of the
            step's number that returns one. Only shapes and dtypes count.
        plan: as `plan_model` takes it.
        world: how many ranks.
        mesh: (world,) or (replicas, ranks); None cuts parameters over all ranks. Without those of tensor parallelism.
        gpu: the name of a preset, a file of `python -m fullshard calibrate`, or a `Gpu`.
        net: likewise between machines; None is what such GPUs usually have.
        per_node: GPUs of one machine; None is what they usually have.
        tensor_parallel: how many ranks of `world` share one copy of the batch; they follow each other in a machine.
        parallelize: called with the model and a mesh of so many ranks, as `parallelize_module` takes them.
        mp_policy: as of `fully_shard`; None computes in bf16 and reduces in fp32, on a GPU.
        offload_policy: as of `fully_shard`.
        comm_policy: as of `fully_shard`; `collectives` and `lanes` have no effect.
        reshard_after_forward: as of `fully_shard`.
        shard_placement_fn: as of `fully_shard`, returning None or `Shard(dim)`.
        optimizer: a name out of adamw, adam, adamw-fused, sgd, sgd-momentum, adagrad, rmsprop; or a function of
            parameters; None has none.
        loss: of what the model returns; None takes its output, if it is one number, or its `.loss`.
        keep_output: whether the loop keeps what the model returns until the backward is over, as `out = model(x)` does, and
            `loss(model(x)).backward()` does not.
        microbatches: forwards and backwards per step.
        accumulate: whether only the last of them communicates gradients.
        recompute: "none" (what the model recomputes by itself is in the trace), "block": every unit that has siblings of its
            class runs again in backward, "every:2": every second of them, "selective": all of them but attention and every
            second product, or a function (name, module) -> bool of units.
        footprints: what the step is told where it depends on values: by operator as "aten::nonzero" what that returns (`routed`
            for experts), by place as "model.py:12" the number or truth that its line asks for; a value, or a function of the
            arguments.
        engine: "fullshard", or "fsdp2": with the copies and buffers of torch's FSDP2.
        expandable_segments: whether the allocator runs with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.
        keep_unsharded_storage: as `FSDPModule.set_keep_unsharded_storage` of the whole model: full parameters and messages
            stay in memory.
        price: of an hour of one GPU, in any currency.

    Returns:
        The explanation.

    Raises:
        ValueError: for a model, batch, mesh or name that cannot be, in a line that says what to give instead.

    Example:
        >>> r = explain(lambda: torch.nn.Linear(1024, 1024), torch.empty(8, 1024), world=8, loss=torch.sum)
        >>> print(str(r).splitlines()[0])
        fits: 2.0 GiB of 79.1 GiB on each h100-sxm, 8 ranks
    """
    return answer(Question(**locals()))


MOST_MICROBATCHES = 4096


def answer(question: Question, known: Traced | None = None, steps: dict[object, OptimizerStep] | None = None) -> Explanation:
    """Trace the model, unless what is known serves, and simulate a step. steps: of optimizers, which several answers share."""
    with collector_paused():
        return _answer(question, known, steps)


def _answer(question: Question, known: Traced | None, steps: dict[object, OptimizerStep] | None) -> Explanation:
    if question.engine not in get_args(Engine):
        raise ValueError(f"engine must be 'fullshard' or 'fsdp2', got {question.engine!r}")
    gpu = question.machine
    check_machines(question.world, gpu)
    if question.price is not None and not 0 <= question.price < float("inf"):
        raise ValueError(f"price must be that of an hour of one GPU, at least 0, got {question.price!r}")
    if question.loss is not None and not callable(question.loss):
        raise ValueError(f"loss must be a function of what the model returns, as F.mse_loss in a lambda, got {question.loss!r}")
    if not isinstance(question.footprints, Mapping):
        raise ValueError(
            f"footprints must be a dict of what the step is told, as {{'model.py:12': True}}, got {question.footprints!r}"
        )
    many = question.microbatches
    if not isinstance(many, int) or isinstance(many, bool) or many < 1:
        raise ValueError(f"microbatches must be an int of at least 1, got {many!r}")
    if many > MOST_MICROBATCHES:
        raise ValueError(f"microbatches must be at most {MOST_MICROBATCHES:,}, each of which is simulated, got {many:,}")
    network = network_of(question.net, gpu)
    check_tensor_parallel(question)
    mesh_of(question.world // question.tensor_parallel, question.mesh)  # all of it is refused before anything is traced
    if question.optimizer is not None:
        named(question.optimizer)
    traced = (None if known is None else known.serves(question)) or trace_model(question)
    if steps is not None:
        traced = replace(traced, steps=steps)
    for dtype in traced.trace.multiplied:
        gpu.peak(dtype)  # refuses what it cannot multiply
    setting = setting_of(question, traced)
    return Explanation(traced, setting, gpu, network, simulate(traced.trace, traced.plan, setting))


__all__ = ["Explanation", "answer", "explain"]
