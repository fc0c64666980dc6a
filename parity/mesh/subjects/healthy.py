"""Random cases without a bug: comparing them must report no difference (negative control).

A case is a mesh, a configuration and a length. Cases come in numbered groups; the number determines
everything random. A group has one batch of texts of random length, one set of weights, and
`VARIATIONS` random meshes, one per case. `NEIGHBOURS` consecutive groups share configuration and
meshes, so that JAX compiles their programs only once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from parity.engine.measure.measurement import Measurement, Verdict
from parity.mesh.step import MeshComparison
from parity.mesh.subjects.megalodon import AXES, SMALL, megalodon

VARIATIONS = 8
"""Number of cases (meshes) of a group."""
NEIGHBOURS = 8
"""Number of consecutive groups with the same configuration, padded text size and meshes."""
SHAPES = (
    (8, 1, 1, 1), (1, 8, 1, 1), (1, 1, 1, 8), (2, 1, 4, 1), (4, 1, 2, 1), (2, 1, 2, 2),
    (1, 2, 2, 2), (2, 2, 1, 2), (1, 1, 2, 4), (1, 1, 4, 2), (4, 1, 1, 2), (2, 1, 1, 4),
    (2, 4, 1, 1), (4, 2, 1, 1), (2, 1, 1, 2), (1, 2, 2, 1), (1, 1, 4, 1), (2, 2, 2, 1),
)  # fmt: skip
"""Mesh sizes along data, fsdp, tensor and sequence."""


def healthy(group: int) -> MeshComparison:
    """Return the group with this number: a random configuration and text on `VARIATIONS` meshes.

    Gradients are compared for every second configuration only: they take most of the compile time.
    """
    rng = np.random.default_rng([11, group // NEIGHBOURS])

    def one(*choices: Any) -> Any:
        return choices[rng.integers(len(choices))]

    chunk = one(4, 8)
    config = replace(
        SMALL,
        vocab_size=one(16, 18, 23, 40),
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
    chunks = one(0, 8)
    places = rng.choice(len(SHAPES), VARIATIONS, replace=False)
    meshes = [dict(zip(AXES, SHAPES[i], strict=True)) for i in places]
    # All lengths of this range are padded to the same number of chunks, hence the same programs.
    own = np.random.default_rng([12, group])
    length = int(own.integers(chunks * chunk + 2, (chunks + 8) * chunk + 1))
    comparison = megalodon(
        config,
        length=length,
        seed=group,
        steps=0,
        gradients=group // NEIGHBOURS % 2 == 0,
        meshes=meshes,
    )
    return replace(comparison, name=f"healthy_{group}")


def alarms(
    groups: Iterable[int],
    report: Callable[[str], None] = lambda line: None,
    wanted: Callable[[Mapping[str, int]], bool] = lambda sizes: True,
) -> Iterator[Measurement]:
    """Compare healthy cases and yield every measurement that exceeds its tolerance.

    Each such measurement is a false alarm.

    Args:
        groups: numbers of groups (`healthy`).
        report: called with a line of text after each group.
        wanted: function of a mesh's axis sizes; returns whether to compare that mesh.
    """
    for group in groups:
        triples = healthy(group)
        some = triples.on([sizes for sizes in triples.meshes if wanted(sizes)])
        compared = some.run(watched=("float64",), forced=False)
        broken = [m for m in compared.measurements if m.verdict is Verdict.FAIL]
        gates = sum(m.verdict is Verdict.PASS for m in compared.measurements)
        report(f"  group {group}: {len(compared.results)} cases, {gates} gates, {len(broken)} fail")
        yield from broken
        # Compiled programs of this configuration are not needed again.
        jax.clear_caches()
