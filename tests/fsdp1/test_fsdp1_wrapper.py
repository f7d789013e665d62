"""Scripts written for FSDP1 run with the import changed. torch's has no CPU path, so the unsharded model is the oracle."""

from __future__ import annotations

import copy
import functools
import io
import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from expecttest import assert_expected_inline
from harness import World, ranks
from models import (
    Block,
    Stack,
    assert_near,
    assert_same_grads,
    assert_same_parameters,
    batch,
    full,
    rounding,
    share_grads,
    square,
)
from torch import Tensor, nn
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._shard_utils import _create_chunk_sharded_tensor

import fullshard
from fullshard import StateError
from fullshard.compat import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    OptimStateKeyType,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from fullshard.compat import FullyShardedDataParallel as FSDP
from fullshard.fsdp1 import state_dicts
from fullshard.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)

HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
BLOCKS = ModuleWrapPolicy({Block})


def wrapped(model: nn.Module, **arguments: Any) -> FSDP:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FSDP(copy.deepcopy(model), use_orig_params=True, **arguments)


def train(world: World, model: nn.Module, sharded: FSDP, steps: int = 3, tolerance: float | None = None) -> Any:
    """Both, step by step; losses of parts average to those of all. Returns the optimizers."""
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (sharded, model))
    for step in range(steps):
        loss = square(sharded(world.mine(batch(step))))
        expected = square(model(batch(step)))
        loss.backward(), expected.backward()
        assert_same_grads(sharded, model, tolerance)
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        assert_near(mean / world.size, expected.detach(), "loss", tolerance)
        share_grads(sharded, model)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(sharded, model)
    return ours, theirs


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises((ValueError, StateError)) as raised:
        call()
    return str(raised.value)


# --- training -------------------------------------------------------------------------------------------------------------


@pytest.mark.rotates(2)
@pytest.mark.parametrize("strategy", list(ShardingStrategy), ids=lambda strategy: strategy.name)
@ranks(2, 4)
def test_every_strategy_trains_as_the_plain_model(world: World, strategy: ShardingStrategy) -> None:
    model = Stack()
    mesh = None
    if strategy in HYBRID:
        mesh = init_device_mesh("cpu", (2, world.size // 2), mesh_dim_names=("replicate", "shard"))
    sharded = wrapped(model, sharding_strategy=strategy, auto_wrap_policy=BLOCKS, device_mesh=mesh)
    whole = all(p.to_local().shape == p.shape for p in sharded.parameters())
    assert whole is (strategy is ShardingStrategy.NO_SHARD or (strategy in HYBRID and world.size == 2))
    train(world, model, sharded)


@pytest.mark.parametrize("strategy", list(ShardingStrategy), ids=lambda strategy: strategy.name)
@ranks(2)
def test_strategies_differ_in_what_they_send(world: World, strategy: ShardingStrategy) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard")) if strategy in HYBRID else None
    sharded = wrapped(Stack(), sharding_strategy=strategy, auto_wrap_policy=BLOCKS, device_mesh=mesh)
    with fullshard.counting(sharded) as messages:
        square(sharded(world.mine(batch(0)))).backward()
    gathers = sum(m.kind == "all_gather" and m.ranks > 1 for m in messages)
    keeps = strategy in (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2)
    assert gathers == (0 if strategy is ShardingStrategy.NO_SHARD else 4 if keeps else 7)  # the outermost is kept


POLICIES: dict[str, tuple[Any, int]] = {
    "ModuleWrapPolicy": (BLOCKS, 4),
    "CustomPolicy": (
        CustomPolicy(lambda m: {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP} if type(m) is Block else False),
        4,
    ),
    "transformer": (functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}), 4),
    "size": (functools.partial(size_based_auto_wrap_policy, min_num_params=100), 7),
    "lambda": (functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, nn.LayerNorm)), 4),
    "always": (always_wrap_policy, 15),
    "function": (lambda module, recurse, nonwrapped_numel: recurse or isinstance(module, nn.Linear), 9),
    "auto": ("auto", 4),
}


@pytest.mark.parametrize("kind", POLICIES)
@ranks(2)
def test_auto_wrap_by_each_kind_of_policy(world: World, kind: str) -> None:
    policy, wrappers = POLICIES[kind]
    model = Stack()
    sharded = wrapped(model, auto_wrap_policy=policy)
    assert len(FSDP.fsdp_modules(sharded)) == wrappers
    train(world, model, sharded, steps=2)


