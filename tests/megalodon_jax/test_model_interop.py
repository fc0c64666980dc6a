"""To megalodon-hf and back: every field, every null, every wrapper a checkpoint comes in."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from megalodon_jax import MegalodonConfig, generate
from megalodon_jax.convert import (
    convert_jax_to_torch,
    load_from_pretrained,
    load_weights_from_torch,
    save_safetensors,
    state_dict,
)
from parity.checkpoint_pair.files import open_checkpoint
from parity.megalodon.reference import why_unavailable
from tests.helpers import TINY, model_of, same_leaves, tiny

OFF = MegalodonConfig(
    vocab_size=17,
    model_dim=8,
    num_layers=2,
    num_heads=2,
    z_dim=8,
    value_dim=12,
    ffn_hidden_dim=10,
    cema_ndim=2,
    chunk_size=4,
    max_cache_len=9,
    cache_unbounded=True,
    scan_layers=True,
    norm_num_groups=2,
    norm_eps=1e-3,
    rope_base=500.0,
    swiglu=True,
    rescale_nffn=True,
    scale_emb=True,
    norm_affine=False,
    mask_ema=False,
    dropout=0.1,
    attention_dropout=0.2,
    hidden_dropout=0.3,
    pad_token_id=None,
    bos_token_id=5,
    eos_token_id=(3, 4),
    max_positions=99,
    init_mode="xavier",
    use_checkpoint=True,
    output_size=19,
    param_dtype="bfloat16",
    compute_dtype="bfloat16",
    accum_dtype="bfloat16",
    softmax_dtype="bfloat16",
    gemm_backend=(("*.fc1", "mxfp8"),),
)
"""No field at its default: what is forgotten on the way comes back as another configuration."""
NULLS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "output_size": None}
FIELDS = [field.name for field in dataclasses.fields(MegalodonConfig)]


@pytest.fixture(autouse=True)
def as_users_have_it():
    """Annotations are checked in tests only; users meet the configuration's own messages."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def theirs() -> Any:
    """The configuration class of megalodon-hf."""
    if reason := why_unavailable():
        pytest.skip(f"not run: {reason}")
    import megalodon

    return megalodon


def written(config: MegalodonConfig) -> dict[str, Any]:
    """Its `config.json`, read again."""
    return json.loads(json.dumps(config.to_hf()))


def test_every_field_returns_from_hugging_faces_words() -> None:
    default = MegalodonConfig()
    assert [name for name in FIELDS if getattr(OFF, name) == getattr(default, name)] == []
    for config in (default, OFF, MegalodonConfig.from_7b(), tiny(eos_token_id=[7])):
        assert MegalodonConfig.from_hf(written(config)) == config
    assert MegalodonConfig.from_dict(json.loads(json.dumps(OFF.to_dict()))) == OFF
    assert hash(OFF) == hash(MegalodonConfig.from_hf(written(OFF)))


@pytest.mark.parametrize("name", FIELDS)
def test_no_field_returns_by_chance(name: str) -> None:
    fields = written(OFF)
    del fields[{"use_checkpoint": "gradient_checkpointing"}.get(name, name)]
    try:
        changed = MegalodonConfig.from_hf(fields)
    except ValueError:
        return  # What is left makes no sense without it.
    assert getattr(changed, name) == getattr(MegalodonConfig(), name)


def test_what_the_reference_writes_for_nothing_is_read() -> None:
    config = MegalodonConfig.from_hf(TINY.to_hf() | NULLS)
    assert config == tiny(pad_token_id=None, bos_token_id=None, eos_token_id=None)
    assert config.tied


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eos_token_id": []}, r"eos_token_id=\(\) must be None, an integer or a list of them"),
        ({"eos_token_id": [1, 2.0]}, r"eos_token_id=\(1, 2.0\) must be None, an integer or a list"),
        ({"eos_token_id": "2"}, "eos_token_id='2' must be None, an integer or a list"),
        ({"output_size": 19, "tie_word_embeddings": True}, "output_size=19 .*output_size=-1"),
    ],
)
def test_what_it_cannot_mean_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MegalodonConfig.from_hf(TINY.to_hf() | changes)


