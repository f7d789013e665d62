"""Diagnose why a collective will never complete: ranks diverged, raised, ended or wait in any_failed(), or a timeout."""

from __future__ import annotations

from collections.abc import Sequence

from fullshard.checks import verdicts
from fullshard.checks.board import StateStore
from fullshard.checks.collective_log import CollectiveLog, LoggedCall, find_desync
from fullshard.checks.local_state import ANY_FAILED_PREFIX, LocalState, WaitState
from fullshard.checks.notices import REQUEST_INTERVAL, Notices
from fullshard.checks.records import Records, Window
from fullshard.checks.status import ENDED, IN_ANY_FAILED, RAISED, Position
from fullshard.checks.turns import FEW, READERS, TICK, RateLimiter

_GRACE = 0.5  # seconds to wait for the positions of all ranks after ranks were found to diverge
_RAISED_SECONDS = 2.0  # minimum seconds to wait for a rank that raised, because it may continue

Positions = dict[int, Position]


class Diagnosis:
    """Compares the published calls of the other ranks with the log of this rank."""

    def __init__(self, store: StateStore, local: LocalState, records: Records, limiter: RateLimiter, notices: Notices) -> None:
        self._store, self._local, self._records, self._limiter, self._notices = store, local, records, limiter, notices
        self._cached: tuple[str, float, Positions] = "", 0.0, {}  # key of a log, expiry, positions
        self._found: dict[tuple[str, int], float] = {}  # (key of a log, epoch) -> time at which ranks were found to diverge

    def of(self, log: CollectiveLog, concerned: Sequence[WaitState], now: float) -> str | None:
        """Return the verdict on a log; None if its collectives may complete. `concerned` has the threads that wait long."""
        key, until, positions = self._cached
        if key != log.key or now > until:
            positions = self._records.positions(log)
        text = self._diagnose_desync(log, positions, now)
        for state in concerned:
            call = state.waits_in(log)
            if text is None and call is not None:  # None: the thread has continued
                text = self._diagnose_wait(log, positions, state, call, now)
        return text

    def _diagnose_wait(
        self, log: CollectiveLog, positions: Positions, state: WaitState, call: LoggedCall, now: float
    ) -> str | None:
        """Return why the wait of one thread will not end; None if it may end."""
        records, rank = self._records, self._local.rank
        here, stuck = verdicts.waits_in(rank, call), state.seconds_waiting(now)
        ended = [other for other, position in positions.items() if position.flags & ENDED]
        if ended:
            return verdicts.ended(ended, records.statuses(log, ended[: verdicts.MAX_NAMED]), here)
        if not log.name.startswith(ANY_FAILED_PREFIX):
            # A host that runs ahead of its device may be in any_failed() while the device is still to compute for long.
            patient = log.abort is not None or stuck <= max(REQUEST_INTERVAL, state.patience)
            voting = self._others_in_any_failed(log, positions, call, patient=patient)
            if voting:
                return verdicts.in_any_failed(voting, here)
        # only positions published during this wait show that a rank raised: an older one may have continued since
        request, when = self._notices.last_request
        fresh = {other: position for other, position in positions.items() if when >= now - stuck and position.has_read(request)}
        if stuck > max(_RAISED_SECONDS, state.patience):
            raised = [other for other, position in fresh.items() if position.flags & RAISED and position.count < call.number]
            text = verdicts.raised(records.statuses(log, raised[: verdicts.MAX_NAMED]), here)
            if text is not None:
                return text
        if state.timeout is not None and stuck > state.timeout:
            late = stuck - state.timeout
            if len(fresh) == len(log.ranks) - 1 or late > REQUEST_INTERVAL:
                return verdicts.timed_out(rank, state.timeout, call, self.peer_statuses(log, positions))
        return None

    def _others_in_any_failed(self, log: CollectiveLog, positions: Positions, call: LoggedCall, *, patient: bool) -> list[int]:
        """Return the ranks that wait in an any_failed() that this rank has not called.

        A rank that logged `call` itself may have sent its message, which is slow to arrive, or deferred it for good. While
        `patient`, such ranks do not count.
        """
        ranks = [
            rank
            for rank, position in positions.items()
            if position.flags & IN_ANY_FAILED and not (patient and position.count >= call.number)
        ]
        found = []
        for rank, status in self._records.statuses(log, ranks[: verdicts.MAX_NAMED]).items():
            if status.any_failed is not None:
                key, number, members = status.any_failed
                mine = self._local.logs.get(key)
                if self._local.rank in members and (mine is None or mine.count < number):
                    found.append(rank)
        return found

    # --- diverged ranks ---

    def _diagnose_desync(self, log: CollectiveLog, positions: Positions, now: float) -> str | None:
        """Return the verdict on ranks that diverged; None if no difference was published."""
        windows = self._windows(log, positions, now)
        found = find_desync(windows)
        if found is None:
            return None
        number, calls = found
        all_ranks = {
            text: sorted({other for rank in ranks for other in _ranks_with_history(windows[rank], number, positions, rank)})
            for text, ranks in calls.items()
        }
        since = self._found.setdefault((log.key, log.epoch), now)
        if sum(map(len, all_ranks.values())) < len(log.ranks) and now < since + max(_GRACE, self._store.period):
            return None  # more positions may arrive soon, and the verdict should name all ranks
        return verdicts.diverged(number, all_ranks)

    def _windows(self, log: CollectiveLog, positions: Positions, now: float) -> dict[int, Window]:
        """Return the recent calls of this rank, and of other ranks whose calls may differ.

        Ranks with equal counts and hashes made the same calls, so the calls of one of them are read for all. Of the ranks whose
        position is in no history known here, one per count and hash is requested to publish its calls.
        """
        rank = self._local.rank
        windows = {rank: log.recent_calls()}
        known = {number: digest for number, digest, _ in windows[rank]}
        here = max(known, default=0)
        top = max(positions, key=lambda other: positions[other].count, default=rank)
        chosen: list[int] = []
        if top in positions and positions[top].count > here:  # the history after this rank's last call
            chosen = [top]
            windows |= self._records.windows(log, chosen)
            known |= {number: digest for number, digest, _ in windows.get(top, ()) if number > here}
        kinds: dict[tuple[int, int], int] = {}
        for other, position in sorted(positions.items()):
            if known.get(position.count, position.hash) != position.hash:
                kinds.setdefault((position.count, position.hash), other)
        if kinds:
            chosen += list(kinds.values())[:READERS]
            windows |= self._records.windows(log, list(kinds.values())[:READERS])
        lacking = [
            other for other in chosen if positions[other].hash not in {digest for _, digest, _ in windows.get(other, ())}
        ]
        if lacking and len(log.ranks) > FEW:
            self._notices.request_calls(lacking)
            self._limiter.postpone_read(log, now + 2 * TICK)  # reading all positions again takes long, so they are cached
            self._cached = log.key, now + 4 * TICK, positions
        return windows

    # --- states of the other ranks ---

    def peer_statuses(self, log: CollectiveLog, positions: Positions) -> str:
        """Return the states of the other ranks, as published since the last request."""
        others = [rank for rank in log.ranks if rank != self._local.rank]
        named = verdicts.ranks_to_name(others, positions)
        statuses = self._records.statuses(log, named)
        return verdicts.peer_statuses(named, len(others), positions, statuses, self._notices.last_request[0])


def _ranks_with_history(window: Window, number: int, positions: Positions, rank: int) -> list[int]:
    """Return `rank`, and the ranks whose positions are in its history at or after call `number`."""
    digests = {count: digest for count, digest, _ in window if count >= number}
    return [rank, *(other for other, position in positions.items() if digests.get(position.count) == position.hash)]


__all__ = ["Diagnosis"]
