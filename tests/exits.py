"""Jobs whose ranks live and end as those of a launcher do: each is one process, which an ending befalls at a place.

    def body(rank):                # in a test module; runs in every process of the job
        rank.begin()               # init_process_group
        ...
        rank.event()               # from now on seconds count
        ...

    job = run_job(body, 3)
    assert job[0].raised and job[0].seconds < soon(2.0)

A server that has imported torch forks the processes, which takes 20 ms instead of seconds; each runs through all of Python's
end, unless it is made to end otherwise, or `ends_fast`. What ranks say is a line of JSON in a file each, what they print goes to
another.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import itertools
import json
import os
import queue
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

START = 150.0  # seconds until the event of a job, at most: the machine may be busy
TESTS = str(Path(__file__).parent)
ROOMS = [TESTS, *sorted(str(path) for path in Path(TESTS).iterdir() if path.is_dir())]  # of which ranks import bodies
STACKS = signal.SIGUSR2  # has a rank print its stacks


def soon(seconds: float) -> float:
    """So many seconds on an idle machine; up to three times as many on a busy one."""
    return seconds * min(3.0, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))


_PORTS = itertools.count(os.getpid() * 997)  # processes that run tests side by side begin far from each other


def free_port() -> int:
    """One below those that the system gives to connections, which might take it until it is used."""
    for port in _PORTS:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", 20_000 + port % 12_000))
            return int(probe.getsockname()[1])
    raise AssertionError("there is always a next one")


# --- in the process of a rank ---


class Rank:
    """What a body gets. store: "tcp" (rank 0 has the store), "agent" (another process has it, as under torchrun), "file"."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.rank, self.size = int(order["rank"]), int(order["size"])
        self.folder, self.store, self.port = Path(order["folder"]), str(order["store"]), int(order["port"])
        self._file = os.open(self.folder / f"rank{self.rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def say(self, what: str, **facts: Any) -> None:
        line = {"what": what, "at": time.monotonic(), **facts}
        os.write(self._file, (json.dumps(line) + "\n").encode())

    def event(self) -> None:
        """Seconds count from the first one of any rank."""
        self.say("event")

    def raised(self, failure: BaseException) -> None:
        self.say("raised", text=f"{type(failure).__name__}: {failure}")

    def begin(self, seconds: float = 60.0, port: int | None = None, backend: str = "gloo") -> None:
        """Make the default process group. seconds: until whatever waits in torch gives up."""
        from datetime import timedelta

        import torch.distributed as dist

        port, where = port or self.port, f"file://{self.folder}/store"
        if self.store == "agent":
            agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
            os.environ.update(agent, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            where = "env://"
        elif self.store == "tcp":
            where = f"tcp://127.0.0.1:{port}"
        limit = timedelta(seconds=seconds)
        dist.init_process_group(backend, init_method=where, rank=self.rank, world_size=self.size, timeout=limit)

    def mesh(self) -> Any:
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh("cpu", (self.size,))


def host(rank: Rank) -> None:
    """Has the store of a job, as the agent of torchrun does."""
    from torch.distributed import TCPStore

    _KEPT.append(TCPStore("127.0.0.1", rank.port, is_master=True, wait_for_workers=False))
    time.sleep(600)


_KEPT: list[Any] = []


def children(pid: int) -> list[int]:
    """Processes that a process began; none where there is no /proc."""
    found: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = stat.read_text().rpartition(")")[2].split()[1]
            found += [int(stat.parent.name)] if int(parent) == pid else []
    return found


def _abort_children() -> None:
    """Have processes that this one began print where they are, and end."""
    for pid in children(os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGABRT)


def _program(
    rank: Rank, cwd: str, kind: str, program: str, arguments: list[str], environment: dict[str, str], patience: float
) -> None:
    """What `python` does with a module, a file or code, in a process that knows no tests.

    patience: seconds until the processes that it began are aborted; 0 for never.
    """
    if patience:
        timer = threading.Timer(patience, _abort_children)
        timer.daemon = True
        timer.start()
    os.environ.update(environment)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(rank.folder / name, os.O_WRONLY | os.O_CREAT), number)
    for name, module in list(sys.modules.items()):
        if name != "__main__" and str(getattr(module, "__file__", None)).startswith(TESTS):
            del sys.modules[name]
    os.chdir(cwd)
    sys.path[:] = [cwd, *(path for path in sys.path if path not in ROOMS)]
    sys.argv = [program if kind != "code" else "-c", *arguments]
    if kind == "module":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    elif kind == "file":
        sys.path[0] = str(Path(program).parent)
        runpy.run_path(program, run_name="__main__")
    else:
        exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})


