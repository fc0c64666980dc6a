"""Bugs planted in the Flax models of Transformers, as the table of docs/ports-detection.md.

    python -m tools.flax_faults               # plant every bug that was not planted yet
    python -m tools.flax_faults gpt2 t5_scaled    # only those of these models or names, again
    python -m tools.flax_faults --write       # put the tables of what was found in the page

What was said of each is a file of its own in build/flax_faults, so that several processes can share
the work, and one that is stopped loses no more than the bug it was at.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from stability.experiments.document import renew

if TYPE_CHECKING:
    from tests.parity.ports.faults import PortFault
    from tests.parity.ports.faults.bench import Finding

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "ports-detection.md"
RESULTS = ROOT / "build" / "flax_faults"
TOTALS, FAULT_TABLE, CONTROL_TABLE = "totals", "planted bugs", "changes that are none"
"""What stands in the comments around each table of the document."""
YES = {True: "yes", False: "no", None: "–"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Plant what is asked for, or write the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="models, or names of bugs")
    parser.add_argument("--write", action="store_true", help="write the tables into the page")
    parser.add_argument("--part", default="0/1", help="K/N: every Nth model, from the Kth on")
    chosen = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    from tests.parity.ports.faults import CONTROLS, FAULTS
    from tests.parity.ports.faults.bench import Finding, run

    if chosen.write:
        found = [Finding.from_json(path.read_text()) for path in RESULTS.glob("*.json")]
        write({finding.name: finding for finding in found})
        return
    RESULTS.mkdir(parents=True, exist_ok=True)
    part, parts = map(int, chosen.part.split("/"))
    subjects = list(dict.fromkeys(fault.subject for fault in FAULTS))[part::parts]
    for subject in subjects:
        for fault in (*FAULTS, *CONTROLS):
            path = RESULTS / f"{fault.name}.json"
            asked = {fault.name, fault.subject} & {*chosen.names}
            if fault.subject != subject or (not asked if chosen.names else path.exists()):
                continue
            start = time.process_time()
            report, finding = run(fault)
            path.write_text(finding.to_json())
            path.with_suffix(".txt").write_text(report.text())
            spent = time.process_time() - start
            print(f"{spent:5.1f} s  {fault.name}: {finding.sentence}", flush=True)
            jax.clear_caches()


def write(findings: Mapping[str, Finding]) -> None:
    """Write the tables of what was found.

    Raises:
        ValueError: something was not planted yet.
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
    """Return a row per family, and the sum."""
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
    """Return a row per change that is none."""
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
