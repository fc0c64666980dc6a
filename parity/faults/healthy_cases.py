"""Random small cases without a bug: comparing them must report nothing (negative control).

The index of a case determines everything random in it. `VARIATIONS` consecutive cases share a
configuration and shapes, and so compiled programs. They differ in weights, inputs, masks, shifts
and the order of calls. Source: docs/parity.md "Faults".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from typing import Any

import jax
import numpy as np

from megalodon_jax.checks import traced_checks
from parity.engine.measure.compare import Comparison
from parity.engine.measure.measurement import Kind, Measurement, Verdict
from parity.executors.executor import Executor
from parity.executors.item import Item
from parity.executors.sweep import collect
from parity.megalodon.cases import Case
from parity.megalodon.edges import MegalodonEdge
from parity.megalodon.noise_floors import extended, truth
from parity.megalodon.runner import JaxSubject
from parity.megalodon.tolerance_table import NoiseFloors

VARIATIONS = 8
"""Number of consecutive cases that share a configuration."""
SHORTEST = 10
"""Smallest number of tokens of a text. With one or two targets a gradient may be 0, or 1 minus a
probability that rounds to 1, and a relative error would then be meaningless."""
EDGES = {edge.dtype: edge for edge in (MegalodonEdge.JAX64_ORACLE, MegalodonEdge.JAX32_ORACLE)}
"""Pair of compared sides by dtype of the JAX model."""


def healthy(index: int) -> Case:
    """Return the random small case with this index, from 0."""
    structure = _structure(np.random.default_rng([1, index // VARIATIONS]))
    rng = np.random.default_rng([2, index])
    data: dict[str, Any] = {
        "decay_shift": float(rng.choice([0.0, 0.0, rng.uniform(-7.0, 2.0)])),
        "mean_shift": float(rng.choice([0.0, 0.0, rng.uniform(-3.0, 3.0), 30.0])),
        "pad_inside": bool(rng.random() < 0.25),
    }
    if structure.cuts:
        # The first call, without a cache, is a separate program, so its length is not permuted.
        rest = rng.permutation(structure.cuts[1:])
        data["cuts"] = (structure.cuts[0], *(int(count) for count in rest))
    elif structure.padding != "none":
        data["padding"] = str(rng.choice(["right", "left", "interior"]))
    return replace(structure, name=f"healthy_{index}", **data)


def _structure(rng: np.random.Generator) -> Case:
    """Return a case with the random configuration and shapes that `VARIATIONS` consecutive cases
    share."""

    def one(*choices: Any) -> Any:
        return choices[rng.integers(len(choices))]

    def flag(probability: float = 0.5) -> bool:
        return bool(rng.random() < probability)

    heads, groups, chunk, vocab = one(1, 2, 4), one(1, 2, 4), one(4, 8, 16), one(17, 31, 61)
    overrides: dict[str, Any] = {
        "vocab_size": vocab,
        "model_dim": groups * one(4, 8),
        "num_layers": one(1, 1, 2),
        "num_heads": heads,
        "z_dim": heads * one(2, 4, 8),
        "value_dim": heads * one(3, 4, 12),
        "ffn_hidden_dim": one(12, 20, 40),
        "cema_ndim": one(1, 2, 4),
        "chunk_size": chunk,
        "norm_num_groups": groups,
        "pad_token_id": one(0, 3),
        "norm_eps": one(1e-5, 1e-6),
        "rope_base": one(None, None, 500.0, 100_000.0),
        "output_size": one(-1, -1, vocab - 5),
    }
    for name in ("swiglu", "rescale_nffn", "scale_emb", "mask_ema"):
        overrides[name] = flag()
    overrides["norm_affine"] = flag(0.8)
    cuts: tuple[int, ...] = ()
    if flag(0.25):
        overrides |= one({}, {"max_cache_len": chunk + one(1, chunk)}, {"cache_unbounded": True})
        piece = one(3, chunk - 1, chunk + 1)
        cuts = (one(1, chunk + 3), piece, piece, 1, 1, 1)
    length = sum(cuts) or int(rng.integers(SHORTEST, 3 * chunk + SHORTEST))
    return Case(
        "",
        "random and healthy",
        overrides,
        length=length,
        batch_size=one(1, 2, 3),
        padding="right" if not cuts and flag() else "none",
        cuts=cuts,
    )


def shared_alarms(
    count: int,
    dtype: str,
    executor: Executor,
    report: Callable[[str], None] = lambda line: None,
) -> list[Measurement]:
    """Return the false alarms (`alarms`) in the first `count` cases, computed by workers.

    Args:
        count: number of cases, from index 0.
        dtype: "float64" or "float32".
        executor: runs one work item per `VARIATIONS` cases.
        report: receives lines of progress.

    Raises:
        RuntimeError: a worker failed.
    """
    items = [
        Item(
            f"healthy {first}",
            f"{__name__}:group_alarms",
            {"first": first, "last": min(first + VARIATIONS, count), "dtype": dtype},
        )
        for first in range(0, count, VARIATIONS)
    ]
    rows = [row for answer in collect(items, executor, report=report) for row in answer.value]
    words = {"kind": Kind, "verdict": Verdict}
    return [Measurement(**row | {n: make(row[n]) for n, make in words.items()}) for row in rows]


def group_alarms(first: int, last: int, dtype: str) -> list[dict[str, Any]]:
    """Return the `alarms` of cases `first` to `last - 1` as JSON objects; run by workers."""
    with traced_checks(False):
        return [asdict(m) for m in alarms(range(first, last), dtype)]


def alarms(
    indices: Iterable[int],
    dtype: str = "float64",
    report: Callable[[str], None] = lambda line: None,
) -> Iterator[Measurement]:
    """Compare healthy cases with the oracle; yield measurements that fail or are not comparable.

    Each such measurement is a false alarm.

    Args:
        indices: indices of the cases; those that share a configuration should be adjacent, so that
            compiled programs are reused.
        dtype: "float64", with absolute tolerances, or "float32", with noise floors that are
            measured for each case.
        report: called with a line of progress per configuration.
    """
    edge, subject, group, count = EDGES[dtype], JaxSubject(dtype), -1, 0
    for index in indices:
        if index // VARIATIONS != group:
            group = index // VARIATIONS
            report(f"  healthy_{index}: {count} cases done")
            # Compiled programs of this configuration are not needed again.
            jax.clear_caches()
        case, count = healthy(index), count + 1
        floors = NoiseFloors({})
        if dtype == "float32":
            floors = extended(floors, [case])
        rows = Comparison(case.work, edge, floors, dtype).run(subject.run(case), truth(case))
        yield from (m for m in rows if m.verdict not in (Verdict.PASS, Verdict.INFO))
