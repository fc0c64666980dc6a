"""Mutants of packed documents beside a cache, and of Orbax's reader."""

from __future__ import annotations

from tools.mutant_list.mutant import of

_PACKED = "test_packed.py"
_ROWS = f"{_PACKED}::test_a_stream_of_documents_is_the_row_of_them"
_TOKENS = f"{_PACKED}::test_documents_begin_anew_in_a_loop_over_tokens"
_MESH = f"{_PACKED}::test_a_stream_of_documents_on_a_mesh"

MUTANTS = (
    *of(
        "megalodon_jax/segments.py",
        (
            "stream_never_begins_a_document",
            "a row goes on whatever the segment id of its next token is",
            "goes_on = first == cache.document",
            "goes_on = first == first",
            f"{_TOKENS} {_ROWS}",
        ),
        (
            "stream_begins_at_no_variance",
            "a document begins with a variance of 0 and not of 1",
            "kept(state.var, 1)",
            "kept(state.var)",
            f"{_TOKENS} {_ROWS}",
        ),
        (
            "stream_keeps_the_ema",
            "a new document goes on from the EMA's state of the one before",
            "return LayerCache(attn, norm, ema, kept(held.position))",
            "return LayerCache(attn, norm, held.ema, kept(held.position))",
            _TOKENS,
        ),
        (
            "stream_keeps_the_final_norm",
            "a new document goes on from the final norm of the one before",
            "ModelCache(layers, norm_of(cache.final_norm), cache.document)",
            "ModelCache(layers, cache.final_norm, cache.document)",
            _TOKENS,
        ),
        (
            "stream_keeps_the_position",
            "a new document begins at the position where the one before ended",
            "return LayerCache(attn, norm, ema, kept(held.position))",
            "return LayerCache(attn, norm, ema, held.position)",
            f"{_ROWS} {_TOKENS}",
        ),
        (
            "stream_ids_are_clipped",
            "two segment ids beyond 32 bits are one in a cache, without a word",
            "(ids == ends.min) | (ids == ends.max),",
            "(ids == ends.min) & (ids == ends.max),",
            f"{_PACKED}::test_ids_that_a_cache_cannot_keep_are_refused",
        ),
    ),
    *of(
        "megalodon_jax/model.py",
        (
            "stream_remembers_the_first_document",
            "a cache holds the segment id of a piece's first token, not of its last",
            "        return cache, positions, ids[:, -1]",
            "        return cache, positions, ids[:, 0]",
            _ROWS,
        ),
        (
            "stream_positions_from_zero",
            "a document that goes on is counted from 0 in every piece",
            "jnp.where(first, cache.position[:, None], 0)",
            "jnp.where(first, 0 * cache.position[:, None], 0)",
            _ROWS,
        ),
    ),
    *of(
        "megalodon_jax/layers/attention.py",
        (
            "stream_ring_holds_two_documents",
            "keys of the document before count as those of the one that began in a piece",
            "jnp.where(positions[:, -1] < L, 0, counter)",
            "jnp.where(positions[:, -1] < 0, 0, counter)",
            _ROWS,
        ),
        (
            "stream_keys_off_by_one",
            "the keys before a piece are read one place too late",
            "at = ring.count[:, None] - jnp.arange(chunk, 0, -1, dtype=jnp.int32)",
            "at = ring.count[:, None] - jnp.arange(chunk - 1, -1, -1, dtype=jnp.int32)",
            _ROWS,
        ),
        (
            "stream_sees_trimmed_keys",
            "a piece with segment ids sees keys that trim_cache took away",
            "there = at >= ring.first[:, None]",
            "there = at >= 0",
            _ROWS,
        ),
        (
            "stream_keeps_the_first_keys",
            "the ring takes the first tokens of a piece for its last document's",
            "k, v = (rolled(a, L - new) for a in (k, v))",
            "k, v = (rolled(a, 0 * new) for a in (k, v))",
            _ROWS,
        ),
        (
            "stream_position_off_by_one",
            "a cache stands at its last token, not behind it",
            "LayerCache(attn, norm, ema, positions[:, -1] + 1)",
            "LayerCache(attn, norm, ema, positions[:, -1])",
            _ROWS,
        ),
    ),
    *of(
        "megalodon_jax/sharding/caches.py",
        (
            "documents_on_every_device",
            "the documents of all rows lie on every device of a mesh",
            '_COUNTERS = ("count", "first", "position", "document")',
            '_COUNTERS = ("count", "first", "position")',
            _MESH,
        ),
    ),
    *of(
        "megalodon_jax/orbax_items.py",
        (
            "orbax_narrows_in_a_loop",
            "the thread that reads is not told of 64 bits",
            "jax.enable_x64(wide),",
            "jax.enable_x64(False),",
            "test_orbax_checkpoints.py::test_float64_returns_where_an_event_loop_runs",
        ),
    ),
    *of(
        "megalodon_jax/layers/packed_norm.py",
        (
            "sum_forgets_a_beginning",
            "a stretch of tokens says whether its second half begins a document, not the first",
            "return earlier[0] | begins, total + carried",
            "return begins, total + carried",
            "test_packed.py",
        ),
    ),
)
