"""Parameters that are all-gathered and reduced together: their flat shard, unsharded buffer and reduction plan."""

from __future__ import annotations

import operator
import weakref
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

from fullshard import _torch
from fullshard.checks.collective_log import GroupFingerprints
from fullshard.comm.base import Collectives, Started
from fullshard.comm.streams import CollectiveCall, Lane, Work, nothing
from fullshard.core.communicator import Communicator
from fullshard.core.group_grads import GroupGradients
from fullshard.core.layout import GroupLayout, plan_layout
from fullshard.core.mesh import ShardAxis
from fullshard.core.packing import ReductionPlan
from fullshard.core.param_sharding import ParamSharding
from fullshard.core.sharded_param import ShardedParameter, version_counters
from fullshard.core.subclasses import is_plain, take_attributes
from fullshard.core.unsharded_buffer import AllGather, FlatBuffer, GroupCollectives, Storage, UnshardedBuffer
from fullshard.errors import StateError
from fullshard.policies import Dtypes

_is_trainable: Callable[[Any], bool] = operator.attrgetter("requires_grad")
_grad: Callable[[Any], Tensor | None] = operator.attrgetter("grad")
_local: Callable[[ShardedParameter], Tensor] = operator.attrgetter("local")
_version: Callable[[Tensor], int] = operator.attrgetter("_version")
_STRIDED = repeat(torch.strided)  # the layout of each dense gradient, and of one that is missing


