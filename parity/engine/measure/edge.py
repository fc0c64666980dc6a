"""Edges: pairs of runs that are compared, as named in stored runs and report pages."""

from __future__ import annotations

from enum import StrEnum

_DTYPES = {"64": "float64", "32": "float32", "bf16": "bfloat16"}


class Edge(StrEnum):
    """A pair of compared runs, named `left:right`; errors are relative to the right one.

    Both runs get the same inputs and weights. A run is named by its program and its precision, such
    as `jax32`; a program that runs in one precision only, such as the float64 oracle, is named
    without the precision. Each compared model declares its edges as members of a subclass.
    """

    @property
    def sides(self) -> tuple[str, str]:
        """Names of the left and the right run, such as `("jax32", "oracle")`."""
        left, _, right = self.partition(":")
        return left, right

    @property
    def dtype(self) -> str:
        """Dtype that the left run computes in, such as "float32".

        Raises:
            KeyError: the name of the left run does not end in 64, 32 or bf16.
        """
        precision = next((p for p in _DTYPES if self.sides[0].endswith(p)), self.sides[0])
        return _DTYPES[precision]
