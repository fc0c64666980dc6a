"""Report of a comparison over meshes: a verdict per mesh, and the location of a difference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from parity.engine.measure.localize import Stage, first_divergence
from parity.engine.measure.measurement import Measurement, Verdict
from parity.mesh.collectives import Collective


@dataclass(frozen=True)
class MeshResult:
    """Comparison of one mesh with one device."""

    case: str
    """Name of the function and of the mesh."""
    measurements: tuple[Measurement, ...]
    stages: tuple[Stage, ...] = ()
    """After a failure: the error of every stage as run, and when fed one device's values."""
    start: str = ""
    """Name of the first wrong stage; empty if all gates hold."""
    before: str = ""
    """Name of the last correct stage before it."""
    collectives: tuple[Collective, ...] = ()
    """Collectives of the compiled program."""
    suspects: tuple[Collective, ...] = ()
    """Collectives from which the first wrong stage is computed, but no correct one before it."""
    order: tuple[str, ...] = ()
    """Names of stages in order of computation."""
    refused: str = ""
    """Why the program cannot be fed one device's values; empty if it can."""
    responses: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Relative L2 response of each quantity in float32 to every order of sums on one device; empty
    if float32 was not compared. The scatter of a level between machines follows from it."""
    not_compared: Mapping[str, str] = field(default_factory=dict)
    """Results of one device that were not compared, with the reasons."""

    @property
    def broken(self) -> Measurement | None:
        """Failing row of the first wrong stage; None if all gates hold."""
        bad = [m for m in self.measurements if m.verdict is Verdict.FAIL]
        return next((m for m in bad if m.quantity == self.start), first_divergence(bad))

    @property
    def holds(self) -> bool:
        """Whether every gate holds; False if there is none."""
        gates = any(m.verdict is Verdict.PASS for m in self.measurements)
        return gates and first_divergence(self.measurements) is None

    @property
    def worst(self) -> Measurement | None:
        """Gate that uses the largest fraction of its tolerance."""
        gates = [m for m in self.measurements if m.metric == "rel_l2" and m.tolerance > 0]
        return max(gates, key=lambda m: m.fraction, default=None)

    def sentences(self) -> Iterator[str]:
        """Yield lines that explain a failure; none if all gates hold."""
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
    """Comparison of one function on several meshes."""

    name: str
    results: tuple[MeshResult, ...]

    @property
    def holds(self) -> bool:
        """Whether every gate holds on every mesh; False if there is none."""
        return bool(self.results) and all(result.holds for result in self.results)

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        """Measurements of all meshes."""
        return tuple(m for result in self.results for m in result.measurements)

    @property
    def culprit(self) -> MeshResult | None:
        """Result of the first mesh that differs from one device."""
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
