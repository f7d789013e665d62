"""Counting of messages: what passes through the collectives while somebody looks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from fullshard import _torch
from fullshard.collectives.base import Allocate, Collectives, StartedWork


@dataclass(frozen=True, slots=True)
class Message:
    """One collective of one group: what kind, the dtype, and the bytes of its full side (all ranks' chunks together)."""

    kind: str  # all_gather, reduce_scatter, all_reduce, heartbeat; talk (wrapping, full_params); to_device, to_host (offload)
    dtype: torch.dtype
    nbytes: int
    buckets: int
    ranks: int = 1


@dataclass(slots=True)
class TrafficCounter:
    """Remembers messages while somebody is counting."""

    _open: list[list[Message]] = field(default_factory=list)

    @contextmanager
    def counting(self) -> Iterator[list[Message]]:
        messages: list[Message] = []
        self._open.append(messages)
        try:
            yield messages
        finally:
            self._open = [other for other in self._open if other is not messages]

    def record(self, kind: str, fulls: Sequence[Tensor], ranks: int = 1) -> None:
        if self._open:
            message = Message(kind, fulls[0].dtype, sum(full.numel() * full.itemsize for full in fulls), len(fulls), ranks)
            for messages in self._open:
                messages.append(message)


class CountedCollectives:
    """Collectives that write down what passes through them, and show it to torch's profiler and CommDebugMode.

    CommDebugMode knows those of torch alone. Collectives that send messages of their own (and so have a `tag`) are shown to
    it as torch's, but for heartbeats.
    """

    def __init__(self, inner: Collectives, journal: TrafficCounter, *, keeps: object = None) -> None:
        self._inner, self._journal, self._keeps = inner, journal, keeps
        self.ranks, self.rank, self.direct_min_bytes = inner.ranks, inner.rank, inner.direct_min_bytes
        self._unseen = hasattr(inner, "tag")
        self.gather_memory: Allocate | None = getattr(inner, "gather_memory", None)
        self.reduce_memory: Allocate | None = getattr(inner, "reduce_memory", None)

    @property
    def inner(self) -> Collectives:
        return self._inner

    def gatherer(self, outs: Sequence[Tensor], shards: Sequence[Tensor]) -> Callable[[], StartedWork]:
        gather, journal = self._inner.gatherer(outs, shards), self._journal

        def noted() -> StartedWork:
            journal.record("all_gather", outs, self.ranks)
            if _torch.dispatch_modes() or _torch.profiling():
                return self._shown("all_gather", gather, outs, shards)
            return gather()

        return noted

    def reduce_scatter(self, outs: Sequence[Tensor], fulls: Sequence[Tensor], scale: float) -> StartedWork:
        self._journal.record("reduce_scatter", fulls, self.ranks)
        if _torch.dispatch_modes() or _torch.profiling():
            return self._shown("reduce_scatter", partial(self._inner.reduce_scatter, outs, fulls, scale), outs, fulls)
        return self._inner.reduce_scatter(outs, fulls, scale)

    def all_reduce(self, tensor: Tensor) -> StartedWork:
        self._journal.record("all_reduce", [tensor], self.ranks)
        if _torch.dispatch_modes() or _torch.profiling():
            return self._shown("all_reduce", partial(self._inner.all_reduce, tensor), [tensor], [tensor])
        return self._inner.all_reduce(tensor)

    def all_reduce_max(self, tensor: Tensor) -> StartedWork:
        self._journal.record("heartbeat", [tensor], self.ranks)
        return self._inner.all_reduce_max(tensor)

    def _shown(
        self, kind: str, begin: Callable[[], StartedWork], outs: Sequence[Tensor], given: Sequence[Tensor]
    ) -> StartedWork:
        if self._unseen and _torch.counts_collectives():
            _torch.show_collective(kind, self.rank, self.ranks, outs[0], given[0])
        with record_function(f"fullshard::{kind}"):
            return begin()
