"""The truth for readers of feeds: every transaction of the log, and what a filter makes of it.

SQLite itself evaluates the filters on the rows as they were; no code under test decides here, except the documented
hash of `shard`.
"""

from __future__ import annotations

import json
import re
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import Any

import apsw
import msgspec

from headwater.model.change import Change, Op, Transaction
from headwater.model.clock import ts_text
from headwater.model.literal import UNAVAILABLE, Value, to_lit, to_plain
from headwater.model.table import Row, Table
from headwater.sources.sqlite.key_order import order
from headwater.sources.sqlite.types import to_stored

DB = "main"
ENDS = re.compile(r"(DROP TABLE|ALTER TABLE .* RENAME TO) ", re.DOTALL)  # schema changes after which a name is free
Keyed = tuple[str, str]  # a table, and a key of it as JSON
Named = dict[str, Value]  # a row by the names of its columns, hidden ones included


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """What one reader requests: `params` as sent over the wire, `condition` as SQLite evaluates it."""

    transport: str = "poll"
    tables: tuple[str, ...] = ()
    params: dict[str, Any] = {}
    condition: str = ""
    shard: tuple[int, int] | None = None
    columns: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    before: bool = True
    after: bool = True
    format: str = "objects_json"
    atomic: bool = False
    start: str = "earliest"
    query: str = ""  # to be told when its answer is stale: that of `columns` of the rows that meet `condition`

    @property
    def folds(self) -> bool:
        """Return whether the delivered changes are enough to rebuild the table."""
        return self.after and not self.ops

    def wants(self, table: str) -> bool:
        return not self.tables or table in self.tables

    def show(self, value: Value) -> Any:
        return to_lit(value) if self.format == "objects_json" else to_plain(value)

    def subscribe_params(self) -> dict[str, Any]:
        """Return the parameters of cdc.subscribe_table."""
        found = {**self.params, "db": DB, "format": self.format, "start": self.start}
        found["include"] = {"before": self.before, "after": self.after}
        more = {"tables": self.tables, "columns": self.columns, "ops": self.ops}
        found |= {name: list(value) for name, value in more.items() if value}
        if self.shard is not None:
            found["shard"] = {"index": self.shard[0], "of": self.shard[1]}
        return found | ({"txn": "atomic"} if self.atomic else {})


class Seen(msgspec.Struct):
    """One change of the truth."""

    offset: int
    place: int  # in its transaction
    last: bool
    part: Transaction
    change: Change


class Base(msgspec.Struct):
    """The rows with which a generation begins after `offset`; no change delivers them."""

    offset: int
    rows: dict[str, list[tuple[tuple[Value, ...], Named]]]  # by table: key and row


class Truth:
    """All transactions in order, in all generations."""

    def __init__(self, parts: Iterable[Transaction], bases: Iterable[Base] = (), *, added: str | None = None) -> None:
        """Take the transactions and the rows at each new generation; `added` is the value of columns added later."""
        self.bases, self.added = list(bases), added
        self.changes = [
            Seen(offset, part.start + place, part.last and place + 1 == len(part.changes), part, change)
            for part in parts
            for place, (offset, change) in enumerate(zip(range(part.first, part.upto + 1), part.changes, strict=True))
        ]
        self.by_offset = {each.offset: each for each in self.changes}
        self.shapes: dict[str, Table] = {}  # the first one of every name: that of the rows that were there before
        for each in self.changes:
            self.shapes.setdefault(each.change.table.name, each.change.table)
        self._starts = [base.offset for base in self.bases]
        self._whole: dict[str, Expected] = {}
        # Told straight from the database and then, after a crash, given a later time: until the log holds a
        # change, its time is not settled, nor which commits of another process are one transaction.
        self.unsettled: set[int] = set()

    def whole(self, format: str) -> Expected:
        """Return the expectation of a reader without a filter."""
        if format not in self._whole:
            self._whole[format] = Expected(self, Spec(format=format))
        return self._whole[format]

    @property
    def latest(self) -> int:
        return max([each.offset for each in self.changes[-1:]] + self._starts, default=0)

    def generation(self, cursor: int) -> int:
        """Return the number of the generation of a reader at `cursor`."""
        return bisect_right(self._starts, cursor)

    def ends_transaction(self, offset: int) -> bool:
        """Return whether no transaction continues after `offset`."""
        found = self.by_offset.get(offset)
        return found is None or found.last or found.part.first - found.part.start in self.unsettled

    def note_told(self, offset: int, ts: int) -> None:
        """Record that a reader received the change at `offset` with the time `ts`."""
        found = self.by_offset.get(offset)
        if found is not None and ts < found.part.ts:
            self.unsettled.add(found.part.first - found.part.start)

    def is_settled(self, offset: int, ts: int) -> bool:
        """Return whether what a reader received with this time must hold."""
        found = self.by_offset.get(offset)
        return found is None or ts >= found.part.ts


