"""Collectives of user calls: they find whether ranks agree, and raise one rank's error on all ranks."""

from __future__ import annotations

import ctypes
import hashlib
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard.checks.collective_log import GroupFingerprints, UnitName, listed
from fullshard.comm.base import Collectives, Started
from fullshard.comm.streams import CollectiveCall
from fullshard.core.communicator import Communicator
from fullshard.core.mesh import ShardAxis
from fullshard.core.subclasses import plain_parts
from fullshard.errors import StateError, printable

T = TypeVar("T")

_ERRORS: dict[str, type[Exception]] = {"V": ValueError, "S": StateError, "R": RuntimeError}  # by their letter in a message
_HEADER = struct.Struct("<qq")  # before the bytes of each rank: its global rank, and the number of bytes


class Ranks(ABC):
    """Ranks that call the same methods in the same order, even if the work of some of them fails."""

    @abstractmethod
    def first_failure(self, failure: Exception | None) -> Exception | None:
        """Return the error for every rank to raise; None if no rank failed. `failure`: the error of this rank. Collective."""

    def run(self, work: Callable[[], T]) -> T:
        """Call `work` on every rank and return its result. If it fails on any, raise `first_failure` on all. Collective."""
        failure: Exception | None = None
        try:
            result = work()
        except Exception as caught:
            failure = caught
        first = self.first_failure(failure)
        if first is not None:
            raise first from failure
        return result


