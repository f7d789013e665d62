"""Control flow that depends on tensor values, which the meta device does not have.

    Answers   the values that one trace returns to places of the program that read them
    decide    traces a step, and repeats it with other answers where a value depends on data

Models of transformers read values in most forwards, as in `if attention_mask.all():`.
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

from fullshard.core import tensors_in
from fullshard.wrap.known_values import KnownValue

MOST_ANSWERS = 1000
"""Maximum number of reads at one data-dependent place: a loop whose end depends on a value would never end otherwise."""


class Untraceable(ValueError):
    """Raised for a step that cannot be traced; its one-line text names the remedy."""


class UntraceablePlace(Untraceable):
    """Untraceable error whose text does not name the line of the program yet. The caller adds it from the traceback."""


# --- reads of values ---


@dataclass(slots=True)
class ValueRead:
    """Reads of a value at one place of the program."""

    place: str  # for example "masking_utils.py:354"
    line: str  # source text of the line
    answer: object = None  # last returned value
    free: bool = False  # True if the value depends on unknown data
    of_batch: bool = False  # True if the value depends on the batch's values
    times: int = 0  # number of reads


@dataclass(slots=True)
class Answers:
    """Answers to the reads of values in one trace."""

    given: Mapping[str, Any]  # by place: the user's footprints
    tried: Mapping[str, bool] = field(default_factory=dict)  # by place: chosen answers where the value depends on data
    reads: dict[str, ValueRead] = field(default_factory=dict)  # by place: reads so far
    # Failure of an operator that needs values. It would not fail on a real device.
    refused: Exception | None = None
    used: set[str] = field(default_factory=set)  # names of `given` that were used

    def scalar(self, tensor: Tensor, known: KnownValue | None) -> Any:
        """Return the number or bool for `tensor.item()`. A number that depends on data is refused."""
        place, line, given = self._place()
        if given is not None:
            return given(tensor) if callable(given) else given
        value, of_batch = _value_of(known)
        if value is not None:
            return self._answer(place, line, value.item(), of_batch=of_batch)
        if tensor.dtype == torch.bool:
            return self._answer(place, line, None)
        raise Untraceable(
            f"{place} (`{line}`) reads a number that depends on data, which the meta device does not have. Pass it with "
            f"explain(footprints={{'{place}': 128}}), on the command line with --footprint {place}=128, or pass a batch with "
            "values."
        )

    def equal(self, one: KnownValue | None, other: KnownValue | None) -> Any:
        """Return True if two tensors of the same shape are equal."""
        place, line, given = self._place()
        if given is not None:
            return given
        (value, of_batch), (second, also_of_batch) = _value_of(one), _value_of(other)
        if value is None or second is None:
            return self._answer(place, line, None)
        return self._answer(place, line, torch.equal(value, second), of_batch=of_batch or also_of_batch)

    def on_host(self, tensor: Tensor, known: KnownValue | None) -> Tensor:
        """Return the values of a meta tensor that is copied to the host. Values that depend on data are refused."""
        place, line, given = self._place()
        if given is not None:
            return torch.as_tensor(given(tensor) if callable(given) else given, dtype=tensor.dtype).reshape(tensor.shape)
        value, of_batch = _value_of(known)
        if value is None:
            raise Untraceable(
                f"{place} (`{line}`) copies values to the host that depend on data, which the meta device does not have. Pass "
                f"them with explain(footprints={{'{place}': [...]}}), as many as a tensor of shape {tuple(tensor.shape)} has, "
                "or pass a batch with values."
            )
        self._answer(place, line, f"{value.flatten()[:4].tolist()}{'...' if value.numel() > 4 else ''}", of_batch=of_batch)
        return value.clone()

    def record_shape(self, found: Any, *, of_batch: bool) -> None:
        """Record that the shape of a result depends on values of the batch."""
        if of_batch:
            self._answer(*running_line(), f"of shape {tuple(next(tensors_in(found)).shape)}", of_batch=True)

    def _place(self) -> tuple[str, str, Any]:
        """Return the running line of the program, (place, source text), and the user's answer for it, or None."""
        place, line = running_line()
        for name, given in self.given.items():
            if place == name or name.endswith(f"/{place}"):
                self.used.add(name)
                return place, line, given
        return place, line, None

    def _answer(self, place: str, line: str, answer: Any, *, of_batch: bool = False) -> Any:
        """Record a read and return its answer. `answer` is None if the value depends on data."""
        free = answer is None
        if free or of_batch:
            answer = self.tried.get(place, True if free else answer)
        found = self.reads.setdefault(place, ValueRead(place, line))
        found.answer, found.times = answer, found.times + 1
        found.free, found.of_batch = found.free or free, found.of_batch or of_batch
        if free and found.times > MOST_ANSWERS:
            self.refused = Untraceable(
                f"{place} (`{line}`) read {answer} {MOST_ANSWERS} times, and reads again: the end of its loop depends on data. "
                f"Pass explain(footprints={{'{place}': function}}), which is called with the tensor at each read, to end the "
                "loop."
            )
            raise self.refused
        return answer


