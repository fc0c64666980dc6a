"""Work items and their answers as plain data, which can be sent to another machine.

An item names its function by an import path; its arguments and its return value are JSON. This
module imports neither JAX, torch nor NumPy: a worker must set environment variables before that.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import itertools
import json
import os
import platform
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from parity.executors.identity import Identity, Watch, code, settings
from parity.executors.inputs import changed
from parity.executors.machine import FLAGS, UNKNOWN, host, threads

# Three, because one worker may die for a reason other than the item, and a second one because both
# ran short of memory at the same time.
ATTEMPTS = 3
"""Number of workers that may die while they run an item, before the item counts as failed."""
_PACKAGES = Watch()
_PROCESSORS = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


class ItemError(ValueError):
    """Items or an executor cannot be used as given; the message says what was expected."""


class State(StrEnum):
    """Outcome of an item."""

    DONE = "done"
    FAILED = "failed"
    """The item's function raised an exception or returned no JSON value, the workers that ran the
    item died, or a worker's program or input files differ from the driver's."""
    NOT_RUN = "not run"
    """No worker has the resources that the item needs."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Resources that an item needs on its machine."""

    cpus: int = 1
    """Number of processors that the item keeps busy."""
    gpus: float = 0
    """Number of accelerators; below 1: fraction of one that is shared with other items."""
    memory: int = 0
    """Peak memory in bytes; 0: no requirement."""
    device: str = ""
    """Class of accelerator, such as H100; empty: any accelerator."""
    threads: int | None = None
    """Number of processors that the process may use, as if the machine had no more; None: all."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables set before anything is imported, such as XLA_FLAGS."""

    def __str__(self) -> str:
        """Return the required accelerators as text, such as `1 H100`."""
        return f"{self.gpus:g} {self.device or 'GPU'}"


@dataclass(frozen=True)
class Item:
    """A piece of work, `function(**arguments)`, for any machine that satisfies `needs`."""

    name: str
    """Name of the item, unique within a sweep."""
    function: str
    """Import path of the function, as `module:name`."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the function: JSON values."""
    needs: Needs = Needs()
    folder: bool = False
    """Whether the function takes an argument `folder`: the path of an empty folder. Files that it
    writes there are sent back in the answer."""
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Digests of the files that the function reads outside of `identity.PACKAGES`, as the driver
    has them, by path of a file or folder, or by `module:NAME` for an installed package or module
    (`inputs.contents`). On a worker where the files differ, the item fails."""
    expected: float = 0.0
    """Expected duration in seconds, for the estimate of the time left; 0: unknown."""

    def digest(self) -> str:
        """Return a hash (16 hex digits) of all that the answer depends on, except the processor.

        The hash covers the item's name, function with its source file, arguments, inputs and those
        needs that may change results (threads, environment, class of accelerator and whether one is
        needed), and the code, versions and settings of this process, which is the driver.

        Raises:
            ItemError: an argument is not a JSON value, or the function's module does not exist.
        """
        return self._digest

    # Cached: while the driver starts a worker, it temporarily has the worker's environment, which
    # would change the hash.
    @cached_property
    def _digest(self) -> str:
        needs = self.needs.threads, sorted(self.needs.environment.items()), self.needs.device
        source = _source(self.function.partition(":")[0])
        here = Identity.here()
        work = [
            *(self.name, self.function, self.arguments, needs, bool(self.needs.gpus), source),
            *(dict(self.inputs), here.code, dict(here.versions), dict(here.settings)),
        ]
        try:
            return hashlib.sha256(json.dumps(work, sort_keys=True).encode()).hexdigest()[:16]
        except TypeError as error:
            raise ItemError(
                f"item {self.name!r}: expected JSON values as arguments, and {error}."
            ) from error

    def resolve(self) -> Callable[..., Any]:
        """Import the item's function and return it."""
        module, _, name = self.function.partition(":")
        return getattr(importlib.import_module(module), name)


@dataclass(frozen=True)
class Place:
    """Process that ran an item, and its machine."""

    node: str = ""
    """Host name of the machine."""
    process: int = 0
    """Process id."""
    fingerprint: str = ""
    """Hash of processor type, number of threads, environment variables that select kernels, and
    accelerators; `UNKNOWN` if the processor cannot be identified."""
    processor: str = ""
    """Name of the processor."""
    code: str = ""
    """Digest of the packages that the process ran (`identity.code`)."""

    def __str__(self) -> str:
        """Return `node:process`."""
        return f"{self.node}:{self.process}"

    @classmethod
    def here(cls) -> Place:
        """Return the place of the calling process."""
        cpu = dict(_processor())
        name = cpu.pop("name")
        flags = {flag: os.environ[flag] for flag in FLAGS if os.environ.get(flag)}
        parts = [cpu, threads(), flags, accelerators()]
        known = UNKNOWN not in cpu.values()
        digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]
        return cls(platform.node(), os.getpid(), digest if known else UNKNOWN, name, code())


@dataclass(frozen=True)
class Answer:
    """Outcome and value of an item."""

    name: str
    """Name of the item."""
    state: State
    value: Any = None
    """Return value of the item's function: a JSON value; None unless the state is DONE."""
    reason: str = ""
    """Cause of the failure, or reason why the item was not run; empty if the state is DONE."""
    place: Place = Place()
    """Process that ran the item."""
    seconds: float = 0.0
    """Time that the item took on its worker, in seconds."""
    attempts: int = 1
    """Number of workers that started the item; each one before the last died. 1 also if none
    started it."""
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """Contents of the files that the function wrote to its folder, by relative path."""

    def to_json(self) -> dict[str, Any]:
        """Return all fields of the answer except `files`, as JSON data."""
        document = asdict(self)
        del document["files"]
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Answer:
        """Return the answer that `to_json` converted to `document`; its `files` are empty."""
        words = {"state": State(document["state"]), "place": Place(**document["place"])}
        return cls(**{**document, **words})


