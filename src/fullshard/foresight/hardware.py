"""Constants of machines, each with its source: how fast a GPU computes, and how fast messages travel."""

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
    """One GPU, and the machine that it is in.

    Args:
        name: as `--gpu` takes it.
        memory: bytes that torch can allocate, contexts included.
        bf16: peak of matrix products in bf16 and fp16, in flop/s, dense.
        fp32: peak in fp32, in flop/s (torch's default, without TF32).
        bandwidth: of its memory, in bytes/s.
        link: bus bandwidth of a collective inside one machine, in bytes/s.
        per_node: GPUs of one machine.
        matmul: the part of the peak that products reach whose smallest size is 4096; `rates` says it of others.
        attention: the part of the peak that the forward of attention reaches, in 16 bits, with heads of 128 and endless
            sequences without a mask; `rates` says it of others.
        attention_fp32: likewise in fp32.
        streaming: the part of the bandwidth that elementwise kernels reach.
        launch: seconds of the host's time for one operator of a forward or backward.
        overlap: by what factor computing takes longer while a message is under way.
        context: bytes that the driver and NCCL take beside what torch reserves.
        host: bytes of the host's memory for each GPU, which offloading may take.
        synchronous: whether the host computes itself (a CPU), so that nothing runs ahead.
        fp8: peak in 8-bit floats, None if it has no such products.
        source: where the figures are from.

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
        """Of matrix products.

        Args:
            dtype: of their inputs; None is taken for fp32.

        Returns:
            The peak in flop/s.

        Raises:
            ValueError: if it has no products of this dtype.

        Example:
            >>> GPUS["h100-sxm"].peak(torch.bfloat16)
            989000000000000.0
        """
        if dtype is not None and dtype.is_floating_point and dtype.itemsize == 1:
            if self.fp8 is None:
                raise ValueError(
                    f"{self.name} has no products in {str(dtype).removeprefix('torch.')}: choose another gpu, or bf16"
                )
            return self.fp8
        return self.bf16 if dtype in (torch.bfloat16, torch.float16) else self.fp32


@dataclass(frozen=True, slots=True)
class Network:
    """What connects machines.

    Args:
        name: as `--net` takes it.
        per_gpu: bytes/s of one GPU's share of the network cards; a node has as many times that as GPUs.
        efficiency: the part of it that a collective reaches.
        hop: seconds for each step of a ring between machines.
        step: seconds for each step of a ring inside one machine.
        base: seconds for each collective.
        source: where the figures are from.

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


def _usual_network(gpu: Gpu) -> str:
    if gpu.synchronous:
        return "gloo"
    return "ib-200" if gpu.name.startswith("a100") else "ib-800" if gpu.name == "b200" else "ib-400"


def gpu_of(asked: str | Path | Gpu) -> Gpu:
    """A preset by its name, one from a file of `calibrate`, or itself.

    Raises:
        ValueError: for a name that there is not, with those that there are.
    """
    if isinstance(asked, Gpu):
        return asked
    if str(asked) in GPUS:
        return GPUS[str(asked)]
    return _from_file("gpu", Gpu, asked, GPUS)


def network_of(asked: str | Path | Network | None, gpu: Gpu) -> Network:
    """As `gpu_of`; None is what such GPUs usually have.

    Raises:
        ValueError: for a name that there is not, with those that there are.
    """
    if isinstance(asked, Network):
        return asked
    name = _usual_network(gpu) if asked is None else str(asked)
    return NETWORKS[name] if name in NETWORKS else _from_file("net", Network, name, NETWORKS)


_POSITIVE = (
    *("memory", "bf16", "fp32", "bandwidth", "link", "per_node", "matmul", "attention", "streaming", "overlap"),
    *("per_gpu", "efficiency"),
)
"""What a file of `calibrate` must have more of than nothing."""

_Kind = TypeVar("_Kind")


def _from_file(key: str, kind: Callable[..., _Kind], asked: str | Path, presets: Mapping[str, object]) -> _Kind:
    path = Path(asked)
    if path.suffix != ".json":
        raise ValueError(f"{key}={str(asked)!r} is not known: give one of {', '.join(presets)}, or a .json of `calibrate`")
    if not path.is_file():
        what = "is a directory" if path.is_dir() else "no such file"
        raise ValueError(f"{key}={str(asked)!r}: {what}; `python -m fullshard calibrate --out {path.name}` writes one")
    try:
        told = json.loads(path.read_text())[key]
        wrong = [name for name in _POSITIVE if name in told and not (isinstance(told[name], (int, float)) and told[name] > 0)]
        if wrong:
            raise ValueError(f"{wrong[0]} is {told[wrong[0]]!r}, expected a number above 0")
        return kind(**told)
    except OSError as failure:
        raise ValueError(f"{key}={str(asked)!r}: {(failure.strerror or str(failure)).lower()}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as failure:
        raise ValueError(f"{key}={str(asked)!r} is no file of `calibrate` ({failure}): have it written anew") from None


def write_machine(path: Path, gpu: Gpu, network: Network) -> None:
    """Write a file that `gpu=` and `net=` take."""
    path.write_text(json.dumps({"gpu": asdict(gpu), "net": asdict(network)}, indent=1) + "\n")


__all__ = ["GIB", "GPUS", "NETWORKS", "Gpu", "Network", "gpu_of", "network_of", "write_machine"]
