"""Defects planted in a model, which the probes must detect.

A probe must report its defect, and must report nothing on the healthy model (without a defect),
which is the control. Source: CONTRIBUTING.md, "Negative controls".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from parity.deepseek_v3.attention import Attention
from parity.deepseek_v3.cases import by_name
from parity.deepseek_v3.model import Block, Experts, MLAMoEForCausalLM, MoE
from parity.deepseek_v3.router import Router, Routing, counts
from stability.core.documents import markdown, versions
from stability.core.findings import Finding, Severity
from stability.moe import attention_probe, fixed_bugs, router_probe
from stability.moe.examine import Examination
from stability.moe.observe import Observed, observe
from stability.moe.policy import FP8, policy_findings

SPARSE = 1
"""Index of the layer with experts in the healthy model."""
CLIP_TAU = 0.5
"""QK-clip threshold: below every head's largest logit in this model, so that clipping acts."""
Document = dict[str, Any]
Look = Callable[[], list[Finding]]
"""Function that runs a probe and returns its findings."""


@dataclass(frozen=True)
class Defect:
    """One defect, and the metric that must detect it."""

    metric: str
    """Metric of the finding that must become a warning or an error."""
    what: str
    """The defect, as text."""
    healthy: Look
    """Probe of the model without the defect."""
    planted: Look
    """Probe of the model with the defect."""

    def row(self) -> Row:
        """Run the probe on the healthy and on the defective model, and return both findings."""

        def gravest(run: Look) -> Finding:
            named = (f for f in run() if f.metric == self.metric)
            return max(named, key=lambda f: f.severity.gravity())

        return Row(self, gravest(self.healthy), gravest(self.planted))


@dataclass(frozen=True)
class Row:
    """A defect, and the most severe finding of its metric without and with it."""

    defect: Defect
    healthy: Finding
    planted: Finding

    @property
    def caught(self) -> bool:
        """Whether the probe reports the defect and does not report the healthy model."""
        alarm = (Severity.WARNING, Severity.ERROR)
        return self.planted.severity in alarm and self.healthy.severity not in alarm


def rows(defects: Iterable[Defect] | None = None) -> list[Row]:
    """Run the probe of every defect with and without it; None: all `DEFECTS`."""
    return [defect.row() for defect in (DEFECTS if defects is None else defects)]


@cache
def healthy_model() -> MLAMoEForCausalLM:
    """Return the model in which defects are planted: that of the parity case `grouped`."""
    return by_name("grouped").model()


@cache
def healthy() -> Observed:
    """Return the healthy model observed on 64 tokens."""
    size = healthy_model().config.vocab_size
    text = np.random.default_rng(0).integers(0, size, (2, 32))
    return observe(healthy_model(), jnp.asarray(text, jnp.int32))


def _sparse(model: MLAMoEForCausalLM) -> MoE:
    mlp = model.model.layers[SPARSE].mlp
    assert isinstance(mlp, MoE)
    return mlp


def _first() -> Attention:
    return healthy_model().model.layers[0].self_attn


def _changed(
    at: Callable[[MLAMoEForCausalLM], Any], change: Callable[[Any], Any]
) -> Callable[[], MLAMoEForCausalLM]:
    """Return a function that builds the healthy model with one changed part."""
    return lambda: eqx.tree_at(at, healthy_model(), change(at(healthy_model())))


def _router(change: Callable[[Array], Array]) -> Look:
    """Return a probe of the router with changed logits; all other values stay as they were."""

    def look() -> list[Finding]:
        name, intermediates = f"layers.{SPARSE}.router_logits", healthy().intermediates
        changed = replace(
            healthy(), intermediates={**intermediates, name: change(intermediates[name])}
        )
        return router_probe.router_findings(changed)

    return look


def _router_weight(change: Callable[[Array], Array]) -> Look:
    """Return a probe of the router's choices with a changed weight and logits computed from it."""

    def look() -> list[Finding]:
        x, old = healthy().intermediates[f"layers.{SPARSE}.mlp_norm"], _sparse(healthy_model()).gate
        gate = Router(change(old.weight), jnp.zeros_like(old.e_score_correction_bias), old.config)
        logits = gate.logits(x.reshape(-1, x.shape[-1]))
        return router_probe.choice_findings("gate", logits, gate, x)

    return look


def _bfloat16_router() -> list[Finding]:
    x, gate = healthy().intermediates[f"layers.{SPARSE}.mlp_norm"], _sparse(healthy_model()).gate
    flat = x.reshape(-1, x.shape[-1]).astype(jnp.bfloat16)
    return router_probe.choice_findings("gate", flat @ gate.weight.astype(jnp.bfloat16).T, gate, x)


@cache
def _routers() -> list[Finding]:
    return router_probe.router_findings(healthy())


