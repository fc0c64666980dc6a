"""What run.json says of a run: who made it, where, of what, and what each suite executed.

Source: docs/reports.md "Store".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

from parity.engine.contract import ContractLine
from reports.store.reader import checksum, parse_json, read_bytes, read_json
from reports.store.schema import (
    MANIFEST,
    SCHEMA,
    VERDICT,
    RunKind,
    StoreError,
    kind_of,
    migrate,
)
from reports.store.seal import check_seal, is_sealed

CHECKED = 5
"""First schema with checksums."""


@dataclass(frozen=True, slots=True)
class Device:
    """What JAX computed on."""

    kind: str | None = None
    """Class of device: cpu, gpu or tpu."""
    name: str | None = None


@dataclass(frozen=True, slots=True)
class ReferenceInfo:
    """What answered for the reference, and what was installed where it ran."""

    kind: str | None = None
    """live, recorded or absent."""
    commit: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    capability: str | None = None
    """Vector instructions that its library chose; None for recordings."""
    detail: str = ""
    """A sentence for the reader of the page."""
    threads: int | None = None
    """Of the reference's library, where a bench timed it."""


@dataclass(frozen=True, slots=True)
class Environment:
    """All that decides how a run rounds: machine, flags, versions, reference."""

    device: Device = Device()
    host: Mapping[str, str] = field(default_factory=dict)
    """What tells processors apart (`reports.provenance.host.FIELDS`), and GPUs (`GPU_FIELDS`)."""
    threads: int | str | None = None
    """How many; of shards from several machines, the number of each in a text."""
    flags: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    reference: ReferenceInfo = ReferenceInfo()

    @property
    def machine(self) -> tuple[Device, Mapping[str, str], int | str | None]:
        """Device, processor and number of threads."""
        return self.device, self.host, self.threads

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Environment:
        """Read it from a document that holds its fields; what is missing is unknown."""
        parts = _fields_of(cls, document)
        parts["device"] = Device(**_fields_of(Device, parts.get("device")))
        parts["reference"] = ReferenceInfo(**_fields_of(ReferenceInfo, parts.get("reference")))
        return cls(**parts)


@dataclass(frozen=True, slots=True)
class SuiteResult:
    """How much of what a suite planned it executed."""

    name: str
    planned: int = 0
    executed: int = 0
    reason: str = ""
    """Why it is not whole."""
    status: str = "failed"
    """ran, failed or skipped."""

    @property
    def whole(self) -> bool:
        """Whether it did all it planned."""
        return self.status == "ran" and 0 < self.planned == self.executed


@dataclass(frozen=True, slots=True)
class CaseInfo:
    """A case that was compared."""

    name: str
    title: str = ""
    why: str = ""
    hash: str = ""
    batch: int | None = None
    length: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """The checkpoint that was probed, and how it was trained."""

    name: str = ""
    parameters: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] | None = None
    """Its recipe and losses; None where nothing beside the weights says."""
    folder: str = field(default="", compare=False)
    """Where it was, as it was given to the night, for the command that repeats it; empty for the
    committed one. Shards of one night may have it in different places."""
    content: str = ""
    """Digest of its files (`parity.executors.inputs`): the same in all shards of one night."""


@dataclass(frozen=True, slots=True)
class PartInfo:
    """A part of a night that an executor ran: where it was measured, and what that took."""

    name: str
    node: str = ""
    """Name of the machine."""
    fingerprint: str = ""
    """Of that machine with its settings; empty where it is not known."""
    processor: str = ""
    threads: int | str | None = None
    seconds: float = 0.0
    attempts: int = 1
    """How many workers took it: all but the last died of it, or of something else."""
    cases: tuple[str, ...] = ()
    """What measurements of it are named after."""


