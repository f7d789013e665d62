"""Every ending of a rank at every place of a job: `make chaos`, 15 minutes at most. Prints a table of what held.

    ending    raise, sys.exit, os._exit, SIGKILL, SIGTERM, SIGINT; SIGSTOP and a sleep ("slow") for 10 s
    place     init, wrap, forward, backward, optimizer, save, end; with --optimizer muon or shampoo instead the places of a step
              by owners: to_owners, owner, results, confirm, written
    victim    rank 0 (which has the store) or 1, of 2, 3 or 4 ranks

For each: no other rank waits longer than 10 s, and its error names the victim and a unit or call; the last checkpoint is
whole, and a job of new processes goes on from it with the losses of a job in which nothing happened. A rank that pauses raises
no alarm: its job ends as if nothing had happened. At `init` nothing of fullshard runs yet, and nothing is asked but that torch's
own timeout holds; in a `save` torch's own collectives raise, without names; a rank that ends after its last step (`end`)
disturbs nobody.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import rotation
from exits import Job, Rank, meet, run_job, server, soon

WHATS = ["raise", "sys.exit", "os._exit", "SIGKILL", "SIGTERM", "SIGINT", "SIGSTOP", "slow"]
SMALL = 8  # jobs of a part: as many as there are endings
PAUSES = ("SIGSTOP", "slow")  # endings that are none
WHERES = ["init", "wrap", "forward", "backward", "optimizer", "save", "end"]
STEPS, EVERY, FAULTY = 5, 2, 2  # steps of a job, those between two checkpoints, and the one in which a rank ends (from 0)
PAUSED = 10.0  # seconds for which a rank stops, or sleeps
STATES = "FULLSHARD_CHAOS_STATES"  # in the environment of ranks: the level of ZeRO; all but ZERO3 have two microbatches
WAITS = 10.0  # seconds that a rank may wait for one that is no more
OPTIMIZER = "FULLSHARD_CHAOS_OPTIMIZER"  # in the environment of ranks: adamw, muon or shampoo
IN_STEP = ["to_owners", "owner", "results", "confirm", "written"]  # places of a step of whole matrices by owners
RENDEZVOUS = 5.0  # seconds until torch gives up an init_process_group()


@dataclass(frozen=True)
class Cell:
    what: str
    where: str
    victim: int
    size: int

    def __str__(self) -> str:
        return f"{self.what} x {self.where}, rank {self.victim} of {self.size}"


# --- the job ---


def train(rank: Rank, what: str, where: str, victim: int) -> None:
    """Train, saving every second step, from the last checkpoint that is there; the victim meets its ending at the place."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from models import Stack, batch, square
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh

    import fullshard
    from fullshard.policies import PRESETS

    met: list[str] = []

    def at(place: str) -> None:
        if (place, rank.rank) == (where, victim) and not met:
            met.append(place)
            rank.event()
            meet(what, PAUSED)

    class Writer(dcp.FileSystemWriter):
        def write_data(self, *arguments: Any) -> Any:
            if step >= FAULTY:
                at("save")
            return super().write_data(*arguments)

    step = 0
    at("init")
    rank.begin(RENDEZVOUS if where == "init" and what not in PAUSES else 60.0)
    torch.manual_seed(0)
    model, mesh = Stack(), rank.mesh()
    states = PRESETS[os.environ.get(STATES, "ZERO3")]
    if states.shards_over_replicas:
        replicas = 2 if rank.size % 2 == 0 else rank.size
        mesh = init_device_mesh("cpu", (replicas, rank.size // replicas), mesh_dim_names=("replicate", "shard"))
    for number, block in enumerate(model.blocks):
        if number == 1:
            at("wrap")
        fullshard.fully_shard(block, mesh=mesh, states=states)
    fullshard.fully_shard(model, mesh=mesh, states=states)
    optimizers = optimizers_of(model, lambda place: at(place) if step == FAULTY else None)
    last = rank.folder.parent / "last"
    begin = int(last.read_text()) if last.exists() else 0
    if begin:
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizers)))
        dcp.load(state, checkpoint_id=last.parent / f"checkpoint-{begin}")
        set_state_dict(model, optimizers, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    model.blocks[1].up.register_forward_pre_hook(lambda *_: at("forward") if step == FAULTY else None)
    model.blocks[1].up.register_full_backward_pre_hook(lambda *_: at("backward") if step == FAULTY else None)
    optimizers[0].register_step_pre_hook(lambda *_: at("optimizer") if step == FAULTY else None)
    for step in range(begin, STEPS):
        for ends_step in (False, True) if states != fullshard.ZERO3 else (True,):
            model.set_is_last_backward(ends_step)
            loss = square(model(batch(step).chunk(rank.size)[rank.rank]))
            loss.backward()
        for optimizer in optimizers:
            before = snapshot(optimizer)
            try:
                optimizer.step()
            except Exception:
                if where in IN_STEP[:-1] and snapshot(optimizer) != before:  # behind "written" it is over
                    rank.say("changed")
                raise
            optimizer.zero_grad()
        rank.say("loss", step=step, loss=loss.item())
        if (step + 1) % EVERY == 0:
            state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizers)))
            dcp.save(state, storage_writer=Writer(last.parent / f"checkpoint-{step + 1}"))
            if rank.rank == 0:
                (last.parent / "last.new").write_text(str(step + 1))
                os.replace(last.parent / "last.new", last)
    at("end")
    dist.destroy_process_group()


