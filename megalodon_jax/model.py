"""The Megalodon decoder: blocks, the stack, and the language model."""

from __future__ import annotations

import math
from typing import Any, SupportsIndex

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int32

from megalodon_jax.checks import checked
from megalodon_jax.config import MegalodonConfig, widened
from megalodon_jax.inputs import (
    PACKED_MASK,
    PACKED_STREAM,
    PACKED_WINDOW,
    Ids,
    Mask,
    as_int32,
    as_mask,
)
from megalodon_jax.layers.attention import MegalodonAttention, kept_norm
from megalodon_jax.layers.dropout import split_key
from megalodon_jax.layers.entry import check_inputs
from megalodon_jax.layers.ffn import NormalizedFFN
from megalodon_jax.layers.linear import (
    Linear,
    init_weight,
    linear_maps,
    matmul,
    with_backends,
)
from megalodon_jax.layers.lora import lora_maps, with_dropout_keys
from megalodon_jax.layers.stack import StackedBlocks, run_blocks
from megalodon_jax.layers.timestep_norm import TimestepNorm
from megalodon_jax.loss import chunked_next_token_loss, next_token_loss
from megalodon_jax.policy import resolve
from megalodon_jax.ragged import aligned, padding_of, to_place
from megalodon_jax.segments import SegmentIds, continued, document_positions, stream_ids
from megalodon_jax.sharding.axes import automatic, mesh_of, placed, spec_of
from megalodon_jax.sharding.caches import check_no_sequence, full_cache_specs, placed_cache
from megalodon_jax.sharding.placement import check_length
from megalodon_jax.sharding.rules import check_config
from megalodon_jax.sharding.vocabulary import filled_rows, masked_columns, rows_of
from megalodon_jax.types import (
    LayerCache,
    ModelCache,
    check_cache,
    copied_cache,
    filled_cache,
    grown_cache,
    rowwise_cache,
)


class MegalodonBlock(eqx.Module):
    """One layer: gated EMA attention, then a feed-forward net, with the block input as residual."""

    attn: MegalodonAttention
    ffn: NormalizedFFN

    def __init__(self, config: MegalodonConfig, layer_index: int, *, key: jax.Array):
        attn_key, ffn_key = jax.random.split(key)
        self.attn = MegalodonAttention(config, key=attn_key)
        self.ffn = NormalizedFFN(config, layer_index, key=ffn_key)

    def __call__(
        self,
        x: Float[Array, "B L D"],
        mask: Mask | None = None,
        cache: LayerCache | None = None,
        return_cache: bool = False,
        *,
        key: jax.Array | None = None,
        scale: Float[Array, ""] | None = None,
        positions: Int32[Array, "B L"] | None = None,
    ) -> tuple[Float[Array, "B L D"], LayerCache | None]:
        """Return the block's output (B, L, D), and its cache after these tokens.

        The cache is None unless `return_cache`. `key` enables dropout. `scale` replaces
        `ffn.scale`, so that one program can run several layers. `positions` is the index of each
        token within its document, for packed documents.
        """
        self = with_dropout_keys(self, key)
        attn_key, ffn_key = split_key(key, 2)
        y, cache = self.attn(x, mask, cache, return_cache, key=attn_key, positions=positions)
        return checkpoint_name(self.ffn(y, x, key=ffn_key, scale=scale), "ffn"), cache


