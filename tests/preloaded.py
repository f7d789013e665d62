"""What the processes of ranks share: imported, and used for the first time, by the server that forks them.

DTensor imports torch._dynamo when it is first used, and an optimizer more of it with its first step: most of a second for each
rank of each pool. What is imported here need nobody look at, nor copy, when it collects garbage.
"""

import gc
import importlib
import importlib.util

import torch

# Builds of torch for accelerators bring triton, which torch._dynamo imports; what it leaks it prints when a process ends.
without_triton = importlib.util.find_spec("triton") is None

for name in (
    "hypothesis",
    "numpy",
    "pytest",
    *["torch._dynamo"] * without_triton,
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "fullshard.compat",
    "models",
):
    importlib.import_module(name)

if without_triton:  # the first step imports torch._dynamo, too
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)]).step()
gc.collect()
gc.freeze()
