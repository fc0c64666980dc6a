"""Exports, read back by the libraries of the tools that they are for."""

from __future__ import annotations

import math
from datetime import datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from junitparser import Error, Failure, JUnitXml
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from megalodon_jax.extras import install
from parity.engine.measure.measurement import Verdict
from reports.store.runs import write_run
from stability.core.findings import Severity
from tests.helpers import cli
from tests.reports.nights import earlier, failing, finding, measurement, run

RAN = [{"name": "parity", "status": "ran", "planned": 2, "executed": 2, "reason": ""}]
LOST = [{"name": "parity", "status": "failed", "planned": 2, "executed": 1, "reason": "a <shard>"}]
HOSTILE = 'lay<er>&"\x00\x1b[31m\u202e'
OTHER = {"verdict": Verdict.NOT_COMPARABLE, "value": math.nan, "note": "no such tensor"}


def exported(root: Path, form: str, *more: object) -> str:
    result = cli("export", "latest", form, "--out", root, *more)
    assert result.exit_code == 0, result.output
    return result.stdout


def junit(root: Path) -> JUnitXml:
    return JUnitXml.fromstring(exported(root, "junit").encode())


def outcomes(document: JUnitXml) -> dict[str, list[object]]:
    return {
        f"{case.classname}/{case.name}": list(case.result) for suite in document for case in suite
    }


def test_a_failing_comparison_is_a_failing_test_that_says_where_it_starts(tmp_path: Path) -> None:
    rows = measurement(), failing(quantity="layers.0.cema", stage=1), failing(edge="jax64:oracle")
    broken = finding(severity=Severity.ERROR, subject="model.norm", message="holds NaN")
    write_run(tmp_path, run(*rows, findings=(broken, finding(probe="survival")), suites=RAN))
    document = junit(tmp_path)
    tests = outcomes(document)
    [failure] = tests["parity.baseline/JAX float32 vs oracle"]
    assert isinstance(failure, Failure)
    assert failure.message.startswith("starts at layers.0.cema: relative L2 9.0e-06 of 4.0e-06")
    assert "holds NaN" in str(tests["probes/values"][0].text)
    assert tests["probes/survival"] == []
    assert isinstance(tests["verdict/verdict"][0], Failure)
    assert (document.tests, document.failures, document.errors) == (5, 4, 0)


@pytest.mark.parametrize(
    ("rows", "suites", "code"),
    [
        ((measurement(),), RAN, 0),
        ((failing(),), RAN, 1),
        ((measurement(),), LOST, 3),
        ((measurement(**OTHER),), RAN, 4),
        ((), RAN, 5),
    ],
)
def test_junit_is_green_exactly_where_the_gate_is(tmp_path: Path, rows, suites, code) -> None:
    write_run(tmp_path, run(*rows, suites=suites))
    assert cli("gate", "latest", "--out", tmp_path).exit_code == code
    document = junit(tmp_path)
    assert (document.failures + document.errors > 0) == (code > 0)
    results = [result for results in outcomes(document).values() for result in results]
    assert len(results) == document.failures + document.errors
    assert sum(isinstance(result, Error) for result in results) == document.errors


def test_a_value_that_left_its_history_fails_the_verdict_and_no_comparison(tmp_path: Path) -> None:
    for day in range(1, 19):
        write_run(tmp_path, earlier(measurement(value=1e-7), day=day, suites=RAN))
    write_run(tmp_path, run(measurement(value=3e-6), suites=RAN))
    assert cli("gate", "latest", "--out", tmp_path).exit_code == 1
    tests = outcomes(junit(tmp_path))
    assert tests["parity.baseline/JAX float32 vs oracle"] == []
    assert isinstance(tests["verdict/verdict"][0], Failure)


def test_names_are_data_in_every_format(tmp_path: Path) -> None:
    write_run(tmp_path, run(failing(case=HOSTILE, quantity=HOSTILE), suites=RAN))
    tests = outcomes(junit(tmp_path))
    assert any("lay<er>&" in name and "\\u0000" in name for name in tests)
    text = exported(tmp_path, "openmetrics")
    cases = {s.labels.get("case") for f in text_string_to_metric_families(text) for s in f.samples}
    # A terminal is where the text goes by default: what would steer it is visible.
    assert 'lay<er>&"\\u0000\\u001b[31m\\u202e' in cases