def _value_of(known: KnownValue | None) -> tuple[Tensor | None, bool]:
    """Return a known value, None for an unknown one, and whether it depends on the batch's values."""
    return (None, False) if known is None else (known.value(), known.of_batch)


_FULLSHARD_DIR = str(Path(__file__).parent.parent)
_TORCH_DIR = str(Path(torch.__file__).parent)
_STDLIB_DIR = sysconfig.get_path("stdlib")


def running_line() -> tuple[str, str]:
    """Return the running line of the user's program: (place, source text)."""
    for frame, line in traceback.walk_stack(None):
        if place := place_of(frame.f_code.co_filename, line):
            return place, " ".join(linecache.getline(frame.f_code.co_filename, line).split())[:100]
    return "somewhere", ""


def place_of(file: str, line: int) -> str:
    """Return a place such as "model.py:12", or "" for a line of torch, fullshard or the standard library."""
    is_standard = file.startswith(_STDLIB_DIR) and "-packages" not in file
    return "" if is_standard or file.startswith((_FULLSHARD_DIR, _TORCH_DIR, "<frozen")) else f"{Path(file).name}:{line}"


# --- traces with other answers ---

Run = TypeVar("Run")

MOST_TRACES = 32
"""Maximum number of traces of one step with different answers."""


def decide(
    trace: Callable[[Answers], Run], given: Mapping[str, Any], differ: Callable[[Run, Run], str | None]
) -> tuple[Run, tuple[str, ...]]:
    """Trace a step, and trace it with every combination of answers that depend on data, to check that they do not matter.

    A place gets the same answer at each read. Raises Untraceable if several answers are possible and give different traces.

    Args:
        trace: a function that traces the step with given answers.
        given: the user's footprints, by place.
        differ: a function that describes how two traces differ, and returns None if they are equal.

    Returns:
        The trace, and notes on answers from the batch's values for which another answer gives another trace.
    """
    answers, found = _first_trace(trace, given)
    todo = _untried(answers)
    for count, (read, tried) in enumerate(iter(lambda: todo.pop() if todo else None, None)):
        if count == MOST_TRACES:
            raise _undecided(read, f"more than {MOST_TRACES} combinations of such answers are possible")
        other = Answers(given, tried)
        try:
            differs = differ(found, trace(other))
        except Exception as failure:
            if not _raised_by_program(failure, other):
                raise _undecided(read, "with the other answer it cannot be traced") from failure
            continue  # the program itself raises, so the other answer is impossible
        if differs is not None:
            raise _undecided(read, f"with the other answer {differs}")
        todo += _untried(other)
    return found, tuple(_batch_notes(trace, given, answers, found, differ))


def _first_trace(trace: Callable[[Answers], Run], given: Mapping[str, Any]) -> tuple[Answers, Run]:
    """Return the first trace in which the program does not raise, with its answers. Try True before False."""
    tried: dict[str, bool] = {}
    while True:
        answers = Answers(given, dict(tried))
        try:
            return answers, trace(answers)
        except Exception as failure:
            last = next((one for one in reversed(answers.reads.values()) if one.free and one.place not in tried), None)
            if last is None or not _raised_by_program(failure, answers):
                raise
            tried[last.place] = False


def _untried(answers: Answers) -> list[tuple[ValueRead, dict[str, bool]]]:
    """Return the combinations left to try after a trace: each new data-dependent place inverted, earlier places unchanged."""
    found: list[tuple[ValueRead, dict[str, bool]]] = []
    before = dict(answers.tried)
    for read in answers.reads.values():
        if read.free and read.place not in answers.tried:
            found.append((read, {**before, read.place: not read.answer}))
            before[read.place] = bool(read.answer)
    return found


def _batch_notes(
    trace: Callable[[Answers], Run],
    given: Mapping[str, Any],
    answers: Answers,
    found: Run,
    differ: Callable[[Run, Run], str | None],
) -> Iterator[str]:
    """Yield notes on answers that come from the batch's values and that another batch might change."""
    for read in [one for one in answers.reads.values() if one.of_batch]:
        note = f"{read.place} (`{read.line}`) is {read.answer} by the values of this batch"
        if not isinstance(read.answer, bool):
            yield note
            continue
        try:
            differs = differ(found, trace(Answers(given, {**answers.tried, read.place: not read.answer})))
        except Exception:  # the program or meta refuses the other answer: this batch's answer stands
            continue
        if differs is not None:
            yield f"{note}; otherwise {differs}"


def _raised_by_program(failure: Exception, answers: Answers) -> bool:
    """Return True if the program itself raised `failure`, not an operator that needs values."""
    return answers.refused is None and not isinstance(failure.__cause__ or failure, (Untraceable, NotImplementedError))


def _undecided(read: ValueRead, differs: str) -> Untraceable:
    return Untraceable(
        f"{read.place} (`{read.line}`) depends on data, and the step depends on it ({differs}). Pass "
        f"explain(footprints={{'{read.place}': True}}) or False, on the command line --footprint {read.place}=True, or pass "
        "a batch with values."
    )
