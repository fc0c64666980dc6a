"""Pinned baselines: what a night may have drifted from since somebody last looked.

Comparing with yesterday never sees one percent a night. A pinned baseline is a small text file in
the repository, one line per group of gates, so that pinning is a reviewed diff. There is one for
each machine and kind of reference somebody pinned a run of (`reports.provenance.host`). See
docs/verdicts.md.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

from megalodon_jax.files import written_aside
from parity.engine.measurement import Key
from reports.provenance.host import fingerprint
from reports.store.manifest import Environment, Manifest
from reports.store.runs import Run
from reports.store.shared import address_of, is_address
from reports.text import label
from reports.verdict.history import Past
from reports.verdict.levels import KINDS, Group, Level, level_of, levels, name_of

FOLDER = Path(__file__).parents[1] / "pinned"
"""Where pinned baselines of Megalodon lie, unless another folder is named."""
PORTS_FOLDER = "pinned"
"""What the folder of those of ports is called: it lies beside the folder of their runs."""
SCHEMA = 4
_NAMED_RUN = re.compile(r'"run":\s*"([^"\\]+)"')
_UNUSABLE = (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError)
_UNUSABLE += (RecursionError,)
LARGEST = 2**24
"""Bytes of a file that is read as a pinned baseline: 200 times what one holds today."""


@dataclass(frozen=True)
class Pin:
    """One run that later ones are held against: who it is, why, and its levels."""

    run: str
    commit: str | None
    pinned: str
    """Date, UTC; empty for a run that nobody pinned, the oldest healthy one of its machine."""
    reason: str
    environment: Environment = field(default_factory=Environment)
    groups: Mapping[Group, Level] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str | None:
        """Of the machine it was made on and of the reference; None where that is unknown."""
        return fingerprint(self.environment)


@dataclass(frozen=True)
class Pins:
    """The pinned baselines of one class of device, newest first, and files that are none."""

    pins: tuple[Pin, ...] = ()
    unusable: tuple[str, ...] = ()
    """One sentence for each file that was not used, such as one of another schema."""


def home(root: Path, manifest: Manifest) -> Path:
    """Return where pinned baselines for a run below `root` lie: ports have a folder per port, and
    tests of ports one of their own: nights of Megalodon are nothing to hold them against.

    Of runs on shared storage, a port's are in the current folder: they are committed with its code.
    """
    if manifest.of_ports_alone:
        return beside(root) / PORTS_FOLDER / "(pytest)"
    if not manifest.subject:
        return FOLDER
    names = "+".join(re.sub(r"[^A-Za-z0-9._-]+", "-", name) for name in sorted(manifest.subject))
    return beside(root) / PORTS_FOLDER / names


def beside(root: Path) -> Path:
    """Return the folder that a port's pinned baselines are committed in."""
    return Path().resolve() if is_address(address_of(root)) else root.resolve().parent


def pin_of(run: Run, past: Mapping[Key, Past], reason: str = "", pinned: str = "") -> Pin:
    """Return the pinned baseline that pins `run`.

    Of a gate that does not repeat it pins the largest recent value: whoever pins accepts what
    was seen, and an error that jumps between two modes has no median to hold it to.
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
    """Return where the pinned baseline of a machine and kind of reference lies."""
    environment = pin.environment
    kind = environment.reference.kind or "absent"
    machine = fingerprint(environment, versions=False) or "unknown"
    name = f"{environment.device.kind or 'unknown'}-{machine}-{kind}.json"
    return (folder or FOLDER) / name


def read(path: Path) -> Pin | None:
    """Return the pinned baseline in a file, None where there is none that can be used."""
    try:
        return _read(path)
    except _UNUSABLE:
        return None


def pinned_ids(folder: Path | None = None) -> set[str]:
    """Return the ids of all pinned runs, those of files that are not used included.

    A damaged file protects the run it names: the file can be restored, a deleted run cannot.
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
    """Return the pinned baselines of a class of device.

    A file that cannot be read, or has another schema, is named and not used: the night goes on.
    """
    pins: list[Pin] = []
    unusable: list[str] = []
    root, device = folder or FOLDER, device or "unknown"
    # The name of a device comes from a stored run, and is no pattern.
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
    newest = sorted(pins, key=lambda pin: (pin.pinned, pin.run), reverse=True)
    return Pins(tuple(newest), tuple(unusable))


