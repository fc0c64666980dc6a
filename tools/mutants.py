"""Mutation testing: which test and which nightly run finds each mutant of the source, as a table.

    python -m tools.mutants                     # run what was not run yet, print the counts
    python -m tools.mutants --write             # ... and put the tables in docs/tables/mutants.md
    python -m tools.mutants --no-run --write    # only the tables of what was run
    python -m tools.mutants --again             # run those again that nothing found
    python -m tools.mutants --only NAME         # run this one again
    python -m tools.mutants --executor ray --address auto

A mutant is a small edit of one file (`tools.mutant_list`), made in a copy of the tree. The listed
tests run first; the mutant is found by the first that fails. If none fails, their sweeps follow,
and with `--wide` the remaining tests of the package. Mutants that name cases also get a nightly run
of these cases. Tests that fail without a mutant are ignored. Workers of an executor share the
mutants, each with its own copy of the tree. Results are appended as they arrive, so an interrupted
run resumes where it stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import json
import os
import re
import resource
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from parity.executors.item import Item, Needs, State
from parity.executors.sweep import open_executor
from parity.executors.sweep import run as run_items
from stability.experiments.document import renew
from tools.mutant_list import CONTROLS, MUTANTS, ROOT, Mutant
from tools.mutant_list.survivors import ARGUED
from tools.recorded import add_executor

DOCUMENT = ROOT / "docs" / "tables" / "mutants.md"
RESULTS = ROOT / "tools" / "mutant_list" / "results.jsonl"
"""Kept in the repository, so that no machine repeats what another has run with the same edit."""
COUNTS, TABLE, SURVIVORS, EQUIVALENT = "counts", "mutants", "survivors", "controls"
"""Names of the tables, in the comments around each of them in the document."""
LIMIT = 300
"""CPU seconds that one run may take; a mutant that exceeds them counts as found."""
_PATIENCE = 10
"""Wall-clock seconds allowed per CPU second, for a machine that is busy."""
SHARE = 0.97
"""Fraction of the mutants that must be found."""
_WARM = (
    *("jax", "equinox", "optax", "scipy.fft", "scipy.special", "autograd", "safetensors.numpy"),
    *("pandas", "pyarrow.parquet", "duckdb", "jinja2", "click", "rich", "hypothesis"),
    *("hypothesis.strategies", "beartype", "jaxtyping", "pytest", "torch"),
)
"""Modules that nearly every run imports and no mutant changes."""
MEMORY = 3 * 2**30
"""Upper limit of the memory that tests or a nightly run take, in bytes."""
_OURS = ("megalodon_jax", "parity", "stability", "reports", "tests", "tools")
"""Packages that a fork unloads, so that those of the copy are imported instead."""
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?\.py(?:::.*?)?)(?: - (.*))?$", re.MULTILINE)
_PASSED = "nothing"


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one side, the tests or a nightly run, for one mutant."""

    mutant: str
    digest: str
    """Hash of the edit; a result for another edit does not count."""
    side: str
    """`pytest` or `night`."""
    place: str
    """First test that failed, or verdict and stage of the nightly run; empty if none failed."""
    reason: str = ""
    seconds: float = 0.0

    @property
    def found(self) -> bool:
        """Whether the mutant was found."""
        return bool(self.place)


def digest_of(mutant: Mutant, side: str) -> str:
    """Return a hash of the edit and, for the nightly run, of its cases.

    The file name is not included: the edit stays the same when the file is moved.
    """
    parts = (mutant.old, mutant.new, mutant.night if side == "night" else ())
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


