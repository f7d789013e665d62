"""The choice of collectives for a process group, by its backend.

A new backend with torch's collectives needs nothing: it averages unless `_SUM_ONLY` has it. One with collectives of its own is
a branch in `collectives_for`, and a line in `carries_tags` if its messages carry tags. Predictions assume the classes that are
chosen here (`foresight/simulate.py`), and know networks and backends by name (`foresight/hardware.py`,
`foresight/calibrate.py`).
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from fullshard import _torch
from fullshard.comm.base import Collectives, SingleRank
from fullshard.comm.coalesced import CoalescedCollectives
from fullshard.comm.gloo import GlooCollectives, MessageTag

_SUM_ONLY = ("gloo", "mpi", "ucc", _torch.THREADED)
"""Backends without ReduceOp.AVG. Of accelerators' backends only MTIA's has none; FSDP2 assumes the same."""


def collectives_for(group: dist.ProcessGroup | None, device: torch.device, tag: MessageTag | None = None) -> Collectives:
    """Return the collectives of `group` that suit its backend. `group` is None for a group of this rank only."""
    if group is None or group.size() == 1:
        return SingleRank()
    backend = _torch.backend_name(group, device)
    if carries_tags(backend, device):
        return GlooCollectives(group, tag)
    return CoalescedCollectives(group, averages=backend not in _SUM_ONLY and device.type != "mtia", stages=backend == "gloo")


def carries_tags(backend: str, device: torch.device) -> bool:
    """Return True if messages of collectives carry the tag of their call, so that those of diverged ranks are never matched."""
    return device.type == "cpu" and backend == "gloo"
