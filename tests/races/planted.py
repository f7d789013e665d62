"""Faults to plant: each takes a wait away, gives memory back too early, or swaps two lines, as a bug would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import network

from fullshard import _torch
from fullshard.comm.streams import CollectiveCall, DeviceStream, InFlight
from fullshard.core.heartbeat import Heartbeats
from fullshard.core.param_group import ParamGroup
from fullshard.core.reduction import Reduction
from fullshard.ext.two_hops import TwoHopGroup
from fullshard.optim.owner_exchange import OwnerExchange

Patch = tuple[Any, str, Any]


def staging_before_the_wait(group: Any, *arguments: Any, gather: Any = ParamGroup.start_all_gather) -> Any:
    work = gather(group, *arguments)
    group.finish_all_gather()
    return work


def memory_without_a_wait(in_flight: Any) -> None:
    while in_flight.entries:
        in_flight.entries.popleft()[1]()


def messages_as_they_are_sent(reduction: Any, work: Any, sent: Any = Reduction.note_started) -> None:
    sent(reduction, work)
    reduction._inputs = []


def pages_as_they_are_sent(heartbeats: Any, sent: Any, release: Any = Heartbeats.release) -> None:
    release(heartbeats, sent)
    heartbeats._free += [beat for beat, _ in sent if beat not in heartbeats._free]


def lane(order: str) -> Callable[..., Any]:
    """`DeviceStream.run` with two of its lines swapped, or one missing."""

    def run(self: Any, start: Any, finish: Any, after: Any = None, call: Any = None) -> Any:
        call = call or CollectiveCall()
        stream, compute = self._stream, _torch.current_stream(self._device)

        def wait() -> None:
            second_hop_at_once = order == "hops at once" and after is not None
            stream.wait_stream(compute) if after is None or second_hop_at_once else stream.wait_event(after.event)

        if order != "start before the wait":
            wait()
        with stream:
            pending = start()
            if order == "start before the wait":
                wait()
            event = stream.record_event()
            if order == "finish before the works":
                finish()
            if pending is not None:
                pending.wait()
            if order != "finish before the works":
                finish()
            if order != "event before finish":
                event = stream.record_event()
            call.event, call.device = event, self._device
            return call

    return run


def in_forward_only(synchronize: Any = ParamGroup.synchronize_host) -> Callable[[Any], None]:
    """`synchronize_host` as it was: by whom optimizers ask, not by writes of the caller's."""
    import sys

    def synchronize_host(group: Any) -> None:
        if "wait_for_readers" not in {sys._getframe(depth).f_code.co_name for depth in (1, 2, 3)}:
            synchronize(group)

    return synchronize_host


def sum_as_the_hop_is_sent(reduction: Any, work: Any, sent: Any = Reduction.note_started) -> None:
    sent(reduction, work)
    if isinstance(reduction.group, TwoHopGroup) and not reduction.factors.deferred:
        reduction.reduced_shard = reduction._sum


def given_back_as_it_is_read(group: Any, *arguments: Any, gather: Any = ParamGroup.start_all_gather) -> Any:
    work = gather(group, *arguments)
    if isinstance(group, TwoHopGroup):
        group._inner.free()
    return work


def matrices_as_they_are_sent(exchange: Any, *arguments: Any, send: Any = OwnerExchange._send) -> Any:
    call = send(exchange, *arguments)
    if call is not None:
        exchange._in_flight[call] = None
    return call


def as_they_are_sent(action: str) -> Any:
    """Waits that leave out those for one message of owners. Their memory is kept, so only the order is wrong."""

    def wait(exchange: Any, call: Any, wait: Any = OwnerExchange._wait) -> None:
        if call is None or call.fingerprint.action != action:
            wait(exchange, call)

    return wait


def on_stream(stream: Any, fn: Any, *args: Any) -> None:
    stream.wait_stream(_torch.current_stream(stream.device))
    with stream:
        fn(*args)
    _torch.current_stream(stream.device).wait_stream(stream)


FAULTS: dict[str, tuple[Patch, ...]] = {
    "staging of a gather is freed before the wait": ((ParamGroup, "start_all_gather", staging_before_the_wait),),
    "messages of a reduction are freed as they are sent": ((Reduction, "note_started", messages_as_they_are_sent),),
    "pages of heartbeats are used again as they are sent": ((Heartbeats, "release", pages_as_they_are_sent),),
    "a lane starts before it waits": ((DeviceStream, "run", lane("start before the wait")),),
    "a lane finishes before the collective": (
        (DeviceStream, "run", lane("finish before the works")),
        (network, "ASYNCHRONOUS", True),
    ),
    "a lane records its event before it finishes": ((DeviceStream, "run", lane("event before finish")),),
    "the backend's own stream is not waited for": (
        (network, "ASYNCHRONOUS", True),
        (network.Work, "wait", lambda work, timeout=None: True),
    ),
    "writes of the caller's do not wait for copies": ((ParamGroup, "synchronize_host", in_forward_only()),),
    "backward ends on a stream that forward's is not behind": ((_torch, "then_order", lambda stream, fn: fn()),),
    "shards of matrices are freed as they are sent": ((OwnerExchange, "_send", matrices_as_they_are_sent),),
    "results of owners are read before they arrive": (
        (OwnerExchange, "_wait", as_they_are_sent("results of owners")),
        (OwnerExchange, "_abandon", lambda exchange: exchange._in_flight.clear()),
    ),
    "whole matrices are read before they arrive": ((OwnerExchange, "_wait", as_they_are_sent("matrices to their owners")),),
    "the second of two hops does not wait for the first": ((DeviceStream, "run", lane("hops at once")),),
    "sums over shards are freed as the hop over replicas is sent": ((Reduction, "note_started", sum_as_the_hop_is_sent),),
    "the result of a hop is freed before the second one has read it": (
        (ParamGroup, "start_all_gather", given_back_as_it_is_read),
    ),
    "nothing waits for copies of the host's memory": ((ParamGroup, "synchronize_host", lambda group: None),),
}

BEHIND_EXCEPTIONS: dict[str, tuple[Patch, ...]] = {
    "a lane that raises leaves the compute lane before it": ((DeviceStream, "run", lane("as it should be")),),
    "memory in flight is dropped without a wait": ((InFlight, "drain_quietly", memory_without_a_wait),),
    "a hook that raises leaves its stream": ((_torch, "on_stream", on_stream),),
}


@contextmanager
def planted(patches: tuple[Patch, ...]) -> Iterator[None]:
    with ExitStack() as entered:
        for target, name, value in patches:
            entered.enter_context(mock.patch.object(target, name, value))
        yield


__all__ = ["BEHIND_EXCEPTIONS", "FAULTS", "planted"]
