"""Probe of the router: logits, z-loss, load, choices that bfloat16 would change, bias, counts.

The z-loss is the mean square of the logits' log-sum-exp. The load of an expert is the number of
tokens sent to it. Thresholds are constants, each with its reason. Source: docs/mla-moe.md "The
stability guide"; ST-MoE (arXiv 2202.08906), section 3.3.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from parity.deepseek_v3.config import MLAMoEConfig
from parity.deepseek_v3.model import MoE
from parity.deepseek_v3.router import (
    Router,
    Routing,
    balanced,
    choose,
    counts,
    scores_of,
    z_loss,
)
from stability.activations.attention import WEIGHT_ERROR, weight_error
from stability.core.findings import Finding, Severity, judge
from stability.core.number_formats import BF16
from stability.moe.observe import Observed

PROBE = "router"
MOST_LOAD = 2.5
"""Largest load of an expert without a warning, relative to the mean. Common capacity factors are
1.25 to 2 (Switch, ST-MoE), so a larger load would drop tokens there."""
LEAST_ENTROPY = 0.7
"""Smallest entropy of the load without a warning, relative to that of an even load. Below it, more
than 30 % of the possible information of the choice is unused."""
MOST_Z = 32.0**2
"""Largest z-loss without a warning: that of router logits near 32, where rounding to bfloat16
changes a score by up to 13 %."""
MOST_FLIPS = 0.01
"""Largest fraction of tokens without a warning that go to other experts than a float32 router would
choose."""
MOST_TIES = 0.5
"""Largest fraction of near ties without a warning: tokens whose experts could change if each score
changed by half a bfloat16 ULP of the token's largest score. At initialisation all scores are close
to each other: 0.2 was measured on the small size."""
EXACT_TIES = 0.01
"""Largest fraction of exact ties without a warning: tokens for which equal scores leave the choice
to the order of the experts."""
LEAST_SIGNAL = 0.1
"""Smallest mean sum of a token's expert weights without a warning: a tenth of the contribution of
one dense MLP."""
LEAST_TOKENS = 4.0
"""Smallest mean number of tokens per expert and batch without a warning. With 4, a fraction e^-4
(2 %) of the experts gets no token by chance."""
BIAS_RATE = 1e-3
"""Update of the selection bias per step: 0.001 as in DeepSeek-V3's report. The bias balances the
load; it only affects the choice of experts."""
BIAS_STEPS = 2000
"""Number of tested updates of the bias, all upward, which lead to 2 in exact arithmetic. A bfloat16
bias stops at 0.5, where half the spacing of the format, 0.00195, exceeds the update of 0.001."""
BIAS_SHARE = 0.95
"""Smallest fraction of the exact value that the bias must reach to avoid a warning. float32 reaches
all of it, bfloat16 a quarter."""
OWN = "this project's threshold, stability/moe/router_probe.py"


def router_findings(observed: Observed) -> list[Finding]:
    """Return findings on every router, and on token counts (see `count_finding`)."""
    findings = []
    for i, block in enumerate(observed.model.model.layers):
        if isinstance(block.mlp, MoE):
            name, router = f"layers.{i}.mlp.gate", block.mlp.gate
            logits = observed.intermediates[f"layers.{i}.router_logits"]
            inputs = observed.intermediates[f"layers.{i}.mlp_norm"]
            routing = router.route(logits)
            findings += [
                *logit_findings(name, logits),
                *load_findings(name, routing),
                *choice_findings(name, logits, router, inputs),
                *signal_findings(name, routing),
                bias_finding(name, router.e_score_correction_bias.dtype),
            ]
    return [*findings, *([count_finding(counts)] if findings else [])]


def logit_findings(name: str, logits: Float[Array, "T E"]) -> list[Finding]:
    """Return findings on the largest |router logit|, the dtype of the logits, and the z-loss."""
    largest = float(jnp.max(jnp.abs(logits)))
    error, z = weight_error(largest, BF16.name), float(z_loss(logits))
    experts = logits.shape[-1]
    # Computed in bfloat16 throughout: the square and the mean lose the most digits.
    half = logits.astype(jnp.bfloat16)
    narrow = float(jnp.mean(jnp.square(jax.nn.logsumexp(half, axis=-1))))
    off = abs(narrow - z) / z if z else 0.0
    source = "half a unit of bfloat16 at the largest logit, exponentiated"
    large = f"largest |router logit| {largest:.3g}: in bfloat16 a score is off by {error:.1%}"
    lower = "raise router_z_loss_coef, or lower the learning rate of the router"
    narrowed = judge(
        PROBE,
        name,
        "logits_in_float32",
        float(logits.dtype.itemsize >= 4),
        1.0,
        "the guide's z-loss and DeepSeek-V3's router are float32",
        f"router logits are computed in {logits.dtype.name}",
        "widen hidden states and weight before the router's product",
        least=True,
        severity=Severity.ERROR,
    )
    size = (
        f"z-loss {z:.4g} in float32, of an untrained router about {math.log(experts) ** 2:.3g}; "
        f"computed in bfloat16 it is off by {off:.1%}"
    )
    more = "raise router_z_loss_coef; if that brings NaN, the guide lowers it to 0.0001"
    return [
        judge(PROBE, name, "logit_weight_error", error, WEIGHT_ERROR, source, large, lower),
        narrowed,
        judge(PROBE, name, "z_loss", z, MOST_Z, OWN, size, more),
    ]


def load_findings(name: str, routing: Routing) -> list[Finding]:
    """Return findings on how evenly tokens are distributed over experts."""
    load = np.asarray(counts(routing), np.float64)
    mean, dead = load.mean(), int(np.sum(load == 0))
    share = load[load > 0] / load.sum()
    entropy = float(-np.sum(share * np.log(share)) / math.log(load.size))
    most = float(load.max() / mean)
    remedy = "raise the balancing loss or the step of the selection bias; warm up more slowly"
    busiest = f"the busiest expert gets {most:.2f} times the mean of {mean:.0f} tokens"
    idle = f"{dead} of {load.size} experts get no token of {load.sum():.0f} choices"
    spread = f"entropy of the load is {entropy:.0%} of the largest possible"
    return [
        judge(PROBE, name, "load_max_over_mean", most, MOST_LOAD, OWN, busiest, remedy),
        judge(PROBE, name, "dead_experts", float(dead), 0.0, OWN, idle, remedy),
        judge(PROBE, name, "load_entropy", entropy, LEAST_ENTROPY, OWN, spread, remedy, least=True),
    ]


def choice_findings(
    name: str, logits: Float[Array, "T E"], router: Router, x: Float[Array, "B L D"]
) -> list[Finding]:
    """Return findings on the choice of experts: changes against float32, near and exact ties.

    Each value is a fraction of the tokens. A near tie has a margin below the spacing of bfloat16.

    Args:
        name: name of the router.
        logits: logits that the model computed; a float32 router makes the choice to compare with.
        router: the router of the layer.
        x: input of the router.
    """
    wide = x.reshape(-1, x.shape[-1]).astype(jnp.float32) @ router.weight.astype(jnp.float32).T
    scores = scores_of(wide, router.config) + router.bias(jnp.float32)
    experts, margin = choose(scores, router.config)

    def flips(other: Array) -> float:
        moved = scores_of(other, router.config).astype(jnp.float32) + router.bias(jnp.float32)
        stored = moved.astype(other.dtype).astype(jnp.float32)
        theirs, _ = choose(stored, router.config)
        return float(jnp.mean(jnp.any(jnp.sort(experts) != jnp.sort(theirs), axis=-1)))

    own, narrow = flips(logits), flips(wide.astype(jnp.bfloat16))
    unit = BF16.spacing(np.asarray(jnp.max(scores, axis=-1)))
    ties = float(np.mean(np.asarray(margin) < unit))
    exact = float(np.mean(np.asarray(margin) == 0))
    moved = (
        f"{own:.1%} of the tokens go to other experts than with a float32 router; with logits and "
        f"scores in bfloat16 {narrow:.1%} would"
    )
    wide_remedy = "compute router logits and scores in float32"
    near = f"in {ties:.1%} of the choices the margin is below a unit of bfloat16"
    equal = f"{exact:.1%} of the choices are decided by the order of the experts alone"
    alike = "experts score alike: initialise the router's rows anew, or train it longer"
    return [
        judge(PROBE, name, "flips", own, MOST_FLIPS, OWN, moved, wide_remedy),
        judge(PROBE, name, "boundary_ties", ties, MOST_TIES, OWN, near, alike),
        judge(PROBE, name, "exact_ties", exact, EXACT_TIES, OWN, equal, alike),
    ]


def signal_findings(name: str, routing: Routing) -> list[Finding]:
    """Return findings on two means: sum of a token's expert weights, and tokens per expert.

    With a small sum the experts contribute little to a token; with few tokens an expert gets few
    gradients.
    """
    E, (T, k) = routing.logits.shape[-1], routing.chosen.shape
    weight = float(jnp.mean(jnp.sum(routing.weights, axis=-1)))
    each = T * k / E
    total = f"the weights of a token's {k} of {E} experts add up to {weight:.3g}"
    normalise = "normalise the chosen weights (norm_topk_prob), or activate more experts per token"
    share = f"a batch of {T} tokens gives {each:.3g} to an expert on average"
    enlarge = "activate more experts per token, or enlarge the batch: the others get no gradient"
    at_least = partial(judge, PROBE, name, least=True)
    return [
        at_least("routed_weight", weight, LEAST_SIGNAL, OWN, total, normalise),
        at_least("tokens_per_expert", each, LEAST_TOKENS, OWN, share, enlarge),
    ]


def bias_finding(name: str, dtype: DTypeLike, rate: float = BIAS_RATE) -> Finding:
    """Return a finding on the value that a selection bias reaches after `BIAS_STEPS` increases.

    The bias begins at 0; the value is divided by the exact one.

    Args:
        name: name of the router.
        dtype: dtype of the bias.
        rate: size of an increase.
    """
    start = jnp.zeros(2, dtype)
    load = jnp.asarray([0, 2], jnp.int32)
    pushed = jax.lax.fori_loop(0, BIAS_STEPS, lambda _, b: balanced(b, load, rate), start)
    reached, intended = float(pushed[0]), rate * BIAS_STEPS
    return judge(
        PROBE,
        f"{name}.e_score_correction_bias",
        "bias_reached",
        reached / intended,
        BIAS_SHARE,
        f"{BIAS_STEPS:,} steps of {rate:g}, DeepSeek-V3's, in one direction",
        f"stored in {jnp.dtype(dtype).name} it reaches {reached:.4g} of {intended:.4g}",
        "store the selection bias in float32",
        least=True,
    )


def count_finding(count: Callable[[Routing], Array]) -> Finding:
    """Return a finding on whether `count` returns the integer 1,000 for 1,000 tokens of an expert.

    A narrow floating-point counter would stop earlier.
    """
    tokens = 1000
    one = jnp.zeros((tokens, 1), jnp.float32)
    counted = count(Routing(jnp.zeros((tokens, 2), jnp.float32), one.astype(jnp.int32), one))
    whole = jnp.issubdtype(counted.dtype, jnp.integer) and int(counted[0]) == tokens
    return judge(
        PROBE,
        "expert counts",
        "counts_are_integers",
        float(whole),
        1.0,
        "bfloat16 counts to 256, float16 to 2,048, float32 to 2^24",
        f"{tokens:,} tokens are counted as {float(counted[0]):,.0f}, in {counted.dtype.name}",
        "count in int32",
        least=True,
        severity=Severity.ERROR,
    )


def routing_of(logits: Float[Array, "T E"], config: MLAMoEConfig) -> Routing:
    """Return the routing of tokens by their logits, without a selection bias."""
    E = logits.shape[-1]
    return Router(jnp.zeros((E, 1), jnp.float32), jnp.zeros(E, jnp.float32), config).route(logits)
