"""The exchange with owners: shards of matrices travel to the ranks that own them, and parts of the results travel back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from fullshard.core import Agreement, CollectiveCall, GroupFingerprints, ShardAxis, Started, Unit
from fullshard.errors import StateError
from fullshard.optim.owners import Matrix, OwnerPlan, plan_owners

Shape = tuple[int, ...]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Route:
    """Both messages of one bucket: shards to the owners, and parts of the results back, in the same order and sizes."""

    order: list[int]  # this replica's matrices, by owner
    shapes: list[Shape]  # shapes of this rank's shards, in this order
    sizes: list[int]  # elements of this rank's shards, by owner
    owned: list[int]  # the matrices that this rank owns
    part_shapes: list[Shape]  # shapes of their shards, by rank and then by matrix
    part_sizes: list[int]  # elements of their shards, by rank

    @property
    def numel(self) -> int:
        """Elements of this rank's shards."""
        return sum(self.sizes)

    @property
    def owned_numel(self) -> int:
        """Elements of the whole matrices that this rank owns."""
        return sum(self.part_sizes)


class Routes:
    """The routes of all buckets of a plan for one rank, and the memory of the results."""

    def __init__(self, plan: OwnerPlan, rank: int, replica: int) -> None:
        """`rank`: index among the shards. `replica`: that of this rank."""
        # for each replica, its matrices by bucket and owner: the order of this rank's parts of the results
        self.orders = [_order(plan, number, plan.buckets) for number in range(plan.replicas)]
        # for each replica, the shapes of this rank's shards in this order
        self.shapes = [_shapes(plan, indices, rank) for indices in self.orders]
        # elements of this rank's parts of one replica's results, padded to those of the largest replica, since the all-gather
        # over replicas needs equal sizes
        self.results_numel = max(map(numel_of, self.shapes))
        self.buckets = [_route(plan, rank, replica, bucket) for bucket in plan.buckets]  # the routes, by bucket


