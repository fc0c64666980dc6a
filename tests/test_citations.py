"""What code and documents cite is in the repository: documents, headings, links and anchors."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.helpers import ROOT

DOCS = ROOT / "docs"
SUFFIXES = (".py", ".md", ".toml", ".yml", ".html", ".j2", ".js")
MENTION = re.compile(r"\bdocs/((?:tables/)?[a-z][a-z0-9-]*)\.md\b")
HEADING = re.compile(r' \\?"([^"\\]+)\\?"')
"""What follows a document in a citation; TOML writes quotation marks with a backslash."""
LOOSE = re.compile(r'(?:,|\'s|:) \\?"[A-Z]')
"""A heading that is cited in another way than the one that is read here."""
OUTSIDE = re.compile(r"\b(?:spec|shared)/[\w.*-]+|\bshared design\b", re.IGNORECASE)
"""Documents that may lie beside a checkout, and are in no clone."""
CONTINUED = re.compile(r"[ \t]*\n[ \t]*(?:#+ )?(?=\S)")
"""A citation may go on in the next line, of a docstring, a comment or a paragraph."""
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def tracked() -> list[Path]:
    """Text files of the project that may cite something; this one cites wrongly on purpose."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z"]
    names = subprocess.run(command, capture_output=True, check=True).stdout.decode().split("\0")
    files = [ROOT / n for n in names if n.endswith(SUFFIXES)]
    return [file for file in files if file.is_file() and file != Path(__file__)]


def without_code(markdown: str) -> str:
    """A document without its blocks of code, where `#` starts a comment."""
    return re.sub(r"^(```+).*?^\1", "", markdown, flags=re.S | re.M)


@cache
def headings(document: Path) -> tuple[str, ...]:
    text = without_code(document.read_text(encoding="utf-8"))
    return tuple(re.findall(r"^#{1,6} +(.+?) *$", text, flags=re.M))


@cache
def anchors(document: Path) -> frozenset[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    found: list[str] = []
    for heading in headings(document):
        plain = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found.append(f"{plain}-{found.count(plain)}" if plain in found else plain)
    return frozenset(found)


def dangling(text: str, docs: Path = DOCS) -> Iterator[str]:
    """What a text cites and nobody can look up, in words."""
    text = CONTINUED.sub(" ", text)
    for found in OUTSIDE.finditer(text):
        yield f"{found.group()} is not in the repository"
    for found in MENTION.finditer(text):
        document, after = docs / f"{found.group(1)}.md", text[found.end() :]
        if not document.is_file():
            yield f"there is no {found.group()}"
        elif LOOSE.match(after):
            yield f'{found.group()}{after[:24]}: write docs/NAME.md "Heading"'
        elif (cited := HEADING.match(after)) and cited.group(1) not in headings(document):
            yield f'{found.group()} has no heading "{cited.group(1)}"'


def broken_links(document: Path) -> Iterator[str]:
    """Relative links of a document that lead nowhere, anchors included."""
    text = without_code(document.read_text(encoding="utf-8"))
    for target in LINK.findall(re.sub(r"`[^`\n]+`", "", text)):
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (document.parent / path).resolve() if path else document
        if not there.exists():
            yield f"{target}: there is no {path}"
        elif anchor and (there.suffix != ".md" or anchor not in anchors(there)):
            yield f"{target}: {there.name} has no such heading"


def test_no_citation_dangles() -> None:
    files = tracked()
    assert sum('docs/model.md "' in f.read_text(encoding="utf-8") for f in files) > 10
    found = [
        f"{file.relative_to(ROOT)}: {what}"
        for file in files
        for what in dangling(file.read_text(encoding="utf-8"))
    ]
    assert not found


def test_every_link_of_the_documents_resolves() -> None:
    documents = [*sorted(DOCS.rglob("*.md")), *sorted(ROOT.glob("*.md"))]
    found = [
        f"{document.name}: {what}" for document in documents for what in broken_links(document)
    ]
    assert not found


def reached(start: Path) -> set[Path]:
    """Return the documents that a reader of `start` reaches by links."""
    seen, waiting = {start}, [start]
    while waiting:
        document = waiting.pop()
        text = without_code(document.read_text(encoding="utf-8"))
        for target in LINK.findall(re.sub(r"`[^`\n]+`", "", text)):
            there = (document.parent / target.partition("#")[0]).resolve()
            if there.suffix == ".md" and there.is_file() and there not in seen:
                seen.add(there)
                waiting.append(there)
    return seen


def test_every_document_is_reached_from_the_readme() -> None:
    documents = {*DOCS.glob("*.md"), *DOCS.glob("tables/*.md")}
    assert documents <= reached(ROOT / "README.md")


def test_a_document_without_a_link_is_not_reached(tmp_path: Path) -> None:
    for name, text in {"a": "[b](b.md#b)", "b": "[a](a.md) `[c](c.md)`", "c": "[a](a.md)"}.items():
        (tmp_path / f"{name}.md").write_text(text, encoding="utf-8")
    assert {document.stem for document in reached(tmp_path / "a.md")} == {"a", "b"}


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ('Source: docs/model.md "Loss".', False),
        ('Source: docs/model.md\n    "State dict".', False),
        ('# docs/model.md "State\n# dict" has it', False),
        ('reason = "... (docs/model.md \\"RoPE\\")"', False),
        ("prints the table of docs/verdicts.md.", False),
        ('writes into docs/guide.md\n\n"he" is another matter', False),
        ('`docs/NAME.md "Heading"`', False),
        ('Source: docs/model.md "Lossless".', True),
        ('Source: docs/model.md\n    "State of things".', True),
        ('reason = "... (docs/model.md \\"RoPES\\")"', True),
        ("prints the table of docs/no-such-page.md.", True),
        ("writes docs/tables/detection.md.", False),
        ("writes docs/tables/no-such-table.md.", True),
        ('See docs/verdicts.md, "Another machine".', True),
        ('Source: spec/model.md "Loss".', True),
        ("Source: spec/api.md.", True),
        ("no ../shared/sources beside this checkout", True),
        ('the shared\ndesign "Layers"', True),
        ("a mesh axis of the inspec/tion", False),
    ],
)
def test_a_citation_that_leads_nowhere_is_seen(text: str, seen: bool) -> None:
    assert bool(list(dangling(text))) is seen


def test_a_link_that_leads_nowhere_is_seen(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# There\n\n## What is *it*?\n\n## It\n\n## It\n", "utf-8")
    document = tmp_path / "here.md"
    document.write_text(
        "[a](there.md) [b](there.md#what-is-it) [c](#here) [d](https://example.org/x) "
        "[e](there.md#it-1) `table[f](nowhere)`\n# Here\n```\n# Not a heading [f](nowhere)\n```\n"
        "[g](nowhere.md) [h](there.md#not-here) [i](#not-a-heading)\n",
        encoding="utf-8",
    )
    assert [what.partition(":")[0] for what in broken_links(document)] == [
        "nowhere.md",
        "there.md#not-here",
        "#not-a-heading",
    ]
