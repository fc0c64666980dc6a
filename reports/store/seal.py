"""The seal of run.json: a checksum of the document's content, stored in the document itself.

run.json holds the checksums of all other files of a run. Its seal is computed over its content as
canonical JSON without the seal, so changed white space stays valid and an edited value does not.
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
"""Key of the seal in run.json."""
FIRST_SEALED = 5
"""First schema whose run.json has a seal."""


def sealed(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of run.json with its seal (checksum), which replaces any earlier one."""
    return {**document, SEAL: _digest(document)}


def text_of(document: Mapping[str, Any]) -> str:
    """Return the text to write as run.json: the document with its seal (checksum), indented."""
    text = json.dumps(sealed(document), indent=2, ensure_ascii=False)
    # The name of a file that is no UTF-8 has lone surrogates, which JSON escapes as Python does.
    return text.encode("utf-8", "backslashreplace").decode("utf-8") + "\n"


def is_sealed(document: Mapping[str, Any]) -> bool:
    """Return whether the seal (checksum) in a document matches the rest of its content."""
    return document.get(SEAL) == _digest(document)


def check_seal(document: Mapping[str, Any], path: Path) -> None:
    """Check by its seal (checksum) that run.json was not changed since it was stored.

    run.json of older schemas has no seal, and is not checked.

    Raises:
        StoreError: the seal is missing or does not match the content.
    """
    schema = document.get("schema")
    newer = [name for name in ("seal", "files", "contract") if name in document]
    if isinstance(schema, int) and schema < FIRST_SEALED and newer:
        raise StoreError(
            f"expected {path} as it was stored, but it says schema {schema} and has "
            f"{', '.join(newer)}, which only schema {FIRST_SEALED} and later have: it was edited. "
            "Restore the folder or delete it"
        )
    # `migrate` rejects an invalid or newer schema and says why.
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
    # Canonical JSON: sorted names, no white space.
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
