"""Optimiser states saved by torch: assignment to parameters, settings and an audit of moments.

`optimizer.state_dict()` numbers parameters in the order of its groups, and may store no names. A
parameter without a name gets moments only if all fitting assignments agree. Source:
docs/stability.md "Optimiser state".
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
"""Among elements with a nonzero first moment, the fraction with a second moment of 0 above which
there is an error. The step of such an element is the first moment divided by epsilon: 1e8 times
the first moment by default."""


_HOW_TO_NAME = """
    names = {p: n for n, p in model.named_parameters()}
    order = [names[p] for g in optimizer.param_groups for p in g["params"]]
    json.dump(order, open("order.json", "w"))
"""


@dataclass(frozen=True)
class ParameterOrder:
    """Sources for the order in which optimisers number a model's parameters."""

    stored: bool = True
    """Whether the file has its tensors in the module's order; safetensors sorts them by name."""
    names: Sequence[str] | None = None
    """The user's list of parameter names in the optimisers' order, over all states; None if the
    user gave none."""
    folder: Path | None = None
    """Folder in which a config.json may name the architecture."""


@dataclass(frozen=True)
class TorchState:
    """State of one optimiser, by parameter name where the assignment is certain."""

    place: str
    """File, or place in a file, that holds the state."""
    groups: tuple[Mapping[str, Any], ...]
    """`param_groups` without the parameters' numbers."""
    moments: dict[str, dict[str, Any]]
    """State of each parameter: parameter name -> torch's key, such as `exp_avg` -> tensor or
    number. An entry that cannot be assigned with certainty is called `parameter <number>`."""
    identified: str = ""
    """Method by which the entries were assigned, such as "by shape"; empty if some are not
    assigned."""
    problem: str = ""
    """Why entries are not assigned to parameters, as a clause; empty if all are assigned."""
    ambiguous: tuple[str, ...] = ()
    """Names of the parameters that could have each other's moments."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Second copies of tied parameters in the file: name of the copy -> name of the parameter."""

    @property
    def matched(self) -> bool:
        """Whether every entry is assigned to a parameter of the model."""
        return bool(self.moments) and not self.problem

    @property
    def foreign(self) -> bool:
        """Whether the state is another model's: its names or shapes are not those of this model."""
        return bool(self.problem) and not self.ambiguous

    def check_settled(self) -> None:
        """Check that the state fits the model's parameters in one way only.

        Raises:
            ValueError: several assignments fit. The message names the parameters and says how to
                pass their order.
        """
        if self.ambiguous:
            raise ValueError(
                f"{self.place}: {self.problem}. Either pass the names in the optimiser's order, "
                "--order FILE (in Python order=[...]). The training script writes this file by"
                f"{_HOW_TO_NAME}Or give the file of the weights alone, without the optimiser "
                "state. An optimiser made from model.named_parameters() (torch 2.6) stores names."
            )

    def rule(self) -> Optimiser | None:
        """Return the optimiser and its settings, as far as the state shows them; None if unknown.

        Settings are those of the first parameter group, except weight decay: it is the largest of
        all groups, and 0 for Adam with coupled decay. If a schedule changed the learning rate, the
        result has the initial rate.
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
            # Adam adds weight decay to the gradient; the step then has no decoupled decay.
            decay = decay if group.get("decoupled_weight_decay", True) else 0.0
            return AdamW(rate, betas[1], decay, betas[0], _number(group.get("eps", 1e-8)))
        if "exp_avg" in kept and len(betas) == 2:
            return Lion(rate, *betas, decay)
        if "momentum" in group and "nesterov" in group:
            return SGD(rate, _number(group["momentum"]))
        return None

    def schedule(self) -> list[str]:
        """Return a list with one line on changed learning rates; empty if none has changed.

        A schedule has changed a rate if the `lr` of a parameter group differs from `initial_lr`.
        """
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
        """Return a parameter's gradient statistics by row, derived from Adam's moments.

        None if the parameter has no `exp_avg` and `exp_avg_sq`, or they are not finite.

        After t steps a moment is divided by 1 - beta^t (bias correction). For gradients of signal
        s (the fraction that keeps its sign), the squared first moment is then on average
        (s^2 + (1 - s^2) n) times the second moment, with
        n = (1 - beta1) (1 + beta1^t) / ((1 + beta1) (1 - beta1^t)). After one step n is 1, so the
        signal cannot be determined and the default of `simulate.Gradients` is assumed. A row's size
        is the root of the mean of the second moment over its elements.
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
        size = np.sqrt(np.mean(second, axes))
        return RowGradients(np.asarray(size), np.asarray(signal), first.shape)


