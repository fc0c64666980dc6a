"""Leaves of anything by name, and words for whatever cannot be probed."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from megalodon_jax.convert import save_safetensors
from megalodon_jax.weights import named_leaves, weight_table
from stability.core.parameter_leaves import (
    Leaf,
    check_names,
    decays,
    is_megalodon,
    leaf_called,
    leaves_of,
    parameters_of,
    sample,
)
from tests.helpers import TINY, model_of, tiny

FLAX = {"params": {"Dense_0": {"kernel": jnp.ones((3, 2)), "bias": jnp.zeros(2)}}}


def test_a_flax_style_dict_an_equinox_module_and_a_megalodon_have_names() -> None:
    assert set(leaves_of(FLAX)) == {"params.Dense_0.kernel", "params.Dense_0.bias"}
    linear = eqx.nn.Linear(2, 3, key=jax.random.key(0))
    assert set(leaves_of(linear)) == {"weight", "bias"}
    assert set(leaves_of(model_of(TINY))) == {row.name for row in weight_table(TINY)}


def test_a_name_that_fits_two_leaves_is_that_of_neither() -> None:
    leaves = leaves_of({"a": {"w": np.ones(2)}, "b": {"w": np.ones(2)}, "c": {"v": np.ones(2)}})
    names = {name: leaf_called(name, leaves) for name in ("a.w", "w", "v", "x.c.v", "other")}
    assert {name: leaf and leaf.name for name, leaf in names.items()} == {
        "a.w": "a.w",
        "w": None,
        "v": "c.v",
        "x.c.v": "c.v",
        "other": None,
    }


def test_packed_and_whole_numbers_and_buffers_are_nothing_that_an_optimiser_moves() -> None:
    def floating(dtype: str, name: str = "w") -> bool:
        return Leaf(name, (2,), dtype, lambda: np.zeros(2)).floating

    assert floating("float32") and floating("bfloat16") and floating("float8_e4m3fn")
    assert not any(map(floating, ("float4_e2m1fn_x2", "int8", "uint8", "complex64", "key")))
    assert not floating("float32", "bn.running_mean")


def test_a_torch_state_dict_is_read_with_its_dtype_and_without_rounding() -> None:
    values = torch.tensor([1.0, -0.3, 2.5]).to(torch.bfloat16)
    leaf = leaves_of({"norm.weight": values, "note": "not a tensor"})["norm.weight"]
    assert (leaf.dtype, leaf.shape, leaf.size) == ("bfloat16", (3,), 3)
    assert np.array_equal(leaf.read(), values.float().numpy())
    module = torch.nn.LayerNorm(4)
    assert set(leaves_of(module.state_dict())) == {"weight", "bias"}


def test_a_checkpoint_is_read_leaf_by_leaf(tmp_path: Path) -> None:
    model = model_of(TINY)
    save_safetensors(model, tmp_path / "model.safetensors")
    for source in (tmp_path, tmp_path / "model.safetensors", str(tmp_path)):
        leaves = leaves_of(source)
        for name, array in named_leaves(model).items():
            assert np.array_equal(leaves[name].read(), np.asarray(array))
    save_file({"a": np.ones(3, ml_dtypes.bfloat16)}, tmp_path / "narrow.safetensors")
    assert leaves_of(tmp_path / "narrow.safetensors")["a"].dtype == "bfloat16"


def test_a_sharded_checkpoint_is_read_one_leaf_at_a_time(tmp_path: Path) -> None:
    count, rows = 16, 65_536
    places = {f"w{i}": f"{i % 2}.safetensors" for i in range(count)}
    for shard in sorted(set(places.values())):
        names = [name for name, place in places.items() if place == shard]
        save_file({n: np.full(rows, n[1:], np.float32) for n in names}, tmp_path / shard)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}), encoding="utf-8")
    tracemalloc.start()
    try:
        leaves = leaves_of(tmp_path)
        assert all(leaves[f"w{i}"].read()[0] == i for i in range(count))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    size = 4 * rows
    assert size < peak < 3 * size, "one leaf, and a copy of it, of sixteen"
    (tmp_path / "1.safetensors").unlink()
    assert leaves["w0"].read()[0] == 0
    with pytest.raises(FileNotFoundError, match=r"1\.safetensors"):
        leaves["w1"].read()


@pytest.mark.parametrize("empty", [{}, [], {"a": None}, {"a": "text"}])
def test_an_empty_tree_is_refused(empty: object) -> None:
    with pytest.raises(ValueError, match=r"no parameters in this .*model\.state_dict\(\)"):
        leaves_of(empty)


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        leaves_of(tmp_path / "missing.safetensors")
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"not tensors")
    with pytest.raises(ValueError, match="a text that begins 'not tensors', not a safetensors"):
        leaves_of(broken)


def test_integers_and_values_that_are_not_finite_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"floating-point.*steps \(int32\).*tree without"):
        parameters_of({"w": jnp.ones(2), "steps": jnp.arange(3)})
    with pytest.raises(ValueError, match=r"finite parameters.*w \(2\).*[Rr]estore"):
        parameters_of({"w": jnp.array([1.0, jnp.nan, jnp.inf])})
    assert set(parameters_of(FLAX)) == set(leaves_of(FLAX))


def test_another_models_names_are_refused_with_examples() -> None:
    check_names(leaves_of(model_of(TINY)), TINY)
    with pytest.raises(ValueError, match=r"not the weights of a Megalodon.*params.Dense_0.bias"):
        check_names(leaves_of(FLAX), TINY)
    with pytest.raises(ValueError, match=r"of another shape .*model\.embed\.weight"):
        check_names(leaves_of(model_of(tiny(vocab_size=19))), TINY)


def test_which_leaves_decay() -> None:
    assert is_megalodon(named_leaves(model_of(TINY)))
    assert not is_megalodon(["model.layers.0.self_attn.q_proj.weight"])
    assert decays("model.layers.0.attn.wz.weight", (2, 2), True)
    assert not decays("model.embed.weight", (2, 2), True)
    assert decays("kernel", (2, 2), False)
    assert not decays("bias", (2,), False)


def test_a_sample_is_decided_by_the_name_and_holds_elements_of_the_leaf() -> None:
    values = np.arange(6000, dtype=np.float32).reshape(60, 100)
    drawn = sample(values, "a", 100)
    assert len(set(drawn.tolist())) == 100
    assert set(drawn.tolist()) <= set(values.reshape(-1).tolist())
    assert np.array_equal(drawn, sample(values, "a", 100))
    assert not np.array_equal(drawn, sample(values, "b", 100))
    block = sample(values, "a", 600, matrix=True)
    assert block.shape == (18, 31)
    assert np.all(np.diff(block, axis=0) == np.diff(block, axis=0)[:, :1]), "whole rows"
    assert sample(values[:2, :2], "a", 100).shape == (4,)


def test_a_config_beside_the_file_is_not_needed(tmp_path: Path) -> None:
    save_file({"w": np.ones(2, np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}), encoding="utf-8")
    assert set(leaves_of(tmp_path)) == {"w"}
