"""The work that a bench times, the same for JAX and megalodon-hf, and lower bounds of its time.

Run as `python -m reports.bench.workloads jax|reference LENGTH SIZES`, it is the child of a
`reports.bench.worker.Worker`. It does not import store or page, whose memory would count.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megalodon_jax.checks import traced_checks
from megalodon_jax.config import MegalodonConfig
from megalodon_jax.convert import state_dict
from megalodon_jax.inference import decode_step, generate
from megalodon_jax.model import MegalodonForCausalLM
from megalodon_jax.weights import HEAD, Role, weight_table
from parity.device import device_kind
from parity.megalodon.reference import LiveReference
from parity.megalodon.reference.timed import peak_bytes
from reports.bench.jax_work import jax_work, program_bytes
from reports.bench.worker import Work, Worker, resident_peak, serve

CONFIG = MegalodonConfig(
    vocab_size=4096,
    model_dim=512,
    num_layers=6,
    num_heads=1,
    z_dim=256,
    value_dim=1024,
    ffn_hidden_dim=1280,
    cema_ndim=16,
    chunk_size=1024,
    norm_num_groups=32,
)
LENGTH = 2048
"""Tokens of the timed row."""
DECODE_STEPS = 16
"""Number of single tokens that one timed decoding adds."""
LONG = replace(
    CONFIG,
    model_dim=256,
    z_dim=128,
    value_dim=512,
    ffn_hidden_dim=640,
    num_layers=2,
    use_checkpoint=True,
    scan_layers=True,
)
"""Sizes for sequences of up to 131,072 tokens on two cores. Rematerialisation and the loop over
layers save memory; without the loop XLA recomputes nothing on a CPU, and nothing is saved."""
SIZES: dict[str, tuple[MegalodonConfig, dict[str, Any]]] = {
    "bench": (CONFIG, {}),
    # The loss computes the logits of one chunk at a time; `deterministic` would disable
    # rematerialisation.
    "long": (LONG, {"loss_chunk": LONG.chunk_size, "deterministic": False}),
}
"""Configurations that a worker can run, by name, each with further arguments of the loss."""


def jax_workloads(model: MegalodonForCausalLM, ids: np.ndarray, **loss: Any) -> dict[str, Work]:
    """Return the JAX side's work by name, the same work as in `reference_workloads`.

    Args:
        model: Model with parameters and configuration.
        ids: Token ids (B, L) int32.
        loss: Further arguments of `compute_loss`.
    """

    def greedy(model: MegalodonForCausalLM, tokens: jax.Array, count: int) -> jax.Array:
        return generate(model, tokens, count, temperature=0)[0]

    return jax_work(model, jnp.asarray(ids), decode_step, greedy, **loss)


def gemm_floor(config: MegalodonConfig, length: int, rows: int = 1) -> Work:
    """Return work that does only the matrix products of a forward pass on (rows, length) tokens.

    Operands and accumulation have the dtypes of `config`. Results are written into the buffers of
    the previous call: allocating memory for all of them, which no model needs, would add 10 to
    40 % to the products' time (docs/speed.md).
    """
    shapes = [row.shape for row in weight_table(config) if row.role is Role.LINEAR]
    shapes.append((config.vocab_size, config.model_dim))
    size = min(config.chunk_size, length)
    chunks, H = rows * (length // size), config.num_heads
    keys = map(jax.random.key, itertools.count())

    def random(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape, config.compute_dtype)

    dense = [(random(rows * length, shape[1]), random(*shape)) for shape in shapes]
    d, e = config.head_dim, config.value_head_dim
    scores = random(chunks * H, size, d), random(chunks * H, d, size)
    mixes = random(chunks * H, size, size), random(chunks * H, size, e)
    # All layers multiply, although they share the same two pairs of operands.
    batched = [scores] * config.num_layers + [mixes] * config.num_layers

    def products(dense, batched, held):
        del held
        wide: Any = {"preferred_element_type": config.accum_dtype}
        return (
            [jnp.matmul(x, w.T, **wide) for x, w in dense],
            [jnp.matmul(a, b, **wide) for a, b in batched],
        )

    again = jax.jit(products, donate_argnums=2, keep_unused=True)
    held = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(products, dense, batched, None)
    )

    def work(count: int) -> None:
        nonlocal held
        for _ in range(count):
            held = jax.block_until_ready(again(dense, batched, held))

    return work


def copy_floor(nbytes: int, rounds: int, megabytes: int = 256) -> tuple[float, ...]:
    """Return the seconds that copying `nbytes` bytes takes, one value per round.

    They are extrapolated from copies of `megabytes` MiB on JAX's device. A byte that is read and
    written counts once.
    """
    on_host = device_kind() == "cpu"
    # A GPU copies 256 MiB in less time than it takes to start a program and to wait for it, so many
    # copies are started before one waits.
    copy, count = (_host_copy, 1) if on_host else (_device_copy, 64)
    work, size = copy(megabytes << 20), megabytes << 20
    work(1)
    return tuple(seconds(work, count) / count * nbytes / size for _ in range(rounds))


def _host_copy(size: int) -> Work:
    source = np.ones(size, np.uint8)
    target = np.empty_like(source)

    def copy(count: int) -> None:
        for _ in range(count):
            np.copyto(target, source)

    return copy


def _device_copy(size: int) -> Work:
    source = jnp.ones(size, jnp.uint8)
    # Not an identity, which a compiler may eliminate.
    flip = jax.jit(jnp.bitwise_not)

    def copy(count: int) -> None:
        target = source
        for _ in range(count):
            target = flip(target)
        target.block_until_ready()

    return copy


def seconds(work: Work, count: int = 1) -> float:
    """Return the seconds that `count` repetitions of a piece of work take."""
    clock = time.perf_counter()
    work(count)
    return time.perf_counter() - clock


def in_turn(
    sides: Mapping[str, Work], count: int, repeats: int
) -> tuple[dict[str, float], dict[str, tuple[float, ...]]]:
    """Return two results by side: seconds of its first call, and seconds of its call in each round.

    Each call does the work `count` times, and its seconds are those of all `count` together. The
    first call may compile. Each of the `repeats` rounds calls every side once. The sides alternate,
    so that other load on the machine affects all of them.
    """
    first = {side: seconds(work, count) for side, work in sides.items()}
    rounds = [{side: seconds(work, count) for side, work in sides.items()} for _ in range(repeats)]
    return first, {side: tuple(r[side] for r in rounds) for side in sides}


def inputs(
    config: MegalodonConfig, length: int, rows: int = 1
) -> tuple[MegalodonForCausalLM, np.ndarray]:
    """Return a model and token ids (rows, length) int32, equal for equal arguments."""
    ids = np.random.default_rng(0).integers(3, config.vocab_size, (rows, length)).astype(np.int32)
    return MegalodonForCausalLM(config, key=jax.random.key(0)), ids


def reference_workloads(
    model: MegalodonForCausalLM, ids: np.ndarray, autocast: bool = False
) -> dict[str, Work]:
    """Return megalodon-hf's work by name, with the weights of `model`.

    With `autocast` it runs under torch's autocast to bfloat16.

    Raises:
        ReferenceUnavailableError: megalodon-hf cannot run here.
    """
    tied = model.config.tied
    weights = {name: w for name, w in state_dict(model).items() if name != HEAD or not tied}
    return LiveReference(device_kind()).workloads(model.config, weights, ids, autocast)


def peak_memory(side: str) -> float:
    """Return the peak memory in bytes of a process that does three training steps on one side.

    On a CPU that is resident memory, otherwise memory allocated on the device.

    Args:
        side: "jax" or "reference".

    Raises:
        WorkerError: the process ended early; the message ends with the last line of its stderr.
    """
    with Worker(arguments(side, LENGTH, "bench")) as worker:
        worker.work("train_step")(3)
        return worker.number("peak_bytes")


def arguments(side: str, length: int, sizes: str) -> tuple[str, ...]:
    """Return the arguments for Python to start a worker process (`Worker`) of one side.

    Args:
        side: "jax" or "reference".
        length: Tokens of the single row.
        sizes: A key of `SIZES`.
    """
    return ("-P", "-m", "reports.bench.workloads", side, str(length), sizes)


def _serve(side: str, length: str, sizes: str) -> None:
    config, loss = SIZES[sizes]
    model, ids = inputs(config, int(length))
    with jax.default_matmul_precision("highest"), traced_checks(False):
        # The reference has neither a chunked loss nor rematerialisation.
        works = reference_workloads(model, ids) if side == "reference" else None
        numbers = {"peak_bytes": lambda: _peak_bytes(side)}
        for name in ("forward", "train_step"):
            numbers[name] = partial(program_bytes, name, model, jnp.asarray(ids), **loss)
        serve({}, works or jax_workloads(model, ids, **loss), numbers)


def _peak_bytes(side: str) -> int:
    if device_kind() == "cpu":
        return resident_peak()
    if side == "reference":
        return peak_bytes()
    return jax.devices()[0].memory_stats()["peak_bytes_in_use"]


if __name__ == "__main__":
    _serve(*sys.argv[1:])
