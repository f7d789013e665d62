"""The choice of collectives for a process group, by its backend.

What a new backend needs:

- with torch's collectives and ReduceOp.AVG (as have all torch's accelerator backends but MTIA's) no change;
- without ReduceOp.AVG a name in `_SUM_ONLY`: sums are scaled afterwards (`CoalescedCollectives`; tests in
  `tests/distributed/test_collectives.py`). No other reduction is used, in particular not premultiplied sums;
- with collectives of its own a branch in `collectives_for`, and in `carries_tags` if its messages carry tags.

`tests/unit/test_torch_versions.py` tests the choice. Predictions of a step (`foresight/simulate.py`) assume the classes chosen
here, and know networks, not backends (`foresight/hardware.py`).
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from fullshard import _torch
from fullshard.comm.base import Collectives, SingleRank
from fullshard.comm.coalesced import CoalescedCollectives
from fullshard.comm.gloo import GlooCollectives, MessageTag

_SUM_ONLY = ("gloo", "mpi", "ucc")
"""Backends without ReduceOp.AVG, by the name that `Backend.name()` reports, in lower case: it may differ from the name given to
`register_backend`, which counts only for process groups that are written in Python. (MTIA's is found by its device.)"""


def collectives_for(group: dist.ProcessGroup | None, device: torch.device, tag: MessageTag | None = None) -> Collectives:
    """Return the collectives of `group` that suit its backend. `group` is None for a group of this rank only."""
    if group is None or group.size() == 1:
        return SingleRank()
    backend = _torch.backend_name(group, device)
    if carries_tags(backend, device):
        return GlooCollectives(group, tag)
    # Gloo with tensors of a device copies them through host memory, in stages.
    return CoalescedCollectives(group, averages=backend not in _SUM_ONLY and device.type != "mtia", stages=backend == "gloo")


def carries_tags(backend: str, device: torch.device) -> bool:
    """Return True if messages of collectives carry the tag of their call, so that those of diverged ranks are never matched."""
    return device.type == "cpu" and backend == "gloo"
