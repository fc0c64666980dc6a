"""The commands `dtypes`: what they ask and print."""

from __future__ import annotations

import pytest

from tests.helpers import cli


def test_dtypes_shows_the_committed_tables() -> None:
    shown = cli("dtypes", "show", "float32")
    assert shown.exit_code == 0
    assert "model.layers.*.attn.cema forward fft" in shown.output
    assert "float32 jaxpr" in shown.output


@pytest.mark.parametrize("command", ["show", "check", "renew"])
def test_an_audit_that_is_not_there_is_refused_with_those_that_are(command: str) -> None:
    refused = cli("dtypes", command, "nothing")
    assert refused.exit_code == 2
    assert "no pinned table 'nothing'; there are bfloat16_compute, float32" in refused.output
