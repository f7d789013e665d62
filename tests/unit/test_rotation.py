"""The parts of tests that repeat themselves: together they are all cases, and each has one at least."""

from __future__ import annotations

import subprocess
from pathlib import Path

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


def test_the_part_follows_from_src_and_tests_and_is_fixed_without_git(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True)

    def part() -> int | None:
        rotation.part_of_commit.cache_clear()
        return rotation.part()

    monkeypatch.delenv("FULLSHARD_TESTS", raising=False)
    monkeypatch.setattr(rotation, "__file__", str(tmp_path / "rotation.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert part() == 0, "no repository"
    git("init")
    (tmp_path / "src").mkdir(), (tmp_path / "tests").mkdir()
    (tmp_path / "src" / "file").write_text(""), (tmp_path / "tests" / "file").write_text("")
    for folder in ("src", "tests"):
        parts = set()
        for number in range(4):
            (tmp_path / folder / "file").write_text(f"{number}")
            git("add", ".")
            git("commit", "-m", "one")
            committed = part()
            git("commit", "--amend", "--date", "2001-01-01T00:00:00", "-m", "the same files, at another time")
            assert part() == committed
            (tmp_path / "page").write_text(f"{folder} {number}")
            git("add", ".")
            git("commit", "-m", "another page, and the same files")
            assert part() == committed
            parts.add(committed)
        assert len(parts) > 1
    monkeypatch.setenv("PATH", "")
    assert part() == 0, "no git"
    rotation.part_of_commit.cache_clear()


@pytest.mark.parametrize("told", ["", "some", f"part:{rotation.PARTS}", "part:-1", "part:x"])
def test_a_part_that_there_is_not_is_an_error(monkeypatch: pytest.MonkeyPatch, told: str) -> None:
    monkeypatch.setenv("FULLSHARD_TESTS", told)
    with pytest.raises(ValueError, match=f"FULLSHARD_TESTS must be all or part:0 to part:{rotation.PARTS - 1}"):
        rotation.part()
