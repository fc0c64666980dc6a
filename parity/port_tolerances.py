"""Edges and tolerances of ports other than Megalodon (`parity.port`)."""

from __future__ import annotations

from parity.engine.measure.bounds import FORWARD, Rule
from parity.engine.measure.edge import Edge
from parity.engine.measure.measurement import Kind


class PortEdge(Edge):
    """Pairs of runs compared for a port, as `left:right`; 32, 64 and bf16 name the run's dtype."""

    PORT64_ORIGINAL64 = "port64:original64"
    PORT32_PORT64 = "port32:port64"
    ORIGINAL32_PORT64 = "original32:port64"
    PORT32_ORIGINAL32 = "port32:original32"
    ORIGINAL32_ORIGINAL64 = "original32:original64"
    PORT32_ORIGINAL64 = "port32:original64"
    PORTBF16_PORT64 = "portbf16:port64"
    ORIGINALBF16_ORIGINAL64 = "originalbf16:original64"


NARROWING = 2.0**-29
"""Unit roundoff of float64 divided by that of float32."""

STUDENT = 10.0
"""Extra factor on bounds of few elements, whose noise floor is measured inaccurately by four seeds.

The floor of a whole stage is accurate to about ten per cent. The floor of one element is the root
mean square of four responses, so errors divided by that floor follow Student's t distribution with
four degrees of freedom. Its two-sided tail beyond t is about 6 t^-4: one in a million beyond 49,
compared with 4.9 for an exactly known floor (normal distribution)."""

PORTS = (
    Rule(
        PortEdge.PORT32_PORT64,
        FORWARD,
        "rounding of a port, against itself in float64: as for the JAX model, with twice the "
        "noise factor, since ports are not calibrated",
        absolute=3e-7,
        noise_factor=6.0,
    ),
    Rule(
        PortEdge.ORIGINAL32_PORT64,
        FORWARD,
        "rounding of the original, if both compute the same function: as for megalodon-hf",
        absolute=3e-7,
        noise_factor=6.0,
    ),
    Rule(
        PortEdge.PORT32_ORIGINAL32,
        FORWARD,
        "the sum of both sides' bounds",
        absolute=6e-7,
        noise_factor=12.0,
    ),
    Rule(
        PortEdge.PORT32_PORT64,
        (Kind.GRADIENT,),
        "rounding of a port's derivatives: as for megalodon-hf",
        absolute=3e-7,
        noise_factor=8.0,
    ),
    Rule(
        PortEdge.ORIGINAL32_PORT64,
        (Kind.GRADIENT,),
        "rounding of the original's derivatives: as for megalodon-hf",
        absolute=3e-7,
        noise_factor=8.0,
    ),
    Rule(
        PortEdge.PORT32_ORIGINAL32,
        (Kind.GRADIENT,),
        "the sum of both sides' bounds",
        absolute=6e-7,
        noise_factor=16.0,
    ),
    Rule(
        PortEdge.PORT64_ORIGINAL64,
        FORWARD,
        "same mathematics, where the original computes in float64: as for the oracle",
        absolute=1e-11,
    ),
    Rule(
        PortEdge.PORT64_ORIGINAL64,
        (Kind.GRADIENT,),
        "same mathematics, where the original computes in float64: as for the oracle",
        absolute=1e-10,
    ),
    Rule(
        PortEdge.ORIGINAL32_ORIGINAL64,
        FORWARD,
        "rounding of the original against itself in float64: as for the port",
        absolute=3e-7,
        noise_factor=6.0,
    ),
    Rule(
        PortEdge.ORIGINAL32_ORIGINAL64,
        (Kind.GRADIENT,),
        "rounding of the original's derivatives: as for the port",
        absolute=3e-7,
        noise_factor=8.0,
    ),
    Rule(
        PortEdge.PORT32_ORIGINAL64,
        FORWARD,
        "rounding of a port that does not run in float64",
        absolute=3e-7,
        noise_factor=6.0,
    ),
    Rule(
        PortEdge.PORT32_ORIGINAL64,
        (Kind.GRADIENT,),
        "rounding of the derivatives of a port that does not run in float64",
        absolute=3e-7,
        noise_factor=8.0,
    ),
    Rule(
        PortEdge.PORTBF16_PORT64,
        FORWARD,
        "rounding of a port in bfloat16: the noise factor of float32; the minimum is half a unit "
        "of eight bits, for values that are stored without any computation",
        absolute=2.0**-8,
        noise_factor=6.0,
    ),
    *(
        Rule(
            edge,
            (Kind.WEIGHTS,),
            "both sides have the same parameters; otherwise nothing else can be compared",
            metric="unmatched",
        )
        for edge in (PortEdge.PORT32_ORIGINAL32,)
    ),
    *(
        Rule(
            edge,
            FORWARD,
            "number of integers and bools that differ; they have no rounding",
            metric="unequal",
        )
        for edge in (PortEdge.PORT64_ORIGINAL64, PortEdge.PORT32_ORIGINAL32)
    ),
    *(
        Rule(
            edge,
            (Kind.LOGITS,),
            "logits within their bound give the same best token wherever the margin exceeds it",
            metric="top1_flips",
        )
        for edge in PortEdge
    ),
    Rule(
        PortEdge.PORT32_ORIGINAL32,
        (Kind.BLOCK,),
        "router logits within their bound give the same experts wherever the margin exceeds it",
        metric="expert_flips",
    ),
)
