"""Load and save model weights: each rank reads and writes its own bytes of ordinary checkpoints; full tensors are streamed.

boxes.py      boxes: rectangular parts of tensors, and the box of each tensor that each rank has
headers.py    headers of safetensors files, and the files of a checkpoint
rules.py      rules of key maps, as values
key_map.py    apply rules to the tensors of a checkpoint
published.py  checkpoint conversions of transformers as rules of key maps
plan.py       plan a load or a save: which rank reads or writes which rows, and which ranks exchange them
targets.py    tensors of a model: names, local memory, shards of all ranks
exchange.py   fixed-size memory through which rows pass, and their exchange between ranks in one collective
transfer.py   read and write bytes of files with several threads, and report progress
moving.py     move rows between files and shards, as planned
allocating.py allocate memory for a model on meta, restore buffers that no checkpoint has, and mark tensors without values
loading.py    load_weights()
layout.py     lay out a checkpoint in files, as save_pretrained does
commit.py     replace a directory atomically
inside.py     move files into a directory that cannot be replaced
background.py saves in the background of training; ranks agree through the store
steps.py      one directory per step, and a link to the latest
saving.py     save_weights()
ema.py        EMA: moving averages of a model's weights
streaming.py  iter_full()
receiver.py   one rank that receives full tensors: each shard travels to it once
publish.py    publish(): sealed versions of the weights, for inference engines
description.py what is published: mesh and placements of each tensor, and which transport takes it
changes.py    what changed between two versions
converting.py convert_weights(), without a model
command.py    python -m fullshard weights: show, convert, check

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
