"""Work of megalodon-hf that a bench times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

Work = Callable[[int], None]


def workloads(model: Any, ids: np.ndarray, device: str, autocast: bool = False) -> dict[str, Work]:
    """Return work by name; each takes a count of repetitions and returns when all are computed.

    forward, train_step (loss, backward, AdamW), prefill (with a cache), decode (single tokens after
    a prefill) and generate (`count` tokens after the prompt, greedy). With the transformers that
    have it, megalodon-hf has no `generate`: a loop over its cache stands for it, without what
    `generate` would do besides.

    Args:
        model: megalodon-hf, float32; train_step trains it.
        ids: token ids (B, L) int32.
        device: where the model is.
        autocast: whether forward and loss run under autocast to bfloat16.
    """
    import torch

    tokens = torch.from_numpy(ids).long().to(device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def train_step() -> None:
        optimiser.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            loss = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimiser.step()

    def forward() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            model(tokens, use_cache=False)

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
        "forward": repeated(forward),
        "train_step": repeated(train_step, gradients=True),
        "prefill": repeated(lambda: model(tokens, use_cache=True)),
        "decode": repeated(lambda: next(stream)),
        "generate": lambda count: _generate(model, tokens, count),
    }


def _generate(model: Any, tokens: Any, count: int) -> None:
    import torch

    with torch.no_grad():
        out = model(tokens, use_cache=True)
        for _ in range(count - 1):
            token = out.logits[:, -1:].argmax(-1)
            out = model(token, past_key_values=out.past_key_values, use_cache=True)
        # The last token has to be computed, on a GPU too, before it can be read.
        out.logits[:, -1].argmax(-1).cpu()


def peak_bytes() -> int:
    """Return the most bytes ever allocated on the GPU."""
    import torch

    return torch.cuda.max_memory_allocated()
