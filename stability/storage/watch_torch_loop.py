"""Watch of a torch training loop for frozen parameters, one step in N.

A hook runs after each optimiser step. It samples every parameter before and after an inspected
step; other steps are only counted. The values before a step are those after the previous one, so
that no hook before the step is needed. Samples stay on the device until both are taken. Source:
docs/training.md "Watch a run while it trains".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from stability.storage.torch_narrow import CARRY, NarrowParameters
from stability.storage.watch_looks import Followed, Seen, Take, follow

Hook: TypeAlias = Callable[[Any, Any, Any], None]
_STRIDED = "torch.strided"


@dataclass(frozen=True)
class _Target:
    """A watched parameter."""

    leaf: Followed
    parameter: Any
    group: dict[str, Any]
    """The optimiser's parameter group that contains the parameter, with its learning rate."""
    places: Any
    """Tensor of `Followed.places` on the parameter's device."""


class TorchLooks:
    """Hook on a torch optimiser that inspects steps; an inspection is called a look.

    Attributes:
        leaves: the watched leaves.
        absent: reason by name of each parameter that is not watched.
        step: optimiser steps so far, without skipped ones.
        skipped: steps in which a loss scaler found infinite gradients, so that nothing changed.
        waited: seconds spent waiting for the device to finish the training's own work.
        remedied: whether this project's stochastic rounding or Kahan summation is attached, so that
            no update is lost although stored values do not change.
    """

    def __init__(
        self,
        optimizer: Any,
        named_parameters: Iterable[tuple[str, Any]],
        take: Take,
        due: Callable[[int], bool],
        guard: Callable[[Hook], Hook] = lambda hook: hook,
    ) -> None:
        """Attach the hook.

        Args:
            optimizer: a `torch.optim.Optimizer`.
            named_parameters: `model.named_parameters()`.
            take: receives each look: step number, samples by parameter name, and reasons by name of
                each parameter without a sample.
            due: function step number -> whether to inspect that step.
            guard: wraps the hook, so that an error in it does not reach the training.

        Raises:
            ValueError: `optimizer` is not a torch optimiser, or none of its parameters can be
                watched.
        """
        if not hasattr(optimizer, "register_step_post_hook"):
            raise ValueError(
                f"expected a torch.optim.Optimizer, torch 2.0 or newer, got a "
                f"{type(optimizer).__name__}; pass the optimiser itself, not a wrapper around it."
            )
        self._take, self._due = take, due
        self.step, self.skipped, self.waited = 0, 0, 0.0
        self.absent: dict[str, str] = {}
        self._targets = self._followed(optimizer, dict(named_parameters))
        if not self._targets:
            why = "; ".join(f"{n}: {why}" for n, why in list(self.absent.items())[:3])
            raise ValueError(
                "nothing to watch: expected named parameters that this optimiser trains, such as "
                f"model.named_parameters(), received {why or 'none'}."
            )
        self.leaves = [target.leaf for target in self._targets]
        self._before = self._values(optimizer) if due(1) else None
        self._handle = optimizer.register_step_post_hook(guard(self._after_step))
        self.remedied = any(
            isinstance(getattr(hook, "__self__", None), NarrowParameters)
            for hook in getattr(optimizer, "_optimizer_step_post_hooks", {}).values()
        )

    @property
    def device(self) -> Any:
        """Device of the first watched parameter."""
        return self._targets[0].parameter.device

    def remove(self) -> None:
        """Detach the hook and release the samples on the device."""
        self._handle.remove()
        self._before = None

    def _followed(self, optimizer: Any, named: dict[str, Any]) -> list[_Target]:
        import torch

        groups = {p: group for group in optimizer.param_groups for p in group["params"]}
        targets = []
        for name, parameter in named.items():
            why = _why_not(parameter, groups)
            leaf = follow(name, tuple(parameter.shape), str(parameter.dtype).removeprefix("torch."))
            if not why:
                places = torch.from_numpy(leaf.places).to(parameter.device)
                try:
                    parameter.detach().take(places)
                except (RuntimeError, NotImplementedError) as error:
                    why = f"its elements cannot be read: {str(error).splitlines()[0]}"
            if why:
                self.absent[name] = why
                continue
            targets.append(_Target(leaf, parameter, groups[parameter], places))
        return targets

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        # A fused optimiser runs its step on infinite gradients too, and then changes nothing.
        # Reading the flag waits for the device.
        scaled = getattr(optimizer, "found_inf", None)
        if scaled is not None and float(scaled):
            self.skipped += 1
            return
        self.step += 1
        due = self._due(self.step)
        if due and self._before is not None:
            self._look(optimizer)
        elif self._due(self.step + 1):
            self._before = self._values(optimizer)
        else:
            self._before = None

    def _look(self, optimizer: Any) -> None:
        self.waited += _wait(self._targets[0].parameter)
        after, pushes, absent = self._values(optimizer), [], {}
        for target in self._targets:
            gradient = target.parameter.grad
            why = _why_no_update(gradient, target)
            if why:
                absent[target.leaf.name] = why
                pushes.append(None)
            else:
                pushes.append(gradient.detach().take(target.places) != 0)
        before, self._before = self._before or [], None
        here = [i for i, push in enumerate(pushes) if push is not None]
        columns = (_on_host([part[i] for i in here]) for part in (before, after, pushes))
        names = [self._targets[i].leaf.name for i in here]
        seen = {n: Seen(b, a, p) for n, b, a, p in zip(names, *columns, strict=True)}
        self._take(self.step, seen, absent)
        if self._due(self.step + 1):
            self._before = after

    def _values(self, optimizer: Any) -> list[Any]:
        values = []
        for target in self._targets:
            value = target.parameter.detach().take(target.places)
            # The Kahan carry is part of the parameter's value.
            if (carry := optimizer.state.get(target.parameter, {}).get(CARRY)) is not None:
                value = value.float() + carry.take(target.places).float()
            values.append(value)
        return values


