"""The result of comparing a table with its sink, range by range. Pure."""

from __future__ import annotations

import msgspec

from headwater.errors import HeadwaterError
from headwater.model.keys.key import Span


class Digest(msgspec.Struct, frozen=True):
    """The digest of the rows of one range; equal rows give equal digests, in any order."""

    rows: int = 0
    sum: int = 0
    xor: int = 0


class Difference(msgspec.Struct, frozen=True):
    """The number of rows of one range that differ, by key."""

    missing: int = 0  # rows that only the source has
    extra: int = 0  # rows that only the sink has, or has more than once
    different: int = 0
    examples: tuple[str, ...] = ()  # some of the keys

    @property
    def rows(self) -> int:
        """Return the number of rows that differ in any way."""
        return self.missing + self.extra + self.different


class RangeReport(msgspec.Struct, frozen=True):
    """The digests of one range in source and sink."""

    span: Span
    source: Digest
    sink: Digest
    difference: Difference | None = None  # of a bad range, unless the sink advanced before it was computed

    @property
    def is_good(self) -> bool:
        """Return whether source and sink hold equal rows."""
        return self.source == self.sink


class TableReport(msgspec.Struct, frozen=True):
    """The result of comparing one table at one offset."""

    db: str
    table: str
    offset: int = 0
    ranges: tuple[RangeReport, ...] = ()
    repaired: int = 0  # number of repaired ranges
    error: HeadwaterError | None = None

    @property
    def bad(self) -> list[RangeReport]:
        """Return the ranges that differed when they were compared."""
        return [each for each in self.ranges if not each.is_good]

    @property
    def is_good(self) -> bool:
        """Return whether the sink is correct now, after any repair."""
        return self.error is None and len(self.bad) == self.repaired

    @property
    def rows(self) -> int:
        """Return the number of rows in the source."""
        return sum(each.source.rows for each in self.ranges)
