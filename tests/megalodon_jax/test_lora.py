"""Adapters on linear maps: the start, what is trained, merging, meshes, and PEFT's files."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file

from megalodon_jax import MegalodonForCausalLM, stack_layers, unstack_layers
from megalodon_jax.layers import linear, lora
from megalodon_jax.layers.linear import Linear, linear_maps
from megalodon_jax.layers.lora import LoRALinear
from megalodon_jax.lora import add_lora, load_lora, merge_lora, partition_lora, save_lora
from megalodon_jax.optimiser import optimiser_update
from megalodon_jax.roles import Role, named_leaves, replace_leaves
from megalodon_jax.sharding import make_mesh, partition_specs, shard_model
from megalodon_jax.weights import build_model
from tests.helpers import (
    EXACT,
    arrays,
    logits_of,
    model_of,
    rel_l2,
    rounding_bound,
    roundoff,
    same_leaves,
    tiny,
    tokens,
    wide_arrays,
)

CONFIG = tiny(swiglu=True)
TARGETS = ("*.attn.w*", "*.ffn.*")
RANK, ALPHA = 3, 4.0
IDS = tokens(CONFIG, (2, 10))
PREFIX = "base_model.model."


def trained(model: MegalodonForCausalLM, seed: int = 5) -> MegalodonForCausalLM:
    """The model with every adapter at values of its own: at B = 0 a bug of A has no effect."""
    rng = np.random.default_rng(seed)
    values = {
        n: jnp.asarray(0.3 * rng.standard_normal(x.shape), x.dtype)
        for n, x in named_leaves(model).items()
        if "lora_" in n
    }
    return replace_leaves(model, values)


def adapted(base: MegalodonForCausalLM | None = None, **options) -> MegalodonForCausalLM:
    options = {"alpha": ALPHA, "targets": TARGETS, "key": jax.random.key(0)} | options
    return add_lora(model_of(CONFIG) if base is None else base, RANK, **options)


def by_hand(model: MegalodonForCausalLM, scale: float = ALPHA / RANK) -> MegalodonForCausalLM:
    """The plain model of weights W + scale B A, written out in float64 from the leaves' names."""
    leaves = {n: np.asarray(x, np.float64) for n, x in named_leaves(model).items()}
    for name in [n for n in leaves if n.endswith(".lora_A")]:
        stem = name.removesuffix("lora_A")
        A, B = leaves.pop(name), leaves.pop(f"{stem}lora_B")
        leaves[f"{stem}weight"] = leaves[f"{stem}weight"] + scale * (B @ A)
    return build_model(model.config, leaves)


@pytest.fixture(scope="module")
def model() -> MegalodonForCausalLM:
    return trained(adapted())


@pytest.fixture(scope="module")
def wide() -> tuple[MegalodonForCausalLM, np.ndarray]:
    """A float64 model with adapters, and its logits."""
    with jax.enable_x64(True):
        config = CONFIG.with_dtype("float64")
        model = trained(adapted(build_model(config, wide_arrays(config))))
        return model, np.asarray(logits_of(model, IDS, None))


def test_the_start_is_the_base_model_bit_for_bit() -> None:
    base, start = model_of(CONFIG), adapted()
    assert np.array_equal(logits_of(start, IDS, None), logits_of(base, IDS, None))
    assert same_leaves(merge_lora(start), base)
    leaves, maps = named_leaves(start), linear_maps(start)
    assert [n for n, m in maps.items() if isinstance(m, LoRALinear)] == list(maps)
    for name, each in maps.items():
        A, B = leaves[f"{name}.lora_A"], leaves[f"{name}.lora_B"]
        assert A.shape == (RANK, each.weight.shape[1]) and B.shape == (each.weight.shape[0], RANK)
        assert not np.any(B) and np.max(np.abs(A)) <= A.shape[1] ** -0.5
    # Every matrix starts elsewhere, in every layer.
    starts = {np.asarray(leaves[f"{name}.lora_A"]).tobytes() for name in maps}
    assert len(starts) == len(maps)


def test_a_map_adds_scale_times_B_A(wide) -> None:  # noqa: N802
    model, logits = wide
    with jax.enable_x64(True):
        assert rel_l2(logits, logits_of(by_hand(model), IDS, None)) < EXACT
        # The adapters do something, and merged they do the same.
        assert rel_l2(logits, logits_of(build_model(model.config, wide_arrays(CONFIG)), IDS, None))
        assert rel_l2(logits_of(merge_lora(model), IDS, None), logits) < EXACT


