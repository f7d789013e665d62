"""Why a collective will never complete: ranks diverged, raised, ended or wait in any_failed(), or a timeout."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from fullshard.checks.collective_log import CollectiveLog, LoggedCall, find_desync, listed
from fullshard.checks.notices import REQUEST_INTERVAL, Notices
from fullshard.checks.state import (
    ANY_FAILED_PREFIX,
    ENDED,
    IN_ANY_FAILED,
    RAISED,
    WAITING,
    LocalState,
    Position,
    RankStatus,
    WaitState,
)
from fullshard.checks.store import RateLimiter, Records, StateStore, Window

_KINDS = 4  # maximum number of different histories to read at once
_GRACE = 0.5  # seconds to wait for the positions of all ranks after ranks were found to diverge
_RAISED_SECONDS = 2.0  # minimum seconds to wait for a rank that raised, because it may continue

Positions = dict[int, Position]


class Diagnosis:
    """Compares the published calls of the other ranks with the log of this rank."""

    def __init__(self, store: StateStore, local: LocalState, records: Records, limiter: RateLimiter, notices: Notices) -> None:
        self._store, self._local, self._records, self._limiter, self._notices = store, local, records, limiter, notices
        self._found: dict[tuple[str, int], float] = {}  # (key of a log, epoch) -> time at which ranks were found to diverge

    def of(self, log: CollectiveLog, concerned: Sequence[WaitState], now: float) -> str | None:
        """Return the verdict on a log; None if its collectives may complete.

        `concerned` has the waits that have exceeded their patience.
        """
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
        here, stuck = wait_text(rank, call), state.seconds_waiting(now)
        # Only ranks that ended before this call count. A rank that ended after it has taken part in it, and this rank waits
        # for a third one, which may only be late.
        ended = [other for other, position in positions.items() if position.flags & ENDED and position.count < call.number]
        if ended:
            return ended_text(ended, records.statuses(log, ended[:MAX_NAMED]), here)
        if not log.name.startswith(ANY_FAILED_PREFIX):
            # A host that runs ahead of its device may be in any_failed() while the device still has work queued for long.
            patient = log.abort is not None or stuck <= max(REQUEST_INTERVAL, state.patience)
            voting = self._others_in_any_failed(log, positions, call, patient=patient)
            if voting:
                return any_failed_text(voting, here)
        # Only positions published during this wait count: a rank with an older one may have raised and continued since.
        request, when = self._notices.last_request
        fresh = {other: position for other, position in positions.items() if when >= now - stuck and position.has_read(request)}
        if stuck > max(_RAISED_SECONDS, state.patience):
            raised = [other for other, position in fresh.items() if position.flags & RAISED and position.count < call.number]
            text = raised_text(records.statuses(log, raised[:MAX_NAMED]), here)
            if text is not None:
                return text
        if state.timeout is not None and stuck > state.timeout:
            late = stuck - state.timeout
            if len(fresh) == len(log.ranks) - 1 or late > REQUEST_INTERVAL:
                return timeout_text(rank, state.timeout, call, self.peer_statuses(log, positions))
        return None

    def _others_in_any_failed(self, log: CollectiveLog, positions: Positions, call: LoggedCall, *, patient: bool) -> list[int]:
        """Return the ranks that wait in an any_failed() that this rank has not called.

        While `patient`, ranks that have logged `call` do not count: they may have started it, and only its message is late. On
        the CPU it is also possible that they have queued the call and will never start it.
        """
        ranks = [
            rank
            for rank, position in positions.items()
            if position.flags & IN_ANY_FAILED and not (patient and position.count >= call.number)
        ]
        found = []
        for rank, status in self._records.statuses(log, ranks[:MAX_NAMED]).items():
            if status.any_failed is not None:
                key, number, members = status.any_failed
                mine = self._local.logs.get(key)
                if self._local.rank in members and (mine is None or mine.count < number):
                    found.append(rank)
        return found

    # --- diverged ranks ---

    def _diagnose_desync(self, log: CollectiveLog, positions: Positions, now: float) -> str | None:
        """Return the verdict on ranks that diverged; None if no difference was published."""
        windows = self._windows(log, positions)
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
        return diverged_text(number, all_ranks)

    def _windows(self, log: CollectiveLog, positions: Positions) -> dict[int, Window]:
        """Return the recent calls of this rank, and of other ranks whose calls may differ.

        Ranks with equal counts and hashes made the same calls, so the calls of one of them are read for all.
        """
        rank = self._local.rank
        windows = {rank: log.recent_calls()}
        known = {number: digest for number, digest, _ in windows[rank]}
        here = max(known, default=0)
        top = max(positions, key=lambda other: positions[other].count, default=rank)
        if top in positions and positions[top].count > here:  # the history after this rank's last call
            windows |= self._records.windows(log, [top])
            known |= {number: digest for number, digest, _ in windows.get(top, ()) if number > here}
        kinds: dict[tuple[int, int], int] = {}
        for other, position in sorted(positions.items()):
            if known.get(position.count, position.hash) != position.hash:
                kinds.setdefault((position.count, position.hash), other)
        return windows | self._records.windows(log, list(kinds.values())[:_KINDS])

    # --- states of the other ranks ---

    def peer_statuses(self, log: CollectiveLog, positions: Positions) -> str:
        """Return the states of the other ranks, as published since the last request."""
        others = [rank for rank in log.ranks if rank != self._local.rank]
        named = ranks_to_name(others, positions)
        statuses = self._records.statuses(log, named)
        return statuses_text(named, len(others), positions, statuses, self._notices.last_request[0])


def _ranks_with_history(window: Window, number: int, positions: Positions, rank: int) -> list[int]:
    """Return `rank`, and the ranks whose positions are in its history at or after call `number`."""
    digests = {count: digest for count, digest, _ in window if count >= number}
    return [rank, *(other for other, position in positions.items() if digests.get(position.count) == position.hash)]


# --- texts: statuses in, text out ---

MAX_NAMED = 64  # maximum number of ranks to name in one text

_ADVICE_ON_UNITS = (
    "All ranks must run the same units in the same order. On a rank with nothing to compute for a unit, call its join(). If "
    "some ranks may have raised, call any_failed() on all ranks."
)
_ADVICE_ON_WRITES = (
    "All ranks must make the same optimizer steps, loads and writes to their shards. Make them on all ranks, or change full "
    "parameters in fullshard.full_params(). Register hooks on parameters on all ranks or on none. If weights differ already, "
    "load a checkpoint on all ranks."
)
# texts of steps and writes, such as "mul_() of 'weight' of 'layers.0'"
_WRITES = re.compile(
    r"\.step\(\) of |load_state_dict\(\)|\w+\(\) of '[^']*' of '|assignment to|any_failed\(\) after|added to the gradients"
)


def diverged_text(number: int, calls: Mapping[str, Sequence[int]]) -> str:
    """Return the text for ranks that made different calls. `calls` has the ranks of each call text.

    >>> text = diverged_text(2, {"all_gather of 'b' (forward)": [0], "all_gather of 'c' (forward)": [1, 2]})
    >>> text[: text.index(". ")]
    "Ranks diverged at collective 2: rank 0 ran all_gather of 'b' (forward); ranks 1 and 2 ran all_gather of 'c' (forward)"
    """
    texts = "; ".join(f"{listed(ranks)} ran {text}" for text, ranks in calls.items())
    if len(calls) == 1:  # the texts are equal, but the hashes differ
        texts += ", but with different parameters, shapes or dtypes, or after different collectives"
    return f"Ranks diverged at collective {number}: {texts}. {_ADVICE_ON_WRITES if _has_write(calls) else _ADVICE_ON_UNITS}"


def _has_write(calls: Iterable[str]) -> bool:
    """Return True if a call writes to shards or gradients instead of communicating."""
    return any(_WRITES.search(text) for text in calls)


def wait_text(rank: int, call: LoggedCall) -> str:
    """Return the clause for this rank, which waits in `call`."""
    return f"rank {rank} waits in {call}"


def ended_text(ranks: Sequence[int], statuses: Mapping[int, RankStatus], here: str) -> str:
    """Return the text for ranks that ended the program while this rank waits for them."""
    last = "; ".join(f"{listed([rank])}: {status}" for rank, status in statuses.items())
    return f"{listed(ranks)} ended the program while {here}. {last}"


def any_failed_text(ranks: Sequence[int], here: str) -> str:
    """Return the text for ranks that wait in any_failed() while this rank waits for them."""
    return (
        f"{listed(ranks)} {'is' if len(ranks) == 1 else 'are'} in fullshard.any_failed() while {here}. "
        "The step failed or ended early there. Call any_failed() on all ranks."
    )


def raised_text(statuses: Mapping[int, RankStatus], here: str) -> str | None:
    """Return the text for ranks that raised and did not continue; None if no status has an exception."""
    reasons = [f"{listed([rank])} raised {status.exception}" for rank, status in statuses.items() if status.exception]
    if not reasons:
        return None
    return (
        f"{'; '.join(reasons)}, while {here}. The step failed there. End the program, or call any_failed() on "
        "all ranks to skip the step together."
    )


def timeout_text(rank: int, timeout: float, call: LoggedCall, there: str) -> str:
    """Return the text for this rank, which waited longer than its timeout. `there` has the states of the other ranks."""
    return f"rank {rank} waited {timeout:g} seconds (CheckPolicy.timeout) in {call}. {there}"


def ranks_to_name(others: Sequence[int], positions: Mapping[int, Position]) -> list[int]:
    """Return at most MAX_NAMED ranks to name in a text. Ranks that do not wait come first: the others wait for them."""
    waiting = [rank for rank in others if rank in positions and positions[rank].flags & WAITING]
    awaited = [rank for rank in others if rank not in waiting]
    return sorted([*awaited, *waiting][:MAX_NAMED])


def statuses_text(
    named: Sequence[int], others: int, positions: Mapping[int, Position], statuses: Mapping[int, RankStatus], request: int
) -> str:
    """Return the text with the states of other ranks.

    Args:
        named: ranks to name.
        others: number of other ranks.
        positions: published positions of the ranks.
        statuses: published statuses of the ranks.
        request: number of the notice that requested the positions; a rank that has not read it does not answer.

    >>> statuses_text([1], 1, {1: Position(3, 0, notices_read=4)}, {}, request=4), statuses_text([1], 1, {}, {}, request=4)
    ('rank 1: waiting, at collective 3', 'rank 1: does not answer')
    """
    by_text: dict[str, list[int]] = {}
    for rank in named:
        position, status = positions.get(rank), statuses.get(rank)
        if position is not None and position.flags & ENDED:
            text = "ended the program" if status is None else f"ended the program, last status: {status}"
        elif position is None or not position.has_read(request):
            text = "does not answer" if status is None else f"does not answer, last status: {status}"
        else:  # with many ranks, a waiting rank publishes its position only
            text = f"waiting, at collective {position.count}" if status is None else str(status)
        by_text.setdefault(text, []).append(rank)
    texts = "; ".join(f"{listed(ranks)}: {text}" for text, ranks in by_text.items())
    return texts if len(named) == others else f"{texts}; and {others - len(named)} more"


__all__ = [
    "Diagnosis",
]
