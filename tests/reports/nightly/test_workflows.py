"""The workflows' own commands, run here: shards, merge, verdict, page, and their exit codes."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from parity.engine.measure.contract import Gate
from parity.megalodon.cases import BYTE_LM
from reports.cli import main
from reports.nightly.shards import Shard, find_shards, merge_shards
from reports.provenance.host import fingerprint
from reports.store.runs import list_runs, read_run, write_run
from reports.store.schema import StoreError
from reports.subjects.megalodon import suites as suites_module
from reports.suite_run import SuiteRun
from stability.core.findings import Finding, Severity
from tests.helpers import ROOT, cli
from tests.reports.nights import altered, failing, measurement, stored_below

WORKFLOWS = ROOT / ".github" / "workflows"
TINY = ["--case", "length_c", "--case", "stream_tokens", "--reference", "recorded"]
TINY += ["--checkpoint", str(BYTE_LM)]


def steps(name: str, job: str) -> list[str]:
    """The `run:` lines of a job, in order."""
    document = yaml.safe_load((WORKFLOWS / name).read_text(encoding="utf-8"))
    return [step["run"] for step in document["jobs"][job]["steps"] if "run" in step]


def shards(name: str, job: str) -> list[str]:
    document = yaml.safe_load((WORKFLOWS / name).read_text(encoding="utf-8"))
    return yaml.safe_load(document["jobs"][job]["with"]["shards"])


def call(line: str, *more: str) -> Any:
    program, *arguments = shlex.split(line)
    assert program == ".venv/bin/megalodon-numerics"
    return cli(*arguments, *more)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A night whose cases cost nothing; `rows` is what they measure, by case."""
    rows: dict[str, Any] = {
        name: measurement(case=name, identity=name) for name in ("length_c", "stream_tokens")
    }

    def case(self: Any, case: Any, floors: Any) -> Iterator[Any]:
        yield rows[case.name]

    def probes(checkpoint: Any, model: Any, report: Any) -> Any:
        row = Finding("survival", Severity.OK, "w", "frozen_fraction", 0.1, 0.5, "", "")
        return SuiteRun("stability", planned=1, executed=1, findings=[row])

    def planned(case: Any, reference: Any) -> Iterator[Gate]:
        yield Gate.of(measurement(case=case.name))

    monkeypatch.setattr(suites_module.Suite, "case", case)
    monkeypatch.setattr("parity.megalodon.contract.gates", planned)
    monkeypatch.setattr(suites_module, "run_stability", probes)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    monkeypatch.chdir(tmp_path)
    return rows


def night(lost: str = "") -> dict[str, Any]:
    """Run the commands of night.yml as the workflow would; return the results by command."""
    (line,) = (run for run in steps("night.yml", "shard") if "megalodon-numerics" in run)
    for shard in shards("nightly.yml", "cpu"):
        if shard != lost:
            result = call(line.replace("${{ matrix.shard }}", shard), *TINY)
            assert result.exit_code == 0, result.output
    judged = [run for run in steps("night.yml", "judge") if "megalodon-numerics" in run]
    return {run.split()[1]: call(run) for run in judged}


@pytest.mark.sweep
def test_a_healthy_night_is_one_run_out_of_all_shards(tiny, tmp_path: Path) -> None:
    words = night()
    assert {name: result.exit_code for name, result in words.items()} == dict.fromkeys(
        ("merge", "gate", "report", "prune"), 0
    )
    [stored], unreadable = list_runs(tmp_path / "runs")
    run = read_run(stored.folder)
    assert (unreadable, stored.kind) == ([], "nightly")
    assert [m.case for m in run.measurements] == ["length_c", "stream_tokens"]
    assert all(m.deterministic for m in run.measurements)
    suites = {s.name: (s.planned, s.executed) for s in run.manifest.suites}
    assert suites == {"parity": (2, 2), "stability": (1, 1)}
    assert len(run.manifest.shards) == 3
    assert "PASS" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert (tmp_path / "summary.md").read_text(encoding="utf-8").startswith("## PASS")


