"""Data of the page of a watched training: headline, curves over steps, and a row per parameter.

A look is one step at which the watch compared the parameters before and after the update.

Pure functions from a run to plain data. Source: docs/training.md "Watch a run while it trains".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from reports.page.svg import Line
from reports.store.runs import Run
from reports.text import count, label, share
from stability.storage.survival import FROZEN_SHARE

SHOWN = 60
"""Largest number of parameters in the table; the largest frozen shares come first."""
LIMIT = 0.01
"""Largest fraction of the training time that a watch should take; above, the page gives advice."""
_NO_LOOK = "no look was made"


def watching(run: Run) -> dict[str, Any]:
    """Return the data of a watched training's page: headline, curves, parameters (rows), facts."""
    document: Mapping[str, Any] = run.manifest.stability.get("watch") or {}
    leaves = list(document.get("leaves") or ())
    steps = list(document.get("steps") or ())
    found = (_row(leaf, steps) for leaf in leaves)
    rows = sorted(found, key=lambda row: (-row["order"], row["since"] or 0, row["name"]))
    measured = [row for row in rows if row["measured"]]
    still = [row for row in rows if row["still"]]
    word, slug, sentence = _headline(document, rows, measured, still)
    remedy = next((f.remedy for f in run.findings if f.remedy), "")
    return {
        "word": word,
        "slug": slug,
        "sentence": sentence,
        "reason": _text(document.get("reason") or "", 400),
        "warned": _text(document.get("warned") or "", 2000),
        "remedy": _text(remedy, 1200) if still else "",
        "frozen": _lines(document, "frozen", 100.0),
        "unchanged": _lines(document, "unchanged", 100.0),
        "update": _lines(document, "update", 0.0),
        "rows": rows[:SHOWN],
        "omitted": max(0, len(rows) - SHOWN),
        "absent": [
            (label(name), label(why, 200))
            for name, why in [
                *((row["name"], row["why"]) for row in rows if not row["measured"]),
                *(document.get("absent") or {}).items(),
            ]
        ],
        "facts": _facts(document),
    }


def _headline(
    document: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    measured: Sequence[Mapping[str, Any]],
    still: Sequence[Mapping[str, Any]],
) -> tuple[str, str, str]:
    patience, total = document.get("patience", 0), document.get("total", 0)
    if still:
        names = ", ".join(row["name"] for row in still[:3])
        more = f" and {len(still) - 3} more" if len(still) > 3 else ""
        verb = "stands still" if len(still) == 1 else "stand still"
        sentence = (
            f"{count(len(still), 'parameter')} of {len(measured)} {verb}: {names}{more}. More than "
            f"half of the elements of each did not change over {patience} looks although updates "
            "were due."
        )
        if since := [row["since"] for row in still if row["since"] is not None]:
            sentence += f" The first since step {min(since):,}."
        return "FROZEN", "regressed", sentence
    if not measured:
        looks = len(document.get("steps") or ())
        sentence = (
            f"Whether parameters stand still is unknown after {count(total, 'step')}: "
            f"{count(looks, 'look')}, but {patience} are needed."
        )
        return "NOT MEASURED", "incomplete", sentence
    known = f"{len(measured)} of {count(len(rows), 'parameter')} were measured"
    if document.get("reason") or len(measured) < len(rows):
        return "SO FAR MOVING", "incomplete", f"No measured parameter stands still; {known}."
    return "MOVING", "pass", f"No parameter stands still: all {len(rows)} were measured."


def _text(text: str, limit: int) -> str:
    """Return a text as a label of at most `limit` characters, without back quotes.

    In a terminal back quotes mark commands.
    """
    return label(text.replace("`", ""), limit)


def _since(leaf: Mapping[str, Any], steps: Sequence[int]) -> int | None:
    """Return the step since which every look found more than half of a parameter's elements frozen.

    A look is a measurement at one of `steps`; looks that did not measure the parameter (`leaf`) are
    skipped. None if the newest look that measured it found half or less.
    """
    first = None
    for step, value in zip(steps, leaf["frozen"], strict=True):
        if value is not None:
            first = (step if first is None else first) if value > FROZEN_SHARE else None
    return first


def _row(leaf: Mapping[str, Any], steps: Sequence[int]) -> dict[str, Any]:
    frozen, error = _last(leaf, "frozen"), leaf.get("error") or 0.0
    still = bool(leaf.get("still"))
    size = math.prod(leaf["shape"])
    whole = leaf["followed"] >= size
    state = "warning" if still else "ok"
    since = _since(leaf, steps) if still else None
    return {
        "name": label(leaf["name"]),
        "family": label(leaf["family"], 40),
        "dtype": label(leaf["dtype"], 24),
        "measured": frozen is not None,
        "still": still,
        "since": since,
        "from_step": "" if since is None else f"{since:,}",
        "state": "note" if frozen is None else state,
        "order": -1.0 if frozen is None else frozen,
        "percent": 0.0 if frozen is None else round(100 * frozen, 1),
        "frozen": "not measured" if frozen is None else share(frozen),
        "error": f"± {100 * error:.1f} %" if error else "",
        "followed": "all" if whole else f"{leaf['followed']:,} of {size:,}",
        "unchanged": share(_last(leaf, "unchanged")),
        "size": _size(_last(leaf, "update")),
        "why": label(leaf.get("why") or (_NO_LOOK if frozen is None else ""), 200),
    }


def _last(leaf: Mapping[str, Any], name: str) -> float | None:
    return next((v for v in reversed(leaf[name]) if v is not None), None)


def _size(value: float | None) -> str:
    return "–" if value is None else f"{value:.1e}"


def _lines(document: Mapping[str, Any], name: str, scale: float) -> list[Line]:
    """Return one curve per family (norms, matrices, ...): the series `name` over optimiser steps.

    Its y values are multiplied by `scale`; if `scale` is 0, they are replaced by their log10.
    """
    steps = document.get("steps") or []
    lines = []
    for i, (family, series) in enumerate((document.get("families") or {}).items()):
        points = [
            (float(step), _height(value, scale))
            for step, value in zip(steps, series[name], strict=True)
        ]
        lines.append(Line(label(family, 24), f"v{i % 9}", points))
    return lines


def _height(value: float | None, scale: float) -> float:
    if value is None:
        return math.nan
    if scale:
        return scale * value
    return math.log10(value) if value > 0 else math.nan


def _facts(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    seconds, cost = document.get("seconds") or 0.0, document.get("cost") or 0.0
    part = cost / seconds if seconds else 0.0
    advice = "" if part <= LIMIT else "; more than 1 %: raise every, to look less often"
    skipped = document.get("skipped", 0)
    facts = [
        ("training", f"{document.get('framework', '')}, {document.get('total', 0):,} steps"),
        (
            "looks",
            f"{len(document.get('steps') or ()):,} kept, one every {document.get('every')} steps",
        ),
        ("cost of the watch", f"{100 * part:.2f} % of {seconds:,.0f} s{advice}"),
        (
            ("skipped looks", f"{skipped:,} at updates that were all 0 or not finite")
            if document.get("framework") == "optax"
            else ("skipped steps", f"{skipped:,} with gradients that were not finite")
        ),
    ]
    if document.get("remedied"):
        facts.append(
            (
                "rounding",
                "stochastic rounding or Kahan summation is active: an element that does not change "
                "for some steps loses nothing, so no warning was given",
            )
        )
    return [(name, label(text, 300)) for name, text in facts]
