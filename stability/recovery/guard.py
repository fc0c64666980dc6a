"""Guard around any optax optimiser: skips non-finite and spiking steps, clips, requests rollbacks.

The guard is an optax transformation whose state is a pytree of arrays, so it can be jitted,
checkpointed and resumed like the optimiser it wraps. Bad steps have these consequences:

1. Skip: if the loss or the gradient norm is not finite, or the loss spikes, neither the parameters
   nor the optimiser's state change.
2. Clip: if the gradient norm spikes, gradients are scaled down to the limit. They are always
   clipped to `max_norm`.
3. Roll back: after `patience` consecutive skips `wants_rollback` is true, and
   `stability.recovery.rollback` restores a checkpoint and skips data.
4. Cut: if rollbacks do not help, `stability.recovery.rollback` cuts the learning rate.

A spike is a value above median + 6 * 1.4826 * MAD of the latest accepted values (the window); MAD
is the median absolute deviation. Rejected values do not enter the window. Source: docs/training.md
"Keep training".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int32

NORMAL_MAD = 1.4826
"""Standard deviation of a normal distribution divided by its median absolute deviation."""


class Verdict(IntEnum):
    """Decision of the guard on a step; stored as int32."""

    ACCEPTED = 0
    CLIPPED = 1
    """The gradient norm spiked. A step that is only clipped to `max_norm` is ACCEPTED."""
    SKIPPED_LOSS = 2
    """The loss is NaN or infinite."""
    SKIPPED_GRADIENT = 3
    """The loss is finite, but the gradient norm is not."""
    SKIPPED_SPIKE = 4
    """The loss spiked."""


@dataclass(frozen=True)
class GuardConfig:
    """Settings of the guard: threshold of a spike, clipping norm, and patience before a rollback.

    Raises:
        ValueError: a number is out of range; the message names it.
    """

    window: int = 64
    """Number of latest accepted values from which the threshold is computed."""
    warmup: int = 16
    """Number of accepted values below which nothing counts as a spike."""
    deviations: float = 6.0
    """Threshold above the median, in standard deviations estimated from the MAD."""
    spread: float = 1e-2
    """Lower bound of the standard deviation, relative to the median. Without it, any rounding error
    would be a spike if the loss is constant and its MAD therefore 0."""
    max_norm: float | None = 1.0
    """Global norm to which every gradient is clipped; None clips spikes only."""
    patience: int = 3
    """Consecutive skips after which a rollback is requested."""

    def __post_init__(self) -> None:
        rules = {
            "window": (self.window >= 2, "at least 2"),
            "warmup": (2 <= self.warmup <= self.window, "between 2 and window"),
            "deviations": (self.deviations > 0, "positive"),
            "spread": (self.spread >= 0, "at least 0"),
            "max_norm": (self.max_norm is None or self.max_norm > 0, "positive or None"),
            "patience": (self.patience >= 1, "at least 1"),
        }
        for name, (holds, rule) in rules.items():
            if not holds:
                raise ValueError(f"GuardConfig: {name}={getattr(self, name)!r} must be {rule}.")


class Window(NamedTuple):
    """The latest accepted values of the loss or of the gradient norm, as a ring buffer."""

    values: Float[Array, " W"]
    """Latest values, float32; entry i % W holds the i-th accepted value."""
    seen: Int32[Array, ""]
    """Number of values accepted so far."""


class StepReport(NamedTuple):
    """The guard's decision on the last step and the numbers behind it, all scalars."""

    verdict: Int32[Array, ""]
    """A `Verdict`."""
    loss: Float[Array, ""]
    loss_limit: Float[Array, ""]
    """Threshold of a loss spike; infinite during warmup."""
    norm: Float[Array, ""]
    """Global gradient norm before clipping, float32."""
    norm_limit: Float[Array, ""]
    """Threshold of a norm spike; infinite during warmup."""
    auxiliary: dict[str, Float[Array, ""]]
    """Further losses by name, for the log only; they do not affect the verdict."""


class GuardState(NamedTuple):
    """State of the guard: a pytree of arrays, as `save_checkpoint(opt_state=...)` needs."""

    inner: Any
    """State of the wrapped optimiser."""
    losses: Window
    """Latest losses of accepted and clipped steps."""
    norms: Window
    """Latest gradient norms of accepted steps."""
    skips: Int32[Array, ""]
    """Number of consecutive skipped steps up to now."""
    total_skips: Int32[Array, ""]
    """Number of all skipped steps; a rollback restores that of the checkpoint."""
    rate: Float[Array, ""]
    """Factor on every update; 1 until `rollback` cuts the learning rate."""
    report: StepReport
    """Decision on the last step."""


def guard(
    inner: optax.GradientTransformation,
    config: GuardConfig | None = None,
    *,
    auxiliary: tuple[str, ...] = (),
) -> optax.GradientTransformationExtraArgs:
    """Wrap an optimiser with a guard.

    Call `update(gradients, state, params, value=loss, auxiliary={...})`, with the loss of the step.
    Do not clip inside `inner`, since the guard clips. If JAX's dtype promotion is set to strict,
    call `update` inside `jax.numpy_dtype_promotion("standard")`, as for optax itself.

    Args:
        inner: any optax transformation whose updates are added to the parameters.
        config: settings; None: the defaults.
        auxiliary: names of further losses to log, such as a router's; they do not affect decisions.

    Raises:
        ValueError: in `update`, if it gets no `value`, or other auxiliary names than declared.
    """
    config = config or GuardConfig()
    wrapped = optax.with_extra_args_support(inner)

    def init(params: Any) -> GuardState:
        return _fresh(wrapped.init(params), config, auxiliary)

    def update(
        updates: Any, state: Any, params: Any = None, **extra: Any
    ) -> tuple[Any, GuardState]:
        report = _report(config, updates, state, extra, auxiliary)
        keep = report.verdict <= Verdict.CLIPPED
        clipped = _clipped(updates, report, config.max_norm)
        moves, moved = wrapped.update(clipped, state.inner, params, **extra)
        moves = jax.tree.map(lambda u: _chosen(keep, u * state.rate.astype(u.dtype), 0), moves)
        return moves, GuardState(
            inner=jax.tree.map(lambda new, old: _chosen(keep, new, old), moved, state.inner),
            losses=_pushed(state.losses, report.loss, keep),
            # A spiking norm must not raise its own threshold, so only normal ones enter.
            norms=_pushed(state.norms, report.norm, report.verdict == Verdict.ACCEPTED),
            skips=jnp.where(keep, 0, state.skips + 1),
            total_skips=state.total_skips + (~keep).astype(jnp.int32),
            rate=state.rate,
            report=report,
        )

    return optax.GradientTransformationExtraArgs(init, update)


