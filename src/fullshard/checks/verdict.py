"""Verdicts: why a collective will never complete, since ranks diverged, raised or ended. `Watchdog` judges timeouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fullshard.checks.collective_log import CollectiveLog, LoggedCall, find_desync, listed
from fullshard.checks.state import WaitState
from fullshard.checks.store import StateStore, Window

MAX_NAMED = 64  # maximum number of ranks whose state or exception one text gives

_KINDS = 4  # maximum number of different histories to read at once
_RAISED_SECONDS = 2.0  # minimum seconds to wait for a rank that raised, because it may continue
_ADVICE = (
    "All ranks must run the same units, optimizer steps and calls of any_failed(), in the same order. On a rank with nothing "
    "to compute for a unit, call its join()."
)


class Inquiry:
    """The states of the other ranks in one log. A state published after notice number `request` is a reply to it."""

    def __init__(self, store: StateStore, log: CollectiveLog, request: int) -> None:
        self._store, self._log, self._request = store, log, request
        self.states = store.states(log)  # of the other ranks

    @property
    def is_complete(self) -> bool:
        """True if every other rank has replied."""
        return sum(state.replies_to(self._request) for state in self.states.values()) == len(self._log.ranks) - 1

    # --- verdicts ---

    def why_diverged(self) -> tuple[str, bool] | None:
        """Return the text of the verdict, and whether it names all ranks, if ranks made different calls; else None."""
        windows = self._windows()
        found = find_desync(windows)
        if found is None:
            return None
        number, calls = found
        ranks = {
            text: sorted({other for rank in ranks for other in self._with_history(windows[rank], number, rank)})
            for text, ranks in calls.items()
        }
        return diverged_text(number, ranks), sum(map(len, ranks.values())) == len(self._log.ranks)

    def why_waiting(self, wait: WaitState, call: LoggedCall, seconds: float) -> str | None:
        """Return why a thread that has waited for `seconds` in `call` waits for ever; None if its wait may end."""
        here = f"rank {self._store.rank} waits in {call}"
        # Only ranks that ended before this call are a reason: one that ended later took part in it, so this rank waits for a
        # third one, which may just be late.
        behind = {rank: state for rank, state in self.states.items() if state.count < call.number}
        ended = {rank: state for rank, state in behind.items() if state.ended}
        if ended:
            failures = [f"{listed([rank])} raised {state.exception}" for rank, state in ended.items() if state.exception]
            how = f"{'; '.join(failures[:MAX_NAMED])}, and {listed([*ended])}" if failures else listed([*ended])
            last = "; ".join(f"{listed([rank])}: {state}" for rank, state in [*ended.items()][:MAX_NAMED])
            return f"{how} ended the program or its process group while {here}. {last}"
        # A rank that raised may continue, so its state counts only if it was published after the request. With tags (gloo) it
        # counts even if the rank has logged the call: an all-reduce over replicas is logged some time before it starts.
        known = self.states if self._log.tagged else behind
        raised = {rank: state for rank, state in known.items() if state.exception and state.replies_to(self._request)}
        if raised and seconds > max(_RAISED_SECONDS, wait.patience):
            reasons = [f"{listed([rank])} raised {state.exception}" for rank, state in [*raised.items()][:MAX_NAMED]]
            return f"{'; '.join(reasons)}, while {here}. The step failed there"
        return None

    def _windows(self) -> dict[int, Window]:
        """Return the recent calls of this rank, of the one that made most, and of some whose calls may differ from theirs.

        Ranks with equal counts and hashes made the same calls, so the calls of one of them are read for all.
        """
        rank, states = self._store.rank, self.states
        windows = {rank: self._log.recent_calls()}
        known = {number: digest for number, digest, _ in windows[rank]}
        here = max(known, default=0)
        top = max(states, key=lambda other: states[other].count, default=rank)
        if top in states and states[top].count > here:  # the history after this rank's last call
            windows |= self._store.windows(self._log, [top])
            known |= {number: digest for number, digest, _ in windows.get(top, ()) if number > here}
        kinds: dict[tuple[int, int], int] = {}
        for other, state in sorted(states.items()):
            if known.get(state.count, state.hash) != state.hash:
                kinds.setdefault((state.count, state.hash), other)
        return windows | self._store.windows(self._log, list(kinds.values())[:_KINDS])

    def _with_history(self, window: Window, number: int, rank: int) -> list[int]:
        """Return `rank`, and the ranks whose count and hash are in its `window`, at call `number` or later."""
        digests = {count: digest for count, digest, _ in window if count >= number}
        return [rank, *(other for other, state in self.states.items() if digests.get(state.count) == state.hash)]

    # --- states of the other ranks ---

    def __str__(self) -> str:
        """The states of the other ranks. If there are too many, ranks that wait are left out first: they wait for the rest."""
        others = [rank for rank in self._log.ranks if rank != self._store.rank]
        waiting = [rank for rank in others if rank in self.states and self.states[rank].waits is not None]
        named = sorted([*(rank for rank in others if rank not in waiting), *waiting][:MAX_NAMED])
        by_text: dict[str, list[int]] = {}
        for rank in named:
            by_text.setdefault(self._state_of(rank), []).append(rank)
        texts = "; ".join(f"{listed(ranks)}: {text}" for text, ranks in by_text.items())
        return texts if len(named) == len(others) else f"{texts}; and {len(others) - len(named)} more"

    def _state_of(self, rank: int) -> str:
        state = self.states.get(rank)
        if state is None:
            return "does not answer"
        if state.ended:
            return f"ended the program or its process group, last state: {state}"
        return str(state) if state.replies_to(self._request) else f"does not answer, last state: {state}"


def diverged_text(number: int, calls: Mapping[str, Sequence[int]]) -> str:
    """Return the text for ranks that made different calls. `calls` maps the text of each call to its ranks.

    >>> text = diverged_text(2, {"all_gather of 'b' (forward)": [0], "all_gather of 'c' (forward)": [1, 2]})
    >>> text[: text.index(". ")]
    "Ranks diverged at collective 2: rank 0 ran all_gather of 'b' (forward); ranks 1 and 2 ran all_gather of 'c' (forward)"
    """
    texts = "; ".join(f"{listed(ranks)} ran {text}" for text, ranks in calls.items())
    if len(calls) == 1:  # the texts are equal, but the hashes differ
        texts += ", but with different parameters, shapes or dtypes, or after different collectives"
    return f"Ranks diverged at collective {number}: {texts}. {_ADVICE}"
