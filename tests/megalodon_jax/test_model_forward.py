"""The whole model: what may influence what, and what is refused."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from megalodon_jax import MegalodonForCausalLM
from megalodon_jax.layers.dropout import dropout
from megalodon_jax.precision import audit_sensitive_param_dtypes
from megalodon_jax.weights import EMBEDDING, HEAD, named_leaves, replace_leaves
from parity.megalodon import oracle
from tests.helpers import (
    EXACT,
    EXACT_GRADIENT,
    TINY,
    arrays,
    logits_of,
    model_of,
    rel_l2,
    tiny,
    tokens,
)

B, L, V = 2, 10, TINY.vocab_size
IDS = tokens(TINY, (B, L))
ALL = np.ones((B, L), bool)


def wide_model() -> MegalodonForCausalLM:
    return model_of(TINY.with_dtype("float64"))


def wide_logits(ids: np.ndarray = IDS, mask: np.ndarray = ALL) -> np.ndarray:
    return np.asarray(logits_of(wide_model(), jnp.asarray(ids), jnp.asarray(mask)))


@eqx.filter_jit
def hidden_of(model, ids, mask):
    return model.model(ids, mask)[0]


@pytest.mark.usefixtures("x64")
def test_the_logits_are_those_of_the_oracle() -> None:
    weights = {n: w.astype(np.float64) for n, w in arrays(TINY).items()}
    expected = oracle.forward(TINY, weights, IDS)
    assert rel_l2(wide_logits(), expected) <= EXACT
    off = weights | {EMBEDDING: weights[EMBEDDING] + np.finfo(np.float32).eps}
    assert rel_l2(wide_logits(), oracle.forward(TINY, off, IDS)) > EXACT


@pytest.mark.parametrize("t", [0, 3, 4, 9])
@pytest.mark.usefixtures("x64")
def test_a_token_influences_only_itself_and_what_follows(t: int) -> None:
    changed = IDS.copy()
    changed[:, t] = changed[:, t] % (V - 1) + 1
    before, after = wide_logits(), wide_logits(changed)
    assert t == 0 or rel_l2(after[:, :t], before[:, :t]) <= EXACT
    for later in range(t, L):
        assert rel_l2(after[:, later], before[:, later]) > EXACT


@pytest.mark.usefixtures("x64")
def test_right_padding_changes_no_valid_position() -> None:
    mask = np.broadcast_to(np.arange(L) < 7, (B, L))
    padded = IDS.copy()
    padded[:, 7:] = 0
    expected = wide_logits()[:, :7]
    assert rel_l2(wide_logits(padded, mask)[:, :7], expected) <= EXACT
    assert rel_l2(wide_logits(padded)[:, :7], expected) <= EXACT
    left = np.broadcast_to(np.arange(L) >= 3, (B, L))
    assert rel_l2(wide_logits(IDS, left)[:, 3:], wide_logits()[:, 3:]) > EXACT


@pytest.mark.usefixtures("x64")
def test_what_stands_at_masked_positions_does_not_matter() -> None:
    mask = np.random.default_rng(0).random((B, L)) < 0.6
    other = np.where(mask, IDS, IDS % (V - 1) + 1).astype(np.int32)
    assert rel_l2(wide_logits(other, mask)[mask], wide_logits(IDS, mask)[mask]) <= EXACT
    assert rel_l2(wide_logits(other)[mask], wide_logits()[mask]) > EXACT


@pytest.mark.usefixtures("x64")
def test_not_even_a_nan_at_a_masked_position_reaches_the_others() -> None:
    mask = np.tile(np.arange(L) != 5, (B, 1))
    ids = np.where(mask, IDS % (V - 1), V - 1).astype(np.int32)
    model = wide_model()
    poisoned = replace_leaves(model, {EMBEDDING: model.model.embed.weight.at[V - 1].set(jnp.nan)})
    hidden = hidden_of(poisoned, jnp.asarray(ids), jnp.asarray(mask))
    assert np.all(np.isnan(hidden[:, 5]))
    healthy = hidden_of(model, jnp.asarray(ids), jnp.asarray(mask))
    assert rel_l2(hidden[mask], healthy[mask]) <= EXACT


@pytest.mark.usefixtures("x64")
def test_no_mask_means_all_valid() -> None:
    logits = logits_of(wide_model(), jnp.asarray(IDS), None)
    assert rel_l2(logits, wide_logits()) <= EXACT


@pytest.mark.parametrize("bad", [-1, V])
@pytest.mark.traced_checks
def test_an_id_outside_the_vocabulary_raises(bad: int) -> None:
    ids = jnp.asarray(IDS[:1, :2]).at[0, 1].set(bad)
    message = rf"input_ids must be in \[0, {V}\)"
    model = model_of(tiny(num_layers=1))
    with pytest.raises(RuntimeError, match=message):
        model.model._embedded(ids)
    with pytest.raises(eqx.EquinoxRuntimeError, match=message):
        logits_of(model, ids, None).block_until_ready()


@pytest.mark.usefixtures("unchecked_annotations")
@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (jnp.zeros(5, jnp.int32), r"input_ids are int32 \(5,\), expected integers \(B, L\); give"),
        (jnp.zeros((1, 5)), r"input_ids are float32 \(1, 5\), expected integers"),
    ],
)
def test_ids_of_another_shape_or_kind_are_refused(ids: jax.Array, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model_of(TINY)(ids)


@pytest.mark.parametrize("bad", [-1, V])
@pytest.mark.traced_checks
def test_a_label_outside_the_vocabulary_raises_under_jit(bad: int) -> None:
    ids = jnp.asarray(IDS[:, :3])
    message = rf"labels must be in \[0, {V}\) or ignore_index=-100"
    with pytest.raises(eqx.EquinoxRuntimeError, match=message):
        labelled_loss(model_of(tiny(num_layers=1)), ids, ids.at[0, 1].set(bad)).block_until_ready()


@eqx.filter_jit
def labelled_loss(model, ids, labels):
    return model.compute_loss(ids, labels)


@pytest.mark.usefixtures("unchecked_annotations")
def test_a_mask_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"attention_mask has shape \(2, 9\).*\(2, 10\)"):
        model_of(TINY).model(jnp.asarray(IDS), jnp.ones((B, 9), bool))


@pytest.mark.usefixtures("unchecked_annotations")
def test_labels_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"labels have shape \(2, 9\).*do not shift"):
        model_of(TINY).compute_loss(jnp.asarray(IDS), jnp.asarray(IDS[:, 1:]))


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_nothing_in_nothing_out(shape: tuple[int, int]) -> None:
    model, ids = model_of(tiny(num_layers=1)), jnp.zeros(shape, jnp.int32)
    logits = logits_of(model, ids, None)
    assert (logits.shape, logits.dtype) == ((*shape, V), jnp.float32)
    assert loss_of(model, ids) == 0


@eqx.filter_jit
def loss_of(model, ids):
    return model.compute_loss(ids, ids)


# Compiles in a fraction of the default generator's time.
CHEAP_KEY = jax.random.key(0, impl="rbg")
DROPPING = tiny(num_layers=1, num_heads=1, hidden_dropout=0.2)


@eqx.filter_jit
def noisy_loss(model, key, deterministic=False):
    ids = jnp.asarray(IDS[:, :4])
    return model.compute_loss(ids, ids, deterministic=deterministic, key=key)


@pytest.mark.parametrize("rate", ["dropout", "hidden_dropout", "attention_dropout"])
def test_dropout_without_a_key_is_refused(rate: str) -> None:
    with pytest.raises(ValueError, match="positive dropout rate needs key"):
        model_of(tiny(**{rate: 0.1}))(jnp.asarray(IDS), deterministic=False)


def test_dropout_is_a_function_of_its_key_and_off_by_default() -> None:
    model, keys = model_of(DROPPING), jax.random.split(CHEAP_KEY)
    assert noisy_loss(model, keys[0]) == noisy_loss(model, keys[0])
    assert noisy_loss(model, keys[0]) != noisy_loss(model, keys[1])
    quiet = noisy_loss(model, keys[0], True)
    assert quiet == noisy_loss(model, keys[1], True)
    assert quiet != noisy_loss(model, keys[0])


@pytest.fixture
def unchecked_annotations():
    """Annotations are checked in tests only; users meet the model's own messages."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def test_dropout_keeps_its_share_and_its_mean() -> None:
    rate, n = 0.3, 40_000
    y = np.asarray(dropout(jnp.ones(n), rate, jax.random.key(0)))
    assert set(np.unique(y)) == {np.float32(0), np.float32(1) / np.float32(1 - rate)}
    deviation = np.sqrt(rate * (1 - rate) / n)
    assert abs(np.mean(y == 0) - rate) < 5 * deviation
    assert abs(np.mean(y) - 1) < 5 * deviation / (1 - rate)


