"""megalodon-hf as a user loads it: a folder read by `from_pretrained`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megalodon_jax.config import MegalodonConfig
from megalodon_jax.torch_files import to_numpy
from parity.megalodon.reference.installed import package, why_unavailable
from parity.recordings import ReferenceUnavailableError


@dataclass(frozen=True)
class Deployed:
    """A folder loaded by megalodon-hf in float32, on the CPU.

    Raises:
        ReferenceUnavailableError: on loading, when megalodon-hf cannot run.
    """

    model: Any
    problems: tuple[str, ...]
    """Mismatches reported by Transformers: missing, unexpected or differently shaped tensors."""

    @classmethod
    def load(cls, folder: Path) -> Deployed:
        """Load a folder."""
        if reason := why_unavailable():
            raise ReferenceUnavailableError(reason)
        model, info = package().MegalodonForCausalLM.from_pretrained(
            folder, output_loading_info=True
        )
        return cls(model.eval(), tuple(f"{k}: {sorted(map(str, v))}" for k, v in info.items() if v))

    @property
    def config(self) -> MegalodonConfig:
        """Its configuration, converted to ours."""
        return MegalodonConfig.from_hf(self.model.config)

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield parameters by name, one at a time."""
        for name, tensor in self.model.state_dict().items():
            yield name, to_numpy(tensor)

    def logits(self, ids: np.ndarray) -> np.ndarray:
        """Return the logits of token ids (B, L), float32."""
        import torch

        with torch.no_grad():
            out = self.model(input_ids=torch.from_numpy(ids).long(), use_cache=False)
        return out.logits.numpy().copy()
