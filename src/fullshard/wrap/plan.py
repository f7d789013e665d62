"""Plan of the units of a model, as data: prints as a table and can be edited. Nothing here changes a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from torch import nn

from fullshard import _torch
from fullshard.core import KeepAfterForward, children_first
from fullshard.errors import check_int
from fullshard.frontend.module import parse_reshard_after_forward
from fullshard.policies import ZERO3, CommPolicy, GradDtype, MixedPrecisionPolicy, StateSharding, resolve_mp
from fullshard.wrap.plan_messages import PlanEntry, PlannedMessages, UnitMessages, frequencies, messages_of, thresholds
from fullshard.wrap.sizes import remarks_on_sizes
from fullshard.wrap.tables import aligned, bytes_text, span


def has_forward(module: nn.Module) -> bool:
    """Return True if a module can be called, which a container such as ModuleList cannot."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """The names and sizes of a model that planning needs.

    Modules are identified by their first qualified name; "" is the model itself. `kinds`, `children` and `own` are in
    post-order. Several modules may register one parameter (ties), so parameters are referenced by index.
    """

    kinds: dict[str, str]  # module -> name of its class
    children: dict[str, tuple[str, ...]]  # module -> its direct children
    own: dict[str, tuple[int, ...]]  # module -> indices into `parameters`, without those of its children
    parameters: tuple[PlanEntry, ...]
    uncallable: frozenset[str]  # modules without a forward: lists and dicts of modules
    first_names: dict[str, str]  # any name of a module -> its first name

    @classmethod
    def of(cls, model: nn.Module, *, ignored: Iterable[nn.Parameter] = ()) -> ModelSummary:
        """Return the names and sizes of `model`, without the `ignored` parameters."""
        left_out = {id(parameter) for parameter in ignored}
        known: dict[int, str] = {}
        index: dict[int, int] = {}
        entries: list[PlanEntry] = []
        kinds: dict[str, str] = {}
        children: dict[str, tuple[str, ...]] = {}
        own: dict[str, tuple[int, ...]] = {}
        for name, module in children_first(model):
            known[id(module)] = name
            kinds[name] = type(module).__name__
            children[name] = tuple(known[id(child)] for child in module.children())
            held = [(key, one) for key, one in module.named_parameters(recurse=False) if id(one) not in left_out]
            for key, parameter in held:
                if id(parameter) not in index:
                    index[id(parameter)] = len(entries)
                    local = _torch.local_part(parameter)  # tensor parallelism shards before fully_shard
                    entries.append(
                        PlanEntry(
                            name=f"{name}.{key}" if name else key,
                            numel=local.numel(),
                            nbytes=local.numel() * local.element_size(),
                            trainable=parameter.requires_grad,
                            shape=tuple(local.shape),
                            dtype=parameter.dtype,
                            grad_dtype=GradDtype(*_torch.grad_dtype_of(parameter)),
                        )
                    )
            own[name] = tuple(index[id(parameter)] for _, parameter in held)
        first_names = {name: known[id(module)] for name, module in model.named_modules(remove_duplicate=False)}
        uncallable = frozenset(known[id(module)] for module in model.modules() if not has_forward(module))
        return cls(kinds, children, own, tuple(entries), uncallable, first_names)

    def below(self, names: Iterable[str], *, stop: frozenset[str] = frozenset()) -> list[str]:
        """Return the modules `names` and their submodules, without entering the modules in `stop`. Each appears once."""
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
    """One future call of `fully_shard`: on these modules, with `options` in addition to the options for the whole model.

    Args:
        modules: qualified names of modules, more than one for a unit of several modules; "" is the model itself.
        why: the last column of the table that a `Plan` prints.
        options: keyword options of `fully_shard` for this unit only.

    Raises:
        ValueError: if `modules` is one string, is empty, or contains anything but strings.
    """

    modules: tuple[str, ...]
    why: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.modules, str) or not self.modules or not all(isinstance(name, str) for name in self.modules):
            raise ValueError(f"PlannedUnit expected a tuple of qualified names of modules, got {self.modules!r}.")

    @property
    def name(self) -> str:
        """The names of the modules, joined to one name.

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
    """A unit that would contain both trainable and frozen parameters."""

    unit: str  # name
    trainable: tuple[PlanEntry, ...]
    frozen: tuple[PlanEntry, ...]

    def __str__(self) -> str:
        def listed(entries: Sequence[PlanEntry]) -> str:
            numel = sum(entry.numel for entry in entries)
            names = [entry.name for entry in entries]
            more = f" and {len(names) - 8} more" if len(names) > 8 else ""
            return f"{numel:,} elements in {', '.join(names[:8])}{more}"

        return (
            f"Unit '{self.unit}' mixes parameters that are trainable ({listed(self.trainable)}) with frozen parameters "
            f"({listed(self.frozen)}). They are all-gathered in separate groups, so that frozen parameters have no gradients. "
            "This needs one more collective per all-gather. Make separate units of the frozen modules to avoid it."
        )


