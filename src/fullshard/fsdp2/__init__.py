"""The rest of FSDP2's surface, on extension points.

Each file attaches at an extension point, and can be deleted together with its lines here, as a file of `fullshard.ext` can.
"""

import fullshard.fsdp2.annotations
import fullshard.fsdp2.state
from fullshard.fsdp2.collectives import AllGather, Comm, ReduceScatter
from fullshard.fsdp2.finalize import GradientReductionHandle
from fullshard.fsdp2.forward_methods import register_fsdp_forward_method
from fullshard.fsdp2.full_mesh import DataParallelMeshDims
from fullshard.fsdp2.setters import share_comm_ctx

__all__ = [
    "AllGather",
    "Comm",
    "DataParallelMeshDims",
    "GradientReductionHandle",
    "ReduceScatter",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
