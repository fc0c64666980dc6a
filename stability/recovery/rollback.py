"""What the guard asks for and a compiled step cannot do: roll back, skip data, cut the rate, log.

`guarded_run` drives a training step whose optimiser is wrapped by `stability.recovery.guard.guard`.
After `patience` skips in a row it goes back to the newest checkpoint that can be read and goes on
with data that was not seen yet; if trouble returns within `horizon` steps it goes back further and
cuts the learning rate. Every decision is an `Event`. Source: docs/training.md "Keep training".
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
from stability.recovery.guard import GuardConfig, GuardState, Report, Verdict, wants_rollback

Step = Callable[[Any, GuardState, Any], tuple[Any, GuardState]]
_PREFIX = "step-"


class RecoveryFailedError(RuntimeError):
    """Training does not recover: no readable checkpoint, or the learning rate was cut in vain."""


@dataclass(frozen=True, slots=True)
class Event:
    """One decision, as the log says it."""

    step: int
    """Optimiser steps kept when it was taken."""
    batch: int
    """Number of the batch it is about; batches are never seen twice."""
    kind: str
    """`skip`, `clip`, `auxiliary`, `save`, `corrupt`, `rollback`, `cut`, `resume` or `stop`."""
    message: str

    def describe(self) -> str:
        """Return the event as one line."""
        return f"step {self.step}, batch {self.batch}: {self.kind}: {self.message}"


@dataclass(frozen=True)
class RecoveryConfig:
    """How a run saves, and how it recovers.

    Raises:
        ValueError: a number is outside its range; the message names it.
    """

    save_every: int = 100
    """Steps between checkpoints; none is written while steps are being skipped."""
    keep: int = 3
    """Checkpoints kept, newest first."""
    skip_batches: int = 8
    """Batches skipped at a rollback besides those already seen: bad text comes in stretches."""
    horizon: int = 200
    """Trouble within so many steps after a rollback is the same trouble: the rate is cut."""
    factor: float = 0.5
    """What a cut multiplies the learning rate by."""
    max_cuts: int = 4
    """Cuts after which the run stops."""

    def __post_init__(self) -> None:
        for name in ("save_every", "keep", "horizon", "max_cuts"):
            if getattr(self, name) < 1:
                raise ValueError(f"RecoveryConfig: {name}={getattr(self, name)} must be positive.")
        if self.skip_batches < 0:
            raise ValueError(f"RecoveryConfig: skip_batches={self.skip_batches} must not be < 0.")
        if not 0.0 < self.factor < 1.0:
            raise ValueError(f"RecoveryConfig: factor={self.factor} must be between 0 and 1.")


@dataclass(frozen=True)
class CheckpointFolder:
    """Checkpoints of a run: one folder per step, the batch number among the optimiser's leaves.

    `save` and `load` are those of `megalodon_jax.checkpoint`, or others of the same form.
    """

    folder: Path
    save_one: Callable[..., None] = save_checkpoint
    load_one: Callable[..., Any] = load_checkpoint

    def steps(self) -> list[int]:
        """Return the steps there are folders of, newest first."""
        folders = self.folder.glob(f"{_PREFIX}*") if self.folder.is_dir() else ()
        numbers = (path.name.removeprefix(_PREFIX) for path in folders)
        return sorted((int(number) for number in numbers if number.isdigit()), reverse=True)

    def path(self, step: int) -> Path:
        """Return the folder of a step."""
        return self.folder / f"{_PREFIX}{step:08d}"

    def save(self, step: int, batch: int, model: Any, state: GuardState, keep: int) -> None:
        """Write a checkpoint, then delete all but the newest `keep`."""
        states = {"guard": state, "batch": jnp.asarray(batch, jnp.int32)}
        self.save_one(self.path(step), model, step=step, opt_state=states)
        for old in self.steps()[keep:]:
            shutil.rmtree(self.path(old), ignore_errors=True)

    def load(self, step: int, state: GuardState) -> tuple[Any, GuardState, int]:
        """Read model, guard state and batch number; `state` gives the structure.

        Raises:
            ValueError, OSError: it cannot be read, or is of another structure.
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
    """A training run as it stands; `events` is its log."""

    model: Any
    state: GuardState
    step: int = 0
    batch: int = 0
    events: list[Event] = field(default_factory=list)
    cuts: int = 0
    rate: float = 1.0
    restored: int | None = None
    """Step of the checkpoint the last rollback went to."""
    clear: int = 0
    """Step up to which trouble counts as that of the last rollback."""


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
    """Train until `steps` optimiser steps were kept, recovering on the way.

    It resumes from the newest readable checkpoint in `folder`. The loop reads one small report per
    step, so it waits for the device at each.

    Args:
        step: compiled training step, `(model, state, batch) -> (model, state)`; it may donate both.
        model: the model to start from.
        state: `guard(...).init(...)`.
        data: gives the batch of a number, counted from 0; numbers are skipped, never repeated.
        steps: steps to keep.
        folder: where checkpoints go.
        guard_config: what `guard` was given.
        config: how to save and recover; None means the defaults.
        log: called with each event as it happens.
        store: where and how checkpoints are kept; None means native ones in `folder`.

    Raises:
        RecoveryFailedError: no checkpoint can be read, or the last cut did not help.
        ValueError: `state` is not the guard's.
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

    def note(self, report: Report) -> None:
        """Log what the guard did with a step, and auxiliary losses that are not finite."""
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
        """Go on from the newest readable checkpoint; the first run writes one to return to."""
        run = self.run
        newest = self._newest(self.store.steps())
        if newest is None:
            self.save()
            return
        at, (run.model, run.state, run.batch) = newest
        run.step, run.rate = at, float(run.state.rate)
        self.say("resume", f"from {self.store.path(at).name}")

    def roll_back(self) -> None:
        """Return to a checkpoint; further back and with a lower rate if the last return failed."""
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
                f"{self.store.folder}: no checkpoint can be read, and training cannot go on: "
                f"{run.events[-2].describe()}. Start again from another model."
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
                f"{run.cuts} times to {run.rate:g} of itself. Look for the cause with "
                "stability.nonfinite.replay.locate on the batch the log names."
            )
        run.cuts += 1
        run.rate *= config.factor
        self.say("cut", f"the learning rate to {run.rate:g} of itself")

    def _newest(self, steps: list[int]) -> tuple[int, tuple[Any, GuardState, int]] | None:
        """Return the newest checkpoint that can be read, and log those that cannot."""
        for step in steps:
            try:
                return step, self.store.load(step, self.run.state)
            except (ValueError, OSError) as error:
                first = str(error).partition("\n")[0] or type(error).__name__
                self.say("corrupt", f"{self.store.path(step).name}: {first}")
        return None
