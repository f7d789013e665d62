"""Measurement of this machine's constants, `calibrate()`: speed of compute, memory, and the library's own collectives."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from fullshard import _torch
from fullshard.core import HostStream, Started, Work, collectives_for
from fullshard.foresight.hardware import DEFAULT_GPU, GIB, GPUS, NETWORKS, Gpu, Network, attention_fraction, write_machine

SIZES = ((512, 256, 256), (1024, 256, 768), (1024, 512, 512), (512, 1024, 1024))
"""Sizes (m, k, n) of the matrix products measured on a CPU: small models, as run on CPUs."""

LARGE = ((4096, 4096, 4096), (8192, 4096, 11008), (8192, 8192, 8192))
"""Sizes (m, k, n) of the matrix products measured on an accelerator."""


_LENGTH, _HEAD = 4096, 128  # of the attention measured on an accelerator
_FORWARD, _BACKWARD = 4, 10  # flops of attention per pair of positions and element of a head


def calibrate(out: str | Path, *, ranks: int | None = None) -> tuple[Gpu, Network]:
    """Measure this machine, in less than a minute, and write a file for `explain(gpu=..., net=...)`.

    All ranks measure at the same time, as they compute at the same time in training. With a process group, or under torchrun,
    its ranks take part, so that collectives between machines are measured, too. Otherwise this function starts `ranks`
    processes.

    Args:
        out: path of the JSON file.
        ranks: number of processes to start; None is one for each GPU, or two on the CPU.

    Returns:
        The measured constants.

    Raises:
        ValueError: if `ranks` is less than 1, or is given although this process is a rank already; or if machines have
            different numbers of ranks.

    Example:
        >>> calibrate("machine.json")                                                         # doctest: +SKIP
    """
    if ranks is not None and ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks!r}.")
    if ranks is not None and ("RANK" in os.environ or dist.is_initialized()):
        raise ValueError(
            f"ranks={ranks} starts processes, but this one is a rank already. Leave ranks out: all ranks take part."
        )
    if "RANK" in os.environ and not dist.is_initialized():
        if torch.accelerator.is_available():
            torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group(_backends())
        try:
            return _measure_on_all_ranks(Path(out))
        finally:
            dist.destroy_process_group()
    if dist.is_initialized():
        return _measure_on_all_ranks(Path(out))
    started = ranks or torch.accelerator.device_count() or 2
    with tempfile.TemporaryDirectory() as folder:
        spawn(_process, (started, f"{folder}/store", str(out)), nprocs=started)
    found = json.loads(Path(out).read_text())
    return Gpu(**found["gpu"]), Network(**found["net"])


def _process(rank: int, ranks: int, store: str, out: str) -> None:
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(rank)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    dist.init_process_group(_backends(), init_method=f"file://{store}", rank=rank, world_size=ranks)
    _measure_on_all_ranks(Path(out))
    dist.destroy_process_group()


def _backends() -> str:
    """Return the backend of the CPU and, if there is an accelerator, its default backend."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return "gloo"
    return f"cpu:gloo,{accelerator.type}:{dist.get_default_backend_for_device(accelerator)}"


def _measure_on_all_ranks(out: Path) -> tuple[Gpu, Network]:
    """Measure on all ranks, write the medians on rank 0, and return them. Collective."""
    accelerator = _torch.accelerator()
    device = _torch.device_of("cpu" if accelerator is None else accelerator.type)
    mine = _Bench(device, _ranks_in_machine(device)).measure()
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    middle = {name: median(one[name] for one in found) for name in mine}
    gpu, network = _constants(device, middle)
    if dist.get_rank() == 0:
        write_machine(out, gpu, network)
    dist.barrier()
    return gpu, network


def _ranks_in_machine(device: torch.device) -> int:
    """Return the number of ranks of one machine. On the CPU, machines are not told apart: all ranks count as one machine.

    Raises ValueError if the machines cannot have equal numbers of ranks.
    """
    ranks = dist.get_world_size()
    if device.type == "cpu":
        return ranks
    each = int(os.environ.get("LOCAL_WORLD_SIZE", torch.accelerator.device_count()))
    if ranks > each and ranks % each:
        raise ValueError(
            f"Expected the same number of ranks on each machine, got {ranks} ranks, which cannot be divided into machines of "
            f"{each}."
        )
    return min(ranks, each)


