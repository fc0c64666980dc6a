"""Plants bugs in Flax models and compares them with their originals; each pair is made once."""

from __future__ import annotations

import contextlib
import functools
import linecache
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import transformers
from flax.traverse_util import flatten_dict, unflatten_dict

from parity.port import Port, Report, compare
from parity.sides import AS_IS, FlaxSide, Run, TorchSide, Trace
from tests.parity.ports.catalogue import PLAIN, pair, text
from tests.parity.ports.faults.fault import Parameters, PortFault
from tests.parity.ports.twins import Twin

THEIR_TOLERANCE = 4e-2
"""What Transformers' tests of its Flax models allow between any two outputs, absolute."""
PATCHES = "faults/fault.py"
PADDED = {name: text(padding="right") for name in ("gpt2", "llama", "gemma", "bloom", "gpt_neo")}
PADDED |= {name: pair(padding="right") for name in ("t5", "bart")}
PADDED |= {"bert": text(padding="right", kinds=True)}


@dataclass(frozen=True)
class Finding:
    """What was said of one bug, or of none."""

    name: str
    error: float
    """Largest difference of any output in float32, as a test of Transformers takes it."""
    found: bool
    stage: str
    """What is named first: a stage, or parameters; empty where nothing is."""
    stage_right: bool
    line: str
    """The line of the port that is named first, or those that make the mask it applies."""
    line_right: bool | None
    """None where no line is wrong."""
    sentence: str

    @property
    def theirs(self) -> bool:
        """Whether their tolerance shows it."""
        return not self.error <= THEIR_TOLERANCE


class Remembered(TorchSide):
    """An original of many ports: what it computed once is not computed again."""

    @functools.cached_property
    def _traces(self) -> dict[Any, Trace]:
        return {}

    @functools.cached_property
    def _results(self) -> list[np.ndarray]:
        return super().operation_results()

    def run(self, how: Run = AS_IS) -> Trace:
        """Run once, or return what the same run gave."""
        if how.forced or how.cotangents is not None:
            return super().run(how)
        key = how.precision, how.rounding, how.seed, how.shared
        if key not in self._traces:
            self._traces[key] = super().run(how)
        return self._traces[key]

    def operation_results(self) -> list[np.ndarray]:
        """Return the results of every operation of a float64 run."""
        return self._results


@dataclass(frozen=True)
class Bench:
    """A Flax model and its original."""

    twin: Twin
    original: Remembered
    model: Any
    inputs: dict[str, np.ndarray]

    def side(self, fault: PortFault | None) -> FlaxSide:
        """Return the port, with what a bug does to its parameters."""
        model, params = self.model, self.model.params
        if fault is not None and fault.params is not None:
            flat: Parameters = flatten_dict(params, sep=".")
            fault.params(flat)
            params = unflatten_dict(flat, sep=".")

        def as_users_call(module: Any, params: Any, **inputs: Any) -> Any:
            # Put back behind the call: the next fault's side is made of the model's own module.
            own, model._module = model._module, module
            try:
                # Inside of what watches the modules: Flax's first interceptor is the outermost.
                with contextlib.nullcontext() if fault is None else fault.planted(model):
                    return self.twin.call_flax(model, params["params"], inputs)
            finally:
                model._module = own

        return FlaxSide(model.module, params, call=as_users_call, **self.inputs)

    def run(self, fault: PortFault | None) -> tuple[Report, Finding]:
        """Plant a bug, or none, and return what is said of it."""
        name = self.twin.name if fault is None else fault.name
        port = Port(
            name,
            self.original,
            self.side(fault),
            gradients=fault is not None and fault.gradients,
            bfloat16=False,
        )
        with self.twin.running():
            report = compare(port)
            theirs, ours = port.original.run(), port.port.run()
        apart = [
            float(np.max(np.abs(ours.stages[output] - theirs.stages[output])))
            for output in ours.outputs
            if output in theirs.outputs
        ]
        error = math.nan if any(map(math.isnan, apart)) else max(apart)
        stage, lines = stage_of(report), lines_of(report)
        return report, Finding(
            name,
            error,
            not report.holds,
            stage,
            fault is not None and re.fullmatch(fault.stage, stage) is not None,
            ", ".join(lines),
            is_line_right(fault, lines),
            report.sentence(),
        )


def run(fault: PortFault) -> tuple[Report, Finding]:
    """Plant a bug in its model and return what is said of it.

    An embedding of torch gives the padding's row no derivative, on purpose, and Flax does: what
    only derivatives show is looked for in texts without padding.
    """
    return bench(fault.subject, not fault.gradients).run(fault)


@functools.cache
def bench(name: str, padded: bool = True) -> Bench:
    """Return the pair of a Flax model of the catalogue, its texts padded on the right or not."""
    twin = PLAIN[name]
    if twin.known is not None:
        twin = twin.remedied()
    if padded:
        twin = replace(twin, inputs=PADDED.get(name, twin.inputs))
    with twin.running():
        original, model = twin.models()
    inputs = twin.inputs(original.config)
    return Bench(twin, Remembered(original, call=twin.torch_call, **inputs), model, inputs)


def stage_of(report: Report) -> str:
    """Return what a report names first: parameters that are others, a stage, or a derivative."""
    for row in report.failures:
        if row.metric == "unmatched":
            return row.note.partition(": ")[2]
    if report.culprit is not None:
        return report.culprit.name
    return next(iter(report.wrong_derivatives), "")


def lines_of(report: Report) -> tuple[str, ...]:
    """Return the lines that a report names first, passing over the patching itself.

    That is the line of an operation, or all lines that make the mask it applies.
    """
    operation = report.place.operation
    if operation is None:
        return ()
    lines = tuple(line for line in operation.mask or operation.source if PATCHES not in line)
    return lines if operation.mask else lines[:1]


def is_line_right(fault: PortFault | None, lines: Sequence[str]) -> bool | None:
    """Return whether a line that was named is one that is wrong; None where none is."""
    if fault is None or fault.line is None:
        return None
    return any(is_line_of(fault, line) for line in lines)


def is_line_of(fault: PortFault, line: str) -> bool:
    """Return whether a line is one that is wrong."""
    named = re.fullmatch(r"(.+):(\d+) \(.*\)", line)
    if named is None:
        return False
    file, number = named[1], int(named[2])
    if not fault.line:
        assert fault.plant is not None
        return file.endswith(fault.plant.file()) and number in fault.plant.lines()
    roots = (Path.cwd(), Path(transformers.__file__).parents[1])
    return any(fault.line in linecache.getline(str(root / file), number) for root in roots)


def narrow(x: Any) -> Any:
    """Return an array rounded to bfloat16, in its own dtype."""
    return jnp.asarray(x).astype(jnp.bfloat16).astype(jnp.asarray(x).dtype)
