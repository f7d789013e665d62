"""Random programs with planted faults, the models they run, and what is right on each rank."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from harness import World
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fullshard import HFSDP, CheckPolicy, fully_shard
from fullshard.policies import PRESETS

RATE = 0.1
ORDERS = ("skip", "repeat", "reverse")  # other modules, or in another order
FORWARD = ("enter", "leave", "again", "pre hook", "post hook")  # exceptions; again: in the second call, say a recomputation
BACKWARD = ("backward", "tensor hook", "parameter hook")
RUNS = ("train", "accumulate", "eval")


class Planted(RuntimeError):
    """The exception of a fault."""


# --- programs ---


@dataclass(frozen=True)
class Part:
    """A module. owns: it has a layer beside its parts. paired: its first two parts are one list unit."""

    parts: tuple[Part, ...] = ()
    unit: bool = False
    owns: bool = True
    paired: bool = False
    checkpointed: bool = False
    reshard: bool | None = None
    level: str = "ZERO3"


@dataclass(frozen=True)
class Fault:
    """Of `what` kind, at a module (or parameter) that `at` chooses, on `ranks`."""

    what: str
    at: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Step:
    kind: str
    fault: Fault | None = None
    at: int = 0  # freeze: which parameter
    ranks: tuple[int, ...] = ()  # freeze: where


@dataclass(frozen=True)
class Program:
    """together: any_failed() after every step; otherwise only at the end, and a rank with an error ends there, unless all
    have it. anew: any_failed(True) at the end, whatever happened. replicated: each rank has all rows, and gradients are summed
    over replicas; weights stay as they are then, since ranks that do not step together would part for good. hops: on the same
    mesh all units are HFSDP's, so that each rank has the rows that a flat mesh gives it.
    """

    root: Part
    steps: tuple[Step, ...]
    width: int = 3
    together: bool = True
    anew: bool = True
    tie: tuple[int, int] | None = None
    frozen: tuple[int, ...] = ()
    replicated: bool = False
    hops: bool = False


@st.composite
def parts(draw: st.DrawFn, depth: int) -> Part:
    inner = tuple(draw(parts(depth - 1)) for _ in range(draw(st.integers(0, 3 if depth > 1 else 2)))) if depth else ()
    flags = [draw(st.booleans()) for _ in range(2)]
    rare = [draw(st.integers(0, 4)) == 0 for _ in range(2)]
    reshard, level = draw(st.sampled_from([None, True, False])), draw(st.sampled_from(["ZERO3", "ZERO3", "ZERO2", "ZERO1"]))
    reshard = reshard if level == "ZERO3" else None
    return Part(inner, flags[0], flags[1] or not inner, rare[0], rare[1], reshard, level)


@st.composite
def programs(draw: st.DrawFn, size: int) -> Program:
    everywhere = tuple(range(size))
    somewhere = st.sampled_from([everywhere, *((rank,) for rank in range(size))])
    places = st.integers(0, 11)
    steps = []
    replicated = draw(st.integers(0, 3)) == 0
    actions = [
        "train",
        "train",
        "train",
        "accumulate",
        "eval",
        "zero",
        "freeze",
        *["update", "update", "load"] * (not replicated),
    ]
    for _ in range(draw(st.integers(2, 4))):
        kind = draw(st.sampled_from(actions))
        kinds = ["absent"] if kind not in RUNS else [*ORDERS, *FORWARD, "absent"] + [*BACKWARD] * (0 if kind == "eval" else 2)
        kinds += ["optimizer"] * (kind == "update")
        faulty = kind not in ("freeze", "load") and draw(st.booleans())
        fault = Fault(draw(st.sampled_from(kinds)), draw(places), draw(somewhere)) if faulty else None
        steps.append(Step(kind, fault, draw(places), draw(somewhere)) if kind == "freeze" else Step(kind, fault))
    return Program(
        draw(parts(2)),
        tuple(steps),
        draw(st.integers(3, 6)),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.none() | st.tuples(places, places)),
        tuple(draw(st.lists(places, max_size=2))),
        replicated,
        not replicated and draw(st.integers(0, 4)) == 0,
    )


# --- models ---


@dataclass
class Script:
    """What the modules of a model are to do in this step: what `fault` says. raising: whether exceptions are raised."""

    fault: Fault | None = None
    raising: bool = False
    calls: Counter[int] = field(default_factory=Counter)
    fired: bool = False

    def begin(self, fault: Fault | None, raising: bool) -> None:
        self.fault, self.raising, self.fired = fault, raising, False
        self.calls.clear()

    def at(self, what: str, number: int) -> bool:
        return self.fault is not None and self.fault.what == what and self.fault.at == number

    def maybe_raise(self, what: str, number: int, *_: Any) -> None:
        if self.raising and self.at(what, number):
            self.fired = True
            raise Planted(f"{what} of {number}")


class Raise(torch.autograd.Function):
    """The identity, whose backward calls a function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fn: Any) -> Tensor:
        ctx.fn = fn
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.fn()
        return grad, None