def optimizers_of(model: Any, at: Any) -> list[Any]:
    """The optimizers of a job. Those of whole matrices call `at` with each place of their step."""
    import torch
    from optimizers import Shampoo

    import fullshard
    from fullshard import _torch as private
    from fullshard.optim.owner_exchange import OwnerExchange

    kind = os.environ.get(OPTIMIZER, "adamw")
    if kind == "adamw":
        return [torch.optim.AdamW(model.parameters(), lr=1e-2)]
    if kind == "shampoo":
        found = [fullshard.whole_view(Shampoo(model.parameters(), lr=1e-2))]
    else:
        # a bucket for each matrix
        fullshard.plan_owners.__kwdefaults__["bucket_nbytes"] = 1
        choice = fullshard.matrices_of(model)
        found = [torch.optim.Muon(choice.matrices, lr=1e-2), torch.optim.AdamW(choice.rest, lr=1e-2)]

    def before(owner: Any, name: str, place: Any) -> None:
        inner = getattr(owner, name)

        def reached(*arguments: Any, **options: Any) -> Any:
            at(place(*arguments))
            return inner(*arguments, **options)

        setattr(owner, name, reached)

    before(OwnerExchange, "_send", lambda *arguments: "results" if arguments[-1] == "results of owners" else "to_owners")
    before(OwnerExchange, "confirm", lambda *_: "confirm")
    before(*((torch.linalg, "eigh") if kind == "shampoo" else (private, "newton_schulz")), lambda *_: "owner")
    found[0].register_step_post_hook(lambda *_: at("written"))
    return found


def snapshot(optimizer: Any) -> list[Any]:
    """Everything that a step may change, as text and numbers."""
    from torch import Tensor
    from torch.distributed.tensor import DTensor

    def plain(value: Any) -> Any:
        if isinstance(value, DTensor):
            value = value.to_local()
        if isinstance(value, Tensor):
            return value.tolist()
        if isinstance(value, (list, tuple)):
            return [plain(one) for one in value]
        return {key: plain(one) for key, one in value.items()} if isinstance(value, dict) else value

    groups = optimizer.param_groups
    weights = [plain(parameter.detach()) for group in groups for parameter in group["params"]]
    states = [plain(optimizer.state.get(parameter, {})) for group in groups for parameter in group["params"]]
    return [weights, states, [{key: plain(value) for key, value in group.items() if key != "params"} for group in groups]]


# --- what is asked of it ---


def losses(job: Job) -> list[dict[int, float]]:
    """By rank and step."""
    return [{line["step"]: line["loss"] for line in one.said if line["what"] == "loss"} for one in job]


