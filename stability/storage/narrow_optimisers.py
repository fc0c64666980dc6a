"""Optimisers for parameters stored in few bits: stochastic rounding, Kahan, float32 masters.

Each function wraps an optax transformation. The inner transformation gets parameters and gradients
in float32, so its moments are float32. The wrapper then changes the update so that parameter +
update is exactly representable in the parameter's dtype. Updates of float32 leaves are not changed,
so a tree may mix dtypes.

    optimiser = stochastic_adamw(3e-4, seed=0)
    state = optimiser.init(params)
    updates, state = optimiser.update(gradients, state, params)
    params = apply_updates(params, updates)

Updates are float32. Apply them with `apply_updates` of this module or of optax, which add in
float32 and cast back: that is exact. `eqx.apply_updates` would turn the parameters into float32.
States are pytrees of arrays and can be checkpointed. Source: docs/stability.md "Optimisers for
narrow parameters".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from megalodon_jax.optimiser import optimiser_update
from megalodon_jax.weights import dotted
from stability.core.number_formats import Format, format_of
from stability.core.parameter_leaves import seed_of
from stability.core.rounding import nearest, stochastic

Transform = optax.GradientTransformation


class NearestState(NamedTuple):
    """State of `nearest_storage`."""

    inner: Any
    """State of the wrapped optimiser."""


class StochasticState(NamedTuple):
    """State of `stochastic_rounding`; a run restored from it continues bit for bit."""

    inner: Any
    """State of the wrapped optimiser."""
    step: jax.Array
    """Number of updates so far, int32 ()."""
    seed: jax.Array
    """Seed of the random keys, uint32 ()."""


class KahanState(NamedTuple):
    """State of `kahan`."""

    inner: Any
    """State of the wrapped optimiser."""
    compensation: dict[str, jax.Array]
    """Displacement that rounding has lost so far and that is added to the next update, in the
    leaf's shape, by path of each leaf that is narrower than float32."""


class MasterState(NamedTuple):
    """State of `float32_master`."""

    inner: Any
    """State of the wrapped optimiser."""
    master: Any
    """The parameters in float32, as a tree like that of the parameters."""


def nearest_storage(inner: Transform) -> Transform:
    """Wrap an optimiser so that parameter + update is rounded to nearest; small updates are lost.

    It is the control for the other wrappers, and loses the same updates as a cast does.
    Unlike a cast inside jit, this rounding cannot be elided by the compiler.
    """

    def init(params: Any) -> NearestState:
        return NearestState(inner.init(_wide(params)))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, NearestState]:
        moves, inner_state = _inner_update(inner, updates, state.inner, params)
        rounded = _by_leaf(lambda path, p, u, fmt: _move(nearest(p + u, fmt), p), params, moves)
        return rounded, NearestState(inner_state)

    return optax.GradientTransformation(init, update)


def stochastic_rounding(inner: Transform, seed: int = 0) -> Transform:
    """Wrap an optimiser so that parameter + update is rounded at random, with an exact mean.

    No memory per parameter is needed beyond the state of `inner`.

    Args:
        inner: the optimiser to wrap.
        seed: seed of the roundings. With a leaf's path and the step number it determines each
            rounding, on any machine.
    """

    def init(params: Any) -> StochasticState:
        return StochasticState(inner.init(_wide(params)), jnp.int32(0), jnp.uint32(seed))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, StochasticState]:
        moves, inner_state = _inner_update(inner, updates, state.inner, params)

        def move(path: str, p: jax.Array, u: jax.Array, fmt: Format) -> jax.Array:
            return _move(stochastic(p + u, fmt, leaf_key(state.seed, path, state.step)), p)

        rounded = _by_leaf(move, params, moves)
        return rounded, StochasticState(inner_state, state.step + jnp.int32(1), state.seed)

    return optax.GradientTransformation(init, update)


def kahan(inner: Transform, compensation_dtype: DTypeLike = jnp.bfloat16) -> Transform:
    """Wrap an optimiser so that the part of an update lost to rounding is added to the next update.

    This is Kahan summation.

    Args:
        inner: the optimiser to wrap.
        compensation_dtype: dtype of the part carried to the next step. float32 is exact; a 16-bit
            dtype takes half the memory and rounds the carried part.

    Raises:
        ValueError: the compensation's dtype is not a floating-point type.
    """
    dtype = np.dtype(compensation_dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"kahan: compensation_dtype={dtype.name} must be a floating-point type, such as "
            "bfloat16 or float32."
        )

    def keep(x: jax.Array) -> jax.Array:
        narrow = format_of(dtype)
        return x if narrow is None else nearest(x, narrow)

    def init(params: Any) -> KahanState:
        zeros = {n: jnp.zeros(p.shape, dtype) for n, p in _named(params).items() if _narrow(p)}
        return KahanState(inner.init(_wide(params)), zeros)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, KahanState]:
        moves, inner_state = _inner_update(inner, updates, state.inner, params)
        carried: dict[str, jax.Array] = {}

        def move(path: str, p: jax.Array, u: jax.Array, fmt: Format) -> jax.Array:
            whole = keep(u + state.compensation[path].astype(jnp.float32))
            moved = _move(nearest(p + whole, fmt), p)
            lost = whole - moved
            # An infinite carry would make the next step NaN.
            lost = jnp.where(jnp.isfinite(lost), lost, 0.0)
            carried[path] = keep(lost).astype(dtype)
            return moved

        return _by_leaf(move, params, moves), KahanState(inner_state, carried)

    return optax.GradientTransformation(init, update)


