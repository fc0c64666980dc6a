"""The byte-level checkpoint as it is trained and as it is served: batches, and single tokens."""

from pathlib import Path

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from megalodon_jax import decode_step
from megalodon_jax.convert import load_from_pretrained
from parity import LanguageModel, batch_agreement, stream_agreement

ROOT = Path(__file__).parents[2]
PROMPT = 16


def main():
    """Print both comparisons."""
    model = load_from_pretrained(ROOT / "parity" / "data" / "byte_lm")
    logits = eqx.filter_jit(lambda model, ids: model(ids)[0])
    prefill = eqx.filter_jit(lambda model, ids: model(ids, return_cache=True))

    def stepwise(ids):
        """Return logits of a prompt, then of one token after the other."""
        first, cache = prefill(model, jnp.asarray(ids[:, :PROMPT]))
        rows = [np.asarray(first)]
        for token in ids[:, PROMPT:].T:
            row, cache = decode_step(model, cache, jnp.asarray(token))
            rows.append(np.asarray(row)[:, None])
        return np.concatenate(rows, axis=1)

    text = np.frombuffer((ROOT / "LICENSE").read_bytes(), np.uint8)[: 4 * 128].reshape(4, 128)
    trained = LanguageModel("byte_lm", lambda ids: logits(model, ids))
    for agreement in batch_agreement(trained, text, sizes=[2, 4]):
        print(agreement.text())
    print(stream_agreement(trained, text, stepwise).text())


if __name__ == "__main__":
    main()
