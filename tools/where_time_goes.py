"""Where the time of the bench's work goes, by kind of operation and by source file.

    python -m tools.where_time_goes            # print the tables of this machine
    python -m tools.where_time_goes --write    # ... and put them in docs/speed.md

The bench's own workloads run under JAX's profiler, tokens in runs of as many as the bench decodes.
Its events are the operations of the compiled programs; XLA is asked to write those programs down,
which say what each operation is made of and which line it comes from. The floors are measured in
the same run. A second process times the same where freed memory is kept (`KEPT`).
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
"""Environment variable with the folder that XLA writes its programs to."""
KEPT = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
}
"""Settings of glibc by which it gives no freed memory back: docs/speed.md "Memory that is kept"."""
_PROGRAM = (sys.executable, "-m", "tools.where_time_goes")
ROUNDS = 15
"""Of each work and its floor, in turn; the profile is taken of as many more."""
KINDS = {
    "products": frozenset(("dot", "convolution", "custom-call")),
    "transforms": frozenset(("fft",)),
    "loops": frozenset(("while", "conditional", "call")),
}
"""By kind: operations of which one makes a whole fusion of that kind, the first that fits."""
_MOVES = """
bitcast bitcast-convert broadcast concatenate constant copy copy-start copy-done convert
dynamic-slice dynamic-update-slice gather get-tuple-element iota pad parameter reshape reverse slice
transpose tuple
"""
MOVES = frozenset(_MOVES.split())
"""Operations that compute nothing: a fusion of these alone changes where numbers lie."""
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = .*?[\])}] ([\w\-]+)\(")
_CALLED = re.compile(r"(?:calls|to_apply)=%?([\w.\-]+)")
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_ENTRY = re.compile(r"^(\d+) (.*)$")
_NUMBER = re.compile(r"(\w+)=(\d+)")


@dataclass
class Program:
    """A compiled program: by instruction, its kind and the file of the project it comes from."""

    kinds: dict[str, str] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)


def program_of(text: str) -> Program:
    """Read a program as XLA writes it after optimisation."""
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
    """Return what a fusion of these operations is."""
    for kind, members in KINDS.items():
        if operations & members:
            return kind
    return "moves" if operations <= MOVES else "arithmetic"


def source_of(lines: Sequence[str], tables: dict[str, dict[int, str]]) -> str:
    """Return the innermost file of the project that the first of these lines comes from."""
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
    """A work's milliseconds, medians of rounds, and how its threads' time divides."""

    wall: float
    floor: float
    kinds: Counter[str]
    sources: Counter[str]


def measure(profiled: bool = True) -> dict[str, Share]:
    """Time every work of the bench, and profile it unless told otherwise."""
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
    """Return the milliseconds that a work's operations take, by kind and by source."""
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
            # The turns of a loop are events of their own.
            if kind in ("", "loops"):
                continue
            kinds[kind] += event.duration_ns / 1e6 / ROUNDS
            sources[program.sources[event.name]] += event.duration_ns / 1e6 / ROUNDS
    return kinds, sources


def written(module: str) -> Program:
    """Return the largest program of a name that XLA wrote down."""
    folder = Path(os.environ[DUMPED])
    files = sorted(
        folder.glob(f"*.{module}.*after_optimizations.txt"), key=lambda p: p.stat().st_size
    )
    return program_of(files[-1].read_text(encoding="utf-8")) if files else Program()


def measure_kept() -> dict[str, list[float]]:
    """Return the milliseconds of each work and of its floor where freed memory is kept."""
    environment = {**os.environ, **KEPT}
    command = (*_PROGRAM, "--times")
    run = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(run.stdout.splitlines()[-1])


def tables(shares: dict[str, Share], kept: dict[str, list[float]]) -> dict[str, str]:
    """Return the tables of the document."""
    from stability.experiments.document import markdown

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
    """Measure in a process whose programs are written down, and print or write the tables."""
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
                # A program out of the cache is not written down.
                "JAX_ENABLE_COMPILATION_CACHE": "false",
            }
            command = [*_PROGRAM, *(arguments or sys.argv[1:])]
            subprocess.run(command, env=environment, check=True)
        return
    made = tables(measure(), measure_kept())
    print(*made.values(), sep="\n\n")
    if chosen.write:
        from stability.experiments.document import renew

        for name, table in made.items():
            renew(DOCUMENT, f"<!-- {name}: begin -->", f"<!-- {name}: end -->", table)


if __name__ == "__main__":
    main()
