"""The layers of a Megalodon, one module per family."""

from megalodon_jax.layers.attention import ChunkedAttention, MegalodonAttention
from megalodon_jax.layers.complex_ema import ComplexEMA
from megalodon_jax.layers.ffn import NormalizedFFN
from megalodon_jax.layers.linear import Linear
from megalodon_jax.layers.lora import LoRALinear
from megalodon_jax.layers.norms import LayerNorm, RMSNorm
from megalodon_jax.layers.rotary import RotaryEmbedding
from megalodon_jax.layers.timestep_norm import TimestepNorm

__all__ = [
    "ChunkedAttention",
    "ComplexEMA",
    "LayerNorm",
    "Linear",
    "LoRALinear",
    "MegalodonAttention",
    "NormalizedFFN",
    "RMSNorm",
    "RotaryEmbedding",
    "TimestepNorm",
]
