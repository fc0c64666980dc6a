"""Mutants of what decides in `stability`, and of the second architecture."""

from __future__ import annotations

from tools.mutant_list.mutant import of

_SURVIVAL = "test_survival.py"
_GUARD = "test_guard.py"
_MLA = "test_model.py"
_MLA_PARITY = "test_comparison.py::test_logits_and_blocks_are_those_of_transformers"

PROBES = (
    *of(
        "stability/storage/survival.py",
        (
            "gap_of_powers_of_two",
            "toward 0 from a power of two the neighbour is as far as outward",
            "np.where(inward, 4.0, 2.0)",
            "np.where(inward, 2.0, 2.0)",
            _SURVIVAL,
        ),
        (
            "ties_lost",
            "a step of exactly half a gap is always lost",
            "((np.abs(u) == gap) & even)",
            "(np.abs(u) == gap)",
            _SURVIVAL,
        ),
        (
            "control_stored_narrow",
            "the control in float32 is stored in bfloat16",
            "control = measure(model, batches, optimiser, None, loss=loss)",
            "control = measure(model, batches, optimiser, BF16, loss=loss)",
            f"{_SURVIVAL}",
            "plain",
        ),
    ),
    *of(
        "stability/core/findings.py",
        (
            "half_frozen_warns",
            "a leaf of which exactly half is frozen is warned of",
            "else value <= threshold:",
            "else value < threshold:",
            f"{_SURVIVAL}::test_a_leaf_is_warned_of_when_more_is_frozen_than_moves",
        ),
    ),
    *of(
        "stability/core/rounding.py",
        (
            "rounding_not_checked",
            "a compiler that removes the rounding is not noticed",
            "wrong = int(np.sum(got != fmt.round(x)))",
            "wrong = int(np.sum(got != got))",
            "test_rounding.py::test_a_compiler_that_removes_the_rounding_is_noticed",
        ),
    ),
    *of(
        "stability/core/number_formats.py",
        (
            "casts_overflow",
            "values beyond the range of e4m3 become NaN",
            "return self.clamp(x).astype(self.dtype)",
            "return np.asarray(x, np.float32).astype(self.dtype)",
            "test_number_formats.py",
        ),
        (
            "spacing_below_normal",
            "below the smallest normal number the spacing goes on shrinking",
            "normal = np.maximum(exponent - 1, self.min_exponent)",
            "normal = exponent - 1",
            "test_number_formats.py",
        ),
    ),
    *of(
        "stability/products/accuracy.py",
        (
            "draws_beyond_neighbours",
            "a draw two steps away is right",
            "np.all(np.abs(errors) < step)",
            "np.all(np.abs(errors) < 3 * step)",
            "test_products.py::test_one_draw_two_steps_away_is_no_draw",
        ),
        (
            "nearest_is_a_draw",
            "rounding to nearest passes for stochastic rounding",
            "np.sum(errors**2 - variance),",
            "np.sum(errors),",
            "test_products.py::test_a_draw_is_a_neighbour_and_unbiased",
        ),
        (
            "any_rotation_is_right",
            "what is no Hadamard transform is the truth's operand",
            "equal = exact.shape == ours.shape and bool(np.all(np.abs(ours - exact) <= bound))",
            "equal = exact.shape == ours.shape",
            "test_products.py::test_a_rotation_is_one_in_any_order_of_its_sums test_products.py",
        ),
    ),
    *of(
        "stability/recovery/guard.py",
        (
            "clipped_steps_skipped",
            "a step whose norm spikes is skipped instead of clipped",
            "keep = report.verdict <= Verdict.CLIPPED",
            "keep = report.verdict < Verdict.CLIPPED",
            _GUARD,
        ),
        (
            "rejected_losses_enter",
            "rejected losses enter the window",
            "losses=_pushed(state.losses, report.loss, keep),",
            "losses=_pushed(state.losses, report.loss, jnp.ones_like(keep)),",
            _GUARD,
        ),
        (
            "skips_never_forgotten",
            "skips are counted together although accepted steps lie between",
            "skips=jnp.where(keep, 0, state.skips + 1),",
            "skips=jnp.where(keep, state.skips, state.skips + 1),",
            _GUARD,
        ),
        (
            "rejected_by_multiplication",
            "a rejected step is multiplied with 0: NaN stays",
            'return jnp.where(keep, new, old) if hasattr(new, "dtype") else new',
            "return keep.astype(new.dtype) * new + (~keep).astype(new.dtype) * old"
            ' if hasattr(new, "dtype") else new',
            _GUARD,
        ),
        (
            "norm_in_the_gradients_dtype",
            "the norm of gradients is taken in their own dtype",
            "leaves = (leaf.astype(jnp.float32) for leaf in jax.tree.leaves(tree))",
            "leaves = jax.tree.leaves(tree)",
            f"{_GUARD}::test_the_norm_is_taken_in_float32",
        ),
    ),
    *of(
        "stability/nonfinite/flags.py",
        (
            "infinity_is_finite",
            "only NaN takes a flag down",
            "return jnp.all(jnp.isfinite(x))",
            "return ~jnp.any(jnp.isnan(x))",
            "test_nonfinite.py",
        ),
        (
            "flags_by_name",
            "the first flag down is the first by name",
            "return [name for name in flags if not bool(np.asarray(host[name]))]",
            "return [name for name in host if not bool(np.asarray(host[name]))]",
            "test_nonfinite.py",
        ),
    ),
    *of(
        "stability/storage/optimiser_state.py",
        (
            "counter_stops_early",
            "the limit of a counter is reported one bit too low",
            ".nmant + 1)\n",
            ".nmant)\n",
            "test_optimiser_state.py::test_counters_stop_where_their_dtype_does",
        ),
        (
            "norm_too_large_is_fine",
            "a norm that comes out too large is fine",
            "wrong = not abs(ratio - 1.0) <= bound",
            "wrong = not 1.0 - ratio <= bound",
            "test_optimiser_state.py",
        ),
    ),
    *of(
        "stability/storage/ema_poles.py",
        (
            "phases_from_zero_in_the_probe",
            "the probe's phases run from order 0",
            "return np.arange(1, N + 1) * expit(self.theta) / N",
            "return np.arange(N) * expit(self.theta) / N",
            "test_ema_poles.py",
        ),
        (
            "memory_of_the_logits",
            "|q| is not rounded to the storage format",
            "stored = radius if fmt is None else fmt.round(radius)",
            "stored = radius",
            "test_ema_poles.py",
        ),
    ),
    *of(
        "stability/storage/embedding_rows.py",
        (
            "one_zero_is_a_zero_row",
            "a row with one element that is zero is taken for a zero row",
            "~np.any(np.asarray(leaves[EMBEDDING].load()) != 0, axis=1)",
            "~np.all(np.asarray(leaves[EMBEDDING].load()) != 0, axis=1)",
            "test_embedding_rows.py",
        ),
        (
            "rows_judged_in_float32",
            "a row that float32 takes for zero is called zero",
            "leaves[EMBEDDING].load()",
            "leaves[EMBEDDING].read()",
            "test_embedding_rows.py",
        ),
    ),
    *of(
        "stability/dtype_audit/policy.py",
        (
            "accumulators_by_their_inputs",
            "an accumulator is narrow where an input is",
            "return [row for row in inside if row.output and is_narrow(row.output)]",
            "return [row for row in inside if any(map(is_narrow, row.inputs))]",
            "test_dtype_policy.py test_dtype_audit.py::test_the_model_keeps_the_policy",
        ),
        (
            "wide_where_all_are_narrow",
            "a rule of width is broken where every number is narrow",
            "any(map(is_narrow, _numbers(row)))",
            "all(map(is_narrow, _numbers(row)))",
            "test_dtype_policy.py",
        ),
        (
            "every_rounding_kept",
            "a rounding the compiler left out is not found",
            "if row.how == ROUND_TRIP and not kept(row)]",
            "if row.how == ROUND_TRIP and not kept(row) and not compiled]",
            "test_dtype_policy.py::test_a_rounding_the_compiler_left_out_is_found",
        ),
        (
            "exception_of_any_rule",
            "an exception excuses rows outside of its phases",
            "and (not self.phases or row.phase in self.phases)",
            "and (not self.phases or bool(row.phase))",
            "test_dtype_policy.py::test_a_scope_holds_what_fits_all_it_names",
        ),
    ),
    *of(
        "stability/dtype_audit/rows.py",
        (
            "removed_rows_unseen",
            "a removed row is no difference",
            "for identity in sorted(left.keys() | right.keys()):",
            "for identity in sorted(right.keys()):",
            "test_dtype_audit.py::test_tables_differ_by_rows_and_counts_and_not_by_lines",
        ),
        (
            "bf16_is_wide",
            "bfloat16 is not narrow",
            "jnp.dtype(dtype).itemsize < 4",
            "jnp.dtype(dtype).itemsize < 2",
            "test_dtype_policy.py",
        ),
    ),
)

