"""`port`: a port of anybody's is compared, stored as a run of its own kind, and judged by it."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import pytest
from click.testing import Result

from reports.registry.lookback import look_back
from reports.registry.lookup import judge
from reports.store.runs import list_runs, read_run, write_run
from reports.store.schema import RunKind
from reports.verdict import pins
from reports.verdict.decide import Word
from reports.verdict.history import load_history
from tests.helpers import cli
from tests.reports.nights import measurement, run
from tests.reports.ports.scripts import CASES, write_port


def compare_by_command(*arguments: object) -> Result:
    """What `port ARGUMENTS` answers; Flax relies on JAX's own promotion."""
    with jax.numpy_dtype_promotion("standard"):
        return cli("port", *arguments)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of one port: it holds, then it has a bug."""
    folder = tmp_path_factory.mktemp("ports")
    write_port(folder)
    assert compare_by_command(folder / "my_port.py", "--out", folder / "runs").exit_code == 0
    return folder


@pytest.fixture(scope="module")
def diverging(folder: Path):
    write_port(folder, approximate=True)
    page = folder / "page.html"
    path = folder / "my_port.py"
    return compare_by_command(path, "--out", folder / "runs", "--html", page, "--quiet"), page


def test_a_port_that_holds_passes_and_its_run_says_what_it_is(folder: Path) -> None:
    (first, *_), unreadable = list_runs(folder / "runs")
    manifest = read_run(first.folder).manifest
    assert not unreadable
    assert (first.kind, manifest.verdict, manifest.subject) == (RunKind.PORT, "PASS", {"mlp"})
    assert manifest.id.endswith("-port-mlp")
    assert manifest.environment.reference.kind == "torch"
    assert {"torch", "flax"} <= manifest.environment.versions.keys()
    assert [suite.name for suite in manifest.suites] == ["mlp"]
    (document,) = manifest.ports
    assert document["holds"] and document["place"]["culprit"] == ""
    assert len(document["matching"]["pairs"]) == 4
    rows = read_run(first.folder).measurements
    assert {m.suite for m in rows} == {"mlp"}


def test_a_port_with_a_bug_fails_and_says_where_it_starts(diverging) -> None:
    result, page = diverging
    assert result.exit_code == 1, result.output
    assert "mlp: diverges at down, my_port.py:17 (Twin.__call__)" in result.stdout
    assert "REGRESSED" in result.stdout and "down" in result.stdout.split("REGRESSED")[1]
    text = page.read_text(encoding="utf-8")
    assert "it starts here" in text and "my_port.py:17" in text
    # Sections of a night would be empty.
    assert 'id="streaming"' not in text and "Reference: megalodon-hf" not in text


def test_it_is_held_against_the_run_before(folder: Path, diverging) -> None:
    runs, _ = list_runs(folder / "runs")
    last = read_run(runs[-1].folder)
    baseline = load_history(folder / "runs", last).baseline
    assert baseline is not None and baseline.id == runs[0].manifest.id
    changed = cli("compare", runs[0].folder.name, runs[-1].folder.name, "--out", folder / "runs")
    assert changed.exit_code == 1
    assert "new failure: down in mlp" in changed.output
    rows = look_back(str(folder / "runs"), "mlp", "down").rows
    assert [r["verdict"] for r in rows if r["edge"] == "port64:original64"] == ["pass", "fail"]
    assert "port" in cli("list", "--out", folder / "runs").output


def port_run(name: str, day: int, **changes: object):
    rows = measurement(case="shared", suite=name)
    suite = {"name": name, "status": "ran", "planned": 1, "executed": 1, "reason": ""}
    return run(
        rows,
        kind="port",
        id=f"2026-11-{day}-{name}",
        created=f"2026-11-{day}T00:00:00+00:00",
        suites=[suite],
        **changes,
    )


def test_neither_a_night_nor_another_port_is_a_baseline(tmp_path: Path) -> None:
    mine = port_run("mine", 10)
    write_run(tmp_path, mine)
    write_run(tmp_path, port_run("other", 11))
    night = run(measurement(case="shared", suite="mine"), created="2026-11-12T00:00:00+00:00")
    write_run(tmp_path, night)
    later = port_run("mine", 13)
    baseline = load_history(tmp_path, later).baseline
    # All four measured what has one identity; only the oldest is about the same port.
    assert baseline is not None and baseline.id == mine.id
    tonight = run(measurement(case="shared"), id="t", created="2026-11-14T00:00:00+00:00")
    baseline = load_history(tmp_path, tonight).baseline
    assert baseline is not None and baseline.id == night.id
    assert load_history(tmp_path, port_run("new", 14)).baseline is None


def test_json_says_which_stage_and_line(folder: Path, diverging) -> None:
    path = folder / "my_port.py"
    result = compare_by_command(path, "--out", folder / "runs", "--json", "--quiet")
    answer = json.loads(result.stdout)
    assert (answer["verdict"], answer["exit_code"], result.exit_code) == ("REGRESSED", 1, 1)
    (port,) = answer["ports"]
    assert (port["culprit"], port["last_right"], port["holds"]) == ("down", "up", False)
    assert port["source"][0].startswith("my_port.py:17")


def test_one_case_alone_can_be_compared_and_its_pins_written(tmp_path: Path) -> None:
    path = write_port(tmp_path, CASES)
    options = "--out", tmp_path / "runs", "--quiet"
    refused = compare_by_command(path, "--write-pins", tmp_path / "pins.json", *options)
    assert (refused.exit_code, "with --case: mlp/short, mlp/long" in refused.output) == (
        2,
        True,
    )
    one = compare_by_command(
        path, "--case", "long", "--write-pins", tmp_path / "pins.json", *options
    )
    assert one.exit_code == 0, one.output
    (stored, *_), _ = list_runs(tmp_path / "runs")
    assert stored.manifest.selected == ("long",)
    assert {m.case for m in read_run(stored.folder).measurements} == {"mlp/long"}
    pins = json.loads((tmp_path / "pins.json").read_text(encoding="utf-8"))
    assert {"port": "up", "original": "up"}.items() <= pins["pairs"][0].items()
    # Negative control: the file is followed, so one that cannot be is refused.
    pins["pairs"][0]["original"] = "nowhere"
    (tmp_path / "pins.json").write_text(json.dumps(pins), encoding="utf-8")
    lost = compare_by_command(path, "--case", "long", "--pins", tmp_path / "pins.json", *options)
    assert (lost.exit_code, "no such stage" in lost.output) == (2, True), lost.output


def test_a_case_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    result = compare_by_command(
        write_port(tmp_path, CASES), "--case", "wide", "--out", tmp_path / "runs"
    )
    assert result.exit_code == 2
    assert "no case 'wide'" in result.output and "mlp/short, mlp/long" in result.output


REFUSED = """