def test_without_a_padding_token_every_row_of_the_embedding_learns() -> None:
    ids = jnp.arange(TINY.vocab_size)[None]

    def taught(config: MegalodonConfig) -> np.ndarray:
        model = model_of(config)
        grad = jax.grad(lambda table: jnp.sum(looked_up(model, table, ids)))
        return np.asarray(jnp.any(grad(model.model.embed.weight) != 0, axis=1))

    assert taught(tiny(pad_token_id=None)).all()
    assert np.flatnonzero(~taught(tiny(pad_token_id=3))).tolist() == [3]


def looked_up(model: Any, table: jax.Array, ids: jax.Array) -> jax.Array:
    return eqx.tree_at(lambda m: m.model.embed.weight, model, table).model._embedded(ids)


def test_an_empty_prompt_needs_a_token_to_start_from() -> None:
    empty = jnp.zeros((1, 0), jnp.int32)
    with pytest.raises(ValueError, match="empty prompt starts from bos_token_id"):
        generate(model_of(tiny(bos_token_id=None)), empty, 1, temperature=0)


@pytest.mark.torch_ref
def test_the_references_own_configuration_says_the_same(theirs, tmp_path: Path) -> None:
    from transformers import AutoConfig

    AutoConfig.register("megalodon", theirs.MegalodonConfig, exist_ok=True)
    # Its constructor drops a capacity that nothing bounds.
    cases = [
        (OFF, dataclasses.replace(OFF, max_cache_len=None)),
        (MegalodonConfig(), MegalodonConfig(max_cache_len=2048)),
        (tiny(pad_token_id=None, eos_token_id=None), None),
        (tiny(bos_token_id=None, eos_token_id=[3, 4], cache_unbounded=True), None),
    ]
    for ours, expected in cases:
        if expected is None:
            kept = None if ours.cache_unbounded else ours.chunk_size
            expected = dataclasses.replace(ours, max_cache_len=kept)
        config = theirs.MegalodonConfig(**ours.to_hf())
        assert MegalodonConfig.from_hf(config) == expected
        config.save_pretrained(tmp_path)
        assert (
            MegalodonConfig.from_hf(
                json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
            )
            == expected
        )
        (tmp_path / "config.json").write_text(json.dumps(ours.to_hf()), encoding="utf-8")
        assert MegalodonConfig.from_hf(AutoConfig.from_pretrained(tmp_path)) == expected
    nothing = theirs.MegalodonConfig(**NULLS)
    assert MegalodonConfig.from_hf(nothing).pad_token_id is None


@pytest.mark.torch_ref
@pytest.mark.parametrize("output_size", [-1, 19])
def test_an_exported_folder_is_a_model_of_the_reference(theirs, tmp_path, output_size) -> None:
    model = model_of(tiny(output_size=output_size, swiglu=True, pad_token_id=None))
    save_safetensors(model, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(model.config.to_hf()), encoding="utf-8")
    loaded = theirs.MegalodonForCausalLM.from_pretrained(tmp_path)
    held = {name: tensor.numpy() for name, tensor in loaded.state_dict().items()}
    exported = state_dict(model)
    assert held.keys() == exported.keys()
    assert [n for n in exported if not np.array_equal(held[n], exported[n])] == []
    # And back, from what Transformers writes.
    # Its class does not say which weights are tied, without which no safetensors are written.
    loaded.save_pretrained(tmp_path / "theirs", safe_serialization=not model.tied)
    back = load_from_pretrained(tmp_path / "theirs")
    assert back.config == dataclasses.replace(model.config, max_cache_len=model.config.chunk_size)
    assert same_leaves(back, model)


def prefixed(prefix: str) -> dict[str, Any]:
    return {prefix + name: t for name, t in convert_jax_to_torch(model_of(TINY)).items()}


