"""Training of the byte-level model, whose trained weights the nightly runs probe.

`python -m tools.experiments train OUT` writes `model.safetensors`, `config.json`, `training.json`
(settings, versions, hash of the text, loss curves) and `heldout.txt`. The text is that of
`stability.core.byte_text`.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import optax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from megalodon_jax.config import MegalodonConfig
from megalodon_jax.convert import save_safetensors
from megalodon_jax.model import MegalodonForCausalLM
from megalodon_jax.training import adamw, make_step, mean_loss
from stability.core.byte_text import read_text, text_identity, windows
from stability.core.documents import versions

BYTE_LM_CONFIG = MegalodonConfig(
    vocab_size=256,
    model_dim=128,
    num_layers=4,
    num_heads=2,
    z_dim=64,
    value_dim=256,
    ffn_hidden_dim=256,
    cema_ndim=16,
    chunk_size=128,
    norm_num_groups=16,
    swiglu=True,
    init_mode="xavier",
)
HELDOUT_BYTES = 4096
"""Bytes of held-out text stored with the checkpoint: 32 windows of the nightly's 128 tokens."""


@dataclass(frozen=True)
class Recipe:
    """Settings of the training; with the text and package versions they determine the result."""

    steps: int = 600
    batch_size: int = 16
    length: int = 384
    lr: float = 2e-3
    warmup: int = 40
    weight_decay: float = 0.1
    beta2: float = 0.98
    clip: float = 1.0
    seed: int = 0


def optimiser(recipe: Recipe) -> optax.GradientTransformation:
    """Return clipped AdamW with warmup and cosine decay; weight decay applies to matrices only."""
    return optax.chain(
        optax.clip_by_global_norm(recipe.clip),
        adamw(
            recipe.lr,
            recipe.steps,
            warmup=recipe.warmup,
            b2=recipe.beta2,
            weight_decay=recipe.weight_decay,
        ),
    )


def train(config: MegalodonConfig, recipe: Recipe, console: Console):
    """Train the byte-level model and return (model, curves).

    Curves are lists by name: "step", "train_loss", "val_step", "val_loss"; losses are in nats per
    byte.

    Args:
        config: the model.
        recipe: settings of the training.
        console: shows the progress.
    """
    text, held_out = read_text()
    key, rng = jax.random.key(recipe.seed), np.random.default_rng(recipe.seed)
    model = MegalodonForCausalLM(config, key=key)
    transform = optimiser(recipe)
    step = make_step(transform)
    state = transform.init(eqx.filter(model, eqx.is_array))
    validation = np.arange(0, len(held_out) - recipe.length, recipe.length)
    batches = [
        windows(held_out, validation[i : i + recipe.batch_size], recipe.length)
        for i in range(0, len(validation) - recipe.batch_size + 1, recipe.batch_size)
    ]
    curves: dict[str, list[float]] = {"step": [], "train_loss": [], "val_step": [], "val_loss": []}
    with _progress(console) as progress:
        bar = progress.add_task("training", total=recipe.steps, loss="")
        for index in range(1, recipe.steps + 1):
            starts = rng.integers(0, len(text) - recipe.length, recipe.batch_size)
            model, state, loss = step((windows(text, starts, recipe.length), None), model, state)
            if index % 10 == 0 or index == 1:
                curves["step"].append(index)
                curves["train_loss"].append(round(float(loss), 4))
            if index % 100 == 0 or index == recipe.steps:
                value = float(np.mean([float(mean_loss(model, ids)) for ids in batches]))
                curves["val_step"].append(index)
                curves["val_loss"].append(round(value, 4))
                if not console.is_terminal:
                    console.print(f"step {index}: train {float(loss):.3f}, val {value:.3f}")
            progress.update(bar, advance=1, loss=f"{float(loss):.3f} nats/byte")
    return model, curves


def record(config: MegalodonConfig, recipe: Recipe, curves: dict[str, list[float]]) -> dict:
    """Return the contents of `training.json`: recipe, curves, text and versions."""
    return {
        **asdict(recipe),
        **curves,
        "final_val_loss": curves["val_loss"][-1],
        "unit": "nats per byte",
        **text_identity(),
        "versions": versions(),
    }


def write(out: Path, model: MegalodonForCausalLM, history: dict) -> None:
    """Write the checkpoint folder atomically; an existing folder is replaced.

    Args:
        out: the folder.
        model: the trained model.
        history: contents of `training.json`, from `record`.
    """
    aside = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
    try:
        save_safetensors(model, aside / "model.safetensors")
        dump = partial(json.dumps, indent=1)
        (aside / "config.json").write_text(dump(model.config.to_dict()) + "\n", encoding="utf-8")
        (aside / "training.json").write_text(dump(history) + "\n", encoding="utf-8")
        (aside / "heldout.txt").write_bytes(read_text()[1][:HELDOUT_BYTES].tobytes())
        aside.chmod(0o755)
        _replace(out, aside)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _replace(out: Path, aside: Path) -> None:
    """Replace folder `out` by `aside`; if the renaming fails, the old folder is put back."""
    before = aside.with_name(f"{aside.name}.before")
    if out.exists():
        out.rename(before)
    try:
        aside.rename(out)
    except BaseException:
        if before.exists():
            before.rename(out)
        raise
    shutil.rmtree(before, ignore_errors=True)


def _progress(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[loss]}"),
    )
    return Progress(*columns, console=console)
