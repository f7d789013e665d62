"""FSDP1's interface on top of units; public as `fullshard.compat`."""
