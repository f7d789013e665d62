"""The front end: the API of users, and the hooks of torch.

api.py              fully_shard()
module.py           FSDPModule (the mixin of sharded modules), UnshardHandle, counting(), stats(), undo()
full_params.py      full_params(), gathered(): unsharded parameters inside a block
init.py             materialize(): allocate and initialize a model that was built on meta
known_values.py     values of meta tensors that follow from shapes and constants
optim.py            optimizers built before sharding; hooks before and after each step
local_steps.py      steps of torch's element-wise optimizers on local shards
local_view.py       local_view(): the same for optimizers of other libraries
empty_shards.py     empty shards in steps of other libraries' optimizers
step_entries.py     entries of optimizer steps in the collective logs
clipping.py         clip_grad_norm_, and torch's clipping over several meshes
autograd.py         grad(): gradients as values
patches.py          the changes that the first fully_shard() makes in torch
any_failed.py       any_failed(): skip a failed step on all ranks
hooks.py            module, autograd and state-dict hooks, which call the runtime
forward_methods.py  registered forward methods, such as generate
class_swap.py       install units on modules and remove them; copies, pickles, undo
ties.py             tied parameters that an earlier unit owns already
fsdp2_state.py      views of units with the names of FSDP2's private state
"""
