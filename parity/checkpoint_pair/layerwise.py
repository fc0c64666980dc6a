"""Layer-by-layer comparison of two checkpoints larger than memory.

Each layer is read on both sides, applied to the activations, compared and dropped. So memory holds
one layer and the activations. Only the embedding's rows for the text are read, and the head is
applied in blocks of the vocabulary.

There are two runs. In the free run each side continues with its own activations. In the forced run
all sides get the reference's activations as input of each layer, so that a difference arises in
that layer. The reference is megalodon-hf or, where it is missing, the oracle rounded to float32.
Only forced errors have a tolerance: the rules of `parity.tolerances`, with a noise floor measured
for this layer and input. Free errors need no tolerance: they are at most the amplified error of the
input plus the forced error. Source: docs/parity.md "Big checkpoints", docs/parity.md "First
divergence".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from megalodon_jax.weights import EMBEDDING, HEAD
from parity.checkpoint_pair.files import Stored, WeightRow, compare_values
from parity.checkpoint_pair.logit_blocks import LogitsApart
from parity.checkpoint_pair.one_layer import (
    FINAL,
    JaxLayer,
    OracleLayer,
    ReferenceLayer,
    jax_logits,
    last_intermediate,
    looked_up,
    return_freed_memory,
)
from parity.checkpoint_pair.whole_model import text_case
from parity.engine.measure.compare import Comparison
from parity.engine.measure.measurement import Measurement, Verdict
from parity.engine.measure.metrics import relative_l2
from parity.engine.measure.rounding_noise import UNIT_ROUNDOFF, moved, row_blocks, summed
from parity.megalodon.edges import MegalodonEdge
from parity.megalodon.tolerance_table import NoiseFloors

WIDE = 1 << 22
"""Largest number of parameters of a layer that JAX runs in float64 too; larger layers run only in
float32."""
LOGITS_AT_ONCE, HEAD_AT_ONCE = 1 << 19, 1 << 20
"""Largest numbers of elements of the logits, and of the head, that are in memory at a time."""


@dataclass(frozen=True, slots=True)
class Step:
    """Errors of one step (embedding, layer, final norm or head) of the comparison.

    In the forced run JAX's input of the step is the reference's, in the free run JAX's own output
    of the previous step.
    """

    name: str
    """`embed`, `layers.{i}`, `norm` or `logits`."""
    free: float
    """Relative L2 difference of JAX's output from the reference's in the free run."""
    forced: float
    """Relative L2 difference of JAX's output from the reference's in the forced run: the error that
    JAX makes in this step."""
    amplification: float
    """Relative L2 difference of JAX's output in the free run from its output in the forced run,
    divided by that of the inputs; NaN if the inputs are equal, or there are none (`embed`)."""
    share: float
    """Largest error divided by its tolerance, over the gates of this step; infinite if the step has
    no gate or an error is NaN."""
    where: str
    """Intermediate and edge of the gate that `share` belongs to; empty if there is none."""


@dataclass
class LayerwiseResult:
    """Results of a layer-by-layer comparison."""

    steps: list[Step] = field(default_factory=list)
    """Errors per step, in order of computation."""
    weights: list[WeightRow] = field(default_factory=list)
    """Comparison of the stored parameters of the two checkpoints, one row per parameter."""
    measurements: list[Measurement] = field(default_factory=list)
    """Errors of intermediates in the forced run, with tolerances."""
    losses: Mapping[str, float] = field(default_factory=dict)
    """Mean negative log-likelihoods in nats in the free run, by side (`LogitsApart.losses`)."""


@dataclass(frozen=True, slots=True)
class _Flow:
    """Input and output activations of a step, (B, L, D)."""

    free: np.ndarray
    """JAX's input in the free run: its own output of the previous step."""
    fed: np.ndarray
    """The reference's input, which JAX and oracle get too in the forced run."""
    moved: np.ndarray
    """JAX's output for the input `free`."""
    going: np.ndarray
    """The reference's output for the input `fed`."""


