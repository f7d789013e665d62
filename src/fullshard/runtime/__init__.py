"""What runs a step: units, the executor of the planner's actions, messages, gradients to be handed out, and recovery.

runtime.py            Runtime: the parts below, put together, one per thread and device
unit.py               Unit: one fully_shard() call, its modules, parameters and groups
unit_modules.py       the modules of a unit: where they are, their hooks, which of them run
options.py            UnitOptions: what one unit was told, resolved
registry.py           the units of a runtime, by number
steps.py              what happens when a forward or backward of a unit begins and ends
requests.py           what callers ask of a unit outside of its forward and backward
executor.py           runs the planner's actions on lanes
recovery.py           puts right what an exception or an interrupt left half done
interrupts.py         the guard against interrupts
join.py               join(): taking part without computing
backward.py           hooks on graphs, and the backward that is under way
late_grads.py         gradients that no output announced
reducer.py            GradientReducer: reductions under way, and when their gradients are handed out
finalization.py       backwards that the caller ends, and reductions that are waited for later
kept_grads.py         gradients that backwards kept without communication
heartbeat.py          the message that ends a synchronised backward
collectives_pool.py   the collectives of process groups, one object per group and role
communicator.py       lanes, process groups, and the log of what is said on them
setup_collectives.py  what ranks settle outside of forward and backward
replicas.py           a unit's weights and buffers, alike on all ranks
sync.py               weights and buffers in step on all ranks
unwritten.py          memory that nobody wrote before the first forward
lint.py               parameters that nobody reduces; remarks about waste
"""
