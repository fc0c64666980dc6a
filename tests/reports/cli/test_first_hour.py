"""The first hour: what somebody mistypes, completes, looks at first, and runs again on saving."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from parity.engine.measure.contract import Gate
from parity.faults import Fault
from parity.mesh import suite as meshes
from reports.cli import doctor as doctor_module
from reports.cli.doctor import Line
from reports.cli.views import doctor as doctor_view
from reports.cli.watch import MODEL, _changed, _stamps
from reports.registry.lookback import measured_names
from reports.store.runs import list_runs, write_run
from reports.subjects.megalodon import suites as suites_module
from tests.helpers import ROOT, cli
from tests.reports.nights import bench, earlier, failing, measurement, stored_below

PASSED = [{"name": "parity", "status": "ran", "planned": 1, "executed": 1, "reason": ""}]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """One night that measured two quantities of one case."""
    rows = measurement(case="plain"), measurement(case="plain", quantity="layers.0.cema")
    write_run(tmp_path, earlier(*rows, suites=PASSED, verdict="PASS"))
    return tmp_path


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("nightly --case plian", "no case 'plian'. Did you mean 'plain'"),
        ("nightly --case mla-moe-tied", "Did you mean 'mla-moe tied'"),
        ("nightly --fault rope_key_one_late", "Did you mean 'rope_keys_one_late'"),
        ("nightly --fault zzz", "`megalodon-numerics parity faults --list` lists all"),
        ("demo --fault conjugated", "no fault 'conjugated'"),
        ("parity explain strem", "Did you mean 'stream'"),
        ("parity explain plain --fault cema_not_casual", "Did you mean 'cema_not_causal'"),
        ("parity shrink plainn", "Did you mean 'plain'"),
        ("parity faults --fault rope_signs", "Did you mean 'rope_sign'"),
        ("parity faults --family cema_", "no family 'cema_'. Did you mean 'CEMA'"),
        ("parity record --case plian", "Did you mean 'plain'"),
        ("dtypes show float", "no pinned table 'float'. Did you mean 'float32'"),
        ("nigtly", "Did you mean 'nightly'?"),
        ("nightly --cse plain", "Did you mean '--case'?"),
    ],
)
def test_what_is_mistyped_is_answered_with_the_closest(line: str, said: str) -> None:
    result = cli(*line.split())
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_capitals_of_a_name_do_not_matter() -> None:
    lines = cli("parity", "faults", "--list", "--family", "cema").output.splitlines()
    assert any("cema_not_causal" in line for line in lines)
    assert not any("rope_sign" in line for line in lines)


def test_cases_and_faults_are_listed_with_what_they_are() -> None:
    cases = cli("parity", "cases").output
    for name in ("plain", "nvfp4", "mla-moe tied", "mesh megalodon", "ema-mask"):
        assert f" {name} " in cases
    # Words that only the source explains have no place here, and every case has a reason.
    assert not re.search(r"triangle|seam", cases)
    table, _, below = cases.partition("\n\n")
    assert "model: the JAX model, megalodon-hf and a float64 oracle" in " ".join(below.split())
    for name in ("ema-mask", "nvfp4", "mla-moe tied", "port/plain", "mesh megalodon"):
        (row,) = [line for line in table.splitlines() if line.startswith(f" {name}  ")]
        assert len(re.split(r"\s{2,}", row.strip())) == 3
    faults = cli("parity", "faults", "--list").output
    assert "keys counted from 1" in faults


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("nosuch",), "no gate of case nosuch in 1 run"),
        (("plan",), "Did you mean 'plain'?"),
        (("plain", "layers.0.cena"), "Did you mean 'layers.0.cema'?"),
    ],
)
def test_history_of_what_was_never_measured_is_an_error(runs: Path, asked, said: str) -> None:
    result = cli("history", *asked, "--out", runs)
    assert (result.exit_code, said in result.output) == (2, True)
    assert cli("history", "plain", "--out", runs).exit_code == 0


def test_history_without_runs_says_what_makes_one(tmp_path: Path) -> None:
    result = cli("history", "nosuch", "--out", tmp_path)
    assert (result.exit_code, "`nightly` makes one" in result.output) == (2, True)
    everything = cli("history", "--out", tmp_path)
    assert (everything.exit_code, "`nightly` makes" in everything.output) == (0, True)
    result = cli("gate", "latest", "--out", tmp_path)
    assert (result.exit_code, "`nightly` makes one" in result.output) == (2, True)


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("nightly --fault rope_k", {"rope_keys_one_late"}),
        ("nightly --case mesh", {*meshes.SUBJECTS, *meshes.CASES}),
        ("parity explain length_c_p", {"length_c_plus_1"}),
        ("parity faults --family R", {"RoPE", "runtime"}),
        ("dtypes show torch_b", {"torch_bfloat16"}),
        ("history p", {"plain"}),
        ("history plain lo", {"logits"}),
        ("schema parity-f", {"parity-faults"}),
        ("export latest open", {"openmetrics"}),
    ],
)
def test_names_are_completed_in_the_shell(runs: Path, monkeypatch, words: str, offered) -> None:
    monkeypatch.chdir(runs)
    (runs / "runs").mkdir()
    for run in [path for path in stored_below(runs) if path.name != "runs"]:
        run.rename(runs / "runs" / run.name)
    text = f"megalodon-numerics {words}"
    asked = {
        "_MEGALODON_NUMERICS_COMPLETE": "bash_complete",
        "COMP_WORDS": text,
        "COMP_CWORD": str(len(text.split()) - 1),
    }
    result = cli(prog_name="megalodon-numerics", env=asked)
    assert {line.partition(",")[2] for line in result.output.splitlines()} == offered


def test_completion_where_there_are_no_runs_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert measured_names(str(tmp_path)) == []
    words = {"COMP_WORDS": "megalodon-numerics history p", "COMP_CWORD": "2"}
    asked = {"_MEGALODON_NUMERICS_COMPLETE": "bash_complete", **words}
    assert cli(prog_name="megalodon-numerics", env=asked).output.strip() == ""


def test_the_list_has_a_verdict_of_each_run_that_can_have_one(runs: Path) -> None:
    write_run(runs, bench(day=20))
    write_run(runs, earlier(failing(), suites=PASSED, day=21))
    lines = cli("list", "--out", runs).output.splitlines()[1:]
    assert [line.split()[1:3] for line in lines] == [
        ["PASS", "nightly"],
        ["none", "bench"],
        ["gate", "RUN"],
    ]


def test_the_doctor_says_first_what_needs_doing_in_eighty_columns(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS", raising=False)
    monkeypatch.setattr(doctor_module, "why_unavailable", lambda: "megalodon is not installed")
    text = cli("doctor", "--out", tmp_path).output
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert text.index("unset NVIDIA_TF32_OVERRIDE") < text.index("`make reference` installs it")
    assert text.index("`make reference` installs it") < text.index("What is here")
    assert next(line for line in lines if line) == "To do"


def test_the_doctor_who_finds_nothing_says_so(capsys) -> None:
    doctor_view.show_lines([Line("jax", "0.10"), Line("cache", "none", "set one", optional=True)])
    assert capsys.readouterr().out.startswith("Nothing needs doing")


def test_programs_compiled_in_another_way_are_named(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    lines = json.loads(cli("doctor", "--out", tmp_path, "--json").stdout)
    [line] = [line for line in lines if line["topic"] == "LLVM's optimisations"]
    assert "unset JAX_DISABLE_MOST_OPTIMIZATIONS" in line["advice"]


@pytest.fixture
def opened(monkeypatch) -> list[str]:
    """What the browser was asked for."""
    addresses: list[str] = []
    monkeypatch.setattr("webbrowser.open", addresses.append)
    return addresses


def stand_in(monkeypatch) -> None:
    """Measure nothing: a case holds, unless a bug is planted."""
    planted: list[Fault] = []

    @contextlib.contextmanager
    def plant(self: Fault) -> Iterator[None]:
        planted.append(self)
        yield
        planted.pop()

    def case(*_: object) -> Iterator[object]:
        make = failing if planted else measurement
        yield make(case="length_c", quantity="layers.0.inner", stage=1)

    def planned(*_: object) -> Iterator[Gate]:
        yield Gate.of(measurement(case="length_c", quantity="layers.0.inner", stage=1))

    monkeypatch.setattr(Fault, "planted", plant)
    monkeypatch.setattr(suites_module.Suite, "case", case)
    monkeypatch.setattr("parity.megalodon.contract.gates", planned)


@pytest.mark.parametrize(
    "real", [False, pytest.param(True, marks=[pytest.mark.sweep, pytest.mark.optimised])]
)
def test_the_demonstration_holds_and_then_finds_its_bug(
    tmp_path: Path, opened, monkeypatch, real: bool
) -> None:
    if not real:
        stand_in(monkeypatch)
    out = tmp_path / "two runs"
    result = cli("demo", "--out", out)
    assert result.exit_code == 0, result.output
    healthy, broken, *look, ask = result.stdout.splitlines()
    pages = [Path(line.partition(": ")[2]) for line in (healthy, broken)]
    assert (healthy.split(":")[0], broken.split(":")[0]) == ("PASS", "REGRESSED")
    assert opened == [page.as_uri() for page in pages]
    assert [line[:2] for line in look] == ["1.", "2.", "3."]
    assert "starts at layers.0.inner" in look[1] and "keys counted from 1" in look[1]
    page = pages[1].read_text(encoding="utf-8")
    assert "It starts at layers.0.inner" in page
    # The planted line itself, not the later product of which position 0 is right by chance.
    assert ("(_keys_one_late)" in page) is real
    commands = re.findall(r"`([^`]+)`", ask)
    assert [command.split()[1] for command in commands] == ["list", "gate"]
    # Each can be copied as it stands: the program's own name and every option are in it.
    for command in commands:
        program, *arguments = shlex.split(command)
        assert program == "megalodon-numerics"
        assert cli(*arguments).exit_code == (0 if "list" in arguments else 1)
    assert [run.manifest.fault for run in list_runs(out)[0]] == [None, "rope_keys_one_late"]


def test_a_demonstration_in_which_nothing_is_found_fails(tmp_path: Path, monkeypatch, opened):
    def case(*_: object) -> Iterator[object]:
        yield measurement(case="length_c")

    monkeypatch.setattr(suites_module.Suite, "case", case)
    result = cli("demo", "--out", tmp_path, "--no-open", "--quiet")
    assert (result.exit_code, opened) == (1, [])
    assert "starts at nothing" in result.stdout


def watched(folder: Path, *arguments: str, packages: Path = ROOT) -> subprocess.Popen[str]:
    """A session with --watch, whose lines can be read as they come."""
    # A shell's background jobs ignore Ctrl-C, and so would the session that they start.
    program = (
        "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "runpy.run_module('reports.cli', run_name='__main__', alter_sys=True)"
    )
    return subprocess.Popen(
        [sys.executable, "-P", "-c", program, *arguments, "--watch"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(packages)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def until(session: subprocess.Popen[str], what: str) -> str:
    """Read lines up to one with `what`; they are in the message where it never comes."""
    assert session.stdout is not None
    text = ""
    # A session that waits for a change writes nothing, and would be waited for in turn.
    last = threading.Timer(300, session.kill)
    last.start()
    try:
        for line in session.stdout:
            text += line
            if what in line:
                return text
    finally:
        last.cancel()
    raise AssertionError(f"{what!r} never came: {text}")


@pytest.mark.sweep
def test_a_port_is_compared_again_when_its_source_changes(tmp_path: Path) -> None:
    source = (ROOT / "docs" / "examples" / "my_port.py").read_text(encoding="utf-8")
    file = tmp_path / "my_port.py"
    file.write_text(source, encoding="utf-8")
    theirs = "raise SystemExit('a module of the user, not ours')"
    (tmp_path / "reports.py").write_text(theirs, encoding="utf-8")
    session = watched(tmp_path, "port", "my_port.py", "--no-gradients", "--no-bfloat16", "--quiet")
    try:
        assert "PASS" in until(session, "; watching")
        file.write_text(source.replace("APPROXIMATE = False", "APPROXIMATE = True"), "utf-8")
        text = until(session, "exit code 1; watching")
        assert "changed: my_port.py" in text
        assert "REGRESSED" in text
        time.sleep(1.5)
        session.send_signal(signal.SIGINT)
        rest, _ = session.communicate(timeout=30)
        # Nothing changed since, so nothing ran; and what was answered last is the answer.
        assert "changed" not in rest
        assert session.returncode == 1
    finally:
        session.kill()
        session.communicate()
    assert len(list_runs(tmp_path / "runs")[0]) == 2


@pytest.mark.sweep
def test_a_case_is_compared_again_when_the_model_changes(tmp_path: Path) -> None:
    for package in ("megalodon_jax", "parity", "stability", "reports"):
        shutil.copytree(ROOT / package, tmp_path / package)
    model = tmp_path / "megalodon_jax" / "layers" / "rotary.py"
    night = ("nightly", "--case", "length_c", "--reference", "recorded", "--quiet")
    session = watched(tmp_path, *night, packages=tmp_path)
    try:
        assert "PASS" in until(session, "exit code 0; watching")
        right, wrong = "real * cos - imag * sin", "real * cos + imag * sin"
        source = model.read_text(encoding="utf-8")
        assert source.count(right) == 1
        model.write_text(source.replace(right, wrong), encoding="utf-8")
        assert "It starts at layers.0.inner" in until(session, "exit code 1; watching")
        model.write_text(source, encoding="utf-8")
        # The run before it is the broken one, from which every value differs.
        assert "All gates hold" in until(session, "exit code 0; watching")
    finally:
        session.send_signal(signal.SIGINT)
        session.communicate(timeout=60)


def test_every_change_of_a_source_is_seen_and_of_nothing_else(tmp_path: Path) -> None:
    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")

    def seen(change: Callable[[], object]) -> list[str]:
        before = _stamps(tmp_path)
        change()
        return [path.name for path in _changed(before, _stamps(tmp_path))]

    write("port.py", "1")
    write("layers/inner.py", "1")
    write(".venv/theirs.py", "1")
    assert seen(lambda: None) == []
    assert seen(lambda: write("layers/inner.py", "22")) == ["inner.py"]
    state = (tmp_path / "port.py").stat()
    later = state.st_mtime_ns + 10**9
    assert seen(lambda: os.utime(tmp_path / "port.py", ns=(later, later))) == ["port.py"]
    assert seen(lambda: write("port.py", "2")) == ["port.py"], "as long as before"
    assert seen(lambda: write("new.py", "1")) == ["new.py"]
    assert seen((tmp_path / "new.py").unlink) == ["new.py"]
    assert seen(lambda: write(".venv/theirs.py", "22")) == []
    assert seen(lambda: write("notes.txt", "1")) == []


def test_a_night_is_watched_for_some_cases_only() -> None:
    result = cli("nightly", "--watch")
    assert (result.exit_code, "select cases with --case" in result.output) == (2, True)
    missing = cli("port", "nowhere.py", "--watch")
    assert (missing.exit_code, "expected a Python file to watch" in missing.output) == (2, True)


def test_the_source_that_a_night_watches_is_the_model() -> None:
    assert (MODEL / "layers").is_dir()
