"""Edges: the two sides that are compared, as named in runs and report pages."""

from __future__ import annotations

from enum import StrEnum

_DTYPES = {"64": "float64", "32": "float32", "bf16": "bfloat16"}


class Edge(StrEnum):
    """Two sides of one work as `left:right`; errors are relative to the right one.

    A subject declares its edges as members of a subclass. A side is a program and its precision,
    such as `jax32`; a side with a single precision, such as an oracle, is named without it.
    """

    @property
    def sides(self) -> tuple[str, str]:
        """Left and right side."""
        left, _, right = self.partition(":")
        return left, right

    @property
    def dtype(self) -> str:
        """Dtype that the left side computes in.

        Raises:
            KeyError: its name does not end in a precision.
        """
        precision = next((p for p in _DTYPES if self.sides[0].endswith(p)), self.sides[0])
        return _DTYPES[precision]
