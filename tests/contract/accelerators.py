"""Which laws hold with all tensors on an accelerator, simulated or not."""

from contract.laws import ALONE, LAWS

BY_A_LIBRARY = ["collective", "reduction", "gather_scatter", "value", "backward"]
ON_ACCELERATORS = [*BY_A_LIBRARY, "step", "optimizer", "sharding"]  # what the last three move is as the others move it
# Of an accelerator a rank does not read the other ranks' flags: these end otherwise there, see ddp/reducer.py.
READS_FLAGS = {
    "a_step_after_a_backward_that_raised_sends_nothing_of_it",
    "a_step_that_one_rank_leaves_out_is_an_error_on_all",
    "every_rank_drops_the_reduction_that_an_interrupted_backward_began",
    "reentrant_checkpoints_on_some_ranks_are_an_error_on_all",
}
# The simulated accelerator has no sparse tensors and no convolutions, and torch's DDP no library for it; the last ones
# take a minute there.
BEYOND_THE_SIMULATION = {
    "gradients_keep_channels_last_strides",
    "invalid_arguments_of_the_root_are_errors_on_every_rank",
    "the_default_device_of_the_program_is_ignored",
    "training_matches_distributed_data_parallel",
    "what_cannot_be_sharded_is_refused_by_name",
    "a_full_state_moves_between_sharded_and_unsharded_runs",
    "optimizers_that_are_stepped_in_hooks_train_like_one_process",
}


def laws_on_accelerators(*, has_library: bool) -> list[str]:
    """Return the names of laws; dd.join() is refused where a library of the accelerator moves the tensors."""
    modules = BY_A_LIBRARY if has_library else ON_ACCELERATORS
    return [
        name
        for name, law in {**LAWS, **ALONE}.items()
        if law.__module__.removesuffix("_laws").rpartition(".")[2] in modules
        and name not in READS_FLAGS | BEYOND_THE_SIMULATION
        and "sparse" not in name
        and not (has_library and "joined" in name)
    ]
