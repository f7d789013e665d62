"""Lightning's model-parallel strategy (Fabric and Trainer): what its parallelize hook shards trains as if it were not."""

from __future__ import annotations

import os
import signal
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("lightning")

import tiny
from launch import assert_sharded_by_us, full, launch, mean_over_ranks, shared_folder

STEPS, ROWS, DIM = 4, 8, 7


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(5, DIM)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(DIM, 13), nn.Tanh(), nn.Linear(13, DIM)) for _ in range(3))
        self.out = nn.Linear(DIM, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = x + block(x)
        return self.out(x)


def _net() -> Net:
    torch.manual_seed(0)
    return Net()


def _batch(step: int) -> Tensor:
    return torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(step))


def _shard(model: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard  # as Lightning's documentation has it: named when it is needed

    for block in model.blocks:
        fully_shard(block, mesh=mesh["data_parallel"])
    fully_shard(model, mesh=mesh["data_parallel"])
    assert_sharded_by_us(model)
    return model


def _reference(model: nn.Module, *, steps: int, accumulate: int, max_norm: float) -> tuple[list[float], list[float]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, norms = [], []
    for step in range(steps):
        for micro in range(accumulate):
            loss = model(_batch(step * accumulate + micro)).square().mean()
            (loss / accumulate).backward()
            losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def _same_parameters(got: nn.Module, want: nn.Module) -> None:
    expected = dict(want.named_parameters())
    for name, parameter in got.named_parameters():
        tiny.assert_near(full(parameter.detach()), expected[name].detach(), name)


# --- Fabric ------------------------------------------------------------------------------------------------------------


def _fabric(size: int, **options: Any) -> Any:
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.fabric.strategies import ModelParallelStrategy

    strategy = ModelParallelStrategy(_shard, data_parallel_size=size, tensor_parallel_size=1, **options)
    fabric = Fabric(accelerator="cpu", devices=size, strategy=strategy, plugins=[TorchElasticEnvironment()])
    fabric.launch()
    return fabric


def _fabric_training(rank: int, size: int) -> None:
    fabric = _fabric(size)
    model = fabric.setup_module(_net())
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    losses, norms = [], []
    for number in range(STEPS * 2):
        last = number % 2 == 1
        with fabric.no_backward_sync(model, enabled=not last):
            loss = model(tiny.mine(_batch(number), rank, size)).square().mean()
            fabric.backward(loss / 2)
        losses.append(mean_over_ranks(loss.item()))
        if last:
            assert all(parameter.grad is not None for parameter in model.parameters())
            norms.append(full(fabric.clip_gradients(model, optimizer, max_norm=0.5)).item())
            optimizer.step()
            optimizer.zero_grad()
        else:
            assert all(parameter.grad is None for parameter in model.parameters())

    reference = _net()
    want_losses, want_norms = _reference(reference, steps=STEPS, accumulate=2, max_norm=0.5)
    tiny.assert_near(losses, want_losses, "losses")
    tiny.assert_near(norms, want_norms, "gradient norms")
    _same_parameters(model.module, reference)


def test_fabric_accumulates_clips_and_steps_like_one_process():
    launch(_fabric_training)


def _fabric_checkpoint(rank: int, size: int, *, distributed: bool) -> None:
    fabric = _fabric(size, save_distributed_checkpoint=distributed)

    def train(model: nn.Module, optimizer: Any, steps: range) -> list[float]:
        losses = []
        for step in steps:
            loss = model(tiny.mine(_batch(step), rank, size)).square().mean()
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(mean_over_ranks(loss.item()))
        return losses

    def fresh() -> tuple[Any, Any]:
        with fabric.init_module(empty_init=True):  # on meta: setup_module materializes the shards
            model = Net()
        model = fabric.setup_module(model)
        return model, fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))

    model, optimizer = fresh()
    train(model, optimizer, range(2))
    path = shared_folder() / "checkpoint"
    fabric.save(path, {"model": model, "optimizer": optimizer, "step": 2})
    fabric.barrier()
    expected = train(model, optimizer, range(2, 4))

    other, other_optimizer = fresh()
    train(other, other_optimizer, range(1))  # the optimizer has a state to load into
    rest = {"model": other, "optimizer": other_optimizer, "step": 0}
    fabric.load(path, rest)
    assert rest["step"] == 2
    tiny.assert_near(train(other, other_optimizer, range(2, 4)), expected, "losses after loading", 1e-6)


@pytest.mark.parametrize("distributed", [True, False], ids=["shards", "one_file"])
def test_fabric_resumes_a_model_that_was_made_on_meta_from_its_checkpoint(distributed):
    launch(_fabric_checkpoint, distributed=distributed)


# --- Trainer -----------------------------------------------------------------------------------------------------------


