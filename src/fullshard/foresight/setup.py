"""Turn the arguments of `explain` into the input of the simulator: the model on meta, its plan, its trace and its settings."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fullshard import _torch, ext
from fullshard.core import tensors_in
from fullshard.foresight.optimizer import Factory, OptimizerStep, muon_with_adamw, optimizer_factory, optimizer_step
from fullshard.foresight.owners import owner_step
from fullshard.foresight.precision import Precision
from fullshard.foresight.question import Build, ExplainArguments, Recompute
from fullshard.foresight.simulate import Setting
from fullshard.foresight.trace import GradientReady, StepFailed, Trace, parameter_names, trace
from fullshard.foresight.values import Untraceable, UntraceablePlace, place_of
from fullshard.optim.matrix_choice import matrices_of
from fullshard.optim.owners import Matrix
from fullshard.policies import CPUOffloadPolicy, resolve_offload
from fullshard.wrap.known_values import ConstantsMode, KnownValue, KnownValues, ValuesMode, values_of_buffers
from fullshard.wrap.plan import Plan
from fullshard.wrap.plan_messages import PlanEntry
from fullshard.wrap.whole_model import WHY_FULL_PRECISION, add_full_precision_units, plan_model


@dataclass(frozen=True, slots=True, eq=False)
class TracedModel:
    """A model on meta and the trace of one step of it."""

    model: nn.Module  # the model, on the meta device
    arguments: ExplainArguments  # the arguments of `explain` that the model was traced for
    plan: Plan  # the units, for these arguments
    trace: Trace  # the events of one microbatch
    precision: Precision  # compute dtypes of the parameters and casts of the inputs during the trace
    rows: int  # rows of one microbatch on one rank, see `batch_size_of`
    tokens: int  # tokens of one microbatch on one rank, see `batch_size_of`
    counted: str  # unit of `tokens`: "tokens" or "rows"
    recomputed: tuple[str, ...]  # names of the modules that `explain(recompute=...)` recomputes in backward
    blocks: tuple[str, ...]  # names of the modules that are units and have siblings of their class

    def reuse_for(self, arguments: ExplainArguments) -> TracedModel | None:
        """Return this trace for other arguments of `explain`, or None if the model must be traced again for them."""
        before = self.arguments
        # Functions and batches are compared by identity: they have no useful equality.
        if any(getattr(before, name) is not getattr(arguments, name) for name in ("build", "batch", "loss", "parallelize")):
            return None
        values = ("tensor_parallel", "footprints", "keep_output", "accelerator")
        if any(getattr(before, name) != getattr(arguments, name) for name in values):
            return None
        plan = self.planned_for(arguments).plan
        blocks = _blocks(self.model, plan)
        recomputed = _modules_to_recompute(self.model, plan, blocks, arguments.recompute)
        precision = Precision.of(plan, arguments.dtypes)
        if tuple(recomputed) != self.recomputed or (arguments.recompute == "selective") != (before.recompute == "selective"):
            return None
        if not self.precision.computes_the_same_as(precision, self.trace.inputs):
            return None
        return replace(self, arguments=arguments, plan=plan, blocks=tuple(blocks))

    def planned_for(self, arguments: ExplainArguments) -> TracedModel:
        """Return this model with the plan of other arguments. Its trace may not match that plan.

        Use the result only for facts that do not depend on the trace: the shards and the collectives of the units.
        """
        before = self.arguments
        same = arguments.plan is before.plan and not isinstance(arguments.plan, Plan)  # a Plan is edited in place
        same = same and arguments.dtypes == before.dtypes and arguments.full_precision == before.full_precision
        if same and arguments.engine == before.engine:
            return replace(self, arguments=arguments)
        return replace(self, arguments=arguments, plan=_plan_of(self.model, arguments))

    def optimizer_steps_for(self, factory: Factory, ranks: int, replicas: int, dims: Mapping[str, int]) -> list[OptimizerStep]:
        """Return traced steps of this optimizer over a rank's shards: over those on the device, and over those on the host."""
        shards = _local_shards(self, ranks, replicas, dims)
        steps: list[OptimizerStep] = []
        for on_host in sorted({shard.on_host for shard in shards}):  # optimizers step the tensors of each device by themselves
            part = [shard for shard in shards if shard.on_host == on_host]
            if factory is muon_with_adamw:
                if len(part) < len(shards):
                    raise ValueError(
                        "Expected the same offload_policy for all units with optimizer='muon', since shards on the device and "
                        "on the host share an exchange. Pass one offload_policy, or another optimizer."
                    )
                step = self._muon_step(part)
            else:
                sizes = tuple((one.shape, one.whole.dtype) for one in part)
                step = optimizer_step(factory, sizes, accelerator=self.arguments.accelerator)
            steps.append(replace(step, on_host=on_host))
        return steps

    def _muon_step(self, shards: Sequence[LocalShard]) -> OptimizerStep:
        arguments = self.arguments
        unsupported = {"engine='fsdp2'": arguments.engine == "fsdp2", "tensor_parallel": arguments.tensor_parallel > 1}
        names = ", ".join(name for name, is_set in unsupported.items() if is_set)
        if names:
            raise ValueError(f"Expected optimizer='muon' without {names}. Pass another optimizer, or leave out {names}.")
        names_of = parameter_names(self.model, (one.whole.name for one in shards))
        taken = frozenset(names_of[parameter] for parameter in matrices_of(self.model).matrices)
        return _muon_step(tuple(shards), taken, accelerator=arguments.accelerator)


