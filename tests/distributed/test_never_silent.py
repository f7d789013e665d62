"""What users of sharding libraries do, and what happens here: right, or an error that names the parameter or unit and the fix.

docs/never-silent.md has one row for each of these stories, and for those that other files tell.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import re
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from harness import World, ranks, until
from models import Stack, assert_near, assert_same_grads, assert_same_parameters, batch, full, rounding, shard_stack, square
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fullshard
from fullshard import CheckPolicy, LintWarning, MixedPrecisionPolicy, StateError, errors, fully_shard
from fullshard.core import unit_of

EAGER = CheckPolicy(patience=0.2)
TEXTS = {  # names and the key phrase
    "other units": "rank 0 ran all_gather of 'right' (forward); rank 1 ran all_gather of 'left' (forward)",
    "skipped tower": "rank 0 ran all_gather of 'tower' (forward); rank 1 ran all_gather of 'behind' (forward)",
    "skipped backward": "rank 0 ran all_gather of 'blocks.2' (backward); rank 1 ran all_gather of 'blocks.0' (forward)",
    "evaluation on one rank": "rank 0 ran all_gather of 'Stack' (forward); rank 1 ran all_gather of 'blocks.2' (backward)",
    "replicas": "ranks 0 and 1 ran all_gather of 'right' (forward); ranks 2 and 3 ran all_gather of 'left' (forward)",
    "options differ": "rank 0 ran reduce_scatter of 'Stack'; rank 1 ran all_gather of 'blocks.0' (backward)",
    "too late": "rank 0 waited 3 seconds (CheckPolicy.timeout) in collective N, all_gather of 'Stack' (forward)",
    "one rank has fewer batches": "rank 0 ran all_gather of 'Stack' (forward); rank 1 ran any_failed()",
    "head replaced": "Parameters ('head.weight', 'head.bias') were added to unit 'Stack'",
    "adapter added": "Parameters ('up.lora') were added to unit 'blocks.0'",
    "root": "Unit 'Sequential' stays unsharded from its forward to the end of its backward, and has 99% of the parameters",
    "root forgotten": "steps sharded parameters and 2 plain ones ('1.weight', '1.bias')",
    "clipping on one rank": "rank 0 ran clip_grad_norm_(1.0, 2.0) of N parameters; rank 1 ran all_gather of 'Stack' (forward)",
    "subclass": "Parameter 'weight' of unit 'Linear' cannot be all-gathered: it is a Tagged without all-gather hooks",
    "unknown option": "unexpected keyword argument 'reshard_after_foward'",
    "unknown remark": "CheckPolicy.silence takes names out of ('root', 'optimizer', 'added'), got 'rot'",
    "no unit": "Linear is not sharded",
}


def says(key: str, said: object) -> None:
    """That what was said contains `TEXTS[key]`, with N for the numbers of calls."""
    found = re.sub(r"\b(collective|call|of) \d+", r"\1 N", re.sub(r"^\d+ of", "N of", str(said)))
    assert TEXTS[key] in found, found


def stops(key: str, fn: Callable[[], Any], error: type[Exception] = StateError, limit: float = 10.0) -> None:
    """`fn` raises on this rank, soon, and says so."""
    begin = time.monotonic()
    with pytest.raises(error) as caught:
        fn()
    assert time.monotonic() - begin < limit
    says(key, caught.value)


@contextlib.contextmanager
def remarks(world: World) -> Iterator[list[str]]:
    """The remarks that are made on the first rank while the block runs, as if none had been made before."""
    errors._SAID.clear()
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    found += [str(w.message) for w in caught if issubclass(w.category, LintWarning)]
    assert world.rank == 0 or not found, "one line, not one per rank"


class Siblings(nn.Module):
    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(5, 5), nn.Linear(5, width)

    def forward(self, x: Tensor, which: str) -> Tensor:
        return getattr(self, which)(x)


# --- ranks that do not do the same ---------------------------------------------------------------------------------------


@pytest.mark.proves("1c")
@ranks(2)
def test_ranks_that_run_units_of_different_shapes_are_told_both_names(world: World) -> None:
    """Rank 0 runs one tower, rank 1 another. Elsewhere: "Connection reset by peer", or a hang. Here all ranks raise, and both
    towers are named."""
    model = Siblings(7)
    for module in (model.left, model.right, model):
        fully_shard(module, mesh=world.mesh, check_policy=EAGER)
    which = "left" if world.rank else "right"
    stops("other units", lambda: square(model(world.mine(batch(0)), which)).backward())


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower, self.behind = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor, image: bool, join: bool = False) -> Tensor:
        if image:
            x = torch.tanh(self.tower(x))
        elif join:
            self.tower.join()
        return self.behind(x)


@pytest.mark.proves("1d")
@ranks(2)
def test_a_tower_that_one_rank_skips_is_named_and_join_is_the_fix(world: World) -> None:
    """A batch without an image on one rank skips the vision tower. Elsewhere: a hang, or other units' weights. Here all ranks
    raise and name it; join() on the rank that skips makes it right."""
    plain = Vision()
    model, other = copy.deepcopy(plain), copy.deepcopy(plain)
    for module in (model.tower, model.behind, model, other.tower, other.behind, other):
        fully_shard(module, mesh=world.mesh, check_policy=EAGER)
    square(model(world.mine(batch(1)), world.rank == 0, join=True)).backward()
    for rank, part in enumerate(batch(1).chunk(2)):
        (square(plain(part, rank == 0)) / 2).backward()
    assert_same_grads(model, plain)
    stops("skipped tower", lambda: square(other(world.mine(batch(0)), world.rank == 0)).backward())


@pytest.mark.proves("1e")
@ranks(4)
def test_replicas_that_run_different_units_are_told(world: World) -> None:
    """Hybrid sharding, and the replicas choose different towers. Elsewhere the replicas' gradients of different units are
    summed. Here all four ranks raise."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = Siblings()
    for module in (model.left, model.right, model):
        fully_shard(module, mesh=mesh, check_policy=EAGER)
    which = "left" if world.rank // 2 else "right"
    stops("replicas", lambda: square(model(world.mine(batch(0)), which)).backward())


