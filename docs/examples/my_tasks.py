"""What weights in bfloat16 cost the byte-level checkpoint: perplexity, and greedy continuations."""

from pathlib import Path

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from megalodon_jax import generate
from megalodon_jax.convert import load_from_pretrained
from parity import LanguageModel

ROOT = Path(__file__).parents[2]


def language_model(name, dtype):
    """Return the checkpoint with weights stored in a dtype."""
    model = load_from_pretrained(ROOT / "parity" / "data" / "byte_lm", dtype=dtype)
    logits = eqx.filter_jit(lambda model, ids: model(ids)[0])

    def continued(ids, count):
        return generate(model, ids, count, temperature=0)[0][:, ids.shape[1] :]

    return LanguageModel(name, lambda ids: logits(model, ids), continued)


def models():
    """Return the two models to compare."""
    return language_model("float32", jnp.float32), language_model("bfloat16", jnp.bfloat16)


def ids():
    """Return the text: the bytes of a file, which are this model's tokens."""
    return np.frombuffer((ROOT / "LICENSE").read_bytes(), np.uint8)
