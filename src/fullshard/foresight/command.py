"""Command-line options and output of `python -m fullshard explain` and `python -m fullshard calibrate`."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
from ast import literal_eval
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch

from fullshard.foresight.calibrate import calibrate
from fullshard.foresight.explanation import Explanation, explain
from fullshard.foresight.hardware import DEFAULT_GPU, GPUS, NETWORKS
from fullshard.foresight.optimizer import OPTIMIZERS
from fullshard.foresight.question import ExplainArguments, default_dtypes
from fullshard.foresight.search import Goal, search
from fullshard.foresight.trace import routed
from fullshard.policies import PRESETS, CPUOffloadPolicy, MixedPrecisionPolicy, resolve_mp

Load = Callable[[str], Any]
VERIFY_ONLY = ("steps", "shard", "seed", "tolerance", "ranks")


def add_explain(commands: Any) -> None:
    """Add the `explain` command with its options."""
    to = commands.add_parser("explain", help="predict whether a model fits, what a step costs, and where memory and time go")
    to.add_argument(
        "factory", help="module:function or file.py:function, which returns (build, batch) or a dict of explain()'s arguments"
    )
    to.add_argument("--world", type=int, required=True, help="number of ranks")
    to.add_argument("--mesh", help="replicas x ranks, as in 8x16 (default: shard over all ranks)")
    to.add_argument("--with", dest="given", action="append", default=[], metavar="NAME=VALUE", help="argument of the factory")
    to.add_argument("--gpu", help=f"{', '.join(GPUS)}, or a .json of calibrate (default: {DEFAULT_GPU})")
    to.add_argument("--net", help=f"{', '.join(NETWORKS)}, or a .json of calibrate (default: usual network of such GPUs)")
    to.add_argument(
        "--tensor-parallel", type=int, help="ranks of tensor parallelism, by the factory's `parallelize` (default: 1)"
    )
    to.add_argument("--per-node", type=int, help="number of GPUs of one machine (default: usual number of such GPUs)")
    to.add_argument(
        "--plan", action="append", default=[], help="file.py:name or module:name of a policy or plan; several are compared"
    )
    to.add_argument(
        "--dtype", choices=("bf16", "fp32"), help="compute dtype; gradients reduce in fp32 (default: bf16 on a GPU)"
    )
    to.add_argument(
        "--reduce-dtype", choices=("bf16", "fp32"), help="dtype of gradient reduction (default: that of the factory, or fp32)"
    )
    to.add_argument("--reshard", help="reshard_after_forward: true, false, or a number of ranks")
    to.add_argument("--states", choices=tuple(PRESETS), help="level of ZeRO (default: ZERO3)")
    to.add_argument("--offload", action="store_true", help="keep shards, gradients and optimizer states in host memory")
    to.add_argument("--optimizer", help=f"{', '.join(OPTIMIZERS)} (default: adamw)")
    to.add_argument("--microbatches", type=int, help="forwards and backwards per step (default: 1)")
    to.add_argument("--recompute", help="none, block, selective, or every:2 (default: none)")
    to.add_argument(
        "--footprint",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="value to assume where the step depends on tensor values: model.py:12=True, 'aten::nonzero=routed(1/8, 1.3)', "
        "or a function as NAME=file.py:function",
    )
    to.add_argument("--engine", choices=("fullshard", "fsdp2"), help="fsdp2: simulate the copies and buffers of torch's FSDP2")
    to.add_argument("--expandable-segments", action="store_true", help="the allocator runs with expandable_segments:True")
    to.add_argument("--find", choices=get_args(Goal), help="also search for better settings, and print the best of them")
    to.add_argument("--html", help="HTML file to write pictures to")
    to.add_argument("--png", help="PNG file to write pictures to, with matplotlib")
    to.add_argument("--perfetto", help="file to write a trace for ui.perfetto.dev to")
    to.add_argument("--json", help="JSON file to write the figures to")


def add_calibrate(commands: Any) -> None:
    """Add the `calibrate` command with its options."""
    to = commands.add_parser("calibrate", help="measure this machine, in less than a minute, for explain's --gpu and --net")
    to.add_argument("--out", default="machine.json", help="file to write (default: machine.json)")
    to.add_argument("--ranks", type=int, help="processes to start (default: one for each GPU, or two on the CPU)")


def run_calibrate(options: argparse.Namespace) -> None:
    """Measure this machine, write the file and print the figures. Raises ValueError if the file cannot be written."""
    _check_output("out", options.out)
    gpu, network = calibrate(options.out, ranks=options.ranks)
    print(
        f"matrix products {gpu.fp32 / 1e9:,.0f} Gflop/s in fp32, {gpu.bf16 / 1e9:,.0f} in bf16; memory "
        f"{gpu.bandwidth / 1e9:.1f} GB/s; {gpu.launch * 1e6:.1f} us per operator; collectives {gpu.link / 1e9:.2f} GB/s and "
        f"{network.base * 1e6:.0f} us each; compute takes {gpu.overlap:.2f} times as long during a collective\n"
        f"written: {options.out}"
    )


def run_explain(options: argparse.Namespace, parts: dict[str, Any], load: Load) -> int:
    """Explain, print and write. Return 0 if the step fits, 1 if it does not. Raises ValueError as `explain`."""
    arguments = {**{name: value for name, value in parts.items() if name not in VERIFY_ONLY}, **_explain_options(options)}
    if options.dtype is not None or options.reduce_dtype is not None:
        arguments["mp_policy"] = _mp_policy(options, arguments)
    if options.footprint:
        arguments["footprints"] = {**arguments.get("footprints", {}), **_footprints(options.footprint, load)}
    if options.find and len(options.plan) > 1:
        raise ValueError(f"--find searches from one plan, got --plan {len(options.plan)} times. Pass one plan at a time.")
    known = ExplainArguments.__dataclass_fields__
    unknown = set(arguments) - set(known)
    if unknown:
        raise ValueError(
            f"The factory returns {min(unknown)!r}, which is no argument of explain(). Choose from {', '.join(known)}."
        )
    given = arguments.pop("plan", "auto")
    plans = [_plan(name, load) for name in options.plan] or [given]
    found = [explain(**arguments, plan=plan) for plan in plans]
    better = search(**arguments, plan=plans[0], goal=options.find) if options.find else None
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


def _explain_options(options: argparse.Namespace) -> dict[str, Any]:
    arguments: dict[str, Any] = {"world": options.world}
    if options.expandable_segments:
        arguments["expandable_segments"] = True
    for name in ("gpu", "net", "per_node", "tensor_parallel", "optimizer", "microbatches", "recompute", "engine"):
        if getattr(options, name) is not None:
            arguments[name] = getattr(options, name)
    if options.mesh is not None:
        arguments["mesh"] = _sizes(options.mesh)
    if options.reshard is not None:
        arguments["reshard_after_forward"] = _reshard(options.reshard)
    if options.states is not None:
        arguments["states"] = PRESETS[options.states]
    if options.offload:
        arguments["offload_policy"] = CPUOffloadPolicy()
    return arguments


def _mp_policy(options: argparse.Namespace, arguments: Mapping[str, Any]) -> MixedPrecisionPolicy:
    """Return the policy of `--dtype` and `--reduce-dtype`. The second alone changes the policy that counts without it."""
    reduce = torch.bfloat16 if options.reduce_dtype == "bf16" else torch.float32
    if options.dtype is not None:
        return MixedPrecisionPolicy(None if options.dtype == "fp32" else torch.bfloat16, reduce)
    given = arguments.get("mp_policy")
    before = default_dtypes(arguments.get("gpu", DEFAULT_GPU)) if given is None else resolve_mp(given)
    return replace(before, reduce_dtype=reduce)


def factory_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of the factory from `--with`. A value that is a Python literal is parsed, any other is text."""
    found: dict[str, Any] = {}
    for text in options.given:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"--with takes NAME=VALUE, as in length=8192, got {text!r}.")
        if name in found:
            raise ValueError(f"--with has {name!r} twice. Pass it once.")
        try:
            found[name] = literal_eval(value)
        except (ValueError, SyntaxError):
            found[name] = value
    return found


