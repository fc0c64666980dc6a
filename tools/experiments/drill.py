"""Training drill: short runs of the byte-level model that differ in storage and computation.

Every run (variant) starts from the same weights and sees the same batches of the text that
`tools.experiments.train` reads. Differences in loss are therefore effects of the storage or
computation. Source: docs/stability.md "Training drill".
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from threading import Lock
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from megalodon_jax.checks import traced_checks
from megalodon_jax.config import GemmBackend, MegalodonConfig
from megalodon_jax.model import MegalodonForCausalLM
from megalodon_jax.optimiser import optimiser_update
from megalodon_jax.policy import Policy
from megalodon_jax.weights import SENSITIVE, Role, named_leaves, replace_leaves, role_of
from stability.core.byte_text import read_text, spread_windows, windows
from stability.core.number_formats import BF16
from stability.core.rounding import check_rounding
from stability.storage.ema_pole_findings import QUANTILES
from stability.storage.ema_poles import Poles, find_poles
from stability.storage.narrow_optimisers import apply_updates
from stability.storage.simulate import WRAPPERS, Survival, summary, tally, total_of
from tools.experiments.norm_rates import adamw, nbytes
from tools.experiments.train import BYTE_LM_CONFIG

NARROW = jnp.bfloat16
_COMPILING: dict[MegalodonConfig, Lock] = {}


@dataclass(frozen=True)
class Plan:
    """Length and data of the training; equal plans give equal runs.

    Raises:
        ValueError: a number is out of range; the message names it.
    """

    steps: int = 120
    batch_size: int = 8
    length: int = 128
    lr: float = 3e-4
    every: int = 4
    """Steps between two points of the curves."""
    seed: int = 0
    """Seed of the weights and the batches."""
    held_out: int = 32
    """Number of held-out windows over which the final loss is averaged."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "every", "held_out"):
            if getattr(self, name) < 1:
                raise ValueError(f"drill: {name}={getattr(self, name)} must be at least 1.")
        if self.length < 2 or not self.lr > 0:
            raise ValueError(
                f"drill: length={self.length} must be at least 2 and lr={self.lr} positive."
            )


@dataclass(frozen=True)
class Variant:
    """One combination of storage, optimiser and computation."""

    name: str
    what: str
    """Description for the reader."""
    kind: str = "remedy"
    """One of "control" (float32), "amp" (float32 parameters, bfloat16 products), "blanket" (all in
    bfloat16), "remedy" (blanket with one change), and "gemm" for the runs of `gemm_drill`."""
    compute: str = "bfloat16"
    """Compute dtype of the model."""
    narrow: bool = True
    """Whether parameters, and activations between operations, are stored in bfloat16."""
    wide: frozenset[Role] = frozenset()
    """Roles of the parameters that stay in float32 although `narrow` is set."""
    wrapper: str = "plain"
    """Key of `simulate.WRAPPERS`: how the optimiser's update is rounded."""
    norm_lr: float = 1.0
    """Factor on the learning rate of norm weights that start at 1."""
    centred: bool = False
    """Whether norm weights that start at 1 are stored minus 1."""
    gemm: GemmBackend | Policy = "default"
    """GEMM backend of the blocks, or a policy by matrix (`gemm_drill`)."""


VARIANTS = (
    Variant("float32", "parameters and products in float32", "control", "float32", narrow=False),
    Variant(
        "bfloat16 compute", "float32 parameters, products in bfloat16 (AMP)", "amp", narrow=False
    ),
    Variant("blanket bfloat16", "parameters, moments and activations in bfloat16", "blanket"),
    Variant("stochastic rounding", "blanket, updates rounded at random", wrapper="stochastic"),
    Variant("Kahan", "blanket, what rounding lost is carried on in bfloat16", wrapper="kahan"),
    Variant("float32 master", "blanket, the optimiser keeps float32 parameters", wrapper="master"),
    Variant("norm lr x 10", "blanket, norm weights step ten times as far", norm_lr=10.0),
    Variant("zero-centred", "blanket, weights that start at 1 are stored less 1", centred=True),
    Variant("sensitive in float32", "blanket, norms, EMA and gains in float32", wide=SENSITIVE),
)


