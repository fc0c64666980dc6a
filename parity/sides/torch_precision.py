"""Full precision for torch's float32 products."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

FULL = ("none", "ieee")
"""Values of torch's `fp32_precision` with which float32 products are computed in float32."""


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Compute float32 products in float32 while the context lasts, on every device.

    On a GPU, torch by default rounds the operands of float32 convolutions and recurrent layers to
    TF32, with 10 bits of mantissa. If `torch.set_float32_matmul_precision` allows it, the operands
    of other products are rounded too, on some CPUs to bfloat16. The comparison would then not be
    one of float32 programs. JAX sides run with the matmul precision "highest".
    """
    parts = _parts()
    kept = [part.fp32_precision for part in parts]
    undo: list[Callable[[], None]] = []
    try:
        # torch has two interfaces. The older one is written first: torch refuses to read the older
        # one if only the newer one was written, and modules may read it, as `cudnn.flags` does.
        with contextlib.suppress(RuntimeError):
            if (precision := torch.get_float32_matmul_precision()) != "highest":
                undo.append(lambda: torch.set_float32_matmul_precision(precision))
                torch.set_float32_matmul_precision("highest")
        libraries: list[Any] = [torch.backends.cuda.matmul, torch.backends.cudnn]
        for backend in libraries:
            with contextlib.suppress(RuntimeError):
                if backend.allow_tf32:
                    undo.append(partial(setattr, backend, "allow_tf32", True))
                    backend.allow_tf32 = False
        for part in parts:
            if part.fp32_precision not in FULL:
                part.fp32_precision = "ieee"
        yield
    finally:
        for back in reversed(undo):
            back()
        for part, value in zip(parts, kept, strict=True):
            if part.fp32_precision != value:
                part.fp32_precision = value


def _parts() -> list[Any]:
    """Return the parts of torch that have an `fp32_precision`; empty before torch 2.9."""
    cuda, cudnn, mkldnn = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn
    if not hasattr(cudnn, "conv"):  # torch before 2.9
        return []
    rest = [mkldnn.matmul, mkldnn.conv, mkldnn.rnn]  # pyright: ignore[reportAttributeAccessIssue]
    return [cuda.matmul, cudnn.conv, cudnn.rnn, *rest]