def _order(plan: OwnerPlan, replica: int, buckets: Iterable[Sequence[int]]) -> list[int]:
    """Return the matrices that a replica owns, by bucket and owner."""
    ordered = (index for bucket in buckets for index in sorted(bucket, key=lambda index: (plan.owners[index], index)))
    return [index for index in ordered if plan.owners[index] // plan.ranks == replica]


def _route(plan: OwnerPlan, rank: int, replica: int, bucket: Sequence[int]) -> Route:
    order = _order(plan, replica, [bucket])
    by_owner: list[list[int]] = [[] for _ in range(plan.ranks)]
    for index in order:
        by_owner[plan.owners[index] % plan.ranks].append(index)
    owned = by_owner[rank]
    parts = [_shapes(plan, owned, other) for other in range(plan.ranks)]
    return Route(
        order=order,
        shapes=_shapes(plan, order, rank),
        sizes=[numel_of(_shapes(plan, indices, rank)) for indices in by_owner],
        owned=owned,
        part_shapes=[shape for shapes in parts for shape in shapes],
        part_sizes=[numel_of(shapes) for shapes in parts],
    )


def _shapes(plan: OwnerPlan, indices: Iterable[int], rank: int) -> list[Shape]:
    """Return the shapes of a rank's shards of these matrices."""
    return [plan.matrices[index].shard_shape(plan.ranks, rank) for index in indices]


def numel_of(shapes: Iterable[Shape]) -> int:
    """Return the elements of tensors of these shapes."""
    return sum(map(prod, shapes))


Fill = Callable[[Sequence[int], list[Tensor]], None]
"""`fill(indices, places)` writes this rank's shard of matrix `indices[i]` into `places[i]`, which has its shape."""

OnOwner = Callable[[Sequence[int], list[Tensor]], Sequence[Tensor]]
"""`function(indices, wholes)` returns a tensor of the same shape for each whole matrix. It may overwrite `wholes`."""


def renumbered(function: Callable[[Sequence[int], list[Tensor]], T], indices: Sequence[int]) -> Callable[..., T]:
    """Return a function that gets positions in `indices`, and calls `function` with the indices there."""
    return lambda numbers, tensors: function([indices[number] for number in numbers], tensors)


class OwnerExchange:
    """Computes a function of whole matrices, each on its owner.

        shards of bucket k+1   --to the owners-->       (under way while bucket k is computed)
        whole matrices of bucket k: function            (on the owner)
        results of bucket k    --back to the shards-->  (under way while bucket k+1 is computed)

    `run` does all of this. `to_owners` and `to_shards` are its two directions, for callers who compute with all matrices of an
    owner at once. None of them changes a tensor of the caller, who may write parameters and states after `confirm`. All ranks
    of the axis must make the same calls, in a block of `call()`; each message is in the collective log. If a call raises on one
    rank, the watchdog ends the waits of the others, which raise an error that names it.
    """

    def __init__(
        self,
        plan: OwnerPlan,  # equal on all ranks
        unit: Unit,  # of the first matrix, whose name is in errors
        axis: ShardAxis,  # that the matrices are sharded over
        dtype: torch.dtype,  # of the messages and of the function's results
        doing: str,  # the call that needs the exchange, for errors
        *,
        # Tensor parallelism: `plan` distributes blocks of matrices, which their owners exchange over this axis. `wholes`: for
        # each block the matrix that the blocks of all tensor-parallel ranks form.
        tensor_parallel: ShardAxis | None = None,
        wholes: Sequence[Matrix] = (),
        batched: bool = False,  # compute matrices of equal shape in a bucket together
        # Inside of another exchange, over the tensor-parallel axis. The outer one compares plans and confirms for both: ranks
        # with the same shard of the outer axis derive the inner plan from the same route.
        is_inner: bool = False,
    ) -> None:
        """Compare the plan between the ranks. Collective."""
        self.plan, self._axis, self._dtype, self._doing, self._batched = plan, axis, dtype, doing, batched
        communicator = unit.runtime.communicator
        self._communicator = communicator
        log = communicator.log_of(axis)
        self._fingerprints = GroupFingerprints(log, unit.unit_name, f"{doing} {plan.digest}")
        self._in_flight: dict[CollectiveCall, Tensor] = {}  # by call: the memory it is sent from
        self._replica = 0 if axis.replicas is None else axis.replicas.rank
        self._routes = Routes(plan, axis.rank, self._replica)
        axes = [axis] if tensor_parallel is None else [axis, tensor_parallel]
        self.is_on_one_rank = all(one.ranks * one.replica_count == 1 for one in axes)
        self._agrees = not (is_inner or self.is_on_one_rank)
        self._agreement = Agreement(communicator, axes, unit.unit_name, doing, f"{unit.global_id} {doing}")
        content = f"{plan.digest} {dtype} {batched} {wholes}"
        if self._agrees and not self._agreement.all_equal(content.encode()):
            raise ValueError(
                f"{doing}: the ranks have different matrices, or give them different costs. Pass the same parameters and "
                "options on all ranks, and run the same backward on all of them, so that the same parameters have gradients."
            )
        self._inner: list[OwnerExchange] | None = None  # of each bucket
        if tensor_parallel is not None:
            self._inner = []
            for route in self._routes.buckets:
                every = [wholes[index] for index in route.owned]
                costs = {wholes[index]: plan.costs[index] for index in route.owned}
                inner = plan_owners(every, tensor_parallel.ranks, cost=costs.__getitem__, itemsize=plan.itemsize)
                self._inner.append(OwnerExchange(inner, unit, tensor_parallel, dtype, doing, batched=batched, is_inner=True))

    def serves(self, plan: OwnerPlan, unit: Unit) -> bool:
        """Return True if an exchange made anew for this plan would be equal, so that this one can be used."""
        return plan == self.plan and unit.runtime.communicator is self._communicator

    @property
    def owned(self) -> list[int]:
        """The matrices that this rank owns."""
        routes = self._routes.buckets
        if self._inner is None:
            return [index for route in routes for index in route.owned]
        return [route.owned[index] for route, inner in zip(routes, self._inner) for index in inner.owned]

    @contextmanager
    def call(self) -> Iterator[None]:
        """A block for calls of this exchange, in which exceptions are reported to the other ranks."""
        with self._communicator.reporting_exceptions(self._doing):
            try:
                yield
            finally:
                self._abandon()

    def run(self, fill: Fill, function: OnOwner) -> list[Tensor]:
        """Return this rank's part of each result. Collective."""
        results, places = self._memory_of_results()
        back: CollectiveCall | None = None
        # The shards are sent from the memory where the results arrive. So nothing needs memory of its own on this side.
        for number, slot in self._arriving(fill, places):
            self._compute(number, slot, function)
            previous, back = back, self._send_back(number, slot, places)
            del slot
            self._wait(previous)  # frees its slot: one bucket arrives, one is computed, one leaves, and no more are in memory
        self._wait(back)
        return self._results(results)

    def to_owners(self, fill: Fill) -> dict[int, Tensor]:
        """Return the whole matrices that this rank owns, by index. Collective."""
        found: dict[int, Tensor] = {}
        for number, slot in self._arriving(fill):
            route = self._routes.buckets[number]
            wholes = self._assembled(route, slot)
            if self._inner is not None:
                of_blocks = self._inner[number].to_owners(_fill_from(route, wholes))
                wholes = {route.owned[index]: whole for index, whole in of_blocks.items()}
            found.update(wholes)
        return found

    def to_shards(self, wholes: Mapping[int, Tensor]) -> list[Tensor]:
        """Return this rank's shard of each matrix. Collective."""
        results, places = self._memory_of_results()
        back: CollectiveCall | None = None
        for number, route in enumerate(self._routes.buckets):
            slot = self._new(route.owned_numel)
            blocks = wholes
            if self._inner is not None:
                inner = self._inner[number]
                parts = inner.to_shards({index: wholes[route.owned[index]] for index in inner.owned})
                blocks = dict(zip(route.owned, parts))
            for index, parts_of_matrix in self._parts(route, slot).items():
                self._copy_to_parts(parts_of_matrix, index, blocks[index])
            previous, back = back, self._send_back(number, slot, places)
            del slot
            self._wait(previous)
        self._wait(back)
        return self._results(results)

    def confirm(self, content: bytes = b"") -> bool:
        """Wait until all ranks are here, and return True if their `content` is equal. Collective.

        Call this before writing. The host waits here, too: on an accelerator it runs ahead, and would queue the writes before
        it knows whether another rank failed.
        """
        return not self._agrees or self._agreement.all_equal(content)

    def maximum(self, tensor: Tensor) -> Tensor:
        """Return the element-wise maximum of small tensors over all ranks. Collective."""
        return self._agreement.maximum(tensor) if self._agrees else tensor

    # --- work of the owner ---

    def _compute(self, number: int, slot: Tensor, function: OnOwner) -> None:
        """Replace the whole matrices of a bucket, of which `slot` has the parts, by the function's results."""
        route = self._routes.buckets[number]
        parts = self._parts(route, slot)
        if self._inner is not None:
            fill = _fill_from(route, self._assembled(route, slot))
            results = self._inner[number].run(fill, renumbered(function, route.owned))
            for index, result in zip(route.owned, results):
                self._copy_to_parts(parts[index], index, result)
            return
        for batch in self._batches(route.owned):
            wholes = [self._whole(index, parts[index], slot) for index in batch]
            layouts = [_storage_layout(whole) for whole in wholes]
            for index, layout, result in zip(batch, layouts, function(batch, wholes), strict=True):
                found = _storage_layout(result)
                if found != layout and found[0] == _storage_layout(slot)[0]:
                    # The result is another view of the slot, such as a transposed one: copying part by part would read what
                    # it has overwritten.
                    result = result.clone()
                self._copy_to_parts(parts[index], index, result)
            del wholes, result  # before the next ones are assembled

    def _batches(self, indices: Sequence[int]) -> list[list[int]]:
        """Return the matrices that are computed together.

        This depends on the plan alone, so that a matrix is in a batch with the same others in each step: products in batches
        may round otherwise.
        """
        if not self._batched:
            return [[index] for index in indices]
        # Of a stack of experts, a piece of shape (1, 3, 5) is a matrix of 3 x 5, of other parameters one of 1 x 15.
        alike: dict[tuple[Shape, Shape], list[int]] = {}
        for index in indices:
            matrix = self.plan.matrices[index]
            alike.setdefault((matrix.shape, matrix.own_shape), []).append(index)
        return list(alike.values())

    def _parts(self, route: Route, slot: Tensor) -> dict[int, list[Tensor]]:
        """Return the parts of each matrix of a bucket that this rank owns. `slot`: all parts, by rank and then by matrix."""
        parts = _views(slot, route.part_shapes)
        return {index: parts[place :: len(route.owned)] for place, index in enumerate(route.owned)}

    def _assembled(self, route: Route, slot: Tensor) -> dict[int, Tensor]:
        """Return the whole matrices of a bucket that this rank owns, by index."""
        return {index: self._whole(index, parts, slot) for index, parts in self._parts(route, slot).items()}

    def _whole(self, index: int, parts: list[Tensor], slot: Tensor) -> Tensor:
        """Return a whole matrix of its parts, which are in `slot`."""
        matrix = self.plan.matrices[index]
        if matrix.dim == 0 and slot.numel() == prod(matrix.shape):  # in rank order, the parts are the matrix
            return slot.view(matrix.shape)
        return torch.cat(parts, matrix.dim)

    def _copy_to_parts(self, parts: list[Tensor], index: int, whole: Tensor) -> None:
        """Copy a whole matrix to its parts."""
        dim = self.plan.matrices[index].dim
        for part, rows in zip(parts, whole.split([part.shape[dim] for part in parts], dim)):
            part.copy_(rows)

    # --- messages ---

    def _memory_of_results(self) -> tuple[Tensor, list[Tensor]]:
        """Return memory for this rank's parts of all results, by replica, and the place in it of each bucket's results."""
        replicas, numel = self.plan.replicas, self._routes.results_numel
        results = self._new(replicas * numel).view(replicas, numel)
        return results, _views(results[self._replica], [(route.numel,) for route in self._routes.buckets])

    def _arriving(self, fill: Fill, places: Sequence[Tensor] | None = None) -> Iterator[tuple[int, Tensor]]:
        """Yield each bucket's number and slot when its shards have arrived, while those of the next bucket are under way.

        `places`: the shards of each bucket are sent from there; None to allocate memory for each message.
        """
        if self._communicator.capturing:
            raise StateError(
                f"In {self._doing} the host waits for all ranks, which a graph of the device cannot hold. Leave it out."
            )
        sent: list[tuple[Tensor, CollectiveCall | None]] = []
        routes = self._routes.buckets
        for number in range(len(routes)):
            for ahead in range(number + len(sent), min(number + 2, len(routes))):
                route = routes[ahead]
                slot = self._new(route.owned_numel)
                shards = self._new(route.numel) if places is None else places[ahead]
                fill(route.order, _views(shards, route.shapes))
                sent.append((slot, self._send(slot, shards, route.part_sizes, route.sizes, "matrices to their owners")))
                del slot, shards
            self._wait(sent[0][1])
            yield number, sent.pop(0)[0]  # without a reference from here, so that the caller can free it

    def _send_back(self, number: int, slot: Tensor, places: Sequence[Tensor]) -> CollectiveCall | None:
        """Start the message of a bucket's results."""
        route = self._routes.buckets[number]
        return self._send(places[number], slot, route.sizes, route.part_sizes, "results of owners")

    def _results(self, memory: Tensor) -> list[Tensor]:
        """Return this rank's part of each result, after the all-gather over replicas."""
        if self.plan.replicas > 1 and memory.numel():
            self._share(memory)
        results: list[Tensor] = [memory] * len(self.plan.matrices)
        for order, of_replica, shapes in zip(self._routes.orders, memory, self._routes.shapes):
            for index, part in zip(order, _views(of_replica, shapes)):
                results[index] = part
        return results

    def _share(self, memory: Tensor) -> None:
        """All-gather the results over the replicas, in place. Each replica computed a part of the matrices."""
        replicas, communicator = self._axis.replicas, self._communicator
        assert replicas is not None
        start = communicator.collectives_of_group(replicas.group).gatherer([memory.view(-1)], [memory[self._replica]])
        start = self._counted("all_gather", memory, self.plan.replicas, start)
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
        # The built-in collectives, since custom ones need not implement all_to_all.
        collectives: Any = communicator.collectives_of_group(group)
        all_to_all = partial(collectives.all_to_all, received, sent, received_sizes, sent_sizes)
        start = self._counted("all_to_all", sent, self.plan.ranks, all_to_all)
        call = communicator.send(communicator.all_gather_stream, self._fingerprints, action, start)
        self._in_flight[call] = sent
        return call

    def _counted(self, kind: str, tensor: Tensor, ranks: int, start: Callable[[], Started]) -> Callable[[], Started]:
        """Return `start` with a record of its message, which `record()` expects within."""

        def counted() -> Started:
            self._communicator.traffic.record(kind, [tensor], ranks)
            return start()

        return counted

    def _wait(self, call: CollectiveCall | None) -> None:
        if call is not None:
            call.wait()
            del self._in_flight[call]

    def _abandon(self) -> None:
        """Order the compute stream behind the messages that an exception left in flight, whose memory is about to be freed.

        On the CPU messages keep their memory alive themselves, and may never come.
        """
        left, self._in_flight = self._in_flight, {}
        for inner in self._inner or ():
            inner._abandon()
        if self._communicator.async_device is not None:
            for call in left:
                with suppress(Exception):
                    call.wait()


def _fill_from(route: Route, blocks: Mapping[int, Tensor]) -> Fill:
    """Return a function that writes blocks of a bucket into a message, by their numbers in `route.owned`."""
    return renumbered(lambda indices, places: copy_into(places, [blocks[index] for index in indices]), route.owned)


def copy_into(places: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copy tensors into places in a message."""
    if places:
        torch._foreach_copy_([*places], [*tensors])


def _storage_layout(tensor: Tensor) -> tuple[int, ...]:
    """Return the address of the storage, and where in it each element is."""
    return tensor.untyped_storage().data_ptr(), int(tensor.storage_offset()), *tensor.stride()


def _views(flat: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    """Return tensors of these shapes, one after the other from the start of `flat`."""
    sizes = [prod(shape) for shape in shapes]
    return [part.view(shape) for part, shape in zip(flat[: sum(sizes)].split(sizes), shapes)]
