"""The test that the stability guide prescribes: a forward pass, generation, and all MoE probes.

Source: docs/mla-moe.md "The stability guide".
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from parity.deepseek_v3.checkpoint import abstract, load
from parity.deepseek_v3.config import MLAMoEConfig, by_size
from parity.deepseek_v3.model import MLAMoEForCausalLM, generate
from stability.core.byte_text import read_text, windows
from stability.core.findings import Finding, Severity, judge
from stability.moe.attention_probe import TAU, attention_findings, clip_findings
from stability.moe.fixed_bugs import bug_findings
from stability.moe.observe import Observed, observe
from stability.moe.policy import FP8, policy_findings
from stability.moe.router_probe import router_findings

NEW_TOKENS, PROMPT = 8, 16
"""Number of tokens to generate, and number of tokens in the prompt; enough to test decoding from a
cache."""
COPIES = 2.5
"""Memory needed for a model with random weights, relative to its parameters in float32: the weights
are drawn, then copied by a cast."""


@dataclass(frozen=True)
class Examination:
    """Findings on one model, and the time they took."""

    what: str
    """The model, its storage and the batch, as text."""
    findings: list[Finding]
    seconds: float
    """Wall time in seconds."""

    @property
    def broken(self) -> bool:
        """Whether any finding is an error."""
        return any(f.severity is Severity.ERROR for f in self.findings)

    def text(self) -> str:
        """Return a summary for a terminal: errors, warnings, and the number of other findings."""
        order = (Severity.ERROR, Severity.WARNING)
        bad = [f for s in order for f in self.findings if f.severity is s]
        lines = [f"{f.severity.upper()} {f.subject}: {f.message}\n    fix: {f.remedy}" for f in bad]
        probes = ", ".join(dict.fromkeys(f.probe for f in self.findings))
        fine = len(self.findings) - len(bad)
        lines.append(f"{self.what}: {fine} of {len(self.findings)} checks are fine ({probes})")
        return "\n".join([*lines, f"{self.seconds:.1f} s"])


def examine(
    size: str,
    batch: int,
    length: int,
    fp8: bool,
    folder: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Examination:
    """Run all probes on one batch of the held-out text of `byte_text`; return an `Examination`.

    Args:
        size: "small", "medium", "large" or "xl": a model with random weights. Ignored if `folder`
            is given.
        batch: number of rows.
        length: tokens per row, at least `PROMPT`.
        fp8: whether to store parameters in float8 where the policy `FP8` allows it; MLA is then in
            bfloat16. Otherwise dtypes are not changed.
        folder: a DeepSeek-V3 checkpoint to examine; None: random weights.
        say: called with a line of progress text.

    Raises:
        FileNotFoundError: there is no checkpoint in the folder.
        ValueError: `batch` or `length` is too small, the size is unknown or does not fit in memory,
            the text is too short, or the checkpoint has another architecture.
    """
    clock = time.perf_counter()
    if batch < 1 or length < PROMPT:
        raise ValueError(
            f"batch size {batch} and block size {length}: at least 1 and {PROMPT} are needed."
        )
    model = _fresh(by_size(size)) if folder is None else load(folder)
    named = f"mla-moe {size}" if folder is None else f"mla-moe {folder}"
    count = sum(x.size for x in jax.tree.leaves(model))
    say(f"{named}: {count:,} parameters")
    findings = policy_findings(model, FP8) if fp8 else []
    model = FP8.apply(model) if fp8 else model
    ids = _text(batch, length, model.config.vocab_size)
    say(f"forward on {batch} x {length} tokens")
    observed = observe(model, ids)
    findings = [*forward_findings(observed), *findings, *router_findings(observed)]
    say("attention, generation, fixed bugs")
    findings += [
        *attention_findings(observed),
        *generation_findings(model, ids),
        *bug_findings(model),
    ]
    if not fp8:
        first = model.model.layers[0].self_attn
        x = observed.intermediates["layers.0.attn_norm"]
        findings += clip_findings("layers.0.self_attn", first, x, TAU)
    storage = FP8.name if fp8 else "float32"
    what = f"{named}, {count:,} parameters, {storage}, {batch} x {length} tokens"
    return Examination(what, findings, time.perf_counter() - clock)


def forward_findings(observed: Observed) -> list[Finding]:
    """Return two findings on a forward pass: non-finite intermediates, and the logits' shape."""
    bad = [n for n, x in observed.intermediates.items() if not bool(jnp.all(jnp.isfinite(x)))]
    first = bad[0] if bad else "all intermediates"
    source = "the guide's NaN and Inf check of every forward pass"
    message = f"{len(bad)} of {len(observed.intermediates)} intermediates hold NaN or infinity"
    remedy = "replay the step with a lower learning rate, or clip activations (activation_limit)"
    expected = (*observed.ids.shape, observed.model.config.vocab_size)
    shape = observed.intermediates["logits"].shape
    return [
        _error("forward", first, "non_finite", float(len(bad)), 0.0, source, message, remedy),
        _error(
            "forward",
            "logits",
            "shape_is_right",
            float(shape == expected),
            1.0,
            "(batch, block, vocabulary)",
            f"logits are {shape}",
            f"expected {expected}",
            least=True,
        ),
    ]


def generation_findings(model: MLAMoEForCausalLM, ids: jax.Array) -> list[Finding]:
    """Return a finding on whether generation with a cache of latents yields valid token ids."""
    text = generate(model, ids[:, :PROMPT], NEW_TOKENS)
    inside = bool(jnp.all((text >= 0) & (text < model.config.vocab_size)))
    whole = inside and text.shape == (len(ids), PROMPT + NEW_TOKENS)
    config = model.config
    latent = config.kv_lora_rank + config.qk_rope_head_dim
    plain = 2 * config.num_attention_heads * config.v_head_dim
    return [
        _error(
            "generation",
            "generate",
            "continued",
            float(whole),
            1.0,
            "the guide's test script",
            f"{NEW_TOKENS} tokens from a cache of {latent} numbers a token and layer; heads would "
            f"need {plain}",
            "compare the logits computed with the cache with those of the whole text",
            least=True,
        )
    ]


_error = partial(judge, severity=Severity.ERROR)


def _fresh(config: MLAMoEConfig) -> MLAMoEForCausalLM:
    needed = COPIES * 4 * sum(math.prod(x.shape) for x in jax.tree.leaves(abstract(config)))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        raise ValueError(
            f"a fresh model of this size needs about {needed / 2**30:.0f} GiB, this machine has "
            f"{memory / 2**30:.0f} GiB; choose a smaller --size."
        )
    return eqx.filter_jit(MLAMoEForCausalLM)(config, key=jax.random.key(0))


def _text(batch: int, length: int, vocabulary: int) -> jax.Array:
    text = read_text()[1]
    if length > len(text):
        raise ValueError(
            f"block size {length} is too large: the held-out text has {len(text)} bytes; use a "
            "smaller --block-size."
        )
    return windows(text, length * (np.arange(batch) % (len(text) // length)), length) % vocabulary
