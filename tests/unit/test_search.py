"""`search` against brute force: every setting of small spaces, explained one by one."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from rotation import share
from torch import Tensor, nn

import fullshard
from fullshard.foresight.hardware import GPUS
from fullshard.foresight.question import ExplainArguments
from fullshard.foresight.search import Goal, search
from fullshard.foresight.space import Variants

BUDGET = 0.92
VALUES: dict[str, tuple[Any, ...]] = {
    "recompute": ("none", "selective", "every:2", "block"),
    "microbatches": (1, 2, 4),
    "accumulate": (True, False),
    "reshard_after_forward": (None, True, False, 4),
    "offload_policy": (fullshard.OffloadPolicy(), fullshard.CPUOffloadPolicy()),
    "mp_policy": tuple(fullshard.MixedPrecisionPolicy(torch.bfloat16, d) for d in (torch.float32, torch.bfloat16)),
    "comm_policy": (
        fullshard.CommPolicy(),
        fullshard.CommPolicy(reductions_in_flight=2),
        fullshard.CommPolicy(prefetch_bytes=0),
    ),
    "mesh": (None, (2, 4)),
    "states": (fullshard.ZERO3, fullshard.ZERO2, fullshard.ZERO1),
}


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 3 * dim), nn.Linear(3 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self, dim: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.head = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Space:
    """A model, a GPU and a space of settings, at random."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.goal: Goal = rng.choice(["fits", "fastest", "largest_batch", "fewest_gpus"])
        self.dim, self.rows = rng.choice([256, 512, 1024]), rng.choice([4, 8, 512])
        names = rng.sample(sorted(VALUES), 3)
        self.over = {name: tuple(rng.sample(VALUES[name], min(len(VALUES[name]), rng.choice([2, 3])))) for name in names}
        self.told: dict[str, Any] = {
            "build": partial(Model, self.dim, rng.choice([2, 3])),
            "batch": torch.empty(self.rows, rng.choice([16, 64]), self.dim, device="meta"),
            "world": 8,
            "loss": torch.sum,
            "optimizer": random.Random(seed + 1).choice(["adamw", "adamw", "muon"]),
        }
        slow = rng.choice([1.0, 0.02])  # of the link, so that messages count
        gpu = replace(GPUS["h100-sxm"], context=0, link=GPUS["h100-sxm"].link * slow, launch=rng.choice([0.0, 6e-6]))
        needed = fullshard.explain(**self.told, gpu=gpu).needed
        self.told["gpu"] = replace(gpu, memory=int(needed / BUDGET * rng.choice([0.05, 0.3, 0.6, 0.85, 0.95, 1.1])))

    def found(self, tolerance: float = 0.0) -> fullshard.Found:
        return search(**self.told, goal=self.goal, budget=BUDGET, over=self.over, tolerance=tolerance, seconds=1e9)

    def settings(self, many: int = 1) -> list[dict[str, Any]]:
        asked = ExplainArguments(**{**_defaults(), **self.told})
        found = []
        axes = [
            [getattr(asked, name), *(value for value in values if not _same(value, getattr(asked, name)))]
            for name, values in self.over.items()
        ]
        for values in itertools.product(*axes):
            changes = {name: value for name, value in zip(self.over, values) if not _same(value, getattr(asked, name))}
            if not ("accumulate" in changes and changes.get("microbatches", many) == 1):
                found.append(changes)
        return found

    def best(self, settings: list[dict[str, Any]]) -> tuple[float, dict[str, Any]] | None:
        """(tokens/s, changes) of the fastest that fits."""
        variants, most = Variants(ExplainArguments(**{**_defaults(), **self.told})), BUDGET * self.told["gpu"].memory
        found = []
        for changes in settings:
            r = variants.attempt(changes)
            if r is not None and r.needed <= most:
                found.append((r.tokens_per_second, changes))
        return max(found, key=lambda one: one[0], default=None)


def _defaults() -> dict[str, Any]:
    import inspect

    return {name: p.default for name, p in inspect.signature(fullshard.explain).parameters.items()}


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)


def _speed(found: tuple[float, dict[str, Any]] | None) -> float | None:
    return None if found is None else found[0]


