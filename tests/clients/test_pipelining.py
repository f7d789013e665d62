"""torch's pipeline schedules over sharded stages: losses and gradients of the whole model in one process."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
import torch.distributed as dist
from launch import assert_sharded_by_us, full, launch
from torch import Tensor, nn
from torch.distributed import pipelining

STEPS, MICROBATCHES, ROWS, DIM, BLOCKS = 3, 4, 16, 7, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 13)
        self.down = nn.Linear(13, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stage(nn.Module):
    """Some blocks of the whole; each is a unit, and so is the stage (whose own parameter is `scale`)."""

    def __init__(self, blocks: list[Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.scale = nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.scale


def _stages(count: int) -> list[Stage]:
    torch.manual_seed(0)
    each = max(BLOCKS // count, 1)
    blocks = [Block() for _ in range(each * count)]
    return [Stage(blocks[i * each : (i + 1) * each]) for i in range(count)]


def _batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, DIM, generator=generator), torch.randn(ROWS, DIM, generator=generator)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")


def _owned(name: str, rank: int, ranks: int, per_rank: int) -> list[int]:
    """The stages of a rank: looped (0 2 | 1 3), or a V (0 3 | 1 2) where the schedule is one."""
    if name in V_SHAPED:
        return [rank, 2 * ranks - 1 - rank]
    return [rank + i * ranks for i in range(per_rank)]


def _pipeline(
    rank: int,
    size: int,
    *,
    name: str,
    per_rank: int,
    reshard_after_forward: bool | None = False,
    reduce_dtype: Any = None,
    evaluate: bool = False,
) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    schedule_class = getattr(pipelining.schedules, name)
    mesh = dist.init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("pp", "dp"))
    pp, dp = mesh["pp"], mesh["dp"]
    count = 2 * per_rank
    indices = _owned(name, pp.get_local_rank(), 2, per_rank)

    parts = [_stages(count)[index] for index in indices]
    options = {"mesh": dp, "mp_policy": MixedPrecisionPolicy(reduce_dtype=reduce_dtype)}
    for part in parts:
        for block in part.blocks:
            fully_shard(block, reshard_after_forward=reshard_after_forward, **options)
        fully_shard(part, reshard_after_forward=reshard_after_forward, **options)
        assert_sharded_by_us(part)
    stages = [
        pipelining.PipelineStage(part, index, count, torch.device("cpu"), group=pp.get_group())
        for part, index in zip(parts, indices)
    ]
    schedule = schedule_class(stages if per_rank > 1 else stages[0], MICROBATCHES, loss_fn=_loss)
    optimizer = torch.optim.AdamW([p for part in parts for p in part.parameters()], lr=1e-2)

    reference = nn.Sequential(*_stages(count))
    reference_optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for step in range(STEPS):
        batch, target = _batch(step)
        expected = _loss(reference(batch), target)
        expected.backward()

        mine, wanted = (t.chunk(dp.size())[dp.get_local_rank()] for t in (batch, target))
        losses: list[Tensor] = []
        inputs, last = (mine,) if 0 in indices else (), count - 1 in indices
        if last:
            schedule.step(*inputs, target=wanted, losses=losses)
            loss = torch.stack(losses).mean()
            dist.all_reduce(loss, group=dp.get_group())
            tiny.assert_near(loss / dp.size(), expected.detach(), f"loss of step {step}")
        else:
            schedule.step(*inputs)

        for part, index in zip(parts, indices):
            want = dict(reference[index].named_parameters())
            for key, parameter in part.named_parameters():
                assert parameter.grad is not None, f"step {step}, stage {index}, {key} has no gradient"
                tiny.assert_near(full(parameter.grad), want[key].grad, f"gradient of {key} of stage {index}, step {step}")
        for each in (optimizer, reference_optimizer):
            each.step()
            each.zero_grad()
        if evaluate:
            if last:
                tiny.assert_near(schedule.eval(*inputs, target=wanted), reference(mine).detach(), f"outputs after step {step}")
            else:
                schedule.eval(*inputs)
            # the schedule asks for a reduction here too, of gradients that there are none of
            assert all(parameter.grad is None for part in parts for parameter in part.parameters())


SCHEDULES = [
    ("ScheduleGPipe", 1),
    ("Schedule1F1B", 1),
    ("ScheduleInterleaved1F1B", 2),
    ("ScheduleLoopedBFS", 2),
    ("ScheduleInterleavedZeroBubble", 2),
    ("ScheduleZBVZeroBubble", 2),
    ("ScheduleDualPipeV", 2),
]


@pytest.mark.rotates(3)
@pytest.mark.parametrize("size", [2, 4], ids=["pp2_dp1", "pp2_dp2"])
@pytest.mark.parametrize(("name", "per_rank"), SCHEDULES, ids=[name for name, _ in SCHEDULES])
def test_schedule_over_sharded_stages_gives_the_gradients_of_the_whole_model(size, name, per_rank):
    if name in V_SHAPED and torch.__version__ < "2.13":
        pytest.skip("before torch 2.13 a V-shaped schedule warms up by sending to its own rank, which gloo cannot do")
    launch(_pipeline, size=size, name=name, per_rank=per_rank)


@pytest.mark.rotates(3)
@pytest.mark.parametrize(("name", "per_rank"), SCHEDULES[:3], ids=[name for name, _ in SCHEDULES[:3]])
def test_units_that_reshard_after_forward_are_gathered_again_for_each_microbatch(name, per_rank):
    launch(_pipeline, size=4, name=name, per_rank=per_rank, reshard_after_forward=None)


def test_gradients_accumulate_over_microbatches_in_the_reduce_dtype():
    launch(_pipeline, size=4, name="Schedule1F1B", per_rank=1, reduce_dtype=torch.float64)


@pytest.mark.parametrize(("name", "per_rank"), [SCHEDULES[1], SCHEDULES[2]], ids=[SCHEDULES[1][0], SCHEDULES[2][0]])
def test_evaluating_between_training_steps_sees_the_new_weights_and_no_gradients(name, per_rank):
    launch(_pipeline, size=4, name=name, per_rank=per_rank, evaluate=True)


def test_stages_that_the_schedule_evicts_between_forward_and_backward_keep_their_gradients():
    """A rank has at most three of its stages gathered: the fourth pushes out one that waits for its backward."""
    launch(_pipeline, size=4, name="ScheduleInterleaved1F1B", per_rank=4)


def _gradients(rank: int, size: int, fully_shard: Any, *, name: str, per_rank: int, **options: Any) -> list[Tensor]:
    """The gradients of three steps of a schedule over stages that `fully_shard` sharded."""
    mesh = dist.init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("pp", "dp"))
    pp, dp = mesh["pp"], mesh["dp"]
    count = 2 * per_rank
    indices = _owned(name, pp.get_local_rank(), 2, per_rank)
    parts = [_stages(count)[index] for index in indices]
    for part in parts:
        for block in part.blocks:
            fully_shard(block, mesh=dp, reshard_after_forward=False)
        fully_shard(part, mesh=dp, reshard_after_forward=False)
    stages = [
        pipelining.PipelineStage(part, index, count, torch.device("cpu"), group=pp.get_group())
        for part, index in zip(parts, indices)
    ]
    schedule_class = getattr(pipelining.schedules, name)
    schedule = schedule_class(stages if per_rank > 1 else stages[0], MICROBATCHES, loss_fn=_loss, **options)
    found: list[Tensor] = []
    for step in range(STEPS):
        batch, target = (t.chunk(dp.size())[dp.get_local_rank()] for t in _batch(step))
        schedule.step(*((batch,) if 0 in indices else ()), **({"target": target} if count - 1 in indices else {}))
        for part in parts:
            found += [full(parameter.grad).clone() for parameter in part.parameters()]
            part.zero_grad()
    return found


def _both(rank: int, size: int, **options: Any) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.fsdp._fully_shard._fully_shard import fully_shard as theirs

    assert fully_shard is not theirs, "ours is installed"
    ours, wanted = _gradients(rank, size, fully_shard, **options), _gradients(rank, size, theirs, **options)
    assert len(ours) == len(wanted) > 0
    for index, (one, other) in enumerate(zip(ours, wanted)):
        assert torch.equal(one, other), f"gradient {index} is off by {(one - other).abs().max().item()}"


MANUAL = hasattr(torch.distributed.fsdp, "GradientReductionHandle")  # torch 2.15 ends backwards by calls


@pytest.mark.skipif(not MANUAL, reason="before torch 2.15 schedules look into FSDP2's state, which cannot be theirs and ours")
@pytest.mark.parametrize("size", [2, 4], ids=["pp2_dp1", "pp2_dp2"])
@pytest.mark.parametrize(
    ("name", "per_rank", "options"),
    [
        ("ScheduleGPipe", 1, {}),
        ("Schedule1F1B", 1, {}),
        ("ScheduleInterleaved1F1B", 2, {}),
        ("ScheduleInterleaved1F1B", 2, {"defer_reduce_grad_wait": True}),
        ("ScheduleInterleavedZeroBubble", 2, {}),
        ("ScheduleZBVZeroBubble", 2, {"defer_reduce_grad_wait": True}),
    ],
    ids=lambda value: "".join(value) if isinstance(value, (str, dict)) else None,
)
def test_schedules_that_end_backwards_by_calls_give_the_bits_of_torchs(size, name, per_rank, options):
    launch(_both, size=size, name=name, per_rank=per_rank, **options)
