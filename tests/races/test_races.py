"""Streams, without a GPU: nothing that the library does is out of order, and every planted fault is found."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import rotation
import torch
from accesses import Home
from detector import Detector
from hypothesis import given
from hypothesis import strategies as st
from network import watching, world
from programs import NAMED, PROGRAMS, Program, first_race, run

from fullshard.core.heartbeat import Heartbeats
from fullshard.core.param_group import ParamGroup


@pytest.fixture(scope="module", autouse=True)
def one_world() -> Iterator[None]:
    with world():
        yield


@pytest.mark.rotates(4)
@pytest.mark.parametrize("name", NAMED)
def test_no_program_has_a_race(name: str) -> None:
    """Whatever the device answers to queries, all ranks send the same messages and allocate the same of the group's memory."""
    sequences = []
    for seed in (0, *(1 + other for other in rotation.share(range(3)))):
        detector = run(NAMED[name], Detector(seed))
        assert not detector.races, first_race(detector)
        sequences.append(detector.sequence)
    assert all(sequence == sequences[0] for sequence in sequences)


@pytest.mark.proves("9a")
@rotation.random_cases(320)
@given(program=PROGRAMS, seed=st.integers(0, 1000))
def test_no_random_program_has_a_race(program: Program, seed: int) -> None:
    detector = run(program, Detector(seed))
    assert not detector.races, first_race(detector)
    if seed % 4 == 0:
        other = run(program, Detector(seed + 1000))
        assert detector.sequence == other.sequence, "what ranks send depends on when the device answers"


# --- the detector itself ---


def test_two_streams_that_write_the_same_bytes_race_unless_an_event_orders_them() -> None:
    for wait in (False, True):
        with watching(Detector()) as detector:
            module = detector.machine.module
            side, tensor = module.Stream(), torch.zeros(8)
            with side:
                if wait:
                    side.wait_stream(detector.machine.main)
                tensor[2:6].add_(1)
            tensor[6:].add_(1)  # other bytes
        assert bool(detector.races) is not wait
    (race,) = run_of_two_writers().races.values()
    text = str(race)
    assert "aten::add_ on stream 2" in text and "aten::zeros on compute" in text, text
    assert "stream 2 does not wait for an event recorded on compute behind operation 1" in text and "bytes 8 to 24" in text, (
        text
    )


def run_of_two_writers() -> Detector:
    with watching(Detector()) as detector:
        tensor = torch.zeros(8)
        with detector.machine.module.Stream():
            tensor[2:6].add_(1)
    return detector


def test_freed_memory_is_reused_at_once_by_the_pool_of_the_stream_that_allocated_it() -> None:
    for wait in (False, True):
        with watching(Detector()) as detector:
            module, main = detector.machine.module, detector.machine.main
            side, tensor = module.Stream(), torch.zeros(8)
            side.wait_stream(main)
            with side:
                tensor.add_(1)
            if wait:
                main.wait_stream(side)
            del tensor
            torch.ones(4).add_(1)  # may be the same memory
        assert bool(detector.races) is not wait
        assert all(race.reused for race in detector.races.values())


def test_the_host_knows_of_a_stream_by_synchronize_or_a_query_that_says_yes_alone() -> None:
    for how in ("nothing", "wait_event", "synchronize", "query"):
        with watching(Detector(3)) as detector:
            detector.machine.eager = 1.0
            host = detector.mark(torch.zeros(4), Home.PINNED)
            device = torch.ones(4, device="cpu")
            host.copy_(device, non_blocking=True)
            event = detector.machine.main.record_event()
            if how == "wait_event":
                event.wait()
            elif how != "nothing":
                getattr(event, how)()
            host.tolist()
        assert bool(detector.races) is (how in ("nothing", "wait_event")), how


def test_a_query_is_answered_either_way_but_always_yes_once_the_host_knows() -> None:
    with watching(Detector(1)) as detector:
        detector.machine.eager, answers = 0.5, set()
        for _ in range(40):
            torch.zeros(1).add_(1)
            event = detector.machine.main.record_event()
            answers.add(event.query())
            event.synchronize()
            assert event.query()
    assert answers == {True, False}


def test_a_backward_runs_on_the_streams_of_its_forward_and_final_callbacks_on_the_callers() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        detector = run(NAMED["two streams"], Detector(0))
    names = {race.first.timeline.name for race in detector.races.values()}
    assert not names
    backward = [timeline.name for timeline in detector.machine.timelines if timeline.clock[timeline.number] > 10]
    assert len(backward) >= 3, "compute, the other stream and the lanes"


# --- what a reading of the stream path found ---


def test_a_heartbeat_that_nobody_read_keeps_no_gradients() -> None:
    """A host that runs ahead of its device found a whole step's flat gradients alive behind `zero_grad()`."""

    detector = Detector(0)
    detector.machine.eager = 0.0
    alive: list[str] = []
    without = property(lambda group: None, lambda group, parts: None)  # groups keep gradients for the next step, on purpose
    with mock.patch.object(ParamGroup, "parts", without, create=True):
        run(Program(steps=1, dtypes="high"), detector, at_end=lambda: alive.extend(detector.labels()))
    assert alive and not [label for label in alive if "core/reduction.py" in label]


def test_a_heartbeat_that_is_over_as_it_is_sent_is_read_in_its_turn() -> None:
    """Behind an unread one it was read at once, so that its page was given out twice: the ranks "ran different units"."""

    def never_between(heartbeats: Heartbeats, *, keep: int | None = None, read: Any = Heartbeats.read) -> None:
        if keep is not None:  # whenever an optimizer asks, the device has not got there yet
            read(heartbeats, keep=keep)

    detector = Detector()
    detector.machine.eager = 1.0
    with mock.patch.object(Heartbeats, "read", never_between):
        run(Program(steps=6), detector)
    assert not detector.races, first_race(detector)


def test_messages_run_on_their_lane_and_not_on_the_streams_of_the_backend() -> None:
    for name in ("plain", "hybrid", "extension"):
        detector = run(NAMED[name], Detector())
        assert not [timeline.name for timeline in detector.machine.timelines if timeline.name.startswith("nccl")]
        assert not [key for key in detector.machine.orderings if key[1] == "work.wait"]


def test_casts_and_copies_from_the_host_are_on_a_lane_of_their_own() -> None:
    """The copy for the next unit does not wait for the gather of the last."""
    for name, copies in (("offload", True), ("mixed precision", True), ("plain", False)):
        detector = run(NAMED[name], Detector())
        assert (("core/param_group.py send (run)", "wait_event") in detector.machine.orderings) is copies