class Expected:
    """What a reader with `spec` must receive, and the table it must have at any offset."""

    def __init__(self, truth: Truth, spec: Spec, tables: dict[str, Table] | None = None) -> None:
        self.truth, self.spec = truth, spec
        self.bodies: dict[int, dict[str, Any]] = {}
        self._now: dict[Keyed, Named] = {}  # rows as they are, whether they pass or not
        self.tables = dict(tables or truth.shapes)
        self.void: set[str] = set()  # tables that must be read again: the changes do not tell them any more
        self._voids: list[tuple[int, frozenset[str]]] = []  # what it was from an offset on
        self._versions: dict[Keyed, tuple[list[int], list[Any]]] = {}
        self._touched: tuple[list[int], list[Keyed]] = [], []  # every version, in the order of offsets
        self._inside = _Inside(truth, spec)
        bases = list(truth.bases)
        for seen in truth.changes:
            while bases and bases[0].offset < seen.offset:
                self._rebase(bases.pop(0))
            self._take(seen)
        for base in bases:
            self._rebase(base)
        self.offsets = list(self.bodies)

    def between(self, after: int, upto: int) -> list[int]:
        """Return the offsets in (after, upto] that must be delivered."""
        return self.offsets[bisect_right(self.offsets, after) : bisect_right(self.offsets, upto)]

    def touched(self, after: int, upto: int) -> list[Keyed]:
        """Return the keys of rows that may differ between `after` and `upto`."""
        offsets, keys = self._touched
        return keys[bisect_right(offsets, after) : bisect_right(offsets, upto)]

    def every_touch(self) -> tuple[list[int], list[Keyed]]:
        """Return the offsets at which rows change, and the key of the changed row at each."""
        return self._touched

    def state(self, offset: int) -> dict[Keyed, Any]:
        """Return the rows under the filter at `offset`, as images, by key."""
        return {key: image for key in self._versions if (image := self.image(key, offset)) is not None}

    def image(self, key: Keyed, offset: int) -> Any:
        """Return the image of one row at `offset`; None if the row is absent or filtered."""
        offsets, images = self._versions.get(key, ([], []))
        place = bisect_right(offsets, offset)
        return images[place - 1] if place else None

    def key(self, table: Table, row: Row) -> Keyed:
        return table.name, dumps([self.spec.show(value) for value in table.key_of(row)])

    # --- taking the truth in -------------------------------------------------------------------------------------

    def _take(self, seen: Seen) -> None:
        change, table = seen.change, seen.change.table
        if change.op is Op.SCHEMA_CHANGE:
            self._reshape(seen)
        elif change.op is Op.TRUNCATE:
            self._empty(table.name, seen.offset)
            self._void(table.name, seen.offset, False)  # there is nothing to be read
        elif table.name not in self.void:
            before, after = change.before, change.after
            old = None if before is None else self.key(table, before)
            new = None if after is None else self.key(table, after)
            had = {} if old is None else self._now.get(old, {})
            if old is not None and old != new:
                self._now.pop(old, None)
                self._version(old, seen.offset, None)
            if new is not None and after is not None:
                pairs = zip(table.names, after, strict=True)
                named = {name: had.get(name) if value is UNAVAILABLE else value for name, value in pairs}
                self._now[new] = named
                inside = self._inside(seen.offset, 1)
                self._version(new, seen.offset, self._image(table, named) if inside else None)
        if self.spec.wants(table.name) and (body := self._body(seen)) is not None:
            self.bodies[seen.offset] = body

    def _version(self, key: Keyed, offset: int, image: Any) -> None:
        if self.spec.wants(key[0]):
            offsets, images = self._versions.setdefault(key, ([], []))
            offsets.append(offset)
            images.append(image)
            self._touched[0].append(offset)
            self._touched[1].append(key)

    def _reshape(self, seen: Seen) -> None:
        """Apply a schema change: add or remove columns, or empty a table that ended or must be read again."""
        table, ddl = seen.change.table, seen.change.ddl or ""
        if seen.change.resnapshot or ENDS.match(ddl):
            self._empty(table.name, seen.offset)
            self._void(table.name, seen.offset, seen.change.resnapshot)
        known, self.tables[table.name] = self.tables.get(table.name), table
        if known is None or known.names == table.names:
            return
        for key, row in self._now.items():
            if key[0] == table.name:
                was = dict(row)
                row.clear()
                row.update({name: was.get(name, self.truth.added) for name in table.names})
                if self.image(key, seen.offset) is not None:
                    self._version(key, seen.offset, self._image(table, row))

    def _void(self, table: str, offset: int, is_void: bool) -> None:
        if is_void != (table in self.void):
            self.void ^= {table}
            self._voids.append((offset, frozenset(self.void)))

    def void_at(self, offset: int) -> frozenset[str]:
        """Return the tables that must be read again at `offset`, because changes no longer describe them."""
        place = bisect_right(self._voids, offset, key=itemgetter(0))
        return self._voids[place - 1][1] if place else frozenset()

    def _empty(self, table: str, offset: int) -> None:
        """Remove all rows of a table."""
        for key in [key for key in self._now if key[0] == table]:
            del self._now[key]
            self._version(key, offset, None)

    def _rebase(self, base: Base) -> None:
        for key in self._versions:
            self._version(key, base.offset, None)
        self._now.clear()
        for name, rows in base.rows.items():
            for values, row in rows:
                key = name, dumps([self.spec.show(value) for value in values])
                self._now[key] = dict(row)
                passes = not self.spec.wants(name) or self._inside.named(self.tables[name], row)
                self._version(key, base.offset, self._image(self.tables[name], row) if passes else None)

    # --- how it looks --------------------------------------------------------------------------------------------

    def _image(self, table: Table, row: Named) -> Any:
        return {name: self.spec.show(row[name]) for name in self._shown(table, row)}

    def _shown(self, table: Table, row: Named) -> list[str]:
        hidden = {column.name for column in table.columns if column.hidden}
        return [name for name in row if name not in hidden and (not self.spec.columns or name in self.spec.columns)]

    def _put_image(self, body: dict[str, Any], word: str, table: Table, row: Named) -> None:
        """Put an image into `body`; plain JSON leaves unknown values out and lists their names."""
        lacks = {name for name in self._shown(table, row) if row[name] is UNAVAILABLE}
        if self.spec.format == "objects_json":
            lacks = set()
        body[word] = self._image(table, {name: value for name, value in row.items() if name not in lacks})
        if lacks:
            body["unavailable"] = sorted({*body.get("unavailable", ()), *lacks})

    def _body(self, seen: Seen) -> dict[str, Any] | None:
        """Return the change as it must be delivered; None if it must not be."""
        spec, change, table, part = self.spec, seen.change, seen.change.table, seen.part
        op = self._delivered(seen)
        if op is None or (spec.ops and op not in spec.ops):
            return None
        body: dict[str, Any] = {
            "seq": seen.offset,
            "lsn": seen.offset,
            "offset": seen.offset,
            "db": DB,
            "table": table.name,
            "op": op,
            "commit_ts_ms": part.commit_ts_ms,
            "ts": ts_text(part.ts),
            "txn": {"id": part.id, "seq": seen.place, "last": seen.last},
            "schema": table.version,
        }
        if op == "schema_change":
            return body | {"ddl": change.ddl or "", "resnapshot": change.resnapshot}
        if op == "truncate":
            return body
        before = None if op == "insert" else change.before
        after = None if op == "delete" else change.after
        self._name_key(body, table, before, after)
        for word, row, wanted in (("before", before, spec.before), ("after", after, spec.after)):
            if wanted and row is not None:
                self._put_image(body, word, table, dict(zip(table.names, row, strict=True)))
        return body

    def _delivered(self, seen: Seen) -> str | None:
        change, spec = seen.change, self.spec
        if change.op not in (Op.INSERT, Op.UPDATE, Op.DELETE):
            return change.op.word
        inside = (self._inside(seen.offset, 0), self._inside(seen.offset, 1))
        op = {(True, True): "update", (False, True): "insert", (True, False): "delete"}.get(inside)
        if op == "update" and spec.columns and change.before is not None and change.after is not None:
            watched = {*spec.columns, *change.table.key}
            places = [change.table.index[name] for name in watched if name in change.table.index]
            if all(dumps(to_lit(change.before[p])) == dumps(to_lit(change.after[p])) for p in places):
                return None
        return op

    def _name_key(self, body: dict[str, Any], table: Table, before: Row | None, after: Row | None) -> None:
        row = before if after is None else after
        assert row is not None
        word = "pk" if table.primary_key else "identity"
        body[word] = self._key_shown(table, row)
        if before is not None and dumps(old := self._key_shown(table, before)) != dumps(body[word]):
            body[word + "_before"] = old

    def _key_shown(self, table: Table, row: Row) -> Any:
        values = [self.spec.show(value) for value in table.key_of(row)]
        return values if table.primary_key else dict(zip(table.key, values, strict=True))


