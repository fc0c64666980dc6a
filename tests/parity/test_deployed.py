"""A deployed torch module against the trained one: weights, rounded inputs, and the program."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from parity import SideError, compare_deployed, few_bits
from parity.deployed import Deployment
from parity.engine.measure.metrics import relative_l2

torch = pytest.importorskip("torch")
from parity.sides.torch_side import module_of  # noqa: E402

WIDTH = 16
ROWS = np.random.default_rng(3).normal(size=(3, WIDTH)).astype(np.float32) * 3


class Net(torch.nn.Module):
    """A norm, two linear layers with a nonlinearity between them, and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH, eps=1e-3)
        self.up = torch.nn.Linear(WIDTH, 24)
        self.down = torch.nn.Linear(24, WIDTH)

    def forward(self, x: Any) -> Any:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def trained() -> Net:
    torch.manual_seed(5)
    module = Net().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.3)
    return module


class Packed(torch.Tensor):
    """A weight in few bits with a scale per block, as torchao holds it; computes in float32."""

    qdata: Any
    scale: Any
    zero_point: Any
    block_size: tuple[int, ...]

    @staticmethod
    def __new__(cls, qdata: Any, *rest: Any) -> Packed:
        return torch.Tensor._make_wrapper_subclass(cls, qdata.shape, dtype=torch.float32)

    def __init__(self, qdata: Any, scale: Any, zero_point: Any, block_size: Any) -> None:
        self.qdata, self.scale, self.zero_point = qdata, scale, zero_point
        self.block_size = block_size

    def dequantize(self) -> Any:
        scale, zero = (self._spread(x) for x in (self.scale, self.zero_point))
        return (self.qdata.float() - zero) * scale

    def _spread(self, x: Any) -> Any:
        for axis, size in enumerate(self.block_size):
            x = x.repeat_interleave(size, axis)
        return x

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            [own] = args
            copied = cls(own.qdata, own.scale, own.zero_point, own.block_size)
            vars(copied).update(vars(own))
            return copied
        plain = [x.dequantize() if isinstance(x, cls) else x for x in args]
        return function(*plain, **(kwargs or {}))


