"""The command line, `fullshard` or `python -m fullshard`.

run script.py             run an FSDP2 program with fullshard
verify module:factory     compare training of a sharded model with the unsharded model
explain module:factory    predict whether a model fits, what a step costs, and where memory and time go
calibrate                 measure this machine for explain
weights show|convert|check DIR   list, convert or check a checkpoint
"""

from __future__ import annotations

import argparse
import importlib.util
import runpy
import sys
import traceback
import warnings
from pathlib import Path

from fullshard.foresight.command import (
    add_calibrate,
    add_explain,
    check_outputs,
    factory_arguments,
    run_calibrate,
    run_explain,
)
from fullshard.tools.install import install
from fullshard.tools.loading import Parser, failure_line, load, load_factory
from fullshard.tools.verify import verify, verify_arguments
from fullshard.weights.command import add_weights, run_weights


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line, with all commands and their options."""
    top = Parser(prog=_name(), description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run a script with fullshard in place of torch's FSDP2 (works under torchrun, too)")
    run.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
    run.add_argument("script", help="path of a Python file")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    check = commands.add_parser(
        "verify", help="train a model sharded and unsharded on this machine's CPU, and print differences"
    )
    check.add_argument(
        "factory", help="module:function, which returns (build, batch) or a dict of fullshard.verify's arguments"
    )
    check.add_argument("--ranks", type=int, default=2, help="processes to start on this machine's CPU (default: 2)")
    check.add_argument("--steps", type=int, default=2, help="optimizer steps to compare (default: 2)")
    add_explain(commands)
    add_calibrate(commands)
    add_weights(commands)
    for name, command in commands.choices.items():
        if name != "run":
            command.add_argument("--traceback", action="store_true", help="print the full traceback of an error")
    return top


def _name() -> str:
    return "fullshard" if Path(sys.argv[0]).stem == "fullshard" else "python -m fullshard"


def main() -> None:
    """Run the command on the command line.

    The exit status is 1 if `verify` finds a difference, `explain` a model that does not fit, or `weights check` a fault. It is
    2 if a command fails, with one line on stderr that states the reason.
    """
    options = parser().parse_args()
    if options.command == "run":
        return _run(options)
    sys.path.insert(0, "")
    try:
        # Print warnings after the report, and none after a failure, which is one line only. `--traceback` and `python -W` print
        # them immediately.
        defer = options.command == "explain" and not (sys.warnoptions or options.traceback)
        with warnings.catch_warnings(record=defer) as deferred:
            status = _run_command(options)
        for one in deferred or ():
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
    except (Exception, SystemExit) as failure:
        # SystemExit, too: a factory that exits with status 0 must not look like a model that fits.
        if options.traceback:
            traceback.print_exc()
        doing = getattr(options, "factory", options.command)
        print(f"{_name()}: {failure_line(failure, doing)}", file=sys.stderr)
        status = 2
    sys.exit(status)


def _run_command(options: argparse.Namespace) -> int:
    """Run a command other than `run`, and return the exit status."""
    if options.command == "calibrate":
        run_calibrate(options)
        return 0
    if options.command == "weights":
        return run_weights(options, load)
    if options.command == "explain":
        check_outputs(options)
        return run_explain(options, verify_arguments(load_factory(options.factory, factory_arguments(options))), load)
    parts = verify_arguments(load_factory(options.factory, {}))
    verdict = verify(**{"ranks": options.ranks, "steps": options.steps, **parts})
    print(verdict)
    return 0 if verdict else 1


def _run(options: argparse.Namespace) -> None:
    try:
        found = importlib.util.find_spec(options.script) if options.module else Path(options.script).exists()
    except ModuleNotFoundError as missing:  # of a package that the name begins with
        if missing.name is None or not f"{options.script}.".startswith(f"{missing.name}."):
            raise
        found = None
    if not found:
        print(f"{_name()}: there is no {'module' if options.module else 'file'} {options.script!r}.", file=sys.stderr)
        sys.exit(2)
    install()
    sys.argv = [options.script, *options.arguments]
    if options.module:
        runpy.run_module(options.script, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(options.script).resolve().parent))
        runpy.run_path(options.script, run_name="__main__")


if __name__ == "__main__":
    main()
