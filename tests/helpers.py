"""Tiny models and one measure of difference, shared by the tests."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner, Result

from megalodon_jax import MegalodonConfig, MegalodonForCausalLM
from megalodon_jax.weights import build_model, weight_table
from parity.engine.measure.measurement import Kind
from parity.engine.measure.quantity import kind_of
from parity.megalodon.cases import Case
from parity.megalodon.edges import MegalodonEdge
from parity.megalodon.noise_floors import extended
from parity.tolerances import NoiseFloors, rule

ROOT = Path(__file__).parents[1]
"""Of the repository."""


def section(page: str, heading: str) -> str:
    """Text of a page of docs/ below a heading of the second level, up to the next one."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]


EXACT = rule("jax64:oracle", Kind.BLOCK).absolute
"""Relative L2 between two float64 evaluations of the same mathematics."""
EXACT_GRADIENT = rule("jax64:oracle", Kind.GRADIENT).absolute

TINY = MegalodonConfig(
    vocab_size=17,
    model_dim=8,
    num_layers=2,
    num_heads=2,
    z_dim=8,
    value_dim=12,
    ffn_hidden_dim=10,
    cema_ndim=2,
    chunk_size=4,
    norm_num_groups=2,
)


def same_program(case: Case) -> Callable[[str], float]:
    """Return by quantity how far two float32 programs of one case's mathematics may be apart.

    The rule for recordings and what is live: a multiple of the case's own noise floor.
    """
    floors = extended(NoiseFloors({}), [case])
    return lambda name: floors.bound(
        MegalodonEdge.RECORDED32_LIVE32, kind_of(name), case.work, name
    )


def cli(*arguments: object, **options: Any) -> Result:
    """What `megalodon-numerics ARGUMENTS` returns and prints; `options` as in `CliRunner`."""
    # Not above: the model's own tests do not load what is built on it.
    from reports.cli import main

    return CliRunner().invoke(main, [str(argument) for argument in arguments], **options)


def scratch_folder() -> Path:
    """Return a new folder, in memory where the system has such a place.

    For thousands of small files that are flushed to the disk one by one: beside other work a disk
    takes five times as long for them as everything else together.
    """
    memory = Path("/dev/shm")
    in_memory = memory.is_dir() and os.access(memory, os.W_OK)
    return Path(tempfile.mkdtemp(dir=memory if in_memory else None))


def double(kind: type, /, **fields: Any) -> Any:
    """An object that passes for a `kind` where types are checked, and has these fields alone."""
    stand_in = mock.Mock(spec=kind)
    stand_in.configure_mock(**fields)
    mock.seal(stand_in)
    return stand_in


def skip_unless_computed(*names: str) -> None:
    """Skip the test, in words, where XLA cannot compute in one of these storage formats.

    Names of other dtypes, such as "float32", are none of these and always computed.
    """
    # Not above, as in `cli`.
    from stability.core.number_formats import FORMATS
    from stability.core.rounding import check_conversion

    for fmt in FORMATS:
        if fmt.name in names:
            try:
                check_conversion(fmt)
            except ValueError as error:
                pytest.skip(str(error))


EACH_DEVICE = pytest.mark.parametrize(
    "platform", ["cpu", pytest.param("gpu", marks=pytest.mark.cuda)]
)
"""A test of what a GPU must answer too: one body, and its twin on this processor always runs."""


def tiny(**changes: Any) -> MegalodonConfig:
    """A configuration that compiles in a moment."""
    return dataclasses.replace(TINY, **changes)


