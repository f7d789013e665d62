"""fullshard: composable, per-parameter fully-sharded data parallelism on DTensor.

--- what a caller meets
api.py          fully_shard(), FSDPModule (class swap), UnshardHandle, counting(), stats()
policies.py     MixedPrecisionPolicy, CommPolicy, CheckPolicy, each resolving to a value without None
optim.py        clip_grad_norm_, optimizers built before sharding
--- what moves (data plane)
mesh.py         the axes parameters are sharded and replicated over
cut.py          how one parameter is cut, and what its DTensors say: tensor parallelism, hybrid meshes
modules.py      DFS over modules: who owns which parameter and buffer
layout.py       integers only: Extent, Bucket, GroupLayout, padding, alignment
parameter.py    ShardedParameter: two faces, the slots it is installed in
extension.py    tensor subclasses that say themselves what is gathered of them
comm.py         Collectives and the torch.distributed ones, Journal, Lane, InFlight
group.py        flat shard, full storage, gather and reduction of parameters that move together
--- when it moves (control plane)
schedule.py     Residency, MOVES, actions, the pure Planner; StateError, InternalError
runtime.py      Unit, Runtime: runs actions on lanes, heartbeat, recovery
hooks.py        translates torch's callbacks into runtime events
--- the basement
_torch.py       every private torch name we lean on
"""

from fullshard.api import FSDPModule, UnshardHandle, counting, fully_shard, stats
from fullshard.comm import AllGather, Collectives, Comm, Lane, Message, ReduceScatter
from fullshard.cut import ShardPlacementResult
from fullshard.mesh import DataParallelMeshDims
from fullshard.optim import clip_grad_norm_
from fullshard.policies import CheckPolicy, CommPolicy, CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from fullshard.schedule import InternalError, StateError

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
    "Message",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ReduceScatter",
    "ShardPlacementResult",
    "StateError",
    "UnshardHandle",
    "clip_grad_norm_",
    "counting",
    "fully_shard",
    "stats",
]
