"""A port holds only where its results were compared: what was not has a reason in the ledger."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import warnings
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
import torch
from jax.ad_checkpoint import checkpoint_name

from parity import CapturedSide, FunctionSide, Port, PortError, TorchSide, capture, compare
from parity.engine.measure.compare import Comparison, Work
from parity.engine.measure.measurement import Verdict
from parity.engine.measure.quantity import stage_kind
from parity.engine.pairing.alignment import AlignmentError
from parity.engine.pairing.parameter_pairs import Matching
from parity.engine.programs.exits import ExitError
from parity.port import exact
from parity.port.compare import _digest
from parity.port.exact import compare_exactly, exact_partners
from parity.port.ledger import (
    ALL_DERIVATIVES,
    BETWEEN,
    BY_INPUT,
    FROZEN,
    NO_OUTPUT,
    UPDATED,
    Entry,
    Role,
    has_output,
    ledger_of,
)
from parity.port.report import NAMES
from parity.port.rounding_floors import PortBounds
from parity.port.side_runs import covering
from parity.port_tolerances import PortEdge
from parity.sides.side import AS_IS, Precision, Rounding, SideError, Trace
from tests.parity.port.twins import flax_side, torch_side
from tests.reports.nights import measurement

WIDTH = 6
X = np.random.default_rng(2).standard_normal((4, WIDTH)).astype(np.float32)
FAST: dict[str, Any] = {"gradients": False, "bfloat16": False}


class Head(torch.nn.Module):
    """A linear map, and what `then` makes of it."""

    def __init__(self, then) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.head = torch.nn.Linear(WIDTH, WIDTH)
        self.then = then

    def forward(self, x):
        return self.then(self.head(x))


def port_of(theirs, ours, **how) -> Port:
    module = Head(theirs)
    params = {"weight": module.head.weight.detach().numpy(), "bias": module.head.bias.detach()}
    side = FunctionSide(lambda p, x: ours(x @ p["weight"].T + p["bias"]), params, X)
    return Port("returned", TorchSide(module, X), side, **(FAST | how))


def both(theirs, ours, **how):
    return compare(port_of(theirs, ours, **how))


def lower(y):
    return y.masked_fill(torch.ones_like(y).tril() == 0, -torch.inf)


def lower_jax(y, at=0):
    return jnp.where(jnp.tril(jnp.ones_like(y), at) == 0, -jnp.inf, y)


SILENT = {
    "infinite": (lambda y: y * 0 + torch.inf, lambda y: y * 0 + jnp.inf),
    "masked": (lower, lower_jax),
    "zero": (lambda y: y * 0, lambda y: y * 0),
    "constant": (lambda y: y * 0 + 5, lambda y: y * 0 + 5),
    "transposed": (lambda y: y, lambda y: y.T),
    "flattened": (lambda y: y, lambda y: y.reshape(-1)),
    "one more axis": (lambda y: y, lambda y: y[None]),
    "a second result is missing": (lambda y: (y, y.exp()), lambda y: (y,)),
    "whole numbers differ": (lambda y: (y, y.argmax(-1)), lambda y: (y, y.argmin(-1))),
    "bools differ": (lambda y: (y, y > 0), lambda y: (y, y >= y.max())),
    "whole numbers without one": (
        lambda y: (y, y.argmax(-1)[:0]),
        lambda y: (y, y.argmax(-1)[:0]),
    ),
    "whole numbers are missing": (lambda y: (y, y.argmax(-1)), lambda y: (y,)),
    "whole numbers are bools": (lambda y: (y, (y > 0).long()), lambda y: (y, y > 0)),
    "whole numbers have another axis": (
        lambda y: (y, y.argmax(-1)),
        lambda y: (y, y.argmax(-1)[None]),
    ),
    "beyond every mask": (lambda y: y * 2e30, lambda y: abs(y) * 1e30 * jnp.sign(y)),
}
"""Pairs that a comparison once called equal: the original, and the port."""


@pytest.mark.parametrize("name", SILENT)
def test_agreement_of_nothing_does_not_hold(name):
    report = both(*SILENT[name])
    assert not report.holds, report.text()
    # Also for who reads the measurements alone, as the verdict of a stored run does.
    assert any(m.verdict in (Verdict.FAIL, Verdict.NOT_COMPARABLE) for m in report.measurements)
    assert any(entry.reason for entry in report.ledger) or report.failures


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("masked", "set Port(masked_outputs=True) if these are masks"),
        ("zero", "nothing compared: 0 everywhere on both sides"),
        ("transposed", "expected shape (4, 6), received (6, 4); the values agree when transposed"),
        ("flattened", "expected shape (4, 6), received (24,); the values agree when reshaped"),
        ("one more axis", "expected shape (4, 6), received (1, 4, 6); the values agree"),
        ("a second result is missing", "output[1] fails"),
        ("whole numbers differ", "of 4 whole numbers or bools differ"),
        ("whole numbers are bools", "expected int64, received bool"),
        ("whole numbers have another axis", "expected shape (4,), received (1, 4)"),
    ],
)
def test_the_sentence_says_what_is_wrong(name, told):
    assert told in both(*SILENT[name]).sentence()


def test_values_that_do_not_agree_in_another_shape_are_not_said_to():
    assert "values agree" not in both(lambda y: y, lambda y: jnp.exp(y).T).sentence()


def test_a_stage_that_is_not_returned_is_named():
    report = compare(
        Port(
            "twin",
            torch_side(),
            flax_side(),
            **FAST,
            not_compared={"output.hidden": "the port keeps it"},
        )
    )
    assert report.holds, report.text()
    assert [(e.name, e.reason) for e in report.left_out if e.role is Role.OUTPUT] == [
        ("output.hidden", "the port keeps it")
    ]


def test_masks_of_results_agree_where_the_case_says_so_and_float64_has_them():
    assert both(lower, lower_jax, masked_outputs=True).holds
    # A result that the original gives another name is one, too.
    named = lambda y: {"logits": lower(y)}  # noqa: E731
    assert both(named, lower_jax, masked_outputs=True).holds
    assert not both(named, lower_jax).holds
    # In other places: a mask that is off by one is no mask that agrees.
    assert not both(lower, lambda y: lower_jax(y, 1), masked_outputs=True).holds
    # An overflow of float32 that float64 does not have, though both sides have it.
    grown = (lambda y: (y * 150).exp() ** 2, lambda y: jnp.exp(y * 150) ** 2)
    report = both(*grown, masked_outputs=True)
    assert not report.holds, report.text()


def test_an_infinity_of_both_float32_runs_that_float64_does_not_have_fails():
    """Stages may hold masks, and an overflow is none."""

    def theirs(y):
        return torch.tanh((y * 60).exp() ** 2)

    module = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), Grown(), torch.nn.Tanh())
    params = {"weight": module[0].weight.detach().numpy(), "bias": module[0].bias.detach()}

    def ours(p, x):
        grown = jnp.exp((x @ p["weight"].T + p["bias"]) * 300)
        return jnp.tanh(jax.ad_checkpoint.checkpoint_name(grown, "1"))

    report = compare(Port("grown", TorchSide(module, X), FunctionSide(ours, params, X), **FAST))
    edges = {m.edge for m in report.failures if m.quantity == "1"}
    assert PortEdge.PORT32_ORIGINAL32 in edges, report.text()


class Grown(torch.nn.Module):
    def forward(self, x):
        return (x * 300).exp()


def test_nothing_but_masks_is_nothing_compared():
    report = both(*SILENT["infinite"], masked_outputs=True)
    assert not report.holds
    [row] = [m for m in report.measurements if m.quantity == NO_OUTPUT]
    assert row.verdict is Verdict.NOT_COMPARABLE and "no finite number" in row.note


def test_constants_that_differ_fail_and_one_constant_among_results_is_told():
    assert both(lambda y: y * 0, lambda y: y * 0 + 1).failures
    report = both(lambda y: (y, y * 0), lambda y: (y, y * 0))
    assert report.holds
    [entry] = [e for e in report.left_out if e.role is Role.OUTPUT]
    assert (entry.name, "0 everywhere on both sides" in entry.reason) == ("output[1]", True)
    # A number alone is no constant.
    assert both(lambda y: y.sum(), lambda y: y.sum()).holds
    assert not both(lambda y: 0 * y.sum(), lambda y: 0 * y.sum()).holds


def test_only_valid_positions_make_a_result():
    """Where padding is 0 and the rest is one number, nothing is compared either."""
    valid = np.ones((4, WIDTH), bool)
    valid[:, 4:] = False
    constant = (lambda y: y * 0 + 5, lambda y: y * 0 + 5)
    assert not both(*constant, valid=valid).holds


def test_a_derivative_has_no_positions_even_if_its_shape_has():
    """It is 0 at the valid positions and not beyond them; valid positions are of outputs alone."""
    valid = np.ones((4, WIDTH), bool)
    valid[:, 3:] = False
    params = {"shift": np.random.default_rng(3).standard_normal((4, WIDTH), np.float32)}

    def rolled(p, x):
        return jnp.roll(jnp.sin(x + p["shift"]), 3, axis=1)

    sides = [FunctionSide(rolled, params, X) for _ in range(2)]
    report = compare(Port("rolled", *sides, valid=valid, bfloat16=False))
    assert report.holds, report.text()
    assert "grad/shift" in {str(m.quantity) for m in report.measurements}
    assert not [e for e in report.left_out if e.role is Role.GRADIENT], report.left_out


def test_whole_numbers_that_agree_are_gates():
    report = both(
        lambda y: {"y": y, "best": y.argmax(-1), "up": y > 0, "n": 4},
        lambda y: {"y": y, "best": y.argmax(-1), "up": y > 0, "n": 4},
    )
    assert report.holds, report.text()
    gates = {(m.quantity, m.edge) for m in report.measurements if m.metric == "unequal"}
    edges = (PortEdge.PORT64_ORIGINAL64, PortEdge.PORT32_ORIGINAL32)
    assert gates == {(f"output.{n}", edge) for n in ("best", "up", "n") for edge in edges}
    assert all(entry.compared for entry in report.ledger if entry.role is Role.OUTPUT)


def test_a_number_of_python_is_compared_as_an_array():
    pair = (lambda y: (y, 1.5, {"c": 2.5 - 1j}), lambda y: (y, 1.5, {"c": 2.5 - 1j}))
    report = both(*pair, gradients=True, bfloat16=True)
    assert report.holds, report.text()
    gates = {m.quantity for m in report.measurements if m.metric == "rel_l2"}
    assert {"output[1]", "output[2].c"} <= gates
    assert all(e.compared for e in report.ledger if e.role is Role.OUTPUT)
    report = both(pair[0], lambda y: (y, 1.5001, {"c": 2.5 - 1j}))
    assert {m.quantity for m in report.failures} == {"output[1]"}
    report = both(pair[0], lambda y: (y, 1.5, {"c": 2.5 - 2j}))
    assert {m.quantity for m in report.failures} == {"output[2].c"}
    # NaN agrees with nothing, and what one side lacks is missing.
    assert both(lambda y: (y, float("nan")), lambda y: (y, float("nan"))).failures
    assert both(lambda y: (y, 1.5), lambda y: (y,)).failures
    # 0.1 is another number in float32 than in float64, on both sides.
    assert both(lambda y: (y, 0.1), lambda y: (y, 0.1)).holds


def test_a_number_that_torch_computed_is_compared_with_an_array():
    assert both(lambda y: (y, y.sum().item()), lambda y: (y, jnp.sum(y))).holds
    assert both(lambda y: (y, y.detach().numpy()), lambda y: (y, y)).holds
    report = both(lambda y: (y, y.sum().item()), lambda y: (y, jnp.max(y)))
    assert {m.quantity for m in report.failures} == {"output[1]"}


def test_a_loss_that_is_a_number_has_no_derivative():
    with pytest.raises(SideError, match="has no derivative"):
        both(lambda y: (y, y.sum()), lambda y: (y, 1.5), gradients=True, loss="output[1]")


def test_whole_numbers_pair_by_name_then_by_shape():
    three, four = np.arange(3), np.arange(4)
    ours = {"b": three, "x": four, "y": three}
    assert exact_partners({"a": three, "b": three, "c": four}, ours) == {
        "b": "b",
        "a": "y",
        "c": "x",
    }
    assert exact_partners({"a": three}, {"x": four}) == {}
    assert exact_partners({"a": np.zeros((2, 3))}, {"x": np.zeros(6)}) == {}
    # Two of one shape have a partner each, and a third has none.
    two = {"x": three, "y": three}
    assert exact_partners({"a": three, "b": three}, two) == {"a": "x", "b": "y"}
    assert exact_partners(dict.fromkeys("abc", three), two) == {"a": "x", "b": "y"}
    assert exact_partners({"a": three}, {"y": three, "x": three}) == {"a": "y"}, "the next one"
    # A name that both have is kept, also beside a free one of the same shape.
    beside = {"a": three, "x": three}
    assert exact_partners({"a": three, "b": three}, beside) == {"a": "a", "b": "x"}


def test_what_is_no_array_is_in_the_ledger():
    report = both(lambda y: {"y": y, "kind": "linear"}, lambda y: {"y": y})
    assert report.holds
    reasons = {e.name: e.reason for e in report.left_out}
    assert reasons["output.kind"].startswith("a str, not an array")
    assert "not compared: output output.kind" in report.text()


def test_every_derivative_is_in_the_ledger():
    report = both(lambda y: y, lambda y: y)
    assert [e.reason for e in report.left_out if e.name == ALL_DERIVATIVES]
    report = both(lambda y: y.tanh(), jnp.tanh, gradients=True)
    entries = {e.name: e for e in report.ledger if e.role is Role.GRADIENT}
    assert set(entries) == {"head.weight", "head.bias"}
    assert all(e.compared for e in entries.values())
    # Zero on both sides: told, and no failure of a healthy port.
    report = both(lambda y: (y, y.detach())[1] + 0, jax.lax.stop_gradient, gradients=True)
    assert report.holds
    zeros = [e for e in report.left_out if e.role is Role.GRADIENT]
    assert {e.name for e in zeros} == {"head.weight", "head.bias"}
    assert all("0 everywhere" in e.reason for e in zeros)
    # A port that detaches its input holds: nobody asked for a derivative by it.
    assert [e for e in report.left_out if e not in zeros] == [
        Entry("0", Role.INPUT, reason=BY_INPUT)
    ]
    assert f"not compared: derivative by input 0: {BY_INPUT}" in report.text()
    gates = [m for m in report.measurements if m.verdict is not Verdict.INFO]
    assert not any(m.quantity.startswith("grad/") for m in gates)


def test_a_parameter_that_the_port_lacks_is_in_the_ledger():
    module = Head(lambda y: y)
    module.unused = torch.nn.Parameter(torch.arange(3.0))
    params = {"weight": module.head.weight.detach().numpy(), "bias": module.head.bias.detach()}
    side = FunctionSide(lambda p, x: x @ p["weight"].T + p["bias"], params, X)
    report = compare(Port("unused", TorchSide(module, X), side, bfloat16=False))
    assert {e.name: e.reason for e in report.left_out} == {
        "unused": "the port has no counterpart of it",
        "0": BY_INPUT,
    }


def test_a_ledger_without_a_reason_is_refused():
    for compared, reason in ((False, ""), (True, "why")):
        with pytest.raises(AssertionError, match="neither"):
            Entry("output", Role.OUTPUT, compared=compared, reason=reason)


def test_a_derivative_that_was_compared_is_no_result():
    derivative = Entry("weight", Role.GRADIENT, "weight", compared=True)
    assert not has_output([derivative])
    assert has_output([derivative, Entry("output", Role.OUTPUT, "output", compared=True)])


def test_a_result_is_left_out_with_what_is_below_it_and_not_by_its_beginning():
    names = ["output.cache"]
    assert all(covering(n, names) for n in ("output.cache", "output.cache[0]", "output.cache.k"))
    assert covering("output.cache2", names) is None and covering("output", names) is None


@pytest.mark.parametrize("returned", [False, True])
def test_a_result_that_is_only_computed_inside_is_not_returned(returned: bool):
    """Its value is compared as a stage; a user of the port still does not get it."""

    def ours(y):
        inner = checkpoint_name(jnp.exp(y / 8), "inner")
        return (inner.sum(-1), inner) if returned else (inner.sum(-1),)

    report = both(lambda y: ((y / 8).exp().sum(-1), (y / 8).exp()), ours)
    assert report.holds is returned, report.text()
    entry = next(e for e in report.ledger if e.name == "output[1]")
    assert entry.compared is returned
    if not returned:
        assert {row.quantity for row in report.failures} == {"output[1]"}
        told = "computes it as inner and does not return it"
        assert all(told in row.note for row in report.failures)


def test_what_a_case_leaves_out_needs_a_name_and_a_reason():
    pair = (lambda y: (y, y.exp()), lambda y: (y,))
    left_out = {"output[1]": "the port does not return it"}
    report = both(*pair, not_compared=left_out)
    assert report.holds
    assert {e.name: e.reason for e in report.left_out if e.role is Role.OUTPUT} == left_out
    with pytest.raises(PortError, match=r"names output\[7\], which no side returns"):
        both(*pair, not_compared={"output[7]": "why"})
    with pytest.raises(PortError, match="no reason"):
        both(*pair, not_compared={"output[1]": " "})
    # All of them: then there is nothing to compare.
    with pytest.raises(AlignmentError):
        both(*pair, not_compared={"output": "why"})


class Biased(torch.nn.Module):
    """A map with biases by name: of one bias, or of several that are added."""

    def __init__(self, **biases: np.ndarray) -> None:
        super().__init__()
        weight = np.random.default_rng(3).standard_normal((3, 2)).astype(np.float32)
        for name, value in {"weight": weight, **biases}.items():
            self.register_parameter(name, torch.nn.Parameter(torch.tensor(value)))
        self.biases = list(biases)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.weight
        for name in self.biases:
            y = y + getattr(self, name)
        return torch.tanh(y)


ONE, NONE = np.float32([0.5, -1.5]), np.zeros(2, np.float32)
ROWS = np.random.default_rng(4).standard_normal((4, 3)).astype(np.float32)


@pytest.mark.parametrize("swapped", [False, True], ids=["of the port", "of the original"])
def test_a_parameter_that_only_one_side_needs_can_be_declared(swapped: bool) -> None:
    """A second bias of 0, as torch's LSTM has beside one that Keras keeps as one."""
    modules = [Biased(b=ONE), Biased(b_ih=ONE, b_hh=NONE)]
    sides = [TorchSide(m, ROWS) for m in (reversed(modules) if swapped else modules)]
    assert not compare(Port("p", *sides)).holds
    why = {"b_hh": "the other side keeps one bias"}
    report = compare(Port("p", *sides, not_compared=why))
    assert report.holds, report.text()
    told = {e.name: e.reason for e in report.left_out if e.role is Role.PARAMETER}
    assert told == why
    assert "not compared: parameter b_hh: the other side keeps one bias" in report.text()


