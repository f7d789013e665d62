"""Values and classes of sharded modules, outside of steps.

class_swap.py       classes of sharded modules, units on modules; copies and pickles
ties.py             tied parameters that an earlier unit owns already
"""