class MegalodonModel(eqx.Module):
    """Embedding, blocks and the final TimestepNorm."""

    embed: eqx.nn.Embedding
    layers: tuple[MegalodonBlock, ...] | StackedBlocks
    norm: TimestepNorm
    config: MegalodonConfig = eqx.field(static=True)

    def __init__(self, config: MegalodonConfig, *, key: jax.Array):
        embed_key, *keys = jax.random.split(key, config.num_layers + 1)
        V, D = config.vocab_size, config.model_dim
        weight = init_weight((V, D), config, key=embed_key, dim=D, embedding=True)
        self.embed = eqx.nn.Embedding(weight=weight)
        self.layers = tuple(MegalodonBlock(config, i, key=k) for i, k in enumerate(keys))
        self.norm = TimestepNorm(
            D,
            config.norm_num_groups,
            config.norm_eps,
            config.norm_affine,
            config.sensitive_dtype,
        )
        self.config = config

    def __call__(
        self,
        input_ids: Ids,
        attention_mask: Mask | None = None,
        cache: ModelCache | None = None,
        return_cache: bool = False,
        deterministic: bool = True,
        key: jax.Array | None = None,
        segment_ids: SegmentIds | None = None,
    ) -> tuple[Float[Array, "B L D"], ModelCache | None]:
        """Return the hidden states (B, L, D) in `config.accum_dtype`, and the cache after them.

        Args:
            input_ids: token ids, of any integer dtype.
            attention_mask: True, or 1, where a token is valid. With a cache, given or requested,
                each row is computed as if it were alone with its valid tokens. The valid tokens of
                a row must be adjacent; a row may have none. The returned cache then has positions
                per row, unless the mask is known to have no padding. Outputs at padding are
                meaningless.
            cache: the cache after earlier calls; None starts at position 0.
            return_cache: whether to return the cache after these tokens; False returns None.
            deterministic: False enables dropout, and rematerialisation with `use_checkpoint`.
            key: PRNG key, needed if dropout is enabled and any rate is positive.
            segment_ids: document of each token, for packed documents. Neighbouring tokens with
                equal ids are one document, and every document is computed as if it were alone. With
                a cache, the first document of a row continues the cached one if both have the same
                id. Without `segment_ids`, each row continues its cached document.

        Raises:
            ValueError: shapes do not fit, the cache is of another model, or dropout lacks a key. In
                calls with a cache also: `segment_ids` are combined with a padding mask, or with a
                cache of more than a chunk or from calls without `segment_ids`.
            RuntimeError: a token id is outside [0, V), or an integer mask has values other than 0
                and 1. In calls with a cache also: a row has padding between its tokens, or a
                segment id does not fit int32. All RuntimeErrors are raised under jit too, unless
                `traced_checks(False)` leaves checks out.
        """
        shape, width = np.shape(input_ids), self.config.model_dim
        mask, per_row = _padding(attention_mask, shape, cache, return_cache)
        packed = segment_ids is not None or (cache is not None and cache.document is not None)
        call = (self, input_ids, mask, cache, return_cache, deterministic, key, segment_ids)
        return automatic(
            lambda call: call[0]._run(*call[1:]),
            call,
            lambda mesh: _specs(self.config, mesh, shape, width, return_cache, per_row, packed),
        )

    def _run(
        self,
        input_ids: Ids,
        attention_mask: Mask | None,
        cache: ModelCache | None,
        return_cache: bool,
        deterministic: bool,
        key: jax.Array | None,
        segment_ids: SegmentIds | None,
    ) -> tuple[Float[Array, "B L D"], ModelCache | None]:
        config = self.config
        remedy = "give a single text a first axis of 1"
        input_ids = as_int32("input_ids", input_ids, "B L", remedy)
        mask = as_mask("attention_mask", attention_mask, input_ids.shape, "input_ids")
        positions = document_positions(segment_ids, input_ids.shape, "input_ids")
        key = _dropout_key(self, deterministic, key)
        B, L = input_ids.shape
        mesh = mesh_of(self.embed.weight) or mesh_of(input_ids)
        if mesh is not None:
            check_config(config, mesh)
            check_length(mesh, L, config.chunk_size)
            if cache is not None or return_cache:
                check_no_sequence(mesh)
        start = lengths = None
        if mask is not None and (cache is not None or return_cache):
            input_ids, mask, lengths, start = aligned(input_ids, mask)
        if cache is not None:
            cache = self._received(cache, B, L if lengths is None else lengths)
        document = None if cache is None else cache.document
        streams = cache is not None or return_cache
        if segment_ids is not None and positions is not None and streams:
            cache, positions, document = self._streamed(segment_ids, positions, mask, cache)
        if L == 0:
            hidden = jnp.zeros((B, 0, config.model_dim), config.accum_dtype)
            if not return_cache:
                return hidden, None
            per_row = lengths is not None or document is not None
            full = filled_cache(config, cache, B, per_row=per_row)
            full = ModelCache(full.layer_caches, full.final_norm, document)
            return hidden, copied_cache(full)
        x = checkpoint_name(self._embedded(input_ids), "embed")
        x, layers = run_blocks(
            self.layers,
            x,
            mask,
            (None,) * config.num_layers if cache is None else cache.layer_caches,
            return_cache,
            split_key(key, config.num_layers),
            scan=config.scan_layers,
            rematerialise=config.use_checkpoint and not deterministic,
            positions=positions,
        )
        before = None if cache is None else cache.final_norm
        packed = {} if positions is None else {"positions": positions}
        x, norm = self.norm(x, before, mask, **packed)
        x = checkpoint_name(x, "norm")
        if lengths is not None:
            norm = kept_norm(lengths, norm, before)
        x = x if start is None else to_place(x, start)
        return x, placed_cache(ModelCache(layers, norm, document), x) if return_cache else None

    def _streamed(
        self,
        segment_ids: SegmentIds,
        positions: Int32[Array, "B L"],
        mask: Bool[Array, "B L"] | None,
        cache: ModelCache | None,
    ) -> tuple[ModelCache | None, Int32[Array, "B L"] | None, Int32[Array, " B"]]:
        """Return cache to continue from, tokens' positions in documents, last segment id per row.

        The returned cache is None if `cache` is. The positions are None for a single token that
        follows a cache, since it needs none. The segment ids (B,) are those of the last tokens.
        """
        if mask is not None:
            raise ValueError(PACKED_MASK)
        if self.config.effective_max_cache_len != self.config.chunk_size:
            raise ValueError(PACKED_WINDOW)
        ids = stream_ids(segment_ids)
        B, L = ids.shape
        if cache is None:
            return None, positions, ids[:, -1] if L else jnp.zeros((B,), jnp.int32)
        if cache.document is None:
            raise ValueError(PACKED_STREAM)
        if L == 0:
            return cache, positions, cache.document
        cache = continued(cache, ids[:, 0])
        if L == 1:
            # A single token needs no positions: its row either continues, or was just reset.
            return cache, None, ids[:, -1]
        first = positions == jnp.arange(L, dtype=jnp.int32)
        positions = positions + jnp.where(first, cache.position[:, None], 0)
        return cache, positions, ids[:, -1]

    def _received(
        self, cache: ModelCache, batch_size: int, length: int | Int32[Array, " B"]
    ) -> ModelCache:
        """Return `cache`, checked, with room for `length` tokens (one number, or one per row)."""
        check_cache(self.config, cache, batch_size)
        if not isinstance(length, int):
            cache = rowwise_cache(cache, batch_size)
        cache = grown_cache(self.config, cache, length)
        if isinstance(self.layers, StackedBlocks):
            # A loop needs caches of equal structure: give missing parts their initial state.
            cache = filled_cache(self.config, cache, batch_size)
        return cache

    def _embedded(self, ids: Int32[Array, "B L"]) -> Float[Array, "B L D"]:
        config = self.config
        ids = checked(
            ids,
            (ids < 0) | (ids >= config.vocab_size),
            f"input_ids must be in [0, {config.vocab_size}), the vocabulary of this model.",
        )
        table = self.embed.weight
        check_inputs("MegalodonModel", embed=(table, (config.vocab_size, config.model_dim)))
        # With checks off, an id outside the vocabulary gives NaN rather than another token.
        mesh = mesh_of(table) or mesh_of(ids)
        if mesh is None:
            rows = table.at[ids].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
        else:
            rows = rows_of(filled_rows(table, mesh), ids, config.vocab_size, mesh)
        x = rows.astype(config.accum_dtype)
        if config.pad_token_id is not None:
            # The padding row is looked up like any other but gets no gradient
            # (docs/model.md "Embedding and head").
            x = jnp.where((ids == config.pad_token_id)[..., None], jax.lax.stop_gradient(x), x)
        if not config.scale_emb:
            return x
        # Widened first: a Python number takes the array's dtype, and bfloat16 cannot hold sqrt(D).
        return (x.astype(widened(x.dtype)) * math.sqrt(config.model_dim)).astype(x.dtype)


