"""The cost of a night of this version and of another commit."""

from __future__ import annotations

import contextlib
import math
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from reports.bench import nights
from reports.page.sections.speed import markdown
from tests.helpers import cli
from tests.reports.bench.small import SHARED
from tests.reports.nights import bench

SPENT, COMPILED = {"old": 0.6, "new": 0.2}, {"old": 3, "new": 2}
PROGRAM = """
import os, sys, time
from pathlib import Path
name, spent, count = {name!r}, {spent}, {count}
assert sys.argv[1:4] == ["nightly", "--reference", "recorded"], sys.argv
assert os.environ["JAX_ENABLE_COMPILATION_CACHE"] == "1"
out = Path(sys.argv[sys.argv.index("--out") + 1])
cache = Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
first = not cache.exists()
cache.mkdir(parents=True, exist_ok=True)
for i in range(count):
    (cache / f"{{i}}-cache").touch()
    (cache / f"{{i}}-atime").touch()
if "--broken" in sys.argv:
    sys.exit("no room")
until = time.process_time() + (spent if first else spent / 4)
while time.process_time() < until:
    pass
run = out / str(len(list(out.glob("*"))))
run.mkdir(parents=True)
(run / "run.json").touch()
sys.exit(1)  # red, but measured
"""


def write(tree: Path, package: str, name: str) -> None:
    folder = tree / package.replace(".", "/")
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder / "__init__.py").touch()
    program = PROGRAM.format(name=name, spent=SPENT[name], count=COMPILED[name])
    (folder / "__main__.py").write_text(program, encoding="utf-8")


def files(root: Path) -> list[Path]:
    return sorted(p for p in root.rglob("*") if "__pycache__" not in p.parts)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout whose first commit has the old program, and whose files have the new one."""
    root = tmp_path / "checkout"
    write(root, "reports.cli", "old")
    for command in (
        "init -q",
        "add .",
        "-c user.name=a -c user.email=a@b commit -qm old",
        "tag old/one",
    ):
        subprocess.run(("git", "-C", str(root), *command.split()), check=True)
    write(root, "megalodon_numerics", "new")
    monkeypatch.setattr(nights, "ROOT", root)
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "0")
    return root


def test_nights_of_both_versions_are_measured_with_their_own_programs(checkout: Path) -> None:
    lines: list[str] = []
    before, name = files(checkout), nights.check_commit("old/one")[:9]
    timings = tuple(nights.bench_nights("old/one", SHARED, lines.append))
    assert files(checkout) == before
    rows = {(t.work, t.metric): t.value for t in timings}
    works = [f"{night} against {name}" for night in ("first night", "second night")]
    for work, share in zip(works, (1, 4), strict=True):
        # A process also spends time to start.
        assert SPENT["new"] / share < rows[work, "night_seconds"]
        assert SPENT["old"] / share < rows[work, "commit_seconds"]
        ratio = rows[work, "commit_seconds"] / rows[work, "night_seconds"]
        assert rows[work, "commit_ratio"] == ratio
        assert (rows[work, "night_programs"], rows[work, "commit_programs"]) == (2, 3)
        assert rows[work, "programs_ratio"] == 1.5
    assert rows[works[0], "night_seconds"] > rows[works[1], "night_seconds"]
    assert [line.split(":")[0].strip() for line in lines] == [
        f"{night} of {side}"
        for night in ("first night", "second night")
        for side in ("this version", name)
    ]
    table = markdown(replace(bench(), timings=timings))
    assert f"second night against {name}, processor time of the commit over ours" in table


def test_a_night_without_programs_has_no_ratio_of_them(checkout: Path) -> None:
    main = checkout / "megalodon_numerics" / "__main__.py"
    text = main.read_text(encoding="utf-8").replace("range(count)", "range(0)")
    main.write_text(text, encoding="utf-8")
    rows = nights.bench_nights("old/one", SHARED, print)
    [first, _] = [t for t in rows if t.metric == "programs_ratio"]
    assert math.isnan(first.value) and first.note == nights.NONE


def test_a_night_that_stores_nothing_is_no_cost(checkout: Path) -> None:
    with pytest.raises(nights.NightsError, match=r"stored no run.*no room"):
        nights.bench_nights("old/one", SHARED, print, ["--broken"])


def test_an_unknown_commit_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    result = cli("bench", "--nights", "no-such-commit", "--out", tmp_path)
    assert result.exit_code == 2
    assert "no-such-commit" in result.output and "Fetch it" in result.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("code", "measured"), [(0, True), (4, True), (3, False), (6, False)])
def test_a_night_that_was_not_done_is_no_cost(checkout: Path, code: int, measured: bool) -> None:
    main = checkout / "megalodon_numerics" / "__main__.py"
    text = main.read_text(encoding="utf-8").replace("sys.exit(1)", f"sys.exit({code})")
    main.write_text(text, encoding="utf-8")
    with (
        contextlib.nullcontext()
        if measured
        else pytest.raises(nights.NightsError, match="not run all parts")
    ):
        nights._night(checkout, checkout.parent / "place", ())


def test_a_commit_without_the_command_is_refused_at_once(checkout: Path) -> None:
    shutil.rmtree(checkout / "reports")
    git = ("git", "-C", str(checkout), "-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run((*git, "commit", "-qam", "none"), check=True)
    lines: list[str] = []
    with pytest.raises(nights.NightsError, match="which has none"):
        nights.bench_nights("HEAD", SHARED, lines.append)
    assert lines == []


def test_the_user_s_checkout_is_not_moved(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hooks of git run with GIT_DIR set, which goes before any folder."""

    def head() -> str:
        return (checkout / ".git" / "HEAD").read_text(encoding="utf-8")

    before = head()
    monkeypatch.setenv("GIT_DIR", str(checkout / ".git"))
    nights._checkout("old/one", tmp_path / "tree")
    assert head() == before
    assert (tmp_path / "tree" / ".git").is_dir()


@pytest.mark.usefixtures("checkout")
def test_what_is_no_checkout_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nights, "ROOT", tmp_path)
    with pytest.raises(nights.NightsError, match="not a git repository"):
        nights.check_commit("HEAD")


def test_the_program_of_this_version_has_the_command() -> None:
    command = (sys.executable, "-m", nights._PACKAGES[0], "nightly", "--help")
    said = subprocess.run(command, cwd=nights.ROOT, capture_output=True, text=True, check=True)
    assert all(option in said.stdout for option in ("--reference", "--out"))
