"""Check the docstrings of the public API against the code, and print the place of each problem. `make check` runs it.

The public API is the names that `fullshard`, `fullshard.wrap` and `fullshard.compat` export, and the names on the pages of
docs/api, with the public methods of each class. ruff's pydocstyle rules check the form. This script checks the content of
Google-style sections:

- every function, class, method and property has a docstring;
- Args (or Attributes, of a class) names every parameter, and no other;
- a function that returns or yields a value has Returns or Yields, unless it is a property;
- a function that raises by itself has Raises, with the class of each exception;
- every option of `python -m fullshard` has a help text.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from docstring_parser import Docstring, DocstringStyle, parse

ROOT = Path(__file__).parents[1]
EXPORTING = ("fullshard", "fullshard.wrap", "fullshard.compat")
SHOWN = re.compile(r"\.\. auto(?:class|function|exception):: ([\w.]+)")
NOTHING = ("None", "NoReturn", "Iterator[None]", "Generator[None]")


def surface() -> dict[str, Any]:
    """Return the functions and classes of the public API, by their qualified names."""
    found: dict[str, Any] = {}
    for module in map(importlib.import_module, EXPORTING):
        found |= {f"{module.__name__}.{name}": getattr(module, name) for name in module.__all__}
    for page in sorted((ROOT / "docs" / "api").glob("*.md")):
        for name in SHOWN.findall(page.read_text()):
            module, _, own = name.rpartition(".")
            found[name] = getattr(importlib.import_module(module), own)
    ours = {name: thing for name, thing in found.items() if getattr(thing, "__module__", "").startswith("fullshard")}
    return {f"{thing.__module__}.{thing.__qualname__}": thing for thing in ours.values() if hasattr(thing, "__qualname__")}


class Source:
    """The source of a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = inspect.unwrap(function)

    @cached_property
    def tree(self) -> ast.FunctionDef:
        """The syntax tree of the function."""
        return ast.parse(textwrap.dedent(inspect.getsource(self.function))).body[0]  # type: ignore[return-value]

    @property
    def place(self) -> str:
        """The place of the function, as file:line."""
        code = self.function.__code__
        path = Path(code.co_filename)
        return f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}:{code.co_firstlineno}"

    @property
    def parameters(self) -> list[str]:
        """The names of the parameters, without `self`, `cls` and names that are only an underscore."""
        names = [name for name in inspect.signature(self.function).parameters if name.strip("_")]
        return [name for name in names if name not in ("self", "cls")]

    @property
    def returns(self) -> bool:
        """True if the annotation of the return value is not None."""
        annotation = self.tree.returns
        return annotation is not None and ast.unparse(annotation).strip("'\"") not in NOTHING

    @property
    def raises(self) -> set[str]:
        """The classes of the exceptions that the body raises by itself, without nested functions and bare `raise`."""
        found: set[str] = set()
        waiting: list[ast.AST] = [*self.tree.body]
        while waiting:
            node = waiting.pop()
            if isinstance(node, (ast.FunctionDef, ast.Lambda, ast.ClassDef)):
                continue
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name):
                found.add(node.exc.func.id)
            waiting.extend(ast.iter_child_nodes(node))
        return found


def problems_of_function(name: str, function: Callable[..., Any], *, is_property: bool = False) -> Iterator[str]:
    """Yield the problems of the docstring of a function, one line each."""
    source = Source(function)
    if not inspect.getdoc(source.function):
        yield f"{source.place}: {name} has no docstring"
        return
    document = _parsed(source.function)
    yield from _problems_of_parameters(f"{source.place}: {name}", document, source.parameters)
    if source.returns and not is_property and not (document.returns or document.many_returns):
        yield f"{source.place}: {name} returns a value, but has no Returns or Yields"
    yield from _problems_of_raises(f"{source.place}: {name}", document, source)


def problems_of_class(name: str, cls: type) -> Iterator[str]:
    """Yield the problems of the docstrings of a class and of its public methods, one line each."""
    path = Path(inspect.getsourcefile(cls) or "")
    place = f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}:{inspect.getsourcelines(cls)[1]}: {name}"
    if not cls.__doc__:
        yield f"{place} has no docstring"
        return
    members, document = vars(cls), _parsed(cls)
    if dataclasses.is_dataclass(cls):
        yield from _problems_of_parameters(place, document, [field.name for field in dataclasses.fields(cls) if field.init])
    elif inspect.isfunction(members.get("__init__")) and not getattr(cls, "_is_protocol", False):
        yield from _problems_of_parameters(place, document, Source(members["__init__"]).parameters)
    for builder in ("__init__", "__post_init__"):
        if getattr(members.get(builder), "__module__", None) == cls.__module__ and inspect.isfunction(members[builder]):
            if builder == "__init__" and dataclasses.is_dataclass(cls):
                continue  # the dataclass decorator generates it
            yield from _problems_of_raises(place, document, Source(members[builder]))
    for own, member in members.items():
        if own.startswith("_") and own != "__call__":
            continue
        if isinstance(member, property):
            yield from problems_of_function(f"{name}.{own}", member.fget, is_property=True)  # type: ignore[arg-type]
        elif isinstance(member, (staticmethod, classmethod)):
            yield from problems_of_function(f"{name}.{own}", member.__func__)
        elif inspect.isfunction(member):
            yield from problems_of_function(f"{name}.{own}", member)


def problems_of_command(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the options of a command line, and of its subcommands, without a help text."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from problems_of_command(command)
        elif not action.help:
            yield f"{parser.prog}: {'/'.join(action.option_strings) or action.dest} has no help text"


def _parsed(thing: Any) -> Docstring:
    return parse(inspect.getdoc(thing) or "", DocstringStyle.GOOGLE)


def _problems_of_parameters(place: str, document: Docstring, parameters: list[str]) -> Iterator[str]:
    named = [parameter.arg_name.lstrip("*").strip("`") for parameter in document.params]
    for missing in [name for name in parameters if name not in named]:
        yield f"{place}: Args does not name '{missing}'"
    for unknown in [name for name in named if name not in parameters]:
        yield f"{place}: Args names '{unknown}', which is no parameter"


def _problems_of_raises(place: str, document: Docstring, source: Source) -> Iterator[str]:
    told = {name for entry in document.raises for name in re.findall(r"\w+", entry.type_name or "")}
    for missing in sorted(source.raises - told):
        yield f"{place}: raises {missing}, which Raises does not name"


def problems() -> Iterator[str]:
    """Yield all problems of the docstrings of the public API."""
    for name, thing in surface().items():
        if isinstance(thing, type):
            yield from problems_of_class(name, thing)
        elif callable(thing):
            yield from problems_of_function(name, thing)
    yield from problems_of_command(importlib.import_module("fullshard.__main__").parser())


def main() -> int:
    """Print all problems. Return the exit status, 1 if there are any."""
    found = sorted(set(problems()))
    for line in found:
        print(line)
    if found:
        print(f"{len(found)} docstrings of the public surface are incomplete")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
