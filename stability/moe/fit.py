"""Training runs of MLA + MoE, each in a folder, and emergency runs that rescue unstable ones.

The folder holds `options.json`, a checkpoint every `save_every` updates, and `training.json` with
the losses. The training text is that of `stability.core.byte_text`. Source: docs/mla-moe.md
"Training".
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from megalodon_jax.files import read_json_object, written_aside
from megalodon_jax.optimiser import optimiser_update
from parity.deepseek_v3.model import MLAMoEForCausalLM
from stability.core.byte_text import read_text, spread_windows, windows
from stability.core.dtype_rules import Policy
from stability.moe.options import OPTIONS, Options, optimiser, read_options, write_options
from stability.moe.policy import emulated
from stability.recovery.guard import GuardConfig, GuardState, Verdict, guard
from stability.recovery.rollback import (
    CheckpointFolder,
    Event,
    RecoveryConfig,
    RecoveryFailedError,
    guarded_run,
)

TRAINING = "training.json"
ROUTER = ("router_z",)
"""Names of the auxiliary losses that the guard logs."""
LOST = 20
"""Number of consecutive micro-batches with a non-finite loss or gradient after which a run without
a guard ends."""
HELD_OUT = 32
"""Number of rows of held-out text for the evaluation of a run."""
Say = Callable[[str], None]


@dataclass
class Trained:
    """A training run: its options and results.

    Attributes:
        options: options of the training.
        model: the final parameters.
        losses: (index, loss in nats per byte, the router's z-loss) of every computed micro-batch,
            in order, including micro-batches that the guard skipped or a rollback undid, and those
            before a restart. The index counts entries: batches that a rollback passes over are not
            computed and have no entry.
        held_out: final loss on held-out text without dropout, in nats per byte; NaN before the end.
        events: decisions of the guard in this process; those before a restart are not included.
    """

    options: Options
    model: MLAMoEForCausalLM
    losses: list[tuple[int, float, float]] = field(default_factory=list)
    held_out: float = math.nan
    events: list[Event] = field(default_factory=list)

    def text(self) -> str:
        """Return a summary of the run in one or two lines."""
        kinds = [e.kind for e in self.events]
        counts = (f"{kinds.count(k)} {k}s" for k in ("skip", "rollback", "cut"))
        first, last = self.losses[0][1], self.losses[-1][1]
        return (
            f"{len(self.losses)} micro-batches, training loss {first:.3f} to {last:.3f}, held-out "
            f"loss {self.held_out:.3f} nats per byte; {', '.join(counts)}"
        )


def fit(
    options: Options,
    folder: Path,
    say: Say = lambda line: None,
    start: MLAMoEForCausalLM | None = None,
) -> Trained:
    """Train for `options.steps` updates, or finish the run in the folder; return it as `Trained`.

    Args:
        options: options of the run.
        folder: folder for options, checkpoints and losses.
        say: called with a line of progress text.
        start: initial parameters; None draws them from the seed. A continued run ignores `start`.

    Raises:
        ValueError: the folder holds a run with other options.
        RecoveryFailedError: without a guard, the loss or the gradient was not finite `LOST` times
            in a row; with a guard, rollbacks and rate cuts did not help, or no checkpoint was
            readable for a rollback.
    """
    if (folder / OPTIONS).is_file() and read_options(folder) != options:
        raise ValueError(
            f"{folder} holds a run of other options; continue it with the options in its "
            "options.json, or name another folder."
        )
    write_options(folder, options)
    model, transform, state, store = _fresh(options, folder, start)
    trained = Trained(options, model, _stored_losses(folder))
    compiled = make_step(options, transform)
    text = read_text()[0]
    key = jax.random.key(options.seed)

    def data(number: int) -> tuple[jax.Array, jax.Array]:
        number += options.first_batch
        rng = np.random.default_rng((options.seed, number))
        starts = rng.integers(0, len(text) - options.block_size, options.batch_size)
        return windows(text, starts, options.block_size), jax.random.fold_in(key, number)

    lost = 0

    def step(model: Any, state: GuardState, batch: Any) -> tuple[Any, GuardState]:
        nonlocal lost
        model, state = compiled(model, state, batch)
        report = jax.device_get(state.report)
        loss, z = float(report.loss), float(report.auxiliary[ROUTER[0]])
        trained.losses.append((len(trained.losses), loss, z))
        # Without a guard only non-finite steps are skipped, and nothing is rolled back.
        lost = 0 if int(report.verdict) <= Verdict.CLIPPED else lost + 1
        if lost == LOST and not options.guarded:
            write_losses(folder, trained)
            raise RecoveryFailedError(
                f"{folder}: loss or gradient was not finite {LOST} times in a row; "
                f"`megalodon-numerics subject emergency {folder}` resumes from its best checkpoint."
            )
        return model, state

    def log(event: Event) -> None:
        if event.kind == "save":
            write_losses(folder, trained)
        else:
            say(f"  {event.describe()}")

    each = options.accumulation
    run = guarded_run(
        step,
        model,
        state,
        data,
        steps=options.steps * each,
        folder=folder,
        guard_config=_guard_config(options),
        config=RecoveryConfig(save_every=options.save_every * each, keep=options.keep),
        log=log,
        store=store,
    )
    if run.step not in store.steps():
        store.save(run.step, run.batch, run.model, run.state, options.keep)
    trained.model, trained.events = run.model, run.events
    trained.held_out = held_out_loss(run.model, options)
    write_losses(folder, trained)
    return trained


def emergency(
    folder: Path, out: Path | None = None, steps: int | None = None, say: Say = lambda line: None
) -> Trained:
    """Resume an unstable run with `Options.emergency`, from the checkpoint that `last_good` finds.

    The optimiser's moments start from 0, since the stored moments come from unstable gradients. The
    schedule restarts too, from a learning rate of 0. The folder of the original run is not changed,
    except that by default the folder of the new run is created in it. Return the new run.

    Args:
        folder: folder of the unstable run.
        out: folder of the new run; None: `emergency` in `folder`. If it holds a run already, that
            run is continued with its own options.
        steps: number of updates of a new run; None: those that remained after the checkpoint.
        say: called with a line of progress text.

    Raises:
        ValueError: there is no run or no usable checkpoint, or fewer than two updates are left.
        RecoveryFailedError: rollbacks and rate cuts did not help.
    """
    options, out = read_options(folder), folder / "emergency" if out is None else out
    if (out / OPTIONS).is_file():
        say(f"continuing {out}")
        return fit(read_options(out), out, say)
    step, batch, model = last_good(folder, options, say)
    left = options.steps - step // options.accumulation if steps is None else steps
    if left < 2:
        raise ValueError(
            f"{folder}: {left} updates are left after step {step}, expected at least 2; pass "
            "--steps with a larger number."
        )
    first = options.first_batch + max(batch, len(_stored_losses(folder)))
    calm = options.emergency(left, first)
    say(f"from step {step} of {folder}, {left} updates at rates up to {calm.learning_rate:g}")
    # The clipping of activations is a static field of the model, so the leaves are put into a model
    # built from the new options.
    frame = eqx.filter_eval_shape(MLAMoEForCausalLM, calm.config(), key=jax.random.key(0))
    leaves = jax.tree.leaves(eqx.filter(model, eqx.is_array))
    return fit(calm, out, say, jax.tree.unflatten(jax.tree.structure(frame), leaves))


def last_good(
    folder: Path, options: Options, say: Say = lambda line: None
) -> tuple[int, int, MLAMoEForCausalLM]:
    """Return (step, next batch, model) of the checkpoint with the lowest held-out loss.

    In a stable run this is the newest checkpoint, up to noise; in an unstable run an older one.
    Checkpoints that are unreadable or hold non-finite parameters are skipped. The step is the
    number of micro-batches so far that were neither skipped nor undone, not of updates.

    Raises:
        ValueError: all checkpoints are skipped, or there are none.
    """
    _, _, state, store = _fresh(options, folder, None)
    best: tuple[float, int, int, Any] | None = None
    for step in store.steps():
        try:
            model, _, batch = store.load(step, state)
        except (ValueError, OSError) as error:
            say(f"  {store.path(step).name}: {str(error).partition(chr(10))[0]}")
            continue
        finite = all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(model))
        loss = held_out_loss(model, options) if finite else math.nan
        say(f"  {store.path(step).name}: held-out loss {loss:.3f}")
        if math.isfinite(loss) and (best is None or loss < best[0]):
            best = loss, step, batch, model
    if best is None:
        raise ValueError(
            f"{folder}: no checkpoint can be read and is finite; start the run again in a new "
            "folder."
        )
    return best[1:]


def make_step(options: Options, transform: Any) -> Callable[..., Any]:
    """Return the compiled step of a micro-batch: (model, state, (ids, key)) -> (model, state)."""
    stored = _storage(options.policy)

    @eqx.filter_jit
    def step(model: MLAMoEForCausalLM, state: Any, batch: Any) -> Any:
        ids, key = batch

        def total(model: MLAMoEForCausalLM) -> tuple[jax.Array, Any]:
            loss, router = stored(model).losses(ids, key=key if options.dropout else None)
            return loss + options.router_z_loss_coef * router[ROUTER[0]], (loss, router)

        gradients, (loss, router) = eqx.filter_grad(total, has_aux=True)(model)
        params = eqx.filter(model, eqx.is_array)
        losses = {"value": loss, "auxiliary": router}
        moves, state = optimiser_update(transform, gradients, state, params, **losses)
        return eqx.apply_updates(model, moves), state

    return step


def held_out_loss(model: MLAMoEForCausalLM, options: Options) -> float:
    """Return the held-out loss in nats per byte, with storage as in training and no dropout."""
    ids = spread_windows(read_text()[1], HELD_OUT, options.block_size)
    return float(_evaluate(model, ids, options.policy))


@eqx.filter_jit
def _evaluate(model: MLAMoEForCausalLM, ids: jax.Array, policy: Policy | None) -> jax.Array:
    return _storage(policy)(model).losses(ids)[0]


def _storage(policy: Policy | None) -> Callable[[MLAMoEForCausalLM], MLAMoEForCausalLM]:
    return lambda model: model if policy is None else emulated(model, policy)


def _guard_config(options: Options) -> GuardConfig:
    # The guard does not clip, since `options.optimiser` clips the mean gradient of an update.
    if options.guarded:
        return GuardConfig(max_norm=None)
    return GuardConfig(deviations=1e9, patience=10**6, max_norm=None)


def _fresh(
    options: Options, folder: Path, start: MLAMoEForCausalLM | None
) -> tuple[MLAMoEForCausalLM, Any, GuardState, CheckpointFolder]:
    model = start
    if model is None:
        draw = eqx.filter_jit(MLAMoEForCausalLM)
        model = draw(options.config(), key=jax.random.key(options.seed))
    transform = guard(optimiser(options), _guard_config(options), auxiliary=ROUTER)
    state: Any = transform.init(eqx.filter(model, eqx.is_array))
    return model, transform, state, folder_of(folder, model)


def _stored_losses(folder: Path) -> list[tuple[int, float, float]]:
    file = folder / TRAINING
    if not file.is_file():
        return []
    rows = read_json_object(file)["losses"]

    def number(value: float | None) -> float:
        return math.nan if value is None else value

    return [(n, number(loss), number(norm)) for n, loss, norm in rows]


def write_losses(folder: Path, trained: Trained) -> None:
    """Write options, losses and held-out loss to `training.json`, non-finite numbers as null."""

    def plain(x: float) -> float | None:
        return x if math.isfinite(x) else None

    content = {
        "options": asdict(trained.options),
        "unit": "nats per byte",
        "held_out": plain(trained.held_out),
        "losses": [(n, plain(loss), plain(z)) for n, loss, z in trained.losses],
    }
    with written_aside(folder / TRAINING) as aside:
        aside.write_text(json.dumps(content) + "\n", encoding="utf-8")


def folder_of(folder: Path, model: MLAMoEForCausalLM) -> CheckpointFolder:
    """Return the `CheckpointFolder` at `folder`, for models with the structure of `model`.

    Leaves are stored in pytree order, by Equinox.
    """

    def save(path: Path, model: Any, *, step: int, opt_state: Any) -> None:
        path.mkdir(parents=True, exist_ok=True)
        # Equinox gets an open file, because it would append its suffix to the temporary path.
        with written_aside(path / "leaves.eqx") as aside, aside.open("wb") as file:
            eqx.tree_serialise_leaves(file, (model, opt_state))

    def load(path: Path, *, opt_state_like: Any) -> SimpleNamespace:
        like = eqx.filter_eval_shape(lambda m: m, model), opt_state_like
        try:
            model_on_disk, state = eqx.tree_deserialise_leaves(path / "leaves.eqx", like)
        except RuntimeError as error:  # Equinox raises it for a leaf that it cannot read
            raise ValueError(f"{path / 'leaves.eqx'} cannot be read: {error}") from error
        return SimpleNamespace(model=model_on_disk, opt_state=state)

    return CheckpointFolder(folder, save, load)
