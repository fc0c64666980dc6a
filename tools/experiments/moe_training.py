"""Short training runs of MLA + MoE with an injected instability, to test the guard's response.

The injection multiplies the learning rate after some normal steps, and switches the router's z-loss
off. The controls are the same run without a guard, and a run without the injection. Source:
docs/mla-moe.md "The stability guide", docs/mla-moe.md "Recovery".
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from megalodon_jax.optimiser import optimiser_update
from parity.deepseek_v3.model import MLAMoEForCausalLM
from stability.core.byte_text import read_text, spread_windows, windows
from stability.core.documents import markdown
from stability.moe.fit import ROUTER, folder_of
from stability.moe.options import TINY_LM
from stability.recovery.guard import GuardConfig, GuardState, Verdict, guard
from stability.recovery.rollback import Event, RecoveryConfig, guarded_run

KINDS = ("skip", "clip", "rollback", "cut", "stop")
"""Kinds of the guard's events whose numbers the document has."""


@dataclass(frozen=True)
class Preset:
    """Training settings that decide how stable a run is."""

    lr: float = 6e-2
    """Learning rate after warmup."""
    warmup: int = 20
    """Steps of linear warmup."""
    max_norm: float = 1.0
    """Global norm to which gradients are clipped."""
    router_z_loss_coef: float = 1e-3
    """Weight of the router's z-loss in the objective."""
    activation_limit: float | None = None
    """Magnitude to which hidden states are clipped; None: no clipping."""


NORMAL = Preset()
EMERGENCY = Preset(2e-2, 60, 0.5, 1e-4, activation_limit=100.0)
"""The guide's emergency settings: a third of the rate, longer warmup, tighter clipping, a tenth of
the z-loss, clipped activations."""


@dataclass(frozen=True)
class Plan:
    """Settings of the experiment; equal plans give equal runs on one machine.

    Raises:
        ValueError: the injection is not within the run.
    """

    steps: int = 280
    """Number of optimiser steps."""
    injected_at: int = 120
    """Number of the first batch with the injection."""
    lr_factor: float = 10.0
    """Factor on updates from the injection on, where the z-loss coefficient becomes 0; 1: no
    injection."""
    batch_size: int = 16
    length: int = 64
    """Tokens per row."""
    seed: int = 0
    """Seed of weights and batches."""

    def __post_init__(self) -> None:
        if not 0 < self.injected_at < self.steps:
            raise ValueError(
                f"Plan: injected_at={self.injected_at} must lie between 0 and steps={self.steps}."
            )


@dataclass
class TrainingResult:
    """Results of one training run."""

    name: str
    what: str
    """Description of the variant."""
    loss: list[tuple[int, float]] = field(default_factory=list)
    """(batch number, training loss in nats per byte), including skipped steps."""
    router_z: list[tuple[int, float]] = field(default_factory=list)
    """(batch number, router's z-loss), which is not part of `loss`."""
    held_out: float = math.nan
    """Final loss on held-out text, in nats per byte."""
    events: list[Event] = field(default_factory=list)
    """Decisions of the guard; empty without a guard."""
    rate: float = 1.0
    """Factor on the learning rate after all cuts by the guard."""
    ended: str = ""
    """Why the run ended before its last step, as text; empty if it reached that step."""


def run(
    plan: Plan = Plan(), say: Callable[[str], None] = lambda line: None
) -> list[TrainingResult]:
    """Train the four variants of the experiment and return their results.

    They are: without the injection, with it and no guard, with a guard, and with a guard and the
    emergency settings.

    Args:
        plan: settings of the experiment.
        say: called with a line of progress text after each variant.

    Raises:
        RecoveryFailedError: the guard could not finish a run.
    """
    quiet = replace(plan, lr_factor=1.0)
    variants: tuple[tuple[str, str, Plan, Preset, bool], ...] = (
        ("healthy", "nothing is injected", quiet, NORMAL, True),
        ("broken", "no z-loss and lr x 10, no guard", plan, NORMAL, False),
        ("guarded", "the same, under the guard", plan, NORMAL, True),
        ("emergency", "the same, emergency preset and guard", plan, EMERGENCY, True),
    )
    outcomes = []
    for name, what, its_plan, preset, guarded in variants:
        outcome = train(name, what, its_plan, preset, guarded=guarded)
        ended = f"; {outcome.ended}" if outcome.ended else ""
        say(f"  {name}: held-out loss {outcome.held_out:.3f}, lr x {outcome.rate:g}{ended}")
        outcomes.append(outcome)
    return outcomes


