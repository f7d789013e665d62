"""The race detector finds what is planted: orders left out, memory given back early, lines swapped, exceptions half way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import rotation
from detector import Detector
from network import world
from planted import BEHIND_EXCEPTIONS, FAULTS, planted
from programs import NAMED, Program, first_race, run

import fullshard
from fullshard.comm.streams import InFlight

# Orders that others make already. Each is part of a call that does more elsewhere: on the CPU, or together with what is said here.
COVERED = {
    (
        "core/heartbeat.py _send (run)",
        "wait_stream",
    ): "the lane waited as the last reduction began; a page is new in the first steps only",
    (
        "core/reducer.py drain (wait)",
        "wait_event",
    ): "each reduction is waited for a moment later, before its gradients are handed out",
    ("core/heartbeat.py read (wait)", "wait_event"): "the host waits as well, and nothing on the device reads the answer",
    (
        "core/param_group.py synchronize_host (wait)",
        "wait_event",
    ): "the host waits as well, and the host alone writes such shards",
    ("core/runtime.py _end_unit (wait)", "wait_event"): "the host was told that the lane is done",
    ("core/reducer.py poll (wait)", "wait_event"): "the host was told that the lane is done",
    (
        "core/reducer.py send_heartbeats (wait)",
        "wait_event",
    ): "what it waits for is waited for again; the device shows it, where a new page of heartbeats takes the memory",
    ("core/agreement.py barrier (wait)", "wait_event"): "the host waits as well, and nothing reads what a barrier sends",
    ("core/agreement.py barrier (wait)", "synchronize"): "a barrier orders ranks, and nothing reads what it sends",
    ("core/reduction.py finish (wait)", "wait_event"): "the earlier reduction came first on this stream",
}


@pytest.fixture(scope="module", autouse=True)
def one_world() -> Iterator[None]:
    with world():
        yield


@pytest.mark.parametrize("name", ["offload", "hook on a stream", "extension", "memory of the group"])
def test_no_exception_behind_an_operation_leaves_a_race(name: str) -> None:
    """An exception behind each operation of a lane in turn; the step is given up, and a whole one follows."""
    program = NAMED[name]
    for at in rotation.share(range(1, run(program, Detector()).queued + 1)):
        detector = run(program, Detector(at, raise_at=at), tolerant=True)
        assert not detector.races, f"behind operation {at}: {first_race(detector)}"


def orders(names: list[str]) -> dict[tuple[str, str], list[str]]:
    """The orders that these programs make, by function and kind, each with the programs that make it."""
    found: dict[tuple[str, str], list[str]] = {}
    for name in names:
        for key in run(NAMED[name], Detector()).machine.orderings:
            if key[1] != "query":  # which orders nothing
                found.setdefault(key, []).append(name)
    return found


def test_each_order_that_is_left_out_is_found() -> None:
    """Orders are left out by function: all that the function makes in a program. Those that others cover are listed, with reasons."""
    every = orders(rotation.share(list(NAMED), 4))
    assert len(every) >= 20 or rotation.part() is not None
    missed = []
    for key in rotation.share(list(every)):
        drops = lambda site, kind, key=key: (site, kind) == key
        names = dict.fromkeys([*every[key], *NAMED])
        if key not in COVERED and not any(
            run(NAMED[name], Detector(seed, drops=drops)).races for name in names for seed in range(3)
        ):
            missed.append(key)
    assert not missed, missed


@pytest.mark.proves("9b")
@pytest.mark.parametrize("name", rotation.share(list(FAULTS)))
def test_planted_faults_are_found(name: str) -> None:
    with planted(FAULTS[name]):
        assert any(is_found(program, seed) for seed in range(3) for program in NAMED.values())


def test_memory_of_the_group_that_is_polled_is_found() -> None:
    """Ranks then free it at different moments, so that one of them gets new memory, which it tells the others, alone."""
    poll = InFlight.push

    def polled(in_flight: InFlight, work: Any, on_done: Any, *, polled: bool = True) -> None:
        poll(in_flight, work, on_done, polled=True)

    program = replace(NAMED["memory of the group"], replicas=1, in_flight=3)
    assert len({str(run(program, Detector(seed)).sequence) for seed in range(12)}) == 1
    with planted(((InFlight, "push", polled),)):
        assert len({str(run(program, Detector(seed)).sequence) for seed in range(12)}) > 1


def is_found(program: Program, seed: int) -> bool:
    detector = Detector(seed)
    try:
        run(program, detector)
    except fullshard.StateError:
        pass  # what the host read was not what was sent
    except AssertionError as error:
        return "that was freed" in str(error)
    return bool(detector.races)


@pytest.mark.parametrize("name", rotation.share(list(BEHIND_EXCEPTIONS)))
def test_faults_behind_exceptions_are_found(name: str) -> None:
    def is_found(program: Program, at: int) -> bool:
        """Behind the last operation of the program nothing raises."""
        return bool(run(program, Detector(at, raise_at=at), tolerant=True).races)

    programs = [NAMED["offload"], NAMED["hook on a stream"]]
    lasts = [run(program, Detector()).queued for program in programs]
    with planted(BEHIND_EXCEPTIONS[name]):
        assert any(is_found(program, at) for at in range(1, max(lasts) + 1) for program in programs)
