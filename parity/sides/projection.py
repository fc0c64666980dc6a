"""What of a side's outputs counts: valid positions, and the direction derivatives are taken in."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

PROJECTION = 20
"""Seed of the direction that derivatives of the outputs are taken in."""


def direction(
    outputs: Mapping[str, np.ndarray], valid: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """Return what derivatives of outputs are contracted with: normal numbers, float32, the same
    for every side whose outputs have the same shapes in the same order.

    Args:
        outputs: arrays by name.
        valid: positions that mean something, bool (B, L); None is all.
    """
    rng = np.random.default_rng(PROJECTION)
    drawn = {name: rng.standard_normal(x.shape).astype(np.float32) for name, x in outputs.items()}
    return only_valid(drawn, valid)


def only_valid(stages: Mapping[str, np.ndarray], valid: np.ndarray | None) -> dict[str, np.ndarray]:
    """Return stages with zeros where positions are not valid.

    Args:
        stages: any shapes. Positions are the axes of lengths B and L, the first of which comes
            first, or one axis of B L; a stage without them is returned as it is.
        valid: bool (B, L); None is all.
    """
    if valid is None:
        return dict(stages)
    return {name: _only_valid(value, valid) for name, value in stages.items()}


def _only_valid(value: np.ndarray, valid: np.ndarray) -> np.ndarray:
    B, L = valid.shape
    axes = [1] * value.ndim
    if value.ndim and value.shape[0] == B * L:
        axes[0] = B * L
    elif value.ndim > 1 and value.shape[0] == B and L in value.shape[1:]:
        axes[0], axes[1 + value.shape[1:].index(L)] = B, L
    else:
        return value
    return np.where(valid.reshape(axes), value, np.zeros((), value.dtype))
