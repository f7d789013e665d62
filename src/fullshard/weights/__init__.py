"""Weights in and out: each rank reads and writes its own bytes of ordinary checkpoints, and full tensors stream.

boxes.py      rectangular parts of tensors, and which stretches of memory they are
headers.py    files of safetensors: their headers, and the files of a checkpoint
rules.py      the rules of key maps, as values
key_map.py    what rules make of the tensors of a checkpoint
plan.py       which rank reads which bytes, and where they go
targets.py    the tensors of a model, and which part of them each rank holds
meeting.py    what all ranks of a model say to each other in one call
reading.py    reads bytes of files into memory, by several threads
loading.py    load_weights()

Planning is pure. Only headers, rules and plans know of formats; shards are written where they are.
"""

from fullshard.weights.loading import Loaded, load_weights
from fullshard.weights.rules import Convert, Drop, Merge, Rename, Split, Stack, Transpose

__all__ = ["Convert", "Drop", "Loaded", "Merge", "Rename", "Split", "Stack", "Transpose", "load_weights"]
