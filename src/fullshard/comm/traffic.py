"""Counts collectives in `counting` blocks, and names them in torch's profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from fullshard import _torch
from fullshard.comm.base import Allocate, Collectives, Started


@dataclass(frozen=True, slots=True)
class Message:
    """One collective, or copy to or from the host, recorded by `counting`.

    Args:
        kind: all_gather, reduce_scatter, all_reduce, heartbeat; all_to_all (Muon); talk (set-up, comparisons of ranks, and
            calls outside of a step, such as save_weights()); to_device, to_host (CPU offload).
        dtype: element dtype.
        nbytes: bytes of all ranks' chunks, or of the tensor reduced or broadcast; all_to_all, to_device, to_host: of this rank.
        buckets: number of tensors in the call.
        ranks: number of participating ranks.
    """

    kind: str
    dtype: torch.dtype
    nbytes: int
    buckets: int
    ranks: int = 1


@dataclass(slots=True)
class TrafficCounter:
    """Appends each message to the lists of the open `counting` blocks (`listeners`)."""

    listeners: list[list[Message]] = field(default_factory=list)

    @contextmanager
    def counting(self, messages: list[Message] | None = None) -> Iterator[list[Message]]:
        """Yield `messages` or a new list. Until the block ends it receives each message, except norms and DTensor's own."""
        messages = [] if messages is None else messages
        self.listeners.append(messages)
        try:
            yield messages
        finally:
            # By identity: `remove` could drop another block's list with equal messages.
            self.listeners = [other for other in self.listeners if other is not messages]

    def record(self, kind: str, fulls: Sequence[Tensor], ranks: int = 1) -> None:
        """Record one message. `fulls`: the tensors whose bytes are counted (`Message.nbytes`)."""
        if self.listeners:
            message = Message(kind, fulls[0].dtype, sum(full.numel() * full.itemsize for full in fulls), len(fulls), ranks)
            for messages in self.listeners:
                messages.append(message)


class ObservedCollectives:
    """Collectives that report each message to a counter and, except for heartbeats, to torch's profiler while it is active."""

    def __init__(self, inner: Collectives, counter: TrafficCounter) -> None:
        self.inner, self._counter = inner, counter
        self.ranks, self.rank, self.direct_min_bytes = inner.ranks, inner.rank, inner.direct_min_bytes
        self.in_order: bool = getattr(inner, "in_order", False)
        self.in_place: bool = getattr(inner, "in_place", False)
        self.gather_memory: Allocate | None = getattr(inner, "gather_memory", None)
        self.reduce_memory: Allocate | None = getattr(inner, "reduce_memory", None)

    def gatherer(self, outs: Sequence[Tensor], shards: Sequence[Tensor]) -> Callable[[], Started]:
        """Prepare an all-gather that is reported each time it starts."""
        return partial(self.observed, "all_gather", self.inner.gatherer(outs, shards), outs)

    def reduce_scatter(self, outs: Sequence[Tensor], fulls: Sequence[Tensor], scale: float) -> Started:
        """Start a reduce-scatter, and report it."""
        return self.observed("reduce_scatter", partial(self.inner.reduce_scatter, outs, fulls, scale), fulls)

    def all_reduce(self, tensor: Tensor) -> Started:
        """Start an all-reduce (sum), and report it."""
        return self.observed("all_reduce", partial(self.inner.all_reduce, tensor), [tensor])

    def all_reduce_max(self, tensor: Tensor) -> Started:
        """Start an all-reduce (maximum), and count it as a heartbeat."""
        self._counter.record("heartbeat", [tensor], self.ranks)
        return self.inner.all_reduce_max(tensor)

    def observed(self, kind: str, begin: Callable[[], Started], fulls: Sequence[Tensor]) -> Started:
        """Start a collective, and report it. `fulls`: the tensors whose bytes are counted (`Message.nbytes`)."""
        self._counter.record(kind, fulls, self.ranks)
        if not _torch.profiling():
            return begin()
        with record_function(f"fullshard::{kind}"):
            return begin()
