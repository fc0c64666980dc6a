"""Error that each matrix product of a model would have in each low-precision format.

One training step is run in the model's own configuration, and the operands of every linear map are
captured: activations, weights, output gradients. Each of a map's three products (forward, input
gradient, weight gradient) is computed again in every format by the NumPy oracle
(`stability.products.block_formats`) and compared with float64. If the error or the underflow
exceeds a bound, somewhat above the values for normal random numbers and for the byte-level model, a
wider format is advised. Source: docs/formats.md "What would it cost?".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from megalodon_jax.layers.linear import Linear, linear_maps
from megalodon_jax.model import MegalodonForCausalLM
from megalodon_jax.policy import Policy
from megalodon_jax.quantization.products import DIRECTIONS, ROTATION, Direction
from megalodon_jax.weights import dotted
from parity.megalodon.intermediates import capture
from parity.tolerances import FORMAT_BOUNDS
from stability.core.findings import RESTORE, Finding, Severity
from stability.core.number_formats import BF16, E2M1, E4M3, Format
from stability.core.parameter_leaves import kind_of
from stability.products import block_formats
from stability.products.block_formats import Blocks

LADDER = ("nvfp4", "mxfp8", "bfloat16")
"""Formats that can be advised, narrowest first. The last is advised if both others exceed their
bounds."""
TOKENS = 256
"""Largest number of tokens whose activations are analysed; a sample suffices, since errors and
fractions are averages over tokens."""


@dataclass(frozen=True, slots=True)
class Products:
    """Operands of the three products of a linear map, float32."""

    x: np.ndarray
    """Activations (tokens, in)."""
    weight: np.ndarray
    """Weight (out, in)."""
    dy: np.ndarray
    """Gradient of the output (tokens, out)."""

    def operands(self, direction: Direction) -> tuple[np.ndarray, np.ndarray]:
        """Return both operands of one product, (rows, k) and (columns, k); k is contracted."""
        pairs = {
            "forward": (self.x, self.weight),
            "input_grad": (self.dy, self.weight.T),
            "weight_grad": (self.dy.T, self.x.T),
        }
        return pairs[direction]


@dataclass(frozen=True, slots=True)
class Cost:
    """Error of one product in one format, and losses of its operands.

    Each loss (`underflow`, `clipped`, `mse`) is the larger one of the product's two operands.
    """

    gemm: str
    """Name of the linear map."""
    direction: Direction
    """Product: "forward", "input_grad" or "weight_grad"."""
    format: str
    """Key of `FORMATS`."""
    underflow: float
    """Fraction of the operand's elements that underflow to 0."""
    clipped: float
    """Fraction of the operand's elements beyond the largest number that their scale allows."""
    mse: float
    """Mean squared error of the operand relative to its mean square."""
    error: float
    """Relative L2 error of the product against float64."""

    @property
    def fraction(self) -> float:
        """Larger of error and underflow, each divided by its bound; above 1 the format fails."""
        bound = FORMAT_BOUNDS[self.format]
        return float(np.max([self.error / bound.error, self.underflow / bound.underflow]))

    @property
    def measured(self) -> bool:
        """Whether the error is finite; it is NaN if an operand holds NaN or infinity."""
        return bool(np.isfinite(self.error))

    @property
    def graver(self) -> tuple[bool, float]:
        """Sort key (not measured, `fraction`): the worst cost has the largest key."""
        return not self.measured, self.fraction


def captured(model: MegalodonForCausalLM, ids: Any) -> dict[str, Products]:
    """Run one training step and return the operands of every linear map but the head, by name.

    At most `TOKENS` of the B L tokens are kept, evenly spaced. The step uses the model's own
    configuration.

    Args:
        model: the model.
        ids: token ids (B, L).
    """
    ids = jnp.asarray(ids, jnp.int32)
    intermediates, bars = _step(_marked(model), ids)
    products = {}
    for name, linear in linear_maps(model).items():
        if name == "lm_head":
            continue
        x, dy = (np.asarray(a, np.float32) for a in (intermediates[f"{name}/x"], bars[f"{name}/y"]))
        rows = np.linspace(0, x[..., 0].size - 1, min(TOKENS, x[..., 0].size)).astype(int)
        x, dy = (a.reshape(-1, a.shape[-1])[rows] for a in (x, dy))
        products[name] = Products(x, np.asarray(linear.weight, np.float32), dy)
    return products


