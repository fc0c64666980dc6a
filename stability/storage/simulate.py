"""Real optimiser runs on samples of leaves, with synthetic gradients of a stated distribution.

A checkpoint alone has no data, so its gradients are drawn: each element has one direction it is
pushed in at every step, under noise. Everything else is real: optax steps the values, and what the
storage makes of them is measured. Rows of equal length run together, one compiled scan for many
leaves. Source: docs/stability.md "Update survival".
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from megalodon_jax.optimiser import optimiser_update
from stability.core.number_formats import BF16, Format, by_name, format_of
from stability.core.parameter_leaves import Leaf, decays, is_megalodon, sample, seed_of
from stability.core.rounding import check_conversion, check_rounding, nearest
from stability.storage.known_gradients import RowGradients
from stability.storage.narrow_optimisers import (
    StochasticState,
    apply_updates,
    float32_master,
    kahan,
    nearest_storage,
    stochastic_rounding,
)
from stability.storage.update_rules import GRADIENT_RMS, Optimiser

STEPS, SAMPLE = 200, 2048
"""Optimiser steps, and elements of a leaf: a share of 2,048 has a standard error of 1.1 % at
most."""
ROWS = 16
"""Leaves that run together: one compiled program for as many."""


def cast_storage(
    inner: optax.GradientTransformation, beta2: float = 0.999
) -> optax.GradientTransformation:
    """Round parameters and moments to nearest: what a model and its optimiser do in few bits.

    A second moment is rounded twice, as torch does: it is multiplied by beta2, and then the square
    is added. Rounded once, of both, it would decay by what is added less.

    Args:
        inner: a `tally`, whose sum stays what was asked for.
        beta2: decay rate of the second moments.
    """
    stored = nearest_storage(inner)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        fmt = format_of(params["leaf"].dtype)
        if fmt is None:
            return stored.update(updates, state, params)

        def decayed(part: Any) -> Any:
            if not isinstance(part, optax.ScaleByAdamState):
                return part
            # Optax multiplies by beta2 once more, which leaves the rounded product.
            nu = jax.tree.map(lambda x: nearest(beta2 * x, fmt) / beta2, part.nu)
            return part._replace(nu=nu)

        def kept(x: jax.Array) -> jax.Array:
            moment = x.ndim > 0 and jnp.issubdtype(x.dtype, jnp.floating)
            return nearest(x, fmt) if moment else x

        tallied = state.inner
        adam = jax.tree.map(
            decayed, tallied.inner, is_leaf=lambda x: isinstance(x, optax.ScaleByAdamState)
        )
        moves, state = stored.update(
            updates, state._replace(inner=tallied._replace(inner=adam)), params
        )
        tallied = state.inner
        rounded = jax.tree.map(kept, tallied.inner)
        return moves, state._replace(inner=tallied._replace(inner=rounded))

    return optax.GradientTransformation(stored.init, update)


WRAPPERS: dict[str, Callable[[optax.GradientTransformation], optax.GradientTransformation]] = {
    "plain": lambda inner: inner,
    "nearest": nearest_storage,
    "cast": cast_storage,
    "stochastic": stochastic_rounding,
    "kahan": kahan,
    "kahan float32": partial(kahan, compensation_dtype=jnp.float32),
    "master": float32_master,
}


Known: TypeAlias = Mapping[str, RowGradients] | None
"""Gradients by leaf, where something says what they are."""


@dataclass(frozen=True, slots=True)
class Gradients:
    """Synthetic gradients of one element: `rms (signal d + sqrt(1 - signal^2) z)`.

    d is +1 or -1, the same at every step, and z is standard normal, new at every step. Both follow
    from the leaf's path, z from the step as well.
    """

    signal: float = 0.3
    """Share of the root mean square that keeps its sign: 1 is a straight push, 0 pure noise."""
    rms: float = GRADIENT_RMS
    uphill: bool = False
    """Whether every d is +1, so that descent pushes every element down."""

    def describe(self) -> str:
        """Return the distribution in words."""
        sign = "+1" if self.uphill else "a fixed random sign"
        return (
            f"gradients {self.rms:g} x ({self.signal:g} d + {self._noise:.3g} z), d {sign} per "
            "element, z normal and new at every step, keys from leaf path and step"
        )

    @property
    def _noise(self) -> float:
        return math.sqrt(1.0 - self.signal**2)

    def directions(self, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Return d, float32."""
        signs = jax.random.rademacher(jax.random.fold_in(key, 0), shape, jnp.float32)
        return jnp.ones(shape) if self.uphill else signs

    def draw(
        self, d: jax.Array, key: jax.Array, step: jax.Array, rms: Any = None, signal: Any = None
    ) -> jax.Array:
        """Return the gradient at a step (from 1), float32, in the shape of d.

        Args:
            d: directions.
            key: of the leaf.
            step: from 1.
            rms: in the shape of d, in place of the one all elements have.
            signal: likewise.
        """
        rms = self.rms if rms is None else rms
        signal = self.signal if signal is None else signal
        z = jax.random.normal(jax.random.fold_in(key, step), d.shape)
        return rms * (signal * d + jnp.sqrt(1.0 - jnp.square(signal)) * z)

    def of(
        self, name: str, sampled: np.ndarray, size: int, matrix: bool, known: Known = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return rms and signal of each sampled element of a leaf: as known, else those here."""
        if known is None or name not in known:
            return np.full(sampled.shape, self.rms), np.full(sampled.shape, self.signal)
        return known[name].sampled(name, size, matrix)


@dataclass(frozen=True, slots=True)
class Survival:
    """What storage did to the updates of one leaf over a run."""

    frozen: float
    """Share of the elements that never changed although the optimiser moved them."""
    fidelity: float
    """Displacement applied over displacement intended, along the intended direction."""
    error: float = 0.0
    """Relative L2 distance of the displacement applied from the one intended."""
    spread: float = 0.0
    """Standard error of the fidelity over the elements, whose gradients are drawn independently."""


class Outcome(NamedTuple):
    """Values of one leaf's sample before and after, what was intended, and what ever moved."""

    first: np.ndarray
    last: np.ndarray
    intended: np.ndarray
    changed: np.ndarray
    pushed: np.ndarray
    """Which elements have a gradient; weight decay alone moves the others."""

    def survival(self) -> Survival:
        """Sum the outcome up."""
        return summary(self.first, self.last, self.intended, self.changed)

    def with_gradients(self) -> Outcome:
        """Return the elements that have a gradient; all of them where none has."""
        if not self.pushed.any():
            return self
        return Outcome(*(part[self.pushed] for part in self))


@dataclass(frozen=True, slots=True)
class Storage:
    """How a parameter is stored while it trains."""

    wrapper: str = "nearest"
    """A key of `WRAPPERS`."""
    dtype: str = BF16.name

    @property
    def format(self) -> Format | None:
        """The format the parameter is rounded to, None for float32."""
        return None if self.dtype == "float32" else by_name(self.dtype)

    def start(self, values: np.ndarray) -> np.ndarray:
        """Return the values as first stored, float32."""
        return values if self.format is None else self.format.round(values)


GRADIENTS = Gradients()
NEAREST = Storage()
FLOAT32 = Storage("plain", "float32")


def summary(first: Any, last: Any, intended: Any, changed: Any) -> Survival:
    """Return what became of intended displacements; arrays of one shape, any float dtype."""
    applied = np.asarray(last, np.float64) - np.asarray(first, np.float64)
    intended = np.asarray(intended, np.float64)
    moved = intended != 0
    total = float(np.abs(intended).sum())
    if not total:
        return Survival(0.0, 1.0)
    frozen = float(np.mean(~np.asarray(changed)[moved]))
    along = applied * np.sign(intended)
    fidelity = float(along.sum() / total)
    # Of a ratio of sums: residuals about the line through the origin.
    residuals = (along - fidelity * np.abs(intended))[moved]
    count = max(2, residuals.size)
    spread = float(np.sqrt(np.sum(residuals**2) * count / (count - 1)) / total)
    error = float(np.linalg.norm(applied - intended) / np.linalg.norm(intended))
    return Survival(frozen, fidelity, error, spread)


def run(
    values: Mapping[str, np.ndarray | Leaf],
    optimiser: Optimiser,
    storage: Storage = NEAREST,
    gradients: Gradients = GRADIENTS,
    steps: int = STEPS,
    size: int = SAMPLE,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    known: Known = None,
    fill: bool = False,
) -> dict[str, Outcome]:
    """Train a sample of every leaf for `steps` steps and return what happened to it.

    Args:
        values: leaves by name, any shape; the name decides sample, gradients and roundings. A
            `Leaf` is read, sampled and let go before the next.
        optimiser: steps them; its moments are float32, so only the storage differs.
        storage: how the values are kept between steps.
        gradients: the distribution gradients are drawn from.
        steps: optimiser steps.
        size: elements sampled of each leaf, `leaves.sample`.
        shapes: of whole leaves, where `values` are samples already.
        known: gradients of leaves that are not those of `gradients`.
        fill: whether a leaf of fewer than half of `size` elements is repeated, each copy with draws
            of its own; matrices that are stepped as such are not.

    Raises:
        ValueError: XLA cannot convert to the storage format on this processor.
        RuntimeError: the compiler removed the rounding.
    """
    if storage.format is not None:
        check_conversion(storage.format)
        check_rounding(storage.format)
    megalodon = is_megalodon(values)
    groups: dict[Any, list[str]] = defaultdict(list)
    samples: dict[str, np.ndarray] = {}
    pushes: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for name, leaf in values.items():
        full = (shapes or {}).get(name, leaf.shape)
        matrix = optimiser.matrix(full)
        whole = leaf.read() if isinstance(leaf, Leaf) else leaf
        samples[name] = sample(whole, name, size, matrix)
        pushes[name] = gradients.of(name, samples[name], size, matrix, known)
        copies = size // max(1, samples[name].size) if fill and not matrix else 1
        if copies > 1:
            samples[name] = np.tile(samples[name].reshape(-1), copies)
            rms, signals = (np.tile(x.reshape(-1), copies) for x in pushes[name])
            pushes[name] = rms, signals
        shape = samples[name].shape if matrix else (_padded(samples[name].size, size),)
        scaled = _scaled(optimiser, full, shape) if matrix else optimiser
        decay = decays(name, full, megalodon) and optimiser.step(full, True).decay > 0
        groups[shape, scaled, decay].append(name)
    out: dict[str, Outcome] = {}
    for (shape, scaled, decay), names in groups.items():
        compiled = _runner(scaled.with_lr(1.0), decay, storage, gradients)
        compiled = partial(compiled, lr=np.float32(scaled.lr), steps=np.int32(steps))
        stacked = (_rows(len(names), shape), *shape)
        for start in range(0, len(names), ROWS):
            part = names[start : start + ROWS]
            rows = [(samples[n], *pushes[n]) for n in part]
            out |= _run_rows(compiled, part, rows, stacked, storage)
    return {name: out[name] for name in values}


def _run_rows(
    compiled: Any,
    names: Sequence[str],
    samples: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]],
    shape: Any,
    storage: Storage,
) -> dict[str, Outcome]:
    """Run leaves together: of each its values, and the rms and signal of its gradients."""
    rows, rms, signals = (np.zeros(shape, np.float32) for _ in range(3))
    seeds = np.zeros(len(rows), np.uint32)
    for i, (name, (values, *push)) in enumerate(zip(names, samples, strict=True)):
        for row, part in zip((rows, rms, signals), (storage.start(values), *push), strict=True):
            row[i].reshape(-1)[: values.size] = part.reshape(-1)
        seeds[i] = seed_of(name)
    last, intended, changed = (np.asarray(a) for a in compiled(rows, rms, signals, seeds))
    found = (rows, last, intended, changed, rms != 0)
    return {
        name: Outcome(*(a[i].reshape(-1)[: values.size] for a in found))
        for i, (name, (values, *_)) in enumerate(zip(names, samples, strict=True))
    }


