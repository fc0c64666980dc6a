"""Comparison of a port with its original, with parameters and stages paired by their values.

Every pair is compared in float32 and, if both sides can run in float64, in float64. Tolerances are
multiples of measured noise floors. Source: docs/your-own-port.md.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from parity.device import device_kind
from parity.engine.measure.compare import Comparison, Work
from parity.engine.measure.constants import without_constants
from parity.engine.measure.measurement import Measurement, Verdict
from parity.engine.measure.metrics import without_shared_infinities
from parity.engine.measure.quantity import WEIGHTS, Quantity, Role, stage_kind
from parity.engine.pairing.alignment import Pin, align
from parity.engine.pairing.closeness import EQUAL
from parity.engine.pairing.matching import match_parameters
from parity.engine.pairing.parameter_pairs import Matching, elements_not_held
from parity.engine.programs.exits import exits_named
from parity.port.consequences import compensated, has_effect, notice_of, without
from parity.port.conversion import misplaced, untransposed
from parity.port.correspondence import Correspondence
from parity.port.exact import compare_exactly, exact_partners
from parity.port.hidden import Squares
from parity.port.ledger import (
    BETWEEN,
    Entry,
    ledger_of,
    require_an_output,
)
from parity.port.localisation import ROOM, Place, localise
from parity.port.narrow import compare_narrow
from parity.port.report import Report
from parity.port.rounding_floors import (
    MORE_SEEDS,
    SEEDS,
    Noise,
    PortBounds,
    costly,
    norms_of,
    pooled,
    responses_of,
)
from parity.port.same_numbers import exact_sums, folded, without_shared_tables
from parity.port.side_runs import SideRuns
from parity.port_tolerances import STUDENT, PortEdge
from parity.sides.projection import Valid, direction, only_valid
from parity.sides.same_inputs import check_same_inputs
from parity.sides.side import HoldsMade, LowPrecision, Rounding, Side, SideError, Trace

FORCED = "rel_l2_forced"
"""Metric: relative L2 error of a stage that is recomputed from the original's values ("forced").

