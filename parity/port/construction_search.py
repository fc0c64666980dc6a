"""Search for how a port's parameters are made of the original's (their constructions).

Constructions are proposed from names and shapes (`parity.engine.pairing.proposal`), or from the
order of use where names say nothing. Both programs are compared with the constructed parameters;
where they differ, transpositions, exchanges and other orders of fused parts are tried.

Source: docs/your-own-port.md "Convert the parameters".
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from parity.engine.measure.arrays import Arrays
from parity.engine.measure.localize import first_divergence
from parity.engine.measure.measurement import Verdict
from parity.engine.measure.metrics import relative_l2
from parity.engine.pairing import naming
from parity.engine.pairing.constructions import Construction, Part, Piece
from parity.engine.pairing.conventions import nearness
from parity.engine.pairing.layouts import Layout, Shape
from parity.engine.pairing.order_of_use import paired_in_order
from parity.engine.pairing.parameter_pairs import Matching, Means, Pair, Unmatched
from parity.engine.pairing.proposal import MOST_PARTS, SECOND_COPY
from parity.port.compare import Port, compare, floating
from parity.port.ledger import has_output
from parity.port.report import Report, first_use
from parity.port_tolerances import PortEdge
from parity.sides.side import Precision, Run, Side, SideError, TakesParameters, Trace

TRIES = 48
"""Largest number of comparisons in a search; each runs both programs several times."""
AT_ONE_STAGE = 16
"""Largest number of changes of constructions tried to correct one wrong stage, first those of the
parameters that the stage uses."""
# Norm weights are all 1 and biases all 0 at initialisation: without noise, values could not show
# that two of them were exchanged. Relative noise keeps the scale of the program; the second term
# moves zeros, and is positive, so that variances stay positive.
RELATIVE = 0.1
"""Largest relative noise added to the original's parameters while a conversion is tested."""
ABSOLUTE = 0.02
"""Largest absolute noise added to the original's parameters while a conversion is tested."""
# With noise a bfloat16 number becomes one of some 25: eight numbers agree by chance once in 1e11.
TIED = 8
"""Two parameters of at least this many elements that are still equal after noise was added to them
count as tied."""
MOST_RUNS = 1024
"""Largest number of runs that each change one piece of a parameter, to see whether results
change."""
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
    """Proposed construction of the first of `parameters`; empty if there is none."""
    why: str
    """Why no comparison confirmed the conversion."""
    choices: tuple[str, ...]
    """Parameters of the original that fit `shape` after a reshape or transposition, the unused ones
    first; `{}` in a name stands for a number."""

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


Change: TypeAlias = tuple[str, dict[str, Construction]]
"""Change of constructions: a sentence that describes it, and the new constructions by the port's
name."""


