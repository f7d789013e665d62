"""Versions that `publish()` saves and streams, as transformers and a receiver of streams take them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from launch import launch, shared_folder
from test_save_pretrained import TO_FILES, build


def _publish(rank: int, size: int, *, kind: str) -> None:
    import torch.distributed as dist
    import transformers

    import fullshard

    folder, model = shared_folder() / "weights", build(kind)
    config = model.config.to_json_string()
    fullshard.shard_model(model)
    pub = fullshard.publish(model, rules=TO_FILES if kind == "Mixtral" else None, dtype=torch.bfloat16)
    base: Any = None
    state: dict[str, torch.Tensor] = {}
    for step in range(3):
        ids = torch.arange(8).view(1, 8) + step
        model(input_ids=ids, labels=ids).loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        model.zero_grad()
        version = pub.seal(step)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)  # what is sealed is what consumers read
        path = pub.save(folder, extra={"config.json": config})
        read = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(1.0)
            mine = model(input_ids=ids).logits
        torch.testing.assert_close(read(input_ids=ids).logits.float(), mine, atol=0.05, rtol=0.05)
        assert json.loads((folder / "latest" / "publication.json").read_text())["digest"] == version.digest
        described = {one.name: (one.dtype, one.shape) for one in pub.tensors}
        received = {name: tensor.clone() for name, tensor in pub.full(version, to=0)}
        assert set(received) == (set(described) if rank == 0 else set())
        for name, tensor in received.items():
            assert (tensor.dtype, tuple(tensor.shape)) == described[name]
        if base is not None:
            changes = fullshard.weights.Changes.load(pub.save(folder, since=base))
            if rank == 0:
                assert changes.apply(state, base.digest) == version.digest
                assert all(torch.equal(state[name], tensor) for name, tensor in received.items())
        if not state:
            state = received
        base = version
        dist.barrier()


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Mixtral"])
def test_consumers_have_the_weights_of_each_version(kind: str) -> None:
    """from_pretrained computes with the sealed weights, streams have what the description says, and files of changes lead on."""
    launch(_publish, size=2, kind=kind)


def _register(rank: int, size: int) -> None:
    from types import SimpleNamespace
    from unittest import mock

    import torch.distributed as dist
    from checkpoint_engine.ps import ParameterServer, _to_named_tensor

    import fullshard
    from fullshard.weights.adapters.checkpoint_engine import register

    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)])
    fullshard.shard_model(model)
    pub = fullshard.publish(model, dtype=torch.bfloat16)
    pub.seal(0)
    whole = {name: tensor.clone() for name, tensor in pub.full()}
    # A server asks for a GPU when it is made, and pins memory.
    server = object.__new__(ParameterServer)
    server._rank, server._memory_pool, server._p2p_store = rank, {}, None
    server.device_manager = SimpleNamespace(device_type="cuda")
    empty = torch.empty
    with mock.patch("torch.empty", lambda *size, pin_memory=False, **options: empty(*size, **options)):
        register(server, "step-0", pub)
    found = {}
    for buffer in server._memory_pool["step-0"]:
        for one in _to_named_tensor(buffer.metas):  # as an engine unpacks what it receives
            nbytes = one["dtype"].itemsize * one["shape"].numel()
            found[one["name"]] = buffer.buffer[one["offset"] :][:nbytes].view(one["dtype"]).view(one["shape"]).clone()
    every: list[Any] = [None] * size
    dist.all_gather_object(every, found)
    assert sorted(name for of_rank in every for name in of_rank) == sorted(whole) and all(every)
    assert all(torch.equal(tensor, whole[name]) for of_rank in every for name, tensor in of_rank.items())


def test_parameter_servers_of_checkpoint_engine_hold_each_tensor_once() -> None:
    pytest.importorskip("checkpoint_engine")
    launch(_register, size=2)
