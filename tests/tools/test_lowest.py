"""Constraints of the lowest versions: every requirement of an installation has one."""

from __future__ import annotations

import pytest

from tools import lowest


def test_a_constraint_is_the_lowest_version() -> None:
    wanted = ["jax>=0.10,<0.12", "moto[s3]>=5.1", "ml_dtypes>=0.5", "a-b>=1.0rc2"]
    assert lowest.constraints(wanted) == ["jax==0.10", "moto==5.1", "ml_dtypes==0.5", "a-b==1.0rc2"]


@pytest.mark.parametrize("requirement", ["numpy", "numpy<3", "numpy==2.0", "numpy>=2.0,!=2.1"])
def test_a_requirement_without_a_lowest_version_is_refused(requirement: str) -> None:
    with pytest.raises(ValueError, match="expected a requirement with a lowest version"):
        lowest.constraints([requirement])


def test_an_installation_has_a_lowest_version_of_everything(capsys) -> None:
    lowest.main()
    printed = capsys.readouterr().out.split()
    assert {line.partition("==")[0] for line in printed} >= {"jax", "numpy", "duckdb", "click"}
    assert all("==" in line for line in printed)
