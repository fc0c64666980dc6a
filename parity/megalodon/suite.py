"""The parity suite: compares JAX model, oracle and megalodon-hf in pairs, on every case.

The three sides form the triangle, and the pairs are its edges (`parity.megalodon.edges`). Source:
docs/parity.md "The triangle".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from parity.engine.measure.compare import Comparison, OnFailure
from parity.engine.measure.localize import first_divergence
from parity.engine.measure.measurement import Kind, Measurement, Verdict
from parity.engine.measure.quantity import LOGITS, WEIGHTS
from parity.megalodon import SUITE
from parity.megalodon import low_precision as lowprecision
from parity.megalodon.cases import Case
from parity.megalodon.contract import ALL
from parity.megalodon.conversion import changed, round_trip
from parity.megalodon.edges import TRIANGLE, MegalodonEdge
from parity.megalodon.noise_floors import truth
from parity.megalodon.recordings import RecordedReference
from parity.megalodon.reference import LiveReference, why_unavailable
from parity.megalodon.runner import JaxSubject
from parity.megalodon.tolerance_table import NoiseFloors
from parity.recordings import RecordingError, choose


@runtime_checkable
class Reference(Protocol):
    """Source of megalodon-hf's results: live or recorded."""

    kind: str
    """"live" or "recorded"."""
    omits: str
    """Quantities of the oracle that this reference does not have, in words."""

    def gives(self, quantity: str) -> bool:
        """Return whether this reference has a value for a quantity that the oracle computes."""
        ...

    @property
    def provenance(self) -> dict[str, Any]:
        """Commit of megalodon-hf, versions of packages, threads, CPU capability and device."""
        ...

    def run(self, case: Case) -> dict[str, np.ndarray]:
        """Return the named arrays of a case, float32."""
        ...

    def weights(self, case: Case) -> dict[str, np.ndarray] | None:
        """Return a case's weights as megalodon-hf holds them once loaded; None if the reference is
        recorded."""
        ...

    def low_precision(self, case: Case) -> dict[str, np.ndarray]:
        """Return megalodon-hf's logits and loss, computed in bfloat16, as `<mode>/logits` and
        `<mode>/loss`; the modes are "autocast" and "cast" (`reference.low_precision`)."""
        ...

    def known_differences(self) -> dict[str, np.ndarray]:
        """Return megalodon-hf's result for every known difference (`known_differences`), by id."""
        ...


@runtime_checkable
class Subject(Protocol):
    """Source of the JAX model's results in one dtype."""

    def run(self, case: Case) -> dict[str, np.ndarray]:
        """Return the named arrays of a case."""
        ...


WIDE, NARROW = JaxSubject("float64"), JaxSubject("float32")


def choose_reference(prefer: str = "auto") -> Reference:
    """Return megalodon-hf, live or recorded.

    Args:
        prefer: "live", "recorded", or "auto": live if megalodon-hf can run here, else recorded.

    Raises:
        ReferenceUnavailableError: `prefer` is "live", but megalodon-hf cannot run here.
    """
    return choose(prefer, LiveReference, RecordedReference, why_unavailable)


