"""Quantities: names of compared values, as used by arrays, runs and report pages.

This is the only module that builds and parses the prefixes of these names. The oracle, which shares
no code with the programs it judges, spells the prefixes out itself. Source: docs/parity.md
"Intermediates".
"""

from __future__ import annotations

import re
from enum import StrEnum

from parity.engine.measure.measurement import Kind

LOGITS, LOSS = "logits", "loss"
GENERATED = "generated"
"""Name of the quantity: token ids generated one at a time."""
WEIGHTS = "weights"
"""Name of the quantity: parameters, after conversion from one side to the other."""
LOSSES = "losses"
"""Name of the quantity: loss before each step of a training trajectory."""
_KINDS = {
    LOGITS: Kind.LOGITS,
    LOSS: Kind.LOSS,
    GENERATED: Kind.TOKENS,
    WEIGHTS: Kind.WEIGHTS,
    LOSSES: Kind.TRAJECTORY,
}


class Role(StrEnum):
    """Meaning of a quantity, as given by the prefix of its name."""

    VALUE = ""
    """The intermediate or result itself."""
    GRADIENT = "grad/"
    """Derivative of the loss with respect to a parameter."""
    COTANGENT = "bar/"
    """Derivative of the loss with respect to an intermediate."""
    STATE = "state/"
    """State that a call passes to the next one."""
    STEP = "step"
    """Result of a training step: an optimizer moment, or the displacement of a parameter."""


# A port may call an intermediate `step_size`: only a numbered step is a training step.
_STEP = re.compile(r"step(\d+)/([^/]+)/")
_DERIVED = {
    Role.GRADIENT: Kind.GRADIENT,
    Role.COTANGENT: Kind.GRADIENT,
    Role.STATE: Kind.STATE,
    Role.STEP: Kind.TRAJECTORY,
}


class Quantity(str):
    """Name of a compared array, such as `layers.0.cema` or `grad/model.embed.weight`."""

    __slots__ = ()

    @classmethod
    def gradient(cls, parameter: str) -> Quantity:
        """Name the derivative of the loss with respect to a parameter."""
        return cls(Role.GRADIENT + parameter)

    @classmethod
    def cotangent(cls, intermediate: str) -> Quantity:
        """Name the derivative of the loss with respect to an intermediate."""
        return cls(Role.COTANGENT + intermediate)

    @classmethod
    def state(cls, name: str) -> Quantity:
        """Name a state that a call passes to the next one."""
        return cls(Role.STATE + name)

    @classmethod
    def after_step(cls, step: int, what: str, parameter: str) -> Quantity:
        """Name a result of a training step, such as `step1/mu/model.embed.weight`.

        Args:
            step: number of the step, from 1.
            what: `mu` or `nu` (optimizer moments), or `drift` (displacement of the parameter).
            parameter: name of the parameter.
        """
        return cls(f"{Role.STEP}{step}/{what}/{parameter}")

    @property
    def role(self) -> Role:
        """Meaning of the quantity, such as gradient or state, parsed from the prefix."""
        if _STEP.match(self):
            return Role.STEP
        prefixed = (r for r in (Role.GRADIENT, Role.COTANGENT, Role.STATE) if self.startswith(r))
        return next(prefixed, Role.VALUE)

    @property
    def name(self) -> str:
        """Name of the parameter, intermediate or state, without the prefix."""
        # A name may contain slashes itself.
        step = _STEP.match(self)
        return self[step.end() :] if step else self.removeprefix(self.role)

    @property
    def moment(self) -> tuple[str, str] | None:
        """Number of the training step, as text, and name of its result, such as ("1", "mu"); None
        if the quantity is no result of a training step."""
        step = _STEP.match(self)
        return (step[1], step[2]) if step else None

    @property
    def stage(self) -> str:
        """Name of an intermediate without its layer: `cema` of `layers.0.cema`."""
        return self.name.rpartition(".")[2]

    @property
    def kind(self) -> Kind:
        """Family of the quantity, such as logits or gradient, by which its tolerance is chosen."""
        return _DERIVED.get(self.role) or _KINDS.get(self, Kind.BLOCK)

    @property
    def is_activation(self) -> bool:
        """Whether the quantity's values at padding need not agree: True except for the loss and for
        gradients of parameters."""
        return self != LOSS and self.role is not Role.GRADIENT


def stage_kind(quantity: str) -> Kind:
    """Return the kind of a stage of a user's program: logits, loss, gradient, or else block.

    `kind_of` gives a special kind to other names too, such as `weights`; in a user's program those
    may be ordinary stages.
    """
    kind = Quantity(quantity).kind
    return kind if kind in (Kind.LOGITS, Kind.LOSS, Kind.GRADIENT) else Kind.BLOCK


def kind_of(quantity: str) -> Kind:
    """Return the family that selects a quantity's tolerance, parsed from its name."""
    return Quantity(quantity).kind
