"""Pinned baselines: the error levels of a run that somebody reviewed, as the reference for drift.

Comparing with yesterday never detects one percent a night. A pinned baseline is a small text file
in the repository with one line per group of gates, so pinning is a reviewed diff. There is one file
for each machine and kind of reference (`reports.provenance.host`). See docs/verdicts.md.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

from megalodon_jax.files import written_aside
from parity.engine.measure.measurement import Key
from reports.provenance.host import fingerprint
from reports.store.manifest import Environment, Manifest
from reports.store.runs import Run
from reports.store.shared import address_of, is_address
from reports.text import label
from reports.verdict.history import Past
from reports.verdict.levels import KINDS, Group, Level, level_of, levels, name_of

FOLDER = Path(__file__).parents[1] / "pinned"
"""Default folder of the pinned baselines of Megalodon."""
PORTS_FOLDER = "pinned"
"""Name of the folder with pinned baselines of ports, beside the folder of their runs."""
SCHEMA = 4
LONGEST_NAME = 120
"""Longest name of a folder of ports, in characters; a longer one is cut and a hash is added."""
NAME_BYTES = 255
"""Longest file name, in bytes, that file systems accept."""
_NAMED_RUN = re.compile(r'"run":\s*"([^"\\]+)"')
_UNUSABLE = (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError)
_UNUSABLE += (RecursionError,)
LARGEST = 2**24
"""Largest file, in bytes, that is read as a pinned baseline; today's files have 1/200 of that."""


@dataclass(frozen=True)
class Pin:
    """Pinned baseline: error levels of one run, with which later ones are compared, and why."""

    run: str
    commit: str | None
    pinned: str
    """Date, UTC; empty for an anchor, which is chosen automatically."""
    reason: str
    environment: Environment = field(default_factory=Environment)
    groups: Mapping[Group, Level] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str | None:
        """Fingerprint (hash) of the machine and reference of the pinned run; None if unknown."""
        return fingerprint(self.environment)


@dataclass(frozen=True)
class Pins:
    """Pinned baselines of one class of device, newest first, and the files that are unusable."""

    pins: tuple[Pin, ...] = ()
    unusable: tuple[str, ...] = ()
    """One sentence for each file that was not used, such as a file of another schema."""


def home(root: Path, manifest: Manifest) -> Path:
    """Return the folder of pinned baselines for a run in `root`, a folder of runs.

    For runs of Megalodon it is `FOLDER`. Each set of ports that a run compares has its own folder,
    beside the folder of the runs. Test sessions without Megalodon have a separate one, because
    their levels are not comparable with those of Megalodon's nights. If the runs are on shared
    storage, the folder of ports is in the current folder, since it is committed with the ports'
    code.
    """
    if manifest.without_megalodon:
        return beside(root) / PORTS_FOLDER / "(pytest)"
    if not manifest.subject:
        return FOLDER
    return beside(root) / PORTS_FOLDER / _folder_name(sorted(manifest.subject))