class _Inside:
    """Decides which images pass the filter, by one SQLite query for all images."""

    def __init__(self, truth: Truth, spec: Spec) -> None:
        self._spec, self._db = spec, apsw.Connection(":memory:")
        self._shapes: dict[tuple[str, tuple[str, ...]], str] = {}
        self._passing: set[tuple[int, int]] = set()
        images: dict[str, list[tuple[Any, ...]]] = {}
        for seen in truth.changes:
            if not spec.wants(seen.change.table.name):
                continue
            for which, row in enumerate((seen.change.before, seen.change.after)):
                if row is not None and self._in_shard(seen.change.table, seen.change.table.key_of(row)):
                    if not spec.condition:
                        self._passing.add((seen.offset, which))
                        continue
                    number = seen.offset * 2 + which
                    images.setdefault(self._shape(seen.change.table), []).append((number, *map(to_stored, row)))
        for shape, rows in images.items():
            for number in self._ask(shape, rows):
                self._passing.add((number // 2, number % 2))

    def __call__(self, offset: int, which: int) -> bool:
        return (offset, which) in self._passing

    def named(self, table: Table, row: Named) -> bool:
        """Return whether a row that is in no change passes the filter."""
        if not self._in_shard(table, tuple(row[name] for name in table.key)):
            return False
        values = tuple(to_stored(row.get(name)) for name in table.names)
        return not self._spec.condition or bool(list(self._ask(self._shape(table), [(0, *values)])))

    def _ask(self, shape: str, rows: list[tuple[Any, ...]]) -> Iterator[int]:
        self._db.execute(f"DELETE FROM {shape}")
        self._db.executemany(f"INSERT INTO {shape} VALUES ({', '.join('?' * len(rows[0]))})", rows)
        yield from [number for (number,) in self._db.execute(f"SELECT _n FROM {shape} WHERE {self._spec.condition}")]

    def _shape(self, table: Table) -> str:
        name = self._shapes.get((table.name, table.names))
        if name is None:
            name = self._shapes[table.name, table.names] = f"shape_{len(self._shapes)}"
            columns = [f'"{column.name}" {column.declared} COLLATE {column.collation}' for column in table.columns]
            self._db.execute(f"CREATE TABLE {name}(_n INTEGER, {', '.join(columns)})")
        return name

    def _in_shard(self, table: Table, key: tuple[Value, ...]) -> bool:
        if self._spec.shard is None:
            return True
        index, of = self._spec.shard
        return zlib.crc32(order(table, table.key)(key)) % of == index


def dumps(body: Any) -> str:
    """Return JSON that is equal only for identical values: 1 differs from 1.0."""
    return json.dumps(body, sort_keys=True)
