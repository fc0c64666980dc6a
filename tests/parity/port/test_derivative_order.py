"""A wrong derivative is wrong in all that was used before: what is used last is named first."""

from __future__ import annotations

import itertools
import math

from parity.engine.measure.measurement import Verdict
from parity.engine.pairing.alignment import Alignment
from parity.engine.pairing.parameter_pairs import Matching
from parity.port.localisation import Place
from parity.port.report import Report, first_use
from parity.port_tolerances import PortEdge
from tests.reports.nights import measurement

STAGES = ["h.0.norm", "h.0.mlp.up", "h.0.mlp.down", "h.0[0]", "h.1.mlp", "h.10.mlp", "head"]


def test_a_parameter_is_used_in_its_own_module_or_the_nearest_around_it():
    assert first_use("h.0.mlp.down.kernel", STAGES) == 2
    assert first_use("h.0.gate", STAGES) == 0
    assert first_use("h.1.mlp.up.kernel", STAGES) == 4
    assert first_use("h.10.mlp.up.kernel", STAGES) == 5
    assert first_use("elsewhere.kernel", STAGES) == -1
    assert first_use("h.1.gate", ["h.10.mlp", "h.1.mlp"]) == 1


def test_the_row_furthest_on_an_edge_is_one_of_which_no_share_is_known_or_the_largest():
    """In whatever order they were measured, and whichever edge others are on."""
    edge = PortEdge.PORT32_PORT64
    shares = {
        "a quarter": {"value": 1e-6},
        "nearly all": {"value": 3.9e-6},
        "twice": {"value": 8e-6, "verdict": Verdict.FAIL},
        "infinite": {"value": math.inf, "verdict": Verdict.FAIL},
        "unknown": {"tolerance": math.nan, "verdict": Verdict.NOT_COMPARABLE},
    }
    rows = [measurement(quantity=n, edge=edge, **given) for n, given in shares.items()]
    elsewhere = measurement(edge=PortEdge.PORT64_ORIGINAL64, value=math.nan)
    for count in range(1, len(rows)):
        for some in itertools.permutations(rows[:-1], count):
            assert worst((*some, elsewhere)).quantity == max(some, key=lambda m: m.value).quantity
            for among in ((rows[-1], *some), (*some, rows[-1])):
                # What is infinitely far and what has no share are both beyond every number.
                assert worst(among).quantity in ("unknown", "infinite")
    assert worst((rows[0], rows[-1])).quantity == "unknown"


def worst(rows):
    place = Place(PortEdge.PORT32_PORT64, ())
    report = Report("port", tuple(rows), Alignment((), {}, {}), Matching(()), place, (), (), ())
    found = report.worst(PortEdge.PORT32_PORT64)
    assert found is not None
    # The text names it too.
    assert found.quantity in report.text()
    return found
