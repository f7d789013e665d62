"""From what a user gives to what is simulated: the model on meta, its plan, its trace, and how it is carried out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fullshard import _torch
from fullshard.foresight.optimizer import Factory, OptimizerStep, optimizer_step
from fullshard.foresight.simulate import Setting
from fullshard.foresight.trace import Footprint, Trace, trace
from fullshard.policies import MixedPrecisionPolicy
from fullshard.wrap.plan import Plan
from fullshard.wrap.whole_model import plan_model

Loss = Callable[[Any], Tensor]
Build = Callable[[], nn.Module]
Recompute = str | Callable[[str, nn.Module], bool]


@dataclass(frozen=True, slots=True, eq=False)
class Traced:
    """A model that was traced with one batch.

    tokens: elements of the first tensor of integers in the batch, else its rows; of one rank and microbatch.
    counted: "tokens" or "rows".
    recomputed: names of the modules that backward runs again, if `explain` had it so.
    blocks: names of the modules that are units and have siblings of their class.
    """

    plan: Plan
    trace: Trace
    tokens: int
    counted: str
    recomputed: tuple[str, ...]
    blocks: tuple[str, ...]

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(entry.numel for _, entries in self.plan.held() for entry in entries)


def trace_model(
    build: Build,
    batch: Any,
    *,
    plan: Any,
    loss: Loss | None,
    mp_policy: MixedPrecisionPolicy,
    recompute: Recompute,
    accelerator: bool,
    footprints: Mapping[str, Footprint],
) -> Traced:
    """Build a model on meta, plan it, and trace a step of it.

    Raises:
        ValueError: for what cannot be traced, in a line that says what to give instead.
    """
    model = _built(build)
    found = plan_model(model, plan)
    blocks = _blocks(model, found)
    again = _recomputed(model, found, blocks, recompute)
    for name in again:
        module = model.get_submodule(name)
        module.forward = partial(checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False)
    inputs = meta_batch(batch)
    try:
        traced = trace(
            model, inputs, loss=loss or _loss_of, mp_policy=mp_policy, accelerator=accelerator, footprints=footprints
        )
    except Exception as failure:
        raise ValueError(_why(failure)) from failure
    return Traced(found, traced, *_tokens(inputs), tuple(again), tuple(blocks))


def _built(build: Build) -> nn.Module:
    if isinstance(build, nn.Module) or not callable(build):
        raise ValueError(
            f"build must be a function that returns the model, as in lambda: {type(build).__name__}(...), since it is called "
            f"on the meta device; got {'a module' if isinstance(build, nn.Module) else repr(build)}"
        )
    with torch.device("meta"):
        model = build()
    if not isinstance(model, nn.Module):
        raise ValueError(f"build() must return an nn.Module, got a {type(model).__name__}")
    real = next((name for name, value in model.named_parameters() if value.device.type != "meta"), None)
    return model if real is None else model.to("meta")


def meta_batch(batch: Any) -> Sequence[Any] | Mapping[str, Any]:
    """The arguments of a model's forward, on meta."""
    if callable(batch) and not isinstance(batch, Tensor):
        with torch.device("meta"):
            batch = batch(0)
    if isinstance(batch, Tensor):
        batch = (batch,)
    if not isinstance(batch, (Sequence, Mapping)) or isinstance(batch, str):
        raise ValueError(
            "batch must be a tensor, a tuple of the model's arguments, a dict of them, or a function that returns one of "
            f"these, got a {type(batch).__name__}"
        )
    leaves = [leaf for leaf in _torch.tree_leaves(batch) if isinstance(leaf, Tensor)]
    if not leaves:
        raise ValueError(
            "batch has no tensor: give the inputs of one rank and microbatch, as in (torch.zeros(2, 8192).long(),)"
        )
    meta: Sequence[Any] | Mapping[str, Any] = _torch.tree_map_only(Tensor, lambda tensor: tensor.to("meta"), batch)
    return meta


def _tokens(batch: Any) -> tuple[int, str]:
    leaves = [leaf for leaf in _torch.tree_leaves(batch) if isinstance(leaf, Tensor)]
    ids = next((leaf for leaf in leaves if leaf.dtype in (torch.int32, torch.int64)), None)
    if ids is not None:
        return ids.numel(), "tokens"
    return leaves[0].shape[0] if leaves[0].dim() else 1, "rows"


def _loss_of(output: Any) -> Tensor:
    """The output, if it is one number, or its `.loss`."""
    found = getattr(output, "loss", None)
    if isinstance(found, Tensor):
        return found
    if isinstance(output, Tensor) and output.numel() == 1:
        return output
    shape = f"a tensor {tuple(output.shape)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
    raise ValueError(
        f"the model returns {shape}, which is no loss: give explain(loss=...), a function of it, since the loss needs memory, "
        "too (on the command line: a dict with 'loss' from the factory)"
    )


