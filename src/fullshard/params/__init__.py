"""The data plane: sharded and unsharded parameters, all-gather, gradient reduction, `.grad`.

sharded_param.py   ShardedParameter: the sharded and the unsharded parameter, and the slots where one of them is registered
shard_values.py    copies into and out of shards: sharding and unsharding for good, assigned parameters, loading
sharded_tensor.py  ShardedDTensor: the class of sharded parameters; its errors name the parameter
stale_params.py    ParameterAlias: parameters from before sharding, aliases of the sharded ones
group.py           ParamGroup: parameters that are all-gathered and reduced together, with flat shard and unsharded buffer
group_grads.py     GroupGradients: gradients kept between backwards; ReductionPlan: layout of the gradients in collectives
arena.py           ReductionArena: memory with fixed addresses for reductions
unsharded.py       FlatBuffer: the unsharded buffer (all-gather output); AllGather: copy-in, collective, copy-out
extension.py       tensor subclasses with their own all-gather hooks
reduction.py       Reduction: reduce-scatter, all-reduce and cast of the gradients of one group
grad_commit.py     GradCommit: sets `.grad` of all parameters or none
uninitialized.py   finds tensors whose memory was never written
"""
