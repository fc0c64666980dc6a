"""Both sides of a port under one set of names: the port's, in the port's layout.

What is not valid, such as a padded position, is zero on both sides from here on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from parity.engine.alignment import Alignment
from parity.engine.matching import Matching
from parity.engine.quantity import Quantity

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Correspondence:
    """Which stage, output and parameter of the port is which of the original."""

    alignment: Alignment
    matching: Matching

    def stages(self, original: Mapping[str, np.ndarray]) -> Arrays:
        """Return stages of the original by the port's names, as they lie there."""
        return {
            pair.port: pair.layout(original[pair.original])
            for pair in self.alignment.pairs
            if pair.original in original
        }

    def names(self, original: Mapping[str, float]) -> dict[str, float]:
        """Return numbers about the original's stages by the port's names."""
        return {
            pair.port: original[pair.original]
            for pair in self.alignment.pairs
            if pair.original in original
        }

    def cotangents(self, port: Mapping[str, np.ndarray]) -> Arrays:
        """Return cotangents of the port's outputs as those of the original's."""
        return {
            pair.original: np.ascontiguousarray(pair.layout.inverse(port[pair.port]))
            for pair in self.alignment.pairs
            if pair.port in port
        }


def only_valid(stages: Mapping[str, np.ndarray], valid: np.ndarray | None) -> Arrays:
    """Return stages with zeros where positions are not valid.

    Args:
        stages: any shapes; those with axes of the lengths of `valid`, next to one another or the
            second further back, or with one axis of their product, have positions.
        valid: bool (B, L); None is all.
    """
    if valid is None:
        return dict(stages)
    return {name: _only_valid(value, valid) for name, value in stages.items()}


def _only_valid(value: np.ndarray, valid: np.ndarray) -> np.ndarray:
    B, L = valid.shape
    shape = value.shape
    if shape and shape[0] == B * L:
        keep = valid.reshape(B * L, *(1,) * (value.ndim - 1))
    elif len(shape) > 1 and shape[0] == B and L in shape[1:]:
        axes = [1] * value.ndim
        axes[0], axes[1 + shape[1:].index(L)] = B, L
        keep = valid.reshape(axes)
    else:
        return value
    return np.where(keep, value, np.zeros((), value.dtype))


def gradient_names(gradients: Mapping[str, np.ndarray]) -> Arrays:
    """Return gradients by the names of quantities."""
    return {Quantity.gradient(name): value for name, value in gradients.items()}
