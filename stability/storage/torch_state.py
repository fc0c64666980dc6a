"""Optimiser states of torch: their parameters, the optimiser they came from, and their audit.

`optimizer.state_dict()` numbers parameters in the order of their groups. If it has no names, a
parameter is given moments only if no other assignment fits. Source: docs/stability.md
"Optimiser state".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from megalodon_jax.tensor_files import printable
from megalodon_jax.torch_files import to_numpy
from stability.core.findings import Finding, Severity, judge, non_finite
from stability.core.number_formats import Format
from stability.core.parameter_leaves import Leaf, leaf_called, listed
from stability.storage.known_gradients import RowGradients
from stability.storage.module_order import UnknownOrderError, module_order
from stability.storage.optimiser_state import FIRST_MOMENTS, SECOND_MOMENTS, SOURCE, audit_state
from stability.storage.parameter_matching import Match, Slot, copies, match
from stability.storage.simulate import GRADIENTS
from stability.storage.update_rules import SGD, AdamW, Lion, Muon, Optimiser
from stability.storage.update_rules import optimiser as optimiser_by_name

_MOMENTS = FIRST_MOMENTS | SECOND_MOMENTS
IDLE = 'docs/stability.md "Unused rows"'
UNDERFLOWN = 1e-3
"""Largest fraction of moving elements whose second moment may be 0. Such a step is the first moment
divided by epsilon: about 1e8 times too long."""


_HOW_TO_NAME = """
    names = {p: n for n, p in model.named_parameters()}
    order = [names[p] for g in optimizer.param_groups for p in g["params"]]
    json.dump(order, open("order.json", "w"))
"""


@dataclass(frozen=True)
class ParameterOrder:
    """Known information on the order in which optimisers number a model's parameters."""

    stored: bool = True
    """Whether the leaves are in the module's order; safetensors sorts them by name."""
    names: Sequence[str] | None = None
    """Names in the order of the numbers, over all states; given by the user."""
    folder: Path | None = None
    """Folder that may contain the architecture's config.json."""


@dataclass(frozen=True)
class TorchState:
    """State of one optimiser, by parameter name."""

    place: str
    """File that holds the state."""
    groups: tuple[Mapping[str, Any], ...]
    """`param_groups` without the parameters' numbers."""
    moments: dict[str, dict[str, Any]]
    """Tensors and numbers of each parameter, by torch's names. An entry that cannot be assigned
    with certainty is called `parameter <number>`."""
    identified: str = ""
    """How its parameters were identified, as text; empty if they were not."""
    problem: str = ""
    """Why entries are not assigned to parameters, as text; empty if all are."""
    ambiguous: tuple[str, ...] = ()
    """Names of the parameters that could have each other's moments."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Names of duplicates of tied parameters in a file, with the name of the parameter."""

    @property
    def matched(self) -> bool:
        """Whether every entry is assigned to a parameter of the model."""
        return bool(self.moments) and not self.problem

    def check_settled(self) -> None:
        """Raise if the state fits the model's parameters in several ways.

        Raises:
            ValueError: several assignments fit; the message names the parameters and a remedy.
        """
        if self.ambiguous:
            raise ValueError(
                f"{self.place}: {self.problem}. Pass the names in the optimiser's order, --order "
                "FILE (in Python order=[...]), which the training script writes by"
                f"{_HOW_TO_NAME}or give the file of the weights only, without the moments. An "
                "optimiser made from model.named_parameters() (torch 2.6) stores the names itself."
            )

    def rule(self) -> Optimiser | None:
        """Return the optimiser with its settings, or None if it is not a supported one.

        Its rate is the initial rate of a schedule. Settings are those of the first group, except
        weight decay, which is the largest of all groups.
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
            # Adam's weight decay is added to the gradient, so the step has none of its own.
            decay = decay if group.get("decoupled_weight_decay", True) else 0.0
            return AdamW(rate, betas[1], decay, betas[0], _number(group.get("eps", 1e-8)))
        if "exp_avg" in kept and len(betas) == 2:
            return Lion(rate, *betas, decay)
        if "momentum" in group and "nesterov" in group:
            return SGD(rate, _number(group["momentum"]))
        return None

    def schedule(self) -> list[str]:
        """Return a line with the initial and current rates, if a schedule changed them."""
        rates = {(_number(g["initial_lr"]), _number(g.get("lr"))) for g in self.groups
                 if "initial_lr" in g}  # fmt: skip
        moved = sorted((first, now) for first, now in rates if first != now)
        words = ", ".join(f"{first:g}, now {now:g}" for first, now in moved)
        return [f"Rates of {self.place} began at {words}; a smaller rate loses more."] * bool(moved)

    def wide_moments(self) -> bool:
        """Whether every moment is stored in float32 or wider."""
        kept = [x for m in self.moments.values() for k, x in m.items() if k in _MOMENTS]
        return all(str(x.dtype) in ("torch.float32", "torch.float64") for x in kept)

    def gradients(self, name: str) -> RowGradients | None:
        """Return a parameter's gradient statistics by row; None without first and second moments.

        After t steps the bias-corrected mean is the moment over 1 - beta^t. For gradients of signal
        s, the squared first moment is on average s^2 + (1 - s^2) n times the second, with n =
        (1 - beta1) (1 + beta1^t) / ((1 + beta1) (1 - beta1^t)). After one step n is 1, so the
        signal cannot be determined and a default is assumed.
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


