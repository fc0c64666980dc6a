"""The oracle: Megalodon in float64 NumPy, written from the equations of spec/model.md.

It is slow and plain on purpose: where a recurrence defines a layer there is a loop over tokens. It
knows neither JAX nor torch. NumPy is imported through HIPS autograd, which computes the same values
and can also differentiate them, so parameter gradients have an independent truth.
"""

# autograd.numpy is made at import, so a type checker sees an empty module.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import autograd.numpy as np
from autograd import value_and_grad
from autograd.extend import defvjp, primitive
from autograd.tracer import getval

if TYPE_CHECKING:
    from megalodon_jax.config import MegalodonConfig

Array = Any
Weights = Mapping[str, Array]
Tap = Callable[[str, Array], Array]
"""Sees every named intermediate (`parity.taps`) and returns the value to go on with."""

VARIANCE_FLOOR = 1e-6


def unchanged(name: str, value: Array) -> Array:
    """The tap that only lets values pass."""
    return value


def forward(
    config: MegalodonConfig,
    weights: Weights,
    ids: Array,
    mask: Array | None = None,
    *,
    mask_ema: bool = True,
    tap: Tap = unchanged,
) -> Array:
    """Return the logits (B, L, V) in float64.

    Args:
        config: sizes and flags; its dtypes are ignored.
        weights: float64 arrays by torch name.
        ids: token ids (B, L).
        mask: True where a token is valid, (B, L).
        mask_ema: zero masked inputs of the EMA, as this project does; False follows megalodon-hf.
        tap: called with the name and value of every intermediate; what it returns goes on.
    """
    mask = np.ones(ids.shape, bool) if mask is None else mask
    x = embed(config, weights["model.embed.weight"], ids)
    x = tap("embed", x)
    for i in range(config.num_layers):
        x = block(config, _under(weights, f"model.layers.{i}."), x, mask, i, mask_ema, tap)
    x = timestep_norm(config, x, mask, weights, "model.norm.")
    x = tap("norm", x)
    head = weights["model.embed.weight" if config.tied else "lm_head.weight"]
    return tap("logits", x @ head.T)


def loss(logits: Array, labels: Array, mask: Array | None, ignore_index: int = -100) -> Array:
    """Return the mean next-token cross-entropy in nats over targets that count."""
    targets = labels[:, 1:]
    valid = targets != ignore_index
    if mask is not None:
        valid = valid & mask[:, 1:]
    rows, steps = np.nonzero(valid)
    chosen = logits[rows, steps]
    peak = np.max(chosen, axis=-1, keepdims=True)
    log_total = np.log(np.sum(np.exp(chosen - peak), axis=-1)) + peak[:, 0]
    nll = log_total - chosen[np.arange(len(rows)), targets[rows, steps]]
    return np.sum(nll) / max(len(rows), 1)


def run(
    config: MegalodonConfig,
    weights: Weights,
    ids: Array,
    labels: Array,
    mask: Array | None = None,
    *,
    mask_ema: bool = True,
    tap: Tap = unchanged,
) -> dict[str, Array]:
    """Return every tap, the `loss`, and its derivative by every parameter as `grad/<name>`.

    Arguments as for `forward` and `loss`; the derivative is by reverse differentiation.
    """
    taps: dict[str, Array] = {}

    def keep(name: str, value: Array) -> Array:
        value = tap(name, value)
        taps[name] = getval(value)
        return value

    def objective(weights: Weights) -> Array:
        logits = forward(config, weights, ids, mask, mask_ema=mask_ema, tap=keep)
        return loss(logits, labels, mask)

    value, gradients = value_and_grad(objective)(dict(weights))
    return taps | {"loss": np.asarray(value)} | {f"grad/{n}": g for n, g in gradients.items()}


def block(config, w: Weights, x: Array, mask: Array, index: int, mask_ema: bool, tap: Tap) -> Array:
    """One layer; names in `w` are relative to `model.layers.{index}.`."""
    name = f"layers.{index}."
    u = timestep_norm(config, x, mask, w, "attn.timenorm.")
    u = tap(name + "timenorm", u)
    c = complex_ema(config, u * mask[..., None] if mask_ema else u, w)
    c = tap(name + "cema", c)
    m = c / np.sqrt(np.mean(c**2, axis=-1, keepdims=True) + config.norm_eps)
    if config.norm_affine:
        m = m * (w["attn.rmsnorm.gamma"] + 1)
    m = tap(name + "rmsnorm", m)
    o = attention(config, m, u, mask, w)
    o = tap(name + "inner", o)
    r = silu(linear(m, w, "attn.wr"))
    y = linear(m, w, "attn.wh1") + linear(o * r, w, "attn.wh2") + x
    y = tap(name + "attn", y)
    f = layer_norm(config, y, w)
    s = silu(linear(f, w, "ffn.fc1"))
    if config.swiglu:
        s = s * linear(f, w, "ffn.fc3")
    scale = 0.1 * 0.5**index if config.rescale_nffn else 1.0
    return tap(name + "ffn", x + scale * linear(s, w, "ffn.fc2"))


def embed(config, table: Array, ids: Array) -> Array:
    """Look tokens up; the padding row takes part but receives no gradient from it."""
    is_pad = (ids == config.pad_token_id)[..., None]
    x = np.where(is_pad, constant(table)[ids], table[ids])
    return x * math.sqrt(config.model_dim) if config.scale_emb else x