def test_merged_in_float32_differs_by_rounding(model) -> None:
    merged, logits = merge_lora(model), logits_of(model, IDS, None)
    assert type(merged) is MegalodonForCausalLM and not lora.lora_maps(merged)
    bound = rounding_bound(lambda m: logits_of(m, IDS, None), model)
    assert rel_l2(logits_of(merged, IDS, None), logits) < bound


def test_merged_in_bfloat16_is_rounded_once() -> None:
    config = CONFIG.with_dtype("bfloat16")
    model = trained(adapted(build_model(config, arrays(config)), dtype="float32"))
    merged = linear_maps(merge_lora(model))
    half_ulp = float(jnp.finfo(jnp.bfloat16).eps) / 2
    for name, each in linear_maps(model).items():
        W, A, B = (np.asarray(x, np.float64) for x in (each.weight, each.lora_A, each.lora_B))
        exact = W + each.scale * (B @ A)
        assert merged[name].weight.dtype == jnp.bfloat16
        wide = np.abs(W) + each.scale * (np.abs(B) @ np.abs(A))
        bound = half_ulp * np.abs(exact) + 2 * roundoff(RANK + 3) * wide
        assert np.all(np.abs(np.asarray(merged[name].weight, np.float64) - exact) <= bound)


def test_rank_stabilised_adapters_are_divided_by_the_root_of_the_rank(wide) -> None:
    with jax.enable_x64(True):
        model = trained(adapted(build_model(wide[0].config, wide_arrays(CONFIG)), rslora=True))
        expected = logits_of(by_hand(model, ALPHA / RANK**0.5), IDS, None)
        assert rel_l2(logits_of(model, IDS, None), expected) < EXACT


def test_the_scale_is_applied_in_float32() -> None:
    """1 / 3 is no bfloat16 number: applied as one, two thirds of these products round elsewhere."""
    config = dataclasses.replace(CONFIG.with_dtype("bfloat16"), accum_dtype="bfloat16")
    base = Linear(1, 1, config, use_bias=False, key=jax.random.key(0))
    base = eqx.tree_at(lambda m: m.weight, base, jnp.zeros((1, 1), jnp.bfloat16))
    first = jnp.asarray([[1.0], [0.0], [0.0]], jnp.bfloat16)
    each = LoRALinear(base, first, first.T, alpha=1.0)
    x = jnp.arange(128, 256, dtype=jnp.bfloat16)[:, None]
    # A product of two float32 numbers, rounded once.
    expected = (np.asarray(x, np.float32) * np.float32(1 / 3)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(each(x)), expected)


FAULTS = {
    "scale forgotten": mock.patch.object(LoRALinear, "scale", 1.0),
    "alpha alone": mock.patch.object(LoRALinear, "scale", ALPHA),
    "A and B exchanged": mock.patch.object(
        LoRALinear, "merged", lambda self, once=LoRALinear.merged: once(_exchanged(self))
    ),
    "merged twice": mock.patch.object(
        LoRALinear, "merged", lambda self, once=LoRALinear.merged: once(_around(once(self), self))
    ),
}


def _around(base: linear.Linear, like: LoRALinear) -> LoRALinear:
    return LoRALinear(base, like.lora_A, like.lora_B, alpha=like.alpha)


def _exchanged(node: LoRALinear) -> LoRALinear:
    """The map with its two matrices exchanged, which of a square one no shape tells."""
    if len({*node.weight.shape}) > 1:
        return node
    return LoRALinear(node, node.lora_B.T, node.lora_A.T, alpha=node.alpha)


def _of_layer_0(model: MegalodonForCausalLM) -> MegalodonForCausalLM:
    leaves = named_leaves(model)
    first = {n.replace("layers.0.", "layers.1."): x for n, x in leaves.items() if ".0." in n}
    return replace_leaves(model, {n: x for n, x in first.items() if "lora_" in n})


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.usefixtures("x64")
def test_a_wrong_scale_and_a_second_merge_are_seen(fault: str, wide) -> None:
    model, logits = wide
    with FAULTS[fault]:
        wrong = merge_lora(model)
    assert rel_l2(logits_of(wrong, IDS, None), logits) > EXACT


