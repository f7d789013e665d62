"""Rare features beside the engine, each one a file that can be deleted together with its lines here.

The engine (core, comm, checks, frontend, state) imports nothing of this package. A feature imports `fullshard.core`, `checks`,
`comm`, `state`, `optim`, `frontend` and `wrap`, or attaches at an extension point of the engine. The first line of each file
says what it is; docs/architecture.md lists the extension points with the files that use them.
"""

import fullshard.ext.equal_values
import fullshard.ext.fills
import fullshard.ext.join
import fullshard.ext.remarks
import fullshard.ext.step_entries
import fullshard.ext.subclasses
import fullshard.ext.two_hops
import fullshard.ext.unwritten
from fullshard.ext import replicas
from fullshard.ext.any_failed import any_failed
from fullshard.ext.capture import Graph, capture_obstacles
from fullshard.ext.full_params import full_params
from fullshard.ext.gathered import gathered
from fullshard.ext.grad import grad
from fullshard.ext.materialize import materialize
from fullshard.ext.undo import undo

__all__ = [
    "Graph",
    "any_failed",
    "capture_obstacles",
    "full_params",
    "gathered",
    "grad",
    "materialize",
    "replicas",
    "undo",
]
