"""From what a user gives to what is simulated: the model on meta, its plan, its trace, and how it is carried out."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fullshard import _torch
from fullshard.foresight.hardware import Gpu
from fullshard.foresight.optimizer import Factory, OptimizerStep, named, optimizer_step
from fullshard.foresight.precision import Precision
from fullshard.foresight.question import Build, Question, Recompute
from fullshard.foresight.simulate import Setting
from fullshard.foresight.trace import Gradient, StepFailed, Trace, names_of, trace
from fullshard.foresight.values import Untraceable, UntraceablePlace, place_of
from fullshard.frontend.known_values import ConstantsMode, Known, Values, ValuesMode, values_of_buffers
from fullshard.wrap.plan import Plan
from fullshard.wrap.whole_model import plan_model


@dataclass(frozen=True, slots=True, eq=False)
class Traced:
    """A model that was traced with one batch.

    model: on meta.      question: that it was traced for.      precision: the dtypes that it was traced with.
    rows, tokens: of the batch of one rank and microbatch; see `sizes_of`.
    counted: whether "tokens" or "rows" are meant by `tokens`.
    recomputed: names of the modules that backward runs again, if `explain` had it so.
    blocks: names of the modules that are units and have siblings of their class.
    """

    model: nn.Module
    question: Question
    plan: Plan
    trace: Trace
    precision: Precision
    rows: int
    tokens: int
    counted: str
    recomputed: tuple[str, ...]
    blocks: tuple[str, ...]
    steps: dict[object, OptimizerStep] = field(default_factory=dict)  # by optimizer, shards and whether on an accelerator

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(entry.numel for _, entries in self.plan.held() for entry in entries)

    def serves(self, question: Question) -> Traced | None:
        """The same for another question, None if the model does something else in a step that it asks for."""
        before = self.question
        same = all(getattr(before, name) is getattr(question, name) for name in ("build", "batch", "loss"))
        same = same and before.tensor_parallel == question.tensor_parallel and before.parallelize is question.parallelize
        same = same and before.footprints == question.footprints and before.keep_output == question.keep_output
        if not same or before.accelerator != question.accelerator:
            return None
        plan = self.planned_for(question).plan
        blocks = _blocks(self.model, plan)
        recomputed = _recomputed(self.model, plan, blocks, question.recompute)
        precision = Precision.of(plan, question.dtypes)
        if tuple(recomputed) != self.recomputed or (question.recompute == "selective") != (before.recompute == "selective"):
            return None
        if not self.precision.computes_like(precision, self.trace.inputs):
            return None
        return replace(self, question=question, plan=plan, blocks=tuple(blocks))

    def planned_for(self, question: Question) -> Traced:
        """The same with the plan of another question, for what depends on no trace: what units hold and send."""
        if question.plan is self.question.plan:
            return self
        return replace(self, question=question, plan=plan_model(self.model, question.plan))

    def step_of(self, factory: Factory | None, ranks: int) -> OptimizerStep | None:
        """A step of this optimizer over a rank's shards."""
        if factory is None:
            return None
        question = self.question
        shards = tuple(local_shards(self, ranks, dims_of(self, question)))
        key = factory, shards, question.accelerator
        if key not in self.steps:
            self.steps[key] = optimizer_step(factory, shards, accelerator=question.accelerator)
        return self.steps[key]


def trace_model(question: Question) -> Traced:
    """Build a model on meta, plan it, and trace a step of it.

    Raises:
        ValueError: for what cannot be traced, in a line that says what to give instead.
    """
    with _torch.fake_ranks(question.tensor_parallel) as mesh:
        return _trace_model(question, mesh)


