"""Adopts the parameters of an original: converts them for a port that has no conversion yet.

Names and shapes propose from which parameters of the original each parameter of the port is made
(`parity.engine.pairing.proposal`). The proposal is then tested: both programs are compared with the
converted parameters, and where they differ, other layouts, exchanges and orders are tried. What the
comparison cannot confirm is a question, which a person answers in a file.

Source: docs/your-own-port.md "Convert the parameters".
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from parity.engine.measure.arrays import Arrays
from parity.engine.measure.localize import first_divergence
from parity.engine.measure.measurement import Verdict
from parity.engine.measure.metrics import relative_l2
from parity.engine.measure.quantity import Quantity, Role
from parity.engine.pairing import naming
from parity.engine.pairing.constructions import Construction, Piece, laid_out
from parity.engine.pairing.conventions import nearness
from parity.engine.pairing.converter import converter_source
from parity.engine.pairing.layouts import Layout, Shape, identity, transposition
from parity.engine.pairing.order_of_use import paired_in_order
from parity.engine.pairing.parameter_pairs import Matching, Means, Pair, Unmatched
from parity.engine.pairing.proposal import MOST_PARTS, propose
from parity.port.answers import constructions_of, read_answers, write_questions
from parity.port.compare import CANCELLED, Port, PortError, compare, floating
from parity.port.ledger import BETWEEN, has_output
from parity.port.report import Report, first_use
from parity.port_tolerances import PortEdge
from parity.sides.side import Side, SideError, TakesParameters

TRIES = 48
"""Largest number of comparisons with another construction; each runs both programs several
times."""
AT_ONE_STAGE = 16
"""Largest number of other constructions tried to correct one stage, those of its own parameters
first."""
# Norm weights are all 1 and biases all 0 at initialisation: without noise, values could not show
# that two of them were exchanged. Relative noise keeps the scale of the program; the second term
# moves zeros, and is positive, so that variances stay positive.
RELATIVE = 0.1
"""Largest relative noise on the original's parameters while the proposal is tested."""
ABSOLUTE = 0.02
"""Largest absolute noise on the original's parameters while the proposal is tested."""
CHOICES = 5
"""Largest number of parameters of the original that a question lists."""
KEEPS = "keeps the port's own value, as answered"
"""Note on a parameter that a person excluded from the conversion."""


@dataclass(frozen=True)
class Question:
    """A parameter of the port whose conversion no comparison confirmed."""

    parameter: str
    """Name of the parameter, or the pattern of several, with `{}` in place of each number."""
    parameters: tuple[str, ...]
    """Names of the parameters that the question is about."""
    shape: Shape
    proposed: str
    """Description of the proposed construction of the first one; empty if there is none."""
    why: str
    choices: tuple[str, ...]
    """Parameters of the original with as many elements, the unused ones first; `{}` stands for a
    number."""

    def to_json(self) -> dict[str, Any]:
        """Return the question as it is written to a file of answers."""
        return {
            "shape": self.shape,
            "proposed": self.proposed,
            "why": self.why,
            "choices": self.choices,
        }

    def text(self) -> str:
        """Return the question as one line."""
        count = f" ({len(self.parameters)} of them)" if len(self.parameters) > 1 else ""
        proposed = f", proposed {self.proposed}" if self.proposed else ""
        choices = f"; fit: {', '.join(self.choices)}" if self.choices else ""
        return f"{self.parameter}{count} {self.shape}{proposed}: {self.why}{choices}"


