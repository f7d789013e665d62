"""Load and save model weights: each rank reads and writes its own bytes of ordinary checkpoints; full tensors are streamed.

Planning is pure. Only headers, rules and plans depend on the file format.
"""

from fullshard.weights.background import Saving
from fullshard.weights.changes import Changes
from fullshard.weights.converting import Converted, convert_weights
from fullshard.weights.description import PublishedShard, PublishedTensor
from fullshard.weights.ema import EMA
from fullshard.weights.loading import Loaded, load_weights
from fullshard.weights.publish import Publication, Version, publish
from fullshard.weights.published import transformers_rules
from fullshard.weights.rules import Convert, Drop, Keep, Merge, Rename, RenameBy, Sort, Split, Stack, Transpose, Unstack
from fullshard.weights.saving import Saved, save_weights
from fullshard.weights.streaming import iter_full

__all__ = [
    "EMA",
    "Changes",
    "Convert",
    "Converted",
    "Drop",
    "Keep",
    "Loaded",
    "Merge",
    "Publication",
    "PublishedShard",
    "PublishedTensor",
    "Rename",
    "RenameBy",
    "Saved",
    "Saving",
    "Sort",
    "Split",
    "Stack",
    "Transpose",
    "Unstack",
    "Version",
    "convert_weights",
    "iter_full",
    "load_weights",
    "publish",
    "save_weights",
    "transformers_rules",
]