def _trace_model(question: Question, mesh: DeviceMesh | None) -> Traced:
    model, known = _built(question.build)
    if mesh is not None and question.parallelize is not None:
        try:
            question.parallelize(model, mesh)
        except Exception as failure:
            told = " ".join(str(failure).split())[:300]
            raise ValueError(f"parallelize() raises {type(failure).__name__}: {told}{_where(failure, model)}") from failure
    plan = plan_model(model, question.plan)
    blocks = _blocks(model, plan)
    again = _recomputed(model, plan, blocks, question.recompute)
    precision = Precision.of(plan, question.dtypes)
    inputs = meta_batch(question.batch)
    with _recomputing(model, again, selective=question.recompute == "selective"):
        try:
            traced = trace(
                model,
                inputs,
                loss=question.loss or _loss_of,
                precision=precision,
                accelerator=question.accelerator,
                footprints=question.footprints,
                known=known,
                batch_values=values_of_batch(question.batch),
                keep_output=question.keep_output,
                warm=mesh is not None,
            )
        except UntraceablePlace as why:
            raise Untraceable(f"{why}{_where(why, model)}") from why
        except StepFailed as failed:
            assert failed.__cause__ is not None
            raise ValueError(_why(failed.part, failed.__cause__, model)) from failed.__cause__
    return Traced(model, question, plan, traced, precision, *sizes_of(inputs), tuple(again), tuple(blocks))


@contextmanager
def _recomputing(model: nn.Module, names: Sequence[str], *, selective: bool) -> Iterator[None]:
    """Have backward run these modules again, for the length of a block. selective: all of them but the costly products."""
    options: dict[str, Any] = {"context_fn": _keep_costly} if selective else {}
    before: list[tuple[nn.Module, Any]] = []
    try:
        for module in (model.get_submodule(name) for name in names):
            before.append((module, vars(module).get("forward")))
            module.forward = partial(checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False, **options)
        yield
    finally:
        for module, own in before:
            if own is None:
                del module.forward
            else:
                module.forward = own


