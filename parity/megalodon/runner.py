"""Runs the JAX model on a case and returns named NumPy arrays."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from megalodon_jax.config import MegalodonConfig
from megalodon_jax.inference import greedy_token
from megalodon_jax.loss import next_token_loss
from megalodon_jax.model import MegalodonForCausalLM
from megalodon_jax.types import ModelCache, NormState, index_cache, reserve_cache
from megalodon_jax.weights import build_model, named_leaves
from parity.engine.measure.metrics import IGNORED
from parity.engine.measure.quantity import Quantity
from parity.engine.programs.yardstick import compiled
from parity.megalodon import trajectory
from parity.megalodon.cases import NEW_TOKENS, Case
from parity.megalodon.intermediates import capture
from parity.megalodon.oracle import held_tokens
from parity.megalodon.ragged import last_valid, stacked

Outputs = dict[str, np.ndarray]
"""Arrays by name: intermediates, `logits`, `loss`, `grad/<parameter>` and `bar/<intermediate>`."""


@dataclasses.dataclass(frozen=True)
class JaxSubject:
    """Runs the JAX model in one dtype: "float32", "float64" or "bfloat16".

    In "bfloat16", operands of products are bfloat16 and parameters stay float32.

    Attributes:
        dtype: "float32", "float64" or "bfloat16".
        products: JAX's default precision of products (`jax.default_matmul_precision`). A GPU rounds
            the operands of float32 products to TF32 unless `products` is "highest".
    """

    dtype: str = "float32"
    products: str = "highest"

    def run(self, case: Case) -> Outputs:
        """Return the results of a case, by name.

        A stream gives logits, states and generated tokens; a trajectory gives losses, moments and
        displacements of parameters. Any other case gives every intermediate, the loss, and the
        derivatives of the loss with respect to every parameter and intermediate.
        """
        batch = case.batch
        if case.steps:
            with self.types(), jax.default_matmul_precision(self.products):
                return trajectory.of_jax(case, self.load(case), self.dtype)
        if case.cuts:
            return self._stream(case)
        with self.types(), jax.default_matmul_precision(self.products):
            model = self.load(case)
            mask = jnp.asarray(batch.mask) if batch.padded else None
            (loss, intermediates), (gradients, cotangents) = compiled(evaluate, self._yardstick)(
                model, jnp.asarray(batch.ids), jnp.asarray(batch.labels), mask, packed(case)
            )
            named = {Quantity.gradient(name): g for name, g in named_leaves(gradients).items()}
            named |= {Quantity.cotangent(name): g for name, g in cotangents.items()}
            return {
                name: np.asarray(a) for name, a in (intermediates | {"loss": loss} | named).items()
            }

    def intermediates(self, case: Case, forced: Mapping[str, np.ndarray] | None = None) -> Outputs:
        """Return every intermediate of a forward pass, by name.

        Args:
            case: a case without cuts and steps.
            forced: correct values of intermediates, by name. Every stage is then computed from
                these instead of the model's own, so that each one is tested on correct inputs.
        """
        batch = case.batch
        with self.types(), jax.default_matmul_precision(self.products):
            model = self.load(case)
            mask = jnp.asarray(batch.mask) if batch.padded else None
            held = {name: jnp.asarray(a, self.dtype) for name, a in (forced or {}).items()}
            run = compiled(evaluate_intermediates, self._yardstick)
            intermediates = run(model, jnp.asarray(batch.ids), mask, held, packed(case))
            return {name: np.asarray(a) for name, a in intermediates.items()}

    def intermediates_and_loss(self, case: Case) -> Outputs:
        """Return every intermediate of a forward pass, and the loss."""
        intermediates = self.intermediates(case)
        return intermediates | {
            "loss": self._loss(case, intermediates["logits"], case.batch.labels)
        }

    def loss_without_targets(self, case: Case) -> float:
        """Return the model's loss on a case in which every label is set to `IGNORED`."""
        logits = self.intermediates(case)["logits"]
        return float(self._loss(case, logits, np.full_like(case.batch.labels, IGNORED)))

    def _loss(self, case: Case, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        with self.types():
            config, mask = self._config(case), jnp.asarray(case.batch.mask)
            arrays = jnp.asarray(logits), jnp.asarray(labels), mask
            options: Any = {"dtype": config.softmax_dtype, "segment_ids": packed(case)}
            return np.asarray(next_token_loss(*arrays, **options))

    def _stream(self, case: Case) -> Outputs:
        with self.types(), jax.default_matmul_precision(self.products):
            model, ids, valid = self.load(case), jnp.asarray(case.batch.ids), case.batch.mask
            segments = packed(case)
            step = compiled(advance, self._yardstick)
            cache, pieces, start = None, [], 0
            for count in case.cuts:
                cut = slice(start, start + count)
                mask = None if valid[:, cut].all() else jnp.asarray(valid[:, cut])
                documents = None if segments is None else segments[:, cut]
                logits, cache = step(model, ids[:, cut], cache, mask, documents)
                # Logits at padding are meaningless: set to 0, as for the other sides.
                pieces.append(logits if mask is None else jnp.where(mask[..., None], logits, 0.0))
                if model.config.cache_unbounded:
                    cache = reserve_cache(cache, case.length + NEW_TOKENS)
                start += count
            assert cache is not None
            states = cache_arrays(model.config, cache)
            whole = jnp.concatenate(pieces, axis=1)
            token, generated = greedy_token(whole[np.arange(len(valid)), last_valid(valid)]), []
            for _ in range(NEW_TOKENS):
                generated.append(token)
                logits, cache = step(model, token[:, None], cache, None, None)
                token = greedy_token(logits[:, -1])
            outputs = {
                "logits": whole,
                "generated": jnp.stack(generated, axis=1).astype(self.dtype),
            }
            return {n: np.asarray(a) for n, a in outputs.items()} | states

    def load(self, case: Case) -> MegalodonForCausalLM:
        """Return the model of a case in this dtype; call it within `with self.types():`."""
        return build_model(self._config(case), case.weights, source=case.name)

    def _config(self, case: Case) -> MegalodonConfig:
        if self.dtype == "bfloat16":
            return dataclasses.replace(case.config, compute_dtype=jnp.bfloat16)
        return case.config.with_dtype(self.dtype)

    @property
    def _yardstick(self) -> bool:
        return self.dtype == "float64"

    def types(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager that enables 64-bit types in JAX if `dtype` is float64."""
        return jax.enable_x64(self.dtype == "float64")


def advance(model, ids, cache, mask, segments):
    """Feed token ids to a cached stream; return their logits and the new cache.

    `mask` is None if there is no padding. `segments` is None if rows are not packed, or if every
    row continues its last document.
    """
    return model(ids, mask, cache=cache, return_cache=True, segment_ids=segments)


def cache_arrays(config: MegalodonConfig, cache: ModelCache) -> Outputs:
    """Return the contents of a cache by name (`state/...`), keys and values in order of position.

    If each row has its own position, rows are read separately and padded with zeros to equal sizes.
    """
    outputs = {}
    if cache.per_row and (rows := cache.position.shape[0]) > 1:
        each = (index_cache(cache, jnp.asarray([row])) for row in range(rows))
        return stacked([cache_arrays(config, row) for row in each])

    def note_norm(prefix: str, state: NormState | None) -> None:
        assert state is not None
        outputs[prefix + "norm_count"] = np.asarray(state.count.astype(state.mean.dtype))
        outputs[prefix + "norm_mean"] = np.asarray(state.mean)
        outputs[prefix + "norm_var"] = np.asarray(state.var)

    for i, layer in enumerate(cache.layer_caches):
        prefix = Quantity.state(f"layers.{i}.")
        assert layer.attn is not None and layer.ema is not None
        note_norm(prefix, layer.norm)
        h: Any = np.asarray(layer.ema.h)
        outputs[prefix + "ema"] = np.stack([h.real, h.imag], axis=-1)
        position = int(layer.position.reshape(()))
        latest = np.arange(position - held_tokens(config, position), position)
        slots = latest % layer.attn.capacity
        outputs[prefix + "k"] = np.asarray(layer.attn.k)[:, slots]
        outputs[prefix + "v"] = np.asarray(layer.attn.v)[:, slots]
    note_norm(Quantity.state(""), cache.final_norm)
    return outputs


def packed(case: Case) -> jax.Array | None:
    """Return the document number of each token, (B, L); None if rows are not packed."""
    segments = case.batch.segments
    return None if segments is None else jnp.asarray(segments)


def evaluate(model, ids, labels, mask, segments=None):
    """Return ((loss, intermediates), (gradients, cotangents)) of one forward and backward pass."""
    params, static = eqx.partition(model, eqx.is_array)

    def loss(params, ids, labels, mask, segments):
        model = eqx.combine(params, static)
        logits, _ = model(ids, mask, segment_ids=segments)
        dtype = model.config.softmax_dtype
        return next_token_loss(logits, labels, mask, dtype=dtype, segment_ids=segments)

    def objective(params, offsets):
        return capture(loss, offsets=offsets)(params, ids, labels, mask, segments)

    _, intermediates = jax.eval_shape(capture(loss), params, ids, labels, mask, segments)
    zeros = {name: jnp.zeros(x.shape, x.dtype) for name, x in intermediates.items()}
    return jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)(params, zeros)


def evaluate_intermediates(model, ids, mask, forced, segments=None):
    """Return the computed intermediates by name.

    The values of `forced`, by name, replace the computed intermediates as inputs of later stages.
    """
    params, static = eqx.partition(model, eqx.is_array)

    def logits(params, ids, mask, segments):
        return eqx.combine(params, static)(ids, mask, segment_ids=segments)[0]

    return capture(logits, forced=forced)(params, ids, mask, segments)[1]
