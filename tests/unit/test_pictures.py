"""The pictures of the documentation are of today's code: what they show is computed anew and compared."""

from __future__ import annotations

import html
import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"


SCRIPTS = Path(__file__).parents[2] / "scripts"


def script(path: Path = PICTURES / "draw.py") -> ModuleType:
    """A script as a module: `draw.py`, which needs matplotlib only to draw, or another one."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["schedule", "levels", "parameter", "gradient", "step", "calls"])
def test_a_picture_shows_what_the_code_says(name: str) -> None:
    text = (PICTURES / f"{name}.svg").read_text()
    found = re.search(r"<dc:description>(.*?)</dc:description>", text, re.DOTALL)
    assert found is not None
    now = json.loads(json.dumps(script().DRAWN[name]()))
    assert json.loads(html.unescape(found[1])) == now, "draw it anew: make pictures"


def test_the_table_of_levels_is_what_explain_says_today() -> None:
    levels = script(SCRIPTS / "levels.py")
    assert levels.PAGE.read_text() == levels.page(), "write it anew: make pictures"
