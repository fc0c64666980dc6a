"""The content of run.json: identity, environment, selection and suites of a run.

Source: docs/reports.md "Store".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from parity.engine.measure.contract import ContractLine
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

AHEAD = 0.05
"""Largest number of hours (3 minutes) by which a run may be dated ahead of the clock. Clocks of
machines differ by seconds; a run dated further ahead would count as the newest until its date."""
CHECKED = 5
"""First schema whose run.json has checksums of the other files."""


_OF_MEGALODON = ("live", "recorded", "absent")
"""Kinds of reference of a run that measured Megalodon."""


@dataclass(frozen=True, slots=True)
class Device:
    """Device on which JAX computed."""

    kind: str | None = None
    """Class of device: cpu or cuda; of a watched torch training, torch's type of device."""
    name: str | None = None


@dataclass(frozen=True, slots=True)
class ReferenceInfo:
    """The reference implementation of a run: its kind and commit, and the versions it ran with."""

    kind: str | None = None
    """live, recorded or absent; of ports the kinds of their originals, joined by " and ", such as
    "torch". None if the run has no reference."""
    commit: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    capability: str | None = None
    """Vector instructions that the reference's library selected; None for recordings."""
    detail: str = ""
    """One sentence about the reference for the page, such as where its values are from."""
    threads: int | None = None
    """Threads of the reference's library; only set by a bench."""


@dataclass(frozen=True, slots=True)
class Environment:
    """Everything that decides how a run rounds: machine, flags, versions, reference."""

    device: Device = Device()
    host: Mapping[str, str] = field(default_factory=dict)
    """Identity of the processor (`reports.provenance.host.FIELDS`) and GPU (`GPU_FIELDS`)."""
    threads: int | str | None = None
    """Number of threads; for shards of several machines, a text with each number."""
    flags: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    reference: ReferenceInfo = ReferenceInfo()

    @property
    def machine(self) -> tuple[Device, Mapping[str, str], int | str | None]:
        """Device, processor and number of threads."""
        return self.device, self.host, self.threads

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Environment:
        """Read an environment from a document with its fields; missing fields are unknown.

        Raises:
            StoreError: a field has a wrong type.
        """
        return typed(cls, document)


@dataclass(frozen=True, slots=True)
class SuiteResult:
    """Numbers of planned and executed checks of one suite (named part of a run)."""

    name: str
    planned: int = 0
    executed: int = 0
    reason: str = ""
    """Why the suite is incomplete; empty if it is complete."""
    status: str = "failed"
    """Outcome of the suite: ran, failed or skipped."""

    @property
    def whole(self) -> bool:
        """Whether the suite executed everything it planned, and planned something."""
        return self.status == "ran" and 0 < self.planned == self.executed


@dataclass(frozen=True, slots=True)
class CaseInfo:
    """A compared case: its name, purpose, hash, batch size, length and model configuration."""

    name: str
    title: str = ""
    why: str = ""
    hash: str = ""
    batch: int | None = None
    length: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """The probed checkpoint, and how it was trained."""

    name: str = ""
    parameters: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] | None = None
    """Training recipe and losses; None if the checkpoint does not include them."""
    folder: str = field(default="", compare=False)
    """Path as given to the night, for the command that repeats it; "" for the committed checkpoint.
    Shards of one night may have different paths."""
    content: str = ""
    """Digest of the checkpoint's files (`parity.executors.inputs`), equal in all shards of a
    night."""


@dataclass(frozen=True, slots=True)
class PartInfo:
    """One part of a night that an executor ran: its machine, seconds, attempts and cases."""

    name: str
    node: str = ""
    """Name of the machine that ran the part."""
    fingerprint: str = ""
    """Fingerprint of the machine and its settings; "" if unknown."""
    processor: str = ""
    threads: int | str | None = None
    seconds: float = 0.0
    attempts: int = 1
    """Number of workers that started the part; all but the last died."""
    cases: tuple[str, ...] = ()
    """Cases that the part measured."""


