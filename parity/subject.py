"""The JAX model as a runner: a case in, named arrays out."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from megalodon_jax.loss import next_token_loss
from megalodon_jax.model import MegalodonForCausalLM
from megalodon_jax.weights import build_model, named_leaves
from parity.cases import Case
from parity.taps import capture

Outputs = dict[str, np.ndarray]
"""Arrays by name: taps, `logits`, `loss`, and `grad/<parameter>`."""


@dataclasses.dataclass(frozen=True)
class JaxSubject:
    """Runs the JAX model in one dtype; `dtype` is "float32" or "float64"."""

    dtype: str = "float32"

    def run(self, case: Case) -> Outputs:
        """Return every tap, the loss and every gradient of a case."""
        batch = case.batch
        # Products in float32 mean float32 here: a GPU may not shorten them to TF32.
        with self.types(), jax.default_matmul_precision("highest"):
            model = self.load(case)
            mask = jnp.asarray(batch.mask) if batch.padded else None
            (loss, taps), gradients = evaluate(
                model, jnp.asarray(batch.ids), jnp.asarray(batch.labels), mask
            )
            named = {f"grad/{name}": g for name, g in named_leaves(gradients).items()}
            return {name: np.asarray(a) for name, a in (taps | {"loss": loss} | named).items()}

    def load(self, case: Case) -> MegalodonForCausalLM:
        """Return the model of a case in this dtype; call inside `types()`."""
        return build_model(case.config.with_dtype(self.dtype), case.weights, source=case.name)

    def types(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which arrays of this dtype exist."""
        return jax.enable_x64(self.dtype == "float64")


@eqx.filter_jit
def evaluate(model, ids, labels, mask):
    """Return ((loss, taps), gradients); one compilation per configuration, shape and dtype."""
    params, static = eqx.partition(model, eqx.is_array)

    def objective(params):
        def loss(params, ids, labels, mask):
            model = eqx.combine(params, static)
            logits, _ = model(ids, mask)
            return next_token_loss(logits, labels, mask, dtype=model.config.softmax_dtype)

        return capture(loss)(params, ids, labels, mask)

    return jax.value_and_grad(objective, has_aux=True)(params)
