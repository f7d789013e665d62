"""Support for foresight, which runs one step on meta tensors.

Several contexts let it detect features of torch that it cannot simulate.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fullshard._torch.nn import extended


@contextmanager
def fake_ranks(size: int) -> Iterator[DeviceMesh | None]:
    """Yield a mesh of `size` ranks whose collectives send nothing; None for one rank. The mesh exists in the block only."""
    if size == 1:
        yield None
        return
    if dist.is_initialized():
        raise RuntimeError(
            "Tensor parallelism cannot be simulated here: it needs a process group of fake ranks, and a process group is "
            "initialized already. Call this in a process without one."
        )
    # Private: torch's fake backend, made for its tests. Its collectives complete at once and send nothing.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    finally:
        dist.destroy_process_group()


unsafe_view = torch.ops.aten._unsafe_view
"""View that autograd treats as a new tensor. It computes nothing."""

item = torch.ops.aten._local_scalar_dense
copied = torch.ops.aten._to_copy
"""Operators of a copy to another device or dtype (`copied`) and of `tensor.item()` (`item`)."""


@contextmanager
def meta_kernels(kernels: dict[str, Callable[..., Any]]) -> Iterator[None]:
    """Replace composite aten operators on meta tensors by the functions `kernels` in the block."""
    # Private: `_scoped_library`, which removes the registrations at the end of the block. The key is AutogradMeta: composite
    # operators decompose there, so a kernel for Meta would never be called.
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name, kernel in kernels.items():
            library.impl(name, kernel, "AutogradMeta")
        yield


@contextmanager
def _extended(owner: Any, **instead: Callable[..., Any]) -> Iterator[None]:
    """Replace functions of a module or class in the block, by functions that get the replaced one and its arguments."""
    with ExitStack() as stack:
        for name, function in instead.items():
            stack.callback(extended(owner, name, function))
        yield


def on_numpy(values: Callable[[Tensor], Tensor]) -> AbstractContextManager[None]:
    """Let `tensor.numpy()` of a meta tensor return the array of `values(tensor)` in the block."""

    def made(numpy: Any, tensor: Tensor, *, force: bool = False) -> Any:
        return numpy(values(tensor) if tensor.is_meta else tensor, force=force)

    return _extended(Tensor, numpy=made)


def on_compiled(notify: Callable[[], None]) -> AbstractContextManager[None]:
    """Call `notify` at each call of a function of torch.compile, and run that function without compilation, in the block."""

    def callback(callback_of: Any, asked: Any) -> Any:
        if not callable(asked):  # None disables dynamo, and False only runs code that is compiled already
            return callback_of(asked)
        notify()
        return None

    # Private: `_callback_from_stance`, which every compiled function calls before it runs. The public `set_stance` can also run
    # functions without compilation, but does not report the calls. If torch stops calling it, no call is reported.
    return _extended(torch._dynamo.eval_frame, _callback_from_stance=callback)


def on_activation_offload(notify: Callable[[], None]) -> AbstractContextManager[None]:
    """Call `notify` before torch's `save_on_cpu` starts to keep activations in host memory, in the block."""

    def init(made: Any, *args: Any, **kwargs: Any) -> None:
        notify()
        made(*args, **kwargs)

    # `__init__` rather than the class, so that names imported earlier are covered.
    return _extended(torch.autograd.graph.save_on_cpu, __init__=init)


def on_context_parallel(notify: Callable[[], None]) -> AbstractContextManager[None]:
    """Call `notify` when context parallelism takes over attention, in the block."""
    import torch.distributed.tensor.experimental._context_parallel._attention as attention  # imported late: 12 ms

    def enable(before: Any, *args: Any, **kwargs: Any) -> Any:
        notify()
        return before(*args, **kwargs)

    # Private: the function by which the public `context_parallel` switches the dispatcher. If torch stops calling it, context
    # parallelism is not detected.
    return _extended(attention, _enable_context_parallel_dispatcher_impl=enable)


def on_autocast(notify: Callable[[], None]) -> AbstractContextManager[None]:
    """Call `notify` before an enabled torch.autocast is created or entered, in the block."""
    signature = inspect.signature(torch.autocast)

    def init(made: Any, autocast: Any, *args: Any, **kwargs: Any) -> None:
        # before `made`, which warns and disables it if the machine has no such device
        if signature.bind(*args, **kwargs).arguments.get("enabled", True):
            notify()
        made(autocast, *args, **kwargs)

    def enter(entered: Any, autocast: Any) -> Any:
        if autocast._enabled:  # Private: so an instance that was created before the block is caught
            notify()
        return entered(autocast)

    return _extended(torch.autocast, __init__=init, __enter__=enter)