def arrays(config: MegalodonConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Weights by torch name, none at its initial value: a parameter at 0 hides its own bugs."""
    rng = np.random.default_rng(seed)
    return {
        row.name: (0.5 * rng.standard_normal(row.shape)).astype(np.float32)
        for row in weight_table(config)
    }


def wide_arrays(config: MegalodonConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """`arrays` in float64, as the oracle takes them."""
    return {name: array.astype(np.float64) for name, array in arrays(config, seed).items()}


@cache
def model_of(config: MegalodonConfig, seed: int = 0) -> MegalodonForCausalLM:
    """A model holding `arrays(config, seed)`; made once, as nothing can change it."""
    # Also where the first to ask is being traced: a tracer must not outlive its program.
    with jax.ensure_compile_time_eval():
        return build_model(config, arrays(config, seed))


class Adapted(eqx.Module):
    """A linear map with what somebody added to it: a matrix without a role, a count, and a key."""

    weight: jax.Array
    bias: jax.Array
    lora_a: jax.Array
    steps: jax.Array
    key: jax.Array


def adapted() -> MegalodonForCausalLM:
    """TINY with one map of its first layer adapted; it is there to be stored, not to be run."""
    model = model_of(TINY)
    old = model.model.layers[0].attn.wz
    extra = jnp.full((2, 8), 0.1, jnp.float32), jnp.asarray(3, jnp.int32), jax.random.key(7)
    wrapped = Adapted(old.weight, old.bias, *extra)
    return eqx.tree_at(lambda m: m.model.layers[0].attn.wz, model, wrapped)


def tokens(config: MegalodonConfig, shape: tuple[int, int], seed: int = 1) -> np.ndarray:
    """Ids without the padding token."""
    rng = np.random.default_rng(seed)
    return rng.integers(1, config.vocab_size, shape).astype(np.int32)


def roundoff(terms: int, dtype: Any = np.float32) -> float:
    """Return the bound of the relative error of a chain of `terms` roundings, n u / (1 - n u).

    It holds for a sum in any order and any blocks, on any processor (Higham, "Accuracy and
    Stability of Numerical Algorithms", Lemma 3.1). u is half the spacing above 1.
    """
    nu = terms * float(np.finfo(dtype).eps) / 2
    return nu / (1 - nu)


def dot_bound(a: np.ndarray, b: np.ndarray, more: int = 0, dtype: Any = np.float32) -> np.ndarray:
    """Return by how much each element of `a @ b.T` may be off, in any order of summation.

    Args:
        a: (rows, n); the operands as they are multiplied, hence already quantised.
        b: (columns, n).
        more: roundings of a result besides those of n products and their sum, such as a scale.
        dtype: the dtype of the sum.
    """
    wide = np.abs(np.asarray(a, np.float64)) @ np.abs(np.asarray(b, np.float64)).T
    return roundoff(np.shape(a)[-1] + more, dtype) * wide


def close(actual: Any, expected: Any, roundings: int = 16) -> bool:
    """Whether a few elementwise float32 operations give what is expected, on any processor."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    bound = roundoff(roundings) * np.max(np.abs(expected), initial=0.0)
    return bool(np.all(np.abs(actual - expected) <= bound))


def rel_l2(actual: Any, expected: Any) -> float:
    """Relative L2 difference, in the widest arithmetic there is; NaN when either has a NaN."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape
    wide = np.promote_types(expected.dtype, np.float64)
    actual, expected = actual.astype(wide), expected.astype(wide)
    difference = float(np.linalg.norm(actual - expected))
    return difference / (float(np.linalg.norm(expected)) or 1.0)


SAME_PROGRAM = rule(MegalodonEdge.RECORDED32_LIVE32, Kind.LOGITS).noise_factor
"""Noise floors that two float32 programs of the same mathematics may be apart."""


def one_ulp_away(tree: Any, seed: int = 0) -> Any:
    """Return a pytree whose float32 elements have each moved to a neighbour, drawn at random."""
    rng = np.random.default_rng(seed)

    def moved(x: Any) -> Any:
        if getattr(x, "dtype", None) != np.float32:
            return x
        ends = np.where(rng.random(x.shape) < 0.5, -np.inf, np.inf).astype(np.float32)
        return jnp.asarray(np.nextafter(np.asarray(x), ends))

    return jax.tree.map(moved, tree)


def rounding_bound(run: Callable[..., Any], *given: Any, draws: int = 3) -> float:
    """Return how far two float32 programs that compute `run(*given)` may be apart, relative L2.

    The noise floor is measured here and now: the largest response of this program when weights and
    inputs move by a unit in the last place. Two programs that fuse or sum in different ways differ
    by such roundings, of intermediates too, hence the factor.
    """
    exact = run(*given)
    moved = [run(*one_ulp_away(given, seed)) for seed in range(draws)]
    return SAME_PROGRAM * max(rel_l2(other, exact) for other in moved)


@eqx.filter_jit
def logits_of(model: MegalodonForCausalLM, ids: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Logits alone, compiled once per configuration and shape."""
    return model(ids, mask)[0]


def same_leaves(left: Any, right: Any) -> bool:
    """Whether two pytrees hold the same bits under the same names."""
    from megalodon_jax.weights import named_leaves

    left, right = named_leaves(left), named_leaves(right)
    return left.keys() == right.keys() and all(
        left[n].dtype == right[n].dtype
        and np.asarray(left[n]).tobytes() == np.asarray(right[n]).tobytes()
        for n in left
    )
