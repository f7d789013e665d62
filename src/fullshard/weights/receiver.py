"""One rank that receives full tensors: each shard travels to it once, and to no other rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fullshard.weights.exchange import Exchange, Message
from fullshard.weights.key_map import cast_dtype
from fullshard.weights.targets import ModelEntry, ModelTensors


class Receiver:
    """Gathers tensors of a model to one rank, with several gathers under way.

    Args:
        to: global rank that receives.
        at_once: number of gathers under way.
        doing: the call of the user, with what ranks must share; equal on all ranks.

    Raises:
        ValueError: if `to` is no rank of the model.
    """

    def __init__(self, tensors: ModelTensors, to: int, at_once: int, doing: str) -> None:
        if to not in tensors.ranks:
            raise ValueError(f"to must be one of the ranks {tensors.ranks} of the model, got {to}.")
        self._to, self._index = tensors.ranks.index(to), tensors.index
        group, self._device = tensors.agreement(doing), tensors.units[0].axis.device
        self._exchanges = deque(Exchange(group) for _ in range(at_once))
        group.barrier()  # the exchanges that follow carry no tags: ranks whose options differ diverge here

    @torch.no_grad()
    def start(self, entries: Sequence[ModelEntry], dtype: torch.dtype | None) -> Callable[[], dict[str, Tensor]]:
        """Start to gather tensors, floating-point ones in `dtype`. Collective.

        Return a function that waits for them, and returns full tensors by name on the receiving rank, and nothing on others.
        Of replicas, the receiver itself sends, or the first rank.
        """
        sends: list[Message] = []
        receives: list[Message] = []
        own: list[tuple[Tensor, Tensor]] = []
        full: dict[str, Tensor] = {}
        for entry in entries:
            target, kept = entry.target, cast_dtype(entry.target.dtype, dtype)
            if self._index == self._to:
                full[target.name] = torch.empty(target.shape, dtype=kept, device=self._device)
            for box, ranks in target.shard_map.ranks_by_box.items():
                sender = self._to if self._to in ranks else ranks[0]
                if self._index == self._to:
                    place = full[target.name][box.slices()]
                    if sender == self._to:
                        own.append((place, entry.local.view(box.shape)))
                    else:
                        receives.append(Message(sender, place, kept))
                elif sender == self._index:
                    sends.append(Message(self._to, entry.local.view(box.shape), kept))
        exchange = self._exchanges.popleft()
        arrive = exchange.start(sends, receives)
        if own:
            torch._foreach_copy_([place for place, _ in own], [value for _, value in own])

        def finish() -> dict[str, Tensor]:
            arrive()
            self._exchanges.append(exchange)
            return full

        return finish
