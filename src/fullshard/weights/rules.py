"""The rules of key maps, as values; `map_keys` carries them out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rename:
    r"""Give tensors other names.

    Args:
        pattern: a regular expression, found anywhere in the name.
        to: in the place of what was found; `\1` is the first group. "" takes it away.
        optional: whether it may fit no tensor, as in rules for several models; otherwise that is an error.

    Example:
        >>> list(map_keys([Rename("^transformer[.]", "")], {"transformer.wte": None}))        # doctest: +SKIP
        ['wte']
    """

    pattern: str
    to: str
    optional: bool = field(default=False, kw_only=True, repr=False)


@dataclass(frozen=True, slots=True)
class RenameBy:
    """Give tensors the names that a function says.

    Args:
        function: takes a name, and returns another one, the same, or None to leave the tensor out.
        title: of the rule, in reports and errors.

    Example:
        >>> list(map_keys([RenameBy(str.lower)], {"W": None}))                                # doctest: +SKIP
        ['w']
    """

    function: Callable[[str], str | None] = field(repr=False)
    title: str = "a function"


@dataclass(frozen=True, slots=True)
class Drop:
    """Leave tensors out.

    Args:
        pattern: a regular expression, found anywhere in the name.
        optional: whether it may fit no tensor, as in rules for several models; otherwise that is an error.

    Example:
        >>> Drop("[.]rotary_emb[.]inv_freq$")
        Drop(pattern='[.]rotary_emb[.]inv_freq$')
    """

    pattern: str
    optional: bool = field(default=False, kw_only=True, repr=False)


@dataclass(frozen=True, slots=True)
class Keep:
    """Leave all other tensors out, as to save adapters alone.

    Args:
        pattern: a regular expression, found anywhere in the names that stay.
        optional: whether it may fit no tensor, as in rules for several models; then all stay. Otherwise that is an error.

    Example:
        >>> Keep("[.]lora_[AB][.]")
        Keep(pattern='[.]lora_[AB][.]')
    """

    pattern: str
    optional: bool = field(default=False, kw_only=True, repr=False)


@dataclass(frozen=True, slots=True)
class Merge:
    r"""Join several tensors to one, behind each other along a dim.

    Args:
        sources: regular expressions of whole names, in order; tensors whose groups are equal are joined.
        to: the name, with `\1` for the first group.
        dim: along which they lie behind each other.
        optional: whether it may fit no tensor, as in rules for several models; otherwise that is an error.

    Example:
        >>> qkv = Merge([rf"(.*)[.]{x}_proj[.]weight" for x in "qkv"], r"\1.qkv_proj.weight")
    """

    sources: Sequence[str]
    to: str
    dim: int = 0
    optional: bool = field(default=False, kw_only=True, repr=False)


@dataclass(frozen=True, slots=True)
class Split:
    r"""Cut one tensor in several along a dim.

    Args:
        source: a regular expression of the whole name.
        to: the names of the parts, with `\1` for the first group.
        dim: along which it is cut.
        sizes: of the parts; None are equal ones.
        optional: whether it may fit no tensor, as in rules for several models; otherwise that is an error.

    Example:
        >>> Split(r"(.*)[.]qkv[.]weight", [r"\1.q.weight", r"\1.k.weight", r"\1.v.weight"], sizes=(64, 16, 16)).dim
        0
    """

    source: str
    to: Sequence[str]
    dim: int = 0
    sizes: Sequence[int] | None = None
    optional: bool = field(default=False, kw_only=True, repr=False)


@dataclass(frozen=True, slots=True)
class Stack:
    r"""Put tensors of equal shapes behind each other along a new first dim, as those of experts.

    Args:
        source: a regular expression of whole names. Tensors whose `to` is equal are stacked, by
            the last group that is a number.
        to: the name, with `\1` for the first group.
        optional: whether it may fit no tensor, as in rules for several models; otherwise that is an error.

    Example:
        >>> Stack(r"(.*)[.]experts[.](\d+)[.]w1[.]weight", r"\1.experts.w1").to
        '\\1.experts.w1'
    """

    source: str
    to: str
    optional: bool = field(default=False, kw_only=True, repr=False)


@dataclass(frozen=True, slots=True)
class Unstack:
    r"""Take a tensor apart along its first dim, as that of experts: the inverse of `Stack`.

    In a checkpoint that is saved, the parts are in one file, as `save_pretrained` has them.

    Args:
        source: a regular expression of the whole name.
        to: the names of the parts, with `\1` for the first group, and `{}` for the number.
        optional: whether it may fit no tensor, as in rules for several models; otherwise that is an error.

    Example:
        >>> Unstack(r"(.*)[.]experts[.]w1", r"\1.experts.{}.w1.weight").source
        '(.*)[.]experts[.]w1'
    """

    source: str
    to: str
    optional: bool = field(default=False, kw_only=True, repr=False)


@dataclass(frozen=True, slots=True)
class Transpose:
    """Exchange two dims.

    Args:
        pattern: a regular expression, found anywhere in the name.
        dims: the two.
        optional: whether it may fit no tensor, as in rules for several models; otherwise that is an error.

    Example:
        GPT-2's Conv1D holds its weights the other way round than a Linear:

        >>> Transpose("(c_attn|c_proj|c_fc)[.]weight$").dims
        (0, 1)
    """

    pattern: str
    dims: tuple[int, int] = (0, 1)
    optional: bool = field(default=False, kw_only=True, repr=False)


@dataclass(frozen=True, slots=True)
class Convert:
    r"""Make a tensor by a function of a whole one, or of several: what no box can say, as taking apart a quantized weight.

    It is computed by one rank, on the CPU, and counted in `Loaded.conversions`.

    Args:
        sources: regular expressions of whole names, in the order of the function's arguments; tensors whose groups are equal
            belong together.
        to: the name, with `\1` for the first group.
        function: takes tensors on the CPU and returns one; called with tensors on meta before, to know its shape.
        optional: whether it may fit no tensor, as in rules for several models; otherwise that is an error.

    Example:
        >>> Convert([r"(.*)[.]weight", r"(.*)[.]scale"], r"\1.weight", lambda weight, scale: weight.float() * scale).to
        '\\1.weight'
    """

    sources: Sequence[str]
    to: str
    function: Callable[..., Tensor] = field(repr=False)
    optional: bool = field(default=False, kw_only=True, repr=False)


@dataclass(frozen=True, slots=True)
class Sort:
    """Put tensors in the order of their names, numbers in them by value: which file each is in follows from the order.

    `save_pretrained` does so for models that have rules of their own in transformers, as mixtures of experts.

    Example:
        >>> list(map_keys([Sort()], {"layers.10.w": None, "layers.9.w": None}))               # doctest: +SKIP
        ['layers.9.w', 'layers.10.w']
    """


Rule = Rename | RenameBy | Drop | Keep | Merge | Split | Stack | Unstack | Transpose | Convert | Sort

__all__ = ["Convert", "Drop", "Keep", "Merge", "Rename", "RenameBy", "Rule", "Sort", "Split", "Stack", "Transpose", "Unstack"]
