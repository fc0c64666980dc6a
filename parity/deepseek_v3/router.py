"""The router: scores of experts, choice of experts and their weights, in at least float32.

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
"""Added to the sum of the chosen weights to avoid division by 0; the value is Transformers'."""


class Routing(NamedTuple):
    """Experts of a layer for each of T tokens, and their weights."""

    logits: Float[Array, "T E"]
    """Router logits."""
    chosen: Int[Array, "T k"]
    """Indices of the chosen experts, in no particular order."""
    weights: Float[Array, "T k"]
    """Factors on the outputs of the chosen experts."""


class Router(eqx.Module):
    """Chooses experts for tokens, and the weights of their outputs."""

    weight: Float[Array, "E D"]
    e_score_correction_bias: Float[Array, " E"]
    """Selection bias: added to scores for the choice of experts, but not for their weights."""
    config: MLAMoEConfig = eqx.field(static=True)

    def logits(self, x: Float[Array, "T D"]) -> Float[Array, "T E"]:
        """Return router logits in at least float32."""
        wide = widened(x.dtype)
        return x.astype(wide) @ self.weight.astype(wide).T

    def route(self, logits: Float[Array, "T E"]) -> Routing:
        """Choose experts by score plus selection bias; weight them by score alone."""
        config = self.config
        scores = scores_of(logits, config)
        chosen, _ = choose(scores + self.bias(scores.dtype), config)
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
        if config.norm_topk_prob:
            weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + TINY)
        return Routing(logits, chosen, weights * config.routed_scaling_factor)

    def bias(self, dtype: DTypeLike) -> Float[Array, " E"]:
        """Return the selection bias in `dtype`, with zero gradient; `balanced` updates the bias."""
        return jax.lax.stop_gradient(self.e_score_correction_bias.astype(dtype))


def scores_of(logits: Float[Array, "T E"], config: MLAMoEConfig) -> Float[Array, "T E"]:
    """Return the score of each expert for each token, in [0, 1]: sigmoid or softmax of logits."""
    if config.scoring_func == "softmax":
        return jax.nn.softmax(logits, axis=-1)
    return jax.nn.sigmoid(logits)


def choose(
    ranked: Float[Array, "T E"], config: MLAMoEConfig
) -> tuple[Int[Array, "T k"], Float[Array, " T"]]:
    """Return the chosen experts (T, k) and the margin of the choice (T,).

    First the `topk_group` groups of experts with the largest sums of their two largest `ranked`
    values are chosen. Then the `num_experts_per_tok` experts with the largest `ranked` values
    within those groups are chosen.

    A gap is the difference between the last chosen and the first rejected value. The margin is the
    smaller of the gap between experts and half the gap between groups, because sums of two values
    change twice as much. It is infinite if all groups and experts are chosen. If every value
    changes by less than half the margin, the choice stays the same.

    Experts of rejected groups are excluded (-inf). Transformers gives them 0 instead, which differs
    if score plus bias is negative.

    Args:
        ranked: scores plus selection bias.
        config: numbers of groups and experts.
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
    """Return the gap between the k-th largest and the next value, and the indices of the k largest.

    The gap is infinite if k is n.
    """
    n = values.shape[-1]
    ordered, index = jax.lax.top_k(values, min(k + 1, n))
    gap = ordered[:, k - 1] - ordered[:, k] if k < n else jnp.full_like(values[:, 0], jnp.inf)
    return gap, index[:, :k]


def counts(routing: Routing) -> Int[Array, " E"]:
    """Return the number of tokens routed to each expert: (E,) int32, exact below 2^31."""
    experts = routing.logits.shape[-1]
    return jnp.zeros(experts, jnp.int32).at[routing.chosen.reshape(-1)].add(1)


def balanced(bias: Float[Array, " E"], load: Int[Array, " E"], rate: float) -> Float[Array, " E"]:
    """Return the selection bias after one training step.

    The bias of an expert is raised by `rate` if the expert got fewer tokens than the mean, and
    lowered if it got more. Source: auxiliary-loss-free balancing, DeepSeek-V3 report section 2.1.2;
    `rate` is the report's gamma.

    Args:
        bias: selection bias before the step.
        load: number of tokens of each expert in the step (`counts`).
        rate: size of a change.
    """
    wide = load.astype(jnp.float32)
    step = rate * jnp.sign(jnp.mean(wide) - wide)
    return (bias.astype(jnp.float32) + step).astype(bias.dtype)


def z_loss(logits: Float[Array, "T E"]) -> Float[Array, ""]:
    """Return `mean(logsumexp(logits)^2)`, computed in at least float32 (ST-MoE, equation 5)."""
    wide = logits.astype(widened(logits.dtype))
    return jnp.mean(jnp.square(jax.nn.logsumexp(wide, axis=-1)))
