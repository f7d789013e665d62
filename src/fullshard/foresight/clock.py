"""Clock for a program: start and end of each operator and collective, and waits between them.

    host      queues one instruction after the other, and runs ahead of the device
    compute   operators, in order; each takes max(flops / peak, bytes / bandwidth), and starts after the host queued it
    streams   collectives, in order on each stream, after the operators queued before them; the link carries one at a time

A wait of the compute stream for an unfinished collective is exposed time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise

import torch

from fullshard.core import Message
from fullshard.foresight.hardware import Gpu, Network, attention_fraction, matmul_fraction
from fullshard.foresight.program import ON_HOST, Await, Launch, Mesh, Place, Program
from fullshard.foresight.trace import Op


@dataclass(frozen=True, slots=True)
class Span:
    """Interval on one row of the timeline."""

    lane: str  # "compute", "gather", "reduce", "replicate", "tensor", or "wait" for a wait of the compute stream
    start: float  # seconds
    end: float  # seconds
    unit: str  # qualified name, "" outside of units
    name: str  # phase of compute, kind of the collective, or text of the wait


@dataclass(frozen=True, slots=True)
class Timeline:
    """Timeline of one step.

    Args:
        spans: the intervals, by start. Consecutive operators of one unit and phase form one span.
        seconds: the duration of the step.
        computing: the seconds that the compute stream is busy.
        exposed: the seconds that the compute stream waits for collectives, by unit, largest first.
        host: the seconds that the compute stream waits for the host.
        links: the bytes that one rank sends, by kind of link: "inside" a machine, "between" machines, "host".
        moments: (seconds, number of changes of the memory ledger so far) at the start of each place, to draw memory over time.

    Example:
        >>> Timeline((), 1.0, 0.75, {"blocks.0": 0.25}, 0.0, {}, ()).waiting
        0.25
    """

    spans: tuple[Span, ...]
    seconds: float
    computing: float
    exposed: dict[str, float]
    host: float
    links: dict[str, int]
    moments: tuple[tuple[float, int], ...]

    @property
    def waiting(self) -> float:
        """Seconds that the compute stream waits for collectives."""
        return sum(self.exposed.values())


def op_seconds(op: Op, gpu: Gpu) -> float:
    """Return the seconds that an operator takes on a GPU (or CPU), without launch overhead."""
    if op.name == ON_HOST:
        return op.nbytes / HOST_BANDWIDTH
    part, nbytes = gpu.matmul, op.nbytes
    if gpu.synchronous and op.dtype in (torch.bfloat16, torch.float16):
        nbytes *= 2  # a CPU is no faster on 16-bit elements than on 32-bit ones
    if "attention" in op.name:
        part = gpu.attention_fp32 if op.dtype == torch.float32 else gpu.attention
    if op.sizes and not gpu.synchronous:
        if len(op.sizes) == 2:
            head, length = op.sizes
            part *= attention_fraction(backward="backward" in op.name, causal=op.causal, head=head, length=length)
        else:
            part *= matmul_fraction(*op.sizes)
    return max(op.flops / (1 + op.causal) / (gpu.peak(op.dtype) * part), nbytes / (gpu.bandwidth * gpu.streaming))


def message_seconds(message: Message, stream: str, gpu: Gpu, network: Network, mesh: Mesh) -> float:
    """Return the seconds that a collective takes if it has its link to itself.

    Transfers inside and between machines overlap, and the slower one counts. Between machines, all network cards of a node
    share the transfer.
    """
    if message.kind in ("to_device", "to_host"):
        return message.nbytes / PCIE_BANDWIDTH
    ranks = message.ranks
    if ranks == 1:
        return 0.0
    inside = ranks_in_node(message, stream, gpu, mesh)
    nodes = -(-ranks // inside)
    if message.kind == "all_to_all":  # each rank has a message for each other one, all at once
        link = message.nbytes * (inside - 1) / ranks / gpu.link
        between = message.nbytes * (ranks - inside) / ranks / (network.per_gpu * network.efficiency)
        return network.base + (network.hop if nodes > 1 else network.step) + max(link, between)
    times = 2 if message.kind in ("all_reduce", "heartbeat") else 1  # an all-reduce is a reduce-scatter and an all-gather
    link = message.nbytes * (ranks - 1) / ranks / gpu.link if inside > 1 else 0.0
    between = message.nbytes * (nodes - 1) / nodes / (network.per_gpu * inside * network.efficiency)
    latency = network.base + times * ((ranks - nodes) * network.step + (nodes - 1) * network.hop)
    return latency + times * max(link, between)


def ranks_in_node(message: Message, stream: str, gpu: Gpu, mesh: Mesh) -> int:
    """Return how many ranks of a collective are on one machine."""
    replicas, shards, tensor = mesh
    stride = 1 if stream == "tensor" else tensor  # distance between adjacent ranks of the process group
    # Replicas of a shard are `shards` apart. Larger collectives reduce scalars, which all ranks replicate.
    stride *= shards if stream == "replicate" and message.ranks <= replicas else 1
    return min(message.ranks, max(1, gpu.per_node // stride))


HOST_BANDWIDTH = 20e9
"""Bytes/s of host memory for one rank: eight ranks share half of a server's 300 GB/s or more."""

PCIE_BANDWIDTH = 50e9
"""Bytes/s between device and pinned host memory: PCIe 5.0 x16 (PCI-SIG: 63 GB/s raw), as copies achieve it."""

HOST_PER_COLLECTIVE = 60e-6
"""Seconds of the host's time to queue a collective: NCCL's enqueue and this library's hooks (docs/performance.md)."""


