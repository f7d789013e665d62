"""The programs of the race detector, run: on the asynchronous device they train as on the CPU, however late its streams are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import rotation
import simulated
import torch
import torch.distributed as dist
from harness import World, ranks
from planted import FAULTS, planted
from programs import NAMED, Place, Program, Training, limits
from test_on_device import LATE, late
from timelines import site
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fullshard import StateError
from fullshard._torch import HONOURS_SUBCLASSES

pytestmark = pytest.mark.skipif(simulated.compiler() is None, reason=simulated.NEEDS)


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """Build it once, before ranks look for it."""
    simulated.build()


def mesh_of(world: World, device: str, replicas: int) -> DeviceMesh:
    """Of so many replicas, as far as there are ranks."""
    if replicas == 1:
        return init_device_mesh(device, (world.size,), mesh_dim_names=("shard",))
    replicas = min(replicas, world.size)
    return init_device_mesh(device, (replicas, world.size // replicas), mesh_dim_names=("replicate", "shard"))


def on_device(world: World) -> Place:
    return Place(
        partial(mesh_of, world, "sim"),
        partial(torch.Stream, device="sim"),
        torch.accelerator.current_stream,
        "sim",
        mine=world.mine,
    )


class NoStream:
    """Of the CPU."""

    def wait_stream(self, other: NoStream) -> None: ...


def on_cpu(world: World) -> Place:
    return Place(partial(mesh_of, world, "cpu"), NoStream, NoStream, mine=world.mine)


def told(program: Program, place: Place) -> dict[str, Tensor]:
    """What a program sees, and its weights in the end."""
    with limits(128 if program.small else None):
        training = Training(program, place)
        training.run()
    place.current().wait_stream(training.side)  # an optimizer may be at work there
    values = {f"seen {index}": value.cpu() for index, value in enumerate(training.seen)}
    return values | {name: parameter.to_local().detach().cpu() for name, parameter in training.model.named_parameters()}


def expected(world: World, program: Program) -> dict[str, Tensor]:
    """What it tells on the CPU, which has no streams, nor memory of a group."""
    plain = replace(program, towers=False, away=False, memory=False)
    plain = replace(plain, optimizer=program.optimizer.replace("stream", "end"), hook=program.hook.replace("stream", "lane"))
    return told(plain, on_cpu(world))


def differences(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    return [name for name, value in other.items() if not torch.equal(one[name], value)]


fills = pytest.mark.skipif(
    not HONOURS_SUBCLASSES, reason="torch 2.11 asks for another state of the device's generator than it has"
)


def cases(chosen: Sequence[tuple[Any, ...]], programs: Sequence[str]) -> list[Any]:
    """Cases of a test, by the programs that they run. Programs that write fill some weights with random numbers."""
    return [pytest.param(*case, marks=fills) if NAMED[name].write else case for case, name in zip(chosen, programs)]


CASES = rotation.share([(name, how) for name in NAMED for how in LATE])
if rotation.part() is not None:
    CASES = CASES[::3]  # they take half a second each


@pytest.mark.parametrize(("name", "how"), cases(CASES, [name for name, _ in CASES]))
@ranks(2, device="sim")
def test_a_program_trains_as_on_the_cpu_bit_for_bit(world: World, name: str, how: str) -> None:
    right = expected(world, NAMED[name])
    told(replace(NAMED[name], steps=1), on_device(world))  # so that its streams are there
    with late(world, how):
        found = told(NAMED[name], on_device(world))
    different = differences(found, right)
    assert not different, different


# --- what shows if it is left out ---

KINDS = ("stream behind an event", "stream behind a message", "Event.synchronize", "Stream.synchronize", "device synchronize")
EVENT, MESSAGE, HOST = KINDS[:3]

SHOWN = {  # each order that fullshard makes, by function and kind, and a program that goes wrong without it
    ("core/param_group.py start_all_gather (run)", EVENT): "plain",
    ("core/param_group.py send (run)", EVENT): "offload, written",
    ("core/runtime.py run (wait)", EVENT): "plain",
    ("core/reducer.py reduce (run)", EVENT): "plain",
    ("core/reducer.py reduce (wait)", EVENT): "plain",
    ("core/reduction.py wait_for_gradient (wait)", EVENT): "optimizers in hooks",
    ("core/reduction.py wait_for_gradient (wait)", HOST): "values of the first rank",
    ("core/param_group.py synchronize_host (wait)", HOST): "offload, written",
    ("core/param_group.py gather_now (wait)", EVENT): "offload, gathered and written",
    ("optim/owner_exchange.py _send (run)", EVENT): "Muon",
    ("optim/owner_exchange.py _wait (wait)", EVENT): "Muon",
    ("optim/owner_exchange.py _share (run)", EVENT): "whole parameters on a hybrid mesh",
    ("_torch/devices.py on_stream", EVENT): "hook on a stream",
    ("_torch/devices.py wait_for_event", EVENT): "optimizer on a stream",
    ("_torch/devices.py then_order", EVENT): "backward on a stream",
}
IN_TABLE = {  # tests/races/table.py shows them, in ranks that are new: those that read something wrong raise, and are of no use then
    ("core/heartbeat.py _send (run)", EVENT),
    ("core/heartbeat.py read (wait)", HOST),
    ("core/agreement.py send (run)", EVENT),
    ("core/agreement.py send (run)", MESSAGE),
    ("core/agreement.py send (wait)", EVENT),
    ("core/reducer.py send_heartbeats (wait)", EVENT),  # as long as pages of heartbeats are new
}
HIDDEN = {  # behind others, as tests/races/test_planted.py says of each; the last two the detector finds
    ("core/heartbeat.py read (wait)", EVENT),
    ("core/reducer.py drain (wait)", EVENT),
    ("core/param_group.py synchronize_host (wait)", EVENT),
    ("core/runtime.py _end_unit (wait)", EVENT),
    ("core/reducer.py poll (wait)", EVENT),
    ("optim/owner_exchange.py _share (wait)", EVENT),  # the ranks agree behind it, over the same process group
    ("core/agreement.py barrier (wait)", EVENT),  # a second time, behind the wait in `send`
    ("core/agreement.py barrier (wait)", HOST),  # of the caller, for other ranks; it reads no memory
}


@fills
@ranks(2, device="sim")
def test_each_order_is_known_by_what_it_is_for(world: World) -> None:
    """A new one is put where it belongs above, once it was left out."""
    found: set[tuple[str, str]] = set()

    def note(kind: str) -> bool:
        if kind in KINDS and site():
            found.add((site(), kind))
        return False

    shares = {*SHOWN.values(), *rotation.share(list(NAMED), 4)}  # of which the first make all that are known
    world.device.on_order(note)
    for name, program in NAMED.items():
        if name in shares:
            told(program, on_device(world))
    world.device.on_order(None)
    # of reductions that happen to be over
    polled = {("core/runtime.py _end_unit (wait)", EVENT), ("core/reducer.py poll (wait)", EVENT)}
    known = SHOWN.keys() | IN_TABLE | HIDDEN
    assert found | polled == known, (found - known, known - found)


def goes_wrong(world: World, names: list[str], left_out: Any = None) -> str:
    """The first of these programs that differs from the CPU, on any rank, and which streams were late."""
    for name in names:
        right = expected(world, NAMED[name])
        for how, microseconds in (
            ("others", 500),
            ("random 1", 500),
            ("compute", 2_000),
            ("others", 5_000),
            ("others", 50_000),
            ("others", 500_000),  # on a busy machine, whose host takes long from one task to the next
        ):
            world.device.on_order(left_out)
            try:
                with late(world, how, microseconds):
                    different = differences(told(NAMED[name], on_device(world)), right)
            except StateError:  # a heartbeat that was read or sent too early
                different = ["an error"]
            finally:
                world.device.on_order(None)
            wrong = torch.tensor(len(different))
            dist.all_reduce(wrong)
            if wrong:
                return f"{name}, {how} late: {wrong} values"
    return ""


LEFT_OUT = rotation.share(list(SHOWN))


@pytest.mark.parametrize(("place", "kind"), cases(LEFT_OUT, [SHOWN[one] for one in LEFT_OUT]))
@ranks(2, device="sim")
def test_an_order_that_is_left_out_shows(world: World, place: str, kind: str) -> None:
    assert goes_wrong(world, [SHOWN[place, kind]], lambda one: one == kind and site() == place)


@ranks(2, device="sim", limit=400.0)
def row(world: World, names: list[str], order: tuple[str, str] | None, fault: str, answer: str) -> None:
    """What shows of a fault, for a table: on rank 0 written to the file `answer`."""
    left_out = None if order is None else lambda kind: (site(), kind) == order
    with planted(FAULTS[fault] if fault else ()):
        found = goes_wrong(world, names, left_out)
    if world.rank == 0:
        Path(answer).write_text(found)
