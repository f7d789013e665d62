"""Parameters on both sides: shards that a caller sees, full tensors that modules compute with, gradients on their way back.

sharded_param.py   ShardedParameter: the sharded and the full parameter, and the modules' slots that hold one of them
shard_values.py    values that callers put into shards and take out of them
sharded_tensor.py  ShardedDTensor: its class, which names the parameter when it is mixed with plain tensors
stale_params.py    parameters from before sharding, which stand for the sharded ones
group.py           ParamGroup: parameters that move together, their flat shard and their unsharded buffer
group_grads.py     GroupGradients: gradients that no parameter has yet; ReductionPlan: how they are laid out in messages
arena.py           MessageArena: memory for messages that stays where it is
unsharded.py       UnshardedBuffer: memory of full parameters, and the ways to gather into it
extension.py       tensor subclasses that say themselves what is gathered of them
reduction.py       Reduction: gradients of one group on their way to the shards
grad_commit.py     GradCommit: gradients that arrived become `.grad`, all or none
uninitialized.py   memory that was not written yet
"""
