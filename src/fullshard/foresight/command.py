"""`python -m fullshard explain` and `calibrate`: their options, and what they print."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
from ast import literal_eval
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import torch

from fullshard.foresight.calibrate import calibrate
from fullshard.foresight.explanation import Explanation, explain
from fullshard.foresight.hardware import GPUS, NETWORKS
from fullshard.foresight.optimizer import OPTIMIZERS
from fullshard.foresight.question import Question
from fullshard.foresight.search import Goal, search
from fullshard.foresight.trace import routed
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
    to.add_argument("--tensor-parallel", type=int, help="ranks that share a batch, by the factory's `parallelize` (default: 1)")
    to.add_argument("--per-node", type=int, help="GPUs of one machine (default: what such GPUs usually have)")
    to.add_argument(
        "--plan", action="append", default=[], help="file.py:name or module:name of a policy or plan; several are compared"
    )
    to.add_argument("--dtype", choices=("bf16", "fp32"), help="computes in it, reduces in fp32 (default: bf16 on a GPU)")
    to.add_argument("--reduce-dtype", choices=("bf16", "fp32"), help="of gradients on their way (default: fp32)")
    to.add_argument("--reshard", help="reshard_after_forward: true, false, or a number of ranks")
    to.add_argument("--offload", action="store_true", help="shards, gradients and states in the host's memory")
    to.add_argument("--optimizer", help=f"{', '.join(OPTIMIZERS)} (default: adamw)")
    to.add_argument("--microbatches", type=int, help="forwards and backwards per step (default: 1)")
    to.add_argument("--recompute", help="none, block, selective, or every:2 (default: none)")
    to.add_argument(
        "--footprint",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="what the step is told where it depends on values: model.py:12=True, 'aten::nonzero=routed(1/8, 1.3)', "
        "or a function as NAME=file.py:function",
    )
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
    if options.footprint:
        told["footprints"] = {**told.get("footprints", {}), **_footprints(options.footprint, load)}
    if options.find and len(options.plan) > 1:
        raise ValueError(f"--find searches from one plan, got --plan {len(options.plan)} times: give one of them at a time")
    unknown = set(told) - set(Question.__dataclass_fields__)
    if unknown:
        raise ValueError(
            f"the factory gives {min(unknown)!r}, which is no argument of explain(): {', '.join(Question.__dataclass_fields__)}"
        )
    plans = [_plan(name, load) for name in options.plan] or [told.pop("plan", "auto")]
    told.pop("plan", None)
    found = [explain(**told, plan=plan) for plan in plans]
    better = search(**told, plan=plans[0], goal=options.find) if options.find else None
    written = _write(options, found)
    for name, r in zip(options.plan or [""], found):
        print(f"{name}:\n{r}" if len(found) > 1 else r)
    for line in (*([] if better is None else [better]), *written):
        print(line)
    return 0 if found[0].fits else 1


def _plan(name: str, load: Load) -> Any:
    try:
        return "auto" if name == "auto" else load(name)
    except ValueError as wrong:
        raise ValueError(f"--plan {name}: {wrong}") from wrong


def _told(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `explain` that the command line gives."""
    told: dict[str, Any] = {"world": options.world}
    if options.expandable_segments:
        told["expandable_segments"] = True
    for name in ("gpu", "net", "per_node", "tensor_parallel", "price", "optimizer", "microbatches", "recompute", "engine"):
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
        if name in found:
            raise ValueError(f"--with gives {name!r} twice: give it once")
        try:
            found[name] = literal_eval(value)
        except (ValueError, SyntaxError):
            found[name] = value
    return found


_ROUTED = re.compile(r"routed\(\s*([0-9.]+)\s*(?:/\s*([0-9.]+)\s*)?(?:,\s*([0-9.]+)\s*)?\)")


def _footprints(given: Sequence[str], load: Load) -> dict[str, Any]:
    """Footprints as the command line gives them.

    Raises:
        ValueError: for what is no NAME=VALUE.
    """
    found: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name or not value:
            raise ValueError(f"--footprint takes NAME=VALUE, as in model.py:12=True, got {text!r}")
        asked = _ROUTED.fullmatch(value)
        try:
            if asked:
                share, of, imbalance = asked.groups()
                found[name] = routed(float(share) / float(of or 1), float(imbalance or 1))
            else:
                found[name] = literal_eval(value)
        except (ValueError, SyntaxError, ZeroDivisionError) as wrong:
            if asked or ":" not in value:
                takes = "a number, True or False, routed(1/8, 1.3), or file.py:function"
                raise ValueError(f"--footprint {name} takes {takes}, got {value!r} ({wrong})") from wrong
            found[name] = load(value)
    return found


OUTPUTS = ("html", "png", "perfetto", "json")


def check_outputs(options: argparse.Namespace) -> None:
    """Refuse files that cannot be written, before anything is computed.

    Raises:
        ValueError: naming the option and the path.
    """
    read = [options.factory, *options.plan]
    files = [Path(name.rpartition(":")[0]) for name in read] + [Path(name) for name in (options.gpu, options.net) if name]
    sources = {path.resolve() for path in files if path.suffix in (".py", ".json")}
    seen: dict[Path, str] = {}
    for name in OUTPUTS:
        told = getattr(options, name)
        if told is None:
            continue
        where = f"--{name} {told!r} cannot be written"
        path, folder = Path(told), Path(told).absolute().parent
        try:
            if not told or told.endswith(os.sep) or path.is_dir():
                raise ValueError(f"{where}: expected the path of a file")
            if not folder.is_dir():
                raise ValueError(f"{where}: there is no directory {str(folder)!r}; make it first")
            if not os.access(path if path.exists() else folder, os.W_OK):
                raise ValueError(f"{where}: permission denied")
        except OSError as wrong:
            raise ValueError(f"{where}: {(wrong.strerror or str(wrong)).lower()}") from wrong
        if name == "png" and path.suffix.lower() != ".png":
            raise ValueError(f"--png takes a path that ends in .png, got {told!r}")
        if path.resolve() in sources:
            raise ValueError(f"--{name} {told!r} is read by this command and would be overwritten: give another path")
        other = seen.setdefault(path.resolve(), name)
        if other != name:
            raise ValueError(f"--{other} and --{name} are both {told!r}: give each a file of its own")
    if options.png and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--png needs matplotlib, which is not installed: pip install 'fullshard[plot]', or give --html")


def _sizes(text: str) -> tuple[int, ...]:
    parts = text.lower().split("x")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise ValueError(f"--mesh takes sizes, as in 8x16, got {text!r}")
    return tuple(int(part) for part in parts)


def _reshard(text: str) -> bool | int:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if not text.isdecimal():
        raise ValueError(f"--reshard takes true, false, or a number of ranks, got {text!r}")
    return int(text)


def _write(options: argparse.Namespace, found: list[Explanation]) -> list[str]:
    """Write the files. Returns a line for each."""
    lines: list[str] = []
    first, *others = found
    write: dict[str, Callable[[str], None]] = {
        "html": lambda path: first.html(path, *others),
        "png": first.png,
        "perfetto": first.perfetto,
        "json": first.json,
    }
    for name in OUTPUTS:
        path = getattr(options, name)
        if path:
            try:
                write[name](path)
            except OSError as wrong:
                raise ValueError(f"--{name} {path!r} cannot be written: {wrong.strerror or wrong}") from wrong
            lines.append(f"written: {Path(path)}")
    return lines


__all__ = ["add_calibrate", "add_explain", "check_outputs", "given", "run_calibrate", "run_explain"]
