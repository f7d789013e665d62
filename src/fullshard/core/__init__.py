"""The core: one fully_shard() call from hooks to process group, and the names that other packages may use of it.

state, optim, ext, wrap, fsdp1, weights, foresight and tools import the names below, and nothing from the files. If a package
needs another name, add it. The files, in the order of a unit's life:

unit.py                Unit: pre_forward, post_forward, pre_backward, and public calls on a unit
units.py               the unit of a module, and the units at and below it
runtime.py             Runtime: runs the scheduler's actions, ends a backward; one per device and thread
scheduler.py           Scheduler: what to unshard, reshard and reduce, and when; pure, so predictions run the same one
param_group.py         ParamGroup: flat shard and unsharded buffer of parameters that are communicated together
memory.py              Memory: where groups allocate and free, for predictions that record both
unsharded_buffer.py    FlatBuffer: the unsharded buffer (all-gather output); AllGather: copy-in, collective, copy-out
packing.py             ReductionPlan: layout of a group's gradients in collectives, and the copies into them
reduction.py           Reduction: reduce-scatter, all-reduce, cast and commit of the gradients of one group
reducer.py             GradientReducer: reductions in flight, and when their gradients become .grad
heartbeat.py           the all-reduce at the end of a synchronized backward
communicator.py        collectives of process groups, and the log of each axis
collectives_pool.py    the collectives of process groups, and what the options of a unit make of them
agreement.py           Agreement: the ranks in one call outside of forward and backward, and their collectives
sharded_param.py       ShardedParameter: the sharded and the unsharded parameter, and their slots; what replaced a parameter
sharded_tensor.py      ShardedDTensor: the class of sharded parameters; its errors name the parameter
shard_values.py        values into and out of shards: fully_shard(), loading, full tensors
group_grads.py         GroupGradients: gradients kept between backwards
layout.py              integers only: Extent, Bucket, GroupLayout, padding, alignment
mesh.py                ShardAxis, ReplicateAxis: the axes of a mesh that parameters are sharded and replicated over
param_sharding.py      ParamSharding: dim, shapes, mesh and placements of one parameter (tensor parallelism, hybrid meshes)
module_tree.py         depth-first walk over modules: the parameters and buffers that a unit manages
hooks.py               module, autograd and state-dict hooks, which call the unit
unit_options.py        UnitOptions: the options of one unit, resolved
backward.py            the backward in progress
extension_points.py    functions that features outside of the engine add, called for every unit
subclasses.py          values of tensor subclasses: tensors inside of them, exact copies, attributes
"""

from fullshard.checks.collective_log import CollectiveLog, Fingerprint, GroupFingerprints, UnitName, listed
from fullshard.comm.backends import collectives_for
from fullshard.comm.base import Collectives, Started, StartedWork
from fullshard.comm.streams import CollectiveCall, HostStream, InFlight, Lane, Work, stream_for
from fullshard.comm.traffic import Message
from fullshard.core.agreement import Agreement, Ranks
from fullshard.core.communicator import Communicator
from fullshard.core.extension_points import ALLOCATION, BEFORE_STATE_DICT, UNIT_CREATED, Originals
from fullshard.core.heartbeat import SentHeartbeat, message_length
from fullshard.core.hooks import (
    BackwardHook,
    ForwardHooks,
    cast_floats,
    hook_node,
    install_hooks,
    remove_hooks,
    remove_hooks_from_copies,
    tensors_in,
)
from fullshard.core.layout import (
    LARGE_MESSAGE,
    MIN_CHUNK,
    MIN_MESSAGE,
    Bucket,
    DirectRule,
    Extent,
    GroupLayout,
    ParamOffsets,
    ReductionLayout,
    has_few_rows,
    plan_layout,
    staging_limit,
)
from fullshard.core.mesh import DataParallelMeshDims, ShardAxis, resolve_mesh, subgroup_of
from fullshard.core.module_tree import ManagedTensors, ParamRef, Slot, children_first, clean_name, collect, is_ignored
from fullshard.core.packing import ReductionPlan, pack
from fullshard.core.param_group import ParamGroup, group_class, register_group
from fullshard.core.param_sharding import ParamSharding, PlacementFn
from fullshard.core.reducer import Listener
from fullshard.core.reduction import Reduction, flat_gradient
from fullshard.core.runtime import Runtime, make_unit
from fullshard.core.scheduler import (
    Action,
    ForwardCall,
    Move,
    Residency,
    Scheduler,
    Stats,
    UnitRecord,
)
from fullshard.core.shard_values import (
    all_gather_full,
    all_gather_unsharded,
    clone_shard,
    full_tensor,
    like_shard,
    replace_rows,
    shard_of,
    write_unsharded,
)
from fullshard.core.sharded_param import (
    ShardedParameter,
    back_references,
    current_parameter,
    logical_parameters,
    replacement_generation,
    replacement_of,
    set_replacement,
    user_attributes,
)
from fullshard.core.sharded_tensor import LOGICAL, OPERATORS, ShardedDTensor, parameter_of, restore_subclass, use_plain_dtensor
from fullshard.core.subclasses import exact_copy, is_plain, plain_parts, take_attributes, values_of, version_of_memory
from fullshard.core.unit import Unit, refuse_inside_full_params
from fullshard.core.unit_options import KeepAfterForward, UnitOptions
from fullshard.core.units import attach_unit, detach_unit, own_modules, recovered, require_unit, unit_of, units_below, units_of
from fullshard.core.unsharded_buffer import (
    FlatBuffer,
    GroupCollectives,
    PlannedAllGather,
    Storage,
    UnshardedBuffer,
    tensor_on_storage,
)
