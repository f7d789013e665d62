"""Where a program is, when somebody asks; and that it ends cleanly when nobody does."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import sys
import threading
import time
import types
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from exits import Rank, run_job, soon
from harness import World, ranks, until
from hypothesis import given
from hypothesis import strategies as st
from models import Stack, batch, shard_stack, square
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import fullshard
from fullshard import CheckPolicy, StateError, _torch
from fullshard.checks.collective_log import CollectiveLog, GroupFingerprints, LoggedCall, UnitName, find_desync, listed
from fullshard.checks.state import WaitState
from fullshard.checks.store import StateStore
from fullshard.checks.verdict import Inquiry
from fullshard.checks.watchdog import Watchdog
from fullshard.core import units_of


def log_call(line: GroupFingerprints, action: str) -> LoggedCall:
    """Log an action of one parameter group as the next call."""
    entry = LoggedCall()
    entry.log, entry.fingerprint = line.log, line[action]
    entry.log.append(entry.fingerprint)
    entry.number = entry.log.count
    return entry


def begun(rank: Rank) -> nn.Module:
    """A sharded model that has trained one step."""
    rank.begin()
    torch.manual_seed(0)
    model = shard_stack(Stack(), rank.mesh())
    square(model(batch(0))).backward()
    return model


def asked(rank: Rank) -> None:
    """A handler of the program's own: fullshard installs none."""
    before = {number: signal.getsignal(number) for number in signal.Signals}
    wakeup = signal.set_wakeup_fd(-1)
    begun(rank)
    assert {number: signal.getsignal(number) for number in signal.Signals} == before
    assert signal.set_wakeup_fd(-1) == wakeup == -1
    signal.signal(signal.SIGUSR1, lambda number, frame: rank.say("positions", text=fullshard.positions()))
    os.kill(os.getpid(), signal.SIGUSR1)
    while True:
        time.sleep(0.05)
        if any(line["what"] == "positions" for line in map(json.loads, (rank.folder / f"rank{rank.rank}.jsonl").open())):
            return


@pytest.mark.proves("31f")
@pytest.mark.processes
def test_a_handler_of_the_program_says_where_a_rank_is_and_no_signal_is_taken() -> None:
    for one in run_job(asked, 2, store="file"):
        said = one.first("positions")
        assert one.code == 0 and said is not None, one
        assert re.fullmatch(rf"rank {one.rank}: computing or elsewhere, after collective \d+, heartbeat", said["text"]), one


def ends(rank: Rank, ending: str) -> None:
    begun(rank)
    if ending == "destroys":
        dist.destroy_process_group()
    elif ending == f"rank {rank.rank} is late":
        time.sleep(1.5)


def check_quiet(said: str) -> None:
    assert "fullshard" not in said and "Traceback" not in said and "store" not in said.lower().replace("/store", ""), said


@pytest.mark.rotates(4)
@pytest.mark.processes
@pytest.mark.parametrize("store", ["file", "tcp"])
@pytest.mark.parametrize("ending", ["", "destroys", "rank 0 is late", "rank 1 is late"])
def test_jobs_end_quietly(ending: str, store: str) -> None:
    """Also those in which rank 0 has the store and ends first: a request to a store that is gone prints a stack trace."""
    for one in run_job(ends, 2, store=store, ending=ending):
        assert one.code == 0, one
        check_quiet(one.out)


@ranks(2)
def test_a_timeout_says_for_whom_it_waited(world: World) -> None:
    policy = CheckPolicy(patience=0.2, timeout=3.0)  # on a busy machine an answer takes more than a second
    lanes = fullshard.CommPolicy(lanes=lambda device: fullshard.comm.streams.HostStream())  # a waiter of its own
    model = shard_stack(Stack(), world.mesh, check_policy=policy, comm_policy=lanes)
    unit = model._fullshard_unit
    square(model(batch(0))).backward()
    if world.rank == 0:
        with pytest.raises(StateError) as caught:
            model(batch(0))
        assert re.sub(r"collective \d+", "collective N", str(caught.value)).startswith(
            "rank 0 waited 3 seconds (CheckPolicy.timeout) in collective N, all_gather of 'Stack' (forward). "
            "rank 1: computing or elsewhere, after collective N, heartbeat"
        )
    else:  # computing, as far as anybody knows
        until(lambda: unit.runtime.communicator.log_of(unit.axis).desync_error)


