"""A change as the JSON of the wire, and as one line for people."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

from headwater.cli.output import printable
from headwater.model.change import Change, Op, Transaction
from headwater.model.clock import ts_text
from headwater.model.literal import UNAVAILABLE, to_plain
from headwater.model.table import Row, Table

COLOURS = {
    Op.INSERT: "green",
    Op.UPDATE: "yellow",
    Op.DELETE: "red",
    Op.SCHEMA_CHANGE: "magenta",
    Op.TRUNCATE: "red",
}
WIDEST = 96  # characters of images on one line


def numbered(part: Transaction) -> Iterator[tuple[int, Change]]:
    """The changes of `part` with their offsets."""
    return enumerate(part.changes, part.first)


def as_json(db: str, part: Transaction, offset: int, change: Change) -> dict[str, Any]:
    """One change with rows in plain JSON, fields in the order of the wire."""
    table = change.table
    found: dict[str, Any] = {"seq": offset, "db": db, "table": table.name, "op": change.op.word}
    if change.key is not None and table.primary_key:
        found["pk"] = [to_plain(value) for value in change.key]
    unavailable: set[str] = set()
    for name, row in (("before", change.before), ("after", change.after)):
        if row is not None:
            found[name] = _plain(table, row)
            unavailable |= {column for column, value in zip(table.names, row, strict=True) if value is UNAVAILABLE}
    found |= {"commit_ts_ms": part.commit_ts_ms, "lsn": offset, "offset": offset, "ts": ts_text(part.ts)}
    place = part.start + offset - part.first
    found["txn"] = {"id": part.id, "seq": place, "last": part.last and offset == part.upto}
    found["schema"] = table.version
    if change.op is Op.SCHEMA_CHANGE:
        found |= {"ddl": change.ddl or "", "resnapshot": change.resnapshot}
    if change.key is not None and not table.primary_key:
        found["identity"] = {name: to_plain(value) for name, value in zip(table.key, change.key, strict=True)}
    return found | ({"unavailable": sorted(unavailable)} if unavailable else {})


def _plain(table: Table, row: Row) -> dict[str, Any]:
    visible = {column.name for column in table.visible}
    pairs = sorted(zip(table.names, row, strict=True), key=lambda pair: pair[0])
    return {name: to_plain(value) for name, value in pairs if name in visible and value is not UNAVAILABLE}


def clock(part: Transaction) -> str:
    """The time of day of a commit, here."""
    return datetime.fromtimestamp(part.commit_ts_ms / 1000).strftime("%H:%M:%S.%f")[:-3]


def images(change: Change) -> str:
    """What happened to the row: the new one, the old one, or what became what."""
    if change.op is Op.SCHEMA_CHANGE:
        text = (change.ddl or "by another process") + (" (snapshot needed)" if change.resnapshot else "")
    elif change.before is not None and change.after is not None:
        text = _difference(change.table, change.before, change.after)
    else:
        text = _pairs(change.table, change.row or ())
    text = printable(text)
    return text if len(text) <= WIDEST else text[: WIDEST - 1] + "…"


def _difference(table: Table, before: Row, after: Row) -> str:
    changed = [
        f"{name}: {_value(old)} → {_value(new)}"
        for name, old, new in zip(table.names, before, after, strict=True)
        if (type(old), old) != (type(new), new)
    ]
    key = " ".join(f"{name}={_value(value)}" for name, value in zip(table.key, table.key_of(before), strict=True))
    return f"{key}  {', '.join(changed) or 'unchanged'}"


def _pairs(table: Table, row: Row) -> str:
    hidden = {column.name for column in table.columns if column.hidden and column.name not in table.key}
    named = zip(table.names, row, strict=False)
    return " ".join(f"{name}={_value(value)}" for name, value in named if name not in hidden)


def _value(value: Any) -> str:
    if value is UNAVAILABLE:
        return "?"
    plain = to_plain(value)
    return "NULL" if plain is None else str(plain)
