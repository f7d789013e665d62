"""Extents follow torch.chunk; layouts never overlap, always align, and account for every element."""

from __future__ import annotations

import doctest
import importlib
import itertools
import math
import pkgutil
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import fullshard
from fullshard.core.layout import (
    ALIGN_BYTES,
    MAX_SLICES,
    MIB,
    DirectRule,
    Extent,
    GroupLayout,
    plan_layout,
    slices,
    staging_limit,
)
from fullshard.core.unsharded_buffer import copy_out_of
from fullshard.ext.two_hops import in_two_hops

shapes = st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=3).map(tuple), min_size=1, max_size=8)


@given(length=st.integers(0, 200), ranks=st.integers(1, 17))
def test_extents_are_torch_chunks(length: int, ranks: int) -> None:
    chunks = list(torch.arange(length).chunk(ranks)) if length else []
    for rank in range(ranks):
        extent = Extent.of_rank(length, ranks=ranks, rank=rank)
        expected = chunks[rank].tolist() if rank < len(chunks) else []
        assert list(range(extent.start, extent.stop)) == expected
        assert extent.rows + extent.padding == extent.chunk == math.ceil(length / ranks)


@given(
    shapes=shapes,
    ranks=st.integers(1, 9),
    itemsize=st.sampled_from([1, 2, 4, 8]),
    threshold=st.sampled_from([0, 64, 500, math.inf]),
)
def test_places_align_and_cover_the_shard_without_overlap(
    shapes: list[tuple[int, ...]], ranks: int, itemsize: int, threshold: float
) -> None:
    layout = plan_layout(shapes, ranks=ranks, itemsize=itemsize, direct=DirectRule(threshold))
    pieces = [piece for bucket in layout.buckets for piece in bucket.segments]
    assert sum(piece.size for piece in pieces) == layout.shard_numel
    assert sum(piece.size for piece in pieces) * ranks == layout.unsharded_numel
    end = 0
    for bucket in layout.buckets:
        assert bucket.offset == end, "buckets follow each other without holes"
        end += bucket.size
        assert bucket.size == sum(piece.size for piece in bucket.segments)
    regions = sorted((place.offset, place.offset + place.size) for place in layout.offsets if place.size)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(regions))
    assert len(layout.offsets) == len(shapes)
    for shape, place in zip(shapes, layout.offsets):
        assert place.shape == shape
        assert place.offset * itemsize % ALIGN_BYTES == 0
        assert place.size == math.ceil(shape[0] / ranks) * math.prod(shape[1:])
        if place.direct:
            assert place.size * itemsize >= threshold and place.size * itemsize % ALIGN_BYTES == 0
    assert sorted(piece.parameter for piece in pieces if piece.parameter >= 0) == list(range(len(shapes)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_neighbors_are_copied_out_as_one_also_with_gaps_between(dtype: torch.dtype) -> None:
    """Two norms, seven matrices and two biases: three copies, of the parameters and not of the gaps that align them."""
    shapes = [(16,)] * 2 + [(16, 16)] * 7 + [(16,)] * 2
    layout = plan_layout(shapes, ranks=8, itemsize=dtype.itemsize, direct=DirectRule(math.inf))
    copied: list[int] = []

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            copied.extend(one.numel() for one in args[0])
            return func(*args, **(kwargs or {}))

    finish = copy_out_of(
        layout, torch.zeros(layout.unsharded_numel, dtype=dtype), torch.zeros(layout.unsharded_numel, dtype=dtype)
    )
    with Counting():
        finish()
    assert copied == [2 * 16, 7 * 256, 2 * 16]


@given(
    shapes=shapes,
    inner=st.integers(1, 5),
    outer=st.integers(1, 4),
    threshold=st.sampled_from([0, 64, math.inf]),
    last=st.booleans(),
)
def test_two_hops_gather_what_one_does(
    shapes: list[tuple[int, ...]], inner: int, outer: int, threshold: float, last: bool
) -> None:
    """Shards of all ranks, each filled with numbers of its own, through the buffers of both hops; padding included."""
    dims = [len(shape) - 1 if last else 0 for shape in shapes]
    ranks = inner * outer
    layout = plan_layout(shapes, dims, ranks=ranks, itemsize=4, direct=DirectRule(threshold), outer=outer)
    wholes = [torch.arange(math.prod(shape)).view(shape) + 10_000 * index for index, shape in enumerate(shapes)]

    def flat_shard(rank: int) -> torch.Tensor:
        flat = torch.full((layout.shard_numel,), -1)
        for whole, place in zip(wholes, layout.offsets):
            extent = Extent.of_rank(whole.shape[place.dim], ranks=ranks, rank=rank)
            part = whole.narrow(place.dim, extent.start, extent.rows).flatten()
            flat[place.offset : place.offset + part.numel()] = part
        return flat

    def gathered(hop: GroupLayout, shards: list[torch.Tensor]) -> torch.Tensor:
        assert [len(shard) for shard in shards] == [hop.shard_numel] * hop.ranks
        full, staging = torch.full((hop.unsharded_numel,), -2), torch.empty(0, dtype=torch.int64)
        for bucket in hop.buckets:
            messages = torch.stack([shard[bucket.offset : bucket.offset + bucket.size] for shard in shards]).flatten()
            if bucket.direct:
                full[hop.ranks * bucket.offset :][: len(messages)] = messages
            else:
                staging = messages
        copy_out_of(hop, full, staging)()
        return full

    hops = [in_two_hops(layout, inner, outer, rank=rank) for rank in range(inner)]
    inner_shards = [
        gathered(first, [flat_shard(rank * outer + replica) for replica in range(outer)])
        for rank, (first, _) in enumerate(hops)
    ]
    for _, second in hops:
        full = gathered(second, inner_shards)
        for whole, place in zip(wholes, second.offsets):
            assert torch.equal(full[second.ranks * place.offset :][: whole.numel()].view(whole.shape), whole)
    first, second = hops[0]
    assert [place.direct for place in first.offsets] == [place.direct for place in second.offsets]
    for hop in hops[0]:
        reduction = hop.reduction(as_is=True, in_order=True, itemsize=4)
        assert all(hop.is_even(index) for index in reduction.direct)


@given(rows=st.integers(8 * MIB, 16 * MIB), itemsize=st.sampled_from([2, 4, 8, 16]))
def test_sliced_gradients_take_no_more_messages_than_are_allowed(rows: int, itemsize: int) -> None:
    """With elements of 8 and 16 bytes the limit lost a part of an element, and a ninth message came."""
    layout = plan_layout([(rows, 2)], ranks=2, itemsize=itemsize, direct=DirectRule(1.0))
    assert layout.reduction(as_is=False, in_order=True, itemsize=itemsize).messages <= MAX_SLICES


@given(
    shapes=shapes,
    ranks=st.integers(1, 9),
    threshold=st.sampled_from([0, 64, math.inf]),
    as_is=st.booleans(),
    in_order=st.booleans(),
)
def test_a_reduction_covers_every_parameter_once(
    shapes: list[tuple[int, ...]], ranks: int, threshold: float, as_is: bool, in_order: bool
) -> None:
    layout = plan_layout(shapes, ranks=ranks, itemsize=4, direct=DirectRule(threshold))
    found = layout.reduction(as_is=as_is, in_order=in_order, itemsize=4)
    inside = [piece.parameter for piece in found.packed.segments if piece.parameter >= 0] if found.packed else []
    sliced = {part.parameter for message in found.slices for part in message}
    listed = [i for i in (*inside, *found.direct, *sliced) if layout.offsets[i].size]
    assert sorted(listed) == [i for i, place in enumerate(layout.offsets) if place.size]
    assert not found.direct or as_is
    assert all(layout.is_even(i) for i in found.direct)
    if in_order:
        assert {*found.direct, *sliced} == {i for i, place in enumerate(layout.offsets) if place.direct}
    else:
        assert not sliced
    covered = (found.packed.size if found.packed else 0) + sum(layout.offsets[i].size for i in (*found.direct, *sliced))
    assert covered == layout.shard_numel
    assert found.messages <= 1 or in_order


@pytest.mark.parametrize(
    ("matrices", "ranks", "expected"),
    [
        ([(4096, 8192), (8192, 4096), (4096,)], 2, 2),
        ([(4096, 8192), (8192, 4096), (4096,)], 64, 2),
        ([(4096, 8192), (8192, 4096), (4096,)], 4096, 2),  # chunks of 32 KiB
        ([(1024, 2048)] * 3, 64, 3),  # 8 MiB in all, chunks of 128 KiB
        ([(1024, 1024)] * 3, 64, 0),  # 4 MiB in all
        ([(1024, 1024)] * 3, 16, 3),  # chunks of 256 KiB
        ([(8192, 256)] * 3, 8192, 0),  # chunks of 1 KiB
        ([(1024, 2048 + 8 * i) for i in range(18)], 64, 16),  # the largest of many
        ([(1024, 2048 + 8 * i) for i in range(30)], 64, 27),  # until 32 MiB are left
        ([(1024, 256 + 8 * i) for i in range(50)], 64, 27),  # the same, of 1 MiB and more
        ([(1024, 248)] * 50, 16, 0),  # below 1 MiB
    ],
)
def test_large_messages_are_direct_by_default_whatever_the_number_of_ranks(
    matrices: list[tuple[int, ...]], ranks: int, expected: int
) -> None:
    layout = plan_layout(matrices, ranks=ranks, itemsize=4, direct=DirectRule.of(None, 256 << 10))
    direct = [index for index, place in enumerate(layout.offsets) if place.direct]
    largest = sorted(range(len(matrices)), key=lambda index: -math.prod(matrices[index]))
    assert direct == sorted(largest[:expected])
    told = plan_layout(matrices, ranks=ranks, itemsize=4, direct=DirectRule(256 << 10))
    assert all(place.size * 4 >= 256 << 10 for place in told.offsets if place.direct)


@given(sizes=st.lists(st.integers(1, 3000), max_size=6), ranks=st.integers(1, 9), limit=st.sampled_from([1, 100, 4096, 10**6]))
def test_slices_cover_every_chunk_once_in_messages_of_at_most_the_limit(sizes: list[int], ranks: int, limit: int) -> None:
    messages = slices(list(enumerate(sizes)), ranks=ranks, limit=limit)
    most = max(1, -(-limit // ranks))
    found = dict.fromkeys(range(len(sizes)), 0)
    for message in messages:
        assert 0 < sum(part.size for part in message) <= most
        for part in message:
            assert part.start == found[part.parameter] and part.size > 0
            found[part.parameter] += part.size
    assert found == dict(enumerate(sizes))
    assert len(messages) <= -(-sum(sizes) // most)


@given(ranks=st.sampled_from([8, 64, 512]), rows=st.lists(st.sampled_from([64, 512, 1024, 4096]), min_size=1, max_size=60))
def test_what_is_packed_by_default_fits_into_staging(ranks: int, rows: list[int]) -> None:
    layout = plan_layout([(r, 1024) for r in rows], ranks=ranks, itemsize=4, direct=DirectRule.of(None, 256 << 10))
    packed = 0 if layout.packed is None else layout.packed.size * ranks * 4
    left = [r for r, place in zip(rows, layout.offsets) if not place.direct]
    small = all(r * 4096 < MIB or -(-r // ranks) * 4096 < 4096 for r in left)
    assert small or packed <= staging_limit(layout.unsharded_numel * 4)


def test_a_threshold_of_infinity_packs_everything_and_zero_nothing_that_can_be_avoided() -> None:
    shapes = [(64, 64), (64,), (7, 3)]
    assert len(plan_layout(shapes, ranks=2, itemsize=4, direct=DirectRule(math.inf)).buckets) == 1
    layout = plan_layout(shapes, ranks=2, itemsize=4, direct=DirectRule(0))
    assert [p.direct for p in layout.offsets] == [True, True, True]
    assert [p.size * 2 == math.prod(p.shape) for p in layout.offsets] == [True, True, False]


def with_examples() -> list[str]:
    names = [
        module.name
        for module in pkgutil.walk_packages(fullshard.__path__, "fullshard.")
        if not module.name.endswith(("__main__", "adapters.vllm"))  # which needs vLLM
    ]
    return [
        name
        for name in names
        if doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(name)) and _examples(name)
    ]


def _examples(name: str) -> int:
    found = doctest.DocTestFinder().find(importlib.import_module(name))
    return sum(not example.options.get(doctest.SKIP, False) for test in found for example in test.examples)


@pytest.mark.parametrize("name", with_examples())
def test_examples_in_docstrings(name: str) -> None:
    found = doctest.testmod(importlib.import_module(name), extraglobs={"torch": torch})  # type: ignore[arg-type]
    assert found.attempted and not found.failed
