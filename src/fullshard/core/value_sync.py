"""Values of parameters on all ranks: digests taken when they are sharded, compared in the first forward; and a broadcast."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from fullshard import _torch
from fullshard.core.agreement import Agreement
from fullshard.core.mesh import ShardAxis, resolve_mesh
from fullshard.core.scheduler import Residency
from fullshard.core.subclasses import inner_tensors
from fullshard.core.unit_modules import unit_of
from fullshard.errors import StateError

if TYPE_CHECKING:
    from fullshard.core.param_sharding import ParamSharding
    from fullshard.core.sharded_param import ShardedParameter
    from fullshard.core.unit import Unit

SYNCS = ("check", "broadcast", "off")  # values of fully_shard(sync=)

_END_WORDS = 4096  # number of 8-byte words at each end of a tensor whose positions count
_FACTOR = -7046029254386353131  # odd, so that multiplication modulo 2**64 loses nothing
_SHOWN = 256  # bytes of each rank's description in an error text


def digest(tensor: Tensor) -> Tensor:
    """Return a hash of the values: one int64 on the tensor's device.

    Every byte counts; near both ends of the tensor its position counts as well.
    """
    parts = _plain_parts(tensor)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for part in parts:
        if not part.numel():
            continue
        data = part.detach().resolve_conj().resolve_neg().contiguous()
        if data.is_complex():
            data = torch.view_as_real(data)
        flat = data.reshape(-1).view(torch.uint8)
        flat = flat if flat.storage_offset() % 8 == 0 else flat.clone()
        whole = flat[: flat.numel() // 8 * 8].view(torch.int64)
        rest = flat[whole.numel() * 8 :].to(torch.int64)
        ends = torch.cat([whole[:_END_WORDS], whole[-_END_WORDS:], rest])
        weights = torch.arange(1, 2 * ends.numel() + 1, 2, dtype=torch.int64, device=ends.device)
        total = total * _FACTOR + whole.sum() * 3 + (ends * weights).sum() + part.numel()
    return total


def _plain_parts(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors that a tensor consists of; for a DTensor those of its local tensor."""
    if isinstance(tensor, DTensor):
        tensor = _torch.local_tensor(tensor.detach())
    return inner_tensors(tensor.data if isinstance(tensor, nn.Parameter) else tensor)


# --- in fully_shard ---


@dataclass(slots=True, eq=False)
class InitialValues:
    """What this rank sharded as a parameter, until the first forward compares the ranks.

    Attributes:
        description: name, shape, dtype and options of the parameter.
        digests: hashes of its values and of this rank's shard of them, (2,) int64 on its device; None on meta.
        version: the version of the shard that has these values. A later one was written.
    """

    description: str
    digests: Tensor | None
    version: int = 0


def initial_values(description: str, values: Tensor, sharding: ParamSharding) -> InitialValues:
    """Return what this rank is about to shard. It computes on the device of the values, for which the host does not wait."""
    if values.device.type == "meta":
        return InitialValues(description, None)
    whole = values.detach()
    shard = sharding.slice(_torch.local_tensor(whole) if isinstance(whole, DTensor) else whole)
    return InitialValues(description, torch.stack([digest(whole), digest(shard)]))


def broadcast(tensors: Sequence[Tensor], agreement: Agreement) -> None:
    """Copy the first rank's values to all ranks, in place. Collective."""
    agreement.broadcast(part for tensor in tensors for part in _plain_parts(tensor) if part.device.type != "meta")


def find_partly_on_meta(named: Sequence[tuple[str, Tensor]], agreement: Agreement) -> str | None:
    """Return the name of the first tensor that is on meta on some ranks only, None if there is none.

    Collective. All ranks return the same name.
    """
    if not named:
        return None
    on_meta = torch.tensor([[tensor.device.type == "meta"] for _, tensor in named], dtype=torch.uint8, device="cpu")
    index = agreement.first_unequal(on_meta)
    return None if index is None else named[index][0]


# --- in the first forward ---

_DIFFERENT_MODELS = (
    ", and nothing has written it since fully_shard(): each rank has a shard of a different model. Seed all ranks equally "
    "before the model is built, or load or broadcast values before the first forward, or pass sync='broadcast' to take the "
    "values of the first rank. sync='off', or FULLSHARD_SYNC=off in the environment, turns the check off."
)
_DIFFERENT_REPLICAS = (
    ", which hold the same rows. Initialize it from one seed on all replicas, as fullshard.materialize() does, load it, or "
    "pass sync='broadcast' to fully_shard()."
)
_DIFFERENT_COPIES = (
    ", and tensor parallelism neither shards nor replicates it: each of these ranks trains a weight of its own. If it is one "
    "weight, seed these ranks equally, or distribute it with Replicate()."
)


