"""The work of a JAX model that a bench times, for this project's model or PyPI's megalodon-jax.

Imports no model: `reports.bench.other` loads this file by its path, in a process whose
`megalodon_jax` is another package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

Work = Callable[[int], None]
DecodeStep = Callable[[Any, Any, jax.Array], tuple[jax.Array, Any]]


def jax_work(
    model: Any,
    tokens: jax.Array,
    decode_step: DecodeStep,
    generate: Callable[[Any, jax.Array, int], Any],
    **loss: Any,
) -> dict[str, Work]:
    """Return functions that do one piece of work each, by name.

    Each takes a count and blocks until done: the number of repetitions of forward, train_step
    (loss, backward, AdamW) and prefill (with a cache); the number of single tokens for decode
    (after a prefill); the number of tokens after the prompt for generate (greedy).

    Args:
        model: An Equinox module; `model(tokens, return_cache=...)` returns logits and a cache, and
            `model.compute_loss(tokens, tokens)` a loss. train_step trains a copy.
        tokens: Token ids (B, L) int32.
        decode_step: Maps (model, cache, ids (B,)) to (logits, next cache); may donate the cache.
        generate: Maps (model, prompt (B, L), number of new tokens) to ids, which are not read.
        loss: Further arguments of `compute_loss`.
    """
    prefill = eqx.filter_jit(lambda model, tokens: model(tokens, return_cache=True))

    def repeated(function: Callable[..., Any]) -> Work:
        def work(count: int) -> None:
            for _ in range(count):
                _wait(function(model, tokens))

        return work

    return {
        "forward": repeated(_forward()),
        "train_step": _training(model, tokens, loss),
        "prefill": repeated(prefill),
        "decode": _decoding(model, tokens, prefill, decode_step),
        "generate": lambda count: _wait(generate(model, tokens, count)),
    }


def program_bytes(name: str, model: Any, tokens: jax.Array, **loss: Any) -> int:
    """Return the bytes that a compiled "forward" or "train_step" needs; compiles the program.

    Counted are arguments, results and the peak of temporaries; a donated argument counts once.
    """
    if name == "forward":
        lowered = _forward().lower(model, tokens)
    else:
        lowered = _step(loss).lower(tokens, model, _state(model))
    memory = lowered.compile().compiled.memory_analysis()
    shared = memory.alias_size_in_bytes
    arguments, results = memory.argument_size_in_bytes, memory.output_size_in_bytes
    return arguments + results + memory.temp_size_in_bytes - shared


_TRANSFORM = optax.adamw(1e-4)


def _forward() -> Any:
    return eqx.filter_jit(lambda model, tokens: model(tokens)[0])


def _state(model: Any) -> Any:
    return _TRANSFORM.init(eqx.filter(model, eqx.is_array))


def _step(loss: Mapping[str, Any]) -> Any:
    @eqx.filter_jit(donate="all-except-first")
    def step(tokens, model, state):
        grads = eqx.filter_grad(lambda m: m.compute_loss(tokens, tokens, **loss))(model)
        updates, state = _TRANSFORM.update(grads, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state

    return step


def _training(model: Any, tokens: jax.Array, loss: Mapping[str, Any]) -> Work:
    step, trained = _step(loss), []

    def train_step(count: int) -> None:
        if not trained:
            copy = jax.tree.map(lambda x: jnp.array(x) if eqx.is_array(x) else x, model)
            trained.extend((copy, _state(copy)))
        for _ in range(count):
            trained[:] = step(tokens, *trained)
        _wait(trained)

    return train_step


def _decoding(
    model: Any, tokens: jax.Array, prefill: Callable[..., Any], decode_step: DecodeStep
) -> Work:
    stream: list[Any] = []
    token = tokens[:, 0]

    def decode(count: int) -> None:
        if not stream:
            stream.append(prefill(model, tokens)[1])
        for _ in range(count):
            logits, stream[0] = decode_step(model, stream[0], token)
            jax.block_until_ready(logits)

    return decode


def _wait(result: Any) -> None:
    """Block until the arrays of a result are computed."""
    jax.block_until_ready(eqx.filter(result, eqx.is_array))
