"""Apply the rules of a key map: find for each tensor of a model the parts of checkpoint tensors that fill it.

A part is a box: a range of indices along each dim. Every rule except `Convert` only maps boxes of tensors to boxes of tensors.
Rules compose before any data is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from fullshard.errors import printable, some_of
from fullshard.weights.boxes import Box, ModelTensor, TensorInfo
from fullshard.weights.headers import FileTensor
from fullshard.weights.rules import Convert, Drop, Keep, Merge, Rename, RenameBy, Rule, Sort, Split, Stack, Transpose, Unstack

_MOST = 2000  # names that are compared character by character; of more, only those with the same last component


def nearest(name: str, names: Iterable[str]) -> str:
    """Return a hint such as ` (nearest: 'a', 'b')` with up to two similar names, or "" if none is similar."""
    from difflib import get_close_matches

    every = list(names)
    if len(every) > _MOST:
        last = name.rpartition(".")[2]
        every = list(islice((one for one in every if one.rpartition(".")[2] == last), _MOST))
    found = get_close_matches(name, every, 2, 0.6)
    return f" (nearest: {', '.join(repr(one) for one in found)})" if found else ""


@dataclass(frozen=True, slots=True, eq=False)
class ComputedTensor(TensorInfo):
    """The output of a `Convert` function, computed from whole tensors.

    The dtype and shape were found by running the function on meta. Compared by identity, since functions have no useful
    equality, and the value of one object is cached.
    """

    inputs: tuple[MappedTensor, ...]  # arguments of the function, in order
    function: Callable[..., Tensor]


Source = FileTensor | ComputedTensor | ModelTensor


@dataclass(frozen=True, slots=True)
class SourcePiece:
    """A box of a mapped tensor that is filled from a box of a source tensor."""

    source: Source  # the source tensor
    at: Box  # the box in the mapped tensor
    origin: tuple[int, ...]  # the first index of the box in the source, one per dim of the source
    # for each dim of the mapped tensor, the matching dim of the source; None for a dim of size 1 that the source does not
    # have. A dim of the source that is not listed is fixed at its index in `origin`.
    dims: tuple[int | None, ...]

    @property
    def geometry(self) -> tuple[Box, tuple[int, ...], tuple[int | None, ...]]:
        """Every field but the source. Plans are reused for equal geometries, and ranks compare them."""
        return self.at, self.origin, self.dims

    def source_box(self, box: Box) -> Box:
        """Return the box of the source that fills `box`, a box of the mapped tensor inside of `at`."""
        start, shape = list(self.origin), [1] * len(self.origin)
        for dim, source_dim in enumerate(self.dims):
            if source_dim is not None:
                start[source_dim] += box.start[dim] - self.at.start[dim]
                shape[source_dim] = box.shape[dim]
        return Box(tuple(start), tuple(shape))

    def mapped_box(self, box: Box) -> Box | None:
        """Return the part of `at` that `box` of the source fills, in indices of the mapped tensor; None if it is empty."""
        inner = box.intersect(self.source_box(self.at))
        return None if inner is None else self.inverse(self.source).source_box(inner)

    def inverse(self, mapped: Source) -> SourcePiece:
        """Return the piece that fills the same box of the source from `mapped`."""
        dims = (self.dims.index(dim) if dim in self.dims else None for dim in range(len(self.origin)))
        return SourcePiece(mapped, self.source_box(self.at), self.at.start, tuple(dims))

    @property
    def dropped_dims(self) -> tuple[int, ...]:
        """Dims of the source that the mapped tensor does not have; each is fixed at one index."""
        return tuple(dim for dim in range(len(self.origin)) if dim not in self.dims)

    @property
    def keeps_order(self) -> bool:
        """True if elements have the same order in source and mapped tensor, so that their bytes may be copied as they are."""
        kept = [dim for dim in self.dims if dim is not None]
        return kept == sorted(kept)

    def view_as_mapped(self, part: Tensor) -> Tensor:
        """Return `part`, a slice of the source, with the dims of the mapped tensor: a view."""
        part = part.permute([*(dim for dim in self.dims if dim is not None), *self.dropped_dims])
        for _ in self.dropped_dims:
            part = part.select(-1, 0)
        for at, dim in enumerate(self.dims):
            if dim is None:
                part = part.unsqueeze(at)
        return part


@dataclass(frozen=True, slots=True)
class MappedTensor(TensorInfo):
    """A tensor that the rules produce, as a list of pieces of source tensors."""

    pieces: tuple[SourcePiece, ...]  # they cover the tensor and do not overlap
    # Tensors with equal groups are saved in one file; None: the tensor has no group. `Unstack` sets it, rules that only rename
    # keep it, all others clear it.
    file_group: str | None = None

    @classmethod
    def of(cls, source: Source) -> MappedTensor:
        """Map a source tensor to itself."""
        dims = tuple(range(len(source.shape)))
        whole = Box.whole(source.shape)
        return cls(source.name, source.dtype, source.shape, (SourcePiece(source, whole, whole.start, dims),))

    @property
    def sources(self) -> str:
        """Names of the source tensors, for error texts."""
        return some_of(list(dict.fromkeys(piece.source.name for piece in self.pieces)))


class MapError(ValueError):
    """A key map that is invalid or does not fit the checkpoint."""

    def __init__(self, text: str) -> None:
        super().__init__(printable(text))


def cast_dtype(stored: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Return the dtype of a tensor after floating-point tensors were cast to `wanted`; None casts nothing."""
    return stored if wanted is None or not stored.is_floating_point else wanted


