"""Write the table of docs/levels.md: memory and communication of Llama 8B and 70B under each level of ZeRO, by `explain`.

python scripts/levels.py            # or: make pictures
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "levels.md"
BEGIN, END = "<!-- written by scripts/levels.py -->\n", "<!-- end -->\n"
SIZES, WORLDS, MICROBATCHES = ("8b", "70b"), (8, 64, 512), 8
STATES = ("shards", "optimizer", "gathered")  # categories of memory that stays from step to step under ZERO1 and ZERO2


def rows() -> list[str]:
    """Return the rows of the table."""
    sys.path.insert(0, str(ROOT / "examples"))
    from llama import llama

    from fullshard import explain
    from fullshard.policies import PRESETS

    found: list[str] = []
    for size in SIZES:
        first = explain(**llama(size=size, length=4096), world=8, microbatches=MICROBATCHES, accumulate=False)
        for world in WORLDS:
            for name in reversed(PRESETS):
                r = first.but(world=world, states=PRESETS[name])
                changes = r.simulation.ledger.changes[: r.simulation.first_change]
                kept = sum(change.nbytes for change in changes if change.category in STATES)
                sent = [
                    sum(m.nbytes * (m.ranks - 1) // m.ranks for m in r.messages if m.kind == kind)
                    for kind in ("all_gather", "reduce_scatter")
                ]
                cells = [f"{nbytes / 1e9:,.1f}" for nbytes in (kept, r.peak, *sent)]
                found.append(f"| {size.upper()} | {world} | {name} | {' | '.join(cells)} | {r.step.middle:.1f} |")
    return found


def table() -> str:
    """Return the table."""
    head = "| model | ranks | level | kept between steps | peak of tensors | all-gathered | reduce-scattered | step |\n"
    return BEGIN + head + "|---|---|---|---|---|---|---|---|\n" + "\n".join(rows()) + "\n" + END


def page() -> str:
    """Return the page with the table of today."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return before + table() + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page())
