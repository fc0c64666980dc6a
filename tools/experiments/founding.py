"""The founding case, the bug this project began with: norm weights at 1 that never change.

Parameters were cast by `to(bfloat16)` and trained by AdamW at 3e-4. A small byte-level model whose
RMSNorm weights start at 1.0 is trained in that way, then with each of the three options proposed
when the bug was found, then with other remedies. `python -m tools.experiments founding-case DOC`
trains all of them and rewrites the table between the markers in DOC and the chart beside it.
Source: docs/stability.md "The founding case".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from megalodon_jax.optimiser import optimiser_update
from megalodon_jax.weights import dotted, named_leaves
from stability.core.byte_text import read_text
from stability.core.documents import markdown
from stability.storage.narrow_optimisers import apply_updates, kahan, stochastic_rounding
from stability.storage.simulate import Survival, summary, tally, total_of
from tools.document import renew
from tools.experiments.chart import line_chart
from tools.experiments.norm_rates import adamw, nbytes

CONTEXT = 8
"""Number of bytes from which the next is predicted; each has an equal part of the model's width."""
BEGIN, END = "<!-- founding case: begin -->", "<!-- founding case: end -->"
Wrapper = Callable[[optax.GradientTransformation], optax.GradientTransformation]


@dataclass(frozen=True)
class Size:
    """Model sizes and training lengths of a run."""

    width: int = 128
    layers: int = 3
    batch: int = 128
    steps: int = 1000
    every: int = 20
    """Steps between two points of the curves."""
    lr: float = 3e-4


DEFAULT = Size()


@dataclass(frozen=True)
class Variant:
    """One way to store and update the parameters."""

    name: str
    option: str
    """Role of the variant: "the bug", "option 1" .. "option 3", "other", "control"."""
    narrow: bool = True
    """Whether parameters are stored in bfloat16."""
    wide_norms: bool = False
    """Whether norm weights, and only these, are stored in float32 although `narrow` is set."""
    norm_lr: float = 1.0
    """Factor on the learning rate of the norm weights."""
    init: float = 1.0
    """Initial norm weight."""
    centred: bool = False
    """Whether the norm weight is stored minus 1."""
    wrap: Wrapper = optax.with_extra_args_support
    """Wrapper of the optimiser, such as `kahan`; the default changes nothing."""
    compute: Any = jnp.bfloat16
    """Dtype of the computation."""


VARIANTS = (
    Variant("to(bfloat16)", "the bug"),
    Variant("float32 parameters, bfloat16 compute (AMP)", "option 1", narrow=False),
    Variant("norm learning rate x 10", "option 2", norm_lr=10.0),
    Variant("norm weights from 0.1", "option 3", init=0.1),
    Variant("stochastic rounding", "other", wrap=stochastic_rounding),
    Variant("Kahan, bfloat16", "other", wrap=kahan),
    Variant("Kahan, float32", "other", wrap=partial(kahan, compensation_dtype=jnp.float32)),
    Variant("zero-centred norms", "other", centred=True),
    Variant("norms cast back to float32", "other", wide_norms=True),
    Variant("float32 throughout", "control", narrow=False, compute=jnp.float32),
)


@dataclass(frozen=True)
class Result:
    """Results of one variant."""

    variant: Variant
    norms: Survival
    """Survival of all norm weights."""
    drift: float
    """Mean distance of a norm weight from its start."""
    loss: float
    """Loss on held-out text, in nats per byte."""
    bytes: float
    """Bytes per parameter: weights and optimiser state, as allocated."""
    curve: list[tuple[float, float]]
    """(step, drift at that step)."""


