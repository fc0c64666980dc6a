"""Train a Megalodon on the bytes of a text. Copy this file and change what you like.

    pip install -e .
    python examples/train.py                                # reads Python's language reference
    python examples/train.py book.txt --steps 2000 --out book
    python examples/train.py book.txt --mesh data=2,fsdp=4 --wandb my-project

Stop it whenever you like, by Ctrl-C or by `kill -9`, and give the same command again: it goes on
from its last checkpoint, and every loss and every parameter is bit for bit that of a run that was
never stopped. At the end `OUT/torch` holds the model as megalodon-hf loads it.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import optax

from megalodon_jax import MegalodonConfig, MegalodonForCausalLM, generate
from megalodon_jax.checkpoint import load_checkpoint, save_checkpoint
from megalodon_jax.convert import save_safetensors
from megalodon_jax.optimiser import decay_mask, optimiser_update
from megalodon_jax.sharding import make_mesh, shard_batch, shard_model, shard_state
from stability.recovery.guard import guard

CONFIG = MegalodonConfig(
    vocab_size=256,  # one token for each byte
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
    pad_token_id=None,
    scan_layers=True,  # compiles one layer, not four
    # compute_dtype="bfloat16" on a GPU or TPU; parameters and their updates stay in float32.
)


def read_text(file: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes to train on and the last tenth, which is held out, uint8."""
    if file is None:
        from pydoc_data.topics import topics

        text = np.frombuffer("\n\n".join(topics.values()).encode(), np.uint8)
    else:
        text = np.memmap(file, np.uint8, "r")  # reads only the requested part of a large file
    cut = len(text) * 9 // 10
    return text[:cut], text[cut:]


def batch(text: np.ndarray, number: int, rows: int, length: int, seed: int) -> np.ndarray:
    """Return batch `number`: windows at random places, (rows, length) int32.

    It depends on the seed and the number alone, so the step is all that a resumed run must know.
    """
    starts = np.random.default_rng([seed, number]).integers(len(text) - length + 1, size=rows)
    return text[starts[:, None] + np.arange(length)].astype(np.int32)


def make_optimiser(lr: float, steps: int) -> optax.GradientTransformationExtraArgs:
    """Return AdamW that decays matrices only, in a guard that clips, and skips bad steps."""
    rate = optax.warmup_cosine_decay_schedule(0.0, lr, min(40, steps // 2), steps, lr / 20)
    return guard(optax.adamw(rate, b2=0.98, weight_decay=0.1, mask=decay_mask))


def make_step(optimiser, mesh):
    """Return the compiled step: (ids, key), model, state -> model, state, loss in nats per byte."""

    def loss_in_training(model, ids, key):
        return model.compute_loss(ids, ids, deterministic=False, key=key)

    @eqx.filter_jit(donate="all-except-first")
    def step(given, model, state):
        loss, gradients = eqx.filter_value_and_grad(loss_in_training)(model, *given)
        parameters = eqx.filter(model, eqx.is_array)
        updates, state = optimiser_update(optimiser, gradients, state, parameters, value=loss)
        model = eqx.apply_updates(model, updates)
        # Everything stays where it was, or the next call would compile again.
        return shard_model(model, mesh), shard_state(state, model, mesh), loss

    return step


@eqx.filter_jit
def loss_of(model, ids):
    """Return the loss in nats per byte, without dropout."""
    return model.compute_loss(ids, ids)


# These two functions are all that knows how a checkpoint is stored.
def save(folder: Path, model, state, step: int, mesh) -> None:
    """Replace the checkpoint by a new one, whole or not at all: a kill leaves one or the other."""
    save_checkpoint(folder, model, step=step, opt_state=state, mesh=dict(mesh.shape))


def restore(folder: Path, model, state):
    """Return model, optimiser state and step of the checkpoint; what was given if there is none."""
    if not folder.exists():
        return model, state, 0
    found = load_checkpoint(folder, opt_state_like=state)
    return found.model, found.opt_state, found.step


def make_log(project: str | None, out: Path, settings: dict):
    """Return a function that prints the numbers of a step, and sends them to W&B if asked to."""
    run = None
    if project:
        import wandb

        run = wandb.init(project=project, id=out.name, resume="allow", config=settings)

    def log(step: int, **numbers: float) -> None:
        # Nine digits tell any two float32 numbers apart: equal lines are equal runs.
        line = "  ".join(f"{name} {number:.9g}" for name, number in numbers.items())
        print(f"step {step}  {line}", flush=True)
        if run is not None:
            run.log(numbers, step=step)

    return log


def export(model: MegalodonForCausalLM, folder: Path) -> None:
    """Write what `megalodon.MegalodonForCausalLM.from_pretrained` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    save_safetensors(model, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(model.config.to_hf()), encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    """Train, saving and logging as the command line asks."""
    args = parse(arguments)
    text, held_out = read_text(args.text)
    if len(held_out) < args.length:
        raise SystemExit(f"the text is too short: its last tenth must hold {args.length} bytes.")
    log = make_log(args.wandb, args.out, {k: str(v) for k, v in vars(args).items()})
    key = jax.random.key(args.seed)
    mesh = make_mesh(**args.mesh)  # without axes it is the first device
    optimiser = make_optimiser(args.lr, args.steps)
    model = MegalodonForCausalLM(CONFIG, key=key)
    state = optimiser.init(eqx.filter(model, eqx.is_array))
    model, state, done = restore(args.out / "checkpoint", model, state)
    model, state = shard_model(model, mesh), shard_state(state, model, mesh)
    step = make_step(optimiser, mesh)

    def ids(of: np.ndarray, number: int):
        rows = batch(of, number, args.rows, args.length, args.seed)
        return shard_batch(rows, mesh, chunk_size=CONFIG.chunk_size)

    start, first = time.perf_counter(), done
    for number in range(done, args.steps):
        given = ids(text, number), jax.random.fold_in(key, number)
        model, state, loss = step(given, model, state)
        done = number + 1
        if done % args.log_every == 0:
            log(done, loss=float(loss), norm=float(state.report.norm))  # waits for the device
        if done % args.save_every == 0 or done == args.steps:
            save(args.out / "checkpoint", model, state, done, mesh)
            losses = [float(loss_of(model, ids(held_out, i))) for i in range(4)]
            log(done, held_out=float(np.mean(losses)), skipped=int(state.total_skips))
    seconds = time.perf_counter() - start
    print(f"{done - first} steps in {seconds:.0f} s, with compiling and saving")

    export(model, args.out / "torch")
    prompt = np.frombuffer(b"The ", np.uint8)[None].astype(np.int32)
    written, _, _ = generate(model, prompt, 200, key, temperature=0.7)
    print(bytes(np.asarray(written[0], np.uint8)).decode(errors="replace"))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    summary, _, more = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=more, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", type=Path, nargs="?", help="any file")
    parser.add_argument("--out", type=Path, default=Path("trained"), help="folder of the run")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rows", type=int, default=8, help="windows in a batch")
    parser.add_argument("--length", type=int, default=256, help="bytes in a window")
    parser.add_argument("--lr", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--save-every", type=int, default=100, metavar="STEPS")
    parser.add_argument("--mesh", type=axes, default={}, metavar="AXIS=SIZE,...")
    parser.add_argument("--wandb", metavar="PROJECT", help="log to Weights & Biases as well")
    return parser.parse_args(arguments)


def axes(mesh: str) -> dict[str, int]:
    """Return the sizes of the axes in `data=2,fsdp=4`."""
    return {name: int(size) for name, size in (axis.split("=") for axis in mesh.split(","))}


if __name__ == "__main__":
    main()
