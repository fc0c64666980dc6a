"""Text generation: sample a token, feed it back, carry the cache (docs/guide.md "Generation")."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, SupportsIndex

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int32, Integer

from megalodon_jax.checks import checked, checks_enabled
from megalodon_jax.config import widened
from megalodon_jax.inputs import Ids, Mask, Rate, Tensor, as_int32, as_integer, as_mask, traced
from megalodon_jax.model import MegalodonForCausalLM
from megalodon_jax.ragged import padding_of
from megalodon_jax.sharding.axes import automatic, spec_of
from megalodon_jax.sharding.caches import full_cache_specs
from megalodon_jax.types import (
    ModelCache,
    filled_cache,
    grown_cache,
    index_cache,
    init_cache,
    reserve_cache,
    trim_cache,
)

__all__ = [
    "GREEDY_BELOW",
    "decode_step",
    "generate",
    "generate_jit",
    "greedy_token",
    "index_cache",
    "init_cache",
    "reserve_cache",
    "sample_token",
    "trim_cache",
]

# Sampling adds Gumbel noise, which spans about 20 in float32, to logits / temperature. So at this
# temperature, noise never reverses the order of two tokens whose logits differ by 2e-4, the
# rounding error of float32 logits. A lower temperature would sample rounding errors, and from 1e-38
# on it would divide 0 by 0.
GREEDY_BELOW = 1e-5
"""Temperature below which sampling takes the most likely token."""


def greedy_token(logits: Float[Tensor, "B V"]) -> Int32[Array, " B"]:
    """Return the most likely token of each row; among equally likely tokens, the lowest id.

    Raises:
        RuntimeError: a row contains NaN or +inf, or only -inf (also under jit).
    """
    peak = jnp.max(logits, axis=-1)
    return _finite(jnp.argmax(logits, axis=-1).astype(jnp.int32), peak)


def sample_token(
    logits: Float[Tensor, "B V"],
    key: jax.Array,
    temperature: Rate = 1.0,
    top_k: SupportsIndex | None = None,
    top_p: Rate | None = None,
) -> Int32[Array, " B"]:
    """Sample one token per row.

    Args:
        logits: (B, V), any float dtype; probabilities are computed in at least float32. A logit of
            -inf excludes its token.
        key: PRNG key.
        temperature: divides the logits; below `GREEDY_BELOW` the most likely token is taken.
        top_k: keep the k most likely tokens and any as likely as the k-th; 0 or None keeps all.
        top_p: keep the most likely tokens, as few as reach the probability p after temperature and
            `top_k`, and any as likely as the last of them; 1 or None keeps all.

    Raises:
        ValueError: `temperature`, `top_k` or `top_p` is out of range.
        RuntimeError: a row of logits contains NaN or +inf, or only -inf, or a traced `temperature`
            or `top_p` is out of range (also under jit).
    """
    rates = _rates("sample_token", temperature, top_k, top_p)
    return _draw(jnp.asarray(logits), key, *rates)


def _draw(
    logits: Float[Array, "B V"],
    key: jax.Array | None,
    temperature: Float[Array, ""] | None,
    top_k: int | None,
    top_p: Float[Array, ""] | None,
) -> Int32[Array, " B"]:
    """Sample one token per row, with temperature, top_k and top_p as returned by `_rates`."""
    if temperature is None:
        return greedy_token(logits)
    logits = logits.astype(widened(logits.dtype))
    peak = jnp.max(logits, axis=-1, keepdims=True)
    temperature, likeliest = temperature.astype(logits.dtype), jnp.argmax(logits, axis=-1)
    # Relative to the peak, nothing overflows to +inf and the divisor has a lower limit.
    logits = (logits - peak) / jnp.maximum(temperature, GREEDY_BELOW)
    if top_k is not None and top_k < logits.shape[-1]:
        kth = jax.lax.top_k(logits, top_k)[0][:, -1:]
        logits = jnp.where(logits < kth, -jnp.inf, logits)
    if top_p is not None:
        top_p = top_p.astype(logits.dtype)
        ranked = jnp.sort(logits, axis=-1, descending=True)
        p = jax.nn.softmax(ranked, axis=-1)
        # A token is kept if the more likely ones have not reached p; the first is always kept.
        kept = jnp.cumsum(p, axis=-1) - p < top_p
        least = jnp.min(jnp.where(kept, ranked, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    assert key is not None, "where there is a temperature, callers insist on a key"
    drawn = jax.random.categorical(key, logits, axis=-1)
    token = jnp.where(temperature < GREEDY_BELOW, likeliest, drawn)
    return _finite(token.astype(jnp.int32), peak[:, 0])


def _finite(token: Int32[Array, " B"], peak: Float[Array, " B"]) -> Int32[Array, " B"]:
    """Return `token`; raise if `peak`, a row's largest logit, is not finite (also under jit)."""
    message = (
        "logits hold NaN or +inf, or exclude every token of a row by -inf: no token can be chosen. "
        "Look for NaN in the parameters of the model."
    )
    return checked(token, ~jnp.isfinite(peak), message)


