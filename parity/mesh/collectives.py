"""Collectives of a compiled program: operation, mesh axes, dtype, size and source line.

The collectives are parsed from the HLO text of the partitioned program. Source: docs/sharding.md
"Which collective".
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

OPERATIONS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)
"""HLO operations that count as collectives; the asynchronous `-start` forms count too."""
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_SHAPE = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_OPERAND = re.compile(r"%([\w.\-]+)")
_BITS = re.compile(r"\d+")


@dataclass(frozen=True)
class Collective:
    """One collective operation (exchange between devices) of a compiled program."""

    name: str
    """Name of the HLO instruction."""
    operation: str
    """HLO operation, one of `OPERATIONS`."""
    axes: tuple[str, ...]
    """Mesh axes along which devices exchange; empty if the groups do not follow mesh axes."""
    groups: tuple[tuple[int, ...], ...]
    """Groups of devices, by position in the mesh; for a permutation, pairs (from, to)."""
    dtype: str
    """HLO dtype of the result, such as `f32`."""
    bytes: int
    """Size of the result on one device, in bytes."""
    asked_by: str
    """JAX operation that the collective implements, such as `jit(step)/psum`; may be empty."""
    source: str
    """File and line of that operation, such as `my_step.py:12`; empty if the compiler reports
    none."""

    def __str__(self) -> str:
        along = f" over {', '.join(self.axes)}" if self.axes else ""
        made = self.source or self.asked_by
        return f"{self.operation}{along}, {self.dtype}, {self.bytes} B ({self.name}, {made})"


@dataclass(frozen=True)
class _Instruction:
    name: str
    operation: str
    operands: tuple[str, ...]
    called: tuple[str, ...]
    line: str
    is_root: bool


class CompiledProgram:
    """Parsed HLO text of a compiled program.

    Args:
        text: text of the compiled program (`jax.stages.Compiled.as_text`).
        mesh: sizes of the mesh's axes, by name.
    """

    def __init__(self, text: str, mesh: Mapping[str, int]):
        self.mesh = dict(mesh)
        self.sources = _source_lines(text)
        self.computations: dict[str, dict[str, _Instruction]] = {}
        self.entry = ""
        current: dict[str, _Instruction] = {}
        for line in text.splitlines():
            if line and not line[0].isspace() and line.rstrip().endswith("{"):
                name = line.removeprefix("ENTRY ").split()[0].lstrip("%")
                current = self.computations[name] = {}
                self.entry = name if line.startswith("ENTRY ") else self.entry
            elif (match := _INSTRUCTION.match(line)) is not None:
                root, name, _, operation, rest = match.groups()
                branches = _BRANCHES.search(rest)
                called = _CALLED.findall(rest)
                called += _OPERAND.findall(branches[1]) if branches else []
                operands = tuple(_OPERAND.findall(rest.split("metadata=")[0]))
                current[name] = _Instruction(
                    name, operation, operands, tuple(called), line, bool(root)
                )

    def collectives(self) -> list[Collective]:
        """Return all collectives of the program, in the order of its text."""
        found = [
            self._collective(i)
            for instructions in self.computations.values()
            for i in instructions.values()
        ]
        return [collective for collective in found if collective is not None]

    def reaching(self, result: int) -> set[tuple[str, int]]:
        """Return the collectives that one result of the program depends on.

        Args:
            result: position of the result among those of the program.

        Returns:
            Pairs of the collective's name and the index of the operand that the result uses: the
            compiler combines unrelated exchanges into one instruction. Empty if the program has no
            such result.
        """
        instructions = self.computations.get(self.entry, {})
        root = next((i for i in instructions.values() if i.is_root), None)
        if root is None:
            return set()
        roots = root.operands if root.operation == "tuple" else (root.name,)
        if result >= len(roots):
            return set()
        found: set[tuple[str, int]] = set()
        seen: set[str] = set()
        wanted = [roots[result]]
        while wanted:
            name = wanted.pop()
            if name in seen or name not in instructions:
                continue
            seen.add(name)
            here = instructions[name]
            source = instructions.get(here.operands[0]) if here.operands else None
            if here.operation == "get-tuple-element" and source is not None:
                index = int((re.search(r"index=(\d+)", here.line) or [0, 0])[1])
                if _operation(source.operation) and index < len(source.operands):
                    found.add((source.name, index))
                    wanted.append(source.operands[index])
                    continue
            found |= {(inner, 0) for inner in self._inside(here, set())}
            wanted += here.operands
        return found

    def results(self) -> int:
        """Return the number of results of the compiled program."""
        instructions = self.computations.get(self.entry, {}).values()
        root = next((i for i in instructions if i.is_root), None)
        return 0 if root is None else len(root.operands) if root.operation == "tuple" else 1

    def _inside(self, instruction: _Instruction, entered: set[str]) -> set[str]:
        found = {instruction.name} if _operation(instruction.operation) else set()
        for name in instruction.called:
            if name not in entered:
                entered.add(name)
                for inner in self.computations.get(name, {}).values():
                    found |= self._inside(inner, entered)
        return found

    def _collective(self, i: _Instruction) -> Collective | None:
        operation = _operation(i.operation)
        if operation is None:
            return None
        result = i.line.split(" = ", 1)[1].split(i.operation + "(")[0]
        shapes = _SHAPE.findall(result)
        if i.operation.endswith("-start") and operation != "all-reduce":
            # The start of an asynchronous collective returns its operands, its results and, on some
            # devices, u32 contexts. Only the results are counted.
            shapes = [shape for shape in shapes if shape != ("u32", "")]
            shapes = shapes[len(shapes) // 2 :]
        groups = _groups(i.line)
        asked = re.search(r'op_name="([^"]*)"', i.line)
        return Collective(
            name=i.name,
            operation=operation,
            axes=axes_of(groups, self.mesh, operation),
            groups=groups,
            dtype=shapes[0][0] if shapes else "",
            bytes=sum(_bytes(kind, sizes) for kind, sizes in shapes),
            asked_by=asked[1] if asked else "",
            source=self.sources(i.line),
        )


def between(
    program: CompiledProgram, results: Sequence[str], stage: str, sound: Iterable[str]
) -> tuple[Collective, ...]:
    """Return the collectives that a wrong stage depends on, but no correct stage before it.

    Args:
        program: the compiled program.
        results: names of the program's results, in order.
        stage: name of the wrong stage, one of `results`.
        sound: names of the correct stages before it.

    Returns:
        The collectives; empty if `stage` is no result, or if the compiler dropped some results.
    """
    # The compiler drops results that are unchanged arguments. Positions then no longer match names.
    if stage not in results or program.results() != len(results):
        return ()
    theirs = program.reaching(results.index(stage))
    for name in sound:
        if name in results:
            theirs -= program.reaching(results.index(name))
    names = {name for name, _ in theirs}
    return tuple(c for c in program.collectives() if c.name in names)


def axes_of(
    groups: Sequence[Sequence[int]], mesh: Mapping[str, int], operation: str = ""
) -> tuple[str, ...]:
    """Return the mesh axes along which the devices of each group differ.

    The result is () if the groups do not cover whole axes.

    Args:
        groups: positions of each group's devices in the mesh, last axis fastest; empty: one group
            of all devices.
        mesh: sizes of the mesh's axes, by name.
        operation: HLO operation; the pairs of a `collective-permute` need not cover an axis.
    """
    sizes = tuple(mesh.values())
    groups = groups or (tuple(range(math.prod(sizes))),)
    place = [np.array(np.unravel_index(group, sizes)) for group in groups if len(group)]
    varying = {axis for p in place for axis in np.nonzero(np.ptp(p, axis=1))[0]}
    expected = math.prod(sizes[axis] for axis in varying)
    whole = operation == "collective-permute" or all(len(g) == expected for g in groups)
    return tuple(name for i, name in enumerate(mesh) if i in varying) if whole else ()


def _operation(kind: str) -> str | None:
    plain = kind.removesuffix("-start")
    return plain if plain in OPERATIONS else None


def _groups(line: str) -> tuple[tuple[int, ...], ...]:
    pairs = re.search(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}", line)
    if pairs is not None:
        return tuple(
            tuple(map(int, _BITS.findall(g))) for g in re.findall(r"\{([\d,]*)\}", pairs[1])
        )
    if (named := _BY_AXES.search(line)) is not None:
        return _groups_along(*named.groups())
    # Compact form: shape of the groups, shape of the devices, and their permutation.
    short = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    if short is None:
        return ()
    shape, devices, turned = (_numbers(text) if text else () for text in short.groups())
    ids = np.arange(math.prod(devices)).reshape(devices)
    ids = ids.transpose(turned) if turned else ids
    return tuple(tuple(int(i) for i in group) for group in ids.reshape(shape))


_BY_AXES = re.compile(
    r"replica_groups=mesh\[([^\]]*)\]"
    r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}"
)
"""Groups written as mesh axes: mesh['data'=2,'tensor'=4] {'data'}.

