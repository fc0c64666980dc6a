"""A torch model that is deployed in few bits, against the model that was trained.

Three questions are separate, and none needs a chosen tolerance:

1. Is every weight the trained one, rounded to its format? The bound of an element is half a step of
   the format, computed from the trained weights of its block and not from the stored scale.
2. If a layer rounds its inputs too, does it compute what the trained layer computes on these
   inputs? The bound is half a step of the inputs' format times the sum of the weights' magnitudes.
3. Does everything else compute what the trained program computes with these weights? Both are
   compared as a port and its original (`parity.port`), so only rounding may differ. Layers that
   round their inputs pass on the deployed results on both sides.

What remains is the cost of the format: the change of the outputs. Source: docs/your-own-port.md
"What is deployed".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from parity.engine.measure.metrics import relative_l2
from parity.port.compare import Port, compare
from parity.port.report import Report
from parity.sides.side import AS_IS, Precision, Run, SideError, Trace

if TYPE_CHECKING:
    import torch

_COMPILED = "_orig_mod."
"""Prefix that `torch.compile` gives to the names of a module's parameters."""
_FLOATS = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}
UNCHANGED = "unchanged"
_FLOAT32 = float(np.finfo(np.float32).eps)


@dataclass(frozen=True)
class DeployedWeight:
    """One parameter as it is deployed, against the trained one."""

    name: str
    """Name of the parameter in the trained model."""
    format: str
    """Stored format, such as "int8, blocks of 1 x 32"; "" if it is the trained one."""
    share: float
    """Largest error of an element over half a step of the format at that element; at most 1 if the
    weight is the trained one, rounded. NaN: there is no rule for this format."""
    element: tuple[int, ...]
    """Index of the element with the largest share."""
    trained: float
    """Trained value of that element."""
    deployed: float
    """Deployed value of that element."""
    why: str = ""
    """Why there is no rule; empty otherwise."""

    @property
    def holds(self) -> bool:
        """Whether every element is the trained one, rounded to the format."""
        return self.share <= 1.0


@dataclass(frozen=True)
class DeployedLayer:
    """One call of a layer that rounds its inputs, against the trained layer on the same inputs."""

    name: str
    """Path of the layer; a second call is `path#2`."""
    format: str
    """Format of the inputs, such as "int8 by row"."""
    share: float
    """Largest error of an element of the result over what the format's half step explains; at most
    1 if the layer is the trained one. NaN: there is no rule for this layer."""
    element: tuple[int, ...]
    """Index of the element of the result with the largest share."""
    why: str = ""
    """Why there is no rule; empty otherwise."""

    @property
    def holds(self) -> bool:
        """Whether rounded inputs explain the error of every element."""
        return self.share <= 1.0


@dataclass(frozen=True)
class Deployment:
    """Result of `compare_deployed`."""

    weights: tuple[DeployedWeight, ...]
    """Every parameter, in the order of the trained model."""
    layers: tuple[DeployedLayer, ...]
    """Every call of a layer that rounds its inputs."""
    program: Report
    """The rest of the deployed program against the trained one with the deployed weights."""
    cost: Mapping[str, float]
    """Relative L2 distance between the outputs of the deployed and of the trained model, by name of
    the output: what the format costs on these inputs."""

    @property
    def holds(self) -> bool:
        """Whether all weights are rounded trained ones, and the program is the trained one."""
        return all(part.holds for part in (*self.weights, *self.layers, self.program))

    def text(self) -> str:
        """Return both answers and the cost, one line each; parameters that do not hold by name."""
        parts: dict[str, list[DeployedWeight | DeployedLayer]] = {}
        for weight in self.weights:
            parts.setdefault(f"weights, {weight.format or UNCHANGED}", []).append(weight)
        for layer in self.layers:
            parts.setdefault(f"layers with inputs in {layer.format}", []).append(layer)
        lines = []
        for name, group in parts.items():
            held = sum(part.holds for part in group)
            known = [part.share for part in group if not math.isnan(part.share)]
            worst = f"; largest error {max(known):.2f} of its bound" if known else ""
            lines.append(f"{name}: {held} of {len(group)} hold{worst}")
            lines += [f"  {_line(part)}" for part in group if not part.holds]
        verdict = "is the trained one" if self.program.holds else "is not the trained one"
        lines.append(f"the program with these weights {verdict}:")
        lines += [f"  {line}" for line in self.program.text().splitlines()]
        costs = (f"{name} {value:.2e}" for name, value in self.cost.items())
        lines.append(f"cost of the format on these inputs, relative L2: {', '.join(costs)}")
        return "\n".join(lines)


