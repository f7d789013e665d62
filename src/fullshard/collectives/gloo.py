"""gloo on the CPU: every collective as messages between pairs of ranks, under tags that keep calls apart."""

from __future__ import annotations

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
from fullshard.collectives.base import StartedWork
from fullshard.collectives.process_groups import held, on_release
from fullshard.errors import StateError
from fullshard.policies import DIRECT_MIN_BYTES

_TAGS = 0x20000000  # above the tags that programs use; 28 bits are ours: 24 of the call, 4 of its stages
_STAGES = 4
_FEW = 8  # ranks up to which each sends to all others
_REMEMBERED = 512  # collectives of which a group knows that it took part in them

T = TypeVar("T")


class SendGate(Protocol):
    """The owner of messages: a collective log."""

    name: str

    def begin(self, start: Callable[[], T]) -> T:
        """Have `start` begin messages. Raises if nothing more is sent of it."""
        ...


class _OpenGate:
    def __init__(self) -> None:
        self.name = ""

    def begin(self, start: Callable[[], T]) -> T:
        return start()


@dataclass(slots=True)
class MessageTag:
    """A number for the messages that are started now, equal on all ranks that exchange them, and the log that it is from."""

    hash: int = 0  # of all calls up to the one they are of
    gate: SendGate = field(default_factory=_OpenGate)

    @property
    def now(self) -> int:
        """The number, of 24 bits."""
        return (self.hash ^ (self.hash >> 31)) & 0xFFFFFF


@dataclass(frozen=True, slots=True)
class PostedMessages:
    """Messages that a rank exchanges with each of the others: one of each size (bytes), in this order, both ways."""

    log: str
    tag: int
    sizes: tuple[int, ...]


class PeerLost(RuntimeError):
    """The connection to another rank is closed."""

    def __init__(self, rank: int, failure: BaseException) -> None:
        super().__init__(str(failure))
        self.rank = rank


class _Destroyed:
    """Stands in the place of messages of a process group that is gone."""

    def wait(self) -> None:
        raise StateError("the process group of this message was destroyed (destroy_process_group()) before it was waited for")


_DESTROYED: Any = _Destroyed()


class Messages:
    """The messages of one call.

    They are kept until they were waited for, whatever becomes of the caller: gloo reads nothing more from a peer that sends to
    a receive that is gone.
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

    def lost(self, at: int, failure: BaseException) -> PeerLost:
        """The error of message number `at`."""
        _, peer = [*self._receives, *self._sends][at]
        return PeerLost(self._channel.members[peer], failure)

    def drop(self) -> None:
        """The process group was destroyed: let go of all that keeps its connections open."""
        self.works = [_DESTROYED]

    def wait(self) -> None:
        """Raises PeerLost if one of the other ranks closed its connection."""
        at = 0
        try:
            for work in self.works:
                work.wait()
                at += 1
        except StateError:
            raise
        except RuntimeError as failure:
            raise self.lost(at, failure) from failure
        self._channel.forget(self)


class P2PChannel:
    """All messages between pairs of ranks of one process group. process group 1 - 1 channel."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.name = _torch.group_name(group)  # the same on all its ranks
        self.members = dist.get_process_group_ranks(group)  # global ranks, by their rank in the group
        self.posted: deque[PostedMessages] = deque(maxlen=_REMEMBERED)
        self._held = held(group)
        self._under_way: set[Messages] = set()
        self._answers: list[dist.Work] = []
        self._answered: set[tuple[int, int]] = set()

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> P2PChannel:
        """The one channel of a process group."""
        name = _torch.group_name(group)
        found = _CHANNELS.get(name)
        if found is None or not found.carries(group):
            if found is not None:  # its group was destroyed, and another one has its name
                found.release()
            found = _CHANNELS[name] = cls(group)
        return found

    def carries(self, group: dist.ProcessGroup) -> bool:
        """Whether it is the channel of `group`."""
        return self._held is held(group)

    def exchange(
        self, posted: PostedMessages, receives: Sequence[tuple[Tensor, int]], sends: Sequence[tuple[Tensor, int]]
    ) -> Messages:
        """Begin these messages, each with the rank in the group that it comes from or goes to."""
        messages = Messages(self, posted, receives, sends)
        self._under_way.add(messages)
        try:
            _torch.exchange(messages.works, self._held.group, receives, sends, posted.tag)
        except RuntimeError as failure:
            raise messages.lost(len(messages.works), failure) from failure
        finally:  # if it raises one of the ranks is gone
            if messages.works:
                self.posted.append(posted)
        return messages

    def forget(self, messages: Messages) -> None:
        """The messages were waited for."""
        self._under_way.discard(messages)

    def under_way(self, log: str) -> list[PostedMessages]:
        """Messages of a collective log (by its name) that were begun and not waited for."""
        return [messages.posted for messages in list(self._under_way) if messages.posted.log == log]

    def drain_peer(self, peer: int, posted: Sequence[PostedMessages], limit: int) -> int:
        """Exchange meaningless messages with `peer` for collectives that this rank will take no part in: its waits end.

        peer: its rank in the group.
        posted: the messages that it waits for.
        limit: bytes; a longer message cannot be of this program and is left alone. Returns the bytes of such a one, 0 if
            there is none.
        """
        known = {mine.tag for mine in list(self.posted)}
        missing = [theirs for theirs in posted if theirs.tag not in known and (peer, theirs.tag) not in self._answered]
        too_long = max((size for theirs in missing for size in theirs.sizes if size > limit), default=0)
        missing = [theirs for theirs in missing if max(theirs.sizes, default=0) <= limit]
        longest = max((size for theirs in missing for size in theirs.sizes), default=0)
        sent, received = (torch.zeros(longest, dtype=torch.uint8, device="cpu") for _ in range(2))
        for theirs in missing:
            self._answered.add((peer, theirs.tag))
            for size in theirs.sizes:
                _torch.exchange(self._answers, self._held.group, [(received[:size], peer)], [(sent[:size], peer)], theirs.tag)
        return too_long

    @property
    def is_released(self) -> bool:
        """Whether torch destroyed the process group."""
        return self._held.is_released

    def release(self) -> None:
        """The process group was destroyed."""
        for messages in list(self._under_way):
            messages.drop()
        self.forget_answers()

    def forget_answers(self) -> None:
        """All ranks have received the messages of `drain_peer`."""
        self._answers.clear()
        self._under_way.clear()
        self._answered.clear()
        self.posted.clear()


