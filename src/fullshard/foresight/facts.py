"""Estimate of one step, `StepEstimate`: verdict, peak memory and its parts, time and its parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Literal

import torch
from torch import nn

from fullshard.core import Message
from fullshard.foresight.allocator import reserved_for
from fullshard.foresight.clock import Band, Timeline, play, spread
from fullshard.foresight.hardware import Gpu, Network
from fullshard.foresight.ledger import Category
from fullshard.foresight.setup import TracedModel
from fullshard.foresight.simulate import Setting, Simulation
from fullshard.foresight.trace import Op
from fullshard.wrap.plan import Plan
from fullshard.wrap.tables import bytes_text

BUDGET = 0.92
"""Fraction of a GPU's memory that a step may use and still "fits"; the rest is a margin for fragmentation."""

COMPILED = ((0.83, 0.89), (0.83, 0.94))
"""Time and memory of a step with torch.compile relative to an eager step, as (lowest, highest) of published runs."""

Verdict = Literal["fits", "tight", "no"]


@dataclass(frozen=True, eq=False)
class StepEstimate:
    """Memory and time of one step; base class of `Explanation`, which documents the fields."""

    traced: TracedModel
    setting: Setting
    gpu: Gpu
    network: Network
    simulation: Simulation

    @property
    def plan(self) -> Plan:
        """The units."""
        return self.traced.plan

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """Assumptions and omissions of the estimate, as lines of the report."""
        return (*self._notes(), *self._module_notes(), *self.traced.trace.notes)

    def _notes(self) -> Iterator[str]:
        """Yield what the constants of time and memory assume."""
        if self.traced.trace.compiled:
            (low, high), (least, most) = COMPILED
            yield (
                "torch.compile is not simulated: the step is traced in eager mode. Published compiled runs took "
                f"{low} to {high} of the eager time, and {least} to {most} of the eager memory; the step and the verdict have "
                "these ranges"
            )
        if any(dtype.itemsize == 1 for dtype in self.traced.trace.product_dtypes):
            yield (
                "matrix products in float8 are assumed to reach the same fraction of their peak as in bf16, which no published "
                "run confirms; casts to float8 are separate kernels, unless torch.compile fuses them"
            )
        if self.timeline.links.get("between"):
            network = replace(self.network, efficiency=self.network.efficiency / 2)
            slower = play(self.simulation.program, self.gpu, network, self.setting.mesh).seconds / self.timeline.seconds
            name, share = self.network.name, self.network.per_gpu / 1e9
            guessed = "" if self.traced.arguments.net is not None else f", which {self.gpu.name} usually have"
            if slower > 1.05:
                yield (
                    f"the step depends on the network between machines, {name}{guessed} ({share:g} GB/s for each GPU): at half "
                    f"its speed the step takes {slower:.2f} times as long. Pass your network as net= (--net)"
                )

    def _module_notes(self) -> Iterator[str]:
        """Yield notes on modules that the simulation does not cover completely."""
        modules = list(self.traced.model.modules())
        if any(isinstance(module, nn.SyncBatchNorm) for module in modules):
            yield "SyncBatchNorm runs collectives of its own, which are not simulated"
        if any(isinstance(module, nn.RNNBase) for module in modules):
            yield (
                "recurrent layers are traced step by step, not as one kernel of cuDNN or of the CPU, whose memory and time "
                "differ: an LSTM on the CPU took up to twice the memory"
            )
        convolved = [e.nbytes for e in self.traced.trace.events if isinstance(e, Op) and e.name.startswith("aten.convolution")]
        if convolved and self.gpu.synchronous:
            yield (
                "convolutions on the CPU copy tensors to processor-specific layouts while they run, which is not "
                f"simulated: the peak may be up to {bytes_text(2 * max(convolved))} higher"
            )
        if len(self.plan.units) == 1 and sum(any(True for _ in m.parameters(recurse=False)) for m in modules) > 2:
            yield "the plan has one unit, the whole model: all parameters are all-gathered at once, without prefetching"

    # --- memory ---

    @property
    def peak(self) -> int:
        """Peak bytes of tensors on the device, as `torch.cuda.max_memory_allocated` returns them."""
        return self.simulation.ledger.peak

    @cached_property
    def reserved(self) -> int:
        """Peak bytes that the caching allocator reserves, as `torch.cuda.max_memory_reserved` returns them."""
        if self.gpu.synchronous:
            return self.peak
        return reserved_for(self.simulation.ledger.changes, expandable=self.traced.arguments.expandable_segments)

    @property
    def needed(self) -> int:
        """Bytes of device memory: the reserved bytes plus the memory of the driver and of NCCL."""
        return self.reserved + self.gpu.context

    @property
    def needs(self) -> tuple[int, int]:
        """(lowest, highest) bytes of device memory that the step needs.

        The lowest is tensors, the driver and NCCL: an allocator that runs out of memory returns its cached blocks. The highest
        includes these cached blocks.
        """
        least, most = COMPILED[1] if self.traced.trace.compiled else (1.0, 1.0)
        return int(self.peak * least) + self.gpu.context, int(self.reserved * most) + self.gpu.context

    @property
    def verdict(self) -> Verdict:
        """Verdict: "fits" with a margin, "tight" without one, or "no"."""
        least, most = self.needs
        if least > self.gpu.memory or self.pinned > self.gpu.host:
            return "no"
        return "fits" if most <= BUDGET * self.gpu.memory else "tight"

    @property
    def fits(self) -> bool:
        """True if the verdict is "fits" or "tight"."""
        return self.verdict != "no"

    @property
    def at_peak(self) -> dict[tuple[Category, str], int]:
        """Bytes by (category, unit) at the peak of tensors; memory outside of units has the unit ""."""
        return self.simulation.ledger.at_peak()

    @cached_property
    def outside(self) -> dict[str, int]:
        """Bytes outside of units at the peak of tensors, by the operator that allocated them, largest first."""
        ledger, operator_of = self.simulation.ledger, self.simulation.outside
        found: Counter[str] = Counter()
        for change in ledger.changes[: ledger.peak_after]:
            if change.block in operator_of:
                found[operator_of[change.block]] += change.nbytes
        return {name: nbytes for name, nbytes in found.most_common() if nbytes}

    @cached_property
    def pinned(self) -> int:
        """Peak bytes of pinned host memory of this rank's shards, gradients and optimizer states, with offloading."""
        changes = (change.nbytes for change in self.simulation.ledger.changes if change.category == "pinned host")
        return max(accumulate(changes), default=0)

    # --- time ---

    @cached_property
    def timeline(self) -> Timeline:
        """Timeline of the step, with the middle values of the constants."""
        return play(self.simulation.program, self.gpu, self.network, self.setting.mesh)

    @property
    def seconds(self) -> float:
        """Seconds of a step, with the middle values of the constants."""
        return self.timeline.seconds * (sum(COMPILED[0]) / 2 if self.traced.trace.compiled else 1)

    @cached_property
    def step(self) -> Band:
        """Seconds of a step, with a band."""
        low, high = spread(self.simulation.program, self.gpu, self.network, self.setting.mesh)
        least, most = COMPILED[0] if self.traced.trace.compiled else (1.0, 1.0)
        return Band(low * least, self.seconds, high * most)

    @property
    def exposed(self) -> dict[str, float]:
        """Seconds that the compute stream waits for collectives, by the unit of the collective."""
        return self.timeline.exposed

    @property
    def messages(self) -> tuple[Message, ...]:
        """All collectives and copies of a step, in the form that `fullshard.counting` records."""
        return self.simulation.messages

    @property
    def flops(self) -> int:
        """Floating-point operations of a step on one rank, without recomputation."""
        return (self.traced.trace.flops - self.traced.trace.recomputed) * self.setting.microbatches

    @property
    def mfu(self) -> float:
        """Model flops utilisation (PaLM, arXiv 2204.02311, appendix B): flops / seconds / peak in `compute_dtype`."""
        return self.flops / self.seconds / self.gpu.peak(self.compute_dtype)

    @cached_property
    def compute_dtype(self) -> torch.dtype:
        """Dtype in which matrix products have the most flops."""
        found: Counter[torch.dtype] = Counter()
        for event in self.traced.trace.events:
            if isinstance(event, Op) and event.dtype is not None:
                found[event.dtype] += event.flops
        return max(found, key=lambda dtype: found[dtype], default=torch.float32)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of one GPU (rows, if the batch has no integers); ranks of tensor parallelism share their tokens."""
        return self.traced.tokens * self.setting.microbatches / self.seconds / self.setting.tensor_parallel

    @property
    def bottleneck(self) -> str:
        """Largest part of the step: "computing", "messages" (waiting for collectives) or "the host"."""
        times = {"computing": self.timeline.computing, "messages": self.timeline.waiting, "the host": self.timeline.host}
        return max(times, key=lambda name: times[name])
