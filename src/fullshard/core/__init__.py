"""The core: one fully_shard() call from hooks to process group. This page is the door for everything that is built on it.

wrap, fsdp1, weights, foresight and tools import these names from here, and no file behind them. An extension that needs more
gets the page extended, with a reason.

**Units.** `Unit` is one fully_shard() call, with its `UnitOptions`. `Runtime` runs the units of one device and thread.
`unit_of` returns the unit of a module, `own_modules` the modules of a unit. `NodeHooks` are a unit's hooks on an autograd
graph, `ForwardProgress` its forwards in progress.

**Parameters.** A `ParamGroup` holds the `ShardedParameter`s that are communicated together. `logical_parameters` returns those
of DTensors. `needs_own_group` is True for tensor subclasses with all-gather hooks. `shard_of` slices this rank's shard from a
full tensor, `full_tensor` all-gathers a DTensor. `mark_unwritten`, `tensors_on_meta` and `UninitializedTensors` track memory
without values.

**Integers.** `plan_layout` returns the `GroupLayout` of a group: its `Bucket`s and `Extent`s. `DirectRule` (with `MIN_CHUNK`,
`MIN_MESSAGE` and `LARGE_MESSAGE`) chooses the parameters with a message of their own. `ReductionLayout`, `Slice` and
`staging_limit` describe reductions.

**Meshes and modules.** `resolve_mesh` makes a `ShardAxis` of a DeviceMesh (`DataParallelMeshDims`, `check_names`). `group_of`
and `subgroup_of` return process groups. `ParamSharding` describes how one parameter is sharded (`PlacementFn`). `collect`
returns the `ManagedTensors` of modules, as `ParamRef`s. `children_first` and `clean_name` are for walks over modules.

**Schedule.** The `Scheduler` turns events (`ForwardCall`) into `Action`s: `Unshard`, `Wait`, `SaveSubgroupShard`, `Reshard` and
`Reduce`. It has a `UnitRecord` per unit.

**Communication.** `SetupCollectives` runs logged collectives outside of a step, and a `CollectiveCall` is one in flight. The
transport is `Collectives`, `collectives_for`, `StartedWork`, `together`, `Lane`, `HostStream`, `Work`, `InFlight` and
`Message`. Custom collectives are `AllGather`, `ReduceScatter` and `Comm`. `on_release` clears caches of destroyed process
groups. `UnitName` and `listed` are for texts. `message_length` is the length of a heartbeat.

The files, in the order of a unit's life:

unit.py                Unit: pre_forward, post_forward, pre_backward, and requests of the user
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
setup_collectives.py   collectives outside of forward and backward

One parameter, one layout, one mesh:

sharded_param.py       ShardedParameter: the sharded and the unsharded parameter, and the slots where one of them is registered
sharded_tensor.py      ShardedDTensor: the class of sharded parameters; its errors name the parameter
shard_values.py        copies into and out of shards: sharding and unsharding for good, assigned parameters, loading
group_grads.py         GroupGradients: gradients kept between backwards; ReductionPlan: layout of the gradients in collectives
layout.py              integers only: Extent, Bucket, GroupLayout, padding, alignment
mesh.py                ShardAxis, ReplicateAxis: the axes of a mesh that parameters are sharded and replicated over
param_sharding.py      ParamSharding: dim, shapes, mesh and placements of one parameter (tensor parallelism, hybrid meshes)
module_tree.py         depth-first walk over modules: the parameters and buffers that a unit manages
unit_modules.py        the modules of a unit: their place in the model, their hooks, which of them run
unit_options.py        UnitOptions: the options of one unit, resolved
backward.py            hooks on autograd graphs, and the backward in progress

Rare features, each called from one place:

recovery.py            cleans up after an exception or an interrupt
interrupts.py          the guard against interrupts
join.py                join(): take part in collectives without computing
joined_calls.py        forward calls that a rank joined, until their backward
late_grads.py          gradients that arrive without a hook on an output
finalization.py        backwards that the user ends
kept_grads.py          gradients that backwards keep without communication
extension.py           tensor subclasses with their own all-gather hooks
parameter_alias.py     ParameterAlias: parameters from before sharding, aliases of the sharded ones
reduction_arena.py     ReductionArena: memory with fixed addresses for reductions
replicas.py            equal weights and buffers on replicas
value_sync.py          checks and broadcasts of values before sharding
meta_init.py           memory that nothing wrote before the first forward
uninitialized.py       finds tensors whose memory was never written
lint.py                parameters that no unit reduces; warnings about waste
"""

