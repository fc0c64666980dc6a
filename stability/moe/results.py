"""What was measured, as the page and the documents show it: JSON beside the recordings.

Each file is written by a command (`megalodon-numerics subject defects|train`) and read by the
nightly, which repeats none of it. Parity is not among them: every night measures it.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from megalodon_jax.files import written_aside
from parity.deepseek_v3 import comparison
from parity.port_tolerances import PortEdge
from stability.moe.defects import Row
from stability.moe.examine import Examination

FOLDER = Path(__file__).parents[1] / "data" / "mla_moe"
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
    content: Document = {"defects": entries, "versions": _versions()}
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


def read(name: str, folder: Path = FOLDER) -> Document:
    """Return a stored document.

    Raises:
        ValueError: it is not there or not readable; the message names the command.
    """
    path = folder / f"{name}.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        verb = {"training": "train"}.get(name, name)
        raise ValueError(
            f"{path.name} cannot be read ({error!r}); run `megalodon-numerics subject {verb}`."
        ) from error


def write(name: str, content: Mapping[str, Any], folder: Path = FOLDER) -> Path:
    """Write a document aside, then put it in place; returns its path."""
    path = folder / f"{name}.json"
    with written_aside(path) as aside:
        aside.write_text(json.dumps(content, allow_nan=False) + "\n", encoding="utf-8")
    return path


def _versions() -> dict[str, str]:
    names = ("jax", "jaxlib", "equinox", "optax", "numpy")
    return {"python": platform.python_version()} | {n: metadata.version(n) for n in names}