def compare_deployed(
    trained: torch.nn.Module,
    deployed: torch.nn.Module,
    *inputs: Any,
    call: Callable[..., Any] | None = None,
    **keywords: Any,
) -> Deployment:
    """Compare a deployed torch module with the module that was trained.

    Formats with a rule: float16, bfloat16, float8; integers of torchao (`quantize_` with weights of
    4 or 8 bits) and of `torch.ao.quantization.quantize_dynamic`. Another format does not hold and
    says so.

    Args:
        trained: the module with parameters in float32, in the mode to be compared.
        deployed: the same module, quantised, cast, or returned by `torch.compile`.
        inputs: positional arguments of the call, as in `TorchSide`.
        call: function `call(module, *inputs, **keywords)`; None: `module(...)`.
        keywords: keyword arguments of the call.

    Raises:
        SideError: a parameter of the trained module is not float32, the deployed module lacks one
            or has it in another shape, or a program raises an error.
    """
    from parity.sides.torch_side import TorchSide

    original = TorchSide(trained, *inputs, call=call, **keywords)
    weights, values = [], {}
    found = dict(_parameters(deployed))
    for name, tensor in trained.named_parameters():
        if str(tensor.dtype) != "torch.float32":
            raise SideError(
                f"expected trained parameters in float32, got {name} in {tensor.dtype}: pass the "
                "model that was trained, before it was cast or quantised"
            )
        if name not in found:
            raise SideError(
                f"the deployed module has no parameter {name}; it has "
                f"{', '.join(list(found)[:5]) or 'none'}. If it is wrapped in another module, pass "
                "the module inside and `call`"
            )
        row, value = _weight(name, tensor.detach().cpu().numpy(), found[name])
        weights.append(row)
        values[name] = value
    with_these = original.with_parameters(values)
    side = _DeployedSide(deployed, with_these, call=call)
    rounding = side.rounding_layers()
    seen = side.run().stages
    fed = {name: seen[name] for name in rounding}
    # Each stage is computed from the deployed results of the layers before it.
    expected = with_these.run(Run(Precision.FLOAT64, forced=fed)).stages if fed else {}
    layers = tuple(
        _layer(name, each, fed[name], expected[name], values) for name, each in rounding.items()
    )
    program = compare(
        Port("deployed", _Fed(with_these, fed), side, gradients=False, bfloat16=False)
        if fed
        else Port("deployed", with_these, side, gradients=False, bfloat16=False)
    )
    before, after = original.run(AS_IS), side.run(AS_IS)
    cost = {
        name: relative_l2(after.stages[name], before.stages[name])
        for name in before.outputs
        if name in after.outputs and after.stages[name].shape == before.stages[name].shape
    }
    return Deployment(tuple(weights), layers, program, cost)


