"""`explain` of twelve models of transformers as they are, beside what a step of them takes on two gloo ranks."""

from __future__ import annotations

from functools import partial

import pytest
import torch

pytest.importorskip("transformers")

import zoo
from launch import launch


def _compare(rank: int, size: int, *, kind: str) -> None:
    import torch.distributed as dist

    import fullshard

    torch.manual_seed(0)
    model = zoo.build(kind)
    batch = zoo.batch(kind, rank)
    fullshard.shard_model(model)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with fullshard.record(model, memory=True) as run:
        for _ in range(3):
            step()
    r = fullshard.explain(partial(zoo.build, kind), zoo.meta(kind), world=size, gpu="cpu", keep_output=False)
    held = sum(tensor.nbytes for tensor in batch.values())
    assert run.peak is not None
    assert list(run.messages) == list(r.messages)
    assert abs(r.peak / (run.peak + held) - 1) <= 0.01, f"{r.peak} predicted, {run.peak + held} seen\n{r}"
    dist.barrier()


@pytest.mark.parametrize("kind", zoo.KINDS)
def test_messages_are_those_of_a_run_and_peaks_within_one_percent(kind: str) -> None:
    launch(_compare, size=2, kind=kind)
