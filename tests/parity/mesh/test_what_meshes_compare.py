"""A mesh holds only where a result was compared; what was not has a reason in the report."""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from parity.engine.measure.measurement import Verdict
from parity.engine.programs.exits import ExitError
from parity.mesh import MeshComparison
from parity.mesh.step import read_step

X = np.random.default_rng(0).standard_normal(16).astype(np.float32)
WIDE: dict[str, Any] = {"precisions": ("float64",)}


def on_eight(function, x=X, **options):
    step = MeshComparison(function, (x,), (P("data"),), [{"data": 8}], **(WIDE | options))
    (result,) = step.run().results
    return result


def devices():
    return jax.sharding.get_abstract_mesh().size


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (0.0, "0 everywhere on both sides"),
        (3.0, "3 everywhere on both sides"),
        (np.inf, "not a number"),
    ],
)
def test_constants_and_infinities_are_nothing_compared(value, told):
    result = on_eight(lambda x: {"y": jnp.where(x > 0, value, value)})
    assert not result.holds
    assert told in result.not_compared.get("y", "") or told in "\n".join(result.sentences())
    last = result.measurements[-1]
    assert any(m.verdict in (Verdict.FAIL, Verdict.NOT_COMPARABLE) for m in result.measurements)
    assert value == np.inf or (last.quantity, last.verdict) == ("outputs", Verdict.NOT_COMPARABLE)


def test_a_zero_gradient_among_results_is_told_and_holds():
    result = on_eight(lambda x: {"loss": jnp.sum(x**2), "grad": {"unused": 0 * x}, "kind": "sum"})
    assert result.holds
    assert set(result.not_compared) == {"grad/unused", "kind"}
    assert "0 everywhere" in result.not_compared["grad/unused"]
    assert result.not_compared["kind"].startswith("a str, not an array")
    compared = {m.quantity for m in result.measurements if m.metric == "rel_l2"}
    assert compared == {"loss", "grad/unused"}


def test_a_constant_that_is_another_on_the_mesh_fails():
    result = on_eight(lambda x: {"loss": jnp.sum(x**2), "y": 0 * x + devices()})
    assert {m.quantity for m in result.measurements if m.verdict is Verdict.FAIL} == {"y"}


def test_whole_numbers_alone_are_results():
    assert on_eight(lambda x: {"n": jnp.argsort(x)}).holds
    assert not on_eight(lambda x: {"n": jnp.argsort(x) * 0}).holds


def masked(x):
    return {"y": jnp.where(x > 0, x, -jnp.inf)}


def test_masks_of_results_agree_where_the_step_says_so_and_float64_has_them():
    assert not on_eight(masked).holds
    assert on_eight(masked, masked_outputs=True, precisions=("float64", "float32")).holds
    # Without float64 nobody knows whether it is a mask or an overflow.
    assert not on_eight(masked, masked_outputs=True, precisions=("float32",)).holds

    def grown(x):
        grown = jnp.exp(200 * jnp.abs(x))
        return {"y": jnp.where(x > 0, grown, x)}

    result = on_eight(grown, masked_outputs=True, precisions=("float64", "float32"))
    assert [m.edge for m in result.measurements if m.verdict is Verdict.FAIL] == ["mesh32:one32"]


def test_an_exit_is_an_error_that_names_the_step(tmp_path):
    with pytest.raises(ExitError, match=r"the function that is compared .*sys\.exit\(0\)"):
        on_eight(lambda x: sys.exit(0))
    # On the mesh alone, it is a failure of the mesh.
    result = on_eight(lambda x: sys.exit(0) if devices() > 1 else {"y": x})
    assert not result.holds and "sys.exit(0)" in "\n".join(result.sentences())
    file = tmp_path / "step.py"
    for text in ("import sys\nsys.exit(0)\n", "def step():\n    raise SystemExit(0)\n"):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(ExitError, match=r"step\.py called sys\.exit\(0\)"):
            read_step(file)


def cancelling():
    """A sum whose terms cancel but for a millionth of their rounding: its order decides."""
    rng = np.random.default_rng(1)
    half = rng.standard_normal(64) * 1e8
    return rng.permutation(np.concatenate([half, -half, rng.standard_normal(16)]))


def test_reordered_sums_excuse_no_float_where_integers_or_replicas_differ():
    """The float alone is excused; beside an integer that differs it is a failure of its own."""

    def step(broken):
        def function(x):
            return {"loss": jnp.sum(x), "n": jnp.int32(devices() if broken else 3)}

        return on_eight(function, cancelling())

    assert step(False).holds, list(step(False).sentences())
    failing = {m.quantity for m in step(True).measurements if m.verdict is Verdict.FAIL}
    assert failing == {"loss", "n"}


def test_marks_are_no_results():
    """A mark that agrees does not make a result that is constant one that was compared."""
    result = on_eight(lambda x: {"y": 0 * checkpoint_name(jnp.sin(x), "sin")})
    assert {m.quantity for m in result.measurements if m.verdict is Verdict.PASS} >= {"sin"}
    assert not result.holds