def read_state(
    place: str,
    state: Mapping[str, Any],
    leaves: Mapping[str, Leaf],
    order: ParameterOrder = ParameterOrder(),
) -> TorchState:
    """Read the state of one optimiser and assign it to the model's parameters.

    Args:
        place: file that holds the state.
        state: `optimizer.state_dict()`.
        leaves: the model's parameters.
        order: known order of the leaves.

    Raises:
        ValueError: see `read_states`.
    """
    return read_states({place: state}, leaves, order)[0]


def read_states(
    states: Mapping[str, Mapping[str, Any]],
    leaves: Mapping[str, Leaf],
    order: ParameterOrder = ParameterOrder(),
) -> list[TorchState]:
    """Read the states of a model's optimisers and assign them to its parameters.

    Sources of names, in this order: the states themselves; `order.names`; the order of the leaves
    or of the architecture in `order.folder`, if all fitting assignments agree.

    Args:
        states: `optimizer.state_dict()` by file.
        leaves: the model's parameters.
        order: known order of the leaves.

    Raises:
        ValueError: `order.names` are not the names of these states' parameters.
    """
    numbered = [_Numbered.read(i, place, each) for i, (place, each) in enumerate(states.items())]
    free = {leaf.name: leaf for leaf in leaves.values() if leaf.floating}
    twice = copies([group for each in numbered for group in each.slots], list(free.values()))
    once = {n: leaf for n, leaf in free.items() if n not in twice}
    free = dict(once)
    for each in numbered:
        each.take_names(free)
    if order.names is not None:
        names = [twice.get(name, name) for name in order.names]
        _take_order(names, numbered, free)
    found = _settled(numbered, free, once, order)
    if found is None and len(numbered) > 1:
        # Optimisers that share parameters, such as two snapshots of one, are assigned separately.
        answers = [_settled([each], free, once, order) for each in numbered]
    else:
        answers = [found] * len(numbered)
    done = [each.state(answer, len(free)) for each, answer in zip(numbered, answers, strict=True)]
    return [replace(state, copies=twice) for state in done]


@dataclass(frozen=True)
class _Answer:
    """An assignment of states to parameters, and how it was found."""

    match: Match
    how: str
    why: str = ""
    """Why ambiguous parameters could not be ordered."""