@pytest.mark.usefixtures("x64")
def test_adapters_of_one_layer_in_all_are_seen(wide) -> None:
    model, logits = wide
    assert rel_l2(logits_of(_of_layer_0(model), IDS, None), logits) > EXACT


def test_exchanged_matrices_are_refused_by_shape(model) -> None:
    swapped = {
        n: named_leaves(model)[n.replace("lora_A", "lora_B")].T
        for n in named_leaves(model)
        if n.endswith("wv.lora_A")
    }
    with pytest.raises(ValueError, match=r"LoRALinear: lora_A has shape .*, expected \(3, 8\)"):
        replace_leaves(model, swapped)(IDS)


@eqx.filter_jit
def gradients_of(adapters, frozen, ids, key=None):
    def loss(adapters):
        model = eqx.combine(adapters, frozen)
        return model.compute_loss(ids, ids, deterministic=key is None, key=key)

    return eqx.filter_grad(loss)(adapters)


@pytest.mark.parametrize("stacked", [False, True])
def test_only_adapters_are_trained(stacked: bool, model) -> None:
    model = stack_layers(model) if stacked else model
    adapters, frozen = partition_lora(model)
    names = {n for n in named_leaves(model) if "lora_" in n}
    assert named_leaves(adapters).keys() == names
    assert named_leaves(frozen).keys() == named_leaves(model).keys() - names
    transform = optax.adamw(1e-2)
    gradients = gradients_of(adapters, frozen, IDS)
    assert named_leaves(gradients).keys() == names
    assert all(np.any(x) for x in named_leaves(gradients).values())
    updates, _ = optimiser_update(transform, gradients, transform.init(adapters), adapters)
    after = eqx.combine(eqx.apply_updates(adapters, updates), frozen)
    moved = {n for n, x in named_leaves(after).items() if not np.array_equal(x, _leaf(model, n))}
    assert moved == names


def _leaf(model, name):
    return named_leaves(model)[name]


def test_a_partition_with_frozen_leaves_is_seen(model) -> None:
    with (
        mock.patch("megalodon_jax.lora.role_of", lambda name: Role.LORA),
        pytest.raises(AssertionError),
    ):
        test_only_adapters_are_trained(False, model)


def test_at_the_start_the_gradient_of_A_is_0_and_that_of_B_is_not() -> None:  # noqa: N802
    gradients = named_leaves(gradients_of(*partition_lora(adapted()), IDS))
    assert all(np.any(x) == n.endswith("lora_B") for n, x in gradients.items())


DROPPING = trained(adapted(dropout=0.5))


def test_dropout_acts_in_training_alone(model) -> None:
    evaluated = logits_of(DROPPING, IDS, None)
    assert np.array_equal(evaluated, logits_of(model, IDS, None))

    @eqx.filter_jit
    def in_training(model, key):
        return model(IDS, deterministic=False, key=key)[0]

    first, again, other = (in_training(DROPPING, jax.random.key(k)) for k in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, evaluated) and not np.array_equal(first, other)
    with pytest.raises(ValueError, match="needs key"):
        DROPPING(IDS, deterministic=False)
    # Stacked layers have keys of their own too.
    stacked = in_training(stack_layers(DROPPING), jax.random.key(1))
    bound = rounding_bound(lambda m: in_training(m, jax.random.key(1)), DROPPING)
    assert rel_l2(stacked, first) < bound


def test_every_adapter_drops_by_a_key_of_its_own() -> None:
    block = DROPPING.model.layers[0]
    key = jax.random.key(1)
    keyed = lora.with_dropout_keys(block, key)
    keys = [jax.random.key_data(m.key).tolist() for m in lora.lora_maps(keyed).values()]
    used = [jax.random.key_data(k).tolist() for k in jax.random.split(key, 64)]
    assert len({*map(tuple, keys + used)}) == len(keys) + len(used)
    assert lora.with_dropout_keys(block, None) is block


def test_other_dropouts_draw_what_they_drew_without_adapters() -> None:
    base = model_of(tiny(hidden_dropout=0.3, num_layers=1))

    @eqx.filter_jit
    def in_training(model):
        return model(IDS, deterministic=False, key=jax.random.key(1))[0]

    # B is 0: whatever the adapter drops, it adds nothing.
    start = adapted(base, dropout=0.5)
    assert np.array_equal(in_training(start), in_training(base))


def draws(block) -> bool:
    """Whether the program of a block, called as at evaluation, draws anything."""
    x = jnp.zeros((1, 4, CONFIG.model_dim))
    return "random_bits" in str(jax.make_jaxpr(lambda x: block(x)[0])(x))