def blocks_of(weight: Any, size: int, reduce: Callable[[Any], Any]) -> Any:
    rows, columns = weight.shape
    return reduce(weight.reshape(rows, columns // size, size))


def packed(weight: Any, size: int, kind: str, factor: float = 1.0) -> Packed:
    """Quantise (out, in) by blocks of `size` inputs; `factor` makes the steps coarser."""
    zero = torch.zeros(weight.shape[0], weight.shape[1] // size)
    low, high = (
        blocks_of(weight, size, lambda x: x.amin(-1)),
        blocks_of(weight, size, lambda x: x.amax(-1)),
    )
    if kind == "float8":
        dtype = torch.float8_e4m3fn
        scale = torch.maximum(-low, high) / 448 * factor
        data = (weight / scale.repeat_interleave(size, 1)).to(dtype)
        return Packed(data, scale, zero, (1, size))
    if kind == "asymmetric":
        scale = (high.clamp(min=0) - low.clamp(max=0)) / 255 * factor
        zero = (-low.clamp(max=0) / scale).round()
        limits, dtype = (0, 255), torch.uint8
    else:
        scale = torch.maximum(-low, high) / 127 * factor
        limits, dtype = (-127, 127), torch.int8
    spread = scale.repeat_interleave(size, 1)
    data = (weight / spread).round() + zero.repeat_interleave(size, 1)
    return Packed(data.clamp(*limits).to(dtype), scale, zero, (1, size))


def in_few_bits(
    kind: str, size: int, change: Callable[[Any], Any] = lambda w: w, factor: float = 1.0
) -> Net:
    module = trained()
    for layer in (module.up, module.down):
        weight = packed(change(layer.weight.detach().clone()), size, kind, factor)
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    return module


def deployed(module: Any, **options: Any) -> Deployment:
    return compare_deployed(trained(), module, ROWS, **options)


@pytest.mark.parametrize(
    ("kind", "size", "text"),
    [
        ("symmetric", 8, "int8, blocks of 1 x 8"),
        ("asymmetric", 4, "uint8, blocks of 1 x 4"),
        ("float8", 8, "float8_e4m3fn, blocks of 1 x 8"),
    ],
)
def test_weights_in_few_bits_are_the_trained_ones_rounded(kind: str, size: int, text: str) -> None:
    module = in_few_bits(kind, size)
    found = deployed(module)
    assert found.holds, found.text()
    shares = {w.name: w.share for w in found.weights}
    assert {w.format for w in found.weights} == {"", text}
    # A bound that no element comes near would hide an error.
    assert all(0.8 < shares[f"{name}.weight"] <= 1 for name in ("up", "down"))
    assert shares["up.bias"] == shares["norm.weight"] == 0
    assert found.layers == ()
    with torch.no_grad():
        after, before = (m(torch.from_numpy(ROWS)).numpy() for m in (module, trained()))
    assert found.cost == {"output": relative_l2(after, before)} and found.cost["output"] > 0
    assert f"weights, {text}: 2 of 2 hold" in found.text()


def move_one(weight: Any) -> Any:
    """Move one small element by a hundredth of the largest one, about a step of int8."""
    element = weight.abs().argmin()
    weight.view(-1)[element] += weight.abs().max() * 0.01
    return weight


@pytest.mark.parametrize(
    ("change", "factor"),
    [
        (move_one, 1.0),
        (lambda w: w.flip(0), 1.0),
        (lambda w: w * 1.01, 1.0),
        (lambda w: w, 1.5),
    ],
    ids=["one element", "rows in another order", "another scale", "steps too coarse"],
)
@pytest.mark.parametrize("kind", ["symmetric", "asymmetric"])
def test_weights_that_are_not_the_trained_ones_are_named(
    kind: str, change: Callable[[Any], Any], factor: float
) -> None:
    found = deployed(in_few_bits(kind, 8, change, factor))
    assert not found.holds
    broken = {w.name for w in found.weights if not w.holds}
    assert broken == {"up.weight", "down.weight"}
    # The program computes with the weights that it has.
    assert found.program.holds, found.program.text()
    assert "up.weight: " in found.text() and "of its bound at [" in found.text()


def test_another_program_is_found_beside_rounded_weights() -> None:
    module = in_few_bits("symmetric", 8)
    module.norm.eps = 1e-5
    found = deployed(module)
    assert all(weight.holds for weight in found.weights)
    assert not found.holds and found.program.failures[0].quantity == "norm"
    assert "is not the trained one" in found.text()


def test_a_weight_that_lost_its_bits_in_float32_is_not_the_trained_one() -> None:
    module = trained()
    with torch.no_grad():
        module.up.weight.copy_(module.up.weight.bfloat16().float())
    found = deployed(module)
    assert [w.name for w in found.weights if not w.holds] == ["up.weight"]
    assert next(w for w in found.weights if w.name == "up.weight").share == np.inf


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
@pytest.mark.parametrize("rounded", [True, False])
def test_a_cast_parameter_is_rounded_and_not_cut(dtype: str, rounded: bool) -> None:
    kind = getattr(torch, dtype)
    module = trained()
    # The bias alone, so that the program adds what it has in float32.
    bias = module.down.bias.detach()
    value = bias.to(kind)
    if not rounded:
        toward_zero = torch.finfo(kind).eps / 2
        value = (bias * (1 - toward_zero)).to(kind)
        assert bool((value != bias.to(kind)).any())
    module.down.bias = torch.nn.Parameter(value, requires_grad=False)

    def call(m: Any, x: Any) -> Any:
        h = torch.tanh(m.up(m.norm(x)))
        return x + torch.nn.functional.linear(h, m.down.weight, m.down.bias.float())

    found = deployed(module, call=call)
    row = next(w for w in found.weights if w.name == "down.bias")
    assert row.format == dtype
    assert (row.holds, found.holds) == (rounded, rounded), found.text()


def test_a_format_without_a_rule_does_not_hold_and_says_so() -> None:
    module = in_few_bits("symmetric", 8)
    module.up.weight.target_dtype = torch.int1
    found = deployed(module)
    row = next(w for w in found.weights if w.name == "up.weight")
    assert not row.holds and not found.holds and "no rule for int1" in found.text()
    assert np.isnan(row.share)


def test_a_weight_that_is_no_number_does_not_hold() -> None:
    module = in_few_bits("symmetric", 8)
    module.down.weight.scale[3, 0] = float("nan")
    found = deployed(module)
    assert [w.name for w in found.weights if not w.holds] == ["down.weight"]
    assert not found.holds


def test_a_compiled_module_has_the_parameters_of_the_trained_one() -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    found = deployed(torch.compile(trained(), backend=backend))
    assert found.holds and {w.format for w in found.weights} == {""}, found.text()
    # The program that users run, whole: a hook in it would split it.
    assert len(graphs) == 1
    module = trained()
    module.norm.eps = 1e-5
    assert not deployed(torch.compile(module, backend=backend)).holds


def dynamic() -> Net:
    """Return the module with int8 weights, whose linear layers round their inputs too."""
    with warnings.catch_warnings():
        # torch says that this quantisation will move to torchao.
        warnings.simplefilter("ignore")
        quantize = torch.ao.quantization.quantize_dynamic
        return quantize(trained(), {torch.nn.Linear}, dtype=torch.qint8)


def test_layers_that_round_their_inputs_are_the_trained_ones() -> None:
    found = deployed(dynamic())
    assert found.holds, found.text()
    assert [layer.name for layer in found.layers] == ["up", "down"]
    assert all(0 < layer.share <= 1 for layer in found.layers)
    assert "layers with inputs in int8 by tensor: 2 of 2 hold" in found.text()


ENGINES = [name for name in torch.backends.quantized.supported_engines if name != "none"]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("size", [1e2, 1.0, 1e-4, 1e-8])
def test_inputs_are_rounded_as_every_engine_does(
    engine: str, size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They differ in the bits that they use and in the smallest scale."""
    monkeypatch.setattr(torch.backends.quantized, "engine", engine)
    rows = ROWS * np.float32(size)
    found = compare_deployed(trained(), dynamic(), rows, call=lambda m, x: m.up(x))
    assert found.layers[0].name == "up" and found.layers[0].holds, found.text()


@pytest.mark.parametrize("layer", ["up", "down"])
@pytest.mark.parametrize(
    "change",
    [lambda m, x, y: y * 1.001, lambda m, x, y: y - m.bias(), lambda m, x, y: y.roll(1, -1)],
    ids=["scaled", "without its bias", "in another order"],
)
def test_a_layer_that_computes_something_else_is_named(layer: str, change: Any) -> None:
    module = dynamic()
    getattr(module, layer).register_forward_hook(change)
    found = deployed(module)
    assert [each.name for each in found.layers if not each.holds] == [layer]
    # What follows is computed from its results on both sides.
    assert found.program.holds and not found.holds
    assert f"  {layer}: " in found.text()


@pytest.mark.parametrize("factor", [1.001, 0.5])
def test_what_lies_between_two_layers_that_round_is_compared_to_rounding(factor: float) -> None:
    """A functional activation has no module; what it computes is the input of the next layer."""

    def call(m: Any, x: Any) -> Any:
        h = torch.tanh(m.up(m.norm(x)))
        return x + m.down(h if type(m.up) is torch.nn.Linear else h * factor)

    found = deployed(dynamic(), call=call)
    assert all(layer.holds for layer in found.layers) and not found.holds
    assert found.program.failures[0].quantity == "down.rounded_input"


def test_an_outlier_in_one_row_hides_no_other_row() -> None:
    rows = ROWS * np.array([[1000], [1], [1]], np.float32)
    call = lambda m, x: m.up(x)  # noqa: E731
    module = dynamic()
    [layer] = [
        each for each in compare_deployed(trained(), module, rows, call=call).layers if not each.why
    ]
    assert layer.holds
    kept = torch.tensor([[1.0], [0.0], [1.0]])
    module.up.register_forward_hook(lambda m, x, y: y * kept)
    [layer] = [
        each for each in compare_deployed(trained(), module, rows, call=call).layers if not each.why
    ]
    assert not layer.holds and layer.element[0] == 1


def test_a_layer_that_was_not_called_was_not_measured() -> None:
    found = deployed(dynamic(), call=lambda m, x: m.up(m.norm(x)))
    assert [layer.name for layer in found.layers if not layer.holds] == ["down"]
    assert not found.holds and "down: not called as a module on these inputs" in found.text()


def test_inputs_given_by_keyword_are_seen() -> None:
    def call(m: Any, x: Any) -> Any:
        return x + m.down(torch.tanh(m.up(input=m.norm(x)) if type(m.up) is torch.nn.Linear
                                     else m.up(m.norm(x))))  # fmt: skip

    found = deployed(dynamic(), call=call)
    assert found.holds and len(found.layers) == 2, found.text()


def test_rounding_layers_inside_a_compiled_module_are_refused_in_words() -> None:
    with pytest.raises(SideError, match=r"^up rounds its inputs inside of a compiled module"):
        deployed(torch.compile(dynamic(), backend="eager"))


def test_another_program_is_found_beside_rounded_inputs() -> None:
    module = dynamic()
    module.norm.eps = 1e-5
    found = deployed(module)
    assert all(part.holds for part in (*found.weights, *found.layers))
    assert not found.holds and found.program.failures[0].quantity == "norm"


def test_a_residual_that_is_missing_is_found_beside_rounded_inputs() -> None:
    module = dynamic()
    module.register_forward_hook(lambda m, x, y: y - x[0])
    found = deployed(module)
    assert all(layer.holds for layer in found.layers)
    assert found.program.failures[0].quantity == "output" and not found.holds


def test_two_calls_of_a_layer_are_two_layers() -> None:
    found = deployed(dynamic(), call=lambda module, x: module(module(x)))
    assert found.holds, found.text()
    assert [layer.name for layer in found.layers] == ["up", "down", "up#2", "down#2"]


class Tables(Net):
    """A net with a table, of which these inputs use one row, and a head tied to a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(32.0).reshape(2, WIDTH) / 7)
        self.register_buffer("count", torch.tensor(3))
        self.head = torch.nn.Linear(WIDTH, 24, bias=False)
        self.head.weight = self.up.weight

    def forward(self, x: Any) -> Any:
        return self.head(super().forward(x) + self.table[0])


@pytest.mark.parametrize("change", ["", "table", "count", "missing"])
def test_buffers_are_compared_whole(change: str) -> None:
    torch.manual_seed(7)
    original = Tables().eval()
    module = copy.deepcopy(original)
    if change == "table":
        module.table[1, 3] += 1e-6
    if change == "count":
        module.count += 1
    if change == "missing":
        module.count = None
    found = compare_deployed(original, module, ROWS)
    broken = [row.name for row in found.weights if not row.holds]
    assert broken == ([] if not change else ["count" if change == "missing" else change])
    assert found.holds is not bool(change), found.text()


@pytest.mark.parametrize("wrong", [False, True])
def test_of_tied_weights_one_may_be_in_few_bits(wrong: bool) -> None:
    torch.manual_seed(7)
    original = Tables().eval()
    module = copy.deepcopy(original)
    weight = module.head.weight.detach().clone()
    few = packed(weight.roll(1, 0) if wrong else weight, 8, "symmetric")
    module.head.weight = torch.nn.Parameter(few, requires_grad=False)
    found = compare_deployed(original, module, ROWS)
    assert {row.name: row.format for row in found.weights}["head.weight"].startswith("int8")
    assert [row.name for row in found.weights if not row.holds] == ["head.weight"] * wrong
    assert found.holds is not wrong, found.text()


def test_a_trained_model_that_was_quantised_in_place_is_refused() -> None:
    module = in_few_bits("symmetric", 8)
    with pytest.raises(SideError, match=r"got up\.weight, a .*before it was cast or quantised"):
        compare_deployed(module, module, ROWS)


@pytest.mark.parametrize("same", [lambda m: m, lambda m: m.to(torch.float32), copy.copy])
def test_a_model_that_is_deployed_in_place_is_refused(same) -> None:
    """What changes one changes the other; `to` returns the module itself."""
    module = trained()
    with pytest.raises(SideError, match=r"parameters of the trained module itself, such as norm"):
        compare_deployed(module, same(module), ROWS)


def test_a_weight_without_data_is_refused_in_words() -> None:
    module = trained()
    module.up.weight = torch.nn.Parameter(module.up.weight.to("meta"))
    with pytest.raises(SideError, match=r"dense tensor with data, got up\.weight"):
        deployed(module)


@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize("asymmetric", [True, False])
def test_inputs_are_rounded_with_a_scale_by_row_or_one(by_row: bool, asymmetric: bool) -> None:
    x = ROWS.astype(np.float64) * np.array([[1], [30], [900]])

    def one(part: np.ndarray) -> np.ndarray:
        if asymmetric:
            low, high = min(part.min(), 0), max(part.max(), 0)
            step = (high - low) / 255
            zero = round(-low / step)
            return (np.clip(np.rint(part / step) + zero, 0, 255) - zero) * step
        step = abs(part).max() / 127
        return np.rint(part / step) * step

    expected = np.stack([one(row) for row in x]) if by_row else one(x)
    form = few_bits.InputFormat((8,), by_row, asymmetric)
    found = [numbers for numbers, _ in few_bits.rounded(x, form)]
    assert any(np.array_equal(numbers, expected) for numbers in found)
    # The control: with the scales of the other kind no convention gives these numbers.
    other = few_bits.InputFormat((8,), not by_row, asymmetric)
    assert not any(np.array_equal(n, expected) for n, _ in few_bits.rounded(x, other))


class Int8Settings:
    granularity = "PerRow(dim=-1)"
    mapping_type = "MappingType.SYMMETRIC"


class Float8Settings(Int8Settings):
    pass


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        ({}, None),
        ({"act_quant_kwargs": Int8Settings()}, few_bits.InputFormat((8,), True, False)),
        (
            {"activation_quantization": "int8_asym_per_token"},
            few_bits.InputFormat((8,), True, True),
        ),
        (
            {"act_quant_kwargs": Float8Settings()},
            few_bits.InputFormat((8,), True, False, "no rule for inputs in Float8Settings"),
        ),
        (
            {"activation_quantization": "other"},
            few_bits.InputFormat((8,), True, True, "no rule for inputs in other"),
        ),
    ],
)
def test_the_format_of_inputs_is_read_from_the_weight(weight: Any, expected: Any) -> None:
    layer = type("Layer", (), {"weight": type("Weight", (), weight)()})()
    assert few_bits.input_format(layer) == expected


def without(name: str) -> Any:
    module = trained()
    delattr(module.up, name)
    module.up.register_parameter(name, None)
    return module


def wider() -> Any:
    module = trained()
    module.up.bias = torch.nn.Parameter(torch.zeros(25))
    return module


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: without("bias"), r"no parameter up\.bias; it has norm\.weight"),
        (wider, r"up\.bias: the trained parameter has shape \(24,\), the deployed one \(25,\)"),
    ],
)
def test_a_parameter_that_is_missing_or_of_another_shape_is_an_error(
    make: Callable[[], Any], message: str
) -> None:
    with pytest.raises(SideError, match=message):
        deployed(make())


