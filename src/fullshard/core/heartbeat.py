"""The heartbeat: one small collective at the end of a synchronised backward, which also finds ranks that diverged."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain

import torch

from fullshard.checks.collective_log import DIGEST, CollectiveLog, GroupFingerprints, UnitName
from fullshard.comm.base import StartedWork
from fullshard.comm.streams import nothing
from fullshard.core.communicator import CollectiveCall, Communicator
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


class HeartbeatBuffer:
    """Reusable memory of one heartbeat: allocating it costs more than filling it.

    On the CPU there is one piece of memory, the bytes, and all tensors are views of it. On an accelerator the bytes are copied
    to the device through pinned memory, and the result is copied back to pinned memory, so that no copy blocks the host.

    Attributes:
        bytes: the bytes that this rank sends, (length,); on the CPU also the result.
        message: the tensor of the all-reduce, (length,) of uint8 on the device.
        received: the maximum over all ranks, (length,) of uint8 on the CPU.
    """

    __slots__ = ("_async_device", "_pinned", "_written", "bytes", "message", "received")

    def __init__(self, length: int, async_device: torch.device | None) -> None:
        self._async_device, self.bytes = async_device, bytearray(length)
        self._written = self._pinned = self.message = self.received = torch.frombuffer(self.bytes, dtype=torch.uint8)
        if async_device is not None:
            self._pinned = torch.empty(length, dtype=torch.uint8, device="cpu", pin_memory=True)
            self.message = torch.empty(length, dtype=torch.uint8, device=async_device)
            self.received = torch.empty(length, dtype=torch.uint8, device="cpu", pin_memory=True)

    def write(self, body: bytes) -> None:
        """Fill the buffer with `body`, and with zeros after it."""
        self.bytes[:] = body.ljust(len(self.bytes), b"\0")
        if self._async_device is not None:
            self._pinned.copy_(self._written)

    def to_device(self) -> None:
        """Copy the bytes to the device, on the current stream."""
        if self._async_device is not None:
            self.message.copy_(self._pinned, non_blocking=True)

    def to_host(self) -> None:
        """Copy the result to the host, on the current stream."""
        if self._async_device is not None:
            self.received.copy_(self.message, non_blocking=True)

    def read(self, start: int, end: int) -> bytes:
        """Return bytes of the result. The host must have waited for the heartbeat."""
        return bytes(self.bytes[start:end] if self._async_device is None else self.received[start:end].tolist())


class Heartbeat:
    """Bytes that are all-reduced to their maximum over all ranks.

        0..7    hash of the log
        8..15   255 minus each of these bytes
        16..    flags of parameters: 1 if this rank used the parameter, in the order of the reductions; then zeros

    The maximum of 255 - x is 255 minus the minimum of x. So if a byte of the hash differs between ranks, each rank finds one of
    the first 16 bytes changed: its own byte is below the maximum or above the minimum.

    It is read when that costs nothing: at once on the CPU, in a later step on an accelerator. Only a rank that left a parameter
    without `.grad` unused needs the flags at once: None is right if no rank used it, and only the host can leave it at None.

    Attributes:
        log: the log that it compares.
        reductions: the reductions that it ends; empty once their gradients are set.
        buffer: its memory.
    """

    def __init__(
        self,
        log: CollectiveLog,
        reductions: Sequence[Reduction],
        async_device: torch.device | None,
        buffer: HeartbeatBuffer | None = None,
    ) -> None:
        """Write the bytes.

        Args:
            log: the log to compare.
            reductions: the reductions that the heartbeat ends.
            async_device: the device if it runs asynchronously, else None.
            buffer: a free buffer; one is allocated if it is None or has another length.
        """
        self.log, self.reductions = log, list(reductions)
        digest = log.hash
        self._head = digest.to_bytes(DIGEST, "little", signed=True) + (~digest).to_bytes(DIGEST, "little", signed=True)
        flags = bytes(chain.from_iterable([reduction.used for reduction in reductions]))
        body = self._head + flags
        length = message_length(len(flags))
        if buffer is None or len(buffer.bytes) != length:
            buffer = HeartbeatBuffer(length, async_device)
        buffer.write(body)
        self.buffer = buffer

    def start(self) -> StartedWork:
        """Start the all-reduce over the shards."""
        self.buffer.to_device()
        return self.reductions[0].group.collectives.reduce.all_reduce_max(self.buffer.message)

    def start_over_replicas(self) -> StartedWork:
        """Start the all-reduce over the replicas, after the one over the shards."""
        replicas = self.reductions[0].group.collectives.replicate
        return StartedWork() if replicas is None else replicas.all_reduce_max(self.buffer.message)

    def finish(self) -> None:
        """Copy the result to the host, on the stream of the last all-reduce."""
        self.buffer.to_host()

    def release_reductions(self) -> None:
        """Drop the reductions, whose gradients are set, so that their memory is not kept until the heartbeat is read."""
        self.reductions = []

    @property
    def must_be_read(self) -> bool:
        """True if this rank must know which parameters other ranks used, before it sets `.grad`."""
        return any(reduction.asks_others for reduction in self.reductions)

    def is_desynced(self) -> bool:
        """Return True if the logs of the ranks differ. The host must have waited for the heartbeat."""
        return self.buffer.read(0, len(self._head)) != self._head

    def used_anywhere(self) -> list[list[bool]]:
        """Return for each reduction whether any rank used each parameter. The host must have waited for the heartbeat."""
        flags = iter(self.buffer.read(2 * DIGEST, len(self.buffer.bytes)))
        return [[bool(next(flags)) for _ in reduction.used] for reduction in self.reductions]


_NO_UNIT = UnitName("")

Sent = tuple[Heartbeat, CollectiveCall]
"""A heartbeat, and the call that sends it."""


class Heartbeats:
    """Sends and reads heartbeats: reads at once on the CPU, and in a later step on an accelerator."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._unread: deque[Sent] = deque()  # oldest first
        self._fingerprints: dict[CollectiveLog, GroupFingerprints] = {}  # of heartbeats, which belong to no unit
        self._free_buffers: list[HeartbeatBuffer] = []

    def send(self, reductions: Sequence[tuple[int, Reduction]]) -> list[Sent]:
        """Send one heartbeat per log.

        Args:
            reductions: the reductions to end, each with the number of steps per heartbeat (`CheckPolicy.every`).

        Returns:
            The heartbeats, with the calls that send them.
        """
        logs: dict[CollectiveLog, tuple[int, list[Reduction]]] = {}
        for every, reduction in reductions:
            logs.setdefault(reduction.group.fingerprints.log, (every, []))[1].append(reduction)
        return [self._send(log, mine) for log, (every, mine) in logs.items() if log.heartbeat_due(every)]

    def _send(self, log: CollectiveLog, reductions: list[Reduction]) -> Sent:
        communicator = self._communicator
        fingerprints = self._fingerprints.get(log)
        if fingerprints is None:
            fingerprints = self._fingerprints[log] = GroupFingerprints(log, _NO_UNIT, "")
        buffer = self._take_buffer(sum([len(reduction.used) for reduction in reductions]))
        beat = Heartbeat(log, reductions, communicator.async_device, buffer)
        over_replicas = reductions[0].group.collectives.replicate is not None
        finish = nothing if over_replicas else beat.finish
        work = communicator.send(communicator.reduce_scatter_stream, fingerprints, "heartbeat", beat.start, finish)
        if over_replicas:
            stream, start = communicator.all_reduce_stream, beat.start_over_replicas
            work = communicator.send(stream, fingerprints, "heartbeat", start, beat.finish, work.work, part=True)
        return beat, work

    def _take_buffer(self, parameters: int) -> HeartbeatBuffer | None:
        """Take the free buffer of the right length that was used last; None if there is none."""
        length = message_length(parameters)
        for at in range(len(self._free_buffers) - 1, -1, -1):
            if len(self._free_buffers[at].bytes) == length:
                return self._free_buffers.pop(at)
        return None

    def read_now(self, sent: Sequence[Sent]) -> None:
        """Wait for these heartbeats and all earlier ones, and read them. Raises StateError if the ranks diverged."""
        self.read(keep=0)
        for beat, work in sent:
            work.block()
            self._check(beat)

    def read_later(self, sent: Sequence[Sent]) -> None:
        """Wait for all heartbeats before these, and read them. Raises StateError if the ranks diverged."""
        self._unread += sent
        if len(self._unread) > len(sent):
            self.read(keep=len(sent))

    def read(self, *, keep: int | None = None) -> None:
        """Read the heartbeats that have completed. With `keep`, wait for all but the last `keep` and read those.

        The last `keep` stay unread even if they have completed: their buffers belong to the backward that sent them until its
        gradients are set.
        """
        unread = self._unread
        while len(unread) > (keep or 0) and (keep is not None or unread[0][1].done()):
            beat, work = unread.popleft()
            work.block()
            self._check(beat)
            self._free_buffers.append(beat.buffer)

    def release_buffers(self, sent: Sequence[Sent]) -> None:
        """Drop the reductions of these heartbeats, whose gradients are set, and free the buffers of those that are read."""
        unread = {id(beat) for beat, _ in self._unread}
        for beat, _ in sent:
            beat.release_reductions()
            if id(beat) not in unread:
                self._free_buffers.append(beat.buffer)

    def clear(self) -> None:
        """Drop all heartbeats unread, after the compute stream is ordered behind them, since their memory is freed."""
        while self._unread:
            with suppress(Exception):
                self._unread.popleft()[1].wait()

    def _check(self, beat: Heartbeat) -> None:
        if beat.is_desynced():
            watchdog = self._communicator.watchdog
            text = "" if watchdog is None else watchdog.diagnose_desync(beat.log)
            beat.log.close(text or "The ranks ran different units, or the same units in different orders, in this step.")
            raise StateError(beat.log.desync_error)


__all__ = ["Heartbeat", "HeartbeatBuffer", "Heartbeats", "Sent", "message_length"]
