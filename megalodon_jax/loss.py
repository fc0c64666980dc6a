"""Next-token cross-entropy (docs/model.md "Loss"): in one piece, by chunks, or by micro-batches.

The formula is in `_summed`, and the selection of targets in `_targets`; everything else splits the
work. All variants give the same number: one mean over the valid targets of the whole batch, never a
mean of means.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, SupportsIndex

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Int32, Integer

from megalodon_jax.checks import checked
from megalodon_jax.config import widened
from megalodon_jax.inputs import Ids, Mask, Tensor, as_int32, as_integer, as_mask, traced
from megalodon_jax.segments import SegmentIds, begins, check_segment_ids
from megalodon_jax.sharding.axes import automatic, mesh_of, shards, spec_of
from megalodon_jax.sharding.sequence import following
from megalodon_jax.sharding.vocabulary import at_target

_NO_COLUMN = jnp.iinfo(jnp.int32).max


def next_token_loss(
    logits: Float[Array, "B L V"],
    labels: Ids,
    mask: Mask | None = None,
    *,
    ignore_index: SupportsIndex = -100,
    dtype: DTypeLike = jnp.float32,
    vocab_size: int | None = None,
    segment_ids: SegmentIds | None = None,
) -> Float[Array, ""]:
    """Return the mean cross-entropy of `logits[:, t]` against `labels[:, t + 1]`, in nats.

    Targets equal to `ignore_index` and targets at masked positions do not count; megalodon-hf
    ignores the mask here (a documented difference). Without a valid target the loss is 0.

    Args:
        logits: scores before the softmax, any floating dtype.
        labels: the unshifted ids; the shift by one happens here.
        mask: True, or 1, where a label is text and not padding.
        ignore_index: label of positions that do not count.
        dtype: dtype of softmax, loss and result.
        vocab_size: V, if `logits` have padding columns of -inf beyond V; None if they have none.
        segment_ids: document of each token, for packed documents; the last token of a document has
            no target.

    Raises:
        RuntimeError: a label is outside [0, V) and not `ignore_index`, even if it does not count,
            or an integer mask has values other than 0 and 1 (both also under jit).
    """
    total, count = loss_sum_and_count(
        logits,
        labels,
        mask,
        ignore_index=ignore_index,
        dtype=dtype,
        vocab_size=vocab_size,
        segment_ids=segment_ids,
    )
    return _mean(total, count, dtype)


def loss_sum_and_count(
    logits: Float[Array, "B L V"],
    labels: Ids,
    mask: Mask | None = None,
    *,
    ignore_index: SupportsIndex = -100,
    dtype: DTypeLike = jnp.float32,
    vocab_size: int | None = None,
    segment_ids: SegmentIds | None = None,
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """Return the parts of `next_token_loss`: the sum over valid targets, and their number.

    To combine parts of a batch, add sums and counts and then divide: parts with different numbers
    of valid targets are then weighted correctly. The sum is in `dtype`, but at least float32, and
    the count is int32. Arguments and errors are those of `next_token_loss`.
    """
    # With Explicit mesh axes every operation would have to state the placement of its result.
    return automatic(
        lambda call: _sum_and_count(
            call[0], call[1], call[2], call[3], ignore_index, dtype, vocab_size
        ),
        (logits, labels, mask, segment_ids),
        lambda mesh: (PartitionSpec(), PartitionSpec()),
    )


def _sum_and_count(
    logits: Array,
    labels: Ids,
    mask: Mask | None,
    segment_ids: SegmentIds | None,
    ignore_index: SupportsIndex,
    dtype: DTypeLike,
    vocab_size: int | None,
) -> tuple[Array, Array]:
    V = logits.shape[-1] if vocab_size is None else vocab_size
    # The last position has no target, but slicing it off would copy all other logits.
    packed = () if segment_ids is None else (segment_ids,)
    targets, valid = _targets(labels, mask, V, ignore_index, *packed)
    total = _summed(logits, targets, valid, dtype)
    return total, jnp.sum(valid, dtype=jnp.int32)


def chunked_next_token_loss(
    hidden: Float[Array, "B L D"],
    head: Float[Array, "V D"],
    project: Callable[[Array, Array], Array],
    labels: Ids,
    mask: Mask | None = None,
    *,
    chunk: SupportsIndex,
    ignore_index: SupportsIndex = -100,
    dtype: DTypeLike = jnp.float32,
    vocab_size: int | None = None,
    segment_ids: SegmentIds | None = None,
) -> Float[Array, ""]:
    """Return `next_token_loss(project(hidden, head), ...)` without holding all logits in memory.

    Head and cross-entropy are applied to `chunk` positions at a time, and again in the backward
    pass. The largest array is (B, chunk, V), and the head's product is computed twice.

    Args:
        hidden: final hidden states.
        head: weight of the head; its gradient is accumulated in at least float32.
        project: maps hidden states (B, n, D) and the head to logits (B, n, V).
        labels: as for `next_token_loss`.
        mask: as for `next_token_loss`.
        chunk: number of positions whose logits are in memory at a time.
        ignore_index: as for `next_token_loss`.
        dtype: as for `next_token_loss`.
        vocab_size: as for `next_token_loss`, for the logits that `project` returns.
        segment_ids: as for `next_token_loss`.

    Raises:
        ValueError: `chunk` is not a positive integer.
        RuntimeError: a label is outside [0, V) and not `ignore_index`, even if it does not count,
            or an integer mask has values other than 0 and 1 (both also under jit).
    """
    remedy = ", the number of positions whose logits exist at a time, or None for all"
    chunk = as_integer("compute_loss: loss_chunk", chunk, 1, remedy)
    V = head.shape[0] if vocab_size is None else vocab_size
    packed = () if segment_ids is None else (segment_ids,)
    targets, valid = _targets(labels, mask, V, ignore_index, *packed)
    # Outside the loop, so that the gradient of a bfloat16 head is not accumulated in bfloat16.
    head = head.astype(widened(head.dtype))

    # The barrier against common subexpressions is not needed inside a scan.
    @partial(jax.checkpoint, prevent_cse=False)
    def summed(head: Array, hidden: Array, targets: Array, valid: Array) -> Array:
        return _summed(project(hidden, head), targets, valid, dtype)

    def step(total: Array, part: tuple[Array, Array, Array]) -> tuple[Array, None]:
        return total + summed(head, *part), None

    cuts = shards(mesh_of(hidden), "sequence")
    parts = (
        _by_chunk(hidden, chunk, cuts),
        _by_chunk(targets, chunk, cuts),
        _by_chunk(valid, chunk, cuts),
    )
    total, _ = jax.lax.scan(step, jnp.zeros((), widened(dtype)), parts)
    return _mean(total, jnp.sum(valid, dtype=jnp.int32), dtype)


def accumulate_gradients(
    model: Any,
    input_ids: Integer[Tensor, "k B L"],
    labels: Integer[Tensor, "k B L"],
    attention_mask: Bool[Tensor, "k B L"] | Integer[Tensor, "k B L"] | None = None,
    *,
    ignore_index: SupportsIndex = -100,
    deterministic: bool = True,
    key: jax.Array | None = None,
    loss_chunk: SupportsIndex | None = None,
    segment_ids: Integer[Tensor, "k B L"] | None = None,
) -> tuple[Float[Array, ""], Any]:
    """Return loss and gradients of `k` micro-batches, equal to those of one batch of k*B rows.

    One micro-batch is in memory at a time. Each is weighted by its number of valid targets, so the
    result equals that of the large batch (up to the order of additions) for any padding. Sums are
    kept in at least float32. Call it inside `eqx.filter_jit`.

    Args:
        model: a `MegalodonForCausalLM`, or any object with its `compute_loss`.
        input_ids: token ids, with micro-batches along the first axis.
        labels: as for `compute_loss`, of the shape of `input_ids`.
        attention_mask: True where a token is valid.
        ignore_index: label that does not count.
        deterministic: False enables dropout.
        key: PRNG key for dropout, split over micro-batches.
        loss_chunk: see `compute_loss`.
        segment_ids: document of each token, for packed documents.

    Returns:
        The mean loss over all valid targets, in at least float32, and gradients with the model's
        structure and dtypes.

    Raises:
        ValueError, RuntimeError: as for `compute_loss`.
    """
    labels, attention_mask, ignore_index = _accepted(labels, attention_mask, ignore_index, "k B L")
    check_segment_ids(segment_ids, labels.shape, "input_ids")
    valid = _following(labels, attention_mask, ignore_index, segment_ids)[1]
    counts = jnp.sum(valid, (1, 2), dtype=jnp.int32)
    every = jnp.sum(counts, dtype=jnp.int32)
    keys = None if key is None else jax.random.split(key, len(input_ids))

    def weighted(model, ids, labels, mask, key, count, segment_ids):
        # Passed only if given, so that any model with a `compute_loss` works.
        packed = {} if segment_ids is None else {"segment_ids": segment_ids}
        loss = model.compute_loss(
            ids, labels, mask, ignore_index, deterministic, key, loss_chunk=loss_chunk, **packed
        )
        loss = loss.astype(widened(loss.dtype))
        return loss * (count.astype(loss.dtype) / jnp.maximum(every, 1).astype(loss.dtype))

    def step(carry, micro):
        value = eqx.filter_value_and_grad(weighted)(model, *micro)
        return jax.tree.map(lambda total, x: total + x.astype(total.dtype), carry, value), None

    micros = (input_ids, labels, attention_mask, keys, counts, segment_ids)
    first = jax.tree.map(lambda x: x[0], micros)
    shapes = eqx.filter_eval_shape(eqx.filter_value_and_grad(weighted), model, *first)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, widened(x.dtype)), shapes)
    summed, _ = jax.lax.scan(step, zeros, micros)
    return jax.tree.map(lambda x, like: x.astype(like.dtype), summed, shapes)


def _following(
    labels: Array, mask: Array | None, ignore_index: Any, segment_ids: Any
) -> tuple[Array, Array]:
    """Return each position's target (the next label), and whether it counts in the loss."""
    dims = ((None,) * (labels.ndim - 2)) + ("batch", "sequence")
    # Labels move between shards of a sequence, which is not possible with Explicit axes.
    return automatic(
        lambda call: _next(*call),
        (labels, mask, ignore_index, segment_ids),
        lambda mesh: (spec_of(mesh, labels.shape, dims),) * 2,
    )