It is a gate, measured only if the port can run in float64 and the original cannot.
"""
CANCELLED = "0 up to rounding: the error is relative to the terms that cancel"
"""Note on the gate of a quantity whose terms cancel."""
MADE = "computed when the model was exported, and compared by what they compute only"
"""Start of the notice that lists parameters whose values an exporter computed (`HoldsMade`)."""


class PortError(ValueError):
    """The two sides cannot be compared; the message says why and what to do."""


@dataclass(frozen=True)
class Port:
    """A port and its original, which should compute the same result from the same inputs."""

    name: str
    original: Side
    port: Side
    case: str = ""
    """Name of the case, such as `padding`."""
    valid: Valid = None
    """Bool mask (batch, length), True at the positions to compare, such as all but padding; None:
    all positions (see `Valid`)."""
    pins: tuple[Pin, ...] = ()
    """Stage pairs set by hand; all other stages are paired automatically."""
    gradients: bool = True
    """Whether derivatives are compared too."""
    loss: str | None = None
    """Name of the port's scalar output to differentiate; None differentiates all outputs in one
    fixed random direction."""
    bfloat16: bool = True
    """Whether both sides run in bfloat16 too."""
    masked_outputs: bool = False
    """Whether outputs contain masks on purpose: infinities, or numbers of magnitude 1e30 and more.
    An infinity passes only where both sides and the float64 run have the same one; other masks are
    compared by sign. If False, an infinite output fails."""
    not_compared: Mapping[str, str] = field(default_factory=dict)
    """Outputs of either side that are not compared, by name, with the reason. A name also excludes
    every field below it: `output.cache` excludes `output.cache[0]`. A name may also be that of a
    parameter that only one side has, such as a second bias of 0, but not of one that has a partner
    of other values."""
    device: str = ""
    """Class of the device in measurements, "cpu" or "cuda"; "" stands for the class of JAX's
    default device."""
    work: str = ""
    """Hash that identifies the parameters and inputs: only measurements with equal hashes are
    compared over time. "" computes the hash from all parameters and inputs."""

    @property
    def title(self) -> str:
        """Name of this comparison in measurements: `name`, or `name/case`."""
        return f"{self.name}/{self.case}" if self.case else self.name


def compare(port: Port) -> Report:
    """Compare a port with its original.

    Raises:
        PortError: `port` is no `Port` with two sides, both sides are one object, the sides share no
            parameter, the loss is not a scalar output of both sides, or an entry of `not_compared`
            names no output or gives no reason.
        AlignmentError: the stages of the sides cannot be aligned, or pins do not fit them.
        SideError: a side rejects its inputs, or the sides have different inputs.
        ExitError: the code of a side called `sys.exit`, `exit`, `quit` or `os._exit`.
    """
    check_two_sides(port)
    return _compare(port, again=True)


def _would_hold(port: Port, side: Side) -> bool:
    """Return whether the comparison passes with `side` instead of the port's side; False if the
    comparison raises."""
    try:
        return _compare(replace(port, port=side), again=False).holds
    except ValueError:
        return False


def _compare(port: Port, *, again: bool) -> Report:
    """Compare a port with its original.

    `again` permits further runs after a failure: a second comparison with parameters exchanged
    (`_Both.misconverted`), and more runs that measure noise floors.
    """
    port = replace(port, device=port.device or device_kind())
    both = _both_sides(port)
    original, ours = both.original, both.port
    if unstable := both.unstable(port):
        return unstable
    if port.gradients:
        both.differentiate(port)
    work = Work(port.title, port.work or _digest(port), (*ours.best.stages,), suite=port.name)
    noise, bounds, rows, notices = both.judged(work, port.device, again)
    matching = both.names.matching
    lost = [name for name in both.lost(port.original, noise) if name not in both.declared]
    shown = both.shown_by_derivatives() if _all_hold(rows) else frozenset()
    made = both.made(shown)
    rows.insert(
        0, _weights(work, bounds, matching, port.device, lost, {*shown, *made, *both.declared})
    )
    notices = (*original.notices, *ours.notices, *both.alone(), *notices)
    if made:
        notices = (*notices, f"{MADE}: {', '.join(made)}")
    own = [noise[side].floors(Rounding.OPERATIONS) for side in ("original", "port")]
    # Relative floors mean nothing for a quantity that is 0 up to rounding: its norm is rounding.
    known = ours.best.stages.keys() - bounds.cancelled[PortEdge.PORT64_ORIGINAL64]
    dear = costly(own[0], {n: x for n, x in own[1].items() if n in known})
    if dear and not isinstance(port.port, LowPrecision):
        notices = (*notices, dear)
    alignment = both.names.alignment
    outputs = {*original.best.outputs, *ours.best.outputs}
    narrow = ()
    if port.bfloat16:
        edge = PortEdge.PORTBF16_PORT64
        comparison = Comparison(
            work, edge, bounds, edge.dtype, port.device, kinds=stage_kind, largest_bound=1.0
        )
        narrow, gates, more = compare_narrow(comparison, both.names, original, ours)
        rows, notices = [*rows, *gates], (*notices, *more)
    constants = noise["original"].floors(Rounding.CONSTANTS)
    try:
        place = localise(both.names, original, ours, constants)
        while two := compensated(alignment, rows, place, outputs):
            if not has_effect(two, both.names, original, ours, place):
                break
            alignment = without(alignment, [two])
            both.names = replace(both.names, alignment=alignment)
            rows = [row for row in rows if row.quantity != two.port]
            notices = (*notices, notice_of(two))
            place = localise(both.names, original, ours, constants)
    except SideError as error:
        # A capture, for example, cannot be rerun with other values. The rows so far remain valid.
        place = Place(PortEdge.PORT32_ORIGINAL32, ())
        notices = (*notices, f"stages were not tested one by one on correct inputs: {error}")
    if place.edge is PortEdge.ORIGINAL32_PORT64:
        comparison = Comparison(work, place.edge, bounds, "float32", port.device, kinds=stage_kind)
        rows += [
            comparison.gate(stage.name, FORCED, stage.forced, stage.tolerance)
            for stage in place.stages
        ]
    rows = [_hidden_by_tables(row, place, bounds) for row in rows]
    rows = without_constants(rows, *both.compared())
    ledger = both.ledger(rows, port)
    edge = PortEdge.PORT32_ORIGINAL32
    comparison = Comparison(work, edge, bounds, edge.dtype, port.device, kinds=stage_kind)
    rows = require_an_output(rows, ledger, comparison)
    rows += _not_in_low_precision(port.port, rows, ours.best.outputs, comparison)
    unmoved, moved = both.misconverted(rows, port, place, again)
    # With wrong parameters the operations are those of the original, on other numbers.
    place = replace(place, operation=None if moved else place.operation)
    hints: Any = {"untransposed": unmoved, "misplaced": moved, "lost": tuple(lost)}
    known = alignment, matching, place, narrow, notices, ledger
    return Report(port.title, tuple(rows), *known, **hints)


def _not_in_low_precision(
    side: Side, rows: Sequence[Measurement], outputs: Iterable[str], comparison: Comparison
) -> list[Measurement]:
    """Return a "not comparable" measurement for each output that no gate checks in the port's
    float32 run, if the port computes in low precision on purpose, such as under autocast; for every
    output if no operation used the low precision.

    Gates on the float64 run do not count, since such a side computes that run in full precision.
    Empty for other sides.

    Args:
        side: the port's side.
        rows: all measurements.
        outputs: names of the port's outputs.
        comparison: settings of the edge; creates the measurements.
    """
    if not isinstance(side, LowPrecision):
        return []
    if side.autocast not in side.used:
        note = f"no operation ran in {side.autocast}: the program may disable autocast"
        return [comparison.unmeasured(name, note, "compared") for name in outputs]
    narrow = (PortEdge.PORT32_ORIGINAL32, PortEdge.PORT32_PORT64)
    gates = (row for row in rows if row.edge in narrow and row.metric == "rel_l2")
    known = {row.quantity for row in gates if row.verdict in (Verdict.PASS, Verdict.FAIL)}
    note = "rounding alone may change it by its whole norm in this precision"
    missing = [name for name in outputs if name not in known]
    return [comparison.unmeasured(name, note, "compared") for name in missing]


def _repeated(row: Measurement) -> Measurement:
    """Return the measurement of a stage or output marked as deterministic, others unchanged.

    Each side gave the same bits in two float32 runs, so other bits in a later run on the same
    machine count as a change. Float64 runs are assumed to be deterministic if the float32 runs are.
    Measurements of derivatives stay unmarked, because derivatives are computed only once.
    """
    derivative = Quantity(row.quantity).role in (Role.GRADIENT, Role.COTANGENT)
    return row if derivative else replace(row, deterministic=True)


def check_two_sides(port: Port) -> None:
    """Raise a PortError unless `port` is a `Port` with two different sides and a mask of bools."""
    if not isinstance(port, Port):
        raise PortError(
            f"expected a parity.Port, got {_kind(port)}: compare one port at a time. In pytest, "
            "`@pytest.mark.ports(of=FUNCTION)` takes a function that returns several"
        )
    for name, side in (("original", port.original), ("port", port.port)):
        if not callable(getattr(side, "run", None)) or not hasattr(side, "kind"):
            raise PortError(
                f"{port.title}: expected a side as {name}=, such as parity.TorchSide(module, "
                f"inputs) or parity.FunctionSide(function, parameters, inputs), got {_kind(side)}"
            )
    # A module of Flax holds no parameters, so two sides may share it.
    modules = [getattr(s, "module", s) for s in (port.original, port.port) if s.kind == "torch"]
    if port.original is port.port or (len(modules) == 2 and modules[0] is modules[1]):
        raise PortError(
            f"{port.title}: both sides are one object, which is always equal to itself; give the "
            "port its own side"
        )
    names = port.not_compared
    if not isinstance(names, Mapping) or not all(
        isinstance(text, str) for pair in names.items() for text in pair
    ):
        raise PortError(
            f"{port.title}: expected not_compared= as a mapping of names to reasons, got {names!r}"
        )
    _check_valid(port)


def _check_valid(port: Port) -> None:
    """Raise a PortError unless `port.valid` is None, a mask, or several masks.

    An additive mask, of 0 at valid positions and minus infinity at others, would be read inverted.
    """
    if port.valid is None:
        return
    masks = [port.valid] if isinstance(port.valid, np.ndarray) else port.valid
    for mask in masks if isinstance(masks, Sequence) else [masks]:
        if not isinstance(mask, np.ndarray) or mask.dtype != bool or mask.ndim != 2:
            got = f"{mask.dtype} of shape {tuple(mask.shape)}" if hasattr(mask, "dtype") else ""
            raise PortError(
                f"{port.title}: expected valid= as a NumPy array of bools (batch, length), True at "
                f"the positions to compare, or several of them, got {_kind(mask)} {got}".rstrip()
            )


def _kind(value: object) -> str:
    """Describe the type of a value, such as `a str`; a list or tuple with its length, such as
    `a tuple of 2`."""
    name = type(value).__name__
    return f"a {name} of {len(value)}" if isinstance(value, list | tuple) else f"a {name}"


def _both_sides(port: Port) -> _Both:
    """Run both sides unmodified and in float64, and pair their parameters and stages."""
    with exits_named("a side, asked for its inputs,"):
        check_same_inputs(port.original, port.port)
    with exits_named("a side, asked for its parameters,"):
        parameters = [side.parameters() for side in (port.original, port.port)]
    matching = match_parameters(*map(floating, parameters))
    shared = any(p.is_equal or p.is_reordered for p in matching.pairs)
    # An exporter may have computed every parameter, such as those of an LSTM.
    if parameters[1] and not shared and not isinstance(port.port, HoldsMade):
        raise PortError(
            "the two sides share no parameter: give the port the original's weights first, for "
            "example with parity.adopt.\n" + matching.text()
        )
    how: Any = {"masked_outputs": port.masked_outputs, "left_out": (*port.not_compared,)}
    theirs, mine, tables = without_shared_tables(port.original, port.port, parameters[0])
    sums = exact_sums(matching, parameters[0], mine)
    original = SideRuns(theirs, port.valid, "original", **how)
    ours = SideRuns(mine, port.valid, "port", sums=sums, **how)
    dropped = {*original.dropped.values(), *ours.dropped.values()}
    apart = _of_one_side(matching, parameters)
    declared = frozenset(name for name in port.not_compared if name in apart)
    if two := [name for name in declared if name in dropped]:
        raise PortError(
            f"not_compared names {', '.join(sorted(two))}, which is a parameter and an output, or "
            "part of an output's name: rename one of the two"
        )
    if unknown := [name for name in port.not_compared if name not in {*dropped, *declared}]:
        names = [*original.best.outputs, *original.best.exact, *original.best.unread]
        raise PortError(
            f"not_compared names {', '.join(unknown)}, which no side returns, and which is no "
            "parameter that only one side has; expected outputs "
            f"such as {', '.join(names)}"
            + (f", or parameters such as {', '.join(apart)}" if apart else "")
        )
    if empty := [name for name, reason in port.not_compared.items() if not reason.strip()]:
        raise PortError(
            f"not_compared has no reason for {', '.join(empty)}: give each name a reason as its "
            "value in Port.not_compared"
        )
    # Both sides hold these numbers bit for bit: equal, in another order, or as a sum that is exact
    # in float64 runs. A sum that stays rounded to float32 is another number.
    equal = [
        pair
        for pair in matching.pairs
        if (pair.is_equal or pair.is_reordered)
        and (pair.port in sums or not pair.construction.adds)
    ]
    names = (name for pair in equal for name in (*pair.originals, *pair.also))
    original.shared = tables | {*names}
    if isinstance(port.port, HoldsMade):
        # What an exporter computed is rounded to float32, so it is no number that both sides hold.
        ours.shared = frozenset(pair.port for pair in equal)
    returned = original.best.outputs, ours.best.outputs
    stages = original.best.stages, ours.best.stages
    alignment = align(*stages, outputs=returned, pins=port.pins)
    return _Both(Correspondence(alignment, matching), original, ours, declared)


@dataclass
class _Both:
    """Runs of both sides, and the pairs of their stages and parameters, by the port's names."""

    names: Correspondence
    original: SideRuns
    port: SideRuns
    declared: frozenset[str] = frozenset()
    """Parameters that only one side has, and that the case excludes (`Port.not_compared`)."""

    def differentiate(self, port: Port) -> None:
        """Repeat the runs of both sides with derivatives: those of `port.loss`, or, without a loss,
        of the sum of all paired outputs times fixed random cotangents.

        Raises:
            PortError: the loss is not an output of both sides.
        """
        aligned = {pair.port for pair in self.names.alignment.pairs}
        best = self.port.best
        outputs = {name: best.stages[name] for name in best.outputs if name in aligned}
        if port.loss is not None:
            if port.loss not in outputs or outputs[port.loss].size != 1:
                raise PortError(
                    "expected as Port.loss the name of a scalar that both sides return, got "
                    f"{port.loss!r}; the outputs of both sides and their shapes are "
                    f"{', '.join(f'{n} {x.shape}' for n, x in outputs.items())}"
                )
            cotangents = {port.loss: np.ones_like(outputs[port.loss], np.float32)}
        else:
            cotangents = direction(outputs, port.valid)
        self.port.differentiate(cotangents)
        self.original.differentiate(self.names.cotangents(cotangents))

    def view(self, side: str, trace: Trace) -> dict[str, np.ndarray]:
        """Return a run's stages and gradients that have a counterpart, by the port's names.

        Args:
            side: `original` or `port`.
            trace: a run of that side.
        """
        if side == "original":
            stages = self.names.stages(trace.stages)
            return stages | self.names.gradients(trace.gradients, self.port.best.gradients)[0]
        aligned = (pair.port for pair in self.names.alignment.pairs)
        stages = {name: trace.stages[name] for name in aligned if name in trace.stages}
        return stages | self.names.gradients(self.original.best.gradients, trace.gradients)[1]

    def runs(self, side: str) -> SideRuns:
        """Return the runs of the side named `original` or `port`."""
        return self.original if side == "original" else self.port

    def lost(self, side: Side, noise: Mapping[str, Noise]) -> list[str]:
        """Return the names of the original's parameters that the port lacks and will need once
        trained.

        Only constant parameters are returned: a bias starts at 0 and a scale at 1, so a port
        without this parameter computes the same until training changes it. Training changes a
        parameter if its derivative in the original is not 0. A derivative that is 0 up to rounding,
        such as that of a key bias, does not count. A missing parameter with varying values needs no
        such test: either a stage differs, or the port recomputes the parameter, such as a table.

        Args:
            side: the original.
            noise: noise of both sides, by `original` and `port`.
        """
        values = side.parameters()
        theirs = noise["original"]
        rounding = {name for name in theirs.norms if theirs.is_rounding(name)}
        gradients = self.original.best.gradients
        alone = (entry.name for entry in self.names.matching.unmatched_original)
        fresh = [name for name in alone if values[name].size and np.ptp(values[name]) == 0]
        return [
            name
            for name in fresh
            if np.any(gradients.get(name, 0)) and _of_the_original(name) not in rounding
        ]

    def made(self, shown: Collection[str]) -> list[str]:
        """Return the names of the port's parameters that an exporter computed from the original's
        (`HoldsMade`); empty if no exporter made the port.

        A parameter that has the name of one of the original's counts only if it is that parameter
        with a norm folded in (`folded`); any other value would be a wrong weight.

        Args:
            shown: names of the port's parameters that already count as equal.
        """
        side = self.port.side
        if not isinstance(side, HoldsMade):
            return []
        theirs, mine = self.original.side.parameters(), side.parameters()
        other = [n for n in _not_the_original_s(self.names.matching) if n not in shown]
        missing = [entry.name for entry in self.names.matching.unmatched_original]
        scaled = folded(other, mine, theirs, missing)
        return side.made([n for n in other if n not in theirs or n in scaled])

    def misconverted(
        self, rows: Sequence[Measurement], port: Port, place: Place, again: bool
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Return notes on parameters that were converted wrongly; see `parity.port.conversion`.

        Args:
            rows: the measurements; if all gates pass, there are no notes.
            port: the port and its original.
            place: where the difference starts.
            again: whether the port may be compared again with other parameters; only then can
                exchanged parameters be found.

        Returns:
            Notes on square matrices that are not transposed, and notes on exchanged parameters,
            both by name of the port's parameter; at most one of the two is not empty.
        """
        if _all_hold(rows):
            return {}, {}
        moved: dict[str, str] = {}
        if again:
            original = port.original.parameters()
            moved = misplaced(
                self.names.matching, original, port.port, lambda side: _would_hold(port, side)
            )
        return ({} if moved else untransposed(place, self.names, self.original, self.port)), moved

    def shown_by_derivatives(self) -> frozenset[str]:
        """Return the names of reordered parameters whose order is confirmed if all gates pass.

        A reordered parameter has the original's values in another order. Passing gates confirm the
        order only if the original's derivative by this parameter is nonzero somewhere in every row
        and column: they show nothing about rows that these inputs do not use, such as embeddings of
        tokens that do not occur.
        """
        gradients = self.original.best.gradients
        return frozenset(
            pair.port
            for pair in self.names.matching.pairs
            if pair.is_reordered and all(_all_used(gradients.get(n)) for n in pair.originals)
        )

    def alone(self) -> list[str]:
        """Return notices about the original's parameters that the port lacks, holds only in part,
        stores several times or as one, and about sides without trainable parameters."""
        matching = self.names.matching
        parameters = [entry.name for entry in matching.unmatched_original]
        notices = [
            f"the port holds only a part of the original's {name}: {missing:,} of its elements are "
            "in no parameter of the port and not compared, such as rows that these inputs do not "
            "use"
            for name, missing in elements_not_held(matching.pairs).items()
        ]
        if parameters:
            notices.append(
                f"no parameter of the port holds the original's {', '.join(parameters)}: the port "
                "computes them itself, does not need them for these inputs, or lacks them"
            )
        for originals, ports in matching.tied:
            trained = [name for name in originals if name in self.original.best.gradients]
            if len(trained) > len(ports):
                notices.append(
                    f"the original's {', '.join(trained)} are held as {', '.join(ports)} by the "
                    "port: they are equal now and would be trained apart in the original"
                )
            if len(ports) > len(originals):
                notices.append(
                    f"the original's {', '.join(originals)} is {len(ports)} parameters of the "
                    f"port, {', '.join(ports)}: they are equal now and would be trained apart"
                )
        for side, runs in (("original", self.original), ("port", self.port)):
            if runs.cotangents is not None and not runs.best.gradients:
                notices.append(f"no derivative is compared: the {side} has no trained parameter")
        return notices

    def judged(
        self, work: Work, device: str, again: bool
    ) -> tuple[dict[str, Noise], PortBounds, list[Measurement], tuple[str, ...]]:
        """Measure how rounding changes both sides' results, and compare the sides within the bounds
        derived from this noise.

        Args:
            work: the work given to both sides.
            device: class of the device, "cpu" or "cuda".
            again: whether noise may be measured again with more runs if failing gates might then
                pass.

        Returns:
            The noise of the sides `original` and `port`, the bounds, the measurements of all edges,
            and notices.
        """
        first = {side: self._noise(side) for side in ("original", "port")}
        noise = _completed(first)
        bounds, rows = self._judged(noise, work, device)
        if not again or not self._is_close(rows, noise, work):
            return noise, bounds, rows, ()
        better = {side: self._more(side, each) for side, each in first.items()}
        sides = [side for side in first if better[side].responses != first[side].responses]
        if not sides:
            return noise, bounds, rows, ()
        noise = _completed(better)
        notice = (
            f"{MORE_SEEDS} perturbed runs of the {' and the '.join(sides)} measured noise floors, "
            f"since gates failed by little with {SEEDS} runs"
        )
        return noise, *self._judged(noise, work, device), (notice,)

    def _is_close(
        self, rows: Sequence[Measurement], noise: Mapping[str, Noise], work: Work
    ) -> bool:
        """Return whether some gates fail, and all of these might pass with noise floors measured by
        more runs.

        They might pass if they do with noise floors `STUDENT` times as large, and no parameter of
        the port is wrong.
        """
        failing = [row for row in rows if row.verdict is Verdict.FAIL]
        wrong = [p for p in self.names.matching.pairs if not (p.is_equal or p.is_reordered)]
        alone = [e.name for e in self.names.matching.unmatched_port if e.name not in self.declared]
        if not failing or wrong or alone:
            return False
        largest = PortBounds.of(*(noise[s].enlarged(STUDENT) for s in ("original", "port")))
        return all(
            row.metric == "rel_l2"
            and row.value <= largest.bound(PortEdge(row.edge), row.kind, work, row.quantity)
            for row in failing
        )

    def _judged(
        self, noise: Mapping[str, Noise], work: Work, device: str
    ) -> tuple[PortBounds, list[Measurement]]:
        """Return the bounds derived from the noise of both sides, and the gates of all edges."""
        bounds = PortBounds.of(noise["original"], noise["port"])
        rows: list[Measurement] = []
        for edge in self.edges():
            comparison = Comparison(
                work,
                edge,
                bounds,
                edge.dtype,
                device,
                kinds=stage_kind,
                largest_bound=1.0,
                scales=bounds.scales.get(edge, {}),
            )
            rows += self.rows(edge, comparison)
        return bounds, rows

    def _noise(self, side: str) -> Noise:
        """Return the L2 norms of one side's results and of their changes under rounding; empty if
        the side cannot run in float64."""
        runs = self.runs(side)
        if runs.wide is None:
            return Noise()
        exact = self._measured(side, runs.wide)
        responses, squares = {}, {}
        for kind in Rounding:
            found = Squares()
            with contextlib.suppress(SideError):
                responses[kind] = responses_of(exact, self._moved(side, kind), squares=found)
                squares[kind] = found.mean()
        return Noise(norms_of(exact), responses, squares)

    def _more(self, side: str, noise: Noise) -> Noise:
        """Return the noise of one side with its responses (norms of changes under rounding)
        measured by `MORE_SEEDS` runs.

        If the side refuses more runs, as a capture does, its noise is unchanged. `Noise.squares` is
        always unchanged: the bounds derived from it allow for few runs (`STUDENT`).
        """
        runs = self.runs(side)
        if runs.wide is None:
            return noise
        exact = self._measured(side, runs.wide)
        responses = dict(noise.responses)
        for kind, first in noise.responses.items():
            with contextlib.suppress(SideError):
                rest = responses_of(exact, self._moved(side, kind), range(SEEDS, MORE_SEEDS))
                responses[kind] = pooled(first, rest)
        return replace(noise, responses=responses)

    def _moved(self, side: str, kind: Rounding) -> Callable[[int], dict[str, np.ndarray]]:
        """Return a function that runs one side perturbed by rounding with a given seed, and returns
        the compared values."""
        runs = self.runs(side)
        return lambda seed: self._measured(side, runs.moved(kind, seed))

    def _measured(self, side: str, trace: Trace) -> dict[str, np.ndarray]:
        """Return the compared values of a run, by the port's names.

        For the original, the derivatives by parameters that the port lacks are added, under the
        names that `_of_the_original` returns.
        """
        found = self.view(side, trace)
        if side == "port":
            return found
        alone = (entry.name for entry in self.names.matching.unmatched_original)
        return found | {
            _of_the_original(name): trace.gradients[name]
            for name in alone
            if name in trace.gradients
        }

    def edges(self) -> list[PortEdge]:
        """Return the edges (pairs of runs) that can be compared, float64 on both sides first."""
        wide = (self.port.wide is not None, self.original.wide is not None)
        edges = {
            (True, True): (
                PortEdge.PORT64_ORIGINAL64,
                PortEdge.PORT32_PORT64,
                PortEdge.ORIGINAL32_ORIGINAL64,
            ),
            (True, False): (PortEdge.PORT32_PORT64, PortEdge.ORIGINAL32_PORT64),
            (False, True): (PortEdge.ORIGINAL32_ORIGINAL64, PortEdge.PORT32_ORIGINAL64),
            (False, False): (),
        }
        return [*edges[wide], PortEdge.PORT32_ORIGINAL32]

    def rows(self, edge: PortEdge, comparison: Comparison) -> list[Measurement]:
        """Return the measurements of one edge: stages, outputs and derivatives.

        Integer and bool outputs are added on edges between two float64 or two float32 runs.
        """
        arrays = self.arrays(edge)
        rows = [self._explained(row) for row in comparison.run(*arrays)]
        rows = [_with_hidden(row, comparison, *arrays) for row in rows]
        rows = [_repeated(_with_scale(row, comparison)) for row in rows]
        if edge not in (PortEdge.PORT64_ORIGINAL64, PortEdge.PORT32_ORIGINAL32):
            return rows
        ours, theirs = (self._trace(name) for name in edge.sides)
        assert ours is not None and theirs is not None
        return rows + compare_exactly(
            comparison, theirs.exact, ours.exact, exact_partners(theirs.exact, ours.exact)
        )

    def arrays(self, edge: PortEdge) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Return the arrays of the left and the right run of an edge, by the port's names.

        An output without a partner is in one of the two only, so that its comparison fails. An
        infinity that is a mask is 0 in both (`without_shared_infinities`).
        """
        left, right = (dict(self._arrays(name)) for name in edge.sides)
        if edge in BETWEEN:
            sides = dict(zip((name.rstrip("0123456789") for name in edge.sides), (left, right)))  # noqa: B905
            self._add_unpaired(sides["port"], sides["original"], edge)
        for name in left.keys() & right.keys():
            if self._may_be_masked(name):
                truth = self._truth(name, edge)
                if truth is not None:
                    shared = without_shared_infinities(left[name], right[name], truth)
                    left[name], right[name] = shared
        return left, right

    def _add_unpaired(
        self, port: dict[str, np.ndarray], original: dict[str, np.ndarray], edge: PortEdge
    ) -> None:
        """Add to the arrays of both sides, in place, the outputs without a partner, and those of
        another shape than their partner.

        In `original`, an output of another shape replaces the same output rearranged to the port's
        shape, so that comparing the shapes fails.

        Args:
            port: arrays of the port's run, by the port's names.
            original: arrays of the original's run, by the port's names.
            edge: the two runs.
        """
        paired = {*port, *original}
        for name in self.port.best.outputs:
            if name not in paired:
                port[name] = self.port.best.stages[name]
        trace = next(self._trace(n) for n in edge.sides if n.startswith("original"))
        assert trace is not None
        partners = self.partners()
        for name in self.original.best.outputs:
            mine = partners.get(name)
            if mine is None:
                alone = name if name not in paired else f"{name} of the original"
                original[alone] = trace.stages[name]
            elif port[mine].shape != trace.stages[name].shape:
                original[mine] = trace.stages[name]

    def partners(self) -> dict[str, str]:
        """Return the names of the port's outputs by the names of the original's."""
        ours = self.port.best
        pairs = self.names.alignment.pairs
        named = {p.original: p.port for p in pairs if p.port in ours.outputs}
        floats = {n: named[n] for n in self.original.best.outputs if n in named}
        return floats | exact_partners(self.original.best.exact, ours.exact)

    def _may_be_masked(self, name: str) -> bool:
        """Return whether infinities in a quantity may be masks.

        In stages they may be, in outputs only with `Port.masked_outputs`, in derivatives never.
        """
        if Quantity(name).role is Role.GRADIENT:
            return False
        return name not in self.port.best.outputs or self.port.masked_outputs

    def _truth(self, name: str, edge: PortEdge) -> np.ndarray | None:
        """Return float64 values of a quantity, preferably from a float64 run of this edge.

        None if neither side has a float64 run with this quantity.
        """
        wide = [side for side in edge.sides if side.endswith("64")] or ["original64", "port64"]
        found = (self._arrays(side).get(name) for side in reversed(wide))
        return next((x for x in found if x is not None), None)

    def _explained(self, row: Measurement) -> Measurement:
        """Return a measurement; if it is of an output that fails, with a note on how the output is
        wrong."""
        if row.verdict is not Verdict.FAIL:
            return row
        pair = next((p for p in self.names.alignment.pairs if p.port == row.quantity), None)
        theirs = self.original.best.outputs
        if pair is not None and pair.original in theirs and row.quantity in self.port.best.outputs:
            shapes = pair.layout.source, pair.layout.target
            if shapes[0] != shapes[1]:
                note = f"expected shape {shapes[0]}, received {shapes[1]}"
                if pair.distance <= EQUAL:
                    note += f"; the values agree when {pair.layout.text()}"
                return replace(row, note=note)
            if math.isnan(row.value) and not self.port.masked_outputs:
                values = self.port.best.stages[pair.port]
                if np.isinf(values).any():
                    note = "infinite: set Port(masked_outputs=True) if these are masks"
                    return replace(row, note=note)
        if pair is None and row.note.startswith("missing in port"):
            computed = {p.original: p.port for p in self.names.alignment.pairs}
            stage = computed.get(row.quantity)
            how = f"computes it as {stage} and does not return it" if stage else "does not"
            return replace(row, note=f"the original returns it and the port {how}")
        return row

    def compared(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Return outputs and derivatives of the original, then of the port, by the port's names.

        Each is a vector of the elements at valid positions, from the side's most precise run.
        """
        sides = []
        for side, runs in (("original", self.original), ("port", self.port)):
            found = self.view(side, runs.best)
            of_interest = {
                name: x
                for name, x in found.items()
                if name in self.port.best.outputs or Quantity(name).role is Role.GRADIENT
            }
            exact = self.port.best.exact
            if side == "original":
                partners = exact_partners(runs.best.exact, exact)
                exact = {mine: runs.best.exact[name] for name, mine in partners.items()}
            sides.append(self._at_valid(of_interest | exact))
        return sides[0], sides[1]

    def _at_valid(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return each array as a vector of its elements at valid positions; a gradient keeps all
        its elements."""
        results = {
            n: np.ones(x.shape) for n, x in arrays.items() if not n.startswith(Role.GRADIENT)
        }
        counted = only_valid(results, self.port.valid)
        return {n: x[counted[n] > 0] if n in counted else x.ravel() for n, x in arrays.items()}

    def ledger(self, rows: Sequence[Measurement], port: Port) -> tuple[Entry, ...]:
        """Return one ledger entry for each output and derivative of the original: whether it was
        compared, or why not."""
        without_derivatives = ""
        if not port.gradients:
            without_derivatives = "it was not requested (Port.gradients)"
        for side, runs in (("original", self.original), ("port", self.port)):
            if port.gradients and not runs.best.gradients:
                without_derivatives = f"the {side} has no trained parameter"
        left_out = {name: port.not_compared[by] for name, by in self.original.dropped.items()}
        return ledger_of(
            rows,
            self.original.best,
            self.partners(),
            self.names.matching,
            left_out=left_out,
            parameters={n: port.not_compared[n] for n in port.not_compared if n in self.declared},
            inputs=list(floating(port.original.inputs())),
            without_derivatives=without_derivatives,
        )

    def _arrays(self, name: str) -> dict[str, np.ndarray]:
        trace = self._trace(name)
        return {} if trace is None else self.view(name.rstrip("0123456789"), trace)

    def _trace(self, name: str) -> Trace | None:
        """Return a run by its name, such as `port32`; None if that run was not made."""
        runs = self.runs(name.rstrip("0123456789"))
        return runs.narrow if name.endswith("32") else runs.wide

    def unstable(self, port: Port) -> Report | None:
        """Return a failing report if a side gives different bits in two float32 runs, else None.

        Nothing else is compared then: the run-to-run noise would enter the tolerance, and a wrong
        port could pass.
        """
        stages = (*self.port.best.stages,)
        work = Work(port.title, port.work or _digest(port), stages, suite=port.name)
        edge = PortEdge.PORT32_ORIGINAL32
        comparison = Comparison(
            work, edge, PortBounds({}), "float32", port.device, kinds=stage_kind
        )
        partners = {pair.original: pair.port for pair in self.names.alignment.pairs}
        rows = []
        for side in ("original", "port"):
            stage = self.runs(side).unrepeatable
            if stage is not None:
                name = partners.get(stage, stage) if side == "original" else stage
                note = (
                    f"the {side} is not deterministic: two runs of the same inputs differ from "
                    f"{stage} on; is it in evaluation mode, and does it get its random key?"
                )
                rows.append(comparison.missing(name, note))
        if not rows:
            return None
        notices = (*self.original.notices, *self.port.notices, "nothing else was compared")
        names, place = self.names, Place(edge, ())
        known = names.alignment, names.matching, place
        return Report(port.title, tuple(rows), *known, narrow=(), notices=notices, ledger=())


def floating(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the arrays that are not integers or bools.

    An error in an integer table, such as indices, shows in the stages computed from it.
    """
    # dtype.kind does not separate bfloat16 from int4, which both come from ml_dtypes.
    whole = {n for n, x in arrays.items() if x.dtype.kind in "biu" or "int" in x.dtype.name}
    return {n: x for n, x in arrays.items() if n not in whole}


def _of_the_original(name: str) -> str:
    """Return the quantity (name in measurements) of a derivative that only the original has."""
    return f"{Quantity.gradient(name)} of the original"


def _with_hidden(
    row: Measurement,
    comparison: Comparison,
    actual: dict[str, np.ndarray],
    expected: dict[str, np.ndarray],
) -> Measurement:
    """Return a measurement; a passing gate is turned into a failure if elements hidden by larger
    ones do not pass.

    An element is hidden if it is too small for an error in it to break the bound of the whole array
    (`parity.port.hidden`). The value of the failure is the hidden elements' error divided by their
    bound, times the tolerance.

    Args:
        row: the measurement of one quantity.
        comparison: settings of the edge, with its bounds.
        actual: values of the left run by quantity.
        expected: values of the right run by quantity.
    """
    bounds = comparison.floors
    assert isinstance(bounds, PortBounds)
    if row.metric != "rel_l2" or row.verdict is not Verdict.PASS:
        return row
    a, e = (np.asarray(side[row.quantity], np.float64) for side in (actual, expected))
    found = bounds.hidden(comparison.edge, row.kind, row.quantity, a, e)
    if found is None or found.fraction <= 1.0:
        return row
    return replace(
        row,
        value=found.fraction * row.tolerance,
        verdict=Verdict.FAIL,
        note=found.text(),
    )


def _hidden_by_tables(row: Measurement, place: Place, bounds: PortBounds) -> Measurement:
    """Return a measurement; the passing float64 gate of a stage is turned into a failure if it
    passes only because of tables.

    Two float32 tables (precomputed constants) that differ by rounding widen the float64 tolerances
    of everything computed from them, to about 1e-7, which can hide a wrong epsilon. The stage fails
    if

    - its error given correct inputs (forced) and its free error both exceed its own tolerance and
      the tolerance that the gate would have without tables; and
    - its forced error is at most `ROOM` times its free error. A larger forced error has another
      reason, such as a value that the port computes elsewhere.
    """
    edge = PortEdge.PORT64_ORIGINAL64
    if (row.edge, row.metric, row.verdict) != (edge, "rel_l2", Verdict.PASS):
        return row
    stage = next((s for s in place.stages if s.name == row.quantity), None)
    if stage is None or place.edge is not edge or not stage.broken:
        return row
    plain = bounds.without_tables(row.kind, row.quantity)
    hidden = plain < row.tolerance and max(plain, stage.tolerance) < stage.free
    if not hidden or not plain < stage.forced <= ROOM * stage.free:
        return row
    return replace(
        row,
        value=stage.forced / stage.tolerance * row.tolerance,
        verdict=Verdict.FAIL,
        note=(
            f"fed the original's values it differs by {stage.forced:.1e} of {stage.tolerance:.1e}; "
            "in the free run, float32 tables widen the tolerance and hide this"
        ),
    )


def _with_scale(row: Measurement, comparison: Comparison) -> Measurement:
    """Return a measurement; if the terms of its quantity cancel, with a note on what the error is
    relative to."""
    assert isinstance(comparison.floors, PortBounds)
    cancelled = row.quantity in comparison.floors.cancelled.get(comparison.edge, ())
    if row.metric != "rel_l2" or row.note or not cancelled:
        return row
    return replace(row, note=CANCELLED)


def _weights(
    work: Work,
    bounds: PortBounds,
    matching: Matching,
    device: str,
    lost: Sequence[str],
    shown: Collection[str] = (),
) -> Measurement:
    """Return the gate on parameters: how many of the port's parameters are wrong or missing.

    Args:
        work: the work given to both sides.
        bounds: the tolerances.
        matching: the pairs of parameters.
        device: class of the device, "cpu" or "cuda".
        lost: the original's parameters that the port lacks and will need once trained
            (`_Both.lost`).
        shown: the port's parameters that count as equal: they hold the original's values in another
            order, such as that of an LSTM's gates (`_Both.shown_by_derivatives`), or an exporter
            computed them (`_Both.made`).
    """
    edge = PortEdge.PORT32_ORIGINAL32
    other = [name for name in _not_the_original_s(matching) if name not in shown]
    row = Comparison(work, edge, bounds, "float32", device).judged(
        WEIGHTS, "unmatched", float(len(other) + len(lost))
    )
    notes = [f"not the original's: {', '.join(other)}"] if other else []
    notes += [f"the original's that the port does not have: {', '.join(lost)}"] if lost else []
    return replace(row, note="; ".join(notes)) if notes else row


def _not_the_original_s(matching: Matching) -> list[str]:
    """Return the port's parameters that hold other values than the original's."""
    other = [pair.port for pair in matching.pairs if not pair.is_equal]
    return other + [entry.name for entry in matching.unmatched_port]


def _of_one_side(matching: Matching, parameters: Sequence[Mapping[str, np.ndarray]]) -> list[str]:
    """Return the parameters of either side that have no partner, not even one of other values, and
    whose name the other side does not have."""
    theirs, ours = parameters
    apart = [entry.name for entry in matching.unmatched_port if entry.name not in theirs]
    return apart + [e.name for e in matching.unmatched_original if e.name not in ours]


def _all_hold(rows: Sequence[Measurement]) -> bool:
    """Return whether every gate passes, and at least one gate exists."""
    verdicts = {m.verdict for m in rows}
    return Verdict.PASS in verdicts and verdicts <= {Verdict.PASS, Verdict.INFO}


def _completed(noise: Mapping[str, Noise]) -> dict[str, Noise]:
    """Return the noise of the sides `original` and `port`; an original without responses gets those
    of the port.

    A response is the norm of a result's change under rounding. An original that is a capture may
    have no perturbed runs; its results are then assumed to respond like the port's.
    """
    original, port = noise["original"], noise["port"]
    responses = {
        kind: original.responses.get(kind) or port.responses.get(kind, {}) for kind in Rounding
    }
    squares = {kind: original.squares.get(kind) or port.squares.get(kind, {}) for kind in Rounding}
    return {"original": replace(original, responses=responses, squares=squares), "port": port}


def _all_used(gradient: np.ndarray | None) -> bool:
    """Return whether every row, column and other slice of a gradient has an element that is not 0.

    False without a gradient.
    """
    if gradient is None:
        return False
    axes = range(gradient.ndim)
    return all(np.any(gradient != 0, axis=tuple({*axes} - {axis})).all() for axis in axes)


def _digest(port: Port) -> str:
    """Return a hash of the title, and of the parameters and inputs of both sides."""
    digest = hashlib.sha256(port.title.encode())
    for side in (port.original, port.port):
        for name, array in (*side.parameters().items(), *side.inputs().items()):
            digest.update(f"{side.kind} {name} {array.shape} {array.dtype}".encode())
            digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return digest.hexdigest()[:16]
