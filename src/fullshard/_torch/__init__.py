"""Wrappers around the private parts of torch that fullshard uses. No other file uses private names of torch.

A comment "Private:" in a wrapper names the private part, the reason for it, and the consequence of a change in torch. Where it
names no consequence, a removed name raises AttributeError, ImportError or TypeError: at `import fullshard` for module-level
names, else at the first call.

Callers write `_torch.name(...)`: this page exports the names of all files. A name that is replaced here, as in a test, is
replaced for callers outside of the package; functions inside it look up names in their own file.
"""

from fullshard._torch.autograd import *
from fullshard._torch.c10d import *
from fullshard._torch.collectives import *
from fullshard._torch.devices import *
from fullshard._torch.dispatch import *
from fullshard._torch.dtensors import *
from fullshard._torch.flops import *
from fullshard._torch.fsdp import *
from fullshard._torch.nn import *
from fullshard._torch.optim import *
from fullshard._torch.simulation import *
from fullshard._torch.spmd_types import *
from fullshard._torch.versions import *
