"""What a command line names: a function of a file or module, and one line for what it raises."""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.util
import inspect
import io
import re
import sys
import traceback
from collections.abc import Mapping
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, TextIO

from torch import nn

_OURS = str(Path(__file__).parent.parent)
_LIBRARIES = re.compile(r"site-packages|dist-packages|lib/python3|<frozen")


class Parser(argparse.ArgumentParser):
    """A parser that says what is wrong in one line, and which option may be meant."""

    def error(self, message: str) -> NoReturn:
        """Print the line, and exit with 2."""
        known = [option for action in self._of_command()._actions for option in action.option_strings]
        wrong = [word for word in message.split() if word.startswith("--")] if "unrecognized" in message else []
        near = [found for word in wrong for found in difflib.get_close_matches(word, known, 1, cutoff=0.7)]
        meant = f"; is {' '.join(near)} meant?" if near else ""
        self.exit(2, f"{self.prog}: {one_line(message)}{meant} ({self.prog} --help lists the options)\n")

    def _of_command(self) -> argparse.ArgumentParser:
        """The parser of the command that is given: options that it does not know come to the one of all commands."""
        for action in self._actions:
            for name, parser in action.choices.items() if isinstance(action.choices, dict) else ():
                if name in sys.argv[1:2]:
                    return parser._of_command() if isinstance(parser, Parser) else parser
        return self


def one_line(text: object, most: int = 600) -> str:
    """A text without line ends and control characters."""
    return "".join(c for c in " ".join(str(text).split()) if c.isprintable())[:most]


def failure_line(failure: BaseException, doing: str) -> str:
    """What was raised: its own text if this library says it, else its type, where it was raised, and during what.

    Args:
        failure: with its traceback.
        doing: as in "models.py:small()".

    Returns:
        One line.
    """
    frames = traceback.extract_tb(failure.__traceback__)
    if isinstance(failure, (ValueError, RuntimeError)) and frames and frames[-1].filename.startswith(_OURS):
        return one_line(failure)
    theirs = [f for f in frames if not f.filename.startswith(_OURS) and not _LIBRARIES.search(f.filename)]
    where = f" (at {Path(theirs[-1].filename).name}:{theirs[-1].lineno})" if theirs else ""
    if isinstance(failure, SyntaxError) and failure.filename:
        where = f" (at {Path(failure.filename).name}:{failure.lineno})"
    text = one_line(failure.msg if isinstance(failure, SyntaxError) else failure)
    return f"{doing} raises {type(failure).__name__}{f': {text}' if text else ''}{where}; --traceback shows all of it"


def load(name: str) -> Any:
    """What `module:name` or `file.py:name` names.

    Args:
        name: of a file, or of a module that can be imported from here, and of what it has.

    Returns:
        It.

    Raises:
        ValueError: if there is none, or the file raises.
    """
    where, _, attribute = name.rpartition(":")
    if not where or not attribute:
        raise ValueError(f"expected module:name or file.py:name, got {name!r}")
    printed = _Held(sys.stderr)
    try:
        with redirect_stderr(printed):
            found = vars(_module_of(where, name))
    except SystemExit as ends:
        said = one_line(printed.getvalue().strip().rpartition("\n")[2])
        raise ValueError(
            f"{where} ends the program when it is imported (sys.exit({ends.code!r}){f', {said}' if said else ''}): call that "
            "only under if __name__ == '__main__'"
        ) from ends
    except ImportError as wrong:
        if "relative import" not in str(wrong):
            raise ValueError(failure_line(wrong, where)) from wrong
        raise ValueError(f"{where} is part of a package ({wrong}): give module:name, as in package.file:{attribute}, from the "
                         "directory above the package") from wrong  # fmt: skip
    except Exception as failure:
        raise ValueError(failure_line(failure, where)) from failure
    printed.release()
    if attribute not in found:
        own = {name: value for name, value in found.items() if getattr(value, "__module__", "") == found["__name__"]}
        names = [known for known, value in own.items() if callable(value) and not known.startswith("_")]
        raise ValueError(f"{where!r} has no {attribute!r}; it has {', '.join(names[:8]) or 'nothing callable'}")
    return found[attribute]


class _Held(io.StringIO):
    """Keep what is written until `release`, and pass on what comes then: handlers of `logging` hold on to a stream."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream, self._held = stream, True

    def write(self, text: str) -> int:
        """Write to memory, or to the stream."""
        return super().write(text) if self._held else self._stream.write(text)

    def release(self) -> None:
        """Write what was kept to the stream."""
        self._held = False
        self._stream.write(self.getvalue())


def _module_of(where: str, name: str) -> ModuleType:
    """The module, imported now."""
    if not where.endswith(".py"):
        try:
            return importlib.import_module(where)
        except ModuleNotFoundError as wrong:
            raise ValueError(
                f"{name!r}: {wrong}; give module:name of what can be imported from here, or file.py:name"
            ) from None
    path = Path(where).resolve()
    if not path.is_file():
        raise ValueError(f"{name!r}: {where} is {'a directory' if path.is_dir() else 'no file'}: give file.py:name")
    known = sys.modules.get(path.stem)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    sys.path.insert(0, str(path.parent))
    stem = path.stem if known is None else f"file_{path.stem}"  # torch.py must not become torch
    spec = importlib.util.spec_from_file_location(stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[stem] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as wrong:
        del sys.modules[stem]
        raise ValueError(f"{name!r}: {where} imports {wrong.name!r}, which is not installed here") from wrong
    except BaseException:
        del sys.modules[stem]
        raise
    return module


def load_factory(name: str, told: Mapping[str, Any]) -> Any:
    """The function that a command line names, with these arguments.

    Args:
        name: as of `load`.
        told: arguments by name.

    Returns:
        A function of no arguments.

    Raises:
        ValueError: if it is none, or does not take these.
    """
    factory = load(name)
    if inspect.iscoroutinefunction(factory):
        raise ValueError(f"{name!r} is a coroutine: expected a function that returns (build, batch)")
    if isinstance(factory, nn.Module):
        raise ValueError(f"{name!r} is a module ({type(factory).__name__}): expected a function that returns (build, batch)")
    if not callable(factory):
        raise ValueError(f"{name!r} is a {type(factory).__name__}: expected a function that returns (build, batch)")
    try:
        inspect.signature(factory).bind(**told)
    except TypeError as wrong:
        shown = f"{getattr(factory, '__name__', name)}{inspect.signature(factory)}"
        if told:
            raise ValueError(f"--with does not fit the factory, {shown}: {wrong}") from None
        raise ValueError(
            f"the factory {shown} has arguments that nobody gives ({wrong}): give them by --with NAME=VALUE"
        ) from None
    return partial(factory, **told)


__all__ = ["Parser", "failure_line", "load", "load_factory", "one_line"]
