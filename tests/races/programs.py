"""Programs to look at: models, options and steps of training, each a value that says all of it."""

from __future__ import annotations

import dataclasses
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any
from unittest import mock

import torch
from detector import Detector, NodeStreams, Planted
from hypothesis import strategies as st
from models import Stack, batch, square
from network import host_memory, mesh_of, watching
from optimizers import Normalized
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import fullshard
from fullshard import CheckPolicy, CommPolicy, CPUOffloadPolicy, MixedPrecisionPolicy
from fullshard.comm.streams import DeviceStream, Lane
from fullshard.core import layout, unit_of
from fullshard.ext import two_hops
from fullshard.policies import PRESETS


@dataclass(frozen=True)
class Place:
    """Where a program trains: in the detector, on a device, or on the CPU.

    mesh_of: the mesh with so many replicas.        stream, current: make a stream, and tell the current one.
    lanes: what messages are queued on, None for the device's own.      mine: this rank's part of a batch, on the device.
    """

    mesh_of: Callable[[int], DeviceMesh]
    stream: Callable[[], Any]
    current: Callable[[], Any]
    device: str = "cpu"
    lanes: Callable[[torch.device], Lane] | None = None
    mine: Callable[[Tensor], Tensor] = lambda batch: batch


@dataclass(frozen=True)
class Program:
    """What a program does; the defaults are those of a plain one.

    dtypes: none, low (bfloat16, reduced in float32), high (reduced in float64).        recompute: of each block.
    evaluate: a forward without graph before each step.         write: weights are written behind it, and loaded.
    look: a unit's parameters are gathered by hand, before such a write.
    by_hand: prefetch by hand, and unshard(async_op=True) of the first block.           towers: blocks on two streams.
    hook: set_all_reduce_hook, on a stream of its own if "stream".
    optimizer: at the end, "two" after each other there, "muon" of matrices before another one of the rest, of "whole" parameters,
    in hooks, or on a stream of its own with an event.
    memory: messages in memory of the group.
    offload: none, pageable, pinned.
    small: staging is so small that gradients go in slices.
    keep: memory of full parameters and messages stays.
    away: backward runs on another stream than forward.
    finalize: none, by the caller, or "later": its handle is waited for behind a forward of another model.
    states: the level of ZeRO, for each second step another one if "changed".
    """

    steps: int = 2
    microbatches: int = 1
    replicas: int = 1
    defer_replicas: bool = False
    reshard: Any = None
    dtypes: str = "none"
    direct: float | None = None
    in_flight: int = 1
    ahead: int | None = None
    offload: str = "none"
    recompute: bool = False
    evaluate: bool = False
    write: bool = False
    by_hand: bool = False
    towers: bool = False
    hook: str = "none"
    optimizer: str = "end"
    memory: bool = False
    extension: bool = False
    every: int = 1
    wide: bool = False
    small: bool = False
    keep: bool = False
    finalize: str = "none"
    sync: str = "off"
    look: bool = False
    away: bool = False
    states: str = "ZERO3"

    @property
    def mp(self) -> MixedPrecisionPolicy:
        return {
            "none": MixedPrecisionPolicy(),
            "low": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
            "high": MixedPrecisionPolicy(reduce_dtype=torch.float64),
        }[self.dtypes]

    def __str__(self) -> str:
        told = [f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
        return f"Program({', '.join(told)})"


NAMED = {
    "plain": Program(steps=3, sync="check"),
    "values of the first rank": Program(sync="broadcast", offload="pinned"),
    "mixed precision": Program(dtypes="low"),
    "cast before reduction": Program(dtypes="high", direct=0),
    "accumulation": Program(microbatches=3),
    "hybrid": Program(replicas=2, microbatches=2, defer_replicas=True),
    "replicas alone": Program(replicas=4),
    "int reshard": Program(reshard=2, wide=True),
    "kept full": Program(reshard=False),
    "offload": Program(offload="pinned", dtypes="low", replicas=2),
    "offload, written": Program(offload="pinned", evaluate=True, write=True),
    "offload, gathered and written": Program(offload="pinned", look=True, write=True, evaluate=True),
    "offload to pageable memory, written": Program(offload="pageable", evaluate=True, write=True),
    "prefetch by hand": Program(by_hand=True, ahead=10**6),
    "two streams": Program(towers=True, recompute=True, in_flight=2),
    "hook on a stream": Program(hook="stream", replicas=2, in_flight=2, microbatches=2),
    "optimizer on a stream": Program(optimizer="stream", by_hand=True, steps=3),
    "backward on a stream": Program(away=True, steps=3),
    "backward on a stream, offload": Program(away=True, offload="pinned", microbatches=2, replicas=2),
    "optimizers in hooks": Program(optimizer="hooks", in_flight=2, microbatches=2, replicas=2, ahead=10**6),
    "recomputation": Program(recompute=True, reshard=False),
    "extension": Program(extension=True, dtypes="low", optimizer="hooks"),
    "memory of the group": Program(memory=True, microbatches=2, replicas=2),
    "many in flight": Program(in_flight=3, direct=0, every=2, steps=3),
    "slices": Program(dtypes="low", direct=0, in_flight=2, small=True, wide=True),
    "kept memory": Program(keep=True, microbatches=2, in_flight=2, steps=3, direct=0),
    "kept memory, hybrid": Program(keep=True, microbatches=2, replicas=2, defer_replicas=True, dtypes="low", hook="stream"),
    "kept memory, slices": Program(keep=True, dtypes="low", direct=0, small=True, wide=True, reshard=2),
    "kept memory, offload": Program(keep=True, offload="pinned", dtypes="low"),
    "ended by the caller": Program(finalize="now", microbatches=2, replicas=2, in_flight=2),
    "ended by the caller, waited for later": Program(finalize="later", microbatches=2, dtypes="low", steps=3),
    "ZeRO-2": Program(states="ZERO2", microbatches=2, steps=3, dtypes="low", evaluate=True),
    "ZeRO-1": Program(states="ZERO1", microbatches=3, steps=3, replicas=2, write=True),
    "ZeRO-1, ended by the caller": Program(states="ZERO1", microbatches=2, finalize="now", steps=3, offload="pinned"),
    "ZeRO-2, two steps": Program(states="ZERO2", steps=3, optimizer="two", direct=0),
    "Muon": Program(optimizer="muon", wide=True, steps=3, dtypes="low"),
    "whole parameters": Program(optimizer="whole", wide=True, steps=3, dtypes="low"),
    "whole parameters on a hybrid mesh": Program(optimizer="whole", replicas=2, microbatches=2, evaluate=True),
    "Muon, all ranks of a hybrid mesh": Program(optimizer="muon", states="HFSDP", replicas=2, microbatches=2, evaluate=True),
    "ZeRO-2, a step on a stream": Program(states="ZERO2", steps=3, optimizer="stream", evaluate=True, write=True),
    "HFSDP": Program(states="HFSDP", replicas=2, microbatches=3, steps=3, dtypes="low", evaluate=True),
    "HFSDP, offload, written": Program(states="HFSDP", replicas=2, offload="pinned", microbatches=2, write=True, look=True),
    "HFSDP, kept memory": Program(states="HFSDP", replicas=2, keep=True, microbatches=2, steps=3, hook="stream", direct=0),
    "HFSDP, ended by the caller": Program(states="HFSDP", replicas=4, finalize="now", microbatches=2, in_flight=2),
    "HFSDP, optimizer on a stream": Program(states="HFSDP", replicas=2, optimizer="stream", wide=True, steps=3, recompute=True),
    "levels that change": Program(states="changed", microbatches=2, steps=4, recompute=True),
}


def often(value: Any, *rare: Any) -> st.SearchStrategy[Any]:
    """`value` in four cases of five; failures shrink to it."""
    return st.sampled_from([value] * (4 * len(rare)) + list(rare))


def legal(program: Program) -> Program:
    """The program without what its other options forbid."""
    change: dict[str, Any] = {}
    if program.reshard == 2 and program.replicas > 1:  # shards of two ranks have no smaller group
        change["reshard"] = None
    if program.optimizer in ("muon", "whole") and (
        program.extension or program.offload != "none" or program.finalize == "later"
    ):
        change["optimizer"] = "end"
    if program.extension:  # its copy from the host is torch's own `.to(device)`, which does nothing here
        change |= {"offload": "none", "look": False}
    if program.optimizer == "stream" and program.offload != "none":
        change["optimizer"] = "end"
    if program.finalize != "none":
        change["defer_replicas"] = False
    if program.states in ("ZERO1", "ZERO2"):
        change["reshard"] = None
    if program.states == "HFSDP":  # hooks of a subclass that come later are refused
        change |= {"replicas": max(2, program.replicas), "extension": False}
        change["reshard"] = None if program.reshard == 2 else program.reshard
    return dataclasses.replace(program, **change)


PROGRAMS = st.builds(
    Program,
    steps=st.sampled_from((1, 2, 3)),
    microbatches=st.sampled_from((1, 1, 2, 3)),
    replicas=st.sampled_from((1, 1, 2, 4)),
    defer_replicas=st.booleans(),
    reshard=st.sampled_from((None, True, False, 2)),
    dtypes=st.sampled_from(("none", "none", "low", "high")),
    direct=st.sampled_from((None, 0, 200, float("inf"))),
    in_flight=st.sampled_from((1, 1, 2, 3)),
    ahead=st.sampled_from((None, None, 0, 10**4, 10**6)),
    offload=often("none", "pageable", "pinned"),
    recompute=often(False, True),
    evaluate=often(False, True),
    write=often(False, True),
    by_hand=often(False, True),
    towers=often(False, True),
    hook=often("none", "lane", "stream"),
    optimizer=st.sampled_from(("end", "end", "two", "muon", "whole", "hooks", "stream")),
    memory=often(False, True),
    extension=often(False, True),
    every=st.sampled_from((1, 1, 2)),
    wide=st.booleans(),
    small=st.booleans(),
    keep=often(False, True),
    finalize=often("none", "now", "later"),
    look=often(False, True),
    states=often("ZERO3", "ZERO2", "ZERO1", "HFSDP", "changed"),
).map(legal)


def run(program: Program, detector: Detector, *, tolerant: bool = False, at_end: Callable[[], None] = lambda: None) -> Detector:
    """Train in a thread of its own, which has lanes of its own.

    tolerant: go on behind an exception that the detector planted. at_end: called while the model still lives.
    """
    failures: list[BaseException] = []

    def work() -> None:
        try:
            with (
                warnings.catch_warnings(),
                watching(detector),
                host_memory(detector, pinned=program.offload == "pinned"),
                NodeStreams(detector),
                limits(128 if program.small else None),
            ):
                warnings.simplefilter("ignore")
                module = detector.machine.module
                place = Place(mesh_of, module.Stream, module.current_stream, lanes=DeviceStream)
                training = Training(program, place, tolerant)
                detector.trains = True
                training.run()
                at_end()
                detector.reap()
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return detector


@contextmanager
def limits(nbytes: int | None) -> Iterator[None]:
    """A block in which staging, and messages of their own, are of so many bytes."""
    with ExitStack() as stack:
        if nbytes is not None:
            for module, limit in ((layout, "MIN_MESSAGE"), (two_hops, "LEAST_PADDING")):
                stack.enter_context(mock.patch.object(module, limit, nbytes // 4))
            stack.enter_context(mock.patch.object(layout, "slice_limit", lambda of: nbytes))
        # a matrix in each bucket
        stack.enter_context(mock.patch.object(fullshard.plan_owners, "__kwdefaults__", {"bucket_nbytes": 1}))
        yield


class Training:
    """seen: what forwards and looks gave, in order."""

    def __init__(self, program: Program, place: Place, tolerant: bool = False) -> None:
        self.program, self.place, self.tolerant = program, place, tolerant
        self.side = place.stream()
        self.seen: list[Tensor] = []
        self.mesh = place.mesh_of(program.replicas)
        torch.manual_seed(0)
        self.model = Model(3, 8, 24) if program.wide else Model(2)
        self.model.training_of = self
        if program.small:  # half as many rows as ranks
            self.model.head = nn.Linear(self.model.head.in_features, self.mesh.size() // 2)
        self.model.to(place.device)
        self.shard()
        if program.extension:
            for block in self.model.blocks:
                shard = block.up.weight._local_tensor
                shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = MethodType(halved, shard), MethodType(widened, shard)
        self.optimizers()

    def shard(self) -> None:
        program, model = self.program, self.model
        offload = None if program.offload == "none" else CPUOffloadPolicy(pin_memory=program.offload == "pinned")
        options: dict[str, Any] = {
            "mesh": self.mesh,
            "sync": program.sync,
            "mp_policy": program.mp,
            "reshard_after_forward": program.reshard,
            "states": PRESETS.get(program.states, fullshard.ZERO3),
            "comm_policy": CommPolicy(
                direct_min_bytes=program.direct,
                reductions_in_flight=program.in_flight,
                prefetch_bytes=program.ahead,
                lanes=self.place.lanes,
            ),
            "check_policy": CheckPolicy(every=program.every),
        }
        if offload is not None:
            options["offload_policy"] = offload
        for block in model.blocks:
            fullshard.fully_shard(block, **options)
        fullshard.fully_shard(model, **options)
        model.set_keep_unsharded_storage(program.keep)
        model.set_manual_backward_finalization(program.finalize != "none")
        if program.finalize == "later":
            self.other = fullshard.fully_shard(nn.Linear(5, 4).to(self.place.device), **options)
        for unit in fullshard_units(model):
            if program.hook != "none":
                unit.set_all_reduce_hook(lambda flat: flat.mul_(0.5), stream=self.side if program.hook == "stream" else None)
            if program.memory:
                unit.set_allocate_memory_from_process_group_for_comm(True)
        if program.by_hand:
            first, *others = model.blocks
            model.set_modules_to_forward_prefetch([first])
            for one, other in zip(model.blocks, others):
                one.set_modules_to_forward_prefetch([other])
                other.set_modules_to_backward_prefetch([one])

    def optimizers(self) -> None:
        if self.program.optimizer != "hooks":
            made, every = self.adamw, list(self.model.parameters())
            two = self.program.optimizer == "two"
            self.optimizer: Any = made(every[::2] if two else every)
            self.second = made(every[1::2]) if two else None
            if self.program.optimizer == "whole":
                self.optimizer, self.second = fullshard.whole_view(Normalized(every, lr=0.01)), None
            if self.program.optimizer == "muon":
                self.optimizer = torch.optim.Muon([parameter for parameter in every if parameter.ndim == 2], lr=0.01)
                self.second = made([parameter for parameter in every if parameter.ndim != 2])
            return
        self.optimizer = None
        for parameter in self.model.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.01)

            def step(parameter: Tensor, optimizer: Any = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(step)

    def adamw(self, parameters: list[Any]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.01, foreach=True)

    def run(self) -> None:
        for step in range(self.program.steps):
            try:
                self.step(step)
            except (Planted, fullshard.StateError) as failure:
                if not self.tolerant or not (isinstance(failure, Planted) or isinstance(failure.__cause__, Planted)):
                    raise
                failure.__traceback__ = None  # it keeps what the frames hold
                self.model.zero_grad()
                if step % 2:  # as any_failed() does on every rank
                    unit_of(self.model).runtime.abort_step()
        if self.tolerant:  # whatever came before, a whole step follows
            self.step(self.program.steps)

    def step(self, step: int) -> None:
        self.prepare(step)
        self.train(step)

    def prepare(self, step: int) -> None:
        """What a program does between two steps."""
        program, model = self.program, self.model
        if program.states == "changed":
            self.place.current().wait_stream(self.side)  # an optimizer may be at work there
            model.set_states((fullshard.ZERO1, fullshard.ZERO2, fullshard.ZERO3)[step % 3])
        if program.evaluate:
            with torch.no_grad():
                self.seen.append(self.forward(self.batch(step)))
        if program.look:
            self.place.current().wait_stream(self.side)  # an optimizer may be at work there
            with fullshard.gathered(model, grad=False, recurse=True) as full:
                self.seen.append(full["inp.weight"].square().mean())
        if program.write:
            self.place.current().wait_stream(self.side)  # an optimizer may be at work there
            torch.manual_seed(step)  # of every device
            with torch.no_grad():
                for index, parameter in enumerate(model.parameters()):
                    if index % 3 == 0:
                        parameter.mul_(0.99)
                    elif index % 3 == 1:
                        parameter.data = parameter.data * 0.99
                    else:
                        nn.init.uniform_(parameter)
            model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})

    def train(self, step: int) -> None:
        program, model = self.program, self.model
        for micro in range(program.microbatches):
            last = micro == program.microbatches - 1
            model.set_is_last_backward(last)
            if program.defer_replicas and program.replicas > 1:
                model.set_requires_all_reduce(last)
            elif program.optimizer != "hooks" and program.states not in ("ZERO1", "HFSDP"):
                model.set_requires_gradient_sync(last)
            loss = square(self.forward(self.batch(step + micro)))
            self.seen.append(loss.detach())
            if program.optimizer == "stream" and micro == 0:  # whose memory the optimizer reads until here
                self.optimizer.zero_grad()
            self.backward(loss)
        if program.finalize == "later":
            handle = model.finalize_backward(async_op=True)
            torch.autograd.backward(square(self.other(self.batch(step))))
            self.other.zero_grad()
            handle.wait()
        elif program.finalize == "now":
            model.finalize_backward()
        if self.optimizer is None:
            return
        if program.optimizer == "stream":
            self.side.wait_stream(self.place.current())
            with self.side:
                self.optimizer.step()
            model.set_post_optim_event(self.side.record_event())
        else:
            for optimizer in (self.optimizer, self.second):
                if optimizer is not None:
                    optimizer.step()
                    optimizer.zero_grad()

    def backward(self, loss: Tensor) -> None:
        # Not Tensor.backward: a function of torch's, inside of which function modes are off.
        if not self.program.away:
            torch.autograd.backward(loss)
            return
        current = self.place.current()
        self.side.wait_stream(current)
        with self.side:
            torch.autograd.backward(loss)
        torch.zeros(8, device=self.place.device).add_(1.0)  # which may lie in memory that the backward freed
        current.wait_stream(self.side)

    def batch(self, step: int) -> Tensor:
        return self.place.mine(batch(step)).to(self.place.device)

    def forward(self, x: Tensor) -> Tensor:
        if self.program.by_hand:
            self.model.blocks[0].unshard(async_op=True)
        return self.model(x)


class Model(Stack):
    """A Stack that recomputes its blocks, or runs every second one on another stream, with the waits that a program owes."""

    training_of: Any = None

    def forward(self, x: Tensor) -> Tensor:
        training = self.training_of
        program, current, side = training.program, training.place.current, training.side
        x = self.inp(x)
        for index, block in enumerate(self.blocks):
            call = partial(checkpoint, block, use_reentrant=False) if program.recompute else block
            if program.towers and index % 2:
                side.wait_stream(current())
                with side:
                    x = call(x)
                current().wait_stream(side)
            else:
                x = call(x)
        return self.head(x)


def halved(shard: Tensor, mesh: Any) -> Any:
    return (shard.detach().to(torch.bfloat16),), None


def widened(shard: Tensor, outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
    """The gathered bfloat16 in the dtype that is computed in."""
    (part,) = outputs
    if out is not None:
        with torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(part)
        return None
    full = part.to(dtype)
    return full, (full,)


def fullshard_units(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if isinstance(module, fullshard.FSDPModule):
            yield module


def first_race(detector: Detector) -> str:
    return next((str(race) for race in detector.races.values()), "")