@dataclass(frozen=True, slots=True)
class Time:
    """Seconds that one comparison of a case took, or one probe."""

    suite: str
    case: str
    """Of a probe: its name."""
    edge: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Manifest:
    """One run: identity, environment, what was asked for and what was executed."""

    id: str
    """Name of the run's folder."""
    created: str
    """ISO 8601, UTC."""
    kind: RunKind = RunKind.NIGHTLY
    commit: str | None = None
    dirty: bool = False
    """Whether the tree had uncommitted changes."""
    code: str | None = None
    """Digest of the packages that measured it, with their data (`parity.executors.identity`)."""
    environment: Environment = Environment()
    durations: Mapping[str, float] = field(default_factory=dict)
    """Seconds by suite."""
    times: tuple[Time, ...] = ()
    """Of comparisons and probes that were timed one by one; others share work, and have none."""
    suites: tuple[SuiteResult, ...] = ()
    cases: tuple[CaseInfo, ...] = ()
    checkpoint: CheckpointInfo | None = None
    selected: tuple[str, ...] = ()
    """Cases that were asked for; empty for all of them."""
    fault: str | None = None
    """Name of the bug that was planted on purpose."""
    tolerances: tuple[Mapping[str, str], ...] = ()
    """The table in force that night: edge, kind, bound, reason."""
    seams: tuple[Mapping[str, Any], ...] = ()
    """Every known difference, and its value where it was measured."""
    spreads: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """How far rounding scatters each level (`reports.verdict.levels`)."""
    stability: Mapping[str, Any] = field(default_factory=dict)
    """What probes show beside their findings, by section of the page."""
    workload: Mapping[str, Any] | None = None
    """Of a bench: what was timed."""
    shard: Mapping[str, int] | None = None
    """Of a shard: its index and how many there are."""
    plan: tuple[str, ...] = ()
    """Parts of a night, in order; of a shard, those of the whole night."""
    contract: tuple[ContractLine, ...] = ()
    """Gates that had to be measured, stated before they were (`parity.engine.contract`)."""
    shards: tuple[str, ...] = ()
    """Ids of the shards that a night was merged from."""
    parts: tuple[PartInfo, ...] = ()
    """Of a night that an executor ran: its parts in the order of the plan."""
    ports: tuple[Mapping[str, Any], ...] = ()
    """Of ports: what each comparison found, for the page (`reports.ports.document`)."""
    verdict: str = ""
    """Word of its first verdict, for lists; `gate` judges it again by later runs. Runs of schema 5
    have it in verdict.json, because they are stored before they are judged."""
    files: Mapping[str, str] | None = field(default=None, compare=False)
    """SHA-256 by name of every other file that was stored with it; None for a run that is not
    stored yet, or was stored by a schema without checksums."""
    migrated_from: int | None = None
    """Schema on disk, where it is an older one."""

    @property
    def whole(self) -> bool:
        """Whether it did all that a night does, with nothing planted in it."""
        return (
            not (self.fault or self.selected)
            and bool(self.suites)
            and all(suite.whole for suite in self.suites)
        )

    @property
    def checksums(self) -> Mapping[str, str] | None:
        """SHA-256 of the files of a stored run by name; None where its schema had none."""
        return None if (self.migrated_from or SCHEMA) < CHECKED else self.files or {}

    @property
    def subject(self) -> frozenset[str]:
        """What it is about, where that is not Megalodon: names of ports. Runs about other subjects
        are no history of one another.
        """
        return frozenset(s.name for s in self.suites) if self.kind is RunKind.PORT else frozenset()

    @property
    def of_ports_alone(self) -> bool:
        """Whether a session of tests compared ports and nothing of Megalodon.

        One that measured anything of Megalodon names the reference it chose, whatever it found.
        """
        alone = self.environment.reference.kind is None
        return self.kind is RunKind.PYTEST and bool(self.ports) and alone

    def shares_subject(self, other: Manifest) -> bool:
        """Whether both are of one kind and about one subject, or about one of several."""
        alike = self.subject == other.subject or bool(self.subject & other.subject)
        return self.kind is other.kind and alike

    @classmethod
    def from_json(
        cls,
        document: Mapping[str, Any],
        environment: Environment | None = None,
        suites: tuple[SuiteResult, ...] = (),
    ) -> Manifest:
        """Read a document of today's schema.

        Args:
            document: of run.json.
            environment: in place of the fields in the document, where it was read before.
            suites: the same; used only together with an environment.

        Raises:
            StoreError: a part is of another kind than it should be, or the run's kind is unknown.
        """
        parts: dict[str, Any] = {**_fields_of(cls, document), "kind": kind_of(document)}
        for name, row in (("suites", SuiteResult), ("cases", CaseInfo)):
            parts[name] = tuple(row(**_fields_of(row, entry)) for entry in _list(parts, name))
        parts["parts"] = tuple(
            PartInfo(**{**entry, "cases": _list(entry, "cases")})
            for entry in (_fields_of(PartInfo, row) for row in _list(parts, "parts"))
        )
        parts["contract"] = tuple(
            ContractLine(**_fields_of(ContractLine, row)) for row in _list(parts, "contract")
        )
        parts["times"] = tuple(Time(**_fields_of(Time, row)) for row in _list(parts, "times"))
        for name in ("selected", "tolerances", "seams", "plan", "shards", "ports"):
            parts[name] = _list(parts, name)
        if (checkpoint := parts.get("checkpoint")) is not None:
            parts["checkpoint"] = CheckpointInfo(**_fields_of(CheckpointInfo, checkpoint))
        if environment is not None:
            return cls(**{**parts, "environment": environment, "suites": suites})
        parts["environment"] = Environment.from_json(document)
        return cls(**parts)

    def to_json(self) -> dict[str, Any]:
        """Return the document of today's schema; the environment's fields stand beside its own."""
        document: dict[str, Any] = {"schema": SCHEMA, **asdict(self)}
        document |= document.pop("environment")
        # A fact about the file that was read, not about what is written.
        del document["migrated_from"]
        optional = ("workload", "shard", "plan", "contract", "shards", "parts", "ports", "verdict")
        optional = (*optional, "code", "times")
        return {n: value for n, value in document.items() if value or n not in optional}


