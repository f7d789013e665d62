"""Ranks that are threads of one process, as in PyTorch's own tests: each has its runtime, its names and its meshes."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Block, Stack, assert_near, assert_same_parameters, batch, shard_stack, square, train_both
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import fullshard
from fullshard import fully_shard
from fullshard.compat import FullyShardedDataParallel

common = pytest.importorskip("torch.testing._internal.common_distributed", exc_type=ImportError)
fsdp = pytest.importorskip("torch.testing._internal.common_fsdp", exc_type=ImportError)
_DRAWING = threading.Lock()  # threads share the generator


def built(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    with _DRAWING:
        torch.manual_seed(seed)
        return make()


class WithScalar(nn.Module):
    """A scalar is held alike by all ranks, for which a hybrid mesh needs a process group of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = Stack(1), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale


class TestTwoThreads(common.MultiThreadedTestCase):
    """The body of each test runs in as many threads as the world has ranks."""

    @property
    def world_size(self) -> int:
        return 2

    def setUp(self) -> None:
        super().setUp()
        self._spawn_threads()

    @property
    def world(self) -> Any:
        mesh = init_device_mesh("cpu", (self.world_size,), mesh_dim_names=("shard",))
        return SimpleNamespace(rank=self.rank, size=self.world_size, mesh=mesh, mine=self.mine)

    def mine(self, whole: Tensor) -> Tensor:
        return whole.chunk(self.world_size)[self.rank]

    def test_training_equals_the_unsharded_model(self) -> None:
        world = self.world
        for options in ({}, {"reshard_after_forward": False}, {"offload_policy": fullshard.CPUOffloadPolicy(pin_memory=False)}):
            train_both(world, built(Stack), lambda model: shard_stack(model, world.mesh, **options))

    def test_models_that_threads_draw_from_one_generator_are_taken_as_they_are(self) -> None:
        """However they are seeded they differ; PyTorch's own tests look at the shards alone."""
        torch.manual_seed(0)
        model = nn.Linear(5, 7)
        whole = model.weight.detach().clone()
        fully_shard(model)
        assert torch.equal(model.weight.to_local(), self.mine(whole))

    def test_the_mesh_of_all_ranks_is_made_for_each_of_them(self) -> None:
        train_both(self.world, built(Stack), fully_shard)
        assert not fullshard.any_failed()
        assert fullshard.any_failed(failed=self.rank == 1)

    def test_process_groups_of_our_own_are_made_by_all_threads_at_once(self) -> None:
        world = self.world

        def shard(model: nn.Module) -> None:
            shard_stack(model, world.mesh)
            model.set_separate_reduce_scatter_group(True)

        for _ in range(3):
            train_both(world, built(Stack), shard, steps=2)

    def test_a_state_dict_is_saved_and_loaded(self) -> None:
        world, plain = self.world, built(Stack)
        model = shard_stack(copy.deepcopy(plain), world.mesh)
        found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        if self.rank == 0:
            for name, value in plain.state_dict().items():
                assert torch.equal(found[name], value)
        other = shard_stack(built(Stack, 1), world.mesh)
        set_model_state_dict(other, plain.state_dict(), options=StateDictOptions(full_state_dict=True))
        assert_same_parameters(other, plain)

    def test_materialize_draws_the_same_weights_on_every_thread(self) -> None:
        world = self.world
        expected = built(lambda: nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)), 3)
        dist.barrier()  # what a thread draws others would miss
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        for layer in model:
            fully_shard(layer, mesh=world.mesh)
        fullshard.materialize(fully_shard(model, mesh=world.mesh), seed=3)
        assert_same_parameters(model, expected, tolerance=0.0)

    def test_gradients_are_clipped_by_their_norm_over_all_ranks(self) -> None:
        world, plain = self.world, built(Stack)
        model = shard_stack(copy.deepcopy(plain), world.mesh)
        square(plain(batch(0))).backward()
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
        for clip in (fullshard.clip_grad_norm_, nn.utils.clip_grad_norm_):
            model.zero_grad()
            square(model(self.mine(batch(0)))).backward()
            assert_near(clip(model.parameters(), 0.01), expected, "norm")
            for ours, theirs in zip(model.parameters(), plain.parameters()):
                assert_near(ours.grad, theirs.grad, "clipped gradient")

    def test_accumulation_and_units_that_one_rank_does_not_run(self) -> None:
        world, plain = self.world, built(Stack)
        model = shard_stack(copy.deepcopy(plain), world.mesh)
        for step in range(2):
            for m, part in ((model, self.mine), (plain, lambda x: x)):
                if m is model:
                    model.set_requires_gradient_sync(step == 1)
                square(m(part(batch(step)))).backward()
        for ours, theirs in zip(model.parameters(), plain.parameters()):
            assert_near(ours.grad, theirs.grad, "gradient")
        (model(self.mine(batch(2))).sum() if self.rank == 0 else model.join()).backward()

    def test_fsdp1_wrappers_train_and_save(self) -> None:
        plain = built(Stack)
        model = FullyShardedDataParallel(copy.deepcopy(plain), auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True)
        square(model(self.mine(batch(0)))).backward()
        square(plain(batch(0))).backward()
        for ours, theirs in zip(model.parameters(), plain.parameters()):
            assert_near(ours.grad, theirs.grad, "gradient")
        for name, value in model.state_dict().items():
            assert torch.equal(value, plain.state_dict()[name])