@dataclass
class Reference:
    """The losses of jobs in which nothing happens, by number of ranks."""

    folder: Path
    known: dict[int, list[dict[int, float]]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def of(self, size: int) -> list[dict[int, float]]:
        with self.lock:
            if size not in self.known:
                job = run_job(
                    train,
                    size,
                    folder=_new(self.folder / f"whole-{size}" / "job"),
                    ends_fast=True,
                    what="",
                    where="",
                    victim=-1,
                    module="chaos",
                )
                assert [one.code for one in job] == [0] * size, job
                self.known[size] = losses(job)
            return self.known[size]


def _new(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def faults_of(cell: Cell, job: Job, whole: list[dict[int, float]]) -> Iterator[str]:
    """What does not hold of a job."""
    pauses = cell.what in PAUSES
    if job[cell.victim].first("event") is None:
        yield f"the victim never came to its end: {job[cell.victim].raised or 'it waits'}"
    for one in job:
        others = one.rank != cell.victim
        if pauses:
            if one.code != 0 or one.raised or "fullshard" in one.out:
                yield f"alarm: rank {one.rank}: exit code {one.code}, {one.raised or one.out[-300:]}"
            elif losses(job)[one.rank] != whole[one.rank]:
                yield f"losses: rank {one.rank} trained something else"
            continue
        if one.first("changed") is not None:
            yield f"changed: rank {one.rank} is half way through a step that failed"
        if not others:
            if one.code is None:
                yield "hangs: the victim itself does not end"
            continue
        limit = soon(RENDEZVOUS + WAITS if cell.where == "init" else WAITS)
        if one.ended is None or one.seconds > limit:
            yield f"hangs: rank {one.rank} after {one.seconds:.1f} s: {one.raised or 'nothing'}"
        elif one.ended > limit + soon(10.0):
            yield f"hangs: rank {one.rank} ended {one.ended - one.seconds:.1f} s after it raised"
        elif one.code is not None and one.code < 0:
            yield f"dies: rank {one.rank} by signal {-one.code}"
        elif cell.where == "end":
            if one.raised:
                yield f"alarm: rank {one.rank}: {one.raised}"
        elif cell.where != "init":
            text = one.raised
            if not one.raised:
                yield f"silent: rank {one.rank} raised nothing"
            elif cell.where == "save":
                continue
            elif not re.search(rf"\branks? (\d+, )*(\d+ and )?{cell.victim}\b|ranks:dict_keys\(\[{cell.victim}\]", text):
                yield f"unnamed rank: rank {one.rank}: {text}"
            elif not re.search(r"'blocks|'Stack|collective \d+|fully_shard|forward|backward|step|save|Checkpoint", text):
                yield f"unnamed unit: rank {one.rank}: {text}"


def resumed(folder: Path, size: int, whole: list[dict[int, float]]) -> Iterator[str]:
    """What does not hold of a job that is started anew."""
    last = folder / "last"
    begin = int(last.read_text()) if last.exists() else 0
    facts: dict[str, Any] = {"what": "", "where": "", "victim": -1}
    job = run_job(train, size, folder=_new(folder / "again"), module="chaos", ends_fast=True, **facts)
    for one, known, expected in zip(job, losses(job), whole):
        if one.code != 0:
            yield f"resume: rank {one.rank} from step {begin}: exit code {one.code}, {one.raised or one.out[-300:]}"
        for step in range(begin, STEPS):
            if abs(known.get(step, float("inf")) - expected[step]) > 1e-6 * abs(expected[step]):
                yield f"resume: rank {one.rank}: loss {known.get(step)} in step {step} instead of {expected[step]}"
                break


@dataclass
class Result:
    cell: Cell
    faults: list[str]
    worst: float  # seconds
    job: Job


def attempt(cell: Cell, folder: Path, reference: Reference, resume: bool) -> Result:
    whole = reference.of(cell.size)
    facts = {"what": cell.what, "where": cell.where, "victim": cell.victim}
    limit = soon(2 * WAITS) + (PAUSED if cell.what in PAUSES else RENDEZVOUS if cell.where == "init" else 0.0)
    job = run_job(train, cell.size, folder=_new(folder / "job"), limit=limit, module="chaos", **facts)
    faults = list(faults_of(cell, job, whole))
    if resume and cell.what not in PAUSES and cell.where not in ("init", "wrap"):  # where no checkpoint is yet
        faults += resumed(folder, cell.size, whole)
    others = [one.seconds for one in job if one.rank != cell.victim]
    shutil.rmtree(folder, ignore_errors=True)
    return Result(cell, faults, max(others), job)


# --- the matrix ---


def cells(wheres: list[str]) -> list[Cell]:
    """All of them, in an order in which each stretch has every ending at every place once, with mixed sizes and victims."""
    pairs = list(itertools.product(WHATS, wheres))
    rows = list(itertools.product((0, 1), (2, 3, 4)))
    return [
        Cell(what, where, *rows[(stretch + index) % len(rows)])
        for stretch in range(len(rows))
        for index, (what, where) in enumerate(pairs)
    ]


def chosen(options: argparse.Namespace) -> list[Cell]:
    found = [
        cell
        for cell in cells(WHERES if options.optimizer == "adamw" else IN_STEP)
        if cell.what in options.what
        and cell.where in options.where
        and cell.victim in options.victim
        and cell.size in options.size
    ]
    if options.part == "small":  # which follows from the commit; each has all endings and all places
        part = rotation.part() or 0
        picked = [cell for index, cell in enumerate(found) if (index + 3 * (index // 7) + part) % 7 == 0]
        start = part * SMALL % max(1, len(picked))
        found = (picked + picked)[start : start + min(SMALL, len(picked))]
    return found


def table(results: list[Result]) -> str:
    """Endings down, places across: how many of how many held, and the most seconds that a rank waited."""
    by_pair: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        by_pair.setdefault((result.cell.what, result.cell.where), []).append(result)
    wheres = list(dict.fromkeys(where for _, where in by_pair))
    lines = ["".join([f"{'':10}", *(f"{where:>16}" for where in wheres)])]
    for what in WHATS:
        line = f"{what:10}"
        for where in wheres:
            found = by_pair.get((what, where), [])
            well = sum(not result.faults for result in found)
            worst = max((result.worst for result in found), default=0.0)
            mark = "ok" if well == len(found) else "NOT"
            line += f"{f'{mark} {well}/{len(found)} {worst:.1f}s' if found else '-':>16}"
        lines.append(line)
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--part", choices=["all", "small"], default="all", help=f"small: {SMALL} jobs that follow from the commit"
    )
    parser.add_argument("--what", nargs="+", choices=WHATS, default=WHATS)
    parser.add_argument("--where", nargs="+", choices=WHERES + IN_STEP, default=WHERES + IN_STEP)
    parser.add_argument("--victim", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--size", nargs="+", type=int, default=[2, 3, 4])
    parser.add_argument("--states", choices=["ZERO1", "ZERO2", "ZERO3", "HFSDP"], default="ZERO3", help="the level of ZeRO")
    parser.add_argument("--optimizer", choices=["adamw", "muon", "shampoo"], default="adamw")
    parser.add_argument("--seconds", type=float, default=870.0, help="no job begins later than this")
    parser.add_argument("--at-once", type=int, default=max(4, 3 * (os.cpu_count() or 1)), help="jobs side by side")
    parser.add_argument("--no-resume", action="store_true", help="start no job anew")
    parser.add_argument("--verbose", action="store_true", help="print what every rank of a job that failed said")
    options = parser.parse_args(arguments)
    os.environ[STATES], os.environ[OPTIMIZER] = options.states, options.optimizer
    begin = time.monotonic()
    wanted = chosen(options)
    results: list[Result] = []
    base = Path(tempfile.mkdtemp(prefix="fullshard-chaos"))
    reference = Reference(base)

    def one(index: int, cell: Cell) -> Result | None:
        if time.monotonic() - begin > options.seconds:
            return None
        try:
            return attempt(cell, base / str(index), reference, not options.no_resume)
        except Exception as failure:
            return Result(cell, [f"the driver failed: {type(failure).__name__}: {failure}"], float("inf"), Job())

    server()
    with ThreadPoolExecutor(options.at_once) as pool:
        for future in [pool.submit(one, index, cell) for index, cell in enumerate(wanted)]:
            result = future.result()
            if result is None:
                continue
            results.append(result)
            for fault in result.faults:
                print(f"{result.cell}: {fault[:400]}", flush=True)
            if result.faults and options.verbose:
                print(result.job, flush=True)
    shutil.rmtree(base, ignore_errors=True)
    bad = [result for result in results if result.faults]
    print(table(results))
    print(
        f"{len(results) - len(bad)} of {len(results)} jobs are right, {len(wanted) - len(results)} were not begun in time; "
        f"{time.monotonic() - begin:.0f} s"
    )
    return 1 if bad or not results or len(results) < len(wanted) else 0


if __name__ == "__main__":
    sys.exit(main())
