"""When to unshard, reshard and reduce. Pure: events of forward and backward in, actions out, no tensors.

scheduler.py  Scheduler: events in, actions out; the record of each unit, and the transitions of its parameters
join.py       forward calls in which this rank takes part in the collectives without computing
"""
