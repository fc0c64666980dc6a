"""Audit of a jaxpr: the dtypes of every equation, including those in loops and calls.

Source: docs/formats.md "The dtype audit".
"""

from __future__ import annotations

import sysconfig
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from parity.engine.programs.jaxprs import inner_jaxprs, is_hidden
from stability.dtype_audit.families import CONVERT, DOT, ELEMENTWISE, JAXPR
from stability.dtype_audit.rows import Row, aggregated, is_inexact
from stability.dtype_audit.scopes import module_of, phase_of

PROMOTION, ROUND_TRIP = "promotion", "round trip"

_JAX = Path(jax.__file__).parent
# The inner jaxpr of a reduction combines two numbers; it is not a call.
_COMBINERS = ("reduce", "scatter", "select_and", "sort", "argm")
# Functions of jax.numpy that promote an operand to another's dtype; `astype` is not one of them.
_PROMOTERS = ("promote_", "_promote", "_operator_", "ufunc.__call__", "where", "concatenate")
_LIBRARIES = ("jax", "jaxlib", "equinox", "optax", "jaxtyping", "beartype", "numpy")


@dataclass(frozen=True, slots=True)
class Site:
    """One equation of a jaxpr and its location."""

    eqn: JaxprEqn
    stack: str
    """Name stack from the outermost program on, with `/` between calls."""
    source: str
    """File and line, relative to the project or import path; empty if unknown."""
    trips: int
    """Number of executions: the product of the lengths of the enclosing scans. A while loop counts
    as one iteration."""
    consumers: tuple[JaxprEqn, ...]
    """Equations of the same jaxpr that read `eqn`'s first output; empty if the jaxpr returns it."""


def rows_of_jaxpr(closed: ClosedJaxpr) -> tuple[Row, ...]:
    """Return the dtype audit (`Row`s) of a closed jaxpr, such as `jax.make_jaxpr` returns."""
    return aggregated(row for site in walk(closed.jaxpr) if (row := _row(site)) is not None)


def walk(jaxpr: Jaxpr, stack: str = "", source: str = "", trips: int = 1) -> Iterator[Site]:
    """Yield every equation of a jaxpr; inner ones follow the call, branch or loop they are in.

    Args:
        jaxpr: an open jaxpr.
        stack: name stack of the caller; empty for the outermost jaxpr.
        source: location to report for all equations, as for a library function; empty: each
            equation's own location.
        trips: number of times the jaxpr is executed.
    """
    readers = _readers(jaxpr)
    for eqn in jaxpr.eqns:
        here = "/".join(filter(None, (stack, str(eqn.source_info.name_stack))))
        line = source or source_of(eqn)
        consumers = readers.get(eqn.outvars[0], ()) if eqn.outvars else ()
        yield Site(eqn, here, line, trips, tuple(consumers))
        if eqn.primitive.name.startswith(_COMBINERS):
            continue
        times = trips * eqn.params["length"] if eqn.primitive.name == "scan" else trips
        for inner in inner_jaxprs(eqn):
            # A library's jitted function is traced once, with the lines of its first caller. So the
            # line of this call is reported instead.
            yield from walk(inner, here, line if is_library(inner) else source, times)


def is_library(jaxpr: Jaxpr) -> bool:
    """Whether a jaxpr's function is defined by JAX, as `jax.nn.silu`, or by a hidden module.

    A module is hidden if it sets `__tracebackhide__ = True`.
    """
    info = getattr(jaxpr, "debug_info", None)
    source = str(getattr(info, "func_src_info", "") or "")
    file = source.partition(" at ")[2].rpartition(":")[0]
    return str(_JAX) in source or is_hidden(file)


def source_of(eqn: JaxprEqn) -> str:
    """Return "file:line" of an equation's innermost frame outside libraries; empty if none."""
    trace = eqn.source_info.traceback
    for frame in trace.frames if trace is not None else ():
        if not (_is_library_file(frame.file_name) or is_hidden(frame.file_name)):
            return f"{_relative(frame.file_name)}:{frame.line_num}"
    return ""


