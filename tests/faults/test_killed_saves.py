"""Ranks that end while weights are saved: the directory holds the checkpoint of before whole, or the new one."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Net, contents
from exits import Rank, run_job, together
from rotation import share

import fullshard
from fullshard.weights import background as behind
from fullshard.weights import commit

CALLS = [
    *((os, name) for name in ("open", "posix_fallocate", "pwrite", "ftruncate", "fsync", "close", "mkdir", "unlink", "rmdir")),
    *((os, name) for name in ("rename", "replace", "link", "symlink", "chmod", "chown")),
    *((Path, name) for name in ("write_text", "write_bytes")),
    (fcntl, "flock"),
    (commit, "exchange"),
]


def counting(reached: Callable[[int], None]) -> list[int]:
    """From now on `reached` is called before each call to the file system, with its number. Returns where they are counted."""
    calls, lock = [0], threading.Lock()

    def counted(original: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            with lock:
                calls[0] += 1
                number = calls[0]
            reached(number)
            return original(*arguments, **options)

        return call

    for home, name in CALLS:
        setattr(home, name, counted(getattr(home, name)))
    return calls


def job(
    rank: Rank,
    directory: str,
    victims: list[int],
    number: int,
    background: bool,
    seed: int,
    step: int | None = None,
    stays: bool = False,
) -> None:
    """Saves; the victims are killed before their call of this number. stays: whether the directory is taken for a mount point."""
    rank.begin()
    if stays:
        os.path.ismount = lambda path: Path(path) == Path(directory)
    behind.PATIENCE = 2.0
    torch.manual_seed(seed)
    model = Net()
    fullshard.shard_model(model)
    rank.event()

    def reached(call: int) -> None:
        if call == number and rank.rank in victims:
            os.kill(os.getpid(), signal.SIGKILL)

    calls = counting(reached)
    saved = fullshard.save_weights(
        model,
        directory,
        max_shard_bytes=500,
        extra={"config.json": str(seed)},
        background=background,
        step=step,
        keep=None if step is None else 2,
    )
    if background:
        saved.wait()  # type: ignore[union-attr]
    rank.say("saved", calls=calls[0])


def copies(of: Path, calls: int) -> dict[int, Path]:
    """By the numbers of calls that are tried, the first one among them, a copy of a directory, which is alone in its own."""
    found = {number: of.parent / f"call {number}" / of.name for number in sorted({1, *share(range(1, calls + 1))})}
    for folder in found.values():
        shutil.copytree(of, folder, symlinks=True)
    return found


def saved(
    folder: Path,
    *,
    victims: list[int],
    number: int,
    background: bool,
    seed: int,
    step: int | None = None,
    stays: bool = False,
) -> Any:
    return run_job(
        job,
        2,
        limit=60.0,
        ends_fast=True,
        directory=str(folder),
        victims=victims,
        number=number,
        background=background,
        seed=seed,
        step=step,
        stays=stays,
    )


@pytest.mark.rotates(3)
@pytest.mark.proves("4c")
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("victims", [[0], [1], [0, 1]])
def test_a_rank_that_is_killed_at_any_call_leaves_the_old_checkpoint_or_the_new_one(
    victims: list[int], background: bool, tmp_path: Path
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    assert all(rank.code == 0 for rank in saved(old, victims=[], number=0, background=False, seed=1))
    shutil.copytree(old, new)
    done = saved(new, victims=[], number=0, background=background, seed=2)
    assert all(rank.code == 0 for rank in done)
    before, after = contents(old), contents(new)
    assert before != after and before.keys() == after.keys()
    calls = max(done[victim].first("saved")["calls"] for victim in victims)
    seen = []
    folders = copies(old, calls)
    jobs = [partial(saved, f, victims=victims, number=n, background=background, seed=2) for n, f in folders.items()]
    for (number, folder), ended in zip(folders.items(), together(jobs)):
        assert -signal.SIGKILL in [rank.code for rank in ended], str(ended)
        assert all(rank.code is not None for rank in ended), f"a rank hangs after call {number}: {ended}"
        found = contents(folder)
        assert found in (before, after), f"neither the old nor the new one after call {number} of {calls}"
        seen.append(found == after)
        if commit.left_over(folder) is not None:
            with pytest.warns(UserWarning, match="is left over from an unfinished save"):
                fullshard.load_weights(Net(), folder)
            with pytest.warns(UserWarning, match="is left over from an unfinished save. It is removed"):
                fullshard.save_weights(Net(), folder)
        elif commit.staging_path(folder).exists():  # empty as yet
            fullshard.save_weights(Net(), folder)
        assert not list(folder.parent.glob(".*"))
    assert False in seen and seen == sorted(seen), "it is the new one from some call on"


def test_a_rank_that_is_killed_at_any_call_leaves_whole_weights_in_a_directory_that_stays(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    assert saved(old, victims=[], number=0, background=False, seed=1, stays=True)[0].code == 0
    shutil.copytree(old, new)
    again = partial(saved, victims=[], number=0, background=False, seed=2, stays=True)
    done = again(new)
    before, after = whole(old), whole(new)
    assert before != after
    seen = []
    folders = copies(old, done[0].first("saved")["calls"])
    jobs = [partial(saved, f, victims=[0], number=n, background=False, seed=2, stays=True) for n, f in folders.items()]
    for folder, ended in zip(folders.values(), together(jobs)):
        assert ended[0].code == -signal.SIGKILL and ended[1].code is not None, str(ended)
        seen.append(whole(folder))
    for folder, ended in zip(folders.values(), together([partial(again, folder) for folder in folders.values()])):
        assert ended[0].code == 0, str(ended)
        assert whole(folder) == after and len(os.listdir(folder)) == len(os.listdir(old)), "nothing is left over"
    assert set(seen) <= {before, after} and seen == sorted(seen, key=[before, after].index)


def whole(folder: Path) -> str:
    """The values in a directory, as a reader finds them."""
    model = Net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fullshard.load_weights(model, folder)
    return str([tensor.tolist() for tensor in model.state_dict().values()])


def test_a_rank_that_is_killed_at_any_call_leaves_the_link_at_a_whole_step(tmp_path: Path) -> None:
    run, before = tmp_path / "run", tmp_path / "before"
    for step in (1, 2):
        assert all(rank.code == 0 for rank in saved(run, victims=[], number=0, background=False, seed=step, step=step))
    shutil.copytree(run, before, symlinks=True)
    done = saved(run, victims=[], number=0, background=False, seed=3, step=3)
    whole = {step: contents(run / f"step-{step}") for step in (2, 3)}
    assert not (run / "step-1").exists()
    seen = []
    folders = copies(before, done[0].first("saved")["calls"])
    jobs = [partial(saved, f, victims=[0], number=n, background=False, seed=3, step=3) for n, f in folders.items()]
    for (number, run), ended in zip(folders.items(), together(jobs)):
        assert ended[0].code == -signal.SIGKILL and ended[1].code is not None, str(ended)
        step = int(os.readlink(run / "latest").removeprefix("step-"))
        assert contents(run / "latest") == whole[step], f"no whole step after call {number}"
        seen.append(step)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fullshard.save_weights(Net(), run, step=4, keep=1)
            fullshard.save_weights(Net(), run, step=3, keep=1)  # which may have been left over
        assert sorted(os.listdir(run)) == ["latest", "step-3"]
    assert set(seen) <= {2, 3} and seen == sorted(seen)


def ending(rank: Rank, directory: str, what: str) -> None:
    """Begins a save in the background, and ends."""
    import torch.distributed as dist

    rank.begin()
    behind.PATIENCE = 2.0
    torch.manual_seed(7)
    model = Net()
    fullshard.shard_model(model)
    original = os.fsync

    def slow(descriptor: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            if what == f"killed {rank.rank}":
                os.kill(os.getpid(), signal.SIGKILL)
            if rank.rank == 1 and what == "slow":
                time.sleep(3)
        original(descriptor)

    os.fsync = slow
    rank.event()
    warnings.showwarning = lambda message, *_: rank.say("warned", text=str(message))
    fullshard.save_weights(model, directory, background=True)
    if what == "destroyed":
        dist.destroy_process_group()


def test_a_process_that_ends_ends_its_save(tmp_path: Path) -> None:
    """A job that ends without `wait` has its checkpoint; one of which a rank is killed ends, and has none."""
    whats = ["ends", "destroyed", "slow", "killed 0", "killed 1"]
    folders = [tmp_path / what / "saved" for what in whats]
    for folder in folders:
        folder.parent.mkdir()
    jobs = [partial(run_job, ending, 2, limit=60.0, directory=str(f), what=w) for f, w in zip(folders, whats)]
    for what, folder, ended in zip(whats, folders, together(jobs, at_once=len(jobs))):
        warned = ["\n".join(line["text"] for line in rank.said if line["what"] == "warned") for rank in ended]
        if not what.startswith("killed"):
            assert [rank.code for rank in ended] == [0, 0], str(ended)
            assert [path.name for path in folder.parent.iterdir()] == ["saved"] and "model.safetensors" in contents(folder)
            assert warned == ["", ""]
            continue
        killed = int(what[-1])
        assert ended[killed].code == -signal.SIGKILL and ended[1 - killed].first("done") is not None
        assert "The background save to" in warned[1 - killed]
        assert not folder.exists()