def _blocks(model: nn.Module, plan: Plan) -> list[str]:
    """The modules that are units and have siblings of their class."""
    units = [name for unit in plan.units for name in unit.modules if name]
    kinds = [type(model.get_submodule(name)) for name in units]
    return [name for name, kind in zip(units, kinds) if kinds.count(kind) > 1]


def _recomputed(model: nn.Module, plan: Plan, blocks: list[str], recompute: Recompute) -> list[str]:
    """The modules that backward is to run again."""
    if recompute == "none":
        return []
    if callable(recompute):
        units = [name for unit in plan.units for name in unit.modules if name]
        return [name for name in units if recompute(name, model.get_submodule(name))]
    head, _, every = recompute.partition(":") if isinstance(recompute, str) else ("", "", "")
    if head == "block" and not every:
        return blocks
    if head == "every" and every.isdigit() and int(every) > 0:
        return blocks[:: int(every)]
    raise ValueError(
        f"recompute must be 'none', 'block', 'every:2' or a function (name, module) -> bool of the units, got {recompute!r}"
    )


FOOTPRINT = "explain(footprints={{'{op}': lambda *arguments: ...}})"


def _why(failure: Exception) -> str:
    """One line for what tracing raised."""
    text = " ".join(str(failure).split())
    if isinstance(failure, ValueError) and "is no loss" in text:
        return text
    op = next((word.strip("'\",.:()") for word in text.split() if word.strip("'\",.:()").startswith("aten::")), None)
    if "item()" in text or "_local_scalar_dense" in text:
        op = "aten::_local_scalar_dense"
    if "torch.nonzero()" in text:
        op = "aten::nonzero"
    if (
        op is not None
        and isinstance(failure, (NotImplementedError, RuntimeError))
        and ("meta" in text.lower() or "item()" in text)
    ):
        return (
            f"the model's step depends on values, which meta does not have: say what {op} returns by "
            f"{FOOTPRINT.format(op=op)}, with tensors on meta (fullshard.routed() for the tokens of experts)"
        )
    if isinstance(failure, NotImplementedError):
        return f"an operator has no kernel for meta ({text[:160]}): register one by torch.library.register_fake"
    if "does not require grad" in text:
        return "the loss depends on no trainable parameter: set requires_grad of some, or give another loss="
    return f"the model does not take this batch: {type(failure).__name__}: {text[:300]}"


def local_shards(plan: Plan, ranks: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """(shape, dtype) of the trainable shards of the first rank, which has the largest."""
    entries = (entry for _, found in plan.held() for entry in found if entry.trainable)
    return [((-(-e.shape[0] // ranks), *e.shape[1:]) if e.shape else (), e.dtype) for e in entries]


def step_of(factory: Factory | None, plan: Plan, ranks: int, *, accelerator: bool) -> OptimizerStep | None:
    """The optimizer's step over this rank's shards."""
    if factory is None:
        return None
    return optimizer_step(factory, local_shards(plan, ranks), accelerator=accelerator)


def mesh_of(world: int, mesh: Sequence[int] | int | None) -> tuple[int, int, bool]:
    """(ranks that parameters are cut over, replicas, whether there is an axis of replicas).

    Raises:
        ValueError: if the mesh has not as many ranks as the world.
    """
    if not isinstance(world, int) or isinstance(world, bool) or world < 1:
        raise ValueError(f"world must be the number of ranks, at least 1, got {world!r}")
    sizes = (world,) if mesh is None else (mesh,) if isinstance(mesh, int) else tuple(mesh)
    if len(sizes) > 2 or not all(isinstance(size, int) and size >= 1 for size in sizes):
        raise ValueError(f"mesh must be one or two sizes, (ranks,) or (replicas, ranks), got {mesh!r}")
    if prod(sizes) != world:
        fits = [f"({world // size}, {size})" for size in (8, 16, 32, 64) if world % size == 0 and size < world]
        raise ValueError(
            f"a mesh of {' x '.join(map(str, sizes))} has {prod(sizes)} ranks, the world {world}: take ({world},)"
            f"{' or ' + fits[0] if fits else ''}"
        )
    return (sizes[0], 1, False) if len(sizes) == 1 else (sizes[1], sizes[0], True)


__all__ = ["Build", "Loss", "Recompute", "Setting", "Traced", "local_shards", "mesh_of", "meta_batch", "step_of", "trace_model"]
