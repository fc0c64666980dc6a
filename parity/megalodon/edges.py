"""The edges of Megalodon: JAX model, float64 oracle and megalodon-hf."""

from __future__ import annotations

from parity.engine.edge import Edge


class MegalodonEdge(Edge):
    """Which sides are compared, the sharpest edge of the triangle first."""

    JAX64_ORACLE = "jax64:oracle"
    """Same mathematics?"""
    JAX32_ORACLE = "jax32:oracle"
    """How accurate are we?"""
    JAX32_REFERENCE32 = "jax32:reference32"
    """Can a checkpoint move?"""
    REFERENCE32_ORACLE = "reference32:oracle"
    """Do we understand the reference?"""
    RECORDED32_LIVE32 = "recorded32:live32"
    """Are the recordings still true?"""
    JAXBF16_ORACLE = "jaxbf16:oracle"
    """Are products in bfloat16 as accurate as those of torch's autocast?"""
    AUTOCAST_ORACLE = "autocast:oracle"
    REFERENCEBF16_ORACLE = "referencebf16:oracle"
    PRODUCTS32_FLOAT64 = "products32:float64"
    """Are only the operands of a low-precision product narrow?"""


TRIANGLE = tuple(MegalodonEdge)[:4]