def port():
    right = one("right")
    x = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    stranger = TorchSide(torch.nn.Linear(4, 4), x)
    return [right, Port("mlp", right.original, stranger, case="wrong")]
"""


def test_a_port_that_cannot_be_compared_leaves_the_run_incomplete(tmp_path: Path) -> None:
    path = write_port(tmp_path, REFUSED)
    some = compare_by_command(path, "--out", tmp_path / "runs", "--quiet")
    assert some.exit_code == 3, some.output
    assert "mlp/wrong: not compared: the two sides share no parameter" in some.output
    (stored, *_), _ = list_runs(tmp_path / "runs")
    assert (stored.manifest.verdict, stored.manifest.suites[0].executed) == ("INCOMPLETE", 1)
    # Where none can be, there is nothing to store: the input is bad.
    none = compare_by_command(path, "--case", "wrong", "--out", tmp_path / "runs", "--quiet")
    assert none.exit_code == 2
    assert "share no parameter" in none.output
    # The error has the reason, and no line of the progress has it too.
    told = compare_by_command(path, "--case", "wrong", "--out", tmp_path / "runs")
    assert told.output.count("share no parameter") == 1
    assert len(list_runs(tmp_path / "runs")[0]) == 1


EXITS = """

def port():
    import sys

    right = one("right")
    x = right.original.arguments[0][0]
    leaves = TorchSide(right.original.module, x, call=lambda module, x: sys.exit(0))
    return [right, Port("mlp", leaves, right.port, case="leaves", gradients=False)]
"""


def test_a_side_that_ends_the_program_is_named_and_exits_with_an_error(tmp_path: Path) -> None:
    path = write_port(tmp_path, EXITS)
    some = compare_by_command(path, "--out", tmp_path / "runs", "--quiet")
    assert some.exit_code == 3, some.output
    told = "mlp/leaves: not compared: the original (torch) called sys.exit(0)"
    assert told in some.output
    alone = compare_by_command(path, "--case", "leaves", "--out", tmp_path / "runs", "--quiet")
    assert (alone.exit_code, "called sys.exit(0)" in alone.output) == (2, True), alone.output
    captured = cli("capture", path, tmp_path / "captured", "--side", "original", "--case", "leaves")
    assert (captured.exit_code, "the torch side called" in captured.output) == (2, True)
    assert not (tmp_path / "captured").exists()


NOTHING = """