def sides_of(*modules: torch.nn.Module) -> list[TorchSide]:
    return [TorchSide(module, ROWS) for module in modules]


def test_a_declared_parameter_hides_no_other_and_no_result() -> None:
    sides = sides_of(Biased(b=ONE), Biased(b=ONE, c=NONE, d=NONE))
    report = compare(Port("p", *sides, not_compared={"c": "why"}))
    assert not report.holds and "not the original's: d" in report.text()
    moved = sides_of(Biased(b=ONE), Biased(b=ONE, c=ONE))
    report = compare(Port("p", *moved, not_compared={"c": "why"}))
    assert {row.quantity for row in report.failures} >= {"output"}
    told = r"names weight, which no side .* that only one .*or parameters such as c, d$"
    with pytest.raises(PortError, match=told):
        compare(Port("p", *sides, not_compared={"weight": "why"}))
    with pytest.raises(PortError, match="no reason for c"):
        compare(Port("p", *sides, not_compared={"c": ""}))


@pytest.mark.parametrize("other", [ONE + np.float32(1), ONE[::-1].copy(), ONE])
def test_a_parameter_that_both_sides_have_cannot_be_declared(other: np.ndarray) -> None:
    """With other values, in another order, or equal."""
    sides = sides_of(Biased(b=ONE), Biased(b=other))
    with pytest.raises(PortError, match="names b, which no side returns, and which is no par"):
        compare(Port("p", *sides, not_compared={"b": "why"}))


