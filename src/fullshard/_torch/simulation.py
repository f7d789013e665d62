"""Support for foresight, which runs one step on meta tensors.

Several contexts let it detect features of torch that it cannot simulate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


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
def _replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Replace attributes of a class or module in the block."""
    before = {name: getattr(owner, name) for name in attributes}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextmanager
def on_numpy(values: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Let `tensor.numpy()` of a meta tensor return the array of `values(tensor)` in the block."""
    numpy = Tensor.numpy

    def made(self: Tensor, *, force: bool = False) -> Any:
        return numpy(values(self) if self.is_meta else self, force=force)

    Tensor.numpy = made  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del Tensor.numpy  # the method is inherited from the C base class again


@contextmanager
def on_compiled(notify: Callable[[], None]) -> Iterator[None]:
    """Call `notify` at each call of a function of torch.compile, and run that function without compilation, in the block."""
    # Private: `_callback_from_stance`, which every compiled function calls before it runs. The public `set_stance` can also run
    # functions without compilation, but does not report the calls. If torch stops calling it, no call is reported.
    callback_of = torch._dynamo.eval_frame._callback_from_stance

    def callback(asked: Any) -> Any:
        if not callable(asked):  # None disables dynamo, and False only runs code that is compiled already
            return callback_of(asked)
        notify()
        return None

    with _replaced(torch._dynamo.eval_frame, _callback_from_stance=callback):
        yield


@contextmanager
def on_activation_offload(notify: Callable[[], None]) -> Iterator[None]:
    """Call `notify` before torch's `save_on_cpu` starts to keep activations in host memory, in the block."""
    # Replaces `__init__` rather than the class, so that names imported earlier are covered.
    offload: Any = torch.autograd.graph.save_on_cpu
    made = offload.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        notify()
        made(self, *args, **kwargs)

    with _replaced(offload, __init__=init):
        yield


@contextmanager
def on_context_parallel(notify: Callable[[], None]) -> Iterator[None]:
    """Call `notify` when context parallelism takes over attention, in the block."""
    import torch.distributed.tensor.experimental._context_parallel._attention as attention  # imported late: 12 ms

    # Private: the function by which the public `context_parallel` switches the dispatcher. If torch stops calling it, context
    # parallelism is not detected.
    before = attention._enable_context_parallel_dispatcher_impl

    def enable(*args: Any, **kwargs: Any) -> Any:
        notify()
        return before(*args, **kwargs)

    with _replaced(attention, _enable_context_parallel_dispatcher_impl=enable):
        yield


@contextmanager
def on_autocast(notify: Callable[[], None]) -> Iterator[None]:
    """Call `notify` before an enabled torch.autocast is created or entered, in the block."""
    # Private: `_enabled`. An instance that was created before the block is caught when it is entered.
    init, enter = torch.autocast.__init__, torch.autocast.__enter__

    def made(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None) -> None:
        if enabled:  # before `init`, which warns and disables it if the machine has no such device
            notify()
        init(self, device_type, dtype, enabled, cache_enabled)

    def entered(self: Any) -> Any:
        if self._enabled:
            notify()
        return enter(self)

    with _replaced(torch.autocast, __init__=made, __enter__=entered):
        yield
