"""Probes for the five bugs that the stability guide lists as fixed.

Source: docs/mla-moe.md "The stability guide".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from parity.deepseek_v3.model import MLP, BlockOutput, Experts, MLAMoEForCausalLM, MoE
from parity.deepseek_v3.router import Routing
from parity.engine.programs.jaxprs import equations
from stability.core.dtype_rules import Policy
from stability.core.findings import Finding, Severity, judge
from stability.moe.policy import FP8

PROBE = "fixed bugs"
GUIDE = 'docs/mla-moe.md "The stability guide", bug {}'
TOKENS = 8
"""Number of tokens in the traced calls; the checked shapes and dtypes do not depend on it."""
LIVE_BUG = "4_index_add"
"""Metric of the finding on Transformers itself, which still had the fourth bug."""


def bug_findings(model: MLAMoEForCausalLM, policy: Policy = FP8) -> list[Finding]:
    """Return findings on the five bugs that the stability guide lists, sorted by metric.

    The model is traced, not run. Bugs 1, 3 and 4 have a finding for each layer with experts.
    """
    sparse = [(i, b.mlp) for i, b in enumerate(model.model.layers) if isinstance(b.mlp, MoE)]
    findings = [block_returns(model), fp8_promotion(model, policy)]
    for i, mlp in sparse:
        name = f"layers.{i}.mlp"
        findings += [adapter_dimensions(name, mlp), expert_shape(name, mlp.experts, model)]
        findings.append(scatter_dtype(name, mlp.experts, model))
    return sorted(findings, key=lambda f: f.metric)


def adapter_dimensions(name: str, mlp: MoE) -> Finding:
    """Return the finding on bug 1: whether widths of adjacent matrices in an expert match."""
    D = mlp.gate.weight.shape[-1]
    experts: tuple[tuple[str, MLP | Experts], ...] = (
        ("experts", mlp.experts),
        ("shared_experts", mlp.shared_experts),
    )
    wrong = []
    for which, part in experts:
        gate, up, down = (
            p.weight.shape[-2:] for p in (part.gate_proj, part.up_proj, part.down_proj)
        )
        pairs = {
            "gate_proj in": (gate[1], D),
            "up_proj in": (up[1], D),
            "up_proj out": (up[0], gate[0]),
            "down_proj in": (down[1], gate[0]),
            "down_proj out": (down[0], D),
        }
        wrong += [f"{which}.{n} is {a}, needs {b}" for n, (a, b) in pairs.items() if a != b]
    message = "; ".join(wrong) or "the widths of adjacent matrices agree"
    return _verdict(1, name, "1_adapter_dimensions", len(wrong), message, "derive both from one")


def block_returns(model: MLAMoEForCausalLM) -> Finding:
    """Return the finding on bug 2: whether each block returns a proper `BlockOutput`.

    Its `hidden` must have the shape and dtype of the block's input.
    """
    x = _hidden(model)
    positions = jax.ShapeDtypeStruct(x.shape[:2], jnp.int32)
    wrong = []
    for i, block in enumerate(model.model.layers):
        out, error = _traced(block, x, positions)
        if error or not isinstance(out, BlockOutput):
            wrong.append(f"layers.{i} returns {error or type(out).__name__}")
        elif (out.hidden.shape, out.hidden.dtype) != (x.shape, x.dtype):
            wrong.append(f"layers.{i} returns {out.hidden.shape} {out.hidden.dtype} for {x.shape}")
    message = "; ".join(wrong) or f"all {len(model.model.layers)} return a BlockOutput"
    return _verdict(2, "model.layers", "2_block_returns", len(wrong), message, "one type for all")


def expert_shape(name: str, experts: Any, model: MLAMoEForCausalLM) -> Finding:
    """Return the finding on bug 3: whether the experts map hidden states (T, D) to (T, D)."""
    x, routing = _tokens(model)
    out, error = _traced(experts, x, routing)
    shape = getattr(out, "shape", None)
    fine, message = shape == x.shape, error or f"experts return {shape} for {x.shape}"
    remedy = "down_proj must end in the width of the stream; never pad or cut"
    return _verdict(3, name, "3_expert_shape", 0 if fine else 1, message, remedy)


def scatter_dtype(name: str, experts: Any, model: MLAMoEForCausalLM) -> Finding:
    """Return the finding on bug 4: whether expert outputs are summed in one dtype, float32 or more.

    torch rejects `index_add_` with two dtypes; JAX accepts it and casts to the dtype of the sum.
    """
    x, routing = _tokens(model, jnp.bfloat16)
    error = _traced(experts, x, routing)[1]
    sums = [] if error else _scatters(experts, x, routing)
    wrong = [f"{a} += {b}" for a, b in sums if a != b or a.itemsize < 4]
    wrong += [] if sums else [error or "no sum over experts was found"]
    message = "; ".join(wrong) or f"bfloat16 outputs are added up in {sums[0][0]}"
    remedy = "widen outputs before they are scattered, narrow the sum after"
    return _verdict(4, name, "4_scatter_dtype", len(wrong), message, remedy)


def reference_scatter(refusal: str, version: str) -> Finding:
    """Return a note on whether Transformers has bug 4 (see `scatter_dtype`).

    If it has the bug, its MoE module rejects float64.

    Args:
        refusal: error message of the module for float64 inputs; "" if it accepts them.
        version: version of transformers.
    """
    alive = "index_add_" in refusal
    message = f"Transformers' MoE rejects float64, so it still has the fourth bug: {refusal}"
    return Finding(
        PROBE,
        Severity.NOTE,
        f"transformers {version} DeepseekV3MoE",
        LIVE_BUG,
        float(alive),
        0.0,
        GUIDE.format(4),
        message if alive else "it runs in float64",
        "compare in float64 with the module's casts to float32 removed" if alive else "",
    )


def fp8_promotion(model: MLAMoEForCausalLM, policy: Policy = FP8) -> Finding:
    """Return the finding on bug 5: whether float8 parameters are widened before they are used."""
    ids = jax.ShapeDtypeStruct((1, TOKENS), jnp.int32)
    stored = eqx.filter_eval_shape(policy.apply, model)
    with jax.numpy_dtype_promotion("strict"):
        out, error = _traced(stored, ids)
    message = error or f"float8 parameters are widened to {out.logits.dtype} where they are used"
    remedy = "cast a parameter to the dtype of the values it is combined with, in norms too"
    return _verdict(5, f"policy {policy.name}", "5_fp8_promotion", bool(error), message, remedy)


def _verdict(n: int, name: str, metric: str, count: float, message: str, remedy: str) -> Finding:
    source, error = GUIDE.format(n), Severity.ERROR
    return judge(PROBE, name, metric, float(count), 0.0, source, message, remedy, severity=error)


def _traced(function: Callable[..., Any], *args: Any) -> tuple[Any, str]:
    """Return (shapes of a call's result, ""), or (None, first line of the error) if it fails."""
    try:
        return eqx.filter_eval_shape(function, *args), ""
    except (AttributeError, TypeError, ValueError) as error:
        return None, f"{type(error).__name__}: {error}".partition("\n")[0][:200]


def _scatters(function: Callable[..., Any], *args: Any) -> list[tuple[Any, Any]]:
    """Return (dtype of accumulator, dtype of summand) of every float scatter-add in a call."""
    avals: Any = (
        [atom.aval for atom in eqn.invars]
        for eqn in equations(eqx.filter_make_jaxpr(function)(*args)[0].jaxpr)
        if eqn.primitive.name == "scatter-add"
    )
    sums = [(into.dtype, values.dtype) for into, _, values in avals]
    return [dtypes for dtypes in sums if jnp.issubdtype(dtypes[0], jnp.floating)]


def _hidden(model: MLAMoEForCausalLM) -> jax.ShapeDtypeStruct:
    table = model.model.embed_tokens.weight
    return jax.ShapeDtypeStruct((1, TOKENS, table.shape[1]), table.dtype)


def _tokens(
    model: MLAMoEForCausalLM, dtype: DTypeLike | None = None
) -> tuple[jax.ShapeDtypeStruct, Routing]:
    c, x = model.config, _hidden(model)
    tokens = jax.ShapeDtypeStruct((TOKENS, x.shape[-1]), dtype or x.dtype)
    E, k = c.n_routed_experts, c.num_experts_per_tok
    parts: Any = (
        jax.ShapeDtypeStruct((TOKENS, n), t)
        for n, t in ((E, jnp.float32), (k, jnp.int32), (k, jnp.float32))
    )
    return tokens, Routing(*parts)