def _is_promotion(eqn: JaxprEqn) -> bool:
    """Whether a conversion widens a float because the operation's other operand is wider."""
    read, written = _avals(eqn)
    if not (_inexact(read) and _inexact(written)) or getattr(read, "weak_type", False):
        return False
    if written.dtype.itemsize <= read.dtype.itemsize:
        return False
    trace = eqn.source_info.traceback
    for frame in trace.frames if trace is not None else ():
        if not _is_library_file(frame.file_name):
            return False
        if frame.function_name.startswith(_PROMOTERS):
            return True
    return False


def _avals(eqn: JaxprEqn) -> tuple[Any, Any]:
    """Return the abstract values of the first operand and the first result."""
    return eqn.invars[0].aval, eqn.outvars[0].aval


def _row(site: Site) -> Row | None:
    eqn, name = site.eqn, site.eqn.primitive.name
    family = JAXPR.get(name)
    if family is None:
        return None
    inputs = tuple(_dtype(v.aval) for v in eqn.invars if hasattr(v.aval, "dtype"))
    output = _dtype(eqn.outvars[0].aval)
    if not any(is_inexact(dtype) for dtype in (*inputs, output) if dtype != "other"):
        return None
    if name == "convert_element_type" and inputs == (output,):
        return None  # only the weak type changed
    accum = eqn.params.get("preferred_element_type") if family == DOT else None
    if family == ELEMENTWISE:
        name, inputs = ELEMENTWISE, tuple(sorted(set(inputs)))
    return Row(
        view="jaxpr",
        phase=phase_of(site.stack),
        module=module_of(site.stack),
        family=family,
        op=name,
        inputs=inputs,
        output=output,
        accum="" if accum is None else jnp.dtype(accum).name,
        how=_how(site) if family == CONVERT else "",
        count=site.trips,
        trips=site.trips,
        source=site.source,
    )


def _how(site: Site) -> str:
    if site.eqn.primitive.name == "reduce_precision":
        return ""
    if _is_promotion(site.eqn):
        return PROMOTION
    read, written = _avals(site.eqn)
    narrows = _inexact(read) and _inexact(written) and written.dtype.itemsize < read.dtype.itemsize
    return ROUND_TRIP if narrows and _widened_again(site) else ""


def _widened_again(site: Site) -> bool:
    width = _avals(site.eqn)[1].dtype.itemsize
    return bool(site.consumers) and all(
        reader.primitive.name == "convert_element_type"
        and jnp.dtype(reader.params["new_dtype"]).itemsize > width
        for reader in site.consumers
    )


def _readers(jaxpr: Jaxpr) -> dict[Var, list[JaxprEqn]]:
    """Return the equations that read a variable, by variable; returned variables have no entry."""
    readers: dict[Var, list[JaxprEqn]] = defaultdict(list)
    for eqn in jaxpr.eqns:
        for atom in eqn.invars:
            if not isinstance(atom, Literal):
                readers[atom].append(eqn)
    for atom in jaxpr.outvars:
        if not isinstance(atom, Literal):
            readers.pop(atom, None)
    return readers


def _inexact(aval: Any) -> bool:
    return hasattr(aval, "dtype") and is_inexact(_dtype(aval))


def _dtype(aval: Any) -> str:
    dtype = getattr(aval, "dtype", None)
    if dtype is None or jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return "other"
    return jnp.dtype(dtype).name


@lru_cache(maxsize=4096)
def _is_library_file(file: str) -> bool:
    if file.startswith("<") or file == _SCOPES:
        return True
    installed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), str(_JAX.parent)}
    for folder in installed:
        if Path(file).is_relative_to(folder):
            return Path(file).relative_to(folder).parts[0] in _LIBRARIES
    return Path(file).is_relative_to(sysconfig.get_path("stdlib"))


@lru_cache(maxsize=4096)
def _relative(file: str) -> str:
    """Return a file's path relative to the nearest parent folder with a pyproject.toml.

    If there is no such folder, the path is relative to the parent of the file's top package.
    """
    path = Path(file)
    projects = (folder for folder in path.parents if (folder / "pyproject.toml").is_file())
    top = next(projects, path.parent)
    while (top / "__init__.py").is_file():
        top = top.parent
    return path.relative_to(top).as_posix()


_SCOPES = str(Path(__file__).with_name("scopes.py"))
