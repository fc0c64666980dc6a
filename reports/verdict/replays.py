"""Shell commands that repeat a run, a case or a port, and `suite_of`, which names a measurement's
suite."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from parity.engine.measure.measurement import Kind, Measurement, Verdict
from reports.store.manifest import Manifest
from reports.store.runs import Run
from reports.store.schema import RunKind
from reports.subject import former_suite, main, registered
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
    return m.suite or former_suite(m)


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
    if case == main().given and probed is not None and probed.folder:
        # The given checkpoint replaced the committed one, whose case is selected by its name.
        return _nightly([main().committed], probed.folder, manifest)
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


def account_commands(case: str, suite: str, fault: str | None) -> list[dict[str, str]]:
    """Return the commands that explain a case of a model or shrink it to a smaller failing one.

    Args:
        case: Name of the case; the result is empty if this version does not have it.
        suite: Suite of the case; the result is empty unless it is that of a model's cases.
        fault: Fault that the commands plant; None for none.
    """
    commands = (s.commands(case) for s in registered() if s.model and s.suite == suite)
    return [
        {
            "label": f"{command.split()[-1]} {case}",
            "command": f"{program()} {command} {shlex.quote(case)}{_planted(fault)}",
        }
        for command in next(commands, ())
    ]


def _planted(fault: str | None) -> str:
    return f" --fault {shlex.quote(fault)}" if fault else ""