class Walk:
    """Compares two checkpoints of one configuration layer by layer.

    Args:
        theirs: the torch side, whose weights the oracle and megalodon-hf use.
        ours: the JAX side; its tensors must match the configuration of `theirs`.
        ids: token ids (B, L) int32, below the vocabulary size.
        live: whether megalodon-hf runs and is the reference. False: the reference is the oracle,
            rounded to float32.
        report: called with a line of progress per step.

    Raises:
        ReferenceUnavailableError: `live` is set, but megalodon-hf cannot run here.
    """

    def __init__(
        self,
        theirs: Stored,
        ours: Stored,
        ids: np.ndarray,
        *,
        live: bool,
        report: Callable[[str], None],
    ):
        self.theirs, self.ours, self.ids, self.report = theirs, ours, ids, report
        self.config = theirs.config
        self.case = text_case("checkpoint", self.config, ids, digest=f"{theirs.path} {ours.path}")
        self.reference = ReferenceLayer(self.config) if live else None
        self.outcome = LayerwiseResult()
        return_freed_memory()

    def run(self) -> LayerwiseResult:
        """Compare embedding, layers, final norm and logits; return errors by step, and losses."""
        # Non-finite values fail their gates, so NumPy need not warn about them.
        with np.errstate(all="ignore"):
            free, fed = self._embed()
            for index in (*range(self.config.num_layers), FINAL):
                free, fed = self._layer(index, free, fed)
            self._logits(free, fed)
        return self.outcome

    def _embed(self) -> tuple[np.ndarray, np.ndarray]:
        self._table(EMBEDDING)
        ours, theirs = looked_up(self.ours, self.ids), looked_up(self.theirs, self.ids)
        exact = {"embed": looked_up(self.theirs, self.ids, np.float64)}
        # As elsewhere, weights (here the table) and intermediates are each perturbed by one unit
        # roundoff with random signs. Two independent perturbations give sqrt(2).
        floors = {"embed": math.sqrt(2) * UNIT_ROUNDOFF}
        live = {"embed": theirs} if self.reference else None
        self._compare("embed", "embed", {"embed": ours}, live, exact, floors)
        return ours, theirs

    def _layer(self, index: int, free: np.ndarray, fed: np.ndarray):
        last = last_intermediate(index)
        layer = JaxLayer(self.ours, self.config, index)
        self.outcome.weights += layer.weights(self.theirs)
        ours = layer.run(fed)
        after = ours[last] if np.array_equal(free, fed) else layer.run(free)[last]
        wide = layer.run(fed, "float64") if layer.size <= WIDE else None
        del layer
        oracle = OracleLayer(self.theirs, index)
        exact = oracle.run(fed)
        floors = oracle.floors(fed, exact)
        theirs = self.reference.run(self.theirs, index, fed) if self.reference else None
        going = theirs[last] if theirs else exact[last].astype(np.float32)
        name = last if index == FINAL else f"layers.{index}"
        flow = _Flow(free, fed, after, going)
        self._compare(name, last, ours, theirs, exact, floors, wide, flow)
        return after, going

    def _logits(self, free: np.ndarray, fed: np.ndarray) -> None:
        name = EMBEDDING if self.config.tied else HEAD
        if name == HEAD:
            self._table(HEAD)
        theirs, ours = self.theirs.tensors[name], self.ours.tensors[name]
        apart, rng = LogitsApart(self.case.batch.labels), np.random.default_rng(0)
        wide = fed.astype(np.float64)
        noisy, D = moved(wide, rng), self.config.model_dim
        size = max(D, min(HEAD_AT_ONCE, LOGITS_AT_ONCE // self.ids.size * D))
        for rows in row_blocks(theirs.shape, size):
            head, own = (t.read(rows).astype(np.float32) for t in (theirs, ours))
            exact = head.astype(np.float64)
            apart.add(
                rows.start,
                exact=wide @ exact.T,
                noise=moved(noisy @ moved(exact, rng).T, rng, summed(D)),
                ours=jax_logits(self.config, fed, own),
                free=jax_logits(self.config, free, own),
                theirs=self.reference.logits(fed, head) if self.reference else None,
            )
        floors = self._known(apart.floors)
        gates = apart.measurements(lambda edge: Comparison(self.case.work, edge, floors, "float32"))
        self.outcome.losses = apart.losses()
        expected = "theirs" if self.reference else "exact"
        entered = relative_l2(free, fed)
        amplification = apart.error("free", "ours") / entered if entered else math.nan
        out, forced = apart.error("free", "theirs"), apart.error("ours", expected)
        self._note("logits", "logits", gates, out, forced, amplification)

    def _table(self, name: str) -> None:
        row = compare_values(name, self.theirs.tensors[name], self.ours.tensors[name])
        self.outcome.weights.append(row)

    def _compare(
        self,
        name: str,
        last: str,
        ours: dict[str, np.ndarray],
        theirs: dict[str, np.ndarray] | None,
        exact: dict[str, np.ndarray],
        floors: Mapping[str, float],
        wide: dict[str, np.ndarray] | None = None,
        flow: _Flow | None = None,
    ) -> None:
        """Compare the intermediates of a step between all sides, and record the step's errors.

        Args:
            name: name of the step.
            last: name of the step's output among the intermediates.
            ours: JAX's intermediates in float32, in the forced run.
            theirs: megalodon-hf's intermediates for the same input; None if megalodon-hf does not
                run.
            exact: the oracle's intermediates for the same input.
            floors: noise floors (relative L2) by intermediate.
            wide: JAX's intermediates in float64; None if JAX does not run this step in float64.
            flow: activations of both runs; None for the embedding, which has no input activations.
        """
        rows = self._edge(MegalodonEdge.JAX64_ORACLE, floors).run(wide, exact) if wide else []
        rows += self._edge(MegalodonEdge.JAX32_ORACLE, floors).run(ours, exact)
        if theirs:
            rows += self._edge(MegalodonEdge.REFERENCE32_ORACLE, floors).run(theirs, exact)
            rows += self._edge(MegalodonEdge.JAX32_REFERENCE32, floors).run(ours, theirs)
        forced = relative_l2(ours[last], (theirs or exact)[last])
        out, amplification = forced, math.nan
        if flow is not None:
            out = relative_l2(flow.moved, flow.going)
            entered = relative_l2(flow.free, flow.fed)
            response = relative_l2(flow.moved, ours[last])
            amplification = response / entered if entered else math.nan
        self._note(name, last, rows, out, forced, amplification)

    def _note(self, name, last, rows: list[Measurement], out, forced, amplification) -> None:
        rows = [row for row in rows if row.verdict is not Verdict.INFO or row.quantity == "logits"]
        if not math.isfinite(out):
            # All forced errors may pass although one side has diverged in the free run.
            at = self._edge(MegalodonEdge.JAX32_REFERENCE32, {})
            rows.append(at.missing(last, "not finite in the free run on at least one side"))
        self.outcome.measurements += rows
        share, where = _closest(rows)
        self.outcome.steps.append(Step(name, out, forced, amplification, share, where))
        done, total = len(self.outcome.steps), self.config.num_layers + 3
        self.report(
            f"  {name} ({done} of {total}): forced {forced:.1e}, free {out:.1e}, "
            f"{share:.2g} of a tolerance used"
        )

    def _edge(self, edge: MegalodonEdge, floors: Mapping[str, float]) -> Comparison:
        return Comparison(self.case.work, edge, self._known(floors), edge.dtype)

    def _known(self, floors: Mapping[str, float]) -> NoiseFloors:
        responses = {name: (floor,) for name, floor in floors.items()}
        return NoiseFloors({"checkpoint": {"hash": self.case.hash, "responses": responses}})


def _closest(rows: list[Measurement]) -> tuple[float, str]:
    """Return the largest error divided by its tolerance, and that gate's intermediate and edge.

    Intermediate and edge are one text. An error that is NaN counts as infinite. Without gates, the
    result is (infinity, "").
    """
    gates = [row for row in rows if row.verdict is not Verdict.INFO]
    shares = [math.inf if math.isnan(row.fraction) else row.fraction for row in gates]
    share = max(shares, default=math.inf)
    row = gates[shares.index(share)] if gates else None
    return share, "" if row is None else f"{row.quantity} ({row.edge})"