def _starved() -> list[Finding]:
    config = replace(
        healthy_model().config,
        n_routed_experts=256,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=1,
        scoring_func="softmax",
        norm_topk_prob=False,
        routed_scaling_factor=1.0,
    )
    logits = jax.random.normal(jax.random.key(0), (64, 256), jnp.float32)
    return router_probe.signal_findings("gate", router_probe.routing_of(logits, config))


def _narrow_counts(routing: Routing) -> Float[Array, " E"]:
    once = jax.nn.one_hot(routing.chosen.reshape(-1), routing.logits.shape[-1], dtype=jnp.bfloat16)
    return jax.lax.scan(lambda n, one: (n + one, None), jnp.zeros_like(once[0]), once)[0]


def _attention(change: Callable[[Attention], Attention]) -> Look:
    """Return a probe of layer 0's attention, changed, on its original input."""

    def look() -> list[Finding]:
        attention = change(_first())
        x = healthy().intermediates["layers.0.attn_norm"]
        largest = np.asarray(attention_probe.largest_scores(attention, x))
        return [
            attention_probe.score_finding("layers.0.self_attn", largest),
            *attention_probe.rank_findings("layers.0.self_attn", attention),
        ]

    return look


def _weight(name: str, change: Callable[[Array], Array]) -> Callable[[Attention], Attention]:
    """Return a function that changes one weight of attention."""

    def at(a: Attention) -> Any:
        return getattr(a, name).weight

    return lambda a: eqx.tree_at(at, a, change(at(a)))


def _clip(clip: attention_probe.Clip) -> Look:
    def look() -> list[Finding]:
        x, attention = healthy().intermediates["layers.0.attn_norm"], _first()
        return attention_probe.clip_findings("layers.0", attention, x, CLIP_TAU, clip)

    return look


def _clips_the_shared_key(a: Attention, factors: Float[np.ndarray, " H"]) -> Attention:
    clipped = attention_probe.qk_clip(a, factors)
    shared = a.kv_a_proj_with_mqa.weight.at[a.config.kv_lora_rank :].multiply(float(factors[0]))
    return eqx.tree_at(lambda a: a.kv_a_proj_with_mqa.weight, clipped, shared)


class _Reversed(Attention):
    def _absorbed(self, *args: Any) -> Array:
        """Return the heads' outputs in reverse order."""
        return Attention._absorbed(self, *args)[..., ::-1]


def _as(kind: type, module: Any) -> Any:
    """Return a module as an instance of another class with the same fields."""
    other = object.__new__(kind)
    for name in module.__dataclass_fields__:
        object.__setattr__(other, name, getattr(module, name))
    return other


def _absorbed(kind: type[Attention]) -> Look:
    def look() -> list[Finding]:
        x = healthy().intermediates["layers.0.attn_norm"]
        return [attention_probe.absorbed_finding("layers.0", _as(kind, _first()), x)]

    return look


class _Bare(Block):
    def __call__(self, *args: Any, **options: Any) -> Any:
        """Return bare hidden states instead of a BlockOutput."""
        return Block.__call__(self, *args, **options).hidden


