"""What Transformers' DeepSeek-V3 answers for a case: live, or from the committed recordings."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from parity import recordings
from parity.deepseek_v3 import reference
from parity.deepseek_v3.cases import CASES, Case, by_name
from parity.deepseek_v3.checkpoint import stacked
from parity.engine.quantity import LOSS, Quantity, Role
from parity.port import OUTPUT, Arrays

FOLDER = Path(__file__).parents[1] / "data" / "deepseek_v3" / "recordings"
RENEW = "megalodon-numerics parity record --subject mla-moe"
RECORDED64 = ("logits", OUTPUT)
"""What recordings hold in float64 as well; everything would be twice the size."""


@dataclass(frozen=True)
class Answer:
    """What the reference said of a case: float32 arrays, what it gave in float64, who it was."""

    float32: Arrays
    float64: Arrays
    chosen: dict[str, np.ndarray]
    """Experts of each token by `layers.{i}`, (T, k)."""
    kind: str
    """"live" or "recorded"."""
    versions: dict[str, str]
    refusal: str
    """What it says when it is cast to float64 as it is; empty where it runs."""


def live(case: Case) -> Answer:
    """Run the reference on a case.

    Raises:
        ReferenceUnavailableError: it cannot run here.
    """
    fields = case.config.to_hf()
    narrow = reference.run(fields, case.weights, case.ids)
    wide = reference.run(fields, case.weights, case.ids, "float64", wide=True)
    return Answer(
        named(narrow),
        named(wide),
        {n.removesuffix(".chosen"): a for n, a in narrow.items() if n.endswith(".chosen")},
        kind="live",
        versions=reference.provenance()["versions"],
        refusal=reference.float64_refusal(fields, case.weights, case.ids),
    )


def recorded(case: Case, folder: Path = FOLDER) -> Answer:
    """Return what the reference said when it was recorded.

    Raises:
        RecordingError: there is no recording of exactly this work by a version known here.
    """
    path = folder / f"{case.name}.safetensors"
    made = recordings.read_provenance(path, RENEW)
    version = str(made.get("versions", {}).get("transformers", "unknown"))
    if tuple(version.split(".")[:2]) != tuple(map(str, reference.LEAST)):
        raise recordings.RecordingError(
            f"{path.name} was recorded from transformers {version}, expected "
            f"{'.'.join(map(str, reference.LEAST))}: not comparable. Run `{RENEW}`."
        )
    parts: dict[str, Arrays] = {"float32": {}, "float64": {}, "chosen": {}}
    for name, array in recordings.read(path, case.hash, RENEW).items():
        part, _, rest = name.partition("/")
        if part in parts:
            parts[part][rest] = array
    return Answer(**parts, kind="recorded", versions=made["versions"], refusal=made["refusal"])


def answer(case: Case, which: str = "auto") -> Answer:
    """Return the reference's answer: "live", "recorded", or live where it can run ("auto").

    Raises:
        ReferenceUnavailableError, RecordingError: as `live` and `recorded`.
    """
    sides = partial(live, case), partial(recorded, case)
    return recordings.choose(which, *sides, reference.why_unavailable)


def record(case: Case, folder: Path = FOLDER) -> Path:
    """Run the reference on a case and write what it says; errors as `live`."""
    said = live(case)
    arrays = {f"float32/{n}": a for n, a in said.float32.items()}
    arrays |= {f"float64/{n}": a for n, a in said.float64.items() if n in RECORDED64}
    arrays |= {f"chosen/{n}": a for n, a in said.chosen.items()}
    made = reference.provenance() | {"case": case.why, "refusal": said.refusal}
    return recordings.write(case.name, case.hash, arrays, made, folder)


def record_all(names: Collection[str] = ()) -> Iterator[Path]:
    """Run the reference on the cases, or those named, and yield what was written; errors as
    `record`.
    """
    yield from map(record, map(by_name, names) if names else CASES)


def without_gradients(found: Mapping[str, np.ndarray]) -> Arrays:
    """Return the arrays that are no derivative by a parameter."""
    return {n: a for n, a in found.items() if Quantity(n).role is not Role.GRADIENT}


def named(found: Mapping[str, np.ndarray]) -> Arrays:
    """Return what the reference computed under our names: experts stacked, the loss the output."""
    values = without_gradients(found)
    gradients = {Quantity(n).name: a for n, a in found.items() if n not in values}
    kept = {n: a for n, a in values.items() if n != LOSS and not n.endswith(".chosen")}
    named = {Quantity.gradient(n): a for n, a in stacked(gradients).items()}
    return {**kept, OUTPUT: found[LOSS], **named}
