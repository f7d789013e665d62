"""Checks and measures fullshard's stream path on one CUDA GPU, beside torch's FSDP2, in a few minutes and one table.

    python tests/gpu/gpu_check.py [--out runs] [--only parity memory] [--named gloo] [--limit 560]
    python tests/gpu/gpu_check.py --cpu-dry-run        # the same code with tiny sizes, to test this script itself

Needs torch and one GPU, nothing else. Every job runs in processes of its own, so that one that crashes or hangs costs only
its own rows. How ranks are had from one GPU:

    one rank    nccl, or the copies that fullshard makes in a group of one
    staged      2 or 4 processes on the GPU, gloo between them, messages staged through pinned host memory
    mirror      one process that pretends to be rank 0 of many: all shards are made equal, so a gather is a broadcast on the
                device and a reduction takes its own chunk; nothing ever blocks the host, so streams are on their own
    fake        torch's fake process group, where only time and memory count

Exits with 0 if nothing failed, 1 if something did, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import gc
import json
import math
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.func import functional_call
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

try:
    import fullshard
except ModuleNotFoundError:  # a checkout that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))
    import fullshard

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from poison import poisoned

from fullshard import CheckPolicy, CommPolicy, MixedPrecisionPolicy, fully_shard
from fullshard.comm.base import SingleRank, Started, StartedWork
from fullshard.comm.coalesced import CoalescedCollectives
from fullshard.comm.gloo import GlooCollectives
from fullshard.comm.streams import stream_for
from fullshard.core import communicator as fullshard_communicator
from fullshard.wrap import ModuleWrapPolicy

PASS, FAIL, SKIP, NOTE = "PASS", "FAIL", "SKIP", "note"
MIB = 1 << 20


# --- what a job is, and what it reports ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """One world of processes that run one function. section 1 - n jobs.

    cpu: why it makes no sense on the CPU; empty if it does.
    sanitized: whether torch.cuda._sanitizer looks at every kernel.
    """

    section: str
    name: str
    run: Callable[[World], None]
    backend: str = "nccl"
    ranks: int = 1
    pretend: int = 1  # ranks of a fake group
    limit: float = 120.0
    cpu: str = ""
    sanitized: bool = False

    @property
    def measures(self) -> bool:
        """Whether it wants the machine for itself."""
        return self.section in ("overlap", "memory", "time", "table")


class Report:
    """Rows that a job has found, written at once, so that a crash keeps those before it."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    @property
    def folder(self) -> Path:
        """Where the reports and logs of all jobs are."""
        assert self._path is not None
        return self._path.parent

    def _write(self, **entry: Any) -> None:
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(entry) + "\n")

    def say(self, status: str, name: str, detail: str = "") -> None:
        self._write(kind="check", status=status, name=name, detail=detail)

    def check(self, good: bool, name: str, detail: str = "") -> None:
        self.say(PASS if good else FAIL, name, detail)

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self._write(kind="table", head=list(head), rows=[list(row) for row in rows])

    @contextmanager
    def guarded(self, name: str) -> Iterator[None]:
        """What raises inside is one failed check."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.say(FAIL, name, said(error))


def said(error: BaseException) -> str:
    """The exact text of an error, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:600]


class World:
    """What a job gets: its place among the ranks, the device, and where to report."""

    def __init__(self, job: Job, rank: int, dry: bool, report: Report) -> None:
        self.job, self.rank, self.dry, self.report = job, rank, dry, report
        self.device = torch.device("cpu") if dry else torch.device("cuda", 0)
        self.ranks = job.pretend if job.backend == "fake" else job.ranks
        self._meshes: dict[tuple[int, ...], DeviceMesh] = {}

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def mesh(self, *shape: int) -> DeviceMesh:
        """The mesh of all ranks: one axis to shard over, or (replicate, shard)."""
        shape = shape or (self.ranks,)
        if shape not in self._meshes:
            names = ("replicate", "shard")[-len(shape) :]
            self._meshes[shape] = init_device_mesh(self.device.type, shape, mesh_dim_names=names)
        return self._meshes[shape]

    def sync(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def worst(self, value: float) -> float:
        """The maximum over all ranks, so that they go on or stop together."""
        if self.job.backend != "gloo" or self.ranks == 1:
            return value
        message = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(message, op=dist.ReduceOp.MAX)
        return message.item()


# --- collectives for ranks that share a GPU ---------------------------------------------------------------------------


class StagedCollectives:
    """gloo between ranks that share a GPU: messages go through pinned host memory, and the host waits for them."""

    direct_min_bytes: float = 256 * 1024
    in_order = True

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._inner = GlooCollectives(group)
        self.ranks, self.rank = self._inner.ranks, self._inner.rank

    def gatherer(self, outs: Sequence[Tensor], shards: Sequence[Tensor]) -> Callable[[], StartedWork]:
        def gather() -> StartedWork:
            return self._send(outs, shards, lambda hosts, inputs: self._inner.gatherer(hosts, inputs)())

        return gather

    def reduce_scatter(self, outs: Sequence[Tensor], fulls: Sequence[Tensor], scale: float) -> StartedWork:
        return self._send(outs, fulls, lambda hosts, inputs: self._inner.reduce_scatter(hosts, inputs, scale))

    def all_reduce(self, tensor: Tensor) -> StartedWork:
        return self._in_place(tensor, self._inner.all_reduce)

    def all_reduce_max(self, tensor: Tensor) -> StartedWork:
        return self._in_place(tensor, self._inner.all_reduce_max)

    def _send(self, outs: Sequence[Tensor], inputs: Sequence[Tensor], start: Callable[..., StartedWork]) -> StartedWork:
        sent = fetch(inputs)
        received = [host_like(out) for out in outs]
        conclude(start(received, sent))
        for out, host in zip(outs, received):
            out.copy_(host, non_blocking=True)
        return StartedWork()

    def _in_place(self, tensor: Tensor, start: Callable[[Tensor], StartedWork]) -> StartedWork:
        (host,) = fetch([tensor])
        conclude(start(host))
        tensor.copy_(host, non_blocking=True)
        return StartedWork()


def host_like(tensor: Tensor) -> Tensor:
    """Host memory for a message, pinned if it comes from a GPU."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def fetch(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies in host memory, there when this returns; ordered on the current stream alone."""
    hosts = [host_like(tensor).copy_(tensor, non_blocking=True) for tensor in tensors]
    if tensors and tensors[0].is_cuda:
        torch.cuda.current_stream().synchronize()
    return hosts


def conclude(pending: Started) -> None:
    if pending is not None:
        pending.wait()


class MirrorCollectives:
    """Rank 0 of many whose shards are all equal: gathers broadcast, reductions take chunk 0, all on the current stream."""

    rank = 0
    in_order = True

    def __init__(self, ranks: int, network: Network | None = None, direct_min_bytes: float = 256 * 1024) -> None:
        self.ranks, self.direct_min_bytes = ranks, direct_min_bytes
        self._network = network or Network()

    def gatherer(self, outs: Sequence[Tensor], shards: Sequence[Tensor]) -> Callable[[], StartedWork]:
        def gather() -> StartedWork:
            self._network.carry(outs)
            for out, shard in zip(outs, shards):
                mirror(out, shard, self.ranks)
            return StartedWork()

        return gather

    def reduce_scatter(self, outs: Sequence[Tensor], fulls: Sequence[Tensor], scale: float) -> StartedWork:
        self._network.carry(fulls)
        for out, full in zip(outs, fulls):
            torch.mul(full.view(self.ranks, -1)[0], self.ranks * scale, out=out)
        return StartedWork()

    def all_reduce(self, tensor: Tensor) -> StartedWork:
        tensor.mul_(self.ranks)
        return StartedWork()

    def all_reduce_max(self, tensor: Tensor) -> StartedWork:
        return StartedWork()


def mirror(out: Tensor, shard: Tensor, ranks: int) -> None:
    """Write `shard` into all slots of `out`, of which it may be the first."""
    slots = out.view(ranks, -1)
    if slots.data_ptr() == shard.data_ptr():
        slots[1:].copy_(slots[:1].expand(ranks - 1, -1))
    else:
        slots.copy_(shard.expand(ranks, -1))


class Network:
    """How long messages take: `cycles` of a clock per byte, slept on the current stream by one thread of the GPU."""

    def __init__(self) -> None:
        self.cycles_per_byte = 0.0

    def carry(self, fulls: Sequence[Tensor]) -> None:
        cycles = int(self.cycles_per_byte * sum(full.nbytes for full in fulls))
        if cycles:
            torch.cuda._sleep(cycles)


class TheirGather:
    """The mirrored gather for FSDP2's `set_custom_all_gather`."""

    def __init__(self, ranks: int, network: Network) -> None:
        self._ranks, self._network = ranks, network

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        self._network.carry([output_tensor])
        mirror(output_tensor, input_tensor.view(-1), self._ranks)


class TheirReduce(TheirGather):
    """The mirrored reduction for FSDP2's `set_custom_reduce_scatter`."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> None:
        self._network.carry([input_tensor])
        output_tensor.copy_(input_tensor.view(self._ranks, -1)[0].view_as(output_tensor))


# --- lanes ------------------------------------------------------------------------------------------------------------


def nap(random: Random, cuda: bool, most: int = 1_000_000) -> None:
    """Half of the time, keep the current stream busy for up to half a millisecond (the host, on the CPU, for less)."""
    if random.random() < 0.5:
        return
    if cuda:
        torch.cuda._sleep(int(random.random() * most))
    else:
        time.sleep(random.random() * 1e-4)


class NappingLane:
    """A lane that naps at random before a collective and before its end: who does not wait meets what is not there yet."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self._lane, self._random, self._cuda = stream_for(device), Random(seed), device.type == "cuda"

    def run(self, start: Callable[[], StartedWork], finish: Callable[[], None], after: Any = None) -> Any:
        return self._lane.run(partial(self._late, start), partial(self._late, finish), after)

    def _late(self, do: Callable[[], Any]) -> Any:
        nap(self._random, self._cuda)
        return do()


class Forgotten:
    """A ticket whose waits are left out, to see that the checks notice."""

    def __init__(self, ticket: Any) -> None:
        self._ticket = ticket

    @property
    def event(self) -> Any:
        return self._ticket.event

    def done(self) -> bool:
        return False

    def wait(self) -> None:
        pass

    def block(self) -> None:
        pass


class ForgetfulLane(NappingLane):
    """A lane that nobody waits for, and whose work begins late enough to show it. forgets: "gathers" or "reductions"."""

    def __init__(self, device: torch.device, seed: int, forgets: str) -> None:
        super().__init__(device, seed)
        self._forgets = forgets

    def run(self, start: Callable[[], StartedWork], finish: Callable[[], None], after: Any = None) -> Any:
        gathers = finish.__qualname__.startswith("AllGather")
        ticket = super().run(start, finish, after)
        return Forgotten(ticket) if gathers == (self._forgets == "gathers") else ticket

    def _late(self, do: Callable[[], Any]) -> Any:
        if self._cuda:
            torch.cuda._sleep(20_000_000)
        return do()


class HastyLane:
    """A stream that does not wait for the compute stream before it begins."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self._stream = torch.cuda.Stream(device)

    def run(self, start: Callable[[], StartedWork], finish: Callable[[], None], after: Any = None) -> Any:
        with torch.cuda.stream(self._stream):
            conclude(start())
            finish()
            return HastyTicket(self._stream.record_event())


class HastyTicket:
    """Waited for as it should be."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def done(self) -> bool:
        return self.event.query()

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)

    def block(self) -> None:
        self.event.synchronize()


LANES: dict[str, Callable[[torch.device, int], Any]] = {
    "napping": NappingLane,
    "forgets gathers": partial(ForgetfulLane, forgets="gathers"),
    "forgets reductions": partial(ForgetfulLane, forgets="reductions"),
    "hasty": HastyLane,
}


@dataclass
class Recording:
    """Pairs of CUDA events: when a lane worked, and when the compute stream stood still for it."""

    work: list[tuple[Any, Any]]
    stalls: list[tuple[Any, Any]]

    def milliseconds(self) -> tuple[float, float]:
        """(work, stalls), after the device was synchronized."""
        return tuple(sum(first.elapsed_time(last) for first, last in pairs) for pairs in (self.work, self.stalls))

    def clear(self) -> None:
        self.work.clear()
        self.stalls.clear()


