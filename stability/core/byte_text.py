"""Text on which small byte-level models train: `pydoc_data.topics`, which is part of CPython.

One topic in ten, chosen by the hash of its name, is held out.
"""

from __future__ import annotations

import hashlib

import jax
import jax.numpy as jnp
import numpy as np

from megalodon_jax import training


def read_text() -> tuple[np.ndarray, np.ndarray]:
    """Return training bytes and held-out bytes, both uint8 vectors.

    The text is Python's help (`pydoc_data.topics`), of which one topic in ten is held out. Topics
    share paragraphs, so the training text leaves out every paragraph that a held-out topic has.
    """
    from pydoc_data.topics import topics

    train: list[str] = []
    held_out: list[str] = []
    for name in sorted(topics):
        first = hashlib.sha256(name.encode()).digest()[0]
        (held_out if first % 10 == 0 else train).extend(topics[name].split("\n\n"))
    seen = {paragraph.strip() for paragraph in held_out}
    train = [paragraph for paragraph in train if paragraph.strip() not in seen]
    return (
        np.frombuffer("\n\n".join(train).encode(), np.uint8),
        np.frombuffer("\n\n".join(held_out).encode(), np.uint8),
    )


def text_identity() -> dict[str, str]:
    """Return the name of the text (key `text`) and its SHA-256 (key `text_sha256`).

    The hash is that of the training bytes followed by the held-out bytes. It depends on the version
    of Python, since the text is part of CPython.
    """
    text, held_out = read_text()
    digest = hashlib.sha256(text.tobytes() + held_out.tobytes()).hexdigest()
    return {"text": "pydoc_data.topics", "text_sha256": digest}


def windows(text: np.ndarray, starts: np.ndarray, length: int) -> jax.Array:
    """Return the windows of `length` bytes that begin at `starts` (B,): int32 (B, length).

    The array is on JAX's default device.
    """
    return jnp.asarray(training.windows(text, starts, length))


def spread_windows(text: np.ndarray, count: int, length: int) -> jax.Array:
    """Return `count` windows of a text's bytes, int32 (count, length).

    They start at equal distances; the first begins and the last ends with the text. They overlap if
    the text is short. The array is on JAX's default device.
    """
    return windows(text, np.linspace(0, len(text) - length, count).astype(int), length)
