"""NCCL M2N, as in nccl-extensions 0.1.0: the side of the trainer in `nccl.m2n.reshard`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.distributed.tensor import Replicate

from fullshard.errors import some_of
from fullshard.weights.description import PublishedTensor
from fullshard.weights.publish import Publication, Version


def sources(publication: Publication, version: Version | None = None) -> Iterator[tuple[PublishedTensor, dict[str, Any]]]:
    """Yield each tensor with the arguments that describe it to M2N: its shards, or in full if M2N takes no shards. Collective.

    Args:
        publication: what to send.
        version: None is the latest.

    Yields:
        (description, {"src": tensor, "src_mesh": ranks, "src_placements": placements}).

    Raises:
        ValueError: on all ranks, and nothing is sent: for tensors that M2N does not take in any way.

    Example:
        >>> for one, source in sources(pub):                                                  # doctest: +SKIP
        ...     nccl.m2n.reshard(**source, dst=None, comm=comm, dst_mesh=mesh, dst_placements=places[one.name])
    """
    if wrong := [one.name for one in publication.tensors if not 1 <= len(one.shape) <= 3]:
        raise ValueError(f"M2N takes tensors of 1 to 3 dims, got others in {some_of(wrong)}. Leave them out by rules=.")
    for one, tensor in publication.local_or_full(version, lambda one: one.mesh is not None and not one.not_m2n):
        if one.mesh is not None and not one.not_m2n:  # the shard
            yield one, {"src": tensor, "src_mesh": one.mesh.mesh.tolist(), "src_placements": list(one.placements)}
        else:
            yield one, {"src": tensor, "src_mesh": list(publication.ranks), "src_placements": [Replicate()]}