@dataclass(frozen=True)
class DrillResult:
    """Results of one variant."""

    variant: Variant
    loss: list[tuple[int, float]]
    """(step, training loss in nats per byte); a step has the same batch in every variant."""
    held_out: float
    """Final loss on held-out text, in nats per byte."""
    norms: Survival
    """Survival (frozen fraction, fidelity) of the norm weights that start at 1. Here and below an
    element counts as frozen if it never changed although its start and its exact end round to
    different stored numbers."""
    norm_drift: list[tuple[int, float]]
    """(step, mean distance of these norm weights from their start)."""
    poles: Survival
    """Survival of the EMA's alpha, delta and theta."""
    pole_drift: list[tuple[int, float]]
    """(step, mean of |ln(memory / memory at the start)| over the EMA's poles)."""
    whole: Survival
    """Survival of all parameters."""
    memory: tuple[list[float], list[float]]
    """Memory of the EMA's poles in steps, at `ema_pole_findings.QUANTILES`: start and end."""
    bytes: float
    """Bytes per parameter: weights and optimiser state, as allocated."""


def run(
    plan: Plan = Plan(),
    variants: Sequence[Variant] = VARIANTS,
    config: MegalodonConfig = BYTE_LM_CONFIG,
    report: Callable[[str], None] = lambda line: None,
) -> list[DrillResult]:
    """Train every variant and return the results in the order of `variants`.

    Args:
        plan: steps, batches and learning rate.
        variants: variants to train. Up to four train at a time, which does not affect results.
        config: the model; its compute and accumulation dtypes and GEMM backend are replaced by
            those of each variant.
        report: called with a line of progress text as each variant finishes.

    Raises:
        ValueError: there are no variants.
        RuntimeError: the compiler removed the rounding.
    """
    if not variants:
        raise ValueError(f"drill: no variants; there are {', '.join(v.name for v in VARIANTS)}.")
    check_rounding(BF16)

    def one(variant: Variant) -> DrillResult:
        # The setting holds for this thread. Checks of token ids are not needed: every byte is one.
        with traced_checks(False):
            outcome = train(variant, plan, config)
        report(f"  {variant.name}: held-out loss {outcome.held_out:.3f} nats per byte")
        return outcome

    # Several at a time: a single small training leaves cores idle, above all while it compiles.
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        return list(pool.map(one, variants))


def train(variant: Variant, plan: Plan, config: MegalodonConfig = BYTE_LM_CONFIG) -> DrillResult:
    """Train one variant, with weights and batches from the plan's seed.

    Args:
        variant: the variant.
        plan: steps, batches and learning rate.
        config: as for `run`.
    """
    text, held_out = read_text()
    model, ones = _start(variant, plan, config)
    transform, update = _updated(variant.wrapper, plan.lr, variant.norm_lr, ones)
    centre = jnp.asarray(variant.centred, jnp.float32)
    # Only one thread compiles a shared program; the others wait for it.
    compiling = _COMPILING.setdefault(model.config, Lock())
    first, poles = _values(model), _all_poles(model)
    state: Any = transform.init(eqx.filter(model, eqx.is_array))
    changed = {n: jnp.zeros(x.shape, bool) for n, x in named_leaves(model).items()}
    losses, norm_drift, pole_drift = [], [(0, 0.0)], [(0, 0.0)]
    rng = np.random.default_rng(plan.seed)
    for index in range(1, plan.steps + 1):
        starts = rng.integers(0, len(text) - plan.length, plan.batch_size)
        ids = windows(text, starts, plan.length)
        with compiling if index == 1 else nullcontext():
            loss, grads = _graded(model, ids, ones, centre)
        model, state, changed = update(grads, model, state, changed)
        if index % plan.every == 0 or index in (1, plan.steps):
            losses.append((index, float(loss)))
            norm_drift.append((index, _distance(first, _values(model, ones), ones)))
            pole_drift.append((index, _memory_change(poles, _all_poles(model))))
    total = total_of(state)
    last, intended = _values(model), _values(total)
    count = sum(x.size for x in first.values())
    used = nbytes(model) + nbytes(state) - nbytes(total)
    final = _all_poles(model)
    ids = spread_windows(held_out, plan.held_out, plan.length)
    with compiling:
        held_out_loss = float(_held_out_loss(model, ids, ones, centre))
    narrow = {n for n, x in named_leaves(model).items() if x.dtype == NARROW}
    of = partial(_survival, first, last, intended, changed, narrow)
    return DrillResult(
        variant=variant,
        loss=losses,
        held_out=held_out_loss,
        norms=of(ones),
        norm_drift=norm_drift,
        poles=of([n for n in first if n.endswith((".alpha", ".delta", ".theta"))]),
        pole_drift=pole_drift,
        whole=of(first),
        memory=(_quantiles(poles), _quantiles(final)),
        bytes=used / count,
    )


