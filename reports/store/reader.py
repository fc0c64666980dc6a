"""Reads all files in or beside a folder of runs, and the pinned baselines.

Such a file may be damaged, huge, a named pipe or a loop of links. A reader that hangs, fills the
memory or raises an unexpected error would break every command. Therefore everything is read here:
regular files only, with limits on size, nesting and rows, and `StoreError` for any problem.
Source: docs/reports.md "Store".
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from megalodon_jax.files import JSON_BYTES, parse_json_object, read_limited
from reports.store.schema import StoreError

PARQUET_BYTES = 256 * 2**20
"""Largest Parquet file, in bytes, that is read; a whole night has 2 MB."""
ROWS = 2_000_000
"""Largest number of rows per file; a whole night has 60,000."""
VALUES = 8 * ROWS
"""Largest number of values per column; a list column has many values per row."""
UNPACKED_BYTES = 2**30
"""Largest size in bytes of a file's values in memory; those of a whole night occupy 30 MB."""
_REMEDY = "restore the folder or delete it"


def read_bytes(path: Path, limit: int = JSON_BYTES) -> bytes:
    """Read a regular file of at most `limit` bytes; raises StoreError otherwise."""
    try:
        return read_limited(path, limit)
    except OSError as error:
        reason = error.strerror or str(error)
        raise StoreError(
            f"expected a readable file at {path}, but: {reason}; it is missing or damaged: "
            f"{_REMEDY}"
        ) from error
    except ValueError as error:
        raise StoreError(f"{error}: {_REMEDY}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that must hold an object; raises StoreError otherwise."""
    return parse_json(read_bytes(path), path)


def parse_json(content: bytes, path: Path) -> dict[str, Any]:
    """Parse a JSON file that must hold an object; raises StoreError otherwise."""
    try:
        return parse_json_object(content, path)
    except ValueError as error:
        raise StoreError(f"{error}; it is damaged: {_REMEDY}") from error


def read_checked(path: Path, checksums: Mapping[str, str] | None) -> bytes:
    """Read a file of a run and verify its checksum.

    Args:
        path: Path of the file.
        checksums: Checksums of the run's files by name; None for a run without checksums, whose
            files are not verified.

    Raises:
        StoreError: the file is missing or its checksum does not match.
    """
    content = read_bytes(path, PARQUET_BYTES)
    if checksums is None:
        return content
    if (expected := checksums.get(path.name)) is None:
        raise StoreError(
            f"expected a checksum of {path} in run.json, and there is none: the file was not "
            f"stored with the run or run.json was edited: {_REMEDY}"
        )
    if checksum(content) != expected:
        raise StoreError(
            f"{path} is not the file that was stored: its SHA-256 differs from the one in "
            f"run.json; it is damaged, truncated or was edited: {_REMEDY}"
        )
    return content


def checksum(content: bytes) -> str:
    """Return the SHA-256 of the bytes of a file, in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def read_table(content: bytes, path: Path, schema: pa.Schema, absent: frozenset[str]) -> pa.Table:
    """Return the columns of a Parquet file, within limits and with the types of a schema.

    Args:
        content: Bytes of the file.
        path: Path of the file, for messages.
        schema: Names and types of the columns to read, in this order.
        absent: Columns that the file may lack, because they were added after it was written.

    Raises:
        StoreError: the content is not a Parquet file, lacks a column, has a column of another type,
            or would exceed the limits in memory.
    """
    try:
        source = pa.BufferReader(content)
        names = [name for name in schema.names if name not in absent]
        # As dictionaries, repeated strings take memory only once.
        texts = [name for name in names if schema.field(name).type == pa.string()]
        with _opened(source, texts) as file:
            _check_size(file.metadata, path)
            if problem := _problem_of_columns(file.schema_arrow, schema, tuple(names)):
                raise StoreError(problem.format(path=path, remedy=_REMEDY))
            table = file.read(columns=names, use_threads=False).select(names)
        # Reading does not check that strings are valid UTF-8.
        table.validate(full=True)
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise StoreError(
            f"expected a complete Parquet file at {path}, but reading it gave: {error}; it is "
            f"missing or truncated: {_REMEDY}"
        ) from error
    _check_texts(table, path)
    return table


def _opened(source: pa.BufferReader, texts: list[str]) -> pq.ParquetFile:
    """Open a Parquet file; its string columns `texts` are read as dictionaries.

    If it lacks one of these columns, all are read as plain strings.
    """
    try:
        return pq.ParquetFile(source, read_dictionary=texts)
    except KeyError:
        # A column is missing or there twice; `_problem_of_columns` reports it by name.
        return pq.ParquetFile(source)


def _check_size(metadata: Any, path: Path) -> None:
    """Raise StoreError if a file exceeds `ROWS`, `VALUES` or `UNPACKED_BYTES` by its metadata."""
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    unpacked = sum(group.total_byte_size for group in groups)
    columns = range(metadata.num_columns)
    values = max((sum(g.column(i).num_values for g in groups) for i in columns), default=0)
    if metadata.num_rows > ROWS or values > VALUES or unpacked > UNPACKED_BYTES:
        raise StoreError(
            f"{path} would unpack to {metadata.num_rows:,} rows, {values:,} values of a column and "
            f"{unpacked:,} bytes, more than the {ROWS:,} rows, {VALUES:,} values and "
            f"{UNPACKED_BYTES:,} bytes that are read: {_REMEDY}"
        )


@lru_cache(maxsize=64)
def _problem_of_columns(found: pa.Schema, schema: pa.Schema, names: tuple[str, ...]) -> str:
    """Return what is wrong with the columns `names` of a file; "" if nothing is.

    The text has fields {path} and {remedy} to fill in, so that it can be cached: nearly all runs
    have the same columns.
    """
    if doubled := sorted({name for name in names if found.names.count(name) > 1}):
        return (
            f"expected each column once in {{path}}, which has {', '.join(doubled)} more often; "
            "the file was not written by this tool: {remedy}"
        )
    missing = sorted(set(names) - set(found.names))
    if missing:
        return (
            f"expected the columns {', '.join(missing)} in {{path}}, which has no such columns; "
            "the file was not written by this tool: {remedy}"
        )
    for name in names:
        kind = found.field(name).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        # Only the outer type of a nested column is checked: its elements are converted one by one.
        nested = pa.types.is_nested(schema.field(name).type) and pa.types.is_nested(kind)
        if kind != schema.field(name).type and not nested:
            received = str(kind).replace("{", "{{").replace("}", "}}")
            return (
                f"expected the column {name} of {{path}} to be of type {schema.field(name).type}, "
                f"received {received}; the file was not written by this tool: {{remedy}}"
            )
    return ""


def _check_texts(table: pa.Table, path: Path) -> None:
    """Raise StoreError if strings would exceed the memory limit once dictionaries are expanded."""
    total = 0
    for column in table.columns:
        for chunk in column.chunks if pa.types.is_dictionary(column.type) else ():
            # Cheap upper bound: every row counts with all strings of the dictionary.
            if (most := chunk.dictionary.nbytes * len(chunk)) <= UNPACKED_BYTES // 64:
                total += most
                continue
            lengths = pc.binary_length(chunk.dictionary)  # pyright: ignore[reportAttributeAccessIssue]
            used = lengths.take(chunk.indices).drop_null().to_numpy(False)
            total += int(used.sum(dtype="int64"))
    if total > UNPACKED_BYTES:
        raise StoreError(
            f"{path} would unpack to {total:,} bytes of text, more than the {UNPACKED_BYTES:,} "
            f"that are read: {_REMEDY}"
        )
