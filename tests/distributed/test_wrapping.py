"""Which modules become units: FSDP1's policies, plans and their edits, and whole models sharded in one call."""

from __future__ import annotations

import copy
import functools
import itertools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed.fsdp.wrap as torch_wrap
from expecttest import assert_expected_inline
from harness import World, ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from models import Block, Stack, assert_same_grads, batch, in_order, square, train_both
from torch import Tensor, nn

import fullshard
from fullshard import CommPolicy, MixedPrecisionPolicy, fully_shard, plan_model, shard_model, wrap
from fullshard.core import unit_of, units_of
from fullshard.wrap.plan import ModelSummary, Plan, PlannedUnit
from fullshard.wrap.whole_model import _chosen_by_function


def chosen(plan: Plan) -> list[str]:
    return [unit.name for unit in plan.units]


# --- FSDP1's policies ----------------------------------------------------------------------------------------------------


def test_each_policy_chooses_what_it_says() -> None:
    model = Stack(depth=2)
    of_size = functools.partial(wrap.size_based_auto_wrap_policy, min_num_params=100)
    transformer = functools.partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls={Block})
    by_lambda = functools.partial(wrap.lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, nn.LayerNorm))
    blocks = ["blocks.0", "blocks.1", "(model)"]
    assert chosen(plan_model(model, wrap.ModuleWrapPolicy({Block}))) == blocks
    assert chosen(plan_model(model, transformer)) == blocks
    assert chosen(plan_model(model, of_size)) == ["blocks.0.up", "blocks.0", "blocks.1.up", "blocks.1", "(model)"]
    assert chosen(plan_model(model, by_lambda)) == ["blocks.0.norm", "blocks.1.norm", "(model)"]
    either = functools.partial(wrap.or_policy, policies=[transformer, by_lambda])
    assert chosen(plan_model(model, either)) == ["blocks.0.norm", "blocks.0", "blocks.1.norm", "blocks.1", "(model)"]
    everything = chosen(plan_model(model, wrap.always_wrap_policy))
    assert everything[:5] == ["inp", "blocks.0.norm", "blocks.0.up", "blocks.0.down", "blocks.0"]
    custom = wrap.CustomPolicy(lambda m: {"reshard_after_forward": False} if m is model.head else isinstance(m, Block))
    plan = plan_model(model, custom)
    assert chosen(plan) == ["blocks.0", "blocks.1", "head", "(model)"]
    assert plan.units[2].options == {"reshard_after_forward": False}


def test_torchs_own_policy_objects_are_taken() -> None:
    model = Stack(depth=2)
    assert chosen(plan_model(model, torch_wrap.ModuleWrapPolicy({Block}))) == ["blocks.0", "blocks.1", "(model)"]
    custom = torch_wrap.CustomPolicy(lambda m: {"reshard_after_forward": False} if m is model.head else False)
    assert plan_model(model, custom).units[0].options == {"reshard_after_forward": False}
    function = functools.partial(torch_wrap.transformer_auto_wrap_policy, transformer_layer_cls={Block})
    assert chosen(plan_model(model, function)) == ["blocks.0", "blocks.1", "(model)"]


def test_a_policy_class_can_be_called_as_a_function() -> None:
    policy = wrap.ModuleWrapPolicy([Block])
    assert policy(nn.Linear(1, 1), recurse=True) and not policy(nn.Linear(1, 1), False, 7) and policy(Block(), False)
    assert repr(policy) == "ModuleWrapPolicy(Block)"


class Tree(nn.Module):
    """A random tree of modules with parameters of their own, shared modules and tied parameters."""

    def __init__(self, numel: int, children: list[nn.Module]) -> None:
        super().__init__()
        if numel:
            self.weight = nn.Parameter(torch.zeros(numel))
        for index, child in enumerate(children):
            self.add_module(f"c{index}", child)

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("trees are only planned")


class Other(Tree):
    pass