class _NarrowSum(Experts):
    def __call__(self, x: Array, routing: Routing) -> Array:
        """Sum expert outputs in the dtype of the hidden states."""
        T, k = routing.chosen.shape
        order = jnp.argsort(routing.chosen.reshape(-1))
        outputs = self.each(x[order // k], counts(routing))
        return jnp.zeros((T, x.shape[1]), x.dtype).at[order // k].add(outputs)


class _NoCast(eqx.Module):
    weight: Array

    def __call__(self, x: Array) -> Array:
        """Rely on the library's dtype promotion."""
        return x @ self.weight.T


@cache
def _bugs(change: Callable[[], MLAMoEForCausalLM]) -> Look:
    return cache(lambda: fixed_bugs.bug_findings(change()))


def _up_proj(model: MLAMoEForCausalLM) -> Any:
    """Return `up_proj` of the dense layer."""
    mlp: Any = model.model.layers[0].mlp
    return mlp.up_proj


def _fp8(scale: float) -> Look:
    planted = _changed(lambda m: _up_proj(m).weight, lambda w: w * scale)
    return lambda: policy_findings(planted(), FP8)


_three_favoured = _router(lambda x: jnp.concatenate([x[:, :3] + 9, x[:, 3:] * 0.0 - 9], 1))
_ROUTER: tuple[tuple[str, str, Look], ...] = (
    ("logit_weight_error", "router logits x 40", _router(lambda x: x * 40)),
    ("z_loss", "router logits x 40", _router(lambda x: x * 40)),
    ("logits_in_float32", "router in bfloat16", _router(lambda x: x.astype(jnp.bfloat16))),
    ("flips", "router's product in bfloat16", _bfloat16_router),
    ("boundary_ties", "experts that differ by 1e-4", _router_weight(lambda w: w[:1] + 1e-4 * w)),
    ("exact_ties", "every expert the same", _router_weight(lambda w: 0 * w + w[:1])),
    ("load_max_over_mean", "one expert favoured", _three_favoured),
    ("dead_experts", "an expert nobody chooses", _router(lambda x: x.at[:, 0].set(-20.0))),
    ("load_entropy", "three experts get everything", _three_favoured),
    ("routed_weight", "1 of 256 experts, softmax, not normalised", _starved),
    ("tokens_per_expert", "1 of 256 experts for 64 tokens", _starved),
    (
        "bias_reached",
        "selection bias in bfloat16",
        lambda: [router_probe.bias_finding("gate", jnp.bfloat16)],
    ),
    (
        "counts_are_integers",
        "counts in bfloat16",
        lambda: [router_probe.count_finding(_narrow_counts)],
    ),
)
"""(metric, planted defect, probe of the defective model); `_routers` probes the healthy one."""
_BUGS = (
    (
        "1_adapter_dimensions",
        "shared expert's up_proj twice as wide",
        _changed(
            lambda m: _sparse(m).shared_experts.up_proj.weight, lambda w: jnp.concatenate([w] * 2)
        ),
    ),
    (
        "2_block_returns",
        "a block returns a bare array",
        _changed(lambda m: m.model.layers[SPARSE], lambda block: _as(_Bare, block)),
    ),
    (
        "3_expert_shape",
        "experts end four times as wide",
        _changed(
            lambda m: _sparse(m).experts.down_proj.weight,
            lambda w: jnp.concatenate([w] * 4, axis=1),
        ),
    ),
    (
        "4_scatter_dtype",
        "outputs added up in bfloat16",
        _changed(lambda m: _sparse(m).experts, lambda experts: _as(_NarrowSum, experts)),
    ),
    (
        "5_fp8_promotion",
        "a float8 weight meets bfloat16 uncast",
        _changed(_up_proj, lambda linear: _NoCast(linear.weight)),
    ),
)
"""(metric, planted defect, function that builds the model with it); `healthy_model` is healthy."""
_attention_as_it_is = _attention(lambda a: a)
DEFECTS = (
    *(Defect(metric, what, _routers, planted) for metric, what, planted in _ROUTER),
    Defect(
        "largest_logit",
        "queries x 100",
        _attention_as_it_is,
        _attention(_weight("q_b_proj", lambda w: w * 100.0)),
    ),
    Defect(
        "clip_error",
        "the shared rotary key is clipped",
        _clip(attention_probe.qk_clip),
        _clip(_clips_the_shared_key),
    ),
    Defect(
        "effective_rank",
        "keys and values compressed to one direction",
        _attention_as_it_is,
        _attention(_weight("kv_a_proj_with_mqa", lambda w: jnp.broadcast_to(w[:1], w.shape))),
    ),
    Defect(
        "amplification",
        "one direction of the latent x 100",
        _attention_as_it_is,
        _attention(_weight("kv_b_proj", lambda w: w.at[:, 0].multiply(100.0))),
    ),
    Defect(
        "absorbed_error",
        "values in reverse where absorbed",
        _absorbed(Attention),
        _absorbed(_Reversed),
    ),
    *(Defect(metric, what, _bugs(healthy_model), _bugs(change)) for metric, what, change in _BUGS),
    Defect("relative_rms", "weights x 0.01, without a scale", _fp8(1.0), _fp8(0.01)),
)


def document(rows: Iterable[Row], examined: Examination | None = None) -> Document:
    """Return the document of planted defects.

    Args:
        rows: results of the defects.
        examined: probes of a healthy model, of whose findings the document has the numbers by
            severity; None leaves them out.
    """
    entries: list[Document] = [
        {
            "metric": r.defect.metric,
            "probe": r.planted.probe,
            "what": r.defect.what,
            "healthy": r.healthy.value,
            "planted": r.planted.value,
            "threshold": r.planted.threshold,
            "severity": r.planted.severity.value,
            "caught": r.caught,
        }
        for r in rows
    ]
    content: Document = {"defects": entries, "versions": versions()}
    if examined is not None:
        severities = [f.severity.value for f in examined.findings]
        counted = {s: severities.count(s) for s in dict.fromkeys(severities)}
        content["examined"] = {"what": examined.what, "findings": counted}
    return content


def table(content: Mapping[str, Any]) -> str:
    """Return the table of planted defects in Markdown."""
    rows = (
        (
            d["metric"],
            d["what"],
            *(f"{d[name]:.3g}" for name in ("healthy", "planted", "threshold")),
            d["severity"] if d["caught"] else "NO",
        )
        for d in content["defects"]
    )
    return markdown(("metric", "planted", "healthy", "with it", "threshold", "caught"), rows)
