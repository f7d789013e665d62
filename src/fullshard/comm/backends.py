"""The choice of collectives for a process group, by its backend.

What a new backend needs:

- if it has torch's collectives and ReduceOp.AVG (as all of torch's accelerator backends but MTIA's): no change;
- if it lacks ReduceOp.AVG: its name in `_SUM_ONLY`. Sums are then scaled afterwards (`CoalescedCollectives`; tests in
  `tests/distributed/test_collectives.py`). Beside AVG, only SUM and MAX are used, no premultiplied sums;
- if it needs collectives of its own: a class with the members of `Collectives` (comm/base.py) and with `all_to_all` (as in
  comm/coalesced.py), for steps by owners as Muon's; a branch in `collectives_for`, above that of gloo; and, if its messages
  carry tags, a branch in `carries_tags`;
- if its `abort()` does nothing, as gloo's: its name in `abort_group` of _torch/c10d.py, or diverged ranks hang.

`tests/unit/test_torch_versions.py` tests the choice. Predictions of a step (`foresight/simulate.py`) assume gloo on the
CPU, and coalesced collectives on an accelerator.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from fullshard import _torch
from fullshard.comm.base import Collectives, SingleRank
from fullshard.comm.coalesced import CoalescedCollectives
from fullshard.comm.gloo import GlooCollectives, MessageTag

_SUM_ONLY = ("gloo", "mpi", "ucc")
"""Backends without ReduceOp.AVG, by `Backend.name()` in lower case. A subclass of ProcessGroup in Python that runs its
collectives itself is known by the name given to `register_backend` instead. (MTIA is recognized by its device.)"""


def collectives_for(group: dist.ProcessGroup | None, device: torch.device, tag: MessageTag | None = None) -> Collectives:
    """Return the collectives of `group` that suit its backend. `group` is None for a group of this rank only."""
    if group is None or group.size() == 1:
        return SingleRank()
    backend = _torch.backend_name(group, device)
    if carries_tags(backend, device):
        return GlooCollectives(group, tag)
    # gloo copies tensors of an accelerator through host memory (`stages`).
    return CoalescedCollectives(group, averages=backend not in _SUM_ONLY and device.type != "mtia", stages=backend == "gloo")


def carries_tags(backend: str, device: torch.device) -> bool:
    """Return True if messages carry a tag, 24 bits of the log's hash, so that messages of diverged ranks do not match."""
    return device.type == "cpu" and backend == "gloo"
