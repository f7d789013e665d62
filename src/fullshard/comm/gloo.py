"""gloo on the CPU: each collective is made of point-to-point messages, with tags that identify the call."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import frexp

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard import _torch
from fullshard.comm.base import StartedWork
from fullshard.policies import DIRECT_MIN_BYTES

# A tag has 24 bits for the call and, below them, 4 bits for the stage of the call. The first tag is above those that programs
# usually pass to torch.distributed.send().
_FIRST_TAG = 0x20000000
_STAGE_BITS = 4
_FEW_RANKS = 8  # up to this many ranks, each rank sends its tensor to all others in `all_reduce_max`

TensorOfPeer = tuple[Tensor, int]  # a message, and the rank of the peer in the group


@dataclass(slots=True)
class MessageTag:
    """The tag of the next messages, equal on all ranks of a call."""

    hash: int = 0  # of the collective log, up to and including the current call

    @property
    def call_bits(self) -> int:
        """The part of the tag that identifies the call: 24 bits of the hash."""
        return (self.hash ^ (self.hash >> 31)) & 0xFFFFFF


class PeerLost(RuntimeError):
    """Raised when a message to or from another rank failed: its connection closed, or the process group timed out."""

    def __init__(self, rank: int, failure: BaseException) -> None:
        super().__init__(str(failure))
        self.rank = rank


class Messages:
    """The messages of one stage of a call.

    `_UNDER_WAY` keeps them alive until they have been waited for, even if the caller drops them: gloo stops reading from a peer
    when a message arrives whose buffer is gone. This class has no `is_completed`: a poll would take 25 us.
    """

    __slots__ = ("_owner", "_receives", "_sends", "works")

    def __init__(self, owner: GlooCollectives, receives: Sequence[TensorOfPeer], sends: Sequence[TensorOfPeer]) -> None:
        self.works: list[dist.Work] = []
        self._owner, self._receives, self._sends = owner, receives, sends

    def peer_lost(self, at: int, failure: BaseException) -> PeerLost:
        """Return the error for message number `at`."""
        _, peer = [*self._receives, *self._sends][at]
        return PeerLost(self._owner.members[peer], failure)

    def wait(self) -> None:
        """Wait for all messages. Raises PeerLost if one fails: its peer closed the connection, or the group timed out."""
        at = 0
        try:
            for work in self.works:
                work.wait()
                at += 1
        except RuntimeError as failure:
            raise self.peer_lost(at, failure) from failure
        self._owner.under_way.discard(self)
        # Release the memory of the messages now, since the caller may keep this object.
        self.works, self._receives, self._sends = [], (), ()


# Messages not yet waited for. They outlive the model that sent them, since other models may use the same group.
_UNDER_WAY: weakref.WeakKeyDictionary[dist.ProcessGroup, set[Messages]] = weakref.WeakKeyDictionary()


class GlooCollectives:
    """Collectives of point-to-point messages, for gloo on the CPU.

    docs/data-plane.md says what gloo's own collectives lack, and docs/error-detection.md what the tags of messages are for.
    """

    direct_min_bytes: float = DIRECT_MIN_BYTES
    in_order = False

    def __init__(self, group: dist.ProcessGroup, tag: MessageTag | None = None) -> None:
        self.tag = MessageTag() if tag is None else tag
        self.ranks, self.rank = group.size(), group.rank()
        self._others = [(self.rank + step) % self.ranks for step in range(1, self.ranks)]
        self._group = group
        self.members = dist.get_process_group_ranks(group)  # global ranks, in the order of the group
        self.under_way = _UNDER_WAY.setdefault(group, set())

    def _exchange(self, tag: int, receives: Sequence[TensorOfPeer], sends: Sequence[TensorOfPeer]) -> Messages:
        """Start messages."""
        messages = Messages(self, receives, sends)
        self.under_way.add(messages)  # before the start: the buffers must stay alive if an interrupt follows
        try:
            _torch.exchange(messages.works, self._group, receives, sends, tag)
        except RuntimeError as failure:
            raise messages.peer_lost(len(messages.works), failure) from failure
        return messages

    def _next_tag(self) -> int:
        return _FIRST_TAG + (self.tag.call_bits << _STAGE_BITS)

    def gatherer(self, outs: Sequence[Tensor], shards: Sequence[Tensor]) -> Callable[[], StartedWork]:
        """Prepare an all-gather: each rank sends its shard to every other rank."""
        rank, ranks = self.rank, self.ranks
        receives: list[tuple[Tensor, int]] = []
        sends: list[tuple[Tensor, int]] = []
        copies: list[tuple[Tensor, Tensor]] = []
        for out, shard in zip(outs, shards):
            if not shard.numel():
                continue
            chunks = out.split(shard.numel())
            if chunks[rank].storage_offset() != shard.storage_offset() or _torch.storage_key(out) != _torch.storage_key(shard):
                copies.append((chunks[rank], shard))
            for step in range(1, ranks):
                receives.append((chunks[(rank - step) % ranks], (rank - step) % ranks))
                sends.append((shard, (rank + step) % ranks))

        def gather() -> StartedWork:
            messages = self._exchange(self._next_tag(), receives, sends)
            for chunk, shard in copies:  # after the messages are started, so that copies and messages overlap
                chunk.copy_(shard)
            return StartedWork((messages,))

        return gather

    def all_to_all(
        self, received: Tensor, sent: Tensor, received_sizes: Sequence[int], sent_sizes: Sequence[int]
    ) -> StartedWork:
        """Start an all-to-all: send each rank its part, and receive a part from each. Parts are 1-D, in rank order."""
        arriving, leaving, rank = received.split(list(received_sizes)), sent.split(list(sent_sizes)), self.rank
        receives = [(arriving[peer], peer) for peer in self._others if arriving[peer].numel()]
        sends = [(leaving[peer], peer) for peer in self._others if leaving[peer].numel()]
        messages = self._exchange(self._next_tag(), receives, sends)
        arriving[rank].copy_(leaving[rank])
        return StartedWork((messages,))

    def reduce_scatter(self, outs: Sequence[Tensor], fulls: Sequence[Tensor], scale: float) -> StartedWork:
        """Start a reduce-scatter: exchange chunks, and sum them when the work is waited for."""
        if self.ranks == 2:
            return self._reduce_scatter_pair(outs, fulls, scale)
        chunks = [full.view(self.ranks, -1) for full in fulls]
        received = [torch.empty_like(chunk) for chunk in chunks]
        filled = [(chunk, parts) for chunk, parts in zip(chunks, received) if chunk.numel()]
        receives = [(parts[peer], peer) for _, parts in filled for peer in self._others]
        sends = [(chunk[peer], peer) for chunk, _ in filled for peer in self._others]
        messages = self._exchange(self._next_tag(), receives, sends)
        for chunk, parts in filled:
            parts[self.rank].copy_(chunk[self.rank])

        def add() -> None:
            for parts, out in zip(received, outs):
                torch.sum(parts, 0, out=out)
            if scale != 1.0:
                torch._foreach_mul_(list(outs), scale)
            received.clear()  # frees the chunks now, since the caller may keep the work

        return StartedWork((messages,), add)

    def _reduce_scatter_pair(self, outs: Sequence[Tensor], fulls: Sequence[Tensor], scale: float) -> StartedWork:
        """Reduce-scatter for two ranks: exchange halves, and add and scale them in as few passes over memory as possible."""
        peer = 1 - self.rank
        halves = [full.view(2, -1) for full in fulls]
        received = [torch.empty_like(half[0]) for half in halves]
        receives = [(theirs, peer) for theirs in received if theirs.numel()]
        sends = [(half[peer], peer) for half in halves if half.numel()]
        messages = self._exchange(self._next_tag(), receives, sends)

        def add() -> None:
            for half, theirs, out in zip(halves, received, outs):
                _add_scaled(half[self.rank], theirs, out, scale)
            received.clear()
            halves.clear()

        return StartedWork((messages,), add)

    def all_reduce(self, tensor: Tensor) -> StartedWork:
        """Start an all-reduce (sum), in place.

        One stage if there are two ranks, or fewer elements than ranks; else a second, an all-gather, starts in `wait()`.
        """
        if self.ranks == 2 or tensor.numel() < self.ranks:  # with fewer elements, some chunks would be padding only
            return self._all_exchange(tensor, torch.add)
        numel, chunk = tensor.numel(), -(-tensor.numel() // self.ranks)
        padded = tensor.new_zeros(chunk * self.ranks)
        padded[:numel].copy_(tensor)
        chunks, tag = padded.view(self.ranks, -1), self._next_tag()
        scattered = self.reduce_scatter([chunks[self.rank]], [padded], 1.0)

        def all_gather() -> None:
            receives = [(chunks[peer], peer) for peer in self._others]
            sends = [(chunks[self.rank], peer) for peer in self._others]
            self._exchange(tag + 1, receives, sends).wait()
            tensor.copy_(padded[:numel])

        return StartedWork((scattered,), all_gather)

    def all_reduce_max(self, tensor: Tensor) -> StartedWork:
        """Start an all-reduce (maximum). Many ranks take log2(ranks) stages: one now, the others in `wait()`.

            stage 0   receive from rank - 1: maximum of 2 ranks
            stage 1   receive from rank - 2: maximum of 4 ranks
            stage 2   receive from rank - 4: maximum of 8 ranks

        The last stage may count some ranks twice, which does not change a maximum. N ranks together send N * log2(N) messages.
        """
        # A tag has room for 2 ** _STAGE_BITS stages, and each stage doubles the number of ranks.
        if self.ranks <= _FEW_RANKS or self.ranks > 1 << (1 << _STAGE_BITS) or not tensor.numel():
            return self._all_exchange(tensor, torch.maximum)
        tag = self._next_tag()

        def begin(stage: int) -> tuple[Messages, Tensor]:
            received, sent, distance = torch.empty_like(tensor), tensor.clone(), 1 << stage
            source, target = (self.rank - distance) % self.ranks, (self.rank + distance) % self.ranks
            return self._exchange(tag + stage, [(received, source)], [(sent, target)]), received

        messages, received = begin(0)

        def run_further_stages() -> None:
            torch.maximum(tensor, received, out=tensor)
            for stage in range(1, (self.ranks - 1).bit_length()):
                further, theirs = begin(stage)
                further.wait()
                torch.maximum(tensor, theirs, out=tensor)

        return StartedWork((messages,), run_further_stages)

    def _all_exchange(self, tensor: Tensor, merge: Callable[..., Tensor]) -> StartedWork:
        """All-reduce by exchanging whole tensors, for few ranks or little data."""
        received = [torch.empty_like(tensor) for _ in self._others]
        sent = tensor.clone()
        if not tensor.numel():
            return StartedWork()
        sends = [(sent, peer) for peer in self._others]
        messages = self._exchange(self._next_tag(), list(zip(received, self._others)), sends)
        parts = {self.rank: sent, **dict(zip(self._others, received))}

        def merge_all() -> None:  # in the order of ranks, so that the result is bit-equal on all ranks
            tensor.copy_(parts[0])
            for rank in range(1, self.ranks):
                merge(tensor, parts[rank], out=tensor)

        return StartedWork((messages,), merge_all)


def _add_scaled(mine: Tensor, theirs: Tensor, out: Tensor, scale: float) -> None:
    """Write (mine + theirs) * scale to `out` (all 1-D), bit-equal to DDP and FSDP2 on gloo, in one pass where possible.

    Multiplication by a power of two is exact, so `addr` (mine * scale + theirs * scale) then gives the same bits, unless a
    value overflows or underflows. 16-bit dtypes are excluded: `addr` sums them in 32 bits, where float16 does not overflow.
    """
    if scale != 1.0 and frexp(scale)[0] == 0.5 and out.itemsize >= 4 and out.numel():
        torch.addr(mine.view(-1, 1), theirs, mine.new_ones(1), beta=scale, alpha=scale, out=out.view(-1, 1))
    else:
        torch.add(mine, theirs, out=out)
        if scale != 1.0:
            out.mul_(scale)
