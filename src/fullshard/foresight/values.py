"""What a step decides by values of tensors, which meta does not have.

    Answers   what each place of the program that asks for a value is told in one trace
    decide    traces a step, and traces it again with the other answers where only data could tell

Models of transformers ask such things in most forwards, as `if attention_mask.all():`.
"""

from __future__ import annotations

import linecache
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from fullshard import _torch
from fullshard.frontend.known_values import Known

MOST_ANSWERS = 1000
"""How often one place may be told the same: a loop that ends by values would go on for ever."""


class Untraceable(ValueError):
    """What cannot be traced, in a line that says what to do."""


class UntraceablePlace(Untraceable):
    """The same, of a line of the program that the text does not name yet: that of its traceback."""


# --- who asks ---


@dataclass(slots=True)
class Asked:
    """A place that asks for a value.

    place: as in "masking_utils.py:354".      line: the text of it.      answer: what it was told last.
    free: whether only data can tell.      of_batch: whether the batch's values told it.      times: how often it asked.
    """

    place: str
    line: str
    answer: object = None
    free: bool = False
    of_batch: bool = False
    times: int = 0


@dataclass(slots=True)
class Answers:
    """What places are told in one trace.

    given: by place, what the user says.      tried: by place, the other answer, where data would tell.
    refused: what an operator raised that has no values on meta, as none would where values are.
    used: the names of `given` that were asked for.
    """

    given: Mapping[str, Any]
    tried: Mapping[str, bool] = field(default_factory=dict)
    asked: dict[str, Asked] = field(default_factory=dict)
    refused: Exception | None = None
    used: set[str] = field(default_factory=set)

    def scalar(self, tensor: Tensor, known: Known | None) -> Any:
        """The number or truth that a program asks of a tensor."""
        place, line = asking()
        told = self._told(place)
        if told is not None:
            return told(tensor) if callable(told) else told
        value = None if known is None else known.value()
        if value is not None and known is not None:
            return self._say(place, line, value.item(), of_batch=known.of_batch)
        if tensor.dtype == torch.bool:
            return self._say(place, line, None)
        raise Untraceable(
            f"{place} (`{line}`) asks for a number that depends on data, which meta does not have: say it by "
            f"explain(footprints={{'{place}': 128}}), on the command line by --footprint {place}=128, or give a batch that has "
            "values"
        )

    def equal(self, one: Known | None, other: Known | None) -> Any:
        """Whether two tensors of one shape are equal."""
        place, line = asking()
        told = self._told(place)
        if told is not None:
            return told
        values = [None if known is None else known.value() for known in (one, other)]
        if values[0] is None or values[1] is None or one is None or other is None:
            return self._say(place, line, None)
        return self._say(place, line, torch.equal(values[0], values[1]), of_batch=one.of_batch or other.of_batch)

    def on_host(self, tensor: Tensor, known: Known | None) -> Tensor:
        """The values of a tensor that a program copies to the host."""
        place, line = asking()
        told = self._told(place)
        if told is not None:
            return torch.as_tensor(told(tensor) if callable(told) else told, dtype=tensor.dtype).reshape(tensor.shape)
        value = None if known is None else known.value()
        if value is None or known is None:
            raise Untraceable(
                f"{place} (`{line}`) copies values to the host that depend on data, which meta does not have: say them by "
                f"explain(footprints={{'{place}': [...]}}), as many as a tensor of {tuple(tensor.shape)} has, or give a batch "
                "that has values"
            )
        self._say(place, line, _short(value), of_batch=known.of_batch)
        return value.clone()

    def shaped(self, found: Any, *, of_batch: bool) -> None:
        """The shape of this follows from values."""
        if of_batch:
            shapes = [tuple(leaf.shape) for leaf in _torch.tree_leaves(found) if isinstance(leaf, Tensor)]
            self._say(*asking(), f"of shape {shapes[0]}", of_batch=True)

    def _told(self, place: str) -> Any:
        for name, told in self.given.items():
            if place == name or name.endswith(f"/{place}"):
                self.used.add(name)
                return told
        return None

    def _say(self, place: str, line: str, answer: Any, *, of_batch: bool = False) -> Any:
        """Answer a place, and note it. answer: None if only data tell."""
        free = answer is None
        if free or of_batch:
            answer = self.tried.get(place, True if free else answer)
        found = self.asked.setdefault(place, Asked(place, line))
        found.answer, found.times = answer, found.times + 1
        found.free, found.of_batch = found.free or free, found.of_batch or of_batch
        if free and found.times > MOST_ANSWERS:
            self.refused = Untraceable(
                f"{place} (`{line}`) was told {answer} {MOST_ANSWERS} times, and asks again: a loop that ends by data. Say how "
                f"it ends by explain(footprints={{'{place}': function}}), called with the tensor each time"
            )
            raise self.refused
        return answer


def _short(value: Tensor) -> str:
    return f"{value.flatten()[:4].tolist()}{'...' if value.numel() > 4 else ''}"


