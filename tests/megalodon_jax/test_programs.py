"""Compiled programs: checks in or out of them, exported ones, and optimisers per parameter."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import optax
import pytest
from jax import export

from megalodon_jax import MegalodonConfig, ModelCache, init_cache, traced_checks
from megalodon_jax.weights import Role, dotted, role_of
from tests.helpers import logits_of, model_of, rel_l2, rounding_bound, tiny, tokens

L = 6
# Everything a program may meet: dropout and rematerialisation, bfloat16, an untied head, SwiGLU.
CONFIG = tiny(
    num_layers=1,
    swiglu=True,
    output_size=19,
    use_checkpoint=True,
    hidden_dropout=0.1,
    compute_dtype="bfloat16",
)
OPTIMISER = optax.adamw(1e-2)


@pytest.fixture
def unchecked_annotations(monkeypatch):
    """Annotations are checked in tests only; a symbolic size is no int to them."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def parts() -> tuple[Any, Any]:
    return eqx.partition(model_of(CONFIG), eqx.is_array)


def model_with(arrays: Any) -> Any:
    return eqx.combine(arrays, parts()[1])


def forward(arrays, ids, mask):
    return model_with(arrays)(ids, mask)[0]


def train(arrays, opt_state, ids, seed):
    def loss_of(arrays):
        key = jax.random.key(seed)
        return model_with(arrays).compute_loss(ids, ids, deterministic=False, key=key)

    loss, gradients = jax.value_and_grad(loss_of)(arrays)
    with jax.numpy_dtype_promotion("standard"):  # optax relies on it
        updates, opt_state = OPTIMISER.update(gradients, opt_state, arrays)
    return loss, optax.apply_updates(arrays, updates), opt_state


def decode(arrays, cache, token):
    logits, cache = model_with(arrays)(token[:, None], cache=cache, return_cache=True)
    return logits[:, 0], cache


def shaped(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def cache_of(batch: Any) -> ModelCache:
    """The shapes of a full cache with `batch` rows, a number or a symbol."""
    every = {"allocate_kv": True, "allocate_norm": True, "allocate_ema": True}
    like = jax.eval_shape(lambda: init_cache(CONFIG, 1, **every))
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((batch, *x.shape[1:]) if x.ndim else (), x.dtype), like
    )


def program(name: str, batch: Any) -> tuple[Callable, tuple[Any, ...]]:
    """A function of one batch and the shapes of its arguments."""
    arrays = shaped(parts()[0])
    ids = jax.ShapeDtypeStruct((batch, L), jnp.int32)
    if name == "forward":
        return forward, (arrays, ids, jax.ShapeDtypeStruct((batch, L), bool))
    if name == "decode":
        return decode, (arrays, cache_of(batch), jax.ShapeDtypeStruct((batch,), jnp.int32))
    opt_state = jax.eval_shape(OPTIMISER.init, arrays)
    return train, (arrays, opt_state, ids, jax.ShapeDtypeStruct((), jnp.int32))


def exported(name: str) -> export.Exported:
    function, arguments = program(name, export.symbolic_shape("b")[0])
    return export.export(jax.jit(function), platforms=("cpu", "cuda", "tpu"))(*arguments)


@pytest.mark.few(1)
@pytest.mark.usefixtures("unchecked_annotations")
@pytest.mark.parametrize("name", ["forward", "train", "decode"])
@pytest.mark.traced_checks
def test_programs_of_any_batch_are_exported_for_every_platform(name: str) -> None:
    with traced_checks(False):
        artefact = exported(name)
    assert artefact.platforms == ("cpu", "cuda", "tpu")
    assert "b" in str(artefact.in_avals)
    # The control: a check is a call of this process, which no other could make.
    with pytest.raises(NotImplementedError, match="callback"):
        exported(name)


RUN = """
import sys
import numpy as np
from jax import export

with open(sys.argv[1], "rb") as file:
    program = export.deserialize(bytearray(file.read()))
given = np.load(sys.argv[2])
logits = program.call(*(given[f"arr_{i}"] for i in range(len(given.files))))
assert "megalodon_jax" not in sys.modules
np.save(sys.argv[3], logits)
"""