class _DeployedSide:
    """The deployed module, run unmodified; its parameters are the decoded ones.

    Kernels for few bits have no float64, so there is only the float32 run: the trained program with
    the same weights is the truth.
    """

    kind = "torch"

    def __init__(
        self, module: torch.nn.Module, like: Any, *, call: Callable[..., Any] | None
    ) -> None:
        from parity.sides.torch_side import TorchSide

        inputs, keywords = like.arguments
        self._side = TorchSide(module, *inputs, call=call, **keywords)
        # Otherwise a module with parameters in another dtype would run as a copy in float32.
        self._side._copies[Precision.FLOAT32] = module
        self._parameters = like.parameters()

    def parameters(self) -> Mapping[str, np.ndarray]:
        """Return the decoded parameters, by the names of the trained module."""
        return self._parameters

    def inputs(self) -> dict[str, np.ndarray]:
        """Return the inputs, by name."""
        return self._side.inputs()

    def rounding_layers(self) -> dict[str, _RoundedInputs]:
        """Run once and return the inputs of every layer that rounds them, by name of its stage."""
        found: dict[str, _RoundedInputs] = {}

        def hook_of(path: str, step: _Step) -> Callable[..., None]:
            def hook(_module: Any, inputs: tuple[Any, ...]) -> None:
                count = sum(each.path == path for each in found.values()) + 1
                name = path if count == 1 else f"{path}#{count}"
                values = inputs[0].detach().float().cpu().numpy().astype(np.float64)
                found[name] = _RoundedInputs(path, step, values)

            return hook

        hooks = [
            module.register_forward_pre_hook(hook_of(path, step))
            for path, module in self._side.module.named_modules()
            if path and (step := _step_of(module)) is not None
        ]
        try:
            self._side.run()
        finally:
            for hook in hooks:
                hook.remove()
        return found

    def run(self, how: Run = AS_IS) -> Trace:
        """Run the module as it is deployed.

        Raises:
            SideError: the settings ask for another run, or the module raises an error.
        """
        if how != AS_IS:
            raise SideError("a deployed module runs as it is deployed, in no other precision")
        return self._side.run()


class _Fed:
    """The trained program, in which some stages pass on given results instead of their own."""

    def __init__(self, side: Any, values: Mapping[str, np.ndarray]) -> None:
        self.kind, self.parameters, self.inputs = side.kind, side.parameters, side.inputs
        self._side, self._values = side, values

    def run(self, how: Run = AS_IS) -> Trace:
        """Run with these settings; the replaced stages are returned as they were given.

        Raises:
            SideError: the module raises an error.
        """
        trace = self._side.run(replace(how, forced={**self._values, **how.forced}))
        given = {n: v.astype(trace.stages[n].dtype) for n, v in self._values.items()}
        return replace(trace, stages=trace.stages | given)


@dataclass(frozen=True)
class _Step:
    """Format to which a layer rounds its inputs."""

    bits: int
    by_row: bool
    asymmetric: bool
    why: str = ""
    """Why there is no rule for this format; empty otherwise."""

    @property
    def text(self) -> str:
        return f"int{self.bits} by {'row' if self.by_row else 'tensor'}"


@dataclass(frozen=True)
class _RoundedInputs:
    """Inputs of one call of a layer that rounds them."""

    path: str
    step: _Step
    values: np.ndarray
    """The inputs before they are rounded, (..., in)."""


def _step_of(module: Any) -> _Step | None:
    """Return the format to which a module rounds its inputs; None: it does not round them."""
    if type(module).__module__.startswith("torch.ao.nn.quantized.dynamic"):
        # PyTorch's kernels use 7 of 8 bits, so that sums of products fit into 16 bits.
        return _Step(7, by_row=False, asymmetric=True)
    settings = getattr(getattr(module, "weight", None), "act_quant_kwargs", None)
    if settings is None:
        return None
    kind = type(settings).__name__
    by_row = "PerRow" in repr(getattr(settings, "granularity", ""))
    symmetric = "ASYMMETRIC" not in repr(getattr(settings, "mapping_type", ""))
    why = "" if "Int8" in kind else f"no rule for inputs in {kind}"
    return _Step(8, by_row, asymmetric=not symmetric, why=why)


