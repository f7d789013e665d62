"""Wrappers around the private parts of torch that fullshard uses.

A comment "Private:" in a wrapper names the private part, the reason for it, and the consequence of a change in torch. Without
another consequence, a removed name raises AttributeError, ImportError or TypeError: at `import fullshard` for module-level
names, else at the first call.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import operator
import sys
import threading
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import cache
from itertools import chain, repeat
from math import prod
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from fullshard.errors import warn_once

__all__ = [
    "BATCH_NORM",
    "HONOURS_SUBCLASSES",
    "HYBRID_ZERO2",
    "NEWEST_TRIED",
    "REDUCES_IN_GRAD_DTYPE",
    "THREADED",
    "TRACKS_GRAD_DTYPE",
    "VERSION",
    "DTensorSpec",
    "FakeTensor",
    "GradientReductionHandle",
    "NetworkError",
    "PerRank",
    "ShardedTensor",
    "StoreError",
    "TorchDispatchMode",
    "TorchFSDPModule",
    "Undo",
    "abort_group",
    "accelerator",
    "all_gather_base",
    "all_gather_coalesced",
    "all_reduce_max",
    "all_reduce_sum",
    "allocates",
    "are_dtensors",
    "argument",
    "as_own_storage",
    "attach_state",
    "attention_taken_apart",
    "axis_of",
    "backend_name",
    "buffers_of",
    "can_assign_data",
    "carry_hooks",
    "children_of",
    "chunk_cat",
    "contiguous_strides",
    "copied",
    "count_flops",
    "counts_collectives",
    "current_graph_task",
    "current_stream",
    "default_store",
    "detach_state",
    "device_of",
    "disable_tracing",
    "dispatch_modes",
    "drop_groups",
    "dtensor",
    "dtensor_like",
    "efficient_attention",
    "ends_by_collective",
    "exception_on",
    "exchange",
    "extend_clipping",
    "extend_trunc_normal",
    "fake_ranks",
    "flash_attention",
    "flash_attention_on_cpu",
    "flat_axis",
    "functional_collective",
    "global_rank",
    "grad_dtype_of",
    "group_name",
    "grouped_mm",
    "grouped_mm_shape",
    "groups_of",
    "has_backend",
    "has_extended_api",
    "have_listed_by",
    "have_listed_by_itself",
    "have_reduction_hooks",
    "in_functional_call",
    "in_transform",
    "insides",
    "is_alive",
    "is_capturing",
    "is_cut",
    "is_done",
    "is_handled",
    "is_in_forward",
    "is_in_graph",
    "is_nccl",
    "is_non_composable",
    "is_over",
    "is_wrap_policy",
    "item",
    "join_meshes",
    "leads_to",
    "left_out_of",
    "list_alike",
    "list_tensors",
    "local_part",
    "local_tensor",
    "locals_of",
    "makes_parameter",
    "mark_managed",
    "meta_kernels",
    "new_group",
    "on_activation_offload",
    "on_autocast",
    "on_backward_end",
    "on_compiled",
    "on_context_parallel",
    "on_differentiation",
    "on_numpy",
    "on_optimizer_step",
    "on_registration",
    "on_stream",
    "only_writes",
    "operation_name",
    "own_store",
    "parameter_hooks",
    "parameters_of",
    "persists",
    "point_at",
    "process_group_memory",
    "profiling",
    "reduce_scatter_base",
    "reduce_scatter_coalesced",
    "references",
    "register_optimizer_step_post_hook",
    "register_optimizer_step_pre_hook",
    "relax_capture_mode",
    "remove_all",
    "replace_parameters",
    "returns_tensors",
    "run_wrap_policy",
    "same_memory",
    "same_storage",
    "scale",
    "sends_messages",
    "set_grad_dtype",
    "set_gradients",
    "show_collective",
    "sizes_of_product",
    "spec",
    "spec_of",
    "specs_of",
    "split_copy",
    "spmd_types_of",
    "storage_key",
    "store_host",
    "strided_shard",
    "symmetric_memory",
    "then_order",
    "threads_are_ranks",
    "tree_leaves",
    "tree_map_only",
    "uncounted",
    "unsafe_view",
    "view_base",
    "wait_for_event",
    "waited",
    "whole_of",
    "world_size",
    "writes",
    "written_to",
]


K = TypeVar("K")
V = TypeVar("V")

TorchFSDPModule: Any = torch_fsdp.FSDPModule  # only for `isinstance`: fullshard overrides all its methods
GradientReductionHandle: Any = getattr(torch_fsdp, "GradientReductionHandle", object)  # for `isinstance`, from torch 2.15 on
# Private: `__wrapped__`, the undecorated function. `contract`, the decorator, uses it as the key of the states of a module.
_TORCH_FULLY_SHARD: Any = torch_fsdp.fully_shard.__wrapped__  # type: ignore[attr-defined]


# --- versions of torch and their differences -------------------------------------------------------------------------


VERSION: tuple[int, int] = tuple(int(part) for part in torch.__version__.split(".")[:2])  # type: ignore[assignment]
"""Major and minor version of the installed torch."""

NEWEST_TRIED: tuple[int, int] = (2, 15)
"""Newest torch version on which the tests have passed."""

HONOURS_SUBCLASSES: bool = VERSION >= (2, 12)
"""True if torch calls the `__torch_dispatch__` of a DTensor subclass; torch 2.11 runs DTensor's own instead."""

REDUCES_IN_GRAD_DTYPE: bool = VERSION >= (2, 15)
"""True if torch reduces in the dtype of `.grad` by default (`reduce_dtype=None`), False if in the compute dtype."""

TRACKS_GRAD_DTYPE: bool = hasattr(Tensor, "_has_grad_dtype_override")
"""True if torch records that `grad_dtype` was set. Before 2.15, setting it to the parameter's own dtype leaves no trace."""


def grad_dtype_of(parameter: Tensor) -> tuple[bool, torch.dtype | None]:
    """Return a pair: True if `parameter.grad_dtype` was set, and the dtype that it was set to (None allows any dtype)."""
    # Private: `_has_grad_dtype_override`, the only record of an explicit setting. Without it, the comparison is used, and an
    # explicit setting to the parameter's own dtype counts as no setting.
    found: torch.dtype | None = parameter.grad_dtype
    explicit = parameter._has_grad_dtype_override if TRACKS_GRAD_DTYPE else found != parameter.dtype  # type: ignore[attr-defined]
    return explicit, found if explicit else None


def set_grad_dtype(parameter: Tensor, dtype: torch.dtype | None) -> None:
    """Set the dtype that `.grad` must have; None allows any dtype."""
    # If torch records explicit settings, setting the current dtype is a change, too.
    if parameter.grad_dtype != dtype or TRACKS_GRAD_DTYPE:
        parameter.grad_dtype = dtype


# --- DTensor and device meshes ---------------------------------------------------------------------------------------


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of this shape."""
    strides: list[int] = []
    step = 1
    for length in reversed(shape):
        strides.insert(0, step)
        step *= max(length, 1)  # as torch does for empty tensors
    return tuple(strides)


def spec(mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, dtype: torch.dtype) -> DTensorSpec:
    """Return the spec of a contiguous DTensor of global `shape`."""
    # Private: `DTensorSpec` and `TensorMeta`. A spec is built once per parameter and then shared by all its gradients and
    # optimizer states; the public constructors build one for each tensor.
    return DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(shape, contiguous_strides(shape), dtype))


def strided_shard(dim: int, split_factor: int) -> Placement:
    """Return the placement of an FSDP shard of `dim`, which a mesh dim to its right shards into `split_factor` parts."""
    # Private: `_StridedShard`, the placement of FSDP2 with tensor parallelism. If its meaning changes, `full_tensor()` and
    # checkpoints get rows in a wrong order, silently.
    return _StridedShard(dim, split_factor=split_factor)


def is_cut(placement: Placement, dim: int | None = None) -> bool:
    """Return True if a placement shards (`dim`, if given), strided or not."""
    # Private: `_StridedShard`, which is not a subclass of Shard in some versions of torch.
    return isinstance(placement, (Shard, _StridedShard)) and (dim is None or placement.dim == dim)


def flat_axis(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """Return the mesh dims `names` of `mesh` as one mesh dim. Flattening several creates a process group the first time."""
    # Private: `_flatten`, for hybrid meshes whose shard or replicate dim consists of several mesh dims.
    return mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names))


def is_alive(group: Any) -> bool:
    """Return True until torch destroys the process group."""
    # Private: `_world.pg_map`, torch's table of process groups. A destroyed group object looks like a live one otherwise.
    return group in dist.distributed_c10d._world.pg_map


def groups_of(mesh: DeviceMesh) -> list[Any]:
    """Return the process group of each mesh dim; None for a destroyed one."""
    found: list[Any] = []
    for axis in range(mesh.ndim):
        try:
            found.append(mesh.get_group(axis))
        except (RuntimeError, ValueError, KeyError):
            found.append(None)
    return found


def drop_groups(mesh: DeviceMesh) -> None:
    """Remove destroyed process groups from a mesh."""
    # Private: `_pg_registry`, the references of a mesh to its process groups, which some versions of torch lack. A destroyed
    # group closes its connections when the last reference is dropped, which other ranks notice. If torch renames the registry,
    # the connections stay open as long as the mesh lives.
    for one in (mesh, getattr(mesh, "_root_mesh", None)):
        registry = getattr(one, "_pg_registry", {})
        for name in [name for name, group in registry.items() if not is_alive(group)]:
            del registry[name]


def join_meshes(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Return one mesh with the mesh dims of several submeshes. Raise RuntimeError if they are not of the same root mesh."""
    # Private: `_concatenate`, which FSDP2 uses for the mesh of FSDP and tensor parallelism. It creates no process group.
    return DeviceMesh._concatenate(list(meshes))


