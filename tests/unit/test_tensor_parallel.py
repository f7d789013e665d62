"""`explain` with tensor parallelism: what each rank has, computes and sends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import fullshard
from fullshard import MixedPrecisionPolicy
from fullshard.foresight.trace import TensorParallelCollective

DIM, DEPTH, ROWS = 128, 3, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(DEPTH)), nn.Linear(DIM, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def parallelize(model: Any, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def loss(output: Tensor) -> Tensor:
    return output.square().mean()


def explained(tensor_parallel: int = 1, world: int = 4, **options: Any) -> fullshard.Explanation:
    told = {"tensor_parallel": tensor_parallel, "parallelize": parallelize} if tensor_parallel > 1 else {}
    return fullshard.explain(Model, torch.empty(ROWS, DIM, device="meta"), world=world, loss=loss, **told, **options)


def test_ranks_of_tensor_parallelism_have_and_compute_their_part_and_wait_for_each_other() -> None:
    one, four = explained(), explained(4, world=16)
    products = DEPTH * 2 * 3 * 2 * ROWS * DIM * 4 * DIM  # of the blocks: two, in three passes
    rest = one.flops - products
    assert four.flops - rest == products // 4, "the head is on every rank"
    sent = [event.message for event in four.traced.trace.events if isinstance(event, TensorParallelCollective)]
    assert [m.kind for m in sent] == ["all_reduce"] * 2 * DEPTH, "one in the forward of each block, one in its backward"
    assert all(m.nbytes == ROWS * DIM * 2 and m.ranks == 4 for m in sent), "activations in bf16"
    assert not any(message in sent for message in four.messages), "messages are those of the library"
    assert {span.lane for span in four.timeline.spans} >= {"tensor", "gather", "reduce"}
    assert four.setting.ranks == 4 and four.setting.tensor_parallel == 4
    gathered = sum(m.nbytes for m in four.messages if m.kind == "all_gather")
    assert gathered < 0.3 * sum(m.nbytes for m in one.messages if m.kind == "all_gather")
    assert "4 ranks x 4 of tensor parallelism" in str(four).splitlines()[0]
    assert four.tokens_per_second * four.seconds * 4 == pytest.approx(ROWS), "four GPUs share a batch"


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


def test_sequence_parallelism_around_a_fused_norm_sends_what_the_decomposed_one_sends() -> None:
    def split(model: Any, mesh: DeviceMesh) -> None:
        head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
        parallelize_module(model, mesh, {"norm": SequenceParallel(), "head": head})

    told: dict[str, Any] = {
        "world": 4,
        "tensor_parallel": 4,
        "parallelize": split,
        "loss": loss,
        "mp_policy": MixedPrecisionPolicy(),
    }
    sent = []
    for gpu in ("cpu", "h100-sxm"):
        found = fullshard.explain(Normed, torch.empty(2, ROWS, DIM, device="meta"), gpu=gpu, **told)
        sent.append([event.message for event in found.traced.trace.events if isinstance(event, TensorParallelCollective)])
    assert sent[0] == sent[1] and len(sent[0]) == 3, (
        "an all-gather in front of the head, its reduction, and the output's gather"
    )


def test_messages_inside_a_machine_stay_there_and_others_begin_where_tensor_parallelism_ends() -> None:
    inside, apart = explained(8, world=8), explained(8, world=16)
    assert not inside.timeline.links.get("between")
    assert apart.timeline.links["between"] > 0, "two ranks that have the same part are on two machines"
    assert apart.but(per_node=16).timeline.links.get("between", 0) == 0


def test_a_search_and_other_questions_go_on_without_a_process_group() -> None:
    r = explained(2)
    assert not torch.distributed.is_initialized()
    assert r.but(reshard_after_forward=False).messages != r.messages
    found = fullshard.search(
        Model,
        torch.empty(ROWS, DIM, device="meta"),
        world=4,
        loss=loss,
        tensor_parallel=2,
        parallelize=parallelize,
        goal="fastest",
        over={"reshard_after_forward": (True, False)},
    )
    assert found.best is not None and found.best.explanation.setting.tensor_parallel == 2


@pytest.mark.parametrize(
    "options, told",
    [
        ({"tensor_parallel": 3, "parallelize": parallelize}, "tensor_parallel must be a number of ranks that divides the world of 4, got 3"),
        ({"tensor_parallel": 2}, "tensor_parallel=2 does not match parallelize=None"),
        ({"parallelize": parallelize}, "tensor_parallel=1 does not match parallelize="),
        ({"tensor_parallel": 2, "parallelize": lambda model, mesh: model.layers}, r"parallelize\(\) raises AttributeError: .*layers.*test_tensor_parallel.py:\d+"),
    ],
)  # fmt: skip
def test_tensor_parallelism_that_cannot_be_is_refused_before_anything_is_traced(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        fullshard.explain(Model, torch.empty(ROWS, DIM, device="meta"), world=4, loss=loss, **options)
    assert not torch.distributed.is_initialized()