class ParamGroup:
    """Parameters of a unit that share shard axis, dtypes, device and trainability at the time the group is created.

    A group has one unsharded buffer, which the first all-gather creates.

    Attributes:
        flat: whether the shards are parts of a flat shard. Else the group has only one parameter.
        is_exact: whether the unsharded parameters have the values of the shards, but for a cast.
        parameters: the sharded parameters, in the order of `layout.offsets`.
        layout: layout of the all-gather over the shard axis, and of the reduce-scatter; fixed.
        shard_layout: layout of the flat shard: `layout`, unless shards are divided over the replicas as well.
        shard: the flat shard, (shard_layout.shard_numel,).
        reduction: layout of the gradients in the reduce-scatter inputs; fixed.
        is_replicated: whether the parameters are scalars, which every rank has in full although the mesh has a shard axis.
    """

    flat = is_exact = True
    replication = "all_reduce over replicas"  # text of the second step of its reductions, in the log

    def __init__(
        self,
        parameters: list[ShardedParameter],
        values: Sequence[Tensor],
        *,
        dtypes: Dtypes,
        collectives: GroupCollectives,
        storage: Storage,
        fingerprints: GroupFingerprints,
        unwritten: Container[int] = (),
    ) -> None:
        """Copy `values`, this rank's shards, into a new flat shard. Call `bind_parameters` before anything else.

        unwritten: ids of parameters whose shards are uninitialized memory, which is not copied.
        """
        self.parameters, self.fingerprints = parameters, fingerprints
        self.dtypes, self.collectives, self.storage = dtypes, collectives, storage
        axis = parameters[0].sharding.axis
        self.is_replicated = axis.is_replicated
        self.layout, self.shard_layout = self.plan_layouts()
        self.shard, self._unbound = self.copy_shards(values, unwritten)
        self.reduction = ReductionPlan.of(
            self.layout,
            [p.sharding.shard_shape for p in parameters],
            dtypes=dtypes,
            in_order=collectives.reduce.in_order,
            device=storage.device,
            shard_layout=self.shard_layout,
        )
        self.grads = GroupGradients(parameters, dtypes.kept)
        # Whether the flat gradient is the reduce-scatter output itself, so that its memory can be used again.
        is_output = self.shard_layout is self.layout and dtypes.reduced == dtypes.reduce and not storage.host
        self.reduces_in_place = is_output and collectives.reduce.reduce_memory is None
        # The gradients that the last commit set, if they are parts of one flat gradient; None while a reduction uses them.
        self.parts: GradientParts | None = None
        # Given a text for the log, returns the block in which gradients are summed over tensor-parallel ranks; None: no sums.
        self.summing: Callable[[str], AbstractContextManager[None]] | None = None
        self.divided = ""  # log text of the last reduction with `set_gradient_divide_factor`
        # Options of the last reduction, whether it was to defer its second step, and its `ReductionFactors`.
        self.factors: tuple[object, bool, Any] | None = None
        self.writes = 0  # added to the version counters: writes that these do not show, and corrections by `count_anew`
        self._counters: list[Tensor] = []  # tensors whose version counters show writes
        self._are_shared = True  # no sharded DTensor has a counter of its own
        self.sharded = [parameter.sharded for parameter in parameters]
        self._is_plain = all(parameter.sharding.is_plain for parameter in parameters)
        self._unsharded: list[nn.Parameter] = []  # the unsharded parameters, once they exist
        self.installed = False  # whether the unsharded parameters are registered on the modules
        self.slots: _Slots | None = None  # where `parameters` are registered; None: the next `install` looks
        # What `look` found. `must_look`: it is due again, since a parameter may have changed.
        self.must_look = True
        self.has_hooks = self._had_hooks = False  # whether a parameter has user hooks, which a commit runs
        self.frozen: list[str] = []  # names of the parameters that do not require grad
        self._trainable: list[bool] = []
        # None until the first all-gather, so that a model that only loads or saves never allocates it.
        self._buffer: UnshardedBuffer | None = None
        self.keeps_memory = False  # whether freed buffers keep their memory, so that every step uses the same addresses
        # One object for each graph that computes with `all_gather_copy` (extensions); its `handle` is the leaf of the graph.
        self.copies: weakref.WeakSet[Any] = weakref.WeakSet()
        # Work in flight that reads shards in host memory. The host waits for it before it writes.
        self._shard_copies: list[Work] = []

    def plan_layouts(self, outer: int = 1) -> tuple[GroupLayout, GroupLayout]:
        """Return `layout` and `shard_layout`. `outer`: number of replicas that the shards are divided over as well."""
        layout = plan_layout(
            [tuple(p.sharding.local_shape) for p in self.parameters],
            [p.sharding.dim for p in self.parameters],
            ranks=self.collectives.gather.ranks * outer,
            itemsize=min(self.dtypes.storage.itemsize, self.dtypes.compute.itemsize),
            direct=self.storage.direct,
            outer=outer,
        )
        return layout, layout

    @torch.inference_mode(False)  # else a model sharded or loaded in inference mode has no version counters
    def copy_shards(self, values: Sequence[Tensor], unwritten: Container[int]) -> tuple[Tensor, list[Tensor]]:
        """Copy `values` into a new flat shard, whose gaps are zeros. Return it and the shards in it."""
        device = values[0].device
        fresh = any(id(parameter) in unwritten for parameter in self.parameters)
        # On the CPU, untouched pages of torch.empty take no memory until the values are loaded.
        allocate = torch.empty if fresh else torch.zeros
        pinned = self.storage.pinned and device.type == "cpu"
        flat = allocate(self.shard_layout.shard_numel, dtype=self.dtypes.storage, device=device, pin_memory=pinned)
        if fresh:
            _zero_gaps(flat, [(place.offset, value.numel()) for place, value in zip(self.shard_layout.offsets, values)])
        shards: list[Tensor] = []
        for parameter, place, value in zip(self.parameters, self.shard_layout.offsets, values):
            rows = flat[place.offset : place.offset + value.numel()].view(parameter.sharding.shard_shape)
            local = _torch.in_own_storage(rows)  # torch.save of one parameter must not write the whole flat shard
            take_attributes(value, local)  # those set on `value`, such as all-gather hooks
            if id(parameter) not in unwritten:
                local.copy_(value)
            shards.append(local)
        return flat, shards

    def bind_parameters(self) -> None:
        """Make the sharded parameters parts of the flat shard."""
        shards, self._unbound = self._unbound, []
        with torch.inference_mode(False), torch.no_grad():
            for parameter, shard in zip(self.parameters, shards):
                parameter.bind_to_flat_shard(shard)
        self.count_anew()

    def count_anew(self) -> None:
        """Collect the version counters again, after the memory or the DTensor of a parameter was replaced."""
        self.must_look = True  # a new DTensor may have hooks
        before, were_shared = self.version(), self._are_shared
        counters, self._are_shared = version_counters(self.sharded)
        self._counters = [self.shard, *counters]
        self.writes += before - self.version()
        if not were_shared:  # `swap_tensors` may have replaced a counter by one at 0: `before` is too low, so exceed all
            self.writes += max(0, *(buffer.version for buffer in self.buffers), before) + 1 - before

    def version(self) -> int:
        """Return a number that increases with every detectable write to a shard."""
        return sum(map(_version, self._counters), self.writes)

    # --- properties ---

    @property
    def trainable(self) -> bool:
        """True if any parameter requires grad."""
        if self.must_look:
            self.look()
        return len(self.frozen) < len(self.parameters)

    def look(self) -> None:
        """Find out what users changed on the sharded parameters: `requires_grad`, and hooks on gradients."""
        before, self._trainable = self._trainable, [*map(_is_trainable, self.sharded)]
        self.frozen = [p.name for p, trainable in zip(self.parameters, self._trainable) if not trainable]
        self.has_hooks = _torch.have_reduction_hooks(self.sharded)
        # Changes set `must_look`, but for the removal or suspension of a hook. On torch 2.11 no change sets it.
        self._had_hooks = self._had_hooks or self.has_hooks
        self.must_look = self._had_hooks or not _torch.HONOURS_SUBCLASSES
        for index, (unsharded, trainable) in enumerate(zip(self._unsharded, self._trainable)):
            if self.installed and before[index] is trainable:
                continue  # the modules have the unsharded one, and `uninstall` takes over what the user changed on it
            if unsharded.requires_grad is not trainable:
                unsharded.requires_grad_(trainable)

    @property
    def unsharded_nbytes(self) -> int:
        """Bytes of the unsharded buffer, in the compute dtype."""
        return self.layout.unsharded_numel * self.dtypes.compute.itemsize

    @property
    def buffers(self) -> list[UnshardedBuffer]:
        """The all-gather buffers that exist. The first is gathered from the shards."""
        return [] if self._buffer is None else [self._buffer]

    @property
    def stale(self) -> bool:
        """True if a shard was written after the last all-gather."""
        return self._buffer is not None and self._buffer.version != self.version()

    # --- slots ---
    # Every forward and backward runs this code. One C call compares all slots and one replaces them, so that Ctrl-C, which
    # Python handles between bytecodes, cannot leave some replaced. Slots that differ, or a `__setattr__`, take a slower path.

    def install(self, *, again: bool = False) -> None:
        """Register the unsharded parameters on the modules, with `requires_grad` of the sharded ones.

        Raises StateError, naming the parameter, if the user replaced or moved one. `again` (in backward) may miss a `.to()`.
        """
        if self.installed:
            return
        slots = self.slots
        if slots is None:
            slots = self.slots = _Slots(self.parameters)
        if self.must_look:
            self.look()
        self.installed = True  # first, so that `uninstall` undoes what an exception or interrupt breaks off
        if (
            slots.are_plain
            and all(map(operator.is_, map(dict.get, slots.held, slots.names), slots.sharded))
            and (again or all(map(operator.is_, map(_torch.local_tensor, self.sharded), map(_local, self.parameters))))
        ):
            deque(map(operator.setitem, slots.held, slots.names, slots.unsharded), maxlen=0)
            return
        for parameter in self.parameters:
            unsharded, sharded = parameter.unsharded, parameter.sharded
            assert unsharded is not None
            moved = _torch.local_tensor(sharded) is not parameter.local  # type: ignore[arg-type]
            for slot in parameter.slots:
                if moved or slot.content is not sharded:
                    self.uninstall()
                    raise parameter.foreign_error(slot)
                slot.put(unsharded)

    def uninstall(self) -> None:
        """Register the sharded parameters on the modules, except where the user assigned another: the next `install` raises."""
        if not self.installed:
            return
        slots = self.slots
        if (
            slots is not None
            and slots.are_plain
            and self._trainable == [*map(_is_trainable, self._unsharded)]
            and all(map(operator.is_, map(dict.get, slots.held, slots.names), slots.unsharded))
        ):
            deque(map(operator.setitem, slots.held, slots.names, slots.sharded), maxlen=0)
            self.installed = False
            return
        for parameter, trainable in zip(self.parameters, self._trainable):
            unsharded, sharded = parameter.unsharded, parameter.sharded
            if unsharded is None:
                continue
            for slot in parameter.slots:
                if slot.content is unsharded:
                    slot.put(sharded)
                    # the user called requires_grad_() on the unsharded parameter
                    if unsharded.requires_grad is not trainable:
                        sharded.requires_grad_(unsharded.requires_grad)
        self.installed = False

    def replace_values(self, parameter: ShardedParameter, rows: Tensor) -> None:
        """Copy `rows` into the shard of a parameter, but not into other tensors that share its memory."""
        if _torch.has_aliases(parameter.local):
            self._move_shard()
        with torch.no_grad():
            parameter.local.copy_(rows)

    def _move_shard(self) -> None:
        """Copy the flat shard into new memory, so that other tensors over the old memory keep their values.

        Raises StateError if a flat shard `keeps_memory`, since a captured graph may use the addresses of the shard.
        """
        if self.keeps_memory and self.flat:
            raise StateError(
                f"Parameter '{self.parameters[0].name}' and others of its group cannot get new memory: "
                "set_keep_unsharded_storage(True) fixes its address, and an earlier .data, detach() or state_dict() shares it. "
                "Clone those first (p.data.clone()), or write in place: p.data.copy_(value)."
            )
        with torch.inference_mode(False), torch.no_grad():
            self.shard, self._unbound = self.copy_shards([parameter.local for parameter in self.parameters], ())
            self.bind_parameters()
        for buffer in self.buffers[:1]:
            if isinstance(buffer, FlatBuffer):
                buffer.gather_from(self.shard)

    # --- kinds of groups ---

    @classmethod
    def takes(cls, shard: Tensor, axis: ShardAxis, marks: Mapping[str, Any]) -> bool:
        """Return True if a parameter with this shard, over this axis, belongs here. `marks`: attributes of the parameter."""
        return is_plain(shard) and axis.hybrid is None

    @classmethod
    def check_sharding(cls, name: str, tensor: Tensor, sharding: ParamSharding) -> None:
        """Raise ValueError if a parameter that is not sharded yet cannot be sharded in a group of this kind."""
        if cls is ParamGroup and not cls.takes(tensor, sharding.axis, {}):  # no registered kind takes it either
            over = "" if sharding.axis.hybrid is None else " over all ranks of a hybrid mesh"
            raise ValueError(
                f"Parameter '{name}' cannot be sharded{over}: expected a plain torch.Tensor, got a {type(tensor).__name__}, "
                "which no kind of group takes. Convert it first, or leave it out by ignored_params."
            )

    @classmethod
    def check_gather(cls, parameter: ShardedParameter) -> None:
        """Raise StateError if a group of this kind cannot all-gather a parameter. Called before the first all-gather."""

    # --- all-gather ---

    def start_all_gather(self, communicator: Communicator, action: str, first: Callable[[], Work | None] | None = None) -> Work:
        """Allocate the unsharded parameters on the compute stream, call `first`, and start the all-gather behind its work.

        Call `finish_all_gather` after the compute stream waited for the returned work. Raises StateError if the shards
        are on the wrong device, or the ranks diverged.
        """
        if self.parts is not None and not self.parts.is_free:  # before more memory is allocated
            self.parts.free()
        buffer = self._buffer
        if buffer is None:
            self.check_device()
            # Inference tensors have no version counter, but later training steps need one on the unsharded parameters.
            with torch.inference_mode(False), torch.no_grad():
                buffer = self._buffer = self.make_unsharded()
            buffer.keep = self.keeps_memory
        version = self.version()
        # The all-gather writes below autograd. If the weights are new, increment the version counters, so that a backward whose
        # graph saved the old weights raises. If the weights are the same, as in backward, nothing must raise.
        if version != buffer.version and buffer.version >= 0:
            self.invalidate_autograd()
        gather, stream = buffer.allocate(version), communicator.all_gather_stream
        if self.storage.host or first is not None or communicator.traffic.listeners or _torch.profiling():
            return self.send(communicator, stream, gather, action, None if first is None else first())
        start = gather.begin
        if gather.before:
            if communicator.copy_in_stream is not None:
                return self.send(communicator, stream, gather, action)
            start = partial(gather.copy_in_and, gather.begin)
        return communicator.send(stream, self.fingerprints, action, start, gather.finish)

    def send(
        self, communicator: Communicator, stream: Lane, gather: AllGather, action: str, after: Work | None = None
    ) -> CollectiveCall:
        """Queue an all-gather on `stream`, behind the compute stream or, if it is given, behind `after`."""
        start, copied = gather.observed or gather.begin, None
        if gather.before and communicator.copy_in_stream is None:
            start = partial(gather.copy_in_and, start)
        elif gather.before:
            # Casts and copies from host memory have a stream of their own, so that those of the next unit do not wait for the
            # all-gather of this one.
            assert communicator.copy_in_stream is not None and after is None
            after = copied = communicator.copy_in_stream.run(gather.copy_in, nothing)
        call = communicator.send(stream, self.fingerprints, action, start, gather.finish, after)
        if self.storage.host and communicator.async_device is not None:
            self._note_copy(copied, call)
        return call

    def _note_copy(self, copied: Work | None, call: Work) -> None:
        """Record the work that reads the shard in host memory: the copy-in or, without a flat shard, the whole collective.

        The host waits for this work before it writes the shard. A collective may never complete, so it is recorded only without
        a flat shard.
        """
        reads = copied if self.flat else call
        if reads is not None:
            self._shard_copies = [*(copy for copy in self._shard_copies if not copy.done()), reads]

    def make_buffer(self) -> FlatBuffer:
        """Create an unsharded buffer, gathered from the flat shard."""
        return FlatBuffer(self.layout, self.dtypes, self.collectives, self.storage, self.shard)

    def make_unsharded(self) -> UnshardedBuffer:
        """Create the unsharded buffer and the unsharded parameters in it."""
        buffer = self.make_buffer()
        for parameter, view in zip(self.parameters, buffer.views):
            parameter.make_unsharded(view, any_grad_dtype=self.dtypes.casts_gradients)
        self.note_unsharded()
        return buffer

    def note_unsharded(self) -> None:
        """Record the unsharded parameters, which were created or dropped."""
        self._unsharded, self.slots = [p.unsharded for p in self.parameters if p.unsharded is not None], None
        self.must_look = True

    def all_gather_copy(self, communicator: Communicator, action: str) -> list[Tensor]:
        """All-gather into new memory, and return one tensor per parameter. Collective."""
        self.check_device()
        with torch.no_grad():
            copy = self.gather_copy(communicator, action)
            return [parameter.sharding.to_module(view) for parameter, view in zip(self.parameters, copy.views)]

    def gather_copy(self, communicator: Communicator, action: str) -> FlatBuffer:
        """All-gather into a new buffer. Collective."""
        return self.gather_now(communicator, self.make_buffer(), action)

    def gather_now(self, communicator: Communicator, buffer: FlatBuffer, action: str) -> FlatBuffer:
        """All-gather into `buffer`, order the compute stream behind that, and return `buffer`. Collective."""
        self.send(communicator, communicator.all_gather_stream, buffer.allocate(-1), action).wait()
        buffer.release_staging()
        return buffer

    def check_device(self) -> None:
        """Raise StateError if a shard is not on the device where the shards are kept."""
        device, home = self.parameters[0].local.device, self.storage.home
        if device == home:
            return
        if device.type == "meta":
            names = ", ".join(f"'{p.name}'" for p in self.parameters[:3]) + (", ..." if len(self.parameters) > 3 else "")
            raise StateError(
                f"Parameters {names} are still on the meta device. Before the first forward, call "
                f"model.to_empty(device='{home.type}') and then reset_parameters() of every module or "
                "model.load_state_dict(...), or call fullshard.materialize(model)."
            )
        why = "its CPUOffloadPolicy keeps shards there" if self.storage.host else "the device of its mesh"
        raise StateError(
            f"Expected parameter '{self.parameters[0].name}' on {home} ({why}), got {device}. Move the model with "
            f".to('{home}')."
        )

    def finish_all_gather(self) -> None:
        """End the all-gather after the compute stream waited for it: release staging, or call fsdp_post_all_gather."""
        # If staging were freed before, the compute stream could reuse it while the all-gather stream still reads it.
        if self._buffer is not None:
            self._buffer.release_staging()

    def synchronize_host(self) -> None:
        """Block the host until no copy to the device reads the shard in host memory, so that the host may write it."""
        copies, self._shard_copies = self._shard_copies, []
        for copy in copies:
            copy.block()

    def save_subgroup_shard(self) -> None:
        """Copy this rank's part for `reshard_after_forward=k` from the unsharded buffer, before the buffer is freed."""
        if isinstance(self._buffer, FlatBuffer):
            self._buffer.save_subgroup_shard()

    def drop_kept_shards(self) -> None:
        """Discard the part that is kept for `reshard_after_forward=k`."""
        if isinstance(self._buffer, FlatBuffer):
            self._buffer.drop_subgroup_shard()

    def invalidate_autograd(self) -> None:
        """Increase the version counters of the unsharded parameters, so that a backward raises if its graph saved them."""
        torch.autograd.graph.increment_version(self._unsharded)

    def keep_memory(self, keep: bool) -> None:
        """Set whether the buffers of all-gathers keep their memory when they are freed."""
        self.keeps_memory = keep
        for buffer in self.buffers:
            buffer.keep = keep

    def free_unsharded(self) -> None:
        """Free the memory of the unsharded parameters, unless it is kept. The Parameter objects stay.

        Raises StateError if `.numpy()` was called on one of them.
        """
        if self._buffer is None:
            return
        try:
            self._buffer.free()
        except RuntimeError as failure:  # torch has no resize_ for memory that numpy uses
            unit, names = self.parameters[0].unit_name.name, [parameter.name for parameter in self.parameters]
            self.drop_unsharded()
            raise StateError(
                f"The unsharded parameters {names[:4]} of unit '{unit}' cannot be freed: {failure}. If .numpy() was called on "
                "one of them in forward, copy it first: weight.detach().clone().numpy()."
            ) from failure

    def drop_unsharded(self) -> None:
        """Discard the unsharded buffer, as after an all-gather failed."""
        self.uninstall()
        # Pending receives may still write to this memory, so it is not resized to 0. Each receive holds a reference, and the
        # storage is freed with the last one. The next all-gather creates a new buffer and new unsharded parameters in it.
        self._buffer = None
        for parameter in self.parameters:
            parameter.unsharded = None
        self.note_unsharded()

    def drop_gradients(self) -> None:
        """Discard the gradients of the unsharded parameters. Never collective; `take_gradients` may be."""
        for unsharded in self._unsharded:
            unsharded.grad = None

    def take_gradients(self) -> list[Tensor | None] | None:
        """Take the gradients off the unsharded parameters. Return their local parts, summed over TP ranks; None without any."""
        grads: list[Tensor | None] = [*map(_grad, self._unsharded)]
        if not any(map(operator.is_not, grads, repeat(None))):
            return None
        if not all(map(operator.is_, map(getattr, grads, repeat("layout"), _STRIDED), _STRIDED)):
            raise self._sparse_error(grads)
        deque(map(setattr, self._unsharded, repeat("grad"), repeat(None)), maxlen=0)
        if self._is_plain:
            return grads
        pairs, reduce = [*zip(self.parameters, grads)], self.dtypes.reduce
        named = f"sum of the gradients of {[p.name for p, grad in pairs if grad is not None]}" if self.summing else ""
        with self.summing(named) if self.summing else nullcontext():
            return [None if grad is None else p.sharding.grad_to_local(grad, name=p.name, reduce=reduce) for p, grad in pairs]

    def new_sum(self, reduced: Tensor) -> Tensor:
        """Return memory for the sum over all ranks, (shard_layout.shard_numel,): that of `reduced`, the sum over shards."""
        return reduced

    def replicate(self, replicas: Collectives, reduced: Tensor, total: Tensor) -> Started:
        """Start the reduction of `reduced`, the sum over shards, over the replicas, into `total`."""
        return replicas.all_reduce(reduced)

    def _sparse_error(self, grads: Sequence[Tensor | None]) -> StateError:
        found = zip(self.parameters, grads)
        parameter, layout = next((p, g.layout) for p, g in found if g is not None and g.layout is not torch.strided)
        return StateError(
            f"Expected a dense gradient of parameter '{parameter.name}' of unit '{parameter.unit_name.name}', got layout "
            f"{layout}. Build the module with sparse=False, or leave it out by ignored_params."
        )