@pytest.mark.proves("32b")
@ranks(2)
def test_a_rank_that_skips_a_backward_is_told_where_the_others_are(world: World) -> None:
    """Rank 1 finds its loss not to its taste and goes to the next batch. Elsewhere: a hang, or gradients of two steps in one
    sum. Here all ranks raise."""
    model = shard_stack(Stack(), world.mesh, check_policy=EAGER)

    def steps() -> None:
        for step in range(2):
            loss = square(model(world.mine(batch(step))))
            if world.rank == 0 or step:
                loss.backward()

    stops("skipped backward", steps)


@pytest.mark.proves("32b")
@ranks(2)
def test_a_bad_loss_on_one_rank_skips_the_step_on_all(world: World) -> None:
    """The same done right, before backward. Elsewhere by a hand-written all-reduce, and what was gathered stays gathered."""
    plain = Stack()
    model = shard_stack(copy.deepcopy(plain), world.mesh, check_policy=EAGER)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    for step in range(3):
        loss = square(model(world.mine(batch(step))))
        if fullshard.any_failed(world.mesh, step == 1 and world.rank == 0):
            assert step == 1
            continue
        loss.backward()
        square(plain(batch(step))).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(model, plain)


@pytest.mark.proves("32c")
@ranks(2, 3)
def test_a_rank_of_replicas_that_fails_in_backward_leaves_nobody_waiting_for_its_sums(world: World) -> None:
    """A sum over replicas begins when the one over shards is waited for. A rank that failed never comes to that."""
    mesh = init_device_mesh("cpu", (world.size, 1), mesh_dim_names=("replicate", "shard"))
    sharded = shard_stack(Stack(), mesh, check_policy=CheckPolicy(patience=0.2))

    def fail(grad: Tensor) -> None:
        raise ValueError("bad")

    outputs: list[Tensor] = []
    sharded.inp.register_forward_hook(lambda m, a, out: outputs.append(out))
    loss = square(sharded(world.mine(batch(0))))
    if world.rank == 0:
        outputs[0].register_hook(fail)
    begin = time.monotonic()
    with pytest.raises(StateError if world.rank else ValueError):
        loss.backward()
    assert time.monotonic() - begin < 20.0


