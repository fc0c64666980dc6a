"""Mutation testing with a fixed list: does a test, or a nightly run, find each planted bug?

    python -m tools.mutants                       # all of them, in two processes
    python -m tools.mutants --only NAME           # this one (repeatable)
    python -m tools.mutants --executor ray --address auto

A mutant is one edit of one file (`tools.mutant_list`), made in a copy of the tree. The tests that
the mutant lists run on the copy; the mutant is found by the first that fails. If none fails, the
slow tests among them (marked `sweep`) follow. A mutant that names cases also gets a nightly run of
these cases. Results are written to `build/mutants.jsonl` as they arrive, and the table is printed
at the end.

Mutants drawn at random are the work of cosmic-ray (`make mutation`, docs/developing.md "Mutants
drawn at random").
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from parity.executors.item import Item, Needs, State
from parity.executors.sweep import open_executor
from parity.executors.sweep import run as run_items
from tools.mutant_list import CONTROLS, MUTANTS, ROOT, Mutant
from tools.recorded import add_executor

RESULTS = ROOT / "build" / "mutants.jsonl"
LIMIT = 3000
"""Seconds that one run may take; a mutant that exceeds them counts as found, since a test that does
not end fails."""
MEMORY = 3 * 2**30
"""Upper limit of the memory that tests or a nightly run take, in bytes."""
SHARE = 0.97
"""Fraction of the mutants that must be found."""
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?\.py(?:::.*?)?)(?: - (.*))?$", re.MULTILINE)
_PYTEST = ("pytest", "-x", "-q", "--tb=line", "-rfE", "-p", "no:cacheprovider")
_NOTHING_SELECTED = 5
ENVIRONMENT = {
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    "OMP_NUM_THREADS": "1",
    "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    # As in `make test`, whose compiled programs are shared.
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    # pytest truncates the reason of a failure at the width of the terminal.
    "COLUMNS": "400",
    # Python compares the date and the size of a source with its compiled file's, in seconds: an
    # edit of the same length within one second would not be seen.
    "PYTHONDONTWRITEBYTECODE": "1",
}
"""Environment variables of the tests and of nightly runs."""


@dataclass(frozen=True, slots=True)
class Result:
    """Result for one mutant: the test and the night that found it, if any."""

    mutant: str
    test: str
    """First test that failed; empty if none did."""
    night: str = ""
    """Verdict and sentence of the nightly run where it is not PASS; empty otherwise."""
    seconds: float = 0.0

    @property
    def found(self) -> bool:
        """Whether a test or the nightly run found the mutant."""
        return bool(self.test or self.night)


def copied(root: Path) -> Path:
    """Copy everything that git does not ignore to `root`, and return it."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, os.fsdecode(listed).split("\0")):
        if (ROOT / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, root / name)
    return root


def python(tree: Path, *arguments: str) -> tuple[int, str]:
    """Run `python -m ARGUMENTS` in a tree.

    Returns:
        The exit code, -1 if it ran longer than `LIMIT`, and the output.
    """
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(tree)}
    try:
        done = subprocess.run(
            [sys.executable, "-m", *arguments],
            cwd=tree,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=LIMIT,
        )
    except subprocess.TimeoutExpired:
        return -1, ""
    return done.returncode, done.stdout


def failures(output: str) -> list[str]:
    """Return the tests that failed, in order."""
    return [test.strip() for test, _ in _FAILED.findall(output)]


def first_failure(tree: Path, tests: Sequence[str]) -> str:
    """Run the tests that are not marked `sweep`, and, if none fails, those that are.

    Returns:
        The first test that failed, or the empty string.

    Raises:
        RuntimeError: pytest ran nothing.
    """
    for chosen in ("not sweep", "sweep"):
        code, output = python(tree, *_PYTEST, "-m", chosen, *tests)
        if code == -1:
            return f"{tests[0]} did not end in {LIMIT} s"
        if code == _NOTHING_SELECTED and chosen == "sweep":
            return ""
        if code in (4, _NOTHING_SELECTED):
            raise RuntimeError(f"pytest ran nothing of {' '.join(tests)}:\n{output}")
        if code:
            return (failures(output) or [f"{tests[0]} exit {code}: {output[-300:]}"])[0]
    return ""