@dataclass
class _Numbered:
    """A state as saved, with numbered parameters."""

    place: str
    settings: tuple[Mapping[str, Any], ...]
    entries: dict[Any, Mapping[str, Any]]
    slots: list[list[Slot]]
    """Slots of each group."""
    own: dict[Any, str]
    """Names stored in the state, by key of the slot."""
    names: dict[Any, str] = field(default_factory=dict)
    """Names of the model's parameters, by key of the slot."""
    strangers: list[str] = field(default_factory=list)
    """Names in the state that the model does not have."""
    how: list[str] = field(default_factory=list)
    """Ways in which its parameters were identified, as text."""

    @classmethod
    def read(cls, number: int, place: str, state: Mapping[str, Any]) -> _Numbered:
        """Read a state; `number` distinguishes its parameters from those of other states."""
        groups = [g for g in state["param_groups"] if isinstance(g, Mapping)]
        entries = {key: e for key, e in state["state"].items() if isinstance(e, Mapping)}
        slots, own = [], {}
        for group in groups:
            keys = list(group.get("params", ()))
            named = group.get("param_names") or [k if isinstance(k, str) else None for k in keys]
            slots.append([Slot((number, key), _shape(entries.get(key, {}))) for key in keys])
            own |= {
                (number, key): name
                for key, name in zip(keys, named, strict=False)
                if isinstance(name, str)
            }
        settings = tuple({k: v for k, v in g.items() if k != "params"} for g in groups)
        keyed = {(number, key): entry for key, entry in entries.items()}
        return cls(place, settings, keyed, slots, own)

    def take_names(self, free: dict[str, Leaf]) -> None:
        """Identify parameters by the state's own names, and remove them from `free`."""
        for slot in (slot for group in self.slots for slot in group if slot.key in self.own):
            leaf = leaf_called(self.own[slot.key], free)
            if leaf is None or not slot.fits(leaf):
                self.names[slot.key] = printable(self.own[slot.key])
                self.strangers.append(self.names[slot.key])
            else:
                self.names[slot.key] = free.pop(leaf.name).name
        self.how += ["by the names in it"] * bool(self.own)

    def unnamed(self) -> list[list[Slot]]:
        """Return the slots of each group that have no name yet, without empty groups."""
        left = [[slot for slot in group if slot.key not in self.names] for group in self.slots]
        return [group for group in left if group]

    def decays(self) -> list[float]:
        """Return the weight decay of each group of `unnamed`."""
        pairs = zip(self.slots, self.settings, strict=True)
        return [_number(settings.get("weight_decay")) for group, settings in pairs
                if any(slot.key not in self.names for slot in group)]  # fmt: skip

    def state(self, answer: _Answer | None, model: int) -> TorchState:
        """Return the state with the names that are certain.

        Args:
            answer: the assignment; None if nothing fits.
            model: number of the model's parameters without a name in a state.
        """
        left = [slot for group in self.unnamed() for slot in group]
        keys = {slot.key for slot in left}
        names, how, problem, ambiguous = dict(self.names), list(self.how), "", ()
        if answer is not None:
            names |= {key: name for name, key in answer.match.keys.items() if key in keys}
            how += [answer.how] * bool(left)
        if self.strangers:
            problem = f"{len(self.strangers)} of its parameters are not the model's: "
            problem += listed(self.strangers)
        elif answer is None:
            problem = (
                f"the shapes of its {len(left)} numbered parameters are not those of the model's "
                f"{model}"
            )
        elif answer.match.ambiguous and left:
            ambiguous = answer.match.ambiguous
            problem = (
                f"its parameters are numbered and not named, and {len(ambiguous)} of the model's "
                f"{model} could have the moments of another: {listed(list(ambiguous), 6)}. Their "
                f"order is not known: {answer.why}"
            )
        moments = {
            names.get(key, f"parameter {key[1]}"): dict(e) for key, e in self.entries.items()
        }
        identified = "" if problem or not moments else ", ".join(how)
        return TorchState(self.place, self.settings, moments, identified, problem, ambiguous)


def _take_order(names: Sequence[str], states: Sequence[_Numbered], free: dict[str, Leaf]) -> None:
    """Identify parameters by a list of names in the optimisers' order; remove them from `free`.

    Raises:
        ValueError: the length differs, or the model has no such name or another shape.
    """
    slots = [(each, slot) for each in states for group in each.unnamed() for slot in group]
    fix = f"Write the list in the optimiser's own order:{_HOW_TO_NAME}"
    if len(names) != len(slots):
        raise ValueError(
            f"the order names {len(names)} parameters, the optimiser state has {len(slots)} "
            f"without a name. {fix}"
        )
    for number, (name, (state, slot)) in enumerate(zip(names, slots, strict=True)):
        leaf = leaf_called(name, free)
        if leaf is None:
            raise ValueError(
                f"the order names {printable(name)} as parameter {number}, which the model "
                f"does not have, or which was named before; left are {listed(list(free))}. {fix}"
            )
        if not slot.fits(leaf):
            raise ValueError(
                f"the order names {leaf.name} {leaf.shape} as parameter {number}, whose moments "
                f"have shape {slot.shape}. {fix}"
            )
        state.names[slot.key] = free.pop(leaf.name).name
        state.how = ["in the order given"]


OF_FILE = "in the order of the file"
ASSUMED = ", taken as that of the optimiser (`--order` states another, `--gradients` checks)"
"""Nothing in the files says in which order the optimiser was given parameters of equal shape."""


