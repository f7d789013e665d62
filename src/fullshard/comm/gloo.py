"""gloo on the CPU: each collective is made of point-to-point messages, with tags that identify the call."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import frexp
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard import _torch
from fullshard.comm.base import StartedWork
from fullshard.comm.process_groups import held, on_release
from fullshard.errors import StateError
from fullshard.policies import DIRECT_MIN_BYTES

# A tag has 24 bits for the call and, below them, 4 bits for the stage of the call. The first tag is above those that programs
# usually pass to torch.distributed.send().
_FIRST_TAG = 0x20000000
_STAGE_BITS = 4
_FEW_RANKS = 8  # up to this many ranks, each rank sends to all others
_REMEMBERED_CALLS = 512  # number of recent calls in `P2PChannel.posted`

T = TypeVar("T")


class SendGate(Protocol):
    """Interface of the collective log: messages belong to a log, and a closed log does not start them."""

    name: str  # of the log

    def begin(self, start: Callable[[], T]) -> T:
        """Call `start`. Raises if the log is closed."""
        ...


class _OpenGate:
    """Gate for messages without a collective log. It starts everything."""

    def __init__(self) -> None:
        self.name = ""

    def begin(self, start: Callable[[], T]) -> T:
        return start()


@dataclass(slots=True)
class MessageTag:
    """The tag of the next messages, equal on all ranks of a call, and the collective log of the call."""

    hash: int = 0  # of all calls up to this one
    gate: SendGate = field(default_factory=_OpenGate)

    @property
    def call_bits(self) -> int:
        """The part of the tag that identifies the call: 24 bits of the hash."""
        return (self.hash ^ (self.hash >> 31)) & 0xFFFFFF


@dataclass(frozen=True, slots=True)
class PostedMessages:
    """The messages of one call between a rank and each peer: one per size (bytes), in this order, in both directions.

    In an all-to-all, sizes differ between peers and directions: then `sizes` is empty.
    """

    log: str  # name of the collective log
    tag: int
    sizes: tuple[int, ...]
    by_peer: tuple[tuple[int, int], ...] = ()  # of an all-to-all: bytes (received from, sent to) each rank of the group

    def with_peer(self, peer: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the sizes of the messages received from a peer, and of those sent to it."""
        if not self.by_peer:
            return self.sizes, self.sizes
        received, sent = self.by_peer[peer]
        return (received,) * bool(received), (sent,) * bool(sent)


class PeerLost(RuntimeError):
    """Raised when another rank closed its connection."""

    def __init__(self, rank: int, failure: BaseException) -> None:
        super().__init__(str(failure))
        self.rank = rank


class _Destroyed:
    """Placeholder for the works of a destroyed process group."""

    def wait(self) -> None:
        raise StateError(
            "The process group of this message was destroyed (destroy_process_group()) before the message was waited for. "
            "Let the step end before you destroy the process group."
        )


_DESTROYED: Any = _Destroyed()


class Messages:
    """The messages of one call.

    The channel keeps them alive until they have been waited for, even if the caller drops them: gloo stops reading from a peer
    when a message arrives that has no buffer.
    """

    __slots__ = ("_channel", "_receives", "_sends", "posted", "works")

    def __init__(
        self,
        channel: P2PChannel,
        posted: PostedMessages,
        receives: Sequence[tuple[Tensor, int]],
        sends: Sequence[tuple[Tensor, int]],
    ) -> None:
        self.works: list[dist.Work] = []
        self.posted = posted
        self._channel, self._receives, self._sends = channel, receives, sends

    def peer_lost(self, at: int, failure: BaseException) -> PeerLost:
        """Return the error for message number `at`."""
        _, peer = [*self._receives, *self._sends][at]
        return PeerLost(self._channel.members[peer], failure)

    def drop(self) -> None:
        """Drop the works after the process group was destroyed, since they keep its connections open."""
        self.works = [_DESTROYED]

    def wait(self) -> None:
        """Wait for all messages. Raises PeerLost if another rank closed its connection."""
        at = 0
        try:
            for work in self.works:
                work.wait()
                at += 1
        except StateError:  # the process group was destroyed, so no peer is lost
            raise
        except RuntimeError as failure:
            raise self.peer_lost(at, failure) from failure
        self._channel.forget(self, self._receives)
        # The caller may keep this object, and the memory of the messages is free now.
        self.works, self._receives, self._sends = [], (), ()