def test_ranks_are_listed_shortly() -> None:
    assert listed([4]) == "rank 4"
    assert listed(range(8)) == "ranks 0-7"
    assert listed([9, 1, 2, 3, 5]) == "ranks 1-3, 5 and 9"


def test_the_first_difference_counts_and_ranks_that_are_behind_do_not() -> None:
    same = [(1, 10, "a"), (2, 20, "b")]
    assert find_desync({0: same, 1: same[:1], 2: []}) is None
    assert find_desync({0: [*same, (3, 30, "c")], 1: [*same, (3, 31, "d"), (4, 41, "e")]}) == (3, {"c": [0], "d": [1]})


class Job:
    """Watches of several ranks over one store and one clock, which are looked at in turn."""

    def __init__(self, size: int) -> None:
        self.now, self.store = 100.0, dist.HashStore()
        self.boards = [StateStore(self.store, rank, size) for rank in range(size)]
        self.watches = [Watchdog(board, lambda: self.now) for board in self.boards]
        self.ledgers = [CollectiveLog("all", range(size), rank) for rank in range(size)]
        self.lines = [GroupFingerprints(ledger, UnitName(""), "") for ledger in self.ledgers]
        for watch, ledger in zip(self.watches, self.ledgers):
            watch.add(ledger, start=False)

    def run(self, seconds: float, *, dead: Sequence[int] = ()) -> None:
        for _ in range(round(seconds * 10)):
            self.now += 0.1
            for rank, watch in enumerate(self.watches):
                if rank not in dead:
                    watch.check()

    def said(self, rank: int) -> str:
        ledger = self.ledgers[rank]
        return str(Inquiry(self.boards[rank], ledger, self.watches[rank]._requests[ledger.key].number))


def test_who_waits_anew_is_told_where_the_others_are_by_now() -> None:
    """The others had heard of the first wait, and attended to something else when the second began."""
    job = Job(2)
    waiter = job.watches[0].new_wait_state()
    entry = log_call(job.lines[0], "gather")
    log_call(job.lines[1], "gather")
    before, waiter.call = waiter.call, entry
    job.run(11)
    assert job.said(0) == "rank 1: computing or elsewhere, after collective 1, gather"
    waiter.call = before
    job.run(20)
    log_call(job.lines[1], "reduction")
    waiter.call = entry
    job.run(3)
    assert job.said(0) == "rank 1: computing or elsewhere, after collective 2, reduction"
    job.run(15, dead=[1])
    assert job.said(0) == "rank 1: does not answer, last state: computing or elsewhere, after collective 2, reduction"


class Counted:
    """A store that counts requests."""

    def __init__(self, store: dist.Store) -> None:
        self.store, self.keys = store, list[object]()

    def __getattr__(self, name: str) -> Any:
        def request(*arguments: Any) -> Any:
            self.keys.append(arguments[0])
            return getattr(self.store, name)(*arguments)

        return request


def test_while_nobody_waits_one_key_is_read_once_a_second() -> None:
    job = Job(3)
    job.run(2)
    for line in job.lines:
        log_call(line, "gather")
    counted = Counted(job.store)
    for board in job.boards:
        board._store = counted
    job.run(30)
    assert set(counted.keys) == {"notices"} and 75 <= len(counted.keys) <= 93


def test_many_ranks_read_that_key_less_often() -> None:
    assert StateStore(dist.HashStore(), 0, 16_000).period(waits=False) == 8.0
    assert StateStore(dist.HashStore(), 0, 16_000).period(waits=True) == 8.0
    assert StateStore(dist.HashStore(), 0, 64).period(waits=True) == 0.1