class GradientParts:
    """The gradients of a group as parts of a flat gradient, which are used again while nobody else holds them.

    Creating them costs more than all else that a commit does. A reduction takes them, and its commit gives them back.
    `is_free`: their memory is freed, since nobody else held them.
    """

    __slots__ = ("_counts", "_inner", "_nbytes", "_specs", "flat", "grads", "is_free")

    def __init__(self, flat: Tensor, grads: Sequence[Any]) -> None:
        self.flat, self.grads, self.is_free = flat, grads, False
        self._nbytes = flat.untyped_storage().size()
        self._inner, self._specs = [*map(_torch.local_tensor, grads)], [*map(_torch.spec_of, grads)]
        self._counts = _torch.holders(grads, self._inner, flat) if _torch.counts_holders() else None

    def are_set(self, parameters: Sequence[Tensor]) -> bool:
        """Return True if `.grad` of each parameter is still its part, with the same local tensor and spec."""
        is_same = all(map(operator.is_, map(_grad, parameters), self.grads))
        return is_same and _torch.are_as_made(self.grads, self._inner, self._specs)

    def free(self) -> None:
        """Free the memory, unless a `.grad` or anything else refers to a gradient, a view of one, or the memory."""
        is_whole = _torch.are_as_made(self.grads, self._inner, self._specs)
        if is_whole and _torch.holders(self.grads, self._inner, self.flat) == self._counts:
            self.is_free = True
            self.flat.untyped_storage().resize_(0)

    def keep(self) -> None:
        """Never free the memory: a captured graph uses it."""
        self._counts = None

    def allocate(self) -> Tensor:
        """Allocate the memory again, and return the flat gradient."""
        self.is_free = False
        self.flat.untyped_storage().resize_(self._nbytes)
        return self.flat