class P2PChannel:
    """The point-to-point messages of one process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.name = _torch.group_name(group)  # equal on all its ranks
        self.members = dist.get_process_group_ranks(group)  # global ranks, by their rank in the group
        self.posted: deque[PostedMessages] = deque(maxlen=_REMEMBERED_CALLS)  # messages of recent calls
        self._held, self._rank = held(group), group.rank()
        self._under_way: set[Messages] = set()  # started and not waited for
        self._dummy_works: list[dist.Work] = []  # works of the dummy messages of `drain_peer`, kept alive
        self._dummy_tags: set[tuple[int, int]] = set()  # (peer, tag) of the dummy messages
        self._abandoned: list[Messages | dist.Work] = []  # of the last step that failed; see `forget_answers`
        self._unheard: set[int] = set()  # ranks in the group, until a message of theirs arrives after that

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> P2PChannel:
        """Return the one channel of a process group."""
        name = _torch.group_name(group)
        with _MAKING:
            found = _CHANNELS.get(name)
            if found is None or not found.carries(group):
                if found is not None:  # its group was destroyed, and a new group has the same name
                    found.release()
                found = _CHANNELS[name] = cls(group)
        return found

    def carries(self, group: dist.ProcessGroup) -> bool:
        """Return True if this is the channel of `group`."""
        return self._held is held(group)

    def exchange(
        self, posted: PostedMessages, receives: Sequence[tuple[Tensor, int]], sends: Sequence[tuple[Tensor, int]]
    ) -> Messages:
        """Start messages. `receives`, `sends`: tensors, each with its peer's rank in the group."""
        messages = Messages(self, posted, receives, sends)
        self._under_way.add(messages)  # before the start: the buffers must stay alive if an interrupt follows
        try:
            _torch.exchange(messages.works, self._held.group, receives, sends, posted.tag)
        except RuntimeError as failure:
            raise messages.peer_lost(len(messages.works), failure) from failure
        finally:  # even if it raises, since the messages before the failure have been sent
            if messages.works:
                self.posted.append(posted)
        return messages

    def forget(self, messages: Messages, receives: Sequence[tuple[Tensor, int]]) -> None:
        """Remove messages that have been waited for."""
        if messages in self._under_way:
            self._under_way.discard(messages)
            if self._abandoned:
                self._unheard.difference_update(peer for _, peer in receives)
                if not self._unheard:
                    self._abandoned = []

    def under_way(self, log: str) -> list[PostedMessages]:
        """Return the started, unwaited messages of a collective log, by its name."""
        return [messages.posted for messages in list(self._under_way) if messages.posted.log == log]

    def drain_peer(self, peer: int, posted: Sequence[PostedMessages], limit: int) -> int:
        """Unblock `peer` after a divergence: exchange dummy data for collectives that this rank will never run.

        Args:
            peer: rank of the peer in the group.
            posted: the messages that the peer waits for.
            limit: bytes of the longest message of this rank's program. Dummy data for a longer message is not allocated.

        Returns:
            Bytes of the longest message above `limit`, 0 if there is none.
        """
        known = {mine.tag for mine in list(self.posted)}
        # (tag, sizes that the peer receives, sizes that it sends)
        missing = [
            (theirs.tag, *theirs.with_peer(self._rank))
            for theirs in posted
            if theirs.tag not in known and (peer, theirs.tag) not in self._dummy_tags
        ]
        too_long = max((size for _, to, back in missing for size in (*to, *back) if size > limit), default=0)
        missing = [one for one in missing if max((*one[1], *one[2]), default=0) <= limit]
        longest = max((size for _, to, back in missing for size in (*to, *back)), default=0)
        # All dummy messages share two buffers, since the data has no meaning.
        sent, received = (torch.zeros(longest, dtype=torch.uint8, device="cpu") for _ in range(2))
        for tag, to, back in missing:
            self._dummy_tags.add((peer, tag))
            receives, sends = [(received[:size], peer) for size in back], [(sent[:size], peer) for size in to]
            _torch.exchange(self._dummy_works, self._held.group, receives, sends, tag)
        return too_long

    @property
    def is_released(self) -> bool:
        """True if torch destroyed the process group."""
        return self._held.is_released

    def release(self) -> None:
        """Drop everything that keeps the destroyed process group's connections open."""
        self.forget_answers()
        for one in self._abandoned:
            if isinstance(one, Messages):
                one.drop()
        self._abandoned = []

    def forget_answers(self) -> None:
        """Forget the messages of a step that failed, and the dummy messages of `drain_peer`, which all ranks have started.

        Nobody waited for them, so some may not have arrived yet, and gloo stops reading from a peer whose message has no
        buffer: all later messages of this peer would never arrive. Messages of one peer arrive in order, so their buffers are
        kept until a later message of each peer has arrived.
        """
        self._abandoned += [*self._under_way, *self._dummy_works]
        self._unheard = set(range(len(self.members))) - {self._rank} if self._abandoned else set()
        self._under_way, self._dummy_works = set(), []
        self._dummy_tags.clear()
        self.posted.clear()