def _folder_name(ports: Sequence[str]) -> str:
    """Return a folder name that is unique to these ports.

    A hash of the names is appended if they contain characters other than letters, digits, dots,
    dashes and underscores, begin with a dot, or are too long together.
    """
    plain = _plain_name(ports)
    fits = all(re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", name) for name in ports)
    if fits and len(plain) <= LONGEST_NAME:
        return plain
    digest = hashlib.sha256("\0".join(ports).encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{plain[:LONGEST_NAME].lstrip('.')}~{digest}"


def _plain_name(ports: Sequence[str]) -> str:
    return "+".join(re.sub(r"[^A-Za-z0-9._-]+", "-", name) for name in ports)


def old_home(root: Path, manifest: Manifest) -> Path | None:
    """Return the folder in which earlier versions pinned a run's ports.

    None if it is `home`, if the run has no ports, or if the name is not usable. Other ports may
    have the same old folder, as "a b" and "a-b" do.
    """
    plain = _plain_name(sorted(manifest.subject))
    folder = beside(root) / PORTS_FOLDER / plain
    # A name such as ".." would lead out of the folder, and one that is too long cannot exist.
    safe = bool(plain.strip(".")) and len(plain) <= NAME_BYTES
    return folder if safe and manifest.subject and folder != home(root, manifest) else None


def pins_of(root: Path, manifest: Manifest) -> Pins:
    """Return the pinned baselines for a run: of its ports and class of device, newest first.

    Earlier versions may have pinned other ports in the same folder. Such a pin is left out: it has
    no level of this run, and must not count as a pin of its machine.
    """
    device, old = manifest.environment.device.kind, old_home(root, manifest)
    found = [load(device, home(root, manifest)), *([load(device, old)] if old is not None else [])]
    pins = [pin for each in found for pin in each.pins]
    if manifest.subject:
        pins = [pin for pin in pins if is_of(pin, manifest)]
    return Pins(_newest_first(pins), tuple(why for each in found for why in each.unusable))


def is_of(pin: Pin, manifest: Manifest) -> bool:
    """Return whether a pinned baseline has error levels of one of the ports that a run compares."""
    # The title of a port is its name, or its name and its case.
    return any(
        case == port or case.startswith(f"{port}/")
        for case, *_ in pin.groups
        for port in manifest.subject
    )


def ids_of(root: Path, manifest: Manifest) -> set[str]:
    """Return the ids of all pinned runs in the folders for a run: `home` and `old_home`."""
    old = old_home(root, manifest)
    return pinned_ids(home(root, manifest)) | (pinned_ids(old) if old is not None else set())


def _newest_first(pins: Sequence[Pin]) -> tuple[Pin, ...]:
    return tuple(sorted(pins, key=lambda pin: (pin.pinned, pin.run), reverse=True))


def retired_home(root: Path, manifest: Manifest) -> Path:
    """Return the folder of the file of retired (no longer expected) work, for a run in `root`.

    All ports share one folder.
    """
    return beside(root) / PORTS_FOLDER if manifest.subject else FOLDER


def beside(root: Path) -> Path:
    """Return the parent of `root`, a folder of runs; for shared storage, the current folder.

    It contains `PORTS_FOLDER`.
    """
    return Path().resolve() if is_address(address_of(root)) else root.resolve().parent


def pin_of(run: Run, past: Mapping[Key, Past], reason: str = "", pinned: str = "") -> Pin:
    """Return the pinned baseline of `run`.

    For a gate that does not repeat, the pin has the largest recent value: a person who pins accepts
    all values seen so far, and an error that alternates between two values exceeds their median.

    Args:
        run: The run to pin.
        past: Earlier values of the gates that do not repeat.
        reason: Why these levels are right; empty for an anchor.
        pinned: Date, UTC; empty for an anchor.
    """
    manifest = run.manifest
    reference = replace(manifest.environment.reference, detail="")
    return Pin(
        run=run.id,
        commit=manifest.commit,
        pinned=pinned,
        reason=reason,
        environment=replace(manifest.environment, reference=reference),
        groups=levels(run.measurements, past, manifest.spreads, max),
    )


def file_of(pin: Pin, folder: Path | None = None) -> Path:
    """Return the path of a pin's file in `folder`: one per machine and kind of reference.

    The machine is identified without versions, so a pin after an update replaces the earlier one.
    None for `folder` is `FOLDER`.
    """
    environment = pin.environment
    kind = environment.reference.kind or "absent"
    machine = fingerprint(environment, versions=False) or "unknown"
    name = f"{environment.device.kind or 'unknown'}-{machine}-{kind}.json"
    return (folder or FOLDER) / name


def read(path: Path) -> Pin | None:
    """Return the pinned baseline in a file, or None if it is missing or unusable."""
    try:
        return _read(path)
    except _UNUSABLE:
        return None


def pinned_ids(folder: Path | None = None) -> set[str]:
    """Return the ids of all pinned runs in a folder (None: `FOLDER`), including unusable files.

    A damaged file still protects the run it names: the file can be restored, a deleted run cannot.
    """
    ids: set[str] = set()
    for path in (folder or FOLDER).glob("*.json"):
        try:
            text = _text(path)
        except _UNUSABLE:
            continue
        pin = read(path)
        ids |= {pin.run} if pin else set(_NAMED_RUN.findall(text))
    return ids


def load(device: str | None, folder: Path | None = None) -> Pins:
    """Return the pinned baselines of a class of device in a folder (None: `FOLDER`).

    A file that cannot be read or has another schema is reported in `unusable`; it raises no error.

    Args:
        device: Class of device, cpu or cuda; None if unknown, for the pins of unknown devices.
        folder: Folder of the pins.
    """
    pins: list[Pin] = []
    unusable: list[str] = []
    root, device = folder or FOLDER, device or "unknown"
    # The device name comes from a stored run and must not act as a glob pattern.
    for path in sorted(root.glob("*.json")):
        if path.stem != device and not path.name.startswith(f"{device}-"):
            continue
        try:
            pins.append(_read(path))
        except _UNUSABLE as error:
            unusable.append(
                f"{label(path.name, 120)} is not used: expected a pinned baseline of schema "
                f"{SCHEMA} as `pin` writes it, but reading it gave {label(repr(error), 300)}; "
                "restore it with git, or pin a run again"
            )
    return Pins(_newest_first(pins), tuple(unusable))


def _text(path: Path) -> str:
    """Return the text of a file; raise ValueError if it is not a regular file or is too large."""
    # Opening a named pipe would block until a writer comes.
    if not path.is_file():
        raise ValueError("it is not a regular file")
    if (size := path.stat().st_size) > LARGEST:
        raise ValueError(f"it has {size:,} bytes, and a pinned baseline at most {LARGEST:,}")
    return path.read_text(encoding="utf-8")


def _read(path: Path) -> Pin:
    """Return the pinned baseline in a file; raise one of `_UNUSABLE` if it is invalid."""
    document = json.loads(_text(path), object_pairs_hook=_without_doubles)
    schema = document.pop("schema")
    if (digest := document.pop("digest", None)) is not None and digest != _digest(document):
        raise ValueError("its content does not fit its digest: it was changed after it was written")
    if schema == 3:
        # Schema 3 called the date `blessed`.
        document["pinned"], schema = document.pop("blessed"), SCHEMA
    if schema != SCHEMA:
        raise ValueError(f"schema {schema}")
    for name in ("run", "pinned", "reason"):
        if not isinstance(document[name], str) or not document[name].strip():
            raise ValueError(f"{name} is {document[name]!r}: expected a text that is not empty")
    date.fromisoformat(document["pinned"])
    if not isinstance(document["commit"], str | None):
        raise ValueError(f"commit is {document['commit']!r}: expected a text or null")
    environment = Environment.from_json(document.pop("environment"))
    groups = {_group(name): level_of(level) for name, level in document.pop("groups").items()}
    if not groups:
        raise ValueError("it holds no level")
    return Pin(**document, environment=environment, groups=groups)


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; raise ValueError on a repeated name, of which only one would count."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name occurs twice in one object")
    return found


def _digest(document: Mapping[str, Any]) -> str:
    """Return a hash of all fields except the schema and the digest itself."""
    content = {n: value for n, value in document.items() if n not in ("schema", "digest")}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _group(name: str) -> Group:
    # The name of a case may contain the separator; the other three parts never do.
    parts = name.rsplit(" | ", 3)
    if len(parts) != 4 or not all(parts) or parts[2] not in KINDS:
        raise ValueError(f"the group {name!r} is not 'case | comparison | kind | metric'")
    return parts[0], parts[1], parts[2], parts[3]


def write(pin: Pin, path: Path) -> None:
    """Write a pinned baseline, one line per group of gates, sorted; replace the file atomically.

    Raises:
        OSError: the file cannot be written.
    """
    head = {"schema": SCHEMA} | {k: v for k, v in vars(pin).items() if k != "groups"}
    head["environment"] = environment = asdict(pin.environment)
    # `detail` and `threads` do not identify a reference.
    del environment["reference"]["detail"], environment["reference"]["threads"]
    levels_by_name = {name_of(group): asdict(it) for group, it in sorted(pin.groups.items())}
    # Digest of the JSON round trip, in which tuples become lists, as in `_read`.
    head["digest"] = _digest(json.loads(json.dumps(head | {"groups": levels_by_name})))
    lines = [f"  {json.dumps(name)}: {json.dumps(level)}" for name, level in levels_by_name.items()]
    text = json.dumps(head, indent=1, ensure_ascii=False).removesuffix("\n}")
    body = ",\n".join(lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_aside(path) as aside:
        aside.write_text(f'{text},\n "groups": {{\n{body}\n }}\n}}\n', encoding="utf-8")
