"""Packed documents: each one of a row is what it is alone, and nothing of one reaches another."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from megalodon_jax import MegalodonConfig, init_cache, trim_cache
from megalodon_jax.layers import attention, complex_ema, packed_ema
from megalodon_jax.loss import accumulate_gradients
from megalodon_jax.model import MegalodonForCausalLM
from megalodon_jax.segments import document_positions
from megalodon_jax.sharding import make_mesh, shard_model
from megalodon_jax.sharding.caches import shard_cache
from megalodon_jax.stacked import stack_layers
from megalodon_jax.weights import named_leaves
from parity.megalodon import oracle
from tests.helpers import (
    EXACT,
    EXACT_GRADIENT,
    TINY,
    model_of,
    rel_l2,
    tiny,
    tokens,
    wide_arrays,
)

# More than two blocks of the EMA, and chunks that no block is a multiple of.
B, L = 2, 2 * packed_ema.BLOCK + 7
LONG = tiny(chunk_size=24, num_layers=1, swiglu=True, scale_emb=True)
"""Chunks longer than many documents; `TINY` has chunks shorter than most."""
CONFIGS = {"short chunks": TINY, "long chunks": LONG}
Lengths = Sequence[Sequence[int]]
PACKINGS: dict[str, Lengths] = {
    # A document of one token, of a chunk of either configuration, and of the row.
    "mixed": ([1, 4, 24, 29, 13], [L]),
    "at the blocks": ([packed_ema.BLOCK, packed_ema.BLOCK, 7], [packed_ema.BLOCK - 1, 2, 38]),
}


def random_packing(seed: int) -> Lengths:
    """Cut each row anywhere, into up to nine documents."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(B):
        cuts = rng.choice(np.arange(1, L), rng.integers(0, 9), replace=False)
        rows.append(np.diff([0, *sorted(cuts), L]).tolist())
    return rows


def ids_of(lengths: Lengths) -> np.ndarray:
    """Segment ids; those of a row may come back, as only a change begins a document."""
    return np.stack([np.repeat(np.arange(len(row)) % 3, row) for row in lengths]).astype(np.int32)


def mask_of(lengths: Lengths) -> np.ndarray:
    """A masked tail in the first row, and a hole in the last document of the second."""
    mask = np.ones((B, L), bool)
    mask[0, L - min(3, lengths[0][-1] - 1) :] = lengths[0][-1] < 2
    mask[1, L - 2] = lengths[1][-1] < 4
    return mask


IDS = tokens(TINY, (B, L), 5)


@cache
def wide(config: MegalodonConfig) -> MegalodonForCausalLM:
    return model_of(config.with_dtype("float64"))


@eqx.filter_jit
def answered(model: Any, ids: Any, mask: Any, segments: Any) -> tuple[Any, Any, Any]:
    """Logits, loss and its derivatives: one program for every packing of a configuration."""

    def loss(model: Any) -> tuple[Any, Any]:
        logits, _ = model(ids, mask, segment_ids=segments)
        return model.compute_loss(ids, ids, mask, segment_ids=segments), logits

    (value, logits), gradients = eqx.filter_value_and_grad(loss, has_aux=True)(model)
    return logits, value, gradients


def alone(
    config: MegalodonConfig, lengths: Lengths, mask: np.ndarray
) -> tuple[np.ndarray, float, dict[str, np.ndarray]]:
    """Logits, loss and derivatives of the oracle, run on one document after another."""
    weights = wide_arrays(config)
    logits = np.zeros((B, L, config.vocab_size))
    total, count, gradients = 0.0, 0, dict.fromkeys(weights, 0.0)
    for row, cuts in enumerate(lengths):
        for end, n in zip(np.cumsum(cuts), cuts, strict=True):
            at = (slice(row, row + 1), slice(end - n, end))
            found = oracle.run(config, weights, IDS[at], IDS[at], mask[at])
            logits[at] = found["logits"]
            targets = int(mask[at][:, 1:].sum())
            total, count = total + targets * float(found["loss"]), count + targets
            for name in weights:
                gradients[name] = gradients[name] + targets * found[f"grad/{name}"]
    return logits, total / count, {name: g / count for name, g in gradients.items()}


