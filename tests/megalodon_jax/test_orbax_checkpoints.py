"""Checkpoints through Orbax: bit for bit, from mesh to mesh, strict, and safe from a kill."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from megalodon_jax import orbax_checkpoints
from megalodon_jax.convert import load_from_pretrained
from megalodon_jax.extras import install
from megalodon_jax.orbax_checkpoints import OrbaxCheckpoints, latest, restore
from megalodon_jax.pretrained import checkpoint_file
from megalodon_jax.roles import named_leaves
from megalodon_jax.sharding import make_mesh, partition_specs, shard_model, shard_state
from tests.helpers import ROOT, TINY, adapted, model_of, same_leaves, tiny

NARROW = tiny(output_size=16, vocab_size=16, swiglu=True, param_dtype="bfloat16")
POSITION = {"shard": 3, "row": 17, "epoch": 0.5}
OPTIMISER = optax.adamw(1e-2)


def state_of(model: Any) -> Any:
    """A state whose moments differ from element to element, as after steps."""
    state = OPTIMISER.init(eqx.filter(model, eqx.is_array))
    return jax.tree.map(
        lambda x: (
            (x + np.linspace(0, 1, x.size).reshape(x.shape)).astype(x.dtype) if x.ndim else x + 3
        ),
        state,
    )


def numbers(tree: Any) -> dict[str, np.ndarray]:
    """Leaves in NumPy, keys as their numbers."""
    keys = jax.dtypes.prng_key
    return {
        name: np.asarray(jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, keys) else x)
        for name, x in named_leaves(tree).items()
    }


def same(left: Any, right: Any) -> bool:
    return same_leaves(numbers(left), numbers(right))


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, Any, Any]:
    """A run with steps 1 and 2, saved from a mesh of all devices; folder, model and state."""
    mesh = make_mesh(tensor=2, fsdp=4)
    whole = model_of(NARROW, seed=2)
    with jax.numpy_dtype_promotion("standard"):
        state = state_of(whole)
    model, state = shard_model(whole, mesh), shard_state(state, whole, mesh)
    folder = tmp_path_factory.mktemp("orbax") / "deep" / "run"
    with OrbaxCheckpoints(folder, keep=2) as checkpoints:
        for step in (0, 1, 2):
            kept = model_of(NARROW, seed=step) if step < 2 else model
            key = jax.random.key(step, impl="rbg")
            saved = checkpoints.save(step, kept, opt_state=state, key=key, position=POSITION)
            assert saved
        checkpoints.wait()
        assert checkpoints.latest() == 2
    return folder, model, state


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "sizes", [{"fsdp": 8}, {"data": 2, "fsdp": 4}, None], ids=["8", "2x4", "one device"]
)
def test_a_step_returns_bit_for_bit_on_any_mesh(run, sizes: dict[str, int] | None) -> None:
    folder, model, state = run
    mesh = None if sizes is None else make_mesh(**sizes)
    like = jax.eval_shape(lambda: state)
    found = restore(folder, mesh=mesh, config=NARROW, opt_state_like=like)
    assert (found.step, found.position) == (2, POSITION)
    assert same(found.model, model)
    assert same(found.opt_state, state)
    assert jax.tree.structure(found.opt_state) == jax.tree.structure(state)
    assert found.key is not None
    assert found.key.dtype == jax.random.key(0, impl="rbg").dtype
    assert same([found.key], [jax.random.key(2, impl="rbg")])
    name = "model.layers.0.ffn.fc1.weight"
    places = [named_leaves(found.model)[name], named_leaves(found.opt_state)[f"0.mu.{name}"]]
    if mesh is None:
        assert all(len(leaf.sharding.device_set) == 1 for leaf in places)
    else:
        spec = partition_specs(found.model, mesh)[name]
        assert all((leaf.sharding.mesh, leaf.sharding.spec) == (mesh, spec) for leaf in places)


def test_old_steps_go_and_the_others_can_be_asked_for(run) -> None:
    folder, *_ = run
    assert latest(folder) == 2
    assert same(restore(folder, step=1).model, model_of(NARROW, seed=1))
    with pytest.raises(FileNotFoundError, match=r"step 0 is not there; .* are 1, 2"):
        restore(folder, step=0)
    with pytest.raises(FileNotFoundError, match=r"a complete step is not there; .* are none"):
        restore(folder.parent)


def test_a_mesh_that_does_not_divide_the_model_is_refused(run) -> None:
    with pytest.raises(ValueError, match="num_heads=2"):
        restore(run[0], mesh=make_mesh(tensor=8))


def test_every_difference_is_listed_in_one_error(run) -> None:
    folder, *_ = run
    other = tiny(output_size=16, vocab_size=16, swiglu=True, chunk_size=8)
    like = OPTIMISER.init({"model": jnp.zeros(3)})
    with pytest.raises(ValueError, match=r"what was requested, \d+ difference") as raised:
        restore(folder, config=other, opt_state_like=like)
    for line in (
        "config: chunk_size is 4, expected 8",
        "config: param_dtype is 'bfloat16', expected 'float32'",
        "opt_state: missing 0.mu.model: float32 (3,)",
        "opt_state: unexpected 0.mu.model.embed.weight: bfloat16 (16, 8)",
    ):
        assert line in str(raised.value)


def test_every_kind_of_leaf_returns(tmp_path: Path, x64) -> None:
    config = tiny(num_layers=1, param_dtype="float64", compute_dtype="float64",
                  accum_dtype="float64", softmax_dtype="float64")  # fmt: skip
    model = model_of(config)
    state = {
        "count": jnp.asarray(7, jnp.int32),
        "keys": jax.random.split(jax.random.key(3)),
        "moments": (jnp.arange(4, dtype=jnp.bfloat16), jnp.zeros((0, 2), jnp.float32), None),
        "rate": jnp.asarray(0.1),
        "seen": jnp.asarray([True, False]),
    }
    key = jax.random.PRNGKey(5)
    with OrbaxCheckpoints(tmp_path / "run", asynchronous=False) as checkpoints:
        checkpoints.save(1, model, opt_state=state, key=key)
    found = restore(tmp_path / "run", opt_state_like=jax.eval_shape(lambda: state))
    assert same(found.model, model)
    assert same(found.opt_state, state)
    assert found.opt_state["rate"].weak_type
    assert found.opt_state["keys"].dtype == state["keys"].dtype
    assert same([found.key], [key])


def test_float64_returns_where_an_event_loop_runs(tmp_path: Path, x64) -> None:
    """As in a notebook: Orbax then works in a thread that does not know `jax.enable_x64`."""
    model = model_of(tiny(num_layers=1, param_dtype="float64", compute_dtype="float64",
                          accum_dtype="float64", softmax_dtype="float64"))  # fmt: skip

    async def cell() -> Any:
        with OrbaxCheckpoints(tmp_path / "run", asynchronous=False) as checkpoints:
            checkpoints.save(1, model)
        return restore(tmp_path / "run").model

    def notebook() -> Any:
        with jax.enable_x64(True):
            return asyncio.run(cell())

    # In a thread: where browser tests ran before, this one has a loop already.
    with ThreadPoolExecutor(1) as thread:
        assert same(thread.submit(notebook).result(), model)


def test_a_run_that_went_back_is_told_and_not_left_without_checkpoints(tmp_path: Path) -> None:
    with OrbaxCheckpoints(tmp_path / "run", every=2, asynchronous=False) as checkpoints:
        assert checkpoints.save(4, adapted())
        assert not checkpoints.save(4, adapted()), "a run that continues may begin with its step"
        assert not checkpoints.save(5, adapted()), "no multiple of 2"
        with pytest.raises(ValueError, match=r"holds step 4, which is newer than step 2: .*delete"):
            checkpoints.save(2, adapted())
        with pytest.raises(ValueError, match="step=-1 must be at least 0"):
            checkpoints.save(-1, adapted())
        assert checkpoints.save(6, adapted())
    assert restore(tmp_path / "run", model_like=jax.eval_shape(adapted)).step == 6


def test_what_somebody_added_returns(tmp_path: Path) -> None:
    with OrbaxCheckpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(1, adapted())
    found = restore(tmp_path / "run", model_like=jax.eval_shape(adapted))
    assert same(found.model, adapted())
    with pytest.raises(ValueError, match=r"model: unexpected model.layers.0.attn.wz.key"):
        restore(tmp_path / "run")
    with pytest.raises(ValueError, match="opt_state: none was saved"):
        restore(tmp_path / "run", model_like=adapted(), opt_state_like={"a": jnp.zeros(1)})


def test_what_cannot_be_saved_is_refused_before_anything_is_written(run) -> None:
    folder, model, _ = run
    with OrbaxCheckpoints(folder, every=5) as checkpoints:
        assert not checkpoints.save(3, model)
        with pytest.raises(ValueError, match="holds step 2 already"):
            checkpoints.save(2, model, force=True)
        with pytest.raises(ValueError, match="position must be JSON"):
            checkpoints.save(5, model, position={1j})
        narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model_of(TINY))
        with pytest.raises(ValueError, match="the model is not what its configuration says"):
            checkpoints.save(5, narrow)
    assert latest(folder) == 2


def test_a_run_loads_as_a_pretrained_model(run) -> None:
    folder, model, _ = run
    for path in (folder, folder / "2"):
        loaded = load_from_pretrained(path, dtype=NARROW.param_dtype)
        assert same(loaded, model)
        assert loaded.config == NARROW
    with pytest.raises(ValueError, match="does not fit the configuration"):
        load_from_pretrained(folder, tiny())


def test_a_tool_that_wants_a_file_says_who_reads_the_steps(run) -> None:
    with pytest.raises(FileNotFoundError, match="It holds steps of Orbax, which load_from_pre"):
        checkpoint_file(run[0])


def test_training_goes_on_in_the_same_buffers_while_a_step_is_written(tmp_path: Path) -> None:
    """Donated buffers are written over by the next step; the save must not see it."""
    step = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    state = {"moment": jnp.zeros((1 << 20,))}
    with OrbaxCheckpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(1, model_of(TINY), opt_state=state)
        for _ in range(20):
            state = step(state)
    found = restore(tmp_path / "run", opt_state_like=state).opt_state
    assert not np.any(np.asarray(found["moment"]))
    assert np.all(np.asarray(state["moment"]) == 20)


def test_without_orbax_the_extra_is_named(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ImportError, match=re.escape(install("orbax"))):
        restore(run[0])


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.helpers import TINY, model_of
from megalodon_jax.orbax_checkpoints import OrbaxCheckpoints

checkpoints = OrbaxCheckpoints(sys.argv[1])
checkpoints.save(1, model_of(TINY))
checkpoints.wait()
rename = os.rename
def killed(old, new, **more):
    if sys.argv[2] == "kill" and Path(new).name == "2":
        os.kill(os.getpid(), signal.SIGKILL)
    rename(old, new, **more)
os.rename = os.replace = killed
checkpoints.save(2, model_of(TINY, seed=5))
checkpoints.close()
"""


@pytest.mark.few(1)
@pytest.mark.parametrize("kill", ["kill", "live"])
def test_a_kill_during_a_save_leaves_the_step_before(tmp_path: Path, kill: str) -> None:
    """Without the kill, the negative control, the same program leaves step 2."""
    folder = tmp_path / "run"
    command = [sys.executable, "-c", KILLED, str(folder), kill]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == (-9 if kill == "kill" else 0), done.stderr
    step = 1 if kill == "kill" else 2
    assert latest(folder) == step
    assert same(restore(folder).model, model_of(TINY, seed=0 if step == 1 else 5))
    left = [path.name for path in folder.iterdir() if "tmp" in path.name]
    assert bool(left) == (kill == "kill")
    with OrbaxCheckpoints(folder) as checkpoints:
        assert checkpoints.latest() == step
        checkpoints.save(3, model_of(TINY, seed=6))
    assert latest(folder) == 3
    assert not [path.name for path in folder.iterdir() if "tmp" in path.name]
    assert orbax_checkpoints.is_orbax(folder)
