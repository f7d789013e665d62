"""Stories of jobs that end: each rank is a process of its own, which fails, lives on or is gone, and all others soon say why."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import time
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import chaos
import pytest
import torch
import torch.distributed as dist
from exits import TESTS, Job, Rank, free_port, meet, run_job, soon, together, torchrun
from models import Stack, batch, shard_stack, square
from rotation import share
from torch import nn

import fullshard
from fullshard import _torch
from fullshard.compat import FSDP

pytestmark = pytest.mark.processes
TIGHT = 4.0  # seconds until all ranks know, where one of them can tell
CALM = 5.0  # seconds until all ranks know that one of them left, and may not come back
GONE = 6.0  # seconds until all ranks know that one is gone


def begun(rank: Rank, **options: Any) -> nn.Module:
    """A sharded model that has trained one step."""
    rank.begin()
    torch.manual_seed(0)
    model = shard_stack(Stack(), rank.mesh(), **options)
    square(model(batch(0))).backward()
    return model


def steps(model: nn.Module, number: int = 3) -> None:
    for step in range(number):
        square(model(batch(step))).backward()


def check_all_raise(job: Job, text: str, seconds: float, *, but: tuple[int, ...] = ()) -> None:
    """All ranks `but` these raise StateError with a text like that, so many seconds after the event."""
    for one in job:
        if one.rank not in but:
            assert one.raised.startswith("StateError: "), f"rank {one.rank}\n{job}"
            assert re.search(text, one.raised), f"rank {one.rank}: {one.raised}\n{job}"
            assert one.seconds < soon(seconds), f"rank {one.rank} took {one.seconds:.1f} seconds\n{job}"


# --- the ranks part, and the one that knows is soon no more ---


def part(rank: Rank, ending: str) -> None:
    """Rank 0 runs another unit than the others."""
    model = begun(rank)
    if rank.rank:
        steps(model)
        return
    try:
        model.blocks[2](torch.ones(4, 7))
    except fullshard.StateError as failure:
        rank.event()
        rank.raised(failure)
        if ending == "raise":
            raise
    del model
    gc.collect()
    meet(ending)


@pytest.mark.proves("31d")
@pytest.mark.parametrize(
    ("store", "ending"), share(list(product(["tcp", "agent", "file"], ["live on", "sys.exit", "os._exit", "raise"])))
)
def test_all_learn_that_they_parted_whatever_becomes_of_the_first(ending: str, store: str) -> None:
    """Rank 0 catches its error, and its model is freed when the `except` block ends; the others still wait for it."""
    lives = (0,) if ending == "live on" else ()
    sizes = (2, 3, 4) if store == "tcp" else (3,)
    for job in together([partial(run_job, part, size, store=store, ending=ending, lives=lives) for size in sizes]):
        check_all_raise(job, "Ranks diverged at collective", TIGHT)


# --- a rank leaves by an exception, and lives on ---


def leave(rank: Rank, where: str, ending: str) -> None:
    """Rank 1 raises in the forward or in the backward of blocks.1, and catches it."""
    model = begun(rank)
    if rank.rank != 1:
        return steps(model)

    def fail(*_: Any) -> None:
        rank.event()
        raise RuntimeError("bad batch")

    if where == "forward":
        model.blocks[1].up.register_forward_pre_hook(fail)
    else:
        model.blocks[1].up.register_forward_hook(lambda module, inputs, output: output.register_hook(fail) and None)
    try:
        steps(model)
    except RuntimeError as failure:
        rank.raised(failure)
    finally:
        if ending == "barrier":
            with contextlib.suppress(RuntimeError):
                dist.barrier()
        elif ending == "destroy":
            dist.destroy_process_group()
    time.sleep(20)


@pytest.mark.rotates(3)
@pytest.mark.proves("31c")
@pytest.mark.parametrize("ending", ["live on", "barrier", "destroy"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_all_learn_by_what_a_rank_left_though_it_lives_on(where: str, ending: str) -> None:
    for job in together([partial(run_job, leave, size, where=where, ending=ending, lives=(1,)) for size in (2, 3)]):
        how = "RuntimeError: bad batch" if where == "forward" else "(RuntimeError: bad batch|an exception)"  # if caught at once
        check_all_raise(job, f"rank 1 raised {how} in 'blocks.1' {where}", CALM, but=(1,))


# --- failures around wrapping ---


def around(rank: Rank, where: str, ending: str) -> None:
    """Rank 1 raises in code of the user's, in the midst of what all ranks do together."""
    rank.begin()
    torch.manual_seed(0)

    def fail(*_: Any) -> None:
        if rank.rank == 1:
            rank.event()
            raise RuntimeError("bad batch")

    try:
        with torch.device("meta" if where == "materialize" else "cpu"):
            model = Stack()
        fullshard.fully_shard(model.blocks[0], mesh=rank.mesh())
        if where == "wrap":
            fail()
        for block in model.blocks[1:]:
            fullshard.fully_shard(block, mesh=rank.mesh())
        fullshard.fully_shard(model, mesh=rank.mesh())
        if where == "materialize":

            def init(module: nn.Module) -> None:
                if module is model.blocks[1].up:
                    fail()
                module.reset_parameters()  # type: ignore[operator]

            fullshard.materialize(model, init=init)
        steps(model, 1)
        steps(model)
    except RuntimeError as failure:
        rank.raised(failure)
        if rank.rank != 1 or ending == "raise":
            raise
    time.sleep(20)