class Results:
    """Results in a file of JSON lines; for each mutant and side, the last line counts."""

    def __init__(self, path: Path):
        self.path = path
        self._known: dict[tuple[str, str], Result] = {}
        if path.is_file():
            for line in path.read_text(encoding="utf-8").splitlines():
                self._keep(Result(**json.loads(line)))

    def _keep(self, result: Result) -> None:
        self._known[result.mutant, result.side] = result

    def add(self, result: Result) -> None:
        """Append a result immediately."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(result)) + "\n")
        self._keep(result)

    def of(self, mutant: Mutant, side: str) -> Result | None:
        """Return the result of a side for a mutant; None if it was not run with this edit."""
        result = self._known.get((mutant.name, side))
        return result if result and result.digest == digest_of(mutant, side) else None

    def found(self, mutant: Mutant) -> bool:
        """Return whether any side found the mutant."""
        return any(r is not None and r.found for r in (self.of(mutant, s) for s in SIDES))

    def complete(self, mutant: Mutant) -> bool:
        """Return whether every side that the mutant names was run."""
        asked = SIDES if mutant.night else SIDES[:1]
        return all(self.of(mutant, side) for side in asked)


SIDES = ("pytest", "night")
MODULE = "tools.mutants"
"""Name under which workers import this module, which differs when it runs as a program."""


@dataclass(frozen=True)
class Tree:
    """A copy of a tree, in which one file at a time is modified."""

    root: Path
    original: Path = ROOT

    @classmethod
    def copied(cls, root: Path) -> Tree:
        """Copy everything that git does not ignore to `root`."""
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
        for name in filter(None, os.fsdecode(listed).split("\0")):
            if (ROOT / name).is_file():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, root / name)
        return cls(root)

    @contextlib.contextmanager
    def planted(self, mutant: Mutant) -> Iterator[None]:
        """Plant a mutant in the tree within this context."""
        file = self.root / mutant.file
        file.write_text(mutant.source(self.root), encoding="utf-8")
        # Python checks compiled files by size and modification time in seconds only.
        changed = (self.original / mutant.file).stat().st_mtime + 10
        os.utime(file, (changed, changed))
        try:
            yield
        finally:
            # Restored with its old modification time, so that its compiled file stays valid.
            shutil.copy2(self.original / mutant.file, file)

    def run(self, *arguments: str, limit: float = LIMIT, keep: bool = False) -> tuple[int, str]:
        """Run `python -m ARGUMENTS` in the tree; return its exit code and its output.

        The process is a fork of this one, which has already loaded what every run imports. The code
        is -1 if it ran out of time, and at least 128 if a signal ended it.

        Args:
            arguments: a module and its arguments.
            limit: CPU seconds it may take.
            keep: whether to write compiled Python files; never for a tree with a mutant.
        """
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
            sys.stdout.flush()
            sys.stderr.flush()
            if (child := os.fork()) == 0:
                _become(self.root, arguments, output.fileno(), keep, limit)
            try:
                code = _awaited(child, _PATIENCE * limit)
            except BaseException:
                # The child has a separate session, so it would otherwise continue.
                os.kill(child, signal.SIGKILL)
                raise
            output.seek(0)
            return code, output.read()


def _become(root: Path, arguments: Sequence[str], output: int, keep: bool, limit: float) -> None:
    """Turn this process into `python -m ARGUMENTS` in a tree; never returns."""
    code = 1
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (int(limit), resource.RLIM_INFINITY))
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(root)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ["PYTHONPATH"] = str(root)
        # Wide enough that pytest truncates no reason.
        os.environ["COLUMNS"] = "400"
        os.environ["PYTHONDONTWRITEBYTECODE"] = "" if keep else "1"
        sys.dont_write_bytecode = not keep
        sys.path[:] = [str(root), *(p for p in sys.path if p not in ("", str(ROOT), str(root)))]
        for name in [name for name in sys.modules if name.partition(".")[0] in _OURS]:
            del sys.modules[name]
        sys.argv = list(arguments)
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        print(f"ERROR {arguments[0]}.py - {type(error).__name__}: {error}", file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _awaited(child: int, limit: float) -> int:
    """Return the exit code of a child, or -1 if it had to be killed."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            if code == -signal.SIGXCPU:
                return -1
            return code if code >= 0 else 128 - code
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -1


def warm() -> None:
    """Import modules that no mutant changes, with the settings that the tests need before them."""
    flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    os.environ.setdefault("XLA_FLAGS", flags)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    for name in _WARM:
        # A module that is not installed is not needed by the tests here.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


_ANY = (
    *("pytest", "-q", "--tb=line", "-rfE", "-p", "no:cacheprovider"),
    *("-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"),
    *("-o", "console_output_style=classic"),
)
_PYTEST = (*_ANY, "-m", "not sweep")
_SWEEPS = (*_ANY, "-m", "sweep")
_NOTHING_SELECTED = 5


def failures(output: str) -> list[tuple[str, str]]:
    """Return the tests that failed, in order, each with the reason on its line."""
    return [(test.strip(), why or "") for test, why in _FAILED.findall(output)]


