"""The tap map: every intermediate with a name, and where each implementation has it.

The JAX model marks intermediates with `jax.ad_checkpoint.checkpoint_name`, an identity that costs
nothing when nobody asks; `capture` makes the marked values extra outputs of the same computation.
Source: docs/parity.md "Taps".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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
    """Parameters, relative to the block, that act between the taps before it and this one."""
    channels_first: bool = False
    """Whether the reference has it as (B, D, L)."""
    argument: int | None = None
    """Which positional argument of the module it is, where it is not the output."""
    silu: bool = False
    """Whether the reference applies SiLU to the module's output without giving it a name."""


BLOCK_TAPS = (
    Tap("timenorm", "attn.timenorm", ("attn.timenorm",)),
    Tap("cema", "attn.cema", ("attn.cema",), channels_first=True),
    Tap("rmsnorm", "attn.rmsnorm", ("attn.rmsnorm",)),
    Tap("q", "attn.inner", ("attn.wz", "attn.gamma", "attn.beta"), argument=0),
    Tap("k", "attn.inner", ("attn.wz", "attn.gamma", "attn.beta"), argument=1),
    Tap("v", "attn.inner", ("attn.wv",), argument=2),
    Tap("inner", "attn.inner", ()),
    Tap("gate", "attn.wr", ("attn.wr",), silu=True),
    Tap("attn", "attn", ("attn.wh1", "attn.wh2")),
    Tap("ffn", "", ("ffn",)),
)
"""Intermediates of a block in the order they are computed; q and k are taken before RoPE."""

COTANGENT = "bar/"
"""What a tap's name is prefixed with to name the derivative of the loss by it."""


def stages(config: MegalodonConfig) -> tuple[str, ...]:
    """Return the names of all taps of a model in the order they are computed."""
    blocks = (f"layers.{i}.{tap.name}" for i in range(config.num_layers) for tap in BLOCK_TAPS)
    return ("embed", *blocks, "norm", "logits")


STATES = ("norm_count", "norm_mean", "norm_var", "ema", "k", "v")
"""What a cache holds per block; the final norm has the first three."""


def computed(config: MegalodonConfig) -> tuple[str, ...]:
    """Return everything a case computes in order: taps, states, loss, cotangents backwards."""
    forward = stages(config)
    blocks = (f"state/layers.{i}.{name}" for i in range(config.num_layers) for name in STATES)
    states = (*blocks, *(f"state/{name}" for name in STATES[:3]))
    cotangents = (COTANGENT + name for name in reversed(forward))
    return (*forward[:-1], *states, "logits", "generated", "loss", *cotangents)


WEIGHTS = "weights"
"""The parameters themselves, after a round trip through the other side's format."""
LOSSES = "losses"
"""The loss before each step of a trajectory."""


def trajectory(parameters: Iterable[str], steps: int) -> tuple[str, ...]:
    """Return what a trajectory compares, in order: moments first, then how far they moved.

    Args:
        parameters: by torch name.
        steps: how many are taken; noted after the first and the last.
    """
    names = sorted(parameters)

    def after(step: int) -> tuple[str, ...]:
        return tuple(f"step{step}/{what}/{n}" for what in ("mu", "nu", "drift") for n in names)

    return (*after(1), LOSSES, *after(steps))


def parameters_of(stage: str) -> tuple[str, ...]:
    """Return the parameters that act between a tap and those before it, by torch name.

    `stage` may be a cotangent: what acts on it is what acts after the tap, so it has no own.
    """
    layer, _, name = stage.rpartition(".")
    named = {tap.name: tap.parameters for tap in BLOCK_TAPS}
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
    """Return `function` with its named intermediates as a second result.

    Operation by operation the results are the same bits. Under jit the extra outputs can keep XLA
    from fusing across them, so results are equal to rounding only.

    The result can be jitted and differentiated. Arguments must be pytrees of arrays. Names that
    occur once per block are prefixed `layers.{i}.` in order of appearance.

    Args:
        function: what to watch.
        offsets: added to intermediates by name: the derivative by a zero is the cotangent there.
        forced: what the computation goes on with in place of an intermediate, by name. What is
            reported is still what was computed, from forced inputs.
    """

    def captured(*args: Any) -> tuple[Any, dict[str, jax.Array]]:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        marks = _Marks(offsets or {}, forced or {})
        values = _evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(args), marks)
        return jax.tree.unflatten(jax.tree.structure(shape), values), marks.taken

    return captured


class _Marks:
    """Collects intermediates as they pass, and says what to go on with."""

    def __init__(self, offsets: Mapping[str, Any], forced: Mapping[str, Any]):
        self.offsets, self.forced = offsets, forced
        self.taken: dict[str, jax.Array] = {}
        self._seen = {tap.name: 0 for tap in BLOCK_TAPS}

    def mark(self, name: str, value: jax.Array) -> jax.Array:
        if name in self._seen:
            self._seen[name] += 1
            name = f"layers.{self._seen[name] - 1}.{name}"
        if name in self.offsets:
            value = value + self.offsets[name]
        self.taken[name] = value
        return self.forced[name].astype(value.dtype) if name in self.forced else value


def _evaluate(jaxpr: Any, consts: Any, args: Any, marks: _Marks) -> list[Any]:
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
            outputs = [marks.mark(eqn.params["name"], outputs[0])]
        values.update(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _is_marked_call(eqn: Any) -> bool:
    if eqn.primitive.name not in ("jit", "pjit"):
        return False
    inside = eqn.params["jaxpr"].jaxpr.eqns
    return any(e.primitive.name == "name" or _is_marked_call(e) for e in inside)
