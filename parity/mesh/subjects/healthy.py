"""Random small healthy triples of mesh, configuration and length: nothing may be reported of one.

A triple is a function of its index alone. `VARIATIONS` neighbours share a configuration and a
length, so that one device computes once for all of them; their meshes differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from parity.engine.measurement import Measurement, Verdict
from parity.mesh.step import MeshComparison
from parity.mesh.subjects.megalodon import AXES, SMALL, megalodon

VARIATIONS = 8
"""Neighbouring indices that share a configuration."""
SHAPES = (
    (8, 1, 1, 1), (1, 8, 1, 1), (1, 1, 1, 8), (2, 1, 4, 1), (4, 1, 2, 1), (2, 1, 2, 2),
    (1, 2, 2, 2), (2, 2, 1, 2), (1, 1, 2, 4), (1, 1, 4, 2), (4, 1, 1, 2), (2, 1, 1, 4),
    (2, 4, 1, 1), (4, 2, 1, 1), (2, 1, 1, 2), (1, 2, 2, 1), (1, 1, 4, 1), (2, 2, 2, 1),
)  # fmt: skip
"""Sizes of data, fsdp, tensor and sequence."""


def healthy(group: int) -> MeshComparison:
    """Return a random configuration and length, on `VARIATIONS` random meshes."""
    rng = np.random.default_rng([11, group])

    def one(*choices: Any) -> Any:
        return choices[rng.integers(len(choices))]

    chunk = one(4, 8)
    config = replace(
        SMALL,
        vocab_size=one(16, 24, 40),
        chunk_size=chunk,
        cema_ndim=one(1, 2, 4),
        ffn_hidden_dim=one(16, 24),
        num_heads=one(4, 8),
        swiglu=one(True, False),
        rescale_nffn=one(True, False),
        scale_emb=one(True, False),
        norm_affine=one(True, False),
        mask_ema=one(True, False),
        scan_layers=one(True, False),
        num_layers=one(1, 1, 2),
    )
    length = int(rng.integers(2 * chunk, 9 * chunk))
    places = rng.choice(len(SHAPES), VARIATIONS, replace=False)
    meshes = [dict(zip(AXES, SHAPES[i], strict=True)) for i in places]
    comparison = megalodon(config, length=length, seed=group, steps=0, meshes=meshes)
    return replace(comparison, name=f"healthy_{group}")


def alarms(
    groups: Iterable[int], report: Callable[[str], None] = lambda line: None
) -> Iterator[Measurement]:
    """Compare healthy triples and yield whatever breaks a tolerance: nothing should.

    Args:
        groups: which, of `VARIATIONS` triples each.
        report: called with a line for each group.
    """
    for group in groups:
        compared = healthy(group).run(watched=("float64",), forced=False)
        broken = [m for m in compared.measurements if m.verdict is Verdict.FAIL]
        gates = sum(m.verdict is Verdict.PASS for m in compared.measurements)
        report(f"  group {group}: {len(compared.results)} triples, {gates} gates, {len(broken)} no")
        yield from broken
        # Nothing compiled for another configuration is of use again.
        jax.clear_caches()
