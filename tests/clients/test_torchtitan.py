"""torchtitan at its defaults: its Trainer, unchanged, trains plain parameters that spmd_types annotates, on fullshard."""

# ruff: noqa: E402 - without torchtitan, the rest is not imported

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch._utils
import torch.distributed as dist
from launch import assert_sharded_by_us, full, launch, shared_folder
from torch import Tensor

pytest.importorskip("torchtitan")


def cpu_as_accelerator() -> Any:
    """torch.cpu with what torchtitan asks of an accelerator: numbers for its log, and a device with an index."""
    properties = SimpleNamespace(total_memory=1)
    added: dict[str, Any] = {
        "current_device": lambda: 0,
        "empty_cache": lambda: None,
        "get_device_name": lambda device: "CPU",
        "get_device_properties": lambda device: properties,
        "memory_stats": lambda device: {},
        "reset_peak_memory_stats": lambda: None,
    }
    return SimpleNamespace(**vars(torch.cpu) | added)


with patch.multiple(
    torch._utils, _get_available_device_type=lambda: "cpu", _get_device_module=lambda kind: cpu_as_accelerator()
):
    import torchtitan.tools.utils  # it looks for the device when it is imported

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.models.qwen3.config_registry import qwen3_moe_debug
from torchtitan.trainer import Trainer

torchtitan.trainer.time = SimpleNamespace(**vars(time) | {"sleep": lambda seconds: None})  # it sleeps before it ends

SEQUENCE, BATCH, STEPS = 16, 8, 3


class Tokens(BaseDataLoader):
    """The same batch of tokens for a step, however many ranks share it."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Any, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **how: Any) -> None:
        self.rows = slice(dp_rank * local_batch_size, (dp_rank + 1) * local_batch_size)
        self.step = 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            tokens = torch.randint(2048, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(self.step))[self.rows]
            self.step += 1
            positions = torch.arange(SEQUENCE).expand(len(tokens), -1).contiguous()
            yield {"input": tokens[:, :-1].contiguous(), "positions": positions}, tokens[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


class NoTokenizer(BaseTokenizer):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Any, **how: Any) -> None:
        super().__init__()

    def encode(self, *text: Any, **how: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *tokens: Any, **how: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return 2048


def all_to_all(outputs: list[Tensor], inputs: list[Tensor], group: Any = None, async_op: bool = False) -> None:
    """torch.distributed.all_to_all for tensors of different sizes, which gloo takes in one tensor only."""
    ours, theirs = [one.numel() for one in inputs], [one.numel() for one in outputs]
    received = outputs[0].new_empty(sum(theirs))
    dist.all_to_all_single(received, torch.cat([one.flatten() for one in inputs]), theirs, ours, group)
    for output, part in zip(outputs, received.split(theirs)):
        output.copy_(part.view_as(output))


def configured(folder: Path, kind: str, **settings: Any) -> Any:
    """The debug model of torchtitan's registry with two of its layers, at torchtitan's defaults but for what a CPU asks for."""
    config = llama3_debugmodel() if kind == "dense" else qwen3_moe_debug()
    model = config.model_spec.model
    model.layers = model.layers[:2]
    for _, _, parent, name in list(model.traverse(FlexAttention.Config)):
        setattr(parent, name, ScaledDotProductAttention.Config())  # flex attention has no backward on a CPU
    for _, experts, _, _ in model.traverse(GroupedExperts.Config):
        experts.hidden_dim = 32  # smaller checkpoints
    config.tokenizer, config.dataloader, config.dump_folder = NoTokenizer.Config(), Tokens.Config(), str(folder)
    config.training.seq_len, config.training.disable_cuda_graphs = SEQUENCE, True
    config.training.mixed_precision_param = "float32"
    config.optimizer.param_groups[0].optimizer_kwargs["eps"] = 1e-4  # so that the rounding of a gradient near 0 does not matter
    config.checkpoint = CheckpointManager.Config(enable=True, interval=STEPS - 1, last_save_model_only=False)
    config.validator.enable = False
    for name, value in settings.items():
        section, _, field = name.partition("__")
        setattr(getattr(config, section), field, value)
    return config


def run(config: Any, load_step: int = -1) -> tuple[Any, dict[int, float]]:
    """A Trainer after its steps, and its loss by step."""
    losses: dict[int, float] = {}
    config.training.steps, config.checkpoint.load_step = STEPS, load_step
    config.training.local_batch_size = BATCH // (dist.get_world_size() // config.parallelism.tensor_parallel_degree)
    trainer = Trainer(config)
    log = trainer.metrics_processor.log

    def note(step: int, loss: float, *more: Any, **named: Any) -> None:
        losses[step] = loss
        log(step, loss, *more, **named)

    trainer.metrics_processor.log = note
    trainer.train()
    trainer.close()
    return trainer, losses


def weights_of(trainer: Any) -> dict[str, Tensor]:
    return {name: full(value).detach().clone() for name, value in trainer.model_parts[0].state_dict().items()}


def unsharded(rank: int, size: int, *, place: Path, kind: str) -> None:
    """Save torchtitan's seed checkpoint, and train from it without any parallelism."""
    seed = Trainer(configured(place / "seed", kind, checkpoint__create_seed_checkpoint=True))
    seed.checkpointer.save(curr_step=0, last_step=True)
    seed.close()
    config = configured(place / "unsharded", kind, checkpoint__initial_load_path=str(place / "seed/checkpoint/step-0"))
    config.model_spec = dataclasses.replace(config.model_spec, parallelize_fn=lambda model, **how: model)
    trainer, losses = run(config)
    torch.save((losses, weights_of(trainer)), place / "expected")


