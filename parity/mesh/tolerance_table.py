"""Edges (pairs of compared sides) and tolerances of `parity.mesh`: a mesh against one device."""

from __future__ import annotations

from parity.engine.measure.bounds import FORWARD, Rule
from parity.engine.measure.edge import Edge
from parity.engine.measure.measurement import Kind

EVERYTHING = (*FORWARD, Kind.GRADIENT, Kind.WEIGHTS, Kind.TOKENS)
"""All kinds of quantities. Users choose the names, so a mark may have any kind."""


class MeshEdge(Edge):
    """Pairs of runs of one jitted function: on a mesh (left), and on one device (right)."""

    MESH64_ONE64 = "mesh64:one64"
    """Tests the mathematics: in float64 only the order of sums may differ."""
    MESH32_ONE32 = "mesh32:one32"
    """Tests the unmodified function, in float32 or the dtypes it casts to."""


MESHES = (
    Rule(
        MeshEdge.MESH64_ONE64,
        EVERYTHING,
        "same mathematics: a mesh sums in another order, which changes float64 results by 1e-16 to "
        "1e-14 on healthy programs. If a result exceeds the bound, its response to the order "
        "alone is measured; an example is a step of Adam along a gradient that should vanish",
        absolute=1e-12,
        noise_factor=8.0,
    ),
    Rule(
        MeshEdge.MESH32_ONE32,
        EVERYTHING,
        "reordered sums: the response to other orders on one device; the factor leaves room for "
        "the partition's order and its other fusions, a few units in the last place",
        absolute=1e-6,
        noise_factor=8.0,
    ),
    *(
        Rule(
            edge,
            EVERYTHING,
            "replicas of one value are bit-identical",
            metric="replicas",
        )
        for edge in MeshEdge
    ),
    *(
        Rule(
            edge,
            (Kind.LOGITS,),
            "logits within their bound give the same best token wherever the margin exceeds it",
            metric="top1_flips",
        )
        for edge in MeshEdge
    ),
    *(
        Rule(edge, (Kind.TOKENS,), "generated tokens are equal", metric="disagreement")
        for edge in MeshEdge
    ),
    *(
        Rule(edge, EVERYTHING, "integers and flags have no rounding", metric="unequal")
        for edge in MeshEdge
    ),
)
