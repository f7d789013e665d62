"""Tensor subclasses that say themselves what is gathered of them: `fsdp_pre_all_gather` and `fsdp_post_all_gather`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from fullshard import _torch
from fullshard.collectives.base import Collectives
from fullshard.errors import StateError
from fullshard.params.sharded_param import ShardedParameter
from fullshard.params.unsharded import Gather, Storage, over
from fullshard.policies import Dtypes
from fullshard.sharding.param_sharding import ParamSharding

_BEFORE, _AFTER = "fsdp_pre_all_gather", "fsdp_post_all_gather"
_RELEASE = "fsdp_should_release_all_gather_outputs_after_post_all_gather"


def extends(tensor: Tensor) -> bool:
    """Whether a shard is of a subclass that takes part in its gathers."""
    return hasattr(tensor, _BEFORE) and hasattr(tensor, _AFTER)


def is_plain(tensor: Tensor) -> bool:
    """Whether it is an ordinary strided tensor."""
    return type(tensor) is Tensor and tensor.layout == torch.strided


def half_extends(tensor: Tensor) -> str | None:
    """The missing half of the protocol, None if both are there or none is."""
    found = [name for name in (_BEFORE, _AFTER) if hasattr(tensor, name)]
    return None if len(found) != 1 else ({_BEFORE, _AFTER} - set(found)).pop()


def travels_alone(tensor: Tensor) -> bool:
    """Whether a shard is not to lie in a flat one: it takes part in its gathers, or must before the first of them."""
    return extends(tensor) or not is_plain(tensor)


def check_extension(parameter: ShardedParameter) -> None:
    """Raises StateError, naming it, if a parameter can be gathered neither as it is nor by itself."""
    shard, unit = parameter.local, parameter.unit_name.name
    missing = half_extends(shard)
    if missing is not None:
        raise StateError(
            f"the shard of parameter '{parameter.name}' of unit '{unit}' has one half of the all-gather protocol: it needs "
            f"{missing} as well"
        )
    if not travels_alone(shard):
        return
    if not extends(shard):
        raise StateError(
            f"parameter '{parameter.name}' of unit '{unit}' cannot be gathered: it is a {type(shard).__name__}, which does not "
            f"say how. Define {_BEFORE} and {_AFTER}, on the class or on parameter._local_tensor, before the first forward, or "
            "make it a plain torch.Tensor, after fullshard.undo()"
        )
    if parameter.sharding.dim != 0:
        raise StateError(
            f"parameter '{parameter.name}' of unit '{unit}' gathers itself ({_BEFORE}), by rows: it cannot be cut along dim "
            f"{parameter.sharding.dim}"
        )


def own_shard(value: Tensor, sharding: ParamSharding) -> Tensor:
    """A shard in memory of its own, that does not keep the full tensor alive.

    It is made by `new_zeros` and `copy_`, which every subclass that shards implements: `clone` of some quantizes anew, which
    changes the values. A plain tensor stays the object that it is, to which the caller gave methods.
    """
    if is_plain(value):
        return value.set_(value.clone())  # type: ignore[call-overload]
    shard = value.new_zeros(sharding.shard_shape)
    if value.numel():
        shard.copy_(value)
    _take_attributes(value, shard)
    return shard


def _take_attributes(source: Tensor, target: Tensor) -> None:
    """Give `target` the attributes that `source` keeps beside its data: a precomputed scale, say, or methods of its own."""
    for key, kept in vars(source).items():
        if vars(target).get(key) is None:
            bound = isinstance(kept, MethodType) and kept.__self__ is source
            setattr(target, key, MethodType(kept.__func__, target) if bound else kept)


def _asks_for_release(parameter: ShardedParameter) -> bool:
    """Return True if the full parameter does not lie in the all-gather outputs, which are to be freed behind it.

    Raises StateError, naming the parameter, for an answer that is neither True nor False.
    """
    ask: Callable[[], Any] | None = getattr(parameter.local, _RELEASE, None)
    if ask is None:
        return False
    answer = ask()
    if not isinstance(answer, bool):
        raise StateError(
            f"{_RELEASE} of parameter '{parameter.name}' of unit '{parameter.unit_name.name}': expected True or False, got "
            f"{answer!r}"
        )
    return answer


@dataclass(frozen=True, slots=True)
class _Inputs:
    """The tensors that are gathered of a shard, and what fsdp_pre_all_gather said beside them."""

    tensors: list[Tensor]
    metadata: Any


class ExtensionBuffer:
    """The unsharded buffer of one parameter of a subclass.

        shard --fsdp_pre_all_gather--> tensors --all-gather of each, as bytes--> outputs --fsdp_post_all_gather--> full

    The outputs, and the inner tensors that the first `fsdp_post_all_gather` names, have memory between `allocate` and
    `free`. A shard with fewer rows than others is padded before it is asked.
    """

    def __init__(self, parameter: ShardedParameter, collectives: Collectives, dtypes: Dtypes, storage: Storage) -> None:
        self._parameter, self._collectives, self._storage = parameter, collectives, storage
        self._dtypes, self._dtype = dtypes, dtypes.compute
        self._releases_outs = _asks_for_release(parameter)
        self.versions: list[int] = []
        self.keep = False  # whether memory stays where it is when it is freed
        self._full: Tensor | None = None  # made by the first fsdp_post_all_gather, padding rows included
        self._padded: Tensor | None = None
        self._inputs: _Inputs | None = None  # gathered, and not yet handed to fsdp_post_all_gather
        self._outs: list[Tensor] = []
        self._inner: list[tuple[Tensor, int]] = []  # named by fsdp_post_all_gather, and their bytes

    def allocate(self, versions: list[int]) -> Gather:
        """Ask the shard what is gathered of it. Memory for that, on the compute lane, and what gathers it."""
        self.versions = versions
        shard = self._rows()
        if shard.device != self._storage.device:  # offloaded
            home, shard = shard, shard.to(self._storage.device, non_blocking=True)
            _take_attributes(home, shard)
        tensors, metadata = self._ask(shard)
        self._inputs = _Inputs([tensor.contiguous() for tensor in tensors], metadata)
        ranks, tensors = self._collectives.ranks, self._inputs.tensors
        if not self._outs:
            self._outs = [torch.empty(ranks * t.numel(), dtype=t.dtype, device=t.device) for t in tensors]
        if [out.numel() for out in self._outs] != [ranks * t.numel() for t in tensors]:
            shapes = [tuple(t.shape) for t in tensors]
            raise StateError(
                f"{_BEFORE} of parameter '{self._parameter.name}' gave tensors of shapes {shapes}, other than the first time: "
                "the sizes of what is gathered must not change"
            )
        for tensor, nbytes in (*((out, out.numel() * out.itemsize) for out in self._outs), *self._inner):
            storage = tensor.untyped_storage()
            if storage.nbytes() != nbytes:  # on the CPU, memory moves whenever it is resized
                storage.resize_(nbytes)
        # as_strided: of one element, `view(-1)` may keep a stride that `view(dtype)` refuses.
        flat = [tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8) for tensor in tensors]
        # No views of the outputs: the gather of one rank is a copy, which would move the version of the full tensor, too.
        return Gather(self._collectives.gatherer([over(out.view(torch.uint8), 0, (out.nbytes,)) for out in self._outs], flat))

    def release_staging(self) -> None:
        """The compute lane is ordered behind the gather: hand the outputs to fsdp_post_all_gather."""
        inputs, self._inputs = self._inputs, None
        if inputs is None:
            return
        outputs = tuple(out.view(-1, *given.shape[1:]) for out, given in zip(self._outs, inputs.tensors))
        after: Callable[..., Any] = getattr(self._parameter.local, _AFTER)
        rows = self._parameter.sharding.local_shape[0]
        with torch.no_grad():
            if self._full is None:
                self._full, inner = after(outputs, inputs.metadata, self._dtype)
                outs = {out.untyped_storage().data_ptr() for out in self._outs}
                self._inner = [(t, t.untyped_storage().size()) for t in inner if t.untyped_storage().data_ptr() not in outs]
                even = self._full.shape[0] == rows
                view = self._full if even else self._full.narrow(0, 0, rows)
                self._parameter.make_unsharded(view, any_grad_dtype=self._dtypes.casts_gradients)
            else:
                even = self._full.shape[0] == rows
                after(outputs, inputs.metadata, self._dtype, out=self._parameter.full if even else self._full)
        if self._releases_outs and not self.keep:
            for out in self._outs:
                out.untyped_storage().resize_(0)

    def free(self) -> None:
        """Give the memory back, unless it is kept."""
        if self.keep:
            return
        for tensor in (*self._outs, *(inner for inner, _ in self._inner)):
            tensor.untyped_storage().resize_(0)

    def owns(self, tensor: Tensor) -> bool:
        """Whether `tensor` lies in this memory."""
        return any(out.numel() and _torch.same_memory(tensor, out) for out in (*self._outs, *(i for i, _ in self._inner)))

    def _rows(self) -> Tensor:
        """This rank's shard, padded to as many rows as others have."""
        local, extent = self._parameter.local, self._parameter.sharding.extent
        if not extent.padding:
            return local
        with torch.no_grad():
            if self._padded is None:
                self._padded = local.new_zeros((extent.chunk, *local.shape[1:]))
            if extent.rows:
                self._padded.narrow(0, 0, extent.rows).copy_(local)
        _take_attributes(local, self._padded)
        return self._padded

    def _ask(self, shard: Tensor) -> tuple[Sequence[Tensor], Any]:
        """The tensors that are gathered of `shard`, and what fsdp_post_all_gather needs beside them."""
        before: Callable[..., Any] = getattr(shard, _BEFORE)
        sharding = self._parameter.sharding
        axis = sharding.axis
        mesh = axis.mesh if axis.replicas is None else _torch.axis_of(axis.mesh, axis.mesh.ndim - 1)
        arguments = len(inspect.signature(before).parameters)
        with torch.no_grad():
            if arguments == 1:
                return before(mesh)
            if arguments == 5:
                strides = _torch.contiguous_strides(sharding.local_shape)
                policy = self._storage.mp
                if self._parameter.keeps_dtype:  # as the parameter sees it
                    policy = replace(policy, param_dtype=self._dtype)
                return before(mesh, sharding.local_shape, strides, self._parameter.module, policy)
        raise StateError(
            f"{_BEFORE} of parameter '{self._parameter.name}' takes {arguments} arguments: expected (mesh) or "
            "(mesh, outer_size, outer_stride, module, mp_policy)"
        )


__all__ = ["ExtensionBuffer", "check_extension", "extends", "half_extends", "is_plain", "own_shard", "travels_alone"]
