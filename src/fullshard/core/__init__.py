"""The core: one fully_shard() call from hooks to process group, and the names that other packages may use of it.

state, optim, wrap, fsdp1, weights, foresight and tools import these names from here, and none from the files below. If a
package needs another name, add it here, and say why.

**Units.** `Unit` is one fully_shard() call, with its `UnitOptions`. `Runtime` runs the units of one device and thread.
`make_unit` creates a unit; `attach_unit` and `install_hooks` install it on its modules, `detach_unit`, `remove_hooks` and
`remove_hooks_from_copies` remove it from them. `unit_of` returns the unit of a module, `units_of` all units at and below it,
`own_modules` the modules of a unit, and `owner_of` the unit of a parameter. `NodeHooks` are a unit's hooks on an autograd
graph, each a `BackwardHook` of one call. `ForwardProgress` records its running forwards. `cast_floats` and `tensors_in` cast
and find the tensors of inputs and outputs, as the hooks do.

**Parameters.** A `ParamGroup` has the `ShardedParameter`s that are communicated together. `logical_parameters` returns the
`ShardedParameter`s of DTensors, and `back_references` the references to them. `needs_own_group` is True for tensor subclasses
with all-gather hooks. `is_ignored` is True for parameters that the user excluded. `replacement_of` returns the parameter that
took the place of one from before sharding or from before undo(); the result is current as long as `replacement_generation` does
not change. `units_below`, `numel_of`, `added_parameters`, `remarks_on_sizes` and `some_of` are for remarks on a model.

**Values of parameters.** `shard_of` slices this rank's shard from a full tensor, and `like_shard` distributes a loaded value
like its parameter. `all_gather_full` returns the full tensor of a parameter or gradient in an `Agreement`, `full_tensor` that
of any DTensor, without the log, and `to_local` its local tensor. `replace_rows` and `write_unsharded` write a shard,
`clone_shard` copies it, and `unshard_permanently` puts a plain Parameter in its place. `tensors_on_meta`, `mark_unwritten` and
`UninitializedTensors` track memory without values; `mark_tensor` fills such memory with a mark, and `is_marked` finds the mark
again. `forget_writes` tells the logs that parameters are loaded. `values_of` returns the plain tensor with the values of a
tensor subclass.

**Steps of optimizers.** `owner` of a parameter leads to its group and its unit; `check_step` of it comes before a step.
`use_plain_dtensor` turns sharded parameters into plain DTensors, on which a step is faster, and `restore_subclass` undoes
that. `ShardedDTensor` is the class of sharded parameters; `unsharded_like` and `store_shard` fill one from a full tensor.
`flat_gradient` returns the gradients of a group as one tensor. `remark_on_optimizer` warns about gradients that no unit
reduces.

**Integers.** `plan_layout` returns the `GroupLayout` of a group: its `Bucket`s and `Extent`s. `DirectRule` (with `MIN_CHUNK`,
`MIN_MESSAGE` and `LARGE_MESSAGE`) chooses the parameters with a collective of their own. `ReductionLayout`, `Slice` and
`staging_limit` describe reductions. `has_few_rows` tells which parameters HFSDP leaves replicated.

**Meshes and modules.** `resolve_mesh` makes a `ShardAxis` of a DeviceMesh (`DataParallelMeshDims`), and
`subgroup_of` returns a process group of some of its ranks. `ParamSharding` describes how one parameter is sharded
(`PlacementFn`). `collect` returns the `ManagedTensors` of modules, as `ParamRef`s with `Slot`s. `children_first` and
`clean_name` are for walks over modules.

**Schedule.** The `Scheduler` turns events (`ForwardCall`) into `Action`s: `Unshard`, `Wait`, `SaveSubgroupShard`, `Reshard`,
`Reduce` and `PassBy`. It has a `UnitRecord` per unit, with a `KeepAfterForward`.

**Communication.** An `Agreement` represents the ranks in one call outside of a step. It compares and gathers values by logged
collectives. Its `run` raises on all ranks if the work fails on one of them, as `run` of all `Ranks` does. A `CollectiveCall` is
one collective in flight. A `CollectiveLog` has an entry for each collective and each write of the user, with a `Fingerprint`
that is equal on all ranks; `GroupFingerprints` makes those of the collectives of one group. The transport is `Collectives`,
`collectives_for`, `StartedWork`, `together`, `Lane`, `HostStream`, `stream_for`, `Work`, `InFlight` and `Message`. Custom
collectives are `AllGather`, `ReduceScatter` and `Comm`. `on_release` clears caches of destroyed process groups. `UnitName` and
`listed` are for texts. `message_length` is the length of a heartbeat.

The files, in the order of a unit's life:

unit.py                Unit: pre_forward, post_forward, pre_backward, and public calls on a unit
runtime.py             Runtime: runs the scheduler's actions, ends a backward; one per device and thread
scheduler.py           Scheduler: what to unshard, reshard and reduce, and when; pure
param_group.py         ParamGroup: flat shard and unsharded buffer of parameters that are communicated together
unsharded_buffer.py    FlatBuffer: the unsharded buffer (all-gather output); AllGather: copy-in, collective, copy-out
reduction.py           Reduction: reduce-scatter, all-reduce and cast of the gradients of one group
reducer.py             GradientReducer: reductions in flight, and when their gradients become .grad
grad_commit.py         GradCommit: sets `.grad` of all parameters or none
heartbeat.py           the all-reduce at the end of a synchronized backward
communicator.py        streams, process groups, and the log of collectives
collectives_pool.py    the collectives of process groups, one object per group and role
agreement.py           Agreement: the ranks in one call outside of forward and backward, and their collectives
copies.py              comparison of what a call computes or writes once, over all ranks of the largest mesh

One parameter, one layout, one mesh:

sharded_param.py       ShardedParameter: the sharded and the unsharded parameter, and the slots where one of them is registered
sharded_tensor.py      ShardedDTensor: the class of sharded parameters; its errors name the parameter
full_tensors.py        full and unsharded tensors of sharded parameters
shard_values.py        copies into and out of shards: fully_shard(), undo(), parameters that the user assigned, and loading
group_grads.py         GroupGradients: gradients kept between backwards; ReductionPlan: layout of the gradients in collectives
layout.py              integers only: Extent, Bucket, GroupLayout, padding, alignment
mesh.py                ShardAxis, ReplicateAxis: the axes of a mesh that parameters are sharded and replicated over
param_sharding.py      ParamSharding: dim, shapes, mesh and placements of one parameter (tensor parallelism, hybrid meshes)
module_tree.py         depth-first walk over modules: the parameters and buffers that a unit manages
unit_modules.py        the modules of a unit: their place in the model, their hooks, which of them run; the unit of a module
hooks.py               module, autograd and state-dict hooks, which call the unit
unit_options.py        UnitOptions: the options of one unit, resolved
backward.py            hooks on autograd graphs, and the backward in progress

Rare features, each called from one place:

recovery.py            cleans up after an exception or an interrupt
join.py                join(): take part in collectives without computing
joined_calls.py        forward calls that a rank joined, until their backward
late_grads.py          gradients that arrive without a hook on an output
finalization.py        backwards that the user ends
extension.py           tensor subclasses with their own all-gather hooks
subclasses.py          values of tensor subclasses: tensors inside of them, exact copies, attributes
replaced_parameters.py parameters from before sharding, and the ones that replaced them
value_sync.py          values of all ranks: compared in the first forward, or broadcast
meta_init.py           memory that nothing wrote before the first forward
uninitialized.py       finds tensors whose memory was never written
lint.py                parameters that no unit reduces; warnings about waste
"""

