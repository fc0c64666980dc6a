"""Mutants of conversion, checkpoints, the weight table, audits and low-precision products."""

from __future__ import annotations

from tools.mutant_list.mutant import of

_CHECKPOINT = "test_checkpoint.py"
_QUANTIZE = "test_quantize.py"
_GEMM = "test_gemm.py"

CONVERT = of(
    "megalodon_jax/convert.py",
    (
        "narrow_export_narrows_everything",
        "an export in bfloat16 rounds sensitive parameters too",
        "if role_of(name) in SENSITIVE:",
        "if asked is None and role_of(name) in SENSITIVE:",
        "test_convert.py::test_a_narrow_export_keeps_sensitive_parameters_in_float32",
    ),
    (
        "rates_at_another_base",
        "inverse frequencies are exported at the default base",
        "half, base = config.head_dim // 2, config.effective_rope_base",
        "half, base = config.head_dim // 2, 10_000.0",
        "test_mixed_dtypes.py::test_another_base_turns_and_is_exported_as_it_is",
    ),
    (
        "two_models_in_a_file_accepted",
        "of two models in a file the first is loaded",
        "if len(found) > 1:",
        "if len(found) > 2:",
        "test_model_interop.py",
    ),
    (
        "config_beside_the_file_wins",
        "a passed configuration is ignored where one lies beside the weights",
        "    if config is None:\n        config = read_config",
        '    if config is None or (file.parent / "config.json").is_file():\n'
        "        config = read_config",
        "test_convert.py::test_a_passed_configuration_wins_over_the_one_beside_the_weights",
    ),
    (
        "param_dtype_ignored_on_loading",
        "load_from_pretrained keeps the dtype of the configuration",
        "config = dataclasses.replace(config, param_dtype=dtype)",
        "config = dataclasses.replace(config)",
        "test_convert.py",
    ),
    (
        "exported_head_shares_memory",
        "the exported head is the embedding's own buffer",
        "arrays[HEAD] = arrays[EMBEDDING].copy()",
        "arrays[HEAD] = arrays[EMBEDDING]",
        "test_convert.py::test_a_tied_head_is_exported_as_a_copy_of_its_own",
    ),
)

ROLES = of(
    "megalodon_jax/roles.py",
    (
        "query_gains_not_sensitive",
        "gains of queries and keys are stored narrow",
        '(r"(^|\\.)attn\\.(gamma|beta)$", Role.QK_AFFINE)',
        '(r"(^|\\.)attn\\.(gamma|beta)$", Role.LINEAR)',
        "test_weights.py::test_the_sensitive_set_is_ema_norms_and_the_query_key_affine",
    ),
)

WEIGHTS = of(
    "megalodon_jax/weights.py",
    (
        "other_tied_head_accepted",
        "a tied head that differs from the embedding is dropped without a word",
        "if not np.array_equal(head, embed):",
        "if head.shape != embed.shape:",
        "test_weights.py test_convert.py",
    ),
    (
        "unexpected_tensors_accepted",
        "tensors that are no parameters are dropped without a word",
        "extra = sorted(set(shapes) - set(expected) - set(optional))",
        "extra = []",
        "test_weights.py::test_building_reports_every_problem_in_one_error",
    ),
    (
        "files_keep_their_dtype",
        "a model has the dtypes of the file instead of its configuration",
        "jnp.asarray(_array(given[row.name]), row.dtype)",
        "jnp.asarray(_array(given[row.name]))",
        "test_convert.py test_weights.py",
    ),
    (
        "integers_are_weights",
        "a tensor of integers is cast and loaded",
        "return jnp.issubdtype(jnp.dtype(dtype), jnp.floating)",
        "return jnp.issubdtype(jnp.dtype(dtype), jnp.number)",
        "test_weights.py::test_building_reports_every_problem_in_one_error",
    ),
)

PRECISION = of(
    "megalodon_jax/precision.py",
    (
        "repeated_values_called_rounded",
        "a leaf of ones is reported as rounded",
        "if values.size < 2 or np.all(values == values.flat[0]):",
        "if values.size < 2:",
        "test_precision.py",
    ),
    (
        "wide_leaves_not_reported",
        "only leaves narrower than expected are named",
        "if leaf.dtype != expected}",
        "if leaf.dtype.itemsize < expected.itemsize}",
        "test_precision.py",
    ),
    (
        "one_rounded_value_is_enough",
        "a leaf is reported as rounded where any value is a bfloat16 number",
        "if np.array_equal(values.astype(ml_dtypes.bfloat16).astype(values.dtype), values):",
        "if np.any(values.astype(ml_dtypes.bfloat16).astype(values.dtype) == values):",
        "test_precision.py::test_one_wide_value_clears_a_leaf test_precision.py",
    ),
)

