"""Comparison of Transformers' Flax models with their torch originals: docs/tables/ports.md.

    python -m tools.flax_ports                  # compare every case that was not compared yet
    python -m tools.flax_ports bert gpt2/cache  # these models or cases, again
    python -m tools.flax_ports --host "AVX2, 2 threads"  # plain cases, as on another machine
    python -m tools.flax_ports --write          # put the tables of what was compared in the page

The result of each case is stored in its own file in build/flax_ports. Cases run in parallel
processes or on a cluster (`--executor`); an interruption loses only the cases that were running.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from parity.executors.item import Item, Needs
from tools.document import renew
from tools.recorded import add_executor, run_recorded
from tools.simulated_hosts import HOSTS as EVERY_HOST
from tools.simulated_hosts import available, folder_of

if TYPE_CHECKING:
    from parity.port import Report
    from tests.parity.ports.twins import Twin

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "tables" / "ports.md"
RESULTS = ROOT / "build" / "flax_ports"
HOSTS = ROOT / "build" / "flax_ports_hosts"
"""Folder of the results on simulated hosts."""
HELD_TABLE, FOUND_TABLE, FLOORS_TABLE = "ports that hold", "ports that differ", "use of floors"
HOSTS_TABLE = "ports on simulated hosts"
"""Names of the tables, in the comments around each of them in the document."""
PACKAGES = ("transformers", "torch", "jax", "flax")
BIN = 0.25
"""Bin width for ratios of errors to noise floors."""
HELD, DIFFERS, STOPS = "holds", "differs", "does not run"
Record = dict[str, Any]


def measure(twin: Twin) -> Record:
    """Compare a twin (a Flax model and its torch original), and return the record.

    A twin with a known difference is also compared with the remedy applied.
    """
    start, cpu = time.perf_counter(), time.process_time()
    record = {"title": twin.title, "name": twin.name, "case": twin.case} | compared(twin)
    if twin.known is not None:
        record["remedied"] = compared(twin.remedied())
    record["seconds"] = round(time.perf_counter() - start, 1)
    record["cpu"] = round(time.process_time() - cpu, 1)
    return record | {"versions": {name: version(name) for name in PACKAGES}}


def compared(twin: Twin) -> Record:
    """Return the result of `parity.port.compare` for a twin."""
    from parity.port import compare

    try:
        with twin.running():
            report = compare(twin.port())
    except Exception as error:
        message = str(error).strip().splitlines()
        return {
            "verdict": STOPS,
            "text": f"{type(error).__name__}: {message[0] if message else ''}",
        }
    return {
        "verdict": HELD if report.holds else DIFFERS,
        "text": report.sentence() if report.holds else report.text(),
        "stage": "" if report.culprit is None else report.culprit.name,
        "gates": sum(not math.isnan(m.tolerance) for m in report.measurements),
        "apart": apart(report),
        "used": used(report),
        "aligned": len(report.alignment.pairs),
        "alone": [
            len(report.alignment.unaligned_port),
            len(report.alignment.unaligned_original),
        ],
        "parameters": len(report.matching.pairs),
        "notices": list(report.notices),
    }


def apart(report: Report) -> float:
    """Return the largest absolute difference of any output, which Transformers' tests compare."""
    from parity.port_tolerances import PortEdge

    values = [
        m.value
        for m in report.measurements
        if m.edge == PortEdge.PORT32_ORIGINAL32
        and m.metric == "max_abs"
        and m.quantity.startswith("output")
    ]
    return max(values, default=math.nan)


