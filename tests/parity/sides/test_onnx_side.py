"""Exported models as sides: results of ONNX Runtime; float64 and rounding by onnx's evaluator."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
import torch
from onnx import numpy_helper

from parity import OnnxSide, Port, SideError, TorchSide, compare
from parity.engine.measure.rounding_noise import UNIT_ROUNDOFF
from parity.port.compare import MADE
from parity.port.same_numbers import folded
from parity.sides.onnx_side import _Signs
from parity.sides.side import OUTPUT, Precision, Rounding, Run

WIDTH = 24
WIDE = Run(Precision.FLOAT64)
X = np.random.default_rng(0).standard_normal((5, 8), np.float32)
W = np.random.default_rng(1).standard_normal((8, 6), np.float32)


class Block(torch.nn.Module):
    """Attention and an MLP, each with a residual connection."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.mix = torch.nn.MultiheadAttention(WIDTH, 3, batch_first=True)
        self.up = torch.nn.Linear(WIDTH, 40)
        self.down = torch.nn.Linear(40, WIDTH)

    def forward(self, x):
        n = self.norm(x)
        x = x + self.mix(n, n, n, need_weights=False)[0]
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Model(torch.nn.Module):
    """Scores of 31 tokens, from ids."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(31, WIDTH)
        self.layers = torch.nn.ModuleList(Block() for _ in range(2))
        self.head = torch.nn.Linear(WIDTH, 31)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.fixture(scope="module")
def trained():
    torch.manual_seed(3)
    model = Model().eval()
    with torch.no_grad():
        for p in model.parameters():
            # Norms of 1 and biases of 0 would be equal in both layers.
            p += 0.1 * torch.randn(p.shape)
    return model


IDS = np.arange(14).reshape(2, 7) * 5 % 31
EXPORTERS = ("torch.export", "TorchScript")


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory):
    """The exported model in bytes, by exporter."""
    found = {}
    for exporter in EXPORTERS:
        path = tmp_path_factory.mktemp("onnx") / "model.onnx"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the older exporter is deprecated
            dynamo = exporter == "torch.export"
            torch.onnx.export(trained, (torch.tensor(IDS),), path, dynamo=dynamo, verbose=False)
        found[exporter] = onnx.load(path).SerializeToString()
    return found


@pytest.fixture(params=EXPORTERS)
def model(request, exported):
    """The exported model, which a test may change."""
    return onnx.ModelProto.FromString(exported[request.param])


def compared(trained, model):
    sides = TorchSide(trained, IDS), OnnxSide(model, IDS)
    return compare(Port("exported", *sides, gradients=False, bfloat16=False))


def parsed(text, **stored):
    """Return a model from onnx's text form, with stored tensors."""
    opsets = '<ir_version: 9, opset_import: ["" : 18, "com.microsoft" : 1]>'
    made = onnx.parser.parse_model(f"{opsets} {text}")
    made.graph.initializer.extend(numpy_helper.from_array(x, n) for n, x in stored.items())
    return made


def product(middle="Relu"):
    text = f"main (float[5, 8] x) => (float[5, 6] y) {{ p = MatMul(x, w) y = {middle}(p) }}"
    return parsed(text, w=W)


def nodes(model, kind):
    return [node for node in model.graph.node if node.op_type == kind]


def set_attribute(node, name, value):
    for each in [each for each in node.attribute if each.name == name]:
        node.attribute.remove(each)
    node.attribute.append(onnx.helper.make_attribute(name, value))


def other_epsilon(model):
    node = nodes(model, "LayerNormalization")[1]
    set_attribute(node, "epsilon", 1e-6)
    return node


def other_axis(model):
    node = nodes(model, "Softmax")[0]
    set_attribute(node, "axis", 2)
    return node


def other_activation(model):
    if exact := nodes(model, "Gelu"):
        set_attribute(exact[1], "approximate", "tanh")
        return exact[1]
    node = nodes(model, "Erf")[1]  # the older exporter writes the formula
    node.op_type = "Tanh"
    return node


