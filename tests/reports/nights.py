"""Synthetic runs: plausible numbers for every table of the page, and nothing measured."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from parity.engine.measure.contract import Gate, contract_of
from parity.engine.measure.deviation import Deviation, Deviations, Worst
from parity.engine.measure.localize import Stage
from parity.engine.measure.measurement import Kind, Measurement, Verdict
from parity.engine.programs.explanation import Explanation
from reports.bench.figures import Times, memory_timings, timings
from reports.provenance.host import FIELDS
from reports.store.manifest import CHECKED, Manifest
from reports.store.reader import checksum
from reports.store.runs import Run
from reports.store.schema import MANIFEST, SCHEMA
from reports.store.seal import text_of
from stability.core.findings import Finding, Severity

EDGES = {"jax64:oracle": 1e-11, "reference32:oracle": 6e-6, "jax32:oracle": 4e-6}
EDGES["jax32:reference32"] = 1e-5
MODULES = ("timenorm", "cema", "rmsnorm", "attn", "ffn")
PARAMETERS = (
    *("attn.timenorm.weight", "attn.timenorm.bias", "attn.cema.alpha", "attn.cema.delta"),
    *("attn.cema.theta", "attn.cema.gamma", "attn.cema.omega", "attn.rmsnorm.weight"),
    *("attn.wz.weight", "attn.wv.weight", "attn.wr.weight", "attn.wh1.weight", "attn.gamma"),
    *("attn.beta", "ffn.norm.weight", "ffn.fc1.weight", "ffn.fc2.weight"),
)
CASES = (
    *("baseline", "chunk_minus_one", "chunk_exact", "chunk_plus_one", "three_chunks_tail"),
    *("left_padding", "interior_padding", "slow_decay", "large_mean", "norm_affine_off"),
    *("rescaled_embedding", "swiglu", "untied_head"),
)


def noise(*parts: object) -> float:
    """A repeatable number in [0, 1) that depends on the parts."""
    digest = hashlib.sha256("|".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def measurement(**changes: object) -> Measurement:
    base = Measurement(
        case="baseline",
        edge="jax32:oracle",
        quantity="logits",
        kind=Kind.LOGITS,
        stage=99,
        metric="rel_l2",
        value=1e-6,
        tolerance=4e-6,
        verdict=Verdict.PASS,
        dtype="float32",
        device="cpu",
        identity="same",
        deterministic=True,
        suite="parity" if changes.get("edge", "jax32:oracle") in EDGES else "",
    )
    return replace(base, **changes)  # pyright: ignore[reportArgumentType]


def failing(**changes: object) -> Measurement:
    return measurement(**{"value": 9e-6, "verdict": Verdict.FAIL, **changes})


def finding(**changes: object) -> Finding:
    base = Finding("values", Severity.OK, "model.embed.weight", "max", 1.0, 2.0, "spec", "fine")
    return replace(base, **changes)  # pyright: ignore[reportArgumentType]


def document(**changes: object) -> dict[str, object]:
    """The content of a run.json."""
    base: dict[str, object] = {
        "schema": SCHEMA,
        "kind": "nightly",
        "id": "2026-11-20T21-30-00Z-1a2b3c4",
        "created": "2026-11-20T21:30:00+00:00",
        "commit": "1a2b3c4d5e6f",
        "dirty": False,
        "versions": {"jax": "0.10.1", "numpy": "2.3.4"},
        "device": {"kind": "cpu", "name": "x86_64"},
        "host": dict.fromkeys(FIELDS, "known"),
        "spreads": {},
        "threads": 2,
        "flags": {"XLA_FLAGS": ""},
        "reference": {
            "kind": "recorded",
            "commit": "082db4b",
            "versions": {"torch": "2.6.0", "transformers": "4.48.0"},
            "detail": "recordings of 2026-11-02",
        },
        "durations": {"parity": 61.25},
        "suites": [
            {"name": "parity", "status": "ran", "planned": 13, "executed": 13, "reason": ""}
        ],
        "cases": [],
        "tolerances": [],
        "seams": [],
        "checkpoint": None,
    }
    return {**base, **changes}


def reseal(folder: Path, **changes: object) -> Path:
    """Edit the run.json of a stored run and give it the checksums of the files as they are now.

    So a test stores what `write_run` would not, and a reader takes it for what was stored.
    """
    content = json.loads((folder / MANIFEST).read_text(encoding="utf-8")) | changes
    names = (path for path in sorted(folder.glob("*.parquet")))
    content["files"] = {path.name: checksum(path.read_bytes()) for path in names}
    if content["schema"] < CHECKED:
        content = {n: v for n, v in content.items() if n not in ("files", "contract", "seal")}
        (folder / MANIFEST).write_text(json.dumps(content), encoding="utf-8")
    else:
        (folder / MANIFEST).write_text(text_of(content), encoding="utf-8")
    return folder


def stored_below(root: Path) -> Iterator[Path]:
    """The folders of runs in a folder, without what is derived from them."""
    return (path for path in root.iterdir() if path.is_dir() and path.name[0] != ".")


def altered(night: Run, **changes: object) -> Run:
    """The run with other parts in its run.json."""
    return replace(night, manifest=Manifest.from_json(night.manifest.to_json() | changes))


H200 = {
    **dict.fromkeys(FIELDS, "known"),
    "compute capability": "9.0",
    "memory": "143771 MiB",
    "driver": "580.65.06",
    "CUDA": "13000",
}
"""The host of a run on a GPU."""


def on_gpu(night: Run, **changes: object) -> Run:
    """The run as if an H200 had computed it."""
    shared = {
        "device": {"kind": "cuda", "name": "NVIDIA H200"},
        "host": H200,
        "threads": 16,
        "flags": {"XLA_FLAGS": "--xla_gpu_deterministic_ops=true", "matmul_precision": "highest"},
        "versions": {"jax": "0.10.2", "jax-cuda13-plugin": "0.10.2", "nvidia-cublas": "13.1"},
    }
    rows = tuple(replace(m, device="cuda") for m in night.measurements)
    return replace(altered(night, **(shared | changes)), measurements=rows)


def manifest(**changes: object) -> Manifest:
    return Manifest.from_json(document(**changes))


def run(
    *measurements: Measurement,
    findings: tuple[Finding, ...] = (),
    tensors: tuple[Deviation, ...] = (),
    **changes: object,
) -> Run:
    if changes.get("kind") == "port":
        # A port's name is its suite.
        names = [suite["name"] for suite in changes.get("suites", ())]  # pyright: ignore
        if len(names) == 1:
            measurements = tuple(replace(m, suite=names[0]) for m in measurements)
    changes = {"contract": contracted(measurements), **changes}
    return Run(manifest(**changes), measurements, findings, tensors=tensors)


def contracted(measurements: Iterable[Measurement]) -> list[dict[str, object]]:
    """The contract that planned what these measurements are, as a run.json has it."""
    gates = {Gate.of(m) for m in measurements if m.verdict is not Verdict.INFO}
    return [asdict(line) for line in contract_of(gates)]


def earlier(*measurements: Measurement, day: int = 19, **changes: object) -> Run:
    name = f"2026-11-{day:02d}T21-30-00Z-0000000"
    created = f"2026-11-{day:02d}T21:30:00+00:00"
    return run(*measurements, **{"id": name, "created": created, **changes})


def explained(case: str = "baseline", stages: int = 5) -> Explanation:
    """The account of a case whose third stage is wrong on its own."""
    rows = tuple(
        Stage(f"layers.0.{name}", free=1e-3 * (i > 1), forced=1e-3 * (i == 2), tolerance=1e-11)
        for i, name in enumerate(MODULES[:stages])
    )
    return Explanation(
        case,
        "jax64:oracle",
        rows[2].name,
        rows[2].forced,
        rows[2].tolerance,
        "wrong on its own, fed the oracle's inputs",
        rows,
        Worst((0, 4, 2), 0.1, math.inf),
        ("model.layers.0.attn.rmsnorm",),
    )


def bench(day: int = 18, speedup: float = 6.5, identity: str = "same", missing: str = "") -> Run:
    """A bench in which every ratio is about `speedup`, or one without the reference."""
    shared = {"dtype": "float32", "device": "cpu", "identity": identity}
    rows = []
    for work, base in (("forward", 0.2), ("train_step", 0.9), ("prefill", 0.2), ("decode", 0.03)):
        own = tuple(base * f for f in (1.0, 1.1, 0.9))
        other = () if missing else tuple(speedup * t for t in (base, base * 1.2, base * 0.9))
        rows += timings(work, Times(2.5, own, other, (base / 2,) * 3), missing, shared)
    other = missing or 3.1 * 2**30
    rows += memory_timings({"jax": 1.25 * 2**30, "reference": other}, shared)
    reference = {"kind": "live", "commit": "082db4b", "versions": {"torch": "2.6.0"}, "detail": ""}
    night = manifest(
        kind="bench",
        id=f"2026-11-{day:02d}T12-00-00Z-1a2b3c4-bench",
        created=f"2026-11-{day:02d}T12:00:00+00:00",
        device={"kind": "cpu", "name": "the bench's processor"},
        reference={"kind": "absent", "detail": missing} if missing else reference,
        workload={"length": 2048, "repeats": 3, "config": {"model_dim": 512}},
    )
    return Run(night, timings=tuple(rows))


def _stages() -> list[str]:
    layers = [f"layers.{i}.{module}" for i in range(3) for module in MODULES]
    return ["embed", *layers, "norm"]


def _pair(case: str, edge: str, seed: object) -> list[Measurement]:
    limit = EDGES[edge]
    shared = {"case": case, "edge": edge, "identity": f"{case}-1", "tolerance": limit}
    depth = 1e-4 if edge.startswith("jax64") else 1.0

    def error(name: str, scale: float) -> float:
        return limit * depth * scale * (0.5 + 0.5 * noise(case, edge, name, seed))

    rows = [
        measurement(
            quantity=name, kind=Kind.BLOCK, stage=i, value=error(name, 0.05 + 0.025 * i), **shared
        )
        for i, name in enumerate(_stages())
    ]
    rows.append(measurement(stage=len(rows), value=error("logits", 0.6), **shared))
    info = {
        "max_abs": 4e-6 * depth,
        "cosine": 1.0,
        "kl_p50": 3e-12 * depth,
        "kl_max": 5e-11 * depth,
        "top1_agreement": 1.0,
        "top1_flips": 0.0,
        "nll_difference": 2e-8 * depth,
    }
    plain = {**shared, "tolerance": math.nan, "verdict": Verdict.INFO}
    rows += [measurement(metric=k, value=v, stage=17, **plain) for k, v in info.items()]
    rows.append(
        measurement(quantity="loss", kind=Kind.LOSS, stage=-1, value=error("loss", 0.1), **shared)
    )
    rows += [
        measurement(
            quantity=f"grad/model.layers.{i}.{name}",
            kind=Kind.GRADIENT,
            stage=-1,
            value=error(name, 0.7),
            **shared,
        )
        for i in range(3)
        for name in PARAMETERS
    ]
    return rows


def _survival() -> list[Finding]:
    out = []
    for layer in range(3):
        for name in PARAMETERS:
            subject = f"model.layers.{layer}.{name}"
            base = {"cema": 0.9, "timenorm": 0.45, "rmsnorm": 0.4}.get(name.split(".")[1], 0.03)
            frozen = base * (0.6 + 0.4 * noise(subject))
            severity = Severity.WARNING if frozen > 0.5 else Severity.OK
            remedy = "keep this parameter in float32" if severity is Severity.WARNING else ""
            source = "share of updates below half a unit in the last place"
            shared = {"probe": "survival", "subject": subject, "source": source, "remedy": remedy}
            out.append(
                finding(
                    metric="frozen_fraction",
                    value=frozen,
                    threshold=0.5,
                    severity=severity,
                    message="",
                    **shared,
                )
            )
            fidelity = 1 - frozen / 2
            out.append(finding(metric="fidelity", value=fidelity, threshold=math.nan, **shared))
    return out


def _audits() -> list[Finding]:
    parameters = [f"model.layers.{i}.{n}" for i in range(3) for n in PARAMETERS]
    rows = [
        finding(probe=probe, subject=p, metric=metric, value=0.0, threshold=math.nan)
        for probe, metric in (("dtypes", "promoted"), ("values", "non_finite"))
        for p in parameters
    ]
    note = "a scalar promotes bfloat16 to float32 here; the reference does the same"
    subject = "layers.1.attn.rotary"
    return [
        *rows,
        finding(
            probe="dtypes", severity=Severity.NOTE, subject=subject, metric="promoted", message=note
        ),
    ]


def _realistic_document() -> dict[str, object]:
    steps = list(range(0, 601, 10))
    train = [2.1 + 3.4 * math.exp(-s / 120) + 0.05 * noise("train", s) for s in steps]
    val_steps = list(range(0, 601, 50))
    return document(
        versions={"jax": "0.10.1", "equinox": "0.13.2", "numpy": "2.3.4", "python": "3.11.9"},
        durations={"parity": 214.2, "gradients": 188.9, "stability": 96.4},
        suites=[
            {"name": "parity", "status": "ran", "planned": 52, "executed": 52, "reason": ""},
            {"name": "stability", "status": "ran", "planned": 4, "executed": 4, "reason": ""},
        ],
        cases=[
            {
                "name": name,
                "title": name.replace("_", " ").capitalize(),
                "why": "a boundary that porting bugs like to cross",
                "hash": f"{int(noise(name) * 2**40):010x}",
                "batch": 2,
                "length": 33,
                "config": {"layers": 3},
            }
            for name in CASES
        ],
        tolerances=[
            {
                "edge": edge,
                "kind": "block",
                "bound": f"{limit:.1e}",
                "reason": "noise floor over ten seeds, times eight",
            }
            for edge, limit in EDGES.items()
        ],
        seams=[
            {
                "id": "cema-mask-zeroing",
                "reason": "padded positions are zeroed before the moving average, so that padding "
                "on the left changes nothing",
                "bound": "0 on unmasked input",
            }
        ],
        checkpoint={
            "name": "tiny-bytes",
            "parameters": 1_203_456,
            "config": {"layers": 3, "model width": 128, "chunk": 32},
            "training": {
                "step": steps,
                "train_loss": train,
                "val_step": val_steps,
                "val_loss": [2.18 + 3.4 * math.exp(-s / 120) for s in val_steps],
                "lr": 1e-3,
                "seed": 0,
                "final_val_loss": 2.203,
            },
        },
    )


def realistic(seed: object = 0, **changes: object) -> Run:
    """A whole healthy night: 13 cases, four edges, three layers."""
    rows = [m for case in CASES for edge in EDGES for m in _pair(case, edge, seed)]
    base = {**_realistic_document(), **changes}
    base["contract"] = contracted(rows)
    return Run(Manifest.from_json(base), tuple(rows), (*_survival(), *_audits()))


def regressed(night: Run, case: str = "slow_decay") -> Run:
    """The same night with a moving average that is wrong from layer 1 on, on the JAX side."""
    first = _stages().index("layers.1.cema")

    def broken(m: Measurement) -> Measurement:
        downstream = m.stage >= first or m.kind in (Kind.LOSS, Kind.GRADIENT)
        if m.case != case or m.edge == "reference32:oracle" or not downstream:
            return m
        if m.metric != "rel_l2":
            return m
        return replace(m, value=3.1e-4 * (1 + noise(m.quantity)), verdict=Verdict.FAIL)

    rows = tuple(broken(m) for m in night.measurements)
    return Run(night.manifest, rows, night.findings, tensors=described(rows))


def described(rows: Iterable[Measurement]) -> tuple[Deviation, ...]:
    """The failing tensors of a night, element by element: one element off, one not a number."""
    values, expected = Deviations(), np.linspace(-2.0, 2.0, 60).reshape(3, 4, 5)
    actual = expected.astype(np.float32).astype(np.float64)
    actual[1, 2, 3], actual[0, 0, 1] = 7.0, math.nan
    for m in rows:
        if m.verdict is Verdict.FAIL and m.metric == "rel_l2":
            values(m, actual, expected)
    return tuple(values)
