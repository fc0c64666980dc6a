"""The training script that people copy: killed and resumed, on a mesh, and in torch afterwards."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import equinox as eqx
import numpy as np
import pytest

from megalodon_jax import generate
from megalodon_jax.checkpoint import load_checkpoint
from parity.megalodon.reference import why_unavailable
from tests.helpers import ROOT

SCRIPT = ROOT / "examples" / "train.py"
STEPS, SAVE_EVERY = 20, 5
SMALL = ["--steps", STEPS, "--save-every", SAVE_EVERY, "--log-every", 1, "--rows", 2]
SMALL += ["--length", 64]


def command(out: Path, *more: object) -> list[str]:
    return [sys.executable, str(SCRIPT), *map(str, [*SMALL, "--out", out, *more])]


ENVIRONMENT = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}


def run(out: Path) -> dict[int, str]:
    """Run the script to its end and return the line of each step."""
    made = subprocess.run(
        command(out), env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr[-2000:]
    return losses(made.stdout)


def losses(told: str) -> dict[int, str]:
    return {int(n): line for n, line in re.findall(r"^step (\d+)  (loss .*)$", told, re.M)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, dict[int, str]]:
    """A run that nothing interrupts, and its lines."""
    out = tmp_path_factory.mktemp("whole") / "run"
    return out, run(out)


def number(line: str) -> float:
    return float(line.split()[1])


@pytest.mark.sweep
def test_the_loss_falls(whole) -> None:
    _, lines = whole
    assert list(lines) == list(range(1, STEPS + 1))
    # From what knows nothing to what knows at least how often a byte occurs.
    assert (
        number(lines[1]) > np.log(256) - 1 > np.mean([number(lines[n]) for n in (18, 19, 20)]) + 1
    )


@pytest.mark.sweep
def test_a_run_that_is_killed_goes_on_bit_for_bit(whole, tmp_path) -> None:
    folder, lines = whole
    out = tmp_path / "run"
    with subprocess.Popen(command(out), env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as told:
        assert told.stdout is not None
        before: dict[int, str] = {}
        for line in told.stdout:
            before |= losses(line)
            if SAVE_EVERY + 2 in before:
                told.kill()
                break
    assert told.returncode == -9
    after = run(out)
    assert min(after) % SAVE_EVERY == 1 and 1 < min(after) <= max(before) + 1
    assert {n: lines[n] for n in before} == before
    assert {n: lines[n] for n in after} == after
    for file in ("checkpoint/model.safetensors", "checkpoint/optimizer.safetensors"):
        assert (out / file).read_bytes() == (folder / file).read_bytes(), file


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("examples_train", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.sweep
def test_on_a_mesh_it_trains_the_same_model(script, whole, tmp_path, capsys) -> None:
    options = [*SMALL, "--out", tmp_path / "run", "--mesh", "data=2"]
    script.main([*map(str, options)])
    _, lines = whole
    told = losses(capsys.readouterr().out)
    # The first step knows nothing of rounding: the same text and the same weights.
    assert number(told[1]) == pytest.approx(number(lines[1]), rel=2**-20)
    assert number(told[STEPS]) < np.log(256) - 1


def test_a_batch_is_known_by_its_number(script) -> None:
    text = np.arange(256, dtype=np.uint8)
    first, again, other = (script.batch(text, n, 3, 16, 0) for n in (7, 7, 8))
    assert np.array_equal(first, again) and not np.array_equal(first, other)
    assert first.shape == (3, 16) and first.dtype == np.int32
    assert np.all(np.diff(first) == 1)
    # Every window can come, the last one too.
    ends = {int(script.batch(text, n, 8, 255, 0)[:, -1].max()) for n in range(8)}
    assert ends == {255}


@pytest.mark.torch_ref
def test_megalodon_hf_goes_on_with_the_same_bytes(whole) -> None:
    if reason := why_unavailable():
        pytest.skip(reason)
    import torch
    from megalodon import MegalodonForCausalLM

    folder, _ = whole
    theirs = MegalodonForCausalLM.from_pretrained(folder / "torch").eval()
    ours = load_checkpoint(folder / "checkpoint").model
    prompt = np.frombuffer(b"The statement ", np.uint8)[None].astype(np.int32)
    told, _, _ = eqx.filter_jit(generate)(ours, prompt, 24, temperature=0)
    ids = torch.from_numpy(prompt).long()
    with torch.no_grad():
        for _ in range(24):
            ids = torch.cat([ids, theirs(input_ids=ids).logits[:, -1:].argmax(-1)], dim=1)
    assert np.array_equal(ids.numpy(), told)


def test_a_text_that_is_too_short_is_refused(script, tmp_path) -> None:
    (tmp_path / "short.txt").write_text("short", "utf-8")
    with pytest.raises(SystemExit, match="too short: its last tenth must hold 64 bytes"):
        script.main([str(tmp_path / "short.txt"), *map(str, SMALL)])


def test_the_numbers_of_a_step_are_printed_and_logged(script, monkeypatch, capsys) -> None:
    logged, started = [], {}

    def init(**options):
        started.update(options)
        return SimpleNamespace(log=lambda numbers, step: logged.append((step, numbers)))

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    log = script.make_log(script.parse(["--wandb", "project", "--out", "runs/mine"]))
    log(3, loss=0.1 + 0.2)
    assert logged == [(3, {"loss": 0.1 + 0.2})]
    assert started["project"] == "project" and started["id"] == "mine"
    assert started["config"]["lr"] == "0.003"
    assert capsys.readouterr().out == "step 3  loss 0.3\n"
    script.make_log(script.parse([]))(4, loss=1.0)
    assert len(logged) == 1


def test_the_axes_of_a_mesh_are_read(script) -> None:
    assert script.axes("data=2,fsdp=4") == {"data": 2, "fsdp": 4}
    assert dict(script.make_mesh(**script.axes("data=1")).shape) == {"data": 1}
