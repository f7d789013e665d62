"""The heartbeat: a small all-reduce at the end of a step. It shows which parameters ranks used, and whether they diverged."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import chain

import torch

from fullshard.checks.collective_log import DIGEST, CollectiveLog, GroupFingerprints, UnitName
from fullshard.comm.base import Started, StartedWork
from fullshard.comm.streams import CollectiveCall, nothing
from fullshard.core.communicator import Communicator
from fullshard.core.reduction import Reduction
from fullshard.errors import StateError

# Heartbeats are multiples of this many bytes, so that ranks whose models differ a little still send equal lengths, and the
# heartbeat itself can find the difference.
_LENGTH_STEP = 1024


def message_length(parameters: int) -> int:
    """Return the number of bytes of a heartbeat with flags for this many parameters.

    >>> message_length(10), message_length(2000)
    (1024, 2048)
    """
    return -(-(2 * DIGEST + parameters) // _LENGTH_STEP) * _LENGTH_STEP


class Heartbeat:
    """Bytes that are all-reduced to their maximum over all ranks. Their memory is reused, since new memory costs more.

        0..7    hash of the log
        8..15   255 minus each of these bytes
        16..    flags of parameters: 1 if this rank used the parameter, in the order of the reductions; then zeros

    The maximum of 255 - x is 255 minus the minimum of x. So if a byte of the hash differs between ranks, each rank finds one of
    the first 16 bytes changed: its own byte is below the maximum or above the minimum.

    On the CPU the host waits for a heartbeat and reads it at once, on an accelerator in a later step. Flags are read (at once)
    only if a trainable parameter has no `.grad` and this rank did not use it: it gets a `.grad` if another rank used it.

    On the CPU all tensors are views of one piece of memory. On an accelerator the bytes are copied to the device through pinned
    memory, and the result is copied back to pinned memory, so that no copy blocks the host.
    """

    log: CollectiveLog  # the log that it compares
    reductions: list[Reduction]  # those whose parameters it has flags of; empty once `release` was called

    def __init__(self, length: int, async_device: torch.device | None) -> None:
        """Allocate the memory. `async_device`: the device if it runs asynchronously, else None."""
        self.length, self._async_device, self._bytes = length, async_device, bytearray(length)
        self._written = self._pinned = self._message = self._received = torch.frombuffer(self._bytes, dtype=torch.uint8)
        if async_device is not None:
            self._pinned = torch.empty(length, dtype=torch.uint8, device="cpu", pin_memory=True)
            self._message = torch.empty(length, dtype=torch.uint8, device=async_device)
            self._received = torch.empty(length, dtype=torch.uint8, device="cpu", pin_memory=True)

    def write(self, log: CollectiveLog, reductions: list[Reduction]) -> None:
        """Write the hash of the log, and the flags of the reductions."""
        self.log, self.reductions = log, reductions
        digest = log.hash
        self._head = digest.to_bytes(DIGEST, "little", signed=True) + (~digest).to_bytes(DIGEST, "little", signed=True)
        flags = bytes(chain.from_iterable([reduction.used for reduction in reductions]))
        self._bytes[:] = (self._head + flags).ljust(self.length, b"\0")
        if self._async_device is not None:
            self._pinned.copy_(self._written)

    def start(self) -> Started:
        """Start the all-reduce over the shards."""
        if self._async_device is not None:
            self._message.copy_(self._pinned, non_blocking=True)
        return self.reductions[0].group.collectives.reduce.all_reduce_max(self._message)

    def start_over_replicas(self) -> Started:
        """Start the all-reduce over the replicas, after the one over the shards."""
        replicas = self.reductions[0].group.collectives.replicate
        return StartedWork() if replicas is None else replicas.all_reduce_max(self._message)

    def finish(self) -> None:
        """Copy the result to the host, on the stream of the last all-reduce."""
        if self._async_device is not None:
            self._received.copy_(self._message, non_blocking=True)

    def _read(self, start: int, end: int) -> bytes:
        """Return bytes of the result. The host must have waited for the heartbeat."""
        return bytes(self._bytes[start:end] if self._async_device is None else self._received[start:end].tolist())

    @property
    def must_be_read(self) -> bool:
        """True if this rank must know which parameters other ranks used, before it sets `.grad`."""
        for reduction in self.reductions:
            if reduction.is_partial and reduction.undecided is not None:
                return True
        return False

    def expect(self) -> None:
        """Write "no difference" as the result on the host: a captured heartbeat has no result before its first replay."""
        self._received[: 2 * DIGEST] = torch.frombuffer(bytearray(self._head), dtype=torch.uint8)

    def is_desynced(self) -> bool:
        """Return True if the logs of the ranks differ. The host must have waited for the heartbeat."""
        return self._read(0, 2 * DIGEST) != self._head

    def used_anywhere(self) -> list[list[bool]]:
        """Return for each reduction whether any rank used each parameter. The host must have waited for the heartbeat."""
        flags = iter(self._read(2 * DIGEST, self.length))
        return [[bool(next(flags)) for _ in reduction.used] for reduction in self.reductions]


SentHeartbeat = tuple[Heartbeat, CollectiveCall]
"""A heartbeat, and the call that sends it."""


class Heartbeats:
    """Sends and reads heartbeats: reads at once on the CPU, and in a later step on an accelerator."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._unread: deque[SentHeartbeat] = deque()  # oldest first
        self._fingerprints: dict[CollectiveLog, GroupFingerprints] = {}  # of heartbeats, which belong to no unit
        self._free: list[Heartbeat] = []  # of all lengths, the one used last at the end

    def send(self, reductions: Sequence[tuple[int, Reduction]]) -> list[SentHeartbeat]:
        """Send a heartbeat per log in which one is due. `reductions`: (`every`, reduction); a log's first `every` counts."""
        logs: dict[CollectiveLog, tuple[int, list[Reduction]]] = {}
        always = self._communicator.capturing  # `every` cannot apply: what is captured is sent in every replay, or in none
        for every, reduction in reductions:
            logs.setdefault(reduction.group.fingerprints.log, (1 if always else every, []))[1].append(reduction)
        return [self._send(log, mine) for log, (every, mine) in logs.items() if log.heartbeat_due(every)]

    def _send(self, log: CollectiveLog, reductions: list[Reduction]) -> SentHeartbeat:
        communicator = self._communicator
        fingerprints = self._fingerprints.get(log)
        if fingerprints is None:
            fingerprints = self._fingerprints[log] = GroupFingerprints(log, UnitName(""), "")
        length = message_length(sum([len(reduction.used) for reduction in reductions]))
        beat = next((beat for beat in reversed(self._free) if beat.length == length), None)
        if beat is None:
            beat = Heartbeat(length, communicator.async_device)
        else:
            self._free.remove(beat)
        beat.write(log, reductions)
        over_replicas = reductions[0].group.collectives.replicate is not None
        finish = nothing if over_replicas else beat.finish
        work = communicator.send(communicator.reduce_scatter_stream, fingerprints, "heartbeat", beat.start, finish)
        if over_replicas:
            stream, start = communicator.all_reduce_stream, beat.start_over_replicas
            work = communicator.send(stream, fingerprints, "heartbeat", start, beat.finish, work, part=True)
        return beat, work

    def read_sent(self, sent: Sequence[SentHeartbeat]) -> None:
        """Read these heartbeats or, on an accelerator, all before these (in a capture none). Raises StateError if diverged."""
        if self._communicator.async_device is not None:
            self._unread += sent
            if len(self._unread) > len(sent) and not self._communicator.capturing:
                self.read(keep=len(sent))
            return
        for beat, work in sent:
            work.block()
            self.check(beat)

    def read(self, *, keep: int | None = None) -> None:
        """Read the heartbeats that have completed. With `keep`, wait for all but the last `keep`, and read them.

        The last `keep` stay unread even if they have completed: the backward that sent them still uses them, until `release`.
        """
        unread = self._unread
        while len(unread) > (keep or 0) and (keep is not None or unread[0][1].done()):
            beat, work = unread.popleft()
            work.block()
            self.check(beat)
            self._free.append(beat)

    def release(self, sent: Sequence[SentHeartbeat]) -> None:
        """Drop the reductions of these heartbeats, and make the heartbeats that have been read free for reuse."""
        unread = {id(beat) for beat, _ in self._unread}
        for beat, _ in sent:
            beat.reductions = []  # their memory must not be kept until the heartbeat is read
            if id(beat) not in unread:
                self._free.append(beat)

    def take_unread(self) -> list[SentHeartbeat]:
        """Return and forget the unread heartbeats: those that a capture recorded, which each replay of its graph sends."""
        unread = [*self._unread]
        self._unread.clear()
        return unread

    def clear(self) -> None:
        """Drop all unread heartbeats and their memory. The compute stream must be ordered behind the heartbeats."""
        self._unread.clear()

    def check(self, beat: Heartbeat) -> None:
        """Raise StateError if `beat` shows that the ranks diverged. The host must have waited for `beat`."""
        if beat.is_desynced():
            watchdog = self._communicator.watchdog
            text = "" if watchdog is None else watchdog.diagnose_desync(beat.log)
            beat.log.close(text or "The ranks ran different units, or equal ones in different orders, in this step or earlier.")
            raise StateError(beat.log.desync_error)
