"""Sharding, a training step and an optimizer step replace nothing in torch or Python; `uninstall()` reverts `install()`."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

SNAPSHOT = """
import builtins, json, os, signal, sys, threading, types, warnings
import torch, torch.distributed as dist
import torch.distributed.checkpoint.state_dict, torch.distributed.fsdp, torch.distributed.tensor.parallel
import torch._dynamo, torch.utils.checkpoint, torch.utils.flop_counter
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor, Shard

REGISTRIES = "hook", "registr", "handler", "observer"

def is_function(value):
    kinds = type, property, staticmethod, classmethod, types.MethodDescriptorType, types.GetSetDescriptorType
    return callable(value) or isinstance(value, kinds)

def inside(value):
    '''A function, with what its closure holds: a wrapped function is replaced there without a trace outside.'''
    function = getattr(value, "__func__", value)
    if not isinstance(function, types.FunctionType):
        return (function,)
    held = [cell.cell_contents for cell in function.__closure__ or () if "empty" not in repr(cell)]
    return function, function.__code__, *(one for one in held if is_function(one))

def belongs(name):
    first = str(name).split(".")[0]
    return first == "torch" or first in ("builtins", "gc", "copy", "pickle", "signal", "threading", "warnings", "weakref")

def snapshot():
    '''Names of all functions, classes and class attributes, and of registries, each with the objects behind it; of one rank.'''
    found = {}
    if rank:
        return found
    for module_name, module in list(sys.modules.items()):
        if not belongs(module_name) or not isinstance(module, types.ModuleType):
            continue
        for name, value in list(vars(module).items()):
            key = f"{module_name}.{name}"
            if is_function(value):
                found[key] = inside(value)
            elif isinstance(value, (dict, list, set)) and any(word in key.lower() for word in REGISTRIES):
                found[key] = tuple(value.items()) if isinstance(value, dict) else tuple(value)
            if isinstance(value, type) and belongs(value.__module__):
                for attribute, held in list(vars(value).items()):
                    if is_function(held):
                        found[f"{value.__module__}.{value.__qualname__}.{attribute}"] = inside(held)
    found["handlers of single operators"] = tuple(DTensor._op_dispatcher._custom_op_handlers.items())
    found["flops"] = tuple(torch.utils.flop_counter.flop_registry)
    found["hooks of Python"] = sys.excepthook, sys.unraisablehook, sys.displayhook, threading.excepthook, warnings.showwarning
    found["filters of warnings"] = tuple(warnings.filters)
    for number in signal.valid_signals():
        found[f"signal {number}"] = (signal.getsignal(number),)
    found["wake-up descriptor"] = (wakeup := signal.set_wakeup_fd(-1),)
    signal.set_wakeup_fd(wakeup)
    return found

def same(one, other):
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one is other or (isinstance(one, (str, int, types.MethodType)) and one == other)

def changed(before):
    after = snapshot()
    return sorted(name for name, value in before.items() if name in after and not same(value, after[name]))

def train(model, clip=nn.utils.clip_grad_norm_, optimizer=torch.optim.AdamW):
    steps = optimizer(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(2, 8)).sum().backward()
        clip(model.parameters(), 1.0)
        steps.step()
        steps.zero_grad()

def stack():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

store, other = sys.argv[1], os.fork()
rank = int(other == 0)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))

# What torch itself sets up at its first use.
for reference in (stack(), torch.distributed.fsdp.fully_shard(stack(), mesh=mesh)):
    for optimizer in (torch.optim.AdamW, torch.optim.SGD):
        train(reference, optimizer=optimizer)
    torch.distributed.checkpoint.state_dict.get_model_state_dict(reference)
"""

STEP = """
before = snapshot()
import fullshard
assert not changed(before), f"import changed {changed(before)}"
torch.manual_seed(0)
for optimizer in (torch.optim.AdamW, torch.optim.SGD):
    model = stack()
    old = list(model.parameters())
    kinds = list(map(type, old))
    for block in model[0], model[2]:
        fullshard.fully_shard(block, mesh=mesh)
    fullshard.fully_shard(model, mesh=mesh)
    train(model, fullshard.clip_grad_norm_, optimizer)
    with fullshard.full_params(model), torch.no_grad():
        model[0].weight.zero_()
    model.eval()(torch.ones(2, 8)).sum().item()
    torch.distributed.checkpoint.state_dict.get_model_state_dict(model)
    assert list(map(type, old)) == kinds, "the class of the user's tensors"
if rank == 0:
    print(json.dumps(changed(before)))
"""

INSTALL = """
before = snapshot()
fullshard.install()
inside_install = changed(before)
import torch.distributed.fsdp
assert torch.distributed.fsdp.fully_shard is fullshard.fully_shard
torch.manual_seed(0)
train(fullshard.fully_shard(stack(), mesh=mesh))
fullshard.uninstall()
if rank == 0:
    print(json.dumps([inside_install, changed(before)]))
    assert not os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]), "rank 1 failed"
"""

OURS = {  # torch's own registrations of hooks around the steps of all optimizers
    "torch.optim.optimizer._global_optimizer_pre_hooks",
    "torch.optim.optimizer._global_optimizer_post_hooks",
}


@pytest.fixture(scope="module")
def changes(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """What rank 0 of a fresh group prints, as JSON: after training, and in and after `install()`. It forks rank 1."""
    folder = tmp_path_factory.mktemp("left-alone")
    command = [sys.executable, "-W", "ignore", "-c", SNAPSHOT + STEP + INSTALL]
    ran = subprocess.run([*command, f"{folder}/store"], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return [json.loads(line) for line in ran.stdout.splitlines()[-2:]]


def test_sharding_and_training_replace_nothing_in_torch_and_python(changes: list[list[Any]]) -> None:
    assert set(changes[0]) == OURS, changes[0]


def test_uninstall_leaves_torch_as_it_was_before_install(changes: list[list[Any]]) -> None:
    inside, after = changes[1]
    assert {"torch.distributed.fsdp.fully_shard", "torch.nn.utils.clip_grad.clip_grad_norm_"} <= set(inside), inside
    assert set(after) <= OURS, after
