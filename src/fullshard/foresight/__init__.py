"""Foresight: which memory a step takes and which messages it sends, found out without running it.

kernels.py   operators that an accelerator has as one kernel, for meta
trace.py     one step of a model on meta: forwards and backwards of modules, and the birth and death of every storage
ledger.py    bytes that come and go, each with a category and the unit it is of
group.py     what a parameter group allocates and sends when it is gathered and reduced
simulate.py  a trace, a plan and options, run by the planner that runs the training

Only tracing touches tensors, and those are on meta. The planner, layouts and options are the objects of the runtime.
"""