class MegalodonForCausalLM(eqx.Module):
    """A Megalodon with a language-model head: the embedding, or a separate matrix.

    `config.output_size` decides which.

    Raises:
        ValueError: a rule of `config.gemm_backend` matches no matrix of this model.
    """

    model: MegalodonModel
    lm_head: Linear | None
    config: MegalodonConfig = eqx.field(static=True)
    head_backend: str = eqx.field(static=True)
    """GEMM backend of the head, tied or not."""

    def __init__(self, config: MegalodonConfig, *, key: jax.Array):
        model_key, head_key = jax.random.split(key)
        self.model = MegalodonModel(config, key=model_key)
        self.config = config
        self.lm_head = None
        if not config.tied:
            size = config.output_size
            self.lm_head = Linear(
                config.model_dim, size, config, use_bias=False, init_dim=size, key=head_key
            )
        self.model, self.lm_head, self.head_backend = _routed(self.model, self.lm_head, config)

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding."""
        return self.lm_head is None

    def __call__(
        self,
        input_ids: Ids,
        attention_mask: Mask | None = None,
        cache: ModelCache | None = None,
        return_cache: bool = False,
        deterministic: bool = True,
        key: jax.Array | None = None,
        segment_ids: SegmentIds | None = None,
    ) -> tuple[Float[Array, "B L V"], ModelCache | None]:
        """Return the logits (B, L, V) in `config.accum_dtype`, and the cache after them or None.

        Arguments and errors are those of `MegalodonModel.__call__`.
        """
        shape, width = np.shape(input_ids), self.head.shape[0]
        mask, per_row = _padding(attention_mask, shape, cache, return_cache)
        packed = segment_ids is not None or (cache is not None and cache.document is not None)
        call = (self, input_ids, mask, cache, return_cache, deterministic, key, segment_ids)
        return automatic(
            lambda call: call[0]._run(*call[1:]),
            call,
            lambda mesh: _specs(self.config, mesh, shape, width, return_cache, per_row, packed),
        )

    def _run(
        self,
        input_ids: Ids,
        attention_mask: Mask | None,
        cache: ModelCache | None,
        return_cache: bool,
        deterministic: bool,
        key: jax.Array | None,
        segment_ids: SegmentIds | None,
    ) -> tuple[Float[Array, "B L V"], ModelCache | None]:
        hidden, cache = self.model(
            input_ids, attention_mask, cache, return_cache, deterministic, key, segment_ids
        )
        V = self.head.shape[0]
        logits = self._project(hidden, self._read_head(hidden))
        logits = logits if logits.shape[-1] == V else placed(logits[..., :V], *_TOKENS, None)
        return checkpoint_name(logits, "logits"), cache

    def _read_head(self, hidden: Float[Array, "B L D"]) -> Float[Array, "W D"]:
        """Return the head's matrix (V, D); on a mesh, zero rows are appended (`filled_rows`)."""
        mesh = mesh_of(hidden)
        return self.head if mesh is None else filled_rows(self.head, mesh)

    def _project(
        self, hidden: Float[Array, "B L D"], head: Float[Array, "W D"]
    ) -> Float[Array, "B L W"]:
        hidden = placed(hidden, *_TOKENS, None)
        logits = matmul(hidden, head, self.config, self.head_backend)
        return masked_columns(placed(logits, *_TOKENS, "tensor"), self.head.shape[0])

    @property
    def head(self) -> Float[Array, "V D"]:
        """The weight that maps hidden states to logits."""
        return self.model.embed.weight if self.lm_head is None else self.lm_head.weight

    def compute_loss(
        self,
        input_ids: Ids,
        labels: Ids,
        attention_mask: Mask | None = None,
        ignore_index: SupportsIndex = -100,
        deterministic: bool = True,
        key: jax.Array | None = None,
        loss_chunk: SupportsIndex | None = None,
        segment_ids: SegmentIds | None = None,
    ) -> Float[Array, ""]:
        """Return the mean next-token cross-entropy in nats, a scalar in `config.softmax_dtype`.

        `labels` (B, L) are the unshifted ids; the shift by one happens here. See
        `megalodon_jax.loss.next_token_loss` for which targets count. `loss_chunk` bounds memory:
        logits exist for that many positions at a time, forward and backward, instead of (B, L, V).
        With `segment_ids`, no document predicts the first token of the next. All other arguments
        are those of `MegalodonModel.__call__`.

        Raises:
            ValueError: `labels`, `attention_mask` or `segment_ids` have another shape than
                `input_ids`, dropout lacks a key, or `loss_chunk` is below 1.
            RuntimeError: an id or a label is out of range, or an integer mask has values other than
                0 and 1 (also under jit).
        """
        call = (
            self,
            input_ids,
            labels,
            attention_mask,
            ignore_index,
            deterministic,
            key,
            segment_ids,
        )
        return automatic(
            lambda call: call[0]._loss(*call[1:], loss_chunk),
            call,
            lambda mesh: jax.sharding.PartitionSpec(),
        )

    def _loss(
        self,
        input_ids: Ids,
        labels: Ids,
        attention_mask: Mask | None,
        ignore_index: SupportsIndex,
        deterministic: bool,
        key: jax.Array | None,
        segment_ids: SegmentIds | None,
        loss_chunk: SupportsIndex | None,
    ) -> Float[Array, ""]:
        remedy = "give a single text a first axis of 1"
        input_ids = as_int32("compute_loss: input_ids", input_ids, "B L", remedy)
        labels = as_int32("compute_loss: labels", labels, "B L", remedy)
        if labels.shape != input_ids.shape:
            raise ValueError(
                f"compute_loss: labels have shape {labels.shape}, expected that of input_ids, "
                f"{input_ids.shape}; do not shift them, the loss does."
            )
        attention_mask = as_mask("attention_mask", attention_mask, labels.shape, "input_ids")
        config = self.config
        rules: Any = {
            "ignore_index": ignore_index,
            "dtype": config.softmax_dtype,
            "vocab_size": self.head.shape[0],
            "segment_ids": segment_ids,
        }
        hidden, _ = self.model(
            input_ids,
            attention_mask,
            deterministic=deterministic,
            key=key,
            segment_ids=segment_ids,
        )
        head = self._read_head(hidden)
        if loss_chunk is None:
            logits, V = self._project(hidden, head), self.head.shape[0]
            if logits.shape[-1] == V:
                logits = checkpoint_name(logits, "logits")
            else:
                # The named value excludes padding columns, but the loss uses the padded logits.
                checkpoint_name(logits[..., :V], "logits")
            return next_token_loss(logits, labels, attention_mask, **rules)
        return chunked_next_token_loss(
            hidden, head, self._project, labels, attention_mask, chunk=loss_chunk, **rules
        )


