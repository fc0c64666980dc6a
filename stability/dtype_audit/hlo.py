"""Audit of a compiled program: the dtypes in which XLA computes, read from the program's HLO text.

The jaxpr does not determine these dtypes: `preferred_element_type` is only the dtype of a product's
result. The compiler chooses the dtype of the accumulation, may omit a rounding, and may widen
operations that the hardware lacks. Source: docs/formats.md "The dtype audit".
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from stability.dtype_audit.families import CONVERT, DOT, ELEMENTWISE, FFT, HLO, PEAK, SUM
from stability.dtype_audit.rows import Row, aggregated, is_inexact
from stability.dtype_audit.scopes import module_of, phase_of

_DTYPES = {
    "pred": "bool",
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "c64": "complex64",
    "c128": "complex128",
    "f8e4m3fn": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
    **{f"s{n}": f"int{n}" for n in (4, 8, 16, 32, 64)},
    **{f"u{n}": f"uint{n}" for n in (4, 8, 16, 32, 64)},
}
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\([^=]*?\)|\S+) ([\w\-]+)\((.*)$")
_SHAPE = re.compile(r"([a-z]\w*)\[")
_OPERAND = re.compile(r"%([\w.\-]+)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_CALLED = re.compile(r"to_apply=%?([\w.\-]+)")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) (?:\([^{]*)?\{")
# Families of library calls and GPU kernels, by patterns in their names.
_TARGETS = ((r"matmul|dot|gemm|conv", DOT), (r"fft", FFT), (r"softmax", "softmax"))


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction (line) of HLO text, with the dtypes of its result and operands."""

    computation: str
    """Name of the computation that contains the instruction."""
    name: str
    op: str
    """Opcode; for a library call `custom-call:<target>`."""
    output: str
    """Dtype of the result; of the first array if the result is a tuple."""
    inputs: tuple[str, ...]
    """Dtypes of the operands, in order."""
    op_name: str
    """JAX's name stack, from the metadata; empty if there is none."""
    called: str
    """Name of the computation that a reduction applies to pairs; empty for other instructions."""


def rows_of_hlo(text: str) -> tuple[Row, ...]:
    """Return the dtype audit (`Row`s) of a compiled program.

    Counts are numbers of instructions in the text, not of executions.

    Args:
        text: HLO, from `compiled.as_text()`.
    """
    instructions = tuple(parse(text))
    peaks = {i.computation for i in instructions if i.op in ("maximum", "minimum")}
    sums = {i.computation for i in instructions if i.op in ("add", "multiply")}
    combiners = {i.called for i in instructions} - {""}
    rows = (_row(i, peaks - sums) for i in instructions if i.computation not in combiners)
    return aggregated(row for row in rows if row is not None)


def parse(text: str) -> Iterator[Instruction]:
    """Yield the instructions of HLO text with the dtypes of their operands."""
    dtypes: dict[str, str] = {}
    computation = ""
    for line in text.splitlines():
        if line and not line[0].isspace():
            if header := _COMPUTATION.match(line):
                computation, dtypes = header.group(1), {}
            continue
        if (match := _INSTRUCTION.match(line)) is None:
            continue
        name, shape, op, rest = match.groups()
        dtypes[name] = output = _dtype(shape)
        inputs = tuple(dtypes[o] for o in _OPERAND.findall(_arguments(rest)) if o in dtypes)
        target, label, called = (p.search(rest) for p in (_TARGET, _OP_NAME, _CALLED))
        yield Instruction(
            computation,
            name,
            f"custom-call:{target.group(1)}" if target else op,
            output,
            inputs,
            label.group(1) if label else "",
            called.group(1) if called else "",
        )


def _arguments(rest: str) -> str:
    """Return the text of the operands: `rest` up to the parenthesis that closes their list."""
    depth = 1
    for at, character in enumerate(rest):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return rest[:at]
    return rest


def _dtype(shape: str) -> str:
    """Return the dtype of a shape; for a tuple, that of its first array."""
    match = _SHAPE.search(shape)
    return _DTYPES.get(match.group(1), match.group(1)) if match else "other"


def _row(instruction: Instruction, peaks: set[str]) -> Row | None:
    family = _family(instruction, peaks)
    if family is None:
        return None
    dtypes = [d for d in (*instruction.inputs, instruction.output) if d in _DTYPES.values()]
    if not any(is_inexact(dtype) for dtype in dtypes):
        return None
    row = Row(
        view="hlo",
        phase=phase_of(instruction.op_name),
        module=module_of(instruction.op_name),
        family=family,
        op=instruction.op,
        inputs=instruction.inputs,
        output=instruction.output,
    )
    if family == ELEMENTWISE:
        return replace(row, op=ELEMENTWISE, inputs=tuple(sorted(set(row.inputs))))
    return row


def _family(instruction: Instruction, peaks: set[str]) -> Any:
    if instruction.op.startswith("custom-call:"):
        name = instruction.op.lower()
        return next((family for word, family in _TARGETS if re.search(word, name)), None)
    family = HLO.get(instruction.op)
    if family == SUM and instruction.called in peaks:
        return PEAK
    if family == CONVERT and instruction.inputs == (instruction.output,):
        # `reduce-precision` rounds although its dtype stays the same.
        return CONVERT if instruction.op == "reduce-precision" else None
    return family
