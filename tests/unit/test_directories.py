"""Directories that others use while weights are saved to them: nothing of theirs is lost, and nobody reads two checkpoints."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import stat
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
from checkpoints import Net, contents
from exits import command_line, script
from torch import nn

import fullshard
from fullshard.weights import Drop, Keep, commit, load_weights, save_weights, transfer
from fullshard.weights.commit import Replacement, staging_path
from fullshard.weights.headers import BadFile, FileTensor
from fullshard.weights.key_map import MappedTensor
from fullshard.weights.layout import CheckpointLayout, lay_out
from fullshard.weights.steps import Steps


def uniform(value: float) -> nn.Module:
    model = Net()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(value)
    return model


def values_of(model: nn.Module) -> set[float]:
    return {value for tensor in model.state_dict().values() for value in tensor.flatten().tolist()}


@contextmanager
def beside_it(work: object) -> Iterator[None]:
    """A thread that calls `work` over and over while the block runs; what it raises is raised here."""
    ended, failures = threading.Event(), list[BaseException]()

    def run() -> None:
        try:
            while not ended.is_set():
                work()  # type: ignore[operator]
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    assert not failures, failures


# --- files of others ---


def test_files_that_others_make_during_a_save_are_kept(tmp_path: Path) -> None:
    """259 of 562 were deleted."""
    folder, made = tmp_path / "run", list[Path]()
    save_weights(uniform(0.0), folder)
    (folder / "logs").mkdir()

    def make() -> None:
        place = folder / ("logs" if len(made) % 2 else ".") / f"event.{len(made)}"
        try:
            place.write_text(str(len(made)))
        except FileNotFoundError:  # between two renames of a directory, where a path leads nowhere
            return
        made.append(place)
        time.sleep(0.002)

    with beside_it(make):
        for number in range(1000):
            save_weights(uniform(float(number)), folder, background=True).wait()
            if number >= 20 and len(made) > 50:  # however fast a save is
                break
    assert len(made) > 50 and [path for path in made if path.read_text() != path.suffix[1:]] == []
    assert not staging_path(folder).exists()


def test_files_of_others_are_not_synced(tmp_path: Path) -> None:
    """A save took seconds for each thousand of them, in which a busy program made more: it never ended."""
    folder, real, synced = tmp_path / "run", commit.sync, list[str]()
    save_weights(uniform(0.0), folder)
    (folder / "logs").mkdir()
    for number in range(20):
        (folder / ("logs" if number % 2 else ".") / f"event.{number}").write_text("")
    with mock.patch.object(commit, "sync", lambda path: (synced.append(path.name), real(path))):
        save_weights(uniform(1.0), folder, extra={"config.json": "{}"})
    assert {"config.json", "logs"} <= set(synced) and not any(name.startswith("event") for name in synced)
    assert len(list(folder.rglob("event.*"))) == 20


@pytest.mark.parametrize("when", ["before the exchange", "behind it"])
def test_a_file_that_was_not_seen_is_moved_over(tmp_path: Path, when: str) -> None:
    folder = tmp_path / "run"
    save_weights(uniform(1.0), folder, extra={"kept": "1", "given": "old"})
    (folder / "deep" / "deeper").mkdir(parents=True)
    (folder / "replaced").write_text("old")
    (folder / "link").symlink_to("nowhere")
    replace = Replacement._replace

    def late(self: Replacement) -> Path | None:
        if when == "before the exchange":
            place = self.directory
            old = replace
        else:
            place, old = self.path, lambda _: moved
            moved = replace(self)
        (place / "made").write_text("new")
        (place / "deep" / "deeper" / "made").write_text("new")
        (place / "fresh").mkdir()
        (place / "fresh" / "made").write_text("new")
        (place / "replacing").write_text("new")
        os.replace(place / "replacing", place / "replaced")
        return old(self)

    with mock.patch.object(Replacement, "_replace", late):
        save_weights(uniform(2.0), folder, extra={"given": "new"})
    for name in ("made", "deep/deeper/made", "fresh/made", "replaced", "given"):
        assert (folder / name).read_text() == "new", name
    assert (folder / "kept").read_text() == "1" and os.readlink(folder / "link") == "nowhere"
    model = Net()
    load_weights(model, folder)
    assert values_of(model) == {2.0} and not staging_path(folder).exists()


def test_what_others_made_in_the_exchange_of_a_save_that_was_killed_is_moved_over_by_the_next(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    save_weights(uniform(1.0), folder)
    code = f"""