def check(config: MegalodonConfig, lengths: Lengths) -> None:
    mask, segments = mask_of(lengths), ids_of(lengths)
    got = answered(wide(config), jnp.asarray(IDS), jnp.asarray(mask), jnp.asarray(segments))
    logits, loss, gradients = alone(config, lengths, mask)
    assert rel_l2(np.asarray(got[0])[mask], logits[mask]) <= EXACT
    assert rel_l2(got[1], loss) <= EXACT
    for name, gradient in named_leaves(got[2]).items():
        assert rel_l2(gradient, gradients[name]) <= EXACT_GRADIENT, name


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.usefixtures("x64")
def test_each_document_is_what_it_is_alone(config: str, packing: str) -> None:
    check(CONFIGS[config], PACKINGS[packing])


SEEDS = [0, *(pytest.param(n, marks=pytest.mark.sweep) for n in range(1, 25))]


@pytest.mark.few(3)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.usefixtures("x64")
def test_a_random_packing_is_its_documents(config: str, seed: int) -> None:
    check(CONFIGS[config], random_packing(seed))


@pytest.mark.usefixtures("x64")
def test_one_document_is_the_row_and_two_are_not() -> None:
    ids, whole = jnp.asarray(IDS), np.full((B, L), 7)
    mask = jnp.ones((B, L), bool)
    expected, _ = wide(LONG)(ids)
    for segments in (None, whole):
        given = None if segments is None else jnp.asarray(segments)
        assert rel_l2(answered(wide(LONG), ids, mask, given)[0], expected) <= EXACT
    halves = jnp.asarray(ids_of([[30, L - 30]] * B))
    logits = answered(wide(LONG), ids, mask, halves)[0]
    assert rel_l2(logits[:, :30], expected[:, :30]) <= EXACT
    assert rel_l2(logits[:, 30:], expected[:, 30:]) > EXACT


