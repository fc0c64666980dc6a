"""Section of the page about users' ports: result, first wrong stage, matched parameters.

Pure functions from the documents that `reports.ports.document` stored in run.json to plain data.
Source: docs/your-own-port.md "Reading a report".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from parity.engine.measure.measurement import Measurement, Verdict
from parity.engine.programs.source_lines import Line
from reports.page.sections.lines import lines
from reports.page.sections.stages import stage_row
from reports.page.sections.tables import rank_of, state_of
from reports.store.runs import Run
from reports.text import edge_name, edge_question, edge_rank, label, number, share

AROUND = 4
"""Number of stages shown before and after the first wrong one; a collapsed list has all."""
WORST = 5
"""Largest number of elements shown of the first wrong stage, those that differ most."""
ROWS = 400
"""Largest number of rows of a table; run.json has more."""


def ports(run: Run) -> list[dict[str, Any]]:
    """Return the data of each port of a run, failing ones first."""
    documents = sorted(run.manifest.ports, key=lambda document: _holds(document, run))
    return [_port(document, run, turn) for turn, document in enumerate(documents)]


def only_ports(run: Run) -> bool:
    """Return whether a run measured ports only, so that no section about Megalodon applies."""
    if run.manifest.without_megalodon:
        return True
    names = {document["name"] for document in run.manifest.ports}
    return bool(names) and all(m.suite in names for m in run.measurements)


def _port(document: Mapping[str, Any], run: Run, turn: int) -> dict[str, Any]:
    title = str(document["title"])
    rows = _gates(document, run)
    place, sides = document["place"], document["sides"]
    stages = [_stage(stage, place["culprit"]) for stage in place["stages"]]
    at = next((i for i, stage in enumerate(stages) if stage["here"]), None)
    return {
        "id": f"port-{turn + 1}",
        "title": label(title, 80),
        "state": "pass" if _holds(document, run) else "fail",
        "sentence": label(str(document["sentence"]), 600),
        "sides": f"{label(sides['port'], 40)} against {label(sides['original'], 40)}",
        "edges": _edges(rows),
        "stages": stages[:ROWS],
        "near": [] if at is None else stages[max(0, at - AROUND) : at + AROUND + 1],
        "place": _place(place),
        "matching": _matching(document["matching"]),
        "alignment": _alignment(document["alignment"]),
        "ledger": _ledger(document),
        "bfloat16": _bfloat16(document["bfloat16"]),
        # Runs of earlier versions have none.
        "hints": [label(str(hint), 400) for hint in document.get("hints", ())[:ROWS]],
        "notices": [label(str(notice), 400) for notice in document["notices"]],
    }


def _gates(document: Mapping[str, Any], run: Run) -> list[Measurement]:
    title = str(document["title"])
    return [m for m in run.measurements if m.case == title and m.verdict is not Verdict.INFO]


def _holds(document: Mapping[str, Any], run: Run) -> bool:
    """Return whether a port passes: its report says so, and all its gates (at least one) hold."""
    return bool(document["holds"]) and state_of(_gates(document, run)) == "pass"


def _edges(rows: Sequence[Measurement]) -> list[dict[str, Any]]:
    result = []
    for edge in sorted({m.edge for m in rows}, key=edge_rank):
        gates = [m for m in rows if m.edge == edge]
        worst = max(gates, key=rank_of)
        failing = sum(m.verdict is not Verdict.PASS for m in gates)
        result.append(
            {
                "name": edge_name(edge),
                "question": edge_question(edge),
                "state": "fail" if failing else "pass",
                "held": f"{len(gates) - failing:,} / {len(gates):,}",
                "quantity": label(worst.quantity),
                "value": number(worst.value),
                "tolerance": number(worst.tolerance),
                "used": _used(worst.fraction, bool(failing)),
                "note": label(worst.note, 200),
            }
        )
    return result


def _used(fraction: float, fails: bool) -> dict[str, Any]:
    percent = 100.0 if math.isnan(fraction) else min(100.0, 100 * fraction)
    return {
        "percent": f"{percent:.1f}",
        "state": "fail" if fails else "pass",
        "share": share(fraction),
    }


def _stage(stage: Mapping[str, Any], culprit: str) -> dict[str, Any]:
    free, forced, tolerance = (_number(stage[name]) for name in ("free", "forced", "tolerance"))
    name, original = str(stage["name"]), str(stage["original"])
    return stage_row(name, free, forced, tolerance, name == culprit, original)


def _number(value: float | None) -> float:
    """Return a number of run.json as a float; null, which stands for NaN and infinity, as NaN."""
    return math.nan if value is None else float(value)


def _place(place: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "edge": edge_name(place["edge"]),
        "culprit": label(place["culprit"], 120),
        "original": label(place["original"], 120),
        "last_right": label(place["last_right"], 120),
        # Runs of earlier versions have no excerpts.
        "where": label(str(place.get("where", "")), 300),
        "lines": lines(Line(**line) for line in place.get("lines", ())),
        "source": [label(line, 300) for line in place["source"]],
        "mask": [label(line, 300) for line in place["mask"]],
        "worst": [
            {
                "index": f"[{', '.join(map(str, w['index']))}]",
                "port": f"{_number(w['actual']):.9g}",
                "original": f"{_number(w['expected']):.9g}",
                "apart": number(abs(_number(w["actual"]) - _number(w["expected"]))),
            }
            for w in place["worst"][:WORST]
        ],
    }


def _matching(matching: Mapping[str, Any]) -> dict[str, Any]:
    pairs = matching["pairs"]
    other = sum(not pair["equal"] for pair in pairs) + len(matching["only_port"])
    return {
        "total": len(pairs) + len(matching["only_port"]),
        "equal": sum(bool(pair["equal"]) for pair in pairs),
        "failing": other,
        "pairs": [
            {
                "state": "pass" if pair["equal"] else "fail",
                "port": label(pair["port"], 120),
                "made_of": label(pair["made_of"], 200),
                "means": label(pair["means"], 60),
                "note": label("; ".join(filter(None, (pair["note"], _also(pair["also"])))), 300),
            }
            # Pairs that are not equal come first.
            for pair in sorted(pairs, key=lambda pair: bool(pair["equal"]))[:ROWS]
        ],
        "omitted": max(0, len(pairs) - ROWS),
        "alone": [
            {
                "side": side,
                "name": label(entry["name"], 120),
                "shape": _shape(entry["shape"]),
                "note": label(
                    ", ".join(
                        filter(
                            None,
                            (
                                f"closest: {entry['closest']}" if entry["closest"] else "",
                                entry["note"],
                            ),
                        )
                    ),
                    300,
                ),
            }
            for side, key in (("port", "only_port"), ("original", "only_original"))
            for entry in matching[key][:ROWS]
        ],
    }


def _also(names: Sequence[str]) -> str:
    return f"also {', '.join(names)}" if names else ""


def _alignment(alignment: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "pairs": [
            {
                "port": label(pair["port"], 120),
                "original": label(pair["original"], 120),
                "layout": label(pair["layout"], 120),
                "by": label(pair["by"], 20),
                "distance": number(_number(pair["distance"])),
            }
            for pair in alignment["pairs"][:ROWS]
        ],
        "total": len(alignment["pairs"]),
        "alone": [
            {"side": side, "name": label(entry["name"], 120), "shape": _shape(entry["shape"])}
            for side, key in (("port", "only_port"), ("original", "only_original"))
            for entry in alignment[key][:ROWS]
        ],
    }


def _shape(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape)) or "a single number"


ROLES = {
    "output": ("result", "results"),
    "gradient": ("derivative", "derivatives"),
    "state": ("updated buffer", "updated buffers"),
    "parameter": ("parameter", "parameters"),
    "derivative by input": ("derivative by an input", "derivatives by inputs"),
}
"""By role of an entry of `parity.port.ledger`: the word for one such entry, and for several."""


def _ledger(document: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return which results and derivatives of the original were compared, and why others were not.

    None for runs of earlier versions, which did not store what was left out.
    """
    if "not_compared" not in document:
        return None
    # Runs of somewhat later versions have the reasons, but not which results were compared.
    compared, left_out = document.get("compared"), document["not_compared"]
    counts = [_count(role, compared or (), left_out) for role in ROLES]
    names = [f"{len(left_out)} not compared"] if compared is None else list(filter(None, counts))
    outputs = [entry for entry in left_out if entry["role"] == "output"]
    # Results that were left out come first.
    inputs = [entry for entry in left_out if entry["role"] == "derivative by input"]
    first = [*outputs, *(e for e in left_out if e not in outputs and e not in inputs)]
    rows = [*((entry, False) for entry in first), *((entry, True) for entry in compared or ())]
    rows += [(entry, False) for entry in inputs]
    return {
        "sentence": ", ".join(names),
        # Derivatives by inputs are never compared, so counting them would only distract.
        "left_out": sum(entry["role"] != "derivative by input" for entry in left_out),
        "rows": [_entry(*row) for row in rows[:ROWS]],
        "omitted": max(0, len(rows) - ROWS),
    }