def subtracted_bias(model):
    node = nodes(model, "Add")[-3]
    node.op_type = "Sub"
    return node


BUGS = {
    other_epsilon: "layers.1.norm",
    other_axis: "layers.0.mix",
    other_activation: "layers.1.down",
    subtracted_bias: "layers.1.down",
}


def test_an_exported_model_holds_and_its_stages_are_torch_s_modules(trained, model):
    report = compared(trained, model)
    assert report.holds, report.text()
    measured = {m.quantity for m in report.measurements if m.edge == "port64:original64"}
    assert {"layers.0.norm", "layers.1.down", "layers.1", "head"} <= measured


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_changed_node_is_named_with_its_stage(trained, model, bug):
    node = bug(model)
    report = compared(trained, model)
    assert not report.holds
    assert report.culprit is not None and report.culprit.name == BUGS[bug]
    assert f"node {node.name} ({node.op_type})" in report.text()


def test_the_source_line_of_a_node_is_that_of_the_exported_program(trained, exported):
    model = onnx.ModelProto.FromString(exported["torch.export"])
    other_activation(model)
    text = Path(__file__).read_text(encoding="utf-8")
    line = text[: text.index("functional.gelu(")].count("\n") + 1
    called = text[: text.index("x = layer(x)")].count("\n") + 1
    report = compared(trained, model).text()
    # Innermost first.
    places = [report.index(f"test_onnx_side.py:{number} (forward)") for number in (line, called)]
    assert places == sorted(places)


def test_a_changed_weight_is_named(trained, model):
    for stored in model.graph.initializer:
        if stored.name == "layers.1.up.bias":
            value = numpy_helper.to_array(stored) * np.float32(0.99)
            stored.CopyFrom(numpy_helper.from_array(value, stored.name))
    report = compared(trained, model)
    assert not report.holds
    assert "not the original's: layers.1.up.bias" in report.text()


class Recurrent(torch.nn.Module):
    """An LSTM, whose gates ONNX has in another order, with both biases in one tensor."""

    def __init__(self):
        super().__init__()
        self.cell = torch.nn.LSTM(8, 6, batch_first=True, bidirectional=True)
        self.head = torch.nn.Linear(12, 5)

    def forward(self, x):
        return self.head(self.cell(x)[0])


class Pixels(torch.nn.Module):
    """A convolution into which the exporter folds the norm behind it."""

    def __init__(self):
        super().__init__()
        self.filter = torch.nn.Conv2d(3, 6, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(6)
        self.head = torch.nn.Linear(6, 4)

    def forward(self, x):
        return self.head(torch.nn.functional.silu(self.norm(self.filter(x))).mean((2, 3)))


class Activations(torch.nn.Sequential):
    """Functions whose constants ONNX stores in float32, or whose reference has such constants."""

    def __init__(self):
        linear = (torch.nn.Linear(8, 8) for _ in range(4))
        norm, last = torch.nn.RMSNorm(8), torch.nn.GroupNorm(2, 6)
        functions = torch.nn.SELU(), torch.nn.Hardswish(), torch.nn.GELU("tanh"), torch.nn.Mish()
        mixed = (layer for pair in zip(linear, functions, strict=True) for layer in pair)
        super().__init__(norm, last, *mixed, torch.nn.LogSoftmax(-1))


MADE_OF_OTHERS = {
    Recurrent: (torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(1)), "cell."),
    Pixels: (torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(2)), "filter."),
    Activations: (torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(3)), None),
}


@pytest.fixture(scope="module", params=MADE_OF_OTHERS, ids=lambda made: made.__name__)
def optimised(request, tmp_path_factory):
    """A module, its input, the exported model, and where the exporter computed parameters."""
    torch.manual_seed(4)
    module = request.param().eval()
    with torch.no_grad():
        for p in (*module.parameters(), *module.buffers()):
            if p.is_floating_point():
                p += 0.2 * torch.rand(p.shape)
    x, where = MADE_OF_OTHERS[request.param]
    path = tmp_path_factory.mktemp("onnx") / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module, (x,), path, dynamo=True, verbose=False)
    return module, x, onnx.load(path), where