def init_params(variant: Variant, size: Size, seed: int = 0) -> dict[str, Any]:
    """Return the initial parameters as stored: norm weights (D,) at `init`, random matrices.

    Matrices have standard deviation fan_in^-0.5; that of the embedding is 1.
    """
    keys = iter(jax.random.split(jax.random.key(seed), 2 + 2 * size.layers))
    D = size.width

    def matrix(fan_in: int, fan_out: int) -> jax.Array:
        return jax.random.normal(next(keys), (fan_in, fan_out)) * fan_in**-0.5

    norm = jnp.full(D, variant.init - variant.centred, jnp.float32)
    params: dict[str, Any] = {
        "embed": matrix(256, D // CONTEXT) * 16.0,
        "layers": [
            {"norm": norm, "up": matrix(D, 2 * D), "down": matrix(2 * D, D)}
            for _ in range(size.layers)
        ],
        "norm": norm,
        "head": matrix(D, 256),
    }

    def stored(path: Any, x: jax.Array) -> jax.Array:
        wide = not variant.narrow or (variant.wide_norms and _is_norm(dotted(path)))
        return x if wide else x.astype(jnp.bfloat16)

    return jax.tree_util.tree_map_with_path(stored, params)


def loss_of(params: Any, windows: jax.Array, centred: bool, compute: Any) -> jax.Array:
    """Return the mean loss of predicting the last byte of (B, CONTEXT + 1) windows, in nats."""
    cast = jax.tree.map(lambda x: x.astype(compute), params)
    x = cast["embed"][windows[:, :-1]].reshape(len(windows), -1)
    for layer in cast["layers"]:
        hidden = jax.nn.silu(_rms_norm(x, layer["norm"], centred) @ layer["up"])
        x = x + hidden @ layer["down"]
    logits = (_rms_norm(x, cast["norm"], centred) @ cast["head"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, -1]).mean()


def train(variant: Variant, size: Size, seed: int = 0) -> Result:
    """Train one variant; all variants with the same seed see the same batches."""
    text, held_out = (jnp.asarray(t.astype(np.int32)) for t in read_text())
    params = init_params(variant, size, seed)
    count = sum(x.size for x in jax.tree.leaves(params))
    transform = variant.wrap(tally(adamw(size.lr, variant.norm_lr, _is_norm)))
    loss = partial(loss_of, centred=variant.centred, compute=variant.compute)

    def step(carry: Any, index: jax.Array) -> tuple[Any, None]:
        params, state, changed = carry
        starts = jax.random.randint(
            jax.random.fold_in(jax.random.key(seed), index),
            (size.batch,),
            0,
            len(text) - CONTEXT - 1,
        )
        grads = jax.grad(loss)(params, _windows(text, starts))
        updates, state = optimiser_update(transform, grads, state, params)
        after = apply_updates(params, updates)
        moved = jax.tree.map(lambda c, a, b: c | (a != b), changed, after, params)
        return (after, state, moved), None

    @jax.jit
    def stretch(carry: Any, start: jax.Array) -> Any:
        return jax.lax.scan(step, carry, start + jnp.arange(size.every))[0]

    state: Any = transform.init(params)
    carry = (params, state, jax.tree.map(lambda x: jnp.zeros(x.shape, bool), params))
    curve = [(0.0, 0.0)]
    for start in range(0, size.steps, size.every):
        carry = stretch(carry, jnp.int32(start))
        drift = float(np.mean(np.abs(_norms(carry[0]) - _norms(params))))
        curve.append((float(start + size.every), drift))
    last, state, changed = carry
    total = total_of(state)
    norms = summary(*(_norms(tree) for tree in (params, last, total, changed)))
    starts = jnp.arange(0, len(held_out) - CONTEXT - 1, 5)
    held_out_loss = jax.jit(loss)(last, _windows(held_out, starts))
    used = nbytes(last) + nbytes(state) - nbytes(total)
    return Result(variant, norms, curve[-1][1], float(held_out_loss), used / count, curve)


def compare(size: Size = DEFAULT, variants: Sequence[Variant] = VARIANTS) -> list[Result]:
    """Train every variant and return the results; the default ten take two minutes on two cores."""
    return [train(variant, size) for variant in variants]


def table(results: Sequence[Result]) -> str:
    """Return the results as a Markdown table."""
    columns = ("storage", "which", "norms frozen", "norm fidelity", "mean norm drift")
    rows = (
        (
            r.variant.name,
            r.variant.option,
            f"{r.norms.frozen:.0%}",
            f"{r.norms.fidelity:.3f}",
            f"{r.drift:.4f}",
            f"{r.loss:.3f}",
            f"{r.bytes:.0f}",
        )
        for r in results
    )
    return markdown((*columns, "held-out loss", "bytes per parameter"), rows)


def chart(results: Sequence[Result]) -> str:
    """Return an SVG of the norm weights' drift by step, without the control and option 2."""
    chosen = {r.variant.name: r.curve for r in results if r.variant.option != "control"}
    short = {name.replace(" parameters, bfloat16 compute", ""): c for name, c in chosen.items()}
    short.pop("norm learning rate x 10", None)
    return line_chart("Mean distance of norm weights from their start", "steps", short)


def write(doc: Path, results: Sequence[Result]) -> None:
    """Rewrite the table between the markers of a document, and the chart beside it.

    Raises:
        ValueError: the document lacks the markers.
    """
    renew(doc, BEGIN, END, table(results), {"founding-case.svg": chart(results)})


def _rms_norm(x: jax.Array, weight: jax.Array, centred: bool) -> jax.Array:
    wide = x.astype(jnp.float32)
    scaled = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-6)
    gain = weight.astype(jnp.float32) + float(centred)
    return (scaled * gain).astype(x.dtype)


def _windows(text: jax.Array, starts: jax.Array) -> jax.Array:
    return text[starts[:, None] + jnp.arange(CONTEXT + 1)]


def _is_norm(name: str) -> bool:
    return name.rpartition(".")[2] == "norm"


def _norms(tree: Any) -> np.ndarray:
    rows = [np.asarray(x).reshape(-1) for n, x in named_leaves(tree).items() if n.endswith("norm")]
    flat = np.concatenate(rows)
    return flat if flat.dtype == bool else flat.astype(np.float64)
