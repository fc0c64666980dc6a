"""The seal of run.json: a checksum of what the document says, which the document itself holds.

run.json has the checksum of every other file of a run. Its own is over its content as canonical
JSON without the seal, so a copy with other white space stays valid and an edited value does not.
Source: docs/reports.md "Store".
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reports.store.schema import MANIFEST, SCHEMA, StoreError

SEAL = "seal"
"""Key of run.json."""
FIRST_SEALED = 5
"""The first schema whose run.json has a seal."""


def sealed(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a document of run.json with the seal of its content."""
    content = {name: value for name, value in document.items() if name != SEAL}
    return {**content, SEAL: _digest(content)}


def text_of(document: Mapping[str, Any]) -> str:
    """Return the text of a run.json: the document, sealed."""
    return json.dumps(sealed(document), indent=2, ensure_ascii=False) + "\n"


def is_sealed(document: Mapping[str, Any]) -> bool:
    """Return whether a document has the seal of its content."""
    return document.get(SEAL) == _digest(document)


def check_seal(document: Mapping[str, Any], path: Path) -> None:
    """Check that a document of run.json is what was stored; older schemas have no seal.

    Raises:
        StoreError: it has no seal, or its content has another one.
    """
    schema = document.get("schema")
    newer = [name for name in ("seal", "files", "contract") if name in document]
    if isinstance(schema, int) and schema < FIRST_SEALED and newer:
        raise StoreError(
            f"expected {path} as it was stored, but it says schema {schema} and has "
            f"{', '.join(newer)}, which schema {FIRST_SEALED} brought: it was edited. Restore the "
            "folder or delete it"
        )
    # What is no schema of this version is refused by `migrate`, which says why.
    if not isinstance(schema, int) or not FIRST_SEALED <= schema <= SCHEMA:
        return
    if not is_sealed(document):
        raise StoreError(
            f"expected {path} as it was stored, but its content does not fit its seal: it was "
            f"edited or damaged. Restore the folder or delete it; a value in {MANIFEST} is never "
            "changed by hand"
        )


def _digest(document: Mapping[str, Any]) -> str:
    content = {name: value for name, value in document.items() if name != SEAL}
    # Names sorted and no white space: equal content gives equal bytes.
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
