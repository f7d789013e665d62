"""When things move. Pure: events of forward and backward come in, actions go out, without a tensor in sight.

residency.py  where the data of a unit is, the legal moves, and actions as values
records.py    what the planner knows of each unit
calls.py      forwards under way, and forwards whose backward may still come
prefetch.py   the order in which units ran, and which of them are gathered ahead
moves.py      what it takes to have a unit full, or sharded
planner.py    Planner: events in, actions out
join.py       forward calls in which this rank takes part without computing
"""