JAX 0.11 and later write all collectives in this form, earlier versions only those that XLA adds.
`device_ids=([2,4]T(1,0))` is the order of the devices. `{'data':(2)4}` is a part of an axis: after
a factor of 2, the next factor of 4."""


def _groups_along(
    mesh: str, devices: str | None, turned: str | None, along: str
) -> tuple[tuple[int, ...], ...]:
    """Return the groups of devices along some axes of a mesh, or parts of axes.

    Arguments are the texts that `_BY_AXES` matches, such as `'data'=2,'tensor'=4` (`mesh`), `2,4`
    (`devices`, a shape), `1,0` (`turned`, the transposition of that shape) and `'data'` (`along`).
    """
    sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", mesh)}
    ids = np.arange(math.prod(sizes.values()))
    if devices is not None:
        ids = ids.reshape(_numbers(devices))
        ids = ids.transpose(_numbers(turned)) if turned else ids
    parts = [
        (name, int(before or 1), int(size or sizes[name]))
        for name, before, size in re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", along)
    ]
    # Each axis is split where a part of it begins or ends, the slowest part first.
    shape: list[int] = []
    inside: dict[tuple[str, int], int] = {}
    for name, size in sizes.items():
        ends = (end for part, before, n in parts if part == name for end in (before, before * n))
        borders = sorted({1, size, *ends})
        for low, high in itertools.pairwise(borders if size > 1 else [1, 1]):
            inside[name, low] = len(shape)
            shape.append(high // low)
    within = [
        dimension
        for part, before, size in parts
        for (name, low), dimension in inside.items()
        if name == part and before <= low < max(before * size, before + 1)
    ]
    others = [dimension for dimension in range(len(shape)) if dimension not in within]
    rows = ids.reshape(shape).transpose(*others, *within)
    rows = rows.reshape(-1, math.prod(shape[dimension] for dimension in within))
    return tuple(tuple(map(int, row)) for row in rows)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _bytes(kind: str, sizes: str) -> int:
    count = math.prod(int(size) for size in sizes.split(",") if size)
    bits = _BITS.search(kind)
    return count * (int(bits[0]) if bits else 8) // 8


def _source_lines(text: str):
    """Return a function from an instruction's text to its source, such as `my_step.py:12`.

    The source is "" if it is unknown. `text` is the whole program: instructions refer to its tables
    of files and stack frames.
    """
    tables: dict[str, dict[int, str]] = {}
    current: dict[int, str] = {}
    for line in text.splitlines():
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            current = tables.setdefault(line, {})
        elif (entry := re.match(r"^(\d+) (.*)$", line)) is not None:
            current[int(entry[1])] = entry[2]
        elif line.startswith(("ENTRY", "%")):
            break

    def number(text: str, key: str) -> int:
        match = re.search(rf"\b{key}=(\d+)", text)
        return int(match[1]) if match else 0

    def source(line: str) -> str:
        plain = re.search(r'source_file="([^"]*)" source_line=(\d+)', line)
        if plain is not None:
            return f"{Path(plain[1]).name}:{plain[2]}"
        frame = tables.get("StackFrames", {}).get(number(line, "stack_frame_id"), "")
        at = tables.get("FileLocations", {}).get(number(frame, "file_location_id"), "")
        name = tables.get("FileNames", {}).get(number(at, "file_name_id"), "").strip('"')
        return f"{Path(name).name}:{number(at, 'line')}" if name else ""

    return source