def train(
    name: str, what: str, plan: Plan, preset: Preset, *, guarded: bool = True
) -> TrainingResult:
    """Train one variant of the experiment.

    Without a guard the run ends at its first non-finite step: all later steps would be NaN too.

    Args:
        name, what: name and description of the variant, for the result.
        plan: settings of the experiment.
        preset: training settings.
        guarded: whether spikes are skipped and bad steps rolled back.

    Raises:
        RecoveryFailedError: the guard could not finish the run.
    """
    outcome = TrainingResult(name, what)
    text, held_out = read_text()
    careless = GuardConfig(deviations=1e9, patience=10**6, max_norm=preset.max_norm)
    watch = GuardConfig(window=32, max_norm=preset.max_norm) if guarded else careless
    warm = optax.linear_schedule(0.0, preset.lr, preset.warmup)
    transform = guard(optax.adam(warm), watch, auxiliary=ROUTER)
    config = replace(TINY_LM, activation_limit=preset.activation_limit)
    model = eqx.filter_jit(MLAMoEForCausalLM)(config, key=jax.random.key(plan.seed))

    def data(number: int) -> tuple[jax.Array, ...]:
        rng = np.random.default_rng((plan.seed, number))
        ids = windows(text, rng.integers(0, len(text) - plan.length, plan.batch_size), plan.length)
        broken = number >= plan.injected_at and plan.lr_factor != 1.0
        coefficient = 0.0 if broken else preset.router_z_loss_coef
        factor = plan.lr_factor if broken else 1.0
        return ids, jnp.float32(factor), jnp.float32(coefficient), jnp.int32(number)

    compiled = _step(transform)

    def step(model: Any, state: GuardState, batch: Any) -> tuple[Any, GuardState]:
        model, state = compiled(model, state, batch)
        number, report = int(batch[3]), jax.device_get(state.report)
        outcome.loss.append((number, float(report.loss)))
        outcome.router_z.append((number, float(report.auxiliary[ROUTER[0]])))
        return model, state

    def held_out_loss(model: Any) -> TrainingResult:
        outcome.held_out = float(_loss(model, spread_windows(held_out, 32, plan.length)))
        return outcome

    state: Any = transform.init(eqx.filter(model, eqx.is_array))
    if not guarded:
        for number in range(plan.steps):
            model, state = step(model, state, data(number))
            report = jax.device_get(state.report)
            if int(report.verdict) in (Verdict.SKIPPED_LOSS, Verdict.SKIPPED_GRADIENT):
                loss, norm = float(report.loss), float(report.norm)
                outcome.ended = (
                    f"at batch {number} the loss is {loss:g}, its gradient norm {norm:g}"
                )
                break
        return held_out_loss(model)
    with tempfile.TemporaryDirectory() as folder:
        result = guarded_run(
            step,
            model,
            state,
            data,
            steps=plan.steps,
            folder=Path(folder),
            guard_config=watch,
            config=RecoveryConfig(save_every=20, horizon=60, max_cuts=8),
            store=folder_of(Path(folder), model),
        )
    outcome.events, outcome.rate = result.events, result.rate
    return held_out_loss(result.model)


def document(plan: Plan, outcomes: list[TrainingResult]) -> dict[str, Any]:
    """Return the document of an experiment, for JSON; non-finite numbers become None."""
    return {
        "plan": asdict(plan),
        "presets": {"normal": asdict(NORMAL), "emergency": asdict(EMERGENCY)},
        "variants": [
            {
                "name": o.name,
                "what": o.what,
                "held_out": _plain(o.held_out),
                "rate": o.rate,
                "ended": o.ended,
                "events": {k: sum(e.kind == k for e in o.events) for k in KINDS},
                "loss": [[n, _plain(x)] for n, x in o.loss],
                "router_z": [[n, _plain(x)] for n, x in o.router_z],
            }
            for o in outcomes
        ],
    }


def _step(transform: optax.GradientTransformationExtraArgs) -> Callable[..., Any]:
    @eqx.filter_jit
    def step(model: MLAMoEForCausalLM, state: Any, batch: Any) -> Any:
        ids, factor, coefficient, _ = batch

        def total(model: MLAMoEForCausalLM) -> tuple[jax.Array, Any]:
            loss, router = model.losses(ids)
            return loss + coefficient * router[ROUTER[0]], (loss, router)

        gradients, (loss, router) = eqx.filter_grad(total, has_aux=True)(model)
        params = eqx.filter(model, eqx.is_array)
        losses = {"value": loss, "auxiliary": router}
        moves, state = optimiser_update(transform, gradients, state, params, **losses)
        moves = jax.tree.map(lambda u: u * factor, moves)
        return eqx.apply_updates(model, moves), state

    return step


@eqx.filter_jit
def _loss(model: MLAMoEForCausalLM, ids: jax.Array) -> jax.Array:
    return model.losses(ids)[0]


def _plain(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None


def table(content: Mapping[str, Any]) -> str:
    """Return the table of training runs in Markdown."""
    after, rows = content["plan"]["injected_at"], []
    for v in content["variants"]:
        worst = max((x for n, x in v["loss"] if n >= after and x is not None), default=None)
        losses = ("not finite" if x is None else f"{x:.3f}" for x in (v["held_out"], worst))
        counts = (str(v["events"][kind]) for kind in ("skip", "rollback"))
        # Documents of older versions have no key `ended`.
        ended = f"; ended early: {v['ended']}" if v.get("ended") else ""
        rows.append((v["name"], v["what"] + ended, *losses, *counts, f"{v['rate']:g}"))
    columns = ("run", "what", "held-out loss", "worst loss", "skips", "rollbacks", "lr left")
    return markdown(columns, rows)