def play(program: Program, gpu: Gpu, network: Network, mesh: Mesh) -> Timeline:
    """Run the program of one step on a clock, and return the timeline."""
    clock = _Clock(gpu, network, mesh)
    places = [*program.places, Place(len(program.instructions), "", "optimizer", 0)]
    for place, after in pairwise(places):
        clock.enter(place)
        for instruction in program.instructions[place.index : after.index]:
            clock.run(instruction)
    return clock.ended()


class _Clock:
    def __init__(self, gpu: Gpu, network: Network, mesh: Mesh) -> None:
        self._gpu, self._network, self._mesh = gpu, network, mesh
        self._host = self._compute = self._link = self._computing = self._starved = 0.0
        self._streams: dict[str, float] = {}
        self._awaited: dict[str, float] = {}  # by stream: time of the last wait for it
        self._ends: dict[Launch, float] = {}
        self._spans: list[Span] = []
        self._exposed: dict[str, float] = {}
        self._sent: Counter[str] = Counter()
        self._op_seconds = cache(partial(op_seconds, gpu=gpu))
        self._moments: list[tuple[float, int]] = []
        self._place = Place(0, "", "forward", 0)
        self._since = 0.0

    def enter(self, place: Place) -> None:
        self._close()
        self._place = place
        self._moments.append((self._compute, place.changes))

    def _close(self) -> None:
        if self._compute > self._since:
            self._spans.append(Span("compute", self._since, self._compute, self._place.unit, self._place.phase))
        self._since = self._compute

    def run(self, instruction: Op | Launch | Await) -> None:
        if isinstance(instruction, Op):
            self._run_op(instruction)
        elif isinstance(instruction, Launch):
            self._launch(instruction)
        else:
            self._await(instruction.launch)

    def _run_op(self, op: Op) -> None:
        if not op.nbytes:
            return
        gpu = self._gpu
        seconds = self._op_seconds(op)
        if self._link > self._compute:  # a concurrent collective slows kernels down
            seconds *= gpu.overlap
        if gpu.synchronous:
            seconds += gpu.launch
        else:
            self._host += gpu.launch
            if self._host > self._compute:
                self._starved += self._host - self._compute
                self._compute = self._host
        self._compute += seconds
        self._computing += seconds
        if gpu.synchronous:
            self._host = self._compute

    def _launch(self, launch: Launch) -> None:
        self._host += HOST_PER_COLLECTIVE if launch.messages else self._gpu.launch
        ready = self._ends[launch.after] if launch.after is not None else self._compute
        if launch.early:  # its stream waits for no operator, only for the last wait of the compute stream for it
            ready = self._awaited.get(launch.stream, 0.0)
        start = max(ready, self._host, self._streams.get(launch.stream, 0.0))
        end = start + launch.copied / (self._gpu.bandwidth * self._gpu.streaming)
        for message in launch.messages:
            seconds = message_seconds(message, launch.stream, self._gpu, self._network, self._mesh)
            if message.kind in ("to_device", "to_host"):
                end += seconds
                self._sent["host"] += message.nbytes
                continue
            begin = max(end, self._link)
            end = self._link = begin + seconds
            self._count(message, launch.stream)
            self._spans.append(Span(launch.stream, begin, end, launch.unit, message.kind))
        self._streams[launch.stream] = self._ends[launch] = end

    def _count(self, message: Message, stream: str) -> None:
        if message.ranks > 1:
            between = ranks_in_node(message, stream, self._gpu, self._mesh) < message.ranks
            times = 2 if message.kind in ("all_reduce", "heartbeat") else 1
            self._sent["between" if between else "inside"] += times * message.nbytes * (message.ranks - 1) // message.ranks

    def _await(self, launch: Launch) -> None:
        end = self._ends[launch]
        if end > self._compute:
            self._close()
            self._spans.append(Span("wait", self._compute, end, launch.unit, f"waits for {launch.stream}"))
            self._exposed[launch.unit] = self._exposed.get(launch.unit, 0.0) + end - self._compute
            self._compute = self._since = end
        self._awaited[launch.stream] = self._compute
        if self._gpu.synchronous:
            self._host = self._compute

    def ended(self) -> Timeline:
        self._close()
        seconds = max(self._compute, self._host, *self._streams.values())
        exposed = dict(sorted(self._exposed.items(), key=lambda found: -found[1]))
        spans = tuple(sorted(self._spans, key=lambda span: (span.start, span.end)))
        return Timeline(spans, seconds, self._computing, exposed, self._starved, dict(self._sent), tuple(self._moments))


@dataclass(frozen=True, slots=True)
class Band:
    """Expected seconds, with bounds.

    Args:
        low: the seconds if matrix products and the network are faster than the constants of the GPU and the network.
        middle: the seconds by these constants.
        high: the seconds if they are slower.

    Example:
        >>> print(Band(0.9, 1.0, 1.25))
        1.00 s (0.90 to 1.25)
    """

    low: float
    middle: float
    high: float

    def __str__(self) -> str:
        scale, name = (1.0, "s") if self.middle >= 0.1 else (1e3, "ms")
        return f"{self.middle * scale:.2f} {name} ({self.low * scale:.2f} to {self.high * scale:.2f})"


SPREAD = ((1.12, 1.15), (0.88, 0.75))
"""Factors on the speeds of (computing, network) at the ends of a band: as much as published runs of several sites differ."""


def spread(program: Program, gpu: Gpu, network: Network, mesh: Mesh) -> tuple[float, float]:
    """Return the seconds of a step with faster and with slower constants."""
    low, high = (
        play(
            program,
            replace(gpu, matmul=gpu.matmul * computing, streaming=gpu.streaming * computing, link=gpu.link * links),
            replace(network, efficiency=network.efficiency * links),
            mesh,
        ).seconds
        for computing, links in SPREAD
    )
    return low, high
