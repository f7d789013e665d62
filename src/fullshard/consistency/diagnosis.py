"""Finds why there is no use in waiting: ranks parted, left, ended, or meet in any_failed(), or it takes too long."""

from __future__ import annotations

from collections.abc import Sequence

from fullshard.consistency import verdicts
from fullshard.consistency.board import NoticeBoard
from fullshard.consistency.collective_log import CollectiveLog, LoggedCall, find_desync
from fullshard.consistency.local_state import MEETING, LocalState, WaitState
from fullshard.consistency.notices import AGAIN, Notices
from fullshard.consistency.records import Records, Window
from fullshard.consistency.status import ENDED, LEFT, MEETS, Position
from fullshard.consistency.turns import FEW, READERS, TICK, Turns

_GRACE = 0.5  # seconds for which ranks that parted wait for what the others say of it
_LEFT = 2.0  # seconds for which a rank waits at least for one that left by an exception, and may go on

Positions = dict[int, Position]


class Diagnosis:
    """Reads what the others published of a log, and compares it with what this rank did."""

    def __init__(self, board: NoticeBoard, local: LocalState, records: Records, turns: Turns, notices: Notices) -> None:
        self._board, self._local, self._records, self._turns, self._notices = board, local, records, turns, notices
        self._just_read: tuple[str, float, Positions] = "", 0.0, {}  # of a log: positions, and until when they count
        self._found: dict[tuple[str, int], float] = {}  # when it was first seen that ranks of a log parted

    def of(self, log: CollectiveLog, concerned: Sequence[WaitState], now: float) -> str | None:
        """Why there is no use in waiting, None if there may be. `concerned`: threads that wait in the log for long."""
        key, until, positions = self._just_read
        if key != log.key or now > until:
            positions = self._records.positions(log)
        text = self._parted(log, positions, now)
        for state in concerned:
            call = state.waits_in(log)
            if text is None and call is not None:  # else it went on meanwhile
                text = self._in_vain(log, positions, state, call, now)
        return text

    def _in_vain(self, log: CollectiveLog, positions: Positions, state: WaitState, call: LoggedCall, now: float) -> str | None:
        """Why one thread waits in vain."""
        records, rank = self._records, self._local.rank
        here, stuck = verdicts.waits_in(rank, call), state.seconds_waiting(now)
        gone = [other for other, place in positions.items() if place.flags & ENDED]
        if gone:
            return verdicts.ended(gone, records.statuses(log, gone[: verdicts.TOLD]), here)
        if not log.name.startswith(MEETING):
            meeting = self._meeting_without(log, positions, call, patient=stuck <= max(AGAIN, state.patience))
            if meeting:
                return verdicts.meeting(meeting, here)
        asked, when = self._notices.asked
        fresh = {other: place for other, place in positions.items() if when >= now - stuck and place.has_heard(asked)}
        if stuck > max(_LEFT, state.patience):
            left = [other for other, place in fresh.items() if place.flags & LEFT and place.count < call.number]
            text = verdicts.left(records.statuses(log, left[: verdicts.TOLD]), here)
            if text is not None:
                return text
        if state.timeout is not None and stuck > state.timeout:
            late = stuck - state.timeout
            if len(fresh) == len(log.ranks) - 1 or late > AGAIN:
                return verdicts.timed_out(rank, state.timeout, call, self.whereabouts(log, positions))
        return None

    def _meeting_without(self, log: CollectiveLog, positions: Positions, call: LoggedCall, *, patient: bool) -> list[int]:
        """The ranks that wait in an any_failed() to which this rank has not come.

        A rank that has made the call itself may have sent its part, which is slow to arrive, or put it off for good:
        such ranks count only where this rank has waited for long (not `patient`).
        """
        ranks = [
            rank for rank, place in positions.items() if place.flags & MEETS and not (patient and place.count >= call.number)
        ]
        found = []
        for rank, said in self._records.statuses(log, ranks[: verdicts.TOLD]).items():
            if said.meets is not None:
                key, number, members = said.meets
                mine = self._local.logs.get(key)
                if self._local.rank in members and (mine is None or mine.count < number):
                    found.append(rank)
        return found

    # --- ranks that parted ---

    def _parted(self, log: CollectiveLog, positions: Positions, now: float) -> str | None:
        """Where the ranks parted, None if they did not, as far as is known."""
        windows = self._windows(log, positions, now)
        found = find_desync(windows)
        if found is None:
            return None
        number, calls = found
        everybody = {
            text: sorted({other for rank in ranks for other in _alike(windows[rank], number, positions, rank)})
            for text, ranks in calls.items()
        }
        since = self._found.setdefault((log.key, log.epoch), now)
        if sum(map(len, everybody.values())) < len(log.ranks) and now < since + max(_GRACE, self._board.period):
            return None  # others may say so soon, and all are named
        return verdicts.parted(number, everybody)

    def _windows(self, log: CollectiveLog, positions: Positions, now: float) -> dict[int, Window]:
        """The last calls of this rank, and of others whose calls may differ.

        Ranks of one count and one hash said the same, so the last calls of one of them are read for all; of ranks whose
        position is in no history that is known here, one of each kind is asked to show its last calls.
        """
        rank = self._local.rank
        windows = {rank: log.remembered()}
        known = {number: digest for number, digest, _ in windows[rank]}
        here = max(known, default=0)
        top = max(positions, key=lambda other: positions[other].count, default=rank)
        chosen: list[int] = []
        if top in positions and positions[top].count > here:  # what came behind this rank's last call, it may know
            chosen = [top]
            windows |= self._records.windows(log, chosen)
            known |= {number: digest for number, digest, _ in windows.get(top, ()) if number > here}
        kinds: dict[tuple[int, int], int] = {}
        for other, place in sorted(positions.items()):
            if known.get(place.count, place.hash) != place.hash:
                kinds.setdefault((place.count, place.hash), other)
        if kinds:
            chosen += list(kinds.values())[:READERS]
            windows |= self._records.windows(log, list(kinds.values())[:READERS])
        lacking = [
            other for other in chosen if positions[other].hash not in {digest for _, digest, _ in windows.get(other, ())}
        ]
        if lacking and len(log.ranks) > FEW:
            self._notices.ask_to_show(lacking)
            self._turns.put_off_reading(log, now + 2 * TICK)  # to read all positions again would take long
            self._just_read = log.key, now + 4 * TICK, positions
        return windows

    # --- where the others are ---

    def whereabouts(self, log: CollectiveLog, positions: Positions) -> str:
        """Where the other ranks are since this one asked, in one sentence."""
        others = [rank for rank in log.ranks if rank != self._local.rank]
        named = verdicts.named_in_whereabouts(others, positions)
        statuses = self._records.statuses(log, named)
        return verdicts.whereabouts(named, len(others), positions, statuses, self._notices.asked[0])


def _alike(window: Window, number: int, positions: Positions, rank: int) -> list[int]:
    """The ranks that came to call `number` by the history of `rank`, as far as their positions say so."""
    digests = {count: digest for count, digest, _ in window if count >= number}
    return [rank, *(other for other, place in positions.items() if digests.get(place.count) == place.hash)]


__all__ = ["Diagnosis"]
