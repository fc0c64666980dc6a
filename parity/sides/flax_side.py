"""A side written in Flax linen: every call of a module's method is a stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn

from parity.sides.jax_leaves import mark
from parity.sides.jax_side import DTYPES, JaxSide
from parity.sides.side import Precision


class FlaxSide(JaxSide):
    """A Flax linen module; stages are the results of its submodules' methods, by path.

    Args:
        module: an unbound module.
        params: the module's parameters, or a dict of collections with the key `params`.
        inputs: positional arguments of the call.
        call: function `call(module, params, *inputs, **keywords)` that is run instead of
            `module.apply`, for other methods, mutable collections or several steps; None: `apply`.
        keywords: keyword arguments of the call, such as `rngs` or `deterministic`.
    """

    kind = "flax"

    def __init__(
        self,
        module: nn.Module,
        params: Any,
        *inputs: Any,
        call: Callable[..., Any] | None = None,
        **keywords: Any,
    ) -> None:
        self.module, self.call = module, call
        params = params if "params" in params else {"params": params}
        super().__init__(self._of(module), params, *inputs, **keywords)

    def parameter_name(self, path: str) -> str:
        """Return a parameter's name: its path without the collection name `params`."""
        return path.removeprefix("params.")

    def function_in(self, precision: Precision) -> Callable[..., Any]:
        """Return a function that applies the module with the module's field `dtype`, if there is
        one, set to `precision`.

        The module is unchanged for float32.
        """
        if precision is Precision.FLOAT32 or not hasattr(self.module, "dtype"):
            return self.function
        return self._of(self.module.clone(dtype=DTYPES[precision]))

    def _of(self, module: nn.Module) -> Callable[..., Any]:
        def function(params: Any, *inputs: Any, **keywords: Any) -> Any:
            with nn.intercept_methods(_marked):
                if self.call is not None:
                    return self.call(module, params, *inputs, **keywords)
                return module.apply(params, *inputs, **keywords)

        return function


def _marked(
    next_function: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext
) -> Any:
    result = next_function(*args, **kwargs)
    method = context.method_name
    path = ".".join(context.module.path)
    if not path or (method.startswith("_") and method != "__call__") or method == "setup":
        return result
    return mark(path if method == "__call__" else f"{path}.{method}", result)
