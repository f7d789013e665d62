"""The parts of tests that repeat themselves: together they are all cases, and each has one at least."""

from __future__ import annotations

import pytest
import rotation


@pytest.mark.parametrize("count", [1, 3, 8, 21])
def test_the_parts_together_are_all_cases(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    found: set[int] = set()
    for part in range(rotation.PARTS):
        monkeypatch.setenv("FULLSHARD_TESTS", f"part:{part}")
        cases = rotation.share(range(count))
        assert cases and rotation.share_of(count) == -(-count // rotation.PARTS)
        assert f"part:{part}" in rotation.header()
        found |= set(cases)
    assert found == set(range(count))
    monkeypatch.setenv("FULLSHARD_TESTS", "all")
    assert rotation.share(range(count)) == list(range(count)) and rotation.share_of(count) == count


@pytest.mark.parametrize("told", ["", "some", "part:8", "part:-1", "part:x"])
def test_a_part_that_there_is_not_is_an_error(monkeypatch: pytest.MonkeyPatch, told: str) -> None:
    monkeypatch.setenv("FULLSHARD_TESTS", told)
    with pytest.raises(ValueError, match="FULLSHARD_TESTS must be all or part:0 to part:7"):
        rotation.part()
