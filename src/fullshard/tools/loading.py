"""Load the function that a command line names, and describe errors in one line."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from torch import nn

_PACKAGE_ROOT = str(Path(__file__).parent.parent)
_LIBRARIES = re.compile(r"site-packages|dist-packages|lib/python3|<frozen")


class Parser(argparse.ArgumentParser):
    """An argument parser that reports an error in one line."""

    def error(self, message: str) -> NoReturn:
        """Print the error in one line, and exit with status 2."""
        self.exit(2, f"{self.prog}: {one_line(message)} ({self.prog} --help lists the options)\n")


def one_line(text: object) -> str:
    """Return a text without line ends and control characters, cut off after 600 characters."""
    return "".join(c for c in " ".join(str(text).split()) if c.isprintable())[:600]


def failure_line(failure: BaseException, doing: str) -> str:
    """Describe an exception: by its text if this library raised it, else by its type, text and line of user code."""
    frames = traceback.extract_tb(failure.__traceback__)
    if isinstance(failure, (ValueError, RuntimeError)) and frames and frames[-1].filename.startswith(_PACKAGE_ROOT):
        return one_line(failure)
    user_frames = [f for f in frames if not f.filename.startswith(_PACKAGE_ROOT) and not _LIBRARIES.search(f.filename)]
    where = f" (at {Path(user_frames[-1].filename).name}:{user_frames[-1].lineno})" if user_frames else ""
    if isinstance(failure, SyntaxError) and failure.filename:
        where = f" (at {Path(failure.filename).name}:{failure.lineno})"
    text = one_line(failure.msg if isinstance(failure, SyntaxError) else failure)
    return f"{doing} raises {type(failure).__name__}{f': {text}' if text else ''}{where}; --traceback shows all of it"


def load(name: str) -> Any:
    """Load the object that `module:name` or `file.py:name` names."""
    where, _, attribute = name.rpartition(":")
    if not where or not attribute:
        raise ValueError(f"Expected module:name or file.py:name, got {name!r}.")
    try:
        found = vars(_import_target(where, name))
    except SystemExit as exited:
        raise ValueError(
            f"{where} ends the program when it is imported (sys.exit({exited.code!r})). Call sys.exit() only under "
            "if __name__ == '__main__'."
        ) from exited
    except ImportError as wrong:
        if "relative import" not in str(wrong):
            raise ValueError(failure_line(wrong, where)) from wrong
        raise ValueError(f"{where} is part of a package ({wrong}). Pass module:name, as in package.file:{attribute}, from the "
                         "directory above the package.") from wrong  # fmt: skip
    except Exception as failure:
        raise ValueError(failure_line(failure, where)) from failure
    if attribute not in found:
        own = {name: value for name, value in found.items() if getattr(value, "__module__", "") == found["__name__"]}
        names = [known for known, value in own.items() if callable(value) and not known.startswith("_")]
        raise ValueError(f"{where!r} has no {attribute!r}. It has {', '.join(names[:8]) or 'nothing callable'}.")
    return found[attribute]


def _import_target(where: str, name: str) -> ModuleType:
    """Import and return the module or file `where`. `name`: the full text of the option, for error texts."""
    if not where.endswith(".py"):
        try:
            return importlib.import_module(where)
        except ModuleNotFoundError as wrong:
            raise ValueError(
                f"{name!r} cannot be loaded: {wrong}. Pass module:name of an importable module, or file.py:name."
            ) from None
    path = Path(where).resolve()
    if not path.is_file():
        raise ValueError(
            f"{name!r} cannot be loaded: {where} is {'a directory' if path.is_dir() else 'not a file'}. Pass file.py:name."
        )
    known = sys.modules.get(path.stem)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    sys.path.insert(0, str(path.parent))  # as `python file.py` does, so that the file can import its neighbours
    stem = path.stem if known is None else f"file_{path.stem}"  # a file torch.py must not replace the module torch
    spec = importlib.util.spec_from_file_location(stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[stem] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException as wrong:
        del sys.modules[stem]
        if isinstance(wrong, ModuleNotFoundError):
            raise ValueError(f"{name!r} cannot be loaded: {where} imports {wrong.name!r}, which is not installed.") from wrong
        raise
    return module


def load_factory(name: str, arguments: Mapping[str, Any]) -> Any:
    """Load the function that a command line names, and bind arguments to it."""
    factory = load(name)
    if not callable(factory) or isinstance(factory, nn.Module) or inspect.iscoroutinefunction(factory):
        kind = type(factory).__name__
        got = f"module ({kind})" if isinstance(factory, nn.Module) else "coroutine" if callable(factory) else kind
        raise ValueError(f"Expected {name!r} to be a function that returns (build, batch), got a {got}.")
    try:
        inspect.signature(factory).bind(**arguments)
    except TypeError as wrong:
        signature = f"{getattr(factory, '__name__', name)}{inspect.signature(factory)}"
        if arguments:
            raise ValueError(f"--with does not match the factory, {signature}: {wrong}.") from None
        raise ValueError(f"The factory {signature} has required arguments ({wrong}). Pass them by --with NAME=VALUE.") from None
    return partial(factory, **arguments)
