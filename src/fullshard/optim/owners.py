"""Owners of whole matrices: which rank computes with which matrix, and the messages in which matrices travel. Integers only."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from fullshard.core import Extent
from fullshard.errors import check_positive_int

BUCKET_NBYTES = 32 << 20
"""Limit of the whole matrices of one owner in a bucket, bytes; a larger matrix is the only one there."""

WIRE_ITEMSIZE = 2  # bytes of an element on its way: Newton-Schulz reads and returns bfloat16


@dataclass(frozen=True, slots=True)
class Matrix:
    """One sharded matrix.

    Args:
        name: its qualified name.
        shape: its whole shape, (rows, columns).
        dim: the dim that is sharded, by torch.chunk's rule.
    """

    name: str
    shape: tuple[int, int]
    dim: int = 0

    @property
    def cost(self) -> int:
        """Multiplications of one Newton-Schulz iteration, up to a factor: three products of the smaller side."""
        small, large = sorted(self.shape)
        return small * small * (2 * large + small)

    def shard_shape(self, ranks: int, rank: int) -> tuple[int, int]:
        """Return the shape of the shard of one rank."""
        rows = Extent.of_rank(self.shape[self.dim], ranks=ranks, rank=rank).rows
        return (rows, self.shape[1]) if self.dim == 0 else (self.shape[0], rows)

    def shard_numel(self, ranks: int, rank: int) -> int:
        """Return the elements of the shard of one rank."""
        return prod(self.shard_shape(ranks, rank))


@dataclass(frozen=True, slots=True)
class OwnerPlan:
    """Which rank owns which matrix, and in which bucket each matrix travels. Made by `plan_owners`; print it for a summary.

    A step sends every shard of a matrix to the owner, who computes with the whole matrix, and sends each rank its part of the
    result. The matrices of a bucket travel in one message there and in one back, and while the owners compute with one bucket
    the messages of the next one are under way. Replicas own different matrices, and share the results at the end.

    Args:
        ranks: number of ranks over which each matrix is sharded.
        replicas: number of replicas of the shards.
        matrices: the matrices.
        owners: the owner of each matrix: its index among the shards, plus `ranks` times its replica.
        buckets: indices of the matrices of each bucket, in ascending order.
    """

    ranks: int
    replicas: int
    matrices: tuple[Matrix, ...]
    owners: tuple[int, ...]
    buckets: tuple[tuple[int, ...], ...]

    @property
    def loads(self) -> tuple[int, ...]:
        """Cost of the matrices of each owner."""
        loads = [0] * (self.ranks * self.replicas)
        for matrix, owner in zip(self.matrices, self.owners):
            loads[owner] += matrix.cost
        return tuple(loads)

    @property
    def imbalance(self) -> float:
        """Cost of the rank with the most, divided by the mean; 1.0 is perfect."""
        loads = self.loads
        total = sum(loads)
        return max(loads) * len(loads) / total if total else 1.0

    def of_replica(self, replica: int, indices: Sequence[int] | None = None) -> list[int]:
        """Return the indices of the matrices that a replica owns.

        Args:
            replica: the replica, from 0.
            indices: the matrices to choose from; None for all.

        Returns:
            The indices, in the order of `indices`.
        """
        chosen = range(len(self.matrices)) if indices is None else indices
        return [index for index in chosen if self.owners[index] // self.ranks == replica]

    def sent_nbytes(self, rank: int, replica: int = 0) -> int:
        """Return the bytes that a rank sends to other ranks in a step: to owners, back, and to other replicas, in bfloat16.

        Args:
            rank: its index among the shards, from 0.
            replica: its replica, from 0.

        Returns:
            The bytes.
        """
        numel = 0
        for index in self.of_replica(replica):
            matrix, owner = self.matrices[index], self.owners[index] % self.ranks
            mine = matrix.shard_numel(self.ranks, rank)
            numel += prod(matrix.shape) - mine if owner == rank else mine
            numel += (self.replicas - 1) * mine
        return numel * WIRE_ITEMSIZE

    @property
    def slot_nbytes(self) -> int:
        """Bytes of the largest bucket's matrices on one owner, in bfloat16. Two buckets are in memory at once."""
        most = 0
        for bucket in self.buckets:
            held = [0] * (self.ranks * self.replicas)
            for index in bucket:
                held[self.owners[index]] += prod(self.matrices[index].shape) * WIRE_ITEMSIZE
            most = max(most, *held)
        return most

    @property
    def digest(self) -> str:
        """Hash of the plan, to compare it between ranks."""
        parts = self.ranks, self.replicas, self.matrices, self.owners, self.buckets
        return hashlib.sha1(repr(parts).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        sent = [self.sent_nbytes(rank, replica) for rank in range(self.ranks) for replica in range(self.replicas)]
        counts = [self.owners.count(owner) for owner in range(self.ranks * self.replicas)]
        where = f"{self.ranks} ranks" if self.replicas == 1 else f"{self.replicas} x {self.ranks} ranks"
        return (
            f"{len(self.matrices)} matrices on {where}, {min(counts)} to {max(counts)} each, in buckets: "
            f"{len(self.buckets)}\nthe busiest rank computes {self.imbalance:.2f} times the mean\na rank sends at most "
            f"{max(sent) / 1e6:,.1f} MB per step, and holds at most {2 * self.slot_nbytes / 1e6:,.1f} MB of whole matrices"
        )


def plan_owners(
    matrices: Iterable[tuple[str, Any] | Matrix], ranks: int, *, replicas: int = 1, bucket_nbytes: int = BUCKET_NBYTES
) -> OwnerPlan:
    """Plan which rank computes with which whole matrix in a step of Muon. It needs no process group.

    The longest computation goes to the rank with the least so far; of equal ranks to that with the fewest bytes, then to the
    first one. The plan depends on names, shapes and the number of ranks only, so it is equal on all ranks.

    Args:
        matrices: (name, shape) or (name, parameter) of each matrix, or `Matrix` objects; shapes of two dims. A model's
            parameters of other dims are for another optimizer, and left out here.
        ranks: number of ranks over which each matrix is sharded.
        replicas: number of replicas of the shards, on a hybrid mesh.
        bucket_nbytes: bytes of whole matrices (bfloat16) that one owner has in a bucket, unless one matrix has more.

    Returns:
        The plan.

    Raises:
        ValueError: if a matrix has not two dims, or a number is less than 1.

    Example:
        >>> print(plan_owners([("up", (4096, 1024)), ("down", (1024, 4096)), ("out", (1024, 1024))], ranks=2))
        3 matrices on 2 ranks, 1 to 2 each, in buckets: 1
        the busiest rank computes 1.14 times the mean
        a rank sends at most 9.4 MB per step, and holds at most 21.0 MB of whole matrices

    Source: longest processing time first, Graham 1969 (doi 10.1137/0117039).
    """
    for name, number in (("ranks", ranks), ("replicas", replicas), ("bucket_nbytes", bucket_nbytes)):
        check_positive_int(name, number)
    found = tuple(one if isinstance(one, Matrix) else _matrix(*one) for one in matrices)
    owners = [0] * len(found)
    loads = [(0, 0, owner) for owner in range(ranks * replicas)]  # (cost, elements, owner), a heap
    for index in sorted(range(len(found)), key=lambda index: (-found[index].cost, -prod(found[index].shape), index)):
        cost, numel, owner = heapq.heappop(loads)
        owners[index] = owner
        heapq.heappush(loads, (cost + found[index].cost, numel + prod(found[index].shape), owner))
    return OwnerPlan(ranks, replicas, found, tuple(owners), _buckets(found, owners, bucket_nbytes))


def _matrix(name: str, value: Any) -> Matrix:
    shape = tuple(getattr(value, "shape", value))
    if len(shape) != 2:
        raise ValueError(f"Expected a matrix of two dims as '{name}', got shape {shape}. Leave it to another optimizer.")
    return Matrix(name, (int(shape[0]), int(shape[1])))


def _buckets(matrices: Sequence[Matrix], owners: Sequence[int], bucket_nbytes: int) -> tuple[tuple[int, ...], ...]:
    """Return the buckets. Each owner has a part of every bucket, as long as it has matrices left."""
    buckets: list[list[int]] = []
    for one in sorted(set(owners)):
        number, room = -1, 0
        for index in (index for index, owner in enumerate(owners) if owner == one):
            nbytes = prod(matrices[index].shape) * WIRE_ITEMSIZE
            if number < 0 or nbytes > room:
                number, room = number + 1, bucket_nbytes
            room -= nbytes
            if number == len(buckets):
                buckets.append([])
            buckets[number].append(index)
    return tuple(tuple(sorted(bucket)) for bucket in buckets)


__all__ = ["Matrix", "OwnerPlan", "plan_owners"]
