"""Inline SVG drawings: sparklines, curves, heat maps. Colours come from the page's style sheet.

Every drawing also has its content as text, and none uses colour alone. Source: docs/reports.md
"The page".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from reports.page.sections.drilldown import Bin
from reports.page.sections.heat import HeatCell, HeatMap
from reports.text import count, share
from reports.verdict.change_points import ChangePoint

_MINUS = "\N{MINUS SIGN}"
_NO_HISTORY = Markup('<span class="muted">no history yet</span>')


def _level(value: float) -> float:
    """Return log10 of a positive ratio, clipped to -6 ... 12; inf if the ratio is not finite."""
    return math.log10(min(max(value, 1e-6), 1e12)) if math.isfinite(value) else math.inf


def sparkline(series: Sequence[float | None]) -> Markup:
    """Draw shares of a tolerance over runs, oldest first, as a small logarithmic line chart.

    None is a gap, for a run without the measurement. A share that is above 1 or not finite is
    marked by a cross, and the tolerance by a dashed line if it is within the scale.
    """
    present = [v for v in series if v is not None]
    finite = [v for v in present if math.isfinite(v)]
    if len(series) < 2 or not finite:
        return _NO_HISTORY
    worst = max(present, key=lambda v: (v != v, v))
    runs = count(len(present), "run")
    text = f"{runs}: {share(min(finite))} to {share(worst)}, now {share(series[-1])}"
    return _spark(series, text, crossed=lambda v: not v <= 1, decades=1.0)


def trend(
    series: Sequence[float | None],
    goal: float,
    at_most: bool = False,
    changes: Sequence[ChangePoint] = (),
) -> Markup:
    """Draw how one ratio of a bench (timed comparison) developed over benches, as a small chart.

    The scale is logarithmic. A ratio that misses the goal is marked by a cross. The goal, or 1
    without one, is a dashed line if it is within the scale.

    Args:
        series: The ratio in each bench, oldest first; None is a gap, for a bench without it.
        goal: Smallest wanted ratio; NaN for none.
        at_most: Whether `goal` is the largest wanted ratio instead.
        changes: Changes of level in `series`; the levels between them are horizontal lines.
    """
    present = [v for v in series if v is not None]
    if len(present) < 2:
        return _NO_HISTORY
    now = "not run" if series[-1] is None else f"{series[-1]:.2f}"
    text = f"{count(len(present), 'run')}: {min(present):.2f} to {max(present):.2f}, now {now}"
    if changes:
        text += f", {count(len(changes), 'change')} of level"
    unit = goal if goal > 0 else 1.0
    edges = [0, *(c.index for c in changes), len(series) - 1]
    values = [changes[0].before, *(c.after for c in changes)] if changes else []
    levels = [(a, b, v / unit) for a, b, v in zip(edges, edges[1:], values, strict=False)]
    if not goal > 0:
        return _spark(series, text, crossed=lambda v: False, decades=0.3, levels=levels)
    shares = [None if v is None else v / goal for v in series]
    text = f"{text}, goal {'at most ' if at_most else ''}{goal:g}"
    missed = (lambda v: v > 1) if at_most else (lambda v: v < 1)
    return _spark(shares, text, crossed=missed, decades=0.3, levels=levels)


def _spark(
    series: Sequence[float | None],
    text: str,
    crossed: Callable[[float], bool],
    decades: float,
    levels: Sequence[tuple[int, int, float]] = (),
) -> Markup:
    """Draw a small logarithmic line chart of positive values, with a dashed line at 1.

    Args:
        series: Values, oldest first; None is a gap.
        text: Description of the drawing, for tooltip and screen readers.
        crossed: Whether a value is marked by a cross.
        decades: Smallest height of the scale, in powers of ten.
        levels: Horizontal lines as (first position, last position, value).
    """
    width, height, pad = 132.0, 26.0, 4.0
    logs = [_level(v) for v in series if v is not None and math.isfinite(v)]
    low, high = min(logs), max(logs)
    spare = max(0.0, decades - (high - low)) / 2
    low, high = low - spare, high + spare

    def at(i: int, level: float) -> tuple[str, str]:
        x = pad + (width - 2 * pad) * i / (len(series) - 1)
        up = (min(level, high) - low) / (high - low)
        return f"{x:.1f}", f"{height - pad - (height - 2 * pad) * up:.1f}"

    path, marks, pen = [], [], "M"
    for i, value in enumerate(series):
        if value is None:
            pen = "M"
            continue
        x, y = at(i, _level(value))
        path.append(f"{pen}{x} {y}")
        pen = "L"
        if crossed(value):
            marks.append(
                f'<path class="cross" d="M{x} {y}m-3-3l6 6m0-6l-6 6"/>'  # a cross, not a colour
            )
        elif i == len(series) - 1:
            marks.append(f'<circle class="dot" cx="{x}" cy="{y}" r="2.6"/>')
    steps = ""
    for start, end, value in levels:
        (x, y), (to, _) = at(start, _level(value)), at(end, 0.0)
        steps += f'<path class="level" d="M{x} {y}H{to}"/>'
    limit = ""
    if low <= 0 <= high:
        _, y = at(0, 0.0)
        limit = f'<path class="limit" d="M0 {y}H{width:.0f}"/>'
    return Markup(
        f'<svg class="spark" viewBox="0 0 {width:.0f} {height:.0f}" role="img" '
        f'aria-label="{escape(text)}"><title>{escape(text)}</title>{limit}'
        f'{steps}<path class="line" d="{"".join(path)}"/>{"".join(marks)}</svg>'
    )


def _cell_text(cell: HeatCell) -> str:
    if cell.state == "blocked":
        return "n/c"
    if cell.log10 is None:
        return "✕ NaN"
    if math.isinf(cell.log10):
        return "exact" if cell.log10 < 0 else "✕ Inf"
    text = f"{abs(cell.log10):.1f}"
    sign = _MINUS if cell.log10 < 0 and text != "0.0" else ""
    return f"{'✕ ' if cell.state == 'fail' else ''}{sign}{text}"


def _draw_cell(cell: HeatCell, x: float, y: float, width: float, height: float) -> str:
    kind, first = cell.state, ""
    if cell.state == "pass" and cell.log10 is not None:
        kind = f"h{sum(cell.log10 > edge for edge in (-4, -3, -2, -1, -0.3))}"
    if cell.first:
        first = (
            f'<rect class="first" x="{x + 1:.0f}" y="{y + 1:.0f}" '
            f'width="{width - 2:.0f}" height="{height - 2:.0f}" rx="3"/>'
        )
    return (
        f'<g class="cell {kind}"><title>{escape(cell.title)}</title>'
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}" rx="3"/>'
        f'<text x="{x + width / 2:.0f}" y="{y + height / 2 + 4:.0f}">{_cell_text(cell)}</text>'
        f"{first}</g>"
    )


SCALE = 1.2
"""Screen pixels per SVG unit of a heat map; its text is then as large as that of tables."""


def heat_map(heat: HeatMap) -> Markup:
    """Draw a heat map, layers down and modules across; cells print log10(error/tolerance)."""
    left, top, wide, tall, gap = 64, 20, 66, 26, 2
    columns = len(heat.columns)
    span = columns * wide
    parts = [
        f'<text class="axis" x="{left + wide * i + wide / 2:.0f}" y="13">{escape(name)}</text>'
        for i, name in enumerate(heat.columns)
    ]
    for i, (name, cells) in enumerate(heat.rows):
        y = top + i * tall
        place = f'x="{left - 8}" y="{y + tall / 2 + 3:.0f}"'
        parts.append(f'<text class="axis row" {place}>{escape(name)}</text>')
        # A quantity outside the layers, such as the embedding, spans all columns.
        width = span if len(cells) == 1 else wide
        parts += [
            _draw_cell(c, left + j * wide, y, width - gap, tall - gap)
            for j, c in enumerate(cells)
            if c is not None
        ]
    wide, high = left + span, top + tall * len(heat.rows)
    text = f"{heat.edge}, case {heat.case}. {heat.summary}"
    return Markup(
        f'<svg class="heat" viewBox="0 0 {wide} {high}" width="{SCALE * wide:.0f}" role="img" '
        f'aria-label="{escape(text)}">'
        f"{''.join(parts)}</svg>"
    )


def _ticks(low: float, high: float, wanted: int = 4) -> list[float]:
    raw = (high - low) / wanted
    base = 10.0 ** math.floor(math.log10(raw))
    step = next(base * f for f in (1, 2, 5, 10) if base * f >= raw)
    first = math.ceil(low / step)
    return [step * k for k in range(first, math.floor(high / step) + 1)]


Points = Sequence[tuple[float, float]]

_Plot = tuple[float, float, float, float]
_PLOT: _Plot = (52.0, 12.0, 636.0, 222.0)
"""Left, top, right and bottom of the plotting area, in SVG units, of a chart 260 units high."""
_NARROW: _Plot = (44.0, 12.0, 334.0, 222.0)
"""Plotting area of a chart for narrow screens, where the names of curves stand below the plot."""


@dataclass(frozen=True, slots=True)
class Line:
    """One curve of a chart: name, CSS class for colour and dashes, and points (x, y)."""

    name: str
    style: str
    points: Points


def _axes(
    plot: _Plot,
    x0: float,
    x1: float,
    y0: float,
    y1: float,
    x_label: str,
    tick_label: Callable[[float], str],
) -> list[str]:
    left, top, right, bottom = plot
    parts = []
    for tick in _ticks(y0, y1):
        y = bottom - (bottom - top) * (tick - y0) / (y1 - y0)
        parts.append(f'<path class="grid" d="M{left:.0f} {y:.1f}H{right:.0f}"/>')
        parts.append(
            f'<text class="axis end" x="{left - 8:.0f}" y="{y + 4:.1f}">{tick_label(tick)}</text>'
        )
    for tick in _ticks(x0, x1, 6 if right > 500 else 4):
        x = left + (right - left) * (tick - x0) / (x1 - x0)
        parts.append(f'<text class="axis" x="{x:.1f}" y="{bottom + 18:.0f}">{tick:g}</text>')
    middle = (left + right) / 2
    label = f'<text class="axis" x="{middle:.0f}" y="{bottom + 35:.0f}">{escape(x_label)}</text>'
    return [*parts, label]


def _polyline(
    plot: _Plot, points: Points, x0: float, x1: float, y0: float, y1: float
) -> tuple[str, float]:
    """Return a curve as SVG path data, and the y coordinate in SVG units at which it ends.

    x0 to x1 and y0 to y1 are the ranges of the axes. The path is "" without a finite point.
    """
    left, top, right, bottom = plot
    path, pen, y = [], "M", bottom
    for step, loss in points:
        if not (math.isfinite(step) and math.isfinite(loss)):
            pen = "M"
            continue
        x = left + (right - left) * (step - x0) / (x1 - x0)
        y = bottom - (bottom - top) * (loss - y0) / (y1 - y0)
        path.append(f"{pen}{x:.1f} {y:.1f}")
        pen = "L"
    return "".join(path), y


def _apart(ends: Sequence[tuple[float, Line]]) -> list[tuple[float, Line]]:
    """Return the curves with the y coordinates of their labels, from top to bottom.

    `ends` has the y coordinate at which each curve ends. Labels are moved from there so that they
    are at least 14 SVG units apart.
    """
    out: list[tuple[float, Line]] = []
    for y, line in sorted(ends, key=lambda end: end[0]):
        out.append((max(y, out[-1][0] + 14) if out else y, line))
    # Labels pushed below the plot move up again, with those directly above them.
    floor = _PLOT[3]
    for i, (y, line) in reversed(list(enumerate(out))):
        out[i] = (min(y, floor), line)
        floor = out[i][0] - 14
    return out


def chart(
    lines: Sequence[Line],
    text: str,
    x_label: str,
    tick_label: Callable[[float], str] = "{:g}".format,
) -> Markup:
    """Draw curves with their names at their ends; points that are not finite leave gaps.

    Args:
        lines: The curves, at most 15: no more names fit.
        text: Description of the drawing, for screen readers.
        x_label: Label of the horizontal axis.
        tick_label: Formats a tick of the vertical axis, for example to undo a logarithm.
    """
    good = [
        (x, y) for line in lines for x, y in line.points if math.isfinite(x) and math.isfinite(y)
    ]
    if len(good) < 2:
        return Markup('<p class="muted">Too few points for a curve.</p>')
    x0, x1 = min(x for x, _ in good), max(x for x, _ in good)
    y0, y1 = min(y for _, y in good), max(y for _, y in good)
    x1, margin = (x1 if x1 > x0 else x0 + 1), 0.06 * ((y1 - y0) or 1.0)
    y0, y1 = y0 - margin, y1 + margin
    scales = (x0, x1, y0, y1)
    drawn = [line for line in lines if _polyline(_PLOT, line.points, *scales)[0]]
    # Phones show a separate narrow drawing: the wide one, scaled down, could not be read.
    return Markup(
        "".join(
            f'<svg class="chart {kind}" viewBox="0 0 {width:.0f} {height:.0f}" role="img" '
            f'aria-label="{escape(text)}">{"".join(parts)}</svg>'
            for kind, width, height, parts in (
                ("wide", *_wide(drawn, scales, x_label, tick_label)),
                ("narrow", *_narrow(drawn, scales, x_label, tick_label)),
            )
        )
    )


_Scales = tuple[float, float, float, float]
_Drawing = tuple[float, float, list[str]]


def _wide(
    lines: Sequence[Line], scales: _Scales, x_label: str, tick_label: Callable[[float], str]
) -> _Drawing:
    """Return width, height and SVG elements of a chart with the name of each curve at its end."""
    parts, ends = _axes(_PLOT, *scales, x_label, tick_label), []
    for line in lines:
        path, end = _polyline(_PLOT, line.points, *scales)
        parts.append(f'<path class="curve {line.style}" d="{path}"/>')
        ends.append((end, line))
    # Reserve space beside the plot for the longest name.
    room = 8 + 7 * max(len(line.name) for line in lines)
    parts += [
        f'<text class="name {line.style}" x="644" y="{y + 4:.1f}">{escape(line.name)}</text>'
        for y, line in _apart(ends)
    ]
    return max(720, 644 + room), 260, parts


def _narrow(
    lines: Sequence[Line], scales: _Scales, x_label: str, tick_label: Callable[[float], str]
) -> _Drawing:
    """Return width, height and SVG elements of a chart with the names of its curves below it."""
    left, right, bottom = _NARROW[0], _NARROW[2], _NARROW[3]
    parts = _axes(_NARROW, *scales, x_label, tick_label)
    for i, line in enumerate(lines):
        path, _ = _polyline(_NARROW, line.points, *scales)
        y = bottom + 58 + 17 * i
        parts += [
            f'<path class="curve {line.style}" d="{path}"/>',
            f'<path class="curve {line.style}" d="M{left:.0f} {y - 4:.0f}h24"/>',
            f'<text class="name {line.style}" x="{left + 32:.0f}" y="{y:.0f}">'
            f"{escape(line.name)}</text>",
        ]
    return right + 10, bottom + 52 + 17 * len(lines), parts


def histogram(bins: Sequence[Bin], name: str) -> Markup:
    """Draw a histogram of the elements of the tensor `name` by error in ULP: one bar per bin.

    The number of elements is written above each bar.
    """
    wide, base, tall = 46, 118.0, 92.0
    most = max(b.count for b in bins)
    parts = []
    for i, b in enumerate(bins):
        x, height = 4 + wide * i, tall * b.count / most if most else 0.0
        # A bin that is not empty stays visible, however small its share.
        height = max(height, 1.5) if b.count else 0.0
        middle, top = f"{x + (wide - 6) / 2:.0f}", base - height
        kind = "bin odd" if b.odd else "bin"
        short = str(b.count or "") if b.count < 10_000 else f"{b.count / 1000:,.0f}k"
        parts.append(
            f'<rect class="{kind}" x="{x}" y="{top:.1f}" width="{wide - 6}" '
            f'height="{height:.1f}"/>'
            f'<text x="{middle}" y="{top - 5:.1f}">{short}</text>'
            f'<text class="axis" x="{middle}" y="{base + 15:.0f}">{escape(b.name)}</text>'
        )
    filled = "; ".join(f"{b.name}: {b.count:,}" for b in bins if b.count)
    text = escape(f"Elements of {name} by distance: {filled}")
    width = wide * len(bins) + 24
    return Markup(
        f'<svg class="histogram" width="{width}" height="140" role="img" aria-label="{text}">'
        f"{''.join(parts)}</svg>"
    )


def loss_curve(train: Points, validation: Points) -> Markup:
    """Draw training and validation loss in nats per token over optimiser steps."""
    steps = [x for x, y in (*train, *validation) if math.isfinite(x) and math.isfinite(y)] or [0.0]
    last = f"{train[-1][1]:.3f} at the end" if train else "not recorded"
    text = f"Training loss in nats per token over steps {min(steps):g} to {max(steps):g}: {last}"
    lines = Line("train", "train", train), Line("validation", "validation", validation)
    return chart(lines, text, "optimiser step")
