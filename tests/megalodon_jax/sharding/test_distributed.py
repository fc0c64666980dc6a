"""Two processes of four devices each: they train, stop, and go on elsewhere; one dies, both end."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import equinox as eqx
import jax
import pytest

from megalodon_jax import distributed
from megalodon_jax.checkpoint import load_checkpoint
from tests.helpers import ROOT, SAME_PROGRAM, model_of, rel_l2, roundoff, same_leaves
from tests.megalodon_jax.sharding import orbax_worker, worker
from tests.megalodon_jax.sharding.programs import SMALL, mesh_named

TEXT = ROOT / "parity" / "data" / "byte_lm" / "heldout.txt"
STEPS, MINUTE, LONG = 20, 60, 900


def started(
    plan: dict[str, Any], index: int, devices: int, program: ModuleType = worker
) -> subprocess.Popen[str]:
    """A process of the worker, the given number of virtual devices its own."""
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
    }
    command = [
        sys.executable,
        str(Path(str(program.__file__))),
        json.dumps(plan | {"index": index}),
    ]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment)


def plan_of(folder: Path, mesh: dict[str, int], processes: int, first: int, last: int) -> Any:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    return {
        "address": address,
        "processes": processes,
        "mesh": mesh,
        "text": str(TEXT),
        "folder": str(folder),
        "first": first,
        "last": last,
        "saves": [STEPS // 2],
    }


def printed(plan: Any, devices: int, program: ModuleType = worker) -> list[dict[str, Any]]:
    """Run the plan in its processes and return the lines of the first, which all must print."""
    processes = [started(plan, index, devices, program) for index in range(plan["processes"])]
    outputs = [process.communicate(timeout=LONG) for process in processes]
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors[-2000:]
    # Gloo prints on the same pipe, each process about its own devices.
    kept = [[line for line in out.splitlines() if line.startswith("{")] for out, _ in outputs]
    assert all(other == kept[0] for other in kept)
    return [json.loads(line) for line in kept[0]]


def losses(plan: Any, devices: int) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in printed(plan, devices)}


@pytest.mark.sweep
@pytest.mark.optimised
def test_two_processes_train_and_others_go_on(tmp_path: Path) -> None:
    folder, cube = tmp_path / "saved", {"data": 2, "tensor": 2, "sequence": 2}
    two = losses(plan_of(folder, cube, 2, 0, STEPS), 4)
    assert sorted(two) == list(range(STEPS))
    saved = load_checkpoint(folder)
    assert saved.step == STEPS // 2 and saved.mesh == cube
    alone = plan_of(folder, {}, 1, STEPS // 2, STEPS) | {"saves": []}
    one = losses(alone, 1)
    floor = dict.fromkeys(one, 0.0)
    for seed in range(2):
        for step, loss in losses(alone | {"moved": seed}, 1).items():
            # What rounding became stays: at one step two losses may cross by chance.
            floor[step] = max(floor[step], floor.get(step - 1, 0.0), rel_l2(loss, one[step]))
    plan = plan_of(folder, {"fsdp": 2, "tensor": 4}, 1, STEPS // 2, STEPS) | {"saves": []}
    # The mean over all tokens, and the logarithm of a sum over the vocabulary.
    sums = roundoff(worker.ROWS * worker.LENGTH + worker.CONFIG.vocab_size)
    for others in (one, losses(plan, 8)):
        for step, loss in others.items():
            assert rel_l2(loss, two[step]) <= sums + SAME_PROGRAM * floor[step], step
    assert same_leaves(load_checkpoint(folder).model, saved.model)


@pytest.mark.sweep
def test_what_two_processes_save_by_orbax_others_restore_on_other_meshes(tmp_path: Path) -> None:
    """Bit for bit, parameters and optimiser state, in as many processes as one likes."""
    folder = tmp_path / "saved"
    [saved] = printed(plan_of(folder, {"fsdp": 4, "tensor": 2}, 2, 0, 0), 4, orbax_worker)
    # Each process wrote its own shards.
    [model] = folder.glob("*/model")
    assert {path.name for path in model.glob("ocdbt.process_*")} == {
        "ocdbt.process_0",
        "ocdbt.process_1",
    }
    assert len(set(saved.values())) > len(saved) // 2
    for mesh, processes, devices in (
        ({"data": 2, "tensor": 2, "sequence": 2}, 2, 4),
        ({"fsdp": 8}, 1, 8),
    ):
        plan = plan_of(folder, mesh, processes, 0, 0) | {"saves": []}
        assert printed(plan, devices, orbax_worker) == [saved], mesh


@pytest.mark.sweep
@pytest.mark.optimised
def test_where_one_process_dies_the_others_end_with_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    plan = plan_of(folder, {"data": 8}, 2, 0, STEPS) | {"dies": STEPS // 2 + 2}
    plan["patience"] = 10
    first, second = (started(plan, index, 4) for index in range(2))
    second.communicate(timeout=LONG)
    assert second.returncode == 9
    begin = time.monotonic()
    _, errors = first.communicate(timeout=2 * MINUTE)
    assert time.monotonic() - begin <= MINUTE
    assert first.returncode not in (0, None)
    assert "process" in errors or "task" in errors
    assert load_checkpoint(folder).step == STEPS // 2


def test_a_checkpoint_of_another_mesh_is_loaded_and_said(tmp_path: Path, caplog) -> None:
    model = model_of(SMALL)
    mesh, other = mesh_named("data=2 tensor=2"), mesh_named("fsdp=4")
    distributed.save(tmp_path / "saved", distributed.shard_model(model, mesh), step=3)
    with caplog.at_level(logging.WARNING):
        again = distributed.load(tmp_path / "saved", mesh)
    assert not caplog.records and again.step == 3
    with caplog.at_level(logging.WARNING):
        found = distributed.load(tmp_path / "saved", other)
    assert "mesh of data=2 x tensor=2" in caplog.text and "mesh of fsdp=4" in caplog.text
    assert same_leaves(found.model, model)
    leaves = jax.tree.leaves(eqx.filter(found.model, eqx.is_array))
    assert all(leaf.sharding.mesh == other for leaf in leaves)


class Board:
    """What processes meet by: what they say there, and the barriers they come to."""

    def __init__(self) -> None:
        self.said: dict[str, str] = {}
        self.met: list[str] = []

    def key_value_set(self, key: str, value: str) -> None:
        self.said[key] = value

    def wait_at_barrier(self, name: str, timeout: int) -> None:
        self.met.append(name)

    def blocking_key_value_get(self, key: str, timeout: int) -> str:
        return self.said[key]


def disk_full(*arguments: Any, **options: Any) -> None:
    raise OSError("no space left")


def test_where_the_first_process_cannot_write_every_process_raises(tmp_path, monkeypatch) -> None:
    board = Board()
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr("jax._src.distributed.global_state.client", board)
    for first, write in enumerate((disk_full, lambda *arguments, **options: None)):
        monkeypatch.setattr(distributed, "save_checkpoint", write)
        for index, kind in enumerate((OSError, RuntimeError)):
            # Each process counts for itself.
            monkeypatch.setattr(distributed, "_saves", itertools.count(first))
            monkeypatch.setattr(jax, "process_index", lambda index=index: index)
            fails = pytest.raises(kind, match="no space left")
            with fails if write is disk_full else contextlib.nullcontext():
                distributed.save(tmp_path, {}, step=4)
    assert len(board.met) == 4
    with pytest.raises(ValueError, match=r"distributed.save: step=-1 must be at least 0"):
        distributed.save(tmp_path, {}, step=-1)
    assert len(board.met) == 4


def test_a_process_that_counts_from_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"index=2 must be below processes=2"):
        distributed.start("127.0.0.1:1", 2, 2)