class _Slots:
    """The slots of all parameters of a group, side by side, each with its sharded and unsharded parameter."""

    __slots__ = ("are_plain", "held", "names", "sharded", "unsharded")

    def __init__(self, parameters: Sequence[ShardedParameter]) -> None:
        found = [(slot, parameter) for parameter in parameters for slot in parameter.slots]
        # Whether each module keeps its parameters in its `_parameters` alone, by name.
        self.are_plain = not any(slot.uses_setattr for slot, _ in found)
        self.held, self.names = [slot.parameters for slot, _ in found], [slot.name for slot, _ in found]
        self.sharded, self.unsharded = [p.sharded for _, p in found], [p.unsharded for _, p in found]


def _zero_gaps(flat: Tensor, taken: Sequence[tuple[int, int]]) -> None:
    """Write zeros outside of the ranges in `taken`, each (start, number of elements)."""
    end = 0
    for start, size in [*sorted(taken), (flat.numel(), 0)]:
        if end < start:
            flat[end:start].zero_()
        end = start + size


_KINDS: list[type[ParamGroup]] = []


def register_group(kind: type[ParamGroup]) -> None:
    """Let groups of class `kind` have the parameters that `kind.takes` accepts, unless a class registered before takes them."""
    _KINDS.append(kind)


def group_class(shard: Tensor, axis: ShardAxis, marks: Mapping[str, Any]) -> type[ParamGroup]:
    """Return the group class of a parameter with this shard (or unsharded tensor), shard axis and attributes (`marks`)."""
    return next((kind for kind in _KINDS if kind.takes(shard, axis, marks)), ParamGroup)


def kind_of(parameter: ShardedParameter) -> type[ParamGroup]:
    """Return the class of the group that a parameter belongs in now."""
    return group_class(parameter.local, parameter.sharding.axis, vars(parameter.sharded))


def group_parameters(
    parameters: Sequence[ShardedParameter], values: Sequence[Tensor], dtypes_of: Sequence[Dtypes]
) -> list[tuple[type[ParamGroup], Dtypes, list[int]]]:
    """Return (kind, dtypes, indices) per group: equal kind, axis, dtypes, device, trainability; 1 index if not `kind.flat`."""
    groups: dict[Any, list[int]] = {}
    for index, (parameter, value, dtypes) in enumerate(zip(parameters, values, dtypes_of)):
        kind = group_class(value, parameter.sharding.axis, vars(parameter.sharded))
        of_parameter = (parameter.requires_grad, parameter.sharding.axis.key, -1 if kind.flat else index)
        groups.setdefault((kind, dtypes, value.device, *of_parameter), []).append(index)
    return [(kind, dtypes, members) for (kind, dtypes, *_), members in groups.items()]