class Search:
    """Tests proposed constructions by comparing both programs; where the programs differ, tries
    other constructions.

    A construction says how a parameter of the port is made of parameters of the original.
    """

    def __init__(
        self,
        port: Port,
        side: TakesParameters,
        proposal: Matching,
        fixed: Mapping[str, Construction],
        kept: Iterable[str],
    ) -> None:
        """Prepare the search.

        Args:
            port: both sides.
            side: the port's side.
            proposal: constructions proposed by names and shapes.
            fixed: constructions that a person gave; they are never changed.
            kept: parameters of the port that keep their own value.
        """
        self.port, self.side = port, side
        self.fixed, self.kept = {*fixed}, {*kept}
        self.order = [*floating(port.port.parameters())]
        self.notices: list[str] = [*_equal_inputs(port.original)]
        self.changed: list[str] = []
        self.tries = 0
        made = {pair.port: pair for pair in proposal.pairs if pair.port not in self.kept}
        made |= {name: Pair(name, c, Means.PROPOSAL, "as answered") for name, c in fixed.items()}
        self.pairs = self._with_order({n: made[n] for n in self.order if n in made})
        self.original = self._with_noise()
        self.theirs = floating(self.original.parameters())
        self.report: Report | None = None
        """The last comparison; once the programs agree with noise on the parameters, the one
        without noise."""
        self.agreed = False
        """Whether both programs agree with noise on the parameters and without it."""
        self.effective: frozenset[str] = frozenset()
        """Names of the port's parameters on which results depend: a result changes if any one piece
        (part taken from one parameter of the original) of such a parameter is changed."""
        self.lost: frozenset[str] = frozenset()
        """Parameters of the original that the port lacks although results depend on them."""

    def run(self) -> Matching:
        """Search, and return the constructions with which the programs agree up to the latest
        stage.

        Raises:
            ValueError: the sides cannot be compared (`parity.port.compare`).
        """
        if not self.pairs:
            return self._matching()
        self.report = self._compared(self.pairs)
        refused: set[str] = set()
        while not agree(self.report):
            better = next(self._improvements(self.report, refused), None)
            if better is None:
                return self._matching()
            (sentence, constructions), self.report = better
            self.changed.append(sentence)
            refused.clear()
            self.pairs = self._with(constructions)
        self._test_effects(self.report)
        # Without noise too: it may have moved values away from a case that only one program treats
        # separately, such as 0.
        own = floating(self.port.original.parameters())
        self.report = compare(
            replace(self.port, port=self._converted(own), bfloat16=False, pins=())
        )
        self.agreed = agree(self.report)
        self.lost |= {*self.report.lost}
        return self._matching()

    def confirmed(self) -> frozenset[str]:
        """Return the names of the port's parameters whose construction is confirmed; empty unless
        both programs agree.

        With noise added, no two parameters of the original are equal. So if the programs agree, and
        a change of any piece of a parameter breaks a tolerance, its construction is right. Left out
        are symmetric matrices and, if no noise could be added, constants and equal parameters.
        """
        return self.effective & self._distinct() if self.agreed else frozenset()

    def _test_effects(self, report: Report) -> None:
        """Find the parameters on which results depend: those of the port (`effective`), and those
        of the original that the port lacks (`lost`).

        Results depend on a parameter if they leave their tolerances when only this parameter is
        changed; for a parameter of the port, whichever single piece of it is changed.

        Args:
            report: a comparison with noise, in which both programs agree; gives the tolerances.
        """
        # In float64 if possible: a bound of float32 may hide a parameter with a small effect.
        found: dict[PortEdge, dict[str, float]] = {}
        for row in report.measurements:
            if row.metric == "rel_l2" and row.verdict is Verdict.PASS:
                found.setdefault(PortEdge(row.edge), {})[row.quantity] = row.tolerance
        wide = PortEdge.PORT64_ORIGINAL64 in found
        edge = PortEdge.PORT64_ORIGINAL64 if wide else PortEdge.PORT32_ORIGINAL32
        bounds = found.get(edge, {})
        how = Run(Precision.FLOAT64) if wide else Run()
        side = self._converted(self.theirs)
        pieces = [
            (name, piece.place)
            for name, pair in self.pairs.items()
            for piece in pair.construction.pieces
        ]
        if len(pieces) > MOST_RUNS:
            self.notices.append(f"only the first {MOST_RUNS} of {len(pieces)} pieces were tested")
        values = floating(side.parameters())
        without: set[str] = {name for name, _ in pieces[MOST_RUNS:]}
        used = {name for pair in self.pairs.values() for name in pair.originals}
        # A table that varies is recomputed by the port, or a stage differs.
        fresh = [n for n, x in self.theirs.items() if n not in used and _is_constant(x)]
        # They count as needed until a run shows that no result depends on them.
        self.lost = frozenset(fresh)
        try:
            base = side.run(how)
            for name, place in pieces[:MOST_RUNS]:
                changed = _changed(values[name], place)
                if not _differs(side, {name: changed}, how, base, bounds):
                    without.add(name)
            self.effective = frozenset(self.pairs.keys() - without)
            if fresh and bounds and isinstance(self.original, TakesParameters):
                base = self.original.run(how)
                bound = dict.fromkeys(base.outputs, max(bounds.values()))
                self.lost = frozenset(
                    n for n in fresh
                    if _differs(self.original, {n: _changed(self.theirs[n])}, how, base, bound)
                )  # fmt: skip
            elif fresh:
                self.notices.append(
                    f"whether results depend on {', '.join(fresh)}, which the port does not have, "
                    "is unknown; they count as needed"
                )
        except SideError as error:
            self.notices.append(f"which parameters the results depend on is unknown: {error}")

    def _converted(self, theirs: Arrays) -> Side:
        """Return the port's side with parameters made of the original's (`theirs`)."""
        made = {name: p.construction.from_original(theirs) for name, p in self.pairs.items()}
        return self.side.with_parameters(made)

    def inferred(self) -> frozenset[str]:
        """Return the names of unconfirmed parameters of the port that are made of parameters from
        the same modules of the original as all other parameters of their own module, which are
        confirmed.

        An example is the bias of an attention's key, which the softmax cancels.
        """
        confirmed = self.confirmed()
        found: set[str] = set()
        if not self.agreed:
            return frozenset()
        for name, pair in self.pairs.items():
            module = naming.parent(name)
            others = [p for p in self.pairs if naming.parent(p) == module and module and p != name]
            modules = [*map(naming.parent, pair.originals)]
            if (
                name not in confirmed
                and others
                and confirmed.issuperset(others)
                and all(modules)
                and all([*map(naming.parent, self.pairs[p].originals)] == modules for p in others)
                and all(self._is_only_one(original) for original in pair.originals)
            ):
                found.add(name)
        return frozenset(found)

    def _is_only_one(self, original: str) -> bool:
        """Return whether a parameter of the original is the only one of its shape in its module."""
        module, shape = naming.parent(original), self.theirs[original].shape
        return not any(
            naming.parent(name) == module and x.shape == shape and name != original
            for name, x in self.theirs.items()
        )

    def _distinct(self) -> set[str]:
        """Return the names of the port's parameters that are made only of parameters of the
        original whose values distinguish them from all others.

        Not distinguished are equal parameters, unless they have `TIED` elements or more and are
        still equal after noise was added: they are then tied. Nor are constants, if no noise was
        added, and symmetric matrices, which equal their transpose.
        """
        used = {name: self.theirs[name] for pair in self.pairs.values() for name in pair.originals}
        bits = Counter((x.shape, x.tobytes()) for x in used.values())

        def is_distinct(x: np.ndarray) -> bool:
            # With noise, only tied parameters are equal, and by chance a few numbers in few bits.
            twice = bits[x.shape, x.tobytes()] > 1 and (x.size < TIED or not self.has_noise)
            plain = not self.has_noise and x.size > 1 and _is_constant(x)
            return not (twice or plain or (x.ndim == 2 and len(x) > 1 and _is_symmetric(x)))

        single = {name for name, x in used.items() if is_distinct(x)}
        return {name for name, pair in self.pairs.items() if single.issuperset(pair.originals)}

    def questions(self) -> Iterator[Question]:
        """Yield the questions about parameters that are not confirmed, inferred or answered.

        Parameters share a question if their names differ in numbers only and their shapes and
        proposed constructions are the same.
        """
        mine = floating(self.port.port.parameters())
        # An adapter of rank 0 has nothing to convert.
        empty = (name for name, x in mine.items() if not x.size)
        done = {*self.confirmed(), *self.inferred(), *self.kept, *self.fixed, *empty}
        used = {name for pair in self.pairs.values() for name in pair.originals}
        groups: dict[str, list[str]] = {}
        for name in (name for name in self.order if name not in done):
            groups.setdefault(naming.pattern(name), []).append(name)
        for pattern, alike in groups.items():
            kinds = {(mine[name].shape, self._proposed(name, "{}")) for name in alike}
            together = len(kinds) == 1 and len(alike) > 1
            for names in [alike] if together else [[name] for name in alike]:
                shape = mine[names[0]].shape
                fit = [n for n, x in self.theirs.items() if math.isfinite(nearness(x.shape, shape))]
                fit.sort(key=lambda n: n in used)
                yield Question(
                    pattern if together else names[0],
                    tuple(names),
                    shape,
                    self._proposed(names[0]),
                    self._why(self.pairs.get(names[0])),
                    tuple(dict.fromkeys(map(naming.pattern, fit)))[:CHOICES],
                )

    def _proposed(self, name: str, numbers: str = "") -> str:
        """Return the proposed construction of a parameter as text, empty if there is none; unless
        `numbers` is empty, with `{}` in place of each number."""
        pair = self.pairs.get(name)
        text = pair.construction.text() if pair else ""
        return naming.pattern(text) if numbers else text

    def _why(self, pair: Pair | None) -> str:
        if pair is None:
            return "no parameter of the original has a similar name and a fitting shape"
        if not self.agreed:
            return "the programs differ"
        if pair.port not in self._distinct():
            return "the original's values do not distinguish it from others"
        return "no compared result depends on all of it"

    def _with_order(self, pairs: Mapping[str, Pair]) -> dict[str, Pair]:
        """Return the pairs of parameters, by the port's name; the parameters that names do not pair
        reliably are paired in the order in which the programs use them."""
        # A second copy is a last resort: `0.bias` would be copied to every bias without a partner.
        # Numbers alone, as in `torch.nn.Sequential`, say nothing about what a module is.
        sure = {
            name: pair
            for name, pair in pairs.items()
            if name in self.fixed
            or (pair.note != SECOND_COPY and not any(map(_is_numbered, pair.originals)))
        }
        used = {name for pair in sure.values() for name in pair.originals}
        left: dict[str, dict[str, Shape]] = {}
        for which in ("original", "port"):
            side = getattr(self.port, which)
            taken = used if which == "original" else {*sure, *self.kept}
            values = {n: x for n, x in floating(side.parameters()).items() if n not in taken}
            if not values:
                return dict(pairs)
            try:
                stages = [*side.run().stages]
            except SideError as error:
                self.notices.append(f"nothing is paired in the order of use: {error}")
                return dict(pairs)
            # Parameters of one stage stay in their order, such as that of their registration.
            order = sorted(values, key=lambda name, stages=stages: first_use(name, stages))
            left[which] = {name: values[name].shape for name in order}
        made = paired_in_order(left["original"], left["port"])
        note = "in the order of use"
        more = {name: Pair(name, c, Means.PROPOSAL, note) for name, c in made.items()}
        known = {**pairs, **more}
        return {name: known[name] for name in self.order if name in known}

    def _with_noise(self) -> Side:
        """Return the original's side with noise added to the parameters of which the port's are
        made; unchanged, with a notice, if its parameters cannot be changed or results overflow."""
        original = self.port.original
        self.has_noise = False
        if not isinstance(original, TakesParameters):
            self.notices.append(
                "the original's parameters cannot be changed, so constants and parameters of equal "
                "value are not confirmed"
            )
            return original
        rng = np.random.default_rng(0)
        used = dict.fromkeys(name for pair in self.pairs.values() for name in pair.originals)
        values = floating(original.parameters())

        def moved(x: np.ndarray) -> np.ndarray:
            wide = x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)
            noise = 1 + RELATIVE * rng.uniform(-1, 1, x.shape)
            return (wide * noise + ABSOLUTE * rng.uniform(0, 1, x.shape)).astype(x.dtype)

        changed = original.with_parameters({name: moved(values[name]) for name in used})
        if not _is_finite(changed) and _is_finite(original):
            self.notices.append(
                "noise on the original's parameters makes its results infinite or NaN: tested "
                "without noise, so constants and parameters of equal value are not confirmed"
            )
            return original
        self.has_noise = True
        return changed

    def _compared(self, pairs: Mapping[str, Pair]) -> Report:
        """Compare the original, with noise on its parameters, with the port, whose parameters are
        made by the constructions in `pairs`; only the forward pass is compared."""
        self.tries += 1
        values = {name: p.construction.from_original(self.theirs) for name, p in pairs.items()}
        side = self.side.with_parameters(values)
        port = replace(self.port, original=self.original, port=side, pins=())
        return compare(replace(port, gradients=False, bfloat16=False))

    def _improvements(self, report: Report, refused: set[str]) -> Iterator[tuple[Change, Report]]:
        """Yield changes that move the first wrong stage to a later one or make the programs agree,
        each with the report of the comparison after it.

        Args:
            report: the comparison before the changes.
            refused: descriptions of changes that are not tried; those of changes that do not help
                are added.
        """
        stages = [stage.name for stage in report.place.stages]
        at = _position(report, stages)
        for change in itertools.islice(self._changes(report, stages), AT_ONE_STAGE):
            if self.tries >= TRIES:
                self.notices.append(f"stopped after {TRIES} comparisons")
                return
            if change[0] in refused:
                continue
            other = self._compared(self._with(change[1]))
            if agree(other) or 0 <= at < _position(other, stages):
                yield change, other
            refused.add(change[0])

    def _changes(self, report: Report, stages: Sequence[str]) -> Iterator[Change]:
        """Yield changes of the constructions to try, first those of parameters used near the first
        wrong stage."""
        culprit = report.place.culprit
        at = stages.index(culprit.name) if culprit is not None else len(stages)

        def distance(parameter: str) -> float:
            # Stages up to the wrong one are right when fed the original's values, so what is used
            # just before it comes first; a parameter without a stage of its own comes last.
            use = first_use(parameter, stages)
            return at - use if 0 <= use <= at else math.inf

        own = sorted((p for p in self.pairs if p not in self.fixed), key=distance)
        near = [p for p in own if distance(p) in (0, math.inf)]
        yield from self._together(near)
        seen: set[str] = set()
        for parameter in own:
            changes = [self._exchanged(parameter, own)]
            # A stage that is right when fed the original's values has its matrices in the right
            # layout, though another parameter of the original may belong there.
            if parameter in near:
                changes = [self._transposed(parameter), self._reordered(parameter), *changes]
            for sentence, made in itertools.chain(*changes):
                if sentence not in seen:
                    seen.add(sentence)
                    yield sentence, made

    def _together(self, parameters: Sequence[str]) -> Iterator[Change]:
        """Yield up to two changes: one transposes back all square matrices that are transposed now,
        the other transposes all that are not. A change of only one matrix is left out.

        For example, the matrices of a query, key and value correct a stage only together.
        """
        kinds: dict[bool, dict[str, Construction]] = {}
        for p in parameters:
            turned = _turned(self.pairs[p].construction)
            if turned is not None:
                stored = turned.pieces[0].layout.axes == (1, 0)
                kinds.setdefault(stored, {})[p] = turned
        for made in kinds.values():
            if len(made) > 1:
                names = ", ".join(dict.fromkeys(map(_shown, made)))
                yield f"{names} in the other order of axes", made

    def _alike(self, parameter: str) -> list[str]:
        """Return the names of a parameter and of its counterparts in modules whose names differ in
        numbers only, such as other layers; parameters that a person answered are left out."""
        kind = _kind(parameter)
        return [p for p in self.pairs if _kind(p) == kind and p not in self.fixed]

    def _transposed(self, parameter: str) -> Iterator[Change]:
        made = {
            p: turned
            for p in self._alike(parameter)
            if (turned := _turned(self.pairs[p].construction)) is not None
        }
        if made:
            yield f"{_shown(parameter)} in the other order of axes", made

    def _exchanged(self, parameter: str, others: Sequence[str]) -> Iterator[Change]:
        """Yield exchanges of a parameter with others: of two parameters of one module, or of all
        parameters of two sibling modules. Only parameters of equal shape are exchanged. Each
        exchange is made in all modules whose names differ in numbers only, such as layers."""
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
            names = [_shown(name) for name in (parameter, other)]
            if beside:
                names = [naming.parent(name) for name in names]
            yield f"{' and '.join(sorted(names))} exchanged", made

    def _same_shape(self, a: str, b: str) -> bool:
        pairs = self.pairs
        return a in pairs and b in pairs and (
            pairs[a].construction.shape == pairs[b].construction.shape
        )  # fmt: skip

    def _reordered(self, parameter: str) -> Iterator[Change]:
        """Yield other orders of the parts of a fused parameter, each applied to all fused
        parameters of the same module that have as many parts."""
        construction = self.pairs[parameter].construction
        pieces = construction.pieces
        # The terms of a sum have no order.
        if construction.adds or not 2 <= len(pieces) <= MOST_PARTS:
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