def _wait(parameter: Any) -> float:
    """Wait until the accelerator has finished its queued work; return the seconds waited."""
    import torch

    if parameter.device.type == "cpu" or not hasattr(torch, "accelerator"):
        return 0.0
    start = time.perf_counter()
    torch.accelerator.synchronize()
    return time.perf_counter() - start


def _why_not(parameter: Any, groups: dict[Any, Any]) -> str:
    """Return why a parameter cannot be watched, or ""; `groups` has the trained ones as keys."""
    if hasattr(parameter, "to_local"):
        return "sharded: this process holds only a part of it"
    if str(parameter.layout) != _STRIDED or parameter.device.type == "meta":
        return "it has no values in this process"
    if not parameter.is_floating_point():
        return f"its dtype is {str(parameter.dtype).removeprefix('torch.')}"
    if not parameter.requires_grad:
        return "it is not trained (requires_grad is False)"
    if parameter not in groups:
        return "this optimiser does not train it"
    if not parameter.numel():
        return "it is empty in this process"
    return ""


def _why_no_update(gradient: Any, target: _Target) -> str:
    if gradient is None:
        return "it had no gradient"
    if str(gradient.layout) != _STRIDED or hasattr(gradient, "to_local"):
        return "its gradient is sparse or sharded"
    if not float(target.group.get("lr", 1.0)):
        return "its learning rate was 0"
    return ""


def _on_host(parts: Sequence[Any]) -> list[np.ndarray]:
    """Copy samples to the host as NumPy arrays, one transfer per device and dtype."""
    import torch

    groups: dict[tuple[Any, Any], list[int]] = {}
    for i, part in enumerate(parts):
        groups.setdefault((part.device, part.dtype), []).append(i)
    out: dict[int, np.ndarray] = {}
    for (_, dtype), members in groups.items():
        joined = torch.cat([parts[i] for i in members])
        # Widening narrow formats to float32 is exact, so comparisons are not affected.
        joined = joined if dtype in (torch.bool, torch.float64) else joined.float()
        flat = joined.cpu().numpy()
        ends = np.cumsum([parts[i].numel() for i in members])[:-1]
        out |= dict(zip(members, np.split(flat, ends), strict=True))
    return [out[i] for i in range(len(parts))]
