"""Plans of owners: deterministic, balanced, every matrix once, and no message larger than it should be."""

from __future__ import annotations

import itertools
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fullshard import Matrix, matrices_of, plan_owners
from fullshard.optim.owners import WIRE_ITEMSIZE, plan_of_some

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
    for bucket, owner in itertools.product(plan.buckets, range(ranks * replicas)):
        held = [prod(shapes[index]) * WIRE_ITEMSIZE for index in bucket if plan.owners[index] == owner]
        assert sum(held) <= bucket_nbytes or len(held) == 1
    everything = sum(map(prod, shapes)) * WIRE_ITEMSIZE
    own = sum(
        prod(matrix.shard_shape(ranks, owner % ranks)) * WIRE_ITEMSIZE for matrix, owner in zip(plan.matrices, plan.owners)
    )  # is not sent, neither there nor back
    # the all-gather over replicas, to which each of them sends as much as the one with the most
    most = [
        max(
            sum(prod(m.shard_shape(ranks, rank)) for m, owner in zip(matrices, plan.owners) if owner // ranks == replica)
            for replica in range(replicas)
        )
        for rank in range(ranks)
    ]
    sent = sum(plan.sent_nbytes(rank, replica) for rank in range(ranks) for replica in range(replicas))
    assert sent == 2 * (everything - own) + replicas * (replicas - 1) * sum(most) * WIRE_ITEMSIZE


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


@pytest.mark.rotates(2)
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


@given(data=st.data(), length=st.integers(1, 30), ranks=st.integers(1, 7), columns=st.integers(1, 3))
def test_shards_of_a_piece_are_its_rows_in_torch_chunks(data: st.DataObject, length: int, ranks: int, columns: int) -> None:
    """Against torch.chunk of the whole parameter, whose rows are numbered."""
    start = data.draw(st.integers(0, length - 1))
    size = data.draw(st.integers(1, length - start))
    piece = Matrix("piece", (size, columns), 0, start, length)
    chunks = list(torch.arange(length).chunk(ranks))
    chunks += [torch.arange(0)] * (ranks - len(chunks))
    for rank, chunk in enumerate(chunks):
        mine = [row - start for row in chunk.tolist() if start <= row < start + size]
        assert list(piece.rows(ranks, rank)) == mine
        assert piece.shard_shape(ranks, rank) == (len(mine), columns)
    counts = [len(piece.rows(ranks, rank)) for rank in range(ranks)]
    assert piece.holder(ranks) == (counts.index(size) if size in counts else None)


@given(
    stacks=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=3),
    shapes=SHAPES,
    ranks=st.integers(1, 4),
    replicas=st.integers(1, 2),
)
def test_no_owner_has_more_than_the_bound_though_some_matrices_stay_where_they_are(
    stacks: list[tuple[int, int]], shapes: list[tuple[int, int]], ranks: int, replicas: int
) -> None:
    """What a rank has whole stays there only up to the mean; with the rest by longest first no owner exceeds mean + longest."""
    experts = [
        Matrix(f"{number} {expert}", (1, width, width), 0, expert, count)
        for number, (count, width) in enumerate(stacks)
        for expert in range(count)
    ]
    plan = plan_owners([*experts, *(Matrix(str(index), shape) for index, shape in enumerate(shapes))], ranks, replicas=replicas)
    mean, longest = sum(plan.costs) / len(plan.loads), max(plan.costs)
    assert max(plan.loads) <= mean + longest + 1e-9
    for index, matrix in enumerate(plan.matrices[: len(experts)]):
        if plan.loads[matrix.holder(ranks) or 0] < mean - plan.costs[index]:  # there would have been room
            assert plan.owners[index] % ranks == matrix.holder(ranks)


