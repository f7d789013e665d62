"""An accelerator that is as asynchronous as a GPU, without one: device "sim", `torch.sim`, and the backend "sccl" of its messages.

device.cpp is a backend of torch: each operator is queued on the current stream and computed later, by that stream's thread, with
the kernels of the CPU. What a program must order on CUDA it must order here, or its numbers are wrong:

- Kernels hold no reference to their memory. The allocator has a pool per stream, gives what is freed out again at once, and
  overwrites it with NaN first, in the order of its stream.
- Code of the host that reads or writes device memory faults: tensors hold addresses of a mapping that nobody may use.
- Pinned memory is read and written when the stream gets there. Copies from pageable memory are staged, copies to it wait.
- A collective that is not asynchronous runs on the current stream and returns no work, others on a stream of the group's.
- An error of a stream is raised at the next wait of the host.

`torch.sim.Graph` and `torch.sim.graph` are as `torch.cuda.CUDAGraph` and `torch.cuda.graph`: device.cpp says what they record, and
what spoils a capture.

It has one device, no priorities and no triton. Shapes of results come from the meta device; what that does not know, and
random numbers, are computed by the host behind a wait, which `launches()` counts. LayerNorm and attention are taken apart into
other operators, so their last bits differ from those of the CPU.

Environment, read when it is loaded: SIM_POISON=0 hands memory out as it is, 2 overwrites it as soon as it is freed, which is
stricter than CUDA. SIM_PROTECT=0 lets the host use device memory. SIM_MEMORY_MB is how much there is (8192). With SIM_HANG a
collective with a process that is gone never ends, unless its group is aborted, as one of nccl.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import gc
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sysconfig
import time
import types
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.utils._device import DeviceContext, _device_constructors

SOURCE = Path(__file__).with_name("device.cpp")
NEEDS = "the asynchronous device is built from tests/device/device.cpp, which takes Linux and g++"


def compiler() -> str | None:
    """The compiler that builds it; None where there is none, or no Linux."""
    return shutil.which("g++") if os.uname().sysname == "Linux" else None


def library() -> Path:
    """Where it is once it is built."""
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]
    folder = Path(__file__).parents[2] / "build" / "device"
    return folder / f"{torch.__version__}-{sysconfig.get_python_version()}-{digest}.so"


def build() -> Path:
    """Build it for the installed torch, unless that was done; half a minute. Raises RuntimeError with what g++ said."""
    built = library()
    if built.exists():
        return built
    built.parent.mkdir(parents=True, exist_ok=True)
    with open(built.with_name("building"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several lanes the first builds
        if not built.exists():
            _build(built)
    return built


def _build(built: Path) -> None:
    from torch.utils.cpp_extension import include_paths, library_paths

    mine = built.with_suffix(".part")
    command = [compiler() or "g++", "-std=c++20", "-O1", "-w", "-fPIC", "-shared", "-DTORCH_EXTENSION_NAME=device"]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", f"-I{sysconfig.get_paths()['include']}"]
    command += [f"-I{path}" for path in include_paths()] + [f"-L{path}" for path in library_paths()]
    command += [str(SOURCE), "-o", str(mine), "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"g++ could not build {SOURCE}\n{done.stderr[-4000:]}")
    mine.rename(built)


class _Here(DeviceContext):
    """As `torch.set_default_device()`; random numbers of a generator of the host's are drawn there, then moved."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("generator") is not None and kwargs.get("device") is None and func in _device_constructors():
            return func(*args, **kwargs).to(self.device)
        return super().__torch_function__(func, types, args, kwargs)


def settle_on(device: str) -> None:
    """Have programs that know the CPU only run on a device, in this thread and for good: their tensors, and their meshes."""
    make = device_mesh.init_device_mesh

    def init_device_mesh(kind: str, *args: Any, **kwargs: Any) -> Any:
        return make(device if kind == "cpu" else kind, *args, **kwargs)

    device_mesh.init_device_mesh = dist.init_device_mesh = init_device_mesh
    _Here(torch.device(device)).__enter__()


