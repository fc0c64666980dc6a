"""The training drill: what storage does to real training, and that it says so in words."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache

import pytest

from stability.core.documents import DRILL, read, write
from stability.storage.remedies import ENOUGH
from stability.storage.survival import FROZEN_SHARE
from tests.helpers import TINY
from tools.experiments.drill import VARIANTS, DrillResult, Plan, run
from tools.experiments.drill_report import conclusion, document

BYTES = replace(TINY, vocab_size=256, num_layers=1)
PLAN = Plan(steps=16, batch_size=2, length=16, every=4, held_out=2)
BY_NAME = {v.name: v for v in VARIANTS}


@cache
def outcomes() -> dict[str, DrillResult]:
    names = ("float32", "blanket bfloat16", "Kahan", "zero-centred")
    return dict(zip(names, run(PLAN, [BY_NAME[n] for n in names], BYTES), strict=True))


@pytest.mark.sweep
def test_blanket_bfloat16_freezes_the_norms_and_float32_does_not() -> None:
    control, blanket = outcomes()["float32"], outcomes()["blanket bfloat16"]
    assert control.norms.frozen == 0.0
    assert control.norm_drift[-1][1] > 0.0
    assert blanket.norms.frozen == 1.0
    assert blanket.norm_drift[-1][1] == 0.0
    assert blanket.whole.fidelity < control.whole.fidelity


def test_compensation_brings_the_updates_and_centring_those_of_the_norms_only() -> None:
    kahan, centred = outcomes()["Kahan"], outcomes()["zero-centred"]
    assert abs(kahan.whole.fidelity - 1.0) <= ENOUGH
    assert kahan.norms.frozen <= FROZEN_SHARE
    assert centred.norms.frozen <= FROZEN_SHARE
    assert abs(centred.whole.fidelity - 1.0) > ENOUGH


def test_variants_see_the_same_batches_and_curves_have_the_asked_for_points() -> None:
    steps = [1, *range(PLAN.every, PLAN.steps + 1, PLAN.every)]
    for outcome in outcomes().values():
        assert [step for step, _ in outcome.loss] == steps
        assert [step for step, _ in outcome.pole_drift] == [0, *steps]
    # The loss before the first update differs by rounding of weights and activations alone.
    first = [outcome.loss[0][1] for outcome in outcomes().values()]
    assert max(first) - min(first) < abs(first[0] - outcomes()["float32"].loss[-1][1])


def test_bytes_are_those_of_weights_and_moments() -> None:
    held = {name: round(outcome.bytes) for name, outcome in outcomes().items()}
    assert held == {"float32": 12, "blanket bfloat16": 6, "Kahan": 12, "zero-centred": 6}


def test_a_drill_repeats_exactly() -> None:
    again = run(PLAN, [BY_NAME["blanket bfloat16"]], BYTES)
    assert again == [outcomes()["blanket bfloat16"]]


@pytest.mark.parametrize(
    "change", [{"steps": 0}, {"every": 0}, {"length": 1}, {"lr": 0.0}, {"lr": math.nan}]
)
def test_a_plan_that_trains_nothing_is_refused(change: dict) -> None:
    with pytest.raises(ValueError, match=f"drill: .*{next(iter(change))}="):
        replace(PLAN, **change)


def test_no_variants_are_refused() -> None:
    with pytest.raises(ValueError, match="no variants; there are float32"):
        run(PLAN, [])


def stored() -> dict:
    return document(PLAN, list(outcomes().values()))


def test_a_drill_is_stored_and_read_back(tmp_path) -> None:
    path = tmp_path / "drill.json"
    path.write_text("before", encoding="utf-8")
    write(path, stored())
    assert read(DRILL, tmp_path) == json.loads(json.dumps(stored()))
    assert [p.name for p in tmp_path.iterdir()] == ["drill.json"]


def test_an_interrupted_write_leaves_the_old_drill(tmp_path) -> None:
    path = tmp_path / "drill.json"
    path.write_text("before", encoding="utf-8")
    with pytest.raises(ValueError, match="Out of range"):
        write(path, {"not": math.nan})
    assert path.read_text(encoding="utf-8") == "before"
    assert [p.name for p in tmp_path.iterdir()] == ["drill.json"]


def test_a_folder_that_is_not_there_is_named(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        write(tmp_path / "nowhere" / "drill.json", stored())


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"schema": 99, "variants": [{"name": "x"}]}'])
def test_a_drill_that_cannot_be_read_is_refused(tmp_path, content: str) -> None:
    path = tmp_path / "drill.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=r"drill\.json .*run `python -m tools.experiments drill`"):
        read(DRILL, tmp_path)
    path.unlink()
    with pytest.raises(ValueError, match="cannot be read"):
        read(DRILL, tmp_path)


def test_the_committed_drill_says_what_its_numbers_say() -> None:
    content = read(DRILL)
    assert content["conclusion"] == conclusion(content["variants"])
    assert [v["name"] for v in content["variants"]] == [v.name for v in VARIANTS]
    kinds = {v["kind"]: v for v in content["variants"]}
    assert kinds["blanket"]["norms"]["frozen"] > FROZEN_SHARE
    assert kinds["control"]["norms"]["frozen"] == kinds["amp"]["norms"]["frozen"] == 0.0
    assert kinds["blanket"]["held_out"] > kinds["control"]["held_out"]


def test_the_conclusion_follows_from_the_numbers() -> None:
    entries = stored()["variants"]
    told = conclusion(entries)
    assert "100% of the norm weights that start at 1 are frozen" in told[1]
    assert any(line.startswith("Kahan works at 12 bytes") for line in told)
    assert any(line.startswith("zero-centred is not enough") for line in told)
    # Thawed and as good as float32, the same variant is said to be so.
    control, blanket = entries[0], entries[1]
    mended = control | {key: blanket[key] for key in ("name", "what", "kind")}
    assert "0% of the norm weights that start at 1 are frozen" in conclusion([control, mended])[1]
    assert "its loss equals float32's" in conclusion([control, mended])[1]


def test_a_run_that_is_not_finite_is_said_and_never_compared() -> None:
    control, blanket = stored()["variants"][:2]
    broken = blanket | {"held_out": None}
    assert "does not stay finite" in conclusion([control, broken])[-1]
    assert conclusion([control | {"held_out": None}, blanket]) == [
        "Nothing can be compared: no float32 run stays finite."
    ]
    diverged = replace(outcomes()["float32"], held_out=math.nan, loss=[(1, math.inf)])
    entry = document(PLAN, [diverged])["variants"][0]
    assert entry["held_out"] is None
    assert entry["loss"] == [[1, None]]
