"""Optimiser states of torch: whose moments they are, what trained with them, and what is wrong.

`optimizer.state_dict()` numbers its parameters in the order of their groups. Where it does not name
them they are matched with the model's by shape and order. Source: docs/stability.md
"Optimiser state".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from megalodon_jax.tensor_files import printable
from megalodon_jax.torch_files import to_numpy
from stability.core.findings import Finding, Severity, judge, non_finite
from stability.core.number_formats import Format
from stability.core.parameter_leaves import Leaf, leaf_called
from stability.storage.known_gradients import RowGradients
from stability.storage.optimiser_state import FIRST_MOMENTS, SECOND_MOMENTS, SOURCE, audit_state
from stability.storage.simulate import GRADIENTS
from stability.storage.update_rules import SGD, AdamW, Lion, Muon, Optimiser
from stability.storage.update_rules import optimiser as optimiser_by_name

_MOMENTS = FIRST_MOMENTS | SECOND_MOMENTS
IDLE = 'docs/stability.md "Unused rows"'
UNDERFLOWN = 1e-3
"""Share of the moved elements whose second moment may be 0: where it is, a step is the first moment
divided by epsilon, a hundred million times too long."""


@dataclass(frozen=True)
class TorchState:
    """The state of one optimiser, by the names of its parameters."""

    place: str
    """Where it was found."""
    groups: tuple[Mapping[str, Any], ...]
    """`param_groups` without the parameters' numbers."""
    moments: dict[str, dict[str, Any]]
    """By parameter, what is kept of it: tensors and numbers, by torch's names."""
    matched: bool
    """Whether all of its parameters are among the model's."""

    def rule(self) -> Optimiser | None:
        """Return the optimiser with the settings it had, or None where it is none of ours.

        Its rate is the one a schedule started from; groups that differ count as the first.
        """
        kept = {key for moments in self.moments.values() for key in moments}
        group = self.groups[0] if self.groups else {}
        rate = _number(group.get("initial_lr", group.get("lr")))
        if not rate:
            return None
        decay = max((_number(g.get("weight_decay")) for g in self.groups), default=0.0)
        betas = tuple(_number(b) for b in group.get("betas", ()))
        if "ns_steps" in group:
            return Muon(lr=rate, beta=_number(group.get("momentum")), weight_decay=decay)
        if "exp_avg_sq" in kept and len(betas) == 2:
            # Adam's own weight decay is part of the gradient, not of the step.
            decay = decay if group.get("decoupled_weight_decay", True) else 0.0
            return AdamW(rate, betas[1], decay, betas[0], _number(group.get("eps", 1e-8)))
        if "exp_avg" in kept and len(betas) == 2:
            return Lion(rate, *betas, decay)
        if "momentum" in group and "nesterov" in group:
            return SGD(rate, _number(group["momentum"]))
        return None

    def schedule(self) -> list[str]:
        """Return in words how far a schedule has taken the rate, where there is one."""
        rates = {(_number(g["initial_lr"]), _number(g.get("lr"))) for g in self.groups
                 if "initial_lr" in g}  # fmt: skip
        moved = sorted((first, now) for first, now in rates if first != now)
        words = ", ".join(f"{first:g}, now {now:g}" for first, now in moved)
        return [f"Rates of {self.place} began at {words}; a smaller rate loses more."] * bool(moved)

    def wide_moments(self) -> bool:
        """Whether every moment is in float32 or wider."""
        kept = [x for m in self.moments.values() for k, x in m.items() if k in _MOMENTS]
        return all(str(x.dtype) in ("torch.float32", "torch.float64") for x in kept)

    def gradients(self, name: str) -> RowGradients | None:
        """Return what the moments say of a parameter's gradients, by row; None without both.

        After t steps the mean is the moment over 1 - beta^t. Of a gradient with signal s the first
        moment is on average s^2 + (1 - s^2) n of the second, squared, with n = (1 - beta1) (1 +
        beta1^t) / ((1 + beta1) (1 - beta1^t)). After one step n is 1: the signal is assumed.
        """
        kept = self.moments.get(name, {})
        if not {"exp_avg", "exp_avg_sq"} <= set(kept):
            return None
        first, second = _wide(kept["exp_avg"]), _wide(kept["exp_avg_sq"])
        if not (first.size and np.isfinite(first).all() and np.isfinite(second).all()):
            return None
        beta1, beta2 = (_number(b) for b in self.groups[0].get("betas", (0.9, 0.999)))
        if steps := _number(kept.get("step")):
            first, second = first / (1 - beta1**steps), second / (1 - beta2**steps)
        axes = tuple(range(1, first.ndim)) if first.ndim > 1 else None
        share = np.divide(first**2, second, out=np.zeros_like(first), where=second > 0)
        forgotten = beta1**steps if steps else 0.0
        noise = (1 - beta1) / (1 + beta1) * (1 + forgotten) / (1 - forgotten)
        signal = np.full_like(share := np.mean(share, axes), GRADIENTS.signal)
        if steps != 1:
            signal = np.sqrt(np.clip((share - noise) / (1 - noise), 0, 1))
        size = np.mean(np.sqrt(second), axes)
        return RowGradients(np.asarray(size), np.asarray(signal), first.shape)


