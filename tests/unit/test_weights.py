"""Plans of what is read: every element of every shard once, every byte of every file once, whatever rules and cuts."""

from __future__ import annotations

import json
import os
import time
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from rotation import random_cases
from torch import Tensor, nn

import fullshard
from fullshard import load_weights, save_weights
from fullshard.core.layout import Extent
from fullshard.weights.boxes import Box, ModelTensor, ShardMap, TensorInfo
from fullshard.weights.headers import NAMES, BadFile, FileTensor, header_bytes, parse_header, read_checkpoint
from fullshard.weights.key_map import ComputedTensor, MapError, MappedTensor, map_keys
from fullshard.weights.loading import _represents_all
from fullshard.weights.plan import Link, Part, partners, plan_load, plan_save
from fullshard.weights.rules import Convert, Drop, Merge, Rename, RenameBy, Split, Stack, Transpose, Unstack
from fullshard.weights.transfer import Transfer, Writer

# --- boxes ---

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=3).map(tuple)


# --- dtypes ---

EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.bool)
SIXTEEN_BITS = (torch.int16, torch.float16, torch.bfloat16)
WIDE = (torch.int32, torch.int64, torch.float32, torch.float64, torch.complex64, torch.complex128)


def values_of(dtype: torch.dtype) -> Tensor:
    """All values of a dtype or, of a wide one, some that narrower dtypes do not have."""
    if dtype is torch.bool:
        return torch.tensor([False, True])
    if dtype in EIGHT_BITS + SIXTEEN_BITS:
        bits = torch.int16 if dtype in SIXTEEN_BITS else torch.uint8
        found = torch.arange(1 << 8 * dtype.itemsize).to(bits).view(dtype)
        return found[found.to(torch.float64).isfinite()]
    real = torch.tensor([0, 1, -1, 2**24 + 1, 2**31 - 1], dtype=torch.int64)
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.cat([real, torch.tensor([torch.iinfo(dtype).min, torch.iinfo(dtype).max])]).to(dtype)
    info = torch.finfo(dtype)
    some = torch.tensor([1 + info.eps, info.max, -info.max, info.smallest_normal], dtype=torch.float64)
    return torch.cat([some, real.double()]).to(dtype) * (1j if dtype.is_complex else 1)


def test_a_conversion_rounds_if_a_value_becomes_another() -> None:
    """Bytes and bools in float32, for example, were refused as if they were rounded."""
    every = EIGHT_BITS + SIXTEEN_BITS + WIDE
    for dtype, other in [(one, two) for one in every for two in every]:
        values = values_of(other)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of complex numbers that lose a part
            converted = values.to(dtype)
        same = [one.double() if one.is_floating_point() else one for one in (values, converted)]
        assert _represents_all(dtype, other) == (same[0].tolist() == same[1].tolist()), (dtype, other)


# --- plans ---


def stored(tensors: dict[str, Tensor]) -> dict[str, MappedTensor]:
    """As if in a file, one behind the other."""
    found, at = {}, 64
    for name, tensor in tensors.items():
        found[name] = MappedTensor.of(FileTensor(name, tensor.dtype, tuple(tensor.shape), "a.safetensors", at))
        at += tensor.numel() * tensor.itemsize
    return found


@dataclass(frozen=True)
class Cut:
    """How ranks share a tensor: tensor parallelism, shards, and copies of all that."""

    ranks: int
    dim: int
    tensor_parallel: int = 1
    tp_dim: int | None = None
    replicas: int = 1

    def shard_map(self, shape: tuple[int, ...]) -> ShardMap:
        boxes: list[Box | None] = []
        for _ in range(self.replicas):
            for shard in range(self.ranks):
                for tp in range(self.tensor_parallel):
                    box = Box.whole(shape)
                    if self.tp_dim is not None and self.tp_dim < len(shape):
                        box = rows(box, self.tp_dim, self.tensor_parallel, tp)
                    if shape:
                        box = rows(box, min(self.dim, len(shape) - 1), self.ranks, shard)
                    boxes.append(box if box.numel else None)
        return ShardMap(shape, tuple(boxes))

    @property
    def world(self) -> int:
        return self.ranks * self.replicas * self.tensor_parallel


