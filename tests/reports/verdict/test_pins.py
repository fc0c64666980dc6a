"""A pinned baseline is whole or is not used: no number that is none may excuse a worse run."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from reports.provenance.host import FIELDS
from reports.registry.lookup import comparison_lines, judge, judge_stored
from reports.store.runs import Run, write_run
from reports.verdict import pins
from reports.verdict.decide import Word, decide
from reports.verdict.levels import STILL, levels, name_of, spread_of
from reports.verdict.vanished import FILE
from tests.reports.nights import measurement, run

SUITES = [{"name": "parity", "status": "ran", "planned": 1, "executed": 1, "reason": ""}]


def night(value: float = 1e-6, day: int = 1, **changes: Any) -> Run:
    made = {"id": f"2026-11-{day:02d}T21-30-00Z-0000000", "suites": SUITES}
    created = f"2026-11-{day:02d}T21:30:00+00:00"
    return run(measurement(value=value), **{"created": created, **made, **changes})


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a pinned baseline of this machine."""
    folder = tmp_path / "pinned"
    monkeypatch.setattr(pins, "FOLDER", folder)
    pin = pins.pin_of(night(), {}, "as measured", "2026-11-01")
    pins.write(pin, pins.file_of(pin))
    return pins.file_of(pin)


def edited(path: Path, **fields: Any) -> None:
    """Change fields of the one level; a digest would be noticed first."""
    document = json.loads(path.read_text(encoding="utf-8"))
    del document["digest"]
    [level] = document["groups"].values()
    level.update(fields)
    path.write_text(json.dumps(document), encoding="utf-8")


def verdict(path: Path, value: float) -> tuple[Word, str, list[str]]:
    """Word, sentence and lines of a run on the pin's machine, judged with what is stored."""
    judged = judge_stored(write_run(path.parents[1] / "runs", night(value, 2)))
    return judged.decision.word, judged.decision.sentence, comparison_lines(judged)


def test_a_pin_that_is_whole_finds_a_worse_run(path: Path) -> None:
    assert verdict(path, 1.6e-6)[0] is Word.REGRESSED
    # The first run there may be as bad: then its folder does not exist when it is judged.
    nowhere = path.parents[1] / "none" / "yet"
    assert judge(nowhere, night(1.6e-6, 2)).decision.word is Word.REGRESSED


WRONG = {
    "typical": [math.nan, math.inf, -math.inf, 0, 0.0, -1, "x", None, True, [1e-6], 10**400, 1e-5],
    "worst": [math.nan, math.inf, 0, -1, "x", None, 1e-7],
    "spread": [[math.nan, 0.1], [0.1, math.inf], [0.1], [0.1, 0.1, 0.1], [-0.1, 0.1], "ab", None],
    "tolerance": [math.nan, math.inf, -1.0, "x", None],
    "gates": [0, -1, 1.0, True, "1", None],
    "floored": [-1, 2, 0.0, None],
    "work": ["", None, 7],
    "another": [1],
}


@pytest.mark.parametrize(
    ("field", "value"), [(name, value) for name, values in WRONG.items() for value in values]
)
def test_a_level_that_is_none_makes_the_file_unusable(path: Path, field: str, value: Any) -> None:
    edited(path, **{field: value})
    loaded = pins.load("cpu")
    assert (loaded.pins, len(loaded.unusable)) == ((), 1)
    assert path.name in loaded.unusable[0]
    # Negative control: the same file with a value that a level may have.
    edited_back = {"typical": 1e-6, "worst": 2e-6, "spread": [0.1, 0.2], "tolerance": 4e-6}
    edited_back |= {"gates": 1, "floored": 0, "work": "abc"}
    if field in edited_back:
        pin = pins.pin_of(night(), {}, "as measured", "2026-11-01")
        pins.write(pin, path)
        edited(path, **{field: edited_back[field]})
        assert len(pins.load("cpu").pins) == 1