def _next(
    labels: Array, mask: Array | None, ignore_index: Any, segment_ids: Any
) -> tuple[Array, Array]:
    if mask is not None:
        labels = jnp.where(mask, labels, ignore_index)
    if segment_ids is not None:
        # The first token of a document is not a target of the document before it.
        labels = jnp.where(begins(segment_ids), ignore_index, labels)
    targets = following(labels, ignore_index, mesh_of(labels))
    return targets, targets != ignore_index


def _targets(
    labels: Ids,
    mask: Mask | None,
    V: int,
    ignore_index: SupportsIndex,
    segment_ids: SegmentIds | None = None,
) -> tuple[Int32[Array, "B L"], Bool[Array, "B L"]]:
    """Return each position's target, safe as an index, and whether it counts in the loss."""
    labels, mask, ignore_index = _accepted(labels, mask, ignore_index, "B L")
    check_segment_ids(segment_ids, labels.shape, "labels")
    # Ignored labels are checked too: they are just as wrong, and may count in the next batch.
    labels = checked(
        labels,
        (labels != ignore_index) & ((labels < 0) | (labels >= V)),
        f"compute_loss: labels must be in [0, {V}) or ignore_index={ignore_index}, also at "
        "positions that a mask or the shift excludes.",
    )
    targets, valid = _following(labels, mask, ignore_index, segment_ids)
    # With checks off, a label out of range must neither index from the end nor select a padding
    # column. `_NO_COLUMN` is beyond all columns, which gives NaN.
    targets = jnp.where(targets < V, targets, _NO_COLUMN)
    return jnp.where(valid, jnp.where(targets < 0, _NO_COLUMN, targets), 0), valid


