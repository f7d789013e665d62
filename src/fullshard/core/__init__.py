"""The core: one fully_shard() call from hooks to process group, and the names that other packages may use of it.

state, optim, ext, wrap, fsdp1, weights, foresight and tools import names from here, and none from the files below. `__all__`
lists the names, and the docstring of each says what it does. If a package needs another name, add it. Where to begin:

units        `units_of(module)`: each `Unit` is one fully_shard() call; a `Runtime` runs the units of a device and thread
parameters   `logical_parameters(tensors)`: the `ShardedParameter` of a DTensor; its `unit()` and `group()`, None once deleted
values       `full_tensor` and `all_gather_full` read a whole tensor; `shard_of`, `like_shard`, `replace_rows` write shards
optimizers   `Unit.prepare_step` comes before a step; `use_plain_dtensor` makes it faster, until `restore_subclass`
integers     `plan_layout`: the `GroupLayout` of a group, for a `DirectRule`; `ParamSharding` and `ShardAxis`: meshes
schedule     `Scheduler`: events in, `Action`s out; predictions run the same one
ranks        `Agreement`: the ranks in one call outside of a step, and their logged collectives
extensions   `register_group`: a kind of group; `register_operator`: an operator on sharded parameters

The files, in the order of a unit's life:

unit.py                Unit: pre_forward, post_forward, pre_backward, and public calls on a unit
runtime.py             Runtime: runs the scheduler's actions, ends a backward; one per device and thread
scheduler.py           Scheduler: what to unshard, reshard and reduce, and when; pure
param_group.py         ParamGroup: flat shard and unsharded buffer of parameters that are communicated together
unsharded_buffer.py    FlatBuffer: the unsharded buffer (all-gather output); AllGather: copy-in, collective, copy-out
packing.py             ReductionPlan: layout of a group's gradients in collectives, and the copies into them
reduction.py           Reduction: reduce-scatter, all-reduce, cast and commit of the gradients of one group
reducer.py             GradientReducer: reductions in flight, and when their gradients become .grad
heartbeat.py           the all-reduce at the end of a synchronized backward
communicator.py        streams, process groups, and the log of collectives
collectives_pool.py    the collectives of process groups, one object per group and role
agreement.py           Agreement: the ranks in one call outside of forward and backward, and their collectives
copies.py              digests of values; comparison of what a call computes or writes once, over all ranks of the largest mesh

One parameter, one layout, one mesh:

sharded_param.py       ShardedParameter: the sharded and the unsharded parameter, and the slots where one of them is registered
sharded_tensor.py      ShardedDTensor: the class of sharded parameters; its errors name the parameter
full_tensors.py        full and unsharded tensors of sharded parameters
shard_values.py        copies into and out of shards: fully_shard(), parameters that the user assigned, and loading
group_grads.py         GroupGradients: gradients kept between backwards
layout.py              integers only: Extent, Bucket, GroupLayout, padding, alignment
mesh.py                ShardAxis, ReplicateAxis: the axes of a mesh that parameters are sharded and replicated over
param_sharding.py      ParamSharding: dim, shapes, mesh and placements of one parameter (tensor parallelism, hybrid meshes)
module_tree.py         depth-first walk over modules: the parameters and buffers that a unit manages
unit_modules.py        the modules of a unit: their place in the model, their hooks, which of them run; the unit of a module
hooks.py               module, autograd and state-dict hooks, which call the unit
unit_options.py        UnitOptions: the options of one unit, resolved
backward.py            hooks on autograd graphs, and the backward in progress
extension_points.py    functions that features outside of the engine add, called for every unit

Rare features, each called from one place:

recovery.py            finds what an exception or an interrupt broke off, and has the runtime reset it
late_grads.py          gradients that arrive without a hook on an output
subclasses.py          values of tensor subclasses: tensors inside of them, exact copies, attributes
replaced_parameters.py parameters from before sharding, and the ones that replaced them
"""

