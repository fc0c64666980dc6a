"""Dtype audit of a function, or of a loss and its gradient, as jaxpr and as compiled program."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from megalodon_jax.config import MegalodonConfig
from megalodon_jax.model import MegalodonForCausalLM
from megalodon_jax.weights import abstract_model
from stability.core.findings import Finding
from stability.dtype_audit.hlo import rows_of_hlo
from stability.dtype_audit.jaxpr import rows_of_jaxpr
from stability.dtype_audit.policy import Policy, load_policy
from stability.dtype_audit.rows import Row, aggregated
from stability.dtype_audit.scopes import announced

BATCH = 2
"""Number of sequences in the audited batch: at least two, so that the program sums over them."""


def audit_function(
    function: Callable[..., Any], *args: Any, compiled: bool = True
) -> tuple[Row, ...]:
    """Return the dtype audit table of a function: rows of its jaxpr and of its compiled program.

    Rows have module paths only for models in `args` that `scopes.announced` returned.

    Args:
        function: the function; it is traced and compiled, but not run.
        args: pytrees of arrays or of shapes (`jax.ShapeDtypeStruct`); other leaves are static.
        compiled: whether to compile too, for the rows of the view `hlo`; it takes seconds.

    Returns:
        Rows of both views; operations that differ only in their source line share a row.
    """
    array = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)
    dynamic, static = eqx.partition(args, lambda leaf: isinstance(leaf, array))

    def run(dynamic: Any) -> Any:
        out = function(*eqx.combine(dynamic, static))
        return eqx.filter(out, eqx.is_array)

    traced = jax.jit(run).trace(dynamic)
    rows = list(rows_of_jaxpr(traced.jaxpr))
    if compiled:
        rows += rows_of_hlo(traced.lower().compile().as_text() or "")
    return aggregated(rows)


def audit_step(
    model: Any, loss: Callable[..., Any], *args: Any, compiled: bool = True
) -> tuple[Row, ...]:
    """Return the audit table of `loss(model, *args)` and of the gradient with respect to the model.

    Args:
        model: any pytree; rows have the paths of its Equinox modules.
        loss: returns a scalar.
        args: further arguments, arrays or shapes.
        compiled: see `audit_function`.
    """
    named = announced(model)
    forward = audit_function(loss, named, *args, compiled=compiled)
    gradient = audit_function(eqx.filter_grad(loss), named, *args, compiled=compiled)
    return aggregated((*forward, *gradient))


def audit_model(model: MegalodonForCausalLM, *, compiled: bool = True) -> tuple[Row, ...]:
    """Return the dtype audit table of a Megalodon's loss and gradient, on a padded batch.

    Each sequence has two full chunks and a short one, which covers every path of a training step.
    """
    B, L = BATCH, 2 * model.config.chunk_size + 3
    ids = jax.ShapeDtypeStruct((B, L), jnp.int32)
    mask = jax.ShapeDtypeStruct((B, L), jnp.bool_)
    return audit_step(model, _loss, ids, mask, compiled=compiled)


def audit_config(config: MegalodonConfig, *, compiled: bool = True) -> tuple[Row, ...]:
    """Return the dtype audit table of a configuration, shrunk to one layer and small sizes.

    Dtypes do not depend on sizes. All other fields of the configuration are kept.
    """
    return audit_model(abstract_model(shrunk(config)), compiled=compiled)


def shrunk(config: MegalodonConfig) -> MegalodonConfig:
    """Return the configuration with one layer and sizes that compile in seconds."""
    sizes = {
        "vocab_size": 61,
        "model_dim": 32,
        "num_layers": 1,
        "num_heads": 2,
        "z_dim": 16,
        "value_dim": 48,
        "ffn_hidden_dim": 40,
        "cema_ndim": 4,
        "chunk_size": 16,
        "max_cache_len": None,
        "norm_num_groups": 4,
        "pad_token_id": 0,
        "output_size": -1 if config.tied else 59,
    }
    return dataclasses.replace(config, **sizes)


def dtype_findings(
    config: MegalodonConfig, *, policy: Policy | None = None, compiled: bool = True
) -> list[Finding]:
    """Return findings on a configuration by the dtype policy: violations, and OK for other rules.

    Args:
        config: the configuration.
        policy: the rules; None: the committed ones.
        compiled: see `audit_function`.
    """
    return (policy or load_policy()).check(audit_config(config, compiled=compiled))


def _loss(model: Any, ids: jax.Array, mask: jax.Array) -> jax.Array:
    return model.compute_loss(ids, ids, mask)