def test_a_store_whose_server_is_gone_is_given_up_within_seconds() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = dist.PrefixStore("job", dist.TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=60)))
    del server
    begin = time.monotonic()
    own = _torch.own_store(store, "own")
    assert time.monotonic() - begin < soon(10.0) and store.timeout == timedelta(seconds=60)
    with pytest.raises(dist.DistError):
        own.get("key")


def test_a_record_that_cannot_be_read_is_skipped() -> None:
    job = Job(3)
    waiter = job.watches[0].new_wait_state()
    entries = [log_call(line, "gather") for line in job.lines]
    waiter.call = entries[0]
    job.run(2)
    key = job.ledgers[0].key
    log_call(job.lines[2], "reduction")  # rank 1 says something else, which is found whatever rank 2 has in the store
    log_call(job.lines[1], "heartbeat")
    for name in (f"{key}/2", f"{key}/2/calls", f"notice/{job.store.add('notices', 1)}"):
        job.store.set(name, b"\xff no json")
    job.run(1, dead=[1, 2])
    job.run(5)
    assert "Ranks diverged at collective 2" in str(job.ledgers[0].desync_error)
    assert {ledger.desync_error for ledger in job.ledgers} == {job.ledgers[0].desync_error}, "all say the same"


def test_a_rank_that_left_by_an_exception_is_named_unless_it_goes_on() -> None:
    job = Job(3)
    waiters = [watch.new_wait_state() for watch in job.watches]
    entries = [log_call(line, "gather") for line in job.lines]
    job.ledgers[1].note_exception("'blocks.1' forward", "RuntimeError: bad batch")
    job.run(4)
    for rank in (0, 2):
        waiters[rank].call = entries[rank]
    job.run(4)
    assert job.ledgers[0].desync_error is None, "they wait for what it said already"
    log_call(job.lines[1], "gather")
    for rank in (0, 2):
        waiters[rank].call = log_call(job.lines[rank], "gather")
    job.run(4)
    assert job.ledgers[0].desync_error is None, "it went on"
    job.ledgers[1].note_exception("'blocks.1' forward", "RuntimeError: bad batch")
    for rank in (0, 2):
        waiters[rank].call = log_call(job.lines[rank], "gather")
    job.run(4)
    text = "rank 1 raised RuntimeError: bad batch in 'blocks.1' forward, while rank "
    assert all(str(ledger.desync_error).startswith(text) for ledger in job.ledgers)


def test_others_are_asked_once_for_all_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that died fails every message that is in flight, and each of them waited anew for what the dead one says."""
    job = Job(2)
    ticks = itertools.count(100.0, 0.5)
    watch, ledger, line = job.watches[0], job.ledgers[0], job.lines[0]
    watch._clock = lambda: next(ticks)
    monkeypatch.setattr(watch, "_ended", types.SimpleNamespace(wait=lambda seconds: False))
    for asked in (1, 2):
        log_call(line, "gather")
        assert [watch.describe_peers(ledger) for _ in range(3)] == ["rank 1: does not answer"] * 3
        assert job.store.add("notices", 0) == asked


@ranks(2)
def test_a_forked_process_that_ends_does_not_end_its_parent(world: World) -> None:
    """The child ran the parent's exit handler, and told all ranks that the program had ended."""
    policy = CheckPolicy(patience=0.2)
    model = shard_stack(Stack(), world.mesh, check_policy=policy)
    time.sleep(0.0 if world.rank else 0.8)  # somebody waits, so everybody tells where it is
    square(model(world.mine(batch(0)))).backward()
    if world.rank == 0:
        child = os.fork()
        if child == 0:
            import atexit

            atexit._run_exitfuncs()
            os._exit(0)
        os.waitpid(child, 0)
        time.sleep(1.0)
    square(model(world.mine(batch(0)))).backward()


