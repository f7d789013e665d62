"""Which cases of a test that repeats itself run: `make test` takes a part that follows from what src and tests are in the commit,
`make test-all` takes all.

FULLSHARD_TESTS says otherwise: `all`, or `part:3`, as the end of a run shows it, to repeat that part.
"""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import HealthCheck, seed, settings

PARTS = 32

T = TypeVar("T")


@functools.cache
def part_of_commit() -> int:
    """The part that follows from the trees of `src` and `tests` that are checked out; 0 without git.

    A commit is green or red on every day, and a page of the documentation does not choose other cases.
    """
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD:src", "HEAD:tests"]
    try:
        trees = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        return sum(int(tree, 16) for tree in trees) % PARTS
    except (OSError, subprocess.CalledProcessError):
        return 0


def part() -> int | None:
    """The part that runs, from 0; None for all. Raises ValueError for a FULLSHARD_TESTS that is neither."""
    told = os.environ.get("FULLSHARD_TESTS", f"part:{part_of_commit()}")
    if told == "all":
        return None
    kind, _, number = told.partition(":")
    if kind != "part" or not number.isdigit() or int(number) >= PARTS:
        raise ValueError(f"FULLSHARD_TESTS must be all or part:0 to part:{PARTS - 1}, got {told!r}")
    return int(number)


def header() -> str:
    """A line for the end of a run."""
    number = part()
    if number is None:
        return "tests that repeat themselves: all cases"
    return f"tests that repeat themselves: part {number} of {PARTS}; again with FULLSHARD_TESTS=part:{number}"


def share(cases: Sequence[T], parts: int = PARTS) -> list[T]:
    """The cases that run: one of so many, at least one."""
    number = part()
    parts = min(parts, len(cases))
    return list(cases) if number is None else [case for index, case in enumerate(cases) if index % parts == number % parts]


def share_of(count: int) -> int:
    """How many of so many random cases run."""
    return count if part() is None else -(-count // PARTS)


def random_cases(count: int) -> Callable[[Any], Any]:
    """For a test by hypothesis: the same `count` random cases each time, or the part of another such set."""
    number = part()
    options: dict[str, Any] = {"database": None, "deadline": None, "suppress_health_check": list(HealthCheck)}
    if number is None:
        return settings(max_examples=count, derandomize=True, **options)
    return lambda test: seed(number)(settings(max_examples=share_of(count), **options)(test))
