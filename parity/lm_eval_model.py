"""A `LanguageModel` for EleutherAI's lm-evaluation-harness (`lm-eval`), if it is installed.

The same tasks can then be run with both sides of a port, by the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from parity.tasks import LanguageModel, TaskError

BLOCK = 16
"""Number of tokens that are generated at a time, before the text is searched for its end."""
NEW_TOKENS = 256
"""Largest number of new tokens for a request without `max_gen_toks`."""


def lm_eval_model(
    model: LanguageModel,
    encode: Callable[[str], Sequence[int]],
    decode: Callable[[Sequence[int]], str],
    *,
    end: int,
    window: int,
) -> Any:
    """Return a model for `lm_eval.simple_evaluate(model=...)`.

    Requests are computed one by one, without padding, so that no answer depends on other requests.

    Args:
        model: the language model.
        encode: maps a text to token ids, without special tokens.
        decode: maps token ids to a text.
        end: id of the token that ends a text. This token also precedes a text without context, and
            ends a generated text.
        window: largest number of tokens that the model gets in one call.

    Raises:
        ImportError: lm-eval is not installed.
        TaskError: raised when the returned model is used: a continuation does not fit into the
            window, or a request asks for sampling.
    """
    try:
        from lm_eval.api.model import TemplateLM
    except ImportError as error:
        raise ImportError(
            "lm-eval is not installed: pip install lm-eval, then call this again"
        ) from error

    class Evaluated(TemplateLM):
        @property
        def eot_token_id(self) -> int:
            return end

        @property
        def tokenizer_name(self) -> str:
            return model.name

        def tok_encode(self, string: str, *_: Any, **__: Any) -> list[int]:
            return [int(i) for i in encode(string)]

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
            return [_scored(model, list(c) or [end], rest, window) for _, c, rest in requests]

        def loglikelihood_rolling(self, requests: Any, **_: Any) -> list[float]:
            return [_rolled(model, list(encode(r.args[0])), end, window) for r in requests]

        def generate_until(self, requests: Any, **_: Any) -> list[str]:
            return [_generated(model, encode, decode, r.args, end, window) for r in requests]

    return Evaluated()


def _scored(
    model: LanguageModel, context: Sequence[int], rest: Sequence[int], window: int
) -> tuple[float, bool]:
    """Return the log-likelihood of `rest` after `context` in nats, and whether `rest` is greedy.

    `rest` is greedy if each of its tokens is the most likely one after all tokens before it.
    """
    if not context or not rest:
        raise TaskError(
            f"{model.name}: expected a context and a continuation of at least one token each, got "
            "one of no token"
        )
    if len(rest) > window:
        raise TaskError(
            f"{model.name}: a continuation of {len(rest)} tokens does not fit into a window of "
            f"{window}: give a larger window, or another task"
        )
    # The last token is predicted only.
    seen = [*context, *rest][:-1][-window:]
    found = model.log_probabilities(np.asarray([seen], np.int32))[0, len(seen) - len(rest) :]
    targets = np.asarray(rest, np.int64)
    if targets.min() < 0 or targets.max() >= found.shape[-1]:
        raise TaskError(
            f"{model.name}: expected token ids below {found.shape[-1]}, got {rest}: the tokens are "
            "those of another model"
        )
    chosen = np.take_along_axis(found, targets[:, None], axis=-1)
    return float(chosen.sum()), bool((found.argmax(-1) == targets).all())


def _rolled(model: LanguageModel, ids: Sequence[int], end: int, window: int) -> float:
    """Return the log-likelihood of a whole text in nats; token `end` precedes the text.

    The text is cut into windows of `window` tokens. Each window is predicted after the one token
    before the window. The last, shorter window is predicted after as many earlier tokens as fit.
    """
    whole, total = [end, *ids], 0.0
    for start in range(0, len(ids), window):
        stop = min(start + window, len(ids))
        # `whole[i]` is the token before `ids[i]`.
        context = whole[max(0, stop - window) : start + 1]
        total += _scored(model, context, ids[start:stop], window)[0]
    return total


def _generated(
    model: LanguageModel,
    encode: Callable[[str], Sequence[int]],
    decode: Callable[[Sequence[int]], str],
    request: tuple[str, dict[str, Any]],
    end: int,
    window: int,
) -> str:
    """Return the greedy continuation of a request, which is a context and its options.

    The continuation stops before the first of the texts in `until`, before token `end`, or after
    `max_gen_toks` tokens.
    """
    context, options = request
    if options.get("do_sample") and options.get("temperature", 1.0) > 0:
        raise TaskError(
            f"{model.name}: the task samples its answers, which two models cannot agree on: choose "
            "a greedy task, or give do_sample=False"
        )
    until = options.get("until") or []
    ends = [until] if isinstance(until, str) else list(until)
    left = int(options.get("max_gen_toks", NEW_TOKENS))
    ids, made = list(encode(context)) or [end], []
    while left > 0:
        # At least half of the window is text that was there before.
        count = min(BLOCK, left, max(1, window // 2))
        kept = np.asarray([*ids, *made][-max(1, window - count) :], np.int64)
        new = [int(i) for i in model.continued(kept, count)]
        made, left = made + new, left - count
        if end in new:
            made, left = made[: made.index(end)], 0
        text = decode(made)
        if found := [at for each in ends if each and (at := text.find(each)) >= 0]:
            return text[: min(found)]
    return decode(made)
