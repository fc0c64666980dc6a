"""Megalodon as a user's port: megalodon-hf and the JAX model compared by `parity.port`.

The suite of this package knows every intermediate and has calibrated bounds. `parity.port` gets
only the two models, so this comparison shows how well `parity.port` works without that knowledge.
Source: docs/tables/ports-detection.md "Megalodon's own bugs".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from megalodon_jax.model import MegalodonForCausalLM
from parity.megalodon.cases import Case
from parity.megalodon.reference.live import LiveReference
from parity.megalodon.runner import JaxSubject
from parity.port import Port
from parity.sides import EquinoxSide, TorchSide

LOSS = "output.loss"
"""Name of the output that is differentiated to compare gradients."""


def port(
    case: Case,
    change: Callable[[MegalodonForCausalLM], MegalodonForCausalLM] = lambda model: model,
    *,
    gradients: bool = False,
) -> Port:
    """Return megalodon-hf and the JAX model on a case, as a `Port` to be compared.

    Compared are logits and loss of one uncached call, at valid positions.

    Args:
        case: a case that is neither a stream nor a trajectory.
        change: modifies the JAX model, for example to plant a defect.
        gradients: also compare gradients of the loss; they take most of the time.

    Raises:
        ValueError: the case is a stream or a trajectory.
        ReferenceUnavailableError: megalodon-hf cannot run here.
    """
    if case.cuts or case.steps:
        raise ValueError(
            f"case {case.name} is a stream or a trajectory: expected a case of one uncached call, "
            "such as 'plain'."
        )
    batch = case.batch
    mask = {"mask": batch.mask} if batch.padded else {}

    def theirs(model: Any, ids: Any, labels: Any, mask: Any = None) -> dict[str, Any]:
        out = model(input_ids=ids, labels=labels, attention_mask=mask, use_cache=False)
        return {"logits": out.logits, "loss": out.loss}

    def ours(model: Any, ids: Any, labels: Any, mask: Any = None) -> dict[str, Any]:
        logits = model(ids, attention_mask=mask)[0]
        return {"logits": logits, "loss": model.compute_loss(ids, labels, attention_mask=mask)}

    original = TorchSide(
        LiveReference().load(case.config, case.weights),
        batch.ids,
        batch.labels,
        call=theirs,
        **mask,
    )
    twin = EquinoxSide(
        change(JaxSubject("float32").load(case)),
        jnp.asarray(batch.ids),
        jnp.asarray(batch.labels),
        call=ours,
        **{name: jnp.asarray(x) for name, x in mask.items()},
    )
    # The two models may differ at padding, so only valid positions are compared.
    return Port(
        "megalodon",
        original,
        twin,
        valid=batch.mask if batch.padded else None,
        loss=LOSS,
        gradients=gradients,
        bfloat16=False,
    )
