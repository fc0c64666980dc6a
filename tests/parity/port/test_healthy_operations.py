# ruff: noqa: E501, N812
"""The same operation of torch and JAX holds, with its derivative: no operation is a false alarm.

Each pair is written from the two libraries' documentation, with default arguments, and run on
random numbers of its domain, on its edges, and on repeated values. Left out is where the libraries
differ: in float64 the derivative of torch's hardsigmoid is off by 3e-8 (a sixth in float32) and
those of digamma are 4e-10 apart, and the derivative of abs at 0 is 0 in torch and 1 in JAX.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from parity import FunctionSide, Port, TorchSide, compare
from parity.port.report import Report

SHAPE = (4, 6)


class Pair(NamedTuple):
    """An operation in both libraries."""

    name: str
    torch: Callable[[torch.Tensor], torch.Tensor]
    jax: Callable[[jax.Array], jax.Array]
    of: str = "normal"
    """Kind of its operand, a key of `OPERANDS`."""


def _operands() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    normal = rng.normal(size=SHAPE)
    positive, unit = rng.uniform(0.1, 3.0, SHAPE), rng.uniform(-0.95, 0.95, SHAPE)
    edges = unit.copy()
    edges[0, :3], edges[1, :3] = 1.0, -1.0
    zeros = np.where(rng.uniform(size=SHAPE) < 0.4, 0.0, normal)
    return {
        "normal": normal,
        "positive": positive,
        "unit": unit,
        "edges": edges,
        "large": 30.0 * normal,
        "small": 1e-4 * normal,
        "zeros": zeros,
        "positive zeros": np.abs(zeros),
        "ties": np.round(normal),
        "above one": 1.0 + positive,
        "matrix": normal[:, :4] + 4 * np.eye(4),
    }


OPERANDS = {name: x.astype(np.float32) for name, x in _operands().items()}


def _same(names: str, of: str = "normal") -> list[Pair]:
    """Return operations that have one name in both libraries."""
    return [Pair(n, getattr(torch, n), getattr(jnp, n), of) for n in names.split()]


def _functional(names: str, of: str = "normal") -> list[Pair]:
    """Return activations that have one name in both libraries."""
    return [Pair(n, getattr(F, n), getattr(jax.nn, n), of) for n in names.split()]


def _norm(x: jax.Array) -> jax.Array:
    mean = x.mean(-1, keepdims=True)
    variance = jnp.square(x - mean).mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5)


MASK = np.random.default_rng(1).uniform(size=SHAPE) < 0.3
MASK[0] = False
INDEX = np.array([3, 0, 0, 2])
LABELS = np.array([1, 0, 5, 2])
ROW = np.linspace(-1, 2, SHAPE[1]).astype(np.float32)

PAIRS = [
    *_same("sin cos tan sinh cosh tanh exp expm1 square abs sign floor ceil round atan asinh"),
    *_same("sin cos exp expm1 tanh log1p square", "small"),
    *_same("tanh atan asinh sin cos", "large"),
    *_same("log log2 log10 sqrt reciprocal log1p", "positive"),
    *_same("asin acos atanh", "unit"),
    *_same("acosh", "above one"),
    *_same("sin square exp tanh", "zeros"),
    *_same("square exp cos", "edges"),
    Pair("clip edges", lambda x: x.clamp(-0.99, 0.99), lambda x: jnp.clip(x, -0.99, 0.99), "edges"),
    Pair("sqrt of a shifted zero", lambda x: (x + 1e-8).sqrt(), lambda x: jnp.sqrt(x + 1e-8), "positive zeros"),
    Pair("log of a shifted zero", lambda x: (x + 1e-6).log(), lambda x: jnp.log(x + 1e-6), "positive zeros"),
    Pair("safe division", lambda x: x / (x.abs() + 1e-6), lambda x: x / (jnp.abs(x) + 1e-6), "zeros"),
    Pair("power 3.0 of zeros", lambda x: torch.pow(x, 3.0), lambda x: jnp.power(x, 3.0), "zeros"),
    Pair("xlogy", torch.special.entr, jax.scipy.special.entr, "positive"),
    *_same("sum mean prod amax amin max min", "normal"),
    *_same("amax amin sum mean", "ties"),
    *_functional("relu relu6 elu celu selu softplus leaky_relu"),
    *_functional("relu elu softplus silu", "zeros"),
    *_functional("softplus elu silu", "large"),
    Pair("gelu", F.gelu, lambda x: jax.nn.gelu(x, approximate=False)),
    Pair("gelu tanh", lambda x: F.gelu(x, approximate="tanh"), jax.nn.gelu),
    Pair("gelu large", F.gelu, lambda x: jax.nn.gelu(x, approximate=False), "large"),
    Pair("silu", F.silu, jax.nn.silu),
    Pair("mish", F.mish, lambda x: x * jnp.tanh(jax.nn.softplus(x))),
    Pair("hardswish", F.hardswish, jax.nn.hard_swish),
    Pair("softsign", F.softsign, jax.nn.soft_sign),
    Pair("logsigmoid", F.logsigmoid, jax.nn.log_sigmoid),
    Pair("sigmoid", torch.sigmoid, jax.nn.sigmoid),
    Pair("sigmoid large", torch.sigmoid, jax.nn.sigmoid, "large"),
    Pair("glu", F.glu, jax.nn.glu),
    Pair("tanhshrink", F.tanhshrink, lambda x: x - jnp.tanh(x)),
    Pair("softmax", lambda x: F.softmax(x, -1), jax.nn.softmax),
    Pair("softmax large", lambda x: F.softmax(x, -1), jax.nn.softmax, "large"),
    Pair("softmax rows", lambda x: F.softmax(x, 0), lambda x: jax.nn.softmax(x, axis=0)),
    Pair("log_softmax", lambda x: F.log_softmax(x, -1), jax.nn.log_softmax),
    Pair("log_softmax large", lambda x: F.log_softmax(x, -1), jax.nn.log_softmax, "large"),
    Pair(
        "softmax masked",
        lambda x: F.softmax(x.masked_fill(torch.from_numpy(MASK), -torch.inf), -1),
        lambda x: jax.nn.softmax(jnp.where(MASK, -jnp.inf, x)),
    ),
    Pair(
        "softmax masked by the lowest number",
        lambda x: F.softmax(
            x.masked_fill(torch.from_numpy(MASK), torch.finfo(torch.float32).min), -1
        ),
        lambda x: jax.nn.softmax(jnp.where(MASK, jnp.finfo(jnp.float32).min, x)),
    ),
    Pair("logsumexp", lambda x: torch.logsumexp(x, -1), lambda x: jax.nn.logsumexp(x, axis=-1)),
    Pair("power 3.0", lambda x: torch.pow(x, 3.0), lambda x: jnp.power(x, 3.0)),
    Pair("power 2.0", lambda x: torch.pow(x, 2.0), lambda x: jnp.power(x, 2.0)),
    Pair("power 3", lambda x: x**3, lambda x: x**3),
    Pair("power -1.0", lambda x: x**-1.0, lambda x: jnp.power(x, -1.0), "positive"),
    Pair("power 0.5", lambda x: x**0.5, lambda x: jnp.power(x, 0.5), "positive"),
    Pair("power 1.5", lambda x: x**1.5, lambda x: jnp.power(x, 1.5), "positive"),
    Pair("exponent", lambda x: torch.pow(2.0, x), lambda x: jnp.power(2.0, x)),
    Pair("arrays to powers", lambda x: torch.pow(x.abs(), x), lambda x: jnp.power(jnp.abs(x), x)),
    Pair("rsqrt", torch.rsqrt, jax.lax.rsqrt, "positive"),
    Pair("sqrt of 1 - x^2", lambda x: (1 - x * x).sqrt(), lambda x: jnp.sqrt(1 - x * x), "unit"),
    Pair("log of 1 - x", lambda x: (1 - x).log(), lambda x: jnp.log(1 - x), "unit"),
    Pair("entropy", lambda x: (x * x.log()).sum(-1), lambda x: (x * jnp.log(x)).sum(-1), "positive"),
    Pair("logit", lambda x: torch.logit((x + 1) / 2), lambda x: jax.scipy.special.logit((x + 1) / 2), "unit"),
    Pair("erf", torch.erf, jax.scipy.special.erf),
    Pair("erfc", torch.erfc, jax.scipy.special.erfc),
    Pair("erfinv", torch.erfinv, jax.scipy.special.erfinv, "unit"),
    Pair("lgamma", torch.lgamma, jax.scipy.special.gammaln, "positive"),
    Pair("i0", torch.i0, jax.scipy.special.i0),
    Pair("sinc", torch.sinc, jnp.sinc),
    Pair("atan2", lambda x: torch.atan2(x, x.flip(0)), lambda x: jnp.arctan2(x, x[::-1])),
    Pair("hypot", lambda x: torch.hypot(x, x.flip(0)), lambda x: jnp.hypot(x, x[::-1])),
    Pair("logaddexp", lambda x: torch.logaddexp(x, x.flip(0)), lambda x: jnp.logaddexp(x, x[::-1])),
    Pair("maximum", lambda x: torch.maximum(x, x.flip(0)), lambda x: jnp.maximum(x, x[::-1])),
    Pair("minimum", lambda x: torch.minimum(x, x.flip(0)), lambda x: jnp.minimum(x, x[::-1])),
    Pair("clip", lambda x: x.clamp(-0.5, 0.7), lambda x: jnp.clip(x, -0.5, 0.7)),
    Pair("where", lambda x: torch.where(x > 0, x, 0.1 * x), lambda x: jnp.where(x > 0, x, 0.1 * x)),
    Pair("fmod", lambda x: torch.fmod(x, 0.7), lambda x: jnp.fmod(x, 0.7)),
    Pair("remainder", lambda x: torch.remainder(x, 0.7), lambda x: jnp.remainder(x, 0.7)),
    Pair("division", lambda x: x / (1 + x * x), lambda x: x / (1 + x * x)),
    Pair("division by rows", lambda x: x / x.sum(-1, keepdim=True), lambda x: x / x.sum(-1, keepdims=True), "positive"),
    Pair("cumsum", lambda x: x.cumsum(-1), lambda x: jnp.cumsum(x, -1)),
    Pair("cumprod", lambda x: x.cumprod(-1), lambda x: jnp.cumprod(x, -1)),
    Pair("cumprod zeros", lambda x: x.cumprod(-1), lambda x: jnp.cumprod(x, -1), "positive"),
    Pair("cummax", lambda x: x.cummax(-1).values, lambda x: jax.lax.cummax(x, axis=1)),
    Pair("logcumsumexp", lambda x: x.logcumsumexp(-1), lambda x: jax.lax.cumlogsumexp(x, axis=1)),
    Pair("variance", lambda x: x.var(-1, correction=0), lambda x: x.var(-1)),
    Pair("variance of n - 1", lambda x: x.var(-1), lambda x: x.var(-1, ddof=1)),
    Pair("deviation", lambda x: x.std(-1), lambda x: x.std(-1, ddof=1)),
    Pair("norm", lambda x: x.norm(dim=-1), lambda x: jnp.linalg.norm(x, axis=-1)),
    Pair("norm of zeros", lambda x: (x * x).sum(-1).clamp_min(1e-6).sqrt(), lambda x: jnp.sqrt(jnp.maximum((x * x).sum(-1), 1e-6)), "zeros"),
    Pair("norm 1", lambda x: x.norm(p=1, dim=-1), lambda x: jnp.linalg.norm(x, 1, axis=-1)),
    Pair("norm inf", lambda x: x.norm(p=torch.inf, dim=-1), lambda x: jnp.linalg.norm(x, jnp.inf, axis=-1)),
    Pair("normalize", lambda x: F.normalize(x, dim=-1), lambda x: x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)),
    Pair("layer norm", lambda x: F.layer_norm(x, SHAPE[1:]), _norm),
    Pair("layer norm small", lambda x: F.layer_norm(x, SHAPE[1:]), _norm, "small"),
    Pair("rms norm", lambda x: F.rms_norm(x, SHAPE[1:], eps=1e-6), lambda x: x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)),
    Pair("cosine similarity", lambda x: F.cosine_similarity(x, x.flip(0), -1), lambda x: (x * x[::-1]).sum(-1) / (jnp.linalg.norm(x, axis=-1) * jnp.linalg.norm(x[::-1], axis=-1))),
    Pair("sort", lambda x: x.sort(-1).values, lambda x: jnp.sort(x, -1)),
    Pair("sort ties", lambda x: x.sort(stable=True).values, lambda x: jnp.sort(x, -1), "ties"),
    Pair("top k", lambda x: x.topk(3).values, lambda x: jax.lax.top_k(x, 3)[0]),
    Pair("median", lambda x: x[:, :5].median(-1).values, lambda x: jnp.median(x[:, :5], -1)),
    Pair("flip", lambda x: x.flip(-1), lambda x: jnp.flip(x, -1)),
    Pair("roll", lambda x: x.roll(2, 1), lambda x: jnp.roll(x, 2, 1)),
    Pair("outer", lambda x: torch.outer(x[0], x[1]), lambda x: jnp.outer(x[0], x[1])),
    Pair("matmul", lambda x: x @ x.T, lambda x: x @ x.T),
    Pair("einsum", lambda x: torch.einsum("ij,kj->ik", x, x), lambda x: jnp.einsum("ij,kj->ik", x, x)),
    Pair("tril", lambda x: x.tril(-1), lambda x: jnp.tril(x, -1)),
    Pair("gather", lambda x: x.gather(1, torch.from_numpy(INDEX)[:, None]), lambda x: jnp.take_along_axis(x, INDEX[:, None], 1)),
    Pair("index", lambda x: x[torch.from_numpy(INDEX)], lambda x: x[INDEX]),
    Pair("index add", lambda x: torch.zeros_like(x).index_add(0, torch.from_numpy(INDEX), x), lambda x: jnp.zeros_like(x).at[INDEX].add(x)),
    Pair("pad", lambda x: F.pad(x, (1, 2)), lambda x: jnp.pad(x, ((0, 0), (1, 2)))),
    Pair("pad reflected", lambda x: F.pad(x[None], (1, 2), mode="reflect")[0], lambda x: jnp.pad(x, ((0, 0), (1, 2)), mode="reflect")),
    Pair("repeat", lambda x: x.repeat_interleave(2, 0), lambda x: jnp.repeat(x, 2, 0)),
    Pair("average pool", lambda x: F.avg_pool1d(x[None], 2)[0], lambda x: x.reshape(4, 3, 2).mean(-1)),
    Pair("max pool", lambda x: F.max_pool1d(x[None], 2)[0], lambda x: x.reshape(4, 3, 2).max(-1)),
    Pair("conv", lambda x: F.conv1d(x[None], x[:, :4, None].expand(-1, -1, 3)), lambda x: jax.lax.conv_general_dilated(x[None], jnp.broadcast_to(x[:, :4, None], (4, 4, 3)), (1,), "VALID", dimension_numbers=("NCH", "OIH", "NCH"))),
    Pair("cross entropy", lambda x: F.cross_entropy(x, torch.from_numpy(LABELS)), lambda x: -jnp.take_along_axis(jax.nn.log_softmax(x), LABELS[:, None], 1).mean()),
    Pair("smooth cross entropy", lambda x: F.cross_entropy(x, torch.from_numpy(LABELS), label_smoothing=0.1), lambda x: -(jax.nn.log_softmax(x) * (0.9 * jax.nn.one_hot(LABELS, 6) + 0.1 / 6)).sum(-1).mean()),
    Pair("squared error", lambda x: F.mse_loss(x, x.roll(1, 1)), lambda x: jnp.square(x - jnp.roll(x, 1, 1)).mean()),
    Pair("huber", lambda x: F.huber_loss(x, torch.zeros_like(x)), lambda x: jnp.where(jnp.abs(x) < 1, 0.5 * x * x, jnp.abs(x) - 0.5).mean()),
    Pair("smooth l1", lambda x: F.smooth_l1_loss(x, 0.5 * x.flip(0), beta=0.3), lambda x: jnp.where(jnp.abs(x - 0.5 * x[::-1]) < 0.3, jnp.square(x - 0.5 * x[::-1]) / 0.6, jnp.abs(x - 0.5 * x[::-1]) - 0.15).mean()),
    Pair("binary cross entropy", lambda x: F.binary_cross_entropy_with_logits(x, (x > 0).to(x.dtype)), lambda x: (jnp.maximum(x, 0) - jnp.where(x > 0, x, 0) + jnp.log1p(jnp.exp(-jnp.abs(x)))).mean()),
    Pair("divergence", lambda x: F.kl_div(F.log_softmax(x, -1), F.softmax(x.flip(0), -1), reduction="batchmean"), lambda x: (jax.nn.softmax(x[::-1]) * (jax.nn.log_softmax(x[::-1]) - jax.nn.log_softmax(x))).sum() / 4),
    Pair("inverse", torch.linalg.inv, jnp.linalg.inv, "matrix"),
    Pair("determinant", torch.linalg.det, jnp.linalg.det, "matrix"),
    Pair("log determinant", lambda x: torch.linalg.slogdet(x)[1], lambda x: jnp.linalg.slogdet(x)[1], "matrix"),
    Pair("solve", lambda x: torch.linalg.solve(x, x[:, :1]), lambda x: jnp.linalg.solve(x, x[:, :1]), "matrix"),
    Pair("cholesky", lambda x: torch.linalg.cholesky(x @ x.T), lambda x: jnp.linalg.cholesky(x @ x.T), "matrix"),
    Pair("eigenvalues", lambda x: torch.linalg.eigvalsh(x + x.T), lambda x: jnp.linalg.eigvalsh(x + x.T), "matrix"),
    Pair("singular values", torch.linalg.svdvals, lambda x: jnp.linalg.svd(x, compute_uv=False), "matrix"),
    Pair("matrix exponential", lambda x: torch.linalg.matrix_exp(x / 4), lambda x: jax.scipy.linalg.expm(x / 4), "matrix"),
    Pair("fourier", lambda x: torch.view_as_real(torch.fft.rfft(x)), lambda x: (lambda y: jnp.stack([y.real, y.imag], -1))(jnp.fft.rfft(x))),
    Pair("rows by a constant", lambda x: x * torch.from_numpy(ROW).to(x.dtype), lambda x: x * ROW),
    Pair("straight through", lambda x: x + (x.round() - x).detach(), lambda x: x + jax.lax.stop_gradient(jnp.round(x) - x)),
    Pair("interpolate", lambda x: F.interpolate(x[None], scale_factor=2, mode="nearest")[0], lambda x: jnp.repeat(x, 2, -1)),
    Pair("interpolate linear", lambda x: F.interpolate(x[None], scale_factor=2, mode="linear")[0], lambda x: jax.image.resize(x, (4, 12), "linear")),
    Pair("one minus cosine", lambda x: 1 - torch.cos(x), lambda x: 1 - jnp.cos(x)),
    Pair("lerp", lambda x: torch.lerp(x, x.flip(0), 0.3), lambda x: x + 0.3 * (x[::-1] - x)),
    Pair("addcmul", lambda x: torch.addcmul(x, x, x.flip(0), value=0.5), lambda x: x + 0.5 * x * x[::-1]),
    Pair("softmax temperature", lambda x: F.softmax(x / 0.1, -1), lambda x: jax.nn.softmax(x / 0.1)),
    Pair("threshold", lambda x: F.threshold(x, 0.1, -2.0), lambda x: jnp.where(x > 0.1, x, -2.0)),
    Pair("trace", torch.trace, jnp.trace, "matrix"),
    Pair("kron", lambda x: torch.kron(x[:2], x[2:]), lambda x: jnp.kron(x[:2], x[2:])),
    Pair("distances", lambda x: torch.cdist(x, 2 * x + 1), lambda x: jnp.sqrt(jnp.square(x[:, None] - (2 * x + 1)[None]).sum(-1))),
]  # fmt: skip


class Applied(torch.nn.Module):
    """An operation on the product of a parameter and the input, whose derivative is compared."""

    def __init__(self, operand: np.ndarray, operation: Callable[..., Any]) -> None:
        super().__init__()
        self.operand = torch.nn.Parameter(torch.from_numpy(operand.copy()))
        self.operation = operation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.operation(self.operand * x)


def compared(pair: Pair) -> Report:
    operand, one = OPERANDS[pair.of], np.ones((), np.float32)

    def port(params: Any, x: jax.Array) -> jax.Array:
        return pair.jax(params["operand"] * x)

    original = TorchSide(Applied(operand, pair.torch), one)
    sides = original, FunctionSide(port, {"operand": operand}, one)
    return compare(Port(pair.name, *sides, bfloat16=False))


@pytest.mark.sweep
@pytest.mark.parametrize("pair", PAIRS, ids=lambda p: f"{p.name} of {p.of}")
def test_an_operation_of_both_libraries_holds(pair: Pair) -> None:
    report = compared(pair)
    assert report.holds, report.text()


OFTEN = {"power 3.0", "sqrt of 1 - x^2", "softmax masked", "norm inf", "layer norm"}
"""Operations whose perturbed operands left their domain, and some that every model has."""


@pytest.mark.parametrize("pair", [p for p in PAIRS if p.name in OFTEN], ids=lambda p: p.name)
def test_operations_of_most_models_hold(pair: Pair) -> None:
    report = compared(pair)
    assert report.holds, report.text()


DIFFERENT = [
    Pair("gelu", F.gelu, jax.nn.gelu),
    Pair("variance", lambda x: x.var(-1), lambda x: x.var(-1)),
    Pair("power", lambda x: torch.pow(x, 3.0), lambda x: jnp.power(x, 2.9999999), "positive"),
    Pair(
        "derivative",
        lambda x: torch.pow(x, 3.0),
        lambda x: jax.lax.stop_gradient(jnp.power(x, 3.0)),
    ),
    Pair("root of negative numbers", lambda x: x.abs().sqrt(), jnp.sqrt),
]


@pytest.mark.parametrize("pair", DIFFERENT, ids=lambda p: p.name)
def test_operations_that_differ_do_not_hold(pair: Pair) -> None:
    """Negative controls: a NaN of the program's own is not one of a perturbed operand."""
    assert not compared(pair).holds
