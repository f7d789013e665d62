"""The one small collective that ends a synchronised backward: used parameters, kept gradients, and whether all ran the same."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from itertools import chain

import torch

from fullshard.collectives.base import StartedWork
from fullshard.collectives.streams import nothing
from fullshard.consistency.collective_log import DIGEST, CollectiveLog, GroupFingerprints, UnitName
from fullshard.errors import StateError
from fullshard.params.reduction import Reduction
from fullshard.runtime.communicator import Communicator, TrackedWork

_UNIT = 1024  # bytes: messages of models that differ a little still have one length

SLOTS = 128  # bytes for the units that a rank keeps gradients of: the slot of a unit is its ordinal modulo this

_NOTHING = bytes(SLOTS)


def message_length(parameters: int) -> int:
    """Bytes of a heartbeat that speaks of so many parameters.

    >>> message_length(10), message_length(2000)
    (1024, 3072)
    """
    return -(-(2 * DIGEST + SLOTS + parameters) // _UNIT) * _UNIT


class Page:
    """Memory of one heartbeat. To make it takes longer than to write on it, so it is used again once the heartbeat was read.

    On the CPU there is one piece of memory: bytes, and a tensor over them. On an accelerator the bytes go by way of pinned
    memory, and the answer arrives in such memory, so that neither copy holds the host up.
    """

    __slots__ = ("_away", "_pinned", "_written", "answer", "bytes", "message")

    def __init__(self, length: int, away: torch.device | None) -> None:
        self._away, self.bytes = away, bytearray(length)
        self._written = self._pinned = self.message = self.answer = torch.frombuffer(self.bytes, dtype=torch.uint8)
        if away is not None:
            self._pinned = torch.empty(length, dtype=torch.uint8, device="cpu", pin_memory=True)
            self.message = torch.empty(length, dtype=torch.uint8, device=away)
            self.answer = torch.empty(length, dtype=torch.uint8, device="cpu", pin_memory=True)

    def write(self, body: bytes) -> None:
        """Put this on it, and zeros behind."""
        self.bytes[:] = body.ljust(len(self.bytes), b"\0")
        if self._away is not None:
            self._pinned.copy_(self._written)

    def send(self) -> None:
        """On a lane: have the device hold it."""
        if self._away is not None:
            self.message.copy_(self._pinned, non_blocking=True)

    def receive(self) -> None:
        """On a lane: have the host hold the answer."""
        if self._away is not None:
            self.answer.copy_(self.message, non_blocking=True)

    def read(self, start: int, end: int) -> bytes:
        """Bytes of the answer, for which the host must have waited."""
        return bytes(self.bytes[start:end] if self._away is None else self.answer[start:end].tolist())


class Heartbeat:
    """Bytes, of which every rank gets the maximum over all ranks.

        0..7   hash of the log            where ranks differ in a byte, each has less than the maximum, so finds it changed here
        8..15  255 minus each of them     or more than the minimum, so finds it changed there
        16..   1 in the slot of each unit of which this rank keeps gradients that this backward should have reduced
        144..  1 for each trainable parameter that this rank used, in the order of the reductions; then zeros

    It is read where it costs nothing: at once on the CPU, on an accelerator when the device has long passed it, or at once by
    a rank that has to know whether others used a parameter that it did not.

    reductions: that it ends, until their gradients are handed out.
    """

    def __init__(
        self,
        log: CollectiveLog,
        reductions: Sequence[Reduction],
        away: torch.device | None,
        page: Page | None = None,
        left: Iterable[int] = (),
    ) -> None:
        """`away`: the accelerator it is sent from, if any. `page`: of one that was read. `left`: the slots that hold 1."""
        self.log, self.reductions = log, list(reductions)
        digest = log.hash
        self._head = digest.to_bytes(DIGEST, "little", signed=True) + (~digest).to_bytes(DIGEST, "little", signed=True)
        flags = bytes(chain.from_iterable([reduction.used for reduction in reductions]))
        self.all_used = 0 not in flags
        slots = _NOTHING
        if left:
            held = bytearray(SLOTS)
            for slot in left:
                held[slot] = 1
            slots = bytes(held)
        body = self._head + slots + flags
        length = message_length(len(flags))
        if page is None or len(page.bytes) != length:
            page = Page(length, away)
        page.write(body)
        self.page = page

    def start(self) -> StartedWork:
        """Send it over the shards."""
        self.page.send()
        return self.reductions[0].group.collectives.reduce.all_reduce_max(self.page.message)

    def start_over_replicas(self) -> StartedWork:
        """Send it over the replicas, behind that."""
        replicas = self.reductions[0].group.collectives.replicate
        return StartedWork() if replicas is None else replicas.all_reduce_max(self.page.message)

    def finish(self) -> None:
        """On the last lane: let the host have it."""
        self.page.receive()

    def release_reductions(self) -> None:
        """Their gradients are handed out: keep none of them in memory until the host looks at the answer."""
        self.reductions = []

    @property
    def undecided(self) -> bool:
        """Whether this rank has to know what others used."""
        return not self.all_used and any(reduction.undecided for reduction in self.reductions)

    def is_desynced(self) -> bool:
        """Whether the ranks' logs differ. The host must have waited for it."""
        return self.page.read(0, len(self._head)) != self._head

    def used_anywhere(self) -> list[list[bool]]:
        """Of each reduction, which of its parameters any rank used. The host must have waited for it."""
        flags = iter(self.page.read(2 * DIGEST + SLOTS, len(self.page.bytes)))
        return [[bool(next(flags)) for _ in reduction.used] for reduction in self.reductions]

    def kept_units(self) -> set[int]:
        """The slots of units of which any rank keeps gradients. The host must have waited for it."""
        slots = self.page.read(2 * DIGEST, 2 * DIGEST + SLOTS)
        return set() if slots == _NOTHING else {index for index, flag in enumerate(slots) if flag}


