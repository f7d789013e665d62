"""`save_weights()`: each rank writes its own rows of a safetensors checkpoint, which then replaces the old one atomically."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import nn

from fullshard.errors import check_bool, check_float_dtype, check_int
from fullshard.weights.allocating import check_values
from fullshard.weights.background import Saving, StoreRankGroup, join_saves
from fullshard.weights.commit import Extra, Replacement, new_token
from fullshard.weights.headers import SINGLE, FileTensor
from fullshard.weights.key_map import ComputedTensor, KeyMap, MappedTensor, map_keys
from fullshard.weights.layout import CheckpointLayout, lay_out
from fullshard.weights.moving import RowWriter
from fullshard.weights.plan import plan_save
from fullshard.weights.steps import Steps
from fullshard.weights.targets import ModelTensors, OtherValues, from_first_rank, tensors_of
from fullshard.weights.transfer import Progress, Writer, check_progress


@dataclass(frozen=True, slots=True)
class Saved:
    """The report of `save_weights` on this rank.

    Args:
        bytes_written: bytes of tensors that this rank wrote.
        bytes_exchanged: bytes sent to other ranks.
        seconds: total time.
        files: names of the weights files.
        directory: the directory of the files.
        others: names of other files in the directory that may be weights, such as the files of an older model; on the first
            rank only.

    Example:
        >>> save_weights(model, "checkpoint").files                                           # doctest: +SKIP
        ('model.safetensors',)
    """

    bytes_written: int
    bytes_exchanged: int
    seconds: float
    files: tuple[str, ...]
    directory: str
    others: tuple[str, ...] = ()


@overload
def save_weights(  # type: ignore[misc]
    model: nn.Module, directory: str | os.PathLike[str], *, background: Literal[False] = ..., **options: Any
) -> Saved: ...
@overload
def save_weights(  # type: ignore[misc]
    model: nn.Module, directory: str | os.PathLike[str], *, background: Literal[True], **options: Any
) -> Saving[Saved]: ...
def save_weights(  # type: ignore[misc]
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    max_shard_bytes: int = 5_000_000_000,
    dtype: torch.dtype | None = None,
    key_map: KeyMap = None,
    extra: Extra | None = None,
    weights: OtherValues | None = None,
    step: int | None = None,
    keep: int | None = None,
    filename: str = SINGLE,
    each_rank: Callable[[Path], object] | None = None,
    threads: int = 8,
    buffer_bytes: int = 256 << 20,
    progress: Progress | None = None,
    background: bool = False,
) -> Saved | Saving[Saved]:
    """Save a model as an ordinary safetensors checkpoint, byte for byte as `save_pretrained` writes it. Collective.

    Every rank writes its own rows to their final place in the files. Replicated rows are divided among their ranks; the first
    rank writes tensors that are not sharded, since other ranks may have other values of buffers. Ranks that have only columns
    of a tensor first send them to each other, so that each writes complete rows. A rank uses at most `buffer_bytes` of memory
    in addition to its shards; more for a single row of over a quarter of that, and with `background` also a copy of its rows.
    The new checkpoint is written to a temporary directory next to `directory`, and the two are swapped atomically at the end:
    `directory` always contains either the complete old checkpoint or the complete new one.

    Args:
        model: sharded or not.
        directory: on a file system that all ranks share. Other files in it are kept, including files that are created during
            the save. A second save to it at the same time raises an error. A program that opens several files by path at the
            end of a save may get files of both checkpoints. `load_weights` does not; and with `step`, no program does that
            resolves `latest` once and opens the files of that step. If the directory cannot be swapped (it is a mount point or
            the current directory, or its parent is not writable), a warning is issued, and files are moved into it one by one.
            If there are several weights files, they get names that are unique to this save, and their index is moved last.
        max_shard_bytes: maximum bytes of the tensors in one file. A larger tensor gets a file of its own.
        dtype: dtype of the floating-point tensors in the files. None keeps the dtype of the shards.
        key_map: maps names of the model to names in the files, as in `load_weights`, but without `Convert`.
        extra: further files of the checkpoint, written by the first rank: a dict of names and contents (text, bytes, or the
            path of a file), or a function that gets a folder and writes files into it.
        weights: an EMA or a sealed Version to save instead of the parameters, in its dtype unless `dtype` is given.
        step: training step. The checkpoint becomes the directory `step-{step}` in `directory`, next to the directories of other
            steps, and at the end the link `latest` points to it.
        keep: number of most recently saved steps to keep. None keeps all.
        filename: name of the weights file if there is a single one, such as "adapter_model.safetensors" to save only adapters
            (with `key_map=[Keep("lora_")]`). Several files are numbered before the suffix. Weights with other names in the
            directory are kept, and the report lists them.
        each_rank: called on every rank with the path of the temporary directory, to add files of this rank to the checkpoint,
            such as its optimizer state. The file names must differ between ranks.
        threads: number of threads that write at the same time.
        buffer_bytes: host memory for data that cannot be written directly from the shards: other dtypes and devices, rows of
            other ranks.
        progress: called periodically on each rank with the bytes written so far and the total bytes to write. With
            `background`, it is called in the thread of the save. An exception in it ends the save on all ranks.
        background: True copies the rows of this rank to host memory, returns, and writes the copies in a thread while training
            goes on and changes the weights. Each rank needs memory for its rows. The thread runs no collectives: the ranks
            coordinate through the store of the process group.

    Returns:
        The report of this rank; with `background` a `Saving`, whose `wait()` returns the report. The next `save_weights` or
        `load_weights` and the end of the process wait for it, too.

    Raises:
        ValueError: on every rank, before anything is written: if the disk is too full, rules do not match, parameters have
            no values, ranks have other values of a parameter that is written once, the directory is a file or the root, or
            another save to it is running.
        RuntimeError: on every rank: if a rank could not write, now or in an earlier background save. The directory is
            unchanged. If everything is written and only the swap fails, the text has the path of the new, complete
            checkpoint, which is kept until a later save to this directory succeeds.
        StateError: inside a forward or backward.

    Example:
        >>> save_weights(model, "checkpoint", extra={"config.json": config.to_json_string()})  # doctest: +SKIP
    """
    began = time.perf_counter()

    def checked_steps() -> Steps | None:
        check_progress(progress)
        for name, value in (("max_shard_bytes", max_shard_bytes), ("threads", threads), ("buffer_bytes", buffer_bytes)):
            check_int(name, value)
        check_float_dtype("dtype", dtype, optional=True)
        check_bool("background", background)
        if weights is not None and not isinstance(weights, OtherValues):
            raise ValueError(f"weights must be an EMA, a Version or None, got {type(weights).__name__}.")
        if keep is not None and step is None:
            raise ValueError(f"keep={keep!r} needs step=. Pass step= as well.")
        if not isinstance(filename, str) or os.path.basename(filename) != filename or not filename.endswith(".safetensors"):
            raise ValueError(
                f"filename must be a name that ends in .safetensors, such as 'adapter_model.safetensors', got {filename!r}."
            )
        return None if step is None else Steps(directory, step, keep)

    tensors = tensors_of(model, prepare=lambda unit: unit.reshard(doing="save_weights()"))
    live, group = tensors, tensors.agreement("save_weights()")
    steps = group.run(checked_steps)
    tensors = from_first_rank(group.run(lambda: live if weights is None else weights.over(live)))
    group.run(join_saves)
    check_values(model, tensors, "save_weights()")
    layout, outputs = group.run(lambda: _outputs(tensors, key_map, dtype, max_shard_bytes, filename))
    group.run(lambda: tensors.check_copies(group))
    pieces = [[(p.source.name, p.geometry) for p in mapped.pieces] for _, mapped in outputs]
    options = buffer_bytes, weights is not None, each_rank is not None, background, step, keep
    if not group.all_equal(repr((layout, pieces, options)).encode("utf-8", "backslashreplace")):
        raise ValueError(
            "One of key_map, dtype, max_shard_bytes, filename, buffer_bytes, weights, each_rank, background, step and keep "
            "differs between ranks. Pass the same on all ranks."
        )
    limit = max(1, buffer_bytes // 4)
    plan = plan_save(outputs, rank=tensors.index, ranks=len(tensors.ranks), limit=limit)
    where = directory if steps is None else steps.directory
    token = group.first_rank_bytes(group.run(lambda: new_token(where)).encode()).decode()
    replacement, is_first = Replacement(where, token, filename), group.index == 0
    writer = Writer(replacement.path, threads=threads, progress=progress, total=plan.nbytes)
    local = {entry.target.name: entry.local for entry in tensors.entries}
    rows = RowWriter(group, local, writer, limit, in_background=background)
    # All ranks connect before any of them continues, because connecting to a store whose process has ended blocks for minutes.
    store_group = None
    if background and len(group.ranks) > 1:
        store_group = group.run(lambda: StoreRankGroup(token, group.index, len(group.ranks)))

    def check_shared() -> None:
        if not replacement.path.is_dir():
            raise ValueError(
                f"save_weights(): this rank does not see what the first rank writes, {replacement.path}. Pass the same "
                "directory on all ranks, on a file system that they share."
            )

    def commit() -> None:
        if is_first:
            replacement.commit()
            if steps is not None:
                steps.publish()

    def discard() -> None:
        writer.close()
        replacement.discard()

    def finish() -> Saved:
        """Finish the writes, sync them to disk and move the checkpoint into place. Collective."""
        try:
            for work in (writer.finish, writer.sync, commit):
                (store_group or group).run(work)
        except BaseException:
            discard()
            raise
        finally:
            if store_group is not None:
                store_group.close()
        writer.close()
        files = tuple(replacement.name_in_place(file.name) for file in layout.files)
        seconds = time.perf_counter() - began
        return Saved(writer.done, rows.exchange.sent, seconds, files, str(replacement.directory), replacement.others)

    try:
        group.run(lambda: replacement.prepare(layout) if is_first else None)
        group.run(check_shared)
        rows.run(plan)
        group.run(lambda: replacement.add(extra if is_first else None))
        if each_rank is not None:
            group.run(lambda: replacement.add(each_rank, "each_rank"))
        if not background:
            return finish()
    except BaseException:
        discard()
        if store_group is not None:
            store_group.abandon()
        raise
    return Saving(replacement.directory, finish)


def _outputs(
    tensors: ModelTensors, key_map: KeyMap, dtype: torch.dtype | None, max_shard_bytes: int, filename: str
) -> tuple[CheckpointLayout, list[tuple[FileTensor, MappedTensor]]]:
    """Return the layout of the files, and (place in a file, values from tensors of the model) for each tensor in them."""
    tensors.check_not_on_meta()
    mapped = map_keys(key_map, tensors.state)
    for name, one in mapped.items():
        if any(isinstance(piece.source, ComputedTensor) for piece in one.pieces):
            raise ValueError(
                f"save_weights() does not support Convert, got one for '{name}'. Save first, then convert the files."
            )
    if tensors.entries and not mapped:
        raise ValueError("key_map leaves no tensor to save: its rules drop all names, or its function returned None for all.")
    parameters = sum(entry.target.numel for entry in tensors.entries if entry.is_parameter)
    return lay_out(mapped, dtype, max_shard_bytes=max_shard_bytes, parameters=parameters, name=filename)
