"""Optimiser runs on samples of leaves with synthetic gradients, to measure the effect of storage.

A checkpoint has no data, so gradients are drawn at random: each element has a fixed sign plus
noise. The updates are those of optax. Counting begins once the optimiser's moments have settled
(`BURN_IN`). Samples of equal length are stacked, so that one compiled loop serves many leaves.
Source: docs/stability.md "Update survival".
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
"""Number of counted optimiser steps (those after `BURN_IN`), and largest number of elements sampled
per leaf. A fraction measured on 2,048 elements has a standard error of at most 1.1 %."""
BURN_IN = 100
"""Optimiser steps before the counted ones; they fill the moments and do not change parameters.

AdamW's first step from moments of zero is as large as the learning rate; later steps are about a
third of it for these gradients. If the first step counted, it would move most elements once, and
few would count as frozen. 100 steps are enough: of normal weights with standard deviation 0.1 in
bfloat16 at lr 3e-4, 19 % are frozen without a burn-in, 40 % with 30 steps, 39 % with 100 and 38 %
with 1,000. With Lion, SGD and Muon a burn-in changes less than 1 % of the elements."""
ROWS = 16
"""Largest number of leaves that one compiled run stacks."""


def cast_storage(
    inner: optax.GradientTransformation, beta2: float = 0.999
) -> optax.GradientTransformation:
    """Wrap an optimiser so that parameters and moments are rounded to nearest after each step.

    Training that stores everything in few bits does the same.
    A second moment is rounded twice, as in torch: after the multiplication by beta2, and after the
    addition of the squared gradient. A single rounding of the sum would decay differently.

    Args:
        inner: an optimiser wrapped by `tally`, which sums up the unrounded updates.
        beta2: decay factor per step of the second moments.
    """
    stored = nearest_storage(inner)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        fmt = format_of(params["leaf"].dtype)
        if fmt is None:
            return stored.update(updates, state, params)

        def decayed(part: Any) -> Any:
            if not isinstance(part, optax.ScaleByAdamState):
                return part
            # optax multiplies by beta2 again; the division makes its product the rounded value.
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
"""Known gradient statistics by leaf name; None if none are known."""


@dataclass(frozen=True, slots=True)
class Gradients:
    """Distribution of synthetic gradients: `rms (signal d + sqrt(1 - signal^2) z)` per element.

    d is +1 or -1, constant over the run. z is standard normal, redrawn at every step. Both are
    seeded by the leaf's path, z also by the step.
    """

    signal: float = 0.3
    """Fraction of the root mean square that keeps its sign: 1 is constant, 0 is pure noise."""
    rms: float = GRADIENT_RMS
    """Root mean square of a gradient element."""
    uphill: bool = False
    """Whether every d is +1, so that gradient descent decreases every element."""

    def describe(self) -> str:
        """Return a clause with the formula and the values of the distribution."""
        sign = "+1" if self.uphill else "a fixed random sign"
        return (
            f"gradients {self.rms:g} x ({self.signal:g} d + {self._noise:.3g} z), d {sign} per "
            "element, z normal and new at every step, keys from leaf path and step"
        )

    @property
    def _noise(self) -> float:
        return math.sqrt(1.0 - self.signal**2)

    def directions(self, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Return the signs d, +1 or -1, as float32 of this shape."""
        signs = jax.random.rademacher(jax.random.fold_in(key, 0), shape, jnp.float32)
        return jnp.ones(shape) if self.uphill else signs

    def draw(
        self, d: jax.Array, key: jax.Array, step: jax.Array, rms: Any = None, signal: Any = None
    ) -> jax.Array:
        """Return the gradient at one step, float32, in the shape of d.

        Args:
            d: signs from `directions`.
            key: random key of the leaf.
            step: number of the step, from 1.
            rms: root mean square of each element, in the shape of d; None: `self.rms` for all.
            signal: factor of d in units of rms, in the shape of d; None: `self.signal` for all.
        """
        rms = self.rms if rms is None else rms
        signal = self.signal if signal is None else signal
        z = jax.random.normal(jax.random.fold_in(key, step), d.shape)
        return rms * (signal * d + jnp.sqrt(1.0 - jnp.square(signal)) * z)

    def of(
        self, name: str, sampled: np.ndarray, size: int, matrix: bool, known: Known = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return rms and signal of each sampled element of a leaf, both in the shape of `sampled`.

        Args:
            name: name of the leaf.
            sampled: the sample; only its shape is used.
            size, matrix: arguments with which `parameter_leaves.sample` drew the sample.
            known: known statistics; a leaf without them gets the defaults of this object.
        """
        if known is None or name not in known:
            return np.full(sampled.shape, self.rms), np.full(sampled.shape, self.signal)
        return known[name].sampled(name, size, matrix)


@dataclass(frozen=True, slots=True)
class Survival:
    """Effect of storage on the updates of one leaf over a run."""

    frozen: float
    """Fraction of the elements due to move (nonzero intended displacement) that never changed."""
    fidelity: float
    """Applied displacement divided by intended displacement, along the intended direction."""
    error: float = 0.0
    """L2 norm of applied minus intended displacement, divided by that of the intended one."""
    spread: float = 0.0
    """Standard error of the fidelity, from the scatter over elements (independent gradients)."""


class Simulated(NamedTuple):
    """Sample of one leaf before and after a run; all arrays are (elements,)."""

    first: np.ndarray
    """Stored values before the counted steps, float32."""
    last: np.ndarray
    """Stored values after the last step, float32."""
    intended: np.ndarray
    """Intended displacement: the sum of the unrounded updates, float32."""
    changed: np.ndarray
    """Whether the element changed at any step, bool."""
    pushed: np.ndarray
    """Whether the element has a gradient, bool; only weight decay moves the others."""

    def survival(self) -> Survival:
        """Return the effect of storage on the updates of this run, over all elements."""
        return summary(self.first, self.last, self.intended, self.changed)

    def with_gradients(self) -> Simulated:
        """Return the run of the elements with a gradient; of all elements if there are none."""
        if not self.pushed.any():
            return self
        return Simulated(*(part[self.pushed] for part in self))


@dataclass(frozen=True, slots=True)
class Storage:
    """Storage dtype of a parameter during training, and rounding of its updates."""

    wrapper: str = "nearest"
    """Key of `WRAPPERS`: how the optimiser's update is rounded."""
    dtype: str = BF16.name
    """Name of the stored dtype, such as "bfloat16" or "float32"."""

    @property
    def format(self) -> Format | None:
        """Format to which the parameter is rounded; None for float32."""
        return None if self.dtype == "float32" else by_name(self.dtype)

    def start(self, values: np.ndarray) -> np.ndarray:
        """Return the values after their first rounding to storage, float32."""
        return values if self.format is None else self.format.round(values)


GRADIENTS = Gradients()
NEAREST = Storage()
FLOAT32 = Storage("plain", "float32")


def summary(first: Any, last: Any, intended: Any, changed: Any) -> Survival:
    """Return the survival of updates: compare the applied displacement with the intended one.

    The applied displacement is `last - first`.

    Args:
        first, last: values before and after the run, any floating-point dtype.
        intended: sum of the unrounded updates, in the same shape. If it is 0 everywhere, the result
            is frozen 0 and fidelity 1.
        changed: whether each element changed at any step, bool, in the same shape.
    """
    applied = np.asarray(last, np.float64) - np.asarray(first, np.float64)
    intended = np.asarray(intended, np.float64)
    moved = intended != 0
    total = float(np.abs(intended).sum())
    if not total:
        return Survival(0.0, 1.0)
    frozen = float(np.mean(~np.asarray(changed)[moved]))
    along = applied * np.sign(intended)
    fidelity = float(along.sum() / total)
    # Standard error of a ratio of sums, from residuals about along = fidelity * |intended|.
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
    burn_in: int = BURN_IN,
) -> dict[str, Simulated]:
    """Train a sample of every leaf on synthetic gradients; return a `Simulated` by leaf name.

    Args:
        values: leaves by name, any shape. The name seeds sample, gradients and roundings. A `Leaf`
            is read, sampled and released before the next one is read.
        optimiser: the optimiser. Its moments are float32, except with the wrapper "cast".
        storage: storage of the values between steps.
        gradients: distribution of synthetic gradients.
        steps: counted optimiser steps.
        size: largest number of elements sampled per leaf, see `parameter_leaves.sample`.
        shapes: shapes of the whole leaves by name, if `values` are samples; None: they are not.
        known: known gradient statistics by leaf name, which replace `gradients`; None: there are
            none.
        fill: whether to repeat a leaf of at most half of `size` elements up to that size, with
            separate random draws for each copy. Matrices that the optimiser updates as a whole are
            not repeated.
        burn_in: steps before the counted ones, which change only the moments. With 0, moments start
            from zero, as at the beginning of a training run.

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
    out: dict[str, Simulated] = {}
    for (shape, scaled, decay), names in groups.items():
        compiled = _runner(scaled.with_lr(1.0), decay, storage, gradients)
        counts = {"steps": np.int32(steps), "burn_in": np.int32(burn_in)}
        compiled = partial(compiled, lr=np.float32(scaled.lr), **counts)
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
) -> dict[str, Simulated]:
    """Run the leaves stacked in arrays of `shape` (rows, ...); return each leaf's run by name.

    A sample is (values, gradient rms, signal) of one leaf, three arrays of equal shape.
    """
    rows, rms, signals = (np.zeros(shape, np.float32) for _ in range(3))
    seeds = np.zeros(len(rows), np.uint32)
    for i, (name, (values, *push)) in enumerate(zip(names, samples, strict=True)):
        for row, part in zip((rows, rms, signals), (storage.start(values), *push), strict=True):
            row[i].reshape(-1)[: values.size] = part.reshape(-1)
        seeds[i] = seed_of(name)
    last, intended, changed = (np.asarray(a) for a in compiled(rows, rms, signals, seeds))
    found = (rows, last, intended, changed, rms != 0)
    return {
        name: Simulated(*(a[i].reshape(-1)[: values.size] for a in found))
        for i, (name, (values, *_)) in enumerate(zip(names, samples, strict=True))
    }


@lru_cache(maxsize=64)
def _runner(optimiser: Optimiser, decay: bool, storage: Storage, gradients: Gradients) -> Any:
    """Return the compiled run of stacked leaves.

    It maps (values, rms, signals, seeds, lr, steps, burn_in) to (last, intended, changed). Seeds
    are (rows,), lr, steps and burn_in scalars, and all other arrays (rows, *shape). `optimiser`
    has rate 1, and the run multiplies its updates by `lr`. Every optimiser scales by its rate last,
    so the result is the same, and another rate or number of steps needs no new program.
    """
    unscaled, dtype = optimiser.transform(decay), jnp.dtype(storage.dtype)
    wrapper = WRAPPERS[storage.wrapper]
    if wrapper is cast_storage:
        # Optax's Muon updates parameters that are not matrices by Adam with its default rates.
        wrapper = partial(cast_storage, beta2=getattr(optimiser, "beta2", 0.999))

    def one(
        values: jax.Array, rms: jax.Array, signal: jax.Array, seed: jax.Array, lr: jax.Array,
        steps: jax.Array, burn_in: jax.Array,
    ) -> Any:  # fmt: skip
        scaled = optax.chain(unscaled, optax.scale(lr))  # pyright: ignore[reportArgumentType]
        transform = wrapper(tally(scaled))
        params = {"leaf": values.astype(dtype)}
        state = transform.init(params)
        if isinstance(state, StochasticState):
            state = state._replace(seed=seed)
        # Base key 1 keeps these draws independent of the roundings, whose key is the seed itself.
        key = jax.random.fold_in(jax.random.key(1), seed)
        directions = gradients.directions(key, values.shape)

        def step(index: jax.Array, carry: Any) -> Any:
            params, state, changed = carry
            grads = {"leaf": gradients.draw(directions, key, index, rms, signal)}
            updates, state = optimiser_update(transform, grads, state, params)
            after = apply_updates(params, updates)
            moved = after["leaf"].astype(jnp.float32) != params["leaf"].astype(jnp.float32)
            return after, state, changed | moved

        def fill(index: jax.Array, state: Any) -> Any:
            grads = {"leaf": gradients.draw(directions, key, steps + index, rms, signal)}
            _, after = optimiser_update(transform, grads, state, params)
            return with_moments(state, moments_of(after))

        # The burn-in draws with step numbers after those of the counted steps, so that the counted
        # gradients do not depend on the length of the burn-in.
        state = jax.lax.fori_loop(1, burn_in + 1, fill, state)
        start = (params, state, jnp.zeros(values.shape, bool))
        params, state, changed = jax.lax.fori_loop(1, steps + 1, step, start)
        return params["leaf"].astype(jnp.float32), total_of(state)["leaf"], changed

    @jax.jit
    def rows(
        values: jax.Array, rms: jax.Array, signals: jax.Array, seeds: jax.Array, lr: jax.Array,
        steps: jax.Array, burn_in: jax.Array,
    ) -> Any:  # fmt: skip
        over = (0, 0, 0, 0, None, None, None)
        return jax.vmap(one, over)(values, rms, signals, seeds, lr, steps, burn_in)

    return rows


class TallyState(NamedTuple):
    """State of `tally`."""

    inner: Any
    """State of the wrapped optimiser."""
    total: Any
    """Sum of all updates so far, float32."""


def tally(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Wrap an optimiser to sum up its updates in float32.

    The sum is the intended displacement, that of parameters not rounded to a storage format.
    """

    def init(params: Any) -> TallyState:
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        return TallyState(inner.init(params), zeros)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, TallyState]:
        moves, inner_state = inner.update(updates, state.inner, params)
        total = jax.tree.map(lambda t, u: t + u.astype(t.dtype), state.total, moves)
        return moves, TallyState(inner_state, total)

    return optax.GradientTransformation(init, update)


