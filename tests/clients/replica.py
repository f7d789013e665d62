"""One rank of a replica group of torchft, and the groups as a test sees them: it starts, kills and replays them."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from harness import forks
from torch import Tensor, nn

RANKS = 2  # of each group


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.rare = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, rare: bool) -> Tensor:
        y = self.b(torch.tanh(self.a(x)))
        return x + (y * self.rare if rare else y)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList([Block(8) for _ in range(3)])
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor, skipped: Sequence[int] = (), rare: bool = True) -> Tensor:
        x = self.first(x)
        for at, block in enumerate(self.blocks):
            if at not in skipped:
                x = block(x, rare)
        return self.last(x)


def loss(model: nn.Module, spec: dict[str, Any], step: int, group: int, rank: int, micro: int) -> Tensor:
    """The loss of one microbatch, which depends on nothing else."""
    chance = torch.Generator().manual_seed(100_000 * step + 1_000 * group + 100 * rank + micro)
    x, y = torch.randn(6, 4, generator=chance), torch.randn(6, 3, generator=chance)
    out = model(x, spec.get("skipped", {}).get(str(group), ()), group in spec.get("rare", [0, 1, 2]))
    return (out - y).square().mean() / spec.get("micros", 1)


def digest(tensors: Sequence[Tensor]) -> str:
    found = hashlib.sha256()
    for one in tensors:
        local = one.to_local() if hasattr(one, "to_local") else one
        found.update(local.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if local.numel() else b"")
    return found.hexdigest()[:16]


def states_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[Tensor]:
    return [value for p in model.parameters() for _, value in sorted(optimizer.state[p].items())]


# --- a rank ---


def run(environment: dict[str, str], spec: dict[str, Any], log: str) -> None:
    """What the process of a rank does."""
    os.environ.update(environment)
    descriptor = os.open(f"{log}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    torch.set_num_threads(1)
    with open(log, "a", buffering=1) as file:
        say = lambda kind, **what: file.write(json.dumps({"kind": kind, "time": time.time(), **what}) + "\n")
        try:
            train(spec, int(environment["GROUP"]), int(environment["RANK"]), int(environment["LIFE"]), Path(log).parent, say)
        except BaseException as failure:
            chain: list[str] = []
            one: BaseException | None = failure
            while one is not None:
                chain.append(f"{type(one).__name__}: {one}")
                one = one.__cause__
            say("raised", chain=chain, where=traceback.format_exc()[-2000:])
            file.flush()
            os._exit(3)
    sys.stdout.flush()
    os._exit(0)


def train(spec: dict[str, Any], group: int, rank: int, life: int, folder: Path, say: Callable[..., Any]) -> None:
    import torch.distributed as dist
    import torchft

    import fullshard

    def die(where: str, step: int) -> None:
        told = spec.get("die")
        if (
            told
            and life == 0
            and (told["group"], told["where"], told["step"]) == (group, where, step)
            and rank in told["ranks"]
        ):
            say("died")
            os.kill(os.getpid(), signal.SIGKILL)

    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    mesh = dist.init_device_mesh("cpu", (RANKS,))
    torch.manual_seed(group if spec.get("seeds") else 0)
    model: Any = Net()
    options: dict[str, Any] = {"states": getattr(fullshard, spec.get("level", "ZERO3"))}
    if "timeout" in spec:
        options["check_policy"] = fullshard.CheckPolicy(timeout=spec["timeout"])
    for module in (*model.blocks, model):
        fullshard.fully_shard(module, mesh=mesh, **options)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    limit = timedelta(seconds=10)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=limit),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=spec.get("least", 1),
        replica_id=f"group{group}",
        init_sync=bool(spec.get("seeds")),
        timeout=limit,
    )
    average, chance, notes = fullshard.EMA(model, 0.9), torch.Generator().manual_seed(group), {"group": group}
    also = {"average": average, "chance": chance, "notes": notes}
    optimizer = fullshard.replicas.attach(model, inner, manager, also=also)
    say("ready")
    while not (folder / "go").exists():
        time.sleep(0.01)
    attempts = 0
    while manager.current_step() < spec["steps"] and attempts < spec.get("attempts", 10_000):
        step = manager.current_step()
        if spec.get("slow") == [group, step]:
            time.sleep(4.0)
        die("start", step)
        optimizer.zero_grad()
        for micro in range(micros := spec.get("micros", 1)):
            if spec.get("defers"):
                model.set_requires_all_reduce(micro == micros - 1)
            value = loss(model, spec, step, group, rank, micro)
            die("forward", step)
            value.backward()
        die("backward", step)
        if spec.get("refused") == [group, step] and attempts == step:
            manager.report_error(RuntimeError("refused by the test"))
        attempts += 1
        manager.wait_quorum()
        before = manager.current_step()  # of a group that returns, it jumps
        optimizer.step()
        error, now = manager.errored(), manager.current_step()
        committed = now == before + 1
        if committed:
            average.update()
        say(
            "step",
            now=now,
            committed=committed,
            takes_part=manager.is_participating(),
            groups=manager.num_participants(),
            bits=[digest(list(model.parameters())), digest(states_of(inner, model))],
            also=[
                digest([*average.state_dict()["averages"].values()]),
                torch.randint(1 << 30, (1,), generator=chance).item(),
                notes["group"],
            ],
            error=None if error is None else str(error.original_exception),
        )
        die("after", step)
        time.sleep(spec.get("pause", 0.0))
    say("end")
    manager.shutdown(wait=False)
    time.sleep(0.5)


# --- the groups ---


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Groups:
    """Groups of two ranks, and a lighthouse."""

    def __init__(self, folder: Path, spec: dict[str, Any], count: int = 2) -> None:
        from torchft.coordination import LighthouseServer

        self.folder, self.spec, self.count, self._context = folder, spec, count, forks()
        self._lighthouse = LighthouseServer(
            bind="[::]:0",
            min_replicas=spec.get("least", 1),
            join_timeout_ms=10_000,  # groups that start together begin together
            heartbeat_timeout_ms=2_000,
            quorum_tick_ms=50,
        )
        self.processes: dict[int, list[Any]] = {}
        self.lives: dict[int, int] = {}

    def start(self, group: int) -> None:
        self.lives[group] = self.lives.get(group, -1) + 1
        environment = {
            "GROUP": str(group),
            "LIFE": str(self.lives[group]),
            "WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "TORCHFT_LIGHTHOUSE": self._lighthouse.address(),
        }
        self.processes[group] = []
        for rank in range(RANKS):
            arguments = {**environment, "RANK": str(rank)}, self.spec, str(self.folder / f"{group}.{rank}")
            process = self._context.Process(target=run, args=arguments, daemon=True)
            process.start()
            self.processes[group].append(process)

    def kill(self, group: int) -> None:
        for process in self.processes[group]:
            process.kill()

    def log(self, group: int, rank: int = 0, kind: str = "step") -> list[dict[str, Any]]:
        path = self.folder / f"{group}.{rank}"
        lines = path.read_text().splitlines() if path.exists() else []
        return [one for one in map(json.loads, lines) if one["kind"] == kind]

    def wait(self, what: Callable[[], bool], seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < end, self.told()
            time.sleep(0.05)

    def ended(self, group: int) -> bool:
        return not any(process.is_alive() for process in self.processes[group])

    def finish(self, seconds: float = 60.0) -> None:
        self.wait(lambda: all(map(self.ended, self.processes)), seconds)

    def told(self) -> str:
        """What the ranks said last, for a failure."""
        return "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in sorted(self.folder.iterdir()) if path.suffix)

    def close(self) -> None:
        for group in self.processes:
            self.kill(group)
            for process in self.processes[group]:
                process.join()
        self._lighthouse.shutdown()

    # --- what must hold ---

    def committed(self) -> Iterator[tuple[int, int, dict[int, dict[str, Any]]]]:
        """Yield (step, rank, entry by group) of each step that was committed."""
        found: dict[tuple[int, int], dict[int, dict[str, Any]]] = {}
        for group in range(self.count):
            for rank in range(RANKS):
                for one in self.log(group, rank):
                    if one["committed"]:
                        found.setdefault((one["now"] - 1, rank), {})[group] = one
        for (step, rank), entries in sorted(found.items()):
            yield step, rank, entries

    def check_equal(self) -> int:
        """Check that groups have equal bits after each step. Return the number of pairs."""
        pairs = 0
        for step, rank, entries in self.committed():
            assert len({str(one["bits"]) for one in entries.values()}) == 1, (step, rank, entries)
            pairs += len(entries) - 1
        return pairs

    def check_replay(self) -> int:
        """Check each step against one process with the whole model. Return the number of comparisons."""
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        parameters, compared = list(model.parameters()), 0
        for step, rank, entries in self.committed():
            if rank == 0:
                groups = [group for group, one in entries.items() if one["takes_part"]]
                assert {one["groups"] for one in entries.values()} == {len(groups)}, (step, entries)
                sums = [self._mean(model, step, group) for group in groups]
                for parameter, *grads in zip(parameters, *sums):
                    total = grads[0]
                    for grad in grads[1:]:
                        total = total + grad
                    parameter.grad = total / len(groups)
                optimizer.step()
            tensors = parameters, states_of(optimizer, model)
            bits = [digest([_rows(one, rank) for one in several]) for several in tensors]
            for group, one in entries.items():
                assert one["bits"] == bits, (step, rank, group)
                compared += 1
        return compared

    def _mean(self, model: nn.Module, step: int, group: int) -> list[Tensor]:
        """The gradients of a group, summed as its ranks sum them."""
        found: list[Tensor] | None = None
        for micro in range(self.spec.get("micros", 1)):
            of_ranks: list[list[Tensor]] = []
            for rank in range(RANKS):
                model.zero_grad()
                loss(model, self.spec, step, group, rank, micro).backward()
                of_ranks.append([torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()])
            both = [(one + other) / RANKS for one, other in zip(*of_ranks)]
            found = both if found is None else [one + other for one, other in zip(found, both)]
        assert found is not None
        return found


def _rows(tensor: Tensor, rank: int) -> Tensor:
    if not tensor.dim():
        return tensor
    parts = tensor.chunk(RANKS)
    return parts[rank] if rank < len(parts) else tensor[:0]


@contextmanager
def groups(folder: Path, count: int = 2, **spec: Any) -> Iterator[Groups]:
    """Groups that train, as a test wants them. They are ended in any case."""
    found = Groups(folder, spec, count)
    try:
        for group in range(count):
            found.start(group)
        found.wait(lambda: all(found.log(group, rank, "ready") for group in range(count) for rank in range(RANKS)))
        (folder / "go").touch()  # all are known to the lighthouse, so the first quorum has all
        yield found
    finally:
        found.close()
