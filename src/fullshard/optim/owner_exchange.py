"""The exchange with owners: shards of matrices travel to the ranks that own them, and parts of the results travel back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from fullshard.core import CollectiveCall, GroupFingerprints, ShardAxis, Unit
from fullshard.optim.owners import OwnerPlan

_KIND = "all_to_all"  # `Message.kind` of these collectives


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
        for number, bucket in enumerate(plan.buckets):
            arrived, call = there if there is not None else (torch.empty(0), None)
            there = self._send_to_owners(number + 1, shard) if number + 1 < len(plan.buckets) else None
            self._wait(call)
            answers = {index: function(index, whole) for index, whole in self._assembled(bucket, arrived).items()}
            sent_back = self._send_back(bucket, answers)
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

    def _by_owner(self, bucket: Sequence[int]) -> list[list[int]]:
        """Return the matrices of a bucket that this replica owns, by the owner's index among the shards."""
        found: list[list[int]] = [[] for _ in range(self.plan.ranks)]
        for index in self.plan.of_replica(self._replica, bucket):
            found[self.plan.owners[index] % self.plan.ranks].append(index)
        return found

    def _numels(self, indices: Sequence[int]) -> list[int]:
        """Return the elements that each rank has of these matrices."""
        plan = self.plan
        return [sum(plan.matrices[index].shard_numel(plan.ranks, rank) for index in indices) for rank in range(plan.ranks)]

    def _send_to_owners(self, number: int, shard: Callable[[int], Tensor]) -> tuple[Tensor, CollectiveCall | None]:
        """Start the message of a bucket to the owners. Return the memory in which the parts of own matrices arrive."""
        plan, rank, by_owner = self.plan, self._axis.rank, self._by_owner(self.plan.buckets[number])
        sizes = [sum(plan.matrices[index].shard_numel(plan.ranks, rank) for index in owned) for owned in by_owner]
        sent = self._new(sum(sizes))
        at = 0
        for index in (index for owned in by_owner for index in owned):
            part = shard(index)
            sent[at : at + part.numel()].view(part.shape).copy_(part)
            at += part.numel()
        arriving = self._numels(by_owner[rank])
        received = self._new(sum(arriving))
        return received, self._send(received, sent, arriving, sizes, "matrices to their owners")

    def _assembled(self, bucket: Sequence[int], arrived: Tensor) -> dict[int, Tensor]:
        """Return the whole matrices that this rank owns. `arrived`: their parts, by rank and then by matrix."""
        plan, owned = self.plan, self._by_owner(bucket)[self._axis.rank]
        parts: dict[int, list[Tensor]] = {index: [] for index in owned}
        at = 0
        for rank in range(plan.ranks):
            for index in owned:
                shape = plan.matrices[index].shard_shape(plan.ranks, rank)
                parts[index].append(arrived[at : at + prod(shape)].view(shape))
                at += prod(shape)
        if len(owned) == 1 and plan.matrices[owned[0]].dim == 0:  # in rank order, the parts are the matrix
            return {owned[0]: arrived.view(plan.matrices[owned[0]].shape)}
        return {index: torch.cat(parts[index], plan.matrices[index].dim) for index in owned}

    def _send_back(self, bucket: Sequence[int], answers: dict[int, Tensor]) -> tuple[Tensor, CollectiveCall | None]:
        """Start the message with the results of a bucket. Return the memory in which this rank's parts arrive."""
        plan, rank, by_owner = self.plan, self._axis.rank, self._by_owner(bucket)
        sizes = self._numels(by_owner[rank])
        sent = self._new(sum(sizes))
        at = 0
        starts = dict.fromkeys(by_owner[rank], 0)  # first row (or column) of the next rank
        for other in range(plan.ranks):
            for index in by_owner[rank]:
                matrix = plan.matrices[index]
                shape = matrix.shard_shape(plan.ranks, other)
                part = answers[index].narrow(matrix.dim, starts[index], shape[matrix.dim])
                starts[index] += shape[matrix.dim]
                sent[at : at + part.numel()].view(shape).copy_(part)
                at += part.numel()
        arriving = [sum(plan.matrices[index].shard_numel(plan.ranks, rank) for index in owned) for owned in by_owner]
        received = self._new(sum(arriving))
        return received, self._send(received, sent, arriving, sizes, "results of owners")

    def _take(self, number: int, received: Tensor, call: CollectiveCall | None, results: list[Tensor]) -> None:
        """Wait for the results of a bucket, and store this rank's parts in `results`."""
        self._wait(call)
        plan, at = self.plan, 0
        for index in (index for owned in self._by_owner(plan.buckets[number]) for index in owned):
            shape = plan.matrices[index].shard_shape(plan.ranks, self._axis.rank)
            results[index] = received[at : at + prod(shape)].view(shape)
            at += prod(shape)

    def _share(self, results: list[Tensor]) -> None:
        """All-gather the results over the replicas. Each replica computed a part of the matrices."""
        plan, rank, replicas = self.plan, self._axis.rank, self._axis.replicas
        assert replicas is not None
        owned = [plan.of_replica(replica) for replica in range(plan.replicas)]
        most = max(sum(plan.matrices[index].shard_numel(plan.ranks, rank) for index in indices) for indices in owned)
        every = self._new(plan.replicas * most)
        mine, at = every[self._replica * most :][:most], 0
        for index in owned[self._replica]:
            mine[at : at + results[index].numel()].view(results[index].shape).copy_(results[index])
            at += results[index].numel()
        communicator = self._communicator
        if most:
            communicator.traffic.record("all_gather", [every], plan.replicas)
            start = communicator.collectives.of_process_group(replicas.group).gatherer([every], [mine])
            communicator.send(communicator.all_reduce_stream, self._fingerprints, "results over replicas", start).wait()
        for replica, indices in enumerate(owned):
            at = replica * most
            for index in indices:
                shape = plan.matrices[index].shard_shape(plan.ranks, rank)
                results[index] = every[at : at + prod(shape)].view(shape)
                at += prod(shape)

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


__all__ = ["OwnerExchange"]
