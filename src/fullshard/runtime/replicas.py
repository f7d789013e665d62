"""Keeps a unit's weights and buffers alike on all ranks, where that was asked for."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from fullshard import _torch
from fullshard.consistency.collective_log import GroupFingerprints
from fullshard.errors import StateError
from fullshard.runtime.communicator import Communicator
from fullshard.runtime.sync import broadcast, check_alike
from fullshard.runtime.unit import Unit, own_modules
from fullshard.sharding.mesh import ShardAxis


def check_replicas(unit: Unit) -> None:
    """Of parameters that got their values after they were cut, ranks that hold the same rows must hold the same values."""
    if unit.options.sync == "off":
        return
    wrong: str | None = None
    axes: dict[int, tuple[ShardAxis, list[tuple[str, Tensor]]]] = {}
    for p in unit.parameters:
        name = f"parameter '{p.name}' of unit '{unit.name}'"
        axes.setdefault(id(p.sharding.axis), (p.sharding.axis, []))[1].append((name, p.local))
    for axis, shards in axes.values():
        setup = unit.setup_collectives("comparison of replicas", shards=False).about(axis)
        if unit.options.sync == "broadcast":
            broadcast([shard for _, shard in shards], setup)
        else:
            wrong = wrong or check_alike(shards, setup)
    if wrong is not None:
        raise StateError(
            f"{wrong}, which hold the same rows: initialise it from one seed on all replicas, as fullshard.materialize() "
            "does, load it, or pass sync='broadcast' to fully_shard"
        )


def share_buffers(unit: Unit, root: nn.Module, communicator: Communicator) -> None:
    """After a forward in training mode: have all ranks hold the mean of buffers, or those of the first rank.

    Buffers become new tensors: a graph may have saved the old ones.
    """
    if not root.training or _torch.current_graph_task() != -1:
        return
    axis, mean = unit.axis, unit.options.buffers == "mean"
    ranks = axis.ranks * axis.replicated
    first = axis.rank == 0 and (axis.replicas is None or axis.replicas.rank == 0)
    kinds: dict[torch.dtype, dict[int, Tensor]] = {}
    slots: list[tuple[dict[str, Tensor | None], str, Tensor]] = []
    for module in own_modules(root):
        for name, buffer in module.named_buffers(recurse=False):
            kinds.setdefault(buffer.dtype, {})[id(buffer)] = buffer
            slots.append((_torch.buffers_of(module), name, buffer))
    shared: dict[int, Tensor] = {}
    collectives = communicator.collectives.of_axis(axis, unit.options)
    fingerprints = GroupFingerprints(communicator.log_of(axis), unit.unit_name, f"{unit.global_id} buffers")
    with torch.no_grad():
        for dtype, found in kinds.items():
            buffers = list(found.values())
            message = torch.cat([buffer.reshape(-1) for buffer in buffers])
            message = message.to(torch.uint8) if dtype is torch.bool else message
            fingerprints.log.allow_message_size(message.nbytes)
            averaged = mean and dtype.is_floating_point
            if not (averaged or first):
                message.zero_()
            communicator.send(
                communicator.reduce_lane, fingerprints, "buffers", partial(collectives.reduce.all_reduce, message)
            ).wait()
            if collectives.replicate is not None:
                over = partial(collectives.replicate.all_reduce, message)
                communicator.send(communicator.replicate_lane, fingerprints, "buffers", over).wait()
            if averaged:
                message.div_(ranks)
            for buffer, part in zip(buffers, message.split([buffer.numel() for buffer in buffers])):
                shared[id(buffer)] = part.view(buffer.shape).to(dtype, copy=True)
    for held, name, buffer in slots:
        held[name] = shared[id(buffer)]


__all__ = ["check_replicas", "share_buffers"]