@pytest.mark.proves("32d")
@ranks(2)
def test_a_rank_with_fewer_batches_is_found_by_those_that_wait_for_it(world: World) -> None:
    """Rank 1 runs out of batches and calls any_failed(); rank 0 is in its next forward. Elsewhere it waits for half an hour.
    Here both are told where the other one is."""
    model = shard_stack(Stack(), world.mesh, check_policy=EAGER)
    assert not fullshard.any_failed(world.mesh)
    square(model(world.mine(batch(0)))).backward()
    stops(
        "one rank has fewer batches",
        lambda: fullshard.any_failed(world.mesh, True) if world.rank else model(world.mine(batch(1))),
    )


@pytest.mark.proves("23b")
@ranks(2)
def test_an_evaluation_on_one_rank_only_is_named(world: World) -> None:
    """`if rank == 0: evaluate(model)`. Elsewhere: a hang, or a gather that pairs with the others' training. Here all ranks
    raise, with what each of them was at."""
    model = shard_stack(Stack(), world.mesh, check_policy=EAGER)
    square(model(world.mine(batch(0)))).backward()

    def evaluate_and_train() -> None:
        if world.rank == 0:
            with torch.no_grad():
                model(batch(0))
        square(model(world.mine(batch(1)))).backward()

    stops("evaluation on one rank", evaluate_and_train)


@pytest.mark.proves("31a")
@ranks(2)
def test_a_rank_that_does_not_come_is_named_after_the_timeout(world: World) -> None:
    """Rank 1 hangs in its data loader. Elsewhere the message after half an hour names a collective by its number. Here it
    names the unit, the pass and where the others are, after as many seconds as CheckPolicy(timeout=) says."""
    policy = CheckPolicy(patience=0.2, timeout=3.0)  # on a busy machine an answer takes more than a second
    model = shard_stack(Stack(), world.mesh, check_policy=policy)
    unit = model._fullshard_unit
    square(model(world.mine(batch(0)))).backward()

    def load_and_train() -> None:
        if world.rank == 1:  # its data come when nobody waits for it any more
            until(lambda: unit.runtime.communicator.log_of(unit.axis).desync_error)
        square(model(world.mine(batch(1)))).backward()

    stops("too late", load_and_train)


@pytest.mark.proves("13b")
@ranks(2)
def test_clipping_on_one_rank_only_is_named(world: World) -> None:
    """`if rank == 0: log(clip_grad_norm_(...))`. Elsewhere: a hang, or the norm is added to somebody's gradient."""
    model = shard_stack(Stack(), world.mesh, check_policy=EAGER)

    def log_and_train() -> None:
        square(model(world.mine(batch(0)))).backward()
        if world.rank == 0:
            fullshard.clip_grad_norm_(model.parameters(), 1.0)
        square(model(world.mine(batch(1)))).backward()

    stops("clipping on one rank", log_and_train)


@pytest.mark.proves("40b")
@ranks(2)
def test_options_that_differ_between_ranks_are_an_error(world: World) -> None:
    """A configuration file that was edited on one machine only. Elsewhere: a hang. Here both calls are named."""
    model = Stack(1)
    fully_shard(model.blocks[0], mesh=world.mesh, check_policy=EAGER, reshard_after_forward=bool(world.rank))
    fully_shard(model, mesh=world.mesh, check_policy=EAGER)
    stops("options differ", lambda: square(model(world.mine(batch(0)))).backward())


# --- parameters that nobody would train together -------------------------------------------------------------------------


@pytest.mark.proves("10b")
@ranks(2)
def test_a_forgotten_root_is_remarked_at_the_first_optimizer_step(world: World) -> None:
    """fully_shard on the blocks, and not on the model: head and norm are plain and drift apart. Elsewhere: silence."""
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    fully_shard(model[0], mesh=world.mesh)
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1, foreach=False)
    with remarks(world) as found:
        for step in range(2):
            square(model(world.mine(batch(step)))).backward()
            optimizer.step()
    if world.rank == 0:
        (line,) = found
        says("root forgotten", line)


