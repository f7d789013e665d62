"""Apply the rules of a key map: find for each tensor of a model the parts of checkpoint tensors that fill it.

A part is a box: a range of indices along each dim. Every rule except `Convert` only maps boxes of tensors to boxes of tensors.
Rules compose before any data is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import singledispatch
from itertools import islice
from math import prod
from typing import Any

import torch
from torch import Tensor

from fullshard.errors import InternalError, printable
from fullshard.weights.boxes import Box, ModelTensor
from fullshard.weights.headers import FileTensor
from fullshard.weights.rules import Convert, Drop, Keep, Merge, Rename, RenameBy, Rule, Sort, Split, Stack, Transpose, Unstack

_MOST = 2000  # names that are compared character by character


def nearest(name: str, names: Iterable[str]) -> str:
    """Return a hint such as ` (nearest: 'a', 'b')` with up to two similar names, or "" if none is similar.

    Of more than 2,000 names, only names with the same last component are compared.
    """
    from difflib import get_close_matches

    every = list(names)
    if len(every) > _MOST:
        last = name.rpartition(".")[2]
        every = list(islice((one for one in every if one.rpartition(".")[2] == last), _MOST))
    found = get_close_matches(name, every, 2, 0.6)
    return f" (nearest: {', '.join(repr(one) for one in found)})" if found else ""


@dataclass(frozen=True, slots=True, eq=False)
class ComputedTensor:
    """The output of a `Convert` function, computed from whole tensors.

    Compared by identity: functions have no useful equality, and `Calculator` caches the value of one object.
    """

    name: str
    dtype: torch.dtype  # of the output, found by running the function on meta
    shape: tuple[int, ...]  # of the output, found by running the function on meta
    inputs: tuple[MappedTensor, ...]  # arguments of the function, in order
    function: Callable[..., Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of the output."""
        return prod(self.shape) * self.dtype.itemsize


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
        if any(not box.start[dim] <= self.origin[dim] < box.stop[dim] for dim in self.dropped_dims):
            return None
        start, shape = list(self.at.start), [1] * len(self.dims)
        for dim, source_dim in enumerate(self.dims):
            if source_dim is not None:
                begin = max(box.start[source_dim], self.origin[source_dim])
                end = min(box.stop[source_dim], self.origin[source_dim] + self.at.shape[dim])
                if end <= begin:
                    return None
                start[dim] += begin - self.origin[source_dim]
                shape[dim] = end - begin
        return Box(tuple(start), tuple(shape))

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
        """Return `part`, a slice of the source, with the dims of the mapped tensor: a view, which callers only read."""
        part = part.permute([*(dim for dim in self.dims if dim is not None), *self.dropped_dims])
        for _ in self.dropped_dims:
            part = part.select(-1, 0)
        for at, dim in enumerate(self.dims):
            if dim is None:
                part = part.unsqueeze(at)
        return part


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """A tensor that the rules produce, as a list of pieces of source tensors."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
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
        """Names of the source tensors for error texts: at most four, then the number of the others."""
        names = list(dict.fromkeys(piece.source.name for piece in self.pieces))
        return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


class MapError(ValueError):
    """A key map that is invalid or does not fit the checkpoint."""

    def __init__(self, text: str) -> None:
        super().__init__(printable(text))


def cast_dtype(stored: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Return the dtype of a tensor after floating-point tensors were cast to `wanted`; None casts nothing."""
    return stored if wanted is None or not stored.is_floating_point else wanted


State = dict[str, MappedTensor]
"""Tensors by name, in order: a state dict before any data is read."""

KeyMap = Mapping[str, str] | Callable[[str], str | None] | Rule | Sequence[Rule] | None


def map_keys(key_map: KeyMap, state: State, *, strict: bool = True, counts: dict[str, int] | None = None) -> State:
    """Apply a key map to the tensors of a checkpoint.

    Returns:
        The resulting tensors by name.
    """
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
        if not hasattr(rule, name):
            continue
        value = getattr(rule, name)
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


