"""What is float32 on one side all the same, and numbers that stand for none, raise no alarm."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.ad_checkpoint import checkpoint_name

from parity.engine.measure.measurement import Verdict
from parity.engine.programs.operations import Unknown
from parity.port import Port, compare
from parity.port.correspondence import Correspondence
from parity.port.localisation import DOES, MAKES_MASK, Place, replaceable
from parity.port.side_runs import SideRuns
from parity.port_tolerances import PORTS, PortEdge
from parity.sides import FunctionSide, JaxSide, TorchSide
from parity.sides.side import Trace

X = np.random.default_rng(0).standard_normal((3, 5), np.float32)


def sines():
    return np.sin(np.arange(3)[:, None] / 10.0 ** np.arange(5)[None])


class Positions(torch.nn.Module):
    """Adds a table that it holds in float32: as a parameter, trained or not, a buffer, or an
    attribute."""

    def __init__(self, kept):
        super().__init__()
        self.dense = torch.nn.Linear(5, 4)
        table = torch.from_numpy(sines()).float()
        if kept in ("parameter", "trained"):
            self.table = torch.nn.Parameter(table, requires_grad=kept == "trained")
        elif kept == "buffer":
            self.register_buffer("table", table)
        else:
            self.table = table

    def forward(self, x):
        return self.dense(x + self.table)


def made_anew(offset):
    def function(params, x):
        return checkpoint_name(
            (x + jnp.asarray(sines() + offset, x.dtype)) @ params["kernel"] + params["bias"],
            "dense",
        )

    return function


def params_of(module):
    linear = module.dense
    return {"kernel": linear.weight.detach().numpy().T, "bias": linear.bias.detach().numpy()}


@pytest.mark.parametrize("kept", ["parameter", "trained", "buffer", "attribute"])
def test_a_table_that_the_port_makes_in_float64_is_the_same_but_for_rounding(kept):
    module = Positions(kept)
    sides = TorchSide(module, X), JaxSide(made_anew(0.0), params_of(module), X)
    report = compare(Port("table", *sides, bfloat16=False))
    assert report.holds, report.text()


def test_another_table_is_not():
    module = Positions("parameter")
    sides = TorchSide(module, X), JaxSide(made_anew(3e-5), params_of(module), X)
    report = compare(Port("table", *sides, bfloat16=False))
    assert report.culprit is not None
    assert report.culprit.name == "dense"


class Scaled(Positions):
    """A layer with a table, then an RMSNorm of large numbers, where the epsilon hardly counts."""

    def __init__(self, table, kept):
        super().__init__(kept)
        if kept == "parameter":
            self.table.data = torch.from_numpy(table)
        else:
            self.table = torch.from_numpy(table)
        self.norm = Rms()

    def forward(self, x):
        return self.norm(20 * self.dense(x + self.table[:3]))


class Rms(torch.nn.Module):
    def forward(self, x):
        return x * torch.rsqrt((x**2).mean(-1, keepdim=True) + 1e-5)


def scaled(table, epsilon):
    def function(params, x):
        x = x + jnp.asarray(table, x.dtype)
        y = checkpoint_name(x @ params["kernel"] + params["bias"], "dense")
        return 20 * y * jax.lax.rsqrt(((20 * y) ** 2).mean(-1, keepdims=True) + epsilon)

    return function


HELD = np.float32(np.sin(np.arange(5)[:, None] / 10.0 ** np.arange(5)[None]))
TABLES = {
    "equal": (HELD[:3], HELD[:3]),
    "equal and a parameter": (HELD[:3], HELD[:3]),
    "equal and longer": (HELD, HELD[:3]),
    "rounded otherwise": (HELD[:3], np.nextafter(HELD[:3], np.float32(2), dtype=np.float32)),
}
"""Tables of the original and of the port, by how they differ."""


@pytest.mark.parametrize("kind", TABLES)
def test_a_table_in_float32_hides_no_wrong_epsilon_behind_it(kind):
    """It moves the output by some 1e-7, as much as a table that is rounded otherwise."""
    torch.manual_seed(1)
    theirs, ours = TABLES[kind]
    module = Scaled(theirs, "parameter" if kind == "equal and a parameter" else "buffer")
    for epsilon in (1e-5, 1e-6):
        sides = TorchSide(module, X), JaxSide(scaled(ours, epsilon), params_of(module), X)
        report = compare(Port("table", *sides, bfloat16=False))
        assert report.holds is (epsilon == 1e-5), report.text()
        edge = PortEdge.PORT64_ORIGINAL64
        gates = [m for m in report.measurements if m.edge == edge and m.metric == "rel_l2"]
        output = next(m for m in gates if m.quantity == "output")
        if epsilon == 1e-5:
            # A table that both hold widens no tolerance; one that is rounded otherwise does.
            rule = next(r for r in PORTS if r.edge == edge and output.kind in r.kinds)
            assert (output.tolerance == rule.absolute) is (kind != "rounded otherwise")
            continue
        assert report.culprit is not None and report.culprit.name == "output"
        assert output.verdict is Verdict.FAIL
        assert ("float32 tables widen the tolerance" in output.note) is (
            kind == "rounded otherwise"
        )


class Angles(torch.nn.Module):
    """A stage that is a table and nothing else, such as the sines of a rotary embedding."""

    def __init__(self, scaled):
        super().__init__()
        self.register_buffer("table", torch.from_numpy(HELD[:3]))
        self.scale = torch.nn.Parameter(torch.tensor([1.0, 1.1, 0.9, 1.3, 0.7])) if scaled else 1.0

    def forward(self):
        return self.table * self.scale


class Layered(torch.nn.Module):
    """Two layers that use one table, made once."""

    def __init__(self, scaled):
        super().__init__()
        torch.manual_seed(2)
        self.angles = Angles(scaled)
        self.first, self.second = torch.nn.Linear(5, 5), torch.nn.Linear(5, 5)
        self.norm = Rms()

    def forward(self, x):
        table = self.angles()
        return self.norm(20 * self.second(self.first(x + table) + table))


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("epsilon", [1e-5, 1e-6])
def test_a_table_that_the_port_makes_anew_in_each_layer_is_the_same_but_for_rounding(
    epsilon, scaled
):
    """The original's stage is paired with the port's first one; the second layer has its own."""
    module = Layered(scaled)
    exact = np.sin(np.arange(5)[:, None] / 10.0 ** np.arange(5)[None])[:3]

    def port(params, x):
        scale = params["scale"] if scaled else 1.0
        made = checkpoint_name(jnp.asarray(exact, x.dtype) * scale, "angles")
        y = checkpoint_name((x + made) @ params["a"].T + params["c"], "first")
        again = checkpoint_name(jnp.asarray(exact, x.dtype) * scale, "angles_of_the_second")
        y = 20 * checkpoint_name((y + again) @ params["b"].T + params["d"], "second")
        return y * jax.lax.rsqrt((y**2).mean(-1, keepdims=True) + epsilon)

    names = {"a": "first.weight", "b": "second.weight", "c": "first.bias", "d": "second.bias"}
    names |= {"scale": "angles.scale"} if scaled else {}
    held = {n: p.detach().numpy() for n, p in module.named_parameters()}
    side = FunctionSide(port, {n: held[o] for n, o in names.items()}, X)
    report = compare(Port("layers", TorchSide(module, X), side, bfloat16=False))
    assert report.holds is (epsilon == 1e-5), report.text()


class Careless(torch.nn.Module):
    """A norm whose variance is a difference of squares."""

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        return (x - mean) / torch.sqrt((x**2).mean(-1, keepdim=True) - mean**2 + 1e-5)


@pytest.mark.parametrize("mean", [30.0, 1000.0])
def test_a_port_that_loses_fewer_digits_than_its_original_holds(mean):
    """Fed the original's values it differs by the original's rounding, not by its own."""
    x = np.random.default_rng(5).standard_normal((6, 24), np.float32) + np.float32(mean)

    def twin(params, x):
        x = x - x.mean(-1, keepdims=True)
        return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)

    port = Port("norm", TorchSide(Careless(), x), FunctionSide(twin, {}, x), bfloat16=False)
    report = compare(port)
    assert report.holds, report.text()


class Registering(Positions):
    """Its forward pass makes a buffer of an array that the user keeps."""

    def __init__(self, array):
        super().__init__("buffer")
        self.array = array

    def forward(self, x):
        self.table = torch.from_numpy(self.array).to(x.dtype)
        return self.dense(x + self.table)


def test_no_array_of_the_user_is_written_to():
    array = sines()
    module = Registering(array)
    table = module.table
    sides = TorchSide(module, X), JaxSide(made_anew(0.0), params_of(module), X)
    compare(Port("table", *sides, bfloat16=False))
    np.testing.assert_array_equal(array, sines())
    assert module.table is table, "the module has its own buffer again"


class Replacing(Positions):
    """Its forward pass writes to its buffer, and puts another one in its place."""

    def forward(self, x):
        before = self.table
        self.table = before.clone()
        before.mul_(2)
        return self.dense(x + self.table)


def test_a_module_is_as_it_was_after_a_comparison():
    module = Replacing("buffer")
    table, values = module.table, module.table.clone()
    sides = TorchSide(module, X), JaxSide(made_anew(0.0), params_of(module), X)
    assert compare(Port("table", *sides, bfloat16=False)).holds
    assert module.table is table and torch.equal(table, values)


@pytest.mark.parametrize("size", [2, 4])
def test_a_table_of_the_original_makes_no_parameter_of_the_port_right(size):
    """A bias of zeros that the port would train; the original has zeros as a state, or the first
    rows of them."""
    module = Positions("buffer")
    module.state = torch.zeros(size)

    def port(params, x):
        return made_anew(0.0)(params, x) + params["extra"]

    params = params_of(module) | {"extra": np.zeros(4, np.float32)}
    sides = TorchSide(module, X), JaxSide(port, params, X)
    report = compare(Port("table", *sides, bfloat16=False))
    assert not report.holds and "not the original's: extra" in report.sentence()


class Biased(torch.nn.Module):
    """Has a stage of numbers and masks, as the bias of T5's attention is."""

    def __init__(self):
        super().__init__()
        self.dense = torch.nn.Linear(5, 4)
        self.masked = Masked()

    def forward(self, x):
        return torch.softmax(self.masked(self.dense(x)), -1)


