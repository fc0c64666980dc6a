"""Suites that run a case again take the oracle's answer from the first."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from parity.megalodon import suite as module
from parity.megalodon.cases import Case, by_name
from parity.megalodon.noise_floors import truth
from parity.megalodon.recordings import RecordedReference
from parity.megalodon.suite import Suite
from parity.megalodon.tolerance_table import NoiseFloors


@dataclass(frozen=True)
class Oracle:
    """The oracle in the place of the JAX model: nothing is compiled."""

    def run(self, case: Case) -> Any:
        return truth(case)


# A padded case is held to two truths: ours, and that of an EMA that padding enters.
@pytest.mark.parametrize(("name", "answers"), [("length_c", 1), ("right_padding", 2)])
def test_the_oracle_answers_once(monkeypatch: pytest.MonkeyPatch, name: str, answers: int) -> None:
    asked: list[bool | None] = []

    def counted(case: Case, *, mask_ema: bool | None = None) -> Any:
        asked.append(mask_ema)
        return truth(case, mask_ema=mask_ema)

    monkeypatch.setattr(module, "truth", counted)
    case, floors = by_name(name), NoiseFloors.load()
    first = Suite(RecordedReference(), Oracle(), Oracle())
    rows = list(first.case(case, floors))
    again = list(replace(first, on_failure=None).case(case, floors))
    assert [(m.key, m.value) for m in again] == [(m.key, m.value) for m in rows]
    assert len(asked) == len(set(asked)) == answers
    # Negative control: one that shares nothing asks again.
    list(Suite(RecordedReference(), Oracle(), Oracle()).case(case, floors))
    assert len(asked) == 2 * answers
