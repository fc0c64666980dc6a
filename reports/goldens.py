"""The blessed run, pinned: what a night may have drifted from since somebody last looked.

Comparing with yesterday never sees one percent a night. A golden is a small text file in the
repository, one line per group of gates, so that blessing is a reviewed diff. Source:
spec/reports.md "Comparability" and `bless`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from parity.results import Kind, Measurement
from parity.tolerances import DRIFT_SHARE, DRIFT_TYPICAL, DRIFT_WORST
from reports.history import Key, Past
from reports.schema import StoreError
from reports.store import Run

FOLDER = Path(__file__).parent / "goldens"
"""Where goldens lie, unless another folder is named."""
SCHEMA = 2
RECENT = 7
"""Newest values that stand for a gate that does not repeat, today's included."""
# A scalar's error may be zero by luck: only what averages over many elements has a level.
# A ratio of two errors trembles with both, and both have levels of their own.
_RATIOS = ("error_over_reference",)
_KINDS = (Kind.LOGITS, Kind.BLOCK, Kind.GRADIENT, Kind.STATE, Kind.TRAJECTORY)

Group = tuple[str, str, str, str]
"""Case, edge, kind, metric."""


@dataclass(frozen=True, slots=True)
class Level:
    """Where the gates of one group stand: their geometric mean and the largest of them."""

    work: str
    """Hash of their identities: levels of other work are not compared."""
    gates: int
    typical: float
    worst: float


@dataclass(frozen=True)
class Golden:
    """One blessed run: who it is, why, and its levels."""

    run: str
    commit: str | None
    blessed: str
    """Date, UTC."""
    reason: str
    device: Mapping[str, Any]
    versions: Mapping[str, str]
    reference: Mapping[str, Any]
    settings: Mapping[str, Any]
    """Threads and flags, which say in which order sums are taken: other ones have other levels."""
    groups: Mapping[Group, Level] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Drift:
    """One group that left its blessed level; `before` and `now` are means or worst values."""

    group: Group
    what: str
    """`typical` or `worst`."""
    before: float
    now: float
    limit: float
    """The largest ratio, and one over the smallest, that passes."""

    @property
    def grew(self) -> bool:
        """Whether the error became larger."""
        return self.now > self.before


Settle = Callable[[Sequence[float]], float]


def levels(
    rows: Iterable[Measurement], past: Mapping[Key, Past], settle: Settle = statistics.median
) -> dict[Group, Level]:
    """Return the level of every group of gates of a run.

    A gate that does not repeat counts with what `settle` makes of its `RECENT` newest values, and
    every gate with at least `DRIFT_SHARE` of its tolerance.
    """
    groups: dict[Group, list[Measurement]] = {}
    for m in rows:
        gated = m.tolerance > 0 and math.isfinite(m.value)
        if gated and m.kind in _KINDS and m.metric not in _RATIOS:
            groups.setdefault((m.case, m.edge, m.kind.value, m.metric), []).append(m)
    return {group: _level(gates, past, settle) for group, gates in sorted(groups.items())}


def _level(gates: list[Measurement], past: Mapping[Key, Past], settle: Settle) -> Level:
    def value(m: Measurement) -> float:
        seen = past.get((m.case, m.edge, m.quantity, m.metric), Past()).values
        return max(settle((*seen[1 - RECENT :], m.value)), DRIFT_SHARE * m.tolerance)

    values = [value(m) for m in gates]
    identities = repr(sorted(m.identity for m in gates)).encode()
    return Level(
        work=hashlib.sha256(identities).hexdigest()[:8],
        gates=len(values),
        typical=_rounded(statistics.geometric_mean(values)),
        worst=_rounded(max(values)),
    )


def _rounded(value: float) -> float:
    # Three digits: the diff of a blessing shows what moved, not what trembled.
    return float(f"{value:.2e}")


