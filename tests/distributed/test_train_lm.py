"""The main job, small: it learns, resumes to the same losses on any number of ranks, and equals the unsharded run."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from exits import Rank, run_job
from harness import launched
from models import rounding

pytestmark = pytest.mark.processes
ROOT = Path(__file__).parents[2]
NEAR = rounding(torch.float32)  # of losses; AdamW magnifies roundings of gradients near zero, which move a loss by nothing
SMALL = [
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
    "--save-every",
    "5",
    "--corpus",
    "200000",
    "--sample",
    "8",
]


def example(rank: Rank, arguments: list[str]) -> None:
    """What torchrun starts."""
    rank.event()
    where = {"RANK": rank.rank, "LOCAL_RANK": rank.rank, "WORLD_SIZE": rank.size, "MASTER_PORT": rank.port}
    os.environ.update({key: str(value) for key, value in where.items()}, MASTER_ADDR="127.0.0.1")
    sys.argv = ["train_lm.py", *arguments]
    sys.path.insert(0, str(ROOT / "examples"))
    runpy.run_path(str(ROOT / "examples" / "train_lm.py"), run_name="__main__")


def run(ranks: int, out: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """The figures, and what all ranks printed."""
    job = run_job(example, ranks, limit=300.0, ends_fast=True, arguments=[*SMALL, "--out", str(out), *arguments])
    assert [one.code for one in job] == [0] * ranks, str(job)
    return json.loads((out / "figures.json").read_text()), "".join(one.out for one in job)


def run_by_torchrun(ranks: int, out: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    environment["OMP_NUM_THREADS"] = "1"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*launch, str(ROOT / "examples" / "train_lm.py"), *SMALL, "--out", str(out), *arguments]
    done = launched(command, environment, 300.0)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads((out / "figures.json").read_text()), done.stdout


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    out = tmp_path_factory.mktemp("lm") / "whole"
    figures, said = run_by_torchrun(2, out, "--steps", "10", "--compare")
    return out, figures, said


def test_it_is_foreseen_how_much_memory_a_step_takes(tmp_path: Path) -> None:
    figures, said = run(2, tmp_path / "lm", "--steps", "10", "--foresight", "--sample", "0")
    measured, predicted = figures["measured"]["peak"], figures["predicted"]["peak"]
    assert abs(predicted / measured - 1) < 0.05
    assert "a step took" in said and "USDT" not in said
    assert "messages: " not in (tmp_path / "lm" / "step.txt").read_text(), "messages are those that were predicted"
    assert "<svg" in (tmp_path / "lm" / "step.html").read_text()


def test_it_learns_and_equals_the_unsharded_run(uninterrupted: tuple[Path, dict[str, Any], str]) -> None:
    out, figures, said = uninterrupted
    losses = figures["losses"]
    assert len(losses) == 10 and losses[-1] < losses[0] - 0.2
    assert figures["largest_difference"] <= NEAR * losses[0]
    assert "largest difference between the sharded and the unsharded loss over 10 steps" in said
    assert (out / "curves.png").stat().st_size > 5000 and "--- a sample ---" in said
    assert set(figures["validation"]) == {"5", "10"}


@pytest.mark.proves("36a")
@pytest.mark.parametrize("ranks", [1, 3])
def test_it_resumes_to_the_same_losses_on_another_number_of_ranks(
    uninterrupted: tuple[Path, dict[str, Any], str], tmp_path: Path, ranks: int
) -> None:
    whole, figures, _ = uninterrupted
    shutil.copytree(whole / "step-000005", tmp_path / "step-000005")
    resumed, _ = run(ranks, tmp_path, "--steps", "10", "--resume")
    assert resumed["first_step"] == 5 and resumed["ranks"] == ranks
    assert resumed["losses"] == pytest.approx(figures["losses"][5:], rel=NEAR)
    assert resumed["validation_loss"] == pytest.approx(figures["validation_loss"], rel=NEAR)


@pytest.mark.parametrize("ranks", [1, 3])
def test_its_first_weights_and_losses_are_the_same_on_any_number_of_ranks(
    uninterrupted: tuple[Path, dict[str, Any], str], tmp_path: Path, ranks: int
) -> None:
    _, figures, _ = uninterrupted
    begun, _ = run(ranks, tmp_path, "--steps", "3", "--schedule", "10", "--sample", "0")
    assert begun["losses"] == pytest.approx(figures["losses"][:3], abs=2e-5)


def test_every_flag_at_once(tmp_path: Path) -> None:
    figures, _ = run(2, tmp_path, "--steps", "6", "--bf16", "--recompute", "--accumulate", "2", "--sample", "0")
    assert figures["losses"][-1] < figures["losses"][0]
