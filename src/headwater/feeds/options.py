"""Options: what a subscriber asked for, after it was checked; stored with the subscription as it is."""

from __future__ import annotations

from typing import Any

import msgspec

from headwater.model.formats import OBJECTS

OPS = ("insert", "update", "delete", "schema_change", "truncate")
ATOMIC, ATOMIC_STRICT = "atomic", "atomic_strict"


class Shape(msgspec.Struct, frozen=True):
    """How a change looks on the wire. Changes are encoded once per shape, whoever reads them."""

    db: str
    format: str = OBJECTS
    before: bool = False
    after: bool = False
    columns: tuple[str, ...] = ()  # images hold these only; none means all


class Shard(msgspec.Struct, frozen=True):
    """One share of `of`, by the hash of the key: work sharing."""

    index: int
    of: int


class Options(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A filter and a shape. Values of keys are kept as Lits, so that any shape of the table can read them."""

    db: str
    tables: tuple[str, ...] = ()  # none means every table, also those to come
    ops: tuple[str, ...] = ()  # none means all; tests the op as it is delivered
    pk: list[Any] | None = None
    key: bytes | None = None  # the same as bytes, in the order of the source: of a transport, nobody can ask for it
    pk_range: dict[str, Any] | None = None
    spans: list[dict[str, Any]] | None = None
    shard: Shard | None = None
    where: str | None = None
    columns: tuple[str, ...] = ()  # passes when one of these changed
    before: bool = False
    after: bool = False
    format: str = OBJECTS
    txn: str = ""  # "", "atomic" or "atomic_strict"
    query_id: str = ""  # not "": invalidations of this query are wanted, and the filter is for what triggers them
    args: list[Any] | dict[str, Any] | None = None  # of the query, as Lits
    confirm: bool = False  # an invalidation is held back where the answer is found to be the same

    @property
    def shape(self) -> Shape:
        """How its changes look."""
        return Shape(self.db, self.format, self.before, self.after, self.columns)

    @property
    def looks_at_rows(self) -> bool:
        """Whether images decide: then one change may be delivered as another op."""
        return any(part is not None for part in (self.pk, self.key, self.pk_range, self.spans, self.shard, self.where))
