"""Fields and commands of a run that its page shows: each is what a person would write for it."""

from __future__ import annotations

import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from parity.engine.measure.measurement import Kind, Measurement, Verdict
from parity.megalodon import DIFFERENCES, SUITE
from parity.megalodon.cases import CASES
from parity.megalodon.known_differences import KNOWN_DIFFERENCES
from parity.tolerances import MESHES, NOISE_LEAST, PORT_EDGES, PORTS, PRODUCTS, TABLE
from reports.nightly.document import known_differences, with_tables
from reports.store.manifest import CaseInfo, CheckpointInfo
from reports.store.runs import Run
from reports.subjects.megalodon.checkpoint import case_info
from reports.verdict import replays as module
from reports.verdict.changes import What
from reports.verdict.decide import Decision, decide
from reports.verdict.history import Past
from reports.verdict.replays import (
    account_commands,
    command,
    port_command,
    program,
    replays,
    suite_of,
)
from tests.reports.nights import altered, failing, measurement, run


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program by one letter, so that commands are short."""
    monkeypatch.setattr(module, "program", lambda: "m")


def test_the_program_is_named_as_a_shell_would_find_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its path below the current folder, by its bare name, else by its whole path."""
    home, elsewhere = tmp_path / "a b" / "env", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (home / "bin").mkdir(parents=True)
    file = home / "bin" / "megalodon-numerics"
    file.write_text("#!/bin/sh\n", encoding="utf-8")
    file.chmod(0o755)
    other = elsewhere / file.name
    other.write_bytes(file.read_bytes())
    other.chmod(0o755)
    monkeypatch.setattr(sys, "prefix", str(home))
    for folder, path, expected in (
        (tmp_path, "", "'a b/env/bin/megalodon-numerics'"),
        (home, "", "bin/megalodon-numerics"),
        (home, str(home / "bin"), "bin/megalodon-numerics"),
        (elsewhere, "", f"'{file}'"),
        (elsewhere, str(home / "bin"), "megalodon-numerics"),
        # Another program of that name comes first.
        (elsewhere, f"{elsewhere}{os.pathsep}{home / 'bin'}", f"'{file}'"),
    ):
        monkeypatch.chdir(folder)
        monkeypatch.setenv("PATH", path)
        assert program() == expected, (folder, path)


def test_a_run_has_the_tolerances_and_known_differences_of_its_version() -> None:
    first, second, third, *_ = KNOWN_DIFFERENCES
    rows = [
        measurement(quantity=first.id, kind=Kind.KNOWN_DIFFERENCE, value=0.5, tolerance=1.0),
        failing(quantity=second.id, kind=Kind.KNOWN_DIFFERENCE, value=math.nan),
        # A gate that only has the name of one.
        failing(quantity=third.id, value=0.25),
    ]
    manifest = with_tables(run().manifest, rows)
    kinds = sum(len(row.kinds) for row in (*TABLE, *PORTS, *MESHES))
    assert len(manifest.tolerances) == kinds
    rule = TABLE[0]
    expected = {"edge": rule.edge, "kind": rule.kinds[0], "bound": rule.bound}
    assert manifest.tolerances[0] == expected | {"reason": rule.reason}
    entries = {entry["id"]: entry for entry in manifest.seams}
    assert list(entries) == [d.id for d in KNOWN_DIFFERENCES]
    plain = {n: getattr(first, n) for n in ("id", "reason", "bound", "measured")}
    assert entries[first.id] == plain | {"value": 0.5, "holds": True}
    assert (entries[second.id].get("value"), entries[second.id]["holds"]) == (None, False)
    assert entries[third.id].keys() == plain.keys()
    assert known_differences(rows) == manifest.seams
    # JSON has no infinity either.
    for value in (math.inf, -math.inf):
        entry = known_differences([replace(rows[0], value=value)])[0]
        assert entry["id"] == first.id and "value" not in entry


@pytest.mark.parametrize(
    ("changes", "suite"),
    [
        ({"suite": "mesh", "edge": PRODUCTS}, "mesh"),
        ({"edge": PRODUCTS}, "products"),
        ({"edge": min(PORT_EDGES)}, "mla-moe"),
        ({"edge": "jax32:oracle", "kind": Kind.KNOWN_DIFFERENCE}, "seams"),
        ({"edge": "jax32:oracle"}, "parity"),
    ],
    ids=str,
)
def test_a_row_without_a_suite_has_that_of_its_edge_or_kind(
    changes: dict[str, Any], suite: str
) -> None:
    assert suite_of(replace(measurement(), **{"suite": "", **changes})) == suite


def test_a_case_is_stored_with_what_it_is() -> None:
    for case in CASES:
        assert case_info(case) == CaseInfo(
            case.name,
            case.why,
            case.why,
            case.hash,
            case.batch_size,
            case.length,
            case.config.to_dict(),
        )


def changed(night: Run, *cases: tuple[str, What]) -> Decision:
    """The decision on a night, with a change of each of these cases."""
    decision = decide(night, None)
    first = next(c for c in decide(run(failing()), None).changes)
    changes = tuple(replace(first, case=case, what=what) for case, what in cases)
    return replace(decision, changes=changes)


