"""A small transformer in torch and its twins in Flax, Equinox and NNX, with bugs to be switched on.

A bug is an argument of the twin: its number is an input, so that all of them are one program, which
is compiled once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from enum import IntEnum, auto
from functools import cache
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from parity import EquinoxSide, FlaxSide, NNXSide, TorchSide

WORDS, WIDTH, HEADS, HIDDEN, LAYERS = 23, 16, 2, 24, 2
EACH = WIDTH // HEADS
IDS = np.random.default_rng(3).integers(0, WORDS, (2, 10)).astype(np.int32)


class Bug(IntEnum):
    """What is wrong in a twin; all of them but the last two are in the second layer."""

    NONE = 0
    EPS = auto()
    SCALE = auto()
    MASK = auto()
    GELU = auto()
    SWAP = auto()
    BIAS = auto()
    ROPE = auto()
    RESIDUAL = auto()
    LOW_SOFTMAX = auto()
    GRADIENT = auto()


# The original


def _turned(x: torch.Tensor) -> torch.Tensor:
    positions, even = (torch.arange(*n, device=x.device) for n in ((x.shape[1],), (0, EACH, 2)))
    angles = positions.to(x.dtype)[:, None] * 100.0 ** (-even.to(x.dtype) / EACH)
    sin, cos = angles.sin()[:, None], angles.cos()[:, None]
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        B, L, _ = x.shape
        q, k, v = (each(x).view(B, L, HEADS, EACH) for each in (self.q, self.k, self.v))
        scores = torch.einsum("bqhd,bkhd->bhqk", _turned(q), _turned(k)) * EACH**-0.5
        mask = torch.ones(L, L, dtype=torch.bool, device=x.device).tril()
        weights = scores.masked_fill(~mask, -1e9).softmax(-1)
        out = torch.einsum("bhqk,bkhd->bqhd", weights, v).reshape(B, L, WIDTH)
        return self.o(out), weights


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.attn, self.drop = Attention(), torch.nn.Dropout(0.1)
        self.up, self.down = torch.nn.Linear(WIDTH, HIDDEN), torch.nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        x = x + self.drop(self.attn(self.norm1(x))[0])
        return x + self.drop(self.down(torch.nn.functional.gelu(self.up(self.norm2(x)))))


class Original(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(WORDS, WIDTH)
        self.layers = torch.nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return {"logits": self.head(self.norm(x)), "hidden": x}


@cache
def original() -> torch.nn.Module:
    """The original with weights of which none is 0 or 1."""
    torch.manual_seed(0)
    module = Original().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.2)
    return module


def torch_side(ids: np.ndarray = IDS) -> TorchSide:
    return TorchSide(original(), ids)


# What the twins have in common


def either(bug: Any, which: Bug, wrong: Any, right: Any) -> Any:
    return jnp.where(bug == int(which), wrong, right)


def turned(x: Any, bug: Any) -> Any:
    base = either(bug, Bug.ROPE, 90.0, 100.0).astype(x.dtype)
    powers = -jnp.arange(0, EACH, 2).astype(x.dtype) / EACH
    angles = jnp.arange(x.shape[1]).astype(x.dtype)[:, None] * base**powers
    sin, cos = jnp.sin(angles)[:, None], jnp.cos(angles)[:, None]
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)


def attended(q: Any, k: Any, v: Any, bug: Any) -> tuple[Any, Any]:
    """Return what attention makes of projections (B, L, D), and its weights (B, H, L, L)."""
    B, L, _ = q.shape
    q, k, v = (x.reshape(B, L, HEADS, EACH) for x in (q, k, v))
    q, k = either(bug, Bug.SWAP, k, q), either(bug, Bug.SWAP, q, k)
    scores = jnp.einsum("bqhd,bkhd->bhqk", turned(q, bug), turned(k, bug))
    scores = scores * either(bug, Bug.SCALE, WIDTH**-0.5, EACH**-0.5).astype(scores.dtype)
    seen = jnp.arange(L)[:, None] + either(bug, Bug.MASK, 1, 0) >= jnp.arange(L)
    scores = jnp.where(seen, scores, jnp.asarray(-1e9, scores.dtype))
    low = jax.nn.softmax(scores.astype(jnp.bfloat16), axis=-1).astype(scores.dtype)
    weights = either(bug, Bug.LOW_SOFTMAX, low, jax.nn.softmax(scores, axis=-1))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(B, L, WIDTH), weights


@jax.custom_vjp
def activated(x: Any, bug: Any) -> Any:
    tanh, exact = (jax.nn.gelu(x, approximate=how) for how in (True, False))
    return either(bug, Bug.GELU, tanh, exact)


def _gelu_backward(saved: Any, g: Any) -> Any:
    x, bug = saved
    slope = jax.vjp(lambda x: jax.nn.gelu(x, approximate=False), x)[1](g)[0]
    return slope * either(bug, Bug.GRADIENT, 1.01, 1.0).astype(x.dtype), None


activated.defvjp(lambda x, bug: (activated(x, bug), (x, bug)), _gelu_backward)


def normed(x: Any, scale: Any, bias: Any, bug: Any) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    variance = (centred**2).mean(-1, keepdims=True)
    eps = either(bug, Bug.EPS, 1e-6, 1e-5).astype(x.dtype)
    return centred / jnp.sqrt(variance + eps) * scale + bias


def block(members: Any, x: Any, bug: Any) -> Any:
    """One layer of any of the twins, whose submodules have the same names."""
    attention = members.attn(members.norm1(x, bug), bug)[0]
    residual = either(bug, Bug.RESIDUAL, 0.0, x)
    x = attention + residual.astype(x.dtype)
    up = members.up(members.norm2(x, bug))
    up = activated(up, bug)
    return x + members.down(up)


def model(members: Any, ids: Any, bug: Any) -> dict[str, Any]:
    x = members.embed(ids)
    for i, layer in enumerate(members.layers):
        x = layer(x, jnp.where(i == 1, bug, 0))
    return {"logits": members.head(members.norm(x, 0)), "hidden": x}


# Flax


class FlaxNorm(nn.Module):
    @nn.compact
    def __call__(self, x, bug):
        scale = self.param("scale", nn.initializers.ones, (WIDTH,))
        bias = self.param("bias", nn.initializers.zeros, (WIDTH,))
        return normed(x, scale, bias, bug)


class FlaxAttention(nn.Module):
    def setup(self):
        self.q, self.k, self.v, self.o = (nn.Dense(WIDTH) for _ in range(4))

    def __call__(self, x, bug):
        v = self.v(x)
        v = either(bug, Bug.BIAS, v - self.v.variables["params"]["bias"], v)
        out, weights = attended(self.q(x), self.k(x), v, bug)
        return self.o(out), weights


class FlaxBlock(nn.Module):
    def setup(self):
        self.norm1, self.norm2, self.attn = FlaxNorm(), FlaxNorm(), FlaxAttention()
        self.up, self.down = nn.Dense(HIDDEN), nn.Dense(WIDTH)

    def __call__(self, x, bug):
        return block(self, x, bug)


class FlaxTwin(nn.Module):
    def setup(self):
        self.embed, self.norm = nn.Embed(WORDS, WIDTH), FlaxNorm()
        self.layers = [FlaxBlock() for _ in range(LAYERS)]
        self.head = nn.Dense(WORDS, use_bias=False)

    def __call__(self, ids, bug):
        return model(self, ids, bug)


def flax_params() -> dict[str, Any]:
    """The original's weights, with kernels (in, out)."""
    params: dict[str, Any] = {}
    for name, value in original().named_parameters():
        array = value.detach().numpy()
        *path, leaf = name.replace("layers.", "layers_").split(".")
        leaf = "embedding" if path[-1] == "embed" else leaf
        if leaf == "weight":
            leaf, array = ("kernel", array.T) if array.ndim == 2 else ("scale", array)
        place = params
        for key in path:
            place = place.setdefault(key, {})
        place[leaf] = np.array(array)
    return params


