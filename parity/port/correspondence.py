"""Correspondence of stages, outputs and parameters of a port and its original.

Results have the port's names and layouts (arrangements of the elements). Invalid positions, such as
padding, are zero on both sides.
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
    """The pairs of stages and the pairs of parameters of a port and its original."""

    alignment: Alignment
    matching: Matching

    def stages(self, original: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the original's aligned stages, renamed and rearranged as in the port."""
        return {
            pair.port: pair.layout(original[pair.original])
            for pair in self.alignment.pairs
            if pair.original in original
        }

    def cotangents(self, port: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return cotangents of the port's outputs, renamed and rearranged as in the original."""
        return {
            pair.original: np.array(pair.layout.inverse(port[pair.port]), order="C")
            for pair in self.alignment.pairs
            if pair.port in port
        }

    def gradients(
        self, original: Mapping[str, np.ndarray], port: Mapping[str, np.ndarray]
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Return the gradients of the original and of the port, in this order.

        Names are quantities such as `grad/w`; shapes are those of the port's parameters.

        Args:
            original: gradients by the original's parameters.
            port: gradients by the port's parameters.
        """
        both = self.matching.gradients(original, port)
        names = {name: Quantity.gradient(name) for name in both}
        return (
            {names[name]: theirs for name, (theirs, _) in both.items()},
            {names[name]: ours for name, (_, ours) in both.items()},
        )
