"""The page of a watched training as one HTML file. Source: docs/training.md "Watch a run while it
trains".
"""

from __future__ import annotations

from reports.page import svg
from reports.page.render import environment, script, style
from reports.page.sections import facts
from reports.page.sections.watching import watching
from reports.store.runs import Run
from reports.text import label

STEP = "optimiser step"


def render(run: Run) -> str:
    """Return the page of a watched training as one HTML text; equal runs give equal bytes."""
    view = watching(run)
    charts = [
        ("Frozen share, % of elements", view["frozen"], "Frozen share in percent", "{:g}".format),
        (
            "Unchanged by the one step looked at, % of elements",
            view["unchanged"],
            "Share of elements that one step left unchanged, in percent",
            "{:g}".format,
        ),
        (
            "Update size: RMS of one step's change over RMS of the values",
            view["update"],
            "Relative size of updates",
            lambda y: f"{10.0**y:.0e}",
        ),
    ]
    context = {
        "style": style(),
        "script": script("page.js"),
        "name": label(run.id, 80),
        "when": facts.moment(run.manifest.created),
        "watch": view,
        "machine": facts.machine(run.manifest),
        "charts": [
            (caption, svg.chart(lines, text, STEP, tick)) for caption, lines, text, tick in charts
        ],
    }
    return environment().get_template("watching.html.j2").render(context)