_TYPES = {"Mapping": Mapping, "int": int, "str": str, "bool": bool}


def _fields_of(row: type, document: object) -> dict[str, Any]:
    """Return the fields of `row` that a document holds; null is what is not there.

    Raises:
        StoreError: the document, or one of these, is of another type.
    """
    if document is None:
        return {}
    if not isinstance(document, Mapping):
        raise _mistyped(row.__name__, document)
    values = {}
    for name, types, annotation in _types_of(row):
        # A list of ten thousand runs asks a million times.
        if (value := document.get(name)) is None:
            continue
        if types and not isinstance(value, types):
            raise _mistyped(f"{name!r} of type {annotation}", value)
        values[name] = value
    return values


@cache
def _types_of(row: type) -> list[tuple[str, tuple[type, ...], str]]:
    """Return name, types and annotation of each field of a dataclass."""
    rows = []
    for f in fields(row):
        names = [part.partition("[")[0] for part in str(f.type).split(" | ")]
        types = tuple(_TYPES[name] for name in names if name in _TYPES)
        rows.append((f.name, types, str(f.type)))
    return rows


def _mistyped(expected: str, value: object) -> StoreError:
    return StoreError(
        f"expected {expected} in {MANIFEST}, received {str(value)[:80]!r}; restore the folder or "
        "delete it"
    )


def _list(parts: Mapping[str, Any], name: str) -> tuple[Any, ...]:
    value = parts.get(name) or ()
    if not isinstance(value, list | tuple):
        raise _mistyped(f"a list {name!r}", value)
    return tuple(value)


def read_manifest(folder: Path) -> Manifest:
    """Read run.json alone, in today's schema.

    Raises:
        StoreError: it is missing or damaged, or of an unknown schema or kind.
    """
    path = folder / MANIFEST
    content = read_bytes(path)
    manifest = parse_manifest(content, path)
    return manifest if manifest.verdict else replace(manifest, verdict=_verdict(folder, content))


def _verdict(folder: Path, content: bytes) -> str:
    """Return the word in verdict.json; "" where it is missing, unreadable or about other numbers.

    It is about this run only if it has the checksum of this run.json, which has those of the rest.
    """
    if not (folder / VERDICT).is_file():
        return ""
    try:
        document = read_json(folder / VERDICT)
    except StoreError:
        return ""
    word = document.get("verdict")
    fits = document.get("run") == checksum(content) and is_sealed(document)
    return word if fits and isinstance(word, str) else ""


def _check_time(created: str, path: Path) -> None:
    # Runs are sorted by this text, so all of them have one form, in UTC.
    try:
        offset = datetime.fromisoformat(created).utcoffset()
    except ValueError:
        offset = None
    if offset != timedelta(0):
        raise StoreError(
            f"expected a time in UTC such as 2026-11-20T21:30:00+00:00 as 'created' in {path}, "
            f"received {created[:40]!r}; restore the folder or delete it"
        )


def parse_manifest(content: bytes, path: Path) -> Manifest:
    """Return what the bytes of a run.json say, in today's schema; raises like `read_manifest`."""
    document = parse_json(content, path)
    check_seal(document, path)
    document = migrate(document, path)
    if not isinstance(document.get("id"), str) or not isinstance(document.get("created"), str):
        raise StoreError(
            f"expected the texts 'id' and 'created' in {path}; restore the folder or delete it"
        )
    _check_time(document["created"], path)
    try:
        return Manifest.from_json(document)
    except (StoreError, TypeError) as error:
        raise StoreError(f"{path}: {error}") from error
