"""A pinned file without a digest, as earlier versions wrote it, is held to each of its fields."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reports.provenance.host import FIELDS
from reports.registry.lookup import is_pinned
from reports.store.manifest import Device, Environment, ReferenceInfo
from reports.verdict import pins
from reports.verdict.decide import decide
from reports.verdict.history import Past
from reports.verdict.levels import name_of
from reports.verdict.pins import LARGEST, SCHEMA, file_of, load, pin_of, pinned_ids, read, write
from tests.reports.nights import earlier, measurement, run


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A pinned file whose fields may be changed: it has no digest that they must fit."""
    pin = pin_of(run(measurement()), {}, "as measured", "2026-11-01")
    path = file_of(pin, tmp_path)
    write(pin, path)
    change(path, digest=None)
    assert read(path) == pin
    return path


def change(path: Path, **changes: Any) -> None:
    document = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps(document), encoding="utf-8")


GROUP = "baseline | jax32:oracle | logits | rel_l2"
LEVEL = {
    "work": "w",
    "gates": 1,
    "typical": 1.0,
    "worst": 1.0,
    "spread": [0.0, 0.0],
    "tolerance": 0.0,
    "floored": 0,
}


@pytest.mark.parametrize(
    "changes",
    [
        *({name: value} for name in ("run", "pinned", "reason") for value in ("", "  ", 7, None)),
        {"pinned": "yesterday"},
        {"commit": 7},
        *({"commit": value} for value in (["a"], [], 0, False)),
        {"digest": ""},
        {"schema": SCHEMA + 1},
        {"schema": SCHEMA - 2},
        {"more": 1},
        {"groups": {}},
        {"groups": []},
        {"environment": {"host": {"model": 7}}},
        {"environment": {"flags": {"XLA_FLAGS": 1}}},
        {"environment": {"versions": {"jax": None}}},
        {"environment": {"threads": [2]}},
        {"groups": {"a | b | logits": LEVEL}},
        {"groups": {"a | b | other | c": LEVEL}},
        {"groups": {"a |  | logits | c": LEVEL}},
        {"groups": {" | b | logits | c": LEVEL}},
        *({"groups": {GROUP: LEVEL | wrong}} for wrong in ({"gates": 0}, {"worst": "1"}, {"x": 1})),
        {"groups": {GROUP: {n: v for n, v in LEVEL.items() if n != "work"}}},
    ],
    ids=str,
)  # fmt: skip
def test_a_field_that_is_none_costs_the_file_and_protects_its_run(
    path: Path, changes: dict[str, Any]
) -> None:
    change(path, **changes)
    assert read(path) is None
    found = load("cpu", path.parent)
    assert found.pins == () and len(found.unusable) == 1
    assert found.unusable[0].startswith(f"{path.name} is not used: expected a pinned baseline")
    for field in changes.keys() & {"run", "reason", "commit"}:
        assert f"{field} is {changes[field]!r}: expected a text" in found.unusable[0]
    name = json.loads(path.read_text(encoding="utf-8"))["run"]
    named = {name} if isinstance(name, str) and name else set()
    assert pinned_ids(path.parent) == named


def test_what_older_versions_wrote_is_used(path: Path) -> None:
    before = read(path)
    for good in ({"commit": None}, {"groups": {GROUP: LEVEL}}, {"groups": {f"a | {GROUP}": LEVEL}}):
        change(path, **good)
        assert read(path) is not None, good
    document = json.loads(path.read_text(encoding="utf-8"))
    document |= {"schema": 3, "blessed": document.pop("pinned")}
    path.write_text(json.dumps(document), encoding="utf-8")
    old = read(path)
    assert before is not None and old is not None and old.pinned == before.pinned
    [group] = old.groups
    assert group == ("a | baseline", "jax32:oracle", "logits", "rel_l2")
    assert pinned_ids(path.parent) == {old.run}


def test_levels_are_written_in_the_order_of_their_names(tmp_path: Path) -> None:
    """A file that is pinned again differs from the last one where a level moved, and only there."""
    night = run(*(measurement(case=case) for case in ("stream", "plain", "large")))
    pin = pin_of(night, {}, "as measured", "2026-11-01")
    texts = []
    for groups in (pin.groups, dict(reversed(pin.groups.items()))):
        write(replace(pin, groups=groups), tmp_path / "pin.json")
        texts.append((tmp_path / "pin.json").read_text(encoding="utf-8"))
    assert texts[0] == texts[1]
    names = list(json.loads(texts[0])["groups"])
    assert len(names) == 3 and names == sorted(names)