@pytest.mark.usefixtures("short")
def test_each_case_that_failed_or_left_its_level_has_a_command() -> None:
    difference = KNOWN_DIFFERENCES[0].id
    rows: list[Measurement] = [
        failing(case="plain"),
        failing(case="plain", quantity="loss"),
        measurement(case="stream"),
        measurement(case="adamw", verdict=Verdict.NOT_COMPARABLE),
        failing(case="shared", quantity=difference, kind=Kind.KNOWN_DIFFERENCE),
    ]
    night = run(*rows, reference={"kind": "live"})
    kinds = {What.WORSE: "w", What.DRIFTED: "d x"}
    decision = changed(night, *((kinds.get(what, "other"), what) for what in What))
    commands = [(entry["label"], entry["command"]) for entry in replays(night, decision)]
    assert commands == [
        ("everything", "m nightly"),
        *sorted(
            (
                ("d x", "m nightly --case 'd x'"),
                (difference, f"m nightly --case {difference}"),
                ("plain", "m nightly --case plain"),
                ("w", "m nightly --case w"),
            )
        ),
    ]


@pytest.mark.usefixtures("short")
def test_a_known_difference_that_left_its_history_is_repeated_by_its_own_name() -> None:
    """Its case is that of all of them, which no command selects."""
    names = [difference.id for difference in KNOWN_DIFFERENCES[:2]]
    rows = [
        measurement(case=DIFFERENCES, quantity=name, kind=Kind.KNOWN_DIFFERENCE, deterministic=None)
        for name in names
    ]
    night = run(*rows, reference={"kind": "live"})
    decision = decide(night, None, {rows[1].key: Past((1e-7,) * NOISE_LEAST)})
    assert [(c.quantity, c.what) for c in decision.changes] == [(names[1], What.WORSE)]
    _, *commands = replays(night, decision)
    assert commands == [{"label": names[1], "command": f"m nightly --case {names[1]}"}]


@pytest.mark.usefixtures("short")
def test_everything_is_what_the_run_was_asked_for() -> None:
    """A whole night does not repeat one of two cases, nor a healthy one that of a bug."""
    given = {"name": "mine", "folder": "a b/mine"}
    planted = {"selected": ["plain", "d x"], "fault": "rope_sign", "checkpoint": given}
    for facts, expected in (
        (planted, "--case plain --case 'd x' --fault rope_sign --checkpoint 'a b/mine'"),
        ({"reference": {"kind": "recorded"}}, "--reference recorded"),
        # What pytest was asked for are no cases of a night.
        ({"kind": "pytest", "selected": ["-k x"]}, ""),
    ):
        night = run(failing(), **{"reference": {"kind": "live"}, **facts})
        [first, *_] = replays(night, decide(night, None))
        assert first == {"label": "everything", "command": f"m nightly {expected}".rstrip()}


@pytest.mark.usefixtures("short")
def test_a_command_repeats_a_case_with_the_options_of_its_run() -> None:
    trained = next(case.name for case in CASES if case.checkpoint)
    given = CheckpointInfo("mine", folder="a b/mine")
    live = run(reference={"kind": "live"}).manifest
    for manifest, case, expected in (
        (live, "plain", "--case plain"),
        (run().manifest, "plain", "--case plain --reference recorded"),
        (replace(live, fault="a'b"), "plain", "--case plain --fault 'a'\"'\"'b'"),
        (replace(live, checkpoint=given), "plain", "--case plain"),
        (
            replace(live, checkpoint=given),
            "checkpoint",
            f"--case {trained} --checkpoint 'a b/mine'",
        ),
        (replace(live, checkpoint=CheckpointInfo("x")), "checkpoint", "--case checkpoint"),
        (live, "checkpoint", "--case checkpoint"),
        (
            replace(run().manifest, checkpoint=given, fault="f"),
            "checkpoint",
            f"--case {trained} --fault f --reference recorded --checkpoint 'a b/mine'",
        ),
    ):
        assert command(case, manifest) == f"m nightly {expected}"


@pytest.mark.usefixtures("short")
def test_ports_are_repeated_by_their_files() -> None:
    assert port_command("a b.py") == "m port 'a b.py'"
    assert port_command("a.py", "x y") == "m port a.py --case 'x y'"
    ports = [
        {"title": title, "file": file, "holds": holds, "sentence": ""}
        for title, file, holds in (
            ("one", "b.py", False),
            ("two", "a.py", True),
            ("three", "b.py", False),
            ("four", "", False),
        )
    ]
    night = altered(run(failing()), ports=ports)
    told = replays(night, decide(night, None))
    assert [(entry["label"], entry["command"]) for entry in told] == [
        ("all of b.py", "m port b.py"),
        ("all of a.py", "m port a.py"),
        ("one", "m port b.py --case one"),
        ("three", "m port b.py --case three"),
    ]
    # The only port of a run is all of its file.
    night = altered(night, ports=ports[:1])
    told = replays(night, decide(night, None))
    assert [entry["label"] for entry in told] == ["all of b.py"]


@pytest.mark.usefixtures("short")
def test_a_case_is_explained_and_shrunk_unless_it_is_a_trajectory() -> None:
    for case in CASES:
        verbs = ["explain"] if case.steps else ["explain", "shrink"]
        assert account_commands(case.name, SUITE, "f") == [
            {
                "label": f"{verb} {case.name}",
                "command": f"m parity {verb} {case.name} --fault f",
            }
            for verb in verbs
        ]
    assert any(case.steps for case in CASES)
    assert account_commands(CASES[0].name, SUITE, None)[0]["command"].endswith(CASES[0].name)
    assert account_commands("of an earlier version", SUITE, None) == []
    # A user's port may have a case of the same name.
    assert account_commands(CASES[0].name, "port", None) == []