@st.composite
def trees(draw: st.DrawFn) -> nn.Module:
    made: list[nn.Module] = []

    def grow(depth: int) -> nn.Module:
        if made and draw(st.integers(0, 7)) == 0:
            return draw(st.sampled_from(made))  # shared
        children = [grow(depth - 1) for _ in range(draw(st.integers(0, 3)))] if depth else []
        kind = draw(st.sampled_from([Tree, Other, nn.Sequential, nn.ModuleList]))
        module = (
            kind(draw(st.integers(0, 40)), children)
            if issubclass(kind, Tree)
            else kind(children if kind is nn.ModuleList else _named(children))
        )
        held = [m for m in made if isinstance(m, Tree) and hasattr(m, "weight")]
        if isinstance(module, Tree) and held and draw(st.integers(0, 5)) == 0:
            module.weight = draw(st.sampled_from(held)).weight  # tied
        made.append(module)
        return module

    def _named(children: list[nn.Module]) -> Any:
        from collections import OrderedDict

        return OrderedDict((str(index), child) for index, child in enumerate(children))

    return Tree(draw(st.integers(0, 20)), [grow(3) for _ in range(draw(st.integers(1, 3)))])


def policies() -> st.SearchStrategy[Any]:
    sizes = st.integers(1, 120).map(lambda least: functools.partial(wrap.size_based_auto_wrap_policy, min_num_params=least))
    return st.one_of(
        st.just("auto"),
        st.builds(fullshard.wrap.AutoPolicy, apart=st.sampled_from([0, 0.5, 2]), tiny=st.sampled_from([0, 0.1, 1])),
        sizes,
        st.just(wrap.ModuleWrapPolicy({Other})),
        st.just(functools.partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls={Tree})),
        st.sampled_from([2, 3]).map(
            lambda k: wrap.CustomPolicy(lambda m: isinstance(m, Tree) and len(list(m.modules())) % k == 0)
        ),
    )


@settings(max_examples=300, deadline=None)
@given(model=trees(), policy=policies())
def test_units_partition_the_parameters_children_first(model: nn.Module, policy: Any) -> None:
    try:
        plan = plan_model(model, policy)
    except ValueError as refused:  # a shared module that also runs outside of the unit around it
        assert "is around it and shares a parameter" in str(refused)
        return
    held = [entry.name for unit in plan.units for entry in plan.entries(unit)]
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        names.setdefault(id(parameter), name)
    assert len(held) == len(set(held)) == len(names), "lost, or owned twice"
    modules = [name for unit in plan.units for name in unit.modules]
    assert len(modules) == len(set(modules))
    assert plan.units[-1].modules[-1] == ""
    for earlier, later in itertools.combinations(plan.units, 2):
        around = {id(inner) for name in earlier.modules for inner in model.get_submodule(name).modules()}
        inside = {id(model.get_submodule(name)) for name in later.modules}
        own = {id(model.get_submodule(name)) for name in earlier.modules}
        assert not inside <= around - own, f"{later.name} lies inside {earlier.name}, which is made before it"
    str(plan)


@settings(max_examples=200, deadline=None)
@given(model=trees(), least=st.integers(1, 120), kinds=st.sets(st.sampled_from([Tree, Other, nn.Sequential])))
def test_functions_are_asked_as_fsdp1_asks_them(model: nn.Module, least: int, kinds: set[type]) -> None:
    """torch's own recursion is the oracle, on trees without shared modules, which it would visit again."""
    if len(list(model.named_modules(remove_duplicate=False))) != len(list(model.modules())):
        return
    asked: list[list[Any]] = [[], []]

    def policy(log: list[Any], module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        log.append((id(module), recurse, nonwrapped_numel))
        big = nonwrapped_numel >= least
        return big if recurse else big and isinstance(module, tuple(kinds))

    wrapped: list[nn.Module] = []

    def wrapper(module: nn.Module) -> nn.Module:
        wrapped.append(module)
        return module

    torch_wrap._recursive_wrap(model, functools.partial(policy, asked[0]), wrapper, set(), set(), only_wrap_children=True)
    ours = _chosen_by_function(model, functools.partial(policy, asked[1]), set(), set())
    assert asked[0] == asked[1] and list(map(id, wrapped)) == list(map(id, ours))


def test_shared_modules_come_once() -> None:
    shared = Block()
    model = nn.Sequential(nn.Sequential(shared, Block()), nn.Sequential(shared))
    plan = plan_model(model, wrap.ModuleWrapPolicy({Block}))
    assert chosen(plan) == ["0.0", "0.1", "(model)"]
    assert sum(len(plan.entries(unit)) for unit in plan.units) == 10


def test_ignored_modules_and_parameters_are_left_out() -> None:
    model = Stack(depth=3)
    plan = plan_model(model, "auto", ignored_modules=[model.blocks[1]], ignored_params=[model.head.weight])
    held = [entry.name for unit in plan.units for entry in plan.entries(unit)]
    assert chosen(plan) == ["blocks.0", "blocks.2", "(model)"]
    assert not any(name.startswith("blocks.1.") for name in held) and "head.weight" not in held and "head.bias" in held


# --- plans ----------------------------------------------------------------------------------------------------------------


class Decoder(nn.Module):
    def __init__(self, vocabulary: int, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 16)
        self.position = nn.Embedding(8, 16)
        self.layers = nn.ModuleList(Block(16, 32) for _ in range(3))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x) + self.position(torch.arange(x.shape[1]))
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