@lru_cache(64)
def _muon_step(shards: tuple[LocalShard, ...], taken: frozenset[str], *, accelerator: bool) -> OptimizerStep:
    """Return a step of Muon over the matrices named in `taken`, and of AdamW over the other shards."""
    meshes: dict[tuple[int, int], list[tuple[Matrix, torch.dtype]]] = {}
    for one in shards:
        if one.whole.name in taken:
            matrix = Matrix(one.whole.name, one.whole.shape, one.dim)
            meshes.setdefault((one.ranks, one.replicas), []).append((matrix, one.whole.dtype))
    muon = owner_step(meshes, accelerator=accelerator)
    rest = tuple((one.shape, one.whole.dtype) for one in shards if one.whole.name not in taken)
    adamw = optimizer_step(torch.optim.AdamW, rest, accelerator=accelerator) if rest else OptimizerStep((), ())
    return replace(adamw, states=(*muon.states, *adamw.states), owners=muon)


def forget_optimizer_steps() -> None:
    """Trace optimizers anew from here on: the same function may make another optimizer, and owners may be planned otherwise."""
    optimizer_step.cache_clear()
    _muon_step.cache_clear()


def trace_model(arguments: ExplainArguments) -> TracedModel:
    """Build the model on meta, plan its units, and trace one step.

    Raises ValueError if the model, the batch or the step cannot be traced; the text is one line that names the remedy.
    """
    with _torch.fake_ranks(arguments.tensor_parallel) as mesh:
        model, known = _build_on_meta(arguments.build)
        if mesh is not None and arguments.parallelize is not None:
            try:
                arguments.parallelize(model, mesh)
            except Exception as failure:
                raise ValueError(f"parallelize() raises {_described(failure, model)}") from failure
        plan = _plan_of(model, arguments)
        blocks = _blocks(model, plan)
        recomputed = _modules_to_recompute(model, plan, blocks, arguments.recompute)
        precision = Precision.of(plan, arguments.dtypes)
        inputs = meta_batch(arguments.batch)
        with _checkpointed(model, recomputed, selective=arguments.recompute == "selective"):
            try:
                traced = trace(
                    model,
                    inputs,
                    loss=arguments.loss or _loss_of,
                    precision=precision,
                    accelerator=arguments.accelerator,
                    footprints=arguments.footprints,
                    known=known,
                    batch_values=values_of_batch(arguments.batch),
                    keep_output=arguments.keep_output,
                )
            except UntraceablePlace as failure:
                raise Untraceable(f"{failure}{_location(failure, model)}") from failure
            except StepFailed as failed:
                assert failed.__cause__ is not None
                raise ValueError(_failure_text(failed.part, failed.__cause__, model)) from failed.__cause__
        return TracedModel(model, arguments, plan, traced, precision, *batch_size_of(inputs), tuple(recomputed), tuple(blocks))