def _trainer(rank: int, size: int, *, distributed: bool) -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import ModelParallelStrategy

    losses: list[float] = []

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = _net()

        def configure_model(self) -> None:
            from torch.distributed.fsdp import FSDPModule

            if not isinstance(self.net, FSDPModule):
                _shard(self.net, self.device_mesh)

        def training_step(self, batch: Tensor, number: int) -> Tensor:
            loss = self.net(batch).square().mean()
            losses.append(mean_over_ranks(loss.item()))
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)

    folder = shared_folder()

    def trainer(epochs: int) -> Any:
        return pl.Trainer(
            accelerator="cpu",
            devices=size,
            strategy=ModelParallelStrategy(
                data_parallel_size=size, tensor_parallel_size=1, save_distributed_checkpoint=distributed
            ),
            plugins=[TorchElasticEnvironment()],
            max_epochs=epochs,
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )

    mine = [tiny.mine(_batch(step), rank, size) for step in range(2)]
    loader = torch.utils.data.DataLoader(mine, batch_size=None)
    first = trainer(1)
    first.fit(Module(), loader)
    first.save_checkpoint(folder / "trained.ckpt")
    module = Module()
    trainer(2).fit(module, loader, ckpt_path=folder / "trained.ckpt")

    reference = _net()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    expected = []
    for _ in range(2):
        for step in range(2):
            loss = reference(_batch(step)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            expected.append(loss.item())
    tiny.assert_near(losses, expected, "losses of two epochs, the second one resumed")
    _same_parameters(module.net, reference)


@pytest.mark.parametrize("distributed", [True, False], ids=["shards", "one_file"])
def test_trainer_fits_and_resumes_like_one_process(distributed):
    launch(_trainer, distributed=distributed)


# --- Slurm -------------------------------------------------------------------------------------------------------------


def _requeued(rank: int, size: int, *, within_a_step: bool, distributed: bool) -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.plugins.environments import SLURMEnvironment
    from lightning.pytorch.strategies import ModelParallelStrategy
    from lightning.pytorch.trainer.connectors import signal_connector

    slurm = {"PROCID": rank, "LOCALID": rank, "NODEID": 0, "NTASKS": size, "NTASKS_PER_NODE": size, "JOB_ID": 4711}
    os.environ.update({f"SLURM_{name}": str(value) for name, value in slurm.items()})
    folder, requeued_at = shared_folder(), 2

    class Module(pl.LightningModule):
        def __init__(self, net: nn.Module, *, told: bool) -> None:
            super().__init__()
            self.net, self.told, self.losses = net, told, {}

        def tell(self, now: bool) -> None:
            if now and self.told and self.global_step == requeued_at:
                self.told = False
                os.kill(os.getpid(), signal.SIGUSR1)  # as Slurm does to every rank before the time is up

        def configure_model(self) -> None:
            _shard(self.net, self.device_mesh)

        def training_step(self, batch: int, number: int) -> Tensor:
            loss = self.net(tiny.mine(_batch(self.global_step), rank, size)).square().mean()
            self.tell(within_a_step)
            self.losses[self.global_step] = mean_over_ranks(loss.item())
            return loss

        def on_train_batch_end(self, *arguments: Any) -> None:
            self.tell(not within_a_step)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)

    def fit(module: Module) -> None:
        strategy = ModelParallelStrategy(
            data_parallel_size=size, tensor_parallel_size=1, save_distributed_checkpoint=distributed
        )
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=size,
            strategy=strategy,
            plugins=[SLURMEnvironment(auto_requeue=True)],
            max_steps=STEPS,
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        trainer.fit(module, torch.utils.data.DataLoader(range(STEPS), batch_size=None))

    first = Module(_net(), told=True)
    with mock.patch.object(signal_connector, "call", return_value=0) as called:
        fit(first)
    assert [one.args[0] for one in called.call_args_list] == [["scontrol", "requeue", "4711"]] * (rank == 0)
    assert (folder / "hpc_ckpt_1.ckpt").exists()
    torch.manual_seed(1)
    second = Module(Net(), told=False)
    fit(second)  # without a path: Lightning finds the checkpoint by itself, on Slurm

    reference = _net()
    expected, _ = _reference(reference, steps=STEPS, accumulate=1, max_norm=float("inf"))
    tiny.assert_near(list(first.losses.values()), expected, "losses of the run that was told to requeue, and went on")
    assert list(second.losses) == list(range(requeued_at, STEPS))
    tiny.assert_near(list(second.losses.values()), expected[requeued_at:], "losses of the requeued run")
    for module in (first, second):
        _same_parameters(module.net, reference)


@pytest.mark.parametrize(
    ("within_a_step", "distributed"), [(False, True), (True, False)], ids=["after_a_step", "within_a_step"]
)
def test_a_slurm_requeue_saves_all_ranks_and_resumes_like_an_uninterrupted_run(within_a_step, distributed):
    """The signal comes after a step, or between a forward and its backward, with root parameters gathered. The checkpoint has
    shards or is one file."""
    launch(_requeued, within_a_step=within_a_step, distributed=distributed)
