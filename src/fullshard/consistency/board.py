"""The notice board of a job: records that ranks publish through the process group's store, and the bell that wakes a rank."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from fullshard import _torch

RATE = 1950.0  # requests per second that all ranks together may send to the store

_MANY = 64  # ranks beyond which each sends requests in its turn only
_GAP = 2.0  # seconds after which a notice that was counted, but never written, is skipped
_TOKEN = 8  # bytes that tell a ring of this job from a stranger's packet

NOW, TURN = 2, 1  # how urgent a ring is: look at once, or in one's turn


class WakeupSocket:
    """A UDP socket by which the other ranks wake this one. A packet has no content but its urgency.

    A rank that waits for nobody sends nothing to the store, so it cannot learn from there that another rank asks for it. A
    ring that is lost costs time, never correctness: the rank that asks rings again.
    """

    def __init__(self, store: Any) -> None:
        """`store`: the address of this rank is the one from which its host is reached."""
        host = _torch.store_host(store) or "127.0.0.1"
        family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            own = probe.getsockname()[0]
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        self._socket.bind((own, 0))
        self._socket.setblocking(False)
        self._token = os.urandom(_TOKEN)
        self.address = f"{own} {self._socket.getsockname()[1]} {self._token.hex()}"

    def wait(self, seconds: float, also: Sequence[int] = ()) -> int:
        """Wait for a ring, or until a file of `also` can be read; the urgency of the ring, 0 for none."""
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

    def ring(self, address: str, urgency: int) -> None:
        """Wake the rank of this address, as far as it can be."""
        host, port, token = address.split()
        with suppress(OSError):
            self._socket.sendto(bytes.fromhex(token) + bytes([urgency]), (host, int(port)))

    def close(self) -> None:
        """Hear no rings any more."""
        self._socket.close()


def bell_for(store: Any) -> WakeupSocket | None:
    """The bell of this process, None where it may open no socket: it then answers only while it waits itself."""
    try:
        return WakeupSocket(store)
    except OSError:
        return None


class NoticeBoard:
    """board 1 - 1 store, 1 - 0..1 bell.

    A record is what one rank publishes under a key of its own; a notice goes to all ranks, which read notices in one order.

    Requests per second stay below `RATE` for the whole job at any number of ranks, since each rank sends one in its turn, and
    turns follow each other in the order of ranks:

        rank    0  1  2 ... N-1 | 0  1  2 ...           period = N / RATE seconds

    Few ranks (at most 64) send theirs whenever they look.
    """

    def __init__(self, store: Any, rank: int, size: int, bell: WakeupSocket | None = None) -> None:
        self.rank, self.size, self.bell = rank, size, bell
        self.many = size > _MANY
        self.period = size / RATE
        self.heard = 0  # notices that were read
        self._posted = 0  # notices that there are, as far as it is known
        self._store = store
        self._extended = _torch.has_extended_api(store)
        self._addresses: dict[int, str] = {}
        self._present: set[str] = set()  # keys that exist for good
        self._gap = 0.0  # when a notice was first missing

    @property
    def is_served_by_first_rank(self) -> bool:
        """Whether rank 0 has the store, not a launcher or a file."""
        return _torch.store_host(self._store) is not None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"

    def publish(self, records: Mapping[str, bytes]) -> None:
        """One request."""
        if self._extended:
            self._store.multi_set(list(records), list(records.values()))
        else:
            for key, value in records.items():
                self._store.set(key, value)

    def read(self, keys: Sequence[str], *, expected: bool = False) -> dict[str, bytes]:
        """The records that exist.

        One request if all are known to exist, else two; a missing one costs as many more as the number of keys has binary
        digits.

        expected: with many ranks, take them to exist, and wait for some seconds for one that does not.
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
        """Its number, from 1. Two requests."""
        number = self._store.add("notices", 1)
        self._store.set(f"notice/{number}", notice)
        return number

    def count_news(self) -> None:
        """See how many notices there are. One request."""
        self._posted = self._store.add("notices", 0)

    @property
    def has_news(self) -> bool:
        """Whether there are notices that were counted and not read."""
        return self._posted > self.heard

    def news(self, clock: Callable[[], float] = time.monotonic) -> list[tuple[int, bytes]]:
        """The notices that were counted and not read, with their numbers, in order. One request, if there are any."""
        numbers = range(self.heard + 1, self._posted + 1)
        found = self.read([f"notice/{number}" for number in numbers], expected=True)
        news: list[tuple[int, bytes]] = []
        for number in numbers:
            notice = found.get(f"notice/{number}")
            if notice is None:
                self._gap = self._gap or clock()
                if clock() < self._gap + _GAP:
                    break  # it is being written
            else:
                news.append((number, notice))
            self._gap = 0.0
            self.heard = number
        return news

    def hello(self) -> dict[str, bytes]:
        """The record by which others find this rank's bell."""
        return {} if self.bell is None else {f"bell/{self.rank}": self.bell.address.encode()}

    def ring(self, ranks: Sequence[int], urgency: int = NOW) -> None:
        """Wake other ranks, as far as they can be."""
        if self.bell is None:
            return
        unknown = [rank for rank in ranks if rank not in self._addresses and rank != self.rank]
        for key, value in self.read([f"bell/{rank}" for rank in unknown], expected=True).items():
            self._addresses[int(key[5:])] = value.decode()
        for rank in ranks:
            if rank != self.rank and rank in self._addresses:
                self.bell.ring(self._addresses[rank], urgency)

    def close(self) -> None:
        """Hear no rings any more."""
        if self.bell is not None:
            self.bell.close()


__all__ = ["NOW", "RATE", "TURN", "NoticeBoard", "WakeupSocket", "bell_for"]
