"""FSDP1's interface on top of units; public as `fullshard.compat`.

wrapper.py      FullyShardedDataParallel
arguments.py    arguments of its constructor, checked and resolved
state_dicts.py  state dict types of FSDP1 for optimizers: full, sharded, local; errors of one rank raised on all ranks
"""
