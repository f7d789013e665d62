"""Compare `load_weights`, `save_weights` and `iter_full` with the functions of torch.

    python benchmarks/weights.py [--ranks 2] [--gigabytes 2] [--repeat 3] [--directory /dev/shm] [--what load "first load" save stream publish]

Loading and saving of an ordinary safetensors checkpoint are compared with torch's distributed checkpoint (its reader and writer
of Hugging Face's format, with consolidation), and with the first rank alone (full state dicts). Each job loads or saves three
times, and the jobs of the libraries are interleaved. Figures are medians of the seconds of the slowest rank, and the largest
growth of resident memory on any rank the first time. "first load" loads once per job, like a training job, with the files in
the page cache (warm) and not (cold). Only fullshard has written the files to the disk when it returns; the others leave them in
the page cache.

Streaming is compared with `full_tensor()` of each parameter, on four ranks, both in one job. A publication of 1 GB is gathered
to the first rank, beside `full_tensor()` of each parameter and the full state dict of torch's distributed checkpoint, and sealed
beside `torch._foreach_copy_` of the shards, on two and four ranks. All ranks communicate by gloo on one machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import record
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import fullshard

DIM, NARROW, WIDE, WORDS = 2048, 512, 5632, 16_384  # sizes of a small Llama
FILE = "model.safetensors"
WHAT = ("load", "first load", "save", "stream", "publish")
WAYS = ("fullshard", "fullshard, background", "DCP", "first rank")


class Block(nn.Module):
    """The 44 million parameters of a decoder block."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"q": (DIM, DIM), "k": (NARROW, DIM), "v": (NARROW, DIM), "o": (DIM, DIM)}
        shapes |= {"gate": (WIDE, DIM), "up": (WIDE, DIM), "down": (DIM, WIDE), "norm": (DIM,), "ffn_norm": (DIM,)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))


class Decoder(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(WORDS, DIM))
        self.blocks = nn.ModuleList(Block() for _ in range(layers))


def numel_of(layers: int) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Decoder(layers).parameters())


def model_of(library: str, layers: int) -> nn.Module:
    """Return a model on meta, sharded block by block."""
    with torch.device("meta"):
        model = Decoder(layers)
    shard: Callable[[nn.Module], object] = fullshard.fully_shard if library.startswith("fullshard") else torch_fully_shard
    for module in (*model.blocks, model):
        shard(module)
    return model


def load(library: str, model: nn.Module, folder: Path) -> None:
    if library == "fullshard":
        fullshard.load_weights(model, folder)
        return
    model.to_empty(device="cpu")
    if library == "DCP":
        dcp.load(model.state_dict(), storage_reader=dcp.HuggingFaceStorageReader(str(folder)))
    else:
        whole = load_file(folder / FILE) if dist.get_rank() == 0 else {}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
        set_model_state_dict(model, whole, options=options)


def save(library: str, model: nn.Module, folder: Path) -> Callable[[], object] | None:
    if library.startswith("fullshard"):
        if library == "fullshard":
            fullshard.save_weights(model, folder)
            return None
        return fullshard.save_weights(model, folder, background=True).wait
    if library == "DCP":
        writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True, enable_consolidation=True)
        dcp.save(model.state_dict(), storage_writer=writer)
        return None
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        folder.mkdir(exist_ok=True)
        save_file(whole, folder / FILE, {"format": "pt"})
    return None


def resident(field: str) -> float:
    """Return the resident memory of this process in MiB: "VmRSS" now, or "VmHWM", the peak since the last `forget`."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) / 1024


def forget() -> None:
    """Reset the peak of resident memory ("VmHWM")."""
    Path("/proc/self/clear_refs").write_text("5")


def measure(what: str, library: str, layers: int, source: Path, target: Path, times: int) -> dict[str, float]:
    """Return this rank's median seconds, and the MiB by which resident memory grew the first time."""
    seconds: list[float] = []
    whole: list[float] = []
    grown: list[float] = []
    for _ in range(times):
        model = model_of(library, layers)
        if what == "save":
            model.to_empty(device="cpu")
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.data.to_local().normal_()  # type: ignore[operator]
            if dist.get_rank() == 0:
                shutil.rmtree(target, ignore_errors=True)
        dist.barrier()
        forget()
        before, begin = resident("VmRSS"), time.perf_counter()
        wait = load(library, model, source) if what == "load" else save(library, model, target)
        seconds.append(time.perf_counter() - begin)
        if wait is not None:
            wait()
        dist.barrier()
        whole.append(time.perf_counter() - begin)
        grown.append(resident("VmHWM") - before)
        del model
    settled = whole if "background" not in library else seconds
    return {"seconds": statistics.median(settled), "whole": statistics.median(whole), "MiB": grown[0]}


def stream(count: int, dim: int, repeat: int) -> dict[str, float]:
    """Return this rank's median seconds of `iter_full` and of `full_tensor` over all parameters."""
    model = nn.Sequential(*[nn.Linear(dim, dim, bias=False) for _ in range(count)])
    for start in range(0, count, 10):
        fullshard.fully_shard(list(model[start : start + 10]))
    fullshard.fully_shard(model)

    def ours() -> None:
        for _, tensor in fullshard.iter_full(model):
            tensor[0, 0].item()

    def theirs() -> None:
        for parameter in model.parameters():
            parameter.full_tensor()[0, 0].item()  # type: ignore[operator]

    times: dict[str, list[float]] = {"iter_full": [], "full_tensor": []}
    for _ in range(repeat + 2):
        for name, run in (("iter_full", ours), ("full_tensor", theirs)):
            dist.barrier()
            begin = time.perf_counter()
            run()
            dist.barrier()
            times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(found[2:]) for name, found in times.items()}


