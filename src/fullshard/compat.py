"""FSDP1's names: `from fullshard.compat import FullyShardedDataParallel as FSDP`. They are those of fullshard.fsdp1.wrapper."""

from fullshard.fsdp1.wrapper import *  # noqa: F403
from fullshard.fsdp1.wrapper import __all__ as __all__
