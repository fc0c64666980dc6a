"""A pytest plugin: what tests measure becomes a run like any other.

`pytest -m cuda --numerics-run runs` needs nothing else on a GPU machine: the folder that comes out
is read by `report`, `compare`, `gate` and `history`. Measurements travel with the reports of the
tests, so pytest-xdist brings them to the controller, and a worker that dies loses only its own.
Source: docs/reports.md "Store".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, no_type_check

import pytest

from parity.engine.measurement import Kind, Measurement, Verdict
from stability.core.findings import Finding, Severity

if TYPE_CHECKING:
    from reports.store.manifest import Manifest, SuiteResult

_ROWS = pytest.StashKey[list[Measurement]]()
_PORTS = pytest.StashKey[list[Any]]()
Record = Callable[[Iterable[Measurement]], list[Measurement]]
MARK = "ports(of=function): the test runs once for each parity.Port of function(), as `port`"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--numerics-run DIR`."""
    parser.addoption(
        "--numerics-run",
        type=Path,
        metavar="DIR",
        help="store what the tests measure as one run below DIR",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Collect on the process that sees all reports: the controller, or the only one."""
    config.addinivalue_line("markers", MARK)
    root = config.getoption("--numerics-run")
    if root is not None and not hasattr(config, "workerinput"):
        from reports.store.runs import StoreError, check_writable

        try:
            check_writable(root)
        except StoreError as error:
            raise pytest.UsageError(f"--numerics-run: {error}") from error
        config.pluginmanager.register(Collector(config, root))


@pytest.fixture
def numerics(request: pytest.FixtureRequest) -> Record:
    """Record measurements: `rows = numerics(suite.case(case, floors))` returns them as a list."""
    rows = request.node.stash.setdefault(_ROWS, [])

    def record(measured: Iterable[Measurement]) -> list[Measurement]:
        new = list(measured)
        rows.extend(new)
        return new

    return record


@pytest.fixture
def port_report(request: pytest.FixtureRequest, numerics: Record) -> Callable[[Any], Any]:
    """Compare a port of yours: `assert port_report(port()).holds`.

    A test that fails shows the whole report; its measurements are part of `--numerics-run`.
    """
    from parity.port import Port, Report, compare

    reports: list[tuple[Port, Report]] = request.node.stash.setdefault(_PORTS, [])

    def compared(port: Port) -> Report:
        report = compare(port)
        reports.append((port, report))
        numerics(report.measurements)
        return report

    return compared


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test marked `ports(of=function)` each port the function returns, called `port`."""
    marks = list(metafunc.definition.iter_markers("ports"))
    if not marks:
        return
    from reports.ports import as_ports
    from reports.user_module import UserFileError

    # By keyword: a mark that is called with a function alone marks that function.
    functions = [mark.kwargs["of"] for mark in marks if "of" in mark.kwargs]
    if not functions or not all(map(callable, functions)):
        got = ", ".join(map(repr, functions)) or "nothing"
        raise pytest.Collector.CollectError(
            f"pytest.mark.ports of {metafunc.function.__name__}: expected of=, a function that "
            f"returns a parity.Port or a list of them, got {got}"
        )
    try:
        ports = [port for each in functions for port in as_ports(each(), f"{each.__name__}()")]
    except UserFileError as error:
        raise pytest.Collector.CollectError(str(error)) from error
    metafunc.parametrize("port", ports, ids=[port.title for port in ports])


@pytest.hookimpl(wrapper=True)
@no_type_check  # pluggy asks whether it is a generator function, which a checked one hides
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[Any]:
    """Attach what a test measured to its report, in types that survive a trip between processes."""
    report = yield
    if "numerics" in getattr(item, "fixturenames", ()):
        rows = item.stash.get(_ROWS, []) if report.when == "call" else []
        report.measurements = [
            {name: str(v) if isinstance(v, str) else v for name, v in asdict(row).items()}
            for row in rows
        ]
    found = item.stash.get(_PORTS, []) if report.when == "call" else []
    if found:
        from reports.ports import document_of

        report.ports = [document_of(*pair) for pair in found]
        for _, each in found:
            if report.failed and not each.holds and hasattr(report.longrepr, "addsection"):
                report.longrepr.addsection(f"port {each.title}", each.text())
    return report


class Collector:
    """Gathers the reports of a session and stores them as one run when it ends."""

    def __init__(self, config: pytest.Config, root: Path) -> None:
        self.config, self.root = config, root
        self.started, self.clock = datetime.now(UTC), time.perf_counter()
        self.rows: dict[tuple[str, ...], Measurement] = {}
        self.planned: set[str] = set()
        self.executed: set[str] = set()
        self.ports: dict[str, dict[str, Any]] = {}
        self.findings: list[Finding] = []
        self.lines: list[str] = []

    def pytest_report_header(self) -> str:
        """Say where measurements go."""
        return f"numerics run: what tests measure is stored in {self.root}"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take the measurements of a test, and every failure as a finding."""
        if report.failed:
            self.findings.append(_failure(report))
        rows = getattr(report, "measurements", None)
        if rows is None:
            return
        self.planned.add(report.nodeid)
        if report.when == "call" and not report.skipped:
            # One that failed did run, and its failure is a finding.
            self.executed.add(report.nodeid)
        for document in getattr(report, "ports", ()):
            self.ports.setdefault(document["title"], document)
        for row in rows:
            words = {"kind": Kind(row["kind"]), "verdict": Verdict(row["verdict"])}
            self._add(Measurement(**row | words), report.nodeid)

    def _add(self, row: Measurement, test: str) -> None:
        key = (row.case, row.edge, row.quantity, row.metric)
        first = self.rows.setdefault(key, row)
        if first is not row and first.identity != row.identity:
            text = f"{' '.join(key)} was measured as other work before; {test} is left out"
            self.findings.append(_finding(Severity.WARNING, test, text))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Store the run; a session that was to measure and did not is not green."""
        from reports.store.runs import StoreError

        if not self.rows:
            self.lines = ["NOT GREEN: no test recorded a measurement, and nothing was stored"]
            if exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
            return
        try:
            self.lines = self._store(interrupted=exitstatus == pytest.ExitCode.INTERRUPTED)
        except StoreError as error:
            self.lines = [f"NOT GREEN: {error}"]
            if exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.INTERNAL_ERROR

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say what was stored."""
        for line in self.lines:
            terminalreporter.write_line(line, red=line.startswith("NOT GREEN"))

    def _store(self, interrupted: bool) -> list[str]:
        from reports.provenance.environment import new_manifest
        from reports.registry.outcome import store
        from reports.store.runs import Run
        from reports.store.schema import RunKind

        selection = self.config.getoption("-m") or "everything"
        rows = tuple(self.rows[key] for key in sorted(self.rows))
        documents = [self.ports[title] for title in sorted(self.ports)]
        names = {document["name"] for document in documents}
        # Tests of ports alone have nothing to do with Megalodon, its code and its reference.
        if names and all(row.suite in names for row in rows):
            from reports.ports import with_documents

            code = Path(self.config.rootpath)
            manifest = new_manifest(self.started, RunKind.PYTEST, code, self.root)
            manifest = with_documents(manifest, documents)
            sides = ", ".join(f"{d['title']}: {d['sides']['original']}" for d in documents)
            against = f"compared with its originals ({sides})"
        else:
            manifest = new_manifest(self.started, RunKind.PYTEST)
            manifest, against = self._of_megalodon(manifest, rows, documents)
        manifest = replace(
            manifest,
            durations={"pytest": round(time.perf_counter() - self.clock, 3)},
            suites=(self._suite(interrupted),),
            selected=(selection,),
        )
        outcome = store(self.root, Run(manifest, rows, tuple(self.findings)), lambda line: None)
        device, decision = manifest.environment.device, outcome.decision
        assert decision is not None
        return [
            f"numerics run: {len(rows)} measurements of {len(self.executed)} tests: JAX on "
            f"{device.kind} ({device.name}) {against}",
            f"{decision.word}: {decision.sentence}",
            str(outcome.folder),
        ]

    def _of_megalodon(
        self, manifest: Manifest, rows: tuple[Measurement, ...], documents: list[dict[str, Any]]
    ) -> tuple[Manifest, str]:
        """Return what a session says that measured Megalodon, and what it was compared with."""
        from parity.megalodon.suite import choose_reference
        from reports.provenance.environment import describe
        from reports.verdict.document import with_tables

        reference = describe(choose_reference(str(self.config.getoption("--reference", "auto"))))
        manifest = with_tables(manifest, rows)
        environment = replace(manifest.environment, reference=reference)
        against = "compared with the float64 oracle and megalodon-hf"
        return (
            replace(manifest, environment=environment, ports=tuple(documents)),
            f"{against} {reference.kind} {reference.commit}",
        )

    def _suite(self, interrupted: bool) -> SuiteResult:
        from reports.store.manifest import SuiteResult

        whole = self.executed == self.planned and not interrupted
        missing = sorted(self.planned - self.executed)
        reason = f"skipped: {', '.join(missing)}"[:400] if missing else ""
        return SuiteResult(
            name="pytest",
            planned=len(self.planned),
            executed=len(self.executed),
            reason="the session was interrupted" if interrupted else reason,
            status="ran" if whole else "failed",
        )


def _finding(severity: Severity, test: str, message: str) -> Finding:
    error = 1.0 if severity is Severity.ERROR else 0.0
    return Finding("pytest", severity, test, "failed", error, 0.0, "pytest", message)


def _failure(report: pytest.TestReport) -> Finding:
    lines = (report.longreprtext or "failed").strip().splitlines()
    return _finding(Severity.ERROR, report.nodeid, f"failed in {report.when}: {lines[-1]}"[:400])
