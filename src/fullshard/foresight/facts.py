"""What a step takes: whether that fits, where memory is most, and where time goes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import nn

from fullshard.collectives.traffic import Message
from fullshard.foresight.allocator import reserved_for
from fullshard.foresight.clock import Band, Timeline, play, spread
from fullshard.foresight.hardware import Gpu, Network
from fullshard.foresight.ledger import Category
from fullshard.foresight.setup import Traced
from fullshard.foresight.simulate import Setting, Simulation
from fullshard.foresight.trace import Op
from fullshard.wrap.plan import Plan
from fullshard.wrap.tables import bytes_text

BUDGET = 0.92
"""The part of a GPU's memory that a step may take and still fits: fragments of the allocator come and go."""

COMPILED = ((0.83, 0.89), (0.83, 0.94))
"""Time and memory of a step of torch.compile, in parts of one that runs as it is written: ranges of published runs."""

Verdict = Literal["fits", "tight", "no"]


@dataclass(frozen=True, eq=False)
class Facts:
    """What a step takes: the fields and properties of an `Explanation`."""

    traced: Traced
    setting: Setting
    gpu: Gpu
    network: Network
    simulation: Simulation

    @property
    def plan(self) -> Plan:
        """The units."""
        return self.traced.plan

    @property
    def notes(self) -> tuple[str, ...]:
        """What the answer rests on or leaves out, in lines of the report."""
        return (*self._of_compiling(), *self._of_float8(), *self._of_network, *self._of_modules, *self.traced.trace.notes)

    @cached_property
    def _of_modules(self) -> tuple[str, ...]:
        """Lines of modules whose step has more than is simulated."""
        modules = list(self.traced.model.modules())
        found = []
        if any(isinstance(module, nn.SyncBatchNorm) for module in modules):
            found.append("SyncBatchNorm sends messages of its own, which are not simulated")
        if any(isinstance(module, nn.RNNBase) for module in modules):
            found.append(
                "recurrent layers are traced step by step, and not as one kernel of cuDNN or of the CPU, whose memory and time "
                "are others: an LSTM on the CPU took up to twice the memory"
            )
        convolved = [e.nbytes for e in self.traced.trace.events if isinstance(e, Op) and e.name.startswith("aten.convolution")]
        if convolved and self.gpu.synchronous:
            found.append(
                "convolutions on the CPU copy tensors to layouts of the processor's own while they run, which is not "
                f"simulated: the peak may be up to {bytes_text(2 * max(convolved))} higher"
            )
        if len(self.plan.units) == 1 and sum(any(True for _ in m.parameters(recurse=False)) for m in modules) > 2:
            found.append("the plan has one unit, which is the whole model: nothing is gathered ahead, and all of it at once")
        return tuple(found)

    @cached_property
    def _of_network(self) -> tuple[str, ...]:
        """A line if a step takes another time with a network of half the speed."""
        if not self.timeline.links.get("between"):
            return ()
        network = replace(self.network, efficiency=self.network.efficiency / 2)
        slower = play(self.simulation.program, self.gpu, network, self.setting.mesh).seconds
        if slower <= 1.05 * self.timeline.seconds:
            return ()
        name, share = self.network.name, self.network.per_gpu / 1e9
        guessed = "" if self.traced.question.net is not None else f", which {self.gpu.name} usually have"
        return (
            f"the step depends on the network between machines, {name}{guessed} ({share:g} GB/s for each GPU): at half its "
            f"speed it takes {slower / self.timeline.seconds:.2f} times as long. Say yours by net= (--net)",
        )

    def _of_float8(self) -> tuple[str, ...]:
        if all(dtype.itemsize > 1 for dtype in self.traced.trace.multiplied):
            return ()
        return (
            "products in float8 are taken to reach the same part of their peak as those in bf16, which was held against no "
            "published run; casts to it are kernels of their own, unless torch.compile fuses them",
        )

    def _of_compiling(self) -> tuple[str, ...]:
        if not self.traced.trace.compiled:
            return ()
        (low, high), (least, most) = COMPILED
        return (
            "torch.compile is not simulated: the step is traced as it was written. Compiled runs that were published took "
            f"{low} to {high} of its time, and {least} to {most} of its memory; the step and the verdict have these ranges",
        )

    # --- memory ---

    @property
    def peak(self) -> int:
        """Bytes of tensors on the device where they are most: what `torch.cuda.max_memory_allocated` says."""
        return self.simulation.ledger.peak

    @cached_property
    def reserved(self) -> int:
        """Bytes that the caching allocator reserves: what `torch.cuda.max_memory_reserved` says."""
        if self.gpu.synchronous:
            return self.peak
        return reserved_for(self.simulation.ledger.changes, expandable=self.traced.question.expandable_segments)

    @property
    def needed(self) -> int:
        """Bytes of the device's memory: what is reserved, and what the driver and NCCL take beside it."""
        return self.reserved + self.gpu.context

    @property
    def needs(self) -> tuple[int, int]:
        """(bytes that the step cannot do without, bytes that it takes where it may).

        The first are tensors and what the driver and NCCL take: an allocator that finds no more gives back what it keeps.
        """
        least, most = COMPILED[1] if self.traced.trace.compiled else (1.0, 1.0)
        return int(self.peak * least) + self.gpu.context, int(self.reserved * most) + self.gpu.context

    @property
    def verdict(self) -> Verdict:
        """Whether it "fits" with a margin, is "tight" without one, or "no"."""
        least, most = self.needs
        if least > self.gpu.memory or self.pinned > self.gpu.host:
            return "no"
        return "fits" if most <= BUDGET * self.gpu.memory else "tight"

    @property
    def fits(self) -> bool:
        """Whether it fits, if only just."""
        return self.verdict != "no"

    @property
    def at_peak(self) -> dict[tuple[Category, str], int]:
        """Bytes by category and unit where tensors are most; "" is what is of no unit."""
        return self.simulation.ledger.at_peak()

    @cached_property
    def outside(self) -> dict[str, int]:
        """Of what is of no unit where tensors are most, bytes by the operator that made it, largest first."""
        ledger, live = self.simulation.ledger, dict[int, int]()
        for change in ledger.changes[: ledger.peak_after]:
            if change.block in self.simulation.outside:
                live[change.block] = live.get(change.block, 0) + change.nbytes
        found: Counter[str] = Counter()
        for block, nbytes in live.items():
            found[self.simulation.outside[block]] += nbytes
        return {name: nbytes for name, nbytes in found.most_common() if nbytes}

    @cached_property
    def pinned(self) -> int:
        """Bytes of the host's memory that this rank's shards, gradients and states take with offloading."""
        level = most = 0
        for change in self.simulation.ledger.changes:
            if change.category == "pinned host":
                level += change.nbytes
                most = max(most, level)
        return most

    # --- time ---

    @property
    def price(self) -> float | None:
        """Of an hour of one GPU, None if none was given."""
        return self.traced.question.price

    @cached_property
    def timeline(self) -> Timeline:
        """The step on a clock, by the middle of the constants."""
        return play(self.simulation.program, self.gpu, self.network, self.setting.mesh)

    @property
    def seconds(self) -> float:
        """Of a step, by the middle of the constants."""
        return self.timeline.seconds * (sum(COMPILED[0]) / 2 if self.traced.trace.compiled else 1)

    @cached_property
    def step(self) -> Band:
        """Seconds of a step."""
        low, high = spread(self.simulation.program, self.gpu, self.network, self.setting.mesh)
        least, most = COMPILED[0] if self.traced.trace.compiled else (1.0, 1.0)
        return Band(low * least, self.seconds, high * most)

    @property
    def exposed(self) -> dict[str, float]:
        """Seconds that computing waits for messages, by the unit that is waited for."""
        return self.timeline.exposed

    @property
    def messages(self) -> tuple[Message, ...]:
        """Every message of a step, as `counting` lists them."""
        return self.simulation.messages

    @property
    def flops(self) -> int:
        """Of the model in a step, of one rank; recomputation is not counted."""
        return (self.traced.trace.flops - self.traced.trace.recomputed) * self.setting.microbatches

    @property
    def mfu(self) -> float:
        """Model flops utilisation (PaLM, arXiv 2204.02311, appendix B): flops / seconds / peak in the dtype of the products."""
        return self.flops / self.seconds / self.gpu.peak(self.compute_dtype)

    @cached_property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of most matrix products."""
        found: Counter[torch.dtype] = Counter()
        for event in self.traced.trace.events:
            if isinstance(event, Op) and event.dtype is not None:
                found[event.dtype] += event.flops
        return max(found, key=lambda dtype: found[dtype], default=torch.float32)

    @property
    def tokens_per_second(self) -> float:
        """Tokens (elements of the batch's integers, else its rows) of one GPU in a second; tensor parallelism shares them."""
        return self.traced.tokens * self.setting.microbatches / self.seconds / self.setting.tensor_parallel

    @property
    def bottleneck(self) -> str:
        """What most of the step is: "computing", "messages" or "the host"."""
        times = {"computing": self.timeline.computing, "messages": self.timeline.waiting, "the host": self.timeline.host}
        return max(times, key=lambda name: times[name])


__all__ = ["BUDGET", "Facts", "Verdict"]
