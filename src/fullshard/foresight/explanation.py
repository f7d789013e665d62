"""`explain()`: will it fit, what will it cost, and where does it go; and `Explanation`, which has the answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from fullshard.foresight.comparison import Comparison, compare
from fullshard.foresight.facts import Facts
from fullshard.foresight.hardware import Gpu, Network, gpu_of, network_of
from fullshard.foresight.optimizer import Factory, named
from fullshard.foresight.picture import chrome_trace, draw_png, page
from fullshard.foresight.recorded import Recorded
from fullshard.foresight.report import figures, report
from fullshard.foresight.setup import Build, Loss, Recompute, Traced, mesh_of, step_of, trace_model
from fullshard.foresight.simulate import Engine, Setting, simulate
from fullshard.foresight.trace import Footprint
from fullshard.policies import CommPolicy, MixedPrecisionPolicy, OffloadPolicy
from fullshard.wrap.tables import bytes_text


@dataclass(frozen=True, eq=False)
class Explanation(Facts):
    """What a step of a sharded model takes, found out without running it. Prints as a report.

    Args:
        traced: the model, its plan and its trace.
        setting: how the plan is carried out.
        gpu: on which it runs.
        network: between machines.
        simulation: every change of memory and every instruction, in order.
        factory: makes the optimizer of the parameters.
        expandable_segments: whether the allocator runs with expandable segments.
        price: of an hour of one GPU, None if none was given.

    Example:
        >>> r = explain(lambda: torch.nn.Linear(1024, 1024), torch.empty(8, 1024), world=8, loss=torch.sum)
        >>> r.verdict, r.at_peak["shards", "(model)"]
        ('fits', 524800)
    """

    # --- other ways ---

    def but(
        self, *, gpu: str | Path | Gpu | None = None, net: str | Path | Network | None = None, **changes: Any
    ) -> Explanation:
        """The same model with another setting, without tracing it again.

        Args:
            gpu: another one, None keeps it.
            net: another network, None keeps it.
            **changes: fields of `Setting`, as in `ranks=128` or `reshard_after_forward=False`.

        Returns:
            The other explanation.

        Raises:
            ValueError: for a name or a value that there is not.

        Example:
            >>> r = explain(lambda: torch.nn.Linear(1024, 1024), torch.empty(8, 1024), world=8, loss=torch.sum)
            >>> r.but(ranks=16).peak < r.peak
            True
        """
        unknown = set(changes) - set(Setting.__dataclass_fields__)
        if unknown:
            raise ValueError(
                f"but() takes the fields of Setting, got {min(unknown)!r}: {', '.join(Setting.__dataclass_fields__)}"
            )
        setting = replace(self.setting, **changes)
        if setting.ranks != self.setting.ranks:
            setting = replace(
                setting, optimizer=step_of(self.factory, self.plan, setting.ranks, accelerator=setting.accelerator)
            )
        found = self.gpu if gpu is None else gpu_of(gpu)
        network = self.network if net is None and gpu is None else network_of(net, found)
        return replace(
            self, setting=setting, gpu=found, network=network, simulation=simulate(self.traced.trace, self.plan, setting)
        )

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
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy = OffloadPolicy(),
    comm_policy: CommPolicy = CommPolicy(),
    reshard_after_forward: bool | int | None = None,
    optimizer: str | Factory | None = "adamw",
    loss: Loss | None = None,
    microbatches: int = 1,
    accumulate: bool = True,
    recompute: Recompute = "none",
    footprints: Mapping[str, Footprint] = MappingProxyType({}),
    engine: Engine = "fullshard",
    expandable_segments: bool = False,
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
        mesh: (world,) or (replicas, ranks); None cuts parameters over all ranks.
        gpu: the name of a preset, a file of `python -m fullshard calibrate`, or a `Gpu`.
        net: likewise between machines; None is what such GPUs usually have.
        mp_policy: as of `fully_shard`; None computes in bf16 and reduces in fp32, on a GPU.
        offload_policy: as of `fully_shard`.
        comm_policy: as of `fully_shard`; `collectives` and `lanes` have no effect.
        reshard_after_forward: as of `fully_shard`.
        optimizer: a name out of adamw, adam, adamw-fused, sgd, sgd-momentum, adagrad, rmsprop; or a function of
            parameters; None has none.
        loss: of what the model returns; None takes its output, if it is one number, or its `.loss`.
        microbatches: forwards and backwards per step.
        accumulate: whether only the last of them communicates gradients.
        recompute: "none" (what the model recomputes by itself is in the trace), "block": every unit that has siblings of its
            class runs again in backward, "every:2": every second of them, or a function (name, module) -> bool of units.
        footprints: what operators return where that depends on values, by names as "aten::nonzero"; `routed` for experts.
        engine: "fullshard", or "fsdp2": with the copies and buffers of torch's FSDP2.
        expandable_segments: whether the allocator runs with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.
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
    told = dict(locals())
    return answer(Question(**told))


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """The arguments of `explain`."""

    build: Build
    batch: Any
    plan: Any
    world: int
    mesh: Sequence[int] | int | None
    gpu: str | Path | Gpu
    net: str | Path | Network | None
    mp_policy: MixedPrecisionPolicy | None
    offload_policy: OffloadPolicy
    comm_policy: CommPolicy
    reshard_after_forward: bool | int | None
    optimizer: str | Factory | None
    loss: Loss | None
    microbatches: int
    accumulate: bool
    recompute: Recompute
    footprints: Mapping[str, Footprint]
    engine: Engine
    expandable_segments: bool
    price: float | None

    @property
    def dtypes(self) -> MixedPrecisionPolicy:
        """Of parameters and gradients: in bf16 with fp32 reduction on a GPU, if nothing was said."""
        if self.mp_policy is not None:
            return self.mp_policy
        plain = gpu_of(self.gpu).synchronous
        return MixedPrecisionPolicy() if plain else MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def answer(question: Question, traced: Traced | None = None) -> Explanation:
    """Trace the model, if that was not done yet, and simulate a step."""
    if question.engine not in ("fullshard", "fsdp2"):
        raise ValueError(f"engine must be 'fullshard' or 'fsdp2', got {question.engine!r}")
    ranks, replicas, hybrid = mesh_of(question.world, question.mesh)
    gpu, mp_policy = gpu_of(question.gpu), question.dtypes
    network = network_of(question.net, gpu)
    factory = None if question.optimizer is None else named(question.optimizer)
    accelerator = not gpu.synchronous
    if traced is None:
        traced = trace_model(
            question.build,
            question.batch,
            plan=question.plan,
            loss=question.loss,
            mp_policy=mp_policy,
            recompute=question.recompute,
            accelerator=accelerator,
            footprints=question.footprints,
        )
    setting = Setting(
        ranks,
        replicas=replicas,
        hybrid=hybrid,
        mp_policy=mp_policy,
        comm_policy=question.comm_policy,
        offload_policy=question.offload_policy,
        reshard_after_forward=question.reshard_after_forward,
        microbatches=question.microbatches,
        accumulate=question.accumulate,
        accelerator=accelerator,
        gloo=not accelerator,
        optimizer=step_of(factory, traced.plan, ranks, accelerator=accelerator),
        engine=question.engine,
    )
    simulation = simulate(traced.trace, traced.plan, setting)
    return Explanation(traced, setting, gpu, network, simulation, factory, question.expandable_segments, question.price)


__all__ = ["Explanation", "Question", "answer", "explain"]
