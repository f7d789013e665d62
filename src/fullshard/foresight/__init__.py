"""Foresight: whether a step fits, what it costs and where that goes, found out without running it.

kernels.py      operators that an accelerator has as one kernel, for meta
trace.py        one step of a model on meta: forwards and backwards of modules, and the birth and death of every storage
optimizer.py    the optimizer's step over a rank's shards, on meta
ledger.py       bytes that come and go, each with a category and the unit it is of
program.py      what is queued on which lane, and what waits for it, in the order of the host
group.py        what a parameter group allocates and sends when it is gathered and reduced
fsdp2.py        the same as torch's FSDP2 does it
simulate.py     a trace, a plan and options, run by the planner that runs the training
allocator.py    a model of torch's caching allocator, for what is reserved
hardware.py     constants of GPUs and networks, each with its source
rates.py        how fast products and attention are, by their sizes
calibrate.py    the same of this machine, measured
clock.py        a program on a clock: what computes when, what is under way, and what is waited for
values.py       what a step decides by values of tensors, which meta does not have
precision.py    in which dtype each parameter computes, and where inputs and outputs are cast
question.py     the arguments of explain()
setup.py        from what a user gives to what is simulated
facts.py        what a step takes: verdict, peak, seconds
report.py       the same as text and as figures
picture.py      the same as HTML, PNG and a trace for Perfetto
allocations.py  what the CPU's allocator does while something runs
recorder.py     record(): notes what a run sends and waits for
recorded.py     the run that was recorded
comparison.py   a run held against its prediction
explanation.py  explain(), and Explanation
space.py        what a search may change, and the seconds and bytes that a setting cannot do without
search.py       search(): which settings fit, and the smallest change that does
command.py      the command line

Only tracing touches tensors, and those are on meta. The planner, layouts and options are the objects of the runtime.
"""