@given(shapes=SHAPES.filter(bool), ranks=st.integers(1, 4), data=st.data())
def test_a_plan_of_some_matrices_keeps_their_owners_and_their_order(
    shapes: list[tuple[int, int]], ranks: int, data: st.DataObject
) -> None:
    plan = plan_owners([Matrix(str(index), shape) for index, shape in enumerate(shapes)], ranks, bucket_nbytes=900)
    indices = sorted(data.draw(st.sets(st.integers(0, len(shapes) - 1))))
    some = plan_of_some(plan, indices)
    assert [matrix.name for matrix in some.matrices] == [str(index) for index in indices]
    assert list(some.owners) == [plan.owners[index] for index in indices]
    flat = [int(some.matrices[index].name) for bucket in some.buckets for index in bucket]
    assert flat == [index for bucket in plan.buckets for index in bucket if index in indices]
    assert some.imbalance >= 1.0 or not indices


def test_a_cost_of_ones_own_and_wider_messages() -> None:
    shapes = [("a", (64, 1)), ("b", (8, 8)), ("c", (8, 8))]
    plan = plan_owners(shapes, 2, cost=lambda matrix: float(matrix.shape[0]), itemsize=4)
    assert plan.owners == (0, 1, 1) and plan.loads == (64.0, 16.0)
    assert plan.sent_nbytes(0) == 2 * plan_owners(shapes, 2, cost=lambda matrix: float(matrix.shape[0])).sent_nbytes(0)
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="Expected a finite cost of at least 0 for matrix 'a'"):
            plan_owners(shapes, 2, cost=lambda matrix, wrong=wrong: wrong)
    with pytest.raises(ValueError, match="itemsize"):
        plan_owners(shapes, 2, itemsize=0)


class Decoder(nn.Module):
    """A name of each role."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.tok = nn.Embedding(50, 8)
        self.pos_embed = nn.Parameter(torch.empty(1, 12, 8))
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "attn": nn.Linear(8, 24),
                    "gate": nn.Linear(32, 4, bias=False),
                    "output": nn.Linear(8, 8),
                    "norm": nn.LayerNorm((4, 8)),
                }
            )
            for _ in range(2)
        )
        self.conv = nn.Conv2d(3, 4, 2)
        self.head = nn.Linear(8, 50, bias=False)
        self.score = nn.Linear(8, 3, bias=False)
        if tied:
            self.head.weight = self.tok.weight


@pytest.mark.parametrize("tied", [False, True])
def test_roles_decide_which_parameters_are_matrices(tied: bool) -> None:
    model = Decoder(tied)
    choice = matrices_of(model)
    taken = {name for name, (_, is_taken, _) in choice.reasons.items() if is_taken}
    assert taken == {f"layers.{layer}.{name}.weight" for layer in (0, 1) for name in ("attn", "output")}
    assert {id(one) for one in (*choice.matrices, *choice.rest)} == set(map(id, model.parameters()))
    assert len(choice.matrices) + len(choice.rest) == len(list(model.parameters()))
    reasons = {name: reason for name, (_, _, reason) in choice.reasons.items()}
    assert reasons["tok.weight"] == "an embedding" and reasons["layers.0.norm.weight"] == "a norm"
    assert reasons["layers.1.gate.weight"].startswith("a router") and reasons["score.weight"].startswith("an output layer")
    assert reasons["conv.weight"] == "4 dims" and reasons["layers.0.attn.bias"] == "1 dim" and reasons["pos_embed"] == "3 dims"
    assert tied or reasons["head.weight"] == "an output layer: as many rows as an embedding"
    wrapped = matrices_of(checkpoint_wrapper(nn.ModuleDict({"score": checkpoint_wrapper(nn.Linear(4, 3))})))
    assert [reason for _, _, reason in wrapped.reasons.values()] == ["an output layer, by its name score", "1 dim"]
    text = str(choice)
    assert "matrices: 4 parameters" in text and "2 x layers.*.attn.weight  24 x 8" in text


def test_patterns_overrule_roles() -> None:
    model = Decoder(False)
    choice = matrices_of(model, take=["*.gate.weight", "score.*"], leave=["layers.1.*"], dims=(2, 4))
    taken = {name for name, (_, is_taken, _) in choice.reasons.items() if is_taken}
    assert taken == {"layers.0.attn.weight", "layers.0.output.weight", "layers.0.gate.weight", "score.weight", "conv.weight"}
    with pytest.raises(ValueError, match=r"No parameter has a name like 'blocks\.\*'"):
        matrices_of(model, leave=["blocks.*"])
