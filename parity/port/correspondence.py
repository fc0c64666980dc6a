"""Correspondence of stages, outputs and parameters of a port and its original.

Stages and gradients are returned with the port's names and layouts (arrangements of the elements),
cotangents with the original's.
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
        """Return the gradients of paired parameters, of the original and of the port in this order.

        Both are named as quantities, such as `grad/w`, and have the shapes of the port's
        parameters.

        Args:
            original: gradients by name of the original's parameter.
            port: gradients by name of the port's parameter.
        """
        both = self.matching.gradients(original, port)
        names = {name: Quantity.gradient(name) for name in both}
        return (
            {names[name]: theirs for name, (theirs, _) in both.items()},
            {names[name]: ours for name, (_, ours) in both.items()},
        )