def float32_master(inner: Transform) -> Transform:
    """Wrap an optimiser so that its state keeps the parameters in float32.

    After each step the model's parameters are those of the state, rounded to their own dtypes.
    """

    def init(params: Any) -> MasterState:
        return MasterState(inner.init(_wide(params)), _wide(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, MasterState]:
        moves, inner_state = _inner_update(inner, updates, state.inner, state.master)
        master = jax.tree.map(lambda m, u: m + u, state.master, moves)

        def move(path: str, p: jax.Array, m: jax.Array, fmt: Format) -> jax.Array:
            return _move(nearest(m, fmt), p)

        _insist(params)
        shown = _by_leaf(move, params, master, wide=lambda p, m: _move(m, p))
        return shown, MasterState(inner_state, master)

    return optax.GradientTransformation(init, update)


def stochastic_adamw(
    learning_rate: optax.ScalarOrSchedule, *, seed: int = 0, **options: Any
) -> Transform:
    """Return AdamW with stochastic rounding; `options` are those of `optax.adamw`."""
    return stochastic_rounding(optax.adamw(learning_rate, **options), seed)


def kahan_adamw(
    learning_rate: optax.ScalarOrSchedule,
    *,
    compensation_dtype: DTypeLike = jnp.bfloat16,
    **options: Any,
) -> Transform:
    """Return AdamW with Kahan compensation; `options` are those of `optax.adamw`."""
    return kahan(optax.adamw(learning_rate, **options), compensation_dtype)


def apply_updates(params: Any, updates: Any) -> Any:
    """Return params + updates, added in float32 and cast back to each leaf's dtype."""

    def add(p: Any, u: jax.Array) -> jax.Array:
        p = jnp.asarray(p)
        return (_widened(p) + u.astype(_widened(p).dtype)).astype(p.dtype)

    return jax.tree.map(add, params, updates)


def leaf_key(seed: Any, path: str, step: Any) -> jax.Array:
    """Return the random key for rounding a leaf at a step; `seed` and `step` may be traced."""
    key = jax.random.fold_in(jax.random.key(seed), seed_of(path))
    return jax.random.fold_in(key, step)


def _inner_update(inner: Transform, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
    _insist(params)
    return optimiser_update(inner, _wide(grads), state, _wide(params))


def _move(target: jax.Array, p: jax.Array) -> jax.Array:
    """Return the update that takes p to target; 0 if they are equal, also where both are inf."""
    return jnp.where(target == p, 0.0, target - p)


def _insist(params: Any) -> None:
    if params is None:
        raise ValueError(
            "update needs the parameters, since it rounds to their dtypes: call "
            "update(gradients, state, params)."
        )


def _by_leaf(
    move: Callable[[str, jax.Array, jax.Array, Format], jax.Array],
    params: Any,
    moves: Any,
    wide: Callable[[jax.Array, jax.Array], jax.Array] = lambda p, u: u,
) -> Any:
    """Return a tree like `params`, computed leaf by leaf.

    `moves` is a tree like `params` with an update or a new value u for each parameter p. The result
    is `move(path, p in float32, u, format)` for a p in a narrow format, and `wide(p, u)` otherwise.
    """

    def one(path: tuple[Any, ...], p: jax.Array, u: jax.Array) -> jax.Array:
        fmt = format_of(p.dtype)
        if fmt is None:
            return wide(p, u)
        return move(dotted(path), _widened(p), u, fmt)

    return jax.tree_util.tree_map_with_path(one, params, moves)


def _narrow(leaf: Any) -> bool:
    return format_of(leaf.dtype) is not None


def _widened(leaf: Any) -> jax.Array:
    leaf = jnp.asarray(leaf)
    return leaf.astype(jnp.float32) if _narrow(leaf) else leaf


def _wide(tree: Any) -> Any:
    return jax.tree.map(_widened, tree)


def _named(tree: Any) -> dict[str, Any]:
    return {dotted(path): x for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]}
