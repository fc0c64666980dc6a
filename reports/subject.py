"""The record of a subject, a program that nights measure, and the register of all subjects.

A subject brings its name, parts of a night, tolerances and sections of the page. `reports.subjects`
registers those of this project; the other rooms of `reports` know a subject only by its record.
Source: ARCHITECTURE.md "Subjects".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:
    from parity.engine.measure.bounds import Rule
    from parity.engine.measure.deviation import Deviation
    from parity.engine.measure.measurement import Measurement
    from parity.executors.executor import Log
    from reports.provenance.environment import Reference
    from reports.store.manifest import CaseInfo
    from reports.store.runs import Run
    from reports.suite_run import SuiteRun

T = TypeVar("T")

PROBES_PART, CONTROLS_PART = "(probes)", "(controls)"
"""Parts of a night that probe the checkpoint, and that plant bugs which the comparison must find.
The parentheses keep names of parts distinct from names of cases."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a night that measures one suite.

    Attributes:
        name: Name in the plan of a night, such as "(mesh)".
        suite: Value of `suite` in the measurements.
        what: What is compared, for the list of cases.
        why: Reason for each name in `Suites.names` that `Suites.reasons` lacks.
        live: Whether it needs the live reference; a night with recordings has no such part.
        section: Id of the section of the page that shows the measurements.
    """

    name: str
    suite: str
    what: str = ""
    why: str = ""
    live: bool = False
    section: str = "records"


@dataclass(frozen=True)
class Suites:
    """Functions that measure the parts of a subject.

    Attributes:
        measure: By name of the part. A function receives the reference, a log, and the selected
            names of `names`, where none selects all of them.
        names: By name of the part: the cases that `nightly --case` selects.
        reasons: Why a case is there, by its name.
    """

    measure: Mapping[str, Callable[[Any, Log, Collection[str]], SuiteRun]]
    names: Mapping[str, set[str]]
    reasons: Mapping[str, str] = field(default_factory=dict)


@runtime_checkable
class Case(Protocol):
    """A case of a model: one part of a night."""

    @property
    def name(self) -> str:
        """Name of the case and of its part."""
        ...


@runtime_checkable
class Checkpoint(Protocol):
    """A checkpoint that a night probes."""

    @property
    def folder(self) -> Path:
        """Folder of the checkpoint."""
        ...

    @property
    def training(self) -> dict[str, Any] | None:
        """How the checkpoint was trained; None if its folder does not say."""
        ...

    def load(self) -> Any:
        """Return the model; an error names what is wrong with the checkpoint."""
        ...


@dataclass(frozen=True)
class Model:
    """Cases, reference and checkpoint of a subject, and the functions by which a night measures
    them. Only one subject has a model.

    Attributes:
        cases: All cases, in the order of the plan.
        reference: Chooses the reference, "live", "recorded" or "auto".
        open_checkpoint: Opens the checkpoint in a folder, or the committed one for None.
        with_checkpoint: Returns a case with the checkpoint of a folder in place of the committed
            one; cases of other weights unchanged.
        case_info: Returns the fields of a case that run.json holds.
        measure: Compares cases with the reference. Receives the number of finished cases before
            each case.
        probe: Probes a checkpoint, given it and its model.
        control: Plants the bugs that the comparison must find.
        unchecked: Context in which the model does not check traced values: such programs are not
            in JAX's compilation cache.
    """

    cases: Sequence[Any]
    reference: Callable[[str], Any]
    open_checkpoint: Callable[[Path | None], Checkpoint]
    with_checkpoint: Callable[[Any, Path], Any]
    case_info: Callable[[Any], CaseInfo]
    measure: Callable[[Sequence[Any], Any, Log, Callable[[int], None]], SuiteRun]
    probe: Callable[[Any, Any, Log], SuiteRun]
    control: Callable[[Any, Log], SuiteRun]
    unchecked: Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Tables:
    """Tables of a subject that run.json holds.

    Attributes:
        tolerances: Rows of the table of tolerances.
        known_differences: Records with `id`, `reason`, `bound` and `measured`.
    """

    tolerances: Sequence[Rule] = ()
    known_differences: Sequence[Any] = ()


@dataclass(frozen=True)
class Padding:
    """Notes about padding for the table of edges (comparisons); empty if padding explains nothing.

    Attributes:
        scopes: by edge, a text that says which positions it compares.
        sentence: why one edge fails while another passes, for people; "" if padding does not
            explain it.
    """

    scopes: dict[str, str] = field(default_factory=dict)
    sentence: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """A section of the page that one subject brings.

    Attributes:
        id: Id of the section, which links use.
        title: Title in the list of sections.
        template: File of the Jinja template, which calls the result of `data` "data".
        data: Returns the data of the section; None for a run without it.
    """

    id: str
    title: str
    template: Path
    data: Callable[[Run], dict[str, Any] | None]


@dataclass(frozen=True)
class Subject:
    """A program that nights measure. Importing the module of a record imports no JAX.

    Attributes:
        name: Name for people.
        parts: Parts of a night, except the cases of `model`, in the order of the plan.
        suites: Returns the functions that measure the parts.
        tables: Returns tolerances and known differences.
        suite: Value of `suite` in the measurements of the cases of `model`.
        model: Returns cases, reference and checkpoint with their functions; None for a subject
            without them.
        committed: Name of the model's case of the committed checkpoint.
        given: Name of the case that replaces it if a night is given a checkpoint.
        module: Top-level module of the live reference, whose content belongs to the measured code.
        against: What a test session compares the model with, for people.
        edges: Edges (comparisons) of the model: measurements of these are recognised without suite.
        former_suite: Returns the suite of a measurement of an older schema, which has no suite; ""
            if the subject did not measure it.
        section_of: Returns the id of the section of the page that shows a measurement of a case.
        commands: Returns the commands that explain a case, such as "parity explain".
        hint: Returns a sentence about the cause, given the measured and the failing edges of a
            case; "" without one.
        padding: Returns what padding explains, given measurements and failing tensors.
        section: Section of the page; None for a subject without one.
    """

    name: str
    parts: tuple[Part, ...]
    suites: Callable[[], Suites]
    tables: Callable[[], Tables] = Tables
    suite: str = ""
    model: Callable[[], Model] | None = None
    committed: str = ""
    given: str = ""
    module: str = ""
    against: str = ""
    edges: frozenset[str] = frozenset()
    former_suite: Callable[[Measurement], str] = lambda m: ""
    section_of: Callable[[Measurement], str] = lambda m: "records"
    commands: Callable[[str], tuple[str, ...]] = lambda case: ()
    hint: Callable[[Collection[str], Collection[str]], str] = lambda measured, broken: ""
    padding: Callable[[Iterable[Measurement], Sequence[Deviation]], Padding] = (
        lambda rows, tensors: Padding()
    )
    section: Section | None = None


_LAST = (PROBES_PART, CONTROLS_PART)
_SUBJECTS: list[Subject] = []


def register(subject: Subject) -> None:
    """Add a subject: nights measure it, and pages show it.

    Raises:
        ValueError: a registered subject has the name, a part, a suite or the section of this one,
            or both have a model; a part has no name in parentheses, or no suite of its own.
    """
    # A part with the name of a case, or with another part's suite, could hide that one's loss.
    names, suites = [part.name for part in subject.parts], _suites(subject)
    wrong = [name for name in names if not (name[:1] == "(" and name[-1:] == ")")]
    if wrong or len({*names}) < len(names) or len({*suites}) < len(suites) or "" in suites:
        raise ValueError(
            f"expected parts of {subject.name!r} with different names in parentheses, such as "
            f"(mesh), and a suite for each, received names {names} and suites {suites}"
        )
    for other in _SUBJECTS:
        both = {part.name for part in subject.parts} & {part.name for part in other.parts}
        both |= {*_suites(subject)} & {*_suites(other)}
        if subject.section and other.section and subject.section.id == other.section.id:
            both.add(f"section {subject.section.id}")
        if subject.name == other.name or both or (subject.model and other.model):
            what = ", ".join(sorted(both)) or ("model" if subject.model else "name")
            raise ValueError(
                f"expected a subject with name, parts and suites of its own, and one model in all, "
                f"but {subject.name!r} and {other.name!r} both have: {what}; rename one of them"
            )
    _SUBJECTS.append(subject)


def registered() -> tuple[Subject, ...]:
    """Return all subjects, in the order of their registration."""
    return tuple(_SUBJECTS)


def main() -> Subject:
    """Return the subject with a model."""
    return next(subject for subject in _SUBJECTS if subject.model)


def model() -> Model:
    """Return the `Model` of `main`."""
    made = main().model
    assert made is not None
    return made()


def parts() -> tuple[Part, ...]:
    """Return the parts of all subjects, except cases of the model, in the order of the plan.

    Probes and controls come last, since controls clear the compilation caches.
    """
    every = [part for subject in _SUBJECTS for part in subject.parts]
    return tuple(sorted(every, key=lambda part: part.name in _LAST and 1 + _LAST.index(part.name)))


def suite_of_part(name: str) -> str:
    """Return the suite of a part of a plan: that of the model for one of its cases."""
    known = {part.name: part.suite for part in parts()}
    # A part of a subject that is registered on another machine is no case of the model.
    return known.get(name, name[1:-1] if name.startswith("(") else main().suite)


def live_suites() -> frozenset[str]:
    """Return the suites that run the live reference; a night with recordings has none of them."""
    return frozenset(part.suite for part in parts() if part.live)


def measured() -> dict[str, Callable[[Reference, Log, Collection[str]], SuiteRun]]:
    """Return the functions that measure parts other than cases, probes and controls, by part.

    Raises:
        ValueError: a part has no function, or a function no part: it would never be measured.
    """
    return _by_part({s.name: s.suites().measure for s in _SUBJECTS}, "measure")


def names_by_part() -> dict[str, set[str]]:
    """Return the names that `--case` accepts besides cases of the model, by part of the plan.

    Raises:
        ValueError: a part has no names, or names have no part, or a name is that of a case or of
            another part: it would select only one of the two.
    """
    found = _by_part({s.name: s.suites().names for s in _SUBJECTS}, "names")
    counts = Counter(name for names in found.values() for name in names)
    counts.update(case.name for case in model().cases)
    if twice := sorted(name for name, times in counts.items() if times > 1):
        raise ValueError(
            f"expected each name of a case in one part alone, but several have {', '.join(twice)}: "
            "rename it in one subject"
        )
    return found


def tables() -> Tables:
    """Return the tolerances and known differences of all subjects.

    Raises:
        ValueError: two known differences have one id.
    """
    every = [subject.tables() for subject in _SUBJECTS]
    known = [one for each in every for one in each.known_differences]
    if twice := sorted(n for n, times in Counter(one.id for one in known).items() if times > 1):
        raise ValueError(
            f"expected known differences with different ids, received several of {', '.join(twice)}"
        )
    return Tables([row for each in every for row in each.tolerances], known)


def suites_of_known_differences() -> dict[str, tuple[str, ...]]:
    """Return the suites of the subject of each known difference, by its id."""
    return {
        one.id: _suites(subject)
        for subject in _SUBJECTS
        for one in subject.tables().known_differences
    }


def former_suite(m: Measurement) -> str:
    """Return the suite of a measurement of an older schema, which stored none."""
    return next(filter(None, (s.former_suite(m) for s in _SUBJECTS)), main().suite)


def _by_part(found: Mapping[str, Mapping[str, T]], what: str) -> dict[str, T]:
    """Return what the subjects have for their parts, in the order of the plan.

    Args:
        found: By name of the subject, and by part; probes and controls are in `Model` instead.
        what: Field of `Suites` that it is, for the error.

    Raises:
        ValueError: a subject lacks one of its parts, or has another's.
    """
    for subject in _SUBJECTS:
        own = {part.name for part in subject.parts if part.name not in _LAST}
        if wrong := sorted(own ^ found[subject.name].keys()):
            raise ValueError(
                f"expected `Suites.{what}` of {subject.name!r} for each of its parts and no other, "
                f"but these are in only one of the two: {', '.join(wrong)}"
            )
    merged = {name: one for each in found.values() for name, one in each.items()}
    return {part.name: merged[part.name] for part in parts() if part.name in merged}


def _suites(subject: Subject) -> tuple[str, ...]:
    own = (subject.suite,) if subject.model else ()
    return (*own, *(part.suite for part in subject.parts))
