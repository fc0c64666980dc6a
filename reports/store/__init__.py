"""The run folder: schema and migrations, atomic writing, and queries over many runs."""

from reports.store.manifest import Environment, Manifest, SuiteResult, read_manifest
from reports.store.query import Table
from reports.store.runs import Run, RunInfo, check_writable, list_runs, read_run, write_run
from reports.store.schema import SCHEMA, RunKind, StoreError
from reports.store.timings import Timing

__all__ = [
    "SCHEMA",
    "Environment",
    "Manifest",
    "Run",
    "RunInfo",
    "RunKind",
    "StoreError",
    "SuiteResult",
    "Table",
    "Timing",
    "check_writable",
    "list_runs",
    "read_manifest",
    "read_run",
    "write_run",
]
