"""FSDP1's world on top of units; public as `fullshard.compat`.

wrapper.py      FullyShardedDataParallel
arguments.py    what its constructor was told, resolved
state_dicts.py  the forms in which FSDP1 saves models and optimizers: full, sharded, local
agreement.py    a step that all ranks take or none: errors on one rank are raised on all
"""
