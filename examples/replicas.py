"""Replicas that die and return: groups of two ranks train under torchft, and this program shows who goes on when one is killed.

    python examples/replicas.py                     # kill a process that it names, by hand, and watch
    python examples/replicas.py --kills 20          # it kills a random one every few seconds

It starts a lighthouse and the groups, starts a group anew when one of its ranks is gone, and says at the end whether all groups
had equal weights after each step. On a cluster, the lighthouse is a service of its own, and a scheduler starts the groups.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import socket
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import nn

import fullshard

RANKS = 2  # of each group


def train(environment: dict[str, str], log: Path, steps: int) -> None:
    """Run in the process of a rank."""
    import torchft

    os.environ.update(environment)
    torch.set_num_threads(1)
    with log.with_suffix(".out").open("a") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    group, rank = int(environment["GROUP"]), int(environment["RANK"])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model: Any = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)])
    mesh = dist.init_device_mesh("cpu", (RANKS,))
    for module in (*model, model):
        fullshard.fully_shard(module, mesh=mesh)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    manager = torchft.Manager(
        # Others wait this long for a group that dies between a quorum and its connection.
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=10)),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        replica_id=f"group{group}",
        init_sync=False,
        timeout=timedelta(seconds=30),
    )
    optimizer = fullshard.replicas.attach(model, inner, manager)
    with log.open("a", buffering=1) as file:
        while manager.current_step() < steps:
            chance = torch.Generator().manual_seed(manager.current_step() * 1000 + group * RANKS + rank)
            x = torch.randn(16, 64, generator=chance)
            optimizer.zero_grad()  # asks who takes part in this step
            loss = (model(x) - x.roll(1, 1)).square().mean()
            loss.backward()  # averages over the ranks of the group, then over the groups
            manager.wait_quorum()
            before = manager.current_step()
            optimizer.step()  # if all groups agree
            weights = b"".join(parameter.to_local().detach().numpy().tobytes() for parameter in model.parameters())
            told = {"step": manager.current_step(), "weights": crc32(weights), "loss": loss.item(), "time": time.monotonic()}
            file.write(json.dumps({**told, "lost": manager.current_step() == before, "pid": os.getpid()}) + "\n")
            time.sleep(0.05)
    os._exit(0)  # the others may still be at work


class Group:
    """The processes of a group, as the program that starts them sees them."""

    def __init__(self, number: int, folder: Path, lighthouse: str, steps: int) -> None:
        self.number, self.lives, self.processes, self.started_at, self.ended_at = number, 0, [], 0.0, 0.0
        self._folder, self._lighthouse, self._steps = folder, lighthouse, steps
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "fullshard", "torchft"])

    def start(self) -> None:
        """Start all ranks, at a port of their own."""
        self.lives, self.started_at = self.lives + 1, time.monotonic()
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = str(found.getsockname()[1])
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHFT_LIGHTHOUSE": self._lighthouse}
        own = {**where, "GROUP": str(self.number), "WORLD_SIZE": str(RANKS)}
        self.processes = [
            self._context.Process(target=train, args=({**own, "RANK": str(rank)}, self._log(rank), self._steps), daemon=True)
            for rank in range(RANKS)
        ]
        for process in self.processes:
            process.start()

    def _log(self, rank: int) -> Path:
        return self._folder / f"{self.number}-{rank}.jsonl"

    def steps(self, rank: int = 0) -> list[dict[str, Any]]:
        """Return the entries of a rank, one per step."""
        path = self._log(rank)
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def is_done(self) -> bool:
        """True if all ranks made all steps."""
        return all(process.exitcode == 0 for process in self.processes)

    @property
    def is_training(self) -> bool:
        """True if all ranks live, and made a step since the group was started that was not lost: they have the weights."""
        made = [one for rank in range(RANKS) for one in self.steps(rank)[-1:] if not one["lost"]]
        return (
            len(made) == RANKS
            and all(one["time"] > self.started_at for one in made)
            and all(p.is_alive() for p in self.processes)
        )

    def look(self) -> None:
        """Start the group anew if a rank is gone."""
        if not self.is_done and any(process.exitcode not in (None, 0) for process in self.processes):
            self.ended_at = self.ended_at or time.monotonic()
            if time.monotonic() > self.ended_at + 1.0:
                for process in self.processes:
                    process.kill()
                    process.join()
                self.ended_at = 0.0
                self.start()

    def __str__(self) -> str:
        steps, pids = self.steps(), ", ".join(str(process.pid) for process in self.processes if process.is_alive())
        last = f"step {steps[-1]['step']}, loss {steps[-1]['loss']:.3f}" if steps else "begins"
        lost = sum(one["lost"] for one in steps)
        return (
            f"group {self.number}: {last}, {lost} steps lost, {self.lives - 1} times started anew; processes {pids or 'gone'}"
        )


def main() -> None:
    from torchft.coordination import LighthouseServer

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--groups", type=int, default=2, help="number of replica groups")
    parser.add_argument("--steps", type=int, default=400, help="steps to train")
    parser.add_argument("--kills", type=int, default=0, help="how often to kill a random process")
    parser.add_argument("--seed", type=int, default=0, help="which processes to kill, and when")
    options = parser.parse_args()
    lighthouse = LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=60_000, heartbeat_timeout_ms=2_000, quorum_tick_ms=50
    )
    with tempfile.TemporaryDirectory() as folder:
        every = [Group(number, Path(folder), lighthouse.address(), options.steps) for number in range(options.groups)]
        for group in every:
            group.start()
        chance, kills, due = random.Random(options.seed), options.kills, time.monotonic() + 8.0
        while not all(group.is_done for group in every):
            for group in every:
                group.look()
            training = [group for group in every if group.is_training]
            if kills and time.monotonic() > due and len(training) > 1:  # one must go on, or training begins anew
                victim = chance.choice(chance.choice(training).processes)
                victim.kill()
                kills, due = kills - 1, time.monotonic() + chance.uniform(1.0, 6.0)
            print("\n".join(map(str, every)), flush=True)
            time.sleep(1.0)
            if sys.stdout.isatty():
                print(f"\033[{len(every)}F\033[J", end="")
        made = [
            (one["time"], rank, one) for group in every for rank in range(RANKS) for one in group.steps(rank) if not one["lost"]
        ]
        weights: dict[tuple[int, int, int], set[int]] = {}
        anew = newest = 0
        for _, rank, one in sorted(made, key=lambda entry: entry[0]):
            if one["step"] == 1 and newest > 1:  # all groups were gone: a real job loads a checkpoint
                anew, newest = anew + 1, 1
            newest = max(newest, one["step"])
            weights.setdefault((anew, one["step"], rank), set()).add(one["weights"])
        unequal = [key for key, found in weights.items() if len(found) > 1]
        print("\n".join(map(str, every)))
        equal = f"equal weights in all groups after each of {len(weights) // RANKS} steps, {anew} times begun anew"
        print(f"weights differ after {len(unequal)} steps, first step {unequal[0][1]}" if unequal else equal)
    lighthouse.shutdown()
    sys.exit(bool(unequal))


if __name__ == "__main__":
    main()
