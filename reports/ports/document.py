"""Converts the results of comparing a port to plain data, for run.json and the page."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from parity.engine.pairing.alignment import Alignment
from parity.engine.pairing.parameter_pairs import Matching, Unmatched
from parity.port import Port, Report
from parity.port.localisation import Place
from parity.sides import CapturedSide
from reports.text import for_json

LIBRARIES = ("torch", "transformers", "flax", "ml_dtypes")
"""Packages whose versions are stored if they were loaded: they affect a side's numbers."""
STAGES = 2000
"""Largest length of each stored list: listing runs reads all of run.json, so it must stay small."""


def document_of(port: Port, report: Report, file: str = "") -> dict[str, Any]:
    """Return the results of comparing a port as JSON values, except its measurements.

    Args:
        port: The compared port.
        report: Result of the comparison.
        file: File that defines the port, for the command that compares it again; "" if unknown.
    """
    partners = {pair.port: pair.original for pair in report.alignment.pairs}
    return for_json(
        {
            "title": report.title,
            "name": port.name,
            "case": port.case,
            "file": file,
            "versions": versions(port),
            "sides": {"original": port.original.kind, "port": port.port.kind},
            "switched_off": [name for name in ("gradients", "bfloat16") if not getattr(port, name)],
            "holds": report.holds,
            "sentence": report.sentence(),
            "text": report.text(),
            "place": _place(report, report.place, partners),
            "matching": _matching(report.matching),
            "alignment": _alignment(report.alignment),
            "bfloat16": [
                {"name": s.name, "port": s.port, "original": s.original, "floor": s.floor}
                # The results come last, and the page has a sentence about the very last.
                for s in report.narrow[-STAGES:]
            ],
            "hints": list(report.hints[:STAGES]),
            "notices": list(report.notices),
            "not_compared": [
                {"name": e.name, "role": str(e.role), "port": e.port, "reason": e.reason}
                for e in report.left_out[:STAGES]
            ],
            "compared": [
                {"name": e.name, "role": str(e.role), "port": e.port}
                for e in report.ledger
                if e.compared
            ][:STAGES],
        }
    )


def versions(port: Port) -> dict[str, str]:
    """Return the versions of those `LIBRARIES` that are loaded, by name.

    The version that a captured side was captured with replaces that of the loaded library.
    """
    found = {name: metadata.version(name) for name in LIBRARIES if name in sys.modules}
    for side in (port.port, port.original):
        there = side.versions if isinstance(side, CapturedSide) else {}
        found |= {name: version for name, version in there.items() if name in LIBRARIES}
    return found


def _place(report: Report, place: Place, partners: Mapping[str, str]) -> dict[str, Any]:
    culprit, before = report.culprit, None if report.holds else place.last_right
    operation = place.operation if culprit else None
    return {
        "edge": str(place.edge),
        "stages": [
            {
                "name": s.name,
                "original": partners.get(s.name, ""),
                "free": s.free,
                "forced": s.forced,
                "tolerance": s.tolerance,
            }
            for s in place.stages[:STAGES]
        ],
        "culprit": culprit.name if culprit else "",
        "original": partners.get(culprit.name, "") if culprit else "",
        "last_right": before.name if before and culprit else "",
        "worst": [
            {"index": list(w.index), "actual": w.actual, "expected": w.expected}
            for w in place.worst
            if culprit
        ],
        "where": place.where if culprit else "",
        "lines": [
            {"place": line.place, "why": line.why, "excerpt": line.excerpt}
            for line in (place.lines if operation else ())
        ],
        "source": list(operation.source) if operation else [],
        "mask": list(operation.mask) if operation else [],
    }


def _matching(matching: Matching) -> dict[str, Any]:
    return {
        "pairs": [
            {
                "port": pair.port,
                "made_of": pair.construction.text(),
                "means": str(pair.means),
                "note": pair.note,
                "also": list(pair.also),
                "equal": pair.is_equal,
            }
            for pair in matching.pairs[:STAGES]
        ],
        "only_port": [_unmatched(entry) for entry in matching.unmatched_port],
        "only_original": [_unmatched(entry) for entry in matching.unmatched_original],
    }


def _unmatched(entry: Unmatched) -> dict[str, Any]:
    return {
        "name": entry.name,
        "shape": list(entry.shape),
        "closest": entry.closest,
        "note": entry.note,
    }


def _alignment(alignment: Alignment) -> dict[str, Any]:
    return {
        "pairs": [
            {
                "port": pair.port,
                "original": pair.original,
                "layout": pair.layout.text(),
                "by": str(pair.by),
                "distance": pair.distance,
            }
            for pair in alignment.pairs[:STAGES]
        ],
        "only_port": _shapes(alignment.unaligned_port),
        "only_original": _shapes(alignment.unaligned_original),
    }


def _shapes(stages: Mapping[str, tuple[int, ...]]) -> list[dict[str, Any]]:
    return [{"name": name, "shape": list(shape)} for name, shape in list(stages.items())[:STAGES]]
