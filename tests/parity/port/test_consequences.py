"""Two quantities of one name are told apart from one that is wrong."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.ad_checkpoint import checkpoint_name

from parity.engine.measure.compare import Comparison, Work
from parity.engine.measure.localize import Stage
from parity.engine.measure.quantity import stage_kind
from parity.engine.pairing.alignment import AlignedBy, Alignment, Pin
from parity.engine.pairing.closeness import EQUAL
from parity.engine.pairing.layouts import Layout
from parity.engine.pairing.stage_pairs import Pair
from parity.port import Port, compare
from parity.port.consequences import _may_be_two, compensated, without
from parity.port.localisation import Place
from parity.port.rounding_floors import PortBounds
from parity.port_tolerances import PortEdge
from parity.sides import JaxSide, TorchSide
from tests.parity.port.test_construction_search import Program, X, draw

SCALE = 3.0
IDS = np.array([[4, 1, 0], [2, 2, 3]])


class ScaledTable(torch.nn.Embedding):
    def forward(self, ids):
        return SCALE * super().forward(ids)


class Original(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = ScaledTable(5, 4)
        self.norm = torch.nn.LayerNorm(4)
        self.dense = torch.nn.Linear(4, 6)

    def forward(self, ids):
        return self.dense(self.norm(self.table(ids)))


def ported(scale, wrong=1.0):
    def function(params, ids):
        x = scale * checkpoint_name(params["table"][ids], "table")
        centred = x - jnp.mean(x, -1, keepdims=True)
        variance = jnp.mean(centred**2, -1, keepdims=True)
        x = centred / jnp.sqrt(variance + 1e-5) * params["gain"] + params["shift"]
        x = checkpoint_name(x, "norm")
        return checkpoint_name((x @ params["kernel"] + params["bias"]) * wrong, "dense")

    return function


def compared(scale, wrong=1.0, **how):
    torch.manual_seed(0)
    original = Original()
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    arrays = {name: p.detach().numpy() for name, p in original.named_parameters()}
    params = {
        "table": arrays["table.weight"],
        "gain": arrays["norm.weight"],
        "shift": arrays["norm.bias"],
        "kernel": arrays["dense.weight"].T,
        "bias": arrays["dense.bias"],
    }
    sides = TorchSide(original, IDS), JaxSide(ported(scale, wrong), params, IDS)
    return compare(Port("table", *sides, bfloat16=False, **how))


def test_a_stage_that_differs_to_no_effect_is_told_and_not_failed():
    report = compared(SCALE)
    assert report.holds, report.text()
    assert any("pair table (port) and table (original)" in text for text in report.notices)


def test_a_pair_of_two_quantities_is_dropped_under_the_port_s_name():
    """The port names its parts otherwise, which the layers that agree teach."""

    class Mix(torch.nn.Linear):
        factor = 1.0

        def forward(self, x):
            return self.factor * super().forward(x)

    class Block(torch.nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.mix, self.norm = Mix(4, 4), torch.nn.LayerNorm(4)
            self.mix.factor = factor

        def forward(self, x):
            return x + self.norm(self.mix(x))

    factors = (1.0, SCALE, 1.0)

    def function(params, x):
        for layer, factor in enumerate(factors):

            def of(name, layer=layer):
                return params[f"{layer}.{name}.weight"], params[f"{layer}.{name}.bias"]

            (kernel, bias), (gain, shift) = of("mix"), of("norm")
            y = factor * checkpoint_name(x @ kernel.T + bias, f"layer_{layer}.blend")
            centred = y - jnp.mean(y, -1, keepdims=True)
            variance = jnp.mean(centred**2, -1, keepdims=True)
            y = centred / jnp.sqrt(variance + 1e-5) * gain + shift
            x = checkpoint_name(x + checkpoint_name(y, f"layer_{layer}.norm"), f"layer_{layer}")
        return x

    torch.manual_seed(2)
    original = torch.nn.Sequential(*map(Block, factors))
    x = np.random.default_rng(3).standard_normal((3, 4), np.float32)
    params = {name: p.detach().numpy() for name, p in original.named_parameters()}
    sides = TorchSide(original, x), JaxSide(function, params, x)
    report = compare(Port("two", *sides, bfloat16=False, gradients=False))
    assert report.holds, report.text()
    assert any("pair layer_1.blend (port) and 1.mix (original)" in n for n in report.notices)
    measured = {m.quantity for m in report.measurements}
    assert "layer_0.blend" in measured and "layer_1.blend" not in measured


@pytest.mark.parametrize("wrong", [1.0, 1.5])
def test_a_stage_that_nothing_uses_is_not_two_quantities(wrong):
    """A branch that starts at 0, as in a residual that is trained from nothing: its value reaches
    no result, so results that agree say nothing of it. It was dropped with a notice."""

    class Gated(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.dense, self.branch = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
            self.gate = torch.nn.Parameter(torch.zeros(4))

        def forward(self, x):
            x = self.dense(x)
            return torch.tanh(x + self.gate * self.branch(x))

    def function(params, x):
        x = checkpoint_name(x @ params["dense.weight"].T + params["dense.bias"], "dense")
        b = wrong * (x @ params["branch.weight"].T + params["branch.bias"])
        return jnp.tanh(x + params["gate"] * checkpoint_name(b, "branch"))

    torch.manual_seed(1)
    original, x = Gated(), np.random.default_rng(1).standard_normal((3, 4), np.float32)
    params = {name: p.detach().numpy() for name, p in original.named_parameters()}
    sides = TorchSide(original, x), JaxSide(function, params, x)
    report = compare(Port("gated", *sides, bfloat16=False, gradients=False))
    assert report.holds == (wrong == 1.0), report.text()
    assert {m.quantity for m in report.failures} == ({"branch"} if wrong != 1.0 else set())


def test_what_breaks_by_another_pair_is_no_evidence():
    """The same branch in front of a table that is scaled elsewhere: the norm behind both breaks
    when it is fed the original's table, which says nothing of the branch."""

    class Scaled(torch.nn.Linear):
        def forward(self, x):
            return SCALE * super().forward(x)

    class Gated(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.dense, self.branch = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
            self.table, self.norm = Scaled(4, 4), torch.nn.LayerNorm(4)
            self.register_buffer("keep", torch.zeros(4))

        def forward(self, x):
            x = self.dense(x)
            return self.norm(self.table(torch.tanh(x + self.keep * self.branch(x))))

    def linear(params, name, x):
        return x @ params[f"{name}.weight"].T + params[f"{name}.bias"]

    def port(wrong):
        def function(params, x):
            x = checkpoint_name(linear(params, "dense", x), "dense")
            branch = checkpoint_name(wrong * linear(params, "branch", x), "branch")
            x = jnp.tanh(x + params["keep"] * branch)
            x = SCALE * checkpoint_name(linear(params, "table", x), "table")
            centred = x - jnp.mean(x, -1, keepdims=True)
            x = centred / jnp.sqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-5)
            return checkpoint_name(x * params["norm.weight"] + params["norm.bias"], "norm")

        return function

    torch.manual_seed(1)
    original, x = Gated(), np.random.default_rng(1).standard_normal((3, 4), np.float32)
    named = (*original.named_parameters(), *original.named_buffers())
    params = {name: p.detach().numpy() for name, p in named}
    for wrong in (1.0, 1.5):
        sides = TorchSide(original, x), JaxSide(port(wrong), params, x)
        report = compare(Port("gated", *sides, bfloat16=False, gradients=False))
        assert report.holds == (wrong == 1.0), report.text()
        assert ("branch" in {m.quantity for m in report.failures}) == (wrong != 1.0)