def test_dropout_at_evaluation_is_seen() -> None:
    block = DROPPING.model.layers[0]
    assert not draws(block)
    with mock.patch(
        "megalodon_jax.model.with_dropout_keys",
        lambda block, key: lora.with_dropout_keys(block, jax.random.key(0)),
    ):
        assert draws(block)


def test_stacked_layers_have_the_same_adapters(model) -> None:
    stacked = add_lora(
        stack_layers(model_of(CONFIG)), RANK, alpha=ALPHA, targets=TARGETS, key=jax.random.key(0)
    )
    assert eqx.tree_equal(unstack_layers(stacked), adapted())
    stacked = stack_layers(model)
    bound = rounding_bound(lambda m: logits_of(m, IDS, None), model)
    assert rel_l2(logits_of(stacked, IDS, None), logits_of(model, IDS, None)) < bound
    merged = unstack_layers(merge_lora(stacked))
    for name, leaf in named_leaves(merge_lora(model)).items():
        assert rel_l2(named_leaves(merged)[name], leaf) < roundoff(RANK + 3), name


def test_scanned_layers_differ_where_only_one_has_adapters() -> None:
    config = dataclasses.replace(CONFIG, scan_layers=True)
    model = trained(adapted(model_of(config), targets=("model.layers.1.*",)))
    unrolled = replace_leaves(
        adapted(targets=("model.layers.1.*",)),
        {n: x for n, x in named_leaves(model).items() if "lora_" in n},
    )
    bound = rounding_bound(lambda m: logits_of(m, IDS, None), unrolled)
    assert rel_l2(logits_of(model, IDS, None), logits_of(unrolled, IDS, None)) < bound


def test_adapters_lie_where_their_matrix_does(model) -> None:
    mesh = make_mesh(fsdp=2, tensor=2)
    specs = {n: tuple(spec) for n, spec in partition_specs(model, mesh).items()}
    for name in linear_maps(model):
        rows, columns = specs[f"{name}.weight"]
        assert specs[f"{name}.lora_A"] == (None, columns), name
        assert specs[f"{name}.lora_B"] == (rows, None), name
    ids = jnp.asarray(IDS)
    bound = rounding_bound(lambda m: logits_of(m, ids, None), model)
    assert rel_l2(logits_of(shard_model(model, mesh), ids, None), logits_of(model, ids, None)) < (
        bound
    )


def test_a_folder_has_the_names_of_peft_and_comes_back_bit_for_bit(model, tmp_path) -> None:
    save_lora(tmp_path / "a", DROPPING, base="somewhere/base")
    tensors = load_file(tmp_path / "a" / "adapter_model.safetensors")
    names = [n for n in named_leaves(model) if "lora_" in n]
    assert sorted(tensors) == sorted(f"{PREFIX}{n}.weight" for n in names)
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text("utf-8"))
    expected = {"peft_type": "LORA", "r": RANK, "lora_alpha": 4, "lora_dropout": 0.5}
    assert expected.items() <= config.items()
    assert config["base_model_name_or_path"] == "somewhere/base" and not config["use_rslora"]
    assert set(config["target_modules"]) == set(linear_maps(model))
    assert eqx.tree_equal(load_lora(model_of(CONFIG), tmp_path / "a"), DROPPING)
    # Over a folder of adapters, from a stacked model, and onto one.
    save_lora(tmp_path / "a", stack_layers(model))
    loaded = load_lora(stack_layers(model_of(CONFIG)), tmp_path / "a")
    assert eqx.tree_equal(unstack_layers(loaded), model)


def test_ranks_and_alphas_of_their_own_come_back(tmp_path) -> None:
    model = adapted(targets=("*.attn.*",))
    key = jax.random.key(1)
    model = add_lora(model, 2, alpha=3.5, targets=("model.layers.1.ffn.*",), key=key)
    save_lora(tmp_path / "a", model)
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text("utf-8"))
    assert set(config["rank_pattern"].values()) == {2}
    assert eqx.tree_equal(load_lora(model_of(CONFIG), tmp_path / "a"), model)


def test_rank_stabilised_adapters_come_back_as_such(tmp_path) -> None:
    model = adapted(rslora=True, dropout=0.25)
    save_lora(tmp_path / "a", model)
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text("utf-8"))
    assert (config["use_rslora"], config["lora_dropout"]) == (True, 0.25)
    assert eqx.tree_equal(load_lora(model_of(CONFIG), tmp_path / "a"), model)


