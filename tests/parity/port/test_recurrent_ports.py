"""Recurrent cells of other libraries: one bias for two, and gates in another order."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from flax import linen as nn

from parity import FlaxSide, FunctionSide, Port, TorchSide, adopt, compare
from parity.engine.measure.measurement import Verdict
from parity.port.ledger import Role
from parity.port.report import Report
from parity.port_tolerances import PORTS, PortEdge

WIDTH, HIDDEN = 6, 5
X = np.random.default_rng(0).normal(size=(2, 3, WIDTH)).astype(np.float32)


class Gated(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell = torch.nn.GRU(WIDTH, HIDDEN, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cell(x)[0]


class Recurrent(Gated):
    def __init__(self) -> None:
        super().__init__()
        self.cell = torch.nn.LSTM(WIDTH, HIDDEN, batch_first=True)


def _arrays(module: Gated) -> dict[str, np.ndarray]:
    return {n.split("_l0")[0]: p.detach().numpy() for n, p in module.cell.named_parameters()}


def _turns(step: Any, carry: Any, x: jax.Array) -> jax.Array:
    return jnp.swapaxes(jax.lax.scan(step, carry, jnp.swapaxes(x, 0, 1))[1], 0, 1)


def lstm(params: Any, x: jax.Array) -> jax.Array:
    def step(carry: Any, row: jax.Array) -> Any:
        h, c = carry
        z = row @ params["kernel"].T + h @ params["recurrent"].T + params["bias"]
        i, f, g, o = jnp.split(z, 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return ((h := jax.nn.sigmoid(o) * jnp.tanh(c)), c), h

    zero = jnp.zeros((len(x), HIDDEN), x.dtype)
    return _turns(step, (zero, zero), x)


def gru(params: Any, x: jax.Array) -> jax.Array:
    """Gates in the order update, reset, new, where torch has reset first."""

    def step(h: jax.Array, row: jax.Array) -> Any:
        a = row @ params["kernel"].T + params["bias"]
        b = h @ params["recurrent"].T + params["recurrent_bias"]
        za, ra, na = jnp.split(a, 3, -1)
        zb, rb, nb = jnp.split(b, 3, -1)
        z = jax.nn.sigmoid(za + zb)
        h = (1 - z) * jnp.tanh(na + jax.nn.sigmoid(ra + rb) * nb) + z * h
        return h, h

    return _turns(step, jnp.zeros((len(x), HIDDEN), x.dtype), x)


def _compared(module: Gated, port: Any, params: dict[str, np.ndarray]) -> Report:
    return compare(Port("cell", TorchSide(module, X), FunctionSide(port, params, X),
                        bfloat16=False))  # fmt: skip


def _one_bias(module: Gated) -> dict[str, np.ndarray]:
    w = _arrays(module)
    return {"kernel": w["weight_ih"], "recurrent": w["weight_hh"],
            "bias": w["bias_ih"] + w["bias_hh"]}  # fmt: skip


def _broken(report: Report) -> list[Any]:
    return [m for m in report.measurements if m.verdict not in (Verdict.PASS, Verdict.INFO)]


def _float64_gates(report: Report) -> list[Any]:
    edge = PortEdge.PORT64_ORIGINAL64
    return [m for m in report.measurements if m.edge == edge and m.verdict is Verdict.PASS]


def _assert_as_narrow_as_any(report: Report) -> None:
    """No float64 gate is wider than where both sides hold every number bit for bit."""
    largest = max(rule.absolute for rule in PORTS if rule.edge is PortEdge.PORT64_ORIGINAL64)
    gates = _float64_gates(report)
    assert gates and all(m.tolerance <= largest for m in gates), [m.tolerance for m in gates]


def test_one_bias_stands_for_two() -> None:
    module = Recurrent()
    w, params = _arrays(module), _one_bias(module)
    report = _compared(module, lstm, params)
    assert report.holds, report.text()
    # In float64 the port runs with the sum of the two, not with the sum rounded to float32.
    _assert_as_narrow_as_any(report)
    assert "the sum of cell.bias_ih_l0 and cell.bias_hh_l0, rounded once" in report.text()
    assert {e.role for e in report.left_out} == {Role.INPUT}
    # Negative controls: half of a bias, and a bias that is off by more than the sum's rounding.
    assert not _compared(module, lstm, params | {"bias": w["bias_ih"]}).holds
    assert not _compared(module, lstm, params | {"bias": params["bias"] + np.float32(1e-5)}).holds


def test_one_bias_stands_for_two_in_another_order_of_gates() -> None:
    """Haiku's LSTM: no parameter is equal in place, which counted as "nothing is known"."""
    module = Recurrent()
    w = _arrays(module)
    params = {"kernel": w["weight_ih"], "recurrent": w["weight_hh"],
              "bias": w["bias_ih"] + w["bias_hh"]}  # fmt: skip

    def exchanged(library: Any, params: Any) -> Any:
        """Exchange the second and third of four gates, which is its own inverse."""
        order = (0, 2, 1, 3)
        return {
            name: library.concatenate([library.split(a, 4)[gate] for gate in order])
            for name, a in params.items()
        }

    def reordered(params: Any, x: jax.Array) -> jax.Array:
        return lstm(exchanged(jnp, params), x)

    params = exchanged(np, params)

    report = _compared(module, reordered, params)
    assert report.holds, report.text()
    # Negative controls: torch's order of gates, and a bias that is off by more than its rounding.
    assert not _compared(module, lstm, params).holds
    wrong = params | {"bias": params["bias"] + np.float32(1e-5)}
    assert not _compared(module, reordered, wrong).holds


