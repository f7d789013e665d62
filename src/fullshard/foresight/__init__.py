"""Foresight: predicts the memory, the time and the collectives of a training step without running it.

Only tracing uses tensors, and these are on meta. The scheduler, layouts and options are the objects of the runtime.
"""