@dataclass(frozen=True)
class Adoption:
    """Parameters of a port that were made from its original's."""

    title: str
    matching: Matching
    """Construction of each parameter of the port."""
    parameters: dict[str, np.ndarray]
    """The constructed parameters by name, in the port's shapes and the original's dtypes."""
    side: Side
    """The port's side with these parameters."""
    report: Report | None
    """Comparison that tested the constructions; None if the sides cannot be compared."""
    confirmed: frozenset[str]
    """Names of the port's parameters whose construction a comparison confirmed."""
    inferred: frozenset[str]
    """Names of the port's parameters on which no result depends, but whose module is confirmed to
    be a certain one of the original."""
    questions: tuple[Question, ...]
    """The other parameters of the port, except those with an answer."""
    changed: tuple[str, ...]
    """Changes of the proposal that a comparison showed to be right, a sentence each."""
    notices: tuple[str, ...]
    """Remarks for the reader, a sentence each."""

    @property
    def holds(self) -> bool:
        """Whether both programs compute the same, no question is left, and the port has every
        parameter that the original trains."""
        lost = () if self.report is None else self.report.lost
        return self.agrees and not self.questions and not lost

    @property
    def agrees(self) -> bool:
        """Whether both programs compute the same with the constructed parameters."""
        return self.report is not None and _agree(self.report)

    @property
    def unused(self) -> tuple[Unmatched, ...]:
        """Parameters of the original of which no parameter of the port is made."""
        return self.matching.unmatched_original

    def source(self) -> str:
        """Return a Python module with the function `convert(original) -> port`, which needs only
        NumPy."""
        return converter_source(self.matching)

    def text(self) -> str:
        """Return the result as text; the first line says whether anything is left to do."""
        total = len(self.matching.pairs) + len(self.matching.unmatched_port)
        lines = [
            f"{self.title}: {len(self.confirmed)} of {total} parameters of the port are confirmed "
            f"by a comparison, {sum(len(q.parameters) for q in self.questions)} are open"
        ]
        if self.inferred:
            names = ", ".join(dict.fromkeys(map(naming.pattern, sorted(self.inferred))))
            lines.append(f"no result depends on {names}; taken from the module of the others")
        lines += [f"changed: {change}" for change in self.changed]
        lines += [f"open: {question.text()}" for question in self.questions]
        lost = () if self.report is None else self.report.lost
        lines += [
            f"not used{', but trained' if entry.name in lost else ''}: {entry.name} {entry.shape}"
            for entry in self.unused
        ]
        lines += [f"note: {notice}" for notice in self.notices]
        if self.report is not None and not _agree(self.report):
            lines.append(self.report.sentence())
        return "\n".join(lines)


def adopt(port: Port, answers: Path | str | None = None) -> Adoption:
    """Convert the parameters of `port.original` to those of `port.port`, and test the result.

    Args:
        port: both sides; the port's parameters may have any values.
        answers: JSON file with answers to questions of an earlier call. Open questions are written
            to it; the answers in it are kept. None: no file.

    Raises:
        PortError: the port's side cannot run with other parameters.
        AnswerError: the file of answers, or an answer in it, is invalid.
    """
    side = port.port
    if not isinstance(side, TakesParameters):
        raise PortError(
            f"{port.title}: expected a port whose parameters can be set, such as FlaxSide, "
            f"EquinoxSide, NNXSide, FunctionSide or TorchSide; got a side of {side.kind}"
        )
    theirs, mine = floating(port.original.parameters()), floating(side.parameters())
    fixed, kept = constructions_of(read_answers(answers), theirs, mine, answers)
    search = _Search(port, side, propose(theirs, mine), fixed, kept)
    matching = search.run()
    parameters = matching.from_original(theirs)
    adoption = Adoption(
        port.title,
        matching,
        parameters,
        side.with_parameters(parameters),
        search.report,
        search.confirmed(),
        search.inferred(),
        tuple(search.questions(theirs, mine)),
        tuple(search.changed),
        tuple(search.notices),
    )
    if answers is not None:
        write_questions(Path(answers), {q.parameter: q.to_json() for q in adoption.questions})
    return adoption


Change: TypeAlias = tuple[str, dict[str, Construction]]
"""Sentence that describes a change of a matching, and the changed constructions by the port's
name."""


