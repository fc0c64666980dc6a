"""Work of megalodon-hf that a bench times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

Work = Callable[[int], None]


def workloads(model: Any, ids: np.ndarray, device: str) -> dict[str, Work]:
    """Return work by name; each takes a count of repetitions and returns when all are computed.

    forward, train_step (loss, backward, AdamW), prefill (with a cache), and decode (single tokens
    after a prefill).

    Args:
        model: megalodon-hf, float32; train_step trains it.
        ids: token ids (B, L) int32.
        device: where the model is.
    """
    import torch

    tokens = torch.from_numpy(ids).long().to(device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def train_step() -> None:
        optimiser.zero_grad()
        model(tokens, labels=tokens, use_cache=False).loss.backward()
        optimiser.step()

    def decoding() -> Iterator[None]:
        cache = model(tokens, use_cache=True).past_key_values
        while True:
            cache = model(tokens[:, :1], past_key_values=cache, use_cache=True).past_key_values
            yield

    stream = decoding()

    def repeated(once: Callable[[], Any], gradients: bool = False) -> Work:
        def run(count: int) -> None:
            with torch.set_grad_enabled(gradients):
                for _ in range(count):
                    once()
            # A GPU answers before it has computed.
            if device == "cuda":
                torch.cuda.synchronize()

        return run

    return {
        "forward": repeated(lambda: model(tokens, use_cache=False)),
        "train_step": repeated(train_step, gradients=True),
        "prefill": repeated(lambda: model(tokens, use_cache=True)),
        "decode": repeated(lambda: next(stream)),
    }


def peak_bytes() -> int:
    """Return the most bytes ever allocated on the GPU."""
    import torch

    return torch.cuda.max_memory_allocated()
