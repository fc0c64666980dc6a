"""A torch module under autocast, with noise floors of the dtypes that autocast chooses.

Autocast chooses the dtype of each operation. A perturbed run therefore computes everything twice:
under autocast as the program does, and in float64 on shadows of the tensors, which are perturbed by
the roundoff of the dtype that the program used there.
Source: docs/your-own-port.md "Under autocast".
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from parity.engine.measure.rounding_noise import UNIT_ROUNDOFF
from parity.engine.programs.rounding_rules import ELEMENTARY_UNITS, UNITS
from parity.sides.side import AS_IS, Precision, Rounding, Run, SideError, Trace
from parity.sides.torch_lift import ELEMENTARY, EXACT, WIDE, Lift, widen
from parity.sides.torch_side import TorchSide

_CASTS = frozenset(("_to_copy", "copy_"))
"""Operations that round if their result is narrower than their operand."""


class AutocastSide(TorchSide):
    """A torch module that runs under `torch.autocast`; its stages are the results of its
    submodules, by path.

    Its float64 run is that of the module without autocast. Only the forward pass can be compared:
    use `Port(..., gradients=False, bfloat16=False)`.

    Args:
        module: the module with float32 parameters, in the mode to be compared.
        inputs: positional arguments of the call, as in `TorchSide`.
        autocast: the low precision, `torch.bfloat16` or `torch.float16`.
        call: function `call(module, *inputs, **keywords)`; None: `module(...)`.
        keywords: keyword arguments of the call.

    Raises:
        SideError: `module` is no `torch.nn.Module`, or `autocast` is another dtype.
    """

    kind = "torch under autocast"

    def __init__(
        self,
        module: torch.nn.Module,
        *inputs: Any,
        autocast: torch.dtype = torch.bfloat16,
        call: Callable[..., Any] | None = None,
        **keywords: Any,
    ) -> None:
        if autocast not in (torch.bfloat16, torch.float16):
            raise SideError(f"expected torch.bfloat16 or torch.float16 as autocast, got {autocast}")
        super().__init__(module, *inputs, call=call, **keywords)
        self.autocast = autocast
        self._moves = True
        """Whether perturbed runs perturb the shadows (float64 values); False only for the run from
        which their change is measured."""
        # Copies of the side, with other parameters, add to the same set.
        self.used: set[torch.dtype] = set()
        self._shadows: Shadows | None = None
        """Shadows of the perturbed run in progress or just ended; None in and after other runs."""

    def run(self, how: Run = AS_IS) -> Trace:
        """Run the module once with these settings.

        Raises:
            SideError: `TorchSide.run` raises one, or `how` requests derivatives or bfloat16.
        """
        if how.cotangents is not None:
            raise SideError(
                "the derivatives of a side under autocast are not compared: pass "
                "Port(..., gradients=False)"
            )
        if how.precision is Precision.BFLOAT16:
            raise SideError(
                "a side under autocast has no run in bfloat16: pass Port(..., bfloat16=False)"
            )
        if how.rounding is not Rounding.OPERATIONS:
            return super().run(how)
        # Only the effect of rounding is added to the run without autocast. Where autocast changes
        # the program otherwise, such as by another branch, the difference is no rounding.
        exact = super().run(Run(Precision.FLOAT64, forced=how.forced))
        try:
            self._moves = False
            still = super().run(how)
        finally:
            self._moves = True
        moved = super().run(how)
        if self._shadows is not None:
            self.used |= self._shadows.used
        return replace(
            exact,
            stages={
                name: x + (moved.stages[name] - still.stages[name])
                for name, x in exact.stages.items()
                if name in moved.stages and moved.stages[name].shape == x.shape
            },
        )

    def _precision(self, how: Run) -> Precision:
        """Return the precision of parameters and inputs in a run: float32 if operations are
        perturbed, since then only the shadows are float64."""
        return Precision.FLOAT32 if how.rounding is Rounding.OPERATIONS else how.precision

    @contextlib.contextmanager
    def _computing(self, how: Run) -> Iterator[Any]:
        self._shadows = None
        if self._precision(how) is Precision.FLOAT64:
            with super()._computing(how) as lift:
                yield lift
            return
        devices = {x.device.type for x in (*self.module.parameters(), *self.module.buffers())}
        device = devices.pop() if len(devices) == 1 else "cpu"
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.autocast(device, self.autocast))
            if how.rounding is Rounding.OPERATIONS:
                # The intermediate values of a fused kernel cannot be perturbed, and oneDNN's
                # recurrent layers have no float64.
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))
                stack.enter_context(_without_onednn())
                self._shadows = stack.enter_context(Shadows(how.seed if self._moves else None))
            yield self._shadows

    def _read(self, x: torch.Tensor) -> np.ndarray:
        if self._shadows is not None:
            return super()._read(self._shadows.of(x))
        # Values of a lower precision are exact in float32.
        return super()._read(x.float() if x.dtype in (torch.bfloat16, torch.float16) else x)


class Shadows(TorchDispatchMode):
    """Dispatch mode that repeats every operation in float64 on shadows of its operands.

    A shadow is the float64 value of a tensor, computed by operations whose results are perturbed by
    the roundoff of the dtype that the program used. The shadow of a tensor that no operation made,
    such as a parameter, is the tensor in float64.

    Args:
        seed: seed of the perturbation's signs; None: nothing is perturbed.
    """

    def __init__(self, seed: int | None) -> None:
        super().__init__()
        self.moves = seed is not None
        self.used: set[torch.dtype] = set()
        """Dtypes of the floating-point results of the program's operations."""
        self.lift = Lift(torch.Generator().manual_seed(seed or 0))
        self._made: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def of(self, x: Any) -> Any:
        """Return the float64 shadow of a tensor, or the tensor in float64 if it has none; any other
        value as `widen` returns it."""
        known = self._made.get(x) if isinstance(x, torch.Tensor) else None
        return widen(x) if known is None else known

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one operation as the program does, and on the shadows of its operands."""
        name, named = func.overloadpacket.__name__, kwargs or {}
        before = [x.dtype for x in tree_leaves((args, named)) if _is_float(x)]
        # Before the operation, which may write to its operands.
        shadows = tree_map(self.of, args), tree_map(self.of, named)
        real = func(*args, **named)
        results = [x for x in tree_leaves(real) if _is_float(x)]
        self.used |= {x.dtype for x in results}
        if torch.Tag.nondeterministic_seeded in func.tags:
            # Not repeated on shadows: a second draw would give other numbers. If it was drawn in
            # place, the shadow takes the drawn values.
            for x in results:
                if x in self._made:
                    self._made[x].copy_(x)
            return real
        if not results or not before:
            return real
        operands = self.lift.summands(name, shadows[0]) if self.moves else shadows[0]
        wide = func(*operands, **shadows[1])
        for x, shadow in zip(results, (w for w in tree_leaves(wide) if _is_float(w)), strict=True):
            units = self._units(func, name, before, x.dtype)
            if self.moves and units and shadow.numel():
                moved = self.lift.moved(shadow, units)
                # In place: views of the tensor have shadows that share its memory.
                shadow = shadow.copy_(moved) if name.endswith("_") else moved
            self._made[x] = shadow
        return real

    def _units(self, func: Any, name: str, before: list[torch.dtype], after: torch.dtype) -> float:
        """Return the relative rounding error of an operation's result, in unit roundoffs of
        float32; 0 for an exact operation.

        Args:
            func: the operation.
            name: its name.
            before: dtypes of its floating-point operands.
            after: dtype of the result.
        """
        own = UNITS[str(after).removeprefix("torch.")] / UNIT_ROUNDOFF
        if name in _CASTS:
            return own if any(_roundoff(x) < _roundoff(after) for x in before) else 0.0
        if name in EXACT or func.is_view:
            return 0.0
        # In a low precision an elementary function is computed in float32 and rounded once.
        return max(own, ELEMENTARY_UNITS if name in ELEMENTARY else 1.0)


@contextlib.contextmanager
def _without_onednn() -> Iterator[None]:
    """Context in which torch computes without oneDNN."""
    with warnings.catch_warnings():
        # Setting its flags warns about features that only Intel's GPUs have.
        warnings.simplefilter("ignore")
        with torch.backends.mkldnn.flags(enabled=False):
            yield


def _is_float(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype in (*WIDE, torch.float64, torch.complex128)


def _roundoff(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps
