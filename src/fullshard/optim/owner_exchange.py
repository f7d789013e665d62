"""The exchange with owners: shards of matrices travel to the ranks that own them, and parts of the results travel back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from fullshard.core import CollectiveCall, GroupFingerprints, ShardAxis, Unit
from fullshard.optim.owners import OwnerPlan

_KIND = "all_to_all"  # `Message.kind` of these collectives


@dataclass(frozen=True, slots=True)
class _Route:
    """Matrices, shapes and sizes of a bucket's messages, as this rank sends and receives them; equal in every step."""

    order: list[int]  # the matrices, by owner
    shapes: list[tuple[int, int]]  # of this rank's shards, in that order
    sizes: list[int]  # elements of this rank's shards, by owner
    owned: list[int]  # the matrices of this rank
    part_shapes: list[tuple[int, int]]  # of their shards, by rank and then by matrix
    part_sizes: list[int]  # elements of their shards, by rank


class OwnerExchange:
    """Computes a function of whole matrices, each on its owner.

        shards of bucket k+1   --to the owners-->       (under way while bucket k is computed)
        whole matrices of bucket k: function            (on the owner)
        results of bucket k    --back to the shards-->  (under way while bucket k+1 is computed)

    Nothing that the caller holds is changed. All ranks of the axis must call `run` alike; each message is in the collective
    log. If `run` raises on one rank, the watchdog ends the waits of the others, which raise an error that names it.
    """

    def __init__(self, plan: OwnerPlan, unit: Unit, axis: ShardAxis, dtype: torch.dtype, doing: str) -> None:
        """Compare the plan between the ranks. Collective.

        Args:
            plan: owners and buckets; equal on all ranks.
            unit: unit of the first matrix, whose name is in errors.
            axis: the axis that the matrices are sharded over.
            dtype: dtype of the messages and of the function's results.
            doing: the call that needs the exchange, for errors.

        Raises:
            ValueError: on all ranks, if their plans differ.
        """
        self.plan, self._axis, self._dtype, self._doing = plan, axis, dtype, doing
        self._agreement = unit.agreement(doing).on_axis(axis)
        communicator = unit.runtime.communicator
        self._communicator = communicator
        log = communicator.log_of(axis)
        self._fingerprints = GroupFingerprints(log, unit.unit_name, f"{doing} {plan.digest}")
        log.allow_message_size(plan.slot_nbytes)
        self._in_flight: dict[CollectiveCall, Tensor] = {}  # and the memory that each message is sent from
        self._replica = 0 if axis.replicas is None else axis.replicas.rank
        self._routes = [self._route(bucket) for bucket in plan.buckets]
        self._of_replicas = [plan.of_replica(replica) for replica in range(plan.replicas)]
        self._shapes_of_replicas = [self._shapes(indices, axis.rank) for indices in self._of_replicas]
        if plan.ranks * plan.replicas > 1 and not self._agreement.all_equal(plan.digest.encode()):
            raise ValueError(
                f"{doing}: the ranks have different matrices. Pass the same parameters on all ranks, and run the same backward "
                "on all of them, so that the same parameters have gradients."
            )

    def run(self, shard: Callable[[int], Tensor], function: Callable[[int, Tensor], Tensor]) -> list[Tensor]:
        """Return this rank's part of each result. Collective.

        Args:
            shard: returns this rank's shard of a matrix (by index), of any dtype, on any device; cast for the message.
            function: called on the owner with the index and the whole matrix, which it may overwrite; returns a matrix of the
                same shape.

        Returns:
            For each matrix a tensor with the shape of the shard, in the dtype of the messages.
        """
        with self._communicator.reporting_exceptions(self._doing):
            try:
                return self._run(shard, function)
            finally:
                self._leave()

    def _run(self, shard: Callable[[int], Tensor], function: Callable[[int, Tensor], Tensor]) -> list[Tensor]:
        plan = self.plan
        results: list[Tensor] = [torch.empty(0)] * len(plan.matrices)
        there = self._send_to_owners(0, shard) if plan.buckets else None
        back: tuple[int, Tensor, CollectiveCall | None] | None = None
        for number, route in enumerate(self._routes):
            arrived, call = there if there is not None else (torch.empty(0), None)
            there = self._send_to_owners(number + 1, shard) if number + 1 < len(self._routes) else None
            self._wait(call)
            answers = {index: function(index, whole) for index, whole in self._assembled(route, arrived).items()}
            sent_back = self._send_back(route, answers)
            if back is not None:
                self._take(*back, results)
            back = number, *sent_back
        if back is not None:
            self._take(*back, results)
        if plan.replicas > 1:
            self._share(results)
        if plan.ranks * plan.replicas > 1:
            # No rank changes anything before all ranks have all results. The host waits too: on an accelerator it runs ahead,
            # and would queue the writes behind messages that a failed rank never sends.
            self._agreement.maximum(torch.zeros(1, dtype=torch.uint8, device="cpu"))
        return results

    # --- messages ---

    def _route(self, bucket: Sequence[int]) -> _Route:
        plan, here = self.plan, self._axis.rank
        by_owner: list[list[int]] = [[] for _ in range(plan.ranks)]  # of this replica
        for index in plan.of_replica(self._replica, bucket):
            by_owner[plan.owners[index] % plan.ranks].append(index)
        order, owned = [index for indices in by_owner for index in indices], by_owner[here]
        parts = [self._shapes(owned, rank) for rank in range(plan.ranks)]
        return _Route(
            order=order,
            shapes=self._shapes(order, here),
            sizes=[_numel(self._shapes(indices, here)) for indices in by_owner],
            owned=owned,
            part_shapes=[shape for shapes in parts for shape in shapes],
            part_sizes=[_numel(shapes) for shapes in parts],
        )

    def _shapes(self, indices: Sequence[int], rank: int) -> list[tuple[int, int]]:
        """Return the shapes of a rank's shards of these matrices."""
        return [self.plan.matrices[index].shard_shape(self.plan.ranks, rank) for index in indices]

    def _send_to_owners(self, number: int, shard: Callable[[int], Tensor]) -> tuple[Tensor, CollectiveCall | None]:
        """Start the message of a bucket to the owners. Return the memory in which the parts of own matrices arrive."""
        route = self._routes[number]
        sent, received = self._new(sum(route.sizes)), self._new(sum(route.part_sizes))
        for index, place in zip(route.order, _views(sent, route.shapes)):
            place.copy_(shard(index))
        return received, self._send(received, sent, route.part_sizes, route.sizes, "matrices to their owners")

    def _assembled(self, route: _Route, arrived: Tensor) -> dict[int, Tensor]:
        """Return the whole matrices that this rank owns. `arrived`: their parts, by rank and then by matrix."""
        matrices, owned = self.plan.matrices, route.owned
        if len(owned) == 1 and matrices[owned[0]].dim == 0:  # in rank order, the parts are the matrix
            return {owned[0]: arrived.view(matrices[owned[0]].shape)}
        parts = _views(arrived, route.part_shapes)
        return {index: torch.cat(parts[place :: len(owned)], matrices[index].dim) for place, index in enumerate(owned)}

    def _send_back(self, route: _Route, answers: dict[int, Tensor]) -> tuple[Tensor, CollectiveCall | None]:
        """Start the message with the results of a bucket. Return the memory in which this rank's parts arrive."""
        sent, received = self._new(sum(route.part_sizes)), self._new(sum(route.sizes))
        places = _views(sent, route.part_shapes)
        for place, index in enumerate(route.owned):
            dim, parts = self.plan.matrices[index].dim, places[place :: len(route.owned)]
            for part, result in zip(parts, answers[index].split([part.shape[dim] for part in parts], dim)):
                part.copy_(result)
        return received, self._send(received, sent, route.sizes, route.part_sizes, "results of owners")

    def _take(self, number: int, received: Tensor, call: CollectiveCall | None, results: list[Tensor]) -> None:
        """Wait for the results of a bucket, and store this rank's parts in `results`."""
        self._wait(call)
        route = self._routes[number]
        for index, part in zip(route.order, _views(received, route.shapes)):
            results[index] = part

    def _share(self, results: list[Tensor]) -> None:
        """All-gather the results over the replicas. Each replica computed a part of the matrices."""
        replicas, communicator = self._axis.replicas, self._communicator
        assert replicas is not None
        shapes = self._shapes_of_replicas
        most = max(map(_numel, shapes))
        every = self._new(len(shapes) * most)
        slots = [every[replica * most :][:most] for replica in range(len(shapes))]
        for index, place in zip(self._of_replicas[self._replica], _views(slots[self._replica], shapes[self._replica])):
            place.copy_(results[index])
        if most:
            communicator.traffic.record("all_gather", [every], len(shapes))
            start = communicator.collectives.of_process_group(replicas.group).gatherer([every], [slots[self._replica]])
            communicator.send(communicator.all_reduce_stream, self._fingerprints, "results over replicas", start).wait()
        for indices, slot, of_replica in zip(self._of_replicas, slots, shapes):
            for index, part in zip(indices, _views(slot, of_replica)):
                results[index] = part

    def _new(self, numel: int) -> Tensor:
        return torch.empty(numel, dtype=self._dtype, device=self._axis.device)

    def _send(
        self, received: Tensor, sent: Tensor, received_sizes: list[int], sent_sizes: list[int], action: str
    ) -> CollectiveCall | None:
        """Start one message; with one rank, copy."""
        group, communicator = self._axis.group, self._communicator
        if group is None or self.plan.ranks == 1:
            received.copy_(sent)
            return None
        communicator.traffic.record(_KIND, [sent], self.plan.ranks)
        collectives: Any = communicator.collectives.of_process_group(group)  # built-in ones: users' own need no all-to-all
        start = partial(collectives.all_to_all, received, sent, received_sizes, sent_sizes)
        call = communicator.send(communicator.all_gather_stream, self._fingerprints, action, start)
        self._in_flight[call] = sent
        return call

    def _wait(self, call: CollectiveCall | None) -> None:
        if call is not None:
            call.wait()
            del self._in_flight[call]

    def _leave(self) -> None:
        """Behind an exception: order the compute stream behind messages in flight, whose memory is about to be freed.

        On the CPU messages keep their memory alive themselves, and may never come.
        """
        left, self._in_flight = self._in_flight, {}
        if self._communicator.async_device is not None:
            for call in left:
                with suppress(Exception):
                    call.wait()


def _numel(shapes: Iterable[tuple[int, int]]) -> int:
    return sum(map(prod, shapes))


def _views(flat: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Return tensors of these shapes, one behind the other from the start of `flat`."""
    sizes = [prod(shape) for shape in shapes]
    return [part.view(shape) for part, shape in zip(flat[: sum(sizes)].split(sizes), shapes)]


__all__ = ["OwnerExchange"]
