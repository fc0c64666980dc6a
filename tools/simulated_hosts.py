"""Nightly runs and tests under the instruction sets and threads of other machines, as a table.

    python -m tools.simulated_hosts             # run every host, then print the table
    python -m tools.simulated_hosts --write     # ... and put it in docs/verdicts.md
    python -m tools.simulated_hosts --table     # only the table of what was run

XLA, ATen, oneDNN, MKL, OpenBLAS and NumPy are limited together, so that one processor computes like
several others. Each host runs a night live and recorded, the tests that compare with stored
numbers, and a night with a deliberate loss of accuracy, which must be REGRESSED.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from parity.executors.executor import Executor
from parity.executors.item import Answer, Item, Needs, State
from parity.executors.sweep import open_executor, run
from tools.document import renew
from tools.recorded import add_executor

if TYPE_CHECKING:
    from parity.engine.measure.measurement import Measurement
    from parity.tolerances import Rule

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "verdicts.md"
HOSTS_TABLE, BOUNDS_TABLE = "simulated hosts", "bounds by host"
"""Names of the tables, in the comments around each of them in the document."""
TESTS = (
    "tests/parity/deepseek_v3/test_comparison.py",
    "tests/parity/deepseek_v3/test_model.py",
    "tests/parity/megalodon/test_triangle.py",
    "tests/parity/megalodon/test_low_precision.py",
    "tests/stability/activations/test_activations.py",
    "tests/stability/nonfinite/test_nonfinite.py",
    "tests/stability/products/test_what_if.py",
    "tests/megalodon_jax/quantization/test_gemm.py",
    "tests/megalodon_jax/layers",
    "tests/megalodon_jax/test_derivatives.py",
    "tests/megalodon_jax/test_loss.py",
    "tests/megalodon_jax/test_mixed_dtypes.py",
    "tests/megalodon_jax/test_stacked.py",
)
"""Tests that compare with stored numbers, or use a bound that is no multiple of a noise floor."""
LOSS_CASES = ("plain", "byte_lm")
"""Cases measured by a night with a loss of accuracy."""
LOST_BITS = 2
"""Bits that the negative control removes from the 23 of a float32 product."""


@dataclass(frozen=True)
class Host:
    """A simulated machine: the instructions its libraries may use, and its threads."""

    name: str
    needs: str
    """Processor flag without which this machine cannot simulate it."""
    limits: Mapping[str, str]
    threads: int

    def needs_of(self) -> Needs:
        """Return the needs of a worker that computes like this host: instructions and threads."""
        return Needs(self.threads, threads=self.threads, environment=self.limits)


def _limits(xla: str, aten: str, onednn: str, mkl: str, openblas: str) -> dict[str, str]:
    values = (f"--xla_cpu_max_isa={xla}", aten, onednn, mkl, openblas)
    return dict(zip(_LIMITS, values, strict=True))


_LIMITS = (
    *("XLA_FLAGS", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS"),
    "OPENBLAS_CORETYPE",
)
_TESTING = ("EQX_ON_ERROR", "JAX_DISABLE_MOST_OPTIMIZATIONS")
"""Environment variables that `make test` sets and a night does not use."""
_AVX512 = _limits("AVX512", "avx512", "AVX512_CORE", "AVX512", "SkylakeX")
_AVX2 = _limits("AVX2", "avx2", "AVX2", "AVX2", "Haswell")
_AVX = _limits("AVX", "default", "AVX", "AVX", "Sandybridge")
_SSE = _limits("SSE4_2", "default", "SSE41", "SSE4_2", "Nehalem")
_EIGEN = "--xla_cpu_experimental_ynn_fusion_type="
_ONEDNN = (
    f"{_EIGEN} --xla_cpu_experimental_onednn_fusion_type=LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT "
    "--xla_cpu_use_onednn=true"
)
"""Flags that make XLA use another library for matrix products than YNN, jaxlib's default.

