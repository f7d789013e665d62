"""The sentences in which ranks are told why waiting is in vain, and where the others are. Pure: statuses in, text out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from fullshard.consistency.collective_log import LoggedCall, listed
from fullshard.consistency.status import ENDED, WAITS, Position, RankStatus

TOLD = 64  # ranks whose whereabouts are told in one sentence

_ADVICE_ON_UNITS = (
    "All ranks must run the same units in the same order: have a rank that has nothing to compute for a unit call its join(), "
    "and all ranks any_failed() when some may have raised"
)
_ADVICE_ON_WRITES = (
    "All ranks must step, load and write to their shards alike: do on all of them what one does, or change full parameters in "
    "fullshard.full_params()"
)
_WRITES = re.compile(r"\.step\(\) of |load_state_dict\(\)|\w+\(\) of '|assignment to|added to the gradients")


def parted(number: int, calls: Mapping[str, Sequence[int]]) -> str:
    """Ranks called different things at call `number`: by text of the call, the ranks.

    >>> parted(2, {"'b' forward gather": [0], "'c' forward gather": [1, 2]})[:90]
    "the ranks parted at call 2. rank 0: 'b' forward gather; ranks 1 and 2: 'c' forward gather."
    """
    texts = "; ".join(f"{listed(ranks)}: {text}" for text, ranks in calls.items())
    if len(calls) == 1:
        texts += ", but of other parameters, shapes or dtypes, or after other calls"
    return f"the ranks parted at call {number}. {texts}. {_ADVICE_ON_WRITES if _writes(calls) else _ADVICE_ON_UNITS}"


def _writes(calls: Iterable[str]) -> bool:
    """Whether one of the calls in which ranks differ writes to shards or gradients, instead of sending anything."""
    return any(_WRITES.search(text) for text in calls)


def waits_in(rank: int, call: LoggedCall) -> str:
    """Where the rank is that waits."""
    return f"rank {rank} waits in {call}"


def ended(ranks: Sequence[int], statuses: Mapping[int, RankStatus], here: str) -> str:
    """Ranks ended their programs, while this one waits."""
    last = "; ".join(f"{listed([rank])}: {said}" for rank, said in statuses.items())
    return f"{listed(ranks)} ended the program, while {here}. {last}"


def meeting(ranks: Sequence[int], here: str) -> str:
    """Ranks wait in any_failed(), while this one waits for them."""
    return (
        f"{listed(ranks)} {'is' if len(ranks) == 1 else 'are'} in fullshard.any_failed(), and {here}: "
        "the step failed, or ended early, there. Call any_failed() on all ranks"
    )


def left(statuses: Mapping[int, RankStatus], here: str) -> str | None:
    """Ranks left what they were in the midst of, by exceptions, and did not go on; None if they say nothing of it."""
    reasons = [f"{listed([rank])} left {said.left}" for rank, said in statuses.items() if said.left]
    if not reasons:
        return None
    return (
        f"{'; '.join(reasons)}, and {here}: the step failed there. End the program, or call any_failed() on "
        "all ranks to skip the step together"
    )


def timed_out(rank: int, timeout: float, call: LoggedCall, there: str) -> str:
    """The rank waited for as long as it was told to."""
    return f"rank {rank} waited {timeout:g} seconds (CheckPolicy.timeout) in {call}. {there}"


def named_in_whereabouts(others: Sequence[int], positions: Mapping[int, Position]) -> list[int]:
    """Of many ranks, those that a sentence names: first the ones that others wait for."""
    waiting = [rank for rank in others if rank in positions and positions[rank].flags & WAITS]
    asked = [rank for rank in others if rank not in waiting]
    return sorted([*asked, *waiting][:TOLD])


def whereabouts(
    named: Sequence[int], others: int, positions: Mapping[int, Position], statuses: Mapping[int, RankStatus], asked: int
) -> str:
    """Where these ranks are, out of so many others. `asked`: the notice by which they were asked.

    >>> whereabouts([1], 1, {1: Position(3, 0, heard=4)}, {}, asked=4), whereabouts([1], 1, {}, {}, asked=4)
    ('rank 1: waiting, at call 3', 'rank 1: does not answer')
    """
    by_text: dict[str, list[int]] = {}
    for rank in named:
        place, said = positions.get(rank), statuses.get(rank)
        if place is not None and place.flags & ENDED:
            text = "ended the program" if said is None else f"ended the program, was {said}"
        elif place is None or not place.has_heard(asked):
            text = "does not answer" if said is None else f"does not answer, was {said}"
        else:
            text = f"waiting, at call {place.count}" if said is None else str(said)
        by_text.setdefault(text, []).append(rank)
    texts = "; ".join(f"{listed(ranks)}: {text}" for text, ranks in by_text.items())
    return texts if len(named) == others else f"{texts}; and {others - len(named)} more"


__all__ = ["TOLD", "ended", "left", "meeting", "named_in_whereabouts", "parted", "timed_out", "waits_in", "whereabouts"]
