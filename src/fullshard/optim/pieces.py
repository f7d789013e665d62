"""The whole matrices in sharded parameters: each parameter is one, or is split into several (heads, fused qkv, experts)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

from torch import Tensor, nn

from fullshard import _torch
from fullshard.core import ShardAxis, ShardedParameter, Unit, current_parameter, logical_parameters
from fullshard.errors import StateError
from fullshard.optim.owners import Matrix


@dataclass(frozen=True)
class Pieces:
    """How one parameter is split into matrices.

    Args:
        sizes: number of pieces of equal size, or the size of each piece along `dim`.
        dim: the dim that is split.

    Example:
        >>> fused_qkv, experts = Pieces((4096, 1024, 1024)), Pieces(8)

    Raises:
        ValueError: for a number below 1, or a dim that is no int.
    """

    sizes: int | tuple[int, ...]
    dim: int = 0

    def __post_init__(self) -> None:
        listed = tuple(self.sizes) if isinstance(self.sizes, (list, tuple)) else (self.sizes,)
        if not listed or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in listed):
            raise ValueError(f"Pieces.sizes must be a number or sizes of pieces, each at least 1, got {self.sizes!r}.")
        if isinstance(self.dim, bool) or not isinstance(self.dim, int):
            raise ValueError(f"Pieces.dim must be an int, got {self.dim!r}.")
        if not isinstance(self.sizes, int):
            object.__setattr__(self, "sizes", listed)

    def ranges(self, shape: Sequence[int], *, name: str) -> list[range]:
        """Return the range of each piece along `dim` of a parameter.

        Args:
            shape: shape of the whole parameter.
            name: its name, for errors.

        Returns:
            The ranges, in order.

        Raises:
            ValueError: if the parameter cannot be split like this.
        """
        if not 0 <= self.dim < len(shape):
            raise ValueError(f"Expected Pieces.dim of parameter '{name}' to be 0 to {len(shape) - 1}, got {self.dim}.")
        length = shape[self.dim]
        if isinstance(self.sizes, int):
            if length % self.sizes:
                raise ValueError(f"Dim {self.dim} of parameter '{name}' has {length} rows: not {self.sizes} equal pieces.")
            sizes: tuple[int, ...] = (length // self.sizes,) * self.sizes
        else:
            sizes = self.sizes
        if sum(sizes) != length:
            raise ValueError(f"Expected pieces of parameter '{name}' of {length} rows in dim {self.dim}, got sizes {sizes}.")
        starts = [sum(sizes[:number]) for number in range(len(sizes))]
        return [range(start, start + size) for start, size in zip(starts, sizes)]


Split = Mapping[nn.Parameter, "int | Sequence[int] | Pieces"]


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """One matrix of a sharded parameter, as this rank has it.

    parameter  --tensor parallelism-->  block of this rank  --shard axis-->  shard
    whole                               matrix                               cut        of the piece in each of these
    """

    parameter: ShardedParameter
    unit: Unit
    name: str  # of the unit and of the parameter in it, and the range of the piece
    matrix: Matrix  # the piece in this rank's block, sharded over the shard axis
    # the tensor-parallel axis over which the piece is distributed; None if this rank's block has all of it
    tensor_parallel: ShardAxis | None
    whole: Matrix  # the matrix before tensor parallelism, sharded over the tensor-parallel axis; without such an axis, `matrix`
    cut: tuple[int, int, int] | None  # (dim, start, length) of the piece in this rank's shard; None for all of the shard
    number: int | None  # its number among the pieces of the parameter; None if the parameter is one matrix
    count: int  # number of pieces of the parameter, in all blocks

    @property
    def mesh_key(self) -> tuple[Any, ...]:
        """Key of the process groups over which the matrix is distributed."""
        axis = self.tensor_parallel
        return *self.parameter.sharding.axis.key, None if axis is None else axis.key

    def part(self, shard: Tensor) -> Tensor:
        """Return the piece in this rank's shard of the parameter, its gradient, or another tensor of that shape; a view."""
        return shard if self.cut is None else shard.narrow(*self.cut)


def pieces_of(parameter: ShardedParameter, how: Pieces | None = None) -> list[Piece]:
    """Return the matrices of a parameter in order, without those in blocks of other ranks under tensor parallelism."""
    unit = parameter.unit()
    assert unit is not None
    sharding, is_piece = parameter.sharding, how is not None
    name, shape = ".".join(filter(None, (unit.unit_name.name, parameter.name))), tuple(sharding.shape)
    blocks = _blocks_of(parameter, name)
    dim, ranges = (0, [range(shape[0])]) if how is None else (how.dim, how.ranges(shape, name=name))
    found: list[Piece] = []
    for number, rows in enumerate(ranges):
        over, start = blocks, rows.start  # the blocks that the piece is in, and where it begins in this rank's block
        if blocks is not None and blocks.dim == dim and len(ranges) > 1:
            # The tensor-parallel axis shards the dim that is split. So a block has a piece as a whole, or nothing of it.
            if not blocks.contains(rows, name=name):
                continue
            over, start = None, rows.start - blocks.own.start
        is_all = len(rows) == shape[dim]
        place = "" if is_all else f"[{': ,' * dim}{rows.start}:{rows.stop}]"
        title = f"{unit.global_id} {parameter.name}{place}"
        whole_shape = _with_length(shape, dim, len(rows))
        block_shape = whole_shape if over is None else _with_length(whole_shape, over.dim, len(over.own))
        matrix = Matrix(title, block_shape, sharding.dim, is_piece=is_piece)
        cut: tuple[int, int, int] | None = None
        if not is_all and dim != sharding.dim:  # each shard has the same rows of the piece
            cut = dim, start, len(rows)
        elif not is_all:  # the shard axis shards the dim that is split, so the piece is a range of the rows of all shards
            matrix = Matrix(title, block_shape, dim, start, sharding.local_shape[dim], is_piece=True)
            here = len(matrix.rows(sharding.axis.ranks, sharding.axis.rank))
            cut = dim, max(0, start - sharding.extent.start) if here else 0, here
        found.append(
            Piece(
                parameter,
                unit,
                name + place,
                matrix,
                tensor_parallel=None if over is None else over.axis,
                whole=matrix if over is None else Matrix(title, whole_shape, over.dim, is_piece=is_piece),
                cut=cut,
                number=number if is_piece else None,
                count=len(ranges),
            )
        )
    return found


