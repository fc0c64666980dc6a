"""Agreement of a checkpoint's log-probabilities with themselves: in a batch, and token by token.

Training computes whole texts in batches; serving computes one token at a time, of few texts. The
two add in different orders, so only rounding may differ. The measured error of the same
log-probabilities against float64 says how much rounding changes here. Source: docs/stability.md
"Agreement with itself".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from megalodon_jax.inference import decode_step
from megalodon_jax.model import MegalodonForCausalLM
from megalodon_jax.types import init_cache
from megalodon_jax.weights import build_model, named_leaves
from parity.engine.measure.measurement import Kind
from parity.engine.programs.yardstick import RUN_ONCE, known_options
from parity.megalodon.edges import MegalodonEdge
from parity.self_agreement import batch_agreement, change_of, stream_agreement
from parity.tasks import LanguageModel, TaskError
from parity.tolerances import rule
from stability.core.findings import Finding, Severity, judge

PROBE = "agreement"
BATCH, STREAM = "a row in a batch", "a text token by token"
"""Subjects of the findings."""
ROWS, LENGTH = 4, 160
"""Number of texts, and tokens per text: more than a chunk of the committed checkpoint, so that a
state passes from chunk to chunk."""
SOURCE = 'docs/stability.md "Agreement with itself"'


def findings(model: MegalodonForCausalLM, ids: np.ndarray) -> list[Finding]:
    """Return two findings with the largest change of a log-probability, in nats.

    The first compares a batch with each of its rows alone, the second whole texts with the same
    texts token by token. The change is the largest over all positions and all tokens of the
    vocabulary, except tokens that both computations give a probability below 0.001.

    A change is an ERROR if it cannot be measured, such as NaN, or is beyond the limit: 2 times the
    model's largest error of a log-probability against float64, times the multiple of the noise
    floor (`noise_factor`) that is the tolerance of float32 logits.

    Args:
        model: the model.
        ids: token ids (B, L) int32 of B >= 2 different rows.
    """
    ours = LanguageModel("the checkpoint", _whole(model))
    known = rule(MegalodonEdge.JAX32_ORACLE, Kind.LOGITS)
    assert known is not None and known.noise_factor is not None
    try:
        wide = replace(ours, logits=_wide(model))
        # The smaller error of batch and single rows: an error that only batches have must not raise
        # its own limit.
        own = min(change_of(wide, each, ids).largest for each in (ours, _row_by_row(ours)))
        found = {
            BATCH: batch_agreement(ours, ids)[0],
            STREAM: stream_agreement(ours, ids, _stepwise(model)),
        }
    except TaskError as error:
        return [_finding(subject, math.nan, math.nan, str(error)) for subject in (BATCH, STREAM)]
    if not math.isfinite(own):
        reason = f"not measured: the error of the model's own log-probabilities is {own} nats"
        return [_finding(subject, math.nan, math.nan, reason) for subject in found]
    bound = 2 * known.noise_factor * own
    return [
        _finding(subject, each.largest, bound, each.text().partition(": ")[2].replace("\n", ";"))
        for subject, each in found.items()
    ]


def _finding(subject: str, value: float, bound: float, message: str) -> Finding:
    return judge(
        PROBE,
        subject,
        "largest_change_nats",
        value,
        bound,
        SOURCE,
        message,
        "look for a scale that rows of a batch share, or a state that is lost between two calls",
        severity=Severity.ERROR,
    )


def _whole(model: MegalodonForCausalLM) -> Callable[[np.ndarray], np.ndarray]:
    run = eqx.filter_jit(lambda model, ids: model(ids)[0])
    return lambda ids: np.asarray(run(model, jnp.asarray(ids)))


def _row_by_row(model: LanguageModel) -> LanguageModel:
    def logits(ids: np.ndarray) -> np.ndarray:
        return np.concatenate([model.logits(ids[n : n + 1]) for n in range(len(ids))])

    return replace(model, logits=logits)


def _wide(model: MegalodonForCausalLM) -> Callable[[np.ndarray], np.ndarray]:
    stored = {name: np.asarray(leaf) for name, leaf in named_leaves(model).items()}
    options: Any = {"compiler_options": known_options(RUN_ONCE)}
    run = eqx.filter_jit(lambda model, ids: model(ids)[0], **options)

    def logits(ids: np.ndarray) -> np.ndarray:
        with jax.enable_x64(True):
            wide = build_model(model.config.with_dtype("float64"), stored, source="float64")
            return np.asarray(run(wide, jnp.asarray(ids)))

    return logits


def _stepwise(model: MegalodonForCausalLM) -> Callable[[np.ndarray], np.ndarray]:
    def logits(ids: np.ndarray) -> np.ndarray:
        cache, found = init_cache(model.config, len(ids)), []
        for token in jnp.asarray(ids).T:
            step, cache = decode_step(model, cache, token)
            found.append(np.asarray(step))
        return np.stack(found, axis=1)

    return logits
