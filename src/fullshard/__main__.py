"""The command line, `python -m fullshard`.

run script.py             an FSDP2 program on fullshard
verify module:factory     a model sharded against plain
explain module:factory    whether it will fit, what it will cost, and where that goes
weights show|convert|check DIR   what is in a checkpoint, another one made of it, and whether it is whole
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import runpy
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from fullshard.foresight.command import add_calibrate, add_explain, given, run_calibrate, run_explain
from fullshard.tools.install import install
from fullshard.tools.verify import parts_of, verify
from fullshard.weights.command import add_weights, run_weights


def parser() -> argparse.ArgumentParser:
    """The command line: `run` and `verify` with their options."""
    top = argparse.ArgumentParser(prog="python -m fullshard", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run a script with fullshard in place of torch's FSDP2 (works under torchrun, too)")
    run.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
    run.add_argument("script", help="path of a Python file")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="passed on to it")
    check = commands.add_parser("verify", help="train a model sharded and plain on this machine's CPU, and say what differs")
    check.add_argument(
        "factory", help="module:function, which returns (build, batch) or a dict of fullshard.verify's arguments"
    )
    check.add_argument("--ranks", type=int, default=2, help="processes to start on this machine's CPU (default: 2)")
    check.add_argument("--steps", type=int, default=2, help="optimizer steps to compare (default: 2)")
    add_explain(commands)
    add_calibrate(commands)
    add_weights(commands)
    return top


def main() -> None:
    """Run the command that the command line names.

    The exit status of `verify` is 1 if something differs, of `explain` if it does not fit, of `weights check` if something is
    bad; of all 2 if that cannot be told.
    """
    options = parser().parse_args()
    if options.command == "run":
        return _run(options)
    if options.command == "calibrate":
        return run_calibrate(options)
    sys.path.insert(0, "")
    if options.command == "weights":
        try:
            sys.exit(run_weights(options, _load))
        except (ValueError, RuntimeError) as wrong:
            _refuse(str(wrong))
    factory = _called(options.factory)
    if options.command == "verify":
        parts = parts_of(factory)
        verdict = verify(**{"ranks": options.ranks, "steps": options.steps, **parts})
        print(verdict)
        sys.exit(0 if verdict else 1)
    try:
        sys.exit(run_explain(options, parts_of(_with(factory, given(options))), _load))
    except ValueError as wrong:
        _refuse(str(wrong))
    except Exception:  # out of the factory, as likely as not: nothing is told, and 1 would say that it does not fit
        traceback.print_exc()
        sys.exit(2)


def _run(options: argparse.Namespace) -> None:
    install()
    sys.argv = [options.script, *options.arguments]
    if options.module:
        runpy.run_module(options.script, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(options.script).resolve().parent))
        runpy.run_path(options.script, run_name="__main__")


def _refuse(why: str) -> NoReturn:
    print(f"python -m fullshard: {why}", file=sys.stderr)
    sys.exit(2)


def _called(name: str) -> Any:
    factory = _load(name)
    if not callable(factory):
        _refuse(f"{name!r} is a {type(factory).__name__}: expected a function that returns (build, batch)")
    return factory


def _with(factory: Any, told: dict[str, Any]) -> Any:
    """The factory with these arguments."""
    try:
        inspect.signature(factory).bind(**told)
    except TypeError as wrong:
        _refuse(f"--with does not fit the factory, {factory.__name__}{inspect.signature(factory)}: {wrong}")
    return partial(factory, **told)


def _load(name: str) -> Any:
    """What `module:name` or `file.py:name` names."""
    where, _, attribute = name.rpartition(":")
    if not where or not attribute:
        _refuse(f"expected module:name or file.py:name, got {name!r}")
    try:
        if where.endswith(".py"):
            sys.path.insert(0, str(Path(where).resolve().parent))
            where = Path(where).stem
        found = vars(importlib.import_module(where))
    except ModuleNotFoundError as wrong:
        _refuse(f"{name!r}: {wrong}; give module:name of what can be imported from here, or file.py:name")
    if attribute not in found:
        names = [known for known, value in found.items() if callable(value) and not known.startswith("_")]
        _refuse(f"{where!r} has no {attribute!r}; it has {', '.join(names[:8]) or 'nothing callable'}")
    return found[attribute]


if __name__ == "__main__":
    main()