import os, sys
sys.path[:0] = {sys.path!r}
from pathlib import Path
from test_directories import uniform
from fullshard.weights import commit, save_weights
def killed(old, new, ours, single):
    (old / "made").write_text("unseen")
    os._exit(9)
commit._move_over = killed
save_weights(uniform(2.0), {str(folder)!r}, extra={{"config.json": "2"}})
"""
    assert script(code).returncode == 9
    model = Net()
    with pytest.warns(UserWarning, match="is left over from an unfinished save"):
        load_weights(model, folder)
    assert values_of(model) == {2.0} and not (folder / "made").exists()
    with pytest.warns(UserWarning, match="It is removed"):
        save_weights(uniform(3.0), folder)
    assert (folder / "made").read_text() == "unseen" and (folder / "config.json").read_text() == "2"
    assert not staging_path(folder).exists()


KILLED = """
import os, sys, time
sys.path[:0] = {path!r}
from test_directories import uniform
from fullshard.weights import commit, save_weights
{how}
save_weights(uniform(2.0), {folder!r}, extra={{"config.json": "2"}})
"""


def killed(folder: Path, how: str) -> None:
    """Save 2.0 in a process that `how` ends."""
    code = KILLED.format(path=sys.path, folder=str(folder), how=how)
    assert script(code).returncode == 9


def test_what_was_removed_since_a_save_was_killed_does_not_come_back(tmp_path: Path) -> None:
    """Before its exchange the new content has links to all files that the directory had."""
    folder = tmp_path / "run"
    save_weights(uniform(1.0), folder, extra={"kept": "1", "removed": "1"})
    killed(folder, "commit.Replacement._replace = lambda self: os._exit(9)")
    (folder / "removed").unlink()
    with pytest.warns(UserWarning, match="It is removed"):
        save_weights(uniform(3.0), folder)
    assert sorted(path.name for path in folder.iterdir()) == ["kept", "model.safetensors"]


def test_a_killed_save_whose_children_live_on_holds_nobody_up_and_loses_nothing(tmp_path: Path) -> None:
    """They share its lock, as workers of a data loader do."""
    folder = tmp_path / "run"
    save_weights(uniform(1.0), folder)
    how = """
def ended(old, new, ours, single):
    (old / "made").write_text("unseen")
    child = os.fork()
    if not child:
        time.sleep(60)
        os._exit(0)
    open({pid!r}, "w").write(str(child))
    os._exit(9)
