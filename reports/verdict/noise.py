"""Tests whether a value that does not repeat bit by bit is an outlier among its earlier values.

Source: docs/verdicts.md "Comparability".
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from parity.tolerances import NOISE_FLOOR, NOISE_LEAST, NOISE_MADS


def step(value: float, past: Sequence[float]) -> float | None:
    """Return `value` divided by the median of its earlier values `past` if it is an outlier.

    It is an outlier, high or low, if two conditions hold for log10 of the values. The distance from
    the median exceeds both `NOISE_MADS` median absolute deviations (MAD) and log10 `NOISE_FLOOR`;
    and the value is more than log10 `NOISE_FLOOR` outside the range of `past`: an error that jumps
    between two modes moves median and MAD at random, but not the range. The result is None if it is
    no outlier, if `past` has fewer than `NOISE_LEAST` positive finite values, or if `value` is not
    positive and finite (only its tolerance counts).
    """
    logs = [math.log10(v) for v in past if v > 0 and math.isfinite(v)]
    if len(logs) < NOISE_LEAST or not (value > 0 and math.isfinite(value)):
        return None
    now, middle, floor = math.log10(value), statistics.median(logs), math.log10(NOISE_FLOOR)
    mad = statistics.median(abs(v - middle) for v in logs)
    far = abs(now - middle) > max(NOISE_MADS * mad, floor)
    unseen = now > max(logs) + floor or now < min(logs) - floor
    return 10.0 ** (now - middle) if far and unseen else None
