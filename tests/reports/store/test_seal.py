"""A run.json that was edited after it was stored is damaged, whatever was edited in it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from reports.store.reader import checksum
from reports.store.runs import StoreError, read_run, write_run
from reports.store.schema import SCHEMA
from reports.store.seal import FIRST_SEALED, check_seal, sealed
from tests.reports.nights import measurement, run

EDITS = {
    "a fault is taken out": lambda d: d.update(fault=None),
    "nothing planned": lambda d: d["suites"][0].update(planned=0, executed=0),
    "a line of the contract": lambda d: d["contract"].pop(),
    "another commit": lambda d: d.update(commit="0" * 40),
    "one letter of an id": lambda d: d.update(id=d["id"][:-1]),
    "no seal": lambda d: d.pop("seal"),
    "an empty seal": lambda d: d.update(seal=""),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_an_edit_of_run_json_is_refused(tmp_path: Path, edit) -> None:
    folder = write_run(tmp_path, run(measurement(), fault="conjugate"))
    document = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    edit(document)
    (folder / "run.json").write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(StoreError, match="does not fit its seal: it was edited or damaged"):
        read_run(folder)


def test_white_space_and_order_are_no_edit(tmp_path: Path) -> None:
    folder = write_run(tmp_path, run(measurement()))
    document = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    turned = dict(reversed(document.items()))
    (folder / "run.json").write_text(json.dumps(turned, indent=7), encoding="utf-8")
    assert read_run(folder) == run(measurement())


def test_a_seal_covers_every_value_and_not_itself() -> None:
    once = sealed({"schema": SCHEMA, "id": "a"})
    assert sealed(once) == once
    assert sealed({"schema": SCHEMA, "id": "b"})["seal"] != once["seal"]
    assert sealed({"schema": SCHEMA, "id": "a", "b": 0})["seal"] != once["seal"]


@pytest.mark.parametrize("name", ["seal", "files", "contract"])
def test_no_older_run_has_what_the_seal_came_with(name: str) -> None:
    """Whoever writes an older schema into run.json leaves one of them out at most."""
    path = Path("run.json")
    check_seal({"schema": FIRST_SEALED - 1, "id": "a"}, path)
    with pytest.raises(StoreError, match=f"says schema 4 and has {name}, which"):
        check_seal({"schema": FIRST_SEALED - 1, "id": "a", name: None}, path)


def test_a_checksum_is_that_of_every_byte() -> None:
    contents = [b"", b"a", b"a\n", b"a\n\n", b"\na", b" a", b"a\r\n", b"a\0"]
    found = [checksum(content) for content in contents]
    assert found == [hashlib.sha256(content).hexdigest() for content in contents]
    assert len({*found}) == len(contents)
