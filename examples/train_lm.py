"""Train a byte-level decoder language model on Python's own standard library, sharded over every process.

    torchrun --nproc-per-node 2 examples/train_lm.py                    # about three minutes on two cores
    torchrun --nproc-per-node 3 examples/train_lm.py --resume --steps 600   # resume on another number of ranks
    torchrun --nproc-per-node 2 examples/train_lm.py --compare --steps 50   # train the unsharded model too, and compare
    torchrun --nproc-per-node 2 examples/train_lm.py --foresight            # compare the run with a prediction

The training text is the source code of the standard library, which every machine has. The model is built on meta, sharded
block by block, and then materialized from one seed on all ranks, so the first weights are the same on any number of ranks.
Each batch depends only on the step, and each rank takes its rows of the batch. So a run has the same losses on any number of
ranks that divides the batch. `--out` is the folder for checkpoints (torch.distributed.checkpoint), a plot of the loss curves
and a JSON file of figures. With GPUs, the same command uses nccl and one process per GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import sys
import sysconfig
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

# The profiler, which counts memory for `--foresight` on the CPU, prints nothing.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

import fullshard
from fullshard.wrap import ModuleWrapPolicy

BYTES = 256


# --- the model ---------------------------------------------------------------------------------------------------------


class Rotary(nn.Module):
    """Rotary position embedding (Su et al., arXiv 2104.09864). Its tables are computed and in no checkpoint."""

    def __init__(self, dim: int, length: int) -> None:
        super().__init__()
        self.dim, self.length = dim, length
        self.register_buffer("cos", torch.empty(length, dim // 2), persistent=False)
        self.register_buffer("sin", torch.empty(length, dim // 2), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        frequency = 10000.0 ** (-torch.arange(0, self.dim, 2, device=self.cos.device) / self.dim)
        angle = torch.outer(torch.arange(self.length, device=self.cos.device), frequency)
        with torch.no_grad():
            self.cos.copy_(angle.cos())
            self.sin.copy_(angle.sin())

    def forward(self, x: Tensor) -> Tensor:  # (batch, heads, length, dim)
        even, odd = x[..., 0::2], x[..., 1::2]
        cos, sin = self.cos[: x.shape[-2]].to(x.dtype), self.sin[: x.shape[-2]].to(x.dtype)
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


class Block(nn.Module):
    """RMSNorm, causal attention with rotary positions, RMSNorm, SwiGLU."""

    def __init__(self, dim: int, heads: int, length: int) -> None:
        super().__init__()
        hidden = 8 * dim // 3 // 16 * 16
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.gate, self.up = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)
        self.rotary = Rotary(dim // heads, length)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(self.rotary(q), self.rotary(k), v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, dim))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    def __init__(self, dim: int, depth: int, heads: int, length: int, recompute: bool) -> None:
        super().__init__()
        self.recompute, self.length = recompute, length
        self.embed = nn.Embedding(BYTES, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, length) for _ in range(depth))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, BYTES, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute and self.training else block(x)
        return self.head(self.norm(x))


def initialise(module: nn.Module) -> None:
    """Initialise a module; embeddings get small values, so that the first loss is that of uniform guessing."""
    module.reset_parameters()
    if isinstance(module, nn.Embedding):
        module.weight.mul_(0.02)


# --- the data ----------------------------------------------------------------------------------------------------------


def corpus(limit: int) -> tuple[Tensor, Tensor]:
    """Return (training bytes, validation bytes): standard library modules in order of name, every tenth file for validation."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(
        path
        for folder in (root, root / "json", root / "asyncio", root / "email", root / "unittest")
        for path in folder.glob("*.py")
    )
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for index, path in enumerate(files):
        parts[index % 10 == 0].append(path.read_bytes())
    train, valid = (torch.frombuffer(bytearray(b"\n".join(part)[:limit]), dtype=torch.uint8) for part in parts)
    return train, valid[: limit // 10]


def entropy(text: Tensor) -> float:
    """Return the entropy of the byte frequencies, in nats: the best loss of a model that ignores context."""
    p = torch.bincount(text.long(), minlength=BYTES).double() / len(text)
    return float(-(p[p > 0] * p[p > 0].log()).sum())


def rows(text: Tensor, *, seed: int, count: int, length: int, mine: slice) -> tuple[Tensor, Tensor]:
    """Return this rank's rows of the global batch `seed`: inputs and targets, each (rows, length).

    The rows are chosen by a separate generator, so that the global random state stays the same on all ranks.
    """
    starts = torch.randint(0, len(text) - length - 1, (count,), generator=torch.Generator().manual_seed(seed))[mine]
    windows = torch.stack([text[start : start + length + 1] for start in starts.tolist()]).long()
    return windows[:, :-1], windows[:, 1:]


# --- the run -----------------------------------------------------------------------------------------------------------


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--schedule", type=int, help="steps of the learning-rate schedule (default: --steps)")
    parser.add_argument("--batch", type=int, default=24, help="rows of the global batch; the number of ranks must divide it")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per step, communicating only in the last")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--dim", type=int, default=192)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16, reduce in float32")
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing of every block")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --out")
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--compare", action="store_true", help="train the same steps unsharded too, and compare the losses")
    parser.add_argument(
        "--foresight", action="store_true", help="measure this machine, predict a step, and compare (half a minute)"
    )
    parser.add_argument("--corpus", type=int, default=4_000_000, help="bytes of text to use at most")
    parser.add_argument("--sample", type=int, default=200, help="bytes of code to generate at the end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/lm"))
    return parser.parse_args()


