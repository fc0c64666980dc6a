"""Recovery outside the compiled step: roll back, skip data, cut the learning rate, log.

`guarded_run` runs a training step whose optimiser is wrapped by `stability.recovery.guard.guard`.
After `GuardConfig.patience` consecutive skipped steps it restores the newest readable checkpoint
and continues with new data. If it has to roll back again within `horizon` steps, it restores an
older checkpoint and cuts the learning rate. Every decision is logged as an `Event`. Source:
docs/training.md "Keep training".
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from megalodon_jax.checkpoint import load_checkpoint, save_checkpoint
from stability.recovery.guard import GuardConfig, GuardState, StepReport, Verdict, wants_rollback

Step = Callable[[Any, GuardState, Any], tuple[Any, GuardState]]
_PREFIX = "step-"


class RecoveryFailedError(RuntimeError):
    """Training cannot continue: no checkpoint is readable, or learning-rate cuts did not help."""


@dataclass(frozen=True, slots=True)
class Event:
    """One decision of the recovery, as logged."""

    step: int
    """Number of training steps that were neither skipped nor undone by a rollback."""
    batch: int
    """Number of the current batch, from 0; batches are never repeated."""
    kind: str
    """`skip` or `clip` (of the step), `auxiliary` (an auxiliary loss is not finite), `save`,
    `corrupt` (a checkpoint is unreadable), `rollback`, `cut` (of the learning rate), `resume` or
    `stop`."""
    message: str

    def describe(self) -> str:
        """Return the event as one line."""
        return f"step {self.step}, batch {self.batch}: {self.kind}: {self.message}"


@dataclass(frozen=True)
class RecoveryConfig:
    """Settings of checkpoints and of recovery by rollback.

    Raises:
        ValueError: a number is out of range; the message names it.
    """

    save_every: int = 100
    """Steps between checkpoints; none is written right after a skipped step."""
    keep: int = 3
    """Number of checkpoints to keep; older ones are deleted."""
    skip_batches: int = 8
    """Number of batches to skip at a rollback, after those already seen: bad text is often
    contiguous."""
    horizon: int = 200
    """Number of steps, counted from the step that caused a rollback, within which another rollback
    counts as the same trouble: it restores an older checkpoint and cuts the learning rate."""
    factor: float = 0.5
    """Factor by which a cut multiplies the learning rate."""
    max_cuts: int = 4
    """Largest number of cuts; if another one were needed, the run stops."""

    def __post_init__(self) -> None:
        for name in ("save_every", "keep", "horizon", "max_cuts"):
            if getattr(self, name) < 1:
                raise ValueError(f"RecoveryConfig: {name}={getattr(self, name)} must be positive.")
        if self.skip_batches < 0:
            raise ValueError(f"RecoveryConfig: skip_batches={self.skip_batches} must be >= 0.")
        if not 0.0 < self.factor < 1.0:
            raise ValueError(f"RecoveryConfig: factor={self.factor} must be between 0 and 1.")


@dataclass(frozen=True)
class CheckpointFolder:
    """Checkpoints of a run: one folder per saved step, with the number of the next batch.

    `save_one` and `load_one` write and read one checkpoint. The defaults are those of
    `megalodon_jax.checkpoint`; replacements need the same signatures.
    """

    folder: Path
    save_one: Callable[..., None] = save_checkpoint
    load_one: Callable[..., Any] = load_checkpoint

    def steps(self) -> list[int]:
        """Return the step numbers of the saved checkpoints, newest first."""
        folders = self.folder.glob(f"{_PREFIX}*") if self.folder.is_dir() else ()
        numbers = (path.name.removeprefix(_PREFIX) for path in folders)
        return sorted((int(number) for number in numbers if number.isdigit()), reverse=True)

    def path(self, step: int) -> Path:
        """Return the folder of the checkpoint of a step."""
        return self.folder / f"{_PREFIX}{step:08d}"

    def save(self, step: int, batch: int, model: Any, state: GuardState, keep: int) -> None:
        """Write the checkpoint of a step, then delete all checkpoints but the newest `keep`."""
        states = {"guard": state, "batch": jnp.asarray(batch, jnp.int32)}
        self.save_one(self.path(step), model, step=step, opt_state=states)
        for old in self.steps()[keep:]:
            shutil.rmtree(self.path(old), ignore_errors=True)

    def load(self, step: int, state: GuardState) -> tuple[Any, GuardState, int]:
        """Return (model, guard state, number of the next batch) from the checkpoint of a step.

        Args:
            step: number of a saved step.
            state: a guard state of the same structure; its values are not used.

        Raises:
            ValueError, OSError: the checkpoint is unreadable or has another structure.
        """
        like = {"guard": state, "batch": jnp.zeros((), jnp.int32)}
        like = jax.eval_shape(lambda: like)
        stored = self.load_one(self.path(step), opt_state_like=like)
        return stored.model, stored.opt_state["guard"], int(stored.opt_state["batch"])

    def forget(self, step: int) -> None:
        """Delete the checkpoint of a step."""
        shutil.rmtree(self.path(step), ignore_errors=True)


@dataclass
class Run:
    """State of a training run."""

    model: Any
    state: GuardState
    step: int = 0
    """Number of training steps that were neither skipped nor undone by a rollback."""
    batch: int = 0
    """Number of the next batch."""
    events: list[Event] = field(default_factory=list)
    """Log, oldest event first."""
    cuts: int = 0
    """Number of cuts of the learning rate."""
    rate: float = 1.0
    """Factor on the learning rate after all cuts."""
    restored: int | None = None
    """Step of the checkpoint that the last rollback restored; None if there was no rollback."""
    clear: int = 0
    """Step up to which another rollback counts as the same trouble as the last one."""


def guarded_run(
    step: Step,
    model: Any,
    state: PyTree,
    data: Callable[[int], Any],
    *,
    steps: int,
    folder: Path,
    guard_config: GuardConfig,
    config: RecoveryConfig | None = None,
    log: Callable[[Event], None] | None = None,
    store: CheckpointFolder | None = None,
) -> Run:
    """Train until `steps` training steps are kept; recover from bad steps by rollback.

    A step is kept if it was neither skipped nor undone by a rollback.

    The run resumes from the newest readable checkpoint in `folder`; if there is none, it saves the
    initial model. The loop reads the guard's decision after each step, so it waits for the device
    each time.

    Args:
        step: compiled training step, `(model, state, batch) -> (model, state)`; it may donate the
            model and the state.
        model: the initial model.
        state: the initial state of the optimiser wrapped by a guard, `guard(...).init(...)`.
        data: function that maps the number of a batch (from 0) to the batch. The run may skip
            numbers, but asks for no number twice.
        steps: number of training steps to keep.
        folder: folder of the checkpoints.
        guard_config: the configuration passed to `guard`, for its patience.
        config: settings of saving and recovery; None: the defaults.
        log: called with each event.
        store: storage of the checkpoints, instead of `folder`; None: `CheckpointFolder(folder)`.

    Returns:
        The `Run`: final model and state, step, number of the next batch, and this call's events.

    Raises:
        RecoveryFailedError: no checkpoint is readable, or `max_cuts` cuts did not help.
        ValueError: `state` is not a `GuardState`.
    """
    if not isinstance(state, GuardState):
        raise ValueError(
            f"guarded_run: state is a {type(state).__name__}, expected a GuardState; wrap the "
            "whole optimiser: guard(optax.adamw(...)).init(...)."
        )
    config, store = config or RecoveryConfig(), store or CheckpointFolder(folder)
    run = Run(model, state)
    recovery = _Recovery(run, store, config, log)
    recovery.resume()
    while run.step < steps:
        run.model, run.state = step(run.model, run.state, data(run.batch))
        report = jax.device_get(run.state.report)
        recovery.note(report)
        run.batch += 1
        run.step += int(report.verdict) <= Verdict.CLIPPED
        if wants_rollback(run.state, guard_config):
            recovery.roll_back()
        elif int(report.verdict) <= Verdict.CLIPPED and run.step % config.save_every == 0:
            recovery.save()
    return run


@dataclass
class _Recovery:
    run: Run
    store: CheckpointFolder
    config: RecoveryConfig
    log: Callable[[Event], None] | None

    def say(self, kind: str, message: str) -> None:
        event = Event(self.run.step, self.run.batch, kind, message)
        self.run.events.append(event)
        if self.log is not None:
            self.log(event)

    def note(self, report: StepReport) -> None:
        """Log a step that the guard skipped or clipped, and non-finite auxiliary losses."""
        verdict = Verdict(int(report.verdict))
        loss, norm = float(report.loss), float(report.norm)
        match verdict:
            case Verdict.SKIPPED_LOSS:
                self.say("skip", f"the loss is {loss:g}")
            case Verdict.SKIPPED_GRADIENT:
                self.say("skip", f"the loss is {loss:.4g}, the gradient norm {norm:g}")
            case Verdict.SKIPPED_SPIKE:
                self.say("skip", f"the loss is {loss:.4g}, above {report.loss_limit:.4g}")
            case Verdict.CLIPPED:
                self.say("clip", f"the gradient norm is {norm:.4g}, above {report.norm_limit:.4g}")
        for name, value in report.auxiliary.items():
            if not math.isfinite(value):
                self.say("auxiliary", f"{name} is {float(value):g}")

    def save(self) -> None:
        run = self.run
        self.store.save(run.step, run.batch, run.model, run.state, self.config.keep)
        self.say("save", self.store.path(run.step).name)

    def resume(self) -> None:
        """Restore the newest readable checkpoint; if there is none, write the first one."""
        run = self.run
        newest = self._newest(self.store.steps())
        if newest is None:
            self.save()
            return
        at, (run.model, run.state, run.batch) = newest
        run.step, run.rate = at, float(run.state.rate)
        self.say("resume", f"from {self.store.path(at).name}")

    def roll_back(self) -> None:
        """Restore a checkpoint and skip data.

        If the run is at most `horizon` steps past the step that caused the last rollback, restore
        an older checkpoint and cut the learning rate.

        Raises:
            RecoveryFailedError: no checkpoint is readable, or a cut is due after `max_cuts` cuts.
        """
        run, config = self.run, self.config
        again = run.restored is not None and run.step <= run.clear
        steps = self.store.steps()
        if again:
            older = [step for step in steps if step < (run.restored or 0)]
            steps = older or steps
            self._cut()
        newest = self._newest(steps)
        if newest is None:
            self.say("stop", "no checkpoint can be read")
            raise RecoveryFailedError(
                f"{self.store.folder}: no checkpoint can be read, so training cannot continue. The "
                f"last event was: {run.events[-2].describe()}. Start again from a saved model."
            )
        at, (run.model, state, _) = newest
        for newer in (step for step in self.store.steps() if step > at):
            self.store.forget(newer)
        run.state = state._replace(rate=jnp.asarray(run.rate, jnp.float32))
        run.batch += config.skip_batches
        self.say("rollback", f"to {self.store.path(at).name}, on with batch {run.batch}")
        run.step, run.restored, run.clear = at, at, run.step + config.horizon

    def _cut(self) -> None:
        run, config = self.run, self.config
        if run.cuts == config.max_cuts:
            self.say("stop", f"cut {run.cuts} times in vain")
            raise RecoveryFailedError(
                f"training does not recover at step {run.step}: the learning rate was cut "
                f"{run.cuts} times, to {run.rate:g} of the original. Look for the cause with "
                "stability.nonfinite.replay.locate, on the batches of the log's skip events."
            )
        run.cuts += 1
        run.rate *= config.factor
        self.say("cut", f"the learning rate to {run.rate:g} of the original")

    def _newest(self, steps: list[int]) -> tuple[int, tuple[Any, GuardState, int]] | None:
        """Return (step, contents) of the first readable checkpoint of `steps`; log unreadable ones.

        None if no checkpoint is readable.
        """
        for step in steps:
            try:
                return step, self.store.load(step, self.run.state)
            except (ValueError, OSError) as error:
                first = str(error).partition("\n")[0] or type(error).__name__
                self.say("corrupt", f"{self.store.path(step).name}: {first}")
        return None