class Node(nn.Module):
    """A module of the tree; `number` counts in pre-order."""

    def __init__(self, part: Part, width: int, numbers: Iterator[int], script: Script) -> None:
        super().__init__()
        self.part, self.number, self.script = part, next(numbers), script
        self.own = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) if part.owns else None
        self.parts = nn.ModuleList(Node(inner, width, numbers, script) for inner in part.parts)

    def forward(self, x: Tensor) -> Tensor:
        script, number = self.script, self.number
        script.maybe_raise("enter", number)
        script.calls[number] += 1
        if script.calls[number] == 2:
            script.maybe_raise("again", number)
        if self.own is not None:
            x = x + torch.tanh(self.own(x))
        order = list(self.parts)
        if script.at("reverse", number):
            order.reverse()
        for inner in order:
            for _ in range(0 if script.at("skip", inner.number) else 2 if script.at("repeat", inner.number) else 1):
                recomputed = inner.part.checkpointed and torch.is_grad_enabled()
                x = checkpoint(inner, x, use_reentrant=False) if recomputed else inner(x)
        script.maybe_raise("leave", number)
        if script.at("backward", number):
            x = Raise.apply(x, partial(script.maybe_raise, "backward", number))
        if script.at("tensor hook", number) and x.requires_grad:
            x.register_hook(partial(script.maybe_raise, "tensor hook", number))
        return x


def nodes_of(model: nn.Module) -> list[Node]:
    return [module for module in model.modules() if isinstance(module, Node)]


def build(program: Program, mesh: Any) -> tuple[Node, Node]:
    """The model, and a sharded copy of it."""
    model = Node(program.root, program.width, iter(range(1000)), Script()).double()
    nodes = nodes_of(model)
    owning = [node for node in nodes if node.own is not None]
    if program.tie is not None:
        one, other = (owning[place % len(owning)] for place in program.tie)
        other.own[1].weight = one.own[1].weight
    every = list(model.parameters())
    for place in program.frozen:
        every[place % len(every)].requires_grad_(False)
    sharded = copy.deepcopy(model)
    planted = {(step.fault.what, step.fault.at % len(nodes)) for step in program.steps if step.fault is not None}
    nodes = nodes_of(sharded)
    for node in nodes:
        for hook, register in (("pre hook", node.register_forward_pre_hook), ("post hook", node.register_forward_hook)):
            if (hook, node.number) in planted:
                register(partial(node.script.maybe_raise, hook, node.number))
    shard(sharded, mesh, program, True)
    for node in nodes:
        if ("parameter hook", node.number) in planted and node.own is not None:
            with contextlib.suppress(RuntimeError):  # a frozen one takes no hook
                raising = partial(node.script.maybe_raise, "parameter hook", node.number)
                node.own[1].weight.register_post_accumulate_grad_hook(raising)
    return model, sharded


def shard(node: Node, mesh: Any, program: Program, unit: bool) -> None:
    """Units bottom-up. One that shares a parameter with a unit beside it is refused, and stays part of the unit around both."""
    paired = node.part.paired and len(node.parts) > 1
    for index, inner in enumerate(node.parts):
        shard(inner, mesh, program, inner.part.unit and not (paired and index < 2))
    options: Any = {
        "mesh": mesh,
        "reshard_after_forward": node.part.reshard,
        "states": HFSDP if program.hops else PRESETS[node.part.level],
        "check_policy": CheckPolicy(patience=0.1),
    }
    for modules in ([[*node.parts[:2]]] if paired else []) + ([node] if unit else []):
        try:
            fully_shard(modules, **options)
        except ValueError as refusal:
            if "modules that share a parameter" not in str(refusal):
                raise


# --- what is right ---


