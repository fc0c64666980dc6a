"""JSON file in which a person answers how parameters of a port are made of its original's.

The file has two objects, `questions` (open, from `parity.port.adoption`) and `answers`; the keys
of both are names of the port's parameters.
Source: docs/your-own-port.md "Convert the parameters".
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from megalodon_jax.files import read_json_object, written_aside
from parity.engine.measure.arrays import Arrays
from parity.engine.pairing import naming
from parity.engine.pairing.constructions import Construction, Part, Piece, cut, whole
from parity.engine.pairing.conventions import CONVENTIONS
from parity.engine.pairing.layouts import Layout, Shape, identity, transposition


class AnswerError(ValueError):
    """An answer, or the file of answers, is invalid; the message says what to correct."""


Answer: TypeAlias = Any
"""Answer to a question, as in the file: null (the port keeps its own value), the name of a
parameter of the original, a list of such names, or a mapping with `of` (a name or list), `rows`
(start and exclusive stop of the rows to use of each named parameter) and `transposed` (bool). The
parameters in a list are concatenated or stacked in this order; vectors of the shape of the port's
parameter are added."""
FIELDS = {"of", "rows", "transposed"}
KEYS = {"answers", "questions"}
"""Top-level keys of the file of answers."""


def read_answers(path: Path | str | None) -> dict[str, Answer]:
    """Return the answers in a file, by name of the port's parameter.

    Empty if `path` is None or there is no such file.
    """
    if path is None:
        return {}
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        # Before the search for conversions, since questions are written to the file after it.
        raise AnswerError(f"expected a folder {folder} for {path}; create it")
    if not Path(path).exists():
        return {}
    try:
        content = read_json_object(Path(path))
        json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=_without_doubles)
    except (OSError, ValueError) as error:
        raise AnswerError(
            f"expected a file of answers at {path}: {error}; correct or delete it"
        ) from error
    if unknown := sorted({*content} - KEYS):
        raise AnswerError(
            f"{path}: expected the keys answers and questions, got {', '.join(unknown)}; "
            "rename or delete these"
        )
    answers = content.get("answers", {})
    if not isinstance(answers, dict):
        raise AnswerError(
            f"{path}: expected under `answers` an object with parameters as keys, got "
            f"{json.dumps(answers)[:80]}"
        )
    return answers


def _without_doubles(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        raise ValueError(f"each key may occur once, but {', '.join(twice)} is there twice")
    return dict(pairs)


def constructions_of(
    answers: Mapping[str, Answer], theirs: Arrays, mine: Arrays, path: Path | str | None
) -> tuple[dict[str, Construction], list[str]]:
    """Return the constructions that answers describe, by name of the port's parameter, and the
    names of the port's parameters that keep their value.

    A construction says how a parameter of the port is made of the original's.

    Args:
        answers: answers by name or pattern of the port's parameter.
        theirs: parameters of the original by name.
        mine: parameters of the port by name.
        path: the file of answers, for error messages.

    Raises:
        AnswerError: an answer is invalid.
    """
    made: dict[str, Construction] = {}
    kept: list[str] = []
    for name, answer in _each(answers, mine).items():
        if name not in mine:
            raise AnswerError(f"{path}: {name} is no parameter of the port; delete this answer")
        if answer is None:
            kept.append(name)
            continue
        try:
            made[name] = _from_answer(answer, theirs, name, mine[name].shape)
        except AnswerError as error:
            raise AnswerError(f"{path}: {name}: {error}") from None
    return made, kept


def _from_answer(answer: Answer, theirs: Arrays, port: str, shape: Shape) -> Construction:
    """Return the construction that an answer describes.

    Args:
        answer: any answer but null.
        theirs: parameters of the original by name.
        port: name of the port's parameter.
        shape: shape of the port's parameter.

    Raises:
        AnswerError: the answer is invalid.
    """
    given = answer if isinstance(answer, dict) else {"of": answer}
    of, turned, rows = given.get("of"), given.get("transposed"), given.get("rows")
    names = [of] if isinstance(of, str) else of
    if (
        not isinstance(names, list)
        or not names
        or not all(isinstance(n, str) for n in names)
        or not (turned is None or isinstance(turned, bool))
        or not (rows is None or (isinstance(rows, list) and [*map(type, rows)] == [int, int]))
        or not {*given} <= FIELDS
    ):
        raise AnswerError(
            "the answer is not null, a name, a list of names, or an object with `of` (a name or a "
            "list), `rows` (start and stop) and `transposed` (true or false)"
        )
    if unknown := [n for n in names if n not in theirs]:
        raise AnswerError(
            f"the answer names {', '.join(unknown)}, which the original does not have"
        )
    shapes = [theirs[n].shape for n in names]
    parts = [_part(shape, rows) for shape in shapes]
    if turned is not None and any(len(shape) != 2 for shape in shapes):
        raise AnswerError("the answer has `transposed`, which is for matrices only")
    turns = (turned,) if turned is not None else _turns(names, port)
    for reshaped, turn in itertools.product((False, True), turns):
        if found := _constructed(names, parts, shape, turn, reshaped):
            return found
    listed = ", ".join(f"{n} {s}" for n, s in zip(names, shapes, strict=True))
    raise AnswerError(
        f"the answer does not fit the port's shape {shape}: {listed}; name parameters that have "
        "this shape when transposed, concatenated or stacked, or vectors of this shape to add"
    )


def _part(shape: Shape, rows: Sequence[int] | None) -> Part:
    if rows is None:
        return whole(shape)
    start, stop = rows
    if not shape or not 0 <= start < stop <= shape[0]:
        raise AnswerError(
            f"the answer has the rows {start} to {stop} of an array of shape {shape}; expected "
            "0 <= start < stop <= length of its first axis"
        )
    return cut(shape, shape, 0, start, stop)


def _turns(names: Sequence[str], port: str) -> tuple[bool, bool]:
    """Return the values of `transposed` to try, True and False; first the one that is usual between
    parameters of these names, such as True between `weight` and `kernel`."""
    ends = naming.leaf(names[0]), naming.leaf(port)
    usual = any(CONVENTIONS.get((a, b, 2)) == (1, 0) for a, b in (ends, ends[::-1]))
    return usual, not usual


def _each(answers: Mapping[str, Answer], mine: Arrays) -> dict[str, Answer]:
    """Return the answers by full name of the port's parameter.

    A key with `{}` in place of numbers is a pattern. Its answer is for every parameter of the port
    that fits the pattern and has no answer under its own name; the first `{}` in a name of the
    original stands for the first number in the name of the port's parameter, and so on.
    """
    filled = {
        name: _filled(answer, naming.numbers(name))
        for key, answer in answers.items()
        for name in mine
        if naming.pattern(name) == key
    }
    patterns = {naming.pattern(name) for name in filled}
    return filled | {key: answer for key, answer in answers.items() if key not in patterns}


def _filled(answer: Answer, numbers: Sequence[int]) -> Answer:
    """Return an answer with the placeholders `{}` in each name replaced by `numbers`, in order."""
    if isinstance(answer, dict):
        return {key: _filled(value, numbers) for key, value in answer.items()}
    if isinstance(answer, list):
        return [_filled(value, numbers) for value in answer]
    if isinstance(answer, str):
        for number in numbers:
            answer = answer.replace("{}", str(number), 1)
    return answer


def _constructed(
    names: Sequence[str], parts: Sequence[Part], shape: Shape, turned: bool, reshaped: bool
) -> Construction | None:
    """Return the construction that joins parts of parameters, in this order, to an array of
    `shape`; None if the parts do not fit.

    Several parts are stacked along a new first axis or, if that does not fit, added (vectors only)
    or concatenated along the first axis that fits.

    Args:
        names: names of the original's parameters.
        parts: the part to use of each parameter.
        shape: shape of the port's parameter.
        turned: whether matrices are transposed.
        reshaped: whether a single array may be reshaped.
    """
    layouts = [_laid(part.shape, turned) for part in parts]
    inside = [layout.target for layout in layouts]
    places: list[Part] = []
    if len(names) == 1 and (
        inside[0] == shape or (reshaped and math.prod(inside[0]) == math.prod(shape))
    ):
        places = [whole(shape)]
    elif (
        shape
        and len(names) == shape[0]
        and all(_without_ones(target) == _without_ones(shape[1:]) for target in inside)
    ):
        # Axes of length 1 hold no order: a stack of biases may have them for broadcasting.
        places = [cut(shape, shape, 0, i, i + 1) for i in range(len(names))]
    elif len(shape) == 1 and all(target == shape for target in inside):
        # Two biases that the port adds up. A list of matrices of this shape is a mistake.
        places = [whole(shape)] * len(names)
    for axis in range(len(shape)) if not places else ():
        rest = shape[:axis], shape[axis + 1 :]
        lengths = [target[axis] for target in inside if len(target) == len(shape)]
        if sum(lengths) == shape[axis] and all((t[:axis], t[axis + 1 :]) == rest for t in inside):
            ends = [*itertools.accumulate(lengths)]
            places = [
                cut(shape, shape, axis, a, b) for a, b in zip([0, *ends[:-1]], ends, strict=True)
            ]
            break
    if not places:
        return None
    pieces = []
    for name, part, layout, place in zip(names, parts, layouts, places, strict=True):
        # In a stack, an array's place has one axis more, of length 1; a single array may be
        # reshaped.
        fitted = Layout(layout.source, layout.before, layout.axes, place.shape)
        pieces.append(Piece(name, part, fitted, place))
    return Construction(shape, tuple(pieces))


def _laid(shape: Shape, turned: bool) -> Layout:
    return transposition(shape, (1, 0)) if turned and len(shape) == 2 else identity(shape)


def write_questions(path: Path, questions: Mapping[str, Mapping[str, Any]]) -> None:
    """Write questions, by parameter of the port, to a file of answers, atomically.

    The questions already in the file are replaced; everything else in it is kept.
    """
    content = read_json_object(path) if path.exists() else {"answers": {}}
    # A link to a file that is kept elsewhere stays a link.
    with written_aside(path.resolve()) as aside:
        text = json.dumps(content | {"questions": questions}, indent=2, ensure_ascii=False)
        aside.write_text(text + "\n", encoding="utf-8")


def _without_ones(shape: Shape) -> Shape:
    return tuple(length for length in shape if length != 1)
