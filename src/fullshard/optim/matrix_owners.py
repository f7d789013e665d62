"""Functions of whole matrices over sharded parameters: `MatrixOwners` for users' own code, and caches of exchanges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard import _torch
from fullshard.core import ShardedParameter, current_parameter, logical_parameters
from fullshard.errors import check_bool, check_float_dtype
from fullshard.optim.owner_exchange import Fill, OnOwner, OwnerExchange, copy_into, renumbered
from fullshard.optim.owners import Cost, Matrix, OwnerPlan, plan_of_some, plan_owners
from fullshard.optim.pieces import Piece, Split, Splits, is_same, pieces_of, placement_error


def by_mesh(pieces: Sequence[Piece]) -> list[list[int]]:
    """Return the indices of the pieces that are exchanged together, i.e. distributed over the same process groups."""
    found: dict[object, list[int]] = {}
    for index, piece in enumerate(pieces):
        found.setdefault(piece.mesh_key, []).append(index)
    return list(found.values())


def plan_of(pieces: Sequence[Piece], dtype: torch.dtype, cost: Cost | None) -> OwnerPlan:
    """Return the plan of pieces of one mesh. `cost` gets the whole matrix, under tensor parallelism too."""
    axis = pieces[0].parameter.sharding.axis
    wholes = {piece.matrix: piece.whole for piece in pieces}
    known: Cost = lambda matrix: wholes[matrix].cost if cost is None else cost(wholes[matrix])  # noqa: E731
    matrices = [piece.matrix for piece in pieces]
    return plan_owners(matrices, axis.ranks, replicas=axis.replica_count, cost=known, itemsize=dtype.itemsize)


class CachedExchange:
    """The exchange of pieces of one mesh, made anew when they are others than in the call before."""

    def __init__(self, doing: str, dtype: torch.dtype, cost: Cost | None = None, *, batched: bool = False) -> None:
        self._doing, self._dtype, self._cost, self._batched = doing, dtype, cost, batched
        self._pieces: list[Piece] = []
        self._among: list[Piece] = []
        self._exchange: OwnerExchange | None = None

    def of(self, pieces: Sequence[Piece], among: Sequence[Piece]) -> OwnerExchange:
        """Return the exchange of pieces of one mesh. Collective, unless they have the owners and buckets of the call before.

        `among`: these and more pieces, in the same order. Owners are planned for all of them, so that an owner does not depend
        on the pieces that take part in one step.
        """
        if self._exchange is None or not (is_same(pieces, self._pieces) and is_same(among, self._among)):
            taken = set(pieces)
            indices = [index for index, piece in enumerate(among) if piece in taken]
            plan = plan_of_some(plan_of(among, self._dtype, self._cost), indices)
            # One rank alone may have listed its pieces again. To make an exchange is collective, and the others make none. So
            # it is kept if the plan is equal.
            first = pieces[0]
            if self._exchange is None or not self._exchange.serves(plan, first.unit):
                self._exchange = OwnerExchange(
                    plan,
                    first.unit,
                    first.parameter.sharding.axis,
                    self._dtype,
                    self._doing,
                    tensor_parallel=first.tensor_parallel,
                    wholes=[piece.whole for piece in pieces],
                    batched=self._batched,
                )
            self._pieces, self._among = list(pieces), list(among)
        return self._exchange


class Exchanges:
    """The cached exchanges of one caller, one per mesh, which run one after the other."""

    def __init__(self, doing: str, dtype: torch.dtype, cost: Cost | None = None, *, batched: bool = False) -> None:
        self._new = partial(CachedExchange, doing, dtype, cost, batched=batched)
        self._by_mesh: dict[object, CachedExchange] = {}

    def run(self, pieces: Sequence[Piece], fill: Fill, function: OnOwner) -> list[Tensor]:
        """Return this rank's part of the function's result for each piece. Collective."""
        results: list[Tensor] = [torch.empty(0)] * len(pieces)
        with ExitStack() as calls:
            used = []
            for indices in by_mesh(pieces):
                of_mesh = [pieces[index] for index in indices]
                exchange = self._by_mesh.setdefault(of_mesh[0].mesh_key, self._new()).of(of_mesh, of_mesh)
                calls.enter_context(exchange.call())
                used.append(exchange)
                parts = exchange.run(renumbered(fill, indices), renumbered(function, indices))
                for index, part in zip(indices, parts):
                    results[index] = part
            # Only now, since another rank may still be in the exchange of another mesh.
            for exchange in used:
                exchange.confirm()
        return results


class MatrixOwners:
    """Computes a function of whole matrices over sharded parameters, each matrix on one rank.

    For optimizers of your own whose update is a function of the whole matrix, as Newton-Schulz. (`torch.optim.Muon` needs no
    call, and optimizers of other libraries step on whole matrices by `whole_view`.) Every rank computes the parameters that are
    not sharded.

    Args:
        parameters: the parameters of at least two dims, sharded or plain.
        split: the pieces of parameters that are several matrices: a number of equal pieces or their sizes along dim 0, or
            `Pieces`. A parameter of more than two dims that is not split, as the kernel of a convolution, is one matrix with
            all dims after the first as columns.
        cost: function of a `Matrix` that returns the time to compute with it, in any unit; None for that of Newton-Schulz.
        batched: True to compute matrices of equal shape together, those that an owner has in one bucket: then the function gets
            (matrices, rows, columns), which is faster for small matrices. Batches depend on the plan, and on some devices a
            product in a batch is rounded otherwise than alone.
        dtype: dtype in which matrices travel, in both directions. bfloat16 changes no result of functions that begin by
            casting to it and return bfloat16.

    Raises:
        ValueError: if a parameter has fewer than two dims, or cannot be split like this, or if an option is of another type.

    Example:
        >>> owners = fullshard.MatrixOwners(matrices, split={qkv.weight: 3})                  # doctest: +SKIP
        >>> for parameter, update in zip(matrices, owners.map(orthogonalize, updates)):       # doctest: +SKIP
        ...     parameter.detach().add_(update, alpha=-0.02)
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        split: Split | None = None,
        cost: Cost | None = None,
        dtype: torch.dtype = torch.bfloat16,
        batched: bool = False,
    ) -> None:
        self._parameters: list[Tensor] = list(parameters)
        for parameter in self._parameters:
            if not isinstance(parameter, Tensor):
                raise ValueError(f"MatrixOwners takes parameters, got {parameter!r} among them.")
            if parameter.ndim < 2:
                raise ValueError(
                    f"MatrixOwners takes parameters of at least two dims, got one of shape {tuple(parameter.shape)}. Leave it "
                    "to an element-wise optimizer."
                )
        check_float_dtype("dtype", dtype)
        if cost is not None and not callable(cost):
            raise ValueError(f"cost must be a function of a Matrix, or None, got {cost!r}.")
        self._dtype, self._cost, self._batched = dtype, cost, check_bool("batched", batched)
        self._exchanges = Exchanges("MatrixOwners.map()", dtype, cost, batched=batched)
        self._splits = Splits(split, self._parameters)
        self._logical: list[ShardedParameter | None] = []  # of each parameter
        self._pieces: list[tuple[int, Piece]] = []  # with the index of its parameter
        self._list_pieces()

    def _list_pieces(self) -> None:
        """List the pieces anew if parameters were sharded, unsharded or grouped anew since the last call."""
        self._parameters = [*map(current_parameter, self._parameters)]
        logical = [next(iter(logical_parameters([parameter])), None) for parameter in self._parameters]
        if not is_same(logical, self._logical):
            self._logical, self._pieces = logical, []
            for index, one in enumerate(logical):
                if one is not None:
                    self._pieces += [(index, piece) for piece in pieces_of(one, self._splits.of(one.sharded))]

    @property
    def plans(self) -> list[OwnerPlan]:
        """The plan of each mesh that the matrices are distributed over. Print one for a summary."""
        self._list_pieces()
        pieces = [piece for _, piece in self._pieces]
        return [plan_of([pieces[index] for index in indices], self._dtype, self._cost) for indices in by_mesh(pieces)]

    def map(self, function: Callable[[Tensor, Any], Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the function's result for every matrix, sharded as the parameters are. Collective.

        Args:
            function: called on the owner of a matrix with the matrix, (rows, columns) in the dtype of the messages, and its
                name; returns a tensor of the same shape. It may overwrite the matrix, and must not keep it: the result is
                written into its memory. The name is that of the unit, that of the parameter in it, and the range of a piece;
                for a parameter that is not sharded it is empty. With `batched`, the function gets (matrices, rows, columns)
                and a list of names.
            tensors: for each parameter a tensor that is sharded like it: its gradient, or an update.

        Returns:
            For each parameter a DTensor sharded like it, in the dtype of the messages; a plain tensor for a plain parameter.

        Raises:
            ValueError: if the number of tensors, a shape or a placement is another than that of the parameters, before any
                message; on all ranks, if their matrices differ.
            StateError: if another rank failed.
        """
        if len(tensors) != len(self._parameters):
            raise ValueError(f"Expected a tensor for each of {len(self._parameters)} parameters, got {len(tensors)}.")
        self._list_pieces()
        shards = [_local_like(*each) for each in zip(self._parameters, self._logical, tensors)]
        results: list[Tensor | None] = [None] * len(tensors)
        pieces = [piece for _, piece in self._pieces]

        def fill(numbers: Sequence[int], places: Sequence[Tensor]) -> None:
            chosen = (self._pieces[number] for number in numbers)
            copy_into(places, [piece.part(shards[index]) for index, piece in chosen])

        def on_owner(numbers: Sequence[int], wholes: list[Tensor]) -> list[Tensor]:
            return self._called(function, wholes, pieces[numbers[0]].whole.sides, [pieces[number].name for number in numbers])

        unit = pieces[0].unit if pieces else None
        with (
            torch.no_grad(),
            nullcontext() if unit is None else unit.runtime.communicator.reporting_exceptions("MatrixOwners.map()"),
        ):
            for index, logical in enumerate(self._logical):
                if logical is None:
                    results[index] = self._of_plain(function, index, shards[index].to(self._dtype, copy=True))
            for (index, piece), part in zip(self._pieces, self._exchanges.run(pieces, fill, on_owner)):
                parameter, part = piece.parameter, part.to(piece.parameter.local.device)
                if piece.cut is None:
                    results[index] = parameter.dtensor_like_shard(part)
                    continue
                result = results[index]
                if result is None:  # the first piece of its parameter
                    result = results[index] = parameter.dtensor_like_shard(part.new_empty(parameter.sharding.shard_shape))
                piece.part(_torch.local_part(result)).copy_(part)
        return cast(list[Tensor], results)

    def _of_plain(self, function: Callable[[Tensor, Any], Tensor], index: int, whole: Tensor) -> Tensor:
        """Return the function's results for a parameter that is not sharded, or for its pieces."""
        how = self._splits.of(self._parameters[index])
        dim, ranges = (0, [range(whole.shape[0])]) if how is None else (how.dim, how.ranges(whole.shape, name=""))
        parts = []
        for rows in ranges:
            part = whole.narrow(dim, rows.start, len(rows)).contiguous()
            matrix = Matrix("", tuple(part.shape), is_piece=how is not None)
            parts += self._called(function, [part], matrix.sides, [""])
        return torch.cat(parts, dim).to(self._dtype)

    def _called(
        self, function: Callable[[Tensor, Any], Tensor], wholes: list[Tensor], shape: tuple[int, int], names: list[str]
    ) -> list[Tensor]:
        """Return the function's results for whole matrices of one shape, (rows, columns)."""
        views = [whole.view(shape) for whole in wholes]
        result = function(torch.stack(views), names) if self._batched else function(views[0], names[0])
        expected = (len(views), *shape) if self._batched else shape
        if result.shape != expected:
            raise ValueError(f"Expected the function to return shape {expected} for {names}, got {tuple(result.shape)}.")
        return [one.reshape(wholes[0].shape) for one in (result if self._batched else [result])]


def _local_like(parameter: Tensor, logical: ShardedParameter | None, tensor: Tensor) -> Tensor:
    """Return the local tensor of `tensor`, which must be distributed like the parameter."""
    if logical is None:
        if tensor.shape != parameter.shape or isinstance(tensor, DTensor):
            raise ValueError(
                f"Expected a plain tensor for a parameter of shape {tuple(parameter.shape)} that is not sharded, got a "
                f"{type(tensor).__name__} of shape {tuple(tensor.shape)}."
            )
        return tensor
    if tensor.shape != parameter.shape:
        raise ValueError(
            f"Expected a tensor of shape {tuple(parameter.shape)} for parameter '{logical.name}', got shape "
            f"{tuple(tensor.shape)}."
        )
    if unlike := placement_error(_torch.specs_of([tensor])[0], logical):
        raise ValueError(f"The tensor for parameter '{logical.name}' is {unlike}. Pass one that is distributed like it.")
    return _torch.local_part(tensor)