@pytest.mark.rotates(3)
@pytest.mark.proves("31c")
@pytest.mark.parametrize(("where", "ending"), [("wrap", "raise"), ("materialize", "raise"), ("materialize", "live on")])
def test_all_learn_of_a_failure_around_wrapping(where: str, ending: str) -> None:
    """Of a rank that raises in code of its own, and lives on, nobody can know."""
    lives = (1,) if ending == "live on" else ()
    for job in together([partial(run_job, around, size, where=where, ending=ending, lives=lives) for size in (2, 3)]):
        for one in job:
            if one.rank != 1:
                assert one.raised, f"rank {one.rank} waits\n{job}"
                assert "rank 1" in one.raised, f"rank {one.rank}: {one.raised}\n{job}"
                assert one.seconds < soon(GONE), f"rank {one.rank} took {one.seconds:.1f} seconds\n{job}"


def save(rank: Rank) -> None:
    """Rank 1 raises while the others save the optimizer of an FSDP1 wrapper."""
    rank.begin()
    torch.manual_seed(0)
    model = FSDP(Stack(), device_mesh=rank.mesh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    FSDP.optim_state_dict(model, optimizer)
    if rank.rank == 1:
        time.sleep(1.0)
        rank.event()
        raise RuntimeError("bad batch")
    FSDP.optim_state_dict(model, optimizer)


def test_all_learn_of_a_rank_that_ends_while_they_save_an_fsdp1_optimizer() -> None:
    for job in together([partial(run_job, save, size) for size in (2, 3)]):
        check_all_raise(job, r"rank 1 (is gone|ended the program).* in collective 2, optim_state_dict\(\)", GONE, but=(1,))


# --- the process group is destroyed ---


def destroy(rank: Rank) -> None:
    """Rank 1 destroys the process group while the others wait in a gather."""
    model = begun(rank)
    if rank.rank == 1:
        time.sleep(3.0)
        rank.event()
        dist.destroy_process_group()
        time.sleep(20)
    steps(model)


@pytest.mark.rotates(2)
@pytest.mark.proves("31e")
@pytest.mark.parametrize("store", ["tcp", "agent"])
def test_all_learn_at_once_that_a_rank_destroyed_the_process_group(store: str) -> None:
    for job in together([partial(run_job, destroy, size, store=store, lives=(1,)) for size in (2, 3)]):
        check_all_raise(job, "rank 1 ", TIGHT, but=(1,))


ROUNDS = (2, 6)  # those behind which it is counted what is left, from 0


def rounds(rank: Rank, ports: list[int], shard: bool) -> None:
    """Init, train, destroy; again and again, at once but where it is counted what is left."""
    for index, port in enumerate(ports):
        rank.begin(port=port)
        torch.manual_seed(0)
        model: nn.Module = Stack()
        model = shard_stack(model, rank.mesh()) if shard else nn.parallel.DistributedDataParallel(model)
        steps(model, 2)
        dist.barrier()
        time.sleep(0.5)  # in plain torch, too, a rank may wait for ever in gloo's barrier if another destroys the group at once
        dist.destroy_process_group()
        del model
        gc.collect()
        time.sleep(1.0 if index in ROUNDS else 0.0)  # threads that were told to end do so
        rank.say("round", files=len(os.listdir("/proc/self/fd")), threads=len(os.listdir("/proc/self/task")))


@pytest.mark.proves("31e")
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="files and threads are counted in /proc")
def test_rounds_of_init_and_destroy_leave_nothing_behind() -> None:
    """Between the third and the seventh round no more files and threads are left than by torch's own DDP."""
    left: dict[bool, dict[str, int]] = {}
    first, last = ROUNDS
    ports = [[free_port() for _ in range(last + 1)] for _ in range(2)]
    jobs = [partial(run_job, rounds, 2, ports=ports[shard], shard=shard, limit=90.0) for shard in (False, True)]
    for shard, job in zip((False, True), together(jobs)):
        counts = [[line for line in one.said if line["what"] == "round"] for one in job]
        assert [len(lines) for lines in counts] == [last + 1] * 2, job
        left[shard] = {what: max(lines[last][what] - lines[first][what] for lines in counts) for what in ("files", "threads")}
    assert all(left[True][what] <= max(0, left[False][what]) for what in left[True]), left


# --- a rank is gone ---


def killed(rank: Rank, victim: int) -> None:
    """One of many is killed in the midst of a step."""
    model = begun(rank)

    def die(*_: Any) -> None:
        if rank.rank == victim:
            rank.event()
            meet("SIGKILL")

    model.blocks[1].up.register_forward_pre_hook(die)
    steps(model)


