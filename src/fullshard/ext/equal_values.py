"""Equal values: what the ranks sharded is compared in the first forward, by digests taken in `fully_shard(sync="check")`."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from hashlib import blake2b
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard.core import (
    ALLOCATION,
    UNIT_CREATED,
    Agreement,
    Originals,
    Residency,
    ShardAxis,
    ShardedParameter,
    Unit,
    units_below,
)
from fullshard.errors import StateError
from fullshard.optim.copies import digest

_SHOWN = 256  # bytes of each rank's description in an error text


_INITIAL: weakref.WeakKeyDictionary[ShardedParameter, tuple[str, Tensor | None]] = weakref.WeakKeyDictionary()
"""What this rank sharded, until the first forward compares the ranks: name, shape, dtype and options of the parameter, and
hashes of its values and of this rank's shard of them, (2,) int64 on its device; None on meta."""

_ALLOCATED: weakref.WeakSet[Unit] = weakref.WeakSet()
"""Units that were initialized after sharding, and are due to be compared."""


@torch.no_grad()
def _expect_equal(unit: Unit, originals: Originals | None) -> None:
    """Take digests of what a new unit sharded, on the device of the values, for which the host does not wait."""
    if originals is None or unit.options.sync == "off":
        return
    # This option decides which collectives start. Each all-gather compares the other options.
    size = unit.options.subgroup_size
    kept = "" if size is None else f", reshard_after_forward={size}"
    for parameter, original in originals.items():
        grad_dtype = parameter.grad_dtype
        description = f"'{parameter.name}' {tuple(parameter.shape)} {original.dtype}"
        description += f"{'' if original.requires_grad else ' frozen'}{' not cast' if parameter.keeps_dtype else ''}"
        description += f" with grad_dtype {grad_dtype.dtype}" if grad_dtype.explicit else ""
        description += f"{f' sharded along dim {parameter.sharding.dim}' if parameter.sharding.dim else ''}{kept}"
        description += "" if parameter.sharding.plain_part is None else parameter.sharding.plain_part.text
        on_meta = original.device.type == "meta"
        digests = None if on_meta else torch.stack([digest(original), digest(parameter.local)])
        _INITIAL[parameter] = description, digests
    unit.before_first_use(_compare)


def compare_again(unit: Unit) -> None:
    """Compare the replicas of a unit in its next forward, since its memory was allocated anew."""
    if unit.options.sync != "off":
        _ALLOCATED.add(unit)
        unit.before_first_use(_compare)


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
_ORDER = ("", _DIFFERENT_MODELS, _DIFFERENT_REPLICAS, _DIFFERENT_COPIES)  # in which differences are reported


def _compare(unit: Unit, _: nn.Module) -> None:
    """Compare what the ranks sharded, in the first forward of a model whose outermost unit is `unit`. Collective.

    One message per process group has the digests of all units of the model that have not run yet. Replicas, and copies that
    tensor parallelism makes, must have equal shards. Values that were not written since they were sharded must be equal on all
    ranks of the mesh.
    """
    units = [one for one in units_below(unit.modules) if _compare in one.first_use and one.runtime is unit.runtime]
    for one in units:
        if not one.shows_full:
            one.refresh()
        if one.options.sync == "broadcast" and one in _ALLOCATED:
            _broadcast_over_replicas(one)
    parameters = [parameter for one in units for parameter in one.parameters]
    data = {axis.key: axis for axis in (one.sharding.axis.hybrid or one.sharding.axis for one in parameters)}
    parallel = {axis.key: axis for one in parameters for _, axis in one.sharding.tensor_parallel_groups}
    # Axes that shard first: a process group that replicates scalars as well is logged with them, as in other calls.
    axes = [*sorted(data.values(), key=lambda axis: axis.group is None), *parallel.values()]
    with torch.no_grad():
        claims = [claim for one in parameters for claim in _claims(one, parallel.values())]
        claims.sort(key=lambda claim: _ORDER.index(claim.error))
        # Placements decide over which tensor-parallel ranks values are compared. So descriptions are compared first.
        first = [claim for claim in claims if not claim.error] if parallel else []
        for part in filter(None, (first, claims[len(first) :])):
            doing = f"comparison of {len(parameters)} parameters"
            subject = f"{doing} {len(part)}"
            _check(part, Agreement(unit.runtime.communicator, axes, unit.unit_name, doing, subject))
    for one in units:
        one.first_use = [check for check in one.first_use if check != _compare]
        _ALLOCATED.discard(one)
    for parameter in parameters:
        _INITIAL.pop(parameter, None)


def _broadcast_over_replicas(unit: Unit) -> None:
    """Give parameters that were initialized after sharding the values of the first replica. Collective."""
    if unit.residency is not Residency.SHARDED:
        unit.reshard(doing="the broadcast of values")  # unsharded by hand or prefetched, from shards that are written now
    shards: dict[tuple[int, int], tuple[ShardAxis, list[Tensor]]] = {}
    for p in unit.parameters:
        shards.setdefault(p.sharding.axis.key, (p.sharding.axis, []))[1].append(p.local)
        p.note_write()  # collectives increase no version counter
    agreement = unit.agreement("broadcast over replicas")
    for axis, values in shards.values():
        if axis.replicas is not None and axis.replicas.ranks > 1:
            _over(agreement.on_axis(axis), [axis.replicas.group]).broadcast(values)


