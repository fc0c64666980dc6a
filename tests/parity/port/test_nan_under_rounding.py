"""What rounding turned into no number leaves no bound: it is not left out of the floor."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

from parity.engine.measure import rounding_noise
from parity.engine.measure.compare import Comparison, Work
from parity.engine.measure.measurement import Kind, Verdict
from parity.engine.measure.metrics import relative_l2, without_shared_infinities
from parity.engine.measure.quantity import stage_kind
from parity.engine.pairing.alignment import Alignment
from parity.engine.pairing.parameter_pairs import Matching
from parity.port import narrow
from parity.port.correspondence import Correspondence
from parity.port.narrow import compare_narrow
from parity.port.rounding_floors import PortBounds, floors_of, stage_bound, together
from parity.port.side_runs import SideRuns
from parity.port_tolerances import PortEdge
from parity.sides.side import SideError
from tests.helpers import double

EXACT = np.array([1.0, 2.0, -np.inf, 4.0])
MOVED = 2.0**-23


def moved(bad, seed):
    """A response to rounding, in which one of four seeds turns an element into `bad`."""
    x = EXACT * (1 + MOVED)
    if seed == 2:
        x = np.where(np.arange(4) == 1, bad, x)
    return {"stage": x}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_seed_that_gives_no_number_leaves_no_floor(bad):
    healthy = floors_of({"stage": EXACT}, lambda seed: moved(2.0, seed))["stage"]
    assert 0 < healthy <= 1.0, "one element of three is moved by as much as itself at most"
    floor = floors_of({"stage": EXACT}, lambda seed: moved(bad, seed))["stage"]
    assert math.isnan(floor)
    assert all(math.isnan(stage_bound(edge, Kind.BLOCK, floor)) for edge in PortEdge)
    assert math.isnan(together({"stage": 1e-7}, {"stage": floor})["stage"])


def test_where_the_exact_run_is_infinite_is_no_question():
    def masked(seed):
        return {"stage": np.where(np.isinf(EXACT), -1.0, EXACT * (1 + MOVED))}

    # Every finite element is moved by the same share, and rounding of it adds a unit or two.
    floor = floors_of({"stage": EXACT}, masked)["stage"]
    assert math.isclose(floor, MOVED)


@pytest.mark.parametrize("value", [1.0, 1.25, np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("floors", [{}, {"other": 0.1}, {"stage": 0.1, "other": 0.1}], ids=len)
def test_what_is_no_number_in_bfloat16_fails_whatever_is_known_of_its_rounding(
    floors: dict[str, float], value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without any floor nothing else is judged, and without its own a stage was not measured."""
    monkeypatch.setattr(narrow, "_floors", lambda *_: (floors, ()))
    exact = {"stage": np.ones(4), "other": np.ones(4)}
    low = {**exact, "stage": np.array([1.0, value, 1.0, 1.0])}

    def refuses(how: object) -> None:
        raise SideError("no bfloat16")

    def ran(stages: dict[str, np.ndarray], run: object) -> SideRuns:
        trace = SimpleNamespace(stages=stages, outputs=("stage",))
        return double(SideRuns, wide=trace, best=trace, run=run, masked_outputs=False)

    port = ran(exact, lambda how: SimpleNamespace(stages=low))
    edge = PortEdge.PORTBF16_PORT64
    work = Work("a port", "hash", ("stage", "other"))
    comparison = Comparison(work, edge, PortBounds({}), edge.dtype, kinds=stage_kind)
    names = Correspondence(Alignment((), {}, {}), Matching(()))
    _, rows, _ = compare_narrow(comparison, names, ran(exact, refuses), port)
    verdicts = {m.quantity: m.verdict for m in rows if m.metric == "rel_l2"}
    if not math.isfinite(value):
        assert verdicts.pop("stage") is Verdict.FAIL
    elif floors:
        known = Verdict.PASS if "stage" in floors else Verdict.NOT_COMPARABLE
        assert verdicts.pop("stage") is known
    assert verdicts == ({"other": Verdict.PASS} if floors else {})


def test_responses_keep_what_is_no_number():
    exact = {"a": np.ones(3)}

    def run(rng):
        return {"a": np.array([1.0, np.nan, 1.0])}

    values = rounding_noise.responses(exact, run, seeds=2)["a"]
    assert len(values) == 2 and all(map(math.isnan, values))
    assert math.isnan(rounding_noise.floor([1e-7, math.nan]))
    assert math.isnan(rounding_noise.floors(exact, run, seeds=2)["a"])


def test_infinities_are_shared_where_both_sides_and_the_truth_have_them():
    a, e = np.array([1.0, np.inf, -np.inf]), np.array([1.0, np.inf, -np.inf])
    assert relative_l2(*without_shared_infinities(a, e)) == 0.0
    assert relative_l2(*without_shared_infinities(a, e, e)) == 0.0
    for truth in (np.array([1.0, np.inf, 2.0]), np.array([1.0, np.inf, np.inf])):
        assert math.isnan(relative_l2(*without_shared_infinities(a, e, truth)))
    # Of another sign, on one side alone, or of another shape they are none that agree.
    assert math.isnan(relative_l2(*without_shared_infinities(-a, e)))
    assert math.isnan(relative_l2(*without_shared_infinities(np.ones(3), e)))
    assert without_shared_infinities(a[:2], e)[0].shape == (2,)
    assert math.isnan(relative_l2(*without_shared_infinities(a, e, e[:2])))
