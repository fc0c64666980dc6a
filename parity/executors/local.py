"""Runs items in processes of this machine, as many at a time as cores and memory allow.

Every thread owns one worker process. If the process dies, its item is given to a new process, up to
`ATTEMPTS` times; other items are not affected. One pool of several processes could not do this: if
one dies, the standard library abandons all of them and does not say which item was running.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context, parent_process

from parity.executors.identity import Identity
from parity.executors.interrupts import end_group, end_own_group, lead_group, started_group
from parity.executors.item import (
    ATTEMPTS,
    Answer,
    Item,
    Needs,
    accelerators,
    lost,
    no_device,
    not_run,
    perform,
    visible,
)
from parity.executors.machine import threads

_STARTING = threading.Lock()


class LocalExecutor:
    """Executor that runs items in processes of this machine."""

    name = "local"

    def __init__(self, workers: int | None = None) -> None:
        """Set how many items may run at a time.

        Args:
            workers: largest number of running items that need an accelerator, and separately of
                those that need none; None: as many of either as cores and memory allow.
        """
        self.asked = workers
        # Read now: while a worker starts, this process temporarily has the worker's environment.
        self.identity = Identity.here()
        # An upper bound until `start`, when the memory that items need may allow fewer.
        self.workers = workers or threads()
        self._running: dict[str, tuple[str, float]] = {}
        # `next` of it is safe between threads, which make their workers at the same time.
        self._numbers = itertools.count(1)
        self._threads: list[ThreadPoolExecutor] = []
        self._processes: list[_Process] = []

    def start(self, items: Sequence[Item]) -> list[Future[Answer]]:
        """Start items in their order and return the futures of their answers, in the same order.

        Items that need accelerators which the machine lacks get the answer `NOT_RUN` at once.
        """
        devices = accelerators()
        groups: dict[bool, list[Item]] = {False: [], True: []}
        futures: dict[str, Future[Answer]] = {}
        for item in items:
            if item.needs.gpus and _fitting(item.needs, devices) < item.needs.gpus:
                futures[item.name] = Future()
                futures[item.name].set_result(not_run(item, no_device(item.needs, "this machine")))
            else:
                groups[bool(item.needs.gpus)].append(item)
        self.workers = 0
        for on_gpu, group in groups.items():
            if not group:
                continue
            count = self._count(group, len(devices) if on_gpu else 0)
            slots = iter(range(count))
            local = threading.local()
            names = visible(len(devices)) if on_gpu else []
            pool = ThreadPoolExecutor(
                count, initializer=self._open, initargs=(local, slots, group, names)
            )
            self.workers += count
            self._threads.append(pool)
            for item in group:
                futures[item.name] = pool.submit(self._run, local, item)
        return [futures[item.name] for item in items]

    def running(self) -> Mapping[str, tuple[str, float]]:
        """Return the item that each busy worker runs, by name of the worker, as (name of the item,
        start time); times as of `time.time`."""
        return dict(self._running)

    def close(self) -> None:
        """Kill every worker process and start none again; running items get no answer."""
        for pool in self._threads:
            pool.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.close()
        for pool in self._threads:
            pool.shutdown()

    def _count(self, items: Sequence[Item], devices: int) -> int:
        """Return how many of these items may run at a time.

        `devices` is the number of accelerators that they share; 0 for items that need none.
        """
        cpus = max(max(item.needs.cpus for item in items), 1)
        limits = [self.asked or max(threads() // cpus, 1), len(items)]
        memory = max(item.needs.memory for item in items)
        if memory and self.asked is None:
            limits.append(max(available_memory() // memory, 1))
        if devices:
            width = max(item.needs.gpus for item in items)
            limits.append(max(devices * _sharing(width) // math.ceil(width), 1))
        return min(limits)

    def _open(
        self,
        local: threading.local,
        slots: Iterator[int],
        items: Sequence[Item],
        devices: Sequence[str],
    ) -> None:
        """Give a thread its worker process, and choose the accelerators that the worker may use.

        Args:
            local: variables of the thread; the worker becomes its attribute `process`.
            slots: yields the thread's number.
            items: items that the thread may run.
            devices: numbers or names of all accelerators that may be used, of which the worker
                gets as many as the largest item needs; empty: items need none.
        """
        shown: dict[str, str] = {}
        slot = next(slots)
        if devices:
            width = max(item.needs.gpus for item in items)
            count = math.ceil(width)
            # Items that need a fraction of a device are spread over all devices, before two share
            # one.
            first = slot % len(devices) if width < 1 else slot * count
            shown = {"CUDA_VISIBLE_DEVICES": ",".join(devices[first : first + count])}
        local.process = _Process(f"local:{next(self._numbers)}", shown, self.identity)
        self._processes.append(local.process)

    def _run(self, local: threading.local, item: Item) -> Answer:
        process: _Process = local.process
        for attempt in range(1, ATTEMPTS + 1):
            self._running[process.name] = item.name, time.time()
            try:
                return replace(process.perform(item), attempts=attempt)
            except BrokenProcessPool:
                process.end()
                if process.closed:
                    # `close` killed the process, so nobody waits for an answer.
                    raise
            finally:
                del self._running[process.name]
        return lost(item, ATTEMPTS, "each died without an error message, as if out of memory")


class _Process:
    """A worker process, replaced by a new one if it dies or an item needs another environment.

    Args:
        name: name of the worker.
        environment: environment variables that the process has for every item.
        identity: code, versions and settings of the driver.
    """

    def __init__(self, name: str, environment: Mapping[str, str], identity: Identity) -> None:
        self.name, self.shown, self.identity = name, environment, identity
        self.pool: ProcessPoolExecutor | None = None
        self.setting: tuple[Mapping[str, str], int | None] | None = None
        self.closed = False
        self._pids: list[int] = []
        self._lock = threading.Lock()

    def perform(self, item: Item) -> Answer:
        """Run an item in the process and return its answer.

        Raises:
            BrokenProcessPool: the process died, or the executor was closed.
        """
        # Libraries read environment variables and count processors only once per process, so other
        # settings need a new process.
        setting = item.needs.environment, item.needs.threads
        if self.setting != setting:
            self.end()
        with self._lock:
            if self.closed:
                raise BrokenProcessPool("the executor was closed")
            future = self._submit(item, setting)
        return future.result()

    def _submit(self, item: Item, setting: tuple[Mapping[str, str], int | None]) -> Future[Answer]:
        if self.pool is not None:
            return self.pool.submit(perform, item, self.identity)
        # "spawn", because a forked process would inherit locks that threads of JAX may hold.
        pool = ProcessPoolExecutor(1, get_context("spawn"), initializer=_end_with_parent)
        self.pool, self.setting = pool, setting
        with _STARTING, _environment({**item.needs.environment, **self.shown}):
            future = pool.submit(perform, item, self.identity)
        self._pids = list(pool._processes or {})
        for pid in self._pids:
            started_group(pid)
        return future

    def end(self) -> None:
        """Kill the process and all processes it started; the next item starts a new one."""
        with self._lock:
            pool, self.pool, self.setting = self.pool, None, None
            for pid in self._pids:
                end_group(pid)
            self._pids = []
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """Kill the process; `perform` then raises instead of starting a new one."""
        self.closed = True
        self.end()


def _end_with_parent() -> None:
    """Make this worker, and all processes it starts, end when the driver has ended."""
    lead_group()
    parent = parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        end_own_group()

    threading.Thread(target=wait, daemon=True).start()


@contextmanager
def _environment(more: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables within this context, so that processes started in it have them."""
    before = {name: os.environ.get(name) for name in more}
    os.environ.update(more)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _sharing(width: float) -> int:
    """Return the number of items that can share one device, if each needs `width` devices; 1 if
    `width` is 1 or more."""
    # 1e-9 because 1 / (1 / 93) is a little less than 93 in floating point.
    return max(math.floor(1 / width + 1e-9), 1)


def _fitting(needs: Needs, devices: Sequence[str]) -> int:
    return sum(needs.device.lower() in name.lower() for name in devices)


def available_memory() -> int:
    """Return how many bytes new processes may allocate; 0 if this cannot be read (not Linux)."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            sizes = dict(line.split(":", 1) for line in lines)
        return int(sizes["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 0