def waited(tensor: Tensor) -> Tensor:
    """Return `tensor`; if it is the result of a functional collective, wait for it and return the plain tensor."""
    # Private: `AsyncCollectiveTensor`, a wrapper without a storage. The result is complete only after `wait()`.
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def dtensor(local: Tensor, spec: DTensorSpec) -> DTensor:
    """Return a DTensor over `local` without a check or a copy, in 2 us.

    `DTensor.from_local` takes 7 times as long.
    """
    # Private: the arguments of `DTensor.__new__`. Calling the class would also run its empty `__init__` in dynamo's wrapper.
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)  # type: ignore[call-arg, arg-type]


def dtensor_like(origin: Tensor, local: Tensor, spec: DTensorSpec) -> DTensor:
    """Return `dtensor(local, spec)` with the storage offset of `origin`, a tensor like `local` at the start of a storage.

    See `as_own_storage`.
    """
    # Private: `_local_tensor`. `__new__` copies dtype, device and storage offset from its argument to the wrapper and keeps
    # the argument as the local tensor, which is then replaced.
    made = DTensor.__new__(DTensor, origin, spec, requires_grad=False)  # type: ignore[call-arg, arg-type]
    made._local_tensor = local
    return made


def turned_into_parameter(tensor: DTensor, requires_grad: bool) -> nn.Parameter:
    """Turn `tensor` itself into a Parameter. `nn.Parameter(tensor)` detaches it first, which DTensor dispatches: 30 us."""
    # Private: `_is_param`, the flag that makes `isinstance(tensor, nn.Parameter)` True for tensor subclasses. If it changes,
    # modules refuse the sharded parameters with TypeError.
    tensor.requires_grad_(requires_grad)
    tensor._is_param = True  # type: ignore[attr-defined]
    return tensor  # type: ignore[return-value]


def set_gradients(gradients: Iterable[tuple[Tensor, Tensor, Tensor, DTensorSpec, str]], mark: object) -> None:
    """Set `.grad` of each sharded parameter to `dtensor_like(origin, local, spec)`, with `mark` as its attribute `key`.

    Args:
        gradients: (parameter, origin, local, spec, key) of each parameter.
        mark: value of the attribute, equal for all gradients of one reduction.
    """
    # `dtensor_like` is inlined: this loop runs for every parameter in every backward.
    for parameter, origin, local, spec, key in gradients:
        made = DTensor.__new__(DTensor, origin, spec, requires_grad=False)  # type: ignore[call-arg, arg-type]
        made._local_tensor = local
        made.__dict__[key] = mark
        parameter.grad = made


