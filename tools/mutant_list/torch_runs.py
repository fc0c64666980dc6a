"""Mutants of what a torch user asks: files, optimiser states, gradients, and the whole run."""

from __future__ import annotations

from tools.mutant_list.mutant import of

_FILES = "test_stability_files.py"
_MATCHING = "tests/stability/storage/test_parameter_matching.py"
_WHOLE = "test_whole_run.py"
_KNOWN = "test_known_gradients.py"
_NARROW = "test_torch_narrow.py"

MUTANTS = (
    *of(
        "megalodon_jax/torch_files.py",
        (
            "average_for_the_model",
            "a moving average beside the model is taken for the model",
            "trained = [p for p in own if p not in averages]",
            "trained = averages or own",
            f"{_FILES}::test_checkpoints_of_other_scripts_are_walked_for_their_parts",
        ),
        (
            "one_wrapper_taken_off",
            "of a compiled model in data parallelism one prefix of two is taken off",
            "named = {name.removeprefix(prefix): tensor for name, tensor in named.items()}",
            "return {name.removeprefix(prefix): tensor for name, tensor in named.items()}",
            f"{_FILES}::test_wrappers_of_wrappers_are_taken_off",
        ),
        (
            "views_of_one_storage_are_one",
            "parts of one storage, as the halves of a fused matrix, count as one parameter",
            "return (values.data_ptr(), *values.shape, *values.stride())",
            "return (values.untyped_storage().data_ptr(),)",
            f"{_FILES}::test_halves_of_a_fused_matrix_are_two_parameters",
        ),
        (
            "classes_of_a_pickle_imported",
            "what a pickle names beside tensors is refused instead of replaced",
            "torch.serialization.safe_globals(stand_ins)",
            "torch.serialization.safe_globals([])",
            f"{_FILES}::test_checkpoints_of_other_scripts_are_walked_for_their_parts",
        ),
    ),
    *of(
        "stability/storage/torch_state.py",
        (
            "rate_of_now",
            "the rate is where a schedule has taken it, not where it began",
            'rate = _number(group.get("initial_lr", group.get("lr")))',
            'rate = _number(group.get("lr"))',
            f"{_WHOLE}::test_a_schedule_is_taken_from_where_it_began",
        ),
        (
            "moments_not_corrected",
            "gradients of a young state are taken for as small as its moments",
            "first, second = first / (1 - beta1**steps), second / (1 - beta2**steps)",
            "first, second = first, second",
            f"{_WHOLE}::test_moments_say_how_large_gradients_are_and_whether_they_keep_their_sign",
        ),
        (
            "noise_of_a_young_state",
            "the noise of a first moment of few steps is that of a settled one",
            "noise = (1 - beta1) / (1 + beta1) * (1 + forgotten) / (1 - forgotten)",
            "noise = (1 - beta1) / (1 + beta1)",
            f"{_WHOLE}::test_a_state_of_few_steps_does_not_take_noise_for_a_push",
        ),
        (
            "sorted_names_taken_for_the_modules_order",
            "the order of a safetensors file counts as that of the module",
            "True, decays) if order.stored else None",
            "True, decays)",
            f"{_MATCHING}::test_equal_matrices_in_a_file_that_is_sorted_by_name_are_refused",
        ),
    ),
    *of(
        "stability/storage/parameter_matching.py",
        (
            "first_fitting_assignment_taken",
            "where several assignments fit, one of them is taken",
            "if len(options[leaf.name]) > 1)",
            "if len(options[leaf.name]) > 9)",
            f"{_MATCHING}::test_what_is_certain_is_what_all_assignments_have_in_common",
        ),
    ),
    *of(
        "stability/storage/known_gradients.py",
        (
            "noise_counts_as_a_push",
            "the square of a mean over batches is taken for the square of the signal",
            "signal = float(np.sqrt(np.clip((share - 1) / (count - 1), 0, 1)))",
            "signal = float(np.sqrt(np.clip(share / count, 0, 1)))",
            f"{_KNOWN}::test_signals_are_the_share_that_keeps_its_sign",
        ),
        (
            "gradients_add_up",
            "the gradient of a batch holds those of the batches before",
            "    module.zero_grad(set_to_none=True)\n    try:",
            "    try:",
            f"{_KNOWN}::test_a_module_that_has_gradients_already_begins_anew",
        ),
    ),
    *of(
        "stability/storage/whole_run.py",
        (
            "families_not_weighed",
            "every leaf counts alike, however far it was to go",
            "self.push[n] = float(np.mean(way)) * self.leaves[n].size",
            "self.push[n] = 1.0",
            f"{_WHOLE}::test_the_size_of_gradients_decides_and_not_the_fidelity_of_a_leaf {_WHOLE}",
        ),
        (
            "moments_cost_nothing",
            "steps that narrow moments shorten cost nothing",
            "lost = self.rounded**power + (1 - self.rounded) * self.shrunk**power",
            "lost = self.rounded**power",
            f"{_WHOLE}::test_moments_cost_more_in_a_longer_run",
        ),
        (
            "parts_of_a_run_not_weighed",
            "a part of a run at a hundredth of the rate counts as one at the rate",
            "np.average(rounded[n], weights=rates)",
            "np.average(rounded[n])",
            f"{_WHOLE}::test_what_is_lost_at_a_small_rate_is_little_of_the_run",
        ),
    ),
    *of(
        "stability/storage/simulate.py",
        (
            "second_moments_rounded_once",
            "a second moment in bfloat16 decays by what is added less",
            "nu = jax.tree.map(lambda x: nearest(beta2 * x, fmt) / beta2, part.nu)",
            "nu = part.nu",
            f"{_WHOLE}::test_moments_in_bfloat16_shorten_steps_as_much_as_those_of_torch",
        ),
    ),
    *of(
        "stability/storage/torch_narrow.py",
        (
            "carry_not_added",
            "what rounding kept from a parameter is stored and never added",
            "p.data += optimizer.state[p][CARRY].float()",
            "p.data += 0 * optimizer.state[p][CARRY].float()",
            f"{_NARROW}::test_kahan_is_right_for_each_element",
        ),
        (
            "rounding_drawn_to_15_bits",
            "the draw is half as wide as what is cut off: rounding leans down",
            "torch.randint(0, 1 << 16, wide.shape",
            "torch.randint(0, 1 << 15, wide.shape",
            f"{_NARROW}::test_stochastic_rounding_is_right_on_average",
        ),
        (
            "loaded_moments_rounded",
            "a loaded state keeps the moments that torch has cast",
            "held = value.detach().to(p.device, copy=True)",
            "held = value.detach().to(p.device, p.dtype, copy=True)",
            f"{_NARROW}::test_a_run_continued_from_its_state_is_the_same_run",
        ),
    ),
    *of(
        "stability/storage/torch_recipe.py",
        (
            "recipe_of_the_first_beta_twice",
            "the recipe writes the first decay rate in the place of the second",
            'more = f"betas=({rule.beta1:g}, {rule.beta2:g}), eps={rule.eps:g}, "',
            'more = f"betas=({rule.beta1:g}, {rule.beta1:g}), eps={rule.eps:g}, "',
            f"{_WHOLE}::test_a_recipe_runs_as_it_is_written",
        ),
    ),
)