_CASES = "mla-moe mla-moe-yarn"
SUBJECT = (
    *of(
        "parity/deepseek_v3/attention.py",
        (
            "mla_absorbed_scale",
            "absorbed scores are scaled by the head's width, without YaRN's factor",
            "(plain.astype(wide) + rotary.astype(wide)) * self.config.score_scale",
            "(plain.astype(wide) + rotary.astype(wide)) * (\n"
            "            self.config.qk_head_dim**-0.5 if absorbed else self.config.score_scale\n"
            "        )",
            f"{_MLA}::test_absorbed_is_expanded {_MLA}",
        ),
        (
            "mla_scores_narrow",
            "scores are added up in the dtype of the activations",
            "wide = widened(plain.dtype)\n        return",
            "wide = plain.dtype\n        return",
            f"{_MLA}::test_scores_of_narrow_activations_are_wide",
        ),
        (
            "mla_token_does_not_see_itself",
            "a token sees only those before it",
            "<= queries[:, None]",
            "< queries[:, None]",
            _MLA,
        ),
        (
            "mla_cache_from_zero",
            "queries of a continued text stand at its start",
            "seen = _causal(x.shape[1], now.latent.shape[1], filled)",
            "seen = _causal(x.shape[1], now.latent.shape[1], 0)",
            _MLA,
        ),
        (
            "mla_rotation_without_amplitude",
            "YaRN's amplitude is left out of the rotation",
            "size = config.rope_scaling.amplitude if config.rope_scaling else 1.0",
            "size = 1.0",
            _MLA_PARITY,
        ),
        (
            "mla_pairs_as_halves",
            "rotary pairs are halves although the configuration interleaves them",
            "if config.rope_interleave:",
            "if config.rope_interleave and config.rope_scaling is None:",
            f"{_MLA_PARITY} {_MLA}",
        ),
        (
            "mla_latent_eps_of_the_config",
            "the norm of the latents takes the epsilon of the blocks",
            "self.kv_a_layernorm = RMSNorm(R, 1e-6)",
            "self.kv_a_layernorm = RMSNorm(R, 10 * config.rms_norm_eps)",
            _MLA_PARITY,
        ),
    ),
    *of(
        "parity/deepseek_v3/router.py",
        (
            "router_bias_in_the_weights",
            "the selection bias enters the weights of the experts",
            "weights = jnp.take_along_axis(scores, chosen, axis=-1)",
            "weights = jnp.take_along_axis(scores + self.bias(scores.dtype), chosen, axis=-1)",
            f"{_MLA}::test_the_selection_bias_is_no_part_of_a_weight",
        ),
        (
            "router_closed_groups_at_zero",
            "experts of a closed group rank as 0 instead of last",
            "ranked, -jnp.inf)\n    margin",
            "ranked, 0.0)\n    margin",
            f"{_MLA}::test_a_group_that_is_out_is_out_even_where_scores_are_negative",
        ),
        (
            "router_groups_by_their_best",
            "groups rank by their best expert instead of their best two",
            "jax.lax.top_k(ranked.reshape(T, G, E // G), 2)[0]",
            "jax.lax.top_k(ranked.reshape(T, G, E // G), 1)[0]",
            f"{_MLA}::test_groups_rank_by_their_best_two",
        ),
        (
            "router_bias_learns",
            "a gradient reaches the selection bias",
            "return jax.lax.stop_gradient(self.e_score_correction_bias.astype(dtype))",
            "return self.e_score_correction_bias.astype(dtype)",
            f"{_MLA}::test_the_selection_bias_moves_against_the_load_and_has_no_gradient",
        ),
        (
            "router_bias_with_the_load",
            "the selection bias moves with the load",
            "rate * jnp.sign(jnp.mean(wide) - wide)",
            "rate * jnp.sign(wide - jnp.mean(wide))",
            f"{_MLA}::test_the_selection_bias_moves_against_the_load_and_has_no_gradient",
        ),
        (
            "router_scaling_lost",
            "weights of experts are not scaled",
            "return Routing(logits, chosen, weights * config.routed_scaling_factor)",
            "return Routing(logits, chosen, weights)",
            f"{_MLA}::test_the_selection_bias_is_no_part_of_a_weight",
        ),
    ),
    *of(
        "parity/deepseek_v3/model.py",
        (
            "experts_weighed_out_of_order",
            "outputs of experts are weighed in the order of tokens, not of experts",
            "routing.weights.reshape(-1)[order][:, None]",
            "routing.weights.reshape(-1)[:, None]",
            f"{_MLA}::test_sorted_experts_are_all_experts_masked",
        ),
        (
            "shared_expert_of_the_routed",
            "the shared expert sees what the routed ones said",
            "return self.experts(flat, routing).reshape(x.shape) + self.shared_experts(x), routing",
            "routed = self.experts(flat, routing).reshape(x.shape)\n"
            "        return routed + self.shared_experts(routed), routing",
            _MLA_PARITY,
        ),
        (
            "mla_positions_from_zero",
            "positions of a continued text begin anew",
            "jnp.broadcast_to(filled + jnp.arange(L, dtype=jnp.int32), (B, L))",
            "jnp.broadcast_to(jnp.arange(L, dtype=jnp.int32), (B, L))",
            f"{_MLA}::test_a_cache_of_latents_continues_as_the_whole_text",
        ),
    ),
)

MUTANTS = (*PROBES, *SUBJECT)
