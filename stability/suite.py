"""The stability suite: what low precision does, and already did, to a checkpoint."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megalodon_jax.convert import load_from_pretrained
from megalodon_jax.model import MegalodonForCausalLM
from stability.audit import audit_parameters
from stability.findings import Finding
from stability.survival import AdamW, probe

STEPS, BATCH_SIZE, LENGTH = 20, 4, 128


@dataclass(frozen=True)
class Checkpoint:
    """A folder with `model.safetensors`, `config.json`, and what its training left beside them."""

    folder: Path
    text: Path
    """Bytes the probes take gradients on."""

    @property
    def training(self) -> dict[str, Any] | None:
        """What `training.json` says, or None without one."""
        path = self.folder / "training.json"
        return json.loads(path.read_text()) if path.is_file() else None

    @property
    def optimiser(self) -> AdamW:
        """AdamW as the checkpoint was trained; the founding case's 3e-4 when that is unknown."""
        training = self.training or {}
        return AdamW(
            lr=training.get("lr", 3e-4),
            beta2=training.get("beta2", 0.999),
            weight_decay=training.get("weight_decay", 0.0),
        )

    def load(self) -> MegalodonForCausalLM:
        """Load the model as stored, in float32; errors as `load_from_pretrained`."""
        return load_from_pretrained(self.folder)

    def batches(self) -> np.ndarray:
        """Token ids (steps, B, L) cut from the text at evenly spaced starts."""
        text = np.frombuffer(self.text.read_bytes(), np.uint8)
        starts = np.linspace(0, len(text) - LENGTH, STEPS * BATCH_SIZE).astype(int)
        cut = text[starts[:, None] + np.arange(LENGTH)].astype(np.int32)
        return cut.reshape(BATCH_SIZE, STEPS, LENGTH).swapaxes(0, 1)


def run(checkpoint: Checkpoint, model: MegalodonForCausalLM) -> list[Finding]:
    """Audit what is stored and probe what a bfloat16 copy would lose."""
    return [*audit_parameters(model), *probe(model, checkpoint.batches(), checkpoint.optimiser)]
