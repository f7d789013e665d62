"""The exchange with owners: shards of matrices travel to the ranks that own them, and parts of the results travel back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from fullshard.core import Agreement, CollectiveCall, GroupFingerprints, ShardAxis, StartedWork, Unit
from fullshard.optim.owners import Cost, Matrix, OwnerPlan, plan_owners

_KIND = "all_to_all"  # `Message.kind` of these collectives


Fill = Callable[[Sequence[int], Sequence[Tensor]], None]
"""Function that writes shards into a message: of these matrices, by index, into these places, which have their shapes."""

OnOwner = Callable[[Sequence[int], list[Tensor]], Sequence[Tensor]]
"""Function that an owner calls with matrices, by index, and their whole tensors, which it may overwrite. It returns as many
tensors of the same shapes."""


@dataclass(frozen=True, slots=True)
class Across:
    """Tensor parallelism: owners have blocks of matrices, and exchange them over the tensor-parallel axis.

    Attributes:
        axis: the tensor-parallel axis.
        matrices: the matrices of all blocks, sharded over `axis`.
    """

    axis: ShardAxis
    matrices: Sequence[Matrix]


@dataclass(frozen=True, slots=True)
class _Route:
    """Matrices, shapes and sizes of a bucket's messages, as this rank sends and receives them; equal in every step.

    The memory of a message to the owners and that of the one back are the same, on both sides.
    """

    start: int  # of this rank's shards in the memory of all results, elements
    shapes: list[tuple[int, ...]]  # of this rank's shards, by owner
    sizes: list[int]  # elements of this rank's shards, by owner
    order: list[int]  # the matrices, by owner
    owned: list[int]  # the matrices of this rank
    part_shapes: list[tuple[int, ...]]  # of their shards, by rank and then by matrix
    part_sizes: list[int]  # elements of their shards, by rank


class OwnerExchange:
    """Computes a function of whole matrices, each on its owner.

        shards of bucket k+1   --to the owners-->       (under way while bucket k is computed)
        whole matrices of bucket k: function            (on the owner)
        results of bucket k    --back to the shards-->  (under way while bucket k+1 is computed)

    `run` does all of this. `to_owners` and `to_shards` are its two directions, for callers who compute with all matrices of an
    owner at once. Nothing that the caller holds is changed; `confirm` tells the caller when it may be. All ranks of the axis
    must make the same calls, in a block of `call()`; each message is in the collective log. If a call raises on one rank, the
    watchdog ends the waits of the others, which raise an error that names it.
    """

    def __init__(
        self,
        plan: OwnerPlan,
        unit: Unit,
        axis: ShardAxis,
        dtype: torch.dtype,
        doing: str,
        *,
        across: Across | None = None,
        batched: bool = False,
        is_inner: bool = False,
    ) -> None:
        """Compare the plan between the ranks. Collective.

        Args:
            plan: owners and buckets; equal on all ranks.
            unit: unit of the first matrix, whose name is in errors.
            axis: the axis that the matrices are sharded over.
            dtype: dtype of the messages and of the function's results.
            doing: the call that needs the exchange, for errors.
            across: for tensor parallelism, how the blocks that `plan` distributes form matrices; else None.
            batched: True to compute matrices of equal shape in a bucket together, False to compute one at a time.
            is_inner: True for the exchange over a tensor-parallel axis inside of another one, which agrees for both.

        Raises:
            ValueError: on all ranks, if their plans differ.
        """
        self.plan, self._axis, self._dtype, self._doing, self._batched = plan, axis, dtype, doing, batched
        communicator = unit.runtime.communicator
        self._communicator = communicator
        log = communicator.log_of(axis)
        self._fingerprints = GroupFingerprints(log, unit.unit_name, f"{doing} {plan.digest}")
        self._in_flight: dict[CollectiveCall, Tensor] = {}  # and the memory that each message is sent from
        self._replica = 0 if axis.replicas is None else axis.replicas.rank
        # The memory of the results: for each replica, its matrices by bucket and owner. The shards are sent from there.
        self._orders = [self._order(replica, plan.buckets) for replica in range(plan.replicas)]
        self._shapes_of_replicas = [self._shapes(indices, axis.rank) for indices in self._orders]
        self._most = max(map(_numel, self._shapes_of_replicas))
        log.allow_message_size(max(plan.slot_nbytes, self._most * dtype.itemsize))
        self._routes: list[_Route] = []
        start = 0
        for bucket in plan.buckets:
            self._routes.append(self._route(bucket, start))
            start += sum(self._routes[-1].sizes)
        axes = [axis] if across is None else [axis, across.axis]
        self.is_alone = is_inner or all(one.ranks * one.replica_count == 1 for one in axes)
        self._agreement = Agreement(communicator, axes, unit.unit_name, doing, f"{unit.global_id} {doing}")
        content = plan.digest if across is None else f"{plan.digest} {across.matrices}"
        if not self.is_alone and not self._agreement.all_equal(content.encode()):
            raise ValueError(
                f"{doing}: the ranks have different matrices, or give them different costs. Pass the same parameters on all "
                "ranks, and run the same backward on all of them, so that the same parameters have gradients."
            )
        self._inner: list[OwnerExchange] | None = None
        if across is not None:
            self._inner = [
                OwnerExchange(self._plan_across(route, across), unit, across.axis, dtype, doing, batched=batched, is_inner=True)
                for route in self._routes
            ]

    def serves(self, plan: OwnerPlan, unit: Unit) -> bool:
        """Return True if an exchange made anew for this plan would be equal, so that this one can be used."""
        return plan == self.plan and unit.runtime.communicator is self._communicator

    @property
    def owned(self) -> list[int]:
        """The matrices that this rank owns."""
        if self._inner is None:
            return [index for route in self._routes for index in route.owned]
        return [route.owned[index] for route, inner in zip(self._routes, self._inner) for index in inner.owned]

    @contextmanager
    def call(self) -> Iterator[None]:
        """A block for calls of this exchange, in which exceptions are reported to the other ranks."""
        with self._communicator.reporting_exceptions(self._doing):
            try:
                yield
            finally:
                self._leave()

    def run(self, fill: Fill, function: OnOwner) -> list[Tensor]:
        """Return this rank's part of each result. Collective.

        Args:
            fill: writes this rank's shards of matrices (by index) into places in a message.
            function: called on the owner with one matrix, or with those of equal shape in a bucket if this was made `batched`.

        Returns:
            For each matrix a tensor with the shape of the shard, in the dtype of the messages.
        """
        every, own = self._memory_of_results()
        there = self._send_to_owners(0, fill, own) if self._routes else None
        back: CollectiveCall | None = None
        for number, route in enumerate(self._routes):
            assert there is not None
            slot, call = there
            there = self._send_to_owners(number + 1, fill, own) if number + 1 < len(self._routes) else None
            self._wait(call)
            self._compute(number, slot, function)
            before, back = back, self._send(_of(route, own), slot, route.sizes, route.part_sizes, "results of owners")
            del slot
            self._wait(before)
        self._wait(back)
        return self._results(every)

    def to_owners(self, fill: Fill) -> dict[int, Tensor]:
        """Return the whole matrices that this rank owns, by index. Collective.

        Args:
            fill: writes this rank's shards, as for `run`.

        Returns:
            Tensors with memory of their own.
        """
        found: dict[int, Tensor] = {}
        there = self._send_to_owners(0, fill) if self._routes else None
        for number, route in enumerate(self._routes):
            assert there is not None
            slot, call = there
            there = self._send_to_owners(number + 1, fill) if number + 1 < len(self._routes) else None
            self._wait(call)
            wholes = self._assembled(number, slot)
            if self._inner is not None:
                wholes = {
                    route.owned[index]: whole for index, whole in self._inner[number].to_owners(_filling(route, wholes)).items()
                }
            found.update(wholes)
        return found

    def to_shards(self, wholes: Mapping[int, Tensor]) -> list[Tensor]:
        """Return this rank's shard of each matrix. Collective.

        Args:
            wholes: the matrices that this rank owns, by index.

        Returns:
            For each matrix a tensor with the shape of the shard, in the dtype of the messages.
        """
        every, own = self._memory_of_results()
        before: CollectiveCall | None = None
        for number, route in enumerate(self._routes):
            slot = self._new(sum(route.part_sizes))
            blocks = wholes
            if self._inner is not None:
                inner = self._inner[number]
                parts = inner.to_shards({index: wholes[route.owned[index]] for index in inner.owned})
                blocks = dict(zip(route.owned, parts))
            for index, places in self._parts(number, slot).items():
                self._fill(places, index, blocks[index])
            call = self._send(_of(route, own), slot, route.sizes, route.part_sizes, "results of owners")
            self._wait(before)
            before = call
        self._wait(before)
        return self._results(every)

    def confirm(self, content: bytes = b"") -> bool:
        """Wait until all ranks are here, and return True if their `content` is equal. Collective.

        No rank changes anything before. The host waits too: on an accelerator it runs ahead, and would queue the writes behind
        messages that a failed rank never sends.
        """
        return self.is_alone or self._agreement.all_equal(content)

    def maximum(self, tensor: Tensor) -> Tensor:
        """Return the element-wise maximum of small tensors over all ranks. Collective."""
        return tensor if self.is_alone else self._agreement.maximum(tensor)

    # --- work of the owner ---

    def _compute(self, number: int, slot: Tensor, function: OnOwner) -> None:
        """Replace the whole matrices of a bucket, of which `slot` has the parts, by the function's results."""
        route, parts = self._routes[number], self._parts(number, slot)
        if self._inner is not None:
            blocks = self._assembled(number, slot)

            def on_owner(numbers: Sequence[int], wholes: list[Tensor]) -> Sequence[Tensor]:
                return function([route.owned[one] for one in numbers], wholes)

            results = self._inner[number].run(_filling(route, blocks), on_owner)
            for index, result in zip(route.owned, results):
                self._fill(parts[index], index, result)
            return
        for batch in self._batches(route.owned):
            wholes = [self._whole(index, parts[index], slot) for index in batch]
            for index, whole, result in zip(batch, list(wholes), function(batch, wholes), strict=True):
                if _place(result) != _place(whole) and _place(result)[0] == _place(slot)[0]:
                    result = result.clone()  # another view of the memory that is written next
                self._fill(parts[index], index, result)
            del wholes, whole, result  # before the next ones are assembled

    def _batches(self, indices: Sequence[int]) -> list[list[int]]:
        """Return the matrices that are computed together. They depend on the plan alone, as rounding in batches does."""
        if not self._batched:
            return [[index] for index in indices]
        alike: dict[tuple[int, ...], list[int]] = {}
        for index in indices:
            alike.setdefault(self.plan.matrices[index].shape, []).append(index)
        return list(alike.values())

    def _parts(self, number: int, slot: Tensor) -> dict[int, list[Tensor]]:
        """Return the parts of each matrix of a bucket that this rank owns. `slot`: all parts, by rank and then by matrix."""
        route = self._routes[number]
        parts = _views(slot, route.part_shapes)
        return {index: parts[place :: len(route.owned)] for place, index in enumerate(route.owned)}

    def _assembled(self, number: int, slot: Tensor) -> dict[int, Tensor]:
        return {index: self._whole(index, parts, slot) for index, parts in self._parts(number, slot).items()}

    def _whole(self, index: int, parts: list[Tensor], slot: Tensor) -> Tensor:
        """Return a whole matrix of its parts, which are in `slot`."""
        matrix = self.plan.matrices[index]
        if matrix.dim == 0 and slot.numel() == prod(matrix.shape):  # in rank order, the parts are the matrix
            return slot.view(matrix.shape)
        return torch.cat(parts, matrix.dim)

    def _fill(self, parts: list[Tensor], index: int, whole: Tensor) -> None:
        """Copy a whole matrix to its parts."""
        dim = self.plan.matrices[index].dim
        for part, rows in zip(parts, whole.split([part.shape[dim] for part in parts], dim)):
            part.copy_(rows)

    def _plan_across(self, route: _Route, across: Across) -> OwnerPlan:
        """Return the plan of a bucket's blocks over the tensor-parallel axis."""
        plan = self.plan
        costs: dict[Matrix, float] = {across.matrices[index]: plan.costs[index] for index in route.owned}
        known: Cost = costs.__getitem__
        every = [across.matrices[index] for index in route.owned]
        return plan_owners(every, across.axis.ranks, replicas=1, cost=known, itemsize=plan.itemsize)

    # --- messages ---

    def _order(self, replica: int, buckets: Iterable[Sequence[int]]) -> list[int]:
        """Return the matrices that a replica owns, by bucket and owner."""
        plan = self.plan
        by_owner = (
            sorted(plan.of_replica(replica, bucket), key=lambda index: (plan.owners[index], index)) for bucket in buckets
        )
        return [index for order in by_owner for index in order]

    def _route(self, bucket: Sequence[int], start: int) -> _Route:
        plan, here = self.plan, self._axis.rank
        order = self._order(self._replica, [bucket])
        by_owner: list[list[int]] = [[] for _ in range(plan.ranks)]
        for index in order:
            by_owner[plan.owners[index] % plan.ranks].append(index)
        owned = by_owner[here]
        parts = [self._shapes(owned, rank) for rank in range(plan.ranks)]
        return _Route(
            start=start,
            shapes=self._shapes(order, here),
            sizes=[_numel(self._shapes(indices, here)) for indices in by_owner],
            order=order,
            owned=owned,
            part_shapes=[shape for shapes in parts for shape in shapes],
            part_sizes=[_numel(shapes) for shapes in parts],
        )

    def _shapes(self, indices: Sequence[int], rank: int) -> list[tuple[int, ...]]:
        """Return the shapes of a rank's shards of these matrices."""
        return [self.plan.matrices[index].shard_shape(self.plan.ranks, rank) for index in indices]

    def _memory_of_results(self) -> tuple[Tensor, Tensor]:
        """Return memory for this rank's parts of all results, and the part of it for what this replica computes."""
        every = self._new(self.plan.replicas * self._most)
        return every, every[self._replica * self._most :][: self._most]

    def _send_to_owners(self, number: int, fill: Fill, own: Tensor | None = None) -> tuple[Tensor, CollectiveCall | None]:
        """Start the message of a bucket to the owners. Return the memory in which the parts of own matrices arrive.

        The shards are sent from `own`, the memory of the results, where the results replace them.
        """
        route = self._routes[number]
        sent = self._new(sum(route.sizes)) if own is None else _of(route, own)
        received = self._new(sum(route.part_sizes))
        fill(route.order, _views(sent, route.shapes))
        return received, self._send(received, sent, route.part_sizes, route.sizes, "matrices to their owners")

    def _results(self, every: Tensor) -> list[Tensor]:
        """Return this rank's part of each result, after the all-gather over replicas."""
        plan = self.plan
        slots = [every[replica * self._most :][: self._most] for replica in range(plan.replicas)]
        if plan.replicas > 1 and self._most:
            self._share(every, slots[self._replica])
        results: list[Tensor] = [every] * len(plan.matrices)
        for order, slot, shapes in zip(self._orders, slots, self._shapes_of_replicas):
            for index, part in zip(order, _views(slot, shapes)):
                results[index] = part
        return results

    def _share(self, every: Tensor, own: Tensor) -> None:
        """All-gather the results over the replicas, in place. Each replica computed a part of the matrices."""
        replicas, communicator = self._axis.replicas, self._communicator
        assert replicas is not None
        start = communicator.collectives.of_process_group(replicas.group).gatherer([every], [own])
        start = self._counted("all_gather", every, self.plan.replicas, start)
        communicator.send(communicator.all_reduce_stream, self._fingerprints, "results over replicas", start).wait()

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
        collectives: Any = communicator.collectives.of_process_group(group)  # built-in ones: users' own need no all-to-all
        all_to_all = partial(collectives.all_to_all, received, sent, received_sizes, sent_sizes)
        start = self._counted(_KIND, sent, self.plan.ranks, all_to_all)
        call = communicator.send(communicator.all_gather_stream, self._fingerprints, action, start)
        self._in_flight[call] = sent
        return call

    def _counted(self, kind: str, tensor: Tensor, ranks: int, start: Callable[[], StartedWork]) -> Callable[[], StartedWork]:
        """Return `start` with a record of its message."""

        def counted() -> StartedWork:
            self._communicator.traffic.record(kind, [tensor], ranks)
            return start()

        return counted

    def _wait(self, call: CollectiveCall | None) -> None:
        if call is not None:
            call.wait()
            del self._in_flight[call]

    def _leave(self) -> None:
        """Behind an exception: order the compute stream behind messages in flight, whose memory is about to be freed.

        On the CPU messages keep their memory alive themselves, and may never come.
        """
        left, self._in_flight = self._in_flight, {}
        for inner in self._inner or ():
            inner._leave()
        if self._communicator.async_device is not None:
            for call in left:
                with suppress(Exception):
                    call.wait()


