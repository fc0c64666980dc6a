"""Errors that low-precision products would cause, measured for `stability --what-if`.

Source: docs/formats.md "What would it cost?".
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megalodon_jax.convert import load_from_pretrained
from megalodon_jax.quantization.products import DIRECTIONS
from reports.user_text import first_tokens
from stability.products import what_if
from stability.products.what_if import FORMATS, Cost


def examine(path: Path, text: Path | None, say: Callable[[str], None]) -> list[Cost]:
    """Return the `Cost` of each matrix product of a training step in each low-precision format.

    Args:
        path: A folder, or a weights file with its `config.json` beside it.
        text: File whose bytes are the tokens of one step; None draws random token ids.
        say: Receives progress messages.

    Raises:
        FileNotFoundError: the checkpoint or the text does not exist.
        ValueError: the checkpoint is not Megalodon's; or a text is given, and it is shorter than
            256 bytes or the vocabulary is smaller than 256.
    """
    model = load_from_pretrained(path)
    ids = first_tokens(text, model.config.vocab_size)
    say(f"one step on {ids.size} tokens of {text.name if text else 'random ids'}")
    products = what_if.captured(model, ids)
    say(f"{len(products)} matrices, {len(DIRECTIONS)} products each, {len(FORMATS)} formats")
    return list(what_if.costs(products))
