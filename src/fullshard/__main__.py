"""`python -m fullshard run script.py ...`: run a program that was written for torch's FSDP2 on fullshard."""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

from fullshard.install import install


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fullshard", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run a script with fullshard in place of torch's FSDP2 (works under torchrun, too)")
    run.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
    run.add_argument("script", help="path of a Python file")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="passed on to it")
    options = parser.parse_args()
    install()
    sys.argv = [options.script, *options.arguments]
    if options.module:
        runpy.run_module(options.script, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(options.script).resolve().parent))
        runpy.run_path(options.script, run_name="__main__")


if __name__ == "__main__":
    main()
