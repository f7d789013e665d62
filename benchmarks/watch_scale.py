"""Measure the load of the watchdogs on the store, by the number of ranks: requests and bytes per second, seconds to a verdict.

The figures are of the whole job. The real watchdogs run, one per rank, over a store in memory and a simulated clock; nothing
is sent over a network. Each watchdog checks ten times a second, like its thread.

    python benchmarks/watch_scale.py [--ranks 8 64 1024 16384]
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Mapping, Sequence

import record

from fullshard.checks.collective_log import CollectiveLog, GroupFingerprints, LoggedCall, UnitName
from fullshard.checks.store import StateStore
from fullshard.checks.watchdog import Watchdog


def log_call(line: GroupFingerprints, action: str) -> LoggedCall:
    """Log an action of one parameter group as the next call."""
    entry = LoggedCall()
    entry.log, entry.fingerprint = line.log, line[action]
    entry.log.append(entry.fingerprint)
    entry.number = entry.log.count
    return entry


TICK = 0.1  # seconds
HEAD = 8  # bytes of overhead per key or value
PREFIX = len("fullshard/0/")


class Store:
    """A store in memory that counts, per second, the requests to a TCPStore and their bytes in both directions."""

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}
        self.now = 0.0
        self.requests: Counter[int] = Counter()
        self.bytes: Counter[int] = Counter()

    def _count(self, keys: Sequence[str], values: Sequence[bytes] = ()) -> None:
        second = int(self.now)
        self.requests[second] += 1
        self.bytes[second] += sum(len(key) + PREFIX + HEAD for key in keys) + sum(len(value) + HEAD for value in values)

    def has_extended_api(self) -> bool:
        return True

    def add(self, key: str, amount: int) -> int:
        number = int(self.data.get(key, b"0")) + amount
        self.data[key] = str(number).encode()
        self._count([key], [b"12345678"])
        return number

    def set(self, key: str, value: bytes) -> None:
        self._count([key], [value])
        self.data[key] = value

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        self._count(keys, values)
        self.data.update(zip(keys, values))

    def check(self, keys: Sequence[str]) -> bool:
        self._count(keys, [b"1"])
        return all(key in self.data for key in keys)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        values = [self.data[key] for key in keys]
        self._count(keys, values)
        return values


class Job:
    """The watchdogs of all ranks of a job, with one collective log per rank."""

    def __init__(self, ranks: int) -> None:
        self.store = Store()
        every = tuple(range(ranks))
        self.boards = [StateStore(self.store, rank, ranks) for rank in every]
        self.watches = [Watchdog(board, lambda: self.store.now) for board in self.boards]
        self.ledgers = [CollectiveLog("all", every, rank) for rank in every]
        self.lines = [GroupFingerprints(ledger, UnitName("blocks.7"), "7") for ledger in self.ledgers]
        self.waiters = [watch.new_wait_state() for watch in self.watches]
        for watch, ledger in zip(self.watches, self.ledgers):
            watch.add(ledger, start=False)
        for _ in range(5):
            for line in self.lines:
                log_call(line, "forward gather")
        self.run(2.0 + 1.2 * ranks / 2000)  # until all ranks have published a state
        self.store.requests.clear()
        self.store.bytes.clear()

    def wait(self, actions: Mapping[int, str]) -> None:
        """Make all ranks wait in an all-gather, except for the ranks in `actions`.

        Args:
            actions: by rank, the call that it waits in instead; "" if it waits in none.
        """
        for rank, line in enumerate(self.lines):
            action = actions.get(rank, "forward gather")
            if action:
                self.waiters[rank].call = log_call(line, action)

    def run(self, seconds: float, *, until_verdict: bool = False) -> float | None:
        """Advance the clock. With `until_verdict`, stop at the first verdict and return the seconds until then, else None."""
        begin = self.store.now
        while self.store.now < begin + seconds:
            self.store.now = round(self.store.now + TICK, 3)
            for watch in self.watches:
                watch.check()
            if until_verdict and any(ledger.desync_error is not None for ledger in self.ledgers):
                return self.store.now - begin
        return None

    @property
    def peak(self) -> tuple[int, int]:
        """Largest number of requests, and of bytes, in one second."""
        return max(self.store.requests.values(), default=0), max(self.store.bytes.values(), default=0)


def measure(ranks: int, seconds: float) -> dict[str, float]:
    """Measure a job of `ranks` ranks while no rank waits, while one rank stalls, and while two ranks diverge."""
    begin = time.perf_counter()
    job = Job(ranks)
    job.run(10.0)
    idle = sum(job.store.requests.values()) / 10.0
    job.wait({ranks - 2: ""})
    job.run(seconds)
    stalled = job.peak
    assert all(ledger.desync_error is None for ledger in job.ledgers), "a slow rank is no fault"
    job = Job(ranks)
    job.wait({ranks // 3: "backward gather", ranks - 2: "reduction"})
    named = job.run(120.0, until_verdict=True)
    find_desync = job.peak
    text = next((ledger.desync_error for ledger in job.ledgers if ledger.desync_error is not None), "")
    assert named is not None and all(f"rank {rank} ran " in text for rank in (ranks // 3, ranks - 2)), text
    return {
        "idle": idle,
        "requests": max(stalled[0], find_desync[0]),
        "bytes": max(stalled[1], find_desync[1]),
        "named": named,
        "took": time.perf_counter() - begin,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 64, 1024, 16384])
    parser.add_argument("--seconds", type=float, default=30.0, help="of simulated time for which one rank stalls")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args()
    heads = ["ranks", "idle", "requests/s", "MB/s", "named after s", "(took s)"]
    print("  ".join(f"{head:>13}" for head in heads))
    found = {}
    for ranks in options.ranks:
        found[ranks] = row = measure(ranks, options.seconds)
        cells = [f"{ranks:,}", row["idle"], f"{row['requests']:,}", f"{row['bytes'] / 1e6:.3f}"]
        print("  ".join(f"{cell:>13}" for cell in [*cells, f"{row['named']:.1f}", f"{row['took']:.0f}"]), flush=True)
    if options.json:
        print(record.line(found))


if __name__ == "__main__":
    main()
