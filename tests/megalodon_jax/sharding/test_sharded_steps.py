"""Three steps of AdamW on a mesh are those of one device, and a checkpoint knows no mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from megalodon_jax.checkpoint import load_checkpoint, save_checkpoint
from megalodon_jax.loss import accumulate_gradients, next_token_loss
from megalodon_jax.optimiser import optimiser_update
from megalodon_jax.sharding import shard_batch, shard_model, shard_state
from megalodon_jax.sharding.axes import automatic
from megalodon_jax.weights import named_leaves
from tests.helpers import EXACT, EXACT_GRADIENT, model_of, rel_l2, same_leaves, tiny
from tests.megalodon_jax.sharding.programs import SMALL, L, mesh_named, ragged

DROPPING = tiny(
    model_dim=16,
    num_layers=1,
    num_heads=2,
    dropout=0.1,
    hidden_dropout=0.2,
    attention_dropout=0.3,
    use_checkpoint=True,
).with_dtype
STEPS = 3
TRANSFORM = optax.chain(optax.clip_by_global_norm(0.05), optax.adamw(1e-2, weight_decay=0.1))


@eqx.filter_jit
def trained(model: Any, state: Any, batch: dict[str, jax.Array], key: jax.Array) -> Any:
    """One step over two micro-batches with uneven counts: clipped, decayed, with dropout."""
    loss, gradients = accumulate_gradients(model, **batch, deterministic=False, key=key)
    params = eqx.filter(model, eqx.is_array)
    updates, state = optimiser_update(TRANSFORM, gradients, state, params)
    return eqx.apply_updates(model, updates), state, loss


def run(config: Any, mesh: Mesh | None) -> tuple[Any, Any, list[float]]:
    """Train from the same start; a mesh None is one device."""
    model = model_of(config)
    state = TRANSFORM.init(eqx.filter(model, eqx.is_array))
    whole = micro_batches()
    batch: Any = jax.tree.map(jnp.asarray, whole)
    if mesh is not None:
        model, state = shard_model(model, mesh), shard_state(state, model, mesh)
        batch = shard_batch(whole, mesh, chunk_size=config.chunk_size)
    losses = []
    for i in range(STEPS):
        model, state, loss = trained(model, state, batch, jax.random.key(i))
        losses.append(float(loss))
    return model, state, losses


def micro_batches() -> dict[str, np.ndarray]:
    """Two with uneven counts."""
    whole = {name: np.stack([x, np.roll(x, 1, 0)]) for name, x in ragged().items()}
    whole["attention_mask"][1, :, : L // 2] = False
    return whole


class Bigrams(eqx.Module):
    """The least model that gradients are accumulated of: the logits of a token are its row."""

    rows: jax.Array

    def compute_loss(self, ids, labels, mask, ignore_index, *options, loss_chunk):
        def loss(call):
            rules: Any = {"ignore_index": ignore_index, "dtype": self.rows.dtype}
            return next_token_loss(call[0][call[1]], *call[2:], **rules)

        return automatic(loss, (self.rows, ids, labels, mask), lambda mesh: PartitionSpec())


@pytest.mark.usefixtures("x64")
def test_micro_batches_add_up_on_explicit_axes() -> None:
    model = Bigrams(jax.random.normal(jax.random.key(0), (SMALL.vocab_size,) * 2, jnp.float64))
    accumulated, batch = eqx.filter_jit(accumulate_gradients), micro_batches()
    expected = accumulated(model, **jax.tree.map(jnp.asarray, batch))
    mesh = mesh_named("data=2 sequence=2", AxisType.Explicit)
    placed = jax.device_put(model, NamedSharding(mesh, PartitionSpec()))
    loss, gradients = accumulated(placed, **shard_batch(batch, mesh))
    assert rel_l2(loss, expected[0]) <= EXACT
    assert rel_l2(gradients.rows, expected[1].rows) <= EXACT_GRADIENT


@pytest.mark.parametrize(
    "name",
    [
        "fsdp=2 tensor=2 sequence=2",
        *(pytest.param(n, marks=pytest.mark.sweep) for n in ("data=8", "data=2 sequence=4")),
    ],
)
@pytest.mark.usefixtures("x64")
def test_steps_are_those_of_one_device(name: str, tmp_path: Path) -> None:
    config, mesh = DROPPING("float64"), mesh_named(name)
    expected, ours = run(config, None), run(config, mesh)
    assert rel_l2(ours[2], expected[2]) <= EXACT
    for tree, other in zip(ours[:2], expected[:2], strict=True):
        found, wanted = named_leaves(tree), named_leaves(other)
        assert max(rel_l2(found[n], wanted[n]) for n in wanted) <= EXACT_GRADIENT
    # Where a parameter lay it stays, and so does what belongs to it.
    model, state, _ = ours
    again = shard_model(model, mesh), shard_state(state, model, mesh)
    for tree, placed in zip((model, state), again, strict=True):
        places = zip(jax.tree.leaves(tree), jax.tree.leaves(placed), strict=True)
        assert all(x.sharding.is_equivalent_to(y.sharding, x.ndim) for x, y in places)
    # Saved on one mesh, loaded on another and on none.
    save_checkpoint(tmp_path / "saved", model, step=STEPS, opt_state=state)
    back = load_checkpoint(tmp_path / "saved", opt_state_like=state)
    third = mesh_named("data=2 tensor=2")
    assert same_leaves(back.model, model) and same_leaves(back.opt_state, state)
    assert same_leaves(shard_model(back.model, third), model)
    assert same_leaves(shard_state(back.opt_state, back.model, third), state)
