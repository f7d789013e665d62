"""What a search may change, and what each change can do at best: seconds and bytes that it cannot do without.

A bound takes no simulation, so thousands of settings are left out by it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor

from fullshard import _torch
from fullshard.collectives.traffic import Message
from fullshard.foresight.clock import message_seconds, op_seconds
from fullshard.foresight.explanation import Explanation, answer
from fullshard.foresight.group import GroupPlan
from fullshard.foresight.hardware import Gpu, Network, network_of
from fullshard.foresight.optimizer import OptimizerStep
from fullshard.foresight.question import Question
from fullshard.foresight.setup import Traced, setting_of, sizes_of, tensors_of
from fullshard.foresight.simulate import Setting, group_plans, options_of
from fullshard.foresight.trace import Born, Op
from fullshard.policies import CommPolicy, CPUOffloadPolicy, MixedPrecisionPolicy
from fullshard.wrap.plan import Plan

Changes = Mapping[str, Any]
"""By names of `explain`'s arguments; "rows" are those of the batch of one microbatch."""

Axis = Sequence[Changes]
"""What one thing may be; the first is {}, as it was asked for."""

WAYS = ("none", "block", "every:2", "selective")
QUICK = 0.3
"""Seconds: a model that is traced in less is traced for each batch and way of recomputation, which gives better bounds."""

MAY_CHANGE = (
    "recompute",
    "microbatches",
    "accumulate",
    "reshard_after_forward",
    "mesh",
    "mp_policy",
    "comm_policy",
    "offload_policy",
    "plan",
)
"""What a search may change: the bounds below hold for these, and the goals change `world` and rows."""

LARGEST_VALUES = 1 << 22
"""Elements of a tensor of a batch whose values are kept when its rows change."""


def axes_of(base: Explanation, over: Mapping[str, Sequence[Any]] | None) -> list[list[Changes]]:
    """What may change: of `over` by name, or all that is known.

    Raises:
        ValueError: for a name of `over` that a search may not change, or that has no values.
    """
    question = base.traced.question
    if over is not None:
        axes: list[list[Changes]] = []
        for name, values in over.items():
            if name not in MAY_CHANGE:
                raise ValueError(
                    f"over has {name!r}, which a search does not change: expected some of {', '.join(MAY_CHANGE)}; search once "
                    "for each value of another argument"
                )
            if isinstance(values, str) or not isinstance(values, Sequence) or not values:
                raise ValueError(f"over[{name!r}] must be a sequence of values to try, got {values!r}")
            asked = getattr(question, name)
            axes.append([{}, *({name: value} for value in values if not _same(value, asked))])
        return axes
    found: dict[str, list[Any]] = {
        "recompute": [way for way in WAYS if way != question.recompute] if base.traced.blocks else [],
        "microbatches": _parts(question, base.traced.rows),
        "accumulate": [not question.accumulate],
        "reshard_after_forward": _reshards(base),
        "mesh": _meshes(base),
        "mp_policy": _reduced(base),
        "comm_policy": _comms(base.setting.comm_policy),
        "offload_policy": [] if base.gpu.synchronous or _offloads(question) else [CPUOffloadPolicy()],
        "plan": _pairs(base),
    }
    every: list[list[Changes]] = [[{}, *({name: value} for value in values)] for name, values in found.items() if values]
    return every


def settings(axes: Sequence[Axis], question: Question) -> Iterator[dict[str, Any]]:
    """Every combination that means something: without several microbatches there is nothing to accumulate."""
    for chosen in product(*axes):
        changes = {name: value for change in chosen for name, value in change.items()}
        if "accumulate" in changes and changes.get("microbatches", question.microbatches) == 1:
            continue
        yield changes


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)


def _offloads(question: Question) -> bool:
    return isinstance(question.offload_policy, CPUOffloadPolicy)


def _parts(question: Question, rows: int) -> list[int]:
    return [parts for parts in (2, 4, 8) if rows % parts == 0] if question.microbatches == 1 else []


def _reshards(base: Explanation) -> list[bool | int]:
    per_node, ranks = base.gpu.per_node, base.setting.ranks
    values: list[bool | int] = [True, False]
    if ranks > per_node and ranks % per_node == 0:
        values.append(per_node)
    asked = base.traced.question.reshard_after_forward
    return [value for value in values if value is not asked]


