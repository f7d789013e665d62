"""vLLM's weight transfer, as in vLLM 0.33: sources of full tensors and of shards, patches, and the step as the version."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import Shard
from vllm.distributed.weight_transfer import base

from fullshard.weights.changes import Changes
from fullshard.weights.description import PublishedTensor
from fullshard.weights.publish import Publication


class FullSource(base.WeightSource):
    """Full tensors of the latest version, for the engines that ask for `iter_full()`.

    Args:
        publication: what to send. `send_weights()` reads its latest version.
        to: 0 for "nccl", where the first rank sends; "all" for "ipc" and "sharded_rdt", where each rank does.

    Example:
        >>> source = FullSource(pub)                                                          # doctest: +SKIP
        >>> engine = WeightTransferTrainerFactory.trainer_init(                               # doctest: +SKIP
        ...     info, client=StepClient(client, pub), source=source
        ... )
        >>> pub.seal(step)                                                                    # doctest: +SKIP
        >>> engine.send_weights()  # on all ranks                                             # doctest: +SKIP
    """

    def __init__(self, publication: Publication, to: Literal[0, "all"] = 0) -> None:
        self._publication, self._to = publication, to

    @cached_property
    def metadata(self) -> list[Any]:
        """Name, dtype, shape and owners of each tensor."""
        owners = None if self._to == "all" else (self._to,)
        return [base.ParamMeta(one.name, one.dtype, one.shape, owners=owners) for one in self._publication.tensors]

    def iter_full(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the full tensors on the ranks that own them. Collective."""
        return self._publication.full(to=self._to)


class ShardSource(base.WeightSource):
    """This rank's shards of the latest version, for "nccl_m2n"; full tensors where M2N does not take the shards.

    Args:
        publication: what to send. `send_weights()` reads its latest version.
    """

    def __init__(self, publication: Publication) -> None:
        self._publication = publication

    @cached_property
    def metadata(self) -> list[Any]:
        """Name, dtype, shape, owners, mesh and placements of each tensor."""
        return [
            _layout(one) if self._takes(one) else base.ParamMeta(one.name, one.dtype, one.shape)
            for one in self._publication.tensors
        ]

    def iter_local(self) -> Iterator[tuple[str, Tensor]]:
        """Yield shards, or full tensors. Collective."""
        for one, tensor in self._publication.local_or_full(None, self._takes):
            yield one.name, tensor

    def _takes(self, one: PublishedTensor) -> bool:
        """Return True for a tensor with a shard on every rank."""
        return one.mesh is not None and not one.not_m2n and one.mesh.size() == len(self._publication.ranks)


class StepClient:
    """Client of an engine, which passes the step of the published weights as their version.

    Args:
        client: any of vLLM's clients.
        publication: what is sent.
    """

    def __init__(self, client: Any, publication: Publication) -> None:
        self._client, self._publication = client, publication
        self.init_weight_transfer_engine = client.init_weight_transfer_engine
        self.start_weight_update, self.update_weights = client.start_weight_update, client.update_weights

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End the update, with the step as the version of the weights unless the caller has another one."""
        self._client.finish_weight_update(weight_version=weight_version or str(self._publication.latest.step))


def patches(changes: Changes) -> list[Any]:
    """Return changes as patches of "sparse_nccl", for `send_weights(patches)` on the rank that received the changes.

    Args:
        changes: of `Publication.changed`. The engine must have their base: it does not check that.

    Returns:
        A patch per tensor; one that is changed as a whole has all its positions.
    """
    from vllm.distributed.weight_transfer.sparse_nccl_engine import SparseWeightPatch

    found = {name: (*pair, changes.shapes[name]) for name, pair in changes.elements.items()}
    for name, full in changes.full.items():
        positions = torch.arange(full.numel(), dtype=torch.int32, device=full.device)
        found[name] = positions, full.flatten(), tuple(full.shape)
    return [SparseWeightPatch(name, *patch) for name, patch in found.items()]


def _layout(one: PublishedTensor) -> Any:
    assert one.mesh is not None
    ranks, shape = tuple(one.mesh.mesh.flatten().tolist()), tuple(one.mesh.mesh.shape)
    placements = tuple(base.Shard(place.dim) if isinstance(place, Shard) else base.Replicate() for place in one.placements)
    return base.ParamMeta(one.name, one.dtype, one.shape, owners=ranks, mesh_shape=shape, placements=placements)
