"""`python -m fullshard explain` and `calibrate`: their options, and what they print."""

from __future__ import annotations

import argparse
from ast import literal_eval
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import torch

from fullshard.foresight.calibrate import calibrate
from fullshard.foresight.explanation import Explanation, explain
from fullshard.foresight.hardware import GPUS, NETWORKS
from fullshard.foresight.optimizer import OPTIMIZERS
from fullshard.foresight.question import Question
from fullshard.foresight.search import Goal, search
from fullshard.policies import CPUOffloadPolicy, MixedPrecisionPolicy

Load = Callable[[str], Any]
ONLY_VERIFY = ("steps", "shard", "seed", "tolerance", "ranks")


def add_explain(commands: Any) -> None:
    """The command line of `explain`."""
    to = commands.add_parser("explain", help="say whether a model fits, what a step costs, and where memory and time go")
    to.add_argument(
        "factory", help="module:function or file.py:function, which returns (build, batch) or a dict of explain()'s arguments"
    )
    to.add_argument("--world", type=int, required=True, help="how many ranks")
    to.add_argument("--mesh", help="replicas x ranks, as in 8x16 (default: parameters are cut over all ranks)")
    to.add_argument("--with", dest="given", action="append", default=[], metavar="NAME=VALUE", help="passed on to the factory")
    to.add_argument("--gpu", help=f"{', '.join(GPUS)}, or a .json of calibrate (default: h100-sxm)")
    to.add_argument("--net", help=f"{', '.join(NETWORKS)}, or a .json of calibrate (default: what such GPUs usually have)")
    to.add_argument(
        "--plan", action="append", default=[], help="file.py:name or module:name of a policy or plan; several are compared"
    )
    to.add_argument("--dtype", choices=("bf16", "fp32"), help="computes in it, reduces in fp32 (default: bf16 on a GPU)")
    to.add_argument("--reduce-dtype", choices=("bf16", "fp32"), help="of gradients on their way (default: fp32)")
    to.add_argument("--reshard", help="reshard_after_forward: true, false, or a number of ranks")
    to.add_argument("--offload", action="store_true", help="shards, gradients and states in the host's memory")
    to.add_argument("--optimizer", help=f"{', '.join(OPTIMIZERS)} (default: adamw)")
    to.add_argument("--microbatches", type=int, help="forwards and backwards per step (default: 1)")
    to.add_argument("--recompute", help="none, block, or every:2 (default: none)")
    to.add_argument("--engine", choices=("fullshard", "fsdp2"), help="with the copies and buffers of torch's FSDP2, to compare")
    to.add_argument("--expandable-segments", action="store_true", help="the allocator runs with expandable_segments:True")
    to.add_argument("--find", choices=get_args(Goal), help="search for settings, too: print those that no other beats")
    to.add_argument("--price", type=float, help="of an hour of one GPU")
    to.add_argument("--html", help="write pictures here")
    to.add_argument("--png", help="write pictures here, by matplotlib")
    to.add_argument("--perfetto", help="write a trace for ui.perfetto.dev here")
    to.add_argument("--json", help="write the figures here")


def add_calibrate(commands: Any) -> None:
    """The command line of `calibrate`."""
    to = commands.add_parser("calibrate", help="measure this machine, in less than a minute, for explain's --gpu and --net")
    to.add_argument("--out", default="machine.json", help="file to write (default: machine.json)")
    to.add_argument("--ranks", type=int, help="processes to start (default: one for each GPU, or two on the CPU)")


def run_calibrate(options: argparse.Namespace) -> None:
    """Measure, write and print."""
    gpu, network = calibrate(options.out, ranks=options.ranks)
    print(
        f"products {gpu.fp32 / 1e9:,.0f} Gflop/s in fp32, {gpu.bf16 / 1e9:,.0f} in bf16; memory {gpu.bandwidth / 1e9:.1f} "
        f"GB/s; {gpu.launch * 1e6:.1f} us for an operator; messages {gpu.link / 1e9:.2f} GB/s and {network.base * 1e6:.0f} us "
        f"each; computing {gpu.overlap:.2f} times as long while one is under way\nwritten: {options.out}"
    )


def run_explain(options: argparse.Namespace, parts: dict[str, Any], load: Load) -> int:
    """Explain, print and write. Returns 0 if it fits, 1 if it does not.

    Raises:
        ValueError: for what cannot be told.
    """
    told = {**{name: value for name, value in parts.items() if name not in ONLY_VERIFY}, **_told(options)}
    unknown = set(told) - set(Question.__dataclass_fields__)
    if unknown:
        raise ValueError(
            f"the factory gives {min(unknown)!r}, which is no argument of explain(): {', '.join(Question.__dataclass_fields__)}"
        )
    plans = [load(name) for name in options.plan] or [told.pop("plan", "auto")]
    told.pop("plan", None)
    found = [explain(**told, plan=plan) for plan in plans]
    for name, r in zip(options.plan or [""], found):
        print(f"{name}:\n{r}" if len(found) > 1 else r)
    if options.find:
        print(search(**told, plan=plans[0], goal=options.find))
    _write(options, found)
    return 0 if found[0].fits else 1


def _told(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `explain` that the command line gives."""
    told: dict[str, Any] = {"world": options.world}
    if options.expandable_segments:
        told["expandable_segments"] = True
    for name in ("gpu", "net", "price", "optimizer", "microbatches", "recompute", "engine"):
        if getattr(options, name) is not None:
            told[name] = getattr(options, name)
    if options.mesh is not None:
        told["mesh"] = _sizes(options.mesh)
    if options.dtype is not None or options.reduce_dtype is not None:
        computes = None if options.dtype == "fp32" else torch.bfloat16
        told["mp_policy"] = MixedPrecisionPolicy(computes, torch.bfloat16 if options.reduce_dtype == "bf16" else torch.float32)
    if options.reshard is not None:
        told["reshard_after_forward"] = _reshard(options.reshard)
    if options.offload:
        told["offload_policy"] = CPUOffloadPolicy()
    return told


def given(options: argparse.Namespace) -> dict[str, Any]:
    """What the factory is called with: numbers as numbers, the rest as text.

    Raises:
        ValueError: for what is no NAME=VALUE.
    """
    found: dict[str, Any] = {}
    for text in options.given:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"--with takes NAME=VALUE, as in length=8192, got {text!r}")
        try:
            found[name] = literal_eval(value)
        except (ValueError, SyntaxError):
            found[name] = value
    return found


def _sizes(text: str) -> tuple[int, ...]:
    parts = text.lower().split("x")
    if not all(part.strip().isdigit() for part in parts):
        raise ValueError(f"--mesh takes sizes, as in 8x16, got {text!r}")
    return tuple(int(part) for part in parts)


def _reshard(text: str) -> bool | int:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if not text.isdigit():
        raise ValueError(f"--reshard takes true, false, or a number of ranks, got {text!r}")
    return int(text)


def _write(options: argparse.Namespace, found: list[Explanation]) -> None:
    first, *others = found
    if options.html:
        first.html(options.html, *others)
    if options.png:
        first.png(options.png)
    if options.perfetto:
        first.perfetto(options.perfetto)
    if options.json:
        first.json(options.json)
    for path in (options.html, options.png, options.perfetto, options.json):
        if path:
            print(f"written: {Path(path)}")


__all__ = ["add_calibrate", "add_explain", "given", "run_calibrate", "run_explain"]
