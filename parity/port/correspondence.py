"""Correspondence of stages, outputs and parameters of a port and its original.

Names and layouts are the port's. Invalid positions, such as padding, are zero on both sides and not
compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from parity.engine.measure.quantity import Quantity
from parity.engine.pairing.alignment import Alignment
from parity.engine.pairing.parameter_pairs import Matching
from parity.sides.projection import only_valid

__all__ = ["Correspondence", "only_valid"]


@dataclass(frozen=True)
class Correspondence:
    """The stage alignment and the parameter matching of two sides."""

    alignment: Alignment
    matching: Matching

    def stages(self, original: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return stages of the original by the port's names, in the port's layouts."""
        return {
            pair.port: pair.layout(original[pair.original])
            for pair in self.alignment.pairs
            if pair.original in original
        }

    def cotangents(self, port: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Map cotangents of the port's outputs to those of the original's outputs."""
        return {
            pair.original: np.array(pair.layout.inverse(port[pair.port]), order="C")
            for pair in self.alignment.pairs
            if pair.port in port
        }

    def gradients(
        self, original: Mapping[str, np.ndarray], port: Mapping[str, np.ndarray]
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Return gradients of both sides by quantity, in the shapes of the port's parameters."""
        both = self.matching.gradients(original, port)
        names = {name: Quantity.gradient(name) for name in both}
        return (
            {names[name]: theirs for name, (theirs, _) in both.items()},
            {names[name]: ours for name, (_, ours) in both.items()},
        )
