"""Collects the measurements of a pytest session, stores them as one run, and judges it.

The plan of the session is every selected test that uses the fixture `numerics`. A planned test that
was skipped, was not reached or recorded nothing makes the run INCOMPLETE. So does a module that
could not be collected, because it is unknown which tests it has.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, no_type_check

import pytest

from parity.engine.measure.measurement import Key, Kind, Measurement, Verdict
from parity.engine.programs.exits import OsExit, os_exit_raises
from stability.core.findings import Finding, Severity

if TYPE_CHECKING:
    from reports.store.manifest import Manifest, SuiteResult

_PLANNED, _UNCOLLECTED = "numerics_planned", "numerics_uncollected"
"""Keys under which a worker of pytest-xdist sends its plan to the controller when it ends."""
# Advice by exit code of a verdict. Without it, a 4 would look like pytest's own 4: wrong usage.
_TO_DO = {
    3: "run the tests that the sentence above names, so that they measure",
    4: "nothing is wrong with the command; give both sides the same work, as the sentence above "
    "says, or name in the port what is not compared (not_compared=)",
}
_REASON = 400
"""Maximal number of characters of the stored reason why a session is incomplete."""


def measures(item: pytest.Item) -> bool:
    """Return whether a test has to measure: it uses the fixture `numerics`, or runs once for each
    of several ports (`pytest.mark.ports`), which it may compare in another way."""
    marked = item.get_closest_marker("ports") is not None
    return marked or "numerics" in getattr(item, "fixturenames", ())


class NoExit:
    """Makes `os._exit` in a test or a module raise an error instead of ending the session."""

    @pytest.hookimpl(wrapper=True)
    @no_type_check  # pluggy needs a generator function; type checking would wrap it
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Iterator[Any]:
        """Collect a module; `os._exit` in it is a collection error."""
        try:
            with os_exit_raises():
                return (yield)
        except OsExit as error:
            why = f"{collector.nodeid} called os._exit({error.code})"
            return pytest.CollectReport(collector.nodeid, "failed", why, [])

    @pytest.hookimpl(wrapper=True)
    @no_type_check
    def pytest_runtest_setup(self) -> Iterator[Any]:
        """Set up a test; `os._exit` in it is an error."""
        with os_exit_raises():
            return (yield)

    @pytest.hookimpl(wrapper=True)
    @no_type_check
    def pytest_runtest_call(self) -> Iterator[Any]:
        """Call a test; `os._exit` in it is an error."""
        with os_exit_raises():
            return (yield)

    @pytest.hookimpl(wrapper=True)
    @no_type_check
    def pytest_runtest_teardown(self) -> Iterator[Any]:
        """Tear down a test; `os._exit` in it is an error."""
        with os_exit_raises():
            return (yield)


class Planner:
    """Records a process's plan: the tests that use the fixture `numerics`, and the modules that
    were not collected.

    Attributes:
        config: pytest's configuration.
        planned: Node ids of the tests.
        uncollected: "was not collected" or "skipped itself", by node id of the module.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.planned: set[str] = set()
        self.uncollected: dict[str, str] = {}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record a module that failed to import or that skipped itself."""
        if report.failed or report.skipped:
            how = "was not collected" if report.failed else "skipped itself"
            self.uncollected[report.nodeid or "the session"] = how

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Record the tests that have to measure and remain after -k, -m and --deselect."""
        self.planned |= {item.nodeid for item in session.items if measures(item)}


class WorkerPlanner(Planner):
    """Sends the plan of a pytest-xdist worker to the controller, which collects no tests itself."""

    def pytest_sessionfinish(self) -> None:
        """Add the plan to the output of the worker."""
        output = self.config.workeroutput  # pyright: ignore[reportAttributeAccessIssue]
        output[_PLANNED], output[_UNCOLLECTED] = sorted(self.planned), self.uncollected