def costs(products: Mapping[str, Products], formats: Sequence[str] | None = None) -> Iterator[Cost]:
    """Yield the cost of every product in every format (keys of `FORMATS`; None: all of them)."""
    for name, product in products.items():
        for direction in DIRECTIONS:
            pair = product.operands(direction)
            exact = _times(*pair)
            for fmt in formats or FORMATS:
                yield _cost(name, direction, fmt, pair, exact)


def advice(all_costs: Sequence[Cost]) -> dict[tuple[str, Direction], str]:
    """Return, by (linear map, direction), the narrowest format of `LADDER` that suffices.

    A format suffices if error and underflow are within its `FORMAT_BOUNDS`. If neither nvfp4 nor
    mxfp8 suffices, the advice is bfloat16.
    """
    by_product: dict[tuple[str, Direction], dict[str, Cost]] = {}
    for cost in all_costs:
        by_product.setdefault((cost.gemm, cost.direction), {})[cost.format] = cost
    return {
        at: next((f for f in LADDER[:-1] if f in each and each[f].fraction <= 1), LADDER[-1])
        for at, each in by_product.items()
    }


def rules(all_costs: Sequence[Cost]) -> Policy:
    """Return the advice as a value of `MegalodonConfig.gemm_backend`: rules for every matrix.

    A matrix gets one backend for its three products, the widest one advised; bfloat16 becomes
    "default". Matrices that differ only in the layer number share a rule if their advice is equal.
    """
    backends: dict[str, str] = {}
    for (name, _), fmt in advice(all_costs).items():
        backends[name] = max(backends.get(name, LADDER[0]), fmt, key=LADDER.index)
    kinds: dict[str, set[str]] = {}
    for name, fmt in backends.items():
        kinds.setdefault(kind_of(name), set()).add(fmt)
    each = {
        kind_of(name) if len(kinds[kind_of(name)]) == 1 else name: fmt
        for name, fmt in backends.items()
    }
    usual = max(LADDER, key=list(each.values()).count)
    policy = [(name, fmt) for name, fmt in each.items() if fmt != usual] + [("model.*", usual)]
    return tuple((name, "default" if fmt == LADDER[-1] else fmt) for name, fmt in policy)


def findings(all_costs: Sequence[Cost]) -> list[Finding]:
    """Return one finding per product: OK if the narrowest format suffices, else a note.

    A product with NaN or infinity in an operand is an error.
    """
    formats, narrowest, out = advice(all_costs), LADDER[0], []
    for cost in all_costs:
        if cost.format != narrowest:
            continue
        best, bound = formats[cost.gemm, cost.direction], FORMAT_BOUNDS[cost.format]
        severity = Severity.OK if best == narrowest else Severity.NOTE
        subject, metric = f"{cost.gemm} {cost.direction}", "output_error"
        if not cost.measured:
            message = "not measured: an operand of this product holds NaN or infinity"
            numbers = cost.error, bound.error, bound.reason
            error = Severity.ERROR
            out.append(Finding("what_if", error, subject, metric, *numbers, message, RESTORE))
            continue
        message = (
            f"in {cost.format} its error is {cost.error:.3f}, {cost.underflow:.1%} of an operand "
            f"becomes 0 and {cost.clipped:.1%} is clipped; advised format: {best}"
        )
        remedy = "" if best == narrowest else f"set gemm_backend to {best} for this map by a rule"
        numbers = cost.error, bound.error, bound.reason
        out.append(Finding("what_if", severity, subject, metric, *numbers, message, remedy))
    return out


def rows(all_costs: Sequence[Cost]) -> list[dict[str, Any]]:
    """Return costs as dictionaries for JSON: all fields and `fraction`, to 4 significant digits."""
    return [
        {n: v if isinstance(v, str) else float(f"{v:.4g}") for n, v in asdict(cost).items()}
        | {"fraction": float(f"{cost.fraction:.4g}")}
        for cost in all_costs
    ]


def _mx(fmt: Format, mode: str) -> Callable[[np.ndarray, bool], Blocks]:
    return lambda x, weight: block_formats.mx(x, mode, fmt)


def _deepseek(x: np.ndarray, weight: bool) -> Blocks:
    return block_formats.deepseek(x, rows=128 if weight else 1)