from fullshard.checks.collective_log import CollectiveLog, Fingerprint, GroupFingerprints, UnitName, listed
from fullshard.comm.backends import collectives_for
from fullshard.comm.base import Collectives, StartedWork, together
from fullshard.comm.custom import AllGather, Comm, ReduceScatter
from fullshard.comm.process_groups import on_release
from fullshard.comm.streams import HostStream, InFlight, Lane, Work, stream_for
from fullshard.comm.traffic import Message
from fullshard.core.agreement import Agreement, Ranks
from fullshard.core.backward import BackwardHook, NodeHooks
from fullshard.core.communicator import CollectiveCall
from fullshard.core.copies import agreement_of_all, find_difference
from fullshard.core.extension import needs_own_group
from fullshard.core.full_tensors import all_gather_full, full_tensor
from fullshard.core.grad_commit import flat_gradient
from fullshard.core.heartbeat import message_length
from fullshard.core.hooks import cast_floats, install_hooks, remove_hooks, remove_hooks_from_copies, tensors_in
from fullshard.core.layout import (
    LARGE_MESSAGE,
    MIN_CHUNK,
    MIN_MESSAGE,
    Bucket,
    DirectRule,
    Extent,
    GroupLayout,
    ReductionLayout,
    Slice,
    has_few_rows,
    plan_layout,
    staging_limit,
)
from fullshard.core.lint import (
    added_parameters,
    is_ignored,
    numel_of,
    remark_on_optimizer,
    remarks_on_sizes,
    some_of,
    units_below,
)
from fullshard.core.mesh import DataParallelMeshDims, ShardAxis, resolve_mesh, subgroup_of
from fullshard.core.meta_init import mark_unwritten, tensors_on_meta
from fullshard.core.module_tree import ManagedTensors, ParamRef, Slot, children_first, clean_name, collect
from fullshard.core.param_group import ParamGroup
from fullshard.core.param_sharding import ParamSharding, PlacementFn
from fullshard.core.replaced_parameters import replacement_generation, replacement_of
from fullshard.core.runtime import Runtime, make_unit
from fullshard.core.scheduler import (
    Action,
    ForwardCall,
    KeepAfterForward,
    Reduce,
    Reshard,
    SaveSubgroupShard,
    Scheduler,
    UnitRecord,
    Unshard,
    Wait,
)
from fullshard.core.shard_values import (
    clone_shard,
    like_shard,
    replace_rows,
    shard_of,
    unshard_permanently,
    write_unsharded,
)
from fullshard.core.sharded_param import ShardedParameter, back_references, logical_parameters, to_local
from fullshard.core.sharded_tensor import ShardedDTensor, restore_subclass, store_shard, unsharded_like, use_plain_dtensor
from fullshard.core.subclasses import values_of
from fullshard.core.uninitialized import UninitializedTensors, is_marked, mark_tensor
from fullshard.core.unit import Unit, forget_writes, owner_of
from fullshard.core.unit_modules import ForwardProgress, attach_unit, detach_unit, own_modules, recovered, unit_of, units_of
from fullshard.core.unit_options import UnitOptions

