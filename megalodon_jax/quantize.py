"""`megalodon_jax.quantization.formats` under the name it had: programs import it from here."""

from megalodon_jax.quantization.formats import *  # noqa: F403