def healthy(tree: Tree, tests: Sequence[str], cache: Path) -> list[str]:
    """Return those of `tests` that fail without a mutant; results are cached.

    Raises:
        RuntimeError: pytest could not run them, for example because one does not exist.
    """
    known = json.loads(cache.read_text(encoding="utf-8")) if cache.is_file() else {}
    if new := [test for test in tests if test not in known]:
        code, output = tree.run(*_PYTEST, *new, limit=100 * LIMIT, keep=True)
        if code not in (0, 1):
            raise RuntimeError(f"the tests do not run without a fault, exit {code}:\n{output}")
        failed = [test for test, _ in failures(output)]
        for test in new:
            known[test] = [t for t in failed if t.startswith(test)]
        cache.parent.mkdir(parents=True, exist_ok=True)
        cache.write_text(json.dumps(known, indent=1), encoding="utf-8")
    return sorted({bad for test in tests for bad in known[test]})


def by_pytest(tree: Tree, mutant: Mutant, tests: Sequence[str], bad: Sequence[str]) -> Result:
    """Plant a mutant and return the first of `tests` that fails, ignoring those in `bad`.

    If none fails, their sweeps follow. A failing sweep counts only if it passes without the mutant.
    """
    start = time.monotonic()
    left_out = [f"--deselect={test}" for test in bad]
    with tree.planted(mutant):
        code, output = tree.run(*_PYTEST, "-x", *left_out, *tests)
        swept = code == 0
        if swept:
            code, output = tree.run(*_SWEEPS, "-x", *tests)
    if swept and code == _NOTHING_SELECTED:
        code = 0
    if swept and code == 1 and tree.run(*_ANY, *(test for test, _ in failures(output)))[0]:
        code = 0
    place, reason = "", ""
    if code == -1:
        place, reason = tests[0], f"did not end in {LIMIT} s"
    elif code:
        found = failures(output)
        place, reason = found[0] if found else (tests[0], f"exit {code}: {output[-300:]}")
        if code in (4, 5):
            raise RuntimeError(f"mutant {mutant.name}: pytest ran nothing:\n{output}")
    seconds = round(time.monotonic() - start, 1)
    digest = digest_of(mutant, "pytest")
    return Result(mutant.name, digest, "pytest", place, reason[:300], seconds)


def night(tree: Tree, cases: Sequence[str], limit: float = LIMIT) -> tuple[int, str]:
    """Run a nightly run of these cases; return its exit code, its verdict and where it starts."""
    with tempfile.TemporaryDirectory() as out:
        command = [*("reports.cli", "nightly", "--reference", "recorded", "--json", "--out"), out]
        chosen = (word for case in cases for word in ("--case", case))
        code, output = tree.run(*command, *chosen, limit=limit)
    for line in output.splitlines():
        if line.startswith('{"verdict"'):
            document = json.loads(line)
            return code, f"{document['verdict']}: {stage_of(document['sentence'])}"
    last = output.strip().rpartition("\n")[2]
    return code, f"exit {code}: {last[:200]}"


def stage_of(sentence: str) -> str:
    """Return the stage where a verdict starts, from its sentence; else the sentence itself."""
    start = re.search(r"(?:It starts at|The (?:worst|gravest) is) (.*? in case \S+)", sentence)
    probe = re.search(r"Probe (\S+ on \S+)", sentence)
    found = start or probe
    return found.group(1).rstrip(":;,.") if found else sentence[:160]


def by_night(tree: Tree, mutant: Mutant) -> Result:
    """Plant a mutant and return the result of a nightly run of its cases."""
    start = time.monotonic()
    with tree.planted(mutant):
        code, told = night(tree, mutant.night)
    place = told if code else ""
    seconds = round(time.monotonic() - start, 1)
    digest = digest_of(mutant, "night")
    return Result(mutant.name, digest, "night", place, f"exit {code}", seconds)


@dataclass(frozen=True, slots=True)
class Options:
    """Selection of what to run, and where."""

    sides: tuple[str, ...] = SIDES
    again: bool = False
    """Whether to run again the mutants that nothing found."""
    anew: bool = False
    """Whether to run again all chosen mutants, found or not."""
    wide: bool = False
    """Whether to run the remaining tests of a package if the listed ones find nothing."""
    executor: str = "local"
    address: str | None = None
    """Address of a Ray cluster (`parity.executors.sweep.open_executor`)."""