def read_state(place: str, state: Mapping[str, Any], leaves: Mapping[str, Leaf]) -> TorchState:
    """Return the state of an optimiser by the names of the model's parameters.

    Args:
        place: where it was found.
        state: `optimizer.state_dict()`.
        leaves: the model's parameters, in its order; a number stands for a parameter that is none
            of them.
    """
    groups = [g for g in state["param_groups"] if isinstance(g, Mapping)]
    entries = {key: e for key, e in state["state"].items() if isinstance(e, Mapping)}
    names: dict[Any, str] = {}
    free = [leaf for leaf in leaves.values() if leaf.dtype.startswith(("float", "bfloat"))]
    for group in groups:
        keys = list(group.get("params", ()))
        own = group.get("param_names") or [k if isinstance(k, str) else None for k in keys]
        names |= _matched(keys, own, entries, free)
    moments = {names.get(key, f"parameter {key}"): dict(e) for key, e in entries.items()}
    settings = tuple({k: v for k, v in g.items() if k != "params"} for g in groups)
    matched = bool(moments) and all(name in leaves for name in moments)
    return TorchState(place, settings, moments, matched)


def trained_by(
    states: Sequence[TorchState], name: str | None = None, **settings: float
) -> tuple[Optimiser, str]:
    """Return what trained a checkpoint, and in words where its settings come from.

    Args:
        states: its optimiser states; the first whose rule is known counts.
        name: the optimiser, where the caller knows better.
        settings: what replaces settings of the state, such as `lr`.

    Raises:
        ValueError: the optimiser has no such setting, or its value makes no sense.
    """
    own = next((rule for state in states if (rule := state.rule()) is not None), None)
    if own is None or (name is not None and name != own.name):
        rule = optimiser_by_name(name or AdamW.name, **settings)
        whose = "assumed, there is no optimiser state" if not states else "assumed"
        return rule, "as asked" if name or settings else whose
    kept = {f.name: getattr(own, f.name) for f in fields(own)}
    changed = f", but for {', '.join(sorted(settings))}" if settings else ""
    return optimiser_by_name(own.name, **(kept | settings)), f"from the optimiser state{changed}"


def audit_torch(state: TorchState) -> list[Finding]:
    """Return findings on the dtypes and on the values of a torch optimiser's moments.

    Raises:
        ValueError: the state holds no tensor, as before the first step.
    """
    if not state.moments:
        return []
    group = state.groups[0] if state.groups else {}
    betas = [_number(b) for b in group.get("betas", ())]
    first = betas[0] if betas else _number(group.get("momentum")) or 0.9
    second = betas[1] if len(betas) > 1 else 0.999
    by_name = {f"{state.place}.{name}": kept for name, kept in state.moments.items()}
    findings = audit_state(by_name, second, beta1=first)
    for name, kept in by_name.items():
        for moment in _MOMENTS & set(kept):
            findings += _spoiled(f"{name}.{moment}", kept[moment])
        if "exp_avg" in kept and "exp_avg_sq" in kept:
            findings += _underflown(f"{name}.exp_avg_sq", kept["exp_avg"], kept["exp_avg_sq"])
    return findings


