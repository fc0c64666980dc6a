"""Comparison of a whole checkpoint from outside on a text: the triangle with gradients.

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
    """Return the case of a checkpoint on a text.

    Args:
        name: name of the case.
        config: configuration of the model.
        ids: token ids (B, L) int32.
        weights: float32 arrays by torch name; None if they are compared layer by layer.
        digest: replaces the weights in the hash if there are none.
    """
    labels = ids
    if config.output_size > 0:
        labels = np.where(ids < config.output_size, ids, IGNORED).astype(np.int32)
    case = Case(name, "a checkpoint from outside", length=ids.shape[1], batch_size=ids.shape[0])
    # Other cases compute these properties; here they are given.
    given: dict[str, Any] = {"config": config, "weights": dict(weights or {})}
    given["batch"] = Batch(ids, labels, np.ones(ids.shape, bool))
    vars(case).update(given)
    if digest is not None:
        text = hashlib.sha256(ids.tobytes()).hexdigest()
        definition = json.dumps([case.definition, digest, text], sort_keys=True)
        vars(case)["hash"] = hashlib.sha256(definition.encode()).hexdigest()[:16]
    return case


def triangle(theirs: Stored, ours: Stored, ids: np.ndarray, *, live: bool) -> list[Measurement]:
    """Compare two checkpoints that fit in memory on the whole triangle, with gradients.

    Noise floors are measured for this checkpoint and text with the oracle.

    Args:
        theirs: the torch side, used by the oracle and the reference.
        ours: the weights of the JAX model.
        ids: token ids (B, L) int32.
        live: whether megalodon-hf can run. Otherwise its edges are missing, and one row is "not
            comparable".
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
    # Non-finite values fail their gates; NumPy's warnings are not needed.
    with np.errstate(all="ignore"):
        noise = {case.name: {"hash": case.hash, "responses": noise_responses(case)}}
        return [_about_the_checkpoint(row) for row in suite.case(case, NoiseFloors(noise))]


def _about_the_checkpoint(row: Measurement) -> Measurement:
    """Turn rows that depend more on the two libraries' products than on weights into information.

    The error of a healthy projection of 1024 features is 1.4 times as large in XLA as in torch. So
    the rule that JAX is at least as accurate as the reference applies to the case matrix only.
    """
    if row.metric != "error_over_reference" or math.isnan(row.value):
        return row
    return dataclasses.replace(row, tolerance=math.nan, verdict=Verdict.INFO)


@dataclass(frozen=True)
class Fixed:
    """A subject with fixed weights, used for any case."""

    case: Case
    subject: JaxSubject

    def run(self, case: Case) -> dict[str, np.ndarray]:
        """Return the named arrays of the case given to the constructor."""
        return self.subject.run(self.case)


class Absent:
    """Placeholder for a reference that cannot run."""

    kind = "absent"
    omits = "everything"

    @property
    def provenance(self) -> dict[str, Any]:
        """Return no provenance."""
        return {}

    def gives(self, quantity: str) -> bool:
        """Return False for every quantity."""
        return False

    def run(self, case: Case) -> dict[str, np.ndarray]:
        """Raise the error of a missing recording."""
        raise RecordingError("megalodon-hf did not run")

    def weights(self, case: Case) -> None:
        """Return None."""

    low_precision = run

    def known_differences(self) -> dict[str, np.ndarray]:
        """Return no results."""
        return {}