YNN queries the processor itself, so `--xla_cpu_max_isa` does not limit it."""
# INDIVIDUAL_DOT, because with DOT jaxlib 0.10.2 puts `a @ b + c @ d` into one graph, which oneDNN
# cannot compile. Built without exceptions, it writes "partition compile failed" and ends the
# process with the instruction ud2 (SIGILL, exit -4), on every processor and without any limit.
# jaxlib cannot cache programs with oneDNN's products, and warns about each.
_UNCACHED = {"JAX_ENABLE_COMPILATION_CACHE": "false"}


def _by(products: str, limits: dict[str, str]) -> dict[str, str]:
    return limits | {"XLA_FLAGS": f"{limits['XLA_FLAGS']} {products}"}


HOSTS = (
    Host("no limit, 2 threads", "sse4_2", {}, 2),
    Host("no limit, 1 thread", "sse4_2", {}, 1),
    Host("AVX512, 2 threads", "avx512f", _AVX512, 2),
    Host("AVX2, 2 threads", "avx2", _AVX2, 2),
    Host("AVX2 by Eigen, 2 threads", "avx2", _by(_EIGEN, _AVX2), 2),
    Host("AVX2 by oneDNN, 2 threads", "avx2", _by(_ONEDNN, _AVX2) | _UNCACHED, 2),
    Host("AVX, 1 thread", "avx", _AVX, 1),
    Host("SSE4.2, 2 threads", "sse4_2", _SSE, 2),
    Host("SSE4.2, 1 thread", "sse4_2", _SSE, 1),
    Host("SSE4.2 by Eigen, 1 thread", "sse4_2", _by(_EIGEN, _SSE), 1),
)


def available() -> list[Host]:
    """Return the hosts that this machine can simulate."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    return [host for host in HOSTS if host.needs in text.split()]


def folder_of(out: Path, host: Host, what: str) -> Path:
    """Return the folder of one of a host's runs."""
    return out / host.name.replace(", ", "-").replace(" ", "-") / what


def measure(
    hosts: Sequence[Host], out: Path, executor: Executor, tests: bool = True
) -> Iterator[Answer]:
    """Run what has no result yet, and yield exit codes as they arrive: live and recorded nights,
    the negative control, and `TESTS`, of every host.

    Workers write below `out`, which must be visible to all of them.
    """
    items = {}
    for host in hosts:
        for what, command in _commands(host, out).items():
            done = folder_of(out, host, what) / "exit"
            if not done.is_file() and (tests or what != "tests"):
                words = {"command": command, "log": str(done.with_name("log"))}
                name = f"{host.name}: {what}"
                items[done] = Item(name, "tools.simulated_hosts:run_on", words, host.needs_of())
    paths = {item.name: path for path, item in items.items()}
    for answer in run(list(items.values()), executor):
        if answer.state is State.DONE:
            paths[answer.name].write_text(str(answer.value), encoding="utf-8")
        yield answer


def run_on(command: list[str], log: str) -> int:
    """Run a command on a worker that is a simulated host; return its exit code."""
    path = Path(log)
    path.parent.mkdir(parents=True, exist_ok=True)
    own = {n: v for n, v in os.environ.items() if n not in _TESTING}
    cache = {"JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax")}
    with path.open("w", encoding="utf-8") as file:
        words = {**cache, **own, "PYTHONPATH": str(ROOT)}
        return subprocess.run(command, cwd=ROOT, env=words, stdout=file, stderr=file).returncode


def _commands(host: Host, out: Path) -> dict[str, list[str]]:
    def night(what: str, *more: str) -> list[str]:
        folder = folder_of(out, host, what)
        return ["-m", "reports.cli", "nightly", "--out", str(folder / "runs"), *more]

    python, control = sys.executable, folder_of(out, host, "control")
    return {
        "live": [python, *night("live", "--reference", "live")],
        "recorded": [python, *night("recorded", "--reference", "recorded")],
        "control": [python, "-m", "tools.simulated_hosts", "--lose", str(control)],
        "tests": [python, "-m", "pytest", "-q", "-x", *TESTS],
    }


@contextlib.contextmanager
def lost_accuracy(bits: int = LOST_BITS) -> Iterator[None]:
    """Reduce the precision of float32 linear maps' inputs and outputs within this context.

    Errors grow by about half. No tolerance detects it: gates stay within multiples of their floors.
    """
    from unittest.mock import patch

    import jax
    import jax.numpy as jnp

    from megalodon_jax.layers import linear

    healthy = linear.matmul

    def narrow(x):
        if x.dtype != jnp.float32:
            return x
        return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=23 - bits)

    def lossy(x, *args, **kwargs):
        return narrow(healthy(narrow(x), *args, **kwargs))

    jax.clear_caches()
    try:
        with patch.object(linear, "matmul", lossy):
            yield
    finally:
        jax.clear_caches()


