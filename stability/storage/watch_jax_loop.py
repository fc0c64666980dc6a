"""Watch of an optax training loop for frozen parameters, one step in N.

A pure function samples parameters and updates inside the training step. The host reads the sample
of the steps that are due. Source: docs/training.md "Watch a run while it trains".
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megalodon_jax.weights import named_leaves
from stability.storage.frozen_watch import pick
from stability.storage.watch_looks import Seen, Take, follow

SHARE = 0.01
"""Size from which an update counts as intended, relative to the root mean square of the leaf's
nonzero updates."""


class JaxLooks:
    """Samples steps of a JAX training: call `sample` inside the step and `record` after it.

    Attributes:
        leaves: the watched leaves.
        absent: always empty; in `TorchLooks` it has the reasons why parameters are not watched.
        step: number of recorded steps.
        skipped: due steps that were not inspected, since all updates were 0 or one was not finite.
        waited: seconds spent waiting for the device to finish the training's own work.
        remedied: always False (see `TorchLooks`). In JAX the narrow optimisers return updates that
            are rounded already, so that none is lost when it is applied.
    """

    def __init__(
        self,
        params: Any,
        take: Take,
        due: Callable[[int], bool],
    ) -> None:
        """Choose the sampled elements.

        Args:
            params: the parameters, or the model that holds them.
            take: receives each look (inspected step): step number, samples by leaf name, and
                reasons by name of each leaf without a sample.
            due: function step number -> whether to inspect that step.

        Raises:
            ValueError: there are no floating-point parameters.
        """
        self._take, self._due, self.step = take, due, 0
        self.skipped, self.waited, self.remedied = 0, 0.0, False
        named = _arrays(params)
        self.leaves = [follow(n, tuple(x.shape), np.dtype(x.dtype).name) for n, x in named.items()]
        self.absent: dict[str, str] = {}
        self._without: dict[str, str] = {}
        if not self.leaves:
            raise ValueError(
                f"nothing to watch in this {type(params).__name__}: expected a pytree with "
                "floating-point parameters."
            )
        wide = any(leaf.dtype == "float64" for leaf in self.leaves)
        self._dtype = jnp.float64 if wide else jnp.float32

    def sample(self, before: Any, updates: Any, after: Any) -> Any:
        """Return the samples of one step as one array; works inside jit.

        Args:
            before: parameters before the step.
            updates: updates of the optimiser. A leaf missing in any of the three trees is not
                sampled; `record` passes the reason to `take`.
            after: parameters after the step.

        Returns:
            (3, sampled elements of all leaves), float32 or float64: before, updates, after.
        """
        trees = [_arrays(tree) for tree in (before, updates, after)]
        rows: list[list[Any]] = [[], [], []]
        self._without = {}
        for leaf in self.leaves:
            missing = next((i for i, tree in enumerate(trees) if leaf.name not in tree), None)
            if missing is not None:
                lacks = ("parameters before the step", "updates", "parameters after it")[missing]
                self._without[leaf.name] = f"no such leaf in the {lacks}"
                continue
            for row, tree in zip(rows, trees, strict=True):
                row.append(pick(tree[leaf.name], leaf.places).astype(self._dtype))
        if not rows[0]:
            return jnp.zeros((3, 0), self._dtype)
        return jnp.stack([jnp.concatenate(row) for row in rows])

    def record(self, sample: Any) -> None:
        """Count a step, and inspect its sample if the step is due.

        A due step is skipped if its updates are all 0 or not all finite; the next step that `due`
        accepts is inspected instead. Updates are all 0 between two updates of `optax.MultiSteps`,
        and if `optax.apply_if_finite` rejected a step.

        Args:
            sample: result of `sample`; None for a step without one, which is only counted.
        """
        self.step += 1
        if sample is None or not self._due(self.step):
            return
        if not getattr(sample, "is_fully_addressable", True):
            names = [leaf.name for leaf in self.leaves]
            self._take(self.step, {}, dict.fromkeys(names, "sharded: other processes hold parts"))
            return
        start = time.perf_counter()
        sample = jax.block_until_ready(sample)
        self.waited += time.perf_counter() - start
        before, updates, after = np.asarray(sample)
        if not np.isfinite(updates).all() or not updates.any():
            self.skipped += 1
            return
        seen, start = {}, 0
        for leaf in self.leaves:
            if leaf.name not in self._without:
                part = slice(start, start := start + leaf.places.size)
                seen[leaf.name] = Seen(before[part], after[part], meant(updates[part]))
        self._take(self.step, seen, dict(self._without))


def meant(updates: np.ndarray) -> np.ndarray:
    """Return a mask of the elements with an intended update, bool (k,).

    Such an update is at least `SHARE` times the root mean square of the nonzero updates. Weight
    decay alone moves the rows of unused tokens, by so little that even float32 may lose it; that
    loss does not matter.

    Args:
        updates: updates of the sampled elements of one leaf, (k,).
    """
    size = np.abs(updates)
    moved = size[size > 0]
    if not moved.size:
        return np.zeros(size.shape, bool)
    return size >= SHARE * np.sqrt(np.mean(np.square(moved, dtype=np.float64)))


def _arrays(tree: Any) -> dict[str, Any]:
    """Return the floating-point arrays of a pytree by name."""
    return {
        name: leaf
        for name, leaf in named_leaves(tree).items()
        if isinstance(leaf, (jax.Array, np.ndarray)) and jnp.issubdtype(leaf.dtype, jnp.floating)
    }