_CHANNELS: dict[str, P2PChannel] = {}
_MAKING = threading.Lock()


@on_release
def _release() -> None:
    for name, channel in list(_CHANNELS.items()):
        if channel.is_released:
            channel.release()
            del _CHANNELS[name]


def channels() -> list[P2PChannel]:
    """Return all channels of this process, including those of deleted models: other ranks may still wait for their messages."""
    return list(_CHANNELS.values())


class GlooCollectives:
    """The fastest collectives on gloo and the CPU (measured by `make bench`).

    gloo's all-gather copies through two buffers of the full size. Sends and receives directly between shard and output are 1.5
    to 4 times as fast from 64 KiB on and need no staging memory. gloo's reduce-scatter is an all-reduce; exchanging chunks and
    summing them locally moves half the bytes.

    gloo matches its own collectives by their count, and a message of an unexpected length kills the process. Here each message
    carries the tag of its call, so ranks that run different calls wait, and the watchdog can report the divergence.
    """

    direct_min_bytes: float = DIRECT_MIN_BYTES
    in_order = False

    def __init__(self, group: dist.ProcessGroup, tag: MessageTag | None = None) -> None:
        self.tag = MessageTag() if tag is None else tag
        self.ranks, self.rank = group.size(), group.rank()
        self._others = [(self.rank + step) % self.ranks for step in range(1, self.ranks)]
        self._held = held(group)
        self._channel = P2PChannel.of(group)

    def _post(self, sizes: tuple[int, ...], by_peer: tuple[tuple[int, int], ...] = ()) -> PostedMessages:
        """Return log name, tag and sizes of the messages that are started next. `by_peer`: sizes that differ by peer."""
        return PostedMessages(self.tag.gate.name, _FIRST_TAG + (self.tag.call_bits << _STAGE_BITS), sizes, by_peer)

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
            if chunks[rank].storage_offset() != shard.storage_offset() or not _torch.same_storage(out, shard):
                copies.append((chunks[rank], shard))
            for step in range(1, ranks):
                receives.append((chunks[(rank - step) % ranks], (rank - step) % ranks))
                sends.append((shard, (rank + step) % ranks))
        sizes, channel = _sizes(shards), self._channel

        def gather() -> StartedWork:
            messages = channel.exchange(self._post(sizes), receives, sends)
            for chunk, shard in copies:  # after the messages are started, so that copies and messages overlap
                chunk.copy_(shard)
            return StartedWork((messages,), unpollable=True)

        return gather

    def all_to_all(
        self, received: Tensor, sent: Tensor, received_sizes: Sequence[int], sent_sizes: Sequence[int]
    ) -> StartedWork:
        """Start an all-to-all: send each rank its part, and receive a part from each. Parts are 1-D, in rank order."""
        arriving, leaving, rank = received.split(list(received_sizes)), sent.split(list(sent_sizes)), self.rank
        by_peer = tuple((to.numel() * to.itemsize, back.numel() * back.itemsize) for to, back in zip(arriving, leaving))
        receives = [(arriving[peer], peer) for peer in self._others if arriving[peer].numel()]
        sends = [(leaving[peer], peer) for peer in self._others if leaving[peer].numel()]
        messages = self._channel.exchange(self._post((), by_peer), receives, sends)
        arriving[rank].copy_(leaving[rank])
        return StartedWork((messages,), unpollable=True)

    def reduce_scatter(self, outs: Sequence[Tensor], fulls: Sequence[Tensor], scale: float) -> StartedWork:
        """Start a reduce-scatter: exchange chunks, and sum them when the work is waited for."""
        if self.ranks == 2:
            return self._reduce_scatter_pair(outs, fulls, scale)
        messages, received, _ = self._exchange(fulls)

        def add() -> None:
            for parts, out in zip(received, outs):
                torch.sum(parts, 0, out=out)
            if scale != 1.0:
                torch._foreach_mul_(list(outs), scale)
            received.clear()  # frees the chunks now, since the work may outlive this call

        return StartedWork((messages,), add, unpollable=True)

    def _exchange(self, fulls: Sequence[Tensor]) -> tuple[Messages, list[Tensor], PostedMessages]:
        """Start sending chunk `i` of each input to rank `i`.

        Returns:
            The messages; per input the received chunks, (ranks, size); and the tag of the messages.
        """
        chunks = [full.view(self.ranks, -1) for full in fulls]
        received = [torch.empty_like(chunk) for chunk in chunks]
        posted = self._post(_sizes([chunk[0] for chunk in chunks]))
        filled = [(chunk, parts) for chunk, parts in zip(chunks, received) if chunk.numel()]
        receives = [(parts[peer], peer) for _, parts in filled for peer in self._others]
        sends = [(chunk[peer], peer) for chunk, _ in filled for peer in self._others]
        messages = self._channel.exchange(posted, receives, sends)
        for chunk, parts in filled:
            parts[self.rank].copy_(chunk[self.rank])
        return messages, received, posted

    def _reduce_scatter_pair(self, outs: Sequence[Tensor], fulls: Sequence[Tensor], scale: float) -> StartedWork:
        """Reduce-scatter for two ranks: exchange halves, and add and scale them in as few passes over memory as possible."""
        peer = 1 - self.rank
        halves = [full.view(2, -1) for full in fulls]
        received = [torch.empty_like(half[0]) for half in halves]
        receives = [(theirs, peer) for theirs in received if theirs.numel()]
        sends = [(half[peer], peer) for half in halves if half.numel()]
        messages = self._channel.exchange(self._post(_sizes(received)), receives, sends)

        def add() -> None:
            for half, theirs, out in zip(halves, received, outs):
                _add_scaled(half[self.rank], theirs, out, scale)
            received.clear()
            halves.clear()

        return StartedWork((messages,), add, unpollable=True)

    def all_reduce(self, tensor: Tensor) -> StartedWork:
        """Start an all-reduce (sum), in place.

        More than two ranks take two stages: a reduce-scatter, and an all-gather, which the wait for the first stage starts.
        """
        if self.ranks == 2 or tensor.numel() < self.ranks:  # fewer elements than ranks would be mostly padding in chunks
            return self._all_exchange(tensor, torch.add)
        numel, chunk = tensor.numel(), -(-tensor.numel() // self.ranks)
        padded = tensor.new_zeros(chunk * self.ranks)
        padded[:numel].copy_(tensor)
        messages, received, first = self._exchange([padded])
        gate = self.tag.gate

        def sum_and_all_gather() -> None:
            mine = padded[self.rank * chunk :][:chunk]
            torch.sum(received.pop(), 0, out=mine)
            second = PostedMessages(first.log, first.tag + 1, _sizes([mine]))
            chunks = padded.view(self.ranks, -1)
            receives = [(chunks[peer], peer) for peer in self._others]
            sends = [(mine, peer) for peer in self._others]
            # Through the gate: if ranks diverged, the log is closed, and the second stage must not start.
            gate.begin(partial(self._channel.exchange, second, receives, sends)).wait()
            tensor.copy_(padded[:numel])

        return StartedWork((messages,), sum_and_all_gather, unpollable=True)

    def all_reduce_max(self, tensor: Tensor) -> StartedWork:
        """Start an all-reduce (maximum). Many ranks take log2(ranks) stages, all but the first in the wait for the first.

            stage 0   receive from rank - 1: maximum of 2 ranks
            stage 1   receive from rank - 2: maximum of 4 ranks
            stage 2   receive from rank - 4: maximum of 8 ranks

        The last stage counts some ranks twice, which does not change a maximum. All ranks send N * log2(N) messages.
        """
        # A tag has room for 2 ** _STAGE_BITS stages, and each stage doubles the number of ranks.
        if self.ranks <= _FEW_RANKS or self.ranks > 1 << (1 << _STAGE_BITS) or not tensor.numel():
            return self._all_exchange(tensor, torch.maximum)
        first, gate = self._post(_sizes([tensor])), self.tag.gate
        alive: list[Tensor] = []  # sent tensors must stay alive until their messages complete

        def begin(stage: int) -> tuple[Messages, Tensor]:
            posted = PostedMessages(first.log, first.tag + stage, first.sizes)
            received, sent, distance = torch.empty_like(tensor), tensor.clone(), 1 << stage
            alive.append(sent)
            source, target = (self.rank - distance) % self.ranks, (self.rank + distance) % self.ranks
            return self._channel.exchange(posted, [(received, source)], [(sent, target)]), received

        messages, received = begin(0)

        def run_further_stages() -> None:
            torch.maximum(tensor, received, out=tensor)
            for stage in range(1, (self.ranks - 1).bit_length()):
                further, theirs = gate.begin(partial(begin, stage))
                further.wait()
                torch.maximum(tensor, theirs, out=tensor)
            alive.clear()

        return StartedWork((messages,), run_further_stages, unpollable=True)

    def _all_exchange(self, tensor: Tensor, merge: Callable[..., Tensor]) -> StartedWork:
        """All-reduce by exchanging whole tensors, for two ranks or little data."""
        received = [torch.empty_like(tensor) for _ in self._others]
        sent = tensor.clone()
        if not tensor.numel():
            return StartedWork()
        sends = [(sent, peer) for peer in self._others]
        messages = self._channel.exchange(self._post(_sizes([tensor])), list(zip(received, self._others)), sends)
        return StartedWork((messages,), partial(self._merge, tensor, received, sent, merge), unpollable=True)

    def _merge(self, tensor: Tensor, received: list[Tensor], sent: Tensor, merge: Callable[..., Tensor]) -> None:
        """Merge the tensors in the order of ranks, so that the result is bit-equal on all ranks."""
        parts = dict(zip(self._others, received))
        tensor.copy_(sent if self.rank == 0 else parts[0])
        for rank in range(1, self.ranks):
            merge(tensor, sent if rank == self.rank else parts[rank], out=tensor)


def _add_scaled(mine: Tensor, theirs: Tensor, out: Tensor, scale: float) -> None:
    """Write (mine + theirs) * scale to `out` (all 1-D), bit-equal to DDP and FSDP2 on gloo, in one pass where possible.

    Multiplication by a power of two is exact, so `addr`, which computes mine * scale + theirs * scale, gives the same bits, but
    not for 16-bit dtypes, which it computes in 32 bits.
    """
    if scale != 1.0 and frexp(scale)[0] == 0.5 and out.itemsize >= 4 and out.numel():
        torch.addr(mine.view(-1, 1), theirs, mine.new_ones(1), beta=scale, alpha=scale, out=out.view(-1, 1))
    else:
        torch.add(mine, theirs, out=out)
        if scale != 1.0:
            out.mul_(scale)


def _sizes(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(tensor.numel() * tensor.itemsize for tensor in tensors if tensor.numel())
