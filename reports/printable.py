"""Makes text from files safe to print in a terminal.

A name in a stored run may contain escape sequences, which a terminal would execute, or characters
that change the direction of a line. Every command prints such text through this module.
"""

from __future__ import annotations

import unicodedata

_UNSAFE = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))
"""Unicode categories: control characters, format characters, surrogates and line separators."""


def printable(text: str, keep: str = "\n\t") -> str:
    """Return a text in which every character that a terminal would act on is escaped.

    Args:
        text: Any text, with one or more lines.
        keep: Characters that are not escaped.
    """
    if text.isprintable():
        return text
    return "".join(
        f"\\u{ord(c):04x}" if c not in keep and unicodedata.category(c) in _UNSAFE else c
        for c in text
    )