@pytest.mark.parametrize("field", ["typical", "worst", "gates", "work", "spread"])
def test_a_level_without_a_field_makes_the_file_unusable(path: Path, field: str) -> None:
    document = json.loads(path.read_text(encoding="utf-8"))
    del document["digest"]
    for level in document["groups"].values():
        del level[field]
    path.write_text(json.dumps(document), encoding="utf-8")
    assert pins.load("cpu").pins == ()


@pytest.mark.parametrize(
    "changes",
    [
        {"groups": {}},
        {"groups": []},
        {"run": ""},
        {"run": 7},
        {"reason": " "},
        {"pinned": ""},
        {"pinned": "yesterday"},
        {"commit": 7},
        {"environment": []},
        {"environment": {"host": {"vendor": 7}}},
        {"schema": 5},
        {"schema": None},
        {"another": 1},
    ],
    ids=str,
)
def test_a_head_that_is_not_whole_makes_the_file_unusable(path: Path, changes: Any) -> None:
    document = json.loads(path.read_text(encoding="utf-8"))
    del document["digest"]
    path.write_text(json.dumps(document), encoding="utf-8")
    assert len(pins.load("cpu").pins) == 1
    path.write_text(json.dumps(document | changes), encoding="utf-8")
    assert (pins.load("cpu").pins, len(pins.load("cpu").unusable)) == ((), 1)


def test_a_file_that_is_not_used_is_told_with_the_reason_and_what_to_do(path: Path) -> None:
    document = json.loads(path.read_text(encoding="utf-8"))
    del document["digest"], document["commit"]
    path.write_text(json.dumps(document), encoding="utf-8")
    [told] = pins.load("cpu").unusable
    assert told == (
        f"{path.name} is not used: expected a pinned baseline of schema {pins.SCHEMA} as `pin` "
        "writes it, but reading it gave KeyError('commit'); restore it with git, or pin a run again"
    )


@pytest.mark.parametrize("group", ["", "a | b | logits", "a | b | nothing | rel_l2", " | | | "])
def test_a_group_of_another_form_makes_the_file_unusable(path: Path, group: str) -> None:
    text = path.read_text(encoding="utf-8")
    document = json.loads(text)
    del document["digest"]
    [level] = document["groups"].values()
    document["groups"] = {group: level}
    path.write_text(json.dumps(document), encoding="utf-8")
    assert pins.load("cpu").pins == ()