def sharded(rank: int, size: int, *, place: Path, kind: str, settings: dict[str, Any]) -> None:
    torch.autograd.set_multithreading_enabled(False)  # as torchtitan's init_distributed does, which finds a process group here
    dist.all_to_all = all_to_all
    losses, weights = torch.load(place / "expected")
    folder = shared_folder()
    start = configured(folder, kind, checkpoint__initial_load_path=str(place / "seed/checkpoint/step-0"), **settings)
    first, found = run(start)
    assert_sharded_by_us(first.model_parts[0])
    trained = weights_of(first)
    if start.training.mixed_precision_param == "bfloat16":
        assert found == pytest.approx(losses, rel=2**-8)
    else:
        assert found == pytest.approx(losses, rel=1e-5)
        torch.testing.assert_close(trained, weights, rtol=1e-5, atol=1e-5)  # a step of AdamW is about 1e-3
    again, found_again = run(configured(folder, kind, **settings), load_step=STEPS - 1)
    assert found_again == {STEPS: found[STEPS]}
    torch.testing.assert_close(weights_of(again), trained, rtol=0, atol=0)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("torchtitan")


SHARD, REPLICAS, TENSOR, EXPERTS = (
    f"parallelism__{name}_degree"
    for name in ("data_parallel_shard", "data_parallel_replicate", "tensor_parallel", "expert_parallel")
)
TYPED = {"debug__spmd_typechecking": True}
MODES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "fsdp": ("dense", 2, {}),
    "fsdp, default precision": ("dense", 2, {"training__mixed_precision_param": "bfloat16"}),
    "never": ("dense", 2, {"parallelism__fsdp_reshard_after_forward": "never"}),
    "hsdp": ("dense", 4, {REPLICAS: 2}),
    "tp": ("dense", 4, {TENSOR: 2}),
    "hsdp and tp": ("dense", 8, {REPLICAS: 2, TENSOR: 2}),
    "experts": ("experts", 2, {EXPERTS: 2}),
    "experts of four": ("experts", 4, {EXPERTS: 4}),
    "experts and tp": ("experts", 4, {EXPERTS: 2, TENSOR: 2}),
    "experts sharded": ("experts", 4, {EXPERTS: 2}),
    "fsdp, checked": ("dense", 2, TYPED),
    "tp, checked": ("dense", 4, TYPED | {TENSOR: 2}),
    "experts, checked": ("experts", 2, TYPED | {EXPERTS: 2}),
}
"""Kind of model, ranks, and settings of a mode."""


@pytest.mark.parametrize("mode", MODES)
def test_the_trainer_trains_and_resumes_as_without_parallelism(mode: str, place: Path) -> None:
    """Losses and weights of three steps are those of the unsharded model; a second Trainer in the process resumes to the same bits."""
    kind, size, settings = MODES[mode]
    if not (place / kind / "expected").exists():
        launch(unsharded, size=1, place=place / kind, kind=kind)
    launch(sharded, size=size, place=place / kind, kind=kind, settings=settings)