def rows(box: Box, dim: int, ranks: int, rank: int) -> Box:
    part = Extent.of_rank(box.shape[dim], ranks=ranks, rank=rank)
    start, shape = list(box.start), list(box.shape)
    start[dim], shape[dim] = start[dim] + part.start, part.rows
    return Box(tuple(start), tuple(shape))


CUTS = st.builds(
    Cut,
    ranks=st.integers(1, 4),
    dim=st.sampled_from([0, 0, 0, 1]),
    tensor_parallel=st.sampled_from([1, 1, 2, 3]),
    tp_dim=st.sampled_from([None, 0, 1]),
    replicas=st.sampled_from([1, 1, 2, 3]),
)


def carried_out(
    tensors: dict[str, Tensor], mapped: dict[str, MappedTensor], cut: Cut, *, limit: int, exchanges: bool
) -> tuple[dict[str, Tensor], Counter[str]]:
    """The full tensors that ranks have afterwards, put together, and how often each element of a source was read."""
    targets = [(ModelTensor(name, one.dtype, one.shape, cut.shard_map(one.shape)), one) for name, one in mapped.items()]
    found = {name: torch.zeros(one.shape, dtype=one.dtype) for name, one in mapped.items()}
    written = [{name: torch.zeros(one.shape, dtype=torch.int) for name, one in mapped.items()} for _ in range(cut.world)]
    times: Counter[str] = Counter()
    rounds = []

    def value_of(part: Part) -> Tensor:
        source = part.source
        if isinstance(source, ComputedTensor):
            return source.function(*(put_together(one, tensors) for one in source.inputs))[part.rows.slices()]
        return tensors[source.name][part.rows.slices()]

    def read(part: Part) -> Tensor:
        if not isinstance(part.source, ComputedTensor):
            times[part.source.name] += part.rows.numel
        return value_of(part)

    def deliver(part: Part, rank: int, value: Tensor) -> None:
        for link, box, _ in part.boxes(rank):
            found[link.target.name][box.slices()] = in_rows(part, value, link, box)
            written[rank][link.target.name][box.slices()] += 1

    for rank in range(cut.world):
        plan = plan_load(targets, rank=rank, ranks=cut.world, limit=limit, exchanges=exchanges)
        rounds.append([turn.exchanged for turn in plan.rounds])
        for part in plan.own:
            assert part.worker == rank
            deliver(part, rank, read(part))
        for part in (part for turn in plan.rounds for part in turn.parts):
            deliver(part, rank, read(part) if part.worker == rank else value_of(part))
    assert all(other == rounds[0] for other in rounds)
    for name, one in mapped.items():
        for rank, box in enumerate(cut.shard_map(one.shape).boxes):
            expected = torch.zeros(one.shape, dtype=torch.int)
            if box is not None:
                expected[box.slices()] = 1
            assert torch.equal(written[rank][name], expected), f"rank {rank} of {name}"
    return found, times


def in_rows(part: Part, rows: Tensor, link: Link, box: Box) -> Tensor:
    """A box of a tensor of the model, as a view of the rows of a part."""
    return link.piece.view_as_mapped(rows[link.piece.source_box(box).relative_to(part.rows).slices()])


def put_together(mapped: MappedTensor, tensors: dict[str, Tensor]) -> Tensor:
    """By its pieces."""
    found = torch.zeros(mapped.shape, dtype=mapped.dtype)
    for piece in mapped.pieces:
        assert isinstance(piece.source, FileTensor)
        found[piece.at.slices()] = piece.view_as_mapped(tensors[piece.source.name][piece.source_box(piece.at).slices()])
    return found