_CHANNELS: dict[str, P2PChannel] = {}


@on_release
def _release() -> None:
    for name, channel in list(_CHANNELS.items()):
        if channel.is_released:
            channel.release()
            del _CHANNELS[name]


def channels() -> list[P2PChannel]:
    """The channels of this process, whatever became of the models that used them: other ranks may still wait for messages."""
    return list(_CHANNELS.values())


class GlooCollectives:
    """gloo on the CPU, by what is fastest there (`make bench` measures it again).

    gloo's all-gather stages through two buffers of full size, so gathers are sends and receives straight between
    shard and region: 1.5 to 4 times faster from 64 KiB on, and no staging memory. Its reduce-scatter is an all-reduce
    in disguise; exchanging chunks and summing them locally moves half the bytes.

    Its own collectives pair up by how many a rank has begun, and a message of another length than expected ends the process.
    Here each message carries the tag of its call, so ranks that call different things wait instead, and can be told so.
    """

    direct_min_bytes: float = DIRECT_MIN_BYTES
    in_order = False

    def __init__(self, group: dist.ProcessGroup, tag: MessageTag | None = None) -> None:
        self.tag = MessageTag() if tag is None else tag
        self.ranks, self.rank = group.size(), group.rank()
        self._others = [(self.rank + step) % self.ranks for step in range(1, self.ranks)]
        self._held = held(group)
        self._channel = P2PChannel.of(group)

    def _post(self, sizes: tuple[int, ...]) -> PostedMessages:
        """The name, tag and sizes of the messages that are begun next."""
        return PostedMessages(self.tag.gate.name, _TAGS + (self.tag.now << _STAGES), sizes)

    def gatherer(self, outs: Sequence[Tensor], shards: Sequence[Tensor]) -> Callable[[], StartedWork]:
        """As `Collectives.gatherer`."""
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
            for chunk, shard in copies:
                chunk.copy_(shard)
            return StartedWork((messages,), unpollable=True)

        return gather

    def reduce_scatter(self, outs: Sequence[Tensor], fulls: Sequence[Tensor], scale: float) -> StartedWork:
        """As `Collectives.reduce_scatter`."""
        if self.ranks == 2:
            return self._reduce_scatter_pair(outs, fulls, scale)
        messages, received, _ = self._exchange(fulls)

        def add() -> None:
            for parts, out in zip(received, outs):
                torch.sum(parts, 0, out=out)
            if scale != 1.0:
                torch._foreach_mul_(list(outs), scale)
            received.clear()

        return StartedWork((messages,), add, unpollable=True)

    def _exchange(self, fulls: Sequence[Tensor]) -> tuple[Messages, list[Tensor], PostedMessages]:
        """Exchange chunks, each rank getting its own of all `fulls`: messages, a tensor (ranks, size) per full, their name."""
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
        """For two ranks: send the other's half, receive mine, and average in as few passes over memory as there can be."""
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
        """Sum over more than two ranks in two stages, the second when the first is waited for; as many bytes as a ring."""
        if self.ranks == 2 or tensor.numel() < self.ranks:
            return self._all_exchange(tensor, torch.add)
        numel, chunk = tensor.numel(), -(-tensor.numel() // self.ranks)
        padded = tensor.new_zeros(chunk * self.ranks)
        padded[:numel].copy_(tensor)
        messages, received, first = self._exchange([padded])
        gate = self.tag.gate

        def share() -> None:
            mine = padded[self.rank * chunk :][:chunk]
            torch.sum(received.pop(), 0, out=mine)
            second = PostedMessages(first.log, first.tag + 1, _sizes([mine]))
            chunks = padded.view(self.ranks, -1)
            receives = [(chunks[peer], peer) for peer in self._others]
            sends = [(mine, peer) for peer in self._others]
            gate.begin(partial(self._channel.exchange, second, receives, sends)).wait()
            tensor.copy_(padded[:numel])

        return StartedWork((messages,), share, unpollable=True)

    def all_reduce_max(self, tensor: Tensor) -> StartedWork:
        """Maximum over many ranks in log2(ranks) stages, all but the first when that is waited for: N * log2(N) messages.

        stage 0   from rank - 1: the largest of 2 ranks, wherever they begin
        stage 1   from rank - 2: of 4;  stage 2, from rank - 4: of 8;  the last reaches back over all, some of them twice,
                  which a maximum does not mind
        """
        if self.ranks <= _FEW or self.ranks > 1 << (1 << _STAGES) or not tensor.numel():
            return self._all_exchange(tensor, torch.maximum)
        first, gate = self._post(_sizes([tensor])), self.tag.gate
        kept: list[Tensor] = []  # tensors on their way

        def begin(stage: int) -> tuple[Messages, Tensor]:
            posted = PostedMessages(first.log, first.tag + stage, first.sizes)
            received, sent, distance = torch.empty_like(tensor), tensor.clone(), 1 << stage
            kept.append(sent)
            source, target = (self.rank - distance) % self.ranks, (self.rank + distance) % self.ranks
            return self._channel.exchange(posted, [(received, source)], [(sent, target)]), received

        messages, received = begin(0)

        def spread() -> None:
            torch.maximum(tensor, received, out=tensor)
            for stage in range(1, (self.ranks - 1).bit_length()):
                further, theirs = gate.begin(partial(begin, stage))
                further.wait()
                torch.maximum(tensor, theirs, out=tensor)
            kept.clear()

        return StartedWork((messages,), spread, unpollable=True)

    def _all_exchange(self, tensor: Tensor, merge: Callable[..., Tensor]) -> StartedWork:
        """Exchange whole tensors: each rank gets all ranks' `tensor`, for two ranks or little data."""
        received = [torch.empty_like(tensor) for _ in self._others]
        sent = tensor.clone()
        if not tensor.numel():
            return StartedWork()
        sends = [(sent, peer) for peer in self._others]
        messages = self._channel.exchange(self._post(_sizes([tensor])), list(zip(received, self._others)), sends)
        return StartedWork((messages,), partial(self._merge, tensor, received, sent, merge), unpollable=True)

    def _merge(self, tensor: Tensor, received: list[Tensor], sent: Tensor, merge: Callable[..., Tensor]) -> None:
        """In one order on all ranks, so that all get the same bits."""
        parts = dict(zip(self._others, received))
        tensor.copy_(sent if self.rank == 0 else parts[0])
        for rank in range(1, self.ranks):
            merge(tensor, sent if rank == self.rank else parts[rank], out=tensor)


def _add_scaled(mine: Tensor, theirs: Tensor, out: Tensor, scale: float) -> None:
    """(mine + theirs) * scale, all (size,), with the bits that DDP and torch's FSDP2 have on gloo, in one pass if there is one.

    Multiplying by a power of two is exact, so mine * scale + theirs * scale, which is `addr`, has those bits. `lerp` has them
    for 16 bits only, as it computes those in 32, and is four times faster there.
    """
    if scale == 0.5 and out.itemsize == 2:
        torch.lerp(mine, theirs, 0.5, out=out)
    elif scale != 1.0 and frexp(scale)[0] == 0.5 and out.itemsize >= 4 and out.numel():
        torch.addr(mine.view(-1, 1), theirs, mine.new_ones(1), beta=scale, alpha=scale, out=out.view(-1, 1))
    else:
        torch.add(mine, theirs, out=out)
        if scale != 1.0:
            out.mul_(scale)


def _sizes(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(tensor.numel() * tensor.itemsize for tensor in tensors if tensor.numel())
