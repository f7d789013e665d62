"""A process group whose messages are noted by the detector, with nccl's streams: its own if asked for, else the caller's.

This process is rank 0, and every other rank holds what it holds: gathers repeat its shard, sums are as many times its part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from accesses import Home
from detector import Detector
from timelines import Timeline
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from fullshard import _torch
from fullshard.core import communicator
from fullshard.core.param_group import ParamGroup
from fullshard.core.reduction import Reduction
from fullshard.core.unit import Unit

BACKEND = "races"

ASYNCHRONOUS = False  # whether collectives run on the group's own stream, whatever they were asked for

DETECTOR: list[Detector] = []  # the one that is at work


class Work:
    """Of a message on the group's own stream."""

    def __init__(self, detector: Detector, timeline: Timeline) -> None:
        self._machine, self._clock = detector.machine, dict(timeline.clock)

    def wait(self, timeout: object = None) -> bool:
        self._machine.order(self._machine.current.timeline, self._clock, "work.wait")
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        raise NotImplementedError


class Group(dist.ProcessGroup):
    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._own: dict[int, Timeline] = {}  # by machine

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def group_name(self) -> str:
        return str(dist.distributed_c10d._world.pg_names[self])

    @property
    def pg_name(self) -> str:
        return self.group_name

    def _send(
        self, kind: str, outs: Sequence[Tensor], parts: Sequence[Tensor], opts: Any, reads: Sequence[Tensor]
    ) -> Work | None:
        if DETECTOR:
            detector = DETECTOR[-1]
            machine = detector.machine
            asynchronous = ASYNCHRONOUS or opts is None or opts.asyncOp
            timeline = machine.current.timeline
            if asynchronous:
                own = self._own.get(id(machine))
                if own is None:
                    own = self._own[id(machine)] = machine.timeline(f"nccl {self.group_name}")
                clock = machine.enqueue(own)
                for number, tick in timeline.clock.items():
                    clock[number] = max(clock.get(number, 0), tick)
                own.clock = dict(clock)
                timeline = own
            detector.message(kind, timeline, reads, outs, self.group_name)
            with detector.paused():
                self._values(kind, outs, parts)
            return Work(detector, timeline) if asynchronous else None
        self._values(kind, outs, parts)
        return Done()

    def _values(self, kind: str, outs: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(outs)):  # as a backend writes
            self._write(kind, outs, parts)

    def _write(self, kind: str, outs: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
        for out, part in zip(outs, parts):
            if kind == "all_gather":
                mine = part.clone()  # it may lie in `out`
                out.view(self.size(), -1).copy_(mine.view(1, -1).expand(self.size(), -1))
            elif kind == "reduce_scatter":
                torch.mul(part.view(self.size(), -1)[self.rank()].view_as(out), self.size(), out=out)
            elif kind == "sum":
                out.mul_(self.size())
            elif kind == "all_to_all":  # whatever the others send: their parts differ in size
                other = part.flatten() if part.numel() else out.new_zeros(1)
                out.copy_(other[: out.numel()].repeat(-(-out.numel() // other.numel()))[: out.numel()])

    def all_gather_single(self, out: Tensor, part: Tensor, opts: Any = None) -> Work | None:
        return self._send("all_gather", [out], [part], opts, [part])

    def all_gather_single_coalesced(self, outs: Sequence[Tensor], parts: Sequence[Tensor], opts: Any = None) -> Work | None:
        return self._send("all_gather", outs, parts, opts, parts)

    def reduce_scatter_single(self, out: Tensor, full: Tensor, opts: Any = None) -> Work | None:
        return self._send("reduce_scatter", [out], [full], opts, [full])

    def reduce_scatter_single_coalesced(self, outs: Sequence[Tensor], fulls: Sequence[Tensor], opts: Any = None) -> Work | None:
        return self._send("reduce_scatter", outs, fulls, opts, fulls)

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Work | None:
        kind = "maximum" if opts is not None and opts.reduceOp == dist.ReduceOp.MAX else "sum"
        return self._send(kind, tensors, tensors, opts, tensors)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> Work | None:
        return self._send("broadcast", tensors, tensors, opts, tensors)

    def all_to_all_single(self, out: Tensor, part: Tensor, outs: Any, parts: Any, opts: Any = None) -> Work | None:
        return self._send("all_to_all", [out], [part], opts, [part])

    def barrier(self, opts: Any = None) -> Done:
        return Done()

    _allgather_base, allgather_into_tensor_coalesced = all_gather_single, all_gather_single_coalesced
    _reduce_scatter_base, reduce_scatter_tensor_coalesced = reduce_scatter_single, reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


class Done:
    def wait(self, timeout: object = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _make(options: Any, more: Any) -> Group:
    return Group(options.group_rank, options.group_size)


@contextmanager
def world(ranks: int = 4) -> Iterator[None]:
    """A default process group of this backend, of which this process is rank 0."""
    if BACKEND.upper() not in dir(dist.Backend):
        dist.Backend.register_backend(BACKEND, _make, extended_api=True, devices=["cpu"])
    dist.init_process_group(BACKEND, rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        mesh_of.cache_clear()
        dist.destroy_process_group()


@cache
def mesh_of(replicas: int) -> DeviceMesh:
    """The mesh of all ranks, which programs share: one axis of shards, or replicas and shards."""
    ranks = dist.get_world_size()
    if replicas == 1:
        return init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",))
    return init_device_mesh("cpu", (replicas, ranks // replicas), mesh_dim_names=("replicate", "shard"))


@contextmanager
def host_memory(detector: Detector, *, pinned: bool) -> Iterator[None]:
    """A block in which the shards of CPUOffloadPolicy are in the host's memory, which is the same kind of tensor here."""
    copy_shards, storage_of, reduction = ParamGroup.copy_shards, Unit._storage, Reduction.__init__

    def copying(group: Any, values: Any, unwritten: Any) -> tuple[Tensor, list[Tensor]]:
        flat, shards = copy_shards(group, values, unwritten)
        if group.storage.host and flat.numel():
            detector.mark(flat, Home.PINNED if pinned else Home.HOST)
        return flat, shards

    def reducing(self: Any, *args: Any, **options: Any) -> None:
        reduction(self, *args, **options)
        if self._host is not None:
            detector.mark(self._host, Home.PINNED if pinned else Home.HOST)

    def allocating(group: Any, device: Any) -> Any:
        def allocate(size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
            detector.send("allocation", group.group_name, tuple(size), dtype)
            made = torch.empty(size, dtype=dtype, device=device)
            detector.memory_of(made).group = group.group_name
            return made

        return allocate

    with ExitStack() as entered:
        for target, name, value in (
            (ParamGroup, "copy_shards", copying),
            (Unit, "_storage", lambda unit, packed: replace(storage_of(unit, packed), pinned=pinned)),
            (Reduction, "__init__", reducing),
            (_torch, "process_group_memory", allocating),
            (communicator, "watchdog_of", lambda backend: None),
        ):
            entered.enter_context(mock.patch.object(target, name, value))
        yield


@contextmanager
def watching(detector: Detector) -> Iterator[Detector]:
    """A block in which messages go to this detector."""
    DETECTOR.append(detector)
    try:
        with detector.watching():
            yield detector
    finally:
        DETECTOR.pop()
