"""What runs a step: units, the executor of the planner's actions, messages, gradients to be handed out, and recovery.

unit.py               Unit: one fully_shard() call, its modules, parameters and groups
options.py            UnitOptions: what one unit was told, resolved
executor.py           Runtime: runs the planner's actions on lanes, and recovers from exceptions
backward.py           what rides on autograd's graphs and tells that a backward is here, or over
reducer.py            GradientReducer: reductions under way, and when their gradients are handed out
heartbeat.py          the message that ends a synchronised backward
communicator.py       lanes, process groups, and the log of what is said on them
setup_collectives.py  what ranks settle outside of forward and backward
replicas.py           a unit's weights and buffers, alike on all ranks
sync.py               weights and buffers in step on all ranks
lint.py               parameters that nobody reduces; remarks about waste
"""