class TestFourThreads(TestTwoThreads):
    @property
    def world_size(self) -> int:
        return 4

    def test_hybrid_meshes_train_as_the_unsharded_model(self) -> None:
        world = self.world
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        train_both(world, built(Stack), lambda model: shard_stack(model, mesh))
        train_both(world, built(WithScalar), partial(fully_shard, mesh=mesh))

    def test_a_part_kept_after_forward_is_kept_by_two_neighbours(self) -> None:
        world = self.world
        train_both(world, built(Stack), lambda model: shard_stack(model, world.mesh, reshard_after_forward=2))

    def test_two_halves_of_the_ranks_train_different_models(self) -> None:
        """Their process groups have equal sizes, and each thread makes only its own."""
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("model", "shard"))["shard"]
        half = self.rank // 2
        world = SimpleNamespace(rank=self.rank % 2, size=2, mesh=mesh, mine=lambda x: x.chunk(2)[self.rank % 2])
        train_both(world, built(partial(Stack, 1 + half), half), lambda model: shard_stack(model, mesh), steps=2 + half)


class TestAsForFSDP2(fsdp.FSDPTestMultiThread):
    """A program for torch's `fully_shard`, with the helpers of PyTorch's own tests of it."""

    @property
    def world_size(self) -> int:
        return 4

    def setUp(self) -> None:
        fullshard.install()
        super().setUp()

    def tearDown(self) -> None:
        super().tearDown()
        fullshard.uninstall()

    def test_shards_and_gradients_are_those_of_a_replicated_model(self) -> None:
        self.run_subtests({"shape": [(4,), (2, 2)], "reshard_after_forward": [True, False, 2]}, self.train)

    def train(self, shape: tuple[int, ...], reshard_after_forward: bool | int) -> None:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        replicated = built(lambda: nn.Sequential(*(fsdp.MLP(8) for _ in range(3))), 42)
        model = copy.deepcopy(replicated)
        for layer in (*model, model):
            dist.fsdp.fully_shard(layer, mesh=mesh, reshard_after_forward=reshard_after_forward)
        assert isinstance(model, dist.fsdp.FSDPModule)
        optimizers = [torch.optim.SGD(m.parameters(), lr=1e-2, momentum=0.9) for m in (replicated, model)]
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(self.rank))
        for step in range(3):
            losses = []
            for m, optimizer in zip((replicated, model), optimizers):
                optimizer.zero_grad(set_to_none=step % 2 == 0)
                losses.append(m(inputs).sum())
                losses[-1].backward()
            for parameter in replicated.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad.div_(self.world_size)
            self.assertEqual(losses[0], losses[1])
            fsdp.check_sharded_parity(self, replicated, model)
            for optimizer in optimizers:
                optimizer.step()
            fsdp.check_sharded_parity(self, replicated, model)
