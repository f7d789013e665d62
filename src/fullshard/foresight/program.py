"""Program of one step, in the order in which the host queues it: operators, collectives on streams, and waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeVar

from fullshard.core import HostStream, Message, StartedWork, Work
from fullshard.foresight.ledger import Ledger
from fullshard.foresight.trace import Allocated, Event, Freed, Op

ON_HOST = "on the host"
"""Name of the operator that runs on the CPU of an accelerator's host: the optimizer's step over offloaded shards."""

Mesh = tuple[int, int, int]
"""Mesh sizes: (replicas, shard ranks, tensor-parallel ranks). Tensor-parallel ranks are adjacent."""

Phase = Literal["forward", "loss", "backward", "optimizer"]


T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Launch:
    """Work queued on a stream. It starts after the operators queued so far, unless `after` or `early` is set."""

    stream: str  # "gather", "reduce", "replicate", or "tensor" for collectives of tensor parallelism
    unit: str  # qualified name, "" for work of no unit
    after: Launch | None = None  # work on another stream to start after, instead of the operators queued so far
    messages: list[Message] = field(default_factory=list)
    copied: int = 0  # bytes that kernels on the stream read and write
    # True to start after the last `Await` of work on this stream, regardless of the operators queued since then.
    early: bool = False


@dataclass(frozen=True, slots=True)
class Await:
    """Wait of the compute stream for work."""

    launch: Launch


@dataclass(frozen=True, slots=True)
class Place:
    """Unit and phase of the instructions from `index` on."""

    index: int
    unit: str  # qualified name, "" outside of units
    phase: Phase
    changes: int  # number of changes of the ledger before the first of these instructions


class Program:
    """Recorded instructions and collectives of one step."""

    def __init__(self) -> None:
        self.instructions: list[Op | Launch | Await] = []  # in the order of the host
        self.places: list[Place] = []  # units and phases of the instructions, in order
        self.messages: list[Message] = []  # in the order of their starts
        # Only for FSDP2, which keeps the last all-gather output until the next unit's all-gather completes.
        self.retained_blocks: list[int] = []
        self._current: Launch | None = None

    def clear(self) -> None:
        """Begin a new step."""
        for recorded in (self.instructions, self.places, self.messages):
            recorded.clear()

    def enter(self, unit: str, phase: Phase, changes: int) -> None:
        """Start a new place: the next instructions belong to this unit and phase."""
        self.places.append(Place(len(self.instructions), unit, phase, changes))

    def send(self, message: Message) -> StartedWork:
        """Record a collective of the work that is being started, and return it as complete."""
        self.messages.append(message)
        if self._current is not None:
            self._current.messages.append(message)
        return StartedWork()

    def copy(self, nbytes: int) -> None:
        """Record a copy: on the stream of the work that is being started, else on the compute stream."""
        if self._current is not None:
            self._current.copied += nbytes
        elif nbytes:
            self.instructions.append(Op("copy", 0, nbytes, None))

    def begin(self, launch: Launch, start: Callable[[], T]) -> T:
        """Call `start`, and attribute its collectives and copies to `launch`."""
        outer, self._current = self._current, launch
        try:
            return start()
        finally:
            self._current = outer


def replay(events: Sequence[Event], ledger: Ledger | None, program: Program | None, *, on_host: bool = False) -> None:
    """Record the memory of an optimizer's events in a ledger, and their operators in a program, unless these are None.

    `on_host`: True if the CPU runs them on host memory: one operator that reads and writes all bytes, and no memory.
    """
    ops = [event for event in events if isinstance(event, Op)]
    if on_host:
        ops = [Op(ON_HOST, 0, sum(op.nbytes for op in ops), None)]
    if program is not None:
        program.instructions += ops
    if on_host or ledger is None:
        return
    blocks: dict[int, int] = {}
    for event in events:
        if isinstance(event, Allocated):
            blocks[event.storage] = ledger.allocate(event.nbytes, "temporaries", "")
        elif isinstance(event, Freed):
            ledger.free(blocks.pop(event.storage))
    ledger.free_all([*blocks.values()])


class RecordedWork:
    """Work on a `RecordedStream`."""

    def __init__(self, program: Program, launch: Launch, inner: Work, *, polls: bool) -> None:
        self._program, self.launch, self.inner, self._polls, self._waited = program, launch, inner, polls, False

    def done(self) -> bool:
        """Return True if the work is complete. On an accelerator, only after `wait`: the host runs ahead of the device."""
        return self._waited or (self._polls and self.inner.done())

    def wait(self) -> None:
        """Record a wait of the compute stream, once."""
        if not self._waited:
            self._waited = True
            self._program.instructions.append(Await(self.launch))
        self.inner.wait()

    block = wait


class RecordedStream:
    """Stream that records its work in a program.

    With `accelerator`, all work is queued at once, as on `DeviceStream`. Else `finish` runs at the wait, as on `HostStream`.
    """

    def __init__(self, program: Program, name: str, *, accelerator: bool, early: bool = False) -> None:
        self._program, self._name, self._accelerator, self._early = program, name, accelerator, early

    def run(
        self,
        unit: str,
        start: Callable[[], StartedWork],
        finish: Callable[[], None] = lambda: None,
        after: RecordedWork | None = None,
    ) -> RecordedWork:
        """Record a launch for a unit, and run `start` and `finish` as `Lane.run` does."""
        program = self._program
        launch = Launch(self._name, unit, None if after is None else after.launch, early=self._early)
        program.instructions.append(launch)
        before = None if after is None else after.inner
        work = HostStream().run(partial(program.begin, launch, start), finish, before)
        if self._accelerator:
            program.begin(launch, work.wait)  # attributes the copies of `finish` to the launch, too
        return RecordedWork(program, launch, work, polls=not self._accelerator)
