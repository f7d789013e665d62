"""The one small collective that ends a synchronised backward: who used which parameter, and whether all ran the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fullshard.comm import Pending
from fullshard.ledger import Ledger
from fullshard.reduction import Reduction

_HASH = 8  # bytes
_UNIT = 1024  # bytes: messages of models that differ a little still have one length


class Heartbeat:
    """Bytes, of which every rank gets the maximum over all ranks.

        0..7   hash of the ledger         equal on all ranks exactly if the maximum of a byte
        8..15  255 minus each of them     and that of its complement have the sum 255
        16..   1 for each trainable parameter that this rank used, in the order of the reductions; then zeros

    It is read where it costs nothing: at once on the CPU, on an accelerator when the device has long passed it, or at once by
    a rank that has to know whether others used a parameter that it did not.
    """

    def __init__(self, ledger: Ledger, reductions: Sequence[Reduction], device: torch.device) -> None:
        self.ledger, self.reductions = ledger, list(reductions)
        digest = list(ledger.hash.to_bytes(_HASH, "little"))
        flags = [used for reduction in reductions for used in reduction.used]
        content = [*digest, *(255 - byte for byte in digest), *flags]
        content += [0] * (-len(content) % _UNIT)
        self._message = torch.tensor(content, dtype=torch.uint8).to(device, non_blocking=True)
        self._host: Tensor | None = None
        if device.type != "cpu":
            self._host = torch.empty(len(content), dtype=torch.uint8, device="cpu", pin_memory=True)

    def start(self) -> Pending:
        return self.reductions[0].carriers.reduce.all_reduce_max(self._message)

    def start_over_replicas(self) -> Pending:
        replicas = self.reductions[0].carriers.replicate
        return Pending() if replicas is None else replicas.all_reduce_max(self._message)

    def finish(self) -> None:
        """On the last lane: let the host have it."""
        if self._host is not None:
            self._host.copy_(self._message, non_blocking=True)

    @property
    def undecided(self) -> bool:
        """Whether this rank has to know what others used."""
        return any(reduction.undecided for reduction in self.reductions)

    def differs(self) -> bool:
        """Whether the ranks' ledgers differ. The host must have waited for it."""
        head = self._answer[: 2 * _HASH].tolist()
        return any(high + low != 255 for high, low in zip(head[:_HASH], head[_HASH:]))

    def answers(self) -> list[list[bool]]:
        """Of each reduction, which of its parameters any rank used. The host must have waited for it."""
        flags = iter(self._answer[2 * _HASH :].tolist())
        return [[bool(next(flags)) for _ in reduction.used] for reduction in self.reductions]

    @property
    def _answer(self) -> Tensor:
        return self._message if self._host is None else self._host


__all__ = ["Heartbeat"]