@pytest.mark.proves("10a")
@ranks(2)
def test_a_root_that_holds_most_of_the_model_is_remarked(world: World) -> None:
    """Memory does not shrink, since the large table landed in the root. Elsewhere: profile it. Here there is one line, and
    CheckPolicy(silence=("root",)) takes it away."""
    for silence in ((), ("root",)):
        model = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 10))
        for module in (model[1], model):
            fully_shard(module, mesh=world.mesh, check_policy=CheckPolicy(silence=silence))
        with remarks(world) as found:
            model(torch.ones(1, 1000))
        if world.rank == 0 and not silence:
            (line,) = found
            says("root", line)
        else:
            assert not found


@pytest.mark.proves("12c")
@ranks(2)
def test_parameters_that_come_after_sharding_are_refused_by_name(world: World) -> None:
    """A new head for fine-tuning, or an adapter, put in after fully_shard. Elsewhere each rank trains its own, silently. Here
    the first forward names them; frozen ones are welcome."""
    plain = Stack()
    model = shard_stack(copy.deepcopy(plain), world.mesh)
    head, model.head = model.head, nn.Linear(7, 3)
    for _ in range(2):
        stops("head replaced", lambda: model(world.mine(batch(0))))
    model.head = head
    model.blocks[0].up.lora = nn.Parameter(torch.ones(1))
    stops("adapter added", lambda: model(world.mine(batch(0))))
    model.blocks[0].up.lora.requires_grad_(False)
    model.zero_grad()
    square(model(world.mine(batch(1)))).backward()
    square(plain(batch(1))).backward()
    del model.blocks[0].up.lora
    assert_same_grads(model, plain)


@pytest.mark.proves("19c")
@ranks(2)
def test_freezing_and_thawing_while_gathered_is_kept(world: World) -> None:
    """requires_grad_() inside a forward, or between unshard() and reshard(). Elsewhere it is lost when the unit is freed."""
    model = fully_shard(nn.Linear(5, 3), mesh=world.mesh)

    def freeze(module: nn.Module, args: Any) -> None:
        module.weight.requires_grad_(False)

    handle = model.register_forward_pre_hook(freeze)
    model(world.mine(batch(0)))
    handle.remove()
    assert not model.weight.requires_grad
    model.unshard()
    model.weight.requires_grad_(True)
    model.bias.requires_grad_(False)
    model.reshard()
    square(model(world.mine(batch(0)))).backward()
    assert model.weight.grad is not None and model.bias.grad is None


@pytest.mark.proves("19c")
@ranks(2)
def test_freezing_the_sharded_parameter_while_gathered_is_kept(world: World) -> None:
    """An optimizer refers to sharded parameters, while the modules have the unsharded ones."""
    model = fully_shard(nn.Linear(5, 3), mesh=world.mesh)
    weight = model.weight
    model.unshard()
    weight.requires_grad_(False)
    model.reshard()
    assert model.weight is weight and not weight.requires_grad
    square(model(world.mine(batch(0)))).backward()
    assert model.weight.grad is None and model.bias.grad is not None


@pytest.mark.proves("19c")
@ranks(2)
def test_freezing_a_unit_that_stays_unsharded_gathers_nothing(world: World) -> None:
    """`requires_grad` takes effect in the next forward, also of a unit that needs no all-gather for it."""
    plain = Stack()
    model = shard_stack(copy.deepcopy(plain), world.mesh, states=fullshard.ZERO2)
    for step in range(3):
        with fullshard.counting(model) as calls:
            square(model(world.mine(batch(step)))).backward()
        square(plain(batch(step))).backward()
        assert (sum(call.kind == "all_gather" for call in calls) > 0) is (step == 0)
        assert_same_grads(model, plain)
        for one in (model, plain):
            one.zero_grad()
            one.blocks[1].requires_grad_(step == 1)


# --- dtypes, accumulation, meshes ------------------------------------------------------------------------------------------


class Late(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.late = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor, late: bool) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.late(x) if late else x


