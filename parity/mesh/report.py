"""What a comparison over meshes says: a verdict for each, and where it starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from parity.engine.localize import Stage, first_divergence
from parity.engine.measurement import Measurement, Verdict
from parity.mesh.collectives import Collective


@dataclass(frozen=True)
class MeshResult:
    """One mesh against one device."""

    case: str
    """Name of the function, and the mesh."""
    measurements: tuple[Measurement, ...]
    stages: tuple[Stage, ...] = ()
    """After a break: the error of every stage as it ran, and fed one device's values."""
    start: str = ""
    """The first stage that is wrong; empty where all gates hold."""
    before: str = ""
    """The last one before it that is right."""
    collectives: tuple[Collective, ...] = ()
    """Of the compiled program."""
    suspects: tuple[Collective, ...] = ()
    """Those the start is computed from, and nothing sound before it."""
    order: tuple[str, ...] = ()
    """Names of stages as they are computed."""
    refused: str = ""
    """Why the program does not go on with one device's values; empty where it does."""
    not_compared: Mapping[str, str] = field(default_factory=dict)
    """Results of one device that were not compared, each with the reason."""

    @property
    def broken(self) -> Measurement | None:
        """The failure of the stage where it starts; None where all gates hold."""
        bad = [m for m in self.measurements if m.verdict is Verdict.FAIL]
        return next((m for m in bad if m.quantity == self.start), first_divergence(bad))

    @property
    def holds(self) -> bool:
        """Whether every gate holds; without a gate none does."""
        gates = any(m.verdict is Verdict.PASS for m in self.measurements)
        return gates and first_divergence(self.measurements) is None

    @property
    def worst(self) -> Measurement | None:
        """The gate that uses most of its tolerance."""
        gates = [m for m in self.measurements if m.metric == "rel_l2" and m.tolerance > 0]
        return max(gates, key=lambda m: m.fraction, default=None)

    def sentences(self) -> Iterator[str]:
        """Yield what a person wants to know of a break; nothing where all gates hold."""
        row = self.broken
        if row is None:
            return
        size = f"{row.metric} {row.value:.2g}, at most {row.tolerance:.2g}"
        yield f"starts at {row.quantity} ({row.edge}, {size}) {row.note}".rstrip()
        for m in self.measurements:
            if (m.quantity, m.metric) == (row.quantity, "replicas") and m.value > 0:
                yield f"{m.value:.0f} devices hold another {m.quantity} than the first replica"
        if self.before:
            yield f"the last stage that is right: {self.before}"
        for collective in self.suspects:
            yield f"stands there: {collective}"
        if self.order and not self.suspects:
            yield "no collective stands there: if one is needed, it is missing"
        if self.refused:
            yield f"stages are not told apart, for marks cannot be replaced here: {self.refused}"


@dataclass(frozen=True)
class MeshReport:
    """One function on several meshes."""

    name: str
    results: tuple[MeshResult, ...]

    @property
    def holds(self) -> bool:
        """Whether every gate holds on every mesh; a comparison of nothing does not."""
        return bool(self.results) and all(result.holds for result in self.results)

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        """Of all meshes."""
        return tuple(m for result in self.results for m in result.measurements)

    @property
    def culprit(self) -> MeshResult | None:
        """The first mesh that parts from one device."""
        return next((result for result in self.results if not result.holds), None)

    def table(self) -> str:
        """Return the report as text: a line for each mesh, and what is known of each break."""
        lines = []
        for result in self.results:
            gates = sum(m.verdict is Verdict.PASS for m in result.measurements)
            worst = result.worst
            share = f", largest {worst.value:.1e} of {worst.tolerance:.1e}" if worst else ""
            word = f"holds: {gates} gates{share}" if result.holds else "PARTS"
            lines.append(f"{result.case:<32} {word}")
            lines += [f"    {text}" for text in result.sentences()]
            lines += [f"    not compared: {n}: {why}" for n, why in result.not_compared.items()]
        return "\n".join(lines)
