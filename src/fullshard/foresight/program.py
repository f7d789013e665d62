"""The work of one step in the order in which the host queues it: operators, collectives on lanes, and waits for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from fullshard.collectives.base import StartedWork
from fullshard.collectives.streams import HostLane, LaneWork
from fullshard.collectives.traffic import Message
from fullshard.foresight.trace import Op

ON_HOST = "on the host"
"""The name of an operator that the host computes, on an accelerator: the optimizer's step over offloaded shards."""

Mesh = tuple[int, int, int]
"""(replicas, ranks that parameters are cut over, ranks of tensor parallelism); those of the last follow each other."""

Phase = Literal["forward", "loss", "backward", "optimizer"]


@dataclass(slots=True, eq=False)
class Launch:
    """Work put on a lane: it begins behind all that computes now; or behind `after`, instead.

    lane: "gather", "reduce", "replicate", or "tensor" for what tensor parallelism sends.
    copied: bytes that kernels on the lane read and write.
    early: whether it begins behind the last wait for its lane, instead: what computes since then does not matter to it.
    """

    lane: str
    unit: str
    after: Launch | None = None
    messages: list[Message] = field(default_factory=list)
    copied: int = 0
    early: bool = False


@dataclass(frozen=True, slots=True)
class Await:
    """What computes next is behind this work."""

    launch: Launch


Instruction = Op | Launch | Await


@dataclass(frozen=True, slots=True)
class Place:
    """Where instructions from `index` on belong, and how many changes the ledger had then."""

    index: int
    unit: str
    phase: Phase
    changes: int


class Program:
    """Instructions, and messages by themselves, in the order in which collectives begin.

    places: from which instruction on which unit computes, in order.
    retained_gather: blocks of the last gather's message, as FSDP2 keeps it for the next unit's.
    """

    def __init__(self) -> None:
        self.instructions: list[Instruction] = []
        self.places: list[Place] = []
        self.messages: list[Message] = []
        self.retained_gather: list[int] = []
        self._begun: Launch | None = None

    def enter(self, unit: str, phase: Phase, changes: int) -> None:
        """From here on this unit computes."""
        self.places.append(Place(len(self.instructions), unit, phase, changes))

    def send(self, message: Message) -> None:
        """A message of the work that begins now."""
        self.messages.append(message)
        if self._begun is not None:
            self._begun.messages.append(message)

    def copy(self, nbytes: int) -> None:
        """Bytes that kernels read and write: on the lane whose work begins now, else where everything computes."""
        if self._begun is not None:
            self._begun.copied += nbytes
        elif nbytes:
            self.instructions.append(Op("copy", 0, nbytes, None))

    def begin(self, launch: Launch, start: Callable[[], StartedWork]) -> StartedWork:
        """Run what starts this work, and count its messages and copies with it."""
        outer, self._begun = self._begun, launch
        try:
            return start()
        finally:
            self._begun = outer


class RecordedWork:
    """Work on a `RecordedLane`."""

    __slots__ = ("_program", "_waited", "inner", "launch")

    def __init__(self, program: Program, launch: Launch, inner: LaneWork | None) -> None:
        self._program, self.launch, self.inner, self._waited = program, launch, inner, False

    def done(self) -> bool:
        """As `LaneWork.done`. On an accelerator nobody knows before it is waited for: the host runs ahead."""
        return self._waited if self.inner is None else self.inner.done()

    def wait(self) -> None:
        """As `LaneWork.wait`."""
        if not self._waited:
            self._waited = True
            self._program.instructions.append(Await(self.launch))
        if self.inner is not None:
            self.inner.wait()

    block = wait


class RecordedLane:
    """A lane whose work is written into a program.

    accelerator: whether it is a stream, on which all of a work is queued at once, as `StreamLane`; else as `HostLane`.
    """

    def __init__(self, program: Program, name: str, *, accelerator: bool, early: bool = False) -> None:
        self._early = early
        self._program, self._name, self._host = program, name, None if accelerator else HostLane()

    def run(
        self, unit: str, start: Callable[[], StartedWork], finish: Callable[[], None], after: RecordedWork | None = None
    ) -> RecordedWork:
        """As `Lane.run`, for a unit."""
        program = self._program
        launch = Launch(self._name, unit, None if after is None else after.launch, early=self._early)
        program.instructions.append(launch)
        begun = partial(program.begin, launch, start)
        if self._host is not None:
            return RecordedWork(program, launch, self._host.run(begun, finish, None if after is None else after.inner))

        def whole() -> StartedWork:
            pending = begun()
            if pending.then is not None:
                pending.then()
            finish()
            return StartedWork()

        program.begin(launch, whole)
        return RecordedWork(program, launch, None)


__all__ = ["ON_HOST", "Await", "Instruction", "Launch", "Mesh", "Phase", "Place", "Program", "RecordedLane", "RecordedWork"]