_OURS = str(Path(__file__).parent.parent)
_TORCHS = str(Path(torch.__file__).parent)
_STANDARD = sysconfig.get_path("stdlib")


def asking() -> tuple[str, str]:
    """(the place in the user's program that is running, the text of its line)."""
    for frame, line in traceback.walk_stack(None):
        if place := place_of(frame.f_code.co_filename, line):
            return place, " ".join(linecache.getline(frame.f_code.co_filename, line).split())[:100]
    return "somewhere", ""


def place_of(file: str, line: int) -> str:
    """As in "model.py:12"; "" of a line of torch, of this library or of the standard one."""
    is_standard = file.startswith(_STANDARD) and "-packages" not in file
    return "" if is_standard or file.startswith((_OURS, _TORCHS, "<frozen")) else f"{Path(file).name}:{line}"


# --- both ways ---

Run = TypeVar("Run")


MOST_TRACES = 32
"""Traces of one step, each with other answers, before a program is refused."""


def decide(
    trace: Callable[[Answers], Run], given: Mapping[str, Any], differ: Callable[[Run, Run], str | None]
) -> tuple[Run, tuple[str, ...]]:
    """Trace a step; where only data tell what it does, trace every combination of answers.

    A place is told the same each time that it asks.

    Args:
        trace: runs a step on meta with these answers.
        given: what the user says, by place.
        differ: in what two traces differ, None if they are of one program.

    Returns:
        The trace, and lines of a report: what was taken from the batch, where another answer gives another program.

    Raises:
        ValueError: naming the place and the choice, where several answers are possible and give different programs.
    """
    answers, found = _first(trace, given)
    todo = _others(answers)
    for count, (asked, tried) in enumerate(iter(lambda: todo.pop() if todo else None, None)):
        if count == MOST_TRACES:
            raise _undecided(asked, f"as it does on more than {MOST_TRACES} combinations of such answers")
        other = Answers(given, tried)
        try:
            differs = differ(found, trace(other))
        except Exception as failure:
            if not _is_of_the_program(failure, other):
                raise _undecided(asked, "with the other answer it cannot be traced") from failure
            continue  # the program itself refuses the other answer
        if differs is not None:
            raise _undecided(asked, f"with the other answer {differs}")
        todo += _others(other)
    return found, tuple(_taken_from_batch(trace, given, answers, found, differ))


def _first(trace: Callable[[Answers], Run], given: Mapping[str, Any]) -> tuple[Answers, Run]:
    """A trace that the program does not refuse. Where only data tell, True is tried first."""
    tried: dict[str, bool] = {}
    while True:
        answers = Answers(given, dict(tried))
        try:
            return answers, trace(answers)
        except Exception as failure:
            last = next((one for one in reversed(answers.asked.values()) if one.free and one.place not in tried), None)
            if last is None or not _is_of_the_program(failure, answers):
                raise
            tried[last.place] = False


def _others(answers: Answers) -> list[tuple[Asked, dict[str, bool]]]:
    """What is left to try behind a trace: the other answer at each place that only data tell, those before as they were."""
    found: list[tuple[Asked, dict[str, bool]]] = []
    before = dict(answers.tried)
    for asked in answers.asked.values():
        if asked.free and asked.place not in answers.tried:
            found.append((asked, {**before, asked.place: not asked.answer}))
            before[asked.place] = bool(asked.answer)
    return found


def _taken_from_batch(
    trace: Callable[[Answers], Run],
    given: Mapping[str, Any],
    answers: Answers,
    found: Run,
    differ: Callable[[Run, Run], str | None],
) -> Iterator[str]:
    """What was decided by the batch's values, where another batch might be decided otherwise."""
    for asked in [one for one in answers.asked.values() if one.of_batch]:
        told = f"{asked.place} (`{asked.line}`) is {asked.answer} by the values of this batch"
        if not isinstance(asked.answer, bool):
            yield told
            continue
        try:
            differs = differ(found, trace(Answers(given, {**answers.tried, asked.place: not asked.answer})))
        except Exception:  # refused by the program, or by meta: this batch's answer stands
            continue
        if differs is not None:
            yield f"{told}; otherwise {differs}"


def _is_of_the_program(failure: Exception, answers: Answers) -> bool:
    """Whether the program itself raised this, and no operator that has no values on meta."""
    return answers.refused is None and not isinstance(failure.__cause__ or failure, (Untraceable, NotImplementedError))


def _undecided(asked: Asked, differs: str) -> Untraceable:
    return Untraceable(
        f"{asked.place} (`{asked.line}`) depends on data, and the step depends on it ({differs}): say it by "
        f"explain(footprints={{'{asked.place}': True}}) or False, on the command line by --footprint {asked.place}=True, or "
        "give a batch that has values"
    )


__all__ = ["Answers", "Asked", "Untraceable", "UntraceablePlace", "decide", "place_of"]