def test_parameters_that_the_exporter_computed_are_compared_by_what_they_compute(optimised):
    module, x, model, where = optimised

    def compared_with(side):
        sides = TorchSide(module, x), side
        return compare(Port("exported", *sides, gradients=False, bfloat16=False))

    side = OnnxSide(model, x)
    report = compared_with(side)
    assert report.holds, report.text()
    listed = [notice for notice in report.notices if notice.startswith(MADE)]
    assert bool(listed) == (where is not None)
    if where is None:
        return
    assert where in listed[0]
    name = max(
        (n for n in side.parameters() if where in n), key=lambda n: side.parameters()[n].size
    )
    wrong = side.parameters()[name].copy()
    wrong[..., -1] *= np.float32(1.01)
    report = compared_with(side.with_parameters({name: wrong}))
    assert not report.holds
    assert report.culprit is not None


def test_a_norm_is_folded_into_whole_rows_that_lack_it():
    original = {
        "c.weight": np.random.default_rng(7).standard_normal((6, 3, 2), np.float32),
        "c.bias": np.ones(6, np.float32),
        "one.weight": np.ones((6, 1), np.float32),
        "norm.weight": np.linspace(0.5, 2, 6, dtype=np.float32),
    }
    factor = original["norm.weight"]
    port = {
        "c.weight": original["c.weight"] * factor[:, None, None],
        "c.bias": 3 * original["c.bias"],
        "one.weight": original["one.weight"] * factor[:, None],
    }
    # Of one element each, any rows are multiples.
    assert folded(port, port, original, ["norm.weight"]) == {"c.weight", "c.bias"}
    assert folded(port, port, original, []) == set()
    assert folded(["c.bias"], port, original, ["norm.weight"]) == set()
    port["c.weight"][4, 2, 1] *= np.float32(1.001)
    assert folded(port, port, original, ["norm.weight"]) == set()


def test_a_table_or_an_unused_feature_is_not_excused():
    """Values that these inputs do not read may be wrong without any result being wrong."""
    text = """main (int64[3] ids, float[5, 8] x) => (float[3, 8] row, float[5, 6] y) {
        row = Gather(table, ids) y = MatMul(x, w) }"""
    table, given = np.random.default_rng(5).standard_normal((9, 8), np.float32), X.copy()
    side = OnnxSide(parsed(text, table=table, w=W), np.arange(3), given)
    assert side.made(["table", "w"]) == ["w"]
    given[:, 2] = 0
    side = OnnxSide(parsed(text, table=table, w=W), np.arange(3), given)
    assert side.made(["table", "w"]) == []


def test_exchanged_outputs_are_found():
    class Two(torch.nn.Module):
        def forward(self, x):
            return x * 2, x * 3

    healthy, exchanged = (
        f"main (float[5, 8] x) => (float[5, 8] {names}) {{ m = Mul(x, two) n = Mul(x, three) }}"
        for names in ("m, float[5, 8] n", "n, float[5, 8] m")
    )
    stored = {"two": np.float32(2), "three": np.float32(3)}
    for text, holds in ((healthy, True), (exchanged, False)):
        sides = TorchSide(Two(), X), OnnxSide(parsed(text, **stored), X)
        report = compare(Port("two", *sides, gradients=False, bfloat16=False))
        assert report.holds == holds, report.text()


class Scaled(torch.nn.Module):
    """Constants that an exporter computes from parameters: 1 + w, exp(a), and a table."""

    def __init__(self):
        super().__init__()
        self.w, self.a = (torch.nn.Parameter(0.1 * torch.randn(8)) for _ in range(2))
        self.register_buffer("angles", 0.37 * torch.arange(40.0).reshape(5, 8))

    def forward(self, x):
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + self.w)
        x = x * torch.exp(self.a) + torch.sin(self.angles) * x
        # Shapes change between the table and its use, and float64 runs compute the table anew.
        turned = torch.cat([x[:, 4:], -x[:, :4]], -1) * torch.cos(self.angles)[None]
        return torch.nn.functional.layer_norm(turned, (8,), torch.exp(self.a), self.w)