_ROUTED = re.compile(r"routed\(\s*([0-9.]+)\s*(?:/\s*([0-9.]+)\s*)?(?:,\s*([0-9.]+)\s*)?\)")


def _footprints(texts: Sequence[str], load: Load) -> dict[str, Any]:
    """Return the footprints of `--footprint`: `routed(...)`, a Python literal, or a function loaded by its path."""
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name or not value:
            raise ValueError(f"--footprint takes NAME=VALUE, as in model.py:12=True, got {text!r}.")
        call = _ROUTED.fullmatch(value)
        try:
            if call:
                share, of, imbalance = call.groups()
                found[name] = routed(float(share) / float(of or 1), float(imbalance or 1))
            else:
                found[name] = literal_eval(value)
        except (ValueError, SyntaxError, ZeroDivisionError) as wrong:
            if call or ":" not in value:
                takes = "a number, True or False, routed(1/8, 1.3), or file.py:function"
                raise ValueError(f"--footprint {name} takes {takes}, got {value!r} ({wrong}).") from wrong
            found[name] = load(value)
    return found


OUTPUTS = ("html", "png", "perfetto", "json")


def _check_output(name: str, output: str) -> None:
    """Raise ValueError unless a file can be written. `name`: of the option."""
    where = f"--{name} {output!r} cannot be written"
    path, folder = Path(output), Path(output).absolute().parent
    try:
        if not output or output.endswith(os.sep) or path.is_dir():
            raise ValueError(f"{where}: expected the path of a file.")
        if not folder.is_dir():
            raise ValueError(f"{where}: there is no directory {str(folder)!r}. Create it first.")
        if not os.access(path if path.exists() else folder, os.W_OK):
            raise ValueError(f"{where}: permission denied.")
    except OSError as wrong:
        raise ValueError(f"{where}: {(wrong.strerror or str(wrong)).lower()}.") from wrong


