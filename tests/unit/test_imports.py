"""The engine is read from below: no file of it imports another one in a circle, imports for types included."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from test_wings import FILES, name_of, parsed

ENGINE = ("core", "comm", "checks", "frontend", "state")
NAMES = {name_of(path) for path in FILES}

# Imports for types that lead back up. A new one is a fault; one that goes leaves this list, too.
LEFT = {
    ("core.unit", "core.runtime"),
}


def imports_of(path: Path) -> Iterator[str]:
    """Yield the files of the package that this one imports anywhere, under `if TYPE_CHECKING:` and in functions too."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fullshard"):
            module = (node.module or "").removeprefix("fullshard").lstrip(".")
            for alias in node.names:
                below = f"{module}.{alias.name}".lstrip(".")
                yield below if below in NAMES else module


def in_a_circle(graph: dict[str, set[str]]) -> set[str]:
    """Return the files that are in a circle, or import one that is."""
    left = dict(graph)
    while free := {name for name, others in left.items() if not others & set(left)}:
        left = {name: others for name, others in left.items() if name not in free}
    return set(left)


def test_files_of_the_engine_import_each_other_in_no_circle_for_types_either() -> None:
    graph = {name_of(path): {*imports_of(path)} - {name_of(path)} for path in FILES if path.parent.name in ENGINE}
    for name, other in LEFT:
        assert other in graph[name], f"{name} no longer imports {other}: take it out of LEFT"
        graph[name].remove(other)
    assert not in_a_circle(graph)
