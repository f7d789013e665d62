"""When things move. Pure: events of forward and backward come in, actions go out, without a tensor in sight.

residency.py  where the data of a unit is, the legal moves, and actions as values
order.py      the order in which units ran, and which units are expected next
planner.py    Planner: events in, actions out
join.py       forward calls in which this rank takes part without computing
"""
