"""Profile of the benchmark's workloads, by kind of operation and by source file.

    python -m tools.where_time_goes            # print the tables of this machine
    python -m tools.where_time_goes --write    # ... and put them in docs/speed.md

The benchmark's workloads run under JAX's profiler, with as many tokens per run as the benchmark
decodes. The profiler's events are operations of compiled programs. XLA also dumps these programs as
text, which shows the kind and source line of each operation. The floors are measured in the same
run. A second process measures the same times with freed memory kept (`KEPT`).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "speed.md"
DUMPED = "WHERE_TIME_GOES_PROGRAMS"
"""Environment variable with the folder that XLA dumps its programs to."""
KEPT = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
}
"""Settings of glibc that keep freed memory: docs/speed.md "Memory that is kept"."""
_PROGRAM = (sys.executable, "-m", "tools.where_time_goes")
ROUNDS = 15
"""Timed repetitions of each workload and its floor, alternating; as many more are profiled."""
KINDS = {
    "products": frozenset(("dot", "convolution", "custom-call")),
    "transforms": frozenset(("fft",)),
    "loops": frozenset(("while", "conditional", "call")),
}
"""Operations that determine a fusion's kind if it contains one of them; the first match counts."""
_MOVES = """
bitcast bitcast-convert broadcast concatenate constant copy copy-start copy-done convert
dynamic-slice dynamic-update-slice gather get-tuple-element iota pad parameter reshape reverse slice
transpose tuple
"""
MOVES = frozenset(_MOVES.split())
"""Operations that compute nothing: a fusion of only these moves numbers in memory."""
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = .*?[\])}] ([\w\-]+)\(")
_CALLED = re.compile(r"(?:calls|to_apply)=%?([\w.\-]+)")
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_ENTRY = re.compile(r"^(\d+) (.*)$")
_NUMBER = re.compile(r"(\w+)=(\d+)")


@dataclass
class Program:
    """A compiled program: kind and source file of each instruction."""

    kinds: dict[str, str] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)


def program_of(text: str) -> Program:
    """Parse the text of a program that XLA dumps after optimisation."""
    tables: dict[str, dict[int, str]] = {}
    bodies: dict[str, list[tuple[str, str, str]]] = {}
    table = body = None
    for line in text.splitlines():
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            table = tables.setdefault(line, {})
        elif table is not None and (entry := _ENTRY.match(line)):
            table[int(entry[1])] = entry[2]
        elif line.endswith("{") and not line.startswith(" "):
            name = line.removeprefix("ENTRY ").lstrip("%").split(" ", 1)[0]
            table, body = None, bodies.setdefault(name, [])
        elif body is not None and (found := _INSTRUCTION.match(line)):
            body.append((found[1], found[2], line))
    program = Program()
    for instructions in bodies.values():
        for name, operation, line in instructions:
            called = _CALLED.search(line)
            inside = bodies.get(called[1], []) if called and operation == "fusion" else []
            operations = {operation} if not inside else {o for _, o, _ in inside}
            program.kinds[name] = "products" if name.startswith("ynn") else kind_of(operations)
            lines = (line, *(text for _, _, text in reversed(inside)))
            program.sources[name] = source_of(lines, tables)
    return program


def kind_of(operations: set[str]) -> str:
    """Return the kind of a fusion of these operations: a key of `KINDS`, "moves" or
    "arithmetic"."""
    for kind, members in KINDS.items():
        if operations & members:
            return kind
    return "moves" if operations <= MOVES else "arithmetic"


def source_of(lines: Sequence[str], tables: dict[str, dict[int, str]]) -> str:
    """Return the innermost project file of the first of these lines that has one."""
    for line in lines:
        if frame := _FRAME.search(line):
            for file in frames(int(frame[1]), tables):
                if "megalodon_jax/" in file and "/sharding/" not in file:
                    return file.rpartition("megalodon_jax/")[2]
    return "elsewhere"


def frames(frame: int, tables: dict[str, dict[int, str]]) -> Iterator[str]:
    """Yield the files of a stack, the innermost frame first."""
    while True:
        numbers = dict(_NUMBER.findall(tables["StackFrames"].get(frame, "")))
        if not numbers:
            return
        location = tables["FileLocations"].get(int(numbers["file_location_id"]), "")
        file = dict(_NUMBER.findall(location)).get("file_name_id", "0")
        yield tables["FileNames"].get(int(file), "").strip('"')
        parent = int(numbers.get("parent_frame_id", "0"))
        if parent == frame:
            return
        frame = parent


@dataclass(frozen=True)
class Share:
    """Milliseconds of a workload (medians), and how its threads' time is divided."""

    wall: float
    floor: float
    kinds: Counter[str]
    sources: Counter[str]


