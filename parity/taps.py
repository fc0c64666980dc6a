"""The tap map: every intermediate with a name, and where each implementation has it.

The JAX model marks intermediates with `jax.ad_checkpoint.checkpoint_name`, an identity that costs
nothing when nobody asks; `capture` makes the marked values extra outputs of the same computation.
Source: spec/parity.md "Taps".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import Literal

from megalodon_jax.config import MegalodonConfig


@dataclass(frozen=True, slots=True)
class Tap:
    """One intermediate of a block."""

    name: str
    """Its name in the JAX model and, after `layers.{i}.`, everywhere else."""
    reference: str
    """The module of the reference's block whose output it is; empty for the block itself."""
    parameters: tuple[str, ...]
    """Parameters, relative to the block, that act between the tap before it and this one."""
    channels_first: bool = False
    """Whether the reference has it as (B, D, L)."""


BLOCK_TAPS = (
    Tap("timenorm", "attn.timenorm", ("attn.timenorm",)),
    Tap("cema", "attn.cema", ("attn.cema",), channels_first=True),
    Tap("rmsnorm", "attn.rmsnorm", ("attn.rmsnorm",)),
    Tap("inner", "attn.inner", ("attn.wz", "attn.wv", "attn.gamma", "attn.beta")),
    Tap("attn", "attn", ("attn.wr", "attn.wh1", "attn.wh2")),
    Tap("ffn", "", ("ffn",)),
)
"""Intermediates of a block in the order they are computed."""


def stages(config: MegalodonConfig) -> tuple[str, ...]:
    """Return the names of all taps of a model in the order they are computed."""
    blocks = (f"layers.{i}.{tap.name}" for i in range(config.num_layers) for tap in BLOCK_TAPS)
    return ("embed", *blocks, "norm", "logits")


def capture(function: Callable[..., Any]) -> Callable[..., tuple[Any, dict[str, jax.Array]]]:
    """Return `function` with its named intermediates as a second result.

    Operation by operation the results are the same bits. Under jit the extra outputs can keep XLA
    from fusing across them, so results are equal to rounding only.

    The result can be jitted and differentiated. Arguments must be pytrees of arrays. Names that
    occur once per block are prefixed `layers.{i}.` in order of appearance.
    """

    def captured(*args: Any) -> tuple[Any, dict[str, jax.Array]]:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        marks: list[tuple[str, Any]] = []
        values = _evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(args), marks)
        out = jax.tree.unflatten(jax.tree.structure(shape), values)
        names = _qualified([name for name, _ in marks])
        return out, dict(zip(names, (value for _, value in marks), strict=True))

    return captured


def _evaluate(jaxpr: Any, consts: Any, args: Any, marks: list[tuple[str, Any]]) -> list[Any]:
    """Evaluate a jaxpr equation by equation, looking inside jitted calls that hold a mark."""
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for eqn in jaxpr.eqns:
        inputs = [read(atom) for atom in eqn.invars]
        if _is_marked_call(eqn):
            inner = eqn.params["jaxpr"]
            outputs = _evaluate(inner.jaxpr, inner.consts, inputs, marks)
        else:
            # An equation traced with 64-bit types must be bound with them.
            with eqn.ctx.manager:
                outputs = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))
            outputs = outputs if eqn.primitive.multiple_results else [outputs]
        if eqn.primitive.name == "name":
            marks.append((eqn.params["name"], outputs[0]))
        values.update(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _is_marked_call(eqn: Any) -> bool:
    if eqn.primitive.name not in ("jit", "pjit"):
        return False
    inside = eqn.params["jaxpr"].jaxpr.eqns
    return any(e.primitive.name == "name" or _is_marked_call(e) for e in inside)


def _qualified(names: list[str]) -> list[str]:
    per_block = {tap.name for tap in BLOCK_TAPS}
    seen = dict.fromkeys(per_block, 0)
    qualified = []
    for name in names:
        if name in per_block:
            qualified.append(f"layers.{seen[name]}.{name}")
            seen[name] += 1
        else:
            qualified.append(name)
    return qualified