State = dict[str, MappedTensor]
"""Tensors by name, in order: a state dict before any data is read."""

Named = tuple[str, MappedTensor]

KeyMap = Mapping[str, str] | Callable[[str], str | None] | Rule | Sequence[Rule] | None


def map_keys(key_map: KeyMap, state: State, *, strict: bool = True, counts: dict[str, int] | None = None) -> State:
    """Apply a key map to the tensors of a checkpoint, and return the resulting tensors by name."""
    if key_map is None:
        return state
    if isinstance(key_map, Mapping):
        wrong = [one for pair in key_map.items() for one in pair if not isinstance(one, str)]
        if wrong:
            raise MapError(f"key_map must map names to names, got {wrong[0]!r}")
        unknown = [name for name in key_map if name not in state]
        if unknown:
            raise MapError(f"key_map names '{unknown[0]}', which the checkpoint does not have{nearest(unknown[0], state)}.")
        return _build_state((key_map.get(name, name), tensor) for name, tensor in state.items())
    if isinstance(key_map, Rule):
        key_map = [key_map]
    if isinstance(key_map, Sequence) and not isinstance(key_map, str):
        for rule in key_map:
            _check(rule)
            try:
                matches = _count_matches(rule, state, strict=strict)
                state = _apply(rule, state)
            except re.error as failure:
                raise MapError(f"{rule}: {failure}") from failure
            if counts is not None:
                counts[str(rule)] = matches
        return state
    if callable(key_map):
        return _rename_by(key_map, state)
    raise MapError(f"key_map must be a dict, a function of a name, or a list of rules, got a {type(key_map).__name__}")


def _check(rule: Any) -> None:
    """Raise MapError naming the rule if a field of it has the wrong type."""
    if not isinstance(rule, Rule):
        raise MapError(f"key_map takes rules such as Rename or Merge, got {rule!r}")
    for name in ("pattern", "source", "sources", "to"):
        value = getattr(rule, name, ("",) if name == "sources" else "")
        several = name == "sources" or (name == "to" and isinstance(rule, Split))
        if several and (isinstance(value, str) or not isinstance(value, Sequence) or not value):
            raise MapError(f"{rule}: {name} must be a non-empty list of strings, got {value!r}")
        wrong = [one for one in (value if several else [value]) if not isinstance(one, str)]
        if wrong:
            raise MapError(f"{rule}: {name} must be a string, got {wrong[0]!r}")
    dims = rule.dims if isinstance(rule, Transpose) else (0, getattr(rule, "dim", 0))  # one check for all rules: a pair of ints
    if not isinstance(dims, Sequence) or len(dims) != 2 or not all(isinstance(dim, int) for dim in dims):
        raise MapError(f"{rule}: each dim must be an int, got {dims!r}")
    if isinstance(rule, Convert | RenameBy) and not callable(rule.function):
        raise MapError(f"{rule}: function must be callable, got {rule.function!r}")


