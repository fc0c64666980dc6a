"""One forward pass of MLA + MoE with all named intermediates, as input for the probes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from parity.deepseek_v3.attention import Attention
from parity.deepseek_v3.model import MLAMoEForCausalLM
from parity.engine.programs.instrument import capture


@dataclass(frozen=True)
class Observed:
    """A model, token ids, and the intermediates of the model on these ids."""

    model: MLAMoEForCausalLM
    ids: Int[Array, "B L"]
    intermediates: dict[str, Array]
    """Values by `checkpoint_name`, such as `layers.0.attn_norm` or `layers.1.router_logits`."""


def observe(model: MLAMoEForCausalLM, ids: Int[Array, "B L"]) -> Observed:
    """Run the model once on token ids and keep every named intermediate."""
    return Observed(model, ids, _observed(model, ids))


@eqx.filter_jit
def _observed(model: MLAMoEForCausalLM, ids: Array) -> dict[str, Array]:
    params, static = eqx.partition(model, eqx.is_array)

    def logits(params: Any, ids: Array) -> Array:
        return eqx.combine(params, static)(ids).logits

    return capture(logits)(params, ids)[1]


def positions_of(x: Float[Array, "B L D"]) -> Int[Array, "B L"]:
    """Return the token positions of each row of `x`, 0 to L - 1, int32 (B, L)."""
    return jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])


@eqx.filter_jit
def largest_scores(attention: Attention, x: Float[Array, "B L D"]) -> Float[Array, " H"]:
    """Return each head's largest attention logit, (H,), at least float32.

    The maximum is over all rows, queries, and keys that the query sees.

    Args:
        attention: attention of a layer.
        x: normalised input of the attention.
    """
    L, positions = x.shape[1], positions_of(x)
    q_nope, q_rot = attention.queries(x, positions)
    scores = attention.scores(q_nope, q_rot, attention.compress(x, positions))
    return jnp.max(jnp.where(jnp.tril(jnp.ones((L, L), bool)), scores, -jnp.inf), axis=(0, 2, 3))
