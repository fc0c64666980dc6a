"""The normalised feed-forward half of a block, with a residual from the block's input."""

from __future__ import annotations

import equinox as eqx
import jax
from jaxtyping import Array, Float

from megalodon_jax.config import MegalodonConfig
from megalodon_jax.layers.dropout import dropout, split_key
from megalodon_jax.layers.entry import check_inputs
from megalodon_jax.layers.linear import Linear
from megalodon_jax.layers.norms import LayerNorm
from megalodon_jax.sharding.axes import placed


class NormalizedFFN(eqx.Module):
    """`residual + a_i W2 silu(W1 LayerNorm(y)) [* W3 LayerNorm(y)]` (docs/model.md "Block order").

    y is the output of the block's attention half. `a_i` is `0.1 * 0.5**i` for layer i, from 0,
    with `rescale_nffn`, else 1. The residual is the input of the whole block, not of this half.
    """

    norm: LayerNorm
    fc1: Linear
    fc2: Linear
    fc3: Linear | None
    scale: float = eqx.field(static=True)
    config: MegalodonConfig = eqx.field(static=True)

    def __init__(self, config: MegalodonConfig, layer_index: int, *, key: jax.Array):
        k1, k2, k3 = jax.random.split(key, 3)
        D, F = config.model_dim, config.ffn_hidden_dim
        self.norm = LayerNorm(D, config.norm_eps, config.norm_affine, config.sensitive_dtype)
        self.fc1 = Linear(D, F, config, key=k1)
        self.fc2 = Linear(F, D, config, key=k2)
        self.fc3 = Linear(D, F, config, key=k3) if config.swiglu else None
        self.scale = 0.1 * 0.5**layer_index if config.rescale_nffn else 1.0
        self.config = config

    def __call__(
        self,
        y: Float[Array, "B L D"],
        residual: Float[Array, "B L D"],
        *,
        key: jax.Array | None = None,
        scale: Float[Array, ""] | None = None,
    ) -> Float[Array, "B L D"]:
        """Map the attention output `y` and the block input `residual`, (B, L, D), to the output.

        `key` enables dropout; None means deterministic. `scale` replaces the factor a_i.
        """
        shape = ("B", "L", self.config.model_dim)
        check_inputs("NormalizedFFN", y=(y, shape), residual=(residual, shape))
        hidden_key, out_key = split_key(key, 2)
        # On a mesh, gather channels once for both products; the products' columns stay sharded.
        f = placed(self.norm(y), "batch", "sequence", None)
        s = jax.nn.silu(placed(self.fc1(f), "batch", "sequence", "tensor"))
        if self.fc3 is not None:
            s = s * placed(self.fc3(f), "batch", "sequence", "tensor")
        s = dropout(s, self.config.hidden_dropout, hidden_key)
        out = placed(self.fc2(s), "batch", "sequence", "tensor")
        out = dropout(out, self.config.dropout, out_key)
        return residual + (self.scale if scale is None else scale) * out
