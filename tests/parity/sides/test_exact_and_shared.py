"""Exact parameters and shared tables of a side change its float64 runs, and no other."""

from __future__ import annotations

import copy
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from parity.port.side_runs import SideRuns
from parity.sides import FunctionSide, SideError, TorchSide
from parity.sides.side import Precision, Rounding, Run

RNG = np.random.default_rng(0)
BIAS = RNG.normal(size=4).astype(np.float32)
EXACT = BIAS.astype(np.float64) * (1 + 2.0**-26)
"""The bias with digits that float32 does not have."""
TABLE, PHASES = RNG.normal(size=(3, 4)).astype(np.float32), np.exp(1j * RNG.normal(size=4))
X = RNG.normal(size=(3, 4)).astype(np.float32)


class Module(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.from_numpy(BIAS.copy()))
        self.register_buffer("table", torch.from_numpy(TABLE))
        self.phases = torch.from_numpy(PHASES.astype(np.complex64))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            "sum": x + self.bias,
            "table": x * 0 + self.table,
            "phases": x * 0 + self.phases.real,
        }


def function(params: Any, x: Any) -> Any:
    phases = jnp.asarray(PHASES.astype(np.complex64))
    return {
        "sum": x + params["bias"],
        "table": x * 0 + jnp.asarray(TABLE),
        "phases": x * 0 + phases.real,
    }


SIDES = {
    "torch": lambda: TorchSide(Module(), X),
    "function": lambda: FunctionSide(function, {"bias": BIAS}, X),
}


@pytest.fixture(params=SIDES)
def side(request: pytest.FixtureRequest) -> Any:
    return SIDES[request.param]()


def outputs(side: Any, *how: Any, **more: Any) -> dict[str, np.ndarray]:
    trace = side.run(Run(*how, **more))
    return {name.removeprefix("output."): trace.stages[name] for name in trace.outputs}


def test_an_exact_parameter_is_that_of_float64_runs_alone(side: Any) -> None:
    exact = side.with_exact({"bias": EXACT})
    for name, x in outputs(side, Precision.FLOAT32).items():
        np.testing.assert_array_equal(outputs(exact, Precision.FLOAT32)[name], x)
    np.testing.assert_array_equal(
        outputs(exact, Precision.FLOAT64)["sum"], X.astype(np.float64) + EXACT
    )
    # The side that it was made from is as before.
    np.testing.assert_array_equal(
        outputs(side, Precision.FLOAT64)["sum"], X.astype(np.float64) + BIAS
    )
    np.testing.assert_array_equal(exact.parameters()["bias"], BIAS)
    with pytest.raises(SideError, match="other"):
        side.with_exact({"other": EXACT})


def test_a_shared_table_is_not_moved_and_another_one_is(side: Any) -> None:
    still = outputs(side, Precision.FLOAT64)
    moved = outputs(side, Precision.FLOAT64, Rounding.CONSTANTS)
    assert all(np.any(moved[name] != still[name]) for name in ("table", "phases"))
    tables = {x.shape: x for x in side.tables()}
    for name, shape in (("table", (3, 4)), ("phases", (4,))):
        shared = side.sharing([tables[shape]])
        kept = outputs(shared, Precision.FLOAT64, Rounding.CONSTANTS)
        equal = {n for n in ("table", "phases") if np.array_equal(kept[n], still[n])}
        assert equal == {name}


def test_the_noise_of_operations_includes_the_rounding_of_a_sum(side: Any) -> None:
    """The sum was rounded once, to float32, when the port's parameter was made."""
    runs = SideRuns(_identity(side), None, sums={"bias": EXACT})
    assert runs.wide is not None
    [name] = runs.wide.outputs
    np.testing.assert_array_equal(runs.wide.stages[name], EXACT)
    moved = [runs.moved(Rounding.OPERATIONS, seed).stages[name] / EXACT - 1 for seed in range(4)]
    # One unit roundoff of float32, up to float64's rounding of the quotient.
    np.testing.assert_array_equal(np.rint(np.abs(moved) * 2.0**34), 2.0**10)
    assert len({tuple(np.sign(each)) for each in moved}) > 1, "each draw has its own signs"
    # Tables move, the sum does not.
    tables = runs.moved(Rounding.CONSTANTS, 0).stages[name]
    np.testing.assert_array_equal(tables, EXACT)


def _identity(side: Any) -> Any:
    """Return a side of the same library whose result is its parameter, without an operation."""
    if isinstance(side, TorchSide):
        return TorchSide(side.module, X, call=lambda module, x: module.bias)
    return FunctionSide(lambda params, x: params["bias"], {"bias": BIAS}, X)


@pytest.mark.parametrize("kind", ["sparse", "meta", "float8", "lazy"])
def test_a_tensor_that_is_no_array_is_refused_as_a_buffer_and_no_table(kind: str) -> None:
    made = {
        "sparse": lambda: torch.eye(4).to_sparse(),
        "meta": lambda: torch.ones(4, device="meta"),
        "float8": lambda: torch.ones(4).to(torch.float8_e4m3fn),
        "lazy": torch.nn.parameter.UninitializedBuffer,
    }[kind]()
    module = Module()
    module.other = made
    count = len(TorchSide(Module(), X).tables())
    if kind != "lazy":
        assert len(TorchSide(module, X).tables()) == count
    module = Module()
    module.register_buffer("other", made)
    with pytest.raises(SideError, match="or float64, got other, a "):
        TorchSide(module, X).parameters()


@pytest.mark.parametrize("where", ["bias", "attribute", "buffer"])
def test_a_tensor_made_in_inference_mode_is_refused_with_what_to_do(where: str) -> None:
    module = Module()
    module.register_buffer("buffer", torch.zeros(4))
    with torch.inference_mode():
        made = torch.ones(4)
        setattr(module, where, torch.nn.Parameter(made) if where == "bias" else made)
    with pytest.raises(SideError, match=rf"got {where}, made under .*: pass copy\.deepcopy"):
        TorchSide(module, X).parameters()
    copied = TorchSide(copy.deepcopy(module), X)
    assert copied.parameters().keys() == TorchSide(Module(), X).parameters().keys() | {"buffer"}
    copied.run(Run(cotangents={"output.sum": np.ones_like(X)}))


def test_weights_of_whole_numbers_are_read_as_they_are() -> None:
    module = Module()
    module.quantised = torch.nn.Parameter(torch.arange(4, dtype=torch.int8), requires_grad=False)
    np.testing.assert_array_equal(TorchSide(module, X).parameters()["quantised"], range(4))


def test_other_parameters_keep_the_exact_ones(side: Any) -> None:
    exact = side.with_exact({"bias": EXACT})
    wide = Run(Precision.FLOAT64)
    again = exact.with_parameters({})
    np.testing.assert_array_equal(again.run(wide).stages["output.sum"],
                                  exact.run(wide).stages["output.sum"])  # fmt: skip
    other = exact.with_parameters({"bias": 2 * BIAS})
    np.testing.assert_array_equal(other.run(wide).stages["output.sum"],
                                  X.astype(np.float64) + 2 * BIAS)  # fmt: skip


def test_other_inputs_are_those_of_the_copy_alone(side: Any) -> None:
    exact = Run(Precision.FLOAT64)
    before = side.run(exact).stages["output.sum"]
    other = side.with_inputs(lambda x: 2 * x)
    np.testing.assert_array_equal(
        other.run(exact).stages["output.sum"], 2 * X.astype(np.float64) + BIAS
    )
    assert {x.dtype for x in other.inputs().values()} == {X.dtype}
    np.testing.assert_array_equal(side.run(exact).stages["output.sum"], before)
