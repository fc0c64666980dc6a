"""Parity with Transformers' DeepSeek-V3, by the engine for any port: five configurations.

The truth is our model in float64; the reference in float64, its casts to float32 lifted, agrees
with it. Where Transformers is not installed, committed recordings of it answer. Source:
docs/mla-moe.md "Parity"; `parity.port`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from megalodon_jax.weights import named_leaves
from parity import recordings
from parity.deepseek_v3 import reference
from parity.deepseek_v3.checkpoint import abstract, build, stacked, unstacked
from parity.deepseek_v3.config import MLAMoEConfig, Yarn
from parity.deepseek_v3.model import MLAMoEForCausalLM
from parity.deepseek_v3.router import choose, scores_of
from parity.engine.bounds import NoiseFloors
from parity.engine.compare import Comparison, Work
from parity.engine.measurement import Measurement
from parity.engine.quantity import LOSS, Quantity, Role
from parity.pooling import DRAWS, Draw, Pool, pool
from parity.port import OUTPUT, Arrays, Report, check
from parity.port_tolerances import PORTS, PortEdge

FOLDER = Path(__file__).parents[1] / "data" / "deepseek_v3" / "recordings"
SUBJECT = "mla-moe"
"""The port by the name that measurements and stored runs know it by."""
RENEW = "megalodon-numerics parity record --subject mla-moe"
BUFFER = "e_score_correction_bias"
"""What no gradient reaches; the reference keeps it as a buffer."""
RECORDED64 = ("logits", OUTPUT)
"""What recordings hold in float64 as well; everything would be twice the size."""
TINY = MLAMoEConfig(
    vocab_size=24,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    q_lora_rank=12,
    kv_lora_rank=8,
    qk_nope_head_dim=4,
    qk_rope_head_dim=4,
    v_head_dim=4,
    intermediate_size=24,
    moe_intermediate_size=8,
    n_routed_experts=8,
    n_group=1,
    topk_group=1,
    num_experts_per_tok=2,
    min_moe_layer=1,
)


@dataclass(frozen=True)
class Case:
    """One configuration, its weights and its text, all of them following from the fields."""

    name: str
    why: str
    config: MLAMoEConfig
    length: int = 14
    batch: int = 1
    bias: float = 0.0
    """Standard deviation of the selection bias."""
    draw: int = 0
    """Which draw of weights and text; levels are pooled over several (`pooled`)."""

    @cached_property
    def weights(self) -> dict[str, np.ndarray]:
        """Weights by DeepSeek-V3's names, float32, none at its initial value."""
        rng = np.random.default_rng([0, self.draw] if self.draw else 0)
        drawn = {}
        for name, leaf in named_leaves(abstract(self.config)).items():
            std = self.bias if name.endswith(BUFFER) else leaf.shape[-1] ** -0.5
            centre = 1.0 if name.endswith("norm.weight") else 0.0
            drawn[name] = (centre + std * rng.normal(size=leaf.shape)).astype(np.float32)
        return unstacked(drawn)

    @cached_property
    def ids(self) -> np.ndarray:
        """Token ids (B, L) int32."""
        rng = np.random.default_rng([1, self.draw] if self.draw else 1)
        return rng.integers(0, self.config.vocab_size, (self.batch, self.length)).astype(np.int32)

    @property
    def title(self) -> str:
        """What measurements call it, beside cases of other architectures."""
        return f"{SUBJECT} {self.name}"

    @property
    def hash(self) -> str:
        """Equal hashes mean equal work."""
        digest = hashlib.sha256(json.dumps(self.config.to_hf(), sort_keys=True).encode())
        for name in sorted(self.weights):
            digest.update(name.encode() + self.weights[name].tobytes())
        digest.update(self.ids.tobytes())
        return digest.hexdigest()[:16]

    def model(self) -> MLAMoEForCausalLM:
        """Return our model with the weights."""
        return build(self.config, self.weights, self.name)


CASES = (
    Case("dense", "dense layers only", replace(TINY, min_moe_layer=2)),
    Case("moe", "a dense and a sparse layer", TINY),
    Case(
        "grouped",
        "experts in groups, a selection bias, two shared experts, scaled weights",
        replace(
            TINY,
            n_group=4,
            topk_group=2,
            num_experts_per_tok=3,
            n_shared_experts=2,
            routed_scaling_factor=2.5,
        ),
        batch=2,
        length=8,
        bias=0.1,
    ),
    Case(
        "tied",
        "a tied head, queries not compressed, halves rotated, weights not normalised",
        replace(
            TINY,
            tie_word_embeddings=True,
            q_lora_rank=None,
            rope_interleave=False,
            norm_topk_prob=False,
        ),
    ),
    Case(
        "long",
        "beyond the length it was trained at, by YaRN",
        replace(TINY, rope_scaling=Yarn(4.0, 32, mscale=1.0, mscale_all_dim=0.8)),
        length=96,
    ),
)


