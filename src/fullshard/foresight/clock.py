"""A clock for a program: when each operator computes, when each collective is under way, and who waits for whom.

    host      queues one instruction after the other, and runs ahead of the device
    compute   operators, in order; each max(flops / peak, bytes / bandwidth), not before the host queued it
    lanes     collectives, in order on each lane, behind what computed when they were queued; the link carries one at a time

A wait on the compute lane for a collective that is not over yet is exposed time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from fullshard.collectives.traffic import Message
from fullshard.foresight.hardware import Gpu, Network
from fullshard.foresight.program import ON_HOST, Await, Launch, Mesh, Place, Program
from fullshard.foresight.rates import attention_part, product_part
from fullshard.foresight.trace import Op


@dataclass(frozen=True, slots=True)
class Span:
    """From `start` to `end` (seconds) on a lane: "compute", "gather", "reduce", "replicate", or "wait" on that of compute."""

    lane: str
    start: float
    end: float
    unit: str
    name: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """A step on a clock.

    Args:
        spans: what happens when; operators of one unit and phase in a row are one span.
        seconds: until everything is over.
        computing: seconds that the compute lane is busy.
        exposed: seconds that it waits for messages, by unit.
        host: seconds that it waits for the host.
        links: bytes that one rank sends, by kind of link: "inside" a machine, "between" machines, "host".
        moments: (seconds, changes of the ledger so far), for memory over time.

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
        """Seconds that the compute lane waits for messages."""
        return sum(self.exposed.values())


def op_seconds(op: Op, gpu: Gpu) -> float:
    """How long an operator computes."""
    if op.name == ON_HOST:
        return op.nbytes / HOST
    part, nbytes = gpu.matmul, op.nbytes
    if gpu.synchronous and op.dtype in (torch.bfloat16, torch.float16):
        nbytes *= 2  # a CPU computes as many elements in a second, whatever their size
    if "attention" in op.name:
        part = gpu.attention_fp32 if op.dtype == torch.float32 else gpu.attention
    if op.sizes and not gpu.synchronous:
        part *= _part_by_size(op)
    return max(op.flops / (1 + op.causal) / (gpu.peak(op.dtype) * part), nbytes / (gpu.bandwidth * gpu.streaming))


def _part_by_size(op: Op) -> float:
    if len(op.sizes) == 2:
        head, length = op.sizes
        return attention_part(backward="backward" in op.name, causal=op.causal, head=head, length=length)
    return product_part(*op.sizes)


