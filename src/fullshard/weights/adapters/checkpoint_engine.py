"""checkpoint-engine, as of 0.4.2: the parameter server of each rank holds some of the tensors in full."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from fullshard.weights.publish import Publication, Version


def register(server: Any, name: str, publication: Publication, version: Version | None = None) -> None:
    """Register a version with the parameter servers of all ranks, each with about as many bytes. Collective.

    Each shard travels once, to the rank whose server holds the tensor, and from there to memory of the host.

    Args:
        server: the `ParameterServer` of this rank. Unregister an older version before, or after `update()`.
        name: name of the checkpoint, for `gather_metas(name)` and `update(name, ...)`.
        publication: what to register.
        version: None is the latest.

    Example:
        >>> register(server, f"step-{version.step}", pub, version)                            # doctest: +SKIP
        >>> server.gather_metas(f"step-{version.step}")                                       # doctest: +SKIP
        >>> server.update(f"step-{version.step}", request)                                    # doctest: +SKIP
    """
    version, ranks = version or publication.latest, publication.ranks
    ends = list(accumulate(one.nbytes for one in publication.tensors))
    parts: dict[int, list[str]] = {rank: [] for rank in ranks}
    for one, end in zip(publication.tensors, ends):  # by the middle of a tensor, so that each rank has one part in order
        parts[ranks[(2 * end - one.nbytes) * len(ranks) // (2 * ends[-1] + 1)]].append(one.name)
    mine = {
        key: tensor.to("cpu", copy=True)
        for rank, names in parts.items()
        for key, tensor in publication.full(version, to=rank, names=names)
    }
    server.register_checkpoint(name, named_tensors=mine)