def measure(profiled: bool = True) -> dict[str, Share]:
    """Time every workload of the benchmark, and optionally profile it."""
    import jax

    from megalodon_jax.checks import traced_checks
    from reports.bench import run, workloads

    shares = {}
    with jax.default_matmul_precision("highest"), traced_checks(False):
        model, ids = workloads.inputs(workloads.CONFIG, workloads.LENGTH)
        products = workloads.gemm_floor(model.config, workloads.LENGTH)
        leaves = [x for x in jax.tree.leaves(model) if hasattr(x, "nbytes")]
        nbytes = sum(x.nbytes for x in leaves)
        works = workloads.jax_workloads(model, ids)
        for name in ("forward", "train_step", "prefill", "decode"):
            work, count = works[name], workloads.DECODE_STEPS if name == "decode" else 1
            work(2)
            products(1)
            walls, floors = [], []
            for _ in range(ROUNDS):
                walls.append(workloads.seconds(work, count) / count)
                passes = run.PASSES.get(name)
                floors.append(
                    passes * workloads.seconds(products)
                    if passes
                    else workloads.copy_floor(nbytes, 1)[0]
                )
            kinds, sources = profile(work) if profiled else (Counter(), Counter())
            shares[name] = Share(
                1e3 * statistics.median(walls), 1e3 * statistics.median(floors), kinds, sources
            )
    return shares


def profile(work: Callable[[int], None]) -> tuple[Counter[str], Counter[str]]:
    """Return the milliseconds of a workload's operations, by kind and by source file."""
    import jax

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            work(ROUNDS)
        (path,) = Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
        programs: dict[str, Program] = {}
        kinds: Counter[str] = Counter()
        sources: Counter[str] = Counter()
        for event in (e for plane in data.planes for line in plane.lines for e in line.events):
            stats = dict(event.stats)
            module = str(stats.get("hlo_module", ""))
            if not module:
                continue
            if module not in programs:
                programs[module] = written(module)
            program = programs[module]
            kind = program.kinds.get(event.name, "")
            # The iterations of a loop have their own events.
            if kind in ("", "loops"):
                continue
            kinds[kind] += event.duration_ns / 1e6 / ROUNDS
            sources[program.sources[event.name]] += event.duration_ns / 1e6 / ROUNDS
    return kinds, sources


def written(module: str) -> Program:
    """Return the largest dumped program with this name."""
    folder = Path(os.environ[DUMPED])
    files = sorted(
        folder.glob(f"*.{module}.*after_optimizations.txt"), key=lambda p: p.stat().st_size
    )
    return program_of(files[-1].read_text(encoding="utf-8")) if files else Program()


def measure_kept() -> dict[str, list[float]]:
    """Return the milliseconds of each workload and its floor with freed memory kept."""
    environment = {**os.environ, **KEPT}
    command = (*_PROGRAM, "--times")
    run = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(run.stdout.splitlines()[-1])


def tables(shares: dict[str, Share], kept: dict[str, list[float]]) -> dict[str, str]:
    """Return the tables of the document, by name."""
    from stability.core.documents import markdown

    order = ["products", "transforms", "arithmetic", "moves"]
    times = ["ms", "over its floor", "memory kept, ms", "over its floor"]
    columns = ["work", *times, *order]
    rows = []
    for name, share in shares.items():
        total = share.kinds.total()
        parts = (f"{share.kinds[kind] / total:.0%}" for kind in order)
        pairs = (share.wall, share.floor), kept[name]
        figures = (text for a, b in pairs for text in (f"{a:.1f}", f"{a / b:.2f}"))
        rows.append([name, *figures, *parts])
    files = Counter[str]()
    for share in shares.values():
        files.update({file: n / share.sources.total() for file, n in share.sources.items()})
    lines = [
        [f"`{file}`" if "." in file else file]
        + [f"{s.sources[file] / s.sources.total():.0%}" for s in shares.values()]
        for file, _ in files.most_common(10)
    ]
    return {
        "time by kind": markdown(columns, rows),
        "time by file": markdown(["file", *shares], lines),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure in a process that dumps its programs, and print or write the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the tables into docs/speed.md")
    parser.add_argument("--times", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.times:
        times = {name: [s.wall, s.floor] for name, s in measure(profiled=False).items()}
        print(json.dumps(times))
        return
    if DUMPED not in os.environ:
        with tempfile.TemporaryDirectory() as folder:
            flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={folder}"
            environment = {
                **os.environ,
                DUMPED: folder,
                "XLA_FLAGS": f"{flags} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=.*",
                # A program loaded from the cache would not be dumped.
                "JAX_ENABLE_COMPILATION_CACHE": "false",
            }
            command = [*_PROGRAM, *(arguments or sys.argv[1:])]
            subprocess.run(command, env=environment, check=True)
        return
    made = tables(measure(), measure_kept())
    print(*made.values(), sep="\n\n")
    if chosen.write:
        from tools.document import renew

        for name, table in made.items():
            renew(DOCUMENT, f"<!-- {name}: begin -->", f"<!-- {name}: end -->", table)


if __name__ == "__main__":
    main()