def _brute(space: Space) -> float | None:
    every = space.settings()
    if space.goal in ("fits", "fastest"):
        groups = [[c for c in every if len(c) == n] for n in range(4)] if space.goal == "fits" else [every]
        rows = [
            [{**c, "rows": r} for c in every if "microbatches" not in c and "accumulate" not in c] for r in _halves(space.rows)
        ]
        return next((speed for group in (*groups, *rows) if (speed := _speed(space.best(group))) is not None), None)
    rest = [c for c in every if "microbatches" not in c and "accumulate" not in c]
    if space.goal == "largest_batch":
        best = None
        rows = space.rows
        while rows <= space.rows << 12:
            speed = _speed(space.best([{**c, "rows": rows} for c in rest]))
            if speed is None:
                break
            best, rows = speed, 2 * rows
        if best is None:
            best = next((s for r in _halves(space.rows) if (s := _speed(space.best([{**c, "rows": r} for c in rest])))), None)
        return best
    for world in range(1, 9):
        many = 8 // world if 8 % world == 0 else 1
        told = {"world": world, "mesh": None, "microbatches": many} if world < 8 else {"rows": space.rows}
        fits = [c for c in space.settings(many) if not {"mesh", "microbatches"} & set(c)] if world < 8 else rest
        speed = _speed(space.best([{**c, **told} for c in fits]))
        if speed is not None:
            return speed
    return None


def _halves(rows: int) -> list[int]:
    return [rows >> n for n in range(1, rows.bit_length())]


@pytest.mark.parametrize("seed", share(range(112)))
def test_a_search_finds_what_brute_force_finds(seed: int) -> None:
    space = Space(seed)
    found, expected = space.found(), _brute(space)
    if expected is None:
        assert found.best is None, (space.goal, space.over, found)
    else:
        assert found.best is not None, (space.goal, space.over, expected, found)
        assert found.best.speed == pytest.approx(expected, rel=1e-9), (space.goal, space.over, found)
        assert found.allows(found.best)


@pytest.mark.parametrize("seed", share(range(200, 240)))
def test_a_bound_is_no_more_than_what_a_setting_takes(seed: int) -> None:
    space = Space(seed)
    variants = Variants(ExplainArguments(**{**_defaults(), **space.told}))
    for changes in space.settings():
        bound, r = variants.bound(changes), variants.attempt(changes)
        assert (bound is None) == (r is None)
        if bound is not None and r is not None:
            assert bound.seconds <= r.timeline.seconds * (1 + 1e-9) and bound.nbytes <= r.needed, (changes, bound, r)


def test_a_tolerance_leaves_settings_out_and_says_what_they_may_be_worth() -> None:
    build, batch = partial(Model, 512, 4), torch.empty(64, 1024, 512, device="meta")
    told: dict[str, Any] = {"goal": "fastest", "world": 8, "loss": torch.sum}
    told["over"] = {name: VALUES[name] for name in ("recompute", "reshard_after_forward", "mp_policy", "comm_policy")}
    exact = search(build, batch, tolerance=0.0, seconds=1e9, **told)
    near = search(build, batch, tolerance=0.05, **told)
    assert exact.best is not None and near.best is not None
    assert near.best.speed >= exact.best.speed / 1.05 and len(near.tried) < len(exact.tried)
    assert near.left > 0 and near.gap <= 0.05 and not near.stopped
    assert f"{near.left:,} more cannot fit, or cannot be more than {near.gap:.1%} faster" in str(near)
    hurried = search(build, batch, tolerance=0.0, seconds=1e-9, **told)
    assert hurried.stopped and "out of time" in str(hurried) and hurried.gap >= 0


def test_a_search_names_the_least_memory_that_is_fast_enough() -> None:
    levels = (fullshard.ZERO3, fullshard.ZERO2, fullshard.ZERO1)
    build, batch = partial(Model, 512, 4), torch.empty(4, 64, 512, device="meta")
    found = search(build, batch, goal="fastest", world=8, loss=torch.sum, microbatches=4, over={"states": levels})
    assert found.best is not None and found.leanest is not None
    speeds = [one.speed for one in found.tried if one.speed >= 0.98 * found.best.speed]
    assert found.leanest.speed in speeds and found.leanest.needed == min(
        one.needed for one in found.tried if one.speed in speeds
    )
    assert "states=ZERO" in str(found)
    told = {"states": (*levels, fullshard.HFSDP), "mesh": (None, (2, 8), (4, 4))}
    found = search(build, batch, goal="fastest", world=16, loss=torch.sum, microbatches=4, tolerance=0.0, over=told)
    settings = [one.explanation.setting for one in found.tried]
    assert any(setting.states == fullshard.HFSDP for setting in settings)
    assert all(setting.hybrid for setting in settings if setting.states == fullshard.HFSDP)
    assert ("least memory within 2% of the fastest" in str(found)) == (found.leanest is not found.best)


