"""Makes `harness`, `models` and the files of benchmarks/ importable, keeps the parent process out of the ranks' way, and
deals tests to lanes."""

import contextlib
import importlib
import os
import shutil
import sys
import tempfile
import threading
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from fullshard import errors

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

import harness  # noqa: E402
import rotation  # noqa: E402

sys.path += harness.ROOMS  # some tests are built of what others have beside them
torch.set_num_threads(1)
os.fsync = os.fstat  # type: ignore[assignment]  # which refuses what is closed, too, and waits for no disk
# Ranks are woken by messages. With the usual scheduler of Linux one that is woken takes the processor from the one that woke it,
# which holds a lock of gloo's at that moment, for which gloo's thread then spins: with more ranks than processors, steps of small
# models take three times as long. Processes that this one begins inherit it.
if hasattr(os, "SCHED_BATCH"):
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
settings.register_profile("fullshard", deadline=None)  # a busy machine is no failure
settings.load_profile("fullshard")

# Files of which most is waiting for what a failure brings about. By seconds that one of their tests takes with all cases, most first.
WAITING = (
    "test_random_faults.py",
    "test_killed_saves.py",
    "test_exits.py",
    "test_hangs.py",
    "test_never_silent.py",
    "test_killed.py",
    "test_background_save.py",
    "test_wrapping_failures.py",
    "test_threads.py",
    "test_interrupts.py",
)
# Other files that take long, which begin first, so that no lane ends with one.
LONG = (
    "test_pipelining.py",
    "test_weights_memory.py",
    "test_races.py",
    "test_planted.py",
    "test_train_lm.py",
    "test_compile.py",
    "test_parity.py",
    "test_rooms.py",
    "test_programs.py",
    "test_fsdp1_wrapper.py",
    "test_lanes.py",
    "test_meshes.py",
    "test_join.py",
)
# Files whose tests go to lanes one by one: with all cases each of these takes minutes.
APART = (
    *("test_killed_saves.py", "test_exits.py", "test_random_faults.py", "test_races.py", "test_planted.py"),
    "test_pipelining.py",
    "test_rooms.py",
)


FOLDER = pytest.StashKey[Path]()
BUILDING = pytest.StashKey[threading.Thread]()


def pytest_configure(config: pytest.Config) -> None:
    """Give the run a temporary folder of its own, which the processes that it starts inherit."""
    if hasattr(config, "workerinput"):
        return  # a lane has the folder of the run
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(ROOT / "build" / "inductor"))  # compiled code is for the next run, too
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")  # without vectors, of which no claim tells, g++ takes half as long
    folder = tempfile.mkdtemp(prefix="fullshard-tests")
    config.stash[FOLDER] = Path(folder)
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    # Behind multiprocessing's own folder, which goes at -100. Launchers of ranks leave theirs, and pytest those of three runs.
    Finalize(None, shutil.rmtree, (folder, True), exitpriority=-200)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Fail if the tests or the library left a file of theirs in the temporary folder of the run."""
    if (building := config.stash.get(BUILDING, None)) is not None:
        building.join()  # leaves no compiler behind
    if (folder := config.stash.get(FOLDER, None)) is not None:
        harness.close_pools()
        left = sorted(path.name for path in folder.glob("fullshard*"))
        assert not left, f"Expected no file of ours at the end of a run, got {left}. Remove each where it is made."


@pytest.fixture(autouse=True)
def _warned_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is warned of once per process is warned of once per test: none depends on those before it."""
    monkeypatch.setattr(errors, "_SAID", set())


def pytest_runtest_teardown() -> None:
    """Spare the processors ranks that have nothing to do."""
    harness.close_idle_pools()


LONGEST = ("test_a_part_of_the_matrix_of_endings_and_places",)  # tests that take longest of all


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose the cases of this part, and begin with what takes longest."""
    cases: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("rotates"):
            cases.setdefault((item.path, getattr(item, "originalname", item.name)), []).append(item)
    chosen = {item for some in cases.values() for item in rotation.share(some, *some[0].get_closest_marker("rotates").args)}  # type: ignore[union-attr]
    left = [item for item in items if item.get_closest_marker("rotates") and item not in chosen]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in left]
    order = {name: index for index, name in enumerate((*WAITING, *LONG))}
    items.sort(key=lambda item: (item.name not in LONGEST, order.get(item.path.name, len(order))))
    if torch.version.cuda and not torch.cuda.is_available() and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12):
        crash = pytest.mark.skip(
            reason="without a GPU, CUDA builds of torch 2.11 crash in FakeTensorMode beside threads or streams"
        )
        for item in items:
            if item.path.parent.name == "races" or item.path.name == "test_threads.py":
                item.add_marker(crash)
    first = getattr(config, "workerinput", {}).get("workerid", "gw0") == "gw0"
    if first and not config.option.collectonly and any(item.path.parent.name == "device" for item in items):
        _build_device(config)


def _build_device(config: pytest.Config) -> None:
    """Build the asynchronous device while other tests run. Those that need it wait for it, and say what the compiler said."""
    import simulated

    if simulated.compiler() is None or simulated.library().exists():
        return
    importlib.import_module("torch.utils.cpp_extension")  # now: a thread should import nothing beside tests that do

    def build() -> None:
        with contextlib.suppress(RuntimeError):
            simulated.build()

    config.stash[BUILDING] = threading.Thread(target=build)
    config.stash[BUILDING].start()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Deal files to lanes, in the order of above: up to half of the lanes begin with those that wait, the others with those that work.

    Two lanes keep two processors busy, for most tests have several ranks; with three, messages cost more than waiting did.
    """
    from xdist.scheduler import LoadScopeScheduling

    if config.getvalue("dist") != "loadfile":
        return None  # xdist's own

    class Lanes(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return nodeid if file.endswith(APART) else file

        def _assign_work_unit(self, node: Any) -> None:
            waits = self.nodes.index(node) < self.numnodes // 2
            fitting = (unit for unit in self.workqueue if unit.partition("::")[0].endswith(WAITING) is waits)
            self.workqueue.move_to_end(next(fitting, next(iter(self.workqueue))), last=False)
            super()._assign_work_unit(node)

    config.option.loadscopereorder = False  # which begins with the files that have most tests
    return Lanes(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which part of the tests that repeat themselves ran, and how to run it again."""
    terminalreporter.write_line(rotation.header())
