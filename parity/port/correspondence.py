"""Which stage, output and parameter of the port is which of the original, and both under one name.

The names and layouts are the port's. What is not valid, such as a padded position, is zero on both
sides: nothing about it is compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from parity.engine.alignment import Alignment
from parity.engine.parameter_pairs import Matching
from parity.engine.quantity import Quantity

Arrays = dict[str, np.ndarray]
Valid = np.ndarray | Sequence[np.ndarray] | None
"""Positions that mean something, bool (B, L); several where a program has sequences of several
lengths: those of an encoder and a decoder, or of each step of a generation. None is all."""


@dataclass(frozen=True)
class Correspondence:
    """What was found of two sides."""

    alignment: Alignment
    matching: Matching

    def stages(self, original: Mapping[str, np.ndarray]) -> Arrays:
        """Return stages of the original by the port's names, as they lie there."""
        return {
            pair.port: pair.layout(original[pair.original])
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

    def gradients(
        self, original: Mapping[str, np.ndarray], port: Mapping[str, np.ndarray]
    ) -> tuple[Arrays, Arrays]:
        """Return gradients of both sides by quantity, in the shapes of the port's parameters."""
        both = self.matching.gradients(original, port)
        names = {name: Quantity.gradient(name) for name in both}
        return (
            {names[name]: theirs for name, (theirs, _) in both.items()},
            {names[name]: ours for name, (_, ours) in both.items()},
        )


def only_valid(stages: Mapping[str, np.ndarray], valid: Valid) -> Arrays:
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
