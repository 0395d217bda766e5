"""The validated options of a subscription, as they are stored with it."""

from __future__ import annotations

from typing import Any

import msgspec

from headwater.model.formats import OBJECTS

OPS = ("insert", "update", "delete", "schema_change", "truncate")
ATOMIC, ATOMIC_STRICT = "atomic", "atomic_strict"


class Shape(msgspec.Struct, frozen=True):
    """The wire form of changes. Each change is encoded once per shape for all readers."""

    db: str
    format: str = OBJECTS
    before: bool = False
    after: bool = False
    columns: tuple[str, ...] = ()  # the columns in images; empty: all
    hides_ddl: bool = False  # its readers are restricted to tables: no statement is shown as it was run


class Shard(msgspec.Struct, frozen=True):
    """One of `of` shards by the hash of the key, for readers that share the work."""

    index: int
    of: int


class Options(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A filter and a shape. Key values are stored as Lits, which every version of the table can read."""

    db: str
    tables: tuple[str, ...] = ()  # empty: every table, also future ones
    ops: tuple[str, ...] = ()  # empty: all; compared with the op that is delivered
    pk: list[Any] | None = None
    key: bytes | None = None  # like `pk`, as key bytes in the order of the source; set by transports only
    pk_range: dict[str, Any] | None = None
    spans: list[dict[str, Any]] | None = None
    shard: Shard | None = None
    where: str | None = None
    columns: tuple[str, ...] = ()  # an update passes if one of these changed
    before: bool = False
    after: bool = False
    format: str = OBJECTS
    txn: str = ""  # "", "atomic" or "atomic_strict"
    query_id: str = ""  # not "": deliver invalidations of this query; the filter applies to the triggering changes
    args: list[Any] | dict[str, Any] | None = None  # the arguments of the query, as Lits
    confirm: bool = False  # suppress an invalidation if the result is found to be unchanged

    @property
    def shape(self) -> Shape:
        """Return the wire form of the changes."""
        return Shape(self.db, self.format, self.before, self.after, self.columns)

    @property
    def looks_at_rows(self) -> bool:
        """Return whether the filter reads row images; then an update may be delivered as an insert or a delete."""
        return any(part is not None for part in (self.pk, self.key, self.pk_range, self.spans, self.shard, self.where))
