"""Edges (pairs of compared sides) of Megalodon: JAX model, float64 oracle and megalodon-hf."""

from __future__ import annotations

from parity.engine.measure.edge import Edge


class MegalodonEdge(Edge):
    """Pairs of compared sides, `left:right`; the pair with the tightest tolerance comes first.

    A side is a program and its precision. "reference" is megalodon-hf, "autocast" is megalodon-hf
    under torch's autocast to bfloat16, "referencebf16" is megalodon-hf cast to bfloat16.
    """

    JAX64_ORACLE = "jax64:oracle"
    """Tests the mathematics: in float64, JAX model and oracle must agree."""
    JAX32_ORACLE = "jax32:oracle"
    """Tests the rounding error of the JAX model."""
    JAX32_REFERENCE32 = "jax32:reference32"
    """Tests whether a checkpoint can be exchanged between JAX and megalodon-hf."""
    REFERENCE32_ORACLE = "reference32:oracle"
    """Tests the rounding error of megalodon-hf, and thereby also the oracle."""
    RECORDED32_LIVE32 = "recorded32:live32"
    """Tests whether recordings still match megalodon-hf as installed."""
    JAXTF32_ORACLE = "jaxtf32:oracle"
    """Tests the float32 JAX model with products that round their operands to TF32, on a GPU."""
    JAXBF16_ORACLE = "jaxbf16:oracle"
    """Tests whether bfloat16 products are as accurate as those of torch's autocast."""
    AUTOCAST_ORACLE = "autocast:oracle"
    REFERENCEBF16_ORACLE = "referencebf16:oracle"
    PRODUCTS32_FLOAT64 = "products32:float64"
    """Tests whether a low-precision product rounds nothing but its operands."""


TRIANGLE = tuple(MegalodonEdge)[:4]