class Projected(Gated):
    """A GRU whose output is multiplied by a matrix, which the port holds as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.out = torch.nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.cell(x)[0])


def test_an_order_of_gates_alone_loosens_no_bound() -> None:
    """Reordered weights are held bit for bit, so both sides agree to float64's rounding."""
    module = Projected()
    w = _arrays(module)
    names = {"kernel": "weight_ih", "recurrent": "weight_hh", "bias": "bias_ih",
             "recurrent_bias": "bias_hh"}  # fmt: skip
    order = (1, 0, 2)
    params = {n: np.concatenate([np.split(w[o], 3)[g] for g in order]) for n, o in names.items()}
    params["out"] = module.out.weight.detach().numpy()
    report = _compared(module, lambda p, x: gru(p, x) @ p["out"].T, params)
    assert report.holds, report.text()
    _assert_as_narrow_as_any(report)


def test_a_sum_of_biases_that_is_stored_in_bfloat16_holds() -> None:
    """Its rounding is that of its dtype, and the float32 run of the port has it."""
    module = Recurrent()
    params = _one_bias(module)
    report = _compared(module, _lstm_in_float32, params | {
        "bias": params["bias"].astype(ml_dtypes.bfloat16)})  # fmt: skip
    assert report.holds, report.text()
    # Negative control: a float32 sum that went through bfloat16 is not the original's.
    narrow = params["bias"].astype(ml_dtypes.bfloat16).astype(np.float32)
    assert not _compared(module, lstm, params | {"bias": narrow + np.float32(1e-5)}).holds


def _lstm_in_float32(params: Any, x: jax.Array) -> jax.Array:
    return lstm(params | {"bias": params["bias"].astype(x.dtype)}, x)


