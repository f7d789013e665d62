"""What the processes of ranks share: imported, and used for the first time, by the server that forks them.

DTensor imports torch._dynamo when it is first used, and an optimizer more of it with its first step: most of a second for each
rank of each pool. What is imported here need nobody look at, nor copy, when it collects garbage.
"""

import gc
import importlib
import os
import sys

import torch

for name in (
    "hypothesis",
    "numpy",
    "pytest",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "fullshard.compat",
    "models",
):
    importlib.import_module(name)

os.fsync = os.fstat  # which refuses what is closed, too, and waits for no disk
torch.optim.AdamW([torch.zeros(1, requires_grad=True)]).step()
gc.collect()
if "triton" not in sys.modules:  # which prints what of it is not collected when a process ends
    gc.freeze()