TENSOR_FILES = of(
    "megalodon_jax/tensor_files.py",
    (
        "shard_of_another_save_accepted",
        "a shard that holds more than its index says is accepted",
        "if named != set(here):",
        "if named - set(here):",
        "test_model_interop.py",
    ),
    (
        "every_shard_of_the_folder_read",
        "a stale third shard beside the index is read as well",
        "for shard in sorted(set(places.values()))}",
        'for shard in sorted({p.name for p in index.parent.glob("*.safetensors")})}',
        "test_model_interop.py::test_a_shard_of_an_earlier_save_is_not_loaded "
        "test_model_interop.py test_convert.py",
    ),
)

FILES = of(
    "megalodon_jax/files.py",
    (
        "old_checkpoint_not_put_back",
        "where a rename fails, the old checkpoint stays aside",
        "                previous.rename(target)",
        "                previous.exists()",
        f"{_CHECKPOINT}::test_without_exchange_a_failed_rename_brings_the_old_one_back",
    ),
)

CHECKPOINT = of(
    "megalodon_jax/checkpoint.py",
    (
        "last_byte_not_hashed",
        "the hash of a tensor leaves its last byte out",
        "array.reshape(-1).view(np.uint8).data",
        "array.reshape(-1).view(np.uint8)[:-1].data",
        f"{_CHECKPOINT}::test_no_byte_of_a_large_tensor_changes_unseen {_CHECKPOINT}",
    ),
    (
        "first_page_hashed",
        "the hash of a tensor reads 4 KiB of it",
        "array.reshape(-1).view(np.uint8).data",
        "array.reshape(-1).view(np.uint8)[:4096].data",
        f"{_CHECKPOINT}::test_no_byte_of_a_large_tensor_changes_unseen",
    ),
    (
        "manifest_hash_not_compared",
        "a manifest that was changed is believed",
        'if manifest.get("sha256") != _digest(manifest):',
        'if not manifest.get("sha256"):',
        f"{_CHECKPOINT}::test_what_differs_is_refused_with_a_reason",
    ),
    (
        "changed_configuration_accepted",
        "a configuration that contradicts the manifest is believed",
        "refuse(differences(saved, said), ",
        "refuse(differences(said, said), ",
        f"{_CHECKPOINT}::test_what_differs_is_refused_with_a_reason",
    ),
    (
        "weak_scalars_become_strong",
        "a weakly typed scalar returns as a strong one",
        'extra = {"weak": True}',
        "extra = {}",
        f"{_CHECKPOINT}::test_every_kind_of_leaf_of_an_optimiser_state_returns",
    ),
    (
        "every_key_is_threefry",
        "a PRNG key returns with another implementation",
        'extra = {"prng": str(jax.random.key_impl(leaf))}',
        'extra = {"prng": "threefry2x32"}',
        f"{_CHECKPOINT}::test_every_kind_of_leaf_of_an_optimiser_state_returns {_CHECKPOINT}",
    ),
    (
        "folder_of_weights_replaced",
        "a folder without a manifest is replaced if it holds files of our names",
        "if foreign or (names and MANIFEST not in names):",
        "if foreign:",
        f"{_CHECKPOINT}::test_a_folder_that_is_no_checkpoint_is_not_replaced",
    ),
    (
        "negative_step_accepted",
        "a checkpoint of step -1 is written",
        "if step < 0:",
        "if step < -1:",
        f"{_CHECKPOINT}::test_what_cannot_be_stored_is_refused",
    ),
)

GEMM = of(
    "megalodon_jax/quantization/products.py",
    (
        "emulated_in_float32_on_a_gpu",
        "emulation leaves the tensor cores of a GPU alone, and may be taken in TF32",
        'dtype = jnp.float32 if jax.devices()[0].platform == "cpu" else jnp.bfloat16',
        "dtype = jnp.float32",
        "test_cuda_programs.py",
    ),
    (
        "gradients_share_their_noise",
        "both gradients of a product round with the same noise",
        "key = jax.random.fold_in(key_from(weight), DIRECTIONS.index(direction))",
        "key = key_from(weight)",
        f"{_GEMM}::test_the_two_gradients_round_with_noise_of_their_own",
    ),
    (
        "gradients_in_the_forward_format",
        "gradients are taken in the format of the forward product",
        "key, fmt = key if backend.stochastic else None, backend.gradients",
        "key, fmt = key if backend.stochastic else None, backend.forward",
        f"{_GEMM}::test_each_direction_has_the_format_of_its_backend",
        "mxfp8-nvfp4",
    ),
    (
        "stochastic_rounding_off",
        "gradients are rounded to nearest whatever the backend says",
        "key, fmt = key if backend.stochastic else None, backend.gradients",
        "key, fmt = None, backend.gradients",
        f"{_GEMM} test_products.py",
    ),
    (
        "one_operand_rotated",
        "only the output gradient is rotated",
        "left, right = (rotated(a.T) if backend.rotated else a.T for a in (dy, x))",
        "left, right = rotated(dy.T) if backend.rotated else dy.T, x.T",
        f"{_GEMM} test_products.py",
        "nvfp4-nearest",
    ),
    (
        "rotation_signs_after",
        "the random signs come after the Hadamard transform, where they spread nothing",
        "return signs[:, None] * hadamard / np.sqrt",
        "return signs[None, :] * hadamard / np.sqrt",
        f"{_GEMM} test_products.py",
    ),
    (
        "one_tensor_scale_lost",
        "a product is not multiplied with the tensor scale of its second operand",
        "return y * a.outer * b.outer",
        "return y * a.outer * a.outer",
        f"{_GEMM} test_products.py",
        "nvfp4-nearest-unrotated",
    ),
    (
        "float16_operands_accepted",
        "operands in float16 are multiplied",
        "if operand.dtype.itemsize < 2 or operand.dtype == jnp.float16:",
        "if operand.dtype.itemsize < 2:",
        f"{_GEMM} test_layer_suite.py::test_float16_is_refused_wherever_it_comes_from",
    ),
)

