"""Modules that documents named before they moved into rooms are there under both names."""

from __future__ import annotations

import importlib

import pytest

MOVED = {
    "megalodon_jax.gemm": (
        "megalodon_jax.quantization.products",
        ("BACKENDS", "Backend", "check_widths", "gemm", "operands", "path_of", "product"),
    ),
    "megalodon_jax.quantize": (
        "megalodon_jax.quantization.formats",
        ("MX", "Scaled", "deepseek", "key_from", "mx", "nearest", "nvfp4", "stochastic"),
    ),
    "parity.taps": ("parity.megalodon.intermediates", ("capture", "computed", "stages")),
    "stability.diagnose": ("stability.storage.diagnose", ("report",)),
    "stability.guard": ("stability.recovery.guard", ("GuardConfig", "guard")),
    "stability.nonfinite": ("stability.nonfinite.flags", ("broken", "in_order", "watched_loss")),
    "stability.recovery": ("stability.recovery.rollback", ("RecoveryConfig", "guarded_run")),
    "stability.replay": ("stability.nonfinite.replay", ("locate",)),
    "stability.transforms": (
        "stability.storage.narrow_optimisers",
        ("apply_updates", "kahan_adamw", "stochastic_adamw"),
    ),
    "stability.watch": ("stability.storage.frozen_watch", ("frozen",)),
}


@pytest.mark.parametrize("old", MOVED)
def test_the_former_name_has_what_was_imported_from_it(old: str) -> None:
    new, names = MOVED[old]
    before, after = (importlib.import_module(module) for module in (old, new))
    for name in names:
        assert getattr(before, name) is getattr(after, name), name