def _patterns(rule: Any) -> tuple[tuple[str, ...], bool]:
    """Return the regular expressions of a rule, and True if they must match whole names."""
    if isinstance(rule, Rename | Drop | Keep | Transpose):
        return (rule.pattern,), False
    if isinstance(rule, Merge | Convert):
        return tuple(rule.sources), True
    if isinstance(rule, Split | Stack | Unstack):
        return (rule.source,), True
    if isinstance(rule, RenameBy | Sort):  # they apply to every tensor
        return (), True
    raise InternalError(f"key_map has no patterns of {rule!r}.")


def _count_matches(rule: Any, state: State, *, strict: bool) -> int:
    """Return the number of tensors that `rule` matches. Raise MapError if there is none and the rule is not optional."""
    patterns, whole = _patterns(rule)
    if not patterns:
        return len(state)
    regexes = [re.compile(pattern) for pattern in patterns]
    matches = sum(any(regex.fullmatch(name) if whole else regex.search(name) for regex in regexes) for name in state)
    if not matches and strict and state and not rule.optional:
        # Without the metacharacters, the pattern resembles a name closely enough to find the nearest ones.
        plain = re.sub(r"[\\^$()?*+\[\]]", "", patterns[0])
        raise MapError(f"{rule} matches no tensor{nearest(plain, state)}. Correct it, or pass optional=True.")
    return matches


@singledispatch
def _apply(rule: Any, state: State) -> State:
    """Apply one rule and return the resulting tensors."""
    raise MapError(f"key_map takes rules such as Rename or Merge, got {rule!r}")


@_apply.register
def _(rule: Rename, state: State) -> State:
    """Rename tensors by a regular expression."""
    return _build_state((re.sub(rule.pattern, rule.to, name), tensor) for name, tensor in state.items())


@_apply.register
def _(rule: RenameBy, state: State) -> State:
    """Rename tensors by a function."""
    return _rename_by(rule.function, state)


def _rename_by(function: Callable[[str], str | None], state: State) -> State:
    named = [(function(name), tensor) for name, tensor in state.items()]
    for (to, _), name in zip(named, state):
        if not (to is None or isinstance(to, str)):
            raise MapError(
                f"key_map: expected the function to return a name, or None to leave the tensor out, got {to!r} for '{name}'."
            )
    return _build_state((name, tensor) for name, tensor in named if name is not None)


@_apply.register
def _(rule: Drop, state: State) -> State:
    """Leave out the tensors that match."""
    left = {name: tensor for name, tensor in state.items() if not re.search(rule.pattern, name)}
    if state and not left:
        raise MapError(f"{rule} matches every tensor and leaves none.")
    return left


@_apply.register
def _(rule: Keep, state: State) -> State:
    """Leave out the tensors that do not match; an optional rule that matches nothing leaves out nothing."""
    return {name: tensor for name, tensor in state.items() if re.search(rule.pattern, name)} or state


@_apply.register
def _(rule: Merge, state: State) -> State:
    """Concatenate tensors; the result takes the position of its first part."""
    return _combine("Merge", state, rule.sources, rule.to, lambda name, parts: _concatenated(name, parts, rule.dim))


@_apply.register
def _(rule: Split, state: State) -> State:
    """Split tensors; the parts take the position of the tensor."""

    def tensors() -> Iterable[tuple[str, MappedTensor]]:
        for name, tensor in state.items():
            match = re.fullmatch(rule.source, name)
            if match:
                yield from _split(rule, tensor, [match.expand(to) for to in rule.to])
            else:
                yield name, tensor

    return _build_state(tensors())


