"""Print the lines of each package of src/fullshard, docstrings and comments included; in all, and of code alone.

python scripts/size.py            # or: make size
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "fullshard"
ENGINE = ("core", "comm", "checks", "frontend", "state")  # what runs in a step of `fully_shard`; FSDP2 has 5,726 lines
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


def main() -> None:
    """Print a row for each package, for the files beside them, for the engine, and for all."""
    lines, of_code, files = Counter[str](), Counter[str](), Counter[str]()
    for path in SOURCE.rglob("*.py"):
        text, parts = path.read_text(), path.relative_to(SOURCE).parts
        groups = [parts[0] if len(parts) > 1 else "(beside them)", "in all"]
        if parts[0] in ENGINE:
            groups.append("engine: " + ", ".join(ENGINE))
        for group in groups:
            files[group] += 1
            lines[group] += len(text.splitlines())
            of_code[group] += code(text)
    print(f"{'':46s} files   lines  of code")
    for group in sorted(files, key=lambda group: (":" in group, group == "in all", group)):
        print(f"{group:46s} {files[group]:5d} {lines[group]:7,d} {of_code[group]:8,d}")


if __name__ == "__main__":
    main()
