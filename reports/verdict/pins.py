"""Pinned baselines: what a night may have drifted from since somebody last looked.

Comparing with yesterday never sees one percent a night. A pinned baseline is a small text file in
the repository, one line per group of gates, so that pinning is a reviewed diff. There is one for
each machine and kind of reference somebody pinned a run of (`reports.provenance.host`). See
docs/verdicts.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from megalodon_jax.files import written_aside
from parity.engine.measurement import Key
from reports.provenance.host import fingerprint
from reports.store.manifest import Environment, Manifest
from reports.store.runs import Run
from reports.store.shared import address_of, is_address
from reports.verdict.history import Past
from reports.verdict.levels import Group, Level, levels, name_of

FOLDER = Path(__file__).parents[1] / "pinned"
"""Where pinned baselines of Megalodon lie, unless another folder is named."""
PORTS_FOLDER = "pinned"
"""What the folder of those of ports is called: it lies beside the folder of their runs."""
SCHEMA = 4
_UNUSABLE = (OSError, ValueError, TypeError, KeyError, AttributeError)


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
    """Return where pinned baselines for a run below `root` lie: ports have a folder per port.

    Of runs on shared storage, a port's are in the current folder: they are committed with its code.
    """
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
    """Return the ids of all pinned runs."""
    devices = {path.name.partition("-")[0] for path in (folder or FOLDER).glob("*-*.json")}
    return {pin.run for device in devices for pin in load(device, folder).pins}


def load(device: str | None, folder: Path | None = None) -> Pins:
    """Return the pinned baselines of a class of device.

    A file that cannot be read, or has another schema, is named and not used: the night goes on.
    """
    pins: list[Pin] = []
    unusable: list[str] = []
    root, device = folder or FOLDER, device or "unknown"
    for path in sorted({*root.glob(f"{device}.json"), *root.glob(f"{device}-*.json")}):
        try:
            pins.append(_read(path))
        except _UNUSABLE as error:
            unusable.append(
                f"{path.name} is not used: expected a pinned baseline of schema {SCHEMA} as `pin` "
                f"writes it, but reading it gave {error!r}; restore it with git, or pin a run again"
            )
    newest = sorted(pins, key=lambda pin: (pin.pinned, pin.run), reverse=True)
    return Pins(tuple(newest), tuple(unusable))


def _read(path: Path) -> Pin:
    document = json.loads(path.read_text(encoding="utf-8"))
    schema = document.pop("schema")
    if schema == 3:
        # It had another word for the date.
        document["pinned"], schema = document.pop("blessed"), SCHEMA
    if schema != SCHEMA:
        raise ValueError(f"schema {schema}")
    environment = Environment.from_json(document.pop("environment"))
    groups = {}
    for name, level in document.pop("groups").items():
        typical, worst = level.pop("spread")
        groups[tuple(name.split(" | "))] = Level(**level, spread=(typical, worst))
    return Pin(**document, environment=environment, groups=groups)


def write(pin: Pin, path: Path) -> None:
    """Write a pinned baseline aside and rename it: one line per group, in order. Raises OSError."""
    head = {"schema": SCHEMA} | {k: v for k, v in vars(pin).items() if k != "groups"}
    head["environment"] = environment = asdict(pin.environment)
    # The sentence for readers of the page is no part of what a reference is.
    del environment["reference"]["detail"], environment["reference"]["threads"]
    lines = [
        f"  {json.dumps(name_of(group))}: {json.dumps(asdict(level))}"
        for group, level in sorted(pin.groups.items())
    ]
    text = json.dumps(head, indent=1, ensure_ascii=False).removesuffix("\n}")
    body = ",\n".join(lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_aside(path) as aside:
        aside.write_text(f'{text},\n "groups": {{\n{body}\n }}\n}}\n', encoding="utf-8")