def numbered(*shape: int, at: int = 0) -> Tensor:
    return torch.arange(at, at + Box.whole(shape).numel, dtype=torch.float32).view(shape)


@given(
    shapes=st.lists(SHAPES, min_size=1, max_size=3),
    turns=st.booleans(),
    cut=CUTS,
    limit=st.sampled_from([1, 40, 10**6]),
    exchanges=st.booleans(),
)
@random_cases(300)
def test_every_element_is_read_once_and_lands_once(
    shapes: list[tuple[int, ...]], turns: bool, cut: Cut, limit: int, exchanges: bool
) -> None:
    tensors = {f"t{number}": numbered(*shape, at=1000 * number) for number, shape in enumerate(shapes)}
    mapped = map_keys([Transpose("t0", (0, -1))] if turns and shapes[0] else None, stored(tensors))
    found, times = carried_out(tensors, mapped, cut, limit=limit, exchanges=exchanges)
    for name, tensor in tensors.items():
        expected = tensor.transpose(0, -1) if turns and name == "t0" and tensor.dim() else tensor
        assert torch.equal(found[name], expected)
        assert not exchanges or times[name] == tensor.numel(), "no byte is read twice, and none in vain"


@given(shapes=st.lists(SHAPES, min_size=1, max_size=3), turns=st.booleans(), cut=CUTS, limit=st.sampled_from([1, 40, 10**6]))
@random_cases(300)
def test_every_element_is_written_once_by_a_rank_that_gets_it_from_one(
    shapes: list[tuple[int, ...]], turns: bool, cut: Cut, limit: int
) -> None:
    tensors = {f"t{number}": numbered(*shape, at=1000 * number) for number, shape in enumerate(shapes)}
    models = {
        name: ModelTensor(name, one.dtype, tuple(one.shape), cut.shard_map(tuple(one.shape))) for name, one in tensors.items()
    }
    rules = [Transpose("t0", (0, -1))] if turns and shapes[0] else None
    mapped = map_keys(rules, {name: MappedTensor.of(one) for name, one in models.items()})
    outputs = [(FileTensor(name, one.dtype, one.shape, "a", 0), one) for name, one in mapped.items()]
    plans = [plan_save(outputs, rank=rank, ranks=cut.world, limit=limit) for rank in range(cut.world)]
    assert len({tuple(turn.exchanged for turn in plan.rounds) for plan in plans}) == 1
    assert sum(plan.nbytes for plan in plans) == sum(output.nbytes for output, _ in outputs)
    found = {output.name: torch.full(output.shape, -1.0) for output, _ in outputs}
    for rank, plan in enumerate(plans):
        for part in (*plan.own, *(part for turn in plan.rounds for part in turn.parts if part.worker == rank)):
            rows = found[part.source.name][part.rows.slices()]
            assert (rows == -1).all() and part.worker == rank
            for link, box, ranks in part.boxes():
                (giver,) = partners(ranks, rank, saving=True)
                own = link.target.shard_map.boxes[giver]
                assert own is not None and box.intersect(own) == box and (giver == rank or part not in plan.own)
                assert giver == rank or any(part in turn.parts for turn in plans[giver].rounds)
                in_rows(part, rows, link, box).copy_(tensors[link.target.name][box.slices()])
    for name, tensor in tensors.items():
        expected = tensor.transpose(0, -1) if turns and name == "t0" and tensor.dim() else tensor
        assert torch.equal(found[name], expected)