def check_outputs(options: argparse.Namespace) -> None:
    """Raise ValueError unless all output files can be written, before anything is computed."""
    read = [options.factory, *options.plan]
    files = [Path(name.rpartition(":")[0]) for name in read] + [Path(name) for name in (options.gpu, options.net) if name]
    sources = {path.resolve() for path in files if path.suffix in (".py", ".json")}
    seen: dict[Path, str] = {}
    for name in OUTPUTS:
        output = getattr(options, name)
        if output is None:
            continue
        _check_output(name, output)
        path = Path(output)
        if name == "png" and path.suffix.lower() != ".png":
            raise ValueError(f"--png takes a path that ends in .png, got {output!r}.")
        if path.resolve() in sources:
            raise ValueError(f"--{name} {output!r} is read by this command and would be overwritten. Pass another path.")
        other = seen.setdefault(path.resolve(), name)
        if other != name:
            raise ValueError(f"--{other} and --{name} are both {output!r}. Pass a different file for each.")
    if options.png and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--png needs matplotlib, which is not installed. Run pip install 'fullshard[plot]', or use --html.")


def _sizes(text: str) -> tuple[int, ...]:
    parts = text.lower().split("x")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise ValueError(f"--mesh takes sizes, as in 8x16, got {text!r}.")
    return tuple(int(part) for part in parts)


def _reshard(text: str) -> bool | int:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if not text.isdecimal():
        raise ValueError(f"--reshard takes true, false, or a number of ranks, got {text!r}.")
    return int(text)


def _write(options: argparse.Namespace, found: list[Explanation]) -> list[str]:
    """Write the files, and return one line for each."""
    lines: list[str] = []
    first, *others = found
    for name in OUTPUTS:
        path = getattr(options, name)
        if path:
            try:
                getattr(first, name)(path, *(others if name == "html" else ()))
            except OSError as wrong:
                raise ValueError(f"--{name} {path!r} cannot be written: {wrong.strerror or wrong}.") from wrong
            lines.append(f"written: {Path(path)}")
    return lines
