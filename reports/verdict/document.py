"""What the run document says beyond the environment.

Cases, tolerances, known differences and replay commands.
"""

from __future__ import annotations

import math
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from parity.deepseek_v3.cases import SUBJECT
from parity.engine.measurement import Kind, Measurement, Verdict
from parity.megalodon.cases import CASES, SUITE, Case
from parity.megalodon.known_differences import KNOWN_DIFFERENCES
from parity.megalodon.known_differences import SUITE as DIFFERENCES
from parity.tolerances import MESHES, PORT_EDGES, PORTS, PRODUCTS, TABLE
from reports.store.manifest import CaseInfo, Manifest
from reports.store.runs import Run
from reports.verdict.changes import What
from reports.verdict.decide import Decision

GIVEN = "checkpoint"
"""The case of a checkpoint that was given to a night."""
PROGRAM = "megalodon-numerics"


def program() -> str:
    """Return how the person who draws a page calls the program, for commands that are copied.

    That is its path below the current folder, as after `make nightly`, its name where the shell
    finds it, else its whole path.
    """
    folder = Path(sys.prefix) / ("Scripts" if os.name == "nt" else "bin")
    if folder.is_relative_to(Path.cwd()):
        return shlex.quote(str(folder.relative_to(Path.cwd()) / PROGRAM))
    found = shutil.which(PROGRAM)
    if found is not None and Path(found).parent == folder:
        return PROGRAM
    return shlex.quote(str(folder / PROGRAM))


def with_tables(manifest: Manifest, rows: Sequence[Measurement]) -> Manifest:
    """Return the manifest with the tolerances and known differences in force.

    A merged run has them made anew: each shard knows the values of its own only.
    """
    tolerances = tuple(
        {"edge": row.edge, "kind": kind, "bound": row.bound, "reason": row.reason}
        for row in (*TABLE, *PORTS, *MESHES)
        for kind in row.kinds
    )
    return replace(manifest, tolerances=tolerances, seams=known_differences(rows))


def suite_of(m: Measurement) -> str:
    """Return the suite a measurement came from, and what it was called in runs that do not say."""
    if m.suite:
        return m.suite
    if m.edge == PRODUCTS:
        return "products"
    if m.edge in PORT_EDGES:
        # The one port that was measured before a measurement named its suite.
        return SUBJECT
    return DIFFERENCES if m.kind is Kind.KNOWN_DIFFERENCE else SUITE


def case_info(case: Case) -> CaseInfo:
    """Return what the document says of a case."""
    return CaseInfo(
        name=case.name,
        title=case.why,
        why=case.why,
        hash=case.hash,
        batch=case.batch_size,
        length=case.length,
        config=case.config.to_dict(),
    )


def known_differences(measurements: Sequence[Measurement]) -> tuple[dict[str, Any], ...]:
    """Return every deliberate difference; with its value, and whether it holds, if measured."""
    values = {m.quantity: m for m in measurements if m.kind is Kind.KNOWN_DIFFERENCE}
    entries = []
    for difference in KNOWN_DIFFERENCES:
        m = values.get(difference.id)
        entry = {name: getattr(difference, name) for name in ("id", "reason", "bound", "measured")}
        if m is not None and math.isfinite(m.value):
            entry["value"] = m.value
        # A difference that was not measured neither holds nor fails.
        if m is not None:
            entry["holds"] = m.verdict is Verdict.PASS
        entries.append(entry)
    return tuple(entries)


def replays(run: Run, decision: Decision) -> list[dict[str, str]]:
    """Return the command that makes a run again, and one for each case that failed or left its
    level.
    """
    if run.manifest.ports:
        return _port_replays(run)
    # A known difference is asked for by its own name; its case is what it was measured on.
    cases = {
        m.quantity if m.kind is Kind.KNOWN_DIFFERENCE else m.case
        for m in run.measurements
        if m.verdict is Verdict.FAIL
    }
    cases |= {c.case for c in decision.changes if c.what in (What.WORSE, What.DRIFTED)}
    commands = [{"label": "everything", "command": f"{program()} nightly"}]
    return commands + [
        {"label": case, "command": command(case, run.manifest)} for case in sorted(cases)
    ]


def _port_replays(run: Run) -> list[dict[str, str]]:
    files = dict.fromkeys(d["file"] for d in run.manifest.ports if d["file"])
    commands = [{"label": f"all of {file}", "command": port_command(file)} for file in files]
    return commands + [
        {"label": d["title"], "command": port_command(d["file"], d["title"])}
        for d in run.manifest.ports
        if d["file"] and not d["holds"] and len(run.manifest.ports) > 1
    ]


def port_command(file: str, title: str = "") -> str:
    """Return the command that compares the ports of a file, or one of them."""
    only = f" --case {shlex.quote(title)}" if title else ""
    return f"{program()} port {shlex.quote(file)}{only}"


def command(case: str, manifest: Manifest) -> str:
    """Return the command that measures one case, of any suite, alone, with the options of a run."""
    options = _planted(manifest.fault)
    if manifest.environment.reference.kind == "recorded":
        options += " --reference recorded"
    probed = manifest.checkpoint
    if case == GIVEN and probed is not None and probed.folder:
        # It took the place of the committed one's, and has no name of its own.
        case = next(entry.name for entry in CASES if entry.checkpoint is not None)
        options += f" --checkpoint {shlex.quote(probed.folder)}"
    return f"{program()} nightly --case {shlex.quote(case)}{options}"


def account_commands(case: str, fault: str | None) -> list[dict[str, str]]:
    """Return the commands that explain a case of the triangle and make it smaller, with what was
    planted in the run; none for a case that this version does not have.
    """
    known = next((entry for entry in CASES if entry.name == case), None)
    if known is None:
        return []
    # A trajectory starts where a gradient or the optimiser does, and is not shrunk.
    verbs = ("explain",) if known.steps else ("explain", "shrink")
    return [
        {
            "label": f"{verb} {case}",
            "command": f"{program()} parity {verb} {shlex.quote(case)}{_planted(fault)}",
        }
        for verb in verbs
    ]


def _planted(fault: str | None) -> str:
    return f" --fault {shlex.quote(fault)}" if fault else ""
