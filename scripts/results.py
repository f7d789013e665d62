"""Write the tables of docs/performance.md and README.md from the figures in benchmarks/results.

    python scripts/results.py            # or: make pictures
    python scripts/results.py --check    # or: make check

A table of docs/performance.md lies between `<!-- FILE.json: HEAD | COLUMN {figure} | ... -->` and `<!-- end -->`. Each line of
the file's figures is a row, and each column a template of Python's `str.format`; `{ratio}` is fullshard's figure by FSDP2's.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import size

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "docs" / "performance.md", ROOT / "README.md"]
TABLE = re.compile(r"(<!-- (\S+\.json): (.*?) -->\n).*?(<!-- end -->)", re.DOTALL)
SUMMARY = re.compile(r"(<!-- measured -->\n).*?(<!-- end -->)", re.DOTALL)
MEASURED = (
    (
        "peak of memory above rest, bf16 reduced in fp32, one rank of 64 on an H200 (U: one unit's unsharded parameters)",
        "gpu-memory.2026-11-27",
        "equal matrices, bf16 reduced in fp32, rank of 64",
        "{peak, fullshard:.1f} U | {peak, FSDP2:.1f} U",
    ),
    (
        "forward and backward of a decoder that the host bounds (48 layers, H200), ms; the plain module takes 69",
        "gpu-time.2026-11-27",
        "48 layers, dim 256, 128 tokens",
        "{fullshard:.0f} | {FSDP2:.0f}",
    ),
    (
        "host time per unit of 11 parameters, above the plain module (CPU, us)",
        "host.2026-11-30",
        "fp32, 11 parameters",
        "{fullshard:,} | {FSDP2:,}",
    ),
    ("two gloo ranks, forward and backward, dim 1,024 (ms)", "train_cpu.2026-11-30", "dim 1024", "{fullshard:,} | {FSDP2:,}"),
)
"""Rows of README's table: what, file, line of its figures, and columns."""


@dataclass(frozen=True)
class Range:
    """Least and most of several measurements; most is None where a measurement was given up."""

    least: float
    most: float | None

    def __format__(self, spec: str) -> str:
        return f"more than {self.least:{spec}}" if self.most is None else f"{self.least:{spec}} to {self.most:{spec}}"


def record(name: str) -> dict[str, Any]:
    """Return a file of results, with ranges and ratios."""
    found = json.loads((RESULTS / name).read_text())
    for row in found["figures"].values():
        if all(isinstance(row.get(library), (int, float)) for library in ("fullshard", "FSDP2")):
            row["ratio"] = row["fullshard"] / row["FSDP2"]
        row.update({key: Range(*value) for key, value in row.items() if isinstance(value, list)})
    return found


def source(name: str, found: dict[str, Any]) -> str:
    """Return the line below a table: command, versions, machine and date, as far as they are known, and the file."""
    device = found["gpu"] or found["processor"]
    known = [
        f"`{found['command']}`" if found["command"] else "",
        f"torch {found['torch']}" if found["torch"] else "",
        device or "",
        found["date"] or "",
        f"`{name}`",
    ]
    return f"*{', '.join(part for part in known if part)}*\n"


def table(match: re.Match[str]) -> str:
    """Return a table of docs/performance.md with its markers."""
    begin, name, columns, end = match.groups()
    found, (head, *templates) = record(name), columns.split(" | ")
    heads = [head, *(template.partition("{")[0].strip() for template in templates)]
    cells = [template[template.index("{") :] for template in templates]
    rows = [heads, ["---", *("---:" for _ in cells)]]
    rows += [[label, *(cell.format(**row) for cell in cells)] for label, row in found["figures"].items()]
    return begin + "".join(f"| {' | '.join(row)} |\n" for row in rows) + f"\n{source(name, found)}{end}"


def summary(match: re.Match[str], *, lines: str) -> str:
    """Return README's table with its markers; `lines` is the row of `make size`."""
    begin, end = match.groups()
    rows = ["| measured beside FSDP2 | fullshard | FSDP2 | command |", "|---|---:|---:|---|"]
    for what, name, label, columns in MEASURED:
        found = record(f"{name}.json")
        rows.append(f"| {what} | {columns.format(**found['figures'][label])} | `{found['command']}` |")
    return begin + "\n".join([*rows, lines]) + f"\n{end}"


def page(text: str, *, count: bool) -> str:
    """Return a page with the tables of today. count: whether the row of `make size` is counted anew, or taken as it is."""
    old = re.search(r"^\| lines of .*make size.*$", text, re.MULTILINE)
    found = size.sizes()
    engine, beside = found[size.ENGINE_NAME].lines, found["ext"].lines + found["fsdp2"].lines
    lines = (
        f"| lines of {', '.join(size.ENGINE)}, docstrings included, without {beside:,} of rare features beside them "
        f"(ext, fsdp2); FSDP2's package | {engine:,} | 5,726 | `make size` |"
    )
    if old and not count:
        lines = old[0]
    return SUMMARY.sub(lambda match: summary(match, lines=lines), TABLE.sub(table, text))


def main() -> None:
    """Write the pages, or end with an error if one of them is not of today's figures."""
    check = "--check" in sys.argv[1:]
    for path in PAGES:
        text = path.read_text()
        now = page(text, count=not check)
        if check and now != text:
            raise SystemExit(f"{path.relative_to(ROOT)} does not show the figures of benchmarks/results. Run make pictures.")
        path.write_text(now)


if __name__ == "__main__":
    main()
