"""fullshard: composable, per-parameter fully-sharded data parallelism on DTensor.

A subpackage imports only subpackages below it, in the order of docs/architecture.md. Each file opens with what it contains.
"""

from fullshard import ext, fsdp2
from fullshard.comm.base import Collectives
from fullshard.comm.streams import Lane
from fullshard.comm.traffic import Message
from fullshard.core.param_sharding import ShardPlacementResult
from fullshard.errors import InternalError, StateError
from fullshard.ext import *
from fullshard.foresight.calibrate import calibrate
from fullshard.foresight.explanation import Explanation, explain
from fullshard.foresight.recorder import record
from fullshard.foresight.search import search
from fullshard.foresight.trace import routed
from fullshard.frontend.api import fully_shard
from fullshard.frontend.module import FSDPModule, UnshardHandle, resident
from fullshard.fsdp2 import *
from fullshard.optim.clipping import clip_grad_norm_
from fullshard.optim.local_view import local_view
from fullshard.optim.matrix_choice import MatrixChoice, matrices_of
from fullshard.optim.matrix_owners import MatrixOwners
from fullshard.optim.owners import Matrix, OwnerPlan, plan_owners
from fullshard.optim.pieces import Pieces
from fullshard.optim.whole_view import whole_view
from fullshard.policies import (
    HFSDP,
    ZERO1,
    ZERO2,
    ZERO3,
    CheckPolicy,
    CommPolicy,
    CPUOffloadPolicy,
    LintWarning,
    MixedPrecisionPolicy,
    OffloadPolicy,
    StateSharding,
)
from fullshard.tools.counting import counting, stats
from fullshard.tools.install import install, installed, uninstall
from fullshard.tools.lint import lint
from fullshard.tools.positions import positions
from fullshard.tools.verify import verify
from fullshard.weights.ema import EMA
from fullshard.weights.loading import load_weights
from fullshard.weights.publish import publish
from fullshard.weights.saving import save_weights
from fullshard.weights.streaming import iter_full
from fullshard.wrap.plan import Plan, PlannedUnit
from fullshard.wrap.whole_model import plan_model, shard_model

__version__ = "0.1.0"

__all__ = [
    "EMA",
    "HFSDP",
    "ZERO1",
    "ZERO2",
    "ZERO3",
    "CPUOffloadPolicy",
    "CheckPolicy",
    "Collectives",
    "CommPolicy",
    "Explanation",
    "FSDPModule",
    "InternalError",
    "Lane",
    "LintWarning",
    "Matrix",
    "MatrixChoice",
    "MatrixOwners",
    "Message",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "OwnerPlan",
    "Pieces",
    "Plan",
    "PlannedUnit",
    "ShardPlacementResult",
    "StateError",
    "StateSharding",
    "UnshardHandle",
    "calibrate",
    "clip_grad_norm_",
    "counting",
    "explain",
    "fully_shard",
    "install",
    "installed",
    "iter_full",
    "lint",
    "load_weights",
    "local_view",
    "matrices_of",
    "plan_model",
    "plan_owners",
    "positions",
    "publish",
    "record",
    "resident",
    "routed",
    "save_weights",
    "search",
    "shard_model",
    "stats",
    "uninstall",
    "verify",
    "whole_view",
]
__all__ += [*ext.__all__, *fsdp2.__all__]