@pytest.mark.parametrize(
    "options, told",
    [
        ({"over": {"speed": (1, 2)}}, "over must have names out of recompute, .* got 'speed', which a search does not change"),
        ({"over": {"gpu": ("h200",)}}, "got 'gpu', which a search does not change"),
        ({"over": {"world": (4, 8)}}, "got 'world', which a search does not change"),
        ({"over": {"recompute": "block"}}, r"over\['recompute'\] must be a sequence of values to try, got 'block'"),
        ({"tolerance": 1.0}, "tolerance must be from 0 to below 1"),
        ({"seconds": 0}, "seconds more than 0"),
    ],
)
def test_a_search_refuses_spaces_and_limits_that_cannot_be(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        search(partial(Model, 64, 2), torch.empty(4, 8, 64, device="meta"), world=8, loss=torch.sum, **options)


def test_values_that_print_alike_are_all_tried() -> None:
    """Settings were found again by their text, which has no compute dtype, and of a plan only the number of its units."""
    build, batch = partial(Model, 64, 3), torch.empty(8, 4, 64, device="meta")
    policies = [fullshard.MixedPrecisionPolicy(dtype, torch.float32) for dtype in (torch.float16, None)]
    plans = []
    for dropped in ("blocks.0", "blocks.1"):
        plans.append(fullshard.plan_model(build()))
        plans[-1].add(dropped) if dropped not in {unit.name for unit in plans[-1].units} else plans[-1].drop(dropped)
    comms = [fullshard.CommPolicy(direct_min_bytes=nbytes) for nbytes in (0, 1 << 40)]
    for over in ({"mp_policy": policies}, {"plan": plans}, {"comm_policy": comms}):
        found = search(build, batch, goal="fastest", world=8, loss=torch.sum, over=over, tolerance=0.0, seconds=1e9)
        (name,) = over
        assert [one.changes.get(name) for one in found.tried] == [None, *over[name]], found


def test_a_mesh_may_be_a_list_and_no_microbatches_are_refused_by_name() -> None:
    build, batch = partial(Model, 64, 2), torch.empty(8, 4, 64, device="meta")
    found = search(build, batch, goal="fastest", world=8, loss=torch.sum, mesh=[2, 4], over={"accumulate": (True, False)})
    assert found.best is not None and found.best.explanation.setting.hybrid
    with pytest.raises(ValueError, match="microbatches must be an int of at least 1, got 0"):
        search(build, batch, goal="fastest", world=8, loss=torch.sum, over={"microbatches": (0,)})


def test_microbatches_that_do_not_divide_the_batch_are_invalid() -> None:
    """Three microbatches of eight rows were those of six rows."""
    found = search(
        partial(Model, 64, 2), torch.empty(8, 4, 64), goal="fastest", world=8, loss=torch.sum, over={"microbatches": (2, 3, 16)}
    )
    assert [one.changes for one in found.tried] == [{}, {"microbatches": 2}]
    assert "invalid: microbatches=3: microbatches=3 does not divide the 8 rows of the batch" in str(found)
    assert [changes["microbatches"] for changes, _ in found.skipped] == [3, 16]


def test_a_setting_that_is_left_out_counts_once() -> None:
    """It was counted as left out after it had been simulated, too."""
    build, batch = partial(Model, 256, 4), torch.empty(1024, 4, 256, device="meta")
    gpu = replace(GPUS["h100-sxm"], memory=GPUS["h100-sxm"].context + (4 << 20))
    over = {"accumulate": (False,), "microbatches": (2,)}
    found = search(build, batch, goal="fastest", world=8, gpu=gpu, loss=torch.sum, over=over)
    assert found.best is None and found.left
    assert found.left + len(found.tried) == 3 + 10, "two microbatches reduced once or twice, or one of 1024, 512, ... or 1 row"
