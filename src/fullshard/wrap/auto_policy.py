"""Automatic choice of units: repeated blocks, and embeddings and heads that are as large as a block."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from typing import Any

from torch import nn

from fullshard.core import children_first
from fullshard.wrap.plan import PlannedUnit, has_forward

_LIST_CLASSES = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_TABLE_CLASSES = (nn.Linear, nn.Embedding, nn.EmbeddingBag)  # heads and embeddings; "tables" below means both
_ROUTER_NAME = re.compile(r"(^|_)(router|gate|gating|selector)s?$")  # names of modules that select items of a sibling list


@dataclass(frozen=True)
class AutoPolicy:
    """Policy that chooses repeated blocks, and large embeddings and heads, as units.

    Blocks are the outermost modules that repeat in a list. Embeddings and heads that are as large as a block are units, so that
    they are not unsharded for the whole forward and backward; all other modules stay in the unit of the model itself. Since
    every rank must run every unit, the policy enters no blocks and no lists of experts. docs/wrapping.md has all rules.

    Args:
        apart: fraction of the bytes of the median block; embeddings and heads of at least this size are units. So is one with
            a quarter of that size, if all together have that size.
        tiny: fraction of the bytes of the largest block; smaller blocks are merged with neighbours, up to that size.
        merged_bytes: maximum bytes of merged blocks together.

    Raises:
        ValueError: for a value that is not a number, or is less than 0.
    """

    apart: float = 0.5
    tiny: float = 1 / 16
    merged_bytes: int = 32 * 2**20

    def __post_init__(self) -> None:
        for name in ("apart", "tiny", "merged_bytes"):
            value = getattr(self, name)
            if not (isinstance(value, (int, float)) and value >= 0):
                raise ValueError(f"Expected a number >= 0 for AutoPolicy.{name}, got {value!r}.")

    def units(
        self, model: nn.Module, *, ignored_modules: Collection[nn.Module] = (), ignored: Iterable[nn.Parameter] = ()
    ) -> list[PlannedUnit]:
        """Choose the units of a model, without the unit of the model itself.

        Args:
            model: any module; it is not changed.
            ignored_modules: modules that are not entered.
            ignored: parameters that do not count.

        Returns:
            The units: blocks, then embeddings and heads. Empty if no module repeats.
        """
        survey = _Survey(model, set(ignored_modules), set(map(id, ignored)))
        blocks = survey.blocks(self.apart)
        if not blocks:
            return []
        limit = min(self.tiny * max(map(survey.nbytes, blocks)), self.merged_bytes)
        return [*survey.merged(blocks, limit), *survey.large_tables(blocks, self.apart * median(map(survey.nbytes, blocks)))]


class _Survey:
    """The structure of a model, and the choices of `AutoPolicy` for it."""

    def __init__(self, model: nn.Module, skipped: set[nn.Module], ignored: set[int]) -> None:
        self._model, self._skipped, self._ignored = model, skipped, ignored
        self._names = {module: name for name, module in children_first(model)}
        self._lists: dict[nn.Module, nn.Module] = {}  # module -> the list that contains it
        self._registered_on: dict[int, set[nn.Module]] = {}  # id of a parameter -> modules that register it
        self._no_split: set[str] = set()  # names of classes that must not be split
        for module in self._names:
            self._no_split.update(getattr(module, "_no_split_modules", None) or ())
            for parameter in module.parameters(recurse=False):
                self._registered_on.setdefault(id(parameter), set()).add(module)
            for own, child in module.named_children():
                if isinstance(child, _LIST_CLASSES) and _is_selected_from(module, own):
                    self._skipped.update(child.modules())
            if isinstance(module, _LIST_CLASSES):
                self._lists.update(dict.fromkeys(module.children(), module))

    def nbytes(self, module: nn.Module) -> int:
        return sum(p.numel() * p.element_size() for p in module.parameters() if id(p) not in self._ignored)

    def _children(self, module: nn.Module) -> list[nn.Module]:
        return [child for child in module.children() if child not in self._skipped and self.nbytes(child)]

    # --- blocks ---

    def blocks(self, apart: float) -> list[nn.Module]:
        """Return the outermost repeated modules, in registration order."""
        found = self._outermost(self._repeated())
        composite = [block for block in found if _has_children(block)]
        if composite:
            least = apart * median(map(self.nbytes, composite))
            found = [block for block in found if _has_children(block) or self.nbytes(block) >= least]
        return found

    def _repeated(self) -> set[type[nn.Module]]:
        """Return the classes with two modules of equal shapes in one list, or with two modules that must not be split."""
        repeated: set[type[nn.Module]] = set()
        for module in self._model.modules():
            if isinstance(module, _LIST_CLASSES) and module not in self._skipped:
                children = [child for child in self._children(module) if not isinstance(child, nn.Embedding)]
                kinds = Counter((type(child), self._shapes(child)) for child in children)
                repeated |= {kind for (kind, _), count in kinds.items() if count > 1}
        return repeated

    def _outermost(self, repeated: set[type[nn.Module]]) -> list[nn.Module]:
        found: dict[nn.Module, None] = {}

        def is_block(module: nn.Module) -> bool:
            return module in self._lists and type(module) in repeated and not self._is_stage(module, repeated)

        def visit(module: nn.Module) -> None:
            children = self._children(module)
            # A list of blocks may contain another class, such as an attention layer among recurrent layers: also a block.
            row = isinstance(module, nn.ModuleList) and sum(map(is_block, children)) > 1
            for child in children:
                in_row = row and _has_children(child) and not isinstance(child, _LIST_CLASSES) and has_forward(child)
                if is_block(child) or in_row:
                    found[child] = None
                elif type(child).__name__ not in self._no_split:
                    visit(child)

        visit(self._model)
        return list(found)

    def _is_stage(self, module: nn.Module, repeated: set[type[nn.Module]]) -> bool:
        """Return True if `module` is a list of blocks that are better units than the list as a whole, or has no forward."""
        if not isinstance(module, _LIST_CLASSES) or type(module).__name__ in self._no_split:
            return not has_forward(module)
        inner = [child for child in self._children(module) if type(child) in repeated and _has_children(child)]
        return type(module).forward is nn.Module.forward or len(inner) > 1

    def _shapes(self, module: nn.Module) -> tuple[Any, ...]:
        """Return what must be equal for two modules of a class to be blocks; nothing for classes that must not be split."""
        split = type(module).__name__ not in self._no_split
        return tuple((name, tuple(p.shape), p.dtype) for name, p in module.named_parameters() if split)

    def merged(self, blocks: list[nn.Module], limit: float) -> list[PlannedUnit]:
        """Make one unit per block, or per run of neighbours that have at most `limit` bytes together."""
        runs: list[list[nn.Module]] = []
        for block in blocks:
            last = runs[-1] if runs else []
            together = sum(map(self.nbytes, last)) + self.nbytes(block)
            if last and self._lists[last[-1]] is self._lists[block] and together <= limit:
                last.append(block)
            else:
                runs.append([block])
        kinds = Counter(type(block) for block in blocks)
        return [
            PlannedUnit(
                tuple(self._names[block] for block in run),
                f"one of {kinds[type(run[0])]} blocks" if len(run) == 1 else "small blocks, merged",
            )
            for run in runs
        ]

    # --- embeddings and heads ---

    def large_tables(self, blocks: list[nn.Module], least: float) -> list[PlannedUnit]:
        """Make units of large embeddings and heads, each head with the norm directly before it."""
        row = self._tables_and_norms(set(blocks))
        tables = [module for module in row if isinstance(module, _TABLE_CLASSES) and self._is_untied(module)]
        together = sum(map(self.nbytes, tables)) >= least
        units: list[PlannedUnit] = []
        for at, module in enumerate(row):
            size = self.nbytes(module)
            if module not in tables or not (size >= least or (together and size >= least / 4)):
                continue
            names = [self._names[module]]
            before = row[at - 1] if at and isinstance(module, nn.Linear) else None
            if before is not None and "norm" in type(before).__name__.lower() and self._is_untied(before):
                names.insert(0, self._names[before])
            units.append(PlannedUnit(tuple(names), "as large as a block" if size >= least else "large together"))
        return units

    def _tables_and_norms(self, taken: set[nn.Module]) -> list[nn.Module]:
        """Return the modules without children next to the blocks, or next to lists of blocks, in order.

        If the model declares its embeddings and heads, return only these, and other modules that are no tables (norms).
        """
        around = {module for module in self._model.modules() if not taken.isdisjoint(module.modules())}
        known = set(self._declared_tables())
        row: dict[nn.Module, None] = {}

        def visit(module: nn.Module, runs: bool) -> None:
            for child in self._children(module):
                if child in taken or isinstance(child, nn.MultiheadAttention):
                    continue
                if child in around:
                    visit(child, True)
                elif _has_children(child):
                    visit(child, runs and type(child) is nn.Sequential and not known)
                elif (runs and not known) or child in known or (runs and not isinstance(child, _TABLE_CLASSES)):
                    row[child] = None

        visit(self._model, True)
        return list(row)

    def _declared_tables(self) -> list[nn.Module]:
        """Return the embeddings and heads that models of transformers, and models inside them, declare by methods."""
        found: list[Any] = []
        for module in self._model.modules():
            for name in ("get_input_embeddings", "get_output_embeddings"):
                with suppress(AttributeError, NotImplementedError):  # no such method, or no such module
                    found.append(getattr(type(module), name)(module))
        return [table for table in found if isinstance(table, nn.Module)]

    def _is_untied(self, module: nn.Module) -> bool:
        """Return True if no parameter of `module` is registered on another module as well."""
        return all(len(self._registered_on[id(parameter)]) == 1 for parameter in module.parameters(recurse=False))


def _has_children(module: nn.Module) -> bool:
    return any(True for _ in module.children())


def _is_selected_from(module: nn.Module, name: str) -> bool:
    """Return True if `module` seems to run only a selection of its list `name`, such as experts.

    The selection differs between ranks, so the items cannot be units: ranks would all-gather different units.
    """
    beside = [*dict(module.named_children()), *dict(module.named_parameters(recurse=False))]
    return "expert" in name.lower() or any(_ROUTER_NAME.search(other) for other in beside)
