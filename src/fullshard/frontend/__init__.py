"""The front end: everything that callers and torch touch.

api.py              fully_shard()
module.py           FSDPModule (the class that is mixed in), UnshardHandle, counting(), stats(), undo()
full_params.py      full_params(), gathered(): full parameters for the length of a block
init.py             materialize(): memory and first values for a model built on meta
known_values.py     what tensors on meta would hold, where shapes and constants say it
optim.py            optimizers built before sharding; what precedes and follows each step
local_steps.py      element-wise optimizers compute with local shards
local_view.py       local_view(): the same for those of other libraries
empty_shards.py     empty shards as optimizers of other libraries see them
step_entries.py     the entries of optimizer steps in the logs
clipping.py         clip_grad_norm_, and torch's over several meshes
autograd.py         grad(): gradients as values
any_failed.py       any_failed(): skipping a step on all ranks
hooks.py            translates torch's callbacks into events of the runtime
forward_methods.py  methods that gather as forward does, with the units below that they touch
class_swap.py       putting units on modules and taking them off: copies, pickles, plain modules again
ties.py             parameters that an earlier unit owns already
fsdp2_state.py      FSDP2's state objects, as views on units
"""
