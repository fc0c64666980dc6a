"""Parity of the second architecture in all its cases, as the table of docs/mla-moe.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from parity.deepseek_v3 import comparison
from parity.port_tolerances import PortEdge
from stability.core.documents import markdown

COLUMNS = {
    "float32 vs Transformers": (PortEdge.PORT32_ORIGINAL32,),
    "ours vs float64": (PortEdge.PORT32_PORT64,),
    # A recording of the original has no float64 run, so its float32 run is compared with the port's
    # float64 run.
    "theirs vs float64": (PortEdge.ORIGINAL32_ORIGINAL64, PortEdge.ORIGINAL32_PORT64),
    "float64 vs float64": (PortEdge.PORT64_ORIGINAL64,),
}
"""Edges (pairs of compared runs) by column of the parity table; the first available is shown."""


def compare_all(which: str, say: Callable[[str], None]) -> list[comparison.Found]:
    """Compare five MLA + MoE models with the reference; return one result per model.

    Args:
        which: source of the reference's values: "live", "recorded", or "auto": live if Transformers
            can run here, else recorded.
        say: called with a line of progress text.
    """
    results = []
    for case in comparison.CASES:
        results.append(comparison.compare(case, comparison.answer(case, which)))
        say(f"  {case.name}: {results[-1].held} of {len(results[-1].gates)} gates hold")
    return results


def parity_markdown(results: Iterable[comparison.Found]) -> str:
    """Return the parity table in Markdown: relative L2 errors of the logits by configuration."""
    rows = (
        (
            r.case.name,
            f"{r.held} / {len(r.gates)}",
            *(f"{r.worst('logits', *edges):.1e}" for edges in COLUMNS.values()),
        )
        for r in results
    )
    return markdown(("case", "gates held", *COLUMNS), rows)