class Agreement(Ranks):
    """The ranks in one call of the user, such as `fully_shard()`, `materialize()` or `save_weights()`, and their collectives.

    Each collective is logged under the name of the call. So if ranks are in different calls, the watchdog reports both, and an
    error of the backend names the call and the states of the other ranks.
    """

    def __init__(
        self,
        communicator: Communicator | None,
        axes: Sequence[ShardAxis],
        unit_name: UnitName,
        doing: str,
        subject: str = "",
        *,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Begin a call over axes that together connect the ranks. A rank that is alone needs no axes and no communicator.

        Args:
            doing: the name of the call; options that ranks must share are part of it, so that errors show them.
            subject: a text that must be equal on all ranks; it is part of the log's hash.
            ranks: global ranks that take part; None: those of `axes`.
        """
        self.axes = tuple(axes)
        self.device = axes[0].device if axes else torch.device("cpu")  # of the tensors in the collectives
        self._communicator, self._unit_name, self._doing, self._subject = communicator, unit_name, doing, subject
        self._ranks = ranks
        self.groups: dict[dist.ProcessGroup, ShardAxis] = {}  # each with its axis, replicas first
        for axis in axes:
            for group in axis.groups:
                self.groups.setdefault(group, axis)
        self._fingerprints: dict[tuple[int, int], GroupFingerprints] = {}  # by `ShardAxis.key`
        self._last: CollectiveCall | None = None

    def on_axis(self, axis: ShardAxis) -> Agreement:
        """Return the agreement of the same call for parameters on another axis."""
        if [axis.key] == [one.key for one in self.axes]:
            return self
        return Agreement(self._communicator, [axis], self._unit_name, self._doing, self._subject)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Ascending ranks: those given, else those of the process group or, if there are several, of the first axis."""
        if self._ranks is not None:
            return tuple(sorted(self._ranks))
        if len(self.groups) > 1:
            return tuple(sorted(self.axes[0].members))
        return tuple(rank for group in self.groups for rank in sorted(dist.get_process_group_ranks(group))) or (0,)

    @cached_property
    def index(self) -> int:
        """Position of this rank in `ranks`."""
        return self.ranks.index(dist.get_rank()) if len(self.ranks) > 1 else 0

    # --- small tensors ---

    def maximum(self, tensor: Tensor) -> Tensor:
        """Return the element-wise maximum over all ranks, on the device of `tensor`; in place if that is `self.device`."""
        moved = tensor.to(self.device)
        for group in self.groups:
            self._run(group, [moved], lambda collectives: collectives.all_reduce_max(moved))
        return moved.to(tensor.device)

    def from_first_rank(self, tensor: Tensor) -> Tensor:
        """Return the first rank's values of a tensor of non-negative integers."""
        # All other ranks pass zeros, so the maximum is the first rank's tensor.
        return self.maximum(tensor if self.index == 0 else torch.zeros_like(tensor))

    def all_gather(self, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        """All-gather a tensor over one of the groups. Return (size of the group, *shape of the tensor)."""
        part, found = tensor.contiguous(), tensor.new_empty((group.size(), *tensor.shape))
        if part.numel():
            # As bytes, since not every backend has every dtype.
            out, mine = found.view(-1).view(torch.uint8), part.view(-1).view(torch.uint8)
            self._run(group, [found], lambda collectives: collectives.gatherer([out], [mine])())
        return found

    def barrier(self) -> None:
        """Wait until all ranks reach a barrier. With tags (gloo), ranks in different calls raise before anything is changed."""
        self.maximum(torch.zeros(1, dtype=torch.uint8, device=self.device))
        if self._last is not None:
            self._last.block()  # on an accelerator, only streams have waited so far

    def unlogged(self, work: Callable[[], T]) -> T:
        """Call `work`, whose collectives are not logged (DTensor's, for example), and return its result."""
        # After the barrier, all ranks are in this call. To the watchdog, a wait in `work` looks like a wait in the barrier.
        self.barrier()
        if self._communicator is None or self._last is None:
            return work()
        with self._communicator.waiting(self._last):
            return work()

    # --- bytes ---

    def first_unequal(self, rows: Tensor, present: Tensor | None = None) -> int | None:
        """Return the index of the first row that differs between ranks that have it, or None. Collective: a message per group.

        `rows`: (rows, bytes) of uint8. `present`: (rows,) of uint8, 1 for the rows that this rank has; None if it has all.
        """
        # The maximum of 255 - x is 255 minus the minimum of x. So both maxima of a byte add up to 255 if it is equal on all
        # ranks, and to more if it is not. Zeros change no maximum: a rank without a row sends zeros.
        message = torch.cat([rows, 255 - rows], 1)
        found = self.maximum(message if present is None else message * present.view(-1, 1)).cpu().int()
        differ = (found[:, : rows.shape[1]] + found[:, rows.shape[1] :] > 255).any(1).nonzero()
        return int(differ[0]) if differ.numel() else None

    def all_equal(self, content: bytes) -> bool:
        """Return True if `content` is equal on all ranks. Collective: a digest and its complement, 16 bytes, per group."""
        digest = hashlib.sha256(content).digest()[:8]
        return self.first_unequal(torch.tensor([list(digest)], dtype=torch.uint8, device=self.device)) is None

    def gather_bytes(self, content: bytes, at_most: int | None = None) -> dict[int, bytes]:
        """Return the content of each rank, by global rank in ascending order. Collective.

        at_most: how many bytes of each content to send; None sends all, after one more message for the greatest length.
        """
        if at_most is None:
            at_most = int(self.maximum(torch.tensor([len(content)], device="cpu")).item())
            if not at_most:
                return dict.fromkeys(self.ranks, b"")
        mine = content[:at_most]
        padded = _HEADER.pack(dist.get_rank() if self.groups else 0, len(mine)) + mine.ljust(at_most)
        rows = torch.frombuffer(bytearray(padded), dtype=torch.uint8).to(self.device)
        for group in self.groups:  # each group also forwards what the ones before gathered
            rows = self.all_gather(rows, group)
        every, found = _bytes_in(rows), dict[int, bytes]()
        for start in range(0, len(every), len(padded)):
            rank, length = _HEADER.unpack_from(every, start)
            found[rank] = every[start + _HEADER.size :][:length]
        return dict(sorted(found.items()))

    def who_differs(self, content: bytes) -> str:
        """Return which ranks differ, as "between rank 0 and ranks 1-3"; "" if none. Lengths must be equal. Collective."""
        found = self.gather_bytes(content, at_most=len(content))
        first = next(iter(found))
        others = [rank for rank, other in found.items() if other != found[first]]
        return f"between rank {first} and {listed(others)}" if others else ""

    def first_rank_bytes(self, content: bytes) -> bytes:
        """Return the bytes of the first rank. Collective; other ranks may pass anything."""
        length = int(self.from_first_rank(torch.tensor([len(content)], device="cpu")).item())
        mine = bytearray(content[:length].ljust(length))  # on other ranks only the length counts
        return _bytes_in(self.from_first_rank(torch.frombuffer(mine, dtype=torch.uint8))) if length else b""

    def first_failure(self, failure: Exception | None) -> Exception | None:
        """Return the first failed rank's error, as ValueError or StateError if it is one, else as RuntimeError. Collective."""
        kind = next(letter for letter, error in _ERRORS.items() if letter == "R" or isinstance(failure, error))
        mine = b"" if failure is None else printable(kind + (str(failure) or type(failure).__name__)).encode()
        first = next(filter(None, self.gather_bytes(mine).values()), b"").decode()
        return _ERRORS[first[0]](first[1:]) if first else None

    # --- large tensors ---

    @torch.no_grad()
    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Copy the first rank's values to all ranks, in place, except on meta."""
        if not self.groups:
            return
        # torch's own broadcast sends each value once, an all-reduce twice. Broadcasts carry no tags, so all ranks meet first.
        self.barrier()
        for mine in (part.detach() for tensor in tensors for part in plain_parts(tensor)):
            if mine.device.type == "meta":
                continue
            moved = mine.to(self.device).contiguous()
            message = moved.view(-1).view(torch.uint8)  # as bytes, since not every backend has every dtype
            for group in self.groups:
                source = dist.get_process_group_ranks(group)[0]
                start = partial(dist.broadcast, message, source, group=group, async_op=True)
                self.send(self.groups[group], group, [moved], start)
            if moved is not mine:
                mine.copy_(moved)

    # --- running and logging ---

    def _run(self, group: dist.ProcessGroup, fulls: Sequence[Tensor], start: Callable[[Collectives], Started]) -> None:
        assert self._communicator is not None
        collectives = self._communicator.collectives_of_group(group)
        self.send(self.groups[group], group, fulls, partial(start, collectives))

    def send(
        self,
        axis: ShardAxis,
        group: dist.ProcessGroup,
        fulls: Sequence[Tensor],
        start: Callable[[], Started],
        *,
        wait: bool = True,
    ) -> CollectiveCall:
        """Log a collective on `axis`, under the name of this call, and start it. Return it, waited for if `wait` is True.

        `fulls`: the tensors whose bytes `counting()` reports: what is gathered or received, or reduced or broadcast in place.
        """
        communicator = self._communicator
        assert communicator is not None
        fingerprints = self._fingerprints.get(axis.key)
        if fingerprints is None:
            fingerprints = GroupFingerprints(communicator.log_of(axis), self._unit_name, self._subject)
            self._fingerprints[axis.key] = fingerprints

        def recorded() -> Started:
            communicator.traffic.record("talk", fulls, group.size())  # the `Message.kind` that users see in `counting()`
            return start()

        self._last = sent = communicator.send(communicator.reduce_scatter_stream, fingerprints, self._doing, recorded)
        if wait:
            sent.wait()
        return sent


def _bytes_in(tensor: Tensor) -> bytes:
    """Return the bytes of a contiguous tensor."""
    moved = tensor.cpu()
    return ctypes.string_at(moved.data_ptr(), moved.nbytes)
