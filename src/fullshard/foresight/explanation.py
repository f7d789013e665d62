"""Predict the memory and the time of a training step without running it: `explain()` and its result, `Explanation`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import nn

from fullshard.core import PlacementFn
from fullshard.foresight.comparison import Comparison, compare
from fullshard.foresight.facts import StepEstimate
from fullshard.foresight.hardware import DEFAULT_GPU, Gpu, Network, network_of
from fullshard.foresight.optimizer import Factory
from fullshard.foresight.picture import chrome_trace, figure_of, html_page
from fullshard.foresight.question import Build, ExplainArguments, Loss, Parallelize, Recompute
from fullshard.foresight.recorded import Recorded
from fullshard.foresight.report import figures, report
from fullshard.foresight.setup import TracedModel, forget_optimizer_steps, setting_of, trace_model
from fullshard.foresight.simulate import Engine, simulate
from fullshard.foresight.trace import Footprint
from fullshard.frontend.api import gc_paused
from fullshard.policies import ZERO3, CommPolicy, MixedPrecisionPolicy, OffloadPolicy, StateSharding
from fullshard.wrap.policies import Classes
from fullshard.wrap.tables import bytes_text
from fullshard.wrap.whole_model import FULL_PRECISION


@dataclass(frozen=True, eq=False)
class Explanation(StepEstimate):
    """Predicted memory and time of one training step of a sharded model. Prints as a report.

    Args:
        traced: the model, its plan, its trace, and the arguments of `explain`.
        setting: settings of the simulation: ranks, policies, engine.
        gpu: the GPU of each rank.
        network: the network between machines.
        simulation: every change of memory and every instruction, in order.

    Example:
        >>> r = explain(lambda: torch.nn.Linear(1024, 1024), torch.empty(8, 1024), world=8, loss=torch.sum)
        >>> r.verdict, r.at_peak["shards", "(model)"]
        ('fits', 524800)
    """

    # --- variants ---

    def but(self, **changes: Any) -> Explanation:
        """Explain the same model with other arguments of `explain`.

        The trace is reused where it stays valid.

        Args:
            **changes: arguments of `explain`, as in `world=128` or `reshard_after_forward=False`.

        Returns:
            The explanation with these arguments.

        Raises:
            ValueError: for an unknown name, or a value that `explain` does not accept.

        Example:
            >>> r = explain(lambda: torch.nn.Linear(1024, 1024), torch.empty(8, 1024), world=8, loss=torch.sum)
            >>> r.but(world=16).peak < r.peak
            True
        """
        known = ExplainArguments.__dataclass_fields__
        unknown = set(changes) - set(known)
        if unknown:
            raise ValueError(f"but() takes the arguments of explain(), got {min(unknown)!r}. Choose from {', '.join(known)}.")
        return explain_with(replace(self.traced.arguments, **changes), self.traced)

    def against(self, run: Recorded) -> Comparison:
        """Compare a recorded run with this prediction.

        Args:
            run: the result of `record`, after its block.

        Returns:
            The differences of 5 % or more, the largest first, with causes; prints as a report.

        Raises:
            StateError: if fewer than two optimizer steps were recorded.
        """
        return compare(self, run)

    # --- output ---

    def __str__(self) -> str:
        return report(self)

    def json(self, path: str | Path) -> None:
        """Write the figures to a JSON file, in bytes and seconds.

        Args:
            path: path of the file.
        """
        Path(path).write_text(json.dumps(figures(self), indent=1) + "\n")

    def html(self, path: str | Path, *others: Explanation) -> None:
        """Write pictures to one self-contained HTML file: memory over the step, and a timeline of the streams.

        Args:
            path: path of the file.
            *others: explanations to compare with, drawn below at the same scale.

        Example:
            >>> r.html("explained.html", r.but(reshard_after_forward=False))                  # doctest: +SKIP
        """
        Path(path).write_text(html_page([self, *others]))

    def png(self, path: str | Path) -> None:
        """Write the same pictures to a PNG file with matplotlib (`pip install 'fullshard[plot]'`).

        Args:
            path: path of the file.

        Raises:
            ImportError: if matplotlib is not installed.
        """
        figure_of(self).savefig(path, dpi=150)

    def perfetto(self, path: str | Path, run: Recorded | None = None) -> None:
        """Write the step as a trace for https://ui.perfetto.dev or chrome://tracing.

        Args:
            path: path of the file.
            run: a recorded run, drawn as a second process.

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
    gpu: str | Path | Gpu = DEFAULT_GPU,
    net: str | Path | Network | None = None,
    per_node: int | None = None,
    tensor_parallel: int = 1,
    parallelize: Parallelize | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    full_precision: Classes | type[nn.Module] = FULL_PRECISION,
    offload_policy: OffloadPolicy = OffloadPolicy(),
    comm_policy: CommPolicy = CommPolicy(),
    reshard_after_forward: bool | int | None = None,
    states: StateSharding = ZERO3,
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
) -> Explanation:
    """Predict whether a model fits, what a step costs, and where memory and time go, without a GPU or a process group.

    One step is traced on meta and runs through the scheduler that also runs it in training. The simulator counts every
    allocation. Memory and collectives of the library are exact; other memory is counted from the allocations of torch's
    operators; time is an estimate with a range.

    Args:
        build: function that returns the model; called on the meta device.
        batch: inputs of one rank and microbatch: a tensor, a tuple of the model's arguments or a dict of them, or a function of
            the step number that returns one of these. Only shapes and dtypes count.
        plan: units of the model, as `plan_model` takes them.
        world: number of ranks.
        mesh: (world,) or (replicas, ranks), without the ranks of tensor parallelism; None shards over all ranks.
        gpu: name of a preset, file of `python -m fullshard calibrate`, or a `Gpu`.
        net: network between machines, in the same forms as `gpu`; None is the usual network of such GPUs.
        per_node: number of GPUs of one machine; None is the usual number.
        tensor_parallel: number of ranks of `world` that share one copy of the batch; they are adjacent in a machine.
        parallelize: called with the model and a mesh of `tensor_parallel` ranks, as `parallelize_module` takes them.
        mp_policy: as in `fully_shard`; on a GPU, None computes in bf16 and reduces in fp32.
        full_precision: as in `shard_model`. Pass () if you call `fully_shard` yourself, which makes no such units. Unused with
            engine="fsdp2".
        offload_policy: as in `fully_shard`.
        comm_policy: as in `fully_shard`; `collectives` and `lanes` have no effect.
        reshard_after_forward: as in `fully_shard`.
        states: as in `fully_shard`. Under `ZERO1` only the last microbatch reduces, as after
            `set_is_last_backward(False)` for the others.
        shard_placement_fn: as in `fully_shard`, but returns only None or `Shard(dim)`.
        optimizer: one of adamw, adam, adamw-fused, sgd, sgd-momentum, adagrad, rmsprop, or muon (for the parameters that
            `matrices_of` chooses, and AdamW for the rest), or a function that makes an optimizer of parameters; None is no
            optimizer.
        loss: function of the model's output; None takes the output itself, if it has one element, or its `.loss`.
        keep_output: True if the training loop keeps the model's output until the backward ends, as `out = model(x)` does;
            False for `loss(model(x)).backward()`.
        microbatches: number of forwards and backwards per step.
        accumulate: True reduces gradients in the last microbatch only, False in each.
        recompute: "none" (recomputation by the model itself is in the trace), "block" (every unit that has siblings of its
            class runs again in backward), "every:2" (every second of these units), "selective" (all of these units, except
            attention and every second matrix product), or a function (name, module) -> bool of units.
        footprints: results that depend on values of tensors, which meta tensors do not have. The key is an operator, such as
            "aten::nonzero", for its result (`routed` for experts), or a line, such as "model.py:12", for the number or bool
            that it reads from a tensor. The result is a value, or a function of the arguments.
        engine: "fullshard", or "fsdp2" to simulate the copies and buffers of torch's FSDP2.
        expandable_segments: True if the allocator runs with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.
        keep_unsharded_storage: as `FSDPModule.set_keep_unsharded_storage` of the whole model: the buffers of all-gathers
            stay in memory.

    Returns:
        The explanation.

    Raises:
        ValueError: for a model, batch, mesh or name that cannot be explained; the text is one line that names the remedy.

    Example:
        >>> r = explain(lambda: torch.nn.Linear(1024, 1024), torch.empty(8, 1024), world=8, loss=torch.sum)
        >>> print(str(r).splitlines()[0])
        fits: 2.0 GiB of 79.1 GiB on each h100-sxm, 8 ranks
    """
    forget_optimizer_steps()
    return explain_with(ExplainArguments(**locals()))  # its fields are the arguments of this function


def explain_with(arguments: ExplainArguments, earlier: TracedModel | None = None) -> Explanation:
    """Simulate a step of the model. Trace the model first, unless `earlier`, a trace of it, is still valid."""
    with gc_paused():
        arguments.check()
        gpu = arguments.machine
        traced = (None if earlier is None else earlier.reuse_for(arguments)) or trace_model(arguments)
        for dtype in traced.trace.product_dtypes:
            gpu.peak(dtype)  # raises if the GPU has no matrix products in this dtype
        setting = setting_of(arguments, traced)
        simulation = simulate(traced.trace, traced.plan, setting)
        return Explanation(traced, setting, gpu, network_of(arguments.net, gpu), simulation)
