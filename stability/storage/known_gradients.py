"""Gradients of a run where something says what they are: a real backward, or an optimiser state.

Of a parameter two things are kept by row of its first axis: how large an element's gradient is, and
what share of it keeps its sign. `simulate` draws its gradients accordingly. Source:
docs/stability.md "Gradients of your own".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from megalodon_jax.torch_files import to_numpy
from megalodon_jax.weights import named_leaves
from stability.core.parameter_leaves import Leaf, leaf_called, listed, sample

SAMPLE = 2048
"""Elements of a parameter whose signs are followed from batch to batch."""


@dataclass(frozen=True)
class RowGradients:
    """Gradients of a parameter by row of its first axis; of a vector, of all of it."""

    sizes: np.ndarray
    """Root mean square of an element, over steps and over the row: (rows,) or ()."""
    signals: np.ndarray
    """Share of it that keeps its sign, `simulate.Gradients.signal`: (rows,) or ()."""
    shape: tuple[int, ...]

    def rms(self) -> float:
        """Return the root mean square of all elements."""
        return float(np.sqrt(np.mean(np.square(self.sizes, dtype=np.float64))))

    def idle(self) -> np.ndarray:
        """Return which rows never have a gradient: (rows,) or ()."""
        return np.asarray(self.sizes == 0)

    def sampled(self, name: str, size: int, matrix: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return sizes and signals of the elements that `sample` draws of the parameter."""

        def part(rows: np.ndarray) -> np.ndarray:
            column = np.reshape(rows, (*rows.shape, *(1,) * (len(self.shape) - rows.ndim)))
            return sample(np.broadcast_to(column, self.shape), name, size, matrix)

        return part(self.sizes), part(self.signals)


@dataclass(frozen=True)
class KnownGradients:
    """What is known of the gradients of a model's parameters, and where from."""

    rows: Mapping[str, RowGradients]
    """By parameter, all of them."""
    source: str
    """In words that follow 'gradients'."""
    remarks: tuple[str, ...] = ()
    """Sentences on what did not fit."""

    def describe(self) -> str:
        """Return in words what gradients are drawn from."""
        return f"gradients drawn by row, of the sizes and with the signs {self.source}"


def measured(
    batches: Iterable[Any], leaves: Mapping[str, Leaf], source: str, signal: float
) -> KnownGradients:
    """Return what the gradients of some batches say; each is let go before the next is taken.

    Args:
        batches: of each either a torch module and its loss, whose backward is run here, or
            gradients by parameter name (or as a pytree), torch's or arrays; None for none.
        leaves: the model's parameters. One without a gradient is taken not to be trained.
        source: where they come from, for the reader.
        signal: what is assumed of one batch alone, from which it cannot be told.

    Raises:
        ValueError: there is no batch, one is something else, or its gradients are those of another
            model, of another shape, not finite or all zero.
    """
    sums: dict[str, _Sums] = {}
    strangers: dict[str, None] = {}
    count = 0
    for batch in batches:
        count += 1
        for name, gradient in _named(batch, count).items():
            leaf = leaf_called(name, leaves)
            if leaf is None:
                strangers[name] = None
            else:
                values = _checked(name, gradient, leaf, count)
                sums.setdefault(leaf.name, _Sums(leaf)).add(values)
    if not count:
        raise ValueError(f"{source}: no batch; expected one at least, and better eight.")
    if not any(each.squares.any() for each in sums.values()):
        raise ValueError(
            f"{source}: no gradient of {len(leaves)} parameters of the checkpoint but zero; its "
            f"parameters are {listed(list(leaves))}, the gradients' {listed(list(strangers))}. "
            "Take the loss of the model that was saved."
        )
    without = [n for n in leaves if n not in sums]
    rows = {n: sums[n].rows(count, signal) if n in sums else nothing(leaves[n]) for n in leaves}
    words = f"as {source} gave them in {count} batch{'es' if count > 1 else ''}"
    assumed = f"Of one batch it cannot be told what share of a gradient keeps its sign: {signal:g} "
    remarks = [
        *[f"{assumed}is assumed; yield more batches."] * (count == 1),
        *[f"No gradient, so taken not to be trained: {listed(without)}."] * bool(without),
        *[f"Gradients of no parameter of the checkpoint: {listed(list(strangers))}."]
        * bool(strangers),
    ]
    return KnownGradients(rows, words, tuple(remarks))