def test_a_broken_tolerance_is_the_exit_code_of_the_gate(tiny, tmp_path: Path) -> None:
    tiny["stream_tokens"] = failing(case="stream_tokens")
    words = night()
    assert (words["merge"].exit_code, words["gate"].exit_code) == (0, 1)
    assert words["report"].exit_code == 0
    assert "logits" in (tmp_path / "summary.md").read_text(encoding="utf-8")


def test_a_lost_shard_is_incomplete_and_named(tiny, tmp_path: Path) -> None:
    words = night(lost="3/3")
    assert (words["merge"].exit_code, words["gate"].exit_code) == (0, 3)
    assert "shard 3/3 is missing" in words["gate"].output
    [merged_run] = stored_below(tmp_path / "runs")
    suites = {s.name: s.status for s in read_run(merged_run).manifest.suites}
    assert "failed" in suites.values()
    refused = cli("merge", "shards", "--out", "again")
    assert refused.exit_code == 2
    assert "missing: 3/3" in refused.output
    assert not (tmp_path / "again").exists()


def test_shards_that_do_not_belong_together_are_refused(tiny, tmp_path: Path) -> None:
    night()
    folders = find_shards([tmp_path / "shards"])
    first, second, third = map(read_run, folders)

    def refusal(*runs: Any, **options: bool) -> str:
        root = tmp_path / f"try{len(list(tmp_path.iterdir()))}"
        with pytest.raises(StoreError) as caught:
            merge_shards([write_run(root / str(i), run) for i, run in enumerate(runs)], **options)
        return str(caught.value)

    assert "code" in refusal(first, altered(second, code="0" * 12), third)
    # Runs that have no digest of the code are told apart by their commits.
    assert "commit" in refusal(first, altered(second, code=None, commit="0" * 40), third)
    assert "fault" in refusal(first, altered(second, fault="rope_keys_one_late"), third)
    probed = replace(second.manifest.checkpoint, content="another")
    assert "checkpoint" in refusal(first, altered(second, checkpoint=asdict(probed)), third)
    other = {"device": {"kind": "cpu", "name": "another"}}
    assert "another" in refusal(first, altered(second, **other), third)
    assert "both hold shard 1/3" in refusal(first, altered(first, id="twice"), second, third)
    assert "both hold shard 1/3" in refusal(first, first, second, third)
    overlap = replace(third, measurements=first.measurements)
    assert "both hold length_c" in refusal(first, second, overlap)
    assert "is a nightly" in refusal(first, altered(second, kind="nightly"), third)
    gpu = {"device": {"kind": "cuda", "name": "another"}}
    assert "device cpu → cuda" in refusal(first, altered(second, **gpu), third, mixed=True)
    # Negative control: other processors may be asked for, and are named.
    folders = [
        write_run(tmp_path / "mixed", r) for r in (first, altered(second, id="b", **other), third)
    ]
    merged = merge_shards(folders, mixed=True).manifest
    assert "another" in merged.environment.device.name
    # Of several processors a run is on none of them: it has no identity that a baseline shares.
    assert merged.environment.host == {} and fingerprint(merged.environment) is None
    assert merged.environment.threads == " + ".join(
        str(run.manifest.environment.threads) for run in (first, second, third)
    )


def test_a_commit_of_a_document_between_two_shards_is_no_other_code(tiny, tmp_path: Path) -> None:
    night()
    runs = [read_run(folder) for folder in find_shards([tmp_path / "shards"])]
    assert len({run.manifest.code for run in runs}) == 1 and runs[0].manifest.code
    later = "2099-01-01T00:00:00+00:00"
    runs[1] = altered(runs[1], commit="0" * 40, dirty=True, created=later)
    folders = [write_run(tmp_path / "alike", run) for run in runs]
    merged = merge_shards(folders).manifest
    # The night's commit is the one it began with.
    assert merged.commit == runs[0].manifest.commit
    assert merged.code == runs[0].manifest.code


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "a/b", "1/0", "-1/2"])
def test_a_shard_is_k_of_n(text: str) -> None:
    with pytest.raises(ValueError, match="expected K/N"):
        Shard.parse(text)


