"""Replicas: the comparison of equal shards at the first forward, and buffers that are kept equal on all ranks."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fullshard import _torch
from fullshard.checks.collective_log import GroupFingerprints
from fullshard.core.communicator import Communicator
from fullshard.core.mesh import ShardAxis
from fullshard.core.scheduler import Residency
from fullshard.core.unit_modules import own_modules
from fullshard.core.value_sync import broadcast, find_unequal_values
from fullshard.errors import StateError

if TYPE_CHECKING:
    from fullshard.core.unit import Unit


def check_replicas(unit: Unit) -> None:
    """Compare the shards of ranks with the same rows, or broadcast them, for parameters initialized after sharding. Collective.

    Raises StateError, naming a parameter, on the ranks of an axis whose values differ.
    """
    if unit.options.sync == "off":
        return
    if unit.options.sync == "broadcast" and unit.residency is not Residency.SHARDED:
        unit.reshard(doing="the broadcast of values")  # unsharded by hand or prefetched, from shards that are written now
    wrong: str | None = None
    axes: dict[int, tuple[ShardAxis, list[tuple[str, Tensor]]]] = {}
    for p in unit.parameters:
        name = f"Parameter '{p.name}' of unit '{unit.name}'"
        axes.setdefault(id(p.sharding.axis), (p.sharding.axis, []))[1].append((name, p.local))
    for axis, shards in axes.values():
        agreement = unit.agreement("comparison of replicas", shards=False).on_axis(axis)
        if unit.options.sync == "broadcast":
            broadcast([shard for _, shard in shards], agreement)
        else:
            # Also after a difference: ranks of other axes may have found none.
            found = find_unequal_values(shards, agreement)
            wrong = wrong or found
    if unit.options.sync == "broadcast":
        for p in unit.parameters:
            p.note_write()  # collectives increase no version counter
    if wrong is not None:
        raise StateError(
            f"{wrong}, which hold the same rows. Initialize it from one seed on all replicas, as fullshard.materialize() "
            "does, load it, or pass sync='broadcast' to fully_shard()."
        )


def share_buffers(unit: Unit, root: nn.Module, communicator: Communicator) -> None:
    """Set buffers to their mean over all ranks, or to the first rank's, after a forward in training mode. Collective.

    Buffers become new tensors, since a graph may have saved the old ones.
    """
    if not root.training or _torch.current_graph_task() != -1:
        return
    axis, mean = unit.axis, unit.options.buffers == "mean"
    ranks = axis.ranks * axis.replica_count
    first = axis.is_first_rank
    by_dtype: dict[torch.dtype, dict[int, Tensor]] = {}  # dtype -> id -> buffer; shared buffers are sent once
    slots: list[tuple[dict[str, Tensor | None], str, Tensor]] = []
    for module in own_modules(root):
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            by_dtype.setdefault(buffer.dtype, {})[id(buffer)] = buffer
            slots.append((_torch.buffers_of(module), name, buffer))
    shared: dict[int, Tensor] = {}
    collectives = unit.buffer_collectives
    fingerprints = GroupFingerprints(communicator.log_of(axis), unit.unit_name, f"{unit.global_id} buffers")
    with torch.no_grad():
        for dtype, found in by_dtype.items():
            buffers = list(found.values())
            averaged = mean and dtype.is_floating_point
            flat = [buffer.contiguous().view(-1) for buffer in buffers]
            # A broadcast is a sum of bytes with the zeros of all other ranks, which changes no bit, in any dtype.
            message = torch.cat(flat if averaged else [one.view(torch.uint8) for one in flat])
            if averaged and dtype.itemsize < 2:
                message = message.float()  # torch cannot add in 8 bits
            fingerprints.log.allow_message_size(message.nbytes)
            divides_first = message.dtype.itemsize < 4  # since the sum could overflow
            if averaged and divides_first:
                message.div_(ranks)
            elif not (averaged or first):
                message.zero_()
            communicator.send(
                communicator.reduce_scatter_stream, fingerprints, "buffers", partial(collectives.reduce.all_reduce, message)
            ).wait()
            if collectives.replicate is not None:
                start = partial(collectives.replicate.all_reduce, message)
                communicator.send(communicator.all_reduce_stream, fingerprints, "buffers", start).wait()
            if averaged and not divides_first:
                message.div_(ranks)
            message = message.to(dtype) if averaged else message
            for buffer, part in zip(
                buffers, message.split([one.numel() * (1 if averaged else one.itemsize) for one in buffers])
            ):
                # Clones of their own memory, whose first byte is aligned for `view`.
                shared[id(buffer)] = part.clone().view(dtype).view(buffer.shape)
    for buffers_of_module, name, buffer in slots:
        buffers_of_module[name] = shared[id(buffer)]


__all__ = ["check_replicas", "share_buffers"]
