"""`megalodon_jax.quantization.products` under the name it had: programs import it from here."""

from megalodon_jax.quantization.products import *  # noqa: F403
