"""Full precision for torch's float32 products."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Compute float32 products in float32 while the context lasts, on every device.

    torch rounds the operands of float32 convolutions and recurrent layers to TF32, with 10 bits of
    mantissa, on a GPU unless told otherwise, and those of other products if
    `torch.set_float32_matmul_precision` allows it, on some CPUs to bfloat16 too. That is another
    dtype than the one that is compared; JAX sides run at the precision "highest".
    """
    before = [(backend, name, getattr(backend, name)) for backend, name, _ in _SETTINGS]
    for backend, name, exact in _SETTINGS:
        setattr(backend, name, exact)
    try:
        yield
    finally:
        for backend, name, value in before:
            setattr(backend, name, value)


def _settings() -> list[tuple[object, str, str | bool]]:
    """Return the settings of float32 products: where, name and the value of full precision."""
    cuda, cudnn, mkldnn = (torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn)
    if not hasattr(cudnn, "conv"):  # torch before 2.9, which refuses a mix of both interfaces
        return [(cuda.matmul, "allow_tf32", False), (cudnn, "allow_tf32", False)]
    backends = cuda.matmul, *(getattr(b, n) for b in (cudnn, mkldnn) for n in ("conv", "rnn"))
    return [(b, "fp32_precision", "ieee") for b in (*backends, mkldnn.matmul)]


_SETTINGS = _settings()
