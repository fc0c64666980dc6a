"""megalodon-hf loaded as its users do: `from_pretrained` on a checkpoint folder."""

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
    """A checkpoint folder loaded by megalodon-hf in float32, on the CPU."""

    model: Any
    """megalodon-hf's model, in evaluation mode."""
    problems: tuple[str, ...]
    """Mismatches reported by Transformers: missing, unexpected or differently shaped tensors."""

    @classmethod
    def load(cls, folder: Path) -> Deployed:
        """Load a checkpoint folder.

        Raises:
            ReferenceUnavailableError: megalodon-hf cannot run here.
        """
        if reason := why_unavailable():
            raise ReferenceUnavailableError(reason)
        model, info = package().MegalodonForCausalLM.from_pretrained(
            folder, output_loading_info=True
        )
        return cls(model.eval(), tuple(f"{k}: {sorted(map(str, v))}" for k, v in info.items() if v))

    @property
    def config(self) -> MegalodonConfig:
        """Configuration that megalodon-hf read from the folder, as a `MegalodonConfig`."""
        return MegalodonConfig.from_hf(self.model.config)

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the names and values of the model's tensors, one at a time."""
        for name, tensor in self.model.state_dict().items():
            yield name, to_numpy(tensor)

    def logits(self, ids: np.ndarray) -> np.ndarray:
        """Return the logits of token ids (B, L), float32."""
        import torch

        with torch.no_grad():
            out = self.model(input_ids=torch.from_numpy(ids).long(), use_cache=False)
        return out.logits.numpy().copy()
