"""From one shape of a table to the next: how they differ, what is told of it, and whether rows may be others. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from headwater.model.change import Change, Op
from headwater.model.table import Column, Table
from headwater.sources.postgres.schema.ddl_text import ddl_text
from headwater.sources.postgres.schema.table_facts import TableFact

MOST_DISPLACED = 1_000  # that are remembered, the newest: most were dropped, and never come again


def is_same_shape(one: Table, other: Table) -> bool:
    """Whether they differ in nothing but their version."""
    return (one.name, one.columns, one.key) == (other.name, other.columns, other.key)


def is_told_alike(one: Table, other: Table) -> bool:
    """Whether the stream says the same of both: names and types."""
    if one.name != other.name or len(one.columns) != len(other.columns):
        return False
    pairs = zip(one.columns, other.columns, strict=True)
    return all((a.name, a.kind, a.declared) == (b.name, b.kind, b.declared) for a, b in pairs)


def displaced(before: tuple[int, ...], oid: int) -> tuple[int, ...]:
    """The tables that lost their name to another, and one more: under whatever name it comes, its rows are unseen."""
    return (*(each for each in before[1 - MOST_DISPLACED :] if each != oid), oid)


class Announcement(msgspec.Struct, frozen=True):
    """What the catalogue said at a place of the server's log: tables by their oids, which are gone, which are there but
    not sent any more, by which names queries mean something else, with the reason, and which have rows that nobody was
    sent, with the reason; and whose rows are in another file, with the transaction that last wrote that down.

    The log does not always know the oid of a table that it has not seen for long: then it is 0. `secret` shows that it
    is ours: whoever may connect to a database may write messages under any name.
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
        """Whether the shapes can be any table's."""
        return all(table.index.keys() >= {*table.key} for table in self.tables.values())


def is_end(change: Change) -> bool:
    """Whether the table's name ended with it."""
    ends = ("DROP TABLE ", f"ALTER TABLE {change.table.name} RENAME TO ")
    return change.op is Op.SCHEMA_CHANGE and (change.ddl or "").startswith(ends)


def schema_change(old: Table, new: Table, fact: TableFact) -> Change | None:
    """The change from one shape of a table to the next; None if there is none.

    Rows may have changed unseen (`resnapshot`) when a type, the key, or how a column is computed changed, when a
    column came with a default, when one came while another went, which may have been a new name, or when one stands
    where none can stand that kept its name or was added: names were exchanged, or given anew.
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
    """Whether columns only went, or came behind the others."""
    kept = tuple(name for name in old.names if name in new.index)
    return new.names[: len(kept)] == kept


def _means(column: Column) -> tuple[str, str, bool]:
    return column.kind, column.declared, column.generated