@ranks(2)
def test_a_plan_says_what_is_wrapped_and_how(world: World) -> None:
    model = Stack()
    plan = fullshard.plan_model(model)
    plan.drop("blocks.1")
    plan.set("blocks.2", sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    sharded = wrapped(model, auto_wrap_policy=plan)
    assert [isinstance(block, FSDP) for block in sharded.blocks] == [True, False, True]
    train(world, model, sharded, steps=2)
    plan.set("", sharding_strategy=ShardingStrategy.NO_SHARD)
    with pytest.warns(UserWarning, match="are not used. Pass them"):
        FSDP(copy.deepcopy(model), auto_wrap_policy=plan)


@ranks(2)
def test_wrapping_by_hand_bottom_up(world: World) -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)))
    parts = copy.deepcopy(model)
    sharded = FSDP(nn.Sequential(FSDP(parts[0]), parts[1], FSDP(nn.Sequential(FSDP(parts[2][0]), parts[2][1]))))
    assert [name for name, _ in sharded.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert len(FSDP.fsdp_modules(sharded)) == 4
    train(world, model, sharded)
    assert FSDP.fsdp_modules(sharded, root_only=True) == [sharded]
    assert sharded.check_is_root() and not sharded[0].check_is_root()


class Built(nn.Module):
    """Wraps its parts while it is built, if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = wrap(nn.Linear(5, 8)), wrap(nn.Linear(8, 3), use_orig_params=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


@ranks(2)
def test_models_can_wrap_their_parts_while_they_are_built(world: World) -> None:
    model = Built()
    torch.manual_seed(3)
    with enable_wrap(wrapper_cls=FSDP, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP):
        sharded = wrap(Built())
    assert len(FSDP.fsdp_modules(sharded)) == 3 and not isinstance(model.first, FSDP)
    model.load_state_dict(sharded.state_dict())
    train(world, model, sharded, steps=2)


@pytest.mark.parametrize("prefetch", [BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST, None])
@ranks(2)
def test_backward_prefetch_says_when_the_next_unit_is_gathered(world: World, prefetch: Any) -> None:
    model = Stack()
    sharded = wrapped(model, auto_wrap_policy=BLOCKS, backward_prefetch=prefetch, forward_prefetch=True)
    train(world, model, sharded, steps=2)
    before = fullshard.stats(sharded)
    loss = square(sharded(world.mine(batch(5))))
    middle = fullshard.stats(sharded)
    loss.backward()
    after = fullshard.stats(sharded)
    assert middle.prefetched - before.prefetched == 3, "forward is always gathered ahead"
    assert after.prefetched - middle.prefetched == (3 if prefetch is BackwardPrefetch.BACKWARD_PRE else 0)


@ranks(2)
def test_offload_keeps_shards_in_the_hosts_memory(world: World) -> None:
    model = Stack()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(world, model, wrapped(model, auto_wrap_policy=BLOCKS, cpu_offload=CPUOffload(offload_params=True)))


@ranks(2)
def test_no_sync_adds_gradients_without_sending_any(world: World) -> None:
    model = Stack()
    sharded = wrapped(model, auto_wrap_policy=BLOCKS)
    with fullshard.counting(sharded) as messages, sharded.no_sync():
        square(sharded(world.mine(batch(0)))).backward()
    assert {m.kind for m in messages} == {"all_gather", "talk"}  # the first forward compares the ranks' values
    square(sharded(world.mine(batch(1)))).backward()
    (square(model(batch(0))) + square(model(batch(1)))).backward()
    assert_same_grads(sharded, model)
    with pytest.raises(StateError, match="Call it on the outermost"), sharded.blocks[0].no_sync():
        pass


@pytest.mark.parametrize("power", [1.0, 2.0, 3, torch.inf])
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
@ranks(2)
def test_clipping_by_any_norm(world: World, power: float, strategy: ShardingStrategy) -> None:
    model = Stack()
    sharded = wrapped(model, auto_wrap_policy=BLOCKS, sharding_strategy=strategy)
    square(sharded(world.mine(batch(0)))).backward()
    square(model(batch(0))).backward()
    expected = nn.utils.clip_grad_norm_(model.parameters(), 0.01, power)
    assert_near(sharded.clip_grad_norm_(0.01, power), expected, "norm")
    assert_same_grads(sharded, model)


# --- communication hooks --------------------------------------------------------------------------------------------------


def rounded(state: Any, gradient: Tensor, shard: Tensor | None = None) -> None:
    """Averages in bfloat16."""
    total = (gradient / dist.get_world_size()).to(torch.bfloat16)
    dist.all_reduce(total)
    if shard is None:
        gradient.copy_(total)
    else:
        shard.copy_(total.chunk(dist.get_world_size())[dist.get_rank()])


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD])
@pytest.mark.parametrize("compressed", [False, True])
@ranks(2)
def test_hooks_of_torch_reduce_gradients(world: World, strategy: ShardingStrategy, compressed: bool) -> None:
    model = Stack()
    sharded = wrapped(model, auto_wrap_policy=BLOCKS, sharding_strategy=strategy)
    state: Any = default_hooks.DefaultState(dist.group.WORLD)
    hook: Any = default_hooks.allreduce_hook if strategy is ShardingStrategy.NO_SHARD else default_hooks.reduce_scatter_hook
    if compressed:  # torch's own compressing hooks need streams
        hook = rounded
    calls: list[int] = []

    def counted(given: Any, *tensors: Tensor) -> None:
        calls.append(len(tensors))
        hook(given, *tensors)

    sharded.register_comm_hook(state, counted)
    train(world, model, sharded, tolerance=rounding(torch.bfloat16) if compressed else None, steps=1)
    assert calls == [1 if strategy is ShardingStrategy.NO_SHARD else 2] * 4
    with pytest.raises(ValueError, match="called before"):
        sharded.register_comm_hook(state, counted)


@ranks(2)
def test_hybrid_strategies_take_no_hook(world: World) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    sharded = wrapped(Stack(), sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)
    assert_expected_inline(
        refusal(lambda: sharded.register_comm_hook(None, print)),
        """register_comm_hook() cannot be used with HYBRID_SHARD: gradients are reduced in two steps, and a hook replaces one. Use set_all_reduce_hook() of each wrapper, which runs after both.""",
    )


# --- state dicts ----------------------------------------------------------------------------------------------------------


def saved_and_loaded(state: Any) -> Any:
    """Through a file, as a script would."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("kind", list(StateDictType), ids=lambda kind: kind.name)
@ranks(2)
def test_training_goes_on_from_a_checkpoint_of_each_type(world: World, kind: StateDictType) -> None:
    model = Stack()
    sharded = wrapped(model, auto_wrap_policy=BLOCKS)
    optimizer, _ = train(world, model, sharded)
    with FSDP.state_dict_type(sharded, kind):
        saved = saved_and_loaded({"model": sharded.state_dict(), "optimizer": FSDP.optim_state_dict(sharded, optimizer)})
    assert list(saved["model"]) == list(model.state_dict())
    assert list(saved["optimizer"]["state"]) == [name for name, _ in model.named_parameters()]
    other = wrapped(Stack(), auto_wrap_policy=BLOCKS)
    theirs = torch.optim.AdamW(other.parameters(), lr=1e-2)
    with FSDP.state_dict_type(other, kind):
        other.load_state_dict(saved["model"])
        theirs.load_state_dict(FSDP.optim_state_dict_to_load(other, theirs, saved["optimizer"]))
    for m, o in ((sharded, optimizer), (other, theirs)):
        square(m(world.mine(batch(7)))).backward()
        o.step()
    for (name, a), (_, b) in zip(sharded.named_parameters(), other.named_parameters()):
        assert torch.equal(a.to_local(), b.to_local()), name


@ranks(2, 3)
def test_a_full_state_dict_is_that_of_the_plain_model(world: World) -> None:
    model = nn.Sequential(Stack(), nn.BatchNorm1d(3))
    sharded = wrapped(model, auto_wrap_policy=BLOCKS)
    state, expected = sharded.state_dict(), model.state_dict()
    assert list(state) == list(expected)
    for name, value in expected.items():
        assert type(state[name]) is Tensor and torch.equal(state[name], value), name
    plain = nn.Sequential(Stack(), nn.BatchNorm1d(3))
    plain.load_state_dict(state)
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(sharded, StateDictType.FULL_STATE_DICT, config):
        state = sharded.state_dict()
    assert list(state) == (list(expected) if world.rank == 0 else [])
    assert FSDP.get_state_dict_type(sharded).state_dict_config == FullStateDictConfig()


@ranks(2)
def test_a_plain_module_around_wrappers_saves_and_loads_them(world: World) -> None:
    model = nn.Sequential(nn.Linear(5, 7), Block(), Block())
    outer = copy.deepcopy(model)
    outer[1], outer[2] = wrapped(model[1]), wrapped(model[2])
    state = outer.state_dict()
    assert list(state) == list(model.state_dict()) and all(type(v) in (Tensor, nn.Parameter) for v in state.values())
    outer.load_state_dict(nn.Sequential(nn.Linear(5, 7), Block(), Block()).state_dict())
    assert not torch.equal(full(outer[1].up.weight), model[1].up.weight)
    assert outer.load_state_dict(model.state_dict()).missing_keys == []
    assert torch.equal(full(outer[1].up.weight), model[1].up.weight)
    gone = {key: value for key, value in model.state_dict().items() if key != "1.up.weight"}
    assert outer.load_state_dict(gone, strict=False).missing_keys == ["1.up.weight"]


@pytest.mark.parametrize("options", [{}, {"full_state_dict": True}, {"flatten_optimizer_state_dict": True}])
@ranks(2)
def test_functions_of_torch_save_and_load_weights_and_optimizer_states(world: World, options: dict[str, bool]) -> None:
    """set_optimizer_state_dict() did not find what get_optimizer_state_dict() had returned."""
    model, asked = Stack(), StateDictOptions(**options)
    sharded = wrapped(model, auto_wrap_policy=BLOCKS)
    optimizer, plain = train(world, model, sharded, steps=1)
    weights, states = get_state_dict(sharded, optimizer, options=asked)
    named = get_state_dict(model, plain, options=asked)
    assert [weights.keys(), states.keys(), states.get("state", {}).keys()] == [
        named[0].keys(),
        named[1].keys(),
        named[1].get("state", {}).keys(),
    ]
    other = wrapped(Stack(), auto_wrap_policy=BLOCKS)
    resumed = torch.optim.AdamW(other.parameters(), lr=0.5)
    set_state_dict(other, resumed, model_state_dict=weights, optim_state_dict=states, options=asked)
    assert_same_states(optimizer, resumed)
    assert resumed.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert all(torch.equal(full(one), full(two)) for one, two in zip(sharded.parameters(), other.parameters()))


@ranks(2)
def test_types_of_state_dicts_are_set_for_all_wrappers(world: World) -> None:
    sharded = wrapped(Stack(), auto_wrap_policy=BLOCKS)
    before = FSDP.set_state_dict_type(sharded, StateDictType.SHARDED_STATE_DICT)
    assert before.state_dict_type is StateDictType.FULL_STATE_DICT
    assert all(hasattr(value, "placements") for value in sharded.state_dict().values())
    FSDP.set_state_dict_type(sharded.blocks[0], StateDictType.LOCAL_STATE_DICT)
    assert_expected_inline(
        refusal(lambda: FSDP.get_state_dict_type(sharded)),
        """The wrappers in this module have different state dict types. Set one type for all of them.""",
    )
    assert_expected_inline(
        refusal(lambda: FSDP.set_state_dict_type(sharded.blocks[1], StateDictType.FULL_STATE_DICT, ShardedStateDictConfig())),
        """Expected a FullStateDictConfig for FULL_STATE_DICT, got ShardedStateDictConfig.""",
    )
    assert_expected_inline(
        refusal(lambda: FSDP.get_state_dict_type(Stack())),
        """Stack contains no FullyShardedDataParallel. Pass a model that was wrapped.""",
    )


@ranks(2)
def test_the_first_rank_alone_may_hold_the_optimizers_state(world: World) -> None:
    model = Stack()
    sharded = wrapped(model, auto_wrap_policy=BLOCKS)
    optimizer, _ = train(world, model, sharded)
    alone = FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(sharded, StateDictType.FULL_STATE_DICT, None, alone):
        saved = FSDP.optim_state_dict(sharded, optimizer)
        assert bool(saved) is (world.rank == 0)
        other = wrapped(Stack(), auto_wrap_policy=BLOCKS)
        theirs = torch.optim.AdamW(other.parameters(), lr=0.5)
        FSDP.set_state_dict_type(other, StateDictType.FULL_STATE_DICT, None, alone)
        FSDP.optim_state_dict_to_load(other, theirs, saved, load_directly=True)
    assert theirs.param_groups[0]["lr"] == 1e-2
    assert_same_states(optimizer, theirs)


def assert_same_states(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    for a, b in zip(one.param_groups[0]["params"], other.param_groups[0]["params"]):
        assert list(one.state[a]) == list(other.state[b]) != []
        for key, value in one.state[a].items():
            assert type(value) is type(other.state[b][key]) and torch.equal(full(value), full(other.state[b][key])), key


@ranks(2)
def test_the_older_names_of_optimizer_state_dicts(world: World) -> None:
    model = Stack()
    sharded = wrapped(model, auto_wrap_policy=BLOCKS)
    optimizer, plain = train(world, model, sharded)
    everywhere = FSDP.full_optim_state_dict(sharded, optimizer, rank0_only=False)
    for name, parameter in model.named_parameters():
        assert_near(everywhere["state"][name]["exp_avg"], plain.state[parameter]["exp_avg"], name)
    first = FSDP.full_optim_state_dict(sharded, optimizer)
    assert bool(first) is (world.rank == 0)
    sharded_state = FSDP.sharded_optim_state_dict(sharded, optimizer)
    for build in (
        lambda o: FSDP.shard_full_optim_state_dict(everywhere, sharded, optim=o),
        lambda o: FSDP.shard_full_optim_state_dict(everywhere, sharded, optim_input=list(sharded.parameters())),
        lambda o: FSDP.shard_full_optim_state_dict(everywhere, sharded),
        lambda o: FSDP.scatter_full_optim_state_dict(first or None, sharded, optim=o),
        lambda o: FSDP.flatten_sharded_optim_state_dict(sharded_state, sharded, o),
    ):
        other = torch.optim.AdamW(sharded.parameters(), lr=0.5)
        other.load_state_dict(build(other))
        assert_same_states(optimizer, other)
    by_place = FSDP.rekey_optim_state_dict(everywhere, OptimStateKeyType.PARAM_ID, sharded, optim=optimizer)
    assert sorted(by_place["state"]) == list(range(len(list(model.parameters()))))
    torch.optim.AdamW(model.parameters()).load_state_dict(by_place)  # the plain model goes on with it
    by_name = FSDP.rekey_optim_state_dict(plain.state_dict(), OptimStateKeyType.PARAM_NAME, model, optim=plain)
    other = torch.optim.AdamW(sharded.parameters())
    other.load_state_dict(FSDP.shard_full_optim_state_dict(by_name, sharded, optim=other))
    for a, b in zip(optimizer.param_groups[0]["params"], other.param_groups[0]["params"]):
        assert_near(full(other.state[b]["exp_avg"]), full(optimizer.state[a]["exp_avg"]), "exp_avg")


@ranks(2)
def test_states_of_other_parameters_are_refused_by_name(world: World) -> None:
    sharded = wrapped(Stack(), auto_wrap_policy=BLOCKS)
    optimizer = torch.optim.AdamW(sharded.parameters())
    odd = {"state": {"tail.weight": {"step": torch.zeros(())}}, "param_groups": [{"params": ["tail.weight"]}]}
    assert_expected_inline(
        refusal(lambda: FSDP.optim_state_dict_to_load(sharded, optimizer, odd)),
        """The saved optimizer has states for ['tail.weight'], which the optimizer to load does not train. Use the same model and parameters, among them ['inp.weight', 'inp.bias', 'blocks.0.norm.weight'].""",
    )
    with pytest.raises(ValueError, match="nothing|no optimizer state to scatter"):
        FSDP.scatter_full_optim_state_dict(None, sharded, optim=optimizer)
    strange = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    assert_expected_inline(
        refusal(lambda: FSDP.optim_state_dict(sharded, strange)),
        """The optimizer has a parameter of shape (2, 2) that is not in FullyShardedDataParallel. Pass the model that the optimizer was built for, outside of forward, backward and summon_full_params().""",
    )


@ranks(2)
def test_several_parameter_groups_are_saved_as_they_are(world: World) -> None:
    sharded = wrapped(Stack(), auto_wrap_policy=BLOCKS)
    decayed = [p for p in sharded.parameters() if p.ndim > 1]
    others = [p for p in sharded.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW([{"params": others, "weight_decay": 0.0}, {"params": decayed, "lr": 0.1}])
    square(sharded(world.mine(batch(0)))).backward()
    optimizer.step()
    saved = FSDP.optim_state_dict(sharded, optimizer)
    fresh = torch.optim.AdamW([{"params": others}, {"params": decayed}])
    fresh.load_state_dict(FSDP.optim_state_dict_to_load(sharded, fresh, saved))
    assert [(g["weight_decay"], g["lr"]) for g in fresh.param_groups] == [(0.0, 1e-3), (1e-2, 0.1)]


# --- full parameters ------------------------------------------------------------------------------------------------------


@ranks(2)
def test_summoned_parameters_are_full_and_written_back(world: World) -> None:
    model = Stack()
    sharded = wrapped(model, auto_wrap_policy=BLOCKS)
    with FSDP.summon_full_params(sharded):
        for name, parameter in sharded.named_parameters():
            assert torch.equal(parameter, dict(model.named_parameters())[name])
            parameter.data.mul_(2)
    assert torch.equal(full(sharded.head.weight), model.head.weight * 2)
    with FSDP.summon_full_params(sharded, writeback=False):
        sharded.head.weight.data.zero_()
    assert torch.equal(full(sharded.head.weight), model.head.weight * 2)
    with FSDP.summon_full_params(sharded, recurse=False):
        assert sharded.head.weight.shape == (3, 7) and not hasattr(sharded.head.weight, "placements")
        assert hasattr(sharded.blocks[0].up.weight, "placements")
    with FSDP.summon_full_params(sharded, writeback=False, rank0_only=True, offload_to_cpu=True):
        assert hasattr(sharded.head.weight, "placements") is (world.rank != 0)
    square(sharded(world.mine(batch(0)))).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    square(model(batch(0))).backward()
    with FSDP.summon_full_params(sharded, with_grads=True):
        assert_same_grads(sharded, model)
        for parameter in sharded.parameters():
            parameter.grad.mul_(3)
    for parameter in model.parameters():
        parameter.grad.mul_(3)
    assert_same_grads(sharded, model)
    outer = nn.ModuleDict({"a": sharded, "b": nn.Linear(2, 2)})
    with FSDP.summon_full_params(outer):
        assert not any(hasattr(p, "placements") for p in outer.parameters())
    with FSDP.summon_full_params(nn.Linear(2, 2), recurse=False):
        pass


@ranks(2)
def test_apply_sees_full_parameters_and_keeps_what_is_written(world: World) -> None:
    sharded = wrapped(Stack(), auto_wrap_policy=BLOCKS)
    shapes: list[tuple[int, ...]] = []

    @torch.no_grad()
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            shapes.append(tuple(module.weight.shape))
            module.weight.fill_(0.5)

    assert sharded.apply(init) is sharded
    assert shapes == [(7, 5), *[(13, 7), (7, 13)] * 3, (3, 7)]
    assert all((full(p) == 0.5).all() for name, p in sharded.named_parameters() if name.endswith("weight") and p.ndim == 2)


# --- looking through ------------------------------------------------------------------------------------------------------


class Greeting(Stack):
    greeting = "hello"

    def encode(self, x: Tensor) -> Tensor:
        return self(x) + 1


@ranks(1)
def test_a_wrapper_shows_what_it_wraps(world: World) -> None:
    model = Greeting()
    model.register_buffer("scale", torch.ones(2))
    sharded = wrapped(model, auto_wrap_policy=BLOCKS)
    assert isinstance(sharded.module, Greeting) and sharded.greeting == "hello"
    assert isinstance(sharded.blocks[0], FSDP) and isinstance(sharded.blocks[0].module, Block)
    assert torch.equal(sharded.encode(batch(0)), sharded(batch(0)) + 1)
    assert dict(sharded.named_buffers()).keys() == {"scale"}
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = sharded.nothing_like_it
    row = wrapped(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4)))
    assert row[1].out_features == 4
    copied = copy.deepcopy(sharded)
    assert len(FSDP.fsdp_modules(copied)) == 4 and list(copied.state_dict()) == list(model.state_dict())


@ranks(2)
def test_errors_name_units_without_the_wrappers(world: World) -> None:
    sharded = wrapped(Stack(), auto_wrap_policy=BLOCKS)
    sharded(world.mine(batch(0)))
    names = [wrapper.module._fullshard_unit.name for wrapper in FSDP.fsdp_modules(sharded)]
    assert names == ["Stack", "blocks.0", "blocks.1", "blocks.2"]


# --- meta, and ranks that differ ------------------------------------------------------------------------------------------


class Random(Stack):
    """Blocks and leaves can all reset themselves; one buffer is in no state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((3,), 2.0), persistent=False)

    def reset_parameters(self) -> None:
        self.scale.fill_(2.0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


@pytest.mark.parametrize("how", ["reset_parameters", "param_init_fn"])
@ranks(1, 2, 3)
def test_a_model_on_meta_gets_the_same_weights_on_every_rank(world: World, how: str) -> None:
    torch.manual_seed(world.rank)  # whatever each rank draws
    with torch.device("meta"):
        model = Random()

    def init(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)
        module.reset_parameters()

    sharded = FSDP(model, auto_wrap_policy=BLOCKS, param_init_fn=init if how == "param_init_fn" else None)
    plain = Random()
    plain.load_state_dict(sharded.state_dict())
    weights = plain.inp.weight.detach().clone()
    dist.broadcast(weights, 0)
    assert torch.equal(weights, plain.inp.weight) and 0 < weights.std() < 1
    train(world, plain, sharded, steps=2)


@ranks(2)
def test_the_first_rank_has_the_weights_and_gives_them_to_all(world: World) -> None:
    torch.manual_seed(3 + world.rank)
    model = Random()
    expected = copy.deepcopy(model)
    for tensor in [*expected.parameters(), *expected.buffers()]:
        dist.broadcast(tensor.data, 0)
    if world.rank:
        with torch.device("meta"):
            model = Random()
    sharded = FSDP(
        model,
        auto_wrap_policy=BLOCKS,
        sync_module_states=True,
        param_init_fn=lambda module: module.to_empty(device="cpu", recurse=False),
    )
    train(world, expected, sharded, steps=2)


@ranks(2)
def test_ranks_that_disagree_about_meta_all_raise(world: World) -> None:
    with torch.device("meta" if world.rank else "cpu"):
        model = Random()
    assert_expected_inline(
        refusal(lambda: FSDP(model, auto_wrap_policy=BLOCKS)),
        """Some ranks have this module on the meta device and others have values for it. Pass sync_module_states=True to broadcast the values of the first rank.""",
    )


@ranks(2)
def test_ties_survive_meta_within_a_wrapper(world: World) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.mid, self.head = nn.Linear(6, 6, False), nn.Linear(6, 6), nn.Linear(6, 6, False)
            self.head.weight = self.embed.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.mid(self.embed(x))))

    with torch.device("meta"):
        model = Tied()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sharded = FSDP(model)
    state = sharded.state_dict()
    assert torch.equal(state["head.weight"], state["embed.weight"])
    plain = Tied()
    plain.load_state_dict(state)
    x = batch(0, 6)
    square(sharded(world.mine(x))).backward()
    square(plain(x)).backward()
    assert_same_grads(sharded, plain)


# --- mixed precision ------------------------------------------------------------------------------------------------------


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)
        self.register_buffer("offset", torch.ones(3))
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.seen += [x.dtype, self.offset.dtype]
        return self.last(self.norm(x)) + self.offset


@ranks(2)
def test_mixed_precision_of_parameters_gradients_and_buffers(world: World) -> None:
    model = Norms()
    policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sharded = FSDP(copy.deepcopy(model), mixed_precision=policy, auto_wrap_policy=lambda **given: given["recurse"])
    assert any("BatchNorm1d are wrapped on their own, in full precision" in str(w.message) for w in caught)
    assert len(FSDP.fsdp_modules(sharded)) == 2
    out = sharded(batch(0))
    assert out.dtype == torch.bfloat16 and sharded.seen == [torch.bfloat16, torch.bfloat16]
    assert sharded.norm.running_mean.dtype == torch.float32
    assert_near(out.float(), model(batch(0)).detach(), "output", rounding(torch.bfloat16))
    square(out).backward()
    assert {p.grad.dtype for p in sharded.parameters()} == {torch.float32}
    state = sharded.state_dict()
    assert state["offset"].dtype == torch.float32 and sharded.offset.dtype == torch.bfloat16


@pytest.mark.parametrize("root", [True, False])
@pytest.mark.parametrize("below", [True, False])
@ranks(1)
def test_inputs_are_cast_where_it_was_asked_for(world: World, root: bool, below: bool) -> None:
    policy = MixedPrecision(torch.float64, cast_root_forward_inputs=root, cast_forward_inputs=below)
    seen: list[torch.dtype] = []

    class Inner(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.dtype)
            return super().forward(x.to(self.weight.dtype))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.dtype)
            return self.inner(x.to(torch.float32))

    FSDP(Outer(), mixed_precision=policy, auto_wrap_policy=ModuleWrapPolicy({Inner}))(batch(0))
    assert seen == [torch.float64 if root else torch.float32, torch.float64 if below else torch.float32]


# --- process groups and what is left alone --------------------------------------------------------------------------------


@ranks(4)
def test_process_groups_say_where_to_shard_and_replicate(world: World) -> None:
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model = Stack()
    sharded = wrapped(
        model,
        process_group=(rows[world.rank // 2], columns[world.rank % 2]),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        auto_wrap_policy=BLOCKS,
    )
    mesh = sharded.head.weight.device_mesh
    assert mesh.mesh.tolist() == [[0, 1], [2, 3]] and mesh.mesh_dim_names == ("replicate", "shard")
    train(world, model, sharded)
    alone = wrapped(model, process_group=rows[world.rank // 2], auto_wrap_policy=BLOCKS)
    assert alone.head.weight.device_mesh.size() == 2
    copies = wrapped(model, process_group=rows[world.rank // 2], sharding_strategy=ShardingStrategy.NO_SHARD)
    square(copies(batch(world.rank // 2))).backward()
    reference = copy.deepcopy(model)
    reference.zero_grad()
    square(reference(batch(world.rank // 2))).backward()
    assert_same_grads(copies, reference)


@ranks(2)
def test_what_is_ignored_is_left_alone(world: World) -> None:
    model = Stack()
    for arguments in (
        {"ignored_modules": lambda m: [m.blocks[1]]},
        {"ignored_states": lambda m: [m.blocks[1]]},
        {"ignored_states": lambda m: list(m.blocks[1].parameters())},
    ):
        inner = copy.deepcopy(model)
        sharded = FSDP(inner, auto_wrap_policy=BLOCKS, **{key: get(inner) for key, get in arguments.items()})
        plain = {name for name, p in sharded.named_parameters() if not hasattr(p, "placements")}
        assert plain == {name for name, _ in model.named_parameters() if name.startswith("blocks.1.")}
        sharded(world.mine(batch(0)))


@pytest.mark.proves("40a")
@ranks(2)
def test_what_cannot_be_done_is_refused_before_anything_changed(world: World) -> None:
    model = Stack()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    group: Any = dist.group.WORLD
    before = dict(model.named_parameters())
    low = MixedPrecision(torch.bfloat16, keep_low_precision_grads=True)
    hybrid = ShardingStrategy.HYBRID_SHARD
    assert_expected_inline(
        refusal(lambda: FSDP(model, mixed_precision=low)),
        """MixedPrecision(keep_low_precision_grads=True) is not supported: a Parameter's .grad has the dtype of the Parameter, as in all of torch. To keep gradients in low precision, cast the model before wrapping it: model.to(torch.bfloat16)""",
    )
    assert_expected_inline(
        refusal(lambda: FSDP(model, group, device_mesh=mesh)),
        """FullyShardedDataParallel expected process_group or device_mesh, got both. Pass one of them.""",
    )
    assert_expected_inline(
        refusal(lambda: FSDP(model, (group, group))),
        """Expected one ProcessGroup for FULL_SHARD, got a pair, which is for hybrid sharding. Pass one process_group, or sharding_strategy=HYBRID_SHARD.""",
    )
    assert_expected_inline(
        refusal(lambda: FSDP(model, group, hybrid)),
        """HYBRID_SHARD expected a pair of process groups (to shard over, to replicate over), a 2-D device_mesh, or neither, got one process group.""",
    )
    assert_expected_inline(
        refusal(lambda: FSDP(model, device_mesh=mesh)), """FULL_SHARD expected a 1-D device_mesh, got a 2-D one."""
    )
    assert_expected_inline(
        refusal(lambda: FSDP(model, sharding_strategy=hybrid)),
        """Hybrid sharding without a mesh shards within a node, but the 2 ranks cannot be divided into nodes of a known number of ranks. Pass a 2-D device_mesh (replicate, shard), or run under torchrun.""",
    )
    assert_expected_inline(
        refusal(lambda: FSDP(model, ignored_modules=[], ignored_states=[])),
        """FullyShardedDataParallel expected ignored_modules or ignored_states, got both. Pass only ignored_states.""",
    )
    assert_expected_inline(
        refusal(lambda: FSDP(model, ignored_modules=[model.head.weight])),
        """Expected ignored_modules to contain modules, got a Parameter.""",
    )
    assert_expected_inline(
        refusal(lambda: FSDP(model, device_id=0)),
        """device_id=0 cannot be used: torch finds no accelerator. Omit it, or pass torch.device('cpu').""",
    )
    assert_expected_inline(
        refusal(lambda: FSDP(model.head.weight)),
        """Expected an nn.Module to wrap with FullyShardedDataParallel, got Parameter.""",
    )
    odd = CustomPolicy(lambda m: {"reshard_after_forward": True} if type(m) is Block else False)
    assert_expected_inline(
        refusal(lambda: FSDP(model, auto_wrap_policy=odd)),
        """The policy returns the option 'reshard_after_forward' for 'blocks.0', which FullyShardedDataParallel does not have. Expected one of ['backward_prefetch', 'cpu_offload', 'device_id', 'device_mesh', 'forward_prefetch', 'ignored_modules', 'ignored_states', 'limit_all_gathers', 'mixed_precision', 'param_init_fn', 'process_group', 'sharding_strategy', 'sync_module_states', 'use_orig_params'].""",
    )
    assert dict(model.named_parameters()) == before and type(model) is Stack


