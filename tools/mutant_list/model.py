"""Mutants of `megalodon_jax`: one for each module with logic that can be wrong."""

from __future__ import annotations

from tools.mutant_list.mutant import of

MUTANTS = (
    *of(
        "megalodon_jax/checkpoint.py",
        (
            "tensors_by_shape_alone",
            "tensors that were edited are those that were saved",
            "f\"{row['dtype']} {tuple(row['shape'])} sha256 {row['sha256'][:16]}\"",
            "f\"{row['dtype']} {tuple(row['shape'])}\"",
            "test_checkpoint.py",
        ),
    ),
    *of(
        "megalodon_jax/config.py",
        (
            "sized_head_never_tied",
            "a head as large as the vocabulary, said so, is not the embedding",
            "return self.output_size in (-1, self.vocab_size)",
            "return self.output_size == -1",
            "test_config.py test_weights.py test_model_forward.py",
        ),
    ),
    *of(
        "megalodon_jax/convert.py",
        (
            "narrow_export_narrows_everything",
            "an export in bfloat16 rounds sensitive parameters too",
            "if role_of(name) in SENSITIVE:",
            "if asked is None and role_of(name) in SENSITIVE:",
            "test_convert.py::test_a_narrow_export_keeps_sensitive_parameters_in_float32",
        ),
    ),
    *of(
        "megalodon_jax/inference.py",
        (
            "sampling_peak_kept",
            "logits are divided by the temperature without taking the peak off",
            "logits = (logits - peak) / jnp.maximum(temperature, GREEDY_BELOW)",
            "logits = logits / jnp.maximum(temperature, GREEDY_BELOW)",
            "test_generation.py::test_no_finite_logits_overflow_into_another_token "
            "test_generation.py",
        ),
    ),
    *of(
        "megalodon_jax/inputs.py",
        (
            "negative_mask_accepted",
            "a mask of negative integers passes for one",
            "(number != 0) & (number != 1),",
            "number > 1,",
            "test_inputs.py::test_numbers_other_than_zero_and_one_are_no_mask",
        ),
    ),
    *of(
        "megalodon_jax/layers/attention.py",
        (
            "attention_weights_of_nothing",
            "a query that sees no key divides by the sum of no weights",
            "weights = weights / jnp.where(total > 0, total, 1.0)",
            "weights = weights / total",
            "test_attention.py",
        ),
    ),
    *of(
        "megalodon_jax/layers/complex_ema.py",
        (
            "ema_phase_derivative_from_zero",
            "the derivative of the phase runs from order 0",
            "2.0 * math.pi / N * np.arange(1, N + 1), theta.dtype",
            "2.0 * math.pi / N * np.arange(N), theta.dtype",
            "test_derivatives.py::test_the_poles_derivative_is_that_of_the_formula",
            "plain",
        ),
    ),
    *of(
        "megalodon_jax/layers/contraction.py",
        (
            "products_accumulate_in_bf16",
            "products of narrow operands are summed and returned in the narrow dtype",
            "preferred_element_type=accum, out_sharding=placed)",
            "out_sharding=placed).astype(accum)",
            "test_contraction.py",
            "plain byte_lm",
        ),
        (
            "cotangents_stay_wide",
            "a gradient multiplies the float32 cotangent with the narrow operand",
            "gradient = _narrow(transposes[i], compute, accum, places[i], bar, other)",
            "gradient = jnp.einsum(transposes[i], bar, other, preferred_element_type=accum)",
            "test_contraction.py",
        ),
        (
            "gradients_are_rounded",
            "gradients of wide operands are rounded to the narrow dtype",
            "gradients.append(gradient.astype(dtypes[i]))",
            "gradients.append(gradient.astype(compute).astype(dtypes[i]))",
            "test_contraction.py",
        ),
        (
            "shards_keep_their_gradients",
            "the gradient of an operand that all shards have is not summed over them",
            'a, b = (jax.lax.pcast(x, tuple(axes - _varying(x)), to="varying") for x in (a, b))',
            'a, b = (jax.lax.pcast(x, (), to="varying") if axes else x for x in (a, b))',
            "test_contraction.py",
        ),
    ),
    *of(
        "megalodon_jax/layers/dropout.py",
        (
            "dropout_one_mask_for_all_rows",
            "every row of an array gets the same mask",
            "jax.random.bernoulli(key, 1.0 - rate, x.shape)",
            "jax.random.bernoulli(key, 1.0 - rate, x.shape[1:])",
            "test_dropout_keys.py",
        ),
    ),
    *of(
        "megalodon_jax/layers/ffn.py",
        (
            "ffn_scale_one_layer_on",
            "the layer-wise scale counts layers from 1",
            "0.1 * 0.5**layer_index",
            "0.1 * 0.5 ** (layer_index + 1)",
            "test_model_forward.py::test_rescaled_layers_halve_and_others_do_not",
            "swiglu_rescale_scale",
        ),
    ),
    *of(
        "megalodon_jax/layers/lora.py",
        (
            "lora_scale_without_rank",
            "an adapter is scaled by alpha, not by alpha / rank",
            "return alpha / (math.sqrt(rank) if rslora else rank)",
            "return alpha / (math.sqrt(rank) if rslora else 1)",
            "test_lora.py",
        ),
    ),
    *of(
        "megalodon_jax/layers/norms.py",
        (
            "rmsnorm_eps_outside_the_root",
            "epsilon is added to the root mean square instead of under the root",
            "y = wide * jax.lax.rsqrt("
            "jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)",
            "y = wide / (jnp.sqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True)) + self.eps)",
            "test_norms.py",
            "plain",
        ),
    ),
    *of(
        "megalodon_jax/layers/rotary.py",
        (
            "rope_base_ignored",
            "rope_base does not reach the angles",
            "float(self.base) ** (-np.arange(half) / half)",
            "10_000.0 ** (-np.arange(half) / half)",
            "test_mixed_dtypes.py::test_another_base_turns_and_is_exported_as_it_is "
            "test_attention.py",
            "multi_head",
        ),
    ),
    *of(
        "megalodon_jax/layers/stack.py",
        (
            "loop_takes_the_first_scale",
            "a loop over layers scales all of them like the first",
            "float(block.ffn.scale) for block in blocks",
            "float(blocks[0].ffn.scale) for block in blocks",
            "test_scan_layers.py",
        ),
    ),
    *of(
        "megalodon_jax/layers/timestep_norm.py",
        (
            "timenorm_forgets_its_first_variance",
            "a fresh stream starts from variance 0 instead of 1",
            "m2 = var0[:, None] * jnp.maximum(n0, 1.0)",
            "m2 = var0[:, None] * n0",
            "test_norms.py",
            "plain",
        ),
    ),
    *of(
        "megalodon_jax/loss.py",
        (
            "empty_mean_is_nan",
            "without a valid target the mean divides by 0",
            "(total / jnp.maximum(count, 1).astype(total.dtype))",
            "(total / count.astype(total.dtype))",
            "test_loss.py::test_without_a_valid_target_loss_and_gradient_are_zero",
            "empty-loss",
        ),
    ),
    *of(
        "megalodon_jax/model.py",
        (
            "padding_row_learns",
            "the padding row gets a gradient through the embedding",
            "jax.lax.stop_gradient(x), x)",
            "x, x)",
            "test_model_forward.py::test_the_padding_row_gets_no_gradient_through_the_embedding",
            "pad_inside",
        ),
    ),
    *of(
        "megalodon_jax/precision.py",
        (
            "rounded_layer_hidden",
            "of stacked layers one that was rounded is hidden by the others",
            '    check_unstacked("precision", model)\n',
            "",
            "test_stacked.py",
        ),
    ),
    *of(
        "megalodon_jax/quantization/formats.py",
        (
            "key_of_a_float_sum",
            "the key is made of a sum in floating point, which has an order",
            "bits = jax.lax.bitcast_convert_type(x, jnp.uint32)",
            "bits = jax.lax.bitcast_convert_type(jnp.sum(x), jnp.uint32)",
            "test_quantize.py test_gemm.py",
        ),
    ),
    *of(
        "megalodon_jax/quantization/products.py",
        (
            "gradients_in_the_forward_format",
            "gradients are taken in the format of the forward product",
            "key, fmt = key if backend.stochastic else None, backend.gradients",
            "key, fmt = key if backend.stochastic else None, backend.forward",
            "test_gemm.py::test_each_direction_has_the_format_of_its_backend",
            "mxfp8-nvfp4",
        ),
        (
            "float8_units_of_hopper",
            "the float8 units of Hopper multiply, whose sums keep about 13 bits",
            'major == "10" else',
            'major in ("9", "10") else',
            "test_gemm.py::test_the_path_follows_the_device",
        ),
    ),
    *of(
        "megalodon_jax/ragged.py",
        (
            "ragged_rows_stay_moved",
            "what was computed of rows on the left is not moved back",
            "return rolled(x, -start)",
            "return x",
            "test_ragged.py::test_each_row_is_what_it_is_alone",
            "stream_ragged",
        ),
    ),
    *of(
        "megalodon_jax/segments.py",
        (
            "stream_never_begins_a_document",
            "a row goes on whatever the segment id of its next token is",
            "goes_on = first == cache.document",
            "goes_on = first == first",
            "test_packed.py::test_documents_begin_anew_in_a_loop_over_tokens "
            "test_packed.py::test_a_stream_of_documents_is_the_row_of_them",
        ),
    ),
    *of(
        "megalodon_jax/sharding/sequence.py",
        (
            "state_one_shard_late",
            "a shard's EMA goes on from the state before its left neighbour's",
            "distance = here - 1 - jnp.arange(parts, dtype=jnp.int32)",
            "distance = here - 2 - jnp.arange(parts, dtype=jnp.int32)",
            "test_agreement.py",
        ),
    ),
    *of(
        "megalodon_jax/sharding/vocabulary.py",
        (
            "filled_rows_are_tokens",
            "rows that fill up a vocabulary count in the softmax",
            "return jnp.where(jnp.arange(logits.shape[-1]) < size, logits, -jnp.inf)",
            "return logits",
            "test_agreement.py",
        ),
    ),
    *of(
        "megalodon_jax/torch_files.py",
        (
            "average_for_the_model",
            "a moving average beside the model is taken for the model",
            "trained = [p for p in own if p not in averages]",
            "trained = averages or own",
            "test_stability_files.py::test_checkpoints_of_other_scripts_are_walked_for_their_parts",
        ),
    ),
    *of(
        "megalodon_jax/types.py",
        (
            "trimmed_keys_visible",
            "what was trimmed away is read as long as its slot holds it",
            "return jnp.where(latest >= first, latest, -1)",
            "return jnp.where(latest >= 0, latest, -1)",
            "test_streaming_caches.py::test_a_trimmed_cache_has_forgotten_whatever_the_split",
        ),
    ),
    *of(
        "megalodon_jax/weights.py",
        (
            "other_tied_head_accepted",
            "a tied head that differs from the embedding is dropped without a word",
            "if not np.array_equal(head, embed):",
            "if head.shape != embed.shape:",
            "test_weights.py test_convert.py",
        ),
    ),
)
