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
from parity.deepseek_v3.checkpoint import stacked, unstacked
from parity.engine.alignment import Pin
from parity.engine.quantity import Quantity, Role
from parity.sides.side import AS_IS, OUTPUT, Precision, Run, Side, SideError, Trace

FOLDER = Path(__file__).parents[1] / "data" / "deepseek_v3" / "recordings"
RENEW = "megalodon-numerics parity record --subject mla-moe"
RECORDED64 = ("logits", OUTPUT)
"""What recordings hold in float64 as well; everything would be twice the size."""
OF_LOSS = {OUTPUT: np.ones((), np.float32)}
"""Cotangents by which derivatives are those of the loss."""
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Answer:
    """What the reference said of a case, as a side of a port and by our names."""

    side: Side
    stages: dict[str, str]
    """By our name, what the side calls it."""
    float32: Arrays
    """Intermediates, the loss as `output`, gradients as `grad/<parameter>`, experts stacked."""
    float64: Arrays
    """`RECORDED64`."""
    chosen: Arrays
    """Experts of each token by `layers.{i}`, (T, k)."""
    kind: str
    """"live" or "recorded"."""
    versions: dict[str, str]
    refusal: str
    """What it says when it is cast to float64 as it is; empty where it runs."""

    @property
    def pins(self) -> tuple[Pin, ...]:
        """Which stage is which, so that a gate is there whatever its values are."""
        return tuple(
            Pin(None if name.endswith(reference.CHOSEN) else name, theirs)
            for name, theirs in self.stages.items()
        )


class RecordedSide:
    """What the reference computed in float32, as a side that answers nothing else.

    Args:
        case: the work.
        arrays: float32, by our names, as of `Answer`.
    """

    kind = "torch"

    def __init__(self, case: Case, arrays: Arrays) -> None:
        self.case, self.arrays = case, arrays

    def parameters(self) -> dict[str, np.ndarray]:
        """Return the weights by the reference's names."""
        return self.case.weights

    def inputs(self) -> dict[str, np.ndarray]:
        """Return the token ids."""
        return {"0": self.case.ids}

    def run(self, how: Run = AS_IS) -> Trace:
        """Return the recorded run.

        Raises:
            SideError: another one is asked for, or derivatives of anything but the loss.
        """
        if how.precision is not Precision.FLOAT32 or how.rounding is not None or how.forced:
            raise SideError("recordings hold a float32 run; the rest needs the live reference")
        if how.cotangents is not None and dict(how.cotangents) != OF_LOSS:
            raise SideError("recordings hold derivatives of the loss, and no others")
        gradients = {n: a for n, a in self.arrays.items() if Quantity(n).role is Role.GRADIENT}
        stages = {n: a for n, a in self.arrays.items() if n not in gradients and n != OUTPUT}
        named = {Quantity(n).name: a for n, a in gradients.items() if how.cotangents is not None}
        return Trace(stages | {OUTPUT: self.arrays[OUTPUT]}, (OUTPUT,), unstacked(named))


@reference.one_thread()
def live(case: Case) -> Answer:
    """Run the reference on a case.

    Raises:
        ReferenceUnavailableError: it cannot run here.
    """
    side = reference.side(case.config.to_hf(), case.weights, case.ids)
    stages = reference.stages(side)
    narrow = named(side.run(Run(cotangents=OF_LOSS)), stages)
    wide = named(side.run(Run(Precision.FLOAT64)), stages)
    return Answer(
        side,
        stages,
        {n: a for n, a in narrow.items() if not n.endswith(reference.CHOSEN)},
        {n: wide[n] for n in RECORDED64},
        {
            n.removesuffix(f".{reference.CHOSEN}"): a.astype(np.int32)
            for n, a in narrow.items()
            if n.endswith(reference.CHOSEN)
        },
        kind="live",
        versions=reference.provenance()["versions"],
        refusal=reference.float64_refusal(side),
    )


def named(found: Trace, stages: Mapping[str, str]) -> Arrays:
    """Return what a live run computed under our names: experts stacked, the loss the output."""
    gradients = stacked(found.gradients)
    return {
        **{name: found.stages[theirs] for name, theirs in stages.items()},
        OUTPUT: found.stages[OUTPUT],
        **{Quantity.gradient(name): a for name, a in gradients.items()},
    }


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
    names = (n for n in parts["float32"] if n != OUTPUT and Quantity(n).role is not Role.GRADIENT)
    return Answer(
        RecordedSide(case, parts["float32"]),
        {name: name for name in names},
        **parts,
        kind="recorded",
        versions=made["versions"],
        refusal=made["refusal"],
    )


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
    arrays |= {f"float64/{n}": a for n, a in said.float64.items()}
    arrays |= {f"chosen/{n}": a for n, a in said.chosen.items()}
    made = reference.provenance() | {"case": case.why, "refusal": said.refusal}
    return recordings.write(case.name, case.hash, arrays, made, folder)


def record_all(names: Collection[str] = ()) -> Iterator[Path]:
    """Run the reference on the cases, or those named, and yield what was written; errors as
    `record`.
    """
    yield from map(record, map(by_name, names) if names else CASES)