@ranks(2)
def test_meetings_without_a_mesh_are_one_meeting(world: World) -> None:
    from fullshard.ext.any_failed import _AXES

    fullshard.any_failed()
    before = len(_AXES)
    for _ in range(20):
        assert not fullshard.any_failed()
    assert len(_AXES) == before


@given(st.lists(st.sampled_from(["gather", "reduction", "hash", "turn"]), max_size=200))
def test_what_is_said_and_hashed_does_not_depend_on_when_somebody_asks(program: list[str]) -> None:
    asked, other = CollectiveLog("all", [0, 1], 0), CollectiveLog("all", [0, 1], 1)
    lines = [GroupFingerprints(ledger, UnitName(""), "") for ledger in (asked, other)]
    said, hashes = 0, {0: other.hash}
    for action in program:
        if action == "hash":
            assert asked.hash == hashes[said], "and it is the same whenever it is asked for"
        elif action == "turn":
            asked.roll_block()
        else:
            said += 1
            assert [log_call(line, action).number for line in lines] == [said, said]
            hashes[said] = other.recent_calls()[-1][1]
    assert asked.recent_calls() == other.recent_calls() == other.recent_calls()[-64:]
    assert [number for number, _, _ in asked.recent_calls()] == list(range(max(0, said - 64) + 1, said + 1))
    assert asked.count == said and asked.hash == other.hash == hashes[said]
    assert len(set(hashes.values())) == said + 1


def test_a_ledger_that_is_closed_says_nothing_more() -> None:
    ledger, follower = CollectiveLog("all", [0, 1], 0), CollectiveLog("votes", [0, 1], 0)
    line = GroupFingerprints(ledger, UnitName("layers.0"), "")
    assert str(log_call(line, "gather")) == "collective 1, gather of 'layers.0'"
    before, ledger.followers = ledger.hash, (follower,)
    ledger.close("they parted")
    ledger.close("once more")
    for _ in range(2):
        with pytest.raises(StateError, match="they parted"):
            log_call(line, "gather")
        ledger.roll_block()
    assert ledger.count == 1 and ledger.hash == before
    assert follower.desync_error == "they parted"


def test_an_interrupt_while_a_forward_hook_turns_a_page_blocks_nobody() -> None:
    """Promised for every line of `roll_block`, which the hook before an outermost forward calls. A lock that was held while a
    page was turned stayed held for ever when Ctrl-C came behind its last line."""

    def interrupt(frame: types.FrameType, event: str, _: object) -> object:
        if frame.f_code.co_filename.endswith("collective_log.py") and event == "line":
            lines.append(frame.f_lineno)
            if len(lines) == at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return interrupt

    for at in itertools.count(1):
        ledger, lines = CollectiveLog("all", [0, 1], 0), list[int]()
        line = GroupFingerprints(ledger, UnitName(""), "")
        for _ in range(20):
            log_call(line, "gather")
        sys.settrace(interrupt)
        try:
            ledger.roll_block()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        ledger.roll_block()
        ledger.close("they parted")
        with pytest.raises(StateError, match="they parted"):
            log_call(line, "gather")
        if len(lines) < at:
            break
    assert at > 5


