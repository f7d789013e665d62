"""Exchange of states between ranks: records and notices in the process group's store, wake-ups, and rate limits."""

from __future__ import annotations

import json
import os
import selectors
import socket
import time
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from fullshard import _torch
from fullshard.checks.collective_log import CollectiveLog, headline
from fullshard.checks.neighbors import RankProcess, near
from fullshard.checks.state import ENDED, RAISED, WAITING, LocalState, Position, RankStatus

RATE = 1950.0  # maximum requests per second to the store, of all ranks together

_MANY = 64  # with more ranks than this, each rank sends requests in its own time slots only
_NEIGHBOR_SECONDS = 5.0  # seconds between two reads of `process/` records, as long as some of them are missing
_GAP = 2.0  # seconds after which a notice that was counted, but not written, is skipped
MAX_WOKEN = 1024  # maximum number of ranks to wake at once
_TOKEN = 8  # bytes of the token that identifies wake-up packets of this job


# select() refuses file descriptors from 1,024 on, and the default selector needs one of its own, which may be the last one.
_Selector: type[selectors.BaseSelector] = getattr(selectors, "PollSelector", selectors.DefaultSelector)


class WakeupSocket:
    """UDP socket through which other ranks wake this rank. A packet contains only a token.

    A rank that does not wait sends no requests to the store, so it does not see the requests of other ranks there. A lost
    packet costs time, never correctness: the other rank sends again. A blocking wait in the store would do the same without a
    socket, but TCPStore prints a stack trace on every rank whose wait is open when the server's process ends, as it does at
    the end of a correct program.
    """

    def __init__(self, store: Any) -> None:
        """Bind the socket to the address from which this rank reaches the host of `store`."""
        host = _torch.store_host(store) or "127.0.0.1"
        family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # connecting a UDP socket sends nothing, but picks the address
            probe.connect(target)
            own = probe.getsockname()[0]
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        self._socket.bind((own, 0))
        self._socket.setblocking(False)
        self._token = os.urandom(_TOKEN)
        self.address = f"{own} {self._socket.getsockname()[1]} {self._token.hex()}"

    def wait(self, seconds: float, also: Sequence[int] = ()) -> bool:
        """Wait for a packet, or until a file descriptor in `also` is readable. Return True if a packet came."""
        own = self._socket.fileno()
        with _Selector() as selector:
            for descriptor in (own, *also):
                selector.register(descriptor, selectors.EVENT_READ)
            readable = [key.fd for key, _ in selector.select(seconds)]
        found = False
        if own in readable:
            with suppress(OSError):
                while True:
                    found = self._socket.recv(64) == self._token or found
        return found

    def send(self, address: str) -> None:
        """Send a packet to `address`, ignoring errors."""
        host, port, token = address.split()
        with suppress(OSError):
            self._socket.sendto(bytes.fromhex(token), (host, int(port)))

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


def open_wakeup_socket(store: Any) -> WakeupSocket | None:
    """Return the socket of this process; None if it cannot open one. The rank then replies only while it waits itself."""
    try:
        return WakeupSocket(store)
    except OSError:
        return None


