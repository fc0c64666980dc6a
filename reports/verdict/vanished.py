"""Finds work that earlier runs did and a run does not plan, unless it was retired on purpose.

The contract of a run follows from its own code, so it does not show that a case was deleted from
that code. Earlier runs do. A group of gates that they measured stays expected until somebody
retires it, in a text file beside the pinned runs that is reviewed as a diff. Source:
docs/verdicts.md "Retired work".
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from megalodon_jax.files import written_aside
from parity.engine.measure.measurement import Kind, Verdict
from parity.port_tolerances import PortEdge
from reports.store.manifest import AHEAD, Manifest
from reports.store.runs import Run
from reports.store.schema import RunKind
from reports.subject import main
from reports.text import label

FILE = "retired.json"
"""Name of the file of retired (no longer expected) work, in the folder of pinned runs."""
SCHEMA = 1
PLANNED = frozenset((RunKind.NIGHTLY, RunKind.PORT))
"""Kinds of run whose work later runs of the kind must repeat; tests come and go with their code."""
_UNUSABLE = (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError)

LONGEST = 10_000
"""Largest number of characters of a name that is shown in full, so that it can be copied."""

Group = tuple[str, str, str]
"""Case, edge and kind of quantity of gates. For ports, whose stages change, the kind is "gradient"
or "" for all other gates."""


@dataclass(frozen=True, slots=True)
class Seen:
    """The newest earlier run that did a piece of work: a suite, or a `Group` of gates."""

    run: str
    created: str
    """Start of the run, ISO 8601 in UTC."""
    suite: str = ""
    """Suite to which a group of gates belongs; empty if the work is itself a suite."""


@dataclass(frozen=True)
class Earlier:
    """Suites and groups (`Group`) of gates of complete earlier runs.

    Each is given with the newest run that has it.
    """

    suites: Mapping[str, Seen] = field(default_factory=dict)
    groups: Mapping[Group, Seen] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Retired:
    """Suites and groups of gates that a person declared no longer expected.

    Attributes:
        name: name of the work, as a person gave it to the command `retire`.
        until: start of the run that lacked the work, ISO 8601 in UTC. The work is expected again
            once a later run has done it.
        reason: why the work was removed, for a reviewer.
        suites: retired suites.
        groups: retired groups of gates (same case, edge and kind).
    """

    name: str
    until: str
    reason: str
    suites: tuple[str, ...] = ()
    groups: tuple[Group, ...] = ()

    def covers(self, work: str | Group, seen: Seen) -> bool:
        """Return whether this entry retires `work`, a suite or a group of gates.

        `seen` is the newest run that did the work: if it is not older than `until`, the work is
        expected again.
        """
        return work in (*self.suites, *self.groups) and _time(seen.created) < _time(self.until)


@dataclass(frozen=True)
class Vanished:
    """Work that earlier runs did, that this run does not plan, and that nobody retired.

    `retired` holds all retired work that was taken into account.
    """

    suites: Mapping[str, Seen] = field(default_factory=dict)
    groups: Mapping[Group, Seen] = field(default_factory=dict)
    retired: tuple[Retired, ...] = ()

    def named(self, name: str) -> tuple[tuple[str, ...], tuple[Group, ...]]:
        """Return the vanished suites and groups of gates that a name given by a person selects.

        A name is that of a suite, case, edge or kind, as verdicts show it, or several of them
        joined by " | ", all of which a group must have.
        """
        parts = {*name.split(" | ")}

        def fits(*names: str) -> bool:
            shown = {label(each, LONGEST) for each in names}
            return name in shown or parts <= shown

        suites = tuple(suite for suite in self.suites if fits(suite))
        groups = (group for group, seen in self.groups.items() if fits(*group, seen.suite))
        return suites, tuple(groups)


def comparable(old: Manifest, new: Manifest) -> bool:
    """Return whether the run `new` must do the work that the earlier run `old` did.

    The earlier run must be complete, and have the same class of device and, except for ports, the
    same kind of reference; otherwise its gates are different ones.
    """
    here, there = new.environment, old.environment
    return (
        old.whole
        and new.kind in PLANNED
        and here.device.kind == there.device.kind
        # For ports, `reference.kind` lists the kinds of all originals, which may change from run to
        # run.
        and (new.kind is RunKind.PORT or here.reference.kind == there.reference.kind)
    )


def group_of(kind_of_run: RunKind, case: str, edge: str, kind: str) -> Group:
    """Return the group of gates that a gate belongs to; later runs must have a gate of each group.

    Parts that may differ between runs are replaced: in a night the name of the committed
    checkpoint's case by that of a given one, in a run of ports the kind of the quantity (`Kind`) by
    "" unless it is a gradient.
    """
    if kind_of_run is RunKind.NIGHTLY and case == main().committed:
        # A night of another checkpoint has its own name for the case of the committed one.
        case = main().given
    if kind_of_run is RunKind.PORT and kind != Kind.GRADIENT.value:
        kind = ""
    return case, edge, kind


def vanished(run: Run, earlier: Earlier, retired: Sequence[Retired]) -> Vanished:
    """Return the work of earlier runs that a run does not plan and that nobody retired.

    Empty for a run of selected cases, and for a kind of run that is not in `PLANNED`.
    """
    manifest = run.manifest
    if manifest.selected or manifest.kind not in PLANNED:
        return Vanished()
    suites = {suite.name for suite in manifest.suites}
    groups = {
        group_of(manifest.kind, line.case, line.edge, line.kind) for line in manifest.contract
    }
    # For a run stored before there were contracts, the measured gates count as planned.
    groups |= {
        group_of(manifest.kind, m.case, m.edge, Kind(m.kind).value)
        for m in run.measurements
        if m.verdict is not Verdict.INFO
    }
    off = {
        str(port.get("title")): frozenset(port.get("switched_off") or ()) for port in manifest.ports
    }

    def expected(work: str | Group, seen: Seen) -> bool:
        return not any(each.covers(work, seen) for each in retired)

    def switched_off(group: Group) -> bool:
        case, edge, kind = group
        parts = off.get(case, frozenset())
        narrow = edge == PortEdge.PORTBF16_PORT64.value
        gradient = kind == Kind.GRADIENT.value
        return (narrow and "bfloat16" in parts) or (gradient and "gradients" in parts)

    return Vanished(
        {
            name: seen
            for name, seen in earlier.suites.items()
            if name not in suites and expected(name, seen)
        },
        {
            group: seen
            for group, seen in earlier.groups.items()
            if group not in groups and not switched_off(group) and expected(group, seen)
        },
        tuple(retired),
    )


def read_retired(folder: Path) -> tuple[tuple[Retired, ...], str]:
    """Return the retired work that a file in `folder` lists, and why the file is unusable or "".

    An unusable file retires nothing.
    """
    path = folder / FILE
    try:
        if not path.exists():
            return (), ""
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["schema"] != SCHEMA:
            raise ValueError(f"schema {document['schema']!r}")
        found = tuple(map(_entry, document["retired"]))
    except _UNUSABLE as error:
        why = (
            f"{FILE} is not used: expected what `retire` writes (schema {SCHEMA}), but reading it "
            f"gave {label(repr(error), 300)}; restore it with git"
        )
        return (), why
    return found, ""


def _entry(entry: Mapping[str, Any]) -> Retired:
    suites = tuple(entry["suites"])
    groups = tuple(_group(group) for group in entry["groups"])
    found = Retired(entry["name"], entry["until"], entry["reason"], suites, groups)
    texts = (found.name, found.until, found.reason, *suites)
    if not all(isinstance(text, str) and text.strip() for text in texts):
        raise ValueError(f"expected texts that are not empty, received {entry}")
    # A time in the future would also retire work that later runs measure and then lose.
    if _time(found.until) > datetime.now(UTC) + timedelta(hours=AHEAD):
        raise ValueError(
            "expected as 'until' the time of the run that lacks the work, not in the future, "
            f"received {found.until}"
        )
    return found


def _group(parts: Sequence[Any]) -> Group:
    case, edge, kind = parts
    if not all(isinstance(part, str) for part in parts) or not case or not edge:
        raise ValueError(f"expected case, comparison and kind, received {parts}")
    return case, edge, kind


def write_retired(folder: Path, retired: Sequence[Retired]) -> Path:
    """Write the retired work of a folder of pinned runs; replace the file atomically.

    Raises:
        OSError: the file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    document = {"schema": SCHEMA, "retired": [asdict(each) for each in retired]}
    with written_aside(folder / FILE) as aside:
        aside.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", "utf-8")
    return folder / FILE


def _time(text: str) -> datetime:
    """Return the time in an ISO 8601 text; a text without a time zone is in UTC."""
    time = datetime.fromisoformat(text)
    return time if time.tzinfo else time.replace(tzinfo=UTC)
