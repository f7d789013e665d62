"""Weights and buffers in step: whether ranks hold the same before it is cut, taking one rank's, averaging buffers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard import _torch
from fullshard.consistency.collective_log import listed
from fullshard.runtime.setup_collectives import SetupCollectives

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


def check_alike(named: Sequence[tuple[str, Tensor]], setup: SetupCollectives) -> str | None:
    """What is wrong if the ranks hold different values, None if nothing; the same on all of them (collective).

    Tensors on meta have no values to compare.
    """
    if not setup.groups or not named:
        return None
    device = setup.axis.device
    known = [tensor.device.type != "meta" and bool(_plain_parts(tensor)) for _, tensor in named]
    zero = torch.zeros((), dtype=torch.int64, device=device)
    digests = torch.stack([digest(t).to(device) if has else zero for (_, t), has in zip(named, known)])
    rows = digests.view(torch.uint8).view(len(named), 8)
    has = torch.tensor(known, dtype=torch.uint8, device=device).view(-1, 1)
    message = setup.maximum(torch.cat([rows * has, (255 - rows) * has, has], 1)).cpu()
    differ = ((message[:, :8].int() + message[:, 8:16].int() != 255).any(1) & (message[:, 16] > 0)).nonzero()
    if not differ.numel():
        return None
    index = int(differ[0])
    return f"{named[index][0]} differs between {_who(digests[index], setup)}"


def check_structure(named: Sequence[tuple[str, Tensor]], setup: SetupCollectives) -> str | None:
    """What is wrong if the ranks are about to shard different parameters; the same on all of them (collective)."""
    if not setup.groups:
        return None
    parts = [f"{name} {tuple(t.shape)} {t.dtype}{'' if t.requires_grad else ' frozen'}" for name, t in named]
    hashed = hashlib.sha256("; ".join(parts).encode()).digest()[:8]
    mine = torch.tensor(list(hashed), dtype=torch.uint8, device=setup.axis.device)
    head = setup.maximum(torch.cat([mine, 255 - mine])).cpu().int()
    if bool((head[:8] + head[8:] == 255).all()):
        return None
    room = 256  # bytes for what each rank says of itself, all of one length
    rank = dist.get_rank()
    text = f"rank {rank} has {len(named)}: {'; '.join(parts)}".encode()[:room].ljust(room)
    found = setup.gather(torch.tensor(list(text), dtype=torch.uint8, device=setup.axis.device), setup.groups[-1])
    texts = [bytes(one).decode(errors="ignore").strip() for one in found.tolist()]
    return ". ".join(dict.fromkeys(texts))


def _who(mine: Tensor, setup: SetupCollectives) -> str:
    """The ranks that hold other values than the first one, as far as one of the process groups shows it (collective)."""
    for group in reversed(setup.groups):
        found = setup.gather(mine, group).tolist()
        ranks = dist.get_process_group_ranks(group)
        other = [rank for rank, value in zip(ranks, found) if value != found[0]]
        seen = setup.maximum(torch.tensor([bool(other)], dtype=torch.uint8, device=setup.axis.device))
        if bool(seen.item()):
            return f"rank {ranks[0]} and {listed(other)}" if other else "other ranks of the mesh"
    return "ranks"


def broadcast(tensors: Sequence[Tensor], setup: SetupCollectives) -> None:
    """Have all ranks hold what the first one holds (collective)."""
    setup.broadcast(part for tensor in tensors for part in _plain_parts(tensor) if part.device.type != "meta")


def has_values_everywhere(named: Sequence[tuple[str, Tensor]], setup: SetupCollectives) -> str | None:
    """The first of `named` that is on meta on some ranks only, None if there is none; the same on all ranks (collective)."""
    on_meta = torch.tensor(
        [[t.device.type == "meta", t.device.type != "meta"] for _, t in named], dtype=torch.uint8, device="cpu"
    )
    votes = on_meta.to(setup.axis.device)
    if votes.numel():
        setup.maximum(votes)
    for (name, _), (some, others) in zip(named, votes.tolist()):
        if some and others:
            return name
    return None


__all__ = ["BUFFERS", "SYNCS", "broadcast", "check_alike", "check_structure", "digest", "has_values_everywhere"]
