"""Print the lines of each package of src/fullshard, docstrings and comments included; in all, and of code alone.

python scripts/size.py            # or: make size
"""

from __future__ import annotations

import ast
import io
import tokenize
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "fullshard"
ENGINE = ("core", "comm", "checks", "frontend", "state")  # what runs in a step of `fully_shard`; FSDP2 has 5,726 lines
ENGINE_NAME = f"engine: {', '.join(ENGINE)}"
LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def code(text: str) -> int:
    """Return the number of lines without docstrings, comments and empty lines."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(
            node, False
        ):
            lines.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


@dataclass
class Size:
    """Size of a group of files."""

    files: int = 0
    lines: int = 0
    code: int = 0


def sizes() -> dict[str, Size]:
    """Return the size of each package, of the files beside them, of the engine, and of all."""
    found: dict[str, Size] = {}
    for path in SOURCE.rglob("*.py"):
        text, parts = path.read_text(), path.relative_to(SOURCE).parts
        groups = [parts[0] if len(parts) > 1 else "(beside them)", "in all"]
        if parts[0] in ENGINE:
            groups.append(ENGINE_NAME)
        for group in groups:
            one = found.setdefault(group, Size())
            one.files += 1
            one.lines += len(text.splitlines())
            one.code += code(text)
    return found


def main() -> None:
    """Print a row for each group."""
    print(f"{'':46s} files   lines  of code")
    for group, one in sorted(sizes().items(), key=lambda item: (":" in item[0], item[0] == "in all", item[0])):
        print(f"{group:46s} {one.files:5d} {one.lines:7,d} {one.code:8,d}")


if __name__ == "__main__":
    main()