def compare_values(unit: Unit) -> None:
    """Compare what the ranks sharded, in the first forward of a model whose outermost unit is `unit`. Collective.

    One message per process group has the digests of all units of the model that have not run yet. Replicas, and copies that
    tensor parallelism makes, must have equal shards. Values that were not written since they were sharded must be equal on all
    ranks of the mesh.

    Raises:
        StateError: on all ranks, naming a parameter.
    """
    below = [unit_of(module) for root in unit.modules for module in root.modules()]
    units = [
        one for one in dict.fromkeys([unit, *below]) if one is not None and one.checks.values and one.runtime is unit.runtime
    ]
    for one in units:
        if not one.shows_full:
            one.refresh()
        if one.options.sync == "broadcast" and one.checks.uninitialized is not None:
            _broadcast_over_replicas(one)
    parameters = [parameter for one in units for parameter in one.parameters]
    axes = _Axes(parameters)
    with torch.no_grad():
        claims = _claims(parameters, axes)
        if claims:
            doing = f"comparison of {len(parameters)} parameters"
            subject = f"{doing} {len(claims)}"
            _check(claims, Agreement(unit.runtime.communicator, axes.found, unit.unit_name, doing, subject))
    for one in units:
        one.checks.values = False
    for parameter in parameters:
        parameter.initial = None


def _broadcast_over_replicas(unit: Unit) -> None:
    """Give parameters that were initialized after sharding the values of the first replica. Collective."""
    if unit.residency is not Residency.SHARDED:
        unit.reshard(doing="the broadcast of values")  # unsharded by hand or prefetched, from shards that are written now
    shards: dict[tuple[int, int], tuple[ShardAxis, list[Tensor]]] = {}
    for p in unit.parameters:
        shards.setdefault(p.sharding.axis.key, (p.sharding.axis, []))[1].append(p.local)
        p.note_write()  # collectives increase no version counter
    agreement = unit.agreement("broadcast over replicas", shards=False)
    for axis, values in shards.values():
        broadcast(values, agreement.on_axis(axis))


class _Axes:
    """The axes of the parameters of a model, and the process groups over which each parameter has equal values.

    Attributes:
        found: all axes.
    """

    def __init__(self, parameters: Sequence[ShardedParameter]) -> None:
        self._resolved: dict[tuple[DeviceMesh, int], ShardAxis] = {}
        data, parallel = dict[object, ShardAxis](), dict[object, ShardAxis]()
        for parameter in parameters:
            transport = parameter.sharding.axis.transport
            data.setdefault(transport.key, transport)
            for _, axis in self._parallel(parameter.sharding):
                parallel.setdefault(axis.key, axis)
        self._all_parallel = list(parallel.values())
        # Axes that shard first: a process group that replicates scalars as well is logged with them, as in other calls.
        self.found = [*sorted(data.values(), key=lambda axis: axis.group is None), *self._all_parallel]

    def _parallel(self, sharding: ParamSharding) -> Iterator[tuple[Placement, ShardAxis]]:
        """Yield the tensor-parallel axes of a parameter that have several ranks, and its placement on each."""
        mesh = sharding.mesh
        for index in sharding.tensor_parallel_axes:
            if mesh.size(index) > 1 and mesh.mesh_dim_names is not None:
                if (mesh, index) not in self._resolved:
                    self._resolved[mesh, index] = resolve_mesh(mesh[mesh.mesh_dim_names[index]])
                yield sharding.placements[index], self._resolved[mesh, index]

    def with_equal_shards(self, parameter: ShardedParameter) -> list[dist.ProcessGroup]:
        """Return the process groups whose ranks have equal shards of a parameter."""
        replicas = parameter.sharding.axis.replicas
        found = [] if replicas is None or replicas.ranks == 1 else [replicas.group]
        copies = [axis.group for placement, axis in self._parallel(parameter.sharding) if placement.is_replicate()]
        return [*found, *(group for group in copies if group is not None)]

    def with_equal_values(self, parameter: ShardedParameter) -> list[dist.ProcessGroup]:
        """Return the process groups whose ranks sharded equal values."""
        own = parameter.sharding.axis
        axis, found = own.transport, self.with_equal_shards(parameter)
        if axis.group is not None and axis.ranks > 1:
            found.append(axis.group)
        if own.hybrid is not None and axis.replicas is not None:  # shards are divided over the replicas as well
            found.append(axis.replicas.group)
        return found

    def beside(self, parameter: ShardedParameter) -> list[dist.ProcessGroup]:
        """Return the process groups of tensor parallelism that a parameter takes no part in."""
        if parameter.sharding.tensor_parallel is not None:
            return []
        inside = set(parameter.sharding.axis.members)
        others = [axis for axis in self._all_parallel if len(inside.intersection(axis.members)) == 1]
        return [axis.group for axis in others if axis.group is not None]