def wants_rollback(state: GuardState, config: GuardConfig) -> bool:
    """Whether the last `patience` steps were all skipped; waits for the device."""
    return int(state.skips) >= config.patience


def limit(window: Window, config: GuardConfig) -> Float[Array, ""]:
    """Return the threshold of a spike, median + deviations * 1.4826 * MAD of the window, float32.

    The standard deviation 1.4826 * MAD is at least `spread` times the median. The threshold is
    infinite until `warmup` values were accepted.
    """
    W = window.values.shape[0]
    filled = jnp.arange(W) < window.seen
    middle = _median(window.values, filled)
    mad = _median(jnp.abs(window.values - middle), filled)
    deviation = jnp.maximum(NORMAL_MAD * mad, config.spread * jnp.abs(middle))
    spike = middle + config.deviations * deviation
    return jnp.where(window.seen >= config.warmup, spike, jnp.inf)


def global_norm(tree: Any) -> Float[Array, ""]:
    """Return the L2 norm over all leaves of a tree, float32; leaves are squared in float32."""
    leaves = (leaf.astype(jnp.float32) for leaf in jax.tree.leaves(tree))
    return jnp.sqrt(sum((jnp.sum(jnp.square(x)) for x in leaves), jnp.zeros((), jnp.float32)))


def _fresh(inner: Any, config: GuardConfig, auxiliary: tuple[str, ...]) -> GuardState:
    # Each leaf has its own buffer, because donating a buffer twice is an error.
    def number() -> Array:
        return jnp.zeros((), jnp.float32)

    def count() -> Array:
        return jnp.zeros((), jnp.int32)

    def window() -> Window:
        return Window(jnp.zeros(config.window, jnp.float32), count())

    logged = {name: number() for name in auxiliary}
    report = StepReport(count(), number(), number(), number(), number(), logged)
    rate = jnp.ones((), jnp.float32)
    return GuardState(inner, window(), window(), count(), count(), rate, report)


def _report(
    config: GuardConfig,
    updates: Any,
    state: GuardState,
    extra: Mapping[str, Any],
    names: tuple[str, ...],
) -> StepReport:
    extra_losses = dict(extra.get("auxiliary") or {})
    if extra.get("value") is None:
        raise ValueError("guard: update needs value=, the loss of this step; pass value=loss.")
    if set(extra_losses) != set(names):
        raise ValueError(
            f"guard: auxiliary losses {sorted(extra_losses)} were passed, expected "
            f"{sorted(names)}; name them in guard(..., auxiliary=(...))."
        )
    loss = jnp.asarray(extra["value"]).astype(jnp.float32)
    norm = global_norm(updates)
    loss_limit, norm_limit = limit(state.losses, config), limit(state.norms, config)
    verdict = jnp.select(
        [~jnp.isfinite(loss), ~jnp.isfinite(norm), loss > loss_limit, norm > norm_limit],
        [
            jnp.asarray(v, jnp.int32)
            for v in (
                Verdict.SKIPPED_LOSS,
                Verdict.SKIPPED_GRADIENT,
                Verdict.SKIPPED_SPIKE,
                Verdict.CLIPPED,
            )
        ],
        jnp.asarray(Verdict.ACCEPTED, jnp.int32),
    )
    logged = {n: jnp.asarray(extra_losses[n]).astype(jnp.float32) for n in names}
    return StepReport(verdict, loss, loss_limit, norm, norm_limit, logged)


def _clipped(updates: Any, report: StepReport, max_norm: float | None) -> Any:
    limit = report.norm_limit
    limit = limit if max_norm is None else jnp.minimum(limit, max_norm)
    scale = jnp.where(report.norm > limit, limit / report.norm, 1.0)
    return jax.tree.map(lambda g: g * scale.astype(g.dtype), updates)


def _chosen(keep: Bool[Array, ""], new: Any, old: Any) -> Any:
    """Return `new` if `keep`, else `old`; a product with 0 would keep NaN."""
    return jnp.where(keep, new, old) if hasattr(new, "dtype") else new


def _pushed(window: Window, value: Array, keep: Array) -> Window:
    at = window.seen % window.values.shape[0]
    entered = window.values.at[at].set(value)
    values = jnp.where(keep, entered, window.values)
    return Window(values, window.seen + keep.astype(jnp.int32))


def _median(values: Float[Array, " W"], filled: Bool[Array, " W"]) -> Float[Array, ""]:
    """Return the median of the filled entries; for an even number, the mean of the middle two."""
    count = jnp.maximum(jnp.sum(filled, dtype=jnp.int32), 1)
    ordered = jnp.sort(jnp.where(filled, values, jnp.inf))
    return 0.5 * (ordered[(count - 1) // 2] + ordered[count // 2])
