"""Small line charts as SVG text, committed in the folder of the documents that show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, LEGEND = 640, 320, 60, 40, 30, 190
COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#a463f2", "#97bbf5", "#9c6b4e")


def line_chart(
    title: str, x_label: str, series: Mapping[str, Sequence[tuple[float, float]]]
) -> str:
    """Return an SVG with one line per series of (x, y) points; both axes begin at 0.

    Negative y are drawn at 0.

    Raises:
        ValueError: there are no points to draw.
    """
    points = [point for line in series.values() for point in line]
    if not points:
        raise ValueError(
            f"line_chart {title!r}: no points; expected at least one series of (x, y)."
        )
    right = max(x for x, _ in points) or 1.0
    top = max(y for _, y in points) or 1.0
    across, down = WIDTH - LEFT - LEGEND, HEIGHT - TOP - BOTTOM

    def place(x: float, y: float) -> str:
        return f"{LEFT + across * x / right:.0f},{TOP + down * (1 - max(0.0, y) / top):.0f}"

    rows = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="sans-serif" font-size="12" role="img" aria-label="{escape(title)}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="18" font-size="13">{escape(title)}</text>',
        f'<polyline points="{place(0, top)} {place(0, 0)} {place(right, 0)}" '
        'fill="none" stroke="#777"/>',
        f'<text x="{LEFT + across}" y="{HEIGHT - 8}" text-anchor="end">'
        f"{escape(x_label)}, to {right:g}</text>",
        f'<text x="{LEFT - 6}" y="{TOP + 10}" text-anchor="end">{top:.2g}</text>',
        f'<text x="{LEFT - 6}" y="{HEIGHT - BOTTOM}" text-anchor="end">0</text>',
    ]
    for i, (name, line) in enumerate(series.items()):
        colour = COLOURS[i % len(COLOURS)]
        path = " ".join(place(x, y) for x, y in line)
        rows.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        y = TOP + 12 + 18 * i
        rows.append(
            f'<rect x="{WIDTH - LEGEND + 12}" y="{y - 9}" width="12" height="4" fill="{colour}"/>'
        )
        rows.append(f'<text x="{WIDTH - LEGEND + 30}" y="{y - 3}">{escape(name)}</text>')
    return "\n".join([*rows, "</svg>", ""])
