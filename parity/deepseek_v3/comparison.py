"""Comparison of the JAX model with Transformers' DeepSeek-V3, as any user's port.

Transformers runs in float32, and in float64 with its internal casts to float32 disabled. Where
Transformers is not installed, committed recordings of its results are used. Source: docs/mla-moe.md
"Parity"; `parity.port`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from megalodon_jax.weights import named_leaves
from parity.deepseek_v3 import SUBJECT, reference
from parity.deepseek_v3.cases import BUFFER, CASES, TINY, Case, by_name
from parity.deepseek_v3.config import MLAMoEConfig
from parity.deepseek_v3.model import MLAMoEForCausalLM
from parity.deepseek_v3.recordings import OF_LOSS, Recorded, answer, live, named, recorded
from parity.deepseek_v3.router import choose, scores_of
from parity.engine.measure.bounds import NoiseFloors
from parity.engine.measure.compare import Comparison, Work
from parity.engine.measure.measurement import Measurement
from parity.engine.measure.quantity import Quantity
from parity.pooling import DRAWS, Draw, Pool, digest_of, pool
from parity.port import Port, Report
from parity.port import compare as compare_port
from parity.port_tolerances import PORTS, PortEdge
from parity.sides import FunctionSide
from parity.sides.side import OUTPUT, Precision, Run

__all__ = [
    "CASES",
    "SUBJECT",
    "TINY",
    "Case",
    "Found",
    "Recorded",
    "answer",
    "by_name",
    "chosen",
    "compare",
    "expert_flips",
    "forward",
    "live",
    "pooled",
    "recorded",
    "side",
    "traced",
]


@dataclass(frozen=True)
class Found:
    """Result of comparing the JAX model with Transformers on a case."""

    case: Case
    report: Report
    """Report of `parity.port.compare`."""
    measurements: tuple[Measurement, ...]
    """Measurements of `report`, and measurements of how many tokens Transformers routes to other
    experts."""

    @property
    def gates(self) -> tuple[Measurement, ...]:
        """All measurements that are not for information only."""
        return tuple(m for m in self.measurements if m.verdict != "info")

    @property
    def broken(self) -> tuple[Measurement, ...]:
        """Gates that fail or are not comparable."""
        return tuple(m for m in self.gates if m.verdict != "pass")

    @property
    def held(self) -> int:
        """Number of gates that pass."""
        return len(self.gates) - len(self.broken)

    def worst(self, quantity: str, *edges: str) -> float:
        """Return the relative L2 error of a quantity on one of the given edges.

        If it was measured on several of them, the edge that comes first in `measurements` counts.

        Raises:
            StopIteration: the quantity was measured on none of these edges.
        """
        return next(
            m.value
            for m in self.measurements
            if m.edge in edges and (m.quantity, m.metric) == (quantity, "rel_l2")
        )


def forward(model: MLAMoEForCausalLM, ids: Any, positions: Any) -> jax.Array:
    """Return the mean next-token loss; logits and intermediates are named with `checkpoint_name`.

    Arguments are those of `traced`.
    """
    return model.losses(ids, positions)[0]


def traced(model: MLAMoEForCausalLM, ids: Any, positions: Any) -> jax.Array:
    """Return the mean next-token loss, and compute its gradients by all parameters.

    Logits, intermediates and gradients are named with `checkpoint_name`.

    Args:
        model: the JAX model.
        ids: token ids (B, L).
        positions: position of each token, (B, L) float32. They are an input, so that the noise
            floor includes the rounding of rotation angles.
    """

    value, gradients = eqx.filter_value_and_grad(forward)(model, ids, positions)
    for name, gradient in named_leaves(gradients).items():
        if not name.endswith(BUFFER):
            checkpoint_name(gradient, Quantity.gradient(name))
    return value


def side(case: Case, model: MLAMoEForCausalLM | None = None) -> FunctionSide:
    """Return the JAX model on a case as a side for `parity.port`.

    The side caches its compiled programs.

    Args:
        case: configuration, weights and inputs.
        model: model to use in place of the case's, for example with a planted defect; None: the
            case's model.
    """
    return FunctionSide(forward, case.model() if model is None else model, *_inputs(case))


def compare(
    case: Case,
    answer: Recorded,
    ours: FunctionSide | None = None,
    *,
    gradients: bool = True,
    device: str = "cpu",
) -> Found:
    """Compare the JAX model with Transformers' results of a case; return a `Found`.

    Args:
        case: configuration, weights and inputs.
        answer: Transformers' results, from `answer`, `live` or `recorded`.
        ours: the JAX model as a side, a result of `side`, to reuse its compiled programs or to
            compare another model; None: `side(case)`.
        gradients: also compare gradients, which take most of the time.
        device: device named in the measurements.
    """
    ours = side(case) if ours is None else ours
    found = ours.run()
    work = _work(case, ours, (*found.stages,), gradients)
    port = Port(
        case.title,
        answer.side,
        ours,
        pins=answer.pins,
        gradients=gradients,
        loss=OUTPUT,
        bfloat16=False,
        device=device,
        work=work.hash,
    )
    # `one_thread` imports torch, which takes seconds and which recordings do not need.
    with reference.one_thread() if answer.kind == "live" else nullcontext():
        report = compare_port(port)
    rows = [replace(row, suite=SUBJECT) for row in report.measurements]
    if answer.kind == "recorded":
        rows += _wide(work, ours, answer, device)
    rows += _flips(case, report, found.stages, answer, device)
    return Found(case, report, tuple(rows))


def _work(case: Case, ours: FunctionSide, stages: tuple[str, ...], gradients: bool) -> Work:
    """Return the `Work` of a comparison, whose hash identifies measurements across runs.

    Its hash covers the JAX model's parameters and inputs, and the names of compared quantities.
    """
    trained = [n for n in ours.parameters() if not n.endswith(BUFFER)] if gradients else []
    marks = [name for name in stages if name != OUTPUT]
    order = (*marks, *map(Quantity.gradient, trained), OUTPUT)
    return Work(case.title, digest_of(order, ours.params, ours.arguments[0]), order, suite=SUBJECT)


def _wide(work: Work, ours: FunctionSide, answer: Recorded, device: str) -> list[Measurement]:
    """Compare the JAX model in float64 with the quantities recorded in float64 (`RECORDED64`)."""
    edge = PortEdge.PORT64_ORIGINAL64
    exact = ours.run(Run(Precision.FLOAT64)).stages
    comparison = Comparison(work, edge, NoiseFloors({}, PORTS), edge.dtype, device)
    return comparison.run({name: exact[name] for name in answer.float64}, answer.float64)


def pooled(case: Case, live: bool, device: str = "cpu") -> Pool:
    """Measure each quantity's error in a case, pooled over several random draws of weights and
    token ids; return a `pooling.Pool`.

    Pooled errors are geometric means over `parity.pooling.DRAWS` draws; the first draw is the case
    itself.

    Args:
        case: configuration, and weights and inputs of the first draw.
        live: run Transformers on every draw too. False: the JAX model in float32 is compared with
            itself in float64 only, because recordings exist for the first draw alone.
        device: device named in the measurements.

    Raises:
        ReferenceUnavailableError: `live` is set, but Transformers cannot run here.
    """
    draws = []
    for number in range(DRAWS):
        one = replace(case, draw=number)
        original = None
        if live:
            theirs = reference.side(case.config.to_hf(), one.weights, one.ids)
            with reference.one_thread():
                original = named(theirs.run(Run(cotangents=OF_LOSS)), reference.stages(theirs))
        draws.append(Draw(one.model(), _inputs(one), original))
    return pool(traced, draws, name=case.title, suite=SUBJECT, device=device)


def _inputs(case: Case) -> tuple[jax.Array, jax.Array]:
    """Return token ids (B, L) int32 and positions (B, L) float32."""
    positions = np.broadcast_to(np.arange(case.length, dtype=np.float32), case.ids.shape)
    return jnp.asarray(case.ids), jnp.asarray(positions)


def _flips(
    case: Case, report: Report, ours: Mapping[str, np.ndarray], answer: Recorded, device: str
) -> list[Measurement]:
    """Count per sparse layer the tokens that the two sides route to different experts.

    A token is counted only if rounding of the router logits cannot explain the difference
    (`expert_flips`). The smallest margin over a layer's tokens is measured too, for information.
    """
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
        mine, _ = chosen(ours[name], bias, case.config)
        _, margin = chosen(answer.float32[name], bias, case.config)
        flips = expert_flips(mine, theirs, margin, answer.float32[name], bounds[name])
        rows.append(edge.judged(f"{layer}.chosen", "expert_flips", flips))
        rows.append(edge.fact(f"{layer}.chosen", "smallest_margin", float(margin.min())))
    return rows


def chosen(
    logits: np.ndarray, bias: np.ndarray, config: MLAMoEConfig
) -> tuple[np.ndarray, np.ndarray]:
    """Return the experts (T, k) that the router chooses, and the margins (T,) of the choices.

    Margins are defined in `router.choose`.

    Args:
        logits: router logits (T, E).
        bias: selection bias (E,).
        config: numbers of groups and experts, and the scoring function.
    """
    scores = scores_of(jnp.asarray(logits), config)
    experts, margin = choose(scores + jnp.asarray(bias, scores.dtype), config)
    return np.asarray(experts), np.asarray(margin)


def expert_flips(
    ours: np.ndarray, theirs: np.ndarray, margin: np.ndarray, logits: np.ndarray, bound: float
) -> float:
    """Count tokens whose set of experts differs although their choice has a clear margin.

    A margin is clear above `bound` times the L2 norm of all `logits`: a score changes by at most
    half the L2 norm of the change of its token's logits, so logits whose relative L2 error is
    within `bound` cannot change such a choice.

    Args:
        ours, theirs: experts (T, k) chosen by the two sides, in any order.
        margin: margins (T,) of Transformers' choice (`router.choose`).
        logits: Transformers' router logits (T, E).
        bound: largest allowed relative L2 error of the logits.
    """
    differs = (np.sort(ours, -1) != np.sort(theirs, -1)).any(-1)
    clear = margin > bound * np.linalg.norm(logits)
    return float(np.sum(differs & clear))