def gone_ranks(text: str) -> set[int]:
    """The ranks that a text says are no more."""
    found: set[int] = set()
    said = r"(?:rank|ranks) ([\d, and-]+?)(?:: | )(?:is gone|are gone|ended|does not answer|do not answer|raised|died|closed)"
    for match in re.finditer(said, text):
        for first, last in re.findall(r"(\d+)(?:-(\d+))?", match.group(1)):
            found.update(range(int(first), int(last or first) + 1))
    return found


@pytest.mark.proves("31b")
@pytest.mark.parametrize(("victim", "store"), share([(0, "tcp"), (5, "tcp"), (0, "agent"), (5, "agent")]))
def test_after_one_of_eight_was_killed_all_others_name_it_and_nobody_else(victim: int, store: str) -> None:
    job = run_job(killed, 8, victim=victim, store=store)
    assert job[victim].code == -signal.SIGKILL, job
    check_all_raise(job, rf"rank {victim}\b", GONE, but=(victim,))
    for one in job:
        if one.rank != victim:
            assert gone_ranks(one.raised) == {victim}, f"rank {one.rank}: {one.raised}\n{job}"
            for this in re.findall(r"this rank \(rank (\d+)\)", one.raised):
                assert int(this) == one.rank, f"rank {one.rank}: {one.raised}\n{job}"


# --- under torchrun ---

PROGRAM = """
import os, sys, time
sys.path.insert(0, {tests!r})
import torch, torch.distributed as dist
from models import Stack, batch, shard_stack, square
from torch.distributed.device_mesh import init_device_mesh
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = shard_stack(Stack(), init_device_mesh("cpu", (size,)))
square(model(batch(0))).backward()
def fail(*_):
    say("event", time.monotonic())
    raise RuntimeError("bad batch")
def say(*words):  # in one piece, since all ranks write to one file
    os.write(2, ("\\n" + " ".join(map(str, words)) + "\\n").encode())
if rank == 1:
    model.blocks[1].up.register_forward_pre_hook(fail)
try:
    for step in range(3):
        square(model(batch(step))).backward()
except RuntimeError as failure:
    say("raised", rank, time.monotonic(), str(failure).splitlines()[0])
    if rank == 1:
        time.sleep(60)
    raise
"""


def test_a_job_of_torchrun_ends_though_the_rank_that_failed_lives_on(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM.format(tests=TESTS))
    ended = torchrun("--standalone", "--nproc-per-node", "2", str(tmp_path / "program.py"))
    assert ended.returncode != 0
    event = re.search(r"^event ([\d.]+)", ended.stderr, re.MULTILINE)
    assert event is not None, ended.stderr
    raised = {int(r): (float(at), text) for r, at, text in re.findall(r"raised (\d) ([\d.]+) (.*)", ended.stderr)}
    others = {rank for rank in raised if rank != 1}  # the launcher ends the last when it sees the first end
    assert others, ended.stderr
    for rank in others:
        at, text = raised[rank]
        assert "rank 1 raised RuntimeError: bad batch in 'blocks.1' forward" in text
        assert at - float(event.group(1)) < soon(CALM)


# --- names, and what others write ---


def unnamed(rank: Rank) -> None:
    """Ranks run different units of a model that never ran as a whole."""
    rank.begin()
    model = shard_stack(Stack(), rank.mesh())
    rank.event()
    model.blocks[1 + rank.rank](torch.ones(4, 7))


def test_units_have_their_full_names_before_the_root_first_ran() -> None:
    job = run_job(unnamed, 2)
    check_all_raise(job, r"'blocks\.1'", CALM)
    check_all_raise(job, r"'blocks\.2'", CALM)


class Garbling:
    """A store under which everything that is written is garbage, as long as it is so."""

    active = True

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value if not Garbling.active else b"\xff\x00 garbage {")

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        for key, value in zip(keys, values):
            self.set(key, value)


def garble(rank: Rank) -> None:
    """While rank 0 waits for it, all that rank 1 says is unreadable for four seconds; then the ranks part."""
    rank.begin()
    if rank.rank == 1:
        own = _torch.own_store
        _torch.own_store = lambda *arguments: Garbling(own(*arguments))  # type: ignore[assignment]
    model = shard_stack(Stack(), rank.mesh())
    steps(model, 1)
    if rank.rank == 1:
        time.sleep(4.0)
        Garbling.active = False
        rank.event()
        model.blocks[2](torch.ones(4, 7))
    steps(model)


def test_what_the_watch_cannot_read_it_skips() -> None:
    job = run_job(garble, 2)
    check_all_raise(job, "Ranks diverged at collective", GONE)


# --- all endings at all places ---


def test_a_part_of_the_matrix_of_endings_and_places() -> None:
    """`make chaos` runs all of it."""
    with mock.patch.dict(os.environ):  # which says what a job trains
        assert chaos.main(["--part", "small", "--seconds", "400"]) == 0
