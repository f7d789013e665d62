"""Choosing units without being told: repeated blocks, and what is as large beside them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

from torch import nn

from fullshard.sharding.module_tree import children_first
from fullshard.wrap.plan import PlannedUnit

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_TABLES = (nn.Linear, nn.Embedding, nn.EmbeddingBag)
_CHOICE = re.compile(r"(^|_)(router|gate|gating|selector)s?$")  # what chooses among the items of a list beside it
_MIB = 1 << 20


@dataclass(frozen=True)
class AutoPolicy:
    """Units as a practitioner would choose them.

    - **Blocks**: modules of one class that a list (ModuleList, Sequential, ModuleDict) holds two or more of with the same
      shapes; then all that lists hold of that class, and what else such a list holds. The outermost that repeat, but a list
      of blocks is none itself. Modules without parts, such as single layers, only if there are no others, or if they are
      as large.
    - What the model names in `_no_split_modules` is never split, and needs no equal shapes.
    - **Beside the blocks**, embeddings and linear heads are units if they are at least `apart` times as large as the median
      block, or all of them together are and this one is no trifle, so that they need not stay gathered as long as the model
      runs. A norm directly before a head goes with it. What shares parameters with others is left to the unit around both.
    - Blocks smaller than `tiny` times the largest are merged with their neighbours in the same list, as long as they are
      that small together, and at most `merged_bytes`: fewer messages, and no more memory.

    What is not chosen stays with the unit of the model itself. Every rank must run every unit: a list named after experts,
    or beside a router or gate, is not looked into, nor is a block. Of modules whose parameters are read without calling them
    nothing can be known: drop such units from the plan.

    Args:
        apart: of the bytes of the median block, from which on an embedding or head is a unit.
        tiny: of the bytes of the largest block, up to which blocks are merged.
        merged_bytes: bytes that merged blocks have together, at most.

    Raises:
        ValueError: for a value that is no number, or less than 0.
    """

    apart: float = 0.5
    tiny: float = 1 / 16
    merged_bytes: int = 32 * _MIB

    def __post_init__(self) -> None:
        for name in ("apart", "tiny", "merged_bytes"):
            value = getattr(self, name)
            if not (isinstance(value, (int, float)) and value >= 0):
                raise ValueError(f"AutoPolicy.{name} must be a number >= 0, got {value!r}")

    def units(
        self, model: nn.Module, *, ignored_modules: Collection[nn.Module] = (), ignored: Iterable[nn.Parameter] = ()
    ) -> list[PlannedUnit]:
        """Choose the units of a model, without the one of the model itself.

        Args:
            model: any module; it is only looked at.
            ignored_modules: modules that are not entered.
            ignored: parameters that do not count.

        Returns:
            The units: blocks, then what lies beside them. Empty if nothing repeats.
        """
        survey = _Survey(model, set(map(id, ignored_modules)), set(map(id, ignored)))
        blocks = survey.blocks(self.apart)
        if not blocks:
            return []
        limit = min(self.tiny * max(map(survey.nbytes, blocks)), self.merged_bytes)
        return [*survey.merged(blocks, limit), *survey.apart(blocks, self.apart * median(map(survey.nbytes, blocks)))]


class _Survey:
    """A model as seen by the policy."""

    def __init__(self, model: nn.Module, skipped: set[int], ignored: set[int]) -> None:
        self._model, self._skipped, self._ignored = model, skipped, ignored
        self._names: dict[int, str] = {}
        self._lists: dict[int, nn.Module] = {}  # the list that holds a module
        self._places: Counter[int] = Counter()  # in how many modules each parameter is installed
        self._whole: set[str] = set()  # classes that are not to be split
        for name, module in children_first(model):
            self._names[id(module)] = name
            self._whole.update(getattr(module, "_no_split_modules", None) or ())
            for _, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                self._places[id(parameter)] += 1
            for own, child in module.named_children():
                if isinstance(child, _LISTS) and _chosen_among(module, own):
                    self._skipped |= {id(inner) for inner in child.modules()}
            if isinstance(module, _LISTS):
                for child in module.children():
                    self._lists[id(child)] = module

    def name(self, module: nn.Module) -> str:
        return self._names[id(module)]

    def nbytes(self, module: nn.Module) -> int:
        return sum(p.numel() * p.element_size() for p in module.parameters() if id(p) not in self._ignored)

    def _children(self, module: nn.Module) -> list[nn.Module]:
        return [child for child in module.children() if id(child) not in self._skipped and self.nbytes(child)]

    # --- blocks ---

    def blocks(self, apart: float) -> list[nn.Module]:
        """The outermost repeated modules, in registration order."""
        found = self._outermost(self._repeated())
        composite = [block for block in found if _has_parts(block)]
        if composite and len(composite) < len(found):
            least = apart * median(map(self.nbytes, composite))
            found = [block for block in found if _has_parts(block) or self.nbytes(block) >= least]
        return found

    def _repeated(self) -> set[type[nn.Module]]:
        """Classes of which some list holds two of the same shapes, or two that are not to be split."""
        repeated: set[type[nn.Module]] = set()
        for module in self._model.modules():
            if isinstance(module, _LISTS) and id(module) not in self._skipped:
                children = [child for child in self._children(module) if not isinstance(child, nn.Embedding)]
                shapes = Counter((type(child), self._shapes(child)) for child in children)
                kinds = Counter(type(child) for child in children)
                repeated |= {kind for (kind, _), count in shapes.items() if count > 1}
                repeated |= {kind for kind, count in kinds.items() if count > 1 and kind.__name__ in self._whole}
        return repeated

    def _outermost(self, repeated: set[type[nn.Module]]) -> list[nn.Module]:
        found: dict[int, nn.Module] = {}

        def is_block(module: nn.Module) -> bool:
            return id(module) in self._lists and type(module) in repeated and not self._is_stage(module, repeated)

        def visit(module: nn.Module) -> None:
            children = self._children(module)
            # One of another class among blocks, an attention layer among recurrent ones say, is a block as they are.
            row = isinstance(module, nn.ModuleList) and sum(map(is_block, children)) > 1
            for child in children:
                if is_block(child) or (row and _has_parts(child) and not isinstance(child, _LISTS)):
                    found[id(child)] = child
                elif type(child).__name__ not in self._whole:
                    visit(child)

        visit(self._model)
        return list(found.values())

    def _is_stage(self, module: nn.Module, repeated: set[type[nn.Module]]) -> bool:
        """Whether a list holds blocks that have parts themselves, which are better units than all of them together."""
        if not isinstance(module, _LISTS) or type(module).__name__ in self._whole:
            return False
        inner = [child for child in self._children(module) if type(child) in repeated and _has_parts(child)]
        return type(module).forward is nn.Module.forward or len(inner) > 1

    @staticmethod
    def _shapes(module: nn.Module) -> tuple[Any, ...]:
        return tuple((name, tuple(p.shape), p.dtype) for name, p in module.named_parameters())

    def merged(self, blocks: list[nn.Module], limit: float) -> list[PlannedUnit]:
        """One unit per block, or per run of neighbours that have at most `limit` bytes together."""
        runs: list[list[nn.Module]] = []
        for block in blocks:
            last = runs[-1] if runs else []
            together = sum(map(self.nbytes, last)) + self.nbytes(block)
            if last and self._lists[id(last[-1])] is self._lists[id(block)] and together <= limit:
                last.append(block)
            else:
                runs.append([block])
        kinds = Counter(type(block) for block in blocks)
        return [
            PlannedUnit(
                tuple(map(self.name, run)),
                f"one of {kinds[type(run[0])]} blocks" if len(run) == 1 else "small blocks, merged",
            )
            for run in runs
        ]

    # --- beside the blocks ---

    def apart(self, blocks: list[nn.Module], least: float) -> list[PlannedUnit]:
        """Embeddings and heads that are better not left to the model itself, each with the norm before it."""
        row = self._beside({id(block) for block in blocks})
        tables = [module for module in row if isinstance(module, _TABLES) and self._is_alone(module)]
        together = sum(map(self.nbytes, tables)) >= least
        units: list[PlannedUnit] = []
        for at, module in enumerate(row):
            size = self.nbytes(module)
            if module not in tables or not (size >= least or (together and size >= least / 4)):
                continue
            before = row[at - 1] if at and isinstance(module, nn.Linear) else None
            along = before is not None and "norm" in type(before).__name__.lower() and self._is_alone(before)
            names = (*((self.name(before),) if before is not None and along else ()), self.name(module))
            units.append(PlannedUnit(names, "as large as a block" if size >= least else "large together"))
        return units

    def _beside(self, taken: set[int]) -> list[nn.Module]:
        """The modules without parts directly beside the blocks or lists of them, in order.

        Of a model that knows its embeddings and heads, these alone, and norms.
        """
        around = {id(m) for m in self._model.modules() if any(id(inner) in taken for inner in m.modules())}
        known = {id(table) for table in self._tables_told()}
        row: dict[int, nn.Module] = {}

        def visit(module: nn.Module, runs: bool) -> None:
            for child in self._children(module):
                if id(child) in taken or isinstance(child, nn.MultiheadAttention):
                    continue
                if id(child) in around:
                    visit(child, True)
                elif _has_parts(child):
                    visit(child, runs and type(child) is nn.Sequential and not known)
                elif (runs and not known) or id(child) in known or (runs and not isinstance(child, _TABLES)):
                    row[id(child)] = child

        visit(self._model, True)
        return list(row.values())

    def _tables_told(self) -> list[nn.Module]:
        """What models of transformers, and the models inside them, say are their embeddings and heads."""
        found: list[nn.Module] = []
        for module in self._model.modules():
            for name in ("get_input_embeddings", "get_output_embeddings"):
                ask = getattr(type(module), name, None)
                if ask is not None:
                    try:
                        table = ask(module)
                    except (AttributeError, NotImplementedError):  # it has none after all
                        continue
                    if isinstance(table, nn.Module):
                        found.append(table)
        return found

    def _is_alone(self, module: nn.Module) -> bool:
        """Whether no parameter of it is installed outside of it as well."""
        inside = Counter(id(p) for _, p in module.named_parameters(recurse=False, remove_duplicate=False))
        return all(self._places[key] == count for key, count in inside.items())


def _has_parts(module: nn.Module) -> bool:
    return any(True for _ in module.children())


def _chosen_among(module: nn.Module, name: str) -> bool:
    """Whether `module` seems to run only some of the items of its list `name`, which then differ from rank to rank."""
    beside = [*dict(module.named_children()), *dict(module.named_parameters(recurse=False))]
    return "expert" in name.lower() or any(_CHOICE.search(other) for other in beside)


__all__ = ["AutoPolicy"]