def _plan_of(model: nn.Module, arguments: ExplainArguments) -> Plan:
    """Return the units that `shard_model` would make."""
    plan = plan_model(model, arguments.plan)
    if arguments.engine == "fullshard":
        add_full_precision_units(plan, model, arguments.dtypes, arguments.full_precision)
    return plan


@contextmanager
def _checkpointed(model: nn.Module, names: Sequence[str], *, selective: bool) -> Iterator[None]:
    """Checkpoint the forward of the modules `names` within a `with` block. `selective`: see `_selective_contexts`."""
    options: dict[str, Any] = {"context_fn": _selective_contexts} if selective else {}
    checkpointed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False, **options)
    with ExitStack() as stack:
        for name in names:
            stack.callback(_torch.extended(model.get_submodule(name), "forward", checkpointed))
        yield


def _selective_contexts() -> Any:
    """Return contexts of a checkpoint that keeps attention and every second matrix product (torchtitan's "op" policy)."""
    # Forward and recomputation count separately, so that both choose the same products.
    seen = {True: 0, False: 0}

    def choose(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        kept = operator.overloadpacket in (_torch.flash_attention, _torch.efficient_attention, _torch.flash_attention_on_cpu)
        if operator.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            seen[context.is_recompute] += 1
            kept = seen[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(choose)


def _build_on_meta(build: Build) -> tuple[nn.Module, Mapping[str, KnownValue]]:
    """Call `build` and return (the model on meta, the known values of its buffers).

    A model on another device is copied to meta and is not changed.
    """
    if isinstance(build, nn.Module) or not callable(build):
        raise ValueError(
            "build must be a function that returns the model, got "
            f"{'a module' if isinstance(build, nn.Module) else repr(build)}. Write lambda: {type(build).__name__}(...), since "
            "build() is called on the meta device."
        )
    values = KnownValues()
    try:
        with torch.device("meta"), ValuesMode(values), ConstantsMode(values):
            model = build()
    except Exception as failure:
        text = _described(failure)
        if any(words in str(failure).lower() for words in NO_GROUP):
            raise ValueError(
                f"build() needs a process group, but runs without one ({text}). Return the model of one rank as it is before "
                "fully_shard(), shard_model() or init_device_mesh()."
            ) from failure
        if not isinstance(failure, (NotImplementedError, RuntimeError)):
            raise ValueError(
                f"build() raises {text}. It is called under torch.device('meta'), without a process group."
            ) from failure
        raise ValueError(
            f"build() fails under torch.device('meta') ({text}). Create the tensors whose values it reads under "
            "torch.device('cpu')."
        ) from failure
    if not isinstance(model, nn.Module):
        raise ValueError(f"build() must return an nn.Module, got a {type(model).__name__}.")
    _refuse_wrapped(model)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            raise ValueError(f"build() must return a model that is not sharded yet, but '{name}' is a DTensor.")
        if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
            raise ValueError(
                f"'{name}' has no shape before a first forward, and explain() cannot infer it. Pass the sizes to its module."
            )
    if all(tensor.device.type == "meta" for tensor in tensors.values()):
        return model, values_of_buffers(model, values)
    # As the memo of deepcopy, meta tensors replace the real ones before any value is copied. Tied parameters stay tied.
    copies: dict[int, Any] = {id(tensor): torch.empty_like(tensor, device="meta") for tensor in tensors.values()}
    for parameter in model.parameters():
        copies[id(parameter)] = nn.Parameter(copies[id(parameter)], parameter.requires_grad)
    try:
        return copy.deepcopy(model, copies), values_of_buffers(model, values)
    except Exception as failure:
        raise ValueError(
            f"build() returns a model on {next(iter(tensors.values())).device} that cannot be copied ({failure}). Create its "
            "tensors on the current device, which is meta during build()."
        ) from failure


NO_GROUP = ("process group", "torchrun", "env:// rendezvous")
"""Words of the exceptions that torch raises if a program needs a process group, and there is none."""


def _refuse_wrapped(model: nn.Module) -> None:
    """Raise ValueError if a module is TorchScript, data parallel, a sparse embedding, or sharded already."""
    for name, module in model.named_modules():
        kind, which = type(module).__name__, f"'{name}'" if name else "the model that build() returns"
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"{which} is TorchScript ({kind}), which cannot be traced. Return the nn.Module that it was made from."
            )
        if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            raise ValueError(f"{which} is a {kind}, which replicates all parameters on each rank. Return the module inside it.")
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise ValueError(f"{which} is an {kind} with sparse=True, whose gradients cannot be reduced. Pass sparse=False.")
        if isinstance(module, _torch.TorchFSDPModule) or kind == "FullyShardedDataParallel":  # torch's or fullshard.compat's
            raise ValueError(f"{which} is sharded already ({kind}). Return the model as it is before sharding.")


def meta_batch(batch: Any) -> Sequence[Any] | Mapping[str, Any]:
    """Return the arguments of the model's forward, on meta."""

    def leaf(tensor: Tensor) -> Tensor:  # a model may compute the gradient of its input
        return tensor.detach().to("meta").requires_grad_(tensor.requires_grad)

    return _torch.tree_map_only(Tensor, leaf, tensors_of(batch))  # type: ignore[no-any-return]


def tensors_of(batch: Any) -> Sequence[Any] | Mapping[str, Any]:
    """Return the arguments of the model's forward on the devices that the caller chose.

    A function is called with step number 0 under `torch.device("meta")`. A single tensor becomes a tuple.
    """
    if callable(batch) and not isinstance(batch, Tensor):
        try:
            with torch.device("meta"):
                batch = batch(0)
        except Exception as failure:
            raise ValueError(
                "batch is a function, which is called with the number of a step under torch.device('meta'). It raises "
                f"{_described(failure)}"
            ) from failure
    if isinstance(batch, Tensor):
        batch = (batch,)
    if not isinstance(batch, (Sequence, Mapping)) or isinstance(batch, str):
        raise ValueError(
            "batch must be a tensor, a tuple of the model's arguments, a dict of them, or a function that returns one of "
            f"these, got a {type(batch).__name__}."
        )
    leaves = [*tensors_in(batch)]
    if not leaves:
        raise ValueError(
            "batch has no tensor. Pass the inputs of one rank and microbatch, as in (torch.zeros(2, 8192).long(),)."
        )
    if not any(leaf.numel() for leaf in leaves):
        raise ValueError(f"batch has no rows: its tensors are {', '.join(str(tuple(leaf.shape)) for leaf in leaves)}.")
    return batch


def values_of_batch(batch: Any) -> list[KnownValue | None]:
    """Return the known values of each tensor of a batch, in the order of `meta_batch`.

    A tensor on meta has None. A batch that a function creates has no values at all: the list is empty.
    """
    if callable(batch) and not isinstance(batch, Tensor):
        return []
    return [
        None if leaf.device.type == "meta" else KnownValue.constant(leaf.detach(), of_batch=True) for leaf in tensors_in(batch)
    ]


def batch_size_of(batch: Any) -> tuple[int, int, str]:
    """Return (rows, tokens, "tokens") of the largest int32 or int64 tensor in a batch.

    Without such a tensor, return (rows, rows, "rows") of the largest tensor. The order of the tensors does not matter.
    """
    leaves = [*tensors_in(batch)]
    ids = [leaf for leaf in leaves if leaf.dtype in (torch.int32, torch.int64)]
    largest = max(ids or leaves, key=lambda leaf: leaf.numel())
    rows = largest.shape[0] if largest.dim() else 1
    return (rows, largest.numel(), "tokens") if ids else (rows, rows, "rows")


def _loss_of(output: Any) -> Tensor:
    """Return the output's `.loss`, or the output itself if it has one element."""
    found = getattr(output, "loss", None)
    if isinstance(found, Tensor):
        return found
    if isinstance(output, Tensor) and output.numel() == 1:
        return output
    shape = f"a tensor {tuple(output.shape)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
    raise Untraceable(
        f"The model returns {shape}, which is no loss. Pass explain(loss=...), a function of the output, since the loss needs "
        "memory, too (on the command line: a dict with 'loss' from the factory)."
    )


def _blocks(model: nn.Module, plan: Plan) -> list[str]:
    """Return the names of the modules that are units and have siblings of their class. Units of batch norms do not count."""
    units = [name for unit in plan.units for name in unit.modules if name and unit.why != WHY_FULL_PRECISION]
    kinds = [type(model.get_submodule(name)) for name in units]
    return [name for name, kind in zip(units, kinds) if kinds.count(kind) > 1]


def _modules_to_recompute(model: nn.Module, plan: Plan, blocks: list[str], recompute: Recompute) -> list[str]:
    """Return the names of the modules that backward recomputes."""
    if recompute == "none":
        return []
    if callable(recompute):
        units = [name for unit in plan.units for name in unit.modules if name]
        return [name for name in units if recompute(name, model.get_submodule(name))]
    head, _, every = str(recompute).partition(":")
    each = 1 if head in ("block", "selective") and not every else int(every) if head == "every" and every.isdecimal() else 0
    if each < 1:
        raise ValueError(
            "recompute must be 'none', 'block', 'selective', 'every:2' or a function (name, module) -> bool of the units, got "
            f"{recompute!r}."
        )
    if not blocks:
        raise ValueError(
            f"recompute={recompute!r} recomputes blocks, but this plan has none: no unit has a sibling of its class (its units "
            f"are {', '.join(repr(unit.name) for unit in plan.units[:4])}). Pass a plan that has blocks, or a function (name, "
            "module) -> bool."
        )
    return blocks[::each]


NO_DEVICE = ("Torch not compiled with CUDA", "NVIDIA driver", "CUDA-capable device", "No CUDA GPUs")
"""Words of the exceptions that torch raises if a program uses an accelerator that the machine does not have."""


def _failure_text(part: str, failure: BaseException, model: nn.Module) -> str:
    """Return one line that explains an exception in a part of the step ("forward", "loss", "backward") and names the remedy."""
    text = " ".join(str(failure).split())
    op = next((word.strip("'\",.:()") for word in text.split() if word.strip("'\",.:()").startswith("aten::")), None)
    if "torch.nonzero()" in text:
        op = "aten::nonzero"
    where = _location(failure, model)
    if "SparseTensorImpl" in text:
        return f"The step creates a sparse tensor{where}, whose gradients cannot be reduced. Call embeddings with sparse=False."
    if op is not None and isinstance(failure, (NotImplementedError, RuntimeError)) and "meta" in text.lower():
        return (
            f"The model's step depends on values, which meta tensors do not have{where}. Pass the result of {op} as "
            f"explain(footprints={{'{op}': lambda *arguments: ...}}), with tensors on meta (fullshard.routed() for the tokens "
            "of experts)."
        )
    if isinstance(failure, NotImplementedError):
        return f"An operator has no kernel for meta ({text[:160]}){where}. Register one by torch.library.register_fake."
    raised = _described(failure, model)
    if any(words in str(failure).lower() for words in NO_GROUP):
        return (
            f"The {part} needs a process group, but explain() creates none ({raised}). Leave its collectives out, or call "
            "explain() in a program that has a process group. Context parallelism is not simulated."
        )
    if any(words in text for words in NO_DEVICE):
        return (
            f"The {part} uses an explicit device ({raised}), but runs on meta. Create tensors on the device of the inputs, "
            "as by device=x.device."
        )
    if "required keyword-only argument" in text:
        return f"The model does not accept this batch: {raised}. Pass a dict of arguments by name."
    if part == "forward":
        return f"The model does not accept this batch: {raised}"
    return f"The {part} raises {raised}" + (", called with the output of the model" if part == "loss" else "")


def _described(failure: BaseException, model: nn.Module | None = None) -> str:
    """Return class, text and location of an exception in one line, as in "ValueError: no rows (at model.py:12)"."""
    text = " ".join(str(failure).split())[:300] or "without a text"
    return f"{type(failure).__name__}: {text}{_location(failure, model)}"


def _location(failure: BaseException, model: nn.Module | None) -> str:
    """Return the innermost module and the innermost user line of a traceback, as in " (in 'layers.0', at model.py:12)"."""
    names = {} if model is None else {id(module): name for name, module in model.named_modules()}
    module = place = ""
    for frame, line in traceback.walk_tb(failure.__traceback__):  # the innermost frame is the last one
        module = names.get(id(frame.f_locals.get("self"))) or module
        place = place_of(frame.f_code.co_filename, line) or place
    parts = [f"in '{module}'"] * bool(module) + [f"at {place}"] * bool(place)
    return f" ({', '.join(parts)})" if parts else ""


@dataclass(frozen=True, slots=True)
class LocalShard:
    """The first rank's shard of one parameter."""

    whole: PlanEntry  # the parameter
    shape: tuple[int, ...]  # of the shard
    dim: int  # the sharded dim
    ranks: int  # number of shards
    replicas: int  # of each shard
    on_host: bool  # True if it is offloaded to host memory


def _local_shards(traced: TracedModel, ranks: int, replicas: int, dims: Mapping[str, int]) -> list[LocalShard]:
    """Return the first rank's shards, the largest ones, of all parameters that receive gradients. `dims`: as in `Setting`."""
    graded = {event.parameter for event in traced.trace.events if isinstance(event, GradientReady)}
    options = {entry.name: planned.options for planned, entries in traced.plan.held() for entry in entries}
    found = []
    for entry in (entry for entry in traced.plan.outline.parameters if entry.name in graded):
        shape, dim, mesh = list(entry.shape), dims.get(entry.name, 0), (ranks, replicas)
        if shape:
            everywhere = ranks * replicas
            divided = options[entry.name].get("states", traced.arguments.states).shards_over_replicas
            if divided and not ext.two_hops.has_few_rows(shape, dim, itemsize=entry.dtype.itemsize, ranks=everywhere):
                mesh = everywhere, 1
            shape[dim] = -(-shape[dim] // mesh[0])
        offload = resolve_offload(options[entry.name].get("offload_policy", traced.arguments.offload_policy))
        on_host = isinstance(offload, CPUOffloadPolicy)
        found.append(LocalShard(entry, tuple(shape), dim, *mesh, on_host))
    return found


def shard_dims_of(traced: TracedModel) -> dict[str, int]:
    """Return the dim along which `shard_placement_fn` of its unit shards each parameter, by name, where it is not 0."""
    default = traced.arguments.shard_placement_fn
    functions = {
        entry.name: function
        for planned, entries in traced.plan.held()
        for entry in entries
        if (function := planned.options.get("shard_placement_fn", default)) is not None
    }
    found: dict[str, int] = {}
    for parameter, name in parameter_names(traced.model, functions).items():
        if name not in functions:
            continue
        chosen = functions[name](parameter)
        if not isinstance(chosen, (Shard, type(None))):
            raise ValueError(f"shard_placement_fn must return None or Shard(dim) for explain(), got {chosen!r} for '{name}'.")
        if chosen is None or not parameter.ndim:
            continue
        if not -parameter.ndim <= chosen.dim < parameter.ndim:
            raise ValueError(
                f"shard_placement_fn shards '{name}' along dim {chosen.dim}, which its shape {tuple(parameter.shape)} does not "
                "have."
            )
        if chosen.dim % parameter.ndim:
            found[name] = chosen.dim % parameter.ndim
    if found and traced.arguments.engine == "fsdp2":
        raise ValueError(
            f"shard_placement_fn shards '{min(found)}' along dim {found[min(found)]}, which is simulated only with "
            "engine='fullshard': torch's FSDP2 makes further copies of such parameters."
        )
    return found


def setting_of(arguments: ExplainArguments, traced: TracedModel) -> Setting:
    """Return the settings of the simulation."""
    (ranks, replicas, hybrid), dims = arguments.mesh_sizes, shard_dims_of(traced)
    factory = None if arguments.optimizer is None else optimizer_factory(arguments.optimizer)
    return Setting(
        ranks,
        replicas=replicas,
        hybrid=hybrid,
        mp_policy=arguments.dtypes,
        comm_policy=arguments.comm_policy,
        offload_policy=arguments.offload_policy,
        reshard_after_forward=arguments.reshard_after_forward,
        states=arguments.states,
        microbatches=arguments.microbatches,
        accumulate=arguments.accumulate,
        accelerator=arguments.accelerator,
        gloo=not arguments.accelerator,
        optimizer=() if factory is None else traced.optimizer_steps_for(factory, ranks, replicas, dims),
        keep_unsharded_storage=arguments.keep_unsharded_storage,
        engine=arguments.engine,
        tensor_parallel=arguments.tensor_parallel,
        dims=dims,
    )