def test_a_pinned_file_is_text_to_review_with_a_line_for_each_level(tmp_path: Path) -> None:
    """What does not decide whether levels may be compared is no part of it."""
    reference = ReferenceInfo("live", "c0ffee", {"torch": "2"}, "AVX2", "a sentence", 3)
    host = {"vendor": "known"}
    environment = Environment(Device("cpu", "x"), host, 2, {"F": ""}, {"jax": "1"}, reference)
    rows = [
        measurement(case=case, value=value, identity=case)
        for case, value in (("b", 2e-6), ("a", 1e-6))
    ]
    night = run(*rows, spreads={name_of(("b", *GROUP.split(" | ")[1:])): [0.25, 0.5]})
    night = replace(night, manifest=replace(night.manifest, environment=environment))
    path = tmp_path / "new" / "folder" / "cpu-x.json"
    write(pin := pin_of(night, {}, "größer, weil", "2026-11-01"), path)
    text = path.read_text(encoding="utf-8")
    digest = json.loads(text)["digest"]
    assert len(digest) == 16
    rest = "jax32:oracle | logits | rel_l2"
    works = [pin.groups[case, "jax32:oracle", "logits", "rel_l2"].work for case in "ab"]
    level = (
        '"gates": 1, "typical": {0}, "worst": {0}, "spread": {1}, "tolerance": 4e-06, "floored": 0'
    )
    assert (
        text
        == f"""{{
 "schema": 4,
 "run": "2026-11-20T21-30-00Z-1a2b3c4",
 "commit": "1a2b3c4d5e6f",
 "pinned": "2026-11-01",
 "reason": "größer, weil",
 "environment": {{
  "device": {{
   "kind": "cpu",
   "name": "x"
  }},
  "host": {{
   "vendor": "known"
  }},
  "threads": 2,
  "flags": {{
   "F": ""
  }},
  "versions": {{
   "jax": "1"
  }},
  "reference": {{
   "kind": "live",
   "commit": "c0ffee",
   "versions": {{
    "torch": "2"
   }},
   "capability": "AVX2"
  }}
 }},
 "digest": "{digest}",
 "groups": {{
  "a | {rest}": {{"work": "{works[0]}", {level.format("1e-06", "[0.0, 0.0]")}}},
  "b | {rest}": {{"work": "{works[1]}", {level.format("2e-06", "[0.25, 0.5]")}}}
 }}
}}
"""
    )
    assert works[0] != works[1] and list(path.parent.iterdir()) == [path]


def test_a_name_that_is_there_twice_and_a_file_too_large_are_not_used(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace('"reason"', '"run": "x", "reason"', 1), encoding="utf-8")
    assert read(path) is None
    path.write_text(text + " " * (LARGEST - len(text.encode())), encoding="utf-8")
    assert read(path) is not None
    path.write_text(text + " " * (LARGEST - len(text.encode()) + 1), encoding="utf-8")
    assert read(path) is None and pinned_ids(path.parent) == set()
    # Nor behind a link, which is itself small.
    target = path.rename(path.parent / "kept-elsewhere")
    path.symlink_to(target)
    assert read(path) is None
    target.write_text(text, encoding="utf-8")
    assert read(path) is not None


def test_pins_are_those_of_a_class_of_device_the_newest_first(tmp_path: Path) -> None:
    for name, date, device in (
        ("a", "2026-11-02", "cpu"),
        ("c", "2026-11-01", "cpu"),
        ("b", "2026-11-02", "cpu"),
        ("d", "2026-11-03", "cuda"),
    ):
        pin = pin_of(run(measurement(), id=name, device={"kind": device}), {}, "why", date)
        write(pin, tmp_path / f"{device}-{name}.json")
    (tmp_path / "cpux.json").write_text("{", encoding="utf-8")
    assert [pin.run for pin in load("cpu", tmp_path).pins] == ["b", "a", "c"]
    assert [pin.run for pin in load("cuda", tmp_path).pins] == ["d"]
    assert load("cpu", tmp_path).unusable == () and load(None, tmp_path).pins == ()
    assert pinned_ids(tmp_path) == {"a", "b", "c", "d"}


