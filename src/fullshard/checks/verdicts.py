"""Error texts: why a collective will never complete, and the states of the other ranks. Pure: statuses in, text out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from fullshard.checks.collective_log import LoggedCall, listed
from fullshard.checks.status import ENDED, WAITING, Position, RankStatus

MAX_NAMED = 64  # maximum number of ranks to name in one text

_ADVICE_ON_UNITS = (
    "All ranks must run the same units in the same order. On a rank with nothing to compute for a unit, call its join(). If "
    "some ranks may have raised, call any_failed() on all ranks."
)
_ADVICE_ON_WRITES = (
    "All ranks must make the same optimizer steps, loads and writes to their shards. Make them on all ranks, or change full "
    "parameters in fullshard.full_params()."
)
# texts of steps and writes, such as "mul_() of 'weight' of 'layers.0'"
_WRITES = re.compile(r"\.step\(\) of |load_state_dict\(\)|\w+\(\) of '[^']*' of '|assignment to|added to the gradients")


def diverged(number: int, calls: Mapping[str, Sequence[int]]) -> str:
    """Return the text for ranks that made different calls. `calls` has the ranks of each call text.

    >>> text = diverged(2, {"all_gather of 'b' (forward)": [0], "all_gather of 'c' (forward)": [1, 2]})
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


def waits_in(rank: int, call: LoggedCall) -> str:
    """Return the clause for this rank, which waits in `call`."""
    return f"rank {rank} waits in {call}"


def ended(ranks: Sequence[int], statuses: Mapping[int, RankStatus], here: str) -> str:
    """Return the text for ranks that ended the program while this rank waits for them."""
    last = "; ".join(f"{listed([rank])}: {status}" for rank, status in statuses.items())
    return f"{listed(ranks)} ended the program while {here}. {last}"


def in_any_failed(ranks: Sequence[int], here: str) -> str:
    """Return the text for ranks that wait in any_failed() while this rank waits for them."""
    return (
        f"{listed(ranks)} {'is' if len(ranks) == 1 else 'are'} in fullshard.any_failed() while {here}. "
        "The step failed or ended early there. Call any_failed() on all ranks."
    )


def raised(statuses: Mapping[int, RankStatus], here: str) -> str | None:
    """Return the text for ranks that raised and did not continue; None if no status has an exception."""
    reasons = [f"{listed([rank])} raised {status.exception}" for rank, status in statuses.items() if status.exception]
    if not reasons:
        return None
    return (
        f"{'; '.join(reasons)}, while {here}. The step failed there. End the program, or call any_failed() on "
        "all ranks to skip the step together."
    )


def timed_out(rank: int, timeout: float, call: LoggedCall, there: str) -> str:
    """Return the text for this rank, which waited longer than its timeout. `there` has the states of the other ranks."""
    return f"rank {rank} waited {timeout:g} seconds (CheckPolicy.timeout) in {call}. {there}"


def ranks_to_name(others: Sequence[int], positions: Mapping[int, Position]) -> list[int]:
    """Return at most MAX_NAMED ranks to name in a text. Ranks that do not wait come first: the others wait for them."""
    waiting = [rank for rank in others if rank in positions and positions[rank].flags & WAITING]
    awaited = [rank for rank in others if rank not in waiting]
    return sorted([*awaited, *waiting][:MAX_NAMED])


def peer_statuses(
    named: Sequence[int], others: int, positions: Mapping[int, Position], statuses: Mapping[int, RankStatus], request: int
) -> str:
    """Return the text with the states of other ranks.

    Args:
        named: ranks to name.
        others: number of other ranks.
        positions: published positions of the ranks.
        statuses: published statuses of the ranks.
        request: number of the notice that requested the positions; a rank that has not read it does not answer.

    >>> peer_statuses([1], 1, {1: Position(3, 0, notices_read=4)}, {}, request=4), peer_statuses([1], 1, {}, {}, request=4)
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
    "MAX_NAMED",
    "diverged",
    "ended",
    "in_any_failed",
    "peer_statuses",
    "raised",
    "ranks_to_name",
    "timed_out",
    "waits_in",
]
