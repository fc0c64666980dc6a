"""Reads token ids from a user's text or array, and describes their source.

Source: docs/parity.md "Same work".
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

BYTES = 256
"""Number of token ids that a model needs if the bytes of a text are its ids."""
STEP = (2, 128)
"""Rows, and tokens per row, of one training step on a user's text."""


@runtime_checkable
class Sizes(Protocol):
    """Sizes in the configuration of a model that limit its token ids."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        ...

    @property
    def chunk_size(self) -> int:
        """Number of tokens whose multiples a long text must have."""
        ...


def first_tokens(text: Path | None, vocab_size: int) -> np.ndarray:
    """Return token ids (2, 128) int32 for one training step.

    They are the first 256 bytes of `text`, or, if it is None, random ids below `vocab_size`, the
    same in every call.

    Raises:
        FileNotFoundError: the text does not exist.
        ValueError: a text is given, and it is shorter than 256 bytes or the vocabulary is smaller
            than 256.
    """
    if text is None:
        return np.random.default_rng(0).integers(0, vocab_size, STEP).astype(np.int32)
    size = STEP[0] * STEP[1]
    check_text(text, vocab_size, size, "leave --text out to use random token ids.")
    content = np.frombuffer(text.read_bytes(), np.uint8)
    return content[:size].reshape(STEP).astype(np.int32)


def check_text(text: Path, vocab_size: int, least: int, otherwise: str) -> None:
    """Check that a text is long enough and that its bytes can be token ids of a model.

    Raises:
        FileNotFoundError: the text does not exist.
        ValueError: the text is shorter than `least` bytes, or the vocabulary is smaller than 256.
            The message ends with `otherwise`, which says what to do instead.
    """
    if not text.is_file():
        raise FileNotFoundError(f"no text at {text}: give an existing file.")
    if vocab_size < BYTES:
        raise ValueError(
            f"{text}: a vocabulary of {vocab_size} ids is smaller than the {BYTES} values of a "
            f"byte; {otherwise}"
        )
    if (size := text.stat().st_size) < least:
        raise ValueError(f"{text} has {size} bytes, at least {least} bytes are needed; {otherwise}")


def read_ids(
    text: Path | None, ids: Path | None, folder: Path, config: Sizes, length: int | None
) -> tuple[np.ndarray, str]:
    """Return token ids (B, L) int32 for a model, and a description of their source.

    B is 1 for a text.

    Args:
        text: A text file. It is tokenised by `tokenizer.json` in `folder` if that exists and the
            package tokenizers is installed; otherwise its bytes are the ids.
        ids: Instead of `text`, an `.npy` file of integers (B, L) or (L,).
        folder: Folder of the checkpoint.
        config: Provides the vocabulary and the chunk size.
        length: Tokens per row; None for 9/8 of a chunk (at least 5 more than a chunk), or for all
            tokens of a shorter source.

    Raises:
        FileNotFoundError: the text or the file of ids does not exist.
        ValueError: neither or both sources are given, a file is unreadable, the ids are not
            integers or out of range, the bytes of a text are to be ids of a vocabulary smaller than
            256, or there are fewer tokens than requested or than the two that a loss needs.
    """
    if (text is None) == (ids is None):
        raise ValueError("parity: give exactly one of --text FILE and --ids FILE.npy.")
    if ids is not None:
        tokens, how = _from_array(ids), f"ids of {ids}"
    else:
        assert text is not None
        tokens, how = _from_text(text, folder, config)
    source, available = ids or text, tokens.shape[1]
    C = config.chunk_size
    wanted = min(available, C + max(5, C // 8)) if length is None else length
    if wanted < 2 or available < wanted:
        raise ValueError(
            f"{source} gives {available} token(s), {max(wanted, 2)} are needed; use a longer text "
            "or a smaller --length (at least 2)."
        )
    tokens = tokens[:, :wanted]
    outside = np.argwhere((tokens < 0) | (tokens >= config.vocab_size))
    if len(outside):
        row, position = outside[0]
        raise ValueError(
            f"{source}: {len(outside)} id(s) are outside the vocabulary [0, {config.vocab_size}), "
            f"the first is {tokens[row, position]} at row {row}, position {position}; the ids are "
            "of another tokeniser, or the config of another model."
        )
    return np.ascontiguousarray(tokens, np.int32), f"{how}, {tokens.shape[0]} x {wanted} tokens"


def _from_array(path: Path) -> np.ndarray:
    if not path.is_file():
        raise FileNotFoundError(f"no ids at {path}: give an existing .npy file.")
    try:
        array = np.load(path, allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(
            f"{path} is not a readable .npy file: {error}; write it with np.save."
        ) from error
    if (
        not isinstance(array, np.ndarray)
        or array.dtype.kind not in "iu"
        or array.ndim not in (1, 2)
    ):
        what = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else "an archive"
        raise ValueError(f"{path} holds {what}, expected integers of shape (L,) or (B, L).")
    return np.atleast_2d(array).astype(np.int64)


def _from_text(path: Path, folder: Path, config: Sizes) -> tuple[np.ndarray, str]:
    if not path.is_file():
        raise FileNotFoundError(f"no text at {path}: give an existing file.")
    tokenizer, because = folder / "tokenizer.json", ""
    if tokenizer.is_file():
        try:
            from tokenizers import Tokenizer
        except ImportError:
            because = f" ({tokenizer.name} is there, but the package tokenizers is not installed)"
        else:
            try:
                read = Tokenizer.from_file(str(tokenizer))
            except Exception as error:  # the package raises bare exceptions
                raise ValueError(
                    f"{tokenizer} is not a readable tokeniser: {error}; copy it again, or pass "
                    "--ids FILE.npy."
                ) from error
            encoded = read.encode(path.read_text(encoding="utf-8", errors="replace")).ids
            return np.asarray([encoded], np.int64).reshape(1, -1), f"{path} through {tokenizer}"
    if config.vocab_size < BYTES:
        raise ValueError(
            f"{path}: a vocabulary of {config.vocab_size} ids is smaller than the {BYTES} values "
            f"of a byte, and there is no usable tokenizer.json in {folder}{because}; tokenise the "
            "text and pass --ids FILE.npy."
        )
    content = np.frombuffer(path.read_bytes(), np.uint8).astype(np.int64)
    return content[None], f"bytes of {path} as ids{because}"
