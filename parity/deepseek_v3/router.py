"""The router: scores, the choice of experts, their weights; all in at least float32.

Source: DeepSeek-V3 technical report, equations 12 to 16; node-limited choice, section 2.1.2.
"""

from __future__ import annotations

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from megalodon_jax.config import widened
from parity.deepseek_v3.config import MLAMoEConfig

TINY = 1e-20
"""What the sum of the chosen weights is kept away from 0 by; Transformers' number."""


class Routing(NamedTuple):
    """Where the T tokens of a layer go."""

    logits: Float[Array, "T E"]
    chosen: Int[Array, "T k"]
    """Experts, in no particular order."""
    weights: Float[Array, "T k"]
    """What their outputs are multiplied by."""


class Router(eqx.Module):
    """Scores tokens against experts; the selection bias moves the choice, never a weight."""

    weight: Float[Array, "E D"]
    e_score_correction_bias: Float[Array, " E"]
    config: MLAMoEConfig = eqx.field(static=True)

    def logits(self, x: Float[Array, "T D"]) -> Float[Array, "T E"]:
        """Return router logits in at least float32."""
        wide = widened(x.dtype)
        return x.astype(wide) @ self.weight.astype(wide).T

    def route(self, logits: Float[Array, "T E"]) -> Routing:
        """Choose experts by score and bias, weigh them by score alone."""
        config = self.config
        scores = scores_of(logits, config)
        chosen, _ = choose(scores + self.bias(scores.dtype), config)
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
        if config.norm_topk_prob:
            weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + TINY)
        return Routing(logits, chosen, weights * config.routed_scaling_factor)

    def bias(self, dtype: DTypeLike) -> Float[Array, " E"]:
        """Return the selection bias; no gradient reaches it, load does (`balanced`)."""
        return jax.lax.stop_gradient(self.e_score_correction_bias.astype(dtype))


def scores_of(logits: Float[Array, "T E"], config: MLAMoEConfig) -> Float[Array, "T E"]:
    """Return the affinity of tokens and experts, between 0 and 1."""
    if config.scoring_func == "softmax":
        return jax.nn.softmax(logits, axis=-1)
    return jax.nn.sigmoid(logits)


def choose(
    ranked: Float[Array, "T E"], config: MLAMoEConfig
) -> tuple[Int[Array, "T k"], Float[Array, " T"]]:
    """Return the chosen experts (T, k) and by how much the choice is clear (T,).

    First `topk_group` groups by the sum of their best two, then `num_experts_per_tok` experts in
    them. The margin is the smaller of the two gaps between the last that is in and the first that
    is out: an error of less than half of it in every score, a quarter for groups, cannot change the
    choice. It is infinite where there is no choice.

    A group that is out is out (-inf). Transformers gives its experts 0 instead, which differs
    where a score and its bias are negative together.

    Args:
        ranked: scores and selection bias together.
        config: groups and how many of what.
    """
    T, E = ranked.shape
    G = config.n_group
    groups = jnp.sum(jax.lax.top_k(ranked.reshape(T, G, E // G), 2)[0], axis=-1)
    best, order = _top(groups, config.topk_group)
    inside = jnp.any(order[..., None] == jnp.arange(G, dtype=order.dtype), axis=1)
    open_ = jnp.where(jnp.repeat(inside, E // G, axis=-1), ranked, -jnp.inf)
    margin, chosen = _top(open_, config.num_experts_per_tok)
    return chosen, jnp.minimum(margin, best / 2)


def _top(values: Float[Array, "T n"], k: int) -> tuple[Float[Array, " T"], Int[Array, "T k"]]:
    """Return the gap between the k-th and the next value, and where the k largest are."""
    n = values.shape[-1]
    ordered, index = jax.lax.top_k(values, min(k + 1, n))
    gap = ordered[:, k - 1] - ordered[:, k] if k < n else jnp.full_like(values[:, 0], jnp.inf)
    return gap, index[:, :k]


def counts(routing: Routing) -> Int[Array, " E"]:
    """Return how many tokens each expert got: int32, which is exact to 2^31."""
    experts = routing.logits.shape[-1]
    return jnp.zeros(experts, jnp.int32).at[routing.chosen.reshape(-1)].add(1)


def balanced(bias: Float[Array, " E"], load: Int[Array, " E"], rate: float) -> Float[Array, " E"]:
    """Return the selection bias after one step: up where fewer tokens than the mean went.

    Source: auxiliary-loss-free balancing, DeepSeek-V3 report section 2.1.2; `rate` is its gamma.
    """
    wide = load.astype(jnp.float32)
    step = rate * jnp.sign(jnp.mean(wide) - wide)
    return (bias.astype(jnp.float32) + step).astype(bias.dtype)


def z_loss(logits: Float[Array, "T E"]) -> Float[Array, ""]:
    """Return `mean(logsumexp(logits)^2)`, taken in at least float32 (ST-MoE, equation 5)."""
    wide = logits.astype(widened(logits.dtype))
    return jnp.mean(jnp.square(jax.nn.logsumexp(wide, axis=-1)))