def total_of(state: Any) -> Any:
    """Return the summed updates that the state of `tally` (or of a wrapper of `tally`) contains."""
    return (state if isinstance(state, TallyState) else state.inner).total


def moments_of(state: Any) -> Any:
    """Return the optimiser's state inside the state of `tally`, or of a wrapper of `tally`."""
    return (state if isinstance(state, TallyState) else state.inner).inner


def with_moments(state: Any, moments: Any) -> Any:
    """Return the state of `tally`, or of a wrapper around it, with the optimiser's state replaced.

    Summed updates, Kahan carries and float32 masters are kept.
    """
    if isinstance(state, TallyState):
        return state._replace(inner=moments)
    return state._replace(inner=state.inner._replace(inner=moments))


def _rows(count: int, shape: tuple[int, ...]) -> int:
    """Return the number of rows to compile for `count` leaves: a power of two, at most `ROWS`.

    Surplus rows stay empty. Each number of rows needs its own compiled program, which costs more
    than empty rows, so the minimum is `ROWS` for short vectors and 4 for others. It is 1 for
    matrices, whose empty rows cost more.
    """
    least = 1 if len(shape) > 1 else ROWS if shape == (_SHORT,) else 4
    return min(ROWS, max(least, 1 << (count - 1).bit_length()))


def _padded(count: int, size: int) -> int:
    """Return the padded length of a sample: `_SHORT` or `size`, so that few programs compile."""
    return min(size, _SHORT) if count <= _SHORT else max(size, count)


_SHORT = 128
"""Row length of small leaves, mostly norms; padded to `SAMPLE` they would cost 16 times as much."""


def _scaled(optimiser: Optimiser, whole: tuple[int, ...], part: tuple[int, ...]) -> Optimiser:
    """Return the optimiser, its rate changed so that a step on `part` is as long as on `whole`.

    `whole` is the shape of a leaf, `part` that of its sample. The length of a step of an optimiser
    such as Muon depends on the shape of the matrix.
    """
    ratio = optimiser.step(whole, False).size / optimiser.step(part, False).size
    return optimiser.with_lr(optimiser.lr * ratio)