@dataclass(frozen=True)
class Suite:
    """Sources of the results that are compared: megalodon-hf and the JAX model in two dtypes.

    The third side, the oracle, is computed here (`truths`).
    """

    reference: Reference
    wide: Subject = WIDE
    """The JAX model in float64."""
    subject: Subject = NARROW
    """The JAX model in float32."""
    device: str = "cpu"
    """Device named in the measurements."""
    on_failure: OnFailure | None = None
    """Called for each tensor that exceeds its tolerance."""
    truths: dict[tuple[str, bool], dict[str, np.ndarray]] = field(default_factory=dict)
    """Cache of the oracle's results, by hash of the case and `mask_ema`, for repeated cases."""

    def case(self, case: Case, floors: NoiseFloors) -> Iterator[Measurement]:
        """Yield the measurements of one case, edge by edge.

        If the reference has no valid recording of the case, one measurement "not comparable" is
        yielded instead of the comparisons with megalodon-hf.
        """

        def edge(name: MegalodonEdge, *, only_valid: bool = False) -> Comparison:
            return Comparison(
                case.work, name, floors, name.dtype, self.device, only_valid, self.on_failure
            )

        exact = self._truth(case, case.config.mask_ema)
        wide = edge(MegalodonEdge.JAX64_ORACLE)
        rows = wide.run(self.wide.run(case), exact)
        yield from rows
        errors = [row.value for row in rows if row.metric == "rel_l2"]
        yield wide.judged(ALL, "exact_share", errors.count(0.0) / len(errors))
        ours = self.subject.run(case)
        yield from edge(MegalodonEdge.JAX32_ORACLE).run(ours, exact)
        yield edge(MegalodonEdge.JAX32_ORACLE).judged(*_converted(round_trip(case), case))
        if not case.has_reference:
            # megalodon-hf differs deliberately on this case, or cannot run it. The differences are
            # measured by `parity.megalodon.known_differences`.
            return
        try:
            theirs = self.reference.run(case)
        except RecordingError as error:
            yield not_comparable(case, MegalodonEdge.JAX32_REFERENCE32, str(error), self.device)
            return
        # megalodon-hf's EMA includes padding, so the oracle that it is compared with does too.
        differs = case.padding_differs
        as_reference = self._truth(case, False) if differs else exact
        # Quantities that the reference lacks were compared between JAX and oracle above.
        exact, as_reference, ours = (
            {name: array for name, array in arrays.items() if self.reference.gives(name)}
            for arrays in (exact, as_reference, ours)
        )
        yield from edge(MegalodonEdge.REFERENCE32_ORACLE).run(theirs, as_reference)
        valid = edge(MegalodonEdge.JAX32_ORACLE, only_valid=differs)
        yield from valid.accuracy(ours, theirs, exact)
        yield from edge(MegalodonEdge.JAX32_REFERENCE32, only_valid=differs).run(ours, theirs)
        if (held := self.reference.weights(case)) is not None:
            yield edge(MegalodonEdge.REFERENCE32_ORACLE).judged(*_converted(held, case))
        if case.name in lowprecision.CASES:
            narrow = self.reference.low_precision(case)
            yield from lowprecision.measure(case, narrow, exact, floors, self.device)

    def _truth(self, case: Case, mask_ema: bool) -> dict[str, np.ndarray]:
        key = case.hash, mask_ema
        if key not in self.truths:
            self.truths[key] = truth(case, mask_ema=mask_ema)
        return self.truths[key]


def _converted(held: dict[str, np.ndarray], case: Case) -> tuple[str, str, float]:
    return WEIGHTS, "changed_parameters", float(len(changed(held, case.weights)))


def not_comparable(case: Case, edge: MegalodonEdge, note: str, device: str) -> Measurement:
    """Return a measurement with the verdict "not comparable" for an edge; `note` is the reason."""
    return Measurement(
        case=case.name,
        edge=str(edge),
        quantity=LOGITS,
        kind=Kind.LOGITS,
        stage=-1,
        metric="rel_l2",
        value=float("nan"),
        tolerance=float("nan"),
        verdict=Verdict.NOT_COMPARABLE,
        dtype="float32",
        device=device,
        identity="",
        note=note,
        suite=SUITE,
    )


def culprit(rows: Sequence[Measurement]) -> Measurement | None:
    """Return the failing measurement of the first diverging stage; None if all gates hold.

    Measurements that are not comparable count only if no gate fails. If several edges fail at that
    stage, the measurement on the edge that comes first in `TRIANGLE` is returned.

    Args:
        rows: measurements of one case.
    """

    def bluntness(row: Measurement) -> int:
        return TRIANGLE.index(row.edge) if row.edge in TRIANGLE else len(TRIANGLE)

    return first_divergence(sorted(rows, key=bluntness))
