"""The rules of key maps, as values; `map_keys` applies them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True)
class _MayMatchNothing:
    optional: bool = field(default=False, kw_only=True, repr=False)


@dataclass(frozen=True, slots=True)
class Rename(_MayMatchNothing):
    r"""Rename tensors by a regular expression.

    Args:
        pattern: a regular expression that matches anywhere in the name.
        to: replacement of each match; `\1` is the first group, "" removes the match.
        optional: allow that no tensor matches, for rules that serve several models; otherwise that is an error.

    Example:
        >>> list(map_keys([Rename("^transformer[.]", "")], {"transformer.wte": None}))        # doctest: +SKIP
        ['wte']
    """

    pattern: str
    to: str


@dataclass(frozen=True, slots=True)
class RenameBy:
    """Rename tensors by a function.

    Args:
        function: takes a name and returns the new name, or None to leave the tensor out.
        title: name of the rule in reports and errors.

    Example:
        >>> list(map_keys([RenameBy(str.lower)], {"W": None}))                                # doctest: +SKIP
        ['w']
    """

    function: Callable[[str], str | None] = field(repr=False)
    title: str = "a function"


@dataclass(frozen=True, slots=True)
class Drop(_MayMatchNothing):
    """Leave tensors out.

    Args:
        pattern: a regular expression that matches anywhere in the name.
        optional: allow that no tensor matches, for rules that serve several models; otherwise that is an error.

    Example:
        >>> Drop("[.]rotary_emb[.]inv_freq$")
        Drop(pattern='[.]rotary_emb[.]inv_freq$')
    """

    pattern: str


@dataclass(frozen=True, slots=True)
class Keep(_MayMatchNothing):
    """Leave out all other tensors, for example to save only adapters.

    Args:
        pattern: a regular expression that matches anywhere in the names of the tensors to keep.
        optional: allow that no tensor matches, for rules that serve several models; then all tensors stay. Otherwise that is an
            error.

    Example:
        >>> Keep("[.]lora_[AB][.]")
        Keep(pattern='[.]lora_[AB][.]')
    """

    pattern: str


@dataclass(frozen=True, slots=True)
class Merge(_MayMatchNothing):
    r"""Concatenate several tensors along a dim.

    Args:
        sources: regular expressions that match whole names, in order; tensors with equal groups are concatenated.
        to: name of the result; `\1` is the first group.
        dim: the dim to concatenate along.
        optional: allow that no tensor matches, for rules that serve several models; otherwise that is an error.

    Example:
        >>> qkv = Merge([rf"(.*)[.]{x}_proj[.]weight" for x in "qkv"], r"\1.qkv_proj.weight")
    """

    sources: Sequence[str]
    to: str
    dim: int = 0


@dataclass(frozen=True, slots=True)
class Split(_MayMatchNothing):
    r"""Split a tensor into several along a dim.

    Args:
        source: a regular expression that matches the whole name.
        to: names of the parts; `\1` is the first group.
        dim: the dim to split along.
        sizes: sizes of the parts along `dim`; None means equal parts.
        optional: allow that no tensor matches, for rules that serve several models; otherwise that is an error.

    Example:
        >>> Split(r"(.*)[.]qkv[.]weight", [r"\1.q.weight", r"\1.k.weight", r"\1.v.weight"], sizes=(64, 16, 16)).dim
        0
    """

    source: str
    to: Sequence[str]
    dim: int = 0
    sizes: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class Stack(_MayMatchNothing):
    r"""Stack tensors of equal shapes along a new first dim, for example the weights of experts.

    Args:
        source: a regular expression that matches whole names. Tensors with equal `to` are stacked, in the order of the last
            group that is a number.
        to: name of the result; `\1` is the first group.
        optional: allow that no tensor matches, for rules that serve several models; otherwise that is an error.

    Example:
        >>> Stack(r"(.*)[.]experts[.](\d+)[.]w1[.]weight", r"\1.experts.w1").to
        '\\1.experts.w1'
    """

    source: str
    to: str


@dataclass(frozen=True, slots=True)
class Unstack(_MayMatchNothing):
    r"""Take a tensor apart along its first dim, for example the weights of experts: the inverse of `Stack`.

    When a checkpoint is saved, the parts are written to one file, as `save_pretrained` does.

    Args:
        source: a regular expression that matches the whole name.
        to: names of the parts; `\1` is the first group and `{}` the index along the first dim.
        optional: allow that no tensor matches, for rules that serve several models; otherwise that is an error.

    Example:
        >>> Unstack(r"(.*)[.]experts[.]w1", r"\1.experts.{}.w1.weight").source
        '(.*)[.]experts[.]w1'
    """

    source: str
    to: str


@dataclass(frozen=True, slots=True)
class Transpose(_MayMatchNothing):
    """Transpose two dims.

    Args:
        pattern: a regular expression that matches anywhere in the name.
        dims: the two dims.
        optional: allow that no tensor matches, for rules that serve several models; otherwise that is an error.

    Example:
        GPT-2's Conv1D stores its weights transposed, compared with a Linear:

        >>> Transpose("(c_attn|c_proj|c_fc)[.]weight$").dims
        (0, 1)
    """

    pattern: str
    dims: tuple[int, int] = (0, 1)


@dataclass(frozen=True, slots=True)
class Convert(_MayMatchNothing):
    r"""Compute a tensor from one or several whole tensors, for example to dequantize a weight.

    Use it for conversions that the other rules, which only move rectangular parts of tensors, cannot express.

    One rank runs the function, on the CPU. `Loaded.conversions` lists the tensor as `computed`.

    Args:
        sources: regular expressions that match whole names, in the order of the function's arguments; tensors with equal groups
            are the arguments of one call.
        to: name of the result; `\1` is the first group.
        function: takes tensors on the CPU and returns one. It is first called with meta tensors, to find the shape and dtype.
        optional: allow that no tensor matches, for rules that serve several models; otherwise that is an error.

    Example:
        >>> Convert([r"(.*)[.]weight", r"(.*)[.]scale"], r"\1.weight", lambda weight, scale: weight.float() * scale).to
        '\\1.weight'
    """

    sources: Sequence[str]
    to: str
    function: Callable[..., Tensor] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Sort:
    """Sort tensors by name, with numbers compared by value. The order decides which file a tensor is saved to.

    `save_pretrained` sorts models that have conversion rules in transformers, such as mixtures of experts.

    Example:
        >>> list(map_keys([Sort()], {"layers.10.w": None, "layers.9.w": None}))               # doctest: +SKIP
        ['layers.9.w', 'layers.10.w']
    """


# A new rule is an entry here and in `__all__` of weights/__init__.py, in `_count_matches` and `_apply` of key_map.py,
# and in docs/weights.md and docs/api/weights.md (docstrings elsewhere name rules as examples only). `_check` checks the fields
# `pattern`, `source`, `sources`, `to`, `dim` and `dims`, by these names; a field with another name needs a line there. A rule
# maps boxes to boxes. If boxes cannot express it, `SourcePiece` gets a field, which is part of its `geometry`; callers of
# `view_as_mapped` may get a copy as well. Tests: `test_rules_say_where_every_element_is` and the tables of refused values in
# tests/unit/test_weights.py.
Rule = Rename | RenameBy | Drop | Keep | Merge | Split | Stack | Unstack | Transpose | Convert | Sort