def test_a_file_with_a_conflict_protects_the_runs_of_both_sides(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    ours = next(part for part in text.split(", ") if part.startswith('"run"'))
    both = f'\n<<<<<<< ours\n{ours},\n=======\n"run": "theirs",\n>>>>>>> theirs\n"x": 1'
    path.write_text(text.replace(ours, both), encoding="utf-8")
    assert read(path) is None and pinned_ids(path.parent) == {run().id, "theirs"}


def test_a_file_that_cannot_be_read_takes_the_protection_of_no_other_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of them is read first."""
    for name in ("a", "b"):
        pin = pin_of(run(measurement(), id=name), {}, "why", "2026-11-01")
        write(pin, tmp_path / f"cpu-{name}.json")
    read_text, refused = pins._text, []

    def text(path: Path) -> str:
        refused[:] = refused or [path]
        if path in refused:
            raise PermissionError
        return read_text(path)

    monkeypatch.setattr(pins, "_text", text)
    found = pinned_ids(tmp_path)
    assert found == {"a", "b"} - {refused[0].stem.removeprefix("cpu-")} != set()


def test_the_digest_is_of_every_field(tmp_path: Path) -> None:
    pin = pin_of(run(measurement()), {}, "as measured", "2026-11-01")
    path = tmp_path / "cpu-x.json"
    write(pin, path)
    assert read(path) == pin
    document = json.loads(path.read_text(encoding="utf-8"))
    for name in document.keys() - {"schema", "digest"}:
        other = {"pinned": "2026-11-02", "groups": {GROUP: LEVEL}, "environment": {}}
        change(path, **{name: other.get(name, "other")})
        assert read(path) is None, name
        path.write_text(json.dumps(document), encoding="utf-8")
    assert pins.read(path) == pin


@pytest.mark.parametrize(
    ("before", "comparable", "rescaled"),
    [(None, 1, 0), (4e-4, 1, 0), (8e-4, 0, 1)],
    ids=["no baseline", "the same", "others"],
)
def test_a_pin_without_tolerances_had_those_of_the_baseline(
    before: float | None, comparable: int, rescaled: int
) -> None:
    """Of a level that follows its tolerances, because a gate is far below them."""
    night = run(measurement(tolerance=4e-4))
    then = None if before is None else earlier(measurement(tolerance=before))
    pin = pin_of(night, {}, "why", "2026-11-01")
    groups = {g: replace(it, tolerance=0.0, floored=0) for g, it in pin.groups.items()}
    [found] = decide(night, then, {}, [replace(pin, groups=groups)]).comparisons
    assert (found.comparable, len(found.rescaled)) == (comparable, rescaled)
    if rescaled:
        assert (found.rescaled[0].before, found.rescaled[0].now) == (before, 4e-4)


@pytest.mark.parametrize(("pinned", "comparable"), [(4e-4, 1), (8e-4, 0)])
def test_a_pin_with_tolerances_keeps_them_whatever_the_baseline_had(
    pinned: float, comparable: int
) -> None:
    """The baseline has the other one of the two."""
    before = {4e-4: 8e-4, 8e-4: 4e-4}[pinned]
    night, then = run(measurement(tolerance=4e-4)), earlier(measurement(tolerance=before))
    pin = pin_of(run(measurement(tolerance=pinned)), {}, "why", "2026-11-01")
    [found] = decide(night, then, {}, [pin]).comparisons
    assert found.comparable == comparable
    changed = [(it.before, it.now) for it in found.rescaled]
    assert changed == [(pinned, 4e-4)] * (1 - comparable)


def test_no_two_ports_share_a_folder_of_pins(tmp_path: Path) -> None:
    """Nor does a name leave the folder, or make a path that a file system does not take."""
    ports = ("é", "ü", "..", "../x", ".", "n" * 300, "n" * 299 + "m", "a+b", "-rf", "日本")
    ports += ("a b", "a-b", "a/b", "a//b", "a:b", "a~b", "a(b)", "a.b", "a_b")
    homes = [
        pins.home(tmp_path / "runs", run(kind="port", suites=[{"name": name}]).manifest)
        for name in ports
    ]
    # Two ports whose names are those of two others, read as one.
    for length in (150, 160):
        suites = [{"name": "n" * length}, {"name": "n" * (350 - length)}]
        homes.append(pins.home(tmp_path / "runs", run(kind="port", suites=suites).manifest))
    assert len({*homes}) == len(homes)
    for home in homes:
        assert home.resolve().parent == tmp_path / pins.PORTS_FOLDER
        home.mkdir(parents=True)


def test_pins_lie_where_the_code_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of ports beside their runs; of runs on shared storage in the current folder."""
    here, root = tmp_path / "here", tmp_path / "there" / "runs"
    here.mkdir()
    root.mkdir(parents=True)
    monkeypatch.chdir(here)
    suites = [{"name": name} for name in ("b//c", "a  d", "a")]
    port = run(kind="port", suites=suites).manifest
    tests = run(kind="pytest", ports=[{"title": "p"}], reference={"kind": "torch"}).manifest
    # Through a link they are the same runs.
    (tmp_path / "link").symlink_to(root)
    for folder in (root.parent, here):
        assert pins.beside(root) == pins.beside(root / ".." / "runs") == folder
        assert pins.beside(tmp_path / "link") == folder
        assert pins.home(root, port).name.startswith("a+a-d+b-c~")
        assert pins.home(root, port).parent == folder / "pinned"
        assert pins.old_home(root, port) == folder / "pinned" / "a+a-d+b-c"
        for unusable in ("..", ".", "x" * 300):
            manifest = run(kind="port", suites=[{"name": unusable}]).manifest
            assert pins.old_home(root, manifest) is None
            assert pins.home(root, manifest).parent == folder / "pinned"
        assert pins.home(root, tests) == folder / "pinned" / "(pytest)"
        assert pins.home(root, run().manifest) == pins.FOLDER
        (root / ".shared").write_text("s3://bucket/runs", encoding="utf-8")


def test_a_pin_of_a_port_has_a_case_of_its_name(tmp_path: Path) -> None:
    """Another port whose name begins alike is another one."""
    port = run(kind="port", suites=[{"name": "mlp"}, {"name": "gru"}]).manifest
    for cases, own in (
        (["mlp"], True),
        (["gru/second"], True),
        (["other", "mlp/second"], True),
        (["mlp2", "mlp 2", "my mlp"], False),
    ):
        rows = [measurement(case=case, quantity=str(i)) for i, case in enumerate(cases)]
        assert pins.is_of(pin_of(run(*rows), {}, "why", "2026-11-01"), port) is own


def test_what_earlier_versions_pinned_for_a_port_is_read_and_protected(tmp_path: Path) -> None:
    """One folder was that of "a b" and "a-b"; a damaged file of either folder is named."""
    root = tmp_path / "runs"
    port = run(kind="port", suites=[{"name": "a b"}]).manifest
    places = pins.home(root, port), pins.old_home(root, port)
    for date, place in enumerate(places, 1):
        assert place is not None
        pin = pin_of(run(measurement(case="a b"), id=f"run {date}"), {}, "why", f"2026-11-0{date}")
        write(pin, place / "cpu-x.json")
        other = pin_of(run(measurement(case="a-b"), id=f"other {date}"), {}, "why", "2026-11-09")
        write(other, place / "cpu-y.json")
        (place / "cpu-z.json").write_text('{"run": "damaged"}', encoding="utf-8")
    found = pins.pins_of(root, port)
    assert [pin.run for pin in found.pins] == ["run 2", "run 1"] and len(found.unusable) == 2
    for name in ("", ".", "..", "..."):
        nameless = run(kind="port", suites=[{"name": name}]).manifest
        assert pins.old_home(root, nameless) is None
    names = {f"{which} {date}" for which in ("run", "other") for date in (1, 2)}
    assert pins.ids_of(root, port) == {*names, "damaged"}
    # A run that one of them names is kept by `prune`.
    for name in (*names, "damaged"):
        assert is_pinned(root, replace(port, id=name)), name
    assert not is_pinned(root, replace(port, id="run 3"))
    # A night of Megalodon is about all of its cases.
    assert pins.retired_home(root, port) == tmp_path / pins.PORTS_FOLDER
    assert pins.retired_home(root, run().manifest) == pins.FOLDER
    tests = run(kind="pytest", ports=[{"title": "p"}], reference={"kind": "torch"}).manifest
    assert pins.retired_home(root, tests) == pins.FOLDER


def test_the_largest_recent_value_is_pinned_without_what_identifies_nothing() -> None:
    row = measurement(deterministic=False)
    values = (3e-6, 2e-6, 2e-6)
    pin = pin_of(run(row), {row.key: Past(values, True)}, "why", "2026-11-01")
    assert [level.worst for level in pin.groups.values()] == [max(values)]
    assert pin.environment.reference.detail == "" != run().manifest.environment.reference.detail


def test_a_file_is_that_of_a_machine_and_kind_of_reference(tmp_path: Path) -> None:
    def name(**changes: Any) -> str:
        return file_of(
            pin_of(run(measurement(), **changes), {}, "why", "2026-11-01"), tmp_path
        ).name

    assert name() == name(versions={"jax": "another"}) != name(host=dict.fromkeys(FIELDS, "other"))
    assert name().startswith("cpu-") and name().endswith("-recorded.json")
    assert name(reference={"kind": None}).endswith("-absent.json")
    assert name(host={}) == "cpu-unknown-recorded.json"
    assert name(device={"kind": None}).startswith("unknown-")
