"""What the page cites exists: documents with their headings, files, and commands."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from dataclasses import replace

from reports.cli import main
from reports.nightly.document import with_tables
from reports.page.render import render
from reports.verdict.decide import decide
from reports.verdict.history import History
from stability.dtype_audit.policy import SOURCE as POLICY
from stability.nonfinite.replay import SOURCE as REPLAY
from tests.helpers import ROOT
from tests.reports.nights import bench, earlier, explained, finding, realistic, regressed
from tests.test_citations import dangling

FILE = re.compile(r"(?<![\w/.*-])((?:docs|parity|stability|reports|megalodon_jax)/[\w./-]+\.\w+)")
COMMAND = re.compile(r"megalodon-numerics ((?:[a-z]+ ?)+)")


def cited_in_vain(page: str) -> Iterator[str]:
    """Yield what a page cites and nobody can look up, in words."""
    text = html.unescape(page)
    yield from dangling(text)
    for path in FILE.findall(text):
        if not (ROOT / path).exists():
            yield f"there is no {path}"
    for code in re.findall(r"<code>([^<]*)</code>", text):
        for words in COMMAND.findall(code):
            first, *rest = words.split()
            command = main.commands.get(first)
            if command is None:
                yield f"there is no command {first}"
            elif rest and hasattr(command, "commands") and rest[0] not in command.commands:
                yield f"there is no command {first} {rest[0]}"


def page_of_everything() -> str:
    """A red night with the tables, documents and sources that real ones have."""
    night = regressed(realistic(stability={"poles": []}))
    manifest = with_tables(night.manifest, night.measurements)
    sources = (POLICY, REPLAY)
    findings = [finding(probe="survival", metric="frozen_fraction", source=s) for s in sources]
    night = replace(
        night,
        manifest=replace(manifest, fault="rope_keys_one_late"),
        findings=(*findings, *night.findings),
        explanations=(explained("slow_decay"),),
    )
    history = History(earlier(*night.measurements), benches=(bench(17), bench(18)))
    return render(night, decide(night, history.baseline), history)


def test_what_the_page_cites_is_there() -> None:
    page = page_of_everything()
    assert FILE.search(html.unescape(page)) and COMMAND.search(page)
    assert list(cited_in_vain(page)) == []


def test_what_is_cited_in_vain_is_seen() -> None:
    """Negative control: each kind of citation that leads nowhere."""
    # In pieces, since nothing in the repository may cite it.
    nowhere = "docs/" + "nowhere.md"
    page = (
        f"see {nowhere} and docs/model.md &quot;No such heading&quot;, parity/no_such.py; "
        "<code>megalodon-numerics bless latest</code> <code>megalodon-numerics parity guess</code>"
    )
    assert list(cited_in_vain(page)) == [
        f"there is no {nowhere}",
        'docs/model.md has no heading "No such heading"',
        f"there is no {nowhere}",
        "there is no parity/no_such.py",
        "there is no command bless",
        "there is no command parity guess",
    ]