class Normalised(Recurrent):
    """An LSTM, then an RMSNorm of large numbers, where the epsilon hardly counts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = 60 * self.cell(x)[0]
        return y * torch.rsqrt((y**2).mean(-1, keepdim=True) + 1e-5)


@pytest.mark.parametrize("epsilon", [1e-5, 1e-6])
def test_a_wrong_epsilon_behind_a_sum_of_biases_is_found(epsilon: float) -> None:
    """It moves the output by some 1e-7, as much as a bias that is rounded to float32."""
    module = Normalised()

    def port(params: Any, x: jax.Array) -> jax.Array:
        y = 60 * lstm(params, x)
        return y * jax.lax.rsqrt((y**2).mean(-1, keepdims=True) + epsilon)

    report = _compared(module, port, _one_bias(module))
    assert report.holds is (epsilon == 1e-5), report.text()
    failed = {m.quantity for m in report.measurements if m.verdict is Verdict.FAIL}
    edges = {m.edge for m in report.measurements if m.verdict is Verdict.FAIL}
    if epsilon != 1e-5:
        assert "output" in failed and edges == {PortEdge.PORT64_ORIGINAL64}


def partly_summed(params: Any, x: jax.Array) -> jax.Array:
    """Flax's GRU: the biases of the gates reset and update are sums, those of the last are two."""

    def step(h: jax.Array, row: jax.Array) -> Any:
        ra, za, na = jnp.split(row @ params["kernel"].T + params["bias"], 3, -1)
        rb, zb, nb = jnp.split(h @ params["recurrent"].T, 3, -1)
        z = jax.nn.sigmoid(za + zb)
        n = jnp.tanh(na + jax.nn.sigmoid(ra + rb) * (nb + params["last"]))
        h = (1 - z) * n + z * h
        return h, h

    return _turns(step, jnp.zeros((len(x), HIDDEN), x.dtype), x)


def test_a_bias_that_is_a_sum_in_part_is_the_original_s() -> None:
    module = Gated()
    w = _arrays(module)
    first = 2 * HIDDEN
    bias = w["bias_ih"] + np.append(w["bias_hh"][:first], np.zeros(HIDDEN, np.float32))
    params = {"kernel": w["weight_ih"], "recurrent": w["weight_hh"], "bias": bias,
              "last": w["bias_hh"][first:]}  # fmt: skip
    report = _compared(module, partly_summed, params)
    assert report.holds, report.text()
    assert {e.role for e in report.left_out} == {Role.INPUT}
    _assert_as_narrow_as_any(report)
    # Negative controls: the sum of all three, which the last gate does not have, and a last bias
    # that is slightly off.
    assert not _compared(
        module, partly_summed, params | {"bias": w["bias_ih"] + w["bias_hh"]}).holds  # fmt: skip
    wrong = params | {"last": params["last"] + np.float32(1e-5)}
    assert not _compared(module, partly_summed, wrong).holds


def test_gates_in_another_order_hold_where_the_port_computes_with_it() -> None:
    module = Gated()
    w = _arrays(module)
    names = {"kernel": "weight_ih", "recurrent": "weight_hh", "bias": "bias_ih",
             "recurrent_bias": "bias_hh"}  # fmt: skip

    def ordered(*order: int) -> dict[str, np.ndarray]:
        return {n: np.concatenate([np.split(w[o], 3)[i] for i in order]) for n, o in names.items()}

    report = _compared(module, gru, ordered(1, 0, 2))
    assert report.holds, report.text()
    assert "note: parameter kernel in another order" in report.text()
    # Loaded in torch's order, or in a third one, the port computes something else.
    assert not _compared(module, gru, ordered(0, 1, 2)).holds
    third = _compared(module, gru, ordered(2, 0, 1))
    assert not third.holds
    assert "not the original's: bias, kernel, recurrent, recurrent_bias" in third.text()


def _with_biases(module: Gated, values: tuple[float, ...]) -> Gated:
    with torch.no_grad():
        for name, parameter in module.cell.named_parameters():
            if "bias" in name:
                parameter.copy_(torch.tensor(values).repeat_interleave(HIDDEN))
    return module