@ranks(1)
def test_wrapping_what_is_wrapped_names_it(world: World) -> None:
    model = nn.Sequential(FSDP(nn.Linear(2, 2)), nn.Linear(2, 2))
    assert_expected_inline(
        refusal(lambda: FSDP(model, auto_wrap_policy=always_wrap_policy)),
        """Modules ['0'] are units already. A plan needs a model without units. Call fully_shard() yourself on the other modules, or undo(model) first.""",
    )


@ranks(1)
def test_arguments_that_mean_nothing_here_are_said_once(world: World) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        FSDP(nn.Linear(2, 2), limit_all_gathers=False), FSDP(nn.Linear(2, 2), limit_all_gathers=False)
    assert [str(w.message).split(" has no effect")[0] for w in caught] == ["use_orig_params=False", "limit_all_gathers=False"]


# --- told by a hostile reading --------------------------------------------------------------------------------------------


@ranks(2)
def test_what_no_sync_kept_can_be_discarded_and_is_not_clipped(world: World) -> None:
    """zero_grad() of the wrapper never reached the unit's, so a dropped microbatch was added to the next step."""
    model = Stack()
    sharded = wrapped(model, auto_wrap_policy=BLOCKS)
    with sharded.no_sync():
        square(sharded(world.mine(batch(0)))).backward()
    with pytest.raises(StateError, match="accumulated on each rank only"):
        sharded.clip_grad_norm_(1.0)
    sharded.zero_grad()
    square(sharded(world.mine(batch(1)))).backward()
    square(model(batch(1))).backward()
    assert_same_grads(sharded, model)


