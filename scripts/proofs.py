"""Write docs/never-silent-tests.md: for each row of the table of docs/never-silent.md, the tests that carry its mark.

    python scripts/proofs.py            # or: make pictures

A test that proves row 16b has `@pytest.mark.proves("16b")`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
GUIDE, PAGE = ROOT / "docs" / "never-silent.md", ROOT / "docs" / "never-silent-tests.md"
HEAD = """# Never silent: the tests

The tests of each row of [the table](never-silent.md#what-users-do), as `file::test` below `tests/`. `make pictures` writes this
page from the marks of the tests (`@pytest.mark.proves("16b")`).

| | situation | tests |
|---|---|---|
"""
WITHOUT = {"6a": "a matter of speed: [performance](performance.md)"}  # rows that no test can prove


def rows() -> dict[str, str]:
    """Return the situation of each row of the guide, by the id of the row."""
    return dict(re.findall(r"^\| (\d+[a-z]) \| (.*?) \|", GUIDE.read_text(), re.MULTILINE))


def marked() -> Iterator[tuple[str, str]]:
    """Yield (id of a row, test) for each mark, in the order of files and lines."""
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef):
                for decorator in node.decorator_list:
                    if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.proves":
                        for argument in decorator.args:
                            yield ast.literal_eval(argument), f"{path.relative_to(ROOT / 'tests')}::{node.name}"


def page() -> str:
    """Return the text of the page.

    Raises:
        ValueError: if a test is marked with a row that does not exist, or if a row has no test.
    """
    situations, tests = rows(), dict[str, list[str]]()
    for row, test in marked():
        tests.setdefault(row, []).append(test)
    unknown, bare = sorted(tests.keys() - situations), sorted(situations.keys() - tests - WITHOUT.keys())
    if unknown or bare:
        raise ValueError(f"Expected a test for each row of {GUIDE.name}. Rows without a test: {bare}. Unknown rows: {unknown}.")
    lines = [
        f"| {row} | {situation} | {', '.join(f'`{test}`' for test in tests[row]) if row in tests else WITHOUT[row]} |"
        for row, situation in situations.items()
    ]
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
