"""Compares a torch and a JAX checkpoint on a text, whole or layer by layer, with a verdict.

Source: docs/parity.md "Your own checkpoints", docs/parity.md "Fail closed".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from parity.checkpoint_pair.files import (
    Stored,
    WeightRow,
    compare_all,
    config_differences,
    converted,
    open_checkpoint,
)
from parity.checkpoint_pair.layerwise import LayerwiseResult, Walk
from parity.checkpoint_pair.whole_model import triangle
from parity.engine.measure.measurement import Measurement, Verdict
from parity.executors.executor import Log
from parity.megalodon.intermediates import parameters_of
from parity.megalodon.reference import why_unavailable
from parity.megalodon.suite import culprit
from reports.text import count, edge_name, number, share
from reports.user_text import read_ids

# Words and exit codes as in `reports.verdict.decide`. Importing that module would take a tenth of
# the memory allowed to a layer-by-layer comparison, a quarter of the checkpoint's size.
PASS, REGRESSED, NOTHING = ("PASS", 0), ("REGRESSED", 1), ("INCOMPLETE", 5)
INCOMPLETE, NOT_COMPARABLE = ("INCOMPLETE", 3), ("NOT COMPARABLE", 4)
WHOLE_WORK = 2e9
"""Largest product of numbers of tokens and parameters for which the whole model is compared at
once: at this size the oracle's gradients take minutes."""
TAPE_PER_STATE = 128
"""Bytes that the oracle's reverse-mode derivative keeps per EMA state and token."""


@dataclass(frozen=True)
class Options:
    """Options of `megalodon-numerics parity`; its help explains each."""

    torch: Path
    jax: Path | None = None
    config: Path | None = None
    text: Path | None = None
    ids: Path | None = None
    length: int | None = None
    grad: bool | None = None
    layerwise: bool = False
    oracle_only: bool = False


@dataclass
class Result:
    """Result of comparing two checkpoints: weights, measurements and the verdict."""

    how: dict[str, str] = field(default_factory=dict)
    """Description of what is compared, by topic: both sides, text, megalodon-hf and mode."""
    weights: list[WeightRow] = field(default_factory=list)
    measurements: list[Measurement] = field(default_factory=list)
    layers: LayerwiseResult | None = None
    """Result of the layer-by-layer mode; None if that did not run."""
    verdict: tuple[str, int] = NOTHING
    """Word of the verdict, such as "PASS", and exit code."""
    sentence: str = ""
    """Explanation of the verdict, for people."""

    @property
    def unequal(self) -> list[WeightRow]:
        """Parameters and configuration fields that differ between the two sides."""
        return [row for row in self.weights if row.verdict is not Verdict.PASS]

    @property
    def gates(self) -> list[Measurement]:
        """Measurements that have a tolerance, or whose two sides could not be compared."""
        return [m for m in self.measurements if m.verdict is not Verdict.INFO]


def compare(options: Options, report: Log) -> Result:
    """Compare two checkpoints: their weights by name, then both models on the text.

    The models run whole or layer by layer, chosen by the options, their size, the length of the
    text and free memory. `report` receives lines of progress.

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: a file is corrupt, the torch side does not fit its configuration, the text does
            not fit the model, or gradients were requested in the layer-by-layer mode.
    """
    result = Result()
    theirs = open_checkpoint("torch", options.torch, options.config)
    _refuse_misfit(theirs)
    folder = options.torch if options.torch.is_dir() else options.torch.parent
    ids, source = read_ids(options.text, options.ids, folder, theirs.config, options.length)
    missing = None if options.oracle_only else why_unavailable()
    live = not options.oracle_only and missing is None
    by_layer, why = _mode(options, theirs, ids)
    reason = "not requested" if options.oracle_only else missing and f"did not run: {missing}"
    result.how = {
        "torch side": f"{options.torch}, {count(theirs.nbytes // 4, 'parameter')}",
        "JAX side": str(options.jax) if options.jax else "converted from the torch side",
        "text": source,
        "megalodon-hf": reason or "live, float32",
        "mode": why,
    }
    for subject, words in result.how.items():
        report(f"{subject}: {words}")
    ours = _other_side(options, theirs, by_layer)
    different = config_differences(theirs.config, ours.config)
    different = different or [*ours.problems(theirs.config), *ours.untied()]
    result.weights = [*theirs.untied(), *different]
    if not result.weights and by_layer:
        result.layers = Walk(theirs, ours, ids, live=live, report=report).run()
        result.weights, result.measurements = result.layers.weights, result.layers.measurements
    elif not result.weights:
        result.weights = list(compare_all(theirs, ours))
        result.measurements = triangle(theirs, ours, ids, live=live)
    if not live:
        # The verdict reports that the reference did not run; no need to repeat it in each row.
        result.measurements = [
            m for m in result.measurements if m.verdict is not Verdict.NOT_COMPARABLE
        ]
    _decide(result, missing)
    return result


def available_memory() -> float:
    """Return the bytes that this process may still allocate; infinity if no limit can be read.

    It is the smaller of the system's available memory and the unused part of the control group's
    limit.
    """
    limits = []
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        lines = (line.split() for line in meminfo.read_text(encoding="utf-8").splitlines())
        limits += [1024.0 * int(line[1]) for line in lines if line[0] == "MemAvailable:"]
    group = Path("/sys/fs/cgroup")
    try:
        most, used = (
            (group / f"memory.{n}").read_text(encoding="utf-8").strip() for n in ("max", "current")
        )
        limits += [float(most) - float(used)] if most != "max" else []
    except OSError:
        pass
    return min(limits, default=math.inf)


