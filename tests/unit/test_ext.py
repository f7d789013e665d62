"""Rare features are beside the engine: it imports none, and works without each one's file."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import rotation
from test_wings import FILES, SOURCE, imported, name_of

from fullshard._torch import HONOURS_SUBCLASSES

ENGINE = ("core", "comm", "checks", "frontend", "state")
REFUSED = {  # without these files, what is said of a use of them
    "ext.fills": "sharded parameter 'weight' of unit '0': each shard could get the same numbers.",
    "ext.subclasses": "Parameter 'weight' cannot be sharded: expected a plain torch.Tensor, got a Hooked, which no kind of group takes.",
    "ext.two_hops": "HFSDP needs a file of fullshard that is missing",
    "fsdp2.full_mesh": "needs a file of fullshard that is missing",
}
BESIDE = ("ext", "fsdp2")
FEATURES = rotation.share(sorted(name_of(path) for path in FILES if path.parent.name in BESIDE), 4)

# torch is imported once; a process for each copy of the package is forked from this one, and forks its second rank.
TRAIN = """
import copy, importlib, json, os, sys, tempfile, traceback
import torch, torch.distributed as dist
import torch.distributed.tensor, torch._dynamo
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

torch.set_num_threads(1)

class Hooked(torch.Tensor):
    def fsdp_pre_all_gather(self, mesh):
        return (self.as_subclass(torch.Tensor),), None

    def fsdp_post_all_gather(self, outputs, metadata, dtype, *, out=None):
        return outputs[0].as_subclass(Hooked), outputs

class Dims:
    shard_names, replicate_names = ("dp",), ()

def train(rank, store):
    import fullshard
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    model = copy.deepcopy(plain)
    for module in (model[0], model[2], model):
        fullshard.fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.1) for one in (plain, model)]
    for step in range(2):
        batch = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        plain(batch).square().mean().backward()
        model(batch[2 * rank : 2 * rank + 2]).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(ours.full_tensor(), theirs)
    hooked = nn.Linear(4, 4)
    hooked.weight = nn.Parameter(torch.randn(4, 4).as_subclass(Hooked))
    refused = {}
    shard = lambda **how: fullshard.fully_shard(nn.Identity(), **how)
    for feature, use in (
        ("ext.fills", lambda: nn.init.normal_(model[0].weight)),
        ("ext.subclasses", lambda: fullshard.fully_shard(hooked, mesh=init_device_mesh("cpu", (2,)))),
        ("ext.two_hops", lambda: shard(mesh=init_device_mesh("cpu", (2, 1)), states=fullshard.HFSDP)),
        ("fsdp2.full_mesh", lambda: shard(mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), dp_mesh_dims=Dims())),
    ):
        try:
            use()
        except (fullshard.StateError, ValueError) as failure:
            refused[feature] = str(failure)
    dist.destroy_process_group()
    return refused

def ended(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def try_copy(folder):
    sys.path.insert(0, folder)
    import fullshard
    assert fullshard.__file__.startswith(folder), fullshard.__file__
    store = f"{folder}/store"
    other = fork(train, 1, store)
    refused = train(0, store)
    names = sorted(name for name in fullshard.__all__ if hasattr(fullshard, name))
    with open(f"{folder}/found.json", "w") as file:
        json.dump([names, refused], file)
    assert not ended(other), "rank 1 failed"

def fork(call, *args):
    if pid := os.fork():
        return pid
    try:
        call(*args)
        code = 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)

print(json.dumps([ended(fork(try_copy, folder)) for folder in sys.argv[1:]]))
"""


def exported(feature: str) -> set[str]:
    """The names of a file of a rare feature that the package exports."""
    tree = ast.parse((SOURCE / feature.partition(".")[0] / "__init__.py").read_text())
    package, _, name = f"fullshard.{feature}".rpartition(".")
    found = [(node.module, alias.name) for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    return {alias for module, alias in found if module == f"fullshard.{feature}" or (module, alias) == (package, name)}


def copy_without(feature: str, folder: Path) -> None:
    """Copy the package, but not the file of a rare feature, its import, and its names in `__all__`."""
    shutil.copytree(SOURCE, folder / "fullshard")
    package, name = feature.split(".")
    (folder / "fullshard" / package / f"{name}.py").unlink()
    init = folder / "fullshard" / package / "__init__.py"
    imports = [f"from fullshard.{feature} import", f"import fullshard.{feature}\n", f"from fullshard.{package} import {name}\n"]
    gone = [*imports, *(f'"{name}",' for name in exported(feature))]
    init.write_text("".join(line for line in init.read_text().splitlines(True) if not line.lstrip().startswith(tuple(gone))))


@pytest.fixture(scope="module")
def copies() -> Iterator[dict[str, tuple[int, Path, str]]]:
    """For each rare feature, a copy of the package without its file: the exit code of a program that trains with it, and its errors."""
    with tempfile.TemporaryDirectory(prefix="without") as folder:
        places = [Path(folder) / feature for feature in FEATURES]
        for feature, place in zip(FEATURES, places):
            copy_without(feature, place)
        command = [sys.executable, "-c", TRAIN, *map(str, places)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert ran.returncode == 0, ran.stderr
        codes = json.loads(ran.stdout)
        yield {feature: (code, place, ran.stderr) for feature, code, place in zip(FEATURES, codes, places)}


@pytest.mark.parametrize("path", [path for path in FILES if path.parent.name in ENGINE], ids=name_of)
def test_the_engine_imports_no_rare_feature(path: Path) -> None:
    assert not [name for name in imported(path) if name.split(".")[0] in BESIDE]


@pytest.mark.processes
@pytest.mark.parametrize("feature", FEATURES)
def test_without_the_file_of_a_rare_feature_the_rest_trains(copies: dict[str, tuple[int, Path, str]], feature: str) -> None:
    import fullshard

    code, place, errors = copies[feature]
    assert code == 0, errors
    names, refused = json.loads((place / "found.json").read_text())
    assert set(fullshard.__all__) - set(names) == exported(feature), "its names are gone, and no others"
    if feature in REFUSED and (feature != "ext.fills" or HONOURS_SUBCLASSES):
        assert REFUSED[feature] in refused.pop(feature)
    assert not refused
