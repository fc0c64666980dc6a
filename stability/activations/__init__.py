"""Ranges of activations and attention logits, and their losses in bfloat16 and float16.

`measure_ranges` measures arrays in one training step, `measure_heads` logits in one forward pass.
`range_findings` and `attention_findings` judge the results.
"""

from stability.activations.attention import (
    WEIGHT_ERROR,
    Heads,
    attention_findings,
    measure_heads,
    weight_error,
)
from stability.activations.ranges import Range, Ranges, measure_ranges, range_findings

__all__ = [
    "WEIGHT_ERROR",
    "Heads",
    "Range",
    "Ranges",
    "attention_findings",
    "measure_heads",
    "measure_ranges",
    "range_findings",
    "weight_error",
]
