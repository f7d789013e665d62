"""Which modules become units, as data: what each will hold, a table of it, and edits. Nothing here touches a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from fullshard import _torch
from fullshard.policies import CommPolicy, GradDtype, MixedPrecisionPolicy
from fullshard.sharding.module_tree import children_first
from fullshard.wrap.plan_messages import PlanEntry, PlannedMessages, UnitMessages, messages_of, thresholds
from fullshard.wrap.tables import aligned, bytes_text, span


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """The names and sizes of a model, which planning needs. module 1 - n modules; module n - n parameters (ties).

    Modules are known by their first qualified name, "" is the model itself; all in post-order.
    """

    kinds: dict[str, str]  # class of each module
    children: dict[str, tuple[str, ...]]
    own: dict[str, tuple[int, ...]]  # indices into `parameters`
    parameters: tuple[PlanEntry, ...]
    uncallable: frozenset[str]  # lists and dicts of modules, which have no forward
    aliases: dict[str, str]  # further names of modules that have several, and their first

    @classmethod
    def of(cls, model: nn.Module, *, ignored: Iterable[nn.Parameter] = ()) -> ModelSummary:
        """The names and sizes of `model`; `ignored` parameters are in none of its modules."""
        left_out = {id(parameter) for parameter in ignored}
        known: dict[int, str] = {}
        index: dict[int, int] = {}
        entries: list[PlanEntry] = []
        kinds: dict[str, str] = {}
        children: dict[str, tuple[str, ...]] = {}
        own: dict[str, tuple[int, ...]] = {}
        uncallable: set[str] = set()
        for name, module in children_first(model):
            known[id(module)] = name
            kinds[name] = type(module).__name__
            children[name] = tuple(dict.fromkeys(known[id(child)] for child in module.children()))
            held: list[int] = []
            for key, parameter in module.named_parameters(recurse=False):
                if id(parameter) in left_out:
                    continue
                if id(parameter) not in index:
                    index[id(parameter)] = len(entries)
                    local = _torch.local_part(parameter)  # of tensor parallelism, which cuts before
                    nbytes = local.numel() * local.element_size()
                    full_name = f"{name}.{key}" if name else key
                    entries.append(
                        PlanEntry(
                            full_name,
                            local.numel(),
                            nbytes,
                            parameter.requires_grad,
                            tuple(local.shape),
                            parameter.dtype,
                            GradDtype(*_torch.grad_dtype_of(parameter)),
                        )
                    )
                held.append(index[id(parameter)])
            own[name] = tuple(dict.fromkeys(held))
            if type(module).forward is nn.Module.forward and "forward" not in vars(module):
                uncallable.add(name)
        several = ((name, known[id(module)]) for name, module in model.named_modules(remove_duplicate=False))
        aliases = {name: first for name, first in several if name != first}
        return cls(kinds, children, own, tuple(entries), frozenset(uncallable), aliases)

    def below(self, names: Iterable[str], *, stop: frozenset[str] = frozenset()) -> list[str]:
        """The modules `names` and those below them, without entering `stop`; each once."""
        found: dict[str, None] = {}
        waiting = list(names)
        while waiting:
            name = waiting.pop()
            if name not in found:
                found[name] = None
                waiting.extend(child for child in self.children[name] if child not in stop)
        return list(found)


@dataclass(frozen=True, slots=True, eq=False)
class PlannedUnit:
    """One call of `fully_shard` that is to be made: on these modules, with `options` beside those of the whole model.

    Args:
        modules: qualified names of modules, more than one for a unit of a list of modules; "" is the model itself.
        why: the last column of the table that a `Plan` prints.
        options: keyword options of `fully_shard` for this unit alone.

    Raises:
        ValueError: if `modules` is one string, is empty, or holds anything but strings.
    """

    modules: tuple[str, ...]  # qualified names, more than one for a list unit
    why: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.modules, str) or not self.modules or not all(isinstance(name, str) for name in self.modules):
            raise ValueError(f"PlannedUnit takes a tuple of qualified names of modules, got {self.modules!r}")

    @property
    def name(self) -> str:
        """The names of the modules as one.

        >>> PlannedUnit(("blocks.0", "blocks.1")).name
        'blocks.{0,1}'
        """
        parts = [name.split(".") for name in self.modules]
        same = 0
        while all(len(part) > same + 1 and part[same] == parts[0][same] for part in parts):
            same += 1
        if len(parts) == 1 or not same:
            return "+".join(name or "(model)" for name in self.modules)
        return f"{'.'.join(parts[0][:same])}.{{{','.join('.'.join(part[same:]) for part in parts)}}}"


@dataclass(frozen=True, slots=True)
class Mixture:
    """A unit that would hold trainable and frozen parameters."""

    unit: str
    trainable: tuple[PlanEntry, ...]
    frozen: tuple[PlanEntry, ...]

    def __str__(self) -> str:
        def listed(entries: Sequence[PlanEntry]) -> str:
            numel = sum(entry.numel for entry in entries)
            names = [entry.name for entry in entries]
            more = f" and {len(names) - 8} more" if len(names) > 8 else ""
            return f"{numel:,} elements in {', '.join(names[:8])}{more}"

        return (
            f"unit '{self.unit}' mixes parameters that are trainable ({listed(self.trainable)}) with frozen ones "
            f"({listed(self.frozen)}): they travel in groups of their own, so that frozen ones have no gradients, at one more "
            "message per gather; make units of the frozen modules alone to save it"
        )


_SHARED = "they share a parameter"


class Plan:
    """The units of a model, in the order they are to be made: children first, the model last. plan 1 - n planned units.

    Print it to see what each will hold. `add`, `drop`, `merge` and `set` edit it; `fullshard.shard_model(model, policy=plan)`
    carries it out. Every parameter is in exactly one unit: the innermost around all modules that hold it. Units that share
    a parameter, neither around the other, become one.

    Args:
        outline: names and sizes of the model, as `plan_model(model).outline` has them.
        units: the units to be made; one of the model itself, for what is left, is added if it is missing.

    Raises:
        ValueError: for a module that the model does not have, that has no forward, or that is named twice, and for what is
            no `PlannedUnit`.

    Example:
        >>> plan = Plan(ModelSummary.of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))), [PlannedUnit(("0",))])
        >>> plan.add("1", why="by hand")
        >>> print(plan)
        unit     class       parameters  elements  bytes  options  why
        0        Linear               2         6   24 B
        1        Linear               2         6   24 B           by hand
        (model)  Sequential           0         0    0 B           what is left
        3 units hold 4 parameters: 12 elements, 48 B; the largest holds 24 B
    """

    def __init__(self, outline: ModelSummary, units: Iterable[PlannedUnit]) -> None:
        self.outline = outline
        self._units: list[PlannedUnit] = []
        chosen = list(units)
        for unit in chosen:
            if not isinstance(unit, PlannedUnit):
                raise ValueError(f"a Plan takes PlannedUnits, got {unit!r}")
        if not any("" in unit.modules for unit in chosen):
            chosen.append(PlannedUnit(("",), "what is left"))
        self._set_units(chosen)

    @property
    def units(self) -> tuple[PlannedUnit, ...]:
        """The units to be made, in that order."""
        return tuple(self._units)

    def entries(self, unit: PlannedUnit) -> list[PlanEntry]:
        """The parameters that a unit will hold.

        Args:
            unit: one of `units`.

        Returns:
            An entry (qualified name, elements, bytes, trainable or not) for each, in the order of the model.

        Raises:
            ValueError: if the unit is not in the plan; an edit makes new units.
        """
        if unit not in self._units:
            raise ValueError(f"unit '{unit.name}' is not in the plan (an edit makes new units): take one of plan.units")
        owners = self._owners(self._units)
        return [entry for i, entry in enumerate(self.outline.parameters) if owners.get(i) == [unit]]

    def held(self) -> list[tuple[PlannedUnit, list[PlanEntry]]]:
        """Every unit with the parameters that it will hold.

        Returns:
            A pair of each unit and its entries, as `entries` has them, in the order of the units.

        Example:
            >>> plan = plan_model(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)))            # doctest: +SKIP
            >>> [(unit.name, len(entries)) for unit, entries in plan.held()]                  # doctest: +SKIP
            [('(model)', 4)]
        """
        owners = self._owners(self._units)
        found: dict[int, list[PlanEntry]] = {id(unit): [] for unit in self._units}
        for index, entry in enumerate(self.outline.parameters):
            for unit in owners.get(index, ()):
                found[id(unit)].append(entry)
        return [(unit, found[id(unit)]) for unit in self._units]

    # --- edits ---

    def add(self, *modules: str, why: str = "", **options: Any) -> None:
        """Make one more unit, of these modules. They leave the units that they were in.

        Args:
            modules: qualified names; several make one unit.
            why: the last column of the table.
            options: keyword options of `fully_shard` for this unit alone.

        Raises:
            ValueError: for no names, a name that is given twice, a module that the model does not have or that has no
                forward, or one inside another of them.

        Example:
            >>> plan.add("lm_head", reshard_after_forward=False)                                  # doctest: +SKIP
        """
        if not modules:
            raise ValueError("Plan.add takes the qualified names of the modules of one unit, got none")
        modules = tuple(map(self._named, modules))
        gone = set(modules)
        left = [unit for unit in self._units if not gone.issuperset(unit.modules)]
        kept = [replace(unit, modules=tuple(name for name in unit.modules if name not in gone)) for unit in left]
        self._set_units([*kept, PlannedUnit(modules, why, options)])

    def drop(self, module: str) -> None:
        """Make no unit of `module`: what it holds goes to the unit around it.

        Args:
            module: its qualified name.

        Raises:
            ValueError: for the model itself, or a module that is in no planned unit.
        """
        module = self.outline.aliases.get(module, module)
        if module == "":
            raise ValueError("the model itself is always a unit: it has no unit around it to hold what is left")
        unit = self._unit_of(module)
        left = tuple(name for name in unit.modules if name != module)
        others = [other for other in self._units if other is not unit]
        self._set_units([*others, replace(unit, modules=left)] if left else others)

    def merge(self, *modules: str) -> None:
        """Make one unit of the units of these modules, with the options of the first.

        Args:
            modules: qualified names, of modules in at least two units.

        Raises:
            ValueError: if they are in fewer than two units, or one is around another.
        """
        units = list(dict.fromkeys(map(self._unit_of, modules)))
        if len(units) < 2:
            raise ValueError(f"Plan.merge takes modules of at least two units, got {modules}")
        merged = replace(units[0], modules=tuple(name for unit in units for name in unit.modules), why="merged")
        self._set_units([*(unit for unit in self._units if unit not in units), merged])

    def set(self, module: str, **options: Any) -> None:
        """Change options of `fully_shard` for the unit of `module` alone.

        Args:
            module: a qualified name.
            options: keyword options of `fully_shard`; the others that the unit has stay.

        Raises:
            ValueError: if the module is in no planned unit.

        Example:
            >>> plan.set("", reshard_after_forward=False)                                         # doctest: +SKIP
        """
        unit = self._unit_of(module)
        changed = replace(unit, options={**unit.options, **options})
        self._units = [changed if other is unit else other for other in self._units]

    # --- looking ---

    def mixtures(self) -> list[Mixture]:
        """Units that would hold trainable and frozen parameters, which travel in groups of their own.

        Returns:
            One entry per such unit; its text says what to do.
        """
        found: list[Mixture] = []
        for unit, entries in self.held():
            trainable = tuple(entry for entry in entries if entry.trainable)
            frozen = tuple(entry for entry in entries if not entry.trainable)
            if trainable and frozen:
                found.append(Mixture(unit.name, trainable, frozen))
        return found

    def messages(
        self,
        ranks: int,
        *,
        mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
        comm_policy: CommPolicy = CommPolicy(),
    ) -> PlannedMessages:
        """The messages of each unit on so many ranks, and what they need in memory, by the layouts that training uses.

        Of parameters cut along dim 0, on nccl (or another backend whose collectives run in order; gloo does not slice).

        Args:
            ranks: over how many ranks parameters are cut, at least 1.
            mp_policy: the dtypes, as `fully_shard` takes them; options of single units go before these.
            comm_policy: the same, of which `direct_min_bytes` counts.

        Returns:
            Pairs of a unit's name and its `UnitMessages`; prints as a table, in whose last line the thresholds are.

        Raises:
            ValueError: if `ranks` is no positive int.

        Example:
            >>> print(plan.messages(512))                                                         # doctest: +SKIP
        """
        if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
            raise ValueError(f"Plan.messages takes the number of ranks, an int of at least 1, got {ranks!r}")
        found: list[tuple[str, UnitMessages]] = []
        for unit, entries in self.held():
            options = {"mp_policy": mp_policy, "comm_policy": comm_policy, **unit.options}
            told = options["comm_policy"].direct_min_bytes
            found.append((unit.name, messages_of(entries, ranks, options["mp_policy"], told)))
        return PlannedMessages(found, thresholds(ranks, comm_policy))

    def __str__(self) -> str:
        rows = [("unit", "class", "parameters", "elements", "bytes", "options", "why")]
        held = self.held()
        at = 0
        while at < len(held):
            unit, entries = held[at]
            facts = self._facts(unit, entries)
            alike = at
            while len(unit.modules) == 1 and alike + 1 < len(held) and self._facts(*held[alike + 1]) == facts:
                alike += 1
            count = alike - at + 1
            name = unit.name if count == 1 else span(unit.name, held[alike][0].name)
            times = "" if count == 1 else f"{count} x "
            kind, number, numel, nbytes, options, why = facts
            cells = [times + cell for cell in (kind, str(number), f"{numel:,}", bytes_text(nbytes))]
            rows.append((name, cells[0], cells[1], cells[2], cells[3], options, why))
            at = alike + 1
        total = self.outline.parameters
        most = max(sum(entry.nbytes for entry in entries) for _, entries in held)
        numel, nbytes = sum(entry.numel for entry in total), sum(entry.nbytes for entry in total)
        last = (
            f"{len(held)} units hold {len(total)} parameters: {numel:,} elements, {bytes_text(nbytes)}; "
            f"the largest holds {bytes_text(most)}"
        )
        return "\n".join([*aligned(rows, right={2, 3, 4}), last])

    def __repr__(self) -> str:
        return f"Plan of {len(self._units)} units: {', '.join(unit.name for unit in self._units)}"

    def _facts(self, unit: PlannedUnit, entries: Sequence[PlanEntry]) -> tuple[str, int, int, int, str, str]:
        kinds = Counter(self.outline.kinds[name] for name in unit.modules)
        kind = ", ".join(f"{count} {kind}" if count > 1 else kind for kind, count in kinds.items())
        options = ", ".join(f"{key}={_short(value)}" for key, value in unit.options.items())
        return kind, len(entries), sum(e.numel for e in entries), sum(e.nbytes for e in entries), options, unit.why

    # --- the units of each parameter ---

    def _owners(self, units: Sequence[PlannedUnit]) -> dict[int, list[PlannedUnit]]:
        """The units that find each parameter, by its index, without those inside another that does."""
        stops = frozenset(name for unit in units for name in unit.modules)
        found: dict[int, list[PlannedUnit]] = {}
        for unit in units:
            for name in self.outline.below(unit.modules, stop=stops - set(unit.modules)):
                for index in self.outline.own[name]:
                    if unit not in found.setdefault(index, []):
                        found[index].append(unit)
        for index, several in found.items():
            if len(several) > 1:
                found[index] = [one for one in several if not any(self._encloses(other, one) for other in several)]
        return found

    def _encloses(self, outer: PlannedUnit, inner: PlannedUnit) -> bool:
        """Whether there is no way to `inner` but through `outer`."""
        if outer is inner or "" in inner.modules:
            return False
        return "" in outer.modules or not set(inner.modules) & set(self.outline.below([""], stop=frozenset(outer.modules)))

    def _set_units(self, units: Sequence[PlannedUnit]) -> None:
        """Take these units, in post-order; those that share a parameter become one."""
        merged = [replace(unit, modules=tuple(map(self._named, unit.modules))) for unit in units]
        seen: set[str] = set()
        for name in (name for unit in merged for name in unit.modules):
            if name in seen:
                raise ValueError(f"module '{name or '(model)'}' is in two planned units, or twice in one: name it once")
            seen.add(name)
        while True:
            shared = next((several for several in self._owners(merged).values() if len(several) > 1), None)
            if shared is None:
                break
            one = replace(shared[0], modules=tuple(name for unit in shared for name in unit.modules), why=_SHARED)
            merged = [unit for unit in merged if unit not in shared] + [one]
        for unit in merged:
            for name in unit.modules:
                around = next((other for other in unit.modules if other != name and name in self.outline.below([other])), None)
                if around is not None:
                    raise ValueError(
                        f"unit '{unit.name}' would hold '{name}' and '{around or '(model)'}', which is around it"
                        f"{' and shares a parameter' if unit.why == _SHARED else ''}: name the outer one alone"
                    )
        place = {name: i for i, name in enumerate(self.outline.kinds)}
        ordered = [replace(unit, modules=tuple(sorted(unit.modules, key=place.__getitem__))) for unit in merged]
        self._units = sorted(ordered, key=lambda unit: max(place[name] for name in unit.modules))

    def _named(self, name: str) -> str:
        """The first name of a module. Raises ValueError if it cannot be a unit."""
        name = self.outline.aliases.get(name, name)
        if name not in self.outline.kinds:
            raise ValueError(f"the model has no module '{name}': take one of its named_modules()")
        if name in self.outline.uncallable:
            inside = ", ".join(f"'{child}'" for child in self.outline.children[name][:3])
            raise ValueError(
                f"module '{name}' ({self.outline.kinds[name]}) has no forward, so it cannot be a unit: "
                f"name what is in it ({inside})"
            )
        return name

    def _unit_of(self, module: str) -> PlannedUnit:
        module = self.outline.aliases.get(module, module)
        for unit in self._units:
            if module in unit.modules:
                return unit
        raise ValueError(f"module '{module}' is in no planned unit; there are {', '.join(unit.name for unit in self._units)}")


def _short(value: Any) -> str:
    """An option in a table: of policies only what was said."""
    text = repr(value)
    return text if len(text) <= 40 else f"{type(value).__name__}(...)"


__all__ = ["Mixture", "ModelSummary", "Plan", "PlanEntry", "PlannedUnit"]