def _count_matches(rule: Rule, state: State, *, strict: bool) -> int:
    """Return the number of tensors that `rule` matches. Raise MapError if there is none and the rule is not optional."""
    if isinstance(rule, RenameBy | Sort):  # they apply to every tensor
        return len(state)
    match rule:
        case Rename() | Drop() | Keep() | Transpose():
            patterns, tests = [rule.pattern], [re.compile(rule.pattern).search]
        case Merge() | Convert():
            patterns, tests = list(rule.sources), [re.compile(pattern).fullmatch for pattern in rule.sources]
        case _:
            patterns, tests = [rule.source], [re.compile(rule.source).fullmatch]
    matches = sum(any(test(name) for test in tests) for name in state)
    if not matches and strict and state and not rule.optional:
        # Without the metacharacters, the pattern resembles a name closely enough to find the nearest ones.
        plain = re.sub(r"[\\^$()?*+\[\]]", "", patterns[0])
        raise MapError(f"{rule} matches no tensor{nearest(plain, state)}. Correct it, or pass optional=True.")
    return matches


def _apply(rule: Rule, state: State) -> State:
    """Apply one rule and return the resulting tensors. Parts take the position of their tensor, results that of a part."""
    match rule:
        case Rename():
            return _build_state((re.sub(rule.pattern, rule.to, name), tensor) for name, tensor in state.items())
        case RenameBy():
            return _rename_by(rule.function, state)
        case Drop():
            left = {name: tensor for name, tensor in state.items() if not re.search(rule.pattern, name)}
            if state and not left:
                raise MapError(f"{rule} matches every tensor and leaves none.")
            return left
        case Keep():  # if it is optional and matches nothing, it leaves out nothing
            return {name: tensor for name, tensor in state.items() if re.search(rule.pattern, name)} or state
        case Transpose():
            return {
                name: _transposed(rule, tensor) if re.search(rule.pattern, name) else tensor for name, tensor in state.items()
            }
        case Split():
            return _replace_each(rule.source, state, partial(_split, rule))
        case Unstack():
            return _replace_each(rule.source, state, partial(_unstack, rule))
        case Merge():
            return _replace_sets(state, _sets(rule, state), lambda name, parts: _concatenated(name, parts, rule.dim))
        case Convert():
            return _replace_sets(state, _sets(rule, state), partial(_convert, rule))
        case Stack():
            return _replace_sets(state, _stacks(rule, state), _stacked)
        case Sort():
            return dict(sorted(state.items(), key=lambda item: natural_key(item[0])))


def _rename_by(function: Callable[[str], str | None], state: State) -> State:
    named = [(function(name), tensor) for name, tensor in state.items()]
    for (to, _), name in zip(named, state):
        if not (to is None or isinstance(to, str)):
            raise MapError(
                f"key_map: expected the function to return a name, or None to leave the tensor out, got {to!r} for '{name}'."
            )
    return _build_state((name, tensor) for name, tensor in named if name is not None)


def natural_key(name: str) -> list[tuple[bool, str, int]]:
    """Return a sort key. Of the parts between dots, numbers come first, by value; words with a final number sort by both."""
    words = [(part.rstrip("0123456789"), part) for part in name.split(".")]
    return [(bool(word), word, int(part[len(word) :] or -1)) for word, part in words]


# --- one tensor becomes several ---


def _replace_each(pattern: str, state: State, make: Callable[[MappedTensor, re.Match[str]], Iterable[Named]]) -> State:
    """Replace each tensor whose whole name matches by the tensors that `make` returns."""
    tensors: list[Named] = []
    for name, tensor in state.items():
        match = re.fullmatch(pattern, name)
        tensors += [(name, tensor)] if match is None else make(tensor, match)
    return _build_state(tensors)