def _constants(device: torch.device, found: dict[str, float]) -> tuple[Gpu, Network]:
    ranks = dist.get_world_size()
    source = f"measured by calibrate with torch {torch.__version__} on {ranks} ranks"
    factor = 1.0
    if device.type != "cpu":  # from what was measured to `Gpu.attention`: a forward, infinitely long, without a mask
        slower = [attention_fraction(backward=one, causal=True, head=_HEAD, length=_LENGTH) for one in (False, True)]
        factor = (_FORWARD / slower[0] + _BACKWARD / slower[1]) / (_FORWARD + _BACKWARD)
    shared: dict[str, Any] = {
        "name": "measured",
        "matmul": 1.0,
        "attention": factor * found["attention"] / found["bf16"],
        "attention_fp32": factor * found["attention_fp32"] / found["fp32"],
        "streaming": 1.0,
        "source": source,
        **{name: found[name] for name in ("bf16", "fp32", "bandwidth", "launch", "link", "overlap")},
    }
    if device.type == "cpu":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks
        rates = {"per_gpu": found["link"], "base": found["latency"], "step": 0.0, "hop": 0.0}
        return replace(GPUS["cpu"], memory=memory, **shared), replace(NETWORKS["gloo"], name="measured", source=source, **rates)
    _, memory = torch.accelerator.get_memory_info(device)
    inside = _ranks_in_machine(device)
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", torch.accelerator.device_count()))
    shared |= {"memory": memory, "per_node": per_node, "context": 2 * GIB, "fp8": found["fp8"] or None}
    gpu = replace(GPUS[DEFAULT_GPU], **shared)
    network = replace(NETWORKS["ib-400"], name="measured", source=source)
    if inside == ranks:
        return gpu, network
    # The ranks of a machine share its network cards, over which the data of the other machines arrives.
    machines = ranks // inside
    per_gpu = found["between"] * (machines - 1) / machines * ranks / (ranks - 1) / inside
    return gpu, replace(network, per_gpu=per_gpu, efficiency=1.0)