def read_state(
    place: str,
    state: Mapping[str, Any],
    leaves: Mapping[str, Leaf],
    order: ParameterOrder = ParameterOrder(),
) -> TorchState:
    """Read the state of one optimiser and assign its entries to the model's parameters.

    Args:
        place: file, or place in a file, that holds the state; for messages.
        state: `optimizer.state_dict()`.
        leaves: the model's parameters by name.
        order: sources for the order of the parameters.

    Raises:
        ValueError: see `read_states`.
    """
    return read_states({place: state}, leaves, order)[0]


def read_states(
    states: Mapping[str, Mapping[str, Any]],
    leaves: Mapping[str, Leaf],
    order: ParameterOrder = ParameterOrder(),
) -> list[TorchState]:
    """Read the states of a model's optimisers and assign their entries to its parameters.

    The first of these sources that settles a parameter's name is used: names in the states;
    `order.names`; the order of the leaves; shapes; the architecture in `order.folder`. The last
    three settle it only if all fitting assignments agree.

    Args:
        states: `optimizer.state_dict()` by file, or place in a file.
        leaves: the model's parameters by name.
        order: sources for the order of the parameters.

    Raises:
        ValueError: `order.names` does not fit these states: another number of names, a name that
            the model lacks or that occurs twice, or another shape.
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
        # States that share parameters, such as two snapshots of one optimiser, fit only separately.
        answers = [_settled([each], free, once, order) for each in numbered]
    else:
        answers = [found] * len(numbered)
    done = [each.state(answer, len(free)) for each, answer in zip(numbered, answers, strict=True)]
    return [replace(state, copies=twice) for state in done]


@dataclass(frozen=True)
class _Answer:
    """An assignment of numbered entries to parameters, and how it was found."""

    match: Match
    how: str
    """Method by which the assignment was found, as text for `TorchState.identified`."""
    why: str = ""
    """Why the order of ambiguous parameters is unknown, as a clause."""


@dataclass
class _Numbered:
    """The state of one optimiser as saved, with numbered parameters."""

    place: str
    settings: tuple[Mapping[str, Any], ...]
    entries: dict[Any, Mapping[str, Any]]
    slots: list[list[Slot]]
    """Slots (places of parameters) of each group."""
    own: dict[Any, str]
    """Names stored in the state, by `Slot.key`."""
    names: dict[Any, str] = field(default_factory=dict)
    """Names found so far, by `Slot.key`: the model's, or the state's own if the model lacks it."""
    strangers: list[str] = field(default_factory=list)
    """Names in the state that the model does not have, or has with another shape."""
    how: list[str] = field(default_factory=list)
    """Methods by which parameters were identified, as texts."""

    @classmethod
    def read(cls, number: int, place: str, state: Mapping[str, Any]) -> _Numbered:
        """Read `optimizer.state_dict()`; `number` is the state's index, part of each `Slot.key`."""
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
        """Identify parameters by the names in the state, and remove them from `free`.

        `free` holds the model's parameters that are not identified yet, by name.
        """
        for slot in (slot for group in self.slots for slot in group if slot.key in self.own):
            leaf = leaf_called(self.own[slot.key], free)
            if leaf is None or not slot.fits(leaf):
                self.names[slot.key] = printable(self.own[slot.key])
                self.strangers.append(self.names[slot.key])
            else:
                self.names[slot.key] = free.pop(leaf.name).name
        self.how += ["by the names in it"] * bool(self.own)

    def unnamed(self) -> list[list[Slot]]:
        """Return the slots without a name, by group; groups without such slots are left out."""
        left = [[slot for slot in group if slot.key not in self.names] for group in self.slots]
        return [group for group in left if group]

    def decays(self) -> list[float]:
        """Return the weight decay of each group in the result of `unnamed`."""
        pairs = zip(self.slots, self.settings, strict=True)
        return [_number(settings.get("weight_decay")) for group, settings in pairs
                if any(slot.key not in self.names for slot in group)]  # fmt: skip

    def state(self, answer: _Answer | None, model: int) -> TorchState:
        """Return the state by parameter name; unnamed slots are assigned where that is certain.

        Args:
            answer: the assignment; None if no assignment fits.
            model: number of the model's parameters that no name in a state identified.
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
    """Identify parameters by the user's list of names, and remove them from `free`.

    `free` holds the model's parameters that are not identified yet, by name.

    Raises:
        ValueError: the list is not as long as there are unnamed slots, names a parameter that the
            model lacks or that was named before, or one of another shape than the slot's moments.
    """
    slots = [(each, slot) for each in states for group in each.unnamed() for slot in group]
    fix = f"Write the list in the optimiser's own order:{_HOW_TO_NAME}"
    if len(names) != len(slots):
        raise ValueError(
            f"the order names {len(names)} parameters, but the optimiser state has {len(slots)} "
            f"without a name. {fix}"
        )
    for number, (name, (state, slot)) in enumerate(zip(names, slots, strict=True)):
        leaf = leaf_called(name, free)
        if leaf is None:
            raise ValueError(
                f"the order names {printable(name)} as parameter {number}, which the model does "
                "not have, or which was named before; not named yet: "
                f"{listed(list(free))}. {fix}"
            )
        if not slot.fits(leaf):
            raise ValueError(
                f"the order names {leaf.name} {leaf.shape} as parameter {number}, whose moments "
                f"have shape {slot.shape}. {fix}"
            )
        state.names[slot.key] = free.pop(leaf.name).name
        state.how = ["in the order given"]


OF_FILE = "in the order of the file"
OF_ARCHITECTURE = "in the order of the architecture in config.json"
ASSUMED = ", taken as that of the optimiser (`--order` states another, `--gradients` checks)"
"""Text shown if parameters of equal shape exist: no file records in which order the optimiser got
them, so the order of the file is an assumption."""


def _settled(
    states: Sequence[_Numbered], free: Mapping[str, Leaf], leaves: Mapping[str, Leaf],
    order: ParameterOrder,
) -> _Answer | None:  # fmt: skip
    """Assign the slots without a name to the parameters `free`; None if no assignment fits.

    Args:
        states: the optimiser states.
        free: parameters by name, without those that a name in a state identified.
        leaves: all parameters, without second copies of tied ones.
        order: sources for the order of the parameters.
    """
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
                return _Answer(found, f"{OF_ARCHITECTURE}{ASSUMED}")
            why += ", and the architecture's fits in several ways" if found else (
                ", and the architecture's does not fit")  # fmt: skip
        except UnknownOrderError as unknown:
            why += f", and {unknown}"
    return _Answer(stored or shapes, "", why)


EXCHANGED = 100.0
"""Smallest factor by which the moments of two parameters must fit measured gradients better when
exchanged, for the pair to be reported. Gradients change far less within the moments' memory."""