LIGHTNING = {
    "epoch": 1,
    "global_step": 3,
    "pytorch-lightning_version": "2.5.0",
    "optimizer_states": [{"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": []}],
    "state_dict": prefixed("model."),
}
WRAPPED = {
    "nested": {"state_dict": prefixed("")},
    "lightning": LIGHTNING,
    "compiled, in parallel": {"state_dict": prefixed("module._orig_mod."), "epoch": 1},
}


@pytest.mark.parametrize("content", WRAPPED.values(), ids=WRAPPED)
def test_a_wrapped_state_dict_loads(tmp_path: Path, content: dict) -> None:
    torch.save(content, tmp_path / "last.ckpt")
    loaded = load_from_pretrained(tmp_path / "last.ckpt", TINY)
    assert same_leaves(loaded, model_of(TINY))
    assert same_leaves(load_weights_from_torch(loaded, content["state_dict"]), loaded)
    opened = open_checkpoint("torch", tmp_path / "last.ckpt", TINY)
    assert opened.tensors.keys() == state_dict(loaded).keys()


def test_what_is_not_the_models_in_a_wrapper_is_listed(tmp_path: Path) -> None:
    names = prefixed("model.")
    torch.save({"state_dict": names | {"metric.total": torch.ones(2)}}, tmp_path / "last.ckpt")
    with pytest.raises(ValueError, match=r"1 problem\(s\):\n  unexpected metric.total \(2,\)"):
        load_from_pretrained(tmp_path / "last.ckpt", TINY)
    torch.save({"state_dict": names | prefixed("averaged.")}, tmp_path / "last.ckpt")
    with pytest.raises(ValueError, match=r"2 models, under the prefixes \['averaged.', 'model.'\]"):
        load_from_pretrained(tmp_path / "last.ckpt", TINY)


def test_a_checkpoint_that_holds_objects_beside_the_model_loads(tmp_path: Path) -> None:
    """That nothing in one is run is tested with the command that reads strangers' files."""
    torch.save(LIGHTNING | {"hyper_parameters": Path("data")}, tmp_path / "last.ckpt")
    assert same_leaves(load_from_pretrained(tmp_path / "last.ckpt", TINY), model_of(TINY))


def sharded(folder: Path) -> Path:
    """Two shards and their index, and a third file that the index does not name."""
    tensors = state_dict(model_of(TINY))
    names = sorted(tensors)
    files = {
        "model-00001-of-00002.safetensors": names[::2],
        "model-00002-of-00002.safetensors": names[1::2],
    }
    for file, held in files.items():
        save_file({n: tensors[n] for n in held}, folder / file)
    places = {n: file for file, held in files.items() for n in held}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}), encoding="utf-8")
    save_file({n: t + 1 for n, t in tensors.items()}, folder / "model-00003-of-00003.safetensors")
    return index


def test_a_shard_of_an_earlier_save_is_not_loaded(tmp_path: Path) -> None:
    sharded(tmp_path)
    assert same_leaves(load_from_pretrained(tmp_path, TINY), model_of(TINY))


@pytest.mark.parametrize("kind", ["elsewhere", "nowhere", "missing"])
def test_a_shard_that_its_index_does_not_describe_is_refused(tmp_path: Path, kind: str) -> None:
    index = sharded(tmp_path)
    file = tmp_path / "model-00002-of-00002.safetensors"
    held = load_file(file)
    name = "model.embed.weight" if "model.embed.weight" not in held else "lm_head.weight"
    if kind == "missing":
        name, _ = held.popitem()
    else:
        name = name if kind == "elsewhere" else "model.layers.7.attn.gamma"
        held[name] = np.zeros((17, 8), np.float32)
    save_file(held, file)
    with pytest.raises(ValueError, match=rf"{index.name} and shard {file.name} .*'{name}'"):
        load_from_pretrained(tmp_path, TINY)