@cache
def _flax_side() -> FlaxSide:
    return FlaxSide(FlaxTwin(), flax_params(), IDS, np.int32(0))


def flax_side(bug: Bug = Bug.NONE, ids: np.ndarray = IDS, params: Any = None) -> FlaxSide:
    """The Flax twin; all of them share what is compiled."""
    side = copy.copy(_flax_side())
    side.arguments = ((ids, np.int32(bug)), {})
    side.params = side.params if params is None else {"params": params}
    return side


# Equinox


class EquinoxNorm(eqx.Module):
    weight: Any
    bias: Any

    def __call__(self, x, bug):
        return normed(x, self.weight, self.bias, bug)


class EquinoxLinear(eqx.Module):
    weight: Any
    bias: Any

    def __call__(self, x):
        y = x @ self.weight.T
        return y if self.bias is None else y + self.bias


class EquinoxEmbedding(eqx.Module):
    weight: Any

    def __call__(self, ids):
        return self.weight[ids]


class EquinoxAttention(eqx.Module):
    q: EquinoxLinear
    k: EquinoxLinear
    v: EquinoxLinear
    o: EquinoxLinear

    def __call__(self, x, bug):
        out, weights = attended(self.q(x), self.k(x), self.v(x), bug)
        return self.o(out), weights


