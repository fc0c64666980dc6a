"""Gradient statistics of a run, measured in real backward passes or read from an optimiser state.

There are two statistics for each row of a parameter's first axis: the size (root mean square) of an
element's gradient, and its signal, the fraction of that size that keeps its sign from step to step.
`simulate` draws synthetic gradients with these statistics. Source: docs/stability.md "Gradients of
your own".
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
"""Largest number of elements per parameter from which the signal is estimated."""


@dataclass(frozen=True)
class RowGradients:
    """Gradient statistics of a parameter by row of its first axis; a vector is one row."""

    sizes: np.ndarray
    """Root mean square of an element's gradient, over steps and the row: (rows,), or () if equal
    for all rows."""
    signals: np.ndarray
    """Fraction of an element's gradient size that keeps its sign from step to step (as in
    `simulate.Gradients`): (rows,), or () if equal for all rows."""
    shape: tuple[int, ...]
    """Shape of the parameter."""

    def rms(self) -> float:
        """Return the root mean square of the gradient over all elements of the parameter."""
        return float(np.sqrt(np.mean(np.square(self.sizes, dtype=np.float64))))

    def idle(self) -> np.ndarray:
        """Return which rows have a gradient that is always zero, bool, in the shape of `sizes`."""
        return np.asarray(self.sizes == 0)

    def sampled(self, name: str, size: int, matrix: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return sizes and signals of the elements of a sample, both in the shape of the sample.

        The elements are those that `parameter_leaves.sample` draws.

        Args:
            name: name of the parameter, which seeds the sample.
            size: largest number of elements.
            matrix: whether the sample must remain a matrix.
        """

        def part(rows: np.ndarray) -> np.ndarray:
            column = np.reshape(rows, (*rows.shape, *(1,) * (len(self.shape) - rows.ndim)))
            return sample(np.broadcast_to(column, self.shape), name, size, matrix)

        return part(self.sizes), part(self.signals)


@dataclass(frozen=True)
class KnownGradients:
    """Known gradient statistics of a model's parameters, and their source."""

    rows: Mapping[str, RowGradients]
    """Statistics by parameter name; every trained parameter has an entry."""
    source: str
    """Origin of the statistics, as text that follows the word "gradients", such as "as in the
    optimiser state"."""
    remarks: tuple[str, ...] = ()
    """Sentences shown to the user, such as a list of parameters without a gradient."""

    def describe(self) -> str:
        """Return a clause saying that gradients are drawn with these statistics."""
        return f"gradients drawn by row, of the sizes and with the signs {self.source}"


def measured(
    batches: Iterable[Any], leaves: Mapping[str, Leaf], source: str, signal: float
) -> KnownGradients:
    """Measure gradient statistics over batches; each batch is released before the next is read.

    Args:
        batches: each is a pair of a torch module and its scalar loss, whose backward pass is run
            here, or gradients (torch tensors or arrays) by parameter name or as a pytree; a
            gradient may be None.
        leaves: the model's parameters. A parameter without a gradient is taken to be untrained.
        source: origin of the batches, for messages.
        signal: fraction of a gradient's size that keeps its sign, to be assumed if there is only
            one batch, which cannot determine it.

    Raises:
        ValueError: there is no batch, a batch is of another type, a gradient has another shape than
            its parameter or is not finite, or all gradients of the parameters are zero.
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
        raise ValueError(f"{source}: no batch; expected at least one, preferably eight.")
    if not any(each.squares.any() for each in sums.values()):
        raise ValueError(
            f"{source}: all gradients of the checkpoint's {len(leaves)} parameters are zero; its "
            f"parameters are {listed(list(leaves))}, gradients came for other names: "
            f"{listed(list(strangers))}. Use the loss of the model that was saved."
        )
    without = [n for n in leaves if n not in sums]
    rows = {n: sums[n].rows(count, signal) if n in sums else nothing(leaves[n]) for n in leaves}
    words = f"as {source} gave them in {count} batch{'es' if count > 1 else ''}"
    assumed = f"One batch cannot show what share of a gradient keeps its sign: {signal:g} "
    remarks = [
        *[f"{assumed}is assumed; yield more batches."] * (count == 1),
        *[f"Assumed untrained, since there is no gradient: {listed(without)}."] * bool(without),
        *[f"Gradients that belong to no parameter: {listed(list(strangers))}."] * bool(strangers),
    ]
    return KnownGradients(rows, words, tuple(remarks))


class _Sums:
    """Sums over batches for one parameter: mean squares of the gradient by row of the parameter,
    and gradients and squared gradients of sampled elements."""

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
        """Return the statistics after `count` batches; `signal` is assumed if there is only one.

        For gradients of signal s, the squared mean over B batches is on average
        (s^2 + (1 - s^2) / B) times the mean square. The equation is solved for s after both sides
        are summed over all sampled elements: B values of a single element are too few.
        """
        total = float(np.sum(self.sampled))
        if count > 1 and total:
            share = float(np.sum(np.square(self.values))) / total
            signal = float(np.sqrt(np.clip((share - 1) / (count - 1), 0, 1)))
        sizes = np.sqrt(self.squares / count).astype(np.float32)
        return RowGradients(np.asarray(sizes), np.asarray(signal, np.float32), self.leaf.shape)


def nothing(leaf: Leaf) -> RowGradients:
    """Return the statistics of a parameter that is not trained: size and signal 0."""
    return RowGradients(np.zeros(()), np.zeros(()), leaf.shape)


def _named(batch: Any, number: int) -> dict[str, Any]:
    """Return the gradients of one batch by parameter name; `number` is for messages.

    Raises:
        ValueError: the batch is neither named gradients nor a torch module with its loss.
    """
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
            f"{type(loss).__name__}{shape}; yield loss.mean(), and not loss.item()."
        )
    module.zero_grad(set_to_none=True)
    try:
        loss.backward()
    except RuntimeError as error:
        raise ValueError(
            f"batch {number}: loss.backward() fails: {error}; yield a loss whose backward "
            "pass runs once without this command"
        ) from error
    named = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    module.zero_grad(set_to_none=True)
    return named


def _checked(name: str, gradient: Any, leaf: Leaf, number: int) -> np.ndarray:
    """Return a gradient in float32 after checking that it can belong to this parameter."""
    if tuple(gradient.shape) != leaf.shape:
        raise ValueError(
            f"batch {number}: the gradient of {leaf.name} has shape {tuple(gradient.shape)}, the "
            f"checkpoint's parameter {leaf.shape}; compute gradients with the model that was saved."
        )
    values = to_numpy(gradient) if hasattr(gradient, "detach") else np.asarray(gradient)
    values = np.asarray(values, np.float32)
    if not np.isfinite(values).all():
        raise ValueError(
            f"batch {number}: the gradient of {leaf.name} is not finite; leave this batch out, or "
            "use `megalodon-numerics activations` to find the operation it comes from."
        )
    return values
