"""Differences between two shapes of a table: the schema change, and whether rows may differ unseen. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from headwater.model.change import Change, Op
from headwater.model.table import Column, Table
from headwater.sources.postgres.schema.ddl_text import ddl_text
from headwater.sources.postgres.schema.table_facts import TableFact

MOST_DISPLACED = 1_000  # newest entries kept: most of these tables were dropped, and never appear again


class Shapes(msgspec.Struct, frozen=True):
    """The tables at a point of the log: their shapes, their oids, and the last version of every name.

    `displaced`: oids whose name another table took and that were not reported since. `secret`: marks our own
    announcements about the tables; constant for a log from its beginning.
    """

    tables: Mapping[str, Table] = {}
    oids: Mapping[str, int] = {}
    versions: Mapping[str, int] = {}
    displaced: tuple[int, ...] = ()
    secret: str = ""


def is_same_shape(one: Table, other: Table) -> bool:
    """Return whether two shapes differ only in their version."""
    return (one.name, one.columns, one.key) == (other.name, other.columns, other.key)


def has_same_columns(one: Table, other: Table) -> bool:
    """Return whether the stream describes both alike: equal names and types."""
    if one.name != other.name or len(one.columns) != len(other.columns):
        return False
    pairs = zip(one.columns, other.columns, strict=True)
    return all((a.name, a.kind, a.declared) == (b.name, b.kind, b.declared) for a, b in pairs)


def displaced(before: tuple[int, ...], oid: int) -> tuple[int, ...]:
    """Return `before`, oids of tables whose name another took, with `oid` added: its later rows need a snapshot."""
    return (*(each for each in before[1 - MOST_DISPLACED :] if each != oid), oid)


class Announcement(msgspec.Struct, frozen=True):
    """The catalogue at a position of the server's WAL: tables by oid; `gone`: dropped; `left`: existing but no longer
    sent; `moved`: queries on the name have another meaning, with the reason; `unseen`: rows were not sent, with the
    reason; `rewritten`: the rows are in another file, with the transaction that last wrote the catalogue row.

    An oid is 0 if the log does not know it, as for a table not seen for long. `secret` proves that the announcement is
    ours: any role that may connect to the database may write messages with any prefix.
    """

    tables: dict[int, Table] = {}
    gone: list[tuple[int, str]] = []
    left: list[tuple[int, str]] = []
    moved: Mapping[str, str] = {}
    unseen: Mapping[str, str] = {}
    rewritten: Mapping[str, int] = {}
    secret: str = ""

    @property
    def is_sound(self) -> bool:
        """Return whether each key is made of columns of its table."""
        return all(table.index.keys() >= {*table.key} for table in self.tables.values())


def is_end(change: Change) -> bool:
    """Return whether the change ends the table's name."""
    ends = ("DROP TABLE ", f"ALTER TABLE {change.table.name} RENAME TO ")
    return change.op is Op.SCHEMA_CHANGE and (change.ddl or "").startswith(ends)


def schema_change(old: Table, new: Table, fact: TableFact) -> Change | None:
    """Return the change from one shape of a table to the next; None if there is none.

    Rows may have changed unseen (`resnapshot`) if a type, the key or the computation of a column changed, if a column
    was added with a default, if a column was added and another dropped, which may be a rename, or if the column order
    is impossible without a rename: names were exchanged or reused.
    """
    if is_same_shape(old, new):
        return None
    were, are = {c.name: c for c in old.columns}, {c.name: c for c in new.columns}
    came, went = are.keys() - were.keys(), were.keys() - are.keys()
    known = fact.columns
    unseen = (
        old.key != new.key
        or any(_means(were[name]) != _means(are[name]) for name in were.keys() & are.keys())
        or any(went or name not in known or known[name].has_default or are[name].generated for name in came)
        or any(not are[name].nullable for name in came)
        or not _is_continued(old, new)
    )
    return Change(Op.SCHEMA_CHANGE, new, ddl=ddl_text(old, new), resnapshot=unseen)


def _is_continued(old: Table, new: Table) -> bool:
    """Return whether columns were only dropped, or added after the others."""
    kept = tuple(name for name in old.names if name in new.index)
    return new.names[: len(kept)] == kept


def _means(column: Column) -> tuple[str, str, bool]:
    return column.kind, column.declared, column.generated
