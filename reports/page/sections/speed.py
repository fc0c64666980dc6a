"""The table of a bench (timed comparison), one line per ratio, for page and terminal.

Pure functions from runs to plain data, without markup.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from reports.store.runs import Run
from reports.store.timings import AT_MOST, LESS_IS_BETTER, Timing
from reports.text import label
from reports.verdict.change_points import change_points
from reports.verdict.since import commits

NOT_RUN = "not run"
_HEADS = ("Work", "Ratio", "Goal", "JAX", "megalodon-hf", "JAX over its floor", "Compile")


_factor = "{:.2f}".format


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.1f} ms"


def _bytes(value: float) -> str:
    return f"{value / 2**30:.2f} GiB"


_PARTS: dict[str, tuple[str, str, str, Callable[[float], str]]] = {
    "ratio": ("", "jax_seconds", "reference_seconds", _seconds),
    "peak_ratio": (", peak memory", "jax_peak_bytes", "reference_peak_bytes", _bytes),
    "other_ratio": (", megalodon-jax of the index over ours", "jax_seconds", "", _seconds),
    "default_ratio": (", over the default backend's speed", "jax_seconds", "", _seconds),
    "float32_ratio": (", over float32's speed", "jax_seconds", "", _seconds),
    "reference_float32_ratio": (
        ", megalodon-hf over its own in float32",
        "",
        "reference_seconds",
        _seconds,
    ),
    "commit_ratio": (", processor time of the commit over ours", "night_seconds", "", _seconds),
    "programs_ratio": (", programs of the commit over ours", "night_programs", "", "{:.0f}".format),
    "token_ratio": (", time per token over the shortest", "jax_seconds", "", _seconds),
    "token_bytes_ratio": (", memory per token over a short one's", "program_bytes", "", _bytes),
}
"""For each ratio that has a line: suffix of the line's name, metrics shown as JAX and as
megalodon-hf ("" for none), and the function that formats these two."""
_LEVELS = (*_PARTS, "floor_ratio")
"""Metrics that are tested for changes of level: ratios, which depend little on the machine's
load."""


def rows(benches: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the table's lines for the last of `benches` (oldest first), with trends over all of
    them.

    The main ratios are megalodon-hf / JAX, of seconds or bytes; `_PARTS` names the others. The
    key "series" of a line has the ratio in each bench, None for a bench without the same work.
    """
    table = {(t.work, t.metric): t for t in benches[-1].timings}
    return [_line(table, t, benches) for t in table.values() if t.metric in _PARTS]


def markdown(run: Run) -> str:
    """Return a bench as a Markdown table, followed by the reasons why parts were not run."""
    lines = [f"| {' | '.join(_HEADS)} |", f"| {' | '.join('---' for _ in _HEADS)} |"]
    shown = rows([run])
    for row in shown:
        goal = row["goal"] if row["goal"] == "–" else f"{row['goal']}: {row['state']}"
        rest = (row[name] for name in ("jax", "reference", "floor", "compile"))
        lines.append(f"| {' | '.join((row['work'], row['ratio'], goal, *rest))} |")
    return "\n".join([*lines, *(f"\n{NOT_RUN}: {note}" for note in notes(shown))])


def notes(shown: Sequence[dict[str, Any]]) -> list[str]:
    """Return the distinct reasons why ratios in these lines (from `rows`) were not measured."""
    return list(dict.fromkeys(row["note"] for row in shown if row["note"]))


def changes(benches: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the lasting changes of each ratio over `benches` (oldest first), newest change first.

    Each entry has the ratio's name, the medians before and after, the first run at the new level,
    and the commits since the last run at the old one (`reports.verdict.change_points`).
    """
    out: list[tuple[int, dict[str, Any]]] = []
    for timing in benches[-1].timings:
        if timing.metric not in _LEVELS:
            continue
        series = [_ratio_in(run, timing) for run in benches]
        for change in change_points(series):
            first, before = benches[change.index], _last(benches, series, change.index)
            better = (change.ratio > 1) != (timing.metric in LESS_IS_BETTER)
            line = {
                "work": _name(timing),
                "before": _factor(change.before),
                "after": _factor(change.after),
                "word": "better" if better else "worse",
                "run": label(first.id),
                "created": first.manifest.created,
                "commits": commits(before.manifest, first.manifest),
            }
            out.append((change.index, line))
    # The sort is stable: changes in one run keep the order of the table.
    return [line for _, line in sorted(out, key=lambda entry: -entry[0])]


def watched(benches: Sequence[Run]) -> int:
    """Return the number of ratios that `changes` tests; each may cause a false alarm."""
    return sum(t.metric in _LEVELS and not math.isnan(t.value) for t in benches[-1].timings)


def _last(benches: Sequence[Run], series: Sequence[float | None], index: int) -> Run:
    """Return the newest run before position `index` whose value in `series` is not None."""
    return next(benches[i] for i in reversed(range(index)) if series[i] is not None)


def _name(timing: Timing) -> str:
    suffix = _PARTS[timing.metric][0] if timing.metric in _PARTS else ", over its floor"
    return label(timing.work.replace("_", " "), 60) + suffix


def _line(
    table: Mapping[tuple[str, str], Timing], ratio: Timing, benches: Sequence[Run]
) -> dict[str, Any]:
    _, ours, theirs, write = _PARTS[ratio.metric]

    def shown(metric: str, write: Callable[[float], str]) -> str:
        timing = table.get((ratio.work, metric))
        return NOT_RUN if timing is None or math.isnan(timing.value) else write(timing.value)

    timed = ratio.metric == "ratio" and (ratio.work, "floor_ratio") in table
    series = tuple(_ratio_in(run, ratio) for run in benches)
    goal = "–" if math.isnan(ratio.goal) else f"{ratio.goal:g}"
    return {
        "work": _name(ratio),
        "jax": shown(ours, write) if ours else "–",
        "reference": shown(theirs, write) if theirs else "–",
        "ratio": shown(ratio.metric, _factor),
        "spread": _spread(ratio),
        "goal": f"≤ {goal}" if ratio.metric in AT_MOST and goal != "–" else goal,
        "state": {True: "reached", False: "missed", None: NOT_RUN}[ratio.reached],
        "floor": shown("floor_ratio", _factor) if timed else "–",
        "compile": shown("compile_seconds", _seconds) if timed else "–",
        "note": label(ratio.note, 300),
        "series": series,
        "limit": ratio.goal,
        "at_most": ratio.metric in AT_MOST,
        "changes": change_points(series),
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