def _layer(
    name: str,
    inputs: _RoundedInputs,
    result: np.ndarray,
    expected: np.ndarray,
    parameters: Mapping[str, np.ndarray],
) -> DeployedLayer:
    """Compare one call of a linear layer with the trained layer on the same inputs.

    Args:
        name: name of the stage.
        inputs: the deployed layer's inputs.
        result: the deployed layer's result, (..., out).
        expected: the trained layer's result in float64.
        parameters: the decoded parameters by name.
    """
    step, x = inputs.step, inputs.values
    weight = parameters.get(f"{inputs.path}.weight")
    why = step.why
    if weight is None or weight.ndim != 2 or weight.shape[1] != x.shape[-1]:
        why = "no rule for a layer without a weight (out, in)"
    if why:
        return DeployedLayer(name, step.text, math.nan, (), why)
    assert weight is not None
    block = (*(1,) * (x.ndim - 1), x.shape[-1]) if step.by_row else x.shape
    half = _half_integer_step(x, block, step.bits, step.asymmetric)
    size = np.abs(weight.astype(np.float64)).T
    # A sum of n products in float32 is off by at most n roundings of the sum of magnitudes.
    bound = half @ size + (x.shape[-1] + 2) * _FLOAT32 * (np.abs(x) @ size)
    error = np.abs(result.astype(np.float64) - expected)
    share = np.where(error == 0, 0.0, error / np.maximum(bound, np.finfo(np.float64).tiny))
    at = np.unravel_index(int(np.argmax(np.where(np.isnan(share), np.inf, share))), share.shape)
    return DeployedLayer(name, step.text, float(share[at]), tuple(map(int, at)))


