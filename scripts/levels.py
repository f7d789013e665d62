"""Write the table of docs/levels.md: memory and communication of Llama 8B and 70B under each level of ZeRO, by `explain`.

python scripts/levels.py            # or: make pictures
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "levels.md"
BEGIN, END = "<!-- written by scripts/levels.py -->\n", "<!-- end -->\n"
SIZES, WORLDS, MICROBATCHES = ("8b", "70b"), (8, 64, 512), 8
STATES = ("shards", "optimizer", "gathered")  # categories of memory that stays from step to step


def rows(sizes: Sequence[str] = SIZES) -> list[str]:
    """Return the rows of the table for models of these sizes."""
    sys.path.insert(0, str(ROOT / "examples"))
    from llama import llama

    from fullshard import explain
    from fullshard.policies import PRESETS

    found: list[str] = []
    for size in sizes:
        first = explain(**llama(size=size, length=4096), world=8, microbatches=MICROBATCHES, accumulate=False)
        for world in WORLDS:
            hybrid = {"mesh": (world // 8, 8)}
            levels = {name: {"states": PRESETS[name]} for name in ("ZERO3", "ZERO2", "ZERO1")}
            if world > 8:
                levels |= {"HSDP": hybrid, "HFSDP": hybrid | {"states": PRESETS["HFSDP"]}}
            for name, options in levels.items():
                r = first.but(world=world, **options)
                changes = r.simulation.ledger.changes[: r.simulation.first_change]
                kept = sum(change.nbytes for change in changes if change.category in STATES)
                received: Counter[str] = Counter()
                for message in r.messages:
                    received[message.kind] += message.nbytes * (message.ranks - 1) // message.ranks
                # an all-reduce is a reduce-scatter and an all-gather
                sent = received["all_gather"], received["reduce_scatter"] + 2 * received["all_reduce"]
                cells = [f"{nbytes / 1e9:,.1f}" for nbytes in (kept, r.peak, *sent)]
                found.append(f"| {size.upper()} | {world} | {name} | {' | '.join(cells)} | {r.step.middle:.1f} |")
    return found


def table() -> str:
    """Return the table."""
    head = "| model | ranks | level | kept between steps | peak of tensors | all-gathered | reduced | step |\n"
    return BEGIN + head + "|---|---|---|---|---|---|---|---|\n" + "\n".join(rows()) + "\n" + END


def page() -> str:
    """Return the page with the table of today."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return before + table() + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page())
