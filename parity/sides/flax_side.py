"""A side written in Flax linen: every call of a module's method is a stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from parity.sides.jax_side import JaxSide, mark


class FlaxSide(JaxSide):
    """A Flax linen module; stages are the results of its submodules' methods, by path.

    Args:
        module: unbound.
        params: its parameters, or a dict of collections that has `params`.
        inputs: what it is called with.
        call: called as `call(module, params, *inputs, **keywords)` in place of `module.apply`: for
            other methods, mutable collections or several steps.
        keywords: what it is called with by name, such as `rngs` or `deterministic`.
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
        """Return the path without the collection `params`."""
        return path.removeprefix("params.")

    def narrow_function(self) -> Callable[..., Any]:
        """Return the module with its `dtype` set to bfloat16, where it has one."""
        return self._of(_with_dtype(self.module, jnp.bfloat16))

    def wide_function(self) -> Callable[..., Any]:
        """Return the module with its `dtype` set to float64, where it has one."""
        return self._of(_with_dtype(self.module, jnp.float64))

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


def _with_dtype(module: nn.Module, dtype: Any) -> nn.Module:
    return module.clone(dtype=dtype) if hasattr(module, "dtype") else module
