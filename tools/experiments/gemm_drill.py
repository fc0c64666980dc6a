"""Training drill of the GEMM backends: short runs that differ in the format of matrix products.

`python -m tools.experiments gemm-drill docs/formats.md` trains the byte-level model once per
backend, from the same weights and batches, and rewrites the table between the markers of the
document and the two charts beside it. Source: docs/formats.md "Training drill".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

from megalodon_jax.config import GemmBackend
from megalodon_jax.convert import load_from_pretrained, read_config
from megalodon_jax.quantization.products import BACKENDS
from megalodon_jax.training import mean_loss
from parity.megalodon.cases import BYTE_LM
from parity.tolerances import TRAINED_LOSS
from stability.core.byte_text import read_text, spread_windows
from stability.core.documents import markdown
from tools.document import renew
from tools.experiments.chart import line_chart
from tools.experiments.drill import DrillResult, Plan, Variant

BEGIN, END = "<!-- gemm drill: begin -->", "<!-- gemm drill: end -->"
VARIANTS = (
    Variant("float32", "products in float32", "control", "float32", narrow=False),
    Variant("bfloat16", "products in bfloat16", "amp", narrow=False),
    *(
        Variant(name, f"products of the blocks on {name}", "gemm", "float32", False, gemm=name)
        for name in get_args(GemmBackend)[1:]
    ),
)


def excess(outcome: DrillResult, control: DrillResult) -> float:
    """Return the relative excess of a variant's held-out loss over that of the control."""
    return outcome.held_out / control.held_out - 1.0


def losses_without_training(variants: Sequence[Variant] = VARIANTS) -> list[float]:
    """Return held-out losses of the committed model, trained in float32, by variant of products."""
    config, (_, text) = read_config(BYTE_LM / "config.json"), read_text()
    ids = spread_windows(text, Plan.held_out, Plan.length)
    losses = []
    for variant in variants:
        narrow = {"compute_dtype": variant.compute, "gemm_backend": variant.gemm}
        model = load_from_pretrained(BYTE_LM, config=replace(config, **narrow))
        losses.append(float(mean_loss(model, ids)))
    return losses


def table(outcomes: Sequence[DrillResult], others: Sequence[float]) -> str:
    """Return the results as a Markdown table.

    Args:
        outcomes: results of the drill; the first one is the control.
        others: result of `losses_without_training` for the same variants.
    """
    control = outcomes[0]
    rows = []
    for each, other in zip(outcomes, others, strict=True):
        backend = BACKENDS.get(str(each.variant.gemm))
        allowed = "" if backend is None else f"{TRAINED_LOSS[backend.gradients]:.0%}"
        above = f"{excess(each, control):+.2%}", allowed, f"{other / others[0] - 1:+.2%}"
        rows.append((each.variant.name, f"{each.held_out:.4f}", *above))
    columns = ("products", "trained: held-out loss", "above float32", "allowed")
    return markdown((*columns, "float32's weights taken over: above float32"), rows)


def charts(outcomes: Sequence[DrillResult]) -> dict[str, str]:
    """Return SVGs by file name: training losses, and their relative distance from float32's."""
    control = dict(outcomes[0].loss)
    curves = {o.variant.name: [(float(x), y) for x, y in o.loss] for o in outcomes}
    apart = {
        o.variant.name: [(float(x), 100 * abs(y / control[x] - 1)) for x, y in o.loss]
        for o in outcomes[1:]
    }
    return {
        "formats-loss.svg": line_chart("Training loss, nats per byte", "steps", curves),
        "formats-distance.svg": line_chart(
            "Distance of the training loss from float32's, %", "steps", apart
        ),
    }


def write(doc: Path, outcomes: Sequence[DrillResult], others: Sequence[float]) -> None:
    """Rewrite the table between the markers of a document, and the charts beside it.

    Raises:
        ValueError: the document lacks the markers.
    """
    renew(doc, BEGIN, END, table(outcomes, others), charts(outcomes))