def decode_step(
    model: MegalodonForCausalLM, cache: ModelCache, token: Integer[Tensor, " B"]
) -> tuple[Float[Array, "B V"], ModelCache]:
    """Feed one token per row (B,); return the logits (B, V) after it and the new cache.

    The cache is donated: its buffers are overwritten in place, so the cache that was passed must
    not be used again.
    """
    token = as_int32("decode_step: token", token, "B", "give the latest token of each row")
    decode = _decode if checks_enabled() else _decode_unchecked
    return decode((model, token), cache)


def _decode_token(
    kept: tuple[MegalodonForCausalLM, Int32[Array, " B"]], cache: ModelCache
) -> tuple[Float[Array, "B V"], Any]:
    model, token = kept
    logits, after = model(token[:, None], cache=cache, return_cache=True)
    return logits[:, 0], after


# Equinox's jit formats the errors of checks. Without checks, JAX's own jit is used: with six layers
# it starts a token 0.6 ms sooner, a tenth of the token's time, because it does not re-sort the
# leaves of model and cache.
_decode = eqx.filter_jit(_decode_token, donate="all-except-first")
_decode_unchecked = jax.jit(_decode_token, donate_argnums=1)


def generate(
    model: MegalodonForCausalLM,
    prompt_ids: Ids,
    max_new_tokens: SupportsIndex,
    key: jax.Array | None = None,
    *,
    temperature: Rate = 1.0,
    top_k: SupportsIndex | None = None,
    top_p: Rate | None = None,
    bos_token_id: SupportsIndex | None = None,
    eos_token_id: SupportsIndex | Sequence[SupportsIndex] | None = None,
    attention_mask: Mask | None = None,
    cache: ModelCache | None = None,
    return_cache: bool = False,
) -> tuple[Int32[Array, "B T"], ModelCache | None, jax.Array | None]:
    """Continue each prompt by `max_new_tokens` tokens, in one compiled function.

    The function compiles once per prompt length, `max_new_tokens`, `top_k` and `eos_token_id`; the
    values of `temperature` and `top_p` may vary freely. It may be called under jit with any array
    traced; an unbounded cache then grows by the number of requested tokens.

    Args:
        model: the language model.
        prompt_ids: (B, L), any integer dtype. With L = 0 and no cache, each row starts from BOS.
        max_new_tokens: number of tokens to add, at least 1.
        key: PRNG key; needed unless greedy.
        temperature: see `sample_token`; 0 is greedy.
        top_k, top_p: see `sample_token`.
        bos_token_id: first token of an empty prompt; None means the configuration's.
        eos_token_id: id or ids that end a text. A row that generates one of them is finished: its
            later tokens repeat that id. None: no row finishes early; the configuration's ids are
            not used.
        attention_mask: True, or 1, where the prompt is valid. Each row gets the result it would get
            alone, whatever its length. A row has at least one token, and padding only before and
            after its tokens. New tokens follow the padded prompt.
        cache: cache of a stream to continue; then `prompt_ids` are its next tokens.
        return_cache: whether to return the cache, which has seen all returned tokens but the last.
            To continue, pass `ids[:, -1:]` as the next prompt, with the returned cache and key.

    Returns:
        ids (B, L + max_new_tokens) int32, prompts included (for an empty prompt L is 1, BOS), the
        cache or None, and the next key (if greedy, the given one).

    Raises:
        ValueError: `max_new_tokens` is not positive, sampling lacks a key, `temperature`, `top_k`
            or `top_p` is out of range, a row of the mask has no token or has padding between its
            tokens, or a prompt is empty although it continues a cache or there is no BOS.
        RuntimeError: a traced value breaks one of these rules, an id is outside the vocabulary, or
            logits are not finite.

    On a continued cache, a prompt that ends in EOS is a finished row. To continue after it, add the
    next tokens to the prompt or pass no `eos_token_id`.
    """
    max_new_tokens = as_integer("generate: max_new_tokens", max_new_tokens, 1)
    rates = _rates("generate", temperature, top_k, top_p)
    if rates[0] is not None and key is None:
        raise ValueError("generate: sampling needs key=...; pass one, or temperature=0 for greedy.")
    prompt_ids = as_int32("generate: prompt_ids", prompt_ids, "B L", "give one row a first axis")
    prompt_ids, mask = _masked(prompt_ids, attention_mask)
    if prompt_ids.shape[1] == 0:
        if cache is not None:
            raise ValueError(
                "generate: an empty prompt cannot continue a cache; pass the last token as prompt."
            )
        bos = model.config.bos_token_id if bos_token_id is None else bos_token_id
        if bos is None:
            raise ValueError(
                "generate: an empty prompt starts from bos_token_id, which is None in the "
                "configuration; pass bos_token_id."
            )
        bos = as_integer("generate: bos_token_id", bos)
        prompt_ids = jnp.full((prompt_ids.shape[0], 1), bos, jnp.int32)
    ends = _ends(eos_token_id)
    if model.config.cache_unbounded and (max_new_tokens > 1 or return_cache or cache is not None):
        cache = _roomy(model, cache, prompt_ids.shape, max_new_tokens)
    ids, cache, key = _generated(
        model, prompt_ids, mask, max_new_tokens, key, cache, rates, ends, return_cache
    )
    return ids, cache if return_cache else None, key


