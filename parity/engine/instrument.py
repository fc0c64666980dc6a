"""Named intermediates of a JAX function, as outputs of the same computation.

A function marks an intermediate with `jax.ad_checkpoint.checkpoint_name`, an identity that costs
nothing when nobody asks; `capture` makes the marked values extra outputs. Source: docs/parity.md
"Intermediates".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from parity.engine.jaxprs import bind, equations, interpret


def capture(
    function: Callable[..., Any],
    *,
    numbered: Mapping[str, str] | None = None,
    offsets: Mapping[str, Any] | None = None,
    forced: Mapping[str, Any] | None = None,
) -> Callable[..., tuple[Any, dict[str, jax.Array]]]:
    """Return `function` with its named intermediates as a second result.

    Operation by operation the results are the same bits. Under jit the extra outputs can keep XLA
    from fusing across them, so results are equal to rounding only.

    The result can be jitted and differentiated. Arguments must be pytrees of arrays.

    Args:
        function: what to watch.
        numbered: for marks that are passed more than once, such as once per layer, what to call
            them, with "{}" for how often each was passed before: `{"q": "layers.{}.q"}`.
        offsets: added to intermediates by name: the derivative by a zero is the cotangent there.
        forced: what the computation goes on with in place of an intermediate, by name. What is
            reported is still what was computed, from forced inputs.

    Raises:
        ValueError: a mark that is not `numbered` is passed twice: one name has one value.
    """

    def captured(*args: Any) -> tuple[Any, dict[str, jax.Array]]:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        marks = _Marks(numbered or {}, offsets or {}, forced or {})

        def step(eqn: JaxprEqn, inputs: list[Any]) -> list[Any]:
            if _is_call(eqn):
                inner = eqn.params["jaxpr"]
                if any(e.primitive.name == "name" for e in equations(inner.jaxpr, _is_call)):
                    return interpret(inner.jaxpr, inner.consts, inputs, step)
            outputs = bind(eqn, inputs)
            if eqn.primitive.name == "name":
                outputs = [marks.mark(eqn.params["name"], outputs[0])]
            return outputs

        values = interpret(closed.jaxpr, closed.consts, jax.tree.leaves(args), step)
        return jax.tree.unflatten(jax.tree.structure(shape), values), marks.taken

    return captured


class _Marks:
    """Collects intermediates as they pass, and says what to go on with."""

    def __init__(
        self, numbered: Mapping[str, str], offsets: Mapping[str, Any], forced: Mapping[str, Any]
    ):
        self.numbered, self.offsets, self.forced = numbered, offsets, forced
        self.taken: dict[str, jax.Array] = {}
        self._passed = dict.fromkeys(numbered, 0)

    def mark(self, name: str, value: jax.Array) -> jax.Array:
        if name in self.numbered:
            self._passed[name] += 1
            name = self.numbered[name].format(self._passed[name] - 1)
        if name in self.taken:
            raise ValueError(
                f"capture: the mark {name!r} is passed twice. Give each value a name of its own, "
                f"or say how to count them: numbered={{{name!r}: 'layers.{{}}.{name}'}}."
            )
        if name in self.offsets:
            value = value + self.offsets[name]
        self.taken[name] = value
        return self.forced[name].astype(value.dtype) if name in self.forced else value


def _is_call(eqn: JaxprEqn) -> bool:
    # A mark inside of a branch or loop has no one value, so those are bound whole.
    return eqn.primitive.name in ("jit", "pjit")
