"""`examples/finetune_hf.py` as a job: from a checkpoint to one that from_pretrained reads, with the same logits."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

EXAMPLE = Path(__file__).parents[2] / "examples" / "finetune_hf.py"
RANKS = 2


@pytest.mark.parametrize("options", [[], ["--lora", "4"]], ids=["full", "lora"])
def test_a_checkpoint_is_trained_and_read_by_from_pretrained(options: list[str], tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    job = subprocess.run(
        [*launcher, str(EXAMPLE), *options, "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert job.returncode == 0, job.stdout + job.stderr
    whole = (tmp_path / "tiny" / "model.safetensors").stat().st_size
    for verb in ("read", "wrote"):
        counted = [int(found.replace(",", "")) for found in re.findall(rf"{verb} ([\d,]+) bytes", job.stdout)]
        assert len(counted) == RANKS and all(abs(one - whole / RANKS) < 0.02 * whole for one in counted), job.stdout
    told = re.search(r"loss (\S+) to (\S+); .* 0 missing keys, 0 unexpected, logits within (\S+)", job.stdout)
    assert told, job.stdout
    first, last, difference = map(float, told.groups())
    assert last < first - 0.2 and difference < 1e-5, job.stdout
