"""Weights and buffers in step: whether ranks hold the same before it is cut, taking one rank's, averaging buffers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard import _torch
from fullshard.ledger import listed
from fullshard.mesh import ShardAxis

SYNCS = ("check", "broadcast", "off")
BUFFERS = ("local", "broadcast", "mean")

_SAMPLE = 4096  # elements (of 8 bytes) at each end whose order counts
_FIRST = -7046029254386353131  # odd, so that nothing is lost modulo 2**64


def digest(tensor: Tensor) -> Tensor:
    """One int64, on the tensor's device, that tells contents apart: every byte counts, and near both ends its place."""
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
        ends = torch.cat([whole[:_SAMPLE], whole[-_SAMPLE:], rest])
        places = torch.arange(1, 2 * ends.numel() + 1, 2, dtype=torch.int64, device=ends.device)
        total = total * _FIRST + whole.sum() * 3 + (ends * places).sum() + part.numel()
    return total


def _plain_parts(tensor: Tensor) -> list[Tensor]:
    """The ordinary tensors that a tensor is made of; of a DTensor this rank's."""
    if isinstance(tensor, DTensor):
        tensor = _torch.local_tensor(tensor.detach())
    data = tensor.data if isinstance(tensor, nn.Parameter) else tensor
    if type(data) is Tensor:
        return [data]
    if hasattr(data, "__tensor_flatten__"):
        names, _ = data.__tensor_flatten__()
        return [part for name in names for part in _plain_parts(getattr(data, name))]
    return []


def _groups(axis: ShardAxis) -> list[dist.ProcessGroup]:
    """Over which ranks that should hold the same are spread: replicas first."""
    groups = [axis.replicas.group] if axis.replicas is not None else []
    return groups + ([axis.group] if axis.group is not None and axis.ranks > 1 else [])


def check_alike(
    named: Sequence[tuple[str, Tensor]], axis: ShardAxis, *, groups: Sequence[dist.ProcessGroup] | None = None
) -> str | None:
    """What is wrong if the ranks of `axis` hold different values, None if nothing; the same on all of them (collective).

    Tensors on meta have no values to compare.
    """
    groups = _groups(axis) if groups is None else groups
    if not groups or not named:
        return None
    known = [tensor.device.type != "meta" and bool(_plain_parts(tensor)) for _, tensor in named]
    zero = torch.zeros((), dtype=torch.int64, device=axis.device)
    digests = torch.stack([digest(t).to(axis.device) if has else zero for (_, t), has in zip(named, known)])
    rows = digests.view(torch.uint8).view(len(named), 8)
    has = torch.tensor(known, dtype=torch.uint8, device=axis.device).view(-1, 1)
    message = torch.cat([rows * has, (255 - rows) * has, has], 1)
    for group in groups:
        dist.all_reduce(message, dist.ReduceOp.MAX, group=group)
    message = message.cpu()
    differ = ((message[:, :8].int() + message[:, 8:16].int() != 255).any(1) & (message[:, 16] > 0)).nonzero()
    if not differ.numel():
        return None
    index = int(differ[0])
    return f"{named[index][0]} differs between {_who(digests[index], groups, axis)}"


def check_structure(named: Sequence[tuple[str, Tensor]], axis: ShardAxis) -> str | None:
    """What is wrong if the ranks of `axis` are about to shard different parameters; the same on all of them (collective)."""
    groups = _groups(axis)
    if not groups:
        return None
    parts = [f"{name} {tuple(t.shape)} {t.dtype}{'' if t.requires_grad else ' frozen'}" for name, t in named]
    hashed = hashlib.sha256("; ".join(parts).encode()).digest()[:8]
    mine = torch.tensor(list(hashed), dtype=torch.uint8, device=axis.device)
    message = torch.cat([mine, 255 - mine])
    for group in groups:
        dist.all_reduce(message, dist.ReduceOp.MAX, group=group)
    head = message.cpu().int()
    if bool((head[:8] + head[8:] == 255).all()):
        return None
    room = 256  # bytes for what each rank says of itself, all of one length
    rank = dist.get_rank()
    text = f"rank {rank} has {len(named)}: {'; '.join(parts)}".encode()[:room].ljust(room)
    group = groups[-1]
    found = [torch.zeros(room, dtype=torch.uint8, device=axis.device) for _ in range(group.size())]
    dist.all_gather(found, torch.tensor(list(text), dtype=torch.uint8, device=axis.device), group=group)
    texts = [bytes(one.tolist()).decode(errors="ignore").strip() for one in found]
    return ". ".join(dict.fromkeys(texts))


def _who(mine: Tensor, groups: Sequence[dist.ProcessGroup], axis: ShardAxis) -> str:
    """The ranks that hold other values than the first one, as far as one of the process groups shows it (collective)."""
    for group in reversed(groups):
        found = [torch.zeros_like(mine) for _ in range(group.size())]
        dist.all_gather(found, mine.clone(), group=group)
        ranks = dist.get_process_group_ranks(group)
        other = [rank for rank, value in zip(ranks, found) if bool(value != found[0])]
        alike = torch.tensor([not other], dtype=torch.uint8, device=axis.device)
        for one in groups:
            dist.all_reduce(alike, dist.ReduceOp.MIN, group=one)
        if not bool(alike.item()):
            return f"rank {ranks[0]} and {listed(other)}" if other else "other ranks of the mesh"
    return "ranks"


def broadcast(tensors: Iterable[Tensor], axis: ShardAxis, *, groups: Sequence[dist.ProcessGroup] | None = None) -> None:
    """Have all ranks of `axis` (or of `groups`) hold what the first one holds (collective)."""
    groups = _groups(axis) if groups is None else groups
    with torch.no_grad():
        for tensor in tensors:
            for part in _plain_parts(tensor):
                if part.device.type == "meta":
                    continue
                moved = part.to(axis.device).contiguous()
                for group in groups:
                    dist.broadcast(moved, dist.get_process_group_ranks(group)[0], group=group)
                if moved is not part:
                    part.copy_(moved)


def has_values_everywhere(named: Sequence[tuple[str, Tensor]], axis: ShardAxis) -> str | None:
    """The first of `named` that is on meta on some ranks only, None if there is none; the same on all ranks (collective)."""
    on_meta = torch.tensor([[t.device.type == "meta", t.device.type != "meta"] for _, t in named], dtype=torch.uint8)
    votes = on_meta.to(axis.device)
    if votes.numel():
        for group in _groups(axis):
            dist.all_reduce(votes, dist.ReduceOp.MAX, group=group)
    for (name, _), (some, others) in zip(named, votes.tolist()):
        if some and others:
            return name
    return None


__all__ = ["BUFFERS", "SYNCS", "broadcast", "check_alike", "check_structure", "digest", "has_values_everywhere"]
