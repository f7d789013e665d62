"""The life of units: one fully_shard() call from forward to `.grad`, and the runtime that runs what the scheduler decides.

unit.py               Unit: pre_forward, post_forward, pre_backward, and requests of the user
runtime.py            Runtime: runs the scheduler's actions, ends a backward; one per device and thread
reducer.py            GradientReducer: reductions in flight, and when their gradients become .grad
heartbeat.py          the all-reduce at the end of a synchronized backward
communicator.py       streams, process groups, and the log of collectives
collectives_pool.py   the collectives of process groups, one object per group and role
setup_collectives.py  collectives outside of forward and backward
unit_modules.py       the modules of a unit: their place in the model, their hooks, which of them run
options.py            UnitOptions: the options of one unit, resolved
backward.py           hooks on autograd graphs, and the backward in progress

Rare features, each called from one place:

recovery.py           cleans up after an exception or an interrupt
interrupts.py         the guard against interrupts
join.py               join(): take part in collectives without computing
late_grads.py         gradients that arrive without a hook on an output
finalization.py       backwards that the user ends
kept_grads.py         gradients that backwards keep without communication
replicas.py           equal weights and buffers on replicas
sync.py               checks and broadcasts of values before sharding
unwritten.py          memory that nothing wrote before the first forward
lint.py               parameters that no unit reduces; warnings about waste
"""