class RecordingLane:
    """A lane of events with timestamps around what it does, and around every wait of the compute stream for it."""

    def __init__(self, device: torch.device, recording: Recording) -> None:
        self._lane, self._recording = stream_for(device), recording

    def run(self, start: Callable[[], StartedWork], finish: Callable[[], None], after: Any = None) -> Any:
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

        def begin() -> StartedWork:
            first.record()
            return start()

        def end() -> None:
            finish()
            last.record()

        ticket = self._lane.run(begin, end, after)
        self._recording.work.append((first, last))
        return RecordedTicket(ticket, self._recording)


class RecordedTicket:
    """A ticket that remembers how long it was waited for."""

    def __init__(self, ticket: Any, recording: Recording) -> None:
        self._ticket, self._recording = ticket, recording

    @property
    def event(self) -> Any:
        return self._ticket.event

    def done(self) -> bool:
        return self._ticket.done()

    def wait(self) -> None:
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        self._ticket.wait()
        last.record()
        self._recording.stalls.append((first, last))

    def block(self) -> None:
        self._ticket.block()


# --- models -----------------------------------------------------------------------------------------------------------


class Doze(torch.autograd.Function):
    """The identity, with a nap on the compute stream in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, random: Random) -> Tensor:
        ctx.random = random
        nap(random, x.is_cuda)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        nap(ctx.random, grad.is_cuda)
        return grad, None


class Cell(nn.Module):
    """Norm, two matrices, a residual."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Stack(nn.Module):
    """The shape of a decoder: input layer, blocks, head, and a layer that only some calls use.

    recompute: None, "checkpoint" or "reentrant". random: naps on the compute stream, if not None.
    """

    def __init__(self, dim: int, hidden: int, width: int = 8, out: int = 8, depth: int = 3) -> None:
        super().__init__()
        self.inp = nn.Linear(width, dim)
        self.blocks = nn.ModuleList(Cell(dim, hidden) for _ in range(depth))
        self.spare = nn.Linear(dim, dim)
        self.head = nn.Linear(dim, out)
        self.recompute: str | None = None
        self.random: Random | None = None

    def forward(self, x: Tensor, spare: bool = True) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            if self.random is not None:
                x = Doze.apply(x, self.random)
            x = block(x) if self.recompute is None else checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
        if spare:
            x = x + self.spare(x)
        return self.head(x)


class Small(nn.Module):
    """Eleven parameters, as in a decoder block, so small that only the host's time counts."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.norms = nn.ParameterList([torch.ones(dim) for _ in range(2)])
        self.weights = nn.ParameterList([torch.randn(dim, dim) / dim for _ in range(7)])
        self.biases = nn.ParameterList([torch.zeros(dim) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for norm, bias in zip(self.norms, self.biases):
            x = x * norm + bias
        for weight in self.weights:
            x = x @ weight
        return x


class Block(nn.Module):
    """A decoder block: causal attention and SwiGLU, ten dim squared parameters."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.heads = max(1, dim // 64)
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.gate, self.up = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(dim, 2 * dim, bias=False)
        self.down = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, dim))
        h = self.norm2(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


def matrices(dim: int) -> nn.Module:
    """A unit of four equal matrices, whose size is U."""
    return nn.Sequential(*[nn.Linear(dim, dim, bias=False) for _ in range(4)])


def sequence(make: Callable[[], nn.Module], depth: int, device: torch.device) -> nn.Sequential:
    """`depth` units, equal whenever they are made."""
    torch.manual_seed(0)
    with device:
        return nn.Sequential(*[make() for _ in range(depth)])


def shard_ours(model: nn.Sequential, mesh: DeviceMesh, mp: tuple[Any, Any], **options: Any) -> nn.Sequential:
    policy = MixedPrecisionPolicy(param_dtype=mp[0], reduce_dtype=mp[1])
    for module in (*model, model):
        fully_shard(module, mesh=mesh, mp_policy=policy, **options)
    return model


def shard_theirs(model: nn.Sequential, mesh: DeviceMesh, mp: tuple[Any, Any]) -> nn.Sequential:
    policy = torch_fsdp.MixedPrecisionPolicy(param_dtype=mp[0], reduce_dtype=mp[1])
    for module in (*model, model):
        torch_fsdp.fully_shard(module, mesh=mesh, mp_policy=policy)
    return model


MIXED = (torch.bfloat16, torch.float32)


# --- streams ----------------------------------------------------------------------------------------------------------


def without_synchronisation(world: World) -> None:
    """Whole steps, optimizer included, in which nothing makes the host wait for the device."""
    for label, mp in (("fp32", (None, None)), ("bf16", MIXED)):
        for shape in ((1,), (1, 1)):
            comm = CommPolicy(collectives=CoalescedCollectives if world.cuda else None)
            model = sequence(partial(Block, 64), 3, world.device)
            policy = MixedPrecisionPolicy(param_dtype=mp[0], reduce_dtype=mp[1])
            for module in (*model, model):
                fully_shard(module, mesh=world.mesh(*shape), mp_policy=policy, comm_policy=comm)
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            x = torch.randn(4, 16, 64, device=world.device)
            name = f"{label}, mesh {'x'.join(map(str, shape))}"
            with world.report.guarded(f"a step without synchronisation, {name}"):
                for step in range(6):
                    if world.cuda:
                        torch.cuda.set_sync_debug_mode("error" if step >= 3 else "default")
                    model(x).float().square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                if world.cuda:
                    torch.cuda.set_sync_debug_mode("default")
                world.report.say(PASS if world.cuda else SKIP, f"a step without synchronisation, {name}", "three steps of six")


def memory_at_rest(world: World) -> None:
    """What is allocated between steps stays what it was, also with a host that is steps ahead of the device."""
    model = ours_on(world, MIXED)(sequence(partial(Block, 256), 4, world.device))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.randn(2, 64, 256, device=world.device)
    rests: list[int] = []
    for step in range(12):
        if world.cuda and step >= 6:
            torch.cuda._sleep(20_000_000)
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if world.cuda:
            rests.append(torch.cuda.memory_allocated())
    if not world.cuda:
        world.report.say(SKIP, "memory at rest", "CUDA only; the steps themselves ran")
        return
    spread = max(rests[3:]) - min(rests[3:])
    world.report.check(
        spread <= 64 * 1024, "memory at rest", f"{rests[-1] / MIB:.1f} MiB, up to {spread / 1024:.0f} KiB more or less"
    )


# --- 2. parity --------------------------------------------------------------------------------------------------------


DTYPES: dict[str, tuple[Any, Any, float]] = {  # param_dtype, reduce_dtype, tolerance of the largest value
    "fp32": (None, None, 1e-4),
    "bf16": (torch.bfloat16, torch.float32, 3e-2),
    "bf16 sums": (torch.bfloat16, torch.bfloat16, 5e-2),
    "fp16": (torch.float16, torch.float32, 1e-2),
}


@dataclass(frozen=True)
class Case:
    """One way to train, compared with training the same model unsharded.

    carrier: who carries messages: own (fullshard's choice), nccl (also in a group of one), staged, mirror.
    offload: None, or whether the host's memory is pinned.
    lane: one of LANES, or "own" for those of fullshard.
    """

    carrier: str = "own"
    dtype: str = "fp32"
    keep: bool | int | None = None
    packed: bool = False
    way: str = "plain"
    sizes: tuple[int, int] = (24, 52)
    mesh: tuple[int, ...] = ()
    level: str = "ZERO3"
    offload: bool | None = None
    ahead: bool = False  # gather everything ahead, and keep three reductions on their way
    lane: str = "napping"

    @property
    def name(self) -> str:
        said = [self.dtype, f"keep {self.keep}", "packed" if self.packed else "direct", self.way]
        said += [f"mesh {'x'.join(map(str, self.mesh))}"] if self.mesh else []
        said += [] if self.level == "ZERO3" else [self.level]
        said += [f"offload {'pinned' if self.offload else 'unpinned'}"] if self.offload is not None else []
        said += ["all ahead"] if self.ahead else []
        said += [f"sizes {self.sizes}"] if self.sizes != (24, 52) else []
        said += [] if self.lane == "napping" else [f"{self.lane} lanes"]
        return ", ".join([self.carrier, *said])


def layouts(carrier: str, dtypes: Sequence[str], keeps: Sequence[bool | int | None]) -> Iterator[Case]:
    """Every dtype, with every answer to what stays after forward, packed and direct."""
    for dtype in dtypes:
        for keep in keeps:
            for packed in (False, True):
                yield Case(carrier, dtype, keep, packed)


def ways(carrier: str) -> Iterator[Case]:
    """What programs do beside plain steps."""
    for dtype in ("fp32", "bf16"):
        for way in (
            "accumulate",
            "eval",
            "checkpoint",
            "reentrant",
            "some unused",
            "side stream",
            "by hand",
            "hooks",
            "raises",
        ):
            yield Case(carrier, dtype, way=way)
        yield Case(carrier, dtype, ahead=True)
        yield Case(carrier, dtype, ahead=True, keep=True, way="checkpoint")


def levels(carrier: str, names: Sequence[str] = ("ZERO2", "ZERO1"), mesh: tuple[int, ...] = ()) -> Iterator[Case]:
    """Levels of ZeRO, with one and with several microbatches, and evaluation between steps."""
    for level in names:
        for dtype in ("fp32", "bf16"):
            for way in ("plain", "accumulate", "eval", "raises"):
                yield Case(carrier, dtype, way=way, level=level, mesh=mesh)


def cases_alone() -> list[Case]:
    found = [*layouts("own", list(DTYPES), (None, True, False)), *ways("own")]
    found += [Case("own", sizes=(7, 13)), Case("own", lane="own"), Case("own", mesh=(1, 1))]
    for pinned in (True, False):
        found += [Case("own", dtype, offload=pinned, way=way) for dtype in ("fp32", "bf16") for way in ("plain", "accumulate")]
    return [*found, *levels("own")]


def cases_nccl() -> list[Case]:
    found = [*layouts("nccl", ("fp32", "bf16"), (True, False)), *ways("nccl"), Case("nccl", sizes=(7, 13))]
    for dtype in ("fp32", "bf16"):  # the sum over replicas is nccl's, too
        found += [Case("nccl", dtype, mesh=(1, 1), way=way) for way in ("plain", "accumulate", "hooks", "raises")]
    return [*found, *levels("nccl"), *levels("nccl", ["HFSDP"], (1, 1))]


def cases_sanitized() -> list[Case]:
    """For torch's sanitizer, which takes its time: each path once, on fullshard's own lanes."""
    found = [Case("nccl", dtype, way=way, lane="own") for dtype in ("fp32", "bf16") for way in ("plain", "accumulate", "eval")]
    found += [Case("nccl", way=way, lane="own") for way in ("checkpoint", "by hand", "hooks")]
    found += [Case("nccl", mesh=(1, 1), lane="own"), Case("nccl", ahead=True, keep=True, lane="own")]
    return [*found, Case("own", offload=True, lane="own"), Case("nccl", "bf16", packed=True, lane="own")]


def cases_staged() -> list[Case]:
    found = [*layouts("staged", ("fp32", "bf16", "bf16 sums"), (True, False)), *ways("staged")]
    found += [Case("staged", dtype, mesh=mesh) for dtype in ("fp32", "bf16") for mesh in ((2, 1), (1, 2))]
    found += [Case("staged", dtype, offload=True, way=way) for dtype in ("fp32", "bf16") for way in ("plain", "accumulate")]
    found += [Case("staged", sizes=(7, 13)), Case("staged", sizes=(7, 13), packed=True), Case("staged", lane="own")]
    return found


def cases_of_levels() -> list[Case]:
    return [*levels("staged"), *levels("staged", ["HFSDP"], (2, 1))]


def cases_of_four() -> list[Case]:
    found = [*layouts("staged", ("fp32", "bf16"), (2,)), Case("staged", keep=2, way="checkpoint")]
    found += [Case("staged", dtype, mesh=(2, 2)) for dtype in ("fp32", "bf16")]
    found += [*levels("staged", ["HFSDP"], (2, 2)), Case("staged", mesh=(2, 2), level="HFSDP", sizes=(7, 13))]
    return [*found, Case("staged", mesh=(2, 2), sizes=(7, 13))]


def cases_gloo() -> list[Case]:
    """gloo with tensors of the device, which torch carries by way of the host."""
    found = [*layouts("own", ("fp32", "bf16"), (None,)), Case("own", lane="own"), Case("own", mesh=(2, 1))]
    return [*found, *(Case("own", dtype, way=way) for dtype in ("fp32", "bf16") for way in ("accumulate", "checkpoint"))]


def cases_mirror() -> list[Case]:
    skipped = ("some unused",)  # ranks that differ
    found = [*layouts("mirror", ("fp32", "bf16", "bf16 sums"), (True, False)), *ways("mirror")]
    found += [Case("mirror", dtype, offload=True) for dtype in ("fp32", "bf16")]
    return [case for case in found if case.way not in skipped]


def collectives_of(world: World, case: Case) -> Callable[[dist.ProcessGroup], Any] | None:
    if case.carrier == "staged":
        return lambda group: SingleRank() if group.size() == 1 else StagedCollectives(group)
    if case.carrier == "mirror":
        return lambda group: MirrorCollectives(world.ranks)
    return CoalescedCollectives if case.carrier == "nccl" and world.cuda else None


def comm_of(world: World, case: Case, seed: int) -> CommPolicy:
    lanes = LANES.get(case.lane)
    return CommPolicy(
        direct_min_bytes=math.inf if case.packed else 0,
        reductions_in_flight=3 if case.ahead else 1,
        prefetch_bytes=1 << 30 if case.ahead else None,
        collectives=collectives_of(world, case),
        lanes=None if lanes is None else lambda device: lanes(device, seed),
    )


@cache
def poison_memory() -> object:
    """Poison unsharded memory for the rest of this process."""
    block = poisoned()
    block.__enter__()
    return block


def shard_stack(world: World, model: Stack, case: Case, seed: int) -> Stack:
    poison_memory()
    param, reduce, _ = DTYPES[case.dtype]
    options: dict[str, Any] = {
        "mesh": world.mesh(*case.mesh),
        "mp_policy": MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce),
        "reshard_after_forward": case.keep,
        "states": getattr(fullshard, case.level),
        "comm_policy": comm_of(world, case, seed),
        # The heartbeat finds ranks of planted faults desynced before their gradients are looked at.
        "check_policy": CheckPolicy(heartbeat=case.lane not in CONTROLS),
    }
    if case.offload is not None:
        options["offload_policy"] = fullshard.CPUOffloadPolicy(pin_memory=case.offload)
    for module in (*model.blocks, model):
        fully_shard(module, **options)
    model.recompute = case.way if case.way in ("checkpoint", "reentrant") else None
    model.random = None if case.lane == "own" else Random(seed)
    return model