def _text(path: Path) -> str:
    """Return the text of a file; raise ValueError where it is no file or too large for a pin."""
    # Opening a pipe would wait for a writer.
    if not path.is_file():
        raise ValueError("it is no regular file")
    if (size := path.stat().st_size) > LARGEST:
        raise ValueError(f"it has {size:,} bytes, and a pinned baseline at most {LARGEST:,}")
    return path.read_text(encoding="utf-8")


def _read(path: Path) -> Pin:
    """Return the pinned baseline in a file; raise one of `_UNUSABLE` where it is not whole."""
    document = json.loads(_text(path), object_pairs_hook=_without_doubles)
    schema = document.pop("schema")
    if (digest := document.pop("digest", None)) is not None and digest != _digest(document):
        raise ValueError("its content does not fit its digest: it was changed after it was written")
    if schema == 3:
        # It had another word for the date.
        document["pinned"], schema = document.pop("blessed"), SCHEMA
    if schema != SCHEMA:
        raise ValueError(f"schema {schema}")
    for name in ("run", "pinned", "reason"):
        if not isinstance(document[name], str) or not document[name].strip():
            raise ValueError(f"{name} is {document[name]!r}, which is no text")
    date.fromisoformat(document["pinned"])
    if not isinstance(document["commit"], str | None):
        raise ValueError(f"commit is {document['commit']!r}")
    environment = Environment.from_json(document.pop("environment"))
    for name in ("host", "flags", "versions"):
        if not all(isinstance(value, str) for value in getattr(environment, name).values()):
            raise ValueError(f"{name} holds what is no text")
    groups = {_group(name): level_of(level) for name, level in document.pop("groups").items()}
    if not groups:
        raise ValueError("it holds no level")
    return Pin(**document, environment=environment, groups=groups)


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; raise ValueError where it has a name twice, of which one would win."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is there twice in one object")
    return found


def _digest(document: Mapping[str, Any]) -> str:
    """Return a hash of all fields but the schema and the digest itself."""
    content = {n: value for n, value in document.items() if n not in ("schema", "digest")}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _group(name: str) -> Group:
    # A case may be called anything; the other three are words of ours.
    parts = name.rsplit(" | ", 3)
    if len(parts) != 4 or not all(parts) or parts[2] not in KINDS:
        raise ValueError(f"the group {name!r} is not 'case | comparison | kind | metric'")
    return parts[0], parts[1], parts[2], parts[3]


def write(pin: Pin, path: Path) -> None:
    """Write a pinned baseline aside and rename it: one line per group, in order. Raises OSError."""
    head = {"schema": SCHEMA} | {k: v for k, v in vars(pin).items() if k != "groups"}
    head["environment"] = environment = asdict(pin.environment)
    # The sentence for readers of the page is no part of what a reference is.
    del environment["reference"]["detail"], environment["reference"]["threads"]
    levels_by_name = {name_of(group): asdict(it) for group, it in sorted(pin.groups.items())}
    # Through JSON, where a tuple becomes the list that is read again.
    head["digest"] = _digest(json.loads(json.dumps(head | {"groups": levels_by_name})))
    lines = [f"  {json.dumps(name)}: {json.dumps(level)}" for name, level in levels_by_name.items()]
    text = json.dumps(head, indent=1, ensure_ascii=False).removesuffix("\n}")
    body = ",\n".join(lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_aside(path) as aside:
        aside.write_text(f'{text},\n "groups": {{\n{body}\n }}\n}}\n', encoding="utf-8")
