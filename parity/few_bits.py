"""Low-precision storage formats of torch: decodes stored values, and bounds the error that rounding
to the format explains.

The bound comes from the range of the trained values, not from a stored scale, which may be wrong.
Source: docs/your-own-port.md "What is deployed".
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from parity.sides.side import SideError

FLOATS = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}
"""Float formats with a rule, by torch's name."""
EPS = float(np.finfo(np.float32).eps)
SMALLEST_SCALES = (0.0, EPS, 6.1e-5)
"""Smallest scales that libraries use: no minimum, torchao's minimum, and FBGEMM's
`SMALL_SCALE_THRESHOLD`."""
# Quotients are at most 255. Scale and quotient are rounded to float32, so a quotient is off by up
# to 255 * 2^-23 = 3e-5.
_TIE = 1e-4
"""Largest distance of a quotient (value divided by the format's step) from a half at which float32
may round it either way."""
_DYNAMIC = "torch.ao.nn.quantized.dynamic"


@dataclass(frozen=True)
class Decoded:
    """A stored array decoded to float32, its format, and half a step of the format at each element.

    `half` is 0 if the array is stored unchanged.
    """

    value: np.ndarray
    format: str = ""
    """Storage format, such as "int8, blocks of 1 x 32"; "" if the array is stored unchanged."""
    half: np.ndarray | float = 0.0
    why: str = ""
    """Why half a step of the format cannot be computed; empty if it can."""


@dataclass(frozen=True)
class InputFormat:
    """Format to which a layer rounds its inputs."""

    bits: tuple[int, ...]
    """Possible numbers of bits, with any sign bit, of the integers to which this layer rounds."""
    by_row: bool
    """Whether each vector along the last axis has its own scale; False: the tensor has one."""
    asymmetric: bool
    why: str = ""
    """Why inputs cannot be rounded to this format by `rounded`; empty if they can."""

    @property
    def text(self) -> str:
        """The format in words."""
        return f"int{max(self.bits)} by {'row' if self.by_row else 'tensor'}"


def input_format(module: Any) -> InputFormat | None:
    """Return the format to which a module rounds its inputs; None: it does not round them."""
    if type(module).__module__.startswith(_DYNAMIC):
        packed = getattr(module, "_packed_params", None)
        if "float16" in str(getattr(packed, "dtype", "")):
            return None
        why = "" if callable(getattr(module, "weight", None)) else "no rule for its packed weights"
        # Some of PyTorch's kernels use 7 of 8 bits, so that sums of products fit into 16 bits.
        return InputFormat((7, 8), by_row=False, asymmetric=True, why=why)
    return format_of_weight(getattr(module, "weight", None))


def format_of_weight(weight: Any) -> InputFormat | None:
    """Return the format to which a layer with this torchao weight rounds its inputs; None: it does
    not round them."""
    settings = getattr(weight, "act_quant_kwargs", None)
    if settings is not None:
        kind = type(settings).__name__
        by_row = "PerRow" in repr(getattr(settings, "granularity", ""))
        asymmetric = "ASYMMETRIC" in repr(getattr(settings, "mapping_type", ""))
        why = "" if "Int8" in kind else f"no rule for inputs in {kind}"
        return InputFormat((8,), by_row, asymmetric, why)
    kind = getattr(weight, "activation_quantization", None)
    if kind is None:
        return None
    text = str(getattr(kind, "value", kind))
    why = "" if text == "int8_asym_per_token" else f"no rule for inputs in {text}"
    return InputFormat((8,), by_row=True, asymmetric=True, why=why)


