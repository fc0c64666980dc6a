"""What of a side's outputs counts: valid positions, and the direction derivatives are taken in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

PROJECTION = 20
"""Seed of the direction that derivatives of the outputs are taken in."""
Valid = np.ndarray | Sequence[np.ndarray] | None
"""Positions that mean something, bool (B, L); several where a program has sequences of several
lengths: those of an encoder and a decoder, or of each step of a generation. None is all. Choose a
length that is no other size of the program, such as its number of heads: axes are known by it."""


def direction(outputs: Mapping[str, np.ndarray], valid: Valid = None) -> dict[str, np.ndarray]:
    """Return what derivatives of outputs are contracted with: normal numbers, float32, the same
    for every side whose outputs have the same shapes in the same order.

    Args:
        outputs: arrays by name.
        valid: positions that mean something.
    """
    rng = np.random.default_rng(PROJECTION)
    drawn = {name: rng.standard_normal(x.shape).astype(np.float32) for name, x in outputs.items()}
    return only_valid(drawn, valid)


def only_valid(stages: Mapping[str, np.ndarray], valid: Valid) -> dict[str, np.ndarray]:
    """Return stages with zeros where positions are not valid.

    Args:
        stages: any shapes. Positions are the axes of lengths B and L, the first of which comes
            first, or one axis of B L; a stage without them is returned as it is.
        valid: bool (B, L), or several of which the first that fits counts; None is all.
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
