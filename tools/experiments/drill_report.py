"""Document of a training drill: its numbers as JSON data, and a conclusion in sentences.

`stability/data/drill.json` is the committed drill of the byte-level model, a document that pages
show (`stability.core.documents`). Every sentence of the conclusion is derived from the numbers.
Source: docs/stability.md "Training drill".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from stability.core.documents import SCHEMA, versions
from stability.storage.ema_pole_findings import QUANTILES
from stability.storage.remedies import ENOUGH
from stability.storage.survival import FROZEN_SHARE
from tools.experiments.drill import DrillResult, Plan
from tools.experiments.train import text_identity

SAME_LOSS = 0.005
"""Largest relative difference in held-out loss from float32 at which losses count as equal. Other
seeds change float32's own loss by up to 3 % (2.334, 2.404 and 2.384 with seeds 0, 1 and 2)."""


def document(plan: Plan, outcomes: Sequence[DrillResult]) -> dict[str, Any]:
    """Return a drill as JSON data: plan, provenance, one entry per variant, conclusion.

    Numbers that are not finite become None. Losses are in nats per byte, memory in steps.
    """
    entries = [_entry(outcome) for outcome in outcomes]
    return {
        "schema": SCHEMA,
        "plan": asdict(plan),
        **text_identity(),
        "versions": versions(),
        "quantiles": list(QUANTILES),
        "variants": entries,
        "conclusion": conclusion(entries),
    }


def conclusion(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the conclusion, one sentence per comparison with float32.

    If no float32 run (control) is finite, a single sentence says that nothing can be compared.

    Args:
        entries: variants as stored by `document`.
    """
    finite = [e for e in entries if _finite(e)]
    control = next((e for e in finite if e["kind"] == "control"), None)
    if control is None:
        return ["Nothing can be compared: no float32 run stays finite."]
    sentences = [
        f"In float32 the held-out loss is {control['held_out']:.3f} nats per byte; "
        f"{_norms(control)}."
    ]
    for e in finite:
        if e["kind"] == "amp":
            sentences.append(f"{e['name']} ({e['what']}): {_gap(e, control)}; {_norms(e)}.")
        if e["kind"] == "blanket":
            sentences.append(_blanket(e, control))
    sentences += _remedies([e for e in finite if e["kind"] == "remedy"], control)
    return sentences + [
        f"{e['name']} does not stay finite and is not compared." for e in entries if e not in finite
    ]


def _finite(entry: Mapping[str, Any]) -> bool:
    parts = [entry[part] for part in ("norms", "poles", "whole")]
    numbers = [entry["held_out"], *(v for part in parts for v in part.values())]
    return all(v is not None for v in numbers)


def _blanket(entry: Mapping[str, Any], control: Mapping[str, Any]) -> str:
    return (
        f"{entry['name']}: {_norms(entry)}, {entry['poles']['frozen']:.0%} of the EMA's logits are "
        f"frozen, {entry['whole']['fidelity']:.0%} of the intended displacement is applied; "
        f"{_gap(entry, control)}."
    )


def _remedies(remedies: Sequence[Mapping[str, Any]], control: Mapping[str, Any]) -> list[str]:
    def works(e: Mapping[str, Any]) -> bool:
        thawed = e["norms"]["frozen"] <= FROZEN_SHARE and e["poles"]["frozen"] <= FROZEN_SHARE
        return thawed and abs(e["whole"]["fidelity"] - 1.0) <= ENOUGH

    good = sorted((e for e in remedies if works(e)), key=lambda e: e["bytes"])
    sentences = [
        f"{e['name']} works at {e['bytes']:.0f} bytes per parameter: "
        f"{e['whole']['fidelity']:.0%} of the updates is applied; {_gap(e, control)}."
        for e in good
    ]
    if remedies and not good:
        sentences.append(f"No remedy applies the updates to within {ENOUGH:.0%}.")
    return sentences + [
        f"{e['name']} is not enough: {_norms(e)}, but {e['whole']['fidelity']:.0%} of the updates "
        f"is applied; {_gap(e, control)}."
        for e in remedies
        if e not in good
    ]


def _gap(entry: Mapping[str, Any], control: Mapping[str, Any]) -> str:
    gap = entry["held_out"] - control["held_out"]
    if abs(gap) <= SAME_LOSS * control["held_out"]:
        return f"its loss equals float32's within {SAME_LOSS:.1%}"
    return f"its loss is {abs(gap):.3f} nats {'above' if gap > 0 else 'below'} float32's"


def _norms(entry: Mapping[str, Any]) -> str:
    return f"{entry['norms']['frozen']:.0%} of the norm weights that start at 1 are frozen"


def _entry(outcome: DrillResult) -> dict[str, Any]:
    variant = outcome.variant
    start, end = outcome.memory
    return {
        "name": variant.name,
        "what": variant.what,
        "kind": variant.kind,
        "bytes": _plain(outcome.bytes),
        "held_out": _plain(outcome.held_out),
        **{
            part: {k: _plain(v) for k, v in asdict(getattr(outcome, part)).items()}
            for part in ("norms", "poles", "whole")
        },
        "loss": _curve(outcome.loss),
        "norm_drift": _curve(outcome.norm_drift),
        "pole_drift": _curve(outcome.pole_drift),
        "memory": {"start": [_plain(v) for v in start], "end": [_plain(v) for v in end]},
    }


def _curve(points: Sequence[tuple[int, float]]) -> list[list[Any]]:
    return [[step, _plain(value)] for step, value in points]


def _plain(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None
