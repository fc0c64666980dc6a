"""What a night says of the code that it measured: git's commit, its changes, and digests."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest

from parity.executors import identity
from parity.executors.identity import Watch
from parity.megalodon.recordings import RecordedReference
from reports.provenance import code, environment
from reports.provenance.code import Start, git_state
from reports.provenance.environment import ABSENT, PACKAGES, describe, new_manifest, version_of
from reports.store.schema import RunKind, StoreError

STARTED = datetime(2026, 11, 20, 21, 30, 5, tzinfo=UTC)


def git(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with two folders, each with a file that is committed."""
    root = tmp_path / "checkout"
    for name in ("package", "docs"):
        (root / name).mkdir(parents=True)
        (root / name / "a").write_text("a", encoding="utf-8")
    git(tmp_path, "init", "-q", str(root))
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "first")
    return root


def test_any_change_of_a_checkout_makes_it_dirty(checkout: Path) -> None:
    """Of a file that git knows or not, and whichever of its folders is asked about."""
    head = git(checkout, "rev-parse", "HEAD")
    for name in ("package/a", "docs/a", "package/new", "new"):
        file = checkout / name
        before = file.read_text(encoding="utf-8") if file.exists() else None
        assert git_state(checkout / "package") == (head, False)
        file.write_text("b", encoding="utf-8")
        for aside in (None, checkout / "runs", checkout.parent / "runs", checkout):
            assert git_state(checkout / "package", aside) == (head, True), (name, aside)
        file.unlink() if before is None else file.write_text(before, encoding="utf-8")


@pytest.mark.parametrize("name", ["runs", "my runs", "runs [old]", "docs/runs*"])
def test_runs_in_a_checkout_make_it_dirty_for_nobody_who_names_them(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (runs := checkout / name).mkdir()
    (runs / "run.json").write_text("{}", encoding="utf-8")
    assert git_state(checkout)[1] and git_state(checkout, checkout / "others")[1]
    assert not git_state(checkout / "package", runs)[1]
    monkeypatch.chdir(checkout)
    assert not git_state(checkout / "package", Path(name))[1]
    for other in (checkout / "package" / "a", runs.with_name("runs2")):
        other.write_text("b", encoding="utf-8")
        assert git_state(checkout / "package", runs)[1], other
        git(checkout, "checkout", "-q", "package")


def test_without_a_commit_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert git_state(tmp_path) == git_state(tmp_path / "gone") == (None, False)
    git(tmp_path, "init", "-q")
    assert git_state(tmp_path) == (None, False)
    (tmp_path / "a").touch()
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    assert git_state(tmp_path)[0] == git(tmp_path, "rev-parse", "HEAD")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tmp_path) == (None, False)


@pytest.mark.parametrize(
    ("kind", "commit", "name"),
    [
        (RunKind.NIGHTLY, "0123456789abcdef", "0123456"),
        (RunKind.NIGHTLY, None, "unversioned"),
        (RunKind.BENCH, "0123456789abcdef", "0123456-bench"),
        (RunKind.PORT, None, "unversioned-port"),
    ],
)
def test_a_run_is_named_after_its_start_its_commit_and_its_kind(
    monkeypatch: pytest.MonkeyPatch, kind: RunKind, commit: str | None, name: str
) -> None:
    places: list[tuple[object, ...]] = []
    monkeypatch.setattr(
        environment, "git_state", lambda *them: (places.append(them), (commit, True))[1]
    )
    made = new_manifest(STARTED, kind, Path("code"), Path("runs"))
    assert places == [(Path("code"), Path("runs"))]
    assert (made.id, made.created) == (f"2026-11-20T21-30-05Z-{name}", STARTED.isoformat())
    assert (made.kind, made.commit, made.dirty, made.code) == (kind, commit, True, identity.code())
    versions = made.environment.versions
    assert versions.keys() == {"python", *PACKAGES}
    assert {package: version_of(package) for package in PACKAGES}.items() <= versions.items()
    assert version_of("no-such-package-here") == ABSENT
    # What the code was when a night began counts, and not what it is now.
    start = Start("digest", {}, "fedcba9876543210", False)
    made = new_manifest(STARTED, kind, start=start)
    assert len(places) == 1 and "fedcba9" in made.id
    assert (made.commit, made.dirty, made.code) == (start.commit, False, "digest")


@pytest.mark.parametrize("live", [True, False])
def test_a_reference_says_where_its_numbers_are_from(live: bool) -> None:
    class Answering(RecordedReference):
        kind, omits = "live" if live else "recorded", "gradients"
        provenance = property(lambda self: {"commit": "082db4b", "versions": {"torch": "2.6"}})

    told = describe(object.__new__(Answering))
    assert (told.kind, told.commit, told.versions) == (Answering.kind, "082db4b", {"torch": "2.6"})
    origin = "run in this job" if live else "recordings made with the live reference"
    assert told.detail == f"{origin}; not compared: gradients" and told.capability is None


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (["a"], "these changed: a. No run"),
        (list("abcde"), "these changed: a, b, c, d, e. No run"),
        (list("abcdefg"), "these changed: a, b, c, d, e and 2 more. No run"),
    ],
)
def test_a_change_meanwhile_is_named(
    monkeypatch: pytest.MonkeyPatch, changed: list[str], said: str
) -> None:
    found: list[str] = []
    monkeypatch.setattr(identity, "changed_files", lambda: found)
    start = Start("digest", {}, None, False, Watch(every=0.0))
    start.check()
    found += changed
    with pytest.raises(StoreError, match=rf"\(code digest\), but {said} was stored"):
        start.check()


def test_inputs_are_looked_at_at_the_end_and_the_code_before_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []
    monkeypatch.setattr(identity, "changed_files", lambda: found)
    monkeypatch.setattr(code, "git_state", lambda folder: ("0" * 40, True))
    (given := tmp_path / "given").write_text("before", encoding="utf-8")
    start = Start.now([None, given])
    assert (start.commit, start.dirty, start.code) == ("0" * 40, True, identity.code())
    assert start.inputs.keys() == {str(given)} and start.content(None) == ""
    assert start.content(given) == start.inputs[str(given)] != ""
    steps: list[tuple[int, str]] = []
    start = Start("digest", start.inputs, None, False, Watch(every=0.0))
    step = start.checked_before(lambda number, name: steps.append((number, name)))
    step(1, name="a")
    given.write_text("afterwards", encoding="utf-8")
    # To read a large input takes long, so it is not read at each step.
    step(2, name="b")
    with pytest.raises(StoreError, match=rf"these changed: {given}\. "):
        start.check()
    given.write_text("before", encoding="utf-8")
    found.append("norm.py")
    with pytest.raises(StoreError, match=r"these changed: norm\.py"):
        step(3, name="c")
    assert steps == [(1, "a"), (2, "b")]
