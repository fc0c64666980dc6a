"""A side written to a folder and read as a side: what it answers, and what it refuses."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from megalodon_jax import files
from parity.engine.measure.metrics import relative_l2
from parity.port.compare import Port, compare
from parity.port.rounding_floors import SEEDS, floors_of
from parity.sides import capture_files
from parity.sides.capture_files import MANIFEST
from parity.sides.capture_writer import SEEDS as CAPTURED_SEEDS
from parity.sides.captured import UNKNOWN, CapturedSide, capture, comparison_runs
from parity.sides.projection import direction
from parity.sides.same_inputs import check_same_inputs
from parity.sides.side import Precision, Rounding, Run, Side, SideError, Trace

WIDTH = 6
DTYPES = {"float32": np.float32, "float64": np.float64, "bfloat16": ml_dtypes.bfloat16}


class Linear:
    """tanh(x W^T) and its sum, with a gradient; in every precision, moved by rounding."""

    kind = "numpy"

    def __init__(self, seed: int = 0, scale: float = 1.0) -> None:
        rng = np.random.default_rng(seed)
        self.weight = (scale * rng.normal(size=(WIDTH, WIDTH))).astype(np.float32)
        self.ids = rng.integers(0, 9, (2, 3))
        self.x = rng.normal(size=(2, 3, WIDTH)).astype(np.float32)
        self.runs: list[Run] = []

    def parameters(self) -> dict[str, np.ndarray]:
        half = self.weight.astype(ml_dtypes.bfloat16)
        return {
            "weight": self.weight,
            "half": half.T,
            "count": np.array(3, np.float32),
            "none": half[:0],
        }

    def inputs(self) -> dict[str, np.ndarray]:
        return {"0": self.ids, "x": self.x, "mask": self.ids > 3}

    def run(self, how: Run = Run()) -> Trace:  # noqa: B008
        self.runs.append(how)
        if how.precision is Precision.BFLOAT16 and how.rounding is not None:
            raise SideError("no bfloat16 that is moved")
        dtype = DTYPES[how.precision]
        w, x = self.weight.astype(dtype), self.x.astype(dtype)
        if how.rounding is not None:
            signs = np.random.default_rng(how.seed).choice([-1.0, 1.0], w.shape)
            w = w * (1 + signs * np.finfo(np.float32).eps)
        product = np.asarray(x @ w.T)
        y = np.tanh(how.forced.get("product", product)).astype(dtype)
        stages = {"product": product, "output.y": y, "output.sum": np.asarray(y.sum())}
        gradients = {}
        if how.cotangents is not None:
            inner = (how.cotangents["output.y"] + how.cotangents["output.sum"]) * (1 - y * y)
            gradients = {"weight": np.einsum("blo,bli->oi", inner, x)}
        return Trace(stages, ("output.y", "output.sum"), gradients, ("a notice",))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return capture(Linear(), tmp_path_factory.mktemp("captures") / "parents" / "linear")


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A capture that may be damaged."""
    return shutil.copytree(original, tmp_path / "captures" / "linear")


