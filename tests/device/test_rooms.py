"""Tests of the CPU once more, with all there is on the asynchronous device: models, batches, references and meshes."""

from __future__ import annotations

import copy
import importlib
import inspect
from typing import Any

import pytest
import rotation
import simulated
from harness import pool
from torch import nn

pytestmark = pytest.mark.skipif(simulated.compiler() is None, reason=simulated.NEEDS)

ROOMS = (
    "addresses",
    "backward",
    "compile",
    "ema",
    "empty_shards",
    "errors",
    "finalization",
    "forward_methods",
    "fsdp1_wrapper",
    "fsdp2_surface",
    "full_params",
    "grad_dtypes",
    "hfsdp",
    "iter_full",
    "join",
    "lint",
    "load_weights",
    "local_steps",
    "local_view",
    "memory",
    "meshes",
    "muon",
    "optimizers",
    "parameter_identity",
    "parity",
    "recomputation",
    "save_weights",
    "sharded_tensor",
    "state_dicts",
    "sync",
    "traffic",
    "where_fsdp2_is_wrong",
    "whole_matrices",
    "wrapping",
)
"""Files of tests that run there. Others look at gloo, at processes that they begin, or at ranks that part, which end as gloo ends."""

NOT_THERE = {  # tests, or cases of them
    "backward_a_rank_that_reduces_where_the_other_one_differentiates_inputs_only_diverges": "ranks that part end as gloo ends",
    "meshes_ranks_along_an_axis_to_shard_over_ascend": "has meshes of the CPU in mind",
    "parity_a_model_may_be_sharded_loaded_and_run_in_inference_mode[meta]": "what it assigns is the CPU's, and stays there",
    f"parameter_identity_embeddings_that_renormalize_their_rows_in_forward_are_refused_by_name[{nn.EmbeddingBag}]": (
        "its meta function says another result"
    ),
    "sync_ranks_with_different_numbers_of_parameters_diverge[off]": "ranks that part end as gloo ends",
    "backward_weights_that_numpy_uses_are_named": "numpy cannot use its memory",
    "compile_compiled_and_eager_agree_and_nothing_is_compiled_again[the whole model]": "one graph more: of what makes tensors there",
    "errors_a_sparse_gradient_is_refused_by_name": "has no kernels for sparse tensors",
    "iter_full_options_that_differ_between_ranks_are_refused_on_all": "ranks that part end as gloo ends",
    "fsdp1_wrapper_what_cannot_be_done_is_refused_before_anything_changed": "asks for what the CPU refuses",
    "fsdp1_wrapper_options_that_a_policy_gives_are_checked_before_anything_changed": "asks for what the CPU refuses",
    "fsdp1_wrapper_arguments_of_the_wrong_type_are_named_before_anything_changed": "has a mesh of the CPU in mind",
    "fsdp1_wrapper_the_attributes_that_scripts_read": "has a mesh of the CPU in mind",
    "fsdp1_wrapper_optimizers_that_differ_between_ranks_are_named_on_every_rank_before_anything_travels[parameters]": (
        "ranks that part end as gloo ends"
    ),
    "fsdp1_wrapper_optimizers_that_differ_between_ranks_are_named_on_every_rank_before_anything_travels[rates]": "ranks that part end as gloo ends",
    "fsdp2_surface_memory_that_a_backend_does_not_have_is_refused": "this one has it",
    "fsdp2_surface_forced_sums_are_scaled_behind_the_collective_and_others_by_it": "looks at gloo's reduce-scatter",
    "fsdp2_surface_a_hook_on_reduced_gradients_sums_over_further_replicas": "asks for what the CPU refuses",
    "memory_a_thread_that_did_not_shard_may_delete_one_model_and_run_another": "tensors of other threads are the CPU's",
    "parity_an_lstm_that_keeps_its_weights_twice": "the device has a kernel for LSTMs that the CPU lacks",
    "traffic_ranks_that_began_anew_count_backwards_to_the_next_heartbeat_alike": "a rank that does not come ends as gloo ends",
    "meshes_pinning_is_skipped_and_said_where_there_is_nothing_to_copy_to": "there is",
    "memory_a_rank_alone_casts_gradients_into_their_sum": "watches the memory of the CPU",
    "hfsdp_a_checkpoint_moves_between_levels_meshes_and_numbers_of_ranks": "has meshes of the CPU in mind",
    "muon_a_checkpoint_of_four_ranks_loads_on_three": "has a mesh of the CPU in mind",
    "muon_a_failure_on_one_rank_raises_on_all_and_changes_nothing": "ranks that part end as gloo ends",
    "muon_ranks_with_other_matrices_are_told": "ranks that part end as gloo ends",
    "muon_a_rank_that_skips_the_step_is_told": "ranks that part end as gloo ends",
    "muon_plain_matrices_step_behind_sharded_ones": "ranks that part end as gloo ends",
    "optimizers_an_option_that_one_rank_changes_in_place_is_told": "options in its memory are not read",
    "save_weights_conjugated_and_negated_views_are_saved_as_they_are_read": "has a mesh of the CPU in mind",
    "whole_matrices_the_peak_of_a_call_is_that_of_the_plan": "watches the memory of the CPU",
    "whole_matrices_states_of_owners_load_on_other_ranks": "has a mesh of the CPU in mind",
    "whole_matrices_a_step_that_fails_on_one_rank_leaves_all_as_before": "ranks that part end as gloo ends",
}


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """Build it once, before ranks look for it."""
    simulated.build()


def moved(name: str, test: Any, kind: str = "all sim", not_there: dict[str, str] = NOT_THERE) -> Any:
    """The test, whose ranks have all there is on the device."""
    body = test.body

    def there(size: int, **arguments: Any) -> None:
        for value in arguments.values():
            if f"{name}[{value}]" in not_there:
                pytest.skip(not_there[f"{name}[{value}]"])
        pool(size, kind).run(body.__module__, body.__name__, arguments, 120.0)

    there.__signature__ = inspect.signature(test)  # type: ignore[attr-defined]
    there.__doc__, there.pytestmark = test.__doc__, copy.copy(test.pytestmark)  # type: ignore[attr-defined]
    return there


def bodies_of(room: str) -> dict[str, Any]:
    """Tests of ranks, by their name and that of the room."""
    found = vars(importlib.import_module(f"test_{room}")).items()
    return {
        name.replace("test_", f"{room}_", 1): test for name, test in found if name.startswith("test_") and hasattr(test, "body")
    }


MOVED = {f"test_{name}": moved(name, test) for room in ROOMS for name, test in bodies_of(room).items() if name not in NOT_THERE}
NAMES = rotation.share(list(MOVED))
if rotation.part() is not None:
    NAMES = NAMES[::4]  # they take a second each
globals().update((name, MOVED[name]) for name in NAMES)


def test_what_is_left_out_exists() -> None:
    assert {name.partition("[")[0] for name in NOT_THERE} - {name for room in ROOMS for name in bodies_of(room)} == set()
