"""Settings of a search, and lower bounds of the seconds and bytes of each setting.

Bounds need no simulation, so with bounds a search can rule out thousands of settings.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor

from fullshard import _torch
from fullshard.core import Message
from fullshard.errors import check_int
from fullshard.foresight.clock import message_seconds, op_seconds
from fullshard.foresight.explanation import Explanation, explain_with
from fullshard.foresight.group import GroupPlan
from fullshard.foresight.hardware import Gpu, Network, network_of
from fullshard.foresight.program import Mesh
from fullshard.foresight.question import ExplainArguments
from fullshard.foresight.setup import TracedModel, batch_size_of, setting_of, tensors_of
from fullshard.foresight.simulate import Setting, group_plans, options_of
from fullshard.foresight.trace import Allocated, Op
from fullshard.policies import PRESETS, CPUOffloadPolicy
from fullshard.wrap.plan import Plan

Changes = Mapping[str, Any]
"""Values by names of `explain`'s arguments; "rows" is the number of rows of one microbatch."""

Axis = Sequence[Changes]
"""Alternatives for one argument. The first is {}, the value that the caller passed."""

QUICK_SECONDS = 0.3
"""Time limit of the first explanation. Below it, the model is traced again for each batch size and `recompute`, which gives
tighter bounds."""

LARGEST_VALUES = 1 << 22
"""Largest number of elements of a batch tensor that keeps its values when the rows change; larger ones move to meta."""


def axes_of(base: Explanation, over: Mapping[str, Sequence[Any]] | None) -> list[list[Changes]]:
    """Return one axis for each argument in `over`, or the default axes if it is None."""
    defaults = _default_values(base)
    axes: list[list[Changes]] = []
    for name, values in (defaults if over is None else over).items():
        if name not in defaults:
            raise ValueError(
                f"over must have names out of {', '.join(defaults)}, got {name!r}, which a search does not change. Search once "
                "for each value of another argument."
            )
        if isinstance(values, str) or not isinstance(values, Sequence) or not (values or over is None):
            raise ValueError(f"over[{name!r}] must be a sequence of values to try, got {values!r}.")
        for value in values if name == "microbatches" else ():
            check_int("microbatches", value)
        requested = getattr(base.traced.arguments, name)
        # The types as well: for `reshard_after_forward`, True and 1 are different settings, but equal.
        others = [value for value in values if type(value) is not type(requested) or value != requested]
        axes.append([{}, *({name: value} for value in others)])
    return axes


