"""Compares ports and stores the results as one run, with one suite per port."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from parity.engine.measure.contract import contract_of
from parity.engine.pairing.alignment import AlignmentError
from parity.engine.programs.exits import ExitError
from parity.pins import read as read_pins
from parity.port import Port, PortError, Report, compare
from parity.port_tolerances import PORTS
from parity.sides import SideError
from reports.ports.document import document_of
from reports.provenance.environment import new_manifest
from reports.registry.outcome import Outcome, store
from reports.store.manifest import CaseInfo, Manifest, ReferenceInfo, SuiteResult
from reports.store.runs import Run
from reports.store.schema import RunKind

REFUSALS = (PortError, AlignmentError, SideError, ExitError)
"""Errors that a comparison raises if it cannot compare a port; the messages are for its author."""
ORIGINALS = {"torch": ("torch", "transformers"), "flax": ("flax",), "nnx": ("flax",)}
"""Libraries whose versions are stored as those of the reference, by kind of the original."""


@dataclass(frozen=True)
class Options:
    """Options of a comparison of ports; the defaults compare everything."""

    out: Path
    """Folder of runs, in which the results are stored."""
    file: Path
    """Python file that defines the ports."""
    cases: tuple[str, ...] = ()
    """`Port.title`, `case` or `name` of each port to compare; () for all."""
    gradients: bool = True
    """False: compare no derivatives of any port. True: each port decides (`Port.gradients`)."""
    bfloat16: bool = True
    """False: do not run any port in bfloat16. True: each port decides (`Port.bfloat16`)."""
    pins: Path | None = None
    """File with pairs of stages (`parity.pins`) to use instead of `Port.pins`; None for no file."""


@dataclass
class Comparisons:
    """Results of comparing several ports."""

    started: datetime = field(default_factory=lambda: datetime.now(UTC))
    found: list[tuple[Port, Report]] = field(default_factory=list)
    """Each compared port, with its result."""
    refused: list[tuple[Port, Exception]] = field(default_factory=list)
    """Each port whose comparison raised an error, with the error."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Duration of the comparisons in seconds, by the port's name."""

    @property
    def ports(self) -> list[Port]:
        """All ports, compared or not."""
        return [port for port, _ in (*self.found, *self.refused)]


def select(ports: Sequence[Port], options: Options) -> list[Port]:
    """Return the ports that `options.cases` selects, changed as the other options say.

    Raises:
        ValueError: one of `options.cases` is not the title, case or name of any port.
        AlignmentError: the file `options.pins` is invalid.
    """
    pins = read_pins(options.pins) if options.pins else ()
    for name in options.cases:
        if not any(name in (port.title, port.case, port.name) for port in ports):
            titles = ", ".join(port.title for port in ports)
            raise ValueError(f"no case {name!r} in {options.file}; there are {titles}")
    chosen = [
        port
        for port in ports
        if not options.cases or {port.title, port.case, port.name} & set(options.cases)
    ]
    return [
        replace(
            port,
            gradients=port.gradients and options.gradients,
            bfloat16=port.bfloat16 and options.bfloat16,
            pins=pins or port.pins,
        )
        for port in chosen
    ]


def compare_ports(
    ports: Sequence[Port],
    report: Callable[[str], None],
    step: Callable[[int, int], None] = lambda done, planned: None,
) -> Comparisons:
    """Compare every port; an error in one does not stop the others.

    Args:
        ports: Ports to compare.
        report: Receives a line after each port.
        step: Called before each port with the number of finished ports, and the total.
    """
    done = Comparisons()
    for turn, port in enumerate(ports):
        step(turn, len(ports))
        start = time.perf_counter()
        try:
            done.found.append((port, compare(port)))
            answer = done.found[-1][1].sentence()
        except REFUSALS as error:
            done.refused.append((port, error))
            answer = f"{port.title}: not compared"
        except Exception as error:
            # The users' code of both sides runs in `compare` and may raise anything.
            named = PortError(f"{type(error).__name__}: {error}".rstrip(": "))
            named.__cause__ = error
            done.refused.append((port, named))
            answer = f"{port.title}: not compared"
        seconds = time.perf_counter() - start
        done.seconds[port.name] = done.seconds.get(port.name, 0.0) + seconds
        report(f"{answer} ({seconds:.1f} s)")
    # If nothing was compared, the command's error lists the reasons, so do not repeat them here.
    for port, error in done.refused if done.found else ():
        report(f"{port.title}: not compared: {str(error).splitlines()[0]}")
    return done


