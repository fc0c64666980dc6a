"""Tolerances of Megalodon: a bound and its reason for each pair of sides and kind of quantity.

float32 bounds are multiples of a calibrated noise floor. The floor is the response of the oracle
when every weight, named intermediate and sum is perturbed by its rounding error
(`parity.engine.measure.rounding_noise`), per case and quantity (`parity.megalodon.noise_floors`,
stored in `data/noise.json`). Source: docs/parity.md "Tolerances".
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from parity.engine.measure import bounds
from parity.engine.measure.bounds import FORWARD, Rule
from parity.engine.measure.measurement import Kind
from parity.megalodon.edges import MegalodonEdge as Edge

NOISE_FILE = Path(__file__).parents[1] / "data" / "noise.json"
KNOWN_DIFFERENCE_BOUNDS = {
    "ema-mask": (1e-3, 1.0),
    "loss-mask": (1e-3, 1.0),
    "empty-loss": (0.0, 0.0),
    "untied-head": (0.0, 0.0),
    "initialisation": (0.0, 0.05),
}
"""Smallest and largest accepted value of each known difference, by id.

The values are defined in `parity.megalodon.known_differences`. Measured: 0.062, 0.087, 0, 0 and
0.007."""
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
"""Pairs of sides on which generated tokens, and the most probable token of logits, are compared."""
TABLE = (
    Rule(
        Edge.JAX64_ORACLE,
        FORWARD,
        "same mathematics: bugs exceed rounding by orders of magnitude; at most 2.7e-14 measured",
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
        "share of a case's gates whose error is exactly 0. It is 1 if the oracle is compared with "
        "itself, and small otherwise, because implementations that sum in different orders do not "
        "agree bit for bit: at most 3 of 16 measured, the token counts of a stream",
        metric="exact_share",
        absolute=0.5,
    ),
    Rule(
        Edge.REFERENCE32_ORACLE,
        FORWARD,
        "rounding of the reference: median 1.1 x, at most 4.4 x the floor measured (the second "
        "moment of the EMA phase after one step of AdamW); the mean of a loss may cancel to "
        "below the floor, hence the minimum",
        absolute=3e-7,
        noise_factor=6.0,
    ),
    Rule(
        Edge.REFERENCE32_ORACLE,
        (Kind.GRADIENT,),
        "rounding of the reference: median 1.1 x, at most 4.8 x the floor measured, on the EMA "
        "phase theta",
        absolute=3e-7,
        noise_factor=8.0,
    ),
    Rule(
        Edge.JAX32_ORACLE,
        FORWARD,
        "rounding of the JAX model: median 0.8 x, at most 1.9 x the floor measured, on the running "
        "mean of a stream (1.4 x on intermediates, in byte_lm)",
        absolute=3e-7,
        noise_factor=3.0,
    ),
    Rule(
        Edge.JAX32_ORACLE,
        (Kind.GRADIENT,),
        "rounding of the JAX model: median 0.7 x, at most 1.8 x the floor measured, on layer 0's "
        "TimestepNorm bias of byte_lm, after the cancellation in RMSNorm's derivative",
        absolute=3e-7,
        noise_factor=4.0,
    ),
    Rule(
        Edge.JAX32_ORACLE,
        (Kind.LOGITS, Kind.BLOCK, Kind.GRADIENT),
        "no less accurate than the reference, or below 3e-7: error over max(reference's error, "
        "2e-7); gradients as the root mean square over the parameters of a case. States are not "
        "compared so, because a mean stored relative to an origin is less accurate near 0 and more "
        "accurate far from it. Nor is the loss: the error of a scalar is a single sample, which "
        "may be near 0 on one side (a ratio of 2.8 was seen while both were within their floors)",
        metric="error_over_reference",
        absolute=1.5,
    ),
    Rule(
        Edge.JAX32_REFERENCE32,
        FORWARD,
        "checkpoints are interchangeable: the sum of both sides' bounds against the oracle",
        absolute=6e-7,
        noise_factor=9.0,
    ),
    Rule(
        Edge.JAX32_REFERENCE32,
        (Kind.GRADIENT,),
        "checkpoints are interchangeable: the sum of both sides' bounds against the oracle",
        absolute=6e-7,
        noise_factor=12.0,
    ),
    Rule(
        Edge.RECORDED32_LIVE32,
        (*FORWARD, Kind.GRADIENT),
        "the same program run twice: only thread count and BLAS order may differ",
        absolute=6e-7,
        noise_factor=12.0,
    ),
    Rule(
        Edge.JAXBF16_ORACLE,
        (Kind.LOGITS,),
        "bfloat16 products with float32 parameters: more accurate than torch's autocast on the "
        "same weights, since products are not rounded before they are added. 0.64 to 0.76 of its "
        "error measured on Intel hosts with AMX, AVX512, AVX2, AVX and SSE4.2, and on AMD EPYC; "
        "1 if the results of products are rounded too",
        metric="error_over_autocast",
        absolute=0.85,
    ),
    Rule(
        Edge.JAXBF16_ORACLE,
        (Kind.LOGITS, Kind.BLOCK),
        "bfloat16 rounds to 2^-9 and the floor to 2^-24, a ratio of 2^15; but bfloat16 rounds only "
        "the operands of products, the floor every value: at most 0.51 of 2^15 floors measured, "
        "on the attention of layer 0, 0.43 on other stages",
        noise_factor=0.6 * 2.0**15,
    ),
    Rule(
        Edge.JAXTF32_ORACLE,
        (Kind.LOGITS, Kind.BLOCK, Kind.GRADIENT),
        "TF32 rounds to 2^-12 and the floor to 2^-24, a ratio of 2^12; but TF32 rounds only the "
        "operands of products, the floor every value: at most 0.54 of 2^12 floors measured, on an "
        "H200 and on a CPU that rounds operands to 10 bits. The largest with 9 bits: 0.8 to 1.1",
        noise_factor=0.65 * 2.0**12,
    ),
    Rule(
        Edge.PRODUCTS32_FLOAT64,
        (Kind.BLOCK, Kind.GRADIENT),
        "a low-precision backend multiplies quantised operands and accumulates in float32: at "
        "most 3.7e-8 measured against float64 on operands quantised in NumPy",
        absolute=2e-7,
    ),
    *(
        Rule(
            edge,
            (Kind.WEIGHTS,),
            "a conversion copies bytes: the hash of every value is unchanged",
            metric="changed_parameters",
        )
        for edge in (Edge.JAX32_ORACLE, Edge.REFERENCE32_ORACLE)
    ),
    *(
        Rule(
            edge,
            (Kind.TOKENS,),
            "greedy decoding is discrete: one different token changes all later ones",
            metric="disagreement",
        )
        for edge in DISCRETE
    ),
    *(
        Rule(
            edge,
            (Kind.LOGITS,),
            "logits within their bound give the same best token wherever the margin exceeds it",
            metric="top1_flips",
        )
        for edge in DISCRETE
    ),
)


@dataclass(frozen=True)
class NoiseFloors(bounds.NoiseFloors):
    """Calibrated noise floors of Megalodon's cases, and the tolerances computed from them."""

    rules: tuple[Rule, ...] = TABLE

    @classmethod
    def load(cls, path: Path = NOISE_FILE) -> NoiseFloors:
        """Read the noise floors from a file, by default the committed one.

        Raises:
            FileNotFoundError: there is no such file; `megalodon-numerics parity calibrate` writes
                the committed one.
        """
        if not path.is_file():
            raise FileNotFoundError(
                f"there is no file of noise floors at {path}; write it with "
                "`megalodon-numerics parity calibrate`."
            )
        return cls(json.loads(path.read_text(encoding="utf-8"))["cases"])