def test_rows_of_one_rank_are_read_by_it_alone_and_those_of_several_in_equal_parts() -> None:
    shape = (10, 4)
    (mapped,) = stored({"w": numbered(*shape)}).values()

    def read(cut: Cut) -> list[int]:
        targets = [(ModelTensor("w", torch.float32, shape, cut.shard_map(shape)), mapped)]
        plans = [plan_load(targets, rank=rank, ranks=cut.world, limit=10**6) for rank in range(cut.world)]
        assert cut.replicas * cut.tensor_parallel > 1 or not plans[0].rounds
        own = [sum(part.rows.numel for part in plan.own) for plan in plans]
        for rank, plan in enumerate(plans):
            own[rank] += sum(part.rows.numel for turn in plan.rounds for part in turn.parts if part.worker == rank)
        return [numel // shape[1] for numel in own]

    assert read(Cut(4, 0)) == [3, 3, 3, 1]
    assert read(Cut(2, 0, replicas=2)) == [2, 2, 3, 3]  # five rows each, in two parts
    assert read(Cut(2, 0, tensor_parallel=2, tp_dim=1)) == [2, 3, 2, 3]
    assert read(Cut(5, 0, tensor_parallel=2, tp_dim=0)) == [1] * 10


# --- rules ---


def rules_of(tensors: dict[str, Tensor], *rules: Any) -> dict[str, Tensor]:
    cut = Cut(3, 0, replicas=2)
    mapped = map_keys(list(rules), stored(tensors))
    return carried_out(tensors, mapped, cut, limit=50, exchanges=True)[0]


def test_rules_say_where_every_element_is() -> None:
    q, k, v = numbered(6, 4), numbered(2, 4, at=100), numbered(2, 4, at=200)
    names = {f"layers.0.{x}_proj.weight": tensor for x, tensor in zip("qkv", (q, k, v))}
    merge = Merge([rf"(.*)[.]{x}_proj[.]weight" for x in "qkv"], r"\1.qkv.weight")
    assert torch.equal(rules_of(names, merge)["layers.0.qkv.weight"], torch.cat([q, k, v]))
    split = Split(r"(.*)[.]qkv[.]weight", [r"\1.a", r"\1.b"], sizes=(7, 3))
    found = rules_of(names, merge, split, Rename("^layers[.]", "blocks."))
    assert list(found) == ["blocks.0.a", "blocks.0.b"]
    assert torch.equal(found["blocks.0.a"], torch.cat([q, k, v])[:7])
    assert torch.equal(found["blocks.0.b"], torch.cat([q, k, v])[7:])
    experts = {f"l.3.experts.{number}.w": numbered(3, 4, at=50 * number) for number in (10, 2, 0, 1, *range(3, 10))}
    stack = [Stack(r"(.*)[.]experts[.](\d+)[.]w", r"\1.experts.w"), Transpose("experts[.]w$", (1, 2))]
    assert torch.equal(
        rules_of(experts, *stack)["l.3.experts.w"],
        torch.stack([experts[f"l.3.experts.{number}.w"].T for number in range(11)]),
    )
    found = rules_of(experts, *stack, Unstack(r"(.*)[.]w", r"\1.{}.v"))
    assert torch.equal(found["l.3.experts.10.v"], experts["l.3.experts.10.w"].T) and len(found) == 11
    columns = rules_of(names, Drop("[kv]_proj"), Split("(.*)q_proj.weight", ["left", "right"], dim=1))
    assert torch.equal(columns["left"], q[:, :2]) and torch.equal(columns["right"], q[:, 2:])
    scaled = Convert([r"(.*)[.]q_proj[.]weight", r"(.*)[.]k_proj[.]weight"], r"\1.w", lambda a, b: (a[:2] * b).half())
    found = rules_of(names, scaled)
    assert found["layers.0.w"].dtype == torch.float16 and torch.equal(found["layers.0.w"], (q[:2] * k).half())
    assert list(map_keys({"layers.0.q_proj.weight": "q"}, stored(names))) == ["q", *list(names)[1:]]
    assert list(map_keys(lambda name: None if "k_proj" in name else name[-8:], stored({"a.k_proj.x": q, "b.q_proj.": q}))) == [
        "b.q_proj."[-8:]
    ]


def test_rules_that_fit_nothing_are_told_with_what_is_near_unless_they_are_optional() -> None:
    """A typo in a Transpose loaded square weights wrong, in silence."""
    state = stored({"h.0.c_attn.weight": numbered(4, 4), "h.0.c_fc.weight": numbered(4, 4)})
    with pytest.raises(MapError, match=r"matches no tensor \(nearest: 'h.0.c_attn.weight'"):
        map_keys([Transpose(r"h[.]0[.]c_atn[.]weight$")], state)
    counts: dict[str, int] = {}
    rules = [Transpose("c_atn", optional=True), Transpose("c_(attn|fc)"), Drop("fc")]
    assert list(map_keys(rules, state, counts=counts)) == ["h.0.c_attn.weight"]
    assert counts == {str(rule): many for rule, many in zip(rules, (0, 2, 1))}
    assert map_keys([Drop("nothing")], state, strict=False) == state


def test_texts_are_what_every_rank_can_tell_and_no_terminal_obeys() -> None:
    """What is no Unicode left the other ranks waiting."""
    name = os.fsdecode(b"\xff\x1b[2J.safetensors")
    with pytest.raises(BadFile) as failure:
        read_checkpoint([name])
    assert str(failure.value).startswith(r"\udcff\x1b[2J.safetensors: No such file")
    str(failure.value).encode()


@pytest.mark.parametrize(
    "rules, told",
    [
        ([Merge(["a", "gone"], "b")], r"Merge: 'a' has no counterpart that matches 'gone'"),
        ([Merge(["a", "b"], "c")], r"'b' of shape \(3,\) .* cannot be joined along dim 0 with 'a' of shape \(4, 2\)"),
        (
            [Split("a", ["x", "y", "z"])],
            r"Split: 'a' of shape \(4, 2\) cannot be split along dim 0 into 3 parts of sizes 1, 1, 1",
        ),
        ([Transpose("b")], r"Transpose: 'b' of shape \(3,\) has no dim 1"),
        ([Rename("[ab]", "c")], r"key_map gives 'c' twice: to 'a', and to 'b'"),
        ([Stack(r"([ab])", "c")], r"Stack: expected the parts of 'c' to be numbered from 0"),
        ([Convert(["a"], "c", lambda a: a.item())], "Convert: the function for 'c' fails on meta"),
        ([Convert(["a"], "c", lambda a: 3)], "Convert: expected the function for 'c' to return a tensor, got a int"),
        (
            [Transpose("aa")],
            r"Transpose\(pattern='aa', dims=\(0, 1\)\) matches no tensor.*\. Correct it, or pass optional=True",
        ),
        ([Rename(r"layer\.a", "")], r"Rename\(pattern='layer.*matches no tensor"),
        ([Drop("")], r"Drop\(pattern=''\) matches every tensor"),
        ([Rename("^a$", "__metadata__")], "key_map cannot give 'a' the name '__metadata__'"),
        ([Rename("(", "")], "missing \\), unterminated subpattern"),
        ({"q": "a"}, r"key_map names 'q', which the checkpoint does not have"),
        (["a"], "key_map takes rules such as Rename or Merge, got 'a'"),
        (3, "key_map must be a dict, a function of a name, or a list of rules, got a int"),
    ],
)
def test_rules_that_do_not_fit_are_refused(rules: Any, told: str) -> None:
    with pytest.raises(MapError, match=told):
        map_keys(rules, stored({"a": numbered(4, 2), "b": numbered(3)}))


# --- headers ---


def write(path: Path, tensors: dict[str, Tensor]) -> Path:
    with path.open("wb") as file:
        file.write(
            header_bytes([TensorInfo(name, one.dtype, tuple(one.shape)) for name, one in tensors.items()], {"format": "pt"})
        )
        for one in tensors.values():
            file.write(bytes(one.contiguous().view(-1).view(torch.uint8).tolist()))
    return path


def test_a_header_is_read_back(tmp_path: Path) -> None:
    tensors = {f"t.{name}": torch.zeros(2, 3, dtype=dtype) for dtype, name in NAMES.items()}
    (header,) = read_checkpoint(
        [write(tmp_path / "a.safetensors", {**tensors, "none": torch.empty(0, 4), "one": torch.tensor(3.0)})]
    )
    assert [(t.name, t.dtype, t.shape) for t in header.tensors][:3] == [
        (name, tensor.dtype, (2, 3)) for name, tensor in list(tensors.items())[:3]
    ]
    assert {t.name: t.shape for t in header.tensors}["none"] == (0, 4) and header.metadata == {"format": "pt"}
    assert header.identity.header_nbytes % 8 == 0 and header.identity.nbytes == (tmp_path / "a.safetensors").stat().st_size


GOOD: dict[str, Any] = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


@pytest.mark.parametrize(
    "entries, size, told",
    [
        (GOOD, -3, "truncated by 3 bytes: .*'a' is the first incomplete tensor"),
        (GOOD, 2, "2 bytes after its last tensor belong to no tensor"),
        ({**GOOD, "b": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, 0, "'b' overlaps the previous tensor"),
        (
            {**GOOD, "b": {"dtype": "F32", "shape": [1], "data_offsets": [12, 16]}},
            8,
            "'b' leaves a gap after the previous tensor",
        ),
        ({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, 0, r"'a' of shape \(3,\) .* needs 12 bytes, .* span 8"),
        ({"a": {"dtype": "F32", "shape": [10**30], "data_offsets": [0, 8]}}, 0, "needs 4,000"),
        ({"a": {"dtype": "F31", "shape": [2], "data_offsets": [0, 8]}}, 0, "'a' has the unknown dtype 'F31'"),
        ({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}, 0, r"'a' has an invalid shape: \[-2\]"),
        ({"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}, 0, "has an invalid shape"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}, 0, "has invalid data_offsets"),
        ({"a": {"dtype": "F32", "shape": [2]}}, 0, "'a' must have exactly the keys dtype, shape and data_offsets"),
        ([], 0, "to be a JSON object, got a list"),
        ({"__metadata__": {"a": 3}}, 0, "__metadata__ in its header to map strings to strings"),
    ],
)
def test_a_header_that_lies_is_refused(entries: Any, size: int, told: str) -> None:
    text = json.dumps(entries).encode()
    with pytest.raises(BadFile, match=f"file: .*{told}" if "header" not in told else told):
        parse_header("file", text, 8 + len(text) + 8 + size)


@pytest.mark.parametrize(
    "content, told",
    [
        (b"", "truncated: it has 0 bytes"),
        (b"\xff" * 16, "at most 100,000,000 bytes, got .*This is not a safetensors file"),
        ((10**6).to_bytes(8, "little") + b"{}", "truncated: it has 10 bytes"),
        ((2).to_bytes(8, "little") + b"\xff\xff", "its header is not valid JSON"),
        ((10**5).to_bytes(8, "little") + b"[" * 10**5, "its header is not valid JSON"),
        ((29).to_bytes(8, "little") + b'{"a": 1, "a": {"dtype": "F"}}', r"^[^ ]*: its header has 'a' twice"),
    ],
)
def test_a_file_that_is_none_is_refused_without_reading_on(content: bytes, told: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(BadFile, match=told):
        read_checkpoint([path])


@given(data=st.data())
@random_cases(200)
def test_a_changed_header_is_refused_or_says_what_the_file_has(data: Any) -> None:
    text = bytearray(header_bytes([TensorInfo("a", torch.float32, (3, 2)), TensorInfo("bb", torch.int8, (5,))])[8:])
    for _ in range(data.draw(st.integers(1, 4))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    size = 8 + len(text) + 29
    try:
        tensors, _ = parse_header("file", bytes(text), size)
    except BadFile:
        return
    assert sum(tensor.nbytes for tensor in tensors) == 29
    assert all(8 + len(text) <= t.offset and t.offset + t.nbytes <= size for t in tensors)


def test_files_of_a_checkpoint_are_found_and_checked(tmp_path: Path) -> None:
    first = write(tmp_path / "model-1.safetensors", {"a": numbered(2)})
    second = write(tmp_path / "model-2.safetensors", {"b": numbered(2)})
    names = [[t.name for t in header.tensors] for header in read_checkpoint(tmp_path)]
    assert names == [["a"], ["b"]] == [[t.name for t in header.tensors] for header in read_checkpoint([first, second])]
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": first.name, "b": second.name}}))
    assert [header.file for header in read_checkpoint(tmp_path)] == [str(first), str(second)]
    for told, pattern in (
        ({"weight_map": {"a": first.name, "b": first.name}}, "The index maps 'b' to .*, which does not contain it"),
        (
            {"weight_map": {"a": "../model-1.safetensors"}},
            "maps 'a' to '../model-1.safetensors'. Expected the name of a file next to the index",
        ),
        ({"weights": {}}, "is not an index: expected a weight_map"),
        ({"weight_map": {"a": "gone.safetensors"}}, "gone.safetensors: No such file"),
    ):
        index.write_text(json.dumps(told))
        with pytest.raises(BadFile, match=pattern):
            read_checkpoint(index)
    index.unlink()
    write(tmp_path / "model-3.safetensors", {"a": numbered(2)})
    with pytest.raises(BadFile, match="Tensor 'a' is in .*model-1.safetensors and in .*model-3.safetensors"):
        read_checkpoint(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadFile, match="empty has no \\*.safetensors files: it contains nothing"):
        read_checkpoint(tmp_path / "empty")
    with pytest.raises(BadFile, match="source must be a directory"):
        read_checkpoint(3)


# --- bad input, named ---


@pytest.mark.parametrize(
    "key_map, told",
    [
        (5, "key_map must be a dict, a function of a name, or a list of rules, got a int"),
        ([5], "key_map takes rules such as Rename or Merge, got 5"),
        ({5: "a"}, "key_map must map names to names, got 5"),
        ({"weight": None}, "key_map must map names to names, got None"),
        (lambda name: 5, "key_map: expected the function to return a name, .* got 5 for '(weight|bias)'"),
        ([Rename(None, "a")], r"Rename\(.*: pattern must be a string, got None"),  # type: ignore[arg-type]
        ([Rename("weight", None)], r"Rename\(.*: to must be a string, got None"),  # type: ignore[arg-type]
        ([Merge(None, "a")], r"Merge\(.*: sources must be a non-empty list of strings, got None"),  # type: ignore[arg-type]
        ([Split("weight", [])], r"Split\(.*: to must be a non-empty list of strings, got \[\]"),
        ([Split("weight", "ab")], r"Split\(.*: to must be a non-empty list of strings, got 'ab'"),
        ([Transpose("weight", 5)], r"Transpose\(.*: each dim must be an int, got 5"),  # type: ignore[arg-type]
        ([RenameBy(3)], r"RenameBy\(.*: function must be callable, got 3"),  # type: ignore[arg-type]
    ],
)
def test_a_key_map_that_cannot_be_is_named(key_map: Any, told: str, tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    save_weights(model, tmp_path / "saved")
    with pytest.raises(ValueError, match=told):
        load_weights(model, tmp_path / "saved", key_map=key_map)


def test_models_and_directories_that_are_none_are_named(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    for wrong in (None, [model], model.state_dict()):
        for call in (load_weights, save_weights):
            with pytest.raises(ValueError, match=f"model must be an nn.Module, got a {type(wrong).__name__}"):
                call(wrong, tmp_path / "nowhere")
    for place in (None, 5, []):
        with pytest.raises(ValueError, match=f"directory must be the path of a directory, got a {type(place).__name__}"):
            save_weights(model, place)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="source must be the path of a directory or file, got ''"):
        load_weights(model, "")
    with pytest.raises(ValueError, match="extra must be a dict of names and contents, or a function of a path, got a list"):
        save_weights(model, tmp_path / "saved", extra=["a"])  # type: ignore[call-overload]
    assert not (tmp_path / "nowhere").exists() and not (tmp_path / "saved").exists()


def test_names_are_given_by_a_function_within_rules(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    save_weights(model, tmp_path / "saved", key_map=[RenameBy(str.upper, "upper")])
    report = load_weights(nn.Linear(4, 4), tmp_path / "saved", key_map=[Rename("^W", "w"), RenameBy(str.lower, "lower")])
    assert report.rules == {"Rename(pattern='^W', to='w')": 1, "RenameBy(title='lower')": 2}


def test_rules_of_transformers_need_its_models() -> None:
    with pytest.raises(ValueError, match=r"transformers_rules\(\) (needs transformers 5|takes a PreTrainedModel)"):
        fullshard.weights.transformers_rules(nn.Linear(4, 4))


def test_a_writer_that_is_closed_gives_up_what_has_not_started(tmp_path: Path) -> None:
    """It wrote everything that was queued for a file, so that a save that failed ended many gigabytes later."""
    file, begun, go_on = tmp_path / "a", Event(), Event()
    file.write_bytes(bytes(300))
    writer = Writer(tmp_path, threads=1)
    pwrite = os.pwrite

    def slow(*arguments: Any) -> int:
        begun.set()
        assert go_on.wait(60)
        return pwrite(*arguments)

    with mock.patch("os.pwrite", slow):
        writer.begin([Transfer("a", 100 * n, torch.ones(100, dtype=torch.uint8)) for n in range(3)])
        assert begun.wait(60)
        closing = Thread(target=writer.close)
        closing.start()
        while writer._waiting[0]:
            time.sleep(0.001)
        go_on.set()
        closing.join()
    assert file.read_bytes() == bytes([1] * 100 + [0] * 200)


def test_several_tensors_of_one_pattern_are_refused() -> None:
    """The last one was joined, and the others were left beside the result."""
    state = stored({name: torch.zeros(2) for name in ("a.q", "b.q", "a.k", "b.k")})
    for rule in (Merge([".*q", ".*k"], "qk"), Convert([".*q"], "q", torch.neg)):
        with pytest.raises(MapError, match="'a.q' and 'b.q' both match '[.][*]q', with equal groups"):
            map_keys([rule], state)
    assert list(map_keys([Merge(["(.*)q", "(.*)k"], r"\1qk")], state)) == ["a.qk", "b.qk"]


def test_a_merged_tensor_takes_the_place_of_the_first_in_the_checkpoint() -> None:
    """transformers saves it there, which decides in which file it lies; it was put where the first of `sources` was."""
    state = stored({name: torch.full((2,), float(number)) for number, name in enumerate(("k", "norm", "q"))})
    mapped = map_keys([Merge(["q", "k"], "qk")], state)
    assert list(mapped) == ["qk", "norm"] and [p.source.name for p in mapped["qk"].pieces] == ["q", "k"]


def test_averages_of_another_model_and_ties_of_other_shapes_are_refused(tmp_path: Path) -> None:
    """The live weights were saved in place of averages, and the second tensor of a tie was not looked at."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    average = fullshard.weights.EMA(model, 0.5)
    for other in (model[0], nn.Sequential(model), nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))):
        with pytest.raises(ValueError, match="the model has no parameters of these names and shapes"):
            save_weights(other, tmp_path / "averages", weights=average)
    save_weights(model, tmp_path / "tied", key_map=[Rename("1.bias", "1.other")])
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].other, tied[1].bias = tied[1].weight, None
    with pytest.raises(ValueError, match=r"1.other is \(2,\) in the file and \(2, 2\) in the model"):
        load_weights(tied, tmp_path / "tied")