def exchanged(
    state: TorchState, leaves: Mapping[str, Leaf], known: Mapping[str, RowGradients]
) -> list[str]:
    """Return pairs of parameters whose moments fit measured gradients better when exchanged.

    Compared are root mean squares of gradients, measured and derived from the moments; they must
    fit better by more than the factor `EXCHANGED`. Parameters of a pair have
    equal shapes. A pair is the text "NAME and NAME".

    Args:
        state: a state with identified parameters.
        leaves: the model's parameters by name.
        known: statistics of measured gradients by parameter name.
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
        states: the checkpoint's optimiser states. The first with a supported optimiser is used;
            states of another model's parameters are skipped.
        name: name of the optimiser, which takes precedence over the states; None: that of the
            states, or AdamW if they show none. If it differs from the states' optimiser, their
            settings are not used.
        settings: settings such as `lr`, which replace those of the state.

    Raises:
        ValueError: the optimiser is unknown, has no such setting, or a value is invalid.
    """
    fit = [state for state in states if not state.foreign]
    own = next((rule for state in fit if (rule := state.rule()) is not None), None)
    if own is None or (name is not None and name != own.name):
        rule = optimiser_by_name(name or AdamW.name, **settings)
        if name or settings:
            return rule, "as asked"
        if fit:
            return rule, "assumed"
        why = "no optimiser state was given"
        if states:
            why = f"{states[0].place} is the state of another model ({states[0].problem})"
        return rule, f"assumed, since {why}; --lr and --weight-decay state them"
    kept = {f.name: getattr(own, f.name) for f in fields(own)}
    changed = f", except {', '.join(sorted(settings))}" if settings else ""
    return optimiser_by_name(own.name, **(kept | settings)), f"from the optimiser state{changed}"


def audit_torch(state: TorchState) -> list[Finding]:
    """Return findings on the dtypes and values of an optimiser's moments; empty without moments.

    Raises:
        ValueError: the state has entries but no tensor, or a beta is not in [0, 1).
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
    """Return a finding for each matrix with rows that never had a gradient, such as unused tokens.

    The finding is a warning if storage in `fmt` loses the decay of all these rows, else OK.

    Only weight decay moves such rows, by lr times decay times the value. That step is lost for
    every value if lr times decay is below 2^-(m + 2) for m mantissa bits: half of the smallest
    relative spacing of the format.

    Args:
        state: the optimiser state; a second moment of 0 in the whole row means no gradient.
        leaves: the model's parameters by name.
        rule: the optimiser; without weight decay there are no findings.
        fmt: the storage format.
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

    Tensors of several shapes, such as Adafactor's of rows and columns, are not elementwise moments.
    The result is then (-1,), a shape that no parameter has.
    """
    tensors = {k: x for k, x in entry.items() if k != "step" and hasattr(x, "shape")}
    moments = {k: x for k, x in tensors.items() if k in _MOMENTS} or tensors
    shapes = {tuple(x.shape) for x in moments.values()}
    return next(iter(shapes), None) if len(shapes) < 2 else (-1,)


def _spoiled(path: str, moment: Any) -> list[Finding]:
    # Checked in the stored dtype: a conversion to float32 would cost more than the check itself.
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