@ranks(2)
def test_a_copy_has_hooks_of_its_own(world: World) -> None:
    """Original and copy shared the list that the hook was in, but not the wrapper's view of it."""
    model = Stack()
    first = wrapped(model, auto_wrap_policy=BLOCKS, sharding_strategy=ShardingStrategy.NO_SHARD)
    second, third = copy.deepcopy(first), copy.deepcopy(first)
    second.register_comm_hook(default_hooks.DefaultState(dist.group.WORLD), default_hooks.allreduce_hook)
    square(model(batch(0))).backward()
    for each in (first, second, third, copy.deepcopy(second)):
        square(each(world.mine(batch(0)))).backward()
        assert_same_grads(each, model)


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
@ranks(2)
def test_what_was_saved_does_not_change_with_training(world: World, strategy: ShardingStrategy) -> None:
    """The number of steps, buffers, and under NO_SHARD all weights, were the very memory that training went on in."""
    sharded = wrapped(nn.Sequential(Stack(), nn.BatchNorm1d(3)), auto_wrap_policy=BLOCKS, sharding_strategy=strategy)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.1)

    def step() -> None:
        square(sharded(world.mine(batch(0)))).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    weights, states = sharded.state_dict(), FSDP.optim_state_dict(sharded, optimizer)
    before = copy.deepcopy((weights, states))
    others = [torch.optim.AdamW(sharded.parameters()) for _ in range(2)]
    for other in others:
        FSDP.optim_state_dict_to_load(sharded, other, states, load_directly=True)
    step()
    square(sharded(world.mine(batch(0)))).backward()
    others[0].step()
    for name, value in weights.items():
        assert torch.equal(value, before[0][name]), name
    for name, values in states["state"].items():
        for key, value in values.items():
            assert torch.equal(value, before[1]["state"][name][key]), (name, key)
            assert torch.equal(full(others[1].state[dict(sharded.named_parameters())[name]][key]), value)


@ranks(2)
def test_activation_checkpointing_may_come_after_wrapping(world: World) -> None:
    """Between the wrapper and its unit, it hid the unit: saving died with an empty AssertionError, summoning did nothing."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    model = Stack()
    sharded = wrapped(model, auto_wrap_policy=BLOCKS)
    apply_activation_checkpointing(sharded, check_fn=lambda module: isinstance(module, Block))
    train(world, model, sharded, steps=2)
    assert list(sharded.state_dict()) == list(model.state_dict())
    sharded.load_state_dict(Stack().state_dict())
    assert isinstance(sharded.blocks[0].module, Block)
    with FSDP.summon_full_params(sharded.blocks[0], recurse=False):
        assert not hasattr(sharded.blocks[0].module.up.weight, "placements")
    sharded.register_comm_hook(default_hooks.DefaultState(dist.group.WORLD), default_hooks.reduce_scatter_hook)
    model.load_state_dict(sharded.state_dict())
    train(world, model, sharded, steps=1)
    copied = copy.deepcopy(sharded)
    train(world, copy.deepcopy(model), copied, steps=1)


@ranks(2)
def test_modules_that_were_compiled_apart_load_what_they_saved(world: World) -> None:
    model = Stack()
    inner = copy.deepcopy(model)
    inner.head = torch.compile(inner.head, backend="eager")
    inner.blocks[0] = torch.compile(inner.blocks[0], backend="eager")
    sharded = FSDP(inner, auto_wrap_policy=BLOCKS, use_orig_params=True)
    state = sharded.state_dict()
    assert list(state) == list(model.state_dict())
    result = sharded.load_state_dict(Stack().state_dict())
    assert not result.missing_keys and not result.unexpected_keys
    sharded.load_state_dict(state)
    assert torch.equal(full(sharded.head.weight), model.head.weight)
    with pytest.raises(RuntimeError, match=r"size mismatch for head\.") as wrong:
        sharded.load_state_dict({**state, "head.weight": torch.zeros(2, 2)})
    assert "_fsdp_wrapped_module" not in str(wrong.value)


@ranks(2)
def test_optimizer_states_that_do_not_fit_are_refused_by_name(world: World) -> None:
    model = Stack()
    sharded = wrapped(model, auto_wrap_policy=BLOCKS)
    optimizer, _ = train(world, model, sharded, steps=1)
    saved = FSDP.optim_state_dict(sharded, optimizer)
    fewer = {"state": {}, "param_groups": [{**saved["param_groups"][0], "params": saved["param_groups"][0]["params"][:3]}]}
    assert_expected_inline(
        refusal(lambda: FSDP.optim_state_dict_to_load(sharded, optimizer, fewer)),
        """The saved optimizer has no parameters ['blocks.0.norm.bias', 'blocks.0.up.weight', 'blocks.0.up.bias'], which the optimizer to load trains. Use the same model and parameters.""",
    )
    odd = copy.deepcopy(saved)
    odd["state"]["head.weight"]["exp_avg"] = torch.zeros(2, 2)
    assert_expected_inline(
        refusal(lambda: FSDP.optim_state_dict_to_load(sharded, optimizer, odd)),
        """Expected shape (3, 7) for 'exp_avg' of 'head.weight' in the saved optimizer, got (2, 2).""",
    )
    names = saved["param_groups"][0]["params"]
    split = [{**saved["param_groups"][0], "params": names[:2]}, {**saved["param_groups"][0], "params": names[2:], "lr": 5.0}]
    apart = {"state": saved["state"], "param_groups": split}
    assert_expected_inline(
        refusal(lambda: FSDP.optim_state_dict_to_load(sharded, optimizer, apart)),
        """'inp.weight' and 'blocks.0.norm.weight' are in groups with different settings in the saved optimizer, but in one group of the optimizer to load. Build it with the same groups.""",
    )
    with (
        FSDP.state_dict_type(sharded, StateDictType.LOCAL_STATE_DICT),
        pytest.raises(ValueError, match="the rows of this rank"),
    ):
        FSDP.optim_state_dict_to_load(sharded, optimizer, saved)


@ranks(2)
def test_ranks_may_have_their_optimizer_states_in_another_order(world: World) -> None:
    model = Stack()
    sharded = wrapped(model, auto_wrap_policy=BLOCKS)
    optimizer, plain = train(world, model, sharded, steps=1)
    own = optimizer.state_dict()
    if world.rank:
        own["state"] = {key: dict(reversed(own["state"][key].items())) for key in reversed(own["state"])}
    saved = FSDP.optim_state_dict(sharded, optimizer, own)
    for name, parameter in model.named_parameters():
        assert_near(saved["state"][name]["exp_avg"], plain.state[parameter]["exp_avg"], name)


class Scaled(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


@pytest.mark.parametrize("kind", list(StateDictType), ids=lambda kind: kind.name)
@ranks(2)
def test_parameters_without_dims_keep_their_states(world: World, kind: StateDictType) -> None:
    model = Scaled()
    sharded = wrapped(model, auto_wrap_policy=BLOCKS)
    optimizer, plain = train(world, model, sharded, steps=2)
    with FSDP.state_dict_type(sharded, kind):
        saved = FSDP.optim_state_dict(sharded, optimizer)
        FSDP.optim_state_dict_to_load(sharded, optimizer, saved, load_directly=True)
    for m, o in ((sharded, optimizer), (model, plain)):
        square(m(world.mine(batch(3)) if m is sharded else batch(3))).backward()
        o.step()
    assert_near(full(sharded.scale), model.scale, "scale")


@ranks(2)
def test_apply_shows_modules_of_the_class_they_had(world: World) -> None:
    """`type(module) == nn.Linear`, as torch's tutorial has it, missed every module that was wrapped itself."""
    sharded = wrapped(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), auto_wrap_policy=always_wrap_policy)
    seen: list[type] = []
    sharded.apply(lambda module: seen.append(type(module)))
    assert seen.count(nn.Linear) == 2 and nn.Sequential in seen


