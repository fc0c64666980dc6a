"""Many new runs are read by several processes, and the answer is that of one."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from reports.registry.lookback import look_back
from reports.store import examine, gathered, index, runs, several
from reports.store.index import Line
from reports.store.runs import list_lines, write_run
from tests.helpers import ROOT
from tests.reports.nights import measurement, run


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven nights of different values, the fourth of which is damaged."""
    root = tmp_path_factory.mktemp("runs")
    for day in range(1, 8):
        name = f"2026-11-{day:02d}T21-30-00Z-0000000"
        created = f"2026-11-{day:02d}T21:30:00+00:00"
        night = run(measurement(value=day * 1e-7), id=name, created=created)
        folder = write_run(root, night)
        if day == 4:
            (folder / "run.json").write_text("{}", encoding="utf-8")
    return root


@pytest.fixture
def shared(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same runs without an index, of which three processes shall read three, two and two."""
    _forget(made)
    monkeypatch.setattr(several, "SHARE", 2)
    monkeypatch.setattr(several, "threads", lambda: 3)
    return made


def _forget(root: Path) -> None:
    (root / index.INDEX).unlink(missing_ok=True)
    for path in (root / gathered.FOLDER).glob("*"):
        path.unlink()
    index._seen.clear()


def _alone(root: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what one process reads."""
    with monkeypatch.context() as patch:
        patch.setattr(runs, "learn_together", lambda *_: [])
        answer = _answer(root)
    _forget(root)
    return answer


def _answer(root: Path) -> Any:
    lines, unreadable = list_lines(root)
    values = [row["value"] for row in look_back(str(root), "baseline", "logits").rows]
    # Which file has the values of a run differs with the shares, and the values do not.
    return [(n.name, n.manifest, n.gates, n.work) for n in lines], unreadable, values


def test_processes_read_what_one_reads(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the folder that one is in has a package `reports` of its own."""
    expected = _alone(shared, monkeypatch)
    read: list[str] = []
    own = examine._read
    monkeypatch.setattr(examine, "_read", lambda f, only: (read.append(f.name), own(f, only))[1])
    foreign = shared.parent / "foreign" / "reports"
    foreign.mkdir(parents=True, exist_ok=True)
    (foreign / "__init__.py").write_text(
        "raise RuntimeError('a package of somebody else')\n", encoding="utf-8"
    )
    monkeypatch.chdir(foreign.parent)
    assert _answer(shared) == expected
    assert [len(part) for part in expected] == [6, 1, 6]
    # The index has all of them, so that the next command reads none.
    assert len(index.read_lines(shared / index.INDEX)) == 7
    # This process read its own share and nothing of the others'.
    assert [name[8:10] for name in read] == ["02", "05", "01"]
    assert len(list((shared / gathered.FOLDER).glob("*.parquet"))) == 3


@pytest.mark.parametrize(
    "failure", ["cannot start", "dies", "takes too long", "writes half of its answer"]
)
def test_what_a_helper_did_not_do_is_done(
    shared: Path, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    expected = _alone(shared, monkeypatch)

    def helper(module: str, arguments: tuple[str, ...], *_: object) -> Any:
        if failure == "cannot start":
            raise BlockingIOError(errno.EAGAIN, "too many processes")
        if failure == "takes too long":
            raise several.subprocess.TimeoutExpired(module, 1.0)
        Path(arguments[2]).write_text("half of", encoding="utf-8")
        code = int(failure == "dies")
        return several.subprocess.CompletedProcess(module, code, "", "")

    monkeypatch.setattr(several, "run_module", helper)
    assert _answer(shared) == expected


@pytest.mark.parametrize("keep", [True, False])
def test_a_helper_is_asked_for_its_share_by_name(
    shared: Path, monkeypatch: pytest.MonkeyPatch, keep: bool
) -> None:
    """It finds the modules of this process, needs no GPU, and is given up after half an hour.

    Whatever the user's environment says of either.
    """
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    asked: list[tuple[Any, ...]] = []

    def helper(module: str, arguments: tuple[str, ...], *how: Any) -> Any:
        root, names, answer, kept = arguments
        names = json.loads(Path(names).read_text(encoding="utf-8"))
        asked.append((names, module, root, kept, Path(answer).exists(), *how))
        several._help(*arguments)

    monkeypatch.setattr(several, "run_module", helper)
    path = ["/one", *filter(None, sys.path)]
    monkeypatch.setattr(sys, "path", ["", *path])
    monkeypatch.setenv("OWN", "kept")
    folders = sorted(path for path in shared.iterdir() if path.name[0] != ".")
    _forget(shared)
    lines = several.learn_together(shared, folders, keep)
    assert sorted(line.name for line in lines) == [folder.name for folder in folders]
    assert all(bool(line.gathered) == (keep and bool(line.work)) for line in lines)
    asked.sort(key=lambda each: each[0])
    shares = [[folder.name for folder in folders[1:][i::3]] for i in (1, 2)]
    assert [names for names, *_ in asked] == shares
    for _, module, root, kept, answered, environment, seconds in asked:
        assert (module, root, kept) == ("reports.store.several", str(shared), "keep" * keep)
        assert not answered and seconds == several.LONGEST
        expected = {"PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1", "OWN": "kept"}
        assert (expected | {"JAX_PLATFORMS": "cpu"}).items() <= environment.items()


def test_a_run_that_changed_after_it_was_read_is_read_again(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line is of the files as they were; what a helper says of others counts for nothing."""
    old = shared / "2026-11-02T21-30-00Z-0000000" / "measurements.parquet"
    content = old.read_bytes()

    def late(root: Path, folders: Any, keep: bool) -> list[Line]:
        lines = several.learn_together(root, folders, keep)
        old.write_bytes(content[:-1])
        return lines

    monkeypatch.setattr(runs, "learn_together", late)
    _, unreadable = list_lines(shared)
    old.write_bytes(content)
    assert [path.name[8:10] for path, _ in unreadable] == ["02", "04"]


def test_few_runs_are_read_by_one(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process takes longer to start than 1,000 runs to read; known runs need none."""
    asked: list[int] = []
    monkeypatch.setattr(several, "_ask", lambda *a: (asked.append(len(a[1])), [])[1])
    monkeypatch.setattr(several, "SHARE", 4)
    list_lines(shared)
    assert asked == []
    monkeypatch.setattr(several, "SHARE", 2)
    list_lines(shared)
    assert asked == []
    _forget(shared)
    list_lines(shared)
    assert asked == [2, 2]


def test_a_list_of_runs_is_read_without_jax() -> None:
    """Each process that reads runs would import it first, which takes longer than 500 runs."""
    code = (
        "import sys, reports.registry.listing, reports.store.several\n"
        "print(*{'jax', 'torch', 'scipy', 'pandas'} & {*sys.modules})"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize(
    ("processors", "most", "share", "helpers"),
    [(1, 4, 2, 0), (2, 4, 2, 1), (9, 4, 1, 3), (9, 2, 1, 1), (9, 4, 3, 1), (9, 4, 4, 0)],
)
def test_processes_are_as_many_as_processors_runs_and_memory_allow(
    shared: Path,
    monkeypatch: pytest.MonkeyPatch,
    processors: int,
    most: int,
    share: int,
    helpers: int,
) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(several, "_ask", lambda root, folders, *_: (asked.append(root), [])[1])
    monkeypatch.setattr(several, "_learn", lambda *_: [])
    monkeypatch.setattr(several, "threads", lambda: processors)
    monkeypatch.setattr(several, "MOST", most)
    monkeypatch.setattr(several, "SHARE", share)
    folders = sorted(path for path in shared.iterdir() if path.name[0] != ".")
    assert several.learn_together(shared, folders, True) == []
    assert asked == [shared] * helpers and len(folders) == 7


@pytest.mark.parametrize("keep", [True, False])
def test_helpers_keep_values_only_where_the_index_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: bool
) -> None:
    asked: list[bool] = []

    def learn(root: Path, folders: Any, keep: bool) -> list[Line]:
        asked.append(keep)
        return []

    monkeypatch.setattr(runs, "learn_together", learn)
    name = write_run(tmp_path, run(measurement())).name
    assert [line.name for line in list_lines(tmp_path, keep)[0]] == [name] and asked == [keep]
    # Nor does this process.
    assert all((tmp_path / made).exists() is keep for made in (index.INDEX, gathered.FOLDER))
