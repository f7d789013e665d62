"""Values and classes of sharded modules, outside of steps.

full_params.py      full_params(): unsharded parameters inside a block
class_swap.py       classes of sharded modules, units on modules; copies and pickles
ties.py             tied parameters that an earlier unit owns already
"""
