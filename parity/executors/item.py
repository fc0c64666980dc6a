"""Work items as plain data: their requirements, and their answers from some worker.

An item names its function by path, so that it can travel to another machine; its arguments and its
value are JSON. Nothing that computes is imported here, because a worker's environment variables
must be set before JAX, torch and NumPy are imported.
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

# One worker may have died for another reason, and two of the same shortage of memory.
ATTEMPTS = 3
"""Workers that an item may kill before it counts as failed."""
_PACKAGES = Watch()
_PROCESSORS = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


class ItemError(ValueError):
    """An item, or a set of them, cannot be run; the message says what was expected."""


class State(StrEnum):
    """Outcome of an item."""

    DONE = "done"
    FAILED = "failed"
    NOT_RUN = "not run"


@dataclass(frozen=True, slots=True)
class Needs:
    """Resources that an item needs on its machine."""

    cpus: int = 1
    """Number of processors it keeps busy."""
    gpus: float = 0
    """Number of accelerators, or the fraction of one that it shares with other items."""
    memory: int = 0
    """Peak memory in bytes; 0 for no requirement."""
    device: str = ""
    """Class of accelerator, such as H100; empty for any."""
    threads: int | None = None
    """Number of processors its process may use, as if the machine had no more; None for all."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables set before anything is imported, for example of a simulated host."""

    def __str__(self) -> str:
        """Describe the required devices."""
        return f"{self.gpus:g} {self.device or 'GPU'}"


@dataclass(frozen=True)
class Item:
    """A piece of work, `function(**arguments)`, for any machine that satisfies `needs`."""

    name: str
    function: str
    """Path as `module:name`."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """JSON values."""
    needs: Needs = Needs()
    folder: bool = False
    """Whether the function takes `folder`, an empty folder whose files are sent back."""
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Digests by name of the files it reads outside of the packages (`inputs.contents`); a worker
    where they differ refuses the item."""
    expected: float = 0.0
    """Expected duration in seconds, for the estimate of the time left; 0 if unknown."""

    def digest(self) -> str:
        """Return a hash of everything its answer depends on except the processor.

        That is its name, function and arguments, the content of its inputs, and the code, versions
        and settings of this process, which are those of the nightly run.

        Raises:
            ItemError: an argument is not a JSON value.
        """
        return self._digest

    # Cached: while a process with another environment starts, the driver temporarily has its
    # variables.
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
            raise ItemError(f"item {self.name!r}: expected JSON values, and {error}.") from error

    def resolve(self) -> Callable[..., Any]:
        """Import and return its function."""
        module, _, name = self.function.partition(":")
        return getattr(importlib.import_module(module), name)


@dataclass(frozen=True)
class Place:
    """The process that ran an item."""

    node: str = ""
    """Name of its machine."""
    process: int = 0
    fingerprint: str = ""
    """Hash of processor, threads, flags and accelerators; `UNKNOWN` if they cannot be read."""
    processor: str = ""
    code: str = ""
    """Hash of the code it ran (`code`)."""

    def __str__(self) -> str:
        """Return machine and process."""
        return f"{self.node}:{self.process}"

    @classmethod
    def here(cls) -> Place:
        """Return the place of this process."""
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
    state: State
    value: Any = None
    """Return value of its function: a JSON value."""
    reason: str = ""
    """Why it failed or was not run."""
    place: Place = Place()
    seconds: float = 0.0
    attempts: int = 1
    """Number of workers that took it; all but the last died."""
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """Files it left in its folder, by path."""

    def to_json(self) -> dict[str, Any]:
        """Return all fields except the files."""
        document = asdict(self)
        del document["files"]
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Answer:
        """Read the result of `to_json`."""
        words = {"state": State(document["state"]), "place": Place(**document["place"])}
        return cls(**{**document, **words})


@cache
def _source(module: str) -> str:
    """Return a hash of a module's file, which may lie outside of the packages hashed by `code`."""
    try:
        spec = importlib.util.find_spec(module)
    except ImportError:
        spec = None
    if spec is None or not spec.origin:
        raise ItemError(f"expected a module {module!r} that can be imported, and there is none.")
    return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()[:12]


def perform(item: Item, expected: Identity) -> Answer:
    """Run an item in this process, whose environment must be the one it needs.

    An exception is an answer: it is the item's fault and would recur, unlike the death of a worker.
    Code and inputs are checked before and after, since changes in between may have been read.

    Args:
        item: the item to run.
        expected: the driver's code, versions and settings.
    """
    start, place = time.perf_counter(), Place.here()
    state, value, reason, files = State.FAILED, None, "", {}
    try:
        _check_alike(item, expected, place.node)
        if _PROCESSORS:
            # Results depend on the number of processors, not on which ones are used.
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
    """Reject code, versions, settings or inputs that differ from the driver's.

    Raises:
        ItemError: something differs; the message names it and the remedy.
    """
    wanted = settings({**expected.settings, **item.needs.environment})
    if differs := replace(expected, settings=wanted).differences(_own_identity()):
        raise ItemError(
            f"expected the driver's program on {node}, and it differs: {'; '.join(differs)[:400]}. "
            "Install the same version and set the same variables on every machine"
        )
    if files := _PACKAGES.changed():
        raise ItemError(
            f"expected the code of {node} to stay unchanged while items run, and "
            f"{_named(files)} changed: start again with the code of now, or restore the files"
        )
    if files := changed(item.inputs):
        raise ItemError(
            f"expected on {node} the content that the driver read, and another one is in "
            f"{_named(files)}: copy the driver's files there, or start again if they were changed"
        )


# Read before the first item is imported: libraries set variables for themselves, which have no
# effect any more at that point.
@cache
def _own_identity() -> Identity:
    return Identity.here()


def _named(files: Sequence[str]) -> str:
    more = f" and {len(files) - 3} more" if len(files) > 3 else ""
    return ", ".join(files[:3]) + more


def not_run(item: Item, reason: str) -> Answer:
    """Return the answer of an item that no worker could run."""
    return Answer(item.name, State.NOT_RUN, reason=reason)


def lost(item: Item, attempts: int, reason: str) -> Answer:
    """Return the answer of an item whose workers died."""
    workers = f"killed {attempts} workers" if attempts > 1 else "its worker was lost"
    return Answer(item.name, State.FAILED, reason=f"{workers}: {reason}", attempts=attempts)


def no_device(needs: Needs, where: str) -> str:
    """Return the reason for not running an item that needs an accelerator."""
    return f"no device: {where} has none with {needs}"


def _contents(folder: Path) -> dict[str, bytes]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


@cache
def _processor() -> Mapping[str, str]:
    """Return this machine's processor, read once: the system lists it again for each core."""
    return host()


@cache
def accelerators() -> tuple[str, ...]:
    """Return the names of the accelerators this process may use, read from their driver's files."""
    found = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        found += [line.partition(":")[2].strip() for line in lines if line.startswith("Model")]
    return tuple(found[: len(visible(len(found)))])


def visible(count: int) -> list[str]:
    """Return the numbers or names of the devices, out of `count`, that CUDA shows this process.

    CUDA reads the variable up to the first name that it does not know, such as -1.
    """
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is None:
        return [str(number) for number in range(count)]
    names = [name.strip() for name in shown.split(",") if name.strip()]
    return list(itertools.takewhile(lambda name: name != "-1", names))
