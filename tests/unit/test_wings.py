"""The tree is the design: packages import those below them, extensions use the door of the core, files import each other in no
circle, and private names of torch stay in one package.
"""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "fullshard"
ROOT = {"_torch", "errors", "policies"}  # any file may import these
BUILT_ON_CORE = {
    "state",
    "optim",
    "ext",
    "fsdp2",
    "wrap",
    "fsdp1",
    "tools",
    "weights",
    "foresight",
}  # they import fullshard.core, and no file behind it
BELOW = {  # a package, and those that it may import
    "_torch": set(),
    "checks": set(),
    "comm": {"checks"},
    "core": {"comm", "checks"},
    "state": {"core"},
    "optim": {"core"},
    "frontend": {"comm", "checks", "core", "state", "optim"},
    "ext": {"comm", "checks", "core", "state", "optim", "frontend", "wrap"},
    "fsdp2": {"comm", "checks", "core", "state", "optim", "frontend", "wrap"},
    "wrap": {"core", "frontend"},
    "fsdp1": {"core", "state", "optim", "frontend", "ext", "fsdp2", "wrap"},
    "tools": {"checks", "core", "optim", "frontend", "ext", "fsdp2", "wrap"},
    "weights": {"core", "state", "optim", "wrap", "ext"},
    "foresight": {"core", "state", "optim", "frontend", "wrap", "ext"},
}
FILES = sorted(path for path in SOURCE.rglob("*.py") if path.stem != "__init__")


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts)


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported(path: Path) -> Iterator[str]:
    """Yield the files of the package that this one imports, as `name_of` has them.

    Imports under `if TYPE_CHECKING` do not count: a unit has its runtime as an attribute, and the runtime runs units.
    """
    names = {name_of(file) for file in FILES} | set(BELOW)
    tree = ast.parse(path.read_text())  # which is changed
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "fullshard":
            module = node.module.removeprefix("fullshard").lstrip(".")
            for alias in node.names:
                below = f"{module}.{alias.name}".lstrip(".")
                yield below if below in names else module
        elif isinstance(node, ast.Import):
            yield from (alias.name.removeprefix("fullshard.") for alias in node.names if alias.name.startswith("fullshard."))


def test_packages_import_those_below_them_and_the_core_through_its_door() -> None:
    for path in FILES:
        package = path.relative_to(SOURCE).parts[0]
        for name in imported(path) if path.parent != SOURCE else ():
            other, *behind = name.split(".")
            assert other == package or other in BELOW[package] | ROOT, f"{name_of(path)} imports {name}, which is not below it"
            if package in BUILT_ON_CORE and other == "core":
                assert not behind, f"{name_of(path)} imports {name}: import from fullshard.core, whose page has the names"


def test_files_of_tests_have_names_of_their_own() -> None:
    """Ranks import the module of a test by its name, out of all rooms."""
    names = sorted(path.name for path in (SOURCE.parents[1] / "tests").rglob("*.py"))
    assert not [name for name, next_ in itertools.pairwise(names) if name == next_]


def test_packages_import_each_other_in_no_circle() -> None:
    assert set(BELOW) == {path.relative_to(SOURCE).parts[0] for path in FILES if path.parent != SOURCE}
    left = dict(BELOW)
    while left:
        free = {package for package, others in left.items() if not others & set(left)}
        assert free, f"a circle among {sorted(left)}"
        left = {package: others for package, others in left.items() if package not in free}


def test_files_import_each_other_in_no_circle() -> None:
    left = {name_of(path): {name for name in imported(path) if name != name_of(path)} for path in FILES}
    while left:
        free = {name for name, others in left.items() if not others & set(left)}
        assert free, f"a circle among {sorted(left)}"
        left = {name: others for name, others in left.items() if name not in free}


def test_every_file_opens_with_one_sentence() -> None:
    docs = {name_of(path): ast.get_docstring(parsed(path)) or "" for path in FILES}
    assert not [name for name, doc in docs.items() if not doc.split("\n\n")[0].rstrip().endswith(".")]


def test_files_for_private_names_of_torch_import_errors_and_each_other_only() -> None:
    """The page of the package imports all of them, so none imports the page."""
    private = {name_of(path): set(imported(path)) for path in FILES if path.parent.name == "_torch"}
    assert not {
        name: found - private.keys() - {"errors"} for name, found in private.items() if found - private.keys() - {"errors"}
    }


@pytest.mark.parametrize("path", [path for path in FILES if path.parent.name != "_torch"], ids=name_of)
def test_private_names_of_torch_stay_in_one_package(path: Path) -> None:
    tree = parsed(path)
    own = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
    }
    allowed = {
        "_foreach_norm",
        "_foreach_mul_",
        "_foreach_copy_",
        "_foreach_lerp",
        "_foreach_lerp_",
        "_fields",
        "_asdict",
        "_replace",
        "_apply",
        "_version",
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            assert not [name for name in names if name.startswith("_")], f"line {node.lineno}"
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                continue
            assert node.attr in allowed or node.attr in own, f"line {node.lineno}: {ast.unparse(node)}"


def test_nothing_of_torchs_fsdp_is_called() -> None:
    fsdp1 = {"compat", "fsdp1.wrapper", "fsdp1.state_dicts", "fsdp1.arguments"}
    for path in FILES:
        name = name_of(path)
        for node in ast.walk(parsed(path)):
            if isinstance(node, (ast.Import, ast.ImportFrom)) and "distributed.fsdp" in ast.unparse(node):
                assert name in fsdp1 | {"_torch.fsdp", "tools.install", "wrap.policies"}, name  # the last: pure functions
                if name in fsdp1:  # the enums and config classes of FSDP1, which hold values
                    assert isinstance(node, ast.ImportFrom) and node.module == "torch.distributed.fsdp"
                    assert not {alias.name for alias in node.names} & {"FullyShardedDataParallel", "fully_shard", "FSDPModule"}
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch_fsdp":
                allowed = ("torch_fsdp.FSDPModule", "torch_fsdp.fully_shard", "torch_fsdp.wrap")
                allowed += ("torch_fsdp.ShardingStrategy", "torch_fsdp.MixedPrecision")
                assert ast.unparse(node) in allowed, "for isinstance, as a key, and to ask policy objects"
            if isinstance(node, ast.Attribute):
                assert "ops.fsdp" not in ast.unparse(node), name
