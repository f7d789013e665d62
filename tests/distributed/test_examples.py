"""Each example runs as a job of its own, and prints that it did what it is about."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import runpy
from pathlib import Path

import pytest
from exits import Rank, run_job

pytestmark = pytest.mark.processes
EXAMPLES = Path(__file__).parents[2] / "examples"
LOSS = r"loss (\d\.\d+) to (\d\.\d+)"


def example(rank: Rank, name: str) -> None:
    """What torchrun starts."""
    rank.event()
    where = {"RANK": rank.rank, "LOCAL_RANK": rank.rank, "WORLD_SIZE": rank.size, "MASTER_PORT": rank.port}
    os.environ.update({key: str(value) for key, value in where.items()}, MASTER_ADDR="127.0.0.1")
    if name == "with_accelerate":
        from launch import let_accelerate_shard_on_cpu

        let_accelerate_shard_on_cpu()
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


def printed(name: str, ranks: int) -> list[str]:
    """What each rank printed."""
    job = run_job(example, ranks, limit=120.0, ends_fast=True, name=name)
    assert [one.code for one in job] == [0] * ranks, str(job)
    return [one.out for one in job]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_the_global_seed_of_an_example_is_alike_on_all_ranks(path: Path) -> None:
    """As docs/never-silent.md asks: what differs by rank is drawn by a generator of its own."""
    tree = ast.parse(path.read_text())
    seeds = [call for call in ast.walk(tree) if isinstance(call, ast.Call) and ast.unparse(call.func) == "torch.manual_seed"]
    said = [ast.unparse(argument) for call in seeds for argument in call.args]
    assert not [text for text in said if re.search(r"rank|process_index", text)], said


@pytest.mark.rotates(5)
@pytest.mark.parametrize(
    ("name", "ranks"),
    [("bottom_up", 2), ("tensor_parallel", 4), ("mixed_precision", 2), ("experts", 2), ("muon", 2), ("captured", 2)],
)
def test_the_loss_goes_down(name: str, ranks: int) -> None:
    out = "".join(printed(name, ranks))
    losses = re.findall(LOSS, out)
    assert losses and all(float(last) < float(first) for first, last in losses), out
    told = {
        "bottom_up": r"99,968 of 199,936 elements on this rank; \d+ messages",
        "tensor_parallel": r"a weight has \(.*Shard\(dim=0\)\) and \(32, 32\) here",
        "captured": "in 2 eager steps and 8 more: The CPU has no graphs",
        "mixed_precision": "computed in torch.bfloat16, stored in torch.float32",
        "muon": r"12 matrices for Muon, 27 other parameters for AdamW\n12 matrices on 2 ranks, 5 to 7 each",
        "experts": r"rank 1: .*; its tokens went to the experts \[[0-3, ]+\]",
    }
    assert re.search(told[name], out), out


def test_values_of_a_model_from_meta_are_the_same_for_any_number_of_ranks() -> None:
    texts = [printed("meta_init", ranks)[0] for ranks in (1, 2)]
    sums = [re.search(r"sum of the embedding (-?\d+\.\d+)", text) for text in texts]
    assert sums[0] and sums[1] and sums[0][1] == sums[1][1], texts
    assert "1000 rows on this rank" in texts[0] and "500 rows on this rank" in texts[1]


def test_a_generator_follows_the_versions_that_trainers_publish() -> None:
    first, last, versions = re.search(
        r"reward (\d\.\d+) to (\d\.\d+) with the weights of (\d+)", printed("published", 2)[0]
    ).groups()  # type: ignore[union-attr]
    assert float(first) < 0.3 and float(last) > 0.7 and int(versions) > 10


def test_replicas_sum_or_share_what_their_shards_reduced() -> None:
    told = re.findall(
        r"(\d+) elements on this rank; (\d+) all-gathers, (\d+) reduce-scatters, (\d+) all-red", printed("hybrid", 4)[0]
    )
    assert told == [("6240", "24", "12", "3"), ("3120", "27", "15", "0")]


def test_each_level_of_zero_sends_what_its_table_says() -> None:
    first, _ = printed("levels", 2)
    assert re.findall(r"(ZERO\d): (\d+) all-gathers and (\d+) reduce-scatters", first) == [
        ("ZERO3", "24", "12"),
        ("ZERO2", "3", "12"),
        ("ZERO1", "3", "3"),
    ]


def test_an_engine_computes_with_the_weights_of_each_step() -> None:
    first, _, engine = printed("rollout", 3)
    trained = re.findall(r"16 tensors in 2 messages, output (\d\.\d+)", first)
    used = re.findall(r"8 tensors, output (\d\.\d+)", engine)
    assert len(trained) == len(used) == 3, (first, engine)
    assert all(abs(float(a) - float(b)) < 0.004 * float(a) for a, b in zip(trained, used)), (trained, used)
    assert len(set(used)) == 3


@pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed: make test-clients has it"
)
def test_accelerate_shards_by_fullshard() -> None:
    out = printed("with_accelerate", 2)[0]
    assert re.search(LOSS, out) and "isinstance(model, fullshard.FSDPModule)=True" in out
