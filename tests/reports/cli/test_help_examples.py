"""Every example of every `--help`, run in a fresh clone after one night and one port.

What measures for minutes is stopped where the measuring begins, its words, names and files read.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest

from parity.engine.measure.measurement import Kind
from reports.cli import main
from reports.cli.program import SECTIONS
from reports.store.runs import write_run
from stability.repeat import DigestLog, digests_of
from tests.helpers import ROOT, cli
from tests.reports.nights import earlier, measurement, run

HEAVY = {
    "adopt": ["parity.port.adopt"],
    "activations": ["reports.cli.views.activations.examine"],
    "bench": ["reports.bench.run.bench"],
    "capture": ["parity.sides.capture"],
    "case": ["reports.cases.run"],
    "demo": ["reports.nightly.run.nightly"],
    "dtypes check": ["reports.cli.dtypes._chosen"],
    "dtypes renew": ["reports.cli.dtypes._chosen"],
    "export-model": ["parity.checkpoint_pair.deployment.export_pretrained"],
    "mesh": ["parity.mesh.MeshComparison.run"],
    "nightly": [
        "parity.megalodon.suite.choose_reference",
        "reports.cli.measure.run_again",
        "parity.executors.sweep.open_executor",
    ],
    "parity": ["reports.cli.checkpoint_pair.compare"],
    "retire": ["reports.registry.retire.retire"],
    "parity calibrate": ["parity.executors.sweep.open_executor"],
    "parity explain": ["reports.cli.views.explain.explain"],
    "parity faults": ["parity.executors.sweep.open_executor"],
    "parity record": [
        "parity.megalodon.recordings.record_all",
        "parity.deepseek_v3.recordings.record_all",
    ],
    "parity shrink": ["reports.cli.views.explain.shrink_case"],
    # It writes into the installed package.
    "pin": ["reports.registry.pin.pin_run"],
    "port": ["reports.ports.compare_ports", "reports.cli.ports.run_again"],
    "tasks": ["reports.cli.views.tasks.agreements"],
    "stability": ["reports.cli.views.diagnosis.diagnose", "stability.moe.examine.examine"],
    "subject emergency": ["stability.moe.fit.emergency"],
    "subject fit": ["stability.moe.fit.fit"],
    "subject parity": ["stability.moe.results.compare_all"],
}
"""Where the work of a command begins that takes longer than a test may."""
STANDS_FOR = {"A": "latest", "B": "latest", "pinned": "latest"}
"""Words of examples that every reader replaces."""


def walk(group: click.Group = main, path: str = "") -> Iterator[tuple[str, str]]:
    """Every example, with the command whose help shows it."""
    for name, command in (
        {"": group, **group.commands}.items() if not path else group.commands.items()
    ):
        yield from ((f"{path}{name}", line) for line in shown(command))
        if isinstance(command, click.Group) and command is not group:
            yield from walk(command, f"{path}{name} ")


def shown(command: click.Command) -> list[str]:
    lines = [line.strip() for line in (command.epilog or "").splitlines()]
    return [line for line in lines if line.startswith("megalodon-numerics ")]


EXAMPLES = sorted({line for _, line in walk()})


def command_of(words: list[str]) -> str:
    """The command that words call, groups in front."""
    command, names = main, []
    for word in words:
        if not isinstance(command, click.Group) or word not in command.commands:
            break
        command = command.commands[word]
        names.append(word)
    return " ".join(names)


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of a fresh clone, and the runs that `nightly` and `port` leave there."""
    listed = [
        "git",
        "-C",
        str(ROOT),
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]
    names = subprocess.run(listed, capture_output=True, check=True).stdout.decode().split("\0")
    for top in {name.partition("/")[0] for name in names if name}:
        if (ROOT / top).exists():
            (tmp_path / top).symlink_to(ROOT / top)
    suites = [{"name": "parity", "status": "ran", "planned": 1, "executed": 1, "reason": ""}]
    rows = measurement(case="plain"), measurement(case="plain", quantity="loss", kind=Kind.LOSS)
    for day in (18, 19):
        write_run(tmp_path / "runs", earlier(*rows, suites=suites, day=day), lambda _: "<p></p>")
    port = earlier(
        measurement(case="mlp", suite="mlp"), kind="port", suites=[{**suites[0], "name": "mlp"}]
    )
    write_run(tmp_path / "runs", replace(port, manifest=replace(port.manifest, id="a-port-mlp")))
    # Begun just now: an example refuses what is older.
    newest = run(*rows, suites=suites, created=datetime.now(UTC).isoformat(timespec="seconds"))
    write_run(tmp_path / "runs", newest, lambda _: "<p></p>")
    # Digests of two trainings.
    for name in ("first.jsonl", "second.jsonl"):
        with DigestLog(tmp_path / name) as log:
            log.write(0, digests_of({"w": np.ones(2, np.float32)}))
    # Shards of the reader's own.
    shard = {"kind": "shard", "suites": suites, "plan": ["plain"]}
    write_run(tmp_path / "shards", run(*rows, shard={"index": 1, "count": 1}, **shard))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("click.launch", lambda _: None)
    monkeypatch.setattr("webbrowser.open", lambda _: None)
    return tmp_path


