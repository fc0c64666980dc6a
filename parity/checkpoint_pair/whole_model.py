"""Comparison of two whole checkpoints on a text: JAX, oracle and megalodon-hf, with gradients.

Source: docs/parity.md "The triangle", docs/parity.md "Tolerances".
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from megalodon_jax.config import MegalodonConfig
from megalodon_jax.weights import weight_table
from parity.checkpoint_pair.files import Stored
from parity.engine.measure.measurement import Measurement, Verdict
from parity.megalodon.cases import IGNORED, Batch, Case
from parity.megalodon.noise_floors import noise_responses
from parity.megalodon.reference import LiveReference
from parity.megalodon.runner import JaxSubject
from parity.megalodon.suite import Suite
from parity.megalodon.tolerance_table import NoiseFloors
from parity.recordings import RecordingError


def text_case(
    name: str,
    config: MegalodonConfig,
    ids: np.ndarray,
    weights: Mapping[str, np.ndarray] | None = None,
    digest: str | None = None,
) -> Case:
    """Return a user's checkpoint and text as a case.

    Args:
        name: name of the case.
        config: configuration of the model.
        ids: token ids (B, L) int32. Each position is to predict the next id, unless a separate
            head of `output_size` logits has no logit for it.
        weights: float32 arrays by torch name; None: the case has no weights, because they are
            compared layer by layer.
        digest: text that identifies the weights in the case's hash; None: the hash covers the
            weights themselves.
    """
    labels = ids
    if config.output_size > 0:
        labels = np.where(ids < config.output_size, ids, IGNORED).astype(np.int32)
    case = Case(name, "a user's checkpoint", length=ids.shape[1], batch_size=ids.shape[0])
    # These are cached properties, which other cases compute. Here their values are set directly.
    given: dict[str, Any] = {"config": config, "weights": dict(weights or {})}
    given["batch"] = Batch(ids, labels, np.ones(ids.shape, bool))
    vars(case).update(given)
    if digest is not None:
        text = hashlib.sha256(ids.tobytes()).hexdigest()
        definition = json.dumps([case.definition, digest, text], sort_keys=True)
        vars(case)["hash"] = hashlib.sha256(definition.encode()).hexdigest()[:16]
    return case


def triangle(theirs: Stored, ours: Stored, ids: np.ndarray, *, live: bool) -> list[Measurement]:
    """Return measurements that compare JAX, oracle and megalodon-hf, with gradients, on two
    checkpoints that fit in memory.

    Noise floors are measured with the oracle, for this checkpoint and text.

    Args:
        theirs: the torch checkpoint, whose weights the oracle and megalodon-hf use.
        ours: the JAX checkpoint; its tensors must match the configuration of `theirs`.
        ids: token ids (B, L) int32.
        live: whether to run megalodon-hf. False: nothing is compared with megalodon-hf, and one
            measurement is "not comparable".

    Raises:
        ReferenceUnavailableError: `live` is set, but megalodon-hf cannot run here.
    """
    weights = {row.name: theirs.wide(row.name) for row in weight_table(theirs.config)}
    case = text_case("checkpoint", theirs.config, ids, weights)
    own = {row.name: ours.wide(row.name) for row in weight_table(theirs.config)}
    mine = text_case("checkpoint", theirs.config, ids, own)
    suite = Suite(
        LiveReference() if live else Absent(),
        wide=Fixed(mine, JaxSubject("float64")),
        subject=Fixed(mine, JaxSubject("float32")),
    )
    # Non-finite values fail their gates, so NumPy need not warn about them.
    with np.errstate(all="ignore"):
        noise = {case.name: {"hash": case.hash, "responses": noise_responses(case)}}
        return [_about_the_checkpoint(row) for row in suite.case(case, NoiseFloors(noise))]


def _about_the_checkpoint(row: Measurement) -> Measurement:
    """Remove the tolerance of a measurement of `error_over_reference`; return others unchanged.

    The metric is JAX's error divided by megalodon-hf's. Its tolerance (JAX is no less accurate)
    applies to the committed cases only. At larger sizes the ratio depends more on the libraries
    than on the weights: a correct projection of 1024 features has 1.4 times torch's error in XLA.
    """
    if row.metric != "error_over_reference" or math.isnan(row.value):
        return row
    return dataclasses.replace(row, tolerance=math.nan, verdict=Verdict.INFO)


@dataclass(frozen=True)
class Fixed:
    """A JAX model that always runs its own `case`, whatever case is passed to `run`."""

    case: Case
    subject: JaxSubject

    def run(self, case: Case) -> dict[str, np.ndarray]:
        """Run the JAX model on `self.case`; return its results by name. `case` is ignored."""
        return self.subject.run(self.case)


class Absent:
    """Placeholder for megalodon-hf where it cannot run: a reference without results."""

    kind = "absent"
    omits = "everything"

    @property
    def provenance(self) -> dict[str, Any]:
        """An empty dictionary: there are no results."""
        return {}

    def gives(self, quantity: str) -> bool:
        """Return False for every quantity."""
        return False

    def run(self, case: Case) -> dict[str, np.ndarray]:
        """Raise RecordingError, because megalodon-hf did not run.

        The suite then reports the comparison with megalodon-hf as not comparable.
        """
        raise RecordingError("megalodon-hf did not run")

    def weights(self, case: Case) -> None:
        """Return None: no weights are available."""

    low_precision = run

    def known_differences(self) -> dict[str, np.ndarray]:
        """Return an empty dictionary: there are no results."""
        return {}