def _count(
    role: str, compared: Sequence[Mapping[str, Any]], left_out: Sequence[Mapping[str, Any]]
) -> str:
    """Return in words how many of the original's results of one `role` were compared.

    An example is "3 of 4 results compared"; "" if the original has none. `role` is a key of
    `ROLES`, such as "output".
    """
    one, many = ROLES[role]
    held = sum(entry["role"] == role for entry in compared)
    # An entry such as `grad/*` stands for all derivatives.
    every = [entry for entry in left_out if entry["role"] == role and entry["name"].endswith("/*")]
    total = held + sum(entry["role"] == role for entry in left_out)
    if every:
        return f"no {one} compared"
    return f"{held} of {total} {one if total == 1 else many} compared" if total else ""


def _entry(entry: Mapping[str, Any], compared: bool) -> dict[str, Any]:
    role = str(entry["role"])
    every = str(entry["name"]).endswith("/*")
    return {
        "state": "pass" if compared else "none",
        "name": "all derivatives" if every else label(str(entry["name"]), 120),
        "role": ROLES.get(role, (role, role))[0],
        "port": label(str(entry["port"]), 200),
        "outcome": "compared" if compared else label(str(entry["reason"]), 400),
    }


def _bfloat16(stages: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return a row per stage: the errors of both sides in bfloat16 against float64; and a sentence.

    The sentence is about the last of `stages`, which are in order of computation. The rows of the
    first `ROWS` stages are ordered by error of the port / error of the original, the largest first.
    None if the sides were not run in bfloat16.
    """
    if not stages:
        return None
    rows = [_narrow(stage) for stage in stages]
    last = rows[-1]
    return {
        "rows": sorted(rows, key=lambda row: -row["order"])[:ROWS],
        "sentence": (
            f"{last['name']} is off by {last['port']} in the port and by {last['original']} in the "
            "original, each against float64."
        ),
    }


def _narrow(stage: Mapping[str, Any]) -> dict[str, Any]:
    port, original, floor = (_number(stage[name]) for name in ("port", "original", "floor"))
    ratio = port / original if original else math.nan
    return {
        "name": label(stage["name"], 120),
        "port": number(port),
        "original": number(original),
        "floor": number(floor),
        "ratio": "–" if math.isnan(ratio) else f"{ratio:.2f}",
        "order": -math.inf if math.isnan(ratio) else ratio,
    }
