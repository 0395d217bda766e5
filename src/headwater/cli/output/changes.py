"""A change as the JSON of the wire, and as one readable line."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any

from headwater.cli.output.tables import printable
from headwater.model.change import Change, Op, Transaction
from headwater.model.literal import UNAVAILABLE, to_plain
from headwater.model.table import Row, Table

if TYPE_CHECKING:
    from headwater.feeds.formats.native import Native

COLOURS = {
    Op.INSERT: "green",
    Op.UPDATE: "yellow",
    Op.DELETE: "red",
    Op.SCHEMA_CHANGE: "magenta",
    Op.TRUNCATE: "red",
}
_BY_WORD = {op.word: name for op, name in COLOURS.items()}
OPS = frozenset(_BY_WORD)  # the words of changes on streams
WIDEST = 96  # characters of images on one line


def as_json(db: str, part: Transaction, offset: int, change: Change) -> dict[str, Any]:
    """Return a change as streams send it in plain_json, with both images."""
    found: dict[str, Any] = json.loads(_encoder(db).change(part, offset, change, change.op))
    return found


@functools.cache
def _encoder(db: str) -> Native:
    from headwater.feeds.formats.native import Native  # imported late: most commands do not need it
    from headwater.feeds.formats.values import PLAIN
    from headwater.feeds.options import Shape

    return Native(Shape(db, before=True, after=True), PLAIN)


def time_of_day(ms: int) -> str:
    """Return the local time of day."""
    return datetime.fromtimestamp(ms / 1000).strftime("%H:%M:%S.%f")[:-3]


def images(change: Change) -> str:
    """Return the new row, the old row, the changed columns or the DDL as text of at most WIDEST characters."""
    if change.op is Op.SCHEMA_CHANGE:
        text = _ddl(change.ddl, change.resnapshot)
    elif change.before is not None and change.after is not None:
        text = _difference(change.table, change.before, change.after)
    else:
        text = _pairs(change.table, change.row or ())
    return _cut(text)


def _ddl(ddl: str | None, resnapshot: bool) -> str:
    return (ddl or "by another process") + (" (snapshot needed)" if resnapshot else "")


def _cut(text: str) -> str:
    text = printable(text)
    return text if len(text) <= WIDEST else text[: WIDEST - 1] + "…"


def _difference(table: Table, before: Row, after: Row) -> str:
    key = _named(zip(table.key, map(_known, table.key_of(before)), strict=True))
    changed = (
        (name, _known(old), _known(new))
        for name, old, new in zip(table.names, before, after, strict=True)
        if (type(old), old) != (type(new), new)
    )
    return f"{key}  {_became(changed)}"


def _pairs(table: Table, row: Row) -> str:
    hidden = {column.name for column in table.columns if column.hidden and column.name not in table.key}
    named = zip(table.names, row, strict=False)
    return _named((name, _known(value)) for name, value in named if name not in hidden)


def _known(value: Any) -> Any:
    """Return the value in plain JSON; UNAVAILABLE if the source did not send it."""
    return value if value is UNAVAILABLE else to_plain(value)


def _named(pairs: Iterable[tuple[str, Any]]) -> str:
    return " ".join(f"{name}={_shown(value)}" for name, value in pairs)


def _became(changed: Iterable[tuple[str, Any, Any]]) -> str:
    return ", ".join(f"{name}: {_shown(old)} → {_shown(new)}" for name, old, new in changed) or "unchanged"


def _shown(plain: Any) -> str:
    """Return the value as text: `?` for a value that the source did not send, NULL for None."""
    if plain is UNAVAILABLE:
        return "?"
    return "NULL" if plain is None else str(plain)


# --- from the wire ---------------------------------------------------------------------------------------


def line(found: dict[str, Any]) -> str:
    """Return a line for a change in plain_json: offset, time, op, table, and the change of the row."""
    word = "row" if found.get("snapshot") else found["op"]
    time = time_of_day(found["commit_ts_ms"])
    return f"{found['offset']:>8}  {time}  {word:<13}  {printable(found['table']):<12}  {_cut(_said(found))}"


def colour(found: dict[str, Any]) -> str:
    """Return the colour of a change's line; "" for rows of a snapshot."""
    return "" if found.get("snapshot") else _BY_WORD[found["op"]]


def _said(found: dict[str, Any]) -> str:
    if found["op"] == Op.SCHEMA_CHANGE.word:
        return _ddl(found["ddl"], found["resnapshot"])
    unknown = dict.fromkeys(found.get("unavailable", ()), UNAVAILABLE)
    before, after = found.get("before"), found.get("after")
    if before is not None and after is not None:
        return f"{_key(found)}  {_became(_changed(unknown | before, unknown | after))}"
    row = before if after is None else after
    return _key(found) if row is None else _named(sorted((unknown | row).items()))


def _key(found: dict[str, Any]) -> str:
    """Return the values of the row's key, or names and values of the columns that identify it."""
    if "pk" in found:
        return ",".join(map(_shown, found.get("pk_before") or found["pk"]))
    identity = found.get("identity_before") or found.get("identity") or {}
    return _named(identity.items())


def _changed(before: dict[str, Any], after: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    names = sorted(after.keys() | before.keys())
    return ((name, before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name))
