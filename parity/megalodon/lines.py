"""Finds the source lines of the JAX model that make a stage wrong.

Source: docs/parity.md "From a stage to a line".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from parity.engine.programs.operations import Operation, Recorder, first_narrow
from parity.engine.programs.source_lines import Line
from parity.engine.programs.unseen import Seen, search
from parity.megalodon import oracle_operations
from parity.megalodon.cases import Case
from parity.megalodon.runner import JaxSubject
from parity.sides.jax_leaves import arrays_of
from parity.sides.traced import trace

NARROW = "first operation in less than float32"


def lines(
    case: Case, stage: str, exact: Mapping[str, np.ndarray], broken: Collection[str] = ()
) -> tuple[Line, ...]:
    """Return the lines that make a stage wrong in float64, the most likely first.

    The JAX model is evaluated operation by operation, with the oracle's values at the preceding
    stages. Each result is searched for among the oracle's results (`engine.unseen`).

    Args:
        case: a case that is neither a stream nor a trajectory.
        stage: an intermediate that is wrong on correct inputs.
        exact: the oracle's intermediates.
        broken: all stages that are wrong on correct inputs; operations of other stages are correct.
    """
    seen = Seen(oracle_operations.results(case, stage))
    operations, values, recorded = _operations(case, "float64", stage, exact)
    narrow = first_narrow(operations)
    if narrow is not None:
        # The program is float64, so a single rounding to less than float32 is the cause.
        return (Line.at(narrow.source[0], NARROW),)
    beside = map(_trimmed, recorded.beside([*map(_mark, {stage, *broken})]))
    return tuple(search(operations, values, seen, "the oracle", [*beside]).lines())


def narrow_lines(case: Case, stage: str, exact: Mapping[str, np.ndarray]) -> tuple[Line, ...]:
    """Return the line of a stage's first operation narrower than float32, if there is one."""
    found = first_narrow(_operations(case, "float32", stage, exact)[0])
    return () if found is None else (Line.at(found.source[0], NARROW),)


def _operations(
    case: Case, dtype: str, stage: str, exact: Mapping[str, np.ndarray]
) -> tuple[dict[int, Operation], dict[int, np.ndarray], Recorder]:
    """Return the JAX model's operations between a stage and the preceding ones, their results, and
    the record of all operations.
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
        forced = {_mark(name): x for name, x in exact.items()}
        operations, values = program.operations_of(arrays_of(trees), _mark(stage), forced)
    assert program.recorded is not None
    return {i: _trimmed(o) for i, o in operations.items()}, values, program.recorded


def _mark(stage: str) -> str:
    """Return the name of a stage among the model's marks: the second `q` is `q#2`."""
    layer, _, name = stage.rpartition(".")
    turn = int(layer.rpartition(".")[2]) + 1 if layer else 1
    return name if turn == 1 else f"{name}#{turn}"


def _trimmed(operation: Operation) -> Operation:
    """Return an operation without the traceback frames outside the model."""
    here, source = f"/{Path(__file__).name}:", operation.source
    own = (i for i, frame in enumerate(source) if here in f"/{frame}" and "logits)" in frame)
    return replace(operation, source=source[: next(own, len(source))])