class Masked(torch.nn.Module):
    def forward(self, x):
        lowest = torch.finfo(x.dtype).min
        return torch.where(torch.arange(x.shape[-1]) < 3, x, lowest)


def masked(wrong):
    def function(params, x):
        y = checkpoint_name(x @ params["kernel"] + params["bias"], "dense")
        y = jnp.where(jnp.arange(4) < 3 - wrong, y, jnp.finfo(y.dtype).min)
        y = checkpoint_name(y, "masked")
        y = jnp.exp(y - jnp.max(y, -1, keepdims=True))
        return y / jnp.sum(y, -1, keepdims=True)

    return function


@pytest.mark.parametrize("wrong", [0, 1])
def test_masks_are_equal_whatever_the_lowest_number_is(wrong):
    module = Biased()
    sides = TorchSide(module, X), JaxSide(masked(wrong), params_of(module), X)
    report = compare(Port("masks", *sides, bfloat16=False))
    assert report.holds is not bool(wrong), report.text()
    if wrong:
        assert report.culprit is not None
        assert report.culprit.name == "masked"


@pytest.mark.parametrize("side", ["original", "port"])
def test_a_stage_with_masks_on_either_side_is_not_fed(side):
    """What stands for a mask on one side is a number like any other on the other."""
    pairs = [SimpleNamespace(port=n, original=n.upper()) for n in ("plain", "masked")]
    arrays = {pair.port: np.zeros(2) for pair in pairs}
    together = Mock(spec=Correspondence, alignment=Mock(pairs=pairs))
    together.stages.return_value = arrays

    def runs(masked: set[str]) -> Mock:
        return Mock(spec=SideRuns, masked=masked, best=Mock(spec=Trace, outputs=(), whole={}))

    original = runs({"MASKED"} if side == "original" else set())
    port = runs({"masked"} if side == "port" else set())
    assert set(replaceable(original.best, together, original, port)) == {"plain"}


