"""The core: one unit, from hooks to process group, and the names that packages built on it import.

state, optim, ext, fsdp2, wrap, fsdp1, weights, foresight and tools import only the names below from
the core. If a package needs another name, add it. Each file begins with a line about itself; read the files in this order:

the life of a unit:      unit, runtime, scheduler, hooks, units, module_tree, unit_options
memory and messages:     param_group, layout, unsharded_buffer, packing, reduction, reducer, group_grads, heartbeat
one parameter:           sharded_param, sharded_tensor, shard_values, param_sharding, mesh, subclasses
ranks and the outside:   communicator, agreement
"""

from fullshard.checks.collective_log import CollectiveLog, Fingerprint, GroupFingerprints, UnitName, listed
from fullshard.comm.backends import collectives_for
from fullshard.comm.base import Collectives, Started, StartedWork
from fullshard.comm.streams import CollectiveCall, HostStream, InFlight, Lane, Work, stream_for
from fullshard.comm.traffic import Message
from fullshard.core.agreement import Agreement, Ranks
from fullshard.core.communicator import Communicator
from fullshard.core.heartbeat import Heartbeat, SentHeartbeat, message_length
from fullshard.core.hooks import (
    BackwardHook,
    ForwardHooks,
    cast_floats,
    hook_node,
    install_hooks,
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
    plan_layout,
    staging_limit,
)
from fullshard.core.mesh import (
    NAMED_AXES,
    MeshDims,
    ShardAxis,
    axis_of,
    check_order,
    group_of,
    group_of_mesh,
    resolve_mesh,
    shard_placement,
    subgroup_of,
    unpickled_axis,
)
from fullshard.core.module_tree import ManagedTensors, ParamRef, Slot, children_first, clean_name, collect, is_ignored
from fullshard.core.packing import ReductionPlan, casts_whole
from fullshard.core.param_group import ParamGroup, group_class, kind_of, register_group
from fullshard.core.param_sharding import CHECK_LEVEL, CHOOSE_AXIS, PLAIN_PARTS, ParamSharding, PlacementFn, PlainPart
from fullshard.core.reducer import GradientReducer, Listener
from fullshard.core.reduction import Reduction, flat_gradient, pack
from fullshard.core.runtime import Runtime
from fullshard.core.scheduler import Action, ForwardCall, Move, Residency, Scheduler, Stats, UnitRecord
from fullshard.core.shard_values import (
    all_gather_full,
    all_gather_unsharded,
    clone_shard,
    full_tensor,
    like_shard,
    replace_rows,
    set_gradient,
    shard_of,
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
from fullshard.core.subclasses import exact_copy, inner_tensors, is_plain, plain_parts, take_attributes
from fullshard.core.unit import ALLOCATION, BEFORE_STATE_DICT, UNIT_CREATED, Originals, Unit
from fullshard.core.unit_options import KeepAfterForward, UnitOptions
from fullshard.core.units import attach_unit, detach_unit, own_modules, recovered, require_unit, unit_of, units_below, units_of
from fullshard.core.unsharded_buffer import AllGather, FlatBuffer, GroupCollectives, Storage, UnshardedBuffer, tensor_on_storage
