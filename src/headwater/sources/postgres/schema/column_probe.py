"""Values as a column would store them, and collations that treat different texts as equal, both by PostgreSQL."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress

from headwater.errors import HeadwaterError, InvalidRequest, NotSupported
from headwater.model.bounded_cache import BoundedCache
from headwater.model.literal import Value
from headwater.model.table import Column, Key, Table
from headwater.sources.postgres.protocol_session import Link, Pool
from headwater.sources.postgres.values import to_bound
from headwater.sources.request_checks import column_of

MAX_KNOWN = 10_000  # cached values
MAX_KEPT = 1 << 10  # bytes of a cached value, both as given and as stored, at most
_TYPE = "SELECT format_type(oid, -1), typname FROM pg_type WHERE oid = to_regtype($1)"
_ODD = "SELECT DISTINCT collname FROM pg_collation WHERE NOT collisdeterministic"
_CUT = frozenset({"varchar", "bpchar", "bit", "varbit"})  # an explicit cast truncates these; an INSERT refuses


class Columns:
    """Cached answers of PostgreSQL about columns. Thread-safe."""

    def __init__(self, pool: Pool, *, seconds: float = 30.0) -> None:
        self._pool, self._seconds = pool, seconds
        self._lock = threading.Lock()  # guards _types and _collations
        self._types: dict[str, tuple[str, str]] = {}
        self._held: BoundedCache[tuple[str, bytes], tuple[Value]] = BoundedCache(MAX_KNOWN, MAX_KNOWN)
        self._collations: frozenset[str] | None = None

    def odd(self) -> frozenset[str]:
        """Return the collations in which different texts may be equal, cached by `renew`: the event loop calls this."""
        found = self._collations
        if found is None:
            found = self._collations = self._read_odd()
        return found

    def renew(self) -> None:
        """Discard the cached answers and read the collations: the schema or the database changed."""
        found = None
        with suppress(HeadwaterError):  # the next caller of `odd` gets the error
            found = self._read_odd()
        with self._lock:
            self._types.clear()
            self._collations = found
        self._held.clear()

    def _read_odd(self) -> frozenset[str]:
        texts = self._pool.read(lambda link: link.run(_ODD).texts())
        return frozenset(str(name) for (name,) in texts)

    def stored(self, table: Table, columns: Sequence[str], values: Key) -> Key:
        """Return `values` as read back after an INSERT into `columns`; InvalidRequest if a column cannot hold one."""
        into = [column_of(table, name) for name in columns]
        return tuple([self._hold(column, value) for column, value in zip(into, values, strict=True)])

    def _hold(self, column: Column, value: Value) -> Value:
        if value is None:
            if not column.nullable:
                raise InvalidRequest(f"column {column.name!r} cannot hold NULL")
            return None
        bound = to_bound(value, "bytea" if column.kind == "bytes" else column.declared)
        assert bound is not None
        known = column.declared, bound
        if (kept := self._held.get(known)) is not None:
            return kept[0]
        found, size = self._pool.read(lambda link: self._ask(link, column, bound), self._seconds)
        if max(len(bound), size) <= MAX_KEPT:
            self._held.put(known, (found,))
        return found

    def _ask(self, link: Link, column: Column, bound: bytes) -> tuple[Value, int]:
        """Return the value that the column would hold, and the size of its text."""
        plain, base = self._type(link, column)
        declared = column.declared  # a type that PostgreSQL itself has parsed
        is_same = "true"
        if base in _CUT:  # compared in PostgreSQL, so that a large value is returned only once
            texts = [f'$1::{plain}::text COLLATE "C"', f'($1::{declared})::text COLLATE "C"']
            is_same = " = ".join(texts if base.endswith("bit") else [f"rtrim({text}, ' ')" for text in texts])
        answer = link.run(f"SELECT $1::{declared}, {is_same}", [bound], max_rows=1)
        ((value, fits),) = answer.values()
        if not fits:
            raise InvalidRequest(f"value too long for type {declared} of column {column.name!r}")
        return value, len(answer.rows[0][0] or b"")

    def _type(self, link: Link, column: Column) -> tuple[str, str]:
        """Return the type without its length limit, and its name in the catalogue."""
        declared = column.declared
        with self._lock:
            found = self._types.get(declared)
        if found is None:
            rows = link.run(_TYPE, [declared.encode()]).texts()
            if not rows:
                raise NotSupported(f"the type {declared} of column {column.name!r} no longer exists")
            ((plain, base),) = rows
            found = str(plain), str(base)
            with self._lock:
                self._types[declared] = found
        return found
