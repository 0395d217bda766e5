"""The strict fold: applying every change in order must give exactly the tables.

A change is applied only if it fits: an insert finds no row under its key, an update or delete finds exactly
its before image. Values are compared as SQLite stores them: 1 is not 1.0, -0.0 is not 0.0, text is not bytes.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable
from typing import Any

from headwater.model.change import Change, Op
from headwater.model.literal import UNAVAILABLE, Value
from headwater.model.table import Row, Table
from headwater.sources.sqlite.types import to_stored

Raw = tuple[str, Any]  # storage class and exact content
RawRow = tuple[Raw, ...]

_DROP = re.compile(r"\s*DROP\s+TABLE\b", re.IGNORECASE)
_RENAME = re.compile(r"\s*ALTER\s+TABLE\s+.*\bRENAME\s+TO\b", re.IGNORECASE | re.DOTALL)
_FOLD_CASE = bytes.maketrans(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ", b"abcdefghijklmnopqrstuvwxyz")


def raw(value: Value) -> Raw:
    """Return `value` as its storage class and exact bytes."""
    assert value is not UNAVAILABLE, "SQLite always knows its values"
    if isinstance(value, str):
        return ("text", value.encode("utf-8", "surrogateescape"))
    stored = value if isinstance(value, (bool, int, float, bytes)) else to_stored(value)
    match stored:
        case None:
            return ("null", None)
        case bool() | int():
            return ("integer", int(stored))
        case float():
            return ("real", struct.pack(">d", stored))
        case str():
            return ("text", stored.encode("utf-8", "surrogateescape"))
        case _:
            return ("blob", bytes(stored))


def raw_row(row: Row) -> RawRow:
    """Return every value of `row` as its storage class and exact bytes."""
    return tuple(map(raw, row))


def _key_part(value: Raw, collation: str) -> Raw:
    """Return a form of a key value that is equal exactly where SQLite compares as equal."""
    kind, content = value
    if kind == "real":
        (number,) = struct.unpack(">d", content)
        return ("integer", int(number)) if number == number // 1 and abs(number) < 2**63 else value
    if kind == "text" and collation == "NOCASE":
        seen, _, _ = content.partition(b"\0")
        return (kind, seen.translate(_FOLD_CASE).ljust(len(content), b"\0"))
    if kind == "text" and collation == "RTRIM":
        return (kind, content.rstrip(b" "))
    return value


class Fold:
    """The tables as the changes describe them. `unknown` names those that need a snapshot (`load`) first."""

    def __init__(self) -> None:
        self.tables: dict[str, Table] = {}
        self.unknown: set[str] = set()
        self.applied = 0
        self._rows: dict[str, dict[tuple[Raw, ...], list[RawRow]]] = {}

    def load(self, table: Table, rows: Iterable[Row]) -> None:
        """Replace the rows of `table` by those of a snapshot."""
        self.load_raw(table, map(raw_row, rows))

    def load_raw(self, table: Table, rows: Iterable[RawRow]) -> None:
        """Replace the rows of `table` by raw rows."""
        self.tables[table.name] = table
        self._rows[table.name] = {}
        self.unknown.discard(table.name)
        for row in rows:
            self._add(table, row, "snapshot")

    def apply_all(self, changes: Iterable[Change]) -> None:
        """Apply changes in order."""
        for change in changes:
            self.apply(change)

    def apply(self, change: Change) -> None:
        """Apply one change; raise AssertionError if its table or images contradict the rows."""
        self.applied += 1
        if change.op is Op.SCHEMA_CHANGE:
            return self._reshape(change)
        name = change.table.name
        if name in self.unknown:
            return None
        assert name in self.tables, f"change {self.applied}: {change.op.word} on {name!r}, which was never announced"
        assert self.tables[name].names == change.table.names, (
            f"change {self.applied}: {name!r} has columns {change.table.names}, not {self.tables[name].names}"
        )
        what = f"change {self.applied}: {change.op.word} on {name!r}"
        if change.op is Op.TRUNCATE:
            self._rows[name].clear()
            return None
        shape = {Op.INSERT: (False, True), Op.UPDATE: (True, True), Op.DELETE: (True, False)}[change.op]
        assert (change.before is not None, change.after is not None) == shape, f"{what} has the wrong images"
        if change.before is not None:
            self._remove(change.table, raw_row(change.before), what)
        if change.after is not None:
            self._add(change.table, raw_row(change.after), what)
        return None

    def rows(self) -> dict[str, list[RawRow]]:
        """Return the sorted rows of each table, without tables that need a snapshot."""
        return {
            name: sorted((row for twins in rows.values() for row in twins), key=repr)
            for name, rows in self._rows.items()
            if name not in self.unknown
        }

    def check(self, name: str, actual: Iterable[RawRow]) -> None:
        """Check that the rows of `name` are `actual`, in any order."""
        mine, theirs = self.rows().get(name), sorted(actual, key=repr)
        assert mine is not None, f"{name!r} is not known to the fold"
        missing = [row for row in theirs if row not in mine] if mine != theirs else []
        extra = [row for row in mine if row not in theirs] if mine != theirs else []
        assert not missing and not extra and len(mine) == len(theirs), (
            f"{name!r}: the fold has {len(mine)} rows, the table {len(theirs)};"
            f"\n only in the table: {missing[:3]}\n only in the fold: {extra[:3]}"
        )

    def _key(self, table: Table, row: RawRow) -> tuple[Raw, ...]:
        return tuple(_key_part(row[place], table.columns[place].collation) for place in table.key_places)

    def _add(self, table: Table, row: RawRow, what: str) -> None:
        key = self._key(table, row)
        twins = self._rows[table.name].setdefault(key, [])
        if not any(kind == "null" for kind, _ in key):  # NULLs are equal to nothing: such keys may repeat
            assert not twins, f"{what}: key {key} is taken by {twins[0]}, new is {row}"
        twins.append(row)

    def _remove(self, table: Table, row: RawRow, what: str) -> None:
        key = self._key(table, row)
        twins = self._rows[table.name].get(key, [])
        found = next((place for place, twin in enumerate(twins) if twin == row), None)
        assert found is not None, f"{what}: its before image {row} is not there; under its key: {twins}"
        del twins[found]
        if not twins:
            del self._rows[table.name][key]

    def _reshape(self, change: Change) -> None:
        new = change.table
        known, ddl = new.name in self.tables, change.ddl or ""
        if known and (_DROP.match(ddl) or _RENAME.match(ddl)):
            del self.tables[new.name]
            self._rows.pop(new.name, None)
            self.unknown.discard(new.name)
            return
        old = self.tables.get(new.name)
        assert old is None or new.version >= old.version, f"{new.name!r}: version went back to {new.version}"
        rows = [row for twins in self._rows.get(new.name, {}).values() for row in twins]
        self.tables[new.name] = new
        if change.resnapshot:
            self.unknown.add(new.name)
            self._rows[new.name] = {}
        elif new.name not in self.unknown:
            self.load_raw(new, [_carried(row, old, new) for row in rows] if old else [])


def _carried(row: RawRow, old: Table, new: Table) -> RawRow:
    """Return a row in its table's new columns, with NULL in added ones; a single differing name is a renamed column."""
    places = dict(old.index)
    if len(old.names) == len(new.names):
        differ = [(a, b) for a, b in zip(old.names, new.names, strict=True) if a != b]
        if len(differ) == 1:
            places[differ[0][1]] = places[differ[0][0]]
    return tuple(row[places[name]] if name in places else raw(None) for name in new.names)
