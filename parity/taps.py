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
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

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
        marks = [eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name == "name"]
        results = [*closed.jaxpr.outvars, *(eqn.outvars[0] for eqn in marks)]
        jaxpr = closed.jaxpr.replace(
            outvars=results, debug_info=closed.jaxpr.debug_info.with_unknown_names()
        )
        values = jaxpr_as_fun(ClosedJaxpr(jaxpr, closed.consts))(*jax.tree.leaves(args))
        split = len(values) - len(marks)
        out = jax.tree.unflatten(jax.tree.structure(shape), values[:split])
        names = _qualified([eqn.params["name"] for eqn in marks])
        return out, dict(zip(names, values[split:], strict=True))

    return captured


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