def agree(report: Report) -> bool:
    """Return whether both programs compute the same results; parameters that only one of them has
    are ignored."""
    rows = [row for row in report.measurements if row.metric != "unmatched"]
    return first_divergence(rows) is None and has_output(report.ledger)


def _position(report: Report, stages: Sequence[str]) -> int:
    """Return the index of the first wrong stage in `stages`; `len(stages)` if none is wrong by
    itself, `len(stages) + 1` if the programs agree, and -1 if the stages were not tested."""
    if agree(report):
        return len(stages) + 1
    if report.place.culprit is None:
        return len(stages) if report.place.stages else -1
    name = report.place.culprit.name
    return stages.index(name) if name in stages else -1


def _suffix(name: str) -> str:
    """Return the last two parts of a dotted name: module and parameter."""
    return ".".join(name.split(".")[-2:])


def _kind(name: str) -> tuple[str, str]:
    """Return a key that is equal for the same parameter of modules whose names differ in numbers
    only."""
    return naming.pattern(naming.parent(name, 2)), _suffix(name)


def _shown(name: str) -> str:
    """Return a parameter's name with `{}` in place of each number in the names of the modules that
    contain its module."""
    return _joined(*_kind(name))


def _is_numbered(name: str) -> bool:
    """Return whether the name of a parameter's module has no letter."""
    module = naming.parent(name)
    return module != "" and not any(map(str.isalpha, module))


