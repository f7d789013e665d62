"""Shared state of a job: records and notices in the process group's store, and the socket that wakes a rank."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from fullshard import _torch

RATE = 1950.0  # maximum requests per second to the store, of all ranks together

_MANY = 64  # with more ranks than this, each rank sends requests in its own time slots only
_GAP = 2.0  # seconds after which a notice that was counted, but not written, is skipped
_TOKEN = 8  # bytes of the token that identifies wake-up packets of this job

NOW, RATE_LIMITED = 2, 1  # urgency of a wake-up: check at once, or in the next time slot of the rank


class WakeupSocket:
    """UDP socket through which other ranks wake this rank. A packet contains only a token and its urgency.

    A rank that does not wait sends no requests to the store, so it does not see the requests of other ranks there. A lost
    packet costs time, never correctness: the other rank sends again.
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

    def wait(self, seconds: float, also: Sequence[int] = ()) -> int:
        """Wait for a packet, or until a file descriptor in `also` is readable. Return the urgency of the packet, 0 for none."""
        own = self._socket.fileno()
        readable, _, _ = select.select([own, *also], [], [], seconds)
        found = 0
        if own in readable:
            with suppress(OSError):
                while True:
                    packet = self._socket.recv(64)
                    if packet[:-1] == self._token:
                        found = max(found, packet[-1])
        return found

    def send(self, address: str, urgency: int) -> None:
        """Send a packet to `address`, ignoring errors."""
        host, port, token = address.split()
        with suppress(OSError):
            self._socket.sendto(bytes.fromhex(token) + bytes([urgency]), (host, int(port)))

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
    """Records and notices in the store of the process group. state store 1 - 1 store, 1 - 0..1 wake-up socket.

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
        return {} if self.wakeup_socket is None else {f"bell/{self.rank}": self.wakeup_socket.address.encode()}

    def wake(self, ranks: Sequence[int], urgency: int = NOW) -> None:
        """Wake other ranks whose addresses are published."""
        if self.wakeup_socket is None:
            return
        unknown = [rank for rank in ranks if rank not in self._addresses and rank != self.rank]
        for key, value in self.read([f"bell/{rank}" for rank in unknown], expected=True).items():
            self._addresses[int(key[5:])] = value.decode()
        for rank in ranks:
            if rank != self.rank and rank in self._addresses:
                self.wakeup_socket.send(self._addresses[rank], urgency)

    def close(self) -> None:
        """Close the socket, if there is one."""
        if self.wakeup_socket is not None:
            self.wakeup_socket.close()


__all__ = ["NOW", "RATE", "RATE_LIMITED", "StateStore", "WakeupSocket", "open_wakeup_socket"]