def timestep_norm(config, x: Array, mask: Array, w: Weights, prefix: str) -> Array:
    """Welford over the group means of valid tokens, one token after the other."""
    B, L, D = x.shape
    groups = x.reshape(B, L, config.norm_num_groups, -1)
    count = np.zeros((B, 1))
    mean = np.zeros((B, config.norm_num_groups))
    m2 = np.ones((B, config.norm_num_groups))
    out = []
    for t in range(L):
        valid = mask[:, t, None]
        count = count + valid
        n = np.maximum(count, 1)
        mu = np.mean(groups[:, t], axis=-1)
        new_mean = np.where(valid, mean + (mu - mean) / n, mean)
        m2 = np.where(valid, m2 + (mu - mean) * (mu - new_mean), m2)
        mean = new_mean
        var = np.maximum(m2 / n, VARIANCE_FLOOR)
        out.append((groups[:, t] - mean[..., None]) / np.sqrt(var + config.norm_eps)[..., None])
    y = np.stack(out, axis=1).reshape(B, L, D)
    if config.norm_affine:
        y = y * (w[prefix + "weight"] + 1) + w[prefix + "bias"]
    return y


def complex_ema(config, u: Array, w: Weights) -> Array:
    """`h_t = q h_{t-1} + p u_t`, `y_t = sum_n Re(gamma h_t) + omega u_t`."""
    N = config.cema_ndim
    alpha, delta = sigmoid(w["attn.cema.alpha"][..., 0]), sigmoid(w["attn.cema.delta"][..., 0])
    theta = sigmoid(w["attn.cema.theta"][..., 0])
    phi = np.arange(1, N + 1) * theta * (2 * math.pi / N)
    q = (1 - alpha * delta) * np.exp(1j * phi)
    gamma = (w["attn.cema.gamma_real"] + 1j * w["attn.cema.gamma_imag"]) / math.sqrt(N)
    h = np.zeros((u.shape[0], *alpha.shape), complex)
    out = []
    for t in range(u.shape[1]):
        h = q * h + alpha * u[:, t, :, None]
        out.append(np.sum(np.real(gamma * h), axis=-1))
    return np.stack(out, axis=1) + w["attn.cema.omega"] * u


def attention(config, m: Array, u: Array, mask: Array, w: Weights) -> Array:
    """Chunk-local causal attention (B, L, E), one chunk after the other."""
    B, L, _ = m.shape
    H, d = config.num_heads, config.head_dim
    z = linear(m, w, "attn.wz").reshape(B, L, H, d)
    z = z / np.sqrt(np.mean(z**2, axis=-1, keepdims=True) + config.norm_eps)
    scale = ((w["attn.gamma"] + 1) / math.sqrt(d)).reshape(2, H, d)
    shift = w["attn.beta"].reshape(2, H, d)
    q, k = rope(config, z * scale[0] + shift[0]), rope(config, z * scale[1] + shift[1])
    v = silu(linear(u, w, "attn.wv")).reshape(B, L, H, -1)
    out = []
    for start in range(0, L, config.chunk_size):
        chunk = slice(start, start + config.chunk_size)
        out.append(attend(q[:, chunk], k[:, chunk], v[:, chunk], mask[:, chunk]))
    return np.concatenate(out, axis=1).reshape(B, L, -1)


def attend(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """Causal softmax attention, scale 1; a query without a valid key gets 0."""
    length = q.shape[1]
    visible = np.tril(np.ones((length, length), bool)) & mask[:, None, None, :]
    scores = np.where(visible, np.einsum("bqhd,bkhd->bhqk", q, k), -1e300)
    weights = np.exp(scores - np.max(scores, axis=-1, keepdims=True)) * visible
    total = np.sum(weights, axis=-1, keepdims=True)
    return np.einsum("bhqk,bkhe->bqhe", weights / np.where(total > 0, total, 1.0), v)


def rope(config, x: Array) -> Array:
    """Rotate half-split pairs at absolute positions."""
    length, half = x.shape[1], config.head_dim // 2
    rates = config.effective_rope_base ** (-np.arange(half) / half)
    angles = (np.arange(length)[:, None] * rates)[None, :, None, :]
    cos, sin = np.cos(angles), np.sin(angles)
    real, imag = x[..., :half], x[..., half:]
    return np.concatenate([real * cos - imag * sin, imag * cos + real * sin], axis=-1)


def layer_norm(config, y: Array, w: Weights) -> Array:
    """LayerNorm over features."""
    centred = y - np.mean(y, axis=-1, keepdims=True)
    f = centred / np.sqrt(np.mean(centred**2, axis=-1, keepdims=True) + config.norm_eps)
    return f * w["ffn.norm.weight"] + w["ffn.norm.bias"] if config.norm_affine else f


def linear(x: Array, w: Weights, name: str) -> Array:
    """`x W^T + b`."""
    return x @ w[name + ".weight"].T + w[name + ".bias"]


def silu(x: Array) -> Array:
    """`x sigmoid(x)`."""
    return x * sigmoid(x)


def sigmoid(x: Array) -> Array:
    """Logistic function; this form keeps every digit of small values (slow decay needs them)."""
    return 1 / (1 + np.exp(-x))


@primitive
def constant(x: Array) -> Array:
    """Return `x` as it is, and no gradient."""
    return x


defvjp(constant, lambda ans, x: lambda g: np.zeros_like(x))


def _under(weights: Weights, prefix: str) -> dict[str, Array]:
    return {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}
