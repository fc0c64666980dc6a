"""Pytest plugin that stores the measurements of tests as a run.

`pytest -m cuda --numerics-run runs` is all that a GPU machine needs; `report`, `compare`, `gate`
and `history` read the resulting folder. Measurements are part of the tests' reports. So
pytest-xdist transfers them to the controller, and a crashed worker loses only its own.
`reports.nightly.pytest_session` processes them in the controller.

pytest loads the plugin by its entry point in every project of an environment with this package.
Therefore nothing else of this project is imported until a test or an option needs it.
Source: docs/developing.md "Measurements of tests".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, no_type_check

import pytest

from megalodon_numerics import own

if TYPE_CHECKING:
    from parity.engine.measure.measurement import Measurement

_ROWS = pytest.StashKey[list[Any]]()
_PORTS = pytest.StashKey[list[Any]]()
VERDICT, PYTEST = "verdict", "pytest"
"""Values of `--numerics-exit`: exit with the verdict's code, or with pytest's own status."""
MARK = "ports(of=function): the test runs once for each parity.Port of function(), as `port`"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options `--numerics-run DIR`, which stores a run, and `--numerics-exit`.

    The latter selects whether the verdict of the run determines the exit status of pytest.
    """
    parser.addoption(
        "--numerics-run",
        type=Path,
        metavar="DIR",
        help="store what the tests measure as one run below DIR",
    )
    parser.addoption(
        "--numerics-exit",
        choices=(VERDICT, PYTEST),
        default=VERDICT,
        help="with --numerics-run: exit with the verdict's code where it is not 0 (the default), "
        "or with pytest's own status whatever the verdict is",
    )


def pytest_configure(config: pytest.Config) -> None:
    """With `--numerics-run`, register `pytest_session.Collector`, which stores the measurements.

    It runs in the process that sees all tests' reports: the controller of pytest-xdist or, without
    it, the only process.
    """
    config.addinivalue_line("markers", MARK)
    root = config.getoption("--numerics-run")
    if root is None:
        return
    try:
        session, runs = own("reports.nightly.pytest_session"), own("reports.store.runs")
        config.pluginmanager.register(session.NoExit())
        if hasattr(config, "workerinput"):
            config.pluginmanager.register(session.WorkerPlanner(config))
            return
        runs.check_writable(root)
    except (ImportError, ValueError) as error:
        raise pytest.UsageError(f"--numerics-run: {error}") from error
    judged = config.getoption("--numerics-exit") == VERDICT
    config.pluginmanager.register(session.Collector(config, root, judged))


@pytest.fixture
def numerics(
    request: pytest.FixtureRequest,
) -> Callable[[Iterable[Measurement]], list[Measurement]]:
    """Return a function that records measurements and returns them as a list.

    Use: `rows = numerics(report.measurements)`, for the `parity.Report` of a port. The function
    does not assert that the measurements hold their tolerances; the verdict of `--numerics-run`
    does.

    Raises:
        TypeError: something else than a `parity.engine.measure.measurement.Measurement` was given.
    """
    kind = own("parity.engine.measure.measurement").Measurement
    rows = request.node.stash.setdefault(_ROWS, [])

    def record(measured: Iterable[Measurement]) -> list[Measurement]:
        new = list(measured)
        # Checked now: after the test, where rows are stored, an error would end the whole session.
        if wrong := [row for row in new if not isinstance(row, kind)]:
            raise TypeError(
                "numerics: expected measurements (parity.engine.measure.measurement.Measurement), "
                f"such as `report.measurements` of a port, got {wrong[0]!r}"
            )
        rows.extend(new)
        return new

    return record


@pytest.fixture
def port_report(
    request: pytest.FixtureRequest,
    numerics: Callable[[Iterable[Measurement]], list[Measurement]],
) -> Callable[[Any], Any]:
    """Return a function that compares a `parity.Port` and returns its `parity.Report`.

    Use: `assert port_report(port()).holds`. A test that fails shows the whole report. The
    measurements are part of the run that `--numerics-run` stores.
    """
    engine = own("parity.port")
    reports = request.node.stash.setdefault(_PORTS, [])

    def compared(port: Any) -> Any:
        report = engine.compare(port)
        reports.append((port, report))
        numerics(report.measurements)
        return report

    return compared


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test marked `ports(of=function)` once per port that the function returns.

    The test gets the port as its argument `port`.
    """
    marks = list(metafunc.definition.iter_markers("ports"))
    if not marks:
        return
    try:
        as_ports = own("reports.ports").as_ports
        user_file_error = own("reports.user_module").UserFileError
    except ImportError as error:
        raise pytest.Collector.CollectError(str(error)) from error
    # By keyword: pytest would apply a mark called with only a function to that function.
    functions = [mark.kwargs["of"] for mark in marks if "of" in mark.kwargs]
    if not functions or not all(map(callable, functions)):
        got = ", ".join(map(repr, functions)) or "nothing"
        raise pytest.Collector.CollectError(
            f"pytest.mark.ports of {metafunc.function.__name__}: expected of=, a function that "
            f"returns a parity.Port or a list of them, got {got}"
        )
    try:
        ports = [port for each in functions for port in as_ports(each(), f"{each.__name__}()")]
    except user_file_error as error:
        raise pytest.Collector.CollectError(str(error)) from error
    metafunc.parametrize("port", ports, ids=[port.title for port in ports])


@pytest.hookimpl(wrapper=True)
@no_type_check  # pluggy needs a generator function; type checking would wrap it
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[Any]:
    """Attach a test's measurements to its report, in types that can cross process boundaries.

    The report of each phase (set-up, call, teardown) has the measurements since the previous phase:
    a fixture may measure and then fail, and a repeated test records again.
    """
    report = yield
    stored = item.config.getoption("--numerics-run") is not None
    if _ROWS in item.stash or (stored and own("reports.nightly.pytest_session").measures(item)):
        report.measurements = [
            {name: str(v) if isinstance(v, str) else v for name, v in asdict(row).items()}
            for row in _taken(item, _ROWS)
        ]
    if found := _taken(item, _PORTS):
        if item.config.getoption("--numerics-run") is not None:
            document_of = own("reports.ports").document_of
            report.ports = [document_of(*pair) for pair in found]
        for _, each in found:
            if report.failed and not each.holds and hasattr(report.longrepr, "addsection"):
                report.longrepr.addsection(f"port {each.title}", each.text())
    return report


def _taken(item: pytest.Item, key: pytest.StashKey[list[Any]]) -> list[Any]:
    """Return the records that a test stored under `key` since the last call, and clear them."""
    # The fixture holds this list, so it is cleared in place.
    held = item.stash.get(key, [])
    taken = held.copy()
    held.clear()
    return taken
