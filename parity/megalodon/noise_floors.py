"""Results of the oracle, and their noise floors: the error that float32 rounding alone causes.

The oracle runs once unperturbed, and once per seed with every value perturbed by float32's unit
roundoff (`parity.engine.measure.rounding_noise`). A response is the relative L2 difference of a
perturbed run from the unperturbed one. The noise floor is the root mean square of the responses;
the responses themselves are stored. A correct float32 implementation cannot be expected to have a
smaller error.
Source: docs/parity.md "Tolerances".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from megalodon_jax.files import written_aside
from parity.engine.measure import rounding_noise
from parity.engine.measure.rounding_noise import SEEDS, UNIT_ROUNDOFF
from parity.executors.executor import Executor
from parity.executors.item import Item
from parity.executors.sweep import collect
from parity.megalodon import oracle, perturbation, trajectory
from parity.megalodon.cases import NEW_TOKENS, Case, by_name
from parity.megalodon.packed import streamed_documents
from parity.megalodon.ragged import combine_rows, row_alone
from parity.megalodon.tolerance_table import NOISE_FILE, NoiseFloors


def truth(case: Case, *, mask_ema: bool | None = None) -> dict[str, np.ndarray]:
    """Return every quantity of a case as computed by the oracle, in float64, by name.

    Args:
        case: any case: one forward and backward pass, a cached stream, or a training trajectory.
        mask_ema: whether padding is kept out of the EMA; None: as the case configures it.
    """
    return _run(case, _wide(case.weights), oracle.unchanged, mask_ema)


def forward_truth(case: Case) -> dict[str, np.ndarray]:
    """Return the oracle's intermediates of a case that is no stream, float64, by name.

    Loss and derivatives are not computed.
    """
    return _forward(case, _wide(case.weights), oracle.unchanged)


def noise_responses(case: Case, seeds: int = SEEDS) -> dict[str, tuple[float, ...]]:
    """Return the responses (relative L2) of all quantities to rounding, by name, one per seed."""

    def run(rng: np.random.Generator) -> dict[str, np.ndarray]:
        if case.steps:
            return trajectory.of_oracle(case, rng)
        hook = perturbation.hook(rng, case.config.model_dim)
        return _run(case, perturbation.weights(case.weights, rng), hook, None)

    return rounding_noise.responses(truth(case), run, seeds)


def forward_responses(case: Case, seeds: int = SEEDS) -> dict[str, tuple[float, ...]]:
    """Return the responses (relative L2) of intermediates to rounding, by name, one per seed."""

    def run(rng: np.random.Generator) -> dict[str, np.ndarray]:
        weights = perturbation.weights(case.weights, rng)
        return _forward(case, weights, perturbation.hook(rng, case.config.model_dim))

    return rounding_noise.responses(forward_truth(case), run, seeds)


def forced_floors(case: Case, seeds: int = SEEDS) -> dict[str, float]:
    """Return the noise floor of every intermediate computed from correct inputs, by name.

    It is the root mean square of the relative L2 changes over `seeds` perturbed runs. The weights,
    the inputs and the result of a stage are perturbed. Each stage starts from the oracle's exact
    values, so no perturbation accumulates over several stages.
    """
    exact = forward_truth(case)

    def run(rng: np.random.Generator) -> dict[str, np.ndarray]:
        found, move = {}, perturbation.hook(rng, case.config.model_dim)

        def hook(name: str, value: np.ndarray) -> np.ndarray:
            found[name] = move(name, value)
            return rounding_noise.moved(exact[name], rng)

        _forward(case, perturbation.weights(case.weights, rng), hook)
        return found

    return rounding_noise.floors(exact, run, seeds)


def extended(floors: NoiseFloors, cases: Iterable[Case]) -> NoiseFloors:
    """Measure the noise floors of `cases`; return them together with `floors`.

    Used for cases that are not in the committed file, such as a user's checkpoint. A case that
    `floors` contains too gets the new noise floors.
    """
    entries = {case.name: {"hash": case.hash, "responses": noise_responses(case)} for case in cases}
    return NoiseFloors(floors.cases | entries)


def responses_of(name: str) -> dict[str, list[float]]:
    """Return `noise_responses` of the case called `name`, as JSON data; run by workers."""
    found = noise_responses(by_name(name))
    return {quantity: [float(value) for value in values] for quantity, values in found.items()}


def shared_responses(
    cases: Iterable[Case], executor: Executor, report: Callable[[str], None] = lambda line: None
) -> dict[str, dict[str, list[float]]]:
    """Return the responses of each case, by case name and quantity, computed by workers.

    Args:
        cases: cases of `parity.megalodon.cases.CASES`; workers find them by name.
        executor: runs one work item per case.
        report: receives lines of progress.

    Raises:
        RuntimeError: a worker failed.
    """
    items = [Item(case.name, f"{__name__}:responses_of", {"name": case.name}) for case in cases]
    return {answer.name: answer.value for answer in collect(items, executor, report=report)}


def write(
    cases: Iterable[Case],
    path: Path = NOISE_FILE,
    responses: Mapping[str, Mapping[str, Sequence[float]]] | None = None,
) -> None:
    """Rewrite the file of noise floors with the responses of the cases; review it as a diff.

    Each line of the file is one quantity with its response to every seed. The root mean square of
    the responses is the noise floor. Their scatter shows by how much two machines may differ
    (docs/verdicts.md).

    Args:
        cases: all cases of the file, which is overwritten.
        path: the JSON file.
        responses: responses by case name and quantity, as returned by `shared_responses`; None:
            measure them now, in this process.
    """
    parts = []
    for case in cases:
        found = noise_responses(case) if responses is None else responses[case.name]
        lines = [
            f"    {json.dumps(name)}: {json.dumps([float(f'{value:.2e}') for value in values])}"
            for name, values in found.items()
        ]
        head = f'  {json.dumps(case.name)}: {{\n   "hash": {json.dumps(case.hash)},'
        parts.append(head + '\n   "responses": {\n' + ",\n".join(lines) + "\n   }\n  }")
    head = f' "unit_roundoff": {UNIT_ROUNDOFF},\n "seeds": {SEEDS},\n "cases": {{\n'
    with written_aside(path) as aside:
        aside.write_text("{\n" + head + ",\n".join(parts) + "\n }\n}\n", encoding="utf-8")


def _wide(weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: np.asarray(w, np.float64) for name, w in weights.items()}


def _forward(
    case: Case, weights: dict[str, np.ndarray], hook: oracle.Hook
) -> dict[str, np.ndarray]:
    intermediates = {}

    def keep(name: str, value: np.ndarray) -> np.ndarray:
        intermediates[name] = hook(name, value)
        return intermediates[name]

    batch, mask_ema = case.batch, case.config.mask_ema
    oracle.forward(
        case.config,
        weights,
        batch.ids,
        batch.mask,
        mask_ema=mask_ema,
        hook=keep,
        segments=batch.segments,
    )
    return intermediates


def _run(
    case: Case, weights: dict[str, np.ndarray], hook: oracle.Hook, mask_ema: bool | None
) -> dict[str, np.ndarray]:
    batch = case.batch
    if case.steps:
        return trajectory.of_oracle(case)
    if case.cuts and case.documents:

        def alone(ids: np.ndarray, cuts: tuple[int, ...], follows: bool) -> dict[str, np.ndarray]:
            new = NEW_TOKENS if follows else 0
            return oracle.stream(case.config, weights, ids, cuts, new, hook=hook)

        return streamed_documents(case, alone)
    if case.cuts and batch.padded:
        rows = (row_alone(case, row) for row in range(case.batch_size))
        return combine_rows(
            case, [oracle.stream(case.config, weights, *row, NEW_TOKENS, hook=hook) for row in rows]
        )
    if case.cuts:
        return oracle.stream(case.config, weights, batch.ids, case.cuts, NEW_TOKENS, hook=hook)
    mask_ema = case.config.mask_ema if mask_ema is None else mask_ema
    return oracle.run(
        case.config,
        weights,
        batch.ids,
        batch.labels,
        batch.mask,
        mask_ema=mask_ema,
        hook=hook,
        segments=batch.segments,
    )