@pytest.mark.proves("8b")
@ranks(2)
def test_a_parameter_first_used_by_the_last_microbatch_is_reduced_with_the_others(world: World) -> None:
    """Elsewhere: "expects uniform gradient dtype", of no parameter in particular."""
    plain = Late()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = fully_shard(copy.deepcopy(plain), mesh=world.mesh, mp_policy=policy)
    for micro in range(3):
        with model.accumulate() if micro < 2 else contextlib.nullcontext():
            square(model(world.mine(batch(micro)), micro == 2)).backward()
        square(plain(batch(micro), micro == 2)).backward()
    assert_same_grads(model, plain, rounding(torch.bfloat16))


@pytest.mark.proves("22a")
@ranks(2)
def test_an_exception_inside_accumulate_leaves_no_setting_behind(world: World) -> None:
    """Elsewhere the flag stays as it was when the microbatch raised, and no gradient is ever reduced again."""
    plain = Stack()
    model = shard_stack(copy.deepcopy(plain), world.mesh)
    with pytest.raises(ValueError, match="out of luck"), model.accumulate():
        square(model(world.mine(batch(0)))).backward()
        raise ValueError("out of luck")
    model.zero_grad()
    square(model(world.mine(batch(1)))).backward()
    square(plain(batch(1))).backward()
    assert_same_grads(model, plain)


@pytest.mark.proves("29b")
@ranks(2)
def test_replicas_of_a_single_shard_reduce_their_gradients(world: World) -> None:
    """A hybrid mesh whose shard axis has one rank. Elsewhere that once turned the reduction off, silently."""
    plain = Stack()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = shard_stack(copy.deepcopy(plain), mesh)
    square(model(world.mine(batch(0)))).backward()
    square(plain(batch(0))).backward()
    assert_same_grads(model, plain)


class Quantized(nn.Module):
    """A frozen base of bytes below a trained adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.arange(35, dtype=torch.uint8).view(7, 5), requires_grad=False)
        self.adapter = nn.Linear(5, 7)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.base.float() * 0.1).t() + self.adapter(x)


@pytest.mark.proves("12b")
@ranks(2)
def test_a_frozen_base_of_bytes_travels_as_bytes_and_its_adapter_trains(world: World) -> None:
    """Elsewhere bytes are refused, or the adapter's loss is 0 and nothing is said."""
    plain = Quantized()
    model = copy.deepcopy(plain)
    fully_shard(model, mesh=world.mesh)
    square(model(world.mine(batch(0)))).backward()
    square(plain(batch(0))).backward()
    assert_same_grads(model, plain)
    assert model.base.dtype == torch.uint8 and model.base.to_local().numel() < 35


@pytest.mark.proves("38a")
@ranks(2)
def test_a_subclass_that_would_be_stripped_is_refused_by_name(world: World) -> None:
    """Elsewhere the gathered weight is a plain tensor, and what its class did (fp8, say) is silently not done."""

    class Tagged(torch.Tensor):
        pass

    model = nn.Linear(5, 3)
    model.weight = nn.Parameter(torch.ones(3, 5).as_subclass(Tagged))
    fully_shard(model, mesh=world.mesh)  # the methods may still come
    for _ in range(2):
        stops("subclass", lambda: model(torch.ones(2, 5)))
    fullshard.undo(model)
    assert type(model) is nn.Linear and torch.equal(model.weight.as_subclass(torch.Tensor), torch.ones(3, 5))


class Shuffled(Stack):
    def forward(self, x: Tensor, order: tuple[int, ...] = (0, 1, 2)) -> Tensor:
        x = self.inp(x)
        for index in order:
            x = self.blocks[index](x)
        return self.head(x)


@pytest.mark.proves("43a")
@ranks(2)
def test_an_order_that_changes_with_every_step_is_right(world: World) -> None:
    """Elsewhere: "Invalidate trace cache", thousands of times, and parameters that say they have no elements."""
    plain = Shuffled()
    model = shard_stack(copy.deepcopy(plain), world.mesh)
    with remarks(world) as found:
        for order in [*itertools.permutations(range(3))] * 3:
            square(model(world.mine(batch(0)), order)).backward()
            square(plain(batch(0), order)).backward()
        assert_same_grads(model, plain)
        assert [p.shape for p in model.parameters()] == [p.shape for p in plain.parameters()]
    assert not found
    assert all("all-gathers were not prefetched" in line for line in fullshard.lint(model))


