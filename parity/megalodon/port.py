"""Megalodon as a port by a user: live megalodon-hf against our model, without any annotation.

The suites of this folder know every intermediate and have calibrated bounds. This comparison shows
what a user without that knowledge gets. Source: docs/tables/ports-detection.md
"Megalodon's own bugs".
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
"""Output whose gradients are compared."""


def port(
    case: Case,
    change: Callable[[MegalodonForCausalLM], MegalodonForCausalLM] = lambda model: model,
    *,
    gradients: bool = False,
) -> Port:
    """Return a case as a port: logits and loss of one uncached call, at valid positions.

    Args:
        case: a case that is neither a stream nor a trajectory.
        change: modifies our model, for example to plant a defect.
        gradients: also compare gradients of the loss; they take most of the time.

    Raises:
        ValueError: the case is a stream or a trajectory.
        ReferenceUnavailableError: megalodon-hf cannot run here.
    """
    if case.cuts or case.steps:
        raise ValueError(f"expected a case of one call, got {case.name}: its calls share a state.")
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
    # The sides may differ at padding.
    return Port(
        "megalodon",
        original,
        twin,
        valid=batch.mask if batch.padded else None,
        loss=LOSS,
        gradients=gradients,
        bfloat16=False,
    )
