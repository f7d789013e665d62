"""Tensor subclasses with their own all-gather hooks: `fsdp_pre_all_gather` and `fsdp_post_all_gather`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fullshard import _torch
from fullshard.comm.base import Collectives
from fullshard.core import (
    AllGather,
    ParamGroup,
    ParamSharding,
    ShardAxis,
    ShardedParameter,
    Storage,
    UnshardedBuffer,
    exact_copy,
    inner_tensors,
    is_plain,
    register_group,
    take_attributes,
    tensor_on_storage,
)
from fullshard.errors import StateError
from fullshard.policies import Dtypes

_PRE, _POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"
_RELEASE = "fsdp_should_release_all_gather_outputs_after_post_all_gather"
_BY_ROWS = (
    "Parameter {} cannot be sharded along dim {}: it is a tensor subclass, or has all-gather hooks, and is all-gathered by "
    "rows. Shard it along dim 0."
)


class ExtensionBuffer(UnshardedBuffer):
    """The unsharded buffer of one parameter with its own all-gather hooks.

        shard --fsdp_pre_all_gather--> inputs --all-gather of each, as bytes--> outputs --fsdp_post_all_gather--> unsharded

    The outputs, and the inner tensors that the first `fsdp_post_all_gather` returns, have memory between `allocate` and `free`.
    A shard with fewer rows than others is padded before the hook is called, so that all ranks send the same sizes.
    """

    def __init__(self, parameter: ShardedParameter, collectives: Collectives, dtypes: Dtypes, storage: Storage) -> None:
        super().__init__()
        self._parameter, self._collectives, self._storage = parameter, collectives, storage
        self._dtypes, self._dtype = dtypes, dtypes.compute
        # Whether the subclass wants its outputs freed after fsdp_post_all_gather, which copied them; False without that hook.
        self._releases_outs = getattr(parameter.local, _RELEASE, bool)()
        if not isinstance(self._releases_outs, bool):
            raise StateError(
                f"Expected True or False from {_RELEASE} of parameter '{parameter.name}' of unit "
                f"'{parameter.unit_name.name}', got {self._releases_outs!r}. Return a bool."
            )
        # The unsharded tensor from the first fsdp_post_all_gather, including padding rows. Later calls write to it (`out=`).
        self._unsharded: Tensor | None = None
        # Inputs (contiguous) and metadata of the all-gather in flight, until fsdp_post_all_gather gets them.
        self._inputs: tuple[list[Tensor], Any] | None = None
        # All-gather outputs, (ranks * numel,) each. The objects stay, since the unsharded tensor may use their storage.
        # `_storages` are theirs, and those of inner tensors from fsdp_post_all_gather with separate memory.
        self._outs: list[Tensor] = []

    def allocate(self, version: int) -> AllGather:
        """Call fsdp_pre_all_gather, allocate the outputs on the compute stream, and return their all-gather."""
        self.version = version
        shard = self._padded_shard()
        if shard.device != self._storage.device:  # CPU offload
            home, shard = shard, shard.to(self._storage.device, non_blocking=True)
            take_attributes(home, shard)
        given, metadata = self._pre_all_gather(shard)
        ranks, tensors = self._collectives.ranks, [tensor.contiguous() for tensor in given]
        self._inputs = tensors, metadata
        if not self._outs:
            self._outs = [torch.empty(ranks * t.numel(), dtype=t.dtype, device=t.device) for t in tensors]
            self._storages = [self._sized(out) for out in self._outs]
        if [out.numel() for out in self._outs] != [ranks * t.numel() for t in tensors]:
            shapes = [tuple(t.shape) for t in tensors]
            raise StateError(
                f"Expected the sizes of the first call from {_PRE} of parameter '{self._parameter.name}', got tensors of "
                f"shapes {shapes}. Return tensors of the same sizes in every call."
            )
        for storage, nbytes in self._storages:
            if storage.nbytes() != nbytes:  # on the CPU, resize_ moves the memory even if the size is equal
                storage.resize_(nbytes)
        # as_strided, because `view(-1)` of one element may keep a stride that `view(dtype)` rejects.
        flat = [tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8) for tensor in tensors]
        # Not views of the outputs: with one rank the all-gather is a copy, which would increase the version counter that a view
        # shares with the unsharded tensor.
        return AllGather(
            self._collectives.gatherer([tensor_on_storage(out.view(torch.uint8), 0, (out.nbytes,)) for out in self._outs], flat)
        )

    def release_staging(self) -> None:
        """Call fsdp_post_all_gather with the outputs. Call this after the compute stream waited for the all-gather."""
        # On the compute stream, as in FSDP2: tensors that the hook allocates then belong to that stream.
        inputs, self._inputs = self._inputs, None
        if inputs is None:
            return
        tensors, metadata = inputs
        outputs = tuple(out.view(-1, *given.shape[1:]) for out, given in zip(self._outs, tensors))
        after: Callable[..., Any] = getattr(self._parameter.local, _POST)
        rows = self._parameter.sharding.local_shape[0]
        with torch.no_grad():
            if self._unsharded is None:
                self._unsharded, inner = after(outputs, metadata, self._dtype)
                outs = {storage.data_ptr() for storage, _ in self._storages}
                self._storages += [self._sized(t) for t in inner if t.untyped_storage().data_ptr() not in outs]
                even = self._unsharded.shape[0] == rows
                view = self._unsharded if even else self._unsharded.narrow(0, 0, rows)
                self._parameter.make_unsharded(view, any_grad_dtype=self._dtypes.casts_gradients)
                self._parameter.group().note_unsharded()
            else:
                unsharded: Any = self._parameter.unsharded
                even = self._unsharded.shape[0] == rows
                after(outputs, metadata, self._dtype, out=unsharded if even else self._unsharded)
                if not even and type(self._unsharded) is not Tensor:  # the hook may have set a new scale, for example
                    _become(_torch.local_part(unsharded), self._unsharded.narrow(0, 0, rows))
        if self._releases_outs and not self.keep:
            for storage, _ in self._storages[: len(self._outs)]:
                storage.resize_(0)

    @property
    def memory(self) -> int:
        """Bytes of the outputs and the inner tensors that are allocated."""
        return self.allocated

    def _padded_shard(self) -> Tensor:
        """Return this rank's shard with as many rows as the other ranks have."""
        local, extent = self._parameter.local, self._parameter.sharding.extent
        if not extent.padding:
            return local
        with torch.no_grad():
            padded = local.new_zeros((extent.chunk, *local.shape[1:]))
            if extent.rows:
                padded.narrow(0, 0, extent.rows).copy_(local)
        take_attributes(local, padded)
        return padded

    def _pre_all_gather(self, shard: Tensor) -> tuple[Sequence[Tensor], Any]:
        """Call fsdp_pre_all_gather of `shard` in the signature that it has, and return its result."""
        before: Callable[..., Any] = getattr(shard, _PRE)
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
                if self._parameter.keeps_dtype:  # the policy of this parameter
                    policy = replace(policy, param_dtype=self._dtype)
                return before(mesh, sharding.local_shape, strides, self._parameter.slots[0].module, policy)
        raise StateError(
            f"Expected {_PRE}(mesh) or {_PRE}(mesh, outer_size, outer_stride, module, mp_policy) on parameter "
            f"'{self._parameter.name}', got {arguments} arguments. Change its signature."
        )