def used(report: Report) -> dict[str, dict[str, int]]:
    """Return counts of the ratio error / noise floor in bins of width `BIN`, by edge and kind.

    Errors are divided by the tolerance and multiplied by its noise factor. That factor, for an edge
    with two floors, is twice that of the others.
    """
    from parity.engine.measure.bounds import rule
    from parity.port_tolerances import PORTS

    counts: dict[str, Counter[str]] = {}
    for m in report.measurements:
        row = rule(PORTS, m.edge, m.kind, m.metric)
        if row is None or not row.noise_factor or m.tolerance <= row.absolute:
            continue
        ratio = m.value / m.tolerance * row.noise_factor
        key = f"{m.edge} {'gradients' if m.kind == 'gradient' else 'stages'}"
        at = "inf" if not math.isfinite(ratio) else f"{BIN * math.floor(ratio / BIN):g}"
        counts.setdefault(key, Counter())[at] += 1
    return {key: dict(count) for key, count in counts.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare the requested cases, or write the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="models, or cases as MODEL/CASE")
    parser.add_argument("--write", action="store_true", help="write docs/tables/ports.md")
    add_executor(parser)
    parser.add_argument("--plain", action="store_true", help="only the plain case of each model")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where each case's file goes")
    hosts = {host.name: host for host in available()}
    parser.add_argument("--host", choices=hosts, help="run the plain cases as on this machine")
    chosen = parser.parse_args(arguments)
    if chosen.write:
        write(DOCUMENT, records_of(RESULTS))
        return
    from tests.parity.ports.catalogue import TWINS

    host = hosts.get(chosen.host)
    folder = chosen.results if host is None else folder_of(HOSTS, host, "results")
    needs = Needs() if host is None else host.needs_of()
    items = {}
    for twin in TWINS:
        path = folder / f"{re.sub(r'[^0-9a-z]+', '_', twin.title)}.json"
        plain = chosen.plain or host is not None
        asked = bool({twin.name, twin.title} & {*chosen.names}) or not (
            chosen.names or path.exists()
        )
        if asked and (twin.case == "plain" or not plain):
            where = {"title": twin.title}
            items[path] = Item(twin.title, "tools.flax_ports:measure_case", where, needs)
    for answer in run_recorded(items, chosen):
        print(f"{answer.value['cpu']:6.1f} s  {answer.name}: {told(answer.value)}", flush=True)


def measure_case(title: str) -> Record:
    """Compare a twin, given by its title, on a worker."""
    from tests.parity.ports.catalogue import TWINS

    warnings.simplefilter("ignore")
    [twin] = [twin for twin in TWINS if twin.title == title]
    jax.clear_caches()
    return measure(twin)


def records_of(folder: Path) -> list[Record]:
    """Return the records of all cases in a folder."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def told(record: Record) -> str:
    """Return a record as one line."""
    line = record["text"].splitlines()[0] if record["text"] else record["verdict"]
    if "remedied" not in record:
        return line
    return f"{line}; remedied: {record['remedied']['text'].splitlines()[0]}"


def write(document: Path, records: Iterable[Record]) -> None:
    """Write the tables of the compared cases."""
    from tests.parity.ports.catalogue import TWINS

    by_title = {record["title"]: record for record in records}
    cases = [(twin, by_title[twin.title]) for twin in TWINS if twin.title in by_title]
    tables = {
        HELD_TABLE: f"{held_table(cases)}\n\n{coverage(cases, len(TWINS))}",
        FOUND_TABLE: found_table(cases),
        FLOORS_TABLE: floors_table(record for _, record in cases),
    }
    if HOSTS.is_dir():
        tables[HOSTS_TABLE] = hosts_table(by_title, document.read_text(encoding="utf-8"))
    for name, table in tables.items():
        renew(document, f"<!-- {name}: begin -->", f"<!-- {name}: end -->", table)


def held_table(cases: Sequence[tuple[Twin, Record]]) -> str:
    """Return a row per model: the cases that hold, and their largest difference."""
    lines = [
        "| model | port | cases that hold | parameters, stages | gates | largest difference |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in dict.fromkeys(twin.name for twin, _ in cases):
        own = [(twin, result_of(twin, record)) for twin, record in cases if twin.name == name]
        held = [(twin, record) for twin, record in own if record["verdict"] == HELD]
        if not held:
            lines.append(f"| {name} | `{own[0][0].flax}` | none | | | |")
            continue
        titles = ", ".join(twin.case + "¹" * (twin.known is not None) for twin, _ in held)
        first = held[0][1]
        gates = sum(record["gates"] for _, record in held)
        largest = max(record["apart"] for _, record in held)
        lines.append(
            f"| {name} | `{own[0][0].flax}` | {titles} | {first['parameters']}, {first['aligned']} "
            f"| {gates} | {largest:.0e} |"
        )
    return "\n".join(lines)


def coverage(cases: Sequence[tuple[Twin, Record]], known: int) -> str:
    """Return how many of the catalogue's cases were compared, and with which versions."""
    versions = {f"{k} {v}" for _, record in cases for k, v in record["versions"].items()}
    return (
        f"{len(cases)} of {known} cases of the catalogue were compared, with "
        f"{', '.join(sorted(versions))}."
    )