def drifts(now: Mapping[Group, Level], golden: Golden) -> list[Drift]:
    """Return every group that is further from its blessed level than the tolerance table allows."""
    limits = (("typical", DRIFT_TYPICAL), ("worst", DRIFT_WORST))
    found: list[Drift] = []
    for group, level in now.items():
        pinned = golden.groups.get(group)
        if pinned is None or pinned.work != level.work:
            continue
        for what, limit in limits:
            before, after = getattr(pinned, what), getattr(level, what)
            if not 1 / limit <= after / before <= limit:
                found.append(Drift(group, what, before, after, limit))
                break
    return found


def settings_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run."""
    return {"threads": manifest.get("threads"), **(manifest.get("flags") or {})}


def other_settings(golden: Golden, manifest: Mapping[str, Any]) -> str:
    """Name the settings that differ from those of the blessed run; empty where none does.

    A single thread in place of two moved levels of gradients by up to 1.28, and a package's new
    version is what a golden is for: only the former makes levels incomparable.
    """
    now = settings_of(manifest)
    return ", ".join(
        f"{name} {golden.settings.get(name)!r} → {now.get(name)!r}"
        for name in sorted({*now, *golden.settings})
        if golden.settings.get(name) != now.get(name)
    )


def comparable(now: Mapping[Group, Level], golden: Golden) -> int:
    """Return how many groups have a blessed level of the same work."""
    return sum(g in golden.groups and golden.groups[g].work == now[g].work for g in now)


def golden_of(run: Run, past: Mapping[Key, Past], reason: str, blessed: str) -> Golden:
    """Return the golden that pins `run`.

    Of a gate that does not repeat it pins the largest recent value: whoever blesses accepts what
    was seen, and an error that jumps between two modes has no median to hold it to.
    """
    manifest = run.manifest
    reference = manifest.get("reference") or {}
    return Golden(
        run=run.id,
        commit=manifest.get("commit"),
        blessed=blessed,
        reason=reason,
        device=manifest.get("device") or {},
        versions=manifest.get("versions") or {},
        reference={name: reference.get(name) for name in ("kind", "commit")},
        settings=settings_of(manifest),
        groups=levels(run.measurements, past, max),
    )


def file_of(manifest: Mapping[str, Any], folder: Path | None = None) -> Path:
    """Return where the golden of a run's class of device lies."""
    return (folder or FOLDER) / f"{(manifest.get('device') or {}).get('kind', 'unknown')}.json"


def blessed(folder: Path | None = None) -> set[str]:
    """Return the ids of all blessed runs."""
    found = set()
    for path in sorted((folder or FOLDER).glob("*.json")):
        golden = load({"device": {"kind": path.stem}}, folder)
        if golden is not None:
            found.add(golden.run)
    return found


def load(manifest: Mapping[str, Any], folder: Path | None = None) -> Golden | None:
    """Return the golden that a run is held against, None where nobody blessed one yet.

    Raises:
        StoreError: the file is damaged or of another schema.
    """
    path = file_of(manifest, folder)
    if not path.is_file():
        return None
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document.pop("schema") != SCHEMA:
            raise ValueError(f"another schema than {SCHEMA}")
        groups = document.pop("groups")
        parsed = {tuple(name.split(" | ")): Level(**level) for name, level in groups.items()}
        return Golden(**document, groups=parsed)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise StoreError(
            f"expected a golden as `bless` writes it in {path}, but reading it gave: {error!r}; "
            "restore it with git, or bless a run again"
        ) from error


def write(golden: Golden, path: Path) -> None:
    """Write a golden aside and rename it: one line per group, in order. Raises OSError."""
    head = {"schema": SCHEMA} | {k: v for k, v in vars(golden).items() if k != "groups"}
    lines = [
        f"  {json.dumps(' | '.join(group))}: {json.dumps(asdict(level))}"
        for group, level in sorted(golden.groups.items())
    ]
    text = json.dumps(head, indent=1, ensure_ascii=False).removesuffix("\n}")
    body = ",\n".join(lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.partial")
    try:
        aside.write_text(f'{text},\n "groups": {{\n{body}\n }}\n}}\n', encoding="utf-8")
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
