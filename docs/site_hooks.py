"""What the site needs beside MkDocs: the documents of the root as pages, and links that fit.

README, ARCHITECTURE, CONTRIBUTING and CHANGELOG are pages too, although they lie outside of
`docs/`. Links are written for a reader of the repository: here those between documents lead to
pages, and those to anything else become plain text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""Documents of the root, and the pages they become."""
_ORIGIN = {page: name for name, page in PAGES.items()}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
_CODE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add the documents of the root."""
    for name, page in PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn the links of a document into those of its page, except in code."""
    source = page.file.src_uri
    parts = _CODE.split(markdown)
    parts[::2] = [_LINK.sub(lambda link: _moved(link, source), part) for part in parts[::2]]
    return "".join(parts)


def _moved(link: re.Match[str], source: str) -> str:
    picture, text, target = link.groups()
    path, hash_, anchor = target.partition("#")
    if not path or re.match(r"[a-z][a-z0-9+.-]*:", target):
        return link.group()
    here = _ORIGIN.get(source, f"docs/{source}")
    there = posixpath.normpath(posixpath.join(posixpath.dirname(here), path))
    if there in PAGES:
        page = PAGES[there]
    elif there.startswith("docs/"):
        page = there.removeprefix("docs/")
    else:
        return text
    relative = posixpath.relpath(page, posixpath.dirname(source) or ".")
    return f"{picture}[{text}]({relative}{hash_}{anchor})"
