"""Notes for every operation and message which bytes it reads and writes on which timeline, and finds the races."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from random import Random
from typing import Any
from unittest import mock

import torch
from accesses import Access, Home, Memory, Pool, Race, spans
from timelines import SOURCE, Clock, Machine, Stream, Timeline, join, site, stack
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fullshard import _torch

COPIES = {"aten::copy_", "aten::_to_copy", "aten::_foreach_copy_"}
NO_DATA = {"aten::set_", "aten::resize_", "aten::detach_", "aten::requires_grad_", "aten::record_stream", "aten::as_strided_"}
SYNCHRONIZE = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::item"}
NEW = {"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided"}  # no values


expired = torch._C.StorageBase._expired  # of StorageWeakRef.cdata; its own method gets here through two more


def tensors_in(value: Any) -> list[Tensor]:
    """Of an argument or result of an operation."""
    if isinstance(value, Tensor):
        return [value]
    return [tensor for one in value for tensor in tensors_in(one)] if isinstance(value, (list, tuple)) else []


class Planted(RuntimeError):
    """An exception behind an operation that was queued already."""


class Detector:
    """A stand-in for a device, in a block: what runs in it is looked at.

    Attributes:
        races: found so far, each pair of places once.
        allocations: of device memory, in order, and frees.
        sequence: the messages and group allocations of this rank, which all ranks must have alike.
        trains: whether the program is ready to train.
        queued: how many operations lanes and messages were given since; behind number `raise_at` an exception is planted.
    """

    def __init__(self, seed: int = 0, *, drops: Any = None, raise_at: int | None = None) -> None:
        dice = Random(seed)
        self.machine = Machine(dice, dice.choice((0.0, 0.3, 0.7, 1.0)), drops or (lambda site, kind: False))
        self.races: dict[tuple[str, ...], Race] = {}
        self.sequence: list[tuple[object, ...]] = []
        self.trains, self.queued, self._raise_at = False, 0, raise_at
        self.allocations: list[tuple[int, int | None, str]] = []  # memory, bytes (None: freed) and stream
        self._groups: dict[str, int] = {}
        self._freed: list[tuple[str, int]] = []  # memory of groups, of which nothing was sent yet
        self._memories: dict[
            int, tuple[StorageWeakRef, Memory, int]
        ] = {}  # by storage; a slice of one begins so many bytes into it
        self._pools: dict[Timeline, Pool] = {}
        self._host_pool = Pool()
        self._paused = 0
        self._tolist = torch.Tensor.tolist
        self._resize = torch.UntypedStorage.resize_

    # --- what there is ---

    def memory_of(self, tensor: Tensor | torch.UntypedStorage) -> Memory:
        return self._find(tensor)[0]

    def _find(self, tensor: Tensor | torch.UntypedStorage) -> tuple[Memory, int]:
        """The memory of a tensor's storage, and where in it that storage begins."""
        storage = tensor if isinstance(tensor, torch.UntypedStorage) else tensor.untyped_storage()
        known = self._memories.get(storage._cdata)
        if known is not None and not expired(known[0].cdata):
            return known[1], known[2]
        self.reap()
        first, last = storage.data_ptr(), storage.data_ptr() + storage.size()
        for key, (_, memory, _) in list(self._memories.items()) if last > first else ():
            if (
                memory.storage == key and memory.address <= first and last <= memory.address + memory.nbytes and memory.nbytes
            ):  # a slice of a storage
                self._memories[storage._cdata] = StorageWeakRef(storage), memory, first - memory.address
                return memory, first - memory.address
        made = Memory("memory from before", Home.DEVICE, None)
        self._know(storage, made)
        return made, 0

    def is_known(self, tensor: Tensor) -> bool:
        known = self._memories.get(tensor.untyped_storage()._cdata)
        return known is not None and not expired(known[0].cdata)

    def _know(self, storage: torch.UntypedStorage, memory: Memory) -> None:
        self.reap()
        memory.storage, memory.address, memory.nbytes = storage._cdata, storage.data_ptr(), storage.size()
        self._memories[storage._cdata] = StorageWeakRef(storage), memory, 0

    def reap(self) -> None:
        """Memory of which no storage is left goes back to its pool."""
        for key in [key for key, known in self._memories.items() if expired(known[0].cdata)]:
            memory = self._memories.pop(key)[1]
            if memory.storage == key:
                self._free(memory)
        freed, self._freed = sorted(self._freed), []
        for group, nbytes in freed:
            self._log("free", group, nbytes)

    def labels(self) -> list[str]:
        """Of all memory that lives."""
        self.reap()
        return [memory.label for _, memory, _ in self._memories.values() if not memory.freed]

    def is_host(self, tensor: Tensor) -> bool:
        return self.is_known(tensor) and self.memory_of(tensor).home is not Home.DEVICE

    def mark(self, tensor: Tensor, home: Home) -> Tensor:
        """Say where a tensor that was made already is."""
        memory = self.memory_of(tensor)
        memory.home = home
        memory.allocate(self.pool_of(home))
        return tensor

    def pool_of(self, home: Home) -> Pool | None:
        if home is Home.DEVICE:
            return self._pools.setdefault(self.machine.current.timeline, Pool())
        return (
            self._host_pool if home is Home.HOST else None
        )  # pinned memory waits for the streams that copied from it or to it

    # --- what happens ---

    def new(self, tensor: Tensor, home: Home, label: str = "") -> None:
        self.reap()
        memory = Memory(label or label_of(sys._getframe(1)), home, None)
        self._allocate(memory, tensor.untyped_storage().size())
        self._know(tensor.untyped_storage(), memory)

    def _allocate(self, memory: Memory, nbytes: int) -> None:
        memory.allocate(self.pool_of(memory.home))
        if memory.home is Home.DEVICE:
            self.allocations.append((id(memory), nbytes, self.machine.current.timeline.name))

    def _free(self, memory: Memory) -> None:
        if memory.home is Home.DEVICE and memory.pool is not None and not memory.freed:
            self.allocations.append((id(memory), None, ""))
            if memory.group:
                self._freed.append((memory.group, memory.nbytes))
        memory.free()

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        if not self._paused and nbytes != storage.size():
            memory = self.memory_of(storage)
            if memory.label == "memory from before":
                memory.label = label_of(sys._getframe(1))
            if storage.size():
                self._free(memory)
            if nbytes:
                self.reap()
                self._allocate(memory, nbytes)
        self._resize(storage, nbytes)
        if not self._paused and nbytes:
            memory = self.memory_of(storage)
            memory.address, memory.nbytes = storage.data_ptr(), nbytes

    def touch(self, tensor: Tensor, timeline: Timeline, clock: Clock, writes: bool, op: str, where: Any) -> None:
        memory, base = self._find(tensor)
        if memory.freed:
            raise AssertionError(f"{op} on {timeline.name} uses memory of {memory.label} that was freed")
        for low, high in spans(tensor):
            access = Access(timeline, clock[timeline.number], clock, writes, base + low, base + high, op, where, memory.label)
            for race in memory.touch(access):
                self.races.setdefault(race.key, race)

    def message(self, kind: str, timeline: Timeline, reads: Sequence[Tensor], writes: Sequence[Tensor], group: str) -> None:
        """A collective on a timeline."""
        clock, where = self.machine.enqueue(timeline), stack()
        for tensor in reads:
            self.touch(tensor, timeline, clock, False, kind, where)
        for tensor in writes:
            self.touch(tensor, timeline, clock, True, kind, where)
        self.send(kind, group, sum(tensor.numel() * tensor.element_size() for tensor in writes))
        self.count()

    def send(self, kind: str, group: str, *what: object) -> None:
        """Something that all ranks of a group do together, behind what they freed until now, whenever that is noticed."""
        self.reap()
        self._log(kind, group, *what)

    def _log(self, kind: str, group: str, *what: object) -> None:
        self.sequence.append((kind, self._groups.setdefault(group, len(self._groups)), *what))  # groups are new in each program

    def count(self) -> None:
        self.queued += self.trains
        if self.queued == self._raise_at:
            raise Planted(f"behind operation {self.queued}")

    def operation(self, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        reads: list[Tensor] = []
        writes: list[Tensor] = []
        for index, argument in enumerate(func._schema.arguments):
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            (writes if argument.is_write else reads).extend(tensors_in(value))
        pinned = kwargs.pop("pin_memory", None) if "pin_memory" in kwargs else None
        fine = [*reads, *writes]
        is_view = any(argument.alias_info and not argument.is_write for argument in func._schema.arguments)
        for tensor in () if is_view or name in NO_DATA or name in NEW else fine:
            if self.is_known(tensor) and self.memory_of(tensor).freed and tensor.numel():
                raise AssertionError(f"{name} uses memory of {self.memory_of(tensor).label} that was freed")
        found = func(*args, **kwargs)
        if name in NO_DATA:
            return found
        olds = {tensor.untyped_storage()._cdata for tensor in fine}
        made = [out for out in tensors_in(found) if out.untyped_storage()._cdata not in olds]
        if not made and not writes and fine and isinstance(found, (Tensor, list, tuple)):
            return found  # views
        home = self._home_of(reads, writes, kwargs, pinned)
        for out in made:
            self.new(out, home)
        if name in NEW:
            return found
        self._note(name, reads, [*writes, *made], args, kwargs, home)
        return found

    def _home_of(self, reads: Sequence[Tensor], writes: Sequence[Tensor], kwargs: dict[str, Any], pinned: bool | None) -> Home:
        """Where an operation makes memory."""
        if pinned:
            return Home.PINNED
        given = [*reads, *writes]
        if kwargs.get("device") is not None and (not given or site()):  # an optimizer's state is where its parameter is
            return Home.DEVICE
        if given:
            return Home.HOST if all(map(self.is_host, given)) else Home.DEVICE
        return Home.HOST if pinned is not None else Home.DEVICE  # torch.empty(n, pin_memory=False) without a device

    def _note(
        self,
        name: str,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        home: Home,
    ) -> None:
        machine, where = self.machine, stack()
        on_host = all(map(self.is_host, [*reads, *writes]))
        if on_host:
            timeline, clock = machine.host, machine.host.advance()
        else:
            timeline = machine.current.timeline
            clock = machine.enqueue(timeline)
        for tensors, writing in ((reads, False), (writes, True)):
            for tensor in tensors:
                staged = not on_host and not writing and self.is_host(tensor) and self.memory_of(tensor).home is Home.HOST
                if staged or (not on_host and self.is_host(tensor) and name not in COPIES):  # read as it is queued
                    self.touch(tensor, machine.host, machine.host.advance(), writing, name, where)
                else:
                    self.touch(tensor, timeline, clock, writing, name, where)
        if not on_host and timeline is not machine.main.timeline:
            self.count()
        crosses = not on_host and any(map(self.is_host, [*reads, *writes]))
        blocking = name in COPIES and not (kwargs.get("non_blocking") or (len(args) > 2 and args[2] is True))
        if (crosses and blocking) or (name in SYNCHRONIZE and not on_host):
            join(machine.host.clock, timeline.clock)

    def host_reads(self, tensor: Tensor) -> Any:
        """`tolist()`: Python reads the values of a tensor, which of one on the device waits for its stream."""
        machine = self.machine
        if type(tensor) is not Tensor or self._paused:
            return self._tolist(tensor)
        if not self.is_host(tensor):
            join(machine.host.clock, machine.current.timeline.clock)
        self.touch(tensor, machine.host, machine.host.advance(), False, "tolist", stack())
        return self._tolist(tensor)

    # --- the block ---

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What runs in this block is part of something that is noted already."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    @contextmanager
    def watching(self) -> Iterator[Detector]:
        module = self.machine.module
        frombuffer = torch.frombuffer
        with ExitStack() as entered:
            for target, name, value in (
                (torch, "Stream", module.Stream),
                (torch.accelerator, "current_stream", module.current_stream),
                (torch.accelerator, "synchronize", module.synchronize),
                (torch.UntypedStorage, "resize_", lambda storage, nbytes: self.resize(storage, nbytes)),
                (torch, "frombuffer", lambda *args, **kwargs: self.mark(frombuffer(*args, **kwargs), Home.HOST)),
                (torch.Tensor, "tolist", lambda tensor: self.host_reads(tensor)),
                (torch.Tensor, "pin_memory", lambda tensor, *_: self.mark(tensor.clone(), Home.PINNED)),
            ):
                entered.enter_context(mock.patch.object(target, name, value))
            entered.enter_context(Operations(self))
            yield self


class Operations(TorchDispatchMode):
    def __init__(self, detector: Detector) -> None:
        super().__init__()
        self._detector = detector

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        without_data = any(issubclass(kind, FakeTensor) for kind in types) or any(tensor.is_meta for tensor in tensors_in(args))
        if not without_data and any(kind not in (Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # a subclass: its own operations come here
        if self._detector._paused or without_data:
            return func(*args, **kwargs)
        return self._detector.operation(func, func._schema.name, args, kwargs)


TAG = "races"  # in the metadata of a node


class NodeRun:
    """How a node of a graph runs. It does not know the node, which holds it."""

    def __init__(self, streams: NodeStreams, stream: Stream) -> None:
        self._streams, self.stream = streams, stream
        self.below: list[NodeRun] = []
        self.clocks: list[Clock] = []  # of what it waits for

    def begin(self, *_: Any) -> None:
        self._streams.begin(self)

    def end(self, *_: Any) -> None:
        self._streams.end(self)


class NodeStreams(TorchFunctionMode):
    """What autograd's engine does with streams: a node runs on the stream of its forward, behind the nodes that it gets gradients of;
    when all ran, the caller's stream is behind those that end a graph, and final callbacks run on that.
    """

    def __init__(self, detector: Detector) -> None:
        super().__init__()
        self._machine = detector.machine
        self._before: list[Stream] = []
        self._ran: Clock = {}
        self._entered = ExitStack()

    def __enter__(self) -> Any:
        graph: Any = torch.autograd.graph
        engine = graph._engine_run_backward
        self._entered.enter_context(mock.patch.object(torch.autograd, "_engine_run_backward", partial(self._run, engine)))
        self._entered.enter_context(mock.patch.object(graph, "_engine_run_backward", partial(self._run, engine)))
        self._entered.enter_context(mock.patch.object(_torch, "on_backward_end", partial(self._at_end, _torch.on_backward_end)))
        return super().__enter__()

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)
        self._entered.close()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if torch.is_grad_enabled():
            for out in tensors_in(found):
                if out.requires_grad and out.grad_fn is not None:
                    self._tag(out.grad_fn)
        return found

    def _tag(self, node: Any) -> NodeRun:
        """Have a node, and those below it that are new, run on the current stream."""
        known: NodeRun | None = node.metadata.get(TAG)
        if known is not None:
            return known
        run = node.metadata[TAG] = NodeRun(self, self._machine.current)
        node.register_prehook(run.begin)
        node.register_hook(run.end)
        run.below = [self._tag(below) for below, _ in node.next_functions if below is not None]
        return run

    def begin(self, run: NodeRun) -> None:
        """A node begins."""
        self._before.append(self._machine.current)
        self._machine.current = run.stream
        for clock in run.clocks:
            join(run.stream.timeline.clock, clock)
        run.clocks.clear()

    def end(self, run: NodeRun) -> None:
        """It has ended."""
        clock = dict(self._machine.current.timeline.clock)
        if not run.below:
            join(self._ran, clock)
        self._machine.current = self._before.pop()
        for below in run.below:
            below.clocks.append(clock)
            if len(below.clocks) > 1:  # the engine adds gradients up on the stream of the node that gets them
                self._machine.current = below.stream
                for other in below.clocks:
                    join(below.stream.timeline.clock, other)

    def _run(self, engine: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        caller, ran, before = self._machine.current, self._ran, self._before
        self._ran, self._before = {}, []
        for out in outputs:
            if isinstance(out, Tensor) and out.grad_fn is not None:
                self._tag(out.grad_fn).clocks.append(dict(caller.timeline.clock))
        try:
            return engine(outputs, *args, **kwargs)
        finally:
            self._machine.current = caller
            join(caller.timeline.clock, self._ran)
            self._ran, self._before = ran, before

    def _at_end(self, queue: Any, callback: Any) -> None:
        machine, caller = self._machine, self._before[0] if self._before else self._machine.current
        weak = weakref.ref(self)

        def ended() -> None:
            streams = weak()
            assert streams is not None
            join(caller.timeline.clock, streams._ran)
            machine.current = caller
            callback()

        queue(ended)


def label_of(frame: Any) -> str:
    """What an allocation is for, as far as the frames of fullshard tell: the unit, and the line."""
    unit, where = "", ""
    while frame is not None:
        if frame.f_code.co_filename.startswith(SOURCE):
            where = (
                where
                or f"{frame.f_code.co_filename[len(SOURCE) + 1 :]}:{frame.f_lineno} {frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name}"
            )
            unit = unit or unit_of_frame(frame)
        frame = frame.f_back
    if not where:
        return "the program"
    return f"{where}, unit '{unit}'" if unit else where


def unit_of_frame(frame: Any) -> str:
    for name in ("unit", "group", "self"):
        thing = frame.f_locals.get(name)
        if name == "unit" and hasattr(thing, "unit_name"):
            return str(thing.unit_name.name)
        parameters = getattr(getattr(thing, "group", thing), "parameters", None)
        if isinstance(parameters, list) and parameters and hasattr(parameters[0], "unit_name"):
            return f"{parameters[0].unit_name.name}"
    return ""
