"""Facts about tables that the catalogue has and the stream lacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from headwater.sources.postgres.types import Types


class ColumnFact(msgspec.Struct, frozen=True):
    """The catalogue's facts about a column besides its type. `collation` is resolved: never `default`; "" if none."""

    nullable: bool = True
    generated: bool = False
    auto: bool = False  # identity, or a default from a sequence
    has_default: bool = False  # or its type has one, or it had one when added: existing rows got a value
    collation: str = ""


class TableFact(msgspec.Struct, frozen=True):
    """The key and column facts of a table in the catalogue, and whether rows were written unseen."""

    key: tuple[str, ...] = ()
    columns: Mapping[str, ColumnFact] = {}
    is_born_published: bool = False  # no row was written before it was published
    is_rewritten: bool = False  # not in its first file: it may have been unlogged, with rows that were not sent


class Catalogue(Protocol):
    """The catalogue as it is now: it may be ahead of the stream, and briefly behind it."""

    def table(self, oid: int) -> TableFact | None:
        """Return the facts of a table; None if it was dropped."""

    def types(self) -> Types:
        """Return the name and the base type of every type by oid."""

    def settle(self, xid: int) -> None:
        """Wait until transaction `xid` is visible to other sessions: its commit is streamed before that."""
