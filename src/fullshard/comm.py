"""How bytes travel: collectives, the lanes their work is queued on, the journal that counts them, and what is in flight."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard import _torch
from fullshard.groups import held

KIB = 1024


@dataclass(slots=True)
class Pending:
    """A collective that was started: `works` to wait for, then `then()` to finish it on the lane it was started on.

    silent: these works never say that they are over (asking gloo's messages costs 25 us, in vain); only waiting tells.
    """

    works: Sequence[Any] = ()
    then: Callable[[], None] | None = None
    silent: bool = False


class Collectives(Protocol):
    """The collectives of one shard axis. Tensors are 1-D and contiguous; nothing is waited for inside.

    An implementation of your own goes in through `CommPolicy(collectives=...)`.
    """

    ranks: int
    rank: int
    direct_min_bytes: float  # chunks at least this large are worth a message of their own

    def gatherer(self, outs: Sequence[Tensor], shards: Sequence[Tensor]) -> Callable[[], Pending]:
        """What gathers `shards[i]` (size,) of all ranks, in rank order, into `outs[i]` (ranks * size,), whenever it is called.

        A shard may be this rank's own slot of its out.
        """
        ...

    def reduce_scatter(self, outs: Sequence[Tensor], fulls: Sequence[Tensor], scale: float) -> Pending:
        """Sum chunk `rank` of `fulls[i]` (ranks * size,) over all ranks, times `scale`, into `outs[i]` (size,)."""
        ...

    def all_reduce(self, tensor: Tensor) -> Pending:
        """Element-wise sum over all ranks, in place."""
        ...

    def all_reduce_max(self, tensor: Tensor) -> Pending:
        """Element-wise maximum over all ranks, in place."""
        ...


Allocate = Callable[..., Tensor]  # (numel, *, dtype, device) -> 1-D tensor


class OneRank:
    """A group of one: the same code, and a copy where others send."""

    ranks, rank = 1, 0
    direct_min_bytes: float = 0

    def gatherer(self, outs: Sequence[Tensor], shards: Sequence[Tensor]) -> Callable[[], Pending]:
        pairs = [(out, shard) for out, shard in zip(outs, shards) if out.data_ptr() != shard.data_ptr() or not out.numel()]

        def gather() -> Pending:
            for out, shard in pairs:
                out.copy_(shard)
            return Pending()

        return gather

    def reduce_scatter(self, outs: Sequence[Tensor], fulls: Sequence[Tensor], scale: float) -> Pending:
        for out, full in zip(outs, fulls):
            torch.mul(full, scale, out=out) if scale != 1.0 else out.copy_(full)
        return Pending()

    def all_reduce(self, tensor: Tensor) -> Pending:
        return Pending()

    def all_reduce_max(self, tensor: Tensor) -> Pending:
        return Pending()


class CoalescedCollectives:
    """nccl and everything like it: all buckets of a group go out as one coalesced call."""

    direct_min_bytes: float = 256 * KIB

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._held = held(group)
        self.ranks, self.rank = group.size(), group.rank()

    def gatherer(self, outs: Sequence[Tensor], shards: Sequence[Tensor]) -> Callable[[], Pending]:
        group = self._held
        if len(outs) == 1:
            out, shard = outs[0], shards[0]
            return lambda: Pending((_torch.all_gather_base(group(), out, shard),))
        return lambda: Pending((_torch.all_gather_coalesced(group(), outs, shards),))

    def reduce_scatter(self, outs: Sequence[Tensor], fulls: Sequence[Tensor], scale: float) -> Pending:
        if len(outs) == 1:
            work = _torch.reduce_scatter_base(self._held(), outs[0], fulls[0])
        else:
            work = _torch.reduce_scatter_coalesced(self._held(), outs, fulls)
        return Pending((work,), partial(_torch.scale, outs, scale) if scale != 1.0 else None)

    def all_reduce(self, tensor: Tensor) -> Pending:
        return Pending((_torch.all_reduce_sum(self._held(), tensor),))

    def all_reduce_max(self, tensor: Tensor) -> Pending:
        return Pending((_torch.all_reduce_max(self._held(), tensor),))


# --- the caller's own collectives ---------------------------------------------------------------------------------------


class Comm(ABC):
    """A collective of the caller's, and the memory it works on. Same interface as the class of this name in FSDP2."""

    @abstractmethod
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory of `size` (one dim) for messages."""


class AllGather(Comm):
    """An all-gather of the caller's, for `FSDPModule.set_custom_all_gather`."""

    @abstractmethod
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather `input_tensor` (size,), this rank's slot of `output_tensor` (ranks * size,), from all ranks into it."""


class ReduceScatter(Comm):
    """A reduce-scatter of the caller's, for `FSDPModule.set_custom_reduce_scatter`."""

    @abstractmethod
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce chunk `rank` of `input_tensor` (ranks * size,) over all ranks by `op` (a sum) into `output_tensor` (size,)."""


class GatherInMemory(AllGather):
    """torch's all-gather, in memory that `memory` allocates."""

    def __init__(self, memory: Allocate) -> None:
        self._memory = memory

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._memory(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        return _torch.all_gather_base(group, output_tensor, input_tensor)


class ReduceInMemory(ReduceScatter):
    """torch's reduce-scatter, in memory that `memory` allocates."""

    def __init__(self, memory: Allocate) -> None:
        self._memory = memory

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._memory(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        return _torch.reduce_scatter_base(group, output_tensor, input_tensor)


class CustomCollectives:
    """The caller's all-gather, reduce-scatter or both, in memory that they allocate; the rest as `inner` does it.

    Everything is packed, so that each gather and each reduction is one message in memory of theirs.
    """

    def __init__(
        self,
        inner: Collectives,
        group: dist.ProcessGroup,
        all_gather: AllGather | None = None,
        reduce_scatter: ReduceScatter | None = None,
    ) -> None:
        self._inner, self._held, self._gather, self._reduce = inner, held(group), all_gather, reduce_scatter
        self.ranks, self.rank = inner.ranks, inner.rank
        self.direct_min_bytes = float("inf")
        self.gather_memory: Allocate | None = all_gather.allocate if all_gather is not None else None
        self.reduce_memory: Allocate | None = reduce_scatter.allocate if reduce_scatter is not None else None

    def gatherer(self, outs: Sequence[Tensor], shards: Sequence[Tensor]) -> Callable[[], Pending]:
        call = self._gather
        if call is None:
            return self._inner.gatherer(outs, shards)

        def gather() -> Pending:
            works = []
            for out, shard in zip(outs, shards):
                slot = out.view(self.ranks, -1)[self.rank]
                if slot.data_ptr() != shard.data_ptr():
                    slot.copy_(shard)
                works.append(call(out, slot, self._held(), async_op=True))
            return Pending([work for work in works if work is not None])

        return gather

    def reduce_scatter(self, outs: Sequence[Tensor], fulls: Sequence[Tensor], scale: float) -> Pending:
        if self._reduce is None:
            return self._inner.reduce_scatter(outs, fulls, scale)
        group, add = self._held(), dist.ReduceOp.SUM
        works = [self._reduce(out, full, group, add, async_op=True) for out, full in zip(outs, fulls)]
        then = partial(_torch.scale, outs, scale) if scale != 1.0 else None
        return Pending([work for work in works if work is not None], then)

    def all_reduce(self, tensor: Tensor) -> Pending:
        return self._inner.all_reduce(tensor)

    def all_reduce_max(self, tensor: Tensor) -> Pending:
        return self._inner.all_reduce_max(tensor)


# --- counting --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Message:
    """One collective of one group: what kind, the dtype, and the bytes of its full side (all ranks' chunks together)."""

    kind: str  # all_gather, reduce_scatter, all_reduce, heartbeat; to_device, to_host (offload)
    dtype: torch.dtype
    nbytes: int
    buckets: int
    ranks: int = 1


@dataclass(slots=True)
class Journal:
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

    def note(self, kind: str, fulls: Sequence[Tensor], ranks: int = 1) -> None:
        if self._open:
            message = Message(kind, fulls[0].dtype, sum(full.numel() * full.itemsize for full in fulls), len(fulls), ranks)
            for messages in self._open:
                messages.append(message)


class Journaled:
    """Collectives that write down what passes through them."""

    def __init__(self, inner: Collectives, journal: Journal, *, keeps: object = None) -> None:
        self._inner, self._journal, self._keeps = inner, journal, keeps
        self.ranks, self.rank, self.direct_min_bytes = inner.ranks, inner.rank, inner.direct_min_bytes
        self.gather_memory: Allocate | None = getattr(inner, "gather_memory", None)
        self.reduce_memory: Allocate | None = getattr(inner, "reduce_memory", None)

    @property
    def inner(self) -> Collectives:
        return self._inner

    def gatherer(self, outs: Sequence[Tensor], shards: Sequence[Tensor]) -> Callable[[], Pending]:
        gather, journal = self._inner.gatherer(outs, shards), self._journal

        def noted() -> Pending:
            journal.note("all_gather", outs, self.ranks)
            return gather()

        return noted

    def reduce_scatter(self, outs: Sequence[Tensor], fulls: Sequence[Tensor], scale: float) -> Pending:
        self._journal.note("reduce_scatter", fulls, self.ranks)
        return self._inner.reduce_scatter(outs, fulls, scale)

    def all_reduce(self, tensor: Tensor) -> Pending:
        self._journal.note("all_reduce", [tensor], self.ranks)
        return self._inner.all_reduce(tensor)

    def all_reduce_max(self, tensor: Tensor) -> Pending:
        self._journal.note("heartbeat", [tensor], self.ranks)
        return self._inner.all_reduce_max(tensor)


# --- lanes -----------------------------------------------------------------------------------------------------------


class Ticket(Protocol):
    """Work that was put on a lane."""

    def done(self) -> bool:
        """Whether `wait` would return at once. May say False of finished work, never True of unfinished."""
        ...

    def wait(self) -> None:
        """Order what the caller does next behind the work. Waiting twice is allowed."""
        ...

    def block(self) -> None:
        """As `wait`, and have the host wait too, for memory that it reads."""
        ...


class Lane(Protocol):
    """An ordered queue of device work beside the caller's own, the compute lane."""

    def run(self, start: Callable[[], Pending], finish: Callable[[], None], after: Any = None) -> Ticket:
        """Queue `start` behind all that is on the compute lane now, and `finish` behind the collective it starts.

        after: a ticket of another lane, not waited for yet, that `start` is queued behind instead.
        """
        ...


class Interrupted(RuntimeError):
    """What waiting again for work raises after an interrupt came while it was waited for."""


class _HostTicket:
    __slots__ = ("_failure", "_finish", "_followers", "_pending")

    def __init__(self, pending: Pending, finish: Callable[[], None]) -> None:
        self._pending: Pending | None = pending
        self._finish = finish
        self._followers: list[_LaterTicket] = []
        self._failure: BaseException | None = None

    def follow(self, later: _LaterTicket) -> None:
        """Begin `later` as soon as this is waited for."""
        if self._pending is None:
            later.begin()
        else:
            self._followers.append(later)

    def done(self) -> bool:
        pending = self._pending
        return pending is None or (not pending.silent and all(_torch.is_done(work) for work in pending.works))

    def wait(self) -> None:
        pending = self._pending
        if pending is None:
            return
        if self._failure is not None:  # gloo waits for ever if asked for the same message twice
            raise self._failure
        try:
            for work in pending.works:
                work.wait()
            if pending.then is not None:
                pending.then()
            self._finish()
            for later in self._followers:
                later.begin()
            self._followers.clear()
            self._finish, self._pending = nothing, None
        except Exception as failure:
            self._failure = failure
            raise
        except BaseException as interrupt:  # it is for who waits now; how far it came until then nobody knows
            self._failure = Interrupted(f"{type(interrupt).__name__} came before it was finished: run the step again")
            raise

    def block(self) -> None:
        self.wait()


class _LaterTicket:
    """Work that begins when other work was waited for."""

    __slots__ = ("_before", "_finish", "_start", "_ticket")

    def __init__(self, before: Ticket, start: Callable[[], Pending], finish: Callable[[], None]) -> None:
        self._before, self._start, self._finish = before, start, finish
        self._ticket: _HostTicket | None = None

    def begin(self) -> None:
        self._ticket = _HostTicket(self._start(), self._finish)

    def done(self) -> bool:
        return self._ticket is not None and self._ticket.done()

    def wait(self) -> None:
        self._before.wait()
        if self._ticket is None:
            raise Interrupted("what it begins behind was interrupted: run the step again")
        self._ticket.wait()

    def block(self) -> None:
        self.wait()


class HostLane:
    """The CPU: collectives run in the backend's threads from the start, their finish in whoever waits."""

    def run(self, start: Callable[[], Pending], finish: Callable[[], None], after: Any = None) -> Ticket:
        if after is None:
            return _HostTicket(start(), finish)
        later = _LaterTicket(after, start, finish)
        after.follow(later)
        return later


class _StreamTicket:
    __slots__ = ("_device", "_event", "_module")

    def __init__(self, event: Any, module: Any, device: torch.device) -> None:
        self._event, self._module, self._device = event, module, device

    @property
    def event(self) -> Any:
        return self._event

    def done(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        self._module.current_stream(self._device).wait_event(self._event)

    def block(self) -> None:
        self.wait()
        self._event.synchronize()


class StreamLane:
    """A stream of an accelerator."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, torch.get_device_module(device)
        self._stream = self._module.Stream(device=device, priority=-1)

    def run(self, start: Callable[[], Pending], finish: Callable[[], None], after: Any = None) -> Ticket:
        if after is None:
            self._stream.wait_stream(self._module.current_stream(self._device))
        else:
            self._stream.wait_event(after.event)
        with self._module.stream(self._stream):
            pending = start()
            for work in pending.works:
                work.wait()
            if pending.then is not None:
                pending.then()
            finish()
            return _StreamTicket(self._stream.record_event(), self._module, self._device)


def lane_for(device: torch.device) -> Lane:
    return HostLane() if device.type == "cpu" else StreamLane(device)


class Delays:
    """Lanes whose work is put off at random, always legally: what computes before it has waited then shows. For tests.

    On the CPU the lanes of one `Delays` share a queue: work starts when it is waited for, or whenever the dice say so, and
    always after all that was queued before it, so ranks that queue the same things never wait for each other in a circle. On
    an accelerator the stream is kept busy for a random time first.
    """

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self._queue: deque[_PutOff] = deque()

    def lane(self, device: torch.device) -> Lane:
        return _DelayedLane(self, device)

    def stall(self, device: torch.device) -> None:
        _torch.keep_busy(device, self._dice.randrange(2_000_000))

    def add(self, work: _PutOff) -> None:
        self._queue.append(work)
        if self._dice.random() < 0.3:
            self.start(work)

    def start(self, work: _PutOff) -> None:
        """Start `work` and all that was queued before it."""
        while work.ticket is None:
            self._queue.popleft().start()

    def start_all(self) -> None:
        while self._queue:
            self._queue.popleft().start()


class _PutOff:
    """Work that may not have started; a ticket for it."""

    __slots__ = ("_after", "_delays", "_failure", "_finish", "_start", "ticket")

    def __init__(self, delays: Delays, start: Callable[[], Pending], finish: Callable[[], None], after: _PutOff | None) -> None:
        self._delays, self._start, self._finish, self._after = delays, start, finish, after
        self.ticket: Ticket | None = None
        self._failure: BaseException | None = None

    def start(self) -> None:
        try:
            after = None if self._after is None else self._after.ticket
            self.ticket = HostLane().run(self._start, self._finish, after)
        except BaseException as failure:  # whoever waits for it learns of it
            self._failure = failure if isinstance(failure, Exception) else Interrupted("it was interrupted: run the step again")
            self.ticket = _HostTicket(Pending(), nothing)
            if not isinstance(failure, Exception):
                raise

    def done(self) -> bool:
        return self.ticket is not None and self.ticket.done()

    def wait(self) -> None:
        self._delays.start(self)
        assert self.ticket is not None
        if self._failure is not None:
            raise self._failure
        self.ticket.wait()

    def block(self) -> None:
        self.wait()


class _DelayedLane:
    def __init__(self, delays: Delays, device: torch.device) -> None:
        self._delays, self._device = delays, device
        self._inner = None if device.type == "cpu" else StreamLane(device)

    def run(self, start: Callable[[], Pending], finish: Callable[[], None], after: Any = None) -> Ticket:
        if self._inner is None:
            work = _PutOff(self._delays, start, finish, after)
            self._delays.add(work)
            return work

        def stalled() -> Pending:
            self._delays.stall(self._device)
            return start()

        return self._inner.run(stalled, finish, after)


def nothing() -> None:
    pass


class InFlight:
    """What a lane may still read: entries leave oldest first, and only after the compute lane was ordered behind their work.

    With `limit` entries inside, pushing another first waits for the oldest.
    """

    def __init__(self) -> None:
        self._entries: deque[tuple[Ticket, Callable[[], None], bool]] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    def make_room(self, limit: int) -> None:
        """Wait until fewer than `limit` entries are inside."""
        while len(self._entries) >= limit:
            self._leave()

    def push(self, ticket: Ticket, landed: Callable[[], None], *, polled: bool = True) -> None:
        """Keep what `landed` refers to alive until `ticket` was waited for, then call it.

        polled: whether it may leave as soon as it is done. That moment differs from rank to rank, so not if its end
            starts a collective.
        """
        self._entries.append((ticket, landed, polled))

    def poll(self) -> None:
        """Let go of what is finished already."""
        while self._entries and self._entries[0][2] and self._entries[0][0].done():
            self._leave()

    def drain(self) -> None:
        self.make_room(1)

    def abandon(self) -> None:
        """As `drain`, whatever the work came to."""
        while self._entries:
            with suppress(Exception):
                self._leave()

    def _leave(self) -> None:
        ticket, landed, _ = self._entries.popleft()
        ticket.wait()
        landed()
