"""fullshard: composable, per-parameter fully-sharded data parallelism on DTensor.

--- what a caller meets
api.py          fully_shard()
module.py       FSDPModule (the class that is mixed in), UnshardHandle, counting(), stats(), undo()
policies.py     MixedPrecisionPolicy, CommPolicy, CheckPolicy, each resolving to a value without None
scopes.py       full_params(), gathered(): full parameters for the length of a block
wrap.py         shard_model(), plan_model(); FSDP1's policies: which modules become units
compat.py       FullyShardedDataParallel: FSDP1's wrapper
given.py        what FSDP1's constructor was told, resolved
formats.py      the forms in which FSDP1 saves models and optimizers: full, sharded, local
plan.py         Plan: the units to be made, as data; prints as a table, can be edited
auto.py         AutoPolicy: repeated blocks, and what is as large beside them
materialize.py  materialize(): memory and first values for a model built on meta
install.py      install(): fullshard in place of torch's FSDP2
verify.py       verify(): sharded against plain, the first thing that differs
__main__.py     python -m fullshard run script.py, python -m fullshard verify module:factory
optim.py        clip_grad_norm_, optimizers built before sharding
grads.py        grad(): gradients as values
together.py     any_failed(): skipping a step on all ranks
sync.py         weights and buffers in step on all ranks
--- what moves (data plane)
groups.py       process groups, until torch destroys them
mesh.py         the axes parameters are sharded and replicated over
cut.py          how one parameter is cut, and what its DTensors say: tensor parallelism, hybrid meshes
modules.py      DFS over modules: who owns which parameter and buffer
layout.py       integers only: Extent, Bucket, GroupLayout, padding, alignment
parameter.py    ShardedParameter: two faces, the slots it is installed in
face.py         its class: a DTensor that is named when it is mixed with plain tensors
replaced.py     parameters of before sharding, which stand for the sharded ones
extension.py    tensor subclasses that say themselves what is gathered of them
comm.py         Collectives and the torch.distributed ones, Journal, Lane, InFlight
gloo.py         gloo's collectives, as messages under tags
full.py         the gathered side of a group: memory, and the collective that fills it
group.py        parameters that move together: flat shard, what is gathered of it, where gradients land
reduction.py    gradients on their way to the shards
handover.py     gradients that are there become `.grad`, all or none
heartbeat.py    the message that ends a synchronised backward
unwritten.py    memory that nobody has written yet
--- when it moves (control plane)
schedule.py     Residency, MOVES, actions, the pure Planner
options.py      what one unit was told, resolved
unit.py         Unit: one fully_shard call, its modules, parameters and groups
runtime.py      Runtime: runs actions on lanes, recovery
backward.py     what rides on graphs and tells that a backward is here, or over
joined.py       calls in which this rank takes part without computing
delivery.py     gradients on their way, and when they are handed out
communicator.py lanes, process groups, and the ledger of what is said on them
alike.py        a unit's weights and buffers, alike on all ranks
ledger.py       what a rank said to the others, in order
board.py        what ranks publish through the store, and the bell that wakes one
watch.py        asks where the others are when a wait is long; ends waits in vain
lint.py         parameters that nobody reduces; remarks about waste
hooks.py        translates torch's callbacks into runtime events
methods.py      methods that gather as forward does, with the units below that they touch
ties.py         parameters that an earlier unit owns already
views.py        FSDP2's state objects, as views on units
assembly.py     putting units on modules and taking them off: copies, pickles, plain modules again
--- the basement
errors.py       StateError, InternalError
notices.py      warnings that are said once
_torch.py       every private torch name we lean on
"""

from fullshard.api import fully_shard
from fullshard.comm import AllGather, Collectives, Comm, Lane, Message, ReduceScatter
from fullshard.cut import ShardPlacementResult
from fullshard.errors import InternalError, StateError
from fullshard.grads import grad
from fullshard.install import install, installed, uninstall
from fullshard.materialize import materialize
from fullshard.mesh import DataParallelMeshDims
from fullshard.module import (
    FSDPModule,
    UnshardHandle,
    counting,
    register_fsdp_forward_method,
    resident,
    share_comm_ctx,
    stats,
    undo,
)
from fullshard.optim import clip_grad_norm_
from fullshard.plan import Plan, PlannedUnit
from fullshard.policies import CheckPolicy, CommPolicy, CPUOffloadPolicy, LintWarning, MixedPrecisionPolicy, OffloadPolicy
from fullshard.scopes import full_params, gathered
from fullshard.together import any_failed
from fullshard.verify import verify
from fullshard.wrap import plan_model, shard_model

__version__ = "0.1.0"

__all__ = [
    "AllGather",
    "CPUOffloadPolicy",
    "CheckPolicy",
    "Collectives",
    "Comm",
    "CommPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "InternalError",
    "Lane",
    "LintWarning",
    "Message",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Plan",
    "PlannedUnit",
    "ReduceScatter",
    "ShardPlacementResult",
    "StateError",
    "UnshardHandle",
    "any_failed",
    "clip_grad_norm_",
    "counting",
    "full_params",
    "fully_shard",
    "gathered",
    "grad",
    "install",
    "installed",
    "materialize",
    "plan_model",
    "register_fsdp_forward_method",
    "resident",
    "shard_model",
    "share_comm_ctx",
    "stats",
    "undo",
    "uninstall",
    "verify",
]
