"""GPUs: what identifies one, what is recorded of it, and that nothing unknown equals anything."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from reports.page.render import render
from reports.provenance import environment, gpu
from reports.provenance.host import FIELDS, GPU_FIELDS, differences, fingerprint, processor
from reports.registry.lookup import change_lines, judge_stored
from reports.store.manifest import Environment, PartInfo
from reports.store.runs import Run, write_run
from reports.store.schema import RunKind
from reports.verdict.decide import Word, decide
from reports.verdict.history import History
from reports.verdict.pins import pin_of
from tests.reports.nights import H200, measurement, on_gpu, run

SMI = "143771 MiB, 580.65.06\n"


class Client:
    platform_version = "PJRT C API\ncuda 13000"


class Device:
    """What JAX says of an H200."""

    platform, device_kind, compute_capability, client = "gpu", "NVIDIA H200", "9.0", Client()


@pytest.fixture
def smi(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | Exception], None]:
    """What `nvidia-smi` answers, or how it fails."""

    def answer(output: str | Exception) -> None:
        def called(command: list[str], **options: Any) -> Any:
            assert command[0] == "nvidia-smi"
            if isinstance(output, Exception):
                raise output
            return subprocess.CompletedProcess(command, 0, output, "")

        monkeypatch.setattr(gpu.subprocess, "run", called)

    return answer


@pytest.mark.parametrize(
    ("output", "memory", "driver"),
    [
        (SMI, "143771 MiB", "580.65.06"),
        (SMI * 8, "143771 MiB", "580.65.06"),
        (SMI + "81559 MiB, 580.65.06\n", "unknown", "unknown"),
        ("", "unknown", "unknown"),
        (FileNotFoundError(), "unknown", "unknown"),
        (subprocess.CalledProcessError(9, "nvidia-smi"), "unknown", "unknown"),
        (subprocess.TimeoutExpired("nvidia-smi", 30), "unknown", "unknown"),
    ],
    ids=["one", "eight alike", "two kinds", "none", "not installed", "refuses", "hangs"],
)
def test_a_gpu_is_more_than_its_name(smi, output, memory, driver) -> None:
    smi(output)
    named = {"compute capability": "9.0", "CUDA": "13000"}
    assert gpu.gpu(Device()) == named | {"memory": memory, "driver": driver}


@pytest.mark.parametrize(
    ("devices", "packages", "before", "after"),
    [
        (("NVIDIA H200",), {"jax-cuda13-plugin": "1"}, None, f"{gpu.DETERMINISTIC}=true"),
        (("NVIDIA H200",), {"jax-cuda13-plugin": "1"}, "--a=1", f"--a=1 {gpu.DETERMINISTIC}=true"),
        # Somebody who wants the quickest kernels of each process says so.
        (("NVIDIA H200",), {"jax-cuda13-plugin": "1"}, *[f"{gpu.DETERMINISTIC}=false"] * 2),
        # JAX computes on the processor, whose flags are part of what identifies it.
        (("NVIDIA H200",), {"nvidia-cublas": "1"}, "--a=1", "--a=1"),
        ((), {"jax-cuda13-plugin": "1"}, None, None),
    ],
    ids=["a GPU", "other flags stay", "asked for otherwise", "torch's alone", "no GPU"],
)
def test_kernels_are_the_same_each_time_on_a_gpu_alone(
    monkeypatch: pytest.MonkeyPatch, devices, packages, before, after
) -> None:
    monkeypatch.setattr(gpu, "accelerators", lambda: devices)
    monkeypatch.setattr(gpu, "libraries", lambda: packages)
    for platforms, flags in ((None, after), ("cuda,cpu", after), ("cpu", before)):
        monkeypatch.delenv("JAX_PLATFORMS", raising=False)
        if platforms is not None:
            monkeypatch.setenv("JAX_PLATFORMS", platforms)
        if before is None:
            monkeypatch.delenv("XLA_FLAGS", raising=False)
        else:
            monkeypatch.setenv("XLA_FLAGS", before)
        gpu.repeatable()
        assert os.environ.get("XLA_FLAGS") == flags


def test_a_run_on_a_gpu_says_so(smi, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(SMI)
    monkeypatch.setattr(environment.jax, "devices", lambda: [Device()])
    monkeypatch.setattr(environment, "git_state", lambda *_: ("0" * 40, False))
    monkeypatch.setattr(environment, "libraries", lambda: {"nvidia-cublas": "13.1"})
    monkeypatch.setattr(environment, "device_kind", lambda: "cuda")
    made = environment.new_manifest(datetime.now(UTC), RunKind.NIGHTLY).environment
    assert (made.device.kind, made.device.name) == ("cuda", "NVIDIA H200")
    assert {*FIELDS, *GPU_FIELDS} == set(made.host)
    assert made.versions["nvidia-cublas"] == "13.1"
    assert fingerprint(made) is not None


def here(**changes: Any) -> Environment:
    return on_gpu(run(measurement()), **changes).manifest.environment


@pytest.mark.parametrize("field", GPU_FIELDS)
def test_whatever_identifies_a_gpu_is_another_machine_and_is_named(field: str) -> None:
    one, other = here(), here(host=H200 | {field: "another"})
    assert fingerprint(one) == fingerprint(here()) != fingerprint(other)
    assert f"GPU {field} {H200[field]} → another" in differences(other, one)
    # What cannot be read equals nothing, itself included.
    for unread in ({**H200, field: "unknown"}, {n: v for n, v in H200.items() if n != field}):
        assert fingerprint(here(host=unread)) is None
    # The same of a processor means nothing.
    cpu = run(measurement()).manifest.environment
    assert fingerprint(replace(cpu, host={**cpu.host, field: "another"})) == fingerprint(cpu)


def test_a_gpu_is_not_described_by_the_processor_beside_it() -> None:
    text = processor(here(host=H200 | {"family": "6", "stepping": "8"}))
    assert text.startswith("NVIDIA H200 (compute capability 9.0, memory 143771 MiB, driver 580")
    assert "stepping" not in text


def nights(value: float, day: int, **changes: Any) -> Run:
    made = run(
        measurement(value=value, device="cuda"),
        id=f"2026-11-{day:02d}T21-30-00Z-0000000",
        created=f"2026-11-{day:02d}T21:30:00+00:00",
        suites=[{"name": "parity", "status": "ran", "planned": 1, "executed": 1, "reason": ""}],
    )
    return on_gpu(made, **changes)


def test_levels_are_held_to_those_of_the_same_gpu(tmp_path: Path) -> None:
    write_run(tmp_path, nights(1.0e-6, 2, host=H200 | {"driver": "570.1"}))
    write_run(tmp_path, nights(2.0e-6, 3))
    # Newer than both, and nobody's baseline: it is another driver again.
    write_run(tmp_path, nights(4.0e-7, 4, host=H200 | {"driver": "590.0"}))
    near = judge_stored(write_run(tmp_path, nights(2.02e-6, 5))).decision
    assert near.baseline_id is not None and near.baseline_id[:10] == "2026-11-03"
    assert near.word is Word.CHANGED
    far = judge_stored(write_run(tmp_path, nights(3.9e-6, 6))).decision
    assert far.word is Word.REGRESSED
    # Of a GPU that is not known there is no level to be held to, and it says so.
    unknown = judge_stored(write_run(tmp_path, nights(2.02e-6, 7, host={}))).decision
    assert "cannot be identified" in unknown.sentence


def test_levels_of_another_gpu_are_said_to_be_another_machine_s() -> None:
    pin = pin_of(
        nights(1.0e-6, 1, host=H200 | {"driver": "570.1"}), {}, "as measured", "2026-11-01"
    )
    far = decide(nights(2.5e-6, 2), None, {}, [pin])
    assert far.word is Word.REGRESSED
    [line] = change_lines(far.changes)
    assert "driver 570.1" in line and "here NVIDIA H200" in line and "driver 580.65.06" in line


PARTS = (
    PartInfo("length_c", "node-a", "aaaa", processor(here()), 16, cases=("length_c",)),
    PartInfo(
        "slow_decay",
        "node-b",
        "bbbb",
        processor(here(host=H200 | {"driver": "570.1"})),
        16,
        cases=("slow_decay",),
    ),
)


def test_a_night_on_several_gpus_says_which_measured_what() -> None:
    made = on_gpu(run(measurement(case="length_c"), measurement(case="slow_decay")))
    made = replace(made, manifest=replace(made.manifest, parts=PARTS))
    text = render(made, decide(made, None), History())
    for part in PARTS:
        row = text[text.index(f"measured on {part.node}") :]
        assert part.processor.rpartition("driver ")[2].split(",")[0] in row[:400]
        assert part.name in row[:600]