def _plain(x: np.ndarray, weight: bool) -> Blocks:
    return Blocks(BF16.encode(x)[..., None, :], np.ones((*x.shape[:-1], 1)), 1.0)


FORMATS: dict[str, tuple[Format, Callable[[np.ndarray, bool], Blocks]]] = {
    "nvfp4": (E2M1, lambda x, weight: block_formats.nvfp4(x)),
    "mxfp4": (E2M1, _mx(E2M1, "ceil")),
    "mxfp8": (E4M3, _mx(E4M3, "ceil")),
    "mxfp8 floor": (E4M3, _mx(E4M3, "floor")),
    "deepseek": (E4M3, _deepseek),
    "bfloat16": (BF16, _plain),
}
"""Formats by name: (format of the elements, quantiser). A quantiser takes an operand and whether it
is a weight."""


class _Marked(eqx.Module):
    linear: Linear
    name: str = eqx.field(static=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.linear(checkpoint_name(x, f"{self.name}/x"))
        return checkpoint_name(y, f"{self.name}/y")


def _marked(model: MegalodonForCausalLM) -> MegalodonForCausalLM:
    def mark(path: Any, node: Any) -> Any:
        return _Marked(node, dotted(path)) if isinstance(node, Linear) else node

    blocks = jax.tree_util.tree_map_with_path(
        mark, {"model": model.model}, is_leaf=lambda n: isinstance(n, Linear)
    )
    return eqx.tree_at(lambda m: m.model, model, blocks["model"])


@eqx.filter_jit
def _step(model: Any, ids: jax.Array) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Return all named intermediates, and the gradients of the linear maps' outputs.

    `_marked` names the input of a linear map `<map>/x` and its output `<map>/y`.
    """
    params, static = eqx.partition(model, eqx.is_array)

    def loss(params: Any) -> jax.Array:
        return eqx.combine(params, static).compute_loss(ids, ids)

    shapes = jax.eval_shape(capture(loss), params)[1]
    zeros = {n: jnp.zeros(s.shape, s.dtype) for n, s in shapes.items() if n.endswith("/y")}
    cotangents, intermediates = jax.grad(
        lambda offsets: capture(loss, offsets=offsets)(params), has_aux=True
    )(zeros)
    return intermediates, cotangents


def _times(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a.astype(np.float64) @ b.astype(np.float64).T


def _cost(
    name: str,
    direction: Direction,
    fmt: str,
    pair: tuple[np.ndarray, np.ndarray],
    exact: np.ndarray,
) -> Cost:
    if fmt == "nvfp4" and direction == "weight_grad":
        pair = _rotated(pair[0]), _rotated(pair[1])
    element, quantise = FORMATS[fmt]
    shares, rounded = [], []
    for i, x in enumerate(pair):
        blocks = quantise(x, i == 1 and direction != "weight_grad")
        rounded.append(blocks.flat(x.shape[-1]))
        shares.append(_shares(x, rounded[-1], blocks, element))
    # np.max propagates NaN; with Python's max the result would depend on the order of arguments.
    worst = (float(np.max(each)) for each in zip(*shares, strict=True))
    off = np.linalg.norm(_times(*rounded) - exact)
    return Cost(name, direction, fmt, *worst, error=float(off / (np.linalg.norm(exact) or 1.0)))


def _shares(
    x: np.ndarray, rounded: np.ndarray, blocks: Blocks, element: Format
) -> tuple[float, float, float]:
    """Return underflow fraction, clipped fraction and relative MSE of one operand."""
    wide = x.astype(np.float64)
    size = blocks.values.shape[-1]
    # The margin of 2^-20 keeps elements at the end of the range, which are rounded normally, from
    # counting as clipped.
    limit = element.max * blocks.scale.astype(np.float64) * blocks.outer * (1 + 2.0**-20)
    limit = np.repeat(limit, size, axis=-1)[..., : x.shape[-1]]
    square = float(np.mean(np.square(wide))) or 1.0
    return (
        float(np.mean((wide != 0) & (rounded == 0))),
        float(np.mean(np.abs(wide) > limit)),
        float(np.mean(np.square(rounded - wide))) / square,
    )


def _rotated(x: np.ndarray) -> np.ndarray:
    size = len(ROTATION)
    parts = block_formats.blocks(x, size) @ ROTATION.astype(np.float64)
    return parts.reshape(*x.shape[:-1], -1).astype(np.float32)