class StateStore:
    """Records and notices in the store of the process group, and the socket that wakes this rank.

    A record belongs to one rank and has a key of its own. A notice goes to all ranks, which read notices in one order.

    The requests of all ranks stay below `RATE` per second at any number of ranks: each rank has time slots, in rank order.

        rank    0  1  2 ... N-1 | 0  1  2 ...           period = N / RATE seconds

    Up to 64 ranks may send requests at any time.

    Attributes:
        rank: global rank of this process.
        size: number of ranks.
        wakeup_socket: socket that wakes this rank; None if it has none.
        many: whether ranks are limited to their time slots.
        period: seconds between two time slots of a rank.
        notices_read: number of notices that this rank has read.
    """

    def __init__(self, store: Any, rank: int, size: int, wakeup_socket: WakeupSocket | None = None) -> None:
        self.rank, self.size, self.wakeup_socket = rank, size, wakeup_socket
        self.many = size > _MANY
        self.period = size / RATE
        self.notices_read = 0
        self._posted = 0  # number of notices at the last count
        self._store = store
        self._extended = _torch.has_extended_api(store)
        self._addresses: dict[int, str] = {}
        self._present: set[str] = set()  # keys known to exist; keys are never deleted
        self._gap = 0.0  # time at which the next notice was first missing

    @property
    def is_served_by_first_rank(self) -> bool:
        """True if rank 0 serves the store, not a launcher or a file."""
        return _torch.store_host(self._store) is not None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"

    def publish(self, records: Mapping[str, bytes]) -> None:
        """Write records. One request, if the store has the extended API."""
        if self._extended:
            self._store.multi_set(list(records), list(records.values()))
        else:
            for key, value in records.items():
                self._store.set(key, value)

    def read(self, keys: Sequence[str], *, expected: bool = False) -> dict[str, bytes]:
        """Return the records that exist.

        This sends one request if all keys are known to exist, else two. Each missing key costs about log2(len(keys)) more.

        Args:
            keys: keys of the records.
            expected: with many ranks, assume that all keys exist; the store then waits some seconds for a missing one.
        """
        if not keys:
            return {}
        if expected and self.many:
            with suppress(_torch.StoreError):
                return dict(zip(keys, map(bytes, self._store.multi_get(list(keys)))))
        if self._present.issuperset(keys) or self._store.check(list(keys)):
            self._present.update(keys)
            values = self._store.multi_get(list(keys)) if self._extended else [self._store.get(key) for key in keys]
            return dict(zip(keys, map(bytes, values)))
        if len(keys) == 1:
            return {}
        half = len(keys) // 2
        return {**self.read(keys[:half]), **self.read(keys[half:])}

    def post(self, notice: bytes) -> int:
        """Post a notice and return its number, starting at 1. Two requests."""
        # the number is taken before the notice is written, so readers may see a gap for a moment
        number = self._store.add("notices", 1)
        self._store.set(f"notice/{number}", notice)
        return number

    def count_news(self) -> None:
        """Count the notices. One request."""
        self._posted = self._store.add("notices", 0)

    @property
    def has_news(self) -> bool:
        """True if counted notices are unread."""
        return self._posted > self.notices_read

    def news(self, clock: Callable[[], float] = time.monotonic) -> list[tuple[int, bytes]]:
        """Read the unread notices that were counted: (number, notice), in order. One request if there are any."""
        numbers = range(self.notices_read + 1, self._posted + 1)
        found = self.read([f"notice/{number}" for number in numbers], expected=True)
        news: list[tuple[int, bytes]] = []
        for number in numbers:
            notice = found.get(f"notice/{number}")
            if notice is None:
                self._gap = self._gap or clock()
                if clock() < self._gap + _GAP:
                    break  # the notice is being written; the next ones must not overtake it
            else:
                news.append((number, notice))
            self._gap = 0.0
            self.notices_read = number
        return news

    def address_record(self) -> dict[str, bytes]:
        """Return the record with the address of this rank's socket; empty without a socket."""
        return {} if self.wakeup_socket is None else {f"address/{self.rank}": self.wakeup_socket.address.encode()}

    def wake(self, ranks: Sequence[int]) -> None:
        """Wake other ranks whose addresses are published, at most MAX_WOKEN of them."""
        if self.wakeup_socket is None:
            return
        ranks = ranks[:MAX_WOKEN]
        unknown = {f"address/{rank}": rank for rank in ranks if rank not in self._addresses and rank != self.rank}
        for key, value in self.read(list(unknown), expected=True).items():
            self._addresses[unknown[key]] = value.decode()
        for rank in ranks:
            if rank != self.rank and rank in self._addresses:
                self.wakeup_socket.send(self._addresses[rank])

    def close(self) -> None:
        """Close the socket, if there is one."""
        if self.wakeup_socket is not None:
            self.wakeup_socket.close()


TICK = 0.1  # seconds between two checks of the watchdog
FEW = 8  # up to this number of ranks, each reads the positions of the others; of more ranks, only READERS do
READERS = 4
BYTES = 0.9e6  # bytes per second that all readers of positions may read together
_RECORD = 58  # bytes to read one position, with its key