class Shared(nn.Module):
    """One buffer in two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.first.register_buffer("mask", torch.ones(4))
        self.second.register_buffer("mask", self.first.mask)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) * self.first.mask.to(x.dtype)) * self.second.mask.to(x.dtype)


@ranks(1)
def test_shared_buffers_stay_shared_and_have_their_dtype_under_every_name(world: World) -> None:
    sharded = FSDP(Shared(), mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16))
    assert sharded.first.mask is sharded.second.mask and sharded.first.mask.dtype == torch.bfloat16
    for kind in (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT):
        with FSDP.state_dict_type(sharded, kind):
            assert {v.dtype for k, v in sharded.state_dict().items() if "mask" in k} == {torch.float32}
    with torch.device("meta"):
        model = Shared()

    def init(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.fill_(1.0)

    fresh = FSDP(model, param_init_fn=init)
    assert fresh.first.mask is fresh.second.mask and not fresh.first.mask.is_meta


@ranks(1)
def test_options_that_a_policy_gives_are_checked_before_anything_changed(world: World) -> None:
    model = Stack()
    odd = CustomPolicy(lambda m: {"device_id": 7} if m is model.blocks[2] else type(m) is Block)
    with pytest.raises(ValueError, match="device_id=7"):
        FSDP(model, auto_wrap_policy=odd)
    assert type(model.blocks[0]) is Block and type(model.blocks[0].up.weight) is nn.Parameter


@ranks(2)
def test_a_module_with_two_names_is_wrapped_under_both(world: World) -> None:
    model = nn.Sequential(nn.Linear(5, 7), Block())
    model.append(model[1])
    sharded = wrapped(model, auto_wrap_policy=BLOCKS)
    assert sharded[1] is sharded[2] and isinstance(sharded[1], FSDP)
    train(world, model, sharded, steps=2)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(input=self.first(x)))


@ranks(1)
def test_wrappers_in_mixed_precision_take_keywords_and_can_be_pickled(world: World) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sharded = FSDP(Named(), mixed_precision=MixedPrecision(torch.bfloat16), auto_wrap_policy="auto")
    out = sharded(batch(0))
    assert out.dtype == torch.bfloat16
    again = saved_and_loaded(sharded)
    assert torch.equal(again(batch(1)), sharded(batch(1)))


@ranks(1)
def test_a_module_that_is_partly_on_meta_is_told(world: World) -> None:
    with torch.device("meta"):
        model = nn.Linear(3, 3)
    model.weight = nn.Parameter(torch.ones(3, 3))
    with pytest.warns(UserWarning, match=r"has values for \['weight'\]"):
        FSDP(model)


@ranks(2)
def test_every_block_on_meta_draws_numbers_of_its_own(world: World) -> None:
    """With sync_module_states one seed was set for each wrapper anew: all blocks were alike."""
    for sync in (False, True):
        with torch.device("meta"):
            model = Random()
        sharded = FSDP(model, auto_wrap_policy=BLOCKS, sync_module_states=sync)
        weights = [full(block.up.weight) for block in sharded.blocks]
        assert not torch.equal(weights[0], weights[1]) and not torch.equal(weights[1], weights[2])
        mine = weights[0].clone()
        dist.broadcast(mine, 0)
        assert torch.equal(mine, weights[0])


@ranks(2)
def test_sharded_and_local_states_are_copies_and_go_through_torchs_checkpoints(world: World) -> None:
    """States under LOCAL_STATE_DICT were plain rows, which torch.distributed.checkpoint takes for replicas; sharded ones followed
    the training."""
    sharded = wrapped(Stack(), auto_wrap_policy=BLOCKS)
    optimizer = torch.optim.AdamW(sharded.parameters())

    def step() -> None:
        square(sharded(world.mine(batch(0)))).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    for kind in (StateDictType.LOCAL_STATE_DICT, StateDictType.SHARDED_STATE_DICT):
        with FSDP.state_dict_type(sharded, kind):
            saved = FSDP.optim_state_dict(sharded, optimizer)
            weights = sharded.state_dict()
            before = {name: full(values["exp_avg"]) for name, values in saved["state"].items()}
            values = {name: full(value) for name, value in weights.items()}
            path = world.folder(kind.name)
            dcp.save({"optimizer": saved}, checkpoint_id=path)
            step()
            assert all(torch.equal(full(saved["state"][name]["exp_avg"]), one) for name, one in before.items())
            if kind is StateDictType.SHARDED_STATE_DICT:
                assert all(torch.equal(full(weights[name]), value) for name, value in values.items())
            loaded = {"optimizer": FSDP.optim_state_dict(sharded, optimizer)}
            dcp.load(loaded, checkpoint_id=path)
            optimizer.load_state_dict(FSDP.optim_state_dict_to_load(sharded, optimizer, loaded["optimizer"]))
            back = FSDP.full_optim_state_dict(sharded, optimizer, rank0_only=False)
        for name, one in before.items():
            assert torch.equal(back["state"][name]["exp_avg"].to(one.device), one), (kind, name)


@ranks(2)
def test_what_fsdp1_forwards_or_leaves_alone(world: World) -> None:
    """Attributes of the user's module were hidden; batch norms ran in bf16 with `buffer_dtype` alone; ignored ones were reset."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unit, self.sharded = nn.Linear(3, 3), 3

        def forward(self, x: Tensor) -> Tensor:
            return self.unit(x)

    model = FSDP(Named())
    assert isinstance(model.unit, nn.Linear) and model.sharded == 3
    norms = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    for mixed in (MixedPrecision(buffer_dtype=torch.bfloat16), MixedPrecision(reduce_dtype=torch.bfloat16)):
        wrapper = FSDP(copy.deepcopy(norms), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), mixed_precision=mixed)
        wrapper(torch.randn(3, 4)).sum().backward()
        assert isinstance(wrapper.module[1], FSDP) and wrapper.module[1].running_mean.dtype == torch.float32
    with torch.device("meta"):
        ignored = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    seen: list[nn.Module] = []

    def initialize(module: nn.Module) -> None:
        seen.append(module)
        module.to_empty(device="cpu", recurse=False)
        module.reset_parameters()

    FSDP(ignored, ignored_modules=[ignored[1]], param_init_fn=initialize)
    assert seen == [ignored[0]] and ignored[1].running_mean.is_meta


# --- every rank's optimizer -----------------------------------------------------------------------------------------------


def stepped(world: World, model: nn.Module, choose: Callable[[list[Any]], Any] = list, **options: Any) -> Any:
    """A wrapped model and its AdamW after a step, its parameters listed by `choose`."""
    sharded = wrapped(model, auto_wrap_policy=BLOCKS)
    optimizer = torch.optim.AdamW(choose(list(sharded.parameters())), lr=options.get("lr", 1e-2))
    square(sharded(world.mine(batch(0)))).backward()
    optimizer.step()
    optimizer.zero_grad()
    return sharded, optimizer


@pytest.mark.rotates(3)
@pytest.mark.proves("36b")
@pytest.mark.parametrize("kind", list(StateDictType), ids=lambda kind: kind.name)
@ranks(2, 3)
def test_parameters_listed_in_another_order_on_one_rank_are_saved_and_loaded_by_name(world: World, kind: StateDictType) -> None:
    """One rank's list was reversed: parameters of one shape got each other's averages, others a torn connection."""
    model = Stack()
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sharded, optimizer = stepped(world, model, lambda ps: ps[::-1] if world.rank == 1 else ps)
    square(model(batch(0))).backward()
    plain.step()
    with FSDP.state_dict_type(sharded, kind):
        saved = FSDP.optim_state_dict(sharded, optimizer)
    assert list(saved["state"]) == [name for name, _ in model.named_parameters()]
    everywhere = FSDP.full_optim_state_dict(sharded, optimizer, rank0_only=False)
    for states in (saved, everywhere):
        for name, parameter in model.named_parameters():
            assert_near(full(states["state"][name]["exp_avg"]), plain.state[parameter]["exp_avg"], name)
    listed = list(sharded.parameters())
    other = torch.optim.AdamW(listed[::-1] if world.rank == 0 else listed, lr=0.5)
    with FSDP.state_dict_type(sharded, kind):
        other.load_state_dict(FSDP.optim_state_dict_to_load(sharded, other, saved))
    for parameter in listed:
        for key, value in optimizer.state[parameter].items():
            assert torch.equal(full(other.state[parameter][key]), full(value)), key
    first = FSDP.full_optim_state_dict(sharded, optimizer)
    other.load_state_dict(FSDP.scatter_full_optim_state_dict(first or None, sharded, optim=other))
    for parameter in listed:
        assert torch.equal(full(other.state[parameter]["exp_avg"]), full(optimizer.state[parameter]["exp_avg"]))


DIFFERING: dict[str, tuple[Callable[[bool], dict[str, Any]], str, str]] = {
    "parameters": (
        lambda last: {"choose": (lambda ps: ps[1:]) if last else list},
        "inp.weight",
        "the last: nothing",
    ),
    "no state": (lambda last: {"change": lambda state: state.clear()}, "head.weight", "the last: no state 'step'"),
    "dtypes": (
        lambda last: {"change": lambda state: state.update(more=state["step"].double(), step=state["step"].double())},
        "head.weight",
        "no state 'more'; the last: state 'step' (shape (), torch.float64), state 'more'",
    ),
    "rates": (lambda last: {"lr": 0.5 if last else 0.25}, "inp.weight", "rank 0: lr 0.25; the last: lr 0.5"),
}