def rounded(x: np.ndarray, form: InputFormat) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the rounded inputs, and the error that a tie may cause, for each rounding convention.

    Libraries differ in the largest integer of a symmetric format, in the smallest scale, and in the
    number of bits. A tie is an element that float32 may round either way. Both arrays have the
    shape of `x`; the error is one step of the format at ties and 0 elsewhere.

    Args:
        x: inputs (..., in), float64.
        form: the format.
    """
    axis = -1 if form.by_row else None
    low, high = (f(x, axis=axis, keepdims=True) for f in (np.min, np.max))
    for bits, least in itertools.product(form.bits, SMALLEST_SCALES):
        if form.asymmetric:
            bottom = np.minimum(low, 0.0)
            scales = [(np.maximum(high, 0.0) - bottom) / (2**bits - 1)]
        else:
            bottom = np.zeros_like(low)
            largest = np.maximum(-low, high)
            scales = [largest / (2 ** (bits - 1) - 1), largest / ((2**bits - 1) / 2)]
        for scale in scales:
            step = np.maximum(scale, least)
            step = np.where(step > 0, step, 1.0)
            zero = np.rint(-bottom / step)
            first = 0 if form.asymmetric else -(2 ** (bits - 1))
            quotient = x / step
            numbers = np.clip(np.rint(quotient) + zero, first, first + 2**bits - 1)
            near = np.abs(np.abs(quotient - np.floor(quotient)) - 0.5) < _TIE
            yield (numbers - zero) * step, np.where(near, step, 0.0)


def decoded(tensor: Any, trained: np.ndarray, name: str) -> Decoded:
    """Return a stored parameter or buffer in float32, with half a step of its format.

    Integers, bools and complex numbers keep their dtype.

    Args:
        tensor: the stored value.
        trained: the value before it was rounded to the format, from which half a step is derived.
        name: name of the parameter or buffer, for messages.

    Raises:
        SideError: the value is sparse or has no data.
    """
    if hasattr(tensor, "qdata") and hasattr(tensor, "dequantize"):
        return _of_blocks(tensor, trained)
    if tensor.is_meta or "strided" not in str(tensor.layout):
        raise SideError(
            f"expected a dense tensor with data, got {name} in {tensor.layout} on {tensor.device}: "
            "materialise it first"
        )
    if tensor.is_quantized:
        value = tensor.dequantize().cpu().numpy()
        channels = "per_channel" in str(tensor.qscheme())
        block = (1, *value.shape[1:]) if channels else value.shape
        zero = tensor.q_per_channel_zero_points() if channels else tensor.q_zero_point()
        if value.shape != trained.shape:
            return Decoded(value, "int8")
        half = half_integer_step(trained, block, 8, _any(zero))
        return Decoded(value, f"int8, blocks of {_shape(block)}", half)
    kind = str(tensor.dtype).removeprefix("torch.")
    if not tensor.is_floating_point():
        return Decoded(tensor.cpu().numpy())
    value = tensor.detach().float().cpu().numpy()
    if kind in ("float32", str(trained.dtype)):
        return Decoded(value)
    if kind in FLOATS:
        return Decoded(value, kind, half_float_step(trained, kind))
    return Decoded(value, kind, why=f"no rule for {kind}")


def _of_blocks(tensor: Any, trained: np.ndarray) -> Decoded:
    """Decode a torchao tensor, which has one scale per block; the result is that of `decoded`."""
    value = tensor.dequantize().float().cpu().numpy()
    stored = str(getattr(tensor, "target_dtype", tensor.qdata.dtype)).removeprefix("torch.")
    block = getattr(tensor, "block_size", None)
    if not isinstance(block, (tuple, list)) or value.shape != trained.shape:
        return Decoded(value, stored, why=f"no rule for {type(tensor).__name__}")
    block = tuple(min(b, n) for b, n in zip(block, trained.shape, strict=True))
    text = f"{stored}, blocks of {_shape(block)}"
    if stored in FLOATS:
        largest = float(ml_dtypes.finfo(FLOATS[stored]).max)
        scale = over_blocks(np.abs(trained), block, np.maximum) / largest
        half = scale * half_float_step(trained / np.where(scale > 0, scale, 1.0), stored)
    elif integer := re.fullmatch(r"u?int([2-8])", stored):
        asymmetric = _any(getattr(tensor, "zero_point", None))
        half = half_integer_step(trained, block, int(integer[1]), asymmetric)
    else:
        return Decoded(value, text, why=f"no rule for {stored}")
    # The scale is rounded to its own dtype, and the product of scale and number to float32.
    units = {"torch.bfloat16": 2.0**-8, "torch.float16": 2.0**-11}
    unit = units.get(str(tensor.scale.dtype), EPS)
    return Decoded(value, text, half * (1 + unit) + (unit + EPS) * np.abs(trained))


def half_integer_step(
    trained: np.ndarray, block: tuple[int, ...], bits: int, asymmetric: bool
) -> np.ndarray:
    """Return half a step of integers of `bits` bits at each element; each block has its own step.

    `trained` has the values before rounding; `block` is the size of a block by axis. A symmetric
    format has its largest integer at the block's largest absolute value; an asymmetric one covers
    the values between the block's smallest and largest, and 0. The result includes the float32
    rounding of decoding.
    """
    trained = trained.astype(np.float64)
    if asymmetric:
        top = np.maximum(over_blocks(trained, block, np.maximum), 0.0)
        bottom = np.minimum(over_blocks(trained, block, np.minimum), 0.0)
        step = (top - bottom) / (2**bits - 1)
    else:
        step = over_blocks(np.abs(trained), block, np.maximum) / (2 ** (bits - 1) - 1)
    # torchao does not go below a scale of float32's epsilon; decoding multiplies in float32.
    return np.where(step > 0, np.maximum(step, EPS), 0.0) / 2 + 2 * EPS * np.abs(trained)


def half_float_step(trained: np.ndarray, kind: str) -> np.ndarray:
    """Return half the distance between neighbouring numbers of a format at each element.

    Args:
        trained: values before rounding, divided by their scale if the format has one.
        kind: name of the format, a key of `FLOATS`.
    """
    info = ml_dtypes.finfo(FLOATS[kind])
    size = np.maximum(np.abs(trained.astype(np.float64)), float(info.smallest_normal))
    _, exponent = np.frexp(size)
    return np.ldexp(1.0, exponent - 1) * float(info.eps) / 2


def over_blocks(x: np.ndarray, block: tuple[int, ...], reduce: np.ufunc) -> np.ndarray:
    """Return a reduction of every block of `x`, repeated to the shape of `x`.

    Args:
        x: array.
        block: size of a block by axis; the last block of an axis may be shorter.
        reduce: `np.maximum` or `np.minimum`.
    """
    if not x.size:
        return x
    result = x
    for axis, size in enumerate(block):
        starts = np.arange(0, x.shape[axis], size)
        lengths = np.diff(np.asarray([*starts, x.shape[axis]], np.int64))
        result = np.repeat(reduce.reduceat(result, starts, axis=axis), lengths, axis=axis)
    return result


def largest_share(
    error: np.ndarray | float, bound: np.ndarray | float
) -> tuple[float, tuple[int, ...]]:
    """Return the largest ratio of an error to its bound, and the index of its element.

    A ratio of NaN counts as largest. An error of 0 has ratio 0, also where the bound is 0. The
    result is (0, ()) if there are no elements.
    """
    error = np.asarray(error)
    if not error.size:
        return 0.0, ()
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(error == 0, 0.0, error / bound)
    at = np.unravel_index(int(np.argmax(np.where(np.isnan(share), math.inf, share))), share.shape)
    return float(share[at]), tuple(map(int, at))


def _any(zero_point: Any) -> bool:
    """Return whether a zero point (a number, a tensor or None) differs from 0 anywhere."""
    return zero_point is not None and bool(np.any(np.asarray(zero_point)))


def _shape(block: tuple[int, ...]) -> str:
    return " x ".join(map(str, block))
