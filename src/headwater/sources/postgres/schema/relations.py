"""The tables of a stream: relation messages and the catalogue's facts become shapes and row decoders. Pure.

**Names.** A table of the schema `public` has its bare name, any other `schema.table`. A part that contains a dot or
a double quote is written in double quotes, with those inside doubled: `public."a.b"` is `"a.b"`, while `a.b` is table b
of schema a. Nothing else is quoted or folded: `Odd Name` is `Odd Name`. So every name identifies one table.

**Keys.** The columns of the replica identity, where that is an index (the primary key by default): only those columns
are certain to be known of an old row. With REPLICA IDENTITY FULL or NOTHING, the primary key of the catalogue. A table
with neither has the key `()`: its rows cannot be distinguished.

**Changes of shape** are not in the stream: a table is described again before its next row. Whether its other rows
changed with it is not visible, so `resnapshot` is set unless that is ruled out (see `schema_change`). A table that
was renamed, or dropped and re-created, is detected then too, by its oid. A mere DROP, and column facts that the stream
lacks, are reported by an `Announcement`, never by the current catalogue: the same messages must give the same changes
whenever they are read.
"""

from __future__ import annotations

import re

import msgspec

from headwater.model.change import Change, Op
from headwater.model.table import Column, Table
from headwater.sources.postgres.capture.decode.pgoutput import Relation, Type
from headwater.sources.postgres.capture.decode.replication_frames import BadMessage
from headwater.sources.postgres.capture.decode.row_decoder import RowDecoders
from headwater.sources.postgres.capture.decode.row_plan import HEAD, Decode
from headwater.sources.postgres.capture.decode.truncations import Truncated, recalled
from headwater.sources.postgres.schema.ddl_text import ddl_text
from headwater.sources.postgres.schema.ddl_trigger import Statement
from headwater.sources.postgres.schema.shape_changes import (
    Announcement,
    Shapes,
    displaced,
    has_same_columns,
    schema_change,
)
from headwater.sources.postgres.schema.table_facts import Catalogue, ColumnFact, TableFact
from headwater.sources.postgres.types import (
    BPCHAR,
    TypeFact,
    Types,
    base_of,
    converter,
    declared_text,
    kind_of,
    named,
)

# Bytewise collations, in which our key order equals PostgreSQL's.
BY_BYTES = frozenset({"", "C", "POSIX", "ucs_basic", "C.UTF-8", "C.utf8", "pg_c_utf8", "BINARY"})


# --- names -----------------------------------------------------------------------------------------------

_PART = re.compile(r'"((?:[^"]|"")+)"|([^".]+)')


def _part(name: str) -> str:
    return '"' + name.replace('"', '""') + '"' if "." in name or '"' in name else name


def table_name(schema: str, name: str) -> str:
    """Return the name of a table in the log: `table` in the schema public, else `schema.table`."""
    return _part(name) if schema == "public" else f"{_part(schema)}.{_part(name)}"


def split_name(text: str) -> tuple[str, str] | None:
    """Return schema and table; None if `text` is not a name as `table_name` writes it (or with `public.` in front)."""
    parts: list[str] = []
    at = 0
    while found := _PART.match(text, at):
        parts.append(found[2] if found[1] is None else found[1].replace('""', '"'))
        at = found.end()
        if text[at : at + 1] != ".":
            break
        at += 1
    if at != len(text) or text.endswith(".") or len(parts) not in (1, 2):
        return None
    name = table_name(*parts) if len(parts) == 2 else _part(parts[0])
    if name not in (text, text.removeprefix("public.")):
        return None
    return ("public", parts[0]) if len(parts) == 1 else (parts[0], parts[1])


# --- shapes ----------------------------------------------------------------------------------------------


def table_of(relation: Relation, fact: TableFact, types: Types) -> Table:
    """Return the shape of the rows of `relation`."""
    columns = tuple(
        column_of(each.name, each.type, each.typmod, fact.columns.get(each.name, ColumnFact()), types)
        for each in relation.columns
    )
    names = {column.name for column in columns}
    if relation.identity in "di":
        flagged = tuple(each.name for each in relation.columns if each.is_key)
        key = fact.key if {*fact.key} == {*flagged} else flagged  # for equal columns, the order of the index
    else:
        key = fact.key if names.issuperset(fact.key) else ()
    return Table(table_name(relation.schema, relation.name), columns, key)


