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


def script() -> ModuleType:
    """`draw.py`, which needs matplotlib only to draw."""
    spec = importlib.util.spec_from_file_location("draw", PICTURES / "draw.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["draw"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["schedule", "levels", "parameter", "gradient", "step", "calls"])
def test_a_picture_shows_what_the_code_says(name: str) -> None:
    text = (PICTURES / f"{name}.svg").read_text()
    found = re.search(r"<dc:description>(.*?)</dc:description>", text, re.DOTALL)
    assert found is not None
    now = json.loads(json.dumps(script().DRAWN[name]()))
    assert json.loads(html.unescape(found[1])) == now, "draw it anew: make pictures"
