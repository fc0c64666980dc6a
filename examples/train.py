"""Train a Megalodon on the bytes of a text. Copy this file and change what you like.

    python examples/train.py                                # reads Python's language reference
    python examples/train.py book.txt --steps 2000 --out book
    python examples/train.py book.txt --mesh data=2,fsdp=4 --wandb my-project

Stop it at any time, also by `kill -9`, and give the same command again: it goes on from its last
checkpoint, bit for bit as if it had never stopped. `OUT/torch` is the model for megalodon-hf.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from pydoc_data.topics import topics

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from megalodon_jax import MegalodonConfig, MegalodonForCausalLM, generate
from megalodon_jax.checkpoint import resume, save_checkpoint
from megalodon_jax.deployment import write_pretrained
from megalodon_jax.sharding import make_mesh, shard_batch, shard_model, shard_state
from megalodon_jax.training import adamw, make_step, mean_loss, windows
from stability.recovery.guard import guard

CONFIG = MegalodonConfig(
    vocab_size=256,  # one token for each byte
    model_dim=128,
    num_layers=4,
    num_heads=2,
    z_dim=64,
    value_dim=256,
    ffn_hidden_dim=256,
    chunk_size=128,
    norm_num_groups=16,
    swiglu=True,
    pad_token_id=None,
    scan_layers=True,  # compiles one layer, not four
    # compute_dtype="bfloat16" on a GPU or TPU; parameters and their updates stay in float32.
)


def main(arguments: list[str] | None = None) -> None:
    """Train, saving and logging as the command line asks."""
    args = parse(arguments)
    everything = np.memmap(args.text, np.uint8, "r") if args.text else default_text()
    text, held_out = np.split(everything, [len(everything) * 9 // 10])
    if len(held_out) < args.length:
        raise SystemExit(f"the text is too short: its last tenth must hold {args.length} bytes.")
    key, mesh = jax.random.key(args.seed), make_mesh(**args.mesh)  # the first device by default
    log = make_log(args)

    optimiser = guard(adamw(args.lr, args.steps))  # clips gradients, and skips bad steps
    step = make_step(optimiser, mesh)
    model = MegalodonForCausalLM(CONFIG, key=key)
    state = optimiser.init(eqx.filter(model, eqx.is_array))
    model, state, done = resume(args.out / "checkpoint", model, state)
    model, state = shard_model(model, mesh), shard_state(state, model, mesh)

    def ids(source: np.ndarray, number: int) -> jax.Array:
        rows = batch(source, number, args.rows, args.length, args.seed)
        return shard_batch(jnp.asarray(rows), mesh, chunk_size=CONFIG.chunk_size)

    while done < args.steps:
        given = ids(text, done), jax.random.fold_in(key, done)  # the key is dropout's
        model, state, loss = step(given, model, state)
        done += 1
        if done % args.log_every == 0:
            log(done, loss=loss, norm=state.report.norm)
        if done % args.save_every == 0 or done == args.steps:
            save_checkpoint(args.out / "checkpoint", model, step=done, opt_state=state)
            losses = [float(mean_loss(model, ids(held_out, i))) for i in range(4)]
            log(done, held_out=np.mean(losses), skipped=state.total_skips)

    write_pretrained(model, args.out / "torch")
    prompt = np.frombuffer(b"The ", np.uint8)[None].astype(np.int32)
    written, _, _ = generate(model, prompt, 200, key, temperature=0.7)
    print(bytes(np.asarray(written[0], np.uint8)).decode(errors="replace"))


def default_text() -> np.ndarray:
    """Return Python's language reference, uint8."""
    return np.frombuffer("\n\n".join(topics.values()).encode(), np.uint8)


def batch(text: np.ndarray, number: int, rows: int, length: int, seed: int) -> np.ndarray:
    """Return batch `number`: windows at random places, (rows, length) int32.

    It depends on the seed and the number alone, so the step is all that a resumed run must know.
    """
    starts = np.random.default_rng([seed, number]).integers(len(text) - length + 1, size=rows)
    return windows(text, starts, length)


def make_log(args: argparse.Namespace):
    """Return a function that prints the numbers of a step, and sends them to W&B if asked to."""
    run = None
    if args.wandb:
        import wandb

        settings = {name: str(value) for name, value in vars(args).items()}
        run = wandb.init(project=args.wandb, id=args.out.name, resume="allow", config=settings)

    def log(step: int, **numbers) -> None:
        values = {name: float(number) for name, number in numbers.items()}  # waits for the device
        # Nine digits tell any two float32 numbers apart: equal lines are equal runs.
        print(f"step {step}", *(f" {n} {value:.9g}" for n, value in values.items()), flush=True)
        if run is not None:
            run.log(values, step=step)

    return log


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
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