class _Search:
    """Tests a proposal by comparing both programs, and tries changes where they differ."""

    def __init__(
        self,
        port: Port,
        side: TakesParameters,
        proposal: Matching,
        fixed: Mapping[str, Construction],
        kept: Iterable[str],
    ) -> None:
        self.port, self.side = port, side
        self.fixed, self.kept = {*fixed}, {*kept}
        made = {pair.port: pair for pair in proposal.pairs if pair.port not in self.kept}
        made |= {name: Pair(name, c, Means.PROPOSAL, "as answered") for name, c in fixed.items()}
        self.order = [*floating(port.port.parameters())]
        self.pairs = {name: made[name] for name in self.order if name in made}
        self.report: Report | None = None
        self.tries = 0
        self.changed: list[str] = []
        self.notices: list[str] = []
        self.has_noise = False
        self.moving: frozenset[str] = frozenset()
        self.pairs = self._with_order(proposal)
        self.original = self._with_noise()
        self.theirs = floating(self.original.parameters())

    def run(self) -> Matching:
        """Return the best matching found."""
        self.report = self._compared(self.pairs, gradients=False)
        refused: set[str] = set()
        while self.report is not None and not _agree(self.report):
            better = next(self._improvements(self.report, refused), None)
            if better is None:
                break
            (sentence, constructions), self.report = better
            self.changed.append(sentence)
            self.pairs = self._with(constructions)
        if self.report is not None and _agree(self.report) and self.port.gradients:
            self.report = self._compared(self.pairs, gradients=True) or self.report
        if self.report is not None and _agree(self.report):
            self.moving = self._moving(self.report)
            if not self.port.gradients:
                self.report = replace(self.report, lost=tuple(sorted(self._lost(self.report))))
        return self._matching()

    def confirmed(self) -> frozenset[str]:
        """Return the parameters that the results depend on, if both programs compute the same.

        With noise on the original's parameters, no two of them are equal. So if all results hold
        and depend on a parameter (its derivative holds and is not 0, not even up to rounding), its
        construction is right. A parameter without a derivative is changed to see whether the
        results do (`_moving`).
        Without noise, constants and equal parameters are left out.
        """
        if self.report is None or not _agree(self.report):
            return frozenset()
        passed = {
            Quantity(row.quantity).name
            for row in self.report.measurements
            if row.edge in BETWEEN
            and row.verdict is Verdict.PASS
            and row.note != CANCELLED
            and Quantity(row.quantity).role is Role.GRADIENT
        }
        distinct = self.pairs.keys() if self.has_noise else self._distinct()
        return frozenset((passed | self.moving) & distinct)

    def _moving(self, report: Report) -> frozenset[str]:
        """Return the parameters without a derivative, such as running statistics, of which another
        value breaks the tolerance of a result."""
        derived = {
            Quantity(row.quantity).name
            for row in report.measurements
            if Quantity(row.quantity).role is Role.GRADIENT
        }
        values = {n: p.construction.from_original(self.theirs) for n, p in self.pairs.items()}
        left = {name: x for name, x in values.items() if name not in derived}
        return self._effective(report, self.side.with_parameters(values), left)

    def _lost(self, report: Report) -> frozenset[str]:
        """Return the constants of the original on which results depend, but which the port lacks.

        A comparison with derivatives finds them (`Report.lost`).
        """
        used = {name for pair in self.pairs.values() for name in pair.originals}
        fresh = {
            name: x
            for name, x in self.theirs.items()
            if name not in used and x.size and np.all(x == x.flat[0])
        }
        return self._effective(report, self.original, fresh)

    def _effective(self, report: Report, side: Side, values: Arrays) -> frozenset[str]:
        """Return the names of `values` without which a result leaves its tolerance."""
        edge = PortEdge.PORT32_ORIGINAL32
        bound = max(
            (
                row.tolerance
                for row in report.measurements
                if row.edge == edge and row.metric == "rel_l2" and row.verdict is Verdict.PASS
            ),
            default=math.inf,
        )
        found: set[str] = set()
        if not isinstance(side, TakesParameters):
            return frozenset()
        try:
            base = side.run()
            for name, x in [*values.items()][:TRIES]:
                moved = side.with_parameters({name: (x * 1.5 + 0.5).astype(x.dtype)}).run().stages
                if any(relative_l2(moved[o], base.stages[o]) > bound for o in base.outputs):
                    found.add(name)
        except SideError as error:
            self.notices.append(f"parameters without a derivative were not tested: {error}")
        return frozenset(found)

    def inferred(self) -> frozenset[str]:
        """Return the parameters on which no result depends, but which come from the same modules of
        the original as all other parameters of their module, which are confirmed.

        An example is the bias of an attention's key, which the softmax cancels.
        """
        confirmed = self.confirmed()
        found = set()
        for name, pair in self.pairs.items():
            module = naming.parent(name)
            others = [p for p in self.pairs if naming.parent(p) == module and module and p != name]
            modules = [*map(naming.parent, pair.originals)]
            if (
                name not in confirmed
                and others
                and confirmed.issuperset(others)
                and all([*map(naming.parent, self.pairs[p].originals)] == modules for p in others)
            ):
                found.add(name)
        return frozenset(found)

    def _distinct(self) -> set[str]:
        """Return the parameters whose originals are no constants, nor equal to one another."""
        values = {n: x for pair in self.pairs.values() for n in pair.originals
                  if (x := self.theirs[n]).size and np.any(x != x.flat[0])}  # fmt: skip
        bits = Counter((x.shape, x.tobytes()) for x in values.values())
        single = {n for n, x in values.items() if bits[x.shape, x.tobytes()] == 1}
        return {name for name, pair in self.pairs.items() if single.issuperset(pair.originals)}

    def questions(self, theirs: Arrays, mine: Arrays) -> Iterator[Question]:
        """Yield the questions about parameters that are neither confirmed nor excluded.

        Parameters whose names differ in numbers only, with one answer for all, share a question.
        """
        done = {*self.confirmed(), *self.inferred(), *self.kept, *self.fixed}
        used = {name for pair in self.pairs.values() for name in pair.originals}
        groups: dict[tuple[Any, ...], list[str]] = {}
        for name in self.order:
            if name not in done:
                pair = self.pairs.get(name)
                proposed = naming.pattern(pair.construction.text()) if pair else ""
                groups.setdefault((naming.pattern(name), mine[name].shape, proposed), []).append(
                    name
                )
        for (pattern, shape, _), names in groups.items():
            pair = self.pairs.get(names[0])
            fit = [n for n, x in theirs.items() if math.isfinite(nearness(x.shape, shape))]
            fit.sort(key=lambda n: n in used)
            yield Question(
                names[0] if len(names) == 1 else pattern,
                tuple(names),
                shape,
                pair.construction.text() if pair else "",
                self._why(pair),
                tuple(dict.fromkeys(map(naming.pattern, fit)))[:CHOICES],
            )

    def _why(self, pair: Pair | None) -> str:
        if pair is None:
            return "no parameter of the original has a similar name and a fitting shape"
        if self.report is None:
            return "the programs could not be compared"
        if not _agree(self.report):
            return "the programs differ"
        return "no result depends on it"

    def _with_order(self, proposal: Matching) -> dict[str, Pair]:
        """Return the pairs, and for what is left over pairs in the order of use."""
        used = {name for pair in self.pairs.values() for name in pair.originals}
        names = {
            "original": [u.name for u in proposal.unmatched_original if u.name not in used],
            "port": [n for n in self.order if n not in self.pairs and n not in self.kept],
        }
        shapes: dict[str, dict[str, Shape]] = {}
        for which, left in names.items():
            if not left:
                return self.pairs
            side = getattr(self.port, which)
            values = side.parameters()
            try:
                stages = [*side.run().stages]
            except SideError as error:
                self.notices.append(f"nothing is paired in the order of use: {error}")
                return self.pairs
            # Parameters of one stage stay in their order, such as that of their registration.
            order = sorted(left, key=lambda name, stages=stages: first_use(name, stages))
            shapes[which] = {name: values[name].shape for name in order}
        made = paired_in_order(shapes["original"], shapes["port"])
        note = "in the order of use"
        more = {name: Pair(name, c, Means.PROPOSAL, note) for name, c in made.items()}
        known = self.pairs | more
        return {name: known[name] for name in self.order if name in known}

    def _with_noise(self) -> Side:
        """Return the original with noise on the parameters that the port has, or unchanged."""
        original = self.port.original
        if not isinstance(original, TakesParameters):
            self.notices.append(
                "the original's parameters cannot be changed, so constants and parameters of equal "
                "value are not confirmed"
            )
            return original
        self.has_noise = True
        rng = np.random.default_rng(0)
        used = dict.fromkeys(name for pair in self.pairs.values() for name in pair.originals)
        values = floating(original.parameters())

        def moved(x: np.ndarray) -> np.ndarray:
            wide = x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)
            noise = 1 + RELATIVE * rng.uniform(-1, 1, x.shape)
            return (wide * noise + ABSOLUTE * rng.uniform(0, 1, x.shape)).astype(x.dtype)

        return original.with_parameters({name: moved(values[name]) for name in used})

    def _compared(self, pairs: Mapping[str, Pair], gradients: bool) -> Report | None:
        """Compare both programs with these constructions; None if they cannot be compared."""
        self.tries += 1
        try:
            values = {name: p.construction.from_original(self.theirs) for name, p in pairs.items()}
            side = self.side.with_parameters(values)
            return compare(
                replace(
                    self.port, original=self.original, port=side, gradients=gradients,
                    bfloat16=False, pins=()
                )
            )  # fmt: skip
        except (ValueError, ArithmeticError) as error:
            self.notices.append(f"not compared: {str(error).splitlines()[0]}")
            return None

    def _improvements(self, report: Report, refused: set[str]) -> Iterator[tuple[Change, Report]]:
        """Yield changes with which the first wrong stage becomes a later one, or none."""
        stages = [stage.name for stage in report.place.stages]
        at = _position(report, stages)
        for change in itertools.islice(self._changes(report, stages), AT_ONE_STAGE):
            if self.tries >= TRIES:
                self.notices.append(f"stopped after {TRIES} comparisons")
                return
            if change[0] in refused:
                continue
            notices = [*self.notices]
            other = self._compared(self._with(change[1]), gradients=False)
            self.notices = notices
            if other is not None and (_agree(other) or 0 <= at < _position(other, stages)):
                yield change, other
            refused.add(change[0])

    def _changes(self, report: Report, stages: Sequence[str]) -> Iterator[Change]:
        """Yield changes of the constructions, those near the first wrong stage first."""
        culprit = report.place.culprit
        at = stages.index(culprit.name) if culprit is not None else len(stages)

        def distance(parameter: str) -> float:
            # Stages up to the wrong one are right when fed the original's values, so what is used
            # just before it comes first; a parameter without a stage of its own comes last.
            use = first_use(parameter, stages)
            return at - use if 0 <= use <= at else math.inf

        own = sorted((p for p in self.pairs if p not in self.fixed), key=distance)
        seen: set[str] = set()
        for parameter in own:
            changes = [self._exchanged(parameter, own)]
            # A stage that is right when fed the original's values has its matrices in the right
            # layout, though another parameter of the original may belong there.
            if distance(parameter) in (0, math.inf):
                changes = [self._transposed(parameter), self._reordered(parameter), *changes]
            for sentence, made in itertools.chain(*changes):
                if sentence not in seen:
                    seen.add(sentence)
                    yield sentence, made

    def _alike(self, parameter: str) -> list[str]:
        """Return the parameters of the same place in modules that differ in numbers only, such as
        other layers."""
        kind = _kind(parameter)
        return [p for p in self.pairs if _kind(p) == kind and p not in self.fixed]

    def _transposed(self, parameter: str) -> Iterator[Change]:
        made = {
            p: laid_out(piece.parameter, _turned(piece.layout))
            for p in self._alike(parameter)
            if (piece := _square(self.pairs[p].construction))
        }
        if made:
            yield f"{_shown(parameter)} in the other order of axes", made

    def _exchanged(self, parameter: str, others: Sequence[str]) -> Iterator[Change]:
        """Yield exchanges of two parameters of one module, or of all parameters of two sibling
        modules, as far as their shapes are equal."""
        for other in others:
            within = naming.parent(other) == naming.parent(parameter)
            beside = naming.parent(other, 2) == naming.parent(parameter, 2)
            beside = beside and naming.leaf(other) == naming.leaf(parameter)
            if within == beside or not self._same_shape(parameter, other):
                continue
            made: dict[str, Construction] = {}
            for p in self._alike(parameter):
                q = _joined(naming.parent(p, 2), _suffix(other))
                both = [(p, q)]
                if beside:
                    a, b = naming.parent(p), naming.parent(q)
                    both = [(n, _joined(b, naming.leaf(n))) for n in self.pairs
                            if naming.parent(n) == a]  # fmt: skip
                for left, right in both:
                    if not {left, right} & self.fixed and self._same_shape(left, right):
                        made[left] = self.pairs[right].construction
                        made[right] = self.pairs[left].construction
            names = [f"{_shown(name)}" for name in (parameter, other)]
            if beside:
                names = [naming.parent(name) for name in names]
            yield f"{' and '.join(sorted(names))} exchanged", made

    def _same_shape(self, a: str, b: str) -> bool:
        pairs = self.pairs
        return a in pairs and b in pairs and (
            pairs[a].construction.shape == pairs[b].construction.shape
        )  # fmt: skip

    def _reordered(self, parameter: str) -> Iterator[Change]:
        """Yield other orders of the parts of a fused parameter and of the others of its module."""
        pieces = self.pairs[parameter].construction.pieces
        if not 2 <= len(pieces) <= MOST_PARTS:
            return
        for order in itertools.permutations(range(len(pieces))):
            if order == (*range(len(pieces)),) or not _fits(pieces, order):
                continue
            modules = {naming.parent(p) for p in self._alike(parameter)}
            made = {
                p: _in_order(pair.construction, order)
                for p, pair in self.pairs.items()
                if naming.parent(p) in modules and p not in self.fixed
                if len(pair.construction.pieces) == len(pieces)
                if _fits(pair.construction.pieces, order)
            }
            names = ", ".join(pieces[i].parameter for i in order)
            yield f"{_shown(parameter)} fused in the order {names}", made

    def _with(self, constructions: Mapping[str, Construction]) -> dict[str, Pair]:
        return {
            name: replace(pair, construction=constructions[name], note="changed after a comparison")
            if name in constructions
            else pair
            for name, pair in self.pairs.items()
        }

    def _matching(self) -> Matching:
        used = {name for pair in self.pairs.values() for name in pair.originals}
        mine = floating(self.port.port.parameters())
        rest_o = [Unmatched(n, x.shape) for n, x in self.theirs.items() if n not in used]
        rest_p = [
            Unmatched(n, x.shape, note=KEEPS if n in self.kept else "")
            for n, x in mine.items()
            if n not in self.pairs
        ]
        return Matching(tuple(self.pairs.values()), tuple(rest_o), tuple(rest_p))


