"""Options of a training run of MLA + MoE: optimiser, rates, accumulation, dropout, storage.

Options and text determine a run. Options are stored in the run's folder as `options.json`.
Optimisers and schedules are those of optax. Source: docs/mla-moe.md "Training" and "The stability
guide".
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import optax

from megalodon_jax.files import read_json_object, written_aside
from parity.deepseek_v3.config import MLAMoEConfig, by_size
from stability.core.dtype_rules import Policy
from stability.moe import policy

OPTIONS = "options.json"
OPTIMISERS = ("adam", "lion")
SCHEDULES = ("cosine", "cyclic")
STORAGE: dict[str, Policy | None] = {
    "float32": None,
    "bfloat16": policy.BFLOAT16,
    "float8": policy.FP8,
}
TINY_LM = MLAMoEConfig(
    hidden_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=12,
    intermediate_size=96,
    moe_intermediate_size=32,
    n_routed_experts=8,
    n_group=1,
    topk_group=1,
    num_experts_per_tok=2,
    min_moe_layer=1,
)
TINY = "tiny"
"""Name of the size that a CPU trains in a minute; other sizes are those of `by_size`."""
SLOWER, LONGER = 3, 3
"""Divisor of the learning rate and multiplier of the warmup in `Options.emergency` (docs/mla-moe.md
"Training")."""


@dataclass(frozen=True)
class Options:
    """Options of a training run; defaults are those of the stability guide.

    Attributes:
        size: "tiny", "small", "medium", "large" or "xl".
        steps: number of parameter updates.
        batch_size: rows per micro-batch.
        block_size: tokens per row.
        accumulation: micro-batches per update; their gradients are averaged.
        optimizer_type: "adam" or "lion".
        learning_rate: the largest learning rate.
        min_lr: learning rate at the end of every cycle.
        warmup_iters: number of warmup updates in each cycle.
        schedule: "cosine", one decay to `min_lr`, or "cyclic", `cycles` decays.
        cycles: number of cycles of the cyclic schedule.
        grad_clip: largest global norm of the mean gradient of one update.
        router_z_loss_coef: weight of the router's z-loss in the objective.
        dropout: dropout rate in training; evaluation has none.
        storage: "float32", "bfloat16" or "float8", to which the forward pass rounds parameters. It
            is emulated: the optimiser keeps float32 parameters, and products are float32.
        fp8_mla_params: whether storage "float8" includes MLA's parameters, which is risky.
        activation_limit: magnitude to which elements of hidden states are clipped after each block;
            None: no clipping.
        guarded: whether to skip spikes, roll back and cut the rate, as in `stability.recovery`.
        save_every: updates between checkpoints.
        keep: number of latest checkpoints to keep; an emergency run can resume from any of them.
        seed: seed of weights, batches and dropout.
        first_batch: number of the first micro-batch, so that an emergency run repeats none.

    Raises:
        ValueError: a field is out of range, or two contradict each other.
    """

    size: str = TINY
    steps: int = 2000
    batch_size: int = 8
    block_size: int = 64
    accumulation: int = 1
    optimizer_type: str = "adam"
    learning_rate: float = 3e-4
    min_lr: float = 3e-5
    warmup_iters: int = 1000
    schedule: str = "cosine"
    cycles: int = 1
    grad_clip: float = 1.0
    router_z_loss_coef: float = 1e-3
    dropout: float = 0.0
    storage: str = "float32"
    fp8_mla_params: bool = False
    activation_limit: float | None = None
    guarded: bool = True
    save_every: int = 100
    keep: int = 10
    seed: int = 0
    first_batch: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "accumulation", "cycles", "save_every", "keep"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        self._require("block_size", self.block_size >= 2, "at least 2: one token predicts none")
        self._require("optimizer_type", self.optimizer_type in OPTIMISERS, f"one of {OPTIMISERS}")
        self._require("schedule", self.schedule in SCHEDULES, f"one of {SCHEDULES}")
        self._require("storage", self.storage in STORAGE, f"one of {tuple(STORAGE)}")
        self._require("learning_rate", self.learning_rate > 0, "positive")
        bound = f"between 0 and learning_rate={self.learning_rate}"
        self._require("min_lr", 0 <= self.min_lr <= self.learning_rate, bound)
        self._require("grad_clip", self.grad_clip > 0, "positive")
        self._require("router_z_loss_coef", self.router_z_loss_coef >= 0, "at least 0")
        self._require("first_batch", self.first_batch >= 0, "at least 0")
        one = "1 where the schedule is not cyclic"
        self._require("cycles", self.schedule == "cyclic" or self.cycles == 1, one)
        cycle = f"from 0 to below the {self.cycle} updates of a cycle"
        self._require("warmup_iters", 0 <= self.warmup_iters < self.cycle, cycle)
        wide = "False where storage is not float8"
        self._require("fp8_mla_params", self.storage == "float8" or not self.fp8_mla_params, wide)
        self.config()

    def _require(self, name: str, holds: bool, rule: str) -> None:
        if not holds:
            raise ValueError(f"Options: {name}={getattr(self, name)!r} must be {rule}.")

    @property
    def cycle(self) -> int:
        """Number of updates per cycle of the schedule."""
        return self.steps // self.cycles

    @property
    def policy(self) -> Policy | None:
        """Storage policy that the forward pass emulates; None if all parameters are float32."""
        return policy.FP8_MLA if self.fp8_mla_params else STORAGE[self.storage]

    def config(self) -> MLAMoEConfig:
        """Return the configuration of the model."""
        base = TINY_LM if self.size == TINY else by_size(self.size)
        return replace(base, dropout=self.dropout, activation_limit=self.activation_limit)

    def emergency(self, steps: int, first_batch: int) -> Options:
        """Return the stability guide's emergency version of these options, for an unstable run.

        The new options have a third of the learning rate, gradients clipped to a norm of at most
        0.5, a z-loss coefficient of at most 0.0001, a warmup three times as long but at most half
        of the steps, a single cycle, activations clipped to at most 100, no float8 for MLA, and the
        guard.

        Args:
            steps: number of remaining updates.
            first_batch: number of the first unused micro-batch.
        """
        limit = 100.0 if self.activation_limit is None else min(100.0, self.activation_limit)
        return replace(
            self,
            steps=steps,
            first_batch=first_batch,
            schedule="cosine",
            cycles=1,
            learning_rate=self.learning_rate / SLOWER,
            min_lr=self.min_lr / SLOWER,
            warmup_iters=min(LONGER * max(self.warmup_iters, 1), steps // 2),
            grad_clip=min(self.grad_clip, 0.5),
            router_z_loss_coef=min(self.router_z_loss_coef, 1e-4),
            activation_limit=limit,
            fp8_mla_params=False,
            guarded=True,
        )


def schedule(options: Options) -> Callable[[Any], Any]:
    """Return the optax schedule, a function from the number of updates to the learning rate."""
    o = options
    first, later = (
        {
            "init_value": start,
            "peak_value": o.learning_rate,
            "warmup_steps": o.warmup_iters,
            "decay_steps": o.cycle,
            "end_value": o.min_lr,
        }
        for start in (0.0, o.min_lr)
    )
    if o.schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(**first)
    return optax.sgdr_schedule([first, *[later] * (o.cycles - 1)])


def optimiser(options: Options) -> optax.GradientTransformationExtraArgs:
    """Return the optimiser for micro-batches: accumulate, clip, then update by Adam or Lion.

    The optimiser clips the mean gradient of an update. A guard around it would clip the gradient of
    each micro-batch, so wrap it with `GuardConfig(max_norm=None)`.
    """
    kind = {"adam": optax.adam, "lion": optax.lion}[options.optimizer_type]
    # The guide has no weight decay; optax's default for Lion is not 0.
    decay = {"weight_decay": 0.0} if options.optimizer_type == "lion" else {}
    moves = kind(schedule(options), **decay)
    clipped = optax.chain(optax.clip_by_global_norm(options.grad_clip), moves)
    steps = optax.MultiSteps(clipped, options.accumulation)
    return optax.with_extra_args_support(steps.gradient_transformation())


def write_options(folder: Path, options: Options) -> None:
    """Write the options of a run to `options.json` in its folder, which is created if missing."""
    folder.mkdir(parents=True, exist_ok=True)
    with written_aside(folder / OPTIONS) as aside:
        aside.write_text(json.dumps(asdict(options), indent=1) + "\n", encoding="utf-8")


def read_options(folder: Path) -> Options:
    """Read the options of a run from its folder.

    Raises:
        ValueError: the folder has no `options.json`, or the file has unknown or invalid options.
    """
    file = folder / OPTIONS
    if not file.is_file():
        raise ValueError(f"{file} not found: expected the folder that `subject fit` wrote.")
    held, known = read_json_object(file), {f.name for f in fields(Options)}
    if unknown := sorted(set(held) - known):
        raise ValueError(f"{file}: unknown options {', '.join(unknown)}: remove them.")
    try:
        return Options(**held)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from error
