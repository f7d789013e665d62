"""Optimizers of sharded parameters, and the clipping of their gradients.

optimizer_hooks.py  rebind(): optimizers built before sharding; hooks before and after each step
local_steps.py      steps of torch's element-wise optimizers on local shards
local_view.py       local_view(): the same for optimizers of other libraries
muon.py             steps of torch.optim.Muon: Newton-Schulz on the owners of whole matrices
whole_view.py       whole_view(): steps of other libraries' optimizers on whole parameters, on their owners
step_wrapper.py     wrap_step(): code around the step of an optimizer's class, for local_view() and whole_view()
matrix_owners.py    MatrixOwners: functions of whole matrices; caches of exchanges
matrix_choice.py    matrices_of(): the matrices of a model, by role
pieces.py           the matrices in a parameter: one, or several by a split
owners.py           plan_owners(): which rank owns which matrix
owner_exchange.py   messages between shards and owners, as one rank sends and receives them
empty_shards.py     empty shards in steps of other libraries' optimizers
clipping.py         clip_grad_norm_
copies.py           what a call computes or writes once must be equal on all ranks
"""