@dataclass(frozen=True, slots=True)
class Time:
    """Seconds that one comparison of a case or one probe took."""

    suite: str
    case: str
    """Name of the case or of the probe."""
    edge: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Manifest:
    """One run: identity, environment, selection, and what was executed."""

    id: str
    """Name of the run's folder."""
    created: str
    """Start of the run, ISO 8601 in UTC."""
    kind: RunKind = RunKind.NIGHTLY
    commit: str | None = None
    """Git commit of the measured code; None outside a checkout."""
    dirty: bool = False
    """Whether the source tree had uncommitted changes."""
    code: str | None = None
    """Digest of this project's packages and data files (`parity.executors.identity`)."""
    environment: Environment = Environment()
    durations: Mapping[str, float] = field(default_factory=dict)
    """Duration of each suite in seconds, by name."""
    times: tuple[Time, ...] = ()
    """Seconds of the comparisons and probes that were timed individually, which is impossible for
    those that share work."""
    suites: tuple[SuiteResult, ...] = ()
    cases: tuple[CaseInfo, ...] = ()
    checkpoint: CheckpointInfo | None = None
    """Checkpoint of a night's probes; None for other kinds of run."""
    selected: tuple[str, ...] = ()
    """Names of the selected cases; empty if all were run. For a session of tests its -m and -k
    expressions, or "everything"."""
    fault: str | None = None
    """Name of the planted fault (known bug); None without one."""
    tolerances: tuple[Mapping[str, str], ...] = ()
    """Tolerance table of this run: edge, kind, bound, reason."""
    seams: tuple[Mapping[str, Any], ...] = ()
    """Every known difference from the reference, with its value if it was measured."""
    spreads: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """By name of a group of gates: the standard deviations, over random rounding, of ln of its
    typical value (geometric mean) and of ln of its largest (`reports.verdict.levels.spreads_of`).
    """
    stability: Mapping[str, Any] = field(default_factory=dict)
    """Results of probes other than findings, by section of the page."""
    workload: Mapping[str, Any] | None = None
    """Description of the work that a bench timed; None for other kinds of run."""
    shard: Mapping[str, int] | None = None
    """Shard of a night: `index`, from 1 on, and `count`, the number of shards; None for a run that
    is not a shard."""
    plan: tuple[str, ...] = ()
    """Names of a night's parts, in order; for a shard, those of the whole night."""
    contract: tuple[ContractLine, ...] = ()
    """Measurements with a tolerance that the run planned (`parity.engine.measure.contract`)."""
    shards: tuple[str, ...] = ()
    """Ids of the shards that were merged into this night."""
    parts: tuple[PartInfo, ...] = ()
    """Parts of a night that an executor ran, in the order of the plan."""
    ports: tuple[Mapping[str, Any], ...] = ()
    """Result of each compared port, for the page (`reports.ports.document`)."""
    verdict: str = ""
    """Verdict when the run was stored, for lists; `gate` judges it again. From schema 5 on it is
    read from verdict.json, because a run is stored before it is judged."""
    files: Mapping[str, str] | None = field(default=None, compare=False)
    """SHA-256 of all files stored with run.json, by name; None before the run is stored, and for
    schemas without checksums."""
    migrated_from: int | None = None
    """Schema of run.json on disk if it is an older one, else None."""

    @property
    def whole(self) -> bool:
        """Whether the run has no planted fault, ran all cases, and all its suites are whole."""
        return (
            not (self.fault or self.selected)
            and bool(self.suites)
            and all(suite.whole for suite in self.suites)
        )

    @property
    def checksums(self) -> Mapping[str, str] | None:
        """SHA-256 by name of the files of a stored run; None if its schema had no checksums."""
        return None if (self.migrated_from or SCHEMA) < CHECKED else self.files or {}

    @property
    def subject(self) -> frozenset[str]:
        """Names of the ports that a run of kind PORT is about; empty for every other kind.

        Runs about different subjects are not history of one another.
        """
        return frozenset(s.name for s in self.suites) if self.kind is RunKind.PORT else frozenset()

    @property
    def without_megalodon(self) -> bool:
        """Whether the run is a session of tests (pytest) without a measurement of Megalodon.

        A session that measured Megalodon stores the kind of Megalodon's reference. Others store the
        kinds of their ports' originals, or None if they compared no port.
        """
        others = self.environment.reference.kind not in _OF_MEGALODON
        return self.kind is RunKind.PYTEST and others

    def shares_subject(self, other: Manifest) -> bool:
        """Return whether both runs are of one kind, and share a port or both have none."""
        alike = self.subject == other.subject or bool(self.subject & other.subject)
        return self.kind is other.kind and alike

    @classmethod
    def from_json(
        cls,
        document: Mapping[str, Any],
        environment: Environment | None = None,
        suites: tuple[SuiteResult, ...] = (),
    ) -> Manifest:
        """Read a document of the current schema.

        Args:
            document: Content of run.json.
            environment: Environment to use instead of the document's, if it was parsed before.
            suites: Suites to use instead of the document's; ignored without `environment`.

        Raises:
            StoreError: a field has a wrong type, or the run's kind is unknown.
        """
        kind_of(document)
        manifest = typed(cls, {n: value for n, value in document.items() if n != "environment"})
        if environment is not None:
            return replace(manifest, environment=environment, suites=suites)
        return replace(manifest, environment=Environment.from_json(document))

    def to_json(self) -> dict[str, Any]:
        """Return the document in the current schema, with the environment's fields at top level."""
        document: dict[str, Any] = {"schema": SCHEMA, **asdict(self)}
        document |= document.pop("environment")
        # `migrated_from` describes the file that was read, not the one to write.
        del document["migrated_from"]
        optional = ("workload", "shard", "plan", "contract", "shards", "parts", "ports", "verdict")
        optional = (*optional, "code", "times")
        return {n: value for n, value in document.items() if value or n not in optional}


