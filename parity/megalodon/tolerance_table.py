"""Tolerances of Megalodon: a bound and a reason for each edge of the triangle and each kind.

float32 bounds are multiples of a calibrated noise floor. The floor is the response of the oracle
when every weight, named intermediate and sum is perturbed by its rounding error
(`parity.engine.rounding_noise`), per case and quantity (`parity.megalodon.noise_floors`, stored in
`data/noise.json`). Source: docs/parity.md "Tolerances".
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from parity.engine import bounds
from parity.engine.bounds import FORWARD, Rule
from parity.engine.measurement import Kind
from parity.megalodon.edges import MegalodonEdge as Edge

NOISE_FILE = Path(__file__).parents[1] / "data" / "noise.json"
KNOWN_DIFFERENCE_BOUNDS = {
    "ema-mask": (1e-3, 1.0),
    "loss-mask": (1e-3, 1.0),
    "empty-loss": (0.0, 0.0),
    "untied-head": (0.0, 0.0),
    "initialisation": (0.0, 0.05),
}
"""Smallest and largest value of each deliberate difference, as defined in
`parity.megalodon.known_differences`.

Measured: 0.062, 0.087, 0, 0 and 0.007."""
KNOWN_DIFFERENCES_RECORDED = 1e-4
"""Largest relative difference between the live and the recorded value of a known difference: four
digits. Measured: 0 with the recording's versions; another torch may round differently."""
DISCRETE = (
    Edge.JAX64_ORACLE,
    Edge.REFERENCE32_ORACLE,
    Edge.JAX32_ORACLE,
    Edge.JAX32_REFERENCE32,
    Edge.RECORDED32_LIVE32,
)
"""Edges on which tokens are compared too."""
TABLE = (
    Rule(
        Edge.JAX64_ORACLE,
        FORWARD,
        "same mathematics: a bug stands orders above rounding; at most 2.7e-14 measured",
        absolute=1e-11,
    ),
    Rule(
        Edge.JAX64_ORACLE,
        (Kind.GRADIENT,),
        "against automatic differentiation of the oracle; at most 8.5e-14 measured",
        absolute=1e-10,
    ),
    Rule(
        Edge.JAX64_ORACLE,
        (Kind.BLOCK,),
        "two implementations that add in different orders do not agree to the last bit: share of "
        "the gates of a case whose error is exactly 0. At most 3 of 16 on healthy cases, the "
        "counts of a stream; 1 where the oracle is compared with itself",
        metric="exact_share",
        absolute=0.5,
    ),
    Rule(
        Edge.REFERENCE32_ORACLE,
        FORWARD,
        "its own rounding: median 1.1 x, at most 4.4 x the floor measured (the second moment of "
        "the EMA phase after one step of AdamW); the mean of a loss may cancel below what is in "
        "the floor, hence the minimum",
        absolute=3e-7,
        noise_factor=6.0,
    ),
    Rule(
        Edge.REFERENCE32_ORACLE,
        (Kind.GRADIENT,),
        "its own rounding: median 1.1 x, at most 4.8 x the floor measured, on the EMA phase theta",
        absolute=3e-7,
        noise_factor=8.0,
    ),
    Rule(
        Edge.JAX32_ORACLE,
        FORWARD,
        "our own rounding: median 0.8 x, at most 1.9 x the floor measured, on a running mean that "
        "a stream carried on (1.4 x on intermediates, in byte_lm)",
        absolute=3e-7,
        noise_factor=3.0,
    ),
    Rule(
        Edge.JAX32_ORACLE,
        (Kind.GRADIENT,),
        "our own rounding: median 0.7 x, at most 1.8 x the floor measured, on layer 0's "
        "TimestepNorm bias of byte_lm, behind the cancellation in RMSNorm's derivative",
        absolute=3e-7,
        noise_factor=4.0,
    ),
    Rule(
        Edge.JAX32_ORACLE,
        (Kind.LOGITS, Kind.BLOCK, Kind.GRADIENT),
        "no less accurate than the reference, or below 3e-7: error over max(reference's error, "
        "2e-7); gradients as the root mean square over the parameters of a case. Not states: a "
        "mean kept relative to an origin trades digits of a mean near 0 for those of a large one. "
        "Not the loss: the error of a scalar is one draw, and a draw may be near 0 on one side "
        "(2.8 seen where both were within their floors)",
        metric="error_over_reference",
        absolute=1.5,
    ),
    Rule(
        Edge.JAX32_REFERENCE32,
        FORWARD,
        "a checkpoint can move: the sum of both sides' bounds against the oracle",
        absolute=6e-7,
        noise_factor=9.0,
    ),
    Rule(
        Edge.JAX32_REFERENCE32,
        (Kind.GRADIENT,),
        "a checkpoint can move: the sum of both sides' bounds against the oracle",
        absolute=6e-7,
        noise_factor=12.0,
    ),
    Rule(
        Edge.RECORDED32_LIVE32,
        (*FORWARD, Kind.GRADIENT),
        "the same program twice: thread count and BLAS order may differ, mathematics may not",
        absolute=6e-7,
        noise_factor=12.0,
    ),
    Rule(
        Edge.JAXBF16_ORACLE,
        (Kind.LOGITS,),
        "bfloat16 products with float32 parameters: more accurate than torch's autocast on the "
        "same weights, since nothing is rounded that is added afterwards. 0.64 to 0.76 of its "
        "error seen on hosts with AMX, AVX512, AVX2, AVX and SSE4.2 of Intel, and on AMD EPYC; "
        "rounding what products give as well comes to 1",
        metric="error_over_autocast",
        absolute=0.85,
    ),
    Rule(
        Edge.JAXBF16_ORACLE,
        (Kind.LOGITS, Kind.BLOCK),
        "bfloat16 rounds operands to 2^-9 where the floor is of 2^-24, so 2^15 floors; but of what "
        "the floor moves only the operands of products: at most 0.51 of 2^15 floors measured, on "
        "the attention of layer 0, 0.43 elsewhere",
        noise_factor=0.6 * 2.0**15,
    ),
    Rule(
        Edge.PRODUCTS32_FLOAT64,
        (Kind.BLOCK, Kind.GRADIENT),
        "a low-precision backend multiplies numbers of few bits and adds in float32: at most "
        "3.7e-8 measured against float64 on operands quantised in NumPy",
        absolute=2e-7,
    ),
    *(
        Rule(
            edge,
            (Kind.WEIGHTS,),
            "a conversion moves bytes: every value has the hash it had",
            metric="changed_parameters",
        )
        for edge in (Edge.JAX32_ORACLE, Edge.REFERENCE32_ORACLE)
    ),
    *(
        Rule(
            edge,
            (Kind.TOKENS,),
            "greedy decoding is discrete: one different token is another text",
            metric="disagreement",
        )
        for edge in DISCRETE
    ),
    *(
        Rule(
            edge,
            (Kind.LOGITS,),
            "a token within the bound of the logits keeps its best token where the margin is clear",
            metric="top1_flips",
        )
        for edge in DISCRETE
    ),
)


@dataclass(frozen=True)
class NoiseFloors(bounds.NoiseFloors):
    """Calibrated noise floors of Megalodon's cases, with its tolerance table."""

    rules: tuple[Rule, ...] = TABLE

    @classmethod
    def load(cls, path: Path = NOISE_FILE) -> NoiseFloors:
        """Read the committed floors.

        Raises:
            FileNotFoundError: there are none; run `megalodon-numerics parity calibrate`.
        """
        if not path.is_file():
            raise FileNotFoundError(f"{path} not found; run `megalodon-numerics parity calibrate`.")
        return cls(json.loads(path.read_text(encoding="utf-8"))["cases"])
