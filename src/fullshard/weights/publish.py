"""`publish()`: the weights of a model as inference engines take them, in sealed versions that no step changes."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TypeAlias
from uuid import uuid4

import torch
from torch import Tensor, nn

from fullshard.core import Agreement, Unit
from fullshard.errors import StateError, check_bool, check_float_dtype, check_int, some_of
from fullshard.weights.allocating import check_values
from fullshard.weights.changes import Changes, find_changes
from fullshard.weights.description import PublishedShard, PublishedTensor, describe, shard_of
from fullshard.weights.key_map import KeyMap, MappedTensor, cast_dtype, map_keys
from fullshard.weights.saving import save_weights
from fullshard.weights.streaming import To, is_receiver, stream, written_count
from fullshard.weights.targets import ModelEntry, ModelTensors, from_first_rank, tensors_of, with_values

# The tensors of the model, the memory for them by name, and (memory, shard) to copy.
_Prepared: TypeAlias = tuple[ModelTensors, dict[str, Tensor], list[tuple[Tensor, Tensor]]]


@dataclass(eq=False)
class Version:
    """A sealed version of the published weights: copies of this rank's shards. Made by `Publication.seal`.

    Args:
        number: 1 for the first version of a publication, then 2, ...
        step: the training step that was given to `seal`.
        digest: text of 16 hex digits that stands for the version, equal on all ranks of the model, another for each version.
        tensors: the tensors of the model with the sealed values; None once the version is dropped.
        map: returns what the rules make of them.
    """

    number: int
    step: int
    digest: str
    tensors: ModelTensors | None
    map: Callable[[ModelTensors], dict[str, MappedTensor]]

    @cached_property
    def mapped(self) -> dict[str, MappedTensor]:
        """What the rules make of the tensors, by published name."""
        return self.map(self.sealed())

    @property
    def is_dropped(self) -> bool:
        """True once its memory has later weights."""
        return self.tensors is None

    def __str__(self) -> str:
        return f"version {self.number} (step {self.step}, {self.digest}){'' if self.tensors else ', dropped'}"

    def sealed(self) -> ModelTensors:
        """Return the tensors with the sealed values.

        Returns:
            The tensors of the model.

        Raises:
            StateError: if the version was dropped.
        """
        if self.tensors is None:
            raise StateError(
                f"Version {self.number} (step {self.step}) was dropped, since later versions were sealed. Read a later one, or "
                "publish with a greater keep=."
            )
        return self.tensors

    def over(self, tensors: ModelTensors) -> ModelTensors:
        """Return the sealed tensors instead of those of the model, as `save_weights(weights=version)` writes them.

        Args:
            tensors: those of the model.

        Returns:
            The sealed ones.

        Raises:
            ValueError: if the version is of another model.
            StateError: if the version was dropped.
        """
        known = {one.target.name: one.target.shape for one in tensors.entries}
        if other := [one.target.name for one in self.sealed().entries if known.get(one.target.name) != one.target.shape]:
            raise ValueError(
                f"weights= is a version with {some_of(other)}, and the model has no tensors of these names and shapes. Pass "
                "the model that was published."
            )
        return self.sealed()


class Publication:
    """Weights of a model under the names of a checkpoint. Made by `publish()`; print it for what each transport takes.

    `tensors` describes the published tensors, in the order in which they are sent.

    Args:
        model: as in `publish`.
        rules: as in `publish`.
        dtype: as in `publish`.
        keep: as in `publish`.
        adapters_only: as in `publish`.

    Raises:
        ValueError: as `publish`.
    """

    def __init__(self, model: nn.Module, rules: KeyMap, dtype: torch.dtype | None, keep: int, adapters_only: bool) -> None:
        self._model, self._rules, self._dtype, self._adapters_only = model, rules, dtype, adapters_only
        self._versions: deque[Version] = deque(maxlen=keep)
        self._count = 0
        group = tensors_of(model).agreement("publish()")
        now = group.run(lambda: self._now(model, "publish()"))
        check_values(model, now, "publish()")
        group.run(lambda: now.check_copies(group))
        self.tensors: tuple[PublishedTensor, ...] = group.run(lambda: self._descriptions(now))
        options = [(one.name, one.dtype, one.shape) for one in self.tensors], keep
        if not group.all_equal(repr(options).encode("utf-8", "backslashreplace")):
            raise ValueError(
                "publish() got other rules, dtype, keep or adapters_only on other ranks. Pass the same on all ranks."
            )
        self._token = group.first_rank_bytes(uuid4().hex.encode()).decode()
        self._note(now)

    def _descriptions(self, now: ModelTensors) -> tuple[PublishedTensor, ...]:
        shapes = {one.names[0]: one.local.to("meta", cast_dtype(one.local.dtype, self._dtype)) for one in now.entries}
        mapped, entries = self._map(with_values(now, shapes)), {one.target.name: one for one in now.entries}
        if not mapped:
            raise ValueError("publish() leaves no tensor to publish. Check rules= and adapters_only=.")
        return tuple(describe(name, one, entries) for name, one in mapped.items())

    def __str__(self) -> str:
        """Return what is published, and what each transport takes of it."""
        total = sum(one.nbytes for one in self.tensors)
        lines = [f"{len(self.tensors)} tensors, {_size(total)} in full"]
        for transport, why in (("shards as DTensors", "not_sharded"), ("shards by NCCL M2N", "not_m2n")):
            left = {one.name: getattr(one, why) for one in self.tensors if getattr(one, why)}
            nbytes = sum(one.nbytes for one in self.tensors if one.name in left)
            lines.append(f"{transport}: {len(self.tensors) - len(left)} tensors; {len(left)} are gathered, {_size(nbytes)}")
            reasons: dict[str, list[str]] = {}
            for name, reason in left.items():
                reasons.setdefault(reason, []).append(name)
            lines += [f"    {reason}: {some_of(names)}" for reason, names in reasons.items()]
        return "\n".join(lines)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of the model; (0,) if it is not sharded."""
        return self._known.ranks

    @property
    def latest(self) -> Version:
        """The version that was sealed last.

        Raises:
            StateError: before the first `seal()`.
        """
        if not self._versions:
            raise StateError("No version is sealed. Call seal(step) first.")
        return self._versions[-1]

    @torch.no_grad()
    def seal(self, step: int) -> Version:
        """Copy this rank's shards, in the published dtype, into a new version. Collective.

        The oldest version is dropped if there are more than `keep`, and its memory is used again. Frozen parameters with
        the values of the last version are shared with it.

        Args:
            step: training step of the weights, at least 0.

        Returns:
            The version; nothing that is trained or loaded later changes it.

        Raises:
            ValueError: on all ranks, if `step` is invalid.
            StateError: on all ranks, and nothing is sealed: if `step` differs, inside a forward or backward, while gradients
                are accumulated, or if only some ranks wrote a parameter since the last version.
            RuntimeError: on all ranks, if a rank fails while it copies. The oldest version is dropped then.
        """
        doing = f"seal({step!r})"
        group = self._known.agreement(doing)

        def prepare() -> _Prepared:
            check_int("step", step, least=0)
            now = self._now(self._model, doing)
            if _described(now) != _described(self._known):
                raise StateError(f"{doing}: tensors of the model were added, removed or changed since publish(). Publish anew.")
            return now, *self._allocated(now)

        now, values, copies = self._agreed(group, doing, prepare)
        if self._is_full:  # the memory of the oldest version is overwritten now
            self._versions.popleft().tensors = None
        group.run(lambda: torch._foreach_copy_([copy for copy, _ in copies], [local for _, local in copies]))
        self._count += 1
        digest = sha256(f"{self._token} {self._count} {step}".encode()).hexdigest()[:16]
        # As in a checkpoint, tensors that no unit manages are those of the first rank.
        version = Version(self._count, step, digest, from_first_rank(with_values(now, values)), self._map)
        self._versions.append(version)
        self._note(now)
        return version

    def full(
        self,
        version: Version | None = None,
        *,
        to: To = "all",
        names: Iterable[str] | None = None,
        ahead: int = 1,
        bucket_bytes: int | None = None,
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the full tensors of a version, layer by layer. Collective.

        Args:
            version: None is the latest.
            to: as in `iter_full`.
            names: the published names to yield, in this order; None yields all.
            ahead: as in `iter_full`.
            bucket_bytes: as in `iter_full`.

        Returns:
            An iterator of (name, full tensor), in the order of `names` or of `tensors`. It raises StateError if the version is
            dropped meanwhile.

        Raises:
            ValueError: if an option is invalid, or `names` has a name that is not published.
        """
        check_int("ahead", ahead, least=0)
        check_int("bucket_bytes", 1 if bucket_bytes is None else bucket_bytes)
        is_receiver(to)  # or raise ValueError
        names = None if names is None else list(names)
        if unknown := sorted({*(names or ())} - {one.name for one in self.tensors}):
            raise ValueError(f"names= has {some_of(unknown)}, which are not published. Take names from `tensors`.")
        return self._stream(version or self.latest, to, names=names, ahead=ahead, bucket_bytes=bucket_bytes)

    def shards(self, version: Version | None = None) -> Iterator[PublishedShard]:
        """Yield what this rank has of each published tensor. No communication.

        Args:
            version: None is the latest.

        Yields:
            Descriptions with views of the sealed memory: finish to read them, on all streams, before `keep` further seals.
            Raises StateError if the version is dropped meanwhile.
        """
        version = version or self.latest
        entries, index = {one.target.name: one for one in version.sealed().entries}, version.sealed().index
        for published in self.tensors:
            version.sealed()
            yield shard_of(published, version.mapped[published.name], entries, index)

    def state_dict(self, version: Version | None = None) -> dict[str, Tensor]:
        """Return a version as a state dict, for torch.distributed.checkpoint or torchstore.

        Args:
            version: None is the latest.

        Returns:
            DTensors, and plain tensors where each rank has all of it: views of the sealed memory, so finish to read them, on
            all streams, before `keep` further seals. Those that rules join or split are gathered, which is collective.
        """
        version = version or self.latest
        entries = {one.target.name: one for one in version.sealed().entries}
        found: dict[str, Tensor] = {}
        for one, value in self.local_or_full(version, lambda one: not one.not_sharded):
            if not one.not_sharded:
                parameter = entries[version.mapped[one.name].pieces[0].source.name].parameter
                value = value if parameter is None else parameter.dtensor_like_shard(value)
            found[one.name] = value
        return found

    def local_or_full(
        self, version: Version | None, takes: Callable[[PublishedTensor], bool]
    ) -> Iterator[tuple[PublishedTensor, Tensor]]:
        """Yield each tensor as this rank has it, or in full if a transport does not take that. Collective.

        Args:
            version: None is the latest.
            takes: returns True for a tensor whose local tensors are taken as they lie; equal on all ranks.

        Yields:
            (description, local tensor of the DTensor), or (description, full tensor in memory of its own).
        """
        version = version or self.latest
        left = dict.fromkeys(one.name for one in self.tensors if one.not_sharded or not takes(one))
        gathered = self._stream(version, "all", names=left, doing="shards or full tensors", copy=True)
        for shard in self.shards(version):
            if shard.tensor.name in left:
                yield shard.tensor, next(gathered)[1]
            else:
                assert shard.local is not None
                yield shard.tensor, shard.local

    def changed(self, version: Version | None = None, *, since: Version, to: int = 0) -> Changes:
        """Return what changed between two versions, to the rank that receives. Collective.

        Args:
            version: the newer version; None is the latest.
            since: the older version, which must not be dropped.
            to: global rank that receives.

        Returns:
            By name, positions and values of the changed elements, or the full tensor where that has fewer bytes; empty on other
            ranks.

        Raises:
            ValueError: if `to` is no rank of the model.
            StateError: if a version was dropped, or ranks pass other versions.
        """
        version = version or self.latest
        ranks, receives = version.sealed().ranks, is_receiver(check_int("to", to, least=0))
        if not version.sealed().units:  # each rank has a model of its own
            ranks = (to,) if receives else ()
        elif to not in ranks:
            raise ValueError(f"to must be one of the ranks {ranks} of the model, got {to}.")
        if not ranks:
            return Changes()
        doing = f"changed() from {since.digest} to {version.digest} to rank {to}"
        changes, full = find_changes(since.sealed(), version.sealed(), version.mapped, to, doing)
        changes.full.update(self._stream(version, to, names=full, doing=doing, copy=True))
        if receives:
            changes.base, changes.digest = since.digest, version.digest
        return changes

    def save(
        self,
        directory: str | os.PathLike[str],
        version: Version | None = None,
        *,
        since: Version | None = None,
        keep: int | None = None,
        extra: Mapping[str, str | bytes | os.PathLike[str]] | None = None,
    ) -> str:
        """Save a version, or what changed since another one, for consumers that read files. Collective.

            weights/
                step-100/                 a checkpoint, with publication.json: {"digest": ..., "step": 100}
                latest -> step-100
                changes-100-110.safetensors

        Args:
            directory: on a file system that all ranks share.
            version: None is the latest.
            since: save only what changed since this version, for `Changes.load`; None saves a whole checkpoint.
            keep: number of checkpoints to keep, as in `save_weights`; None keeps all. Files of changes are kept.
            extra: further files of the checkpoint, such as "config.json", as in `save_weights`.

        Returns:
            The path of the checkpoint, or of the file of changes. It is there whole, or not at all.

        Raises:
            ValueError, RuntimeError: as `save_weights`, on all ranks; nothing has changed then.
        """
        version = version or self.latest
        if since is not None and (keep is not None or extra is not None):
            raise ValueError("keep= and extra= are for checkpoints, and since= saves changes alone. Leave them out.")
        if since is None:
            manifest = json.dumps({"digest": version.digest, "step": version.step})
            files = {**(extra or {}), "publication.json": manifest}
            save_weights(
                self._model, directory, key_map=self._rules, weights=version, step=version.step, keep=keep, extra=files
            )
            return os.fspath(Path(directory) / f"step-{version.step}")
        ranks = version.sealed().ranks
        changes = self.changed(version, since=since, to=ranks[0])
        place = Path(directory) / f"changes-{since.step}-{version.step}.safetensors"

        def write() -> None:
            if is_receiver(ranks[0]):
                place.parent.mkdir(parents=True, exist_ok=True)
                changes.save(place)

        version.sealed().agreement("save()").run(write)
        return os.fspath(place)

    # --- what the classes above use ---

    def _stream(
        self,
        version: Version,
        to: To,
        *,
        names: Iterable[str] | None = None,
        ahead: int = 1,
        bucket_bytes: int | None = None,
        doing: str = "full()",
        copy: bool = False,
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield full tensors of a version: those of `names`, or all. Collective."""
        sealed, doing = version.sealed(), f"{doing} of version {version.number}"
        chosen = version.mapped if names is None else {name: version.mapped[name] for name in names}
        if not chosen:
            return
        for named in stream(sealed, chosen, None, to=to, ahead=ahead, bucket_bytes=bucket_bytes, copy=copy, doing=doing):
            yield named
            del named  # frees its memory before the next one is made
            version.sealed()  # raises if the version was dropped while the caller used it

    def _now(self, model: nn.Module, doing: str) -> ModelTensors:
        """Return the tensors of the model that are published, with their present values."""

        def check(unit: Unit) -> None:
            unit.check_idle(doing=doing)
            unit.check_step_over(doing=doing)

        found = tensors_of(model, prepare=check)
        if not self._adapters_only:
            return found
        entries = tuple(one for one in found.entries if one.is_parameter and _is_trainable(one))
        return ModelTensors(entries, found.units, found.ranks, found.index)

    def _note(self, now: ModelTensors) -> None:
        """Note what the next seal compares with."""
        self._known = now
        self._written = {one.target.name: written_count(one) for one in now.entries}

    def _map(self, tensors: ModelTensors) -> dict[str, MappedTensor]:
        """Return what rules make of the tensors: those before the layers, layer after layer, then the others.

        This is the order of vLLM's `layerwise_groups`.
        """
        mapped = map_keys(self._rules, tensors.state)
        stacks: dict[str, int] = {}  # prefixes of layers, in the order of their first ones
        places: dict[str, tuple[int, int]] = {}
        for name in mapped:
            stack, index = _layer_of(name)
            if index is None:
                places[name] = (len(mapped), 0) if stacks else (-1, 0)
            else:
                places[name] = stacks.setdefault(stack, len(stacks)), index
        return {name: mapped[name] for name in sorted(mapped, key=places.__getitem__)}

    def _agreed(self, group: Agreement, doing: str, prepare: Callable[[], _Prepared]) -> _Prepared:
        """Call `prepare`. Raise on all ranks if it fails on one, or only some ranks wrote a parameter since the last version.

        Collective: one message if all is well. Writes are counted by parameter group; a rank that has no elements of one of its
        parameters need not write.
        """
        failure, known = None, self._known.entries
        # For the call, whether it failed; for each tensor, whether it was written. Then, whether that is compared.
        rows = torch.zeros(2, 1 + len(known), dtype=torch.uint8)
        rows[1, 0] = 1
        try:
            prepared = prepare()
            entries = prepared[0].entries
            empty = {id(one.parameter.group()) for one in entries if one.parameter is not None and not one.local.numel()}
            rows[0, 1:] = torch.tensor([written_count(one) != self._written[one.target.name] for one in entries])
            rows[1, 1:] = torch.tensor(
                [one.parameter is not None and id(one.parameter.group()) not in empty for one in entries]
            )
        except Exception as caught:
            failure = caught
            rows[0, 0] = 1
        rows = rows.to(group.device)
        at = group.first_unequal(rows[0].view(-1, 1), rows[1])
        if at == 0 or failure is not None:
            first = group.first_failure(failure)
            assert first is not None
            raise first from failure
        if at is not None:
            raise StateError(
                f"{doing}: '{known[at - 1].names[0]}' or a parameter of its group was written since the last version, or "
                "publish(), on some ranks only: their weights are of different steps. Step on all ranks, then seal."
            )
        return prepared

    @property
    def _is_full(self) -> bool:
        """True if the next version drops the oldest one."""
        return len(self._versions) == self._versions.maxlen

    def _allocated(self, now: ModelTensors) -> tuple[dict[str, Tensor], list[tuple[Tensor, Tensor]]]:
        """Return memory for the shards, by name, and (memory, shard) to copy.

        Frozen parameters with the values of the last version are those of the last version. The others take the memory of the
        version that is dropped.
        """
        dropped = self._versions[0] if self._is_full else None
        last = {} if not self._versions else {one.target.name: one.local for one in self._versions[-1].sealed().entries}
        free = {} if dropped is None else {one.target.name: one.local for one in dropped.sealed().entries}
        others = (version for version in self._versions if version is not dropped)
        in_use = {one.local.data_ptr() for version in others for one in version.sealed().entries}
        values: dict[str, Tensor] = {}
        copies: list[tuple[Tensor, Tensor]] = []
        for entry in now.entries:
            name, local = entry.target.name, entry.local
            memory, dtype = free.get(name), cast_dtype(local.dtype, self._dtype)
            # Counts of writes miss some, as of collectives into a shard. So values are compared.
            if name in last and not _is_trainable(entry) and torch.equal(last[name], local.to(dtype)):
                values[name] = last[name]
                continue
            if memory is None or (memory.shape, memory.dtype) != (local.shape, dtype) or memory.data_ptr() in in_use:
                memory = torch.empty(local.shape, dtype=dtype, device=local.device)
            values[name] = memory
            copies.append((memory, local))
        return values, copies


def publish(
    model: nn.Module, *, rules: KeyMap = None, dtype: torch.dtype | None = None, keep: int = 2, adapters_only: bool = False
) -> Publication:
    """Publish the weights of a model for inference engines: a description, sealed versions, and what changed between them.

    Collective, as are its methods but `shards()` and the description. It moves no bytes to an engine: transports take what it
    yields.

    Args:
        model: sharded or not; its parameters must have values.
        rules: as `key_map` in `save_weights`: from names of the model to names of the checkpoint that the engine knows.
        dtype: dtype of floating-point tensors; None keeps the dtype of the shards.
        keep: number of versions that can be read; each needs memory for this rank's shards in `dtype`.
        adapters_only: True publishes the trainable parameters alone.

    Returns:
        The publication. Print it.

    Raises:
        ValueError: on all ranks, if rules do not fit the model or differ between ranks, if nothing is left to publish, or if
            ranks have other values of a parameter that is published once.
        StateError: inside a forward or backward, or while gradients are accumulated.

    Example:
        >>> pub = publish(model, dtype=torch.bfloat16)                                        # doctest: +SKIP
        >>> version = pub.seal(step=100)                                                      # doctest: +SKIP
        >>> for name, tensor in pub.full(version, to=0):                                      # doctest: +SKIP
        ...     engine.load_weights([(name, tensor)])
    """
    check_float_dtype("dtype", dtype, optional=True)
    check_int("keep", keep)
    check_bool("adapters_only", adapters_only)
    return Publication(model, rules, dtype, keep, adapters_only)


def _described(tensors: ModelTensors) -> list[tuple[object, ...]]:
    return [(one.target.name, one.target.shape, one.target.dtype) for one in tensors.entries]


def _is_trainable(entry: ModelEntry) -> bool:
    if entry.parameter is not None:
        return entry.parameter.sharded.requires_grad
    return entry.plain is not None and (entry.plain.requires_grad or not isinstance(entry.plain, nn.Parameter))


def _layer_of(name: str) -> tuple[str, int | None]:
    """Return prefix and number of a layer: ("model.layers", 3) for "model.layers.3.mlp.weight"; None outside of layers."""
    parts = name.split(".")
    at = next((index for index, part in enumerate(parts) if part.isdigit()), None)
    return (name, None) if at is None else (".".join(parts[:at]), int(parts[at]))


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"