def _settled(
    states: Sequence[_Numbered], free: Mapping[str, Leaf], leaves: Mapping[str, Leaf],
    order: ParameterOrder,
) -> _Answer | None:  # fmt: skip
    """Assign numbered states to parameters; return None if nothing fits."""
    groups = [group for each in states for group in each.unnamed()]
    decays = [decay for each in states for decay in each.decays()] if len(states) == 1 else []
    if not groups:
        return _Answer(Match(), "")
    stored = match(groups, list(free.values()), True, decays) if order.stored else None
    shapes = match(groups, list(free.values()), False, decays)
    if stored is not None and not stored.ambiguous:
        alike = shapes is not None and shapes.ambiguous
        return _Answer(stored, OF_FILE + (ASSUMED if alike else ""))
    if shapes is None or not shapes.ambiguous:
        return None if shapes is None else _Answer(shapes, "by shape")
    why = "safetensors sorts by name"
    if order.stored:
        why = "the file's fits in several ways" if stored else "the file's does not fit"
    if order.folder is not None:
        try:
            module = [x for x in module_order(order.folder, leaves) if x.name in free]
            found = match(groups, module, True, decays)
            if found is not None and not found.ambiguous:
                return _Answer(found, "in the order of the architecture in config.json")
            why += ", and the architecture's fits in several ways" if found else (
                ", and the architecture's does not fit")  # fmt: skip
        except UnknownOrderError as unknown:
            why += f", and {unknown}"
    return _Answer(stored or shapes, "", why)


EXCHANGED = 100.0
"""Ratio by which two parameters must fit measured gradients better when exchanged, to be reported.
Gradients change far less within the memory of the moments."""


def exchanged(
    state: TorchState, leaves: Mapping[str, Leaf], known: Mapping[str, RowGradients]
) -> list[str]:
    """Return pairs of parameters whose moments fit measured gradients better when exchanged.

    Only parameters of equal shape are compared. A pair is returned as text.

    Args:
        state: a state with identified parameters.
        leaves: the model's parameters.
        known: measured gradients.
    """
    sizes: dict[tuple[int, ...], dict[str, tuple[float, float]]] = {}
    for name in set(state.moments) & set(leaves) & set(known):
        own = state.gradients(name)
        both = (own.rms() if own is not None else 0.0, known[name].rms())
        if min(both) > 0:
            of_shape = sizes.setdefault(leaves[name].shape, {})
            of_shape[name] = (math.log(both[0]), math.log(both[1]))
    found = []
    for of_shape in sizes.values():
        for (a, (of_a, at_a)), (b, (of_b, at_b)) in combinations(sorted(of_shape.items()), 2):
            better = abs(of_a - at_a) + abs(of_b - at_b) - abs(of_a - at_b) - abs(of_b - at_a)
            found += [f"{a} and {b}"] * (better > math.log(EXCHANGED))
    return sorted(found)


def trained_by(
    states: Sequence[TorchState], name: str | None = None, **settings: float
) -> tuple[Optimiser, str]:
    """Return the optimiser that trained a checkpoint, and the source of its settings as text.

    Args:
        states: its optimiser states; the first with a supported optimiser is used.
        name: the optimiser, if the caller knows it.
        settings: settings such as `lr`, which replace those of the state.

    Raises:
        ValueError: the optimiser has no such setting, or its value is invalid.
    """
    own = next((rule for state in states if (rule := state.rule()) is not None), None)
    if own is None or (name is not None and name != own.name):
        rule = optimiser_by_name(name or AdamW.name, **settings)
        whose = "assumed, there is no optimiser state" if not states else "assumed"
        return rule, "as asked" if name or settings else whose
    kept = {f.name: getattr(own, f.name) for f in fields(own)}
    changed = f", except {', '.join(sorted(settings))}" if settings else ""
    return optimiser_by_name(own.name, **(kept | settings)), f"from the optimiser state{changed}"


def audit_torch(state: TorchState) -> list[Finding]:
    """Return findings on the dtypes and values of a torch optimiser's moments.

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
    """Return a finding for each matrix with rows that only weight decay moves (unused tokens).

    A decay step is lr times decay times the value. It is lost for every value if lr times decay is
    below 2^-(m + 2) for m mantissa bits: half of the smallest relative spacing of the format.
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


def _shape(entry: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the shape of a parameter's moments; None if it has none.

    Tensors of several shapes are not elementwise moments, such as Adafactor's for rows and columns.
    They get the shape (-1,), which no parameter has.
    """
    tensors = {k: x for k, x in entry.items() if k != "step" and hasattr(x, "shape")}
    moments = {k: x for k, x in tensors.items() if k in _MOMENTS} or tensors
    shapes = {tuple(x.shape) for x in moments.values()}
    return next(iter(shapes), None) if len(shapes) < 2 else (-1,)


def _spoiled(path: str, moment: Any) -> list[Finding]:
    # Checked in the stored dtype: a float32 copy would cost more than the check.
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
    """Return a setting as a float; 0 for None and for values that are not numbers."""
    try:
        return float(value) if value is not None else 0.0
    except (TypeError, ValueError):
        return 0.0
