"""Values of runs, verdicts and nights are not changed after they were made."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Iterator

import pytest

from reports import nightly, registry, store, suite_run, verdict
from reports.registry.gate_changes import _Followed
from reports.store.gathered import Gathered
from reports.store.manifest import CheckpointInfo, Device, Environment, ReferenceInfo
from reports.store.schema import RunKind
from reports.suite_run import SuiteRun
from tests.reports.nights import manifest, measurement, run

COLLECTING = {SuiteRun, Gathered, _Followed}
"""Those that gather something while they are used."""


def dataclasses_of_reports() -> Iterator[type]:
    names = [
        module.name
        for package in (nightly, registry, store, verdict)
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
    ]
    for name in (*names, suite_run.__name__):
        yield from (
            each
            for each in vars(importlib.import_module(name)).values()
            if isinstance(each, type) and dataclasses.is_dataclass(each) and each.__module__ == name
        )


def test_only_what_collects_may_be_changed() -> None:
    """A run that one part of a page changed would be another run for the next one."""
    found = set(dataclasses_of_reports())
    assert len(found) > 40
    changed = {each for each in found if not each.__dataclass_params__.frozen}  # pyright: ignore
    assert changed == COLLECTING
    with pytest.raises(dataclasses.FrozenInstanceError):
        run(measurement()).manifest.verdict = "PASS"  # pyright: ignore[reportAttributeAccessIssue]


SAYING = {
    ("Change", "stage"): -1,
    ("GateChanges", "known"): True,
    ("Level", "spread"): (0.0, 0.0),
    ("Manifest", "kind"): RunKind.NIGHTLY,
    ("Manifest", "environment"): Environment(),
    ("Environment", "device"): Device(),
    ("Environment", "reference"): ReferenceInfo(),
    ("Options", "reference"): "auto",
    ("PartInfo", "attempts"): 1,
    ("SuiteResult", "status"): "failed",
}
"""Defaults that say something: what is not known to have run has failed."""

NOT_COUNTED = ("environment", "breaches", "earlier")
"""Fields whose default is a record, which has no truth value; the record's fields are tested."""


def test_what_is_not_given_is_nothing() -> None:
    """0, False, no text and no members: a count or a flag that nobody set claims nothing."""
    found = {}
    for each in dataclasses_of_reports():
        for field in dataclasses.fields(each):
            default = field.default
            if field.default_factory is not dataclasses.MISSING and each not in COLLECTING:
                assert not field.default_factory() or field.name in NOT_COUNTED
            elif default is not dataclasses.MISSING and default:
                found[each.__name__, field.name] = default
    assert found == SAYING
    suite = SuiteRun("s", 1)
    assert (suite.executed, suite.reason, suite.seconds) == (0, "", 0.0)
    assert not (suite.times or suite.contract or suite.measurements or suite.findings)
    assert not (suite.explanations or suite.responses or suite.shown or list(suite.tensors))


def test_where_a_checkpoint_lies_and_how_a_file_hashes_make_no_other_run() -> None:
    """Shards of one night have their own paths, and a run is the same before it is stored."""
    one, other = CheckpointInfo("a", folder="here"), CheckpointInfo("a", folder="there")
    assert one == other != dataclasses.replace(one, content="x")
    night = manifest()
    assert night == dataclasses.replace(night, files={"a": "b"})