def lose(folder: Path) -> int:
    """Run a night with a loss of accuracy; return its exit code."""
    os.environ.setdefault("EQX_ON_ERROR", "off")
    from reports.nightly.run import Options, nightly

    with lost_accuracy():
        options = Options(folder / "runs", cases=LOSS_CASES, reference="recorded")
        outcome = nightly(options, lambda line: print(line, file=sys.stderr))
    assert outcome.decision is not None
    print(f"{outcome.decision.word}: {outcome.decision.sentence}")
    return int(outcome.decision.exit_code)


@dataclass(frozen=True)
class Row:
    """Results of one host's nights, compared with the pinned run."""

    host: str
    verdicts: tuple[str, str, str]
    """Verdicts: live, recorded, and with the loss of accuracy."""
    tests: str
    """Counts of pytest (`tests_of`)."""
    compared: int
    """Number of levels of the live night that were compared with the pinned run."""
    megalodon: tuple[float, float]
    """Smallest and largest ratio of Megalodon's typical levels to the pinned ones, live night."""
    second: tuple[float, float]
    """The same ratios for the second architecture, MLA + MoE."""
    excess: float
    """Largest |ln ratio| / ln limit of a level, in the live or the recorded night."""
    share: float
    """Largest fraction of its tolerance that a gate used, in the live or the recorded night."""
    control: float
    """Largest ratio of a typical level to the pinned one, in the night with a loss of accuracy."""


def row_of(out: Path, host: Host) -> Row | None:
    """Return the row of a host; None if it was not measured."""
    from reports.registry.lookup import judge_stored

    runs: dict[str, Path] = {}
    for what in ("live", "recorded", "control"):
        stored = sorted(folder_of(out, host, what).glob("runs/*/run.json"))
        if not stored:
            return None
        runs[what] = stored[0].parent
    result = {what: judge_stored(folder) for what, folder in runs.items()}
    comparison = {what: result[what].decision.comparisons[0] for what in result}
    typical = [d for d in comparison["live"].compared if d.what == "typical"]
    second = [d.ratio for d in typical if d.group[0].startswith("mla-moe")]
    first = [d.ratio for d in typical if not d.group[0].startswith("mla-moe")]
    shares = [
        m.fraction
        for what in ("live", "recorded")
        for m in result[what].run.measurements
        if math.isfinite(m.fraction)
    ]
    largest = comparison["control"].largest
    # The planted loss also fails the dtype audit, so require that the levels alone detect it.
    found_out = "REGRESSED" if comparison["control"].drifts else "missed"

    def word(what: str) -> str:
        return result[what].decision.word.value

    return Row(
        host.name,
        (word("live"), word("recorded"), found_out),
        tests_of(folder_of(out, host, "tests")),
        comparison["live"].comparable,
        (min(first), max(first)),
        (min(second), max(second)),
        max(d.excess for what in ("live", "recorded") for d in comparison[what].compared),
        max(shares),
        largest.ratio if largest else math.nan,
    )


def tests_of(folder: Path) -> str:
    """Return pytest's counts on a host, or "not run".

    They start with the exit code if it is not 0: a process that died counted nothing.
    """
    if not (folder / "exit").is_file():
        return "not run"
    code = (folder / "exit").read_text(encoding="utf-8").strip()
    lines = (folder / "log").read_text(encoding="utf-8").strip().splitlines()
    counted = lines[-1].strip("= ").partition(" in ") if lines else ("", "", "")
    told = counted[0] if counted[1] and counted[0][:1].isdigit() else "no counts, see its log"
    return told if code == "0" else f"exit {code}: {told}"