@cache
def _source(module: str) -> str:
    """Return a hash of a module's source file, which may lie outside of `identity.PACKAGES`.

    For a module without a file, return "built-in" or "frozen", as Python names its origin.

    Raises:
        ItemError: there is no such module, or it is a script, which no worker can import.
    """
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        # A ValueError for `__main__`, if it is a script.
        spec = None
    if spec is None or not spec.origin:
        raise ItemError(
            f"expected a module {module!r} that can be imported, and there is none: check the name "
            "before the colon in the item's function."
        )
    if not spec.has_location:
        return spec.origin
    return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()[:12]


def perform(item: Item, expected: Identity) -> Answer:
    """Run an item in this process and return its answer.

    The process must already have the environment that the item needs. An exception of the item's
    function gives an answer `FAILED`, and no retry: unlike the death of a worker, the exception
    would recur. Code and inputs are checked before and after the run, because the item may read
    files that change meanwhile.

    Args:
        item: the item to run.
        expected: code, versions and settings of the driver.
    """
    start, place = time.perf_counter(), Place.here()
    state, value, reason, files = State.FAILED, None, "", {}
    try:
        _check_alike(item, expected, place.node)
        if _PROCESSORS:
            # Results depend on the number of processors, not on which ones: take the first ones.
            os.sched_setaffinity(0, sorted(_PROCESSORS)[: item.needs.threads])
            place = Place.here()
        with tempfile.TemporaryDirectory() if item.folder else nullcontext() as name:
            folder = {"folder": Path(name)} if name else {}
            value = item.resolve()(**item.arguments, **folder)
            json.dumps(value)
            files = _contents(Path(name)) if name else {}
        _check_alike(item, expected, place.node)
        state = State.DONE
    except Exception as error:
        value = None
        last = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{type(error).__name__}: {error}"[:800]
        reason += f" ({Path(last.filename).name}:{last.lineno})"
    return Answer(item.name, state, value, reason, place, time.perf_counter() - start, files=files)


def _check_alike(item: Item, expected: Identity, node: str) -> None:
    """Check that code, versions, settings and inputs on this machine are those of the driver.

    Raises:
        ItemError: something differs; the message says what, and what to do.
    """
    wanted = settings({**expected.settings, **item.needs.environment})
    if differs := replace(expected, settings=wanted).differences(_own_identity()):
        raise ItemError(
            f"the program on {node} differs from the driver's (driver → {node}): "
            f"{'; '.join(differs)[:400]}. Install the same versions and set the same environment "
            "variables on every machine"
        )
    if files := _PACKAGES.changed():
        raise ItemError(
            f"{_named(files)} changed on {node} while items ran: restore the code, or start again "
            "with the changed code"
        )
    if files := changed(item.inputs):
        raise ItemError(
            f"input files on {node} differ from those that the driver read: {_named(files)}. "
            "If those have not changed since, copy the driver's files there; otherwise start the "
            "run again"
        )


# Cached before the first item is imported: libraries set environment variables on import, which
# would look like differing settings.
@cache
def _own_identity() -> Identity:
    return Identity.here()


def _named(files: Sequence[str]) -> str:
    more = f" and {len(files) - 3} more" if len(files) > 3 else ""
    return ", ".join(files[:3]) + more


def not_run(item: Item, reason: str) -> Answer:
    """Return the answer `NOT_RUN` for an item that no worker can run; `reason` says why."""
    return Answer(item.name, State.NOT_RUN, reason=reason)


def lost(item: Item, attempts: int, reason: str) -> Answer:
    """Return the answer `FAILED` for an item whose workers all died; `reason` says how."""
    workers = f"killed {attempts} workers" if attempts > 1 else "its worker was lost"
    return Answer(item.name, State.FAILED, reason=f"{workers}: {reason}", attempts=attempts)


def no_device(needs: Needs, where: str) -> str:
    """Return, as text, that `where` (such as "this machine") lacks the accelerators of `needs`."""
    return f"no device: {where} has none with {needs}"


def _contents(folder: Path) -> dict[str, bytes]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


@cache
def _processor() -> Mapping[str, str]:
    """Return the description of this machine's processor (`machine.host`), read only once."""
    return host()


@cache
def accelerators() -> tuple[str, ...]:
    """Return the model name of each NVIDIA accelerator that this process may use, from /proc.

    The result is () if there is none, or if no Linux driver lists them.
    """
    found = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        found += [line.partition(":")[2].strip() for line in lines if line.startswith("Model")]
    return tuple(found[: len(visible(len(found)))])


def visible(count: int) -> list[str]:
    """Return the devices, out of `count`, that CUDA shows this process: their numbers or names.

    These are the entries of CUDA_VISIBLE_DEVICES before the first -1; without that variable, all
    numbers below `count`.
    """
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is None:
        return [str(number) for number in range(count)]
    names = [name.strip() for name in shown.split(",") if name.strip()]
    return list(itertools.takewhile(lambda name: name != "-1", names))
