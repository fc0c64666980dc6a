"""A checkpoint from outside on a text, whole: the triangle, gradients included.

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
from parity.engine.measurement import Measurement, Verdict
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
        name: what to call it.
        config: the model's configuration.
        ids: token ids (B, L) int32.
        weights: float32 arrays by torch name; None where they are compared layer by layer.
        digest: stands for the weights in the hash where there are none.
    """
    labels = ids
    if config.output_size > 0:
        labels = np.where(ids < config.output_size, ids, IGNORED).astype(np.int32)
    case = Case(name, "a checkpoint from outside", length=ids.shape[1], batch_size=ids.shape[0])
    # A case derives these from itself; here they come from outside.
    given: dict[str, Any] = {"config": config, "weights": dict(weights or {})}
    given["batch"] = Batch(ids, labels, np.ones(ids.shape, bool))
    vars(case).update(given)
    if digest is not None:
        text = hashlib.sha256(ids.tobytes()).hexdigest()
        definition = json.dumps([case.definition, digest, text], sort_keys=True)
        vars(case)["hash"] = hashlib.sha256(definition.encode()).hexdigest()[:16]
    return case


def triangle(theirs: Stored, ours: Stored, ids: np.ndarray, *, live: bool) -> list[Measurement]:
    """Compare two checkpoints that fit in memory on the whole triangle, gradients included.

    Noise floors are measured for this checkpoint and text with the oracle.

    Args:
        theirs: the torch side; the oracle and the reference compute with it.
        ours: the weights the JAX model computes with.
        ids: token ids (B, L) int32.
        live: whether megalodon-hf can run; without it the edges to it are missing, and one row
            that is not comparable says so.
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
    # What is not finite fails its gates; NumPy need not warn of it too.
    with np.errstate(all="ignore"):
        noise = {case.name: {"hash": case.hash, "responses": noise_responses(case)}}
        return [_about_the_checkpoint(row) for row in suite.case(case, NoiseFloors(noise))]


def _about_the_checkpoint(row: Measurement) -> Measurement:
    """Make information of what says more about two libraries' products than about weights.

    A healthy projection of 1024 features is 1.4 times as far from the truth in XLA as in torch: the
    rule that JAX is no less accurate than the reference belongs to the case matrix.
    """
    if row.metric != "error_over_reference" or math.isnan(row.value):
        return row
    return dataclasses.replace(row, tolerance=math.nan, verdict=Verdict.INFO)


@dataclass(frozen=True)
class Fixed:
    """A subject that computes with weights of its own, whatever case it is asked about."""

    case: Case
    subject: JaxSubject

    def run(self, case: Case) -> dict[str, np.ndarray]:
        """Return the named arrays of the case this subject was made with."""
        return self.subject.run(self.case)


class Absent:
    """Stands where megalodon-hf cannot run."""

    kind = "absent"
    omits = "everything"

    @property
    def provenance(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def gives(self, quantity: str) -> bool:
        """Nothing."""
        return False

    def run(self, case: Case) -> dict[str, np.ndarray]:
        """Refuse, as a missing recording does."""
        raise RecordingError("megalodon-hf did not run")

    def weights(self, case: Case) -> None:
        """Nothing."""

    low_precision = run

    def known_differences(self) -> dict[str, np.ndarray]:
        """Nothing."""
        return {}