class Residual(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(before, after, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(after)
        self.short = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(x)) + self.short(x))


def convnet() -> nn.Module:
    """Like torchvision's: stages of which the first blocks differ, and a large classifier."""
    stages = [
        nn.Sequential(Residual(before, width), Residual(width, width), Residual(width, width))
        for before, width in ((4, 4), (4, 8), (8, 32))
    ]
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), *stages, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 64))


def nested() -> nn.Module:
    """Sequentials of Sequentials of blocks."""
    return nn.Sequential(nn.Linear(5, 7), *(nn.Sequential(Block(), Block()) for _ in range(2)), nn.Linear(7, 3))


def tokens(step: int) -> Tensor:
    return torch.randint(0, 50, (12, 8), generator=torch.Generator().manual_seed(step))


def images(step: int) -> Tensor:
    return batch(step, 3, 4, 4)


def decoder() -> nn.Module:
    return Decoder(200, tied=False)


def tied() -> nn.Module:
    return Decoder(200, tied=True)


def test_the_plan_of_a_decoder() -> None:
    assert_expected_inline(
        str(plan_model(decoder())),
        """\
unit            class              parameters   elements        bytes  options  why
embed           Embedding                   1      3,200     12.5 KiB           as large as a block
layers.0 ... 2  3 x Block               3 x 5  3 x 1,088  3 x 4.2 KiB           one of 3 blocks
norm+head       LayerNorm, Linear           3      3,232     12.6 KiB           as large as a block
(model)         Decoder                     1        128        512 B           what is left
6 units hold 20 parameters: 9,824 elements, 38.4 KiB; the largest holds 12.6 KiB""",
    )


def test_the_plan_of_a_decoder_whose_head_is_its_embedding() -> None:
    assert_expected_inline(
        str(plan_model(tied())),
        """\
unit            class      parameters   elements        bytes  options  why
layers.0 ... 2  3 x Block       3 x 5  3 x 1,088  3 x 4.2 KiB           one of 3 blocks
(model)         Decoder             4      3,360     13.1 KiB           what is left
4 units hold 19 parameters: 6,624 elements, 25.9 KiB; the largest holds 13.1 KiB""",
    )


def test_the_plan_of_a_convolutional_network() -> None:
    assert_expected_inline(
        str(plan_model(convnet())),
        """\
unit       class         parameters   elements         bytes  options  why
1.{0,1,2}  3 Residual             9        456       1.8 KiB           small blocks, merged
2.0        Residual               5        344       1.3 KiB           one of 9 blocks
2.1 ... 2  2 x Residual       2 x 3    2 x 592   2 x 2.3 KiB           one of 9 blocks
3.0        Residual               5      2,656      10.4 KiB           one of 9 blocks
3.1 ... 2  2 x Residual       2 x 3  2 x 9,280  2 x 36.2 KiB           one of 9 blocks
6          Linear                 2      8,256      32.2 KiB           as large as a block
(model)    Sequential             2        112         448 B           what is left
9 units hold 35 parameters: 31,568 elements, 123.3 KiB; the largest holds 36.2 KiB""",
    )