def _joined(*parts: str) -> str:
    return ".".join(filter(None, parts))


def _turned(construction: Construction) -> Construction | None:
    """Return a construction with every piece transposed, or transposed back if it already is; None
    unless all pieces are square matrices."""
    pieces = []
    for piece in construction.pieces:
        rows = [n for n in piece.layout.target if n > 1]
        layout = piece.layout
        if len(layout.source) != 2 or [*layout.source] != rows or len({*rows}) > 1:
            return None
        axes = (0, 1) if layout.axes == (1, 0) else (1, 0)
        other = Layout(layout.source, layout.source, axes, layout.target)
        pieces.append(replace(piece, layout=other))
    return Construction(construction.shape, tuple(pieces))


def _equal_inputs(side: Side) -> list[str]:
    """Return a notice for each input that equals an earlier one: no comparison would show that the
    parameters applied to these two inputs were exchanged."""
    seen: dict[Any, str] = {}
    notices = []
    for name, x in side.inputs().items():
        first = seen.setdefault((x.shape, x.dtype, x.tobytes()), name)
        if first != name and x.size > 1:
            notices.append(
                f"the inputs {first} and {name} are equal: if each has its own parameters, an "
                "exchange of them is not noticed; give them different values"
            )
    return notices


def _is_finite(side: Side) -> bool:
    """Return whether the results of a side have no infinity and no NaN."""
    try:
        trace = side.run()
    except SideError:
        return False
    return all(np.all(np.isfinite(trace.stages[name])) for name in trace.outputs)


