"""Results of `compare_meshes`: per mesh, whether it agrees and where a difference starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from parity.engine.measure.localize import Stage, first_divergence
from parity.engine.measure.measurement import Measurement, Verdict
from parity.mesh.collectives import Collective


@dataclass(frozen=True)
class MeshResult:
    """Result of comparing one mesh with one device."""

    case: str
    """Name of the function, then the axis sizes of the mesh."""
    measurements: tuple[Measurement, ...]
    stages: tuple[Stage, ...] = ()
    """After a failure, two relative L2 errors of every stage: computed from the mesh's own values
    of earlier stages (free), and from one device's values (forced). Empty if all gates hold, or if
    stages were not tested."""
    start: str = ""
    """Name of the first wrong stage (mark or result); empty if all gates hold."""
    before: str = ""
    """Name of the last correct stage before `start`; empty if there is none."""
    collectives: tuple[Collective, ...] = ()
    """All collectives of the program compiled last; after a failure, of the last program that also
    returned the marks."""
    suspects: tuple[Collective, ...] = ()
    """Collectives that `start` depends on, but no correct stage before `start` does."""
    order: tuple[str, ...] = ()
    """Names of marks and results in order of computation."""
    refused: str = ""
    """Reason why stages could not be fed one device's values; empty if they could be fed, or if no
    stage was tested."""
    responses: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Relative L2 change of each quantity on one device in float32, one per run with reordered
    sums; empty if float32 was not compared. The scatter predicts how much the error level of a
    group of quantities (the geometric mean of their errors) varies between machines."""
    not_compared: Mapping[str, str] = field(default_factory=dict)
    """Reason why a result was not compared, by name of the result."""

    @property
    def broken(self) -> Measurement | None:
        """The first failing measurement of `start`; if `start` has none, of the whole mesh.

        None if nothing fails.
        """
        bad = [m for m in self.measurements if m.verdict is Verdict.FAIL]
        return next((m for m in bad if m.quantity == self.start), first_divergence(bad))

    @property
    def holds(self) -> bool:
        """True if at least one gate passes, and none fails or is not comparable."""
        gates = any(m.verdict is Verdict.PASS for m in self.measurements)
        return gates and first_divergence(self.measurements) is None

    @property
    def worst(self) -> Measurement | None:
        """Relative L2 measurement that is the largest fraction of its tolerance; None if none."""
        gates = [m for m in self.measurements if m.metric == "rel_l2" and m.tolerance > 0]
        return max(gates, key=lambda m: m.fraction, default=None)

    def sentences(self) -> Iterator[str]:
        """Yield sentences that explain a failure; none if no gate fails."""
        row = self.broken
        if row is None:
            return
        size = f"{row.metric} {row.value:.2g}, at most {row.tolerance:.2g}"
        yield f"starts at {row.quantity} ({row.edge}, {size}) {row.note}".rstrip()
        for m in self.measurements:
            if (m.quantity, m.metric) == (row.quantity, "replicas") and m.value > 0:
                yield f"on {m.value:.0f} devices {m.quantity} differs from the first replica"
        if self.before:
            yield f"last correct stage: {self.before}"
        for collective in self.suspects:
            yield f"suspect: {collective}"
        if self.order and not self.suspects:
            yield "no collective is involved there: a required one may be missing"
        if self.refused:
            yield f"stages were not tested one by one, as marks cannot be replaced: {self.refused}"


@dataclass(frozen=True)
class MeshReport:
    """Result of comparing one function on several meshes with one device."""

    name: str
    """Name of the function."""
    results: tuple[MeshResult, ...]
    """One result per mesh, in the order of the meshes."""

    @property
    def holds(self) -> bool:
        """True if there is at least one mesh and all meshes hold (`MeshResult.holds`)."""
        return bool(self.results) and all(result.holds for result in self.results)

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        """Measurements of all meshes, mesh by mesh."""
        return tuple(m for result in self.results for m in result.measurements)

    @property
    def culprit(self) -> MeshResult | None:
        """Result of the first mesh that does not hold (`MeshResult.holds`); None if all hold."""
        return next((result for result in self.results if not result.holds), None)

    def table(self) -> str:
        """Return the report as text: one line per mesh, followed by details of failures."""
        lines = []
        for result in self.results:
            gates = sum(m.verdict is Verdict.PASS for m in result.measurements)
            worst = result.worst
            share = f", largest {worst.value:.1e} of {worst.tolerance:.1e}" if worst else ""
            word = f"holds: {gates} gates{share}" if result.holds else "DIFFERS"
            lines.append(f"{result.case:<32} {word}")
            lines += [f"    {text}" for text in result.sentences()]
            lines += [f"    not compared: {n}: {why}" for n, why in result.not_compared.items()]
        return "\n".join(lines)
