"""The check of docstrings (scripts/docstrings.py) names what is missing or wrong, and finds nothing in the public surface."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "docstrings.py"


@pytest.fixture(scope="module")
def check() -> ModuleType:
    pytest.importorskip("docstring_parser", reason="of the dev extra")
    spec = importlib.util.spec_from_file_location("docstrings_script", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = sys.modules["docstrings_script"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def undocumented(one: int) -> int:
    return one


def nameless(one: int, *, two: int) -> None:
    """Takes two.

    Args:
        one: a number.
    """


def misnamed(one: int) -> None:
    """Takes one.

    Args:
        one: a number.
        tow: no such thing.
    """


def silent_about_its_value() -> int:
    """Gives one."""
    return 1


def silent_about_its_error(one: int) -> None:
    """Takes one.

    Args:
        one: a number.
    """
    if one < 0:
        raise ValueError(f"one must be a number >= 0, got {one}")


def complete(one: int, *rest: int) -> Iterator[int]:
    """Gives what it takes.

    Args:
        one: a number.
        rest: more of them.

    Yields:
        Each number.

    Raises:
        ValueError: for a number below 0.
    """

    def refuse() -> None:
        raise TypeError("raised by another function")

    if one < 0:
        raise ValueError(f"one must be a number >= 0, got {one}")
    yield one
    yield from rest


CASES = [
    (undocumented, "undocumented has no docstring"),
    (nameless, "Args does not name 'two'"),
    (misnamed, "Args names 'tow', which is no parameter"),
    (silent_about_its_value, "returns a value, but has no Returns or Yields"),
    (silent_about_its_error, "raises ValueError, which Raises does not name"),
]


@pytest.mark.parametrize("function, said", CASES, ids=[case[0].__name__ for case in CASES])
def test_what_is_missing_or_wrong_is_named_with_its_place(check: ModuleType, function: Callable[..., Any], said: str) -> None:
    (line,) = check.problems_of_function(function.__name__, function)
    assert said in line
    assert line.startswith(f"tests/unit/test_docstrings.py:{function.__code__.co_firstlineno}: ")


def test_nothing_is_said_of_a_complete_docstring(check: ModuleType) -> None:
    assert not list(check.problems_of_function("complete", complete))


def test_a_class_answers_for_its_constructor_and_its_methods(check: ModuleType) -> None:
    class Pair:
        """Two numbers."""

        def __init__(self, one: int) -> None:
            self.one = one

        @property
        def first(self) -> int:
            """The first number."""
            return self.one

        def add(self, two: int) -> None:
            self.one += two

    assert [line.split(": ", 1)[1] for line in check.problems_of_class("Pair", Pair)] == [
        "Pair: Args does not name 'one'",
        "Pair.add has no docstring",
    ]


def test_an_option_of_the_command_line_without_help_is_named(check: ModuleType) -> None:
    parser = argparse.ArgumentParser(prog="program")
    parser.add_subparsers().add_parser("run").add_argument("--steps")
    assert list(check.problems_of_command(parser)) == ["program run: --steps has no help text"]


def test_the_public_surface_is_documented(check: ModuleType) -> None:
    assert len(check.surface()) > 50
    assert not list(check.problems())
