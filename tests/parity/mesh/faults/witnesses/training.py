"""Two steps of AdamW on `data` x `fsdp`: gradients, counts, clipping, moments, saved parameters.

Parameters are sharded by rows along `fsdp` and gathered for a step; both axes split the batch.
Gradients are summed explicitly, as under `shard_map` without its checks.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from parity.mesh.step import MeshComparison

BOTH = ("data", "fsdp")
RATE, DECAY, CLIP = 0.01, 0.1, 0.5
BETAS, EPS = (0.9, 0.99), 1e-6
WIDTH, HIDDEN, BATCH, MICRO = 8, 12, 29, 2
"""29 rows are not divisible by any mesh; they are padded with rows of weight 0."""
ROWS = 16
"""Number of rows that is divisible by 8 devices with two micro-batches."""


class Training:
    """The exchanges of a data-parallel step."""

    @staticmethod
    def padded(x: Any) -> Any:
        """Pad the batch to a number of rows divisible by every mesh."""
        return jnp.pad(x, ((0, -len(x) % ROWS), *((0, 0),) * (x.ndim - 1)))

    @staticmethod
    def filled_rows(valid: Any) -> Any:
        """Return the weights of the padded rows; `valid` is already padded with zeros."""
        return valid

    @staticmethod
    def parameter(shard: Any, before: Any) -> Any:
        """Gather a parameter; `before` is the copy gathered in the last step, or None."""
        return jax.lax.all_gather(shard, "fsdp", tiled=True)

    @staticmethod
    def keep(key: Any, shape: tuple[int, ...]) -> Any:
        """Return this device's rows of one dropout mask for the whole batch."""
        place, rows = jax.lax.axis_index(BOTH), shape[0]
        whole = jax.random.bernoulli(key, 0.8, (rows * jax.lax.axis_size(BOTH), *shape[1:]))
        return jax.lax.dynamic_slice_in_dim(whole, place * rows, rows)

    @staticmethod
    def count(valid: Any) -> Any:
        """Return the number of valid rows on all devices."""
        return jax.lax.psum(jnp.sum(valid), BOTH)

    @staticmethod
    def mean(total: Any, valid: Any, count: Any) -> Any:
        """Return the mean loss from this device's sum."""
        return jax.lax.psum(total, BOTH) / count

    @staticmethod
    def accumulated(gradients: list[Any]) -> Any:
        """Return the sum over micro-batches."""
        return jax.tree.map(lambda *g: sum(g[1:], g[0]), *gradients)

    @staticmethod
    def reduced(g: Any) -> Any:
        """Return this device's rows of the gradient summed over all devices."""
        return jax.lax.psum_scatter(jax.lax.psum(g, "data"), "fsdp", tiled=True)

    @staticmethod
    def scaled(g: Any, valid: Any, count: Any) -> Any:
        """Return the gradient of the mean from that of the sum."""
        return g / count

    @staticmethod
    def squared_norm(gradients: Any) -> Any:
        """Return the squared norm of the whole gradient from this device's rows."""
        local = sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(gradients))
        return jax.lax.psum(local, "fsdp")

    @staticmethod
    def early_decay(g: Any, w: Any) -> Any:
        """Return one device's gradient before summation; weight decay must not be added here."""
        return g

    @staticmethod
    def counted(count: Any) -> Any:
        """Return the number of steps taken."""
        return count + 1

    @staticmethod
    def first_moment(m: Any, g: Any) -> Any:
        """Return Adam's first moment."""
        return BETAS[0] * m + (1 - BETAS[0]) * g

    @staticmethod
    def saved(shard: Any) -> Any:
        """Return the whole parameter, as written to a checkpoint."""
        return jax.lax.all_gather(shard, "fsdp", tiled=True)


def _loss_sum(weights: Any, x: Any, y: Any, valid: Any, keep: Any) -> Any:
    h = jnp.where(keep, jnp.tanh(x @ weights["up"]) / 0.8, 0.0)
    error = jnp.sum(jnp.square(h @ weights["down"] - y), axis=-1)
    return jnp.sum(valid * error)


