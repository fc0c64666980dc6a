"""Flax models of Transformers against their torch originals: what holds, and what is known not to.

A few pairs are compared in every run, all of them in a sweep; docs/tables/ports.md has the table.
"""

from __future__ import annotations

import re

import pytest

from parity.port import compare

try:
    from tests.parity.ports.catalogue import TWINS
except ImportError:  # what is missing is told by the marker
    TWINS = ()

QUICK = (
    "gpt2/plain",
    "bert/right padding",
    "llama/left padding",
    "bloom/6 heads",
    "blenderbot_small/scaled",
    "electra/no token types",
)
"""One of each kind: whole, padded on either side, refused, off by 1e-4, another default."""
pytestmark = [
    pytest.mark.flax_models,
    # Transformers tells of its own deprecations, and of the end of its Flax models.
    pytest.mark.filterwarnings("ignore"),
]


def each(*, known):
    return [
        pytest.param(twin, id=twin.title, marks=() if twin.title in QUICK else pytest.mark.sweep)
        for twin in TWINS
        if (twin.known is not None) is known
    ]


@pytest.mark.parametrize("twin", each(known=False))
def test_a_port_that_holds(twin):
    with twin.running():
        report = compare(twin.port())
    assert report.holds, report.text()


@pytest.mark.parametrize("twin", each(known=True))
def test_a_difference_starts_where_it_is_known_to_and_its_remedy_removes_it(twin):
    known = twin.known
    with twin.running():
        if known.error:
            with pytest.raises(Exception, match=re.escape(known.error)):
                compare(twin.port())
        else:
            report = compare(twin.port())
            assert not report.holds
            assert report.culprit is not None, report.text()
            assert report.culprit.name == known.stage, report.text()
    remedied = twin.remedied()
    with remedied.running():
        report = compare(remedied.port())
    assert report.holds, report.text()


def test_every_quick_case_is_in_the_catalogue():
    assert {*QUICK} <= {twin.title for twin in TWINS}
