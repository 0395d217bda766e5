"""ETags of rows: strong tags computed from the row's values alone, and therefore the same after a restart."""

from __future__ import annotations

import base64
import hashlib
import re

from headwater.errors import Conflict, InvalidRequest
from headwater.model.row_msgpack import encode_row
from headwater.model.table import Row, Table

_TAG = re.compile(r'(?:W/)?"([^"]*)"\Z')


def row_etag(db: str, table: Table, row: Row) -> str:
    """Return the quoted tag of `row`: a hash of database, table, and the visible columns' names and values."""
    names = tuple(column.name for column in table.visible)
    values = tuple(row[table.index[name]] for name in names)
    content = encode_row((db, table.name, *names)) + encode_row(values)
    digest = hashlib.blake2b(content, digest_size=18).digest()
    return f'"row:{base64.urlsafe_b64encode(digest).decode()}"'


def opaque(tag: str) -> str:
    """Return the content of a tag given bare, quoted, or weak (the RPC fields accept all three)."""
    match = _TAG.match(tag)
    return match.group(1) if match else tag


def one_tag(if_match: str | None, expected_etag: str | None) -> str | None:
    """Return the expected tag of a request, which has two names for it; InvalidRequest if they differ."""
    if if_match is not None and expected_etag is not None and opaque(if_match) != opaque(expected_etag):
        raise InvalidRequest(
            "`if_match` and `expected_etag` have different tags", hint="Send one of them: they mean the same."
        )
    return if_match if if_match is not None else expected_etag


def demand(expected: str, db: str, table: Table, rows: list[Row]) -> None:
    """Raise Conflict unless `rows` is exactly one row and `expected` is its tag."""
    if len(rows) != 1:
        found = "no row" if not rows else "more than one row"
        raise Conflict(
            f"the etag is that of one row of {table.name!r}, but `where` matches {found}",
            hint="Select exactly one row, by its key.",
        )
    if opaque(row_etag(db, table, rows[0])) != opaque(expected):
        raise Conflict(f"the row of {table.name!r} has changed since its etag was read", hint="Read the row again.")