def _one_step(state: Any, batch: Any, seed: Any, before: Any) -> tuple[Any, Any, Any]:
    x, y, valid = batch
    weights = {n: Training.parameter(w, before and before[n]) for n, w in state["params"].items()}
    for name, w in weights.items():
        checkpoint_name(w, f"gathered.{name}")
    keep = checkpoint_name(Training.keep(jax.random.key(seed), (len(x), HIDDEN)), "keep")
    rows = len(x) // MICRO
    parts = [
        jax.value_and_grad(_loss_sum)(
            weights, *(a[i * rows : (i + 1) * rows] for a in (x, y, valid, keep))
        )
        for i in range(MICRO)
    ]
    total = sum((part[0] for part in parts[1:]), parts[0][0])
    count = checkpoint_name(Training.count(valid), "count")
    loss = checkpoint_name(Training.mean(total, valid, count), "mean")
    sums = Training.accumulated([part[1] for part in parts])
    gradients = {}
    for name, g in sums.items():
        g = Training.early_decay(g, weights[name])
        reduced = Training.reduced(Training.scaled(g, valid, count))
        gradients[name] = checkpoint_name(reduced, f"gradient.{name}")
    norm = checkpoint_name(jnp.sqrt(Training.squared_norm(gradients)), "norm")
    steps = checkpoint_name(Training.counted(state["count"]), "steps")
    clipped = {n: g * jnp.minimum(1.0, CLIP / norm) for n, g in gradients.items()}
    m = {n: Training.first_moment(state["m"][n], g) for n, g in clipped.items()}
    v = {n: BETAS[1] * state["v"][n] + (1 - BETAS[1]) * g * g for n, g in clipped.items()}
    params = {}
    for name, w in state["params"].items():
        first = checkpoint_name(m[name], f"moment.{name}") / (1 - BETAS[0] ** steps)
        second = v[name] / (1 - BETAS[1] ** steps)
        moved = first / (jnp.sqrt(second) + EPS) + DECAY * w
        params[name] = checkpoint_name(w - RATE * moved, f"updated.{name}")
    return {"params": params, "m": m, "v": v, "count": steps}, loss, weights


def train(state: Any, x: Any, y: Any, valid: Any, seed: Any) -> Any:
    """Return losses, state and checkpoint after two steps; arguments are global arrays."""
    x, y, valid = (Training.padded(a) for a in (x, y, valid))
    valid = Training.filled_rows(valid)

    def local(state: Any, x: Any, y: Any, valid: Any, seed: Any) -> Any:
        state, first, weights = _one_step(state, (x, y, valid), seed, None)
        state, second, _ = _one_step(state, (x, y, valid), seed + 1, weights)
        saved = {n: Training.saved(w) for n, w in state["params"].items()}
        return {"losses": jnp.stack([first, second]), "state": state, "saved": saved}

    rows, spread = P("fsdp"), P(BOTH)
    kept = {"params": rows, "m": rows, "v": rows, "count": P()}
    return jax.shard_map(
        local,
        in_specs=(kept, spread, spread, spread, P()),
        out_specs={"losses": P(), "state": kept, "saved": P()},
        check_vma=False,
    )(state, x, y, valid, seed)


def comparison() -> MeshComparison:
    """Return the two steps with random numbers; one device has no valid row."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    params = {"up": draw(WIDTH, HIDDEN), "down": draw(HIDDEN, WIDTH)}
    zeros = {n: np.zeros_like(w) for n, w in params.items()}
    state = {"params": params, "m": zeros, "v": dict(zeros), "count": np.float32(0)}
    valid = (rng.random(BATCH) < 0.7).astype(np.float32)
    valid[4:8] = 0.0
    rows, fsdp = P(), P("fsdp")
    kept = {"params": fsdp, "m": fsdp, "v": fsdp, "count": P()}
    arguments = (state, draw(BATCH, WIDTH), draw(BATCH, WIDTH), valid, np.int32(5))
    return MeshComparison(
        train,
        arguments,
        (kept, rows, rows, rows, P()),
        ({"data": 4, "fsdp": 2},),
        name="training",
    )