# --- options, and reading and saving ---------------------------------------------------------------------------------------


@pytest.mark.proves("40a")
@ranks(2)
def test_an_unknown_option_is_an_error(world: World) -> None:
    """A typing error, or an option of another version. Elsewhere configurations drop it and take the default."""
    module = nn.Linear(2, 2)
    stops("unknown option", lambda: fully_shard(module, mesh=world.mesh, reshard_after_foward=False), TypeError)
    stops("unknown remark", lambda: CheckPolicy(silence=("rot",)), ValueError)
    with pytest.raises(TypeError, match=r"fully_shard\(\) has no option 'reshard_after_foward'. Expected one of"):
        fullshard.shard_model(module, world.mesh, reshard_after_foward=False)
    assert type(module) is nn.Linear


@pytest.mark.proves("4a")
@ranks(2)
def test_full_parameters_for_the_first_rank_are_one_copy_and_all_others_take_part(world: World) -> None:
    """How to get an ordinary model out. Elsewhere each rank builds the full copy, or a script merges files afterwards."""
    plain = Stack()
    model = shard_stack(copy.deepcopy(plain), world.mesh)
    saved: dict[str, Tensor] = {}
    with fullshard.full_params(model, write=False, rank0_only=True, device="cpu"):
        if world.rank == 0:
            saved = {name: p.detach().clone() for name, p in model.named_parameters()}
        else:
            assert all(isinstance(p, DTensor) for p in model.parameters())
    if world.rank == 0:
        for name, p in plain.named_parameters():
            assert torch.equal(saved[name], p)
    assert_near(model(batch(0)), plain(batch(0)), "output")


@pytest.mark.proves("3b", "3c")
@ranks(2)
def test_a_penalty_on_sharded_weights_needs_no_gathering(world: World) -> None:
    """Weight decay in the loss, outside of any forward: arithmetic among DTensors alone is right, and so is gathered()."""
    plain = Stack()
    model = shard_stack(copy.deepcopy(plain), world.mesh)
    with fullshard.gathered(model) as params:
        (square(model(world.mine(batch(0)))) + 0.1 * params["head.weight"].square().sum()).backward()
    (square(plain(batch(0))) + 0.1 * plain.head.weight.square().sum()).backward()
    assert_same_grads(model, plain)
    assert_near(full(model.head.weight.square().sum()), plain.head.weight.square().sum(), "norm")
    stops("no unit", lambda: fullshard.gathered(nn.Linear(2, 2)).__enter__())


# Of row 3 no parameter is named in mixes of gradients and of detached parameters with plain tensors (torch's own
# clip_grad_norm_ over sharded and ignored parameters, fused optimizers over both, averages of weights by lerp_).


# --- one rank alone ------------------------------------------------------------------------------------------------------