class Collector(Planner):
    """Collects the reports of a session and stores them as one run at its end."""

    def __init__(self, config: pytest.Config, root: Path, judged: bool) -> None:
        super().__init__(config)
        self.root = root
        # Whether the exit status of the session is that of the verdict.
        self.judged = judged
        self.started, self.clock = datetime.now(UTC), time.perf_counter()
        self.records: list[tuple[str, Measurement]] = []
        self.ports: list[tuple[str, dict[str, Any]]] = []
        self.called: set[str] = set()
        self.skipped: set[str] = set()
        self.in_part: set[str] = set()
        """Ids of tests with a skipped subtest, whose measurements are therefore missing."""
        self.failed: set[str] = set()
        self.findings: list[Finding] = []
        self.lines: list[str] = []
        # All tests that pytest-xdist workers collected: the plan until a worker reports which of
        # them measure.
        self.collected: set[str] = set()
        self.plan_was_sent = False

    def pytest_report_header(self) -> str:
        """Report where measurements are stored."""
        return f"numerics run: measurements of tests are stored in {self.root}"

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: Sequence[str]) -> None:
        """Record the test ids of a worker; if all workers die, they are the plan."""
        self.collected |= set(ids)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Record the plan of a worker that ended; a crashed worker sends none."""
        output = getattr(node, "workeroutput", None) or {}
        if _PLANNED in output:
            self.planned |= set(output[_PLANNED])
            self.uncollected |= output[_UNCOLLECTED]
            self.plan_was_sent = True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the measurements of a test, and each failure as a finding."""
        if report.failed:
            self.failed.add(report.nodeid)
            self.findings.append(_failure(report))
        # Compared by name: not every supported pytest has this class.
        if report.skipped and type(report).__name__ == "SubtestReport":
            self.in_part.add(report.nodeid)
        rows = getattr(report, "measurements", None)
        if rows is None:
            return
        self.planned.add(report.nodeid)
        if report.skipped:
            self.skipped.add(report.nodeid)
        elif report.when == "call":
            self.called.add(report.nodeid)
        self.ports += [(report.nodeid, document) for document in getattr(report, "ports", ())]
        for row in rows:
            words = {"kind": Kind(row["kind"]), "verdict": Verdict(row["verdict"])}
            self.records.append((report.nodeid, Measurement(**row | words)))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Store and judge the run, and set the exit status.

        A session without measurements is not stored, and never passes.
        """
        from reports.store.runs import StoreError
        from reports.verdict.decide import ExitCode

        if not self.records:
            self.lines = ["NOT GREEN: no test recorded a measurement, and nothing was stored"]
            if self.uncollected:
                modules = "; ".join(f"{test} {how}" for test, how in self.uncollected.items())
                self.lines.append(
                    f"{modules}: fix it, or measure the other modules with "
                    "--continue-on-collection-errors"
                )
            if exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
            elif exitstatus == pytest.ExitCode.INTERRUPTED and self.judged:
                # pytest ends an interrupted session with 2, which as the exit code of a verdict
                # would mean wrong usage.
                session.exitstatus = int(ExitCode.INCOMPLETE)
            return
        try:
            verdict = self._store(interrupted=exitstatus == pytest.ExitCode.INTERRUPTED)
        except StoreError as error:
            self.lines = [f"NOT GREEN: {error}"]
            if exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
            return
        # A verdict of 0 keeps pytest's status, so a failed session stays failed.
        if verdict and self.judged:
            session.exitstatus = verdict
            if verdict != exitstatus:
                what = _TO_DO.get(verdict, "the page in the folder above says what fails first")
                self.lines.append(
                    f"exit status {verdict} is the verdict's, not pytest's: {what}; "
                    "--numerics-exit pytest keeps pytest's own status"
                )

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the numbers, verdict and folder of the stored run, or why nothing was stored."""
        for line in self.lines:
            terminalreporter.write_line(line, red=line.startswith("NOT GREEN"))

    def _store(self, interrupted: bool) -> int:
        """Store and judge the run, and return the exit code of its verdict."""
        from reports.provenance.environment import new_manifest
        from reports.registry.outcome import store
        from reports.store.runs import Run
        from reports.store.schema import RunKind
        from reports.text import count

        rows, documents = distinct(self.records, self.ports)
        names = {document["name"] for document in documents}
        if any(_of_a_subject(row) for row in rows if row.suite not in names):
            manifest = new_manifest(self.started, RunKind.PYTEST)
            manifest, against = self._of_a_subject(manifest, rows, documents)
        else:
            # These tests measure no subject: the measured code is that of the tested
            # project.
            code = Path(self.config.rootpath)
            manifest = new_manifest(self.started, RunKind.PYTEST, code, self.root)
            against = "by the tolerances of its tests"
            if documents:
                from reports.ports import with_documents

                manifest = with_documents(manifest, documents)
                sides = ", ".join(f"{d['title']}: {d['sides']['original']}" for d in documents)
                against = f"compared with its originals ({sides})"
        suite = self._suite(interrupted)
        manifest = replace(
            manifest,
            durations={"pytest": round(time.perf_counter() - self.clock, 3)},
            suites=(suite,),
            selected=self._selection(),
        )
        outcome = store(self.root, Run(manifest, rows, tuple(self.findings)), lambda line: None)
        device, decision = manifest.environment.device, outcome.decision
        assert decision is not None
        self.lines = [
            f"numerics run: {count(len(rows), 'measurement')} of {count(suite.executed, 'test')}: "
            f"JAX on {device.kind} ({device.name}) {against}",
            f"{decision.word}: {decision.sentence}",
            str(outcome.folder),
        ]
        return int(decision.exit_code)

    def _selection(self) -> tuple[str, ...]:
        """Return the session's -m and -k expressions, or ("everything",) without any.

        They become `Manifest.selected`, whose empty value would mean a whole night.
        """
        marks, words = self.config.getoption("-m"), self.config.getoption("-k")
        return tuple(filter(None, (marks, words and f"-k {words}"))) or ("everything",)

    def _of_a_subject(
        self, manifest: Manifest, rows: tuple[Measurement, ...], documents: list[dict[str, Any]]
    ) -> tuple[Manifest, str]:
        """Return the manifest of a session that measured a subject, with the model's reference, and
        a text that names what the model was compared with."""
        from reports.nightly.document import with_tables
        from reports.provenance.environment import describe
        from reports.subject import main, model

        asked = str(self.config.getoption("--reference", "auto"))
        reference = describe(model().reference(asked))
        manifest = with_tables(manifest, rows)
        environment = replace(manifest.environment, reference=reference)
        return (
            replace(manifest, environment=environment, ports=tuple(documents)),
            f"compared with {main().against} {reference.kind} {reference.commit}",
        )

    def _suite(self, interrupted: bool) -> SuiteResult:
        """Return how many planned tests were executed, and which were not and why."""
        from reports.store.manifest import SuiteResult

        planned = self.planned if self.plan_was_sent else self.planned | self.collected
        recorded = {test for test, _ in self.records}
        # A test that failed before it recorded anything counts as executed: its failure is a
        # finding.
        executed = self.called & (recorded | self.failed) - self.in_part
        reasons = [f"{test} {how}" for test, how in sorted(self.uncollected.items())]
        reasons += ["the session was interrupted"] if interrupted else []
        missing = planned - executed
        for what, tests in (
            ("did not run", missing - self.skipped - self.called),
            ("skipped", missing & (self.skipped | self.in_part)),
            ("recorded nothing", missing & self.called - self.skipped - self.in_part),
        ):
            reasons += [f"{what}: {', '.join(sorted(tests))}"] if tests else []
        return SuiteResult(
            name="pytest",
            planned=len(planned) + len(self.uncollected),
            executed=len(executed),
            reason="; ".join(reasons)[:_REASON],
            status="failed" if reasons else "ran",
        )