def test_shards_cover_a_plan_once() -> None:
    plan = tuple("abcdefg")
    parts = [Shard(k, 3).part_of(plan) for k in (1, 2, 3)]
    assert sorted(name for part in parts for name in part) == list(plan)
    with pytest.raises(ValueError, match="at most 7 shards"):
        Shard(1, 8).part_of(plan)


@pytest.mark.parametrize("path", sorted(WORKFLOWS.glob("*.yml")), ids=lambda p: p.name)
def test_every_command_of_a_workflow_exists(path: Path) -> None:
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    targets = set(
        re.findall(r"^([\w./$()-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    )
    targets |= {".venv/.base", ".venv/.dev"}
    for job in document["jobs"].values():
        for step in job.get("steps", ()):
            words = shlex.split(re.sub(r"\$\{\{.*?\}\}", "x", step.get("run", "")))
            if words[:1] == ["make"]:
                assert words[1] in targets
            elif words[:1] == [".venv/bin/megalodon-numerics"]:
                assert words[1] in main.commands
            elif words:
                assert words[0] in ("bash", "echo", ".venv/bin/python")
        assert all((ROOT / job["uses"]).is_file() for _ in [0] if "uses" in job)


@pytest.mark.parametrize(
    ("chromium", "required", "guarded"),
    [(False, "", False), (False, "1", True), (True, "", True), (True, "1", True)],
)
def test_ci_is_not_green_without_the_browser_that_it_requires(
    tmp_path: Path, chromium: bool, required: str, guarded: bool
) -> None:
    """`make` and `apt-get` are stand-ins; Chromium is one or cannot be installed."""
    programs, checkout = tmp_path / "bin", tmp_path / "checkout"
    programs.mkdir()
    (checkout / ".ci").mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", checkout / ".ci" / "run")
    lines = {"make": 'echo "$@"', "apt-get": "exit 1"} | ({"chromium": "true"} if chromium else {})
    for name, line in lines.items():
        (programs / name).write_text(f"#!/bin/sh\n{line}\n", encoding="utf-8")
        (programs / name).chmod(0o755)
    for name in ("bash", "dirname", "sh"):
        (programs / name).symlink_to(shutil.which(name) or name)
    done = subprocess.run(
        ["bash", ".ci/run"],
        cwd=checkout,
        env={"PATH": str(programs), "REQUIRE_BROWSER": required},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    made = done.stdout.splitlines()[-1]
    assert made.startswith("test-day") and ("--require-run browser:1" in made) is guarded


def test_ci_requires_a_browser_and_keeps_programs_for_like_processors() -> None:
    document = yaml.safe_load((WORKFLOWS / "ci.yml").read_text(encoding="utf-8"))
    job = document["jobs"]["test"]
    assert job["env"]["REQUIRE_BROWSER"]
    [cache] = [s["with"] for s in job["steps"] if s.get("uses", "").startswith("actions/cache@")]
    named = [s for s in job["steps"] if s.get("id") == "processor"]
    assert len(named) == 1 and "/proc/cpuinfo" in named[0]["run"]
    for key in (cache["key"], *cache["restore-keys"].splitlines()):
        assert "steps.processor.outputs.flags" in key and "matrix.python" in key


def test_the_long_tests_run_once_a_week():
    document = yaml.safe_load((WORKFLOWS / "weekly.yml").read_text(encoding="utf-8"))
    assert "make test-long" in steps("weekly.yml", "long")
    # YAML reads the key `on` as true. A fifth field that names a day runs once a week.
    [schedule] = document[True]["schedule"]
    assert schedule["cron"].split()[4] == "0"


def test_a_week_of_ci_runs_every_sweep():
    document = yaml.safe_load((WORKFLOWS / "ci.yml").read_text(encoding="utf-8"))
    [schedule] = document[True]["schedule"]
    assert schedule["cron"].split()[2:] == ["*", "*", "*"]  # every day
    assert "make test-all" in steps("weekly.yml", "all")
