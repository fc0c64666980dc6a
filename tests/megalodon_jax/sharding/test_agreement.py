"""The model on meshes of eight devices computes what it computes on one."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from megalodon_jax.layers.complex_ema import ComplexEMA
from megalodon_jax.layers.timestep_norm import TimestepNorm
from megalodon_jax.loss import chunked_next_token_loss
from megalodon_jax.sharding import make_mesh
from megalodon_jax.types import NormState
from megalodon_jax.weights import named_leaves
from tests.helpers import EXACT, EXACT_GRADIENT, model_of, rel_l2, rounding_bound
from tests.megalodon_jax.sharding.programs import (
    SMALL,
    B,
    L,
    evaluated,
    mesh_named,
    on_mesh,
    on_one_device,
    ragged,
)

WALK = pytest.mark.sweep
MESHES = (
    "data=2 tensor=2 sequence=2",
    *(
        pytest.param(name, marks=WALK)
        for name in (
            "data=8",
            "fsdp=8",
            "sequence=8",
            "data=2 tensor=4",
            "data=4 sequence=2",
            "fsdp=2 tensor=2",
            "data=2 fsdp=2 sequence=2",
            "tensor=4 sequence=2",
        )
    ),
)


@pytest.mark.few(1)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.usefixtures("x64")
def test_float64_is_the_same_mathematics(mesh: str, kind: AxisType) -> None:
    config = SMALL.with_dtype("float64")
    expected, on = on_one_device(config, ragged()), mesh_named(mesh, kind)
    logits, loss, gradients = on_mesh(config, ragged(), on)
    assert rel_l2(logits, expected[0]) <= EXACT
    assert rel_l2(loss, expected[1]) <= EXACT
    ours, theirs = named_leaves(gradients), named_leaves(expected[2])
    assert max(rel_l2(ours[name], theirs[name]) for name in theirs) <= EXACT_GRADIENT
    assert all(leaf.sharding.mesh == on for leaf in ours.values())


@WALK
def test_float32_is_the_same_up_to_rounding() -> None:
    expected = on_one_device(SMALL, ragged())
    logits, loss, _ = on_mesh(SMALL, ragged(), mesh_named("data=2 tensor=2 sequence=2"))
    arrays = {name: jnp.asarray(array) for name, array in ragged().items()}
    bound = rounding_bound(lambda model: evaluated(model, arrays)[0], model_of(SMALL))
    assert rel_l2(logits, expected[0]) <= bound
    assert rel_l2(loss, expected[1]) <= bound


@pytest.fixture(scope="module")
def line():
    return make_mesh(sequence=4)


def cut(x: np.ndarray, mesh: jax.sharding.Mesh, axis: int) -> jax.Array:
    entries = [None] * x.ndim
    entries[axis] = "sequence"  # pyright: ignore[reportCallIssue, reportArgumentType]
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*entries)))


@eqx.filter_jit
def normalised(norm, x, state, mask, weight):
    def total(norm, x, state):
        y, after = norm(x, state, mask)
        return jnp.sum(y * weight), (y, after)

    return jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True, allow_int=True)(
        norm, x, state
    )


@eqx.filter_jit
def filtered(ema, x, state, mask, weight):
    def total(ema, x):
        y, after = ema(x, state, True, mask)
        return jnp.sum(y * weight), (y, after)

    return jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(ema, x)


def worst(ours, theirs) -> float:
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    return max(rel_l2(a, b) for a, b in pairs if a.dtype != jax.dtypes.float0)


@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.usefixtures("x64")
def test_a_running_norm_continues_across_shards(line, offset: float) -> None:
    rng = np.random.default_rng(2)
    norm = model_of(SMALL.with_dtype("float64")).model.norm
    x = offset + rng.standard_normal((B, L, SMALL.model_dim))
    weight = rng.standard_normal(x.shape)
    mask = ragged()["attention_mask"]
    state = NormState(
        count=jnp.asarray(rng.integers(0, 3, B), jnp.int32),
        mean=jnp.asarray(offset + rng.standard_normal((B, SMALL.norm_num_groups))),
        var=jnp.asarray(1.0 + rng.random((B, SMALL.norm_num_groups))),
    )
    assert isinstance(norm, TimestepNorm)
    expected = normalised(norm, jnp.asarray(x), state, jnp.asarray(mask), jnp.asarray(weight))
    cuts = (cut(x, line, 1), state, cut(mask, line, 1), cut(weight, line, 1))
    # The offset itself takes digits: they are lost on one device too.
    assert worst(normalised(norm, *cuts), expected) <= EXACT_GRADIENT * (1.0 + offset)


def test_a_shard_with_no_token_before_it_takes_an_origin_of_its_own(line) -> None:
    """In float32, where an origin of 0 costs a large offset its digits and no more."""
    rng = np.random.default_rng(6)
    norm = model_of(SMALL).model.norm
    assert isinstance(norm, TimestepNorm)
    x = (1e4 + rng.standard_normal((B, L, SMALL.model_dim))).astype(np.float32)
    mask = np.ones((B, L), bool)
    # Nothing before the second, the third and the last shard; and one that has all of it.
    for row, late in enumerate((L // 4, L // 2, L - 3)):
        mask[row, :late] = False
    weight = mask[..., None] * np.ones_like(x)
    # What is masked is no origin, however far away it is.
    x[~mask] = -1e9
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: a.astype(jnp.float64), norm)
        given = (jnp.asarray(a, jnp.float64) for a in (x, weight))
        exact, weights = next(given), next(given)
        truth = normalised(wide, exact, None, jnp.asarray(mask), weights)[0][1][0]
    alone = normalised(norm, jnp.asarray(x), None, jnp.asarray(mask), jnp.asarray(weight))
    cuts = (cut(x, line, 1), None, cut(mask, line, 1), cut(weight, line, 1))
    for row in range(B):
        here = mask[row]
        errors = [
            rel_l2(np.asarray(y[0][1][0])[row][here], np.asarray(truth)[row][here])
            for y in (alone, normalised(norm, *cuts))
        ]
        # The digits of the offset are 13 bits, four of which are room for other sums.
        assert errors[1] <= 16 * errors[0], row


@pytest.mark.usefixtures("x64")
def test_a_loss_in_chunks_counts_the_tail_of_every_shard(line) -> None:
    rng = np.random.default_rng(7)
    hidden, head = rng.standard_normal((2, L, 4)), jnp.asarray(rng.standard_normal((5, 4)))
    labels = rng.integers(0, 5, (2, L)).astype(np.int32)

    @eqx.filter_jit
    def loss(hidden, labels):
        project = lambda x, head: x @ head.T  # noqa: E731
        options = {"chunk": 3, "dtype": jnp.float64}
        return chunked_next_token_loss(hidden, head, project, labels, **options)

    expected = loss(jnp.asarray(hidden), jnp.asarray(labels))
    assert rel_l2(loss(cut(hidden, line, 1), cut(labels, line, 1)), expected) <= EXACT


@pytest.mark.usefixtures("x64")
def test_an_ema_continues_across_shards(line) -> None:
    rng = np.random.default_rng(3)
    ema = model_of(SMALL.with_dtype("float64")).model.layers[0].attn.cema
    x = rng.standard_normal((B, SMALL.model_dim, L))
    weight, mask = rng.standard_normal(x.shape), ragged()["attention_mask"]
    pair = rng.standard_normal((2, B, SMALL.model_dim, SMALL.cema_ndim))
    state = jnp.asarray(pair[0] + 1j * pair[1])
    assert isinstance(ema, ComplexEMA)
    expected = filtered(ema, jnp.asarray(x), state, jnp.asarray(mask), jnp.asarray(weight))
    cuts = (cut(x, line, 2), state, cut(mask, line, 1), cut(weight, line, 2))
    assert worst(filtered(ema, *cuts), expected) <= EXACT_GRADIENT