from fullshard.checks.collective_log import CollectiveLog, Fingerprint, GroupFingerprints, UnitName, listed
from fullshard.comm.backends import collectives_for
from fullshard.comm.base import Collectives, StartedWork, together
from fullshard.comm.streams import HostStream, InFlight, Lane, Work, stream_for
from fullshard.comm.traffic import Message
from fullshard.core.agreement import Agreement, Ranks
from fullshard.core.backward import BackwardHook, NodeHooks
from fullshard.core.communicator import CollectiveCall, abort_groups
from fullshard.core.copies import agreement_of_all, digest, find_difference
from fullshard.core.extension_points import ALLOCATION, BEFORE_STATE_DICT, UNIT_CREATED, Originals
from fullshard.core.full_tensors import all_gather_full, all_gather_unsharded, full_tensor
from fullshard.core.heartbeat import SentHeartbeat, message_length
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
    has_few_rows,
    plan_layout,
    staging_limit,
)
from fullshard.core.mesh import DataParallelMeshDims, ShardAxis, resolve_mesh, subgroup_of
from fullshard.core.module_tree import ManagedTensors, ParamRef, Slot, children_first, clean_name, collect, is_ignored
from fullshard.core.param_group import ParamGroup, group_class, register_group
from fullshard.core.param_sharding import ParamSharding, PlacementFn
from fullshard.core.reducer import Listener
from fullshard.core.reduction import Reduction, flat_gradient
from fullshard.core.replaced_parameters import current_parameter, replacement_generation, replacement_of, set_replacement
from fullshard.core.runtime import Runtime, make_unit
from fullshard.core.scheduler import (
    Action,
    ForwardCall,
    KeepAfterForward,
    Reduce,
    Reshard,
    Residency,
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
    write_unsharded,
)
from fullshard.core.sharded_param import ShardedParameter, back_references, logical_parameters, to_local
from fullshard.core.sharded_tensor import (
    LOGICAL,
    ShardedDTensor,
    parameter_of,
    register_operator,
    restore_subclass,
    use_plain_dtensor,
)
from fullshard.core.subclasses import exact_copy, is_plain, take_attributes, values_of
from fullshard.core.unit import Unit, refuse_inside_full_params
from fullshard.core.unit_modules import (
    ForwardProgress,
    attach_unit,
    detach_unit,
    own_modules,
    recovered,
    require_unit,
    unit_of,
    units_of,
)
from fullshard.core.unit_options import UnitOptions
from fullshard.core.unsharded_buffer import PlannedAllGather, Storage, tensor_on_storage

__all__ = [
    "ALLOCATION",
    "BEFORE_STATE_DICT",
    "LARGE_MESSAGE",
    "LOGICAL",
    "MIN_CHUNK",
    "MIN_MESSAGE",
    "UNIT_CREATED",
    "Action",
    "Agreement",
    "BackwardHook",
    "Bucket",
    "CollectiveCall",
    "CollectiveLog",
    "Collectives",
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
    "Listener",
    "ManagedTensors",
    "Message",
    "NodeHooks",
    "Originals",
    "ParamGroup",
    "ParamRef",
    "ParamSharding",
    "PlacementFn",
    "PlannedAllGather",
    "Ranks",
    "Reduce",
    "Reduction",
    "ReductionLayout",
    "Reshard",
    "Residency",
    "Runtime",
    "SaveSubgroupShard",
    "Scheduler",
    "SentHeartbeat",
    "ShardAxis",
    "ShardedDTensor",
    "ShardedParameter",
    "Slot",
    "StartedWork",
    "Storage",
    "Unit",
    "UnitName",
    "UnitOptions",
    "UnitRecord",
    "Unshard",
    "Wait",
    "Work",
    "abort_groups",
    "agreement_of_all",
    "all_gather_full",
    "all_gather_unsharded",
    "attach_unit",
    "back_references",
    "cast_floats",
    "children_first",
    "clean_name",
    "clone_shard",
    "collect",
    "collectives_for",
    "current_parameter",
    "detach_unit",
    "digest",
    "exact_copy",
    "find_difference",
    "flat_gradient",
    "full_tensor",
    "group_class",
    "has_few_rows",
    "install_hooks",
    "is_ignored",
    "is_plain",
    "like_shard",
    "listed",
    "logical_parameters",
    "make_unit",
    "message_length",
    "own_modules",
    "parameter_of",
    "plan_layout",
    "recovered",
    "refuse_inside_full_params",
    "register_group",
    "register_operator",
    "remove_hooks",
    "remove_hooks_from_copies",
    "replace_rows",
    "replacement_generation",
    "replacement_of",
    "require_unit",
    "resolve_mesh",
    "restore_subclass",
    "set_replacement",
    "shard_of",
    "staging_limit",
    "stream_for",
    "subgroup_of",
    "take_attributes",
    "tensor_on_storage",
    "tensors_in",
    "to_local",
    "together",
    "unit_of",
    "units_of",
    "use_plain_dtensor",
    "values_of",
    "write_unsharded",
]
