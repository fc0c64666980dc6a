"""Quantities: what is compared, by the text that arrays, runs and pages know it by.

This is the one place that builds and reads the prefixes of their names; the oracle, which shares no
code with what it judges, spells them itself. Source: docs/parity.md "Intermediates".
"""

from __future__ import annotations

import re
from enum import StrEnum

from parity.engine.measurement import Kind

LOGITS, LOSS = "logits", "loss"
GENERATED = "generated"
"""Tokens a stream goes on with."""
WEIGHTS = "weights"
"""The parameters themselves, after a round trip through the other side's format."""
LOSSES = "losses"
"""The loss before each step of a trajectory."""
_KINDS = {
    LOGITS: Kind.LOGITS,
    LOSS: Kind.LOSS,
    GENERATED: Kind.TOKENS,
    WEIGHTS: Kind.WEIGHTS,
    LOSSES: Kind.TRAJECTORY,
}


class Role(StrEnum):
    """What a quantity is of what it is named after, and how its text starts."""

    VALUE = ""
    """The intermediate, or the result, itself."""
    GRADIENT = "grad/"
    """The derivative of the loss by a parameter."""
    COTANGENT = "bar/"
    """The derivative of the loss by an intermediate."""
    STATE = "state/"
    """What a call hands to the next one."""
    STEP = "step"
    """What a step of training left: a moment of the optimiser, or how far a parameter moved."""


# A port may well call an intermediate `step_size`: only a counted step is one of training.
_STEP = re.compile(r"step(\d+)/([^/]+)/")
_DERIVED = {
    Role.GRADIENT: Kind.GRADIENT,
    Role.COTANGENT: Kind.GRADIENT,
    Role.STATE: Kind.STATE,
    Role.STEP: Kind.TRAJECTORY,
}


class Quantity(str):
    """The name of what is compared, such as `layers.0.cema` or `grad/model.embed.weight`."""

    __slots__ = ()

    @classmethod
    def gradient(cls, parameter: str) -> Quantity:
        """Name the derivative of the loss by a parameter."""
        return cls(Role.GRADIENT + parameter)

    @classmethod
    def cotangent(cls, intermediate: str) -> Quantity:
        """Name the derivative of the loss by an intermediate."""
        return cls(Role.COTANGENT + intermediate)

    @classmethod
    def state(cls, name: str) -> Quantity:
        """Name what a call hands to the next one."""
        return cls(Role.STATE + name)

    @classmethod
    def after_step(cls, step: int, what: str, parameter: str) -> Quantity:
        """Name what a step, counted from 1, left of a parameter: `mu`, `nu` or `drift`."""
        return cls(f"{Role.STEP}{step}/{what}/{parameter}")

    @property
    def role(self) -> Role:
        """What it is of what it is named after."""
        if _STEP.match(self):
            return Role.STEP
        prefixed = (r for r in (Role.GRADIENT, Role.COTANGENT, Role.STATE) if self.startswith(r))
        return next(prefixed, Role.VALUE)

    @property
    def name(self) -> str:
        """What it is named after: a parameter, an intermediate or a state."""
        return self.rpartition("/")[2] if self.role is Role.STEP else self.removeprefix(self.role)

    @property
    def moment(self) -> tuple[str, str] | None:
        """Of a step of training, which it is and what is compared, such as (`1`, `mu`)."""
        step = _STEP.match(self)
        return (step[1], step[2]) if step else None

    @property
    def stage(self) -> str:
        """Name of an intermediate without the layer it is in: `cema` of `layers.0.cema`."""
        return self.name.rpartition(".")[2]

    @property
    def kind(self) -> Kind:
        """The family it belongs to, by which its tolerance is chosen."""
        return _DERIVED.get(self.role) or _KINDS.get(self, Kind.BLOCK)

    @property
    def is_activation(self) -> bool:
        """Whether it has a value at each token, of which masked ones may mean something else."""
        return self != LOSS and self.role is not Role.GRADIENT


def stage_kind(quantity: str) -> Kind:
    """Return the family of a stage of anybody's program, which may well call one `weights`."""
    kind = Quantity(quantity).kind
    return kind if kind in (Kind.LOGITS, Kind.LOSS, Kind.GRADIENT) else Kind.BLOCK


def kind_of(quantity: str) -> Kind:
    """Return the family of a quantity by its name."""
    return Quantity(quantity).kind