def night(tree: Path, cases: Sequence[str]) -> str:
    """Run a nightly run of these cases.

    Returns:
        Verdict and sentence, or the empty string if the verdict is PASS.
    """
    with tempfile.TemporaryDirectory() as out:
        chosen = (word for case in cases for word in ("--case", case))
        command = ("reports.cli", "nightly", "--reference", "recorded", "--json", "--out", out)
        code, output = python(tree, *command, *chosen)
    if not code:
        return ""
    for line in output.splitlines():
        if line.startswith('{"verdict"'):
            document = json.loads(line)
            return f"{document['verdict']}: {document['sentence']}"
    return f"exit {code}: {output.strip()[-200:]}"


def measure(mutant: str, trees: str) -> dict[str, Any]:
    """Plant a mutant in this worker's copy of the tree and return its `Result` as a dictionary.

    Args:
        mutant: name of the mutant; the empty string plants none, and runs every mutant's tests.
        trees: folder in which each worker has its copy.
    """
    tree = _tree_of_this_worker(trees)
    start = time.monotonic()
    if not mutant:
        every = sorted({test for m in (*MUTANTS, *CONTROLS) for test in m.tests})
        return asdict(Result("", first_failure(tree, every)))
    [planted] = [m for m in (*MUTANTS, *CONTROLS) if m.name == mutant]
    file = tree / planted.file
    try:
        file.write_text(planted.source(tree), encoding="utf-8")
        test = first_failure(tree, planted.tests)
        told = night(tree, planted.night) if planted.night else ""
    finally:
        shutil.copy2(ROOT / planted.file, file)
    return asdict(Result(mutant, test, told, round(time.monotonic() - start, 1)))


@cache
def _tree_of_this_worker(trees: str) -> Path:
    return copied(Path(trees) / str(os.getpid()))


def run(chosen: Sequence[Mutant], executor: str, address: str | None, path: Path) -> list[Result]:
    """Run mutants, writing each result to `path` as it arrives.

    Raises:
        RuntimeError: tests could not run.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    results = []
    with (
        tempfile.TemporaryDirectory(prefix="mutants-") as trees,
        path.open("w", encoding="utf-8") as file,
    ):
        words = {"trees": trees}
        items = [
            # The module's name is written out: in the running program it is `__main__`.
            Item(m.name, "tools.mutants:measure", {"mutant": m.name, **words}, Needs(memory=MEMORY))
            for m in chosen
        ]
        for answer in run_items(items, open_executor(executor, address)):
            if answer.state is not State.DONE:
                raise RuntimeError(f"mutant {answer.name}: {answer.reason}")
            result = Result(**answer.value)
            file.write(json.dumps(asdict(result)) + "\n")
            file.flush()
            results.append(result)
            line = f"{len(results)}/{len(items)} {row(result)}"
            print(line, file=sys.stderr, flush=True)
    return results


def row(result: Result) -> str:
    """Return a result as one row of a Markdown table."""
    found = (result.test or "no test", result.night or "–", f"{result.seconds:.0f} s")
    return f"| `{result.mutant}` | {' | '.join(cell.replace('|', '/') for cell in found)} |"


def judged(results: Sequence[Result]) -> bool:
    """Print the table and return whether enough mutants, and no control, were found."""
    controls = {m.name for m in CONTROLS}
    planted = [r for r in results if r.mutant not in controls]
    wrong = [r.mutant for r in results if r.mutant in controls and r.found]
    print("| mutant | test | night | time |", "| --- | --- | --- | --- |", sep="\n")
    print(*map(row, results), sep="\n")
    found = sum(r.found for r in planted)
    print(f"\n{found} of {len(planted)} mutants found; controls found: {wrong or 'none'}.")
    return found >= SHARE * len(planted) and not wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0 if enough mutants, and no control, were found."""
    everything = {m.name: m for m in (*MUTANTS, *CONTROLS)}
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", action="append", choices=everything, metavar="NAME")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file of JSON lines")
    add_executor(parser)
    asked = parser.parse_args(arguments)
    chosen = [everything[name] for name in asked.only or everything]
    if not asked.only:
        with tempfile.TemporaryDirectory(prefix="mutants-") as trees:
            if failed := measure("", trees)["test"]:
                parser.error(f"without a mutant, this test fails already: {failed}")
    return 0 if judged(run(chosen, asked.executor, asked.address, asked.results)) else 1


if __name__ == "__main__":
    sys.exit(main())
