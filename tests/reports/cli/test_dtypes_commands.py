"""The commands `dtypes`: what they ask and print."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from parity.megalodon import reference
from stability.dtype_audit import pinned_rows
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


@pytest.mark.parametrize(
    ("installed", "names", "changed", "code"),
    [
        (True, (), [], 0),
        (False, (), [], 3),
        (False, ("float32",), [], 0),
        (False, (), ["row"], 1),
    ],
)
def test_tables_that_were_not_checked_are_not_green(
    installed: bool, names: tuple[str, ...], changed: list[str], code: int, monkeypatch
) -> None:
    """Of torch there is nothing to check where megalodon-hf is not installed."""
    reason = None if installed else "megalodon-hf is not installed"
    change = SimpleNamespace(
        kind="new", before=0, after=1,
        row=SimpleNamespace(view="jaxpr", module="", describe=lambda: "add float32"),
    )  # fmt: skip
    monkeypatch.setattr(reference, "why_unavailable", lambda: reason)
    monkeypatch.setattr(pinned_rows, "PROGRAMS", dict.fromkeys(pinned_rows.PROGRAMS, tuple))
    monkeypatch.setattr(pinned_rows, "changes_since", lambda *_: [change for _ in changed])
    checked = cli("dtypes", "check", *names)
    assert checked.exit_code == code, checked.output
    assert ("torch tables are skipped" in checked.output) == (not installed and not names)
