"""Plans of owners: deterministic, balanced, every matrix once, and no message larger than it should be."""

from __future__ import annotations

import itertools
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fullshard import plan_owners
from fullshard.optim.owners import WIRE_ITEMSIZE, Matrix

SHAPES = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), max_size=9)


@given(
    shapes=SHAPES,
    ranks=st.integers(1, 6),
    replicas=st.integers(1, 3),
    dim=st.integers(0, 1),
    bucket_nbytes=st.integers(1, 4000),
)
def test_every_matrix_has_one_owner_and_one_bucket(
    shapes: list[tuple[int, int]], ranks: int, replicas: int, dim: int, bucket_nbytes: int
) -> None:
    matrices = [Matrix(str(index), shape, dim) for index, shape in enumerate(shapes)]
    plan = plan_owners(matrices, ranks, replicas=replicas, bucket_nbytes=bucket_nbytes)
    assert plan == plan_owners(matrices, ranks, replicas=replicas, bucket_nbytes=bucket_nbytes)
    assert sorted(index for bucket in plan.buckets for index in bucket) == list(range(len(shapes)))
    assert len(plan.owners) == len(shapes) and set(plan.owners) <= set(range(ranks * replicas))
    assert sorted(index for replica in range(replicas) for index in plan.of_replica(replica)) == list(range(len(shapes)))
    for bucket, owner in itertools.product(plan.buckets, range(ranks * replicas)):
        held = [prod(shapes[index]) * WIRE_ITEMSIZE for index in bucket if plan.owners[index] == owner]
        assert sum(held) <= bucket_nbytes or len(held) == 1
    everything = sum(map(prod, shapes)) * WIRE_ITEMSIZE
    own = sum(
        matrix.shard_numel(ranks, owner % ranks) * WIRE_ITEMSIZE for matrix, owner in zip(plan.matrices, plan.owners)
    )  # is not sent, neither there nor back
    sent = sum(plan.sent_nbytes(rank, replica) for rank in range(ranks) for replica in range(replicas))
    assert sent == 2 * (everything - own) + (replicas - 1) * everything


@given(shapes=SHAPES.filter(bool), ranks=st.integers(1, 3))
def test_no_assignment_is_much_better(shapes: list[tuple[int, int]], ranks: int) -> None:
    """Longest first is at most 4/3 of the best, less a third of a share (Graham 1969)."""
    plan = plan_owners([(str(index), shape) for index, shape in enumerate(shapes[:6])], ranks)
    costs = [matrix.cost for matrix in plan.matrices]
    best = min(
        max(sum(cost for cost, owner in zip(costs, owners) if owner == rank) for rank in range(ranks))
        for owners in itertools.product(range(ranks), repeat=len(costs))
    )
    assert max(plan.loads) <= best * (4 / 3 - 1 / (3 * ranks)) + 1e-9


def llama(layers: int, dim: int, kv: int, hidden: int) -> list[tuple[str, tuple[int, int]]]:
    shapes = {
        "q": (dim, dim), "k": (kv, dim), "v": (kv, dim), "o": (dim, dim),
        "gate": (hidden, dim), "up": (hidden, dim), "down": (dim, hidden),
    }  # fmt: skip
    return [(f"layers.{layer}.{name}", shape) for layer in range(layers) for name, shape in shapes.items()]


@pytest.mark.parametrize(
    "model, most",
    [(llama(32, 4096, 1024, 14336), {8: 1.01, 64: 1.06, 128: 1.06}), (llama(80, 8192, 1024, 28672), {64: 1.012, 128: 1.012})],
    ids=["8B", "70B"],
)
def test_the_matrices_of_llama_are_balanced(model: list[tuple[str, tuple[int, int]]], most: dict[int, float]) -> None:
    numel = sum(prod(shape) for _, shape in model)
    for ranks, limit in most.items():
        plan = plan_owners(model, ranks)
        assert plan.imbalance <= limit, (ranks, plan.imbalance)
        mean = sum(map(plan.sent_nbytes, range(ranks))) / ranks
        assert mean == pytest.approx(4 * numel / ranks * (ranks - 1) / ranks)
        assert f"on {ranks} ranks" in str(plan) and "MB per step" in str(plan)


def test_names_and_parameters_are_taken_as_models_yield_them() -> None:
    model = nn.Linear(3, 5, bias=False)
    assert plan_owners(model.named_parameters(), 2).matrices == (Matrix("weight", (5, 3)),)
    assert plan_owners([], 2).buckets == () and plan_owners([], 2).imbalance == 1.0
    with pytest.raises(ValueError, match=r"Expected a matrix of two dims as 'bias', got shape \(5,\)"):
        plan_owners([("bias", torch.empty(5))], 2)
    with pytest.raises(ValueError, match="ranks"):
        plan_owners([], 0)
