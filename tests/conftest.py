"""Makes `harness`, `models` and the files of benchmarks/ importable and keeps the parent process out of the ranks' way."""

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "benchmarks")]
torch.set_num_threads(1)
settings.register_profile("fullshard", deadline=None)  # a busy machine is no failure
settings.load_profile("fullshard")

LONG = (
    "test_random_faults.py",
    "test_races.py",
    "test_planted.py",
    "test_exits.py",
    "test_train_lm.py",
)  # files that begin first, so that no lane ends with one


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest: each file runs in one lane."""
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which part of the tests that repeat themselves ran, and how to run it again."""
    import rotation

    terminalreporter.write_line(rotation.header())
