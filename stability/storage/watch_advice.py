"""Advice on frozen parameters for a training in progress: remedies in the order to try them.

A running training has no time to measure every remedy. They are therefore ordered as
`remedies.rank` orders remedies that work: fewest bytes first. Source: docs/stability.md "Remedies".
"""

from __future__ import annotations

from collections.abc import Sequence

from stability.core.number_formats import BF16
from stability.storage.remedies import REMEDIES, Remedy

FEW = 0.01
"""Largest fraction of the model's elements in frozen vectors (norms, biases, ...) up to which the
advice is to keep just those vectors in float32. Widening them from 16 bits adds at most 1 % to the
memory of the parameters, and the optimiser does not change."""
WIDE = ("matrices", "kernels", "embeddings")
"""Families of parameters that hold nearly all of a model's elements; all others are vectors."""
NAMES = ("stochastic rounding", "Kahan, bfloat16", "float32 parameters")
"""Names of the remedies that apply updates in full for any leaf."""


def general() -> list[Remedy]:
    """Return the remedies named in `NAMES`, which work for any leaf, fewest bytes first."""
    return sorted((r for r in REMEDIES if r.name in NAMES), key=lambda r: r.bytes(BF16))


def advice(frozen: Sequence[tuple[str, int, str]], elements: int, framework: str) -> str:
    """Return advice for frozen leaves as text; empty if there are no frozen leaves.

    Args:
        frozen: (family, number of elements, dtype name) of each frozen leaf.
        elements: number of elements of all watched leaves, frozen or not.
        framework: "torch" or "jax".
    """
    if not frozen:
        return ""
    narrow = [leaf for leaf in frozen if leaf[2] not in ("float32", "float64")]
    if not narrow:
        return (
            "They are stored in float32 already, and their updates are too small even for that: "
            "raise the learning rate of this parameter group."
        )
    vectors = [leaf for leaf in narrow if leaf[0] not in WIDE]
    count = sum(size for _, size, _ in vectors)
    families = " and ".join(dict.fromkeys(family for family, _, _ in vectors))
    # Other leaves lose part of their updates without being frozen; that part remains lost.
    wide = f"keep the {families} in float32 ({count:,} elements, {_bytes(2 * count)} more), which "
    wide += "recovers only their updates"
    options = [_described(remedy, framework) for remedy in general()]
    cheap = bool(vectors) and count <= FEW * elements
    if cheap and len(vectors) == len(narrow):
        options.insert(0, wide)
    lines = "; ".join(f"{i}. {option}" for i, option in enumerate(options, 1))
    alone = f" For the {families} alone: {wide}." if cheap and wide not in options else ""
    return (
        f"Remedies, least memory first, optimiser moments not counted: {lines}.{alone} "
        "`megalodon-numerics stability CHECKPOINT` measures the effect of each."
    )


def _described(remedy: Remedy, framework: str) -> str:
    what = (framework == "torch" and remedy.torch) or remedy.what
    return f"{what}: {remedy.bytes(BF16)} bytes per parameter"


def _bytes(count: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
