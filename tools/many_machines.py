"""Measures the guarantees of executors on this machine; the tables of docs/many-machines.md.

    python -m tools.many_machines equal            # a night here, in processes and on Ray
    python -m tools.many_machines equal --small    # ... of one case of each suite
    python -m tools.many_machines kills --times 50 # workers and drivers killed at random points
    python -m tools.many_machines scaling          # 10,000 items over 1, 2, 4 and 8 workers
    python -m tools.many_machines ... --write      # ... and put the tables in the page

`scaling` also extrapolates to 100 nodes, from the driver's cost per item.

The Ray cluster is Ray's own test cluster: three nodes that are processes of this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from parity.executors.item import Item, State
from parity.executors.sweep import ANSWERS, Answers, open_executor, run

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "many-machines.md"
NIGHT = ("length_c", "plain", "stream_tokens", "ema-mask", "nvfp4", "mla-moe dense")
"""A night of some minutes, with a case of every suite whose cases can be selected."""
ELSEWHERE = {"durations", "times", "created", "id", "environment", "shards", "parts", "verdict"}
"""Manifest fields that depend on time, host or provenance."""
ITEMS, PAUSE = 10_000, 0.005
"""Items of the scaling sweep, and the seconds that each sleeps."""
NODES, PROCESSORS = (1, 10, 100), 16
"""Extrapolation: numbers of machines, and processors of each."""
SECONDS = (0.1, 1.0, 10.0, 60.0)
"""Extrapolation: durations of an item."""
KILLED_ITEMS = 60


def pause(seconds: float, started: str = "", name: str = "") -> str:
    """Sleep; leave a note with the process number at the start, and one at the end."""
    note = Path(started) / f"{name}.{os.getpid()}" if started else None
    if note:
        note.touch()
    time.sleep(seconds)
    if note:
        note.with_suffix(f".{os.getpid()}.ended").touch()
    return name


@contextlib.contextmanager
def cluster(processors: int) -> Iterator[str]:
    """Start a Ray cluster of three nodes with this number of processors; provide its address."""
    from ray.cluster_utils import Cluster

    memory = 100 * 2**20
    shares = [processors // 3 + (turn < processors % 3) for turn in range(3)]
    head = {"num_cpus": shares[0], "object_store_memory": memory, "include_dashboard": False}
    nodes = Cluster(initialize_head=True, head_node_args=head)
    try:
        for share in shares[1:]:
            nodes.add_node(num_cpus=share, object_store_memory=memory, wait=False)
        nodes.wait_for_nodes()
        yield str(nodes.address)
    finally:
        nodes.shutdown()


def equal(small: bool) -> str:
    """Run a night in three ways, whole or a few cases; return the differences of their numbers."""
    from reports.store.runs import read_run

    with tempfile.TemporaryDirectory() as name, cluster(3) as address:
        ways = {
            "one process": ["--executor", "local:1"],
            "`--executor local:2`": ["--executor", "local:2"],
            "`--executor ray`, three nodes": ["--executor", "ray", "--address", address],
        }
        runs = {}
        seconds = {}
        for turn, (way, more) in enumerate(ways.items()):
            out = Path(name) / str(turn)
            command = [sys.executable, "-m", "reports.cli", "nightly", "--reference", "recorded"]
            command += [word for case in NIGHT if small for word in ("--case", case)]
            start = time.perf_counter()
            done = subprocess.run([*command, "--out", str(out), *more], cwd=ROOT)
            seconds[way] = time.perf_counter() - start
            print(f"{way}: exit {done.returncode} in {seconds[way]:.0f} s", file=sys.stderr)
            [folder] = [path.parent for path in out.glob("*/run.json")]
            runs[way] = read_run(folder)
    first = next(iter(runs.values()))
    lines = [
        "| night | seconds | measurements | that differ | findings, explanations | manifest |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for way, other in runs.items():
        rows = {m.key: repr(m) for m in first.measurements}
        mine = {m.key: repr(m) for m in other.measurements}
        differ = sum(rows.get(key) != mine.get(key) for key in rows.keys() | mine.keys())
        # Compared as text: an unmeasured number is NaN, which equals nothing.
        told = (repr((run.findings, run.explanations)) for run in (first, other))
        same = len(set(told)) == 1
        here, there = (asdict(r.manifest) for r in (first, other))
        fields = [n for n in here if n not in ELSEWHERE and here[n] != there[n]]
        lines.append(
            f"| {way} | {seconds[way]:.0f} | {len(mine)} | {differ} | "
            f"{'equal' if same else 'DIFFER'} | {', '.join(fields) or 'equal'} |"
        )
    return "\n".join(lines)


def sweep(out: Path, executor: str, address: str | None, count: int, seconds: float) -> None:
    """Run a sweep that others may kill; print its answers as JSON."""
    notes = out / "notes"
    notes.mkdir(parents=True, exist_ok=True)
    items = [
        Item(
            f"item {i}",
            f"{__name__ if __name__ != '__main__' else 'tools.many_machines'}:pause",
            {"seconds": seconds, "started": str(notes), "name": str(i)},
        )
        for i in range(count)
    ]
    with Answers.opened(out / "answers") as answers:
        found = list(run(items, open_executor(executor, address), answers))
    print(json.dumps([[a.name, a.state, a.value, a.attempts] for a in found]))


def kills(times: int, seed: int = 0) -> str:
    """Kill workers and drivers of sweeps at random points; return what was lost or duplicated."""
    lines = [
        "| executor | killed | times | items lost | counted twice | told as retried "
        "| done again after a driver's death |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    rng = random.Random(seed)
    with cluster(3) as address:
        for executor, where in (("local:2", None), ("ray", address)):
            for who in ("worker", "driver"):
                totals = [0] * 5
                while totals[0] < times // 4 + (times % 4 > 0):
                    one = _killed(executor, where, who, rng)
                    totals = [a + b for a, b in zip(totals, one, strict=True)]
                    print(executor, who, totals, file=sys.stderr, flush=True)
                cells = " | ".join(map(str, totals))
                lines.append(f"| {executor} | {who} | {cells} |")
    return "\n".join(lines)


def _killed(executor: str, address: str | None, who: str, rng: random.Random) -> list[int]:
    """Run a sweep and kill one worker or the driver. Return whether one was killed, and how many
    items were lost, answered twice, reported as retried, and started again.
    """
    with tempfile.TemporaryDirectory() as name:
        out = Path(name)
        command = [sys.executable, "-m", "tools.many_machines", "sweep", "--out", name]
        command += ["--executor", executor, *(["--address", address] if address else [])]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, cwd=ROOT, stdout=pipe, text=True) as driver:
            # At a random point: some item runs, and any number of items is done.
            wanted = rng.randrange(1, KILLED_ITEMS - 6)
            while len(list(out.glob("notes/*"))) < wanted and driver.poll() is None:
                time.sleep(0.005)
            killed = _kill(out, driver, who, rng)
            output = driver.communicate()[0]
        if who == "driver":
            output = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, check=True
            ).stdout
        answers = json.loads(output.strip().splitlines()[-1])
        names = [answer[0] for answer in answers if answer[1] == State.DONE]
        lost = KILLED_ITEMS - len(set(names))
        stored = len((out / "answers" / ANSWERS).read_text(encoding="utf-8").splitlines())
        twice = len(names) - len(set(names)) + abs(stored - len(set(names)))
        retried = sum(answer[3] > 1 for answer in answers)
        begun = [path.name.split(".")[0] for path in out.glob("notes/*") if path.suffix != ".ended"]
        return [int(killed), lost, twice, retried, len(begun) - len(set(begun))]


def _kill(out: Path, driver: subprocess.Popen[str], who: str, rng: random.Random) -> bool:
    """Kill the driver, or a worker that runs an item; return whether a process was killed."""
    if driver.poll() is not None:
        return False
    if who == "driver":
        driver.send_signal(signal.SIGKILL)
        return True
    while driver.poll() is None:
        notes = {path.name for path in out.glob("notes/*")}
        busy = sorted(n for n in notes if not n.endswith(".ended") and f"{n}.ended" not in notes)
        if busy:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(rng.choice(busy).rpartition(".")[2]), signal.SIGKILL)
                return True
    return False


@dataclass(frozen=True)
class Scaled:
    """Measured times of a sweep of items over some workers."""

    executor: str
    workers: int
    items: int
    seconds: float
    driver: float
    """CPU seconds of the driver."""

    @property
    def best(self) -> float:
        """Seconds that the workers need for sleeping alone."""
        return self.items * PAUSE / self.workers

    @property
    def more(self) -> float:
        """Overhead of each item in seconds, beyond its share of the sleep."""
        return (self.seconds - self.best) / self.items

    def row(self) -> str:
        """Return the measurement as a row of the table."""
        return (
            f"| {self.executor} | {self.workers} | {self.items:,} | {self.seconds:.1f} "
            f"| {self.items / self.seconds:.0f} | {self.best:.1f} | {1000 * self.more:.1f} ms "
            f"| {1000 * self.driver / self.items:.2f} ms |"
        )


def scale(executor: str, count: int, items: int) -> Scaled:
    """Run a number of items over a number of workers, storing every answer."""
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(cluster(count)) if executor == "ray" else None
        name = stack.enter_context(tempfile.TemporaryDirectory())
        text = f"local:{count}" if executor == "local" else executor
        work = [
            Item(str(i), "tools.many_machines:pause", {"seconds": PAUSE, "name": str(i)})
            for i in range(items)
        ]
        answers = stack.enter_context(Answers.opened(Path(name)))
        engine = open_executor(text, address)
        start, used = time.perf_counter(), time.process_time()
        states = [answer.state for answer in run(work, engine, answers)]
        seconds, driver = time.perf_counter() - start, time.process_time() - used
    assert states == [State.DONE] * items
    return Scaled(executor, count, items, seconds, driver)


def scaling(items: int = ITEMS, counts: Sequence[int] = (1, 2, 4, 8)) -> dict[str, str]:
    """Return the overhead of items, and its extrapolation to many nodes."""
    lines = [
        "| executor | workers | items | seconds | items a second | at best | more, per item "
        "| driver's processor, per item |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    cost = 0.0
    for executor in ("local", "ray"):
        for count in counts:
            scaled = scale(executor, count, items)
            cost = max(cost, scaled.driver / items)
            lines.append(scaled.row())
            print(lines[-1], file=sys.stderr, flush=True)
    return {"scaling": "\n".join(lines), "paper": paper(cost)}


def paper(cost: float) -> str:
    """Return the time of a sweep on many nodes if an item costs the driver `cost` seconds.

    An item is answered when a worker has run it and the driver has stored it, so items shorter
    than the number of workers times the cost leave workers idle.
    """
    lines = [
        "| nodes | workers | shortest item that keeps all busy "
        f"| {' | '.join(f'{ITEMS:,} of {s:g} s' for s in SECONDS)} |",
        "| --- | --- | --- |" + " --- |" * len(SECONDS),
    ]
    for nodes in NODES:
        workers = nodes * PROCESSORS
        cells = " | ".join(
            f"{max(math.ceil(ITEMS / workers) * seconds, ITEMS * cost + seconds):.0f} s"
            for seconds in SECONDS
        )
        lines.append(f"| {nodes} | {workers:,} | {workers * cost:.2g} s | {cells} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the requested measurement."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=("equal", "kills", "scaling", "sweep"))
    parser.add_argument("--times", type=int, default=50, help="number of kills")
    parser.add_argument("--items", type=int, default=ITEMS, help="items of `scaling`")
    parser.add_argument("--small", action="store_true", help="`equal`: only a few cases")
    parser.add_argument("--write", action="store_true", help="write the table into the page")
    parser.add_argument("--out", type=Path, help="output folder of a sweep")
    parser.add_argument("--executor", default="local:2", help="executor of a sweep")
    parser.add_argument("--address", help="Ray address of a sweep")
    asked = parser.parse_args(arguments)
    if asked.what == "sweep":
        sweep(asked.out, asked.executor, asked.address, KILLED_ITEMS, 0.02)
        return
    measured: dict[str, Callable[[], dict[str, str]]] = {
        "equal": lambda: {"equal": equal(asked.small)},
        "kills": lambda: {"kills": kills(asked.times)},
        "scaling": lambda: scaling(asked.items),
    }
    tables = measured[asked.what]()
    print(*tables.values(), sep="\n\n")
    if asked.write:
        from tools.document import renew

        for name, table in tables.items():
            renew(DOCUMENT, f"<!-- {name}: begin -->", f"<!-- {name}: end -->", table)


if __name__ == "__main__":
    main()
