"""Foresight: predicts the memory, the time and the collectives of a training step without running it.

kernels.py      fused kernels of an accelerator, on meta
trace.py        tracer of one step on meta: events of modules, operators, storages and gradients
optimizer.py    the optimizer's step on a rank's shards, on meta
owners.py       a step of Muon: exchange of whole matrices with their owners
ledger.py       allocations and frees, each with a category and a unit
program.py      operators, collectives on streams, and waits, in the order of the host
group.py        allocations and collectives of a parameter group, as ParamGroup, GroupGradients and Reduction make them
fsdp2.py        allocations and collectives of a parameter group in torch's FSDP2
simulate.py     simulator of steps: a trace, run through the runtime's scheduler
allocator.py    model of torch's caching allocator, for reserved bytes
hardware.py     constants of GPUs and networks, each with a source, and speed of kernels by size
calibrate.py    measurement of the constants of this machine
clock.py        clock for a program: start and end of operators and collectives, and waits
values.py       control flow that depends on tensor values, which meta does not have
precision.py    compute dtypes of parameters, and casts of inputs and outputs
question.py     arguments of explain()
setup.py        from the arguments of explain() to the input of the simulator
facts.py        estimate of a step: verdict, peak memory, seconds
report.py       the estimate as text and as figures
picture.py      the estimate as HTML, PNG and a trace for Perfetto
recorder.py     record(): records the collectives, the waits and the memory of a run
recorded.py     a recorded run
comparison.py   comparison of a recorded run with its prediction
explanation.py  explain(), and Explanation
space.py        settings of a search, and lower bounds of their seconds and bytes
search.py       search(): settings that fit, and the smallest change that fits
command.py      the command line

Only tracing uses tensors, and these are on meta. The scheduler, layouts and options are the objects of the runtime.
"""