def _meshes(base: Explanation) -> list[tuple[int, int]]:
    world, size = base.traced.question.world, base.gpu.per_node
    if base.traced.question.mesh is not None:
        return []
    found = []
    while size < world:
        if world % size == 0:
            found.append((world // size, size))
        size *= 2
    return found[:4]


def _reduced(base: Explanation) -> list[MixedPrecisionPolicy]:
    policy = base.setting.mp_policy
    if policy.param_dtype is None or policy.resolve(torch.float32).reduce == policy.param_dtype:
        return []
    return [replace(policy, reduce_dtype=policy.param_dtype)]


def _comms(policy: CommPolicy) -> list[CommPolicy]:
    return [replace(policy, reductions_in_flight=policy.reductions_in_flight + 1), replace(policy, prefetch_bytes=0)]


def _pairs(r: Explanation) -> list[Plan]:
    """The plan with blocks that follow each other merged in pairs, if there are four."""
    blocks = [unit.modules[0] for unit in r.plan.units if len(unit.modules) == 1 and unit.modules[0] in r.traced.blocks]
    if len(blocks) < 4:
        return []
    plan = Plan(r.plan.outline, r.plan.units)
    for first, second in zip(blocks[::2], blocks[1::2]):
        plan.merge(first, second)
    return [plan]


@dataclass(frozen=True, slots=True)
class Bound:
    """What a step cannot do without.

    seconds: of all its microbatches.      nbytes: of the device's memory.      pinned: of the host's.
    traced: whether its own batch and way of recomputation were traced. Else activations are not counted, and the seconds are
        those of the batch that was asked for, so the bound is lower than it could be.
    """

    seconds: float
    nbytes: int
    pinned: int
    traced: bool


class Tries:
    """Answers and bounds variants of one question; models are traced once for each batch and way of recomputation."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self._batch = tensors_of(question.batch)
        self.rows = sizes_of(self._batch)[0]
        self._batches = {self.rows: self._batch}
        self._traced: dict[object, Traced] = {}
        self._steps: dict[object, OptimizerStep] = {}
        self._works: dict[int, _Work] = {}
        self._held: dict[object, _Held] = {}
        self.quick: bool | None = None
        self.skipped: list[tuple[Changes, str]] = []

    def rows_of(self, changes: Changes) -> int:
        """Rows of one microbatch: several share the batch that was asked for, unless these changes say rows."""
        if "rows" in changes or "world" in changes:
            return int(changes.get("rows", self.rows))
        return self.rows * self.question.microbatches // int(changes.get("microbatches", self.question.microbatches))

    def question_of(self, changes: Changes) -> Question:
        """The question with these changes."""
        rows = self.rows_of(changes)
        if rows not in self._batches:
            self._batches[rows] = _with_rows(self._batch, self.rows, rows)
        rest = {name: value for name, value in changes.items() if name != "rows"}
        return replace(self.question, batch=self._batches[rows], **rest)

    def run(self, changes: Changes) -> Explanation:
        """Explain with these changes.

        Raises:
            ValueError: if that cannot be.
        """
        question = self.question_of(changes)
        key = id(question.batch), question.recompute
        started = time.process_time()
        found = answer(question, self._traced.get(key), self._steps)
        if self.quick is None:
            self.quick = time.process_time() - started < QUICK
        self._traced.setdefault(key, found.traced)
        return found

    def attempt(self, changes: Changes) -> Explanation | None:
        """The same; None, and a line in `skipped`, if that cannot be."""
        try:
            return self.run(changes)
        except ValueError as why:
            self.skipped.append((dict(changes), str(why)))
            return None

    def is_traced(self, changes: Changes) -> bool:
        """Whether the batch and the way of recomputation of these changes were traced."""
        question = self.question_of(changes)
        return (id(question.batch), question.recompute) in self._traced

    def bound(self, changes: Changes) -> Bound | None:
        """What a step with these changes cannot do without; None, and a line in `skipped`, if it cannot be."""
        question = self.question_of(changes)
        many = question.microbatches
        try:
            if self.quick and not self.is_traced(changes):
                self.run(
                    {name: value for name, value in changes.items() if name in ("rows", "recompute", "microbatches", "world")}
                )
            is_traced = self.is_traced(changes)
            work = self._work_of(self._traced[id(question.batch), question.recompute] if is_traced else self._anchor())
            held = self._held_of(question, self._anchor())
        except ValueError as why:
            self.skipped.append((dict(changes), str(why)))
            return None
        links = many * held.gather + (1 if question.accumulate else many) * held.reduce
        nbytes = held.nbytes + (held.gradients if many > 1 and question.accumulate else 0) + question.machine.context
        if is_traced:
            return Bound(max(many * work.seconds, links), nbytes + work.kept, held.pinned, is_traced)
        whole = self.rows_of(changes) * many == self.rows * self.question.microbatches  # cut in parts it takes no less
        return Bound(max(self.question.microbatches * work.seconds if whole else 0.0, links), nbytes, held.pinned, is_traced)

    def _anchor(self) -> Traced:
        """A trace of the batch that was asked for, without recomputation where a search may leave it out."""
        named = isinstance(self.question.recompute, str)
        key = id(self._batch), "none" if named else self.question.recompute
        if key not in self._traced:
            self.run({"recompute": "none"} if named else {})
        return self._traced[key]

    def _work_of(self, traced: Traced) -> _Work:
        if id(traced) not in self._works:
            self._works[id(traced)] = _work(traced, self.question.machine)
        return self._works[id(traced)]

    def _held_of(self, question: Question, traced: Traced) -> _Held:
        key = question.world, question.mesh, question.mp_policy, id(question.plan), _offloads(question)
        if key not in self._held:
            planned, gpu = traced.planned_for(question), question.machine
            self._held[key] = _held(planned, setting_of(question, planned), gpu, network_of(question.net, gpu))
        return self._held[key]


@dataclass(frozen=True, slots=True)
class _Work:
    """What one microbatch computes. seconds: of all operators, if none waits.      kept: bytes that its forward leaves."""

    traced: Traced
    seconds: float
    kept: int


def _work(traced: Traced, gpu: Gpu) -> _Work:
    seconds: dict[object, float] = {}
    total = host = 0.0
    kept = 0
    for event in traced.trace.events:
        if isinstance(event, Op) and event.nbytes:
            key = event.name, event.flops, event.nbytes, event.dtype, event.causal, event.sizes
            if key not in seconds:
                seconds[key] = op_seconds(event, gpu)
            total += seconds[key]
            host += gpu.launch
        elif isinstance(event, Born) and event.storage in traced.trace.kept:
            kept += event.nbytes
    kept += traced.trace.buffers + traced.trace.batch
    return _Work(traced, total + host if gpu.synchronous else max(total, host), kept)


@dataclass(frozen=True, slots=True)
class _Held:
    """What the library holds and sends.

    nbytes: of shards and states on the device.      pinned: of those in the host's memory.
    gradients: bytes of full gradients in the reduce dtype.
    gather, reduce: seconds on the link to gather each unit once, and to reduce it.
    """

    nbytes: int
    pinned: int
    gradients: int
    gather: float
    reduce: float


def _held(traced: Traced, setting: Setting, gpu: Gpu, network: Network) -> _Held:
    groups: list[GroupPlan] = []
    for planned, entries in traced.plan.held():
        groups += group_plans(planned.name, entries, options_of(planned, setting), setting)
    shards = sum(group.shard_nbytes for group in groups if not group.host)
    pinned = sum(group.shard_nbytes for group in groups if group.host)
    states = 0 if setting.optimizer is None else sum(setting.optimizer.states)
    if isinstance(setting.offload_policy, CPUOffloadPolicy):
        states, pinned = 0, pinned + states
    gather = reduce = 0.0
    gradients = 0
    for group in groups:
        if group.layout.ranks == 1:
            continue
        gather += _seconds(group, "all_gather", group.full_nbytes, gpu, network, setting.mesh)
        if group.trainable:
            nbytes = sum(prod(place.shape) for place in group.layout.places) * group.dtypes.reduce.itemsize
            gradients += nbytes
            reduce += _seconds(group, "reduce_scatter", nbytes, gpu, network, setting.mesh)
    return _Held(shards + states, pinned, gradients, gather, reduce)


def _seconds(group: GroupPlan, kind: Literal["all_gather", "reduce_scatter"], nbytes: int, *where: Any) -> float:
    """Of a message of all of a group, at least. where: (the GPU, the network, the mesh)."""
    message = Message(kind, group.dtypes.compute, nbytes, 1, group.layout.ranks)
    return message_seconds(message, "gather" if kind == "all_gather" else "reduce", *where) if nbytes else 0.0


def _with_rows(batch: Any, rows: int, wanted: int) -> Any:
    """The batch with another number of rows, in every tensor that has them; small ones keep their values, again and again."""

    def change(tensor: Tensor) -> Tensor:
        if not tensor.dim() or tensor.shape[0] != rows:
            return tensor
        shape = (wanted, *tensor.shape[1:])
        if tensor.device.type == "meta" or prod(shape) > LARGEST_VALUES:
            return torch.empty(shape, dtype=tensor.dtype, device="meta")
        return tensor.repeat(-(-wanted // rows), *(1 for _ in shape[1:]))[:wanted]

    return batch if wanted == rows else _torch.tree_map_only(Tensor, change, batch)


__all__ = ["Axis", "Bound", "Changes", "Tries", "axes_of", "settings"]