def test_what_a_person_calls_one_quantity_is_held_to_it():
    """The same two programs as above, of which somebody said that the tables are one."""
    report = compared(SCALE, pins=(Pin("table", "table"),), gradients=False)
    assert {m.quantity for m in report.failures} == {"table"}
    assert not any("dropped the pair" in text for text in report.notices)


def test_a_stage_that_is_slightly_wrong_is_failed_although_what_follows_undoes_it():
    """By less than another quantity would differ: it is the table, with an error in it."""

    def function(params, ids):
        slightly = 1 + EQUAL / 8
        x = checkpoint_name(params["table"][ids] * slightly, "table") / slightly
        return checkpoint_name(jnp.tanh(x), "tanh")

    modules = {"table": torch.nn.Embedding(5, 4), "tanh": torch.nn.Tanh()}
    original = TorchSide(torch.nn.Sequential(OrderedDict(modules)), IDS)
    params = {"table": modules["table"].weight.detach().numpy()}
    sides = original, JaxSide(function, params, IDS)
    report = compare(Port("slightly", *sides, gradients=False, bfloat16=False))
    assert {m.quantity for m in report.failures} == {"table"}


@pytest.mark.parametrize("scale", [1.0, SCALE * 1.01])
def test_one_that_changes_what_follows_by_less_than_any_tolerance_of_float32_is_failed(scale):
    # A norm follows: the scale changes what it returns through its epsilon alone.
    report = compared(scale)
    assert not report.holds
    assert not any("dropped the pair" in text for text in report.notices)


def test_a_difference_behind_two_quantities_of_one_name_starts_where_it_is():
    """The table differs, too, and the norm behind it is right until it is fed the original's."""
    report = compared(SCALE, wrong=1.001)
    assert not report.holds
    assert report.culprit is not None and report.culprit.name == "dense"
    assert {m.quantity for m in report.failures} & {"table", "norm"} == set()
    assert any("pair table (port) and table (original)" in text for text in report.notices)