generate_jit = generate
"""Alias of `generate`, which is already compiled."""


def _ends(eos_token_id: Any) -> tuple[int, ...]:
    """Return `eos_token_id` as a tuple of ids, empty for None."""
    if eos_token_id is None:
        return ()
    several = isinstance(eos_token_id, Sequence)
    ends = tuple(eos_token_id) if several else (eos_token_id,)
    return tuple(as_integer("generate: eos_token_id", end) for end in ends)


@eqx.filter_jit
def _generated(model, prompt_ids, mask, max_new_tokens: int, key, cache, rates, ends, return_cache):
    """Return ids, cache and next key; the arguments are those of `generate`, checked.

    `mask` is None if nothing is padded; `rates` is the result of `_rates`; `ends` holds the ids
    that end a row. A returned cache must have seen every token but the last. So the loop stops
    early, when every row has finished, only if no cache is returned.
    """
    call = (model, prompt_ids, mask, max_new_tokens, key, cache, rates, ends, return_cache)
    per_row = mask is not None or (cache is not None and cache.per_row)
    packed = cache is not None and cache.document is not None

    def specs(mesh):
        rows = prompt_ids.shape[0]
        ids = spec_of(mesh, (rows, 1), ("batch", None))
        return (
            ids,
            full_cache_specs(model.config, rows, mesh, per_row, packed),
            None if key is None else PartitionSpec(),
        )

    return automatic(lambda call: _continued(*call), call, specs)


def _continued(model, prompt_ids, mask, max_new_tokens, key, cache, rates, ends, return_cache):
    B, L = prompt_ids.shape
    done = jnp.zeros(B, bool)

    def latest(x):
        if mask is None:
            return x[:, -1]
        return x[jnp.arange(B), L - 1 - jnp.argmax(mask[:, ::-1], axis=1)]

    token = latest(prompt_ids)
    if cache is not None:
        # A row that had finished when its stream was suspended stays finished.
        done = _is_any(token, ends)
    logits, cache = model(prompt_ids, mask, cache=cache, return_cache=True)
    logits = latest(logits)

    def pick(logits, key, before, done):
        sample_key = None
        if key is not None and rates[0] is not None:
            key, sample_key = jax.random.split(key)
        token = jnp.where(done, before, _draw(logits, sample_key, *rates))
        return token, key, done | _is_any(token, ends)

    token, key, done = pick(logits, key, token, done)
    new = jnp.zeros((B, max_new_tokens), jnp.int32).at[:, 0].set(token)

    def unfinished(carry):
        index, _, _, _, _, done = carry
        running = index < max_new_tokens
        return running if return_cache else running & ~jnp.all(done)

    def step(carry):
        index, new, token, cache, key, done = carry
        logits, cache = model(token[:, None], cache=cache, return_cache=True)
        token, key, done = pick(logits[:, 0], key, token, done)
        return index + 1, new.at[:, index].set(token), token, cache, key, done

    carry = (jnp.ones((), jnp.int32), new, token, cache, key, done)
    index, new, token, cache, key, _ = jax.lax.while_loop(unfinished, step, carry)
    # If all rows finished early, the remaining tokens repeat each row's end.
    written = jnp.arange(max_new_tokens, dtype=jnp.int32) < index
    new = jnp.where(written, new, token[:, None])
    return jnp.concatenate([prompt_ids, new], axis=1), cache, key


