"""Mutants of adapters: their scale, their draws, their merge and their files."""

from __future__ import annotations

from tools.mutant_list.mutant import of

_TESTS = "test_lora.py"

MUTANTS = (
    *of(
        "megalodon_jax/layers/lora.py",
        (
            "lora_scale_without_rank",
            "an adapter is scaled by alpha, not by alpha / rank",
            "return alpha / (math.sqrt(rank) if rslora else rank)",
            "return alpha / (math.sqrt(rank) if rslora else 1)",
            _TESTS,
        ),
        (
            "lora_rslora_is_lora",
            "rank-stabilised adapters are divided by the rank, not by its square root",
            "return alpha / (math.sqrt(rank) if rslora else rank)",
            "return alpha / rank",
            _TESTS,
        ),
        (
            "lora_merged_unscaled",
            "B A is added to the weight without its scale",
            "jnp.matmul(B, A, precision=jax.lax.Precision.HIGHEST) * self.scale",
            "jnp.matmul(B, A, precision=jax.lax.Precision.HIGHEST)",
            _TESTS,
        ),
        (
            "lora_merged_in_the_weight_s_dtype",
            "the sum of weight and adapter is computed in bfloat16",
            "(self.weight.astype(wide) + change).astype(self.weight.dtype)",
            "self.weight + change.astype(self.weight.dtype)",
            _TESTS,
        ),
        (
            "lora_scaled_in_bfloat16",
            "the change is multiplied by the scale in the dtype of the activations",
            "(change.astype(widened(change.dtype)) * self.scale).astype(y.dtype)",
            "change.astype(y.dtype) * self.scale",
            _TESTS,
        ),
        (
            "lora_one_dropout_key",
            "all adapters of a block drop with one key",
            "jax.random.fold_in(key, next(count))",
            "jax.random.fold_in(key, _FIRST_KEY)",
            _TESTS,
        ),
        (
            "lora_drops_with_the_block_s_keys",
            "the first adapter drops with the key of the block's own first dropout",
            "count = iter(range(_FIRST_KEY, 2 * _FIRST_KEY))",
            "count = iter(range(_FIRST_KEY))",
            _TESTS,
        ),
    ),
    *of(
        "megalodon_jax/lora.py",
        (
            "lora_one_draw_for_all_maps",
            "A of every map is drawn with the same key",
            "key=jax.random.fold_in(key, zlib.crc32(name.encode())), dtype=dtype",
            "key=key, dtype=dtype",
            _TESTS,
        ),
    ),
    *of(
        "megalodon_jax/lora_files.py",
        (
            "lora_files_of_one_alpha",
            "adapters with another alpha than most are written without it",
            "if m.alpha != alpha",
            "if m.alpha == 0",
            _TESTS,
        ),
        (
            "lora_files_forget_rslora",
            "the file has PEFT divide by the rank although the square root was used",
            '"use_rslora": rslora,',
            '"use_rslora": False,',
            _TESTS,
        ),
    ),
)
