"""What a port that is not Megalodon is held to (`parity.port`), and on which edges."""

from __future__ import annotations

from parity.engine.bounds import FORWARD, Rule
from parity.engine.edge import Edge
from parity.engine.measurement import Kind


class PortEdge(Edge):
    """What is compared with what: the port's float64 is the truth for rounding."""

    PORT64_ORIGINAL64 = "port64:original64"
    PORT32_PORT64 = "port32:port64"
    ORIGINAL32_PORT64 = "original32:port64"
    PORT32_ORIGINAL32 = "port32:original32"
    ORIGINAL32_ORIGINAL64 = "original32:original64"
    PORT32_ORIGINAL64 = "port32:original64"
    PORTBF16_PORT64 = "portbf16:port64"
    ORIGINALBF16_ORIGINAL64 = "originalbf16:original64"


NARROWING = 2.0**-29
"""Unit roundoff of float64 over that of float32."""

STUDENT = 10.0
"""How much wider a bound is where four seeds measured its floor on as little as one element.

The floor of a whole stage is known within some ten per cent; that of one element is the root of
four squares, and errors over it have Student's distribution with four degrees of freedom. Beyond t
lie 6 t^-4 of it: one in a million beyond 49, where a floor that is known would have 4.9."""

PORTS = (
    Rule(
        PortEdge.PORT32_PORT64,
        FORWARD,
        "rounding of a port, against itself in float64: as for the JAX model, with more room, "
        "since nobody calibrated it",
        absolute=3e-7,
        noise_factor=6.0,
    ),
    Rule(
        PortEdge.ORIGINAL32_PORT64,
        FORWARD,
        "rounding of the original, if the two compute the same: as for megalodon-hf",
        absolute=3e-7,
        noise_factor=6.0,
    ),
    Rule(
        PortEdge.PORT32_ORIGINAL32,
        FORWARD,
        "the sum of both",
        absolute=6e-7,
        noise_factor=12.0,
    ),
    Rule(
        PortEdge.PORT32_PORT64,
        (Kind.GRADIENT,),
        "rounding of a port's derivatives, with the room that those of megalodon-hf have",
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
        "the sum of both",
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
        "rounding of a port that has no float64 of its own",
        absolute=3e-7,
        noise_factor=6.0,
    ),
    Rule(
        PortEdge.PORT32_ORIGINAL64,
        (Kind.GRADIENT,),
        "rounding of the derivatives of a port that has no float64 of its own",
        absolute=3e-7,
        noise_factor=8.0,
    ),
    Rule(
        PortEdge.PORTBF16_PORT64,
        FORWARD,
        "rounding of a port in bfloat16: the factor of float32, and eight bits less than half a "
        "unit of it where nothing is computed",
        absolute=2.0**-8,
        noise_factor=6.0,
    ),
    *(
        Rule(
            edge,
            (Kind.WEIGHTS,),
            "both sides hold the same parameters, or nothing else can be compared",
            metric="unmatched",
        )
        for edge in (PortEdge.PORT32_ORIGINAL32,)
    ),
    *(
        Rule(
            edge,
            FORWARD,
            "whole numbers and bools have no rounding: how many of them differ",
            metric="unequal",
        )
        for edge in (PortEdge.PORT64_ORIGINAL64, PortEdge.PORT32_ORIGINAL32)
    ),
    *(
        Rule(
            edge,
            (Kind.LOGITS,),
            "a token within the bound of the logits keeps its best token where the margin is clear",
            metric="top1_flips",
        )
        for edge in PortEdge
    ),
    Rule(
        PortEdge.PORT32_ORIGINAL32,
        (Kind.BLOCK,),
        "a token whose router logits are within their bound keeps its experts where the margin is "
        "clear",
        metric="expert_flips",
    ),
)
