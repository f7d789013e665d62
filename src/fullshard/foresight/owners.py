"""Simulation of a step of Muon by owners: its memory, messages and operators, in the order of `optim.owner_exchange`."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

import torch
from torch import Tensor

from fullshard import _torch
from fullshard.core import Message
from fullshard.foresight.ledger import Ledger
from fullshard.foresight.program import Await, Launch, Program, replay
from fullshard.foresight.trace import Event, events_of
from fullshard.optim.muon import WIRE, runs, updates_of, write
from fullshard.optim.owner_exchange import Route, Routes
from fullshard.optim.owners import Matrix, OwnerPlan, plan_owners

_OPTIONS = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True, "adjust_lr_fn": None, "ns_steps": 5}
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315), 5, 1e-7  # coefficients, steps and eps of torch.optim.Muon
_TALK = 16  # bytes of the message with which all ranks agree at the end


@dataclass(frozen=True, slots=True)
class OwnerStep:
    """Step of Muon, with one exchange per mesh that its matrices are distributed over.

    Memory and messages are those of the first rank. Operators of owners are those of the busiest one, which all wait for.
    """

    plans: tuple[OwnerPlan, ...]
    dtypes: tuple[tuple[torch.dtype, ...], ...]  # of the matrices of each plan, as stored
    accelerator: bool = True  # False on the CPU

    @property
    def states(self) -> tuple[int, ...]:
        """Bytes of the shard of each momentum buffer."""
        return tuple(prod(shape) * dtype.itemsize for shape, _, dtype in self._shards)

    @property
    def _shards(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]:
        """(shape, whole shape, dtype) of the shard of each matrix."""
        return tuple(
            (matrix.shard_shape(plan.ranks, 0), matrix.shape, dtype)
            for plan, dtypes in zip(self.plans, self.dtypes)
            for matrix, dtype in zip(plan.matrices, dtypes)
        )

    def run(self, ledger: Ledger, program: Program, *, on_host: bool = False) -> None:
        """Record one step: all exchanges, and then all writes. `on_host`: True if shards and states are in host memory."""
        exchanges = [_Exchange(plan, dtypes, ledger, program, on_host) for plan, dtypes in zip(self.plans, self.dtypes)]
        every = [exchange.run() for exchange in exchanges]
        for exchange in exchanges:
            exchange.confirm()
        if not self._shards:
            return
        if on_host:
            copy_over("to_host", sum(prod(shape) for shape, _, _ in self._shards) * WIRE.itemsize, program)
        replay(_writing(self._shards, foreach=self.accelerator), ledger, program, on_host=on_host)
        ledger.free_all(every)


@lru_cache(1024)
def _sending(shards: tuple[tuple[tuple[int, ...], torch.dtype], ...]) -> list[Event]:
    """Return the events of computing the updates of shards, of (shape, dtype) each, into a message."""
    grads, momenta = ([_meta(*shard) for shard in shards] for _ in range(2))
    places = [_meta(shape, WIRE) for shape, _ in shards]

    def fill() -> None:
        for part in runs(range(len(shards)), lambda _: None, lambda index: grads[index].nbytes):
            mine = [grads[index] for index in part], [momenta[index] for index in part]
            torch._foreach_copy_([places[index] for index in part], updates_of(*mine, _OPTIONS))

    return events_of(fill, [*grads, *momenta, *places])


@lru_cache(1024)
def _computing(shape: tuple[int, ...], *, is_view: bool) -> list[Event]:
    """Return the events of assembling and computing a whole matrix, and of its copy into the message."""
    whole, place = _meta(shape, WIRE), _meta(shape, WIRE)

    def compute() -> None:
        # A clone has the memory of torch.cat, which assembles the matrix from the shards that arrived.
        place.copy_(_torch.newton_schulz(whole if is_view else whole.clone(), *_NEWTON_SCHULZ))

    return events_of(compute, [whole, place])


@lru_cache(1024)
def _writing(shards: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...], *, foreach: bool) -> list[Event]:
    """Return the events of writing momenta and weights of shards, of (shape, whole shape, dtype) each."""
    weights, grads, momenta = ([_meta(shape, dtype) for shape, _, dtype in shards] for _ in range(3))
    updates, wholes = [_meta(shape, WIRE) for shape, _, _ in shards], [whole for _, whole, _ in shards]
    existing = [*weights, *grads, *momenta, *updates]
    return events_of(lambda: write(weights, grads, momenta, updates, wholes, _OPTIONS, foreach=foreach), existing)


@dataclass(eq=False)
class _Exchange:
    """Counterpart of `OwnerExchange` that works on blocks of the ledger instead of tensors."""

    _plan: OwnerPlan
    _dtypes: Sequence[torch.dtype]
    _ledger: Ledger
    _program: Program
    _on_host: bool

    @cached_property
    def _routes(self) -> Routes:
        return Routes(self._plan, rank=0, replica=0)

    def run(self) -> int:
        """Record the exchange, and return the block of the results."""
        plan, ledger, program = self._plan, self._ledger, self._program
        nbytes = plan.replicas * self._routes.results_numel * plan.itemsize
        results = ledger.allocate(nbytes, "temporaries", "")
        arriving: deque[tuple[int, Launch]] = deque()
        leaving: tuple[int, Launch] | None = None
        for number in range(len(plan.buckets)):
            for ahead in range(number + len(arriving), min(number + 2, len(plan.buckets))):
                arriving.append(self._send(self._routes.buckets[ahead]))
            slot, arrived = arriving.popleft()
            program.instructions.append(Await(arrived))
            self._compute(plan.buckets[number])
            sent = self._launch(self._routes.buckets[number].owned_numel)
            if plan.ranks == 1:  # the result was copied, not sent: no message reads the slot
                ledger.free(slot)
                continue
            previous, leaving = leaving, (slot, sent)
            self._finish(previous)
        self._finish(leaving)
        if plan.replicas > 1:
            gathered = self._start("replicate", Message("all_gather", WIRE, nbytes, 1, plan.replicas))
            program.instructions.append(Await(gathered))
        return results

    def confirm(self) -> None:
        """Record the messages with which all ranks agree that they have all results."""
        for ranks in (self._plan.replicas, self._plan.ranks):
            if ranks > 1:
                talk = self._start("reduce", Message("talk", torch.uint8, _TALK, 1, ranks))
                self._program.instructions.append(Await(talk))

    def _send(self, route: Route) -> tuple[int, Launch]:
        """Send the shards of a bucket. Return the block in which own matrices arrive, and the launch."""
        slot = self._ledger.allocate(route.owned_numel * self._plan.itemsize, "temporaries", "")
        shards = tuple((tuple(shape), self._dtypes[index]) for index, shape in zip(route.order, route.shapes))
        replay(_sending(shards), self._ledger, self._program, on_host=self._on_host)
        if self._on_host:
            copy_over("to_device", route.numel * self._plan.itemsize, self._program)
        return slot, self._launch(route.numel)

    def _compute(self, bucket: Sequence[int]) -> None:
        """Record the memory of the first rank, and the operators of the rank with the most work, which all wait for."""
        plan, loads = self._plan, defaultdict[int, float](float)
        for index in bucket:
            loads[plan.owners[index]] += plan.costs[index]
        busiest = max(loads, key=loads.__getitem__)
        for index in bucket:
            matrix, owner = plan.matrices[index], plan.owners[index]
            is_view = matrix.dim == 0 and sum(plan.owners[other] == owner for other in bucket) == 1
            if owner in (0, busiest):
                events = _computing(matrix.shape, is_view=is_view)
                replay(events, self._ledger if owner == 0 else None, self._program if owner == busiest else None)

    def _launch(self, numel: int) -> Launch:
        ranks, nbytes = self._plan.ranks, numel * self._plan.itemsize
        return self._start("gather", Message("all_to_all", WIRE, nbytes, 1, ranks) if ranks > 1 else None)

    def _start(self, stream: str, message: Message | None) -> Launch:
        launch = Launch(stream, "", messages=[] if message is None else [message])
        self._program.instructions.append(launch)
        if message is not None:
            self._program.messages.append(message)
        return launch

    def _finish(self, leaving: tuple[int, Launch] | None) -> None:
        if leaving is not None:
            slot, launch = leaving
            self._program.instructions.append(Await(launch))
            self._ledger.free(slot)


def copy_over(kind: str, nbytes: int, program: Program) -> None:
    """Record a copy between host and device, and the wait of the compute stream for it."""
    launch = Launch("gather", "", messages=[Message(kind, WIRE, nbytes, 1)])
    program.instructions += [launch, Await(launch)]


def owner_step(matrices: Mapping[tuple[int, int], Sequence[tuple[Matrix, torch.dtype]]], *, accelerator: bool) -> OwnerStep:
    """Return the step of Muon. `matrices`: by (ranks, replicas) of the mesh, each with the dtype in which it is stored."""
    plans = [
        plan_owners([matrix for matrix, _ in listed], ranks, replicas=replicas)
        for (ranks, replicas), listed in matrices.items()
    ]
    return OwnerStep(tuple(plans), tuple(tuple(dtype for _, dtype in listed) for listed in matrices.values()), accelerator)


def _meta(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")