def test_no_bit_of_a_loud_document_reaches_the_next() -> None:
    """In float32, where a difference of sums or a transform would lose the quiet one's digits."""
    model = model_of(LONG)
    loud = model.model.embed.weight.at[: LONG.vocab_size // 2].multiply(2.0**20)
    model = eqx.tree_at(lambda m: m.model.embed.weight, model, loud)
    rng = np.random.default_rng(0)
    quiet = rng.integers(LONG.vocab_size // 2, LONG.vocab_size, (B, L)).astype(np.int32)
    before = quiet.copy()
    before[:, :40] = rng.integers(1, LONG.vocab_size // 2, (B, 40))
    mask = jnp.ones((B, L), bool)
    segments = jnp.asarray(ids_of([[40, L - 40]] * B))
    one, other = (
        np.asarray(answered(model, jnp.asarray(ids), mask, segments)[0]) for ids in (quiet, before)
    )
    assert np.isfinite(other).all()
    assert np.array_equal(one[:, 40:], other[:, 40:])
    assert not np.array_equal(one[:, :40], other[:, :40])


@pytest.mark.usefixtures("x64")
def test_micro_batches_of_packed_rows_are_the_batch() -> None:
    lengths = PACKINGS["mixed"]
    mask, segments = (jnp.asarray(a) for a in (mask_of(lengths), ids_of(lengths)))
    ids = jnp.asarray(IDS)
    _, expected, gradients = answered(wide(TINY), ids, mask, segments)

    @eqx.filter_jit
    def accumulated(model: Any, *arrays: Any) -> Any:
        ids, mask, segments = (a[:, None] for a in arrays)
        return accumulate_gradients(model, ids, ids, mask, segment_ids=segments)

    loss, summed = accumulated(wide(TINY), ids, mask, segments)
    assert rel_l2(loss, expected) <= EXACT
    theirs = named_leaves(gradients)
    for name, gradient in named_leaves(summed).items():
        assert rel_l2(gradient, theirs[name]) <= EXACT_GRADIENT, name


@pytest.mark.usefixtures("x64")
def test_stacked_layers_and_a_loss_in_chunks_know_documents() -> None:
    lengths = PACKINGS["mixed"]
    mask, segments = (jnp.asarray(a) for a in (mask_of(lengths), ids_of(lengths)))
    ids, model = jnp.asarray(IDS), wide(TINY)
    logits, loss, _ = answered(model, ids, mask, segments)
    stacked, _ = eqx.filter_jit(stack_layers(model))(ids, mask, segment_ids=segments)
    assert rel_l2(stacked, logits) <= EXACT

    @eqx.filter_jit
    def in_chunks(model: Any, ids: Any) -> Any:
        return model.compute_loss(ids, ids, mask, segment_ids=segments, loss_chunk=10)

    assert rel_l2(in_chunks(model, ids), loss) <= EXACT


LEAKS = ("norm", "ema", "attention", "loss")


@pytest.mark.parametrize("place", LEAKS)
@pytest.mark.usefixtures("x64")
def test_a_leak_anywhere_is_seen(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What knows no documents: the norm's sums, the filter, the chunks, the loss's shift."""
    from megalodon_jax import loss
    from megalodon_jax.layers import packed_norm

    if place == "norm":
        monkeypatch.setattr(packed_norm, "running_sum", lambda x, _: jnp.cumsum(x, axis=1))
    if place == "ema":
        packed = complex_ema.packed_ema.filtered
        monkeypatch.setattr(
            complex_ema.packed_ema,
            "filtered",
            lambda u, positions, *rest: packed(
                u, jnp.broadcast_to(jnp.arange(L, dtype=jnp.int32), positions.shape), *rest
            ),
        )
    if place == "attention":
        real = attention.packed_attention
        row = jnp.arange(L, dtype=jnp.int32)
        monkeypatch.setattr(
            attention,
            "packed_attention",
            lambda mix, q, k, v, positions, *rest: real(
                mix, q, k, v, jnp.broadcast_to(row, positions.shape), *rest
            ),
        )
    if place == "loss":
        monkeypatch.setattr(loss, "begins", lambda ids: jnp.zeros(ids.shape, bool))
    lengths = PACKINGS["mixed"]
    mask = mask_of(lengths)
    # A configuration of this test's: the blocks of the others' are traced already.
    config = dataclasses.replace(LONG, norm_eps=2.0 ** -(10 + LEAKS.index(place)))

    @eqx.filter_jit
    def leaking(model: Any, ids: Any, segments: Any) -> Any:
        logits, _ = model(ids, jnp.asarray(mask), segment_ids=segments)
        return logits, model.compute_loss(ids, ids, jnp.asarray(mask), segment_ids=segments)

    got = leaking(wide(config), jnp.asarray(IDS), jnp.asarray(ids_of(lengths)))
    logits, expected, _ = alone(config, lengths, mask)
    error = rel_l2(np.asarray(got[0])[mask], logits[mask])
    assert (error > EXACT) == (place != "loss")
    assert rel_l2(got[1], expected) > EXACT


def test_positions_begin_anew_wherever_the_id_changes() -> None:
    ids = jnp.array([[4, 4, 1, 4, 4, 4], [0, 1, 2, 2, 2, 0]])
    positions = document_positions(ids, ids.shape, "input_ids")
    assert np.array_equal(positions, [[0, 1, 0, 0, 1, 2], [0, 0, 0, 1, 2, 0]])


def test_wide_ids_that_end_alike_are_two_documents() -> None:
    ids = np.array([[1, 1 + 2**32]])
    assert np.array_equal(document_positions(ids, ids.shape, "input_ids"), [[0, 0]])


@pytest.mark.parametrize(
    ("segments", "named"),
    [
        (jnp.zeros((B, L - 1), jnp.int32), "expected integers of the shape of input_ids"),
        (jnp.zeros((B, L)), "segment_ids are float32"),
    ],
)
def test_segment_ids_that_do_not_fit_are_refused(segments: Any, named: str) -> None:
    with pytest.raises(Exception, match=f"{named}|Type-check error"):
        eqx.filter_eval_shape(model_of(TINY), jnp.asarray(IDS), segment_ids=segments)


# Whether a stream begins with a cache, and the tokens of its pieces: cut within documents and
# chunks, where documents begin, after one token, and after more than a block of the EMA.
STREAMS = {
    "short chunks": (True, (20, 1, L - 21)),
    "long chunks": (False, (5, 24, L - 29)),
}


@eqx.filter_jit
def piece(model: Any, ids: Any, segments: Any, cache: Any) -> Any:
    return model(ids, cache=cache, return_cache=True, segment_ids=segments)


def streamed(
    model: Any, segments: np.ndarray, pieces: Sequence[int], cache: Any
) -> tuple[np.ndarray, Any]:
    """Logits of a row of documents in pieces, and the cache after them."""
    logits, end = [], 0
    for n in pieces:
        at = slice(end, end + n)
        found, cache = piece(model, jnp.asarray(IDS[:, at]), jnp.asarray(segments[:, at]), cache)
        logits.append(np.asarray(found))
        end += n
    return np.concatenate(logits, axis=1), cache


@pytest.mark.few(1)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.usefixtures("x64")
def test_a_stream_of_documents_is_the_row_of_them(config: str) -> None:
    """However it is cut, and the document at its end goes on as if alone."""
    model, lengths, more = wide(CONFIGS[config]), PACKINGS["mixed"], 6
    segments, (begun, pieces) = ids_of(lengths), STREAMS[config]
    cache = init_cache(model.config, B, packed=True) if begun else None
    logits, cache = streamed(model, segments, pieces, cache)
    want, *_ = alone(CONFIGS[config], lengths, np.ones((B, L), bool))
    assert rel_l2(logits, want) <= EXACT
    assert cache.position.tolist() == [row[-1] for row in lengths]
    # Without segment ids every row goes on in its document, here by several tokens.
    after = tokens(TINY, (B, more), 9)
    found = piece(model, jnp.asarray(after), None, cache)[0]
    weights = wide_arrays(CONFIGS[config])
    for row, cuts in enumerate(lengths):
        own = np.concatenate([IDS[row, L - cuts[-1] :], after[row]])[None]
        ends = oracle.run(CONFIGS[config], weights, own, own)["logits"]
        assert rel_l2(found[row], ends[0, -more:]) <= EXACT
    # No call sees keys that were trimmed away, with segment ids or without.
    held, same = trim_cache(cache, 2), np.repeat(segments[:, -1:], more, axis=1)
    seen, unseen = (piece(model, jnp.asarray(after), s, held)[0] for s in (None, jnp.asarray(same)))
    assert rel_l2(unseen, np.asarray(seen)) <= EXACT
    assert rel_l2(found, np.asarray(seen)) > 1e6 * EXACT


@pytest.mark.usefixtures("x64")
def test_documents_begin_anew_in_a_loop_over_tokens() -> None:
    """The cache is a carry of `lax.scan`; the id alone says where a document begins."""
    model, segments = wide(TINY), ids_of(PACKINGS["mixed"])

    @eqx.filter_jit
    def decoded(model: Any, ids: Any, segments: Any) -> Any:
        def body(cache: Any, at: Any) -> Any:
            logits, cache = model(
                at[0][:, None], cache=cache, return_cache=True, segment_ids=at[1][:, None]
            )
            return cache, logits[:, 0]

        cache = init_cache(model.config, B, packed=True)
        return jax.lax.scan(body, cache, (ids.T, segments.T))[1]

    found = jnp.swapaxes(decoded(model, jnp.asarray(IDS), jnp.asarray(segments)), 0, 1)
    want = answered(model, jnp.asarray(IDS), jnp.ones((B, L), bool), segments)[0]
    assert rel_l2(found, want) <= EXACT
    one = np.zeros_like(segments)
    leaked = jnp.swapaxes(decoded(model, jnp.asarray(IDS), jnp.asarray(one)), 0, 1)
    assert rel_l2(leaked, want) > 1e6 * EXACT


@pytest.mark.usefixtures("x64")
def test_a_stream_of_documents_on_a_mesh() -> None:
    """Rows, heads and channels are cut; the first piece ends within a document, and one begins."""
    config = tiny(num_layers=1).with_dtype("float64")
    model, mesh = model_of(config), make_mesh(data=2, tensor=2, devices=jax.devices()[:4])
    segments, pieces = ids_of(PACKINGS["mixed"])[:, :32], (20, 12)
    cache = shard_cache(init_cache(config, B, packed=True), mesh)
    got, after = streamed(shard_model(model, mesh), segments, pieces, cache)
    want, _ = piece(model, jnp.asarray(IDS[:, :32]), jnp.asarray(segments), None)
    assert rel_l2(got, np.asarray(want)) <= EXACT
    assert after.document.tolist() == segments[:, -1].tolist()
    assert after.document.sharding.spec[0] == "data"


@pytest.mark.usefixtures("x64")
def test_a_stream_of_documents_is_differentiated() -> None:
    model, segments = wide(TINY), jnp.asarray(ids_of(PACKINGS["mixed"]))
    ids, cut = jnp.asarray(IDS), 20

    def whole(model: Any) -> Any:
        return jnp.sum(jnp.sin(model(ids, segment_ids=segments)[0]))

    def pieces(model: Any) -> Any:
        one, cache = model(ids[:, :cut], return_cache=True, segment_ids=segments[:, :cut])
        two, _ = model(ids[:, cut:], cache=cache, segment_ids=segments[:, cut:])
        return jnp.sum(jnp.sin(one)) + jnp.sum(jnp.sin(two))

    want, got = (named_leaves(eqx.filter_jit(eqx.filter_grad(f))(model)) for f in (whole, pieces))
    for name, gradient in got.items():
        assert rel_l2(gradient, want[name]) <= EXACT_GRADIENT, name


@pytest.mark.parametrize(("cut", "named"), [(5, False), (1, False), (1, True)])
@pytest.mark.usefixtures("x64")
def test_what_is_left_of_an_earlier_document_may_be_no_number(cut: int, named: bool) -> None:
    """A ring full of NaN: a document that begins sees none of it, nor what goes on in it."""
    model = wide(TINY)
    ids = [jnp.asarray(IDS[:, :cut]), jnp.asarray(IDS[:, cut : cut + 1]), jnp.asarray(IDS[:, 6:11])]
    document = jnp.full((B, cut), 3, jnp.int32)

    def answers(fill: float) -> list[np.ndarray]:
        cache = piece(model, jnp.asarray(IDS), jnp.zeros((B, L), jnp.int32), None)[1]
        # All but counters.
        held, counters = eqx.partition(cache, eqx.is_inexact_array)
        cache = eqx.combine(jax.tree.map(lambda x: jnp.full_like(x, fill), held), counters)
        found = []
        # It begins by segment ids, and goes on with them or without, in one token and in several.
        for part in ids:
            rest = document[:, :1].repeat(part.shape[1], 1) if named else None
            segments = document if part is ids[0] else rest
            logits, cache = piece(model, part, segments, cache)
            found.append(np.asarray(logits))
        return found

    clean = answers(0.0)
    assert all(np.isfinite(logits).all() for logits in clean)
    for found, want in zip(answers(np.nan), clean, strict=True):
        assert np.array_equal(found, want)


DROPPED = 0.3


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.usefixtures("x64")
def test_dropout_of_documents_is_drawn_by_place(streamed: bool) -> None:
    """Shards of rows, heads and tokens drop the very weights that one device drops."""
    n, H = 32, 2
    config = tiny(chunk_size=8, num_heads=H, value_dim=H * n, attention_dropout=DROPPED)
    inner = attention.ChunkedAttention(config.with_dtype("float64"))
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((B, n, H, config.head_dim)) for _ in "qk")
    # Each value is a unit vector: what comes out are the weights.
    v = np.broadcast_to(np.eye(n)[None, :, None], (B, n, H, n))
    segments = np.array([[0] * 5 + [1] * 13 + [2] * 14, [0] * n], np.int32)

    @jax.jit
    def weights(q, k, v, segments, key):
        positions = document_positions(segments, segments.shape, "the queries")
        return inner(q, k, v, None, None, streamed, positions, key=key)[0]

    arrays = tuple(map(jnp.asarray, (q, k, v, segments)))
    want, other = (np.asarray(weights(*arrays, jax.random.key(seed))) for seed in (0, 1))
    mesh = make_mesh(data=2, tensor=2, sequence=1 if streamed else 2, devices=jax.devices())
    heads, rows = (P("data", None, "tensor"), P("data")) if streamed else (
        P("data", "sequence", "tensor"), P("data", "sequence")
    )  # fmt: skip
    specs = (heads, heads, heads, rows)
    laid = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, specs, strict=True)]
    got = np.asarray(weights(*laid, jax.random.key(0)))
    assert np.array_equal(got == 0.0, want == 0.0)
    assert rel_l2(got, want) <= EXACT
    # What a query sees, where nothing is dropped: the share that is kept, and no draw twice.
    positions = np.asarray(document_positions(segments, segments.shape, "ids"))
    distance = np.arange(n)[:, None] - np.arange(n)
    seen = (distance >= 0) & (distance <= (positions % 8)[..., None])
    seen = np.broadcast_to(seen[:, :, None], want.shape)
    assert not want[~seen].any()
    kept, count = (want != 0.0), seen.sum()
    deviation = np.sqrt(DROPPED * (1 - DROPPED) / count)
    assert abs(kept[seen].mean() - (1 - DROPPED)) < 4 * deviation
    chunk = seen[1, :8, 0, :8]
    draws = [
        kept[1, 8 * i : 8 * i + 8, h, 8 * i : 8 * i + 8][chunk] for i in range(4) for h in (0, 1)
    ]
    assert len({draw.tobytes() for draw in draws}) == len(draws)
    # Each weight has a draw of its own: that six or more fall alike has a probability of 0.12.
    alike = [len(set(k[s].tolist())) == 1 for k, s in zip(
        kept.transpose(0, 2, 1, 3).reshape(-1, n), seen.transpose(0, 2, 1, 3).reshape(-1, n),
        strict=True,
    ) if s.sum() >= 6]  # fmt: skip
    assert len(alike) >= 20 and np.mean(alike) < 0.5
    assert not np.array_equal(kept, other != 0.0)


def test_an_empty_piece_keeps_the_documents() -> None:
    model, none = model_of(TINY), jnp.zeros((B, 0), jnp.int32)
    cache = init_cache(TINY, B, packed=True)
    cache = eqx.tree_at(lambda c: c.document, cache, jnp.asarray([4, 7], jnp.int32))
    for held in (cache, None):
        after = model(none, cache=held, return_cache=True, segment_ids=none)[1]
        assert after.document.tolist() == ([0, 0] if held is None else [4, 7])


UNBOUNDED = dataclasses.replace(TINY, cache_unbounded=True)
WIDE = dataclasses.replace(TINY, max_cache_len=2 * TINY.chunk_size)


@pytest.mark.parametrize(
    ("config", "given", "named"),
    [
        (TINY, {"cache": init_cache(TINY, B)}, "this cache is from calls without segment_ids"),
        (TINY, {"attention_mask": jnp.arange(L)[None] < jnp.full((B, 1), 7)},
         "cannot be combined with an attention_mask that has padding"),
        (UNBOUNDED, {}, "need a cache of chunk_size tokens"),
        (WIDE, {"cache": init_cache(WIDE, B, packed=True)}, "need a cache of chunk_size tokens"),
    ],
)  # fmt: skip
def test_what_a_stream_of_documents_cannot_do_is_refused(
    config: MegalodonConfig, given: dict[str, Any], named: str
) -> None:
    call = {"segment_ids": jnp.zeros((B, L), jnp.int32), "return_cache": True, **given}
    with pytest.raises(ValueError, match=named):
        eqx.filter_eval_shape(model_of(config), jnp.asarray(IDS), **call)


@pytest.mark.traced_checks
def test_ids_that_a_cache_cannot_keep_are_refused(x64) -> None:
    """Narrowed, two of them could be one document."""
    ids, segments = jnp.zeros((1, 2), jnp.int32), np.array([[3, 3 + 2**32]])
    with pytest.raises(Exception, match=r"below 2\*\*31 - 1"):
        jax.block_until_ready(model_of(TINY)(ids, return_cache=True, segment_ids=segments))


def test_without_segment_ids_the_program_is_the_one_without_the_argument() -> None:
    model = model_of(TINY)
    params, static = eqx.partition(model, eqx.is_array)

    def program(*more: Any) -> str:
        def run(params: Any, ids: Any) -> Any:
            return eqx.combine(params, static)(ids, *more)[0]

        return str(jax.make_jaxpr(run)(params, jnp.asarray(IDS)))

    assert program() == program(None, None, False, True, None, None)
    assert "cummax" not in program()
