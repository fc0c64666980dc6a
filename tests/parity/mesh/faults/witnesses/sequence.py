"""Megalodon's time axis on `data` x `sequence`: norm statistics, EMA states, positions, labels.

Each device holds whole chunks. Devices exchange the moments of TimestepNorm, the states of the EMA
and one label; attention is local. Source: docs/sharding.md "Planted bugs".
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from parity.mesh.step import MeshComparison

AXIS = "sequence"
B, L, D, N, V, CHUNK, EPS = 2, 29, 8, 2, 11, 4, 1e-3
"""29 tokens are not divisible by any mesh, so the last shard is shorter and padded."""
TOKENS = 8 * CHUNK
"""Number of tokens that is divisible into whole chunks on 8 devices."""


class Sequence:
    """The exchanges of a sequence-parallel layer."""

    @staticmethod
    def padded(x: Any) -> Any:
        """Pad every text to whole chunks on every device."""
        return jnp.pad(x, ((0, 0), (0, -x.shape[1] % TOKENS), *((0, 0),) * (x.ndim - 2)))

    @staticmethod
    def filled_tokens(valid: Any) -> Any:
        """Return which tokens are text; `valid` is already padded with zeros."""
        return valid

    @staticmethod
    def gathered(x: Any) -> Any:
        """Return the values of all shards of a text, (shards, ...)."""
        if jnp.iscomplexobj(x):
            # As two real parts: XLA on CPU crashes on the derivative of a complex exchange.
            return jax.lax.complex(*(jax.lax.all_gather(part, AXIS) for part in (x.real, x.imag)))
        return jax.lax.all_gather(x, AXIS)

    @staticmethod
    def place() -> Any:
        """Return the index of this shard of the text."""
        return jax.lax.axis_index(AXIS)

    @staticmethod
    def incoming_count(counts: Any, place: Any) -> Any:
        """Return the number of tokens before this shard, (B, 1)."""
        return jnp.sum(_before(counts, place), axis=0)

    @staticmethod
    def incoming_mean(means: Any, counts: Any, place: Any) -> Any:
        """Return the mean over all tokens before this shard, (B, D)."""
        counts = _before(counts, place)
        return jnp.sum(counts * means, axis=0) / jnp.maximum(jnp.sum(counts, axis=0), 1)

    @staticmethod
    def incoming_spread(spreads: Any, means: Any, counts: Any, mean: Any, place: Any) -> Any:
        """Return the sum of squared deviations before this shard (Chan's formula), (B, D)."""
        counts = _before(counts, place)
        within = jnp.sum(_before(spreads, place), axis=0)
        return within + jnp.sum(counts * jnp.square(means - mean), axis=0)

    @staticmethod
    def powers(q: Any, length: int) -> Any:
        """Return the factor of a state that passes through one shard."""
        return q**length

    @staticmethod
    def incoming_state(states: Any, through: Any, place: Any) -> Any:
        """Return the EMA state before this shard, (B, D, N): all earlier states, decayed."""
        shards = jnp.arange(len(states))
        behind = jnp.maximum(place - 1 - shards, 0)
        # Through the logarithm: XLA on CPU crashes on the derivative of complex integer powers.
        decay = jnp.exp(behind[:, None, None] * jnp.log(through))
        return jnp.sum(_before(states, place) * decay[:, None], axis=0)

    @staticmethod
    def positions(length: int) -> Any:
        """Return the positions of this shard's tokens in the text."""
        return jax.lax.axis_index(AXIS) * length + jnp.arange(length)

    @staticmethod
    def next_first(labels: Any) -> Any:
        """Return the first label of the next shard, (B, 1); -100 after the last shard."""
        size = jax.lax.axis_size(AXIS)
        if size == 1:
            return jnp.full_like(labels[:, :1], -100)
        first = jax.lax.ppermute(labels[:, :1], AXIS, [(i, i - 1) for i in range(1, size)])
        return jnp.where(jax.lax.axis_index(AXIS) == size - 1, -100, first)

    @staticmethod
    def total(x: Any) -> Any:
        """Sum over all devices."""
        return jax.lax.psum(x, ("data", AXIS))


def _before(stacked: Any, place: Any) -> Any:
    """Return the values of earlier shards, with zeros for the others."""
    shards = jnp.arange(len(stacked)).reshape(-1, *(1,) * (stacked.ndim - 1))
    return jnp.where(shards < place, stacked, jnp.zeros_like(stacked))


def _norm(x: Any, valid: Any) -> Any:
    """Normalise by the mean and variance of all tokens so far."""
    w = valid[..., None].astype(x.dtype)
    count = jnp.sum(w, axis=1)
    mean = jnp.sum(w * x, axis=1) / jnp.maximum(count, 1)
    spread = jnp.sum(w * jnp.square(x - mean[:, None]), axis=1)
    place = Sequence.place()
    counts, means, spreads = map(Sequence.gathered, (count, mean, spread))
    n0 = Sequence.incoming_count(counts, place)
    m0 = Sequence.incoming_mean(means, counts, place)
    s0 = Sequence.incoming_spread(spreads, means, counts, m0, place)
    # Running statistics of this shard, combined with those of the earlier shards.
    n = jnp.cumsum(w, axis=1)
    m = jnp.cumsum(w * x, axis=1) / jnp.maximum(n, 1)
    s = jnp.cumsum(w * x * x, axis=1) - n * m * m
    every = checkpoint_name(n + n0[:, None], "norm_count")
    delta = m - m0[:, None]
    mean = m0[:, None] + delta * n / jnp.maximum(every, 1)
    mean = checkpoint_name(mean, "norm_mean")
    spread = s + s0[:, None] + delta**2 * n0[:, None] * n / jnp.maximum(every, 1)
    spread = checkpoint_name(spread, "norm_spread")
    return (x - mean) * jax.lax.rsqrt(spread / jnp.maximum(every, 1) + EPS)


def _ema(x: Any, decay: Any, turn: Any, gamma: Any) -> Any:
    """Return Re(gamma . h) with h_t = q h_(t-1) + x_t, starting from the incoming state."""
    length = x.shape[1]
    q = jax.nn.sigmoid(decay) * jnp.exp(1j * turn)
    steps = jnp.arange(length)
    lag = steps[:, None] - steps[None]
    table = jnp.where((lag >= 0)[..., None, None], q ** jnp.maximum(lag, 0)[..., None, None], 0)
    h = jnp.einsum("tsdn,bsd->btdn", table, x.astype(table.dtype))
    through = Sequence.powers(q, length)
    last = q[None] ** (length - 1 - steps)[:, None, None]
    states = Sequence.gathered(jnp.einsum("sdn,bsd->bdn", last, x.astype(table.dtype)))
    incoming = Sequence.incoming_state(states, through, Sequence.place())
    carried = q[None] ** (steps + 1)[:, None, None]
    h = h + carried[None] * incoming[:, None]
    return jnp.sum(jnp.real(h) * gamma, axis=-1)


def _attention(x: Any) -> Any:
    """Attend causally within chunks, with queries and keys rotated by their positions."""
    b, length, d = x.shape
    angle = Sequence.positions(length)[:, None] * (0.3 ** jnp.arange(d // 2))
    even, odd = x[..., : d // 2], x[..., d // 2 :]
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    turned = jnp.concatenate([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    q = checkpoint_name(turned, "rotated").reshape(b, -1, CHUNK, d)
    scores = jnp.einsum("bcid,bcjd->bcij", q, q)
    scores = jnp.where(jnp.tril(jnp.ones((CHUNK, CHUNK), bool)), scores, -jnp.inf)
    values = x.reshape(b, -1, CHUNK, d)
    return jnp.einsum("bcij,bcjd->bcid", jax.nn.softmax(scores), values).reshape(x.shape)


def _loss(weights: Any, x: Any, labels: Any, valid: Any) -> Any:
    x = checkpoint_name(_norm(x, valid), "norm")
    x = x * valid[..., None].astype(x.dtype)
    x = checkpoint_name(_ema(x, *(weights[n] for n in ("decay", "turn", "gamma"))), "ema")
    x = checkpoint_name(_attention(x), "attention")
    labels = jnp.where(valid, labels, -100)
    targets = jnp.concatenate([labels[:, 1:], Sequence.next_first(labels)], axis=1)
    logits = x @ weights["head"]
    log_p = jax.nn.log_softmax(logits)
    picked = jnp.take_along_axis(log_p, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
    counts = checkpoint_name((targets >= 0).astype(x.dtype), "counts")
    nll = checkpoint_name(-picked * counts, "token_loss")
    return Sequence.total(jnp.sum(nll)) / Sequence.total(jnp.sum(counts))


def step(weights: Any, x: Any, labels: Any, valid: Any) -> Any:
    """Return the loss and its gradients; arguments are global arrays, on any mesh."""
    x, labels, valid = (Sequence.padded(a) for a in (x, labels, valid))
    valid = Sequence.filled_tokens(valid)

    def sharded(weights: Any) -> Any:
        spread = P("data", AXIS)
        local = jax.shard_map(_loss, in_specs=(P(), spread, spread, spread), out_specs=P())
        return local(weights, x, labels, valid)

    loss, grad = jax.value_and_grad(sharded)(weights)
    return {"loss": loss, "grad": grad}


def comparison() -> MeshComparison:
    """Return the layer with random numbers; one text is shorter than the other."""
    rng = np.random.default_rng(1)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    weights = {
        # Poles near 1, so that a state still matters several shards later.
        "decay": draw(D, N) + 3,
        "turn": 0.3 * draw(D, N),
        "gamma": draw(D, N),
        "head": draw(D, V),
    }
    valid = np.ones((B, L), bool)
    valid[1, 21:] = False
    labels = rng.integers(0, V, (B, L)).astype(np.int32)
    rows = P("data")
    return MeshComparison(
        step,
        (weights, draw(B, L, D) + 1, labels, valid),
        (P(), rows, rows, rows),
        ({"data": 2, AXIS: 4},),
        name="sequence",
    )