def tiled(tensor: Tensor, ranks: int) -> Tensor:
    """Chunk 0 in the place of every chunk."""
    return tensor.chunk(ranks)[0].repeat(ranks, *[1] * (tensor.ndim - 1))


def rows_of(full: Tensor, sharded: Any) -> Tensor:
    """This rank's rows of a full tensor, as `sharded` has them. No collectives, so that any backend will do."""
    mesh = sharded.device_mesh
    chunks, mine = full.chunk(mesh.size(mesh.ndim - 1)), mesh.get_local_rank(mesh.ndim - 1)
    return chunks[mine] if mine < len(chunks) else full[:0]


class Trial:
    """A sharded model and the same model unsharded, trained side by side on one rank.

    The reference computes in the same dtypes, rank by rank, so that only what fullshard does can make a difference.
    Differences stay on the device until the end: nothing synchronizes the host between steps.
    """

    def __init__(self, world: World, case: Case, seed: int) -> None:
        self.world, self.case, self.seed = world, case, seed
        self.mirror = case.carrier == "mirror"
        torch.manual_seed(seed)
        self.reference = Stack(*case.sizes).to(world.device)
        if self.mirror:
            with torch.no_grad():
                for parameter in self.reference.parameters():
                    parameter.copy_(tiled(parameter, world.ranks))
        self.sharded = shard_stack(world, copy.deepcopy(self.reference), case, seed)
        # eps: where a gradient is of the size of AdamW's usual 1e-8, the last bit of a sum decides the sign of a whole step.
        adam = seed % 2 and case.way != "hooks"
        self.make: Callable[..., Any] = (
            partial(torch.optim.AdamW, lr=1e-2, eps=1e-3) if adam else partial(torch.optim.SGD, lr=0.1)
        )
        self.hooked: dict[str, Tensor] = {}
        self.optimizers = [self.make(m.parameters()) for m in (self.sharded, self.reference)]
        if case.way == "hooks":
            self.optimizers[0] = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
            for name, parameter in self.sharded.named_parameters():
                parameter.register_post_accumulate_grad_hook(partial(self.step_in_hook, name, self.make([parameter])))
        self.differences: list[Tensor] = []

    def batch(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * self.seed + step)
        return torch.randn(24, 8, generator=generator).to(self.world.device)

    def parts(self, batch: Tensor) -> list[Tensor]:
        """What each rank sees."""
        return [batch] if self.mirror else list(batch.chunk(self.world.ranks))

    def uses(self, step: int, rank: int) -> bool:
        """Whether a rank uses the spare layer in this step."""
        return self.case.way != "some unused" or (step + rank) % 3 == 0

    def compare(self, got: Tensor, expected: Tensor) -> None:
        got, expected = got.detach().double(), expected.detach().double().to(got.device)
        if expected.numel():
            self.differences.append((got - expected).abs().max() / expected.abs().max().clamp(min=1e-3))

    def refer(self, part: Tensor, spare: bool) -> Tensor:
        """The reference's output, computed in the parameters' compute dtype."""
        dtype = DTYPES[self.case.dtype][0] or torch.float32
        parameters = {name: parameter.to(dtype) for name, parameter in self.reference.named_parameters()}
        return functional_call(self.reference, parameters, (part.to(dtype), spare))

    def backward(self, step: int) -> None:
        """Forward and backward of both on one batch, outputs compared."""
        parts = self.parts(self.batch(step))
        mine = 0 if self.mirror else self.world.rank
        output = self.sharded(parts[mine], self.uses(step, mine))
        output.float().square().mean().backward()
        for rank, part in enumerate(parts):
            expected = self.refer(part, self.uses(step, rank))
            if rank == mine:
                self.compare(output, expected)
            (expected.float().square().mean() / len(parts)).backward()

    def look(self, step: int) -> None:
        """A forward without grad, compared."""
        parts = self.parts(self.batch(step + 500))
        with torch.no_grad():
            mine = 0 if self.mirror else self.world.rank
            self.compare(self.sharded(parts[mine]), self.refer(parts[mine], True))

    def step_in_hook(self, name: str, optimizer: Any, parameter: Tensor) -> None:
        self.hooked[name] = parameter.grad
        optimizer.step()
        parameter.grad = None

    def raise_in_backward(self, step: int) -> None:
        """A backward that raises half way, as it does when memory runs out; the caller goes on with the next step."""

        def trip(grad: Tensor) -> None:
            raise RuntimeError("tripped")

        parts = self.parts(self.batch(step + 900))
        part = parts[0 if self.mirror else self.world.rank].requires_grad_()
        handle = self.sharded.blocks[0].register_forward_pre_hook(lambda module, args: args[0].register_hook(trip) and None)
        try:
            self.sharded(part).float().square().mean().backward()
        except RuntimeError as error:
            if "tripped" not in str(error):
                raise
        finally:
            handle.remove()
        self.sharded.zero_grad()

    def compare_gradients(self) -> None:
        expected = dict(self.reference.named_parameters())
        for name, parameter in self.sharded.named_parameters():
            want, got = expected[name].grad, self.hooked.pop(name, parameter.grad)
            if (want is None) != (got is None):
                raise AssertionError(f"{name}.grad is {type(got).__name__}, expected {type(want).__name__}")
            if want is not None:
                if self.mirror:
                    expected[name].grad = want = tiled(want, self.world.ranks)
                self.compare(got.to_local(), rows_of(want, got))

    def step(self, step: int) -> None:
        way = self.case.way
        if self.case.lane == "hasty":
            torch.cuda._sleep(100_000_000)  # the compute stream is late by more than the host takes for the step
        if way == "accumulate":
            with self.sharded.accumulate():
                self.backward(2 * step + 100)
        if way == "eval":
            self.look(step)
        if way == "raises":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that says that gradients are discarded
                self.raise_in_backward(step)
        if way == "by hand":
            handle = self.sharded.unshard(async_op=True)
            for block in self.sharded.blocks:
                block.unshard(async_op=True)
            handle.wait()
        self.backward(step)
        self.compare_gradients()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def compare_parameters(self) -> None:
        expected = dict(self.reference.named_parameters())
        for name, parameter in self.sharded.named_parameters():
            self.compare(parameter.to_local(), rows_of(expected[name], parameter))

    def run(self, steps: int) -> float:
        """The largest difference on this rank, of the largest value; infinite if anything is NaN."""
        side = torch.cuda.Stream() if self.world.cuda and self.case.way == "side stream" else None
        if side is not None:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side) if side is not None else nullcontext():
            for step in range(steps):
                self.step(step)
            self.compare_parameters()
        self.world.sync()
        values = [value.item() for value in self.differences]
        return math.inf if any(math.isnan(value) for value in values) else max(values)


def parity(cases: Callable[[], list[Case]], world: World) -> None:
    """All cases, several seeds each; of several ranks, the first that raises ends the job, since they are out of step."""
    chosen, rows = cases(), []
    if any(case.carrier == "staged" for case in chosen):
        fullshard_communicator.collectives_for = staged_for  # type: ignore[assignment]  # over replicas, smaller groups
    for case in chosen:
        found = 0.0
        try:
            for seed in range(1 if world.dry else 3):
                found = max(found, Trial(world, case, seed).run(2 if world.dry else 4))
        except Exception as error:
            traceback.print_exc()
            world.report.say(FAIL, case.name, said(error))
            if world.ranks > 1 and world.job.backend == "gloo":
                raise
            continue
        found = world.worst(found)
        good = found <= DTYPES[case.dtype][2]
        world.report.check(good, case.name, f"off by {found:.1e} of the largest value")
        rows.append([case.name, f"{found:.1e}", PASS if good else FAIL])
    world.report.table(["case", "largest difference", ""], rows)


def staged_for(group: dist.ProcessGroup | None, device: torch.device, tag: object = None) -> Any:
    return SingleRank() if group is None or group.size() == 1 else StagedCollectives(group)


CONTROLS = {
    "forgets gathers": "noticed: gathers not waited for",
    "forgets reductions": "noticed: reductions not waited for",
    "hasty": "noticed: lanes that run before compute is done",
}


def controls(world: World) -> None:
    """Leave waits out and require that the checks find a difference.

    Collectives are the mirror's: a rank alone reduces in place, so that its stream has nothing that anybody could forget.
    """
    for lane, what in CONTROLS.items():
        if not world.cuda and lane != "forgets gathers":
            world.report.say(SKIP, what, "CUDA only")
            continue
        for dtype in ("fp32", "bf16"):
            with world.report.guarded(f"{what}, {dtype}"):
                found = Trial(world, Case("mirror", dtype, packed=True, lane=lane), 0).run(2)
                world.report.check(found > DTYPES[dtype][2], f"{what}, {dtype}", f"off by {found:.1e}")


def host_writes(world: World) -> None:
    """Report whether offloaded weights that the host writes right after a forward without grad can still reach that forward."""
    overtaken = {"fullshard": overtakes(world, fullshard), "FSDP2": overtakes(world, torch_fsdp)}
    text = ", ".join(f"{name}: {'the write overtakes the copy' if late else 'in order'}" for name, late in overtaken.items())
    world.report.say(FAIL if overtaken["fullshard"] and not overtaken["FSDP2"] else NOTE, "host writes after a forward", text)


def overtakes(world: World, library: Any) -> bool:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(3)])
    expected = copy.deepcopy(model).to(world.device)
    for module in (*model, model):
        library.fully_shard(module, mesh=world.mesh(), offload_policy=library.CPUOffloadPolicy(pin_memory=True))
    x = torch.randn(4, 64, device=world.device)
    with torch.no_grad():
        model(x)
        world.sync()
        torch.cuda._sleep(400_000_000)
        output = model(x)
        for parameter in model.parameters():
            parameter.to_local().zero_()
        world.sync()
        return not torch.allclose(output, expected(x), rtol=1e-4, atol=1e-5)