class RateLimiter:
    """Times at which this rank may send requests to the store: its time slots, or any time if there are at most 64 ranks."""

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._next_send = float("-inf")  # time of the next request of this rank
        self._reading: dict[str, float] = {}  # key of a log -> time of the next read of its positions

    def try_send(self, now: float) -> bool:
        """Return True if this rank may send a request now, and use up its slot. Always True if there are at most 64 ranks."""
        store, period = self._store, max(TICK, self._store.period)
        if not store.many:
            return True
        if now > self._next_send + 2 * TICK:  # unused slots expire; the next one is at the rank's offset in the period
            begin = now - now % period + store.rank / store.size * period
            self._next_send = begin if begin >= now else begin + period
        if now < self._next_send:
            return False
        self._next_send += period
        return True

    def is_reader(self, log: CollectiveLog) -> bool:
        """Return True if this rank reads the positions of the others. Of many ranks, READERS ranks at equal distances do."""
        return len(log.ranks) <= FEW or self._store.rank in self.readers(log)

    def try_read(self, log: CollectiveLog, now: float) -> bool:
        """Return True if this rank may read the positions of `log` now, and use up its slot."""
        if not self.is_reader(log) or now < self._reading.setdefault(log.key, now + self._offset(log)):
            return False
        self._reading[log.key] = now + self._interval(log)
        return True

    def reset_reads(self) -> None:
        """Forget the times of reads, because no rank waits."""
        self._reading.clear()

    @staticmethod
    def readers(log: CollectiveLog) -> list[int]:
        """Return the ranks that read positions if there are many ranks."""
        return [log.ranks[index * len(log.ranks) // READERS] for index in range(READERS)]

    def _interval(self, log: CollectiveLog) -> float:
        """Return the seconds between two reads of all positions by one reader."""
        ranks = len(log.ranks)
        return TICK if ranks <= FEW else READERS * max(TICK, ranks * _RECORD / BYTES)

    def _offset(self, log: CollectiveLog) -> float:
        """Return the delay in seconds of this reader after the first one, so that readers take turns."""
        few = len(log.ranks) <= FEW
        return 0.0 if few else self.readers(log).index(self._store.rank) * self._interval(log) / READERS


Window = list[tuple[int, int, str]]
"""Recent calls of a rank: (number, hash of all calls up to it, text)."""


class Records:
    """Records of each log and rank, each under its own key: position, status (key `status`), recent calls (`calls`), `needs`.

    The needs are the messages that a rank still waits for in a closed log: its ranks diverged, and no further call may start.
    """

    def __init__(self, store: StateStore, local: LocalState) -> None:
        self._store, self._local = store, local
        self._own_process = RankProcess.own()
        self._near: set[int] = set()  # ranks that may be on this machine
        self._neighbors: dict[int, RankProcess] = {}  # the processes of these ranks, on this machine and on others
        self._read_neighbors_at = float("-inf")
        self._announcement = store.address_record()  # to publish with the next request, even if no rank waits
        if self._own_process is not None:
            self._announcement[f"process/{local.rank}"] = self._own_process.pack()
        self._published: dict[str, bytes] = {}  # key -> record as last published
        self._warned = False

    # --- of this rank ---

    def announce(self, log: CollectiveLog) -> None:
        """Publish this rank's position in a new log with the next request."""
        self._near.update(near(self._local.rank, log.ranks))
        self._announcement[f"{log.key}/{self._local.rank}"] = self._position(log).pack()

    def publish_announcement(self) -> None:
        """Publish the announcement. One request."""
        sent = dict(self._announcement)
        self._store.publish(sent)
        self._forget_announced(sent)

    @property
    def has_announcement(self) -> bool:
        """True if there are records to publish although no rank waits."""
        return bool(self._announcement)

    @property
    def has_published_status(self) -> bool:
        """True if this rank has published its status."""
        return any(key.endswith("/status") for key in self._published)

    def changed(self, *, ended: bool = False) -> dict[str, bytes]:
        """Return the records that differ from those last published."""
        local, many = self._local, self._store.many
        records = dict(self._announcement)
        for log in local.all_logs():
            at = f"{log.key}/{local.rank}"
            records[at] = self._position(log, ended=ended).pack()
            if not (many and local.waiting_in(log) is not None):  # with many ranks, the position of a waiting rank is enough
                status = local.status(log)
                values = [log.epoch, status.last, status.waits, status.exception, status.any_failed]
                records[f"{at}/status"] = json.dumps(values).encode()
            records[f"{at}/calls"] = zlib.compress(json.dumps([log.epoch, log.recent_calls()]).encode())
        return {key: record for key, record in records.items() if self._published.get(key) != record}

    def publish(self, records: dict[str, bytes]) -> None:
        """Publish records. One request, if there are any."""
        if records:
            self._store.publish(records)
            self._published.update(records)
        self._forget_announced(records)

    def _forget_announced(self, sent: dict[str, bytes]) -> None:
        """Forget announcements that were sent. Those of a request that raised are sent again."""
        known = {**self._published, **sent}
        self._announcement = {key: record for key, record in self._announcement.items() if known.get(key) != record}

    def publish_needs(self, log: CollectiveLog, needs: object) -> None:
        """Publish the messages of a closed log that this rank still waits for."""
        self._store.publish({f"{log.key}/{self._local.rank}/needs": json.dumps([log.epoch, needs]).encode()})

    def has_published_notices_read(self) -> bool:
        """Return True if the published positions have the current number of read notices, or if there are many ranks."""
        logs = self._local.all_logs()  # many ranks publish in their next time slot instead
        return self._store.many or all(
            self._published.get(f"{log.key}/{self._local.rank}") == self._position(log).pack() for log in logs
        )

    def _position(self, log: CollectiveLog, *, ended: bool = False) -> Position:
        return self._local.position(log, notices_read=self._store.notices_read, ended=ended)

    # --- of the others ---

    def lacks_neighbors(self, now: float) -> bool:
        """Return True if it is time to read which ranks have their process on this machine."""
        due = now > self._read_neighbors_at + _NEIGHBOR_SECONDS
        return self._own_process is not None and due and not self._neighbors.keys() >= self._near

    def read_neighbors(self, now: float) -> None:
        """Read the processes of ranks that are not known yet. One or two requests."""
        self._read_neighbors_at = now
        keys = {f"process/{rank}": rank for rank in sorted(self._near - self._neighbors.keys())}
        for key, record in self._store.read(list(keys)).items():
            try:
                self._neighbors[keys[key]] = RankProcess.unpack(record)
            except ValueError as wrong:
                self.warn_unreadable(f"'process' of rank {keys[key]}", wrong)

    def gone_neighbor(self, log: CollectiveLog) -> int | None:
        """Return a rank of the log whose process on this machine has ended; None if there is none."""
        return next((rank for rank, process in self._neighbors.items() if rank in log.ranks and self._is_gone(process)), None)

    def _is_gone(self, process: RankProcess) -> bool:
        """Return True if the process is of this machine and has ended."""
        return self._own_process is not None and process.machine == self._own_process.machine and process.is_gone()

    def all_wait(self, log: CollectiveLog) -> bool:
        """Return True if each other rank of the log waits, raised, ended, or lost its process, so that none is merely late."""
        gone = {rank for rank, process in self._neighbors.items() if self._is_gone(process)}
        stuck = {rank for rank, position in self.positions(log).items() if position.flags & (WAITING | RAISED | ENDED)}
        return {rank for rank in log.ranks if rank != self._local.rank} <= gone | stuck

    def positions(self, log: CollectiveLog) -> dict[int, Position]:
        """Return the positions that other ranks published in this epoch."""
        keys = {f"{log.key}/{rank}": rank for rank in log.ranks if rank != self._local.rank}
        found: dict[int, Position] = {}
        for key, record in self._store.read(list(keys)).items():
            try:
                position = Position.unpack(record)
            except ValueError as wrong:
                self.warn_unreadable("a position", wrong)
                continue
            if position.epoch == log.epoch & 0xFF:
                found[keys[key]] = position
        return found

    def statuses(self, log: CollectiveLog, ranks: Sequence[int]) -> dict[int, RankStatus]:
        """Return the published statuses of `ranks`."""
        found: dict[int, RankStatus] = {}
        for rank, record in self._read(log, ranks, "status").items():
            try:
                found[rank] = RankStatus(*record)
            except TypeError as wrong:
                self.warn_unreadable(f"'status' of rank {rank}", wrong)
        return found

    def windows(self, log: CollectiveLog, ranks: Sequence[int]) -> dict[int, Window]:
        """Return the recent calls of `ranks`: those that they published, and those of this rank."""
        found = {self._local.rank: log.recent_calls()} if self._local.rank in ranks else {}
        for rank, record in self._read(log, [rank for rank in ranks if rank != self._local.rank], "calls").items():
            try:
                found[rank] = [(int(number), int(digest), str(text)) for number, digest, text in record[0]]
            except (ValueError, TypeError, IndexError) as wrong:
                self.warn_unreadable(f"'calls' of rank {rank}", wrong)
        return found

    def needs(self, log: CollectiveLog, ranks: Sequence[int]) -> dict[int, list[Any]]:
        """Return the messages that `ranks` still wait for."""
        return self._read(log, ranks, "needs")

    def _read(self, log: CollectiveLog, ranks: Sequence[int], what: str) -> dict[int, list[Any]]:
        """Return the records named `what` that `ranks` published for the log in this epoch."""
        keys = {f"{log.key}/{rank}/{what}": rank for rank in ranks}
        found: dict[int, list[Any]] = {}
        for key, record in self._store.read(list(keys)).items():
            try:
                epoch, *rest = json.loads(zlib.decompress(record) if what == "calls" else record)
                if epoch == log.epoch:
                    found[keys[key]] = rest
            except (ValueError, TypeError, zlib.error) as wrong:
                self.warn_unreadable(f"'{what}' of rank {keys[key]}", wrong)
        return found

    def warn_unreadable(self, what: str, wrong: Exception) -> None:
        """Warn, the first time only, that a record cannot be read."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"fullshard's watchdog cannot read {what} in the store of the process group and skips it ({headline(wrong)}). "
                "Another program, or another version of fullshard, writes under the same keys.",
                stacklevel=2,
            )


__all__ = [
    "BYTES",
    "FEW",
    "MAX_WOKEN",
    "RATE",
    "READERS",
    "TICK",
    "RateLimiter",
    "Records",
    "StateStore",
    "WakeupSocket",
    "Window",
    "open_wakeup_socket",
]