def by_name(name: str) -> Case:
    """Return a case.

    Raises:
        ValueError: there is none of that name.
    """
    for case in CASES:
        if case.name == name:
            return case
    raise ValueError(f"unknown case {name!r}: expected one of {', '.join(c.name for c in CASES)}.")


@dataclass(frozen=True)
class Answer:
    """What the reference said of a case: float32 arrays, what it gave in float64, who it was."""

    float32: Arrays
    float64: Arrays
    chosen: dict[str, np.ndarray]
    """Experts of each token by `layers.{i}`, (T, k)."""
    kind: str
    """"live" or "recorded"."""
    versions: dict[str, str]
    refusal: str
    """What it says when it is cast to float64 as it is; empty where it runs."""


@dataclass(frozen=True)
class Found:
    """A compared case."""

    case: Case
    report: Report
    measurements: tuple[Measurement, ...]
    """The engine's, and the gates on chosen experts."""
    answer: Answer

    @property
    def gates(self) -> tuple[Measurement, ...]:
        """Measurements that a tolerance applies to."""
        return tuple(m for m in self.measurements if m.verdict != "info")

    @property
    def broken(self) -> tuple[Measurement, ...]:
        """Gates that do not hold."""
        return tuple(m for m in self.gates if m.verdict != "pass")

    @property
    def held(self) -> int:
        """How many gates hold."""
        return len(self.gates) - len(self.broken)

    def worst(self, edge: str, quantity: str) -> float:
        """Return the relative L2 of a quantity on an edge."""
        return next(
            m.value
            for m in self.measurements
            if (m.edge, m.quantity, m.metric) == (edge, quantity, "rel_l2")
        )


def forward(model: MLAMoEForCausalLM, ids: Any, positions: Any) -> jax.Array:
    """Return the loss; logits and intermediates are marked. Positions as in `traced`."""
    return model.losses(ids, positions)[0]


def traced(model: MLAMoEForCausalLM, ids: Any, positions: Any) -> jax.Array:
    """Return the loss; logits, intermediates and gradients are marked.

    Positions are an input so that what float32 rounds in a rotation's angle is in the noise floor.
    """

    value, gradients = eqx.filter_value_and_grad(forward)(model, ids, positions)
    for name, gradient in named_leaves(gradients).items():
        if not name.endswith(BUFFER):
            checkpoint_name(gradient, Quantity.gradient(name))
    return value


def compare(
    case: Case,
    answer: Answer,
    model: MLAMoEForCausalLM | None = None,
    *,
    gradients: bool = True,
    device: str = "cpu",
) -> Found:
    """Compare our model with what the reference said of a case.

    Args:
        case: the work.
        answer: of the reference.
        model: another model in the place of ours, such as one with a defect.
        gradients: whether they are compared too; they take most of the time.
        device: what measurements call the default device.
    """
    if not gradients:
        narrow, wide = (_without_gradients(side) for side in (answer.float32, answer.float64))
        answer = replace(answer, float32=narrow, float64=wide)
    report = check(
        traced if gradients else forward,
        case.model() if model is None else model,
        (jnp.asarray(case.ids), jnp.asarray(_positions(case))),
        answer.float32,
        answer.float64,
        name=case.title,
        suite=SUBJECT,
        device=device,
        forced=False,
    )
    return Found(
        case, report, (*report.measurements, *_flips(case, report, answer, device)), answer
    )


def pooled(case: Case, live: bool, device: str = "cpu") -> Pool:
    """Measure a case over `parity.pooling.DRAWS` draws of weights and text; the first is its own.

    Args:
        case: the work.
        live: whether the reference runs on every draw; recordings hold the first only, and without
            it our own error alone is pooled.
        device: what measurements call the default device.

    Raises:
        ReferenceUnavailableError: the reference cannot run here.
    """
    draws = []
    for number in range(DRAWS):
        one = replace(case, draw=number)
        original = None
        if live:
            original = _named(reference.run(case.config.to_hf(), one.weights, one.ids))
        draws.append(
            Draw(one.model(), (jnp.asarray(one.ids), jnp.asarray(_positions(one))), original)
        )
    return pool(traced, draws, name=case.title, suite=SUBJECT, device=device)


def _positions(case: Case) -> np.ndarray:
    return np.broadcast_to(np.arange(case.length, dtype=np.float32), case.ids.shape)


def _flips(case: Case, report: Report, answer: Answer, device: str) -> list[Measurement]:
    """Count tokens that go to other experts although the choice was clear, for each layer."""
    work = Work(case.title, case.hash, (), suite=SUBJECT)
    edge = Comparison(work, PortEdge.PORT32_ORIGINAL32, NoiseFloors({}, PORTS), "int32", device)
    bounds = {
        m.quantity: m.tolerance
        for m in report.measurements
        if m.edge == PortEdge.PORT32_ORIGINAL32 and m.metric == "rel_l2"
    }
    rows = []
    for layer, theirs in answer.chosen.items():
        name = f"{layer}.router_logits"
        bias = case.weights[f"model.{layer}.mlp.gate.{BUFFER}"]
        ours, _ = chosen(report.values[name], bias, case.config)
        _, margin = chosen(answer.float32[name], bias, case.config)
        flips = expert_flips(ours, theirs, margin, answer.float32[name], bounds[name])
        rows.append(edge.judged(f"{layer}.chosen", "expert_flips", flips))
        rows.append(edge.fact(f"{layer}.chosen", "smallest_margin", float(margin.min())))
    return rows


