"""Two runs of one training: digests of their values, and the first one in which they differ."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

from stability.repeat import (
    DigestLog,
    Digests,
    LogError,
    compare_logs,
    digest,
    digests_of,
    hashed_loss,
    read_log,
)
from tests.helpers import cli, skip_unless_computed

RNG = np.random.default_rng(0)


def of(x: Any) -> tuple[int, ...]:
    return tuple(np.asarray(jax.jit(digest)(jnp.asarray(x))).tolist())


# -- digests


def model_of_digest(x: np.ndarray) -> tuple[int, int]:
    """The same digest in whole numbers of Python, element by element."""
    import zlib

    step = 0x9E3779B9

    def mixed(h: int) -> int:
        h = (h ^ h >> 16) * 0x85EBCA6B % 2**32
        h = (h ^ h >> 13) * 0xC2B2AE35 % 2**32
        return h ^ h >> 16

    seed, first, second = zlib.crc32(f"{x.dtype}{x.shape}".encode()), 0, 0
    words = x.reshape(-1, 1).view(np.uint32 if x.dtype.itemsize >= 4 else f"u{x.dtype.itemsize}")
    for place, bits in enumerate(words.tolist()):
        part, inside = divmod(place, 2**15)
        h = (mixed(inside * step % 2**32) + mixed((seed + part * step) % 2**32)) % 2**32
        for word in bits:
            h = mixed(h ^ word)
        first, second = (first + h) % 2**32, (second + h * (h >> 16)) % 2**32
    return first, second


ARRAYS = {
    "float32": RNG.standard_normal((3, 4, 5)).astype(np.float32),
    "float16": RNG.standard_normal(7).astype(np.float16),
    "complex64": (RNG.standard_normal(6) + 1j * RNG.standard_normal(6)).astype(np.complex64),
    "int8": np.arange(-4, 5, dtype=np.int8),
    "uint32": np.array([[0, 2**32 - 1]], np.uint32),
    "a scalar": np.float32(0.3)[()] * np.ones((), np.float32),
    "empty": np.zeros((0, 3), np.float32),
    "two parts": np.arange(2**15 + 3, dtype=np.uint8),
}


@pytest.mark.parametrize("x", ARRAYS.values(), ids=ARRAYS)
def test_a_digest_is_that_of_its_definition(x) -> None:
    if x.dtype == np.float16:
        skip_unless_computed("float16")
    assert of(x) == model_of_digest(np.asarray(x))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "bool", "complex64"])
def test_a_digest_tells_elements_places_shapes_and_dtypes_apart(dtype) -> None:
    if dtype == "float16":
        skip_unless_computed(dtype)
    plain = RNG.integers(0, 2, (4, 6))
    plain[0, :2] = 1, 0
    changed, swapped = plain.copy(), plain.copy()
    changed[3, 5], swapped[0, :2] = 1 - plain[3, 5], (0, 1)
    forms = [plain, changed, swapped, plain.reshape(6, 4), plain[::-1]]
    seen = [jnp.asarray(form).astype(dtype) for form in forms]
    seen += [jnp.asarray(plain).astype("float32" if dtype != "float32" else "bfloat16")]
    assert len({of(each) for each in seen}) == len(seen)
    assert of(seen[0]) == of(jnp.asarray(plain.copy()).astype(dtype))


def test_one_unit_in_the_last_place_anywhere_is_seen() -> None:
    x = ARRAYS["float32"]
    for place in np.ndindex(x.shape):
        other = x.copy()
        other[place] = np.nextafter(x[place], np.inf)
        assert of(other)[0] != of(x)[0]


def test_float64_counts_both_halves() -> None:
    with jax.enable_x64(True):
        x = np.array([1.0, 2.0])
        low, high = np.nextafter(x, 3), x * 2
        assert len({of(each) for each in (x, low, high)}) == 3


def test_a_not_a_number_is_one_value_and_zeros_have_signs() -> None:
    bits = np.array([0x7FC00000, 0x7FC00001, 0xFFC00000], np.uint32)
    nans = bits.view(np.float32)
    assert len({of(nans[i : i + 1]) for i in range(3)}) == 1
    assert of(np.float32([0.0])) != of(np.float32([-0.0]))


@pytest.mark.parametrize("axis", [0, 1])
def test_a_digest_does_not_depend_on_how_an_array_is_sharded(axis) -> None:
    x = RNG.standard_normal((8, 16)).astype(np.float32)
    mesh = jax.make_mesh((8,), ("d",))
    spec = [None, None]
    spec[axis] = "d"
    spread = jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
    assert len(spread.sharding.device_set) == 8
    assert of(spread) == of(x)


@pytest.mark.parametrize("dtype", ["int4", "uint4", "float8_e4m3fn", "float4_e2m1fn"])
def test_elements_of_few_bits_have_digests_too(dtype) -> None:
    if dtype == "float8_e4m3fn":
        # XLA goes by way of float16 to ask whether it is NaN.
        skip_unless_computed(dtype, "float16")
    x = jnp.asarray([0.0, 1.0, 2.0]).astype(dtype)
    assert len({of(x), of(x[::-1]), of(x.astype("float32"))}) == 3


def test_keys_and_states_have_digests_too() -> None:
    found = [digests_of({"key": jax.random.key(seed), "m": jnp.ones(2)}) for seed in (0, 1)]
    assert found[0].names == ("key", "m")
    assert (np.asarray(found[0].values) == np.asarray(found[1].values)).all(1).tolist() == [0, 1]
    assert digests_of({}).values.shape == (0, 2)


# -- runs


@jax.custom_jvp
def identity(x):
    return x


@identity.defjvp
def _(primals, tangents):
    return primals[0], tangents[0] * 1.0000001


class Model(eqx.Module):
    up: jax.Array
    down: jax.Array

    def loss(self, x: jax.Array, key: jax.Array, cause: str = "") -> jax.Array:
        for _ in range(2):
            h = checkpoint_name(jnp.tanh(x @ self.up), "up")
            kept = jax.random.bernoulli(key, 0.9, h.shape)
            h = checkpoint_name(
                h * kept.astype(h.dtype) * (1.0000001 if cause == "forward" else 1.0), "drop"
            )
            if cause == "backward":
                h = identity(h)
            x = checkpoint_name(x + h @ self.down, "down")
        return jnp.mean(x**2)


def trained(folder: Path, name: str, cause: str = "", steps: int = 4) -> Path:
    """A run whose third step (number 2) has a planted cause; returns its file of digests."""
    rng = np.random.default_rng(3)
    up, down = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((6, 9), (9, 6)))
    model = Model(up, down)

    @partial(jax.jit, static_argnums=3)
    def step(model, x, key, cause):
        loss = hashed_loss(lambda m, x, key: m.loss(x, key, cause), cotangents=True)
        return loss(model, x, key)

    path = folder / f"{name}.jsonl"
    with DigestLog(path, {"run": name, "commit": "same"}) as log:
        for turn in range(steps):
            planted = cause if turn == 2 else ""
            x = np.random.default_rng(turn).standard_normal((5, 6)).astype(np.float32)
            if planted == "input":
                x[4, 5] = np.nextafter(x[4, 5], 9)
            key = jax.random.key(turn + 100 * (planted == "key"))
            (_, grads), found = step(model, x, key, planted)
            log.write(turn, found)
            rate = 0.1000001 if planted == "update" else 0.1
            model = jax.tree.map(lambda p, g, rate=rate: p - rate * g, model, grads)
    return path


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("runs"), "healthy")


CAUSES = {
    "input": (2, "input/0", "parameter/down"),
    "key": (2, "input/1", "input/0"),
    "forward": (2, "drop", "up"),
    "backward": (2, "bar/drop#2", "bar/down#2"),
    "update": (3, "parameter/up", ""),
}


@pytest.mark.parametrize(("cause", "where"), CAUSES.items(), ids=CAUSES)
def test_the_first_value_that_differs_is_that_of_the_cause(tmp_path, healthy, cause, where) -> None:
    answer = compare_logs(read_log(healthy), read_log(trained(tmp_path, cause, cause)))
    step, name, before = where
    assert (answer.step, answer.names[0], answer.before) == (step, name, before)
    assert answer.whole and not answer.equal
    told = answer.sentence()
    assert f"part at step {step}, at {name}" in told
    assert ("by the update before it" in told) == (cause == "update")
    result = cli("same", healthy, tmp_path / f"{cause}.jsonl")
    assert (result.exit_code, result.stdout.splitlines()[0]) == (1, told)
    # What tells the runs apart, and nothing that is the same in both.
    assert f"run: healthy | {cause}" in result.stdout and "commit" not in result.stdout


def test_the_same_run_again_is_equal(tmp_path, healthy) -> None:
    again = trained(tmp_path, "again")
    result = cli("same", healthy, again)
    assert result.exit_code == 0
    assert result.stdout.startswith("Equal: 19 values in each of 4 steps.")
    # In order of computation, which jit forgets.
    assert [*read_log(again).steps[0]] == [
        *("parameter/up", "parameter/down", "input/0", "input/1"),
        *("up", "drop", "down", "up#2", "drop#2", "down#2", "loss"),
        *("bar/down#2", "bar/drop#2", "bar/up#2", "bar/down", "bar/drop", "bar/up"),
        *("grad/up", "grad/down"),
    ]


def test_the_loss_and_its_gradients_are_those_of_the_loss(healthy) -> None:
    model = Model(jnp.ones((6, 9)), jnp.ones((9, 6)))
    x, key = jnp.ones((5, 6)) / 7, jax.random.key(0)
    (loss, grads), found = jax.jit(hashed_loss(Model.loss, intermediates=False))(model, x, key)
    expected = jax.jit(jax.value_and_grad(Model.loss))(model, x, key)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, (loss, grads), expected))
    assert found.names == (
        *("parameter/up", "parameter/down", "input/0", "input/1", "loss", "grad/up", "grad/down"),
    )


# -- files


def written(path: Path, *steps: tuple[int, dict[str, int]]) -> Path:
    with DigestLog(path) as log:
        for step, values in steps:
            numbers = jnp.asarray([[v, v] for v in values.values()], jnp.uint32)
            log.write(step, Digests(tuple(values), numbers))
    return path


def test_a_run_that_stopped_early_is_incomplete(tmp_path, healthy) -> None:
    short = trained(tmp_path, "short", steps=2)
    result = cli("same", short, healthy)
    assert result.exit_code == 3
    assert "Only the second run has steps 2, 3." in result.stdout


def test_values_of_other_names_are_not_compared_and_told(tmp_path) -> None:
    one = written(tmp_path / "a", (0, {"x": 1, "y": 2}))
    other = written(tmp_path / "b", (0, {"x": 1, "z": 3}))
    result = cli("same", one, other)
    assert (result.exit_code, "Only one run has y, z." in result.stdout) == (3, True)
    apart = written(tmp_path / "c", (0, {"z": 1}))
    nothing = cli("same", one, apart)
    assert (nothing.exit_code, "nothing was compared" in nothing.stdout) == (4, True)
    later = written(tmp_path / "d", (7, {"x": 1}))
    assert cli("same", one, later).exit_code == 4


def test_steps_with_other_numbers_of_values_are_counted_each(tmp_path) -> None:
    """A run that is continued with more marks has more values in its later steps."""
    few = (0, {"x": 1})
    first = written(tmp_path / "a", few, (1, {"x": 1, "y": 1, "z": 1}))
    same = written(tmp_path / "b", few, (1, {"x": 1, "y": 1, "z": 1}))
    other = written(tmp_path / "c", few, (1, {"x": 1, "y": 2, "z": 2}))
    assert cli("same", first, same).stdout.startswith("Equal: 1 to 3 values in each of 2 steps.")
    apart = cli("same", first, other).stdout
    assert "behind x, which is equal; 2 of 3 values of that step differ." in apart


def test_a_run_is_not_compared_with_itself(healthy) -> None:
    result = cli("same", healthy, healthy)
    assert (result.exit_code, "equal to itself" in result.output) == (2, True)


def test_a_step_that_a_run_computed_twice_is_told(tmp_path) -> None:
    one = written(tmp_path / "a", (0, {"x": 1}), (1, {"x": 2}), (1, {"x": 3}))
    other = written(tmp_path / "b", (0, {"x": 1}), (1, {"x": 3}))
    answer = compare_logs(read_log(one), read_log(other))
    assert answer.equal and not answer.whole
    assert "The first run computed steps 1 twice, with other values." in answer.sentence()
    assert cli("same", one, other).exit_code == 3


def test_a_killed_run_is_continued(tmp_path) -> None:
    whole = written(tmp_path / "whole", (0, {"x": 1}), (1, {"x": 2}), (2, {"x": 3}))
    cut = tmp_path / "cut"
    cut.write_text(whole.read_text(encoding="utf-8")[:-9], encoding="utf-8")
    assert [*read_log(cut).steps] == [0, 1]
    written(cut, (2, {"x": 3}))
    assert compare_logs(read_log(cut), read_log(whole)).whole


HEAD = json.dumps({"schema": 2, "about": {}, "names": ["x"]})
STEP = json.dumps({"step": 0, "digests": "00" * 8})
DAMAGED = {
    "nothing": "",
    "another file": "loss 0.1\nloss 0.2\n",
    "no names": STEP,
    "another schema": HEAD.replace("2", "1"),
    "a name twice": HEAD.replace('["x"]', '["x", "x"]'),
    "a line cut in the middle": f"{HEAD}\n{STEP[:9]}\n{STEP}\n",
    "a digest too short": f'{HEAD}\n{{"step": 0, "digests": "00"}}',
    "no digest": f'{HEAD}\n{{"step": 0}}',
    "a list": f"{HEAD}\n[]",
}


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_refused_and_never_appended_to(tmp_path, healthy, text) -> None:
    path = tmp_path / "log"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(LogError, match="log"):
        read_log(path)
    assert cli("same", healthy, path).exit_code == 2
    if text:
        with pytest.raises(LogError):
            DigestLog(path)
        assert path.read_text(encoding="utf-8") == text
