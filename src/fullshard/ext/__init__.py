"""Rare features beside the engine, each one a file that can be deleted together with its lines here.

The engine (core, comm, checks, frontend, state) imports nothing of this package. A feature imports `fullshard.core`, `checks`,
`comm`, `state`, `optim` and `frontend`, or attaches at an extension point of the engine: docs/architecture.md lists them.

any_failed.py       any_failed(): skip a failed step on all ranks
gathered.py         gathered(): unsharded parameters to differentiate through
grad.py             grad(): gradients as values
join.py             FSDPModule.join(): take part in collectives without computing
materialize.py      materialize(): allocate and initialize a model that was built on meta
undo.py             undo(): plain modules again
"""

import fullshard.ext.join  # noqa: F401  a method of sharded modules
from fullshard.ext.any_failed import any_failed
from fullshard.ext.gathered import gathered
from fullshard.ext.grad import grad
from fullshard.ext.materialize import materialize
from fullshard.ext.undo import undo

__all__ = [
    "any_failed",
    "gathered",
    "grad",
    "materialize",
    "undo",
]