@lru_cache(maxsize=64)
def _runner(optimiser: Optimiser, decay: bool, storage: Storage, gradients: Gradients) -> Any:
    """Return the compiled run: values, rms, signals, seeds, lr, steps -> last, intended, changed.

    The first three are (rows, *shape), seeds (rows,).

    The optimiser's own rate is 1: every one of them scales by its rate last, so a program that is
    given the rate takes the same steps, and a probe at another rate or length compiles nothing.
    """
    unscaled, dtype = optimiser.transform(decay), jnp.dtype(storage.dtype)
    wrapper = WRAPPERS[storage.wrapper]
    if wrapper is cast_storage:
        # Optax's Muon has Adam's own rates for what is no matrix.
        wrapper = partial(cast_storage, beta2=getattr(optimiser, "beta2", 0.999))

    def one(
        values: jax.Array, rms: jax.Array, signal: jax.Array, seed: jax.Array, lr: jax.Array,
        steps: jax.Array,
    ) -> Any:  # fmt: skip
        scaled = optax.chain(unscaled, optax.scale(lr))  # pyright: ignore[reportArgumentType]
        transform = wrapper(tally(scaled))
        params = {"leaf": values.astype(dtype)}
        state = transform.init(params)
        if isinstance(state, StochasticState):
            state = state._replace(seed=seed)
        # Another base than the roundings', whose key is made of the seed itself.
        key = jax.random.fold_in(jax.random.key(1), seed)
        directions = gradients.directions(key, values.shape)

        def step(index: jax.Array, carry: Any) -> Any:
            params, state, changed = carry
            grads = {"leaf": gradients.draw(directions, key, index, rms, signal)}
            updates, state = optimiser_update(transform, grads, state, params)
            after = apply_updates(params, updates)
            moved = after["leaf"].astype(jnp.float32) != params["leaf"].astype(jnp.float32)
            return after, state, changed | moved

        start = (params, state, jnp.zeros(values.shape, bool))
        params, state, changed = jax.lax.fori_loop(1, steps + 1, step, start)
        return params["leaf"].astype(jnp.float32), total_of(state)["leaf"], changed

    @jax.jit
    def rows(
        values: jax.Array, rms: jax.Array, signals: jax.Array, seeds: jax.Array, lr: jax.Array,
        steps: jax.Array,
    ) -> Any:  # fmt: skip
        over = (0, 0, 0, 0, None, None)
        return jax.vmap(one, over)(values, rms, signals, seeds, lr, steps)

    return rows


