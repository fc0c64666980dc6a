"""The decoder against itself: absorbed, cached, jitted, sparse; and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megalodon_jax.weights import named_leaves
from parity.deepseek_v3.attention import LayerCache
from parity.deepseek_v3.cases import TINY, Case, by_name
from parity.deepseek_v3.checkpoint import load, save, stacked, unstacked
from parity.deepseek_v3.config import SIZES, MLAMoEConfig, Yarn, by_size
from parity.deepseek_v3.model import empty_cache, generate
from parity.deepseek_v3.router import Router, balanced, counts
from parity.engine.measure.measurement import Kind
from parity.tolerances import rule
from tests.helpers import rel_l2

EXACT = rule("jax64:oracle", Kind.BLOCK).absolute
CASE = by_name("grouped")
YARN = Yarn(4.0, 8, mscale=0.7, mscale_all_dim=1.0)
ONE = replace(CASE.config, num_hidden_layers=1, min_moe_layer=0, rope_scaling=YARN)
"""One sparse layer, and so half as long to compile; YaRN scales its scores and its rotary part."""


@pytest.fixture(scope="module")
def wide():
    """The model in float64, its text, and its logits from the whole text at once."""
    with jax.enable_x64(True):
        model = Case("one", "", ONE, bias=0.1).model()
        model = jax.tree.map(lambda x: x.astype(jnp.float64), model)
        ids = jnp.asarray(CASE.ids)
        return model, ids, eqx.filter_jit(model)(ids).logits


def test_absorbed_is_expanded(wide):
    model, ids, logits = wide
    assert ONE.score_scale > ONE.qk_head_dim**-0.5
    assert YARN.amplitude not in (1.0, YARN.temperature(1.0))
    with jax.enable_x64(True):
        absorbed = eqx.filter_jit(model)(ids, absorbed=True).logits
    assert rel_l2(absorbed, logits) < EXACT


def test_a_cache_of_latents_continues_as_the_whole_text(wide):
    model, ids, logits = wide
    with jax.enable_x64(True):
        cache = empty_cache(model, *ids.shape)
        parts = []
        for piece in (ids[:, :5], ids[:, 5:]):
            out = eqx.filter_jit(model)(piece, cache=cache)
            cache, parts = out.cache, [*parts, out.logits]
    assert rel_l2(jnp.concatenate(parts, axis=1), logits) < EXACT
    held = sum(x.size for x in jax.tree.leaves(cache.layers)) / ids.size / len(cache.layers)
    assert held == CASE.config.kv_lora_rank + CASE.config.qk_rope_head_dim


def test_jit_is_eager(wide):
    model, ids, _ = wide
    with jax.enable_x64(True):
        mlp, x = model.model.layers[0].mlp, model.model.embed_tokens.weight[ids]
        eager, jitted = (f(x)[0] for f in (mlp, eqx.filter_jit(mlp)))
    assert rel_l2(eager, jitted) < EXACT


def test_sorted_experts_are_all_experts_masked(wide):
    model, _, _ = wide
    with jax.enable_x64(True):
        mlp = model.model.layers[0].mlp
        x = jax.random.normal(jax.random.key(0), (6, CASE.config.hidden_size), jnp.float64)
        routing = mlp.gate.route(mlp.gate.logits(x))
        e = mlp.experts
        gate, up = (jnp.einsum("td,efd->etf", x, p.weight) for p in (e.gate_proj, e.up_proj))
        every = jnp.einsum("etf,edf->etd", jax.nn.silu(gate) * up, e.down_proj.weight)
        mask = jax.nn.one_hot(routing.chosen, every.shape[0], dtype=x.dtype)
        dense = jnp.einsum("tke,tk,etd->td", mask, routing.weights, every)
        assert rel_l2(e(x, routing), dense) < EXACT
        assert int(counts(routing).sum()) == routing.chosen.size


def test_greedy_generation_repeats_the_argmax_of_the_whole_text():
    model = Case("dense", "", replace(ONE, min_moe_layer=1)).model()
    prompt = jnp.asarray(CASE.ids[:, :4])
    text = generate(model, prompt, 3)
    best = jnp.argmax(eqx.filter_jit(model)(text[:, :-1]).logits, axis=-1)
    assert text.shape == (2, 7)
    assert (text[:, 4:] == best[:, 3:]).all()
    with pytest.raises(ValueError, match="0 new tokens"):
        generate(model, prompt, 0)


def test_a_group_that_is_out_is_out_even_where_scores_are_negative():
    """Transformers would take experts of closed groups here: their 0 is above a negative score."""
    config = replace(CASE.config, num_experts_per_tok=4)
    gate = Router(jnp.zeros((8, 1)), jnp.full(8, -2.0).at[:4].set(-1.0), config)
    chosen = gate.route(jnp.zeros((1, 8), jnp.float32)).chosen
    assert sorted(chosen[0].tolist()) == [0, 1, 2, 3]


def test_a_softmax_router_weighs_by_probability():
    config = replace(TINY, scoring_func="softmax", norm_topk_prob=False)
    gate = Router(jnp.zeros((8, 1)), jnp.zeros(8), config)
    logits = jnp.log(jnp.arange(1.0, 9.0))[None]
    routing = gate.route(logits)
    assert sorted(routing.chosen[0].tolist()) == [6, 7]
    np.testing.assert_allclose(
        sorted(routing.weights[0].tolist()),
        [7 / 36, 8 / 36],
        rtol=4 * float(np.finfo(np.float32).eps),
    )


def test_the_selection_bias_moves_against_the_load_and_has_no_gradient():
    moved = balanced(jnp.zeros(3), jnp.asarray([0, 3, 6], jnp.int32), 0.5)
    assert moved.tolist() == [0.5, 0.0, -0.5]
    gate = CASE.model().model.layers[1].mlp.gate
    logits = jnp.arange(8.0)[None] / 8
    grads = eqx.filter_grad(lambda g: jnp.sum(g.route(logits).weights ** 2))(gate)
    assert not np.any(grads.e_score_correction_bias)
    # Nor where somebody takes the bias itself, for a margin of the choice.
    grads = eqx.filter_grad(lambda g: jnp.sum(g.bias(jnp.float32)))(gate)
    assert not np.any(grads.e_score_correction_bias)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"n_routed_experts": 9, "n_group": 4}, "n_routed_experts=9 .* n_group=4"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok=9 .* of n_routed_experts=8"),
        ({"n_group": 4, "topk_group": 5}, "topk_group=5 .* n_group=4"),
        ({"n_group": 8, "topk_group": 8}, "n_routed_experts=8 in n_group=8 leaves 1"),
        ({"min_moe_layer": 3}, "min_moe_layer=3 .* num_hidden_layers=2"),
        ({"qk_rope_head_dim": 3}, "qk_rope_head_dim=3 must be even"),
        ({"kv_lora_rank": 0}, "kv_lora_rank=0"),
        ({"scoring_func": "tanh"}, "'tanh' must be 'sigmoid' or 'softmax'"),
    ],
)
def test_contradictions_fail_at_construction_with_both_numbers(fields, words):
    with pytest.raises(ValueError, match=words):
        replace(TINY, **fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "llama"}, "checkpoint of 'llama', expected model_type 'deepseek_v3'"),
        ({"qk_head_dim": 9}, "qk_head_dim=9, .* expected 8"),
        ({"num_key_value_heads": 1}, "num_key_value_heads=1, .* expected 2"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "type 'linear'"),
        ({"num_experts_per_tok": 99}, "num_experts_per_tok=99"),
        ({"quantization_config": {"fmt": "e4m3"}}, "quantised"),
    ],
)
def test_a_checkpoint_that_is_not_one_is_refused(tmp_path, fields, words):
    (tmp_path / "config.json").write_text(json.dumps(TINY.to_hf() | fields), encoding="utf-8")
    with pytest.raises(ValueError, match=words):
        load(tmp_path)


def test_a_checkpoint_comes_back_as_it_was_and_strictly(tmp_path):
    model = by_name("long").model()
    save(model, tmp_path)
    again = load(tmp_path)
    assert again.config == model.config
    for name, leaf in named_leaves(model).items():
        assert np.array_equal(leaf, named_leaves(again)[name]), name
    (tmp_path / "config.json").write_text(
        json.dumps(TINY.to_hf() | {"moe_intermediate_size": 9}), encoding="utf-8"
    )
    with pytest.raises(ValueError, match=r"shape \(8, 8, 16\), expected \(8, 9, 16\)"):
        load(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"config\.json not found"):
        load(tmp_path / "nowhere")


def test_experts_stack_only_when_they_are_all_there():
    parts = unstacked({"model.layers.0.mlp.experts.up_proj.weight": np.zeros((3, 2, 2))})
    assert stacked(parts)["model.layers.0.mlp.experts.up_proj.weight"].shape == (3, 2, 2)
    del parts["model.layers.0.mlp.experts.1.up_proj.weight"]
    with pytest.raises(ValueError, match=r"experts \[0, 2\]"):
        stacked(parts)


def test_there_are_four_sizes_and_others_are_named():
    assert list(SIZES) == ["small", "medium", "large", "xl"]
    assert all(isinstance(by_size(name), MLAMoEConfig) for name in SIZES)
    with pytest.raises(ValueError, match="unknown size 'huge': expected one of small, medium"):
        by_size("huge")


def test_the_selection_bias_is_no_part_of_a_weight():
    """Half of a score for every expert: the same choice, and so the same weights."""
    logits = jnp.arange(8.0)[None] / 8
    plain, biased = (
        Router(jnp.zeros((8, 1)), jnp.full(8, bias), CASE.config).route(logits)
        for bias in (0.0, 0.5)
    )
    assert biased.chosen.tolist() == plain.chosen.tolist()
    assert biased.weights.tolist() == plain.weights.tolist()
    # Normalised, and then scaled.
    assert CASE.config.norm_topk_prob and CASE.config.routed_scaling_factor != 1
    total = jnp.sum(plain.weights)
    slack = 8 * float(jnp.finfo(jnp.float32).eps)
    assert rel_l2(total, CASE.config.routed_scaling_factor) < slack


def test_groups_rank_by_their_best_two():
    """The first group has the best expert and a bad one; two others are good in both."""
    bias = jnp.asarray([0.9, 0.0, 0.6, 0.5, 0.55, 0.5, -1.0, -1.0])
    config = replace(CASE.config, n_group=4, topk_group=2, num_experts_per_tok=2)
    chosen = Router(jnp.zeros((8, 1)), bias, config).route(jnp.zeros((1, 8))).chosen
    assert sorted(chosen[0].tolist()) == [2, 4]


def test_scores_of_narrow_activations_are_wide():
    attention, c = CASE.model().model.layers[0].self_attn, CASE.config

    def narrow(*shape):
        return jax.ShapeDtypeStruct((1, 3, *shape), jnp.bfloat16)

    q = narrow(c.num_attention_heads, c.qk_nope_head_dim)
    rotary = narrow(c.num_attention_heads, c.qk_rope_head_dim)
    kept = LayerCache(narrow(c.kv_lora_rank), narrow(c.qk_rope_head_dim))
    for absorbed in (False, True):
        scores = partial(attention.scores, absorbed=absorbed)
        assert jax.eval_shape(scores, q, rotary, kept).dtype == jnp.float32
