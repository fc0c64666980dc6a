"""How large activations and attention logits get, and what no narrow format could hold.

`measure_ranges` and `measure_heads` run one step; the findings say what bfloat16 would lose of it.
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