@pytest.fixture
def saved(model, tmp_path):
    save_lora(tmp_path / "a", model)
    return tmp_path / "a"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"bias": "all"}, "bias='all'"),
        ({"peft_type": "IA3"}, "peft_type='IA3'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"something_new": {"on": 1}}, "something_new"),
        ({"r": 2}, r"lora_A has shape \(3, 8\), expected rank 2 on axis 0"),
    ],
)
def test_adapters_of_another_kind_are_refused(change, why, saved) -> None:
    file = saved / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | change), "utf-8")
    with pytest.raises(ValueError, match=why):
        load_lora(model_of(CONFIG), saved)


@pytest.mark.parametrize(
    ("renamed", "by", "what", "count"),
    [
        ("layers.0", "layers.7", "unexpected model.layers.7", 8),
        (".0.attn.wv.lora_A", ".0.attn.wv.else", "missing model.layers.0.attn.wv.lora_A", 1),
        ("wr.lora_A", "wr.lora_embedding_A", "unexpected base_model.*lora_embedding_A", 2),
    ],
)
def test_every_name_that_does_not_fit_is_listed(renamed, by, what, count, saved) -> None:
    file = saved / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({n.replace(renamed, by): x for n, x in tensors.items()}, file)
    with pytest.raises(ValueError) as error:
        load_lora(model_of(CONFIG), saved)
    assert len(re.findall(what, str(error.value))) == count


def test_an_adapter_of_other_sizes_is_refused(saved) -> None:
    file = saved / "adapter_model.safetensors"
    tensors = load_file(file)
    name = f"{PREFIX}model.layers.1.attn.wv.lora_B.weight"
    save_file(tensors | {name: tensors[name][:-1]}, file)
    with pytest.raises(ValueError, match=r"attn.wv has shape \(12, 8\), its adapter \(11, 8\)"):
        load_lora(model_of(CONFIG), saved)


def test_float16_adapters_become_float32(saved, model) -> None:
    file = saved / "adapter_model.safetensors"
    save_file({n: x.astype(np.float16) for n, x in load_file(file).items()}, file)
    for name, leaf in named_leaves(load_lora(model_of(CONFIG), saved)).items():
        if "lora_" in name:
            assert leaf.dtype == jnp.float32
            assert np.array_equal(leaf, np.asarray(named_leaves(model)[name], np.float16))


def test_a_folder_with_something_else_is_left(model, tmp_path) -> None:
    (tmp_path / "notes.txt").write_text("mine", "utf-8")
    with pytest.raises(ValueError, match=r"notes\.txt"):
        save_lora(tmp_path, model)
    with pytest.raises(FileNotFoundError, match=r"adapter_config\.json"):
        load_lora(model_of(CONFIG), tmp_path)


@pytest.mark.parametrize(
    ("config", "options", "why"),
    [
        (CONFIG, {"targets": ("*.nothing",)}, "matches no module; there are model.layers"),
        (CONFIG, {"targets": "*.attn.wv"}, "must be a sequence of patterns"),
        (tiny(output_size=19), {"targets": ("lm_head",)}, "would do nothing"),
        (tiny(gemm_backend="mxfp8"), {}, "is multiplied in mxfp8, expected the default"),
        (CONFIG, {"dropout": 1.0}, "dropout=1.0 must be in"),
        (CONFIG, {"dtype": "float16"}, "dtype=float16 is refused"),
    ],
)
def test_what_cannot_be_is_refused_in_words(config, options, why) -> None:
    with pytest.raises(ValueError, match=why):
        adapted(model_of(config), **({"targets": ("*",)} | options))


def test_twice_and_never_are_refused(model) -> None:
    with pytest.raises(ValueError, match="has an adapter already"):
        adapted(model)
    for call in (merge_lora, partition_lora, lambda m: save_lora("nowhere", m)):
        with pytest.raises(ValueError, match="expected a model with adapters"):
            call(merge_lora(model))
    with pytest.raises(ValueError, match="rank=0"):
        add_lora(model_of(CONFIG), 0, alpha=1.0, key=jax.random.key(0))
    for alpha in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"alpha={alpha} must be a finite number above 0"):
            add_lora(model_of(CONFIG), 1, alpha=alpha, key=jax.random.key(0))