def idle_rows(
    state: TorchState, leaves: Mapping[str, Leaf], rule: Optimiser, fmt: Format
) -> list[Finding]:
    """Return a finding for each matrix with rows that weight decay alone moves, as unused tokens'.

    A step of lr times decay of a number is lost wherever that is below a quarter of the spacing
    above a power of two: half of the gap of the numbers whose gap is relatively smallest.
    """
    decay = getattr(rule, "weight_decay", 0.0) * rule.lr
    least, findings = 2.0 ** -(fmt.mantissa_bits + 2), []
    for name, kept in state.moments.items():
        leaf, second = leaves.get(name), kept.get("exp_avg_sq")
        if leaf is None or second is None or len(leaf.shape) != 2 or not decay:
            continue
        rows = ~np.any(to_numpy(second) != 0, axis=1)
        share = float(np.mean(rows)) if rows.size else 0.0
        if not share:
            continue
        stored = "stored" if leaf.dtype == fmt.name else "if it were stored"
        message = (
            f"{share:.0%} of its {rows.size:,} rows never had a gradient: weight decay alone moves "
            f"them, by {decay:.1e} of their value a step; {stored} in {fmt.name}, a step below "
            f"{least:.1e} is always lost"
        )
        lost = decay < least
        findings.append(
            judge("survival", name, "idle_row_fraction", share if lost else 0.0, 0.0, IDLE, message,
                  "store this parameter in float32, or do not count on its decay")
        )  # fmt: skip
    return findings


def _matched(
    keys: Sequence[Any], own: Sequence[Any], entries: Mapping[Any, Any], free: list[Leaf]
) -> dict[Any, str]:
    """Return names of a group's parameters; those of the model that were used leave `free`."""
    names, position = {}, 0
    for key, name in zip(keys, own, strict=False):
        by_name = {leaf.name: leaf for leaf in free}
        if isinstance(name, str):
            leaf = leaf_called(name, by_name)
        else:
            shape = _shape(entries.get(key, {}))
            later = [x for x in free[position:] if x.shape == shape]
            leaf = later[0] if later else None
        if leaf is not None:
            position = free.index(leaf)
            free.remove(leaf)
        if leaf is not None or isinstance(name, str):
            names[key] = leaf.name if leaf is not None else printable(name)
    return names


def _shape(entry: Mapping[str, Any]) -> tuple[int, ...] | None:
    shapes = [tuple(x.shape) for k, x in entry.items() if k != "step" and hasattr(x, "shape")]
    return shapes[0] if shapes else None


def _spoiled(path: str, moment: Any) -> list[Finding]:
    # Asked of the bits as they are: a copy in float32 would cost more than the question.
    values = to_numpy(moment)
    count = int(values.size - np.count_nonzero(np.isfinite(values)))
    return [non_finite(path, count, values.size, SOURCE)] if count else []


def _underflown(path: str, first: Any, second: Any) -> list[Finding]:
    moved, empty = to_numpy(first) != 0, to_numpy(second) == 0
    if not moved.any():
        return []
    share = float(np.count_nonzero(empty & moved) / np.count_nonzero(moved))
    message = (
        f"{share:.0%} of the elements with a first moment have a second moment of 0: their squares "
        "underflow, and their steps are the first moment divided by epsilon"
    )
    remedy = "keep second moments in float32 and scale the loss"
    return [judge("optimiser", path, "underflown", share, UNDERFLOWN, SOURCE, message, remedy,
                  severity=Severity.ERROR)]  # fmt: skip


def _wide(tensor: Any) -> np.ndarray:
    return np.asarray(to_numpy(tensor), np.float32)


def _number(value: Any) -> float:
    """Return a setting as a float; 0 for none, and for what is no number."""
    try:
        return float(value) if value is not None else 0.0
    except (TypeError, ValueError):
        return 0.0