def _default_values(base: Explanation) -> dict[str, Sequence[Any]]:
    """Return the values to try, by the names of all arguments that a search may change. Requested ones may be among them.

    The bounds below hold for these arguments. The goals also change `world` and the rows.
    """
    arguments, setting, per_node = base.traced.arguments, base.setting, base.gpu.per_node
    world, ranks, comm, mp = arguments.world, setting.ranks, setting.comm_policy, setting.mp_policy
    narrower = mp.param_dtype is not None and mp.resolve(torch.float32).reduce != mp.param_dtype
    # Hybrid meshes (replicas, ranks of a shard group) whose shard groups have 1, 2, 4 or 8 whole machines.
    sizes = [per_node << doubled for doubled in range(world.bit_length())] if arguments.mesh is None else []
    return {
        "recompute": ("none", "block", "every:2", "selective") if base.traced.blocks else (),
        "microbatches": [parts for parts in (2, 4, 8) if arguments.microbatches == 1 and base.traced.rows % parts == 0],
        "accumulate": (True, False),
        "reshard_after_forward": (True, False, *([per_node] if ranks > per_node and ranks % per_node == 0 else [])),
        "states": () if arguments.reshard_after_forward or setting.engine == "fsdp2" else tuple(PRESETS.values()),
        "mesh": [(world // size, size) for size in sizes if size < world and world % size == 0][:4],
        "mp_policy": [replace(mp, reduce_dtype=mp.param_dtype)] if narrower else [],
        "comm_policy": [replace(comm, reductions_in_flight=comm.reductions_in_flight + 1), replace(comm, prefetch_bytes=0)],
        "offload_policy": [] if base.gpu.synchronous or _offloads(arguments) else [CPUOffloadPolicy()],
        "plan": _merged_plans(base),
    }


def settings(axes: Sequence[Axis], arguments: ExplainArguments) -> Iterator[dict[str, Any]]:
    """Yield all combinations of the axes, except for those that are equal to others or contradict themselves.

    A single microbatch has nothing to accumulate, and `ZERO1` accumulates in any case: with a single one it is `ZERO2`, and is
    left out if that is among the settings. `ZERO1` and `ZERO2` never reshard. `HFSDP` needs a hybrid mesh.
    """
    known = [arguments.states, *(change["states"] for axis in axes for change in axis if "states" in change)]
    for chosen in product(*axes):
        changes = {name: value for change in chosen for name, value in change.items()}
        states = changes.get("states", arguments.states)
        single = changes.get("microbatches", arguments.microbatches) == 1
        if "accumulate" in changes and (single or states.keeps_gradients):
            continue
        if states.keeps_gradients and single and "states" in changes and replace(states, gradients=states.optimizer) in known:
            continue
        if states.keeps_parameters and changes.get("reshard_after_forward") is not None:
            continue
        mesh = changes.get("mesh", arguments.mesh)
        if states.shards_over_replicas and (mesh is None or isinstance(mesh, int) or len(mesh) != 2):
            continue
        yield changes


def _offloads(arguments: ExplainArguments) -> bool:
    return isinstance(arguments.offload_policy, CPUOffloadPolicy)


def _merged_plans(r: Explanation) -> list[Plan]:
    """Return the plan with adjacent blocks merged in pairs, if there are at least four blocks."""
    blocks = [unit.modules[0] for unit in r.plan.units if len(unit.modules) == 1 and unit.modules[0] in r.traced.blocks]
    if len(blocks) < 4:
        return []
    plan = Plan(r.plan.outline, r.plan.units)
    for first, second in zip(blocks[::2], blocks[1::2]):
        plan.merge(first, second)
    return [plan]


@dataclass(frozen=True, slots=True)
class Bound:
    """Lower bounds of one step."""

    seconds: float  # seconds of all microbatches
    nbytes: int  # bytes of device memory
    pinned: int  # bytes of pinned host memory
    # True if the setting's own batch and recomputation were traced. If not, the bound is looser: it omits activations, and
    # takes the seconds of the requested batch.
    traced: bool


class Variants:
    """Explanations and bounds for variants of the arguments; the model is traced once for each batch and each `recompute`."""

    def __init__(self, arguments: ExplainArguments) -> None:
        self.arguments = arguments
        self._batch = tensors_of(arguments.batch)
        self.rows = batch_size_of(self._batch)[0]
        self._batches = {self.rows: self._batch}  # by number of rows
        self._traced: dict[object, TracedModel] = {}  # by (id of the batch, `recompute`)
        self._compute_cost = cache(_compute_cost)
        self._state_costs: dict[object, _StateCost] = {}  # by the arguments that it depends on
        self.quick: bool | None = None  # True if the first explanation took less than QUICK_SECONDS
        self.skipped: list[tuple[Changes, str]] = []  # (changes that `explain` does not accept, reason)

    def rows_of(self, changes: Changes) -> int:
        """Return the rows of one microbatch.

        The rows of the requested microbatches are divided among the new number of microbatches, unless the changes contain
        "rows" or "world".
        """
        if "rows" in changes or "world" in changes:
            return int(changes.get("rows", self.rows))
        microbatches = changes.get("microbatches", self.arguments.microbatches)
        rows, rest = divmod(self.rows * self.arguments.microbatches, microbatches)
        if rest or not rows:
            raise ValueError(
                f"microbatches={microbatches} does not divide the {self.rows * self.arguments.microbatches} rows of the batch. "
                "Pass a number that does, or a batch of other rows."
            )
        return rows

    def arguments_for(self, changes: Changes) -> ExplainArguments:
        """Return the arguments of `explain` with these changes."""
        rows = self.rows_of(changes)
        if rows not in self._batches:
            self._batches[rows] = _with_rows(self._batch, self.rows, rows)
        rest = {name: value for name, value in changes.items() if name != "rows"}
        return replace(self.arguments, batch=self._batches[rows], **rest)

    def run(self, changes: Changes) -> Explanation:
        """Explain with these changes. Raises ValueError if `explain` does not accept them."""
        arguments = self.arguments_for(changes)
        key = id(arguments.batch), arguments.recompute
        started = time.process_time()
        explanation = explain_with(arguments, self._traced.get(key))
        # Only the first explanation is timed, since it traces the model.
        if self.quick is None:
            self.quick = time.process_time() - started < QUICK_SECONDS
        self._traced.setdefault(key, explanation.traced)
        return explanation

    def attempt(self, changes: Changes) -> Explanation | None:
        """Explain with these changes, or return None and add the reason to `skipped` if `explain` does not accept them."""
        try:
            return self.run(changes)
        except ValueError as refused:
            self.skipped.append((dict(changes), str(refused)))
            return None

    def is_traced(self, changes: Changes) -> bool:
        """Return True if the model was traced with the batch and the `recompute` of these changes."""
        arguments = self.arguments_for(changes)
        return (id(arguments.batch), arguments.recompute) in self._traced

    def bound(self, changes: Changes) -> Bound | None:
        """Return the bound of a step with these changes, or None and add the reason to `skipped` if they are invalid."""
        try:
            arguments = self.arguments_for(changes)
            key = id(arguments.batch), arguments.recompute
            if self.quick and key not in self._traced:
                # Only these arguments change the trace: `recompute`, and three that change the rows of a microbatch.
                tracing = ("rows", "recompute", "microbatches", "world")
                self.run({name: value for name, value in changes.items() if name in tracing})
            traced, base = self._traced.get(key), self._base_trace()
            seconds, kept = self._compute_cost(traced or base, self.arguments.machine)
            state = self._state_cost_of(arguments, base)
        except ValueError as refused:
            self.skipped.append((dict(changes), str(refused)))
            return None
        microbatches = arguments.microbatches
        # Compute and communication may overlap completely, so the bound is the longer of the two.
        communication = microbatches * state.gather + state.gather_once + state.reduce_once
        communication += (1 if arguments.accumulate else microbatches) * state.reduce
        nbytes = state.nbytes + arguments.machine.context
        if microbatches > 1:
            nbytes += state.kept_gradients + (state.gradients if arguments.accumulate else 0)
        computing = microbatches * seconds
        if traced is not None:
            nbytes += kept
        elif self.rows_of(changes) * microbatches == self.rows * self.arguments.microbatches:
            # The same rows split into more microbatches take no less time.
            computing = self.arguments.microbatches * seconds
        else:
            computing = 0.0  # other rows have no known bound
        return Bound(max(computing, communication), nbytes, state.pinned, traced is not None)

    def _base_trace(self) -> TracedModel:
        """Return a trace of the requested batch, without recomputation unless `recompute` is a function."""
        named = isinstance(self.arguments.recompute, str)
        # Recomputation only adds time, so the trace without it gives a lower bound for all values of `recompute`.
        key = id(self._batch), "none" if named else self.arguments.recompute
        if key not in self._traced:
            self.run({"recompute": "none"} if named else {})
        return self._traced[key]

    def _state_cost_of(self, arguments: ExplainArguments, traced: TracedModel) -> _StateCost:
        shape = arguments.world, repr(arguments.mesh)  # a list, or a tuple, or an int
        reshard = arguments.reshard_after_forward  # decides whether the level of ZeRO is legal
        key = shape, arguments.mp_policy, id(arguments.plan), _offloads(arguments), arguments.states, bool(reshard)
        if key not in self._state_costs:
            planned, gpu = traced.planned_for(arguments), arguments.machine
            self._state_costs[key] = _state_cost(planned, setting_of(arguments, planned), gpu, network_of(arguments.net, gpu))
        return self._state_costs[key]


def _compute_cost(traced: TracedModel, gpu: Gpu) -> tuple[float, int]:
    """Return the costs of one microbatch: seconds of all operators without any waiting, and bytes that stay after forward."""
    seconds = cache(partial(op_seconds, gpu=gpu))
    total = host = 0.0
    kept = traced.trace.buffers + traced.trace.batch
    for event in traced.trace.events:
        if isinstance(event, Op) and event.nbytes:
            total += seconds(event)
            host += gpu.launch
        elif isinstance(event, Allocated) and event.storage in traced.trace.kept:
            kept += event.nbytes
    # An accelerator computes while the host launches the next operators; on the CPU, both take time of the same threads.
    return total + host if gpu.synchronous else max(total, host), kept


@dataclass(frozen=True, slots=True)
class _StateCost:
    """Memory of the sharded state, and communication time of all units."""

    nbytes: int  # bytes of shards, optimizer states, and parameters that are kept unsharded on the device
    pinned: int  # bytes of shards and optimizer states in pinned host memory
    # Bytes of the unsharded gradients that microbatches keep with `accumulate`, and of those that are kept in any case.
    gradients: int
    kept_gradients: int
    # Seconds to all-gather each unit once: units that do so in each microbatch, and units that stay unsharded between steps.
    gather: float
    gather_once: float
    # Seconds to reduce-scatter each unit once: units that reduce in each microbatch unless `accumulate`, and units that reduce
    # once per step in any case.
    reduce: float
    reduce_once: float


def _state_cost(traced: TracedModel, setting: Setting, gpu: Gpu, network: Network) -> _StateCost:
    groups: list[GroupPlan] = []
    for planned, entries in traced.plan.held():
        groups += group_plans(planned.name, entries, options_of(planned, setting), setting)
    shards = sum(group.shard_nbytes for group in groups if not group.host)
    pinned = sum(group.shard_nbytes for group in groups if group.host)
    kept = sum(group.unsharded_nbytes for group in groups if group.options.states.keeps_parameters)
    kept += sum(group.inner_shard_nbytes for group in groups)
    optimizer = sum(sum(step.states) for step in setting.optimizer if not step.on_host)
    pinned += sum(sum(step.states) for step in setting.optimizer if step.on_host)
    gather, reduce = [0.0, 0.0], [0.0, 0.0]  # of units that do so in each microbatch, and once per step
    gradients = [0, 0]
    for group in groups:
        if group.layout.ranks == 1:
            continue
        nbytes, states = group.unsharded_nbytes, group.options.states
        gather[states.keeps_parameters] += _collective_seconds(group, "all_gather", nbytes, gpu, network, setting.mesh)
        if group.trainable:
            numel = sum(prod(place.shape) for place in group.layout.offsets)
            gradients[states.keeps_gradients] += numel * group.dtypes.kept.itemsize
            nbytes = numel * group.dtypes.reduce.itemsize
            reduce[states.keeps_gradients] += _collective_seconds(group, "reduce_scatter", nbytes, gpu, network, setting.mesh)
    return _StateCost(shards + optimizer + kept, pinned, *gradients, *gather, *reduce)


def _collective_seconds(
    group: GroupPlan, kind: Literal["all_gather", "reduce_scatter"], nbytes: int, gpu: Gpu, network: Network, mesh: Mesh
) -> float:
    """Return a lower bound of the seconds that one all-gather or reduce-scatter of a parameter group takes."""
    message = Message(kind, group.dtypes.compute, nbytes, 1, group.layout.ranks)
    return message_seconds(message, "gather" if kind == "all_gather" else "reduce", gpu, network, mesh) if nbytes else 0.0


def _with_rows(batch: Any, rows: int, wanted: int) -> Any:
    """Return the batch with another number of rows in each tensor whose dim 0 is `rows`; small tensors repeat their values."""

    def change(tensor: Tensor) -> Tensor:
        if not tensor.dim() or tensor.shape[0] != rows:
            return tensor
        shape = (wanted, *tensor.shape[1:])
        if tensor.device.type == "meta" or prod(shape) > LARGEST_VALUES:
            return torch.empty(shape, dtype=tensor.dtype, device="meta")
        return tensor.repeat(-(-wanted // rows), *(1 for _ in shape[1:]))[:wanted]

    return batch if wanted == rows else _torch.tree_map_only(Tensor, change, batch)
