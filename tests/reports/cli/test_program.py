"""The command line itself: help, completion, progress, a full disk, and one summary for CI."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from parity.executors.machine import FIELDS
from reports.cli import main, program
from reports.cli.console import Progress
from reports.cli.views.summary import LIMIT, markdown
from reports.store import runs
from reports.store.runs import write_run
from reports.verdict.decide import ExitCode, decide
from tests.helpers import cli
from tests.reports.nights import earlier, failing, measurement, run

CACHE = "JAX_COMPILATION_CACHE_DIR"


def commands(group: click.Group = main, path: str = "") -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        yield f"{path}{name}", command
        if isinstance(command, click.Group):
            yield from commands(command, f"{path}{name} ")


ALL = dict(commands())


@pytest.mark.parametrize("path", ALL)
def test_every_command_explains_itself_by_examples_of_what_there_is(path: str) -> None:
    command = ALL[path]
    shown = cli(*path.split(), "--help").output
    assert command.help
    assert "Examples:" in shown
    for parameter in command.params:
        assert isinstance(parameter, click.Argument) or parameter.help, parameter.name
    lines = [line.strip() for line in (command.epilog or "").splitlines()]
    examples = [line for line in lines if line.startswith("megalodon-numerics ")]
    assert examples
    for line in examples:
        check(shlex.split(line.partition(">")[0])[1:])


def check(words: list[str]) -> None:
    """Fail on a command or an option that there is not; paths in examples need not exist."""
    command: click.Command = main
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        command, words = command.commands[words[0]], words[1:]
    options = {name for p in command.params for name in (*p.opts, *p.secondary_opts)}
    assert {word for word in words if word.startswith("-")} <= options


def test_the_exit_codes_of_the_help_are_those_of_the_code() -> None:
    shown = cli("--help").output.partition("Exit codes:")[2]
    assert [int(line.split()[0]) for line in shown.split("\n") if line.strip()] == list(ExitCode)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_are_those_of_click(shell: str, tmp_path: Path, monkeypatch) -> None:
    result = cli("completion", shell)
    assert result.exit_code == 0
    assert "_MEGALODON_NUMERICS_COMPLETE" in result.output
    folder = write_run(tmp_path / "runs", run(measurement()))
    monkeypatch.chdir(tmp_path)
    words = {"COMP_WORDS": "megalodon-numerics gate 2026", "COMP_CWORD": "2"}
    asked = {"_MEGALODON_NUMERICS_COMPLETE": "bash_complete", **words}
    text = cli(prog_name="megalodon-numerics", env=asked).output
    assert folder.name in text


def test_progress_is_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture) -> None:
    for quiet, lines in ((False, 1), (True, 0)):
        report = Progress(quiet)
        report.step(1, 3)
        report("one [bold]case[/bold] done")
        report.stop()
        text = capsys.readouterr()
        assert (text.out, len(text.err.splitlines())) == ("", lines)
        assert ("one [bold]case[/bold] done" in text.err) is not quiet


def test_the_time_left_is_a_line_now_and_then_without_a_terminal(
    capsys: pytest.CaptureFixture,
) -> None:
    report = Progress(False)
    for done in range(3):
        report.step(done, 3, "about 5 minutes left")
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith("0 of 3, about 5 minutes left")


def test_progress_on_a_terminal_has_a_bar_and_no_colour_if_asked(monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    report = Progress(False)
    report.step(1, 3)
    report("a line above the bar")
    report.step(3, 3)
    report.stop()
    timed = Progress(False)
    timed.step(1, 3, "about 5 minutes left")
    timed.stop()
    text = capsys.readouterr()
    assert text.out == ""
    assert "about 5 minutes left" in text.err
    assert "a line above the bar" in text.err
    assert "3/3" in text.err
    assert "\x1b[3" not in text.err


def test_a_full_disk_is_an_error_that_leaves_nothing(tmp_path: Path, monkeypatch) -> None:
    write_run(tmp_path / "runs", run(measurement()))

    def full(self: Path, text: str, **_: object) -> None:
        self.write_bytes(b"half")
        raise OSError(28, "No space left on device", str(self))

    page = tmp_path / "page.html"
    monkeypatch.setattr(runs.Path, "write_text", full)
    result = cli("report", "latest", "--out", tmp_path / "runs", "--page", page)
    assert (result.exit_code, "No space left on device" in result.output) == (2, True)
    assert [p.name for p in tmp_path.iterdir()] == ["runs"]


def test_a_summary_that_cannot_be_written_costs_no_verdict(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "runs", run(failing()))
    result = cli("gate", folder, "--summary-md", folder / "no" / "x")
    assert result.exit_code == 1
    assert "REGRESSED" in result.output
    assert "the summary was not written" in result.output


def test_a_summary_is_worst_first_and_short_enough() -> None:
    many = [measurement(quantity=f"q{i}", value=2e-6) for i in range(2_000)]
    night = run(*many, failing(quantity="broken | <b>`x`"))
    before = earlier(*(measurement(quantity=m.quantity) for m in many))
    limit = LIMIT // 20
    text = markdown(night, decide(night, before), limit)
    assert limit / 2 < len(text.encode()) <= limit
    rows = [line for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    assert rows[1].startswith("| new failure | broken \\| \\<b\\>\\`x\\` |")
    assert text.rstrip().endswith("more changes")
    assert 0 < len(rows) - 1 < 2_001
    left = int(text.rstrip().split()[-3].replace(",", ""))
    assert len(rows) - 1 + left == 2_001
    short = markdown(night, decide(night, None), limit=2000)
    assert len(short.encode()) <= 2000


def test_help_is_instant_because_nothing_heavy_is_imported_for_it() -> None:
    code = (
        "import sys, reports.cli; print(*{'jax', 'numpy', 'pyarrow', 'rich'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_programs_are_stored_for_each_machine_unless_somebody_said_where(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def place(model: str, home: Path = tmp_path, said: str | None = None) -> str | None:
        monkeypatch.setattr(program, "host", lambda: dict.fromkeys(FIELDS, model))
        monkeypatch.setattr(program.os, "environ", {"XDG_CACHE_HOME": str(home / "caches")})
        if said is not None:
            program.os.environ[CACHE] = said
        program._store_programs()
        return program.os.environ.get(CACHE)

    here = place("here")
    assert here is not None
    assert Path(here).is_relative_to(tmp_path / "caches" / "megalodon-numerics")
    assert place("here") == here != place("there")
    assert place("here", said="/elsewhere") == "/elsewhere"
    assert place("here", said="") == "", "said to be none"
    monkeypatch.setattr(program.os, "access", lambda *_: False)
    assert place("here") is None, "where nothing can be written, JAX would warn of every program"


def test_completion_of_a_former_command_is_quiet() -> None:
    words = {"COMP_WORDS": "megalodon-numerics bless l", "COMP_CWORD": "2"}
    asked = {"_MEGALODON_NUMERICS_COMPLETE": "bash_complete", **words}
    result = cli(prog_name="megalodon-numerics", env=asked)
    assert result.exit_code == 0, result.output
    assert "is now" not in result.output