class _Sums:
    """Sums over batches: squares by row, and values and squares of the sampled elements."""

    def __init__(self, leaf: Leaf) -> None:
        self.leaf = leaf
        self.squares: Any = np.zeros(leaf.shape[:1] if len(leaf.shape) > 1 else ())
        self.values, self.sampled = 0.0, 0.0

    def add(self, gradient: np.ndarray) -> None:
        """Add the gradient of one batch, float32, in the parameter's shape."""
        axes = tuple(range(1, gradient.ndim)) if gradient.ndim > 1 else None
        self.squares = self.squares + np.mean(np.square(gradient), axes, dtype=np.float64)
        part = sample(gradient, self.leaf.name, SAMPLE).astype(np.float64)
        self.values, self.sampled = self.values + part, self.sampled + np.square(part)

    def rows(self, count: int, signal: float) -> RowGradients:
        """Return what is known after `count` batches.

        Of gradients of signal s the square of a mean over B batches is s^2 + (1 - s^2) / B of the
        mean square. Sums over all sampled elements come before the quotient: one element has too
        few batches.
        """
        total = float(np.sum(self.sampled))
        if count > 1 and total:
            share = float(np.sum(np.square(self.values))) / total
            signal = float(np.sqrt(np.clip((share - 1) / (count - 1), 0, 1)))
        sizes = np.sqrt(self.squares / count).astype(np.float32)
        return RowGradients(np.asarray(sizes), np.asarray(signal, np.float32), self.leaf.shape)


def nothing(leaf: Leaf) -> RowGradients:
    """Return the gradients of a parameter that is not trained."""
    return RowGradients(np.zeros(()), np.zeros(()), leaf.shape)


def _named(batch: Any, number: int) -> dict[str, Any]:
    """Return the gradients of one batch by parameter name."""
    if isinstance(batch, Mapping) or not isinstance(batch, (tuple, list)):
        named = {n: x for n, x in named_leaves(batch).items() if n and hasattr(x, "shape")}
        if not named:
            raise ValueError(
                f"batch {number} is a {type(batch).__name__}: expected gradients by parameter "
                "name, or a torch module and its loss, `yield model, loss`."
            )
        return named
    if len(batch) != 2 or not hasattr(batch[0], "named_parameters"):
        kinds = ", ".join(type(each).__name__ for each in batch)
        raise ValueError(
            f"batch {number} is a {type(batch).__name__} of {kinds or 'nothing'}: expected a torch "
            "module and its loss, `yield model, loss`."
        )
    return _backward(batch[0], batch[1], number)


def _backward(module: Any, loss: Any, number: int) -> dict[str, Any]:
    if not hasattr(loss, "backward") or loss.numel() != 1:
        shape = f" of shape {tuple(loss.shape)}" if hasattr(loss, "shape") else ""
        raise ValueError(
            f"batch {number}: expected a loss that is one torch number, got a "
            f"{type(loss).__name__}{shape}; take its mean, and not .item() of it."
        )
    module.zero_grad(set_to_none=True)
    try:
        loss.backward()
    except RuntimeError as error:
        raise ValueError(f"batch {number}: loss.backward() fails: {error}") from error
    named = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    module.zero_grad(set_to_none=True)
    return named


def _checked(name: str, gradient: Any, leaf: Leaf, number: int) -> np.ndarray:
    """Return a gradient in float32, insisting that it can be one of this parameter."""
    if tuple(gradient.shape) != leaf.shape:
        raise ValueError(
            f"batch {number}: the gradient of {leaf.name} has shape {tuple(gradient.shape)}, the "
            f"parameter of the checkpoint {leaf.shape}; take the model that was saved."
        )
    values = to_numpy(gradient) if hasattr(gradient, "detach") else np.asarray(gradient)
    values = np.asarray(values, np.float32)
    if not np.isfinite(values).all():
        raise ValueError(
            f"batch {number}: the gradient of {leaf.name} is not finite; leave this batch out, or "
            "see `megalodon-numerics activations` for where it comes from."
        )
    return values
