"""`python -m fullshard run script.py`: an FSDP2 program on fullshard; `... verify module:factory`: sharded against plain."""

from __future__ import annotations

import argparse
import importlib
import runpy
import sys
from pathlib import Path

from fullshard.tools.install import install
from fullshard.tools.verify import parts_of, verify


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
    check.set_defaults(refuse=check.error)
    return top


def main() -> None:
    """Run the command that the command line names; the exit status of `verify` is 1 if something differs."""
    options = parser().parse_args()
    if options.command == "run":
        _run(options)
    else:
        sys.exit(_verify(options))


def _run(options: argparse.Namespace) -> None:
    install()
    sys.argv = [options.script, *options.arguments]
    if options.module:
        runpy.run_module(options.script, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(options.script).resolve().parent))
        runpy.run_path(options.script, run_name="__main__")


def _verify(options: argparse.Namespace) -> int:
    """0 if nothing differs, 1 if something does."""
    module, _, function = options.factory.partition(":")
    if not function:
        options.refuse(f"expected module:function, got {options.factory!r}")
    sys.path.insert(0, "")
    settings = {"ranks": options.ranks, "steps": options.steps}
    verdict = verify(**{**settings, **parts_of(getattr(importlib.import_module(module), function))})
    print(verdict)
    return 0 if verdict else 1


if __name__ == "__main__":
    main()
