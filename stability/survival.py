"""Update survival: which parameters freeze when weights are stored in bfloat16.

An update u of a stored number p is lost when p + u rounds back to p: when |u| is below half the gap
to the neighbour it moves toward, or exactly half and p's significand is even. AdamW moves every
element by about its learning rate, so weights near 1 freeze below lr = 2^-9. Source:
spec/stability.md "Update survival", the frozen-norm bug.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from megalodon_jax.model import MegalodonForCausalLM
from megalodon_jax.weights import Role, named_leaves, replace_leaves, role_of
from stability.findings import Finding, Severity
from stability.formats import BF16, Format

FROZEN_SHARE = 0.5
"""A leaf with more frozen elements than moving ones no longer trains as a whole."""
SOURCE = "spec/stability.md, update survival"
REMEDY = (
    "store parameters in float32 and compute in bfloat16 (param_dtype=float32, "
    "compute_dtype=bfloat16); a larger learning rate for this group, a zero-centred "
    "parametrisation or stochastic rounding also help"
)


def half_gap(p: np.ndarray, u: np.ndarray, fmt: Format = BF16) -> np.ndarray:
    """Half the distance from p to its neighbour in the direction of u; float64.

    Toward zero from an exact power of two the neighbour is only half as far.
    """
    p, u = np.asarray(p, np.float64), np.asarray(u, np.float64)
    mantissa, exponent = np.frexp(np.abs(p))
    power_of_two = (mantissa == 0.5) & (exponent - 1 > fmt.min_exponent)
    inward = power_of_two & (np.sign(u) == -np.sign(p))
    return fmt.spacing(p) / np.where(inward, 4.0, 2.0)


def is_lost(p: np.ndarray, u: np.ndarray, fmt: Format = BF16) -> np.ndarray:
    """Whether adding u to the stored numbers p changes nothing (round to nearest, ties to even)."""
    u = np.asarray(u, np.float64)
    gap = half_gap(p, u, fmt)
    even = np.rint(np.abs(np.asarray(p, np.float64)) / fmt.spacing(p)) % 2 == 0
    return (np.abs(u) < gap) | ((np.abs(u) == gap) & even)


@dataclass(frozen=True)
class AdamW:
    """The optimiser whose updates are probed; only linear weights decay."""

    lr: float
    beta2: float = 0.999
    weight_decay: float = 0.0

    def transform(self) -> optax.GradientTransformation:
        """Return the optax transformation."""

        def decays(params: Any) -> Any:
            flags = {n: role_of(n) is Role.LINEAR for n in named_leaves(params)}
            return replace_leaves(params, flags)

        return optax.adamw(self.lr, b2=self.beta2, weight_decay=self.weight_decay, mask=decays)


@dataclass(frozen=True, slots=True)
class Survival:
    """What storage did to the updates of one leaf over a run."""

    frozen: float
    """Share of the elements that never changed although the optimiser moved them."""
    fidelity: float
    """Displacement applied over displacement intended, along the intended direction."""


def predict(leaf: np.ndarray, lr: float, fmt: Format = BF16) -> float:
    """Share of the elements an AdamW step of size lr (r = 1) leaves where they are."""
    p = fmt.round(leaf)
    return float(np.mean([is_lost(p, np.full(p.shape, u), fmt) for u in (lr, -lr)]))


def measure(
    model: MegalodonForCausalLM,
    batches: np.ndarray,
    optimiser: AdamW,
    fmt: Format | None = BF16,
) -> dict[str, Survival]:
    """Train for as many steps as there are batches, storing every leaf in `fmt` after each.

    Args:
        model: float32 model to start from; it is not changed.
        batches: token ids (steps, B, L).
        optimiser: its moments are kept in float32, so only the storage differs.
        fmt: storage format; None stores float32, the control.

    Returns:
        Survival by parameter name.
    """
    step, transform = _make_step(optimiser)
    store = (lambda x: x) if fmt is None else (lambda x: jnp.asarray(fmt.round(np.asarray(x))))
    start = model = jax.tree.map(lambda x: store(x) if eqx.is_array(x) else x, model)
    state = transform.init(eqx.filter(model, eqx.is_array))
    intended = {n: np.zeros(x.shape) for n, x in named_leaves(model).items()}
    changed = {n: np.zeros(x.shape, bool) for n, x in named_leaves(model).items()}
    for ids in batches:
        updates, state = step(model, state, jnp.asarray(ids, jnp.int32))
        before, moves = named_leaves(model), named_leaves(updates)
        after = {n: store(before[n] + moves[n]) for n in before}
        for n in before:
            intended[n] += np.asarray(moves[n], np.float64)
            changed[n] |= np.asarray(after[n] != before[n])
        model = replace_leaves(model, after)
    first, last = named_leaves(start), named_leaves(model)
    return {n: _summary(first[n], last[n], intended[n], changed[n]) for n in first}


def probe(model: MegalodonForCausalLM, batches: np.ndarray, optimiser: AdamW) -> list[Finding]:
    """Return findings for every leaf: frozen share in bfloat16, its prediction, fidelity."""
    narrow = measure(model, batches, optimiser, BF16)
    control = measure(model, batches, optimiser, None)
    leaves = named_leaves(model)
    return [f for name in leaves for f in _findings(name, leaves[name], narrow, control, optimiser)]


def _findings(
    name: str,
    leaf: Any,
    narrow: Mapping[str, Survival],
    control: Mapping[str, Survival],
    optimiser: AdamW,
) -> list[Finding]:
    frozen = narrow[name].frozen
    severity = Severity.WARNING if frozen > FROZEN_SHARE else Severity.OK
    if not 0.0 <= frozen <= 1.0:
        severity = Severity.ERROR
    message = (
        f"stored in bfloat16, {frozen:.0%} of its {leaf.size:,} elements never move at "
        f"lr {optimiser.lr:g}"
    )
    numbers = {
        "predicted_frozen_fraction": predict(np.asarray(leaf), optimiser.lr),
        "fidelity": narrow[name].fidelity,
        "fidelity_float32": control[name].fidelity,
    }
    warning = severity is not Severity.OK
    main = Finding(
        "survival",
        severity,
        name,
        "frozen_fraction",
        frozen,
        FROZEN_SHARE,
        SOURCE,
        message,
        REMEDY if warning else "",
    )
    details = (
        Finding("survival", Severity.NOTE, name, metric, value, float("nan"), SOURCE, "")
        for metric, value in numbers.items()
    )
    return [main, *details]


def _summary(first, last, intended: np.ndarray, changed: np.ndarray) -> Survival:
    applied = np.asarray(last, np.float64) - np.asarray(first, np.float64)
    moved = intended != 0
    total = float(np.abs(intended).sum())
    frozen = float(np.mean(~changed[moved])) if moved.any() else 0.0
    fidelity = float((applied * np.sign(intended)).sum() / total) if total else 1.0
    return Survival(frozen, fidelity)


@lru_cache(maxsize=8)
def _make_step(optimiser: AdamW):
    transform = optimiser.transform()

    @eqx.filter_jit
    def step(model, state, ids):
        grads = eqx.filter_grad(lambda m: m.compute_loss(ids, ids))(model)
        # optax raises floats to its integer step count, which strict promotion forbids.
        with jax.numpy_dtype_promotion("standard"):
            return transform.update(grads, state, eqx.filter(model, eqx.is_array))

    return step, transform
