"""The one small collective that ends a synchronised backward: who used which parameter, and whether all ran the same."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from fullshard.comm import Pending
from fullshard.ledger import DIGEST, Ledger
from fullshard.reduction import Reduction

_UNIT = 1024  # bytes: messages of models that differ a little still have one length


Page = tuple[bytearray, Tensor]
"""Bytes, and a tensor of the same memory: to make one takes longer than to write on it."""


class Heartbeat:
    """Bytes, of which every rank gets the maximum over all ranks.

        0..7   hash of the ledger         where ranks differ in a byte, each has less than the maximum, so finds it changed here
        8..15  255 minus each of them     or more than the minimum, so finds it changed there
        16..   1 for each trainable parameter that this rank used, in the order of the reductions; then zeros

    It is read where it costs nothing: at once on the CPU, on an accelerator when the device has long passed it, or at once by
    a rank that has to know whether others used a parameter that it did not.
    """

    def __init__(
        self, ledger: Ledger, reductions: Sequence[Reduction], away: torch.device | None, page: Page | None = None
    ) -> None:
        """`away`: the accelerator it is sent from, if any. `page`: of one that was read."""
        self.ledger, self.reductions = ledger, list(reductions)
        digest = ledger.hash
        self._head = digest.to_bytes(DIGEST, "little", signed=True) + (~digest).to_bytes(DIGEST, "little", signed=True)
        flags = bytes(chain.from_iterable([reduction.used for reduction in reductions]))
        self.all_used = 0 not in flags
        length = -(-(len(self._head) + len(flags)) // _UNIT) * _UNIT
        if page is None or len(page[0]) != length:
            memory = bytearray(length)
            page = memory, torch.frombuffer(memory, dtype=torch.uint8)
        page[0][:] = (self._head + flags).ljust(length, b"\0")
        self.page, self._message = page, page[1]
        self._host: Tensor | None = None
        if away is not None:
            self._message = self._message.to(away, non_blocking=True)
            self._host = torch.empty(length, dtype=torch.uint8, device="cpu", pin_memory=True)

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
        return not self.all_used and any(reduction.undecided for reduction in self.reductions)

    def differs(self) -> bool:
        """Whether the ranks' ledgers differ. The host must have waited for it."""
        if self._host is None:
            return not self.page[0].startswith(self._head)
        return bytes(self._host[: len(self._head)].tolist()) != self._head

    def answers(self) -> list[list[bool]]:
        """Of each reduction, which of its parameters any rank used. The host must have waited for it."""
        flags = iter(self._answer[2 * DIGEST :].tolist())
        return [[bool(next(flags)) for _ in reduction.used] for reduction in self.reductions]

    @property
    def _answer(self) -> Tensor:
        return self._message if self._host is None else self._host


__all__ = ["Heartbeat"]