def test_the_plan_of_nested_sequentials() -> None:
    assert_expected_inline(
        str(plan_model(nested())),
        """\
unit         class       parameters  elements      bytes  options  why
1.0 ... 2.1  4 x Block        4 x 5   4 x 209  4 x 836 B           one of 4 blocks
(model)      Sequential           4        66      264 B           what is left
5 units hold 24 parameters: 902 elements, 3.5 KiB; the largest holds 836 B""",
    )


def test_the_plan_of_a_model_without_blocks() -> None:
    assert_expected_inline(
        str(plan_model(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5)))),
        """\
unit     class       parameters  elements  bytes  options  why
(model)  Sequential           4        41  164 B           no repeated blocks were found: choose units yourself
1 units hold 4 parameters: 41 elements, 164 B; the largest holds 164 B""",
    )


def test_experts_are_no_units_since_not_every_rank_runs_them() -> None:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(4, 3)
            self.experts = nn.ModuleList(Block(4, 8) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return sum((expert(x) for expert in self.experts), self.router(x).sum())

    assert chosen(plan_model(nn.Sequential(Mixture(), Mixture()))) == ["0", "1", "(model)"]


class Routed(nn.Module):
    """Every rank runs other experts."""

    def __init__(self, many: str = "experts", chooser: str = "router") -> None:
        super().__init__()
        self.add_module(chooser, nn.Linear(16, 4))
        self.add_module(many, nn.ModuleList(Block(16, 32) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("only planned")


@pytest.mark.parametrize(("many", "chooser"), [("experts", "mix"), ("parts", "router"), ("parts", "gate"), ("parts", "gating")])
def test_experts_are_no_units_wherever_they_are(many: str, chooser: str) -> None:
    """They were, if the mixture was the only one of its class: ranks that ran different ones summed strangers' gradients."""
    alone = Stack(depth=2)
    alone.mixture = Routed(many, chooser)
    assert chosen(plan_model(alone)) == ["blocks.0", "blocks.1", "(model)"]
    row = Stack(depth=2)
    row.blocks.append(Routed(many, chooser))
    assert chosen(plan_model(row)) == ["blocks.0", "blocks.1", "blocks.2", "(model)"]


def test_only_what_is_called_is_chosen_beside_the_blocks() -> None:
    """Tables that others read (queries, positions), parts of an attention, and norms that run elsewhere stay with the model."""
    model = nn.Module()
    model.norm = nn.LayerNorm(16)
    model.embed = nn.Embedding(300, 16)
    model.tables = nn.ModuleList(nn.Embedding(300, 16) for _ in range(3))
    model.attention = nn.MultiheadAttention(16, 2)
    model.layers = nn.ModuleList(Block(16, 32) for _ in range(3))
    model.other = nn.ModuleDict({"query": nn.Embedding(300, 16)})
    model.forward = lambda: None
    assert chosen(plan_model(model)) == ["embed", "layers.0", "layers.1", "layers.2", "(model)"]
    assert "attention.out_proj" not in chosen(plan_model(model, wrap.ModuleWrapPolicy({nn.Linear})))


def test_two_tables_that_are_large_together_are_apart() -> None:
    model = Decoder(50, tied=False)  # 0.74 of a block each, so take larger blocks
    model.layers = nn.ModuleList(Block(16, 64) for _ in range(3))
    assert chosen(plan_model(model)) == ["embed", "layers.0", "layers.1", "layers.2", "norm+head", "(model)"]
    assert chosen(plan_model(Decoder(9, tied=False))) == ["layers.0", "layers.1", "layers.2", "(model)"]


def test_modules_that_must_not_be_split_are_blocks() -> None:
    class Stage(nn.Sequential):
        pass

    model = nn.Sequential(Stage(Block(), Block()), Stage(Block(), Block(), Block()))
    assert chosen(plan_model(model)) == ["0.0", "0.1", "1.0", "1.1", "1.2", "(model)"]
    model._no_split_modules = ["Stage"]
    assert chosen(plan_model(model)) == ["0", "1", "(model)"]


def test_a_plan_can_be_edited() -> None:
    plan = plan_model(Stack(depth=4))
    plan.drop("blocks.3")
    plan.merge("blocks.0", "blocks.1")
    plan.add("head", "inp", why="by hand", reshard_after_forward=False)
    plan.set("blocks.2", reshard_after_forward=2)
    assert_expected_inline(
        str(plan),
        """\
unit          class     parameters  elements    bytes  options                      why
blocks.{0,1}  2 Block           10       418  1.6 KiB                               merged
blocks.2      Block              5       209    836 B  reshard_after_forward=2      one of 4 blocks
inp+head      2 Linear           4        66    264 B  reshard_after_forward=False  by hand
(model)       Stack              5       209    836 B                               what is left
4 units hold 24 parameters: 902 elements, 3.5 KiB; the largest holds 1.6 KiB""",
    )


def test_modules_inside_one_another_are_no_unit_together() -> None:
    plan = plan_model(Stack(depth=2))
    for nested in (("blocks.0", "blocks.0.up"), ("blocks.1", ""), ("head", "head")):
        with pytest.raises(ValueError):
            plan.add(*nested)
    with pytest.raises(ValueError, match="qualified names"):
        PlannedUnit("head")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected PlannedUnits"):
        Plan(plan.outline, ["head"])  # type: ignore[list-item]
    before = plan.units[0]
    plan.drop("blocks.0")
    with pytest.raises(ValueError, match="an edit creates new units"):
        plan.entries(before)


def test_a_shared_module_has_all_its_names() -> None:
    shared = nn.Linear(3, 3)
    plan = Plan(ModelSummary.of(nn.Sequential(nn.Sequential(shared, nn.ReLU()), nn.Sequential(shared))), [])
    plan.add("1.0")
    assert chosen(plan) == ["0.0", "(model)"]
    plan.drop("1.0")
    assert chosen(plan) == ["(model)"]


def test_units_that_share_a_parameter_become_one() -> None:
    model = decoder()
    plan = Plan(ModelSummary.of(model), [PlannedUnit(("embed",)), PlannedUnit(("head",))])
    assert chosen(plan) == ["embed", "head", "(model)"]
    model.head.weight = model.embed.weight
    plan = Plan(ModelSummary.of(model), [PlannedUnit(("embed",)), PlannedUnit(("head",))])
    assert chosen(plan) == ["embed+head", "(model)"]
    assert [entry.name for entry in plan.entries(plan.units[0])] == ["embed.weight"]


@pytest.mark.parametrize(
    "edit",
    [
        lambda plan: plan.add("blocks.7"),
        lambda plan: plan.add("blocks"),
        lambda plan: plan.add(),
        lambda plan: plan.drop("head"),
        lambda plan: plan.drop(""),
        lambda plan: plan.merge("blocks.0"),
        lambda plan: plan.set("inp", reshard_after_forward=True),
    ],
)
def test_edits_of_what_is_not_there_say_so(edit: Any) -> None:
    plan = plan_model(Stack(depth=2))
    before = str(plan)
    with pytest.raises(ValueError) as raised:
        edit(plan)
    assert str(plan) == before and len(str(raised.value)) > 40


# --- refusals -------------------------------------------------------------------------------------------------------------


def test_what_a_plan_cannot_be_made_of_is_refused_by_name() -> None:
    model = Stack(depth=2)
    with pytest.raises(ValueError, match=r"pass CustomPolicy\(function\)"):
        plan_model(model, lambda module: True)
    with pytest.raises(ValueError, match="ignored_modules expected modules"):
        plan_model(model, ignored_modules=["blocks.0"])  # type: ignore[list-item]
    assert_expected_inline(
        refusal(lambda: plan_model(model, 7)),
        """ValueError: policy expected 'auto', a Plan, a Policy, or a function (module, recurse, nonwrapped_numel) -> bool, got 7.""",
    )
    assert_expected_inline(
        refusal(lambda: plan_model(model, wrap.CustomPolicy(lambda m: "yes"))),
        """ValueError: Expected True, False or a dict of options from the function of CustomPolicy, got 'yes' for 'inp'.""",
    )
    assert_expected_inline(
        refusal(lambda: plan_model(model, wrap.ModuleWrapPolicy({nn.ModuleList}))),
        """ValueError: The policy chose 'blocks' (ModuleList), which has no forward and would never be all-gathered. Choose the modules in it, or the module around it.""",
    )
    assert_expected_inline(
        refusal(lambda: wrap.ModuleWrapPolicy({Block, 3})),
        """ValueError: ModuleWrapPolicy expected classes of modules, got 3.""",
    )
    assert_expected_inline(
        refusal(lambda: wrap.AutoPolicy(tiny=-1)), """ValueError: Expected a number >= 0 for AutoPolicy.tiny, got -1."""
    )


def refusal(call: Any) -> str:
    with pytest.raises((ValueError, TypeError)) as raised:
        call()
    return f"{type(raised.value).__name__}: {raised.value}"


@ranks(1)
def test_a_model_with_units_is_refused_and_nothing_changes_when_options_are_wrong(world: World) -> None:
    model = Stack(depth=2)
    fully_shard(model.blocks[1], mesh=world.mesh)
    assert_expected_inline(
        refusal(lambda: shard_model(model, world.mesh)),
        """ValueError: Modules ['blocks.1'] are units already. A plan needs a model without units. Call fully_shard() yourself on the other modules, or undo(model) first.""",
    )
    model = Stack(depth=2)
    assert_expected_inline(
        refusal(lambda: shard_model(model, world.mesh, reshard=True)),
        """TypeError: fully_shard() has no option 'reshard'. Expected one of ['check_policy', 'comm_policy', 'dp_mesh_dims', 'mp_policy', 'offload_policy', 'reshard_after_forward', 'shard_placement_fn', 'states', 'sync'].""",
    )
    plan = plan_model(model)
    plan.set("", reshard_after_forward="no")  # found before blocks are sharded
    assert_expected_inline(
        refusal(lambda: shard_model(model, world.mesh, plan)),
        """ValueError: reshard_after_forward must be True, False, an int or None, got 'no'.""",
    )
    assert not any(isinstance(module, fullshard.FSDPModule) for module in model.modules())
    assert type(model.head.weight) is nn.Parameter
    whole = plan_model(model)
    with pytest.raises(ValueError, match=r"plan.drop\('blocks.0'\)"):
        shard_model(model, world.mesh, whole, ignored_modules=[model.blocks[0]])
    fully_shard(model.blocks[0], mesh=world.mesh)
    shard_model(model, world.mesh, ignored_modules=[model.blocks[0]])  # units of what is left alone are the caller's


def half_frozen() -> nn.Module:
    model = Stack(depth=3)
    for block in model.blocks:
        block.up.requires_grad_(False)
    model.inp.requires_grad_(False)
    return model


@pytest.mark.proves("12a")
@ranks(1)
def test_units_that_mix_trainable_and_frozen_parameters_are_told(world: World) -> None:
    assert_expected_inline(
        refusal(lambda: shard_model(half_frozen(), world.mesh, strict=True)),
        """ValueError: strict=True: Unit 'blocks.0' mixes parameters that are trainable (105 elements in blocks.0.norm.weight, blocks.0.norm.bias, blocks.0.down.weight) with frozen parameters (104 elements in blocks.0.up.weight, blocks.0.up.bias). They are all-gathered in separate groups, so that frozen parameters have no gradients. This needs one more collective per all-gather. Make separate units of the frozen modules to avoid it. The same applies to blocks.1, blocks.2. Unit '(model)' mixes parameters that are trainable (24 elements in head.weight, head.bias) with frozen parameters (42 elements in inp.weight, inp.bias). They are all-gathered in separate groups, so that frozen parameters have no gradients. This needs one more collective per all-gather. Make separate units of the frozen modules to avoid it.""",
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        shard_model(half_frozen(), world.mesh)
    said = [str(warning.message) for warning in caught if "mixes" in str(warning.message)]
    assert len(said) == 2 and said[0].endswith("The same applies to blocks.1, blocks.2.")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = Stack(depth=2)  # alike in shapes only: both are told
        other.blocks[0].norm.weight.requires_grad_(False)
        other.blocks[1].norm.bias.requires_grad_(False)
        with pytest.warns(UserWarning, match="mixes") as both:
            shard_model(other, world.mesh)
        assert len(both) == 2
        alone = plan_model(half_frozen())
        for index in range(3):
            alone.add(f"blocks.{index}.up")
        alone.add("inp")
        shard_model(half_frozen(), world.mesh, alone, strict=True)


# --- sharding -------------------------------------------------------------------------------------------------------------


FAMILIES = {decoder: tokens, tied: tokens, convnet: images, nested: batch, half_frozen: batch}


@pytest.mark.proves("30a")
@pytest.mark.parametrize("build", FAMILIES)
@ranks(2)
def test_a_model_sharded_in_one_call_trains_as_the_plain_one(world: World, build: Any) -> None:
    model = build().eval()  # batch norms of parts differ from those of all, by definition

    def shard(sharded: nn.Module) -> None:
        plan = shard_model(sharded, world.mesh)
        assert len(units_of(sharded, True)) == len(plan.units)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train_both(world, model, shard, steps=2, inputs=FAMILIES[build])


@ranks(2)
def test_each_unit_holds_what_the_plan_says(world: World) -> None:
    for build in (decoder, tied, convnet, nested):
        model = build()
        plan = shard_model(model, world.mesh)
        for unit in plan.units:
            held = unit_of(model.get_submodule(unit.modules[0]))
            assert held is not None
            assert sum(p.sharded.numel() for p in held.parameters) == sum(entry.numel for entry in plan.entries(unit)), (
                unit.name
            )


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mid = nn.Embedding(30, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.mid(self.embed(x))


class Apart(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.enc, self.head = Encoder(), nn.Linear(8, 30, bias=False)
        if tied:
            self.head.weight = self.enc.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.enc(x))


@pytest.mark.parametrize("is_tied", [True, False])
@ranks(2)
def test_a_unit_with_a_part_inside_another_holds_what_the_plan_says(world: World, is_tied: bool) -> None:
    """The one around was made first and took what belonged to the other; then both became one."""
    model = Apart(is_tied)
    plan = plan_model(model, wrap.ModuleWrapPolicy({Encoder}))
    plan.add("enc.embed", "head", reshard_after_forward=False)
    assert chosen(plan) == ["enc", "enc.embed+head", "(model)"]
    sharded = copy.deepcopy(model)
    shard_model(sharded, world.mesh, plan)
    for unit in plan.units:
        held = unit_of(sharded.get_submodule(unit.modules[0]))
        assert held is not None and len(held.modules) == len(unit.modules)
        assert sorted(p.sharded.numel() for p in held.parameters) == sorted(e.numel for e in plan.entries(unit)), unit.name
    for step in range(2):
        x = torch.randint(0, 30, (12, 4), generator=torch.Generator().manual_seed(step))
        square(sharded(world.mine(x))).backward()
        square(model(x)).backward()
        assert_same_grads(sharded, model)


@ranks(2)
def test_batch_norms_keep_the_other_options_of_their_unit(world: World) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)))
    plan = plan_model(model)
    plan.set("0", reshard_after_forward=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        done = shard_model(model, world.mesh, plan, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    first = next(unit for unit in done.units if unit.modules == ("0.1",))
    assert first.options["reshard_after_forward"] is False and first.options["mp_policy"].param_dtype is torch.float32
    root = nn.BatchNorm1d(4)
    shard_model(root, world.mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float64))
    assert root(batch(0, 4)).dtype == torch.float64


@ranks(2)
def test_options_of_one_unit_go_before_those_of_all(world: World) -> None:
    model = Stack(depth=2)
    plan = plan_model(model)
    plan.set("blocks.1", reshard_after_forward=False)
    shard_model(model, world.mesh, plan, reshard_after_forward=True)
    with fullshard.counting(model) as messages:
        square(model(world.mine(batch(0)))).backward()
    assert [m.kind for m in messages].count("all_gather") == 5  # two for each unit, one for blocks.1


@ranks(2)
def test_batch_norms_compute_in_full_precision(world: World) -> None:
    """FSDP1 leaves them out of mixed precision, as units of their own; here all of one unit share one."""
    model = convnet()
    reference = copy.deepcopy(model)
    seen: list[tuple[torch.dtype, ...]] = []
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.register_forward_hook(
                lambda m, args, out: seen.append((m.weight.dtype, args[0].dtype, m.running_mean.dtype))
            )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan = shard_model(model, world.mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    assert any("BatchNorm2d compute in the dtype of their own parameters" in str(w.message) for w in caught)
    kept = [unit for unit in plan.units if unit.why == "full precision"]
    assert sum(len(unit.modules) for unit in kept) == 9 and len(kept) < 9
    x = images(0)
    out = model(x)
    assert out.dtype == torch.bfloat16 and seen and set(seen) == {(torch.float32,) * 3}
    expected = reference(x)
    assert (out.float() - expected).abs().max() < 0.05 * expected.abs().max()
    square(out).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@ranks(1)
def test_batch_norms_follow_the_others_when_told(world: World) -> None:
    model = convnet()
    plan = shard_model(model, world.mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16), full_precision=())
    assert not any(unit.why == "full precision" for unit in plan.units)


@ranks(2)
def test_what_is_ignored_stays_plain(world: World) -> None:
    model = Stack(depth=3)
    shard_model(model, world.mesh, ignored_modules=[model.blocks[1]], ignored_params=[model.head.bias])
    plain = [name for name, p in model.named_parameters() if type(p) is nn.Parameter and not hasattr(p, "placements")]
    assert plain == [name for name in dict(model.named_parameters()) if name.startswith("blocks.1.") or name == "head.bias"]


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2048, 1024, bias=index > 1) for index in range(3))
        self.gate = nn.Linear(1024, 1, bias=False)
        self.scale = nn.Parameter(torch.tensor(2.0))  # a scalar, which is not sharded

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.cat([layer(x), x], 1)[:, :2048]
        return self.gate(x[:, :1024]) * self.scale


@pytest.mark.parametrize("low", [False, True])
@ranks(2)
def test_a_plan_tells_the_messages_that_training_sends(world: World, low: bool) -> None:
    model = Wide()
    mp = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if low else MixedPrecisionPolicy()
    plan = plan_model(model)
    told = plan.messages(2, mp_policy=mp)
    shard_model(model, world.mesh, policy=plan, mp_policy=mp, comm_policy=CommPolicy(collectives=in_order))
    with fullshard.counting(model) as messages:
        out = model(torch.randn(2, 2048))
    forward = [message for message in messages if message.kind == "all_gather" and message.ranks > 1]
    with fullshard.counting(model) as messages:
        out.sum().backward()
    sums = [m for m in messages if m.kind in ("reduce_scatter", "all_reduce") and m.ranks > 1]
    reductions = [m for m in sums if m.dtype.is_floating_point]
    groups = [group for unit in units_of(model, True) for group in unit.groups]
    assert [name for name, _ in told] == [unit.name for unit in plan.units]
    assert sum(one.gathered for _, one in told) == len(forward)
    assert sum(one.reduced for _, one in told) == len(reductions)
    assert sum(one.full for _, one in told) == sum(group.unsharded_nbytes for group in groups)
    real = sum(group.dtypes.compute.itemsize * p.shape.numel() for group in groups for p in group.parameters)
    assert sum(one.full - one.padding for _, one in told) == real
    direct = sum(one.direct for _, one in told)
    sent = sum(m.nbytes for m in forward if m.kind == "all_gather")
    assert direct + sum(one.gather_staging for _, one in told) == sent and direct >= 3 * 2048 * 1024 * (2 if low else 4)
    assert sum(one.kept for _, one in told) == 4 * sum(entry.numel for entry in plan.outline.parameters)
    assert str(told).splitlines()[-1].startswith("on 2 ranks parameters are direct from 256.0 KiB per rank or 8.0 MiB in all")


def test_a_plan_remarks_on_units_of_few_rows() -> None:
    plan = plan_model(nn.Sequential(nn.Linear(1 << 18, 3), nn.Linear(3, 3)))
    remark = "parameters of '(model)' have few rows: shard another dim with shard_placement_fn"
    assert str(plan.messages(8)).endswith(remark) and remark not in str(plan.messages(3))


def test_messages_of_a_plan_refuse_what_is_no_number_of_ranks() -> None:
    for wrong in (0, True, 2.0):
        with pytest.raises(ValueError, match=r"ranks must be an int of at least 1, got"):
            plan_model(Wide()).messages(wrong)  # type: ignore[arg-type]