def _of_a_subject(row: Measurement) -> bool:
    """Return whether a measurement is of a registered subject, not of a user's port or model."""
    from reports.subject import live_suites, main, parts

    if row.suite:
        # The suite "port" is left out, because a user's port may have that title.
        suites = {main().suite, *(part.suite for part in parts())}
        return row.suite in suites - live_suites()
    # A measurement without a suite is recognised by its edge: only our model has sides of these
    # names.
    return row.edge in main().edges


def distinct(
    records: Iterable[tuple[str, Measurement]], ports: Iterable[tuple[str, dict[str, Any]]]
) -> tuple[tuple[Measurement, ...], list[dict[str, Any]]]:
    """Return all measurements and all documents of ports, renamed so that names are unique, sorted.

    If several tests measure equal case, edge, quantity and metric, the first by node id keeps the
    name of its case; the others' cases get the name of the test appended. The result does not
    depend on the order in which workers report.

    Args:
        records: Measurements, each with the node id of its test.
        ports: Documents of ports (`Manifest.ports`), each with the node id of its test.
    """
    groups: dict[tuple[str, str, int], list[Measurement]] = {}
    turns: dict[tuple[str, Key], int] = {}
    for test, row in sorted(records, key=lambda record: record[0]):
        turn = turns[test, row.key] = turns.get((test, row.key), -1) + 1
        groups.setdefault((test, row.case, turn), []).append(row)
    taken: set[Key] = set()
    names: dict[tuple[str, str, int], str] = {}
    for group, rows in groups.items():
        names[group] = _free_name(group, [row.key[1:] for row in rows], taken)
        taken |= {(names[group], *row.key[1:]) for row in rows}
    renamed = [replace(row, case=names[group]) for group, rows in groups.items() for row in rows]
    documents, seen = [], dict[tuple[str, str], int]()
    for test, document in ports:
        title = document["title"]
        turn = seen[test, title] = seen.get((test, title), -1) + 1
        documents.append({**document, "title": names.get((test, title, turn), title)})
    by_title = sorted(documents, key=lambda document: document["title"])
    return tuple(sorted(renamed, key=lambda row: row.key)), by_title


def _free_name(
    group: tuple[str, str, int], rest: Sequence[tuple[str, str, str]], taken: Collection[Key]
) -> str:
    """Return the first name for a case that gives none of its measurements a taken key.

    Candidates are `case`, `case [test]`, `case [test #2]` and so on.

    Args:
        group: Test, case, and how often the test had measured the case before.
        rest: Edge, quantity and metric of each measurement of the case.
        taken: Keys (case, edge, quantity, metric) of the measurements that are already named.
    """
    test, case, _ = group

    def names() -> Iterator[str]:
        yield from (case, f"{case} [{test}]")
        yield from (f"{case} [{test} #{n}]" for n in itertools.count(2))

    return next(name for name in names() if not any((name, *key) in taken for key in rest))


def _failure(report: pytest.TestReport) -> Finding:
    """Return the finding for a failed phase of a test."""
    lines = (report.longreprtext or "failed").strip().splitlines()
    message = f"failed in {report.when}: {lines[-1]}"[:400]
    return Finding("pytest", Severity.ERROR, report.nodeid, "failed", 1.0, 0.0, "pytest", message)
