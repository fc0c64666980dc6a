"""What a finding says of a number at, beside and beyond its threshold."""

from __future__ import annotations

import math

import pytest

from stability.core.findings import RESTORE, Severity, judge, non_finite, notes


@pytest.mark.parametrize("least", [False, True])
@pytest.mark.parametrize("severity", [Severity.WARNING, Severity.ERROR])
def test_the_threshold_itself_is_right_and_what_is_no_number_never_is(least, severity) -> None:
    def severity_of(value: float, threshold: float) -> Severity:
        texts = ("probe", "w", "m", value, threshold, "source", "message", "remedy")
        found = judge(*texts, least=least, severity=severity)
        assert (found.remedy == "remedy") == (found.severity is not Severity.OK)
        return found.severity

    assert severity_of(1.0, 1.0) is Severity.OK
    assert severity_of(0.5, 1.0) is (severity if least else Severity.OK)
    assert severity_of(2.0, 1.0) is (Severity.OK if least else severity)
    # A number that could not be measured, or a threshold that is none, is beyond it.
    for value, threshold in ((math.nan, 1.0), (1.0, math.nan), (math.nan, math.nan)):
        assert severity_of(value, threshold) is severity


def test_values_that_are_not_finite_are_an_error_with_a_remedy() -> None:
    found = non_finite("w", 2, 10, "source", ", not probed")
    assert (found.severity, found.value, found.threshold) == (Severity.ERROR, 2.0, 0.0)
    assert found.message == "2 of 10 values are NaN or infinite, not probed"
    assert found.remedy == RESTORE
    assert [f.severity for f in notes("p", "w", {"a": math.nan}, "source")] == [Severity.NOTE]