class Running(torch.nn.Module):
    """Sums along the sequence, so that what is padded in front reaches what counts."""

    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(6, 8), torch.nn.Linear(8, 6)
        self.total = Cumulative()

    def forward(self, x):
        return self.down(self.total(self.up(x)))


class Cumulative(torch.nn.Module):
    def forward(self, x):
        return x.cumsum(1)


def test_a_stage_is_fed_the_padding_too_where_that_is_carried_on():
    torch.manual_seed(4)
    module = Running().eval()
    params = {n.replace(".", "_"): p.detach().numpy() for n, p in module.named_parameters()}
    x = np.random.default_rng(4).standard_normal((3, 7, 6), np.float32)
    padding = np.arange(7) >= np.array([[0], [2], [3]])

    def twin(p, x, wrong):
        up = checkpoint_name(x @ p["up_weight"].T + p["up_bias"], "up")
        total = checkpoint_name(jnp.cumsum(up, axis=1), "total")
        return (total @ p["down_weight"].T + p["down_bias"]) * wrong

    for wrong, culprit in ((1.0, None), (1.001, "output")):
        side = FunctionSide(lambda p, x, w=wrong: twin(p, x, w), params, x)
        original = TorchSide(module, x)
        report = compare(
            Port("running", original, side, valid=padding, gradients=False, bfloat16=False)
        )
        assert report.holds == (culprit is None), report.text()
        assert (report.culprit and report.culprit.name) == culprit