def equal(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return list(one) == list(other) and all(
        one[n].dtype == other[n].dtype
        and one[n].shape == other[n].shape
        and np.array_equal(one[n], other[n])
        for n in one
    )


def siblings(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.parent.iterdir())


def tensors(folder: Path, name: str, change: Callable[[dict[str, np.ndarray]], Any]) -> None:
    """Change arrays of a file of a capture."""
    arrays = load_file(folder / name)
    change(arrays)
    save_file(arrays, folder / name)


# What is answered


def test_a_captured_side_is_the_side_bit_for_bit(folder: Path) -> None:
    side, captured = Linear(), CapturedSide(folder)
    assert isinstance(captured, Side)
    assert captured.kind == side.kind
    assert equal(dict(captured.parameters()), side.parameters())
    assert equal(captured.inputs(), side.inputs())
    cotangents = direction({n: side.run().stages[n] for n in side.run().outputs})
    for precision in Precision:
        for how in (Run(precision), Run(precision, cotangents=cotangents)):
            if precision is Precision.BFLOAT16 and how.cotangents is not None:
                continue
            here, there = side.run(how), captured.run(how)
            assert equal(here.stages, there.stages)
            assert equal(here.gradients, there.gradients)
            assert (here.outputs, here.notices) == (there.outputs, there.notices)


def test_floors_of_a_capture_are_those_of_the_side(folder: Path) -> None:
    side, captured = Linear(), CapturedSide(folder)
    runs = {(how.rounding, how.seed): how for how in comparison_runs(side, bfloat16=False)}
    wide = replace(runs[Rounding.OPERATIONS, 0], rounding=None)

    def arrays(which: Side, how: Run) -> dict[str, np.ndarray]:
        trace = which.run(how)
        return trace.stages | trace.gradients

    for kind in Rounding:
        floors = [
            floors_of(arrays(s, wide), lambda n, s=s, k=kind: arrays(s, runs[k, n]))
            for s in (side, captured)
        ]
        assert all(value > 0 for value in floors[0].values())
        # Differences are kept in bfloat16, so a floor is off by its unit roundoff at most.
        roundoff = float(ml_dtypes.finfo(ml_dtypes.bfloat16).eps)
        for name, value in floors[0].items():
            assert abs(floors[1][name] / value - 1) < roundoff


@pytest.mark.parametrize("scale", [1.0, 1.01], ids=["healthy", "wrong"])
def test_a_comparison_with_a_capture_is_that_with_its_side(folder: Path, scale: float) -> None:
    class Wrong(Linear):
        def run(self, how: Run = Run()) -> Trace:  # noqa: B008
            trace = super().run(how)
            stages = trace.stages | {"output.y": trace.stages["output.y"] * scale}
            return replace(trace, stages=stages)

    port = Wrong()
    live, captured, both = (
        compare(Port("linear", original=original, port=ours))
        for original, ours in (
            (Linear(), port),
            (CapturedSide(folder), port),
            (CapturedSide(folder), CapturedSide(capture(port, folder.with_name("port")))),
        )
    )
    assert live.holds is captured.holds is both.holds is (scale == 1.0)
    values = [
        {(m.edge, m.quantity, m.metric): m.value for m in r.measurements}
        for r in (live, captured, both)
    ]
    assert repr(values[0]) == repr(values[1]) == repr(values[2])
    assert captured.culprit == live.culprit or scale != 1.0
    assert (live.culprit is None) is (scale == 1.0)
    assert any("its stages cannot be replaced" in notice for notice in both.notices)


def test_as_many_seeds_are_captured_as_a_comparison_asks_for() -> None:
    assert CAPTURED_SEEDS == SEEDS
    asked = [how for how in comparison_runs(Linear()) if how.precision is Precision.FLOAT64]
    assert len(asked) == 1 + SEEDS * len(Rounding)


def test_what_it_was_made_with_is_written_down(folder: Path) -> None:
    captured = CapturedSide(folder)
    assert captured.versions["numpy"] == np.__version__
    assert captured.versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert captured.device
    text = captured.text()
    assert "capture of a numpy side" in text
    assert "float64 perturbed by constants, seed 3 with derivatives" in text
    assert "not bfloat16 perturbed by operations, seed 0: no bfloat16 that is moved" in text


def test_masks_and_narrow_numbers_that_were_moved_are_kept_as_they_are(tmp_path: Path) -> None:
    class Masked(Linear):
        def run(self, how: Run = Run()) -> Trace:  # noqa: B008
            trace = super().run(replace(how, cotangents=None))
            y = trace.stages["output.y"]
            narrow = trace.stages["product"].astype(np.float32)
            stages = {"mask": np.where(y > 0, y, -np.inf), "narrow": narrow, "output.y": y}
            return Trace(stages, ("output.y",))

    side, moved = Masked(), Run(Precision.FLOAT64, Rounding.OPERATIONS)
    folder = capture(side, tmp_path / "masked", runs=[Run(Precision.FLOAT64), moved])
    here, there = side.run(moved).stages, CapturedSide(folder).run(moved).stages
    assert all(np.array_equal(here[name], there[name]) for name in ("mask", "narrow"))
    assert there["narrow"].dtype == np.float32


def test_a_capture_of_a_capture_is_the_same(folder: Path, tmp_path: Path) -> None:
    again = CapturedSide(capture(CapturedSide(folder), tmp_path / "again"))
    first = CapturedSide(folder)
    assert equal(again.run().stages, first.run().stages)
    assert equal(dict(again.parameters()), dict(first.parameters()))
    moved = Run(Precision.FLOAT64, Rounding.OPERATIONS, 1)
    assert equal(again.run(moved).stages, first.run(moved).stages)


def test_a_run_that_moves_what_both_share_answers_one_that_does_not(folder: Path) -> None:
    moved = Run(Precision.FLOAT64, Rounding.CONSTANTS, 0, shared=frozenset({"weight"}))
    assert CapturedSide(folder).run(moved).stages


def test_parameters_are_maps_of_the_files_and_read_only(folder: Path) -> None:
    weight = CapturedSide(folder).parameters()["weight"]
    assert not weight.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        weight[0] = 0


_PEAK = """
import resource, sys
from parity.sides.captured import CapturedSide
from parity.engine.pairing.fingerprints import fingerprint
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
sides = [CapturedSide(folder) for folder in sys.argv[1:]]
for side in sides:
    values = side.parameters()
    for name in values:
        fingerprint(values[name])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.skipif(not hasattr(resource, "RUSAGE_SELF"), reason="no peak memory on this system")
def test_parameters_are_not_all_in_memory(tmp_path: Path, monkeypatch) -> None:
    class Large(Linear):
        def parameters(self) -> dict[str, np.ndarray]:
            return {str(n): np.full((1 << 10, 1 << 10), n, np.float32) for n in range(24)}

    side = Large()
    monkeypatch.setattr(capture_files, "SHARD", 1 << 23)
    folder = capture(side, tmp_path / "large", runs=[Run()])
    size = sum(x.nbytes for x in side.parameters().values())
    assert len(list(folder.glob("parameters-*"))) > 10
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", _PEAK, str(folder), str(folder)]
    peak = int(
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    )
    assert peak < size, "both together take less than one of them"


# What is refused


def test_what_was_not_captured_is_refused_with_what_was(folder: Path) -> None:
    captured = CapturedSide(folder)
    with pytest.raises(SideError, match=r"its stages cannot be replaced"):
        captured.run(Run(forced={"product": np.zeros(3)}))
    with pytest.raises(SideError, match=r"perturbed by operations, seed 77; it has: float32"):
        captured.run(Run(Precision.FLOAT64, Rounding.OPERATIONS, 77))
    with pytest.raises(SideError, match="no bfloat16 that is moved"):
        captured.run(Run(Precision.BFLOAT16, Rounding.OPERATIONS))


def test_derivatives_in_another_direction_are_refused(folder: Path) -> None:
    captured = CapturedSide(folder)
    trace = captured.run()
    own = direction({name: trace.stages[name] for name in trace.outputs})
    assert captured.run(Run(cotangents=own)).gradients
    for other in (
        {name: -x for name, x in own.items()},
        {"output.y": own["output.y"]},
        own | {"output.other": own["output.y"]},
    ):
        with pytest.raises(SideError, match=r"capture the side with comparison_runs"):
            captured.run(Run(cotangents=other))


def test_less_that_is_shared_is_refused(tmp_path: Path) -> None:
    how = Run(Precision.FLOAT64, Rounding.CONSTANTS, shared=frozenset({"weight"}))
    captured = CapturedSide(capture(Linear(), tmp_path / "x", runs=[Run(Precision.FLOAT64), how]))
    assert captured.run(how).stages
    with pytest.raises(SideError, match="has no run float64 perturbed by constants"):
        captured.run(replace(how, shared=frozenset()))


def test_parameters_left_out_must_be_passed_and_be_the_same(tmp_path: Path) -> None:
    side = Linear()
    folder = capture(side, tmp_path / "bare", parameters=False)
    assert not list(folder.glob("parameters*"))
    with pytest.raises(SideError, match=r"only the hashes of its parameters.*parameters=True"):
        CapturedSide(folder).parameters()
    whole = side.parameters()
    assert CapturedSide(folder, parameters=whole).parameters() is whole
    moved = whole | {"weight": np.nextafter(whole["weight"], np.float32(9))}
    with pytest.raises(SideError, match=r"weight of the parameters passed .* float32\[6, 6\]"):
        CapturedSide(folder, parameters=moved).parameters()
    del whole["half"]
    with pytest.raises(SideError, match="missing half; extra none"):
        CapturedSide(folder, parameters=whole).parameters()


def test_a_side_that_runs_in_no_way_leaves_nothing(tmp_path: Path) -> None:
    class Broken(Linear):
        def run(self, how: Run = Run()) -> Trace:  # noqa: B008
            raise SideError("the module has no weights")

    with pytest.raises(SideError, match=r"nothing to capture: the module has no weights"):
        capture(Broken(), tmp_path / "broken", runs=[Run()])
    assert not list(tmp_path.iterdir())


def test_a_side_that_computes_something_else_each_time_is_refused(tmp_path: Path) -> None:
    class Dropout(Linear):
        def run(self, how: Run = Run()) -> Trace:  # noqa: B008
            trace = super().run(how)
            stages = trace.stages | {"output.y": trace.stages["output.y"] + len(self.runs)}
            return replace(trace, stages=stages)

    with pytest.raises(SideError, match=r"not deterministic.*first differ at output\.y"):
        capture(Dropout(), tmp_path / "dropout")
    assert not list(tmp_path.iterdir())


def test_numbers_that_cannot_be_written_leave_nothing(tmp_path: Path) -> None:
    class Long(Linear):
        def inputs(self) -> dict[str, np.ndarray]:
            return {"0": np.zeros(3, np.longdouble)}

    with pytest.raises(SideError, match=r"cannot be written.*(longdouble|float128)"):
        capture(Long(), tmp_path / "long")
    assert not list(tmp_path.iterdir())


# Nothing is lost, nothing is half there


def test_a_capture_is_replaced_only_when_told(folder: Path) -> None:
    before = CapturedSide(folder).run().stages
    with pytest.raises(SideError, match="holds a capture: pass overwrite=True"):
        capture(Linear(seed=1), folder)
    assert equal(CapturedSide(folder).run().stages, before)
    capture(Linear(seed=1), folder, overwrite=True)
    assert equal(CapturedSide(folder).run().stages, Linear(seed=1).run().stages)
    assert siblings(folder) == ["linear"]


@pytest.mark.parametrize("content", ["notes.txt", MANIFEST])
def test_what_is_no_capture_is_never_replaced(tmp_path: Path, content: str) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / content).write_text("{}", encoding="utf-8")
    with pytest.raises(SideError, match=r"exists and is not a capture|is of kind None"):
        capture(Linear(), tmp_path / "mine", overwrite=True)
    assert siblings(tmp_path / "mine") == ["mine"]
    assert (tmp_path / "mine" / content).read_text(encoding="utf-8") == "{}"


class Interrupted(BaseException):
    """As a signal would."""


def interrupt(*_: Any, **__: Any) -> None:
    raise Interrupted


BREAKS = [
    (capture_files, "save_file"),
    (capture_files, "_digest"),
    (files, "flush"),
    (Path, "write_text"),
]


@pytest.mark.parametrize(("owner", "name"), BREAKS, ids=[name for _, name in BREAKS])
@pytest.mark.parametrize("overwrite", [False, True])
def test_an_interrupted_capture_leaves_what_was_there(
    folder: Path, monkeypatch, owner: Any, name: str, overwrite: bool
) -> None:
    target = folder if overwrite else folder.with_name("other")
    with monkeypatch.context() as broken:
        broken.setattr(owner, name, interrupt)
        with pytest.raises(Interrupted):
            capture(Linear(seed=1), target, overwrite=overwrite)
    assert siblings(folder) == ["linear"]
    assert equal(CapturedSide(folder).run().stages, Linear().run().stages)


def manifest(folder: Path) -> dict[str, Any]:
    return json.loads((folder / MANIFEST).read_text(encoding="utf-8"))


def edited(folder: Path, change: Callable[[str], str]) -> None:
    file = folder / MANIFEST
    file.write_text(change(file.read_text(encoding="utf-8")), encoding="utf-8")


def rewritten(folder: Path, change: dict[str, Any]) -> None:
    content = manifest(folder) | change
    capture_files.write_manifest(folder, {k: v for k, v in content.items() if k != "sha256"})


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no manifest": (lambda f: (f / MANIFEST).unlink(), "it has no manifest.json.*Capture it first"),
    "half a manifest": (
        lambda f: os.truncate(f / MANIFEST, 99),
        "is not readable JSON.*Copy the capture again",
    ),
    "an edited manifest": (
        lambda f: edited(f, lambda text: text.replace("numpy", "torch")),
        "was changed after it was written",
    ),
    "another schema": (
        lambda f: edited(f, lambda text: json.dumps(json.loads(text) | {"schema": 99})),
        "schema 99, expected 'capture of a side' and 2",
    ),
    "fields that are missing": (
        lambda f: rewritten(f, {"runs": [], "inputs": [{"name": "x"}]}),
        "the manifest of the capture .* lacks",
    ),
    "no file": (lambda f: (f / "parameters-000.safetensors").unlink(), "cannot be read from param"),
    "half a file": (
        lambda f: os.truncate(f / "parameters-000.safetensors", 400),
        "cannot be read from parameters-000.*copy the capture again, or capture the side again",
    ),
    "another weight": (
        lambda f: tensors(f, "parameters-000.safetensors", lambda a: a["0"].fill(1)),
        r"weight of the capture .* sha256 .*, expected float32\[6, 6\] sha256",
    ),
    "another input": (
        lambda f: tensors(f, "inputs-000.safetensors", lambda a: a["0"].fill(1)),
        r"0 of the capture .*, expected int64\[2, 3\]",
    ),
    "another shape": (
        lambda f: tensors(f, "run-00-000.safetensors", lambda a: a.update({"0": a["0"][:1]})),
        r"product of the capture .* is float32\[1, 3, 6\] .*, expected float32\[2, 3, 6\]",
    ),
    "a stage that is gone": (
        lambda f: tensors(f, "run-00-000.safetensors", lambda a: a.pop("0")),
        "product of the capture .* cannot be read",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named(folder: Path, damage: str) -> None:
    break_it, message = DAMAGE[damage]
    break_it(folder)
    with pytest.raises(SideError, match=rf"(?s){message}"):
        captured = CapturedSide(folder)
        dict(captured.parameters())
        captured.inputs()
        captured.run()


# The same inputs


class Given:
    """A side of which only the inputs matter."""

    kind = "given"

    def __init__(self, **inputs: np.ndarray) -> None:
        self.given = inputs

    def parameters(self) -> dict[str, np.ndarray]:
        return {}

    def inputs(self) -> dict[str, np.ndarray]:
        return self.given

    def run(self, how: Run = Run()) -> Trace:  # noqa: B008
        return Trace({}, ())


IDS = np.arange(6).reshape(2, 3)
MASK = np.array([[1, 1, 0], [1, 1, 1]])
PLACES = np.array([[0, 1, 1], [0, 1, 2]])


def test_the_same_inputs_may_have_other_names_dtypes_and_places() -> None:
    one = Given(a=IDS, b=MASK, c=np.float32([0.5, np.nan]))
    other = Given(b=IDS.astype(np.int32), x=PLACES, y=MASK > 0, z=np.float64([0.5, np.nan]))
    assert check_same_inputs(one, other) == ((), ("x",))
    assert check_same_inputs(Given(a=IDS), Given()) == (("a",), ())
    # A mask on one side and positions on the other are of one shape, and not one input.
    one, other = Given(ids=IDS, mask=MASK), Given(ids=IDS, places=PLACES)
    assert check_same_inputs(one, other) == (("mask",), ("places",))


def test_the_same_inputs_may_lie_otherwise() -> None:
    image = np.arange(24.0).reshape(2, 3, 4)
    sizes = {"0": image}, {"image": image.transpose(0, 2, 1)}
    assert check_same_inputs(*(Given(**each) for each in sizes)) == ((), ())
    assert check_same_inputs(Given(x=IDS), Given(x=IDS.reshape(-1))) == ((), ())
    # One row for all; a mask of positions and one of pairs; arguments that only have one place.
    for a, b in (
        (Given(x=PLACES[:1]), Given(x=PLACES[[0, 0]])),
        (Given(x=MASK), Given(x=MASK[:, None] * MASK[:, :, None])),
        (Given(x=MASK), Given(x=np.where(MASK, 0.0, -1e9))),
        (Given(**{"0": IDS, "1": MASK}), Given(**{"0": IDS, "1": np.eye(3, dtype=int)})),
    ):
        check_same_inputs(a, b)


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        (
            Given(**{"0": IDS}),
            Given(**{"0": IDS[:1]}),
            r"\[2, 3\].*\[1, 3\] \(axis 0 has 2 against 1",
        ),
        (
            Given(a=IDS),
            Given(a=IDS[:, :2]),
            r"int64\[2, 3\].*int64\[2, 2\] \(axis 1 has 3 against 2",
        ),
        (Given(a=IDS), Given(a=IDS / 3), r"int64.*float64.*only one of them is of whole numbers"),
        (Given(**{"0": IDS}), Given(ids=IDS[:1]), r"input 0 of .* input ids of .*axis 0"),
        (Given(a=IDS, b=MASK), Given(a=IDS[:1], b=MASK[:1]), r"input a of .*; input b of .*axis 0"),
        (Given(a=IDS, b=MASK), Given(a=IDS[:1], b=MASK), r"but input a of [^;]*$"),
        (Given(**{"0": IDS, "1": MASK}), Given(**{"0": IDS[:1], "1": MASK}), r"axis 0 has 2"),
    ],
    ids=["batch", "length", "dtype", "by place", "two of them", "beside what is equal", "first"],
)
def test_inputs_of_other_shapes_and_dtypes_are_refused(one: Given, other: Given, told: str) -> None:
    with pytest.raises(SideError, match=rf"both sides need the same inputs.*{told}"):
        check_same_inputs(one, other)


def test_a_capture_has_the_inputs_of_its_side(folder: Path) -> None:
    assert check_same_inputs(CapturedSide(folder), Linear()) == ((), ())
    with pytest.raises(SideError, match=r"elements of input 0 of the numpy side, int64\[2, 3\]"):
        check_same_inputs(CapturedSide(folder), Linear(seed=1))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Given(a=IDS), Given(a=IDS + 1)),
        (Given(**{"0": IDS}), Given(ids=IDS + 1)),
        (Given(ids=IDS, mask=MASK), Given(**{"0": IDS[::-1]}, x=MASK)),
        (Given(a=IDS), Given(a=IDS % 5)),
    ],
    ids=["by name", "by place", "beside what is equal", "one element"],
)
def test_other_inputs_are_refused(one: Given, other: Given) -> None:
    with pytest.raises(SideError, match=r"both sides need the same inputs, but \d of 6 elements"):
        check_same_inputs(one, other)


def test_two_runs_differ_by_the_level_that_was_measured(folder: Path) -> None:
    captured = CapturedSide(folder)
    exact = captured.run(Run(Precision.FLOAT64)).stages["product"]
    seeds = [captured.run(Run(Precision.FLOAT64, Rounding.OPERATIONS, n)) for n in range(2)]
    assert relative_l2(seeds[0].stages["product"], exact) > 0
    assert not np.array_equal(*(trace.stages["product"] for trace in seeds))


def test_a_capture_of_an_earlier_version_says_what_it_does_not_know(tmp_path: Path) -> None:
    side = CapturedSide(capture(Linear(), tmp_path / "linear"))
    assert UNKNOWN not in side.run().notices
    for entry in side._runs:
        del entry["frozen"], entry["updated"]
    trace = side.run()
    assert UNKNOWN in trace.notices and (trace.frozen, trace.updated) == ((), ())
