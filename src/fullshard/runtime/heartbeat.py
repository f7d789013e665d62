"""The one small collective that ends a synchronised backward: used parameters, kept gradients, and whether all ran the same."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import torch
from torch import Tensor

from fullshard.collectives.base import StartedWork
from fullshard.consistency.collective_log import DIGEST, CollectiveLog
from fullshard.params.reduction import Reduction

_UNIT = 1024  # bytes: messages of models that differ a little still have one length

SLOTS = 128  # bytes for the units that a rank keeps gradients of: the slot of a unit is its ordinal modulo this

_NOTHING = bytes(SLOTS)


Page = tuple[bytearray, Tensor]
"""Bytes, and a tensor of the same memory: to make one takes longer than to write on it."""


class Heartbeat:
    """Bytes, of which every rank gets the maximum over all ranks.

        0..7   hash of the ledger         where ranks differ in a byte, each has less than the maximum, so finds it changed here
        8..15  255 minus each of them     or more than the minimum, so finds it changed there
        16..   1 in the slot of each unit of which this rank keeps gradients that this backward should have reduced
        144..  1 for each trainable parameter that this rank used, in the order of the reductions; then zeros

    It is read where it costs nothing: at once on the CPU, on an accelerator when the device has long passed it, or at once by
    a rank that has to know whether others used a parameter that it did not.
    """

    def __init__(
        self,
        ledger: CollectiveLog,
        reductions: Sequence[Reduction],
        away: torch.device | None,
        page: Page | None = None,
        left: Iterable[int] = (),
    ) -> None:
        """`away`: the accelerator it is sent from, if any. `page`: of one that was read. `left`: the slots that hold 1."""
        self.ledger, self.reductions = ledger, list(reductions)
        digest = ledger.hash
        self._head = digest.to_bytes(DIGEST, "little", signed=True) + (~digest).to_bytes(DIGEST, "little", signed=True)
        flags = bytes(chain.from_iterable([reduction.used for reduction in reductions]))
        self.all_used = 0 not in flags
        slots = _NOTHING
        if left:
            held = bytearray(SLOTS)
            for slot in left:
                held[slot] = 1
            slots = bytes(held)
        body = self._head + slots + flags
        length = -(-len(body) // _UNIT) * _UNIT
        if page is None or len(page[0]) != length:
            memory = bytearray(length)
            page = memory, torch.frombuffer(memory, dtype=torch.uint8)
        page[0][:] = body.ljust(length, b"\0")
        self.page, self._message = page, page[1]
        self._host: Tensor | None = None
        if away is not None:
            self._message = self._message.to(away, non_blocking=True)
            self._host = torch.empty(length, dtype=torch.uint8, device="cpu", pin_memory=True)

    def start(self) -> StartedWork:
        return self.reductions[0].group.collectives.reduce.all_reduce_max(self._message)

    def start_over_replicas(self) -> StartedWork:
        replicas = self.reductions[0].group.collectives.replicate
        return StartedWork() if replicas is None else replicas.all_reduce_max(self._message)

    def finish(self) -> None:
        """On the last lane: let the host have it."""
        if self._host is not None:
            self._host.copy_(self._message, non_blocking=True)

    @property
    def undecided(self) -> bool:
        """Whether this rank has to know what others used."""
        return not self.all_used and any(reduction.undecided for reduction in self.reductions)

    def is_desynced(self) -> bool:
        """Whether the ranks' ledgers differ. The host must have waited for it."""
        if self._host is None:
            return not self.page[0].startswith(self._head)
        return bytes(self._host[: len(self._head)].tolist()) != self._head

    def used_anywhere(self) -> list[list[bool]]:
        """Of each reduction, which of its parameters any rank used. The host must have waited for it."""
        flags = iter(self._answer[2 * DIGEST + SLOTS :].tolist())
        return [[bool(next(flags)) for _ in reduction.used] for reduction in self.reductions]

    def kept_units(self) -> set[int]:
        """The slots of units of which any rank keeps gradients. The host must have waited for it."""
        if self._host is None:
            slots = bytes(self.page[0][2 * DIGEST : 2 * DIGEST + SLOTS])
        else:
            slots = bytes(self._host[2 * DIGEST : 2 * DIGEST + SLOTS].tolist())
        return set() if slots == _NOTHING else {index for index, flag in enumerate(slots) if flag}

    @property
    def _answer(self) -> Tensor:
        return self._message if self._host is None else self._host


__all__ = ["SLOTS", "Heartbeat", "Page"]
