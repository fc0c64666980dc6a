"""Shell commands that repeat a run, a case or a port, and `suite_of`, which names a measurement's
suite."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from parity.deepseek_v3 import SUBJECT
from parity.engine.measure.measurement import Kind, Measurement, Verdict
from parity.megalodon import COMMITTED, DIFFERENCES, GIVEN, SUITE
from parity.tolerances import PORT_EDGES, PRODUCTS
from reports.store.manifest import Manifest
from reports.store.runs import Run
from reports.store.schema import RunKind
from reports.verdict.changes import What
from reports.verdict.decide import Decision

PROGRAM = "megalodon-numerics"


def program() -> str:
    """Return the command that starts the program on this machine, quoted for a shell.

    That is the program's path relative to the current folder if it lies below that folder, as after
    `make nightly`; its bare name if the shell finds it; else its absolute path.
    """
    folder = Path(sys.prefix) / ("Scripts" if os.name == "nt" else "bin")
    if folder.is_relative_to(Path.cwd()):
        return shlex.quote(str(folder.relative_to(Path.cwd()) / PROGRAM))
    found = shutil.which(PROGRAM)
    if found is not None and Path(found).parent == folder:
        return PROGRAM
    return shlex.quote(str(folder / PROGRAM))


def suite_of(m: Measurement) -> str:
    """Return the suite of a measurement; for older schemas, derived from its edge and kind."""
    if m.suite:
        return m.suite
    if m.edge == PRODUCTS:
        return "products"
    if m.edge in PORT_EDGES:
        # Before measurements stored their suite, there was only this one port.
        return SUBJECT
    return DIFFERENCES if m.kind is Kind.KNOWN_DIFFERENCE else SUITE


def replays(run: Run, decision: Decision) -> list[dict[str, str]]:
    """Return commands that repeat a run, each as {"label": ..., "command": ...}.

    The first repeats the whole run; the others one case each that failed, or left its history or
    error level. For runs of ports the commands repeat files of ports, and failing ports.
    """
    if run.manifest.ports or run.manifest.without_megalodon:
        # No command of ours repeats the tests of another project.
        return _port_replays(run)
    # A known difference is selected by its own name, not by the case it was measured on.
    known = {m.key for m in run.measurements if m.kind is Kind.KNOWN_DIFFERENCE}
    keys = [m.key for m in run.measurements if m.verdict is Verdict.FAIL]
    keys += [
        (c.case, c.edge, c.quantity, c.metric)
        for c in decision.changes
        if c.what in (What.WORSE, What.DRIFTED)
    ]
    cases = {key[2] if key in known else key[0] for key in keys}
    manifest = run.manifest
    selected = manifest.selected if manifest.kind is RunKind.NIGHTLY else ()
    folder = manifest.checkpoint.folder if manifest.checkpoint else ""
    whole = _nightly(selected, folder, manifest)
    commands = [{"label": "everything", "command": whole}]
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
    """Return the command that compares the ports of a file, or only the one called `title`."""
    only = f" --case {shlex.quote(title)}" if title else ""
    return f"{program()} port {shlex.quote(file)}{only}"


def command(case: str, manifest: Manifest) -> str:
    """Return the command that repeats one case of any suite, with the options of the given run."""
    probed = manifest.checkpoint
    if case == GIVEN and probed is not None and probed.folder:
        # The given checkpoint replaced the committed one, whose case is selected by its name.
        return _nightly([COMMITTED], probed.folder, manifest)
    return _nightly([case], "", manifest)


def _nightly(cases: Sequence[str], checkpoint: str, manifest: Manifest) -> str:
    """Return the `nightly` command for some cases (all if empty) and a checkpoint ("": committed).

    Planted fault and kind of reference are those of the run with this manifest.
    """
    options = "".join(f" --case {shlex.quote(case)}" for case in cases) + _planted(manifest.fault)
    if manifest.environment.reference.kind == "recorded":
        options += " --reference recorded"
    if checkpoint:
        options += f" --checkpoint {shlex.quote(checkpoint)}"
    return f"{program()} nightly{options}"


def account_commands(case: str, fault: str | None) -> list[dict[str, str]]:
    """Return the commands that explain a case of Megalodon and shrink it to a smaller failing one.

    Args:
        case: Name of the case; the result is empty if this version does not have it.
        fault: Fault that the commands plant; None for none.
    """
    # Imported only for a failed case, since this imports JAX, which takes a second.
    from parity.megalodon.cases import CASES

    known = next((entry for entry in CASES if entry.name == case), None)
    if known is None:
        return []
    # A trajectory starts at a gradient or the optimiser, and `shrink` does not support it.
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