def _is_constant(x: np.ndarray) -> bool:
    return bool(x.size and np.all(x == x.flat[0]))


def _is_symmetric(x: np.ndarray) -> bool:
    return x.shape == x.T.shape and bool(np.all(x == x.T))


def _changed(x: np.ndarray, place: Part | None = None) -> np.ndarray:
    """Return an array with its values in the block `place` (None: all values) changed at random, by
    a factor from 0.5 to 1.5 and a summand from 0 to 0.5."""
    # Random, since norms and softmaxes are blind to a common factor or summand.
    rng = np.random.default_rng(1)
    wide = x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)
    other = wide * rng.uniform(0.5, 1.5, x.shape) + rng.uniform(0, 0.5, x.shape)
    if place is not None:
        chosen = np.zeros(x.shape)
        place.accumulate(chosen, np.ones(place.shape))
        other = np.where(chosen > 0, other, wide)
    return other.astype(x.dtype)


def _differs(
    side: Side, values: Arrays, how: Run, base: Trace, bounds: Mapping[str, float]
) -> bool:
    """Return whether an output of `side` with other parameters differs from that of the run `base`
    by more than its bound.

    Args:
        side: the side; False if it cannot run with other parameters.
        values: the other values, by parameter name.
        how: settings of the runs.
        base: a run with the side's own parameters.
        bounds: largest relative L2 difference by output; other outputs are not compared.
    """
    if not isinstance(side, TakesParameters):
        return False
    moved = side.with_parameters(values).run(how)
    return any(
        not relative_l2(moved.stages[name], base.stages[name]) <= bounds[name]
        for name in base.outputs
        if name in bounds
    )


def _fits(pieces: Sequence[Piece], order: Sequence[int]) -> bool:
    """Return whether the parameters of a construction's pieces can be exchanged in this order: a
    piece and the one whose parameter it gets must use the same part, rearranged in the same way."""
    kinds = [(piece.part, piece.layout) for piece in pieces]
    return [kinds[i] for i in order] == kinds


def _in_order(construction: Construction, order: Sequence[int]) -> Construction:
    """Return a construction whose pieces use the original's parameters in another order; everything
    else about the pieces stays."""
    pieces = construction.pieces
    names = [pieces[i].parameter for i in order]
    made = [replace(p, parameter=name) for p, name in zip(pieces, names, strict=True)]
    return Construction(construction.shape, tuple(made))