def measure(mutant: str, side: str, wide: bool, bad: list[str], trees: str) -> dict[str, Any]:
    """Return the result of a side for a mutant, on a worker.

    Args:
        mutant: name of the mutant.
        side: one of `SIDES`.
        wide: whether the remaining tests of the package follow.
        bad: tests that fail without a mutant.
        trees: folder in which each worker has its copy of the tree.
    """
    warm()
    tree = _tree_of_this_worker(trees)
    [planted] = [m for m in (*MUTANTS, *CONTROLS) if m.name == mutant]
    if side == "night":
        return asdict(by_night(tree, planted))
    result = by_pytest(tree, planted, planted.tests, bad)
    if wide and not result.found:
        result = by_pytest(tree, planted, [f"tests/{planted.package}"], bad)
    return asdict(result)


@cache
def _tree_of_this_worker(trees: str) -> Tree:
    return Tree.copied(Path(trees) / str(os.getpid()))


def run(chosen: Sequence[Mutant], results: Results, options: Options) -> None:
    """Run mutants on every side without a result yet, and add the results.

    Raises:
        RuntimeError: without a mutant, the tests or a nightly run do not run, or are not green.
    """
    warm()
    known_healthy = ROOT / "build" / "mutants" / "healthy.json"

    def asked(mutant: Mutant, side: str) -> bool:
        known = results.of(mutant, side)
        again = options.anew or (options.again and not results.found(mutant))
        return side in options.sides and (known is None or again)

    with tempfile.TemporaryDirectory(prefix="mutants-") as trees:
        tree = Tree.copied(Path(trees) / "healthy")

        def sweep(side: str, waiting: Sequence[Mutant], bad: Sequence[str] = ()) -> None:
            words = {"side": side, "wide": options.wide, "bad": list(bad), "trees": trees}
            items = [
                Item(m.name, f"{MODULE}:measure", {"mutant": m.name, **words}, Needs(memory=MEMORY))
                for m in waiting
            ]
            executor = open_executor(options.executor, options.address)
            for turn, answer in enumerate(run_items(items, executor), start=1):
                if answer.state is not State.DONE:
                    raise RuntimeError(f"mutant {answer.name}: {answer.reason}")
                result = Result(**answer.value)
                results.add(result)
                _tell(turn, len(waiting), result)

        waiting, bad = [m for m in chosen if asked(m, "pytest")], []
        while True:
            sweep("pytest", waiting, bad)
            # Tests that fail without a mutant find nothing: run these mutants again without them.
            fail = healthy(tree, places(chosen, results), known_healthy)
            waiting = [m for m in chosen if set(places([m], results)) & set(fail)]
            # Added to earlier ones: otherwise two bad tests could alternate forever.
            bad = sorted({*bad, *fail})
            if not waiting:
                break
        waiting = [m for m in chosen if m.night and asked(m, "night")]
        if waiting:
            cases = tuple(dict.fromkeys(case for m in waiting for case in m.night))
            code, told = night(tree, cases, limit=100 * LIMIT)
            if code:
                raise RuntimeError(f"a night without a fault is not green, exit {code}: {told}")
        sweep("night", waiting)


def in_turns(mutants: Sequence[Mutant]) -> list[Mutant]:
    """Interleave mutants of different files, so that an interrupted run covers some of each."""
    seen: Counter[str] = Counter()
    turns = []
    for mutant in mutants:
        turns.append((seen[mutant.file], mutant))
        seen[mutant.file] += 1
    return [mutant for _, mutant in sorted(turns, key=lambda turn: turn[0])]


def places(mutants: Sequence[Mutant], results: Results) -> list[str]:
    """Return the tests that found mutants, each once."""
    known = (results.of(mutant, "pytest") for mutant in mutants)
    return sorted({result.place for result in known if result and result.found})


def _tell(turn: int, turns: int, result: Result) -> None:
    where = f"{result.place or _PASSED} {result.reason[:80]}".rstrip()
    line = f"{turn}/{turns} {result.side} {result.mutant}: {where} ({result.seconds} s)"
    print(line, file=sys.stderr, flush=True)


def counts(results: Results) -> str:
    """Return how many mutants each side found, as a Markdown table."""
    rows = {
        "mutants": list(MUTANTS),
        "found by the tests": [m for m in MUTANTS if _by(results, m, "pytest")],
        "run through a night": [m for m in MUTANTS if results.of(m, "night")],
        "found by the night": [m for m in MUTANTS if _by(results, m, "night")],
        "found by either": [m for m in MUTANTS if results.found(m)],
        "survivors": survivors(results),
        "not run": [m for m in MUTANTS if not results.of(m, "pytest")],
        "equivalent controls found": [m for m in CONTROLS if results.found(m)],
    }
    packages = sorted({m.package for m in MUTANTS})
    lines = [f"| | all | {' | '.join(packages)} |", "| --- |" + " --- |" * (len(packages) + 1)]
    for name, found in rows.items():
        by = (sum(m.package == package for m in found) for package in packages)
        lines.append(f"| {name} | {len(found)} | {' | '.join(map(str, by))} |")
    return "\n".join(lines)