def _mode(options: Options, theirs: Stored, ids: np.ndarray) -> tuple[bool, str]:
    """Return whether to compare layer by layer, and a description of the chosen mode.

    Raises:
        ValueError: gradients were requested, but only the layer-by-layer mode is possible.
    """
    config, free = theirs.config, available_memory()
    states = ids.size * config.num_layers * config.model_dim * config.cema_ndim
    reason = None
    if options.layerwise:
        reason = "requested"
    elif theirs.nbytes > free / 2:
        reason = (
            f"{_gib(theirs.nbytes)} in float32 are more than half of the {_gib(free)} of memory"
        )
    elif ids.size * theirs.nbytes / 4 > WHOLE_WORK or states * TAPE_PER_STATE > free / 4:
        reason = "the oracle's gradients would take too long or too much memory"
    elif options.grad is False:
        reason = "no gradients requested"
    if reason is None:
        return False, "the whole model at once, with gradients"
    if options.grad:
        raise ValueError(
            f"parity: --grad needs the whole model at once, but the comparison has to run layer by "
            f"layer: {reason}; omit --grad, or use a smaller --length."
        )
    whole = "" if theirs.lazy else "; a torch file is read as a whole, unlike safetensors"
    return True, f"layer by layer, forward only: {reason}{whole}"


def _other_side(options: Options, theirs: Stored, by_layer: bool) -> Stored:
    if options.jax is not None:
        file = options.jax / "config.json" if options.jax.is_dir() else None
        config = theirs.config if file is None or not file.is_file() else None
        return open_checkpoint("jax", options.jax, config)
    # In the layer-by-layer mode `parity.checkpoint_pair.one_layer` converts each layer.
    if by_layer:
        return Stored("jax", theirs.path, theirs.config, theirs.tensors, theirs.lazy)
    return converted(theirs)


def _refuse_misfit(theirs: Stored) -> None:
    problems = theirs.problems(theirs.config)
    if problems:
        listing = "\n  ".join(f"{row.name}: {row.note}" for row in problems)
        raise ValueError(
            f"{theirs.path} does not fit its configuration, {count(len(problems), 'problem')}:\n"
            f"  {listing}\nCheck that config and checkpoint belong together (layers, widths, "
            "swiglu, norm_affine, output_size)."
        )


def _decide(result: Result, missing: str | None) -> None:
    """Set the verdict and sentence of `result` by its most severe problem.

    `missing` is the reason why megalodon-hf did not run although it was requested, else None.
    """
    unequal, gates = result.unequal, result.gates
    broken = [m for m in gates if m.verdict is not Verdict.PASS]
    if any(row.verdict is Verdict.NOT_COMPARABLE for row in unequal):
        result.verdict = NOT_COMPARABLE
        result.sentence = f"The two sides are not the same model: {_listed(unequal)}."
    elif unequal or broken:
        result.verdict = REGRESSED
        result.sentence = _failed(unequal, broken, bool(gates))
    elif not gates:
        result.verdict = NOTHING
        result.sentence = "Nothing was measured against a tolerance."
    elif missing:
        result.verdict = INCOMPLETE
        result.sentence = (
            f"The torch side did not run: {missing}. Everything else holds: {_holds(result)} "
            "If that is all you need, pass --oracle-only."
        )
    else:
        result.verdict = PASS
        result.sentence = _holds(result)


def _holds(result: Result) -> str:
    closest = max(result.gates, key=lambda m: m.fraction)
    return (
        f"{count(len(result.weights), 'weight')} equal by name and value, "
        f"{count(len(result.gates), 'gate')} hold; the closest is {closest.quantity} "
        f"({edge_name(closest.edge)}) at {share(closest.fraction)} of its tolerance."
    )


def _failed(unequal: Sequence[WeightRow], broken: Sequence[Measurement], ran: bool) -> str:
    weights = f"{count(len(unequal), 'weight')} not equal: {_listed(unequal)}." if unequal else ""
    start = culprit(broken)
    if start is None:
        tail = (
            "No stage leaves its tolerance on this text."
            if ran
            else "Because of that, the models were not run on the text."
        )
        return f"{weights} {tail}".strip()
    acting = parameters_of(start.quantity)
    named = [row.name for row in unequal if row.name.startswith(acting)] if acting else []
    size = start.note or f"{number(start.value)} against a tolerance of {number(start.tolerance)}"
    sentence = f"It starts at {start.quantity} ({edge_name(start.edge)}): {size}."
    if named:
        sentence += f" Its parameters differ: {', '.join(named[:4])}."
    elif acting:
        sentence += f" Its parameters: {', '.join(acting)}."
    return f"{sentence} {weights}".strip()


def _listed(rows: Sequence[WeightRow], shown: int = 4) -> str:
    items = [f"{row.name} ({row.note})" for row in rows[:shown]]
    return "; ".join([*items, f"and {len(rows) - shown:,} more"] if len(rows) > shown else items)


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"
