"""torch_checkpointing, torchtitan's new checkpoint library, saves and reshards fullshard's state dicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import launch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh

pytest.importorskip("torch_checkpointing")


def model_of(size: int, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with uneven shards: 5 and 7 rows over 4 or 3 ranks."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 7))
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=init_device_mesh("cpu", (size,)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """A step on a batch that is the same on each rank, so that the number of ranks does not matter."""
    model(torch.randn(4, 6, generator=torch.Generator().manual_seed(step))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def states_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)["state"]}


def gather_on_cpu(manager: Any, data: Any, process_group: Any = None) -> dict[int, Any]:
    """What the library's own method returns, which knows CUDA tensors only."""
    found: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(found, data, group=process_group)
    return dict(enumerate(found))


def manager() -> Any:
    from torch_checkpointing.checkpoint_manager import CheckpointManager
    from torch_checkpointing.config import SyncCheckpointSaverConfig
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.metadata_manager import DefaultMetadataManager
    from torch_checkpointing.schema import ItemSpec
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    DefaultMetadataManager._all_gather_pickled_data = gather_on_cpu
    item = ItemSpec(requires_copy=True, resharder=DefaultResharder())
    return CheckpointManager.Config(
        items={"model": item, "optimizer": item},
        save=SyncCheckpointSaverConfig(),
        storage_config=LocalFileSystemStorageConfig(
            use_direct_io=False
        ),  # temporary folders refuse O_DIRECT when a file is closed
    ).build()


def save(rank: int, size: int, *, place: Path) -> None:
    model, optimizer = model_of(size, seed=1)
    train(model, optimizer, 0)
    checkpoints = manager()
    checkpoints.save(str(place / "checkpoint"), states_of(model, optimizer))
    checkpoints.close()
    train(model, optimizer, 1)
    whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
    if rank == 0:
        torch.save(whole, place / "expected")


def load(rank: int, size: int, *, place: Path) -> None:
    model, optimizer = model_of(size, seed=2)
    train(model, optimizer, 5)  # other weights and states
    checkpoints, states = manager(), states_of(model, optimizer)
    checkpoints.load(str(place / "checkpoint"), into=states, strict=True)
    groups = get_optimizer_state_dict(model, optimizer)["param_groups"]
    set_optimizer_state_dict(model, optimizer, {"state": states["optimizer"], "param_groups": groups})
    checkpoints.close()
    train(model, optimizer, 1)
    for name, value in torch.load(place / "expected").items():
        torch.testing.assert_close(model.state_dict()[name].full_tensor(), value)


def test_a_checkpoint_of_four_ranks_goes_on_with_three(tmp_path: Path) -> None:
    """Model and optimizer are saved by four ranks, resharded for three, and the next step is that of the four ranks."""
    launch(save, size=4, place=tmp_path)
    launch(load, size=3, place=tmp_path)