def chosen(
    logits: np.ndarray, bias: np.ndarray, config: MLAMoEConfig
) -> tuple[np.ndarray, np.ndarray]:
    """Return experts (T, k) and margins (T,) of router logits (T, E), as the router takes them."""
    scores = scores_of(jnp.asarray(logits), config)
    experts, margin = choose(scores + jnp.asarray(bias, scores.dtype), config)
    return np.asarray(experts), np.asarray(margin)


def expert_flips(
    ours: np.ndarray, theirs: np.ndarray, margin: np.ndarray, logits: np.ndarray, bound: float
) -> float:
    """Count tokens whose set of experts differs although its margin is clear of the bound.

    A score moves by at most half of what its logit does, so logits within the relative L2 `bound`
    change no choice whose margin is above `bound |logits|`.

    Args:
        ours, theirs: experts (T, k), in any order.
        margin: (T,), of `router.choose`.
        logits: of the reference (T, E).
        bound: relative L2 that passes.
    """
    differs = (np.sort(ours, -1) != np.sort(theirs, -1)).any(-1)
    clear = margin > bound * np.linalg.norm(logits)
    return float(np.sum(differs & clear))


def live(case: Case) -> Answer:
    """Run the reference on a case.

    Raises:
        ReferenceUnavailableError: it cannot run here.
    """
    fields = case.config.to_hf()
    narrow = reference.run(fields, case.weights, case.ids)
    wide = reference.run(fields, case.weights, case.ids, "float64", wide=True)
    return Answer(
        _named(narrow),
        _named(wide),
        {n.removesuffix(".chosen"): a for n, a in narrow.items() if n.endswith(".chosen")},
        kind="live",
        versions=reference.provenance()["versions"],
        refusal=reference.float64_refusal(fields, case.weights, case.ids),
    )


def recorded(case: Case, folder: Path = FOLDER) -> Answer:
    """Return what the reference said when it was recorded.

    Raises:
        RecordingError: there is no recording of exactly this work by a version known here.
    """
    path = folder / f"{case.name}.safetensors"
    made = recordings.read_provenance(path, RENEW)
    version = str(made.get("versions", {}).get("transformers", "unknown"))
    if tuple(version.split(".")[:2]) != tuple(map(str, reference.LEAST)):
        raise recordings.RecordingError(
            f"{path.name} was recorded from transformers {version}, expected "
            f"{'.'.join(map(str, reference.LEAST))}: not comparable. Run `{RENEW}`."
        )
    parts: dict[str, Arrays] = {"float32": {}, "float64": {}, "chosen": {}}
    for name, array in recordings.read(path, case.hash, RENEW).items():
        part, _, rest = name.partition("/")
        parts[part][rest] = array
    return Answer(**parts, kind="recorded", versions=made["versions"], refusal=made["refusal"])


def answer(case: Case, which: str = "auto") -> Answer:
    """Return the reference's answer: "live", "recorded", or live where it can run ("auto").

    Raises:
        ReferenceUnavailableError, RecordingError: as `live` and `recorded`.
    """
    if which == "live" or (which == "auto" and reference.why_unavailable() is None):
        return live(case)
    return recorded(case)


def record(case: Case, folder: Path = FOLDER) -> Path:
    """Run the reference on a case and write what it says; errors as `live`."""
    said = live(case)
    arrays = {f"float32/{n}": a for n, a in said.float32.items()}
    arrays |= {f"float64/{n}": a for n, a in said.float64.items() if n in RECORDED64}
    arrays |= {f"chosen/{n}": a for n, a in said.chosen.items()}
    made = reference.provenance() | {"case": case.why, "refusal": said.refusal}
    return recordings.write(case.name, case.hash, arrays, made, folder)


def record_all(names: Collection[str] = ()) -> Iterator[Path]:
    """Run the reference on the cases, or those named, and yield what was written; errors as
    `record`.
    """
    yield from map(record, map(by_name, names) if names else CASES)


def _without_gradients(found: Mapping[str, np.ndarray]) -> Arrays:
    return {n: a for n, a in found.items() if Quantity(n).role is not Role.GRADIENT}


def _named(found: Mapping[str, np.ndarray]) -> Arrays:
    """Return what the reference computed under our names: experts stacked, the loss the output."""
    values = _without_gradients(found)
    gradients = {Quantity(n).name: a for n, a in found.items() if n not in values}
    kept = {n: a for n, a in values.items() if n != LOSS and not n.endswith(".chosen")}
    named = {Quantity.gradient(n): a for n, a in stacked(gradients).items()}
    return {**kept, OUTPUT: found[LOSS], **named}