def _agree(report: Report) -> bool:
    """Return whether both programs compute the same, whatever parameters only one of them has."""
    rows = [row for row in report.measurements if row.metric != "unmatched"]
    return first_divergence(rows) is None and has_output(report.ledger)


def _position(report: Report, stages: Sequence[str]) -> int:
    """Return the index of the first wrong stage; the number of stages if none is wrong by itself,
    one more if everything holds, and -1 if the stages were not tested."""
    if _agree(report):
        return len(stages) + 1
    if report.place.culprit is None:
        return len(stages) if report.place.stages else -1
    name = report.place.culprit.name
    return stages.index(name) if name in stages else -1


def _suffix(name: str) -> str:
    """Return the last two parts of a dotted name: of a module and its parameter."""
    return ".".join(name.split(".")[-2:])


def _kind(name: str) -> tuple[str, str]:
    """Return a key that is equal for the same parameter of modules that differ in numbers only."""
    return naming.pattern(naming.parent(name, 2)), _suffix(name)


def _shown(name: str) -> str:
    """Return a name with placeholders for the numbers of the modules that contain its module."""
    return _joined(*_kind(name))


def _joined(*parts: str) -> str:
    return ".".join(filter(None, parts))


def _square(construction: Construction) -> Piece | None:
    """Return the piece of a square matrix made of one whole parameter, else None."""
    (piece, *more) = construction.pieces
    shape = construction.shape
    square = len(shape) == 2 and shape[0] == shape[1] and piece.layout.source == shape
    return piece if square and not more and piece.part.is_whole else None


def _turned(layout: Layout) -> Layout:
    """Return the layout of a square matrix in the other order of axes."""
    return transposition(layout.source, (1, 0)) if layout.is_identity else identity(layout.source)


def _fits(pieces: Sequence[Piece], order: Sequence[int]) -> bool:
    """Return whether pieces can change places in this order: their parts have equal shapes."""
    kinds = [(piece.part, piece.layout) for piece in pieces]
    return [kinds[i] for i in order] == kinds


def _in_order(construction: Construction, order: Sequence[int]) -> Construction:
    """Return a construction whose pieces are at the same places, from parameters in `order`."""
    pieces = construction.pieces
    names = [pieces[i].parameter for i in order]
    made = [replace(p, parameter=name) for p, name in zip(pieces, names, strict=True)]
    return Construction(construction.shape, tuple(made))
