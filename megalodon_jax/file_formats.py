"""Detects, from its first bytes, the format of a file that was expected to be a checkpoint.

File names are unreliable: a download may store the server's error page, and a clone without Git LFS
stores a pointer, both under the name of the weights. Source: docs/stability.md "Which files".
"""

from __future__ import annotations

import re
from pathlib import Path

_LOOKED_AT = 1024
"""Bytes read from the start of a file."""
_AGAIN = "download the file again from its direct address, logged in if the server requires it"
_UNPACK = "unpack it and pass the file inside"
_PREFIXES = (
    (b"GGUF", "a GGUF file", "take the checkpoint that it was converted from"),
    (b"\x89HDF", "an HDF5 file", "save its weights as safetensors"),
    (b"\x93NUMPY", "a NumPy array", "save it under its name with safetensors.numpy.save_file"),
    (b"PAR1", "a Parquet file", "this is a table; pass the checkpoint instead"),
    (b"\x1f\x8b", "a gzip archive", _UNPACK),
    (b"\x28\xb5\x2f\xfd", "a Zstandard archive", _UNPACK),
    (b"\xfd7zXZ\0", "an xz archive", _UNPACK),
    (b"BZh", "a bzip2 archive", _UNPACK),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", _UNPACK),
    (b"PK\x03\x04", "a zip archive, as torch.save writes", "read it as a torch file"),
)
"""Triples: first bytes of a file, format of a file that begins with them, advice to the user."""
_LFS = b"version https://git-lfs.github.com/spec/"
_PICKLE = re.compile(rb"\x80[\x02-\x05]")
_PAGE = re.compile(rb"\s*(<!doctype html|<html|<head|<body)", re.IGNORECASE)


def format_of_file(file: Path) -> tuple[str, str]:
    """Return a file's format, judged by its first bytes, and advice; two empty texts if unknown.

    Call this for files that could not be read in the expected format. A torch file that is damaged
    further on is therefore still reported as a torch file.

    Raises:
        OSError: the file cannot be opened or read.
    """
    with file.open("rb") as opened:
        start = opened.read(_LOOKED_AT)
    if not start:
        return "empty", "nothing was saved in it, or the disk was full: copy or export it again"
    for prefix, what, advice in _PREFIXES:
        if start.startswith(prefix):
            return what, advice
    if start[257:262] == b"ustar":
        return "a tar archive", _UNPACK
    if _PICKLE.match(start):
        return "a pickle, as torch.save writes", "read it as a torch file"
    if not any(start):
        return "zeros where its header should be", (
            "its space was reserved but no data was written: copy or download it again"
        )
    return _text(start.removeprefix(b"\xef\xbb\xbf"))


def _text(start: bytes) -> tuple[str, str]:
    """Return the format of a text file, and advice; two empty texts if the file is not text."""
    if start.startswith(_LFS):
        size = re.search(rb"^size (\d{1,18})$", start, re.MULTILINE)
        real = f" of {int(size[1]):,} bytes" if size else ""
        return (
            f"a Git LFS pointer, which stands for a file{real}",
            "run `git lfs pull` in the clone that the file is from",
        )
    if _PAGE.match(start):
        return "a web page, which a server sent in place of the file", _AGAIN
    # A safetensors header starts with its length: eight bytes, some of them 0. A file of eight
    # bytes or fewer may be the start of any format.
    if len(start) <= 8 or any(byte < 32 and byte not in b"\t\n\r\f" for byte in start):
        return "", ""
    text = start.decode("utf-8", "replace").strip()
    if text.startswith("<?xml"):
        return "an XML document, such as a storage service sends in place of a file", _AGAIN
    if text.startswith("{") and '"weight_map"' in text:
        return "the index of shards", "rename it to end in .index.json, beside its shards"
    if text.startswith("{"):
        return "a JSON document, such as a server sends in place of a file", _AGAIN
    shown = re.sub(r"\s+", " ", "".join(c if c.isprintable() else " " for c in text))[:40]
    return f"a text that begins {shown!r}", _AGAIN
