"""Rare features beside the engine, each one a file that can be deleted together with its lines here.

The engine (core, comm, checks, frontend, state) imports nothing of this package. A feature imports `fullshard.core`, `checks`,
`comm`, `state`, `optim` and `frontend`, or attaches at an extension point of the engine: docs/architecture.md lists them.

any_failed.py       any_failed(): skip a failed step on all ranks
"""

from fullshard.ext.any_failed import any_failed

__all__ = [
    "any_failed",
]
