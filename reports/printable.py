"""Makes text from files safe to print in a terminal.

A name in a stored run may contain escape sequences, which a terminal would execute, or characters
that reverse the direction of text. Every command prints such text through this module.
"""

from __future__ import annotations

import unicodedata

_UNSAFE = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))
"""Unicode categories: control characters, format characters, surrogates and line separators."""


def printable(text: str, keep: str = "\n\t") -> str:
    """Return `text` with every character that a terminal would act on escaped as \\uXXXX.

    Args:
        text: Any text, with one or more lines.
        keep: Control characters to leave as they are; by default line breaks and tabs.
    """
    if text.isprintable():
        return text
    return "".join(
        f"\\u{ord(c):04x}" if c not in keep and unicodedata.category(c) in _UNSAFE else c
        for c in text
    )
