"""Glossary words on the page: the first use of each is a button that opens its definition.

The button opens an HTML popover, which works with mouse, touch and keyboard and without a script;
Escape closes it. The definition is also a tooltip.

`glossary.md` is a copy of docs/glossary.md that is installed with the page; a test keeps them
equal. Source: docs/reports.md "The page".
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from jinja2.ext import Extension
from markupsafe import Markup, escape

ORDINARY = {"kind", "drift", "healthy"}
"""Glossary words that the page also uses in their everyday meaning, so they get no button."""
IDIOMS = ("side by side",)
"""Phrases in which a glossary word ("side") has its everyday meaning; they get no button."""
_SKIPPED = "a|button|code|label|noscript|script|select|style|summary|template|title"
_BUTTON = re.compile(
    r'<button type="button" class="word" popovertarget="([^"]+)"[^>]*>(.*?)</button>'
)
_PIECES = re.compile(r"(\{#.*?#\}|\{%.*?%\}|\{\{.*?\}\}|<(?:\{\{.*?\}\}|\{%.*?%\}|[^>])*>)", re.S)


@cache
def glossary() -> dict[str, str]:
    """Return the definition of each word of the glossary as plain text, by word."""
    text = (Path(__file__).parent / "glossary.md").read_text(encoding="utf-8")
    entries = re.findall(r"^- \*\*(.+?)\*\*(?:, \w+)?: (.*?)(?=^- |\Z)", text, re.M | re.S)
    # Links to documents do not work from the page; the remaining markup is emphasis.
    markup = re.compile(r"\s*\(\[[^]]*\]\([^)]*\)\)|[*`]")
    return {word: " ".join(markup.sub("", sentence).split()) for word, sentence in entries}


def explain(text: str) -> Markup:
    """Return `text` as markup: a button if it is exactly a glossary word, else escaped."""
    return _word(text, text) if text in glossary() else escape(text)


def anchor(word: str) -> str:
    """Return the HTML id of the popover that defines a word."""
    return f"w-{re.sub(r'[^A-Za-z0-9]+', '-', word)}"


def _word(word: str, text: str) -> Markup:
    """Return `text` as a button that opens the definition of `word`."""
    markup = '<button type="button" class="word" popovertarget="{}" title="{}">{}</button>'
    return Markup(markup).format(anchor(word), glossary()[word], text)


def once(page: str) -> str:
    """Return `page` with only the first button of each word kept; later ones become text.

    Each button is a tab stop, and some tables would have one in every row.
    """
    unused = set(map(anchor, glossary()))

    def first(match: re.Match[str]) -> str:
        if match[1] not in unused:
            return match[2]
        unused.discard(match[1])
        return match[0]

    return _BUTTON.sub(first, page)


class Words(Extension):
    """Jinja extension that turns glossary words in a template's own text into buttons.

    Inserted data is never changed. In each section or macro only the first use of a word becomes a
    button, separately in each branch of a condition.
    """

    def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:
        """Return the template source with buttons for its glossary words."""
        words = glossary().keys() - ORDINARY
        # A verdict in capitals matches only as written; other words may be capitalised or plural.
        forms = {word if word.isupper() else f"{word[0].upper()}{word[1:]}": word for word in words}
        forms |= {word: word for word in words}
        longest_first = "|".join(sorted(map(re.escape, forms), key=len, reverse=True))
        # A phrase is matched as a whole before a word in it can be.
        idioms = "|".join(f"[{i[0]}{i[0].upper()}]{re.escape(i[1:])}" for i in IDIOMS)
        pattern = re.compile(rf"(?<![\w-])(?:{idioms}|({longest_first})s?)(?![\w-])([:;,.)]?)")
        unused, skipped, out = set(words), "", []
        outside: list[set[str]] = []

        def explained(match: re.Match[str]) -> str:
            word = forms[match[1]] if match[1] else ""
            if word not in unused:
                return match[0]
            unused.discard(word)
            button = _word(word, match[0].removesuffix(match[2]))
            if not match[2]:
                return button
            # Keep closing punctuation on the same line as the button.
            return Markup('<span class="nowrap">{}{}</span>').format(button, match[2])

        for piece in _PIECES.split(source):
            if opened := re.match(rf'<({_SKIPPED})\b|<(\w+)[^>]*class="sr"', piece):
                skipped = skipped or opened[1] or opened[2]
            elif piece == f"</{skipped}>":
                skipped = ""
            elif piece.startswith("<section") or "macro" in piece[:9]:
                unused = set(words)
            elif block := re.match(r"\{%-? *(end|el)?(?:if|for|se)\b", piece):
                # A word explained in one branch is not explained in another.
                unused = set(outside.pop() if block[1] else unused)
                outside += [] if block[1] == "end" else [set(unused)]
            elif not skipped and not piece.startswith(("<", "{")):
                piece = pattern.sub(explained, piece)
            out.append(piece)
        return "".join(out)
