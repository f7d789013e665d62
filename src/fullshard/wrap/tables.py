"""Text tables: aligned columns, one name for a range of equal rows, readable numbers of bytes."""

from __future__ import annotations

from collections.abc import Sequence


def span(first: str, last: str) -> str:
    """Join the first and last name of a range: `blocks.0` and `blocks.3` become `blocks.0 ... 3`.

    >>> span("model.blocks.0", "model.blocks.11")
    'model.blocks.0 ... 11'
    """
    ours, theirs = first.split("."), last.split(".")
    same = 0
    while same < min(len(ours), len(theirs)) - 1 and ours[same] == theirs[same]:
        same += 1
    return f"{first} ... {'.'.join(theirs[same:])}"


def bytes_text(number: float) -> str:
    """Format a number of bytes with a binary unit.

    >>> bytes_text(512), bytes_text(3 * 2**20)
    ('512 B', '3.0 MiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            break
        number /= 1024
    return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"


def aligned(rows: Sequence[tuple[str, ...]], *, right: set[int]) -> list[str]:
    """Format rows as lines with aligned columns. `right`: indices of the right-aligned columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    placed = [[cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths))] for row in rows]
    return ["  ".join(cells).rstrip() for cells in placed]