def test_biases_that_are_constant_in_each_gate_have_the_order_of_their_gates() -> None:
    module = _with_biases(Gated(), (0.0, 1.0, 0.5))
    w = _arrays(module)
    kinds = {"kernel": "weight_ih", "recurrent": "weight_hh", "bias": "bias_ih",
             "recurrent_bias": "bias_hh"}  # fmt: skip
    order = (1, 0, 2)
    params = {n: np.concatenate([np.split(w[o], 3)[i] for i in order]) for n, o in kinds.items()}
    report = _compared(module, gru, params)
    assert report.holds, report.text()


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_constant_biases_have_the_order_of_their_gates(value: float) -> None:
    """Their values are the original's in any order, and their derivatives in one alone."""
    module = _with_biases(Gated(), (value,) * 3)
    w = _arrays(module)

    def moved(x: np.ndarray) -> np.ndarray:
        reset, update, new = np.split(x, 3)
        return np.concatenate([update, reset, new])

    kinds = {"kernel": "weight_ih", "recurrent": "weight_hh", "bias": "bias_ih"}
    params = {port: moved(w[name]) for port, name in kinds.items()}
    params["recurrent_bias"] = moved(w["bias_hh"])
    report = _compared(module, gru, params)
    assert report.holds, report.text()
    _assert_as_narrow_as_any(report)
    for port in ("bias", "recurrent_bias"):
        [pair] = [p for p in report.matching.pairs if p.port == port]
        assert pair.is_equal and "in the order of" in pair.note

    # Right as long as the biases are equal, and wrong after the first step of a training.
    def unmoved(params: Any, x: jax.Array) -> jax.Array:
        update, reset, new = jnp.split(params["bias"], 3)
        return gru({**params, "bias": jnp.concatenate([reset, update, new])}, x)

    report = _compared(module, unmoved, params)
    assert not report.holds
    # The orders of the other parameters are not confirmed while a gate fails.
    assert {m.quantity for m in _broken(report)} == {"grad/bias", "weights"}


class Square(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = torch.nn.Linear(WIDTH, WIDTH)
        self.fc.bias.data.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.fc(x))


@pytest.mark.parametrize("moves_bias", [False, True])
def test_a_bias_does_not_follow_the_inputs_of_a_square_matrix(moves_bias: bool) -> None:
    """Inputs in another order, such as halves that were swapped, are no order of the outputs."""
    module, order = Square(), np.roll(np.arange(WIDTH, dtype=np.int32), WIDTH // 3)
    w = {name: p.detach().numpy() for name, p in module.fc.named_parameters()}
    params = {"fc": {"kernel": w["weight"][:, order], "bias": w["bias"]}}

    def dense(params: Any, x: jax.Array) -> jax.Array:
        bias = params["fc"]["bias"]
        bias = jnp.take(bias, np.argsort(order).astype(np.int32)) if moves_bias else bias
        return jnp.tanh(jnp.take(x, order, axis=-1) @ params["fc"]["kernel"].T + bias)

    report = compare(Port("square", TorchSide(module, X), FunctionSide(dense, params, X),
                          bfloat16=False))  # fmt: skip
    assert report.holds is not moves_bias, report.text()


class Table(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(16, WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.table(ids))


@pytest.mark.parametrize("gradients", [True, False])
def test_another_order_of_rows_that_nothing_uses_is_not_the_original_s(gradients: bool) -> None:
    """Tokens 8 and 9 do not occur: that everything holds says nothing of their rows."""
    module, ids = Table(), np.arange(8)[None]
    table = module.table.weight.detach().numpy()
    exchanged = table[[*range(8), 9, 8, *range(10, 16)]]

    def port(params: Any, ids: jax.Array) -> jax.Array:
        return jnp.tanh(params["table"][ids])

    def report(rows: np.ndarray) -> Report:
        sides = TorchSide(module, ids), FunctionSide(port, {"table": rows}, ids)
        return compare(Port("table", *sides, gradients=gradients, bfloat16=False))

    assert report(table).holds
    wrong = report(exchanged)
    assert not wrong.holds and "not the original's: table" in wrong.text()


class FlaxGated(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.RNN(nn.GRUCell(HIDDEN))(x)


@pytest.mark.sweep
def test_the_parameters_of_a_cell_are_adopted_gate_by_gate() -> None:
    """Flax's GRU: a module for each gate, two sums of biases, and two biases of the last gate."""
    port = FlaxGated()
    params = port.init(jax.random.key(1), X)
    adoption = adopt(Port("cell", TorchSide(Gated(), X), FlaxSide(port, params, X)))
    assert adoption.holds and not adoption.changed, adoption.text()
    assert len(adoption.confirmed) == len(adoption.parameters) == 10
    made: dict[str, Any] = {}
    exec(adoption.source(), made)
    original = {n: p.detach().numpy() for n, p in Gated().named_parameters()}
    for name, values in made["convert"](original).items():
        assert np.array_equal(values, adoption.parameters[name]), name