def _with_length(shape: Sequence[int], dim: int, length: int) -> tuple[int, ...]:
    return (*shape[:dim], length, *shape[dim + 1 :])


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Blocks of a parameter under tensor parallelism."""

    dim: int  # the dim that is sharded
    axis: ShardAxis  # the tensor-parallel axis
    own: range  # the rows of this rank's block along `dim`

    def contains(self, rows: range, *, name: str) -> bool:
        """Return True if this rank's block has all rows, False if it has none."""
        size = len(self.own)
        if rows.start // size != (rows.stop - 1) // size:
            raise ValueError(
                f"Rows {rows.start} to {rows.stop - 1} of dim {self.dim} of parameter '{name}' are one piece, but tensor "
                f"parallelism cuts it at {(rows.start // size + 1) * size}. Choose pieces that lie in one block each."
            )
        return rows.start in self.own


def _blocks_of(parameter: ShardedParameter, name: str) -> _Blocks | None:
    """Return the blocks of a parameter; None if tensor parallelism does not shard it."""
    sharding = parameter.sharding
    found = [
        (axis, sharding.placements[index].dim)  # type: ignore[attr-defined]
        for index, axis in sharding.tensor_parallel_groups
        if _torch.is_shard(sharding.placements[index])
    ]
    if not found:
        return None
    (axis, dim), *others = found
    length = sharding.shape[dim]
    if others or length % axis.ranks:
        why = f"over {len(found)} tensor-parallel axes" if others else f"unevenly: {length} rows over {axis.ranks} ranks"
        raise ValueError(f"Whole matrices of parameter '{name}' are not supported: tensor parallelism shards it {why}.")
    rows = length // axis.ranks
    return _Blocks(dim, axis, range(axis.rank * rows, (axis.rank + 1) * rows))


class Splits:
    """How parameters are split, found by the caller's parameter, also when undo() or fully_shard() has replaced it."""

    __slots__ = ("_pieces",)

    def __init__(self, split: Split | None, parameters: Iterable[Tensor]) -> None:
        """Check a split, and keep it."""
        self._pieces: list[tuple[Tensor, Pieces]] = []
        if split is not None and not isinstance(split, Mapping):
            raise ValueError(f"split must be a dict from parameters to their pieces, or None, got {split!r}.")
        known = set(map(id, parameters))
        for tensor, how in (split or {}).items():
            logical = next(iter(logical_parameters([tensor])), None)
            if logical is None or id(tensor) not in known:
                what = "that is not sharded" if logical is None else "that is not among those of the call"
                raise ValueError(
                    f"Expected sharded parameters of the call as keys of split, got a {type(tensor).__name__} {what} (shape "
                    f"{tuple(tensor.shape)}). Call fully_shard() first, and take the parameters from the model then."
                )
            pieces = how if isinstance(how, Pieces) else Pieces(how)  # type: ignore[arg-type]
            pieces_of(logical, pieces)
            self._pieces.append((tensor, pieces))

    def check_sharded(self, doing: str) -> None:
        """Raise StateError if a split parameter is no longer sharded. `doing`: the call."""
        for tensor, _ in self._pieces:
            if not logical_parameters([current_parameter(tensor)]):
                raise StateError(
                    f"{doing}: a parameter of shape {tuple(tensor.shape)} is split, and no longer sharded. Call fully_shard() "
                    "again, or make a new optimizer of its pieces."
                )

    def of(self, parameter: Tensor) -> Pieces | None:
        """Return how a sharded parameter, or a plain one that replaced it, is split; None for one matrix."""
        return next((pieces for tensor, pieces in self._pieces if current_parameter(tensor) is parameter), None)


def placement_error(spec: Any, parameter: ShardedParameter) -> str:
    """Return what a tensor of this DTensor spec, None for a plain one, is unlike the parameter; empty if placed like it."""
    expected = parameter.spec
    if spec is expected or (spec is not None and (spec.mesh, spec.placements) == (expected.mesh, expected.placements)):
        return ""
    got = "a plain tensor" if spec is None else f"a DTensor on {spec.mesh} with {spec.placements}"
    return f"{got}, expected one on {expected.mesh} with {expected.placements}"


def is_same(one: Sequence[object], other: Sequence[object]) -> bool:
    """Return True if two sequences have the same objects in the same order."""
    return len(one) == len(other) and all(map(is_, one, other))
