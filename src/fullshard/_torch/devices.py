"""Devices, streams, storages, and copies in one kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard._torch.c10d import backend_name

# --- devices and streams ---------------------------------------------------------------------------------------------


def accelerator() -> torch.device | None:
    """Return the accelerator of this machine, without an index; None if the default process group does not support it."""
    found, world = torch.accelerator.current_accelerator(check_available=True), dist.group.WORLD
    try:
        return found if found is not None and world is not None and backend_name(world, found) else None
    except RuntimeError:
        return None


def device_of(kind: str) -> torch.device:
    """Return the device of type `kind` that this rank computes on: the current one of an accelerator."""
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())


def current_stream(device: torch.device) -> torch.Stream:
    """Return the current stream of an accelerator."""
    return torch.accelerator.current_stream(device.index)


def on_stream(stream: Any, fn: Callable[..., Any], *args: Any) -> None:
    """Call `fn` on `stream`, after the work of the current stream. The current stream then waits for `stream`."""
    current = current_stream(stream.device)
    stream.wait_stream(current)
    try:
        with stream:
            fn(*args)
    finally:  # even if `fn` raises: part of its kernels may be queued, and the caller frees their memory
        current.wait_stream(stream)


def then_order(stream: Any, fn: Callable[[], None]) -> None:
    """Call `fn`, then let `stream` wait for the current stream, even if `fn` raises."""
    try:
        fn()
    finally:
        current = current_stream(stream.device)
        if current != stream:
            stream.wait_stream(current)


def wait_for_event(device: torch.device, event: Any) -> None:
    """Let the current stream of `device` wait for `event`."""
    current_stream(device).wait_event(event)


def is_capturing(device: torch.device) -> bool:
    """Return True if the current stream is being captured into a graph; False for a device type without graphs."""
    capturing = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return capturing is not None and capturing()


def relax_capture_mode() -> None:
    """Allow this thread to query events while another thread captures a CUDA graph. Do nothing without CUDA.

    A capture forbids such queries to all threads of the process by default, and a query would end the capture with an error.
    """
    # Private: `torch._C`, whose library is linked with the CUDA runtime that torch uses. Without the symbol, the mode stays.
    name = "hipThreadExchangeStreamCaptureMode" if torch.version.hip else "cudaThreadExchangeStreamCaptureMode"
    if torch.version.cuda or torch.version.hip:
        exchange = getattr(ctypes.CDLL(torch._C.__file__), name, None)
        if exchange is not None:
            exchange(ctypes.byref(ctypes.c_int(2)))  # cudaStreamCaptureModeRelaxed


# --- storages --------------------------------------------------------------------------------------------------------


def storage_key(tensor: Tensor) -> int:
    """Return a number that is equal for all tensors over one storage. It is unique as long as the storage lives."""
    # Private: `_cdata`, the address of the storage in C++. `data_ptr()` is 0 on meta and after `resize_(0)`.
    return tensor.untyped_storage()._cdata


def references(tensor: Tensor) -> tuple[int, int]:
    """Return the numbers of references to a tensor and to its storage."""
    # Private: the C++ reference counts, by which autograd decides whether it may add gradients in place.
    # `_autograd_only_references` in foresight/trace.py measures the counts of a tensor that only autograd refers to, so other
    # counts in another torch do no harm.
    return tensor._use_count(), torch._C._storage_Use_Count(storage_key(tensor))  # type: ignore[attr-defined]


def has_aliases(tensor: Tensor) -> bool:
    """Return True if other tensors share the storage of the plain tensor `tensor`."""
    # Private: the C++ reference count. `tensor` and the Python object of `untyped_storage()` count one each.
    if tensor.device.type == "meta":
        return False
    return torch._C._storage_Use_Count(storage_key(tensor)) > 2


# --- scaling and copies ----------------------------------------------------------------------------------------------


def scale(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply tensors by `factor`, in place. For a single tensor, the plain operator takes half as long."""
    if len(tensors) == 1:
        tensors[0].mul_(factor)
    else:
        torch._foreach_mul_(list(tensors), factor)


def chunk_cat(tensors: Sequence[Tensor], chunks: int, dtype: torch.dtype) -> Tensor:
    """Return (chunks, numel): chunk r of each tensor, along dim 0, in row r, padded with zeros; cast to `dtype`."""
    # Private: `_chunk_cat`, the fused copy-in of FSDP2's reduce-scatter: padding, copy and cast in one kernel.
    made = torch._chunk_cat(tensors, 0, chunks)  # type: ignore[arg-type]
    return made if made.dtype == dtype else made.to(dtype)  # `to` takes 2 us where there is nothing to cast


def chunk_cat_into(tensors: Sequence[Tensor], out: Tensor) -> None:
    """Write `chunk_cat(tensors, len(out), out.dtype)` to `out`."""
    torch._chunk_cat(tensors, 0, out.shape[0], out=out)  # type: ignore[arg-type]
