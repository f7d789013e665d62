"""Replica groups of torchft: groups and ranks that die and return, refused steps, and replicas that run different units."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("torchft")

from launch import launch
from replica import groups
from torch.distributed.device_mesh import init_device_mesh

import fullshard


@pytest.mark.parametrize("spec", [{}, {"level": "ZERO1", "micros": 2, "defers": True}, {"level": "ZERO2", "refused": [1, 2]}])
def test_groups_train_as_one_process(spec: dict[str, Any], tmp_path: Path) -> None:
    """Weights and states have the bits of an unsharded process after each step, also after one that nobody committed."""
    with groups(tmp_path, steps=5, **spec) as run:
        run.finish()
        assert run.check_replay() == 20 and run.check_equal() == 10, run.told()
        refused = [one["error"] for group in (0, 1) for one in run.log(group) if not one["committed"]]
        assert bool(refused) is ("refused" in spec), run.told()


@pytest.mark.parametrize(
    ("where", "ranks", "level"),
    [("backward", [0, 1], "ZERO3"), ("forward", [1], "ZERO3"), ("after", [0, 1], "ZERO1")],
)
def test_a_group_that_dies_returns_with_equal_bits(where: str, ranks: list[int], level: str, tmp_path: Path) -> None:
    """The others go on and lose one step at most; the group that returns has their weights, states, averages and random numbers."""
    die = {"group": 1, "where": where, "step": 3, "ranks": ranks}
    with groups(tmp_path, steps=40, pause=0.1, level=level, die=die) as run:
        run.wait(lambda: run.ended(1))
        died = min(one["time"] for rank in ranks for one in run.log(1, rank, "died"))
        if len(ranks) == 1:  # its partner is told
            (raised,) = run.log(1, 0, "raised")
            assert "rank 1" in raised["chain"][0], raised
        run.wait(lambda: run.log(0)[-1]["now"] > 6)
        run.start(1)
        run.finish()
        told = [one for one in run.log(0) if one["time"] > died]
        ready = run.log(1, 0, "ready")[-1]["time"]
        back = [one for one in run.log(1) if one["time"] > ready and one["committed"]]
        lost = sum(not one["committed"] for one in told)
        print(
            f"goes on after {told[lost]['time'] - died:.2f} s, {lost} steps lost; back {back[0]['time'] - ready:.2f} s after its start"
        )
        assert lost <= 1 and back, run.told()
        run.check_replay()
        assert run.check_equal() > 4
        same = {one["now"]: one["also"] for one in run.log(0)}
        assert all(one["also"] == same[one["now"]] for one in back if one["takes_part"]), run.told()


@pytest.mark.parametrize("spec", [{}, {"level": "ZERO2", "refused": [0, 0]}])
def test_groups_that_begin_with_other_weights_begin_alike(spec: dict[str, Any], tmp_path: Path) -> None:
    """torchft's default: in its first quorum some ranks load and others do not."""
    with groups(tmp_path, steps=4, seeds=True, **spec) as run:
        run.finish()
        assert run.check_equal() == 8, run.told()


def test_a_parameter_that_one_group_uses_alone_is_trained_in_both(tmp_path: Path) -> None:
    with groups(tmp_path, steps=4, rare=[0]) as run:
        run.finish()
        assert run.check_replay() == 16 and run.check_equal() == 8, run.told()


def test_a_group_that_is_late_is_waited_for(tmp_path: Path) -> None:
    """`CheckPolicy(timeout=)` is for the ranks of a group."""
    with groups(tmp_path, steps=4, slow=[1, 2], timeout=2.0) as run:
        run.finish()
        assert run.check_replay() == 16, run.told()


@pytest.mark.proves("45d")
@pytest.mark.parametrize("skipped", [{"0": [1], "1": [2]}, {"1": [2]}])
def test_groups_that_run_different_units_are_told_which_and_do_not_step(skipped: dict[str, list[int]], tmp_path: Path) -> None:
    """Blocks of equal size, which would be averaged with each other, and one block less, which would break the transport."""
    with groups(tmp_path, steps=4, attempts=3, skipped=skipped) as run:
        run.finish()
        for group in (0, 1):
            told = run.log(group)
            assert len(told) == 3 and not any(one["committed"] for one in told), run.told()
            assert all("other units than this one: " in one["error"] and "blocks.2" in one["error"] for one in told), run.told()


def _refused(rank: int, size: int) -> None:
    model: Any = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ValueError, match="without units"):
        fullshard.replicas.attach(model, optimizer, None)
    fullshard.shard_model(model)
    with pytest.raises(ValueError, match="no state for 'mine'"):
        fullshard.replicas.attach(model, optimizer, None, also={"mine": 3})
    with pytest.raises(ValueError, match="also= has 'model'"):
        fullshard.replicas.attach(model, optimizer, None, also={"model": {}})
    handle = model.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(ValueError, match="'weight' have hooks on accumulated gradients"):
        fullshard.replicas.attach(model, optimizer, None)
    handle.remove()
    hybrid = nn.Linear(2, 2)
    fullshard.shard_model(hybrid, mesh=init_device_mesh("cpu", (2, 1)))
    with pytest.raises(ValueError, match="has replicas inside of this group"):
        fullshard.replicas.attach(hybrid, optimizer, None)


def test_what_cannot_be_attached_is_refused_by_name() -> None:
    launch(_refused)