class _Claim(NamedTuple):
    """Equality of a number on some ranks.

    Attributes:
        parameter: the parameter that it is about.
        over: the process groups that connect the ranks.
        number: this rank's number, one int64; None if it has none.
        error: the text after "differs between ranks"; "" if the number stands for `parameter.initial.description`.
        excused: one bool; True on any of the ranks allows all of them to differ. None for False.
    """

    parameter: ShardedParameter
    over: list[dist.ProcessGroup]
    number: Tensor | None
    error: str
    excused: Tensor | None = None


def _claims(parameters: Sequence[ShardedParameter], axes: _Axes) -> list[_Claim]:
    """Return what must be equal between ranks, in the order in which differences are reported."""
    descriptions: list[_Claim] = []
    models: list[_Claim] = []
    replicas: list[_Claim] = []
    copies: list[_Claim] = []
    for p in parameters:
        shard = None if p.local.device.type == "meta" else digest(p.local)
        initial, everywhere = p.initial, axes.with_equal_values(p)
        if initial is not None and everywhere:
            text = f"{p.unit_name.name} {initial.description}"
            hashed = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)
            descriptions.append(_Claim(p, everywhere, torch.tensor(hashed, device="cpu"), ""))
            if initial.digests is None or shard is None or p.version != initial.version:
                models.append(_Claim(p, everywhere, None, _DIFFERENT_MODELS, torch.tensor(True, device="cpu")))
            else:  # also by a collective or a fused operation, which increase no version counter
                written = shard != initial.digests[1].to(shard.device)
                models.append(_Claim(p, everywhere, initial.digests[0], _DIFFERENT_MODELS, written))
        if over := axes.with_equal_shards(p):
            replicas.append(_Claim(p, over, shard, _DIFFERENT_REPLICAS))
        if over := axes.beside(p):
            copies.append(_Claim(p, over, shard, _DIFFERENT_COPIES))
    return [*descriptions, *models, *replicas, *copies]


def _check(claims: Sequence[_Claim], agreement: Agreement) -> None:
    """Compare the numbers. Raise StateError for the first difference, or warn if it may be on purpose. Collective."""
    device = agreement.device
    zero, no = torch.tensor(0, device=device), torch.tensor(False, device=device)
    numbers = torch.stack([zero if one.number is None else one.number.to(device) for one in claims])
    present = torch.tensor([[one.number is not None] for one in claims], device=device)
    excused = torch.stack([no if one.excused is None else one.excused.to(device) for one in claims])
    bytes_of = numbers.view(torch.uint8).view(len(claims), -1)
    # Both maxima of a byte, of x and of 255 - x, add up to 255 if it is equal on all ranks. Zeros change no maximum.
    rows = torch.cat([torch.cat([bytes_of, 255 - bytes_of], 1) * present, excused.view(-1, 1)], 1)
    groups = list(dict.fromkeys(group for one in claims for group in one.over))
    for group in groups:
        chosen = torch.tensor([group in one.over for one in claims], device=device)
        rows[chosen] = agreement.over([group]).maximum(rows[chosen])
    found = rows.int()
    differ = (found[:, :8] + found[:, 8:16] > 255).any(1) & (found[:, 16] == 0)
    for _ in range(2 if len(groups) > 1 else 0):  # ranks of another process group may have found a difference
        differ = agreement.maximum(differ.to(torch.uint8)).bool()
    indices = differ.cpu().nonzero().flatten().tolist()
    raising = [index for index in indices if claims[index].error != _DIFFERENT_COPIES]
    if raising:
        raise StateError(_text(claims[raising[0]], bytes_of[raising[0]], agreement))
    if indices:
        warnings.warn(_text(claims[indices[0]], bytes_of[indices[0]], agreement), stacklevel=2)


def _text(claim: _Claim, number: Tensor, agreement: Agreement) -> str:
    """Return the text for a difference. Collective."""
    parameter, initial = claim.parameter, claim.parameter.initial
    if not claim.error:
        assert initial is not None
        mine = f"rank {dist.get_rank()} has {initial.description} of unit '{parameter.unit_name.name}'"
        texts = agreement.over(claim.over).gather_bytes(mine.encode(), at_most=_SHOWN)
        listing = "; ".join(text.decode(errors="ignore").strip() for text in texts.values())
        return f"The ranks sharded different models: {listing}. Build the same model with the same options on all ranks."
    where = agreement.over(claim.over).who_differs(bytes(number.tolist())) or "between other ranks"
    return f"Parameter '{parameter.name}' of unit '{parameter.unit_name.name}' differs {where}{claim.error}"


__all__ = ["SYNCS", "InitialValues", "broadcast", "compare_values", "digest", "find_partly_on_meta", "initial_values"]
