"""What a bench measures on request: lengths, rows, bfloat16, and a package of another process."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from reports.bench import lengths, other, variants
from reports.bench import run as bench_module
from reports.bench.figures import LENGTH_GOALS, length_timings
from reports.bench.jax_work import program_bytes
from reports.bench.other import ABSENT, start_other
from reports.bench.run import Options
from reports.bench.worker import Worker, WorkerError
from reports.bench.workloads import SIZES, inputs
from tests.helpers import cli
from tests.reports.bench.small import SHARED, TINY

CHILD = """
import sys
from reports.bench.worker import serve

def fail(count):
    print("on its stdout")
    raise RuntimeError(f"it failed {count} times")

serve({"version": "1"}, {"print": print, "fail": fail}, {"half": lambda: 0.5})
"""


OTHER = {**SHARED, "identity": "with 9.8.7"}


def quiet(line: str) -> None:
    pass


# -- lengths


def rows_of(sizes: Sequence[float], slowdown: float = 1.0) -> dict[tuple[str, str], Any]:
    rounds = {2048: (1.0, 2.0, 4.0), 8192: (4.0, 8.0, 17.0), 32768: (16 * slowdown, 31.0, 99.0)}
    rows = length_timings("forward", rounds, dict(zip(rounds, sizes, strict=True)), SHARED)
    return {(t.work, t.metric): t for t in rows}


def test_time_per_token_is_over_that_of_the_shortest() -> None:
    rows = rows_of((1e6, 2e6, 4e6))
    assert rows["forward, 8192 tokens", "token_ratio"].value == 1.0
    assert rows["forward, 8192 tokens", "token_ratio"].rounds == (1.0, 1.0, 17 / 16)
    assert rows["forward, 32768 tokens", "token_ratio"].value == 31 / 32
    assert ("forward, 2048 tokens", "token_ratio") not in rows


@pytest.mark.parametrize(("power", "reached"), [(1.0, True), (1.2, False), (2.0, False)])
def test_memory_must_be_linear(power: float, reached: bool) -> None:
    # A constant part, of the weights, and what grows.
    rows = rows_of([5e8 + 1e4 * n**power for n in (2048, 8192, 32768)])
    row = rows["forward, 32768 tokens", "token_bytes_ratio"]
    assert row.reached is reached
    assert row.value == pytest.approx(1.0) or power > 1


@pytest.mark.parametrize("metric", LENGTH_GOALS)
def test_a_goal_of_lengths_is_the_largest_value(metric: str) -> None:
    goal = LENGTH_GOALS[metric]
    growth = [1.0, 2.0, 2.0 + 4 * goal * (1 + 1e-9)]
    [over] = [t for t in rows_of(growth).values() if t.metric == "token_bytes_ratio"]
    slow = rows_of((1.0, 2.0, 3.0))["forward, 32768 tokens", "token_ratio"]
    row = over if metric == "token_bytes_ratio" else slow
    assert row.goal == goal
    assert row.reached is (row.value <= goal)


def test_lengths_take_turns_and_shorter_ones_are_called_more_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[str, str, int]] = []

    class Fake:
        def __init__(self, arguments: Sequence[str]) -> None:
            self.length = arguments[-2]

        def work(self, name: str):
            return lambda count: calls.append((name, self.length, count))

        def number(self, name: str) -> float:
            return 1e3 * int(self.length)

        __enter__ = lambda self: self  # noqa: E731
        __exit__ = lambda self, *error: None  # noqa: E731

    monkeypatch.setattr(lengths, "Worker", Fake)
    rows = lengths.bench_lengths((4, 8, 64), 2, None, SHARED, quiet)
    once = [("4", lengths.MOST_CALLS), ("8", 8), ("64", 1)]
    assert calls == [(work, *call) for work in lengths.WORKS for call in once * 3]
    assert {t.value for t in rows if t.metric == "token_bytes"} == {1e3}
    assert {t.note for t in rows if t.metric == "other_ratio"} == {ABSENT}


def test_the_other_package_is_called_once_a_round_at_each_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []

    class Fake:
        def __init__(self, *arguments: Any, **loss: Any) -> None:
            asked.append((*arguments[1:], loss))
            self.facts = {"version": "9.8.7"}
            if arguments[2] == 8:
                raise WorkerError("out of memory")

        def work(self, name: str):
            return lambda count: asked.append((name, count))

        __enter__ = lambda self: self  # noqa: E731
        __exit__ = lambda self, *error: None  # noqa: E731

    monkeypatch.setattr(lengths, "start_other", Fake)
    ours = {"forward": (1.0, 2.0), "train_step": (3.0, 4.0)}
    rows = [lengths._other_at(n, ours, Path(), SHARED, quiet) for n in (4, 8)]
    config, loss = SIZES["long"]
    assert loss
    calls = [("forward", 1)] * 3 + [("train_step", 1)] * 3
    assert asked == [(config, 4, loss), *calls, (config, 8, loss)]
    (seconds, ratio, *_), failed = rows
    assert (seconds.work, seconds.metric) == ("forward, 4 tokens", "other_seconds")
    assert seconds.identity == f"{SHARED['identity']} 9.8.7"
    # They took no turns: a quotient of rounds would mean nothing.
    assert seconds.repeats == 2 and ratio.rounds == ()
    assert ratio.value == pytest.approx(seconds.value / 1.5)
    assert {t.note for t in failed} == {"out of memory"}
    assert all(math.isnan(t.value) for t in failed)


def test_the_memory_of_a_program_grows_with_its_length() -> None:
    def size(length: int) -> int:
        model, ids = inputs(TINY, length)
        return program_bytes("forward", model, jnp.asarray(ids))

    # Its weights are arguments, and its logits are results.
    weights = size(4) - (size(8) - size(4))
    assert weights > 0
    assert size(8) - size(4) >= 4 * TINY.vocab_size * np.float32().itemsize


# -- rows and bfloat16


def fakes(monkeypatch: pytest.MonkeyPatch, calls: list[tuple[str, int]]) -> None:
    def side(name: str):
        def works(model, ids, autocast=False):
            who = f"{name} autocast" if autocast else f"{name} {model}"
            names = ("forward", "train_step", "decode", "generate")
            return {work: lambda count: calls.append((who, count)) for work in names}

        return works

    monkeypatch.setattr(variants, "inputs", lambda c, *sizes: (str(c.compute_dtype), sizes))
    monkeypatch.setattr(variants, "jax_workloads", side("jax"))
    monkeypatch.setattr(variants, "reference_workloads", side("reference"))

    class Other:
        def __init__(self, place: Path, config: Any, length: int, rows: int) -> None:
            self.name = f"other {config.compute_dtype}"

        def work(self, name: str):
            return lambda count: calls.append((self.name, count))

        __enter__ = lambda self: self  # noqa: E731
        __exit__ = lambda self, *error: None  # noqa: E731

    monkeypatch.setattr(variants, "start_other", Other)


def test_bfloat16_takes_turns_with_float32_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []
    fakes(monkeypatch, calls)
    rows = variants.bench_bfloat16(TINY, 8, 2, Path(), SHARED, OTHER, quiet)
    sides = ("jax float32", "jax bfloat16", "reference float32", "reference autocast")
    assert calls == [(side, 1) for side in (*sides, "other bfloat16")] * 6
    metrics: dict[str, set[str]] = {}
    for timing in rows:
        if timing.repeats:
            metrics.setdefault(timing.identity, set()).add(timing.metric)
    assert metrics == {
        "same": {"jax_seconds", "float32_ratio", "reference_seconds", "ratio"},
        "with 9.8.7": {"other_seconds", "other_ratio"},
    }


def test_rows_count_every_token_and_name_who_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []
    fakes(monkeypatch, calls)
    rows = variants.bench_rows(TINY, (1, 8), 2, None, SHARED, quiet)
    assert {t.work for t in rows} == {
        *("decode, 1 row", "generate, 1 row", "decode, 8 rows", "generate, 8 rows")
    }
    assert {count for _, count in calls} == {variants.DECODE_STEPS, variants.NEW_TOKENS}
    by_key = {(t.work, t.metric): t for t in rows}
    seconds = by_key["decode, 8 rows", "jax_seconds"].value
    speed = by_key["decode, 8 rows", "tokens_per_second"].value
    assert speed * seconds == pytest.approx(8 * variants.DECODE_STEPS)
    assert by_key["generate, 8 rows", "ratio"].goal == 1.0
    for work in {t.work for t in rows}:
        assert math.isnan(by_key[work, "other_ratio"].value)
        assert by_key[work, "other_ratio"].note == ABSENT


def test_without_the_reference_the_ratios_of_bfloat16_are_not_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent(*arguments: object, **more: object) -> None:
        raise RuntimeError("megalodon is not installed")

    fakes(monkeypatch, [])
    monkeypatch.setattr(variants, "reference_workloads", absent)
    rows = variants.bench_bfloat16(TINY, 8, 2, None, SHARED, OTHER, quiet)
    noted = {t.metric: t.note for t in rows if t.note}
    theirs = dict.fromkeys(("other_seconds", "other_ratio"), ABSENT)
    absent = ("reference_seconds", "ratio", "reference_float32_ratio")
    assert noted == theirs | dict.fromkeys(absent, "megalodon is not installed")


# -- a process apart


def child() -> Worker:
    return Worker(("-c", CHILD))


def test_a_worker_answers_whatever_is_printed() -> None:
    with child() as worker:
        assert worker.facts == {"version": "1"}
        worker.work("print")(7)
        assert worker.number("half") == 0.5
        with pytest.raises(WorkerError, match=r"ended with exit code 1: .*it failed 3 times"):
            worker.work("fail")(3)
        # And so does every request after its end.
        with pytest.raises(WorkerError, match="it failed 3 times"):
            worker.number("half")


@pytest.mark.parametrize(
    ("python", "code", "message"),
    [
        (
            sys.executable,
            "raise SystemExit('no such package')",
            "with exit code 1: no such package",
        ),
        (sys.executable, "raise SystemExit(0)", "with exit code 0: without a message"),
        ("/nowhere/python", "", "/nowhere/python cannot be run"),
    ],
)
def test_a_worker_that_does_not_start_says_why(python: str, code: str, message: str) -> None:
    with pytest.raises(WorkerError, match=message):
        Worker(("-c", code), python)


PACKAGE = """
import equinox as eqx, jax, jax.numpy as jnp