class EquinoxBlock(eqx.Module):
    attn: EquinoxAttention
    norm1: EquinoxNorm
    norm2: EquinoxNorm
    up: EquinoxLinear
    down: EquinoxLinear

    def __call__(self, x, bug):
        return block(self, x, bug)


class EquinoxTwin(eqx.Module):
    embed: EquinoxEmbedding
    layers: list[EquinoxBlock]
    norm: EquinoxNorm
    head: EquinoxLinear

    def __call__(self, ids, bug):
        return model(self, ids, bug)


def equinox_side(bug: Bug = Bug.NONE) -> EquinoxSide:
    weights = {n: p.detach().numpy().copy() for n, p in original().named_parameters()}

    def linear(path: str) -> EquinoxLinear:
        return EquinoxLinear(weights[f"{path}.weight"], weights.get(f"{path}.bias"))

    def norm(path: str) -> EquinoxNorm:
        return EquinoxNorm(weights[f"{path}.weight"], weights[f"{path}.bias"])

    def layer(path: str) -> EquinoxBlock:
        attention = EquinoxAttention(*(linear(f"{path}.attn.{n}") for n in "qkvo"))
        norms = (norm(f"{path}.{n}") for n in ("norm1", "norm2"))
        return EquinoxBlock(attention, *norms, linear(f"{path}.up"), linear(f"{path}.down"))

    layers = [layer(f"layers.{i}") for i in range(LAYERS)]
    embed = EquinoxEmbedding(weights["embed.weight"])
    return EquinoxSide(EquinoxTwin(embed, layers, norm("norm"), linear("head")), IDS, np.int32(bug))


# NNX


class NNXNorm(nnx.Module):
    def __init__(self) -> None:
        self.scale, self.bias = (nnx.Param(jnp.zeros(WIDTH)) for _ in range(2))

    def __call__(self, x, bug):
        return normed(x, self.scale[...], self.bias[...], bug)


class NNXAttention(nnx.Module):
    def __init__(self, linear: Callable[..., Any]) -> None:
        self.q, self.k, self.v, self.o = (linear(WIDTH, WIDTH) for _ in range(4))

    def __call__(self, x, bug):
        out, weights = attended(self.q(x), self.k(x), self.v(x), bug)
        return self.o(out), weights


class NNXBlock(nnx.Module):
    def __init__(self, linear: Callable[..., Any]) -> None:
        self.norm1, self.norm2, self.attn = NNXNorm(), NNXNorm(), NNXAttention(linear)
        self.up, self.down = linear(WIDTH, HIDDEN), linear(HIDDEN, WIDTH)

    def __call__(self, x, bug):
        return block(self, x, bug)


class NNXTwin(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)

        def linear(*sizes: int, **how: Any) -> nnx.Linear:
            zeros = nnx.initializers.zeros_init()
            return nnx.Linear(*sizes, kernel_init=zeros, rngs=rngs, **how)

        self.embed = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.layers = nnx.List([NNXBlock(linear) for _ in range(LAYERS)])
        self.norm, self.head = NNXNorm(), linear(WIDTH, WORDS, use_bias=False)

    def __call__(self, ids, bug):
        return model(self, ids, bug)


def nnx_side(bug: Bug = Bug.NONE) -> NNXSide:
    twin = NNXTwin()
    flat = {
        ".".join(map(str, path)): x for path, x in nnx.iter_graph(twin) if isinstance(x, nnx.Param)
    }
    params = flax_params()
    for name, variable in flat.items():
        place: Any = params
        for key in name.replace("layers.", "layers_").split("."):
            place = place[key]
        variable[...] = jnp.asarray(place)
    return NNXSide(twin, IDS, np.int32(bug))