# --- time ------------------------------------------------------------------------------------------------------------


def interleaved(world: World, steps: dict[str, Callable[[], object]], repeats: int, *, settle: bool) -> dict[str, list[float]]:
    """Seconds of each step, taken in turns. settle: until the device is done, not only the host."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(repeats + 3):
        for name, step in steps.items():
            world.sync()
            start = time.perf_counter()
            step()
            if settle:
                world.sync()
            if repeat >= 3:
                times[name].append(time.perf_counter() - start)
    return times


def ratio(ones: Sequence[float], others: Sequence[float]) -> float:
    """The median of ratios of neighbours in time."""
    return median(one / other for one, other in zip(ones, others))


def stepper(model: nn.Module, x: Tensor) -> Callable[[], None]:
    """Forward and backward, gradients dropped at the start."""

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        model(x).float().square().mean().backward()

    return step


@dataclass(frozen=True)
class Sizes:
    """What fits the device."""

    dim: int
    tokens: int
    depth: int
    unit: int  # dim of the matrices that memory is counted in
    repeats: int


def sizes_of(world: World) -> Sizes:
    if not world.cuda:
        return Sizes(64, 32, 2, 32, 2)
    if torch.cuda.get_device_properties(0).total_memory > 60e9:
        return Sizes(4096, 8192, 8, 4096, 15)
    return Sizes(2048, 4096, 6, 2048, 15)


def decoder(world: World, sizes: Sizes, dim: int) -> nn.Sequential:
    return sequence(lambda: Block(dim), sizes.depth, world.device)


# --- 3. overlap -------------------------------------------------------------------------------------------------------


def cycles_per_ms() -> float:
    """How fast the clock of `torch.cuda._sleep` runs."""
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for cycles in (1_000_000, 50_000_000):
        first.record()
        torch.cuda._sleep(cycles)
        last.record()
        torch.cuda.synchronize()
    return 50_000_000 / first.elapsed_time(last)


def overlap_mirror(world: World) -> None:
    """A network that takes two fifths of the time of a unit's forward for its gather: how much of it is hidden?"""
    sizes, network, recording = sizes_of(world), Network(), Recording([], [])
    lanes = (lambda device: RecordingLane(device, recording)) if world.cuda else None
    ours, theirs = pair(world, lambda: decoder(world, sizes, sizes.dim), MIXED, network, lanes)
    x = torch.randn(max(1, sizes.tokens // 2048), min(sizes.tokens, 2048), sizes.dim, device=world.device)
    steps = {"fullshard": stepper(ours, x), "FSDP2": stepper(theirs, x)}
    without = interleaved(world, steps, sizes.repeats, settle=True)
    if world.cuda:
        forward = median(without["fullshard"]) * 1e3 / (3 * sizes.depth)
        unit = 10 * sizes.dim**2 * 2  # bytes in bf16
        network.cycles_per_byte = 0.4 * forward * cycles_per_ms() / unit
    with_network = interleaved(world, steps, sizes.repeats, settle=True)
    rows = []
    for name in steps:
        rows.append([name, f"{median(without[name]) * 1e3:.1f}", f"{median(with_network[name]) * 1e3:.1f}"])
    world.report.table(["step (ms)", "no network", "with network"], rows)
    if not world.cuda:
        world.report.say(SKIP, "hidden communication", "CUDA only; the steps themselves ran")
        return
    of_theirs = ratio(with_network["fullshard"], with_network["FSDP2"])
    world.report.check(of_theirs <= 1.03, "step with a network, of FSDP2's", f"{of_theirs:.2f}, at most 1.03")
    hidden = hidden_part(world, recording, steps["fullshard"])
    world.report.check(hidden >= 0.75, "communication hidden behind compute", f"{hidden:.0%}, at least 75%")


def hidden_part(world: World, recording: Recording, step: Callable[[], None], repeats: int = 5) -> float:
    """1 - (time the compute stream stood still) / (time the lanes worked)."""
    world.sync()
    recording.clear()
    for _ in range(repeats):
        step()
    world.sync()
    work, stalls = recording.milliseconds()
    rows = [["lanes at work", f"{work / repeats:.2f}"], ["compute stream waiting", f"{stalls / repeats:.2f}"]]
    world.report.table(["per step (ms)", ""], rows)
    return 1 - stalls / max(work, 1e-9)


def overlap_alone(world: World) -> None:
    """One rank, where nccl copies on the device: those copies compete with compute, so this is said, not judged."""
    sizes, recording = sizes_of(world), Recording([], [])
    dim = sizes.dim // 2
    comm = CommPolicy(collectives=CoalescedCollectives, lanes=lambda device: RecordingLane(device, recording))
    ours = shard_ours(decoder(world, sizes, dim), world.mesh(), MIXED, comm_policy=comm)
    step = stepper(ours, torch.randn(4, 2048, dim, device=world.device))
    for _ in range(3):
        step()
    hidden = hidden_part(world, recording, step)
    world.report.say(NOTE, "one rank, nccl's copies hidden", f"{hidden:.0%}")
    with world.report.guarded("picture of a step"):
        picture_of(world, step)
    with world.report.guarded("host runs ahead"):
        host_lead(world)


def picture_of(world: World, step: Callable[[], None]) -> None:
    """The kernels of one step by stream, as a trace for Perfetto and as an SVG, beside the logs of the jobs."""
    folder = world.report.folder
    with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profiler:
        step()
        world.sync()
    profiler.export_chrome_trace(str(folder / "step.json"))
    events = json.loads((folder / "step.json").read_text())["traceEvents"]
    kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and event.get("dur")]
    (folder / "step.svg").write_text(svg_of(kernels))
    world.report.say(NOTE, "picture of a step", f"{len(kernels)} kernels: {folder.name}/step.svg, {folder.name}/step.json")


def svg_of(kernels: Sequence[dict[str, Any]], width: int = 1400, row: int = 26) -> str:
    """One row per stream; communication, copies and casts are darker than compute."""
    streams = sorted({event["args"].get("stream", event["tid"]) for event in kernels})
    first = min(event["ts"] for event in kernels)
    scale = (width - 120) / (max(event["ts"] + event["dur"] for event in kernels) - first)
    shapes = [f'<text x="4" y="{row * i + 18}">stream {stream}</text>' for i, stream in enumerate(streams)]
    for event in kernels:
        y = row * streams.index(event["args"].get("stream", event["tid"])) + 4
        moves = any(word in event["name"].lower() for word in ("nccl", "memcpy", "split_with_sizes", "chunk_cat"))
        name = event["name"].replace("&", "").replace("<", "(").replace(">", ")")[:80]
        shapes.append(
            f'<rect x="{110 + (event["ts"] - first) * scale:.2f}" y="{y}" width="{max(event["dur"] * scale, 0.3):.2f}" '
            f'height="{row - 8}" fill="{"#1f4e79" if moves else "#9dc3e6"}"><title>{name}, {event["dur"]} us</title></rect>'
        )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{row * len(streams) + 8}" font-size="12">'
    return "\n".join([head, *shapes, "</svg>"])


def host_lead(world: World) -> None:
    """Behind a device that is busy for long, does the host get through a whole step, optimizer included?"""
    busy = 500.0
    cycles = int(busy * cycles_per_ms())
    found: dict[str, float] = {}
    for name, shard in (("plain", lambda m: m), ("fullshard", ours_on(world)), ("FSDP2", theirs_on(world))):
        model = shard(sequence(Small, 4, world.device))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        x = torch.randn(4, 16, device=world.device)
        for repeat in range(4):
            world.sync()
            if repeat == 3:
                torch.cuda._sleep(cycles)
            start = time.perf_counter()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            found[name] = (time.perf_counter() - start) * 1e3
    text = ", ".join(f"{name} {ms:.0f} ms" for name, ms in found.items())
    world.report.check(found["fullshard"] < busy / 2, f"host ahead of a device that is busy for {busy:.0f} ms", text)


def pair(
    world: World, make: Callable[[], nn.Sequential], mp: tuple[Any, Any], network: Network | None = None, lanes: Any = None
) -> tuple[nn.Sequential, nn.Sequential]:
    """The same model sharded by fullshard and by FSDP2. Of a pretended world, both have the mirror's collectives."""
    if world.ranks == 1:
        return ours_on(world, mp)(make()), theirs_on(world, mp)(make())
    network = network or Network()
    comm = CommPolicy(collectives=lambda group: MirrorCollectives(world.ranks, network), lanes=lanes)
    ours, theirs = shard_ours(make(), world.mesh(), mp, comm_policy=comm), shard_theirs(make(), world.mesh(), mp)
    for module in (*theirs, theirs):
        module.set_custom_all_gather(TheirGather(world.ranks, network))
        module.set_custom_reduce_scatter(TheirReduce(world.ranks, network))
    return ours, theirs


def ours_on(world: World, mp: tuple[Any, Any] = (None, None)) -> Callable[[nn.Sequential], nn.Sequential]:
    return lambda model: shard_ours(model, world.mesh(), mp)


def theirs_on(world: World, mp: tuple[Any, Any] = (None, None)) -> Callable[[nn.Sequential], nn.Sequential]:
    return lambda model: shard_theirs(model, world.mesh(), mp)


# --- 4. memory --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Peaks:
    """Above the memory at rest, in U; reserved of allocated is a plain ratio."""

    forward: float
    backward: float
    reserved: float
    reserved_of_allocated: float


def peaks_of(world: World, model: nn.Module, x: Tensor, unit: int) -> Peaks | None:
    """None on the CPU, where the steps only run."""
    for _ in range(3):
        model(x).float().square().mean().backward()
        model.zero_grad()
    if not world.cuda:
        return None
    gc.collect()
    world.sync()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    rest = torch.cuda.memory_allocated()
    forward = backward = 0
    reserved, allocated = 0, 0
    for _ in range(4):
        loss = model(x).float().square().mean()
        forward = max(forward, torch.cuda.max_memory_allocated() - rest)
        loss.backward()
        del loss
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        backward = max(backward, allocated - rest)
        model.zero_grad()
        world.sync()
    return Peaks(forward / unit, backward / unit, (reserved - rest) / unit, reserved / allocated)


def free_all(world: World) -> None:
    gc.collect()
    world.sync()
    if world.cuda:
        torch.cuda.empty_cache()


def memory(world: World) -> None:
    """Six equal units, activations of a few kilobytes, then a decoder with real ones."""
    sizes = sizes_of(world)
    inf = CommPolicy(direct_min_bytes=math.inf)
    for label, mp in (("fp32", (None, None)), ("bf16, fp32 reduction", MIXED)):
        unit = 4 * sizes.unit**2 * (2 if mp[0] else 4)
        x = torch.randn(1, sizes.unit, device=world.device)
        found: dict[str, Peaks | None] = {}
        for name, shard in (
            ("fullshard", ours_on(world, mp)),
            ("all packed", lambda m, mp=mp: shard_ours(m, world.mesh(), mp, comm_policy=inf)),
            ("FSDP2", theirs_on(world, mp)),
        ):
            model = shard(sequence(lambda: matrices(sizes.unit), 6, world.device))
            found[name] = peaks_of(world, model, x, unit)
            del model
            free_all(world)
        judge_memory(world, f"units, {label}", found)
    memory_of_decoder(world, sizes)


def memory_of_decoder(world: World, sizes: Sizes) -> None:
    dim = sizes.dim // 2
    unit = 10 * dim**2 * 2
    x = torch.randn(2, min(sizes.tokens, 2048), dim, device=world.device)
    found: dict[str, Peaks | None] = {}
    for name, shard in (("fullshard", ours_on(world, MIXED)), ("FSDP2", theirs_on(world, MIXED))):
        model = shard(decoder(world, sizes, dim))
        found[name] = peaks_of(world, model, x, unit)
        del model
        free_all(world)
    judge_memory(world, "decoder, bf16", found)


def judge_memory(world: World, label: str, found: dict[str, Peaks | None]) -> None:
    ours, theirs = found["fullshard"], found["FSDP2"]
    if ours is None or theirs is None:
        world.report.say(SKIP, f"peaks, {label}", "CUDA only; the steps themselves ran")
        return
    rows = [
        [name, f"{p.forward:.2f}", f"{p.backward:.2f}", f"{p.reserved:.2f}", f"{p.reserved_of_allocated:.3f}"]
        for name, p in found.items()
        if p is not None
    ]
    head = [label, "forward (U)", "backward (U)", "reserved (U)", "reserved / peak allocated"]
    world.report.table(head, rows)
    peak = f"{ours.forward:.2f} and {ours.backward:.2f} U, FSDP2 {theirs.forward:.2f} and {theirs.backward:.2f} U"
    good = ours.forward <= theirs.forward * 1.01 + 0.05 and ours.backward <= theirs.backward * 1.01 + 0.05
    world.report.check(good, f"peak allocated, {label}", peak)
    kept = f"{ours.reserved:.2f} U, FSDP2 {theirs.reserved:.2f} U"
    world.report.check(ours.reserved <= theirs.reserved * 1.02 + 0.05, f"reserved, {label}", kept)


# --- 5. time ----------------------------------------------------------------------------------------------------------


def host_time(world: World) -> None:
    """Microseconds of the host per unit of eleven small parameters, forward and backward, above the plain module."""
    depth, repeats = 8, 2 if world.dry else 40
    rows = []
    for label, mp in (("fp32", (None, None)), ("bf16", MIXED)):
        plain = sequence(Small, depth, world.device).to(mp[0] or torch.float32)
        ours, theirs = pair(world, lambda: sequence(Small, depth, world.device), mp)
        x = torch.randn(2, 16, device=world.device)
        steps = {"fullshard": stepper(ours, x), "FSDP2": stepper(theirs, x), "plain": stepper(plain, x.to(mp[0] or x.dtype))}
        times = interleaved(world, steps, repeats, settle=False)
        base = median(times["plain"]) / depth * 1e6
        above = {name: above_plain(times, name, depth) for name in ("fullshard", "FSDP2")}
        part = above["fullshard"] / above["FSDP2"] if above["FSDP2"] > 0 else math.nan
        rows.append([label, f"{base:.0f}", *[f"{value:.0f}" for value in above.values()], f"{part:.2f}"])
        judge(world, f"host time per unit above plain, {label}, of FSDP2's", part, 0.6)
    world.report.table(["host (us per unit)", "plain", "fullshard above it", "FSDP2 above it", "ratio"], rows)


def above_plain(times: dict[str, list[float]], name: str, units: int) -> float:
    """The median of differences of neighbours in time, in microseconds per unit."""
    return median((one - plain) / units * 1e6 for one, plain in zip(times[name], times["plain"]))


def judge(world: World, name: str, part: float, limit: float) -> None:
    """A ratio and what it may be; times on the CPU's tiny sizes say nothing, and nor does noise (NaN)."""
    world.report.say(
        NOTE if world.dry or math.isnan(part) else PASS if part <= limit else FAIL, name, f"{part:.2f}, at most {limit:.2f}"
    )


def step_time(world: World) -> None:
    """Milliseconds of a decoder's forward and backward. On a pretended world, gathers are broadcasts on the device for both."""
    sizes, rows = sizes_of(world), []
    for dim in (sizes.dim // 4, sizes.dim // 2):
        x = torch.randn(2, min(sizes.tokens // 4, 1024), dim, device=world.device)
        ours, theirs = pair(world, partial(decoder, world, sizes, dim), MIXED)
        plain = decoder(world, sizes, dim).to(torch.bfloat16)
        steps = {"fullshard": stepper(ours, x), "FSDP2": stepper(theirs, x), "plain": stepper(plain, x.bfloat16())}
        times = interleaved(world, steps, sizes.repeats, settle=True)
        of_theirs, of_plain = ratio(times["fullshard"], times["FSDP2"]), ratio(times["fullshard"], times["plain"])
        rows.append([f"dim {dim}", *[f"{median(times[n]) * 1e3:.2f}" for n in steps], f"{of_theirs:.2f}", f"{of_plain:.2f}"])
        judge(world, f"step time, dim {dim}, of FSDP2's", of_theirs, 1.03)
        del ours, theirs, plain, steps
        free_all(world)
    world.report.table(["step (ms)", "fullshard", "FSDP2", "plain", "of FSDP2", "of plain"], rows)


def timing(world: World) -> None:
    for measure in (host_time, step_time):
        with world.report.guarded(measure.__name__):
            measure(world)


# --- the table that fullshard is held against ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """A decoder, and what it may cost: its time of the plain bf16 module's, its peak in GiB, what is reserved of that peak."""

    name: str
    depth: int
    dim: int
    hidden: int
    batch: int
    tokens: int
    of_plain: float
    peak: float | None = None
    reserved: float | None = None


SHAPES = (
    Shape("big", 8, 4096, 14336, 2, 2048, of_plain=1.04, peak=6.6, reserved=1.08),
    Shape("mid", 16, 2048, 5632, 4, 1024, of_plain=1.15),
    Shape("tiny", 48, 256, 1024, 1, 128, of_plain=1.6),
)


class DecoderBlock(nn.Module):
    """As in Llama: attention of four matrices, SwiGLU of three."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.heads = max(1, dim // 128)
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        h = self.norm1(x)
        q, k, v = (matrix(h).view(batch, length, self.heads, -1).transpose(1, 2) for matrix in (self.q, self.k, self.v))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, -1))
        h = self.norm2(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


class NoCollectives(MirrorCollectives):
    """Rank 0 of many that neither sends nor copies, so that the time of a step is that of the engine."""

    def gatherer(self, outs: Sequence[Tensor], shards: Sequence[Tensor]) -> Callable[[], StartedWork]:
        return StartedWork

    def reduce_scatter(self, outs: Sequence[Tensor], fulls: Sequence[Tensor], scale: float) -> StartedWork:
        return StartedWork()


class TheirNothing(TheirGather):
    """The same for both of FSDP2's setters."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> None: ...


def ours_unsent(world: World) -> Callable[[nn.Sequential], nn.Sequential]:
    comm = CommPolicy(collectives=lambda group: NoCollectives(world.ranks))
    return lambda model: shard_ours(model, world.mesh(), MIXED, comm_policy=comm)


def theirs_unsent(world: World) -> Callable[[nn.Sequential], nn.Sequential]:
    def shard(model: nn.Sequential) -> nn.Sequential:
        for module in (*shard_theirs(model, world.mesh(), MIXED), model):
            module.set_custom_all_gather(TheirNothing(world.ranks, Network()))
            module.set_custom_reduce_scatter(TheirNothing(world.ranks, Network()))
        return model

    return shard


def baseline(world: World) -> None:
    """Forward and backward, and whole steps with AdamW fused, of plain bf16, fullshard and FSDP2: with the copies of the fake
    group, which both pay for, and with collectives that do nothing.
    """
    rows: list[list[str]] = []
    for shape in SHAPES:
        if not world.cuda:
            shape = dataclasses.replace(shape, depth=2, dim=32, hidden=64, tokens=16)
        with world.report.guarded(f"table, {shape.name}"):
            rows += baseline_of(world, shape)
        free_all(world)
    head = [
        "shape",
        "",
        "fwd+bwd (ms)",
        "of plain",
        "host (ms)",
        "step with AdamW (ms)",
        "of plain",
        "peak (GiB)",
        "reserved of peak",
    ]
    world.report.table(head, rows)


def baseline_of(world: World, shape: Shape) -> list[list[str]]:
    make = partial(sequence, partial(DecoderBlock, shape.dim, shape.hidden), shape.depth, world.device)
    x = torch.randn(shape.batch, shape.tokens, shape.dim, device=world.device)
    shards: dict[str, Callable[[nn.Sequential], nn.Sequential]] = {
        "plain": lambda model: model.to(torch.bfloat16),
        "fullshard": ours_on(world, MIXED),
        "FSDP2": theirs_on(world, MIXED),
        "fullshard, nothing sent": ours_unsent(world),
        "FSDP2, nothing sent": theirs_unsent(world),
    }
    peaks: dict[str, tuple[float, float]] = {}
    for name, shard in shards.items():
        peaks[name] = whole_peak(world, shard(make()), x.bfloat16() if name == "plain" else x)
        free_all(world)
    models = {name: shard(make()) for name, shard in shards.items()}
    inputs = {name: x.bfloat16() if name == "plain" else x for name in models}
    steps = {name: stepper(model, inputs[name]) for name, model in models.items()}
    repeats = 2 if world.dry else 15
    device = interleaved(world, steps, repeats, settle=True)
    host = interleaved(world, steps, repeats, settle=False)
    optimizers = {name: torch.optim.AdamW(model.parameters(), fused=True) for name, model in models.items()}

    def whole(name: str) -> None:
        models[name](inputs[name]).float().square().mean().backward()
        optimizers[name].step()
        optimizers[name].zero_grad()

    steps_with = interleaved(world, {name: partial(whole, name) for name in models}, repeats, settle=True)
    rows = []
    for name in models:
        of_plain, with_of_plain = ratio(device[name], device["plain"]), ratio(steps_with[name], steps_with["plain"])
        peak, reserved = peaks[name]
        times = [f"{median(device[name]) * 1e3:.1f}", f"{of_plain:.2f}", f"{median(host[name]) * 1e3:.1f}"]
        times += [f"{median(steps_with[name]) * 1e3:.1f}", f"{with_of_plain:.2f}"]
        rows.append([shape.name, name, *times, f"{peak:.2f}", f"{reserved:.2f}"])
    for sent in ("", ", nothing sent"):
        ours, theirs = device[f"fullshard{sent}"], device[f"FSDP2{sent}"]
        judge(world, f"table, {shape.name}{sent}: time, of FSDP2's", ratio(ours, theirs), 1.03)
        aim(world, f"table, {shape.name}{sent}: time, of plain's", ratio(ours, device["plain"]), shape.of_plain)
    judge(world, f"table, {shape.name}: peak, of FSDP2's", peaks["fullshard"][0] / peaks["FSDP2"][0], 1.03)
    if shape.peak is not None and shape.reserved is not None:
        aim(world, f"table, {shape.name}: peak in GiB", peaks["fullshard"][0], shape.peak)
        aim(world, f"table, {shape.name}: reserved of peak", peaks["fullshard"][1], shape.reserved)
    return rows


def aim(world: World, name: str, found: float, goal: float) -> None:
    """A goal that was set before there were figures: it is said whether it is reached."""
    world.report.say(NOTE, name, f"{found:.2f}, the goal is {goal:.2f}")


# --- captured steps ---------------------------------------------------------------------------------------------------


CAPTURED: dict[str, dict[str, Any]] = {
    "default": {},
    "resharded": {"reshard_after_forward": True},
    "kept": {"reshard_after_forward": False},
    "ZERO1": {"states": fullshard.ZERO1},
    "ZERO2": {"states": fullshard.ZERO2},
}


def captured(world: World) -> None:
    """Replays are eager steps, bit for bit, while a watchdog that looks ten times a second follows them."""
    torch.use_deterministic_algorithms(True)
    for label, mp in (("fp32", (None, None)), ("bf16", MIXED)):
        for name, options in CAPTURED.items():
            with world.report.guarded(f"capture, {label}, {name}"):
                captures_and_replays(world, f"capture, {label}, {name}", mp, options)
        free_all(world)


def captures_and_replays(world: World, name: str, mp: tuple[Any, Any], options: dict[str, Any]) -> None:
    checks = CheckPolicy(patience=0.1)
    models = [
        shard_ours(sequence(partial(Small, 16), 4, world.device), world.mesh(), mp, check_policy=checks, **options)
        for _ in range(2)
    ]
    (eager, replayed), (theirs, own) = models, [capturable(model.parameters(), world.device) for model in models]
    inputs = torch.randn(8, 8, 16, device=world.device)
    for x in inputs[:2]:
        whole_step(eager, theirs, x)
        whole_step(replayed, own, x)
    static = inputs[0].clone()
    for _ in range(20):
        graph = fullshard.Graph()
        with graph.capture():
            loss = whole_step(replayed, own, static)
    equal = True
    for x in inputs[2:7]:
        static.copy_(x)
        graph.replay()
        equal = torch.equal(loss, whole_step(eager, theirs, x)) and equal
    equal = torch.equal(whole_step(replayed, own, inputs[7]), whole_step(eager, theirs, inputs[7])) and equal
    pairs = zip(eager.parameters(), replayed.parameters())
    shards = all(torch.equal(one.to_local(), other.to_local()) for one, other in pairs)
    world.report.check(equal and shards, name, "20 captures; losses and shards after 5 replays and an eager step")


def capturable(parameters: Any, device: torch.device) -> torch.optim.Optimizer:
    """AdamW that a graph may hold."""
    return torch.optim.AdamW(parameters, lr=torch.tensor(1e-3, device=device), capturable=True, foreach=True)


def whole_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    """A step whose gradients are zeroed in place."""
    loss = model(x).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return loss.detach()


def captured_times(world: World) -> None:
    """Milliseconds, on the device and of the host, of eager and captured steps of plain bf16, fullshard and FSDP2."""
    rows: list[list[str]] = []
    for shape in SHAPES:
        with world.report.guarded(f"capture, {shape.name}"):
            rows += captured_times_of(world, shape)
        free_all(world)
    world.report.table(["shape", "", "eager (ms)", "replay (ms)", "host (us)", "of plain", "pool of eager peak"], rows)


def captured_times_of(world: World, shape: Shape) -> list[list[str]]:
    make = partial(sequence, partial(DecoderBlock, shape.dim, shape.hidden), shape.depth, world.device)
    shards: dict[str, Callable[[nn.Sequential], nn.Module]] = {
        "plain": lambda model: model.to(torch.bfloat16),
        "fullshard": ours_on(world, MIXED),
        "FSDP2": theirs_on(world, MIXED),
    }
    x = torch.randn(shape.batch, shape.tokens, shape.dim, device=world.device)
    eager: dict[str, Callable[[], object]] = {}
    replays: dict[str, Callable[[], object]] = {}
    pools: dict[str, float] = {}
    for name, shard in shards.items():
        model, static = shard(make()), x.bfloat16() if name == "plain" else x
        eager[name] = partial(whole_step, model, capturable(model.parameters(), world.device), static)
        for _ in range(3):
            eager[name]()
        free_all(world)
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        eager[name]()
        peak = torch.accelerator.max_memory_allocated() - before
        free_all(world)
        before = torch.accelerator.memory_reserved()
        try:
            if name == "fullshard":
                graph: Any = fullshard.Graph()
                with graph.capture():
                    eager[name]()
            else:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    eager[name]()
        except Exception as error:
            world.report.say(FAIL if name == "fullshard" else NOTE, f"capture, {shape.name}, {name}", said(error))
            continue
        pools[name], replays[name] = (torch.accelerator.memory_reserved() - before) / peak, graph.replay
    repeats = 2 if world.dry else 15
    of_eager = interleaved(world, eager, repeats, settle=True)
    of_replays, host = (interleaved(world, replays, repeats, settle=settle) for settle in (True, False))
    rows = []
    for name in eager:
        row = [shape.name, name, f"{median(of_eager[name]) * 1e3:.2f}"]
        if name in replays:
            row += [f"{median(of_replays[name]) * 1e3:.2f}", f"{median(host[name]) * 1e6:.0f}"]
            row += [f"{ratio(of_replays[name], of_replays['plain']):.2f}" if "plain" in replays else "-", f"{pools[name]:.2f}"]
        rows.append(row + ["-"] * (7 - len(row)))
    for other, limit in {"plain": 1.10, "FSDP2": 1.03}.items():
        if other in replays and "fullshard" in replays and (other != "plain" or shape.name == "tiny"):
            judge(world, f"capture, {shape.name}: of {other}'s", ratio(of_replays["fullshard"], of_replays[other]), limit)
    return rows


# --- which kernels a step's time goes to ------------------------------------------------------------------------------


KINDS = {
    "collectives": "nccl",
    "matrix products": "gemm|cutlass|nvjet|xmma|cublas|mma_",
    "attention": "flash|attention|fmha|sdp",
    "optimizer": "multi_tensor|foreach|adam",
    "copies and casts": "copy|cat|memcpy|memset|fill|convert|transpose",
    "norms and element-wise": "",
}
"""Kinds of kernels, by a pattern of their names. The first that matches counts."""


def attribution(world: World) -> None:
    """Milliseconds on the device by kind of kernel, in forward and backward, of plain bf16, fullshard and FSDP2."""
    rows: list[list[str]] = []
    for shape in SHAPES:
        make = partial(sequence, partial(DecoderBlock, shape.dim, shape.hidden), shape.depth, world.device)
        x = torch.randn(shape.batch, shape.tokens, shape.dim, device=world.device)
        for name, shard in {
            "plain": lambda model: model.to(torch.bfloat16),
            "fullshard, nothing sent": ours_unsent(world),
            "FSDP2, nothing sent": theirs_unsent(world),
        }.items():
            found = milliseconds_by_kind(world, stepper(shard(make()), x.bfloat16() if name == "plain" else x))
            rows.append([shape.name, name, *[f"{found[kind]:.2f}" for kind in (*KINDS, "idle")]])
            free_all(world)
    world.report.table(["shape", "", *KINDS, "idle"], rows)


def milliseconds_by_kind(world: World, step: Callable[[], object], repeats: int = 5) -> dict[str, float]:
    """Per step, the time of each kind of kernel, whether or not others run beside it, and that in which none runs."""
    for _ in range(3):
        step()
    world.sync()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(repeats):
            step()
        world.sync()
    kernels = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    found = dict.fromkeys((*KINDS, "idle"), 0.0)
    busy_until = kernels[0][0] if kernels else 0.0
    for start, end, name in kernels:
        found[kind_of(name)] += end - start
        found["idle"] += max(0.0, start - busy_until)
        busy_until = max(busy_until, end)
    return {kind: microseconds / 1e3 / repeats for kind, microseconds in found.items()}


def kind_of(kernel: str) -> str:
    """Return the kind of a kernel, by its name."""
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, kernel.lower()))


# --- foresight ----------------------------------------------------------------------------------------------------


def foresight(world: World) -> None:
    """A step of a decoder as it is predicted on a laptop: memory, messages and time, beside what is measured here."""
    for shape, optimizer in ((SHAPES[0], "adamw-fused"), (SHAPES[1], "adamw-fused"), (SHAPES[0], "muon")):
        if not world.cuda:
            shape = dataclasses.replace(shape, depth=2, dim=32, hidden=64, tokens=16)
            optimizer = optimizer.removesuffix("-fused")
        label = f"foresight, {shape.name}" + ", Muon" * (optimizer == "muon")
        with world.report.guarded(label):
            foresight_of(world, shape, optimizer, label)
        free_all(world)


def muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    """As `explain(optimizer="muon")` divides the parameters."""
    choice = fullshard.matrices_of(model)
    return [torch.optim.Muon(choice.matrices), torch.optim.AdamW(choice.rest)]


def foresight_of(world: World, shape: Shape, kind: str, label: str) -> None:
    make = partial(sequence, partial(DecoderBlock, shape.dim, shape.hidden), shape.depth)
    x = torch.randn(shape.batch, shape.tokens, shape.dim, device=world.device)
    model = ours_on(world, MIXED)(make(world.device))
    optimizers = (
        muon_and_adamw(model) if kind == "muon" else [torch.optim.AdamW(model.parameters(), fused=kind.endswith("fused"))]
    )

    def step() -> None:
        model(x).float().square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    free_all(world)
    step()
    with fullshard.record(model, memory=True) as run:
        for _ in range(5):
            step()
    name = torch.cuda.get_device_name().lower() if world.cuda else "cpu"
    gpu = next((known for known in ("h200", "b200", "a100") if known in name), "h100-sxm") if world.cuda else "cpu"
    r = fullshard.explain(
        lambda: make(torch.device("meta")),
        x,
        world=world.mesh().size(),
        gpu="a100-80" if gpu == "a100" else gpu,
        mp_policy=MixedPrecisionPolicy(*MIXED),
        plan=ModuleWrapPolicy({DecoderBlock}),
        loss=lambda output: output.float().square().mean(),
        optimizer=kind,
    )
    assert run.peak is not None and run.reserved is not None
    world.report.check(list(run.messages) == list(r.messages), f"{label}: messages are those that were predicted")
    for what, found, predicted in (("tensors", run.peak, r.peak), ("reserved", run.reserved, r.reserved)):
        part, limit = predicted / found, 0.05 if what == "tensors" else 0.08
        good = abs(part - 1) <= limit or world.dry
        world.report.check(good, f"{label}: {what}, predicted of measured", f"{part:.3f}, within {limit:.0%}")
    world.report.say(NOTE, f"{label}: time, predicted of measured", f"{r.timeline.computing / run.step:.2f} (computing alone)")
    for line in str(r.against(run)).splitlines():
        world.report.say(NOTE, label, line)


def whole_peak(world: World, model: nn.Module, x: Tensor) -> tuple[float, float]:
    """(peak allocated in GiB, reserved of it) of forward and backward; NaN on the CPU, where the steps only run."""
    step = stepper(model, x)
    free_all(world)
    for repeat in range(4):
        if world.cuda and repeat == 1:
            torch.cuda.reset_peak_memory_stats()
        step()
        world.sync()
    if not world.cuda:
        return math.nan, math.nan
    peak = torch.cuda.max_memory_allocated()
    return peak / 2**30, torch.cuda.max_memory_reserved() / peak


def direct_or_packed(world: World) -> None:
    """A unit of eight parameters of one size, in messages of their own or in one: where the threshold of nccl belongs."""
    rows = []
    for nbytes in (2**16, 2**18, 2**20, 2**22, 2**24, 2**26) if world.cuda else (2**12,):
        steps: dict[str, Callable[[], object]] = {}
        for name, direct in (("direct", 0.0), ("packed", math.inf)):
            model = nn.Module()
            model.weights = nn.ParameterList([torch.zeros(64, nbytes // 256, device=world.device) for _ in range(8)])
            model.forward = lambda: None
            comm = CommPolicy(collectives=CoalescedCollectives if world.cuda else None, direct_min_bytes=direct)
            fully_shard(model, mesh=world.mesh(), comm_policy=comm)

            def gather(model: Any = model) -> None:
                model.unshard()
                model.reshard()

            steps[name] = gather
        times = interleaved(world, steps, 3 if world.dry else 30, settle=True)
        found = [f"{median(times[name]) * 1e6:.0f}" for name in steps]
        rows.append([f"{nbytes // 1024} KiB", *found, f"{ratio(times['direct'], times['packed']):.2f}"])
        del steps
        free_all(world)
    world.report.table(["bytes of a parameter", "direct (us)", "packed (us)", "direct of packed"], rows)


class LlamaMatrices(nn.Module):
    """The matrices of one layer of Llama 8B."""

    def __init__(self, dim: int = 4096, heads: int = 1024, hidden: int = 14336) -> None:
        super().__init__()
        shapes = [(dim, dim), (heads, dim), (heads, dim), (dim, dim), (hidden, dim), (hidden, dim), (dim, hidden)]
        self.weights = nn.ParameterList([torch.empty(shape) for shape in shapes])


def muon(world: World) -> None:
    """Muon's step of rank 0 of 64 over all matrices of Llama 8B, beside plain Newton-Schulz of those that this rank owns."""
    layer = LlamaMatrices if world.cuda else partial(LlamaMatrices, 64, 16, 128)
    model = sequence(layer, 32 if world.cuda else 2, torch.device("meta"))
    shard_ours(model, world.mesh(), (None, None)).to_empty(device=world.device)
    owned, matrices = [], list(model.named_parameters())
    plan = fullshard.plan_owners(matrices, world.ranks)
    for parameter, owner in zip(model.parameters(), plan.owners):
        nn.init.normal_(parameter.to_local(), std=0.02)
        parameter.grad = parameter.detach() * 0.01
        if owner == 0:
            owned.append(nn.Parameter(torch.randn(parameter.shape, device=world.device)))
            owned[-1].grad = torch.randn_like(owned[-1])
    # What arrives over a fake group is what was in that memory. Numbers of usual size take a usual time.
    del parameter
    noise = torch.randn(2**30 if world.cuda else 2**10, device=world.device)
    del noise
    sharded, plain = torch.optim.Muon(model.parameters()), torch.optim.Muon(owned)
    steps = {"fullshard": sharded.step, "Newton-Schulz alone": plain.step}
    times = interleaved(world, steps, 15 if world.cuda else 2, settle=True)
    host = interleaved(world, steps, 15 if world.cuda else 2, settle=False)
    rows = [[name, f"{median(times[name]) * 1e3:.1f}", f"{median(host[name]) * 1e3:.1f}"] for name in steps]
    world.report.table([f"Muon, 8B, rank 0 of {world.ranks}: {len(owned)} matrices", "ms", "host, ms"], rows)
    world.report.say(NOTE, "Muon, 8B: of Newton-Schulz alone", f"{ratio(times['fullshard'], times['Newton-Schulz alone']):.2f}")
    if world.cuda:
        milliseconds = median(times["fullshard"]) * 1e3
        world.report.check(milliseconds <= 25, "Muon, 8B: milliseconds beside messages", f"{milliseconds:.1f}, at most 25")
        del plain, owned
        free_all(world)
        torch.cuda.reset_peak_memory_stats()
        rest = torch.cuda.memory_allocated()
        sharded.step()
        world.sync()
        peak = (torch.cuda.max_memory_allocated() - rest) / MIB
        world.report.say(NOTE, "Muon, 8B: MiB above rest", f"{peak:.0f}, exchange by the plan {plan.peak_nbytes(0) / MIB:.0f}")


def muon_alone(world: World) -> None:
    """Muon's steps of one rank by fullshard, by DTensor under FSDP2, and of a plain model; the weights of all after them."""
    dim, depth = (2048, 8) if world.cuda else (32, 2)
    make = partial(sequence, partial(DecoderBlock, dim, 11 * dim // 4), depth, world.device)
    models = {"fullshard": ours_on(world)(make()), "FSDP2": theirs_on(world)(make()), "plain": make()}
    optimizers = {}
    for name, model in models.items():
        matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
        for parameter in matrices:
            parameter.grad = parameter.detach() * 0.01
        optimizers[name] = torch.optim.Muon(matrices)
    steps = {name: optimizer.step for name, optimizer in optimizers.items()}
    times = interleaved(world, steps, 10 if world.cuda else 2, settle=True)
    host = interleaved(world, steps, 10 if world.cuda else 2, settle=False)
    rows = [[name, f"{median(times[name]) * 1e3:.1f}", f"{median(host[name]) * 1e3:.1f}"] for name in steps]
    world.report.table(["Muon, one rank", "ms", "host, ms"], rows)
    plain = dict(models["plain"].named_parameters())
    differ = [name for name, p in models["fullshard"].named_parameters() if not torch.equal(p.to_local(), plain[name])]
    world.report.check(not differ, "Muon, one rank: bit for bit the plain model", f"{len(differ)} differ: {differ[:3]}")


# --- 6. memory of the process group, symmetric memory ----------------------------------------------------------------------


def special_memory(library: str, setter: str, arguments: tuple[Any, ...], world: World) -> None:
    """One setter on one rank of nccl: a step that agrees with the plain model, or the exact text of the error."""
    name = f"{library}: {setter}{arguments}, {world.job.name.rsplit(' ', 1)[1]}"
    # Symmetric memory is what the machine has; memory of the group falls back where it has none.
    status = FAIL if library == "fullshard" and setter != "set_symm_mem_for_comm" else NOTE
    torch.manual_seed(0)
    plain = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(3)]).to(world.device)
    shard = shard_ours if library == "fullshard" else shard_theirs
    model = shard(copy.deepcopy(plain), world.mesh(), (None, None))
    try:
        if not hasattr(model, setter):
            world.report.say(NOTE, name, f"torch {torch.__version__} has no such method")
            return
        for module in (*model, model):
            getattr(module, setter)(*arguments)
        worst = max(same_step(model, plain, torch.randn(8, 256, device=world.device)) for _ in range(3))
    except Exception as error:
        traceback.print_exc()
        world.report.say(status if not world.dry else NOTE, name, said(error))
        return
    world.report.say(PASS if worst <= 1e-4 else status, name, f"works, off by {worst:.1e}")


def same_step(model: nn.Module, plain: nn.Module, x: Tensor) -> float:
    """The largest difference of gradients after one step of both, on one rank."""
    for each in (model, plain):
        each.zero_grad()
        each(x).square().mean().backward()
    expected = dict(plain.named_parameters())
    return max(
        ((p.grad.to_local() - expected[name].grad).abs().max() / expected[name].grad.abs().max()).item()
        for name, p in model.named_parameters()
    )


# --- 7. torch.compile -------------------------------------------------------------------------------------------------


def usable_backend(world: World) -> str:
    """inductor if it can compile anything here."""
    if world.dry:
        return "aot_eager"
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.ones(8, device=world.device))
        return "inductor"
    except Exception as error:
        world.report.say(SKIP, "inductor", said(error))
        torch._dynamo.reset()
        return "aot_eager"


def compiled(world: World) -> None:
    """Blocks compiled before and after sharding, and the whole model, against the plain model."""
    backend = usable_backend(world)
    for how in ("blocks before sharding", "blocks after sharding", "the whole model"):
        for dtype in ("fp32", "bf16"):
            with world.report.guarded(f"torch.compile, {how}, {dtype}"):
                torch._dynamo.reset()
                found = compiled_trial(world, how, dtype, backend)
                limit = 10 * DTYPES[dtype][2] if dtype == "fp32" else 2 * DTYPES[dtype][2]
                world.report.check(found <= limit, f"torch.compile ({backend}), {how}, {dtype}", f"off by {found:.1e}")


def compiled_trial(world: World, how: str, dtype: str, backend: str) -> float:
    """As any other trial, with another model in it."""
    trial = Trial(world, Case("own", dtype, lane="napping"), 0)
    trial.sharded.random = None
    if how == "blocks before sharding":
        model = copy.deepcopy(trial.reference)
        for block in model.blocks:
            block.compile(backend=backend)
        trial.sharded = shard_stack(world, model, trial.case, 0)
        trial.sharded.random = None
        trial.optimizers[0] = trial.make(trial.sharded.parameters())
    elif how == "blocks after sharding":
        for block in trial.sharded.blocks:
            block.compile(backend=backend)
    else:
        trial.sharded.compile(backend=backend)
    return trial.run(3)


# --- 8. FSDP1's wrapper -----------------------------------------------------------------------------------------------


def beside_fsdp1(world: World) -> None:
    """The wrapper of `fullshard.compat` and torch's own, on equal models and batches. On the CPU, where torch's does not run,
    the plain model stands in for it.
    """
    from fullshard.compat import FSDP, MixedPrecision, ShardingStrategy
    from fullshard.wrap import ModuleWrapPolicy

    torch_fsdp1 = torch_fsdp.FullyShardedDataParallel
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        for dtype in ("fp32", "bf16"):
            param, reduce, tolerance = DTYPES[dtype]
            mixed = None if param is None else MixedPrecision(param_dtype=param, reduce_dtype=reduce)
            arguments: dict[str, Any] = {
                "sharding_strategy": ShardingStrategy[strategy],
                "auto_wrap_policy": ModuleWrapPolicy({Block}),
                "mixed_precision": mixed,
                "device_id": world.device,
                "use_orig_params": True,
            }
            with world.report.guarded(f"FSDP1, {strategy}, {dtype}"):
                models: list[nn.Module] = [FSDP(sequence(partial(Block, 64), 3, world.device), **arguments)]
                if world.cuda:
                    arguments["auto_wrap_policy"] = torch_fsdp.wrap.ModuleWrapPolicy({Block})
                    models.append(torch_fsdp1(sequence(partial(Block, 64), 3, world.device), **arguments))
                else:
                    models.append(sequence(partial(Block, 64), 3, world.device))
                found = side_by_side(world, models)
                world.report.check(found <= tolerance, f"FSDP1, {strategy}, {dtype}", f"off by {found:.1e}")


def side_by_side(world: World, models: Sequence[nn.Module], steps: int = 3) -> float:
    """The largest relative difference of losses and weights after some steps of SGD, which blows no rounding up."""
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    worst = 0.0
    for step in range(steps):
        x = torch.randn(4, 16, 64, generator=torch.Generator().manual_seed(step)).to(world.device)
        losses = []
        for model, optimizer in zip(models, optimizers):
            loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        worst = max(worst, abs(losses[0] - losses[1]) / abs(losses[1]))
    ours, theirs = (model.state_dict() for model in models)
    assert list(ours) == list(theirs), "names"
    for name, value in theirs.items():
        worst = max(worst, ((ours[name].float() - value.float()).abs().max() / value.float().abs().max()).item())
    return worst


# --- weights ----------------------------------------------------------------------------------------------------------


def weights_in_and_out(world: World) -> None:
    """Checkpoints from and to the device's memory while it is behind the host: every wait for a copy counts."""
    for label, dtype in (("as they are", None), ("cast", torch.bfloat16)):
        for way in ("at once", "in the background"):
            with world.report.guarded(f"weights, {label}, {way}"):
                wrong = round_trip(world, dtype, background=way != "at once")
                world.report.check(not wrong, f"weights, {label}, {way}", wrong or "load(save(x)), iter_full and EMA are x")


def round_trip(world: World, dtype: torch.dtype | None, *, background: bool) -> str:
    """What is wrong; "" if nothing. The buffer is a hundredth of the weights."""
    model = ours_on(world)(sequence(partial(Block, 256), 4, world.device))
    whole = {name: 2 * value.full_tensor() for name, value in model.state_dict().items()}
    wanted = {name: value if dtype is None else value.to(dtype).float() for name, value in whole.items()}
    with tempfile.TemporaryDirectory() as base, torch.no_grad():
        if world.cuda:
            torch.cuda._sleep(100_000_000)
        for parameter in model.parameters():
            parameter.mul_(2)
        ema = fullshard.EMA(model, 0.5)
        saved = fullshard.save_weights(model, Path(base) / "saved", dtype=dtype, buffer_bytes=100_000, background=background)
        for parameter in model.parameters():
            parameter.zero_()
        if background:
            saved.wait()  # type: ignore[union-attr]
        loaded = ours_on(world)(sequence(partial(Block, 256), 4, torch.device("meta")))
        if world.cuda:
            torch.cuda._sleep(100_000_000)
        fullshard.load_weights(loaded, Path(base) / "saved", strict=False, buffer_bytes=100_000)
        streamed = {
            name: tensor.float().clone() for name, tensor in fullshard.iter_full(loaded, dtype=dtype, bucket_bytes=300_000)
        }
        with ema.swapped():
            averages = {name: value.full_tensor().clone() for name, value in model.state_dict().items()}
    found = {name: value.full_tensor() for name, value in loaded.state_dict().items()}
    parts = {"load": (found, wanted), "iter_full": (streamed, wanted), "EMA": (averages, whole)}
    off = [
        f"{what} of {name}"
        for what, (mine, right) in parts.items()
        for name in right
        if not torch.equal(mine[name], right[name])
    ]
    return ", ".join(off[:4])


# --- jobs -------------------------------------------------------------------------------------------------------------


SPECIAL = (
    ("group memory", "set_allocate_memory_from_process_group_for_comm", (True,)),
    ("symmetric memory", "set_symm_mem_for_comm", ("NCCL",)),
)


def special_jobs() -> Iterator[Job]:
    """Each in a process of its own: what fails here may well take the process along."""
    for how in ("lazy", "device_id"):
        for what, setter, arguments in SPECIAL:
            for library in ("fullshard", "FSDP2") if how == "device_id" else ("fullshard",):
                run = partial(special_memory, library, setter, arguments)
                yield Job("special memory", f"{library}, {what}, {how}", run, limit=60)


def jobs() -> list[Job]:
    return [
        Job("parity", "one rank", partial(parity, cases_alone)),
        Job("parity", "one rank, nccl", partial(parity, cases_nccl)),
        Job("parity", "two ranks, staged", partial(parity, cases_staged), "gloo", 2, limit=150),
        Job("parity", "two ranks, staged, levels", partial(parity, cases_of_levels), "gloo", 2),
        Job("parity", "four ranks, staged", partial(parity, cases_of_four), "gloo", 4),
        Job("parity", "mirror of four", partial(parity, cases_mirror), "fake", pretend=4),
        Job("parity", "controls", controls, "fake", pretend=4, limit=60),
        Job("parity", "host writes after a forward", host_writes, limit=30, cpu="CUDA only"),
        Job("streams", "sanitizer", partial(parity, cases_sanitized), sanitized=True, limit=90),
        Job("streams", "a step without synchronisation", without_synchronisation, limit=60),
        Job("streams", "memory at rest", memory_at_rest, limit=60),
        Job("parity", "two ranks, gloo", partial(parity, cases_gloo), "gloo", 2, limit=60),
        *special_jobs(),
        Job("compile", "one rank, nccl", compiled),
        Job("fsdp1", "one rank, nccl", beside_fsdp1),
        Job("weights", "one rank, nccl", weights_in_and_out, limit=60),
        Job("overlap", "mirror of eight", overlap_mirror, "fake", pretend=8, limit=70),
        Job("overlap", "one rank, nccl", overlap_alone, limit=50, cpu="CUDA only"),
        Job("memory", "fake group of 64", memory, "fake", pretend=64, limit=60),
        Job("memory", "one rank, nccl", memory, limit=60),
        Job("table", "fake group of 8", baseline, "fake", pretend=8, limit=150),
        Job("capture", "one rank, nccl", captured, limit=60, cpu="CUDA only"),
        Job("table", "captured, one rank", captured_times, limit=60, cpu="CUDA only"),
        Job("table", "captured, fake group of 8", captured_times, "fake", pretend=8, limit=60, cpu="CUDA only"),
        Job("table", "kinds of kernels, fake group of 8", attribution, "fake", pretend=8, limit=60, cpu="CUDA only"),
        Job("table", "Muon, fake group of 64", muon, "fake", pretend=64, limit=60),
        Job("table", "Muon, one rank", muon_alone, limit=60),
        Job("table", "foresight, one rank", foresight, limit=90),
        Job("table", "foresight, fake group of 8", foresight, "fake", pretend=8, limit=90),
        Job("time", "direct or packed, nccl", direct_or_packed, limit=40),
        Job("time", "one rank, nccl", timing, limit=60),
        Job("time", "fake group of 8", timing, "fake", pretend=8, limit=60),
    ]


def join_group(job: Job, rank: int, store: str, dry: bool) -> None:
    """Become a rank of the job's world. On the CPU gloo stands in for nccl."""
    if job.backend == "fake":
        dist.init_process_group("fake", rank=0, world_size=job.pretend, store=FakeStore())
        return
    eager = {"device_id": torch.device("cuda", 0)} if job.name.endswith("device_id") and not dry else {}
    dist.init_process_group(
        "gloo" if dry else job.backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=job.ranks,
        timeout=timedelta(seconds=30),
        **eager,
    )


def work(options: argparse.Namespace) -> None:
    """One rank of one job. Ends without tearing groups down, since another rank may be stuck in one."""
    job, rank = jobs()[options.job], options.rank
    report = Report(Path(options.report))
    torch.set_num_threads(1)
    code = 0
    try:
        if not options.cpu_dry_run:
            torch.cuda.set_device(0)
        join_group(job, rank, options.store, options.cpu_dry_run)
        job.run(World(job, rank, options.cpu_dry_run, report if rank == 0 else Report(None)))
        if job.backend == "gloo" and job.ranks > 1:
            dist.barrier()
    except Exception as error:
        traceback.print_exc()
        report.say(FAIL, f"rank {rank}", said(error))
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


# --- the parent -------------------------------------------------------------------------------------------------------


@dataclass
class Result:
    """What came of a job: its checks (status, name, detail), its tables and its seconds."""

    job: Job
    checks: list[tuple[str, str, str]]
    tables: list[dict[str, Any]]
    seconds: float

    @property
    def status(self) -> str:
        found = [status for status, _, _ in self.checks]
        return FAIL if FAIL in found else PASS if PASS in found else NOTE if NOTE in found else SKIP


def environment_of(job: Job, options: argparse.Namespace) -> dict[str, str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}
    if job.sanitized and not options.cpu_dry_run:
        environment["TORCH_CUDA_SANITIZER"] = "1"
    if options.cpu_dry_run:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    else:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
        environment["CUDA_VISIBLE_DEVICES"] = visible[0] or "0"
    return environment


def launch(index: int, job: Job, options: argparse.Namespace, folder: Path, limit: float) -> Result:
    """Run all ranks of a job, for at most `limit` seconds, and read what they reported."""
    start = time.monotonic()
    processes, reports, logs = [], [], []
    store = folder / f"{index}.store"
    store.unlink(missing_ok=True)
    for rank in range(job.ranks):
        reports.append(folder / f"{index}.{rank}.jsonl")
        reports[-1].unlink(missing_ok=True)
        logs.append(folder / f"{index}.{rank}.log")
        command = [sys.executable, __file__, "--job", str(index), "--rank", str(rank)]
        command += ["--store", str(store), "--report", str(reports[-1])] + ["--cpu-dry-run"] * options.cpu_dry_run
        with logs[-1].open("w") as log:
            processes.append(subprocess.Popen(command, env=environment_of(job, options), stdout=log, stderr=subprocess.STDOUT))
    ended = attend(processes, start + limit)
    result = read(job, reports, time.monotonic() - start)
    for rank, code in enumerate(ended):
        if code != 0 and not any(status == FAIL for status, _, _ in result.checks):
            why = f"did not end within {limit:.0f} s" if code is None else f"ended with status {code}"
            last = " / ".join(logs[rank].read_text(errors="replace").strip().splitlines()[-3:])
            result.checks.append((FAIL, f"rank {rank}", f"{why}: {last}"[:600]))
    return result


def attend(processes: Sequence[subprocess.Popen[bytes]], deadline: float) -> list[int | None]:
    """Exit codes; None of those that had to be stopped. When one failed, the others have ten more seconds."""
    while None in (codes := [process.poll() for process in processes]) and time.monotonic() < deadline:
        if any(codes):
            deadline = min(deadline, time.monotonic() + 10)
        time.sleep(0.05)
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()
    return codes


def read(job: Job, reports: Sequence[Path], seconds: float) -> Result:
    entries = [json.loads(line) for path in reports if path.exists() for line in path.read_text().splitlines()]
    checks = [(entry["status"], entry["name"], entry["detail"]) for entry in entries if entry["kind"] == "check"]
    return Result(job, checks, [entry for entry in entries if entry["kind"] == "table"], seconds)


def driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.split()[0]
    except (OSError, IndexError, subprocess.TimeoutExpired):
        return "unknown"


def surroundings(dry: bool) -> list[tuple[str, str]]:
    found = [("torch", torch.__version__), ("CUDA of torch", str(torch.version.cuda)), ("Python", platform.python_version())]
    found.append(("cores", str(os.cpu_count())))
    if not dry:
        properties = torch.cuda.get_device_properties(0)
        free, total = torch.cuda.mem_get_info()
        found.append(
            ("device", f"{properties.name}, sm {properties.major}{properties.minor}, {properties.multi_processor_count} SMs")
        )
        found.append(("memory", f"{free // MIB} of {total // MIB} MiB free"))
        found.append(("driver", driver()))
        found.append(("nccl", ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "none"))
    return found


def draw(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown with straight columns."""
    cells = [[str(cell).replace("|", "/") for cell in row] for row in (head, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def show(result: Result, everything: bool) -> None:
    """The job's tables, then what is not in them."""
    for table in result.tables:
        print(draw(table["head"], table["rows"] if everything else brief(table["rows"])))
    shown = {row[0] for table in result.tables for row in table["rows"]}
    for status, name, detail in result.checks:
        if name not in shown or status == FAIL:
            print(f"{status}  {name}: {detail}")
    print(f"{result.status}  {result.job.section}, {result.job.name} ({result.seconds:.0f} s)\n", flush=True)


def brief(rows: Sequence[Sequence[str]], most: int = 12) -> list[Sequence[str]]:
    """The first rows of a long table, and all that failed."""
    if len(rows) <= most:
        return list(rows)
    kept = [row for i, row in enumerate(rows) if i < most - 2 or FAIL in row]
    return [*kept, [f"({len(rows) - len(kept)} more)", *[""] * (len(rows[0]) - 1)]]


def summary(results: Sequence[Result], seconds: float, dry: bool) -> str:
    """Everything in Markdown: the surroundings, one row per job, then every figure and every failure."""
    rows = []
    for result in results:
        counts = {status: sum(s == status for s, _, _ in result.checks) for status in (PASS, FAIL, SKIP, NOTE)}
        said = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        rows.append([result.job.section, result.job.name, result.status, said, f"{result.seconds:.0f}"])
    parts = ["# GPU check" + (" (dry run on the CPU)" if dry else ""), draw(["", ""], surroundings(dry))]
    parts.append(draw(["section", "job", "status", "checks", "s"], rows))
    figures = [
        [result.job.section, result.job.name, status, name, detail]
        for result in results
        for status, name, detail in result.checks
        if result.job.section != "parity" or status != PASS or result.job.name == "controls"
    ]
    parts.append(draw(["section", "job", "status", "what", "found"], figures))
    parts += [
        draw(table["head"], table["rows"]) for result in results for table in result.tables if result.job.section != "parity"
    ]
    parts.append(f"Took {seconds:.0f} s.")
    return "\n\n".join(parts) + "\n"


def batches(chosen: Sequence[tuple[int, Job]], together: int) -> Iterator[list[tuple[int, Job]]]:
    """Jobs that may run at the same time: up to `together` that measure nothing, or one that does."""
    batch: list[tuple[int, Job]] = []
    for index, job in chosen:
        if batch and (job.measures or batch[-1][1].measures or len(batch) == together):
            yield batch
            batch = []
        batch.append((index, job))
    if batch:
        yield batch


def run_all(options: argparse.Namespace) -> int:
    start = time.monotonic()
    folder = Path(options.out).resolve() / "gpu_check"  # a file:// address has no relative paths
    folder.mkdir(parents=True, exist_ok=True)
    print(draw(["environment", ""], surroundings(options.cpu_dry_run)) + "\n", flush=True)

    def run(numbered: tuple[int, Job]) -> Result:
        index, job = numbered
        left = options.limit - (time.monotonic() - start)
        if options.cpu_dry_run and job.cpu:
            return Result(job, [(SKIP, job.name, job.cpu)], [], 0.0)
        if left < 15:
            return Result(job, [(SKIP, job.name, "out of time: run again with --only or a larger --limit")], [], 0.0)
        return launch(index, job, options, folder, min(job.limit, left))

    results: list[Result] = []
    chosen = [
        (index, job)
        for index, job in enumerate(jobs())
        if (not options.only or job.section in options.only) and options.named in f"{job.section}, {job.name}"
    ]
    for batch in batches(chosen, 1 if options.cpu_dry_run else max(1, min(4, (os.cpu_count() or 1) // 2))):
        print(f"== {'; '.join(f'{job.section}: {job.name}' for _, job in batch)}", flush=True)
        with ThreadPoolExecutor(len(batch)) as pool:
            for result in pool.map(run, batch):
                results.append(result)
                show(result, options.all)
    text = summary(results, time.monotonic() - start, options.cpu_dry_run)
    (Path(options.out) / "gpu_check.md").write_text(text)
    print(text)
    return 1 if any(result.status == FAIL for result in results) else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="runs", help="folder for gpu_check.md and the logs of the processes")
    parser.add_argument("--only", nargs="+", choices=list(dict.fromkeys(job.section for job in jobs())))
    parser.add_argument("--named", default="", help="only jobs with this in their section and name, 'parity, one rank' say")
    parser.add_argument("--limit", type=float, default=560.0, help="seconds for everything")
    parser.add_argument("--all", action="store_true", help="print long tables in full")
    parser.add_argument("--cpu-dry-run", action="store_true", help="tiny sizes on the CPU, without what needs CUDA")
    for name in ("--job", "--rank"):
        parser.add_argument(name, type=int, default=-1, help=argparse.SUPPRESS)
    for name in ("--store", "--report"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.cpu_dry_run and not torch.cuda.is_available():
        print("gpu_check needs one CUDA GPU and a CUDA build of torch; --cpu-dry-run runs the script itself without.")
        sys.exit(2)
    if options.job >= 0:
        work(options)
    sys.exit(run_all(options))


if __name__ == "__main__":
    main()
