"""Workloads of megalodon-hf (training step, prefill, decoding, ...) for benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

Work = Callable[[int], None]
"""Repeats a workload the given number of times, and returns when the results are computed."""


def workloads(model: Any, ids: np.ndarray, device: str, autocast: bool = False) -> dict[str, Work]:
    """Return workloads by name; each takes a number of repetitions and waits for the results.

    - forward: forward pass without a cache.
    - train_step: loss, backward pass and AdamW.
    - prefill: forward pass that fills a cache.
    - decode: one token per repetition, with a cache; the very first repetition also fills it.
    - generate: prefill and as many greedy tokens as repetitions. With recent versions of
      transformers megalodon-hf has no `generate`, so a loop over its cache stands in for it.

    Args:
        model: megalodon-hf, float32; train_step changes its weights.
        ids: token ids (B, L) int32.
        device: device of the model.
        autocast: run `forward` and the loss of `train_step` under autocast to bfloat16; the other
            workloads stay in float32.
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
            # CUDA kernels run asynchronously.
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
        # Copying the last token to the host waits for its computation.
        out.logits[:, -1].argmax(-1).cpu()


def peak_bytes() -> int:
    """Return the peak number of bytes that torch had allocated on the GPU.

    The peak is taken since the process started, or since torch's peak statistics were reset.
    """
    import torch

    return torch.cuda.max_memory_allocated()