def _start(
    variant: Variant, plan: Plan, config: MegalodonConfig
) -> tuple[MegalodonForCausalLM, frozenset[str]]:
    """Return the model as stored, and the names of the norm weights that start at 1."""
    accum = "bfloat16" if variant.narrow else "float32"
    config = replace(
        config, compute_dtype=variant.compute, accum_dtype=accum, gemm_backend=variant.gemm
    )
    model = MegalodonForCausalLM(config, key=jax.random.key(plan.seed))
    leaves = named_leaves(model)
    norms = [n for n in leaves if role_of(n) is Role.NORM]
    ones = frozenset(n for n in norms if bool(jnp.all(leaves[n] == 1.0)))
    if variant.centred:
        leaves |= {n: leaves[n] - 1.0 for n in ones}
    narrow = {n for n in leaves if variant.narrow and role_of(n) not in variant.wide}
    stored = {n: x.astype(NARROW) if n in narrow else x for n, x in leaves.items()}
    return replace_leaves(model, stored), ones


@cache
def _updated(wrapper: str, lr: float, norm_lr: float, ones: frozenset[str]) -> Any:
    """Return the optimiser, and its compiled update.

    The update maps (gradients, model, state, changed) to (model, state, changed), where `changed`
    says by parameter which elements ever changed.
    """
    transform = WRAPPERS[wrapper](tally(adamw(lr, norm_lr, ones.__contains__)))

    # Gradients are not donated: no output could reuse them, and Equinox suppresses JAX's warning
    # about that with process-wide filters, which other threads would restore.
    @eqx.filter_jit(donate="all-except-first")
    def update(grads: Any, model: Any, state: Any, changed: Any) -> Any:
        params = eqx.filter(model, eqx.is_array)
        updates, state = optimiser_update(transform, grads, state, params)
        before = named_leaves(params)
        after = named_leaves(apply_updates(params, updates))
        changed = {n: changed[n] | (after[n] != before[n]) for n in before}
        return replace_leaves(model, after), state, changed

    return transform, update


def _loss(
    model: MegalodonForCausalLM, ids: jax.Array, ones: frozenset[str], centre: jax.Array
) -> jax.Array:
    """Return the loss of a model whose norm weights are stored minus `centre`, 0 or 1."""
    leaves = named_leaves(model)
    moved = {n: leaves[n] + centre.astype(leaves[n].dtype) for n in ones}
    return replace_leaves(model, moved).compute_loss(ids, ids)


# Separate from the update, and with the centre as an argument: variants that differ only in their
# update share this program, which takes longest to compile.
_graded = eqx.filter_jit(eqx.filter_value_and_grad(_loss))


_held_out_loss = eqx.filter_jit(_loss)


def _values(tree: Any, names: Any = None) -> dict[str, np.ndarray]:
    """Return float64 copies of the named leaves; the leaves themselves are donated to the step."""
    leaves = named_leaves(tree)
    return {n: np.array(leaves[n], np.float64) for n in names or leaves}


def _survival(
    first: Mapping[str, Any],
    last: Mapping[str, Any],
    intended: Mapping[str, Any],
    changed: Mapping[str, Any],
    narrow: set[str],
    names: Any,
) -> Survival:
    def flat(values: Mapping[str, Any]) -> np.ndarray:
        return np.concatenate([np.asarray(values[n]).reshape(-1) for n in sorted(names)])

    def target(name: str) -> np.ndarray:
        exact = first[name] + intended[name]
        return BF16.round(exact.astype(np.float32)) if name in narrow else exact

    # In a short run the exact sum of updates may not reach the next stored number. Such an element
    # is rightly unchanged, and does not count.
    due = flat({n: target(n) != first[n] for n in names})
    frozen = float(np.mean(~flat(changed)[due])) if due.any() else 0.0
    whole = summary(*(flat(values) for values in (first, last, intended, changed)))
    return replace(whole, frozen=frozen)


def _distance(first: Mapping[str, Any], now: Mapping[str, Any], names: Any) -> float:
    return float(np.mean([np.mean(np.abs(now[n] - first[n])) for n in sorted(names)]))


def _all_poles(model: Any) -> dict[str, Poles]:
    return find_poles(eqx.filter(model, eqx.is_array))


def _memory_change(before: Mapping[str, Poles], now: Mapping[str, Poles]) -> float:
    changes = [np.abs(np.log(now[n].decay / before[n].decay)) for n in before]
    return float(np.mean(changes))


def _quantiles(poles: Mapping[str, Poles]) -> list[float]:
    memory = np.concatenate([p.memory().reshape(-1) for p in poles.values()])
    return [float(v) for v in np.quantile(memory, QUANTILES, method="lower")]
