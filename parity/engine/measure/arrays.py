"""Type of the results of one side of a comparison: arrays by name."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

Arrays = Mapping[str, np.ndarray]
"""NumPy arrays by quantity name; not modified by the code that receives them."""
