"""Optimisers for the survival probes: each class wraps an optax optimiser and predicts its steps.

Source: docs/stability.md "Update survival"; each optimiser's update rule is in optax's docs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, TypeVar

import jax
import optax
from optax import contrib

from megalodon_jax.weights import dotted
from stability.core.parameter_leaves import decays, is_megalodon

GRADIENT_RMS = 1e-3
"""Default root mean square of a gradient element. Only SGD's predicted steps depend on it. The
value is of the order of magnitude of the byte-level checkpoint's gradients."""


@dataclass(frozen=True, slots=True)
class Step:
    """Distribution of one optimiser step of an element."""

    size: float
    """Size of the update u without decay: |u| if that is constant, the standard deviation of u if
    normal."""
    normal: bool
    """Whether u is normally distributed around 0; otherwise it is +size or -size."""
    decay: float
    """Weight decay per step, relative to the element p: the whole step is u - decay * p."""


Self = TypeVar("Self", bound="Optimiser")


@dataclass(frozen=True)
class Optimiser:
    """Base class of the optimisers: settings, the optax transformation, the predicted step size.

    Raises:
        ValueError: the learning rate is not a positive finite number.
    """

    name: ClassVar[str] = ""
    """Name on the command line and in the function `optimiser`."""
    lr: float = 3e-4
    """Learning rate."""

    def __post_init__(self) -> None:
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise ValueError(
                f"{type(self).__name__}: lr={self.lr} must be a positive number, such as 3e-4."
            )

    def with_lr(self: Self, lr: float) -> Self:
        """Return the same optimiser at another learning rate."""
        return replace(self, lr=lr)

    def transform(self, decay: bool | None = None) -> optax.GradientTransformation:
        """Return the optax transformation.

        Args:
            decay: whether weight decay applies to all leaves; None decides per leaf by name and
                shape (`parameter_leaves.decays`).
        """
        raise NotImplementedError

    def step(self, shape: tuple[int, ...], decay: bool, rms: float = GRADIENT_RMS) -> Step:
        """Return the distribution of a step of one element, once the moments have settled.

        Args:
            shape: shape of the leaf.
            decay: whether weight decay applies to the leaf.
            rms: root mean square of the leaf's gradients, for steps that depend on it.
        """
        raise NotImplementedError

    def matrix(self, shape: tuple[int, ...]) -> bool:
        """Whether updates of leaves of this shape depend on the whole matrix, as Muon's do."""
        return False

    def describe(self) -> str:
        """Return the optimiser and its settings as text, such as "SGD(lr=0.1, momentum=0.9)"."""
        values = ", ".join(f"{f.name}={getattr(self, f.name):g}" for f in fields(self))
        return f"{type(self).__name__}({values})"


@dataclass(frozen=True)
class AdamW(Optimiser):
    """Adam with decoupled weight decay: steps are about the learning rate for any gradient size."""

    name: ClassVar[str] = "adamw"
    beta2: float = 0.999
    weight_decay: float = 0.0
    beta1: float = 0.9
    eps: float = 1e-8

    def transform(self, decay: bool | None = None) -> optax.GradientTransformation:
        """Return `optax.adamw`."""
        return optax.adamw(
            self.lr, self.beta1, self.beta2, self.eps,
            weight_decay=self.weight_decay, mask=_mask(decay),
        )  # fmt: skip

    def step(self, shape: tuple[int, ...], decay: bool, rms: float = GRADIENT_RMS) -> Step:
        """Return a step of constant size lr.

        First moment / sqrt(second moment) is 1 or -1 for a constant gradient.
        """
        return Step(self.lr, False, self.lr * self.weight_decay * decay)


@dataclass(frozen=True)
class Lion(Optimiser):
    """Lion, which steps by the sign of an interpolated momentum: every step is exactly lr."""

    name: ClassVar[str] = "lion"
    lr: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.0

    def transform(self, decay: bool | None = None) -> optax.GradientTransformation:
        """Return `optax.lion`."""
        return optax.lion(
            self.lr, self.beta1, self.beta2, weight_decay=self.weight_decay, mask=_mask(decay)
        )

    def step(self, shape: tuple[int, ...], decay: bool, rms: float = GRADIENT_RMS) -> Step:
        """Return a step of constant size lr."""
        return Step(self.lr, False, self.lr * self.weight_decay * decay)


