"""The one place that chooses the collectives of a process group by its backend."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fullshard import _torch
from fullshard.collectives.base import Collectives, SingleRank
from fullshard.collectives.coalesced import CoalescedCollectives
from fullshard.collectives.gloo import GlooCollectives, MessageTag


def collectives_for(group: dist.ProcessGroup | None, device: torch.device, tag: MessageTag | None = None) -> Collectives:
    """The collectives on `group` (None: this rank alone), in the form that suits its backend."""
    if group is None or group.size() == 1:
        return SingleRank()
    backend = _torch.backend_name(group, device)
    if device.type == "cpu" and backend == "gloo":
        return GlooCollectives(group, tag)
    # Backends that have ReduceOp.AVG; that of torch's tests has everything.
    return CoalescedCollectives(group, averages=_torch.is_nccl(backend) or backend == "fake")