def MegalodonConfig(*, vocab_size, compute_dtype, **rest):
    assert compute_dtype == jnp.float32
    return Config(vocab_size)

class Config:
    def __init__(self, vocab_size):
        self.vocab_size = vocab_size

class MegalodonForCausalLM(eqx.Module):
    table: jax.Array
    bias: jax.Array

    def __init__(self, config, *, key):
        self.table = jax.random.normal(key, (config.vocab_size, 3))
        self.bias = jnp.zeros(5)

    def __call__(self, tokens, cache=None, return_cache=False):
        return self.table[tokens], tokens if return_cache else None
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with a `megalodon_jax` that is not this project's."""
    (tmp_path / "megalodon_jax").mkdir()
    (tmp_path / "megalodon_jax" / "__init__.py").write_text(PACKAGE, encoding="utf-8")
    (tmp_path / "megalodon_jax-9.8.7.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: megalodon-jax\nVersion: 9.8.7\n"
    (tmp_path / "megalodon_jax-9.8.7.dist-info" / "METADATA").write_text(metadata, encoding="utf-8")
    return tmp_path


def test_the_other_package_runs_although_its_name_is_ours(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Vectors do not count: 32 rows of 3.
    table = [SimpleNamespace(shape=(32, 3)), SimpleNamespace(shape=(8,))]
    monkeypatch.setattr(other, "weight_table", lambda config: table)
    with start_other(package, TINY, 8, rows=2) as worker:
        file = str(package / "megalodon_jax" / "__init__.py")
        assert worker.facts == {"version": "9.8.7", "file": file, "parameters": 96}
        for name in ("forward", "prefill", "decode"):
            worker.work(name)(2)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"parameters": 7}, r"9\.8\.7 has matrices with 7 parameters .* not the same work"),
        ({"file": str(Path(other.__file__).parents[2] / "megalodon_jax/__init__.py")}, "project's"),
    ],
)
def test_what_is_not_the_other_package_is_refused(facts: dict[str, Any], message: str) -> None:
    given = {"version": "9.8.7", "file": "/elsewhere/__init__.py", "parameters": 0, **facts}
    with pytest.raises(WorkerError, match=message):
        other._check(given, Path("given"), TINY)


def test_a_folder_without_the_package_is_named(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"a folder that contains megalodon_jax.*pip install"):
        start_other(tmp_path, TINY, 8)


def test_an_environment_is_taken_by_its_python(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    for place in (tmp_path, python):
        assert other._interpreter(place) == (str(python), "")


# -- the command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "2048"], "expected a second length to compare, such as 2048,2048"),
        (["--lengths", "2k,8k"], "expected integers such as 1,8,64, received '2k,8k'"),
        (["--rows", "0,8"], "expected integers such as 1,8,64, received '0,8'"),
    ],
)
def test_wrong_lists_are_refused_in_words(arguments: list[str], message: str) -> None:
    result = cli("bench", *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_lists_are_read_in_order_and_all_is_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Options] = []

    def stop(options: Options, report: object) -> None:
        asked.append(options)
        raise SystemExit(0)

    monkeypatch.setattr(bench_module, "bench", stop)
    monkeypatch.setenv("MEGALODON_JAX_OTHER", str(tmp_path))
    cli("bench", "--out", tmp_path, "--lengths", "8,2,8", "--rows", "all", "--no-memory")
    assert asked == [
        Options(3, False, lengths=(2, 8), rows=(1, 8, 64), bfloat16=False, other=tmp_path)
    ]