def _parameters(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the parameters by name, also those that quantised modules hold behind a method."""
    for path, child in module.named_modules():
        prefix = f"{path}." if path else ""
        for name in ("weight", "bias"):
            method = getattr(type(child), name, None)
            if callable(method) and (value := getattr(child, name)()) is not None:
                yield f"{prefix}{name}".removeprefix(_COMPILED), value
    for name, value in module.named_parameters(remove_duplicate=False):
        yield name.removeprefix(_COMPILED), value


def _weight(name: str, trained: np.ndarray, tensor: Any) -> tuple[DeployedWeight, np.ndarray]:
    """Return the row of one parameter and its decoded value, in float32.

    Raises:
        SideError: the shapes differ.
    """
    value, text, bound, why = _decoded(tensor.detach(), trained)
    if value.shape != trained.shape:
        raise SideError(
            f"{name}: the trained parameter has shape {trained.shape}, the deployed one "
            f"{value.shape}"
        )
    # In float64, so that the difference of two float32 numbers is exact.
    error = np.abs(value.astype(np.float64) - trained)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(error == 0, 0.0, error / bound)
    at = np.unravel_index(int(np.argmax(np.where(np.isnan(share), np.inf, share))), share.shape)
    row = DeployedWeight(
        name,
        text,
        math.nan if why else float(share[at]),
        tuple(map(int, at)),
        float(trained[at]),
        float(value[at]),
        why,
    )
    return row, value


def _decoded(tensor: Any, trained: np.ndarray) -> tuple[np.ndarray, str, np.ndarray, str]:
    """Return a stored parameter in float32, its format, half a step of it per element, and why
    there is no rule ("" if there is one).
    """
    if hasattr(tensor, "qdata") and hasattr(tensor, "dequantize"):
        return _decoded_blocks(tensor, trained)
    if tensor.is_quantized:
        value = tensor.dequantize().numpy()
        channels = "per_channel" in str(tensor.qscheme())
        block = (1, *trained.shape[1:]) if channels else trained.shape
        asymmetric = _any(tensor.q_per_channel_zero_points() if channels else tensor.q_zero_point())
        half = _half_integer_step(trained, block, 8, asymmetric)
        return value, f"int8, blocks of {_shape(block)}", half, ""
    value = tensor.float().cpu().numpy()
    kind = str(tensor.dtype).removeprefix("torch.")
    if kind == "float32":
        return value, "", np.zeros(trained.shape), ""
    if kind in _FLOATS:
        return value, kind, _half_float_step(trained, kind), ""
    return value, kind, np.zeros(trained.shape), f"no rule for {kind}"


def _decoded_blocks(tensor: Any, trained: np.ndarray) -> tuple[np.ndarray, str, np.ndarray, str]:
    """Return the same as `_decoded` for a tensor of torchao, which has a scale per block."""
    value = tensor.dequantize().float().cpu().numpy()
    block = tuple(min(b, n) for b, n in zip(tensor.block_size, trained.shape, strict=True))
    stored = str(getattr(tensor, "target_dtype", tensor.qdata.dtype)).removeprefix("torch.")
    text = f"{stored}, blocks of {_shape(block)}"
    if stored in _FLOATS:
        largest = float(ml_dtypes.finfo(_FLOATS[stored]).max)
        scale = _blocks(np.abs(trained), block, np.max) / largest
        half = scale * _half_float_step(trained / np.where(scale > 0, scale, 1.0), stored)
    elif stored in ("int8", "uint8", "int4", "uint4"):
        zero = getattr(tensor, "zero_point", None)
        half = _half_integer_step(trained, block, int(stored[-1]), _any(zero))
    else:
        return value, text, np.zeros(trained.shape), f"no rule for {stored}"
    # The scale is rounded to its own dtype, and the product of scale and number to float32.
    unit = 2.0**-8 if "bfloat16" in str(tensor.scale.dtype) else _FLOAT32
    return value, text, half * (1 + unit) + (unit + _FLOAT32) * np.abs(trained), ""


def _half_integer_step(
    trained: np.ndarray, block: tuple[int, ...], bits: int, asymmetric: bool
) -> np.ndarray:
    """Return half a step of integers of `bits` bits whose range is that of each block.

    A symmetric format has its largest integer at the block's largest absolute value; an asymmetric
    one covers the values between the block's smallest and largest, and 0.
    """
    trained = trained.astype(np.float64)
    if not asymmetric:
        step = _blocks(np.abs(trained), block, np.max) / (2 ** (bits - 1) - 1)
    else:
        top = np.maximum(_blocks(trained, block, np.max), 0.0)
        step = (top - np.minimum(_blocks(trained, block, np.min), 0.0)) / (2**bits - 1)
    # Decoding multiplies in float32.
    return step / 2 + 2 * _FLOAT32 * np.abs(trained)


def _half_float_step(trained: np.ndarray, kind: str) -> np.ndarray:
    """Return half the distance between the two numbers of a float format around each element."""
    info = ml_dtypes.finfo(_FLOATS[kind])
    size = np.maximum(np.abs(trained.astype(np.float64)), float(info.smallest_normal))
    _, exponent = np.frexp(size)
    return np.ldexp(1.0, exponent - 1) * float(info.eps) / 2


def _blocks(x: np.ndarray, block: tuple[int, ...], reduce: Callable[..., Any]) -> np.ndarray:
    """Return a reduction of every block of `x`, repeated to the shape of `x`.

    Args:
        x: array whose axes are multiples of the block's; a last block may be shorter.
        block: size of a block by axis.
        reduce: NumPy reduction with `axis` and `keepdims`, such as `np.max`.
    """
    result = x
    for axis, size in enumerate(block):
        starts = np.arange(0, x.shape[axis], size)
        ufunc = {np.max: np.maximum, np.min: np.minimum}[reduce]
        reduced = ufunc.reduceat(result, starts, axis=axis)
        lengths = np.diff(np.asarray([*starts, x.shape[axis]], np.int64))
        result = np.repeat(reduced, lengths, axis=axis)
    return result


def _any(zero_point: Any) -> bool:
    """Return whether a zero point (a number, a tensor or None) differs from 0 anywhere."""
    if zero_point is None:
        return False
    return bool(np.any(np.asarray(zero_point)))


def _shape(block: tuple[int, ...]) -> str:
    return " x ".join(map(str, block))


def _line(part: DeployedWeight | DeployedLayer) -> str:
    if part.why:
        return f"{part.name}: {part.why}, so it was not compared"
    text = f"{part.name}: {part.share:.3g} of its bound at {list(part.element)}"
    if isinstance(part, DeployedLayer):
        return text
    return f"{text}: trained {part.trained:.6g}, deployed {part.deployed:.6g}"
