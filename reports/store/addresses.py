"""Addresses of shared storage such as `s3://bucket/runs`, and the paths of their local copies."""

from __future__ import annotations

import hashlib
import os
import re
from contextlib import suppress
from pathlib import Path

from reports.store.schema import StoreError

ADDRESS = ".shared"
"""File in a local copy that holds the address of the copied storage."""
_LONGEST = 4096
_PROTOCOLS = ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "file", "local", "memory")
_LOCAL = ("file", "local")


def is_address(text: str) -> bool:
    """Return whether a text names shared storage rather than a folder of this machine."""
    return "://" in text


def check_address(text: str) -> None:
    """Check that a text is a local path or a complete address of shared storage.

    Raises:
        StoreError: the text is a malformed address.
    """
    wrong = _typing_error(text)
    if wrong:
        raise StoreError(
            f"expected a folder, or an address such as s3://bucket/runs or file:///mnt/runs, "
            f"received {text!r}: {wrong}. Correct it, or put ./ before it if it is a folder"
        )


def _typing_error(text: str) -> str:
    protocol, colon, rest = text.partition(":")
    if not colon:
        return ""
    if not is_address(text):
        meant = protocol.lower() in _PROTOCOLS or (
            len(protocol) > 1 and protocol.isalnum() and rest.startswith("/")
        )
        return f"'{protocol}:' is not followed by two slashes" if meant else ""
    if not rest.startswith("//"):
        return "'://' does not come first"
    if not re.fullmatch(r"[a-z][a-z0-9+.-]*", protocol):
        return f"{protocol!r} is not the name of a protocol in lower case"
    # A space before the protocol is part of its name.
    if not text.isprintable() or text != text.rstrip():
        return "it ends with a space, or has characters that cannot be printed"
    path = rest[2:].rstrip("/")
    if not path:
        return f"nothing comes after '{protocol}://'"
    if protocol in _LOCAL:
        if not path.startswith("/"):
            return f"the path after '{protocol}://' does not start with a slash"
        path = path[1:]
    if any(part in ("", ".", "..") for part in path.split("/")):
        return "a part of the path is empty, '.' or '..'"
    return ""


def copy_of(address: str) -> Path:
    """Return the path for the local copy of a folder on shared storage, existing or not."""
    address = address.rstrip("/")
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    digest = hashlib.sha256(address.encode()).hexdigest()[:12]
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", address)[-60:].lstrip(".-")
    return caches / "megalodon-numerics" / "runs" / f"{name}-{digest}"


def address_of(root: Path) -> str:
    """Return the address of the storage that `root` is a copy of, or `root` itself.

    A folder with a damaged address file does not count as a copy; `open_copy` repairs the file.
    """
    file = root / ADDRESS
    # Opening a named pipe would block until a writer comes.
    with suppress(OSError, UnicodeDecodeError):
        if file.is_file() and file.stat().st_size <= _LONGEST:
            address = file.read_text(encoding="utf-8")
            if is_address(address) and not _typing_error(address):
                return address
    return str(root)
