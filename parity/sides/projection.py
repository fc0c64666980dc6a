"""Restriction of outputs to valid positions, and random cotangents for the gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

PROJECTION = 20
"""Seed of the random cotangents of the outputs."""
Valid = np.ndarray | Sequence[np.ndarray] | None
"""Mask of valid positions, bool (batch B, length L), False for example at padding; None: all valid.

Pass several masks if a program has sequences of several lengths, such as an encoder's and a
decoder's, or one per step of a generation. Axes are recognised by their lengths, so choose an L
that differs from the program's other sizes, such as its number of heads."""


def direction(outputs: Mapping[str, np.ndarray], valid: Valid = None) -> dict[str, np.ndarray]:
    """Return random cotangents for the outputs by name: standard normal, float32, in the outputs'
    shapes.

    The seed is fixed: two sides get equal cotangents if their outputs have equal shapes in the same
    order.

    Args:
        outputs: arrays by name.
        valid: mask of valid positions; cotangents are zero elsewhere.
    """
    rng = np.random.default_rng(PROJECTION)
    drawn = {name: rng.standard_normal(x.shape).astype(np.float32) for name, x in outputs.items()}
    return only_valid(drawn, valid)


def only_valid(stages: Mapping[str, np.ndarray], valid: Valid) -> dict[str, np.ndarray]:
    """Return stages (named intermediates) with zeros at invalid positions, such as padding.

    Args:
        stages: arrays of any shape. Positions are a leading axis B with a later axis L, or one
            leading axis of length B L. A stage without such axes is returned unchanged.
        valid: mask (B, L), or several masks, of which each stage uses the first whose B and L are
            the lengths of its axes; None: all positions are valid.
    """
    if valid is None:
        return dict(stages)
    several = [valid] if isinstance(valid, np.ndarray) else list(valid)
    return {name: _only_valid(value, several) for name, value in stages.items()}


def _only_valid(value: np.ndarray, several: Sequence[np.ndarray]) -> np.ndarray:
    for valid in several:
        B, L = valid.shape
        axes = [1] * value.ndim
        if value.ndim and value.shape[0] == B * L:
            axes[0] = B * L
        elif value.ndim > 1 and value.shape[0] == B and L in value.shape[1:]:
            axes[0], axes[1 + value.shape[1:].index(L)] = B, L
        else:
            continue
        return np.where(valid.reshape(axes), value, np.zeros((), value.dtype))
    return value
