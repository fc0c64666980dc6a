"""The work a bench times: the same on both sides, and the floors beneath it.

Run as `python -m reports.bench.workloads jax|reference`, it prints the peak memory of a training
step. It imports neither store nor page, whose memory would count.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from megalodon_jax.checks import traced_checks
from megalodon_jax.config import MegalodonConfig
from megalodon_jax.convert import state_dict
from megalodon_jax.inference import decode_step
from megalodon_jax.model import MegalodonForCausalLM
from megalodon_jax.weights import HEAD, Role, weight_table
from parity.megalodon.reference import LiveReference
from parity.megalodon.reference.timed import peak_bytes
from reports.provenance.device import device_kind

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
DECODE_STEPS = 16
Work = Callable[[int], None]


def jax_workloads(model: MegalodonForCausalLM, ids: np.ndarray) -> dict[str, Work]:
    """Return the JAX side of `parity.megalodon.reference.LiveReference.workloads`."""
    tokens = jnp.asarray(ids)
    token = tokens[:, 0]
    forward = eqx.filter_jit(lambda model, tokens: model(tokens)[0])
    prefill = eqx.filter_jit(lambda model, tokens: model(tokens, return_cache=True))
    transform = optax.adamw(1e-4)

    @eqx.filter_jit(donate="all-except-first")
    def step(tokens, model, state):
        grads = eqx.filter_grad(lambda m: m.compute_loss(tokens, tokens))(model)
        updates, state = transform.update(grads, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state

    def run(function: Callable[..., Any], count: int) -> None:
        for _ in range(count):
            jax.block_until_ready(eqx.filter(function(model, tokens), eqx.is_array))

    trained: list[Any] = []

    def train_step(count: int) -> None:
        if not trained:
            copy = jax.tree.map(lambda x: jnp.array(x) if eqx.is_array(x) else x, model)
            trained.extend((copy, transform.init(eqx.filter(copy, eqx.is_array))))
        for _ in range(count):
            trained[:] = step(tokens, *trained)
        jax.block_until_ready(eqx.filter(trained, eqx.is_array))

    stream: list[Any] = []

    def decode(count: int) -> None:
        if not stream:
            stream.append(prefill(model, tokens)[1])
        for _ in range(count):
            logits, stream[0] = decode_step(model, stream[0], token)
            jax.block_until_ready(logits)

    return {
        "forward": lambda count: run(forward, count),
        "train_step": train_step,
        "prefill": lambda count: run(prefill, count),
        "decode": decode,
    }


def gemm_floor(config: MegalodonConfig, length: int) -> Work:
    """Return the products of one forward pass and nothing else, at batch size 1."""
    shapes = [row.shape for row in weight_table(config) if row.role is Role.LINEAR]
    shapes.append((config.vocab_size, config.model_dim))
    size = min(config.chunk_size, length)
    chunks, H = length // size, config.num_heads
    rng = np.random.default_rng(0)

    def random(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape).astype(np.float32))

    dense = [(random(length, shape[1]), random(*shape)) for shape in shapes]
    d, e = config.head_dim, config.value_head_dim
    scores = random(chunks * H, size, d), random(chunks * H, d, size)
    mixes = random(chunks * H, size, size), random(chunks * H, size, e)
    # Every layer of the list multiplies, although all hold the same two pairs.
    batched = [scores] * config.num_layers + [mixes] * config.num_layers

    @jax.jit
    def products(dense, batched):
        return [x @ w.T for x, w in dense], [a @ b for a, b in batched]

    def work(count: int) -> None:
        for _ in range(count):
            jax.block_until_ready(products(dense, batched))

    return work


def copy_floor(nbytes: int, rounds: int, megabytes: int = 256) -> tuple[float, ...]:
    """Return what copying `nbytes` bytes takes, in seconds per round, from copies of `megabytes`.

    Read and write are counted once. The copies are made where JAX computes.
    """
    copy = _host_copy if device_kind() == "cpu" else _device_copy
    work, size = copy(megabytes << 20), megabytes << 20
    work(1)
    return tuple(seconds(work) * nbytes / size for _ in range(rounds))


def _host_copy(size: int) -> Work:
    source = np.ones(size, np.uint8)
    target = np.empty_like(source)

    def copy(count: int) -> None:
        for _ in range(count):
            np.copyto(target, source)

    return copy


def _device_copy(size: int) -> Work:
    source = jnp.ones(size, jnp.uint8)
    # Not an identity, which a compiler may leave out.
    flip = jax.jit(jnp.bitwise_not)

    def copy(count: int) -> None:
        for _ in range(count):
            flip(source).block_until_ready()

    return copy


def seconds(work: Work, count: int = 1) -> float:
    """Return the seconds that `count` repetitions of a piece of work take."""
    clock = time.perf_counter()
    work(count)
    return time.perf_counter() - clock


def inputs(config: MegalodonConfig, length: int) -> tuple[MegalodonForCausalLM, np.ndarray]:
    """Return a model and token ids of shape (1, length), int32; equal arguments give equal ones."""
    ids = np.random.default_rng(0).integers(3, config.vocab_size, (1, length)).astype(np.int32)
    return MegalodonForCausalLM(config, key=jax.random.key(0)), ids


def reference_workloads(model: MegalodonForCausalLM, ids: np.ndarray) -> dict[str, Work]:
    """Return the reference's side, with the weights of `model`.

    Raises:
        ReferenceUnavailableError: megalodon-hf cannot run here.
    """
    tied = model.config.tied
    weights = {name: w for name, w in state_dict(model).items() if name != HEAD or not tied}
    return LiveReference(device_kind()).workloads(model.config, weights, ids)


def peak_memory(side: str) -> float:
    """Return the peak bytes of a process that takes three training steps on one side.

    Resident ones on the CPU, those allocated on the device otherwise.

    Args:
        side: "jax" or "reference".

    Raises:
        RuntimeError: the process did not finish; the message ends with its last words.
    """
    command = [sys.executable, "-m", "reports.bench.workloads", side]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise RuntimeError(f"the process ended with {done.returncode}: {last}")
    return float(json.loads(done.stdout)["peak_bytes"])


def _worker(side: str) -> None:
    model, ids = inputs(CONFIG, LENGTH)
    sides = {"jax": jax_workloads, "reference": reference_workloads}
    with jax.default_matmul_precision("highest"), traced_checks(False):
        sides[side](model, ids)["train_step"](3)
    print(json.dumps({"peak_bytes": _peak_bytes(side)}))


def _peak_bytes(side: str) -> int:
    if device_kind() != "cpu":
        if side == "reference":
            return peak_bytes()
        return jax.devices()[0].memory_stats()["peak_bytes_in_use"]
    # Not getrusage: its maximum starts at that of the process that started this one.
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(peak.split()[1]) * 1024


if __name__ == "__main__":
    _worker(sys.argv[1])
