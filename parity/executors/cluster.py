"""Runs items on a Ray cluster, which places them by their needs and retries when a worker dies.

Ray makes all scheduling decisions. This module declares the needs of items and converts Ray's
results and errors to `Answer`s. It requires the package `ray`. Source: docs/many-machines.md.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from megalodon_jax.extras import install
from parity.executors.identity import Identity, settings
from parity.executors.item import (
    ATTEMPTS,
    Answer,
    Item,
    ItemError,
    Needs,
    lost,
    no_device,
    not_run,
    perform,
)


class RayExecutor:
    """Executor that runs work items (`Item`) on a Ray cluster."""

    name = "ray"

    def __init__(self, address: str | None = None) -> None:
        """Connect to a Ray cluster.

        Args:
            address: `host:port` of the cluster; "auto": the cluster this machine belongs to; None:
                start a cluster on this machine.

        Raises:
            ItemError: Ray is not installed, or no cluster responds at the address.
        """
        # Ray would send usage statistics by default.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # On a cluster started here, a worker killed for lack of memory is retried as often as one
        # that died for another reason.
        os.environ.setdefault("RAY_task_oom_retries", str(ATTEMPTS - 1))
        try:
            import ray
        except ImportError as error:
            raise ItemError(
                "expected the package ray for --executor ray, and it is not installed: "
                f"{install('ray')}"
            ) from error
        self.ray: Any = ray
        _check_answers(address)
        handler = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(
                address=address,
                log_to_driver=False,
                logging_level=logging.ERROR,
                runtime_env={"env_vars": kernel_variables()},
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ItemError(_nobody(address, error)) from error
        if handler is not None and threading.current_thread() is threading.main_thread():
            # ray.init replaced the handler of SIGTERM by one that ends the process with the number
            # of the signal. An interrupted nightly run must exit with 3, so restore ours.
            signal.signal(signal.SIGTERM, handler)
        self.starts: Any = ray.remote(num_cpus=0)(Starts).remote()
        self._seen: tuple[float, dict[str, tuple[str, float]]] = 0.0, {}
        self._waiting: set[str] = set()
        """Names of submitted items that have no answer yet."""

    @property
    def workers(self) -> int:
        """Number of processors of the cluster, which is the number of items that may run at a time
        if each needs one processor."""
        return int(sum(node.get("CPU", 0) for node in self._nodes())) or 1

    def start(self, items: Sequence[Item]) -> list[Future[Answer]]:
        """Submit work items and return the futures of their answers, in the same order.

        An item that needs more than any single node has is not submitted: its answer is `NOT_RUN`.
        """
        nodes, futures = self._nodes(), []
        remote = self.ray.remote(_perform)
        expected = Identity.here()
        self._waiting.update(item.name for item in items)
        for item in items:
            if item.needs.gpus and not any(_fits(item.needs, node) for node in nodes):
                future: Future[Answer] = Future()
                future.set_result(not_run(item, no_device(item.needs, "the cluster")))
            elif not any(_fits(item.needs, node) for node in nodes):
                future = Future()
                future.set_result(not_run(item, f"no node of the cluster has {_ask(item)}"))
            else:
                task = remote.options(**options(item))
                future = self._answer(item, task.remote(item, expected, self.starts).future())
            futures.append(future)
        return futures

    def running(self) -> Mapping[str, tuple[str, float]]:
        """Return the item that each busy worker runs, by name of the worker, as (name of the item,
        start time); times as of `time.time`.

        The result may be two seconds old.
        """
        when, seen = self._seen
        if time.time() - when > 2:
            with suppress(Exception):
                seen = self.ray.get(self.starts.running.remote(), timeout=2)
            self._seen = time.time(), seen
        # `seen` has the last item of every worker. A worker whose last item has an answer is idle.
        return {worker: at for worker, at in seen.items() if at[0] in self._waiting}

    def _answer(self, item: Item, task: Future[Any]) -> Future[Answer]:
        """Return a future for the answer of an item, given the future of its Ray task.

        If the task fails, because the item's workers died or Ray raised an error, the answer is
        `FAILED`.
        """
        answer: Future[Answer] = Future()
        answer.set_running_or_notify_cancel()
        errors = self.ray.exceptions
        deaths = errors.WorkerCrashedError, errors.NodeDiedError, errors.OutOfMemoryError

        def done(task: Future[Any]) -> None:
            try:
                answer.set_result(task.result())
            except Exception as error:
                attempts = ATTEMPTS if isinstance(error, deaths) else 1
                text = " ".join(f"{type(error).__name__}: {error}".split())
                answer.set_result(lost(item, attempts, text[:400]))
            finally:
                self._waiting.discard(item.name)

        task.add_done_callback(done)
        return answer

    def close(self) -> None:
        """Disconnect from the cluster; items of this driver that still run there are cancelled."""
        self.ray.shutdown()

    def _nodes(self) -> list[dict[str, float]]:
        return [node["Resources"] for node in self.ray.nodes() if node["Alive"]]


def _check_answers(address: str | None) -> None:
    """Raise `ItemError` if `address` is `host:port` and nothing listens there.

    Ray itself would retry for minutes.
    """
    host, _, port = (address or "").rpartition(":")
    if host and "://" not in host and port.isdecimal():
        try:
            # In an address an IPv6 host may be in brackets, which a socket does not understand.
            host = host.removeprefix("[").removesuffix("]")
            socket.create_connection((host, int(port)), timeout=10).close()
        except OSError as error:
            raise ItemError(_nobody(address, error)) from error


def _nobody(address: str | None, error: Exception) -> str:
    return (
        f"expected a Ray cluster at {address or 'this machine'}, and connecting gave: {error}. "
        "`ray start --head` starts one, and `ray status` says whether it runs"
    )


class Starts:
    """Ray actor that records which worker started which work item.

    It counts the attempts of each item, because Ray does not tell a task which attempt it is.
    """

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.at: dict[str, tuple[str, float]] = {}
        """Item that each worker started last, by name of the worker, as (name, start time)."""

    def began(self, item: str, worker: str) -> int:
        """Record that a worker starts a work item; return the number of this attempt, from 1."""
        self.counts[item] = self.counts.get(item, 0) + 1
        if self.counts[item] > 1:
            # The worker that ran this item before is dead.
            self.at = {name: now for name, now in self.at.items() if now[0] != item}
        self.at[worker] = item, time.time()
        return self.counts[item]

    def running(self) -> dict[str, tuple[str, float]]:
        """Return the item that each worker started last, by name of the worker, as (name of the
        item, start time); times as of `time.time`."""
        return self.at


def kernel_variables() -> dict[str, str]:
    """Return the driver's environment variables that select kernels; every worker gets them too.

    OMP_NUM_THREADS is included, empty if the driver has none. Otherwise Ray would set it to the
    number of processors that it reserves for the item, and sums would have another order than in a
    local process.
    """
    return {"OMP_NUM_THREADS": "", **settings()}


def options(item: Item) -> dict[str, Any]:
    """Return the options of a work item's Ray task: resources, environment variables, and number of
    retries."""
    needs = item.needs
    environment = dict(needs.environment)
    if needs.threads is not None:
        # Libraries count their processors once, so an item that needs another number must not run
        # in the same worker. Ray starts another worker where the environment differs.
        environment["MEGALODON_NUMERICS_THREADS"] = str(needs.threads)
    asked: dict[str, Any] = {
        "name": item.name,
        "num_cpus": needs.cpus,
        "max_retries": ATTEMPTS - 1,
        # An exception of the item's function is no reason to retry; `item.perform` turns it into an
        # answer.
        "retry_exceptions": False,
    }
    if needs.gpus:
        asked["num_gpus"] = needs.gpus
    if needs.memory:
        asked["memory"] = needs.memory
    if needs.device:
        asked["accelerator_type"] = needs.device
    if environment:
        asked["runtime_env"] = {"env_vars": environment}
    return asked


def _perform(item: Item, expected: Identity, starts: Any) -> Answer:
    """Run a work item in this worker of the cluster; record the attempt in the actor `starts`."""
    import ray

    worker = f"{os.uname().nodename}:{os.getpid()}"
    attempt = ray.get(starts.began.remote(item.name, worker))
    with _without_empty_threads():
        return replace(perform(item, expected), attempts=attempt)


@contextmanager
def _without_empty_threads() -> Iterator[None]:
    """Remove OMP_NUM_THREADS within this context if it is empty, and restore it afterwards.

    It must be restored, because Ray checks the variable before every task and sets it to a number
    if it is missing.
    """
    empty = os.environ.get("OMP_NUM_THREADS") == ""
    if empty:
        del os.environ["OMP_NUM_THREADS"]
    try:
        yield
    finally:
        if empty:
            os.environ["OMP_NUM_THREADS"] = ""


def _fits(needs: Needs, node: Mapping[str, float]) -> bool:
    enough = all(
        node.get(name, 0.0) >= amount
        for name, amount in (("CPU", needs.cpus), ("GPU", needs.gpus), ("memory", needs.memory))
    )
    return enough and (not needs.device or f"accelerator_type:{needs.device}" in node)


def _ask(item: Item) -> str:
    needs = item.needs
    return f"{needs.cpus} processors and {needs.memory / 2**30:.1f} GiB of memory"
