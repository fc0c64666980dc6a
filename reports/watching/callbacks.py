"""Watches that find parameters which stop changing: for torch, transformers' Trainer and optax.

A watch raises only when it is created, before the training; later errors are reported.
Source: docs/training.md "Watch a run while it trains".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from reports.store.manifest import Device
from reports.watching.session import Session, to_stderr
from stability.storage.watch_jax_loop import JaxLooks
from stability.storage.watch_looks import EVERY
from stability.storage.watch_torch_loop import TorchLooks


class TrainingWatch:
    """Handle of a watch, which samples parameters while they train.

    As a context manager it closes the watch on exit. In a distributed training the handles of
    processes of rank > 0 measure nothing.

    Attributes:
        warned: text of the warning; "" if none was given so far.
        stopped: why the watch switched itself off or could not store its run; "" if neither.
    """

    def __init__(self, session: Session | None) -> None:
        self._session = session

    @property
    def warned(self) -> str:
        """Return the text of the warning; "" if none was given so far."""
        return self._session.warned if self._session else ""

    @property
    def stopped(self) -> str:
        """Return why the watch switched itself off or could not store its run; "" if neither."""
        return self._session.stopped if self._session else ""

    @property
    def page(self) -> Path | None:
        """Return the path of the run's page; None before the first look (measurement).

        Always None at rank > 0.
        """
        return self._session.page if self._session else None

    def close(self) -> None:
        """End the watch: remove its hook from the optimiser and store the run as finished."""
        if self._session:
            self._session.close()

    def __enter__(self) -> TrainingWatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def watch_optimizer(
    optimizer: Any,
    named_parameters: Iterable[tuple[str, Any]],
    *,
    out: str | Path = "runs",
    every: int = EVERY,
    report: Callable[[str], None] = to_stderr,
) -> TrainingWatch:
    """Watch a torch training for parameters that stop changing; the training loop needs no change.

    If `round_stochastically` or `compensate` is used on the optimiser, create the watch after it,
    so that the watch sees the values that are stored. In a distributed training only the process of
    rank 0 watches.

    Args:
        optimizer: A `torch.optim.Optimizer`.
        named_parameters: `model.named_parameters()`.
        out: Folder of runs on this machine; the watch stores its run there.
        every: Optimiser steps from look (measurement) to look; the first is at step `every`.
        report: Receives the text of the warning, and of an error that ends the watch.

    Raises:
        ValueError: there is nothing to watch, or an argument is invalid.
        StoreError: the folder cannot be written.
    """
    return _watch_optimizer(optimizer, named_parameters, "torch", out, every, report)


def _watch_optimizer(
    optimizer: Any,
    named_parameters: Iterable[tuple[str, Any]],
    framework: str,
    out: str | Path,
    every: int,
    report: Callable[[str], None],
) -> TrainingWatch:
    if not _first_process():
        return TrainingWatch(None)
    session = Session(out, every, framework, report)
    looks = TorchLooks(optimizer, named_parameters, session.take, session.due, session.guard)
    session.on_close = looks.remove
    session.begin(looks, _device(looks.device))
    return TrainingWatch(session)


def _device(device: Any) -> Device:
    import torch

    if device.type == "cpu":
        return Device("cpu")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return Device(device.type, name)


def _first_process() -> bool:
    import torch

    group = torch.distributed
    return not (group.is_available() and group.is_initialized() and group.get_rank())


class UpdatesWatch(TrainingWatch):
    """A watch of an optax loop: call `sample` inside the step and `record` after it."""

    def __init__(self, session: Session, looks: JaxLooks) -> None:
        super().__init__(session)
        self._own, self._looks = session, looks
        self._record = session.guard(looks.record)

    @property
    def due(self) -> bool:
        """Whether the next step is a look (measured); other steps need no `sample`."""
        return self._own.on and self._own.due(self._looks.step + 1)

    def sample(self, before: Any, updates: Any, after: Any) -> Any:
        """Return the values that a look (measurement) needs, as one small array for `record`.

        Works inside jit.

        Args:
            before: Parameters before the step.
            updates: Updates returned by the optimiser.
            after: Parameters after the step.
        """
        import jax.numpy as jnp

        try:
            return self._looks.sample(before, updates, after)
        except Exception as error:
            # Raised while the step is traced, an error here would end the training.
            self._own.fail(error)
            return jnp.zeros((3, 0))

    def record(self, sample: Any = None) -> None:
        """Count a step, and evaluate its sample if the step was measured (a look).

        Args:
            sample: Result of `sample` in this step; None for a step without it.
        """
        self._record(sample)


def watch_updates(
    params: Any,
    *,
    out: str | Path = "runs",
    every: int = EVERY,
    report: Callable[[str], None] = to_stderr,
) -> UpdatesWatch:
    """Watch an optax loop for parameters that stop changing.

    Call the watch's `sample` in each step, jitted or not, and `record` after it. Sampling adds some
    percent to a step. If the step takes `due` as a static argument and samples only if `due` is
    true, the step is compiled twice, and steps without a look cost nothing.

    Args:
        params: The parameters, or the model that holds them.
        out: Folder of runs on this machine; the watch stores its run there.
        every: Steps from look (measurement) to look; the first is at step `every`.
        report: Receives the text of the warning, and of an error that ends the watch.

    Raises:
        ValueError: there is nothing to watch, or an argument is invalid.
        StoreError: the folder cannot be written.
    """
    import jax

    session = Session(out, every, "optax", report)
    looks = JaxLooks(params, session.take, session.due)
    device = jax.devices()[0]
    gpu = device.platform != "cpu"
    session.begin(looks, Device("cuda", device.device_kind) if gpu else Device("cpu"))
    return UpdatesWatch(session, looks)


def trainer_callback(
    *,
    out: str | Path = "runs",
    every: int = EVERY,
    report: Callable[[str], None] = to_stderr,
) -> Any:
    """Return a transformers `TrainerCallback` that watches a training as `watch_optimizer` does.

    If a watch is impossible, for example with an optimiser of DeepSpeed, the reason is reported and
    the training goes on.

    Args:
        out: Folder of runs on this machine; the watch stores its run there.
        every: Optimiser steps from look (measurement) to look; the first is at step `every`.
        report: Receives the text of the warning, and of an error that ends or prevents the watch.

    Raises:
        ImportError: transformers is not installed.
        ValueError: an argument is invalid.
        StoreError: the folder cannot be written.
    """
    from transformers import TrainerCallback

    # Check the arguments now, before the training.
    Session(out, every, "transformers", report)

    class WatchCallback(TrainerCallback):
        """Trainer callback that watches a training from its beginning to its end."""

        watch: TrainingWatch | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """End the watch of an earlier training, if any, and watch this one's optimiser."""
            self.on_train_end(args, state, control)
            try:
                parameters = kwargs["model"].named_parameters()
                optimizer = _innermost(kwargs["optimizer"])
                self.watch = _watch_optimizer(
                    optimizer, parameters, "transformers", out, every, report
                )
            except Exception as error:
                report(
                    f"megalodon-numerics: nothing is watched ({type(error).__name__}: {error}). "
                    "The training goes on."
                )

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """End the watch and store its run."""
            if self.watch is not None:
                self.watch.close()

    return WatchCallback()


def _innermost(optimizer: Any) -> Any:
    """Return the innermost optimiser: accelerate wraps it, and hooks on the wrapper never run."""
    while (inner := getattr(optimizer, "optimizer", None)) is not None:
        optimizer = inner
    return optimizer