def start() -> tuple[torch.device, int, int]:
    """Start the process group and return (device, rank, number of ranks)."""
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    for name, value in (("RANK", rank), ("WORLD_SIZE", ranks), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", 29500)):
        os.environ.setdefault(name, str(value))
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl")
    else:
        device = torch.device("cpu")
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
        dist.init_process_group("gloo")
    return device, rank, ranks


def build(o: argparse.Namespace, device: torch.device, ranks: int) -> nn.Module:
    """Build the model on meta, shard it and materialize it, so that no rank ever holds the whole model."""
    torch.manual_seed(o.seed)  # one seed on all ranks: with different seeds each rank would hold shards of a different model
    with torch.device("meta"):
        model = Decoder(o.dim, o.depth, o.heads, o.length, o.recompute)
    mesh = init_device_mesh(device.type, (ranks,))
    mp = fullshard.MixedPrecisionPolicy()
    if o.bf16:
        mp = fullshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fullshard.fully_shard(block, mesh=mesh, mp_policy=mp)
    fullshard.fully_shard(model, mesh=mesh, mp_policy=mp)
    return fullshard.materialize(model, device, init=initialise, seed=o.seed)


def learning_rate(step: int, o: argparse.Namespace) -> float:
    """Return the rate of a step: linear warmup over a twentieth of the schedule, then cosine decay to a tenth."""
    total = o.schedule or o.steps
    warmup = max(1, total // 20)
    if step < warmup:
        return o.lr * (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    return o.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def loss_of(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).float().flatten(0, 1), targets.flatten())


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    text: Tensor,
    step: int,
    o: argparse.Namespace,
    mine: slice,
    device: torch.device,
) -> Tensor:
    """Run one optimizer step and return the mean loss of this rank's rows."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, o)
    total = torch.zeros((), device=device)
    for micro in range(o.accumulate):
        ids, targets = rows(text, seed=step * o.accumulate + micro, count=o.batch, length=o.length, mine=mine)
        last = micro == o.accumulate - 1
        with nullcontext() if last or not isinstance(model, fullshard.FSDPModule) else model.accumulate():
            loss = loss_of(model, ids.to(device), targets.to(device)) / o.accumulate
            loss.backward()
        total += loss.detach()
    sharded = isinstance(model, fullshard.FSDPModule)
    (fullshard.clip_grad_norm_ if sharded else nn.utils.clip_grad_norm_)(model.parameters(), o.clip)
    optimizer.step()
    optimizer.zero_grad()
    return total


def mean_over_ranks(value: Tensor) -> float:
    value = value.clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


@torch.no_grad()
def validate(model: nn.Module, text: Tensor, o: argparse.Namespace, mine: slice, device: torch.device) -> float:
    model.eval()
    total = torch.zeros((), device=device)
    for index in range(4):
        ids, targets = rows(text, seed=10_000_000 + index, count=o.batch, length=o.length, mine=mine)
        total += loss_of(model, ids.to(device), targets.to(device)) / 4
    model.train()
    return mean_over_ranks(total)


@torch.no_grad()
def sample(model: nn.Module, prompt: bytes, count: int, device: torch.device, seed: int) -> str:
    """Generate text. All ranks call this and generate the same bytes, since each forward all-gathers parameters from all ranks."""
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt)
    for _ in range(count):
        logits = model(torch.tensor([ids[-model.length :]], device=device))[0, -1].float().cpu() / 0.7
        ids.append(int(torch.multinomial(logits.softmax(-1), 1, generator=generator)))
    model.train()
    return bytes(ids).decode("utf-8", errors="replace")


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory of this rank in bytes: of the device, or of the process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Checkpoints:
    """Checkpoints in one folder per saved step, which can be loaded on any number of ranks."""

    def __init__(self, out: Path) -> None:
        self._out = out

    def _state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments}

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        dcp.save(self._state(model, optimizer), checkpoint_id=self._out / f"step-{step:06d}")

    def last(self) -> int | None:
        found = sorted(int(p.parent.name.split("-")[1]) for p in self._out.glob("step-*/.metadata"))
        return found[-1] if found else None

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        step = self.last()
        if step is None:
            raise SystemExit(f"--resume: no checkpoint in {self._out}")
        state = self._state(model, optimizer)
        dcp.load(state, checkpoint_id=self._out / f"step-{step:06d}")
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        return step


def adamw(model: nn.Module, o: argparse.Namespace) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=o.lr, betas=(0.9, 0.95), weight_decay=0.1)


def plain_copy(model: nn.Module, o: argparse.Namespace, device: torch.device) -> nn.Module:
    """Return the unsharded model with the same weights."""
    plain = Decoder(o.dim, o.depth, o.heads, o.length, o.recompute)
    plain.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
    return plain.to(device)


# --- foresight ---------------------------------------------------------------------------------------------------------

RECORDED = range(3, 24)
"""Steps to record, counted from the first step of the run. On the CPU one of the first of them counts memory."""


def predicted(o: argparse.Namespace, ranks: int) -> fullshard.Explanation:
    """Predict a step of this job from measured constants of this machine. Collective, since all ranks measure together."""
    machine = o.out / "machine.json"
    fullshard.calibrate(machine)
    share = o.batch // ranks
    targets = torch.empty(share, o.length, dtype=torch.long, device="meta")
    bf16 = fullshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fullshard.explain(
        lambda: Decoder(o.dim, o.depth, o.heads, o.length, o.recompute),
        targets,
        world=ranks,
        gpu=machine,
        net=machine,
        plan=ModuleWrapPolicy({Block}),
        mp_policy=bf16 if o.bf16 else fullshard.MixedPrecisionPolicy(),
        loss=lambda logits: F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()) / o.accumulate,
        keep_output=False,  # the training loop keeps no reference to the logits
        optimizer=lambda parameters: torch.optim.AdamW(parameters, betas=(0.9, 0.95), weight_decay=0.1),
        microbatches=o.accumulate,
    )


def draw(path: Path, curves: dict[str, list[float]], valid: dict[int, float], floor: float) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, losses in curves.items():
        axes.plot(losses, label=name, linewidth=1)
    axes.plot(list(valid), list(valid.values()), "o-", label="validation")
    axes.axhline(floor, linestyle="--", color="grey", label="byte frequencies")
    axes.set(xlabel="step", ylabel="loss, nats per byte")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    o = options()
    warnings.filterwarnings("ignore", message="Detected an existing checkpoint")  # of an earlier run: it is replaced
    device, rank, ranks = start()
    if o.batch % ranks:
        raise SystemExit(f"--batch {o.batch} does not divide among {ranks} ranks")
    share = o.batch // ranks
    mine = slice(rank * share, (rank + 1) * share)
    train, valid = corpus(o.corpus)
    floor = entropy(valid)
    model = build(o, device, ranks)
    optimizer = adamw(model, o)
    checkpoints = Checkpoints(o.out)
    first = checkpoints.load(model, optimizer) if o.resume else 0
    curves: dict[str, list[float]] = {"sharded": []}
    plain = plain_copy(model, o, device) if o.compare else None
    plain_optimizer = adamw(plain, o) if plain is not None else None
    if plain is not None:
        curves["unsharded"] = []
    if rank == 0:
        o.out.mkdir(parents=True, exist_ok=True)
        numel = sum(p.numel() for p in model.parameters())
        print(f"{numel:,} parameters on {ranks} ranks ({device.type}), {len(train):,} bytes of Python to learn from")
    terminal = sys.stdout.isatty()  # elsewhere, as in a log, each checkpoint is a line instead of the bar
    bar: Iterator[int] | Any = tqdm(
        range(first, o.steps),
        initial=first,
        total=o.steps,
        disable=rank != 0 or not terminal,
        file=sys.stdout,
        mininterval=1.0,
        dynamic_ncols=True,
        bar_format="{percentage:3.0f}%|{bar}| step {n_fmt} of {total_fmt}, {remaining} left{postfix}",
    )
    history: dict[int, float] = {}
    recording, run = ExitStack(), None
    begin, seen = time.perf_counter(), 0
    for step in bar:
        if o.foresight and step - first == RECORDED.start:
            run = recording.enter_context(fullshard.record(model, memory=True))
        if step - first == RECORDED.stop:
            recording.close()
        loss = train_step(model, optimizer, train, step, o, mine, device)
        curves["sharded"].append(mean_over_ranks(loss))
        if plain is not None and plain_optimizer is not None:
            other = train_step(plain, plain_optimizer, train, step, o, slice(None), device)
            curves["unsharded"].append(other.item())
        seen += o.batch * o.length * o.accumulate
        speed = seen / (time.perf_counter() - begin)
        bar.set_postfix_str(f"loss {curves['sharded'][-1]:.3f}, {speed:,.0f} tokens/s", refresh=False)
        if (step + 1) % o.save_every == 0 or step + 1 == o.steps:
            checkpoints.save(model, optimizer, step + 1)
            history[step + 1] = validate(model, valid, o, mine, device)
            if rank == 0 and not terminal:
                print(
                    f"step {step + 1} of {o.steps}: validation loss {history[step + 1]:.3f}, {speed:,.0f} tokens/s", flush=True
                )
    recording.close()
    figures = {
        "ranks": ranks,
        "steps": o.steps,
        "first_step": first,
        "byte_frequency_entropy": floor,
        "validation_loss": history[max(history)] if history else None,
        "losses": curves["sharded"],
        "validation": history,
        "tokens_per_second": seen / (time.perf_counter() - begin),
        "peak_bytes": peak_bytes(device),
    }
    if o.compare:
        figures["largest_difference"] = max(abs(a - b) for a, b in zip(curves["sharded"], curves["unsharded"]))
    if run is not None:
        foreseen = predicted(o, ranks)
        figures["measured"] = {"step": run.step, "peak": run.peak}
        figures["predicted"] = {"step": foreseen.step.middle, "peak": foreseen.peak}
        if rank == 0:
            foreseen.html(o.out / "step.html")
            (o.out / "step.txt").write_text(f"{foreseen}\n\nmeasured\n{foreseen.against(run)}\n")
            print(f"a step took {run.step * 1e3:.0f} ms, predicted {foreseen.step.middle * 1e3:.0f} ms", end="")
            print(
                "" if run.peak is None else f"; tensors {run.peak / 2**20:.1f} MiB, predicted {foreseen.peak / 2**20:.1f} MiB"
            )
    generated = sample(model, b"def ", o.sample, device, o.seed) if o.sample else ""
    if rank == 0:
        (o.out / "figures.json").write_text(json.dumps(figures, indent=1))
        draw(o.out / "curves.png", curves, history, floor)
        if history:
            print(f"validation loss {figures['validation_loss']:.3f}; knowing only how frequent each byte is, {floor:.3f}")
        if o.compare:
            print(
                f"largest difference between the sharded and the unsharded loss over {len(curves['sharded'])} steps: {figures['largest_difference']:.2e}"
            )
        if generated:
            print(f"--- a sample ---\n{generated.rstrip()}\n---")
        print(
            f"{o.out} has the checkpoints, the loss curves{', the predicted step (step.html)' if run is not None else ''} and all figures"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