LISTS = ("cases", "parts", "contract", "times")
"""Fields of `Manifest` with a list of objects, which a brief reading leaves empty."""
Record = TypeVar("Record")


def typed(record: type[Record], document: object) -> Record:
    """Return a dataclass made from a JSON object, with its fields checked at every depth.

    A field of the outermost object that is missing or null gets its default; inside nested objects
    null is a value. Names that are no field are ignored.

    Raises:
        StoreError: a field has a wrong type, or one without a default is missing.
    """
    if isinstance(document, Mapping):
        document = {name: value for name, value in document.items() if value is not None}
    try:
        return msgspec.convert(document, record)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        # JSON may escape half of a surrogate pair, which has no UTF-8.
        raise StoreError(f"{error}; restore the folder or delete it") from error


def read_manifest(folder: Path, brief: bool = False) -> Manifest:
    """Read run.json of a run, migrated to the current schema, and the verdict of verdict.json.

    Args:
        folder: Folder of the run.
        brief: Leave the fields named in `LISTS` empty, to list thousands of runs in less memory.

    Raises:
        StoreError: run.json is missing or damaged, or of an unknown schema or kind.
    """
    path = folder / MANIFEST
    content = read_bytes(path)
    manifest = parse_manifest(content, path, brief)
    return manifest if manifest.verdict else replace(manifest, verdict=_verdict(folder, content))


def _verdict(folder: Path, content: bytes) -> str:
    """Return the word in verdict.json; "" if it is missing, unreadable or of another run.json.

    A verdict.json belongs to the run only if it holds the checksum of `content`, the bytes of
    run.json, which in turn holds the checksums of all other files.
    """
    try:
        document = read_json(folder / VERDICT)
    except StoreError:
        return ""
    word = document.get("verdict")
    fits = document.get("run") == checksum(content) and is_sealed(document)
    return word if fits and isinstance(word, str) else ""


def _check_time(created: str, path: Path) -> None:
    # Runs are sorted by this text, so all must have the same form, in UTC.
    try:
        offset = datetime.fromisoformat(created).utcoffset()
    except ValueError:
        offset = None
    if offset != timedelta(0):
        raise StoreError(
            f"expected a time in UTC such as 2026-11-20T21:30:00+00:00 as 'created' in {path}, "
            f"received {created[:40]!r}; restore the folder or delete it"
        )


def parse_manifest(content: bytes, path: Path, brief: bool = False) -> Manifest:
    """Parse the bytes of a run.json and migrate it to the current schema, as `read_manifest` does.

    The verdict in verdict.json is not read. `path` is named in errors.
    """
    document = parse_json(content, path)
    check_seal(document, path)
    document = migrate(document, path)
    if not isinstance(document.get("id"), str) or not isinstance(document.get("created"), str):
        raise StoreError(
            f"expected the texts 'id' and 'created' in {path}; restore the folder or delete it"
        )
    _check_time(document["created"], path)
    try:
        manifest = Manifest.from_json(document)
    except StoreError as error:
        raise StoreError(f"{path}: {error}") from error
    return replace(manifest, **dict.fromkeys(LISTS, ())) if brief else manifest