@dataclass(frozen=True)
class SGD(Optimiser):
    """Gradient descent with heavy-ball momentum: steps are proportional to the gradient.

    Raises:
        ValueError: see `Optimiser`; or the momentum is not in [0, 1).
    """

    name: ClassVar[str] = "sgd"
    lr: float = 1e-1
    momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"SGD: momentum={self.momentum} must be in [0, 1), such as 0.9.")

    def transform(self, decay: bool | None = None) -> optax.GradientTransformation:
        """Return `optax.sgd`, which has no weight decay."""
        return optax.sgd(self.lr, momentum=self.momentum)

    def step(self, shape: tuple[int, ...], decay: bool, rms: float = GRADIENT_RMS) -> Step:
        """Return a normally distributed step.

        Its standard deviation is lr times the root mean square of the momentum buffer, if the
        gradients of different steps are independent.
        """
        velocity = rms / math.sqrt(1 - self.momentum**2)
        return Step(self.lr * velocity, True, 0.0)


@dataclass(frozen=True)
class Muon(Optimiser):
    """Muon: orthogonalised momentum for matrices, AdamW at `adam_lr` for everything else.

    Weights are (out, in) as in torch, so the reduction axis is the second one.
    """

    name: ClassVar[str] = "muon"
    lr: float = 2e-2
    beta: float = 0.95
    weight_decay: float = 0.0
    adam_lr: float = 3e-4

    def transform(self, decay: bool | None = None) -> optax.GradientTransformation:
        """Return `optax.contrib.muon`, which uses AdamW for leaves that are not matrices."""

        def numbers(params: Any) -> Any:
            spec = contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=0)
            return jax.tree.map(lambda x: spec if self.matrix(x.shape) else None, params)

        return contrib.muon(
            self.lr,
            beta=self.beta,
            weight_decay=self.weight_decay,
            weight_decay_mask=_mask(decay),
            adam_learning_rate=self.adam_lr,
            muon_weight_dimension_numbers=numbers,
        )

    def step(self, shape: tuple[int, ...], decay: bool, rms: float = GRADIENT_RMS) -> Step:
        """Return a normally distributed step for a matrix, else a step of constant size `adam_lr`.

        The standard deviation is lr times the root mean square of the entries of the orthogonalised
        update: 1 / sqrt(max(out, in)) for an (out, in) matrix, times optax's factor
        sqrt(max(1, out / in)).
        """
        if not self.matrix(shape):
            return Step(self.adam_lr, False, 0.0)
        out, into = shape
        size = self.lr * math.sqrt(max(1.0, out / into) / max(out, into))
        return Step(size, True, self.lr * self.weight_decay * decay)

    def with_lr(self, lr: float) -> Muon:
        """Return the optimiser with both learning rates scaled by the same factor."""
        return replace(self, lr=lr, adam_lr=self.adam_lr * lr / self.lr)

    def matrix(self, shape: tuple[int, ...]) -> bool:
        """Whether updates of this shape are orthogonalised: two axes, both longer than 1."""
        return len(shape) == 2 and min(shape) > 1


OPTIMISERS: dict[str, type[Optimiser]] = {o.name: o for o in (AdamW, SGD, Lion, Muon)}


def optimiser(name: str, **settings: float) -> Optimiser:
    """Return an optimiser by name, with the given settings, such as `lr` or `weight_decay`.

    Raises:
        ValueError: there is no such optimiser, it has no such setting, or a value is invalid.
    """
    kind = OPTIMISERS.get(name.lower())
    if kind is None:
        raise ValueError(
            f"unknown optimiser {name!r}: expected one of {', '.join(OPTIMISERS)}; for another "
            "optimiser whose steps are about as large as its learning rate, use adamw or lion."
        )
    names = {f.name for f in fields(kind)}
    if unknown := sorted(set(settings) - names):
        raise ValueError(
            f"{name} has no setting {', '.join(unknown)}; it has {', '.join(sorted(names))}."
        )
    return kind(**settings)


def _mask(decay: bool | None) -> Any:
    if decay is not None:
        return lambda params: jax.tree.map(lambda _: decay, params)

    def by_name(params: Any) -> Any:
        paths = [dotted(path) for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]]
        megalodon = is_megalodon(paths)
        return jax.tree_util.tree_map_with_path(
            lambda path, x: decays(dotted(path), x.shape, megalodon), params
        )

    return by_name
