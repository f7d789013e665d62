"""Importing the package changes nothing in torch; the first fully_shard() does, and uninstall() restores it."""

from __future__ import annotations

import subprocess
import sys

CHANGES = """
import atexit, signal, sys, threading, warnings
import torch, torch.distributed as dist
import torch.distributed.fsdp, torch.distributed.tensor.parallel, torch.distributed.checkpoint.state_dict, torch.utils.flop_counter
from torch import nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

def patched():
    inside = lambda f: f.__closure__[f.__code__.co_freevars.index("func")].cell_contents
    hooks = nn.modules.module, sys.modules["torch.optim.optimizer"]
    return {
        "autograd": (torch.autograd._engine_run_backward, torch.autograd.graph._engine_run_backward),
        "clipping": (inside(nn.utils.get_total_norm), inside(nn.utils.clip_grads_with_norm_)),
        "init": nn.init._no_grad_trunc_normal_,
        "scaling": torch.amp.GradScaler._unscale_grads_,
        "item": sorted(map(str, DTensor._op_dispatcher._custom_op_handlers)),
        "registration": [len(v) for m in hooks for k, v in sorted(vars(m).items()) if k.startswith("_global") and hasattr(v, "__len__")],
        "flops": sorted(map(str, torch.utils.flop_counter.flop_registry)),
        "signals": [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)],
        "threads": threading.active_count(),
        "exit": atexit._ncallbacks(),
        "hooks of Python": (sys.excepthook, threading.excepthook, warnings.showwarning, len(warnings.filters)),
    }

dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())  # which changes sys.excepthook
before = patched()
import fullshard
changed = [key for key, value in patched().items() if value != before.get(key, value)]
assert not changed, f"import changed {changed}"
del before["exit"]  # modules of torch that the first use imports register handlers, too
model = fullshard.fully_shard(nn.Linear(4, 4))
changed = {key for key, value in patched().items() if value != before.get(key, value)}
assert changed == {"autograd", "clipping", "init", "item", "registration", "scaling"}, changed
other = fullshard.fully_shard(nn.Linear(4, 4))
fullshard.undo(model)
try:
    fullshard.uninstall()
except fullshard.StateError as error:
    assert "sharded models are alive" in str(error)
else:
    raise AssertionError("uninstall() left the changes without a word")
assert torch.autograd._engine_run_backward is not before["autograd"][0], "another model is still sharded"
fullshard.undo(other)
deleted = fullshard.fully_shard(nn.Linear(4, 4))
deleted.__dict__["itself"] = deleted  # so that only the collector frees it
del deleted
fullshard.uninstall()
changed = [key for key, value in patched().items() if value != before.get(key, value)]
assert not changed, f"uninstall left {changed}"
fullshard.fully_shard(model)
assert torch.autograd._engine_run_backward is not before["autograd"][0], "the next fully_shard() makes the changes again"
"""


def test_import_changes_nothing_and_uninstall_restores_what_the_first_fully_shard_changed() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", CHANGES], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
