"""The figures of a benchmark with where they come from: command, commit, torch, Python, processor or GPU, and date."""

from __future__ import annotations

import datetime
import json
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]


def line(figures: dict[Any, Any]) -> str:
    """Return a line of JSON, the last one that a benchmark prints with `--json`."""
    return json.dumps({**origin(), "figures": figures})


def origin() -> dict[str, str | None]:
    """Return where the figures of this process come from."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() if (ROOT / ".git").exists() else ""
    arguments = [one for one in sys.argv[1:] if one != "--json"]
    return {
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *arguments]),
        "commit": commit or None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": processor(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "date": datetime.date.today().isoformat(),
    }


def processor() -> str:
    """Return the processor's name, where the system tells it, and the number of cores."""
    info = Path("/proc/cpuinfo")
    names = (
        [one.partition(":")[2].strip() for one in info.read_text().splitlines() if one.startswith("model name")]
        if info.exists()
        else []
    )
    return f"{names[0] if names else platform.machine()}, {len(names) or 'unknown number of'} cores"


def write(path: Path, found: dict[str, Any]) -> None:
    """Write what `line` returned to a file, with each row of figures in one line."""
    head = json.dumps({key: value for key, value in found.items() if key != "figures"}, indent=1)[:-2]
    rows = ",\n".join(f"  {json.dumps(label)}: {json.dumps(row)}" for label, row in found["figures"].items())
    path.write_text(f'{head},\n "figures": {{\n{rows}\n }}\n}}\n')
