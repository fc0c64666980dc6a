"""Next-token cross-entropy (spec/model.md "Loss")."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int


def next_token_loss(
    logits: Float[Array, "B L V"],
    labels: Int[Array, "B L"],
    mask: Bool[Array, "B L"] | None = None,
    *,
    ignore_index: int = -100,
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, ""]:
    """Return the mean cross-entropy of `logits[:, t]` against `labels[:, t + 1]`, in nats.

    Targets equal to `ignore_index`, and targets at masked positions, do not count; megalodon-hf
    ignores the mask here (a documented difference). Without a valid target the loss is 0.

    Raises:
        RuntimeError: a label that counts is outside [0, V) (also under jit).
    """
    logits, targets = logits[:, :-1], labels[:, 1:]
    valid = targets != ignore_index
    if mask is not None:
        valid = valid & mask[:, 1:]
    V = logits.shape[-1]
    targets = eqx.error_if(
        targets,
        valid & ((targets < 0) | (targets >= V)),
        f"compute_loss: labels must be in [0, {V}) or ignore_index={ignore_index}.",
    )
    logits = logits.astype(dtype)
    at_target = jnp.take_along_axis(logits, jnp.where(valid, targets, 0)[..., None], axis=-1)
    nll = jax.nn.logsumexp(logits, axis=-1) - at_target[..., 0]
    count = jnp.maximum(jnp.sum(valid, dtype=jnp.int32), 1)
    return jnp.sum(jnp.where(valid, nll, 0.0)) / count.astype(dtype)
