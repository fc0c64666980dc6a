"""Bugs planted in Transformers' Flax models: the tables of docs/tables/ports-detection.md.

    python -m tools.flax_faults               # plant every bug that was not planted yet
    python -m tools.flax_faults gpt2 t5_scaled    # only those of these models or names, again
    python -m tools.flax_faults --write       # put the tables of what was found in the page

The result of each bug is stored in a separate file in build/flax_faults. Bugs run in parallel
processes or on a cluster (`--executor`); an interruption loses only the bugs that were running.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from parity.executors.item import Item
from tools.document import renew
from tools.recorded import add_executor, run_recorded

if TYPE_CHECKING:
    from tests.parity.ports.faults import PortFault
    from tests.parity.ports.faults.bench import Finding

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "tables" / "ports-detection.md"
RESULTS = ROOT / "build" / "flax_faults"
TOTALS, FAULT_TABLE, CONTROL_TABLE = "totals", "planted bugs", "changes that are none"
"""Names of the tables, in the comments around each of them in the document."""
YES = {True: "yes", False: "no", None: "–"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Plant the requested bugs, or write the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="models, or names of bugs")
    parser.add_argument("--write", action="store_true", help="write the tables into the page")
    add_executor(parser)
    chosen = parser.parse_args(arguments)
    from tests.parity.ports.faults import CONTROLS, FAULTS

    if chosen.write:
        found = [finding_of(json.loads(p.read_text())) for p in RESULTS.glob("*.json")]
        write({finding.name: finding for finding in found})
        return
    items = {}
    # Bugs of one model are adjacent, so that they share compiled programs.
    for fault in sorted((*FAULTS, *CONTROLS), key=lambda fault: fault.subject):
        path = RESULTS / f"{fault.name}.json"
        asked = bool({fault.name, fault.subject} & {*chosen.names})
        if asked or not (chosen.names or path.exists()):
            items[path] = Item(fault.name, "tools.flax_faults:plant", {"name": fault.name})
    for answer in run_recorded(items, chosen):
        print(f"{answer.seconds:5.1f} s  {answer.name}: {answer.value['sentence']}", flush=True)


def plant(name: str) -> dict[str, Any]:
    """Plant a bug, given by its name, and return its finding, on a worker."""
    from tests.parity.ports.faults import CONTROLS, FAULTS
    from tests.parity.ports.faults.bench import run

    warnings.simplefilter("ignore")
    [fault] = [fault for fault in (*FAULTS, *CONTROLS) if fault.name == name]
    report, finding = run(fault)
    jax.clear_caches()
    return {**asdict(finding), "report": report.text()}


def finding_of(value: Mapping[str, Any]) -> Finding:
    """Return the finding in a result of `plant`."""
    from tests.parity.ports.faults.bench import Finding

    return Finding(**{name: field for name, field in value.items() if name != "report"})


def write(findings: Mapping[str, Finding]) -> None:
    """Write the tables of all findings.

    Raises:
        ValueError: some bug was not planted yet.
    """
    from tests.parity.ports.faults import CONTROLS, FAULTS

    if lost := [f.name for f in (*FAULTS, *CONTROLS) if f.name not in findings]:
        raise ValueError(f"not planted yet: {', '.join(lost)}")
    faults = [(fault, findings[fault.name]) for fault in FAULTS]
    controls = [(control, findings[control.name]) for control in CONTROLS]
    tables = {
        TOTALS: totals(faults, controls),
        FAULT_TABLE: fault_table(faults),
        CONTROL_TABLE: control_table(controls),
    }
    for name, table in tables.items():
        renew(DOCUMENT, f"<!-- {name}: begin -->", f"<!-- {name}: end -->", table)


def totals(
    faults: Sequence[tuple[PortFault, Finding]], controls: Sequence[tuple[PortFault, Finding]]
) -> str:
    """Return a row per family, and the total."""
    lines = [
        "| family | bugs | 4e-2 sees | found | at the right stage | at the right line |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    families = dict.fromkeys(fault.family for fault, _ in faults)
    for family in (*families, "all"):
        own = [finding for fault, finding in faults if family in (fault.family, "all")]
        lined = [finding.line_right for finding in own if finding.line_right is not None]
        lines.append(
            f"| {family} | {len(own)} | {sum(f.theirs for f in own)} | {sum(f.found for f in own)} "
            f"| {sum(f.stage_right for f in own)} | {sum(lined)} of {len(lined)} |"
        )
    alarms = sum(finding.found for _, finding in controls)
    lines.append(f"| changes that are none | {len(controls)} | | {alarms} | | |")
    return "\n".join(lines)


def fault_table(faults: Sequence[tuple[PortFault, Finding]]) -> str:
    """Return a row per bug."""
    lines = [
        "| bug | model | what is wrong | outputs differ by | 4e-2 | named | stage | line |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for fault, finding in faults:
        stage = finding.stage if len(finding.stage) < 80 else f"{finding.stage[:77]}..."
        lines.append(
            f"| `{fault.name}` | {fault.subject} | {fault.how} | {finding.error:.0e} | "
            f"{'sees it' if finding.theirs else 'passes'} | `{stage or 'nothing'}` | "
            f"{YES[finding.stage_right]} | {YES[finding.line_right]} |"
        )
    return "\n".join(lines)


def control_table(controls: Sequence[tuple[PortFault, Finding]]) -> str:
    """Return a row per harmless change."""
    lines = [
        "| change | model | what is done instead | outputs differ by | verdict |",
        "| --- | --- | --- | --- | --- |",
    ]
    for control, finding in controls:
        verdict = "diverges" if finding.found else "holds"
        lines.append(
            f"| `{control.name}` | {control.subject} | {control.how} | {finding.error:.0e} | "
            f"{verdict} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
