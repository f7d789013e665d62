"""The messages of an owner plan as one rank sends and receives them: orders, shapes and sizes. No tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from fullshard.optim.owners import OwnerPlan

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Route:
    """Both messages of one bucket: shards to the owners, and parts of the results back, in the same order and sizes.

    Attributes:
        order: this replica's matrices, by owner.
        shapes: shapes of this rank's shards, in this order.
        sizes: elements of this rank's shards, by owner.
        start: position of this rank's shards in the memory of all results, elements.
        owned: the matrices that this rank owns.
        part_shapes: shapes of their shards, by rank and then by matrix.
        part_sizes: elements of their shards, by rank.
    """

    order: list[int]
    shapes: list[Shape]
    sizes: list[int]
    start: int
    owned: list[int]
    part_shapes: list[Shape]
    part_sizes: list[int]

    @property
    def numel(self) -> int:
        """Elements of this rank's shards."""
        return sum(self.sizes)

    @property
    def owned_numel(self) -> int:
        """Elements of the whole matrices that this rank owns."""
        return sum(self.part_sizes)


class Routes:
    """The routes of all buckets of a plan for one rank, and the memory of the results.

    Attributes:
        buckets: the routes, by bucket.
        orders: for each replica, its matrices by bucket and owner: the order of this rank's parts of the results.
        shapes: for each replica, the shapes of this rank's shards in this order.
        results_numel: elements of this rank's parts of one replica's results, padded to those of the largest replica, since the
            all-gather over replicas needs equal sizes.
    """

    __slots__ = ("buckets", "orders", "results_numel", "shapes")

    def __init__(self, plan: OwnerPlan, rank: int, replica: int) -> None:
        """`rank`: index among the shards. `replica`: that of this rank."""
        self.orders = [_order(plan, number, plan.buckets) for number in range(plan.replicas)]
        self.shapes = [_shapes(plan, indices, rank) for indices in self.orders]
        self.results_numel = max(map(numel_of, self.shapes))
        self.buckets: list[Route] = []
        start = 0
        for bucket in plan.buckets:
            self.buckets.append(_route(plan, rank, replica, bucket, start))
            start += self.buckets[-1].numel


def _order(plan: OwnerPlan, replica: int, buckets: Iterable[Sequence[int]]) -> list[int]:
    """Return the matrices that a replica owns, by bucket and owner."""
    ordered: list[int] = []
    for bucket in buckets:
        ordered += sorted(plan.of_replica(replica, bucket), key=lambda index: (plan.owners[index], index))
    return ordered


def _route(plan: OwnerPlan, rank: int, replica: int, bucket: Sequence[int], start: int) -> Route:
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
        start=start,
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