def _split(rule: Split, tensor: MappedTensor, names: Sequence[str]) -> Iterable[tuple[str, MappedTensor]]:
    dim = _dim(tensor, rule.dim, "Split")
    length = tensor.shape[dim]
    sizes = [length // len(names)] * len(names) if rule.sizes is None else list(rule.sizes)
    if sum(sizes) != length or len(sizes) != len(names) or min(sizes) < 0:
        raise MapError(
            f"Split: '{tensor.name}' of shape {tensor.shape} cannot be split along dim {dim} into {len(names)} parts of sizes "
            f"{', '.join(map(str, sizes))}."
        )
    at = 0
    for name, size in zip(names, sizes):
        yield name, _narrowed(name, tensor, dim, at, size)
        at += size


@_apply.register
def _(rule: Stack, state: State) -> State:
    """Stack tensors along a new first dim; the result takes the position of the part that comes first in the checkpoint."""
    stacks: dict[str, list[tuple[tuple[int, ...], str]]] = {}  # by name of the result: (numbers in the name, name) of each part
    for name in state:
        match = re.fullmatch(rule.source, name)
        if match:
            to = match.expand(rule.to)
            numbers = tuple(int(group) for group in match.groups() if group is not None and group.isdigit())
            stacks.setdefault(to, []).append((numbers, name))
    result_of_first_part = {parts[0][1]: to for to, parts in stacks.items()}
    all_parts = {name for parts in stacks.values() for _, name in parts}

    def tensors() -> Iterable[tuple[str, MappedTensor]]:
        for name, tensor in state.items():
            if name in result_of_first_part:
                to = result_of_first_part[name]
                parts = sorted(stacks[to])
                # The last number of a name is the index of the part; numbers before it, such as the layer's, are in `to`.
                indices = [numbers[-1:] for numbers, _ in parts]
                if indices != [(i,) for i in range(len(parts))]:
                    got = ", ".join(str(index[0]) for index in indices if index)
                    raise MapError(
                        f"Stack: expected the parts of '{to}' to be numbered from 0 without gaps, got {got or 'no numbers'}."
                    )
                yield to, _concatenated(to, [_unsqueezed(state[part]) for _, part in parts], 0)
            elif name not in all_parts:
                yield name, tensor

    return _build_state(tensors())


@_apply.register
def _(rule: Unstack, state: State) -> State:
    """Take tensors apart along the first dim; the parts take the position of the tensor."""

    def tensors() -> Iterable[tuple[str, MappedTensor]]:
        for name, tensor in state.items():
            match = re.fullmatch(rule.source, name)
            if not match:
                yield name, tensor
                continue
            for number in range(tensor.shape[_dim(tensor, 0, "Unstack")]):
                to = match.expand(rule.to).replace("{}", str(number))
                yield to, replace(_squeezed(_narrowed(to, tensor, 0, number, 1)), file_group=name)

    return _build_state(tensors())


@_apply.register
def _(rule: Transpose, state: State) -> State:
    """Transpose the tensors that match."""
    return {name: _transposed(rule, tensor) if re.search(rule.pattern, name) else tensor for name, tensor in state.items()}


def _transposed(rule: Transpose, tensor: MappedTensor) -> MappedTensor:
    one, other = (_dim(tensor, dim, "Transpose") for dim in rule.dims)
    order = list(range(len(tensor.shape)))
    order[one], order[other] = other, one

    def permuted(values: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(values[dim] for dim in order)

    pieces = tuple(
        replace(piece, at=Box(permuted(piece.at.start), permuted(piece.at.shape)), dims=permuted(piece.dims))
        for piece in tensor.pieces
    )
    # save_pretrained copies what it transposes, so parts of one tensor need not stay in one file any more.
    return replace(tensor, shape=permuted(tensor.shape), pieces=pieces, file_group=None)


@_apply.register
def _(rule: Convert, state: State) -> State:
    """Add the outputs of a function; each takes the position of its first input."""
    return _combine("Convert", state, rule.sources, rule.to, lambda name, inputs: _convert(rule, name, inputs))


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


@_apply.register
def _(rule: Sort, state: State) -> State:
    """Sort tensors by name."""
    return dict(sorted(state.items(), key=lambda item: [_natural_key(part) for part in item[0].split(".")]))


def _natural_key(part: str) -> tuple[int, str, int]:
    """Return a sort key for one part of a name: numbers come first, by value; a word with a final number sorts by both."""
    word = part.rstrip("0123456789")
    return int(bool(word)), word, int(part[len(word) :] or -1)


def _build_state(tensors: Iterable[tuple[str, MappedTensor]]) -> State:
    """Return the tensors by name. Raise MapError for a name that is given twice or reserved by the file format."""
    state: State = {}
    for name, tensor in tensors:
        if name == "__metadata__":
            raise MapError(
                f"key_map cannot give '{tensor.sources}' the name '{name}': the file format reserves it. Use another name."
            )
        if name in state:
            raise MapError(f"key_map gives '{name}' twice: to {state[name].sources}, and to {tensor.sources}.")
        state[name] = tensor
    return state


def _combine(
    rule: str, state: State, sources: Sequence[str], to: str, make: Callable[[str, Sequence[MappedTensor]], MappedTensor]
) -> State:
    """Replace each set of tensors whose names match `sources` with equal groups by one tensor, made by `make`.

    The new tensor takes the position of the first tensor of the set; its name is `to`, expanded with the groups.
    """
    # By regex groups: for the number of each pattern in `sources`, the name that matches it and the name of the result.
    sets: dict[tuple[Any, ...], dict[int, tuple[str, str]]] = {}
    for name in state:
        for number, pattern in enumerate(sources):
            match = re.fullmatch(pattern, name)
            if match:
                members = sets.setdefault(match.groups(), {})
                if number in members:
                    raise MapError(
                        f"{rule}: '{members[number][0]}' and '{name}' both match {pattern!r}, with equal groups. Put what "
                        "differs between them into a group."
                    )
                members[number] = name, match.expand(to)
    combined: dict[str, tuple[str, list[str]]] = {}  # by name of the first tensor: name of the result, names of the tensors
    for members in sets.values():
        names = [name for _, (name, _) in sorted(members.items())]
        if len(members) < len(sources):
            missing = next(pattern for number, pattern in enumerate(sources) if number not in members)
            raise MapError(f"{rule}: '{names[0]}' has no counterpart that matches {missing!r}.")
        first, _ = next(iter(members.values()))  # in the order of `state`, as transformers places it
        combined[first] = members[0][1], names
    replaced = {name for _, names in combined.values() for name in names}

    def tensors() -> Iterable[tuple[str, MappedTensor]]:
        for name, tensor in state.items():
            if name in combined:
                result, names = combined[name]
                yield result, make(result, [state[member] for member in names])
            elif name not in replaced:
                yield name, tensor

    return _build_state(tensors())


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
        rest = part.shape[:dim] + part.shape[dim + 1 :]
        if (
            len(part.shape) != len(first.shape)
            or rest != first.shape[:dim] + first.shape[dim + 1 :]
            or part.dtype != first.dtype
        ):
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
    pieces: list[SourcePiece] = []
    for piece in tensor.pieces:
        box = piece.at.intersect(wanted)
        if box is not None:
            inner = piece.source_box(box)
            pieces.append(replace(piece, at=box.relative_to(wanted), origin=inner.start))
    return MappedTensor(name, tensor.dtype, shape, tuple(pieces))


def _unsqueezed(tensor: MappedTensor) -> MappedTensor:
    """Add a first dim of size 1."""
    pieces = tuple(
        replace(piece, at=Box((0, *piece.at.start), (1, *piece.at.shape)), dims=(None, *piece.dims)) for piece in tensor.pieces
    )
    return MappedTensor(tensor.name, tensor.dtype, (1, *tensor.shape), pieces)


def _squeezed(tensor: MappedTensor) -> MappedTensor:
    """Remove the first dim, which has size 1."""
    pieces = tuple(
        replace(piece, at=Box(piece.at.start[1:], piece.at.shape[1:]), dims=piece.dims[1:]) for piece in tensor.pieces
    )
    return MappedTensor(tensor.name, tensor.dtype, tensor.shape[1:], pieces)
