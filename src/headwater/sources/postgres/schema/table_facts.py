"""What the catalogue says of tables beyond what the stream does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from headwater.sources.postgres.types import Types


class ColumnFact(msgspec.Struct, frozen=True):
    """What the catalogue says of a column beyond its type. `collation` is resolved: never `default`; "" if none."""

    nullable: bool = True
    generated: bool = False
    auto: bool = False  # identity, or a default from a sequence
    has_default: bool = False  # or its type has, or it had when it came: rows that were there before it got a value
    collation: str = ""


class TableFact(msgspec.Struct, frozen=True):
    """What the catalogue says of a table."""

    key: tuple[str, ...] = ()
    columns: Mapping[str, ColumnFact] = {}
    is_born_published: bool = False  # no row came before it was published
    is_rewritten: bool = False  # its files are not the first: it may have been unlogged, with rows that nobody was sent


class Catalogue(Protocol):
    """The catalogue, as it is now: it may be ahead of the stream, and for a moment behind it."""

    def table(self, oid: int) -> TableFact | None:
        """The facts of a table; None if it is gone."""
        ...

    def types(self) -> Types:
        """All that is known of types."""
        ...

    def settle(self, xid: int) -> None:
        """Wait until others see what transaction `xid` did: its commit is streamed before that."""
        ...
