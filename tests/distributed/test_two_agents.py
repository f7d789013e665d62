"""More than one machine, on one: two torchrun agents, each of which starts the ranks of its node."""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from exits import free_port
from harness import launched

pytestmark = pytest.mark.processes
ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
MODEL = [
    "--dim",
    "32",
    "--depth",
    "2",
    "--heads",
    "2",
    "--length",
    "32",
    "--batch",
    "12",
    "--corpus",
    "200000",
    "--sample",
    "0",
]


def test_the_example_trains_under_two_torchrun_agents(tmp_path: Path) -> None:
    """As docs/more-than-one-machine.md starts it: agents meet by the c10d rendezvous and give out ranks 0 and 1, 2 and 3."""
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    meet = ["--rdzv-backend", "c10d", "--rdzv-id", "two", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2", *meet]
    example = [str(ROOT / "examples" / "train_lm.py"), *MODEL, "--steps", "6", "--save-every", "6", "--out", str(tmp_path)]
    command = [*agent, "--local-addr", "127.0.0.1", *example]
    with ThreadPoolExecutor(2) as pool:
        ended = list(pool.map(lambda _: launched(command, environment, 240.0), range(2)))
    assert [one.returncode for one in ended] == [0, 0], "\n".join(one.stderr[-4000:] for one in ended)
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["ranks"] == 4
    assert figures["losses"][-1] < figures["losses"][0] - 0.5
    assert sum("4 ranks" in one.stdout for one in ended) == 1  # rank 0 has one agent