@pytest.mark.rotates(2)
@pytest.mark.proves("36b")
@pytest.mark.parametrize("case", DIFFERING)
@ranks(2, 3)
def test_optimizers_that_differ_between_ranks_are_named_on_every_rank_before_anything_travels(world: World, case: str) -> None:
    last = world.rank == world.size - 1
    options, name, text = DIFFERING[case][0](last), *DIFFERING[case][1:]
    change = options.pop("change", None)
    sharded, optimizer = stepped(world, Stack(), **options)
    if last and change is not None:
        change(optimizer.state[sharded.head.weight])
    messages = [
        refusal(lambda: FSDP.full_optim_state_dict(sharded, optimizer)),
        refusal(lambda: FSDP.optim_state_dict(sharded, optimizer)),
        refusal(lambda: FSDP.sharded_optim_state_dict(sharded, optimizer)),
    ]
    said: list[Any] = [None] * world.size
    dist.all_gather_object(said, messages)
    assert said == [messages] * world.size and len(set(messages)) == 1, said
    found = messages[0].replace(f"rank {world.size - 1}", "the last").replace("ranks 0 and 1", "rank 0")
    assert found.startswith(f"The optimizers of the ranks differ in '{name}'.") and text in found, found
    if case in ("parameters", "rates"):
        with pytest.raises(StateError, match=r"AdamW\.step\(\)"):
            sharded(world.mine(batch(0)))


@pytest.mark.proves("36b")
@ranks(2)
def test_what_one_rank_alone_cannot_save_or_load_is_an_error_on_all(world: World) -> None:
    sharded, optimizer = stepped(world, Stack())
    strange = torch.optim.AdamW(nn.Linear(2, 2).parameters()) if world.rank else optimizer
    saved = FSDP.optim_state_dict(sharded, optimizer)
    odd = {**saved, "state": {**saved["state"], "tail": {}}} if world.rank else saved
    alone = FullOptimStateDictConfig(rank0_only=True)
    for call, text in (
        (lambda: FSDP.optim_state_dict(sharded, strange), "The optimizer has a parameter of shape (2, 2) that is not in"),
        (lambda: FSDP.optim_state_dict_to_load(sharded, optimizer, odd), "has states for ['tail']"),
        (lambda: FSDP.flatten_sharded_optim_state_dict(odd, sharded, optimizer), "has states for ['tail']"),
    ):
        said = refusal(call)
        assert text in said and said.startswith("All ranks stop because rank 1 raised ValueError: ") is (world.rank == 0), said
    with FSDP.state_dict_type(sharded, StateDictType.FULL_STATE_DICT, None, alone):
        for wrong in ({"param_groups": []}, {"state": {"inp.weight": 3}, "param_groups": [{}]}, None):
            given = wrong if world.rank == 0 else saved
            with pytest.raises(ValueError):
                FSDP.optim_state_dict_to_load(sharded, optimizer, given)
    with FSDP.state_dict_type(sharded, StateDictType.SHARDED_STATE_DICT if world.rank else StateDictType.FULL_STATE_DICT):
        assert "differ in 'state_dict_type'" in refusal(lambda: FSDP.optim_state_dict(sharded, optimizer))
    dist.barrier()


@ranks(2)
def test_parameter_groups_may_come_in_another_order_and_plain_parameters_beside_sharded_ones(world: World) -> None:
    model = Scaled()
    inner = copy.deepcopy(model)
    sharded = FSDP(inner, auto_wrap_policy=BLOCKS, ignored_states=[inner.scale], use_orig_params=True)

    def built(swapped: bool) -> torch.optim.Optimizer:
        wide = {"params": [(n, p) for n, p in sharded.named_parameters() if p.ndim > 1], "weight_decay": 0.0}
        rest = {"params": [(n, p) for n, p in sharded.named_parameters() if p.ndim < 2], "lr": 0.1}
        return torch.optim.AdamW([rest, wide] if swapped else [wide, rest])

    optimizer = built(world.rank == 1)
    square(sharded(world.mine(batch(0)))).backward()
    dist.all_reduce(sharded.scale.grad)
    optimizer.step()
    saved = FSDP.optim_state_dict(sharded, optimizer)
    assert list(saved["state"]) == [name for name, _ in sharded.named_parameters()]
    other = built(world.rank == 0)
    other.load_state_dict(FSDP.optim_state_dict_to_load(sharded, other, saved))
    for group in other.param_groups:
        assert (group["lr"], group["weight_decay"]) == ((0.1, 1e-2) if group["params"][0].ndim < 2 else (1e-3, 0.0))
        assert len(group["param_names"]) == len(group["params"])
        for name, parameter in zip(group["param_names"], group["params"]):
            assert parameter is dict(sharded.named_parameters())[name]
            theirs, ours = (o.state[parameter]["exp_avg"] for o in (other, optimizer))
            assert torch.equal(theirs, ours) if name == "scale" else torch.equal(theirs.to_local(), ours.to_local()), name


# --- a drop-in ------------------------------------------------------------------------------------------------------------


def sharded_tensor(whole: Tensor, world: World) -> Any:
    """As FSDP1 saves with SHARDED_STATE_DICT and no device_mesh."""
    return _create_chunk_sharded_tensor(whole.detach(), world.rank, world.size, 1, dist.group.WORLD)


@ranks(2, 3)
def test_checkpoints_of_sharded_tensors_that_fsdp1_saved_are_loaded(world: World) -> None:
    """The optimizer's came from load_sharded_optimizer_state_dict, which makes ShardedTensors whatever was saved."""
    folder = world.folder("sharded")
    model = Stack()
    sharded, optimizer = stepped(world, model)
    model.load_state_dict(sharded.state_dict())
    states = FSDP.full_optim_state_dict(sharded, optimizer, rank0_only=False)
    weights = {name: sharded_tensor(value, world) for name, value in model.state_dict().items()}
    for name, values in states["state"].items():
        states["state"][name] = {k: sharded_tensor(v, world) if v.ndim else v for k, v in values.items()}
    with FSDP.state_dict_type(sharded, StateDictType.SHARDED_STATE_DICT):
        ours = {"model": sharded.state_dict(), "optimizer": FSDP.optim_state_dict(sharded, optimizer)}
    for name, saved in (("theirs", {"model": weights, "optimizer": states}), ("ours", ours)):
        dcp.save(saved, checkpoint_id=folder / name)
        torch.manual_seed(5)
        other = wrapped(Stack(), auto_wrap_policy=BLOCKS)
        fresh = torch.optim.AdamW(other.parameters(), lr=0.5)
        with FSDP.state_dict_type(other, StateDictType.SHARDED_STATE_DICT):
            loaded = {"model": other.state_dict()}
            dcp.load(loaded, checkpoint_id=folder / name)
            other.load_state_dict(loaded["model"])
            reader = dcp.FileSystemReader(folder / name)
            read = load_sharded_optimizer_state_dict(loaded["model"], "optimizer", reader)
            fresh.load_state_dict(FSDP.optim_state_dict_to_load(other, fresh, read["optimizer"]))
        for (key, a), (_, b) in zip(other.named_parameters(), sharded.named_parameters()):
            assert torch.equal(full(a), full(b)), key
        for a, b in zip(optimizer.param_groups[0]["params"], fresh.param_groups[0]["params"]):
            assert all(torch.equal(full(v), full(fresh.state[b][key])) for key, v in sorted(optimizer.state[a].items()))
        assert fresh.param_groups[0]["lr"] == 1e-2
    torch.manual_seed(5)
    other = wrapped(Stack(), auto_wrap_policy=BLOCKS)
    other.load_state_dict(weights)
    for (key, a), (_, b) in zip(other.named_parameters(), sharded.named_parameters()):
        assert torch.equal(full(a), full(b)), key
    for change, text in (
        ({"_flat_param": torch.zeros(3)}, "it is a FlatParameter of FSDP1. Save FULL_STATE_DICT with FSDP1."),
        ({"head.weight": sharded_tensor(torch.zeros(21), world)}, "for 'head.weight', got (21,) in the ShardedTensor to load"),
    ):
        assert text in refusal(lambda change=change: other.load_state_dict({**weights, **change}))
    states["state"]["head.weight"]["exp_avg"] = sharded_tensor(torch.zeros(21), world)
    fresh = torch.optim.AdamW(other.parameters())
    assert_expected_inline(
        refusal(lambda: FSDP.optim_state_dict_to_load(other, fresh, states)),
        """Expected shape (3, 7) for 'exp_avg' of 'head.weight' in the saved optimizer, got (21,). It is the state of a FlatParameter of FSDP1, which cannot be loaded. Save FULL_STATE_DICT with FSDP1.""",
    )


