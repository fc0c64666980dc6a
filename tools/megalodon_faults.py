"""Detection of Megalodon's own planted bugs as in any port.

It writes a table of docs/tables/ports-detection.md.

    python -m tools.megalodon_faults                 # compare every bug that was not compared yet
    python -m tools.megalodon_faults rope_base_ignored   # only these, again
    python -m tools.megalodon_faults --write         # put the table in the page

Needs megalodon-hf. The result of each bug is stored in its own file in build/megalodon_faults. Bugs
that only show in a stream or a trajectory are left out: such a case consists of several calls, and
a port is compared in a single one.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

from parity.engine.measure.quantity import Quantity, Role
from parity.executors.item import Item
from parity.faults import FAULTS, Fault, by_name
from parity.megalodon import cases
from parity.port import PortError, compare
from tools.document import renew
from tools.recorded import add_executor, run_recorded

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "tables" / "ports-detection.md"
RESULTS = ROOT / "build" / "megalodon_faults"
TABLE = "Megalodon's own bugs"
Record = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare the requested bugs, or write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="names of bugs")
    parser.add_argument("--write", action="store_true", help="write the table into the page")
    add_executor(parser)
    chosen = parser.parse_args(arguments)
    if chosen.write:
        records = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
        renew(DOCUMENT, f"<!-- {TABLE}: begin -->", f"<!-- {TABLE}: end -->", table(records))
        return
    known = [f for f in FAULTS if not f.name.startswith("healthy") and is_one_call(f.witness)]
    asked = [f for f in known if f.name in chosen.names or not chosen.names]
    items = {}
    for name, fault in [(f"healthy {f.witness}", None) for f in asked] + [
        (f.name, f) for f in asked
    ]:
        path = RESULTS / f"{name}.json"
        if not path.exists() or (fault and chosen.names):
            case = fault.witness if fault else name.removeprefix("healthy ")
            words = {"case": case, "fault": fault.name if fault else ""}
            items[path] = Item(name, "tools.megalodon_faults:compare_fault", words)
    for answer in run_recorded(items, chosen):
        print(f"{answer.name}: {answer.value['says']}", flush=True)


def compare_fault(case: str, fault: str) -> Record:
    """Return the result for a case with the named fault, or without any, on a worker."""
    warnings.simplefilter("ignore")
    jax.clear_caches()
    return said(case, by_name(fault) if fault else None)


def is_one_call(name: str) -> bool:
    """Return whether a case is a single call with a reference, which a port comparison needs."""
    case = cases.by_name(name)
    return case.has_reference and not (case.cuts or case.steps)


def said(name: str, fault: Fault | None) -> Record:
    """Return the result for a case with a fault planted, or without any."""
    from parity.megalodon.port import port

    case = cases.by_name(name)
    backward = fault is not None and Quantity(fault.stage).role in (Role.GRADIENT, Role.COTANGENT)
    told = {"fault": fault and fault.name, "case": name, "family": fault and fault.family.value}
    told["expected"] = fault and fault.stage
    try:
        if fault is None:
            report = compare(port(case))
        else:
            with fault.planted():
                report = compare(port(case, gradients=backward))
    except (ValueError, PortError) as error:
        return told | {"found": True, "told": True, "says": str(error).splitlines()[0]}
    warned = any("loses digits" in notice for notice in report.notices)
    return told | {
        "found": not report.holds,
        "told": warned or not report.holds,
        "says": report.sentence(),
    }


def table(records: Iterable[Record]) -> str:
    """Return a row per family, followed by the bugs that were not found."""
    planted = [r for r in records if r["fault"]]
    controls = [r for r in records if not r["fault"]]
    lines = ["| family | bugs | found | told without a failure |", "| --- | --- | --- | --- |"]
    for family in (*dict.fromkeys(r["family"] for r in planted), "all"):
        own = [r for r in planted if family in (r["family"], "all")]
        found = sum(r["found"] for r in own)
        lines.append(f"| {family} | {len(own)} | {found} | {sum(r['told'] for r in own) - found} |")
    missed = [r["fault"] for r in planted if not r["told"]]
    alarms = [r["case"] for r in controls if r["found"]]
    lines += ["", f"Not found: {', '.join(f'`{name}`' for name in missed) or 'none'}. "]
    lines[-1] += f"Of {len(controls)} healthy cases {len(alarms)} raised an alarm."
    return "\n".join(lines)


if __name__ == "__main__":
    main()