def insides(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Return the local tensors of two DTensors with equal placements; other tensors unchanged."""
    return getattr(one, "_local_tensor", one), getattr(other, "_local_tensor", other)


def spec_of(tensor: DTensor) -> DTensorSpec:
    # Private: `_spec`. The public properties give mesh and placements, but not the object that other DTensors can share.
    return tensor._spec


def _all_dtensors(kinds: set[type]) -> bool:
    return all(issubclass(kind, DTensor) for kind in kinds)


def are_dtensors(tensors: Sequence[Any]) -> bool:
    return _all_dtensors(set(map(type, tensors)))


def specs_of(tensors: Sequence[Any]) -> list[Any]:
    """Return the spec of each DTensor, and None for other values."""
    # By class first: an optimizer lists thousands of tensors of one class, and `isinstance` on each takes longer.
    kinds = set(map(type, tensors))
    if _all_dtensors(kinds):
        return [tensor._spec for tensor in tensors]
    if not any(issubclass(kind, DTensor) for kind in kinds):
        return [None] * len(tensors)
    return [tensor._spec if isinstance(tensor, DTensor) else None for tensor in tensors]


def locals_of(tensors: Sequence[Any]) -> Sequence[Any]:
    """Return the local tensors of DTensors; other values unchanged."""
    kinds = set(map(type, tensors))
    if _all_dtensors(kinds):
        return [tensor._local_tensor for tensor in tensors]
    if not any(issubclass(kind, DTensor) for kind in kinds):
        return tensors
    return [tensor._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in tensors]


# --- optimizers ------------------------------------------------------------------------------------------------------


_FIRST = -1  # key of our hook; torch's keys start at 0


def list_tensors(optimizer: Optimizer, group: dict[str, Any], *lists: list[Any]) -> Any:
    """List the tensors of a step (parameters, gradients, states) as the class of the optimizer does."""
    # Private: `_init_group`, the method in which each optimizer of torch collects the tensors of a step.
    return type(optimizer)._init_group(optimizer, group, *lists)  # type: ignore[attr-defined]


def list_alike(one: type[Optimizer], other: type[Optimizer]) -> bool:
    """Return True if two optimizer classes list tensors with the same function."""
    return one._init_group is other._init_group  # type: ignore[attr-defined]


def have_listed_by(optimizer: Optimizer, how: Callable[..., Any], after: Callable[..., None]) -> None:
    """Let `how` list the tensors of this optimizer's steps, and call `after` at their end, before the caller's hooks."""
    # Private: an attribute of the instance hides the method `_init_group` of its class. If `step` stops calling `_init_group`,
    # steps compute with DTensors again: the same values, more slowly.
    # Private: `_optimizer_step_post_hooks`. The public registration appends, but the caller's hooks must find the states as
    # DTensors, so `after` has to be first.
    optimizer.__dict__["_init_group"] = how
    optimizer._optimizer_step_post_hooks[_FIRST] = after
    optimizer._optimizer_step_post_hooks.move_to_end(_FIRST, last=False)  # type: ignore[attr-defined]


def have_listed_by_itself(optimizer: Optimizer) -> None:
    """Undo `have_listed_by`."""
    optimizer.__dict__.pop("_init_group", None)
    optimizer._optimizer_step_post_hooks.pop(_FIRST, None)


def makes_parameter() -> bool:
    """Return True if the caller of this function's caller is the constructor of nn.Parameter."""
    # Private: `nn.Parameter.__new__` calls `detach` directly. If it stops doing so, nn.Parameter(sharded parameter) raises
    # RuntimeError, since `detach` then returns another class than it requires.
    return sys._getframe(2).f_code is nn.Parameter.__new__.__code__


# --- operators -------------------------------------------------------------------------------------------------------
#
# Private: `_schema` of an operator, the only source of its argument names and of the arguments that it writes to.


def writes(operation: Any) -> bool:
    """Return True if an operator writes to any of its arguments."""
    return operation._schema.is_mutable


def written_to(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the argument tensors that an operator writes to, including tensors in lists."""
    if not operation._schema.is_mutable:
        return []
    names = [(at, known.name) for at, known in enumerate(operation._schema.arguments) if known.is_write]
    given = [args[at] if at < len(args) else kwargs.get(name) for at, name in names]
    return [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]


def returns_tensors(operation: Any) -> bool:
    """Return True if an operator returns tensors rather than numbers."""
    return any("Tensor" in str(known.type) for known in operation._schema.returns)


def only_writes(operation: Any) -> bool:
    """Return True if an operator writes to its arguments and returns nothing, as `_foreach_add_` does."""
    return operation._schema.is_mutable and not operation._schema.returns


def operation_name(operation: Any) -> str:
    """Return the name of an operator as it is written in Python.

    >>> operation_name(torch.ops.aten.zero_.default)
    'zero_()'
    """
    return f"{operation._schema.name.partition('::')[2]}()"


# --- functions of torch that fullshard extends -----------------------------------------------------------------------


Undo = Callable[[], None]
"""Function that reverts a change to torch."""


def extend_trunc_normal(instead: Callable[..., Tensor]) -> Undo:
    """Replace the function inside torch.nn.init.trunc_normal_ by `instead`, which gets that function and its arguments.

    The public function stays the same object, so calls through a name imported earlier are covered, too.
    """
    # Private: `_no_grad_trunc_normal_`, which `trunc_normal_` looks up at each call. If `trunc_normal_` stops calling it, the
    # replacement never runs.
    init: Any = torch.nn.init
    inner = init._no_grad_trunc_normal_
    init._no_grad_trunc_normal_ = functools.wraps(inner)(functools.partial(instead, inner))
    return lambda: setattr(init, "_no_grad_trunc_normal_", inner)


def extend_clipping(total_norm: Callable[..., Tensor], clip_with_norm: Callable[..., None]) -> Undo:
    """Replace the functions inside torch.nn.utils.get_total_norm and clip_grads_with_norm_, and thereby in clip_grad_norm_.

    The replacements get torch's own function and its arguments, and run without grad. The public functions stay the same
    objects, so calls through names imported earlier are covered, too.
    """
    # Private: the public functions are closures of a no-grad wrapper, with the function itself in the cell `func`. If torch
    # drops the wrapper, this raises TypeError or ValueError when fullshard installs it.
    utils: Any = torch.nn.utils
    cells: list[tuple[Any, Any]] = []
    for public, instead in ((utils.get_total_norm, total_norm), (utils.clip_grads_with_norm_, clip_with_norm)):
        cell = public.__closure__[public.__code__.co_freevars.index("func")]
        cells.append((cell, cell.cell_contents))
        cell.cell_contents = functools.wraps(cell.cell_contents)(functools.partial(instead, cell.cell_contents))

    def undo() -> None:
        for cell, inner in cells:
            cell.cell_contents = inner

    return undo


def as_own_storage(tensor: Tensor) -> Tensor:
    """Return a tensor over the memory of `tensor`, in a storage that begins and ends with it. Nothing is copied.

    A DTensor copies the storage offset of its local tensor. torch.save and asynchronous checkpoints then treat the wrapper as a
    tensor with memory, even an empty one, and torch.save saves whole storages. The result has a version counter of its own.
    """
    # Private: a slice of an untyped storage is a storage over the same memory, which keeps the whole one alive. If slicing
    # copies one day, the result no longer aliases `tensor`, and parameters no longer follow the flat shard.
    if type(tensor) is not Tensor or tensor.device.type == "meta":
        return tensor
    if not tensor.numel():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    first = tensor.storage_offset()
    length = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    storage = tensor.untyped_storage()[first * tensor.itemsize : (first + length) * tensor.itemsize]
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, tensor.shape, tensor.stride())


local_tensor: Callable[[Any], Tensor] = operator.attrgetter("_local_tensor")
"""Return the tensor object that a DTensor wraps. `to_local()` returns a view of it, and autograd records that."""


def point_at(tensor: DTensor, local: Tensor) -> None:
    """Replace the local tensor of `tensor` by `local`. The global shape and dtype of `tensor` must already fit."""
    # Private: `_local_tensor`. The wrapper cannot change its shape, dtype or device.
    tensor._local_tensor = local
    tensor.__dict__.pop("_fullshard_bare", None)  # the cached plain DTensor is over the old memory


# --- modules and parameters ------------------------------------------------------------------------------------------


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the dict that `module.name` reads. Writing to it replaces a parameter in 0.05 us, `__setattr__` in 2 us."""
    # Private: `_parameters`. Every unshard and reshard swaps the parameters of a unit through it.
    return module._parameters


def allocates(fn: Callable[..., Any]) -> bool:
    """Return True if `fn`, an argument of `Module._apply`, is that of `Module.to_empty`, which allocates without values."""
    # Private: the name of the lambda in `to_empty`. If it changes, `to_empty` looks like `to`: parameters without values are
    # not recorded, so the check for parameters that nobody initialized does nothing.
    return getattr(fn, "__qualname__", "").startswith("Module.to_empty.")


def persists(module: nn.Module, name: str) -> bool:
    """Return True if state dicts contain this buffer of `module`."""
    # Private: `_non_persistent_buffers_set`, the only record of `persistent=False`.
    return name not in module._non_persistent_buffers_set


def replace_parameters(module: nn.Module, held: Any) -> None:
    """Let `module.name` read parameters from `held` instead of the dict of `parameters_of`."""
    # Private: `nn.Module.__getattr__` reads `_parameters` from the instance at each access and requires a mapping only.
    module.__dict__["_parameters"] = held


def on_registration(hook: Callable[[nn.Module, str, object], None]) -> Undo:
    """Call `hook` (module, name, value) before a parameter or submodule is registered in any module."""
    register = nn.modules.module
    handles = [
        register.register_module_parameter_registration_hook(hook),
        register.register_module_module_registration_hook(hook),
    ]
    return lambda: remove_all(handles)


def on_optimizer_step(before: Callable[..., None], after: Callable[..., None]) -> Undo:
    """Call `before` and `after` (optimizer, args, kwargs) around the step of any optimizer."""
    handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    return lambda: remove_all(handles)


def remove_all(handles: Sequence[Any]) -> None:
    """Remove hooks by their handles."""
    for handle in handles:
        handle.remove()


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the dict that `module.name` reads for submodules."""
    # Private: `_modules`. `named_children()` skips None and duplicates, and cannot replace a submodule.
    return module._modules


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the dict that `module.name` reads for buffers."""
    # Private: `_buffers`, to read and replace buffers of one module without `__setattr__`.
    return module._buffers


def can_assign_data(tensor: Tensor, value: Tensor) -> bool:
    """Return True if `tensor.data = value` is allowed, which depends on their devices."""
    # Private: the test that `Module._apply` itself uses to choose between `.data` and a new parameter.
    return torch._has_compatible_shallow_copy_type(tensor, value)


def carry_hooks(source: Tensor, target: Tensor) -> None:
    """Let `target` share the hooks registered on `source`. Handles returned by `register_hook` still remove them."""
    # Private: `_backward_hooks` and `_post_accumulate_grad_hooks`, dicts by handle. The dict itself is shared, since handles
    # refer to it weakly. If torch renames the second one, its hooks are lost silently.
    if source._backward_hooks:
        target._backward_hooks = source._backward_hooks
    accumulated = getattr(source, "_post_accumulate_grad_hooks", None)
    if accumulated:
        target._post_accumulate_grad_hooks = accumulated  # type: ignore[attr-defined]


def have_reduction_hooks(parameters: Iterable[Tensor]) -> bool:
    """Return True if any parameter has hooks on its gradient or post-accumulate-grad hooks."""
    for parameter in parameters:
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            return True
    return False


def parameter_hooks(parameter: Tensor) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    """Return (hooks on the gradient, post-accumulate-grad hooks) of a sharded parameter.

    Autograd never runs them, since it sees unsharded parameters only.
    """
    before = list((parameter._backward_hooks or {}).values())
    after = list((getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values())
    return before, after


def spmd_types_of(parameter: Tensor) -> Any:
    """Return the annotations of the package spmd_types on a parameter; None if the program does not import it."""
    spmd = sys.modules.get("spmd_types")
    return None if spmd is None else spmd.get_local_type(parameter)


def is_non_composable(module: nn.Module) -> bool:
    """Return True if torch's `replicate` already owns the gradients of `module`."""
    # Private: `_get_registry`, in which torch's composable APIs record the modules that they manage. FSDP2 uses the same test.
    from torch.distributed._composable.contract import _get_registry

    registry = _get_registry(module)
    return registry is not None and "replicate" in registry


def attach_state(module: nn.Module, view: object) -> None:
    """Let torch's `fully_shard.state(module)` return `view`, and let torch's `replicate()` refuse the module."""
    # Private: `STATE_KEY` and `REGISTRY_KEY`, the attributes that `contract` reads. If `state()` looks elsewhere, it returns
    # None, and programs that read the state of a module fail; training does not depend on it.
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem

    module.__dict__.setdefault(STATE_KEY, OrderedDict())[_TORCH_FULLY_SHARD] = view
    module.__dict__.setdefault(REGISTRY_KEY, OrderedDict()).setdefault("fully_shard", RegistryItem())


def detach_state(module: nn.Module) -> None:
    """Undo `attach_state`."""
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY

    for key, entry in ((STATE_KEY, _TORCH_FULLY_SHARD), (REGISTRY_KEY, "fully_shard")):
        held = module.__dict__.get(key, {})
        held.pop(entry, None)
        if not held:
            module.__dict__.pop(key, None)


def is_in_forward(module: nn.Module, *, outer: bool = False) -> bool:
    """Return True if a call of `module` is on this thread's stack. With `outer`, its innermost call does not count."""
    # Private: every call of a module runs `nn.Module._call_impl` with the module as `self`. If it moves to C or is
    # inlined, this returns False during a forward: the unit looks interrupted and is reset.
    frame, found = sys._getframe(1), 0
    code = nn.Module._call_impl.__code__
    while frame is not None:
        if frame.f_code is code and frame.f_locals.get("self") is module:
            found += 1
        frame = frame.f_back  # type: ignore[assignment]
    return found > (1 if outer else 0)


def view_base(tensor: Tensor) -> Tensor | None:
    """Return the base of a view; None for a tensor that is no view."""
    # Private: `_base` and `_is_view`, autograd's record of views.
    return tensor._base if tensor._is_view() else None


BATCH_NORM: type[nn.Module] = nn.modules.batchnorm._BatchNorm
"""Base class of all batch norms, which torch does not export."""


def is_wrap_policy(policy: Any) -> bool:
    """Return True if `policy` is one of FSDP1's policy objects. FSDP1's policy functions are plain callables."""
    # Private: `_Policy`, their base class.
    return isinstance(policy, torch_fsdp.wrap._Policy)


def run_wrap_policy(policy: Any, root: nn.Module, ignored: set[nn.Module]) -> dict[nn.Module, dict[str, Any]]:
    """Return the modules that a policy object of FSDP1 selects, each with the arguments that it overrides."""
    # Private: `_run_policy`, the only method of a policy object.
    return policy._run_policy(root, ignored, {})


def whole_of(sharded: ShardedTensor, device: torch.device) -> Tensor:
    """Return the full tensor of a ShardedTensor (collective over its process group).

    Args:
        sharded: the tensor.
        device: device of the result; the process group must support it.
    """
    # Private: `_process_group`. `ShardedTensor.gather` writes the full tensor on one rank only.
    metadata = sharded.metadata()
    own = {tuple(shard.metadata.shard_offsets): shard.tensor for shard in sharded.local_shards()}
    whole = torch.empty(metadata.size, dtype=metadata.tensor_properties.dtype, device=device)
    for part in metadata.shards_metadata:
        held = own.get(tuple(part.shard_offsets))
        piece = torch.empty(part.shard_sizes, dtype=whole.dtype, device=device) if held is None else held.detach().to(device)
        piece = piece.contiguous()
        owner: Any = part.placement
        dist.broadcast(piece, owner.rank(), group=sharded._process_group)
        whole[tuple(slice(at, at + size) for at, size in zip(part.shard_offsets, part.shard_sizes))] = piece
    return whole


HYBRID_ZERO2: torch_fsdp.ShardingStrategy = torch_fsdp.ShardingStrategy._HYBRID_SHARD_ZERO2
"""FSDP1's hybrid strategy that keeps parameters unsharded from forward to backward. torch exports no public name for it."""


def left_out_of(mixed_precision: torch_fsdp.MixedPrecision) -> tuple[type[nn.Module], ...]:
    """Return the module classes that FSDP1's mixed precision ignores."""
    # Private: `_module_classes_to_ignore`, a field of the public dataclass.
    return tuple(mixed_precision._module_classes_to_ignore)


# --- autograd --------------------------------------------------------------------------------------------------------


def in_transform() -> bool:
    """Return True inside a transform of torch.func (grad, vmap, jvp)."""
    # Private: the stack of functorch interpreters. torch has no public test for it.
    return torch._C._functorch.peek_interpreter_stack() is not None


def in_functional_call() -> bool:
    """Return True if torch.func.functional_call is on this thread's stack."""
    # Private: `_functional_call`. It registers the caller's tensors on the modules until it returns. If it stops doing so,
    # those tensors are taken for values that the caller assigned to the module for good.
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is torch.nn.utils.stateless._functional_call.__code__:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def is_in_graph(leaf: Tensor) -> bool:
    """Return True if a live graph leads to `leaf`."""
    # A leaf refers weakly to the node that accumulates its gradient, and a graph refers to it strongly. Without a graph, the
    # node is freed with `first`, and the second lookup creates a new node without the metadata.
    key = "fullshard"
    first: Any = torch.autograd.graph.get_gradient_edge(leaf).node
    first.metadata[key] = True
    del first
    second: Any = torch.autograd.graph.get_gradient_edge(leaf).node
    return second.metadata.pop(key, None) is not None


def leads_to(outputs: Sequence[Any], leaves: Sequence[Tensor]) -> set[int]:
    """Return the indices of the `leaves` to which the graphs of `outputs` (tensors or edges) lead.

    Visits every node of the graphs, unless all leaves are found earlier.
    """
    edge = torch.autograd.graph.get_gradient_edge
    wanted = {edge(leaf).node: number for number, leaf in enumerate(leaves) if leaf.requires_grad}
    waiting = [edge(one).node if isinstance(one, Tensor) else one.node for one in outputs]
    seen = set(waiting)
    found: set[int] = set()
    while waiting and len(found) < len(wanted):
        node = waiting.pop()
        if node in wanted:
            found.add(wanted[node])
        more = {after for after, _ in node.next_functions if after is not None} - seen
        seen |= more
        waiting += more
    return found


def on_differentiation(check: Callable[[Sequence[Any], Sequence[Any], bool], None]) -> Undo:
    """Call `check` before torch.autograd.grad and before a backward with inputs.

    Its arguments are the outputs, the inputs, and True if each input must be used. Other backwards cost one call and one test.
    """
    # Private: `_engine_run_backward`, through which Python starts the autograd engine. torch.autograd imports it by name, so
    # both names are replaced. If torch stops calling it, the check never runs: `backward(inputs=...)` then leaves `.grad` of
    # sharded parameters unset, without an error.
    autograd: Any = torch.autograd
    inner = autograd.graph._engine_run_backward

    @functools.wraps(inner)
    def run_backward(outputs: Any, gradients: Any, retain: Any, create: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if inputs:
            check(outputs, inputs, not (args[0] if args else kwargs["allow_unreachable"]))
        return inner(outputs, gradients, retain, create, inputs, *args, **kwargs)

    autograd._engine_run_backward = autograd.graph._engine_run_backward = run_backward

    def undo() -> None:
        autograd._engine_run_backward = autograd.graph._engine_run_backward = inner

    return undo


current_graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""Return a number that identifies the backward that runs on this thread; -1 outside a backward.

Private: torch has no public test for a running backward.
"""


def on_backward_end(callback: Callable[[], None]) -> None:
    """Run `callback` when the running backward ends without an error. On an error, the engine drops its reference to it."""
    # Private: `queue_callback`, as FSDP2 uses it. The engine must hold the only reference, since the callback's deletion is the
    # sign of a failed backward.
    torch.autograd.Variable._execution_engine.queue_callback(callback)


# --- dynamo and dispatch modes ---------------------------------------------------------------------------------------


def disable_tracing(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return `fn` with a graph break around it: dynamo traces neither `fn` nor its callees.

    Wrap once, not per call (0.5 us instead of 6).
    """
    return torch.compiler.disable(fn)


def mark_managed(module: nn.Module) -> None:
    """Set the two attributes that make dynamo pass parameters as inputs of each call instead of baking them into the graph."""
    # Private: `_is_fsdp_managed_module` and `_fsdp_use_orig_params`, which FSDP2 sets as well. If dynamo stops reading them, it
    # may bake a parameter into the graph that fullshard replaces later.
    module._is_fsdp_managed_module = True  # type: ignore[assignment]
    module._fsdp_use_orig_params = True  # type: ignore[assignment]


dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""Return the number of dispatch modes that are active on this thread.

Private: a count from C++, cheap enough for every collective. The stack itself is built in Python.
"""


def argument(operation: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return an argument of an aten operator by name; None if the operator has no such argument or the call omits it."""
    names = [known.name for known in operation._schema.arguments]
    at = names.index(name) if name in names else len(args)
    return args[at] if at < len(args) else kwargs.get(name)


# --- operators and their floating-point operations -------------------------------------------------------------------


flash_attention = torch.ops.aten._scaled_dot_product_flash_attention
efficient_attention = torch.ops.aten._scaled_dot_product_efficient_attention
flash_attention_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
attention_taken_apart = torch.ops.aten._scaled_dot_product_attention_math
"""Attention kernels. The first result of each is the result of `scaled_dot_product_attention`.

Private: the public function selects one of them by device; on meta, it always decomposes. The estimator selects the kernel that
the real device would run.
"""


def _flops_of_attention(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> int:
    """Count the two products of forward: query with key, and attention weights with value."""
    return 2 * query[..., 0].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _flops_of_attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> int:
    """Count the five products of backward: recomputed scores, and gradients of weights, values, queries and keys."""
    return 2 * query[..., 0].numel() * key.shape[-2] * (3 * query.shape[-1] + 2 * value.shape[-1])


grouped_mm = torch.ops.aten._grouped_mm
"""Products of rows, sorted by group, with one matrix for each group, as in a mixture of experts."""


def _flops_of_groups(one: Tensor, other: Tensor, *_: object, **__: object) -> int:
    """Count the products of all groups. Each row of the first factor, or each index of the summed dim, is in one group."""
    rows = one.shape[0] if other.dim() == 3 and one.dim() == 2 else one[..., 0].numel()
    return 2 * rows * one.shape[-1] * other.shape[-1]


# Formulas that torch lacks: torch 2.11 raises for fewer heads of keys than of queries, torch before 2.15 does not count the
# CPU's kernel, and no version counts grouped_mm.
_FLOPS: dict[Any, Callable[..., int]] = {
    flash_attention: _flops_of_attention,
    efficient_attention: _flops_of_attention,
    flash_attention_on_cpu: _flops_of_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_backward: _flops_of_attention_backward,
    torch.ops.aten._scaled_dot_product_efficient_attention_backward: _flops_of_attention_backward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _flops_of_attention_backward,
    grouped_mm: _flops_of_groups,
}


def grouped_mm_shape(
    one: Tensor, other: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Return an empty result of `grouped_mm`, with rows aligned to 16 bytes as torch's kernel aligns them.

    Args:
        one: (rows, inner), or (groups, rows, inner).
        other: (groups, inner, columns), or (inner, columns).
        offs: end of each group, along the rows, the columns or the summed dim.
        bias: not used.
        out_dtype: dtype of the result; None for the dtype of `one`.

    Returns:
        A tensor on the device of `one`: (groups, rows, columns) if both or neither of them is 3-D, else (rows, columns).
    """
    if one.dim() == other.dim() == 2:
        assert offs is not None
        shape = (offs.shape[0], one.shape[0], other.shape[1])
    else:
        shape = (*one.shape[:-1], other.shape[-1]) if one.dim() == other.dim() else (one.shape[-2], other.shape[-1])
    dtype = out_dtype or one.dtype
    aligned = 16 // dtype.itemsize
    row = -(-shape[-1] // aligned) * aligned
    strides = (row, 1) if len(shape) == 2 else (shape[1] * row, row, 1)
    return torch.empty_strided(shape, strides, dtype=dtype, device=one.device)


def count_flops(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """Count the floating-point operations of a matrix product or of attention. A multiply-add counts as two.

    Args:
        operation: an overload of an aten operator.
        args: its positional arguments.
        kwargs: its keyword arguments.
        out: its result.

    Returns:
        The count; 0 for other operators.
    """
    ours = _FLOPS.get(operation.overloadpacket)
    if ours is not None:
        return ours(*args, **kwargs)
    count = flop_registry.get(operation.overloadpacket)
    return 0 if count is None else int(count(*args, **kwargs, out_val=out))


def sizes_of_product(operation: Any, args: Sequence[Any]) -> tuple[int, ...]:
    """Return the sizes of a matrix product or of attention.

    Args:
        operation: an overload of an aten operator.
        args: its positional arguments.

    Returns:
        (rows, inner, columns) of a matrix product, (head dim, length of the keys) of attention, () of other operators.
    """
    packet, backward = operation.overloadpacket, "backward" in str(operation)
    if packet in _FLOPS and packet is not grouped_mm:
        query, key = args[1:3] if backward else args[:2]
        return query.shape[-1], key.shape[-2]
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    one, other = (
        tensors[-2:] if str(packet) in ("aten.addmm", "aten.baddbmm") else tensors[:2] if len(tensors) > 1 else (None, None)
    )
    if one is None or other is None or str(packet) not in _PRODUCTS:
        return ()
    return one.shape[-2], one.shape[-1], other.shape[-1]


_PRODUCTS = {"aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten._scaled_mm"}


def local_part(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor; other tensors unchanged."""
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


# --- support for the simulated step (foresight) ----------------------------------------------------------------------
#
# The estimator runs one step on meta tensors. The contexts below let it detect features of torch that it cannot simulate.


# Private: the functional collectives of DTensor, and `_resolve_process_group`, since their arguments contain the name of a
# process group. A collective that is missing here is reported as not simulated.
_SENDS_NOTHING = {torch.ops._c10d_functional.wait_tensor, torch.ops._c10d_functional._wrap_tensor_autograd}
_FUNCTIONAL: dict[Any, tuple[str, int]] = {  # kind, and the index of the group's name in the arguments
    torch.ops._c10d_functional.all_reduce.default: ("all_reduce", 2),
    torch.ops._c10d_functional.all_gather_into_tensor.default: ("all_gather", 2),
    torch.ops._c10d_functional.reduce_scatter_tensor.default: ("reduce_scatter", 3),
    torch.ops._c10d_functional.all_to_all_single.default: ("all_to_all", 3),
}


def functional_collective(operation: Any, args: Sequence[Any]) -> tuple[Any, int] | None:
    """Return (kind, number of ranks) of a functional collective, as DTensor calls them; None for other operators."""
    found = _FUNCTIONAL.get(operation)
    return None if found is None else (found[0], dist.distributed_c10d._resolve_process_group(args[found[1]]).size())  # type: ignore[attr-defined]


def sends_messages(operation: Any) -> bool:
    """Return True if an operator is a collective of torch.distributed."""
    return operation.namespace in ("c10d", "_c10d_functional") and operation.overloadpacket not in _SENDS_NOTHING


@contextmanager
def fake_ranks(size: int) -> Iterator[DeviceMesh | None]:
    """Yield a mesh of `size` ranks whose collectives send nothing; None for one rank. The mesh exists in the block only.

    Raises:
        RuntimeError: if a process group is initialized already.
    """
    if size == 1:
        yield None
        return
    if dist.is_initialized():
        raise RuntimeError(
            "Tensor parallelism cannot be simulated here: it needs a process group of fake ranks, and a process group is "
            "initialized already. Call this where no process group is."
        )
    # Private: torch's fake backend, made for its tests. Its collectives complete at once and send nothing.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    finally:
        dist.destroy_process_group()


unsafe_view = torch.ops.aten._unsafe_view
"""View that autograd treats as a new tensor. It computes nothing."""


@contextmanager
def meta_kernels(kernels: dict[str, Callable[..., Any]]) -> Iterator[None]:
    """Replace composite aten operators on meta tensors by the functions `kernels` in the block.

    Args:
        kernels: functions, by the name of the operator.
    """
    # Private: `_scoped_library`, which removes the registrations at the end of the block. The key is AutogradMeta: composite
    # operators decompose there, so a kernel for Meta would never be called.
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name, kernel in kernels.items():
            library.impl(name, kernel, "AutogradMeta")
        yield


item = torch.ops.aten._local_scalar_dense
copied = torch.ops.aten._to_copy
"""Operators of a copy to another device or dtype (`copied`) and of `tensor.item()` (`item`)."""


@contextmanager
def on_numpy(values: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Let `tensor.numpy()` of a meta tensor return the array of `values(tensor)` in the block."""
    numpy = Tensor.numpy

    def made(self: Tensor, *, force: bool = False) -> Any:
        return numpy(values(self) if self.is_meta else self, force=force)

    Tensor.numpy = made  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del Tensor.numpy  # the method is inherited from the C base class again


@contextmanager
def on_compiled(tell: Callable[[], None]) -> Iterator[None]:
    """Call `tell` at each call of a function of torch.compile, and run that function without compilation, in the block."""
    # Private: `_callback_from_stance`, which every compiled function calls before it runs. The public `set_stance` can also run
    # functions without compilation, but does not report the calls. If torch stops calling it, no call is reported.
    callback_of = torch._dynamo.eval_frame._callback_from_stance

    def callback(asked: Any) -> Any:
        if not callable(asked):  # None disables dynamo, and False only runs code that is compiled already
            return callback_of(asked)
        tell()
        return None

    torch._dynamo.eval_frame._callback_from_stance = callback  # type: ignore[assignment]
    try:
        yield
    finally:
        torch._dynamo.eval_frame._callback_from_stance = callback_of


@contextmanager
def on_activation_offload(tell: Callable[[], None]) -> Iterator[None]:
    """Call `tell` before torch's `save_on_cpu` starts to keep activations in host memory, in the block."""
    # Replaces `__init__` rather than the class, so that names imported earlier are covered.
    offload: Any = torch.autograd.graph.save_on_cpu
    made = offload.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        tell()
        made(self, *args, **kwargs)

    offload.__init__ = init
    try:
        yield
    finally:
        offload.__init__ = made


@contextmanager
def on_context_parallel(tell: Callable[[], None]) -> Iterator[None]:
    """Call `tell` when context parallelism takes over attention, in the block."""
    import torch.distributed.tensor.experimental._context_parallel._attention as attention  # imported late: 12 ms

    # Private: the function by which the public `context_parallel` switches the dispatcher. If torch stops calling it, context
    # parallelism is not detected.
    before = attention._enable_context_parallel_dispatcher_impl

    def enable(*args: Any, **kwargs: Any) -> Any:
        tell()
        return before(*args, **kwargs)

    attention._enable_context_parallel_dispatcher_impl = enable
    try:
        yield
    finally:
        attention._enable_context_parallel_dispatcher_impl = before


@contextmanager
def on_autocast(tell: Callable[[], None]) -> Iterator[None]:
    """Call `tell` before an enabled torch.autocast is created or entered, in the block."""
    # Private: `_enabled`. An instance that was created before the block is caught when it is entered.
    init, enter = torch.autocast.__init__, torch.autocast.__enter__

    def made(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None) -> None:
        if enabled:  # before `init`, which warns and disables it if the machine has no such device
            tell()
        init(self, device_type, dtype, enabled, cache_enabled)

    def entered(self: Any) -> Any:
        if self._enabled:
            tell()
        return enter(self)

    torch.autocast.__init__, torch.autocast.__enter__ = made, entered  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__init__, torch.autocast.__enter__ = init, enter  # type: ignore[method-assign]


# --- storages, profiler and CommDebugMode ----------------------------------------------------------------------------


def storage_key(tensor: Tensor) -> int:
    """Return a number that is equal for all tensors over one storage. It is unique as long as the storage lives."""
    # Private: `_cdata`, the address of the storage in C++. `data_ptr()` is 0 on meta and after `resize_(0)`.
    key: int = tensor.untyped_storage()._cdata
    return key


def references(tensor: Tensor) -> tuple[int, int]:
    """Return the numbers of references to a tensor and to its storage."""
    # Private: the C++ reference counts. Autograd adds in place depending on them. `_autograd_only_references` in
    # foresight/trace.py measures the expected counts, so other absolute values do no harm.
    held: Any = tensor
    return held._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def counts_collectives() -> bool:
    """Return True if a CommDebugMode is active on this thread. It counts collectives of torch only."""
    # Private: the stack of dispatch modes. Nothing public lists the active ones.
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return any(isinstance(mode, CommDebugMode) for mode in _get_current_dispatch_mode_stack())


def uncounted() -> AbstractContextManager[object]:
    """Return a context in which no CommDebugMode of this thread counts collectives."""
    from torch.utils._python_dispatch import _disable_current_modes

    # Private: disables all dispatch modes, hence only if one of them counts.
    return _disable_current_modes() if counts_collectives() else nullcontext()


def show_collective(kind: str, rank: int, ranks: int, out: Tensor, given: Tensor) -> None:
    """Run torch's collective of this kind on a process group that sends nothing, so that CommDebugMode counts it.

    The collective may write to `out`.
    """
    group = _mute_group(rank, ranks)
    with torch.no_grad():
        if kind == "all_gather":
            all_gather_base(group, out, given)
        elif kind == "reduce_scatter":
            reduce_scatter_base(group, out, given)
        else:
            all_reduce_sum(group, given)


@cache
def _mute_group(rank: int, ranks: int) -> dist.ProcessGroup:
    """Return a process group of torch's fake backend, whose collectives send nothing."""
    from torch._C._distributed_c10d import FakeProcessGroup, HashStore

    # Private: built by hand, so that torch's table of process groups does not contain it and the default group is not needed.
    group = dist.ProcessGroup(HashStore(), rank, ranks)
    make: Any = getattr(FakeProcessGroup, "_create_internal", FakeProcessGroup)
    custom: Any = dist.ProcessGroup.BackendType.CUSTOM
    group._register_backend(torch.device("cpu"), custom, make(rank, ranks))
    return group


profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled
"""Return True if a profiler runs on this thread. `record_function` costs 8 us even if none runs.

Private: torch.autograd.profiler has no public test with this cost.
"""


# --- collectives, as methods of the process group: half the host time of torch.distributed's functions ---------------


def _method(name: str, before: str) -> str:
    """Return the first of two method names that ProcessGroup has. Subclasses in Python override the newest name only."""
    # Private: the older names. torch renamed the methods; supported versions have one or both of each pair.
    return name if hasattr(dist.ProcessGroup, name) else before


_ALL_GATHER = _method("all_gather_single", "_allgather_base")
_ALL_GATHER_COALESCED = _method("all_gather_single_coalesced", "allgather_into_tensor_coalesced")
_REDUCE_SCATTER = _method("reduce_scatter_single", "_reduce_scatter_base")
_REDUCE_SCATTER_COALESCED = _method("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")

# asyncOp=False: nccl runs its kernel on the current stream, which is one of fullshard's communication streams and has its
# priority. With asyncOp=True, nccl uses a stream of the process group: two more events per collective, and with
# TORCH_NCCL_BLOCKING_WAIT=1 the host waits for each.
# Private: the options objects. The public functions build them at each call.
_GATHER = torch._C._distributed_c10d.AllgatherOptions()
_SUM, _AVERAGE = dist.ReduceScatterOptions(), dist.ReduceScatterOptions()
_SUM_ALL = dist.AllreduceOptions()
_MAX = dist.AllreduceOptions()
_GATHER.asyncOp = _SUM.asyncOp = _AVERAGE.asyncOp = _SUM_ALL.asyncOp = _MAX.asyncOp = False
_SUM.reduceOp = _SUM_ALL.reduceOp = dist.ReduceOp.SUM  # type: ignore[assignment]
_AVERAGE.reduceOp = dist.ReduceOp.AVG  # type: ignore[assignment]
_MAX.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]

Started = dist.Work | None
"""Work of a started collective. Some backends return None if the kernel runs on the current stream."""


# --- devices and streams ---------------------------------------------------------------------------------------------


def has_backend(device: torch.device) -> bool:
    """Return True if the default process group supports tensors of this device."""
    try:
        world = dist.group.WORLD
        return world is not None and bool(backend_name(world, device))
    except RuntimeError:
        return False


def accelerator() -> torch.device | None:
    """Return the accelerator of this machine, without an index; None if the default process group does not support it."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found if found is not None and has_backend(found) else None


def is_over(tensor: Tensor, storage: torch.UntypedStorage) -> bool:
    """Return True if `tensor` is a plain tensor in `storage`. Tensor subclasses may have no storage."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.untyped_storage()._cdata == storage._cdata


def same_memory(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors share a storage; False if `one` is a wrapper subclass, which has no storage."""
    return not isinstance(one, DTensor) and type(one) in (Tensor, nn.Parameter) and same_storage(one, other)


def on_stream(stream: Any, fn: Callable[..., Any], *args: Any) -> None:
    """Call `fn` on `stream`, after the work of the current stream. The current stream then waits for `stream`."""
    current = current_stream(stream.device)
    stream.wait_stream(current)
    try:
        with stream:
            fn(*args)
    finally:  # even if `fn` raises: part of its kernels may be queued, and the caller frees their memory
        current.wait_stream(stream)


def device_of(kind: str) -> torch.device:
    """Return the device of type `kind` that this rank computes on: the current one of an accelerator."""
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())


def current_stream(device: torch.device) -> torch.Stream:
    """Return the current stream of an accelerator."""
    return torch.accelerator.current_stream(device.index)


def then_order(stream: Any, fn: Callable[[], None]) -> None:
    """Call `fn`, then let `stream` wait for the current stream, even if `fn` raises."""
    try:
        fn()
    finally:
        current = current_stream(stream.device)
        if current != stream:
            stream.wait_stream(current)


def is_capturing(device: torch.device) -> bool:
    """Return True if the current stream is being captured into a graph; False for a device type without graphs."""
    capturing = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return capturing is not None and capturing()


def wait_for_event(device: torch.device, event: Any) -> None:
    """Let the current stream of `device` wait for `event`."""
    current_stream(device).wait_event(event)


def axis_of(mesh: DeviceMesh, axis: int) -> DeviceMesh:
    """Return one mesh dim of `mesh` as a mesh. The dims of `mesh` may have no names."""
    if mesh.mesh_dim_names is not None:
        return mesh[mesh.mesh_dim_names[axis]]
    return DeviceMesh.from_group(mesh.get_group(axis), mesh.device_type)


def same_storage(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors share a storage."""
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


# --- calls of collectives --------------------------------------------------------------------------------------------


def is_done(work: dist.Work) -> bool:
    """Return True if a collective has completed."""
    # Not every backend updates `is_completed`. The future of the work, if the backend has futures, is up to date.
    if work.is_completed():
        return True
    try:
        return work.get_future().done()
    except (RuntimeError, NotImplementedError):
        return False


def _real(tensor: Tensor) -> Tensor:
    """Return the 1-D real view of a complex tensor, since backends reduce no complex numbers; other tensors unchanged."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


def all_gather_base(group: dist.ProcessGroup, out: Tensor, shard: Tensor) -> Started:
    return getattr(group, _ALL_GATHER)(out, shard, _GATHER)


def all_gather_coalesced(group: dist.ProcessGroup, outs: Sequence[Tensor], shards: Sequence[Tensor]) -> Started:
    return getattr(group, _ALL_GATHER_COALESCED)(outs, shards, _GATHER)


def reduce_scatter_base(group: dist.ProcessGroup, out: Tensor, full: Tensor, *, average: bool = False) -> Started:
    if out.is_complex():
        out, full = _real(out), _real(full)
    return getattr(group, _REDUCE_SCATTER)(out, full, _AVERAGE if average else _SUM)


def reduce_scatter_coalesced(
    group: dist.ProcessGroup, outs: Sequence[Tensor], fulls: Sequence[Tensor], *, average: bool = False
) -> Started:
    how = _AVERAGE if average else _SUM
    return getattr(group, _REDUCE_SCATTER_COALESCED)([_real(out) for out in outs], [_real(full) for full in fulls], how)


def all_reduce_sum(group: dist.ProcessGroup, tensor: Tensor) -> Started:
    return group.allreduce([_real(tensor)], _SUM_ALL)


def all_reduce_max(group: dist.ProcessGroup, tensor: Tensor) -> Started:
    return group.allreduce([tensor], _MAX)


# --- backends --------------------------------------------------------------------------------------------------------


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the name of the backend for tensors of `device` in `group`. A group may have one backend per device type."""
    # Private: `_get_backend`. `dist.get_backend` takes no device.
    try:
        return group._get_backend(device).name()
    except RuntimeError:
        if type(group) is dist.ProcessGroup:
            raise
        return dist.get_backend(group)  # a subclass in Python that has no backends and runs all collectives itself


def is_nccl(name: str) -> bool:
    """Return True for every implementation of nccl.

    torch 2.15 has several: "nccl", "nccl2", "nccl-legacy", "nccl-lazy", and one written in Python.

    >>> [is_nccl(name) for name in ("nccl", "nccl-legacy", "gloo")]
    [True, True, False]
    """
    return name.startswith("nccl")


THREADED = "threaded"
"""Name of the backend of torch's tests in which ranks are threads of one process."""


def threads_are_ranks() -> bool:
    """Return True if each thread is a rank with its own process groups."""
    # Private: torch's tests replace `_world` by an object whose own `_world` is thread-local. If that changes, threads share
    # caches by process, and ranks of such tests use the meshes of other ranks.
    return isinstance(getattr(dist.distributed_c10d._world, "_world", None), threading.local)


class PerRank(MutableMapping[K, V]):
    """Dict of this rank: one for the process, or one for each thread if threads are ranks (`THREADED`).

    Not for hot paths: each access takes a microsecond.
    """

    def __init__(self) -> None:
        self._of_process: dict[K, V] = {}
        self._of_thread = threading.local()

    def _mine(self) -> dict[K, V]:
        if not threads_are_ranks():
            return self._of_process
        return self._of_thread.__dict__.setdefault("known", {})

    def __getitem__(self, key: K) -> V:
        return self._mine()[key]

    def __setitem__(self, key: K, value: V) -> None:
        self._mine()[key] = value

    def __delitem__(self, key: K) -> None:
        del self._mine()[key]

    def __iter__(self) -> Iterator[K]:
        return iter(self._mine())

    def __len__(self) -> int:
        return len(self._mine())


# --- stores, exceptions and signals ----------------------------------------------------------------------------------


def default_store() -> Any:
    """Return the store of the default process group; None if that is not initialized."""
    if not dist.is_initialized():
        return None
    # Private: torch has no public access to this store.
    return dist.distributed_c10d._get_default_store()


def own_store(store: Any, prefix: str) -> Any:
    """Return `store` under a prefix, over a new connection if the store has connections.

    Requests on the new connection time out after 5 seconds.
    """
    # A connection serves one request at a time. On torch's own, a blocking request would delay the watchdog.
    try:
        clone = store.clone()
        clone.set_timeout(timedelta(seconds=5))
        return dist.distributed_c10d.PrefixStore(prefix, clone)
    except (RuntimeError, NotImplementedError):
        return dist.distributed_c10d.PrefixStore(prefix, store)


StoreError: type[Exception] = dist.DistStoreError
"""Error of a request to a store that timed out."""

NetworkError: type[Exception] = dist.DistNetworkError
"""Error of a request to a store whose server is gone."""


def relax_capture_mode() -> None:
    """Let the current thread query events while another thread captures a CUDA graph. Without CUDA this does nothing.

    A capture forbids such queries to all threads of the process by default, and a query would end the capture with an error.
    """
    # Private: `torch._C`, whose library is linked with the CUDA runtime that torch uses. Without the symbol, the mode stays.
    name = "hipThreadExchangeStreamCaptureMode" if torch.version.hip else "cudaThreadExchangeStreamCaptureMode"
    if torch.version.cuda or torch.version.hip:
        exchange = getattr(ctypes.CDLL(torch._C.__file__), name, None)
        if exchange is not None:
            exchange(ctypes.byref(ctypes.c_int(2)))  # cudaStreamCaptureModeRelaxed


def abort_group(group: dist.ProcessGroup, device: torch.device) -> None:
    """Abort the collectives of a process group on `device`. Waits for them return, and later collectives raise."""
    # Private: `_get_backend`. The group's own `abort` is the fallback, because it aborts its backends of other devices as well.
    abort = getattr(group._get_backend(device), "abort", group.abort)
    abort()


def has_extended_api(store: Any) -> bool:
    """Return True if the store can read or set several keys in one request."""
    return bool(store.has_extended_api())


def store_host(store: Any) -> str | None:
    """Return the host that serves a store; None for a store without a server (a file, memory)."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", None)


def exception_on(thread: int) -> BaseException | None:
    """Return the exception that a thread (by its ident) is handling; None if there is none."""
    # Private, of Python: `_current_exceptions`. Before Python 3.12 its values are (class, exception, traceback).
    found: Any = sys._current_exceptions().get(thread)
    return found[1] if isinstance(found, tuple) else found


def ends_by_collective() -> bool:
    """Return True if the exception that ends the program was raised by a collective of torch.distributed.

    Returns False in an interactive interpreter, which keeps the last exception although the program continues.
    """
    # A failed collective raises a plain RuntimeError, so its origin shows only in the module of the innermost frame. If torch
    # moves its functions out of torch.distributed, this returns False.
    if hasattr(sys, "ps1"):
        return False
    failure: Any = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if not isinstance(failure, RuntimeError) or failure.__traceback__ is None:
        return False
    *_, (frame, _) = traceback.walk_tb(failure.__traceback__)
    return bool(frame.f_globals.get("__name__", "").startswith("torch.distributed."))


def global_rank() -> int:
    return dist.get_rank()


def world_size() -> int:
    return dist.get_world_size()


def is_handled(number: int) -> bool:
    """Return True if the process has a handler for a signal, including handlers set outside Python (faulthandler)."""
    import ctypes

    class Action(ctypes.Structure):  # POSIX systems: the handler is first; `rest` is space for the other fields
        _fields_ = (("handler", ctypes.c_void_p), ("rest", ctypes.c_byte * 512))

    action = Action()
    try:
        ctypes.CDLL(None).sigaction(int(number), None, ctypes.byref(action))
    except (AttributeError, OSError, TypeError):
        return True  # unknown: do not replace a handler that may exist
    return bool(action.handler)


# --- new process groups ----------------------------------------------------------------------------------------------


def new_group(name: str, ranks: Sequence[int]) -> dist.ProcessGroup:
    """Create a process group of `ranks`, called on these ranks only, which all derive the same name.

    torch's name for such a group contains the number of process groups of the rank, which may differ between ranks. The ranks
    then wait for each other forever. They also wait forever if nccl splits the group from the default group
    (`init_process_group(device_id=...)`), because a split needs all ranks of the default group.
    """
    with _named(hashlib.sha1(name.encode(), usedforsecurity=False).hexdigest()):
        return dist.new_group(list(ranks), use_local_synchronization=True)


class _Naming:
    """Replacements of two functions of torch while threads create process groups under our names.

    Several threads can create groups at the same time: each waits for other ranks, so a lock held meanwhile could deadlock.
    Other threads of the program get torch's answers. The groups are created from scratch, not split from the default group.

    Attributes:
        lock: protects `threads` and the replacement.
        threads: number of threads that are creating a group.
        of_thread: `of_thread.name` is the name of the group that this thread creates, or None.
        given: torch's `_process_group_name`.
        given_source: torch's `_get_split_source`.
    """

    def __init__(self) -> None:
        self.lock, self.threads = threading.Lock(), 0
        self.of_thread = threading.local()
        self.given: Callable[..., Any] = dist.distributed_c10d._process_group_name
        self.given_source: Callable[..., Any] = dist.distributed_c10d._get_split_source

    def name(self, ranks: Any, use_hashed_name: bool) -> Any:
        """Return the name for a new group: ours on a thread that creates one, else torch's."""
        chosen = getattr(self.of_thread, "name", None)
        return self.given(ranks, use_hashed_name) if chosen is None else dist.distributed_c10d.GroupName(chosen)

    def split_source(self, group: Any, *more: Any) -> Any:
        """Return None (no split) on a thread that creates one of our groups, else torch's answer.

        Args:
            group: the group to split.
            more: from torch 2.15 on, the requested backend.
        """
        return self.given_source(group, *more) if getattr(self.of_thread, "name", None) is None else None


_NAMING = _Naming()


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Give `name` to the process group that this thread creates in the block."""
    # Private: `_process_group_name` and `_get_split_source`, which `new_group` looks up in its module. `dist.new_group` accepts
    # no name. If torch stops calling them, the ranks wait for each other as described in `new_group`.
    c10d, naming = dist.distributed_c10d, _NAMING
    with naming.lock:
        naming.threads += 1
        if naming.threads == 1:  # the first thread replaces, and the last one restores
            naming.given, c10d._process_group_name = c10d._process_group_name, naming.name  # type: ignore[assignment]
            naming.given_source, c10d._get_split_source = c10d._get_split_source, naming.split_source  # type: ignore[assignment]
    naming.of_thread.name = name
    try:
        yield
    finally:
        naming.of_thread.name = None
        with naming.lock:
            naming.threads -= 1
            if not naming.threads:
                c10d._process_group_name = naming.given  # type: ignore[assignment]
                c10d._get_split_source = naming.given_source


def group_name(group: dist.ProcessGroup) -> str:
    """Return the name of a process group, which is equal on all its ranks."""
    return group.group_name


# --- memory for collectives ------------------------------------------------------------------------------------------


def process_group_memory(group: dist.ProcessGroup, device: torch.device) -> Callable[..., Tensor]:
    """Return the allocator of the backend of `group` for message memory (collective). Raise ValueError if it has none.

    nccl has none on a device without multicast. Then warn and return the allocator of ordinary memory.
    """
    # Private: `_get_backend`, since only backends, not process groups, have `supports_tensor_alloc` and `allocate_tensor`.
    name = backend_name(group, device)
    backend = group._get_backend(device) if name != THREADED else None
    supports = getattr(backend, "supports_tensor_alloc", None)
    if backend is None or supports is None or not (is_nccl(name) or supports(device)):
        raise ValueError(
            f"This setting is not available: the {name} backend allocates no memory for messages. Use nccl, or leave this "
            "setting off."
        )
    if not supports(device):
        warn_once(f"nccl allocates no memory for messages on {device}, which lacks multicast. Ordinary memory is used.")
        return torch.empty
    dist.barrier(group)  # the communicator must exist before its memory does

    def allocate(size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return backend.allocate_tensor(prod(size), dtype=dtype, device=device)

    return allocate


def symmetric_memory(group: dist.ProcessGroup, device: torch.device, backend: str) -> Callable[..., Tensor]:
    """Return the allocator of symmetric memory of `backend` for `group`. Raise ValueError if the device is not CUDA."""
    if device.type != "cuda":
        raise ValueError(
            f"This setting is not available: symmetric memory needs CUDA devices, the mesh computes on {device.type}. Leave "
            "this setting off."
        )
    # Private: the module of symmetric memory as a whole. torch marks it as experimental.
    import torch.distributed._symmetric_memory as symmetric

    symmetric.set_backend(backend)  # type: ignore[arg-type]
    dist.barrier(group)  # the communicator must exist before memory is exchanged
    pool = symmetric.get_mem_pool(device)

    def allocate(size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        with torch.cuda.use_mem_pool(pool):
            tensor = torch.empty(tuple(size), dtype=dtype, device=device)
        if tensor.numel():
            symmetric.rendezvous(tensor, group)
        return tensor

    return allocate


# --- point-to-point messages -----------------------------------------------------------------------------------------


def exchange(
    works: list[dist.Work],
    group: dist.ProcessGroup,
    receives: Sequence[tuple[Tensor, int]],
    sends: Sequence[tuple[Tensor, int]],
    tag: int,
) -> None:
    """Start point-to-point messages and append their works to `works`.

    Args:
        works: list that gets one work for each message, receives first.
        group: the process group.
        receives: (tensor, rank of the sender in the group).
        sends: (tensor, rank of the receiver in the group).
        tag: tag of all these messages.
    """
    # `extend` of two `map`s is one call into C, where Python raises no KeyboardInterrupt. After Ctrl-C, either all messages are
    # started and in `works`, or none is. A loop could lose the work of a message whose buffer gloo still writes to.
    receiving = map(group.recv, [[tensor] for tensor, _ in receives], [peer for _, peer in receives], repeat(tag))
    sending = map(group.send, [[tensor] for tensor, _ in sends], [peer for _, peer in sends], repeat(tag))
    works.extend(chain(receiving, sending))


# --- scaling and copies ----------------------------------------------------------------------------------------------


def scale(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply tensors by `factor`, in place. For a single tensor, the plain operator takes half as long."""
    if len(tensors) == 1:
        tensors[0].mul_(factor)
    else:
        torch._foreach_mul_(list(tensors), factor)


def split_copy(packed: Tensor, sizes: list[int], outs: list[Tensor]) -> None:
    """Copy the column blocks of `packed` (ranks, sum of sizes) to `outs`, each (ranks, size), in one call."""
    torch.split_with_sizes_copy(packed, sizes, 1, out=outs)


def chunk_cat(tensors: list[Tensor], out: Tensor) -> None:
    """Copy chunk r of each tensor to `out[r]`, cast and padded with zeros. Chunks are along dim 0, `len(out)` per tensor."""
    # Private: `_chunk_cat`, the fused copy-in of FSDP2's reduce-scatter: padding, copy and cast in one kernel.
    torch._chunk_cat(tensors, 0, out.shape[0], out=out)
