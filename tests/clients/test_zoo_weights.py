"""Twelve models of transformers, loaded and saved with the rules that the library finds: the values and files of their own."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

import zoo
from launch import launch, shared_folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _compare(rank: int, size: int, *, kind: str) -> None:
    import torch.distributed as dist

    import fullshard
    from fullshard.weights import load_weights, save_weights, transformers_rules

    folder = shared_folder()
    theirs, ours = folder / "theirs", folder / "ours"
    torch.manual_seed(0)
    whole = zoo.build(kind)
    if rank == 0:
        whole.save_pretrained(theirs, max_shard_size=100_000)
    dist.barrier()
    with torch.device("meta"):
        model = zoo.build(kind)
    loading, saving = transformers_rules(model), transformers_rules(model, saving=True)
    fullshard.shard_model(model)
    loaded = load_weights(model, theirs, key_map=loading, buffers=partial(zoo.build, kind))
    assert not loaded.missing and not loaded.unexpected and not loaded.unwritten
    expected = whole.state_dict()
    for name, tensor in model.state_dict().items():
        full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        assert torch.equal(full, expected[name]), name
    computed = dict(model.named_buffers())
    for name, buffer in whole.named_buffers():
        torch.testing.assert_close(computed[name], buffer, msg=name)
    batch = zoo.batch(kind)
    torch.testing.assert_close(model.eval()(**batch).loss, whole.eval()(**batch).loss)
    extra = {path.name: path for path in theirs.iterdir() if "model" not in path.name}
    save_weights(model, ours, max_shard_bytes=100_000, extra=extra, key_map=saving)
    assert sorted(contents(ours)) == sorted(contents(theirs))
    for name, data in contents(theirs).items():
        assert contents(ours)[name] == data, name
    dist.barrier()


@pytest.mark.parametrize("kind", zoo.KINDS)
def test_values_are_those_of_from_pretrained_and_files_those_of_save_pretrained(kind: str) -> None:
    launch(_compare, size=2, kind=kind)
