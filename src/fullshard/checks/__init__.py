"""Detection of diverged, failed and missing ranks. A watchdog compares the collective logs of ranks that wait."""