def table(rows: Sequence[Row]) -> str:
    """Return the rows as the Markdown table of docs/verdicts.md."""
    lines = [
        "| host | night live / recorded | tests | levels | Megalodon | MLA + MoE, pooled "
        "| furthest level | closest gate | with a loss |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in rows:
        spans = " | ".join(f"{low:.2f}-{high:.2f}" for low, high in (r.megalodon, r.second))
        lines.append(
            f"| {r.host} | {r.verdicts[0]} / {r.verdicts[1]} | {r.tests} | {r.compared} | {spans} "
            f"| {r.excess:.2f} | {r.share:.2f} | {r.verdicts[2]}, {r.control:.2f} |"
        )
    return "\n".join(lines)


def bounds(out: Path, hosts: Sequence[Host]) -> str:
    """Return the largest used fraction of each absolute bound, by host, as a Markdown table.

    A bound that is a maximum with a noise floor counts for gates where it is the larger part.
    """
    from reports.text import edge_name, metric_name

    nights = {host.name: _gates(out, host) for host in hosts}
    nights = {name: gates for name, gates in nights.items() if gates}
    lines = [
        f"| compared | kind | bound | {' | '.join(nights)} |",
        "| --- | --- | --- |" + " --- |" * len(nights),
    ]
    for row in rules():
        shares = [
            max((m.fraction for m in gates if is_of(row, m)), default=None)
            for gates in nights.values()
        ]
        if all(share is None for share in shares):
            continue
        kinds = ", ".join(row.kinds)
        told = " | ".join("-" if share is None else f"{share:.2g}" for share in shares)
        words = f"{metric_name(row.metric)} {row.absolute:.1e}"
        lines.append(f"| {edge_name(row.edge)} | {kinds} | {words} | {told} |")
    return "\n".join(lines)


def rules() -> list[Rule]:
    """Return the rows of the tolerance tables that contain an absolute bound."""
    from parity.tolerances import PORTS, TABLE

    return [row for row in (*TABLE, *PORTS) if row.absolute]


def _gates(out: Path, host: Host) -> list[Measurement]:
    from reports.store.runs import read_run

    stored = [
        path
        for what in ("live", "recorded")
        for path in folder_of(out, host, what).glob("runs/*/run.json")
    ]
    rows = [m for path in stored for m in read_run(path.parent).measurements]
    return [m for m in rows if math.isfinite(m.fraction)]


def is_of(row: Rule, m: Measurement) -> bool:
    """Return whether the tolerance of a measurement is the absolute bound of a row."""
    named = (m.edge, m.metric) == (row.edge, row.metric) and m.kind in row.kinds
    return named and m.tolerance == row.absolute


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0 if every host has the expected results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "hosts", help="where runs go")
    parser.add_argument("--host", action="append", help="only this host (repeatable)")
    parser.add_argument("--tests", action=argparse.BooleanOptionalAction, default=True)
    add_executor(parser)
    parser.add_argument("--table", action="store_true", help="run nothing, print the table")
    parser.add_argument("--write", action="store_true", help="put the table in docs/verdicts.md")
    parser.add_argument("--lose", type=Path, help="run one night with a loss of accuracy, here")
    asked = parser.parse_args(arguments)
    if asked.lose:
        return lose(asked.lose)
    hosts = [host for host in available() if not asked.host or host.name in asked.host]
    if not asked.table:
        engine = open_executor(asked.executor, asked.address)
        for answer in measure(hosts, asked.out, engine, asked.tests):
            print(f"{answer.name}: {answer.reason or f'exit {answer.value}'}", file=sys.stderr)
    rows = [row for host in hosts if (row := row_of(asked.out, host))]
    tables = {HOSTS_TABLE: table(rows), BOUNDS_TABLE: bounds(asked.out, hosts)}
    print("\n\n".join(tables.values()))
    for name, lines in tables.items() if asked.write else ():
        renew(DOCUMENT, f"<!-- {name}: begin -->", f"<!-- {name}: end -->", lines)
    return 0 if rows and all(holds(row, asked.tests) for row in rows) else 1


def holds(row: Row, tests: bool) -> bool:
    """Return whether a host's nights, and its tests if requested, ran with the expected results."""
    # Counts begin with a digit: tests that did not run, or died, have none.
    counted = row.tests[:1].isdigit()
    return row.verdicts == ("PASS", "PASS", "REGRESSED") and (counted or not tests)


if __name__ == "__main__":
    sys.exit(main())