@dataclass
class _Bench:
    """Measurements on one rank."""

    device: torch.device
    inside: int  # number of ranks of one machine

    def measure(self) -> dict[str, float]:
        """Return all constants by name, in flop/s, bytes/s and seconds.

        "overlap" is a factor. "fp8" is 0 if the device has no products in float8. "link" is the bus bandwidth of collectives
        inside one machine; "between" that of collectives of all ranks, 0 if there is one machine.
        """
        sizes = SIZES if self.device.type == "cpu" else LARGE
        found = {
            "fp32": self._products(sizes, torch.float32),
            "bf16": self._products(sizes, torch.bfloat16),
            "bandwidth": self._bandwidth(),
            "launch": self._launch(),
            "attention": self._attention(torch.bfloat16),
            "attention_fp32": self._attention(torch.float32),
            "fp8": 0.0 if self.device.type == "cpu" else self._float8(),
        }
        ranks, own = dist.get_world_size(), dist.group.WORLD
        if ranks == self.inside:
            return {**found, **self._network(sizes, own), "between": 0.0}
        between = self._network(sizes, own)["link"]
        machine, _ = dist.new_subgroups(self.inside)
        return {**found, **self._network(sizes, machine), "between": between}

    def _seconds(self, work: Callable[[], object], *, least: float = 0.3) -> float:
        """Return the median seconds of `work`, run for at least `least` seconds and five times."""
        work()
        self._sync()
        times: list[float] = []
        while sum(times) < least or len(times) < 5:
            began = time.perf_counter()
            work()
            self._sync()
            times.append(time.perf_counter() - began)
        return median(times)

    def _sync(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def _products(self, sizes: tuple[tuple[int, int, int], ...], dtype: torch.dtype) -> float:
        """Return flop/s of matrix products of these sizes: the forward and both backward products of a linear layer."""
        seconds = 0.0
        for m, k, n in sizes:
            x, weight, grad = (torch.randn(shape, device=self.device).to(dtype) for shape in ((m, k), (n, k), (m, n)))

            def work(x: Tensor = x, weight: Tensor = weight, grad: Tensor = grad) -> None:
                _ = x @ weight.t(), grad @ weight, grad.t() @ x

            seconds += self._seconds(work)
        return sum(6 * prod(size) for size in sizes) / seconds

    def _float8(self) -> float:
        """Return flop/s of matrix products in float8, 0 if the device has none."""
        for dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz):  # the second one is AMD's
            try:
                flops = seconds = 0.0
                for m, k, n in LARGE:
                    x, weight = (torch.randn(shape, device=self.device).to(dtype) for shape in ((m, k), (n, k)))
                    seconds += self._seconds(partial(_torch.product_in_float8, x, weight))
                    flops += 2 * m * k * n
                return flops / seconds
            except (RuntimeError, ValueError):
                continue
        return 0.0

    def _bandwidth(self) -> float:
        """Return bytes/s of elementwise kernels that allocate their results, as autograd does."""
        rates = []
        # On the CPU, small results reuse memory that was just freed and large ones get new pages, which is slower. The result
        # is the rate for as many bytes in small results as in large ones.
        for numel in (1 << 18, 1 << 24) if self.device.type == "cpu" else (1 << 26,):
            x, y = torch.randn(2, numel, device=self.device)
            seconds = self._seconds(lambda x=x, y=y: (x * y, x + y, x.sigmoid()))  # type: ignore[misc]
            rates.append(numel * 4 * (3 + 3 + 2) / seconds)
        return len(rates) / sum(1 / rate for rate in rates)

    def _launch(self) -> float:
        """Return the host's seconds per operator on few elements, in forward and backward."""
        x = torch.ones(8, device=self.device, requires_grad=True)

        def work() -> None:
            y = x
            for _ in range(50):
                y = y * 1.01 + 1.0
            y.sum().backward()

        return self._seconds(work) / 200

    def _attention(self, dtype: torch.dtype) -> float:
        """Return flop/s of causal attention, forward and backward; flops of masked positions are not counted."""
        length, heads, dim = (256, 4, 32) if self.device.type == "cpu" else (_LENGTH, 16, _HEAD)
        q = torch.randn(2, heads, length, dim, device=self.device, dtype=dtype, requires_grad=True)

        def work() -> None:
            out = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
            out.backward(out)

        flops = (_FORWARD + _BACKWARD) * 2 * heads * length * length * dim / 2
        return flops / self._seconds(work)

    def _network(self, sizes: tuple[tuple[int, int, int], ...], group: Any) -> dict[str, float]:
        """Return speed and latency of the library's own collectives, and the slowdown of compute during a collective."""

        def begin(start: Callable[[], Started]) -> Work:
            return HostStream().run(start, lambda: None)

        ranks = group.size()
        collectives = collectives_for(group, self.device)
        numel = (1 << 20 if self.device.type == "cpu" else 1 << 26) // ranks * ranks
        full, shard = torch.zeros(numel, device=self.device), torch.zeros(numel // ranks, device=self.device)
        small, part = torch.zeros(256 * ranks, device=self.device), torch.zeros(256, device=self.device)
        gather, tiny = collectives.gatherer([full], [shard]), collectives.gatherer([small], [part])
        # The minimum: noise only adds to a latency, and a late rank would count as latency.
        latency = min(self._times(lambda: begin(tiny).wait()))
        reduce_scatter = partial(collectives.reduce_scatter, [shard], [full], 1.0 / ranks)
        seconds = sum(median(self._times(lambda: begin(start).wait())) for start in (gather, reduce_scatter))
        link = 2 * numel * 4 * (ranks - 1) / ranks / max(seconds / 4, seconds - 2 * latency)
        m, k, n = sizes[-1]
        x, y = torch.randn(m, k, device=self.device), torch.randn(k, n, device=self.device)
        alone = self._seconds(lambda: x @ y)

        def both() -> None:
            pending = begin(gather)
            _ = x @ y
            pending.wait()

        overlapped = median(self._times(both))
        hidden = max(1.0, overlapped / max(alone, seconds / 2))
        return {"link": link if ranks > 1 else 1e12, "latency": latency, "overlap": min(2.0, hidden)}

    def _times(self, work: Callable[[], object]) -> list[float]:
        """Return the seconds of `work`, run equally often on each rank after a barrier."""
        times: list[float] = []
        for _ in range(20):
            dist.barrier()
            began = time.perf_counter()
            work()
            self._sync()
            times.append(time.perf_counter() - began)
        return times