from fullshard.checks.collective_log import UnitName, listed
from fullshard.comm.backends import collectives_for
from fullshard.comm.base import Collectives, StartedWork, together
from fullshard.comm.custom import AllGather, Comm, ReduceScatter
from fullshard.comm.process_groups import on_release
from fullshard.comm.streams import HostStream, InFlight, Lane, Work
from fullshard.comm.traffic import Message
from fullshard.core.backward import NodeHooks
from fullshard.core.communicator import CollectiveCall
from fullshard.core.extension import needs_own_group
from fullshard.core.heartbeat import message_length
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
    plan_layout,
    staging_limit,
)
from fullshard.core.mesh import DataParallelMeshDims, ShardAxis, check_names, group_of, resolve_mesh, subgroup_of
from fullshard.core.meta_init import mark_unwritten, tensors_on_meta
from fullshard.core.module_tree import ManagedTensors, ParamRef, children_first, clean_name, collect
from fullshard.core.param_group import ParamGroup
from fullshard.core.param_sharding import ParamSharding, PlacementFn
from fullshard.core.runtime import Runtime
from fullshard.core.scheduler import (
    Action,
    ForwardCall,
    Reduce,
    Reshard,
    SaveSubgroupShard,
    Scheduler,
    UnitRecord,
    Unshard,
    Wait,
)
from fullshard.core.setup_collectives import SetupCollectives
from fullshard.core.shard_values import full_tensor, shard_of
from fullshard.core.sharded_param import ShardedParameter, logical_parameters
from fullshard.core.uninitialized import UninitializedTensors
from fullshard.core.unit import Unit, own_modules, unit_of
from fullshard.core.unit_modules import ForwardProgress
from fullshard.core.unit_options import UnitOptions

__all__ = [
    "LARGE_MESSAGE",
    "MIN_CHUNK",
    "MIN_MESSAGE",
    "Action",
    "AllGather",
    "Bucket",
    "CollectiveCall",
    "Collectives",
    "Comm",
    "DataParallelMeshDims",
    "DirectRule",
    "Extent",
    "ForwardCall",
    "ForwardProgress",
    "GroupLayout",
    "HostStream",
    "InFlight",
    "Lane",
    "ManagedTensors",
    "Message",
    "NodeHooks",
    "ParamGroup",
    "ParamRef",
    "ParamSharding",
    "PlacementFn",
    "Reduce",
    "ReduceScatter",
    "ReductionLayout",
    "Reshard",
    "Runtime",
    "SaveSubgroupShard",
    "Scheduler",
    "SetupCollectives",
    "ShardAxis",
    "ShardedParameter",
    "Slice",
    "StartedWork",
    "UninitializedTensors",
    "Unit",
    "UnitName",
    "UnitOptions",
    "UnitRecord",
    "Unshard",
    "Wait",
    "Work",
    "check_names",
    "children_first",
    "clean_name",
    "collect",
    "collectives_for",
    "full_tensor",
    "group_of",
    "listed",
    "logical_parameters",
    "mark_unwritten",
    "message_length",
    "needs_own_group",
    "on_release",
    "own_modules",
    "plan_layout",
    "resolve_mesh",
    "shard_of",
    "staging_limit",
    "subgroup_of",
    "tensors_on_meta",
    "together",
    "unit_of",
]
