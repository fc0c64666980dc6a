"""A bench of next to nothing: its sizes, and what its rows share."""

from megalodon_jax.config import MegalodonConfig

TINY = MegalodonConfig(
    vocab_size=32,
    model_dim=8,
    num_layers=1,
    num_heads=1,
    z_dim=4,
    value_dim=8,
    ffn_hidden_dim=8,
    cema_ndim=2,
    chunk_size=4,
    norm_num_groups=2,
)
SHARED = {"dtype": "float32", "device": "cpu", "identity": "same"}
