"""Tests of the CPU once more on one CUDA GPU that all ranks share, with gloo between them. Without a GPU there are none.

python -m pytest tests/gpu --numprocesses 8 --dist load
"""

from __future__ import annotations

import torch
from test_rooms import NOT_THERE, ROOMS, bodies_of, moved

COUNTERS = "with a default device, torch makes the counters of steps there, and loads them to the host"
NOT_ON_GPU = NOT_THERE | {
    "fsdp1_wrapper_checkpoints_of_sharded_tensors_that_fsdp1_saved_are_loaded": COUNTERS,
    "fsdp1_wrapper_optimizer_states_without_groups_or_with_names_of_wrappers_are_taken": COUNTERS,
    "fsdp1_wrapper_parameters_listed_in_another_order_on_one_rank_are_saved_and_loaded_by_name": COUNTERS,
    "fsdp1_wrapper_the_first_rank_alone_may_hold_the_optimizers_state": COUNTERS,
    "fsdp1_wrapper_the_older_names_of_optimizer_state_dicts": COUNTERS,
    "fsdp1_wrapper_what_was_saved_does_not_change_with_training": COUNTERS,
    "fsdp2_surface_the_profiler_names_gathers_and_reductions": "the profiler lists each name for the GPU as well",
    "full_params_materialize_gives_the_same_full_weights_for_every_number_of_ranks": "has a reference on the CPU",
    "grad_dtypes_clipping_and_steps_see_those_gradients": "foreach takes one dtype for weights and gradients there",
    "local_steps_weights_and_states_are_those_of_plain_tensors_and_of_dtensors[Adagrad, fused]": "some versions of torch lack it",
    "local_steps_writes_are_seen_by_the_next_gather": "some versions of torch have no fused Adagrad there",
    "meshes_a_hybrid_mesh_needs_no_names": "makes the tensor of ranks on the default device",
    "muon_on_every_mesh_and_level[in host memory]": "has a reference on the GPU",
    "parity_gradients_in_slices_are_bit_for_bit_those_in_one_message": "both models reduce in slices there",
    "subclasses_memory_of_to_empty_is_loaded_and_written_through_views": "has a model on the CPU in mind",
    "whole_matrices_a_function_of_every_matrix[in host memory]": "has a reference on the GPU",
    "whole_matrices_an_optimizer_of_whole_matrices_on_every_mesh[in host memory]": "has a reference on the GPU",
}

if torch.cuda.is_available():
    rooms = dict.fromkeys(("levels", "subclasses", "hfsdp", "muon", "whole_matrices", *ROOMS))
    BODIES = {name: test for room in rooms for name, test in bodies_of(room).items()}
    globals().update(
        {f"test_{name}": moved(name, test, "all cuda", NOT_ON_GPU) for name, test in BODIES.items() if name not in NOT_ON_GPU}
    )
