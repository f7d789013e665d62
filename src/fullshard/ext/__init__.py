"""Rare features beside the engine, each one a file that can be deleted together with its lines here.

The engine (core, comm, checks, frontend, state) imports nothing of this package. A feature imports `fullshard.core`, `checks`,
`comm`, `state`, `optim`, `frontend` and `wrap`, or attaches at an extension point of the engine, which docs/architecture.md
lists.

all_reduce_hook.py  FSDPModule.set_all_reduce_hook(): a function that is called with each reduced flat gradient
any_failed.py       any_failed(): skip a failed step on all ranks
collectives.py      custom all-gathers and reduce-scatters, memory of messages: FSDPModule.set_custom_all_gather() and others
equal_values.py     what ranks sharded is compared in the first forward: fully_shard(sync="check")
finalize.py         FSDPModule.finalize_backward(): backwards that the user ends
forward_methods.py  register_fsdp_forward_method(): methods such as generate, which unshard their unit as its forward does
fsdp2_names.py      names of FSDP2 without an effect here: share_comm_ctx(), set_reduce_scatter_unused_params() and others
fsdp2_state.py      views of units with the names of FSDP2's private state: fully_shard.state(), model._get_fsdp_state()
fills.py            random fills of sharded parameters: torch.nn.init, reset_parameters()
gathered.py         gathered(): unsharded parameters to differentiate through
grad.py             grad(): gradients as values
join.py             FSDPModule.join(): take part in collectives without computing
materialize.py      materialize(): allocate and initialize a model that was built on meta
post_optim_event.py FSDPModule.set_post_optim_event(): all-gathers wait for an optimizer on a stream of its own
remarks.py          errors and warnings before the first forward: added parameters, max_norm, a large root
step_entries.py     entries of optimizer steps in the collective logs, so that ranks that step alone are told
subclasses.py       tensor subclasses with their own all-gather hooks (fsdp_pre_all_gather, fsdp_post_all_gather)
undo.py             undo(): plain modules again
unwritten.py        memory that `to_empty()` or `load_weights()` left without values is found in the first forward
"""

import fullshard.ext.all_reduce_hook
import fullshard.ext.equal_values
import fullshard.ext.fills
import fullshard.ext.fsdp2_state
import fullshard.ext.join
import fullshard.ext.post_optim_event
import fullshard.ext.remarks
import fullshard.ext.step_entries
import fullshard.ext.subclasses
import fullshard.ext.unwritten
from fullshard.ext.any_failed import any_failed
from fullshard.ext.collectives import AllGather, Comm, ReduceScatter
from fullshard.ext.finalize import GradientReductionHandle
from fullshard.ext.forward_methods import register_fsdp_forward_method
from fullshard.ext.fsdp2_names import share_comm_ctx
from fullshard.ext.gathered import gathered
from fullshard.ext.grad import grad
from fullshard.ext.materialize import materialize
from fullshard.ext.undo import undo

__all__ = [
    "AllGather",
    "Comm",
    "GradientReductionHandle",
    "ReduceScatter",
    "any_failed",
    "gathered",
    "grad",
    "materialize",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "undo",
]
