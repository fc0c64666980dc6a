"""How values are written where a person or another program reads them."""

from __future__ import annotations

import json
import math

import numpy as np

from reports.text import for_json


def test_json_gets_none_for_what_it_has_no_number_for() -> None:
    row = {"value": math.nan, "past": [1.0, math.inf, 2], "spread": (-math.inf,), "name": "nan"}
    text = for_json({"rows": [row], "array": np.array([0.5, np.nan]), "none": None, "yes": True})
    json.dumps(text, allow_nan=False)
    assert text == {
        "rows": [{"value": None, "past": [1.0, None, 2], "spread": [None], "name": "nan"}],
        "array": [0.5, None],
        "none": None,
        "yes": True,
    }