def test_any_edit_by_hand_is_noticed_also_one_that_is_plausible(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for old, new in (("1e-06", "1.5e-06"), ("as measured", "as wished"), ('"2"', '"3"')):
        path.write_text(text.replace(old, new), encoding="utf-8")
        if text != path.read_text(encoding="utf-8"):
            [line] = pins.load("cpu").unusable
            assert "does not fit its digest" in line
    # A line that is there twice: JSON would take the last of them.
    line = next(line for line in text.splitlines() if '"spread"' in line)
    path.write_text(text.replace(line, f"{line},\n{line}"), encoding="utf-8")
    assert "twice" in pins.load("cpu").unusable[0]
    path.write_text(text, encoding="utf-8")
    assert pins.load("cpu").unusable == ()


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _loop(path: Path) -> None:
    path.symlink_to(path)


def _deep(path: Path) -> None:
    path.write_text("[" * 200_000, encoding="utf-8")


def _large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(pins.LARGEST + 1)


@pytest.mark.parametrize(
    "damage",
    [
        _pipe,
        _loop,
        _deep,
        _large,
        Path.mkdir,
        lambda path: path.write_bytes(b"\xff\xfe\x00"),
        lambda path: path.write_text("null", encoding="utf-8"),
        lambda path: path.write_text("", encoding="utf-8"),
    ],
    ids=["pipe", "loop", "deep", "large", "folder", "no text", "null", "empty"],
)
def test_a_file_that_cannot_be_read_costs_only_itself(path: Path, damage: Any) -> None:
    healthy = path.with_name("cpu-other.json")
    path.rename(healthy)
    damage(path)
    loaded = pins.load("cpu")
    assert (len(loaded.pins), len(loaded.unusable)) == (1, 1)
    assert verdict(path, 1.6e-6)[0] is Word.REGRESSED
    # Nothing that is stored may be pruned because a file is damaged.
    assert night().id in pins.pinned_ids()


def test_the_verdict_says_that_a_pin_was_not_used(path: Path) -> None:
    edited(path, typical=math.nan)
    word, sentence, lines = verdict(path, 1.6e-6)
    assert "better" not in sentence
    assert word is Word.PASS and f"1 pinned baseline was not used ({path.name})." in sentence
    assert any(line.startswith(f"{path.name} is not used: expected") for line in lines)


def test_a_damaged_pin_still_protects_the_run_it_names(path: Path) -> None:
    edited(path, typical=None)
    assert pins.load("cpu").pins == ()
    assert pins.pinned_ids() == {night().id}


def test_a_pin_that_is_written_in_another_style_protects_its_run(path: Path) -> None:
    """Spaces before colons and escaped characters are JSON too."""
    document = json.loads(path.read_text(encoding="utf-8"))
    text = json.dumps(document, separators=(" , ", " : "))
    text = text.replace(night().id, "\\u0032" + night().id[1:])
    path.write_text(text, encoding="utf-8")
    assert len(pins.load("cpu").pins) == 1
    assert pins.pinned_ids() == {night().id}


def test_the_newest_pin_is_the_one_that_was_pinned_last_whatever_run_it_names(path: Path) -> None:
    path.unlink()
    dates = {"a-run": "2026-11-03"} | dict.fromkeys(("c-run", "e-run", "b-run", "d-run"), PINNED)
    for turn, (name, pinned) in enumerate(dates.items()):
        # A machine each: a pin takes the place of the one of its own machine.
        made = pins.pin_of(night(id=name, host=dict.fromkeys(FIELDS, str(turn))), {}, "as", pinned)
        pins.write(made, pins.file_of(made))
    # Of one day the later run, by its name.
    found = [pin.run for pin in pins.load("cpu").pins]
    assert found == ["a-run", "e-run", "d-run", "c-run", "b-run"]


PINNED = "2026-11-02"


def test_pins_of_an_unknown_device_are_those_of_runs_of_an_unknown_device(path: Path) -> None:
    for name, device in (("unknown", {}), ("gpu", {"kind": "cuda"})):
        made = pins.pin_of(night(id=name, device=device), {}, "as measured", "2026-11-01")
        pins.write(made, pins.file_of(made))
    for device, run_of in ((None, "unknown"), ("cuda", "gpu"), ("cpu", night().id)):
        assert [pin.run for pin in pins.load(device).pins] == [run_of]


def test_a_device_that_a_run_claims_is_no_pattern(path: Path) -> None:
    for device in ("*", "/etc", "..", "[c]pu"):
        assert pins.load(device) == pins.Pins()


@pytest.mark.parametrize("spread", [[math.nan, 0.1], [0.1, math.inf], [0.1], None, "ab", 7])
def test_a_spread_of_a_run_that_is_none_explains_nothing(spread: Any) -> None:
    assert spread_of(spread) == STILL
    row = measurement()
    [group] = levels([row], {})
    assert levels([row], {}, {name_of(group): [math.nan, 0.1]})[group].spread == STILL
    assert levels([row], {}, {name_of(group): [0.1, 0.2]})[group].spread == (0.1, 0.2)


def test_levels_that_are_decades_apart_are_judged(path: Path) -> None:
    """The ratio underflows to 0, which has no logarithm."""
    edited(path, typical=1e305, worst=1e305)
    [pin] = pins.load("cpu").pins
    assert decide(night(1e-22), None, {}, [pin]).word is Word.PASS


def test_a_folder_of_ports_is_never_hidden_and_an_old_one_may_be_long(tmp_path: Path) -> None:
    for names in ([".a"], ["..."], [".a", "b"]):
        assert not pins._folder_name(names).startswith("."), names
    longest = "a " * (pins.NAME_BYTES // 2) + "b"
    for name in ("a b" * 42, longest):
        manifest = night(kind="port", suites=[{"name": name, "status": "ran"}]).manifest
        old = pins.old_home(tmp_path / "runs", manifest)
        assert old == tmp_path / "pinned" / name.replace(" ", "-")
        assert pins.LONGEST_NAME < len(old.name) <= pins.NAME_BYTES
    # No folder can have a longer name.
    manifest = night(kind="port", suites=[{"name": f"{longest}b", "status": "ran"}]).manifest
    assert pins.old_home(tmp_path / "runs", manifest) is None


def test_a_short_name_of_ports_is_kept_and_has_no_old_folder(tmp_path: Path) -> None:
    longest = "a" * pins.LONGEST_NAME
    assert pins._folder_name([longest]) == longest
    assert pins._folder_name([f"{longest}a"]).startswith(f"{longest}~")
    manifest = night(kind="port", suites=[{"name": "a-b", "status": "ran"}]).manifest
    assert pins.old_home(tmp_path / "runs", manifest) is None


def test_a_pin_of_another_port_in_a_port_s_own_folder_is_not_its(tmp_path: Path) -> None:
    """Earlier versions pinned "a b" where "a-b" is pinned."""
    made = {
        name: run(measurement(case=name), kind="port", suites=[{"name": name, "status": "ran"}])
        for name in ("a b", "a-b")
    }
    root, pin = tmp_path / "runs", pins.pin_of(made["a b"], {}, "why", "2026-11-01")
    pins.write(pin, pins.file_of(pin, pins.home(root, made["a-b"].manifest)))
    assert pins.pins_of(root, made["a-b"].manifest).pins == ()
    assert [it.run for it in pins.pins_of(root, made["a b"].manifest).pins] == [pin.run]


def test_files_that_are_not_used_are_told_in_the_order_of_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"cpu-{name}.json" for name in "bca"]
    for name in names:
        (tmp_path / name).write_text("{", encoding="utf-8")
    # A folder has no order.
    monkeypatch.setattr(Path, "glob", lambda self, _: iter([self / name for name in names]))
    assert [why.partition(" ")[0] for why in pins.load("cpu", tmp_path).unusable] == sorted(names)


def test_a_file_that_is_named_by_the_device_alone_is_read(tmp_path: Path) -> None:
    for name in ("cpu.json", "cpu2.json"):
        (tmp_path / name).write_text("{", encoding="utf-8")
    [why] = pins.load("cpu", tmp_path).unusable
    assert why.startswith("cpu.json is not used")


def test_a_pin_of_an_older_schema_than_3_is_unusable(path: Path) -> None:
    document = json.loads(path.read_text(encoding="utf-8"))
    del document["digest"]
    document["blessed"] = document.pop("pinned")
    for schema, usable in ((3, True), (2, False)):
        path.write_text(json.dumps(document | {"schema": schema}), encoding="utf-8")
        assert bool(pins.load("cpu").pins) is usable


@pytest.mark.parametrize("ports", [True, False])
def test_retired_work_is_read_where_retire_writes_it(path: Path, ports: bool) -> None:
    """All ports share one folder; their pins have one for each set of ports."""
    root, kind = path.parents[1] / "runs", {"kind": "port"} if ports else {}
    made = night(**kind)
    home = pins.retired_home(root, made.manifest)
    assert (home == pins.home(root, made.manifest)) is not ports
    assert judge(root, made).unusable_pins == ()
    home.mkdir(parents=True, exist_ok=True)
    (home / FILE).write_text("damaged", encoding="utf-8")
    [told] = judge(root, made).unusable_pins
    assert f"{FILE} is not used" in told