def store_ports(options: Options, done: Comparisons, report: Callable[[str], None]) -> Outcome:
    """Store the results as a run, judge it against earlier runs of the same ports, write its page.

    Raises:
        ValueError: no port could be compared.
        StoreError: the folder cannot be written.
    """
    if not done.found:
        raise ValueError("\n".join(f"{port.title}: {error}" for port, error in done.refused))
    rows = tuple(m for _, found in done.found for m in found.measurements)
    return store(options.out, Run(manifest_of(options, done), rows), report)


def manifest_of(options: Options, done: Comparisons) -> Manifest:
    """Return the manifest of the run: results of the ports, version of their code, and machine."""
    code = options.file.parent.resolve()
    documents = [document_of(*pair, str(options.file)) for pair in done.found]
    manifest = new_manifest(done.started, RunKind.PORT, code, options.out)
    names = dict.fromkeys(port.name for port in done.ports)
    return replace(
        with_documents(manifest, documents),
        id=f"{manifest.id}-{slug(names)}",
        durations={name: round(seconds, 3) for name, seconds in done.seconds.items()},
        suites=tuple(_suite(name, done) for name in names),
        contract=contract_of(gate for _, found in done.found for gate in found.contract),
        cases=tuple(_case(port, found) for port, found in done.found),
        selected=options.cases,
    )


def with_documents(manifest: Manifest, documents: Sequence[Mapping[str, Any]]) -> Manifest:
    """Return `manifest` with the fields that a run of ports has besides those of any run.

    They are the results, the libraries' versions, the originals as reference, and the tolerances.

    Args:
        manifest: Manifest with the fields of any run.
        documents: Results of each port (`document_of`).
    """
    environment = manifest.environment
    loaded = {name: v for document in documents for name, v in document["versions"].items()}
    kinds = dict.fromkeys(document["sides"]["original"] for document in documents)
    libraries = [name for kind in kinds for name in ORIGINALS.get(kind, ()) if name in loaded]
    reference = ReferenceInfo(
        kind=" and ".join(kinds),
        versions={name: loaded[name] for name in libraries},
        detail="the originals of the ports, run in this job",
    )
    return replace(
        manifest,
        environment=replace(
            environment, versions={**environment.versions, **loaded}, reference=reference
        ),
        tolerances=tuple(
            {"edge": row.edge, "kind": kind, "bound": row.bound, "reason": row.reason}
            for row in PORTS
            for kind in row.kinds
        ),
        ports=tuple(documents),
    )


def slug(names: Iterable[str]) -> str:
    """Return the names joined as a part of a folder's name: at most 60 letters, digits, . and -."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", "-".join(names)).strip("-.")[:60] or "port"


def _suite(name: str, done: Comparisons) -> SuiteResult:
    planned = [port for port in done.ports if port.name == name]
    refused = [(port, error) for port, error in done.refused if port.name == name]
    reason = "; ".join(f"{p.title}: {str(e).splitlines()[0]}" for p, e in refused)[:400]
    return SuiteResult(
        name,
        planned=len(planned),
        executed=len(planned) - len(refused),
        reason=reason,
        status="failed" if refused else "ran",
    )


def _case(port: Port, found: Report) -> CaseInfo:
    shapes: dict[str, Any] = {
        f"input {name}": f"{x.dtype}{list(x.shape)}" for name, x in port.port.inputs().items()
    }
    return CaseInfo(
        name=port.title,
        title=port.case or port.name,
        why=found.sentence(),
        hash=found.measurements[0].identity[:16] if found.measurements else "",
        config=shapes,
    )