commit._move_over = ended
""".format(pid=str(tmp_path / "pid"))
    killed(folder, how)
    child = int((tmp_path / "pid").read_text())
    try:
        os.kill(child, 0)
        with pytest.warns(UserWarning, match="It is removed"):
            save_weights(uniform(3.0), folder)
        assert (folder / "made").read_text() == "unseen" and not staging_path(folder).exists()
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_disk_that_fails_behind_the_exchange_costs_no_file_of_others(tmp_path: Path) -> None:
    """What was given up then was the old content, with files that nobody had looked at."""
    folder = tmp_path / "run"
    save_weights(uniform(1.0), folder)
    replace, sync = Replacement._replace, commit.sync

    def late(self: Replacement) -> Path | None:
        (self.directory / "made").write_text("unseen")
        return replace(self)

    def broken(path: Path) -> None:
        if path == folder.parent:
            raise OSError(errno.EIO, "injected")
        sync(path)

    with (
        mock.patch.object(Replacement, "_replace", late),
        mock.patch.object(commit, "sync", broken),
        pytest.raises(RuntimeError, match="injected"),
    ):
        save_weights(uniform(2.0), folder)
    assert (folder / "made").read_text() == "unseen" and not staging_path(folder).exists()


def test_an_interrupt_behind_the_exchange_leaves_the_rest_to_the_next_save(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    save_weights(uniform(1.0), folder)

    def interrupted(old: Path, new: Path, ours: object, single: str) -> None:
        (old / "made").write_text("unseen")
        raise KeyboardInterrupt

    with mock.patch.object(commit, "_move_over", interrupted), pytest.raises(KeyboardInterrupt):
        save_weights(uniform(2.0), folder)
    with pytest.warns(UserWarning, match="It is removed"):
        save_weights(uniform(3.0), folder)
    assert (folder / "made").read_text() == "unseen" and not staging_path(folder).exists()


def test_mode_and_sockets_stay(tmp_path: Path) -> None:
    import socket

    folder = tmp_path / "run"
    save_weights(uniform(1.0), folder)
    os.chmod(folder, 0o2750)
    with socket.socket(socket.AF_UNIX) as server:
        before = os.getcwd()
        os.chdir(folder)  # the name of a socket is short
        server.bind("socket")
        os.chdir(before)
        save_weights(uniform(2.0), folder)
        assert stat.S_ISSOCK((folder / "socket").stat().st_mode)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o2750


# --- two saves ---


def layout_of(model: nn.Module) -> CheckpointLayout:
    files = {name: FileTensor(name, one.dtype, tuple(one.shape), "", 0) for name, one in model.state_dict().items()}
    return lay_out({name: MappedTensor.of(one) for name, one in files.items()}, max_shard_bytes=10**9)[0]


def test_a_second_save_is_told_of_the_first(tmp_path: Path) -> None:
    """Both said that all was well, and the directory had rows that neither had written."""
    folder = tmp_path / "run"
    save_weights(uniform(1.0), folder)
    first = Replacement(folder, "first")
    first.prepare(layout_of(Net()))
    told = rf"Another save to {folder} is running, by process {os.getpid()} on \S+. Wait for it or save to another directory"
    with pytest.raises(ValueError, match=told):
        save_weights(uniform(2.0), folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_weights(Net(), folder)  # and nobody is told of leftovers
    first.discard()
    save_weights(uniform(2.0), folder)
    assert not staging_path(folder).exists()


def test_a_save_whose_folder_was_taken_leaves_all_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    save_weights(uniform(1.0), folder)
    before, first = contents(folder), Replacement(folder, "first")
    first.prepare(layout_of(Net()))
    (staging_path(folder) / "owner").unlink()  # as somebody who takes it for a leftover
    with pytest.warns(UserWarning, match="It is removed"):
        second = Replacement(folder, "second")
        second.prepare(layout_of(Net()))
    with pytest.raises(RuntimeError, match="was removed or belongs to another save"):
        first.commit()
    first.discard()
    second.discard()
    assert contents(folder) == before and not staging_path(folder).exists()


JOB = """
import sys
sys.path[:0] = {path!r}
from pathlib import Path
from test_directories import uniform
from fullshard.weights import save_weights
folder, saved = Path({folder!r}), 0
while not (folder.parent / "enough").exists():
    try:
        save_weights(uniform({value}), folder, max_shard_bytes=200)
        saved += 1
        (folder.parent / "saved {value}").touch()
    except ValueError as failure:
        assert "Another save to" in str(failure), failure
        (folder.parent / "told").touch()
