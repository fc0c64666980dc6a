"""Answers of a person to the questions of `parity.port.adoption`: constructions, in a JSON file.

The file has two objects by parameter of the port, `answers` and `questions`.
Source: docs/your-own-port.md "Convert the parameters".
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from megalodon_jax.files import read_json_object, written_aside
from parity.engine.measure.arrays import Arrays
from parity.engine.pairing import naming
from parity.engine.pairing.constructions import Construction, Part, Piece, cut, laid_out, whole
from parity.engine.pairing.layouts import Layout, Shape, identity, transposition


class AnswerError(ValueError):
    """An answer, or the file of answers, is invalid; the message says what to correct."""


Answer: TypeAlias = Any
"""Answer to a question, as in the file: null (the port's value stays), the name of a parameter of
the original, a list of names (fused or stacked in this order), or a mapping with `of` (a name or
list) and `transposed` (bool)."""


def read_answers(path: Path | str | None) -> dict[str, Answer]:
    """Return the answers in a file; none if it does not exist."""
    if path is None or not Path(path).exists():
        return {}
    try:
        answers = read_json_object(Path(path)).get("answers", {})
    except (OSError, ValueError) as error:
        raise AnswerError(f"expected answers in {path}: {error}; correct or delete it") from error
    if not isinstance(answers, dict):
        raise AnswerError(
            f"{path}: expected under `answers` an object with an answer by parameter, got "
            f"{json.dumps(answers)[:80]}"
        )
    return answers


def constructions_of(
    answers: Mapping[str, Answer], theirs: Arrays, mine: Arrays, path: Path | str | None
) -> tuple[dict[str, Construction], list[str]]:
    """Return the constructions that a person gave, and the parameters that keep their value."""
    made: dict[str, Construction] = {}
    kept: list[str] = []
    for name, answer in _each(answers, mine).items():
        if name not in mine:
            raise AnswerError(f"{path}: {name} is no parameter of the port; delete this answer")
        if answer is None:
            kept.append(name)
            continue
        try:
            made[name] = _from_answer(answer, theirs, mine[name].shape)
        except AnswerError as error:
            raise AnswerError(f"{path}: the answer for {name} {error}") from None
    return made, kept


def _from_answer(answer: Answer, theirs: Arrays, shape: Shape) -> Construction:
    """Return the construction of a parameter of `shape` that an answer describes."""
    whole_answer = answer if isinstance(answer, dict) else {"of": answer}
    of, turned = whole_answer.get("of"), whole_answer.get("transposed")
    names = [of] if isinstance(of, str) else of
    if (
        not isinstance(names, list)
        or not names
        or not all(isinstance(n, str) for n in names)
        or not (turned is None or isinstance(turned, bool))
        or not {*whole_answer} <= {"of", "transposed"}
    ):
        raise AnswerError(
            "is not null, a name, a list of names, or an object with `of` (a name or a list) and "
            "`transposed` (true or false)"
        )
    if unknown := [n for n in names if n not in theirs]:
        raise AnswerError(f"names {', '.join(unknown)}, which the original does not have")
    shapes = [theirs[n].shape for n in names]
    found = _constructed(names, shapes, shape, turned)
    if found is None:
        given = ", ".join(f"{n} {s}" for n, s in zip(names, shapes, strict=True))
        raise AnswerError(f"does not fit its shape {shape}: {given}")
    return found


def _each(answers: Mapping[str, Answer], mine: Arrays) -> dict[str, Answer]:
    """Return the answer for each parameter of the port.

    A key with `{}` in place of numbers is about all parameters of this pattern without an answer of
    their own; each `{}` in a name of the original is then the number of the port's name at the same
    position.
    """
    filled = {
        name: _filled(answer, naming.numbers(name))
        for key, answer in answers.items()
        for name in mine
        if naming.pattern(name) == key != name
    }
    patterns = {naming.pattern(name) for name in filled}
    return filled | {key: answer for key, answer in answers.items() if key not in patterns}


def _filled(answer: Answer, numbers: Sequence[int]) -> Answer:
    """Return an answer with each name's placeholders replaced by numbers, in order."""
    if isinstance(answer, dict):
        return {key: _filled(value, numbers) for key, value in answer.items()}
    if isinstance(answer, list):
        return [_filled(value, numbers) for value in answer]
    if isinstance(answer, str):
        for number in numbers:
            answer = answer.replace("{}", str(number), 1)
    return answer


def _constructed(
    names: Sequence[str], sources: Sequence[Shape], shape: Shape, turned: bool | None
) -> Construction | None:
    """Return the construction of an array of `shape` from whole parameters, in this order.

    Args:
        names: the original's parameters.
        sources: their shapes.
        shape: shape of the port's parameter.
        turned: whether matrices are transposed; None: not, unless only this fits.
    """
    for turn in (False, True) if turned is None else (turned,):
        layouts = [_laid(source, turn) for source in sources]
        if len(names) == 1:
            if layouts[0].target == shape:
                return laid_out(names[0], layouts[0])
            continue
        if all(layout.target == shape[1:] for layout in layouts) and len(names) == shape[0]:
            places = [cut(shape, shape, 0, i, i + 1) for i in range(len(names))]
            return _assembled(shape, names, layouts, places)
        for axis in range(len(shape)):
            rest = shape[:axis], shape[axis + 1 :]
            inside = [layout.target for layout in layouts]
            lengths = [t[axis] for t in inside if len(t) == len(shape)]
            if sum(lengths) == shape[axis] and all(
                (t[:axis], t[axis + 1 :]) == rest for t in inside
            ):
                ends = [*itertools.accumulate(lengths)]
                starts = [0, *ends[:-1]]
                places = [cut(shape, shape, axis, a, b) for a, b in zip(starts, ends, strict=True)]
                return _assembled(shape, names, layouts, places)
    return None


def _laid(shape: Shape, turned: bool) -> Layout:
    return transposition(shape, (1, 0)) if turned and len(shape) == 2 else identity(shape)


def _assembled(
    shape: Shape, names: Sequence[str], layouts: Sequence[Layout], places: Sequence[Part]
) -> Construction:
    pieces = []
    for name, layout, place in zip(names, layouts, places, strict=True):
        # A place of a stack has one axis more, of length 1.
        fitted = Layout(layout.source, layout.before, layout.axes, place.shape)
        pieces.append(Piece(name, whole(layout.source), fitted, place))
    return Construction(shape, tuple(pieces))


def write_questions(path: Path, questions: Mapping[str, Mapping[str, Any]]) -> None:
    """Write questions to a file of answers, atomically; everything else in the file is kept."""
    content = read_json_object(path) if path.exists() else {"answers": {}}
    with written_aside(path) as aside:
        text = json.dumps(content | {"questions": questions}, indent=2, ensure_ascii=False)
        aside.write_text(text + "\n", encoding="utf-8")