def _is_any(token: Int32[Array, " B"], ends: tuple[int, ...]) -> Bool[Array, " B"]:
    """Return for each row whether its token is one of `ends`."""
    return jnp.any(token[:, None] == jnp.array(ends, jnp.int32), axis=1)


def _rates(
    caller: str, temperature: Any, top_k: SupportsIndex | None, top_p: Any
) -> tuple[Float[Array, ""] | None, int | None, Float[Array, ""] | None]:
    """Check temperature, top_k and top_p, and return them; errors name the function `caller`.

    A returned temperature of None means greedy; a top_k or top_p of None keeps all tokens.
    Temperature and top_p become arrays, so that new values do not recompile.
    """
    rule = "{}: temperature={} must be 0 (greedy) or positive, and finite."
    if traced(temperature):
        bad = ~(temperature >= 0) | ~jnp.isfinite(temperature)
        temperature = checked(temperature, bad, rule.format(caller, "..."))
    else:
        # Converted to a number: under jit, a comparison of arrays has no truth value.
        temperature = float(temperature)
        if not 0.0 <= temperature < np.inf:
            raise ValueError(rule.format(caller, temperature))
        temperature = None if temperature < GREEDY_BELOW else temperature
    if top_k is not None:
        # 0 keeps all tokens, as None does.
        top_k = as_integer(f"{caller}: top_k", top_k, 0, ", or None") or None
    rule = "{}: top_p={} must be in (0, 1], or None."
    if traced(top_p):
        top_p = checked(top_p, ~((top_p > 0) & (top_p <= 1)), rule.format(caller, "..."))
    elif top_p is not None:
        top_p = float(top_p)
        if not 0.0 < top_p <= 1.0:
            raise ValueError(rule.format(caller, top_p))
    temperature, top_p = (
        None if x is None else jnp.asarray(x, float) for x in (temperature, top_p)
    )
    return temperature, top_k, top_p


def _masked(
    ids: Int32[Array, "B L"], mask: Any
) -> tuple[Int32[Array, "B L"], Bool[Array, "B L"] | None]:
    """Check the mask of prompts `ids`; return ids and mask, which is None if nothing is padded."""
    mask = padding_of(mask, ids.shape)
    mask = as_mask("generate: attention_mask", mask, ids.shape, "prompt_ids")
    if mask is None or mask.size == 0:
        return ids, None
    if not traced(mask):
        mask = np.asarray(mask)
    begins = mask[:, 1:] & ~mask[:, :-1]
    stretches = mask[:, :1].sum(axis=1) + begins.sum(axis=1)
    rule = (
        "generate: each row of attention_mask must hold a token, and its tokens must stand next to "
        "each other: padding may be on the left, the right or both. Move padding to the ends of "
        "the row; give an empty row its first token, such as BOS."
    )
    if not traced(mask) and np.any(stretches != 1):
        raise ValueError(rule)
    return checked(ids, jnp.asarray(stretches != 1), rule), jnp.asarray(mask)


def _roomy(
    model: MegalodonForCausalLM,
    cache: ModelCache | None,
    shape: tuple[int, ...],
    max_new_tokens: int,
) -> ModelCache:
    """Return the unbounded `cache` (if None, an empty one), grown to hold prompt and new tokens.

    `shape` is the shape (B, L) of the prompts. The cache cannot grow inside the compiled loop.
    """
    B, L = shape
    cache = filled_cache(model.config, cache, B)
    return grown_cache(model.config, cache, L + max_new_tokens, resizable=True)
