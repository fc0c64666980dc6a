"""Linear maps: their matrix product, initial weights and low-precision backends."""

from __future__ import annotations

import copy
import string
from collections.abc import Mapping
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from megalodon_jax.config import MegalodonConfig
from megalodon_jax.layers.contraction import contract
from megalodon_jax.layers.entry import check_inputs, check_sizes
from megalodon_jax.quantization.products import check_widths, gemm

Tree = TypeVar("Tree")


def matmul(
    x: Float[Array, "... in"],
    weight: Float[Array, "out in"],
    config: MegalodonConfig,
    backend: str = "default",
) -> Float[Array, "... out"]:
    """Return `x @ weight.T` in `accum_dtype`.

    The default backend rounds the operands to `compute_dtype`, and in the products of both
    gradients the cotangents too. Sums stay in `accum_dtype`. So the error of bfloat16 compute stays
    below that of an autocast, which stores every activation in bfloat16. Any other backend
    quantises the unrounded operands, also in both gradients
    (`megalodon_jax.quantization.products`).

    Raises:
        ValueError: the widths differ, or an operand already has 8 bits or fewer, or is float16.
    """
    check_widths(x, weight)
    if backend != "default":
        return gemm(x, weight, backend).astype(config.accum_dtype)
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"expected x of width {weight.shape[1]}, as weight {weight.shape} has it, got {x.shape}"
        )
    leading = string.ascii_lowercase[: x.ndim - 1]
    return contract(f"{leading}Y,ZY->{leading}Z", x, weight, config)


class Linear(eqx.Module):
    """Affine map `x W^T + b` (docs/model.md "State dict": weights are (out, in), as in torch)."""

    weight: Float[Array, "out in"]
    bias: Float[Array, " out"] | None
    config: MegalodonConfig = eqx.field(static=True)
    backend: str = eqx.field(static=True)
    """GEMM backend of the product. If `config.gemm_backend` has rules, it is "default" until
    `MegalodonForCausalLM`, which knows the full name of the map, applies them."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        config: MegalodonConfig,
        *,
        use_bias: bool = True,
        init_dim: int | None = None,
        key: jax.Array,
    ):
        check_sizes("Linear", in_features=in_features, out_features=out_features)
        shape = (out_features, in_features)
        self.weight = init_weight(shape, config, key=key, dim=init_dim)
        self.bias = jnp.zeros(out_features, config.param_dtype) if use_bias else None
        self.config = config
        chosen = config.gemm_backend
        self.backend = chosen if isinstance(chosen, str) else "default"

    def __call__(self, x: Float[Array, "... in"]) -> Float[Array, "... out"]:
        """Map (..., in) to (..., out) in `config.accum_dtype`.

        Raises:
            ValueError: the width or a dtype does not fit, or is float16.
        """
        out_features, in_features = self.weight.shape
        check_widths(x, self.weight)
        check_inputs("Linear", x=(x, (..., in_features)), bias=(self.bias, (out_features,)))
        y = matmul(x, self.weight, self.config, self.backend)
        return y if self.bias is None else y + self.bias.astype(y.dtype)


def linear_maps(tree: Any) -> dict[str, Linear]:
    """Return the linear maps of a pytree by dotted path, such as `model.layers.0.attn.wz`."""
    nodes = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_linear)[0]
    return {_dotted(path): node for path, node in nodes if _is_linear(node)}


def with_backends(tree: Tree, backends: Mapping[str, str]) -> Tree:
    """Return `tree` with the GEMM backends of some linear maps replaced.

    `backends` holds the new backend by dotted path; other maps keep theirs.
    """

    def moved(path: Any, node: Any) -> Any:
        if not _is_linear(node) or _dotted(path) not in backends:
            return node
        # `eqx.tree_at` cannot change a static field, so change a copy that is not yet shared.
        node = copy.copy(node)
        object.__setattr__(node, "backend", backends[_dotted(path)])
        return node

    return jax.tree_util.tree_map_with_path(moved, tree, is_leaf=_is_linear)


def _is_linear(node: Any) -> bool:
    return isinstance(node, Linear)


def _dotted(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def init_weight(
    shape: tuple[int, int],
    config: MegalodonConfig,
    *,
    key: jax.Array,
    dim: int | None = None,
    embedding: bool = False,
) -> Float[Array, "out in"]:
    """Draw a weight according to `config.init_mode` (docs/model.md "Initialisation").

    "he", the default, is meant for maps between features. For the embedding or the head it would
    draw values so large that the loss starts at several times ln V. Instead, these two are scaled
    so that logits have a standard deviation of 1/2: the final norm divides by the deviation of
    group means, which makes the D features in G groups about sqrt(D / G) in size, and a logit is a
    weighted sum of D features. The initial loss is then 1/8 nat above ln V.

    Args:
        shape: (out, in).
        config: gives the mode and the storage dtype.
        key: PRNG key.
        dim: for the embedding or the head, the number by whose square root "gaussian" divides a
            unit deviation; None for a map between features, whose deviation is then 1.
        embedding: only for mode "none": True draws as torch does for embeddings, N(0, 1), False as
            for linear maps, uniformly in +-1/sqrt(in).

    Returns:
        An array in `config.param_dtype`, drawn in at least float32.
    """
    out_features, in_features = shape
    dtype = config.sensitive_dtype
    match config.init_mode:
        case "he" if dim is not None:
            D, G = config.model_dim, config.norm_num_groups
            weight = jax.random.normal(key, shape, dtype) * (0.5 / np.sqrt(D * D / G).item())
        case "he":
            weight = jax.random.normal(key, shape, dtype) * np.sqrt(2.0 / in_features).item()
        case "xavier":
            bound = np.sqrt(6.0 / (in_features + out_features)).item()
            weight = jax.random.uniform(key, shape, dtype, -bound, bound)
        case "bert":
            weight = jax.random.normal(key, shape, dtype) * 0.02
        case "gaussian":
            std = 1.0 if dim is None else dim**-0.5
            weight = jax.random.truncated_normal(key, -3.0, 3.0, shape, dtype) * std
        case "none" if embedding:
            weight = jax.random.normal(key, shape, dtype)
        case "none":
            bound = in_features**-0.5
            weight = jax.random.uniform(key, shape, dtype, -bound, bound)
    return weight.astype(config.param_dtype)