@ranks(4)
def test_sharded_tensors_are_loaded_where_weights_are_replicated_too(world: World) -> None:
    model = Stack()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    weights = {name: sharded_tensor(value, world) for name, value in Stack().state_dict().items()}
    for arguments in (
        {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": mesh},
        {"sharding_strategy": ShardingStrategy.NO_SHARD},
    ):
        torch.manual_seed(0)
        expected = Stack()
        weights = {name: sharded_tensor(value, world) for name, value in expected.state_dict().items()}
        sharded = wrapped(model, auto_wrap_policy=BLOCKS, **arguments)
        sharded.load_state_dict(weights)
        assert all(torch.equal(full(p), expected.get_parameter(name)) for name, p in sharded.named_parameters())


@pytest.mark.proves("40a")
@ranks(1)
def test_arguments_of_the_wrong_type_are_named_before_anything_changed(world: World) -> None:
    model = Stack()
    before = dict(model.named_parameters())

    def refused(**arguments: Any) -> str:
        return refusal(lambda: FSDP(model, **arguments))

    assert_expected_inline(
        "\n".join(
            [
                refused(sharding_strategy="FULL_SHARD"),
                refused(sharding_strategy=1),
                refused(backward_prefetch="BACKWARD_PRE"),
                refused(cpu_offload=True),
                refused(mixed_precision=torch.bfloat16),
                refused(mixed_precision=MixedPrecision(param_dtype="bf16")),
                refused(param_init_fn="normal"),
                refused(sync_module_states="yes"),
                refused(forward_prefetch=1),
                refused(limit_all_gathers="no"),
                refused(use_orig_params=None),
                refused(device_id=True),
                refused(device_id="warp:9"),
                refused(process_group=[dist.group.WORLD]),
                refused(process_group=(dist.group.WORLD, None)),
                refused(device_mesh=2),
                refused(ignored_modules=model.blocks),
                refused(ignored_modules="head"),
                refused(ignored_modules=["head"]),
                refused(ignored_states=model.head.weight),
                refused(ignored_states=7),
                refused(auto_wrap_policy={Block}),
                refused(auto_wrap_policy=7),
                refused(auto_wrap_policy=CustomPolicy(lambda m: {"cpu_offload": True} if type(m) is Block else False)),
            ]
        ),
        """\
Expected sharding_strategy to be a ShardingStrategy such as ShardingStrategy.FULL_SHARD, or None, got 'FULL_SHARD'.
Expected sharding_strategy to be a ShardingStrategy such as ShardingStrategy.FULL_SHARD, or None, got 1.
Expected backward_prefetch to be BackwardPrefetch.BACKWARD_PRE, BACKWARD_POST, or None, got 'BACKWARD_PRE'.
Expected cpu_offload to be a CPUOffload such as CPUOffload(offload_params=True), or None, got True.
Expected mixed_precision to be a MixedPrecision such as MixedPrecision(param_dtype=torch.bfloat16), or None, got torch.bfloat16.
Expected mixed_precision.param_dtype to be a torch.dtype, or None, got 'bf16'.
Expected param_init_fn to be a function of one module, or None, got 'normal'.
Expected sync_module_states to be True or False, got 'yes'.
Expected forward_prefetch to be True or False, got 1.
Expected limit_all_gathers to be True or False, got 'no'.
Expected use_orig_params to be True or False, got None.
Expected device_id to be an int, a string, a torch.device or None, got True.
device_id='warp:9' is not a device. Pass a device such as 'cpu' or 'cuda:0'.
Expected process_group to be a ProcessGroup, a tuple of two, or None, got a list.
Expected process_group to be a pair of ProcessGroups (to shard over, to replicate over), got (ProcessGroup, NoneType).
Expected device_mesh to be a DeviceMesh, or None, got 2.
Expected ignored_modules to contain several modules, got a ModuleList. Pass a list.
Expected ignored_modules to contain several modules, got a str. Pass a list.
Expected ignored_modules to contain modules, got a str.
Expected ignored_states to contain several parameters or modules, got a Parameter. Pass a list.
Expected ignored_states to contain several parameters or modules, got a int. Pass a list.
auto_wrap_policy expected 'auto', a Plan, a Policy, or a function (module, recurse, nonwrapped_numel) -> bool, got {<class 'models.Block'>}. For modules of these classes pass ModuleWrapPolicy({Block}).
auto_wrap_policy expected 'auto', a Plan, a Policy, or a function (module, recurse, nonwrapped_numel) -> bool, got 7.
Expected cpu_offload to be a CPUOffload such as CPUOffload(offload_params=True), or None, got True.""",
    )
    assert dict(model.named_parameters()) == before and type(model.blocks[0]) is Block
    expected = model.head.weight.detach().clone()
    assert torch.equal(FSDP(model, device_id="cpu").head.weight.to_local(), expected)


@ranks(2)
def test_the_attributes_that_scripts_read(world: World) -> None:
    policy = MixedPrecision(param_dtype=torch.bfloat16)
    sharded = wrapped(
        Stack(), auto_wrap_policy=BLOCKS, cpu_offload=CPUOffload(True), mixed_precision=policy, forward_prefetch=True
    )
    for wrapper in (sharded, sharded.blocks[0]):
        assert wrapper.sharding_strategy is ShardingStrategy.FULL_SHARD and wrapper.mixed_precision == policy
        assert wrapper.cpu_offload == CPUOffload(True) and wrapper.forward_prefetch is True
        assert wrapper.backward_prefetch is BackwardPrefetch.BACKWARD_PRE
        assert dist.get_process_group_ranks(wrapper.process_group) == [0, 1]
        assert (wrapper.rank, wrapper.world_size) == (world.rank, 2) and wrapper.compute_device == torch.device("cpu")
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    for strategy, size, where in ((ShardingStrategy.NO_SHARD, 2, None), (ShardingStrategy.HYBRID_SHARD, 1, mesh)):
        wrapper = wrapped(Stack(), sharding_strategy=strategy, backward_prefetch=None, device_mesh=where)
        assert (wrapper.sharding_strategy, wrapper.world_size, wrapper.backward_prefetch) == (strategy, size, None)
        assert wrapper.mixed_precision == MixedPrecision() and wrapper.cpu_offload == CPUOffload()
        assert wrapper.rank == (world.rank if size == 2 else 0)
    with pytest.raises(AttributeError):
        sharded.backward_prefetch = None


@ranks(2)
def test_wrapped_modules_stay_of_their_class(world: World) -> None:
    """`type(m.module) is Block` was false: the class of a sharded module was one made for it."""
    model = Stack()
    sharded = wrapped(model, auto_wrap_policy=BLOCKS)
    again = [copy.deepcopy(sharded), saved_and_loaded(sharded), copy.deepcopy(nn.ModuleDict({"a": sharded}))["a"]]
    for each in (sharded, *again):
        assert type(each) is FSDP and type(each.module) is Stack
        assert all(type(block) is FSDP and type(block.module) is Block for block in each.blocks)
        assert type(saved_and_loaded(nn.Sequential(each))[0].module) is Stack
        assert "FULL_SHARD, unit of 4 parameters (66 elements) in 1 groups" in repr(each)
        assert list(each.state_dict()) == list(model.state_dict())
        train(world, copy.deepcopy(model), each, steps=2)
    weights = sharded.head.weight.to_local()
    assert not torch.equal(again[0].head.weight.to_local(), torch.zeros_like(weights))
    alone = "Copy or pickle the whole module that fully_shard() was called on, or the FullyShardedDataParallel"
    assert alone in refusal(lambda: copy.deepcopy(sharded.module))
    assert fullshard.undo(again[0]) is again[0] and type(again[0].module) is Stack
    assert again[0].module.head.weight.shape == (3, 7)
    mixed = nn.Sequential(wrapped(Block()), fullshard.fully_shard(Block()))
    fullshard.fully_shard(mixed)
    for each in (mixed, copy.deepcopy(mixed), saved_and_loaded(mixed)):
        assert isinstance(each, fullshard.FSDPModule) and isinstance(each[1], fullshard.FSDPModule)
        assert type(each[0].module) is Block


@ranks(2)
def test_wrappers_are_moved_and_have_the_methods_of_their_units(world: World) -> None:
    model = Stack()
    sharded = wrapped(model, auto_wrap_policy=BLOCKS)
    sharded.double(), model.double()
    assert all(p.dtype == torch.float64 for p in sharded.parameters())
    square(sharded(world.mine(batch(0).double()))).backward()
    square(model(batch(0).double())).backward()
    assert_same_grads(sharded, model)
    sharded.zero_grad()
    sharded.set_requires_gradient_sync(False)
    square(sharded(world.mine(batch(0).double()))).backward()
    sharded.set_requires_gradient_sync(True)
    assert all(p.grad is None for p in sharded.parameters())
    square(sharded(world.mine(batch(0).double()))).backward()
    for parameter in model.parameters():
        parameter.grad *= 2
    assert_same_grads(sharded, model)
    sharded.unshard()
    sharded.reshard()


@ranks(2)
def test_a_list_of_modules_may_be_the_outermost(world: World) -> None:
    """FSDP(nn.ModuleList(...)): it has no forward, but what is in it has."""
    models = nn.ModuleList([Stack(), Stack()])
    inner = copy.deepcopy(models)
    by_hand = wrapped(nn.ModuleList([wrapped(inner[0]), wrapped(inner[1])]))
    by_policy = wrapped(models, auto_wrap_policy=ModuleWrapPolicy({Stack, Block}))
    for sharded in (by_hand, by_policy, copy.deepcopy(by_policy), saved_and_loaded(by_policy)):
        plain = copy.deepcopy(models)
        assert len(sharded.module) == 2 and sharded.check_is_root() and type(sharded.module) is nn.ModuleList
        assert (sharded.world_size, sharded.rank) == (2, world.rank) and "a list of modules" in repr(sharded)
        optimizer, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (sharded, plain))
        with sharded.no_sync():
            square(sharded[0](world.mine(batch(0)))).backward()
        for m, x in ((sharded, world.mine(batch(0))), (plain, batch(0))):
            square(m[0](x)).backward()
            square(m[1](x)).backward()
        square(plain[0](batch(0))).backward()
        assert_same_grads(sharded, plain)
        share_grads(sharded, plain)
        assert_near(sharded.clip_grad_norm_(1.0), nn.utils.clip_grad_norm_(plain.parameters(), 1.0), "norm")
        optimizer.step(), theirs.step()
        state = sharded.state_dict()
        assert list(state) == list(plain.state_dict())
        for name, value in plain.state_dict().items():
            assert_near(state[name], value, name)
        sharded.load_state_dict(models.state_dict())
        saved = FSDP.optim_state_dict(sharded, optimizer)
        assert list(saved["state"]) == [name for name, _ in plain.named_parameters()]
        FSDP.optim_state_dict_to_load(sharded, optimizer, saved, load_directly=True)
        with FSDP.summon_full_params(sharded):
            assert all(not hasattr(p, "placements") for p in sharded.parameters())
        sharded.zero_grad()
        sharded.apply(lambda module: None)
        sharded.register_comm_hook(default_hooks.DefaultState(dist.group.WORLD), default_hooks.reduce_scatter_hook)
        with pytest.raises(NotImplementedError):
            sharded(batch(0))
    for arguments in ({}, {"auto_wrap_policy": BLOCKS}):
        fresh = copy.deepcopy(models)
        assert_expected_inline(
            refusal(lambda fresh=fresh, arguments=arguments: FSDP(fresh, **arguments)),
            """ModuleList cannot be wrapped: it has no forward, so '0.inp.weight', which no wrapper below it shards, would never be all-gathered. Wrap its items, or pass an auto_wrap_policy that chooses them.""",
        )
        assert type(fresh[0].blocks[0]) is Block and type(fresh[0].inp.weight) is nn.Parameter


@pytest.mark.parametrize("set_to", ["1", "0"])
@ranks(2)
def test_eval_in_full_precision_where_the_environment_asks_for_it(world: World, set_to: str) -> None:
    """FSDP1 reads FSDP_USE_FULL_PREC_IN_EVAL: in eval mode, dtypes of mixed precision are not applied."""
    os.environ["FSDP_USE_FULL_PREC_IN_EVAL"] = set_to
    try:
        policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
        model = Norms()
        inner = copy.deepcopy(model)
        inner.norm, model.norm = nn.Identity(), nn.Identity()
        sharded = wrapped(
            inner, mixed_precision=policy, auto_wrap_policy=lambda **given: given["recurse"] or given["nonwrapped_numel"] > 30
        )
    finally:
        del os.environ["FSDP_USE_FULL_PREC_IN_EVAL"]
    assert len(FSDP.fsdp_modules(sharded)) == 2
    in_eval = torch.float32 if set_to == "1" else torch.bfloat16
    x = batch(0)
    for mode, dtype in ((True, torch.bfloat16), (False, in_eval), (True, torch.bfloat16), (False, in_eval)):
        sharded.train(mode)
        sharded.seen.clear()
        out = sharded(world.mine(x))
        assert out.dtype == dtype and sharded.seen == [dtype, dtype], mode
        assert_near(out.float(), model(world.mine(x)).detach(), "output", rounding(dtype))
        sharded.zero_grad(), model.zero_grad()
        square(out).backward()
        square(model(x)).backward()
        assert_same_grads(sharded, model, rounding(dtype))
        assert sharded.state_dict()["offset"].dtype == torch.float32
    if set_to == "1":
        sharded.train()
        out = sharded(world.mine(x))
        sharded.eval()
        assert "between a forward and its backward" in refusal(lambda: sharded(world.mine(x)))
        square(out).backward()
        assert sharded(world.mine(x)).dtype == torch.float32


