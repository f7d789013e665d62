"""Comparison of parameters and values between ranks before they are sharded, and the broadcast of one rank's values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard import _torch
from fullshard.checks.collective_log import listed
from fullshard.core.agreement import Agreement
from fullshard.core.subclasses import inner_tensors

SYNCS = ("check", "broadcast", "off")  # values of fully_shard(sync=)
BUFFERS = ("local", "broadcast", "mean")  # values of fully_shard(buffers=)

_END_WORDS = 4096  # number of 8-byte words at each end of a tensor whose positions count
_FACTOR = -7046029254386353131  # odd, so that multiplication modulo 2**64 loses nothing


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


def find_unequal_values(named: Sequence[tuple[str, Tensor]], agreement: Agreement) -> str | None:
    """Return a text that names the first tensor whose values differ between ranks, None if there is none.

    Collective. All ranks return the same text. Tensors on meta have no values and are not compared.
    """
    if not agreement.groups or not named:
        return None
    device = agreement.device
    has_values = [tensor.device.type != "meta" and bool(_plain_parts(tensor)) for _, tensor in named]
    zero = torch.zeros((), dtype=torch.int64, device=device)
    digests = torch.stack([digest(t).to(device) if has else zero for (_, t), has in zip(named, has_values)])
    rows = digests.view(torch.uint8).view(len(named), -1)
    index = agreement.first_unequal(rows, torch.tensor(has_values, dtype=torch.uint8, device=device))
    if index is None:
        return None
    found = agreement.gather_bytes(bytes(rows[index].tolist()), at_most=rows.shape[1])
    first = next(iter(found))
    other = [rank for rank, values in found.items() if values != found[first]]
    return f"{named[index][0]} differs between rank {first} and {listed(other)}"


def find_unequal_arguments(named: Sequence[tuple[str, Tensor]], options: str, agreement: Agreement) -> str | None:
    """Return an error text with the options or parameters of each rank if they differ between ranks, None if they do not.

    Collective. All ranks return the same text.
    """
    text = "; ".join(f"{name} {tuple(t.shape)} {t.dtype}{'' if t.requires_grad else ' frozen'}" for name, t in named)
    if agreement.all_equal(f"{options}; {text}".encode()):
        return None
    what, mine, remedy = "parameters", f"{len(named)}: {text}", "Build the same model on all ranks."
    if not agreement.all_equal(options.encode()):
        what, mine, remedy = "options", options, "Pass the same options on all ranks."
    found = agreement.gather_bytes(f"rank {dist.get_rank()} has {mine}".encode(), at_most=256)
    listing = ". ".join(content.decode(errors="ignore").strip() for content in found.values())
    return f"The ranks call fully_shard for different {what}: {listing}. {remedy}"


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


__all__ = ["BUFFERS", "SYNCS", "broadcast", "digest", "find_partly_on_meta", "find_unequal_arguments", "find_unequal_values"]
