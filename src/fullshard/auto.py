"""Choosing units without being told: repeated blocks, and what is as large beside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

from torch import nn

from fullshard.modules import children_first
from fullshard.plan import PlannedUnit

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True)
class AutoPolicy:
    """Units as a practitioner would choose them.

    - **Blocks**: modules of one class that a list (ModuleList, Sequential, ModuleDict) holds two or more of with the same
      shapes; then all that lists hold of that class. The outermost that repeat, but a list of blocks is none itself.
    - What the model names in `_no_split_modules` is never split, and needs no equal shapes.
    - **Beside the blocks**, a module at least `apart` times as large as the median block is a unit, so that it need not stay
      gathered as long as the model runs: embeddings and heads. Small neighbours with no parameter elsewhere (a norm before
      the head) go with it. Modules that share parameters with others are left to the unit around both.
    - Blocks smaller than `tiny` times the largest are merged with their neighbours in the same list, as long as they are
      that small together: fewer messages, and no more memory.

    What is not chosen stays with the unit of the model itself. A block inside a block is not looked for: experts of a
    mixture do not run on every rank, and units must.
    """

    apart: float = 0.5
    tiny: float = 1 / 16

    def __post_init__(self) -> None:
        for name in ("apart", "tiny"):
            value = getattr(self, name)
            if not (isinstance(value, (int, float)) and value >= 0):
                raise ValueError(f"AutoPolicy.{name} must be a number >= 0, got {value!r}")

    def units(
        self, model: nn.Module, *, ignored_modules: Collection[nn.Module] = (), ignored: Iterable[nn.Parameter] = ()
    ) -> list[PlannedUnit]:
        """The units of `model`, without the one of the model itself."""
        survey = _Survey(model, set(map(id, ignored_modules)), set(map(id, ignored)))
        blocks = survey.blocks()
        typical = median(map(survey.nbytes, blocks)) if blocks else 0
        apart = survey.apart(blocks, max(1.0, self.apart * typical)) if blocks else []
        limit = self.tiny * max((survey.nbytes(block) for block in blocks), default=0)
        return [*survey.merged(blocks, limit), *apart]


class _Survey:
    """A model as seen by the policy."""

    def __init__(self, model: nn.Module, skipped: set[int], ignored: set[int]) -> None:
        self._model, self._skipped, self._ignored = model, skipped, ignored
        self._names: dict[int, str] = {}
        self._lists: dict[int, nn.Module] = {}  # the list that holds a module
        self._places: Counter[int] = Counter()  # in how many modules each parameter is installed
        self._tops: set[str] = set()
        for name, module in children_first(model):
            self._names[id(module)] = name
            self._tops.update(getattr(module, "_no_split_modules", None) or ())
            for _, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                self._places[id(parameter)] += 1
            if isinstance(module, _LISTS):
                for child in module.children():
                    self._lists[id(child)] = module

    def name(self, module: nn.Module) -> str:
        return self._names[id(module)]

    def nbytes(self, module: nn.Module) -> int:
        return sum(p.numel() * p.element_size() for p in module.parameters() if id(p) not in self._ignored)

    def _children(self, module: nn.Module) -> list[nn.Module]:
        return [child for child in module.children() if id(child) not in self._skipped and self.nbytes(child)]

    def blocks(self) -> list[nn.Module]:
        """The outermost repeated modules, in registration order."""
        repeated = self._repeated()
        found: dict[int, nn.Module] = {}

        def visit(module: nn.Module) -> None:
            for child in self._children(module):
                kind = type(child)
                if id(child) in self._lists and kind in repeated and not self._is_stage(child, repeated):
                    found[id(child)] = child
                elif kind.__name__ not in self._tops:
                    visit(child)

        visit(self._model)
        return list(found.values())

    def _repeated(self) -> set[type[nn.Module]]:
        repeated: set[type[nn.Module]] = set()
        for module in self._model.modules():
            if isinstance(module, _LISTS) and id(module) not in self._skipped:
                alike = Counter((type(child), self._shapes(child)) for child in self._children(module))
                repeated |= {kind for (kind, _), count in alike.items() if count > 1}
                kinds = Counter(type(child) for child in self._children(module))
                repeated |= {kind for kind, count in kinds.items() if count > 1 and kind.__name__ in self._tops}
        return repeated

    def _is_stage(self, module: nn.Module, repeated: set[type[nn.Module]]) -> bool:
        """Whether a list holds blocks that have parts themselves, which are better units than all of them together."""
        if not isinstance(module, _LISTS) or type(module).__name__ in self._tops:
            return False
        inner = [child for child in self._children(module) if type(child) in repeated and any(True for _ in child.children())]
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
        """Modules beside the blocks with at least `least` bytes, and their small neighbours."""
        taken = {id(block) for block in blocks}
        around = {id(m) for m in self._model.modules() if any(id(inner) in taken for inner in m.modules())}
        row: list[tuple[nn.Module, bool]] = []  # what lies beside the blocks, in order, and whether it is large
        seen: set[int] = set()

        def visit(module: nn.Module) -> None:
            for child in self._children(module):
                if id(child) in seen:
                    continue
                seen.add(id(child))
                if id(child) in taken:
                    row.append((child, False))
                elif id(child) in around or not self._is_alone(child) or self._splits(child, least):
                    visit(child)
                else:
                    row.append((child, self.nbytes(child) >= least))

        visit(self._model)
        units: list[PlannedUnit] = []
        at = 0
        while at < len(row):
            if not row[at][1]:
                at += 1
                continue
            first = last = at
            while first > 0 and self._goes_along(row[first - 1], taken):
                first -= 1
            while last + 1 < len(row) and self._goes_along(row[last + 1], taken):
                last += 1
            taken |= {id(module) for module, _ in row[first : last + 1]}
            units.append(PlannedUnit(tuple(self.name(module) for module, _ in row[first : last + 1]), "as large as a block"))
            at = last + 1
        return units

    @staticmethod
    def _goes_along(entry: tuple[nn.Module, bool], taken: set[int]) -> bool:
        """Small modules without parts, whose parameters nobody else can be reading while they run."""
        module, large = entry
        return not large and id(module) not in taken and not any(True for _ in module.children())

    def _splits(self, module: nn.Module, least: float) -> bool:
        """Whether a Sequential of several large modules is better taken apart."""
        if not isinstance(module, nn.Sequential) or type(module).__name__ in self._tops:
            return False
        return sum(self.nbytes(child) >= least for child in self._children(module)) > 1

    def _is_alone(self, module: nn.Module) -> bool:
        """Whether it has a forward, and no parameter that is installed outside of it as well."""
        inside: Counter[int] = Counter()
        for inner in module.modules():
            for _, parameter in inner.named_parameters(recurse=False, remove_duplicate=False):
                inside[id(parameter)] += 1
        callable_ = type(module).forward is not nn.Module.forward
        return callable_ and all(self._places[key] == count for key, count in inside.items())


__all__ = ["AutoPolicy"]
