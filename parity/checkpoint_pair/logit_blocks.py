"""Comparison of logits in blocks of the vocabulary, so that (B, L, V) is never in memory at once.

Source: docs/parity.md "Metrics", docs/parity.md "Big checkpoints".
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from parity.engine.measure.compare import Comparison
from parity.engine.measure.measurement import Kind, Measurement
from parity.engine.measure.quantity import LOGITS
from parity.megalodon.edges import MegalodonEdge

_FORCED = {
    MegalodonEdge.JAX32_ORACLE: ("ours", "exact"),
    MegalodonEdge.REFERENCE32_ORACLE: ("theirs", "exact"),
    MegalodonEdge.JAX32_REFERENCE32: ("ours", "theirs"),
}


class LogitsApart:
    """Errors and losses of logits, accumulated over blocks of the vocabulary.

    A block has logits (B, L, V') of five sides. Computed from the reference's hidden states are
    `ours` (JAX), `theirs` (megalodon-hf), `exact` (oracle) and `noise` (oracle, with a float32
    rounding perturbation). `free` (JAX) is computed from JAX's own hidden states. If megalodon-hf
    does not run, `exact` replaces `theirs`.

    Args:
        labels: token ids (B, L) int32, not shifted; a label -100 is no target.
    """

    def __init__(self, labels: np.ndarray):
        targets = np.full_like(labels, -100)
        targets[:, :-1] = labels[:, 1:]
        self._apart: dict[tuple[str, str], np.ndarray] = {}
        self._readers = {"free": Reader(targets), "theirs": Reader(targets)}
        self.live = False

    def add(self, start: int, **sides: np.ndarray | None) -> None:
        """Add a block of the vocabulary.

        Args:
            start: first token id of the block.
            sides: logits (B, L, V') by name of the side; `theirs` may be None.
        """
        self.live = sides["theirs"] is not None
        given = {name: block for name, block in sides.items() if block is not None}
        given = {"theirs": given["exact"]} | given
        wide = {name: block.astype(np.float64) for name, block in given.items()}
        pairs = [*_FORCED.values(), ("noise", "exact"), ("free", "theirs"), ("free", "ours")]
        with np.errstate(invalid="ignore", over="ignore"):
            for pair in pairs:
                a, e = (wide[name] for name in pair)
                sums = np.array([np.sum(np.square(a - e)), np.sum(np.square(e))])
                self._apart[pair] = self._apart.get(pair, np.zeros(2)) + sums
            for name, reader in self._readers.items():
                reader.add(start, wide[name])

    def error(self, actual: str, expected: str) -> float:
        """Return the relative L2 error of side `actual` against side `expected`.

        NaN if either side has a value that is not finite; the L2 norm of the difference if
        `expected` is all 0.
        """
        difference, scale = self._apart[actual, expected]
        if not (math.isfinite(difference) and math.isfinite(scale)):
            return math.nan
        return math.sqrt(difference / scale if scale > 0.0 else difference)

    @property
    def floors(self) -> dict[str, float]:
        """Noise floor of the logits, relative L2 over all blocks and one perturbation: a dictionary
        with one key, "logits"."""
        return {"logits": self.error("noise", "exact")}

    def measurements(self, edge: Callable[[MegalodonEdge], Comparison]) -> list[Measurement]:
        """Return measurements of the logits.

        Logits computed from the reference's hidden states have tolerances. Logits computed from
        JAX's own hidden states (`free`) give two metrics for information: the fraction of positions
        with the same most probable token, and JAX's loss minus megalodon-hf's in nats. If
        megalodon-hf does not run, the oracle takes its place in both.

        Args:
            edge: function that returns the `Comparison` of an edge, with `self.floors` as its noise
                floors.
        """
        rows = []
        for name, pair in _FORCED.items():
            if "theirs" in pair and not self.live:
                continue
            at = edge(name)
            bound = at.floors.bound(name, Kind.LOGITS, at.work, LOGITS)
            rows.append(at.gate("logits", "rel_l2", self.error(*pair), bound))
        free, theirs = self._readers["free"], self._readers["theirs"]
        facts = {
            "top1_agreement": float(np.mean(free.best == theirs.best)),
            "nll_difference": free.nll() - theirs.nll(),
        }
        name = MegalodonEdge.JAX32_REFERENCE32 if self.live else MegalodonEdge.JAX32_ORACLE
        at, note = edge(name), "free-running"
        info = (at.fact("logits", m, v, note) for m, v in facts.items())
        return [*rows, *info]

    def losses(self) -> dict[str, float]:
        """Return the mean negative log-likelihoods in nats: `jax`, from its own hidden states
        (`free`), and `reference`, of megalodon-hf, or `oracle` if megalodon-hf does not run."""
        other = "reference" if self.live else "oracle"
        return {"jax": self._readers["free"].nll(), other: self._readers["theirs"].nll()}


class Reader:
    """Finds each position's most probable token and its target's log-likelihood, block by block.

    Args:
        targets: token id that each position should predict, (B, L); -100: no target.
    """

    def __init__(self, targets: np.ndarray):
        self.targets = targets
        self.best = np.zeros(targets.shape, np.int64)
        self._peak = np.full(targets.shape, -np.inf)
        self._total = np.zeros(targets.shape)
        self._chosen = np.full(targets.shape, np.nan)

    def add(self, start: int, logits: np.ndarray) -> None:
        """Read a block of the vocabulary: logits (B, L, V'), float64, of the V' token ids from
        `start` on."""
        peak = logits.max(axis=-1)
        self.best = np.where(peak > self._peak, start + logits.argmax(axis=-1), self.best)
        top = np.maximum(peak, self._peak)
        held = self._total * np.exp(self._peak - top)
        self._total = held + np.sum(np.exp(logits - top[..., None]), axis=-1)
        self._peak = top
        here = (self.targets >= start) & (self.targets < start + logits.shape[-1])
        self._chosen[here] = logits[here, self.targets[here] - start]

    def nll(self) -> float:
        """Return the mean negative log-likelihood of the targets in nats; 0 without targets, NaN if
        a target was in no block."""
        counted = self.targets != -100
        values = self._peak + np.log(self._total) - self._chosen
        return float(np.mean(values[counted])) if counted.any() else 0.0