print(saved)
"""


def test_two_jobs_that_save_and_one_that_loads_see_whole_checkpoints(tmp_path: Path) -> None:
    """10 of 181 loads had files of two checkpoints."""
    folder, seen = tmp_path / "run", list[set[float]]()
    save_weights(uniform(1.0), folder, max_shard_bytes=200)
    path = [str(Path(__file__).parent), *sys.path]
    codes = [JOB.format(path=path, value=value, folder=str(folder)) for value in (1.0, 2.0)]
    begin = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(script, code) for code in codes]
        while not (tmp_path / "enough").exists():
            seen.append(loaded(folder))
            met = all((tmp_path / name).exists() for name in ("told", "saved 1.0", "saved 2.0")) and {1.0, 2.0} <= set.union(
                *seen
            )
            if (met and time.monotonic() > begin + 1.0) or time.monotonic() > begin + 60.0 or any(job.done() for job in jobs):
                (tmp_path / "enough").touch()
    saved = [int(job.result().stdout) for job in jobs]
    assert all(len(values) == 1 for values in seen), seen
    assert met and all(saved), "both saved, one was told of the other, and both were loaded"
    assert not staging_path(folder).exists()


# --- a directory for each step ---


def test_steps_have_directories_and_the_link_leads_to_the_last(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (10, 20, 30, 5):  # the last one of a training that went back
        done = save_weights(uniform(float(step)), run, step=step, keep=2)
        assert done.directory == str(run / f"step-{step}") and os.readlink(run / "latest") == f"step-{step}"
        model = Net()
        load_weights(model, run / "latest")
        assert values_of(model) == {float(step)}
    assert sorted(os.listdir(run)) == ["latest", "step-30", "step-5"]
    with pytest.raises(
        ValueError, match=r"has no \*.safetensors files: it contains latest, .* Load .*latest, the link to the latest step"
    ):
        load_weights(Net(), run)


def test_readers_of_the_link_see_whole_checkpoints_by_their_paths(tmp_path: Path) -> None:
    """Who resolves it once, and then opens files by their names, as other programs do."""
    run = tmp_path / "run"
    save_weights(uniform(0.0), run, step=0)
    whole = contents(run / "step-0")
    seen = list[bool]()

    def read() -> None:
        place = Path(os.path.realpath(run / "latest"))
        found = contents(place)
        seen.append(found.keys() == whole.keys() and len(set(values_of(loaded(place)))) == 1)

    def loaded(place: Path) -> nn.Module:
        model = Net()
        load_weights(model, place)
        return model

    with beside_it(read):
        for step in range(1, 400):
            save_weights(uniform(float(step)), run, step=step)  # keep= removes steps that a slow reader still reads
            if step > 40 and len(seen) > 5:
                break
    assert len(seen) > 5 and all(seen)


def test_steps_that_are_none_are_refused(tmp_path: Path) -> None:
    for options, told in (
        ({"step": -1}, "step must be an int of at least 0, got -1"),
        ({"step": True}, "step must be an int of at least 0, got True"),
        ({"step": 1, "keep": 0}, "keep must be an int of at least 1, or None for all steps, got 0"),
        ({"keep": 2}, "keep=2 needs step=. Pass step= as well"),
    ):
        with pytest.raises(ValueError, match=told):
            save_weights(uniform(1.0), tmp_path / "run", **options)
    (tmp_path / "run" / "latest").mkdir(parents=True)
    with pytest.raises(ValueError, match="latest is not a link"):
        save_weights(uniform(1.0), tmp_path / "run", step=1)
    assert os.listdir(tmp_path / "run") == ["latest"]


# --- which directories ---


def test_a_link_stays_one_and_its_target_is_replaced(tmp_path: Path) -> None:
    """It was exchanged away, its target stayed old, and every later save failed."""
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    for value in (1.0, 2.0, 3.0):
        save_weights(uniform(value), tmp_path / "link")
        model = Net()
        load_weights(model, tmp_path / "there")
        assert values_of(model) == {value} and (tmp_path / "link").is_symlink()
    (tmp_path / "dangling").symlink_to("not there yet")
    save_weights(uniform(4.0), tmp_path / "dangling")
    assert (tmp_path / "not there yet" / "model.safetensors").exists()


def test_paths_that_are_no_directory_of_a_checkpoint_are_refused_before_anything(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for directory, told in (
        ("", "directory must be the path of a directory, got ''"),
        ("/", "/ is the root of the file system. Save to a directory in it"),
        (tmp_path / "file", "file is a file. Pass the path of a directory, existing or new"),
    ):
        with pytest.raises(ValueError, match=told):
            save_weights(uniform(1.0), directory)
    with pytest.raises(ValueError, match="directory must be the path of a directory, got ''"):
        save_weights(uniform(1.0), "", step=1)
    assert [path.name for path in tmp_path.rglob("*")] == ["file"]


# --- directories that stay ---


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, which cannot be exchanged with another one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


STAYS = "is the current directory or a parent of it, so files are moved into it one by one"


def loaded(directory: Path) -> set[float]:
    model = Net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load_weights(model, directory)
    return values_of(model)


@pytest.mark.parametrize("shards", [[10**9, 10**9], [300, 300], [10**9, 300], [300, 10**9]])
def test_a_directory_that_stays_gets_the_files_one_by_one(here: Path, shards: list[int]) -> None:
    """One file after one, several after several, and each after the other."""
    for value, most in zip((1.0, 2.0), shards):
        (here / "other").write_text("kept")
        with pytest.warns(UserWarning, match=STAYS):
            saved = save_weights(
                uniform(value), ".", max_shard_bytes=most, extra=lambda folder, value=value: further(folder, value)
            )
        assert loaded(here) == {value} and saved.directory == str(here)
        weights = {path.name for path in here.glob("model*")}
        assert weights == {*saved.files, *(["model.safetensors.index.json"] if most == 300 else [])}
    assert (here / "config.json").read_text() == (here / "deep" / "more").read_text() == "2.0"
    assert (here / "other").read_text() == "kept" and not list(here.glob(".*")) and len(os.listdir(here)) == 3 + len(weights)
    inspected = command_line("weights", "check", ".", cwd=here)
    assert inspected.returncode == 0 and "left over" not in inspected.stdout, inspected.stdout


def in_place(folder: Path) -> dict[str, str]:
    return {name: digest for name, digest in contents(folder).items() if not name.startswith(".saving")}


def further(folder: Path, value: float) -> None:
    (folder / "deep").mkdir()
    for name in ("config.json", "deep/more"):
        (folder / name).write_text(str(value))


def test_a_mount_point_gets_the_files_one_by_one_and_readers_see_whole_checkpoints(tmp_path: Path) -> None:
    folder, seen = tmp_path / "mount", set[float]()
    folder.mkdir()
    with mock.patch.object(os.path, "ismount", lambda path: Path(path) == folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_weights(uniform(0.0), folder, max_shard_bytes=300)

        def read() -> None:
            found = loaded(folder)
            assert len(found) == 1
            seen.update(found)

        with beside_it(read):
            for number in range(30):
                save_weights(uniform(float(number)), folder, max_shard_bytes=300 if number % 3 else 10**9)
    assert len(seen) > 3


@pytest.mark.parametrize("most", [10**9, 300])
def test_a_failure_at_any_call_leaves_a_directory_that_stays_as_it_was(here: Path, most: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_weights(uniform(1.0), ".", max_shard_bytes=300, extra=lambda folder: further(folder, 1.0))
    before, number, kept = in_place(here), 0, 0
    while True:
        number += 1
        left = [number]

        def fails(original: object, left: list[int] = left) -> object:
            def call(*arguments: object, **options: object) -> object:
                left[0] -= 1
                if left[0] == 0:
                    raise OSError(errno.EIO, "injected")
                return original(*arguments, **options)  # type: ignore[operator]

            return call

        with ExitStack() as stack, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name in ("fsync", "link", "rename", "replace", "unlink"):
                stack.enter_context(mock.patch.object(os, name, fails(getattr(os, name))))
            try:
                save_weights(uniform(2.0), ".", max_shard_bytes=most, extra=lambda folder: further(folder, 2.0))
            except (RuntimeError, OSError) as failure:
                assert "injected" in str(failure)
                if "is complete in" in str(failure):
                    kept += 1
                    assert loaded(kept_in(failure)) == {2.0}
                    assert (kept_in(failure) / "deep" / "more").read_text() == "2.0"
        if left[0] > 0:
            break
        found = loaded(here)
        assert found == {2.0} or in_place(here) == before, f"call {number}"
        if found == {2.0}:  # it failed while what is old was removed
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                save_weights(uniform(1.0), ".", max_shard_bytes=300, extra=lambda folder: further(folder, 1.0))
            before = in_place(here)
    assert number > 10 and kept > 3 and loaded(here) == {2.0} and not list(here.glob(".*"))


def test_an_empty_directory_is_replaced_and_one_without_exchange_is_moved_aside(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with mock.patch.object(commit, "exchange", side_effect=OSError(errno.EINVAL, "no")):
        save_weights(uniform(1.0), folder, extra={"kept": "1"})
        with pytest.warns(UserWarning, match="cannot exchange two directories atomically"):
            save_weights(uniform(2.0), folder)
        model = Net()
        load_weights(model, folder)
        assert values_of(model) == {2.0} and (folder / "kept").read_text() == "1" and not staging_path(folder).exists()

        def broken(source: object, target: object, rename: object = os.rename) -> None:
            if Path(str(target)) == folder and not folder.exists() and ".old" not in str(source):
                raise OSError(errno.EIO, "injected")
            rename(source, target)  # type: ignore[operator]

        with (
            mock.patch.object(os, "rename", broken),
            pytest.warns(UserWarning, match="cannot exchange"),
            pytest.raises(RuntimeError, match="injected.*is complete in .* and .*run is unchanged"),
        ):
            save_weights(uniform(3.0), folder)
        with pytest.warns(UserWarning, match="is a complete checkpoint that a save could not move into place"):
            load_weights(model, folder)
        assert values_of(model) == {2.0}, "the old one is back"

        def ended(source: object, target: object, rename: object = os.rename) -> None:
            if Path(str(target)) == folder and not folder.exists():  # between the two
                raise KeyboardInterrupt
            rename(source, target)  # type: ignore[operator]

        with (
            mock.patch.object(os, "rename", ended),
            mock.patch.object(Replacement, "discard"),
            warnings.catch_warnings(),
            pytest.raises(KeyboardInterrupt),
        ):
            warnings.simplefilter("ignore")
            save_weights(uniform(3.0), folder)
    assert not folder.exists()
    with pytest.warns(UserWarning, match="It is removed"):
        replacement = Replacement(folder, "next")
        with mock.patch.object(commit, "_lock", return_value=True):  # of this process, which still lives
            replacement.prepare(layout_of(Net()))
    replacement.discard()
    load_weights(model, folder)
    assert values_of(model) == {2.0}, "the one of before is in its place again"


def kept_in(failure: BaseException) -> Path:
    """Where a save says that it left what it could not put into its place."""
    told = re.search(r"is complete in (.+?), and ", str(failure))
    assert told is not None, failure
    return Path(told[1])


def test_what_is_whole_and_cannot_be_put_into_its_place_stays_until_a_later_save_is(tmp_path: Path) -> None:
    folder, model = tmp_path / "run", Net()
    save_weights(uniform(1.0), folder)
    places: list[Path] = []
    for value in (2.0, 3.0):
        with mock.patch.object(commit, "exchange", side_effect=OSError(errno.EIO, "injected")):
            with pytest.raises(RuntimeError, match="injected") as raised:
                save_weights(uniform(value), folder, extra={"config.json": str(value)})
        places.append(kept_in(raised.value))
        load_weights(model, places[-1])
        assert values_of(model) == {value} and (places[-1] / "config.json").read_text() == str(value)
        with pytest.warns(UserWarning, match=f"{places[-1].name} is a complete checkpoint .*run is complete without it"):
            load_weights(model, folder)
        assert values_of(model) == {1.0}
    assert not places[0].exists(), "one is kept, not one of each failure"
    full = OSError(errno.ENOSPC, "full")
    with (
        mock.patch.object(os, "posix_fallocate", side_effect=full),
        pytest.raises(ValueError, match=rf"Remove \S+{places[1].name}"),
    ):
        save_weights(uniform(4.0), folder)
    assert places[1].exists()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_weights(uniform(5.0), folder)
        load_weights(model, folder)
    assert values_of(model) == {5.0} and not staging_path(folder).exists()


def test_a_second_failure_while_it_is_kept_costs_nothing_of_before(tmp_path: Path) -> None:
    folder, model, number = tmp_path / "run", Net(), 0
    save_weights(uniform(1.0), folder)
    while True:
        number += 1
        failed: list[int] = []

        def fails(original: object, left: list[int] = [number], failed: list[int] = failed) -> object:  # noqa: B006
            def call(*arguments: object, **options: object) -> object:
                if exchanged:
                    left[0] -= 1
                    if left[0] == 0:
                        failed.append(1)
                        raise OSError(errno.EIO, "second")
                return original(*arguments, **options)  # type: ignore[operator]

            return call

        exchanged: list[int] = []

        def exchange(one: Path, other: Path, exchanged: list[int] = exchanged) -> None:
            exchanged.append(1)
            raise OSError(errno.EIO, "first")

        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(commit, "exchange", exchange))
            for name in ("open", "fsync", "pwrite", "ftruncate", "unlink", "rmdir", "rename", "replace"):
                stack.enter_context(mock.patch.object(os, name, fails(getattr(os, name))))
            with pytest.raises((RuntimeError, OSError), match="first|second"):
                save_weights(uniform(2.0), folder)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load_weights(model, folder)
            assert values_of(model) == {1.0}
        if not failed:
            break
    assert number > 5
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_weights(uniform(3.0), folder)
    load_weights(model, folder)
    assert values_of(model) == {3.0} and not staging_path(folder).exists()


# --- what is no checkpoint ---


@pytest.mark.parametrize("way", ["plain", "sharded"])
def test_models_without_values_are_not_saved_over_good_checkpoints(tmp_path: Path, way: str) -> None:
    """NaN was saved, streamed and averaged."""
    folder = tmp_path / "run"
    good = uniform(1.0)
    save_weights(good, folder)
    state = {name: one for name, one in good.state_dict().items() if name != "blocks.0.bias"}
    other = nn.Module()
    for name, one in state.items():
        other.register_buffer(name.replace(".", "_"), one)
    back = {name.replace(".", "_"): name for name in state}
    save_weights(other, tmp_path / "part")
    with torch.device("meta"):
        model = Net()
    if way == "sharded":
        torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
        fullshard.shard_model(model)
    try:
        load_weights(model, tmp_path / "part", key_map=back, strict=False)
        before = contents(folder)
        told = r"found no values: load_weights\(\) allocated parameter '.*bias'.*and nothing has written it since"
        for work in (
            lambda: save_weights(model, folder),
            lambda: dict(fullshard.weights.iter_full(model)),
            lambda: fullshard.weights.EMA(model, 0.9),
        ):
            with pytest.raises(ValueError, match=told):
                work()
        assert contents(folder) == before
        load_weights(model, folder)
        save_weights(model, folder)
        assert contents(folder) == before
    finally:
        if way == "sharded":
            torch.distributed.destroy_process_group()


def test_a_load_that_broke_off_leaves_nothing_to_save(tmp_path: Path) -> None:
    """Of a model without units half of the weights were new, and were saved as if all were well."""
    save_weights(uniform(1.0), tmp_path / "good")
    model = uniform(2.0)
    with (
        mock.patch.object(transfer, "_read_into", side_effect=BadFile("injected")),
        pytest.raises(ValueError, match="injected"),
    ):
        load_weights(model, tmp_path / "good")
    told = r"found no values: load_weights\(\) failed and left half written: parameter .* since. Load or initialize"
    with pytest.raises(ValueError, match=told):
        save_weights(model, tmp_path / "saved")
    load_weights(model, tmp_path / "good")
    save_weights(model, tmp_path / "saved")
    assert contents(tmp_path / "saved") == contents(tmp_path / "good")


def test_a_load_that_broke_off_leaves_what_it_was_not_to_load(tmp_path: Path) -> None:
    """Adapters that no checkpoint has were NaN after a load of the base model that failed."""
    save_weights(uniform(1.0), tmp_path / "base", key_map=[Drop("bias")])
    model = uniform(2.0)
    with (
        mock.patch.object(transfer, "_read_into", side_effect=BadFile("injected")),
        pytest.raises(ValueError, match="injected"),
    ):
        load_weights(model, tmp_path / "base", missing=["bias"])
    for name, parameter in model.named_parameters():
        assert bool((parameter == 2.0).all()) if "bias" in name else bool(parameter.isnan().all()), name
    load_weights(model, tmp_path / "base", missing=["bias"])
    assert values_of(model) == {1.0, 2.0}


def test_steps_that_cannot_be_removed_are_warned_of_behind_a_save(tmp_path: Path) -> None:
    """The save raised, although the step was in place."""
    run = tmp_path / "run"
    save_weights(uniform(0.0), run, step=0)
    denied = PermissionError(13, "Permission denied", str(run / "step-0"))
    with (
        mock.patch.object(Steps, "_prune", side_effect=denied),
        pytest.warns(UserWarning, match="is saved, but steps that keep=1"),
    ):
        done = save_weights(uniform(1.0), run, step=1, keep=1)
    assert done.files and os.readlink(run / "latest") == "step-1"


def test_a_pipe_is_no_file_of_a_checkpoint(tmp_path: Path) -> None:
    """It was waited for, for ever."""
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors is not a regular file"):
        load_weights(Net(), tmp_path)


def test_further_files_are_no_weights_and_have_contents(tmp_path: Path) -> None:
    def overwrites(folder: Path) -> None:
        (folder / "new").write_text("")
        os.replace(folder / "new", folder / "model.safetensors")

    for extra, told in (
        ({"config.json": 3}, r"extra\['config.json'\] must be text, bytes or the pathlib.Path of a file, got a int"),
        ({3: "text"}, "extra cannot contain 3: expected the plain name of a file"),
        (overwrites, "extra wrote 'model.safetensors', a name that is reserved for the model's weights"),
    ):
        with pytest.raises(ValueError, match=told):
            save_weights(uniform(1.0), tmp_path / "run", extra=extra)  # type: ignore[arg-type]
        assert not list(tmp_path.iterdir())


def test_adapters_alone_are_saved_beside_the_weights_and_other_weights_are_named(tmp_path: Path) -> None:
    class Adapted(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.lora_a, self.lora_b = nn.Parameter(torch.ones(2, 4)), nn.Parameter(torch.zeros(4, 2))

    model, folder = Adapted(), tmp_path / "both"
    save_weights(model, folder, key_map=[Drop("lora_")])
    (folder / "pytorch_model.bin").write_bytes(b"old")
    (folder / "optimizer.bin").write_bytes(b"state")
    before = contents(folder)
    saved = save_weights(model, folder, key_map=[Keep("lora_")], filename="adapter_model.safetensors", max_shard_bytes=32)
    names = {f"adapter_model-0000{n}-of-00002.safetensors" for n in (1, 2)}
    assert set(saved.files) == names and sorted(saved.others) == ["model.safetensors", "pytorch_model.bin"]
    assert set(contents(folder)) == {*before, *names, "adapter_model.safetensors.index.json"}
    assert {name: data for name, data in contents(folder).items() if name in before} == before, "others' files are as they were"
    index = json.loads((folder / "adapter_model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == {"lora_a", "lora_b"} and set(index["weight_map"].values()) == names
    again = save_weights(model, folder, key_map=[Keep("lora_")], filename="adapter_model.safetensors")
    assert again.files == ("adapter_model.safetensors",) and not names & set(contents(folder)), "the old ones are replaced"
    with torch.no_grad():
        model.lora_a.fill_(7.0)
    loaded = load_weights(model, folder / "adapter_model.safetensors", missing=["^(weight|bias)$"])
    assert loaded.missing == ("weight", "bias") and bool((model.lora_a == 1).all())
    for name in ("adapter.bin", "a/b.safetensors", "", 5):
        with pytest.raises(ValueError, match="filename must be a name that ends in .safetensors"):
            save_weights(model, folder, filename=name)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="Keep.*'lorra_'.* matches no tensor"):
        save_weights(model, folder, key_map=[Keep("lorra_")])
