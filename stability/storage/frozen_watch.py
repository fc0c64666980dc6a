"""Detects, during training, parameters that do not change although they have nonzero gradients.

For JAX, `start` and `advance` are pure functions, usable inside jit or outside. For torch,
`watch_torch` attaches a hook to the optimiser; it does not import torch. At most `FOLLOWED`
elements of each leaf are sampled, with a fixed seed, so the cost depends on the number of leaves
only. Every step is inspected here; `watch_looks` inspects one step in many and stores the results.
Source: docs/stability.md "Update survival".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from megalodon_jax.weights import named_leaves
from stability.core.findings import Finding, Severity, judge
from stability.core.parameter_leaves import seed_of
from stability.storage.survival import FROZEN_SHARE, REMEDY, SOURCE

FOLLOWED = 256
"""Largest number of elements sampled per leaf: a fraction measured on 256 elements has a standard
error of at most 3 %."""
PATIENCE = 100
"""Default number of steps with nonzero gradient after which an unchanged element counts as
frozen."""


class Watch(NamedTuple):
    """State of the watch between steps: three dictionaries of arrays (k,) by parameter name.

    k is the number of sampled elements of the parameter.
    """

    last: dict[str, Any]
    """Values of the sampled elements after the latest step, float32."""
    still: dict[str, Any]
    """Number of steps with a nonzero gradient since the element last changed, int32."""
    pushed: dict[str, Any]
    """Whether the element ever had a nonzero gradient, bool; only such elements are counted."""


def places(name: str, shape: tuple[int, ...], most: int = FOLLOWED) -> np.ndarray:
    """Return the flat indices (k,) of the elements of a leaf that the watch samples, ascending.

    A leaf of at most `most` elements is sampled whole. From a larger leaf, `most` elements are
    drawn at random, seeded by the leaf's name. Taking every n-th element instead would sample a
    single column of a matrix whose width divides n.
    """
    size = math.prod(shape)
    if size <= most:
        return np.arange(size)
    rng = np.random.default_rng(seed_of(name))
    return np.sort(rng.choice(size, most, replace=False, shuffle=False))


def pick(leaf: Any, chosen: np.ndarray) -> Any:
    """Return the elements of a JAX array at the flat indices `chosen` (k,); works inside jit.

    The result has shape (k,), and dtype float64 for a float64 array, else float32.
    """
    leaf = jnp.asarray(leaf)
    # Indexed by axis: flattening an array sharded over several devices would gather all of it.
    part = leaf[np.unravel_index(chosen, leaf.shape)] if leaf.ndim else leaf.reshape(1)
    if part.dtype in (jnp.float32, jnp.float64):
        return part
    # XLA may elide a conversion to bfloat16 and back, and read the float32 sum instead. An update
    # that the stored value lost would then look applied, so precision is reduced explicitly.
    bits = ml_dtypes.finfo(part.dtype)
    return lax.reduce_precision(part.astype(jnp.float32), bits.nexp, bits.nmant)


def start(params: Any) -> Watch:
    """Return the initial state of the watch for a pytree of parameters.

    Raises:
        ValueError: there are no floating-point parameters.
    """
    leaves = named_leaves(params).items()
    last = {n: _followed(n, x) for n, x in leaves if jnp.issubdtype(x.dtype, jnp.floating)}
    if not last:
        raise ValueError(
            f"nothing to watch in this {type(params).__name__}: expected a pytree with "
            "floating-point parameters."
        )
    still = {n: jnp.zeros(x.shape, jnp.int32) for n, x in last.items()}
    return Watch(last, still, {n: jnp.zeros(x.shape, bool) for n, x in last.items()})


def advance(watch: Watch, params: Any, gradients: Any) -> Watch:
    """Return the state of the watch after one more step of training; works inside jit.

    Args:
        watch: the state before the step.
        params: parameters after the step, the same tree as for `start`.
        gradients: gradients of the step, in the same tree. A missing leaf counts as gradient 0.
    """
    values, pushes = named_leaves(params), named_leaves(gradients)
    last, still, ever = {}, {}, {}
    for name, before in watch.last.items():
        last[name] = _followed(name, values[name])
        zeros = jnp.zeros(before.shape, bool)
        pushed = _followed(name, pushes[name]) != 0 if name in pushes else zeros
        count = watch.still[name] + pushed.astype(jnp.int32)
        still[name] = jnp.where(last[name] == before, count, 0)
        ever[name] = watch.pushed[name] | pushed
    return Watch(last, still, ever)


def frozen(watch: Watch, patience: int = PATIENCE) -> list[Finding]:
    """Return a warning for every parameter of which more than half is frozen; empty if none is.

    The fraction is taken over the sampled elements that ever had a nonzero gradient. Otherwise
    embedding rows of tokens that never occur would hide that all other rows are frozen.

    Args:
        watch: the state after any number of steps.
        patience: an element counts as frozen after this many steps with a nonzero gradient since it
            last changed.

    Raises:
        ValueError: patience is below 1.
    """
    if patience < 1:
        raise ValueError(f"frozen: patience={patience} must be at least 1 step.")
    pushed = {n: np.asarray(x) for n, x in watch.pushed.items()}
    counts = {n: np.asarray(x)[pushed[n]] for n, x in watch.still.items() if pushed[n].any()}
    findings = []
    for name, count in counts.items():
        share = float(np.mean(count >= patience))
        message = (
            f"{share:.0%} of the {count.size} elements followed have not changed for "
            f"{patience} steps although their gradients were not zero"
        )
        probe, metric = "frozen", "still_fraction"
        findings.append(judge(probe, name, metric, share, FROZEN_SHARE, SOURCE, message, REMEDY))
    return [f for f in findings if f.severity is not Severity.OK]


class TorchWatch:
    """A watch attached to a torch optimiser by `watch_torch`; `remove` detaches it."""

    def __init__(
        self, names: Iterable[tuple[str, Any]], patience: int, report: Callable[[Finding], None]
    ):
        self._parameters, self._patience, self._report = dict(names), patience, report
        values = {n: _of_tensor(n, p) for n, p in self._parameters.items()}
        still = {n: np.zeros(x.shape, np.int32) for n, x in values.items()}
        self._watch = Watch(values, still, {n: np.zeros(x.shape, bool) for n, x in values.items()})
        self._reported: set[str] = set()
        self._handle: Any = None

    def findings(self) -> list[Finding]:
        """Return a warning for every parameter of which more than half is frozen; see `frozen`."""
        return frozen(self._watch, self._patience)

    def remove(self) -> None:
        """Detach the hook from the optimiser."""
        self._handle.remove()

    def attach(self, optimizer: Any) -> None:
        """Attach the hook to an optimiser."""
        self._handle = optimizer.register_step_post_hook(self._after_step)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        for name, parameter in self._parameters.items():
            if parameter.grad is None:
                continue
            before, now = self._watch.last[name], _of_tensor(name, parameter)
            pushed = _of_tensor(name, parameter.grad) != 0
            count = self._watch.still[name] + pushed
            self._watch.pushed[name] |= pushed
            self._watch.still[name] = np.where(now == before, count, 0).astype(np.int32)
            self._watch.last[name] = now
        frozen_now = {f.subject: f for f in self.findings()}
        for name in frozen_now.keys() - self._reported:
            self._report(frozen_now[name])
        # A parameter that changes and then freezes again is reported again.
        self._reported = set(frozen_now)


def watch_torch(
    optimizer: Any,
    named_parameters: Iterable[tuple[str, Any]],
    *,
    patience: int = PATIENCE,
    report: Callable[[Finding], None] = lambda finding: print(
        f"{finding.subject}: {finding.message}"
    ),
) -> TorchWatch:
    """Watch a torch optimiser; report each parameter as soon as more than half of it is frozen.

    The fraction is that of `frozen`. Return the attached watch.

    Args:
        optimizer: a `torch.optim.Optimizer` (anything with `register_step_post_hook`).
        named_parameters: `model.named_parameters()`.
        patience: an element counts as frozen after this many steps with a nonzero gradient since it
            last changed; at least 1.
        report: called with the warning when a parameter freezes, again if it freezes again after a
            change; by default it is printed.

    Raises:
        ValueError: the optimiser has no `register_step_post_hook`, there are no parameters, or
            patience is below 1.
    """
    if patience < 1:
        raise ValueError(f"watch_torch: patience={patience} must be at least 1 step.")
    if not hasattr(optimizer, "register_step_post_hook"):
        raise ValueError(
            f"watch_torch: {type(optimizer).__name__} has no register_step_post_hook; pass the "
            "torch.optim.Optimizer itself, torch 2.0 or newer."
        )
    watch = TorchWatch(named_parameters, patience, report)
    if not watch._parameters:
        raise ValueError("watch_torch: no parameters; pass model.named_parameters().")
    watch.attach(optimizer)
    return watch


def _followed(name: str, leaf: Any) -> Any:
    return pick(leaf, places(name, leaf.shape)).astype(jnp.float32)


def _of_tensor(name: str, tensor: Any) -> np.ndarray:
    part = tensor.detach().reshape(-1)[places(name, tuple(tensor.shape))]
    return part.float().cpu().numpy().copy()