def column_of(name: str, oid: int, typmod: int, fact: ColumnFact, types: Types) -> Column:
    """Return a column, equal whether the stream or the catalogue describes it."""
    base = base_of(oid, types)
    return Column(
        name,
        kind=kind_of(oid, types),
        declared=declared_text(oid, typmod, types),
        nullable=fact.nullable,
        generated=fact.generated,
        auto=fact.auto,
        collation=_collation(base, fact.collation, types),
    )


def _collation(base: int, collation: str, types: Types) -> str:
    fact = types.get(base)
    if fact is not None and fact.name.rpartition(".")[2] == "citext":
        return "citext"
    if collation not in BY_BYTES:
        return collation
    return "RTRIM" if base == BPCHAR else "BINARY"  # char(n) compares without trailing spaces


# --- the stream's side -----------------------------------------------------------------------------------


class Relations:
    """The tables of a stream. `rows` has the row decoders by the first bytes of a message. For a message without one,
    call `need` if its table was described since, then `decoder`."""

    def __init__(
        self, shapes: Shapes, catalogue: Catalogue, *, truncated: Truncated = (), all_tables: bool = True
    ) -> None:
        """Start at the end of the log with its `shapes`: a rename or re-creation is detected by their oids.
        `all_tables`: any other unknown table is new and empty."""
        self.rows: dict[bytes, Decode] = {}
        self.tables = dict(shapes.tables)  # the newest shapes by name
        self.oids = dict(shapes.oids)  # the oids of `tables` by name
        self.versions = {**shapes.versions, **{name: table.version for name, table in shapes.tables.items()}}
        self.displaced, self.truncated, self.secret = shapes.displaced, truncated, shapes.secret
        self.changed = 0  # how often a shape, or the oid of a name, changed
        self._names = {oid: name for name, oid in self.oids.items()}
        self._catalogue, self._all_tables = catalogue, all_tables
        self._described: dict[int, tuple[Relation, int]] = {}  # each with the clock at that time
        self._made: dict[int, tuple[Relation, RowDecoders]] = {}
        self._ready: set[int] = set()  # tables in `_made` that are valid for the next row
        self._types: dict[int, TypeFact] = {}  # from the stream
        self.clock = 0  # how many relation messages were taken

    def add_type(self, message: Type) -> None:
        """Record a type that columns may have from here on."""
        self._types[message.oid] = named(message.schema, message.name)

    def add_relation(self, relation: Relation) -> None:
        """Record the shape that rows of this table have from here on; `need` must be called before them."""
        self.clock += 1
        self._described[relation.oid] = relation, self.clock
        self._forget(relation.oid)

    def described_after(self, oid: int, clock: int) -> Relation | None:
        """Return the description of `oid`, if it was received after `clock`."""
        found = self._described.get(oid)
        return found[0] if found is not None and found[1] > clock else None

    def need(self, oid: int, xid: int = 0) -> list[Change]:
        """Make the decoders of a table ready for rows of transaction `xid`; return the changes of shapes."""
        if oid not in self._described:
            raise BadMessage(f"a row of table {oid}, which was never described")
        relation = self._described[oid][0]
        if xid:
            self._catalogue.settle(xid)
        fact = self._catalogue.table(oid) or TableFact()
        types = {**self._types, **self._catalogue.types()}
        table = table_of(relation, fact, types)
        is_learnt, is_displaced = self.oids.get(table.name) != oid, oid in self.displaced
        changes = self._ended(oid, table.name)
        known = self.tables.get(table.name)
        table = msgspec.structs.replace(table, version=self.versions.get(table.name, 0) + 1)
        if known is None or changes or is_displaced:
            is_known = self._all_tables or fact.is_born_published
            unseen = bool(changes) or is_displaced or not is_known or fact.is_rewritten
            changes.append(Change(Op.SCHEMA_CHANGE, table, ddl=ddl_text(None, table), resnapshot=unseen))
        elif has_same_columns(known, table) and (relation.identity not in "di" or {*known.key} == {*table.key}):
            table = known
        elif (change := schema_change(known, table, fact)) is not None:
            changes.append(change)
        self.tables[table.name], self.versions[table.name] = table, table.version
        self.changed += bool(changes) or is_learnt
        self._make(oid, relation, table, types)
        return changes

    def announce(self, found: Announcement) -> list[Change]:
        """Return the schema changes of an announcement, [] if it lacks our secret; rows show further changes."""
        changes: list[Change] = []
        if found.secret != self.secret or not found.is_sound:
            return changes
        change: Change | None
        for (oid, name), why in [(each, "") for each in found.gone] + [
            (each, " -- not published") for each in found.left
        ]:
            if self.oids.get(name, 0) == oid and name in self.tables:
                changes.append(Change(Op.SCHEMA_CHANGE, self.tables.pop(name), ddl=f"DROP TABLE {name}{why}"))
                self.oids.pop(name, None)
                self._names.pop(oid, None)
                self._forget(oid)
        for oid, table in found.tables.items():
            known = self.tables.get(table.name)
            table = msgspec.structs.replace(table, version=self.versions.get(table.name, 0) + 1)
            if known is None and oid not in self.displaced and self._names.get(oid, table.name) == table.name:
                text = ddl_text(None, table)
                fact = self._catalogue.table(oid) or TableFact()
                is_known = self._all_tables or fact.is_born_published
                change = Change(Op.SCHEMA_CHANGE, table, ddl=text, resnapshot=not is_known)
                self._names[oid], self.oids[table.name] = table.name, oid
            elif known is None or self.oids.get(table.name, oid) != oid:
                continue
            else:
                change = schema_change(known, table, TableFact())
            if change is not None:
                changes.append(change)
                self.tables[table.name], self.versions[table.name] = table, table.version
                self._forget(oid)
        self.changed += bool(changes)
        told = {change.table.name: change.resnapshot for change in changes}
        redone = [name for name, xid in found.rewritten.items() if (name, xid) not in self.truncated]
        why = "its rows were rewritten: it may not have been published in between"
        unseen = {**dict.fromkeys(redone, why), **found.unseen}
        for name, why in {**found.moved, **unseen}.items():
            if name in self.tables and (name not in told or (name in unseen and not told[name])):
                # A comment of one line: whatever names it contains, it is not a statement.
                ddl = f"-- {' '.join(why.split())}"
                changes.append(Change(Op.SCHEMA_CHANGE, self.tables[name], ddl=ddl, resnapshot=name in unseen))
        return changes

    def show_statement(self, found: Statement) -> list[Change]:
        """Return a comment in the history of the table that a statement altered or dropped, if the table is known."""
        table = self.tables.get(table_name(found.schema, found.table))
        return [] if table is None else [Change(Op.SCHEMA_CHANGE, table, ddl=found.comment)]

    def truncate(self, oid: int, xid: int) -> Table:
        """Record that transaction `xid` truncated a ready table; return the table's shape."""
        table = self._made[oid][1].table
        self.truncated = recalled(self.truncated, table.name, xid)
        return table

    def is_ready(self, oid: int) -> bool:
        """Return whether `need` was called since the table was last described."""
        return oid in self._ready

    def decoder(self, message: bytes) -> Decode:
        """Return the decoder for all messages that begin as `message`, of a ready table, or raise BadMessage."""
        head = message[:HEAD]
        found = self._made[int.from_bytes(head[1:5], "big")][1].of(head)
        if found is None:
            raise BadMessage(f"a message of {len(message)} bytes that begins with {head!r} is not a known row")
        self.rows[head] = found
        return found

    def _ended(self, oid: int, name: str) -> list[Change]:
        """Return the end of the table's previous name, and the end of the table that had its name."""
        ended: list[Change] = []
        was, holder = self._names.get(oid, name), self.oids.get(name, oid)
        if was != name and self.oids.get(was) == oid and was in self.tables:
            ddl = f"ALTER TABLE {was} RENAME TO {name}"
            ended.append(Change(Op.SCHEMA_CHANGE, self.tables.pop(was), ddl=ddl))
            del self.oids[was]
        if holder != oid and name in self.tables:
            ended.append(Change(Op.SCHEMA_CHANGE, self.tables[name], ddl=f"DROP TABLE {name}"))
            self.displaced = displaced(self.displaced, holder)
        self._names[oid], self.oids[name] = name, oid
        self.displaced = tuple(each for each in self.displaced if each != oid)
        return ended

    def _make(self, oid: int, relation: Relation, table: Table, types: Types) -> None:
        made = self._made.get(oid)
        if made is None or made[0] != relation or made[1].table is not table:
            converts = [converter(each.type, types) for each in relation.columns]
            made = relation, RowDecoders(oid, table, _known_columns(relation, table), converts)
            self._made[oid] = made
        self._ready.add(oid)
        self.rows.update(made[1].made)

    def _forget(self, oid: int) -> None:
        if oid in self._ready:
            self._ready.remove(oid)
            for head in self._made[oid][1].made:
                self.rows.pop(head, None)


def _known_columns(relation: Relation, table: Table) -> list[bool]:
    """Return which columns of an old row are known if only its key is sent: those of the replica identity."""
    if relation.identity in "di":
        return [each.is_key for each in relation.columns]
    return [name in table.key for name in table.names]
