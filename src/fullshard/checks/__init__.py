"""Detection of diverged, failed and missing ranks. If a rank waits too long, a watchdog compares collective logs."""