def _over(agreement: Agreement, groups: Iterable[dist.ProcessGroup]) -> Agreement:
    """Return the agreement of the same call over some of its process groups."""
    part = copy.copy(agreement)
    part.groups = {group: agreement.groups[group] for group in groups}
    return part


class _Claim(NamedTuple):
    """Equality of a number on some ranks."""

    parameter: ShardedParameter  # that it is about
    over: list[dist.ProcessGroup]  # which connect the ranks
    number: Tensor | None  # this rank's number, one int64; None if it has none
    error: str  # text after "differs between ranks"; "" if the number stands for the description of the parameter
    excused: Tensor = torch.tensor(False, device="cpu")  # True on any of the ranks allows all of them to differ


def _claims(parameter: ShardedParameter, parallel: Iterable[ShardAxis]) -> Iterator[_Claim]:
    """Yield what must be equal between ranks. `parallel`: the axes of tensor parallelism in the model."""
    sharding = parameter.sharding
    own = sharding.axis
    copies = [axis for index, axis in sharding.tensor_parallel_groups if sharding.placements[index].is_replicate()]
    with_equal_shards = [group for axis in (own, *copies) for group in axis.groups if group is not own.group]
    with_equal_values = [group for axis in (own.hybrid or own, *copies) for group in axis.groups]
    every = [
        group for axis in (own.hybrid or own, *(axis for _, axis in sharding.tensor_parallel_groups)) for group in axis.groups
    ]
    shard = None if parameter.local.device.type == "meta" else digest(parameter.local)
    if parameter in _INITIAL and every:
        description, digests = _INITIAL[parameter]
        text = f"{parameter.unit_name.name} {description}"
        hashed = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)
        yield _Claim(parameter, every, torch.tensor(hashed, device="cpu"), "")
        values, excused = None, torch.tensor(True, device="cpu")
        if digests is not None and shard is not None:
            values, excused = digests[0], shard != digests[1].to(shard.device)
        if with_equal_values:
            yield _Claim(parameter, with_equal_values, values, _DIFFERENT_MODELS, excused)
    if with_equal_shards:
        yield _Claim(parameter, with_equal_shards, shard, _DIFFERENT_REPLICAS)
    if sharding.tensor_parallel is None:
        beside = [axis for axis in parallel if len(set(own.members).intersection(axis.members)) == 1]
        if over := [group for axis in beside for group in axis.groups]:
            yield _Claim(parameter, over, shard, _DIFFERENT_COPIES)


def _check(claims: Sequence[_Claim], agreement: Agreement) -> None:
    """Compare the numbers. Raise StateError for the first difference, or warn if it may be on purpose. Collective."""
    device = agreement.device
    zero = torch.tensor(0, device=device)
    numbers = torch.stack([zero if one.number is None else one.number.to(device) for one in claims])
    present = torch.tensor([[one.number is not None] for one in claims], device=device)
    excused = torch.stack([one.excused.to(device) for one in claims])
    bytes_of = numbers.view(torch.uint8).view(len(claims), -1)
    # Both maxima of a byte, of x and of 255 - x, add up to 255 if it is equal on all ranks. Zeros change no maximum.
    rows = torch.cat([torch.cat([bytes_of, 255 - bytes_of], 1) * present, excused.view(-1, 1)], 1)
    groups = list(dict.fromkeys(group for one in claims for group in one.over))
    for group in groups:
        chosen = torch.tensor([group in one.over for one in claims], device=device)
        rows[chosen] = _over(agreement, [group]).maximum(rows[chosen])
    found = rows.int()
    differ = (found[:, :8] + found[:, 8:16] > 255).any(1) & (found[:, 16] == 0)
    for _ in range(2 if len(groups) > 1 else 0):  # ranks of another process group may have found a difference
        differ = agreement.maximum(differ.to(torch.uint8)).bool()
    indices = differ.cpu().nonzero().flatten().tolist()
    if not indices:
        return
    first = indices[0]  # those that raise come before those that warn
    text = _text(claims[first], bytes_of[first], agreement)
    if claims[first].error != _DIFFERENT_COPIES:
        raise StateError(text)
    warnings.warn(text, stacklevel=2)


def _text(claim: _Claim, number: Tensor, agreement: Agreement) -> str:
    """Return the text for a difference. Collective."""
    parameter = claim.parameter
    if not claim.error:
        mine = f"rank {dist.get_rank()} has {_INITIAL[parameter][0]} of unit '{parameter.unit_name.name}'"
        texts = _over(agreement, claim.over).gather_bytes(mine.encode(), at_most=_SHOWN)
        listing = "; ".join(text.decode(errors="ignore").strip() for text in texts.values())
        return f"The ranks sharded different models: {listing}. Build the same model with the same options on all ranks."
    where = _over(agreement, claim.over).who_differs(bytes(number.tolist())) or "between other ranks"
    return f"Parameter '{parameter.name}' of unit '{parameter.unit_name.name}' differs {where}{claim.error}"


UNIT_CREATED.append(_expect_equal)
ALLOCATION.append(lambda unit: partial(compare_again, unit))
