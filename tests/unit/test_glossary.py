"""Words mean one thing each: docs/glossary.md has them, and names of classes and functions use none that it replaced."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WINGS = ["collectives", "sharding", "schedule", "consistency", "params", "runtime"]
RETIRED = {  # and what is said instead
    "abandon": "abort, drop or drain",
    "admit": "register, allow",
    "book": "send gate",
    "cede": "transfer",
    "chain": "node hooks",
    "claim": "parameter reference",
    "consult": "refresh",
    "delivery": "gradient reducer",
    "dense": "tensor parallel",
    "dismiss": "unregister",
    "face": "sharded or full parameter",
    "fulfil": "ensure gathered",
    "glimpse": "copied use",
    "grow": "allocate",
    "handover": "gradient commit",
    "heed": "update",
    "hold": "unshard",
    "holdings": "managed tensors",
    "journal": "traffic counter",
    "keeper": "runtime",
    "kind": "fingerprint",
    "label": "unit name",
    "ledger": "collective log",
    "lend": "expose",
    "lends": "owns",
    "line": "fingerprints",
    "outline": "summary",
    "piece": "segment",
    "renounce": "invalidate",
    "rest": "ensure sharded",
    "retain": "save for the smaller group",
    "round": "calls per run",
    "seat": "record",
    "settle": "release, finish or bind",
    "shrink": "free",
    "side": "buffer",
    "talk": "setup collectives",
    "tell": "run hooks, publish",
    "ticket": "work",
    "turn": "roll",
    "waiter": "wait state",
    "wire": "channel",
    "wrote": "note write",
}


def named(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_"):
            yield node.name


@pytest.mark.parametrize("wing", WINGS)
def test_no_class_or_function_has_a_retired_word(wing: str) -> None:
    for path in sorted((ROOT / "src" / "fullshard" / wing).glob("*.py")):
        for name in named(path):
            for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name):
                assert word.lower() not in RETIRED, f"{path.name}: {name}: say {RETIRED[word.lower()]}"


def test_the_glossary_has_at_most_thirty_terms_each_with_a_meaning_and_that_of_fsdp2() -> None:
    rows = [line for line in (ROOT / "docs" / "glossary.md").read_text().splitlines() if line.startswith("| ")][1:]
    assert 0 < len(rows) <= 30
    assert all(cell.strip() for row in rows for cell in row.strip("|").split("|"))