@pytest.mark.usefixtures("unchecked_annotations")
@pytest.mark.traced_checks
def test_an_exported_program_runs_where_this_package_is_not(tmp_path) -> None:
    leaves, structure = jax.tree.flatten(parts()[0])
    (batch,) = export.symbolic_shape("b")
    _, (arrays, *inputs) = program("forward", batch)

    def flat(ids, mask, *leaves):
        return forward(jax.tree.unflatten(structure, leaves), ids, mask)

    with traced_checks(False):
        artefact = export.export(jax.jit(flat))(*inputs, *jax.tree.leaves(arrays))
    (tmp_path / "forward").write_bytes(artefact.serialize())
    ids, mask = tokens(CONFIG, (3, L)), np.ones((3, L), bool)
    mask[1, 4:] = False
    np.savez(tmp_path / "given.npz", ids, mask, *map(np.asarray, leaves))
    names = [str(tmp_path / name) for name in ("forward", "given.npz", "logits.npy")]
    subprocess.run([sys.executable, "-c", RUN, *names], check=True, timeout=300, cwd=tmp_path)
    here = model_of(CONFIG), jnp.asarray(ids), jnp.asarray(mask)
    expected, bound = logits_of(*here), rounding_bound(logits_of, *here)
    there = np.load(tmp_path / "logits.npy")
    assert rel_l2(there, expected) <= bound
    assert rel_l2(there[::-1], expected) > bound


@pytest.mark.traced_checks
def test_a_program_has_checks_where_they_are_on_and_only_there() -> None:
    f = eqx.filter_jit(lambda model, ids: (model(ids)[0], model.compute_loss(ids, ids[::-1])))
    model = model_of(tiny(num_layers=1))
    ids = jnp.asarray(tokens(model.config, (2, 3)))
    bad = ids.at[0, 1].set(model.config.vocab_size)
    # One function, called on both sides of the boundary, and twice: neither uses the other's trace.
    for _ in range(2):
        # The id is a label too, and either check may be the first to speak.
        with pytest.raises(RuntimeError, match="must be in"):
            jax.block_until_ready(f(model, bad))
        with traced_checks(False):
            logits, loss = f(model, bad)
            assert "callback" not in f.lower(model, ids).as_text()
            below, _ = f(model, ids.at[0, 1].set(-1))
        for found in (logits, below):
            assert np.all(np.isnan(found[0, 1:]))
            assert np.all(np.isfinite(found[1]))
        assert np.isnan(loss)
    # A callback is what the persistent compilation cache does not store.
    assert "callback" in f.lower(model, ids).as_text()


@pytest.mark.traced_checks
def test_a_program_is_split_over_devices_where_it_has_no_checks() -> None:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, everywhere = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()
    function, arguments = program("forward", 2)
    split = jax.shard_map(function, mesh=mesh, in_specs=(everywhere, rows, rows), out_specs=rows)
    with traced_checks(False):
        assert jax.eval_shape(split, *arguments).shape == (2, L, CONFIG.output_size)
    with pytest.raises(TypeError, match="cond branches"):
        jax.eval_shape(split, *arguments)


@pytest.mark.parametrize("bad", [-1, 17])
@pytest.mark.traced_checks
def test_unchecked_a_bad_label_is_nan_and_an_ignored_one_is_not(bad: int) -> None:
    config = MegalodonConfig(**{**tiny(num_layers=1).to_dict(), "vocab_size": 17})
    ids = jnp.asarray(tokens(config, (2, 4)))
    model = model_of(config)
    loss = eqx.filter_jit(lambda m, labels: m.compute_loss(ids, labels, loss_chunk=2))
    with traced_checks(False):
        assert np.isnan(loss(model, ids.at[1, 2].set(bad)))
        assert np.isfinite(loss(model, ids.at[1, 2].set(-100)))
        assert np.isfinite(loss(model, ids.at[1, 0].set(bad)))  # the first label is no target


def test_a_label_tree_of_the_models_shape_goes_in_as_a_function() -> None:
    arrays, _ = parts()

    def labels(tree):
        def label(path, _):
            return "slow" if role_of(dotted(path)) is Role.CEMA else "fast"

        return jax.tree_util.tree_map_with_path(label, tree)

    rates = {"slow": optax.sgd(1.0), "fast": optax.sgd(4.0)}
    optimiser = optax.multi_transform(rates, labels)
    ones = jax.tree.map(jnp.ones_like, arrays)
    updates, _ = optimiser.update(ones, optimiser.init(arrays), arrays)
    layer = updates.model.layers[0].attn
    assert np.all(layer.cema.alpha == -1.0)
    assert np.all(layer.wz.weight == -4.0)
    # The tree itself is a model, which optax takes for a function, and calls.
    with pytest.raises((AttributeError, TypeError)):
        optax.multi_transform(rates, labels(arrays)).init(arrays)