class TallyState(NamedTuple):
    """State of `tally`."""

    inner: Any
    total: Any
    """Sum of all updates so far, float32."""


def tally(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Sum up the updates `inner` asks for: what would have been applied in exact arithmetic."""

    def init(params: Any) -> TallyState:
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        return TallyState(inner.init(params), zeros)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, TallyState]:
        moves, inner_state = inner.update(updates, state.inner, params)
        total = jax.tree.map(lambda t, u: t + u.astype(t.dtype), state.total, moves)
        return moves, TallyState(inner_state, total)

    return optax.GradientTransformation(init, update)


def total_of(state: Any) -> Any:
    """Return the sum of updates from the state of a wrapper around `tally`, or of `tally` alone."""
    return (state if isinstance(state, TallyState) else state.inner).total


def _rows(count: int, shape: tuple[int, ...]) -> int:
    """Return how many rows run together: few counts, so that few programs serve any checkpoint.

    Rows that hold nothing cost less than another program, unless they are matrices.
    """
    least = 1 if len(shape) > 1 else ROWS if shape == (_SHORT,) else 4
    return min(ROWS, max(least, 1 << (count - 1).bit_length()))


def _padded(count: int, size: int) -> int:
    """Return the row length of a sample: two lengths, so that few programs are compiled."""
    return min(size, _SHORT) if count <= _SHORT else max(size, count)


_SHORT = 128
"""Row length of small leaves, norms above all: padded to `SAMPLE` they would cost 16 times that."""


def _scaled(optimiser: Optimiser, whole: tuple[int, ...], part: tuple[int, ...]) -> Optimiser:
    """Return the optimiser whose steps on part of a matrix have the size they have on all of it."""
    ratio = optimiser.step(whole, False).size / optimiser.step(part, False).size
    return optimiser.with_lr(optimiser.lr * ratio)
