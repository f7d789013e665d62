"""The asynchronous device captures and replays as CUDA does: N replays are N steps of a plain module, and what spoils a capture raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import simulated
import torch
from harness import World, ranks
from test_on_device import Stack, late
from torch import Tensor, nn

pytestmark = pytest.mark.skipif(simulated.compiler() is None, reason=simulated.NEEDS)

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, capturable=True, foreach=True),
}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return loss.detach()


def data(index: int) -> Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(index)).to("sim")


@pytest.mark.parametrize("how", ["none", "random 1", "random 2"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@ranks(1, device="sim")
def test_replays_of_a_plain_module_are_its_steps_bit_for_bit(world: World, name: str, how: str) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Stack().to("sim"))
    (eager, one), (captured, other) = ((model, OPTIMIZERS[name](model.parameters())) for model in models)
    for index in range(2):
        step(eager, one, data(index))
        step(captured, other, data(index))
    x, graph = data(0).clone(), torch.sim.Graph()  # type: ignore[attr-defined]
    with torch.sim.graph(graph):  # type: ignore[attr-defined]
        loss = step(captured, other, x)
    with late(world, how):
        for index in range(2, 7):
            x.copy_(data(index))
            graph.replay()
            assert torch.equal(loss.cpu(), step(eager, one, data(index)).cpu())
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(eager.parameters(), captured.parameters()))


def query_inside() -> None:
    event = torch.Event(device="sim")
    event.record()
    event.query()


def fork(stream: torch.Stream, x: Tensor) -> None:
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        x.mul_(2)


def allocate_on(stream: torch.Stream) -> None:
    with stream:
        torch.empty(5, device="sim")


SPOILED: dict[str, tuple[Callable[[Tensor, torch.Stream, torch.Event], object], str]] = {
    "a number read": (lambda x, stream, event: x.sum().item(), "item()"),
    "a branch": (lambda x, stream, event: bool((x > 0).all()), "item()"),
    "a copy to the host": (lambda x, stream, event: x.cpu(), "copy to the host"),
    "synchronize": (lambda x, stream, event: torch.accelerator.synchronize(), "synchronize"),
    "a wait for an event from outside": (lambda x, s, event: torch.accelerator.current_stream().wait_event(event), "outside"),
    "a query of an event from outside": (lambda x, stream, event: event.query(), "query"),
    "a query of a captured event": (lambda x, stream, event: query_inside(), "a query"),
    "a stream that is not joined": (lambda x, stream, event: fork(stream, x), "not joined"),
    "an allocation on another stream": (lambda x, stream, event: allocate_on(stream), "not captured"),
    "a shape that depends on data": (lambda x, stream, event: x.nonzero(), "nonzero"),
    "random numbers": (lambda x, stream, event: torch.nn.functional.dropout(x), "random"),
    "a copy from pageable memory": (lambda x, stream, event: x.copy_(torch.ones(4), non_blocking=True), "pageable"),
}


@pytest.mark.parametrize("name", SPOILED)
@ranks(1, device="sim")
def test_what_a_graph_cannot_hold_spoils_its_capture_by_name(world: World, name: str) -> None:
    body, text = SPOILED[name]
    x, stream, event = torch.ones(4, device="sim"), torch.Stream(device="sim"), torch.Event(device="sim")
    event.record()
    with pytest.raises(RuntimeError, match="sim device") as caught, torch.sim.graph(torch.sim.Graph()):  # type: ignore[attr-defined]
        body(x, stream, event)
    assert text in str(caught.value)
    with torch.sim.graph(graph := torch.sim.Graph()):  # type: ignore[attr-defined]
        y = x + 1
    graph.replay()
    assert y.cpu().tolist() == (x + 1).cpu().tolist(), "the next capture is right"


@ranks(1, device="sim")
def test_memory_that_was_freed_since_a_capture_is_found_at_its_replay(world: World) -> None:
    outside, graph = torch.ones(4, device="sim"), torch.sim.Graph()  # type: ignore[attr-defined]
    with torch.sim.graph(graph):  # type: ignore[attr-defined]
        result = outside * 2
    graph.replay()
    assert result.cpu().tolist() == [2.0] * 4
    del outside
    with pytest.raises(RuntimeError, match="bytes that were allocated outside of its capture and freed since"):
        graph.replay()


@ranks(1, device="sim")
def test_a_graph_forks_and_joins_however_late_its_streams_are(world: World) -> None:
    stream, a, graph = torch.Stream(device="sim"), torch.zeros(1000, device="sim"), torch.sim.Graph()  # type: ignore[attr-defined]
    with torch.sim.graph(graph):  # type: ignore[attr-defined]
        here = torch.accelerator.current_stream()
        b = a + 1
        stream.wait_stream(here)
        with stream:
            c = b * 3
        d = b * 5
        here.wait_stream(stream)
        e = c + d
    with late(world, "random 3"):
        for value in range(5):
            a.fill_(value)
            graph.replay()
            assert torch.equal(e.cpu(), torch.full((1000,), (value + 1) * 8.0))
