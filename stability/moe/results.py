"""What commands measured of the second architecture, as JSON and as tables of docs/mla-moe.md.

`megalodon-numerics subject defects|train` write the JSON (`stability.core.documents`), which pages
show and no night repeats. Parity is not among them: every night measures it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from parity.deepseek_v3 import comparison
from parity.port_tolerances import PortEdge
from stability.core.documents import versions
from stability.moe.defects import Row
from stability.moe.examine import Examination

EDGES = (
    PortEdge.PORT32_ORIGINAL32,
    PortEdge.PORT32_PORT64,
    PortEdge.ORIGINAL32_PORT64,
    PortEdge.PORT64_ORIGINAL64,
)
Document = dict[str, Any]


def compared(which: str, say: Callable[[str], None]) -> list[comparison.Found]:
    """Compare the five configurations with the reference.

    Args:
        which: "live", "recorded" or "auto".
        say: progress.
    """
    found = []
    for case in comparison.CASES:
        found.append(comparison.compare(case, comparison.answer(case, which)))
        say(f"  {case.name}: {found[-1].held} of {len(found[-1].gates)} gates hold")
    return found


def defect_rows(rows: Iterable[Row], examined: Examination | None = None) -> Document:
    """Return the table of planted defects as JSON has it, and what a healthy model is told."""
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
    """Return the table of planted defects as docs/mla-moe.md has it."""
    lines = [
        "| metric | planted | healthy | with it | threshold | caught |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for d in content["defects"]:
        numbers = " | ".join(f"{d[name]:.3g}" for name in ("healthy", "planted", "threshold"))
        caught = d["severity"] if d["caught"] else "NO"
        lines.append(f"| {d['metric']} | {d['what']} | {numbers} | {caught} |")
    return "\n".join(lines)


def parity_markdown(found: Iterable[comparison.Found]) -> str:
    """Return the parity table as docs/mla-moe.md has it: relative L2 of the logits."""
    lines = [
        "| case | gates held | float32 vs Transformers | ours vs float64 | theirs vs float64 "
        "| float64 vs float64 |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for f in found:
        numbers = " | ".join(f"{f.worst(edge, 'logits'):.1e}" for edge in EDGES)
        lines.append(f"| {f.case.name} | {f.held} / {len(f.gates)} | {numbers} |")
    return "\n".join(lines)


def training_markdown(content: Mapping[str, Any]) -> str:
    """Return the table of training runs as docs/mla-moe.md has it."""
    lines = [
        "| run | what | held-out loss | worst loss | skips | rollbacks | lr left |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    after = content["plan"]["injected_at"]
    for v in content["variants"]:
        worst = max((x for n, x in v["loss"] if n >= after and x is not None), default=None)
        events = v["events"]
        numbers = (v["held_out"], worst)
        said = " | ".join("not finite" if x is None else f"{x:.3f}" for x in numbers)
        lines.append(
            f"| {v['name']} | {v['what']} | {said} | {events['skip']} | {events['rollback']} "
            f"| {v['rate']:g} |"
        )
    return "\n".join(lines)