def test_dropout_at_its_ends() -> None:
    x, key = jnp.arange(5.0), jax.random.key(0)
    assert np.array_equal(dropout(x, 0.0, key), x)
    assert np.array_equal(dropout(x, 0.5, None), x)
    assert not np.any(dropout(x, 1.0, key))
    # Nothing is kept, and nothing divided by 0: the gradient is 0 too.
    assert not np.any(jax.grad(lambda x: jnp.sum(dropout(x, 1.0, key)))(x))


def gradient_of(config, key):
    @jax.jit
    def gradient(params):
        model = eqx.combine(params, static)
        ids = jnp.asarray(IDS[:, :4])
        return eqx.filter_grad(lambda m: m.compute_loss(ids, ids, deterministic=False, key=key))(
            model
        )

    params, static = eqx.partition(model_of(config), eqx.is_array)
    traced = gradient.trace(params)
    return named_leaves(traced.lower().compile()(params)), str(traced.jaxpr)


@pytest.mark.usefixtures("x64")
def test_rematerialisation_changes_the_schedule_and_no_gradient() -> None:
    key = CHEAP_KEY
    plain, program = gradient_of(DROPPING.with_dtype("float64"), key)
    checkpointed = tiny(**(DROPPING.to_dict() | {"use_checkpoint": True}))
    again, program_again = gradient_of(checkpointed.with_dtype("float64"), key)
    assert ("remat" in program, "remat" in program_again) == (False, True)
    assert all(rel_l2(again[n], plain[n]) <= EXACT_GRADIENT for n in plain)


