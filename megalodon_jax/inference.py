"""Text generation: pick a token, feed it back, carry the cache (spec/api.md "generate")."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int32

from megalodon_jax.config import widened
from megalodon_jax.model import MegalodonForCausalLM
from megalodon_jax.types import ModelCache, init_cache, reserve_cache


def greedy_token(logits: Float[Array, "B V"]) -> Int32[Array, " B"]:
    """Return the most likely token of each row."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def sample_token(
    logits: Float[Array, "B V"],
    key: jax.Array,
    *,
    temperature: float | Float[Array, ""] = 1.0,
    top_k: int | None = None,
    top_p: float | Float[Array, ""] | None = None,
) -> Int32[Array, " B"]:
    """Draw a token of each row.

    Args:
        logits: (B, V), any float dtype; probabilities are taken in at least float32.
        key: PRNG key.
        temperature: divides the logits; positive.
        top_k: keep the k most likely tokens.
        top_p: keep the smallest set of most likely tokens whose probability reaches p.

    Raises:
        ValueError: a value is out of range; under jit only `top_k` is looked at.
    """
    _check_rates("sample_token", temperature, top_k, top_p)
    if not _traced(temperature) and temperature == 0:
        raise ValueError("sample_token: temperature=0 is greedy; call greedy_token.")
    dtype = widened(logits.dtype)
    logits = logits.astype(dtype) / jnp.asarray(temperature, dtype)
    if top_k is not None and top_k < logits.shape[-1]:
        kth = jax.lax.top_k(logits, top_k)[0][:, -1:]
        logits = jnp.where(logits < kth, -jnp.inf, logits)
    if top_p is not None:
        ranked = jnp.sort(logits, axis=-1, descending=True)
        p = jax.nn.softmax(ranked, axis=-1)
        # A token stays while those above it have not reached p; the first always stays.
        kept = jnp.cumsum(p, axis=-1) - p < jnp.asarray(top_p, dtype)
        least = jnp.min(jnp.where(kept, ranked, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return jax.random.categorical(key, logits, axis=-1).astype(jnp.int32)


def decode_step(
    model: MegalodonForCausalLM, cache: ModelCache, token: Int[Array, " B"]
) -> tuple[Float[Array, "B V"], ModelCache]:
    """Feed one token per row; returns its logits and the cache after it.

    The cache is donated: its buffers are written in place and the one handed in is gone.
    """
    return _decode((model, token), cache)


@eqx.filter_jit(donate="all-except-first")
def _decode(kept, cache: ModelCache):
    model, token = kept
    logits, cache = model(token[:, None], cache=cache, return_cache=True)
    return logits[:, 0], cache


def generate(
    model: MegalodonForCausalLM,
    prompt_ids: Int[Array, "B L"],
    max_new_tokens: int,
    key: jax.Array | None = None,
    *,
    temperature: float | int = 1.0,
    top_k: int | None = None,
    top_p: float | int | None = None,
    bos_token_id: int | None = None,
    eos_token_id: int | None = None,
    attention_mask: Bool[Array, "B L"] | None = None,
    cache: ModelCache | None = None,
    return_cache: bool = False,
) -> tuple[Int32[Array, "B T"], ModelCache | None, jax.Array | None]:
    """Continue each prompt by `max_new_tokens` tokens.

    Args:
        model: the language model.
        prompt_ids: (B, L) int32. An empty prompt without a cache starts from BOS.
        max_new_tokens: tokens to add, at least 1.
        key: PRNG key; needed unless `temperature` is 0.
        temperature: 0 is greedy.
        top_k, top_p: see `sample_token`.
        bos_token_id: what an empty prompt starts from; None means the configuration's.
        eos_token_id: a row that produced it repeats it from there on; None never stops.
        attention_mask: right padding is possible for a single token without a cache.
        cache: continue a stream; then `prompt_ids` are its next tokens.
        return_cache: also return the cache. It has seen every token returned but the last: to go
            on, pass `ids[:, -1:]` as the next prompt, with the returned cache and key.

    Returns:
        ids (B, L + max_new_tokens) int32, the cache or None, and the next key (when greedy, the one
        that was given).

    Raises:
        ValueError: `max_new_tokens` is not positive, sampling lacks a key, a rate is out of range,
            padding meets a cache, an empty prompt continues a cache, or there is no BOS for it.

    On a continued cache a prompt that ends in EOS is a finished row: to go on after it, add the
    next tokens to the prompt or pass no `eos_token_id`.
    """
    _check_sampling(max_new_tokens, key, temperature, top_k, top_p)
    streams = max_new_tokens > 1 or return_cache or cache is not None
    last = _last_valid(attention_mask, prompt_ids.shape, streams)
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
        prompt_ids = jnp.full((prompt_ids.shape[0], 1), bos, jnp.int32)
    if model.config.cache_unbounded and streams:
        cache = _roomy(model, cache, prompt_ids.shape, max_new_tokens)
    if last is not None:
        logits = _uncached(model, prompt_ids, attention_mask)
        chosen = logits[jnp.arange(logits.shape[0]), last]
        token, key = _pick(chosen, key, temperature, top_k, top_p)
        return jnp.concatenate([prompt_ids.astype(jnp.int32), token[:, None]], 1), None, key
    ids, cache, key = generate_jit(
        model,
        prompt_ids.astype(jnp.int32),
        max_new_tokens,
        key,
        cache,
        temperature=None if temperature == 0 else jnp.asarray(temperature, jnp.float32),
        top_k=top_k,
        top_p=None if top_p is None else jnp.asarray(top_p, jnp.float32),
        eos_token_id=eos_token_id,
        stop_early=not return_cache,
    )
    return ids, cache if return_cache else None, key


@eqx.filter_jit
def generate_jit(
    model: MegalodonForCausalLM,
    prompt_ids: Int32[Array, "B L"],
    max_new_tokens: int,
    key: jax.Array | None,
    cache: ModelCache | None,
    *,
    temperature: Float[Array, ""] | None,
    top_k: int | None,
    top_p: Float[Array, ""] | None,
    eos_token_id: int | None,
    stop_early: bool,
) -> tuple[Int32[Array, "B T"], ModelCache, jax.Array | None]:
    """Generate inside one compiled function; arguments are those of `generate`, checked.

    `temperature` None is greedy. Compiles once per prompt length, `max_new_tokens` and `top_k`; the
    values of `temperature` and `top_p` may vary freely. `stop_early` leaves the loop when every row
    has finished.
    """
    B = prompt_ids.shape[0]
    done = jnp.zeros(B, bool)
    if cache is not None and eos_token_id is not None:
        # A row that had finished when its stream was put aside stays finished.
        done = prompt_ids[:, -1] == eos_token_id
    logits, cache = model(prompt_ids, cache=cache, return_cache=True)
    token, key = _pick(logits[:, -1], key, temperature, top_k, top_p)
    if eos_token_id is not None:
        token = jnp.where(done, eos_token_id, token)
        done = done | (token == eos_token_id)
    # Rows that finish early find their EOS already written.
    filler = 0 if eos_token_id is None else eos_token_id
    new = jnp.full((B, max_new_tokens), filler, jnp.int32).at[:, 0].set(token)

    def unfinished(carry):
        index, _, _, _, _, done = carry
        running = index < max_new_tokens
        return running & ~jnp.all(done) if stop_early else running

    def step(carry):
        index, new, token, cache, key, done = carry
        logits, cache = model(token[:, None], cache=cache, return_cache=True)
        token, key = _pick(logits[:, 0], key, temperature, top_k, top_p)
        if eos_token_id is not None:
            token = jnp.where(done, eos_token_id, token)
            done = done | (token == eos_token_id)
        return index + 1, new.at[:, index].set(token), token, cache, key, done

    carry = (jnp.ones((), jnp.int32), new, token, cache, key, done)
    _, new, _, cache, key, _ = jax.lax.while_loop(unfinished, step, carry)
    assert cache is not None
    return jnp.concatenate([prompt_ids, new], axis=1), cache, key


@eqx.filter_jit
def _uncached(model, ids, mask):
    return model(ids, mask)[0]


def _pick(logits, key, temperature, top_k, top_p) -> tuple[Array, Any]:
    if key is None or temperature is None:
        return greedy_token(logits), key
    key, sample_key = jax.random.split(key)
    token = sample_token(logits, sample_key, temperature=temperature, top_k=top_k, top_p=top_p)
    return token, key


def _check_sampling(max_new_tokens, key, temperature, top_k, top_p) -> None:
    if not isinstance(max_new_tokens, (int, np.integer)) or max_new_tokens <= 0:
        raise ValueError(
            f"generate: max_new_tokens={max_new_tokens} must be at least 1, an integer."
        )
    _check_rates("generate", temperature, top_k, top_p)
    if temperature > 0 and key is None:
        raise ValueError("generate: sampling needs key=...; pass one, or temperature=0 for greedy.")


def _check_rates(caller: str, temperature, top_k, top_p) -> None:
    if not _traced(temperature) and not temperature >= 0:
        raise ValueError(f"{caller}: temperature={temperature} must be 0 (greedy) or positive.")
    if top_k is not None and top_k < 1:
        raise ValueError(f"{caller}: top_k={top_k} must be at least 1, or None.")
    if top_p is not None and not _traced(top_p) and not 0.0 < top_p <= 1.0:
        raise ValueError(f"{caller}: top_p={top_p} must be in (0, 1], or None.")


def _traced(x: Any) -> bool:
    return isinstance(x, jax.core.Tracer)  # pyright: ignore[reportAttributeAccessIssue]


def _last_valid(mask: Array | None, shape: tuple[int, ...], streams: bool) -> Array | None:
    """Index (B,) of the last valid token of padded prompts; None when nothing is padded."""
    if mask is None:
        return None
    if mask.shape != shape:
        raise ValueError(
            f"generate: attention_mask has shape {mask.shape}, expected that of prompt_ids, "
            f"{shape}."
        )
    if np.asarray(mask).all():
        return None
    if streams:
        raise ValueError(
            "generate: a padded attention_mask allows one new token without a cache only: a cache "
            "cannot tell padding from text. Use prompts of equal length."
        )
    if not (np.diff(np.asarray(mask, np.int8), axis=1) <= 0).all() or not mask[:, 0].all():
        raise ValueError(
            "generate: prompts must be padded on the right and hold at least one token each; move "
            "the padding behind the text."
        )
    return jnp.sum(mask, axis=1) - 1


def _roomy(model, cache: ModelCache | None, shape, max_new_tokens: int) -> ModelCache:
    """A cache that an unbounded stream will not outgrow: it cannot grow inside the loop."""
    config, (B, L) = model.config, shape
    if cache is None or cache.layer_caches[0].attn is None:
        cache = init_cache(config, B, allocate_kv=True, allocate_norm=True, allocate_ema=True)
    C, needed = config.chunk_size, int(cache.position) + L + max_new_tokens
    return reserve_cache(cache, -(-needed // C) * C)