def alone(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def skip(world: World, model: Any, optimizer: Any, x: Tensor) -> None:
    model(x).sum().backward()
    if world.rank:
        optimizer.step()
    optimizer.zero_grad()


def twice(world: World, model: Any, optimizer: Any, x: Tensor) -> None:
    model(x).sum().backward()
    for _ in range(1 if world.rank else 2):
        optimizer.step()
    optimizer.zero_grad()


def no_zero(world: World, model: Any, optimizer: Any, x: Tensor) -> None:
    model(x).sum().backward()
    optimizer.step()
    if world.rank:
        optimizer.zero_grad()


def other_rate(world: World, model: Any, optimizer: Any, x: Tensor) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.25 if world.rank else 0.125
    alone(model, optimizer, x)


def plateau(world: World, model: Any, optimizer: Any, x: Tensor) -> None:
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    scheduler.step(1.0)
    scheduler.step(0.5 if world.rank else 2.0)  # of a loss that nobody averaged
    alone(model, optimizer, x)


def other_class(world: World, model: Any, optimizer: Any, x: Tensor) -> None:
    alone(model, torch.optim.RMSprop(model.parameters(), lr=0.5) if world.rank else optimizer, x)


def fewer(world: World, model: Any, optimizer: Any, x: Tensor) -> None:
    parameters = list(model.parameters())
    alone(model, torch.optim.SGD(parameters[: 4 - (world.rank == 0)], lr=0.5), x)


STEP = "SGD.step() of 4 parameters, lr={}, momentum=0, dampening=0, weight_decay=0, nesterov=False, maximize=False"
ALONE = {
    skip: ("all_gather of '0' (forward)", STEP.format(0.5)),
    twice: (STEP.format(0.5), "all_gather of '0' (forward)"),
    no_zero: ("reduce_scatter of '1' (added to the gradients that are there)", "reduce_scatter of '1'"),
    other_rate: (STEP.format(0.125), STEP.format(0.25)),
    plateau: (STEP.format(0.25), STEP.format(0.5)),
    other_class: (
        STEP.format(0.5),
        "RMSprop.step() of 4 parameters, lr=0.5, momentum=0, alpha=0.99, eps=1e-08, centered=False, weight_decay=0, "
        "maximize=False",
    ),
    fewer: (STEP.format(0.5).replace("4", "3"), STEP.format(0.5)),
}


OTHERS = ("rank 1", "rank 2", "ranks 1 and 2", "the others")


@pytest.mark.proves("32e", "32f", "32g")
@pytest.mark.rotates(2)
@pytest.mark.parametrize("done", ALONE, ids=lambda done: done.__name__)
@ranks(2, 3)
def test_a_step_that_one_rank_makes_alone_is_named_on_all(world: World, done: Any) -> None:
    """Only rank 0 steps, or steps in another way than the others. What each trains then is a patchwork of two models."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for module in (*model, model):
        fully_shard(module, mesh=world.mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.randn(2, 4)
    for _ in range(2):
        alone(model, optimizer, x)
    with pytest.raises(StateError) as caught:
        done(world, model, optimizer, x)
        for _ in range(2):
            alone(model, optimizer, x)
    first, second = ALONE[done]
    # Ranks that did not come to tell where they are by then are left out.
    told = [f"Ranks diverged at collective N: rank 0 ran {first}; {rest} ran {second}. All ranks" for rest in OTHERS]
    said = re.sub(r"collective \d+", "collective N", str(caught.value))
    assert any(said.startswith(text) for text in told), said


@pytest.mark.proves("32e")
@ranks(2)
def test_a_step_that_one_rank_skips_is_named_also_after_groups_were_made_anew(world: World) -> None:
    """The entry of an optimizer outlives the groups that it was first made for."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for module in (*model, model):
        fully_shard(module, mesh=world.mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.randn(2, 4)
    alone(model, optimizer, x)
    before = weakref.ref(unit_of(model[0]).groups[0])
    model.double()
    assert before() is None
    with pytest.raises(StateError, match=r"SGD\.step\(\) of 4 parameters"):
        skip(world, model, optimizer, x.double())
        for _ in range(2):
            alone(model, optimizer, x.double())


@pytest.mark.proves("32j")
@ranks(2, 3)
def test_ranks_that_stepped_before_the_step_failed_are_told(world: World) -> None:
    """Rank 1 fails between backward and step, and the others step. Their weights belong to different steps, so the vote raises."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for module in (*model, model):
        fully_shard(module, mesh=world.mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x, error = torch.randn(2, 4), None
    alone(model, optimizer, x)

    def raises(*_: Any) -> None:
        raise ValueError("no learning rate")

    hook = optimizer.register_step_pre_hook(raises) if world.rank == 1 else None
    try:
        alone(model, optimizer, x)
    except ValueError as caught:
        error = caught
    if hook is not None:
        hook.remove()
    with pytest.raises(StateError) as told:
        fullshard.any_failed(world.mesh, error)
    said = str(told.value)
    assert f"ran {STEP.format(0.5)}" in said and "rank 1 ran any_failed()" in said, said