def test_a_name_that_both_sides_have_declares_no_parameter_of_one() -> None:
    """Each has a bias `c` that the other lacks: one reason would be for two."""
    sides = sides_of(Biased(b=ONE, c=NONE), Biased(b=ONE, c=NONE[:1]))
    with pytest.raises(PortError, match="names c, which no side returns, and which is no par"):
        compare(Port("p", *sides, not_compared={"c": "why"}))


class Named(Biased):
    """A map whose result and one of whose parameters have one name."""

    def __init__(self, **biases: np.ndarray) -> None:
        super().__init__(**biases)
        self.output = torch.nn.Module()
        self.output.y = torch.nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = super().forward(x) + self.output.y
        return {"y": y, "z": y * 2}


def test_a_name_of_a_parameter_and_a_result_is_refused() -> None:
    """Else the reason for the parameter would hide the result."""
    original = TorchSide(Biased(b=ONE), ROWS, call=lambda module, x: {"y": module(x), "z": x})
    port = TorchSide(Named(b=ONE), ROWS)
    with pytest.raises(PortError, match=r"names output\.y, which is a parameter and an output"):
        compare(Port("p", original, port, not_compared={"output.y": "a second bias"}))


@pytest.mark.parametrize("names", [["c"], "c", {"c": None}, {1: "why"}])
def test_what_is_no_mapping_of_names_to_reasons_is_refused(
    names: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    sides = sides_of(Biased(b=ONE), Biased(b=ONE, c=NONE))
    with pytest.raises(PortError, match="not_compared= as a mapping of names to reasons, got"):
        compare(Port("p", *sides, not_compared=names))


@pytest.mark.parametrize(
    ("theirs", "ours", "whose"),
    [
        (lambda y: y, lambda y: sys.exit(0), "the port (function)"),
        (lambda y: sys.exit(0), lambda y: y, "the original (torch)"),
    ],
    ids=["port", "original"],
)
def test_an_exit_in_a_side_is_an_error_that_names_it(theirs, ours, whose):
    with pytest.raises(ExitError) as error:
        both(theirs, ours)
    assert whose in str(error.value) and "sys.exit(0)" in str(error.value)


def swallowed():
    with contextlib.suppress(SystemExit):
        os._exit(0)


@pytest.mark.parametrize("exits", [lambda: os._exit(0), swallowed])
def test_os_exit_in_a_side_is_an_error_that_names_it(exits):
    before = os._exit
    for pair in ((lambda y: y, lambda y: exits() or y), (lambda y: exits() or y, lambda y: y)):
        with pytest.raises(ExitError, match=r"called os\._exit\(0\)"):
            both(*pair)
    assert os._exit is before


def test_a_child_of_a_side_ends_by_os_exit():
    def theirs(y):
        child = os.fork()
        if not child:
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        return y

    with warnings.catch_warnings():
        # JAX says that its threads do not survive a fork; this child uses none of them.
        warnings.simplefilter("ignore")
        assert both(theirs, lambda y: y).holds


def test_an_exit_in_float64_alone_is_no_side_without_float64():
    def theirs(y):
        return sys.exit() if y.element_size() > 4 else y

    with pytest.raises(ExitError, match="the original"):
        both(theirs, lambda y: y)


def test_a_side_that_returns_other_whole_numbers_each_time_is_not_deterministic():
    seen = []

    def theirs(y):
        seen.append(y)
        return y, torch.tensor([len(seen), 0])

    report = both(theirs, lambda y: (y, jnp.asarray([1, 0])))
    assert "not deterministic" in report.sentence() and "output[1]" in report.sentence()


def test_a_report_whose_ledger_has_no_result_does_not_hold():
    report = both(lambda y: y, lambda y: y)
    assert report.holds
    assert not replace(report, ledger=()).holds


def test_bfloat16_whose_rounding_is_no_number_was_not_measured(monkeypatch):
    pair = (lambda y: (y, y.tanh()), lambda y: (y, jnp.tanh(y)))
    assert both(*pair, bfloat16=True).holds
    run = FunctionSide.run

    def spoilt(self, how=AS_IS):
        trace = run(self, how)
        if (how.precision, how.rounding, how.seed) == (
            Precision.BFLOAT16,
            Rounding.OPERATIONS,
            2,
        ):
            trace.stages["output[1]"] = trace.stages["output[1]"] * np.nan
        return trace

    monkeypatch.setattr(FunctionSide, "run", spoilt)
    report = both(*pair, bfloat16=True)
    bad = [m for m in report.measurements if m.verdict is Verdict.NOT_COMPARABLE]
    assert [(m.quantity, m.edge) for m in bad] == [("output[1]", PortEdge.PORTBF16_PORT64)]
    assert not report.holds and "not measured" in report.sentence()


def test_masks_agree_in_bfloat16_too():
    assert both(lower, lower_jax, masked_outputs=True, bfloat16=True).holds
    report = both(lower, lower_jax, bfloat16=True)
    assert PortEdge.PORTBF16_PORT64 in {m.edge for m in report.failures}


GATES = {
    "held": {},
    "failed": {"value": 1.0, "verdict": Verdict.FAIL},
    "missing": {"value": math.inf, "tolerance": math.nan, "verdict": Verdict.FAIL},
    "no bound": {"tolerance": math.nan, "verdict": Verdict.NOT_COMPARABLE},
    "infinite bound": {"tolerance": math.inf, "verdict": Verdict.FAIL},
    "a fact": {"tolerance": math.nan, "verdict": Verdict.INFO},
    "another metric": {"metric": "max_abs"},
    "another result": {"quantity": "hidden"},
    "whole numbers": {"metric": "unequal"},
}
COMPARED = ("held", "failed", "whole numbers")


@pytest.mark.parametrize("edge", PortEdge)
@pytest.mark.parametrize("gate", GATES)
def test_a_result_was_compared_where_a_gate_between_both_sides_was_measured(gate, edge) -> None:
    """A side beside itself says nothing of the other, and a gate without a bound nothing at all."""
    row = measurement(**{"edge": edge, "quantity": "output", **GATES[gate]})
    trace = Trace({"output": X}, ("output",))
    [entry, _] = ledger_of(
        [row],
        trace,
        {"output": "output"},
        Matching(()),
        left_out={},
        without_derivatives="nobody asked",
    )
    assert entry.compared is (gate in COMPARED and edge in BETWEEN)
    assert {e for e in PortEdge if len({s.startswith("port") for s in e.sides}) == 2} == {*BETWEEN}


@dataclass
class Held:
    """A side of which nothing but what it holds is asked."""

    kind: str
    weights: np.ndarray
    x: np.ndarray

    def parameters(self) -> dict[str, np.ndarray]:
        return {"w": self.weights}

    def inputs(self) -> dict[str, np.ndarray]:
        return {"x": self.x}

    def run(self, how: object) -> Trace:
        raise AssertionError("not asked")


def test_the_work_of_a_port_is_all_that_decides_its_numbers() -> None:
    """Each part of it by itself: rows of other work are no history of one another."""

    def digest(title="port", kinds=("torch", "jax"), case="", **changed) -> str:
        def side(which: int, kind: str) -> Held:
            weights = changed.get(f"w{which}", np.ones((2, 3), np.float32))
            return Held(kind, weights, changed.get(f"x{which}", np.zeros(4, np.float32)))

        return _digest(Port(title, *map(side, range(2), kinds), case=case))

    same = np.ones((2, 3), np.float32)
    other = same.copy()
    other[1, 2] = np.nextafter(np.float32(1), np.float32(2))
    digests = [digest(), digest("other"), digest(kinds=("torch", "flax")), digest(case="padding")]
    for which in "01":
        for w in (other, same.reshape(3, 2), same.view(np.int32), same.astype(np.float64)):
            digests.append(digest(**{f"w{which}": w}))
        for x in (np.ones(4, np.float32), np.zeros((2, 2), np.float32), np.zeros(5, np.float32)):
            digests.append(digest(**{f"x{which}": x}))
    assert len(set(digests)) == len(digests)
    assert digest(w0=same.copy(), x1=np.zeros(4, np.float32)) == digests[0]


def test_whole_numbers_that_one_side_alone_returns_fail_by_their_own_name():
    """Paired by shape under other names, they are compared once; what is left over is missing."""
    edge = PortEdge.PORT64_ORIGINAL64
    comparison = Comparison(Work("w", "h", ()), edge, PortBounds({}), "float64", kinds=stage_kind)
    original = {"ids": np.arange(3), "lengths": np.arange(2)}
    port = {"tokens": np.arange(3), "lengths": np.arange(2), "ids": np.arange(4)}
    partners = {"ids": "tokens", "lengths": "lengths"}
    rows = compare_exactly(comparison, original, port, partners)
    assert {row.quantity: row.verdict for row in rows} == {
        "tokens": Verdict.PASS,
        "lengths": Verdict.PASS,
        "ids": Verdict.FAIL,
    }
    assert len(rows) == 3
    # Of a set they would come in another order in each process.
    many = {f"count{n}": np.arange(2) for n in range(40)}
    assert [row.quantity for row in compare_exactly(comparison, {}, many, {})] == [*many]
    alone = compare_exactly(comparison, original, {}, {})
    assert [(row.quantity, row.verdict) for row in alone] == [(n, Verdict.FAIL) for n in original]


@pytest.mark.parametrize("differ", [0, 1, 3])
def test_each_whole_number_that_differs_counts(differ):
    edge = PortEdge.PORT64_ORIGINAL64
    comparison = Comparison(Work("w", "h", ()), edge, PortBounds({}), "float64", kinds=stage_kind)
    ours = np.arange(4) + (np.arange(4) < differ)
    [row] = compare_exactly(comparison, {"ids": np.arange(4)}, {"ids": ours}, {"ids": "ids"})
    assert (row.value, row.verdict is Verdict.PASS) == (differ, differ == 0)
    assert row.note == (f"{differ} of 4 whole numbers or bools differ" if differ else "")


@pytest.mark.parametrize(
    ("theirs", "ours", "holds"),
    [(bool, np.int32, False), (np.int64, bool, False), (np.int64, np.int32, True)],
)
def test_truth_values_are_no_whole_numbers_on_either_side(theirs, ours, holds):
    """0 and 1 for a mask are another output; the width of whole numbers is a library's choice."""
    edge = PortEdge.PORT64_ORIGINAL64
    comparison = Comparison(Work("w", "h", ()), edge, PortBounds({}), "float64", kinds=stage_kind)
    values = np.array([0, 1, 1])
    original, port = {"kept": values.astype(theirs)}, {"mask": values.astype(ours)}
    [row] = compare_exactly(comparison, original, port, {"kept": "mask"})
    assert (row.verdict is Verdict.PASS) is holds and row.quantity == "mask"
    if not holds:
        assert row.note == f"expected {np.dtype(theirs)}, received {np.dtype(ours)}"


def test_what_is_not_trained_and_what_a_call_updates_is_in_the_ledger(tmp_path):
    port = port_of(lambda y: y.tanh(), jnp.tanh, gradients=True)
    module = port.original.module
    module.head.bias.requires_grad_(False)
    names = [f"count{n}" for n in range(NAMES + 2)]
    for name in names:
        module.register_buffer(name, torch.zeros(2))
    module.register_buffer("still", torch.ones(2))

    def counting(inner, _):
        for name in names:
            getattr(inner, name).add_(1)

    module.register_forward_pre_hook(counting)
    report = compare(port)
    assert report.holds
    left = {entry.name: (entry.role, entry.reason) for entry in report.left_out}
    updated = dict.fromkeys(names, (Role.STATE, UPDATED))
    by_input = {"0": (Role.INPUT, BY_INPUT)}
    assert left == {**updated, "head.bias": (Role.GRADIENT, FROZEN), **by_input}
    text = report.text()
    assert f"not compared: gradient head.bias: {FROZEN}" in text
    assert f"not compared: state {', '.join(names[:NAMES])} and 2 more: {UPDATED}" in text
    # A capture of the original knows them too.
    folder = capture(port.original, tmp_path / "capture")
    captured = compare(replace(port, original=CapturedSide(folder)))
    assert {e.name: (e.role, e.reason) for e in captured.left_out} == left
    # Restored: a port whose arrays share the module's memory would follow.
    assert not any(getattr(module, name).any() for name in names)


@pytest.mark.parametrize("dtypes", [(np.int64, np.uint8), (np.uint8, np.int32)])
def test_whole_numbers_of_two_dtypes_are_compared_and_bools_only_with_bools(dtypes) -> None:
    theirs, ours = dtypes
    mismatch = exact._mismatch
    assert mismatch(np.arange(3, dtype=ours), np.arange(3, dtype=theirs)) == ""
    assert mismatch(np.zeros(3, bool), np.zeros(3, bool)) == ""
    assert "received bool" in mismatch(np.zeros(3, bool), np.zeros(3, theirs))