class ExtensionGroup(ParamGroup):
    """Group of one parameter that cannot be part of a flat shard, as a tensor subclass with its own all-gather hooks.

    Every all-gather runs over the whole shard axis; a smaller group by `reshard_after_forward=k` is not used.
    """

    flat = is_exact = False
    _copy: Tensor | None  # of a plain shard, from `copy_shards` to `bind_parameters`

    @classmethod
    def takes(cls, shard: Tensor, axis: ShardAxis, marks: Mapping[str, Any]) -> bool:
        """Return True if a shard cannot be part of a flat shard: it has all-gather hooks, or is not a plain tensor.

        A subclass without hooks counts, because the user may add them before the first all-gather.
        """
        return hasattr(shard, _PRE) or hasattr(shard, _POST) or not is_plain(shard)

    @classmethod
    def check_sharding(cls, name: str, tensor: Tensor, sharding: ParamSharding) -> None:
        """Raise ValueError if the tensor cannot be cut into shards by rows, or has one of the two hooks only."""
        kind = type(tensor).__name__
        missing = _missing_hooks(tensor)
        if len(missing) == 1:
            raise ValueError(
                f"Parameter '{name}' cannot be sharded: its class {kind} defines one half of the all-gather protocol. Define "
                f"{missing[0]} as well."
            )
        if sharding.dim != 0:
            raise ValueError(_BY_ROWS.format(f"'{name}'", sharding.dim))
        if is_plain(tensor):
            return
        try:
            with torch.no_grad():
                shard = exact_copy(sharding.slice(tensor.detach()))
        except Exception as failure:
            raise ValueError(f"Parameter '{name}' cannot be sharded: slicing a {kind} raised {failure}") from failure
        if type(shard) is not type(tensor):
            raise ValueError(f"Parameter '{name}' cannot be sharded: a slice of a {kind} is a {type(shard).__name__}.")

    @classmethod
    def check_gather(cls, parameter: ShardedParameter) -> None:
        """Raise StateError if a parameter cannot be all-gathered with its hooks."""
        shard, unit = parameter.local, parameter.unit_name.name
        if parameter.sharding.axis.hybrid is not None:
            raise StateError(
                f"Expected the tensor subclass of parameter '{parameter.name}' of unit '{unit}' before fully_shard(), got it "
                "afterwards: with states=HFSDP a parameter that is all-gathered by hooks of its own is sharded over the shard "
                "dim only. Convert it first, then call fully_shard()."
            )
        if _missing_hooks(shard):
            raise StateError(
                f"Parameter '{parameter.name}' of unit '{unit}' cannot be all-gathered: it is a {type(shard).__name__} without "
                f"all-gather hooks. Define {_PRE} and {_POST}, on the class or on parameter._local_tensor, before the first "
                "forward, or make it a plain torch.Tensor, after fullshard.undo()."
            )
        if parameter.sharding.dim != 0:
            raise StateError(_BY_ROWS.format(f"'{parameter.name}' of unit '{unit}'", parameter.sharding.dim))

    def version(self) -> int:
        """Return a number that increases with every write to the shard, or to a tensor inside of it."""
        return super().version() + _version_of_memory(self.parameters[0].local)

    def copy_shards(self, values: Sequence[Tensor], unwritten: Container[int]) -> tuple[Tensor, list[Tensor]]:
        """Copy the shard, so that it does not keep the unsharded tensor alive, without a flat shard."""
        shard = values[0]
        # A plain one stays the same object, since the caller may have set hooks on it, and gets the memory of its copy once the
        # group is bound: the flat shard that it may be part of stays in use if another group cannot be built.
        self._copy = shard.clone() if is_plain(shard) else None
        return torch.zeros(0, dtype=self.dtypes.storage, device=shard.device), [
            shard if self._copy is not None else exact_copy(shard)
        ]

    def bind_parameters(self) -> None:
        """Move the shard to the memory of its copy, which allocates nothing and cannot raise, and make it the parameter's."""
        if self._copy is not None:
            with torch.inference_mode(False), torch.no_grad():
                self._unbound[0].set_(self._copy)  # type: ignore[call-overload]
            self._copy = None
        super().bind_parameters()

    def replace_values(self, parameter: ShardedParameter, rows: Tensor) -> None:
        """Replace the shard, with its attributes: a precomputed scale is one of the old values."""
        shard = parameter.local
        if is_plain(shard):
            super().replace_values(parameter, rows)
            return
        with torch.inference_mode(False), torch.no_grad():
            if type(rows) is type(shard):
                fresh = exact_copy(rows)
            else:
                fresh = shard.new_zeros(shard.shape)
                fresh.copy_(rows)
        take_attributes(shard, fresh, values=False)
        before = self.version()
        parameter.bind_to_flat_shard(fresh)
        self.writes += before + 1 - self.version()  # the new tensor has a version counter of its own

    def make_unsharded(self) -> ExtensionBuffer:
        """Create the unsharded buffer. Its first all-gather makes the unsharded parameter."""
        return ExtensionBuffer(self.parameters[0], self.collectives.gather, self.dtypes, self.storage)

    def all_gather_copy(self, communicator: Any, action: str) -> list[Tensor]:
        """Raise StateError: the subclass has one output buffer, so a copy is impossible."""
        self.check_device()
        raise StateError(
            f"Parameter '{self.parameters[0].name}' cannot be copied unsharded: its fsdp_post_all_gather has one output only. "
            "Read the parameter in a forward, or between unshard() and reshard()."
        )


def _missing_hooks(tensor: Tensor) -> list[str]:
    return [name for name in (_PRE, _POST) if not hasattr(tensor, name)]


def _become(target: Tensor, source: Tensor) -> None:
    """Give `target` the tensors inside of `source`, a tensor of the same subclass, and its attributes."""
    vars(target).update(vars(source))
    names, _ = source.__tensor_flatten__() if hasattr(source, "__tensor_flatten__") else ((), None)
    for name in names:  # a class with __slots__ has them in no dict
        setattr(target, name, getattr(source, name))


def _version_of_memory(tensor: Tensor) -> int:
    """Return a number that increases with every write to `tensor`, or to a tensor inside of a subclass."""
    if tensor.is_inference():
        return 0  # what was made in inference mode counts no writes; the first flat shard takes its place
    return tensor._version + (0 if type(tensor) is Tensor else sum(inner._version for inner in inner_tensors(tensor)))


register_group(ExtensionGroup)