QUANTIZE = of(
    "megalodon_jax/quantization/formats.py",
    (
        "key_of_a_float_sum",
        "the key is made of a sum in floating point, which has an order",
        "bits = jax.lax.bitcast_convert_type(x, jnp.uint32)",
        "bits = jax.lax.bitcast_convert_type(jnp.sum(x), jnp.uint32)",
        f"{_QUANTIZE} {_GEMM}",
    ),
    (
        "draws_of_the_default_dtype",
        "with 64-bit types on, draws are of float64 and so other numbers",
        "up = jax.random.uniform(key, x.shape, jnp.float32) < share",
        "up = jax.random.uniform(key, x.shape).astype(jnp.float32) < share",
        f"{_GEMM}::test_noise_belongs_to_the_weights_and_not_to_last_bits_of_gradients {_GEMM} "
        f"{_QUANTIZE}",
    ),
    (
        "stochastic_toward_zero",
        "negative values are rounded between the wrong neighbours",
        "below = jnp.floor(x / unit)",
        "below = jnp.trunc(x / unit)",
        f"{_QUANTIZE}::test_stochastic_rounding_has_the_right_mean_whatever_the_bits_are {_GEMM}",
    ),
    (
        "mx_scale_always_up",
        "a scale that is exact is rounded up all the same",
        '"ceil": fraction > top & ((1 << _FRACTION) - 1),',
        '"ceil": fraction >= top & ((1 << _FRACTION) - 1),',
        f"{_QUANTIZE}::test_mx_is_the_truth",
    ),
    (
        "mx_even_half_step_down",
        "half a step below a power of two is not rounded up",
        '"even": fraction >= (1 << _FRACTION) - half_step,',
        '"even": fraction > (1 << _FRACTION) - half_step,',
        f"{_QUANTIZE}::test_mx_is_the_truth",
    ),
    (
        "subnormals_not_rounded",
        "values below the smallest normal number of a format are rounded as normal ones",
        "rounded = jnp.where(jnp.abs(x) < 2.0**info.minexp, subnormal, rounded)",
        "rounded = jnp.where(jnp.abs(x) < 0.0, subnormal, rounded)",
        f"{_QUANTIZE}::test_mx_is_the_truth test_rounding.py",
        "mxfp8",
    ),
    (
        "infinity_sets_the_scale",
        "one infinity makes the scale of the whole tensor",
        "amax = jnp.max(jnp.where(bits < _INFINITY, bits, 0), initial=0)",
        "amax = jnp.max(bits, initial=0)",
        f"{_QUANTIZE}::test_nvfp4_is_the_truth",
    ),
    (
        "power_of_two_scale_doubled",
        "a scale that is a power of two already is doubled",
        "(factor > 1).astype(jnp.int32)",
        "(factor >= 1).astype(jnp.int32)",
        f"{_QUANTIZE}::test_deepseek_is_the_truth",
    ),
    (
        "division_by_a_reciprocal",
        "a division is rounded twice",
        "quotient = jax.lax.div((significand << place) + odd // 2, np.int32(odd))",
        "quotient = jax.lax.div(significand << place, np.int32(odd))",
        f"{_QUANTIZE}::test_nvfp4_is_the_truth {_QUANTIZE}::test_deepseek_is_the_truth",
    ),
    (
        "nan_block_keeps_its_scale",
        "a block with NaN has the scale byte of an infinite one",
        "byte = jnp.where(amax > _INFINITY, _NAN_BYTE, byte)",
        "byte = jnp.where(amax > _INFINITY, _NAN_BYTE - 1, byte)",
        f"{_QUANTIZE}::test_what_the_scale_bytes_say_of_blocks_that_are_no_numbers {_QUANTIZE}",
    ),
)

MUTANTS = (
    *CONVERT,
    *TENSOR_FILES,
    *ROLES,
    *WEIGHTS,
    *PRECISION,
    *FILES,
    *CHECKPOINT,
    *GEMM,
    *QUANTIZE,
)
