"""Speed, side by side: the same weights and work in JAX and in megalodon-hf, in one run.

Absolute times of a shared machine drift, so the two sides alternate and medians are compared as
ratios. Two floors are measured in the same run: the products alone (GEMM), and for decoding the
bytes of the parameters over the measured copy bandwidth.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from megalodon_jax.config import MegalodonConfig
from megalodon_jax.convert import state_dict
from megalodon_jax.inference import decode_step
from megalodon_jax.model import MegalodonForCausalLM
from megalodon_jax.weights import HEAD, Role, weight_table
from parity.reference import LiveReference

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


@dataclass(frozen=True)
class Row:
    """One piece of work: seconds on both sides, what compiling cost, and the floor."""

    work: str
    jax: float
    reference: float | None
    compile: float
    floor: float | None

    @property
    def ratio(self) -> float | None:
        """Reference time over JAX time: above 1 JAX is faster."""
        return None if self.reference is None else self.reference / self.jax


def jax_workloads(model: MegalodonForCausalLM, ids: np.ndarray) -> dict[str, Work]:
    """Return the JAX side of `parity.reference.LiveReference.workloads`."""
    tokens = jnp.asarray(ids)
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
            logits, stream[0] = decode_step(model, stream[0], tokens[:, 0])
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
    widths = (config.head_dim, config.value_head_dim)
    rng = np.random.default_rng(0)

    def random(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape).astype(np.float32))

    dense = [(random(length, shape[1]), random(*shape)) for shape in shapes]
    scores = [
        (random(chunks * H, size, d), random(chunks * H, d, size)) for d in (widths[0],)
    ] * config.num_layers
    mixes = [
        (random(chunks * H, size, size), random(chunks * H, size, e)) for e in (widths[1],)
    ] * config.num_layers

    @jax.jit
    def products(dense, batched):
        return [x @ w.T for x, w in dense], [a @ b for a, b in batched]

    def work(count: int) -> None:
        for _ in range(count):
            jax.block_until_ready(products(dense, scores + mixes))

    return work


def copy_bandwidth(megabytes: int = 256) -> float:
    """Measure bytes per second of a large copy, read and write counted once."""
    source = np.ones(megabytes << 20, np.uint8)
    target = np.empty_like(source)
    times = []
    for _ in range(5):
        clock = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - clock)
    return source.nbytes / statistics.median(times)


def measure(
    config: MegalodonConfig, length: int, repeats: int, report: Callable[[str], None]
) -> list[Row]:
    """Time every piece of work, the two sides in turn; without a live reference, JAX alone."""
    model = MegalodonForCausalLM(config, key=jax.random.key(0))
    ids = np.random.default_rng(0).integers(3, config.vocab_size, (1, length)).astype(np.int32)
    ours = jax_workloads(model, ids)
    theirs: Mapping[str, Work] = {}
    try:
        weights = {n: w for n, w in state_dict(model).items() if n != HEAD or not config.tied}
        theirs = LiveReference().workloads(config, weights, ids)
    except RuntimeError as error:
        report(f"JAX alone: {error}")
    floors = _floors(config, model, length, repeats)
    rows = []
    for name, work in ours.items():
        count = DECODE_STEPS if name == "decode" else 1
        first = _seconds(work, count)
        if name in theirs:
            _seconds(theirs[name], count)
        pairs = [
            (_seconds(work, count), _seconds(theirs[name], count) if name in theirs else None)
            for _ in range(repeats)
        ]
        mine = statistics.median(pair[0] for pair in pairs)
        other = [pair[1] for pair in pairs if pair[1] is not None]
        row = Row(
            name, mine, statistics.median(other) if other else None, first - mine, floors.get(name)
        )
        rows.append(row)
        ratio = "" if row.ratio is None else f", {row.ratio:.1f} x the reference's speed"
        report(f"  {name}: {row.jax:.3f} s{ratio}")
    return rows


def peak_memory(side: str) -> float:
    """Peak resident bytes of a process that takes three training steps on one side."""
    command = [sys.executable, "-m", "reports.bench", side]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(result.stdout)["peak_bytes"])


def table(rows: list[Row], memory: Mapping[str, float]) -> str:
    """Return the rows as a Markdown table; seconds, and ratios to the reference and the floor."""
    lines = [
        "| work | JAX, s | megalodon-hf, s | ratio | JAX over floor | compile, s |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        other = "not run" if row.reference is None else f"{row.reference:.3f}"
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        floor = "" if row.floor is None else f"{row.jax / row.floor:.2f}"
        lines.append(
            f"| {row.work} | {row.jax:.3f} | {other} | {ratio} | {floor} | {row.compile:.1f} |"
        )
    peaks = ", ".join(f"{side} {peak / 2**30:.2f} GiB" for side, peak in memory.items())
    return "\n".join([*lines, f"\nPeak memory of the training step: {peaks}" if peaks else ""])


def save(rows: list[Row], memory: Mapping[str, float], folder: Path, stamp: str) -> Path:
    """Write the table as JSON for the page, aside first and then renamed; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path, aside = folder / f"bench-{stamp}.json", folder / f".bench-{stamp}.partial"
    document = {"created": stamp, "rows": [asdict(r) for r in rows], "peak_bytes": dict(memory)}
    aside.write_text(json.dumps(document, indent=1) + "\n")
    aside.replace(path)
    return path


def latest(folder: Path) -> dict[str, Any] | None:
    """Return the newest table in a folder, or None."""
    files = sorted(folder.glob("bench-*.json")) if folder.is_dir() else []
    return json.loads(files[-1].read_text()) if files else None


def _floors(config, model, length: int, repeats: int) -> dict[str, float]:
    gemm = gemm_floor(config, length)
    gemm(1)
    parameters = sum(leaf.nbytes for leaf in jax.tree.leaves(eqx.filter(model, eqx.is_array)))
    return {
        "forward": statistics.median(_seconds(gemm, 1) for _ in range(repeats)),
        "decode": DECODE_STEPS * parameters / copy_bandwidth(),
    }


def _seconds(work: Work, count: int) -> float:
    clock = time.perf_counter()
    work(count)
    return time.perf_counter() - clock


def _worker(side: str) -> None:
    model = MegalodonForCausalLM(CONFIG, key=jax.random.key(0))
    ids = np.random.default_rng(0).integers(3, CONFIG.vocab_size, (1, LENGTH)).astype(np.int32)
    if side == "jax":
        work = jax_workloads(model, ids)["train_step"]
    else:
        weights = {n: w for n, w in state_dict(model).items() if n != HEAD}
        work = LiveReference().workloads(CONFIG, weights, ids)["train_step"]
    work(3)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"peak_bytes": peak}))


if __name__ == "__main__":
    _worker(sys.argv[1])