def test_constants_that_the_exporter_computed_hold_and_a_wrong_one_does_not(tmp_path):
    torch.manual_seed(6)
    module, path = Scaled().eval(), tmp_path / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module, (torch.from_numpy(X),), path, dynamo=True, verbose=False)

    def report_of(model):
        sides = TorchSide(module, X), OnnxSide(model, X)
        return compare(Port("scaled", *sides, gradients=False, bfloat16=False))

    assert report_of(path).holds, report_of(path).text()
    model = onnx.load(path)
    stored = max(model.graph.initializer, key=lambda each: len(each.raw_data))
    value = numpy_helper.to_array(stored).copy()
    value.flat[-1] *= np.float32(1.001)
    stored.CopyFrom(numpy_helper.from_array(value, stored.name))
    assert not report_of(model).holds


def test_a_trained_parameter_that_differs_is_wrong_even_if_no_result_shows_it():
    """A bias that the next step cuts off; a kernel's tap that meets only padding."""

    class Cut(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = torch.nn.Parameter(torch.full((8,), -100.0))
            self.head = torch.nn.Linear(8, 6, bias=False)

        def forward(self, x):
            return self.head(torch.relu(x + self.bias) + x)

    module = Cut().eval()
    text = """main (float[5, 8] x) => (float[5, 6] y) {
        a = Add(x, bias) r = Relu(a) s = Add(r, x) y = MatMul(s, "head.weight") }"""
    head = module.head.weight.detach().numpy().T.copy()
    wrong = np.full(8, -100.0, np.float32)
    wrong[3] = -101.0
    for bias, holds in ((module.bias.detach().numpy(), True), (wrong, False)):
        model = parsed(text, **{"bias": bias, "head.weight": head})
        sides = TorchSide(module, X), OnnxSide(model, X)
        report = compare(Port("cut", *sides, gradients=False, bfloat16=False))
        assert report.holds == holds, report.text()


def test_a_provider_that_is_not_there_is_told():
    with pytest.raises(SideError, match="NoSuchProvider is not available here; there are "):
        OnnxSide(product(), X, providers=("NoSuchProvider",))


@pytest.mark.parametrize("given", [{"a": 1}, "text", [[1.0], [1.0, 2.0]]])
def test_an_input_that_is_no_array_is_told(given):
    with pytest.raises(SideError, match="expected an array for the input x"):
        OnnxSide(product(), given)


def test_an_input_in_bfloat16_is_read():
    side = OnnxSide(product(), torch.from_numpy(X).bfloat16())
    np.testing.assert_array_equal(
        side.inputs()["0"], torch.from_numpy(X).bfloat16().float().numpy()
    )


def test_outputs_are_those_of_the_runtime_bit_for_bit(exported):
    model = exported["torch.export"]
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    (wanted,) = session.run(None, {session.get_inputs()[0].name: IDS})
    trace = OnnxSide(onnx.ModelProto.FromString(model), IDS).run()
    assert trace.outputs == (OUTPUT,)
    np.testing.assert_array_equal(trace.stages[OUTPUT], wanted)
    # In order of execution: a module ends after the last of its parts.
    names = list(trace.stages)
    assert names.index("layers.0.down") < names.index("layers.0") < names.index("layers.1.norm")


def test_outputs_are_not_those_of_the_session_that_returns_stages(monkeypatch):
    """That one may be optimised less, so it is another program than users run."""
    answers = OnnxSide._answers

    def marked(self, forced, feed):
        found = answers(self, forced, feed)
        return found if forced is None else found | {"y": found["y"] + 1}

    healthy = OnnxSide(product(), X).run().stages[OUTPUT]
    monkeypatch.setattr(OnnxSide, "_answers", marked)
    np.testing.assert_array_equal(OnnxSide(product(), X).run().stages[OUTPUT], healthy)


def test_a_float64_run_computes_in_float64_what_the_model_stores_and_casts():
    text = """main (float[5, 8] x) => (float[5, 6] y) {
        half = Cast<to = 10>(x) back = Cast<to = 1>(half)
        third = Constant<value_float = 0.33333334>()
        p = MatMul(back, w) y = Mul(p, third)
    }"""
    trace = OnnxSide(parsed(text, w=W), X).run(WIDE)
    third = np.float64(np.float32(1 / 3))
    assert trace.stages[OUTPUT].dtype == np.float64
    np.testing.assert_array_equal(trace.stages[OUTPUT], (X.astype(np.float64) @ W) * third)


def test_the_body_of_a_condition_is_widened_too():
    text = """main (float[5, 8] x, bool c) => (float[5, 8] y) {
        y = If(c) <
            then_branch = g1 () => (float[5, 8] a) {
                t = Constant<value_float = 0.1>() u = Mul(x, t) a = Cast<to = 1>(u)
            },
            else_branch = g2 () => (float[5, 8] b) { b = Neg(x) }
        >
    }"""
    trace = OnnxSide(parsed(text), X, np.asarray(True)).run(WIDE)
    tenth = np.float64(np.float32(0.1))
    np.testing.assert_array_equal(trace.stages[OUTPUT], X.astype(np.float64) * tenth)


@pytest.mark.parametrize("precision", [Precision.FLOAT32, Precision.FLOAT64])
def test_a_replaced_stage_reaches_what_follows_and_is_returned_as_computed(precision):
    side = OnnxSide(product(), X)
    healthy = side.run(Run(precision))
    given = -healthy.stages["p"]
    trace = side.run(Run(precision, forced={"p": given}))
    np.testing.assert_array_equal(trace.stages["p"], healthy.stages["p"])
    np.testing.assert_array_equal(trace.stages[OUTPUT], np.maximum(given, 0))
    assert side.run(Run(precision)).stages[OUTPUT].any()  # the side is as before


def test_rounding_moves_what_rounds_and_nothing_else():
    exact, moved = (
        OnnxSide(product(), X).run(Run(Precision.FLOAT64, rounding, seed=1))
        for rounding in (None, Rounding.OPERATIONS)
    )
    change = np.abs(moved.stages["p"] / exact.stages["p"] - 1)
    assert (change > 0).all()
    # Relu is exact: it passes on the moved product.
    np.testing.assert_array_equal(moved.stages[OUTPUT], np.maximum(moved.stages["p"], 0))
    other = OnnxSide(product(), X).run(Run(Precision.FLOAT64, Rounding.OPERATIONS, seed=2))
    assert (other.stages["p"] != moved.stages["p"]).any()


@pytest.mark.parametrize(
    ("operator", "settings", "shapes", "moved", "terms"),
    [
        ("MatMul", {}, [(5, 8), (8, 6)], 1, 8),
        ("Gemm", {"transA": 1}, [(7, 5), (7, 6)], 1, 7),
        ("Conv", {}, [(2, 3, 9), (4, 3, 5)], 1, 15),
        ("ConvTranspose", {}, [(2, 6, 9), (6, 4, 5)], 1, 30),
        ("ConvTranspose", {"group": 3}, [(2, 6, 9), (6, 4, 5)], 1, 10),
        ("Softmax", {}, [(5, 8)], 0, 8),
        ("Softmax", {"axis": 0}, [(5, 8)], 0, 5),
        ("LayerNormalization", {"axis": 1}, [(3, 5, 8), (5, 8)], 0, 8),
        ("RMSNormalization", {}, [(3, 5, 8), (8,)], 0, 8),
        ("GroupNormalization", {"num_groups": 2}, [(3, 4, 7), (4,), (4,)], 0, 7),
        ("InstanceNormalization", {}, [(3, 4, 7, 2), (4,), (4,)], 0, 2),
        ("GlobalAveragePool", {}, [(3, 4, 7, 2)], 0, 14),
        ("AveragePool", {"kernel_shape": [3, 2]}, [(3, 4, 7, 8)], 0, 6),
        ("ReduceSum", {"axes": [0, -1]}, [(3, 4, 7)], 0, 21),
        ("ReduceSum", {}, [(3, 4, 7)], 0, 84),
        ("Relu", {}, [(5, 8)], None, 0),
    ],
)
def test_one_operand_of_a_sum_is_moved_as_by_its_partial_sums(
    operator, settings, shapes, moved, terms
):
    random = np.random.default_rng(6)
    values = [random.uniform(1, 2, shape) for shape in shapes]
    node = onnx.helper.make_node(operator, [f"x{i}" for i in range(len(shapes))], ["y"], **settings)
    for i, units in enumerate(moves(node, values)):
        # To the digits that the quotient has in float64.
        assert (np.round(units, 6) == np.round(np.sqrt(1 + terms / 11) * (i == moved), 6)).all()


def moves(node, values):
    """Return how far rounding moves each operand of a node, in unit roundoffs."""
    changed = _Signs(Run(Precision.FLOAT64, Rounding.OPERATIONS)).operands(node, values)
    before, after = ([np.asarray(x, np.float64) for x in xs] for xs in (values, changed))
    return [
        np.abs(new - old) / np.where(old, np.abs(old), 1) / UNIT_ROUNDOFF
        for old, new in zip(before, after, strict=True)
    ]


def test_axes_of_a_sum_may_be_an_input():
    x = np.random.default_rng(7).uniform(1, 2, (3, 4, 7))
    node = onnx.helper.make_node("ReduceMean", ["x", "axes"], ["y"])
    for axes, terms in ([1], 4), ([0, 2], 21), ([], 84):
        units = moves(node, [x, np.array(axes, np.int64)])[0]
        assert (np.round(units, 6) == np.round(np.sqrt(1 + terms / 11), 6)).all()


def test_an_elementary_function_is_moved_by_its_units():
    def moves(middle):
        side = OnnxSide(product(middle), X)
        how = Run(Precision.FLOAT64, Rounding.OPERATIONS, forced={"p": np.ones((5, 6))})
        exact = side.run(Run(Precision.FLOAT64, forced=how.forced)).stages[OUTPUT]
        return np.abs(side.run(how).stages[OUTPUT] / exact - 1) / UNIT_ROUNDOFF

    # To a whole unit: the quotient itself rounds in float64.
    assert (np.round(moves("Tanh")) == 4).all()
    assert (np.round(moves("Reciprocal")) == 1).all()


@pytest.mark.parametrize("rounding", list(Rounding))
def test_a_moved_operand_stays_in_the_domain_of_a_root(rounding):
    text = "main (float[5, 8] x) => (float[5, 8] y) { d = Sub(x, x) e = Mul(d, x) y = Sqrt(e) }"
    side = OnnxSide(parsed(text), X)
    # A sum that cancels to a tiny negative number, as rounding leaves it.
    how = Run(Precision.FLOAT64, rounding, forced={"e": np.full((5, 8), -1e-9)})
    assert np.isfinite(side.run(how).stages[OUTPUT]).all()
    unmoved = Run(Precision.FLOAT64, forced=how.forced)
    assert np.isnan(side.run(unmoved).stages[OUTPUT]).all()


SCALED = """main (float[5, 8] x) => (float[5, 6] y) {
    half = Constant<value_float = 0.5>() third = Constant<value_float = 0.33333334>()
    a = MatMul(x, w) h = Mul(a, half) t = Mul(a, third) s = Mul(a, val_7)
    e = LeakyRelu<alpha = 0.3>(a) u = Add(h, t) v = Add(u, s) y = Add(v, e)
}"""


def scaled():
    return OnnxSide(parsed(SCALED, w=W, val_7=np.float32(0.7)), X)


def test_numbers_in_the_code_have_float32_s_rounding_error_unless_they_are_short():
    exact = scaled().run(WIDE).stages
    moved = scaled().run(Run(Precision.FLOAT64, Rounding.CONSTANTS)).stages
    np.testing.assert_array_equal(moved["a"], exact["a"])
    np.testing.assert_array_equal(moved["h"], exact["h"])
    for name in ("t", "s"):
        assert (moved[name] != exact[name]).all()
    negative = exact["a"] < 0
    assert (moved["e"] != exact["e"])[negative].all()  # the attribute is stored in float32


def test_parameters_that_the_other_side_lacks_are_moved_as_constants():
    def product_of(shared):
        how = Run(Precision.FLOAT64, Rounding.CONSTANTS, shared=shared)
        return scaled().run(how).stages["a"]

    exact = scaled().run(WIDE).stages["a"]
    assert (product_of(frozenset()) != exact).all()
    np.testing.assert_array_equal(product_of(frozenset({"w"})), exact)
    np.testing.assert_array_equal(product_of(None), exact)


def test_a_stored_number_is_a_parameter_only_if_it_is_named_as_one():
    stored = {"w": W, "val_3": np.float32(0.7), "head.bias": np.float32([2.0])}
    stored |= {"onnx::Add_4": np.float32([0.5, 2.0]), "gain": np.float32(3.0)}
    text = """main (float[5, 8] x) => (float[5, 6] y, float[5, 2] z) {
        a = MatMul(x, w) s = Mul(a, val_3) g = Mul(s, gain) y = Add(g, "head.bias")
        h = Constant<value_ints = [0, 1]>() i = Gather<axis = 1>(x, h)
        z = Mul(i, "onnx::Add_4") }"""
    side = OnnxSide(parsed(text, **stored), X)
    assert sorted(side.parameters()) == ["head.bias", "w"]


def test_a_name_that_the_exporter_made_up_follows_its_module(exported):
    side = OnnxSide(onnx.ModelProto.FromString(exported["torch.export"]), IDS)
    invented = [name for name in side.parameters() if ".val_" in name]
    assert any(name.startswith("layers.1.up.") for name in invented)
    changed = side.with_parameters({name: side.parameters()[name] * 2 for name in invented})
    one, two = (each.run().stages["layers.0.up"] for each in (side, changed))
    assert (one != two).any()


def test_a_parameter_in_float64_is_one_and_keeps_its_dtype():
    text = """main (float[5, 8] x) => (float[5, 6] y) {
        d = Cast<to = 11>(x) p = MatMul(d, w) y = Cast<to = 1>(p) }"""
    side = OnnxSide(parsed(text, w=W.astype(np.float64)), X)
    double = side.with_parameters({"w": 2 * W})
    assert double.parameters()["w"].dtype == np.float64
    np.testing.assert_array_equal(double.run().stages[OUTPUT], 2 * side.run().stages[OUTPUT])


def test_other_values_of_parameters_are_this_copy_s_only():
    side = OnnxSide(product(), X)
    double = side.with_parameters({"w": 2 * W})
    np.testing.assert_array_equal(double.run().stages["p"], 2 * side.run().stages["p"])
    exact = side.with_exact({"w": 2.0 * W})
    np.testing.assert_array_equal(exact.run().stages["p"], side.run().stages["p"])
    np.testing.assert_array_equal(exact.run(WIDE).stages["p"], 2 * side.run(WIDE).stages["p"])
    # Other values for all runs end those for float64 runs.
    again = exact.with_parameters({"w": W})
    np.testing.assert_array_equal(again.run(WIDE).stages["p"], side.run(WIDE).stages["p"])
    with pytest.raises(SideError, match="no parameter v"):
        side.with_parameters({"v": W})
    with pytest.raises(SideError, match="shape"):
        side.with_exact({"w": W[:, :3]})


def test_several_outputs_are_known_by_place_and_whole_numbers_compared_exactly():
    text = """main (float[5, 8] x) => (float[5, 8] twice, int64[5, 1] best) {
        twice = Add(x, x) best = ArgMax<axis = 1>(x) }"""
    trace = OnnxSide(parsed(text), x=X).run()
    assert trace.outputs == ("output[0]",)
    np.testing.assert_array_equal(trace.exact["output[1]"], X.argmax(1, keepdims=True))


def test_an_output_may_be_an_input_of_the_model():
    text = "main (float[5, 8] x) => (float[5, 8] x, float[5, 8] y) { y = Neg(x) }"
    trace = OnnxSide(parsed(text), X).run(WIDE)
    np.testing.assert_array_equal(trace.stages["output[0]"], X.astype(np.float64))


def test_a_window_of_operations_ends_at_replaced_stages():
    text = """main (float[5, 8] x) => (float[5, 8] y) {
        a = Tanh(x) b = Neg(a) c = Exp(b) y = Neg(c) }"""
    side = OnnxSide(parsed(text), X)
    values = side.run(WIDE).stages
    operations, results = side.operations_of("c", {"a": values["a"]})
    assert [o.primitive for o in operations.values()] == ["Neg", "Exp"]
    for index, name in zip(operations, ("b", "c"), strict=True):
        np.testing.assert_array_equal(results[index], values[name])
    whole, _ = side.operations_of(OUTPUT, {})
    assert [o.primitive for o in whole.values()] == ["Tanh", "Neg", "Exp", "Neg"]
    assert len(side.operation_results()) == 4


def test_an_operator_without_a_reference_is_compared_in_float32_only():
    text = "main (float[5, 8] x) => (float[5, 6] y) { p = MatMul(x, w) y = com.microsoft.Gelu(p) }"
    side = OnnxSide(parsed(text, w=W), X)
    assert np.isfinite(side.run().stages[OUTPUT]).all()
    with pytest.raises(SideError, match="Gelu"):
        side.run(WIDE)


REFUSED = {
    "an ONNX model has no derivatives.*gradients=False": Run(cotangents={OUTPUT: X}),
    "float32": Run(Precision.BFLOAT16),
    "in float64 only": Run(rounding=Rounding.OPERATIONS),
    "no stage q; there are p": Run(forced={"q": X}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_run_that_an_exported_model_does_not_have_is_refused(message):
    with pytest.raises(SideError, match=message):
        OnnxSide(product(), X).run(REFUSED[message])


GIVEN = {
    "nothing for x": ((), {}),
    "got 2 arrays": ((X, X), {}),
    "and z": ((), {"z": X}),
    "got x twice": ((X,), {"x": X}),
}


@pytest.mark.parametrize("message", GIVEN)
def test_inputs_that_do_not_fit_are_refused(message):
    inputs, keywords = GIVEN[message]
    with pytest.raises(SideError, match=message):
        OnnxSide(product(), *inputs, **keywords)


def test_an_input_that_a_cast_would_change_is_refused():
    text = "main (int32[1] i) => (float[1] y) { y = Cast<to = 1>(i) }"
    with pytest.raises(SideError, match="expected int32 for the input i, got int64"):
        OnnxSide(parsed(text), np.asarray([2**40]))
    assert OnnxSide(parsed(text), np.asarray([2])).run().stages[OUTPUT] == [2]


def test_a_model_in_half_precision_is_refused_with_what_to_do():
    text = "main (float16[5, 8] x) => (float16[5, 6] y) { y = MatMul(x, w) }"
    with pytest.raises(SideError, match="FLOAT16: export the trained model in float32"):
        OnnxSide(parsed(text, w=W.astype(np.float16)), X)


def test_a_model_that_returns_no_floating_numbers_is_refused():
    text = "main (float[5, 8] x) => (int64[5, 1] best) { best = ArgMax<axis = 1>(x) }"
    with pytest.raises(SideError, match="returns floating arrays"):
        OnnxSide(parsed(text), X).run()


def test_what_is_no_model_is_named(tmp_path):
    with pytest.raises(SideError, match=r"expected the path of an ONNX model, got .*absent"):
        OnnxSide(tmp_path / "absent.onnx", X)
    (tmp_path / "text.onnx").write_text("no model", encoding="utf-8")
    with pytest.raises(SideError, match=r"text\.onnx is no ONNX model"):
        OnnxSide(tmp_path / "text.onnx", X)


def test_a_model_that_the_runtime_rejects_is_told_in_one_line():
    text = "main (float[5, 8] x) => (float[5, 6] y) { y = com.microsoft.Nothing(x) }"
    with pytest.raises(SideError, match="ONNX Runtime stops: ") as told:
        OnnxSide(parsed(text), X).run()
    assert "\n" not in str(told.value)