def port():
    right = one("right")
    x = right.original.arguments[0][0]
    return Port(
        "mlp",
        TorchSide(right.original.module, x, call=lambda m, x: 0 * m(x)),
        FlaxSide(
            right.port.module,
            right.port.params,
            right.port.arguments[0][0],
            call=lambda m, p, x: 0 * m.apply(p, x),
        ),
        gradients=False,
        bfloat16=False,
    )
"""


def test_a_port_of_which_no_result_was_compared_is_not_comparable(tmp_path: Path) -> None:
    path = write_port(tmp_path, NOTHING)
    result = compare_by_command(path, "--out", tmp_path / "runs", "--json", "--quiet")
    assert result.exit_code == 4, result.output
    (port,) = json.loads(result.stdout)["ports"]
    assert not port["holds"]
    told = {entry["name"]: entry["reason"] for entry in port["not_compared"]}
    assert told["output"] == "nothing compared: 0 everywhere on both sides"
    assert "not requested" in told["grad/*"]


def test_bad_files_are_usage_errors(tmp_path: Path) -> None:
    missing = compare_by_command(tmp_path / "no.py", "--out", tmp_path / "runs")
    assert (missing.exit_code, "does not exist" in missing.output) == (2, True)


def test_a_pinned_port_lies_beside_its_runs_and_is_no_pin_of_a_night(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr("reports.registry.pin.git_state", lambda *_: ("1a2b3c4", False))
    root = tmp_path / "runs"
    write_run(root, titled("mine", 10))
    pinned = cli("pin", "latest", "--reason", "as it should be", "--out", root)
    assert pinned.exit_code == 0, pinned.output
    (file,) = (tmp_path / "pinned" / "mine").iterdir()
    assert str(file) in pinned.output
    assert cli("report", "pinned", "--out", root, "--page", tmp_path / "p.html").exit_code == 0
    later, other = titled("mine", 11), titled("other", 12)
    assert "pinned 2" in " ".join(judge(root, later).decision.against)
    assert "2026-11-10-p" not in " ".join(judge(root, other).decision.against)


def titled(name: str, day: int, value: float = 1e-8):
    row = measurement(case=f"{name}/plain", suite=name, value=value, tolerance=4e-6)
    suite = {"name": name, "status": "ran", "planned": 1, "executed": 1, "reason": ""}
    created = f"2026-11-{day}T00:00:00+00:00"
    return run(row, kind="port", id=f"2026-11-{day}-p", created=created, suites=[suite])


def test_a_pin_of_an_earlier_version_counts_where_it_is_and_moves_when_pinned_again(
    tmp_path: Path, monkeypatch
) -> None:
    """Of the two ports that shared its folder it is a pin of its own alone."""
    monkeypatch.setattr("reports.registry.pin.git_state", lambda *_: ("1a2b3c4", False))
    root, mine = tmp_path / "runs", titled("my model", 10)
    shared = pins.old_home(root, mine.manifest)
    assert shared is not None and shared.name == "my-model"
    pin = pins.pin_of(mine, {}, "as it should be", "2026-11-10")
    pins.write(pin, pins.file_of(pin, shared))
    assert pins.ids_of(root, mine.manifest) == {mine.id}
    late = titled("my model", 12, 2e-6)
    assert judge(root, late).decision.word is Word.REGRESSED
    # Negative controls: the other port of that folder, and a port without a pin.
    for name in ("my-model", "another"):
        assert judge(root, titled(name, 12, 2e-6)).decision.word is not Word.REGRESSED
        assert pins.pins_of(root, titled(name, 12).manifest).pins == ()
    write_run(root, late)
    answer = cli("pin", "latest", "--reason", "it is allowed to", "--out", root)
    assert answer.exit_code == 0 and "1 levels moved" in answer.output, answer.output
    assert not list(shared.iterdir())
    assert judge(root, titled("my model", 13, 2e-6)).decision.word is not Word.REGRESSED
    # The other port's own pin lies in that folder, and stays there.
    write_run(root, titled("my-model", 14))
    assert cli("pin", "latest", "--reason", "mine", "--out", root).exit_code == 0
    assert len(list(shared.iterdir())) == 1
    write_run(root, titled("my model", 15))
    assert cli("pin", "latest", "--reason", "better", "--out", root).exit_code == 0
    assert len(list(shared.iterdir())) == 1
    assert judge(root, titled("my-model", 16, 2e-6)).decision.word is Word.REGRESSED