_NOBODY = UnitName("")

Sent = tuple[Heartbeat, TrackedWork]
"""A heartbeat on its way."""


class Heartbeats:
    """Sends heartbeats, and looks at them: on the CPU at once, on an accelerator when the device has long passed them."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._unread: deque[Sent] = deque()  # oldest first
        self._fingerprints: dict[CollectiveLog, GroupFingerprints] = {}  # of what no unit says, but this rank
        self._pages: list[Page] = []  # that nothing is on any more

    def send(
        self,
        reductions: Sequence[tuple[int, Reduction]],
        kept: Sequence[tuple[int, CollectiveLog]],
        again: Container[CollectiveLog] | None,
    ) -> list[Sent]:
        """One message per log. `reductions`: each with how many steps lie between two heartbeats (`CheckPolicy.every`).

        kept: slots of units of which this rank keeps gradients, and their logs. again: the logs that have another heartbeat in
        this backward, if that is so.
        """
        logs: dict[CollectiveLog, tuple[int, list[Reduction]]] = {}
        for every, reduction in reductions:
            logs.setdefault(reduction.group.fingerprints.log, (every, []))[1].append(reduction)
        return [
            self._send(log, mine, [slot for slot, other in kept if other is log])
            for log, (every, mine) in logs.items()
            if (log in again if again is not None else log.beats(every))
        ]

    def _send(self, log: CollectiveLog, reductions: list[Reduction], slots: list[int]) -> Sent:
        communicator = self._communicator
        fingerprints = self._fingerprints.get(log)
        if fingerprints is None:
            fingerprints = self._fingerprints[log] = GroupFingerprints(log, _NOBODY, "")
        page = self._page_for(sum([len(reduction.used) for reduction in reductions]))
        beat = Heartbeat(log, reductions, communicator.away, page, slots)
        over = reductions[0].group.collectives.replicate is not None
        finish = nothing if over else beat.finish
        work = communicator.send(communicator.reduce_lane, fingerprints, "heartbeat", beat.start, finish)
        if over:
            lane, start = communicator.replicate_lane, beat.start_over_replicas
            work = communicator.send(lane, fingerprints, "heartbeat", start, beat.finish, work.work, part=True)
        return beat, work

    def _page_for(self, parameters: int) -> Page | None:
        """Take a page of the length that so many parameters need, the one used last; None if there is none."""
        length = message_length(parameters)
        for at in range(len(self._pages) - 1, -1, -1):
            if len(self._pages[at].bytes) == length:
                return self._pages.pop(at)
        return None

    def read_now(self, sent: Sequence[Sent]) -> None:
        """Wait for these, and all before them. Raises StateError if the ranks did not run the same."""
        self.read(keep=0)
        for beat, work in sent:
            work.block()
            self._check(beat)

    def read_later(self, sent: Sequence[Sent]) -> None:
        """Wait for all before these. Raises StateError if the ranks did not run the same."""
        self._unread += sent
        if len(self._unread) > len(sent):
            self.read(keep=len(sent))

    def read(self, *, keep: int | None = None) -> None:
        """Look at what has arrived; or, if `keep` is given, at all but the last `keep`, for which it waits.

        The last `keep` are left unread even if they have arrived: their pages belong to the backward that sent them until it
        has handed out its gradients.
        """
        unread = self._unread
        while len(unread) > (keep or 0) and (keep is not None or unread[0][1].done()):
            beat, work = unread.popleft()
            work.block()
            self._check(beat)
            self._pages.append(beat.page)

    def handed_out(self, sent: Sequence[Sent]) -> None:
        """The gradients that these end are handed out."""
        unread = {id(beat) for beat, _ in self._unread}
        for beat, _ in sent:
            beat.release_reductions()
            if id(beat) not in unread:
                self._pages.append(beat.page)

    def clear(self) -> None:
        """Look at none that was sent, but let the compute lane come behind all of them, whose memory goes."""
        while self._unread:
            with suppress(Exception):
                self._unread.popleft()[1].wait()

    def _check(self, beat: Heartbeat) -> None:
        if beat.is_desynced():
            watchdog = self._communicator.watchdog
            text = "" if watchdog is None else watchdog.confront(beat.log)
            beat.log.close(text or "the ranks ran different units, or the same ones in different orders, in this step")
            raise StateError(beat.log.desync_error)


__all__ = ["SLOTS", "Heartbeat", "Heartbeats", "Page", "Sent", "message_length"]