def _of(route: _Route, own: Tensor) -> Tensor:
    """Return the part of a bucket in the memory of the results."""
    return own[route.start :][: sum(route.sizes)]


def _filling(route: _Route, blocks: Mapping[int, Tensor]) -> Fill:
    """Return a function that writes blocks of a bucket into a message, by their numbers in `route.owned`."""

    def fill(numbers: Sequence[int], places: Sequence[Tensor]) -> None:
        copy_into(places, [blocks[route.owned[number]] for number in numbers])

    return fill


def copy_into(places: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copy tensors into places in a message."""
    if places:
        torch._foreach_copy_([*places], [*tensors])


def _place(tensor: Tensor) -> tuple[int, ...]:
    """Return the address of the storage, and where in it each element is."""
    return tensor.untyped_storage().data_ptr(), int(tensor.storage_offset()), *tensor.stride()


def _numel(shapes: Iterable[tuple[int, ...]]) -> int:
    return sum(map(prod, shapes))


def _views(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Return tensors of these shapes, one behind the other from the start of `flat`."""
    sizes = [prod(shape) for shape in shapes]
    return [part.view(shape) for part, shape in zip(flat[: sum(sizes)].split(sizes), shapes)]


__all__ = ["Across", "Fill", "OwnerExchange", "copy_into"]