def test_each_pair_of_two_quantities_is_told_beside_all_other_notices():
    """Two stages, each of which one program scales itself and the other one where it is used."""

    def original(p, mark):
        inner = np.tanh(mark("first", SCALE * (X @ p["w"])))
        return np.tanh(mark("second", SCALE * (mark("inner", inner) @ p["v"])))

    def port(p, mark):
        inner = np.tanh(SCALE * mark("first", X @ p["w"]))
        return np.tanh(SCALE * mark("second", mark("inner", inner) @ p["v"]))

    held = {name: draw(3, 3, seed=n) for n, name in enumerate("wv")}
    sides = Program(original, {**held, "table": draw(5, seed=7)}), Program(port, held)
    report = compare(Port("two", *sides, gradients=False, bfloat16=False))
    assert report.holds, report.text()
    assert [text.split(":")[0] for text in report.notices] == [
        "no parameter of the port holds the original's table",
        "dropped the pair first (port) and first (original)",
        "dropped the pair second (port) and second (original)",
    ]
    assert {m.quantity for m in report.measurements if m.metric == "rel_l2"} == {"inner", "output"}


def test_a_pair_that_is_taken_apart_joins_the_stages_that_had_no_partner():
    """Each under its own name and with its own shape, on its own side."""
    lies = Layout((2, 3), (2, 3), (1, 0), (3, 2))
    first, second = (Pair(f"p{n}", f"o{n}", lies, AlignedBy.NAME, 1.0) for n in (1, 2))
    found = without(Alignment((first, second), {"o0": (5,)}, {"p0": (7,), "p3": ()}), [second])
    assert found.pairs == (first,)
    assert dict(found.unaligned_original) == {"o0": (5,), "o2": (2, 3)}
    assert dict(found.unaligned_port) == {"p0": (7,), "p3": (), "p2": (3, 2)}


SAME = Layout((2,), (2,), (0,), (2,))
WORK = Work("port", "hash", ("first", "second", "third", "last"))


def paired(*stages):
    """An alignment of stages, each `(name, by, distance)`; the original calls it `its NAME`."""
    return Alignment(tuple(Pair(name, f"its {name}", SAME, *how) for name, *how in stages), {}, {})


def gates(**values):
    """A gate each that passes up to 0.9, by stage."""
    edge = PortEdge.PORT64_ORIGINAL64
    comparison = Comparison(WORK, edge, PortBounds({}), edge.dtype, kinds=stage_kind)
    return [comparison.gate(name, "rel_l2", value, 0.9) for name, value in values.items()]


def place(**forced):
    """Every stage by its error when it is fed the original's values, of a tolerance of 1."""
    stages = tuple(Stage(name, 0.0, error, 1.0) for name, error in forced.items())
    return Place(PortEdge.PORT64_ORIGINAL64, stages)


@pytest.mark.parametrize(
    ("forced", "failing", "outputs", "two"),
    [
        # Right as the port computes it, wrong once it is fed the original's value.
        ({"first": 2.0, "second": 2.0}, "first", (), True),
        ({"first": 2.0, "second": 0.5, "third": 2.0}, "first", (), True),
        ({"first": 2.0, "second": 0.5}, "first", (), False),
        ({"first": 2.0, "second": 2.0}, "first second", (), False),
        ({"first": 2.0, "second": 2.0}, "first", {"its first"}, False),
        # Itself is not behind it, nor is what lies before it.
        ({"first": 2.0}, "", (), False),
        ({"second": 0.5, "first": 2.0}, "", (), False),
        ({"first": 0.5}, "first", (), False),
        ({"stranger": 2.0, "second": 2.0}, "", (), False),
        ({}, "first", (), False),
    ],
)
def test_a_pair_is_two_quantities_if_what_follows_is_wrong_only_when_fed(
    forced, failing, outputs, two
):
    alignment = paired(*((name, AlignedBy.NAME, 1.0) for name in WORK.order))
    rows = gates(**{name: 2.0 if name in failing.split() else 0.5 for name in WORK.order})
    found = compensated(alignment, rows, place(**forced), outputs)
    assert found == (alignment.pairs[0] if two else None)


@pytest.mark.parametrize(
    ("by", "distance", "two"),
    [
        (AlignedBy.NAME, 1.0, True),
        (AlignedBy.ORDER, 1.0, True),
        (AlignedBy.NEARNESS, 1.0, True),
        (AlignedBy.VALUE, 1.0, False),
        (AlignedBy.PIN, 1.0, False),
        (AlignedBy.NAME, EQUAL, False),
    ],
)
def test_only_a_pair_of_a_name_that_differs_much_may_be_two_quantities(by, distance, two):
    alignment = paired(("first", by, distance), ("second", AlignedBy.NAME, 1.0))
    fed = place(first=2.0, second=2.0)
    found = compensated(alignment, gates(first=2.0, second=0.5), fed, ())
    assert (found is not None) == two


def test_an_output_of_either_side_is_no_value_that_may_be_dropped():
    alignment = paired(("first", AlignedBy.NAME, 1.0), ("second", AlignedBy.NAME, 1.0))
    pair = replace(alignment.pairs[0], original="theirs")
    assert _may_be_two(pair, {"second"})
    assert not _may_be_two(pair, {"first"}) and not _may_be_two(pair, {"theirs", "second"})
