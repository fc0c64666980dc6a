"""Controls: edits that change no result. A test that fails on one reports a bug that is not
there."""

from __future__ import annotations

from tools.mutant_list.mutant import Mutant

MUTANTS = (
    Mutant(
        "equivalent_product_swapped",
        "megalodon_jax/layers/ffn.py",
        "none: the factors of an elementwise product change places",
        's = s * placed(self.fc3(f), "batch", "sequence", "tensor")',
        's = placed(self.fc3(f), "batch", "sequence", "tensor") * s',
        (
            "tests/megalodon_jax/test_properties.py",
            "tests/megalodon_jax/layers/test_scan_layers.py",
        ),
        ("swiglu_rescale_scale",),
        "a product of two floats is the same bits in either order",
    ),
    Mutant(
        "equivalent_doubled_length",
        "megalodon_jax/layers/complex_ema.py",
        "none: L + L for 2 L",
        "next_fast_len(2 * L - 1, real=True)",
        "next_fast_len(L + L - 1, real=True)",
        ("tests/megalodon_jax/layers/test_complex_ema.py",),
        ("plain",),
        "an integer added to itself is twice that integer",
    ),
    Mutant(
        "equivalent_default",
        "megalodon_jax/config.py",
        "none: another default for what is then only compared with None",
        'if fields.get("output_size", -1) is None:',
        'if fields.get("output_size", 0) is None:',
        ("tests/megalodon_jax/test_config.py", "tests/megalodon_jax/test_model_interop.py"),
        (),
        "the default is not None either way, and is used for nothing else",
    ),
    Mutant(
        "equivalent_count_of_at_least_one",
        "megalodon_jax/loss.py",
        "none: a count of targets that is 0 is made 1 in other words",
        "return (total / jnp.maximum(count, 1).astype(total.dtype)).astype(dtype)",
        "return (total / jnp.where(count > 0, count, 1).astype(total.dtype)).astype(dtype)",
        ("tests/megalodon_jax/test_loss.py",),
        ("plain",),
        "a count is an integer of at least 0, for which both are the same",
    ),
    Mutant(
        "equivalent_larger_spread",
        "reports/verdict/drift.py",
        "none: the arguments of a maximum change places",
        "map(max, zip(pinned.spread, level.spread, strict=True))",
        "map(max, zip(level.spread, pinned.spread, strict=True))",
        ("tests/reports/provenance/test_hosts.py",),
        (),
        "the larger of two numbers does not depend on which is named first",
    ),
    Mutant(
        "equivalent_lost_update",
        "stability/storage/survival.py",
        "none: the rule of lost updates, distributed",
        "return (np.abs(u) < gap) | ((np.abs(u) == gap) & even)",
        "return (np.abs(u) <= gap) & ((np.abs(u) < gap) | even)",
        ("tests/stability/storage/test_survival.py",),
        ("plain",),
        "a < g or (a = g and even) is a <= g and (a < g or even), for every a and g, NaN included",
    ),
)
