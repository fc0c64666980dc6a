"""Narrow parameters for any torch optimiser: stochastic rounding and Kahan summation.

    model = model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    round_stochastically(optimizer)  # or compensate(optimizer)

The training loop does not change. Hooks on the optimiser widen bfloat16 parameters and gradients to
float32 before a step, so that moments are float32, and round the parameters after it. During a step
memory therefore holds float32 copies of both. Source: docs/stability.md "In a torch run".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CARRY = "kahan_carry"
"""Key of a parameter's Kahan carry in the optimiser's state: the part of its updates lost to
rounding, which is added at the next step."""


class NarrowParameters:
    """Hooks that round a torch optimiser's bfloat16 parameters; `remove` detaches them."""

    def __init__(self, optimizer: Any, carry: bool) -> None:
        self._optimizer, self._carry = optimizer, carry
        self._narrow: dict[Any, Any] = {}
        self._loaded: Mapping[str, Any] = {}
        self._handles = [
            optimizer.register_step_pre_hook(self._widen),
            optimizer.register_step_post_hook(self._round),
            optimizer.register_load_state_dict_pre_hook(self._before_loading),
            optimizer.register_load_state_dict_post_hook(self._after_loading),
        ]

    def remove(self) -> None:
        """Detach the hooks; the moments already in the optimiser's state stay in float32."""
        for handle in self._handles:
            handle.remove()

    def _widen(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        import torch

        self._narrow = {}
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is None or p.dtype != torch.bfloat16:
                    continue
                gradient, p.grad = p.grad, None
                self._narrow[p] = p.dtype
                p.data = p.data.float()
                if self._carry and CARRY in optimizer.state[p]:
                    p.data += optimizer.state[p][CARRY].float()
                p.grad = gradient.float()

    def _round(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        import torch

        for p, dtype in self._narrow.items():
            gradient, p.grad = p.grad, None
            wide = p.data
            p.data = wide.to(dtype) if self._carry else stochastic(wide)
            if self._carry:
                lost = wide - p.data.float()
                # An infinite carry would make the next step NaN.
                lost = torch.where(torch.isfinite(lost), lost, torch.zeros_like(lost))
                optimizer.state[p][CARRY] = lost.to(dtype)
            p.grad = gradient.to(dtype)
        self._narrow = {}

    def _before_loading(self, optimizer: Any, state: Mapping[str, Any]) -> None:
        self._loaded = state

    def _after_loading(self, optimizer: Any) -> None:
        import torch

        # torch casts loaded moments to the parameter's dtype; put the saved values back.
        groups = zip(optimizer.param_groups, self._loaded["param_groups"], strict=True)
        for group, loaded in groups:
            for p, key in zip(group["params"], loaded["params"], strict=True):
                for name, value in self._loaded["state"].get(key, {}).items():
                    if not hasattr(value, "detach") or name == "step":
                        continue
                    held = value.detach().to(p.device, copy=True)
                    # bfloat16 moments of an earlier run become float32, the dtype of the gradients
                    # during a step. The carry is bfloat16 by definition.
                    wide = p.dtype == held.dtype == torch.bfloat16 and name != CARRY
                    optimizer.state[p][name] = held.float() if wide else held
        self._loaded = {}


def round_stochastically(optimizer: Any) -> NarrowParameters:
    """Round bfloat16 parameters up or down at random after each step, so that the mean is exact.

    Between steps no memory is needed beyond float32 moments. The roundings use torch's global
    generator, whose state a checkpoint must hold for an exact continuation.

    Args:
        optimizer: a new `torch.optim.Optimizer`. Load the state of an earlier run only after this
            call; its bfloat16 moments are then widened to float32.

    Returns:
        The attached hooks; `remove` detaches them.

    Raises:
        ValueError: `optimizer` is not an optimiser of torch 2.6 or newer, has no bfloat16
            parameter, or has bfloat16 moments already.
    """
    return _attached(optimizer, carry=False)


def compensate(optimizer: Any) -> NarrowParameters:
    """Carry the part of each update lost in rounding to bfloat16 into the next step (Kahan).

    The carry takes 2 bytes per parameter in the optimiser's state; moments are float32.

    Args:
        optimizer: see `round_stochastically`.

    Returns:
        The attached hooks; `remove` detaches them.

    Raises:
        ValueError: see `round_stochastically`.
    """
    return _attached(optimizer, carry=True)


def stochastic(wide: Any) -> Any:
    """Round a float32 tensor to bfloat16 up or down at random, so that the mean is exact.

    A random 16-bit integer is added to the 16 low bits before they are cut off. The sum carries
    into the bits kept with just the probability of rounding away from zero.
    """
    import torch

    drawn = torch.randint(0, 1 << 16, wide.shape, dtype=torch.int32, device=wide.device)
    bits = (wide.contiguous().view(torch.int32) + drawn) & -(1 << 16)
    rounded = bits.view(torch.float32).to(torch.bfloat16)
    return torch.where(torch.isfinite(wide), rounded, wide.to(torch.bfloat16))


def _attached(optimizer: Any, carry: bool) -> NarrowParameters:
    if not hasattr(optimizer, "register_load_state_dict_post_hook"):
        raise ValueError(
            f"expected a torch.optim.Optimizer, torch 2.6 or newer, got a "
            f"{type(optimizer).__name__}; pass the optimiser itself, not a wrapper around it."
        )
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(str(p.dtype) == "torch.bfloat16" for p in parameters):
        raise ValueError(
            "no parameter of this optimiser is bfloat16, so nothing would be rounded: call "
            "model.to(torch.bfloat16) before you create the optimiser."
        )
    narrow = _narrow_moments(optimizer)
    if narrow:
        raise ValueError(
            f"this optimiser keeps {narrow} in bfloat16 already: create a new optimiser, attach "
            "the rounding, and only then load the saved state, which widens it to float32."
        )
    return NarrowParameters(optimizer, carry)


def _narrow_moments(optimizer: Any) -> str:
    items = (item for state in optimizer.state.values() for item in state.items())
    narrow = {name for name, x in items if str(getattr(x, "dtype", "")) == "torch.bfloat16"}
    return ", ".join(sorted(narrow - {CARRY}))
