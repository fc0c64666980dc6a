"""Map of intermediates: the name of each, and where the JAX model and megalodon-hf compute it.

Source: docs/parity.md "Intermediates".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from megalodon_jax.config import MegalodonConfig
from parity.engine.measure.quantity import LOSSES, Quantity, Role
from parity.engine.measure.where import Axis
from parity.engine.programs import instrument


@dataclass(frozen=True, slots=True)
class Intermediate:
    """One intermediate of a block (layer)."""

    name: str
    """Name in the code of the JAX model; in results it is prefixed by `layers.{i}.`."""
    reference: str
    """Submodule of megalodon-hf's block that outputs the intermediate or takes it as an argument;
    empty: the block itself."""
    parameters: tuple[str, ...]
    """Parameters, or modules with parameters, used between the previous intermediates and this one,
    by name relative to the block."""
    channels_first: bool = False
    """Whether megalodon-hf computes the intermediate as (B, D, L) instead of (B, L, D)."""
    argument: int | None = None
    """Index of the positional argument of `reference` that is the intermediate; None: the
    submodule's output is."""
    silu: bool = False
    """Whether the intermediate is SiLU of the submodule's output; no submodule of megalodon-hf
    outputs the result of SiLU."""


BLOCK_INTERMEDIATES = (
    Intermediate("timenorm", "attn.timenorm", ("attn.timenorm",)),
    Intermediate("cema", "attn.cema", ("attn.cema",), channels_first=True),
    Intermediate("rmsnorm", "attn.rmsnorm", ("attn.rmsnorm",)),
    Intermediate("q", "attn.inner", ("attn.wz", "attn.gamma", "attn.beta"), argument=0),
    Intermediate("k", "attn.inner", ("attn.wz", "attn.gamma", "attn.beta"), argument=1),
    Intermediate("v", "attn.inner", ("attn.wv",), argument=2),
    Intermediate("inner", "attn.inner", ()),
    Intermediate("gate", "attn.wr", ("attn.wr",), silu=True),
    Intermediate("attn", "attn", ("attn.wh1", "attn.wh2")),
    Intermediate("ffn", "", ("ffn",)),
)
"""Intermediates of a block in order of computation; q and k are before RoPE."""


def stages(config: MegalodonConfig) -> tuple[str, ...]:
    """Return the names of all intermediates of a model, in order of computation."""
    blocks = (
        f"layers.{i}.{row.name}" for i in range(config.num_layers) for row in BLOCK_INTERMEDIATES
    )
    return ("embed", *blocks, "norm", "logits")


STATES = ("norm_count", "norm_mean", "norm_var", "ema", "k", "v")
"""Names of the arrays in the cache of each block; the cache of the final norm has only the first
three."""


def computed(config: MegalodonConfig) -> tuple[str, ...]:
    """Return the names of the intermediates, states, generated tokens, loss and cotangents.

    The order is that of computation; a case has only some of them. Gradients of parameters have no
    order and are not included.
    """
    forward = stages(config)
    blocks = (
        Quantity.state(f"layers.{i}.{name}") for i in range(config.num_layers) for name in STATES
    )
    states = (*blocks, *(Quantity.state(name) for name in STATES[:3]))
    cotangents = (Quantity.cotangent(name) for name in reversed(forward))
    return (*forward[:-1], *states, "logits", "generated", "loss", *cotangents)


def trajectory(parameters: Iterable[str], steps: int) -> tuple[str, ...]:
    """Return the names of the quantities of a trajectory in order.

    After each recorded step: first moments, second moments, displacements of parameters. The losses
    come between the two recorded steps.

    Args:
        parameters: torch names of the parameters.
        steps: number of steps; quantities are recorded after the first and the last.
    """
    first, last = (
        [
            Quantity.after_step(step, what, name)
            for what in ("mu", "nu", "drift")
            for name in sorted(parameters)
        ]
        for step in (1, steps)
    )
    return (*first, LOSSES, *last)


def axes_of(quantity: str, config: MegalodonConfig) -> tuple[Axis, ...]:
    """Return a description of each axis of an intermediate, a cotangent or a state.

    A description has the name of the axis and, if the axis is processed in groups, the name and
    size of a group: channels, for example, belong to heads, and positions to chunks. The result is
    () for other quantities.
    """
    named = Quantity(quantity)
    stage = named.name.rpartition(".")[2]
    if named.role is Role.STATE:
        states = {
            "ema": (Axis("row"), Axis("channel"), Axis("mode"), Axis("part")),
            **dict.fromkeys("kv", (Axis("row"), Axis("key"), Axis("head"), Axis("channel"))),
        }
        return states.get(stage, (Axis("row"), Axis("group")))
    if named.role not in (Role.VALUE, Role.COTANGENT):
        return ()
    lead = Axis("row"), Axis("position", "chunk", config.chunk_size)
    if stage in ("q", "k", "v"):
        return (*lead, Axis("head"), Axis("channel"))
    if stage == "logits":
        return (*lead, Axis("token id"))
    if stage in ("inner", "gate"):
        return (*lead, Axis("channel", "head", config.value_head_dim))
    if stage in ("timenorm", "norm"):
        return (*lead, Axis("channel", "group", config.model_dim // config.norm_num_groups))
    return (*lead, Axis("channel"))


def parameters_of(stage: str) -> tuple[str, ...]:
    """Return the parameters that compute an intermediate from the previous ones, by torch name.

    A name may be that of a module, which stands for all of its parameters. `stage` is not a
    cotangent: the parameters that affect a cotangent act after the intermediate.
    """
    layer, _, name = stage.rpartition(".")
    named = {row.name: row.parameters for row in BLOCK_INTERMEDIATES}
    if layer:
        return tuple(f"model.{layer}.{p}" for p in named.get(name, ()))
    ends = {"embed": ("model.embed",), "norm": ("model.norm",), "logits": ("lm_head",)}
    return ends.get(stage, ())


def capture(
    function: Callable[..., Any],
    *,
    offsets: Mapping[str, Any] | None = None,
    forced: Mapping[str, Any] | None = None,
) -> Callable[..., tuple[Any, dict[str, jax.Array]]]:
    """Return a function that returns `function`'s result and the model's intermediates, by name.

    The model marks an intermediate under the same name in every block; here the name gets the
    number of the block. See `parity.engine.programs.instrument.capture`.

    Args:
        function: calls the model; its arguments must be pytrees of arrays.
        offsets: values added to intermediates, by name; the sums are returned and used.
        forced: values that replace intermediates in the rest of the computation, by name; the
            computed intermediates are still the ones returned.
    """
    per_block = {row.name: f"layers.{{}}.{row.name}" for row in BLOCK_INTERMEDIATES}
    return instrument.capture(function, numbered=per_block, offsets=offsets, forced=forced)
