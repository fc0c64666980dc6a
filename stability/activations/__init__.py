"""Ranges of activations and attention logits, and what narrow formats would lose of them.

`measure_ranges` and `measure_heads` run one step; the findings report the losses in bfloat16.
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
