"""Parity with Transformers' DeepSeek-V3, by the engine for any port: five configurations.

The truth is our model in float64; the reference in float64, its casts to float32 lifted, agrees
with it. Where Transformers is not installed, committed recordings of it answer. Source:
docs/mla-moe.md "Parity"; `parity.port`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from megalodon_jax.weights import named_leaves
from parity.deepseek_v3 import reference
from parity.deepseek_v3.cases import BUFFER, CASES, SUBJECT, TINY, Case, by_name
from parity.deepseek_v3.config import MLAMoEConfig
from parity.deepseek_v3.model import MLAMoEForCausalLM
from parity.deepseek_v3.recordings import (
    Answer,
    answer,
    live,
    named,
    recorded,
    without_gradients,
)
from parity.deepseek_v3.router import choose, scores_of
from parity.engine.bounds import NoiseFloors
from parity.engine.compare import Comparison, Work
from parity.engine.measurement import Measurement
from parity.engine.quantity import Quantity
from parity.pooling import DRAWS, Draw, Pool, pool
from parity.port import CheckReport, check
from parity.port_tolerances import PORTS, PortEdge

__all__ = [
    "CASES",
    "SUBJECT",
    "TINY",
    "Answer",
    "Case",
    "Found",
    "answer",
    "by_name",
    "chosen",
    "compare",
    "expert_flips",
    "forward",
    "live",
    "pooled",
    "recorded",
    "traced",
]


@dataclass(frozen=True)
class Found:
    """A compared case."""

    case: Case
    report: CheckReport
    measurements: tuple[Measurement, ...]
    """The engine's, and the gates on chosen experts."""
    answer: Answer

    @property
    def gates(self) -> tuple[Measurement, ...]:
        """Measurements that a tolerance applies to."""
        return tuple(m for m in self.measurements if m.verdict != "info")

    @property
    def broken(self) -> tuple[Measurement, ...]:
        """Gates that do not hold."""
        return tuple(m for m in self.gates if m.verdict != "pass")

    @property
    def held(self) -> int:
        """How many gates hold."""
        return len(self.gates) - len(self.broken)

    def worst(self, edge: str, quantity: str) -> float:
        """Return the relative L2 of a quantity on an edge."""
        return next(
            m.value
            for m in self.measurements
            if (m.edge, m.quantity, m.metric) == (edge, quantity, "rel_l2")
        )


def forward(model: MLAMoEForCausalLM, ids: Any, positions: Any) -> jax.Array:
    """Return the loss; logits and intermediates are marked. Positions as in `traced`."""
    return model.losses(ids, positions)[0]


def traced(model: MLAMoEForCausalLM, ids: Any, positions: Any) -> jax.Array:
    """Return the loss; logits, intermediates and gradients are marked.

    Positions are an input so that what float32 rounds in a rotation's angle is in the noise floor.
    """

    value, gradients = eqx.filter_value_and_grad(forward)(model, ids, positions)
    for name, gradient in named_leaves(gradients).items():
        if not name.endswith(BUFFER):
            checkpoint_name(gradient, Quantity.gradient(name))
    return value


def compare(
    case: Case,
    answer: Answer,
    model: MLAMoEForCausalLM | None = None,
    *,
    gradients: bool = True,
    device: str = "cpu",
) -> Found:
    """Compare our model with what the reference said of a case.

    Args:
        case: the work.
        answer: of the reference.
        model: another model in the place of ours, such as one with a defect.
        gradients: whether they are compared too; they take most of the time.
        device: what measurements call the default device.
    """
    if not gradients:
        narrow, wide = (without_gradients(side) for side in (answer.float32, answer.float64))
        answer = replace(answer, float32=narrow, float64=wide)
    report = check(
        traced if gradients else forward,
        case.model() if model is None else model,
        (jnp.asarray(case.ids), jnp.asarray(_positions(case))),
        answer.float32,
        answer.float64,
        name=case.title,
        suite=SUBJECT,
        device=device,
        forced=False,
    )
    return Found(
        case, report, (*report.measurements, *_flips(case, report, answer, device)), answer
    )


def pooled(case: Case, live: bool, device: str = "cpu") -> Pool:
    """Measure a case over `parity.pooling.DRAWS` draws of weights and text; the first is its own.

    Args:
        case: the work.
        live: whether the reference runs on every draw; recordings hold the first only, and without
            it our own error alone is pooled.
        device: what measurements call the default device.

    Raises:
        ReferenceUnavailableError: the reference cannot run here.
    """
    draws = []
    for number in range(DRAWS):
        one = replace(case, draw=number)
        original = None
        if live:
            original = named(reference.run(case.config.to_hf(), one.weights, one.ids))
        draws.append(
            Draw(one.model(), (jnp.asarray(one.ids), jnp.asarray(_positions(one))), original)
        )
    return pool(traced, draws, name=case.title, suite=SUBJECT, device=device)


def _positions(case: Case) -> np.ndarray:
    return np.broadcast_to(np.arange(case.length, dtype=np.float32), case.ids.shape)


def _flips(case: Case, report: CheckReport, answer: Answer, device: str) -> list[Measurement]:
    """Count tokens that go to other experts although the choice was clear, for each layer."""
    work = Work(case.title, case.hash, (), suite=SUBJECT)
    edge = Comparison(work, PortEdge.PORT32_ORIGINAL32, NoiseFloors({}, PORTS), "int32", device)
    bounds = {
        m.quantity: m.tolerance
        for m in report.measurements
        if m.edge == PortEdge.PORT32_ORIGINAL32 and m.metric == "rel_l2"
    }
    rows = []
    for layer, theirs in answer.chosen.items():
        name = f"{layer}.router_logits"
        bias = case.weights[f"model.{layer}.mlp.gate.{BUFFER}"]
        ours, _ = chosen(report.values[name], bias, case.config)
        _, margin = chosen(answer.float32[name], bias, case.config)
        flips = expert_flips(ours, theirs, margin, answer.float32[name], bounds[name])
        rows.append(edge.judged(f"{layer}.chosen", "expert_flips", flips))
        rows.append(edge.fact(f"{layer}.chosen", "smallest_margin", float(margin.min())))
    return rows


def chosen(
    logits: np.ndarray, bias: np.ndarray, config: MLAMoEConfig
) -> tuple[np.ndarray, np.ndarray]:
    """Return experts (T, k) and margins (T,) of router logits (T, E), as the router takes them."""
    scores = scores_of(jnp.asarray(logits), config)
    experts, margin = choose(scores + jnp.asarray(bias, scores.dtype), config)
    return np.asarray(experts), np.asarray(margin)


def expert_flips(
    ours: np.ndarray, theirs: np.ndarray, margin: np.ndarray, logits: np.ndarray, bound: float
) -> float:
    """Count tokens whose set of experts differs although its margin is clear of the bound.

    A score moves by at most half of what its logit does, so logits within the relative L2 `bound`
    change no choice whose margin is above `bound |logits|`.

    Args:
        ours, theirs: experts (T, k), in any order.
        margin: (T,), of `router.choose`.
        logits: of the reference (T, E).
        bound: relative L2 that passes.
    """
    differs = (np.sort(ours, -1) != np.sort(theirs, -1)).any(-1)
    clear = margin > bound * np.linalg.norm(logits)
    return float(np.sum(differs & clear))