def test_forwards_without_heartbeat_are_forgotten() -> None:
    """Where messages bear no tags nobody asks for a hash between two backwards."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model = shard_stack(Stack(), init_device_mesh("cpu", (2,)))
        unit = next(iter(units_of(model, False)))
        ledger = unit.runtime.communicator.log_of(unit.axis)
        with torch.no_grad():
            model(batch(0))  # in which values are compared
            before = ledger.count
            for _ in range(100):
                model(batch(0))
        said = ledger.count - before
        assert said >= 300 and said % 100 == 0
        assert sum(len(block.fingerprints) for block in ledger._blocks) < 64 + 16 + 3 * said / 100
    finally:
        dist.destroy_process_group()


def test_backwards_without_a_heartbeat_are_entered_and_counted_anew_by_all() -> None:
    ours, theirs = CollectiveLog("all", [0, 1], 0), CollectiveLog("all", [0, 1], 1)
    assert [ours.heartbeat_due(3) for _ in range(6)] == [False, False, True, False, False, True]
    assert [theirs.heartbeat_due(3) for _ in range(4)] == [False, False, True, False]
    assert ours.hash != theirs.hash, "ranks that count differently are told"


class InFlight(GroupFingerprints):
    """Calls of a log that a device has queued. Each is done, or not, or raises."""

    def queue(self, state: WaitState, done: object = False) -> list[object]:
        outcome, polls = [done], []

        class Call(LoggedCall):
            __slots__ = ()

            def done(self) -> bool:
                polls.append(self.number)
                if isinstance(outcome[0], Exception):
                    raise outcome[0]
                return bool(outcome[0])

        call = Call()
        call.log, call.fingerprint = self.log, self["forward gather"]
        self.log.append(call.fingerprint)
        call.number = self.log.count
        state.in_flight.append(call)
        self.polls = polls
        return outcome


def test_a_device_waits_once_its_host_queues_nothing_more_and_its_oldest_call_counts() -> None:
    state, calls = WaitState(), InFlight(CollectiveLog("log", (0, 1), 0), UnitName("a"), "0")
    for second in range(3):  # the host goes on
        outcome = calls.queue(state)
        state.poll_device()
        assert state.seconds_waiting(second) == 0 and not calls.polls
    state.poll_device()
    assert state.current() is state.in_flight[0] and state.seconds_waiting(10.0) == 0
    state.poll_device()
    assert state.seconds_waiting(12.5) == 2.5
    state.in_flight[0].log.close("diverged")
    assert state.waits_in(calls.log) is state.in_flight[0]
    outcome[0] = True  # the last one of several streams is done; the oldest is not
    state.poll_device()
    assert len(state.in_flight) == 3 and state.seconds_waiting(13.0) == 3.0


def test_calls_of_a_device_are_forgotten_when_they_are_done_or_the_device_fails() -> None:
    state, calls = WaitState(), InFlight(CollectiveLog("log", (0, 1), 0), UnitName("a"), "0")
    outcomes = [calls.queue(state, True), calls.queue(state, RuntimeError("device-side assert")), calls.queue(state)]
    for _ in range(2):
        state.poll_device()
    assert [call.number for call in state.in_flight] == [3]
    outcomes[-1][0] = True
    state.poll_device()
    assert not state.in_flight and state.current() is None and state.seconds_waiting(1.0) == 0
    for _ in range(2000):  # nobody polls: the thread of the watchdog ended
        calls.queue(state)
    assert len(state.in_flight) < 2000


def test_groups_of_a_closed_log_are_aborted_once_and_only_where_somebody_waits() -> None:
    job = Job(3)
    aborted: list[int] = []
    for rank, ledger in enumerate(job.ledgers):
        ledger.abort = partial(aborted.append, rank)
    waiter = job.watches[1].new_wait_state()
    entries = [log_call(line, "gather") for line in job.lines]
    job.watches[0]._post_verdict(job.ledgers[0], "diverged")
    waiter.call = entries[1]
    job.run(5)
    assert aborted == [1] and all("diverged. The process groups" in str(ledger.desync_error) for ledger in job.ledgers)


def test_a_rank_0_that_takes_the_store_along_is_named_without_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StateStore, "is_served_by_first_rank", property(lambda board: True))
    job = Job(3)
    waiter = job.watches[1].new_wait_state()
    entries = [log_call(line, "gather") for line in job.lines[1:]]
    waiter.call = entries[0]
    ended = threading.Thread(target=job.watches[0].end)
    ended.start()
    while ended.is_alive():
        job.run(0.1, dead=[0])
        time.sleep(0.01)
    for board in job.boards:
        board._store = None  # whatever is sent now raises
    job.run(5, dead=[0])
    assert str(job.ledgers[1].desync_error).startswith(
        "rank 0 ended the program or its process group while rank 1 waits in collective 1, gather"
    )
