"""Weights in and out: each rank reads and writes its own bytes of ordinary checkpoints, and full tensors stream.

texts.py      texts of errors
progress.py   what a load or a save tells its caller on the way
boxes.py      rectangular parts of tensors
headers.py    files of safetensors: their headers, and the files of a checkpoint
rules.py      the rules of key maps, as values
key_map.py    what rules make of the tensors of a checkpoint
published.py  the rules that transformers has for a model, as rules of key maps
holdings.py   tensors of a model, and which part of each of them each rank has
rounds.py     rows that one rank reads or writes for several, in rounds
plan.py       which rank reads which bytes, and where they go
targets.py    the tensors of a model, as its modules have them
meeting.py    what all ranks of a model say to each other in one call
staging.py    memory of a fixed size through which rows pass
exchange.py   values that ranks send each other in one message
reading.py    reads bytes of files into memory, by several threads
allocating.py memory for a model on meta, and the marks of what stays without values
buffers.py    values of buffers that no checkpoint has
computing.py  tensors that functions make of whole ones
loading.py    load_weights()
layout.py     which tensor is where in which file, as save_pretrained has it
save_plan.py  which rank writes which rows, and from whom it gets them
writing.py    writes memory to files, by a thread per file
commit.py     a directory that is replaced in one step
inside.py     a directory that stays, into which files are moved
background.py a save behind the training: its ranks settle through the store
steps.py      a directory for each step, and a link to the latest
saving.py     save_weights()
ema.py        EMA: moving averages of a model's weights
streaming.py  iter_full()
converting.py convert_weights(), without a model
inspecting.py what is in a checkpoint, and whether it is whole
command.py    python -m fullshard weights

Planning is pure. Only headers, rules and plans know of formats; shards are written where they are.
"""

from fullshard.weights.background import Saving
from fullshard.weights.converting import Converted, convert_weights
from fullshard.weights.ema import EMA
from fullshard.weights.loading import Loaded, load_weights
from fullshard.weights.published import transformers_rules
from fullshard.weights.rules import Convert, Drop, Keep, Merge, Rename, RenameBy, Sort, Split, Stack, Transpose, Unstack
from fullshard.weights.saving import Saved, save_weights
from fullshard.weights.streaming import iter_full

__all__ = [
    "EMA",
    "Convert",
    "Converted",
    "Drop",
    "Keep",
    "Loaded",
    "Merge",
    "Rename",
    "RenameBy",
    "Saved",
    "Saving",
    "Sort",
    "Split",
    "Stack",
    "Transpose",
    "Unstack",
    "convert_weights",
    "iter_full",
    "load_weights",
    "save_weights",
    "transformers_rules",
]