def survivors(results: Results) -> list[Mutant]:
    """Return the mutants that were run and not found."""
    return [m for m in MUTANTS if results.of(m, "pytest") and not results.found(m)]


def table(results: Results, mutants: Sequence[Mutant] = MUTANTS) -> str:
    """Return every mutant, its fault, and where it was found, as a Markdown table."""
    lines = ["| mutant | file | fault | test | night |", "| --- | --- | --- | --- | --- |"]
    for mutant in mutants:
        cells = (f"`{mutant.name}`", f"`{mutant.file}`", mutant.fault)
        said = (
            _cell(results.of(mutant, side), side in SIDES[:1] or mutant.night) for side in SIDES
        )
        lines.append(f"| {' | '.join((*cells, *said))} |")
    return "\n".join(lines)


def argued(results: Results, reasons: Mapping[str, str] = ARGUED) -> str:
    """Return every survivor with the reason why it survives, as a Markdown list."""
    found = survivors(results)
    if not found:
        return "None."
    return "\n".join(f"- `{m.name}`: {reasons.get(m.name, 'NOT ARGUED')}" for m in found)


def equivalents(results: Results) -> str:
    """Return the equivalent controls, why they are equivalent, and what found them, in Markdown."""
    lines = ["| control | file | why nothing can tell | found by |", "| --- | --- | --- | --- |"]
    for m in CONTROLS:
        said = [results.of(m, side) for side in SIDES]
        places = [r.place for r in said if r and r.found]
        answer = "; ".join(places) or (_PASSED if said[0] else "not run")
        lines.append(f"| `{m.name}` | `{m.file}` | {m.equivalent} | {answer} |")
    return "\n".join(lines)


def _by(results: Results, mutant: Mutant, side: str) -> bool:
    result = results.of(mutant, side)
    return result is not None and result.found


def _cell(result: Result | None, asked: object) -> str:
    if result is None:
        return "not run" if asked else "–"
    if result.side == "night":
        return result.place.replace("|", "\\|") or _PASSED
    file, _, test = result.place.removeprefix("tests/").partition("::")
    return f"`{Path(file).name}::{test}`" if test else f"`{file}`" if file else _PASSED


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0 if enough mutants were found, and no control."""
    everything = (*MUTANTS, *CONTROLS)
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="where results go")
    parser.add_argument("--only", action="append", help="only this mutant, again (repeatable)")
    packages = sorted({m.package for m in everything})
    parser.add_argument("--package", choices=packages, help="only mutants of this package")
    parser.add_argument("--side", choices=SIDES, help="only the tests, or only nights")
    parser.add_argument("--again", action="store_true", help="run again what nothing found")
    parser.add_argument("--wide", action="store_true", help="then the rest of a package's tests")
    add_executor(parser)
    parser.add_argument("--run", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument(
        "--write", action="store_true", help="put the table in docs/tables/mutants.md"
    )
    asked = parser.parse_args(arguments)
    # Exit normally on SIGTERM, so that the copy of the tree is removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    results = Results(asked.results)
    unknown = set(asked.only or ()) - {m.name for m in everything}
    if unknown:
        parser.error(f"no mutant {', '.join(sorted(unknown))}")
    if asked.run:
        chosen = [
            m
            for m in in_turns(everything)
            if (not asked.only or m.name in asked.only) and asked.package in (None, m.package)
        ]
        sides = (asked.side,) if asked.side else SIDES
        options = Options(
            sides, asked.again, bool(asked.only), asked.wide, asked.executor, asked.address
        )
        run(chosen, results, options)
    tables = {
        COUNTS: counts(results),
        SURVIVORS: argued(results),
        EQUIVALENT: equivalents(results),
        TABLE: table(results),
    }
    print(tables[COUNTS], tables[SURVIVORS], tables[EQUIVALENT], sep="\n\n")
    for name, lines in tables.items() if asked.write else ():
        renew(DOCUMENT, f"<!-- {name}: begin -->", f"<!-- {name}: end -->", lines)
    share = sum(map(results.found, MUTANTS)) / len(MUTANTS)
    return 0 if share >= SHARE and not any(map(results.found, CONTROLS)) else 1


if __name__ == "__main__":
    sys.exit(main())
