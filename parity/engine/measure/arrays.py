"""Named arrays: what a side of a comparison gives, by the name of each quantity."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

Arrays = Mapping[str, np.ndarray]
"""NumPy arrays by name; read only."""
