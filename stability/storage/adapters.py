"""LoRA adapters in few bits: how much of an update is lost in training, and how much in merging.

An adapter changes a weight by scale * B @ A. In training, adapters stored in bfloat16 lose updates
as any parameter does: B starts at 0 and keeps its updates, A starts at random values and freezes at
small learning rates. In merging, the change is added once to weights stored in few bits. Elements
whose change is below half the spacing of the format stay unchanged. Source: docs/stability.md
"Adapters".
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np

from megalodon_jax.layers.lora import lora_maps
from megalodon_jax.lora import partition_lora
from megalodon_jax.lora_files import Adapter, read_adapters
from megalodon_jax.stacked import unstack_layers
from stability.core.findings import Finding, judge, notes
from stability.core.number_formats import BF16, Format
from stability.core.parameter_leaves import Leaf, leaf_called, leaves_of, listed
from stability.storage.simulate import STEPS, Survival, summary
from stability.storage.survival import FROZEN_SHARE, measure, survival_findings
from stability.storage.training import next_token_loss
from stability.storage.update_rules import AdamW, Optimiser

SOURCE = 'docs/stability.md "Adapters"'
REMEDY = (
    "keep the adapter beside the weights and do not merge it, or merge into float32 weights and "
    "serve those"
)


def findings(
    model: Any, optimiser: Optimiser | None = None, batches: Any = None, *, steps: int = STEPS
) -> list[Finding]:
    """Return findings on storing a model's adapters in bfloat16, and on merging them into weights.

    Args:
        model: a Megalodon with adapters, its layers stacked or not; only the adapters are trained.
        optimiser: the optimiser that trains the adapters; AdamW by default.
        batches: token ids (steps, B, L) to train on; None uses synthetic gradients.
        steps: number of optimiser steps if gradients are synthetic.

    Raises:
        ValueError: the model has no adapters, or an adapter holds NaN or infinity.
    """
    model, rule = unstack_layers(model), optimiser or AdamW()
    adapters, frozen = partition_lora(model)

    def loss(adapters: Any, ids: Any) -> jax.Array:
        return next_token_loss(eqx.combine(adapters, frozen), ids)

    narrow, control = (
        measure(adapters, batches, rule, fmt, loss=loss, steps=steps) for fmt in (BF16, None)
    )
    found = [
        finding
        for name, leaf in leaves_of(adapters).items()
        for finding in survival_findings(leaf, narrow[name], control[name], rule, True)
    ]
    for name, node in lora_maps(model).items():
        weight, A, B = (np.asarray(x) for x in (node.weight, node.lora_A, node.lora_B))
        found += _merge(f"{name}.weight", weight, Adapter(A, B, node.alpha, node.rslora), BF16)
    return found


def merge_findings(
    folder: str | os.PathLike[str], base: Any, fmt: Format = BF16
) -> Iterator[Finding]:
    """Yield findings on merging a folder of adapters into a base model of any architecture.

    Args:
        folder: adapters in PEFT's format.
        base: pytree, state dict or checkpoint path, as for `leaves_of`.
        fmt: storage format of the merged weights.

    Raises:
        FileNotFoundError: there are no adapters, or no base model.
        ValueError: the adapters are not plain LoRA, or belong to another model. The message then
            counts the adapters whose weight is missing or has another shape, and names the first.
    """
    adapters = read_adapters(folder)
    weights = _weights(adapters, leaves_of(base))
    for name, leaf in weights.items():
        yield from _merge(leaf.name, leaf.load(), adapters[name], fmt)


def summary_of(found: Sequence[Finding]) -> list[str]:
    """Return a list with one line on the effect of merging; empty without findings.

    The line has the largest unchanged fraction and the smallest fidelity of all weights.

    The line is returned even if no finding is a warning.

    Args:
        found: findings of `merge_findings`.
    """
    unchanged = [f.value for f in found if f.metric == "unchanged_fraction"]
    applied = [f.value for f in found if (f.probe, f.metric) == ("merge", "fidelity")]
    if not unchanged:
        return []
    return [
        f"Merging {len(unchanged)} adapters: at most {max(unchanged):.0%} of a weight's elements "
        f"stay unchanged, and at least {min(applied):.0%} of its change is applied."
    ]


def merged(weight: np.ndarray, adapter: Adapter, fmt: Format = BF16) -> Survival:
    """Return how much of an adapter's change to a weight survives storage in `fmt`.

    In the result, `frozen` is the fraction of elements that stay unchanged although the adapter
    changes them, and `fidelity` is applied change divided by intended change.

    Args:
        weight: (out, in); it is rounded to `fmt` first, as the served base model is.
        adapter: the matrices A (rank, in) and B (out, rank), and the scale.
        fmt: format of the weight before and after the merge.
    """
    A, B = (np.asarray(x, np.float32) for x in (adapter.A, adapter.B))
    change = np.float32(adapter.scale) * (B @ A)
    first = fmt.round(np.asarray(weight, np.float32))
    last = fmt.round(first + change)
    return summary(first, last, change, last != first)


def _merge(name: str, weight: np.ndarray, adapter: Adapter, fmt: Format) -> list[Finding]:
    """Return a finding on a weight's unchanged fraction, and notes: fidelity and relative error."""
    left = merged(weight, adapter, fmt)
    message = (
        f"merged into {fmt.name}, {left.frozen:.0%} of its {weight.size:,} elements "
        f"stay unchanged although the adapter changes them, and {left.fidelity:.0%} of its "
        "change is applied"
    )
    threshold, metric = FROZEN_SHARE, "unchanged_fraction"
    main = judge("merge", name, metric, left.frozen, threshold, SOURCE, message, REMEDY)
    numbers = {"fidelity": left.fidelity, "relative_error": left.error}
    return [main, *notes("merge", name, numbers, SOURCE)]


def _weights(adapters: Mapping[str, Adapter], base: Mapping[str, Leaf]) -> dict[str, Leaf]:
    """Return the base model's weight for each adapter, by the adapter's name.

    Raises:
        ValueError: a weight is missing or has another shape.
    """
    found = {name: leaf_called(f"{name}.weight", base) for name in adapters}
    wrong = []
    for name, adapter in adapters.items():
        leaf, sizes = found[name], (adapter.B.shape[0], adapter.A.shape[1])
        if leaf is None:
            wrong.append(f"no {name}.weight")
        elif leaf.shape != sizes:
            wrong.append(f"{leaf.name} {leaf.shape}, its adapter {sizes}")
    if wrong:
        raise ValueError(
            f"the adapters belong to another base model: {listed(wrong)}; pass the checkpoint that "
            "they were trained on."
        )
    return {name: leaf for name, leaf in found.items() if leaf is not None}
