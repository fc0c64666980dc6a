"""megalodon-hf in bfloat16: under autocast, and with the whole model cast."""

from __future__ import annotations

import contextlib
from typing import Any

import ml_dtypes
import numpy as np

from parity.megalodon.cases import Case

MODES = ("autocast", "cast")
"""Modes: "autocast" (products in bfloat16, float32 parameters) and "cast" (the whole model)."""


def low_precision(model: Any, case: Case, device: str) -> dict[str, np.ndarray]:
    """Return logits and loss of a case in each mode, as `autocast/logits`, `cast/loss` and so on.

    An array whose values are all exact in bfloat16 is returned as bfloat16, any other as float32.

    Args:
        model: megalodon-hf with the case's weights, float32; afterwards it is bfloat16.
        case: a case without cuts and steps.
        device: device of the model.
    """
    import torch

    batch = case.batch
    inputs = {
        "input_ids": torch.from_numpy(batch.ids).long().to(device),
        "attention_mask": torch.from_numpy(batch.mask).to(device) if batch.padded else None,
        "labels": torch.from_numpy(batch.labels).long().to(device),
    }
    found = {}
    for mode in MODES:
        autocast = mode == "autocast"
        model = model if autocast else model.to(torch.bfloat16)
        context = torch.autocast(device, torch.bfloat16) if autocast else contextlib.nullcontext()
        with torch.no_grad(), context:
            out = model(**inputs, use_cache=False)
        found |= {f"{mode}/logits": _stored(out.logits), f"{mode}/loss": _stored(out.loss)}
    return found


def _stored(tensor: Any) -> np.ndarray:
    wide = tensor.detach().cpu().float().numpy()
    narrow = wide.astype(ml_dtypes.bfloat16)
    return narrow if np.array_equal(narrow.astype(np.float32), wide) else wide