def _accepted(labels, mask, ignore_index, axes: str) -> tuple[Array, Array | None, Any]:
    labels = as_int32("compute_loss: labels", labels, axes, "give them the shape of input_ids")
    mask = as_mask("compute_loss: attention_mask", mask, labels.shape, "labels")
    if not traced(ignore_index):
        ignore_index = as_integer("compute_loss: ignore_index", ignore_index)
    return labels, mask, ignore_index


def _summed(logits: Array, targets: Array, valid: Array, dtype: DTypeLike) -> Array:
    """Return the sum of the cross-entropy (in `dtype`) over valid targets, in at least float32."""
    logits = logits.astype(dtype)
    mesh = mesh_of(logits)
    if mesh is None:
        own = jnp.take_along_axis(logits, targets[..., None], axis=-1, mode="fill")[..., 0]
    else:
        own = at_target(logits, targets, mesh)
    nll = jax.nn.logsumexp(logits, axis=-1) - own
    return jnp.sum(jnp.where(valid, nll, 0.0), dtype=widened(dtype))


def _mean(total: Array, count: Array, dtype: DTypeLike) -> Array:
    return (total / jnp.maximum(count, 1).astype(total.dtype)).astype(dtype)


def _by_chunk(x: Array, chunk: int, parts: int) -> Array:
    """Reshape (B, n, ...) to (chunks, B, parts * chunk, ...).

    On `parts` shards of a sequence, every chunk takes `chunk` positions from each shard, so that no
    data moves between shards. Each shard is padded with zeros at its end.
    """
    B, n = x.shape[0], x.shape[1] // parts
    chunks = -(-n // chunk)
    x = x.reshape(B, parts, n, *x.shape[2:])
    x = jnp.pad(x, ((0, 0), (0, 0), (0, chunks * chunk - n), *((0, 0),) * (x.ndim - 3)))
    x = jnp.moveaxis(x.reshape(B, parts, chunks, chunk, *x.shape[3:]), 2, 0)
    return x.reshape(chunks, B, parts * chunk, *x.shape[4:])