def _split(rule: Split, tensor: MappedTensor, match: re.Match[str]) -> Iterable[Named]:
    dim, count = _dim(tensor, rule.dim, "Split"), len(rule.to)
    length = tensor.shape[dim]
    sizes = [length // count] * count if rule.sizes is None else list(rule.sizes)
    if sum(sizes) != length or len(sizes) != count or min(sizes) < 0:
        raise MapError(
            f"Split: '{tensor.name}' of shape {tensor.shape} cannot be split along dim {dim} into {count} parts of sizes "
            f"{', '.join(map(str, sizes))}."
        )
    at = 0
    for to, size in zip(rule.to, sizes):
        yield (name := match.expand(to)), _narrowed(name, tensor, dim, at, size)
        at += size


def _unstack(rule: Unstack, tensor: MappedTensor, match: re.Match[str]) -> Iterable[Named]:
    for number in range(tensor.shape[_dim(tensor, 0, "Unstack")]):
        to = match.expand(rule.to).replace("{}", str(number))
        part = _with_dims(_narrowed(to, tensor, 0, number, 1), lambda values, _: values[1:])
        yield to, replace(part, file_group=match.string)


# --- several tensors become one ---

Sets = list[tuple[str, str, list[str]]]
"""(name of the part whose position the result takes, name of the result, names of the parts in order)."""


def _replace_sets(state: State, sets: Sets, make: Callable[[str, Sequence[MappedTensor]], MappedTensor]) -> State:
    """Replace each set of tensors by the one that `make` returns."""
    combined = {first: (to, parts) for first, to, parts in sets}
    replaced = {part for _, _, parts in sets for part in parts}
    tensors: list[Named] = []
    for name, tensor in state.items():
        if name in combined:
            to, parts = combined[name]
            tensors.append((to, make(to, [state[part] for part in parts])))
        elif name not in replaced:
            tensors.append((name, tensor))
    return _build_state(tensors)


def _sets(rule: Merge | Convert, state: State) -> Sets:
    """Return the sets of tensors whose names match `sources` with equal groups."""
    kind = type(rule).__name__
    # By regex groups: for the number of each pattern in `sources`, the name that matches it and the name of the result.
    found: dict[tuple[Any, ...], dict[int, tuple[str, str]]] = {}
    for name in state:
        for number, pattern in enumerate(rule.sources):
            match = re.fullmatch(pattern, name)
            if match:
                members = found.setdefault(match.groups(), {})
                if number in members:
                    raise MapError(
                        f"{kind}: '{members[number][0]}' and '{name}' both match {pattern!r}, with equal groups. Put what "
                        "differs between them into a group."
                    )
                members[number] = name, match.expand(rule.to)
    sets: Sets = []
    for members in found.values():
        names = [name for _, (name, _) in sorted(members.items())]
        if len(members) < len(rule.sources):
            missing = next(pattern for number, pattern in enumerate(rule.sources) if number not in members)
            raise MapError(f"{kind}: '{names[0]}' has no counterpart that matches {missing!r}.")
        first, to = next(iter(members.values()))  # in the order of `state`, as transformers places it
        sets.append((first, to, names))
    return sets


def _stacks(rule: Stack, state: State) -> Sets:
    """Return the sets of tensors whose names match `source` with equal `to`, in the order of the last number in the name."""
    found: dict[str, list[tuple[tuple[int, ...], str]]] = {}  # by name of the result: (numbers in the name, name) of each part
    for name in state:
        match = re.fullmatch(rule.source, name)
        if match:
            numbers = tuple(int(group) for group in match.groups() if group is not None and group.isdigit())
            found.setdefault(match.expand(rule.to), []).append((numbers, name))
    sets: Sets = []
    for to, parts in found.items():
        sets.append((parts[0][1], to, [name for _, name in sorted(parts)]))
        # The last number of a name is the index of the part; numbers before it, such as the layer's, are in `to`.
        indices = [numbers[-1:] for numbers, _ in sorted(parts)]
        if indices != [(i,) for i in range(len(parts))]:
            got = ", ".join(str(index[0]) for index in indices if index)
            raise MapError(
                f"Stack: expected the parts of '{to}' to be numbered from 0 without gaps, got {got or 'no numbers'}."
            )
    return sets


def _convert(rule: Convert, name: str, inputs: Sequence[MappedTensor]) -> MappedTensor:
    # On meta tensors the function yields only shape and dtype, so reads and files are planned before any data is read.
    try:
        out = rule.function(*(torch.empty(one.shape, dtype=one.dtype, device="meta") for one in inputs))
    except Exception as failure:
        raise MapError(
            f"Convert: the function for '{name}' fails on meta tensors: {type(failure).__name__}: {failure}"
        ) from failure
    if not isinstance(out, Tensor):
        raise MapError(f"Convert: expected the function for '{name}' to return a tensor, got a {type(out).__name__}.")
    return MappedTensor.of(ComputedTensor(name, out.dtype, tuple(out.shape), tuple(inputs), rule.function))


def _build_state(tensors: Iterable[Named]) -> State:
    """Return the tensors by name. Raise MapError for a name that is given twice or reserved by the file format."""
    state: State = {}
    for name, tensor in tensors:
        if name == "__metadata__":
            raise MapError(
                f"key_map cannot give {tensor.sources} the name '{name}': the file format reserves it. Use another name."
            )
        if name in state:
            raise MapError(f"key_map gives '{name}' twice: to {state[name].sources}, and to {tensor.sources}.")
        state[name] = tensor
    return state


# --- boxes of pieces ---


def _dim(tensor: MappedTensor, dim: int, rule: str) -> int:
    """Return `dim` as a non-negative number."""
    if not -len(tensor.shape) <= dim < len(tensor.shape):
        raise MapError(f"{rule}: '{tensor.name}' of shape {tensor.shape} has no dim {dim}.")
    return dim % len(tensor.shape)


def _concatenated(name: str, parts: Sequence[MappedTensor], dim: int) -> MappedTensor:
    first = parts[0]
    dim = _dim(first, dim, "Merge")
    pieces: list[SourcePiece] = []
    length = 0
    for part in parts:
        rests = [one.shape[:dim] + one.shape[dim + 1 :] for one in (part, first)]
        if len(part.shape) != len(first.shape) or rests[0] != rests[1] or part.dtype != first.dtype:
            raise MapError(
                f"'{part.name}' of shape {part.shape} and dtype {part.dtype} cannot be joined along dim {dim} with "
                f"'{first.name}' of shape {first.shape} and dtype {first.dtype}."
            )
        by = [length if at == dim else 0 for at in range(len(part.shape))]
        pieces += [replace(piece, at=piece.at.moved(by)) for piece in part.pieces]
        length += part.shape[dim]
    return MappedTensor(name, first.dtype, (*first.shape[:dim], length, *first.shape[dim + 1 :]), tuple(pieces))


def _narrowed(name: str, tensor: MappedTensor, dim: int, start: int, size: int) -> MappedTensor:
    shape = (*tensor.shape[:dim], size, *tensor.shape[dim + 1 :])
    wanted = Box(tuple(start if at == dim else 0 for at in range(len(shape))), shape)
    boxes = [(piece, piece.at.intersect(wanted)) for piece in tensor.pieces]
    pieces = tuple(
        replace(piece, at=box.relative_to(wanted), origin=piece.source_box(box).start)
        for piece, box in boxes
        if box is not None
    )
    return MappedTensor(name, tensor.dtype, shape, pieces)


def _with_dims(tensor: MappedTensor, change: Callable[[tuple[Any, ...], Any], tuple[Any, ...]]) -> MappedTensor:
    """Return a tensor with other dims. `change` takes a tuple with an element per dim, and the element of an added dim."""
    pieces = tuple(
        replace(piece, at=Box(change(piece.at.start, 0), change(piece.at.shape, 1)), dims=change(piece.dims, None))
        for piece in tensor.pieces
    )
    return MappedTensor(tensor.name, tensor.dtype, change(tensor.shape, 1), pieces)


def _stacked(name: str, parts: Sequence[MappedTensor]) -> MappedTensor:
    return _concatenated(name, [_with_dims(part, lambda values, added: (added, *values)) for part in parts], 0)


def _transposed(rule: Transpose, tensor: MappedTensor) -> MappedTensor:
    one, other = (_dim(tensor, dim, "Transpose") for dim in rule.dims)
    order = list(range(len(tensor.shape)))
    order[one], order[other] = other, one
    # save_pretrained copies what it transposes, so parts of one tensor need not stay in one file any more.
    return _with_dims(tensor, lambda values, _: tuple(values[dim] for dim in order))