def test_openmetrics_are_series_that_the_next_night_continues(tmp_path: Path) -> None:
    def samples() -> dict[tuple[str, ...], tuple[float, float]]:
        families = text_string_to_metric_families(exported(tmp_path, "openmetrics"))
        return {
            (s.name, *(f"{k}={v}" for k, v in sorted(s.labels.items()))): (
                s.value,
                float(s.timestamp),
            )
            for family in families
            for s in family.samples
            if not s.name.endswith("_info")
        }

    rows = measurement(), measurement(metric="max_abs", value=2e-6), finding(probe="survival")
    write_run(tmp_path, earlier(*rows[:2], findings=rows[2:], suites=RAN))
    first = samples()
    worse = failing(value=math.nan)
    night = run(worse, rows[1], findings=rows[2:], suites=RAN)
    write_run(tmp_path, night)
    second = samples()
    assert first.keys() == second.keys()
    times = {time for _, time in second.values()}
    assert times == {datetime.fromisoformat(night.manifest.created).timestamp()}
    [share] = [key for key in first if key[0] == "megalodon_numerics_tolerance_used_ratio"]
    assert first[share][0] == pytest.approx(0.5)
    # What is no number is beyond every tolerance.
    assert second[share][0] == math.inf
    [code] = [key for key in first if key[0] == "megalodon_numerics_exit_code"]
    assert (first[code][0], second[code][0]) == (0.0, 1.0)


def test_openmetrics_name_the_run_at_its_own_time(tmp_path: Path) -> None:
    """Without its time the name of an old run would be stored as that of now."""
    night = run(measurement(), suites=RAN)
    write_run(tmp_path, night)
    families = text_string_to_metric_families(exported(tmp_path, "openmetrics"))
    [sample] = [s for family in families for s in family.samples if s.name.endswith("_info")]
    assert sample.labels["run"] == night.id
    assert sample.timestamp is not None
    assert float(sample.timestamp) == datetime.fromisoformat(night.manifest.created).timestamp()


def test_openmetrics_without_their_library_say_what_to_install(tmp_path: Path, monkeypatch) -> None:
    write_run(tmp_path, run(measurement(), suites=RAN))
    monkeypatch.setitem(__import__("sys").modules, "prometheus_client", None)
    result = cli("export", "latest", "openmetrics", "--out", tmp_path)
    assert result.exit_code == 2
    assert install("exports") in result.output


def test_arrow_files_of_many_runs_are_one_table(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / "runs", earlier(measurement(), suites=RAN)),
        write_run(tmp_path / "runs", run(failing(), measurement(case="plain"), suites=RAN)),
    ]
    tables = []
    for i, folder in enumerate(folders):
        to = tmp_path / f"{i}.arrow"
        result = cli("export", folder, "arrow", "--to", to)
        assert (result.exit_code, result.stdout.strip()) == (0, str(to))
        tables.append(pa.ipc.open_file(to).read_all())
    table = pa.concat_tables(tables, promote_options="default")
    assert table["run"].to_pylist() == [folders[0].name, folders[1].name, folders[1].name]
    assert set(table["run_verdict"].to_pylist()) == {"PASS", "REGRESSED"}
    stored = pq.read_table(folders[1] / "measurements.parquet")
    assert tables[1].select(stored.column_names).equals(stored)
    assert tables[1].to_pandas()["created"].dt.tz is not None


def test_an_export_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch) -> None:
    write_run(tmp_path / "runs", run(measurement(), suites=RAN))

    def full(self: Path, text: str, **_: object) -> None:
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_text", full)
    to = tmp_path / "junit.xml"
    result = cli("export", "latest", "junit", "--out", tmp_path / "runs", "--to", to)
    assert (result.exit_code, "No space left" in result.output) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