@ranks(2)
def test_optimizer_states_without_groups_or_with_names_of_wrappers_are_taken(world: World) -> None:
    model = Stack()
    sharded, optimizer = stepped(world, model)
    own = optimizer.state_dict()
    bare = FSDP.optim_state_dict(sharded, optimizer, {"state": own["state"]})
    assert "param_groups" not in bare
    whole = FSDP.optim_state_dict(sharded, optimizer)
    dirty = {
        "state": {f"_fsdp_wrapped_module.{name}": values for name, values in whole["state"].items()},
        "param_groups": [
            {**g, "params": [n.replace("blocks.0.", "blocks.0._fsdp_wrapped_module.") for n in g["params"]]}
            for g in whole["param_groups"]
        ],
    }
    assert list(FSDP.optim_state_dict(sharded, optimizer, dirty)["state"]) == list(whole["state"])
    alone = FullOptimStateDictConfig(rank0_only=True)
    for saved in (bare, dirty):
        for config in (FullOptimStateDictConfig(), alone):
            with FSDP.state_dict_type(sharded, StateDictType.FULL_STATE_DICT, None, config):
                other = torch.optim.AdamW(sharded.parameters(), lr=0.5)
                ready = FSDP.optim_state_dict_to_load(sharded, other, saved)
                assert ("param_groups" in ready) is (saved is dirty)
                FSDP.optim_state_dict_to_load(sharded, other, saved, load_directly=True)
                assert other.param_groups[0]["lr"] == (0.5 if saved is bare else 1e-2)
            assert_same_states(optimizer, other)
    by_place = FSDP.rekey_optim_state_dict(dirty, OptimStateKeyType.PARAM_ID, sharded, optim=optimizer)
    assert sorted(by_place["state"]) == by_place["param_groups"][0]["params"] == list(range(len(whole["state"])))
    assert "param_groups" not in FSDP.rekey_optim_state_dict(bare, OptimStateKeyType.PARAM_ID, sharded, optim=optimizer)
    assert "Expected an optimizer state dict" in refusal(lambda: FSDP.optim_state_dict_to_load(sharded, other, {}))


@ranks(2)
def test_saved_optimizers_may_lack_the_states_of_a_plain_parameter_and_must_list_it(world: World) -> None:
    inner = Scaled()
    sharded = FSDP(inner, auto_wrap_policy=BLOCKS, ignored_states=[inner.scale], use_orig_params=True)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
    square(sharded(world.mine(batch(0)))).backward()
    dist.all_reduce(sharded.scale.grad)
    optimizer.step()
    saved = FSDP.optim_state_dict(sharded, optimizer)
    del saved["state"]["scale"]
    other = torch.optim.AdamW(sharded.parameters(), lr=0.5)
    FSDP.optim_state_dict_to_load(sharded, other, saved, load_directly=True)
    assert not other.state[sharded.scale] and other.param_groups[0]["lr"] == 1e-2
    saved["param_groups"][0]["params"].remove("scale")
    assert "The saved optimizer has no parameters ['scale']" in refusal(
        lambda: FSDP.optim_state_dict_to_load(sharded, other, saved)
    )


@ranks(2, 3)
def test_a_rank_that_cannot_initialise_its_module_has_all_ranks_raise(world: World) -> None:
    """With sync_module_states only the others build on meta: the first went on, and waited for them."""
    last = world.rank == world.size - 1

    def broken(module: nn.Module) -> None:
        if last:
            raise RuntimeError(f"no values for a {type(module).__name__}")
        module.to_empty(device="cpu", recurse=False)

    def forgetful(module: nn.Module) -> None:
        if not last:
            module.to_empty(device="cpu", recurse=False)

    for init, text in (
        (broken, "no values for a Linear"),
        (forgetful, "param_init_fn left parameters or buffers of ['Linear'"),
    ):
        for sync in (True, False):
            with torch.device("cpu" if sync and world.rank == 0 else "meta"):
                model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3))
            with pytest.raises(RuntimeError if last and init is broken else ValueError) as raised:
                FSDP(model, sync_module_states=sync, param_init_fn=init)
            assert text in str(raised.value) and (last or f"rank {world.size - 1} raised" in str(raised.value))
    said = refusal(lambda: FSDP(nn.Linear(5, 4 if last else 3), sync_module_states=True))
    assert "sync_module_states: the modules of the ranks differ in 'weight'" in said, said
    assert f"rank {world.size - 1}: is (shape (4, 5), torch.float32). Build the same module on all ranks" in said, said
    sharded = FSDP(Random(), auto_wrap_policy=BLOCKS, sync_module_states=True)
    sharded(world.mine(batch(0)))


@pytest.mark.parametrize("strategy", [ShardingStrategy.HYBRID_SHARD, ShardingStrategy.NO_SHARD])
@ranks(4)
def test_one_replica_whose_optimizer_differs_is_named_on_all_ranks(world: World, strategy: ShardingStrategy) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if strategy in HYBRID else None
    sharded = wrapped(Stack(), auto_wrap_policy=BLOCKS, sharding_strategy=strategy, device_mesh=mesh)
    listed = list(sharded.parameters())
    optimizer = torch.optim.SGD(listed[::-1] if world.rank == 2 else listed, lr=0.5 if world.rank == 3 else 0.25)
    assert "differ in 'inp.weight'. ranks 0-2: lr 0.25; rank 3: lr 0.5. Use equal parameters and settings" in refusal(
        lambda: FSDP.optim_state_dict(sharded, optimizer)
    )
    optimizer.param_groups[0]["lr"] = 0.25
    assert FSDP.optim_state_dict(sharded, optimizer)["param_groups"][0]["lr"] == 0.25


# --- what a search for faults found --------------------------------------------------------------------------------------


class WithScalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.ones(5, 3)), nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sum() + (x * self.scale).sum()


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
@ranks(2)
def test_a_communication_hook_leaves_scalars_averaged(world: World, strategy: ShardingStrategy) -> None:
    """The hook replaces the reduce-scatter, in which scalars have no part; they were summed."""
    sharded = FSDP(WithScalar(), sharding_strategy=strategy, use_orig_params=True)
    hook = default_hooks.allreduce_hook if strategy is ShardingStrategy.NO_SHARD else default_hooks.reduce_scatter_hook
    sharded.register_comm_hook(default_hooks.DefaultState(dist.group.WORLD), hook)
    sharded(torch.tensor([1.0 + world.rank])).backward()
    gradients = {name.rpartition(".")[2]: full(parameter.grad) for name, parameter in sharded.named_parameters()}
    assert gradients["scale"].item() == 1.5 and gradients["weight"].unique().tolist() == [1.5]


class TiedSiblings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids))


@ranks(2)
def test_wrappers_beside_each_other_that_share_a_parameter_are_refused(world: World) -> None:
    policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, (nn.Embedding, nn.Linear)))
    with pytest.raises(ValueError, match="tied to 'weight' of unit 'Embedding'.*a module around them"):
        FSDP(TiedSiblings(), auto_wrap_policy=policy, use_orig_params=True)


@ranks(1)
def test_a_buffer_of_several_wrappers_keeps_its_dtype_in_state_dicts(world: World) -> None:
    class Rotary(nn.Module):
        def __init__(self, table: Tensor) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("table", table)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    table = torch.arange(4.0)
    policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, Rotary))
    mixed = MixedPrecision(buffer_dtype=torch.bfloat16)
    sharded = FSDP(nn.Sequential(Rotary(table), Rotary(table)), auto_wrap_policy=policy, mixed_precision=mixed)
    tables = {name: value for name, value in sharded.state_dict().items() if "table" in name}
    assert len(tables) == 2 and all(value.dtype is torch.float32 for value in tables.values())


@ranks(1)
def test_a_copy_prefetches_as_the_wrapper_does(world: World) -> None:
    policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, Block))
    sharded = FSDP(Stack(), auto_wrap_policy=policy, backward_prefetch=None)
    for model in (sharded, copy.deepcopy(sharded)):
        assert all(wrapper._own_unit.record.next_backward == () for wrapper in FSDP.fsdp_modules(model))


@ranks(2)
def test_a_destination_keeps_what_the_caller_had_in_it(world: World) -> None:
    sharded = FSDP(nn.Linear(4, 4))
    with FSDP.state_dict_type(sharded, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)):
        found = sharded.state_dict(destination={"other": torch.ones(1)})
    assert "other" in found and ("weight" in found) is (world.rank == 0)


def test_settings_are_compared_by_their_value_wherever_they_are() -> None:
    text = state_dicts._setting_text
    assert text((torch.tensor(0.001), 2)) == text((torch.tensor(0.001, device="cpu"), 2))
    assert text(torch.tensor(0.001)) != text(torch.tensor(0.00100001))


@pytest.mark.parametrize("kind", [StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT])
@ranks(2)
def test_plain_tensors_of_state_dicts_are_copies(world: World, kind: StateDictType) -> None:
    """Buffers, and the step counters of an optimizer, of a sharded state dict followed the training."""
    model = FSDP(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with FSDP.state_dict_type(model, kind):
        weights, states = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
    held = copy.deepcopy((weights["1.running_mean"], weights["1.num_batches_tracked"], states["state"]["0.weight"]["step"]))
    step()
    now = (weights["1.running_mean"], weights["1.num_batches_tracked"], states["state"]["0.weight"]["step"])
    assert all(map(torch.equal, held, now))


@ranks(2)
def test_settings_of_a_group_without_parameters_are_loaded(world: World) -> None:
    """As of the biases of a model that has none."""
    model = FSDP(nn.Sequential(nn.Linear(4, 4, bias=False)), use_orig_params=True)
    groups = [{"params": list(model.parameters()), "weight_decay": 0.1}, {"params": [], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    saved = FSDP.optim_state_dict(model, optimizer)
    loaded = FSDP.optim_state_dict_to_load(model, optimizer, saved)
    optimizer.load_state_dict(loaded)
    assert optimizer.param_groups[1]["weight_decay"] == 0.0 and optimizer.param_groups[1]["betas"] == (0.9, 0.999)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