__all__ = [
    "LARGE_MESSAGE",
    "MIN_CHUNK",
    "MIN_MESSAGE",
    "Action",
    "Agreement",
    "AllGather",
    "BackwardHook",
    "Bucket",
    "CollectiveCall",
    "CollectiveLog",
    "Collectives",
    "Comm",
    "DataParallelMeshDims",
    "DirectRule",
    "Extent",
    "Fingerprint",
    "ForwardCall",
    "ForwardProgress",
    "GroupFingerprints",
    "GroupLayout",
    "HostStream",
    "InFlight",
    "KeepAfterForward",
    "Lane",
    "ManagedTensors",
    "Message",
    "NodeHooks",
    "ParamGroup",
    "ParamRef",
    "ParamSharding",
    "PlacementFn",
    "Ranks",
    "Reduce",
    "ReduceScatter",
    "ReductionLayout",
    "Reshard",
    "Runtime",
    "SaveSubgroupShard",
    "Scheduler",
    "ShardAxis",
    "ShardedDTensor",
    "ShardedParameter",
    "Slice",
    "Slot",
    "StartedWork",
    "UninitializedTensors",
    "Unit",
    "UnitName",
    "UnitOptions",
    "UnitRecord",
    "Unshard",
    "Wait",
    "Work",
    "added_parameters",
    "agreement_of_all",
    "all_gather_full",
    "attach_unit",
    "back_references",
    "cast_floats",
    "children_first",
    "clean_name",
    "clone_shard",
    "collect",
    "collectives_for",
    "detach_unit",
    "find_difference",
    "flat_gradient",
    "forget_writes",
    "full_tensor",
    "has_few_rows",
    "install_hooks",
    "is_ignored",
    "is_marked",
    "like_shard",
    "listed",
    "logical_parameters",
    "make_unit",
    "mark_tensor",
    "mark_unwritten",
    "message_length",
    "needs_own_group",
    "numel_of",
    "on_release",
    "own_modules",
    "owner_of",
    "plan_layout",
    "recovered",
    "remark_on_optimizer",
    "remarks_on_sizes",
    "remove_hooks",
    "remove_hooks_from_copies",
    "replace_rows",
    "replacement_generation",
    "replacement_of",
    "resolve_mesh",
    "restore_subclass",
    "shard_of",
    "some_of",
    "staging_limit",
    "store_shard",
    "stream_for",
    "subgroup_of",
    "tensors_in",
    "tensors_on_meta",
    "to_local",
    "together",
    "unit_of",
    "units_below",
    "units_of",
    "unshard_permanently",
    "unsharded_like",
    "use_plain_dtensor",
    "values_of",
    "write_unsharded",
]