class Reference:
    """The unsharded model, and what each rank's rows of each gradient must be."""

    def __init__(self, model: Node, world: World, *, replicated: bool) -> None:
        self.model, self.size = model, world.size
        self.rank, self.shards = (0, 1) if replicated else (world.rank, world.size)
        self.here = world.rank
        self.parameters = dict(model.named_parameters())
        self.frozen = [{name for name, p in self.parameters.items() if not p.requires_grad} for _ in range(self.size)]
        self.grads: list[dict[str, Tensor]] = [{} for _ in range(self.size)]
        self.kept: list[dict[str, Tensor]] = [{} for _ in range(self.size)]  # by accumulate(): what each rank has for the mean

    def forward(self, rank: int, x: Tensor, fault: Fault | None) -> Tensor:
        for name, parameter in self.parameters.items():
            parameter.requires_grad_(name not in self.frozen[rank])
        self.model.script.begin(fault, raising=False)
        return self.model(x.chunk(self.size)[rank].clone().requires_grad_())

    def backward(self, x: Tensor, faults: list[Fault | None], *, keeps: bool) -> None:
        for rank, fault in enumerate(faults):
            if not is_absent(fault):
                for parameter in self.parameters.values():
                    parameter.grad = None
                (self.forward(rank, x, fault).square().mean() / self.size).backward()
                add(self.kept[rank], {name: p.grad for name, p in self.parameters.items() if p.grad is not None})
        if not keeps:
            total: dict[str, Tensor] = {}
            for kept in self.kept:
                add(total, kept)
                kept.clear()
            for rank, fault in enumerate(faults):
                if not is_absent(fault):
                    add(self.grads[rank], {name: grad for name, grad in total.items() if name not in self.frozen[rank]})

    def update(self, stepped: list[bool]) -> None:
        """Each rank steps with its rows."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                for rank in range(self.size):
                    if stepped[rank] and name in self.grads[rank]:
                        rows(parameter, rank, self.size).sub_(rows(self.grads[rank][name], rank, self.size), alpha=RATE)

    def values(self, number: int) -> dict[str, Tensor]:
        """What a load of step `number` loads."""
        generator = torch.Generator().manual_seed(1000 + number)
        return {name: torch.randn(p.shape, generator=generator).to(p.dtype) for name, p in self.parameters.items()}

    def load(self, number: int, loaded: list[bool]) -> None:
        """Each rank loads its rows."""
        with torch.no_grad():
            for name, value in self.values(number).items():
                for rank in range(self.size):
                    if loaded[rank]:
                        rows(self.parameters[name], rank, self.size).copy_(rows(value, rank, self.size))

    def zero(self, ranks: list[bool]) -> None:
        for rank, zeroed in enumerate(ranks):
            if zeroed:
                self.grads[rank].clear()
                self.kept[rank].clear()

    def restart(self, every: list[dict[str, Tensor]]) -> None:
        """From the rows that all ranks have, everything trainable."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(torch.cat([theirs[name] for theirs in every[: self.shards]]))
        self.frozen = [set() for _ in range(self.size)]
        self.zero([True] * self.size)

    def check(self, sharded: nn.Module, *, grads: bool) -> list[str]:
        """What of this rank's rows is wrong."""
        found = dict(sharded.named_parameters())
        wrong = [] if list(found) == list(self.parameters) else [f"parameters are {list(found)}"]
        for name in found.keys() & self.parameters.keys():
            wrong += differs(f"{name}", local(found[name]), rows(self.parameters[name].detach(), self.rank, self.shards))
            grad, expected = found[name].grad, self.grads[self.here].get(name)
            if grads and (grad is None) != (expected is None):
                wrong.append(f"{name}.grad is {grad}, expected {expected}")
            elif grads and grad is not None and expected is not None:
                wrong += differs(f"{name}.grad", local(grad), rows(expected, self.rank, self.shards))
        return wrong


def is_absent(fault: Fault | None) -> bool:
    return fault is not None and fault.what == "absent"


def add(to: dict[str, Tensor], terms: dict[str, Tensor]) -> None:
    for name, term in terms.items():
        to[name] = to[name] + term if name in to else term


def rows(tensor: Tensor, rank: int, size: int) -> Tensor:
    each = -(-tensor.shape[0] // size)
    return tensor[rank * each : (rank + 1) * each]


def local(tensor: Tensor) -> Tensor:
    return tensor.detach().to_local()  # type: ignore[attr-defined]  # no collective, unlike full_tensor()


def differs(what: str, got: Tensor, expected: Tensor) -> list[str]:
    # In float64: what is wrong is off by far more, roundings by far less.
    if got.shape == expected.shape and torch.allclose(got, expected, rtol=1e-7, atol=1e-9):
        return []
    return [f"{what} is {got.tolist()}, expected {expected.tolist()}"]
