"""The command line, `fullshard` or `python -m fullshard`.

run script.py             an FSDP2 program on fullshard
verify module:factory     a model sharded against plain
explain module:factory    whether it will fit, what it will cost, and where that goes
weights show|convert|check DIR   what is in a checkpoint, another one made of it, and whether it is whole
"""

from __future__ import annotations

import argparse
import runpy
import sys
import traceback
import warnings
from pathlib import Path

from fullshard.foresight.command import add_calibrate, add_explain, check_outputs, given, run_calibrate, run_explain
from fullshard.tools.install import install
from fullshard.tools.loading import Parser, failure_line, load, load_factory
from fullshard.tools.verify import parts_of, verify
from fullshard.weights.command import add_weights, run_weights


def parser() -> argparse.ArgumentParser:
    """The command line: `run` and `verify` with their options."""
    top = Parser(prog=_name(), description=__doc__)
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
    for name, command in commands.choices.items():
        if name != "run":
            command.add_argument("--traceback", action="store_true", help="show the whole traceback of what is raised")
    return top


def _name() -> str:
    return "fullshard" if Path(sys.argv[0]).stem == "fullshard" else "python -m fullshard"


def main() -> None:
    """Run the command that the command line names.

    The exit status of `verify` is 1 if something differs, of `explain` if it does not fit, of `weights check` if something is
    bad; of all 2 if that cannot be told, with one line that says why.
    """
    options = parser().parse_args()
    if options.command == "run":
        return _run(options)
    sys.path.insert(0, "")
    try:
        # Warnings come behind an answer. A failure is one line: `--traceback` and `python -W` show them as they come.
        hold = options.command == "explain" and not (sys.warnoptions or options.traceback)
        with warnings.catch_warnings(record=hold) as held:
            status = _answered(options)
        for one in held or ():
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
    except (Exception, SystemExit) as failure:  # a factory that exits with 0 must not be taken for a model that fits
        if options.traceback:
            traceback.print_exc()
        doing = getattr(options, "factory", options.command)
        print(f"{_name()}: {failure_line(failure, doing)}", file=sys.stderr)
        status = 2
    sys.exit(status)


def _answered(options: argparse.Namespace) -> int:
    """Answer, and return the exit status."""
    if options.command == "calibrate":
        run_calibrate(options)
        return 0
    if options.command == "weights":
        return run_weights(options, load)
    if options.command == "explain":
        check_outputs(options)
        return run_explain(options, parts_of(load_factory(options.factory, given(options))), load)
    parts = parts_of(load_factory(options.factory, {}))
    verdict = verify(**{"ranks": options.ranks, "steps": options.steps, **parts})
    print(verdict)
    return 0 if verdict else 1


def _run(options: argparse.Namespace) -> None:
    install()
    sys.argv = [options.script, *options.arguments]
    if options.module:
        runpy.run_module(options.script, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(options.script).resolve().parent))
        runpy.run_path(options.script, run_name="__main__")


if __name__ == "__main__":
    main()