def result_of(twin: Twin, record: Record) -> Record:
    """Return the relevant record: that with the remedy if the port does not run without it."""
    stops = record["verdict"] == STOPS and "remedied" in record
    return record["remedied"] if stops else record


def found_table(cases: Sequence[tuple[Twin, Record]]) -> str:
    """Return a row per difference: location, cause, responsible side, and remedy."""
    lines = [
        "| model, case | where it starts | because | which is | outputs differ by | a test that "
        "allows 4e-2 | holds with |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for twin, record in cases:
        if record["verdict"] == HELD:
            continue
        known = twin.known
        stops = record["verdict"] == STOPS
        where = f"does not run: {record['text']}" if stops else f"`{record['stage']}`"
        by = math.nan if stops else record["apart"]
        says = "" if stops else ("passes" if by <= 4e-2 else "fails")
        cause = whose = remedy = "unknown"
        if known is not None:
            cause, whose, remedy = known.cause, known.whose, known.remedy
            cause += f" ({known.issue})" * bool(known.issue)
            remedy += "" if record["remedied"]["verdict"] == HELD else " (and does not)"
        by_text = "" if stops else f"{by:.0e}"
        lines.append(
            f"| {twin.name}, {twin.case} | {where} | {cause} | {whose} | {by_text} | {says} | "
            f"{remedy} |"
        )
    return "\n".join(lines)


def floors_table(records: Iterable[Record]) -> str:
    """Return quantiles of the ratio error / noise floor, by edge, over the cases that hold."""
    counts: dict[str, Counter[float]] = {}
    for record in records:
        for each in (record, record.get("remedied", {})):
            for key, bins in each.get("used", {}).items() if each.get("verdict") == HELD else ():
                counts.setdefault(key, Counter()).update({float(k): n for k, n in bins.items()})
    lines = ["| edge | gates | median | 99 % | largest |", "| --- | --- | --- | --- | --- |"]
    for key, bins in counts.items():
        numbers = [at + BIN for at in quantiles(bins, (0.5, 0.99, 1.0))]
        median, high, largest = (f"{number:.2f}" for number in numbers)
        lines.append(f"| {key} | {sum(bins.values())} | {median} | {high} | {largest} |")
    return "\n".join(lines)


def hosts_table(here: Mapping[str, Record], before: str) -> str:
    """Return a row per simulated host: verdicts equal to those here, and use of floors.

    A host takes half an hour, and may have been run on another machine: hosts without results here
    keep their rows of the text `before`.
    """
    lines = [
        "| host | ports | the same verdict as without limits | alarms | largest in float32 over "
        "its floor, stages and derivatives | in bfloat16 |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for host in EVERY_HOST:
        records = records_of(folder_of(HOSTS, host, "results"))
        if not records:
            lines += re.findall(rf"^\| {re.escape(host.name)} \|.*", before, re.MULTILINE)
            continue
        same = sum(here[r["title"]]["verdict"] == r["verdict"] for r in records)
        alarms = sum(
            here[r["title"]]["verdict"] == HELD and r["verdict"] == DIFFERS for r in records
        )
        shown = (f"{largest(records, ' ' + kind):.2f}" for kind in ("stages", "gradients"))
        lines.append(
            f"| {host.name} | {len(records)} | {same} | {alarms} | {', '.join(shown)} | "
            f"{largest(records, 'bf16:'):.2f} |"
        )
    return "\n".join(lines)


def largest(records: Iterable[Record], part: str) -> float:
    """Return the largest ratio error / floor (upper end of its bin) in records of ports that hold.

    Only edges and kinds whose name contains `part` count.
    """
    held = [each for r in records for each in (r, r.get("remedied", {}))]
    bins = (
        float(at)
        for record in held
        if record.get("verdict") == HELD
        for key, counts in record["used"].items()
        if part in key and ("bf16" in key) == ("bf16" in part)
        for at in counts
    )
    return max(bins, default=math.nan) + BIN


def quantiles(bins: Mapping[float, int], shares: Iterable[float]) -> list[float]:
    """Return the lower ends of the bins that contain the quantiles."""
    total, result = sum(bins.values()), []
    for share in shares:
        passed = 0
        for at in sorted(bins):
            passed += bins[at]
            if passed >= share * total:
                result.append(at)
                break
    return result


if __name__ == "__main__":
    main()
