"""Constants of GPUs and networks, each with its source: speed of compute, memory and communication."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import torch

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Gpu:
    """Constants of one GPU and its machine.

    Args:
        name: name for `--gpu`.
        memory: bytes of device memory for torch, the driver and NCCL together.
        bf16: peak of dense matrix products in bf16 and fp16, in flop/s.
        fp32: peak of dense matrix products in fp32, in flop/s (torch's default, without TF32).
        bandwidth: memory bandwidth, in bytes/s.
        link: bus bandwidth of a collective inside one machine, in bytes/s.
        per_node: number of GPUs of one machine.
        matmul: fraction of the peak that matrix products reach if their smallest dim is 4096; see
            `matmul_fraction` for other sizes.
        attention: fraction of the peak that attention reaches in 16-bit forward, with head size 128 and infinitely long
            sequences without a mask; see `attention_fraction` for other cases.
        attention_fp32: the same fraction in fp32.
        streaming: fraction of the bandwidth that elementwise kernels reach.
        launch: host seconds for one operator of a forward or backward.
        overlap: factor by which compute slows down during a collective.
        context: the part of `memory` that the driver and NCCL use, in bytes.
        host: bytes of host memory per GPU that offloading may use.
        synchronous: True for the CPU, where the host cannot run ahead of the device.
        fp8: peak of matrix products in 8-bit floats, None if the GPU has no such products.
        source: source of the figures.

    Example:
        >>> GPUS["h100-sxm"].per_node
        8
    """

    name: str
    memory: int
    bf16: float
    fp32: float
    bandwidth: float
    link: float
    per_node: int = 8
    matmul: float = 0.54
    attention: float = 0.35
    attention_fp32: float = 0.35
    streaming: float = 0.80
    launch: float = 6e-6
    overlap: float = 1.05
    context: int = 2 * GIB
    host: int = 256 * GIB
    synchronous: bool = False
    fp8: float | None = None
    source: str = ""

    def peak(self, dtype: torch.dtype | None) -> float:
        """Return the peak of matrix products in a dtype.

        Args:
            dtype: dtype of the inputs; None means fp32.

        Returns:
            The peak in flop/s.

        Raises:
            ValueError: if the GPU has no matrix products in this dtype.

        Example:
            >>> GPUS["h100-sxm"].peak(torch.bfloat16)
            989000000000000.0
        """
        if dtype is not None and dtype.is_floating_point and dtype.itemsize == 1:
            if self.fp8 is None:
                raise ValueError(
                    f"{self.name} has no matrix products in {str(dtype).removeprefix('torch.')}. Choose another gpu, or bf16."
                )
            return self.fp8
        return self.bf16 if dtype in (torch.bfloat16, torch.float16) else self.fp32


@dataclass(frozen=True, slots=True)
class Network:
    """Constants of the network between machines.

    Args:
        name: name for `--net`.
        per_gpu: bytes/s of one GPU's share of the network cards; the bandwidth of a machine is the sum over its GPUs.
        efficiency: fraction of this bandwidth that a collective reaches.
        hop: seconds of each step of a ring between machines.
        step: seconds of each step of a ring inside one machine.
        base: fixed seconds of each collective.
        source: source of the figures.

    Example:
        >>> NETWORKS["ib-400"].per_gpu
        50000000000.0
    """

    name: str
    per_gpu: float
    efficiency: float = 0.80
    hop: float = 14e-6
    step: float = 3.4e-6
    base: float = 8.4e-6
    source: str = ""


_SHEETS = (
    "vendors' data sheets (dense peaks); link: torch 2.13 _inductor/comm_analysis.py; attention: FlashAttention-2, -3 "
    "(arXiv 2307.08691, 2407.08608); matmul: fitted to one published run of A100 and one of H100 (docs/explain.md), and taken "
    "over for the others"
)
_NCCL = "nccl src/graph/tuning.cc (latencies of the simple protocol)"

GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100-40", int(39.4 * GIB), 312e12, 19.5e12, 1.555e12, 240e9, matmul=0.67, attention=0.72, source=_SHEETS),
        Gpu("a100-80", int(79.2 * GIB), 312e12, 19.5e12, 2.039e12, 240e9, matmul=0.67, attention=0.72, source=_SHEETS),
        Gpu("h100-sxm", int(79.1 * GIB), 989e12, 67e12, 3.35e12, 370e9, attention=0.374, fp8=1979e12, source=_SHEETS),
        Gpu("h100-96", int(95.0 * GIB), 989e12, 67e12, 2.4e12, 370e9, attention=0.374, fp8=1979e12, source=_SHEETS),
        Gpu("h200", int(139.8 * GIB), 989e12, 67e12, 4.8e12, 370e9, attention=0.374, fp8=1979e12, source=_SHEETS),
        Gpu("b200", int(178.3 * GIB), 2250e12, 80e12, 8e12, 720e9, fp8=4500e12, source=_SHEETS),
        Gpu("mi300x", int(191.5 * GIB), 1307e12, 163.4e12, 5.3e12, 315e9, fp8=2614e12, source="AMD; link: 7 x 64 GB/s, 70%"),
        Gpu(
            "cpu", 16 * GIB, 50e9, 50e9, 8e9, 1.5e9, per_node=1 << 20, matmul=0.9, launch=4e-6, overlap=1.3,
            context=GIB // 4, synchronous=True, source="two cores of a shared machine; better: python -m fullshard calibrate",
        ),
    )
}  # fmt: skip
"""Presets by name."""

DEFAULT_GPU = "h100-sxm"

NETWORKS: dict[str, Network] = {
    network.name: network
    for network in (
        Network("ib-200", 25e9, source=f"HDR, one card per GPU; {_NCCL}"),
        Network("ib-400", 50e9, source=f"NDR, one card per GPU; {_NCCL}"),
        Network("ib-800", 100e9, source=f"XDR, one card per GPU; {_NCCL}"),
        Network("efa-400", 6.25e9, source=f"400 Gb/s per machine of eight; {_NCCL}"),
        Network("ethernet-100", 1.5625e9, hop=50e-6, source="100 Gb/s per machine of eight, TCP"),
        Network("gloo", 1.5e9, efficiency=1.0, hop=100e-6, step=100e-6, base=100e-6, source="loopback of one machine"),
    )
}
"""Presets by name."""


def gpu_of(name: str | Path | Gpu) -> Gpu:
    """Return a preset by its name, a GPU from a file of `calibrate`, or the given `Gpu`."""
    if isinstance(name, Gpu):
        return name
    if str(name) in GPUS:
        return GPUS[str(name)]
    return _from_file("gpu", Gpu, name, GPUS)


def network_of(name: str | Path | Network | None, gpu: Gpu) -> Network:
    """Return a preset by its name, a network from a file of `calibrate`, or the given `Network`; None: the default of `gpu`."""
    if isinstance(name, Network):
        return name
    if name is None:
        by_gpu = "ib-200" if gpu.name.startswith("a100") else "ib-800" if gpu.name == "b200" else "ib-400"
        name = "gloo" if gpu.synchronous else by_gpu
    name = str(name)
    return NETWORKS[name] if name in NETWORKS else _from_file("net", Network, name, NETWORKS)


# Fields of `Gpu` and `Network` that must be above 0 in a file of `calibrate`.
_POSITIVE_GPU = ("memory", "bf16", "fp32", "bandwidth", "link", "per_node", "matmul", "attention", "streaming", "overlap")
_POSITIVE_NETWORK = ("per_gpu", "efficiency")

_Kind = TypeVar("_Kind")


def _from_file(key: str, kind: Callable[..., _Kind], name: str | Path, presets: Mapping[str, object]) -> _Kind:
    path = Path(name)
    if path.suffix != ".json":
        raise ValueError(f"{key}={str(name)!r} is unknown. Pass one of {', '.join(presets)}, or a .json of `calibrate`.")
    if not path.is_file():
        problem = "is a directory" if path.is_dir() else "does not exist"
        raise ValueError(
            f"{key}={str(name)!r} {problem}. `python -m fullshard calibrate --out {path.name}` writes such a file."
        )
    try:
        fields = json.loads(path.read_text())[key]
        for field in (*_POSITIVE_GPU, *_POSITIVE_NETWORK):
            if field in fields and not (isinstance(fields[field], (int, float)) and fields[field] > 0):
                raise ValueError(f"{field} is {fields[field]!r}, expected a number above 0")
        return kind(**fields)
    except OSError as failure:
        raise ValueError(f"{key}={str(name)!r} cannot be read: {(failure.strerror or str(failure)).lower()}.") from None
    except (ValueError, KeyError, TypeError, AttributeError) as failure:
        raise ValueError(
            f"{key}={str(name)!r} is no file of `calibrate` ({failure}). Write it again with `python -m fullshard calibrate`."
        ) from None


def write_machine(path: Path, gpu: Gpu, network: Network) -> None:
    """Write a JSON file for `explain(gpu=..., net=...)`."""
    path.write_text(json.dumps({"gpu": asdict(gpu), "net": asdict(network)}, indent=1) + "\n")


# --- speed of matrix products and attention by their sizes ---
# A kernel with little work per block of its output is slower. Its speed is size / (size + half) of that of large ones, where
# `half` is the size at which it reaches half of its best speed.

MATMUL_HALF_SIZE = 450
"""Smallest size of a matrix product that reaches half the speed of an infinitely large one, on accelerators.

Fitted to two published runs (benchmarks/predictions.py: MPT 760m and 7b on H100, 2,048 tokens).
"""

MATMUL_REFERENCE_SIZE = 4096
"""Smallest size of the matrix product that `Gpu.matmul` describes."""

_ATTENTION: dict[tuple[bool, bool, int], tuple[float, int]] = {  # by (backward, causal, largest head size)
    (False, False, 64): (0.88, 76),
    (False, False, 128): (1.0, 101),
    (False, False, 256): (0.88, 95),
    (False, True, 64): (0.82, 355),
    (False, True, 128): (0.93, 413),
    (False, True, 256): (0.82, 390),
    (True, False, 64): (0.79, 248),
    (True, False, 128): (0.88, 268),
    (True, False, 256): (0.79, 268),
    (True, True, 64): (0.74, 990),
    (True, True, 128): (0.82, 1070),
    (True, True, 256): (0.74, 1070),
}
"""(speed of infinitely long sequences, half) of FlashAttention-2 on an H100.

The speed is relative to its forward with head size 128 and no mask, which reaches 370 Tflop/s.

Source: FlashAttention-3 (arXiv 2407.08608), figures 5 and 6, the columns of FlashAttention-2. The figures have no causal
backward and no head size 256. The causal backward is scaled by the ratio of the forward, head size 256 by that of head size 64.
"""


def attention_fraction(*, backward: bool, causal: bool, head: int, length: int) -> float:
    """Return the speed of attention as a fraction of `Gpu.attention`. With a causal mask, flops count half of the matrix.

    `head`: head size of the queries. `length`: number of keys per row.
    """
    size = next((known for known in (64, 128) if head <= known), 256)
    best, half = _ATTENTION[backward, causal, size]
    return best * length / (length + half)


def matmul_fraction(rows: int, inner: int, columns: int) -> float:
    """Return the speed of a product of (rows, inner) by (inner, columns) as a fraction of `Gpu.matmul`."""
    least = max(1, min(rows, inner, columns))
    return (1 + MATMUL_HALF_SIZE / MATMUL_REFERENCE_SIZE) / (1 + MATMUL_HALF_SIZE / least)
