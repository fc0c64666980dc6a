"""Finds the call, the stage and the source lines at which a cached stream first goes wrong.

The oracle has no cache. Its intermediates of the whole text, cut where the calls begin and end, are
the values that each call should compute. Source: docs/parity.md "From a stage to a line".
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from megalodon_jax.types import reserve_cache
from parity.engine.measure.metrics import relative_l2
from parity.engine.programs.source_lines import Line
from parity.engine.programs.unseen import SAME, Seen, search
from parity.megalodon import oracle, oracle_operations
from parity.megalodon.cases import NEW_TOKENS, Case
from parity.megalodon.intermediates import stages
from parity.megalodon.lines import ORACLE, mark_of, step_of, steps_if_right, trimmed
from parity.megalodon.runner import JaxSubject
from parity.sides.jax_leaves import arrays_of
from parity.sides.traced import Traced, trace

CALLS = 2
"""Number of calls traced: the first one whose logits are wrong, and the call before it, which wrote
the cache that the wrong call reads."""


@dataclass(frozen=True)
class Start:
    """Call, stage and tokens at which a stream first differs from the oracle."""

    call: int
    """Index of the call in the stream, from 0."""
    tokens: tuple[int, int]
    """Index of the first token of the call, and of the first token after the call."""
    stage: str
    """First stage of the call that is wrong although it is computed from the oracle's values of all
    earlier stages."""
    lines: tuple[Line, ...]
    """Source lines that make the stage wrong, the most likely first; empty if none was found."""

    def describe(self) -> str:
        """Return a sentence that names the call and the stage."""
        first, end = self.tokens
        which = f"token {first}" if end == first + 1 else f"tokens {first} to {end - 1}"
        text = (
            f"In call {self.call + 1} ({which}) stage {self.stage} is the first that is wrong, "
            "although every stage before it was given the oracle's values."
        )
        if not self.call:
            return text
        return f"{text} The error is in that stage, or in the cache that call {self.call} wrote."


def start(case: Case) -> Start | None:
    """Return where a stream goes wrong; None if every stage is right when fed the oracle's values.

    Only the last `CALLS` calls up to the first wrong logits are examined.

    Args:
        case: a cached stream whose rows are not padded and hold one text each.
    """
    exact, subject, ends = _exact(case), JaxSubject("float64"), np.cumsum(case.cuts)
    cuts = [slice(end - count, end) for end, count in zip(ends, case.cuts, strict=True)]
    with subject.types(), jax.default_matmul_precision("highest"):
        last, caches = _free(case, subject, cuts, exact["logits"])
        calls = range(max(0, last + 1 - CALLS), last + 1)
        program, arrays = _program(case, subject, [cuts[i] for i in calls], caches[calls.start])
        forced = {
            mark_of(name, case.config.num_layers, i - calls.start): x[:, cuts[i]]
            for i in calls
            for name, x in exact.items()
        }
        marks, _ = program.evaluate(arrays, forced)
        for i in calls:
            for name in stages(case.config):
                mark = mark_of(name, case.config.num_layers, i - calls.start)
                if not relative_l2(np.asarray(marks[mark]), forced[mark]) <= SAME:
                    tokens = int(cuts[i].start), int(cuts[i].stop)
                    return Start(i, tokens, name, _lines(case, program, arrays, mark, name, forced))
    return None


def _exact(case: Case) -> dict[str, np.ndarray]:
    """Return the oracle's intermediates of the whole text, by name.

    Each token attends to the keys that its call would leave visible.
    """
    found: dict[str, np.ndarray] = {}

    def keep(name: str, value: Any) -> Any:
        found[name] = value
        return value

    weights = {name: np.asarray(w, np.float64) for name, w in case.weights.items()}
    oracle.forward(case.config, weights, case.batch.ids, hook=keep, cuts=case.cuts)
    return found


def _call(case: Case, model: Any, ids: Any, cache: Any) -> tuple[Any, Any]:
    """Feed one call of a stream; return its logits and the cache after it."""
    logits, cache = model(ids, cache=cache, return_cache=True)
    if model.config.cache_unbounded:
        cache = reserve_cache(cache, case.length + NEW_TOKENS)
    return logits, cache


def _free(
    case: Case, subject: JaxSubject, cuts: list[slice], exact: np.ndarray
) -> tuple[int, list[Any]]:
    """Return the index of the first call with wrong logits, and a list of caches.

    The list has the cache before each call, at least up to the call with that index. If the logits
    of every call are right, the index is that of the last call. `exact` has the oracle's logits
    (B, L, V).
    """
    model, ids, caches = subject.load(case), jnp.asarray(case.batch.ids), [None]
    call = eqx.filter_jit(partial(_call, case))
    for i, cut in enumerate(cuts):
        logits, cache = call(model, ids[:, cut], caches[-1])
        if not relative_l2(np.asarray(logits), exact[:, cut]) <= SAME:
            return i, caches
        caches.append(cache)
    return len(cuts) - 1, caches


def _program(
    case: Case, subject: JaxSubject, cuts: list[slice], cache: Any
) -> tuple[Traced, list[Any]]:
    """Return one traced program that makes consecutive calls, and its arguments."""
    begin = cuts[0].start
    params, static = eqx.partition(subject.load(case), eqx.is_array)

    def logits(params: Any, ids: Any, cache: Any) -> Any:
        whole, pieces = eqx.combine(params, static), []
        for cut in cuts:
            piece, cache = _call(case, whole, ids[:, cut.start - begin : cut.stop - begin], cache)
            pieces.append(piece)
        return jnp.concatenate(pieces, axis=1)

    trees = params, ((jnp.asarray(case.batch.ids)[:, begin : cuts[-1].stop], cache), {})
    return trace(logits, trees), arrays_of(trees)


def _lines(
    case: Case, program: Traced, arrays: list[Any], mark: str, stage: str, forced: dict[str, Any]
) -> tuple[Line, ...]:
    operations, values = program.operations_of(arrays, mark, forced)
    if not operations:
        return ()
    own = {i: trimmed(operation) for i, operation in operations.items()}
    seen = Seen(oracle_operations.results(case, stage))
    # Correct results of a line in other layers or calls do not clear it: a line that makes a wrong
    # mask is right wherever nothing needs masking.
    found = search(own, values, seen, ORACLE)
    if found.first is None or found.first.mask:
        return tuple(found.lines())
    # Operations that the stage also has without a cache, and is right with, are not to blame.
    cleared = steps_if_right(replace(case, cuts=()), stage)
    left = tuple(s for s in found.suspects if step_of(own[s.index]) not in cleared)
    return tuple(replace(found, suspects=left or found.suspects).lines())
