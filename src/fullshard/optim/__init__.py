"""Optimizers of sharded parameters, and the clipping of their gradients."""
