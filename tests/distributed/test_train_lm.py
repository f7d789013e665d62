"""The main job, small: it learns, resumes to the same losses on any number of ranks, and equals the unsharded run."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, TypeAlias

import pytest
import torch
from exits import Rank, free_port, run_job, torchrun
from models import rounding

from fullshard.foresight.calibrate import _Bench

pytestmark = pytest.mark.processes
ROOT = Path(__file__).parents[2]
NEAR = rounding(torch.float32)  # of losses; AdamW magnifies roundings of gradients near zero, which move a loss by nothing
Whole: TypeAlias = tuple[Path, dict[str, Any], list[CompletedProcess[str]]]  # where it is, its figures, its agents
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

# This machine's speeds, of which no claim here tells: test_predictions.py measures them.
MEASURED = dict.fromkeys(("fp32", "bf16", "bandwidth", "attention", "attention_fp32", "link"), 1e9)
MEASURED |= {"launch": 1e-6, "latency": 1e-4, "overlap": 1.0, "fp8": 0.0, "between": 0.0}


def example(rank: Rank, arguments: list[str]) -> None:
    """What torchrun starts."""
    rank.event()
    where = {"RANK": rank.rank, "LOCAL_RANK": rank.rank, "WORLD_SIZE": rank.size, "MASTER_PORT": rank.port}
    os.environ.update({key: str(value) for key, value in where.items()}, MASTER_ADDR="127.0.0.1")
    sys.argv = ["train_lm.py", *arguments]
    sys.path.insert(0, str(ROOT / "examples"))
    _Bench.measure = lambda self: MEASURED  # type: ignore[method-assign]
    runpy.run_path(str(ROOT / "examples" / "train_lm.py"), run_name="__main__")


def run(ranks: int, out: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """The figures, and what all ranks printed."""
    job = run_job(example, ranks, limit=300.0, ends_fast=True, arguments=[*SMALL, "--out", str(out), *arguments])
    assert [one.code for one in job] == [0] * ranks, str(job)
    return json.loads((out / "figures.json").read_text()), "".join(one.out for one in job)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """As docs/more-than-one-machine.md starts it, on one: two agents of torchrun, which meet by the c10d rendezvous."""
    out = tmp_path_factory.mktemp("lm") / "whole"
    meet = ["--rdzv-backend", "c10d", "--rdzv-id", "two", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    agent = ["--nnodes", "2", "--nproc-per-node", "1", *meet]
    program = [str(ROOT / "examples" / "train_lm.py"), *SMALL, "--out", str(out), "--steps", "10", "--compare"]
    with ThreadPoolExecutor(2) as pool:
        command = [*agent, "--local-addr", "127.0.0.1", *program]
        agents = list(pool.map(lambda _: torchrun(*command, seconds=300.0), range(2)))
    assert [one.returncode for one in agents] == [0, 0], "".join(one.stdout[-2000:] + one.stderr[-4000:] for one in agents)
    return out, json.loads((out / "figures.json").read_text()), agents


def test_ranks_of_two_agents_train_one_model_and_end_quietly(
    uninterrupted: Whole,
) -> None:
    _, figures, agents = uninterrupted
    assert figures["ranks"] == 2 and sum("2 ranks" in one.stdout for one in agents) == 1, "rank 0 has one agent"
    assert not [one.stderr for one in agents if "fullshard" in one.stderr or "Traceback" in one.stderr]


def test_it_is_foreseen_how_much_memory_a_step_takes(tmp_path: Path) -> None:
    figures, said = run(2, tmp_path / "lm", "--steps", "10", "--foresight", "--sample", "0")
    measured, predicted = figures["measured"]["peak"], figures["predicted"]["peak"]
    assert abs(predicted / measured - 1) < 0.05
    assert "a step took" in said and "USDT" not in said
    assert "messages: " not in (tmp_path / "lm" / "step.txt").read_text(), "messages are those that were predicted"
    assert "<svg" in (tmp_path / "lm" / "step.html").read_text()


def test_it_learns_and_equals_the_unsharded_run(
    uninterrupted: Whole,
) -> None:
    out, figures, agents = uninterrupted
    said = "".join(one.stdout for one in agents)
    losses = figures["losses"]
    assert len(losses) == 10 and losses[-1] < losses[0] - 0.2
    assert figures["largest_difference"] <= NEAR * losses[0]
    assert "largest difference between the sharded and the unsharded loss over 10 steps" in said
    assert (out / "curves.png").stat().st_size > 5000 and "--- a sample ---" in said
    assert set(figures["validation"]) == {"5", "10"}


@pytest.mark.rotates(2)
@pytest.mark.proves("36a")
@pytest.mark.parametrize("ranks", [1, 3])
def test_it_resumes_to_the_same_losses_on_another_number_of_ranks(uninterrupted: Whole, tmp_path: Path, ranks: int) -> None:
    whole, figures, _ = uninterrupted
    shutil.copytree(whole / "step-000005", tmp_path / "step-000005")
    resumed, _ = run(ranks, tmp_path, "--steps", "10", "--resume")
    assert resumed["first_step"] == 5 and resumed["ranks"] == ranks
    assert resumed["losses"] == pytest.approx(figures["losses"][5:], rel=NEAR)
    assert resumed["validation_loss"] == pytest.approx(figures["validation_loss"], rel=NEAR)


@pytest.mark.rotates(2)
@pytest.mark.parametrize("ranks", [1, 3])
def test_its_first_weights_and_losses_are_the_same_on_any_number_of_ranks(
    uninterrupted: Whole, tmp_path: Path, ranks: int
) -> None:
    _, figures, _ = uninterrupted
    begun, _ = run(ranks, tmp_path, "--steps", "3", "--schedule", "10", "--sample", "0")
    assert begun["losses"] == pytest.approx(figures["losses"][:3], abs=2e-5)


def test_every_flag_at_once(tmp_path: Path) -> None:
    figures, _ = run(2, tmp_path, "--steps", "6", "--bf16", "--recompute", "--accumulate", "2", "--sample", "0")
    assert figures["losses"][-1] < figures["losses"][0]