def squares(x):
    """Variance as a difference of squares."""
    return (x**2).mean(-1, keepdims=True) - x.mean(-1, keepdims=True) ** 2


@pytest.mark.parametrize("mean, told", [(0.0, False), (30.0, True)])
def test_a_port_that_loses_digits_by_its_algorithm_is_told(mean, told):
    """Its own operations explain the loss, so no gate fails."""
    x = np.random.default_rng(5).standard_normal((6, 24), np.float32) + np.float32(mean)

    def twin(params, x):
        return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(squares(x) + 1e-5)

    port = Port("norm", TorchSide(Defined(), x), FunctionSide(twin, {}, x), bfloat16=False)
    report = compare(port)
    assert report.holds, report.text()
    assert any("loses digits" in notice for notice in report.notices) == told


class Defined(torch.nn.Module):
    """A norm by its definition."""

    def forward(self, x):
        centred = x - x.mean(-1, keepdim=True)
        return centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + 1e-5)


def test_a_line_that_makes_and_applies_a_mask_is_shown_once():
    operation = Unknown(("port.py:41 (f)", "port.py:62 (g)"), ("port.py:40 (f)", "port.py:41 (f)"))
    place = Place(PortEdge.PORT64_ORIGINAL64, (), operation=operation)
    assert [line.place for line in place.lines] == ["port.py:40 (f)", "port.py:41 (f)"]
    # What it makes explains more than that it applies it.
    assert [line.why for line in place.lines] == [MAKES_MASK, MAKES_MASK]
    # Negative control: a line that only applies it is shown too.
    other = replace(operation, mask=("port.py:40 (f)",))
    assert [x.why for x in replace(place, operation=other).lines] == [MAKES_MASK, DOES]
