"""Owners of whole matrices: which rank computes with which matrix, and in which messages they travel. No tensors."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf, prod
from typing import Any

from fullshard.core import Extent
from fullshard.errors import check_int

BUCKET_NBYTES = 32 << 20
"""Limit of the whole matrices of one owner in a bucket, bytes, unless the largest matrix is larger."""

H100_FLOPS = 534e12
"""Flop/s of large bfloat16 products on an H100, as `explain` expects them."""

_FLOPS = 2 * 5  # flop per unit of `Matrix.cost`: a multiplication and an addition, in five iterations
WIRE_ITEMSIZE = 2  # bytes of an element on its way: Newton-Schulz reads and returns bfloat16


@dataclass(frozen=True, slots=True)
class Matrix:
    """One sharded matrix: a parameter, or a part of one (a head, q of a fused qkv, an expert of a stack).

        parameter, sharded over 3 ranks    0 1 2 3 / 4 5 6 7 / 8 9      length=10
        the matrix in it                         3 / 4 5 6              start=3, shape[dim]=4; ranks 0 and 1 have shards

    Args:
        name: its qualified name.
        shape: its whole shape, (rows, columns), or more dims; those after the first count as columns.
        dim: the dim that is sharded, by torch.chunk's rule.
        start: where it begins in its parameter, along `dim`.
        length: length of its parameter along `dim`; None if it has all of it.
        is_piece: True for a part of a parameter. `own_shape` of a part drops a leading dim of 1, as of one expert of a stack.
    """

    name: str
    shape: tuple[int, ...]
    dim: int = 0
    start: int = 0
    length: int | None = None
    is_piece: bool = False

    @property
    def own_shape(self) -> tuple[int, ...]:
        """Shape without the leading dim of 1 of a part."""
        return self.shape[1:] if self.is_piece and len(self.shape) > 2 and self.shape[0] == 1 else self.shape

    @property
    def sides(self) -> tuple[int, int]:
        """Rows and columns."""
        rows, *columns = self.own_shape
        return rows, prod(columns)

    @property
    def cost(self) -> int:
        """Multiplications of one Newton-Schulz iteration: with s the smaller side and l the larger, s²l + s³ + s²l."""
        small, large = sorted(self.sides)
        return small * small * (2 * large + small)

    def rows(self, ranks: int, rank: int) -> range:
        """Return the rows of one rank's shard of the matrix, along `dim`.

        Args:
            ranks: number of ranks over which the parameter is sharded.
            rank: the rank among them, from 0.

        Returns:
            The rows, counted from the start of the matrix.
        """
        own = self.shape[self.dim]
        extent = Extent.of_rank(own if self.length is None else self.length, ranks=ranks, rank=rank)
        first = min(max(extent.start - self.start, 0), own)
        return range(first, min(max(extent.stop - self.start, first), own))

    def shard_shape(self, ranks: int, rank: int) -> tuple[int, ...]:
        """Return the shape of the shard of one rank.

        Args:
            ranks: number of ranks over which the parameter is sharded.
            rank: the rank among them, from 0.

        Returns:
            Its rows along `dim`, and all of the other dims.
        """
        return (*self.shape[: self.dim], len(self.rows(ranks, rank)), *self.shape[self.dim + 1 :])

    def holder(self, ranks: int) -> int | None:
        """Return the rank that has the whole matrix.

        Args:
            ranks: number of ranks over which the parameter is sharded.

        Returns:
            The rank; None if several ranks have rows of it.
        """
        length, own = self.shape[self.dim] if self.length is None else self.length, self.shape[self.dim]
        chunk = Extent.of_rank(length, ranks=ranks, rank=0).chunk
        first = self.start // chunk if chunk else 0
        return first if self.start + own <= (first + 1) * chunk else None


Cost = Callable[[Matrix], float]


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
        costs: time to compute with each matrix, in any unit.
        owners: the owner of each matrix: its index among the shards, plus `ranks` times its replica.
        buckets: indices of the matrices of each bucket, in ascending order.
        itemsize: bytes of an element on its way.
    """

    ranks: int
    replicas: int
    matrices: tuple[Matrix, ...]
    costs: tuple[float, ...]
    owners: tuple[int, ...]
    buckets: tuple[tuple[int, ...], ...]
    itemsize: int = WIRE_ITEMSIZE

    @property
    def loads(self) -> tuple[float, ...]:
        """Cost of the matrices of each owner."""
        loads: list[float] = [0] * (self.ranks * self.replicas)
        for cost, owner in zip(self.costs, self.owners):
            loads[owner] += cost
        return tuple(loads)

    @property
    def imbalance(self) -> float:
        """Cost of the rank with the most, divided by the mean; 1.0 is perfect."""
        loads = self.loads
        total = sum(loads)
        return max(loads) * len(loads) / total if total else 1.0

    def sent_nbytes(self, rank: int, replica: int = 0) -> int:
        """Return the bytes that a rank sends to other ranks in a step: to owners, back, and to other replicas.

        Args:
            rank: its index among the shards, from 0.
            replica: its replica, from 0.

        Returns:
            Bytes, with the padding of the all-gather over replicas, which all send as much as the one with the most.
        """
        numel = 0
        for matrix, owner in zip(self.matrices, self.owners):
            if owner // self.ranks == replica:
                mine = prod(matrix.shard_shape(self.ranks, rank))
                numel += prod(matrix.shape) - mine if owner % self.ranks == rank else mine
        return numel * self.itemsize + (self.replicas - 1) * self._results_nbytes(rank) // self.replicas

    def peak_nbytes(self, rank: int, replica: int = 0) -> int:
        """Return the bytes that an exchange allocates at most on a rank.

        Counted are up to three buckets of whole matrices (one arrives, one is computed, one leaves); this rank's shards of all
        matrices in the dtype of the messages, of other replicas' matrices as well, until all ranks have all results; and a
        second copy of a matrix while the function computes with it, unless it is sharded along dim 0 and the only one that the
        owner has in the bucket. Not counted are the memory of the function itself; of Muon, two copies of the gradients whose
        updates are computed together, of up to 16 MiB or one shard; the copies of a batch; and the exchange over a
        tensor-parallel axis.

        Args:
            rank: its index among the shards, from 0.
            replica: its replica, from 0.

        Returns:
            Bytes.

        Raises:
            ValueError: for a rank or a replica that the plan does not have.
        """
        for name, value, count in (("rank", rank, self.ranks), ("replica", replica, self.replicas)):
            if check_int(name, value, least=0) >= count:
                raise ValueError(f"{name} must be below {count}, got {value}.")
        slots, copied = [], []  # elements of each bucket: of the matrices that arrive, and of one that is copied
        for bucket in self.buckets:
            owned = [self.matrices[index] for index in bucket if self.owners[index] == rank + self.ranks * replica]
            numels = [prod(matrix.shape) for matrix in owned]
            slots.append(sum(numels))
            is_view = len(owned) == 1 and owned[0].dim == 0  # the shards that arrived, in rank order, are the matrix
            copied.append(0 if is_view else max(numels, default=0))
        held = (sum(slots[max(0, number - 1) : number + 2]) + copied[number] for number in range(len(slots)))
        return self._results_nbytes(rank) + max(held, default=0) * self.itemsize

    def _results_nbytes(self, rank: int) -> int:
        """Return the bytes of a rank's shards of all matrices. With replicas, each has as much room as the largest needs."""
        numels = [0] * self.replicas
        for matrix, owner in zip(self.matrices, self.owners):
            numels[owner // self.ranks] += prod(matrix.shard_shape(self.ranks, rank))
        return self.replicas * max(numels) * self.itemsize

    @property
    def digest(self) -> str:
        """Hash of the plan, to compare it between ranks."""
        parts = self.ranks, self.replicas, self.matrices, self.owners, self.buckets, self.itemsize
        return hashlib.sha1(repr(parts).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        places = [(rank, replica) for replica in range(self.replicas) for rank in range(self.ranks)]
        sent = [self.sent_nbytes(*place) for place in places]
        held = [self.peak_nbytes(*place) for place in places]
        counts = [self.owners.count(owner) for owner in range(self.ranks * self.replicas)]
        where = f"{self.ranks} ranks" if self.replicas == 1 else f"{self.replicas} x {self.ranks} ranks"
        work = ""
        if self.costs == tuple(matrix.cost for matrix in self.matrices):  # of Newton-Schulz
            most = max(self.loads) * _FLOPS
            work = f": {most / 1e12:,.2f} Tflop of Newton-Schulz, about {most / H100_FLOPS * 1e3:,.1f} ms on an H100"
        return (
            f"{len(self.matrices)} matrices on {where}, {min(counts)} to {max(counts)} each, in buckets: "
            f"{len(self.buckets)}\nthe busiest rank computes {self.imbalance:.2f} times the mean{work}\na rank sends at most "
            f"{max(sent) / 1e6:,.1f} MB per step, and allocates at most {max(held) / 1e6:,.1f} MB for it"
        )


def plan_owners(
    matrices: Iterable[tuple[str, Any] | Matrix],
    ranks: int,
    *,
    replicas: int = 1,
    bucket_nbytes: int | None = None,
    cost: Cost | None = None,
    itemsize: int = WIRE_ITEMSIZE,
) -> OwnerPlan:
    """Plan which rank computes with which whole matrix in a step of Muon. It needs no process group.

    The longest computation goes to the rank with the least so far; of equal ranks to that with the fewest bytes, then to the
    first one. A matrix that one rank has whole, as an expert of a stack, needs no message: that rank owns it, as long as this
    gives it no more than the mean of all. The plan is a function of the arguments only, so it is equal on ranks that pass equal
    ones.

    Args:
        matrices: (name, shape) or (name, parameter) of each matrix, of two dims, or `Matrix` objects. Leave out parameters of
            other dims, which are for another optimizer.
        ranks: number of ranks over which each matrix is sharded.
        replicas: number of replicas of the shards, on a hybrid mesh.
        bucket_nbytes: bytes of whole matrices that one owner has in a bucket, unless one matrix has more; None for 32 MiB, or
            the size of the largest matrix if that is more.
        cost: function of a `Matrix` that returns the time to compute with it, in any unit; None for that of Newton-Schulz.
        itemsize: bytes of an element on its way: 2 for bfloat16.

    Returns:
        The plan.

    Raises:
        ValueError: if a shape or parameter has not two dims, a cost is negative or not finite, or a number is less than 1.

    Example:
        >>> print(plan_owners([("up", (4096, 1024)), ("down", (1024, 4096)), ("out", (1024, 1024))], ranks=2))
        3 matrices on 2 ranks, 1 to 2 each, in buckets: 1
        the busiest rank computes 1.14 times the mean: 0.13 Tflop of Newton-Schulz, about 0.2 ms on an H100
        a rank sends at most 9.4 MB per step, and allocates at most 28.3 MB for it

    Source: longest processing time first, Graham 1969 (doi 10.1137/0117039).
    """
    for name, number in (("ranks", ranks), ("replicas", replicas), ("itemsize", itemsize)):
        check_int(name, number)
    found = tuple(one if isinstance(one, Matrix) else _matrix(*one) for one in matrices)
    if bucket_nbytes is None:
        bucket_nbytes = max(BUCKET_NBYTES, *(prod(one.shape) * itemsize for one in found), 0)
    check_int("bucket_nbytes", bucket_nbytes, otherwise=", or None")
    costs = tuple(one.cost if cost is None else cost(one) for one in found)
    for one, spent in zip(found, costs):
        if not 0 <= spent < inf:
            raise ValueError(f"Expected a finite cost of at least 0 for matrix '{one.name}', got {spent!r} from {cost!r}.")
    longest_first = sorted(range(len(found)), key=lambda index: (-costs[index], -prod(found[index].shape), index))
    owners = _owners(found, costs, longest_first, ranks, replicas)
    buckets = _buckets(found, owners, longest_first, max(1, bucket_nbytes // itemsize))
    return OwnerPlan(ranks, replicas, found, costs, tuple(owners), buckets, itemsize)


def plan_of_some(plan: OwnerPlan, indices: Sequence[int]) -> OwnerPlan:
    """Return the plan of some matrices, in ascending order, with the owners and the buckets that they have in `plan`."""
    place = {index: number for number, index in enumerate(indices)}
    buckets = (tuple(place[index] for index in bucket if index in place) for bucket in plan.buckets)
    return replace(
        plan,
        matrices=tuple(plan.matrices[index] for index in indices),
        costs=tuple(plan.costs[index] for index in indices),
        owners=tuple(plan.owners[index] for index in indices),
        buckets=tuple(bucket for bucket in buckets if bucket),
    )


def _matrix(name: str, value: Any) -> Matrix:
    shape = tuple(getattr(value, "shape", value))
    if len(shape) != 2:
        raise ValueError(f"Expected a matrix of two dims as '{name}', got shape {shape}. Leave it to another optimizer.")
    return Matrix(name, (int(shape[0]), int(shape[1])))


def _owners(
    matrices: Sequence[Matrix], costs: Sequence[float], longest_first: Sequence[int], ranks: int, replicas: int
) -> list[int]:
    """Return the owner of each matrix, chosen in the order `longest_first`.

    It is the rank that has the matrix whole, unless this gives that rank more than the mean; else the rank with the least work.
    """
    owners, mean = [0] * len(matrices), sum(costs) / (ranks * replicas)
    loads: list[tuple[float, int]] = [(0, 0)] * (ranks * replicas)  # (cost, elements)
    least = [(*load, owner) for owner, load in enumerate(loads)]  # a heap, whose entries of former loads are skipped
    numels = [prod(matrix.shape) for matrix in matrices]
    for index in longest_first:
        holder = matrices[index].holder(ranks)
        owner = None if holder is None else min(range(holder, len(loads), ranks), key=loads.__getitem__)
        if owner is None or loads[owner][0] + costs[index] > mean:
            while loads[least[0][2]] != least[0][:2]:
                heapq.heappop(least)
            owner = least[0][2]
        owners[index] = owner
        loads[owner] = loads[owner][0] + costs[index], loads[owner][1] + numels[index]
        heapq.heappush(least, (*loads[owner], owner))
    return owners


def _buckets(
    matrices: Sequence[Matrix], owners: Sequence[int], longest_first: Sequence[int], limit: int
) -> tuple[tuple[int, ...], ...]:
    """Return the buckets, of up to `limit` elements per owner. Each owner has matrices in every bucket until it has none left.

    All owners begin with their longest matrices, so that they have about equal work in each bucket: they wait for each other
    after it.
    """
    buckets: list[list[int]] = []
    last: dict[int, tuple[int, int]] = {}  # by owner: its last bucket, and how many elements it may still have there
    for index in longest_first:
        numel = prod(matrices[index].shape)
        number, room = last.get(owners[index], (-1, -1))
        if numel > room:
            number, room = number + 1, limit
        last[owners[index]] = number, room - numel
        if number == len(buckets):
            buckets.append([])
        buckets[number].append(index)
    return tuple(tuple(sorted(bucket)) for bucket in buckets)