_TOKENS = ("batch", "sequence")


def _padding(
    mask: Any, shape: Any, cache: ModelCache | None, return_cache: bool
) -> tuple[Any, bool]:
    """Return the attention mask, and whether the cache that the call returns has one position per
    row.

    The mask is None if the call uses a cache and the mask is known to have no padding.
    """
    if cache is None and not return_cache:
        return mask, False
    mask = padding_of(mask, shape)
    return mask, mask is not None or (cache is not None and cache.per_row)


def _specs(
    config: MegalodonConfig,
    mesh: Any,
    shape: Any,
    width: int,
    return_cache: bool,
    per_row: bool,
    packed: bool,
) -> Any:
    """Return the sharding specs of an output (*shape, width) and of the returned cache.

    The specs of the cache are None if none is returned.
    """
    out = spec_of(mesh, (*shape, width), (*_TOKENS, "tensor"))
    if not return_cache:
        return out, None
    return out, full_cache_specs(config, shape[0], mesh, per_row, packed)


def _routed(
    model: MegalodonModel, head: Linear | None, config: MegalodonConfig
) -> tuple[MegalodonModel, Linear | None, str]:
    """Assign every linear map its GEMM backend; return model, head and the head's backend."""
    parts: Any = {"model": model, "lm_head": head}
    # A tied head is not a linear map, but it is multiplied like one.
    names = dict.fromkeys((*linear_maps(parts), "lm_head"))
    backends = resolve(config.gemm_policy, names, "default", "MegalodonConfig: gemm_backend")
    parts = with_backends(parts, backends)
    return parts["model"], parts["lm_head"], backends["lm_head"]


def _dropout_key(
    model: MegalodonModel, deterministic: bool, key: jax.Array | None
) -> jax.Array | None:
    config = model.config
    rates = (config.dropout, config.attention_dropout, config.hidden_dropout)
    of_adapters = (adapted.dropout for adapted in lora_maps(model).values())
    if deterministic or not any((*rates, *of_adapters)):
        return None
    if key is None:
        raise ValueError(
            "deterministic=False with a positive dropout rate needs key=...; "
            "pass a fresh jax.random key at every step."
        )
    return key
