"""Finds the source lines of the JAX model that make a stage wrong.

Source: docs/parity.md "From a stage to a line".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from parity.engine.measure.metrics import relative_l2
from parity.engine.programs.operations import Operation, Recorder, common_frame, first_narrow
from parity.engine.programs.source_lines import LINES, Line
from parity.engine.programs.unseen import SAME, Seen, search
from parity.megalodon import oracle_operations
from parity.megalodon.cases import Case
from parity.megalodon.noise_floors import forward_truth
from parity.megalodon.runner import JaxSubject
from parity.sides.jax_leaves import arrays_of
from parity.sides.traced import trace

NARROW = "first operation in a dtype below float32"
Step = tuple[str, tuple[str, ...]]
"""Primitive of an operation, and its source lines, innermost first."""
ORACLE = "the oracle"
"""Name of the oracle in the sentences that explain why a source line is suspicious."""
_HERE = "parity/megalodon/"
"""Part of the path of this package's files. In a traceback, the first frame in such a file and all
frames outside of it do not belong to the model."""
ENTERS = "brings padding into the stage, which is right without padding"
UNREAD = "calls the stage, which ignores the padding mask and is right without padding"


def lines(
    case: Case, stage: str, exact: Mapping[str, np.ndarray], broken: Collection[str] = ()
) -> tuple[Line, ...]:
    """Return the source lines that make a stage wrong in float64, the most likely first.

    The JAX model is evaluated operation by operation, with the oracle's values at the preceding
    stages. Each result is searched for among the oracle's results
    (`parity.engine.programs.unseen`). Empty if no operation is suspicious.

    Args:
        case: a case that is neither a stream nor a trajectory.
        stage: name of an intermediate that is wrong although its inputs are correct.
        exact: the oracle's intermediates, by name.
        broken: names of all stages that are wrong although their inputs are correct. Operations of
            all other stages count as correct.
    """
    seen = Seen(oracle_operations.results(case, stage))
    operations, values, recorded = _operations(case, "float64", stage, exact)
    narrow = first_narrow(operations)
    if narrow is not None:
        # The program is float64, so a single rounding to less than float32 is the cause.
        return (Line.at(narrow.source[0], NARROW),)
    beside = map(trimmed, recorded.beside([*map(mark_of, {stage, *broken})]))
    found = search(operations, values, seen, ORACLE, [*beside])
    if not case.batch.padded or (found.first is not None and found.first.mask):
        return tuple(found.lines())
    # The oracle computes the EMA token by token and has none of the numbers of an FFT: if the FFT's
    # result is wrong, all its operations are suspicious. So lines that only padding brings into the
    # stage come first, if the stage is right without padding.
    cleared = steps_if_right(replace(case, padding="none"), stage)
    return (*_entering(operations, cleared), *found.lines())[:LINES]


def steps_if_right(without: Case, stage: str) -> frozenset[Step]:
    """Return a stage's operations in a variant of a case if the stage is right there, else empty.

    These operations cannot be the cause of an error that only the original case has.

    Args:
        without: the case without one of its features, such as padding or a cache.
        stage: name of an intermediate.
    """
    exact = forward_truth(without)
    operations, values, _ = _operations(without, "float64", stage, exact)
    if not relative_l2(values[max(operations)], exact[stage]) <= SAME:
        return frozenset()
    return frozenset(map(step_of, operations.values()))


def step_of(operation: Operation) -> Step:
    """Return primitive and source lines, which identify an operation across runs of a program."""
    return operation.primitive, operation.source


def _entering(operations: Mapping[int, Operation], cleared: frozenset[Step]) -> tuple[Line, ...]:
    """Return the lines of operations that a stage has only because of padding, in order.

    If there are no such operations, the stage ignores the padding mask, and the line that calls the
    stage is returned. `cleared` are the operations that the stage has without padding; it is empty
    if the stage is wrong there, and then the result is empty too.
    """
    if not cleared:
        return ()
    in_order = (operations[i] for i in sorted(operations))
    places = [o.source[0] for o in in_order if o.source and step_of(o) not in cleared]
    if not places:
        frame = common_frame(operations.values())
        return (Line.at(frame, UNREAD),) if frame else ()
    return tuple(Line.at(place, ENTERS) for place in [*dict.fromkeys(places)][:LINES])


def narrow_lines(case: Case, stage: str, exact: Mapping[str, np.ndarray]) -> tuple[Line, ...]:
    """Return the source line of a stage's first operation in a dtype below float32; () if none."""
    found = first_narrow(_operations(case, "float32", stage, exact)[0])
    return () if found is None else (Line.at(found.source[0], NARROW),)


def _operations(
    case: Case, dtype: str, stage: str, exact: Mapping[str, np.ndarray]
) -> tuple[dict[int, Operation], dict[int, np.ndarray], Recorder]:
    """Run the JAX model with the oracle's values at the stages before `stage`.

    Returns:
        The operations between those stages and `stage`, by index; their results, by index; and the
        recorder of all operations.
    """
    subject, batch = JaxSubject(dtype), case.batch
    with subject.types(), jax.default_matmul_precision("highest"):
        params, static = eqx.partition(subject.load(case), eqx.is_array)

        def logits(params: Any, ids: Any, mask: Any) -> Any:
            return eqx.combine(params, static)(ids, mask)[0]

        mask = jnp.asarray(batch.mask) if batch.padded else None
        trees = params, ((jnp.asarray(batch.ids), mask), {})
        program = trace(logits, trees)
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        forced = {mark_of(name): x for name, x in exact.items()}
        operations, values = program.operations_of(arrays_of(trees), mark_of(stage), forced)
    assert program.recorded is not None
    return {i: trimmed(o) for i, o in operations.items()}, values, program.recorded


def mark_of(stage: str, layers: int = 1, call: int = 0) -> str:
    """Return the name of a stage in a traced program, which numbers repeated names.

    The model calls an intermediate `q` in every layer; the trace calls the second one `q#2`.

    Args:
        stage: name of an intermediate, such as `layers.1.q`.
        layers: number of layers of the model; each call of the model repeats all of them.
        call: index of the call, from 0, if the program calls the model several times.
    """
    layer, _, name = stage.rpartition(".")
    turn = call * layers + int(layer.rpartition(".")[2]) if layer else call
    return name if turn == 0 else f"{name}#{turn + 1}"


def trimmed(operation: Operation) -> Operation:
    """Return an operation without the source lines of this package, which calls the model, and of
    its callers."""
    source = operation.source
    own = (i for i, frame in enumerate(source) if _HERE in frame)
    return replace(operation, source=source[: next(own, len(source))])