def _serve() -> dict[str, Any]:
    """Fork a process for each line of stdin, and say on stdout how each ended. Returns in those processes, with the line."""
    for name in ("torch.distributed.tensor", "torch.distributed.checkpoint", "fullshard", "exits", "models"):
        importlib.import_module(name)
    import torch
    import torch._dynamo  # DTensor imports it when it is first used, which takes half a second

    os.fsync = os.fstat  # type: ignore[assignment]  # which refuses what is closed, too, and waits for no disk
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)]).step()  # the first one of a process takes 0.1 s
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "triton" not in sys.modules:  # which prints what of it is not collected when a process ends
        gc.freeze()  # what is imported here no process need look at, nor copy, when it collects garbage
    running: set[int] = set()
    pending = b""

    def tell(**facts: Any) -> None:
        os.write(1, (json.dumps(facts) + "\n").encode())

    while True:
        if select.select([0], [], [], 0.03)[0]:
            chunk = os.read(0, 65536)
            if not chunk:
                for pid in running:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                sys.exit(0)
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                order = json.loads(line)
                importlib.import_module(order["module"])
                pid = os.fork()
                if pid == 0:
                    return dict(order)
                running.add(pid)
                tell(key=order["key"], pid=pid)
        while running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            running.discard(pid)
            tell(pid=pid, code=os.waitstatus_to_exitcode(status), at=time.monotonic())


