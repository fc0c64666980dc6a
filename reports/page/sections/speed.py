"""A bench as people read it: one line per piece of work, the same on the page and in the terminal.

Pure functions from runs to plain data; nothing here knows markup.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from reports.store.runs import Run
from reports.store.timings import Timing
from reports.text import label

NOT_RUN = "not run"
_HEADS = ("Work", "Ratio", "Goal", "JAX", "megalodon-hf", "JAX over its floor", "Compile")


_factor = "{:.2f}".format


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.1f} ms"


_PARTS = {
    "ratio": ("", "jax_seconds", "reference_seconds", _seconds),
    "peak_ratio": (
        ", peak memory",
        "jax_peak_bytes",
        "reference_peak_bytes",
        lambda v: f"{v / 2**30:.2f} GiB",
    ),
    "default_ratio": (", over the default backend's speed", "jax_seconds", "", _seconds),
}
"""By the metric of a line: what its name ends in, its two sides (megalodon-hf may have none), and
how they are written."""


def rows(benches: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the lines of the last of `benches`, with the trend over all of them, oldest first.

    Ratios are megalodon-hf over JAX, of seconds or of bytes. `series` holds one ratio per bench,
    None where a bench has none of the same identity.
    """
    table = {(t.work, t.metric): t for t in benches[-1].timings}
    return [_line(table, t, benches) for t in table.values() if t.metric in _PARTS]


def markdown(run: Run) -> str:
    """Return a bench as a Markdown table, with why a part of it was not run below."""
    lines = [f"| {' | '.join(_HEADS)} |", f"| {' | '.join('---' for _ in _HEADS)} |"]
    shown = rows([run])
    for row in shown:
        goal = row["goal"] if row["goal"] == "–" else f"{row['goal']}: {row['state']}"
        rest = (row[name] for name in ("jax", "reference", "floor", "compile"))
        lines.append(f"| {' | '.join((row['work'], row['ratio'], goal, *rest))} |")
    return "\n".join([*lines, *(f"\n{NOT_RUN}: {note}" for note in notes(shown))])


def notes(shown: Sequence[dict[str, Any]]) -> list[str]:
    """Return, once each, the reasons why something was not run."""
    return list(dict.fromkeys(row["note"] for row in shown if row["note"]))


def _line(
    table: Mapping[tuple[str, str], Timing], ratio: Timing, benches: Sequence[Run]
) -> dict[str, Any]:
    suffix, ours, theirs, write = _PARTS[ratio.metric]

    def shown(metric: str, write: Callable[[float], str]) -> str:
        timing = table.get((ratio.work, metric))
        return NOT_RUN if timing is None or math.isnan(timing.value) else write(timing.value)

    timed = ratio.metric == "ratio"
    return {
        "work": label(ratio.work.replace("_", " "), 60) + suffix,
        "jax": shown(ours, write),
        "reference": shown(theirs, write) if theirs else "–",
        "ratio": shown(ratio.metric, _factor),
        "spread": _spread(ratio),
        "goal": "–" if math.isnan(ratio.goal) else f"{ratio.goal:g}",
        "state": {True: "reached", False: "missed", None: NOT_RUN}[ratio.reached],
        "floor": shown("floor_ratio", _factor) if timed else "–",
        "compile": shown("compile_seconds", _seconds) if timed else "–",
        "note": label(ratio.note, 300),
        "series": tuple(_ratio_in(run, ratio) for run in benches),
        "limit": ratio.goal,
    }


def _ratio_in(run: Run, like: Timing) -> float | None:
    key = (like.work, like.metric, like.identity)
    values = (t.value for t in run.timings if (t.work, t.metric, t.identity) == key)
    value = next(values, math.nan)
    return value if math.isfinite(value) else None


def _spread(timing: Timing) -> str:
    if len(timing.rounds) < 2:
        return ""
    return f"{_factor(min(timing.rounds))} to {_factor(max(timing.rounds))}"
