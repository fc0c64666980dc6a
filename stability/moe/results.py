"""Results of commands on the second architecture, as JSON documents and as tables in Markdown.

`megalodon-numerics subject defects` and `subject train` write the documents
(`stability.core.documents`), which pages show and no nightly run repeats. Parity has a table but no
document, since every nightly run measures it. The tables are in docs/mla-moe.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from parity.deepseek_v3 import comparison
from parity.port_tolerances import PortEdge
from stability.core.documents import versions
from stability.experiments.document import markdown
from stability.moe.defects import Row
from stability.moe.examine import Examination

COLUMNS = {
    "float32 vs Transformers": (PortEdge.PORT32_ORIGINAL32,),
    "ours vs float64": (PortEdge.PORT32_PORT64,),
    # A recording of the original has no float64 run, so its float32 run is compared with the port's
    # float64 run.
    "theirs vs float64": (PortEdge.ORIGINAL32_ORIGINAL64, PortEdge.ORIGINAL32_PORT64),
    "float64 vs float64": (PortEdge.PORT64_ORIGINAL64,),
}
"""Compared pairs of runs by column of the parity table; the first available pair is shown."""
Document = dict[str, Any]


def compare_all(which: str, say: Callable[[str], None]) -> list[comparison.Found]:
    """Compare the five configurations with the reference; return one result per configuration.

    Args:
        which: source of the reference's values: "live", "recorded" or "auto".
        say: called with a line of progress text.
    """
    results = []
    for case in comparison.CASES:
        results.append(comparison.compare(case, comparison.answer(case, which)))
        say(f"  {case.name}: {results[-1].held} of {len(results[-1].gates)} gates hold")
    return results


def defect_rows(rows: Iterable[Row], examined: Examination | None = None) -> Document:
    """Return the document of planted defects.

    Args:
        rows: results of the defects.
        examined: probes of a healthy model, of whose findings the document has the numbers by
            severity; None leaves them out.
    """
    entries: list[Document] = [
        {
            "metric": r.defect.metric,
            "probe": r.planted.probe,
            "what": r.defect.what,
            "healthy": r.healthy.value,
            "planted": r.planted.value,
            "threshold": r.planted.threshold,
            "severity": r.planted.severity.value,
            "caught": r.caught,
        }
        for r in rows
    ]
    content: Document = {"defects": entries, "versions": versions()}
    if examined is not None:
        severities = [f.severity.value for f in examined.findings]
        counted = {s: severities.count(s) for s in dict.fromkeys(severities)}
        content["examined"] = {"what": examined.what, "findings": counted}
    return content


def defect_markdown(content: Mapping[str, Any]) -> str:
    """Return the table of planted defects in Markdown."""
    rows = (
        (
            d["metric"],
            d["what"],
            *(f"{d[name]:.3g}" for name in ("healthy", "planted", "threshold")),
            d["severity"] if d["caught"] else "NO",
        )
        for d in content["defects"]
    )
    return markdown(("metric", "planted", "healthy", "with it", "threshold", "caught"), rows)


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


def training_markdown(content: Mapping[str, Any]) -> str:
    """Return the table of training runs in Markdown."""
    after, rows = content["plan"]["injected_at"], []
    for v in content["variants"]:
        worst = max((x for n, x in v["loss"] if n >= after and x is not None), default=None)
        losses = ("not finite" if x is None else f"{x:.3f}" for x in (v["held_out"], worst))
        counts = (str(v["events"][kind]) for kind in ("skip", "rollback"))
        # Documents of older versions have no key `ended`.
        ended = f"; ended early: {v['ended']}" if v.get("ended") else ""
        rows.append((v["name"], v["what"] + ended, *losses, *counts, f"{v['rate']:g}"))
    columns = ("run", "what", "held-out loss", "worst loss", "skips", "rollbacks", "lr left")
    return markdown(columns, rows)
