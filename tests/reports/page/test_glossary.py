"""Words of the glossary on the page: each is explained where it stands."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from jinja2 import Environment

from reports.page.glossary import ORDINARY, Words, glossary
from reports.page.render import render
from reports.verdict.decide import decide
from reports.verdict.history import History
from tests.reports.nights import realistic, regressed

PAGE = Path(__file__).parents[3] / "reports" / "page"
DOCUMENT = Path(__file__).parents[3] / "docs" / "glossary.md"


class Explained(HTMLParser):
    """Collects what the page explains, and the text of its column heads and leading sentences."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.titles: dict[str, set[str]] = {}
        self.text: list[str] = []
        self._open: list[tuple[str, bool]] = []
        self._title = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag in ("th", "p", "h2"):
            shown = values.get("scope") == "col" or values.get("class") == "lead" or tag == "h2"
            self._open.append((tag, shown))
        self._title = (values.get("title") or "") if values.get("class") == "word" else self._title

    def handle_endtag(self, tag: str) -> None:
        if self._open and self._open[-1][0] == tag:
            self._open.pop()
        self._title = "" if tag == "button" else self._title

    def handle_data(self, data: str) -> None:
        if self._title:
            self.titles.setdefault(self._title, set()).add(data)
        if self._open and self._open[-1][1]:
            self.text.append(data)


def explained(source: str) -> str:
    """Return the words that a template explains, in order."""
    text = Words(Environment()).preprocess(source, None)
    return " ".join(re.findall(r'<button [^>]+ title="[^"]+">([^<]+)</button>', text))


def test_the_page_carries_the_document_itself() -> None:
    copy = (PAGE / "glossary.md").read_text(encoding="utf-8")
    assert copy == DOCUMENT.read_text(encoding="utf-8"), "copy docs/glossary.md to reports/page"


def test_every_entry_is_read_as_plain_text() -> None:
    words = glossary()
    assert len(words) == DOCUMENT.read_text(encoding="utf-8").count("\n- **")
    assert words["gate"].endswith("on which the verdict depends; others only inform.")
    assert words["anchor"].endswith("may not drift from it.")
    assert not any(re.search(r"[*`\]]|\.md", sentence) for sentence in words.values())


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("<p>Gates of an edge; a gate</p>", "Gates edge gate"),
        ("<section><p>edge</p></section><section><p>edge</p>", "edge edge"),
        ("<p>edge {% if a %}gate, edge{% else %}gates{% endif %} gate</p>", "edge gate gates gate"),
        ('<a href="#edge">edge</a> {{ edge }} {# edge #} <code>edge</code>', ""),
        ('<p class="sr">edge</p><caption title="{{ "<edge>" }}">byte-level</caption>', ""),
        ("<p>PASS pass passes CEMA cema noise floors</p>", "PASS CEMA noise floors"),
        ("<p>Two runs side by side. Side by side</p>", ""),
        ("<p>Side by side: another side</p>", "side"),
        ("{% macro a(n) %}<p>edge</p>{% endmacro %}{% macro b(n) %}<p>edge</p>", "edge edge"),
    ],
)
def test_the_first_use_on_each_way_through_a_template_is_explained(source, words) -> None:
    # A word and its plural are one entry.
    expected = words.replace("Gates edge gate", "Gates edge").split()
    assert explained(source).split() == expected


def test_every_word_opens_a_sentence_that_is_there_once() -> None:
    page = render(regressed(realistic()), decide(regressed(realistic()), None), History())
    buttons = re.findall(r'popovertarget="([^"]+)"', page)
    opened = set(buttons)
    assert len(buttons) == len(opened), "a word is one stop of the Tab key"
    there = re.findall(r'<div popover class="meaning" id="([^"]+)">', page)
    assert opened <= set(there)
    assert len(opened) > 10
    assert len(set(there)) == len(there) == len(glossary())


def test_what_the_page_says_it_explains() -> None:
    night = realistic()
    decision = decide(regressed(night), night)
    page = Explained(render(regressed(night), decision, History(baseline=night)))
    text = " ".join(page.text)
    for word, sentence in glossary().items():
        pattern = word if word.isupper() else rf"[{word[0]}{word[0].upper()}]{word[1:]}"
        if word not in ORDINARY and re.search(rf"(?<![\w-]){pattern}s?(?![\w-])", text):
            assert sentence in page.titles, word
    assert page.titles[glossary()["REGRESSED"]] == {"REGRESSED"}
