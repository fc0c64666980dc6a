"""Adopts the parameters of an original: converts them for a port that has no conversion yet.

`parity.port.construction_search` finds how each parameter of the port is made of the original's
(its construction) and tests it by comparing both programs. A parameter that no comparison confirms
becomes a question, which a person answers in a JSON file (`parity.port.answers`).

Source: docs/your-own-port.md "Convert the parameters".
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from parity.engine.pairing import naming
from parity.engine.pairing.converter import converter_source
from parity.engine.pairing.parameter_pairs import Matching, Unmatched
from parity.engine.pairing.proposal import propose
from parity.port.answers import constructions_of, read_answers, write_questions
from parity.port.compare import Port, PortError, check_two_sides, floating
from parity.port.construction_search import Question, Search
from parity.port.report import Report
from parity.sides.side import Side, TakesParameters


@dataclass(frozen=True)
class Adoption:
    """A port's parameters, converted from its original's, and which of them are confirmed by a
    comparison of both programs."""

    title: str
    matching: Matching
    """The construction of each parameter of the port: how it is made of the original's."""
    parameters: dict[str, np.ndarray]
    """Values of the port's parameters made by these constructions, by name, in the port's shapes
    and the original's dtypes."""
    side: Side
    """The port's side with `parameters`."""
    report: Report | None
    """Comparison that tested the constructions; None if no parameter has a construction."""
    agrees: bool
    """Whether both programs compute the same with the constructed parameters."""
    confirmed: frozenset[str]
    """Names of the port's parameters whose construction a comparison confirmed."""
    inferred: frozenset[str]
    """Names of the port's parameters on which no result depends, so that no comparison can confirm
    them. All other parameters of their module are confirmed, and come from the same modules of the
    original."""
    questions: tuple[Question, ...]
    """Open questions: the parameters neither confirmed, inferred nor answered by a person."""
    lost: tuple[str, ...]
    """Parameters of the original that the port lacks although results depend on them."""
    changed: tuple[str, ...]
    """Changes that the search made to the constructions proposed by names and shapes, a sentence
    each. Each change moved the first wrong stage to a later one, or made the programs agree."""
    notices: tuple[str, ...]
    """Remarks for the reader, a sentence each."""

    @property
    def holds(self) -> bool:
        """Whether both programs compute the same, no question is left, and the port lacks no
        parameter on which results depend."""
        return self.agrees and not self.questions and not self.lost

    @property
    def unused(self) -> tuple[Unmatched, ...]:
        """Parameters of the original that no parameter of the port is made of."""
        return self.matching.unmatched_original

    def source(self) -> str:
        """Return the source of a Python module that needs only NumPy. Its function `convert` takes
        the original's parameters and returns the port's, both as dictionaries of arrays by name."""
        return converter_source(self.matching)

    def text(self) -> str:
        """Return the result as text; the first line counts the confirmed and open parameters."""
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
        lines += [
            f"not used{', but needed' if entry.name in self.lost else ''}: {entry.name} "
            f"{entry.shape}"
            for entry in self.unused
        ]
        lines += [f"note: {notice}" for notice in self.notices]
        if self.report is not None and not self.agrees:
            lines.append(self.report.sentence())
        return "\n".join(lines)


def adopt(port: Port, answers: Path | str | None = None) -> Adoption:
    """Convert the original's parameters for the port, and test them by comparing both programs.

    Args:
        port: both sides; the port's parameters may have any values.
        answers: path of a JSON file with a person's answers to the questions of an earlier call.
            The open questions of this call are written to the file; its answers are kept. None: no
            answers are read and no questions written.

    Raises:
        PortError: `port` is no `Port` with two sides, both sides are one object, or the port's
            side cannot run with other parameters.
        ValueError: the sides cannot be compared (`parity.port.compare`).
        AnswerError: the file of answers, or an answer in it, is invalid.
    """
    check_two_sides(port)
    side = port.port
    if not isinstance(side, TakesParameters):
        raise PortError(
            f"{port.title}: expected a port whose parameters can be set, such as FlaxSide, "
            f"EquinoxSide, NNXSide, FunctionSide or TorchSide; got a side of {side.kind}"
        )
    theirs, mine = floating(port.original.parameters()), floating(side.parameters())
    for name, values in (("original", theirs), ("port", mine)):
        if not values:
            raise PortError(f"{port.title}: the {name} has no parameter to convert")
    fixed, kept = constructions_of(read_answers(answers), theirs, mine, answers)
    search = Search(port, side, propose(theirs, mine), fixed, kept)
    matching = search.run()
    parameters = matching.from_original(theirs)
    adoption = Adoption(
        port.title,
        matching,
        parameters,
        side.with_parameters(parameters),
        search.report,
        search.agreed,
        search.confirmed(),
        search.inferred(),
        tuple(search.questions()),
        tuple(sorted(search.lost)),
        tuple(search.changed),
        tuple(search.notices),
    )
    if answers is not None:
        write_questions(Path(answers), {q.parameter: q.to_json() for q in adoption.questions})
    return adoption