class _Device:
    """As `torch.cuda.device`, of which there is one."""

    def __init__(self, device: Any) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def load(*, bare: bool = True) -> Any:
    """Make the device known to torch, in this process and for good; returns the extension, which tells of it.

    bare: whether `torch.sim` has no streams, as of some real devices; where torch itself looks for them, it must.

    delay(microseconds, percent, seed): streams sleep up to so long before so many tasks. slow(stream, microseconds): one always.
    waits(), launches(), reset(): what held the host, and what ran, counted. on_wait(function): called for each wait of the host.
    failure(): of a stream, or "".
    """
    spec = importlib.util.spec_from_file_location("device", build())
    assert spec is not None and spec.loader is not None
    torch.utils.rename_privateuse1_backend("sim")
    extension: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)
    torch._register_device_module("sim", _module(extension, bare))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)

    def backend(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return extension.backend(dist.ProcessGroupGloo(store, rank, size, timeout), rank, size, "sccl")

    dist.Backend.register_backend("sccl", backend, devices=["sim"])
    atexit.register(_settle, extension)
    return extension


class Graph:
    """As `torch.cuda.CUDAGraph`. Random numbers cannot be captured, since the host draws them."""

    extension: Any = None

    def __init__(self) -> None:
        self.captured: Any = None

    def capture_begin(self, pool: int | None = None) -> None:
        """Record what the current stream, and those that wait for it, are given from now on, and run none of it."""
        self.extension.begin_capture(pool or 0)

    def capture_end(self) -> None:
        """Raise RuntimeError if the program did what cannot be captured, or left a stream that was not waited for."""
        self.captured = self.extension.end_capture()

    def replay(self) -> None:
        """Run it on the current stream: on the same addresses, with what is in them now."""
        self.captured.replay()

    def pool(self) -> int:
        """The pool of its memory, for another graph that never runs at the same time."""
        return int(self.captured.pool)


@contextlib.contextmanager
def graph(cuda_graph: Graph, pool: int | None = None, stream: Any = None) -> Iterator[None]:
    """As `torch.cuda.graph`: capture the block on a stream of its own."""
    torch.accelerator.synchronize()
    gc.collect()
    outer = torch.accelerator.current_stream()
    stream = stream or _capture_stream()
    stream.wait_stream(outer)
    with stream:
        cuda_graph.capture_begin(pool)
        try:
            yield
        except BaseException:
            with contextlib.suppress(RuntimeError):  # of the same cause
                cuda_graph.capture_end()
            raise
        cuda_graph.capture_end()
    outer.wait_stream(stream)


@functools.cache
def _capture_stream() -> torch.Stream:
    return torch.Stream(device="sim")


def _module(extension: Any, bare: bool) -> types.ModuleType:
    """What torch asks of `torch.sim`. If `bare` no more: streams are those of `torch.Stream` and `torch.accelerator`."""
    module: Any = types.ModuleType("torch.sim")
    module.device = _Device  # in which torch moves storages
    module.current_device = lambda: 0
    module.set_device = lambda device: None
    module.device_count = lambda: 1
    module.is_available = module.is_initialized = lambda: True
    module.init = module._lazy_init = lambda: None
    module._is_in_bad_fork = lambda: False
    module._lazy_call = lambda call, **_: call()
    Graph.extension = extension
    module.Graph, module.graph, module.is_current_stream_capturing = Graph, graph, extension.is_capturing
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16, torch.float32]

    if not bare:
        module.Stream, module.Event = partial(torch.Stream, device="sim"), partial(torch.Event, device="sim")
        module.current_stream = torch.accelerator.current_stream
        module.stream = lambda stream: stream or contextlib.nullcontext()
        module.synchronize = torch.accelerator.synchronize

    def seed(number: int) -> None:
        extension.default_generator().manual_seed(int(number))

    module.manual_seed = module.manual_seed_all = seed
    module.get_rng_state = lambda device=None: extension.default_generator().get_state()
    module.set_rng_state = lambda state, device=None: extension.default_generator().set_state(state) and None
    return module


def _settle(extension: Any) -> None:
    """Give streams a moment to end what they do."""
    until = time.monotonic() + 2
    while not extension.idle() and time.monotonic() < until:
        time.sleep(0.01)


__all__ = ["NEEDS", "build", "compiler", "library", "load", "settle_on"]