def message_seconds(message: Message, lane: str, gpu: Gpu, network: Network, mesh: Mesh) -> float:
    """How long a message travels, alone on its link.

    Inside a machine and between machines it travels at the same time; the slower one counts. Between machines all network cards
    of a node carry a part.
    """
    if message.kind in ("to_device", "to_host"):
        return message.nbytes / PCIE
    ranks = message.ranks
    if ranks == 1:
        return 0.0
    inside = inside_one(message, lane, gpu, mesh)
    nodes = -(-ranks // inside)
    times = 2 if message.kind in ("all_reduce", "heartbeat") else 1
    link = message.nbytes * (ranks - 1) / ranks / gpu.link if inside > 1 else 0.0
    between = message.nbytes * (nodes - 1) / nodes / (network.per_gpu * inside * network.efficiency)
    latency = network.base + times * ((ranks - nodes) * network.step + (nodes - 1) * network.hop)
    return latency + times * max(link, between)


def inside_one(message: Message, lane: str, gpu: Gpu, mesh: Mesh) -> int:
    """How many of the ranks of a message one machine has."""
    replicas, shards, tensor = mesh
    apart = 1 if lane == "tensor" else tensor
    apart *= shards if lane == "replicate" and message.ranks <= replicas else 1  # what cannot be cut is of all ranks
    return min(message.ranks, max(1, gpu.per_node // apart))


HOST = 20e9
"""Bytes/s of one rank's share of the host's memory: eight ranks share the 300 GB/s and more of a server, at half of it."""

PCIE = 50e9
"""Bytes/s between device and pinned host memory: PCIe 5.0 x16 (PCI-SIG: 63 GB/s raw), as copies reach it."""

HOST_PER_COLLECTIVE = 60e-6
"""Seconds of the host's time to queue a collective: NCCL's enqueue and this library's hooks (docs/performance.md)."""


def play(program: Program, gpu: Gpu, network: Network, mesh: Mesh) -> Timeline:
    """Play a program on a clock.

    Args:
        program: of a step.
        gpu: on which it computes.
        network: over which it communicates.
        mesh: (replicas, ranks, ranks of tensor parallelism).

    Returns:
        The timeline.
    """
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
        self._lanes: dict[str, float] = {}
        self._awaited: dict[str, float] = {}  # when compute last was behind work of a lane
        self._ends: dict[Launch, float] = {}
        self._spans: list[Span] = []
        self._exposed: dict[str, float] = {}
        self._sent: Counter[str] = Counter()
        self._seconds: dict[tuple[object, ...], float] = {}
        self._moments: list[tuple[float, int]] = []
        self._place = Place(0, "", "forward", 0)
        self._since = 0.0

    def enter(self, place: Place) -> None:
        """A unit computes from here on."""
        self._close()
        self._place = place
        self._moments.append((self._compute, place.changes))

    def _close(self) -> None:
        if self._compute > self._since:
            self._spans.append(Span("compute", self._since, self._compute, self._place.unit, self._place.phase))
        self._since = self._compute

    def run(self, instruction: Op | Launch | Await) -> None:
        """The host queues an instruction."""
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
        key = op.flops, op.nbytes, op.name, op.dtype, op.causal, op.sizes
        seconds = self._seconds.get(key)
        if seconds is None:
            seconds = self._seconds[key] = op_seconds(op, gpu)
        if self._link > self._compute:
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
        behind = self._ends[launch.after] if launch.after is not None else self._compute
        if launch.early:
            behind = self._awaited.get(launch.lane, 0.0)
        start = max(behind, self._host, self._lanes.get(launch.lane, 0.0))
        end = start + launch.copied / (self._gpu.bandwidth * self._gpu.streaming)
        for message in launch.messages:
            seconds = message_seconds(message, launch.lane, self._gpu, self._network, self._mesh)
            if message.kind in ("to_device", "to_host"):
                end += seconds
                self._sent["host"] += message.nbytes
                continue
            begin = max(end, self._link)
            end = self._link = begin + seconds
            self._count(message, launch.lane)
            self._spans.append(Span(launch.lane, begin, end, launch.unit, message.kind))
        self._lanes[launch.lane] = self._ends[launch] = end

    def _count(self, message: Message, lane: str) -> None:
        if message.ranks > 1:
            between = inside_one(message, lane, self._gpu, self._mesh) < message.ranks
            times = 2 if message.kind in ("all_reduce", "heartbeat") else 1
            self._sent["between" if between else "inside"] += times * message.nbytes * (message.ranks - 1) // message.ranks

    def _await(self, launch: Launch) -> None:
        end = self._ends[launch]
        if end > self._compute:
            self._close()
            self._spans.append(Span("wait", self._compute, end, launch.unit, f"waits for {launch.lane}"))
            self._exposed[launch.unit] = self._exposed.get(launch.unit, 0.0) + end - self._compute
            self._awaited[launch.lane] = end
            self._compute = self._since = end
        else:
            self._awaited[launch.lane] = self._compute
        if self._gpu.synchronous:
            self._host = self._compute

    def ended(self) -> Timeline:
        """The step is over."""
        self._close()
        seconds = max(self._compute, *self._lanes.values(), self._host) if self._lanes else max(self._compute, self._host)
        exposed = dict(sorted(self._exposed.items(), key=lambda found: -found[1]))
        spans = tuple(sorted(self._spans, key=lambda span: (span.start, span.end)))
        return Timeline(spans, seconds, self._computing, exposed, self._starved, dict(self._sent), tuple(self._moments))


@dataclass(frozen=True, slots=True)
class Band:
    """Seconds: as expected, and within what they will be.

    Args:
        low: if products and the network are better than the constants say.
        middle: by the constants.
        high: if they are worse.

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
"""Factors of computing and of the network for the ends of a band: what published runs differ by between sites."""


def spread(program: Program, gpu: Gpu, network: Network, mesh: Mesh) -> tuple[float, float]:
    """Seconds by better and by worse constants."""
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


__all__ = ["Band", "Span", "Timeline", "message_seconds", "op_seconds", "play", "spread"]