def _keep_costly() -> Any:
    """Contexts of a checkpoint that keeps attention and every second matrix product (torchtitan's "op")."""
    seen = {True: 0, False: 0}

    def choose(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        kept = operator.overloadpacket in (_torch.flash_attention, _torch.efficient_attention, _torch.flash_attention_on_cpu)
        if operator.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            seen[context.is_recompute] += 1
            kept = seen[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(choose)


def _built(build: Build) -> tuple[nn.Module, Mapping[str, Known]]:
    """(the model on meta, what its buffers hold). One that is somewhere else is copied, and stays as it is."""
    if isinstance(build, nn.Module) or not callable(build):
        raise ValueError(
            f"build must be a function that returns the model, as in lambda: {type(build).__name__}(...), since it is called "
            f"on the meta device; got {'a module' if isinstance(build, nn.Module) else repr(build)}"
        )
    values = Values()
    try:
        with torch.device("meta"), ValuesMode(values), ConstantsMode(values):
            model = build()
    except Exception as failure:
        text = f"{type(failure).__name__}: {' '.join(str(failure).split())[:300]}{_where(failure, nn.Module())}"
        if _needs_group(failure):
            raise ValueError(
                f"build() needs a process group, and runs without one ({text}): have it return the model as it is before "
                "fully_shard(), shard_model() or init_device_mesh(), on one rank"
            ) from failure
        if not isinstance(failure, (NotImplementedError, RuntimeError)):
            raise ValueError(
                f"build() raises {text}; it is called under torch.device('meta'), without a process group"
            ) from failure
        raise ValueError(
            f"build() fails, where it runs under torch.device('meta') ({text}): make there what needs values under "
            "torch.device('cpu')"
        ) from failure
    if not isinstance(model, nn.Module):
        raise ValueError(f"build() must return an nn.Module, got a {type(model).__name__}")
    _refuse_wrapped(model)
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in held.items():
        if isinstance(tensor, DTensor):
            raise ValueError(f"build() must return a model that is not sharded yet, but '{name}' is a DTensor")
        if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
            raise ValueError(
                f"'{name}' has no shape before a first forward, which explain() does not know: give its module its sizes"
            )
    if all(tensor.device.type == "meta" for tensor in held.values()):
        return model, values_of_buffers(model, values)
    copies: dict[int, Any] = {id(tensor): _on_meta(tensor) for tensor in held.values()}
    try:
        return copy.deepcopy(model, copies), values_of_buffers(model, values)
    except Exception as failure:
        raise ValueError(
            f"build() returns a model on {next(iter(held.values())).device} that cannot be copied ({failure}): have it made on "
            "the device that is current, which is meta there"
        ) from failure


def _needs_group(failure: BaseException) -> bool:
    """Whether this was raised for want of a process group."""
    text = str(failure).lower()
    return any(words in text for words in ("process group", "init_process_group", "torchrun", "env:// rendezvous"))


def _refuse_wrapped(model: nn.Module) -> None:
    """Refuse modules whose step is another one than that of the model inside.

    Raises:
        ValueError: naming the module.
    """
    for name, module in model.named_modules():
        kind, which = type(module).__name__, f"'{name}'" if name else "the model that build() returns"
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"{which} is TorchScript ({kind}), which cannot be traced: give the nn.Module that it was made from"
            )
        if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            raise ValueError(f"{which} is a {kind}, which keeps whole parameters on each rank: give the module inside of it")
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise ValueError(f"{which} is an {kind} with sparse=True, whose gradients cannot be reduced: give it sparse=False")
        if isinstance(module, _torch.TorchFSDPModule) or kind == "FullyShardedDataParallel":  # torch's, or that of compat
            raise ValueError(f"{which} is sharded already ({kind}): give the model as it is before")


def _on_meta(tensor: Tensor) -> Tensor:
    found = torch.empty_like(tensor, device="meta")
    return nn.Parameter(found, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else found


def meta_batch(batch: Any) -> Sequence[Any] | Mapping[str, Any]:
    """The arguments of a model's forward, on meta."""
    meta: Sequence[Any] | Mapping[str, Any] = _torch.tree_map_only(Tensor, lambda tensor: tensor.to("meta"), tensors_of(batch))
    return meta


def tensors_of(batch: Any) -> Sequence[Any] | Mapping[str, Any]:
    """The arguments of a model's forward, as they were given.

    Raises:
        ValueError: for what are no arguments, or has no rows.
    """
    if callable(batch) and not isinstance(batch, Tensor):
        try:
            with torch.device("meta"):
                batch = batch(0)
        except Exception as failure:
            told = " ".join(str(failure).split())[:300]
            raise ValueError(
                "batch is a function, which is called with the number of a step under torch.device('meta'), and raises "
                f"{type(failure).__name__}: {told}{_where(failure, nn.Module())}"
            ) from failure
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
    if not any(leaf.numel() for leaf in leaves):
        raise ValueError(f"batch has no rows: its tensors are {', '.join(str(tuple(leaf.shape)) for leaf in leaves)}")
    return batch


def values_of_batch(batch: Any) -> list[Known | None]:
    """What each tensor of a batch holds, in the order of `meta_batch`; None of one on meta, or that a function makes there."""
    if callable(batch) and not isinstance(batch, Tensor):
        return []
    leaves = [leaf for leaf in _torch.tree_leaves(batch) if isinstance(leaf, Tensor)]
    return [None if leaf.device.type == "meta" else Known.constant(leaf, of_batch=True) for leaf in leaves]


def sizes_of(batch: Any) -> tuple[int, int, str]:
    """(rows, tokens, "tokens") of the largest tensor of integers in a batch; of the largest tensor, if there is none.

    Then ("rows") there are as many tokens as rows. The order of tensors does not matter.
    """
    leaves = [leaf for leaf in _torch.tree_leaves(batch) if isinstance(leaf, Tensor)]
    ids = [leaf for leaf in leaves if leaf.dtype in (torch.int32, torch.int64)]
    largest = max(ids or leaves, key=lambda leaf: leaf.numel())
    rows = largest.shape[0] if largest.dim() else 1
    return (rows, largest.numel(), "tokens") if ids else (rows, rows, "rows")


def _loss_of(output: Any) -> Tensor:
    """The output, if it is one number, or its `.loss`."""
    found = getattr(output, "loss", None)
    if isinstance(found, Tensor):
        return found
    if isinstance(output, Tensor) and output.numel() == 1:
        return output
    shape = f"a tensor {tuple(output.shape)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
    raise Untraceable(
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
    each = 1 if head in ("block", "selective") and not every else int(every) if head == "every" and every.isdecimal() else 0
    if each < 1:
        raise ValueError(
            "recompute must be 'none', 'block', 'selective', 'every:2' or a function (name, module) -> bool of the units, got "
            f"{recompute!r}"
        )
    if not blocks:
        raise ValueError(
            f"recompute={recompute!r} runs blocks again, and this plan has none: no unit has a sibling of its class (its units "
            f"are {', '.join(repr(unit.name) for unit in plan.units[:4])}); give a plan that has some, or a function (name, "
            "module) -> bool"
        )
    return blocks[::each]


FOOTPRINT = "explain(footprints={{'{op}': lambda *arguments: ...}})"


def _why(part: str, failure: BaseException, model: nn.Module) -> str:
    """One line for what a part of the step raised."""
    text = " ".join(str(failure).split())
    op = next((word.strip("'\",.:()") for word in text.split() if word.strip("'\",.:()").startswith("aten::")), None)
    if "torch.nonzero()" in text:
        op = "aten::nonzero"
    where = _where(failure, model)
    if "SparseTensorImpl" in text:
        return f"the step makes a sparse tensor{where}, whose gradients cannot be reduced: call embeddings with sparse=False"
    if op is not None and isinstance(failure, (NotImplementedError, RuntimeError)) and "meta" in text.lower():
        return (
            f"the model's step depends on values, which meta does not have{where}: say what {op} returns by "
            f"{FOOTPRINT.format(op=op)}, with tensors on meta (fullshard.routed() for the tokens of experts)"
        )
    if isinstance(failure, NotImplementedError):
        return f"an operator has no kernel for meta ({text[:160]}){where}: register one by torch.library.register_fake"
    told = f"{type(failure).__name__}: {text[:300] or 'without a text'}{where}"
    if _needs_group(failure):
        return (
            f"the {part} needs a process group, and explain() makes none ({told}): leave its collectives out, or call "
            "explain() in a program that has one; context parallelism is not simulated"
        )
    if _needs_device(text):
        return (
            f"the {part} asks for a device of its own ({told}), and runs on meta: make tensors on the device of those that it "
            "gets, as by device=x.device"
        )
    if "required keyword-only argument" in text:
        return f"the model does not take this batch: {told}; give a dict of arguments by name"
    if part == "forward":
        return f"the model does not take this batch: {told}"
    return f"the {part} raises {told}" + (", called with what the model returns" if part == "loss" else "")


def _needs_device(text: str) -> bool:
    return any(
        words in text for words in ("Torch not compiled with CUDA", "NVIDIA driver", "CUDA-capable device", "No CUDA GPUs")
    )


def _where(failure: BaseException, model: nn.Module) -> str:
    """As in " (in 'layers.0', at model.py:12)": the innermost module of a traceback, and the innermost line of the user."""
    names = {id(module): name for name, module in model.named_modules()}
    module = place = ""
    frame = failure.__traceback__
    while frame is not None:
        module = names.get(id(frame.tb_frame.f_locals.get("self"))) or module
        place = place_of(frame.tb_frame.f_code.co_filename, frame.tb_lineno) or place
        frame = frame.tb_next
    told = [f"in '{module}'"] * bool(module) + [f"at {place}"] * bool(place)
    return f" ({', '.join(told)})" if told else ""


def local_shards(traced: Traced, ranks: int, dims: Mapping[str, int]) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """(shape, dtype) of the shards that get gradients, of the first rank, which has the largest. dims: as `Setting.dims`."""
    graded = {event.parameter for event in traced.trace.events if isinstance(event, Gradient)}
    found = []
    for entry in (entry for entry in traced.plan.outline.parameters if entry.name in graded):
        shape = list(entry.shape)
        if shape:
            dim = dims.get(entry.name, 0)
            shape[dim] = -(-shape[dim] // ranks)
        found.append((tuple(shape), entry.dtype))
    return found


def dims_of(traced: Traced, question: Question) -> dict[str, int]:
    """By name, along which dim `shard_placement_fn` cuts a parameter, where that is not 0.

    Raises:
        ValueError: naming the parameter, for what is no dim of it; and with the engine "fsdp2".
    """
    function = question.shard_placement_fn
    if function is None:
        return {}
    found: dict[str, int] = {}
    for parameter, name in names_of(traced.model, (entry.name for entry in traced.plan.outline.parameters)).items():
        chosen = function(parameter)
        if not isinstance(chosen, (Shard, type(None))):
            raise ValueError(f"shard_placement_fn gives {chosen!r} for '{name}': expected None or Shard(dim) to simulate it")
        if chosen is None or not parameter.ndim:
            continue
        if not -parameter.ndim <= chosen.dim < parameter.ndim:
            raise ValueError(f"shard_placement_fn cuts '{name}' of shape {tuple(parameter.shape)} along dim {chosen.dim}")
        if chosen.dim % parameter.ndim:
            found[name] = chosen.dim % parameter.ndim
    if found and question.engine == "fsdp2":
        raise ValueError(
            f"shard_placement_fn cuts '{min(found)}' along dim {found[min(found)]}, which is simulated with engine='fullshard' "
            "alone: torch's FSDP2 makes further copies of such parameters"
        )
    return found


def check_tensor_parallel(question: Question) -> None:
    """Refuse tensor parallelism that cannot be.

    Raises:
        ValueError: naming the argument.
    """
    many, world = question.tensor_parallel, question.world
    if not isinstance(many, int) or isinstance(many, bool) or many < 1 or world % many:
        raise ValueError(f"tensor_parallel must be a number of ranks that divides the world of {world}, got {many!r}")
    if (many > 1) != (question.parallelize is not None):
        raise ValueError(
            f"tensor_parallel={many} and parallelize={question.parallelize!r} do not go together: give the number of ranks, "
            "and a function of the model and their mesh, as lambda model, mesh: parallelize_module(model, mesh, plan)"
        )


def check_machines(world: int, gpu: Gpu) -> None:
    """Refuse worlds of several machines that are not all whole.

    Raises:
        ValueError: naming both numbers.
    """
    if world > gpu.per_node and world % gpu.per_node:
        raise ValueError(
            f"world={world} is no number of whole machines of {gpu.per_node} {gpu.name}: say how many GPUs each has by "
            "per_node= (--per-node)"
        )


def setting_of(question: Question, traced: Traced) -> Setting:
    """How the plan is carried out.

    Raises:
        ValueError: if the mesh has not as many ranks as the world.
    """
    ranks, replicas, hybrid = mesh_of(question.world // question.tensor_parallel, question.mesh)
    accelerator = question.accelerator
    factory = None if question.optimizer is None else named(question.optimizer)
    return Setting(
        ranks,
        replicas=replicas,
        hybrid=hybrid,
        mp_policy=question.dtypes,
        comm_policy=question.comm_policy,
        offload_policy=question.offload_policy,
        reshard_after_forward=question.reshard_after_forward,
        microbatches=question.microbatches,
        accumulate=question.accumulate,
        accelerator=accelerator,
        gloo=not accelerator,
        optimizer=traced.step_of(factory, ranks),
        keep_unsharded_storage=question.keep_unsharded_storage,
        engine=question.engine,
        tensor_parallel=question.tensor_parallel,
        dims=dims_of(traced, question),
    )


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


__all__ = [
    "Traced",
    "check_machines",
    "check_tensor_parallel",
    "local_shards",
    "mesh_of",
    "meta_batch",
    "setting_of",
    "sizes_of",
    "tensors_of",
    "trace_model",
    "values_of_batch",
]