def _run(order: dict[str, Any]) -> None:
    """The life of one rank."""
    folder, name = Path(order["folder"]), f"rank{order['rank']}.out"
    out = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(out, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    faulthandler.enable(all_threads=True)
    faulthandler.register(STACKS, all_threads=True)
    import torch

    torch.set_num_threads(1)
    rank, code = Rank(order), 0
    try:
        getattr(importlib.import_module(order["module"]), order["body"])(rank, **order["options"])
        rank.say("done")
    except BaseException as failure:
        rank.raised(failure)
        if not order["ends_fast"]:
            raise
        code = _code(failure)
    if order["ends_fast"]:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as Python does
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(code)


def _code(failure: BaseException) -> int:
    """The exit code of a process that ends with this, which is printed as Python does."""
    if not isinstance(failure, SystemExit):
        traceback.print_exception(failure)
        return 1
    return failure.code if isinstance(failure.code, int) else int(failure.code is not None)


# --- in the process of a test ---


class Server:
    """The process that forks. Many threads may order."""

    def __init__(self) -> None:
        path = os.pathsep.join(filter(None, [*ROOMS, os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": ""}
        del environment["GLOO_SOCKET_IFNAME"]
        command = [sys.executable, "-u", str(Path(__file__).resolve()), "serve"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, start_new_session=True)
        self._lock = threading.Lock()
        self._keys = itertools.count()
        self._begun: dict[int, queue.Queue[int]] = {}
        self.ended: dict[int, tuple[int, float]] = {}  # by process: exit code, and when
        threading.Thread(target=self._listen, daemon=True).start()
        atexit.register(self.close)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said = json.loads(line)
            if "key" in said:
                self._begun.pop(said["key"]).put(said["pid"])
            else:
                self.ended[said["pid"]] = said["code"], said["at"]

    def start(self, order: dict[str, Any]) -> int:
        """The new process."""
        answer: queue.Queue[int] = queue.Queue()
        with self._lock:
            key = next(self._keys)
            self._begun[key] = answer
            assert self._process.stdin is not None
            self._process.stdin.write((json.dumps({**order, "key": key}) + "\n").encode())
            self._process.stdin.flush()
        return answer.get(timeout=START)

    def kill(self, pid: int, number: int) -> None:
        """Send a signal to a process that has not ended, as far as is known."""
        if pid not in self.ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def close(self) -> None:
        if self._process.poll() is None:
            assert self._process.stdin is not None
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5.0)


_SERVER: list[Server] = []
_STARTING = threading.Lock()


def server() -> Server:
    with _STARTING:
        if not _SERVER:
            _SERVER.append(Server())
        return _SERVER[0]


@dataclass
class Outcome:
    """How one rank fared. Seconds are from the event of the job on."""

    rank: int
    code: int | None = None  # None: it had to be killed
    ended: float | None = None
    said: list[dict[str, Any]] = field(default_factory=list)
    out: str = ""
    event: float | None = None

    def first(self, what: str) -> dict[str, Any] | None:
        return next((line for line in self.said if line["what"] == what), None)

    @property
    def raised(self) -> str:
        """What it raised first, with the type in front; empty if nothing."""
        line = self.first("raised")
        return "" if line is None else str(line["text"])

    @property
    def seconds(self) -> float:
        """Until it raised, or, if it did not, until it ended; without end if it did neither."""
        line = self.first("raised") or self.first("done")
        if line is not None and self.event is not None:
            return float(line["at"]) - self.event
        return float("inf") if self.ended is None else self.ended

    def __str__(self) -> str:
        said = "\n".join(f"  {line['what']} {line}" for line in self.said)
        return f"--- rank {self.rank}: exit code {self.code}, ended after {self.ended}\n{said}\n{self.out[-6000:]}"


class Job(list[Outcome]):
    """By rank."""

    def __str__(self) -> str:
        return "\n".join(map(str, self))


def command_line(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run `python -m fullshard` with these arguments in a folder, without the seconds in which Python imports torch."""
    return _ran("module", "fullshard", arguments, cwd)


def script(program: str | Path, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a file, or code as `python -c` does, with these arguments, without the seconds in which Python imports torch."""
    return _ran("file" if isinstance(program, Path) else "code", str(program), arguments, cwd or Path.cwd())


def torchrun(*arguments: str, seconds: float = 120.0) -> subprocess.CompletedProcess[str]:
    """Run the launcher, which starts new processes; those that do not end within these seconds say where they are."""
    environment = {"PYTHONPATH": os.environ.get("PYTHONPATH", ""), "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    return _ran("module", "torch.distributed.run", arguments, Path.cwd(), environment, patience=seconds)


def _ran(
    kind: str,
    program: str,
    arguments: Sequence[str],
    cwd: Path,
    environment: dict[str, str] | None = None,
    patience: float = 0.0,
) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory(prefix="fullshard-command") as folder:
        facts = {"cwd": str(cwd), "kind": kind, "program": program, "arguments": list(arguments)}
        facts |= {"environment": environment or {}, "patience": patience}
        limit = 120.0 if not patience else patience + 60.0
        (job,) = run_job(_program, 1, module="exits", folder=Path(folder), ends_fast=True, limit=limit, **facts)
        out, err = (Path(folder, name).read_text() for name in ("stdout", "stderr"))
    assert job.code is not None, f"it did not end\n{out}\n{err}"
    return subprocess.CompletedProcess(arguments, job.code, out, err)


def _said(folder: Path, rank: int) -> list[dict[str, Any]]:
    path = folder / f"rank{rank}.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def run_job(
    body: Callable[..., None],
    size: int,
    *,
    limit: float = 30.0,
    store: str = "tcp",
    lives: Sequence[int] = (),
    folder: Path | None = None,
    module: str | None = None,
    ends_fast: bool = False,
    **options: Any,
) -> Job:
    """Run `body(rank, **options)` in `size` processes until they ended, or `limit` seconds after the event.

    store: as in `Rank`. lives: ranks that may live on, and are killed once the others ended. ends_fast: whether ranks that come to
    their end call what was registered with `atexit` and no more. Python frees all of torch then, which takes 0.3 s each.
    """
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="fullshard-exits", ignore_cleanup_errors=True) as own:
            facts: dict[str, Any] = {"store": store, "lives": lives, "module": module, "ends_fast": ends_fast}
            return run_job(body, size, limit=limit, folder=Path(own), **facts, **options)
    module = (body.__module__ if module is None else module).removeprefix("tests.")
    port, forks = free_port(), server()
    order = {"size": size, "folder": str(folder), "store": store, "port": port, "options": options, "ends_fast": ends_fast}
    agent = None
    if store == "agent":
        agent = forks.start({**order, "module": "exits", "body": "host", "rank": size, "options": {}})
    pids = [forks.start({**order, "module": module, "body": body.__name__, "rank": rank}) for rank in range(size)]
    awaited = [pid for rank, pid in enumerate(pids) if rank not in lives]
    start, event = time.monotonic(), None
    try:
        while any(pid not in forks.ended for pid in awaited):
            event = _event(folder, size) if event is None else event
            late = start + START if event is None else event + limit
            if time.monotonic() > late or (event is None and all(pid in forks.ended for pid in pids)):
                for pid in pids:
                    forks.kill(pid, signal.SIGCONT)
                    forks.kill(pid, STACKS)
                time.sleep(1.0)
                break
            time.sleep(0.05)
    finally:
        killed = [pid for pid in [*pids, *([] if agent is None else [agent])] if pid not in forks.ended]
        for pid in killed:
            forks.kill(pid, signal.SIGKILL)
        end = time.monotonic() + 10.0
        while time.monotonic() < end and any(pid not in forks.ended for pid in killed):
            time.sleep(0.03)
    event = _event(folder, size)
    job = Job()
    for rank, pid in enumerate(pids):
        code, at = (None, None) if pid in killed else forks.ended[pid]
        out = (folder / f"rank{rank}.out").read_text(errors="replace") if (folder / f"rank{rank}.out").exists() else ""
        ended = None if at is None or event is None else at - event
        job.append(Outcome(rank, code, ended, _said(folder, rank), out, event))
    return job


def _event(folder: Path, size: int) -> float | None:
    times = [line["at"] for rank in range(size) for line in _said(folder, rank) if line["what"] == "event"]
    return min(times, default=None)


def meet(ending: str, seconds: float = 20.0) -> None:
    """Have this process meet an ending: one of `ENDINGS`, or "live on", which sleeps."""
    ENDINGS[ending](seconds)


def _stop(seconds: float) -> None:
    """Stop for a while: a shell wakes this process."""
    subprocess.Popen(["sh", "-c", f"sleep {seconds:g}; kill -CONT {os.getpid()}"], stdout=subprocess.DEVNULL)
    os.kill(os.getpid(), signal.SIGSTOP)


def _die(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.5)  # until the interpreter, or the kernel, has seen it


def _fail() -> NoReturn:
    raise RuntimeError("bad batch")


ENDINGS: dict[str, Callable[[float], object]] = {
    "raise": lambda seconds: _fail(),
    "sys.exit": lambda seconds: sys.exit(3),
    "os._exit": lambda seconds: os._exit(4),
    "SIGKILL": lambda seconds: _die(signal.SIGKILL),
    "SIGTERM": lambda seconds: _die(signal.SIGTERM),
    "SIGINT": lambda seconds: _die(signal.SIGINT),
    "SIGSTOP": _stop,
    "live on": time.sleep,
    "slow": time.sleep,
}


def together(jobs: Sequence[Callable[[], Job]], at_once: int = 3) -> Iterator[Job]:
    """Run jobs side by side; their outcomes in order."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(at_once) as pool:
        yield from [future.result() for future in [pool.submit(job) for job in jobs]]


if __name__ == "__main__":
    _run(_serve())