def call(line: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[str]]:
    """Run an example; return its result, and where it was stopped."""
    reached: list[str] = []

    def stop(place: str) -> Any:
        def begin(*_: object, **__: object) -> None:
            reached.append(place)
            raise click.exceptions.Exit(0)

        return begin

    words = shlex.split(line.partition(">")[0])[1:]
    name = command_of(words)
    for place in HEAVY.get(name, ()):
        monkeypatch.setattr(place, stop(place))
    others = {"compare": STANDS_FOR, "gate": {"pinned": "2026-11-18"}}.get(name, {})
    replaced = [others.get(word, word) for word in words]
    return cli(*replaced), reached


@pytest.mark.parametrize("line", EXAMPLES)
def test_an_example_of_the_help_works_on_a_fresh_clone(line: str, clone: Path, monkeypatch) -> None:
    result, reached = call(line, monkeypatch)
    assert result.exit_code == 0, result.output
    assert len(reached) == (command_of(shlex.split(line)[1:]) in HEAVY)


@pytest.mark.parametrize(
    "line",
    [
        "megalodon-numerics nightly --case plane",
        "megalodon-numerics port my_port.py",
        "megalodon-numerics parity --torch nowhere --text README.md",
        "megalodon-numerics mesh my_step.py",
        "megalodon-numerics history plane",
        "megalodon-numerics export latest arrow",
    ],
)
def test_an_example_that_would_not_work_is_seen(line: str, clone: Path, monkeypatch) -> None:
    monkeypatch.delitem(HEAVY, "parity")
    result, reached = call(line, monkeypatch)
    assert (result.exit_code, reached) == (2, []), result.output


def test_the_help_has_every_command_once_in_a_line_that_fits_a_terminal() -> None:
    listed = [name for commands in SECTIONS.values() for name in commands]
    assert sorted(listed) == sorted(main.commands)
    text = cli("--help", terminal_width=80, max_content_width=80).output
    assert max(map(len, text.splitlines())) <= 80
    assert "..." not in text.partition("Begin here")[2]


@pytest.mark.parametrize("name", ["docs/commands.md", "docs/guide.md", "README.md"])
def test_every_command_that_a_document_names_exists(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    calls = re.findall(r"megalodon-numerics ((?:[a-z][a-z-]*\s?)+)", text)
    assert calls
    for call in calls:
        first, *_ = call.split()
        assert first in main.commands, call


def test_the_page_of_commands_has_all_of_them() -> None:
    text = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    # `dtypes` and `subject` are groups, named with what they do.
    missing = [name for name in main.commands if not re.search(rf"[`, ]{name}[` ]", text)]
    assert not missing


def test_a_command_of_no_section_is_shown_all_the_same(monkeypatch) -> None:
    monkeypatch.delitem(SECTIONS["Begin here"], "doctor")
    assert "doctor" in cli("--help").output.partition("More:")[2].partition("Examples")[0]