def test_nothing_is_rematerialised_without_dropout_to_repeat() -> None:
    """A deterministic pass is inference, or training that asked for no schedule."""
    model = model_of(tiny(use_checkpoint=True))

    def program(deterministic: bool) -> str:
        def loss(ids):
            return model.compute_loss(ids, ids, deterministic=deterministic, key=CHEAP_KEY)

        return str(jax.make_jaxpr(loss)(jnp.asarray(IDS)))

    assert ("remat" in program(True), "remat" in program(False)) == (False, True)


def test_bfloat16_compute_is_finite_and_leaves_sensitive_parameters_wide() -> None:
    config = tiny(num_layers=1, param_dtype="bfloat16", compute_dtype="bfloat16")
    model = model_of(config)
    logits = logits_of(model, jnp.asarray(IDS), None)
    assert logits.dtype == jnp.float32
    assert np.all(np.isfinite(logits))
    assert audit_sensitive_param_dtypes(model) == {}
    stored = {n: leaf.dtype for n, leaf in named_leaves(model).items()}
    assert stored[EMBEDDING] == jnp.bfloat16
    wide = model_of(tiny(num_layers=1))
    assert not np.array_equal(logits, logits_of(wide, jnp.asarray(IDS), None))


@eqx.filter_jit
@eqx.filter_grad
def gradient_with_padding(model, ids):
    return model.compute_loss(ids, ids)


@pytest.mark.parametrize("size", [-1, 19], ids=["tied", "untied"])
def test_the_padding_row_gets_no_gradient_through_the_embedding(size: int) -> None:
    config = tiny(num_layers=1, output_size=size, pad_token_id=3)
    ids = jnp.asarray(IDS).at[:, 2].set(3).at[:, 5].set(3)
    grad = gradient_with_padding(model_of(config), ids).model.embed.weight
    through_embedding = np.any(np.asarray(grad) != 0, axis=1)
    used = np.isin(np.arange(V), np.asarray(ids)[:, :-1])
    if size == -1:
        assert np.all(through_embedding), "a tied head gives every row a gradient"
    else:
        assert through_embedding.tolist() == (used & (np.arange(V) != 3)).tolist()


def test_a_tied_head_is_the_embedding_and_an_untied_one_has_its_own_size() -> None:
    tied, untied = model_of(TINY), model_of(tiny(output_size=19))
    assert tied.tied
    assert tied.lm_head is None
    assert HEAD not in named_leaves(tied)
    assert not untied.tied
    assert named_leaves(untied)[HEAD].shape == (19, TINY.model_dim)
    shapes = eqx.filter_eval_shape(lambda m: m(jnp.asarray(IDS))[0], untied)
    assert shapes.shape == (B, L, 19)


def test_rescaled_layers_halve_and_others_do_not() -> None:
    shape = eqx.filter_eval_shape
    rescaled = shape(
        MegalodonForCausalLM, tiny(num_layers=3, rescale_nffn=True), key=jax.random.key(0)
    )
    assert [block.ffn.scale for block in rescaled.model.layers] == [0.1, 0.05, 0.025]
    plain = shape(MegalodonForCausalLM, TINY, key=jax.random.key(0))
    assert [block.ffn.scale for block in plain.model.layers] == [1.0, 1.0]


def test_scaled_embeddings_are_the_stored_rows_times_the_root_of_the_width() -> None:
    plain = model_of(TINY).model._embedded(jnp.asarray(IDS))
    scaled = model_of(tiny(scale_emb=True)).model._embedded(jnp.asarray(IDS))
    assert np.array_equal(scaled, np.asarray(plain) * np.float32(np.sqrt(8)))
