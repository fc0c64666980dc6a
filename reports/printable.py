"""Text that came from a file, made safe for a terminal.

A name in a stored run may hold escape sequences, which a terminal obeys, or characters that turn
the direction of a line. Every command prints such text through here.
"""

from __future__ import annotations

import unicodedata

_UNSAFE = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))
"""Categories of control characters, changes of direction, halves of pairs and line separators."""


def printable(text: str, keep: str = "\n\t") -> str:
    """Return a text with every character that a terminal would act on written as an escape.

    Args:
        text: any text, of one line or many.
        keep: characters that stay as they are.
    """
    if text.isprintable():
        return text
    return "".join(
        f"\\u{ord(c):04x}" if c not in keep and unicodedata.category(c) in _UNSAFE else c
        for c in text
    )
