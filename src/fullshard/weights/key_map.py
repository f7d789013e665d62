"""Rules from the tensors of a checkpoint to those of a model: names, and which part of which tensor is where.

Every rule but `Convert` only says where boxes of tensors in files are: they compose before a byte is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import singledispatch
from math import prod
from typing import Any

import torch
from torch import Tensor

from fullshard.weights.boxes import Box
from fullshard.weights.headers import FileTensor
from fullshard.weights.holdings import ModelTensor
from fullshard.weights.rules import Convert, Drop, Keep, Merge, Rename, RenameBy, Rule, Sort, Split, Stack, Transpose, Unstack
from fullshard.weights.texts import nearest, printable


@dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """A tensor that a function makes of whole ones."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    inputs: tuple[Mapped, ...]
    function: Callable[..., Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return prod(self.shape) * self.dtype.itemsize


Source = FileTensor | Computed | ModelTensor


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a mapped tensor that is a box of a source.

    at: in the mapped tensor.      origin: where it begins in the source.
    dims: of each dim of the mapped tensor the dim of the source, None for one that the source does not have. Dims of the source
        that are not among them have one index, that of `origin`.
    """

    source: Source
    at: Box
    origin: tuple[int, ...]
    dims: tuple[int | None, ...]

    def in_source(self, box: Box) -> Box:
        """A box inside of `at`, in the source."""
        start, shape = list(self.origin), [1] * len(self.origin)
        for dim, source in enumerate(self.dims):
            if source is not None:
                start[source] += box.start[dim] - self.at.start[dim]
                shape[source] = box.shape[dim]
        return Box(tuple(start), tuple(shape))

    def from_source(self, box: Box) -> Box | None:
        """The elements of `at` that a box of the source has, in the mapped tensor."""
        if any(not box.start[dim] <= self.origin[dim] < box.stop[dim] for dim in self.left_out):
            return None
        start, shape = list(self.at.start), [1] * len(self.dims)
        for dim, source in enumerate(self.dims):
            if source is not None:
                begin = max(box.start[source], self.origin[source])
                end = min(box.stop[source], self.origin[source] + self.at.shape[dim])
                if end <= begin:
                    return None
                start[dim] += begin - self.origin[source]
                shape[dim] = end - begin
        return Box(tuple(start), tuple(shape))

    @property
    def left_out(self) -> tuple[int, ...]:
        """Dims of the source that the mapped tensor does not have."""
        return tuple(dim for dim in range(len(self.origin)) if dim not in self.dims)

    @property
    def keeps_order(self) -> bool:
        """Whether elements follow each other in the same order in both."""
        kept = [dim for dim in self.dims if dim is not None]
        return kept == sorted(kept)

    def arranged(self, part: Tensor) -> Tensor:
        """A part of the source with the dims of the mapped tensor; a view."""
        part = part.permute([*(dim for dim in self.dims if dim is not None), *self.left_out])
        for _ in self.left_out:
            part = part.select(-1, 0)
        for at, dim in enumerate(self.dims):
            if dim is None:
                part = part.unsqueeze(at)
        return part


@dataclass(frozen=True, slots=True)
class Mapped:
    """A tensor that the rules make. Its pieces are all of it, and do not overlap.

    together: alike for tensors that stay in one file, as they are the parts of one; None for one that stands alone.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    together: str | None = None

    @classmethod
    def of(cls, source: Source) -> Mapped:
        """A source as it is."""
        dims = tuple(range(len(source.shape)))
        whole = Box.whole(source.shape)
        return cls(source.name, source.dtype, source.shape, (Piece(source, whole, whole.start, dims),))

    @property
    def sources(self) -> str:
        """The names of what it is made of, for errors."""
        names = list(dict.fromkeys(piece.source.name for piece in self.pieces))
        return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


class MapError(ValueError):
    """Rules that do not fit the checkpoint."""

    def __init__(self, text: str) -> None:
        super().__init__(printable(text))


State = dict[str, Mapped]


KeyMap = Mapping[str, str] | Callable[[str], str | None] | Rule | Sequence[Rule] | None


def map_keys(key_map: KeyMap, state: State, *, strict: bool = True, counts: dict[str, int] | None = None) -> State:
    """The tensors that rules make of those of a checkpoint.

    Args:
        key_map: of names in the files those in the model: a dict, a function (None leaves a tensor out), or rules that are
            applied one after the other.
        state: by name.
        strict: whether a rule that fits no tensor is an error, unless it is `optional`.
        counts: gets of each rule, as a text, how many tensors it fits.

    Raises:
        MapError: for rules that do not fit, or give one name twice.
    """
    if key_map is None:
        return state
    if isinstance(key_map, Mapping):
        wrong = [one for pair in key_map.items() for one in pair if not isinstance(one, str)]
        if wrong:
            raise MapError(f"key_map must be of names to names, got {wrong[0]!r}")
        unknown = [name for name in key_map if name not in state]
        if unknown:
            raise MapError(f"key_map names '{unknown[0]}', which the checkpoint does not have{nearest(unknown[0], state)}")
        return _unique((key_map.get(name, name), tensor) for name, tensor in state.items())
    if isinstance(key_map, Rule):
        key_map = [key_map]
    if isinstance(key_map, Sequence) and not isinstance(key_map, str):
        for rule in key_map:
            _check(rule)
            try:
                fits = _fits(rule, state, strict=strict)
                state = _applied(rule, state)
            except re.error as failure:
                raise MapError(f"{rule}: {failure}") from failure
            if counts is not None:
                counts[str(rule)] = fits
        return state
    if callable(key_map):
        return _named_by(key_map, state)
    raise MapError(f"key_map must be a dict, a function of a name, or a list of rules, got a {type(key_map).__name__}")


def _check(rule: Any) -> None:
    """Refuse a rule whose fields are not what they should be.

    Raises:
        MapError: naming the rule.
    """
    if not isinstance(rule, Rule):
        raise MapError(f"key_map takes rules as Rename or Merge, got {rule!r}")
    for name in ("pattern", "source", "sources", "to"):
        if not hasattr(rule, name):
            continue
        value = getattr(rule, name)
        several = name == "sources" or (name == "to" and isinstance(rule, Split))
        if several and (isinstance(value, str) or not isinstance(value, Sequence) or not value):
            raise MapError(f"{rule}: {name} must be a list of texts, got {value!r}")
        wrong = [one for one in (value if several else [value]) if not isinstance(one, str)]
        if wrong:
            raise MapError(f"{rule}: {name} must be text, got {wrong[0]!r}")
    dims = rule.dims if isinstance(rule, Transpose) else (0, getattr(rule, "dim", 0))
    if not isinstance(dims, Sequence) or len(dims) != 2 or not all(isinstance(dim, int) for dim in dims):
        raise MapError(f"{rule}: expected an int for each dim, got {dims!r}")
    if isinstance(rule, Convert | RenameBy) and not callable(rule.function):
        raise MapError(f"{rule}: function must be one, got {rule.function!r}")


def _patterns(rule: Any) -> tuple[tuple[str, ...], bool]:
    """The regular expressions of a rule, and whether they stand for whole names."""
    if isinstance(rule, Rename | Drop | Keep | Transpose):
        return (rule.pattern,), False
    if isinstance(rule, Merge | Convert):
        return tuple(rule.sources), True
    return ((rule.source,), True) if isinstance(rule, Split | Stack | Unstack) else ((), True)


def _fits(rule: Any, state: State, *, strict: bool) -> int:
    """How many tensors a rule is about.

    Raises:
        MapError: if there is none, and it is not optional.
    """
    patterns, whole = _patterns(rule)
    if not patterns:
        return len(state)
    found = [re.compile(pattern) for pattern in patterns]
    fits = sum(any(one.fullmatch(name) if whole else one.search(name) for one in found) for name in state)
    if not fits and strict and state and not rule.optional:
        plain = re.sub(r"[\\^$()?*+\[\]]", "", patterns[0])
        raise MapError(f"{rule} fits no tensor{nearest(plain, state)}: correct it, or pass optional=True")
    return fits


@singledispatch
def _applied(rule: Any, state: State) -> State:
    """The state after one rule."""
    raise MapError(f"key_map takes rules as Rename or Merge, got {rule!r}")


@_applied.register
def _(rule: Rename, state: State) -> State:
    """The state with other names."""
    return _unique((re.sub(rule.pattern, rule.to, name), tensor) for name, tensor in state.items())


@_applied.register
def _(rule: RenameBy, state: State) -> State:
    """The state with the names that a function says."""
    return _named_by(rule.function, state)


def _named_by(function: Callable[[str], str | None], state: State) -> State:
    named = [(function(name), tensor) for name, tensor in state.items()]
    for (to, _), name in zip(named, state):
        if not (to is None or isinstance(to, str)):
            raise MapError(f"the function of key_map gives {to!r} for '{name}': expected a name, or None to leave it out")
    return _unique((name, tensor) for name, tensor in named if name is not None)


@_applied.register
def _(rule: Drop, state: State) -> State:
    """The state without them."""
    left = {name: tensor for name, tensor in state.items() if not re.search(rule.pattern, name)}
    if state and not left:
        raise MapError(f"{rule} leaves no tensor")
    return left


@_applied.register
def _(rule: Keep, state: State) -> State:
    """The state with nothing else."""
    return {name: tensor for name, tensor in state.items() if re.search(rule.pattern, name)} or state


@_applied.register
def _(rule: Merge, state: State) -> State:
    """The state with what was joined in the place of the first part."""
    return _gathered("Merge", state, rule.sources, rule.to, lambda name, parts: _joined(name, parts, rule.dim))


@_applied.register
def _(rule: Split, state: State) -> State:
    """The state with the parts in the place of what was cut."""

    def tensors() -> Iterable[tuple[str, Mapped]]:
        for name, tensor in state.items():
            match = re.fullmatch(rule.source, name)
            if match:
                yield from _parts(rule, tensor, [match.expand(to) for to in rule.to])
            else:
                yield name, tensor

    return _unique(tensors())


def _parts(rule: Split, tensor: Mapped, names: Sequence[str]) -> Iterable[tuple[str, Mapped]]:
    dim = _dim(tensor, rule.dim, "Split")
    length = tensor.shape[dim]
    sizes = [length // len(names)] * len(names) if rule.sizes is None else list(rule.sizes)
    if sum(sizes) != length or len(sizes) != len(names):
        raise MapError(
            f"Split: '{tensor.name}' of shape {tensor.shape} cannot be cut along dim {dim} in {len(names)} parts of "
            f"{', '.join(map(str, sizes))}"
        )
    at = 0
    for name, size in zip(names, sizes):
        yield name, _part(name, tensor, dim, at, size)
        at += size


@_applied.register
def _(rule: Stack, state: State) -> State:
    """The state with what was stacked in the place of the first part."""
    stacks: dict[str, list[tuple[tuple[int, ...], str]]] = {}
    for name in state:
        match = re.fullmatch(rule.source, name)
        if match:
            to = match.expand(rule.to)
            numbers = tuple(int(group) for group in match.groups() if group is not None and group.isdigit())
            stacks.setdefault(to, []).append((numbers, name))
    first = {found[0][1]: to for to, found in stacks.items()}
    gone = {name for found in stacks.values() for _, name in found}

    def tensors() -> Iterable[tuple[str, Mapped]]:
        for name, tensor in state.items():
            if name in first:
                to = first[name]
                found = sorted(stacks[to])
                numbers = [number[-1:] for number, _ in found]
                if numbers != [(i,) for i in range(len(found))]:
                    raise MapError(f"Stack: the parts of '{to}' are numbered {', '.join(str(n[0]) for n in numbers if n)}")
                yield to, _joined(to, [_lifted(state[one]) for _, one in found], 0)
            elif name not in gone:
                yield name, tensor

    return _unique(tensors())


@_applied.register
def _(rule: Unstack, state: State) -> State:
    """The state with the parts in the place of what was stacked."""

    def tensors() -> Iterable[tuple[str, Mapped]]:
        for name, tensor in state.items():
            match = re.fullmatch(rule.source, name)
            if not match:
                yield name, tensor
                continue
            for number in range(tensor.shape[_dim(tensor, 0, "Unstack")]):
                to = match.expand(rule.to).replace("{}", str(number))
                yield to, replace(_lowered(_part(to, tensor, 0, number, 1)), together=name)

    return _unique(tensors())


@_applied.register
def _(rule: Transpose, state: State) -> State:
    """The state with those tensors transposed."""
    return {name: _turned(rule, tensor) if re.search(rule.pattern, name) else tensor for name, tensor in state.items()}


def _turned(rule: Transpose, tensor: Mapped) -> Mapped:
    one, other = (_dim(tensor, dim, "Transpose") for dim in rule.dims)
    order = list(range(len(tensor.shape)))
    order[one], order[other] = other, one

    def turn(values: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(values[dim] for dim in order)

    pieces = tuple(
        Piece(piece.source, Box(turn(piece.at.start), turn(piece.at.shape)), piece.origin, turn(piece.dims))
        for piece in tensor.pieces
    )
    return Mapped(tensor.name, tensor.dtype, turn(tensor.shape), pieces)


@_applied.register
def _(rule: Convert, state: State) -> State:
    """The state with what is computed in the place of its first argument."""
    return _gathered("Convert", state, rule.sources, rule.to, lambda name, inputs: _computed(rule, name, inputs))


def _computed(rule: Convert, name: str, inputs: Sequence[Mapped]) -> Mapped:
    try:
        out = rule.function(*(torch.empty(one.shape, dtype=one.dtype, device="meta") for one in inputs))
    except Exception as failure:
        raise MapError(f"Convert: the function for '{name}' fails on meta: {type(failure).__name__}: {failure}") from failure
    if not isinstance(out, Tensor):
        raise MapError(f"Convert: the function for '{name}' returns a {type(out).__name__}, expected a tensor")
    return Mapped.of(Computed(name, out.dtype, tuple(out.shape), tuple(inputs), rule.function))


@_applied.register
def _(rule: Sort, state: State) -> State:
    """The state in the order of its names."""
    return dict(sorted(state.items(), key=lambda item: [_by_value(part) for part in item[0].split(".")]))


def _by_value(part: str) -> tuple[int, str, int]:
    """A number by its value, before any word; a word with a number at its end by both."""
    word = part.rstrip("0123456789")
    return int(bool(word)), word, int(part[len(word) :] or -1)


def _unique(tensors: Iterable[tuple[str, Mapped]]) -> State:
    found: State = {}
    for name, tensor in tensors:
        if name == "__metadata__":
            raise MapError(f"key_map gives a tensor the name '{name}', which files have for something else: '{tensor.sources}'")
        if name in found:
            raise MapError(f"key_map gives '{name}' twice: of {found[name].sources}, and of {tensor.sources}")
        found[name] = tensor
    return found


def _gathered(
    rule: str, state: State, sources: Sequence[str], to: str, make: Callable[[str, Sequence[Mapped]], Mapped]
) -> State:
    """The state with one tensor for each set of names that fit `sources` with the same groups, in the place of the first."""
    sets: dict[tuple[Any, ...], dict[int, tuple[str, str]]] = {}
    for name in state:
        for number, pattern in enumerate(sources):
            match = re.fullmatch(pattern, name)
            if match:
                sets.setdefault(match.groups(), {})[number] = name, match.expand(to)
    made: dict[str, tuple[str, list[str]]] = {}
    for found in sets.values():
        names = [name for _, (name, _) in sorted(found.items())]
        if len(found) < len(sources):
            missing = next(pattern for number, pattern in enumerate(sources) if number not in found)
            raise MapError(f"{rule}: beside '{names[0]}' there is nothing for {missing!r}")
        made[names[0]] = found[0][1], names
    gone = {name for _, names in made.values() for name in names}

    def tensors() -> Iterable[tuple[str, Mapped]]:
        for name, tensor in state.items():
            if name in made:
                yield made[name][0], make(made[name][0], [state[one] for one in made[name][1]])
            elif name not in gone:
                yield name, tensor

    return _unique(tensors())


def _dim(tensor: Mapped, dim: int, rule: str) -> int:
    if not -len(tensor.shape) <= dim < len(tensor.shape):
        raise MapError(f"{rule}: '{tensor.name}' of shape {tensor.shape} has no dim {dim}")
    return dim % len(tensor.shape)


def _joined(name: str, parts: Sequence[Mapped], dim: int) -> Mapped:
    first = parts[0]
    dim = _dim(first, dim, "Merge")
    pieces: list[Piece] = []
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
                f"'{first.name}' of shape {first.shape} and dtype {first.dtype}"
            )
        by = [length if at == dim else 0 for at in range(len(part.shape))]
        pieces += [Piece(piece.source, piece.at.moved(by), piece.origin, piece.dims) for piece in part.pieces]
        length += part.shape[dim]
    return Mapped(name, first.dtype, (*first.shape[:dim], length, *first.shape[dim + 1 :]), tuple(pieces))


def _part(name: str, tensor: Mapped, dim: int, start: int, size: int) -> Mapped:
    shape = (*tensor.shape[:dim], size, *tensor.shape[dim + 1 :])
    wanted = Box(tuple(start if at == dim else 0 for at in range(len(shape))), shape)
    pieces: list[Piece] = []
    for piece in tensor.pieces:
        box = piece.at.meet(wanted)
        if box is not None:
            inner = piece.in_source(box)
            pieces.append(Piece(piece.source, box.relative_to(wanted), inner.start, piece.dims))
    return Mapped(name, tensor.dtype, shape, tuple(pieces))


def _lifted(tensor: Mapped) -> Mapped:
    """With a new first dim of one element."""
    pieces = tuple(
        Piece(piece.source, Box((0, *piece.at.start), (1, *piece.at.shape)), piece.origin, (None, *piece.dims))
        for piece in tensor.pieces
    )
    return Mapped(tensor.name, tensor.dtype, (1, *tensor.shape), pieces)


def _lowered(tensor: Mapped) -> Mapped:
    """Without its first dim, which has one element."""
    pieces = tuple(
        Piece(piece.source, Box(piece.at.start[1:], piece.at.shape[1:]), piece.origin, piece.dims[1:])
        for piece in tensor.pieces
    )
    return Mapped(tensor.name, tensor.dtype, tensor.shape[1:], pieces)


__all__ = [
    "Computed",
    "KeyMap",
    "MapError",
    "Mapped",
    "Piece",
    "Source",
    "State",
    "map_keys",
]
