"""A Flax and an Equinox transformer as their users write them: they know nothing of this project.

The Flax one is split by where its arrays lie, but for its loss; the Equinox one by hand, head by
head. `Exchange` holds what a bug replaces.
"""

from __future__ import annotations

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from parity.mesh import MeshComparison

AXES = ("data", "fsdp", "tensor")
MESHES = tuple(
    dict(zip(AXES, sizes, strict=True)) for sizes in ((8, 1, 1), (2, 1, 4), (4, 1, 2), (2, 2, 2))
)
ROWS = ("data", "fsdp")
VOCAB, DIM, HEADS, LENGTH, BATCH = 16, 8, 4, 6, 8


class Exchange:
    @staticmethod
    def mean(total, count):
        return jax.lax.psum(total, ROWS) / jax.lax.psum(count, ROWS)

    @staticmethod
    def attended(y, bias):
        return jax.lax.psum(y, "tensor") + bias


class FlaxBlock(nn.Module):
    name_of: str

    @nn.compact
    def __call__(self, x):
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2], bool))
        y = nn.LayerNorm()(x)
        y = nn.MultiHeadDotProductAttention(HEADS)(y, y, mask=mask)
        x = checkpoint_name(x + y, f"{self.name_of}.attention")
        y = nn.Dense(DIM)(nn.gelu(nn.Dense(2 * DIM)(nn.LayerNorm()(x))))
        return checkpoint_name(x + y, f"{self.name_of}.mlp")


class FlaxTransformer(nn.Module):
    @nn.compact
    def __call__(self, ids):
        x = checkpoint_name(nn.Embed(VOCAB, DIM)(ids), "embed")
        x = FlaxBlock("block")(x)
        return checkpoint_name(nn.Dense(VOCAB)(nn.LayerNorm()(x)), "logits")


def batch():
    rng = np.random.default_rng(0)
    ids = rng.integers(0, VOCAB, (BATCH, LENGTH)).astype(np.int32)
    # Texts end unevenly, so that devices have different numbers of tokens.
    ends = np.array([1, 6, 2, 5, 3, 4, 6, 2])
    return ids, (np.arange(LENGTH) < ends[:, None]).astype(np.float32)


def random_like(shapes, seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda s: (
            (0.3 * rng.standard_normal(s.shape)).astype(np.float32)
            if jnp.issubdtype(s.dtype, jnp.floating)
            else np.zeros(s.shape, s.dtype)
        ),
        shapes,
    )


def flax_step():
    """A train step of Adam; parameters on `tensor` and `fsdp`, rows of the batch on the others."""
    model, optimiser = FlaxTransformer(), optax.adam(1e-2, eps=1e-3)
    ids, mask = batch()
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.asarray(ids))["params"]
    params = random_like(shapes, 1)
    state = jax.tree.map(np.zeros_like, random_like(jax.eval_shape(optimiser.init, shapes), 2))

    def masked_mean(nll, mask):
        def local(nll, mask):
            return Exchange.mean(jnp.sum(nll * mask), jnp.sum(mask))

        return jax.shard_map(local, in_specs=(P(ROWS), P(ROWS)), out_specs=P())(nll, mask)

    def step(params, state, ids, mask):
        def loss(params):
            logits = model.apply({"params": params}, ids)[:, :-1]
            nll = optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:])
            return masked_mean(checkpoint_name(nll, "token_loss"), mask[:, 1:])

        value, grad = jax.value_and_grad(loss)(params)
        updates, state = optimiser.update(grad, state)
        params = optax.apply_updates(params, updates)
        return {"loss": value, "grad": grad, "params": params, "state": state}

    def specs(path, leaf, mesh):
        if path in ("2", "3"):
            return P(ROWS)
        fits = leaf.ndim == 2 and leaf.shape[0] % mesh.shape["fsdp"] == 0
        cut = fits and leaf.shape[-1] % mesh.shape["tensor"] == 0
        return P("fsdp" if fits else None, "tensor") if cut else P()

    return MeshComparison(step, (params, state, ids, mask), specs, MESHES, name="flax")


class Attention(eqx.Module):
    query: eqx.nn.Linear
    key: eqx.nn.Linear
    value: eqx.nn.Linear
    output: jax.Array
    bias: jax.Array

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        self.query, self.key, self.value = (
            eqx.nn.Linear(DIM, DIM, use_bias=False, key=k) for k in keys[:3]
        )
        self.output = jax.random.normal(keys[3], (DIM, DIM)) * DIM**-0.5
        self.bias = jnp.ones(DIM)

    def __call__(self, x):
        def heads(linear):
            y = x @ linear.weight.T
            return y.reshape(*y.shape[:-1], -1, DIM // HEADS)

        q, k, v = map(heads, (self.query, self.key, self.value))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (DIM // HEADS) ** -0.5
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
        y = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
        y = checkpoint_name(y, "heads").reshape(*x.shape[:-1], -1)
        return checkpoint_name(Exchange.attended(y @ self.output, self.bias), "attention")


class EquinoxTransformer(eqx.Module):
    embed: jax.Array
    attention: Attention
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        a, b, c, d = jax.random.split(key, 4)
        self.embed = jax.random.normal(a, (VOCAB, DIM))
        self.attention = Attention(b)
        self.up = eqx.nn.Linear(DIM, 2 * DIM, use_bias=False, key=c)
        self.down = eqx.nn.Linear(2 * DIM, DIM, use_bias=False, key=d)

    def __call__(self, ids):
        x = self.embed[ids]
        x = x + self.attention(x)
        h = checkpoint_name(jax.nn.gelu(x @ self.up.weight.T), "hidden")
        x = x + jax.lax.psum(h @ self.down.weight.T, "tensor")
        return checkpoint_name(x @ self.embed.T, "logits")


def equinox_specs(path, leaf, mesh):
    """Heads and hidden columns on `tensor`, in both directions."""
    if path == "1":
        return P(ROWS)
    by_rows = any(name in path for name in ("query", "key", "value", "up", "output"))
    return P("tensor") if by_rows else P(None, "tensor") if "down" in path else P()


def equinox_step():
    """Loss and gradients of a model that is told which shard it is by `shard_map`."""
    shapes = eqx.filter_eval_shape(EquinoxTransformer, jax.random.key(0))
    model = jax.tree.map(
        lambda s: s if not isinstance(s, jax.ShapeDtypeStruct) else random_like(s, s.size), shapes
    )
    ids, _ = batch()
    rows = jax.tree_util.tree_map_with_path(
        lambda path, leaf: equinox_specs("0/" + jax.tree_util.keystr(path), leaf, None), model
    )

    def step(model, ids):
        arrays, static = eqx.partition(model, eqx.is_array)

        def local(arrays, ids):
            logits = eqx.combine(arrays, static)(ids)[:, :-1]
            nll = optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:])
            return Exchange.mean(jnp.sum(nll), jnp.asarray(nll.size, nll.dtype))

        def loss(arrays):
            specs = eqx.filter(rows, jax.tree.map(lambda x: x is not None, arrays))
            return jax.shard_map(local, in_specs=(specs, P(ROWS)), out_specs=P())(arrays, ids)

        value, grad = jax.value_and_grad(loss)(arrays)
        return {"loss": value, "grad": grad}

    return MeshComparison(step, (model, ids), equinox_specs, MESHES, name="equinox")