_SHARED_PARAMETER = "they share a parameter"


class Plan:
    """The planned units of a model, in the order in which they will be sharded: children first, the model last.

    Print it to see the parameters of each unit, and remarks on units that determine the peak memory. `add`, `drop`, `merge` and
    `set` edit it; `fullshard.shard_model(model, policy=plan)` executes it. Every parameter is in exactly one unit: the
    innermost unit around all modules that register it. Units that share a parameter, and are not nested, are merged.

    Args:
        outline: names and sizes of the model: `plan_model(model).outline`.
        units: the units; a unit of the model itself, for all other parameters, is added if it is missing.

    Raises:
        ValueError: for a module that the model does not have, that has no forward, or that is named twice, and for an entry
            that is not a `PlannedUnit`.

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
        self._held: dict[PlannedUnit, list[PlanEntry]] = {}
        chosen = list(units)
        for unit in chosen:
            if not isinstance(unit, PlannedUnit):
                raise ValueError(f"Plan expected PlannedUnits, got {unit!r}.")
        if not any("" in unit.modules for unit in chosen):
            chosen.append(PlannedUnit(("",), "what is left"))
        self._set_units(chosen)

    @property
    def units(self) -> tuple[PlannedUnit, ...]:
        """The units, in the order in which they will be sharded."""
        return tuple(self._held)

    def entries(self, unit: PlannedUnit) -> list[PlanEntry]:
        """Return the parameters that a unit will contain.

        Args:
            unit: one of `units`.

        Returns:
            An entry (qualified name, elements, bytes, trainable or not) per parameter, in the order of the model.

        Raises:
            ValueError: if the unit is not in the plan; an edit creates new units.
        """
        if unit not in self._held:
            raise ValueError(f"Unit '{unit.name}' is not in the plan (an edit creates new units). Pass one of plan.units.")
        return list(self._held[unit])

    def held(self) -> list[tuple[PlannedUnit, list[PlanEntry]]]:
        """Return every unit with the parameters that it will contain.

        Returns:
            Pairs of a unit and the result of `entries` for it, in the order of the units.

        Example:
            >>> plan = plan_model(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)))            # doctest: +SKIP
            >>> [(unit.name, len(entries)) for unit, entries in plan.held()]                  # doctest: +SKIP
            [('(model)', 4)]
        """
        return [(unit, list(entries)) for unit, entries in self._held.items()]

    # --- edits ---

    def add(self, *modules: str, why: str = "", **options: Any) -> None:
        """Add a unit of these modules, and remove them from their previous units.

        Args:
            modules: qualified names; several names make one unit.
            why: the last column of the table.
            options: keyword options of `fully_shard` for this unit only.

        Raises:
            ValueError: for no names, a name that is given twice, a module that the model does not have or that has no
                forward, or a module inside another one of them.

        Example:
            >>> plan.add("lm_head", reshard_after_forward=False)                                  # doctest: +SKIP
        """
        if not modules:
            raise ValueError("Plan.add() expected the qualified names of the modules of one unit, got none.")
        modules = tuple(map(self._resolve_name, modules))
        self._set_units([*self._without(frozenset(modules)), PlannedUnit(modules, why, options)])

    def drop(self, module: str) -> None:
        """Remove `module` from its unit: its parameters move to the unit around it.

        Args:
            module: its qualified name.

        Raises:
            ValueError: for the model itself, or a module that is in no planned unit.
        """
        if module == "":
            raise ValueError("The model itself is always a unit: no unit is around it that could take its parameters.")
        self._unit_of(module)  # raises for a module that is in no unit
        self._set_units(self._without(frozenset([self.outline.first_names[module]])))

    def merge(self, *modules: str) -> None:
        """Merge the units of these modules into one unit, with the options of the first.

        Args:
            modules: qualified names of modules in at least two units.

        Raises:
            ValueError: if the modules are in fewer than two units, or one contains another.
        """
        units = list(dict.fromkeys(map(self._unit_of, modules)))
        if len(units) < 2:
            raise ValueError(f"Plan.merge() expected modules of at least two units, got {modules}.")
        merged = replace(units[0], modules=tuple(name for unit in units for name in unit.modules), why="merged")
        self._set_units([*(unit for unit in self.units if unit not in units), merged])

    def set(self, module: str, **options: Any) -> None:
        """Change options of `fully_shard` for the unit of `module` only.

        Args:
            module: a qualified name.
            options: keyword options of `fully_shard`; other options of the unit are kept.

        Raises:
            ValueError: if the module is in no planned unit.

        Example:
            >>> plan.set("", reshard_after_forward=False)                                         # doctest: +SKIP
        """
        unit = self._unit_of(module)
        changed = replace(unit, options={**unit.options, **options})
        self._held = {changed if other is unit else other: entries for other, entries in self._held.items()}

    # --- queries ---

    def mixtures(self) -> list[Mixture]:
        """Return the units that would contain trainable and frozen parameters, which are all-gathered in separate groups.

        Returns:
            One entry per such unit; as a string, it includes the remedy.
        """
        found: list[Mixture] = []
        for unit, entries in self._held.items():
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
        reshard_after_forward: bool | int | None = None,
        states: StateSharding = ZERO3,
    ) -> PlannedMessages:
        """Return the collectives of each unit, how often they run in a step, and their memory.

        The result holds for parameters sharded along dim 0, and for backends that run collectives in order, such as nccl. On
        gloo, gradients are not reduced in slices, so the reductions are others.

        Args:
            ranks: number of ranks that parameters are sharded over, at least 1.
            mp_policy: the dtypes, see `fully_shard`; options of single units override it.
            comm_policy: only its `direct_min_bytes` matters; options of single units override it.
            reshard_after_forward: as in `fully_shard`; options of single units override it.
            states: the level of ZeRO, as in `fully_shard`; options of single units override it.

        Returns:
            Pairs of a unit's name and its `UnitMessages`; prints as a table, whose last line shows from which size on a
            parameter is direct.

        Raises:
            ValueError: if `ranks` is not a positive int, or the `reshard_after_forward` of a unit does not divide it, or
                contradicts the level of the unit.

        Example:
            >>> print(plan.messages(512))                                                         # doctest: +SKIP
        """
        check_int("ranks", ranks)
        found: list[tuple[str, UnitMessages]] = []
        for unit, entries in self._held.items():
            options = {
                "mp_policy": mp_policy,
                "comm_policy": comm_policy,
                "reshard_after_forward": reshard_after_forward,
                "states": states,
                **unit.options,
            }
            messages = messages_of(entries, ranks, resolve_mp(options["mp_policy"]), options["comm_policy"].direct_min_bytes)
            policy, _ = parse_reshard_after_forward(options["reshard_after_forward"], ranks, options["states"])
            kept = policy is KeepAfterForward.ALWAYS or (policy is KeepAfterForward.OUTERMOST and "" in unit.modules)
            found.append((unit.name, frequencies(messages, options["states"], kept_after_forward=kept)))
        return PlannedMessages(found, thresholds(ranks, comm_policy))

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("unit", "class", "parameters", "elements", "bytes", "options", "why")]
        for (facts, _), equal_units in groupby(self._held.items(), key=self._facts):
            units = [unit for unit, _ in equal_units]
            name = units[0].name if len(units) == 1 else span(units[0].name, units[-1].name)
            kind, number, numel, nbytes, options, why = facts
            times = "" if len(units) == 1 else f"{len(units)} x "
            cells = [times + cell for cell in (kind, str(number), f"{numel:,}", bytes_text(nbytes))]
            rows.append((name, *cells, options, why))
        total = self.outline.parameters
        most = max(sum(entry.nbytes for entry in entries) for entries in self._held.values())
        numel, nbytes = sum(entry.numel for entry in total), sum(entry.nbytes for entry in total)
        last = (
            f"{len(self._held)} units hold {len(total)} parameters: {numel:,} elements, {bytes_text(nbytes)}; "
            f"the largest holds {bytes_text(most)}"
        )
        *sizes, root = [(unit.name, sum(entry.numel for entry in entries)) for unit, entries in self._held.items()]
        return "\n".join([*aligned(rows, right={2, 3, 4}), last, *remarks_on_sizes([root, *sizes])])

    def __repr__(self) -> str:
        return f"Plan of {len(self._held)} units: {', '.join(unit.name for unit in self.units)}"

    def _facts(
        self, held: tuple[PlannedUnit, list[PlanEntry]]
    ) -> tuple[tuple[str, int, int, int, str, str], PlannedUnit | None]:
        """Return the cells of a unit in the table; and the unit if it has a row of its own, because it has several modules."""
        unit, entries = held
        kinds = Counter(self.outline.kinds[name] for name in unit.modules)
        kind = ", ".join(f"{count} {kind}" if count > 1 else kind for kind, count in kinds.items())
        options = ", ".join(f"{key}={_short(value)}" for key, value in unit.options.items())
        numel, nbytes = sum(entry.numel for entry in entries), sum(entry.nbytes for entry in entries)
        return (kind, len(entries), numel, nbytes, options, unit.why), unit if len(unit.modules) > 1 else None

    # --- the units of each parameter ---

    def _owners(self, units: Sequence[PlannedUnit]) -> dict[int, list[PlannedUnit]]:
        """Return, by index of the parameter, the units that reach it. Of nested ones, only the outermost is in the list.

        More than one unit remains if a parameter is tied between units that are not nested.
        """
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
        """Return True if every path from the model to `inner` passes through `outer`."""
        if outer is inner or "" in inner.modules:
            return False
        return "" in outer.modules or not set(inner.modules) & set(self.outline.below([""], stop=frozenset(outer.modules)))

    def _set_units(self, units: Sequence[PlannedUnit]) -> None:
        """Set the units, in post-order, and merge units that share a parameter."""
        place = {name: i for i, name in enumerate(self.outline.kinds)}

        def of_modules(unit: PlannedUnit, modules: Iterable[str], why: str) -> PlannedUnit:
            return replace(unit, modules=tuple(sorted(modules, key=place.__getitem__)), why=why)

        merged = [of_modules(unit, map(self._resolve_name, unit.modules), unit.why) for unit in units]
        for name, times in Counter(name for unit in merged for name in unit.modules).items():
            if times > 1:
                raise ValueError(f"Module '{name or '(model)'}' is in two planned units, or twice in one. Name it once.")
        while True:  # a merged unit may share a parameter with a further unit
            owners = self._owners(merged)
            shared = next((several for several in owners.values() if len(several) > 1), None)
            if shared is None:
                break
            one = of_modules(shared[0], [name for unit in shared for name in unit.modules], _SHARED_PARAMETER)
            merged = [unit for unit in merged if unit not in shared] + [one]
        for unit in merged:
            for name in unit.modules:
                around = next((other for other in unit.modules if other != name and name in self.outline.below([other])), None)
                if around is not None:
                    raise ValueError(
                        f"Unit '{unit.name}' cannot contain both '{name}' and '{around or '(model)'}', which is around it"
                        f"{' and shares a parameter' if unit.why == _SHARED_PARAMETER else ''}. Name only the outer one."
                    )
        merged.sort(key=lambda unit: place[unit.modules[-1]])
        self._held = {unit: [] for unit in merged}
        for index, (owner,) in sorted(owners.items()):
            self._held[owner].append(self.outline.parameters[index])

    def _without(self, modules: frozenset[str]) -> list[PlannedUnit]:
        """Return the units without these modules. Units of no other modules are left out."""
        left = [unit for unit in self.units if not modules.issuperset(unit.modules)]
        return [replace(unit, modules=tuple(name for name in unit.modules if name not in modules)) for unit in left]

    def _resolve_name(self, name: str) -> str:
        """Return the first name of a module. Raises ValueError if the module cannot be a unit."""
        if name not in self.outline.first_names:
            raise ValueError(f"The model has no module '{name}'. Use a name of its named_modules().")
        name = self.outline.first_names[name]
        if name in self.outline.uncallable:
            inside = ", ".join(f"'{child}'" for child in self.outline.children[name][:3])
            raise ValueError(
                f"Module '{name}' ({self.outline.kinds[name]}) has no forward, so it cannot be a unit. "
                f"Name the modules in it ({inside})."
            )
        return name

    def _unit_of(self, module: str) -> PlannedUnit:
        for unit in self.units:
            if self.outline.first_names.get(module) in unit.modules:
                return unit
        raise ValueError(
            f"Module '{module}' is in no planned unit. The units are {', '.join(unit.name for unit in self.units)}."
        )


def _short(value: Any) -> str:
    """Return the text of an option for the table, shortened to the type name if it is long."""
    text = str(value) if isinstance(value, StateSharding) else repr(value)
    return text if len(text) <= 40 else f"{type(value).__name__}(...)"
