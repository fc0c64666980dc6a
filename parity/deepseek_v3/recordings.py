"""Results of Transformers' DeepSeek-V3 for a case: live, or from the committed recordings."""

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
from parity.engine.measure.quantity import Quantity, Role
from parity.engine.pairing.alignment import Pin
from parity.sides.side import AS_IS, OUTPUT, Precision, Run, Side, SideError, Trace

FOLDER = Path(__file__).parents[1] / "data" / "deepseek_v3" / "recordings"
RENEW = "megalodon-numerics parity record --subject mla-moe"
"""Command that records Transformers' results again; named in error messages."""
RECORDED64 = ("logits", OUTPUT)
"""Quantities recorded in float64 as well; recording all would double the size."""
OF_LOSS = {OUTPUT: np.ones((), np.float32)}
"""Cotangents of a run that asks for the gradients of the loss, which is the output."""


@dataclass(frozen=True)
class Recorded:
    """Transformers' results for a case, live or recorded, under the JAX model's names."""

    side: Side
    """Transformers (or its recording) as a side for `parity.port`."""
    stages: dict[str, str]
    """Names of the stages of `side`, by the JAX model's names."""
    float32: dict[str, np.ndarray]
    """Float32 results by name: intermediates, the loss as `output`, and gradients as
    `grad/<parameter>` with experts stacked."""
    float64: dict[str, np.ndarray]
    """The quantities `RECORDED64` in float64."""
    chosen: dict[str, np.ndarray]
    """Experts chosen for each token, (T, k) int32, by name of the layer (`layers.{i}`)."""
    kind: str
    """"live" or "recorded"."""
    versions: dict[str, str]
    """Versions of torch and transformers."""
    refusal: str
    """Error message of Transformers' model when it is cast to float64 and not changed otherwise;
    empty if the cast model runs."""

    @property
    def pins(self) -> tuple[Pin, ...]:
        """Pairs of stages of the two sides by name, so that no stage is paired by its values.

        Stages with chosen experts have no partner.
        """
        return tuple(
            Pin(None if name.endswith(reference.CHOSEN) else name, theirs)
            for name, theirs in self.stages.items()
        )


class RecordedSide:
    """A recorded float32 run of Transformers as a side for `parity.port`; no other run is possible.

    Args:
        case: the case.
        arrays: recorded arrays, as `Recorded.float32`.
    """

    kind = "torch"

    def __init__(self, case: Case, arrays: dict[str, np.ndarray]) -> None:
        self.case, self.arrays = case, arrays

    def parameters(self) -> dict[str, np.ndarray]:
        """Return the weights by Transformers' names."""
        return self.case.weights

    def inputs(self) -> dict[str, np.ndarray]:
        """Return the token ids (B, L), by the name of the argument, "0"."""
        return {"0": self.case.ids}

    def run(self, how: Run = AS_IS) -> Trace:
        """Return the recorded run; it has gradients only if `how` asks for those of the loss.

        Raises:
            SideError: `how` asks for another precision, for rounding or replaced values, or for
                gradients of anything but the loss.
        """
        if how.precision is not Precision.FLOAT32 or how.rounding is not None or how.forced:
            raise SideError(
                "a recording holds only a float32 run: install transformers for other runs"
            )
        if how.cotangents is not None and dict(how.cotangents) != OF_LOSS:
            raise SideError("a recording has only derivatives of the loss, not of other outputs")
        gradients = {n: a for n, a in self.arrays.items() if Quantity(n).role is Role.GRADIENT}
        stages = {n: a for n, a in self.arrays.items() if n not in gradients and n != OUTPUT}
        named = {Quantity(n).name: a for n, a in gradients.items() if how.cotangents is not None}
        return Trace(stages | {OUTPUT: self.arrays[OUTPUT]}, (OUTPUT,), unstacked(named))


@reference.one_thread()
def live(case: Case) -> Recorded:
    """Run Transformers on a case, in float32 and float64, and return its results.

    Raises:
        ReferenceUnavailableError: Transformers cannot run here.
    """
    side = reference.side(case.config.to_hf(), case.weights, case.ids)
    stages = reference.stages(side)
    narrow = named(side.run(Run(cotangents=OF_LOSS)), stages)
    wide = named(side.run(Run(Precision.FLOAT64)), stages)
    return Recorded(
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


def named(found: Trace, stages: Mapping[str, str]) -> dict[str, np.ndarray]:
    """Return the results of a run of Transformers under the JAX model's names, experts stacked.

    Args:
        found: a run with gradients of the loss.
        stages: names of the stages of the run, by the JAX model's names.
    """
    gradients = stacked(found.gradients)
    return {
        **{name: found.stages[theirs] for name, theirs in stages.items()},
        OUTPUT: found.stages[OUTPUT],
        **{Quantity.gradient(name): a for name, a in gradients.items()},
    }


def recorded(case: Case, folder: Path = FOLDER) -> Recorded:
    """Return Transformers' recorded results of a case.

    Raises:
        RecordingError: there is no recording of exactly this case by a supported version.
    """
    path = folder / f"{case.name}.safetensors"
    made = recordings.read_provenance(path, RENEW)
    version = str(made.get("versions", {}).get("transformers", "unknown"))
    if tuple(version.split(".")[:2]) != tuple(map(str, reference.LEAST)):
        raise recordings.RecordingError(
            f"{path.name} was recorded from transformers {version}, expected "
            f"{'.'.join(map(str, reference.LEAST))}: not comparable. Run `{RENEW}`."
        )
    parts: dict[str, dict[str, np.ndarray]] = {"float32": {}, "float64": {}, "chosen": {}}
    for name, array in recordings.read(path, case.hash, RENEW).items():
        part, _, rest = name.partition("/")
        if part in parts:
            parts[part][rest] = array
    names = (n for n in parts["float32"] if n != OUTPUT and Quantity(n).role is not Role.GRADIENT)
    return Recorded(
        RecordedSide(case, parts["float32"]),
        {name: name for name in names},
        **parts,
        kind="recorded",
        versions=made["versions"],
        refusal=made["refusal"],
    )


def answer(case: Case, which: str = "auto") -> Recorded:
    """Return Transformers' results of a case.

    Args:
        case: the case.
        which: "live", "recorded", or "auto": live if Transformers can run here, else recorded.

    Raises:
        ReferenceUnavailableError, RecordingError: see `live` and `recorded`.
    """
    sides = partial(live, case), partial(recorded, case)
    return recordings.choose(which, *sides, reference.why_unavailable)


def record(case: Case, folder: Path = FOLDER) -> Path:
    """Run Transformers on a case, write a recording of its results, and return the file's path.

    Raises as `live`.
    """
    said = live(case)
    arrays = {f"float32/{n}": a for n, a in said.float32.items()}
    arrays |= {f"float64/{n}": a for n, a in said.float64.items()}
    arrays |= {f"chosen/{n}": a for n, a in said.chosen.items()}
    made = reference.provenance() | {"case": case.why, "refusal": said.refusal}
    return recordings.write(case.name, case.hash, arrays, made, folder)


def record_all(names: Collection[str] = ()) -> Iterator[Path]:
    """Run Transformers on the named cases (default: all); yield the paths of the recordings.

    Raises as `record`, and ValueError for an unknown name.
    """
    yield from map(record, map(by_name, names) if names else CASES)
