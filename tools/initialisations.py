"""Initial loss and training curves for three initialisations of a new model, as tables.

    python -m tools.initialisations             # measure, then print the tables
    python -m tools.initialisations --write     # ... and put them in docs/guide.md

The default is `init_mode="he"`. '"he" for tokens too' is the same without its special rule for the
embedding and the head. "bert" is what megalodon-hf starts from, whatever its `init_mode` says.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import equinox as eqx
import jax
import numpy as np

from megalodon_jax import MegalodonConfig, MegalodonForCausalLM
from tools.document import renew
from tools.experiments.train import (
    BYTE_LM_CONFIG,
    Recipe,
    make_step,
    mean_loss,
    optimiser,
    read_text,
    windows,
)

DOCUMENT = Path(__file__).parents[1] / "docs" / "guide.md"
MODELS = {
    "the default configuration, 200M": MegalodonConfig(),
    "D=256, 4 layers, V=4,096": MegalodonConfig(
        vocab_size=4096, model_dim=256, num_layers=4, num_heads=2, z_dim=128, value_dim=512,
        ffn_hidden_dim=640, norm_num_groups=32,
    ),
    "D=128, 4 layers, bytes, SwiGLU": replace(BYTE_LM_CONFIG, init_mode="he"),
}  # fmt: skip
"""Models whose initial loss is measured."""
TOKENS = (2, 256)
"""Shape of the random tokens on which the initial loss is measured."""
TRAINED = MegalodonConfig(
    vocab_size=256, model_dim=96, num_layers=3, num_heads=2, z_dim=48, value_dim=192,
    ffn_hidden_dim=192, cema_ndim=8, chunk_size=96, norm_num_groups=8, swiglu=True,
)  # fmt: skip
RECIPE = Recipe(steps=300, batch_size=8, length=192)
SEEDS = 4
TOLD = (0, 50, 100, 200, 300)
"""Steps after which the held-out loss is measured."""


def new_model(config: MegalodonConfig, draw: str, key: jax.Array) -> MegalodonForCausalLM:
    """Return a new model; `draw` is a key of `DRAWS`."""
    model = MegalodonForCausalLM(replace(config, init_mode=DRAWS[draw]), key=key)
    if draw != WIDE:
        return model
    # Undo the embedding's rule in `init_weight`: 0.5 / sqrt(D * D / G) instead of sqrt(2 / D).
    wider = np.sqrt(8.0 * config.model_dim / config.norm_num_groups).item()
    return eqx.tree_at(lambda m: m.model.embed.weight, model, replace_fn=lambda w: w * wider)


WIDE = '"he" for tokens too'
DRAWS = {WIDE: "he", "default": "he", '"bert", as `megalodon-hf`': "bert"}


def first_loss(config: MegalodonConfig, draw: str, seed: int) -> float:
    """Return the loss of a new model on random tokens, in nats."""
    model = new_model(config, draw, jax.random.key(seed))
    ids = jax.random.randint(jax.random.key(seed + 1), TOKENS, 0, config.vocab_size)
    return float(mean_loss(model, ids))


def curve(draw: str, seed: int) -> list[float]:
    """Train a small byte model; return its held-out loss at `TOLD`, in nats per byte."""
    text, held_out = read_text()
    recipe = replace(RECIPE, seed=seed)
    rng = np.random.default_rng(seed)
    model = new_model(TRAINED, draw, jax.random.key(seed))
    step, transform = _step()
    state = transform.init(eqx.filter(model, eqx.is_array))
    starts = np.arange(0, len(held_out) - recipe.length, recipe.length)
    rows = len(starts) // recipe.batch_size * recipe.batch_size
    batches = starts[:rows].reshape(-1, recipe.batch_size)
    losses = []
    for index in range(recipe.steps + 1):
        if index in TOLD:
            parts = [mean_loss(model, windows(held_out, s, recipe.length)) for s in batches]
            losses.append(float(np.mean([float(part) for part in parts])))
        starts = rng.integers(0, len(text) - recipe.length, recipe.batch_size)
        model, state, _ = step((windows(text, starts, recipe.length), None), model, state)
    return losses


@cache
def _step():
    transform = optimiser(RECIPE)
    return make_step(transform), transform


def starts_table(seed: int = 0) -> str:
    """Return the first losses as a Markdown table."""
    draws = [draw for draw in DRAWS if "bert" not in draw]
    lines = [f"| model | ln V | {' | '.join(draws)} |", "| --- | --- |" + " --- |" * len(draws)]
    for name, config in MODELS.items():
        losses = " | ".join(f"{first_loss(config, draw, seed):.1f}" for draw in draws)
        lines.append(f"| {name} | {np.log(config.vocab_size):.2f} | {losses} |")
    return "\n".join(lines)


def curves_table(seeds: int) -> str:
    """Return the curves as a Markdown table: mean and standard deviation over seeds."""
    found = {draw: np.array([curve(draw, seed) for seed in range(seeds)]) for draw in DRAWS}
    lines = [f"| steps | {' | '.join(DRAWS)} |", "| --- |" + " --- |" * len(DRAWS)]
    for row, at in enumerate(TOLD):
        cells = (f"{x[:, row].mean():.3f} ± {x[:, row].std(ddof=1):.3f}" for x in found.values())
        lines.append(f"| {at} | {' | '.join(cells)} |")
    apart = found["default"][:, -1] - found[WIDE][:, -1]
    print(f"default less wide, per seed: {np.round(apart, 4).tolist()}", file=sys.stderr)
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many models to train")
    parser.add_argument("--write", action="store_true", help="put the tables in docs/guide.md")
    asked = parser.parse_args(arguments)
    tables = {"first losses": starts_table(), "loss curves": curves_table(asked.seeds)}
    print("\n\n".join(tables.values()))
    for name, lines in tables.items() if asked.write else ():
        renew(DOCUMENT, f"<!-- {name}: begin -->", f"<!-- {name}: end -->", lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
