"""Values and classes of sharded modules, outside of steps."""