def publish(layers: int, repeat: int) -> dict[str, float]:
    """Return this rank's median seconds of a gather to the first rank, of a seal, and of what torch has for them."""
    model: Any = model_of("fullshard", layers)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    pub = fullshard.publish(model)
    local = [parameter.to_local() for parameter in model.parameters()]
    copies = [[torch.empty_like(one) for one in local] for _ in range(2)]  # as many as the publication keeps

    def gather() -> None:
        for _, tensor in pub.full(to=0):
            tensor.view(-1)[0].item()

    def each() -> None:
        for parameter in model.parameters():
            parameter.full_tensor().view(-1)[0].item()

    def state_dict() -> None:
        get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))

    times: dict[str, list[float]] = {}
    for step in range(repeat + 3):
        calls: dict[str, Callable[[], object]] = {
            "seal": partial(pub.seal, step),
            "foreach copy": partial(torch._foreach_copy_, copies[step % 2], local),
            "full(to=0)": gather,
            "full_tensor": each,
            "full state dict": state_dict,
        }
        for name, run in calls.items():
            dist.barrier()
            begin = time.perf_counter()
            run()
            dist.barrier()
            times.setdefault(name, []).append(time.perf_counter() - begin)
    return {name: statistics.median(found[3:]) for name, found in times.items()}


def cache(path: Path, *, keep: bool) -> None:
    """Read a file into the page cache, or remove it from there."""
    if keep:
        path.read_bytes()
        return
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def as_rank(rank: int, ranks: int, port: int, told: Path, function: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    found = function(*arguments)
    (told / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def job(ranks: int, function: Callable[..., object], *arguments: Any) -> dict[str, float]:
    """Run `function` on `ranks` new processes and return, by name, the largest figure of any rank."""
    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        told = Path(folder)
        mp.start_processes(as_rank, (ranks, port, told, function, arguments), nprocs=ranks, start_method="spawn")
        found = [json.loads(path.read_text()) for path in told.iterdir()]
    return {name: max(one[name] for one in found) for name in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of the checkpoint")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--directory", help="where checkpoints are written (default: that of temporary files)")
    parser.add_argument("--what", nargs="+", default=list(WHAT), choices=WHAT)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args()
    layers = max(1, round((options.gigabytes * 1e9 / 4 - numel_of(0)) / (numel_of(1) - numel_of(0))))
    nbytes = 4 * numel_of(layers)
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(dir=options.directory) as base:
        source = Path(base) / "source"
        job(options.ranks, measure, "save", "fullshard", layers, source, source, 1)
        print(f"checkpoint of {nbytes / 1e9:.2f} GB, {options.ranks} ranks, each with {nbytes / options.ranks / 2**20:.0f} MiB")
        kinds = [one for what in options.what for one in ((f"{what}, warm", f"{what}, cold") if "first" in what else (what,))]
        for what in [one for one in kinds if one not in ("stream", "publish")]:
            ways = [way for way in WAYS if what == "save" or "," not in way]
            found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
            for _ in range(options.repeat):
                for way in ways:
                    target = Path(base) / "target"
                    for path in source.iterdir():
                        cache(path, keep="cold" not in what)
                    kind, times = ("load", 1) if "first" in what else (what, 3)
                    found[way].append(job(options.ranks, measure, kind, way, layers, source, target, times))
                    shutil.rmtree(target, ignore_errors=True)
            for way, listed in found.items():
                results[f"{what}, {way}"] = {key: statistics.median(one[key] for one in listed) for key in listed[0]}
            best = min(results[f"{what}, {way}"]["seconds"] for way in ways if not way.startswith("fullshard"))
            for way in ways:
                one = results[f"{what}, {way}"]
                behind = f", {one['whole']:.2f} s until it is written" if "background" in way else ""
                print(f"{what} {way:21s} {one['seconds']:6.2f} s   {best / one['seconds']:5.2f} times the best of torch   "
                      f"{one['MiB']:6.0f} MiB more{behind}", flush=True)  # fmt: skip
    for label, count, dim in (
        () if "stream" not in options.what else (("300 small parameters", 300, 64), ("16 large parameters", 16, DIM))
    ):
        streamed = job(4, stream, count, dim, 5 * options.repeat)
        results[f"stream, {label}"] = streamed
        print(f"stream {label}: iter_full {1e3 * streamed['iter_full']:.1f} ms, full_tensor {1e3 * streamed['full_tensor']:.1f} ms "
              f"({streamed['full_tensor'] / streamed['iter_full']:.2f} times as fast)", flush=True)  # fmt: skip
    for ranks in (2, 4) if "publish" in options.what else ():
        found_here = job(
            ranks, publish, max(1, round((1e9 / 4 - numel_of(0)) / (numel_of(1) - numel_of(0)))), 3 * options.repeat
        )
        results[f"publish, {ranks} ranks"] = found_here
        print(
            f"publish on {ranks} ranks: " + ", ".join(f"{name} {seconds:.3f} s" for name, seconds in found_here.items()),
            flush=True,
        )
    if options.json:
        print(record.line(results))


if __name__ == "__main__":
    main()