def test_a_trained_model_that_was_cast_is_refused() -> None:
    with pytest.raises(
        SideError, match=r"in float32, got norm\.weight, a Parameter of torch\.bfloat16"
    ):
        compare_deployed(trained().bfloat16(), trained(), ROWS)


def test_what_is_no_module_is_refused_and_a_scripted_one_runs_in_float32() -> None:
    module = trained()
    exported = torch.export.export(module, (torch.from_numpy(ROWS),))
    with pytest.raises(SideError, match=r"got ExportedProgram: pass its `module\(\)`"):
        module_of(exported)
    found = deployed(exported.module())
    assert found.holds, found.text()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        traced = torch.jit.trace(copy.deepcopy(module), torch.from_numpy(ROWS))
    scripted = deployed(traced)
    assert scripted.holds, scripted.text()
    module.norm.eps = 1e-5
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        traced = torch.jit.trace(module, torch.from_numpy(ROWS))
    assert not deployed(traced).holds


@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
@pytest.mark.parametrize(
    ("config", "options", "rounds"),
    [
        ("Int8WeightOnlyConfig", {}, False),
        ("Float8WeightOnlyConfig", {}, False),
        ("IntxWeightOnlyConfig", {"weight_dtype": "int4"}, False),
        ("Int8DynamicActivationInt8WeightConfig", {}, True),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_formats_of_torchao(config: str, options: dict[str, str], rounds: bool) -> None:
    from torchao import quantization

    made = {name: getattr(torch, dtype) for name, dtype in options.items()}
    module = trained()
    quantization.quantize_(module, getattr(quantization, config)(**made))
    found = deployed(module)
    assert found.holds, found.text()
    assert len(found.layers) == (2 if rounds else 0)
    other = trained()
    with torch.no_grad():
        other.up.weight[3, 5] += 0.1
    quantization.quantize_(other, getattr(quantization, config)(**made))
    assert [w.name for w in deployed(other).weights if not w.holds] == ["up.weight"]
