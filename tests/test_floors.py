"""The tree is the design: imports go strictly down, and private names of torch stay in the basement."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "fullshard"
FLOORS = [
    {"_torch", "policies", "layout", "notices", "errors"},
    {"groups"},
    {"board", "mesh", "modules", "comm", "schedule"},
    {"cut", "face", "plan", "gloo", "ledger", "joined"},
    {"replaced"},
    {"parameter", "watch", "sync"},
    {"extension", "full", "unwritten"},
    {"group"},
    {"handover"},
    {"reduction"},
    {"heartbeat", "options"},
    {"communicator"},
    {"unit"},
    {"alike", "backward", "delivery"},
    {"runtime"},
    {"lint"},
    {"hooks", "views"},
    {"assembly", "methods"},
    {"module", "ties"},
    {"api"},
    {"together", "grads", "optim", "scopes", "materialize", "install", "auto"},
    {"wrap", "formats", "given"},
    {"compat", "verify"},
    {"__main__"},
]
LEVEL = {name: level for level, names in enumerate(FLOORS) for name in names}
FILES = sorted(path for path in SOURCE.glob("*.py") if path.stem != "__init__")


def siblings(path: Path) -> set[str]:
    """Files of the package that this one imports, type-only imports included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "fullshard":
            parts = node.module.split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("fullshard.")}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_imports_go_strictly_down(path: Path) -> None:
    assert path.stem in LEVEL, f"{path.name} has no floor yet"
    for name in siblings(path):
        assert LEVEL[name] < LEVEL[path.stem], f"{path.stem} imports {name}, which is not below it"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_file_opens_with_one_sentence(path: Path) -> None:
    doc = ast.get_docstring(ast.parse(path.read_text()))
    assert doc and doc.split("\n\n")[0].rstrip().endswith(".")


@pytest.mark.parametrize("path", [path for path in FILES if path.stem != "_torch"], ids=lambda path: path.stem)
def test_private_names_of_torch_stay_in_the_basement(path: Path) -> None:
    tree = ast.parse(path.read_text())
    own = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
    }
    allowed = {"_foreach_norm", "_foreach_mul_", "_foreach_copy_", "_fields", "_apply", "_version"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            assert not [name for name in names if name.startswith("_")], f"line {node.lineno}"
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                continue
            assert node.attr in allowed or node.attr in own, f"line {node.lineno}: {ast.unparse(node)}"


def test_nothing_of_torchs_fsdp_is_called() -> None:
    for path in SOURCE.glob("*.py"):
        code = ast.unparse(ast.parse(path.read_text()))
        tree = ast.parse(code)
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)) and "distributed.fsdp" in ast.unparse(node):
                assert path.stem in ("_torch", "install", "compat", "formats", "given"), path.name
                if path.stem in ("compat", "formats", "given"):  # the enums and config classes of FSDP1, which hold values
                    assert isinstance(node, ast.ImportFrom) and node.module == "torch.distributed.fsdp"
                    assert not {alias.name for alias in node.names} & {"FullyShardedDataParallel", "fully_shard", "FSDPModule"}
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch_fsdp":
                allowed = ("torch_fsdp.FSDPModule", "torch_fsdp.fully_shard", "torch_fsdp.wrap")
                allowed += ("torch_fsdp.ShardingStrategy", "torch_fsdp.MixedPrecision")
                assert ast.unparse(node) in allowed, "for isinstance, as a key, and to ask policy objects"
            if isinstance(node, ast.Attribute):
                assert "ops.fsdp" not in ast.unparse(node), path.name


def test_the_map_in_the_package_docstring_names_every_file() -> None:
    import fullshard

    for path in FILES:
        assert f"{path.name} " in (fullshard.__doc__ or ""), path.name
